"""The error of a tensor in one unit that is smooth in the size of the truth.

The unit is eps(type) × the root mean square of the truth. An ULP of the root mean square would
double each time that crosses a power of two, so that the same relative error would look half as
large just above one as just below. Where single numbers are the subject, count ULPs instead
(:func:`roundoff.compare.ulp_distance`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from roundoff.describe import TypedTensor, tree_leaves
from roundoff.dtypes import DType, dtype_info
from roundoff.errors import ArgumentError, DtypeError, ShapeError

from .pieces import aligned, float64_pieces, same_shape, typed_tensor


class ScaledError(NamedTuple):
    """The error of a tensor, or of several, over eps(type) × root mean square of the truth.

    Attributes
    ----------
    largest : float
        Error of the element that is furthest from the truth; infinite where got is not finite.
    rms : float
        Root mean square of the errors.
    mean : float
        Mean of got − truth, with its sign; ``nan`` where got is not finite.
    abs : float
        Largest absolute error, in the units of the data.

    Examples
    --------
    >>> ScaledError(largest=1.5, rms=0.25, mean=-0.125, abs=0.001).mean
    -0.125
    """

    largest: float
    rms: float
    mean: float
    abs: float


def scaled_error(truth: Any, got: Any, dtype: Any = None) -> ScaledError:
    """Error of a tensor over eps(type of got) × the root mean square of the truth.

    Multiplying truth and got by one factor changes nothing. A correctly rounded result has
    ``largest`` ≤ 0.5 × max\\|truth\\| / rms(truth).

    Parameters
    ----------
    truth : tensor, array, or pytree of these
        What got should have been, of any shape and in a wider floating type than that of the unit:
        float64, as a rule. All its values are finite.
    got : tensor, array, or pytree of these
        Of the same shape, in a floating type. It is compared on the device of the truth, a piece
        at a time. Dicts are paired by key, lists and tuples by position.
    dtype : any, optional
        Type whose eps is the unit, as :func:`roundoff.dtypes.dtype_info` takes it; by default that
        of got. It serves results of a narrow model that are stored in a wider type.

    Returns
    -------
    ScaledError
        Several tensors (the leaves of a pytree) are each measured in a unit of their own;
        ``largest`` and ``abs`` are then the largest of all, ``rms`` and ``mean`` are taken over all
        elements. Zero for tensors without elements.
        A truth of zeros has no size: any error is infinite there.

    Raises
    ------
    ShapeError
        When the shapes, or the numbers of tensors, differ.
    DtypeError
        When a type is not a real floating one, or the truth's is not wider than the unit's.
    ArgumentError
        When there is no tensor, one has a mask or no data, two dicts have different keys, or the
        truth is not finite.

    Examples
    --------
    >>> import numpy as np
    >>> truth = np.array([1.0, -1.0, 1.0, 1.0])
    >>> got = np.float32(truth)
    >>> got[1] -= 2.0**-21
    >>> scaled_error(truth, got)
    ScaledError(largest=4.0, rms=2.0, mean=-1.0, abs=4.76837158203125e-07)
    >>> scaled_error(1024 * truth, 1024 * got).largest
    4.0
    """
    truths, results = _tensors(truth, "truth"), _tensors(aligned(truth, got), "got")
    if len(truths) != len(results):
        raise ShapeError("numbers of tensors differ", got=f"{len(truths)} and {len(results)}")
    override = None if dtype is None else real_type(dtype)
    errors = [
        (_one(t, g, override or g.info), t.tensor.numel())
        for t, g in zip(truths, results, strict=True)
    ]
    elements = max(sum(n for _, n in errors), 1)
    most = max(e.rms for e, _ in errors)
    # Squares of the parts that the largest RMS has of each: they do not overflow.
    parts = [n * (e.rms / most) ** 2 for e, n in errors] if 0 < most < math.inf else [elements]
    return ScaledError(
        largest=max(e.largest for e, _ in errors),
        rms=most * math.sqrt(math.fsum(parts) / elements),
        mean=sum(n * e.mean for e, n in errors) / elements,
        abs=max(e.abs for e, _ in errors),
    )


def _tensors(tree: Any, name: str) -> list[TypedTensor]:
    tensors = [typed_tensor(leaf, f"a part of the {name}") for leaf in tree_leaves(tree)]
    if not tensors:
        raise ArgumentError(f"{name} holds no tensor", expected="at least one")
    for tensor in tensors:
        real_type(tensor.info)
    return tensors


def real_type(dtype: Any) -> DType:
    """The floating type of this name; a DtypeError for every other type."""
    info = dtype_info(dtype)
    if not info.is_float:
        raise DtypeError("rounding needs a floating type", got=info.name)
    return info


def _one(truth: TypedTensor, got: TypedTensor, unit: DType) -> ScaledError:
    same_shape(truth.tensor, got.tensor)
    if truth.info.precision <= unit.precision:
        raise DtypeError(
            "the truth has no wider type than the unit",
            got=f"{truth.info.name} and {unit.name}",
            expected="a truth in float64",
            hint="compute it in float64; converting a result afterwards makes no truth of it",
        )
    n = truth.tensor.numel()
    if n == 0:
        return ScaledError(0.0, 0.0, 0.0, 0.0)
    # Truth and error are each measured in a power of two near their largest: it rounds nothing,
    # and no square leaves float64, however far apart the two are.
    tops = [
        torch.stack([t.abs().amax(), g.sub_(t).abs_().amax()]).tolist()
        for t, g in float64_pieces(truth.tensor, got.tensor)
    ]
    top, far = torch.tensor(tops, dtype=torch.float64).amax(0).tolist()  # NaN where there is one
    if not math.isfinite(top):
        raise ArgumentError("the truth must be finite", got=top)
    if not math.isfinite(far):
        return ScaledError(math.inf, math.inf, math.nan, math.inf)
    shift, error_shift = _shift(top), _shift(far)
    rows = []
    for t, g in float64_pieces(truth.tensor, got.tensor):
        g.sub_(t).mul_(2.0**error_shift)
        t.mul_(2.0**shift)
        row = [t.mul_(t).sum(), g.sum(), g.mul_(g).sum()]
        rows.append(torch.stack(row).tolist())  # one wait for a GPU
    size, total, squares = (math.fsum(column) for column in zip(*rows, strict=True))
    one = unit.eps * math.sqrt(size / n)
    power = shift - error_shift
    return ScaledError(
        largest=_over(math.ldexp(far, error_shift), one, power),
        rms=_over(math.sqrt(squares / n), one, power),
        mean=_over(total / n, one, power),
        abs=far,
    )


def _shift(top: float) -> int:
    """Exponent of the power of two that brings *top* near 1, within what float64 has."""
    return min(max(-math.frexp(top)[1], -1000), 1000) if top else 0


def _over(error: float, unit: float, power: int) -> float:
    """error / unit × 2**power; infinite where float64 does not hold it, or without a unit."""
    with np.errstate(divide="ignore", over="ignore"):
        return float(np.ldexp(np.divide(error, unit), power)) if error else 0.0
