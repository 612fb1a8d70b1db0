"""Orders, algorithms and exact sums of :mod:`roundoff.reductions`."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff import errors
from roundoff.reductions import (
    DISTRIBUTIONS,
    DTYPES,
    arrange,
    binned,
    draw_orders,
    draw_values,
    exact_sum,
    judge,
    mean,
    moments,
    neumaier,
    pairwise,
    round_exact,
    round_to,
    sequential,
)


def bits(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x)
    return x.view(f"u{x.itemsize}")


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and bool(np.array_equal(bits(a), bits(b)))


def wide(seed: int, n: int, dtype: type = np.float32) -> np.ndarray:
    """Values of both signs over many binades."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(n) * 10.0 ** rng.uniform(-6, 6, n)).astype(dtype)


# -- the study's promise: a batch has the bits of separate calls ---------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("size", [2, 8, 64, 256, 1024, 8192])
def test_batch_has_the_bits_of_separate_calls(size: int, name: str, dtype: str) -> None:
    x, orders = round_to(draw_values(name)[:size], dtype), draw_orders(size)
    assert np.array_equal(np.sort(orders, axis=1), np.tile(np.arange(size), (125, 1)))
    up = np.sort(x)
    alone = [x, up, up[::-1].copy(), *(x[order] for order in orders)]
    rows = arrange(x, orders)
    assert same_bits(rows, np.array(alone))
    assert same_bits(mean(rows, dtype), np.array([mean(v, dtype) for v in alone]))
    assert same_bits(np.array(moments(rows)), np.array([moments(v) for v in alone]).T)
    if dtype in ("float64", "float32"):
        assert same_bits(moments(x)[1], np.std(x))


# -- algorithms against their definitions ---------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 13, 64, 100, 129])
def test_pairwise_goes_to_the_leaves(n: int) -> None:
    x = wide(n, n)
    level = list(x)
    while len(level) > 1:
        odd = level[len(level) & ~1 :]
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=False)] + odd
    assert pairwise(x) == level[0]


def neumaier_loop(x: np.ndarray) -> object:
    total, kept = x[0], x.dtype.type(0)
    for v in x[1:]:
        new = total + v
        kept = kept + ((total - new) + v if abs(total) >= abs(v) else (v - new) + total)
        total = new
    return total + kept


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("n", [2, 3, 17, 1000])
def test_neumaier_is_the_textbook_loop(n: int, dtype: type) -> None:
    for seed in range(5):
        x = wide(seed, n, dtype)
        # With everything cancelled, the kept errors are the result.
        for values in (x, np.concatenate([x, -np.random.default_rng(seed).permutation(x)])):
            assert same_bits(np.asarray(neumaier(values)), np.asarray(neumaier_loop(values)))
    assert neumaier(x[:1]) == x[0]


@pytest.mark.parametrize("add", [sequential, pairwise, neumaier, binned])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("n", [1, 2, 3, 100, 512])
def test_a_row_is_added_as_if_alone(add: Any, dtype: type, n: int) -> None:
    rows = np.stack([wide(seed, n, dtype) for seed in range(12)])
    found = add(rows)
    assert same_bits(found, np.array([add(row) for row in rows]))
    assert same_bits(add(rows.reshape(3, 4, n)), found.reshape(3, 4))


@pytest.mark.parametrize("low", [1, 1954, 2**26, 2**27 - 1, 2**27, 2**51])
@pytest.mark.parametrize("sign", [0, 2**63])
def test_a_nan_stays_one_whatever_its_payload(low: int, sign: int) -> None:
    nan = np.array([sign | 0x7FF0000000000000 | low], np.uint64).view(np.float64)
    for rest in ([], np.ones(400), [math.inf], [1e308, 1e308]):
        assert np.isnan(binned(np.concatenate([nan, rest])))


def test_an_exact_sum_of_whole_numbers_is_exact_or_refused() -> None:
    assert exact_sum(np.array([2**53, 2**53])) == 2**54
    assert exact_sum([True, True]) == 2
    with pytest.raises(errors.ArgumentError, match="whole numbers"):
        exact_sum([2**53 + 1])
    with pytest.raises(errors.ArgumentError, match="masked"):
        exact_sum(np.ma.masked_array([1.0, 2.0], [False, True]))


def test_float64_comes_to_bfloat16_in_one_rounding() -> None:
    """``ml_dtypes`` goes by float32, in which what is just above a tie is the tie."""
    above = [1 + 2.0**-8 + 2.0**-40, 3.4e38, 2.0**-134 * (1 + 2.0**-30), 1e300, 0.0]
    for value in [*above, *np.negative(above).tolist()]:
        found = float(round_to(value, "bfloat16"))
        assert found == round_exact(Fraction(value), "bfloat16")
        assert math.copysign(1, found) == math.copysign(1, value)
    assert np.isnan(round_to(math.nan, "bfloat16"))


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=300)
def test_round_exact_is_a_cast(value: float) -> None:
    for dtype in DTYPES:
        assert round_exact(Fraction(value), dtype) == round_to([value], dtype)[0]


# -- truth and bounds -----------------------------------------------------------------------------


def test_judge_tells_spread_and_error_apart() -> None:
    unit = 2.0**-23
    results = np.array([1.0, 1.0 + 2 * unit, 1.0 + 2 * unit], np.float32)
    found = judge(results, Fraction(1) + Fraction(5, 2) * Fraction(unit), "float32")
    assert found == {"distinct": 2, "spread ulp": 2.0, "error ulp": 2.5, "median ulp": 0.5}
    assert judge([1 / 3], Fraction(1, 3), "float64")["error ulp"] == pytest.approx(1 / 3)
    lost = judge(np.array([1.0, np.inf], np.float32), Fraction(1), "float32")
    assert lost.pop("distinct") == 2
    assert all(map(math.isnan, lost.values()))
