"""How two tensors differ: by torch on the CPU, a piece at a time.

Every difference is taken in float64 (in complex128 for complex types; 64-bit integers by halves,
so that nothing overflows). A piece of the two tensors is widened, measured and forgotten, which
keeps the extra memory bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from roundoff.describe import TypedTensor
from roundoff.dtypes import DType, dtype_info

from .bits import FAR, coarser, steps_apart
from .difference import Difference, identical
from .pieces import split

#: Elements of a piece for each thread: what the caches of a core hold in several copies.
PIECE = 1 << 15


def measure(
    expected: TypedTensor, got: TypedTensor, thresholds: Sequence[float] = ()
) -> Difference:
    """The difference of two tensors of one shape, on whatever devices they are."""
    shape, infos = tuple(expected.tensor.shape), (expected.info, got.info)
    total = identical(expected.tensor.numel(), thresholds)
    coarse = _coarse(infos)
    offset = worst = 0
    for parts in split((expected.tensor, got.tensor), PIECE * torch.get_num_threads()):
        e, g = (t.reshape(-1).cpu() for t in parts)
        wide, wide_got, size = _apart(e, g, infos)
        top = size.amax().item()
        finite = top < math.inf
        if not finite:
            _settle(total, wide, wide_got, size)
            top = size.amax().item()
        if top > total["abs"]:
            total["abs"], worst = top, offset + int(size.numpy().argmax())
        offset += len(size)
        total["sum"] += size.sum().item()
        total["differ"] += int(size.count_nonzero())
        for threshold in thresholds:
            if threshold < top:
                total["rep"][f">{threshold}"] += int((size > threshold).sum())
        if coarse is not None:
            if wide.is_complex():
                e, g = (torch.view_as_real(t).reshape(-1) for t in (wide, wide_got))
            steps = steps_apart(e, g, coarse, finite).max()
            total["ulp"] = max(total["ulp"], math.inf if steps == FAR else int(steps))
        _add_relative(total, wide.abs(), size)
    if coarse is None:
        total["ulp"] = int(total["abs"])
    total["rel"] = math.inf if total["zeros"] else total["rel_nonzero"]
    if total["abs"] > 0:
        index = tuple(int(i) for i in np.unravel_index(worst, shape))
        total["argm"] = index
        total.update(expected=expected.tensor[index].item(), got=got.tensor[index].item())
    return total


def _coarse(infos: Sequence[DType]) -> DType | None:
    """The floating type whose units are counted; None for integers."""
    parts = {"complex64": "float32", "complex128": "float64"}
    floats = [dtype_info(parts.get(i.name, i.name)) for i in infos]
    floats = [i for i in floats if i.is_float]
    return coarser(*floats) if floats else None


def _apart(
    e: torch.Tensor, g: torch.Tensor, infos: Sequence[DType]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both widened, and the sizes of their differences."""
    is_complex = any(i.kind == "complex" for i in infos)
    wide, wide_got = (t.to(torch.complex128 if is_complex else torch.float64) for t in (e, g))
    if is_complex or all(i.is_float or i.bits < 64 for i in infos):
        return wide, wide_got, (wide_got - wide).abs()
    (high, low), (high_got, low_got) = map(_halves, (e, g), infos)
    return wide, wide_got, ((high_got - high) + (low_got - low)).abs()


def _halves(piece: torch.Tensor, info: DType) -> tuple[torch.Tensor, torch.Tensor]:
    """Two parts of numbers, each exact in float64: of integers the upper and lower 32 bits.

    The upper parts of two integers, or of an integer and a float near it, differ exactly.
    """
    if info.is_float:
        wide = piece.to(torch.float64)
        return wide, torch.zeros_like(wide)
    unsigned = info.name == "uint64"
    bits = piece.view(torch.int64) if unsigned else piece.to(torch.int64)
    high = (bits >> 32) & 0xFFFFFFFF if unsigned else bits >> 32
    return high.to(torch.float64) * 2.0**32, (bits & 0xFFFFFFFF).to(torch.float64)


def _settle(total: Difference, e: torch.Tensor, g: torch.Tensor, size: torch.Tensor) -> None:
    """Decide the differences that involve an infinity or a NaN, and count them."""
    e_nan, g_nan = e.isnan(), g.isnan()
    same = (e == g) | (e_nan & g_nan)
    apart = (e.isinf() | g.isinf()) & ~same & ~e_nan & ~g_nan
    total["dnan"] += float((e_nan ^ g_nan).sum())
    total["dinf"] += int(apart.sum())
    # NaN beside a number, and infinite complex parts that cancel.
    size.masked_fill_(size.isnan(), math.inf).masked_fill_(same & ~e.isfinite(), 0.0)


def _add_relative(total: Difference, e_size: torch.Tensor, size: torch.Tensor) -> None:
    out = size / e_size
    top = out.amax().item()
    if not top < math.inf:  # a zero, an infinity or a NaN
        zero = e_size == 0
        total["zeros"] += int((zero & (size != 0)).sum())
        out.masked_fill_(out.isnan(), math.inf).masked_fill_(zero | (size == 0), 0.0)
        top = out.amax().item()
    total["rel_nonzero"] = max(total["rel_nonzero"], top)
