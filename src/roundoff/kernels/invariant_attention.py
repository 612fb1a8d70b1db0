"""Attention with a cache of keys and values whose bits depend on what a query sees, alone."""

from __future__ import annotations

import ctypes
import itertools
import math
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch

from ..arguments import check_flag
from ..errors import DtypeError, ShapeError, UnsupportedError
from . import invariant_kernels as kernels
from ._runtime import (
    ceil_div,
    check_tensor,
    interpreting,
    multiprocessors,
    power_of_2,
    run,
    run_fitting,
)
from .invariant_matmul import (
    _on_cpu,
    check_operands,
    is_traced,
    opaque,
    own_work,
    settle_mkl,
)

#: Keys of a tile and of a split: part of the definition, since they fix the bits.
TILE, SPLIT = 64, 256
_LOG2E = math.log2(math.e)


class Seen(NamedTuple):
    """Which keys each query sees: a stretch.

    Attributes
    ----------
    first : torch.Tensor
        int32, shape (batch, queries): the first key.
    last : torch.Tensor
        int32, shape (batch, queries): the one after the last.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels.invariant_attention import seen_by_position
    >>> seen_by_position(1, 3, 3, torch.device("cpu")).last
    tensor([[1, 2, 3]], dtype=torch.int32)
    """

    first: torch.Tensor
    last: torch.Tensor


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    r"""Attention :math:`\mathrm{softmax}(q k^\top s)\, v`, equal in prefill, chunks and decoding.

    The bits of a query's result depend on its own values and on the keys and values that it sees,
    in their order, and on nothing else: not on the batch, on padding, on the length of the cache,
    on which other queries are computed with it, or on whether its prefix was cached.

    The keys that a query sees are counted from its first one. Every 64 of them are a tile, every
    256 a split. Within a split the softmax is taken tile by tile (online softmax): after each tile
    with scores :math:`t`,

    .. math:: m' = \max(m, \max t), \quad p = e^{t - m'}, \quad
              a \leftarrow a\, e^{m - m'} + p\, v, \quad l \leftarrow l\, e^{m - m'} + p\, 1,

    where the products are chains as in :func:`roundoff.kernels.matmul`, and on CUDA `p` is rounded
    to the type of `v` in both. In float32, which takes no TF32, :math:`l` is 16 chains of keys 16
    apart, scores are sums of chains over 16 values of a head, and :math:`p\, v` of chains over 16
    keys, added in ascending order.

    On a CPU the largest score of all comes first, and no sum is scaled; tiles are added in order.

    Splits are joined in ascending order in the same way; the result is :math:`a / l`. With few
    rows each split has a GPU program of its own, with many one program has them all: the same
    operations. A query that sees nothing gets zeros. What a query does not see does not reach it,
    NaN and infinities included.

    Parameters
    ----------
    q : torch.Tensor
        Shape (batch, heads, queries, head), bfloat16, float16 or float32, any strides.
    k, v : torch.Tensor
        Shape (batch, groups, keys, head), heads a multiple of groups: a cache of any length.
    causal : bool
        Whether a query sees no key after its own position. The last query is at the last key; of
        torch's ``is_causal`` the first is at the first.
    mask : torch.Tensor, optional
        Booleans, shape (batch or 1, 1, queries or 1, keys), true where a query sees a key; instead
        of `causal`. It says which keys are padding, or a part of the cache that is still empty.
    scale : float, optional
        Of the scores; by default 1 / sqrt(head).

    Returns
    -------
    torch.Tensor
        Shape (batch, heads, queries, head), contiguous, of the type of `q`. The gradients are
        those of torch's own attention.

    Raises
    ------
    ShapeError
        Shapes that do not meet.
    DtypeError
        Another type, or types mixed.
    ArgumentError
        Tensors on different devices, or a `causal` that is neither True nor False.
    UnsupportedError
        A mask with gaps between the keys that a query sees. In compiled code and in the recording
        of a CUDA graph, where nothing can be asked, such a query gets NaN.

    References
    ----------
    T. Dao, *FlashAttention-2*, 2023, https://arxiv.org/abs/2307.08691, for the online softmax.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels import attention
    >>> generator = torch.Generator().manual_seed(0)
    >>> q, k, v = (torch.randn(1, 2, 100, 16, generator=generator) for _ in range(3))
    >>> whole = attention(q, k, v)
    >>> one = attention(q[:, :, 69:70], k[:, :, :70], v[:, :, :70])
    >>> torch.equal(whole[:, :, 69:70], one)
    True
    """
    check_operands(q=q, k=k, v=v)
    meet = q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[::3] == k.shape[::3]
    if not meet or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ShapeError(
            "q, k and v do not meet, or heads are no multiple of groups",
            got=f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
            expected="(batch, heads, queries, head) and twice (batch, groups, keys, head)",
        )
    check_flag("causal", causal)
    batch, _, queries, _ = q.shape
    keys = k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if mask is not None:
        seen = seen_by_mask(mask, batch, queries, keys)
    else:
        seen = seen_by_position(batch, queries, keys, q.device, causal)
    asked = q.requires_grad or k.requires_grad or v.requires_grad
    if is_traced(q) or (asked and torch.is_grad_enabled()):
        return _differentiable(q, k, v, *seen, scale)
    return attend(q, k, v, seen, scale)


