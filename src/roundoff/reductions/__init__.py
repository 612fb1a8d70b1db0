"""Summation orders and algorithms: one set of numbers, many sums.

Floating-point addition commutes but does not associate, so the sum of a vector depends on the
order and on the grouping in which its values are added. This package draws values and orders, adds
them with several algorithms, and computes the exact sum to compare with.

Examples
--------
>>> import numpy as np
>>> from roundoff.reductions import draw_values, exact_sum, mean, round_to
>>> x = round_to(draw_values("normal", size=64, seed=0), "float32")
>>> mean(x, "float32") == mean(np.sort(x), "float32")
np.False_
>>> exact_sum(x) == exact_sum(np.sort(x))
True
"""

from __future__ import annotations

from .algorithms import (
    binned,
    mean,
    moments,
    neumaier,
    pairwise,
    sequential,
)
from .data import (
    DISTRIBUTIONS,
    DTYPES,
    arrange,
    draw_orders,
    draw_values,
    round_to,
)
from .orders import (
    add_in_order,
    order_probes,
    order_text,
    orders_found,
    ring_sum,
)
from .tensor_core import tensor_core_matmul
from .truth import (
    condition,
    distinct_bits,
    exact_sum,
    judge,
    round_exact,
)

__all__ = [
    "DISTRIBUTIONS",
    "DTYPES",
    "add_in_order",
    "arrange",
    "binned",
    "condition",
    "distinct_bits",
    "draw_orders",
    "draw_values",
    "exact_sum",
    "judge",
    "mean",
    "moments",
    "neumaier",
    "order_probes",
    "order_text",
    "orders_found",
    "pairwise",
    "ring_sum",
    "round_exact",
    "round_to",
    "sequential",
    "tensor_core_matmul",
]
