"""What several kernels share: reductions that the interpreter can run, and a quick launch."""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch
import triton.language as tl

from ._runtime import Launch, kernel

__all__ = ["greatest", "run", "total"]


@kernel
def total(x, axis: tl.constexpr):
    """Sum along one axis. Not ``tl.sum``, which belongs to whoever imported Triton first."""
    return tl.reduce(x, axis, tl.standard._sum_combine)


@kernel
def greatest(x, axis: tl.constexpr):
    """Largest along one axis."""
    return tl.reduce(x, axis, tl.standard._elementwise_max)


_LAUNCHES: dict[Any, Launch] = {}


def run(function: Any, grid: tuple[int, int], *args: Any, **options: int) -> None:
    """Launch a kernel on its arguments in order: tensors, then numbers and constants."""
    tensors = tuple(takewhile(lambda a: isinstance(a, torch.Tensor), args))
    rest, index = args[len(tensors) :], tensors[0].get_device()
    # By identity: hashing one of Triton's functions takes a lock.
    key = (id(function), index, rest, *(t.dtype for t in tensors), *options.values())
    found = _LAUNCHES.get(key)
    if found is None:
        found = _LAUNCHES[key] = Launch(function, index, (), **options)
    found(grid, tensors, rest)
