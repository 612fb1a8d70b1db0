"""The numbers behind a comparison of two tensors, a cache-sized piece at a time.

Every difference is taken in float64 (in complex128 for complex types; 64-bit integers by halves,
so that nothing overflows). A piece of the two tensors is widened, measured and forgotten, which
keeps the extra memory bounded. On a CPU two threads take pieces of their own, which other
processes on their cores hardly disturb. More would wait for the interpreter's lock between any
two operations, and longer the more they are: there torch shares each operation on a wider piece
out among its threads. Sums are taken over runs of elements and these are added exactly
(:func:`math.fsum`), so that neither the number of threads nor the kind of tensor changes a result.
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

from .ulps import Array

if TYPE_CHECKING:
    import torch

#: Elements of a run, whose sum is taken at once; few threads measure a run at a time: its arrays
#: of float64 fit in a core's cache, and torch keeps work on fewer than 32,768 to one thread.
PIECE = 32_704
#: Up to so many threads take runs of their own, from so many runs on.
FEW, SHARED = 2, 64
#: Runs that each of more threads has of a piece: with fewer, starting and joining threads costs
#: more; with more, the arrays leave the caches.
WIDE = 2
#: Elements of a piece of tensors that are not contiguous; it must not depend on the threads.
STRIDED = PIECE << 4
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
    e, g, workers = expected.tensor, got.tensor, threads()
    if e.is_contiguous() and g.is_contiguous():
        e, g = e.view(-1), g.view(-1)
        spans = list(_spans((total.n,), PIECE if workers <= FEW else PIECE * WIDE * workers))
    else:
        spans = list(_spans(e.shape, STRIDED))

    def share(group: list[_Span]) -> Stats:
        return _share(group, e, g, how, thresholds)

    if not 1 < workers <= FEW or len(spans) < SHARED or not e.is_contiguous():
        total.add(share(spans))
        return total
    size = math.ceil(len(spans) / workers)
    with ThreadPoolExecutor(workers) as pool:
        for found in pool.map(share, [spans[i : i + size] for i in range(0, len(spans), size)]):
            total.add(found)
    return total


def _share(
    spans: list[_Span], e: torch.Tensor, g: torch.Tensor, how: Plan, thresholds: Sequence[float]
) -> Stats:
    """Statistics of some pieces, one after the other."""
    from .pieces import Room, measure_piece

    mine, room = Stats(0, np.zeros(len(thresholds), dtype=np.int64)), Room()
    for offset, index in spans:
        pair = _piece(e, index), _piece(g, index)
        mine.add(measure_piece(*pair, how, thresholds, offset, mine.abs, room))
    return mine


def threads() -> int:
    import torch

    return max(1, torch.get_num_threads())


_Span = tuple[int, tuple[Any, ...]]  # flat offset, index of the piece


def _spans(shape: Sequence[int], most: int) -> Iterator[_Span]:
    """Indices that cut a shape, in order, into pieces of at most *most* elements.

    Works for any strides, since a piece is a run of one axis under fixed indices of the axes
    before it.
    """
    if math.prod(shape) <= most:
        yield 0, ()
        return
    axis = next(k for k in range(len(shape)) if math.prod(shape[k + 1 :]) <= most)
    inner = math.prod(shape[axis + 1 :])
    step = max(1, most // inner)
    offset = 0
    for before in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], step):
            stop = min(start + step, shape[axis])
            yield offset, (*before, slice(start, stop))
            offset += (stop - start) * inner


def _piece(tensor: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor:
    return (tensor[index] if index else tensor).reshape(-1).cpu()
