"""The numbers behind a comparison of two tensors: by torch on the CPU, a piece at a time.

Every difference is taken in float64 (in complex128 for complex types; 64-bit integers by halves,
so that nothing overflows). A piece of the two tensors is widened, measured and forgotten, which
keeps the extra memory bounded. The usual case, where every number is finite, writes into buffers
that are used again for each piece; what involves an infinity or a NaN is settled beside it.

With few threads one core does all of it. Python threads with pieces of their own would wait for
the interpreter's lock between any two operations: on two idle cores, two threads took twice as
long as one. Sharing each operation out among torch's threads is twice as quick there, and took up
to 35 times as long where other processes used the cores: torch's threads wait for each other at
the end of every operation. On many threads it pays, with wider pieces.

Sums are taken over runs of elements and these are added exactly, so that neither the number of
threads nor the kind of tensor changes a result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from roundoff.describe import TypedTensor
from roundoff.dtypes import DType, dtype_info

from .pieces import partition
from .ulps import Array, ladder, place, scaled_by_ulp

#: Elements of a run, whose sum is taken at once. Its buffers fit in the caches of a core, and torch
#: keeps work on fewer than 32,768 elements to one thread.
RUN = 32_704
#: Up to so many threads, one core measures a run at a time.
FEW = 3
#: Runs that each of more threads has of a piece: with fewer, starting and joining threads costs
#: more; with more, the buffers leave the caches.
WIDE = 2
#: Elements of a piece of tensors that are not contiguous; it must not depend on the threads.
STRIDED = RUN << 4
INF = math.inf


@dataclasses.dataclass
class Stats:
    """What is known of the differences of two tensors; see :class:`roundoff.compare.Difference`.

    Attributes
    ----------
    at : int or None
        Flat index of the element with the largest absolute difference.
    sums, signed : list
        Sums of the absolute and of the signed differences, a number a run of elements.
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


@dataclasses.dataclass(frozen=True)
class DtypePair:
    """How two element types are compared.

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

    @property
    def quick(self) -> bool:
        """Whether both are of one usual floating type."""
        return self.same and self.got.is_float and self.got.bits >= 16


def dtype_pair(expected: TypedTensor, got: TypedTensor) -> DtypePair:
    """Choose how the types of two tensors are compared."""
    infos = [expected.info, got.info]
    floats = [_component(i) for i in infos]
    real = [i for i in floats if i.is_float]
    coarse = min(real, key=lambda i: (i.precision, i.max, i.name)) if real else None
    kind = "complex" if any(i.kind == "complex" for i in infos) else "float" if real else "int"
    wider = len(real) == 2 and floats[0].precision > floats[1].precision
    stored = all(dtype_info(h.tensor.dtype) == h.info for h in (expected, got))
    unsigned = coarse is not None and coarse.name == "float8_e8m0fnu"  # it has no sign bit
    same = infos[0] == infos[1] and stored and not unsigned
    return DtypePair(kind, infos[0], infos[1], coarse, floats[1] if wider else None, same)


def _component(info: DType) -> DType:
    if info.kind != "complex":
        return info
    return dtype_info("float32" if info.name == "complex64" else "float64")


def safe_fsum(values: Sequence[float]) -> float:
    """Sum rounded once; as floats add where it overflows on the way."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # past the largest number; infinities of both signs
        return float(sum(values))


def measure(
    expected: TypedTensor, got: TypedTensor, pair: DtypePair, thresholds: Sequence[float]
) -> Stats:
    """Statistics of two tensors of one shape, on whatever devices they are."""
    e, g = expected.tensor, got.tensor
    stats = Stats(e.numel(), np.zeros(len(thresholds), dtype=np.int64))
    if stats.n == 0:
        return stats
    most, quick, buffers = STRIDED, None, _Buffers()
    if e.is_contiguous() and g.is_contiguous():
        e, g, threads = e.view(-1), g.view(-1), torch.get_num_threads()
        most = RUN if threads <= FEW else RUN * WIDE * threads
        if threads <= FEW and pair.quick and e.is_cpu and g.is_cpu:
            quick = _QuickRuns(e, g, pair)
    with np.errstate(over="ignore", invalid="ignore"):
        for offset, index in partition(e.shape, most):
            if quick is None or not quick.add(stats, offset, thresholds):
                a, b = ((t[index] if index else t).reshape(-1).cpu() for t in (e, g))
                _add_piece(stats, a, b, pair, thresholds, offset, buffers)
    stats.rel = INF if stats.zeros else stats.rel_nonzero
    return stats