# What a query sees. ---------------------------------------------------------------------------


@lru_cache(256)
def _constant(
    batch: int, queries: int, keys: int, device: torch.device, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last of a cache that is full."""
    first = torch.zeros(batch, queries, dtype=torch.int32, device=device)
    if not causal:
        return first, first + keys
    ends = torch.arange(1, queries + 1, dtype=torch.int32, device=device) + (keys - queries)
    return first, ends.clamp(min=0).expand(batch, -1).contiguous()


def _recorded(device: torch.device) -> bool:
    """Whether operators are only written down, so that no value can be asked or kept."""
    if torch.compiler.is_compiling():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def seen_by_position(
    batch: int, queries: int, keys: int, device: torch.device, causal: bool = True
) -> Seen:
    """What queries see by their positions: with *causal* no key after their own.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels.invariant_attention import seen_by_position
    >>> seen_by_position(1, 2, 5, torch.device("cpu")).last
    tensor([[4, 5]], dtype=torch.int32)
    """
    # In a capture the cache would keep memory of the graph, unwritten before its replay.
    make = _constant.__wrapped__ if _recorded(device) else _constant
    with torch.inference_mode(False):
        return Seen(*make(batch, queries, keys, device, causal))


def seen_by_mask(mask: torch.Tensor, batch: int, queries: int, keys: int) -> Seen:
    """What queries see by a mask, (batch or 1, 1, queries or 1, keys), true where seen.

    A model has one mask for all its layers, and whether it has gaps costs a wait for the device: a
    mask remembers what is seen.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels.invariant_attention import seen_by_mask
    >>> tuple(seen_by_mask(torch.tensor([[[[False, True, True]]]]), 1, 1, 3))
    (tensor([[1]], dtype=torch.int32), tensor([[3]], dtype=torch.int32))
    """
    check_tensor(mask, "mask")
    if _recorded(mask.device) or mask.is_inference():
        return _read(mask, batch, queries, keys)
    state = mask._version, batch, queries, keys
    known, seen = getattr(mask, "_seen", (None, None))
    if known != state:
        with torch.inference_mode(False):  # a call with gradients may come next
            seen = _read(mask, batch, queries, keys)
        mask._seen = state, seen  # type: ignore[attr-defined]
    return cast(Seen, seen)


def _read(mask: torch.Tensor, batch: int, queries: int, keys: int) -> Seen:
    """A mask with gaps is refused; where nothing can be asked, such a row ends at -1."""
    one = mask
    if mask.dim() > 2 and not mask.stride(-3):  # expanded over heads
        one = mask[..., :1, :, :]
    try:
        whole = one.expand(batch, 1, queries, keys)[:, 0]
    except RuntimeError as error:
        raise ShapeError(
            "mask",
            got=tuple(mask.shape),
            expected=f"({batch} or 1, 1, {queries} or 1, {keys})",
            hint="one mask for all heads",
        ) from error
    if mask.dtype != torch.bool:
        raise DtypeError("mask", got=str(mask.dtype), expected="bool")
    if not whole.numel():
        none = torch.zeros(batch, queries, dtype=torch.int32, device=mask.device)
        return Seen(none, none)
    bits = whole.to(torch.uint8)  # a wider copy, as a sum makes, may not fit
    first = bits.argmax(-1)
    last = torch.where(whole.any(-1), keys - bits.flip(-1).argmax(-1), 0)
    before = torch.arange(keys, device=mask.device) < first[..., None]
    end = (whole | before).to(torch.uint8).argmin(-1)  # 0 where all are seen from the first on
    last = torch.where((end > 0) & (end < last), -1, last)
    if not _recorded(mask.device) and int(last.min()) < 0:
        raise UnsupportedError(
            "the keys that a query sees have gaps",
            got=f"a mask {tuple(mask.shape)}",
            expected="a stretch of the keys",
            hint="padding on the left of the prompts",
        )
    return Seen(first.to(torch.int32), last.to(torch.int32))


# The computation. -----------------------------------------------------------------------------


@own_work
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Seen,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of queries that see a stretch of the keys each: what ``attention`` computes.

    Parameters
    ----------
    q, k, v : torch.Tensor
        As for :func:`roundoff.kernels.attention`.
    seen : Seen
        What each query sees, of :func:`seen_by_position` or :func:`seen_by_mask` with as many keys.
    scale : float, optional
        Of the scores; one over the root of the head's size by default.

    Returns
    -------
    torch.Tensor
        As of :func:`roundoff.kernels.attention`.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels import attention
    >>> from roundoff.kernels.invariant_attention import attend, seen_by_position
    >>> q, k, v = torch.randn(3, 1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    >>> y = attend(q, k, v, seen_by_position(1, 4, 4, q.device))
    >>> torch.equal(y, attention(q, k, v, causal=True))
    True
    """
    if seen.first.shape != q.shape[::2]:
        raise ShapeError("seen", got=tuple(seen.first.shape), expected="(batch, queries)")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if not q.numel() or not k.shape[2]:
        return q.new_zeros(q.shape)
    if q.device.type == "cpu":
        return _by_torch(q, k, v, seen, scale)
    return _by_kernel(q, k, v, seen, scale)


def _by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, scale: float
) -> torch.Tensor:
    """The definition, in float32 (float64 in float64), a group of heads at a time."""
    settle_mkl()
    batch, heads, _, head = q.shape
    groups = k.shape[1]
    share = heads // groups
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    first, last = (t.long() for t in seen)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    out.masked_fill_((last < 0)[:, None, :, None], torch.nan)  # refused
    for b in range(batch):
        sees = first[b] < last[b]
        for anchor in first[b][sees].unique().tolist():
            alike = (sees & (first[b] == anchor)).nonzero()[:, 0]
            for at, g in itertools.product(alike.split(SPLIT), range(groups)):  # scores take memory
                ends = (last[b, at] - anchor).repeat(share)
                own = out[b, g * share : (g + 1) * share]
                rows = q[b, g * share : (g + 1) * share, at].reshape(-1, head).to(wide)
                keys, values = (t[b, g, anchor:].to(wide) for t in (k, v))
                made = _sequence(rows, keys, values, ends, scale)
                own[:, at] = made.view(share, -1, head).to(q.dtype)
    return out


