"""The sums in Triton: near the exact one, and exact; on CUDA where it is, else interpreted."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from roundoff.dtypes import dtype_info
from roundoff.errors import ArgumentError, DtypeError
from roundoff.kernels import binned as module
from roundoff.kernels import interpreting, shuffled_programs
from roundoff.kernels.binned import sum_binned
from roundoff.kernels.reduce import sum_atomic, sum_two_pass
from roundoff.reductions import binned, exact_sum, round_to

from ..paths.test_sums import DATA, normal, wide

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # infinities, interpreted
]
DEVICE = "cpu" if interpreting() else "cuda"
by_type = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


# --- in blocks


@pytest.mark.parametrize("add", [sum_atomic, sum_two_pass])
@by_type
def test_the_sum_is_near_the_exact_one(add, dtype) -> None:
    for n, block in ((1, 256), (256, 256), (257, 256), (5000, 256), (100, 2)):
        x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
        truth, size = float(exact_sum(x.double().numpy())), float(x.double().abs().sum())
        result = add(x.to(DEVICE), block)
        assert (result.dtype, result.shape) == (torch.float32, ())
        assert abs(float(result) - truth) <= 40 * 2.0**-24 * size


def test_two_passes_do_not_depend_on_the_order_of_the_programs() -> None:
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    if not interpreting():
        assert len({float(sum_two_pass(x)) for _ in range(50)}) == 1
        return
    results: dict = {sum_atomic: set(), sum_two_pass: set()}
    for seed in range(4):
        with shuffled_programs(seed):
            for add, values in results.items():
                values.add(float(add(x, 64)))
    assert len(results[sum_atomic]) > 1
    assert len(results[sum_two_pass]) == 1


# --- exact


def draw(kind: Callable[..., np.ndarray], n: int, dtype: torch.dtype) -> torch.Tensor:
    name = str(dtype).removeprefix("torch.")
    return torch.from_numpy(kind(n, name, np.random.default_rng(n))).to(dtype)


by_kind = pytest.mark.parametrize("kind", DATA, ids=lambda kind: kind.__name__)


def in_numpy(x: torch.Tensor) -> float:
    """What NumPy's version makes of the same numbers."""
    return float(binned(round_to(x.cpu().double().numpy(), x.dtype, storage=True)))


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (
        a == b and math.copysign(1, a) == math.copysign(1, b)
    )


def assert_exact(x: torch.Tensor, block: int = 64) -> None:
    total = sum_binned(x.to(DEVICE), block)
    assert (total.dtype, total.shape) == (x.dtype, ())
    assert same(float(total), in_numpy(x)), (len(x), block)


@by_type
@by_kind
def test_every_length_has_the_bits_of_numpy(kind, dtype: torch.dtype) -> None:
    for n in (0, 1, 65, 5001):
        assert_exact(draw(kind, n, dtype), 64 if n < 100 else 1024)


@by_type
def test_special_values_and_any_bits(dtype: torch.dtype) -> None:
    top, inf, nan = dtype_info(dtype).max, math.inf, math.nan
    for values in (
        [inf, 1.0],
        [-inf, top, top],
        [inf, -inf],
        [nan, inf],
        [top, top],
        [-0.0, -0.0],
        [top] * 300 + [-top] * 299,
        [-0.0] * 100 + [0.0],
        [1.0, -1.0],
        [-0.0] * 64 + [-1.0],
        [0.0] * 64 + [1.0] * 32 + [-1.0] * 32,
        [inf] + [-0.0] * 64,
    ):
        assert_exact(torch.tensor(values, dtype=dtype))
    rng = np.random.default_rng(0)
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    for n in range(1, 20):
        whole = rng.integers(-(2**31), 2**31, n) >> (0 if kind == torch.int32 else 16)
        x = torch.from_numpy(whole).to(kind).view(dtype)
        assert_exact(torch.where(x.isfinite(), x, 1.0) if n % 4 else x)


