"""layer_norm and rms_norm: near float64, the same bits in every run, and what is refused."""

import importlib
import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from roundoff.kernels import interpreting, layer_norm, rms_norm, shuffled_programs
from roundoff.kernels._norm_tilings import Tiling
from roundoff.kernels.baselines import layer_norms

engine = importlib.import_module("roundoff.kernels._row_norm")
runtime = importlib.import_module("roundoff.kernels._runtime")
tilings = importlib.import_module("roundoff.kernels._norm_tilings")
DEVICE = "cpu" if interpreting() else "cuda"
TYPES = (torch.float16, torch.bfloat16, torch.float32)
NORMS = {layer_norm: torch.nn.functional.layer_norm, rms_norm: torch.nn.functional.rms_norm}
each_norm = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
interpreted = pytest.mark.skipif(not interpreting(), reason="needs the interpreter")


def draw(rows, columns, dtype=torch.float32, offset=-2.3, seed=0):
    """x, dy, weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    w, b = (torch.rand(columns, generator=generator) for _ in range(2))
    return [t.to(DEVICE, dtype) for t in (offset + 0.5 * x, 0.1 * dy, w, b)]


def results(norm, x, dy, w, b=None, eps=1e-5, **options):
    """y, dx and the gradients of the parameters that there are."""
    parameters = (w, b) if norm in (layer_norm, torch.nn.functional.layer_norm) else (w,)
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, *parameters)]
    y = norm(leaves[0], x.shape[-1:], *leaves[1:], eps, **options)
    wanted = [t for t in leaves if t is not None]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


def truth(norm, *tensors, **options):
    wide = (None if t is None else t.double() for t in tensors)
    return results(NORMS[norm], *wide, **options)


def assert_near(made, exact):
    """Within the rounding of the results, and of sums over rows in float32."""
    rows = max(1, made[0].numel() // max(1, made[0].shape[-1]))
    for a, e in zip(made, exact, strict=True):
        assert a.shape == e.shape
        if not e.numel():
            continue
        largest = e.abs().max().item()
        # Interpreted, bfloat16 is cut off, not rounded: a whole unit. Two columns nearly alike:
        # 1 / sqrt(eps) times what they are rounded to.
        size = max(largest, 1.0) * (316 if made[0].shape[-1] < 3 else 4)
        allowed = torch.finfo(a.dtype).eps * 1.01 * largest + 16 * rows * 2.0**-23 * size
        assert (a.double() - e).abs().max() <= allowed


def laid_out(values, layout):
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        return torch.cat([values, values], -1)[..., : values.shape[-1]]
    if layout == "stepped":
        return values.repeat_interleave(2, -1)[..., ::2]
    if layout == "expanded" and values.dim() > 1:
        return values[:1].expand(values.shape)
    return values


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    norm=st.sampled_from(list(NORMS)),
    leading=st.lists(st.integers(0, 5), max_size=3),
    columns=st.integers(1, 300),
    dtype=st.sampled_from(TYPES),
    layout=st.sampled_from(["plain", "transposed", "sliced", "stepped", "expanded"]),
    has_weight=st.booleans(),
    has_bias=st.booleans(),
    parameter=st.sampled_from([None, torch.float32]),
    eps=st.sampled_from([1e-5, 0.5]),
)
def test_any_shape_layout_and_parameters(
    norm, leading, columns, dtype, layout, has_weight, has_bias, parameter, eps
):
    generator = torch.Generator().manual_seed(columns)
    shapes = (*leading, columns), (*leading, columns), (columns,), (columns,)
    x, dy, w, b = (
        laid_out(torch.randn(shape, generator=generator).to(DEVICE, dtype), layout)
        for shape in shapes
    )
    w, b = w.to(parameter or dtype), b.to(parameter or dtype)
    tensors = x, dy, w if has_weight else None, b if has_bias else None
    made = results(norm, *tensors, eps=eps)
    assert_near(made, truth(norm, *tensors, eps=eps))


@each_norm
@pytest.mark.parametrize(
    ("columns", "dtype"),
    # A row in one piece, in several, shared by programs of 2 and of 4 bytes, and in chunks.
    [
        (1025, torch.float16),
        (4097, torch.float32),
        (17000, torch.float16),
        (33000, torch.float32),
        (200_000, torch.float32),
    ],
    ids=str,
)
def test_wide_rows_are_near_float64_and_err_no_more_than_torch(norm, columns, dtype):
    tensors = draw(3, columns, dtype)
    exact = truth(norm, *tensors)
    made, theirs = results(norm, *tensors), results(NORMS[norm], *tensors)
    assert_near(made, exact)
    for a, t, e in zip(made, theirs, exact, strict=True):
        ours, other = ((v.double() - e).square().mean().sqrt() for v in (a, t))
        assert ours <= 1.1 * other + torch.finfo(dtype).eps / 2 * e.square().mean().sqrt()


@pytest.mark.parametrize("columns", [100, 5000])
def test_a_large_offset_costs_no_more_than_in_torch(columns):
    tensors = draw(6, columns, offset=5e3)
    for a, e in zip(results(layer_norm, *tensors), truth(layer_norm, *tensors), strict=True):
        # The rounding of the mean, 2^-11 of a standard deviation at most, moves whole rows.
        allowed = 2**-11 * max(e.square().mean().sqrt(), e.abs().max())
        assert (a - e).square().mean().sqrt() <= allowed


@each_norm
def test_only_gradients_that_are_asked_for(norm):
    x, _, w, b = draw(3, 12, seed=1)
    leaves = [x.view(3, 3, 4), w.view(3, 4), b.view(3, 4)][: 3 if norm is layer_norm else 2]
    exact = None
    for wanted in itertools.product((True, False), repeat=len(leaves)):
        if any(wanted):
            some = [t.clone().requires_grad_(a) for t, a in zip(leaves, wanted, strict=True)]
            norm(some[0], (3, 4), *some[1:]).sum().backward()
            made = [t.grad for t in some]
            exact = exact or made  # all
            for asked, got, all_of in zip(wanted, made, exact, strict=True):
                assert torch.equal(got, all_of) if asked else got is None


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def shared(centred, tiling, x, dy, w, b):
    """y, dx, dw and db with a given tiling of the backward."""
    y, stats = engine.forward_of(x, w, b, 1e-5, centred)
    made = engine.gradients_of(dy, x, w, b, stats, tiling=tiling)
    return [y, *made] if b is not None else [y, *made[:2]]


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    norm=st.sampled_from(list(NORMS)),
    rows=st.integers(1, 9),
    columns=st.integers(40, 120),
    ahead=st.sampled_from([1, 2]),
    shares=st.integers(2, 4),
    piece=st.sampled_from([16, 32]),
    hold=st.booleans(),
    dtype=st.sampled_from(TYPES),
)
def test_rows_that_programs_share(norm, rows, columns, ahead, shares, piece, hold, dtype):
    centred = norm is layer_norm
    tiling = Tiling(1, piece, -(-columns // (shares * piece)), 1, ahead, 1, hold, shares)
    x, dy, w, b = draw(rows, columns, dtype, seed=columns)
    tensors = x, dy, w, b if centred else None
    made = shared(centred, tiling, *tensors)
    assert_near(made, truth(norm, *tensors))
    if interpreting():
        with shuffled_programs(rows):
            assert same(shared(centred, tiling, *tensors), made)


@each_norm
@pytest.mark.parametrize("shape", [(70, 64), (40, 1024)])
def test_bits_do_not_depend_on_the_order_of_programs(norm, shape):
    tensors = draw(*shape)
    first = results(norm, *tensors)
    for seed in range(3 if interpreting() else 0):
        with shuffled_programs(seed):
            assert same(first, results(norm, *tensors))
    assert interpreting() or all(same(first, results(norm, *tensors)) for _ in range(100))


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tilings_cover_every_width(itemsize):
    for columns in [*range(1, 300), *range(300, 70000, 97)]:
        forward, many = (tilings.forward_tiling(columns, itemsize, flag) for flag in (False, True))
        assert forward[1:4] == many[1:4]  # what fixes the bits
        for tiling in (forward, tilings.backward_tiling(columns, itemsize)):
            padded = tiling.shares * tiling.pieces * tiling.piece - columns
            assert not tiling.pieces or 0 <= padded < tiling.shares * tiling.piece
            assert tiling.piece & (tiling.piece - 1) == 0


@each_norm
def test_torch_compile_gives_the_same_bits(norm):
    x, dy, w, b = draw(6, 33)

    def model(x, *parameters):
        return norm(torch.relu(x), 33, *parameters).sin()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    made = []
    for function in (model, compiled):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)][: 3 if norm is layer_norm else 2]
        made.append(torch.autograd.grad(function(*leaves), leaves, dy))
    assert same(*made)
    operands = (*leaves, None)[:3]
    torch.library.opcheck(torch.ops.roundoff.norm_forward, (*operands, 1e-5, len(leaves) == 3))
    with pytest.raises(RuntimeError, match="setup_context"):  # and not computed wrongly
        torch.func.grad(lambda x: norm(x, 33).sum())(x)


@pytest.mark.skipif(interpreting(), reason="needs a GPU")
@each_norm
def test_on_a_gpu(norm):
    """A CUDA graph; and no share is taken for one that is not there, which stands as a NaN."""
    tensors = draw(64, 1024, torch.float16)
    first, graph = results(norm, *tensors), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(norm, *tensors)
    graph.replay()
    assert same(first, captured)
    x, dy, *_ = draw(40, 20000)
    for t, at in ((x, 3), (dy, 7)):
        t.view(torch.int32)[at, 11] = -1
    x = x.requires_grad_()
    norm(x, 20000).backward(dy)
    assert x.grad.isfinite().all(1).logical_not().nonzero()[:, 0].tolist() == [3, 7]


FAR = """
    import os; os.environ.pop("TRITON_INTERPRET", None)
    import triton, triton.language  # first: another package's import does not matter
    import mmap, torch
    from roundoff.kernels import layer_norm
    stride = 2**30
    # Pages that nobody touches take no memory.
    memory = torch.frombuffer(mmap.mmap(-1, 3 * 2 * stride + 2**20), dtype=torch.float16)
    for columns in (64, 3000):
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
    import sys
    for name in [n for n in sys.modules if n.startswith("roundoff.kernels")]:
        del sys.modules[name]
    sys.modules["triton"] = None
    from roundoff.errors import MissingDependencyError
    try:
        import roundoff.kernels
    except MissingDependencyError as error:
        print("pip install triton" in error.hint)
