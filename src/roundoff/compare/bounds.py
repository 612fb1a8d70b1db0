"""A tolerance that can be defended: what rounding alone can do to a sum of products.

Model: the result is a sum of *terms* products, each product and each addition rounded to the
accumulation type, in any order, and the sum rounded once more to the result's type.

Deterministic. The error of an inner product of n terms is at most n u Σ\\|x_i y_i\\|, whatever the
order and however large n (C.-P. Jeannerod, S. M. Rump, *Improved error bounds for inner products
in floating-point arithmetic*, SIAM Journal on Matrix Analysis and Applications 34, 2013), which
sharpens the classical γ_n = n u / (1 − n u) (N. J. Higham, *Accuracy and Stability of Numerical
Algorithms*, SIAM, 2nd edition 2002, section 3.1).

Probabilistic. Where rounding errors are independent and of mean zero, n can be replaced by about
λ √n: the error is at most (exp(λ √n u + n u² / (1 − u)) − 1) Σ\\|x_i y_i\\| with probability at
least 1 − 2 n exp(−λ² (1 − u)² / 2) (N. J. Higham, T. Mary, *A new approach to probabilistic
rounding error analysis*, SIAM Journal on Scientific Computing 41, 2019, theorem 3.1). It does not
hold where errors have a sign: truncation, as in tensor cores (M. Fasi, N. J. Higham, M. Mikaitis,
S. Pranesh, *Numerical behavior of NVIDIA tensor cores*, PeerJ Computer Science 7, 2021), or the
stagnation of a long sum in a narrow type.

Two steps of precision, narrow products and wide sums, add up as in P. Blanchard, N. J. Higham,
F. Lopez, T. Mary, S. Pranesh, *Mixed precision block fused multiply-add: error analysis and
application to GPU tensor cores*, SIAM Journal on Scientific Computing 42, 2020.
"""

from __future__ import annotations

import math
from typing import Any

from roundoff.dtypes import DType, dtype_info
from roundoff.errors import ArgumentError, DtypeError

#: Relative error of an operand taken as TF32: 11 significant bits, the others dropped rather than
#: rounded where nothing rounded them before.
TF32 = 2.0**-10


def tolerance(
    dtype: Any,
    terms: int,
    accumulate: Any = None,
    condition: float = 1.0,
    confidence: float | None = None,
    operands: Any = None,
) -> float:
    """Largest relative error that rounding can explain in a sum of products.

    Two results that are each within t of the truth are within 2 t of each other: allow that much
    between two implementations. Overflow and underflow are not covered.

    Parameters
    ----------
    dtype : any
        Type of the result, as :func:`roundoff.dtypes.dtype_info` takes it.
    terms : int
        Number of products in a sum: the inner size of a matrix product.
    accumulate : any, optional
        Type of products and sums; by default *dtype*. Matrix products in float16 and bfloat16
        usually accumulate in float32.
    condition : float, default 1
        Σ\\|x_i y_i\\| / \\|Σ x_i y_i\\|: 1 where all terms have one sign, large where they cancel.
        With 1 the tolerance is relative to Σ\\|x_i y_i\\| instead of to the result.
    confidence : float, optional
        Probability, between 0 and 1, with which one sum keeps within the tolerance, under the
        probabilistic model; by default the bound always holds.
    operands : any, optional
        Narrower type that the operands are converted to first: ``"tf32"`` or a floating type. The
        conversions are counted in full, since they are the same for all results.

    Returns
    -------
    float
        A relative tolerance; divided by ``dtype_info(dtype).eps`` it is about as many units in the
        last place.

    Raises
    ------
    ArgumentError
        When *terms* < 1, *condition* < 1, or *confidence* is not between 0 and 1.
    DtypeError
        When a type is not a floating one.

    Examples
    --------
    >>> tolerance("float32", 1024) == 1024 * 2.0**-24
    True
    >>> round(tolerance("float16", 1024, accumulate="float32") / 2.0**-11, 3)
    1.125
    >>> tolerance("float32", 1024, confidence=0.99) < tolerance("float32", 1024) / 4
    True
    """
    result = _float_type(dtype)
    wide = result if accumulate is None else _float_type(accumulate)
    if isinstance(terms, bool) or int(terms) != terms or terms < 1:
        raise ArgumentError("terms must count the products", got=terms, expected="at least 1")
    if not condition >= 1:
        raise ArgumentError("a condition number", got=condition, expected="at least 1")
    if confidence is not None and not 0 < confidence < 1:
        raise ArgumentError(
            "confidence is a probability", got=confidence, expected="a number between 0 and 1",
            hint="leave it out for a bound that always holds",
        )  # fmt: skip
    u = wide.unit_roundoff
    bound = terms * u
    if confidence is not None:
        spread = math.sqrt(2 * math.log(2 * terms / (1 - confidence))) / (1 - u)
        exponent = spread * math.sqrt(terms) * u + terms * u * u / (1 - u)
        bound = min(bound, math.expm1(exponent) if exponent < 700 else math.inf)
    if operands is not None:
        name = str(operands).lower()
        each = TF32 if name in ("tf32", "tensorfloat32") else _float_type(operands).unit_roundoff
        bound = (1 + bound) * (1 + each) ** 2 - 1
    bound *= condition
    if wide.precision > result.precision:  # one more rounding, of the result
        bound = bound + result.unit_roundoff * (1 + bound)
    return bound


def _float_type(dtype: Any) -> DType:
    info = dtype_info(dtype)
    if not info.is_float:
        raise DtypeError("rounding needs a floating type", got=info.name)
    return info
