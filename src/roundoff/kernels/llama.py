"""Kernels of a Llama layer: the product of its gate, rotary embedding, RMSNorm and attention.

Each reads its operands once and writes its results once, where separate operators would move the
same elements two or three times. Computed in float32, and rounded once. The experimental rules of
:mod:`roundoff.fusion` use them.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._runtime import COMPILED, kernel, max_along, run, sum_along

__all__ = ["add_rms_norm", "causal_attention", "embed_rms_norm", "rotary_qkv", "silu_mul"]


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
    block = min(triton.next_power_of_2(n), 1024)
    grid = (out.numel() // max(n, 1), triton.cdiv(n, block))
    if out.numel():
        run(_silu_mul, grid, packed, out, n, block)
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
    block = min(triton.next_power_of_2(heads + 2 * groups), 16)
    grid = (batch * length, triton.cdiv(heads + 2 * groups, block))
    if packed.numel():
        half = triton.next_power_of_2(head // 2)
        sizes = (length, heads, groups, head // 2)
        run(_rotary_qkv, grid, packed, cos, sin, q, k, v, *sizes, block, half)
    return q, k, v


@kernel
def _normed(y, weight, at, n, epsilon):
    """RMSNorm of a row."""
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
    token = tl.load(ids + row)
    token = tl.where(token < 0, token + tokens, token)  # as ONNX's Gather counts
    known = (token >= 0) & (token < tokens)  # nothing is read outside the table
    y = tl.load(table + token * n + at, mask=(at < n) & known, other=0.0)
    tl.store(embedded + row * n + at, y, mask=at < n)
    y = _normed(y, weight, at, n, epsilon)
    tl.store(out + row * n + at, y.to(out.dtype.element_ty), mask=at < n)


def _row_block(n: int) -> tuple[int, int]:
    """(elements, warps) of a program that has a row in its registers."""
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
    normed, summed : torch.Tensor
        (…, n).

    References
    ----------
    B. Zhang and R. Sennrich, *Root Mean Square Layer Normalization*, 2019.
    """
    n = x.shape[-1]
    out = torch.empty_like(x)
    summed = torch.empty_like(x) if keep else out
    if x.numel():
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
        block, warps = _row_block(n)
        args = (table, ids, weight, embedded, out, tokens, n, epsilon, block)
        run(_embed_rms_norm, (ids.numel(), 1), *args, num_warps=warps)
    return out, embedded


@kernel
def _nearest(x, PRECISION: tl.constexpr):
    """*x* to the nearest TF32 number, ties away from zero, where the product is in TF32.

    A tensor core does not round: it ignores the last 13 bits, which leaves every factor too small
    and the result several times further off.
    """
    if PRECISION == "tf32" and x.dtype == tl.float32:
        if COMPILED:
            bits = tl.inline_asm_elementwise(
                "cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
            )
            x = bits.to(tl.float32, bitcast=True)
        else:
            bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x


@kernel
def _tiles(
    acc,
    total,
    most,
    q,
    k,
    v,
    low,
    high,
    rows,
    head,
    length,
    scale,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One stretch of keys, *low* to *high*, into the running sums (online softmax)."""
    i = tl.arange(0, D)
    for start in range(low, high, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = (columns < length)[:, None] & (i < head)[None, :]
        at = columns[:, None] * head + i[None, :]
        keys = _nearest(tl.load(k + at, mask=inside, other=0.0), PRECISION)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        if MASKED:
            seen = (columns[None, :] <= rows[:, None]) & (columns < length)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, max_along(scores, 1))
        p = tl.math.exp2(scores - higher[:, None])
        shrink = tl.math.exp2(most - higher)
        total = total * shrink + sum_along(p, 1)
        values = _nearest(tl.load(v + at, mask=inside, other=0.0), PRECISION)
        acc = acc * shrink[:, None]
        p = _nearest(p.to(values.dtype), PRECISION)
        acc = tl.dot(p, values, acc, input_precision=PRECISION)
        most = higher
    return acc, total, most


@kernel
def _causal_attention(
    q,  # (batch, length, heads, head)
    k,  # (batch, groups, length, head)
    v,  # (batch, groups, length, head)
    out,  # (batch, length, heads, head)
    length,
    heads,
    groups,
    head,
    scale,  # of the scores, times log2(e)
    D: tl.constexpr,  # head, up to a power of two
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,  # of products of float32: "tf32" or "ieee"
):
    # The longest rows first, so that the last programs to run are short.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    which = tl.program_id(1).to(tl.int64)
    batch, h = which // heads, which % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, D)
    inside = (rows < length)[:, None] & (i < head)[None, :]
    at = ((batch * length + rows[:, None]) * heads + h) * head + i[None, :]
    queries = _nearest(tl.load(q + at, mask=inside, other=0.0), PRECISION)
    shared = (batch * groups + h // (heads // groups)) * length * head
    acc = tl.full((ROWS, D), 0.0, tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    full = block * ROWS  # keys that every row of the block sees
    for MASKED in tl.static_range(2):
        acc, total, most = _tiles(
            acc,
            total,
            most,
            queries,
            k + shared,
            v + shared,
            full if MASKED else 0,
            full + ROWS if MASKED else full,
            rows,
            head,
            length,
            scale,
            D,
            COLUMNS,
            MASKED,
            PRECISION,
        )
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


#: Bytes of an element -> queries, keys, warps and stages of a tile, the quickest on an H200 first.
#: The rest are for wide heads, and for devices with less shared memory.
_TILES = {
    2: ((64, 64, 4, 3), (64, 32, 4, 2), (32, 16, 4, 1)),
    4: ((128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 4, 2), (32, 16, 4, 1)),
}
_FITTING: dict[tuple[int, ...], int] = {}  # device, bytes, head, TF32 -> place among the tiles


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    scale: float,
    tf32: bool = False,
) -> torch.Tensor:
    """``softmax(q k^T scale, causal) v``, in tiles, with the scores never in memory.

    ONNX Runtime's float32 attention on CUDA stays in float32 where TF32 is allowed; this one
    follows the switch.

    Parameters
    ----------
    q : torch.Tensor
        (batch, length, heads * head), contiguous.
    k, v : torch.Tensor
        (batch, groups, length, head), contiguous; heads a multiple of groups.
    scale : float
        Of the scores.
    tf32 : bool
        Whether products of float32 may be rounded to TF32: factors to the nearest TF32 number.

    Returns
    -------
    torch.Tensor
        (batch, length, heads * head), of the same type; sums in float32.

    Raises
    ------
    triton.OutOfResources
        A head so wide that not even a small tile fits the device.

    References
    ----------
    T. Dao, *FlashAttention-2*, 2023, algorithm 1. NVIDIA, *PTX ISA*, ``cvt.rna.tf32.f32``.
    """
    batch, groups, length, head = k.shape
    out = torch.empty_like(q)
    if not q.numel():
        return out
    d = max(triton.next_power_of_2(head), 16)
    tiles = _TILES[2 if q.element_size() == 2 else 4]
    kind = (q.get_device(), q.element_size(), d, tf32)
    args = (q, k, v, out, length, heads, groups, head, scale * 1.4426950408889634)
    for place in range(_FITTING.get(kind, 0), len(tiles)):
        rows, columns, warps, stages = tiles[place]
        constants = (d, rows, columns, "tf32" if tf32 else "ieee")
        grid = (triton.cdiv(length, rows), batch * heads)
        try:
            run(_causal_attention, grid, *args, *constants, num_warps=warps, num_stages=stages)
        except triton.OutOfResources:
            if place == len(tiles) - 1:
                raise
        else:
            _FITTING[kind] = place
            break
    return out
