"""Products by torch on the CPU: the rule's hit, near misses and numbers."""

from __future__ import annotations

import re
from typing import Any

import onnx
import pytest
import torch
from fusion_models import feeds, model, rewritten, run

from roundoff.fusion import OptimizationOptions, fuse
from roundoff.fusion.products import TorchProduct

EVERY = "default+onnxruntime+experimental"
PRODUCT = """g ({t}[2, 3, 40] x, {t}[24, 40] w) => ({t}[2, 3, 24] y) {{
  r = Relu(x) wt = Transpose<perm = [1, 0]>(w) p = MatMul(r, wt) y = Relu(p) }}"""
AS_STORED = "g (float[6, 40] x, float[40, 24] w) => (float[6, 24] y) { y = MatMul(x, w) }"
GEMM = """g (float[6, 40] x, float[24, 40] w, float[{c}] c) => (float[6, 24] y) {{
  y = Gemm<transB = 1{more}>(x, w, c) }}"""


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchProduct, "least", 1)
    monkeypatch.setattr(TorchProduct, "least_half", 1)


def made(proto: onnx.ModelProto, **options: object) -> tuple[onnx.ModelProto, str]:
    """The fused model, and all reasons for what was left alone."""
    fused, report = fuse(proto, OptimizationOptions(EVERY, **options))  # type: ignore[arg-type]
    return fused, "; ".join(report.refused.values())


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("text", "tolerance", "by_torch"),
    [
        (PRODUCT.format(t="float"), 1e-5, lambda x, w: (x.relu() @ w.t()).relu()),
        (PRODUCT.format(t="double"), 1e-14, lambda x, w: (x.relu() @ w.t()).relu()),
        (PRODUCT.format(t="float16"), 1e-2, lambda x, w: (x.relu() @ w.t()).relu()),
        (AS_STORED, 1e-5, lambda x, w: x @ w),
        (GEMM.format(c=24, more=""), 1e-5, lambda x, w, c: torch.addmm(c, x, w.t())),
    ],
)
def test_a_product_is_torchs_bit_for_bit(text: str, tolerance: float, by_torch: Any) -> None:
    proto = model(text)
    assert "TorchProduct" in rewritten(proto, EVERY, tolerance)[0]
    given = feeds(proto)
    (y,) = run(made(proto)[0], given)
    x, *others = given.values()
    assert torch.equal(y.view(6, 24), by_torch(x.view(6, 40), *others))


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (PRODUCT.format(t="bfloat16"), "products of BFLOAT16 stay"),
        (GEMM.format(c="6, 1", more=""), r"the bias is \(6, 1\)"),
        (GEMM.format(c=24, more=", beta = 0.5"), "scaled"),
        (GEMM.format(c=24, more=", alpha = 0.5"), "scaled"),
        (GEMM.format(c=24, more=", transA = 1").replace("[6, 40] x", "[40, 6] x"), "transposed"),
    ],
)
def test_near_misses_are_left_alone(text: str, why: str) -> None:
    fused, reasons = made(model(text))
    assert not [n for n in fused.graph.node if n.domain == "roundoff"]
    assert re.search(why, reasons), reasons


@pytest.mark.usefixtures("_small")
def test_products_of_two_batches_are_no_pattern() -> None:
    text = "g (float[2, 6, 4] a, float[2, 4, 6] b) => (float[2, 6, 6] y) { y = MatMul(a, b) }"
    fused, reasons = made(model(text))
    assert [n.op_type for n in fused.graph.node] == ["MatMul"]
    assert not reasons


def test_only_where_it_pays() -> None:
    rows = TorchProduct.least // (64 * 64)
    for n, op in ((rows, "TorchProduct"), (rows - 1, "MatMul")):
        text = f"g (float[{n}, 64] x, float[64, 64] w) => (float[{n}, 64] y) {{ y = MatMul(x, w) }}"
        fused, reasons = made(model(text))
        assert [node.op_type for node in fused.graph.node] == [op]
        assert ("second partition" in reasons) == (op == "MatMul")
        fused, reasons = made(model(text), processor="CUDA")
        assert [node.op_type for node in fused.graph.node] == ["MatMul"]
    assert "second partition" in reasons
