"""The exact sum of a tensor in Triton, rounded once: the same bits in every order.

One kernel adds the blocks, in any order, into twelve whole numbers in memory; additions of whole
numbers have no order. A second one makes one number of them and rounds it.

How a block is added: float32 numbers of nearby exponents are multiples of one unit, and of few of
them. float64 has 53 bits and adds them without rounding: of 4096 values those down to 2**-17 of the
largest. Where smaller ones are left, they are added in another turn; most data need one or two.

The sum of a turn is a whole number of its unit. Number *k* in memory counts units of
2**(32 k − 150): shifted to the next lower of these, the sum is cut into three parts of 32 bits.
Each has 64 bits, room for 2**31 blocks.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton.language as tl

from roundoff.errors import ArgumentError, DtypeError

from ._runtime import ceil_div, check_device, kernel, max_along, multiprocessors, sum_along

__all__ = ["sum_binned"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

#: Numbers in memory: twelve that count and four flags.
_BINS = tl.constexpr(16)
_DIGITS = tl.constexpr(12)
_NAN, _PLUS_INF, _MINUS_INF, _NOT_MINUS_0 = (tl.constexpr(k) for k in (12, 13, 14, 15))

#: Bits of float32: all but the sign, those of infinity, and those of a NaN.
_SIZE = tl.constexpr(0x7FFFFFFF)
_INF = tl.constexpr(0x7F800000)
_QUIET_NAN = tl.constexpr(0x7FC00000)
#: The low half of 64 bits.
_HALF = tl.constexpr(0xFFFFFFFF)


@kernel
def _bins_kernel(
    x_ptr,  # (n,) float32 or float16, or int16: the bits of bfloat16
    bins_ptr,  # (BINS,) int64, zero at the start
    n,
    tiles,  # blocks, the last perhaps in part; each program takes every tl.num_programs(0)-th
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,  # BLOCK values, 2**WINDOW apart at most, add up in 53 bits
    BFLOAT16: tl.constexpr,
):
    bin_ = tl.arange(0, _BINS)
    bins = bin_.to(tl.int64) * 0
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        place = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + place, mask=place < n, other=0)
        if BFLOAT16:  # its numbers are float32's first halves; the interpreter loses subnormal ones
            x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        x = x.to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        size = bits & _SIZE  # grows with the absolute value
        top = max_along(size, 0)
        if top >= _INF:
            bins += tl.where(bin_ == _NAN, max_along((size > _INF).to(tl.int32), 0), 0)
            bins += tl.where(bin_ == _PLUS_INF, max_along((bits == _INF).to(tl.int32), 0), 0)
            minus = (size == _INF) & (bits < 0)
            bins += tl.where(bin_ == _MINUS_INF, max_along(minus.to(tl.int32), 0), 0)
            size = tl.where(size >= _INF, 0, size)
            top = max_along(size, 0)
        if top == 0:  # zeros: is there one without a sign?
            plus = max_along(((place < n) & (bits == 0)).to(tl.int32), 0)
            bins += tl.where(bin_ == _NOT_MINUS_0, plus, 0)
        else:
            bins += tl.where(bin_ == _NOT_MINUS_0, 1, 0)
        while top > 0:
            low = tl.maximum((top >> 23) - WINDOW, 0)  # the least exponent of this turn
            now = size >= tl.maximum(low << 23, 1)
            part = sum_along(tl.where(now, x, 0.0).to(tl.float64), 0)
            # In units of 2**(low - 150), of which all these values are multiples.
            scale = (tl.cast(1023 + 150 - low, tl.int64) << 52).to(tl.float64, bitcast=True)
            whole = (part * scale).to(tl.int64)
            first = (whole & _HALF) << (low & 31)
            second = ((whole >> 32) << (low & 31)) + (first >> 32)
            bins += tl.where(bin_ == (low >> 5), first & _HALF, 0)
            bins += tl.where(bin_ == (low >> 5) + 1, second & _HALF, 0)
            bins += tl.where(bin_ == (low >> 5) + 2, second >> 32, 0)
            size = tl.where(now, 0, size)
            top = max_along(size, 0)
    tl.atomic_add(bins_ptr + bin_, bins, mask=bins != 0, sem="relaxed")


@kernel
def _round_kernel(
    bins_ptr,  # (BINS,) int64
    out_ptr,  # (1,) float32
    ODD: tl.constexpr,  # leave the last rounding, to 16 bits, to the caller
):
    zero = tl.load(bins_ptr) * 0
    carry = zero
    for k in tl.static_range(_DIGITS):
        carry = (tl.load(bins_ptr + k) + carry) >> 32
    negative = carry < 0
    # Digits of 32 bits, the lowest first: the last two seen, and whether one before is not 0.
    carry, digit, before, lost = zero, zero, zero, zero
    head, tail, sticky, place = zero, zero, zero, zero  # at the last digit that is not 0
    for k in tl.static_range(_DIGITS):
        number = tl.load(bins_ptr + k)
        total = tl.where(negative, -number, number) + carry
        lost = lost | before
        before = digit
        digit, carry = total & _HALF, total >> 32
        head = tl.where(digit != 0, digit, head)
        tail = tl.where(digit != 0, before, tail)
        sticky = tl.where(digit != 0, lost, sticky)
        place = tl.where(digit != 0, 32 * (k - 1), place)
    # 32 to 53 bits for float64, the last one set where lower ones are: a rounding sees them all.
    cut = tl.where(head < 2**21, 0, 11)
    sticky = sticky | (tail & ((1 << cut) - 1))
    head = (head << (32 - cut)) | (tail >> cut) | (sticky != 0).to(tl.int64)
    scale = ((1023 - 150 + place + cut) << 52).to(tl.float64, bitcast=True)
    exact = head.to(tl.float64) * scale
    size = exact.to(tl.float32).to(tl.int32, bitcast=True)
    if ODD:  # of the two neighbours the odd one, for the same reason
        near = exact.to(tl.float32).to(tl.float64)
        odd = tl.where(exact > near, size + 1, size - 1)
        size = tl.where((exact != near) & (size % 2 == 0), odd, size)
    nan = tl.load(bins_ptr + _NAN) != 0
    plus = tl.load(bins_ptr + _PLUS_INF) != 0
    minus = tl.load(bins_ptr + _MINUS_INF) != 0
    nan = nan | (plus & minus)
    minus_0 = tl.load(bins_ptr + _NOT_MINUS_0) == 0
    negative = tl.where(plus | minus, minus, negative | minus_0)
    size = tl.where(plus | minus, _INF, size)
    size = tl.where(nan, _QUIET_NAN, size | (negative.to(tl.int32) << 31))
    tl.store(out_ptr, size.to(tl.float32, bitcast=True))


def sum_binned(x: torch.Tensor, block: int = 4096) -> torch.Tensor:
    """The exact sum, rounded once: the bits of :func:`roundoff.reductions.binned`.

    The error is at most half a unit in the last place. The result depends neither on the order of
    the values nor on *block*, on the GPU or on the order in which it runs its programs.

    Parameters
    ----------
    x : torch.Tensor
        float32, float16 or bfloat16, of any shape: all its elements are added; without a gradient.
        On a CUDA device, or where the kernels are interpreted on the CPU. A tensor that is not
        contiguous is copied.
    block : int
        Values that are added at a time; a power of two from 64 to 2**16.

    Returns
    -------
    torch.Tensor, shape ()
        Of the type of *x*. Infinities, NaN, overflow and −0 are those of
        :func:`roundoff.reductions.binned`.

    Raises
    ------
    DtypeError, ArgumentError, UnsupportedError
        When the tensor, its device or the block is not as above.

    References
    ----------
    As of :func:`roundoff.reductions.binned`.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels.binned import sum_binned
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> sum_binned(torch.tensor([1e30, 1.0, -1e30], device=device)).item()
    1.0
    """
    if not isinstance(x, torch.Tensor) or x.dtype not in _DTYPES:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise DtypeError(
            "cannot be added",
            got=str(got),
            expected="a tensor of float32, float16 or bfloat16",
            hint="roundoff.reductions.binned adds float64 on a CPU",
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("has no backward", got="requires_grad", hint="x.detach()")
    if block not in [2**k for k in range(6, 17)]:
        raise ArgumentError("block size", got=block, expected="a power of two from 64 to 65536")
    check_device(x.device, "x")
    n = x.numel()
    if n == 0:
        return torch.zeros((), dtype=x.dtype, device=x.device)
    tiles = ceil_div(n, block)
    programs = min(tiles, _PROGRAMS * multiprocessors(x.get_device()))
    window = 29 - (block.bit_length() - 1)
    bins = torch.zeros(_BINS.value, dtype=torch.int64, device=x.device)
    out = torch.empty(1, dtype=torch.float32, device=x.device)
    bfloat16 = x.dtype == torch.bfloat16
    values = x.reshape(-1).view(torch.int16) if bfloat16 else x.reshape(-1)
    with torch.cuda.device_of(x):
        _bins_kernel[(programs,)](
            values,
            bins,
            n,
            tiles,
            BLOCK=block,
            WINDOW=window,
            BFLOAT16=bfloat16,
            num_warps=_WARPS,
        )
        _round_kernel[(1,)](bins, out, ODD=x.dtype != torch.float32, num_warps=1)
    return out[0].to(x.dtype)


#: Programs of a multiprocessor, and warps of a program.
_PROGRAMS, _WARPS = 8, 8
