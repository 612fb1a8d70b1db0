"""The bits of tensors: a short name for them, and steps from one number to another.

The distance of two numbers of one format is the number of steps from one to the other along the
numbers of the format, as in D. Goldberg, *What every computer scientist should know about
floating-point arithmetic*, ACM Computing Surveys 23 (1991); -0 and +0 are one number. It is counted
by bits where both are of the format, and by arithmetic otherwise.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import torch

from roundoff.dtypes import DType, dtype_info
from roundoff.errors import ArgumentError, DtypeError

from .pieces import same_shape, typed_tensor

Array = np.ndarray[Any, np.dtype[Any]]

#: Largest uint64: the distance between a NaN or an infinity and anything else.
FAR = np.uint64(2**64 - 1)


def digest(tensor: torch.Tensor) -> str:
    """Eight hexadecimal digits that say whether two tensors have the same bits.

    Of the values in their order by rows, wherever they are and however they are laid out; not of
    shape and type. Zeros of both signs differ, and so do NaN of other bits. Two tensors that differ
    get the same digits with a probability of 2⁻³².

    Parameters
    ----------
    tensor : torch.Tensor
        Any type, shape, strides and device.

    Returns
    -------
    str
        The first digits of the SHA-256 of its bytes.

    Raises
    ------
    ArgumentError
        It is no torch tensor, or not of one shape in memory.

    Examples
    --------
    >>> import torch
    >>> from roundoff.compare import digest
    >>> x = torch.arange(6.0).view(2, 3)
    >>> digest(x) == digest(x.T.contiguous().T), digest(x) == digest(x + 1e-6)
    (True, False)
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError("no bits", got=type(tensor).__name__, expected="a torch.Tensor")
    flat = typed_tensor(tensor, "the tensor").tensor.reshape(-1).contiguous().cpu()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


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
        When an argument is no tensor, or lacks some of its numbers.
    ShapeError
        When the shapes differ.

    Examples
    --------
    >>> import numpy as np
    >>> one = np.float32(1)
    >>> int(ulp_distance(one, np.nextafter(one, np.float32(2)))), int(ulp_distance(-0.0, 0.0))
    (1, 0)
    """
    x, y = typed_tensor(a, "a"), typed_tensor(b, "b")
    infos = [t.info for t in (x, y) if t.info.is_float]
    if not infos or "complex" in (x.info.kind, y.info.kind):
        raise DtypeError(
            "no units in the last place",
            got=f"{x.info.name}, {y.info.name}",
            expected="a floating type",
        )
    same_shape(x.tensor, y.tensor)
    one, other = (t.tensor.reshape(-1).cpu() for t in (x, y))
    steps = steps_apart(one, other, coarser(*infos))
    return steps.reshape(tuple(x.tensor.shape)).astype(np.uint64, copy=False)


def coarser(*infos: DType) -> DType:
    """The floating type whose units are counted."""
    return min(infos, key=lambda i: (i.precision, i.max, i.name))


def steps_apart(x: torch.Tensor, y: torch.Tensor, info: DType, finite: bool = False) -> Array:
    """As :func:`ulp_distance`, of flat tensors on the CPU, in units of the format.

    *finite* says that all are known to be numbers, which saves half of the time.
    """
    if info.precision == 53:  # no arithmetic in float64 counts its numbers
        x, y = x.to(torch.float64), y.to(torch.float64)
    if info.bits >= 16 and info == dtype_info(x.dtype) == dtype_info(y.dtype):
        width = x.element_size()
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
        rungs = [_ladder(w.view(bits)) for w in (x, y)]
        steps = (torch.maximum(*rungs) - torch.minimum(*rungs)).numpy().view(f"u{width}")
        if finite:
            return steps
        apart = ~(x.isfinite() & y.isfinite())
    else:
        x, y = (_place(w.to(torch.float64), info) for w in (x, y))
        far = (x - y).abs_()
        apart = ~far.isfinite()
        steps = far.masked_fill_(apart, 0.0).to(torch.int64).numpy().view(np.uint64)
    if bool(apart.any()):
        equal = (x == y) | (x.isnan() & y.isnan())
        steps = steps.astype(np.uint64)
        steps[apart.numpy()] = np.where(equal[apart].numpy(), np.uint64(0), FAR)
    return steps


def _ladder(bits: torch.Tensor) -> torch.Tensor:
    """Signed integers in the order of the floats that have these bits; both zeros give 0."""
    info = torch.iinfo(bits.dtype)
    sign = bits >> (info.bits - 1)  # 0 or -1
    return ((bits & info.max) ^ sign) - sign


def _place(x: torch.Tensor, info: DType) -> torch.Tensor:
    """Place of float64 *x*, rounded to nearest even, among the numbers of a narrower format.

    0 is at 0 and the next larger number at 1. Past the largest number a format with infinities
    gives an infinity, one without its last place. NaN stays NaN.
    """
    binade = 2.0 ** (info.precision - 1)  # numbers in one
    exponent = (((x.view(torch.int64) >> 52) & 0x7FF) - 1023).clamp_(info.emin, info.emax)
    power = ((info.precision - 1 - exponent + 1023) << 52).view(torch.float64)
    steps = power.mul_(x.abs()).round_() + (exponent - info.emin) * binade
    last = math.ldexp(info.max, info.precision - 1 - info.emax) + (info.emax - info.emin) * binade
    has_infinity = info.bits >= 16 or info.name == "float8_e5m2"
    steps.masked_fill_(steps > last, math.inf if has_infinity else last)
    return steps.copysign_(x).masked_fill_(x.isnan(), math.nan)
