"""Causal attention in tiles, with the scores never in memory.

ONNX Runtime's float32 attention on CUDA stays in float32 where TF32 is allowed; this one follows
the switch. Keys and values are read by head, as :func:`roundoff.kernels.rotary.rotary_qkv`
writes them.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._pieces import greatest, run
from ._pieces import total as sum_of
from ._runtime import interpreting, kernel

__all__ = ["causal_attention"]


@kernel
def _nearest(x, PRECISION: tl.constexpr, COMPILED: tl.constexpr):
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
    acc, total, most, q, k, v, low, high, rows, head, length, scale,
    D: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """One stretch of keys, *low* to *high*, into the running sums (online softmax)."""
    i = tl.arange(0, D)
    for start in range(low, high, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = (columns < length)[:, None] & (i < head)[None, :]
        at = columns[:, None] * head + i[None, :]
        keys = _nearest(tl.load(k + at, mask=inside, other=0.0), PRECISION, COMPILED)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        if MASKED:
            seen = (columns[None, :] <= rows[:, None]) & (columns < length)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, greatest(scores, 1))
        p = tl.math.exp2(scores - higher[:, None])
        shrink = tl.math.exp2(most - higher)
        total = total * shrink + sum_of(p, 1)
        values = _nearest(tl.load(v + at, mask=inside, other=0.0), PRECISION, COMPILED)
        acc = acc * shrink[:, None]
        p = _nearest(p.to(values.dtype), PRECISION, COMPILED)
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
    COMPILED: tl.constexpr,
):
    # The longest rows first, so that the last programs to run are short.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    which = tl.program_id(1).to(tl.int64)
    batch, h = which // heads, which % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, D)
    inside = (rows < length)[:, None] & (i < head)[None, :]
    at = ((batch * length + rows[:, None]) * heads + h) * head + i[None, :]
    queries = _nearest(tl.load(q + at, mask=inside, other=0.0), PRECISION, COMPILED)
    shared = (batch * groups + h // (heads // groups)) * length * head
    acc = tl.full((ROWS, D), 0.0, tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    full = block * ROWS  # keys that every row of the block sees
    acc, total, most = _tiles(
        acc, total, most, queries, k + shared, v + shared, 0, full, rows, head, length, scale,
        D, COLUMNS, False, PRECISION, COMPILED,
    )  # fmt: skip
    acc, total, most = _tiles(
        acc, total, most, queries, k + shared, v + shared, full, full + ROWS, rows, head, length,
        scale, D, COLUMNS, True, PRECISION, COMPILED,
    )  # fmt: skip
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
    """``softmax(q k^T scale, causal) v``.

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
        constants = (d, rows, columns, "tf32" if tf32 else "ieee", not interpreting())
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
