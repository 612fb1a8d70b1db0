"""Rotary embedding of a packed product of queries, keys and values, in one pass.

Reads the packed product once and writes queries by token, keys and values by head: the layout
in which attention reads them and in which a model returns its keys and values. Split, two
rotations and two transpositions would move each element two or three times.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._pieces import run
from ._runtime import kernel

__all__ = ["rotary_qkv"]


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
    HEADS: tl.constexpr,  # heads a program
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
    """Rotate the queries and keys of a packed product, and take the three apart.

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
