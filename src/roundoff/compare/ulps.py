"""Counting in units in the last place, by bits where possible and by arithmetic otherwise.

The distance of two numbers of one format is the number of steps from one to the other along the
numbers of the format, as in R. Goldberg, *What every computer scientist should know about
floating-point arithmetic*, ACM Computing Surveys 23 (1991); -0 and +0 are one number.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from roundoff.describe import as_tensor
from roundoff.dtypes import DType, dtype_info
from roundoff.errors import DtypeError, ShapeError

from .pieces import typed_tensor

Array = np.ndarray[Any, np.dtype[Any]]

#: Largest uint64: the distance between a NaN or an infinity and anything else.
FAR = np.uint64(2**64 - 1)


def ladder(bits: torch.Tensor) -> torch.Tensor:
    """Signed integers in the order of the floats that have these bits; both zeros give 0.

    The bits are of a signed integer type, and those of floats with a sign, an exponent and a
    significand.
    """
    info = torch.iinfo(bits.dtype)
    sign = bits >> (info.bits - 1)  # 0 or -1
    return ((bits & info.max) ^ sign) - sign


def _exponent(x: torch.Tensor, info: DType) -> torch.Tensor:
    """Exponent of the binade of float64 *x* in a format, kept within what the format has."""
    biased = (x.view(torch.int64) >> 52).bitwise_and_(0x7FF)
    return biased.sub_(1023).clamp_(info.emin, info.emax)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent as float64, for exponents of normal numbers."""
    return ((exponent + 1023) << 52).view(torch.float64)


def place(x: torch.Tensor, info: DType) -> torch.Tensor:
    """Place of float64 *x*, rounded to nearest even, on the ladder of a narrower format.

    0 is at 0 and the next larger number at 1. Past the largest number a format with infinities
    gives an infinity, one without its last place. NaN stays NaN.
    """
    exponent = _exponent(x, info)
    steps = _power(info.precision - 1 - exponent).mul_(x.abs()).round_()
    steps += exponent.sub_(info.emin) * 2.0 ** (info.precision - 1)
    last = last_place(info)
    steps.masked_fill_(steps > last, math.inf if _has_infinity(info) else last)
    return steps.copysign_(x).masked_fill_(x.isnan(), math.nan)


def last_place(info: DType) -> float:
    """Place of the largest finite number of a format, see :func:`place`."""
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
        When neither type is a floating one, or one is complex.
    ArgumentError
        When a tensor has a mask or no data.
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
    kinds = [h.info.kind for h in (x, y) if h is not None]
    if x is None or y is None or "complex" in kinds or "float" not in kinds:
        names = [type(v).__name__ if h is None else h.info.name for v, h in ((a, x), (b, y))]
        raise DtypeError(
            "no units in the last place", got=", ".join(names), expected="a floating type"
        )
    x, y = typed_tensor(a, "a"), typed_tensor(b, "b")
    if x.tensor.shape != y.tensor.shape:
        raise ShapeError(
            "shapes differ", got=f"{tuple(x.tensor.shape)} and {tuple(y.tensor.shape)}"
        )
    infos = [h.info for h in (x, y) if h.info.is_float]
    coarse = min(infos, key=lambda i: (i.precision, i.max, i.name))
    wide = [h.tensor.reshape(-1).cpu().to(torch.float64) for h in (x, y)]
    steps = steps_apart(wide[0], wide[1], coarse)
    return steps.reshape(tuple(x.tensor.shape)).astype(np.uint64, copy=False)


def steps_apart(x: torch.Tensor, y: torch.Tensor, info: DType, finite: bool = False) -> Array:
    """As :func:`ulp_distance`, of flat tensors: both in the format, 16 bits or more, or in float64.

    In the format they are compared by bits, which is four times as fast; *finite* says that all are
    known to be numbers.
    """
    if dtype_info(x.dtype) == info:
        width = x.element_size()
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
        rungs = [ladder(w.view(bits)) for w in (x, y)]
        steps = (torch.maximum(*rungs) - torch.minimum(*rungs)).numpy().view(f"u{width}")
        if finite:
            return steps
        apart = ~(x.isfinite() & y.isfinite())
    else:
        x, y = place(x, info), place(y, info)
        far = (x - y).abs_()
        apart = ~far.isfinite()
        steps = far.masked_fill_(apart, 0.0).to(torch.int64).numpy().view(np.uint64)
    if bool(apart.any()):
        equal = (x == y) | (x.isnan() & y.isnan())
        steps = steps.astype(np.uint64)
        steps[apart.numpy()] = np.where(equal[apart].numpy(), np.uint64(0), FAR)
    return steps
