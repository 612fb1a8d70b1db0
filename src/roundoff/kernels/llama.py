"""Kernels of a Llama layer: the product of its gate, rotary embedding and RMSNorm.

Each reads its operands once and writes its results once, where separate operators would move the
same elements two or three times. Computed in float32, and rounded once. The experimental rules of
:mod:`roundoff.fusion` use them.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton.language as tl

from ._runtime import ceil_div, kernel, power_of_2, run, sum_along


@kernel
def _silu_mul(
    packed,  # (rows, 2 * n): gate, then up
    out,  # (rows, n)
    n,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    gate = tl.load(packed + row * 2 * n + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(packed + row * 2 * n + n + at, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * n + at, y.to(out.dtype.element_ty), mask=inside)


def silu_mul(packed: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` where ``packed = concat(gate, up)`` along the last axis.

    ONNX Runtime needs three kernels for it (Split, QuickGelu, Mul), which move ten bytes for each
    six that one pass moves in float16.

    Parameters
    ----------
    packed : torch.Tensor
        (…, 2 n), contiguous, float16, bfloat16 or float32.

    Returns
    -------
    torch.Tensor
        (…, n), of the same type.

    References
    ----------
    N. Shazeer, *GLU variants improve transformer*, 2020.
    """
    n = packed.shape[-1] // 2
    out = torch.empty(*packed.shape[:-1], n, dtype=packed.dtype, device=packed.device)
    block = min(power_of_2(n), 1024)
    run(_silu_mul, (out.numel() // n, ceil_div(n, block)), packed, out, n, block)
    return out


@kernel
def _rotary_qkv(
    packed,  # (batch, length, (heads + 2 groups) * 2 * half)
    cos,  # (length, half)
    sin,  # (length, half)
    q,  # (batch, length, heads, 2 * half)
    k,  # (batch, groups, length, 2 * half)
    v,  # (batch, groups, length, 2 * half)
    length,
    heads,
    groups,
    half,
    HEADS: tl.constexpr,  # heads per program
    HALF: tl.constexpr,  # half, up to a power of two
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    batch, at = token // length, token % length
    i = tl.arange(0, HALF)
    total = heads + 2 * groups
    inside = (head < total)[:, None] & (i < half)[None, :]
    where = (token * total + head[:, None]) * 2 * half + i[None, :]
    first = tl.load(packed + where, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(packed + where + half, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + at * half + i, mask=i < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + at * half + i, mask=i < half, other=0.0).to(tl.float32)[None, :]
    turned = (head < heads + groups)[:, None]  # values are not rotated
    a = tl.where(turned, first * c - second * s, first).to(q.dtype.element_ty)
    b = tl.where(turned, second * c + first * s, second).to(q.dtype.element_ty)
    by_token = (token * heads + head[:, None]) * 2 * half + i[None, :]
    is_q = inside & (head < heads)[:, None]
    tl.store(q + by_token, a, mask=is_q)
    tl.store(q + by_token + half, b, mask=is_q)
    group = head - heads
    by_head = ((batch * groups + group[:, None]) * length + at) * 2 * half + i[None, :]
    is_k = inside & ((head >= heads) & (head < heads + groups))[:, None]
    tl.store(k + by_head, a, mask=is_k)
    tl.store(k + by_head + half, b, mask=is_k)
    is_v = inside & (head >= heads + groups)[:, None]
    by_head -= groups * length * 2 * half
    tl.store(v + by_head, a, mask=is_v)
    tl.store(v + by_head + half, b, mask=is_v)


def rotary_qkv(
    packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate the queries and keys of a packed product, and split it in queries, keys and values.

    Reads the product once and writes queries by token, keys and values by head: the layout in
    which attention reads them and in which a model returns its keys and values.

    Parameters
    ----------
    packed : torch.Tensor
        (batch, length, (heads + 2 groups) * head), contiguous: queries, keys, values.
    cos, sin : torch.Tensor
        (length, head / 2).
    heads, groups : int
        Heads of the queries, and of keys and values.

    Returns
    -------
    q : torch.Tensor
        (batch, length, heads * head).
    k, v : torch.Tensor
        (batch, groups, length, head).

    References
    ----------
    J. Su et al., *RoFormer*, 2021, equation 34; halves as in Llama, not neighbours.
    """
    batch, length, width = packed.shape
    head = width // (heads + 2 * groups)
    q = packed.new_empty(batch, length, heads * head)
    k = packed.new_empty(batch, groups, length, head)
    v = packed.new_empty(batch, groups, length, head)
    block = min(power_of_2(heads + 2 * groups), 16)
    grid = (batch * length, ceil_div(heads + 2 * groups, block))
    half = power_of_2(head // 2)
    sizes = (length, heads, groups, head // 2)
    run(_rotary_qkv, grid, packed, cos, sin, q, k, v, *sizes, block, half)
    return q, k, v


@kernel
def _normed(y, weight, at, n, epsilon):
    y = y.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(sum_along(y * y, 0) / n + epsilon)
    return y * scale * tl.load(weight + at, mask=at < n, other=0.0).to(tl.float32)


@kernel
def _add_rms_norm(
    x,  # (rows, n)
    residual,  # (rows, n)
    weight,  # (n,)
    summed,  # (rows, n): x + residual
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
        tl.store(summed + row * n + at, y, mask=inside)
    y = _normed(y, weight, at, n, epsilon)
    tl.store(out + row * n + at, y.to(out.dtype.element_ty), mask=inside)


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
    inside = at < n
    token = tl.load(ids + row)
    token = tl.where(token < 0, token + tokens, token)  # as ONNX's Gather counts
    known = (token >= 0) & (token < tokens)
    y = tl.load(table + token * n + at, mask=inside & known, other=float("nan"))
    tl.store(embedded + row * n + at, y, mask=inside)
    y = _normed(tl.where(inside, y, 0.0), weight, at, n, epsilon)
    tl.store(out + row * n + at, y.to(out.dtype.element_ty), mask=inside)


def _row_block(n: int) -> tuple[int, int]:
    """(elements, warps) of a program that has a row in its registers."""
    block = power_of_2(n)
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
    normed, summed : torch.Tensor
        (…, n).

    References
    ----------
    B. Zhang and R. Sennrich, *Root Mean Square Layer Normalization*, 2019.
    """
    n = x.shape[-1]
    out = torch.empty_like(x)
    summed = torch.empty_like(x) if keep else out
    block, warps = _row_block(n)
    args = (x, residual, weight, summed, out, n, epsilon, block, keep)
    run(_add_rms_norm, (x.numel() // n, 1), *args, num_warps=warps)
    return out, summed


def embed_rms_norm(
    table: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm(table[ids]) * weight`` and ``table[ids]``, in one pass.

    Parameters
    ----------
    table : torch.Tensor
        (tokens, n), contiguous.
    ids : torch.Tensor
        Any shape, int64, contiguous; a token outside the table gives NaN.
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
    block, warps = _row_block(n)
    args = (table, ids, weight, embedded, out, tokens, n, epsilon, block)
    run(_embed_rms_norm, (ids.numel(), 1), *args, num_warps=warps)
    return out, embedded
