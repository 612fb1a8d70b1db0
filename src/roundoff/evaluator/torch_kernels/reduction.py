"""Reductions along axes, softmax and its relatives, and cumulative sums."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .common import (
    Function,
    Node,
    NotHandledError,
    Tensor,
    axis_of,
    torch_function,
    torch_kernel,
    torch_steered,
)

Reducer = Callable[[Tensor, list[int], bool], Tensor]


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.sum(x, axes, keepdim=keep, dtype=x.dtype)


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if not x.is_floating_point():
        raise NotHandledError("mean of integers")
    return torch.mean(x, axes, keepdim=keep)


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


def _l2(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if not x.is_floating_point():
        raise NotHandledError("norm of integers")
    return torch.sqrt(_sum(x * x, axes, keep))


def _log_sum_exp(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if not x.is_floating_point():
        raise NotHandledError("logarithm of integers")
    return torch.logsumexp(x, axes, keepdim=keep)


def _extreme(function: Function) -> Reducer:
    def reduce(x: Tensor, axes: list[int], keep: bool) -> Tensor:
        if x.numel() == 0:
            raise NotHandledError("extreme of nothing")
        return function(x, axes, keepdim=keep)

    return reduce


# Operator -> reducer, first version. From 13 or 18 on the axes are an input, before an attribute.
_REDUCERS: dict[str, tuple[Reducer, int]] = {
    "ReduceSum": (_sum, 1),
    "ReduceMean": (_mean, 1),
    "ReduceProd": (_prod, 1),
    "ReduceL2": (_l2, 1),
    "ReduceLogSumExp": (_log_sum_exp, 1),
    "ReduceMax": (_extreme(torch.amax), 1),
    "ReduceMin": (_extreme(torch.amin), 1),
}


def _register(op_type: str, reducer: Reducer, since: int) -> None:
    @torch_steered(op_type, since, "axes", keepdims=1, noop_with_empty_axes=0)
    def reduce(
        x: Tensor, axes: list[int] | None, *, keepdims: int, noop_with_empty_axes: int
    ) -> Tensor:
        if not axes and noop_with_empty_axes:
            if op_type in ("ReduceL2", "ReduceLogSumExp"):
                raise NotHandledError("reduction along no axis")
            return x
        rank = max(x.dim(), 1)  # a number counts as a vector
        over = [axis_of(a, rank) for a in axes or range(x.dim())]
        return reducer(x, over, bool(keepdims))


for _op_type, _parts in _REDUCERS.items():
    _register(_op_type, *_parts)


def _register_arg(op_type: str, function: Function) -> None:
    @torch_function(op_type, 1, axis=0, keepdims=1, select_last_index=0)
    def arg(x: Tensor, *, axis: int, keepdims: int, select_last_index: int) -> Tensor:
        if select_last_index:
            raise NotHandledError("the last of equals")
        k, keep = axis_of(axis, x.dim()), bool(keepdims)
        if x.is_floating_point() and bool(torch.isnan(x).any()):
            raise NotHandledError("NaN among the values")
        # torch does not promise the first of equals: take the first place of the extreme.
        hits = (x == function(x, k, keepdim=True)).to(torch.uint8)
        return torch.argmax(hits, k, keepdim=keep)


_register_arg("ArgMax", torch.amax)
_register_arg("ArgMin", torch.amin)


def _register_softmax(op_type: str, function: Function) -> None:
    @torch_kernel(op_type, 13)
    def along_axis(node: Node) -> Function:
        axis = node.attribute("axis", -1)
        return lambda x: function(x, axis)

    @torch_kernel(op_type, 1)
    def flattened(node: Node) -> Function:
        axis = node.attribute("axis", 1)

        def softmax(x: Tensor) -> Tensor:
            k = axis_of(axis, x.dim()) if axis != x.dim() else axis
            return function(x.reshape(math.prod(x.shape[:k]), -1), 1).reshape(x.shape)

        return softmax


_register_softmax("Softmax", torch.softmax)
_register_softmax("LogSoftmax", torch.log_softmax)


@torch_steered("CumSum", 11, exclusive=0, reverse=0)
def _cumulative_sum(x: Tensor, axes: list[int], *, exclusive: int, reverse: int) -> Tensor:
    if exclusive or reverse:
        raise NotHandledError("sums from the other end, or without the element itself")
    return torch.cumsum(x, axis_of(axes[0], x.dim()), dtype=x.dtype)
