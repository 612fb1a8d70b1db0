"""Along an axis: sums, extremes, softmax, normalisations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ..converter import Converter
from ..sizes import dims
from .table import (
    BOOL,
    INT64,
    TABLE,
    axis_of,
    constant_of,
    kind_of,
    overload,
    rank_of,
    shape_of,
    writes,
)


def _reduced(op: str) -> Callable[..., Any]:
    def write(
        c: Converter, node: Any, x: Any, axes: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> ir.Value:
        listed = [axes] if isinstance(axes, int) else list(axes or range(rank_of(x)))
        value = c.tensor(x, kind_of(node))
        if not rank_of(x):
            return value
        axes = sorted(axis_of(a, rank_of(x)) for a in listed)
        inputs: list[ir.Value] = [value, c.ints(axes)]
        return c.op(op, *inputs, shape=shape_of(node), keepdims=int(keepdim))

    return write


for _name, _op in (("mean.dim", "ReduceMean"), ("mean", "ReduceMean"), ("amax", "ReduceMax"),
                   ("amin", "ReduceMin"), ("sum.dim_IntList", "ReduceSum"),
                   ("sum", "ReduceSum")):  # fmt: skip
    writes(_name)(_reduced(_op))


def _without_axes(write: Callable[..., Any]) -> Callable[..., Any]:
    return lambda c, node, x, dtype=None: write(c, node, x)


for _name in ("mean", "sum"):
    TABLE[overload(f"aten.{_name}")] = _without_axes(TABLE[overload(f"aten.{_name}")])


@writes("argmax")
def _argmax(c: Converter, node: Any, x: Any, axis: Any = None, keepdim: bool = False) -> Any:
    if axis is None or not rank_of(x):
        return NotImplemented
    return c.op("ArgMax", c.tensor(x), shape=shape_of(node), dtype=INT64, axis=axis,
                keepdims=int(keepdim))  # fmt: skip


@writes("any.dim", "all.dim")
def _any(c: Converter, node: Any, x: Any, axis: int, keepdim: bool = False) -> Any:
    if not rank_of(x):
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
        if not rank_of(x):
            return NotImplemented
        return c.op(op, c.tensor(x, kind_of(node)), axis=axis_of(axis, rank_of(x)))

    return write


writes("_softmax")(_soft("Softmax"))
writes("_log_softmax")(_soft("LogSoftmax"))


@writes("native_layer_norm")
def _layer_norm(
    c: Converter, node: Any, x: Any, shape: Sequence[Any], weight: Any, bias: Any, eps: Any
) -> Any:
    if not _alone(node) or weight is None:
        return NotImplemented
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
    inputs = [c.tensor(t) for t in (x, weight, bias, mean, variance)]
    return [c.op("BatchNormalization", *inputs, epsilon=float(eps)), None, None]


@writes("linalg_vector_norm")
def _vector_norm(
    c: Converter, node: Any, x: Any, order: Any = 2, axes: Any = None, keepdim: bool = False,
    dtype: Any = None,
) -> Any:  # fmt: skip
    if order != 2 or not rank_of(x):
        return NotImplemented
    return _reduced("ReduceL2")(c, node, x, axes, keepdim)


@writes("max_pool2d_with_indices")
def _max_pool(
    c: Converter, node: Any, x: Any, kernel: Sequence[int], stride: Sequence[int] = (),
    padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> Any:  # fmt: skip
    if not _alone(node) or rank_of(x) != 4 or ceil_mode:
        return NotImplemented
    sizes, steps, around, apart = (
        list(n) * (2 // len(n)) for n in (kernel, stride or kernel, padding, dilation)
    )
    made = c.op("MaxPool", c.tensor(x), shape=dims(node.meta["val"][0].shape), kernel_shape=sizes,
                strides=steps, pads=around * 2, dilations=apart)  # fmt: skip
    return [made, None]