class _Buffers:
    """Tensors that are used again for each piece: fresh ones would be mapped in each time."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def __call__(self, name: str, n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        tensor = self._tensors.get((name, dtype))
        if tensor is None or len(tensor) != n:  # the last piece is shorter
            tensor = self._tensors[name, dtype] = torch.empty(n, dtype=dtype)
        return tensor


def _add_piece(
    stats: Stats, e: torch.Tensor, g: torch.Tensor, pair: DtypePair,
    thresholds: Sequence[float], offset: int, buffers: _Buffers,
) -> None:  # fmt: skip
    """Take the elements from *offset* on into the statistics."""
    n = len(e)
    wide = torch.complex128 if pair.kind == "complex" else torch.float64
    ew, gw = buffers("e", n, wide).copy_(e), buffers("g", n, wide).copy_(g)
    if pair.kind != "complex" and any(_is_long(i) for i in (pair.expected, pair.got)):
        (eh, el), (gh, gl) = _halves(e, pair.expected), _halves(g, pair.got)
        d = (gh - eh) + (gl - el)
    else:
        d = torch.sub(gw, ew, out=buffers("d", n, wide))
    size = torch.abs(d, out=buffers("size", n))
    top = size.amax().item()
    finite = top < INF
    if finite:
        stats.finite += n
        stats.signed.extend(_sums(d))
    else:
        d, size, both_nan = _settle(stats, ew, gw, d)
        top = size.amax().item()
        fits = d.isfinite()
        stats.finite += int(fits.sum()) - both_nan
        stats.signed.extend(_sums(torch.where(fits, d, 0.0)))
    stats.sums.extend(_sums(size))
    if top > stats.abs:
        stats.abs, stats.at = top, offset + int(size.numpy().argmax())
    for i, threshold in enumerate(thresholds):
        if threshold < top:
            stats.counts[i] += _above(size, threshold, buffers)
    _add_ulps(stats, e, g, ew, gw, size, pair, finite, buffers)
    e_size = ew.abs() if pair.kind == "complex" else ew.abs_()
    _add_relative(stats, e_size, size, buffers("ratio", n))


class _QuickRuns:
    """Two contiguous tensors of one usual floating type, a run at a time, where all is finite.

    Two buffers of float64, so that they and the run stay in the cache of a core. Ratios and
    distances are computed only of what may exceed the largest so far, which few runs have. NumPy
    does most of it: on a run, what it takes to call an operation counts as much as the operation.
    """

    def __init__(self, e: torch.Tensor, g: torch.Tensor, pair: DtypePair) -> None:
        self.e, self.g, self.pair = e, g, pair
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[e.element_size()]
        self.e_bits, self.g_bits = e.view(bits).numpy(), g.view(bits).numpy()
        self.expected = torch.empty(min(len(e), RUN), dtype=torch.float64)
        self.size = torch.empty_like(self.expected)
        self.ratio = torch.empty_like(self.expected)
        self.apart = np.empty(len(self.size), self.e_bits.dtype)
        self.above = np.empty(len(self.size), bool)

    def add(self, stats: Stats, start: int, thresholds: Sequence[float]) -> bool:
        """Take a run into the statistics; False, and nothing, where a number is not finite."""
        e, g = self.e[start : start + RUN], self.g[start : start + RUN]
        n = len(e)
        expected, size, above = self.expected[:n], self.size[:n], self.above[:n]
        expected.copy_(e)
        truth, d = expected.numpy(), size.copy_(g).numpy()
        np.subtract(d, truth, out=d)
        signed = size.sum().item()
        np.abs(d, out=d)
        top = float(np.maximum.reduce(d))
        if not top < INF:
            return False
        stats.finite += n
        stats.signed.append(signed)
        stats.sums.append(size.sum().item())
        if top > stats.abs:
            stats.abs, stats.at = top, start + int(d.argmax())
        for i, threshold in enumerate(thresholds):
            if threshold < top:
                stats.counts[i] += np.count_nonzero(np.greater(d, threshold, out=above))
        if stats.ulp < INF:
            stats.ulp = max(stats.ulp, self._farther(start, n, int(stats.ulp)))
        # The product is rounded, so it is taken a little smaller; where it may be subnormal,
        # equality counts as well.
        np.abs(truth, out=truth)
        np.multiply(truth, stats.rel_nonzero * (1 - 2.0**-50), out=truth)
        exceeds = np.greater_equal if self.pair.got.bits == 64 else np.greater
        exceeds(d, truth, out=above)
        if not stats.rel_nonzero < INF or np.count_nonzero(above):
            _add_relative(stats, expected.copy_(e).abs_(), size, self.ratio[:n])
        return True

    def _farther(self, start: int, n: int, most: int) -> int:
        """Largest distance by bits if it is above *most*; else any number that is not."""
        x, y = self.e_bits[start : start + n], self.g_bits[start : start + n]
        # The bits of two numbers of one sign are as far apart as the numbers are; those of two
        # signs differ by more than 2**(precision - 1), in one direction or the other. So only the
        # elements count whose bits differ by more than that, or than the largest distance so far.
        limit = min(most, 1 << (self.pair.got.precision - 1))
        apart = np.subtract(x, y, out=self.apart[:n])
        apart += limit  # one comparison sees both directions
        unsigned = f"u{apart.itemsize}"
        above = np.greater(apart.view(unsigned), 2 * limit, out=self.above[:n])
        if not np.count_nonzero(above):
            return 0
        chosen = np.flatnonzero(above)
        x, y = x[chosen], y[chosen]
        unlike = (x ^ y) < 0
        magnitudes = np.iinfo(x.dtype).max
        x, y = (x & magnitudes).view(unsigned), (y & magnitudes).view(unsigned)
        return int(np.where(unlike, x + y, np.maximum(x, y) - np.minimum(x, y)).max())


def _sums(x: torch.Tensor) -> list[Any]:
    """Sums of runs: their grouping depends on nothing else."""
    whole = len(x) // RUN * RUN
    sums = x[:whole].view(-1, RUN).sum(1).tolist() if whole else []
    return sums + ([x[whole:].sum().item()] if whole < len(x) else [])


def _above(size: torch.Tensor, limit: float, buffers: _Buffers) -> int:
    above = buffers("above", len(size), torch.bool)
    if len(size) <= RUN:  # on one thread NumPy's comparisons are five times as quick
        return int(np.count_nonzero(np.greater(size.numpy(), limit, out=above.numpy())))
    return int(torch.count_nonzero(torch.gt(size, limit, out=above)))


def _is_long(info: DType) -> bool:
    """Whether float64 does not hold every number of an integer type."""
    return info.kind in ("int", "uint") and info.bits == 64


def _halves(piece: torch.Tensor, info: DType) -> tuple[torch.Tensor, torch.Tensor]:
    """Two parts of numbers, each exact in float64: of integers the upper and lower 32 bits.

    The upper parts of two integers, or of an integer and a float near it, differ exactly.
    """
    if info.kind not in ("int", "uint", "bool"):
        wide = piece.to(torch.float64)
        return wide, torch.zeros_like(wide)
    unsigned = info.name == "uint64"
    bits = piece.view(torch.int64) if unsigned else piece.to(torch.int64)
    high = (bits >> 32) & 0xFFFFFFFF if unsigned else bits >> 32
    return high.to(torch.float64) * 2.0**32, (bits & 0xFFFFFFFF).to(torch.float64)


def _settle(
    stats: Stats, ew: torch.Tensor, gw: torch.Tensor, d: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Decide the differences that involve an infinity or a NaN, and count them.

    Returns the signed and absolute differences and the number of elements NaN in both.
    """
    e_nan, g_nan = ew.isnan(), gw.isnan()
    both, one = e_nan & g_nan, e_nan ^ g_nan
    same = (ew == gw) | both
    apart = (ew.isinf() | gw.isinf()) & ~same & ~e_nan & ~g_nan
    both_nan = int(both.sum())
    stats.nan += both_nan
    stats.dnan += int(one.sum())
    stats.dinf += int(apart.sum())
    d = d.masked_fill(one, INF).masked_fill_(same, 0.0)
    size = d.abs()
    size.masked_fill_(size.isnan(), INF)  # infinite complex parts that cancel
    return d, size, both_nan


