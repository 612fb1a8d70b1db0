"""Comparisons of models that a user has: quantised, with scales of their own, wrong in both."""

import onnx.parser
import pytest
import torch

from roundoff.errors import RoundoffError, UnsupportedError
from roundoff.evaluator import TorchOnnxEvaluator
from roundoff.runtimes import compare_runtimes

CPU = ["CPUExecutionProvider"]
X = torch.ones(2, 3)


def test_a_model_whose_feeds_have_scales_of_their_own() -> None:
    """As quantize_dynamic of ONNX Runtime writes it."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[4, 8] X) => (float[4, 8] Z) '
        "{ Q, s, z = DynamicQuantizeLinear(X)  Z = DequantizeLinear(Q, s, z) }"
    )
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    (got,) = TorchOnnxEvaluator(model).run(None, {"X": x})
    assert (got - x).abs().max() <= (x.max() - x.min()) / 255
    found = compare_runtimes(model, {"X": x}, providers=CPU, calibration=0)
    assert "first differs at node: none" in str(found)
    assert "quantised" in str(found)
    found = compare_runtimes(model, {"X": x}, providers=CPU, calibration=0, module=lambda x: x)
    assert 1e-4 < found.quantization.total < 1e-2


def test_a_model_without_a_truth_is_refused_by_the_name_of_its_operator() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[4, 8] X) => (float[k, 8] Z) '
        "{ Z = Unique<axis=0>(X) }"
    )
    with pytest.raises(UnsupportedError, match=r"no float64 truth.*Unique.*max_diff"):
        compare_runtimes(model, {"X": torch.ones(4, 8)}, providers=CPU, calibration=0)


def test_an_overflow_in_float16_is_named_with_its_node() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float16[n, 8] X) => (float16[n, 8] Z) '
        "{ Y = Mul(X, X)  W = Sub(Y, Y)  Z = Add(W, X) }"
    )
    feeds = {"X": torch.full((2, 8), 300).half()}
    found = compare_runtimes(model, feeds, providers=CPU)
    # ONNX Runtime computes float16 in float32 on a CPU, node for node it overflows, too.
    assert "first NaN or infinity: Mul_0 (Mul -> Y), in torch and ORT" in str(found)
    assert "a Cast to float32 before it" in found.advice[0]


def test_equal_bits_that_are_both_wrong_are_no_nothing() -> None:
    """An underflow, a cancellation, a sum that swallows: the same in both runtimes."""
    for text, x in (
        ("float16[4] X) => (float16[4] Z) { Z = Mul(X, X) }", torch.full((4,), 1e-4).half()),
        (
            "float[4] X) => (float[4] Z) <float c = {1e8}> { Y = Add(X, c)  Z = Sub(Y, c) }",
            X[0, :1],
        ),
    ):
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> g ({text}')
        feeds = {"X": x.expand(4) * 1.3}
        told = compare_runtimes(model, feeds, providers=CPU, calibration=0).advice
        assert not any(sentence.startswith("Nothing") for sentence in told)
        assert any("both are wrong" in sentence for sentence in told)


def adds(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1).exp()


def draws(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + 1e-3 * torch.rand(x.shape)


def test_a_module_neither_writes_into_the_feeds_nor_draws() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[2, 3] x) => (float[2, 3] Z) '
        "<float[1] c = {1.0}> { Y = Add(x, c)  Z = Exp(Y) }"
    )
    feeds = {"x": X.clone()}
    found = compare_runtimes(model, feeds, providers=CPU, calibration=0, module=adds)
    assert torch.equal(feeds["x"], X)
    assert found.outputs["error module"].max() < 2
    with pytest.raises(RoundoffError, match="draws random numbers"):
        compare_runtimes(model, feeds, providers=CPU, calibration=0, module=draws)
