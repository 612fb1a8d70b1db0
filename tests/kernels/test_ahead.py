"""What kernels are compiled to, without a GPU."""

import pytest
import torch
import triton.language as tl

from roundoff.errors import ArgumentError, WorkerError
from roundoff.kernels import ahead, interpreting
from roundoff.kernels.ahead import Compile
from roundoff.kernels.lessons import kernel, plain_loop, simple_backward, sum_along

DEVICE = "cpu" if interpreting() else "cuda"
C = tl.constexpr
FACTOR = 3


@kernel
def scaled(x):
    return x * FACTOR


@kernel
def row_sum(X, Y, N, P: C):
    cols = tl.arange(0, P)
    x = tl.load(X + tl.program_id(0) * N + cols, mask=cols < N, other=0.0)
    tl.store(Y + tl.program_id(0), sum_along(scaled(x), 0))


def test_a_constant_by_another_name_is_one_in_the_interpreter_too():
    x, y = torch.ones(2, 5, device=DEVICE), torch.empty(2, device=DEVICE)
    text = "@kernel\n"  # a kernel is compiled from its source, with what it names
    assert text + "def scaled" in ahead._source(row_sum)
    if not interpreting():
        pytest.skip("FACTOR is no constant of the compiler")
    row_sum[(2,)](x, y, 5, P=8)
    assert y.tolist() == [15.0, 15.0]


def test_compiled_ahead_keeps_the_order_of_its_cases():
    cases = [("forward", "roundoff", 1024), Compile(simple_backward, 8, {"P": 4096})]
    cases += [Compile(simple_backward, 2, {"P": 512})]
    rows = ahead.compiled_ahead(cases)
    assert [r["warps"] for r in rows][1:] == [8, 2]
    for row in rows:
        assert 16 <= row["registers"] <= 255
        assert row["spilled"] == 0
    threads = 32 * rows[1]["warps"] * rows[1]["registers"]  # the one that registers limit
    assert threads * rows[1]["fit"] <= 65536 < (threads + 8 * 256) * (rows[1]["fit"] + 1)


def test_a_kernel_is_compiled_from_its_source_with_what_it_names():
    source = ahead._source(row_sum)
    assert source.index("FACTOR = 3") < source.index("def scaled") < source.index("def row_sum")
    assert "from triton.language import constexpr as C\n" in source
    assert "from roundoff.kernels._runtime import sum_along as sum_along\n" in source
    assert "simple_backward" not in ahead._source(plain_loop)


def test_what_there_is_not():
    with pytest.raises(ArgumentError, match="there is no such kernel"):
        ahead.compiled_ahead([("backward", "tiles", 4096)])


def test_a_compiler_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(ahead, "_CHILD", "raise SystemExit('no compiler')")
    with pytest.raises(WorkerError, match="no compiler"):
        ahead.compiled_ahead([("forward", "roundoff", 64)])
