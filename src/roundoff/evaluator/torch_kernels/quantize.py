"""Linear quantisation to and from the integer types that torch has."""

from __future__ import annotations

from typing import Any

import torch

from roundoff.dtypes import DTYPES

from .common import (
    Function,
    Node,
    NotHandledError,
    ShapeError,
    Tensor,
    axis_of,
    element_type,
    torch_function,
    torch_kernel,
)

_INTEGERS = {torch.int8, torch.uint8, torch.int16, torch.int32}


def _spread(scale: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """A scale or zero point laid out along *axis* of x: one, one per slice, or one per block."""
    if scale.numel() == 1 and not block:
        return scale.reshape(())
    k = axis_of(axis, x.dim())
    if block:
        return scale.repeat_interleave(block, k).narrow(k, 0, x.shape[k])
    if scale.dim() != 1 or scale.shape[0] != x.shape[k]:
        raise ShapeError("scale", got=list(scale.shape), expected=f"[{x.shape[k]}]")
    return scale.reshape([-1 if j == k else 1 for j in range(x.dim())])


@torch_kernel("DequantizeLinear", 10)
def _dequantize(node: Node) -> Function:
    axis, block = node.attribute("axis", 1), node.attribute("block_size", 0)
    wanted = node.attribute("output_dtype", 0)

    def dequantize(x: Any, scale: Any, zero: Any = None) -> Tensor:
        tensors = [t for t in (x, scale, zero) if t is not None]
        if node.truth and isinstance(x, Tensor) and x.is_floating_point():
            y = x if zero is None else x - _spread(zero, x, axis, block)
            return y * _spread(scale, x, axis, block)
        if not all(isinstance(t, Tensor) for t in tensors) or x.dtype not in _INTEGERS:
            raise NotHandledError("torch has no such element type")
        dtype = element_type(node, wanted) if wanted else scale.dtype
        compute = torch.float64 if node.truth else torch.float32
        y = x.to(torch.int64)
        if zero is not None:
            y = y - _spread(zero, x, axis, block).to(torch.int64)
        return (y.to(compute) * _spread(scale, x, axis, block).to(compute)).to(dtype)

    return dequantize


@torch_kernel("QuantizeLinear", 10)
def _quantize(node: Node) -> Function:
    axis, block = node.attribute("axis", 1), node.attribute("block_size", 0)
    wanted, precision = node.attribute("output_dtype", 0), node.attribute("precision", 0)

    def quantize(x: Tensor, scale: Any, zero: Any = None) -> Tensor:
        if zero is not None and not isinstance(zero, Tensor):
            raise NotHandledError("torch has no such element type")
        if wanted and (DTYPES[wanted].is_float or zero is None):
            dtype = element_type(node, wanted)
        else:
            dtype = torch.uint8 if zero is None else zero.dtype
        if node.truth and dtype.is_floating_point:  # a narrower float is not rounded to
            return x / _spread(scale, x, axis, block)
        known = dtype in _INTEGERS or (node.truth and dtype == torch.uint16)
        if not known or not x.is_floating_point() or precision:
            raise NotHandledError("quantisation to or from such a type")
        step = _spread(scale, x, axis, block)
        y = torch.round(x / (step if node.truth else step.to(x.dtype)))
        if zero is not None:
            y = y + _spread(zero, x, axis, block).to(y.dtype)
        limits = torch.iinfo(dtype)
        y = torch.clamp(y, limits.min, limits.max)
        # torch converts to uint16 from integers alone.
        return y.to(torch.int32).to(dtype) if dtype == torch.uint16 else y.to(dtype)

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
