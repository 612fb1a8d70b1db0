"""The exact sum of a tensor in Triton, rounded once: the same bits in every order.

Every lane of a program adds values to a few float64 numbers of its own, always without rounding.
At the end the numbers of all lanes become whole numbers, in memory, and additions of whole numbers
have no order. The program that ends last makes one number of them and rounds it.

Why no addition rounds. Write a float32 value of exponent field *e* as a multiple of 2**(e − 150);
it is below 2**(e − 126). A *level* is a float64 number that starts at 1.5 · 2**52 units U and is
between 2**52 and 2**53 units: there float64 holds the multiples of U and nothing between them.

1. ``after = level + x`` is the nearest multiple of U. ``after − level``, the part of *x* that went
   in, is one, too, and exact, since both are of one binade.
2. ``x − (after − level)`` is at most U/2 in size and a multiple of the unit of *x*. It is
   exact: *x* where nothing went in, else at most as large as *x*. It goes to the next level.
3. A lane adds at most N = 2**COUNT values. Those below 2**(50 − COUNT) U move the first level by
   N (|x| + U/2) < 2**51 U, so that it stays where step 1 needs it. A next level receives at most
   U/2, and its own unit may be 2**(51 − COUNT) times as small.
4. The last number starts at −0.0. It receives multiples of the unit u of the smallest value, at
   most U/2 = 2**(50 − COUNT) u in size: its sum is 2**50 u at most, and float64 holds 2**53 u.

So *levels* before the last number hold 78 − 2 COUNT + (levels − 1) (51 − COUNT) binades.

A program guesses a window from its first values, adds with one level, notes the largest and the
smallest value, and looks at the end whether the guess held. If not it reads its values twice again,
with three levels, whose window is half the range of float32 at least.

Lanes end with at most 2**51 units, so that 2**12 of them fit in 64 bits. Number *k* in memory
counts units of 2**(32 k − 150): shifted to the next lower of these, a sum is cut into three parts
of 32 bits. Each has 64 bits, room for 2**31 parts; a program adds at most twelve.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton.language as tl

from roundoff.errors import ArgumentError, DtypeError

from ._runtime import (
    ceil_div,
    check_device,
    check_tensor,
    kernel,
    max_along,
    min_along,
    multiprocessors,
    run,
    sum_along,
)

__all__ = ["sum_binned"]

#: Numbers in memory: twelve that count, four flags, and one that counts the programs at their end.
_BINS = tl.constexpr(16)
_DIGITS = tl.constexpr(12)
_NAN, _PLUS_INF, _MINUS_INF, _NOT_MINUS_0, _DONE = (tl.constexpr(k) for k in (12, 13, 14, 15, 16))

#: Bits of float32: all but the sign, those of infinity, and those of a NaN.
_SIZE = tl.constexpr(0x7FFFFFFF)
_INF = tl.constexpr(0x7F800000)
_QUIET_NAN = tl.constexpr(0x7FC00000)
#: The low half of 64 bits.
_HALF = tl.constexpr(0xFFFFFFFF)


@kernel
def _extremes(x, most, least):
    """Twice the bits of the largest size so far, and of the smallest that is not 0, less 1."""
    twice = x.to(tl.uint32, bitcast=True) << 1  # without the sign
    return tl.maximum(most, twice), tl.minimum(least, twice - 1)  # 0 - 1 is the largest number


@kernel
def _add(
    x,
    one,
    two,
    three,
    last,
    most,
    least,
    begin,
    end,
    LEVELS: tl.constexpr,  # 1, or 3 for the values of some exponents alone
):
    """Add a value to each lane."""
    most, least = _extremes(x, most, least)
    if LEVELS == 3:
        field = (x.to(tl.int32, bitcast=True) & _SIZE) >> 23
        x = tl.where((field >= begin) & (field < end), x, -0.0)
    rest = x.to(tl.float64)
    after = one + rest
    rest = rest - (after - one)
    one = after
    if LEVELS == 3:
        after = two + rest
        rest = rest - (after - two)
        two = after
        after = three + rest
        rest = rest - (after - three)
        three = after
    return one, two, three, last + rest, most, least


@kernel
def _start(unit, LANES: tl.constexpr):
    """1.5 * 2**52 units of 2**(unit - 150) in each lane."""
    bits = (tl.cast(925 + unit, tl.int64) << 52) | (1 << 51)
    return (tl.arange(0, LANES).to(tl.int64) * 0 + bits).to(tl.float64, bitcast=True)


@kernel
def _add_all(
    x_ptr,
    M,
    tiles,
    base,
    begin,
    end,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    COUNT: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Add the program's values in a window whose least exponent field is *base*."""
    lane = tl.arange(0, LANES)
    # Units: of the last number, and of the levels, each 2**(51 - COUNT) times the next one's.
    step = 51 - COUNT
    unit = base + step
    if LEVELS == 3:
        one, two, three = (
            _start(unit + 2 * step, LANES),
            _start(unit + step, LANES),
            _start(unit, LANES),
        )
    else:
        one = _start(unit, LANES)
        two, three = one, one
    last = ((lane * 0 + 1).to(tl.int64) << 63).to(tl.float64, bitcast=True)  # -0.0
    most = (lane * 0).to(tl.uint32)
    sums = one, two, three, last, most, most - 1
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        start = x_ptr + tl.cast(tile, tl.int64) * (LANES * UNROLL)
        for part in tl.static_range(UNROLL):
            x = tl.load(start + part * LANES + lane).to(tl.float32, bitcast=True)
            sums = _add(x, *sums, begin, end, LEVELS)
    # What is left of the last tile belongs to the program whose turn it is.
    done = tl.cast(tiles, tl.int64) * (LANES * UNROLL)
    mine = tl.program_id(0) == tiles % tl.num_programs(0)
    parts = tl.where(mine, (M - done + LANES - 1) // LANES, 0).to(tl.int32)
    for part in range(parts):
        place = done + part * LANES + lane
        bits = tl.load(x_ptr + place, mask=place < M, other=-2147483648)
        x = bits.to(tl.float32, bitcast=True)
        sums = _add(x, *sums, begin, end, LEVELS)
    return sums


@kernel
def _digits(numbers, start, unit):
    """What the sum of the lanes adds to the numbers in memory, if it is in units of 2**unit."""
    bin_ = tl.arange(0, _BINS)
    scale = (tl.cast(1023 + 150 - unit, tl.int64) << 52).to(tl.float64, bitcast=True)
    moved = numbers - start
    moved = tl.where(tl.abs(moved) < float("inf"), moved, 0.0)  # special values have their flags
    whole = sum_along((moved * scale).to(tl.int64), 0)
    first = (whole & _HALF) << (unit & 31)
    second = ((whole >> 32) << (unit & 31)) + (first >> 32)
    bins = tl.where(bin_ == (unit >> 5), first & _HALF, 0)
    bins += tl.where(bin_ == (unit >> 5) + 1, second & _HALF, 0)
    return bins + tl.where(bin_ == (unit >> 5) + 2, second >> 32, 0)


@kernel
def _flags(numbers):
    """Infinities and NaN that the lanes met: such a number stays what it is."""
    bin_ = tl.arange(0, _BINS)
    nan = max_along((numbers != numbers).to(tl.int64), 0)
    plus = max_along((numbers == float("inf")).to(tl.int64), 0)
    minus = max_along((numbers == float("-inf")).to(tl.int64), 0)
    flags = tl.where(bin_ == _NAN, nan, 0) + tl.where(bin_ == _PLUS_INF, plus, 0)
    return flags + tl.where(bin_ == _MINUS_INF, minus, 0)


@kernel
def _rounded(bins_ptr):
    """The bits of the float32 number that is nearest to the sum of the numbers in memory."""
    zero = tl.load(bins_ptr, cache_modifier=".cg") * 0
    carry = zero
    for k in tl.static_range(_DIGITS):
        carry = (tl.load(bins_ptr + k, cache_modifier=".cg") + carry) >> 32
    negative = carry < 0
    # Digits of 32 bits, the lowest first: the last two seen, and whether one before is not 0.
    carry, digit, before, lost = zero, zero, zero, zero
    head, tail, sticky, place = zero, zero, zero, zero  # at the last digit that is not 0
    for k in tl.static_range(_DIGITS):
        number = tl.load(bins_ptr + k, cache_modifier=".cg")
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
    nan = tl.load(bins_ptr + _NAN, cache_modifier=".cg") != 0
    plus = tl.load(bins_ptr + _PLUS_INF, cache_modifier=".cg") != 0
    minus = tl.load(bins_ptr + _MINUS_INF, cache_modifier=".cg") != 0
    nan = nan | (plus & minus)
    minus_0 = tl.load(bins_ptr + _NOT_MINUS_0, cache_modifier=".cg") == 0
    negative = tl.where(plus | minus, minus, negative | minus_0)
    size = tl.where(plus | minus, _INF, size)
    return tl.where(nan, _QUIET_NAN, size | (negative.to(tl.int32) << 31))


@kernel
def _sum_kernel(
    x_ptr,  # (M,) int32: the bits
    bins_ptr,  # (BINS + 1,) int64, zero at the start
    out_ptr,  # (1,) int32: the bits
    M,
    tiles,  # whole tiles of LANES * UNROLL values; each program takes every G-th
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    COUNT: tl.constexpr,  # a lane adds at most 2**COUNT values
):
    STEP: tl.constexpr = 51 - COUNT
    NARROW: tl.constexpr = 2 * STEP - 24
    WIDE: tl.constexpr = 4 * STEP - 24
    ABOVE: tl.constexpr = 12  # binades for values above the first ones
    bin_ = tl.arange(0, _BINS)
    lane = tl.arange(0, LANES)
    bins = bin_.to(tl.int64) * 0
    place = tl.program_id(0).to(tl.int64) * (LANES * UNROLL) + lane
    bits = tl.load(x_ptr + place, mask=place < M, other=-2147483648)
    zero = (lane * 0).to(tl.uint32)
    most, least = _extremes(bits.to(tl.float32, bitcast=True), zero, zero - 1)
    highest = max_along((most >> 1).to(tl.int32), 0) >> 23
    highest = tl.where((highest == 0) | (highest == 255), 127, highest)
    low = tl.maximum(highest + ABOVE + 1 - NARROW, 0)
    one, two, three, last, most, least = _add_all(
        x_ptr, M, tiles, low, 0, 0, LANES, UNROLL, COUNT, 1
    )
    highest = max_along((most >> 1).to(tl.int32), 0) >> 23
    smallest = min_along((least >> 1).to(tl.int32), 0)  # the smallest one's bits, less 1
    wide = (highest < 255) & ((highest >= low + NARROW) | (smallest < (low << 23) - 1))
    if not wide:
        bins += _digits(one, _start(low + STEP, LANES), low + STEP) + _flags(one)
        bins += _digits(last, 0.0, low)
        # Only a sum of negative zeros leaves -0.0 where it began.
        touched = last.to(tl.int64, bitcast=True) != -(2**63)
        bins += tl.where(bin_ == _NOT_MINUS_0, max_along(touched.to(tl.int64), 0), 0)
    for turn in range(tl.where(wide, 2, 0)):
        begin = turn * WIDE
        base = tl.minimum(begin, 256 - WIDE)
        one, two, three, last, most, least = _add_all(
            x_ptr, M, tiles, base, begin, begin + WIDE, LANES, UNROLL, COUNT, 3
        )
        unit = base + STEP
        bins += _flags(one)
        for level in tl.static_range(3):
            number = three if level == 0 else (two if level == 1 else one)
            bins += _digits(number, _start(unit + level * STEP, LANES), unit + level * STEP)
        bins += _digits(last, 0.0, base)
        bins += tl.where(bin_ == _NOT_MINUS_0, 1, 0)
    tl.atomic_add(bins_ptr + bin_, bins, mask=bins != 0, sem="relaxed")
    tl.debug_barrier()
    before = tl.atomic_add(bins_ptr + _DONE, 1, sem="acq_rel")
    if before == tl.num_programs(0) - 1:
        tl.store(out_ptr, _rounded(bins_ptr))


def sum_binned(x: torch.Tensor) -> torch.Tensor:
    """The exact sum, rounded once: the bits of :func:`roundoff.reductions.binned`.

    The error is at most half a unit in the last place. The result depends neither on the order of
    the values, nor on the GPU, nor on the order in which it runs its programs.

    Parameters
    ----------
    x : torch.Tensor
        float32, of any shape: all its elements are added; without a gradient. On a CUDA device, or
        where the kernels are interpreted on the CPU. A tensor that is not contiguous is
        copied.

    Returns
    -------
    torch.Tensor, shape ()
        float32. Infinities, NaN, overflow and −0 are those of :func:`roundoff.reductions.binned`.

    Raises
    ------
    DtypeError, ArgumentError, UnsupportedError
        When the tensor or its device is not as above.

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
    check_tensor(x, "x")
    if x.dtype != torch.float32:
        raise DtypeError(
            "cannot be added",
            got=str(x.dtype),
            expected="a tensor of float32",
            hint="x.float() of 16 bits; roundoff.reductions.binned adds float64 on a CPU",
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("has no backward", got="requires_grad", hint="x.detach()")
    check_device(x.device, "x")
    return _sum(x.contiguous().resolve_neg().view(-1))


def _sum(
    x: torch.Tensor, lanes: int = 1024, unroll: int = 4, power: int = 7, most: int = 4
) -> torch.Tensor:
    """The sum of a contiguous tensor of one axis; no number of these shows in it.

    A program reads *unroll* values for each lane at a time, and adds at most 2**power to one: 2**8
    are slower over many binades. A multiprocessor has *most* programs, if the tensor is not longer.
    """
    n, index = x.numel(), x.get_device()
    if n == 0:
        return torch.zeros((), dtype=x.dtype, device=x.device)
    total = ceil_div(n, lanes * unroll)
    programs = max(min(total, most * multiprocessors(index)), ceil_div(total, 2**power // unroll))
    out = torch.empty((), dtype=x.dtype, device=x.device)
    bins = torch.zeros(_BINS.value + 1, dtype=torch.int64, device=x.device)
    numbers = (n, n // (lanes * unroll), lanes, unroll, power)
    # More registers of a thread leave fewer threads, and loads, under way at a time.
    options = {"num_warps": max(lanes // 128, 1), "maxnreg": 64}
    run(
        _sum_kernel,
        (programs, 1),
        x.view(torch.int32),
        bins,
        out.view(torch.int32),
        *numbers,
        **options,
    )
    return out
