"""Times of callables: interleaved, synchronised, warmed up; medians and ratios with intervals.

:func:`measure` times any number of callables beside each other on a CPU or a CUDA device.
:func:`measure_ceilings` measures what the machine can do at most, with the same harness, so that
a time can be read as a share of it.

What exists and why it is not enough: ``torch.utils.benchmark`` synchronises and takes medians but
times one callable after another, so a machine that slows down half way favours the first;
``triton.testing.do_bench`` flushes the L2 cache but does not interleave either, and
``do_bench_cudagraph`` does not flush. Here the rounds interleave, and a cold cache comes from
rotating over buffers larger than the cache, which costs nothing inside a CUDA graph.
"""

from __future__ import annotations

from .ceilings import Ceilings, measure_ceilings
from .harness import measure
from .machine import compile_cache, copies, free_memory, last_level_cache, torch_precision
from .result import Timings, pool
from .statistics import Ratio, median_interval

__all__ = [
    "Ceilings",
    "Ratio",
    "Timings",
    "compile_cache",
    "copies",
    "free_memory",
    "last_level_cache",
    "measure",
    "measure_ceilings",
    "median_interval",
    "pool",
    "torch_precision",
]
