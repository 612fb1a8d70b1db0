"""Truth mode: float64 throughout, whatever the model's types say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import UnsupportedError
from roundoff.evaluator import TorchOnnxEvaluator

sys.path.insert(0, str(Path(__file__).parent))
from models import LAYER_NORM_MATMUL, arrays, text


def truth(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    return TorchOnnxEvaluator(model, truth=True).run(None, feeds)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), kind=st.sampled_from(["float", "float16", "bfloat16"]))
def test_a_narrow_model_is_computed_in_float64(seed: int, kind: str) -> None:
    model = text(LAYER_NORM_MATMUL.replace("float", kind))
    dtype = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[kind]
    feeds = {
        n: x.astype(dtype)
        for n, x in arrays(seed, X=(4, 16), scale=(16,), bias=(16,), W=(16, 3), B=(3,)).items()
    }
    (got,) = truth(model, feeds)
    assert got.dtype == torch.float64
    x, scale, bias, w, b = (feeds[n].astype(np.float64) for n in ("X", "scale", "bias", "W", "B"))
    n = (x - x.mean(-1, keepdims=True)) / np.sqrt(
        x.var(-1, keepdims=True) + float(np.float32(1e-5))
    )
    np.testing.assert_allclose(got.numpy(), (n * scale + bias) @ w + b, rtol=1e-12, atol=1e-12)


def test_casts_constants_and_branches_stay_wide() -> None:
    # 13653 and 14336 are the bits of 0.333251953125 and 0.5.
    body = """
    agraph (float16[n] X, bool C) => (float16[n] Y)
    {
        third = Constant <value = float16 {13653}> ()
        a = Cast <to = 1> (X)
        b = Cast <to = 10> (a)
        c = If (C) <
            then_branch = yes () => (float16[n] d) { d = Mul(b, third) },
            else_branch = no () => (float16[n] e) { e = CastLike(b, third) }
        >
        shape = Shape(c)
        half = ConstantOfShape <value = float16[1] {14336}> (shape)
        Y = Add(c, half)
    }
    """
    x = np.array([1.0000001, 70000.0, 1e-9])  # float16 would round, overflow and lose them
    for chosen, factor in ((True, 0.333251953125), (False, 1.0)):
        (got,) = truth(text(body), {"X": x, "C": np.bool_(chosen)})
        np.testing.assert_allclose(got.numpy(), x * factor + 0.5, rtol=1e-15)


@pytest.mark.parametrize("op_type", ["Softmax", "Attention"])
def test_attributes_that_ask_for_less_are_ignored(op_type: str) -> None:
    if op_type == "Softmax":
        model = text("agraph (float16[n] X) => (float16[n] Y) { Y = Softmax(X) }")
        x = np.linspace(-3, 3, 7)
        e = np.exp(x)
        np.testing.assert_allclose(truth(model, {"X": x})[0].numpy(), e / e.sum(), rtol=1e-14)
        return
    head = "agraph (float16[1,1,3,2] X) => (float16[1,1,3,2] Y)"
    model = text(head + "{ Y = Attention <softmax_precision = 10> (X, X, X) }", opset=23, ir=11)
    x = np.random.default_rng(0).standard_normal((1, 1, 3, 2))
    scores = np.exp(x[0, 0] @ x[0, 0].T / np.sqrt(2))
    expected = scores / scores.sum(-1, keepdims=True) @ x[0, 0]
    np.testing.assert_allclose(truth(model, {"X": x})[0][0, 0].numpy(), expected, rtol=1e-13)


def test_a_stash_type_is_ignored() -> None:
    body = "agraph (float[n, d] X, float[d] S) => (float[n, d] Y, float[n, k] M, float[n, k] I)"
    model = text(body + "{ Y, M, I = LayerNormalization <stash_type = 1> (X, S) }")
    x = np.random.default_rng(0).standard_normal((3, 5)) * 1e5 + 1e7
    y, mean, inverse = truth(model, {"X": x, "S": np.ones(5)})
    assert y.dtype == mean.dtype == inverse.dtype == torch.float64
    np.testing.assert_allclose(mean.numpy()[:, 0], x.mean(-1), rtol=1e-15)
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-10)


def test_quantisation_keeps_its_integers() -> None:
    body = """
    agraph (float[n] X, float S, uint8 Z) => (uint8[n] Q, float[n] Y)
    { Q = QuantizeLinear(X, S, Z) Y = DequantizeLinear(Q, S, Z) }
    """
    feeds = {"X": np.float32([0.26, 1.24, 99.0]), "S": np.float32(0.5), "Z": np.uint8(3)}
    q, y = truth(text(body), feeds)
    assert q.dtype == torch.uint8
    np.testing.assert_array_equal(q.numpy(), [4, 5, 201])
    np.testing.assert_array_equal(y.numpy(), [0.5, 1.0, 99.0])


def test_integers_are_untouched() -> None:
    model = text("agraph (int32[n] X) => (int32[n] Y) { Y = Mul(X, X) }")
    (got,) = truth(model, {"X": np.int32([2**20, 3])})
    assert got.dtype == torch.int32
    np.testing.assert_array_equal(got.numpy(), [0, 9])


def test_the_generic_kernel_of_truth_is_onnx_s_reference() -> None:
    model = text("agraph (float[2,4,4] X) => (float[2] Y) { Y = Det(X) }", opset=22, ir=10)
    evaluator = TorchOnnxEvaluator(model, truth=True)
    feeds = arrays(X=(2, 4, 4))
    (got,) = evaluator.run(None, feeds)
    assert got.dtype == torch.float64
    assert evaluator.kernels_used() == {"Det_0": "reference"}
    (plain,) = TorchOnnxEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(got.numpy(), plain.numpy(), rtol=1e-4, atol=1e-5)


DYNAMIC = (
    "agraph (float[n] X) => (uint8[n] Y, float S, uint8 Z) { Y, S, Z = DynamicQuantizeLinear(X) }"
)


def quantized(x: np.ndarray) -> list[np.ndarray]:
    """ONNX's definition of DynamicQuantizeLinear, in the type of *x*."""
    low, high = min(x.min(initial=0), 0), max(x.max(initial=0), 0)
    scale = (high - low) / x.dtype.type(255) if high > low else x.dtype.type(1)
    point = np.rint(np.clip(0 - low / scale, 0, 255))
    return [np.clip(np.rint(x / scale) + point, 0, 255), scale, point]


