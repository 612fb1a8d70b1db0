"""Sequences (Python lists) and optionals (a value or None)."""

from __future__ import annotations

from typing import Any

import torch

from .common import NotHandledError, ShapeError, Tensor, axis_of, ints, torch_function


def _position(position: Tensor, size: int, extra: int = 0) -> int:
    k = ints(position)[0]
    if not -size <= k < size + extra:
        raise ShapeError("position in a sequence", got=k, expected=f"in a sequence of {size}")
    return k + size if k < 0 else k


@torch_function("SequenceConstruct", 11)
def _construct(*items: Any) -> list[Any]:
    return list(items)


torch_function("SequenceEmpty", 11)(list)


@torch_function("SequenceLength", 11)
def _length(items: list[Any]) -> Tensor:
    return torch.tensor(len(items), dtype=torch.int64)


@torch_function("SequenceAt", 11)
def _at(items: list[Any], position: Tensor) -> Any:
    return items[_position(position, len(items))]


@torch_function("SequenceInsert", 11)
def _insert(items: list[Any], item: Any, position: Tensor | None = None) -> list[Any]:
    size = len(items)
    k = size if position is None else _position(position, size, 1)
    return [*items[:k], item, *items[k:]]


@torch_function("SequenceErase", 11)
def _erase(items: list[Any], position: Tensor | None = None) -> list[Any]:
    if not items:
        raise ShapeError("SequenceErase of an empty sequence")
    k = len(items) - 1 if position is None else _position(position, len(items))
    return [*items[:k], *items[k + 1 :]]


@torch_function("ConcatFromSequence", 11, axis=None, new_axis=0)
def _concat(items: list[Tensor], *, axis: int, new_axis: int) -> Tensor:
    if not items or not all(isinstance(x, Tensor) for x in items):
        raise NotHandledError("ConcatFromSequence of no tensors")
    rank = items[0].dim()
    if any(x.dim() != rank for x in items):
        raise ShapeError("ConcatFromSequence", expected="tensors of one rank")
    if new_axis:
        return torch.stack(items, axis_of(axis, rank + 1))
    return torch.cat(items, axis_of(axis, rank))


@torch_function("SplitToSequence", 11, 24, axis=0, keepdims=1)
def _split(x: Tensor, sizes: Tensor | None = None, *, axis: int, keepdims: int) -> list[Tensor]:
    if not isinstance(x, Tensor):
        raise NotHandledError("SplitToSequence of strings")
    k = axis_of(axis, x.dim())
    if sizes is None:
        return list(torch.split(x, 1, k)) if keepdims else list(torch.unbind(x, k))
    if sizes.dim() == 0:
        size = ints(sizes)[0]
        if size <= 0:
            raise ShapeError("SplitToSequence", got=size, expected="a positive size")
        return list(torch.split(x, size, k))
    lengths = ints(sizes)
    if sum(lengths) != x.shape[k] or min(lengths, default=0) < 0:
        raise ShapeError("SplitToSequence", got=lengths, expected=f"a sum of {x.shape[k]}")
    return list(torch.split(x, lengths, k))


@torch_function("Optional", 15, 28)
def _optional(x: Any = None) -> Any:
    return x


@torch_function("OptionalHasElement", 15, 18, 28)
def _has_element(x: Any = None) -> Tensor:
    return torch.tensor(x is not None)


@torch_function("OptionalGetElement", 15, 18, 28)
def _get_element(x: Any) -> Any:
    if x is None:
        raise ShapeError("OptionalGetElement of an empty optional")
    return x
