"""Along an axis: sums, extremes, softmax, normalisations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from roundoff.fusion.editor import Dim

from ..converter import Converter
from ..sizes import dims
from .table import (
    BOOL,
    DOUBLE,
    FLOAT,
    INT64,
    TABLE,
    axis_of,
    constant_of,
    is_empty,
    kind_of,
    on_cpu,
    overload,
    rank_of,
    shape_of,
    size_of,
    writes,
)


def _reduced(op: str) -> Callable[..., Any]:
    def write(
        c: Converter, node: Any, x: Any, axes: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> Any:
        if is_empty(x):
            return NotImplemented
        short = kind_of(node) == INT64 and _is_short(x)
        if op == "ReduceSum" and not (node.meta["val"].dtype.is_floating_point or short):
            return NotImplemented  # ONNX Runtime adds in float64: exact up to 2**53, then saturated
        listed = [axes] if isinstance(axes, int) else list(axes or range(rank_of(x)))
        value = c.tensor(x, kind_of(node))
        if not rank_of(x):
            return value
        axes = sorted(axis_of(a, rank_of(x)) for a in listed)
        inputs: list[ir.Value] = [value, c.ints(axes)]
        made = c.op(op, *inputs, shape=shape_of(node), keepdims=int(keepdim))
        if op not in ("ReduceMax", "ReduceMin") or not node.meta["val"].dtype.is_floating_point:
            return made
        known = c.op("ReduceMax", _is_nan(c, value), inputs[1], shape=shape_of(node),
                     keepdims=int(keepdim))  # fmt: skip
        return _where_nan(c, known, made)

    return write


def _is_short(x: Any) -> bool:
    """Whether a sum of an integer tensor stays below 2**53: its elements have 32 bits at most."""
    while x.target in _CASTS and not x.args[0].meta["val"].dtype.is_floating_point:
        x = x.args[0]
    return bool(x.meta["val"].dtype not in (torch.int64, torch.uint64, torch.uint32))


_CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def _is_nan(c: Converter, value: ir.Value) -> ir.Value:
    """1 where an element is NaN: as float32, whose largest ONNX Runtime finds on every processor.

    An extreme of ONNX Runtime is NaN only where the first element is.
    """
    return c.cast(c.op("IsNaN", _wide(c, value), dtype=BOOL), FLOAT)


def _wide(c: Converter, value: ir.Value) -> ir.Value:
    """bfloat16 as float32: CUDA's IsNaN and TopK of ONNX Runtime do not take it."""
    return c.cast(value, FLOAT) if value.dtype == ir.DataType.BFLOAT16 else value


def _where_nan(c: Converter, number: ir.Value, value: ir.Value) -> ir.Value:
    """NaN where *number* is 1, else *value*."""
    assert value.dtype is not None
    nan = c.tensor(math.nan, value.dtype)
    return c.op("Where", c.cast(number, BOOL), nan, value, shape=value.shape, dtype=value.dtype)


for _name, _op in (("mean.dim", "ReduceMean"), ("mean", "ReduceMean"), ("amax", "ReduceMax"),
                   ("amin", "ReduceMin"), ("sum.dim_IntList", "ReduceSum"),
                   ("sum", "ReduceSum")):  # fmt: skip
    writes(_name)(_reduced(_op))


def _without_axes(write: Callable[..., Any]) -> Callable[..., Any]:
    return lambda c, node, x, dtype=None: write(c, node, x)


for _name in ("mean", "sum"):
    TABLE[overload(f"aten.{_name}")] = _without_axes(TABLE[overload(f"aten.{_name}")])


@writes("argmax", "argmin")
def _argmax(c: Converter, node: Any, x: Any, axis: Any = None, keepdim: bool = False) -> Any:
    if not rank_of(x) or is_empty(x):
        return NotImplemented
    op = "ArgMax" if node.target is torch.ops.aten.argmax.default else "ArgMin"
    if axis is None:
        if keepdim or any(not isinstance(n, int) for n in shape_of(x)):
            return NotImplemented
        flat = c.reshape(c.tensor(x), [math.prod(int(n) for n in shape_of(x))])
        return _place(c, op, flat, 0, False, [])
    return _place(c, op, c.tensor(x), axis, keepdim, shape_of(node))


def _place(
    c: Converter, op: str, value: ir.Value, axis: int, keepdim: bool, out: Sequence[Dim]
) -> ir.Value:
    """Where an extreme lies: the first of equal ones, or the first NaN."""
    keep: dict[str, Any] = {"shape": out, "axis": axis, "keepdims": int(keepdim)}
    made = c.op(op, value, dtype=INT64, **keep)
    if value.dtype is None or not value.dtype.is_floating_point():
        return made
    nans = _is_nan(c, value)
    some = c.op("ReduceMax", nans, c.ints([axis]), shape=out, keepdims=int(keepdim))
    first = c.op("ArgMax", nans, dtype=INT64, **keep)
    return c.op("Where", c.cast(some, BOOL), first, made, shape=out, dtype=INT64)


@writes("max.dim", "min.dim")
def _extreme(c: Converter, node: Any, x: Any, axis: int, keepdim: bool = False) -> Any:
    """The values and where they lie."""
    if not rank_of(x) or is_empty(x) or kind_of(x) == BOOL:
        return NotImplemented
    largest = node.target is torch.ops.aten.max.dim
    value, axis = c.tensor(x), axis_of(axis, rank_of(x))
    thin = dims(x.meta["val"].shape)
    thin[axis] = 1
    place = _place(c, "ArgMax" if largest else "ArgMin", value, axis, True, thin)
    found = c.op("GatherElements", value, place, shape=thin, axis=axis)
    if keepdim:
        return [found, place]
    out = thin[:axis] + thin[axis + 1 :]
    return [c.reshape(found, out), c.reshape(place, out)]


