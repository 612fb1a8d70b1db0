"""Matrix products, convolutions and pooling."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's users write it

from .common import (
    Function,
    Node,
    NotHandledError,
    ShapeError,
    Tensor,
    torch_function,
    torch_kernel,
)

torch_function("MatMul", 1)(torch.matmul)


@torch_function("Gemm", 7, alpha=1.0, beta=1.0, transA=0, transB=0)
def _gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float,
    beta: float,
    transA: int,
    transB: int,
) -> Tensor:
    if a.dim() != 2 or b.dim() != 2:
        raise ShapeError("Gemm", got=f"{list(a.shape)}, {list(b.shape)}", expected="matrices")
    a = a.t() if transA else a
    b = b.t() if transB else b
    if not a.is_floating_point():
        raise NotHandledError("Gemm of integers")
    if c is None:
        y = torch.mm(a, b)
        return y if alpha == 1 else y * alpha
    c = torch.broadcast_to(c, (a.shape[0], b.shape[1]))  # one way only, in ONNX
    return torch.addmm(c, a, b, beta=beta, alpha=alpha)


@torch_function("Einsum", 12, equation="")
def _einsum(*inputs: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation.replace(" ", ""), *inputs).to(inputs[0].dtype)


def _of_rank(name: str, rank: int) -> Function:
    """Torch's function for so many axes."""
    function: Function | None = getattr(F, f"{name}{rank}d", None)
    if function is None:
        raise NotHandledError(f"torch has no {name} in {rank} dimensions")
    return function


def _window(node: Node, rank: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Steps, spacing, and padding before and after, of a window that moves along axes."""
    mode = node.attribute("auto_pad", "NOTSET")
    if mode not in ("NOTSET", "VALID"):
        raise NotHandledError("torch has no padding that makes the sizes alike")
    pads = node.attribute("pads") if mode == "NOTSET" else None
    pads = pads or [0] * (2 * rank)
    stride, dilation = (node.attribute(name, [1] * rank) for name in ("strides", "dilations"))
    if not len(stride) == len(dilation) == len(pads) / 2 == rank or min(pads) < 0:
        raise ShapeError(f"{node.operator} over {rank} axes", got=f"{stride}, {dilation}, {pads}")
    return stride, dilation, pads[:rank], pads[rank:]


@torch_kernel("Conv", 1)
def _conv(node: Node) -> Function:
    group = node.attribute("group", 1)

    def conv(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        rank = x.dim() - 2
        function = _of_rank("conv", rank)
        stride, dilation, begins, ends = _window(node, rank)
        if node.attribute("kernel_shape", [*w.shape[2:]]) != [*w.shape[2:]]:
            raise ShapeError("Conv", got=f"a kernel of {list(w.shape)} beside its kernel_shape")
        if begins != ends:
            x = F.pad(x, [p for pair in zip(begins[::-1], ends[::-1], strict=True) for p in pair])
            begins = [0] * rank
        return function(x, w, b, stride, begins, dilation, group)

    return conv


def _register_global(op_type: str, function: Function) -> None:
    @torch_function(op_type, 1)
    def pool(x: Tensor) -> Tensor:
        if x.dim() < 3:
            raise NotHandledError("pooling over no axis")
        return function(x, list(range(2, x.dim())), keepdim=True)


_register_global("GlobalAveragePool", torch.mean)
_register_global("GlobalMaxPool", torch.amax)


def _register_pool(op_type: str, since: int, name: str) -> None:
    @torch_kernel(op_type, since)
    def factory(node: Node) -> Function:
        kernel = node.attribute("kernel_shape")
        rank, several = len(kernel), len(node.outputs) > 1
        function = _of_rank(name, rank)
        stride, dilation, padding, ends = _window(node, rank)
        options: dict[str, Any] = {"dilation": dilation}
        if op_type == "AveragePool":
            options = {"count_include_pad": bool(node.attribute("count_include_pad", 0))}
            several = max(dilation) > 1
        if several or padding != ends or node.attribute("ceil_mode", 0):
            raise NotHandledError("torch pools with even padding and without rounding up")

        def pool(x: Tensor) -> Tensor:
            if x.dim() != rank + 2 or not x.is_floating_point():
                raise NotHandledError("pooling of another rank or type")
            return function(x, kernel, stride, padding, **options)

        return pool


_register_pool("MaxPool", 1, "max_pool")
_register_pool("AveragePool", 7, "avg_pool")
