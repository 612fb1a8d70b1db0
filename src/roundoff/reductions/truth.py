"""The exact sum, the condition of a sum, and the errors of computed sums."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from roundoff.dtypes import dtype_info, ulp
from roundoff.errors import ArgumentError, DtypeError, ShapeError

__all__ = [
    "condition",
    "distinct_bits",
    "exact_sum",
    "judge",
    "numpy_depth",
    "round_exact",
    "signed_errors",
]


def exact_sum(x: npt.ArrayLike) -> Fraction:
    """The sum of finite floating-point numbers, as a rational: no rounding anywhere.

    Each value is an integer times a power of two; integers with one exponent are added in
    64 bits, in two halves so that they cannot overflow, and the few results as rationals.

    Parameters
    ----------
    x : array_like, shape (n,)
        Values of float64, of a type whose values are float64 values, or whole numbers; n below
        2**36.

    Raises
    ------
    ShapeError
        When *x* is not a vector.
    ArgumentError
        When a value is infinite or NaN, so that the sum has no exact value, or masked.
    DtypeError
        When the type is another one, such as a complex one.

    Examples
    --------
    >>> from roundoff.reductions import exact_sum
    >>> exact_sum([0.1] * 10) == 1, float(exact_sum([1e300, 1.0, -1e300]))
    (False, 1.0)
    """
    given = np.asarray(x)
    if given.ndim != 1:
        raise ShapeError("one vector at a time", got=given.shape, expected="(n,)")
    if np.ma.is_masked(x):
        raise ArgumentError("masked values", got="a masked array", hint="x.compressed()")
    if given.dtype.kind in "iub":  # float64 does not hold them all
        return Fraction(sum(map(int, given.tolist())))
    if not dtype_info(given.dtype).is_float:
        raise DtypeError("no exact sum", got=str(given.dtype), expected="a floating type")
    values = given.astype(np.float64)
    if not np.isfinite(values).all():
        raise ArgumentError("the sum has no exact value", got="an infinity or a NaN")
    fraction, exponent = np.frexp(values)
    whole = np.ldexp(fraction, 53).astype(np.int64)
    total = Fraction(0)
    for e in np.unique(exponent):
        same = whole[exponent == e]
        integer = (int((same >> 27).sum()) << 27) + int((same & ((1 << 27) - 1)).sum())
        total += Fraction(integer) * Fraction(2) ** (int(e) - 53)
    return total


def round_exact(value: Fraction, dtype: Any) -> float:
    """The number of *dtype* nearest to a rational, ties to even; infinite past the largest.

    Examples
    --------
    >>> from fractions import Fraction
    >>> from roundoff.reductions import round_exact
    >>> round_exact(Fraction(1, 3), "float16"), round_exact(Fraction(65520), "float16")
    (0.333251953125, inf)
    """
    info = dtype_info(dtype)
    if value == 0:
        return 0.0
    # 2**(exponent - 1) <= |value| < 2**exponent + 1: bit lengths give it to within one.
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > abs(value):
        exponent -= 1
    spacing = Fraction(2) ** (max(exponent, info.emin) + 1 - info.precision)
    nearest = round(value / spacing) * spacing  # round() of a rational: ties to even
    if abs(nearest) > info.max:
        return math.inf if value > 0 else -math.inf
    return float(nearest)


def condition(x: npt.ArrayLike) -> float:
    """Condition number of a sum, Σ\\|x\\| / \\|Σx\\|, from exact sums.

    It is 1 when all values have one sign, and grows as they cancel: a relative change of every
    value by at most δ changes the sum by at most κ·δ, relatively. Infinite when the sum is 0.

    Examples
    --------
    >>> from roundoff.reductions import condition
    >>> condition([3.0, 1.0]), condition([1.0, -0.5])
    (1.0, 3.0)
    """
    total = exact_sum(x)
    absolute = exact_sum(np.abs(np.asarray(x).astype(np.float64)))
    return float(absolute / abs(total)) if total else math.inf


def signed_errors(results: npt.ArrayLike, truth: Fraction) -> npt.NDArray[np.float64]:
    """Result − truth for each result, taken exactly and then rounded to float64.

    Returns
    -------
    ndarray of float64, same shape
        ``inf``, ``-inf`` or ``nan`` where the result is.

    Examples
    --------
    >>> from fractions import Fraction
    >>> from roundoff.reductions import signed_errors
    >>> signed_errors([0.25, 0.5], Fraction(1, 3))
    array([-0.08333333,  0.16666667])
    """
    values = np.asarray(results).astype(np.float64)
    error_of: dict[float, float] = {}
    for v in np.unique(values):
        error_of[float(v)] = float(Fraction(float(v)) - truth) if np.isfinite(v) else float(v)
    errors = [error_of.get(v, math.nan) for v in values.ravel().tolist()]
    return np.array(errors, np.float64).reshape(values.shape)


def distinct_bits(results: npt.NDArray[Any]) -> int:
    """How many different bit patterns there are among *results*: −0 is not 0, NaN is itself.

    Examples
    --------
    >>> import numpy as np
    >>> from roundoff.reductions import distinct_bits
    >>> distinct_bits(np.array([0.0, -0.0, 1.0, 1.0], np.float32))
    3
    """
    flat = np.ascontiguousarray(results).ravel()
    return len(np.unique(flat.view(f"u{flat.itemsize}")))


def judge(results: npt.ArrayLike, truth: Fraction, dtype: Any) -> dict[str, float]:
    """Spread and errors of several results for one truth.

    Parameters
    ----------
    results : array_like, shape (k,)
        Of k orders, or of k repeats.
    truth : Fraction
        The exact result.
    dtype : any
        Type of the results; its spacing at *truth* is the unit (ULP).

    Returns
    -------
    dict
        ``distinct``, the number of bit patterns; ``spread ulp``, highest minus lowest;
        ``error ulp``, the largest absolute error; ``median ulp``, its median over the results. The
        last three are ``nan`` when a result is not finite.

    Examples
    --------
    >>> import numpy as np
    >>> from fractions import Fraction
    >>> from roundoff.reductions import judge
    >>> judge(np.array([1.0, 1.25, 1.25]), Fraction(9, 8), np.float16)["spread ulp"] / 256
    1.0
    """
    values = np.asarray(results)
    row: dict[str, float] = {"distinct": distinct_bits(values)}
    if not np.isfinite(values.astype(np.float64)).all():
        return row | dict.fromkeys(("spread ulp", "error ulp", "median ulp"), math.nan)
    unit = float(ulp(float(truth), dtype))
    errors = np.abs(signed_errors(values, truth)) / unit
    spread = float(values.max()) - float(values.min())
    largest, median = float(errors.max()), float(np.median(errors))
    return row | {"spread ulp": spread / unit, "error ulp": largest, "median ulp": median}


def numpy_depth(n: int) -> int:
    """Most additions that a value passes through in NumPy's sum of *n* contiguous values.

    Eight accumulators over at most 128 values, three levels to add the eight, what is left over
    one by one, and a level for each cut above 128.

    Examples
    --------
    >>> from roundoff.reductions import numpy_depth
    >>> [numpy_depth(n) for n in (2, 8, 128, 256, 8192)]
    [1, 3, 18, 19, 24]
    """
    if n < 8:
        return n - 1
    if n <= 128:
        return (n // 8 - 1) + 3 + n % 8
    half = n // 2
    half -= half % 8
    return 1 + max(numpy_depth(half), numpy_depth(n - half))
