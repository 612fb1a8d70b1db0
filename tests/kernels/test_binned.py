"""The exact sum in Triton has the bits of NumPy's: on CUDA where it is, else interpreted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from roundoff.dtypes import dtype_info
from roundoff.errors import ArgumentError, DtypeError
from roundoff.kernels import binned as module
from roundoff.kernels import interpreting, shuffled_programs
from roundoff.kernels.binned import sum_binned
from roundoff.reductions import binned, round_to

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # infinities, interpreted
]
DEVICE = "cpu" if interpreting() else "cuda"
TYPES = [torch.float32, torch.float16, torch.bfloat16]
by_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


def draw(kind: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    smallest = math.log2(dtype_info(dtype).tiny * dtype_info(dtype).eps)
    if kind == "wide":
        exponents = torch.randint(int(smallest), dtype_info(dtype).emax, (n,), generator=generator)
        x = x * 2.0**exponents
    elif kind == "cancelling":
        big = (x * 2.0**9).to(dtype).double()
        x = torch.cat([big, -big.flip(0), 2.0**-9 * x[:3]])
    elif kind == "subnormal":
        x = torch.round(50 * x) * 2.0**smallest
    elif kind == "largest":
        x = torch.sign(x) * dtype_info(dtype).max
    elif kind == "positive":
        x = x.abs()
    return x.to(dtype)


KINDS = ("normal", "positive", "wide", "cancelling", "subnormal", "largest")


def in_numpy(x: torch.Tensor) -> float:
    """What NumPy's version makes of the same numbers."""
    return float(binned(round_to(x.cpu().double().numpy(), x.dtype, storage=True)))


def same(a: float, b: float) -> bool:
    return np.array_equal(a, b, equal_nan=True) and math.copysign(1, a) == math.copysign(1, b)


@by_type
@pytest.mark.parametrize("kind", KINDS)
def test_every_length_has_the_bits_of_numpy(kind: str, dtype: torch.dtype) -> None:
    for n in (0, 1, 2, 63, 64, 65, 1000, 5001):
        x = draw(kind, n, dtype)
        total = sum_binned(x.to(DEVICE), 64 if n < 100 else 1024)
        assert (total.dtype, total.shape) == (dtype, ())
        assert same(float(total), in_numpy(x)), n


@by_type
def test_special_values(dtype: torch.dtype) -> None:
    top, inf, nan = dtype_info(dtype).max, math.inf, math.nan
    for values, want in (
        ([inf, 1.0], inf),
        ([-inf, top, top], -inf),
        ([inf, -inf], nan),
        ([nan, inf], nan),
        ([top, top], inf),
        ([top] * 300 + [-top] * 299, top),
        ([-0.0, -0.0], -0.0),
        ([-0.0] * 100 + [0.0], 0.0),
        ([1.0, -1.0], 0.0),
        ([0.0] * 64 + [1.0] * 32 + [-1.0] * 32, 0.0),
        ([-0.0] * 64 + [-1.0], -1.0),
        ([inf] + [-0.0] * 64, inf),
    ):
        x = torch.tensor(values, dtype=dtype)
        found = float(sum_binned(x.to(DEVICE), 64))
        if math.isnan(want):
            assert math.isnan(found), values
        else:
            assert same(found, want), values


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_sum_is_rounded_once(dtype: torch.dtype) -> None:
    """A tie, and what is below it: in the last of the 53 bits, far below, and across digits."""
    unit = dtype_info(dtype).eps
    lowest = -22 if dtype == torch.float16 else -120
    for scale in (1.0, 2.0**5, 2.0**8):
        for tail in (0.0, *(2.0**k for k in (-20, -22, lowest))):
            for sign in (1, -1):
                x = torch.tensor([scale, scale * unit / 2, sign * tail], dtype=dtype)
                for values in (x, -x):
                    assert same(float(sum_binned(values.to(DEVICE), 64)), in_numpy(values))


def test_what_decides_may_stand_at_any_place_below_a_tie() -> None:
    for exponent in (0, 7, 14, 20, 27):
        for below in range(40, 68, 3):
            x = torch.tensor([1.0, 2.0**-24, 2.0**-below]) * 2.0**exponent
            assert float(sum_binned(x.to(DEVICE), 64)) == 2.0**exponent * (1 + 2.0**-23), below


def test_values_any_number_of_binades_apart() -> None:
    """Few enough for one turn, or too many; what is large cancels."""
    full = 2 - 2.0**-23
    for gap in range(42):
        large, small = torch.full((49,), full), torch.full((8,), full * 2.0**-gap)
        x = torch.cat([large, small, -small[1:], -large])
        assert float(sum_binned(x.to(DEVICE), 64)) == full * 2.0**-gap, gap


