"""The ladder of layer norm: each step against float64, in any shape, and what it is compiled to."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import ArgumentError, ShapeError, UnsupportedError, WorkerError
from roundoff.kernels import ahead, interpreting, ladder, shuffled_programs

DEVICE = "cpu" if interpreting() else "cuda"
TYPES = (torch.float16, torch.bfloat16, torch.float32)
steps = pytest.mark.parametrize("name", ladder.BACKWARD)


def inputs(rows, columns, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(rows, columns, generator=generator) for _ in "xd")
    w, b = (torch.rand(columns, generator=generator) for _ in "wb")
    return [t.to(dtype).to(DEVICE) for t in (x - 2.3, w, b, 0.1 * dy)]


def truth(x, w, b, dy, eps=1e-5):
    """y, mean, rstd, dx, dw, db in float64."""
    x, w, b, dy = (t.double() for t in (x, w, b, dy))
    leaves = [t.requires_grad_() for t in (x, w, b)]
    y = torch.nn.functional.layer_norm(x, w.shape, w, b, eps)
    mean = x.detach().mean(1)
    rstd = (x.detach().var(1, correction=0) + eps).rsqrt()
    return y.detach(), torch.stack([mean, rstd]), torch.autograd.grad(y, leaves, dy)


def near(a, e, dtype, rows=1, small=4.0):
    """Within one rounding of the type, and that of float32 sums of so many rows."""
    largest = e.abs().max().item()
    computed = 16 * rows * torch.finfo(torch.float32).eps * max(largest, 1.0) * small
    # Interpreted, bfloat16 is cut off, not rounded: a whole unit.
    assert (a.double() - e).abs().max() <= 1.01 * torch.finfo(dtype).eps * largest + computed


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(3, 150),
    dtype=st.sampled_from(TYPES),
    piece=st.sampled_from([8, 32, 256]),
    forward=st.sampled_from(ladder.FORWARD),
    backward=st.sampled_from(ladder.BACKWARD),
)
def test_any_shape_against_float64(rows, columns, dtype, piece, forward, backward):
    x, w, b, dy = inputs(rows, columns, dtype, seed=columns)
    y, stats, gradients = truth(x, w, b, dy)
    got_y, got_stats = ladder.forward(forward, x, w, b, piece=piece)
    near(got_y, y, dtype)
    near(got_stats, stats, torch.float32)
    results = ladder.backward(backward, dy, x, w, got_stats, piece=piece)
    for a, e, more in zip(results, gradients, (1, rows, rows), strict=True):
        assert (a.shape, a.dtype) == (e.shape, dtype)
        near(a, e, dtype, more)


@pytest.mark.parametrize("name", ladder.FORWARD)
def test_every_forward_at_the_sizes_that_suit_a_gpu(name):
    x, w, b, dy = inputs(2, 2500, torch.float16)
    y, stats, _ = truth(x, w, b, dy)
    got = ladder.forward(name, x, w, b)
    near(got[0], y, torch.float16)
    near(got[1], stats, torch.float32)


@steps
def test_every_backward_at_the_sizes_that_suit_a_gpu(name):
    x, w, b, dy = inputs(3, 2500, torch.float16)
    _, stats, gradients = truth(x, w, b, dy)
    results = ladder.backward(name, dy, x, w, stats.float())
    for a, e in zip(results, gradients, strict=True):
        near(a, e, torch.float16, rows=3)


@steps
def test_only_atomics_depend_on_the_order_of_programs(name):
    if not interpreting():
        pytest.skip("needs the interpreter's order of programs")
    x, w, b, dy = inputs(12, 20, torch.float32)
    _, stats = ladder.forward("pieces", x, w, b)
    seen = set()
    for seed in range(3):
        with shuffled_programs(seed):
            results = ladder.backward(name, dy, x, w, stats, piece=16)
        seen.add(tuple(t.numpy().tobytes() for t in results))
    assert (len(seen) > 1) == (name == "atomic")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda x, w, dy: ("no", x, w, dy), ArgumentError, "there is no such step"),
        (lambda x, w, dy: ("one block", x, w, dy), ArgumentError, "there is no such step"),
        (lambda x, w, dy: ("pieces", x, w[:5], dy), ShapeError, "the weight"),
        (lambda x, w, dy: ("pieces", x, w, dy[:2]), ShapeError, "one shape (M, N)"),
        (lambda x, w, dy: ("pieces", x[0], w, dy[0]), ShapeError, "one shape (M, N)"),
        (lambda x, w, dy: ("pieces", x[:0], w, dy[:0]), ShapeError, "one shape (M, N)"),
        (lambda x, w, dy: ("pieces", x, w.double(), dy), ArgumentError, "of one type"),
        (lambda x, w, dy: ("pieces", x, w, dy.T.contiguous().T), ArgumentError, "contiguous"),
    ],
)
def test_what_a_lesson_does_not_take(change, error, text):
    x, w, _, dy = inputs(4, 6, torch.float32)
    name, x, w, dy = change(x, w, dy)
    with pytest.raises(error) as caught:
        ladder.backward(name, dy, x, w, torch.zeros(2, 4, device=DEVICE))
    assert text in str(caught.value)


def test_rows_that_do_not_fit_a_step():
    x = torch.zeros(1, 32768, dtype=torch.float16, device=DEVICE)
    with pytest.raises(ShapeError, match="a row does not fit the step prefetch: got 32768"):
        ladder.backward("prefetch", x, x, x[0], torch.zeros(2, 1, device=DEVICE))
    with pytest.raises(ShapeError, match="does not fit the step tiles: got 32768"):
        ahead.compiled_ahead([("backward", "tiles", 32768)])
    assert ladder.fits("backward", "tiles", 4096)
    assert not ladder.fits("backward", "tiles", 4096, torch.float32)


def test_a_cpu_tensor_for_compiled_kernels(monkeypatch):
    runtime = importlib.import_module("roundoff.kernels._runtime")
    monkeypatch.setattr(runtime, "interpreting", lambda: False)
    x = torch.ones(2, 4)
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):
        ladder.forward("pieces", x, x[0], x[0])


def test_compiled_ahead_keeps_the_order_of_its_cases():
    cases = [("forward", "one block", 1024), ("backward", "two stages", 4096)]
    cases += [("forward", "one block", 512)]
    rows = ahead.compiled_ahead(cases)
    assert [(r["direction"], r["step"], r["N"]) for r in rows] == cases
    assert [r["warps"] for r in rows] == [4, 8, 2]
    for row in rows:
        assert 16 <= row["registers"] <= 255
        assert row["spilled"] == 0
    threads = 32 * rows[1]["warps"] * rows[1]["registers"]  # the one that registers limit
    assert threads * rows[1]["fit"] <= 65536 < (threads + 8 * 256) * (rows[1]["fit"] + 1)


def test_a_compiler_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(ahead, "_CHILD", "raise SystemExit('no compiler')")
    with pytest.raises(WorkerError, match="no compiler"):
        ahead.compiled_ahead([("forward", "one block", 64)])


@pytest.mark.slow(reason="compiled: only a change of the kernels or of Triton can break it")
def test_every_step_fits_a_multiprocessor_where_it_says_so():
    cases = [
        (direction, name, n)
        for direction, names in (("forward", ladder.FORWARD), ("backward", ladder.BACKWARD))
        for name in names
        for n in (4096, 8704, 32768)
        if ladder.fits(direction, name, n)
    ]
    for row in ahead.compiled_ahead(cases):
        assert row["fit"] >= (2 if row["step"] == "two programs" else 1), row
        if row["step"] in ("pieces", "packed", "prefetch", "tiles") and row["N"] < 16384:
            assert row["spilled"] <= 8, row
