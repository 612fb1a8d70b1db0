"""Along an axis: sums, extremes, softmax, normalisations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..converter import Converter
from .table import (
    INT64,
    axis_of,
    constant_of,
    kind_of,
    rank_of,
    writes,
)

_LONG = (torch.int64, torch.uint64, torch.uint32)


def _reduced(op: str) -> Callable[..., Any]:
    def write(
        c: Converter, node: Any, x: Any, axes: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> Any:
        kind = kind_of(node)
        # ONNX Runtime adds integers in float64: exact up to 2**53, which 32 bits do not add up to.
        short = kind == INT64 and x.meta["val"].dtype not in _LONG
        if op == "ReduceSum" and not (kind.is_floating_point() or short):
            return NotImplemented
        listed = [axes] if isinstance(axes, int) else list(axes or range(rank_of(x)))
        value = c.tensor(x, kind)
        if not rank_of(x):
            return value
        at = c.ints(sorted(axis_of(a, rank_of(x)) for a in listed))
        return c.op(op, value, at, keepdims=int(keepdim))

    return write


writes("mean", "mean.dim")(_reduced("ReduceMean"))
writes("sum", "sum.dim_IntList")(_reduced("ReduceSum"))


@writes("cumsum")
def _cumsum(c: Converter, node: Any, x: Any, axis: int, dtype: Any = None) -> Any:
    if not rank_of(x):
        return NotImplemented
    at = c.constant(np.array(axis_of(axis, rank_of(x)), np.int64))
    return c.op("CumSum", c.tensor(x, kind_of(node)), at)


def _soft(op: str) -> Callable[..., Any]:
    def write(c: Converter, node: Any, x: Any, axis: int, wider: bool = False) -> Any:
        if not rank_of(x):
            return NotImplemented
        return c.op(op, c.tensor(x, kind_of(node)), axis=axis_of(axis, rank_of(x)))

    return write


writes("_softmax")(_soft("Softmax"))
writes("_log_softmax")(_soft("LogSoftmax"))


@writes("native_layer_norm")
def _layer_norm(
    c: Converter, node: Any, x: Any, shape: Sequence[Any], weight: Any, bias: Any, eps: Any
) -> Any:
    if not _alone(node) or weight is None:
        return NotImplemented
    inputs = [c.tensor(t) if t is not None else None for t in (x, weight, bias)]
    number = constant_of(c, eps)
    if number is None:
        return NotImplemented
    out = c.op("LayerNormalization", *inputs, axis=-len(shape), epsilon=float(number))
    return [out, None, None]


def _alone(node: Any) -> bool:
    """Whether nothing reads any but the first of a node's results."""
    return not any(user.users for user in node.users if user.args[1] != 0)


@writes("_native_batch_norm_legit_no_training")
def _batch_norm(
    c: Converter,
    node: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    momentum: float,
    eps: float,
) -> Any:
    number = constant_of(c, eps)
    if weight is None or bias is None or rank_of(x) < 2 or not _alone(node) or number is None:
        return NotImplemented
    inputs = [c.tensor(t) for t in (x, weight, bias, mean, variance)]
    return [c.op("BatchNormalization", *inputs, epsilon=number), None, None]
