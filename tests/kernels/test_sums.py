"""The exact sum in Triton: on CUDA where it is, else interpreted."""

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
from roundoff.reductions import binned

from ..paths.test_sums import DATA, wide

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in cast"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # infinities, interpreted
]
DEVICE = "cpu" if interpreting() else "cuda"


def draw(kind, n):
    return torch.from_numpy(kind(n, "float32", np.random.default_rng(n))).float()


by_kind = pytest.mark.parametrize("kind", DATA, ids=lambda kind: kind.__name__)


def in_numpy(x):
    """What NumPy's version makes of the same numbers."""
    return float(binned(x.cpu().resolve_neg().numpy(), axis=None))


def same(a, b):
    return (math.isnan(a) and math.isnan(b)) or (
        a == b and math.copysign(1, a) == math.copysign(1, b)
    )


def assert_exact(x, lanes=64, **choice):
    total = module._sum(x.to(DEVICE), lanes, 1, **choice)
    assert (total.dtype, total.shape) == (x.dtype, ())
    assert same(float(total), in_numpy(x)), (len(x), lanes)


@by_kind
def test_every_length_has_the_bits_of_numpy(kind):
    for n in (0, 1, 65, 5001):
        assert_exact(draw(kind, n), 64 if n < 100 else 1024)


def test_special_values_and_any_bits():
    top, inf, nan = dtype_info("float32").max, math.inf, math.nan
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
        assert_exact(torch.tensor(values))
    rng = np.random.default_rng(0)
    for n in range(1, 20):
        x = torch.from_numpy(rng.integers(-(2**31), 2**31, n)).int().view(torch.float32)
        assert_exact(torch.where(x.isfinite(), x, 1.0) if n % 4 else x)


def test_the_sum_is_rounded_once():
    """A tie, and what is below it: in the last of the 53 bits, far below, and across digits."""
    for scale in (1.0, 2.0**5, 2.0**8):
        for tail in (0.0, 2.0**-20, -(2.0**-20), 2.0**-22, 2.0**-120, -(2.0**-120)):
            x = torch.tensor([scale, scale * 2.0**-24, tail])
            assert_exact(x)
            assert_exact(-x)


def test_neither_order_nor_blocks_nor_programs_show():
    x = draw(wide, 3000)
    want = in_numpy(x)
    for lanes, unroll, programs in ((64, 1, 1), (512, 1, 8), (1024, 4, 1)):
        shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(lanes))]
        assert float(module._sum(shuffled.to(DEVICE), lanes, unroll, most=programs)) == want
    if interpreting():
        with shuffled_programs(1):
            assert float(module._sum(x, 256, 1)) == want


def full_lanes(gap, lower, count):
    """2**count values for each of 64 lanes: they cancel over the lanes, but not in one.

    All bits of the significands are 1, but for the last one of one of the smallest values. It
    decides the result, and a sum that is rounded anywhere shows.
    """
    rng = np.random.default_rng(gap)
    rows, top, eps = 2**count, (gap + 1) // 2, 2.0**-23
    signs = np.full((rows, 64), np.where(np.arange(64) // 2 % 2, 1, -1))
    exponents = np.full((rows, 64), top)
    exponents[0] = top - 12 - lower  # the first attempt leaves room above the first values
    exponents[rows // 2 :] = rng.integers(top - gap, top + 1, (rows // 2, 1))
    exponents[-rows // 4 :] = top - gap
    signs[-rows // 4 :] = rng.permuted(signs[-rows // 4 :], axis=1)
    x = np.ldexp((2 - eps) * signs, exponents)
    x[-1, -1] -= np.ldexp(signs[-1, -1] * eps, top - gap)
    return torch.from_numpy(x.ravel()).float()


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.slow(reason="a minute"))])
def test_no_addition_rounds_in_a_lane_that_is_full(count):
    """At the edges of each window, with as many values as a lane may add."""
    step = 51 - count
    narrow, wide = 2 * step - 24, 4 * step - 24
    # How many binades apart values are, and how far above what the first ones let expect: they fit
    # in a window, or just not, or by far not; of the first attempt, of the second.
    gaps = [narrow - 1, narrow, narrow + 12, wide - 1, wide, wide + 12, 240]
    for gap, lower in [*((gap, 0) for gap in gaps), (narrow - 1, 30)]:
        x = full_lanes(gap, lower, count)
        assert in_numpy(x) != 0
        assert_exact(x, power=count, most=0)  # one program


def test_a_tensor_of_any_shape():
    x = draw(wide, 600).reshape(20, 30).to(DEVICE)
    flat = x.flatten()
    views = [x, x.T, x[::3, 1::2], x[0, 0], flat[1:], x[:1].expand(9, 30), torch._neg_view(x)]
    for view in [*views, flat.as_strided((100, 3), (1, 1))]:
        assert float(sum_binned(view)) == in_numpy(view)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda x: x.double(), DtypeError, "float32"),
        (lambda x: x.half(), DtypeError, r"x.float\(\)"),
        (lambda x: x.requires_grad_(), ArgumentError, "backward"),
    ],
)
def test_what_cannot_be_added_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        sum_binned(change(torch.ones(64, device=DEVICE)))


@pytest.mark.skipif(interpreting(), reason="minutes in the interpreter")
@by_kind
def test_long_sums_on_a_gpu(kind):
    x = draw(kind, 2**22 + 7).cuda()
    shuffled = x[torch.randperm(len(x), device="cuda")]
    made = [float(module._sum(x, 2048, 8)), float(sum_binned(x)), float(sum_binned(shuffled))]
    np.testing.assert_array_equal(made, in_numpy(x))
