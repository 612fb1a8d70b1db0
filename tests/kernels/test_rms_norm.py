"""RMSNorm and rows that programs share: against float64, against torch, and against themselves."""

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

from roundoff.errors import ArgumentError, DtypeError, ShapeError
from roundoff.kernels import interpreting, rms_norm, shuffled_programs
from roundoff.kernels._norm_tilings import Tiling
from roundoff.kernels.baselines import stream

engine = importlib.import_module("roundoff.kernels._row_norm")
tilings = importlib.import_module("roundoff.kernels._norm_tilings")
runtime = importlib.import_module("roundoff.kernels._runtime")
wide = importlib.import_module("roundoff.kernels._layer_norm_wide")
SOURCE = Path(__file__).parents[2] / "src"
DEVICE = "cpu" if interpreting() else "cuda"
TYPES = (torch.float16, torch.bfloat16, torch.float32)
slow = pytest.mark.slow(reason="only a change of the kernels can break it")


def draw(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=generator).to(dtype).to(DEVICE) for s in shapes]


def gradients(norm, x, w, residual, dy, dh, eps):
    """y, x + residual, dx, dw and dresidual as float64; those that there are."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, w, residual)]
    y, h = norm(*leaves, eps)
    outputs, grads = ([y], [dy]) if residual is None else ([y, h], [dy, dh])
    wanted = [t for t in leaves if t is not None]
    results = [*outputs, *torch.autograd.grad(outputs, wanted, grads)]
    return [t.detach().double() for t in results]


def truth(x, w, residual, dy, dh, eps):
    def norm(x, w, residual, eps):
        h = x if residual is None else x + residual
        return torch.nn.functional.rms_norm(h, h.shape[-1:], w, eps), h

    return gradients(norm, *(None if t is None else t.double() for t in (x, w, residual, dy, dh)),
                     eps)  # fmt: skip


def ours(programs=None, **options):
    def norm(x, w, residual, eps):
        shape = x.shape[-1:]
        if residual is None:
            return rms_norm(x, shape, w, eps, programs=programs, **options), None
        return rms_norm(x, shape, w, eps, residual=residual, programs=programs, **options)

    return norm


def near(results, expected, dtype, rows, of_weight=None):
    """Within the rounding of the result, and of sums in float32."""
    computed = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for a, e in zip(results, expected, strict=True):
        assert a.shape == e.shape
        if e.numel():
            largest = e.abs().max().item()
            kind = of_weight if of_weight and a.dim() == 1 else dtype
            # Interpreted, bfloat16 is cut off, not rounded: a whole unit.
            allowed = max(torch.finfo(t).eps for t in (kind, dtype)) * 1.01 * largest
            assert (a - e).abs().max() <= allowed + 64 * max(rows, 1) * computed * max(largest, 1.0)


def added(x, residual, got):
    """The sum in float64 after it was found right: rounded, interpreted bfloat16 cut off."""
    exact = x.double() + residual.double()
    if interpreting() and x.dtype == torch.bfloat16:
        assert ((got - exact).abs() <= torch.finfo(x.dtype).eps * exact.abs()).all()
    else:
        assert torch.equal(got, (x + residual).double())
    return got.double()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    leading=st.lists(st.integers(0, 5), max_size=3),
    columns=st.integers(1, 300),
    dtype=st.sampled_from([*TYPES, torch.float64]),
    layout=st.sampled_from(["plain", "transposed", "sliced", "stepped", "expanded"]),
    has_weight=st.booleans(),
    has_residual=st.booleans(),
    parameter=st.sampled_from([None, torch.float32]),
    programs=st.sampled_from([None, 1, 3, 1000]),
)
def test_any_shape_layout_weight_and_residual(
    leading, columns, dtype, layout, has_weight, has_residual, parameter, programs
):
    def laid_out(values):
        if layout == "transposed" and values.dim() > 1:
            return values.transpose(0, -1).contiguous().transpose(0, -1)
        if layout == "sliced":
            return torch.cat([values, values], -1)[..., : values.shape[-1]]
        if layout == "stepped":
            return values.repeat_interleave(2, -1)[..., ::2]
        if layout == "expanded" and values.dim() > 1:
            return values[:1].expand(values.shape)
        return values

    shape = (*leading, columns)
    x, dy, dh, residual = map(laid_out, draw(*(shape,) * 4, dtype=dtype, seed=columns))
    (w,) = map(laid_out, draw((columns,), dtype=parameter or dtype, seed=1))
    residual = (residual * 0.5).to(dtype) if has_residual else None
    w = w if has_weight else None
    data = (x, w, residual, dy, dh, 0.1)
    results, expected = gradients(ours(programs), *data), truth(*data)
    if has_residual:  # what is normalised is the rounded sum
        h = added(x, residual, results[1])
        after = truth(h, w, None, dy, dh, 0.1)
        dx = after[1] + dh.double()
        expected = [after[0], h, dx, *after[2:], dx]
    near(results, expected, dtype, x.numel() // columns, w.dtype if has_weight else None)


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        pytest.param(columns, dtype, marks=[slow] if (i - j) % 3 else [])
        for i, columns in enumerate((1000, 2049, 5000, 9000))
        for j, dtype in enumerate(TYPES)
    ],
    ids=str,
)
def test_typical_errors_are_no_larger_than_those_of_torch(columns, dtype):
    def theirs(x, w, residual, eps):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], w, eps), None

    rows = 5 if interpreting() else 256  # a row's errors have the rounding of its r in common
    x, dy, dh = draw(*((rows, columns),) * 3, dtype=dtype)
    (w,) = draw((columns,), dtype=dtype, seed=1)
    data = (x, w, None, dy, dh, 1e-5)
    for a, t, e in zip(gradients(ours(), *data), gradients(theirs, *data), truth(*data),
                       strict=True):  # fmt: skip
        ours_, torchs = ((r - e).square().mean().sqrt() for r in (a, t))
        # Half a unit more where the interpreter cuts bfloat16 off instead of rounding.
        cut = dtype == torch.bfloat16 and interpreting()
        extra = torch.finfo(dtype).eps * e.square().mean().sqrt() / 2 if cut else 0.0
        assert ours_ <= 1.1 * torchs + extra


def test_round_first_is_the_order_of_llama():
    x, dy = draw((64, 200), (64, 200), dtype=torch.float16)
    (w,) = draw((200,), dtype=torch.float16, seed=1)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    llama = w * exact.half()  # rounded, multiplied, rounded again
    once = (exact * w.double()).half()
    twice, first = (rms_norm(x, 200, w, 1e-5, round_first=f) for f in (True, False))
    assert (twice != llama).float().mean() < 0.01
    assert (first != once).float().mean() < 0.01
    assert (llama != once).float().mean() > 0.1
    dw, other = (
        gradients(ours(round_first=f), x, w.float(), None, dy, dy, 1e-5)[-1] for f in (True, False)
    )
    expected = (dy.double() * exact.half().double()).sum(0)
    # A value in a thousand is near the middle of two float16, and rounded to the other one.
    assert (dw - expected).square().mean().sqrt() < 0.2 * (other - expected).square().mean().sqrt()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_special_rows_are_as_in_torch(dtype):
    largest = torch.finfo(dtype).max
    rows = [[largest] * 4, [largest, 1, 2, 3], [0.0] * 4, [1e-30, 0, 0, 0], [float("inf"), 1, 2, 3],
            [float("nan"), 1, 2, 3]]  # fmt: skip
    x = torch.tensor(rows, dtype=torch.float64).to(dtype).to(DEVICE)
    expected = torch.nn.functional.rms_norm(x, (4,), eps=1e-5)
    torch.testing.assert_close(rms_norm(x, 4, eps=1e-5), expected, equal_nan=True)
    one = torch.tensor([[3.0], [-0.5], [0.0]], dtype=dtype, device=DEVICE)
    torch.testing.assert_close(
        rms_norm(one, 1, eps=1e-5), torch.nn.functional.rms_norm(one, (1,), eps=1e-5)
    )


def test_the_default_eps_is_that_of_torch():
    x = torch.full((1, 4), 1e-4, dtype=torch.float16, device=DEVICE)
    torch.testing.assert_close(rms_norm(x, 4), torch.nn.functional.rms_norm(x, (4,)))


def test_only_the_gradients_that_are_asked_for():
    x, residual, dy, dh = draw(*((5, 33),) * 4)
    (w,) = draw((33,), seed=1)
    expected = dict(zip("xwr", truth(x, w, residual, dy, dh, 1e-5)[2:], strict=True))
    for wanted in range(1, 8):
        leaves = {
            name: t.clone().requires_grad_(bool(wanted >> i & 1))
            for i, (name, t) in enumerate(zip("xwr", (x, w, residual), strict=True))
        }
        y, h = rms_norm(leaves["x"], 33, leaves["w"], 1e-5, residual=leaves["r"])
        outputs = [(t, g) for t, g in ((y, dy), (h, dh)) if t.requires_grad]
        torch.autograd.backward(*zip(*outputs, strict=True))
        for i, (name, t) in enumerate(leaves.items()):
            assert (t.grad is not None) == bool(wanted >> i & 1)
            if t.grad is not None and wanted != 2:
                torch.testing.assert_close(t.grad.double(), expected[name], rtol=1e-5, atol=1e-5)


def test_one_output_of_two_may_be_unused():
    x, residual, g = draw(*((5, 33),) * 3)
    for place in range(2):
        leaves = [t.clone().requires_grad_() for t in (x, residual)]
        outputs = rms_norm(leaves[0], 33, eps=1e-5, residual=leaves[1])
        dx, dr = torch.autograd.grad(outputs[place], leaves, g)
        zero = torch.zeros_like(g)
        exact = truth(x, None, residual, *((g, zero) if place == 0 else (zero, g)), 1e-5)[2]
        torch.testing.assert_close(dx.double(), exact, rtol=1e-5, atol=1e-5)
        assert torch.equal(dx, dr)


def test_gradcheck():
    x, r = (t.double().requires_grad_() for t in draw((3, 3, 4), (3, 3, 4)))
    w = torch.rand(3, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *t: rms_norm(t[0], (3, 4), t[1], residual=t[2]),
                                    (x, w, r))  # fmt: skip


def test_operators_for_torch_compile():
    x, r, dy, dh = (t.double() for t in draw(*((6, 33),) * 4))
    w = torch.rand(33, dtype=torch.float64, device=DEVICE)
    forward = torch.ops.roundoff.rms_norm_forward.default
    leaves = [t.requires_grad_() for t in (x, w, r)]
    torch.library.opcheck(forward, (*leaves, 1e-5, False, 0))
    torch.library.opcheck(forward, (x.detach(), None, None, 1e-5, True, 2))
    y, h, _ = forward(*leaves, 1e-5, False, 0)
    got = torch.autograd.grad([y, h], leaves, [dy, dh])
    y, h = rms_norm(x, 33, w, 1e-5, residual=r)
    same = torch.autograd.grad([y, h], leaves, [dy, dh])
    assert all(torch.equal(a, b) for a, b in zip(got, same, strict=True))


@pytest.mark.slow(reason="compiles: only a change of the operators can break it")
def test_torch_compile_gives_the_same_bits():
    x, r, dy, dh = draw(*((6, 33),) * 4)
    (w,) = draw((33,), seed=1)

    def model(x, w, r):
        y, h = rms_norm(torch.relu(x), 33, w, residual=r)
        return y.sin(), h

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for function in (model, compiled):
        leaves = [t.clone().requires_grad_() for t in (x, w, r)]
        results.append(torch.autograd.grad(function(*leaves), leaves, [dy, dh]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (((2, 4), 5), {}, ShapeError, "normalized_shape (5,)"),
        (((2, 4), 4, (3,)), {}, ShapeError, "weight has another shape: got (3,), expected (4,)"),
        (((2, 4), 4), {"residual": (4,)}, ShapeError, "residual has another shape: got (4,)"),
        (((2, 4), 4), {"eps": -1.0}, ArgumentError, "eps must not be negative"),
        (((2, 4), 4), {"programs": 0}, ArgumentError, "programs out of range: got 0"),
    ],
)
def test_wrong_arguments(arguments, options, error, text):
    x, shape, *parameters = arguments
    tensors = [torch.ones(p, device=DEVICE) for p in parameters]
    if "residual" in options:
        options = {"residual": torch.ones(options["residual"], device=DEVICE)}
    with pytest.raises(error) as caught:
        rms_norm(torch.ones(x, device=DEVICE), shape, *tensors, **options)
    assert text in str(caught.value)


def test_wrong_types():
    x = torch.ones(2, 4, device=DEVICE)
    with pytest.raises(DtypeError, match=r"rms_norm does not take: got torch\.int32"):
        rms_norm(x.int(), 4)
    with pytest.raises(DtypeError, match=r"another type than x: got torch\.float16"):
        rms_norm(x, 4, residual=x.half())


# --- rows that programs share -------------------------------------------------------------------


def shared(form, tiling, x, w, b, residual, dy, dh, programs=None):
    """y, h, statistics, dx, dw and db with a given tiling of the backward."""
    likes = map(engine._like, (x, w, b, residual))
    case = engine.Case(form, x.shape[-1:], 1e-5, programs, *likes, tilings=(None, tiling))
    y, h, stats = case.forward(x, w, b, residual, True)
    return [y, h, stats, *case.backward(dy, h, w, stats, dh, True, b is not None)]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    form=st.sampled_from([engine.LAYER, engine.RMS]),
    rows=st.integers(1, 9),
    columns=st.integers(40, 120),
    ahead=st.sampled_from([1, 2]),
    shares=st.integers(2, 4),
    piece=st.sampled_from([16, 32]),
    hold=st.booleans(),
    dtype=st.sampled_from(TYPES),
    programs=st.sampled_from([None, 1, 3]),
)
def test_shared_rows_are_right(form, rows, columns, ahead, shares, piece, hold, dtype, programs):
    pieces = -(-columns // (shares * piece))
    tiling = Tiling(1, piece, pieces, 1, ahead, 1, hold, shares)
    x, dy, dh, residual = draw(*((rows, columns),) * 4, dtype=dtype, seed=columns)
    w, b = draw((columns,), (columns,), dtype=dtype, seed=1)
    layer = form is engine.LAYER
    b, residual, dh = (b, None, None) if layer else (None, residual, dh)
    y, h, stats, dx, dw, db = shared(form, tiling, x, w, b, residual, dy, dh, programs)
    if layer:
        leaves = [t.double().requires_grad_() for t in (x, w, b)]
        exact = torch.nn.functional.layer_norm(leaves[0], (columns,), *leaves[1:], 1e-5)
        expected = [exact.detach(), *torch.autograd.grad(exact, leaves, dy.double())]
        results = [y, dx, dw, db]
        mean = x.double().mean(1)
        torch.testing.assert_close(stats[0].double(), mean, rtol=1e-6, atol=1e-6)
    else:
        expected = truth(added(x, residual, h.double()), w, None, dy, None, 1e-5)
        expected[1] += dh.double()
        results = [y, dx, dw]
        assert db is None
    near([t.double() for t in results], expected, dtype, rows)


SHARED = Tiling(1, 32, 1, 1, 1, 1, True, 3)


def test_shared_rows_have_the_same_bits_in_any_order_of_programs():
    if not interpreting():
        pytest.skip("needs the interpreter's order of programs")
    x, dy = draw((5, 90), (5, 90))
    w, b = draw((90,), (90,), seed=1)
    found = []
    for seed in range(3):
        with shuffled_programs(seed):
            found.append(shared(engine.LAYER, SHARED, x, w, b, None, dy, None))
    for other in found[1:]:
        assert all(torch.equal(p, q) for p, q in zip(found[0], other, strict=True))


def test_shared_rows_with_a_fixed_number_of_programs_ignore_the_machine(monkeypatch):
    x, dy = draw((3, 90), (3, 90))
    w, b = draw((90,), (90,), seed=1)
    fixed, free = [], []
    for count in (3, 6):
        monkeypatch.setattr(tilings, "multiprocessors", lambda index, count=count: count)
        engine._backward_of.cache_clear()
        for programs, results in ((3, fixed), (None, free)):
            call = shared(engine.LAYER, SHARED, x, w, b, None, dy, None, programs)
            results.append(call[3:])
    for other in fixed[1:]:
        assert all(torch.equal(p, q) for p, q in zip(fixed[0], other, strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(free[0], free[1], strict=True))


@pytest.mark.parametrize("columns", [20000, 98304])
def test_a_device_too_small_for_the_programs_of_a_row_has_chunks(monkeypatch, columns):
    usual = tilings.backward_tiling(columns, 2)
    needed = -(-usual.shares // usual.per_sm)
    monkeypatch.setattr(engine, "multiprocessors", lambda index: needed)
    assert engine.running(usual, 0) == usual
    monkeypatch.setattr(engine, "multiprocessors", lambda index: needed - 1)
    assert engine.running(usual, 0) == tilings.CHUNKS
    assert engine.running(usual, -1) == usual  # the interpreter, where nothing waits


@pytest.mark.skipif(interpreting(), reason="only on a GPU do programs wait")
@pytest.mark.parametrize("columns", [20000, 100000])
def test_no_share_is_taken_for_one_that_is_not_there(columns):
    """What stands for "not there" is a NaN, too: one with all bits set."""
    x, dy = draw((40, columns), (40, columns))
    for t, at in ((x, 3), (dy, 7)):
        t.view(torch.int32)[at, 11] = -1
    x = x.requires_grad_()
    rms_norm(x, columns).backward(dy)
    assert x.grad[[3, 7]].isnan().all(1).equal(torch.tensor([True, True], device=DEVICE))
    assert x.grad[[i for i in range(40) if i not in (3, 7)]].isfinite().all()


# --- compiled, without a GPU ----------------------------------------------------------------------

COMPILE = """
    import os, sys
    os.environ["TRITON_INTERPRET"] = "0"
    from roundoff.kernels import ahead
    from roundoff.kernels._norm_tilings import backward_tiling
    columns, itemsize = int(sys.argv[1]), int(sys.argv[2])
    launch = ahead._of_the_library("backward", "roundoff", columns, itemsize)
    row = ahead._resources(*launch, itemsize)
    tiling = backward_tiling(columns, itemsize)
    print(row["spilled"], row["fit"] >= tiling.per_sm, tiling.shares)
