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
    torch_kernel,
    torch_steered,
)

Reducer = Callable[[Tensor, list[int], bool], Tensor]


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.sum(x, axes, keepdim=keep, dtype=x.dtype)


def _log_sum_exp(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if not x.is_floating_point():
        raise NotHandledError("logarithm of integers")
    return torch.logsumexp(x, axes, keepdim=keep)


def _norm(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.linalg.vector_norm(x, 2, axes, keep)


# From 13 or 18 on the axes are an input, before an attribute.
_REDUCERS: dict[str, Reducer] = {
    "ReduceSum": _sum,
    "ReduceMean": torch.mean,
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
    "ReduceL2": _norm,  # ONNX's definition goes through float32
}


def _register(op_type: str, reducer: Reducer) -> None:
    @torch_steered(op_type, 1, "axes", keepdims=1, noop_with_empty_axes=0)
    def reduce(
        x: Tensor, axes: list[int] | None, *, keepdims: int, noop_with_empty_axes: int
    ) -> Tensor:
        if not axes and noop_with_empty_axes:
            return x.abs() if reducer is _norm else x
        rank = max(x.dim(), 1)  # a number counts as a vector
        over = [axis_of(a, rank) for a in axes or range(x.dim())]
        return reducer(x, over, bool(keepdims))


for _op_type, _reducer in _REDUCERS.items():
    _register(_op_type, _reducer)


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
