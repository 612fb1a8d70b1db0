"""How far the same mean and the same normalisation spread over many orders of the values.

A row of a C-contiguous batch is added by NumPy exactly as that row alone, so that 128 orders
are evaluated at once, in blocks of rows that stay in cache, with the bits of 128 separate calls.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .data import DTYPES, arrange, quantize, round_to
from .truth import distinct_bits

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Spread", "mean", "moments", "normalize", "spread", "spread_study"]

#: Added to the standard deviation, as layer norms do, though theirs add it to the variance.
EPSILON = 1e-6

#: Bytes of a block of rows: a few temporaries of this size fit into a core's second cache.
BLOCK_BYTES = 1 << 18


def mean(x: npt.NDArray[Any], dtype: Any) -> Any:
    """Mean over the last axis, added in the type of *x* and rounded once to *dtype*.

    Parameters
    ----------
    x : ndarray of float64 or float32, shape (..., n)
        Values of *dtype*, from :func:`~roundoff.reductions.quantize`; C-contiguous.
    dtype : any
        Type of the result, which is held in the type of *x*.

    Returns
    -------
    ndarray or scalar, shape (...)

    Examples
    --------
    >>> mean(np.float32([1, 2, 4]), "float16")
    np.float32(2.3339844)
    """
    with np.errstate(invalid="ignore"):
        return round_to(np.add.reduce(x, axis=-1) / x.shape[-1], dtype)


def moments(x: npt.NDArray[Any]) -> tuple[Any, Any]:
    """Mean and population standard deviation over the last axis, in the type of *x*.

    Two passes, as :func:`numpy.std`: the squares added are those of x − mean.

    Returns
    -------
    tuple of (mean, sd), each of shape (...)

    Examples
    --------
    >>> moments(np.array([1.0, 3.0]))
    (np.float64(2.0), np.float64(1.0))
    """
    with np.errstate(invalid="ignore", over="ignore"):
        mu = np.add.reduce(x, axis=-1) / x.shape[-1]
        centred = x - mu[..., np.newaxis]
        np.multiply(centred, centred, out=centred)
        return mu, np.sqrt(np.add.reduce(centred, axis=-1) / x.shape[-1])


def normalize(x: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
    """(x − mean) / (sd + 1e-6) over the last axis, in the type of *x*, rounded once to *dtype*.

    Parameters
    ----------
    x : ndarray of float64 or float32, shape (..., n)
        Values of *dtype*; C-contiguous.
    dtype : any
        Type of the result, which is held in the type of *x*.

    Returns
    -------
    ndarray, shape (..., n)

    Examples
    --------
    >>> normalize(np.float32([1, 3]), "float16")
    array([-1.,  1.], dtype=float32)
    """
    mu, sd = moments(x)
    with np.errstate(invalid="ignore"):
        return round_to((x - mu[..., np.newaxis]) / (sd[..., np.newaxis] + EPSILON), dtype)


@dataclasses.dataclass(frozen=True)
class Spread:
    """What a set of orders of the same numbers gave.

    Attributes
    ----------
    means : numpy.ndarray
        Of shape (orders,): mean in each order, rounded to the element type.
    mean : float
        Highest mean minus lowest; ``nan`` when one is not finite.
    normalized : float
        Largest absolute difference, over all pairs of orders, between the sorted normalised
        vectors; ``nan`` when one is not finite.

    Examples
    --------
    >>> from roundoff.reductions import draw_orders
    >>> found = spread(np.float32([1e8, 1, 1, -1e8]), draw_orders(4, 16), "float32")
    >>> len(found.means), found.mean
    (16, 0.5)
    """

    means: npt.NDArray[Any]
    mean: float
    normalized: float


def spread(x: npt.NDArray[Any], drawn: npt.NDArray[np.intp], dtype: Any) -> Spread:
    """Evaluate mean and normalisation in every order of *x*, as a batch.

    A normalised value depends on its order through the mean and the standard deviation alone,
    and grows with the value; so the sorted results are those of the sorted values, and only
    the distinct pairs (mean, sd) need evaluating.

    Parameters
    ----------
    x : ndarray of float64 or float32, shape (n,)
        Values of *dtype*, from :func:`~roundoff.reductions.quantize`.
    drawn : ndarray of intp, shape (k, n)
        From :func:`~roundoff.reductions.draw_orders`.
    dtype : any
        Type to which results are rounded.

    Examples
    --------
    >>> from roundoff.reductions import draw_orders, population, quantize
    >>> x = quantize(population("normal", 8192), "float32")
    >>> found = spread(x, draw_orders(8192, 8), "float32")
    >>> 0 < found.mean < 1e-6
    True
    """
    mu, sd = _moments_by_block(arrange(x, drawn))
    means = round_to(mu, dtype)
    return Spread(means, _range(means.max(), means.min()), _normalized(np.sort(x), mu, sd, dtype))


def _moments_by_block(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    mu, sd = np.empty((2, len(rows)), rows.dtype)
    step = max(1, BLOCK_BYTES // (rows.shape[1] * rows.itemsize))
    for i in range(0, len(rows), step):
        mu[i : i + step], sd[i : i + step] = moments(rows[i : i + step])
    return mu, sd


def _normalized(
    ascending: npt.NDArray[Any], mu: npt.NDArray[Any], sd: npt.NDArray[Any], dtype: Any
) -> float:
    pairs = np.array(sorted(set(zip(mu.tolist(), sd.tolist(), strict=True))), ascending.dtype)
    if not (np.isfinite(pairs).all() and np.isfinite(ascending[[0, -1]]).all()):
        return math.nan
    low = np.full_like(ascending, math.inf)
    high = np.full_like(ascending, -math.inf)
    y = np.empty_like(ascending)
    for m, s in pairs:
        np.subtract(ascending, m, out=y)
        np.divide(y, s + EPSILON, out=y)
        np.minimum(low, y, out=low)
        np.maximum(high, y, out=high)
    # Rounding keeps the order, so that rounding the extremes is enough.
    return _range(round_to(high, dtype), round_to(low, dtype))


def _range(high: Any, low: Any) -> float:
    with np.errstate(invalid="ignore"):
        largest = float(np.max(np.subtract(high, low, dtype=np.float64)))
    return largest if math.isfinite(largest) else math.nan


def spread_study(
    values: Mapping[str, npt.NDArray[np.float64]],
    drawn: Mapping[int, npt.NDArray[np.intp]],
    dtypes: Iterable[str] = DTYPES,
) -> pd.DataFrame:
    """Spread of mean and normalisation for every population, size and element type.

    Parameters
    ----------
    values : mapping of str to ndarray of float64
        Vectors at least as long as the largest size; their prefixes are used.
    drawn : mapping of int to ndarray of intp
        Size -> permutations, from :func:`~roundoff.reductions.draw_orders`; all populations, types
        and both statistics share them.
    dtypes : iterable of str
        Element types.

    Returns
    -------
    pandas.DataFrame
        Columns population, size, dtype, mean, normalized, distinct (different means by their
        bits) and overflow (values that became infinite in the type). A spread is ``nan`` where
        something overflowed.

    Examples
    --------
    >>> from roundoff.reductions import draw_orders, population
    >>> drawn = {512: draw_orders(512, 8)}
    >>> frame = spread_study({"spikes": population("spikes", 512)}, drawn, ["float32", "float16"])
    >>> frame[["dtype", "size", "overflow"]].values.tolist()
    [['float32', 512, 0], ['float16', 512, 0]]
    """
    import pandas as pd

    dtypes = tuple(dtypes)
    held = {(p, d): quantize(x, d) for p, x in values.items() for d in dtypes}
    rows = []
    for size, orders in drawn.items():
        for (name, dtype), x in held.items():
            found = spread(x[:size], orders, dtype)
            rows.append(
                {
                    "population": name,
                    "size": size,
                    "dtype": dtype,
                    "mean": found.mean,
                    "normalized": found.normalized,
                    "distinct": distinct_bits(found.means),
                    "overflow": int(np.count_nonzero(np.isinf(x[:size]))),
                }
            )
    return pd.DataFrame(rows)
