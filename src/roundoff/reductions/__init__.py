"""Summation orders and algorithms: one set of numbers, many sums.

Floating-point addition commutes but does not associate, so the sum of a vector depends on the
order and on the grouping in which its values are added. This package draws the data and the
orders, adds them with several algorithms, knows the exact sum and the classical bounds, and
measures how far 128 orders of the same numbers spread; ``roundoff.reductions.stack`` follows such
differences through a network.

Examples
--------
>>> import numpy as np
>>> x = quantize(population("normal", size=64, seed=0), "float32")
>>> mean(x, "float32") == mean(np.sort(x), "float32")
np.False_
>>> exact(x) == exact(np.sort(x))
np.True_
"""

from __future__ import annotations

from .algorithms import (
    ALGORITHMS,
    Algorithm,
    binned,
    chunked,
    exact,
    neumaier,
    pairwise,
    pairwise_numpy,
    sequential,
)
from .data import (
    DTYPES,
    POPULATIONS,
    SIZES,
    arrange,
    draw_orders,
    overflows,
    population,
    quantize,
    round_to,
    work_dtype,
)
from .spread import Spread, mean, moments, normalize, spread, spread_study
from .tensor_core import matmul as tensor_core_matmul
from .truth import (
    condition,
    distinct_bits,
    error_bound,
    exact_sum,
    judge,
    numpy_depth,
    probable_bound,
    round_exact,
    signed_errors,
)

__all__ = [
    "ALGORITHMS",
    "DTYPES",
    "POPULATIONS",
    "SIZES",
    "Algorithm",
    "Spread",
    "arrange",
    "binned",
    "chunked",
    "condition",
    "distinct_bits",
    "draw_orders",
    "error_bound",
    "exact",
    "exact_sum",
    "judge",
    "mean",
    "moments",
    "neumaier",
    "normalize",
    "numpy_depth",
    "overflows",
    "pairwise",
    "pairwise_numpy",
    "population",
    "probable_bound",
    "quantize",
    "round_exact",
    "round_to",
    "sequential",
    "signed_errors",
    "spread",
    "spread_study",
    "tensor_core_matmul",
    "work_dtype",
]
