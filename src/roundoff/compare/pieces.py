"""Pieces of tensors, so that what works in float64 takes little memory beside them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from roundoff.describe import TypedTensor, as_tensor, opened
from roundoff.errors import ArgumentError, ShapeError

#: Elements of a piece that is widened to float64 at once: on a CPU what its caches hold, on a GPU
#: enough to keep it busy.
PIECE, PIECE_GPU = 1 << 17, 1 << 22


def partition(shape: Sequence[int], most: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """(flat offset, index) of pieces of at most *most* elements that cut a shape, in order.

    An empty shape has none. Works for any strides, since a piece is a run of one axis under fixed
    indices of the axes before it.
    """
    if math.prod(shape) <= most:
        if math.prod(shape):
            yield 0, ()
        return
    axis = next(k for k in range(len(shape)) if math.prod(shape[k + 1 :]) <= most)
    inner = math.prod(shape[axis + 1 :])
    step = max(1, most // inner)
    offset = 0
    for before in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            stop = min(start + step, shape[axis])
            yield offset, (*before, slice(start, stop))
            offset += (stop - start) * inner


def typed_tensor(value: Any, name: str) -> TypedTensor:
    """The tensor in *value*; an ArgumentError where there is none, or not all of its numbers."""
    typed = as_tensor(value)
    if typed is None:
        raise ArgumentError(
            f"{name} is no tensor", got=type(value).__name__, expected="a tensor or array"
        )
    return typed


def same_shape(*tensors: torch.Tensor) -> None:
    """A ShapeError unless all have one shape."""
    shapes = [tuple(t.shape) for t in tensors]
    if len(set(shapes)) > 1:
        raise ShapeError("shapes differ", got=" and ".join(map(str, shapes)))


def float64_pieces(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Pieces of tensors of one shape as flat float64, on the device of the first one.

    The pieces are copies that may be written to; strides do not matter, no tensor is copied whole.
    """
    device = tensors[0].device
    most = PIECE if device.type == "cpu" else PIECE_GPU
    for _, index in partition(tensors[0].shape, most):
        views = [(t[index] if index else t).reshape(-1) for t in tensors]
        yield [v.to(device, torch.float64, copy=True) for v in views]


def aligned(expected: Any, got: Any) -> Any:
    """*got* with the entries of its dicts in the order that *expected* has them.

    Dicts, data classes and model outputs with the same keys are paired by key, at every depth; all
    else stays as it is.

    Raises
    ------
    ArgumentError
        When the keys of two differ.
    """
    one, other = opened(expected), opened(got)
    if isinstance(one, dict) and isinstance(other, dict):
        if set(one) != set(other):
            raise ArgumentError(
                "the two hold different keys",
                got=f"{sorted(map(str, other))} for {sorted(map(str, one))}",
                expected="the same keys in both",
                hint="compare lists of tensors, in one order",
            )
        return {key: aligned(value, other[key]) for key, value in one.items()}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [aligned(a, b) for a, b in zip(one, other, strict=True)]
    return got
