"""Elements chosen, or replaced, by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from roundoff.fusion.editor import Dim

from ..converter import Converter, dims_of
from .table import BOOL, INT64, axis_of, kind_of, on_cpu, rank_of, shape_of, writes


def _no_negative(c: Converter, index: Any) -> ir.Value:
    """An index that ONNX Runtime refuses where it is negative, as torch does.

    ONNX counts it from the end: such a one becomes a number that no axis has. On a GPU neither
    looks before the kernel runs.
    """
    value = c.tensor(index, INT64)
    if not on_cpu(index):
        return value
    negative = c.op("Less", value, c.constant(np.array(0)), dtype=BOOL)
    beyond = c.constant(np.array((1 << 63) - 1))
    return c.op("Where", negative, beyond, value, shape=dims_of(value), dtype=INT64)


@writes("embedding")
def _embedding(c: Converter, node: Any, table: Any, ids: Any, *_: Any, **__: Any) -> ir.Value:
    return c.op("Gather", c.tensor(table), _no_negative(c, ids), axis=0)


@writes("gather")
def _gather(c: Converter, node: Any, x: Any, axis: int, index: Any, **_: Any) -> Any:
    if not rank_of(x) or not rank_of(index):
        return NotImplemented
    return c.op("GatherElements", c.tensor(x), _no_negative(c, index), axis=axis)


@writes("index.Tensor")
def _index(c: Converter, node: Any, x: Any, indices: Sequence[Any]) -> Any:
    used = [(i, t) for i, t in enumerate(indices) if t is not None]
    if any(not t.meta["val"].dtype.is_signed for _, t in used):
        return NotImplemented  # bool and bytes choose by condition
    if len(used) == 1:
        axis, index = used[0]
        return c.op("Gather", c.tensor(x), c.tensor(index, INT64), axis=axis)
    if [i for i, _ in used] != list(range(len(used))):
        return NotImplemented
    common = shape_of(node)[: rank_of(node) - (rank_of(x) - len(used))]
    parts = []
    for _, t in used:
        index = c.reshape(
            c.tensor(t, INT64), [1] * (len(common) - rank_of(t)) + dims_of(c.tensor(t))
        )
        if dims_of(index) != common:
            index = c.op("Expand", index, c.shape(common), shape=common)
        parts.append(c.reshape(index, [*common, 1]))
    joined = c.op("Concat", *parts, shape=[*common, len(parts)], axis=len(common))
    return c.op("GatherND", c.tensor(x), joined)


@writes("index_copy")
def _index_copy(c: Converter, node: Any, x: Any, axis: int, index: Any, source: Any) -> Any:
    if not rank_of(x) or rank_of(index) != 1:
        return NotImplemented
    axis, new = axis_of(axis, rank_of(x)), c.tensor(source, kind_of(node))
    place = _no_negative(c, index)
    shape = dims_of(new)
    if c.opset >= 24 and axis > 0 and shape[axis] == 1:  # a decode step writes its static cache so
        at = place
        if shape[0] != 1:
            at = c.op("Expand", at, c.shape(shape[:1]), shape=shape[:1])
        return c.op("TensorScatter", c.tensor(x), new, at, axis=axis)
    thin: list[Dim] = [d if i == axis else 1 for i, d in enumerate(shape)]
    at = c.op("Expand", c.reshape(place, thin), c.shape(shape), shape=shape)
    return c.op("ScatterElements", c.tensor(x), at, new, axis=axis)


# Writes to inputs


@writes("copy_")
def _copy_into(
    c: Converter, node: Any, target: Any, source: Any, non_blocking: bool = False
) -> Any:
    """A write to an input, which AOTAutograd leaves at the end of the graph.

    Where it counts (a cache's length, of which each layer has its own), one call of torch does so
    for all: a node for it takes as long to launch as one that does work.
    """
    value, out = c.tensor(source, kind_of(node)), shape_of(node)
    one = kind_of(node) == INT64 and all(n == 1 for n in out)
    if one and not c.checks and source.target is torch.ops.aten.add.Tensor and not source.kwargs:
        counted, more = source.args
        if counted is target and isinstance(more, int):
            c.counted[str(c.tensor(target).name)] = more
            return value
    if dims_of(value) != out:
        value = c.op("Expand", value, c.shape(out))
    c.written[target] = value
    return value


@writes("_assert_async.msg")
def _check(c: Converter, node: Any, condition: Any, message: str) -> None:
    """What a function asks of its data: on a GPU it would end the process, and is left out."""
    if on_cpu(condition):
        c.checks.append((c.tensor(condition, BOOL), message))


@writes("_assert_scalar")
def _dropped(c: Converter, node: Any, *_: Any, **__: Any) -> None:
    return None
