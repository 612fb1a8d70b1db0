"""A matrix product as tensor cores compute it: exact products, added in blocks, truncated.

A tensor core adds a block of products to its accumulator in one step. All of them are aligned to
the largest, what falls below a fixed number of bits is cut off, not rounded, and the sum is cut to
float32. Each cut is towards zero. Where all products have one sign, all errors have the other sign
and accumulate; errors of rounding to nearest mostly cancel.

Source: M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, *Numerical behavior of NVIDIA tensor
cores*, PeerJ Computer Science 7, 2021,
`doi:10.7717/peerj-cs.330 <https://doi.org/10.7717/peerj-cs.330>`_, who measured the V100, the T4
and the A100; F. A. Khattak, M. Mikaitis, *Accurate models of NVIDIA tensor cores*, 2025,
`arXiv:2512.07004 <https://arxiv.org/abs/2512.07004>`_, for later ones.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from roundoff.describe import TypedTensor, as_tensor
from roundoff.dtypes import dtype_info
from roundoff.errors import ArgumentError, DtypeError, ShapeError

from .algorithms import two_sum

if TYPE_CHECKING:
    import torch

#: Precision, exponent of the smallest normal number, and largest number of the operands' types.
_TF32 = (11, -126, (2 - 2.0**-10) * 2.0**127)
#: Types that operands may be rounded to.
OPERANDS = ("tf32", "float16", "bfloat16")
#: Products of a piece: its arrays of float64 stay in a cache.
_PRODUCTS = 1 << 17
#: Exponent of the smallest positive float32.
_SMALLEST = -149


def tensor_core_matmul(
    a: Any,
    b: Any,
    *,
    operands: str | None = "tf32",
    convert: str = "nearest",
    accumulate: str = "truncate",
    block: int = 8,
    bits: int = 24,
) -> Any:
    """Matrix product a b, accumulated in float32 by blocks of products, as by a tensor core.

    The accumulator starts at zero and takes the products in order, *block* at a time. Each step
    aligns the products and the accumulator to the largest of them, cuts what is below *bits*
    significant bits of that one, adds without error, and cuts the sum to the 24 bits of float32.

    ======  ===================  ==================  ====
    GPU     block, 16-bit types  block, TF32         bits
    ======  ===================  ==================  ====
    V100    4                    (no TF32)           24
    A100    8                    4                   25
    H100    16                   8                   26
    ======  ===================  ==================  ====

    This is a model of size and sign, not of every bit: hardware aligns to the exponents of products
    before they are normalised, and a library may split the inner dimension. With 16-bit operands
    and the last row of the table, 99.4 % or more of the elements of products of positive random
    matrices, and 92 % or more with both signs, had the bits that cuBLAS gave on an H100; where it
    splits a long inner dimension, as it did for small products in TF32, hardly one has.

    Parameters
    ----------
    a : tensor or array, shape (m, k)
        Left operand, of a floating type; finite, or the result is not.
    b : tensor or array, shape (k, n)
        Right operand; both are computed on the device of *a*.
    operands : {"tf32", "float16", "bfloat16"} or None
        Type that the operands are converted to first; ``None`` takes them as they are, in
        float32 or a narrower type.
    convert : {"nearest", "truncate"}
        How they are converted: rounded to nearest, ties to even, or cut towards zero.
    accumulate : {"truncate", "nearest"}
        ``"nearest"`` rounds the sum of each step once to nearest, ties to even, and cuts nothing:
        with ``block=1`` a chain of fused multiply-adds.
    block : int
        Products in a step, 1 to 4096.
    bits : int
        Significant bits that are kept of the largest addend of a step, 2 to 40; of no effect with
        ``accumulate="nearest"``.

    Returns
    -------
    tensor or array of float32, shape (m, n)
        A tensor where *a* is one. Overflow gives infinities.

    Raises
    ------
    ArgumentError
        When an option is none of these, or *a* or *b* is not a tensor.
    DtypeError
        When an operand is not of a floating type, or is wider than float32 with
        ``operands=None``.
    ShapeError
        When the shapes are not (m, k) and (k, n).

    Examples
    --------
    One and eight times almost a unit of the sum's last place, of which nothing is left:

    >>> import numpy as np
    >>> from roundoff.reductions import tensor_core_matmul
    >>> a = np.float32([[1] + 8 * [2**-23 - 2**-33]])
    >>> b = np.ones((9, 1), np.float32)
    >>> float(tensor_core_matmul(a, b)[0, 0] - 1), float(np.float32(a.sum(dtype=np.float64)) - 1)
    (0.0, 9.5367431640625e-07)
    """
    import torch

    for name, value, allowed in (
        ("convert", convert, ("nearest", "truncate")),
        ("accumulate", accumulate, ("nearest", "truncate")),
        ("operands", operands, (None, *OPERANDS)),
    ):
        if value not in allowed:
            raise ArgumentError(name, got=value, expected=" or ".join(map(repr, allowed)))
    for name, count, low, high in (("block", block, 1, 4096), ("bits", bits, 2, 40)):
        if isinstance(count, bool) or int(count) != count or not low <= count <= high:
            raise ArgumentError(name, got=count, expected=f"an integer, {low} to {high}")
    left, right = _operand(a, "a", operands), _operand(b, "b", operands)
    shapes = [tuple(h.tensor.shape) for h in (left, right)]
    if [len(s) for s in shapes] != [2, 2] or shapes[0][1] != shapes[1][0]:
        raise ShapeError(
            "no matrix product", got=f"{shapes[0]} and {shapes[1]}", expected="(m, k) and (k, n)"
        )
    device = left.tensor.device
    x, y = (h.tensor.to(device, torch.float64) for h in (left, right))
    if operands is not None:
        x, y = (_converted(t, operands, convert == "nearest") for t in (x, y))
    m, n = len(x), y.shape[1]
    result = torch.zeros(m, n, dtype=torch.float32, device=device)
    rows = max(1, _PRODUCTS // max(1, block * n))
    for start in range(0, m, rows):
        part = x[start : start + rows]
        total = torch.zeros(len(part), n, dtype=torch.float64, device=device)
        for k in range(0, x.shape[1], block):
            # Products of two numbers of at most 24 bits: exact in float64.
            products = part[:, k : k + block, None] * y[None, k : k + block]
            if accumulate == "truncate":
                total = _truncated(total, products, int(bits))
            else:
                total = _rounded(total, products)
        result[start : start + rows] = total
    return result if left.kind == "tensor" else result.cpu().numpy()


def _operand(value: Any, name: str, operands: str | None) -> TypedTensor:
    operand = as_tensor(value)
    if operand is None:
        raise ArgumentError(f"{name} is no tensor", got=type(value).__name__)
    if not operand.info.is_float:
        raise DtypeError(f"{name} has no floating type", got=operand.info.name)
    if operands is None and operand.info.precision > 24:
        raise DtypeError(
            f"{name} is too wide: its products would not be exact", got=operand.info.name,
            expected="float32 or narrower", hint="convert it, or name operands=",
        )  # fmt: skip
    return operand


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent as float64, for the exponents of its normal numbers."""
    import torch

    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def _converted(x: torch.Tensor, operands: str, nearest: bool) -> torch.Tensor:
    """Float64 *x* as numbers of a narrower type; overflow as IEEE 754 has it for either way."""
    import torch

    if operands == "tf32":
        precision, emin, largest = _TF32
    else:
        info = dtype_info(operands)
        precision, emin, largest = info.precision, info.emin, info.max
    # x is below 2**exponent: one place of the type there is 2**(exponent - precision).
    last = (torch.frexp(x).exponent - precision).clamp(emin + 1 - precision, 1000)
    steps = x * _power(-last)
    steps = torch.round(steps) if nearest else torch.trunc(steps)
    out = steps * _power(last)
    over = (out.abs() > largest) & x.isfinite()
    limit = math.inf if nearest else largest
    return torch.where(over, torch.full_like(out, limit).copysign(x), out)