"""


@pytest.mark.slow(reason="compiled: only a change of the kernels or of Triton can break it")
@pytest.mark.parametrize(
    ("columns", "itemsize"),
    [(24576, 2), (32768, 2), (131072, 2), (15872, 4), (32768, 4), (65536, 4)],
)
def test_shared_rows_compile_for_an_h200_and_spill_at_most_eight_words(columns, itemsize):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMPILE), str(columns), str(itemsize)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    spilled, fit, shares = done.stdout.split()
    assert int(spilled) <= 8
    assert fit == "True"
    assert int(shares) > 1


AGAIN = """
    import os, sys
    os.environ["TRITON_INTERPRET"] = "0"
    from roundoff.kernels import ahead
    from roundoff.kernels._norm_tilings import Tiling
    for again in (False, True):
        tiling = Tiling(1, 4096, int(sys.argv[1]) // 4096, 8, 1, 1, again=again)
        ahead.forward_tiling = lambda *_: tiling
        launch = ahead._of_the_library("forward", "roundoff", int(sys.argv[1]), 2)
        row = ahead._resources(*launch, 2)
        print(row["registers"], row["spilled"], row["fit"])
"""


@pytest.mark.slow(reason="compiled: only a change of the kernels or of Triton can break it")
@pytest.mark.parametrize("columns", [24576, 32768])
def test_a_row_that_is_converted_again_leaves_room_for_a_second_program(columns):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(AGAIN), str(columns)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    once, again = ([int(v) for v in line.split()] for line in done.stdout.splitlines())
    assert again[0] <= 128 < once[0]
    assert again[1:] == [0, 2]


# --- launches, and the ceiling --------------------------------------------------------------------


@pytest.mark.parametrize("residual", [False, True])
def test_a_transform_of_torch_func_is_refused_and_not_computed_wrongly(residual):
    (x,) = draw((3, 8))

    def summed(x):
        if residual:
            return rms_norm(x, 8, residual=x)[0].sum()
        return rms_norm(x, 8).sum()

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(summed)(x)


def test_a_direct_launch_passes_what_tritons_own_launcher_passes():
    driver = importlib.import_module("triton.backends.nvidia.driver")
    passed = []

    class Run:
        """Triton's launcher with its C function replaced."""

        global_scratch_size = profile_scratch_size = 0
        global_scratch_align = profile_scratch_align = 1
        launch_cooperative_grid, launch_pdl, num_ctas = True, False, 1
        arg_annotations, kernel_signature = "annotations", b"signature"

        def launch(self, *arguments):
            passed.append(arguments)

        __call__ = driver.CudaLauncher.__call__

    class Compiled:
        run, function, packed_metadata = Run(), "function", ("metadata",)

    runtime._launcher(Compiled, ("a", None))(2, 3, 7, [10, 11, 12])
    Compiled.run(2, 3, 1, 7, "function", ("metadata",), None, None, None, 10, 11, 12, "a", None)
    assert passed[0] == passed[1]


@pytest.mark.parametrize(("reads", "writes"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_a_stream_adds_what_it_reads(reads, writes):
    inputs = tuple(draw(*((5, 100),) * reads))
    outputs = tuple(torch.empty_like(inputs[0]) for _ in range(writes))
    stream(inputs, outputs, block=64)
    expected = inputs[0].clone()
    for more in inputs[1:]:
        expected += more
    assert all(torch.equal(out, expected) for out in outputs)


def test_a_stream_of_nothing_or_too_much():
    x = torch.ones(3, device=DEVICE)
    stream((x[:0],), (x[:0],))
    with pytest.raises(ArgumentError, match="got 4 and 1"):
        stream((x,) * 4, (x,))
