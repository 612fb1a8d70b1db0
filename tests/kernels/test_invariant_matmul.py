"""The product whose rows have the same bits in every batch: ours, and torch's for comparison.

On a CPU the product is torch's in pieces of fixed shape, and the kernel runs in the interpreter;
on CUDA both are what readers get. Whatever a test asks of rows it asks there of more of them.
"""

import contextlib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from roundoff.kernels import (
    interpreting,
    invariant_cublas,
    invariant_matmul,
    matmul,
    shuffled_programs,
)
from roundoff.kernels.invariant_cublas import cancelling, routes
from roundoff.kernels.invariant_matmul import Tile, batched, tile_for

DEVICE = "cpu" if interpreting() else "cuda"
CUDA = DEVICE == "cuda"
TYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGER = (131, 144, 160, 191, 192, 200, 255, 256, 257, 300, 384, 511, 512, 640, 777, 1000, 1024,
          1500, 2048, 4096)  # fmt: skip
MANY = [*range(1, 131), *(LARGER if CUDA else LARGER[:3])]
FEW = MANY if CUDA else [1, 5, 16]
TILES = (
    Tile(True, 16, 32, 64, 4, 3),
    Tile(False, 32, 16, 32, 4, 2),
    Tile(False, 64, 64, 128, 8, 2),
)
#: The 16-bit shapes of the small model, narrow, wide and odd ones.
SHAPES = ((192, 576), (37, 100), (5, 33), (64, 16), (1, 129))


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def by_kernel(x, weight, bias=None, tile=None):
    y = invariant_matmul._by_kernel(x[None], weight[None], bias, False, tile)
    return y[0]


def rms_error(made, truth):
    return float((made.double() - truth).square().mean().sqrt())


