"""What several kernels share: reductions that the interpreter can run, and a quick launch."""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch
import triton.language as tl

from ._runtime import kernel, launch

__all__ = ["greatest", "run", "total"]


@kernel
def total(x, axis: tl.constexpr):
    """Sum along one axis. Not ``tl.sum``, which belongs to whoever imported Triton first."""
    return tl.reduce(x, axis, tl.standard._sum_combine)


@kernel
def greatest(x, axis: tl.constexpr):
    """Largest along one axis."""
    return tl.reduce(x, axis, tl.standard._elementwise_max)


def run(function: Any, grid: tuple[int, int], *args: Any, **options: int) -> None:
    """Launch a kernel on its arguments in order: tensors, then numbers and constants."""
    tensors = tuple(takewhile(lambda a: isinstance(a, torch.Tensor), args))
    rest = args[len(tensors) :]
    launch(function, grid, (*(t.dtype for t in tensors), *rest), tensors, rest, **options)
