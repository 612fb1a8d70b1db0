"""Ways to add the values of a vector, each over the last axis of an array; mean and deviation.

Every function takes an array of shape (..., n) with n at least 1 and returns one of shape (...)
in the same type: each addition is rounded to that type. A row of a batch has the bits of the same
vector added alone, so that many orders of one vector are evaluated at once. An array without a last
axis, or with nothing along it, is a :class:`~roundoff.errors.ShapeError`; another type than
float64, float32, float16 or bfloat16 a :class:`~roundoff.errors.DtypeError`; masked values are an
:class:`~roundoff.errors.ArgumentError`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from roundoff.errors import ShapeError

from .data import float_array, round_to, work_dtype
from .truth import exact_sum, round_exact

__all__ = [
    "binned",
    "mean",
    "moments",
    "neumaier",
    "pairwise",
    "sequential",
]

Array = npt.NDArray[Any]


def _values(x: Any) -> Array:
    """The array to add; an error where there is nothing to add, or no type to round to."""
    values = float_array(x)
    if not values.ndim or values.shape[-1] == 0:
        raise ShapeError("nothing to add", got=values.shape, expected="(..., n), n at least 1")
    return values


def sequential(x: Array) -> Array:
    """Left to right into one accumulator: n − 1 additions, each waiting for the one before.

    Examples
    --------
    >>> import numpy as np
    >>> from roundoff.reductions import sequential
    >>> sequential(np.array([1e8, 1.0, 1.0, 1.0, 1.0], np.float32))
    np.float32(1e+08)
    """
    x = _values(x)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.add.accumulate(x, axis=-1)[..., -1][()]


def pairwise(x: Array) -> Array:
    """Neighbours in pairs, then the pairs, down to the leaves: a tree of depth ⌈log2 n⌉.

    Examples
    --------
    >>> import numpy as np
    >>> from roundoff.reductions import pairwise
    >>> pairwise(np.array([1e8, 1.0, 3.0, 3.0], np.float32))
    np.float32(1.0000001e+08)
    """
    x = _values(x)
    with np.errstate(over="ignore", invalid="ignore"):
        while x.shape[-1] > 1:
            even = x.shape[-1] & ~1
            sums = x[..., 0:even:2] + x[..., 1:even:2]
            # An odd one out waits for the next level: the depth does not change.
            x = sums if even == x.shape[-1] else np.concatenate([sums, x[..., even:]], axis=-1)
        return x[..., 0][()]


def neumaier(x: Array) -> Array:
    """Sequential, with the rounding error of each addition kept, and their sum added at the end.

    Neumaier's improvement of Kahan's compensated sum. The error of an addition is itself a
    floating-point number, whichever formula gives it, so that the running sums can be taken
    first and all the errors after them: the bits are those of the loop. The error is as if
    computed in twice the precision, then rounded; the result may still depend on the order. Where
    the plain sum overflows, or a value is not finite, the result is that of the plain sum.

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
    x = _values(x)
    with np.errstate(over="ignore", invalid="ignore"):
        running = np.add.accumulate(x, axis=-1)
        if x.shape[-1] == 1:
            return running[..., -1][()]
        a, b, s = running[..., :-1], x[..., 1:], running[..., 1:]
        part = s - a  # Knuth's TwoSum: a + b = s + error exactly
        kept = sequential((a - (s - part)) + (b - part))
        # The error of an infinite sum is NaN, and says nothing.
        return running[..., -1] + np.where(np.isfinite(kept), kept, x.dtype.type(0))


def binned(x: npt.ArrayLike, *, axis: int | tuple[int, ...] | None = -1) -> Any:
    """The exact sum, rounded once: the same bits in every order, and the nearest number.

    A value goes to the bin of its sign and exponent. Values of one exponent are multiples of one
    unit and below 2**24 units (float64 values are cut in two pieces of 26 and 27 bits), so that
    2**26 of them add up in float64 without rounding. The few bins are added exactly.

    The error is at most half a unit in the last place of the result, at every length and for all
    values.

    Parameters
    ----------
    x : array_like of float64, float32, float16 or bfloat16
        Any shape, length and strides.
    axis : int, tuple of int or None
        What is added, as in :func:`numpy.sum`; by default the last axis.

    Returns
    -------
    ndarray or scalar, of the type of *x*
        Special values are those of IEEE 754. The sum is infinite where the exact one is beyond
        the largest number, or where infinities of one sign are among the values; NaN where both
        signs or a NaN are; −0 where all values are −0, and 0 where there is none.

    Raises
    ------
    DtypeError
        When *x* is no array, or one of another type.
    ArgumentError
        When values of *x* are masked.
    ShapeError
        When *x* lacks the axis.

    See Also
    --------
    roundoff.kernels.binned.sum_binned : the same bits on a GPU

    References
    ----------
    R. M. Neal, *Fast exact summation using small and large superaccumulators*, 2015,
    `arXiv:1505.05571 <https://arxiv.org/abs/1505.05571>`_; with the highest bins alone
    J. Demmel, H. D. Nguyen, *Fast reproducible floating-point summation*, ARITH 2013,
    `doi:10.1109/ARITH.2013.9 <https://doi.org/10.1109/ARITH.2013.9>`_.

    Examples
    --------
    >>> import numpy as np
    >>> from roundoff.reductions import binned
    >>> x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    >>> binned(x) == binned(np.sort(x))
    np.True_
    >>> binned([[1e300, 1.0, -1e300], [1e308, 1e308, -1e308]])
    array([1.e+000, 1.e+308])
    """
    values = float_array(x)
    added = _axes(axis, values.ndim)
    kept = tuple(k for k in range(values.ndim) if k not in added)
    if not kept:
        return _sum_all(values)
    shape = tuple(values.shape[k] for k in kept)
    count, length = math.prod(shape), math.prod(values.shape[k] for k in added)
    rows = values.transpose(kept + added).reshape(count, length)
    sums = np.zeros(count, values.dtype)
    for k in range(count):
        sums[k] = _sum_all(rows[k])
    return sums.reshape(shape)


