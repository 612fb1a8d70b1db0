"""Short kernels for the pages, and what a page's own kernels begin with.

A backward in two stages, one with a lock, and a plain product; :func:`kernel`, ``sum_along`` and
``same_bits`` for kernels that stand on a page.

They take sizes that fit their blocks and are not tuned. :func:`roundoff.kernels.layer_norm` and
:func:`roundoff.kernels.matmul` are the ones to use; ``fast_backward`` is the first stage of the
former's backward. The pages :ref:`triton-layer-norm` and :ref:`batch-invariance` explain them.
"""

# A language of its own, typed by Triton.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..errors import ArgumentError, ShapeError
from ._layer_norm_kernels import backward as fast_backward
from ._layer_norm_kernels import same_bits
from ._runtime import check_device, interpreting, kernel, multiprocessors, sum_along

__all__ = [
    "add_partial_sums",
    "fast_backward",
    "kernel",
    "locked",
    "locked_sums",
    "plain_loop",
    "plain_product",
    "same_bits",
    "simple_backward",
    "sum_along",
    "tutorial_groups",
    "two_stage",
]


@kernel
def simple_backward(X, DY, W, MEAN, RSTD, DX, PART, M, N, P: tl.constexpr):
    """First stage: dx of each row, and one partial sum of dw and of db for each program."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, P)
    here = cols < N
    w = tl.load(W + cols, mask=here, other=0.0).to(tl.float32)
    dw = tl.full((P,), 0.0, tl.float32)
    db = tl.full((P,), 0.0, tl.float32)
    for row in range(program, M, programs):  # always in this order
        x = tl.load(X + row * N + cols, mask=here, other=0.0).to(tl.float32)
        g = tl.load(DY + row * N + cols, mask=here, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        xhat = tl.where(here, (x - tl.load(MEAN + row)) * rstd, 0.0)
        c1 = sum_along(xhat * w * g, 0) / N
        c2 = sum_along(w * g, 0) / N
        dx = rstd * (w * g - c2 - xhat * c1)
        tl.store(DX + row * N + cols, dx.to(DX.dtype.element_ty), mask=here)
        dw += g * xhat
        db += g
    tl.store(PART + program * N + cols, dw, mask=here)
    tl.store(PART + (programs + program) * N + cols, db, mask=here)


@kernel
def add_partial_sums(PART, OUT, G, N, R: tl.constexpr, P: tl.constexpr):
    """Second stage: add G partial sums (at most R) of P columns, always in the same order."""
    which = tl.program_id(1)  # 0: dw, 1: db
    rows = tl.arange(0, R)
    cols = tl.program_id(0) * P + tl.arange(0, P)
    here = (rows < G)[:, None] & (cols < N)[None, :]
    part = tl.load(PART + (which * G + rows)[:, None] * N + cols[None, :], mask=here, other=0.0)
    tl.store(OUT + which * N + cols, sum_along(part, 0), mask=cols < N)


@kernel
def locked_sums(X, DY, MEAN, RSTD, DW, LOCK, N, GROUPS, P: tl.constexpr, BARRIER: tl.constexpr):
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
    if BARRIER:
        tl.debug_barrier()  # every thread of the program has stored
    tl.atomic_xchg(LOCK + group, 0)


def tutorial_groups(columns: int) -> int:
    """Locks, and sums, that Triton's tutorial uses for rows of so many columns.

    Examples
    --------
    >>> from roundoff.kernels.lessons import tutorial_groups
    >>> [tutorial_groups(n) for n in (1024, 4096, 8192, 8193)]
    [256, 128, 96, 64]
    """
    return 256 if columns <= 1024 else 128 if columns <= 4096 else 96 if columns <= 8192 else 64


def _block(n: int) -> int:
    if n > 16384:
        raise ArgumentError("a lesson takes rows of one block", got=n, expected="at most 16384")
    return triton.next_power_of_2(n)


def _warps(n: int) -> int:
    return min(max(_block(n) // 256, 1), 8)  # as the tutorial has it


def two_stage(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
    weight: torch.Tensor, programs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Backward of layer normalisation in two stages, without locks.

    Parameters
    ----------
    dy, x : torch.Tensor
        Shape (M, N), contiguous.
    mean, rstd : torch.Tensor
        Shape (M,), float32.
    weight : torch.Tensor
        Shape (N,).
    programs : int, optional
        Partial sums; by default one for each multiprocessor.

    Returns
    -------
    tuple of torch.Tensor
        dx (M, N) in the type of `x`; dw and db (N,) in that of `weight`.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels.lessons import two_stage
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> x = torch.tensor([[-1.0, 1.0], [-1.0, 1.0]], device=device)
    >>> zero, one = torch.zeros(2, device=device), torch.ones(2, device=device)
    >>> two_stage(torch.ones_like(x), x, zero, one, one)[1].tolist()
    [-2.0, 2.0]
    """
    check_device(x.device, "x")
    m, n = x.shape
    programs = max(1, min(programs or multiprocessors(x.get_device()), m))
    dx = torch.empty_like(x)
    part = x.new_empty((2 * programs, n), dtype=torch.float32)
    out = x.new_empty((2, n), dtype=torch.float32)
    simple_backward[(programs,)](x, dy, weight, mean, rstd, dx, part, m, n, _block(n),
                                num_warps=_warps(n))  # fmt: skip
    columns = 1024 if interpreting() else 16
    grid = (-(-n // columns), 2)
    add_partial_sums[grid](part, out, programs, n, _block(programs), columns)
    return dx, out[0].to(weight.dtype), out[1].to(weight.dtype)


def locked(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
    groups: int | None = None, barrier: bool = True,
) -> torch.Tensor:  # fmt: skip
    """dweight summed under locks: a counter-example, whose bits depend on the order of arrival.

    Parameters
    ----------
    dy, x, mean, rstd : torch.Tensor
        As for :func:`two_stage`.
    groups : int, optional
        Locks, and sums kept in the type of `x`; row i adds to sum i modulo `groups`. By default
        :func:`tutorial_groups`.
    barrier : bool
        Wait for the program's own stores before the lock is released. Without it another program
        may read a sum half written: a race. With it the order of the additions still varies.

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
    check_device(x.device, "x")
    m, n = x.shape
    groups = groups or tutorial_groups(n)
    sums = x.new_zeros((groups, n))
    lock = torch.zeros(groups, dtype=torch.int32, device=x.device)
    locked_sums[(m,)](x, dy, mean, rstd, sums, lock, n, groups, _block(n), barrier,
                      num_warps=_warps(n))  # fmt: skip
    return sums.float().sum(0).to(x.dtype)


@kernel
def plain_loop(
    X, W, Y, K, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Y = X W^T in float32: one chain over each split of K, the splits added in order."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for split in range(SPLITS):
        first = split * (K // SPLITS)
        acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for start in range(first, first + K // SPLITS, DEPTH):
            x = tl.load(X + m[:, None] * K + (start + k)[None, :])
            w = tl.load(W + n[None, :] * K + (start + k)[:, None])
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        total += acc
    tl.store(Y + m[:, None] * N + n[None, :], total)


def plain_product(
    x: torch.Tensor, weight: torch.Tensor, tile: tuple[int, int, int], *, warps: int = 4,
    splits: int = 1, tf32: bool = False,
) -> tuple[torch.Tensor, str]:  # fmt: skip
    """x weight^T before its final rounding, by one tile, and the instruction that multiplied.

    Parameters
    ----------
    x : torch.Tensor
        Shape (M, K), contiguous: bfloat16, float16, float32, or a float8 on a GPU that has it.
    weight : torch.Tensor
        Shape (N, K), contiguous, of the same type.
    tile : tuple of int
        Rows, columns and values of K at a time; they divide M, N and K / splits.
    warps : int
        Warps of a program.
    splits : int
        Parts of K, each a chain of its own; the parts are added in ascending order.
    tf32 : bool
        Whether float32 is multiplied as TF32.

    Returns
    -------
    tuple of torch.Tensor and str
        The product, float32, shape (M, N); and "wgmma", "mma" or "fma", as the compiled kernel has
        it, or "numpy" in the interpreter.

    Raises
    ------
    ShapeError
        The tile does not divide the product.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels.lessons import plain_product
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> ones = torch.ones(16, 64, device=device)
    >>> float(plain_product(ones, ones, (16, 16, 32), splits=2)[0].mean())
    64.0
    """
    check_device(x.device, "x")
    (m, k), n = x.shape, weight.shape[0]
    rows, columns, depth = tile
    if m % rows or n % columns or k % (splits * depth):
        raise ShapeError(
            "the tile does not divide the product", got=(m, n, k),
            expected=f"multiples of {(rows, columns, splits * depth)}",
        )  # fmt: skip
    y = torch.empty(m, n, dtype=torch.float32, device=x.device)
    compiled = plain_loop[(m // rows, n // columns)](
        x, weight, y, k, n, *tile, splits, "tf32" if tf32 else "ieee",
        num_warps=warps, num_stages=2,
    )  # fmt: skip
    if compiled is None:
        return y, "numpy"
    code = compiled.asm["ptx"]
    return y, next((name for name in ("wgmma", "mma") if f"{name}." in code), "fma")
