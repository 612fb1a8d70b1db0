"""The numbers behind a comparison of two tensors: by torch on the CPU, a piece at a time.

Every difference is taken in float64 (in complex128 for complex types; 64-bit integers by halves,
so that nothing overflows). A piece of the two tensors is widened, measured and forgotten, which
keeps the extra memory bounded.

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
from .ulps import FAR, Array, steps_apart

#: Elements of a run, whose sum is taken at once: what the caches of a core hold. torch keeps work
#: on fewer than 32,768 elements to one thread.
RUN = 32_704
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
    sums : list
        Sums of the absolute differences, a number a run of elements.
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
    dnan: int = 0
    dinf: int = 0
    ulp: float = 0


@dataclasses.dataclass(frozen=True)
class DtypePair:
    """How two element types are compared.

    Attributes
    ----------
    kind : str
        ``"float"``, ``"complex"`` or ``"int"`` (both are integers or bool).
    coarse : DType or None
        The floating type whose units are counted; ``None`` for integers.
    """

    kind: str
    expected: DType
    got: DType
    coarse: DType | None


def dtype_pair(expected: TypedTensor, got: TypedTensor) -> DtypePair:
    """Choose how the types of two tensors are compared."""
    infos = [expected.info, got.info]
    real = [i for i in map(_component, infos) if i.is_float]
    coarse = min(real, key=lambda i: (i.precision, i.max, i.name)) if real else None
    kind = "complex" if any(i.kind == "complex" for i in infos) else "float" if real else "int"
    return DtypePair(kind, infos[0], infos[1], coarse)


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
    most = STRIDED
    if e.is_contiguous() and g.is_contiguous():
        e, g, most = e.view(-1), g.view(-1), RUN * torch.get_num_threads()
    for offset, index in partition(e.shape, most):
        a, b = ((t[index] if index else t).reshape(-1).cpu() for t in (e, g))
        _add_piece(stats, a, b, pair, thresholds, offset)
    stats.rel = INF if stats.zeros else stats.rel_nonzero
    return stats


def _add_piece(
    stats: Stats,
    e: torch.Tensor,
    g: torch.Tensor,
    pair: DtypePair,
    thresholds: Sequence[float],
    offset: int,
) -> None:
    """Take the elements from *offset* on into the statistics."""
    wide = torch.complex128 if pair.kind == "complex" else torch.float64
    ew, gw = e.to(wide), g.to(wide)
    if pair.kind != "complex" and any(_is_long(i) for i in (pair.expected, pair.got)):
        (eh, el), (gh, gl) = _halves(e, pair.expected), _halves(g, pair.got)
        d = (gh - eh) + (gl - el)
    else:
        d = gw - ew
    size = d.abs()
    top = size.amax().item()
    finite = top < INF
    if not finite:
        _settle(stats, ew, gw, size)
        top = size.amax().item()
    stats.sums.extend(_sums(size))
    if top > stats.abs:
        stats.abs, stats.at = top, offset + int(size.numpy().argmax())
    for i, threshold in enumerate(thresholds):
        if threshold < top:
            stats.counts[i] += int((size > threshold).sum())
    _add_ulps(stats, e, g, ew, gw, pair, finite)
    _add_relative(stats, ew.abs(), size)


def _sums(x: torch.Tensor) -> list[Any]:
    """Sums of runs: their grouping depends on nothing else."""
    whole = len(x) // RUN * RUN
    sums = x[:whole].view(-1, RUN).sum(1).tolist() if whole else []
    return sums + ([x[whole:].sum().item()] if whole < len(x) else [])


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


def _settle(stats: Stats, ew: torch.Tensor, gw: torch.Tensor, size: torch.Tensor) -> None:
    """Decide the differences that involve an infinity or a NaN, and count them."""
    e_nan, g_nan = ew.isnan(), gw.isnan()
    same = (ew == gw) | (e_nan & g_nan)
    apart = (ew.isinf() | gw.isinf()) & ~same & ~e_nan & ~g_nan
    stats.dnan += int((e_nan ^ g_nan).sum())
    stats.dinf += int(apart.sum())
    # NaN beside a number, and infinite complex parts that cancel.
    size.masked_fill_(size.isnan(), INF).masked_fill_(same, 0.0)


def _add_relative(stats: Stats, e_size: torch.Tensor, size: torch.Tensor) -> None:
    out = size / e_size
    top = out.amax().item()
    if not top < INF:  # a zero, an infinity or a NaN
        zero = e_size == 0
        stats.zeros += int((zero & (size != 0)).sum())
        out.masked_fill_(out.isnan(), INF).masked_fill_(zero | (size == 0), 0.0)
        top = out.amax().item()
    stats.rel_nonzero = max(stats.rel_nonzero, top)


def _add_ulps(
    stats: Stats,
    e: torch.Tensor,
    g: torch.Tensor,
    ew: torch.Tensor,
    gw: torch.Tensor,
    pair: DtypePair,
    finite: bool,
) -> None:
    if pair.coarse is None:
        stats.ulp = int(stats.abs)
        return
    if pair.kind == "complex":
        e, g = ew, gw = [torch.view_as_real(t).reshape(-1) for t in (ew, gw)]
    by_bits = pair.coarse.bits >= 16 and all(dtype_info(t.dtype) == pair.coarse for t in (e, g))
    top = steps_apart(*((e, g) if by_bits else (ew, gw)), pair.coarse, finite).max()
    stats.ulp = max(stats.ulp, INF if top == FAR else int(top))
