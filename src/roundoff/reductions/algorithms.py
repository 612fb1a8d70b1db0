"""Ways to add the values of a vector, each over the last axis of an array; mean and deviation.

Every function takes an array of shape (..., n) with n at least 1 and returns one of shape (...)
in the same type: each addition is rounded to that type. A row of a batch has the bits of the same
vector added alone, so that many orders of one vector are evaluated at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .data import round_to

__all__ = [
    "binned",
    "mean",
    "moments",
    "neumaier",
    "pairwise",
    "pairwise_numpy",
    "sequential",
]

Array = npt.NDArray[Any]


def sequential(x: Array) -> Array:
    """Left to right into one accumulator: n − 1 additions, each waiting for the one before.

    Examples
    --------
    >>> import numpy as np
    >>> from roundoff.reductions import sequential
    >>> sequential(np.array([1e8, 1.0, 1.0, 1.0, 1.0], np.float32))
    np.float32(1e+08)
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.add.accumulate(x, axis=-1)[..., -1][()]


def pairwise_numpy(x: Array) -> Array:
    """What :func:`numpy.sum` does to a contiguous vector, bit for bit.

    Up to 128 values are added by eight interleaved accumulators, which are then added in pairs;
    a longer vector is cut in two near its middle, at a multiple of eight, and each half added
    so. NumPy adds float16 so in float32 and rounds once, at the end.

    An array that is not contiguous along its last axis is copied first: NumPy would add it row
    by row, which for each vector is :func:`~roundoff.reductions.sequential`.

    Examples
    --------
    >>> import numpy as np
    >>> from roundoff.reductions import pairwise_numpy
    >>> x = np.linspace(0, 1, 1000, dtype=np.float32)
    >>> bool(pairwise_numpy(x) == np.sum(x))
    True
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.add.reduce(np.ascontiguousarray(x), axis=-1)


def pairwise(x: Array) -> Array:
    """Neighbours in pairs, then the pairs, down to the leaves: a tree of depth ⌈log2 n⌉.

    Examples
    --------
    >>> import numpy as np
    >>> from roundoff.reductions import pairwise
    >>> pairwise(np.array([1e8, 1.0, 3.0, 3.0], np.float32))
    np.float32(1.0000001e+08)
    """
    with np.errstate(over="ignore", invalid="ignore"):
        while x.shape[-1] > 1:
            even = x.shape[-1] & ~1
            sums = x[..., 0:even:2] + x[..., 1:even:2]
            # An odd one out waits for the next level: the depth does not change.
            x = sums if even == x.shape[-1] else np.concatenate([sums, x[..., even:]], axis=-1)
        return x[..., 0][()]


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """The rounded sum s of two arrays or tensors, and its error e: a + b = s + e exactly.

    References
    ----------
    D. E. Knuth, *The Art of Computer Programming*, volume 2, section 4.2.2, theorem B.
    """
    s = a + b
    bb = s - a
    return s, (a - (s - bb)) + (b - bb)


def neumaier(x: Array) -> Array:
    """Sequential, with the rounding error of each addition kept, and their sum added at the end.

    Neumaier's improvement of Kahan's compensated sum. The error of an addition is itself a
    floating-point number, whichever formula gives it, so that the running sums can be taken
    first and all the errors after them: the bits are those of the loop. The error is as if
    computed in twice the precision, then rounded; the result may still depend on the order.

    References
    ----------
    A. Neumaier, *Rundungsfehleranalyse einiger Verfahren zur Summation endlicher Summen*,
    ZAMM 54, 1974, `doi:10.1002/zamm.19740540106 <https://doi.org/10.1002/zamm.19740540106>`_;
    T. Ogita, S. Rump, S. Oishi, *Accurate sum and dot product*, 2005,
    `doi:10.1137/030601818 <https://doi.org/10.1137/030601818>`_.

    Examples
    --------
    >>> import numpy as np
    >>> from roundoff.reductions import neumaier
    >>> neumaier(np.array([1.0, 1e30, 1.0, -1e30], np.float64))
    np.float64(2.0)
    """
    with np.errstate(over="ignore", invalid="ignore"):
        running = np.add.accumulate(x, axis=-1)
        if x.shape[-1] == 1:
            return running[..., -1][()]
        _, errors = two_sum(running[..., :-1], x[..., 1:])
        return running[..., -1] + sequential(errors)


def binned(x: Array, folds: int = 3) -> Array:
    """Reproducible: values cut at fixed bit positions, so that each piece is added exactly.

    The largest \\|x\\| and n, neither of which depends on the order, choose a number
    σ = 1.5 · 2^e so large that the parts of all values above its last place add up without
    rounding, in any order. The remainders are cut again, *folds* times. The few exact sums are
    added last, smallest first.

    Parameters
    ----------
    x : ndarray of float64 or float32, shape (..., n)
        With n · max \\|x\\| below a quarter of the largest number of the type.
    folds : int
        How many pieces: each holds about p − 1 − log2 n bits, where p is the precision.

    References
    ----------
    J. Demmel, H. D. Nguyen, *Fast reproducible floating-point summation*, ARITH 2013,
    `doi:10.1109/ARITH.2013.9 <https://doi.org/10.1109/ARITH.2013.9>`_; its one-pass successor is
    P. Ahrens, J. Demmel, H. D. Nguyen, *Algorithms for efficient reproducible floating point
    summation*, ACM TOMS 46, 2020, `doi:10.1145/3389360 <https://doi.org/10.1145/3389360>`_.

    Examples
    --------
    >>> import numpy as np
    >>> from roundoff.reductions import binned
    >>> x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    >>> binned(x) == binned(np.sort(x))
    np.True_
    """
    n = x.shape[-1]
    precision = np.finfo(x.dtype).nmant + 1
    # 2^e >= n max|x|; frexp gives max|x| < 2^exponent. One value alone still needs e > exponent.
    largest = np.max(np.abs(x), axis=-1, keepdims=True)
    exponent = np.frexp(largest)[1] + max((n - 1).bit_length(), 1)
    sums, rest = [], x
    with np.errstate(over="ignore", invalid="ignore"):
        for fold in range(folds):
            # What a cut leaves is at most half a last place: 2^(e - precision).
            cut = exponent - fold * (precision - max((n - 1).bit_length(), 1))
            sigma = np.ldexp(x.dtype.type(1.5), cut)
            part = (sigma + rest) - sigma
            rest = rest - part
            sums.append(np.add.reduce(part, axis=-1))
        total = sums.pop()
        while sums:
            total = sums.pop() + total
    return total


def mean(x: Array, dtype: Any) -> Any:
    """Mean over the last axis, added in the type of *x* and rounded once to *dtype*.

    Parameters
    ----------
    x : ndarray of float64 or float32, shape (..., n)
        Values of *dtype*, from :func:`~roundoff.reductions.round_to`; C-contiguous.
    dtype : any
        Type of the result, which is stored in the type of *x*.

    Returns
    -------
    ndarray or scalar, shape (...)

    Examples
    --------
    >>> import numpy as np
    >>> from roundoff.reductions import mean
    >>> mean(np.float32([1, 2, 4]), "float16")
    np.float32(2.3339844)
    """
    with np.errstate(invalid="ignore"):
        return round_to(np.add.reduce(x, axis=-1) / x.shape[-1], dtype)


def moments(x: Array) -> tuple[Any, Any]:
    """Mean and population standard deviation over the last axis, in the type of *x*.

    Two passes, as :func:`numpy.std`: the squares added are those of x − mean.

    Returns
    -------
    tuple of (mean, sd), each of shape (...)

    Examples
    --------
    >>> import numpy as np
    >>> from roundoff.reductions import moments
    >>> moments(np.array([1.0, 3.0]))
    (np.float64(2.0), np.float64(1.0))
    """
    with np.errstate(invalid="ignore", over="ignore"):
        mu = np.add.reduce(x, axis=-1) / x.shape[-1]
        centred = x - mu[..., np.newaxis]
        np.multiply(centred, centred, out=centred)
        return mu, np.sqrt(np.add.reduce(centred, axis=-1) / x.shape[-1])