def _truncated(total: torch.Tensor, products: torch.Tensor, bits: int) -> torch.Tensor:
    """One step of a tensor core: all aligned to the largest, cut, added, and cut to float32."""
    import torch

    largest = torch.maximum(products.abs().amax(1), total.abs())
    # The largest is below 2**exponent; its last kept place is 2**(exponent - bits).
    last = (torch.frexp(largest).exponent - bits).clamp(_SMALLEST, 300)
    up, down = _power(-last), _power(last)
    # Integers of at most *bits* bits: float64 adds thousands of them without error.
    steps = products.mul_(up[:, None]).trunc_().sum(1).add_(total.mul(up).trunc_())
    cut = steps.mul_(down).view(torch.int64).bitwise_and_(-(1 << 29)).view(torch.float64)
    return cut.to(torch.float32).to(torch.float64)  # exact, or an overflow


def _rounded(total: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """Sum of a step rounded once to float32, ties to even.

    The sum is taken with its errors, in twice the precision of float64. The float64 in between is
    rounded to odd, so that rounding it to float32 is as rounding the sum itself (S. Boldo,
    G. Melquiond, *Emulation of a FMA and correctly rounded sums: proved algorithms using rounding
    to odd*, IEEE Transactions on Computers 57, 2008).
    """
    import torch

    error = torch.zeros_like(total)
    for product in products.unbind(1):
        total, lost = _two_sum(total, product)
        error += lost
    total, lost = _two_sum(total, error)
    even = (total.view(torch.int64) & 1) == 0
    towards = torch.nextafter(total, torch.full_like(total, math.inf).copysign(lost))
    inexact = (lost != 0) & lost.isfinite() & total.isfinite()
    return torch.where(inexact & even, towards, total).to(torch.float32).to(torch.float64)


def _two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rounded sum s and its error e, as :func:`two_sum`; e is 0 where s is not finite."""
    import torch

    s, e = two_sum(a, b)
    return s, torch.where(s.isfinite(), e, 0.0)
