"""What several kernels share: reductions that the interpreter can run, and a quick launch."""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

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
    """Launch a kernel on its arguments, constants included, in order.

    Triton looks at each argument on the first call of a kind alone: types and numbers, and
    pointers that are multiples of 16 bytes.
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    aligned = not any(t.data_ptr() % 16 for t in tensors)
    key = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in args)
    launch(function, grid, key, aligned, tensors[0].device, args, **options)
