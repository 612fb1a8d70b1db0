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
from ._runtime import kernel

__all__ = ["causal_attention"]


@kernel
def _tiles(
    acc, total, most, q, k, v, low, high, rows, head, length, scale,
    D: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One stretch of keys, *low* to *high*, into the running sums (online softmax)."""
    i = tl.arange(0, D)
    for start in range(low, high, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = (columns < length)[:, None] & (i < head)[None, :]
        at = columns[:, None] * head + i[None, :]
        keys = tl.load(k + at, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        if MASKED:
            seen = (columns[None, :] <= rows[:, None]) & (columns < length)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, greatest(scores, 1))
        p = tl.math.exp2(scores - higher[:, None])
        shrink = tl.math.exp2(most - higher)
        total = total * shrink + sum_of(p, 1)
        values = tl.load(v + at, mask=inside, other=0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
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
    queries = tl.load(q + at, mask=inside, other=0.0)
    shared = (batch * groups + h // (heads // groups)) * length * head
    acc = tl.full((ROWS, D), 0.0, tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    full = block * ROWS  # keys that every row of the block sees
    acc, total, most = _tiles(
        acc, total, most, queries, k + shared, v + shared, 0, full, rows, head, length, scale,
        D, COLUMNS, False, PRECISION,
    )  # fmt: skip
    acc, total, most = _tiles(
        acc, total, most, queries, k + shared, v + shared, full, full + ROWS, rows, head, length,
        scale, D, COLUMNS, True, PRECISION,
    )  # fmt: skip
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


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
        Whether products of float32 may be rounded to TF32.

    Returns
    -------
    torch.Tensor
        (batch, length, heads * head), of the same type; sums in float32.

    References
    ----------
    T. Dao, *FlashAttention-2*, 2023, algorithm 1.
    """
    batch, groups, length, head = k.shape
    out = torch.empty_like(q)
    wide = q.dtype == torch.float32
    rows, columns, warps, stages = (128, 64, 8, 2) if wide else (64, 64, 4, 3)
    d = max(triton.next_power_of_2(head), 16)
    if q.numel():
        args = (q, k, v, out, length, heads, groups, head, scale * 1.4426950408889634)
        constants = (d, rows, columns, "tf32" if tf32 else "ieee")
        grid = (triton.cdiv(length, rows), batch * heads)
        run(_causal_attention, grid, *args, *constants, num_warps=warps, num_stages=stages)
    return out
