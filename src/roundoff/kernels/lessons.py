"""A lock, as a counter-example, and what a page's own kernels begin with.

:func:`kernel`, ``sum_along`` and ``same_bits`` are for kernels that stand on a page. The pages
:ref:`triton-layer-norm` and :ref:`layer-norm-ladder` explain them.
"""

# A language of its own, typed by Triton.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._layer_norm_kernels import same_bits
from ._runtime import kernel, sum_along

__all__ = ["kernel", "locked", "locked_sums", "same_bits", "sum_along"]


@kernel
def locked_sums(X, DY, MEAN, RSTD, DW, LOCK, N, GROUPS, P: tl.constexpr):
    """One row per program; the rows of a group are added to one sum, under the group's lock."""
    row = tl.program_id(0)
    group = row % GROUPS
    cols = tl.arange(0, P)
    here = cols < N
    x = tl.load(X + row * N + cols, mask=here, other=0.0).to(tl.float32)
    g = tl.load(DY + row * N + cols, mask=here, other=0.0).to(tl.float32)
    xhat = (x - tl.load(MEAN + row)) * tl.load(RSTD + row)
    summed = (g * xhat).to(DW.dtype.element_ty)
    while tl.atomic_cas(LOCK + group, 0, 1) == 1:
        pass
    summed += tl.load(DW + group * N + cols, mask=here, other=0.0)
    tl.store(DW + group * N + cols, summed, mask=here)
    tl.debug_barrier()  # every thread of the program has stored: without it another reads a half
    tl.atomic_xchg(LOCK + group, 0)


def locked(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    groups: int | None = None,
) -> torch.Tensor:
    """dweight summed under locks: a counter-example, whose bits depend on the order of arrival.

    Parameters
    ----------
    dy, x : torch.Tensor
        Shape (M, N), contiguous, N at most 16,384.
    mean, rstd : torch.Tensor
        Shape (M,), float32.
    groups : int, optional
        Locks, and sums kept in the type of `x`; row i adds to sum i modulo `groups`. By default as
        many as Triton's tutorial has.

    Returns
    -------
    torch.Tensor
        dw (N,) in the type of `x`; the groups' sums are added in float32.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels.lessons import locked
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> x = torch.tensor([[-1.0, 1.0], [-1.0, 1.0]], device=device)
    >>> zero, one = torch.zeros(2, device=device), torch.ones(2, device=device)
    >>> locked(torch.ones_like(x), x, zero, one).tolist()
    [-2.0, 2.0]
    """
    m, n = x.shape
    tutorial = 256 if n <= 1024 else 128 if n <= 4096 else 96 if n <= 8192 else 64
    groups, block = groups or tutorial, triton.next_power_of_2(n)
    sums = x.new_zeros((groups, n))
    lock = torch.zeros(groups, dtype=torch.int32, device=x.device)
    warps = min(max(block // 256, 1), 8)  # as the tutorial has it
    locked_sums[(m,)](x, dy, mean, rstd, sums, lock, n, groups, block, num_warps=warps)
    return sums.float().sum(0).to(x.dtype)