def assert_rows_do_not_matter(product, x, counts):
    """product(x) has the rows that each part of x gives alone, at its beginning and its end."""
    whole = product(x)
    for m in counts:
        if m > len(x):
            continue
        for start in {0, (len(x) - m) // 3, len(x) - m}:
            part = product(x[start : start + m].clone())
            assert torch.equal(part, whole[start : start + m]), (m, start)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_has_the_same_bits_among_any_number(n, k, dtype):
    x, weight = draw(max(MANY), k, dtype=dtype), draw(n, k, dtype=dtype, seed=1)
    bias = draw(n, dtype=dtype, seed=2)
    for b in (None, bias):
        assert_rows_do_not_matter(lambda x, b=b: matmul(x, weight, b), x, MANY)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_kernels_rows_are_chains_whatever_the_tile(dtype, chains):
    x, weight = draw(max(FEW) + 3, 70, dtype=dtype), draw(37, 70, dtype=dtype, seed=1)
    bias = draw(37, dtype=dtype, seed=2)
    for tile in TILES:
        assert_rows_do_not_matter(lambda x, t=tile: by_kernel(x, weight, bias, t), x, FEW)
    for b in (None, bias):
        made = [by_kernel(x, weight, b, tile) for tile in (None, *TILES)]
        assert all(torch.equal(made[0], other) for other in made)


@pytest.mark.parametrize("tile", TILES)
def test_a_tile_writes_its_own_columns_alone(tile, chains):
    """Whatever the order of the programs: what is beyond the last is not stored."""
    x, weight = draw(40, 70, dtype=torch.float16), draw(90, 70, dtype=torch.float16, seed=1)
    wanted = by_kernel(x, weight, tile=Tile(True, 64, 128, 32, 4, 2))
    for seed in range(3):
        with shuffled_programs(seed) if interpreting() else contextlib.nullcontext():
            assert torch.equal(by_kernel(x, weight, tile=tile), wanted)


def test_a_split_of_k_that_depends_on_m_is_seen(chains):
    weight = draw(16, 64, dtype=torch.float32, seed=1)

    def split(x):
        parts = 2 if len(x) < 8 else 1
        pairs = zip(x.chunk(parts, 1), weight.chunk(parts, 1), strict=True)
        return sum(by_kernel(a.contiguous(), b.contiguous()) for a, b in pairs)

    with pytest.raises(AssertionError):
        assert_rows_do_not_matter(split, draw(20, 64, dtype=torch.float32), FEW)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_split_that_the_weight_decides_has_the_property(dtype, chains, monkeypatch):
    """By request, for a weight that the table names, for every number of rows; parts added."""
    x, weight = draw(max(FEW) + 3, 96, dtype=dtype), draw(37, 96, dtype=dtype, seed=1)
    bias = draw(37, dtype=dtype, seed=2)
    if dtype == torch.bfloat16 and not CUDA:
        bias = None  # the interpreter has bfloat16 as integers
    monkeypatch.setitem(invariant_matmul.SPLITS, (37, 96), (3, TILES[0]))
    monkeypatch.setattr(invariant_matmul, "_AT_ONCE", 11)
    tiles = (*TILES, None) if CUDA else TILES
    products = [lambda x, t=t: matmul(x, weight, bias, tile=t, split=True) for t in tiles]
    for product in products:
        assert_rows_do_not_matter(product, x, FEW)
        assert torch.equal(product(x), products[0](x))
    assert torch.equal(products[0](x.t().contiguous().t()), products[0](x))
    wide = [
        invariant_matmul._by_kernel(a[None], b[None], None, False, into=torch.float32)[0]
        for a, b in zip(x.chunk(3, 1), weight.chunk(3, 1), strict=True)
    ]
    wanted = wide[0] + wide[1] + wide[2] + (0 if bias is None else bias.float())
    if dtype != torch.bfloat16 or CUDA:  # which the interpreter cuts off
        assert torch.equal(products[0](x), wanted.to(dtype))
    whole = matmul(x, weight, bias, tile=TILES[0])
    probes = cancelling(x, weight)
    split, chain_ = (matmul(*probes, tile=TILES[0], split=s) for s in (True, False))
    assert not torch.equal(split, chain_)
    # Of another weight nothing is split.
    monkeypatch.delitem(invariant_matmul.SPLITS, (37, 96))
    assert torch.equal(products[0](x), whole)


def test_gradients_of_a_split_err_no_more_than_those_of_torch(monkeypatch):
    monkeypatch.setitem(invariant_matmul.SPLITS, (96, 512), (4, None))
    leaves = [draw(n, 512, dtype=torch.float32, seed=n).requires_grad_() for n in (64, 96)]
    wide = [t.detach().double().requires_grad_() for t in leaves]

    def gradients(product, operands):
        return torch.autograd.grad(product(*operands).square().sum(), operands)

    truth = gradients(torch.nn.functional.linear, wide)
    ours, theirs = (
        [rms_error(a, t) for a, t in zip(gradients(f, leaves), truth, strict=True)]
        for f in (lambda x, weight: matmul(x, weight, split=True), torch.nn.functional.linear)
    )
    assert all(a <= 1.1 * b for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_strides_and_alignment_do_not_matter(dtype):
    x, weight = draw(23, 48, dtype=dtype), draw(31, 48, dtype=dtype, seed=1)
    wanted = matmul(x, weight)
    buffer = torch.zeros(23 * 48 + 1, device=DEVICE, dtype=dtype)
    buffer[1:] = x.flatten()
    for other in (
        x.t().contiguous().t(),  # by columns
        torch.cat([x, x], 1)[:, :48],  # rows apart
        x.repeat_interleave(2, 1)[:, ::2],  # values apart
        buffer[1:].view(23, 48),  # at an odd address
    ):
        assert torch.equal(matmul(other, weight), wanted)
    for other in (weight.t().contiguous().t(), torch.cat([weight, weight], 1)[:, :48]):
        assert torch.equal(matmul(x, other), wanted)
    assert torch.equal(matmul(x[:1].expand(23, -1), weight), wanted[:1].expand(23, -1))
    assert torch.equal(matmul(x.view(1, 23, 48), weight)[0], wanted)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_where_a_row_is_and_how_it_lies_does_not_matter(biased, dtype):
    """Of a real layer, where cuBLAS is asked for each layout by itself."""
    n, k = (4096, 4096) if CUDA else (32, 48)
    x, weight = cancelling(*(torch.empty(m, k, device=DEVICE, dtype=dtype) for m in (300, n)))
    bias = draw(n, dtype=dtype, seed=2) if biased else None
    whole = matmul(x, weight, bias)
    for start, end in ((299, 300), (1, 65), (130, 259)):
        rows, wanted = x[start:end], whole[start:end]
        odd = torch.zeros(rows.numel() + 1, device=DEVICE, dtype=dtype)[1:].view(rows.shape)
        layouts = {
            "as a slice": rows,
            "at an odd address": odd.copy_(rows),
            "in a wider tensor": torch.cat([rows, rows], 1)[:, :k],
            "by columns": rows.t().contiguous().t(),
            "behind padding": torch.cat([torch.zeros_like(rows), rows]),
        }
        for name, laid in layouts.items():
            made = matmul(laid, weight, bias)[-len(rows) :]
            assert torch.equal(made, wanted), (start, end, name)
    for other in (weight.t().contiguous().t(), torch.cat([weight, weight], 1)[:, :k]):
        assert torch.equal(matmul(x[:70], other, bias), whole[:70])


@pytest.mark.parametrize("way", [matmul, by_kernel])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_is_in_other_rows_does_not_leak(way, dtype, chains):
    if way is by_kernel and dtype == torch.bfloat16 and not CUDA:
        pytest.skip("the interpreter cuts bfloat16 off, NaN included")
    x, weight = draw(33, 40, dtype=dtype), draw(16, 40, dtype=dtype, seed=1)
    wanted = way(x, weight)
    for bad in (float("nan"), float("inf"), -float("inf")):
        poisoned = x.clone()
        poisoned[::3] = bad
        made = way(poisoned, weight)
        keep = torch.arange(33) % 3 != 0
        assert torch.equal(made[keep], wanted[keep])
        assert not made[~keep].isfinite().any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("way", [matmul, by_kernel])
def test_errors_are_no_larger_than_those_of_torch(way, dtype):
    if way is by_kernel and dtype == torch.bfloat16 and not CUDA:
        pytest.skip("the interpreter multiplies bfloat16's bits")
    x, weight = draw(64, 512, dtype=dtype), draw(96, 512, dtype=dtype, seed=1)
    bias = draw(96, dtype=dtype, seed=2)
    truth = x.double() @ weight.double().T + bias.double()
    ours, theirs = (rms_error(f(x, weight, bias), truth) for f in (way, torch.nn.functional.linear))
    # In 16 bits the error is that of the result's rounding.
    assert ours <= (1.1 if dtype == torch.float32 else 1.02) * theirs


@pytest.mark.parametrize("k", [600, 4096, *([11008, 14336] if CUDA else [])])
def test_a_long_product_in_float32_errs_no_more_than_torchs(k, chains):
    """Chains of 16 values, in sums of 16 chains."""
    m, n = (1024, 1024) if CUDA else (16, 20)
    x, weight = draw(m, k, dtype=torch.float32), draw(n, k, dtype=torch.float32, seed=1)
    truth = x.double() @ weight.double().T
    error = rms_error(by_kernel(x, weight), truth)
    assert error <= 1.1 * rms_error(torch.mm(x, weight.T), truth)
    # An addition's error has a deviation of at most 0.29 epsilon of its sum, and the squares of n
    # sums add up to n / 2 times that of the last; a product that is not fused rounds once more.
    unit = torch.finfo(torch.float32).eps * float(truth.square().mean().sqrt())
    assert error <= 0.29 * ((16 + 16 + k / 256) / 2 + 1) ** 0.5 * unit


def test_sums_of_chains_have_the_same_bits_in_every_tile(chains):
    x, weight = draw(40, 600, dtype=torch.float32), draw(20, 600, dtype=torch.float32, seed=1)
    made = by_kernel(x, weight)
    for tile in TILES:
        assert torch.equal(by_kernel(x[:7], weight, tile=tile), made[:7])
    assert_rows_do_not_matter(lambda x: by_kernel(x, weight), x[:18], (1, 17))


#: Compiles both kernels for Hopper in float32 and prints the matrix products that are left.
COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from roundoff.kernels import invariant_kernels as kernels

PRODUCT = dict(SWAP=False, ROWS=16, COLUMNS=16, DEPTH=16, GROUP=8, EVEN=True, BIAS=False)
ATTEND = dict(D=16, ROWS=16, TILE=64, SPLIT=256, MANY=False, ORDERED=False)
POINTERS = dict.fromkeys(("x", "w", "bias", "y", "q", "k", "v", "out"), "*fp32")
POINTERS |= dict.fromkeys(("partial", "stats"), "*fp32")
POINTERS |= dict.fromkeys(("first", "last", "order"), "*i32")
POINTERS |= dict.fromkeys(("scale", "scale_low"), "fp32")
MANY = ATTEND | dict(MANY=True)
for function, constants in ((kernels.product, PRODUCT), (kernels.attend, ATTEND),
                            (kernels.attend, MANY)):
    constants |= dict(PRECISION="ieee", COMPILED=True)
    names = [p.name for p in function.params]
    signature = {n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in names}
    source = ASTSource(function, signature, constexprs=constants)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    print(*(line.strip() for line in text.splitlines() if "tt.dot" in line), sep="\\n")
"""


def test_the_compiler_keeps_the_chains_of_float32_apart():
    """It would make the sum that a product is added to the beginning of its chain."""
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=os.environ | {"TRITON_INTERPRET": "0",
         "PYTHONPATH": source}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    products = done.stdout.splitlines()
    assert len(products) == 1 + 2 * ((1 + 4) + 1)
    from_zero = [re.search(r"tt.dot %\S+, %\S+, %cst", line) for line in products]
    assert all(from_zero), products


@pytest.mark.parametrize("way", [matmul, by_kernel])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 4), (4, 0, 4), (3, 4, 0), (0, 0, 0), (2, 3, 1)])
def test_empty_sizes_are_as_in_torch(way, m, n, k):
    if way is by_kernel and not k:
        pytest.skip("the caller has dealt with it")
    x, weight = draw(m, k, dtype=torch.float32), draw(n, k, dtype=torch.float32)
    bias = draw(n, dtype=torch.float32)
    for b in (None, bias):
        torch.testing.assert_close(way(x, weight, b), torch.nn.functional.linear(x, weight, b))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    m=st.integers(1, 40), n=st.integers(1, 70), k=st.integers(1, 150),
    dtype=st.sampled_from((torch.float16, torch.float32)),
    tile=st.sampled_from((None, *TILES)), biased=st.booleans(),
)  # fmt: skip
def test_the_kernel_against_float64(m, n, k, dtype, tile, biased):
    x, weight = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype, seed=1)
    bias = draw(n, dtype=dtype, seed=2) if biased else None
    truth = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    sizes = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.abs())
    allowed = torch.finfo(dtype).eps / 2 * truth.abs() + (k + 2) * 2**-23 * sizes
    assert bool(((by_kernel(x, weight, bias, tile).double() - truth).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_batch_of_products(dtype, chains):
    x, weight = draw(3, 17, 40, dtype=dtype), draw(3, 40, 21, dtype=dtype, seed=1).mT
    made = batched(x, weight)
    for b in range(3):
        assert torch.equal(made[b], matmul(x[b], weight[b]) if DEVICE == "cpu" else made[b])
        assert torch.equal(batched(x[b : b + 1, 5:6], weight[b : b + 1])[0, 0], made[b, 5])


def test_tf32_rounds_its_factors_to_the_nearest():
    x, weight = draw(20, 256, dtype=torch.float32), draw(30, 256, dtype=torch.float32, seed=1)

    def nearest(t):
        bits = (t.view(torch.int32) + 0x1000) & -0x2000
        return bits.view(torch.float32).double()

    if CUDA:
        made = matmul(x, weight, tf32=True)
        assert_rows_do_not_matter(lambda x: matmul(x, weight, tf32=True), x, FEW)
    else:
        made = invariant_matmul._by_kernel(x[None], weight[None], None, True)[0]
    truth, best = x.double() @ weight.double().T, nearest(x) @ nearest(weight).T
    assert (made - truth).norm() <= 1.05 * (best - truth).norm()


def test_gradients():
    x, weight = draw(2, 5, 8, dtype=torch.float32), draw(4, 8, dtype=torch.float32, seed=1)
    bias, dy = draw(4, dtype=torch.float32, seed=2), draw(2, 5, 4, dtype=torch.float32, seed=3)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    wide = [t.double().requires_grad_() for t in (x, weight, bias)]
    made = torch.autograd.grad(matmul(*leaves), leaves, dy)
    truth = torch.autograd.grad(torch.nn.functional.linear(*wide), wide, dy.double())
    for a, t in zip(made, truth, strict=True):
        torch.testing.assert_close(a.double(), t, rtol=1e-5, atol=1e-5)


def test_it_is_one_operator_of_a_compiled_graph():
    operators = []

    def backend(graph, _):
        operators.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph

    x, weight = draw(5, 32, dtype=torch.float32), draw(7, 32, dtype=torch.float32, seed=1)
    compiled = torch.compile(lambda x: matmul(x, weight) + 1, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), matmul(x, weight) + 1)
    assert any("roundoff.invariant_matmul" in name for name in operators)
    torch._dynamo.reset()


def test_the_operator_agrees_with_its_description():
    x, weight = draw(5, 32, dtype=torch.float32), draw(7, 32, dtype=torch.float32, seed=1)
    torch.library.opcheck(torch.ops.roundoff.invariant_matmul, (x, weight, None, False))


@pytest.mark.parametrize(
    ("shapes", "types", "error"),
    [
        (((2, 3), (4, 5), None), (torch.float32,) * 3, ShapeError),
        (((2, 3), (3,), None), (torch.float32,) * 3, ShapeError),
        (((), (4, 5), None), (torch.float32,) * 3, ShapeError),
        (((2, 3), (4, 3), (3,)), (torch.float32,) * 3, ShapeError),
        (((2, 3), (4, 3), None), (torch.float32, torch.float16, None), DtypeError),
        (((2, 3), (4, 3), (4,)), (torch.float16, torch.float16, torch.float32), DtypeError),
        (((2, 3), (4, 3), None), (torch.int64, torch.int64, None), DtypeError),
        (((2, 3), (4, 3), None), (torch.complex64, torch.complex64, None), DtypeError),
    ],
)
def test_operands_that_do_not_meet(shapes, types, error):
    tensors = [
        None if s is None else torch.zeros(s, dtype=t, device=DEVICE)
        for s, t in zip(shapes, types, strict=True)
    ]
    with pytest.raises(error, match="got"):
        matmul(*tensors)


def test_devices_that_do_not_meet():
    x = torch.zeros(2, 3)
    with pytest.raises(ArgumentError, match="another device"):
        matmul(x, x.to("meta"))
    with pytest.raises(UnsupportedError):
        matmul(x.to("meta"), x.to("meta"))
    with pytest.raises(ShapeError):
        batched(x[None], x[None, :, :2])


# The probe that decides whether cuBLAS, or a larger piece, gives the same bits. ---------------


def chain(x, weight, parts):
    """Products added along K one after another in float32, K cut in parts that are added last."""
    total = torch.zeros(len(x), len(weight))
    for a, b in zip(x.float().chunk(parts, 1), weight.float().chunk(parts, 1), strict=True):
        part = torch.zeros_like(total)
        for k in range(a.shape[1]):
            part = part + a[:, k : k + 1] * b[:, k]
        total = total + part
    return total.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("parts", [2, 3, 8])
def test_a_probe_shows_a_split_even_after_rounding(dtype, parts):
    """Where every addition rounds, two orders end K roundings apart.

    Each is uniform over a spacing of the sum, so that their difference has a deviation of at most
    sqrt(K / 6) of the largest spacing: 11 at K = 768. Multiples of it are equal with a probability
    of 1 / (11 sqrt(2 pi)) = 3.5 %; those of smaller spacings less often.
    """
    shapes = (2, 768), (256, 768)
    for seed in range(3):
        probes = cancelling(*(torch.empty(s, dtype=dtype) for s in shapes), seed=seed)
        random = [draw(*s, dtype=dtype, seed=7 * seed + i).cpu() for i, s in enumerate(shapes)]
        share, of_random = (
            float((chain(*p, 1) != chain(*p, parts)).float().mean()) for p in (probes, random)
        )
        # Five deviations of a count of 512 elements away from 3.5 %.
        assert share > 0.925
        assert of_random < 0.05
        # A short sum has few roundings; without the powers of two only a fifth differ.
        short = cancelling(torch.empty(2, 64, dtype=dtype), torch.empty(256, 64, dtype=dtype), seed)
        assert float((chain(*short, 1) != chain(*short, parts)).float().mean()) > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_probe_cancels_and_stays_in_range(dtype):
    x, weight = cancelling(torch.empty(4, 4097, dtype=dtype), torch.empty(50, 4097, dtype=dtype))
    sizes = x.double().abs() @ weight.double().abs().T
    assert ((x.double() @ weight.double().T).abs() <= 1e-13 * sizes).all()
    assert float(sizes.max()) < torch.finfo(dtype).max


def test_a_cpu_that_places_rows_differently_gets_them_one_by_one(monkeypatch):
    """A library whose bits depend on a row's place in the product."""
    monkeypatch.setattr(
        invariant_matmul, "_fixed",
        lambda x, w, b: torch.cat([chain(r[None], w, 1 + i % 2) for i, r in enumerate(x)]),
    )  # fmt: skip
    rows = invariant_matmul._cpu_rows.__wrapped__(3, 32, torch.float32, False, 1)
    assert rows == (1, 1)


def test_the_tile_is_chosen_by_shape_alone():
    shapes = [(n, 4096) for n in (16, 576, 4096, 128256)] + [(1024, 8192)]
    for m, (n, k) in itertools.product((1, 64, 65, 128, 1000, 4096), shapes):
        for size in (2, 4):
            tile = tile_for(m, n, k, size, 132)
            assert min(tile.rows, tile.columns) >= 16
            # Shared memory of a multiprocessor, of which a program may have 227 KiB on Hopper.
            assert (tile.rows + tile.columns) * tile.depth * size * tile.stages <= 227 * 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_route_is_taken_where_its_bits_are_the_chains(dtype, monkeypatch):
    """What cuBLAS does is played by chains: it splits K from three rows on, unless told not to."""
    calls, slow = [], []

    def kernel(x, w, b):
        calls.append(len(x))
        return chain(x, w, 1) if b is None else (chain(x.float(), w.float(), 1) + b).to(x.dtype)

    def broken(x, w, b):
        raise RuntimeError("no such kernel")

    ways = {
        "cuBLAS": lambda x, w, b: kernel(x, w, b) if len(x) < 3 else chain(x, w, 2),
        "broken": broken,
        "unsplit": lambda x, w, b: kernel(x, w, b) if b is None else chain(x, w, 1) + b,
    }
    monkeypatch.setattr(invariant_cublas, "_ROUTES", ways)
    monkeypatch.setattr(invariant_cublas, "_CHOSEN", {})
    monkeypatch.setattr(invariant_cublas, "_sets", lambda *operands: [operands])
    monkeypatch.setattr(invariant_cublas, "_milliseconds", lambda way, sets: way in slow)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weight, bias = torch.ones(40, 96, dtype=dtype), torch.ones(40, dtype=dtype)

    def taken(x, b=None):
        way = invariant_cublas.route(x, weight, b, kernel)
        return next((name for name, f in ways.items() if f is way), None)

    assert taken(torch.ones(2, 96, dtype=dtype)) == "cuBLAS"
    assert taken(torch.ones(3, 96, dtype=dtype)) == "unsplit"
    assert taken(torch.ones(3, 96, dtype=dtype), bias) is None  # rounds before it adds the bias
    assert taken(torch.ones(3, 96, dtype=dtype).t().contiguous().t()) == "unsplit"
    assert taken(torch.ones(1, 96, dtype=dtype).expand(3, -1)) is None
    assert routes() == {"cuBLAS": 1, "unsplit": 2, "kernel": 1}
    again = torch.ones(5, 96, dtype=dtype)
    assert taken(again) == "unsplit"
    before = len(calls)
    assert taken(again) == "unsplit"
    assert len(calls) == before  # found out once
    name = f"allow_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_reduced_precision_reduction"
    switches, was = torch.backends.cuda.matmul, getattr(torch.backends.cuda.matmul, name)
    try:
        setattr(switches, name, not was)
        assert taken(again) == "unsplit"
        assert len(calls) > before  # and again when torch is told something else
    finally:
        setattr(switches, name, was)
    before = len(calls)
    assert taken(again) == "unsplit"
    assert len(calls) == before
    slow.append(ways["unsplit"])
    assert taken(torch.ones(6, 96, dtype=dtype)) is None  # equal, and slower than the kernel
    slow.append(ways["cuBLAS"])
    assert taken(torch.ones(1, 96, dtype=dtype)) == "cuBLAS"  # as quick as torch, or torch itself
    assert invariant_cublas.route(torch.ones(3, 96), weight.float(), None, kernel) is None


@pytest.mark.parametrize("biased", [False, True])
def test_cublas_may_compute_a_weight_in_pieces(biased, monkeypatch):
    """Played by chains: K is split for a weight as a whole, in eighths, and with few columns."""

    def products(a, b, out, bias=0.0):
        parts = 2 if len(a) == 8 or b.shape[2] < 20 else 1
        pairs = zip(a.float(), b.float().mT, strict=True)
        out.copy_(torch.stack([chain(x, w, parts) for x, w in pairs]) + bias)

    monkeypatch.setattr(torch, "bmm", products)
    monkeypatch.setattr(torch, "baddbmm", lambda b, *operands, out: products(*operands, out, b))
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, b: chain(x, w, 2))
    monkeypatch.setattr(invariant_cublas, "_CHOSEN", {})
    monkeypatch.setattr(invariant_cublas, "_sets", lambda *operands: [operands])
    monkeypatch.setattr(invariant_cublas, "_milliseconds", lambda way, sets: way is kernel)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def kernel(x, w, b):
        return (chain(x.float(), w.float(), 1) + (0.0 if b is None else b)).to(x.dtype)

    def taken(n, weight=None):
        x = draw(3, 96, dtype=torch.bfloat16).cpu()
        weight = draw(n, 96, dtype=torch.bfloat16, seed=1).cpu() if weight is None else weight
        bias = draw(n, dtype=torch.bfloat16, seed=2).cpu() if biased else None
        way = invariant_cublas.route(x, weight, bias, kernel)
        if way is not None:
            assert torch.equal(way(x, weight, bias), kernel(x, weight, bias))
        return next((name for name, f in invariant_cublas._ROUTES.items() if f is way), None)

    assert taken(40) == "cuBLAS, halves"
    assert taken(24) is None  # its bits are others
    assert taken(41) is None  # no two equal pieces
    assert taken(40, draw(96, 40, dtype=torch.bfloat16).cpu().t()) == "cuBLAS, halves"
    invariant_cublas._CHOSEN.clear()
    monkeypatch.setattr(invariant_cublas, "_milliseconds", lambda way, sets: way is not kernel)
    assert taken(40) is None  # equal, and slower than the kernel


def test_a_weight_is_split_alike_for_every_number_of_rows(monkeypatch):
    """Also where that costs time, from 64 rows on; the tile of few rows is not that of many."""
    seen = []
    monkeypatch.setattr(invariant_matmul, "_in_parts", lambda *operands: seen.append(operands))
    for (n, k), (parts, few) in invariant_matmul.SPLITS.items():
        assert k % (parts * few.depth) == 0
        weight = torch.empty(n, k, dtype=torch.bfloat16, device="meta")
        for m in (1, 32, 33, 64, 4096):
            x = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
            invariant_matmul._rows_by(x, weight, None, False, True, None)
        assert [call[4] for call in seen] == [parts] * 5
        assert [call[5] for call in seen] == [few, few, None, None, None]
        seen.clear()


@pytest.mark.parametrize(
    ("n", "k", "count"), [(1024, 8192, 7), (4096, 8192, 2), (32768, 4096, 1), (24, 50, 16)]
)
def test_routes_are_timed_with_weights_that_do_not_stay_in_the_cache(n, k, count, monkeypatch):
    cache = type("Properties", (), {"L2_cache_size": 50 * 2**20})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cache)
    x, weight = torch.ones(3, k), torch.ones(k, n, dtype=torch.bfloat16).t()
    sets = invariant_cublas._sets(x, weight, None)
    weights = [w for _, w, _ in sets]
    assert len({w.data_ptr() for w in weights}) == len(weights) == count
    assert all(w.stride() == weight.stride() and torch.equal(w, weight) for w in weights)
    nbytes = 2 * n * k
    assert (count - 1) * nbytes <= min(100 * 2**20, 2**28)
    assert count * nbytes > 100 * 2**20 or count == 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torchs_switches_are_put_back(dtype):
    switches = torch.backends.cuda.matmul
    names = [f"allow_{t}_reduced_precision_reduction{s}" for t in ("bf16", "fp16")
             for s in ("", "_split_k")]  # fmt: skip

    def state():
        library = torch.backends.cuda.preferred_blas_library()
        return [getattr(switches, name) for name in names], library

    before = state()
    # A build without CUDA refuses in the middle.
    with contextlib.suppress(RuntimeError), invariant_cublas._without_split(dtype):
        assert state() != before
    assert state() == before


@pytest.mark.skipif(not CUDA, reason="cuBLAS needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("n", "k"),
    [(4096, 4096), (6144, 4096), (11008, 4096), (4096, 11008), (4096, 14336), (1024, 8192),
     (4100, 4096), (1536, 576), (192, 576), (49152, 576)],
)  # fmt: skip
def test_cublas_where_it_is_taken_is_the_chain(n, k, dtype):
    """Every number of rows, on new operands, with wide exponents among them."""
    weight = draw(n, k, dtype=dtype, seed=1)
    wide = 4 if dtype == torch.bfloat16 else 2  # float16 would overflow, and NaN is not NaN
    x = draw(max(MANY), k, dtype=dtype) * torch.exp2(draw(max(MANY), 1, dtype=dtype) * wide)
    bias = draw(n, dtype=dtype, seed=2)
    for b in (None, bias):
        whole = by_kernel(x, weight, b)
        for m in MANY:
            assert torch.equal(matmul(x[:m], weight, b), whole[:m]), m
    assert any(name != "kernel" for name in routes())