@writes("topk")
def _topk(
    c: Converter, node: Any, x: Any, k: Any, axis: int = -1, largest: bool = True,
    in_order: bool = True,
) -> Any:  # fmt: skip
    """The values and where they lie.

    ONNX Runtime's order of NaN is that of a comparison which is always false. Here NaN counts as
    infinity, and infinity as a number beyond the type's largest, in a wider type that has one.
    """
    kind = kind_of(x)
    if not rank_of(x) or is_empty(x) or kind == DOUBLE:
        return NotImplemented  # no wider type has a number beyond float64's largest
    axis, value = axis_of(axis, rank_of(x)), c.tensor(x)
    key, out = value, dims(node.meta["val"][0].shape)
    if kind.is_floating_point():
        wide = _wide(c, value)
        kind = FLOAT if kind == ir.DataType.FLOAT16 else DOUBLE
        nan = c.op("IsNaN", wide, dtype=BOOL)
        beyond = c.tensor(2 * torch.finfo(x.meta["val"].dtype).max, kind)
        key = c.op("Min", c.cast(wide, kind), beyond)
        key = c.op("Where", nan, c.tensor(math.inf, kind), key, dtype=kind)
    place = ir.Value(name="%", shape=ir.Shape(out), type=ir.TensorType(INT64))
    best = ir.Value(name="%", shape=ir.Shape(out), type=ir.TensorType(kind))
    c.add("TopK", [key, c.size(size_of(k))], [best, place], axis=axis, largest=int(largest),
          sorted=int(in_order))  # fmt: skip
    if key is value:
        return [best, place]
    return [c.op("GatherElements", value, place, shape=out, axis=axis), place]


@writes("any.dim", "all.dim")
def _any(c: Converter, node: Any, x: Any, axis: int, keepdim: bool = False) -> Any:
    if not rank_of(x) or is_empty(x):
        return NotImplemented
    op = "ReduceMax" if node.target is torch.ops.aten.any.dim else "ReduceMin"
    number = c.cast(c.tensor(x, BOOL), ir.DataType.INT32)
    found = c.op(op, number, c.ints([axis_of(axis, rank_of(x))]), shape=shape_of(node),
                 keepdims=int(keepdim))  # fmt: skip
    return c.cast(found, BOOL)


@writes("cumsum")
def _cumsum(c: Converter, node: Any, x: Any, axis: int, dtype: Any = None) -> Any:
    if not rank_of(x):
        return NotImplemented
    at = c.constant(np.array(axis_of(axis, rank_of(x)), np.int64))
    return c.op("CumSum", c.tensor(x, kind_of(node)), at)


def _soft(op: str) -> Callable[..., Any]:
    def write(c: Converter, node: Any, x: Any, axis: int, wider: bool = False) -> Any:
        if not rank_of(x) or kind_of(node) == DOUBLE:
            return NotImplemented  # in float64 a row of -inf alone is not NaN
        return c.op(op, c.tensor(x, kind_of(node)), axis=axis_of(axis, rank_of(x)))

    return write


writes("_softmax")(_soft("Softmax"))
writes("_log_softmax")(_soft("LogSoftmax"))


@writes("native_layer_norm")
def _layer_norm(
    c: Converter, node: Any, x: Any, shape: Sequence[Any], weight: Any, bias: Any, eps: Any
) -> Any:
    if not _alone(node) or weight is None or is_empty(x) or kind_of(x) == DOUBLE:
        return NotImplemented  # epsilon is an attribute in float32
    inputs = [c.tensor(t) if t is not None else None for t in (x, weight, bias)]
    number = constant_of(c, eps)
    if number is None:
        return NotImplemented
    out = c.op("LayerNormalization", *inputs, axis=-len(shape), epsilon=float(number))
    return [out, None, None]


def _alone(node: Any) -> bool:
    """Whether nothing reads any but the first of a node's results."""
    return not any(user.users for user in node.users if user.args[1] != 0)


@writes("_native_batch_norm_legit_no_training")
def _batch_norm(
    c: Converter, node: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any,
    momentum: float, eps: float,
) -> Any:  # fmt: skip
    if weight is None or bias is None or rank_of(x) < 2 or not _alone(node):
        return NotImplemented
    if kind_of(x) == DOUBLE:
        return NotImplemented  # epsilon is an attribute in float32
    inputs = [c.tensor(t) for t in (x, weight, bias, mean, variance)]
    return [c.op("BatchNormalization", *inputs, epsilon=float(eps)), None, None]


@writes("linalg_vector_norm")
def _vector_norm(
    c: Converter, node: Any, x: Any, order: Any = 2, axes: Any = None, keepdim: bool = False,
    dtype: Any = None,
) -> Any:  # fmt: skip
    if order != 2 or not rank_of(x) or is_empty(x):
        return NotImplemented
    return _reduced("ReduceL2")(c, node, x, axes, keepdim)


@writes("max_pool2d_with_indices")
def _max_pool(
    c: Converter, node: Any, x: Any, kernel: Sequence[int], stride: Sequence[int] = (),
    padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> Any:  # fmt: skip
    if not _alone(node) or rank_of(x) != 4 or ceil_mode:
        return NotImplemented
    if on_cpu(x):
        return NotImplemented  # ONNX Runtime drops NaN there, and takes -inf for the lowest number
    sizes, steps, around, apart = (
        list(n) * (2 // len(n)) for n in (kernel, stride or kernel, padding, dilation)
    )
    made = c.op("MaxPool", c.tensor(x), shape=dims(node.meta["val"][0].shape), kernel_shape=sizes,
                strides=steps, pads=around * 2, dilations=apart)  # fmt: skip
    return [made, None]
