"""LayerNorm kernels: against float64, against torch, and against themselves."""

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from roundoff.kernels import interpreting, layer_norm, shuffled_programs
from roundoff.kernels.ahead import compiled_ahead

engine = importlib.import_module("roundoff.kernels._row_norm")
tilings = importlib.import_module("roundoff.kernels._norm_tilings")
SOURCE = Path(__file__).parents[2] / "src"
DEVICE = "cpu" if interpreting() else "cuda"
TYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Widths on either side of every way a row is cut.
WIDTHS = (1, 2, 7, 64, 100, 1000, 1024, 1025, 2048, 2049, 3073, 4097, 8704, 12800, 14848)
slow = pytest.mark.slow(reason="only a change of the kernels can break it")


def inputs(rows, columns, dtype, seed=0, offset=-2.3, sd=0.5):
    generator = torch.Generator().manual_seed(seed)
    x = offset + sd * torch.randn(rows, columns, generator=generator)
    dy = 0.1 * torch.randn(rows, columns, generator=generator)
    w, b = (torch.rand(columns, generator=generator) for _ in "wb")
    return [t.to(dtype).to(DEVICE) for t in (x, w, b, dy)]


def gradients(norm, x, w, b, dy, eps=1e-5):
    """y, dx, dw, db as float64."""
    x, w, b = (None if t is None else t.detach().clone().requires_grad_() for t in (x, w, b))
    y = norm(x, x.shape[-1:], w, b, eps)
    wanted = [t for t in (x, w, b) if t is not None]
    return [t.double() for t in (y.detach(), *torch.autograd.grad(y, wanted, dy))]


def truth(x, w, b, dy, eps=1e-5):
    tensors = (None if t is None else t.double() for t in (x, w, b, dy))
    return gradients(torch.nn.functional.layer_norm, *tensors, eps)


def rms(error):
    return error.square().mean().sqrt().item()


