"""The numbers behind a comparison of two tensors, a cache-sized piece at a time.

Every difference is taken in float64 (in complex128 for complex types; 64-bit integers by halves,
so that nothing overflows). A piece of the two tensors is widened, measured and forgotten, which
keeps the extra memory bounded and the work in cache; on a CPU with several threads the pieces are
shared out among as many. Sums of pieces are added exactly (:func:`math.fsum`), so that neither the
number of threads nor the kind of tensor changes a result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from roundoff.describe import Held
from roundoff.dtypes import DType, dtype_info

from .ulps import Array, bit_distance, position, scaled_by_ulp

if TYPE_CHECKING:
    import torch

#: Elements of a piece: a few of its float64 arrays fit in a core's L2 cache, and torch, which
#: splits work from 32,768 elements on, does not start threads of its own inside ours.
PIECE = 32_704
#: Pieces are shared out among threads from this many elements on.
SHARED = 1 << 21
INF = math.inf


@dataclasses.dataclass
class Stats:
    """What is known of the differences of two tensors; see :class:`roundoff.compare.Difference`.

    Attributes
    ----------
    at : int or None
        Flat index of the element with the largest absolute difference.
    sums, signed : list
        Sums of the absolute and of the signed differences, a number a piece.
    finite : int
        Elements with a finite signed difference; those NaN in both are left out.
    counts : array of int64
        Number of differences above each threshold.
    """

    n: int
    counts: Array
    abs: float = 0.0
    at: int | None = None
    rel: float = 0.0
    rel_nonzero: float = 0.0
    zeros: int = 0
    sums: list[float] = dataclasses.field(default_factory=list)
    signed: list[complex] = dataclasses.field(default_factory=list)
    finite: int = 0
    dnan: int = 0
    nan: int = 0
    dinf: int = 0
    ulp: float = 0
    err_ulp: float = 0.0

    def add(self, other: Stats) -> None:
        """Take in the statistics of the elements that follow."""
        self.counts += other.counts
        if other.at is not None and (self.at is None or other.abs > self.abs):
            self.abs, self.at = other.abs, other.at
        for name in ("rel", "rel_nonzero", "ulp", "err_ulp"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for name in ("zeros", "finite", "dnan", "nan", "dinf", "sums", "signed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to compare two element types.

    Attributes
    ----------
    kind : str
        ``"float"``, ``"complex"`` or ``"int"`` (both are integers or bool).
    coarse : DType or None
        The floating type whose units are counted; ``None`` for integers.
    truth : DType or None
        The type of *got*, when *expected* is in a wider one.
    same : bool
        Whether both have the coarse type, so that their bits can be compared.
    """

    kind: str
    expected: DType
    got: DType
    coarse: DType | None
    truth: DType | None
    same: bool


def plan(expected: Held, got: Held) -> Plan:
    """Choose how the two are compared."""
    infos = [expected.info, got.info]
    floats = [_component(i) for i in infos]
    real = [i for i in floats if i.is_float]
    coarse = min(real, key=lambda i: (i.precision, i.max, i.name)) if real else None
    kind = "complex" if any(i.kind == "complex" for i in infos) else "float" if real else "int"
    wider = len(real) == 2 and floats[0].precision > floats[1].precision
    stored = all(dtype_info(h.tensor.dtype) == h.info for h in (expected, got))
    odd = coarse is not None and coarse.name == "float8_e8m0fnu"  # it has no sign bit
    same = infos[0] == infos[1] and stored and not odd
    return Plan(kind, infos[0], infos[1], coarse, floats[1] if wider else None, same)


def _component(info: DType) -> DType:
    if info.kind != "complex":
        return info
    return dtype_info("float32" if info.name == "complex64" else "float64")