def _add_relative(
    stats: Stats, e_size: torch.Tensor, size: torch.Tensor, out: torch.Tensor
) -> None:
    top = torch.div(size, e_size, out=out).amax().item()
    if not top < INF:  # a zero, an infinity or a NaN
        zero = e_size == 0
        stats.zeros += int((zero & (size != 0)).sum())
        out.masked_fill_(out.isnan(), INF).masked_fill_(zero | (size == 0), 0.0)
        top = out.amax().item()
    stats.rel_nonzero = max(stats.rel_nonzero, top)


def _add_ulps(
    stats: Stats, e: torch.Tensor, g: torch.Tensor, ew: torch.Tensor, gw: torch.Tensor,
    size: torch.Tensor, pair: DtypePair, finite: bool, buffers: _Buffers,
) -> None:  # fmt: skip
    if pair.coarse is None:
        stats.ulp = int(stats.abs)
        return
    if pair.kind == "complex":
        if pair.same:
            e, g = torch.view_as_real(e).reshape(-1), torch.view_as_real(g).reshape(-1)
        ew, gw = torch.view_as_real(ew).reshape(-1), torch.view_as_real(gw).reshape(-1)
        size = (gw - ew).abs_()
        if not finite:
            size = _settle(Stats(0, stats.counts), ew, gw, gw - ew)[1]
    fits = None if finite else ew.isfinite() & gw.isfinite()
    if pair.same or pair.coarse.name == "float64":
        a, b = (e, g) if pair.same else (ew, gw)
        if fits is not None and (~fits & (size > 0)).any():
            stats.ulp = INF
        elif stats.ulp < INF:
            stats.ulp = max(stats.ulp, _farthest(a, b, fits, buffers))
    else:
        far = place(ew, pair.coarse).sub_(place(gw, pair.coarse)).abs_()
        # Equal infinities and NaN in both are no distance; nor are two numbers that rounding to
        # the coarse type made infinite.
        top = far.amax().item() if finite else far.masked_fill_(far.isnan(), 0.0).amax().item()
        apart = not finite and bool((ew.isnan() ^ gw.isnan()).any())
        stats.ulp = max(stats.ulp, INF if apart or top == INF else int(top))
    if pair.truth is not None:
        stats.err_ulp = max(stats.err_ulp, scaled_by_ulp(size, ew, pair.truth).amax().item())


def _farthest(
    a: torch.Tensor, b: torch.Tensor, fits: torch.Tensor | None, buffers: _Buffers
) -> int:
    """Largest distance by bits of the elements that fit."""
    dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    x, y, sign = (buffers(name, len(a), dtype) for name in ("x", "y", "sign"))
    ladder(a.view(dtype), x, sign)
    ladder(b.view(dtype), y, sign)
    torch.minimum(x, y, out=sign)
    torch.maximum(x, y, out=x)
    distance = torch.sub(x, sign, out=x)  # of w bits, once read as unsigned
    if fits is not None:
        distance.masked_fill_(~fits, 0)
    low, high = distance.aminmax()
    if low.item() >= 0:
        return int(high)
    least = torch.iinfo(dtype).min
    return int((distance ^ least).amax()) - least