@by_type
def test_the_sum_is_rounded_once(dtype: torch.dtype) -> None:
    """A tie, and what is below it: in the last of the 53 bits, far below, and across digits."""
    unit = dtype_info(dtype).eps
    lowest = -22 if dtype == torch.float16 else -120
    for scale in (1.0, 2.0**5, 2.0**8):
        for tail in (0.0, 2.0**-20, -(2.0**-20), 2.0**-22, 2.0**lowest, -(2.0**lowest)):
            x = torch.tensor([scale, scale * unit / 2, tail], dtype=dtype)
            assert_exact(x)
            assert_exact(-x)


def test_neither_order_nor_blocks_nor_programs_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(wide, 3000, torch.float32)
    want = in_numpy(x)
    for block, programs in ((64, 1), (512, 8), (4096, 1)):
        choice = module._CHOICES[torch.float32]._replace(programs=programs)
        monkeypatch.setitem(module._CHOICES, torch.float32, choice)
        shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(block))]
        assert float(sum_binned(shuffled.to(DEVICE), block)) == want
    if interpreting():
        with shuffled_programs(1):
            assert float(sum_binned(x, 256)) == want


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


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.slow(reason="a minute"))])
@by_type
def test_no_addition_rounds_in_a_lane_that_is_full(dtype, count, monkeypatch) -> None:
    """At the edges of each window, with as many values as a lane may add."""
    one = module._CHOICES[dtype]._replace(power=count, programs=0)  # one program
    monkeypatch.setitem(module._CHOICES, dtype, one)
    step, finer = 51 - count, 24 - dtype_info(dtype).precision
    narrow = 2 * step - 24 if dtype == torch.float32 else step - 8
    wide = 4 * step - 24 + finer
    # How many binades apart values are, and how far above what the first ones let expect: they fit
    # in a window, or just not, or by far not; of the first attempt, of the second.
    gaps = [narrow - 1, narrow, narrow + 12, wide - 1, wide, wide + 12, 240]
    edges = [*((gap, 0) for gap in gaps), (narrow - 1, 30)]
    for gap, lower in [(29, 0)] if dtype == torch.float16 else edges:
        x = full_lanes(dtype, gap, lower, count)
        assert in_numpy(x) != 0
        assert_exact(x, 64 * 4 // x.itemsize)


@by_type
def test_a_tensor_of_any_shape(dtype: torch.dtype) -> None:
    x = draw(normal, 600, dtype).reshape(20, 30).to(DEVICE)
    flat = x.flatten()
    views = [x, x.T, x[::3, 1::2], x[0, 0], flat[1:], x[:1].expand(9, 30), torch._neg_view(x)]
    for view in [*views, flat.as_strided((100, 3), (1, 1))]:
        assert float(sum_binned(view, 64)) == in_numpy(view.contiguous().flatten())


@pytest.mark.parametrize(
    ("add", "change", "block", "error"),
    [
        (sum_two_pass, lambda x: x.double(), 64, DtypeError),
        (sum_atomic, lambda x: x, 48, ArgumentError),
        (sum_binned, lambda x: x.double(), 64, DtypeError),
        (sum_binned, lambda x: x.requires_grad_(), 64, ArgumentError),
    ],
)
def test_what_cannot_be_added_is_refused(add, change, block, error) -> None:
    with pytest.raises(error):
        add(change(torch.ones(64, device=DEVICE)), block)


@pytest.mark.skipif(interpreting(), reason="minutes in the interpreter")
@by_type
@by_kind
def test_long_sums_on_a_gpu(kind, dtype: torch.dtype) -> None:
    x = draw(kind, 2**22 + 7, dtype).cuda()
    made = [float(sum_binned(x, block)) for block in (1024, 4096, 16384)]
    made.append(float(sum_binned(x[torch.randperm(len(x), device="cuda")])))
    np.testing.assert_array_equal(made, in_numpy(x))
