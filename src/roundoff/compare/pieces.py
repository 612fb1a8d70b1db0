"""The arithmetic of :mod:`roundoff.compare.stats`: one piece of two tensors, by torch on the CPU.

The usual case, where every number is finite, writes into arrays that are used again for each
piece; what involves an infinity or a NaN is settled beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from roundoff.dtypes import DType

from .stats import INF, PIECE, Plan, Stats
from .ulps import ladder, place, scaled_by_ulp


class Room:
    """Arrays that are used again for each piece: fresh ones would be mapped in each time."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def __call__(self, name: str, n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        key = name, dtype
        if key not in self._arrays or len(self._arrays[key]) < n:
            self._arrays[key] = torch.empty(n, dtype=dtype)
        return self._arrays[key][:n]


def measure_piece(
    e: torch.Tensor, g: torch.Tensor, how: Plan, thresholds: Sequence[float], offset: int,
    best: float, room: Room,
) -> Stats:  # fmt: skip
    """Statistics of one piece; its worst element is looked for where it is worse than *best*."""
    n = len(e)
    found = Stats(n, np.zeros(len(thresholds), dtype=np.int64))
    wide = torch.complex128 if how.kind == "complex" else torch.float64
    ew, gw = room("e", n, wide).copy_(e), room("g", n, wide).copy_(g)
    if how.kind == "int" and max(how.expected.bits, how.got.bits) == 64:
        (eh, el), (gh, gl) = _halves(e, how.expected), _halves(g, how.got)
        d = (gh - eh) * 2.0**32 + (gl - el)
    else:
        d = torch.sub(gw, ew, out=room("d", n, wide))
    size = torch.abs(d, out=room("size", n))
    top = size.amax().item()
    odd = not top < INF  # some infinity or NaN
    if odd:
        d, size = _settle(found, ew, gw, d)
        top = size.amax().item()
    found.abs = top
    if top > best:
        found.at = offset + int(size.numpy().argmax())
    fits = d.isfinite() if odd else None
    found.finite = n if fits is None else int(fits.sum()) - found.nan
    found.sums.extend(_sums(size))
    found.signed.extend(_sums(d if fits is None else torch.where(fits, d, 0.0)))
    for i, t in enumerate(thresholds):
        if t < top:
            found.counts[i] = _above(size, t, room)
    _relative(found, ew.abs() if how.kind == "complex" else ew, size, room("ratio", n))
    _ulps(found, e, g, ew, gw, size, how, odd, room)
    return found


def _sums(x: torch.Tensor) -> list[Any]:
    """Sums of runs of PIECE elements: their grouping depends on nothing else."""
    whole = len(x) // PIECE * PIECE
    sums = x[:whole].view(-1, PIECE).sum(1).tolist() if whole else []
    return sums + ([x[whole:].sum().item()] if whole < len(x) else [])


def _above(size: torch.Tensor, limit: float, room: Room) -> int:
    above = room("above", len(size), torch.bool)
    if len(size) <= PIECE:  # on one thread NumPy's comparisons are five times as quick
        return int(np.count_nonzero(np.greater(size.numpy(), limit, out=above.numpy())))
    return int(torch.count_nonzero(torch.gt(size, limit, out=above)))


def _halves(piece: torch.Tensor, info: DType) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower 32 bits of integers, each exact in float64."""
    unsigned = info.name == "uint64"
    bits = piece.view(torch.int64) if unsigned else piece.to(torch.int64)
    high = (bits >> 32) & 0xFFFFFFFF if unsigned else bits >> 32
    return high.to(torch.float64), (bits & 0xFFFFFFFF).to(torch.float64)


def _settle(
    found: Stats, ew: torch.Tensor, gw: torch.Tensor, d: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decide the differences that involve an infinity or a NaN, and count them."""
    e_nan, g_nan = ew.isnan(), gw.isnan()
    both, one = e_nan & g_nan, e_nan ^ g_nan
    found.nan, found.dnan = int(both.sum()), int(one.sum())
    same = (ew == gw) | both
    apart = (ew.isinf() | gw.isinf()) & ~same & ~e_nan & ~g_nan
    found.dinf = int(apart.sum())
    d = d.masked_fill(one, INF).masked_fill_(same, 0.0)
    size = d.abs()
    size.masked_fill_(size.isnan(), INF)  # infinite complex parts that cancel
    return d, size


def _relative(found: Stats, ew: torch.Tensor, size: torch.Tensor, out: torch.Tensor) -> None:
    low, high = torch.div(size, ew, out=out).aminmax()
    top = max(abs(low.item()), abs(high.item()))
    if not top < INF:  # a zero, an infinity or a NaN
        zero = ew == 0
        found.zeros = int((zero & (size != 0)).sum())
        out.masked_fill_(out.isnan(), INF).masked_fill_(zero | (size == 0), 0.0)
        top = out.abs_().amax().item()
    found.rel_nonzero = top
    found.rel = INF if found.zeros else top


def _ulps(
    found: Stats, e: torch.Tensor, g: torch.Tensor, ew: torch.Tensor, gw: torch.Tensor,
    size: torch.Tensor, how: Plan, odd: bool, room: Room,
) -> None:  # fmt: skip
    if how.coarse is None:
        found.ulp = int(found.abs)
        return
    if how.kind == "complex":
        if how.same:
            e, g = torch.view_as_real(e).reshape(-1), torch.view_as_real(g).reshape(-1)
        ew, gw = torch.view_as_real(ew).reshape(-1), torch.view_as_real(gw).reshape(-1)
        size = (gw - ew).abs_()
        if odd:
            size = _settle(Stats(0, found.counts), ew, gw, gw - ew)[1]
    fits = ew.isfinite() & gw.isfinite() if odd else None
    if how.same or how.coarse.name == "float64":
        a, b = (e, g) if how.same else (ew, gw)
        if fits is not None and (~fits & (size > 0)).any():
            found.ulp = INF
        else:
            found.ulp = _farthest(a, b, fits, room)
    else:
        far = place(ew, how.coarse).sub_(place(gw, how.coarse)).abs_()
        # Equal infinities and NaN in both are no distance; nor are two numbers that rounding to
        # the coarse type made infinite.
        top = far.masked_fill_(far.isnan(), 0.0).amax().item() if odd else far.amax().item()
        apart = odd and bool((ew.isnan() ^ gw.isnan()).any())
        found.ulp = INF if apart or top == INF else int(top)
    if how.truth is not None:
        found.err_ulp = scaled_by_ulp(size, ew, how.truth).amax().item()


def _farthest(a: torch.Tensor, b: torch.Tensor, fits: torch.Tensor | None, room: Room) -> int:
    """Largest distance by bits of the elements that fit."""
    names = ("a", "b", "sign")
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    x, y, spare = (room(name, len(a), dtype) for name in names)
    ladder(a.view(dtype), x, spare)
    ladder(b.view(dtype), y, spare)
    torch.minimum(x, y, out=spare)
    torch.maximum(x, y, out=x)
    distance = torch.sub(x, spare, out=x)  # of w bits, once read as unsigned
    if fits is not None:
        distance.masked_fill_(~fits, 0)
    low, high = distance.aminmax()
    if low.item() >= 0:
        return int(high)
    info = torch.iinfo(dtype)
    return int((distance ^ info.min).amax()) - info.min
