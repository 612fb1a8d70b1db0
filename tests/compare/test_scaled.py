"""The one unit of a tensor's error: smooth, free of the scale, and computed by pieces."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.compare import ScaledError, pieces, scaled_error
from roundoff.dtypes import dtype_info, onnx_dtype_to_np_dtype
from roundoff.errors import ArgumentError

TYPES = ("float32", "float16", "bfloat16")


def numpy_type(name: str) -> np.dtype:
    return onnx_dtype_to_np_dtype(dtype_info(name).onnx)


def plain(truth: np.ndarray, got: np.ndarray) -> ScaledError:
    """The definition, in NumPy."""
    errors = got.astype(np.float64) - truth
    unit = dtype_info(got.dtype).eps * np.sqrt(np.mean(truth**2))
    return ScaledError(
        np.abs(errors).max() / unit,
        np.sqrt(np.mean(errors**2)) / unit,
        errors.mean() / unit,
        np.abs(errors).max(),
    )


@given(st.sampled_from(TYPES), st.integers(1, 400), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_it_is_what_the_definition_says(name: str, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(size)
    got = (truth * (1 + 0.01 * rng.standard_normal(size))).astype(numpy_type(name))
    assert scaled_error(truth, got) == pytest.approx(plain(truth, got), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("size", [1, pieces.PIECE, 3 * pieces.PIECE + 5])
def test_pieces_of_any_number_and_stride(size: int) -> None:
    rng = np.random.default_rng(3)
    truth = rng.standard_normal((size, 2))
    got = truth.astype(np.float32)
    for t, g in ((truth, got), (truth.T, got.T), (truth[::-1], got[::-1])):
        assert scaled_error(t, g) == pytest.approx(plain(t, g), rel=1e-12)


def test_bfloat16_and_the_type_of_another() -> None:
    truth = torch.linspace(1, 2, 1000, dtype=torch.float64)
    narrow = truth.to(torch.bfloat16)
    inside = scaled_error(truth, narrow)
    assert 0.25 < inside.largest < 0.71
    assert scaled_error(truth, narrow.float(), dtype="bfloat16") == inside
    assert scaled_error(truth.numpy(), truth.numpy().astype(ml_dtypes.bfloat16)) == inside


def test_several_tensors() -> None:
    rng = np.random.default_rng(0)
    truths = [rng.standard_normal(10), 100 * rng.standard_normal((3, 30))]
    results = [(t * 1.000_1).astype(np.float32) for t in truths]
    one, two = map(scaled_error, truths, results)
    both = scaled_error({"a": truths[0], "b": (truths[1], None)}, results)
    assert (both.largest, both.abs) == (max(one.largest, two.largest), two.abs)
    assert both.mean == pytest.approx((10 * one.mean + 90 * two.mean) / 100)
    assert both.rms == pytest.approx(math.sqrt((10 * one.rms**2 + 90 * two.rms**2) / 100))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_result_that_is_not_finite(bad: float) -> None:
    found = scaled_error(np.ones(3), np.float32([1, bad, 1]))
    assert found[:2] == (math.inf, math.inf)
    assert math.isnan(found.mean)
    assert found.abs == math.inf


def test_a_truth_of_zeros_and_of_nothing() -> None:
    for zero in np.zeros(4), np.zeros((0, 3)):
        assert scaled_error(zero, np.float32(zero)) == (0, 0, 0, 0)
    found = scaled_error(np.zeros(2), np.float32([0, -0.5]))
    assert found == (math.inf, math.inf, -math.inf, 0.5)


def test_dicts_are_paired_by_key() -> None:
    one, two = np.full(4, 1.0), np.full(4, 3.0)
    truth = {"a": one, "b": [{"c": two, "d": 2 * two}]}
    got = {"b": [{"d": np.float32(2 * two), "c": np.float32(two)}], "a": np.float32(one)}
    assert scaled_error(truth, got).largest == 0
    with pytest.raises(ArgumentError, match="different keys"):
        scaled_error(truth, {"a": got["a"], "x": got["b"]})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    truth = torch.linspace(-1, 3, pieces.PIECE_GPU + 7, dtype=torch.float64)
    got = truth.to(torch.bfloat16)
    here, there = scaled_error(truth, got), scaled_error(truth.cuda(), got.cuda())
    assert there == pytest.approx(here, rel=1e-12)
    assert scaled_error(truth, got.cuda()) == here


@pytest.mark.parametrize(
    ("truth", "got"),
    [
        ([1e-10, 1e-10], [1e200, 1e-10]),
        ([1e180, 1e180], [0.0, 1e180]),
        ([1e-300, 1e-300], [1.0, 1e-300]),
        ([1.0, 1e-200], [1.0, 3e-200]),
    ],
)
def test_an_error_may_have_another_magnitude_than_its_truth(
    truth: list[float], got: list[float]
) -> None:
    """One of two results is wrong: the RMS error is the largest over the root of two."""
    pair = (torch.tensor(values, dtype=torch.float64) for values in (truth, got))
    error = scaled_error(*pair, dtype="float32")
    assert 0 < error.largest < math.inf
    assert math.isclose(error.rms, error.largest / math.sqrt(2), rel_tol=1e-12)
