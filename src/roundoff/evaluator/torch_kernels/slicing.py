"""Operators that cut and join tensors along axes."""

from __future__ import annotations

from typing import Any

import torch

from roundoff.errors import ShapeError

from .common import (
    Function,
    Node,
    Tensor,
    axis_of,
    ints,
    steering,
    torch_function,
    torch_kernel,
)


@torch_function("Concat", 4, axis=None)
def _concat(*inputs: Tensor, axis: int) -> Tensor:
    rank = inputs[0].dim()
    # torch.cat skips empty vectors whatever their rank.
    if any(x.dim() != rank for x in inputs):
        raise ShapeError("Concat", got=str([x.dim() for x in inputs]), expected="one rank")
    return torch.cat(inputs, axis_of(axis, rank))


def _sliced(
    x: Tensor, starts: list[int], ends: list[int], axes: list[int] | None, steps: list[int] | None
) -> Tensor:
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    over = [axis_of(axis, x.dim()) for axis in axes]
    if not len(set(over)) == len(axes) == len(starts) == len(ends) == len(steps):
        raise ShapeError(
            "Slice", got=f"{starts}, {ends}, {axes}, {steps}", expected="distinct axes, one length"
        )
    for start, end, k, step in zip(starts, ends, over, steps, strict=True):
        if step < 0:  # ONNX begins at the first element, where NumPy takes none
            start = max(start, -x.shape[k])
        places = range(x.shape[k])[start:end:step]
        if step > 0:
            x = x[(slice(None),) * k + (slice(places.start, places.stop, step),)]
        else:
            x = x.index_select(k, places.start + step * torch.arange(len(places), device=x.device))
    return x


@torch_kernel("Slice", 1)
def _slice(node: Node) -> Function:
    names = ("starts", "ends", "axes", "steps")
    fixed = [steering(node, k, name) for k, name in enumerate(names, 1)]

    def cut(x: Tensor, *rest: Tensor | None) -> Tensor:
        values: list[Any] = list(fixed)
        for k, given in enumerate(rest):
            if values[k] is None and given is not None:
                values[k] = ints(given)
        return _sliced(x, *values)

    return cut


def _split_sizes(total: int, count: int) -> list[int]:
    size = -(-total // count)
    return [max(min(size, total - k * size), 0) for k in range(count)]


@torch_kernel("Split", 2)
def _split(node: Node) -> Function:
    axis, count = node.attribute("axis", 0), len(node.outputs)
    fixed = steering(node, 1, "split")

    def split(x: Tensor, given: Tensor | None = None) -> Any:
        k = axis_of(axis, x.dim())
        sizes = ints(given) if fixed is None and given is not None else fixed
        if sizes is None:
            sizes = _split_sizes(x.shape[k], node.attribute("num_outputs", count))
        if len(sizes) != count or min(sizes) < 0 or sum(sizes) != x.shape[k]:
            raise ShapeError("Split", got=sizes, expected=f"{count} that add up to {x.shape[k]}")
        parts = torch.split(x, sizes, k)
        return parts if count > 1 else parts[0]

    return split
