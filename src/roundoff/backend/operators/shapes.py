"""Views, joins and cuts, and tensors that are made of nothing but sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from roundoff.fusion.editor import Dim

from ..converter import Converter, dims_of
from ..sizes import dim, dims
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
    "reshape",
    "unsqueeze",
    "squeeze",
    "squeeze.dim",
    "squeeze.dims",
    "flatten.using_ints",
    "_reshape_copy",
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
    return c.op("Expand", value, c.shape(target), shape=after)


@writes("permute")
def _permute(c: Converter, node: Any, x: Any, order: Sequence[int]) -> ir.Value:
    perm = [axis_of(p, len(order)) for p in order]
    value = c.tensor(x)
    return (
        value if perm == sorted(perm) else c.op("Transpose", value, shape=shape_of(node), perm=perm)
    )


@writes("transpose.int", "t")
def _transpose(c: Converter, node: Any, x: Any, one: int = 0, two: int = 1) -> ir.Value:
    perm = list(range(rank_of(x)))
    if not perm or (len(perm) < 2 and node.target is torch.ops.aten.t.default):
        return c.tensor(x)
    one, two = axis_of(one, len(perm)), axis_of(two, len(perm))
    perm[one], perm[two] = perm[two], perm[one]
    return _permute(c, node, x, perm)


@writes("slice.Tensor")
def _slice(
    c: Converter,
    node: Any,
    x: Any,
    axis: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> ir.Value:
    value, axis = c.tensor(x), axis_of(axis, rank_of(x))
    start = 0 if start is None else size_of(start)
    end = (1 << 63) - 1 if end is None else size_of(end)
    if step == 1 and (dims_of(value) == shape_of(node) or (start, end) == (0, (1 << 63) - 1)):
        return value
    bounds = [c.size(start), c.size(end), c.ints([axis]), c.ints([step])]
    return c.op("Slice", value, *bounds, shape=shape_of(node))


@writes("select.int")
def _select(c: Converter, node: Any, x: Any, axis: int, index: Any) -> ir.Value:
    at = c.reshape(c.size(size_of(index)), [])
    if isinstance(index, int):
        at = c.constant(np.array(index, np.int64))
    return c.op("Gather", c.tensor(x), at, shape=shape_of(node), axis=axis_of(axis, rank_of(x)))


@writes("cat")
def _cat(c: Converter, node: Any, tensors: Sequence[Any], axis: int = 0) -> ir.Value:
    kind, rank = kind_of(node), len(shape_of(node))
    # An empty vector beside tensors of more axes counts as nothing.
    parts = [c.tensor(t, kind) for t in tensors if rank_of(t) == rank]
    axis = axis_of(axis, rank)
    parts = [p for p in parts if dims_of(p)[axis] != 0] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    return c.op("Concat", *parts, shape=shape_of(node), axis=axis)


@writes("stack")
def _stack(c: Converter, node: Any, tensors: Sequence[Any], axis: int = 0) -> ir.Value:
    out = shape_of(node)
    axis = axis_of(axis, len(out))
    thin = [*out[:axis], 1, *out[axis + 1 :]]
    parts = [c.reshape(c.tensor(t, kind_of(node)), thin) for t in tensors]
    return c.op("Concat", *parts, shape=out, axis=axis)


@writes("split.Tensor", "split_with_sizes")
def _split(c: Converter, node: Any, x: Any, _: Any, axis: int = 0) -> Any:
    axis = axis_of(axis, rank_of(x))
    examples = node.meta["val"]
    lengths = [dim(e.shape[axis]) for e in examples]
    outputs = [c.value_like(e) for e in examples]
    c.add("Split", [c.tensor(x), c.shape(lengths)], outputs, axis=axis)
    return outputs


@writes("unbind.int")
def _unbind(c: Converter, node: Any, x: Any, axis: int = 0) -> Any:
    value, axis = c.tensor(x), axis_of(axis, rank_of(x))
    return [
        c.op("Gather", value, c.constant(np.array(i, np.int64)), shape=dims(e.shape), axis=axis)
        for i, e in enumerate(node.meta["val"])
    ]


@writes("repeat")
def _repeat(c: Converter, node: Any, x: Any, repeats: Sequence[Any]) -> ir.Value:
    value, times = c.tensor(x), [size_of(r) for r in repeats]
    value = c.reshape(value, [*([1] * (len(times) - rank_of(x))), *dims_of(value)])
    if all(t == 1 for t in times):
        return value
    return c.op("Tile", value, c.shape(times), shape=shape_of(node))


@writes("constant_pad_nd")
def _pad(c: Converter, node: Any, x: Any, pad: Sequence[Any], number: Any = 0) -> Any:
    """torch counts pairs of (before, after) from the last axis; ONNX all befores first."""
    if not fits(number, node.meta["val"].dtype):
        return NotImplemented
    pairs = [(size_of(a), size_of(b)) for a, b in zip(pad[::2], pad[1::2], strict=True)]
    pairs = [(0, 0)] * (rank_of(x) - len(pairs)) + pairs[::-1]
    widths = c.shape([a for a, _ in pairs] + [b for _, b in pairs])
    return c.op("Pad", c.tensor(x), widths, c.tensor(number, kind_of(node)), shape=shape_of(node))


def _getitem(c: Converter, node: Any, source: Any, index: int) -> Any:
    return c.values[source][index]


TABLE[operator.getitem] = _getitem


# New tensors


def _filled(c: Converter, node: Any, number: Any) -> Any:
    shape, kind = shape_of(node), kind_of(node)
    if not fits(number, node.meta["val"].dtype):
        return NotImplemented
    value = c.tensor(number, kind)
    if not shape:
        return value
    sizes = [d for d in shape if isinstance(d, int)]
    array = c.array(value)
    if len(sizes) == len(shape) and math.prod(sizes) <= 64 and array is not None:
        return c.constant(np.full(sizes, array))
    return c.op("Expand", value, c.shape(shape), shape=shape)


@writes("full", "full_like", "new_full", "fill.Scalar", "fill.Tensor")
def _full(c: Converter, node: Any, like: Any, *rest: Any, fill_value: Any = None, **_: Any) -> Any:
    return _filled(c, node, rest[-1] if rest else fill_value)


@writes("zeros", "zeros_like", "new_zeros", "empty.memory_format", "new_empty", "empty_like")
def _zeros(c: Converter, node: Any, *_: Any, **__: Any) -> ir.Value:
    return _filled(c, node, 0)


@writes("ones", "ones_like", "new_ones")
def _ones(c: Converter, node: Any, *_: Any, **__: Any) -> ir.Value:
    return _filled(c, node, 1)


@writes("scalar_tensor")
def _scalar(c: Converter, node: Any, number: Any, **_: Any) -> Any:
    fit = fits(number, node.meta["val"].dtype)
    return c.tensor(number, kind_of(node)) if fit else NotImplemented


@writes("arange", "arange.start", "arange.start_step")
def _arange(c: Converter, node: Any, one: Any, two: Any = None, step: Any = 1, **_: Any) -> Any:
    kind = kind_of(node)
    start, end = (0, one) if two is None else (one, two)
    if kind not in (INT64, ir.DataType.INT32, FLOAT) or any(map(_is_float, (start, end, step))):
        return NotImplemented  # Range counts its elements in the type, torch in float64
    whole = INT64 if kind == FLOAT else kind
    bounds = [c.tensor(x, whole) for x in (start, end, step)]
    return c.cast(c.op("Range", *bounds, shape=shape_of(node), dtype=whole), kind)


def _is_float(x: Any) -> bool:
    known = x.meta["val"] if isinstance(x, torch.fx.Node) else x
    return isinstance(known, (float, torch.SymFloat))


@writes("tril", "triu")
def _tri(c: Converter, node: Any, x: Any, diagonal: int = 0) -> ir.Value:
    upper = int(node.target is torch.ops.aten.triu.default)
    return c.op("Trilu", c.tensor(x), c.constant(np.array(diagonal, np.int64)), upper=upper)