def spacing(values, dtype):
    """Units in the last place of a type at float64 values."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(values.abs().clamp_min(info.tiny))[1].double() - 1
    return torch.exp2(exponent) * info.eps


@pytest.mark.parametrize(
    ("columns", "dtype"),
    # Each width in one type, which takes turns; the others are slow.
    [
        pytest.param(columns, dtype, marks=[slow] if (i - j) % len(TYPES) else [])
        for i, columns in enumerate(WIDTHS)
        for j, dtype in enumerate(TYPES)
    ],
    ids=str,
)
def test_errors_are_no_larger_than_those_of_torch(columns, dtype):
    # Few values make a noisy root mean square: several draws are pooled.
    rows, draws = (37, 16) if columns < 64 else (37, 2) if columns < 2000 else (5, 3)
    ours, theirs, units = ([[] for _ in range(4)] for _ in range(3))
    for seed in range(draws):
        data = inputs(rows, columns, dtype, seed)
        exact = truth(*data)
        for i, (a, t, e) in enumerate(
            zip(
                gradients(layer_norm, *data),
                gradients(torch.nn.functional.layer_norm, *data),
                exact,
                strict=True,
            )
        ):
            assert a.shape == e.shape
            ours[i].append(a - e)
            theirs[i].append(t - e)
            units[i].append(spacing(e, dtype))
    for name, a, t, u in zip(("y", "dx", "dw", "db"), ours, theirs, units, strict=True):
        error, bound = rms(torch.stack(a)), 1.1 * rms(torch.stack(t)) + rms(torch.stack(u)) / 2
        # One column: dx is 0, and a rounding of what is left of x - mean is no error.
        assert error <= bound + (1e-6 if columns == 1 else 0), (name, error, bound)


@pytest.mark.parametrize("columns", [100, 1024, 5000, 20000])
def test_a_large_offset_costs_no_more_than_in_torch(columns):
    data = inputs(6, columns, torch.float32, offset=1e4, sd=1.0)
    exact = truth(*data)
    for a, e in zip(gradients(layer_norm, *data), exact, strict=True):
        # The rounding of the mean, 2^-11 of a standard deviation at most, moves whole rows.
        assert rms(a - e) <= 2**-11 * max(rms(e), e.abs().max().item())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    leading=st.lists(st.integers(0, 5), max_size=3),
    columns=st.integers(1, 300),
    dtype=st.sampled_from([*TYPES, torch.float64]),
    layout=st.sampled_from(["plain", "transposed", "sliced", "stepped", "expanded"]),
    has_weight=st.booleans(),
    has_bias=st.booleans(),
    parameter=st.sampled_from([None, torch.float32]),
    programs=st.sampled_from([None, 1, 3, 1000]),
)
def test_any_shape_layout_and_parameters(
    leading, columns, dtype, layout, has_weight, has_bias, parameter, programs
):
    generator = torch.Generator().manual_seed(columns)

    def draw(*shape):
        values = torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)
        if layout == "transposed" and len(shape) > 1:
            return values.transpose(0, -1).contiguous().transpose(0, -1)
        if layout == "sliced":
            return torch.cat([values, values], -1)[..., : shape[-1]]
        if layout == "stepped":
            return values.repeat_interleave(2, -1)[..., ::2]
        if layout == "expanded" and len(shape) > 1:
            return values[:1].expand(shape)
        return values

    x, dy = draw(*leading, columns), draw(*leading, columns)
    w = draw(columns).to(parameter or dtype) if has_weight else None
    b = draw(columns).to(parameter or dtype) if has_bias else None

    def norm(x, shape, w, b, eps):
        return layer_norm(x, shape, w, b, eps, programs=programs)

    ours, exact = gradients(norm, x, w, b, dy), truth(x, w, b, dy)
    types = [dtype, dtype, *(t.dtype for t in (w, b) if t is not None)]
    computed = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    rows = max(x.numel() // columns, 1)
    for a, e, kind in zip(ours, exact, types, strict=True):
        assert a.shape == e.shape
        if e.numel():
            largest = e.abs().max().item()
            # Interpreted, bfloat16 is cut off, not rounded: a whole unit.
            stored = torch.finfo(kind).eps * 1.01 * largest
            # Two columns nearly alike: 1 / sqrt(eps) times what they are rounded to.
            size = max(largest, 1.0) * (316 if columns < 3 else 4)
            assert (a - e).abs().max() <= stored + 16 * rows * computed * size


@pytest.mark.parametrize("shape", [pytest.param((17,), marks=slow), (3, 4)])
def test_gradcheck(shape):
    x = torch.randn(3, *shape, dtype=torch.float64, device=DEVICE, requires_grad=True)
    w, b = (torch.rand(shape, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in "wb")
    assert torch.autograd.gradcheck(lambda x, w, b: layer_norm(x, shape, w, b), (x, w, b))


def test_only_what_is_asked_for():
    x, w, b, dy = inputs(5, 33, torch.float32)
    exact = truth(x, w, b, dy)
    for wanted in range(1, 8):
        tensors = [t.clone().requires_grad_(bool(wanted >> i & 1)) for i, t in enumerate((x, w, b))]
        layer_norm(tensors[0], 33, *tensors[1:]).backward(dy)
        for i, t in enumerate(tensors):
            assert (t.grad is not None) == bool(wanted >> i & 1)
            if t.grad is not None:
                torch.testing.assert_close(t.grad.double(), exact[i + 1], rtol=1e-5, atol=1e-5)


def test_empty_batch():
    x, w, b = (torch.zeros(s, device=DEVICE, requires_grad=True) for s in ((0, 3, 8), (8,), (8,)))
    y = layer_norm(x, 8, w, b)
    assert y.shape == x.shape
    y.sum().backward()
    assert (x.grad.shape, w.grad.tolist(), b.grad.tolist()) == (x.shape, [0] * 8, [0] * 8)


@pytest.mark.parametrize(("columns", "dtype"), [(40000, torch.float16), (65536, torch.float32)])
def test_very_wide_rows(columns, dtype):
    data = inputs(2, columns, dtype)
    for a, e in zip(gradients(layer_norm, *data), truth(*data), strict=True):
        assert rms(a - e) <= rms(spacing(e, dtype)) + 1e-6 * rms(e)


# --- the same bits every run -------------------------------------------------------------------

SHAPES = [(70, 64), (40, 1024), (40, 2500), (9, 8704), (9, 17000)]


def results(x, w, b, dy, **options):
    tensors = [t.clone().requires_grad_() for t in (x, w, b)]
    y = layer_norm(tensors[0], x.shape[-1], *tensors[1:], **options)
    return [y.detach(), *torch.autograd.grad(y, tensors, dy)]


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "shape", [*SHAPES[:2], *(pytest.param(shape, marks=slow) for shape in SHAPES[2:])], ids=str
)
def test_bits_do_not_depend_on_the_order_of_programs(shape):
    data = inputs(*shape, torch.float32)
    first = results(*data)
    if not interpreting():
        assert all(same(first, results(*data)) for _ in range(100))
        return
    for seed in range(3):
        with shuffled_programs(seed):
            assert same(first, results(*data))


def test_without_the_fixed_order_the_bits_change(monkeypatch):
    """The test above can fail: partial sums in the order of arrival turn it red."""
    if not interpreting():
        pytest.skip("needs the interpreter's order of programs")
    second, arrived = engine._second_stage, []
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder

    def by_arrival(launch, grid, part, targets, counts):
        # What a lock does: the first program to arrive is the first to be added.
        order = [i for i in dict.fromkeys(arrived) if i < part.shape[1]]
        second(launch, grid, part[:, order].contiguous(), targets, counts)

    monkeypatch.setattr(engine, "_second_stage", by_arrival)
    data = inputs(*SHAPES[1], torch.float32)
    found = []
    for seed in range(3):
        with shuffled_programs(seed):
            shuffled = builder.set_grid_idx

            def noted(x, y, z, shuffled=shuffled):
                shuffled(x, y, z)
                arrived.append(builder.grid_idx[0])

            builder.set_grid_idx = noted
            tensors = [t.clone().requires_grad_() for t in data[:3]]
            y = layer_norm(tensors[0], data[0].shape[-1], *tensors[1:])
            arrived.clear()
            found.append([y.detach(), *torch.autograd.grad(y, tensors, data[3])])
    assert all(same(found[0][:2], f[:2]) for f in found)
    assert not all(same(found[0], f) for f in found)


def test_a_fixed_number_of_programs_ignores_the_machine(monkeypatch):
    data = inputs(50, 500, torch.float32)
    fixed, free = [], []
    for count in (1, 4, 7):
        monkeypatch.setattr(tilings, "multiprocessors", lambda index, count=count: count)
        engine._backward_of.cache_clear()
        engine._cases.clear()
        fixed.append(results(*data, programs=5))
        free.append(results(*data))
    assert same(fixed[0], fixed[1])
    assert same(fixed[0], fixed[2])
    assert not (same(free[0], free[1]) and same(free[0], free[2]))


@pytest.mark.parametrize("columns", [700, 1500, 2500, 4000, 5000, 7000, 9000])
def test_a_row_has_the_same_bits_among_few_and_among_many(columns):
    x, w, b, _ = inputs(3, columns, torch.float16)
    few = layer_norm(x, columns, w, b)
    usual, many = (tilings.forward_tiling(columns, 2, flag) for flag in (False, True))
    likes = map(engine._like, (x, w, b))
    case = engine.Case(engine.LAYER, (columns,), 1e-5, None, *likes, tilings=(many, None))
    assert torch.equal(few, case.forward(x, w, b, None, False)[0])
    assert usual[:4] == many[:4]  # the interpreter has an order of its own


# --- under torch's other machinery --------------------------------------------------------------


def test_operators_for_torch_compile():
    x, w, b, dy = (t.double() for t in inputs(6, 33, torch.float32))
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    forward = torch.ops.roundoff.layer_norm_forward.default
    torch.library.opcheck(forward, (x, w, b, 1e-5, 0))
    torch.library.opcheck(forward, (x.detach(), None, None, 1e-5, 2))
    y, stats = forward(x, w, b, 1e-5, 0)
    ours = torch.autograd.grad(y, (x, w, b), dy)
    assert same(ours, results(x.detach(), w.detach(), b.detach(), dy)[1:])
    assert stats.shape == (2, 6)


def test_torch_compile_gives_the_same_bits():
    x, w, b, dy = inputs(6, 33, torch.float32)

    def model(x, w, b):
        return layer_norm(torch.relu(x), 33, w, b).sin()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    grads = []
    for f in (model, compiled):
        tensors = [t.clone().requires_grad_() for t in (x, w, b)]
        grads.append(torch.autograd.grad(f(*tensors), tensors, dy))
    assert same(*grads)


@pytest.mark.skipif(interpreting(), reason="needs a GPU")
def test_cuda_graph():
    data = inputs(64, 1024, torch.float16)
    first = results(*data)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(*data)
    graph.replay()
    assert same(first, captured)


def test_triton_imported_first_does_not_matter():
    if not interpreting():
        pytest.skip("needs the interpreter")
    code = """
        import os; os.environ.pop("TRITON_INTERPRET", None)
        import triton, triton.language, torch
        from roundoff.kernels import layer_norm
        x = torch.arange(12.0).reshape(3, 4).requires_grad_()
        layer_norm(x, 4).sum().backward()
        print(x.grad.abs().max().item() < 1e-6)
    """
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout.strip() == "True", done.stderr


# --- errors say what to do ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (((2, 4), 5), {}, ShapeError, "normalized_shape (5,)"),
        (((2, 4), (3, 4)), {}, ShapeError, "are not normalized_shape"),
        (((2, 4), ()), {}, ShapeError, "are not normalized_shape"),
        (((2, 0), 0), {}, ShapeError, "no elements or too many"),
        (((2, 4), 4, (3,)), {}, ShapeError, "weight has another shape: got (3,), expected (4,)"),
        (((2, 4), 4, None, (5,)), {}, ShapeError, "bias has another shape"),
        (((2, 4), 4), {"eps": -1.0}, ArgumentError, "eps must not be negative"),
        (((2, 4), 4), {"eps": float("nan")}, ArgumentError, "eps must not be negative"),
        (((2, 4), 4), {"programs": 0}, ArgumentError, "programs out of range: got 0"),
    ],
)
def test_wrong_arguments(arguments, options, error, text):
    x, shape, *parameters = arguments
    tensors = [None if p is None else torch.ones(p, device=DEVICE) for p in parameters]
    with pytest.raises(error) as caught:
        layer_norm(torch.ones(x, device=DEVICE), shape, *tensors, **options)
    assert text in str(caught.value)


def test_wrong_types_and_places():
    with pytest.raises(DtypeError, match=r"got torch\.int32, expected float16"):
        layer_norm(torch.ones(2, 4, dtype=torch.int32, device=DEVICE), 4)
    with pytest.raises(ArgumentError, match="another device than x"):
        layer_norm(torch.ones(2, 4, device=DEVICE), 4, torch.ones(4, device="meta"))


def test_a_cpu_tensor_for_compiled_kernels(monkeypatch):
    runtime = importlib.import_module("roundoff.kernels._runtime")
    monkeypatch.setattr(runtime, "interpreting", lambda: False)
    engine._cases.clear()
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):
        layer_norm(torch.ones(2, 4), 4)
    with pytest.raises(ArgumentError, match="only in Triton's interpreter"), shuffled_programs(0):
        pass


# --- launch parameters --------------------------------------------------------------------------


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_tilings_cover_every_width(itemsize):
    for columns in [*range(1, 300), *range(300, 70000, 37)]:
        for tiling in (
            tilings.forward_tiling(columns, itemsize),
            tilings.backward_tiling(columns, itemsize),
        ):
            assert tiling.piece & (tiling.piece - 1) == 0
            if tiling.pieces:
                padded = tiling.shares * tiling.pieces * tiling.piece - columns
                assert 0 <= padded < tiling.shares * tiling.piece
                assert tiling.rows * tiling.piece >= tiling.warps * 32 or columns < 64


@pytest.mark.slow(reason="compiled: only a change of the kernels or of Triton can break it")
@pytest.mark.parametrize(
    ("columns", "most"), [(2048, 0), (8704, 0), (12288, 0), (14336, 0), (15872, 40)]
)
def test_the_backward_keeps_to_its_registers(columns, most):
    """No cliff above a power of two: compiled for an H200, without one, nothing spills."""
    (row,) = compiled_ahead([("backward", "roundoff", columns)])
    assert row["spilled"] <= most


@pytest.mark.slow(reason="compiled: only a change of the kernels or of Triton can break it")
@pytest.mark.parametrize(
    ("columns", "itemsize", "least"),
    [(2048, 2, 6), (4096, 2, 4), (6144, 2, 3), (7168, 2, 2), (4096, 4, 3), (8192, 4, 2)],
)
def test_as_many_forward_programs_fit_as_were_planned(columns, itemsize, least):
    """One register too many, and a multiprocessor holds a program less than were launched for."""
    dtype = torch.float16 if itemsize == 2 else torch.float32
    (row,) = compiled_ahead([("forward", "roundoff", columns)], dtype)
    assert row["fit"] >= least


FAR = """
    import mmap, torch
    from roundoff.kernels import layer_norm
    stride = 2**30
    # Pages that nobody touches take no memory.
    memory = torch.frombuffer(mmap.mmap(-1, 3 * 2 * stride + 2**20), dtype=torch.float16)
    for columns in (64, 3000, 9000):
        w, b = torch.rand(2, columns).half()
        near = torch.randn(2, 4, columns).half()
        far = memory.as_strided((2, 4, columns), (columns, stride, 1))
        far.copy_(near)
        results = []
        for x, dy in (near, far):
            tensors = [t.detach().requires_grad_() for t in (x, w, b)]
            y = layer_norm(tensors[0], columns, *tensors[1:])
            results.append([y, *torch.autograd.grad(y, tensors, dy)])
        print(all(torch.equal(p, q) for p, q in zip(*results)))
"""


def test_rows_are_found_beyond_2_to_the_31_elements():
    if not interpreting():
        pytest.skip("needs the interpreter")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(  # an address that is wrong ends the process
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FAR)],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.stdout.split() == ["True"] * 3, done.stderr
