"""The tolerance against measured errors: never below them, and not far above."""

from fractions import Fraction

import numpy as np
import pytest

from roundoff.compare import tolerance
from roundoff.errors import ArgumentError, DtypeError


def sums(
    terms: int, samples: int, dtype: type, seed: int, low: float
) -> tuple[np.ndarray, np.ndarray]:
    """Errors over Σ|x y| of inner products summed term after term, and condition numbers.

    Operands lie in ±[0.25, 1), or in [0.25, 1) where *low* is positive: nothing underflows.
    """
    rng = np.random.default_rng(seed)
    x, y = (rng.uniform(0.25, 1, (terms, samples)) for _ in range(2))
    if low < 0:
        x *= rng.choice([-1, 1], x.shape)
    x, y = x.astype(dtype), y.astype(dtype)
    total = np.zeros(samples, dtype)
    for i in range(terms):
        total = (total + (x[i] * y[i]).astype(dtype)).astype(dtype)
    wide = x.astype(np.float64) * y.astype(np.float64)
    size, exact = np.abs(wide).sum(0), wide.sum(0)
    return np.abs(total.astype(np.float64) - exact) / size, size / np.abs(exact)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("terms", [1, 7, 128, 1024])
@pytest.mark.parametrize("low", [-1.0, 0.25])
def test_no_error_is_above_the_bounds(dtype: type, terms: int, low: float) -> None:
    errors, condition = sums(terms, 2000, dtype, 0, low)
    assert errors.max() <= tolerance(dtype, terms)
    for confidence in (0.5, 0.9, 0.999):
        bound = tolerance(dtype, terms, confidence=confidence)
        assert np.mean(errors <= bound) >= confidence
        relative = [tolerance(dtype, terms, condition=max(c, 1), confidence=confidence)
                    for c in condition[:200]]  # fmt: skip
        slack = 1 + 1e-12  # the division that made the condition number
        assert np.mean(errors[:200] * condition[:200] <= np.array(relative) * slack) >= confidence


def test_the_probabilistic_bound_is_not_vacuous() -> None:
    errors, _ = sums(4096, 1000, np.float32, 1, 0.25)
    bound = tolerance(np.float32, 4096, confidence=0.99)
    measured = float(np.quantile(errors, 0.99))
    assert measured < bound < 10 * measured
    assert bound < tolerance(np.float32, 4096) / 8


def test_the_deterministic_bound_is_almost_reached() -> None:
    # 1 + u + u + ...: each addition is a tie that goes back to 1.
    terms, u = 1000, 2.0**-24
    values = [np.float32(1)] + [np.float32(u)] * (terms - 1)
    total = np.float32(0)
    for v in values:
        total = np.float32(total + v)
    exact = sum(Fraction(float(v)) for v in values)
    error = float(abs(Fraction(float(total)) - exact) / exact)
    assert 0.99 * tolerance("float32", terms) < error <= tolerance("float32", terms)


def test_wide_accumulation_and_narrow_operands() -> None:
    half, single = 2.0**-11, 2.0**-24
    assert tolerance("float16", 100, "float32") == pytest.approx(half + 100 * single, rel=1e-3)
    assert tolerance("float32", 100, "float32") == 100 * single
    tf32 = tolerance("float32", 100, operands="tf32")
    assert tf32 == pytest.approx(2 * 2.0**-10, rel=0.02)
    assert tolerance("float32", 100, operands="bfloat16") > 2 * 2.0**-8
    assert tolerance("float32", 100, condition=10) == 1000 * single


def test_tf32_errors_keep_within() -> None:
    rng = np.random.default_rng(2)
    x, y = (rng.uniform(-1, 1, (512, 300)).astype(np.float32) for _ in range(2))
    mask = np.uint32(0xFFFFE000)  # 10 explicit bits of the significand
    cut = [(a.view(np.uint32) & mask).view(np.float32) for a in (x, y)]
    total = np.zeros(300, np.float32)
    for i in range(512):
        total += cut[0][i] * cut[1][i]
    wide = x.astype(np.float64) * y
    errors = np.abs(total - wide.sum(0)) / np.abs(wide).sum(0)
    assert errors.max() <= tolerance("float32", 512, operands="tf32")
    assert errors.max() > tolerance("float32", 512)  # the bound for float32 alone is broken


def test_monotone() -> None:
    grid = [tolerance("float32", n, confidence=c) for c in (0.9, 0.99) for n in (10, 100, 10_000)]
    assert grid[:3] == sorted(grid[:3])
    assert grid[:3] <= grid[3:]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"terms": 0}, ArgumentError, "at least 1"),
        ({"terms": 2.5}, ArgumentError, "count the products"),
        ({"terms": 3, "condition": 0.5}, ArgumentError, "condition"),
        ({"terms": 3, "confidence": 1.0}, ArgumentError, "between 0 and 1"),
        ({"terms": 3, "accumulate": "int32"}, DtypeError, "got int32"),
    ],
)
def test_bad_arguments(arguments: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        tolerance("float32", **arguments)
