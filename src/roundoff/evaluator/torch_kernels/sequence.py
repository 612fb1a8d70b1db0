"""Sequences (Python lists) and optionals (a value or None)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from roundoff.errors import ShapeError
from roundoff.evaluator.nodes import Node

from .common import NotHandledError, axis_of, ints, torch_kernel

Tensor = torch.Tensor
Function = Callable[..., Any]


def _position(position: Tensor, size: int, extra: int = 0) -> int:
    k = ints(position)[0]
    if not -size <= k < size + extra:
        raise ShapeError("position in a sequence", got=k, expected=f"in a sequence of {size}")
    return k + size if k < 0 else k


@torch_kernel("SequenceConstruct", 11)
def _construct(node: Node) -> Function:
    return lambda *items: list(items)


@torch_kernel("SequenceEmpty", 11)
def _empty(node: Node) -> Function:
    return list


@torch_kernel("SequenceLength", 11)
def _length(node: Node) -> Function:
    return lambda items: torch.tensor(len(items), dtype=torch.int64)


@torch_kernel("SequenceAt", 11)
def _at(node: Node) -> Function:
    return lambda items, position: items[_position(position, len(items))]


@torch_kernel("SequenceInsert", 11)
def _insert(node: Node) -> Function:
    def insert(items: list[Any], item: Any, position: Tensor | None = None) -> list[Any]:
        size = len(items)
        k = size if position is None else _position(position, size, 1)
        return [*items[:k], item, *items[k:]]

    return insert


@torch_kernel("SequenceErase", 11)
def _erase(node: Node) -> Function:
    def erase(items: list[Any], position: Tensor | None = None) -> list[Any]:
        if not items:
            raise ShapeError("SequenceErase of an empty sequence")
        k = len(items) - 1 if position is None else _position(position, len(items))
        return [*items[:k], *items[k + 1 :]]

    return erase


@torch_kernel("ConcatFromSequence", 11)
def _concat(node: Node) -> Function:
    axis, new = node.attribute("axis"), bool(node.attribute("new_axis", 0))

    def concat(items: list[Tensor]) -> Tensor:
        if not items or not all(isinstance(x, Tensor) for x in items):
            raise NotHandledError("ConcatFromSequence of no tensors")
        rank = items[0].dim()
        if any(x.dim() != rank for x in items):
            raise ShapeError("ConcatFromSequence", expected="tensors of one rank")
        if new:
            return torch.stack(items, axis_of(axis, rank + 1))
        return torch.cat(items, axis_of(axis, rank))

    return concat


@torch_kernel("SplitToSequence", 11, 24)
def _split(node: Node) -> Function:
    axis, keep = node.attribute("axis", 0), bool(node.attribute("keepdims", 1))

    def split(x: Tensor, sizes: Tensor | None = None) -> list[Tensor]:
        if not isinstance(x, Tensor):
            raise NotHandledError("SplitToSequence of strings")
        k = axis_of(axis, x.dim())
        if sizes is None:
            return list(torch.split(x, 1, k)) if keep else list(torch.unbind(x, k))
        if sizes.dim() == 0:
            size = ints(sizes)[0]
            if size <= 0:
                raise ShapeError("SplitToSequence", got=size, expected="a positive size")
            return list(torch.split(x, size, k))
        lengths = ints(sizes)
        if sum(lengths) != x.shape[k] or min(lengths, default=0) < 0:
            raise ShapeError("SplitToSequence", got=lengths, expected=f"a sum of {x.shape[k]}")
        return list(torch.split(x, lengths, k))

    return split


@torch_kernel("Optional", 15, 28)
def _optional(node: Node) -> Function:
    return lambda x=None: x


@torch_kernel("OptionalHasElement", 15, 18, 28)
def _has_element(node: Node) -> Function:
    return lambda x=None: torch.tensor(x is not None)


@torch_kernel("OptionalGetElement", 15, 18, 28)
def _get_element(node: Node) -> Function:
    def get(x: Any) -> Any:
        if x is None:
            raise ShapeError("OptionalGetElement of an empty optional")
        return x

    return get
