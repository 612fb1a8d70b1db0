"""Sums as a user takes them: of any length, type, order, layout and value."""

from __future__ import annotations

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.dtypes import dtype_info
from roundoff.reductions import DTYPES, binned, exact_sum, round_exact, round_to

#: Exponents of a type's smallest and largest numbers.
RANGE = {
    "float16": (-24, 15),
    "bfloat16": (-133, 127),
    "float32": (-149, 127),
    "float64": (-1074, 1023),
}
LENGTHS = [*range(10), 100, 255, 256, 257, 1000, 4097, 70_001]


def wide(n: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Values of all the type's exponents."""
    low, high = RANGE[dtype]
    return np.ldexp(rng.standard_normal(n), rng.integers(low, max(high - 12, 0), n))


def cancelling(n: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Values with their negatives, and a small rest."""
    half = round_to(wide(n // 2, dtype, rng), dtype)
    return rng.permutation(np.concatenate([half, -half, rng.standard_normal(n - 2 * (n // 2))]))


def subnormal(n: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(-1000, 1000, n) * 2.0 ** RANGE[dtype][0]


def largest(n: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Values whose running sums overflow, and whose sum may."""
    return rng.choice([-1.0, 1.0], n) * 2.0 ** RANGE[dtype][1] * rng.uniform(1, 1.9, n)


DATA = [wide, cancelling, subnormal, largest]


def bits(x: np.ndarray) -> list[int]:
    x = np.atleast_1d(x)
    return np.ascontiguousarray(x).view(f"u{x.itemsize}").ravel().tolist()


def check(x: np.ndarray, dtype: str) -> None:
    """The nearest number to the exact sum, the same in other orders."""
    total = binned(x)
    assert total.dtype == x.dtype
    assert float(total) == round_exact(exact_sum(x), dtype)
    rng = np.random.default_rng(len(x))
    others = [x[::-1], np.sort(x), *(rng.permutation(x) for _ in range(2))]
    assert {bits(binned(other))[0] for other in others} == set(bits(total))


# -- the whole range ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("draw", DATA)
def test_every_length_has_the_nearest_number_in_every_order(draw, dtype: str) -> None:
    for n in LENGTHS:
        rng = np.random.default_rng(n)
        check(round_to(draw(n, dtype, rng), dtype, storage=True), dtype)


def test_memory_does_not_grow_with_the_values() -> None:
    x = np.ones(2**22, np.float32).reshape(2, -1).T
    tracemalloc.start()
    binned(x, axis=None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6


# -- every value ----------------------------------------------------------------------------------

#: Bits of a type that stand for a large, a small or a special value more often than at random.
patterns = st.integers(0, 2**64 - 1) | st.sampled_from([0, 2**63, 2**64 - 1, 1, 2**62])


def ieee(values: list[float], dtype: str) -> float:
    """The sum by the standard's rules, of the exact one."""
    if any(map(math.isnan, values)) or {math.inf, -math.inf} <= set(values):
        return math.nan
    infinite = [v for v in values if math.isinf(v)]
    if infinite:
        return infinite[0]
    total = round_exact(sum(map(Fraction, values), Fraction(0)), dtype)
    negative = values and all(math.copysign(1, v) < 0 for v in values)
    return -0.0 if total == 0 and negative else total


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=120, deadline=None)
@given(st.lists(patterns, max_size=20), st.randoms(use_true_random=False))
def test_any_bits_add_as_ieee_has_it(dtype: str, given_bits: list[int], random) -> None:
    kind = round_to(1.0, dtype, storage=True).dtype
    width = 8 * kind.itemsize
    x = np.array([b >> (64 - width) for b in given_bits], f"u{kind.itemsize}").view(kind)
    want = ieee([float(v) for v in x], dtype)
    total = binned(x)
    assert np.array_equal(float(total), want, equal_nan=True)
    assert math.copysign(1, float(total)) == math.copysign(1, want)
    order = list(range(len(x)))
    random.shuffle(order)
    assert bits(binned(x[order])) == bits(total)
    # In a batch, and in a long row.
    assert bits(binned(np.stack([x, x[order]]))) == 2 * bits(total)
    zeros = np.full(300, -0.0, kind)
    if len(x):
        assert bits(binned(np.concatenate([zeros, x]))) == bits(total)


def test_what_goes_to_infinity_and_what_comes_back() -> None:
    assert float(binned([1.7e308] * 1000 + [-1.7e308] * 1000 + [1.0, 5e-324])) == 1.0
    # Half a unit above the largest number is a tie, which goes to infinity; less does not.
    top, half = np.finfo(float).max, 2.0**970
    assert [float(binned([top, h])) for h in (half, np.nextafter(half, 0))] == [math.inf, top]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_sum_is_rounded_once(dtype: str) -> None:
    """A tie with a last bit that float64, or float32, has no place for."""
    unit, tiny = dtype_info(dtype).eps, 2.0 ** RANGE[dtype][0]
    for tail, want in ((0.0, 1.0), (tiny, 1 + unit), (-tiny, 1.0)):
        x = round_to(np.array([1.0, unit / 2, tail]), dtype, storage=True)
        assert float(binned(x)) == want


# -- every layout ---------------------------------------------------------------------------------


def test_axes_strides_and_byte_orders() -> None:
    cube = wide(600, "float32", np.random.default_rng(2)).astype(np.float32).reshape(3, 4, 50)
    swapped = cube.astype(cube.dtype.newbyteorder())
    for array in (cube, swapped, cube[::-1, :, ::7], cube.transpose(2, 0, 1)):
        for axis in (-1, 0, (0, 2), (1, -1), None, ()):
            assert np.shape(binned(array, axis=axis)) == np.shape(np.sum(array, axis=axis))
        rows = np.moveaxis(array, 1, -1).reshape(-1, array.shape[1])
        assert bits(binned(array, axis=1)) == [bits(binned(row))[0] for row in rows.copy()]
        assert bits(binned(array, axis=None)) == bits(binned(array.ravel()))
    assert exact_sum(swapped.ravel()) == exact_sum(cube.ravel())
    assert binned(np.float32(3)) == 3
