"""What has the same bits in every batch: products, attention and a decoder's other operators.

On a CPU products and attention are torch's in pieces of fixed shape, and the kernels run in the
interpreter, with products that are chains; on CUDA both are what readers get.
"""

import contextlib
import itertools
import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import roundoff
from roundoff.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from roundoff.kernels import (
    attention,
    interpreting,
    invariant_attention,
    invariant_cublas,
    invariant_matmul,
    invariant_model,
    invariant_operators,
    layer_norm,
    matmul,
    rms_norm,
    shuffled_programs,
)
from roundoff.kernels.invariant_attention import Seen, seen_by_mask, seen_by_position
from roundoff.kernels.invariant_cublas import cancelling, routes
from roundoff.kernels.invariant_matmul import Tile
from roundoff.kernels.invariant_mode import VariantOperatorError

DEVICE = "cpu" if interpreting() else "cuda"
CUDA = DEVICE == "cuda"
TYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS = [1, 2, 3, 5, 16, 17, 64, 129, *((*range(4, 131), 1000, 4095) if CUDA else ())]
COLUMNS = (576, 1001, 4096, 50257) if CUDA else (576, 1001, 33001)
by_type = pytest.mark.parametrize("dtype", TYPES, ids=str)
#: In the interpreter bfloat16 is bits in integers.
by_kernel_type = pytest.mark.parametrize("dtype", TYPES if CUDA else TYPES[:2], ids=str)
sdpa = functional.scaled_dot_product_attention


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def rms_error(made, truth):
    return float((made.double() - truth).square().mean().sqrt())


# --- each operator of a decoder, on rows ---------------------------------------------------------


def gated(x):
    """Of a packed product: a view with gaps when there are several rows, without for one."""
    gate, up = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 : x.shape[-1] // 2 * 2]
    return functional.silu(gate) * up


def weight_of(x, rows=24):
    return draw(rows, x.shape[-1], seed=1).to(x) / x.shape[-1] ** 0.5


def attended(x):
    """Each row is a text of seven tokens."""
    q, k, v = (x[..., i : i + 112].view(-1, 2, 7, 8) for i in (0, 1, 2))
    return sdpa(q, k, v, is_causal=True).flatten(1)


#: Name -> operator, with its results about 1.
OPERATORS = {
    "linear": lambda x: functional.linear(x, weight_of(x), weight_of(x)[:, 0]),
    "matmul": lambda x: x @ weight_of(x).T,
    "attention": attended,
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: functional.rms_norm(x, x.shape[-1:]),
    "rms norm of transformers": lambda x: (
        x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
    ),
    "silu": functional.silu,
    "silu, gated": gated,
    "gelu": functional.gelu,
    "exp": torch.exp,
    "power": lambda x: x.abs().add(0.1).pow(2.5),
    "sigmoid in place": lambda x: x.clone().sigmoid_(),
    "cos": torch.cos,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum": lambda x: x.sum(-1) / x.shape[-1] ** 0.5,
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "sinh": torch.sinh,
    "softmax, across": lambda x: x[:, :130].reshape(-1, 2, 65).softmax(1).flatten(1),
    "whole scale": lambda x: x * torch.full_like(x[:, :1], 301, dtype=torch.long),
}


@pytest.fixture
def threads():
    """Several: with one, torch adds a single row as it adds many."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, TYPES[i % 3]) for i, name in enumerate(OPERATORS)]
    + [(name, torch.float32) for name in ("softmax", "mean", "layer_norm")],
    ids=str,
)
def test_an_operator_has_the_bits_of_a_row_alone_and_is_near_float64(name, dtype, threads):
    operator, products = OPERATORS[name], name in ("linear", "matmul", "attention")
    for columns in (576, 1001) if products else COLUMNS:
        rows = ROWS[:5] if name == "attention" else ROWS if columns < 5000 else [1, 2, 64]
        x = draw(max(rows), columns, dtype=dtype)
        with torch.no_grad(), roundoff.invariant():
            whole = operator(x)
            for m in rows:
                for start in {0, min(1, len(x) - m), len(x) - m}:
                    made = operator(x[start : start + m].clone())
                    assert torch.equal(made, whole[start : start + m]), (columns, m, start)
        # On a CPU: of rows that begin at any place torch's attention on a GPU reads none.
        wanted, plain = operator(x.double()), operator(x.cpu())
        assert (whole.dtype, whole.shape) == (plain.dtype, plain.shape)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(whole.double(), wanted.double(), rtol=8 * eps, atol=16 * eps)


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_within_are_those_of_float64(name):
    x = draw(3, 130).requires_grad_()
    wide = x.detach().double().requires_grad_()
    with roundoff.invariant():
        (made,) = torch.autograd.grad(OPERATORS[name](x).sin().sum(), x)
    (wanted,) = torch.autograd.grad(OPERATORS[name](wide).sin().sum(), wide)
    torch.testing.assert_close(made.double(), wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("n", [1, 64, 2048])
def test_the_kernel_adds_each_row_alone(n):
    """What replaces torch's reductions on CUDA."""
    x = draw(70, n) + 3
    made = invariant_operators._sums(x)
    torch.testing.assert_close(made.double(), x.double().sum(1), rtol=2e-6, atol=2e-6)
    for start, m in ((0, 1), (33, 1), (5, 64)):
        assert torch.equal(
            invariant_operators._sums(x[start : start + m].clone()), made[start:][:m]
        )


