"""The questions that the page on reduction order asks, each as one tidy table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from roundoff.dtypes import dtype_info, ulp

from .algorithms import ALGORITHMS, pairwise
from .data import DTYPES, arrange, quantize
from .spread import mean
from .truth import (
    condition,
    error_bound,
    exact_sum,
    judge,
    numpy_depth,
    probable_bound,
    signed_errors,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "algorithm_study",
    "bound_study",
    "condition_study",
    "order_name",
    "split_study",
    "truth_study",
]

Array = npt.NDArray[Any]
Values = Mapping[str, npt.NDArray[np.float64]]
Drawn = Mapping[int, npt.NDArray[np.intp]]

#: A way to add: its name, the type of the values, and the type in which they are added.
Way = tuple[str, str, str]


def order_name(row: int) -> str:
    """What order a row of :func:`~roundoff.reductions.arrange` holds.

    Examples
    --------
    >>> [order_name(i) for i in (0, 1, 2, 3, 127)]
    ['given', 'ascending', 'descending', 'random', 'random']
    """
    return ("given", "ascending", "descending")[row] if row < 3 else "random"


def truth_study(values: Values, drawn: Drawn, dtypes: Iterable[str] = DTYPES) -> pd.DataFrame:
    """Means of the longest vectors by NumPy's sum, against the exact mean of the rounded values.

    Returns
    -------
    pandas.DataFrame
        Columns population, dtype, condition, those of :func:`~roundoff.reductions.judge`, and
        worst_order, the order with the largest error (``"any"`` when all orders agree).
    """
    import pandas as pd

    size = max(drawn)
    rows = []
    for name, vector in values.items():
        for dtype in dtypes:
            x = quantize(vector[:size], dtype)
            truth = exact_sum(x) / size
            results = mean(arrange(x, drawn[size]), dtype)
            found = judge(results, truth, dtype)
            worst = order_name(int(np.argmax(np.abs(signed_errors(results, truth)))))
            rows.append(
                {"population": name, "dtype": dtype, "condition": condition(x)}
                | found
                | {"worst_order": worst if found["distinct"] > 1 else "any"}
            )
    return pd.DataFrame(rows)


def condition_study(
    values: Values,
    drawn: Drawn,
    dtypes: Iterable[str] = DTYPES,
    add: Callable[[Array], Array] = pairwise,
) -> pd.DataFrame:
    """Relative error of sums that are added in the type of their values, whatever its width.

    Returns
    -------
    pandas.DataFrame
        Columns population, dtype, size, scale (condition number times unit roundoff) and error
        (largest relative error over the orders; ``nan`` when a sum overflows).
    """
    import pandas as pd

    rows = []
    for name, vector in values.items():
        for dtype in dtypes:
            stored = quantize(vector, dtype, storage=True)
            for size, orders in drawn.items():
                x = stored[:size]
                truth = exact_sum(x)
                largest = np.max(np.abs(signed_errors(add(arrange(x, orders)), truth)))
                rows.append(
                    {
                        "population": name,
                        "dtype": dtype,
                        "size": size,
                        "scale": condition(x) * dtype_info(dtype).unit_roundoff,
                        "error": largest / abs(float(truth)) if np.isfinite(largest) else math.nan,
                    }
                )
    return pd.DataFrame(rows)


def algorithm_study(
    ways: Mapping[Way, Callable[[Array], Array]], values: Values, orders: npt.NDArray[np.intp]
) -> pd.DataFrame:
    """Every way to add, with every population: all orders of it, and one order again and again.

    Parameters
    ----------
    ways : mapping
        (name, type of the values, type of the additions) -> function from rows to their sums.
    values : mapping
        Vectors; as many values are used as the orders are long.
    orders : ndarray of intp, shape (k, n)
        From :func:`~roundoff.reductions.draw_orders`.

    Returns
    -------
    pandas.DataFrame
        Columns algorithm, data, adds_in, population, those of :func:`~roundoff.reductions.judge`
        over the orders, and repeats: different results when the given order is added as often as
        there are orders.
    """
    import pandas as pd

    rows = []
    for (algorithm, data, adds_in), add in ways.items():
        for name, vector in values.items():
            x = quantize(vector[: orders.shape[1]], data, storage=True)
            arranged, truth = arrange(x, orders), exact_sum(x)
            again = judge(add(np.tile(x, (len(arranged), 1))), truth, data)
            rows.append(
                {"algorithm": algorithm, "data": data, "adds_in": adds_in, "population": name}
                | judge(add(arranged), truth, data)
                | {"repeats": again["distinct"]}
            )
    return pd.DataFrame(rows)


def bound_study(
    values: Values, drawn: Drawn, algorithms: Sequence[str], dtype: str = "float32"
) -> pd.DataFrame:
    """Largest error and spread over the orders, in units of u·Σ\\|x\\|, beside what theory says.

    Parameters
    ----------
    values, drawn : mapping
        Vectors, and the orders of their prefixes.
    algorithms : sequence of str
        Keys of ``ALGORITHMS`` whose depth is known.
    dtype : str
        ``"float32"`` or ``"float64"``.

    Returns
    -------
    pandas.DataFrame
        Columns algorithm, population, size, error, spread, within (orders whose error is at most
        expected), expected (√d) and bound (d, to all orders).
    """
    import pandas as pd

    unit = dtype_info(dtype).unit_roundoff
    rows = []
    for label in algorithms:
        for name, vector in values.items():
            for size, orders in drawn.items():
                x = quantize(vector[:size], dtype)
                depth = (ALGORITHMS[label].depth or numpy_depth)(size)
                scale = unit * float(exact_sum(np.abs(x)))
                sums = ALGORITHMS[label].add(arrange(x, orders))
                errors = np.abs(signed_errors(sums, exact_sum(x))) / scale
                expected = probable_bound(depth, 1.0, dtype) / unit
                rows.append(
                    {
                        "algorithm": label,
                        "population": name,
                        "size": size,
                        "error": float(errors.max()),
                        "spread": (float(sums.max()) - float(sums.min())) / scale,
                        "within": int(np.count_nonzero(errors <= expected)),
                        "expected": expected,
                        "bound": error_bound(depth, 1.0, dtype) / unit,
                    }
                )
    return pd.DataFrame(rows)


def split_study(
    values: Values, ways: Mapping[str, Callable[[Array, int], Any]], workers: Sequence[int]
) -> pd.DataFrame:
    """One large float32 sum by a growing number of workers.

    Parameters
    ----------
    values : mapping
        Vectors.
    ways : mapping
        Name -> function of the vector and the number of workers.
    workers : sequence of int
        Numbers of workers; changes are counted from the first.

    Returns
    -------
    pandas.DataFrame
        Columns population, workers, and for each way "<name> change" (from the first number of
        workers) and "<name> error" (from the exact sum), in ULP.
    """
    import pandas as pd

    rows = []
    for name, vector in values.items():
        x = quantize(vector, "float32")
        truth = exact_sum(x)
        unit = float(ulp(float(truth), "float32"))
        sums = {way: [float(add(x, w)) for w in workers] for way, add in ways.items()}
        for i, w in enumerate(workers):
            row: dict[str, Any] = {"population": name, "workers": w}
            for way, found in sums.items():
                row[f"{way} change"] = (found[i] - found[0]) / unit
                row[f"{way} error"] = float(Fraction(found[i]) - truth) / unit
            rows.append(row)
    return pd.DataFrame(rows)
