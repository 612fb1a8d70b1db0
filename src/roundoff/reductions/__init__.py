"""Summation orders and algorithms: one set of numbers, many sums.

Floating-point addition commutes but does not associate, so the sum of a vector depends on the
order and on the grouping in which its values are added. This package draws values and orders, adds
them with several algorithms, and knows the exact sum and the classical bounds.

Examples
--------
>>> import numpy as np
>>> x = round_to(draw_values("normal", size=64, seed=0), "float32")
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
    exact,
    neumaier,
    pairwise,
    pairwise_numpy,
    sequential,
)
from .data import (
    DISTRIBUTIONS,
    DTYPES,
    arrange,
    draw_orders,
    draw_values,
    round_to,
    work_dtype,
)
from .statistics import mean, moments, normalize
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
    "DISTRIBUTIONS",
    "DTYPES",
    "Algorithm",
    "arrange",
    "binned",
    "condition",
    "distinct_bits",
    "draw_orders",
    "draw_values",
    "error_bound",
    "exact",
    "exact_sum",
    "judge",
    "mean",
    "moments",
    "neumaier",
    "normalize",
    "numpy_depth",
    "pairwise",
    "pairwise_numpy",
    "probable_bound",
    "round_exact",
    "round_to",
    "sequential",
    "signed_errors",
    "tensor_core_matmul",
    "work_dtype",
]
