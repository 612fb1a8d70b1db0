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
    return torch.einsum(equation.replace(" ", ""), *inputs)


_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def _spatial(node: Node, rank: int, name: str, default: int) -> list[int]:
    numbers = list(node.attribute(name, [default] * rank))
    if len(numbers) != rank:
        raise ShapeError(f"attribute {name}", got=numbers, expected=f"{rank} integers")
    return numbers


@torch_kernel("Conv", 1)
def _conv(node: Node) -> Function:
    mode, group = node.attribute("auto_pad", "NOTSET"), node.attribute("group", 1)

    def conv(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        rank = x.dim() - 2
        if rank not in _CONV or w.dim() != x.dim():
            raise NotHandledError(f"convolution in {rank} dimensions")
        declared = node.attribute("kernel_shape")
        if declared is not None and list(declared) != list(w.shape[2:]):
            raise ShapeError("kernel_shape", got=list(declared), expected=str(list(w.shape[2:])))
        stride = _spatial(node, rank, "strides", 1)
        dilation = _spatial(node, rank, "dilations", 1)
        pads = [0] * (2 * rank)
        if mode == "NOTSET":
            pads = list(node.attribute("pads", pads))
        elif mode != "VALID":
            raise NotHandledError("torch has no padding that makes the sizes alike")
        if len(pads) != 2 * rank or min(pads) < 0:
            raise ShapeError("pads", got=pads, expected=f"{2 * rank} non-negative integers")
        begins, ends = pads[:rank], pads[rank:]
        if begins != ends:
            x = F.pad(x, [p for pair in zip(begins[::-1], ends[::-1], strict=True) for p in pair])
            begins = [0] * rank
        return _CONV[rank](x, w, b, stride, begins, dilation, group)

    return conv


def _register_global(op_type: str, function: Function) -> None:
    @torch_function(op_type, 1)
    def pool(x: Tensor) -> Tensor:
        if x.dim() < 3:
            raise NotHandledError("pooling over no axis")
        return function(x, list(range(2, x.dim())), keepdim=True)


_register_global("GlobalAveragePool", torch.mean)
_register_global("GlobalMaxPool", torch.amax)


_MAX_POOL: dict[int, Function] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG_POOL: dict[int, Function] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _register_pool(op_type: str, since: int, table: dict[int, Function]) -> None:
    @torch_kernel(op_type, since)
    def factory(node: Node) -> Function:
        kernel = list(node.attribute("kernel_shape"))
        rank = len(kernel)
        pads = list(node.attribute("pads", [0] * (2 * rank)))
        mode = node.attribute("auto_pad", "NOTSET")
        stride, dilation = _spatial(node, rank, "strides", 1), _spatial(node, rank, "dilations", 1)
        if (
            rank not in table
            or len(node.outputs) > 1
            or mode not in ("NOTSET", "VALID")
            or node.attribute("ceil_mode", 0)
            or pads[:rank] != pads[rank:]
            or any(not 0 <= 2 * p <= k for p, k in zip(pads, kernel, strict=False))
            or (op_type == "AveragePool" and max(dilation) > 1)
        ):
            raise NotHandledError("torch pools with even padding and without rounding up")
        padding = [0] * rank if mode == "VALID" else pads[:rank]
        function = table[rank]
        options: dict[str, Any] = {"dilation": dilation}
        if op_type == "AveragePool":
            options = {"count_include_pad": bool(node.attribute("count_include_pad", 0))}

        def pool(x: Tensor) -> Tensor:
            if x.dim() != rank + 2 or not x.is_floating_point():
                raise NotHandledError("pooling of another rank or type")
            return function(x, kernel, stride, padding, **options)

        return pool


_register_pool("MaxPool", 1, _MAX_POOL)
_register_pool("AveragePool", 7, _AVG_POOL)