"""


@interpreted
def test_rows_are_found_beyond_2_to_the_31_elements_whoever_imported_triton():
    """An address that is wrong ends the process. Without Triton the error says what to install."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FAR)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout.split() == ["True"] * 3, done.stderr


@each_norm
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight": torch.ones(4, device="meta")}, ArgumentError, "another device than x"),
        ({"x": torch.ones(2, 0, device=DEVICE), "normalized_shape": 0}, ShapeError, "no elements"),
        ({"eps": -1.0}, ArgumentError, "eps"),
        ({"x": torch.ones(2, 4, device=DEVICE).double()}, DtypeError, r"or float32.*functional"),
    ],
)
def test_what_does_not_fit_is_refused(norm, change, error, words):
    given = {"x": torch.ones(2, 4, device=DEVICE), "normalized_shape": 4}
    with pytest.raises(error, match=words):
        norm(**(given | change))


@interpreted
def test_a_cpu_tensor_for_compiled_kernels(monkeypatch):
    monkeypatch.setattr(runtime, "interpreting", lambda: False)
    engine._cases.clear()
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):
        layer_norm(torch.ones(2, 4), 4)
    with pytest.raises(ArgumentError, match="only in Triton's interpreter"), shuffled_programs(0):
        pass


def test_a_direct_launch_passes_what_tritons_own_launcher_passes(monkeypatch):
    # Triton 3.8's launcher asks which driver is active: where there is no GPU, none is.
    monkeypatch.setattr(type(triton.runtime.driver), "active", None)
    driver = importlib.import_module("triton.backends.nvidia.driver")
    passed = []

    class Run:
        """Triton's launcher with its C function replaced."""

        global_scratch_size = profile_scratch_size = 0
        global_scratch_align = profile_scratch_align = 1
        launch_cooperative_grid, launch_pdl, num_ctas, gsan_enabled = True, False, 1, False
        arg_annotations, kernel_signature = "annotations", b"signature"

        def launch(self, *arguments):
            passed.append(arguments)

        __call__ = driver.CudaLauncher.__call__

    class Compiled:
        run, function, packed_metadata = Run(), "function", ("metadata",)

    runtime._launcher(Compiled, (2, 3), (12, "a", None))(7, [10, 11])
    Compiled.run(2, 3, 1, 7, "function", ("metadata",), None, None, None, 10, 11, 12, "a", None)
    assert passed[0] == passed[1]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_baselines_are_near_float64(dtype):
    """A speed of the race counts only beside a result that is right."""
    x, dy, w, b = draw(37, 70, dtype)
    exact = truth(layer_norm, x, dy, w, b)
    for label, norm in layer_norms(DEVICE)[0].items():
        parameters = [t.to(norm.weights or dtype) for t in (w, b)]
        y, *saved = norm.forward(x, *parameters, 1e-5)
        made = y, *norm.backward(dy, x, *parameters, *saved)
        for a, e in zip(made, exact, strict=True):
            # torch rounds each partial sum of a column to a type of 16 bits.
            allowed = len(x) / 2 * torch.finfo(dtype).eps * e.abs().max()
            assert (a.double() - e).abs().max() <= allowed, label