def _sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hi: torch.Tensor, scale: float
) -> torch.Tensor:
    """Queries (rows, head) that see the first *hi* of keys (n, head)."""
    end = int(hi.max())
    k, v = (torch.nn.functional.pad(t[:end], (0, 0, 0, -end % TILE)) for t in (k, v))
    visible = torch.arange(len(k)) < hi[:, None]
    scores = torch.cat([_on_cpu(q, tile, None) for tile in k.split(TILE)], 1) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    p = (scores - scores.amax(1, keepdim=True)).exp()
    finite = v.isfinite()
    # Zero times a NaN that a row must not see would reach it all the same. A column of ones adds
    # the weights up, in the same product.
    clean = torch.cat([torch.where(finite, v, 0.0), v.new_ones(len(v), 1)], 1)
    sums = q.new_zeros(len(q), clean.shape[1])
    for weights, values in zip(p.split(TILE, 1), clean.split(TILE), strict=True):
        sums += _on_cpu(weights, values.t(), None)
    made, total = sums[:, :-1], sums[:, -1:]
    for key in (~finite).any(1).nonzero()[:, 0].tolist():
        bad = visible[:, key, None] & ~finite[key]
        made = made + torch.where(bad, p[:, key, None] * v[key], 0.0)
    return made / total


def _rows(rows: int, head: int, itemsize: int) -> tuple[int, int]:
    """(rows of a tile, warps): neither moves bits."""
    if rows <= 16:
        return 16, 4 if head <= 128 else 8
    if rows <= 32 or itemsize == 4 or head > 128:
        return 32, 4 if head <= 64 else 8
    return 64, 4 if head <= 64 else 8


