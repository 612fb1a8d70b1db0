"""A calibrated tolerance: what it allows, how often it fails fresh inputs, when there is none."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from roundoff.compare import Calibration, calibrated_tolerance
from roundoff.errors import ArgumentError

DRAWS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "Rayleigh": lambda rng, n: rng.rayleigh(2, n),
    "Pareto, index 3": lambda rng, n: rng.pareto(3, n),
    "multiples of a last place": lambda rng, n: rng.poisson(0.3, n).astype(float),
    "mostly nothing": lambda rng, n: np.where(rng.random(n) < 0.3, rng.exponential(1, n), 0),
}


def of_scores(scores: np.ndarray) -> Calibration:
    """A calibration of inputs with these scores, in float32 around 1."""
    calibration = Calibration()
    one = np.ones(1, np.float32)
    calibration.add([(one.astype(np.float64) * (1 + 2 * scores[0] * 2.0**-23), one)])
    assert calibration.scores == pytest.approx([scores[0]])
    calibration.scores = [float(s) for s in scores]
    return calibration


@pytest.mark.parametrize("count", [33, 300])
@pytest.mark.parametrize("name", DRAWS)
def test_fresh_scores_exceed_it_as_rarely_as_it_says(name: str, count: int) -> None:
    rng = np.random.default_rng(5)
    shares = []
    for _ in range(60):
        found = of_scores(DRAWS[name](rng, count)).tolerance()
        if found.found:
            shares.append(np.mean(DRAWS[name](rng, 3000) > found.rtol / 2.0**-23))
    assert shares  # for the others it asks for more inputs
    assert np.mean(shares) <= 1 / 300


def test_the_floor_is_a_unit_in_the_last_place_of_each() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(100).to(dtype)
        found = calibrated_tolerance([(x, x)] * 16)
        assert 2 <= found.rtol / torch.finfo(dtype).eps < 2.2
        assert found.allows(torch.nextafter(x.float(), torch.tensor(9.0)).to(dtype), x)
        tiny = torch.zeros(1, dtype=dtype)
        assert calibrated_tolerance([(tiny, tiny)] * 16).atol > 0


def test_what_is_allowed_is_what_numpy_and_torch_allow() -> None:
    x = np.random.default_rng(0).standard_normal((20, 50)).astype("float32")
    found = calibrated_tolerance(zip(x, x * np.float32(1 + 1e-6), strict=True))
    for size in (0.9, 1.1):
        b = x[0].astype("float64")
        a = b + size * (found.atol + found.rtol * np.abs(b))
        assert found.allows(a, b) == np.allclose(a, b, rtol=found.rtol, atol=found.atol)
        assert found.allows(a, b) == (size < 1)
    for pair in itertools.product(np.array([np.nan, np.inf, -np.inf, 0.0, 1.0]), repeat=2):
        assert found.allows(*pair) == np.array_equal(*pair, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    # The squares of the last two overflow, or vanish.
    [*((np.float32, e) for e in (-60, -24, 0, 2, 60)), (np.float64, -1000), (np.float64, 1000)],
)
def test_at_any_scale_the_verdict_is_that_of_the_scale_of_the_calibration(
    dtype: type, exponent: int
) -> None:
    rng = np.random.default_rng(3)
    x, unit = rng.standard_normal((40, 64, 16)).astype(dtype), np.finfo(dtype).eps
    near = x * (1 + 3 * unit * rng.uniform(-1, 1, x.shape)).astype(dtype)
    found = calibrated_tolerance(zip(near[:33], x[:33], strict=True))
    assert found.found
    for got, expected in zip(near[33:], x[33:], strict=True):
        got, expected = np.ldexp(got, exponent), np.ldexp(expected, exponent)
        assert found.allows(got, expected, any_scale=True)
        assert not found.allows(got * dtype(1 + 1000 * unit), expected, any_scale=True)
        assert not found.allows(0 * expected, expected, any_scale=True)
        assert found.allows(0 * expected, expected) == (exponent < -20)


def test_at_any_scale_an_infinity_allows_nothing_else_and_a_subnormal_its_last_place() -> None:
    found = calibrated_tolerance([(np.ones(4, np.float32), np.ones(4, np.float32))] * 33)
    expected = np.array([np.inf, -np.inf, 1, 2], np.float32)
    assert found.allows(expected, expected, any_scale=True)
    for got in np.where(np.eye(4), np.float32(1.5), expected):
        assert not found.allows(got, expected, any_scale=True)
    expected = np.full(4, 2.0**-145, np.float32)
    assert found.allows(expected + np.float32(2.0**-149), expected, any_scale=True)
    assert not found.allows(0 * expected, expected, any_scale=True)


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([], "there are no results"),
        ([(np.ones(2), np.ones(2))] * 15, "15 inputs: at least 16"),
        ([(np.arange(3), np.arange(3))] * 40, "int64: count the elements that differ"),
        ([(np.array([1, np.nan]), np.ones(2))] * 40, "NaN or infinite where the other is not"),
        ([(np.full(2, np.nan), np.full(2, np.nan))] * 40, "no result is finite"),
        ([(np.float32([1.0]), np.float32([1.1]))] * 40, "more than rounding alone explains"),
        ([(np.float32([3e-45]), np.float32([1e-44]))] * 40, "underflow in float32"),
        ([(np.ones(2), np.ones(2)), (np.ones(2), np.arange(2))] * 20, "float64 and int64: count"),
    ],
)
def test_where_none_can_be_defended_it_says_why(pairs: list, text: str) -> None:
    found = calibrated_tolerance(pairs)
    assert not found.found
    assert text in str(found)
    assert math.isnan(found.rtol)
    with pytest.raises(ArgumentError, match="no tolerance"):
        found.allows(np.ones(2), np.ones(2))


def test_a_tail_that_reaches_too_far_asks_for_more_inputs() -> None:
    rng = np.random.default_rng(0)
    scores = np.where(rng.random(33) < 0.5, 0.0, 9 * rng.random(33))
    found = of_scores(scores).tolerance()
    assert not found.found
    assert "calibrate on 300 inputs" in found.reason
    assert of_scores(np.tile(scores, 10)).tolerance().found