# --- the context ---------------------------------------------------------------------------------


def test_products_go_to_ours_wherever_the_result_is_written():
    a, b, c = draw(5, 16), draw(16, 7, seed=1), draw(7, seed=2)
    batch, vector = draw(3, 5, 16, seed=3), draw(16, seed=4)
    out = torch.empty(5, 7, device=DEVICE)
    with torch.no_grad(), roundoff.invariant() as within:
        assert torch.equal(torch.addmm(c, a, b), matmul(a, b.t(), c))
        assert torch.equal(functional.linear(a[0], b.t(), c), matmul(a[0], b.t(), c))
        assert torch.equal(a @ vector, matmul(a, vector[None])[:, 0])
        bmm = torch.bmm(batch, b.expand(3, -1, -1))
        assert torch.equal(bmm[1:2], torch.bmm(batch[1:2], b[None]))
        if CUDA:  # a grid has 65,535 places in its second direction
            many = torch.ones(65537, 1, 16, device=DEVICE)
            assert torch.equal(torch.bmm(many, many.mT), torch.full_like(many[..., :1], 16))
        assert torch.mm(a, b, out=out) is out
        assert torch.equal(out, matmul(a, b.t()))
        assert torch.ones(1, 2).long() @ torch.ones(2, 1).long() == 2
    assert within.replaced["aten::mm"] == 1


def test_a_part_of_a_batch_is_multiplied_as_of_one():
    x = draw(3, 9, 33, dtype=torch.bfloat16)
    with roundoff.invariant():
        a, b = (functional.linear(t[:, 1:], x[0], x[0, 0, :9]) for t in (x, x[:1]))
    assert torch.equal(a[:1], b)


def test_an_operator_that_lacks_the_property_is_named():
    x, weight = draw(1, 2, 8), draw(3, 2, 2)
    with roundoff.invariant(), pytest.raises(VariantOperatorError, match="aten::convolution"):
        functional.conv1d(x, weight)
    with roundoff.invariant(), pytest.raises(VariantOperatorError, match="aten::mm"):
        torch.mm(x[0].to(torch.complex64), x[0].T.to(torch.complex64))
    with roundoff.invariant(), pytest.raises(VariantOperatorError, match="aten::addmm"):
        torch.addmm(x[0, 0], x[0], x[0].T @ x[0], beta=2)
    with roundoff.invariant(), pytest.raises(VariantOperatorError, match="batch_norm"):
        functional.batch_norm(x[0], None, None, training=True)
    with roundoff.invariant(), pytest.raises(VariantOperatorError, match="gru"):
        torch.nn.GRU(8, 2).to(DEVICE, torch.bfloat16)(x.bfloat16())


def test_it_nests_ends_where_it_ends_and_is_of_its_thread():
    x, weight = draw(3, 8), draw(5, 8, seed=1)
    outer, inner = roundoff.invariant(), roundoff.invariant()
    thread = threading.Thread(target=lambda: x @ weight.T)
    with contextlib.suppress(KeyError), outer:
        with inner, outer:  # itself, once more
            x @ weight.T
        with inner:
            x @ weight.T
        thread.start()
        thread.join()
        raise KeyError("leaves")
    x @ weight.T
    assert (outer.replaced["aten::mm"], inner.replaced["aten::mm"]) == (1, 1)


def test_beside_torch_compile():
    """A compiled function runs uncompiled within; entered in one, it is refused."""
    x, weight = draw(20, 33), draw(5, 33, seed=1)
    compiled = torch.compile(lambda x: functional.silu(x @ weight.T).sum(-1), backend="eager")
    compiled(x)
    with roundoff.invariant() as within:
        whole = compiled(x)
        assert torch.equal(compiled(x[:2]), whole[:2])
    assert within.replaced["aten::mm"] == 2

    def product(x):
        with roundoff.invariant():
            return x @ weight.T

    with pytest.raises(Exception, match=r"sees through|invariant"):
        torch.compile(product, backend="eager", fullgraph=True)(x)
    q, k, v = sequence(torch.float32, 9)
    for call, operator, operands in (
        (lambda x: matmul(x, weight) + 1, "matmul", (x, weight, None)),
        (lambda q: attention(q, k, v) + 1, "attention", (q, k, v, *at(q, k, 9), 0.25)),
    ):
        made = torch.compile(call, backend="aot_eager", fullgraph=True)(operands[0])
        assert torch.equal(made, call(operands[0]))
        torch.library.opcheck(getattr(torch.ops.roundoff, f"invariant_{operator}"), operands)
    torch._dynamo.reset()


# --- products ------------------------------------------------------------------------------------