def _scales(scale: float) -> tuple[float, float]:
    """The scale of powers of two in float32, and of powers of e what its rounding took away."""
    high = ctypes.c_float(scale * _LOG2E).value
    return high, scale - high / _LOG2E if math.isfinite(high) else 0.0


def _by_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: Seen,
    scale: float,
    rows: int | None = None,
    each: int | None = None,
) -> torch.Tensor:
    """The Triton kernels; `rows` of a tile and splits of keys that `each` program takes.

    Neither moves bits. By default there are as many programs as the device runs at once, two a
    multiprocessor: a program has the same latency at its start and end, however many splits it
    takes.
    """
    batch, heads, queries, head = q.shape
    groups, keys = k.shape[1:3]
    index, itemsize = q.get_device(), q.element_size()
    wide = max(16, power_of_2(head))
    chosen, warps = _rows(queries * heads // groups, wide, itemsize)
    rows = rows or chosen
    programs = batch * groups * ceil_div(queries * heads // groups, rows)
    splits = ceil_div(keys, SPLIT)
    if each is None:
        each = ceil_div(programs * splits, 2 * multiprocessors(index))
    apart = each < splits
    out = q.new_empty(q.shape)
    count = batch * heads * queries
    # Types are the same in both forms: one compiled kernel serves them.
    partial = q.new_empty((splits, count, head) if apart else 0, dtype=torch.float32)
    stats = q.new_empty(splits, count, 2, dtype=torch.float32) if apart else partial
    constants = (wide, rows, TILE, SPLIT, apart and each > 1)
    args = (
        q,
        k,
        v,
        *seen,
        out,
        partial,
        stats,
        each,
        queries,
        keys,
        heads,
        groups,
        head,
        *_scales(scale),
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *constants,
    )
    kind, stages = (index, q.dtype, wide, rows), 3 if wide * itemsize <= 256 else 2
    grid = (programs, ceil_div(splits, each) if apart else 1)
    # Without contraction: both forms of the kernel then do the same operations.
    options = {"num_warps": warps, "enable_fp_fusion": False}
    run_fitting(kind, stages, kernels.attend, grid, *args, **options)
    if apart:
        block = 16 if interpreting() else 4
        run(
            kernels.merge,
            (ceil_div(count, block), 1),
            partial,
            stats,
            out,
            count,
            head,
            splits,
            wide,
            block,
            2 if splits <= 2 else 8,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


# With gradients; an opaque operator under torch.compile. ----------------------------------------


def _attention_of_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: Any, last: Any, scale: float
) -> torch.Tensor:
    """Torch's own attention; a query that sees nothing gets zeros.

    All operands are copies: its gradients on a GPU read 16 bytes at a time, and fault where a row
    begins between these.
    """
    place = torch.arange(k.shape[2], device=k.device)
    visible = (place >= first[..., None]) & (place < last[..., None])
    share = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(share, 1) for t in (k, v))
    queries = q.clone(memory_format=torch.contiguous_format)
    some = visible.any(-1, keepdim=True)
    # The softmax of no keys would have no number: a query without one is given all.
    y = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=(visible | ~some)[:, None], scale=scale
    )
    return y.masked_fill(~some[:, None], 0.0)


def _empty(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return q.new_empty(q.shape)


@opaque("invariant_attention", _attention_of_torch, _empty)
def _differentiable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return attend(q, k, v, Seen(first, last), scale)
