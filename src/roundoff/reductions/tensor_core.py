"""A matrix product as tensor cores compute it: exact products, added in blocks, truncated.

A tensor core adds a block of products to its accumulator in one step. All of them are aligned to
the largest exponent, what falls below a fixed number of bits is cut off, not rounded, and the sum
is cut to the accumulator's precision. Each cut is towards zero. Where all products have one sign,
all errors have the other sign and accumulate; errors of rounding to nearest mostly cancel.

Sources: M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, *Numerical behavior of NVIDIA tensor
cores*, PeerJ Computer Science 7, 2021,
`doi:10.7717/peerj-cs.330 <https://doi.org/10.7717/peerj-cs.330>`_, who measured the V100, the T4
and the A100; F. A. Khattak, M. Mikaitis, *Accurate models of NVIDIA tensor cores*, 2025,
`arXiv:2512.07004 <https://arxiv.org/abs/2512.07004>`_, for later ones; P. Xie, Y. Wang, F. Yang,
M. Yang, *MMA-Sim: bit-accurate reference model of tensor cores and matrix cores*, 2025,
`arXiv:2511.10909 <https://arxiv.org/abs/2511.10909>`_, for the smallest exponent to which a step
aligns.

The steps of :data:`HOPPER` were measured on an H100 and an H200 with torch 2.11 and Triton 3.6 on
2026-11-25. Products of 64 x 64 with K from 16 to 4096 agree in each bit, of the five types,
subnormal numbers and zeros included. The elements kept of both GPUs are the same
(``tests/test_tensor_core.py``).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from roundoff.arguments import check_choice, check_whole
from roundoff.describe import TypedTensor, as_tensor
from roundoff.errors import ArgumentError, DtypeError, ShapeError

Array = np.ndarray[Any, np.dtype[Any]]

#: GPUs with the steps of :data:`HOPPER`.
GPUS = ("H100", "H200")
#: Elements of the result in a piece: its arrays stay in a cache.
_PIECE = 1 << 15
#: Exponent of the smallest positive and of the smallest normal float32.
_SMALLEST, _NORMAL = -149, -126
#: Stands for the exponent of zero: the sum of two of them still fits 16 bits.
_NONE = -10_000
#: Bits of the NaN that a tensor core returns.
_NAN = 0x7FFFFFFF


@dataclasses.dataclass(frozen=True)
class Step:
    """How a tensor core adds a block of products to its accumulator.

    The defaults are what an H100 and an H200 do (measured 2026-11-25, torch 2.11, Triton 3.6).

    Each product is exact. Its exponent is the sum of its operands' exponents, so that its
    significand lies in [1, 4). The largest exponent e of the products and the accumulator is that
    to which all of them are aligned: each is cut towards zero to a multiple of 2^(e − fraction).
    Their sum is exact, and is cut towards zero to the accumulator's precision. A sum that is zero,
    or is cut to zero, is +0. A sum of 2^128 or more is infinite, and NaN has the bits 7fffffff.

    Attributes
    ----------
    block : int
        Products in a step.
    fraction : int
        Places that are kept below the largest exponent.
    precision : int
        Significant bits of the accumulator, and so of the result.
    lowest : int
        Smallest exponent to which a step aligns: −133, as MMA-Sim has it.
    normalised : bool
        Whether a product's exponent is that of its leading bit. Hardware was not seen to do so.
    """

    block: int
    fraction: int
    precision: int
    lowest: int = -133
    normalised: bool = False


#: The steps of an H100 and an H200 (``wgmma``), by type of the operands; of float32 for TF32.
HOPPER = {
    "bfloat16": Step(block=16, fraction=25, precision=24),
    "float16": Step(block=16, fraction=25, precision=24),
    "float32": Step(block=8, fraction=25, precision=24),
    "float8_e4m3fn": Step(block=32, fraction=13, precision=14),
    "float8_e5m2": Step(block=32, fraction=13, precision=14),
}


def tensor_core_matmul(
    a: Any,
    b: Any,
    gpu: str | None = None,
    *,
    block: int | None = None,
    bits: int | None = None,
) -> Any:
    """Matrix product a b as a tensor core adds it: one chain of blocks over k, from zero.

    By default the instruction of one GPU, to the bit. Each step takes a *block* of products in
    ascending k and the accumulator. It aligns them to the largest exponent e, a product's exponent
    being the sum of its operands'; cuts each towards zero to a multiple of 2^(e − f); adds without
    error; and cuts the sum towards zero to p significant bits, the next accumulator.

    ==========  ===========  =====  ==  ==
    GPU         operands     block  f   p
    ==========  ===========  =====  ==  ==
    H100, H200  float16      16     25  24
    H100, H200  bfloat16     16     25  24
    H100, H200  TF32         8      25  24
    H100, H200  float8       32     13  14
    ==========  ===========  =====  ==  ==

    That is the instruction ``wgmma``, for float8 in e4m3fn or e5m2. A zero product has no
    exponent, and e is at least −133, as in MMA-Sim (arXiv:2511.10909). A subnormal operand has the
    exponent of its type's smallest normal number, a subnormal accumulator −126. A sum below 2^−126
    is cut to a multiple of 2^−149, and a zero is +0. A k that is no multiple of the block is filled
    up with zeros. All of it was measured on an H100 and an H200 with torch 2.11 and Triton 3.6
    (2026-11-25), where each recorded element agrees.

    A library may split k and add the parts: that is a different sum. At 64 x 64, cuBLAS was one
    chain for float16 and bfloat16 with k up to 512, not with 4096; for TF32 it added chunks of 4
    to 128 in float32. ``torch._scaled_mm`` was one chain with fast accumulation, and added chunks
    of 128 without.

    With *block* and *bits* it is a simpler model of any tensor core, of size and sign and not of
    every bit: a product's exponent is that of its leading bit, *bits* significant bits are kept of
    the largest addend of a step (f is *bits* − 1), and the accumulator has 24. What was published
    of older GPUs, which is not checked here:

    ====  ===================  ==================  ====  =================================
    GPU   block, 16-bit types  block, TF32         bits  source
    ====  ===================  ==================  ====  =================================
    V100  4                    (no TF32)           24    Fasi et al., 2021
    A100  8                    4                   25    Fasi et al., 2021; Khattak, 2025
    ====  ===================  ==================  ====  =================================

    Parameters
    ----------
    a : tensor or array, shape (m, k)
        Left operand: float16, bfloat16, float8_e4m3fn, float8_e5m2, or float32, of which a tensor
        core takes the part that TF32 holds: it ignores the last 13 bits. With *block* or *bits*
        they are rounded to nearest, ties to even, as a library may do first.
    b : tensor or array, shape (k, n)
        Right operand, of the same type; both are computed on the device of *a*.
    gpu : {"H100", "H200"}, optional
        The GPU, by default an H100.
    block : int, optional
        Products in a step, 1 to 4096; 8 where *bits* is given alone.
    bits : int, optional
        Significant bits that are kept of the largest addend of a step, 2 to 40, by default 24.

    Returns
    -------
    tensor or array of float32, shape (m, n)
        A tensor where *a* is one. Overflow gives infinities; an infinite or NaN operand what IEEE
        754 has for the sum, in any order. Zeros where k is 0.

    Raises
    ------
    ArgumentError
        When an option is none of these, a *gpu* and a *block* are given, or *a* or *b* is no
        tensor.
    DtypeError
        When the operands' types differ, or are not among these.
    ShapeError
        When the shapes are not (m, k) and (k, n).

    Examples
    --------
    After 1, eight times almost a unit of its last place, each of which is cut to three quarters
    of that unit:

    >>> import numpy as np
    >>> from roundoff.reductions import tensor_core_matmul
    >>> a = np.float32([8 * [1 / 8] + 8 * [2**-23 - 2**-33]])
    >>> b = np.ones((16, 1), np.float32)
    >>> got = tensor_core_matmul(a, b, "H100")
    >>> float(got[0, 0] - 1) * 2**23, float(a.sum(dtype=np.float64) - 1) * 2**23
    (6.0, 7.9921875)
    """
    import torch

    described = block is not None or bits is not None
    if described and gpu is not None:
        raise ArgumentError(
            "a GPU has a step of its own",
            got=f"gpu={gpu!r} beside block or bits",
            expected="one or the other",
        )
    check_choice("gpu", gpu, (None, *GPUS))
    block = check_whole("block", 8 if block is None else block, 1, 4096)
    bits = check_whole("bits", 24 if bits is None else bits, 2, 40)
    left, right = _operand(a), _operand(b)
    m_k, k_n = left.tensor.shape, right.tensor.shape
    if len(m_k) != 2 or len(k_n) != 2 or m_k[1] != k_n[0]:
        raise ShapeError(
            "no matrix product",
            got=f"{tuple(m_k)} and {tuple(k_n)}",
            expected="(m, k) and (k, n)",
        )
    if left.info != right.info or left.info.name not in HOPPER:
        raise DtypeError(
            "no tensor core multiplies these types into float32",
            got=f"{left.info.name} and {right.info.name}",
            expected=f"both {' or '.join(HOPPER)}",
            hint="convert them",
        )
    step = HOPPER[left.info.name]
    if described:
        step = Step(block, bits - 1, 24, lowest=_SMALLEST + bits - 1, normalised=True)
    with np.errstate(all="ignore"):
        x, y = (_as_float64(t, described) for t in (left, right))
        result = chained(x, y, left.info.emin, step)
    if not isinstance(a, torch.Tensor):
        return result
    return torch.from_numpy(result).to(left.tensor.device)


def _as_float64(operand: TypedTensor, nearest: bool) -> Array:
    """The operand's numbers; of float32 those of TF32, the nearest or cut towards zero."""
    import torch

    values: Array = operand.tensor.to("cpu", torch.float64).numpy()
    if operand.info.name != "float32":
        return values
    bits = values.astype(np.float32).view(np.int32)
    if nearest:  # ties to even
        bits = bits + 0xFFF + (bits >> 13 & 1)
    return np.where(np.isfinite(values), (bits & -0x2000).view(np.float32), values)


