"""Truth mode: float64 throughout, whatever the model's types say."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch

from roundoff.errors import UnsupportedError
from roundoff.evaluator import TorchOnnxEvaluator

from .models import LAYER_NORM_MATMUL, NORM_FEEDS, expected_norm, text


def truth(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    return TorchOnnxEvaluator(model, truth=True).run(None, feeds)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("float", np.float32), ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)],
)
def test_a_narrow_model_is_computed_in_float64(kind: str, dtype: Any) -> None:
    feeds = {name: x.astype(dtype) for name, x in NORM_FEEDS.items()}
    (got,) = truth(text(LAYER_NORM_MATMUL.replace("float", kind)), feeds)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), expected_norm(feeds), rtol=1e-12, atol=1e-12)


def test_casts_and_constants_stay_wide() -> None:
    # 13653 and 14336 are the bits of 0.333251953125 and 0.5.
    body = """
    agraph (float16[n] X) => (float16[n] Y)
    {
        third = Constant <value = float16 {13653}> ()
        a = Cast <to = 1> (X)
        b = Cast <to = 10> (a)
        c = Mul(b, third)
        d = CastLike(c, third)
        shape = Shape(d)
        half = ConstantOfShape <value = float16[1] {14336}> (shape)
        Y = Add(d, half)
    }
    """
    x = np.array([1.0000001, 70000.0, 1e-9])  # float16 would round, overflow and lose them
    (got,) = truth(text(body), {"X": x})
    np.testing.assert_allclose(got.numpy(), x * 0.333251953125 + 0.5, rtol=1e-15)


def test_a_stash_type_is_ignored() -> None:
    body = "agraph (float[n, d] X, float[d] S) => (float[n, d] Y, float[n, k] M, float[n, k] I)"
    model = text(body + "{ Y, M, I = LayerNormalization <stash_type = 1> (X, S) }")
    x = np.random.default_rng(0).standard_normal((3, 5)) * 1e5 + 1e7
    y, mean, inverse = truth(model, {"X": x, "S": np.ones(5)})
    centred = x - x.mean(-1, keepdims=True)
    np.testing.assert_allclose(mean[:, 0], x.mean(-1), rtol=1e-15)
    np.testing.assert_allclose(inverse[:, 0], (x.var(-1) + 1e-5) ** -0.5, rtol=1e-10)
    np.testing.assert_allclose(y, centred * inverse.numpy(), rtol=1e-10)


DYNAMIC = text(
    "agraph (float[n] X) => (uint8[n] Y, float S, uint8 Z) { Y, S, Z = DynamicQuantizeLinear(X) }"
)


@pytest.mark.parametrize(("scale", "shift"), [(0, 0), (0, -9), (1, 0), (1, 9), (1e6, -9)])
def test_dynamic_quantisation_is_that_of_onnx_runtime(scale: float, shift: float) -> None:
    x = np.random.default_rng(0).standard_normal(99) * scale + shift
    for dtype, options in ((np.float32, {}), (np.float64, {"truth": True})):
        found = TorchOnnxEvaluator(DYNAMIC, **options).run({"X": x.astype(dtype)})
        wanted = TorchOnnxEvaluator(DYNAMIC, kernels=["ort"]).run({"X": x.astype(np.float32)})
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.to(other.dtype), other, rtol=1e-6 * len(options), atol=0)


def test_quantisation_to_uint16_has_a_truth() -> None:
    graph = "(float[n] X, float S, uint16 Z) => (uint16[n] Y) { Y = QuantizeLinear(X, S, Z) }"
    x, step, zero = np.float32([-9, -0.5, 0.75, 9]), np.float32(2.0**-13), np.uint16(32768)
    (found,) = truth(text(f"agraph {graph}", opset=21), {"X": x, "S": step, "Z": zero})
    assert found.tolist() == [0, 28672, 38912, 65535]


@pytest.mark.parametrize(
    "op_type", ["HardSigmoid", "Selu", "Shrink", "Softsign", "ThresholdedRelu"]
)
def test_an_activation_of_opset_18_has_a_truth(op_type: str) -> None:
    model = text(f"g (float[n] X) => (float[n] Y) {{ Y = {op_type}(X) }}")
    feeds = {"X": np.float32([-1.5, 0.25, 2])}
    (wanted,) = TorchOnnxEvaluator(model, kernels="reference").run(feeds)
    torch.testing.assert_close(truth(model, feeds)[0].float(), wanted)


#: Graph, and why it has no truth.
NONE = [
    (
        "(float[2] X) => (float[k] Y) <float[1] s = {1.7}> "
        '{ Y = Resize<coordinate_transformation_mode="align_corners", mode="linear">(X,,s) }',
        "not verified",
    ),
    ("(float[2] X) => (float[2] Y) { Y = RandomNormalLike(X) }", "not verified"),
    ("(float[2] X) => (float[k] Y) { Y = Unique(X) }", "not verified"),
    ("(float[2] X) => (float[2] Y) { Y = Mod(X, X) }", "not verified"),
    (
        "(float[2] X) => (float[2] Y) <float two = {2.0}> "
        "{ Z = Cast<to = 17>(X) S = CastLike(two, X) Y = DequantizeLinear(Z, S) }",
        "goes through float32",
    ),
]


@pytest.mark.parametrize(("graph", "why"), NONE)
def test_what_has_no_truth_is_refused(graph: str, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        truth(text(f"agraph {graph}", opset=19), {"X": np.float32([0.25, 0.5])})


def test_dynamic_quantisation_without_a_step_has_no_truth() -> None:
    for x in ([np.nan, 1], [np.inf], [1e308, -1e308]):
        with pytest.raises(UnsupportedError, match="step beyond the type"):
            truth(DYNAMIC, {"X": np.float64(x)})
