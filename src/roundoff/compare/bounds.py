"""A tolerance that can be defended: what rounding alone can do to a sum of products.

The result is a sum of n products x_i w_i, added in any order, and rounded once more where its type
is narrower than that of the sum. u is the unit roundoff of the accumulation type, half its eps, and
S = Σ\\|x_i w_i\\|.

Rounding to nearest. Products and additions are each rounded to the accumulation type; a fused
multiply-add is covered, too. The error is at most n u S, whatever the order and however large n
(C.-P. Jeannerod, S. M. Rump, *Improved error bounds for inner products in floating-point
arithmetic*, SIAM Journal on Matrix Analysis and Applications 34, 2013), which sharpens the
classical γ_n = n u / (1 − n u) (N. J. Higham, *Accuracy and Stability of Numerical Algorithms*,
SIAM, 2nd edition 2002, section 3.1).

Truncation, as in tensor cores. A step adds a block of products and the accumulator at once: all
addends are aligned to the largest of them, cut to p bits, added without error, and the sum is cut
to the accumulation type (M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, *Numerical behavior of
NVIDIA tensor cores*, PeerJ Computer Science 7, 2021; the error analysis of such a step rounded to
nearest is in P. Blanchard, N. J. Higham, F. Lopez, T. Mary, S. Pranesh, *Mixed precision block
fused multiply-add*, SIAM Journal on Scientific Computing 42, 2020). Then the error is at most
2 n u S, for every size of block, every order of the steps, and any number of partial sums that are
added in the same way. It is assumed that

- a step keeps at least as many bits as the accumulation type has: 24 with float32, which is what
  a V100 keeps of 16-bit operands (an A100 25, an H100 26; F. A. Khattak, M. Mikaitis, *Accurate
  models of NVIDIA tensor cores*, 2025). Hopper's products of 8-bit operands keep 14 and are
  **not** covered;
- products are exact in that many bits: those of two 11-bit significands (float16, TF32) take 22,
  of two 8-bit ones (bfloat16) 16;
- partial sums, where there are several, are added by truncation or rounded to nearest, in which
  case 2 n u is at most 1;
- nothing overflows or underflows, and the final conversion to a narrower type is to nearest.

Derivation. Let a step add k numbers that are not zero, 2^E ≤ M < 2^(E+1) for the largest magnitude
M, and q = 2^E 2u be its last place, at most 2u M. The largest fits and loses nothing; the
k − 1 others lose less than q each. The sum s of what is left is a multiple of q. If \\|s\\| is
below 2^(E+1) it fits: the step has lost at most (k − 1) q ≤ (k − 1) 2u M. If \\|s\\| is in
[2^(E+j), 2^(E+j+1)) with j ≥ 1, it loses at most (2^j − 1) q more, and q ≤ 2u \\|s\\| / 2^j, so
that the step has lost at most (k − 1 + 2^j − 1) 2u \\|s\\| / 2^j ≤ (k − 1) 2u \\|s\\| for k ≥ 2.
With more bits, q of the first loss is smaller and the same holds. Cutting enlarges no magnitude,
so M and \\|s\\| are at most the sum of the magnitudes of all products that they contain, and
that is at most S. The steps form a tree with n leaves, in which the k − 1 add up to n − 1: the
error is at most 2 (n − 1) u S. The one that is left over pays for a bias that is added to the sum
before it is rounded to the result's type; S then contains it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from roundoff.arguments import check_choice, check_number, check_whole
from roundoff.errors import ArgumentError

from .pieces import float64_pieces, same_shape, typed_tensor
from .scaled import real_type

#: Largest relative error of an operand taken as TF32, 11 significant bits: a library may round the
#: others away (2**-11) or, where nothing rounded them before, the hardware drops them (2**-10).
TF32 = 2.0**-10


def tolerance(
    dtype: Any,
    terms: int,
    accumulate: Any = None,
    operands: Any = None,
    *,
    rounding: str = "nearest",
) -> float:
    """Largest error that rounding can explain in a sum of products x_i w_i, over Σ\\|x_i w_i\\|.

    Use it so, element by element: where two results A and B of X W + bias are each within t of
    the truth, they are within 2 t (\\|X\\| \\|W\\| + \\|bias\\|) of each other, \\|X\\| \\|W\\|
    being the product of the magnitudes; :func:`~roundoff.compare.tolerance_used` measures it.

    A tolerance relative to the result itself is Σ\\|x_i w_i\\| / \\|Σ x_i w_i\\| times as large.
    With weights of both signs that has no upper limit (for 1152 normal terms its median is 33, and
    5e8 was seen), so that a bound for all elements says nothing.

    Parameters
    ----------
    dtype : any
        Type of the result, as :func:`roundoff.dtypes.dtype_info` takes it.
    terms : int
        Number of products in a sum: the inner size of a matrix product.
    accumulate : any, optional
        Type of products and sums; by default *dtype*. Matrix products in float16 and bfloat16
        usually accumulate in float32.
    operands : any, optional
        Narrower type that the operands are converted to first: ``"tf32"`` or a floating type. The
        conversions are counted in full, since they are the same for all results. TF32 may be
        rounded or cut: the larger error, 2**-10, is taken; every other type is rounded to nearest.
    rounding : {"nearest", "truncation"}
        How sums are rounded: truncation for tensor cores, whose products are exact but whose
        accumulation cuts. The bound is then 2u for each term, in blocks of any size; the
        assumptions are listed in the module's docstring.

    Returns
    -------
    float
        A tolerance without a unit; divided by ``dtype_info(dtype).eps`` it is about as many units
        in the last place. It is at least half a unit of *dtype*, what rounding the result costs, so
        that two results may be a unit apart. It bounds this sum alone: not the error that its
        operands already have, and neither overflow nor underflow.

    Raises
    ------
    ArgumentError
        When *terms* is less than 1, or *rounding* is unknown.
    DtypeError
        When a type is not a floating one.

    Examples
    --------
    >>> tolerance("float32", 1024) == 1024 * 2.0**-24
    True
    >>> round(tolerance("float16", 1024, accumulate="float32") / 2.0**-11, 3)
    1.125
    >>> tolerance("float32", 1024, rounding="truncation") / tolerance("float32", 1024)
    2.0
    """
    result = real_type(dtype)
    wide = result if accumulate is None else real_type(accumulate)
    check_whole("terms", terms, 1, 2**63 - 1)
    check_choice("rounding", rounding, ("nearest", "truncation"))
    bound = terms * wide.unit_roundoff * (2 if rounding == "truncation" else 1)
    if operands is not None:
        name = str(operands).lower()
        each = TF32 if name in ("tf32", "tensorfloat32") else real_type(operands).unit_roundoff
        bound += each * (2 + each) * (1 + bound)  # as a product it loses what float64 rounds
    if wide.precision > result.precision:  # one more rounding, of the result
        bound = bound + result.unit_roundoff * (1 + bound)
    return bound


def tolerance_used(a: Any, b: Any, size: Any, tol: float) -> float:
    """Largest \\|a − b\\| / (2 tol size): 1 is the limit for two results of one computation.

    Parameters
    ----------
    a, b : tensor or array
        Two results, of one shape, in any floating types.
    size : tensor or array
        For each element what the tolerance is relative to, of the same shape:
        Σ\\|x_i w_i\\| + \\|bias\\|, the product of the magnitudes of the operands. 0 or more.
    tol : float
        What each result may be from the truth, over *size*, as from
        :func:`~roundoff.compare.tolerance`; more than 0.

    Returns
    -------
    float
        Computed in float64 on the device of *a*, a piece at a time. Infinite where the two differ
        and *size* is 0, or where one of them is not finite; 0 for tensors without elements. Where
        2 tol size is less than the smallest number of the coarser type, that is the limit: results
        that underflow are multiples of it.

    Raises
    ------
    ArgumentError
        When *tol* is not above 0, a size is negative, NaN or infinite, or an argument is not a
        tensor.
    DtypeError
        When a type is not a floating one.
    ShapeError
        When the shapes differ.

    Examples
    --------
    >>> import numpy as np
    >>> x, w = np.float32([[3.0, -1.0]]), np.float32([[1.0], [2.0]])
    >>> a, size = x @ w, np.abs(x) @ np.abs(w)
    >>> tol = tolerance("float32", 2)
    >>> tolerance_used(a, a + np.float32(2.0**-23), size, tol)
    0.1
    """
    check_number("tol", tol, above=0, finite=False)
    typed = [typed_tensor(value, n) for n, value in (("a", a), ("b", b), ("size", size))]
    infos = [real_type(t.info) for t in typed]
    spacing = max(info.tiny * info.eps for info in infos[:2])
    same_shape(*(t.tensor for t in typed))
    most = 0.0
    for one, other, limit in float64_pieces(*(t.tensor for t in typed)):
        least, largest = (float(end) for end in limit.aminmax())  # NaN where there is one
        if not 0 <= least <= largest < math.inf:
            raise ArgumentError(
                "size is a sum of magnitudes",
                got=f"{least} to {largest}",
                expected="finite numbers, at least 0",
                hint="compute size in float64 from widened operands",
            )
        apart = (one - other).abs_()
        # Of a limit beyond the largest number that number is the limit: no error passes unseen.
        wide = (limit * (2 * tol)).clamp_(spacing, torch.finfo(torch.float64).max)
        used = (apart / wide.masked_fill_(limit == 0, 0.0)).masked_fill_(apart == 0, 0.0)
        most = max(most, float(torch.nan_to_num_(used, nan=math.inf, posinf=math.inf).amax()))
    return most
