"""Products by torch's BLAS, of tier "experimental": the kernel of ours that a CPU has use for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import onnx_ir as ir

from .editor import Editor, static
from .rule import Refusal, Rule

__all__ = ["Into", "TorchProduct", "torch_product"]


@dataclasses.dataclass(frozen=True)
class Into:
    """A kernel that writes its results where it is told.

    Attributes
    ----------
    run : callable
        ``(inputs, outputs, attributes) -> None``; outputs are contiguous, of the node's shapes.
    """

    run: Callable[[Sequence[Any], Sequence[Any], dict[str, Any]], None]


class TorchProduct(Rule):
    """Pattern: MatMul, FusedMatMul or Gemm with a matrix. Becomes TorchProduct, on the CPU.

    torch's library reads the weight where it lies and as it is stored, (out, in). ONNX Runtime's
    kernels are written for weights that they may copy and pack, and the backend's may change.
    In float16 they have none: each run converts the weight, and all that it converts stays.
    Conditions: float16, float32 or float64; only the matrix transposed, nothing scaled; a bias of
    one number a column; at least ``least`` multiplications and additions, ``least_half`` in
    float16.
    """

    ops = ("MatMul", "FusedMatMul", "Gemm")
    tier = "experimental"
    source = "K. Goto, R. van de Geijn, Anatomy of high-performance matrix multiplication, 2008"
    #: From here on the faster product pays for the second partition (some 20 µs a call): two
    #: products of 2^24 between activations take 0.8 to 1.1 of the time, of 2^29 0.6 to 0.9, of 2^33
    #: 0.7, on two cores that nothing else uses. Where others do, torch's threads wait for each
    #: other, and a short product may take 15 ms.
    least: ClassVar[int] = 1 << 24
    #: In float16: with weights of 2^21 to 2^22 a product of one token takes 0.4 of its time after a
    #: conversion of the weight, of 128 tokens 0.75.
    least_half: ClassVar[int] = 1 << 20

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        x, weight, out = node.inputs[0], node.inputs[1], node.outputs[0]
        shapes = [g.shape(v) for v in (x, weight, out)]
        if x is None or None in shapes or len(shapes[1] or ()) != 2 or len(shapes[0] or ()) < 2:
            return False
        if not static(*(shapes[0] or ()), *(shapes[2] or ())):
            raise Refusal("sizes are symbolic: whether a second partition pays is not known")
        work = math.prod(shapes[2] or ()) * (shapes[0] or ())[-1]
        half = x.dtype == ir.DataType.FLOAT16
        if work < (self.least_half if half else self.least):
            raise Refusal(f"{work:.2g} multiplications: a second partition would cost more")
        if g.processor != "CPU":
            raise Refusal("on CUDA torch and ONNX Runtime call the same cuBLAS")
        if not half and x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            raise Refusal(f"products of {x.dtype} stay with ONNX Runtime")
        plain = {"transA": 0, "transBatchA": 0, "transBatchB": 0, "alpha": 1.0, "beta": 1.0}
        if any(g.attribute(node, k, v) != v for k, v in plain.items()):
            raise Refusal("the left operand is transposed, or the product is scaled")
        bias = list(node.inputs[2:])
        if bias and g.shape(bias[0]) != (shapes[2] or ())[-1:]:
            raise Refusal(f"the bias is {g.shape(bias[0])}, not a number a column")
        flip = int(g.attribute(node, "transB", 0))
        turned = g.node(weight, "Transpose")
        if turned is not None and list(g.attribute(turned, "perm", [1, 0])) == [1, 0]:
            weight, flip = turned.inputs[0], 1 - flip
        outputs = g.emit("TorchProduct", [x, weight, *bias], node, shapes=[shapes[2]], like=out,
                         domain="roundoff", rule=self.name, transB=flip)  # fmt: skip
        g.replace(out, outputs[0])
        return True


def torch_product(inputs: Sequence[Any], out: Sequence[Any], attributes: dict[str, Any]) -> None:
    """``x @ w`` (``x @ w.T`` with transB), plus the bias if there is one, by torch.

    Parameters
    ----------
    given : sequence of torch.Tensor
        x, (…, k), w, (k, n) or (n, k), and the bias, (n,), if any; x contiguous.
    out : sequence of torch.Tensor
        One, (…, n), contiguous; written.
    attributes : dict
        ``transB``.
    """
    import torch

    x, weight, *bias = inputs
    weight = weight.t() if attributes["transB"] else weight
    into = out[0].view(-1, out[0].shape[-1])
    x = x.view(-1, x.shape[-1])
    if bias:
        torch.addmm(bias[0], x, weight, out=into)
    else:
        torch.mm(x, weight, out=into)