@by_type
def test_any_bits(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    for n in range(1, 30):
        whole = rng.integers(-(2**31), 2**31, n) >> (0 if kind == torch.int32 else 16)
        x = torch.from_numpy(whole).to(kind).view(dtype)
        x = torch.where(x.isfinite(), x, 1.0) if n % 4 else x
        found, want = float(sum_binned(x.to(DEVICE), 64)), in_numpy(x)
        assert same(found, want) or (math.isnan(found) and math.isnan(want))


def test_neither_order_nor_blocks_nor_programs_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw("wide", 3000, torch.float32)
    x = x[x.abs() < 2.0**110]
    want = in_numpy(x)
    for block, programs in ((64, 1), (512, 8), (4096, 1)):
        choice = module._CHOICES[torch.float32]._replace(programs=programs)
        monkeypatch.setitem(module._CHOICES, torch.float32, choice)
        shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(block))]
        assert float(sum_binned(shuffled.to(DEVICE), block)) == want
    if interpreting():
        with shuffled_programs(1):
            assert float(sum_binned(x, 256)) == want


def edges(dtype: torch.dtype, count: int) -> list[tuple[int, int]]:
    """How many binades apart values are, and how far above what the first ones let expect.

    They fit in a window, or just not, or by far not: of the first attempt, of the second.
    """
    if dtype == torch.float16:
        return [(29, 0)]
    step, finer = 51 - count, 24 - dtype_info(dtype).precision
    narrow = 2 * step - 24 if dtype == torch.float32 else step - 8
    wide = 4 * step - 24 + finer
    gaps = [narrow - 1, narrow, narrow + 12, wide - 1, wide, wide + 12, 240]
    return [*((gap, 0) for gap in gaps), (narrow - 1, 30)]


def full_lanes(dtype: torch.dtype, gap: int, lower: int, count: int) -> torch.Tensor:
    """2**count values for each of 64 lanes: they cancel over the lanes, but not in one.

    All bits of the significands are 1, but for the last one of one of the smallest values. It
    decides the result, and a sum that is rounded anywhere shows.
    """
    rng = np.random.default_rng(gap)
    rows, top = 2**count, 15 if dtype == torch.float16 else (gap + 1) // 2
    above = {torch.float32: 12, torch.bfloat16: 3, torch.float16: 0}[dtype]
    signs = np.full((rows, 64), np.where(np.arange(64) // 2 % 2, 1, -1))
    exponents = np.full((rows, 64), top)
    exponents[0] = top - above - lower  # the first attempt leaves room above the first values
    exponents[rows // 2 :] = rng.integers(top - gap, top + 1, (rows // 2, 1))
    exponents[-rows // 4 :] = top - gap
    signs[-rows // 4 :] = rng.permuted(signs[-rows // 4 :], axis=1)
    x = np.ldexp((2 - dtype_info(dtype).eps) * signs, exponents)
    x[-1, -1] -= np.ldexp(signs[-1, -1] * dtype_info(dtype).eps, top - gap)
    return torch.from_numpy(x.ravel()).to(dtype)


def check_full_lanes(dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the edges of each window, with as many values as a lane may add."""
    one = module._CHOICES[dtype]._replace(power=count, programs=0)  # one program
    monkeypatch.setitem(module._CHOICES, dtype, one)
    for gap, lower in edges(dtype, count):
        x = full_lanes(dtype, gap, lower, count)
        want = in_numpy(x)
        assert want != 0
        found = float(sum_binned(x.to(DEVICE), 64 * 4 // x.itemsize))
        assert same(found, want), (gap, lower)


@by_type
def test_no_addition_rounds_in_a_lane_that_is_full(dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check_full_lanes(dtype, 3, monkeypatch)


@pytest.mark.slow(reason="a minute in the interpreter")
@by_type
def test_no_addition_rounds_in_a_long_lane(dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (5, 8, 10):
        check_full_lanes(dtype, count, monkeypatch)


def test_a_tensor_of_any_shape() -> None:
    for dtype in TYPES:
        x = draw("normal", 600, dtype).reshape(20, 30).to(DEVICE)
        flat = x.flatten()
        views = [x, x.T, x[::3, 1::2], x[:, :0], x[0, 0], flat[1:], flat[7:200]]
        views += [flat[::2], x[:, 3], x[:1].expand(9, 30), x[0, :1].expand(50), torch._neg_view(x)]
        views += [flat.unfold(0, 40, 7), flat.as_strided((100, 3), (1, 1))]
        for view in views:
            assert float(sum_binned(view, 64)) == in_numpy(view.contiguous().flatten())


@pytest.mark.parametrize(
    ("x", "block", "error", "words"),
    [
        (torch.ones(3, dtype=torch.float64), 64, DtypeError, "reductions.binned"),
        (torch.ones(3, requires_grad=True), 64, ArgumentError, "detach"),
        (torch.ones(3), 48, ArgumentError, "power of two"),
    ],
)
def test_what_cannot_be_added_is_refused(x, block, error, words: str) -> None:
    with pytest.raises(error, match=words):
        sum_binned(x, block)


@pytest.mark.skipif(interpreting(), reason="minutes in the interpreter")
@by_type
@pytest.mark.parametrize("kind", KINDS)
def test_long_sums_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    for n in (2**20, 2**22 + 7):
        x = draw(kind, n, dtype).cuda()
        want = in_numpy(x)
        made = [float(sum_binned(x, block)) for block in (1024, 4096, 16384)]
        made.append(float(sum_binned(x[torch.randperm(len(x), device="cuda")])))
        np.testing.assert_array_equal(made, want)  # wide values of float16 overflow, to NaN
