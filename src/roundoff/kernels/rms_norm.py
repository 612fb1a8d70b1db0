"""RMSNorm of a sum, and of embedded tokens, with what was normalised.

They stand between two blocks of a Llama layer and before the first. One program a row, the row
held in registers: each element is read once and written once.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._pieces import run
from ._pieces import total as sum_of
from ._runtime import kernel

__all__ = ["add_rms_norm", "embed_rms_norm"]


@kernel
def _add_rms_norm(
    x,  # (rows, n)
    residual,  # (rows, n)
    weight,  # (n,)
    total,  # (rows, n): x + residual
    out,  # (rows, n)
    n,
    epsilon,
    BLOCK: tl.constexpr,  # n, up to a power of two
    KEEP: tl.constexpr,  # whether to store the sum
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + row * n + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(residual + row * n + at, mask=inside, other=0.0).to(tl.float32)
    # Rounded before it is normalised, as it would be when another operator reads it.
    y = (a + b).to(out.dtype.element_ty)
    if KEEP:
        tl.store(total + row * n + at, y, mask=inside)
    y = y.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(sum_of(y * y, 0) / n + epsilon)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * n + at, (y * scale * w).to(out.dtype.element_ty), mask=inside)


@kernel
def _embed_rms_norm(
    table,  # (tokens, n)
    ids,  # (rows,), int64
    weight,  # (n,)
    embedded,  # (rows, n)
    out,  # (rows, n)
    tokens,
    n,
    epsilon,
    BLOCK: tl.constexpr,  # n, up to a power of two
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    token = tl.load(ids + row)
    token = tl.where(token < 0, token + tokens, token)  # as ONNX's Gather counts
    known = (token >= 0) & (token < tokens)  # nothing is read outside the table
    y = tl.load(table + token * n + at, mask=(at < n) & known, other=0.0)
    tl.store(embedded + row * n + at, y, mask=at < n)
    y = y.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(sum_of(y * y, 0) / n + epsilon)
    w = tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + row * n + at, (y * scale * w).to(out.dtype.element_ty), mask=at < n)


def _block(n: int) -> tuple[int, int]:
    """(elements, warps) of a program that holds a row."""
    block = triton.next_power_of_2(n)
    return block, min(max(block // 512, 1), 16)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, keep: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm(x + residual) * weight`` and ``x + residual``, in one pass.

    Parameters
    ----------
    x, residual : torch.Tensor
        (…, n), contiguous, of one type.
    weight : torch.Tensor
        (n,).
    epsilon : float
        Added to the mean square.
    keep : bool
        Whether to store the sum; without it the second result is the first.

    Returns
    -------
    normed, total : torch.Tensor
        (…, n).

    References
    ----------
    B. Zhang and R. Sennrich, *Root Mean Square Layer Normalization*, 2019.
    """
    n = x.shape[-1]
    out = torch.empty_like(x)
    total = torch.empty_like(x) if keep else out
    if x.numel():
        block, warps = _block(n)
        args = (x, residual, weight, total, out, n, epsilon, block, keep)
        run(_add_rms_norm, (x.numel() // n, 1), *args, num_warps=warps)
    return out, total


def embed_rms_norm(
    table: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm(table[ids]) * weight`` and ``table[ids]``, in one pass.

    Parameters
    ----------
    table : torch.Tensor
        (tokens, n), contiguous.
    ids : torch.Tensor
        Any shape, int64, contiguous; a token outside the table is embedded as zeros.
    weight : torch.Tensor
        (n,).
    epsilon : float
        Added to the mean square.

    Returns
    -------
    normed, embedded : torch.Tensor
        (*ids.shape, n).
    """
    tokens, n = table.shape
    embedded = table.new_empty(*ids.shape, n)
    out = torch.empty_like(embedded)
    if out.numel():
        block, warps = _block(n)
        args = (table, ids, weight, embedded, out, tokens, n, epsilon, block)
        run(_embed_rms_norm, (ids.numel(), 1), *args, num_warps=warps)
    return out, embedded
