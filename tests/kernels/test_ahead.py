"""What kernels are compiled to, without a GPU."""

import linecache

import pytest
import triton.language as tl

from roundoff.errors import ArgumentError
from roundoff.kernels import ahead
from roundoff.kernels.ahead import Compile
from roundoff.kernels.lessons import kernel, sum_along

C = tl.constexpr


@kernel
def scaled(x):
    return x * 3


@kernel
def row_sum(X, Y, N, P: C):
    cols = tl.arange(0, P)
    x = tl.load(X + tl.program_id(0) * N + cols, mask=cols < N, other=0.0)
    # The row stays in registers until its sum is known.
    tl.store(Y + tl.program_id(0) * N + cols, x - sum_along(scaled(x), 0), mask=cols < N)


def test_kernels_are_compiled_from_their_source_in_their_order():
    rows = ahead.compiled_ahead([Compile(row_sum, w, {"P": p}) for w, p in ((8, 4096), (2, 8192))])
    for row in rows:
        assert 10 <= row["registers"] <= 255
        assert row["spilled"] == 0
    assert rows[1]["registers"] > 2 * rows[0]["registers"]  # eight times the columns of a thread


SOURCE = """
import triton.language as tl
from roundoff.kernels.lessons import kernel
C = tl.constexpr


@kernel
def twice(X, Y, N, P: C):
    cols = tl.arange(0, P)
    tl.store(Y + cols, 2 * tl.load(X + cols, mask=cols < N), mask=cols < N)
"""


def made_at(path):
    names = {"__name__": "a_page"}
    exec(compile(SOURCE, str(path), "exec"), names)
    return Compile(names["twice"], 4, {"P": 128})


def test_a_kernel_of_a_cell_and_one_of_a_file(tmp_path, monkeypatch):
    cell = "/nowhere/cell-1.py"
    monkeypatch.setitem(linecache.cache, cell, (1, None, SOURCE.splitlines(True), cell))
    page = tmp_path / "page.py"
    page.write_text(SOURCE)
    cases = [made_at(cell), made_at(page)]
    rows = ahead.compiled_ahead(cases)
    assert rows[0] == rows[1]


def test_a_kernel_without_source_is_refused():
    """By us, or by a Triton that reads the source when the kernel is defined."""
    with pytest.raises((ArgumentError, ValueError), match=r"twice|defined in a Python file"):
        ahead.compiled_ahead([made_at("/nowhere/cell-2.py")])
