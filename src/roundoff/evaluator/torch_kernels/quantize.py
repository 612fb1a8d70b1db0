"""Linear quantisation to and from the integer types that torch has."""

from __future__ import annotations

from typing import Any

import torch

from .common import (
    Function,
    Node,
    NotHandledError,
    ShapeError,
    Tensor,
    axis_of,
    torch_function,
    torch_kernel,
)

_INTEGERS = {torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32}


def _spread(scale: Tensor, x: Tensor, axis: int) -> Tensor:
    """A scale or zero point laid out along *axis* of x: one, or one per slice."""
    if scale.numel() == 1:
        return scale.reshape(())
    k = axis_of(axis, x.dim())
    if scale.dim() != 1 or scale.shape[0] != x.shape[k]:
        raise ShapeError("scale", got=list(scale.shape), expected=f"[{x.shape[k]}]")
    return scale.reshape([-1 if j == k else 1 for j in range(x.dim())])


def _check_plain(node: Node) -> None:
    for name in ("block_size", "output_dtype", "precision"):
        if node.attribute(name, 0):
            raise NotHandledError(f"quantisation with {name}")


@torch_kernel("DequantizeLinear", 10)
def _dequantize(node: Node) -> Function:
    _check_plain(node)
    axis = node.attribute("axis", 1)

    def dequantize(x: Any, scale: Any, zero: Any = None) -> Tensor:
        if not isinstance(x, Tensor) or x.dtype not in _INTEGERS:
            raise NotHandledError("quantisation of such a type")
        compute = torch.float64 if node.truth else torch.float32
        y = x.to(torch.int64)
        if zero is not None:
            y = y - _spread(zero, x, axis).to(torch.int64)
        return (y.to(compute) * _spread(scale, x, axis).to(compute)).to(scale.dtype)

    return dequantize


@torch_kernel("QuantizeLinear", 10)
def _quantize(node: Node) -> Function:
    _check_plain(node)
    axis = node.attribute("axis", 1)

    def quantize(x: Tensor, scale: Any, zero: Any = None) -> Tensor:
        dtype = torch.uint8 if zero is None else zero.dtype
        if dtype not in _INTEGERS or not x.is_floating_point():
            raise NotHandledError("quantisation to or from such a type")
        step = _spread(scale, x, axis)
        y = torch.round(x.to(step.dtype) / step).double()  # float16 lacks integers of 16 bits
        if zero is not None:
            y = y + _spread(zero, x, axis).to(y.dtype)
        limits = torch.iinfo(dtype)
        return torch.clamp(y, limits.min, limits.max).to(dtype)

    return quantize


@torch_function("DynamicQuantizeLinear", 11)
def _quantize_dynamically(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ONNX's function, in float32 or, for the truth, in float64."""
    zero = x.new_zeros(1)
    low, high = torch.aminmax(torch.cat([x.reshape(-1), zero]))
    scale = (high - low) / 255
    if high == low:  # zeros alone: ONNX divides 0 by 0, ONNX Runtime by 1
        scale = torch.ones_like(scale)
    if not bool(scale.isfinite() & (scale > 0)):
        raise NotHandledError("quantisation of NaN, or with a step beyond the type")
    point = torch.round(torch.clamp(0 - low / scale, 0, 255))
    y = torch.clamp(torch.round(x / scale) + point, 0, 255)
    return y.to(torch.uint8), scale, point.to(torch.uint8)
