"""The tolerance against measured errors: never below them, and not far above."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.compare import tolerance, tolerance_used
from roundoff.compare.calibration import _rounded_up
from roundoff.reductions import tensor_core_matmul

SINGLE = 2.0**-24


def test_the_deterministic_bound_is_almost_reached() -> None:
    # 1 + u + u + ...: each addition is a tie that goes back to 1.
    values = np.float32([1] + [SINGLE] * 999)
    total = functools.reduce(np.add, values)
    exact = values.sum(dtype=np.float64)
    assert 0.99 * tolerance("float32", 1000) < (exact - total) / exact <= tolerance("float32", 1000)


def test_wide_accumulation_and_narrow_operands() -> None:
    half = 2.0**-11
    assert tolerance("float16", 100, "float32") == pytest.approx(half + 100 * SINGLE, rel=1e-3)
    assert tolerance("float32", 100, "float32") == 100 * SINGLE
    tf32 = tolerance("float32", 100, operands="tf32")
    assert tf32 == pytest.approx(2 * 2.0**-10, rel=0.02)
    assert tolerance("float32", 100, operands="bfloat16") > 2 * 2.0**-8
    assert tolerance("float64", 1, operands="float64") == 3 * 2.0**-53


def truncated(a: np.ndarray, b: np.ndarray, block: int, bits: int = 24) -> tuple:
    """|error| of the simulated tensor core, and Σ|x w|; the operands are float16 numbers.

    Their products and sums are exact in float64 where exponents lie within 2**±5 or so.
    """
    wide = a.astype(np.float64), b.astype(np.float64)
    got = tensor_core_matmul(a, b, block=block, bits=bits)
    return np.abs(got - wide[0] @ wide[1]), np.abs(wide[0]) @ np.abs(wide[1])


BLOCKS = st.sampled_from([1, 4, 8, 16])


@given(st.integers(1, 700), BLOCKS, st.integers(24, 26), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_truncation_stays_below_its_bound(
    terms: int, block: int, bits: int, signs: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    a = rng.uniform(0.05, 1, (8, terms)) * (rng.choice([-1, 1], (8, terms)) if signs else 1)
    b = rng.standard_normal((terms, 8)) if signs else rng.uniform(0, 1, (terms, 8))
    error, size = truncated(a.astype(np.float16), b.astype(np.float16), block, bits)
    assert (error <= tolerance("float32", terms, rounding="truncation") * size).all()


@given(st.integers(2, 3000), BLOCKS)
@settings(max_examples=40, deadline=None)
def test_truncation_almost_reaches_its_bound(terms: int, block: int) -> None:
    # After 1 each term is almost the last place of the sum, and is cut.
    u = SINGLE
    almost = 2 * u * (1 - 2.0**-11)  # 11 bits
    a = np.array([[1] + [almost * 2.0**12] * (terms - 1)], np.float16)  # no float16 is so small
    b = np.array([[1]] + [[2.0**-12]] * (terms - 1), np.float16)
    error, size = truncated(a, b, block)
    bound = tolerance("float32", terms, rounding="truncation") * size
    assert 0.998 * (terms - 1) / terms * bound < error <= bound
    if terms > 2:
        assert error > tolerance("float32", terms) * size  # 2 u is needed, u is not enough


def test_truncation_with_converted_operands_and_a_narrow_result() -> None:
    rng = np.random.default_rng(8)
    a, b = (rng.standard_normal(shape) for shape in ((64, 500), (500, 64)))
    exact, size = a @ b, np.abs(a) @ np.abs(b)
    for step in ({"block": 4}, {"gpu": "H100"}):  # rounded to TF32, and cut
        got = tensor_core_matmul(a.astype(np.float32), b.astype(np.float32), **step)
        bound = tolerance("float32", 500, operands="tf32", rounding="truncation")
        assert (np.abs(got - exact) <= bound * size).all()
    half = tensor_core_matmul(a.astype(np.float16), b.astype(np.float16)).astype(np.float16)
    bound = tolerance("float16", 500, "float32", operands="float16", rounding="truncation")
    assert (np.abs(half - exact) <= bound * size).all()


def test_the_part_of_a_tolerance_that_was_used() -> None:
    a = np.float32([[1, -2], [3, 0]])
    b = a + np.float32([[0, 0.5], [-0.25, 0]])
    size = np.array([[1, 2], [0.5, 0]])
    assert tolerance_used(a, b, size, 0.5) == 0.5  # 0.25 / (2 × 0.5 × 0.5) and 0.5 / 2
    assert tolerance_used(b.T, a.T, size.T, 0.25) == 1
    assert tolerance_used(a, a, 0 * size, 0.25) == 0
    assert tolerance_used(a[:0], b[:0], size[:0], 0.25) == 0
    tensors = [torch.from_numpy(x) for x in (a, b)]
    assert tolerance_used(*tensors, torch.from_numpy(size).bfloat16(), 0.25) == 1
    size[0, 1] = 0
    assert tolerance_used(a, b, size, 0.25) == math.inf
    for bad in (math.nan, math.inf):
        b[0, 0] = bad
        assert tolerance_used(a, b, np.ones((2, 2)), 1.0) == math.inf
    most = np.array([1e308, 1.0])
    assert 0 < tolerance_used(most, 0.9 * most, most, 10.0) < 1  # 2 tol size overflows


def test_subnormal_results_may_be_one_number_apart() -> None:
    # 2 tol size is below the smallest number there: rounding alone is more.
    size = np.full(4, 2.0**-24 * 3)
    a = size.astype(np.float16)
    b = np.nextafter(a, np.float16(1))
    assert tolerance_used(a, b, size, tolerance("float16", 1)) == 1
    assert tolerance_used(a, b + (b - a), size, tolerance("float16", 1)) == 2


@given(st.floats(0, 1e300))
def test_rounding_up_never_goes_below(value: float) -> None:
    up = _rounded_up(value)
    assert value <= up
    assert _rounded_up(up) == up
    if value > 1e-300:
        assert up <= value * 1.1 * (1 + 1e-15)
