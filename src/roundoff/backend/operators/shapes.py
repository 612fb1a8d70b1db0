"""Views, joins and cuts, and tensors that are made of nothing but sizes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from roundoff.fusion.editor import Dim

from ..converter import Converter, dims_of
from ..sizes import dim, is_empty
from .table import (
    FLOAT,
    INT64,
    TABLE,
    axis_of,
    fits,
    kind_of,
    rank_of,
    shape_of,
    size_of,
    writes,
)


@writes(
    "view",
    "_unsafe_view",
    "unsqueeze",
    "squeeze",
    "squeeze.dim",
    "squeeze.dims",
)
def _reshaped(c: Converter, node: Any, x: Any, *_: Any, **__: Any) -> ir.Value:
    return c.reshape(c.tensor(x), shape_of(node))


@writes("expand")
def _expand(c: Converter, node: Any, x: Any, *_: Any, **__: Any) -> ir.Value:
    value, after = c.tensor(x), shape_of(node)
    before = [*([1] * (len(after) - rank_of(x))), *dims_of(value)]
    if before == after and len(before) == rank_of(x):
        return value
    # One is what Expand keeps: a size is computed only where it is new.
    target: list[Dim] = [1 if b == a else a for b, a in zip(before, after, strict=True)]
    return c.op("Expand", value, c.shape(target))


@writes("permute")
def _permute(c: Converter, node: Any, x: Any, order: Sequence[int]) -> ir.Value:
    perm = [axis_of(p, len(order)) for p in order]
    value = c.tensor(x)
    return value if perm == sorted(perm) else c.op("Transpose", value, perm=perm)


@writes("slice.Tensor")
def _slice(
    c: Converter,
    node: Any,
    x: Any,
    axis: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> ir.Value:
    value, axis = c.tensor(x), axis_of(axis, rank_of(x))
    start = 0 if start is None else size_of(start)
    end = (1 << 63) - 1 if end is None else size_of(end)
    if step == 1 and (dims_of(value) == shape_of(node) or (start, end) == (0, (1 << 63) - 1)):
        return value
    bounds = [c.size(start), c.size(end), c.ints([axis]), c.size(size_of(step))]
    return c.op("Slice", value, *bounds)


@writes("select.int")
def _select(c: Converter, node: Any, x: Any, axis: int, index: Any) -> ir.Value:
    at = c.reshape(c.size(size_of(index)), [])
    if isinstance(index, int):
        at = c.constant(np.array(index, np.int64))
    return c.op("Gather", c.tensor(x), at, axis=axis_of(axis, rank_of(x)))


@writes("cat")
def _cat(c: Converter, node: Any, tensors: Sequence[Any], axis: int = 0) -> ir.Value:
    # A part without elements adds nothing, whatever its axes: an empty cache before new keys.
    parts = [c.tensor(t, kind_of(node)) for t in tensors if not is_empty(t.meta["val"])]
    if len(parts) == 1:
        return parts[0]
    return c.op("Concat", *parts, axis=axis_of(axis, rank_of(node)))


@writes("split.Tensor", "split_with_sizes")
def _split(c: Converter, node: Any, x: Any, _: Any, axis: int = 0) -> Any:
    axis = axis_of(axis, rank_of(x))
    examples = node.meta["val"]
    lengths = [dim(e.shape[axis]) for e in examples]
    outputs = [c.value_like(e) for e in examples]
    c.add("Split", [c.tensor(x), c.shape(lengths)], outputs, axis=axis)
    return outputs


@writes("repeat")
def _repeat(c: Converter, node: Any, x: Any, repeats: Sequence[Any]) -> ir.Value:
    value, times = c.tensor(x), [size_of(r) for r in repeats]
    value = c.reshape(value, [*([1] * (len(times) - rank_of(x))), *dims_of(value)])
    if all(t == 1 for t in times):
        return value
    return c.op("Tile", value, c.shape(times))


@writes("constant_pad_nd")
def _pad(c: Converter, node: Any, x: Any, pad: Sequence[Any], number: Any = 0) -> Any:
    """torch counts pairs of (before, after) from the last axis; ONNX all befores first."""
    if not fits(number, node.meta["val"].dtype):
        return NotImplemented
    pairs = [(size_of(a), size_of(b)) for a, b in zip(pad[::2], pad[1::2], strict=True)]
    pairs = [(0, 0)] * (rank_of(x) - len(pairs)) + pairs[::-1]
    widths = c.shape([a for a, _ in pairs] + [b for _, b in pairs])
    return c.op("Pad", c.tensor(x), widths, c.tensor(number, kind_of(node)))


def _getitem(c: Converter, node: Any, source: Any, index: int) -> Any:
    return c.values[source][index]


TABLE[operator.getitem] = _getitem


# New tensors


@writes("full", "full_like", "fill.Scalar", "fill.Tensor", "scalar_tensor")
def _full(c: Converter, node: Any, *given: Any, **_: Any) -> Any:
    number, shape = given[-1], shape_of(node)
    if not fits(number, node.meta["val"].dtype):
        return NotImplemented
    value = c.tensor(number, kind_of(node))
    return c.op("Expand", value, c.shape(shape)) if shape else value


@writes("empty.memory_format", "empty_like")
def _empty(c: Converter, node: Any, *_: Any, **__: Any) -> ir.Value:
    return _full(c, node, 0)


@writes("arange.start_step")
def _arange(c: Converter, node: Any, start: Any, end: Any, step: Any = 1, **_: Any) -> Any:
    kind = kind_of(node)
    if kind not in (INT64, ir.DataType.INT32, FLOAT) or any(map(_is_float, (start, end, step))):
        return NotImplemented  # Range counts its elements in the type, torch in float64
    whole = INT64 if kind == FLOAT else kind
    bounds = [c.tensor(x, whole) for x in (start, end, step)]
    return c.cast(c.op("Range", *bounds, shape=shape_of(node), dtype=whole), kind)


def _is_float(x: Any) -> bool:
    known = x.meta["val"] if isinstance(x, torch.fx.Node) else x
    return isinstance(known, (float, torch.SymFloat))
