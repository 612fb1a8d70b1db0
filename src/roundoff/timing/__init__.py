"""Times of callables: interleaved, synchronised, warmed up; medians and ratios with intervals.

:func:`measure` times any number of callables beside each other on a CPU or a CUDA device.

What exists and why it is not enough: ``torch.utils.benchmark`` synchronises and takes medians but
times one callable after another, so a machine that slows down half way favours the first;
``triton.testing.do_bench`` flushes the L2 cache but does not interleave either, and
``do_bench_cudagraph`` does not flush. Here the rounds interleave, and a cold cache comes from
rotating over buffers larger than the cache, which costs nothing inside a CUDA graph.
"""

from __future__ import annotations

from roundoff.precision import torch_precision

from .harness import measure
from .machine import copies, free_memory
from .result import Timings, pool
from .statistics import Interval

__all__ = [
    "Interval",
    "Timings",
    "copies",
    "free_memory",
    "measure",
    "pool",
    "torch_precision",
]
