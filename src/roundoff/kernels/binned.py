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

So *levels* before the last number hold 78 − 2 COUNT + (levels − 1) (51 − COUNT) binades of float32.
bfloat16 has 16 bits less, and 43 − COUNT binades need no level. float16 as a whole needs none up
to COUNT = 10: its values are multiples of 2**-24 below 2**16.

A program guesses a window from its first values, adds with the fewest numbers, notes the largest
and the smallest value, and looks at the end whether the guess held. If not it reads its values
again, with three levels, whose window is half the range of float32 at least.

Lanes end with at most 2**51 units, so that 2**12 of them fit in 64 bits. Number *k* in memory
counts units of 2**(32 k − 150): shifted to the next lower of these, a sum is cut into three parts
of 32 bits. Each has 64 bits, room for 2**31 parts; a program adds at most twelve.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl

from roundoff.errors import ArgumentError, DtypeError

from ._runtime import (
    Launch,
    ceil_div,
    check_device,
    check_tensor,
    kernel,
    max_along,
    min_along,
    multiprocessors,
    sum_along,
)

__all__ = ["sum_binned"]

#: How a kernel is told the type.
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_FLOAT32, _FLOAT16, _BFLOAT16 = (tl.constexpr(k) for k in range(3))

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
def _read(bits, KIND: tl.constexpr, UPPER: tl.constexpr):
    """float32 values of a type's bits: of a half of each number where the type has 16 bits."""
    if KIND == _BFLOAT16:  # float32's first halves
        bits = bits & -65536 if UPPER else bits << 16
    elif KIND == _FLOAT16:
        half = (bits >> 16 if UPPER else bits).to(tl.int16)
        return half.to(tl.float16, bitcast=True).to(tl.float32)
    return bits.to(tl.float32, bitcast=True)


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
    LEVELS: tl.constexpr,
    CHECK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Add a value to each lane."""
    if CHECK:
        most, least = _extremes(x, most, least)
    if WINDOW:  # add only the values of some exponents
        field = (x.to(tl.int32, bitcast=True) & _SIZE) >> 23
        x = tl.where((field >= begin) & (field < end), x, -0.0)
    rest = x.to(tl.float64)
    if LEVELS >= 1:
        after = one + rest
        rest = rest - (after - one)
        one = after
    if LEVELS >= 3:
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
    KIND: tl.constexpr,
    LEVELS: tl.constexpr,
    CHECK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Add the program's values in a window whose least exponent field is *base*."""
    PACK: tl.constexpr = 1 if KIND == _FLOAT32 else 2
    lane = tl.arange(0, LANES)
    # Units: of the last number, and of the levels, each 2**(51 - COUNT) times the next one's.
    step = 51 - COUNT
    unit = base + step
    if KIND == _BFLOAT16:
        unit += 16
    if LEVELS >= 3:
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
        words = x_ptr.to(tl.pointer_type(tl.int32)) + tl.cast(tile, tl.int64) * (LANES * UNROLL)
        for part in tl.static_range(UNROLL):
            bits = tl.load(words + part * LANES + lane)
            sums = _add(_read(bits, KIND, False), *sums, begin, end, LEVELS, CHECK, WINDOW)
            if PACK == 2:
                sums = _add(_read(bits, KIND, True), *sums, begin, end, LEVELS, CHECK, WINDOW)
    # What is left of the last tile belongs to the program whose turn it is.
    done = tl.cast(tiles, tl.int64) * (LANES * UNROLL * PACK)
    mine = tl.program_id(0) == tiles % tl.num_programs(0)
    parts = tl.where(mine, (M - done + LANES - 1) // LANES, 0).to(tl.int32)
    for part in range(parts):
        place = done + part * LANES + lane
        if KIND == _FLOAT32:
            bits = tl.load(x_ptr + place, mask=place < M, other=-2147483648)
        else:
            bits = tl.load(x_ptr + place, mask=place < M, other=-32768).to(tl.int32)
        sums = _add(_read(bits, KIND, False), *sums, begin, end, LEVELS, CHECK, WINDOW)
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
def _rounded(
    bins_ptr,  # (BINS,) int64
    ODD: tl.constexpr,  # another rounding, to 16 bits, follows
):
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
    if ODD:  # of the two neighbours the odd one, for the same reason
        near = exact.to(tl.float32).to(tl.float64)
        odd = tl.where(exact > near, size + 1, size - 1)
        size = tl.where((exact != near) & (size % 2 == 0), odd, size)
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
    x_ptr,  # (M,) int32 or int16: the bits
    bins_ptr,  # (BINS + 1,) int64, zero at the start
    out_ptr,  # (1,) int32 or int16: the bits
    M,
    tiles,  # whole tiles of LANES * UNROLL numbers of 32 bits; each program takes every G-th
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
    COUNT: tl.constexpr,  # a lane adds at most 2**COUNT values
    KIND: tl.constexpr,
    LEVELS: tl.constexpr,  # of the first attempt
):
    PACK: tl.constexpr = 1 if KIND == _FLOAT32 else 2
    STEP: tl.constexpr = 51 - COUNT
    FINER: tl.constexpr = 16 if KIND == _BFLOAT16 else 0  # bits that float32 has more
    NARROW: tl.constexpr = STEP - 8 if LEVELS == 0 else 2 * STEP - 24 + FINER
    WIDE: tl.constexpr = 4 * STEP - 24 + FINER
    ABOVE: tl.constexpr = 3 if LEVELS == 0 else 12  # binades for values above the first ones
    bin_ = tl.arange(0, _BINS)
    lane = tl.arange(0, LANES)
    bins = bin_.to(tl.int64) * 0
    low = tl.program_id(0) * 0 + 126  # float16: the last number counts units of 2**-24
    wide = False
    if KIND != _FLOAT16:
        place = tl.program_id(0).to(tl.int64) * (LANES * UNROLL * PACK) + lane
        minus_0: tl.constexpr = -2147483648 if KIND == _FLOAT32 else -32768
        bits = tl.load(x_ptr + place, mask=place < M, other=minus_0).to(tl.int32)
        zero = (lane * 0).to(tl.uint32)
        most, least = _extremes(_read(bits, KIND, False), zero, zero - 1)
        highest = max_along((most >> 1).to(tl.int32), 0) >> 23
        lowest = min_along((least >> 1).to(tl.int32), 0) >> 23
        highest = tl.where((highest == 0) | (highest == 255), 127, highest)
        low = tl.maximum(highest + ABOVE + 1 - NARROW, 0)
        wide = lowest < low
    if not wide:
        one, two, three, last, most, least = _add_all(
            x_ptr, M, tiles, low, 0, 0, LANES, UNROLL, COUNT, KIND, LEVELS, KIND != _FLOAT16, False
        )
        if KIND != _FLOAT16:
            highest = max_along((most >> 1).to(tl.int32), 0) >> 23
            size = min_along((least >> 1).to(tl.int32), 0)  # the smallest one's bits, less 1
            lowest = size >> 23
            wide = (highest < 255) & ((highest >= low + NARROW) | (size < (low << 23) - 1))
        if not wide:
            start = _start(low + FINER + STEP, LANES)
            if LEVELS == 1:
                bins += _digits(one, start, low + FINER + STEP) + _flags(one)
            else:
                bins += _flags(last)
            bins += _digits(last, 0.0, low + FINER)
            # Only a sum of negative zeros leaves -0.0 where it began.
            touched = last.to(tl.int64, bitcast=True) != -(2**63)
            bins += tl.where(bin_ == _NOT_MINUS_0, max_along(touched.to(tl.int64), 0), 0)
    if KIND != _FLOAT16:
        turns = tl.where(wide, 1, 0)
        turn = turns * 0
        low = tl.minimum(tl.maximum(((highest + lowest + 1) >> 1) - WIDE // 2, 0), 256 - WIDE)
        base, begin, end = low, low, low + WIDE
        while turn < turns:
            one, two, three, last, most, least = _add_all(
                x_ptr, M, tiles, base, begin, end, LANES, UNROLL, COUNT, KIND, 3, True, True
            )
            last_unit = base + FINER
            unit = last_unit + STEP
            bins += _flags(one)
            for level in tl.static_range(3):
                number = three if level == 0 else (two if level == 1 else one)
                bins += _digits(number, _start(unit + level * STEP, LANES), unit + level * STEP)
            bins += _digits(last, 0.0, last_unit)
            bins += tl.where(bin_ == _NOT_MINUS_0, 1, 0)
            if turn == 0:  # are there values outside of the window?
                highest = max_along((most >> 1).to(tl.int32), 0) >> 23
                lowest = (min_along((least >> 1).to(tl.int32), 0) + 1) >> 23
                turns = tl.where((lowest < begin) | (highest >= end), 3, 1)
            turn += 1
            # Above it, then below it: both are shorter.
            base = tl.where(turn == 1, 256 - WIDE, 0)
            begin = tl.where(turn == 1, low + WIDE, 0)
            end = tl.where(turn == 1, 256, low)
    tl.atomic_add(bins_ptr + bin_, bins, mask=bins != 0, sem="relaxed")
    tl.debug_barrier()
    before = tl.atomic_add(bins_ptr + _DONE, 1, sem="acq_rel")
    if before == tl.num_programs(0) - 1:
        size = _rounded(bins_ptr, KIND != _FLOAT32)
        if KIND == _BFLOAT16:  # to even; NaN and infinities stay
            size = (size + 0x7FFF + ((size >> 16) & 1)) >> 16
            tl.store(out_ptr, size.to(tl.int16))
        elif KIND == _FLOAT16:
            half = size.to(tl.float32, bitcast=True).to(tl.float16)
            tl.store(out_ptr, half.to(tl.int16, bitcast=True))
        else:
            tl.store(out_ptr, size)


def sum_binned(x: torch.Tensor, block: int | None = None) -> torch.Tensor:
    """The exact sum, rounded once: the bits of :func:`roundoff.reductions.binned`.

    The error is at most half a unit in the last place. The result depends neither on the order of
    the values nor on *block*, on the GPU or on the order in which it runs its programs.

    Parameters
    ----------
    x : torch.Tensor
        float32, float16 or bfloat16, of any shape: all its elements are added; without a gradient.
        On a CUDA device, or where the kernels are interpreted on the CPU. A tensor that is not
        contiguous, or does not start at a multiple of 16 bytes, is copied.
    block : int, optional
        Values that a program reads at a time; a power of two from 64 to 2**16. By default what is
        fast for the type.

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
    if not isinstance(x, torch.Tensor) or x.dtype not in _KINDS:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise DtypeError(
            "cannot be added",
            got=str(got),
            expected="a tensor of float32, float16 or bfloat16",
            hint="roundoff.reductions.binned adds float64 on a CPU",
        )
    check_tensor(x, "x")
    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("has no backward", got="requires_grad", hint="x.detach()")
    choice = _CHOICES[x.dtype]
    if block is None:
        block = choice.block
    elif block not in _BLOCKS:
        raise ArgumentError("block size", got=block, expected="a power of two from 64 to 65536")
    check_device(x.device, "x")
    return _sum(x.contiguous().resolve_neg().view(-1), int(block), choice)


_BLOCKS = tuple(2**k for k in range(6, 17))


class _Choice(NamedTuple):
    """How the kernel adds a type. None of it shows in the result.

    Attributes
    ----------
    block : int
        Values that a program reads at a time.
    levels : int
        Levels of the first attempt: 1 for float32, 0 for float16, either for bfloat16.
    power : int
        A lane adds at most 2**power values; 10 at most.
    warps, programs : int
        Warps of a program, and programs of a multiprocessor, if the tensor is not longer.
    registers : int
        The most registers of a thread: more leave fewer threads, and loads, under way at a time.
    """

    block: int
    levels: int
    power: int
    warps: int
    programs: int
    registers: int


_CHOICES = {
    torch.float32: _Choice(4096, 1, 7, 8, 4, 64),  # 2**8 values are slower over many binades
    torch.float16: _Choice(4096, 0, 8, 8, 4, 64),
    torch.bfloat16: _Choice(4096, 0, 8, 4, 8, 64),
}

_LAUNCHES: dict[Any, Launch] = {}


def _sum(x: torch.Tensor, block: int, choice: _Choice) -> torch.Tensor:
    """The sum of a contiguous tensor of one axis."""
    n, index = x.numel(), x.get_device()
    if n == 0:
        return torch.zeros((), dtype=x.dtype, device=x.device)
    if x.data_ptr() % 16:  # a load takes 16 bytes, and pairs of 16-bit values
        x = x.clone()
    pack = 4 // x.itemsize
    # A thread has four lanes, and a tile two to eight numbers of 32 bits for each, if it can.
    numbers = block // pack
    lanes = min(max(numbers // 8, min(numbers, 128 * choice.warps)), 4096)
    unroll = numbers // lanes
    total = ceil_div(n, block)
    most = 2**choice.power // (unroll * pack)  # tiles of a program
    programs = max(min(total, choice.programs * multiprocessors(index)), ceil_div(total, most))
    bits = torch.int32 if pack == 1 else torch.int16
    out = torch.empty((), dtype=x.dtype, device=x.device)
    bins = torch.zeros(_BINS.value + 1, dtype=torch.int64, device=x.device)
    key = (index, x.dtype, block, choice, n >= 2**31)
    launch = _LAUNCHES.get(key)
    if launch is None:
        constants = (lanes, unroll, choice.power, _KINDS[x.dtype], choice.levels)
        warps = min(choice.warps, max(lanes // 128, 1))
        launch = Launch(_sum_kernel, index, constants, num_warps=warps, maxnreg=choice.registers)
        _LAUNCHES[key] = launch
    launch((programs, 1), (x.view(bits), bins, out.view(bits)), (n, n // block))
    return out
