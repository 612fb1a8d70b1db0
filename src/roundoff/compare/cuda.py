"""The statistics of :mod:`roundoff.compare.stats` in one pass over two tensors of a GPU.

Separate torch calls would read the tensors some thirty times; this kernel reads each once. Each
program measures one run of elements in float64 and writes its partial results; the host adds
them, exactly for the sums, so that a result does not depend on the order of programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from roundoff.describe import Held
from roundoff.dtypes import dtype_info

if TYPE_CHECKING:
    from .stats import Plan, Stats

BLOCK = 512
#: A lane counts into fields of 16 bits, so a program makes fewer steps than this.
STEPS = 60_000
FIELDS = 8
_TYPES = ("float64", "float32", "float16", "bfloat16")


def measure(expected: Held, got: Held, how: Plan, thresholds: Sequence[float]) -> Stats | None:
    """Statistics of two contiguous tensors of one GPU; ``None`` where this kernel cannot.

    It takes float64, float32, float16 and bfloat16, and at most eight thresholds.
    """
    from .stats import Stats

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
    order = sorted(range(len(thresholds)), key=lambda i: thresholds[i])
    run, floats, ints = partial_statistics(
        e, g, [thresholds[i] for i in order], how, _programs(e), STEPS, BLOCK
    )
    total = Stats(e.numel(), np.zeros(len(thresholds), dtype=np.int64))
    total.abs = float(floats[:, 0].max())
    total.rel_nonzero = float(floats[:, 1].max())
    total.err_ulp = float(floats[:, 2].max()) if how.truth is not None else 0.0
    total.sums, total.signed = floats[:, 4].tolist(), floats[:, 5].tolist()
    total.dnan, total.nan, total.dinf, total.zeros, total.finite = (
        int(ints[:, i].sum()) for i in range(1, 6)
    )
    total.finite -= total.nan
    total.rel = math.inf if total.zeros else total.rel_nonzero
    buckets = [int(ints[:, 6 + i].sum()) for i in range(len(thresholds))]
    for rank, i in enumerate(order):  # bucket r: above exactly r + 1 thresholds
        total.counts[i] = sum(buckets[rank:])
    total.ulp = _ulp(total, floats, ints, how)
    if total.abs > 0:
        finite = total.nan + total.dnan + total.dinf == 0
        total.at = _worst(e, g, int(floats[:, 0].argmax()) * run, run, finite)
    return total


def _programs(tensor: Any) -> int:
    import torch

    if not tensor.is_cuda:  # the interpreter
        return 4
    # Three programs fit on a multiprocessor (168 registers a thread): two full waves.
    return 6 * torch.cuda.get_device_properties(tensor.device).multi_processor_count


def _ulp(total: Stats, floats: Any, ints: Any, how: Plan) -> float:
    if how.same or (how.coarse is not None and how.coarse.name == "float64"):
        far = total.dnan + total.dinf > 0
        # The kernel orders unsigned distances as signed integers, from the smallest one up.
        return math.inf if far else int(ints[:, 0].max()) + 2**63
    top = math.inf if total.dnan else float(floats[:, 3].max())
    return top if top == math.inf else int(top)


def _worst(e: Any, g: Any, start: int, run: int, finite: bool) -> int:
    """Flat index of the first largest difference within one program's run."""
    import torch

    ew, gw = (t.view(-1)[start : start + run].to(torch.float64) for t in (e, g))
    size = (gw - ew).abs()
    if not finite:
        same = (ew == gw) | (ew.isnan() & gw.isnan())
        size = torch.where(same, 0.0, size).nan_to_num(nan=math.inf, posinf=math.inf)
    return start + int(size.argmax())


def format_of(name: str) -> dict[str, Any]:
    """What the kernel must know of a floating type, as compile-time constants."""
    from .ulps import _last_place

    info = dtype_info(name)
    return {"P": info.precision, "EMIN": info.emin, "EMAX": info.emax, "LAST": _last_place(info)}