TILES = (
    Tile(True, 16, 32, 64, 4, 3),
    Tile(False, 32, 16, 32, 4, 2),
    Tile(False, 64, 64, 128, 8, 2),
)


def by_kernel(x, weight, bias=None, tile=None):
    return invariant_matmul._by_kernel(x[None], weight[None], bias, tile)[0]


@by_type
@pytest.mark.parametrize("biased", [False, True])
def test_where_a_row_is_and_how_it_lies_does_not_matter(biased, dtype):
    """Of a real layer, where cuBLAS is asked for each layout by itself; NaN does not leak."""
    n, k = (4096, 4096) if CUDA else (5, 33)
    x, weight = cancelling(*(torch.empty(m, k, device=DEVICE, dtype=dtype) for m in (300, n)))
    bias = draw(n, dtype=dtype, seed=2) if biased else None
    whole = matmul(x, weight, bias)
    for start, end in ((299, 300), (3, 8), (7, 24), (1, 65), (130, 259)):
        rows = x[start:end]
        odd = torch.zeros(rows.numel() + 1, device=DEVICE, dtype=dtype)[1:].view(rows.shape)
        layouts = {
            "as a slice": rows,
            "at an odd address": odd.copy_(rows),
            "in a wider tensor": torch.cat([rows, rows], 1)[:, :k],
            "by columns": rows.t().contiguous().t(),
            "behind NaN": torch.cat([torch.full_like(rows, torch.nan), rows]),
        }
        for name, laid in layouts.items():
            made = matmul(laid, weight, bias)[-len(rows) :]
            assert torch.equal(made, whole[start:end]), (start, end, name)
    assert torch.equal(matmul(x[:70], weight.t().contiguous().t(), bias), whole[:70])
    assert torch.equal(matmul(x[:6].view(2, 3, k), weight, bias).flatten(0, 1), whole[:6])


@by_type
def test_the_kernels_rows_are_chains_whatever_the_tile(dtype, chains):
    for k, biased in ((70, True), (300, False)):
        x, weight = draw(19, k, dtype=dtype), draw(37, k, dtype=dtype, seed=1)
        bias = draw(37, dtype=dtype, seed=2) if biased else None
        made = by_kernel(x, weight, bias)
        for tile in TILES:
            for rows in (slice(0, 1), slice(2, 7), slice(3, 19)):
                part = by_kernel(x[rows].clone(), weight, bias, tile)
                assert torch.equal(part, made[rows])
            with shuffled_programs(1) if interpreting() else contextlib.nullcontext():
                assert torch.equal(by_kernel(x, weight, bias, tile), made)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.integers(1, 150),
    dtype=st.sampled_from((torch.float16, torch.float32)),
    tile=st.sampled_from((None, *TILES)),
    biased=st.booleans(),
)
def test_products_are_near_float64(m, n, k, dtype, tile, biased):
    x, weight = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype, seed=1)
    bias = draw(n, dtype=dtype, seed=2) if biased else None
    truth = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    sizes = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.abs())
    allowed = torch.finfo(dtype).eps / 2 * truth.abs() + (k + 2) * 2**-23 * sizes
    for made in (by_kernel(x, weight, bias, tile), matmul(x, weight, bias)):
        assert bool(((made.double() - truth).abs() <= allowed).all())


def test_a_long_product_in_float32_errs_no_more_than_torchs(chains):
    """Chains of 16 values, in sums of 16 chains."""
    (m, n), k = (1024, 1024) if CUDA else (16, 20), 4096
    x, weight = draw(m, k), draw(n, k, seed=1)
    truth = x.double() @ weight.double().T
    error = rms_error(by_kernel(x, weight), truth)
    assert error <= 1.1 * rms_error(torch.mm(x, weight.T), truth)
    # An addition's error has a deviation of at most 0.29 epsilon of its sum, and the squares of n
    # sums add up to n / 2 times that of the last; a product that is not fused rounds once more.
    unit = torch.finfo(torch.float32).eps * float(truth.square().mean().sqrt())
    assert error <= 0.29 * ((16 + 16 + k / 256) / 2 + 1) ** 0.5 * unit


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 4), (4, 0, 4), (3, 4, 0)])
def test_empty_sizes_are_as_in_torch(m, n, k):
    x, weight, bias = draw(m, k), draw(n, k), draw(n)
    torch.testing.assert_close(matmul(x, weight, bias), functional.linear(x, weight, bias))