def test_dynamic_quantisation_is_that_of_onnx() -> None:
    rng, models = np.random.default_rng(0), text(DYNAMIC)
    ways = {np.float32: TorchOnnxEvaluator(models, kernels=["torch"]),
            np.float64: TorchOnnxEvaluator(models, truth=True)}  # fmt: skip
    plain = TorchOnnxEvaluator(models)
    for size in (0, 1, 2, 7, 500):
        for shift in (0, -3, 3, 100):
            x = (rng.standard_normal(size) * 10.0 ** rng.integers(-6, 6) + shift).astype(np.float32)
            for values in (x, 0 * x, abs(x), -abs(x)):
                for dtype, way in ways.items():
                    found = [t.numpy() for t in way.run({"X": values})]
                    for got, want in zip(found, quantized(values.astype(dtype)), strict=True):
                        np.testing.assert_array_equal(got, want)
                both = zip(
                    plain.run({"X": values}), ways[np.float32].run({"X": values}), strict=True
                )
                assert all(torch.equal(one, other) for one, other in both)


def test_dynamic_quantisation_without_a_step_has_no_truth() -> None:
    for x in ([np.nan, 1], [np.inf], [1e308, -1e308]):
        with pytest.raises(UnsupportedError, match="step beyond the type"):
            truth(text(DYNAMIC), {"X": np.float64(x)})


@pytest.mark.parametrize(
    ("graph", "text_of_it"),
    [
        ("agraph (float[n] X) => (float[n] Y) { Y = Bernoulli(X) }", "not verified"),
        ("agraph (float[n, m] X) => (float[k, m] Y) { Y = Unique <axis=0> (X) }", "with an axis"),
        ("agraph (float[1,1,6] X) => (float[1,1,k] Y)"
         "{ Y = MaxPool <kernel_shape=[1], strides=[3], auto_pad=\"SAME_UPPER\"> (X) }",
         "two readings"),
    ],
)  # fmt: skip
def test_what_is_not_verified_has_no_truth(graph: str, text_of_it: str) -> None:
    feeds = {"X": np.float32([0.25, 0.5])}
    if "Unique" in graph:
        feeds = {"X": np.ones((2, 2), np.float32)}
    if "MaxPool" in graph:
        feeds = {"X": np.ones((1, 1, 6), np.float32)}
    with pytest.raises(UnsupportedError, match=text_of_it):
        truth(text(graph), feeds)


def test_a_window_of_even_size_lies_as_onnx_defines_it() -> None:
    # No other kernel has one: ONNX Runtime refuses it, and ONNX's reference is wrong.
    model = text("agraph (float[1,4,1] X) => (float[1,4,1] Y) "
                 "{ Y = LRN <size=2, alpha=2.0, beta=1.0, bias=1.0> (X) }")  # fmt: skip
    x = np.float32([1, 2, 3, 4]).reshape(1, 4, 1)
    sums = np.float64([1 + 4, 4 + 9, 9 + 16, 16])  # a channel and the next one
    for evaluator in (TorchOnnxEvaluator(model), TorchOnnxEvaluator(model, truth=True)):
        (got,) = evaluator.run({"X": x})
        np.testing.assert_allclose(got.numpy().ravel(), x.ravel() / (1 + sums), rtol=1e-6)


def test_one_node_of_a_truth_is_wide_too() -> None:
    model = text("agraph (float[n] X) => (float[n] Y) { Y = Exp(X) }")
    (got,) = TorchOnnxEvaluator(model, truth=True).run_node(0, [np.float32([1.0])])
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), [np.e], rtol=1e-15)


def test_feeds_of_any_floating_type() -> None:
    model = text("agraph (float16[n] X) => (float16[n] Y) { Y = Neg(X) }")
    for x in (np.float64([1 / 3]), torch.tensor([1 / 3], dtype=torch.float64)):
        np.testing.assert_array_equal(truth(model, {"X": x})[0].numpy(), [-1 / 3])