def _operand(value: Any) -> TypedTensor:
    operand = as_tensor(value)
    if operand is None:
        raise ArgumentError("an operand is no tensor", got=type(value).__name__)
    return operand


def chained(x: Array, y: Array, emin: int, step: Step) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The product x y by steps of a tensor core: one chain over k, from zero.

    Parameters
    ----------
    x : array of float64, shape (m, k)
        Numbers of the type.
    y : array of float64, shape (k, n)
        As x.
    emin : int
        Exponent of the type's smallest normal number.
    step : Step
        How a block is added.

    Returns
    -------
    array of float32, shape (m, n)
        The last accumulators.
    """
    m, n = len(x), y.shape[1]
    special = None
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        special = x @ y
        x, y = (np.where(np.isfinite(t), t, 0.0) for t in (x, y))
    # The rows of both are values of k: a step reads them one after the other.
    x, y = np.ascontiguousarray(x.T), np.ascontiguousarray(y)
    left, right = (_exponents(t, emin) for t in (x, y))
    result = np.zeros((m, n), np.float32)
    rows = max(1, _PIECE // max(1, n))
    for start in range(0, m, rows):
        piece = slice(start, start + rows)
        result[piece] = _chain_of_rows(x[:, piece, None], y, left[:, piece, None], right, step)
    if special is not None:
        result = np.where(np.isfinite(special), result, special.astype(np.float32))
    result[np.isnan(result)] = np.uint32(_NAN).view(np.float32)
    return result


def _exponents(x: Array, emin: int) -> Array:
    """The exponent with which each operand enters a step, as int16; a zero has none."""
    exponent = np.maximum(np.frexp(x)[1] - 1, emin)
    return np.where(x != 0, exponent, _NONE).astype(np.int16)


def _chain_of_rows(x: Array, y: Array, left: Array, right: Array, step: Step) -> Array:
    """Accumulators of some rows: of x (k, rows, 1), y (k, columns), and their exponents.

    Everything is exact in float64: a product has at most 48 bits, and the aligned addends are
    integers below 2**42, of which there are at most 4097.
    """
    total = np.zeros((x.shape[1], y.shape[1]))
    product, up, steps = (np.empty_like(total) for _ in range(3))
    exponents = np.empty(total.shape, np.int16)
    for first in range(0, len(x), step.block):
        ks = range(first, min(first + step.block, len(x)))
        if step.normalised:
            largest = np.abs(total)
            for k in ks:
                np.abs(np.multiply(x[k], y[k], out=product), out=product)
                np.maximum(largest, product, out=largest)
            emax = np.frexp(largest)[1] - 1
        else:
            emax = _accumulator_exponents(total)
            for k in ks:
                np.maximum(emax, np.add(left[k], right[k], out=exponents), out=emax)
        last = np.clip(emax, step.lowest, 300).astype(np.int64) - step.fraction
        up[...] = _power(-last)
        np.trunc(np.multiply(total, up, out=total), out=total)
        steps[...] = 0  # +0: what is cut to nothing leaves +0
        steps += total
        for k in ks:
            np.multiply(x[k], y[k], out=product)
            np.multiply(product, up, out=product)
            steps += np.trunc(product, out=product)
        total = _cut(steps * _power(last), step)
    return total


def _accumulator_exponents(total: Array) -> Array:
    exponent = np.maximum(np.frexp(total)[1] - 1, _NORMAL)
    return np.where(total == 0, _NONE, exponent).astype(np.int16)


def _cut(total: Array, step: Step) -> Array:
    """A sum cut to the accumulator's precision, as float64; beyond float32 infinite."""
    # In place: the lowest bits of the significand are zero from here on.
    np.bitwise_and(total.view(np.int64), -(1 << (53 - step.precision)), out=total.view(np.int64))
    small = np.abs(total) < 2.0**_NORMAL
    if small.any():
        # + 0.0: what is cut to zero is +0, of either sign before.
        places = np.trunc(total[small] * 2.0**-_SMALLEST) + 0.0
        total[small] = places * 2.0**_SMALLEST
    total[np.abs(total) >= 2.0**128] *= math.inf
    return total


def _power(exponent: Array) -> Array:
    """2**exponent as float64, for the exponents of its normal numbers."""
    return ((exponent.astype(np.int64) + 1023) << 52).view(np.float64)