def chain(x, weight, parts):
    """Products added along K one after another in float32, K cut in parts that are added last."""
    total = torch.zeros(len(x), len(weight))
    for a, b in zip(x.float().chunk(parts, 1), weight.float().chunk(parts, 1), strict=True):
        part = torch.zeros_like(total)
        for k in range(a.shape[1]):
            part = part + a[:, k : k + 1] * b[:, k]
        total = total + part
    return total.to(x.dtype)


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_a_probe_shows_a_split_even_after_rounding(dtype):
    """Where every addition rounds, two orders end K roundings apart.

    Each is uniform over a spacing of the sum, so that their difference has a deviation of at most
    sqrt(K / 6) of the largest spacing: 11 at K = 768. Multiples of it are equal with a probability
    of 1 / (11 sqrt(2 pi)) = 3.5 %; those of smaller spacings less often.
    """
    x, weight = cancelling(*(torch.empty(s, dtype=dtype) for s in ((2, 768), (256, 768))))
    for parts in (2, 8):
        other = chain(x, weight, 1) != chain(x, weight, parts)
        assert other.float().mean() > 0.925  # five deviations of a count of 512 elements away
    sizes = x.double().abs() @ weight.double().abs().T
    assert ((x.double() @ weight.double().T).abs() <= 1e-13 * sizes).all()
    assert float(sizes.max()) < torch.finfo(dtype).max


def small_products(count=200):
    """(K, N, type, bias, threads), half of them of a few terms and columns."""
    numbers = random.Random(2)
    for i in range(count):
        sizes = (numbers.randint(1, 12 if i % 2 else 64) for _ in range(2))
        dtype = numbers.choice(TYPES if CUDA else (*TYPES[:1], torch.float64, *TYPES))
        # A call in two threads takes milliseconds where others run, too.
        yield (*sizes, dtype, numbers.random() < 0.5, 2 if i % 20 == 1 else 1)


def test_a_row_of_a_small_product_has_its_bits_wherever_it_is(threads):
    """Libraries have other programs for the rows and columns that are left of a small product."""
    failed = []
    for k, n, dtype, biased, count in small_products():
        torch.set_num_threads(count)
        x, weight = draw(37, k, dtype=dtype), draw(n, k, dtype=dtype, seed=1)
        bias = draw(n, dtype=dtype, seed=2) if biased else None
        whole = matmul(x, weight, bias)
        parts = [(i, i + 1) for i in (*range(8), 15, 18)]
        parts += [(3, 5), (1, 9), (20, 37), (4, 37)]
        alike = [
            torch.equal(matmul(rows, weight, bias), whole[start:end])
            for start, end in parts
            for rows in (x[start:end].clone(), x.repeat(1, 2)[start:end, :k])
        ]
        # A view of one row, or of one column, has strides that mean nothing.
        wide = torch.nn.functional.pad(weight, (1, 6))[:, 1 : 1 + k]
        alike.append(torch.equal(matmul(x[:3], wide, bias), whole[:3]))
        truth = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        single = torch.finfo(torch.float32).eps if dtype.itemsize < 8 else 0
        torch.testing.assert_close(
            whole.double(), truth, rtol=torch.finfo(dtype).eps, atol=20 * k * single + 1e-13
        )
        if not all(alike):
            failed.append((k, n, dtype, biased, count))
    assert not failed


def fused(x, weight):
    """A chain whose products are not rounded."""
    total = torch.zeros(len(x), len(weight))
    for k in range(x.shape[1]):
        total = (total + x[:, k : k + 1].double() * weight[:, k].double()).float()
    return total


def by_twos(x, weight, b=0.0):
    made = chain(x[:, ::2], weight[:, ::2], 1) + chain(x[:, 1::2], weight[:, 1::2], 1)
    return made + b


#: Other ways to add than the chain from the first term to the last, to which a bias is added.
OTHERS = {
    "from the last": lambda x, w, b: chain(x.flip(1), w.flip(1), 1) + b,
    "even and odd": by_twos,
    "fused": lambda x, w, b: fused(x, w) + b,
    "bias first": lambda x, w, b: chain(
        torch.cat([torch.ones_like(x[:, :1]), x], 1),
        torch.cat([(b + 0 * w[:, 0])[:, None], w], 1),
        1,
    ),
    "zeros with a sign": lambda x, w, b: torch.where(
        (made := chain(x, w, 1) + b) == 0, -made.abs(), made
    ),
}


@pytest.mark.parametrize("k", [3, 4, 5, 17, 32])
@pytest.mark.parametrize("other", OTHERS)
def test_a_cpu_that_places_rows_differently_gets_them_one_by_one(other, k, monkeypatch):
    """A library that computes one element of a product, at its end, in another order."""
    dtype = torch.float32 if other == "fused" else TYPES[k % 3]
    alike = invariant_matmul._alike.__wrapped__
    columns, biased, chosen = 4, other != "zeros with a sign", OTHERS[other]

    def placed(rows):
        def product(x, w, b):
            x, w, b = x.float(), w.float(), torch.zeros(()) if b is None else b.float()
            made = (chain(x[:1], w, 1) + b).repeat(len(x), 1)  # probes have equal rows
            if len(x) == rows:
                made[-1, -1] = chosen(x[-1:], w, b)[0, -1]
            return made.to(dtype)

        return product

    def rows_of(product):
        monkeypatch.setattr(invariant_matmul, "_fixed", product)
        monkeypatch.setattr(invariant_matmul, "_alike", alike)
        return invariant_matmul._cpu_rows(128, columns, k, dtype, biased)

    small = 16 if dtype == torch.float32 else 8
    assert rows_of(placed(None)) == (small, 128)
    assert rows_of(placed(small)) == (1, 1)
    assert rows_of(placed(128)) == (small, small)


