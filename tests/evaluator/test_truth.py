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

from roundoff.errors import UnsupportedError
from roundoff.evaluator import TorchOnnxEvaluator

sys.path.insert(0, str(Path(__file__).parent))
from models import LAYER_NORM_MATMUL, arrays, text


def truth(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    return TorchOnnxEvaluator(model, truth=True).run(None, feeds)


@pytest.mark.parametrize("kind", ["float", "float16", "bfloat16"])
def test_a_narrow_model_is_computed_in_float64(kind: str) -> None:
    model = text(LAYER_NORM_MATMUL.replace("float", kind))
    dtype = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[kind]
    feeds = {
        n: x.astype(dtype)
        for n, x in arrays(X=(4, 16), scale=(16,), bias=(16,), W=(16, 3), B=(3,)).items()
    }
    (got,) = truth(model, feeds)
    assert got.dtype == torch.float64
    x, scale, bias, w, b = (feeds[n].astype(np.float64) for n in ("X", "scale", "bias", "W", "B"))
    n = (x - x.mean(-1, keepdims=True)) / np.sqrt(
        x.var(-1, keepdims=True) + float(np.float32(1e-5))
    )
    np.testing.assert_allclose(got.numpy(), (n * scale + bias) @ w + b, rtol=1e-12, atol=1e-12)


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
    q, y = truth(text(body), feeds | {"S": np.float64(0.1)})
    np.testing.assert_array_equal(y.numpy(), (q.numpy().astype(float) - 3) * 0.1)


DYNAMIC = (
    "agraph (float[n] X) => (uint8[n] Y, float S, uint8 Z) { Y, S, Z = DynamicQuantizeLinear(X) }"
)


@pytest.mark.parametrize("shift", [0, -9, 9])
@pytest.mark.parametrize("scale", [0, 1, 1e6])
def test_dynamic_quantisation_is_that_of_onnx(shift: float, scale: float) -> None:
    model, x = text(DYNAMIC), np.random.default_rng(0).standard_normal(99) * scale + shift
    narrow = {"X": x.astype(np.float32)}
    ways = [TorchOnnxEvaluator(model, kernels=[k]).run(narrow) for k in ("torch", "ort")]
    assert all(torch.equal(one, other) for one, other in zip(*ways, strict=True))
    low, high = min(x.min(), 0), max(x.max(), 0)
    step = (high - low) / 255 or 1
    point = np.rint(np.clip(0 - low / step, 0, 255))
    expected = [np.clip(np.rint(x / step) + point, 0, 255), step, point]
    for got, want in zip(truth(model, {"X": x}), expected, strict=True):
        np.testing.assert_array_equal(got, want)


#: What ONNX's suite has no case of in these versions: constants, and a node of X.
BEYOND = [
    (
        ", int64[2] s = {9, 3}, int64[2] e = {-9, 0}, int64[2] a = {1, 2}, int64[2] d = {-2, -1}",
        "Slice(X, s, e, a, d)",
    ),
    (", int64[1] s = {-2}, int64[1] e = {-5}, int64[1] d = {-1}", "Slice(X, s, e, d, d)"),
    (", int64[2] i = {0, -1}", "Gather<axis = 1>(X, i)"),
]


@pytest.mark.parametrize(("constants", "node"), BEYOND)
def test_torch_and_truth_give_what_onnx_runtime_gives(constants: str, node: str) -> None:
    inputs = "float[2, 3, 5, 7] X, float[4, 3, 2, 4] W"
    model = text(f"agraph ({inputs}) => (float[] Y) <int64 z = {{0}}{constants}> {{ Y = {node} }}")
    feeds = arrays(X=(2, 3, 5, 7), W=(4, 3, 2, 4))
    (wanted,) = TorchOnnxEvaluator(model, kernels=["ort"]).run(feeds)
    plain, (true,) = TorchOnnxEvaluator(model), truth(model, feeds)
    torch.testing.assert_close(plain.run(feeds)[0], wanted, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(true, wanted.double(), rtol=2e-5, atol=2e-5)
    assert set(plain.kernels_used().values()) == {"torch"}


@pytest.mark.parametrize("place", ["half_pixel", "asymmetric"])
@pytest.mark.parametrize(
    "how",
    ['mode="linear"', 'mode="cubic"', 'mode="cubic", exclude_outside=1']
    + [f'mode="nearest", nearest_mode="{to}"' for to in ("floor", "ceil", "round_prefer_floor")],
)
def test_a_resized_picture_is_that_of_onnx_runtime(place: str, how: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 7)).astype(np.float32)
    for scale in (2.0, 0.5, 1.7):  # by 0.6 a place falls on a border, where float32 decides
        model = text(
            "agraph (float[2,3,5,7] X) => (float[a,b,c,d] Y) "
            f"<float[4] s = {{1.0, 1.0, {scale}, {scale}}}> "
            f'{{ Y = Resize<{how}, coordinate_transformation_mode="{place}">(X,,s) }}'
        )
        (wanted,) = TorchOnnxEvaluator(model, kernels=["ort"]).run({"X": x})
        (got,) = truth(model, {"X": x})
        assert got.dtype == torch.float64
        torch.testing.assert_close(got.float(), wanted, rtol=1e-5, atol=1e-5)


def test_what_has_no_truth_is_refused() -> None:
    corners = 'Resize<coordinate_transformation_mode="align_corners", mode="linear">(X,,s)'
    with pytest.raises(UnsupportedError, match="not verified"):
        truth(
            text(f"agraph (float[4] X) => (float[k] Y) <float[1] s = {{1.7}}> {{ Y = {corners} }}"),
            {"X": np.ones(4, np.float32)},
        )
    branch = """agraph (float[2] X, bool C) => (float[2] Y) { Y = If (C) <
        then_branch = yes () => (float[2] A) { A = Neg(X) },
        else_branch = no () => (float[2] B) { B = Identity(X) }> }"""
    with pytest.raises(UnsupportedError, match="no kernel for If"):
        TorchOnnxEvaluator(text(branch), truth=True)
    random = text("agraph (float[n] X) => (float[n] Y) { Y = RandomNormalLike(X) }")
    feeds = {"X": np.float32([0.25, 0.5])}
    with pytest.raises(UnsupportedError, match="not verified"):
        truth(random, feeds)
    narrow = "{ Z = Cast<to = 17>(X) S = CastLike(two, X) Y = DequantizeLinear(Z, S) }"
    for body, why in (
        ("(float[k] Y) { Y = Unique(X) }", "not verified"),
        ("(float[n] Y) { Y = Mod(X, X) }", "not verified"),
        (f"(float[n] Y) <float two = {{2.0}}> {narrow}", "goes through float32"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            truth(text(f"agraph (float[n] X) => {body}", opset=19), feeds)
    integers = "agraph (int32[n] X) => (int32[n] Z) { Y = Abs(X) Z = Mul(Y, X) }"
    (got,) = truth(text(integers), {"X": np.int32([2**20, -3])})
    assert got.dtype == torch.int32
    np.testing.assert_array_equal(got, [0, -9])


def test_dynamic_quantisation_without_a_step_has_no_truth() -> None:
    for x in ([np.nan, 1], [np.inf], [1e308, -1e308]):
        with pytest.raises(UnsupportedError, match="step beyond the type"):
            truth(text(DYNAMIC), {"X": np.float64(x)})
