"""The statistics of :mod:`roundoff.compare.stats` in one pass over two tensors of a GPU.

Separate torch calls would read the tensors some thirty times; this kernel reads each once. Each
program measures one run of elements in float64 and writes its partial results; the host adds
them, exactly for the sums, so that a result does not depend on the order of programs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from roundoff.describe import Held
from roundoff.dtypes import dtype_info

if TYPE_CHECKING:
    from .stats import Plan, Stats

BLOCK = 256  # an element a thread: 64 registers, so that many programs run at once
FIELDS = 8
_TYPES = ("float64", "float32", "float16", "bfloat16")


def measure(expected: Held, got: Held, how: Plan, thresholds: Sequence[float]) -> Stats | None:
    """Statistics of two contiguous tensors of one GPU; ``None`` where this kernel cannot.

    It takes float64, float32, float16 and bfloat16, and at most eight thresholds.
    """
    e, g = expected.tensor, got.tensor
    if how.coarse is None or len(thresholds) > FIELDS:
        return None
    if expected.info.name not in _TYPES or got.info.name not in _TYPES:
        return None
    if not (e.is_contiguous() and g.is_contiguous()):
        return None
    try:
        from .kernel import partial_statistics
    except ImportError:  # torch without Triton
        return None

    def run(clean: bool) -> Any:
        return partial_statistics(e, g, thresholds, how, clean, _programs(e), BLOCK)

    ints = run(True)
    if not np.isfinite(ints.view(np.float64)[:, 3]).all():  # NaN, infinity, or an overflow
        ints = run(False)
    return _gather(ints, e.numel(), len(thresholds), how)


def _gather(ints: Any, n: int, thresholds: int, how: Plan) -> Stats:
    """Statistics from what the programs found; see the stores of the kernel."""
    from .stats import Stats

    floats = ints.view(np.float64)
    tops, sums = floats[:, :3].max(axis=0).tolist(), ints[:, 7:].sum(axis=0)
    zeros, dnan, nan, dinf, unfit = sums[:5].tolist()
    total = Stats(n, sums[5 : 5 + thresholds])
    total.abs, total.rel_nonzero, total.err_ulp = tops
    total.sums, total.signed = [exact_sum(floats[:, 3])], [exact_sum(floats[:, 4])]
    total.zeros, total.dnan, total.nan, total.dinf = zeros, dnan, nan, dinf
    total.finite = n - unfit - nan
    total.rel = math.inf if zeros else total.rel_nonzero
    if total.abs > 0:
        total.at = int(ints[floats[:, 0].argmax(), 6])
    if how.same:
        far = dnan + dinf > 0
        top = int(ints[:, 5].max())
        # The kernel orders distances of 64 bits as signed integers, from the smallest one up.
        total.ulp = math.inf if far else top + 2**63 * (how.got.bits == 64)
    else:
        most = math.inf if dnan else float(floats[:, 5].max())
        total.ulp = most if most == math.inf else int(most)
    return total


def _programs(tensor: Any) -> int:
    import torch

    if not tensor.is_cuda:  # the interpreter
        return 4
    return 4 * torch.cuda.get_device_properties(tensor.device).multi_processor_count


def exact_sum(values: Any) -> float:
    """Sum rounded once; as floats add where it overflows on the way."""
    try:
        return math.fsum(values.tolist())
    except (OverflowError, ValueError):  # past the largest number; infinities of both signs
        return float(values.sum())


@functools.lru_cache(maxsize=16)
def format_of(name: str) -> dict[str, Any]:
    """What the kernel must know of a floating type, as compile-time constants."""
    from .ulps import _last_place

    info = dtype_info(name)
    return {"P": info.precision, "EMIN": info.emin, "EMAX": info.emax, "LAST": _last_place(info)}