def test_where_probes_cannot_tell_orders_apart_a_row_is_computed_alone(monkeypatch):
    """Of two terms there is one sum, and of probes that are all zero no order shows."""
    probes = invariant_matmul._probes
    for dtype, biased in itertools.product((*TYPES, torch.float64), (False, True)):
        for k in (3, 4, 5, 8, 16, 17, 64):
            assert invariant_matmul._tells.__wrapped__(3, k, dtype, biased), (k, dtype, biased)
        assert not invariant_matmul._tells.__wrapped__(3, 2, dtype, False)
        for k in (1, 2):
            assert invariant_matmul._cpu_rows(1, 3, k, dtype, biased) == (1, 1)
    blind = [(x * 0, w, b) for x, w, b in probes(3, 8, torch.float32, False)]
    monkeypatch.setattr(invariant_matmul, "_probes", lambda *_: iter(blind))
    for name in ("_tells", "_alike"):
        monkeypatch.setattr(invariant_matmul, name, getattr(invariant_matmul, name).__wrapped__)
    assert invariant_matmul._cpu_rows(1, 3, 8, torch.float32, False) == (1, 1)


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_a_route_is_taken_where_its_bits_are_the_chains(dtype, monkeypatch):
    """What cuBLAS does is played by chains: it splits K from three rows on, unless told not to."""

    def kernel(x, w, b):
        return chain(x, w, 1) if b is None else (chain(x.float(), w.float(), 1) + b).to(x.dtype)

    ways = {
        "cuBLAS": lambda x, w, b: kernel(x, w, b) if len(x) < 3 else chain(x, w, 2),
        "broken": lambda x, w, b: x @ w,
        "unsplit": lambda x, w, b: kernel(x, w, b) if b is None else chain(x, w, 1) + b,
    }
    slow = []
    monkeypatch.setattr(invariant_cublas, "_ROUTES", ways)
    monkeypatch.setattr(invariant_cublas, "_CHOSEN", {})
    monkeypatch.setattr(invariant_cublas, "_sets", lambda *operands: [operands])
    monkeypatch.setattr(invariant_cublas, "_milliseconds", lambda way, sets: way in slow)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ones, weight = torch.ones(6, 96, dtype=dtype), torch.ones(40, 96, dtype=dtype)

    def taken(rows, b=None):
        way = invariant_cublas.route(ones[:rows], weight, b, kernel)
        return next((name for name, f in ways.items() if f is way), None)

    assert taken(2) == "cuBLAS"
    assert taken(3) == "unsplit"
    assert taken(3, weight[:, 0]) is None  # rounds before it adds the bias
    assert routes() == {"cuBLAS": 1, "unsplit": 1, "kernel": 1}
    slow += ways["unsplit"], ways["cuBLAS"]
    assert taken(6) is None  # equal, and slower than the kernel
    assert taken(1) == "cuBLAS"  # as quick as torch, or torch itself


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_no_route_is_taken_where_its_order_cannot_be_told(dtype, monkeypatch):
    """Of few terms cuBLAS is not asked, and a bias that is added first is told from one added last.

    Of a product of one element, too, with operands drawn until sixty-four elements agree.
    """

    def first(x, w, b):
        if b is None:
            return chain(x, w, 1)
        ones, column = torch.ones_like(x[:, :1]), b[:, None]
        return chain(torch.cat([ones, x], 1), torch.cat([column, w], 1), 1)

    def last(x, w, b):
        return (chain(x.float(), w.float(), 1) + (0 if b is None else b)).to(x.dtype)

    monkeypatch.setattr(invariant_cublas, "_ROUTES", {"cuBLAS": first})
    monkeypatch.setattr(invariant_cublas, "_CHOSEN", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for k, n, taken in ((63, 40, False), (64, 40, True), (64, 1, True)):
        x, weight = torch.ones(1, k, dtype=dtype), torch.ones(n, k, dtype=dtype)
        assert (invariant_cublas.route(x, weight, None, last) is not None) == taken
        assert invariant_cublas.route(x, weight, weight[:, 0], last) is None
    halves = {"cuBLAS": lambda x, w, b: chain(x, w, 2)}
    monkeypatch.setattr(invariant_cublas, "_ROUTES", halves)
    monkeypatch.setattr(invariant_cublas, "_CHOSEN", {})
    assert invariant_cublas.route(x, weight, None, last) is None


@pytest.mark.skipif(not CUDA, reason="cuBLAS needs CUDA")
@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
@pytest.mark.parametrize(
    ("n", "k"), [(4096, 4096), (11008, 4096), (4096, 14336), (1024, 8192), (4100, 4096), (192, 576)]
)
def test_cublas_where_it_is_taken_is_the_chain(n, k, dtype):
    """Every number of rows, on new operands, with wide exponents among them."""
    weight = draw(n, k, dtype=dtype, seed=1)
    wide = 4 if dtype == torch.bfloat16 else 2  # float16 would overflow, and NaN is not NaN
    x = draw(4096, k, dtype=dtype) * torch.exp2(draw(4096, 1, dtype=dtype) * wide)
    for b in (None, draw(n, dtype=dtype, seed=2)):
        whole = by_kernel(x, weight, b)
        for m in (*range(1, 131), 144, 192, 255, 257, 512, 777, 1024, 2048, 4096):
            assert torch.equal(matmul(x[:m], weight, b), whole[:m]), m
    assert any(name != "kernel" for name in routes())


# --- attention -----------------------------------------------------------------------------------

#: Tokens around the end of a tile and of a split.
TOKENS = 330 if CUDA else 270
#: Splits of a program that has them all.
WHOLE = 1000


def sequence(dtype, tokens=TOKENS, batch=2, heads=4, groups=2, head=16):
    q = draw(batch, heads, tokens, head, dtype=dtype)
    return q, *(draw(batch, groups, tokens, head, dtype=dtype, seed=s) for s in (1, 2))


def at(q, k, queries):
    return seen_by_position(len(q), queries, k.shape[2], q.device)


def plain(q, k, v, seen):
    return invariant_attention.attend(q, k, v, seen)


def one_split(q, k, v, seen, rows=64, each=1):
    scale = q.shape[3] ** -0.5
    return invariant_attention._by_kernel(q, k, v, seen, scale, rows, each)


#: The computation of this device, and the kernel.
each_way = pytest.mark.parametrize("way", [plain, one_split])


def errs_as_torch(made, q, k, v):
    truth = sdpa(*(t.double() for t in (q, k, v)), is_causal=True, enable_gqa=True)
    theirs = sdpa(q, k, v, is_causal=True, enable_gqa=True)
    return rms_error(made, truth) <= 1.1 * rms_error(theirs, truth)


@by_type
def test_a_token_has_the_same_bits_in_prefill_chunks_and_decoding(dtype):
    q, k, v = sequence(dtype)
    whole = attention(q, k, v)
    assert errs_as_torch(whole, q, k, v)
    places = (0, 62, 63, 64, 65, 128, 255, 256, 257, TOKENS - 1)
    parts = [(i, i + 1) for i in (range(TOKENS) if CUDA else places)]
    parts += [(i, min(i + n, TOKENS)) for n in (7, 64, 100, 256) for i in (0, 2 * n)]
    for start, end in parts:
        made = attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end])
        assert torch.equal(made, whole[:, :, start:end]), (start, end)
    repeated = (t.repeat_interleave(2, 1) for t in (k, v))
    assert torch.equal(attention(q, *repeated), whole)
    by_token = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    assert torch.equal(attention(*by_token), whole)