#: Values that are binned at a time: their places and weights stay in a core's cache.
_CHUNK = 2**16
#: Chunks whose sums of one exponent need no more than float64's 53 bits.
_CHUNKS = 2**26 // _CHUNK
#: Sign, exponent and the first 26 bits of the significand of float64.
_HEAD = np.uint64(2**64 - 2**27)


def _axes(axis: int | tuple[int, ...] | None, ndim: int) -> tuple[int, ...]:
    """The axes to add, counted from the first."""
    if axis is None or ndim == 0:
        return tuple(range(ndim))
    try:
        return np.lib.array_utils.normalize_axis_tuple(axis, ndim)
    except (TypeError, ValueError) as error:
        raise ShapeError(
            "no such axis", got=repr(axis), expected=f"None or an axis of {ndim}, each once"
        ) from error


def _sum_all(values: Array) -> Any:
    """The sum of the values of an array of any shape."""
    bins = _bins(values)
    heads = bins[:: 2 if values.dtype == np.float64 else 1]
    with np.errstate(invalid="ignore"):
        special = heads[..., -1].sum()  # infinities and NaNs, if any
    finite = bins[..., :-1]
    if special != 0:
        total = float(special) if np.isinf(special) else math.nan
    else:
        try:
            total = _add_exactly(finite[finite != 0].tolist(), values.dtype)
        except (OverflowError, ValueError):  # near the largest number, where the sum may be one
            total = round_exact(exact_sum(values.ravel()), values.dtype)
    if total == 0:
        total = -0.0 if values.size and np.signbit(values).all() else 0.0
    return round_to(np.float64(total), values.dtype, storage=True)


def _bins(values: Array) -> Array:
    """The sum of the values of each sign and exponent, in float64 and without rounding.

    Returns
    -------
    ndarray of float64, shape (k, 2, 256), or (k, 2, 2048) for float64
        By sign and exponent. All k are to be added: one of every 2**26 values, and for float64
        another of the tails that were cut off.
    """
    work = work_dtype(values.dtype)
    wide = work == np.float64
    unsigned, digits, size = (np.uint64, 52, 4096) if wide else (np.uint32, 23, 512)
    totals: list[Array] = []
    flags: Any = ["external_loop", "buffered", "zerosize_ok"]
    chunks: Any = np.nditer(values, flags, op_dtypes=[work], order="K", buffersize=_CHUNK)
    with np.errstate(invalid="ignore", over="ignore"):
        for number, chunk in enumerate(chunks):
            if number % _CHUNKS == 0:
                heads, tails = np.zeros((2, size))
                totals += [heads, tails] if wide else [heads]
            place = (chunk.view(unsigned) >> unsigned(digits)).astype(np.intp)
            if wide:
                chunk = chunk + 0.0  # a NaN becomes quiet: else its head may be that of an infinity
                head = (chunk.view(unsigned) & _HEAD).view(work)
                tails += np.bincount(place, chunk - head, size)
                chunk = head
            heads += np.bincount(place, chunk, size)
    return np.reshape(totals, (-1, 2, size // 2))


def _add_exactly(parts: list[float], dtype: np.dtype[Any]) -> float:
    """The sum of a few numbers, such that rounding it to *dtype* rounds their exact sum."""
    total = math.fsum(parts)
    if not math.isfinite(total):
        raise OverflowError
    rest = math.fsum([*parts, -total])
    # A second rounding would not see what the first has left. An odd last bit tells it.
    if dtype != np.float64 and rest and not np.float64(total).view(np.int64) & 1:
        total = math.nextafter(total, math.copysign(math.inf, rest))
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
    x = _values(x)
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
    x = _values(x)
    with np.errstate(invalid="ignore", over="ignore"):
        mu = np.add.reduce(x, axis=-1) / x.shape[-1]
        centred = x - mu[..., np.newaxis]
        np.multiply(centred, centred, out=centred)
        return mu, np.sqrt(np.add.reduce(centred, axis=-1) / x.shape[-1])
