"""Sums of a vector in Triton: with atomic additions, and in two passes.

Both cut the vector into blocks, one a program, and add each block as a tree in float32. They
differ in how the partial sums meet. With atomics each program adds its own to one number in
memory, in the order in which programs happen to finish: the grouping changes from run to run.
In two passes the partial sums are stored, each in its place, and a single program adds them in
an order that does not change.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl

from roundoff.errors import ArgumentError, DtypeError, ShapeError

from ._runtime import check_device, check_tensor, kernel, sum_along

__all__ = ["sum_atomic", "sum_two_pass"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Elements that Triton lets a block have.
_LARGEST = 2**20


@kernel
def _sum_atomic_kernel(
    x_ptr,  # (n,) float32, float16 or bfloat16
    out_ptr,  # (1,) float32, zero at the start
    n,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < n, other=0.0).to(tl.float32)
    tl.atomic_add(out_ptr, sum_along(x, 0))


@kernel
def _sum_blocks_kernel(
    x_ptr,  # (n,) float32, float16 or bfloat16
    out_ptr,  # (number of programs,) float32
    n,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0), sum_along(x, 0))


def sum_atomic(x: torch.Tensor, block: int = 256) -> torch.Tensor:
    """Sum of a vector whose blocks are added by atomic additions.

    Parameters
    ----------
    x : torch.Tensor, shape (n,)
        float32, float16 or bfloat16, contiguous, without a gradient; on a CUDA device, or where
        the kernels are interpreted on the CPU.
    block : int
        Values that a program adds; a power of two, at least 2.

    Returns
    -------
    torch.Tensor, shape ()
        float32. Not reproducible on a GPU: two calls may differ in their last bits.

    Raises
    ------
    ShapeError, DtypeError, ArgumentError, UnsupportedError
        When the tensor, its device or the block is not as above.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels.reduce import sum_atomic
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> sum_atomic(torch.ones(1000, device=device)).item()
    1000.0
    """
    x = _checked(x, block)
    out = torch.zeros(1, dtype=torch.float32, device=x.device)
    _sum_atomic_kernel[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
    return out[0]


def sum_two_pass(x: torch.Tensor, block: int = 1024) -> torch.Tensor:
    """Sum of a vector whose blocks are added in a fixed order, pass after pass.

    Parameters and errors are those of :func:`sum_atomic`.

    Returns
    -------
    torch.Tensor, shape ()
        float32. The same bits on every call, for one block size.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels.reduce import sum_two_pass
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> sum_two_pass(torch.ones(1000, device=device), block=256).item()
    1000.0
    """
    x = _checked(x, block)
    while True:
        programs = triton.cdiv(x.numel(), block)
        out = torch.empty(programs, dtype=torch.float32, device=x.device)
        _sum_blocks_kernel[(programs,)](x, out, x.numel(), BLOCK=block)
        if programs == 1:
            return out[0]
        x = out


def _checked(x: torch.Tensor, block: int) -> torch.Tensor:
    """The vector as it lies in memory."""
    check_tensor(x, "x")
    if x.layout is not torch.strided or x.dim() != 1 or x.numel() == 0 or not x.is_contiguous():
        raise ShapeError("cannot be added", got=tuple(x.shape), expected="a contiguous vector")
    if x.dtype not in _DTYPES:
        raise DtypeError("cannot be added", got=x.dtype, expected="float32, float16 or bfloat16")
    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("has no backward", got="requires_grad", hint="x.detach()")
    if not isinstance(block, int) or not 2 <= block <= _LARGEST or block & (block - 1):
        raise ArgumentError(
            "block size",
            got=repr(block),
            expected=f"a power of two, at least 2, at most {_LARGEST}",
        )
    check_device(x.device, "x")
    return x.resolve_neg()