@by_kernel_type
def test_the_kernel_has_the_same_bits_in_every_form(dtype, chains):
    q, k, v = sequence(dtype, batch=1, heads=2, groups=1)
    wanted = one_split(q, k, v, at(q, k, TOKENS), 32, WHOLE)
    assert errs_as_torch(wanted, q, k, v)
    for start, end in ((0, 1), (63, 65), (250, 262)):
        part = k[:, :, :end], v[:, :, :end]
        for rows, each in ((16, 1), (16, 2), (64, 1), (64, WHOLE)):
            seen = at(q, part[0], end - start)
            made = one_split(q[:, :, start:end], *part, seen, rows, each)
            assert torch.equal(made, wanted[:, :, start:end]), (start, end, rows, each)


def test_many_splits_are_joined_as_in_one_program(chains, monkeypatch):
    """Eleven, more than the eight that are loaded at a time; another tile has other bits."""
    q, long = draw(2, 2, 2, 16, dtype=torch.float16), {"dtype": torch.float16}
    k, v = (draw(2, 1, 680, 16, seed=s, **long) for s in (1, 2))
    first = torch.tensor([[0, 0], [333, 333]], dtype=torch.int32, device=DEVICE)
    seen = Seen(first, at(q, k, 2).last)  # the second has splits without keys
    usual = one_split(q, k, v, seen, None, WHOLE)
    monkeypatch.setattr(invariant_attention, "SPLIT", 64)
    wanted = one_split(q, k, v, seen, None, WHOLE)
    assert not torch.equal(wanted, usual)
    for each in (1, 2, 4, 10):
        assert torch.equal(one_split(q, k, v, seen, 16, each), wanted), each