def measure(expected: Held, got: Held, thresholds: Sequence[float]) -> Stats:
    """Statistics of two tensors of one shape, on whatever devices they are."""
    how = plan(expected, got)
    total = Stats(expected.tensor.numel(), np.zeros(len(thresholds), dtype=np.int64))
    if total.n == 0:
        return total
    if expected.device == got.device and expected.tensor.is_cuda and how.kind == "float":
        from . import cuda

        if (found := cuda.measure(expected, got, how, thresholds)) is not None:
            return found
    spans = list(_spans(expected.tensor.shape))
    workers = _workers(total.n)
    size = math.ceil(len(spans) / workers)
    groups = [spans[i : i + size] for i in range(0, len(spans), size)]

    def work(group: list[_Span]) -> Stats:
        mine, room = Stats(0, np.zeros(len(thresholds), dtype=np.int64)), Room()
        for offset, index in group:
            e, g = _piece(expected.tensor, index), _piece(got.tensor, index)
            mine.add(_measure_piece(e, g, how, thresholds, offset, room))
        return mine

    if len(groups) == 1:
        shares = [work(groups[0])]
    else:
        with ThreadPoolExecutor(workers) as pool:
            shares = list(pool.map(work, groups))
    for share in shares:
        total.add(share)
    return total


def _workers(n: int) -> int:
    import torch

    return max(1, torch.get_num_threads()) if n >= SHARED else 1


_Span = tuple[int, tuple[Any, ...]]  # flat offset, index of the piece


def _spans(shape: Sequence[int]) -> Iterator[_Span]:
    """Indices that cut a shape, in order, into pieces of at most PIECE elements.

    Works for any strides, since a piece is a run of one axis under fixed indices of the axes
    before it.
    """
    if math.prod(shape) <= PIECE:
        yield 0, ()
        return
    axis = next(k for k in range(len(shape)) if math.prod(shape[k + 1 :]) <= PIECE)
    inner = math.prod(shape[axis + 1 :])
    step = max(1, PIECE // inner)
    offset = 0
    for before in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], step):
            stop = min(start + step, shape[axis])
            yield offset, (*before, slice(start, stop))
            offset += (stop - start) * inner


