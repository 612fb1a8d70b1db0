"""What the home page tells readers to type for a symptom: it is there, and does what is said."""

import re

import numpy as np
import onnx.parser
import pytest
import torch

import roundoff

from .pages import ROOT

HOME = (ROOT / "docs" / "index.rst").read_text(encoding="utf-8")
#: Symptom -> what is said of it.
SYMPTOMS = dict(re.findall(r"^\*\*(.+)\*\*\n((?:   .*\n|\n)+)", HOME, re.MULTILINE))


def test_every_symptom_has_a_cause_and_something_to_type() -> None:
    assert len(SYMPTOMS) >= 9
    for symptom, said in SYMPTOMS.items():
        cause, typed = said.split("*Type*")
        assert "``" in typed, symptom
        assert re.search(r"[.]\s*$", cause), symptom
        # A page, or a source for what is known.
        assert re.search(":ref:|:func:|<https://", said), symptom


def test_nan_in_float16_is_named_with_its_node() -> None:
    assert np.finfo(np.float16).max == 65504
    assert "65,504" in SYMPTOMS["NaN in float16"]
    text = """<ir_version: 10, opset_import: ["" : 18]>
    g (float16[n, 8] X) => (float16[n, 8] Z) { Y = Mul(X, X)  W = Sub(Y, Y)  Z = Add(W, X) }"""
    feeds = {"X": np.full((2, 8), 300, np.float16)}
    comparison = roundoff.compare_runtimes(onnx.parser.parse_model(text), feeds)
    # ONNX Runtime computes float16 in float32 on a CPU, node for node it overflows, too.
    assert "first NaN or infinity: Mul_0 (Mul -> Y), in torch and ORT" in str(comparison)
    assert "a Cast to float32 before it" in comparison.advice[0]


def chain(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Operators that inductor puts into one kernel."""
    y = torch.nn.functional.gelu(x * scale + shift)
    return y * torch.sigmoid(shift) - x


@pytest.mark.slow(reason="inductor compiles four programs")
def test_inductor_is_nearer_and_rounds_where_eager_does_when_told() -> None:
    inputs = [torch.randn(300, 257, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    inputs = [tensor.bfloat16() for tensor in inputs]
    eager, truth = chain(*inputs), chain(*(tensor.double() for tensor in inputs))
    torch._dynamo.reset()
    compiled = torch.compile(chain)(*inputs)
    assert not torch.equal(compiled, eager)
    assert (compiled - truth).square().mean() < 0.6 * (eager - truth).square().mean()
    torch._dynamo.reset()
    assert torch.equal(torch.compile(chain, backend="aot_eager")(*inputs), eager)
    torch._dynamo.reset()
    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert torch.equal(torch.compile(chain)(*inputs), eager)
    torch._dynamo.reset()