@each_way
@pytest.mark.parametrize(("which", "bad"), [(1, torch.nan), (2, torch.nan), (2, torch.inf)])
def test_a_query_has_the_bits_of_the_keys_that_it_sees_alone(way, which, bad, chains):
    """Whatever the batch, the padding, the room of the cache and the keys that others see are."""
    operands = [draw(2, heads, 140, 16, seed=heads) for heads in (2, 1, 1)]
    operands[which][0, :, 50, 3] = bad
    q, k, v = operands
    i, left = torch.arange(70), torch.tensor([[5], [64]])
    stretches = {
        "causal": (0 * i, i + 1),
        "padded on the left": (left, left + i + 1),
        "a window": ((i - 8).clamp(min=0), i + 1),
        "nothing at first": (0 * i, (i - 7).clamp(min=0)),
    }
    place = torch.arange(140)
    for name, stretch in stretches.items():
        first, last = (t.expand(2, 70) for t in stretch)
        mask = (place >= first[..., None]) & (place < last[..., None])
        made = way(q[:, :, :70], k, v, seen_by_mask(mask[:, None].to(DEVICE), 2, 70, 140))
        for b, n in itertools.product((0, 1), (0, 7, 50, 64, 69)):
            keys = slice(first[b, n], last[b, n])
            one, *kept = q[b : b + 1, :, n : n + 1], *(t[b : b + 1, :, keys] for t in (k, v))
            seen = last[b, n] > first[b, n]
            alone = way(one, *kept, at(one, kept[0], 1)) if seen else torch.zeros_like(one)
            same = {"rtol": 0, "atol": 0, "equal_nan": True, "msg": name}
            torch.testing.assert_close(made[b, :, n], alone[0, :, 0], **same)


def test_a_mask_says_what_a_query_sees():
    """Stretches of any place, nothing and everything."""
    low, high = torch.randint(0, 41, (2, 2, 7), generator=torch.Generator().manual_seed(0))
    low[:, 0], high[:, 0] = 0, torch.tensor([0, 40])
    mask = (torch.arange(40) >= low[..., None]) & (torch.arange(40) < high[..., None])
    seen = seen_by_mask(mask[:, None].to(DEVICE), 2, 7, 40)
    for made, wanted in zip(seen, (low, high), strict=True):
        assert torch.equal(made.cpu(), torch.where(low < high, wanted, 0).int())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", ["rounded first", "rounded last", "of one"])
def test_the_kernel_of_rms_norm_is_the_formula(kind, dtype):
    """By float64, a row as in any batch, columns of any number, rows that lie apart."""
    for columns in (1, 130, 2500):
        x, weight = draw(5, 2 * columns, dtype=dtype)[:, :columns], draw(columns, dtype=dtype)
        made = invariant_model._rms_rows(x, weight, 1e-6, kind)
        for rows in ([3], [4, 0]):
            assert torch.equal(invariant_model._rms_rows(x[rows], weight, 1e-6, kind), made[rows])
        wide = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-6).rsqrt()
        wanted = wide * (weight.double() + (kind == "of one"))
        eps = torch.finfo(dtype).eps
        # Seven operations round, by half of ε each, and the sum a little; then a subnormal's step.
        step = torch.finfo(dtype).smallest_normal * eps
        torch.testing.assert_close(made.double(), wanted, rtol=4 * eps, atol=step)


def test_a_second_derivative_is_refused():
    x = draw(3, 8).requires_grad_()
    (first,) = torch.autograd.grad(matmul(x, x.detach()).sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_mask_in_compiled_code():
    """Nothing can be asked there: a query whose keys have gaps gets NaN, and no other does."""
    q, mask = draw(1, 2, 4, 8), torch.ones(1, 1, 4, 4, dtype=torch.bool, device=DEVICE).tril()
    call = torch.compile(
        lambda mask: attention(q, q, q, mask=mask), backend="aot_eager", fullgraph=True
    )
    wanted = attention(q, q, q)
    assert torch.equal(call(mask), wanted)
    mask[..., 2, 1] = False
    made = call(mask)
    assert made[:, :, 2].isnan().all()
    assert torch.equal(made[:, :, [0, 1, 3]], wanted[:, :, [0, 1, 3]])
    torch._dynamo.reset()


def test_a_mask_that_changes_is_read_again(monkeypatch):
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=DEVICE).tril()
    before = seen_by_mask(mask, 1, 4, 4)
    assert seen_by_mask(mask, 1, 4, 4) is before
    mask[..., 0] = False
    changed = seen_by_mask(mask, 1, 4, 4)
    assert (changed.first.tolist(), changed.last.tolist()) == ([[0, 1, 1, 1]], [[0, 2, 3, 4]])
    # What a capture of a CUDA graph computes is not there in another, nor outside.
    monkeypatch.setattr(invariant_attention, "_recorded", lambda device: True)
    assert seen_by_mask(mask, 1, 4, 4) is not seen_by_mask(mask, 1, 4, 4)


def test_a_mask_seen_in_inference_serves_a_call_with_gradients():
    q, mask = draw(1, 2, 4, 8), torch.ones(1, 1, 4, 4, dtype=torch.bool, device=DEVICE)
    with torch.inference_mode():
        attention(q, q, q, mask=mask)
    attention(q.requires_grad_(), q, q, mask=mask).sum().backward()


def test_a_mask_expanded_over_heads_has_three_or_four_dimensions():
    q, mask = draw(2, 3, 4, 8), torch.ones(4, 4, dtype=torch.bool, device=DEVICE).tril()
    for shape in ((3, 4, 4), (2, 3, 4, 4)):
        with roundoff.invariant():
            made = sdpa(q, q, q, mask.expand(shape))
        assert torch.equal(made, attention(q, q, q, causal=True))


