# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The statistics of :mod:`roundoff.compare.stats` in one pass over two tensors of a GPU, by Triton.

Separate torch calls would read the tensors some thirty times; this kernel reads each once. Each
program measures one run of elements in float64 and writes its partial results; the host adds
them, exactly for the sums, so that a result does not depend on the order of programs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from roundoff.describe import TypedTensor
from roundoff.dtypes import dtype_info

from .stats import DtypePair, Stats, safe_fsum
from .ulps import last_place

BLOCK = 256  # an element a thread: 64 registers, so that many programs run at once
FIELDS = 8  # thresholds at most
_TYPES = ("float64", "float32", "float16", "bfloat16")
INFINITY = tl.constexpr(float("inf"))
WIDTH = tl.constexpr(20)


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
def _store_sum(to, count):
    tl.store(to, tl.sum(count.to(tl.int64), 0))


@triton.jit
def _statistics(
    e_ptr,  # [n] expected
    g_ptr,  # [n] got
    limits_ptr,  # [8] float64, ascending, filled up with infinity
    out_ptr,  # [programs, WIDTH] int64 out; float64 are stored as their bits
    n,  # elements
    steps,  # blocks of elements a program measures
    CLEAN: tl.constexpr,  # no NaN and no infinity: the first sum says whether that held
    BITS: tl.constexpr,  # both have one type: count its units by bits
    TRUTH: tl.constexpr,  # expected is a truth for got
    P: tl.constexpr,  # the coarser format: precision, exponents, place of its largest number
    EMIN: tl.constexpr,
    EMAX: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    start = pid * steps * BLOCK
    lanes = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.float64)
    when = tl.zeros([BLOCK], tl.int32)
    ratio_top = tl.zeros([BLOCK], tl.float64)
    error_top = tl.zeros([BLOCK], tl.float64)
    far_top = tl.zeros([BLOCK], tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    signed = tl.zeros([BLOCK], tl.float64)
    if e_ptr.dtype.element_ty.primitive_bitwidth == 64:
        unit_top = tl.full([BLOCK], -9223372036854775808, tl.int64)
    else:
        unit_top = tl.zeros([BLOCK], tl.uint32)
    zeros = tl.zeros([BLOCK], tl.int32)
    dnan = tl.zeros([BLOCK], tl.int32)
    nan = tl.zeros([BLOCK], tl.int32)
    dinf = tl.zeros([BLOCK], tl.int32)
    unfit = tl.zeros([BLOCK], tl.int32)
    c0 = tl.zeros([BLOCK], tl.int32)
    c1 = tl.zeros([BLOCK], tl.int32)
    c2 = tl.zeros([BLOCK], tl.int32)
    c3 = tl.zeros([BLOCK], tl.int32)
    c4 = tl.zeros([BLOCK], tl.int32)
    c5 = tl.zeros([BLOCK], tl.int32)
    c6 = tl.zeros([BLOCK], tl.int32)
    c7 = tl.zeros([BLOCK], tl.int32)
    t0 = tl.load(limits_ptr)
    t1 = tl.load(limits_ptr + 1)
    t2 = tl.load(limits_ptr + 2)
    t3 = tl.load(limits_ptr + 3)
    t4 = tl.load(limits_ptr + 4)
    t5 = tl.load(limits_ptr + 5)
    t6 = tl.load(limits_ptr + 6)
    t7 = tl.load(limits_ptr + 7)
    blocks = tl.minimum(steps, tl.cdiv(n - start, BLOCK)).to(tl.int32)
    for step in range(blocks):
        first = start + step * BLOCK
        at = first + lanes
        if first + BLOCK <= n:  # no mask: it would split wide loads
            e_raw = tl.load(e_ptr + at)
            g_raw = tl.load(g_ptr + at)
        else:  # two equal numbers change nothing
            e_raw = tl.load(e_ptr + at, mask=at < n, other=1.0)
            g_raw = tl.load(g_ptr + at, mask=at < n, other=1.0)
        e = _widen(e_raw)
        g = _widen(g_raw)
        d = g - e
        e_size = tl.abs(e)
        if CLEAN:
            signed += d
        else:
            e_nan = e != e
            g_nan = g != g
            both = e_nan & g_nan
            one = e_nan ^ g_nan
            same = (e == g) | both
            d = tl.where(same, 0.0, tl.where(one, INFINITY, d))
            fits = (e_size < INFINITY) & (tl.abs(g) < INFINITY)
            finite = tl.abs(d) < INFINITY
            signed += tl.where(finite, d, 0.0)
            dnan += one.to(tl.int32)
            nan += both.to(tl.int32)
            dinf += ((~same) & (~one) & (~fits)).to(tl.int32)
            unfit += (~finite).to(tl.int32)
        size = tl.abs(d)
        total += size
        larger = size > top
        top = tl.where(larger, size, top)
        when = tl.where(larger, step, when)

        zero = e == 0.0
        zeros += (zero & (size > 0)).to(tl.int32)
        ratio = size / tl.where(zero, INFINITY, e_size)
        if not CLEAN:
            ratio = tl.where(zero | (size == 0), 0.0, tl.where(ratio != ratio, INFINITY, ratio))
        ratio_top = tl.where(ratio > ratio_top, ratio, ratio_top)

        if BITS:
            x = _ladder(e_raw)
            y = _ladder(g_raw)
            distance = tl.maximum(x, y) - tl.minimum(x, y)  # as unsigned; it may wrap
            if not CLEAN:
                distance = tl.where(fits, distance, 0)
            if e_ptr.dtype.element_ty.primitive_bitwidth == 64:
                unit_top = tl.maximum(unit_top, distance ^ -9223372036854775808)
            else:
                unit_top = tl.maximum(unit_top, distance.to(tl.uint32, bitcast=True))
        else:
            far = tl.abs(_place(e, P, EMIN, EMAX, LAST) - _place(g, P, EMIN, EMAX, LAST))
            far_top = tl.maximum(far_top, tl.where(far != far, 0.0, far))
        if TRUTH:
            error = size * _power(P - 1 - _exponent(e, EMIN, EMAX))
            error_top = tl.maximum(error_top, error)

        c0 += (size > t0).to(tl.int32)
        c1 += (size > t1).to(tl.int32)
        c2 += (size > t2).to(tl.int32)
        c3 += (size > t3).to(tl.int32)
        c4 += (size > t4).to(tl.int32)
        c5 += (size > t5).to(tl.int32)
        c6 += (size > t6).to(tl.int32)
        c7 += (size > t7).to(tl.int32)

    floats = out_ptr.to(tl.pointer_type(tl.float64)) + pid * WIDTH
    most = tl.max(top, 0)
    tl.store(floats, most)
    tl.store(floats + 1, tl.max(ratio_top, 0))
    tl.store(floats + 2, tl.max(error_top, 0))
    tl.store(floats + 3, tl.sum(total, 0))
    tl.store(floats + 4, tl.sum(signed, 0))
    if not BITS:
        tl.store(floats + 5, tl.max(far_top, 0))
    out = out_ptr + pid * WIDTH
    if BITS:
        tl.store(out + 5, tl.max(unit_top.to(tl.int64), 0))
    place = start + when.to(tl.int64) * BLOCK + lanes  # of each lane's largest
    tl.store(out + 6, tl.min(tl.where(top == most, place, 9223372036854775807), 0))
    _store_sum(out + 7, zeros)
    _store_sum(out + 8, dnan)
    _store_sum(out + 9, nan)
    _store_sum(out + 10, dinf)
    _store_sum(out + 11, unfit)
    _store_sum(out + 12, c0)
    _store_sum(out + 13, c1)
    _store_sum(out + 14, c2)
    _store_sum(out + 15, c3)
    _store_sum(out + 16, c4)
    _store_sum(out + 17, c5)
    _store_sum(out + 18, c6)
    _store_sum(out + 19, c7)


def measure(
    expected: TypedTensor, got: TypedTensor, pair: DtypePair, thresholds: Sequence[float]
) -> Stats | None:
    """Statistics of two contiguous tensors of one GPU; ``None`` where this kernel cannot.

    It takes float64, float32, float16 and bfloat16, and at most eight thresholds.
    """
    e, g = expected.tensor, got.tensor
    if pair.coarse is None or len(thresholds) > FIELDS:
        return None
    if expected.info.name not in _TYPES or got.info.name not in _TYPES:
        return None
    if not (e.is_contiguous() and g.is_contiguous()):
        return None
    rows = _partial_statistics(e, g, thresholds, pair, clean=True)
    if not np.isfinite(rows.view(np.float64)[:, 3]).all():  # NaN, infinity, or an overflow
        rows = _partial_statistics(e, g, thresholds, pair, clean=False)
    return _gather(rows, e.numel(), len(thresholds), pair)


def _gather(rows: np.ndarray[Any, Any], n: int, thresholds: int, pair: DtypePair) -> Stats:
    """Statistics from what the programs measured; see the stores of the kernel."""
    floats = rows.view(np.float64)
    tops, sums = floats[:, :3].max(axis=0).tolist(), rows[:, 7:].sum(axis=0)
    zeros, dnan, nan, dinf, unfit = sums[:5].tolist()
    total = Stats(n, sums[5 : 5 + thresholds])
    total.abs, total.rel_nonzero, total.err_ulp = tops
    total.sums, total.signed = (
        [safe_fsum(floats[:, 3].tolist())],
        [safe_fsum(floats[:, 4].tolist())],
    )
    total.zeros, total.dnan, total.nan, total.dinf = zeros, dnan, nan, dinf
    total.finite = n - unfit - nan
    total.rel = math.inf if zeros else total.rel_nonzero
    if total.abs > 0:
        total.at = int(rows[floats[:, 0].argmax(), 6])
    if pair.same:
        far = dnan + dinf > 0
        top = int(rows[:, 5].max())
        # The kernel orders distances of 64 bits as signed integers, from the smallest one up.
        total.ulp = math.inf if far else top + 2**63 * (pair.got.bits == 64)
    else:
        most = math.inf if dnan else float(floats[:, 5].max())
        total.ulp = most if most == math.inf else int(most)
    return total


def _partial_statistics(
    e: torch.Tensor, g: torch.Tensor, limits: Sequence[float], pair: DtypePair, clean: bool
) -> np.ndarray[Any, Any]:
    """What each program measured, int64 [programs, WIDTH]: one copy from the device."""
    n = e.numel()
    steps = triton.cdiv(triton.cdiv(n, BLOCK), _programs(e))
    programs = triton.cdiv(n, steps * BLOCK)
    out = torch.empty((programs, WIDTH.value), dtype=torch.int64, device=e.device)
    bounds = _limits(tuple(limits), e.device)
    assert pair.coarse is not None
    _statistics[(programs,)](
        e, g, bounds, out, n, steps,
        CLEAN=clean, BITS=pair.same, TRUTH=pair.truth is not None,
        BLOCK=BLOCK, num_warps=8, **_format_of(pair.coarse.name),
    )  # fmt: skip
    return out.cpu().numpy()


def _programs(tensor: torch.Tensor) -> int:
    if not tensor.is_cuda:  # the interpreter
        return 4
    return 4 * torch.cuda.get_device_properties(tensor.device).multi_processor_count


@functools.lru_cache(maxsize=64)
def _limits(limits: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([*limits, *[float("inf")] * (8 - len(limits))], dtype=torch.float64,
                        device=device)  # fmt: skip


@functools.lru_cache(maxsize=16)
def _format_of(name: str) -> dict[str, Any]:
    """What the kernel must know of a floating type, as compile-time constants."""
    info = dtype_info(name)
    return {"P": info.precision, "EMIN": info.emin, "EMAX": info.emax, "LAST": last_place(info)}
