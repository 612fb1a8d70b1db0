"""The sums in Triton: on CUDA where it is, else interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from roundoff.errors import ArgumentError, DtypeError, ShapeError
from roundoff.kernels import interpreting, shuffled_programs
from roundoff.kernels.reduce import sum_atomic, sum_two_pass
from roundoff.reductions import exact_sum

DEVICE = "cpu" if interpreting() else "cuda"


@pytest.mark.parametrize("add", [sum_atomic, sum_two_pass])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 2, 255, 256, 257, 5000])
def test_the_sum_is_near_the_exact_one(add, dtype, n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    truth, size = float(exact_sum(x.double().numpy())), float(x.double().abs().sum())
    result = add(x.to(DEVICE), 256)
    assert (result.dtype, result.shape) == (torch.float32, ())
    assert abs(float(result) - truth) <= 40 * 2.0**-24 * size


def test_two_passes_do_not_depend_on_the_order_of_the_programs():
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    if not interpreting():
        x = x.cuda()
        assert len({float(sum_two_pass(x)) for _ in range(50)}) == 1
        return
    results = {sum_atomic: set(), sum_two_pass: set()}
    for seed in range(4):
        with shuffled_programs(seed):
            for add, values in results.items():
                values.add(float(add(x, 64)))
    assert len(results[sum_atomic]) > 1
    assert len(results[sum_two_pass]) == 1


def test_more_passes_than_two():
    whole = torch.arange(256, dtype=torch.float32, device=DEVICE)
    assert float(sum_two_pass(whole, 2)) == float(sum_atomic(whole, 64)) == 256 * 255 / 2


@pytest.mark.parametrize(
    ("change", "block", "error"),
    [
        (lambda x: x[::2], 64, ShapeError),
        (lambda x: x.double(), 64, DtypeError),
        (lambda x: x, 1, ArgumentError),
        (lambda x: x, 48, ArgumentError),
    ],
    ids=["strided", "float64", "1", "48"],
)
def test_what_cannot_be_added_is_refused(change, block, error):
    with pytest.raises(error):
        sum_two_pass(change(torch.ones(64, device=DEVICE)), block)
