# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The Triton kernel of :mod:`roundoff.compare.cuda`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from .cuda import format_of

if TYPE_CHECKING:
    from .stats import Plan

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _exponent(x, EMIN: tl.constexpr, EMAX: tl.constexpr):
    biased = (x.to(tl.int64, bitcast=True) >> 52) & 0x7FF
    return tl.minimum(tl.maximum(biased - 1023, EMIN), EMAX)


@triton.jit
def _power(exponent):
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _place(
    x, P: tl.constexpr, EMIN: tl.constexpr, EMAX: tl.constexpr, LAST: tl.constexpr
):  # see ulps.position
    exponent = _exponent(x, EMIN, EMAX)
    steps = tl.abs(x) * _power(P - 1 - exponent)
    # Rounds to nearest, ties to even, where the number is not an integer already.
    steps = tl.where(steps < 4503599627370496.0, (steps + 4503599627370496.0) - 4503599627370496.0,
                     steps)  # fmt: skip
    place = steps + ((exponent - EMIN) << (P - 1)).to(tl.float64)
    place = tl.where(place > LAST, INFINITY, place)
    return tl.where(x < 0, -place, tl.where(x != x, x, place))


@triton.jit
def _ladder(raw):  # see ulps.ordered
    if raw.dtype.primitive_bitwidth == 16:
        bits = raw.to(tl.int16, bitcast=True).to(tl.int32)
        sign = bits >> 31
        return ((bits & 0x7FFF) ^ sign) - sign
    elif raw.dtype.primitive_bitwidth == 32:
        bits = raw.to(tl.int32, bitcast=True)
        sign = bits >> 31
        return ((bits & 0x7FFFFFFF) ^ sign) - sign
    else:
        bits = raw.to(tl.int64, bitcast=True)
        sign = bits >> 63
        return ((bits & 0x7FFFFFFFFFFFFFFF) ^ sign) - sign


@triton.jit
def _widen(raw):
    if raw.dtype == tl.bfloat16:  # by its bits, which no mode flushes to zero
        bits = raw.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True).to(tl.float64)
    elif raw.dtype == tl.float16:
        return raw.to(tl.float32).to(tl.float64)
    else:
        return raw.to(tl.float64)


