"""Pieces of tensors, so that what works in float64 takes little memory beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from roundoff.describe import TypedTensor, as_tensor, opened
from roundoff.errors import ArgumentError, ShapeError

#: Elements of a piece that is widened to float64 at once: on a CPU what its caches hold, on a GPU
#: enough to keep it busy.
PIECE, PIECE_GPU = 1 << 17, 1 << 22


def split(tensors: Sequence[torch.Tensor], most: int) -> Iterator[Sequence[torch.Tensor]]:
    """Views of tensors of one shape, of at most *most* elements, in the order of the elements.

    Tensors without elements have none. No tensor is copied, whatever its strides.
    """
    size = tensors[0].numel()
    if size <= most:
        yield from [tensors] if size else []
        return
    rows = most // (size // len(tensors[0]))
    views = (t.split(rows) if rows else t.unbind() for t in tensors)
    for parts in zip(*views, strict=True):
        yield from split(parts, most)


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
    for parts in split(tensors, most):
        yield [t.reshape(-1).to(device, torch.float64, copy=True) for t in parts]


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
