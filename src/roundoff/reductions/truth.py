"""The exact sum, the condition of a sum, and the errors of computed sums."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from roundoff.dtypes import dtype_info, ulp
from roundoff.errors import ArgumentError, DtypeError, ShapeError

from .data import plain_array, real_array

__all__ = [
    "condition",
    "distinct_bits",
    "exact_sum",
    "judge",
    "round_exact",
]


def exact_sum(x: npt.ArrayLike) -> Fraction:
    """The sum of finite floating-point numbers, as a rational: no rounding anywhere.

    Each value is an integer times a power of two: of the lowest one all are multiples.

    Parameters
    ----------
    x : array_like, shape (n,)
        Values that float64 holds: whole numbers up to 2**53.

    Raises
    ------
    ShapeError
        When *x* is not a vector.
    ArgumentError
        When a value is infinite or NaN, so that the sum has no exact value, masked, or a whole
        number that float64 does not hold.
    DtypeError
        When the type is another one, such as a complex one.

    Examples
    --------
    >>> from roundoff.reductions import exact_sum
    >>> exact_sum([0.1] * 10) == 1, float(exact_sum([1e300, 1.0, -1e300]))
    (False, 1.0)
    """
    values = real_array(x)
    if values.ndim != 1:
        raise ShapeError("one vector at a time", got=values.shape, expected="(n,)")
    if not np.isfinite(values).all():
        raise ArgumentError("the sum has no exact value", got="an infinity or a NaN")
    fraction, exponent = np.frexp(values)
    lowest = int(exponent.min(initial=0))
    whole = np.ldexp(fraction, 53).astype(np.int64).tolist()
    total = sum(w << e for w, e in zip(whole, (exponent - lowest).tolist(), strict=True))
    return Fraction(total) * Fraction(2) ** (lowest - 53)


def round_exact(value: Fraction, dtype: Any) -> float:
    """The number of *dtype* nearest to a rational, ties to even; infinite past the largest.

    Raises
    ------
    ArgumentError
        When *value* is neither a rational nor a finite float.
    DtypeError
        When *dtype* is no floating type.

    Examples
    --------
    >>> from fractions import Fraction
    >>> from roundoff.reductions import round_exact
    >>> round_exact(Fraction(1, 3), "float16"), round_exact(Fraction(65520), "float16")
    (0.333251953125, inf)
    """
    info = dtype_info(dtype)
    if not info.is_float:
        raise DtypeError("no number to round to", got=info.name, expected="a floating type")
    value = _rational(value)
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


def _rational(value: Any) -> Fraction:
    """An exact value; of a float the one that it has."""
    try:
        return Fraction(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(
            "no exact value",
            got=repr(value)[:80],
            expected="a Fraction, an int or a finite float",
            hint="exact_sum(x)",
        ) from error


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


def distinct_bits(results: npt.NDArray[Any]) -> int:
    """How many different bit patterns there are among *results*: −0 is not 0, NaN is itself.

    Raises
    ------
    DtypeError
        When they are no numbers of 8, 16, 32 or 64 bits.
    ArgumentError
        When results are masked.

    Examples
    --------
    >>> import numpy as np
    >>> from roundoff.reductions import distinct_bits
    >>> distinct_bits(np.array([0.0, -0.0, 1.0, 1.0], np.float32))
    3
    """
    flat = np.ascontiguousarray(plain_array(results)).ravel()
    if flat.dtype.kind in "OSUMm" or flat.itemsize not in (1, 2, 4, 8):
        raise DtypeError(
            "no bits to compare", got=str(flat.dtype), expected="numbers of 8, 16, 32 or 64 bits"
        )
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

    Raises
    ------
    ShapeError
        When there is no result.
    ArgumentError
        When *truth* is no exact value, or results are masked.
    DtypeError
        When *results* are no real numbers of at most 64 bits, or *dtype* is no floating type.

    Examples
    --------
    >>> import numpy as np
    >>> from fractions import Fraction
    >>> from roundoff.reductions import judge
    >>> judge(np.array([1.0, 1.25, 1.25]), Fraction(9, 8), np.float16)["spread ulp"] / 256
    1.0
    """
    real, truth = real_array(results), _rational(truth)
    if not real.size:
        raise ShapeError("no results", got=real.shape, expected="one or more")
    unit = float(ulp(round_exact(truth, np.float64), dtype))
    row: dict[str, float] = {"distinct": distinct_bits(np.asarray(results))}
    if not np.isfinite(real).all():
        return row | dict.fromkeys(("spread ulp", "error ulp", "median ulp"), math.nan)
    # Each is taken exactly, and then rounded.
    errors = [float(abs(Fraction(value) - truth)) / unit for value in real.ravel().tolist()]
    return row | {
        "spread ulp": (float(real.max()) - float(real.min())) / unit,
        "error ulp": max(errors),
        "median ulp": float(np.median(errors)),
    }