@triton.jit
def _statistics(
    e_ptr,  # [n] expected
    g_ptr,  # [n] got
    limits_ptr,  # [NT] float64, ascending
    floats_ptr,  # [programs, 8] float64 out
    ints_ptr,  # [programs, 16] int64 out
    n,  # elements
    run,  # elements a program measures
    NT: tl.constexpr,
    BITS: tl.constexpr,  # both have one type: count its units by bits
    TRUTH: tl.constexpr,  # expected is a truth for got
    P: tl.constexpr,  # the coarser format: precision, exponents, place of its largest number
    EMIN: tl.constexpr,
    EMAX: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    start = pid * run
    stop = tl.minimum(start + run, n)
    lanes = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.float64)
    ratio_top = tl.zeros([BLOCK], tl.float64)
    error_top = tl.zeros([BLOCK], tl.float64)
    far_top = tl.zeros([BLOCK], tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    signed = tl.zeros([BLOCK], tl.float64)
    key_top = tl.full([BLOCK], -9223372036854775808, tl.int64)
    odd = tl.zeros([BLOCK], tl.int64)  # fields of 16 bits: dnan, nan, dinf, zeros
    finite = tl.zeros([BLOCK], tl.int32)
    low = tl.zeros([BLOCK], tl.int64)  # fields of 16 bits: buckets 0 to 3, 4 to 7
    high = tl.zeros([BLOCK], tl.int64)
    for offset in range(start, stop, BLOCK):
        at = offset + lanes
        inside = at < stop
        e_raw = tl.load(e_ptr + at, mask=inside, other=0.0)
        g_raw = tl.load(g_ptr + at, mask=inside, other=0.0)
        e = _widen(e_raw)
        g = _widen(g_raw)
        e_nan = e != e
        g_nan = g != g
        both = e_nan & g_nan
        one = e_nan ^ g_nan
        same = (e == g) | both
        d = g - e
        d = tl.where(same, 0.0, tl.where(one, INFINITY, d))
        size = tl.abs(d)
        is_finite = size < INFINITY
        top = tl.maximum(top, size)
        total += size
        signed += tl.where(is_finite, d, 0.0)
        finite += (is_finite & inside).to(tl.int32)

        e_size = tl.abs(e)
        e_fits = e_size < INFINITY
        g_fits = tl.abs(g) < INFINITY
        apart = (~same) & (~one) & (~(e_fits & g_fits))
        zero = e == 0.0
        missed = zero & (size > 0)
        odd += (one.to(tl.int64) + (both.to(tl.int64) << 16) + (apart.to(tl.int64) << 32)
                + (missed.to(tl.int64) << 48))  # fmt: skip
        ratio = size / tl.where(zero, 1.0, e_size)
        ratio = tl.where(zero | (size == 0), 0.0, tl.where(ratio != ratio, INFINITY, ratio))
        ratio_top = tl.maximum(ratio_top, ratio)

        if BITS:
            x = _ladder(e_raw)
            y = _ladder(g_raw)
            if e_raw.dtype.primitive_bitwidth == 64:
                distance = tl.maximum(x, y) - tl.minimum(x, y)
            else:
                distance = tl.maximum(x, y).to(tl.int64) - tl.minimum(x, y).to(tl.int64)
            distance = tl.where(e_fits & g_fits, distance, 0)
            key_top = tl.maximum(key_top, distance ^ -9223372036854775808)
        else:
            far = tl.abs(_place(e, P, EMIN, EMAX, LAST) - _place(g, P, EMIN, EMAX, LAST))
            far_top = tl.maximum(far_top, tl.where(far != far, 0.0, far))
        if TRUTH:
            error = size * _power(P - 1 - _exponent(e, EMIN, EMAX))
            error_top = tl.maximum(error_top, error)

        bucket = tl.zeros([BLOCK], tl.int32)
        for k in tl.static_range(NT):
            bucket += (size > tl.load(limits_ptr + k)).to(tl.int32)
        one64 = tl.full([BLOCK], 1, tl.int64)
        field = (bucket - 1).to(tl.int64)
        low += tl.where((bucket > 0) & (bucket <= 4), one64 << ((field & 3) * 16), 0)
        high += tl.where(bucket > 4, one64 << ((field & 3) * 16), 0)

    out = floats_ptr + pid * 8
    tl.store(out, tl.max(top, 0))
    tl.store(out + 1, tl.max(ratio_top, 0))
    tl.store(out + 2, tl.max(error_top, 0))
    tl.store(out + 3, tl.max(far_top, 0))
    tl.store(out + 4, tl.sum(total, 0))
    tl.store(out + 5, tl.sum(signed, 0))
    to = ints_ptr + pid * 16
    tl.store(to, tl.max(key_top, 0))
    for k in tl.static_range(4):
        tl.store(to + 1 + k, tl.sum((odd >> (16 * k)) & 0xFFFF, 0))
        tl.store(to + 6 + k, tl.sum((low >> (16 * k)) & 0xFFFF, 0))
        tl.store(to + 10 + k, tl.sum((high >> (16 * k)) & 0xFFFF, 0))
    tl.store(to + 5, tl.sum(finite.to(tl.int64), 0))


@functools.lru_cache(maxsize=64)
def _limits(limits: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(limits or (0.0,), dtype=torch.float64, device=device)


def partial_statistics(
    e: torch.Tensor, g: torch.Tensor, limits: list[float], how: Plan,
    programs: int, steps: int, block: int,
) -> tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]:  # fmt: skip
    """Elements a program, and the partial results: float64 [programs, 8], int64 [programs, 16]."""
    n = e.numel()
    run = triton.cdiv(triton.cdiv(n, programs), block) * block
    run = min(run, steps * block)
    programs = triton.cdiv(n, run)
    floats = torch.empty((programs, 8), dtype=torch.float64, device=e.device)
    ints = torch.empty((programs, 16), dtype=torch.int64, device=e.device)
    bounds = _limits(tuple(limits), e.device)
    assert how.coarse is not None
    _statistics[(programs,)](
        e, g, bounds, floats, ints, n, run,
        NT=len(limits), BITS=how.same, TRUTH=how.truth is not None, BLOCK=block,
        num_warps=4, **format_of(how.coarse.name),
    )  # fmt: skip
    return run, floats.cpu().numpy(), ints.cpu().numpy()