@pytest.mark.skipif(CUDA, reason="the order of a CPU")
def test_scores_on_a_cpu_take_the_memory_of_a_few_queries(monkeypatch):
    """With an infinity among the values, too."""
    q, sizes, torchs = draw(1, 1, 600, 16), [], torch.where
    values = q.index_fill(2, torch.tensor(5), torch.inf)

    def where(*operands):
        made = torchs(*operands)
        sizes.append(made.numel())
        return made

    def on_cpu(x, *rest, ours=invariant_matmul._on_cpu):
        sizes.append(x.numel())
        return ours(x, *rest)

    monkeypatch.setattr(torch, "where", where)
    monkeypatch.setattr(invariant_attention, "_on_cpu", on_cpu)
    attention(q, q, values, causal=True)
    assert max(sizes) <= 256 * 64


def test_autocast_changes_nothing_of_ours():
    x = draw(1, 2, 4, 8)
    wanted = matmul(x, x[0, 0]), attention(x, x, x)
    with torch.autocast(DEVICE, torch.bfloat16):
        made = matmul(x, x[0, 0]), attention(x, x, x)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_a_masked_tensor_is_refused_by_name():
    x = torch.ones(2, 4, device=DEVICE)
    masked = torch.masked.masked_tensor(x, x > 0)
    for call in (
        lambda: matmul(masked, x),
        lambda: matmul(x, masked),
        lambda: attention(masked, x, x),
        lambda: layer_norm(masked, 4),
        lambda: rms_norm(x, 4, masked),
    ):
        with pytest.raises(ArgumentError, match="MaskedTensor"):
            call()


def test_causal_counts_from_the_last_key_or_from_the_first():
    q, k, v = sequence(torch.float32, 9)
    whole = attention(q, k, v)
    with roundoff.invariant():
        made = sdpa(q[:, :, :4], k, v, is_causal=True, enable_gqa=True)
        assert torch.equal(made, whole[:, :, :4])
        with pytest.raises(UnsupportedError, match="more queries than keys"):
            sdpa(q, k[:, :, :4], v[:, :, :4], is_causal=True, enable_gqa=True)
    assert torch.equal(attention(q[:, :, 5:], k, v), whole[:, :, 5:])
    assert not attention(q, k[:, :, :0], v[:, :, :0]).any()


@pytest.mark.skipif(CUDA, reason="float64 is multiplied on a CPU alone")
@pytest.mark.parametrize("kind", ["causal", "masked", "no keys"])
def test_gradients_of_attention(kind):
    q = draw(2, 4, 3, 4).double().requires_grad_()
    keys = 0 if kind == "no keys" else 6
    k, v = (draw(2, 2, keys, 4, seed=s).double().requires_grad_() for s in (1, 2))
    mask = torch.ones(2, 1, 3, 6, dtype=torch.bool).tril(3)
    if kind == "masked":
        mask[0, :, :, :2] = False  # padding
        mask[1, :, 0] = False  # a query that sees nothing
    options = {"mask": mask} if kind == "masked" else {"causal": True}
    assert torch.autograd.gradcheck(lambda *t: attention(*t, **options), (q, k, v))


def test_a_row_refused_in_a_capture_is_no_number(chains):
    """Where nothing can be asked, a query whose keys have gaps gets NaN, and no other does."""
    q, k, v = sequence(torch.float32, 70)
    first, last = at(q, k, 70)
    refused = last.clone()
    refused[0, 3] = -1
    for each in (1, WHOLE):
        made = one_split(q, k, v, Seen(first, refused), None, each)
        assert made[0, :, 3].isnan().all()
        made[0, :, 3] = 0
        assert made.isfinite().all()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda q, k, v: attention(q[:, :3], k, v), ShapeError),
        (lambda q, k, v: torch.bmm(q[0], k[0]), RuntimeError),
        (lambda q, k, v: torch.bmm(q[:, :3, :3], q[:, :3, :3]), RuntimeError),
        (lambda q, k, v: attention(q.half(), k, v), DtypeError),
        (lambda q, k, v: torch.mm(q[0, 0], k[0, 0].half().T), DtypeError),
        (lambda q, k, v: attention(q, k, v, mask=GAPS), UnsupportedError),
        (lambda q, k, v: sdpa(q, k, v, dropout_p=0.1, enable_gqa=True), UnsupportedError),
        (lambda q, k, v: sdpa(q, k, v, MASK / 2, enable_gqa=True), UnsupportedError),
    ],
)
def test_what_is_not_ours_is_refused(call, error):
    with roundoff.invariant(), pytest.raises(error):
        call(*sequence(torch.float32, 9))


MASK = torch.ones(2, 1, 9, 9, dtype=torch.bool, device=DEVICE)
GAPS = torch.arange(100, device=DEVICE).view(1, 1, 10, 10)[..., :9, :9] % 3 != 0