def _piece(tensor: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor:
    return (tensor[index] if index else tensor).reshape(-1).cpu()


class Room:
    """Arrays that one thread uses again for each piece: fresh ones would be mapped in each time."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, Any], Array] = {}

    def __call__(self, name: str, n: int, dtype: Any = np.float64) -> Array:
        key = name, np.dtype(dtype)
        if key not in self._arrays or len(self._arrays[key]) < n:
            self._arrays[key] = np.empty(n, dtype)
        return self._arrays[key][:n]


def _wide(piece: torch.Tensor, kind: str, out: Array) -> Array:
    import torch

    if kind == "complex":
        return piece.to(torch.complex128).numpy()
    torch.from_numpy(out).copy_(piece)
    return out


def _halves(piece: torch.Tensor, info: DType) -> tuple[Array, Array]:
    """Upper and lower 32 bits of integers, each exact in float64."""
    import torch

    unsigned = info.name == "uint64"
    wide = piece.view(torch.int64) if unsigned else piece.to(torch.int64)
    bits = wide.numpy()
    high = (bits >> 32) & 0xFFFFFFFF if unsigned else bits >> 32
    return high.astype(np.float64), (bits & 0xFFFFFFFF).astype(np.float64)


def _measure_piece(
    e: torch.Tensor, g: torch.Tensor, how: Plan, thresholds: Sequence[float], offset: int,
    room: Room,
) -> Stats:  # fmt: skip
    n = len(e)
    found = Stats(n, np.zeros(len(thresholds), dtype=np.int64))
    with np.errstate(all="ignore"):
        ew, gw = _wide(e, how.kind, room("e", n)), _wide(g, how.kind, room("g", n))
        if how.kind == "int" and max(how.expected.bits, how.got.bits) == 64:
            (eh, el), (gh, gl) = _halves(e, how.expected), _halves(g, how.got)
            d = (gh - eh) * 2.0**32 + (gl - el)
        else:
            d = np.subtract(gw, ew, out=room("d", n, ew.dtype))
        size = np.abs(d, out=room("size", n))
        top = float(size.max())
        odd = not top < INF  # some infinity or NaN
        if odd:
            d, size = _settle(found, ew, gw, d)
            top = float(size.max())
        found.abs = top
        if top > 0:
            found.at = offset + int(size.argmax())
        found.finite = int(np.isfinite(d).sum()) - found.nan if odd else n
        found.sums.append(float(size.sum()))
        found.signed.append((d[np.isfinite(d)] if odd else d).sum().item())
        above = room("above", n, np.bool_)
        for i, t in enumerate(thresholds):
            if t < top:
                found.counts[i] = np.count_nonzero(np.greater(size, t, out=above))
        _relative(found, np.abs(ew, out=room("em", n)), size, room("ratio", n))
        _ulps(found, e, g, ew, gw, size, how, odd)
    return found


def _settle(found: Stats, ew: Array, gw: Array, d: Array) -> tuple[Array, Array]:
    """Decide the differences that involve an infinity or a NaN, and count them."""
    e_nan, g_nan = np.isnan(ew), np.isnan(gw)
    both, one = e_nan & g_nan, e_nan ^ g_nan
    found.nan, found.dnan = int(both.sum()), int(one.sum())
    same = (ew == gw) | both
    apart = (np.isinf(ew) | np.isinf(gw)) & ~same & ~e_nan & ~g_nan
    found.dinf = int(apart.sum())
    d = np.where(same, 0.0, np.where(one, np.inf, d))
    size = np.abs(d)
    size[np.isnan(size)] = np.inf  # infinite complex parts that cancel
    return d, size


def _relative(found: Stats, em: Array, size: Array, out: Array) -> None:
    if not em.min() > 0:  # a zero or a NaN
        zero = em == 0
        found.zeros = int(np.count_nonzero(size[zero]))
        ratio = np.where(zero | (size == 0), 0.0, size / em)
        ratio[np.isnan(ratio)] = np.inf
        found.rel_nonzero = float(ratio.max())
        found.rel = INF if found.zeros else found.rel_nonzero
        return
    ratio = np.divide(size, em, out=out)
    top = float(ratio.max())
    if math.isnan(top):  # infinity over infinity, or nothing over infinity
        ratio = np.where(size == 0, 0.0, np.where(np.isnan(ratio), np.inf, ratio))
        top = float(ratio.max())
    found.rel = found.rel_nonzero = top


def _ulps(
    found: Stats, e: torch.Tensor, g: torch.Tensor, ew: Array, gw: Array, size: Array,
    how: Plan, odd: bool,
) -> None:  # fmt: skip
    if how.coarse is None:
        found.ulp = int(found.abs)
        return
    if how.kind == "complex":
        import torch

        if how.same:
            e, g = torch.view_as_real(e).reshape(-1), torch.view_as_real(g).reshape(-1)
        ew, gw = ew.view(np.float64), gw.view(np.float64)
        size = np.abs(gw - ew)
        if odd:
            size = _settle(Stats(0, found.counts), ew, gw, gw - ew)[1]
    if how.same:
        distance = bit_distance(e, g)
    elif how.coarse.name == "float64":
        distance = bit_distance(*(_float64(a) for a in (ew, gw)))
    else:
        distance = np.abs(position(ew, how.coarse) - position(gw, how.coarse))
        distance[np.isnan(distance)] = 0  # equal infinities after rounding, or NaN
    if odd:
        apart = (size > 0) & ~(np.isfinite(ew) & np.isfinite(gw))
        if how.same or how.coarse.name == "float64":
            distance = np.where(np.isfinite(ew) & np.isfinite(gw), distance, 0)
            found.ulp = INF if apart.any() else int(distance.max())
        else:
            # Rounding to the coarse type may have made both infinite: that is no distance.
            found.ulp = INF if (np.isnan(ew) ^ np.isnan(gw)).any() else float(distance.max())
    else:
        found.ulp = distance.max().item()
    found.ulp = found.ulp if found.ulp == INF else int(found.ulp)
    if how.truth is not None:
        found.err_ulp = float(scaled_by_ulp(size, ew, how.truth).max())


def _float64(array: Array) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(array))
