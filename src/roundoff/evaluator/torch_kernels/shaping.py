"""Operators that change a shape, or make a tensor of a given shape."""

from __future__ import annotations

import math

import torch

from roundoff.errors import ShapeError

from .common import (
    Function,
    Node,
    NotHandledError,
    Tensor,
    axis_of,
    ints,
    steering,
    torch_function,
    torch_kernel,
    torch_steered,
)


@torch_steered("Reshape", 5, allowzero=0)
def _reshape(x: Tensor, wanted: list[int], *, allowzero: int) -> Tensor:
    if min(wanted, default=0) < -1 or (allowzero and 0 in wanted and -1 in wanted):
        raise ShapeError("Reshape", got=wanted, expected="no size below -1, no 0 beside -1")
    if not allowzero:
        wanted = [x.shape[k] if d == 0 else d for k, d in enumerate(wanted)]
        if 0 in wanted:  # torch calls a free dimension beside it ambiguous; ONNX makes it 0
            wanted = [0 if d == -1 else d for d in wanted]
    return x.reshape(wanted)


@torch_kernel("Transpose", 1)
def _transpose(node: Node) -> Function:
    perm = node.attribute("perm")
    if perm is None:
        return lambda x: x.permute(tuple(range(x.dim() - 1, -1, -1)))
    order = tuple(perm)
    return lambda x: x.permute(order)


@torch_function("Flatten", 1, axis=1)
def _flatten(x: Tensor, *, axis: int) -> Tensor:
    k = axis if axis == x.dim() else axis_of(axis, x.dim())
    return x.reshape(math.prod(x.shape[:k]), math.prod(x.shape[k:]))


@torch_steered("Squeeze", 1, "axes")
def _squeeze(x: Tensor, axes: list[int] | None) -> Tensor:
    if axes is None:
        return torch.squeeze(x)
    over = [axis_of(a, x.dim()) for a in axes]
    if any(x.shape[a] != 1 for a in over):
        raise ShapeError("Squeeze of a dimension that is not 1", got=f"{list(x.shape)}, {axes}")
    return x.squeeze(tuple(over))


@torch_steered("Unsqueeze", 1, "axes")
def _unsqueeze(x: Tensor, axes: list[int]) -> Tensor:
    rank = x.dim() + len(axes)
    over = sorted(axis_of(a, rank) for a in axes)
    if len(set(over)) != len(over):
        raise ShapeError("Unsqueeze", got=axes, expected="distinct axes")
    for a in over:
        x = x.unsqueeze(a)
    return x


@torch_steered("Expand", 8)
def _expand(x: Tensor, shape: list[int]) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, shape))


@torch_kernel("Shape", 1)
def _shape(node: Node) -> Function:
    start, end, device = node.attribute("start", 0), node.attribute("end"), node.settings.device
    return lambda x: torch.tensor(x.shape[start:end], dtype=torch.int64, device=device)


@torch_kernel("ConstantOfShape", 9)
def _constant_of_shape(node: Node) -> Function:
    value = node.attribute("value", torch.zeros(1))
    if not isinstance(value, Tensor):
        raise NotHandledError("ConstantOfShape of a value that torch does not have")
    dtype = torch.float64 if node.truth and value.is_floating_point() else value.dtype
    item, fixed = value.reshape(()).to(node.settings.device, dtype), steering(node, 0)
    return lambda shape: item.expand(ints(shape) if fixed is None else fixed).contiguous()
