"""Mean and normalisation over the last axis, each row of a batch as if it were alone.

NumPy adds a row of a C-contiguous batch exactly as that row alone, so that many orders of one
vector are evaluated at once, with the bits of separate calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .data import round_to

__all__ = ["mean", "moments", "normalize"]

#: Added to the standard deviation, as layer norms do, though theirs add it to the variance.
EPSILON = 1e-6


def mean(x: npt.NDArray[Any], dtype: Any) -> Any:
    """Mean over the last axis, added in the type of *x* and rounded once to *dtype*.

    Parameters
    ----------
    x : ndarray of float64 or float32, shape (..., n)
        Values of *dtype*, from :func:`~roundoff.reductions.round_to`; C-contiguous.
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
