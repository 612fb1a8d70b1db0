"""Counting in units in the last place, by bits where possible and by arithmetic otherwise.

The distance of two numbers of one format is the number of steps from one to the other along the
numbers of the format, as in R. Goldberg, *What every computer scientist should know about
floating-point arithmetic*, ACM Computing Surveys 23 (1991); -0 and +0 are one number. The error
of x against a truth t is \\|x - t\\| / ulp(t), with Muller's ulp (:func:`roundoff.dtypes.ulp`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from roundoff.describe import as_tensor
from roundoff.dtypes import DType
from roundoff.errors import DtypeError, ShapeError

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]

#: Largest uint64: the distance between a NaN or an infinity and anything else.
FAR = np.uint64(2**64 - 1)


def ordered(bits: Array) -> Array:
    """Signed integers in the order of the floats that have these bits; both zeros give 0.

    Parameters
    ----------
    bits : array of int8, int16, int32 or int64
        The bits of floats with a sign, an exponent and a significand.
    """
    width = bits.dtype.itemsize * 8
    sign = bits >> (width - 1)  # 0 or -1
    size = bits & np.iinfo(bits.dtype).max
    np.bitwise_xor(size, sign, out=size)
    return np.subtract(size, sign, out=size)


def bit_distance(a: torch.Tensor, b: torch.Tensor) -> Array:
    """Distance of floats of one type, element by element, as unsigned integers of its width."""
    import torch

    as_int = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    x, y = ordered(a.view(as_int).numpy()), ordered(b.view(as_int).numpy())
    # Both lie in +-(2**(w - 1) - 1): their distance fits in w bits once read as unsigned.
    low = np.minimum(x, y)
    np.maximum(x, y, out=x)
    return np.subtract(x, low, out=x).view(f"u{x.dtype.itemsize}")


def _exponent(x: Array, info: DType) -> Array:
    """Exponent of the binade of float64 *x* in a format, kept within what the format has."""
    biased = (np.ascontiguousarray(x).view(np.int64) >> 52) & 0x7FF
    return np.clip(biased - 1023, info.emin, info.emax)


def _power(exponent: Array) -> Array:
    """2**exponent as float64, for exponents of normal numbers."""
    return ((exponent + 1023) << 52).view(np.float64)


def scaled_by_ulp(size: Array, at: Array, info: DType) -> Array:
    """*size* in units in the last place of a format at *at*; exact unless it overflows.

    Both are float64; NaN in *at* gives the unit of the last binade.
    """
    if info.name == "float64":  # its smallest unit has no finite inverse
        exponent = _exponent(at, info)
        return np.ldexp(size, -(exponent + 1 - info.precision))
    return size * _power(info.precision - 1 - _exponent(at, info))


def position(x: Array, info: DType) -> Array:
    """Place of float64 *x*, rounded to nearest even, on the ladder of a narrower format.

    0 is at 0 and the next larger number at 1. Past the largest number a format with infinities
    gives an infinity, one without its last place. NaN stays NaN.
    """
    exponent = _exponent(x, info)
    steps = np.rint(np.abs(x) * _power(info.precision - 1 - exponent))
    place = steps + (exponent - info.emin) * 2.0 ** (info.precision - 1)
    last = _last_place(info)
    beyond = np.inf if _has_infinity(info) else last
    place = np.where(place > last, beyond, place)
    return np.where(np.isnan(x), np.nan, np.copysign(place, x))


def _last_place(info: DType) -> float:
    steps = math.ldexp(info.max, info.precision - 1 - info.emax)
    return steps + (info.emax - info.emin) * 2.0 ** (info.precision - 1)


def _has_infinity(info: DType) -> bool:
    return info.name in ("float64", "float32", "float16", "bfloat16", "float8_e5m2")


def ulp_distance(a: Any, b: Any) -> Array:
    """Steps between two tensors, element by element, in the coarser of their types.

    Parameters
    ----------
    a, b : tensor, array or number
        Of one shape. The wider type is first rounded to the other (to nearest, ties to even).

    Returns
    -------
    array of uint64
        0 for equal numbers, -0 and +0, and two NaNs; 1 for neighbours; ``2**64 - 1`` where one is
        NaN or infinite and the other is not the same. Symmetric in its arguments.

    Raises
    ------
    DtypeError
        When neither type is a floating one.
    ShapeError
        When the shapes differ.

    Examples
    --------
    >>> import numpy as np
    >>> one = np.float32(1)
    >>> int(ulp_distance(one, np.nextafter(one, np.float32(2)))), int(ulp_distance(-0.0, 0.0))
    (1, 0)
    """
    x, y = as_tensor(a), as_tensor(b)
    if x is None or y is None or not (x.info.is_float or y.info.is_float):
        found = [type(v).__name__ if h is None else h.info.name for v, h in ((a, x), (b, y))]
        raise DtypeError(
            "no units in the last place", got=", ".join(found), expected="a floating type"
        )
    if x.tensor.shape != y.tensor.shape:
        raise ShapeError(
            "shapes differ", got=f"{tuple(x.tensor.shape)} and {tuple(y.tensor.shape)}"
        )
    infos = [h.info for h in (x, y) if h.info.is_float]
    coarse = min(infos, key=lambda i: (i.precision, i.max, i.name))
    shape = tuple(x.tensor.shape)
    import torch

    wide = [h.tensor.reshape(-1).cpu().to(torch.float64).numpy() for h in (x, y)]
    with np.errstate(all="ignore"):
        if coarse.name == "float64":
            found64 = bit_distance(*(torch.from_numpy(np.ascontiguousarray(w)) for w in wide))
            apart = ~(np.isfinite(wide[0]) & np.isfinite(wide[1]))
            found64 = np.where(apart, FAR, found64)
        else:
            places = [position(w, coarse) for w in wide]
            far = np.abs(places[0] - places[1])
            apart = ~np.isfinite(far)
            found64 = np.where(apart, FAR, np.where(apart, 0, far).astype(np.uint64))
            wide = [np.where(np.isinf(p), p, w) for p, w in zip(places, wide, strict=True)]
        equal = (wide[0] == wide[1]) | (np.isnan(wide[0]) & np.isnan(wide[1]))
    return np.where(apart & equal, np.uint64(0), found64).reshape(shape)
