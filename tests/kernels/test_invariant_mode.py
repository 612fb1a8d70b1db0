"""invariant(): what of torch it replaces, refuses and leaves, and models under it."""

import subprocess
import sys
import threading

import pytest
import torch
from torch.nn import functional

import roundoff
from roundoff.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from roundoff.kernels import attention, interpreting, invariant_operators, matmul
from roundoff.kernels.invariant_mode import VariantOperatorError

DEVICE = "cpu" if interpreting() else "cuda"
CUDA = DEVICE == "cuda"
TYPES = (torch.float32, torch.float16, torch.bfloat16)
slow = pytest.mark.slow(reason="only a change of what is replaced, or of torch, can break it")
ROWS = [1, 2, 3, 5, 16, 17, 64, 129] + ([*range(4, 131), 1000, 4095] if CUDA else [])


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def rotated(x):
    """The first half of each row against the second, as in a rotary embedding."""
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 : x.shape[-1] // 2 * 2]
    angle = torch.arange(a.shape[-1], device=x.device).float()
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def gated(x):
    """Of a packed product: a view with gaps when there are several rows, without for one."""
    gate, up = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 : x.shape[-1] // 2 * 2]
    return functional.silu(gate) * up


#: What a decoder does besides products and attention, each on rows.
OPERATORS = {
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: functional.rms_norm(x, x.shape[-1:]),
    "rms norm of transformers": lambda x: (
        x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
    ),
    "rotary": rotated,
    "silu": functional.silu,
    "silu, gated": gated,
    "gelu": functional.gelu,
    "gelu, tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "elu": functional.elu,
    "mish": functional.mish,
    "cube": lambda x: x.pow(3),
    "power": lambda x: x.abs().pow(2.5),
    "soft cap": lambda x: torch.tanh(x / 30) * 30,
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "scaled sum": lambda x: torch.add(x, 3 * x, alpha=0.7),
    "sigmoid in place": lambda x: x.clone().sigmoid_(),
    "cos": torch.cos,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "softmax": lambda x: x.softmax(-1),
    "softmax in float32": lambda x: x.softmax(-1, dtype=torch.float32),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "mean": lambda x: x.mean(-1),
    "mean, kept": lambda x: x.mean(-1, keepdim=True, dtype=torch.float32),
    "sum": lambda x: x.sum(-1),
    "variance": lambda x: x.var(-1),
    "deviation": lambda x: x.std(-1, correction=0, keepdim=True),
    "variance and mean": lambda x: torch.stack(torch.var_mean(x, -1), -1),
    "deviation and mean": lambda x: torch.stack(torch.std_mean(x, -1), -1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "norm of order 1": lambda x: x.norm(1, dim=-1, keepdim=True),
    "norm of order 3": lambda x: torch.linalg.vector_norm(x.float(), 3, dim=-1),
    "largest": lambda x: torch.linalg.vector_norm(x, torch.inf, dim=-1),
    "normalized": lambda x: functional.normalize(x, dim=-1),
    "argmax": lambda x: x.argmax(-1),
    "topk": lambda x: x.topk(min(3, x.shape[-1])).values,
    "add, multiply": lambda x: x * 1.7 + x * x,
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
    # Each in one type, which takes turns; the others are slow.
    [
        pytest.param(name, dtype, marks=[slow] if (i - j) % len(TYPES) else [])
        for i, name in enumerate(OPERATORS)
        for j, dtype in enumerate(TYPES)
    ],
    ids=str,
)
def test_an_operator_of_a_decoder_has_the_property(name, dtype, threads):
    operator = OPERATORS[name]
    for columns in (7, 576, 1000, *((4096, 50257) if CUDA else (33001,))):
        x = draw(max(ROWS) if columns < 5000 else 130, columns, dtype=dtype)
        with torch.no_grad(), roundoff.invariant():
            whole = operator(x)
            for m in ROWS if columns < 5000 else [1, 2, 3, 64]:
                for start in {0, 1, len(x) - m}:
                    if start + m <= len(x):
                        made = operator(x[start : start + m].clone())
                        assert torch.equal(made, whole[start : start + m]), (columns, m, start)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_replaces_an_operator_computes_it(dtype):
    for columns in (7, 1000, 33001):
        x = draw(3, columns, dtype=dtype)
        for name, operator in OPERATORS.items():
            for rows in (x, x[:1], x[None, :1]):
                with torch.no_grad(), roundoff.invariant():
                    made = operator(rows)
                wanted = operator(rows)
                assert made.dtype == wanted.dtype
                assert made.shape == wanted.shape
                torch.testing.assert_close(made, wanted, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("n", [1, 64, 2048])
def test_rows_are_reduced_alone(n):
    """What replaces torch's reductions on CUDA, by the kernel of this process."""
    x = draw(70, n) + 3
    functions = {
        "logarithms": (invariant_operators._logarithms, lambda x: x.logsumexp(1)),
        "variance": (lambda x: invariant_operators._moments(x, 1.0)[0], lambda x: x.var(1)),
        "uncorrected": (
            lambda x: invariant_operators._moments(x, 0.0)[0], lambda x: x.var(1, correction=0)
        ),
        "mean": (lambda x: invariant_operators._moments(x, 1.0)[1], lambda x: x.mean(1)),
        **{
            f"norm {order}": (
                lambda x, o=order: invariant_operators._norms(x, o),
                lambda x, o=order: torch.linalg.vector_norm(x, o, dim=1),
            )
            for order in (1.0, 2.0, 3.0, 0.5)
        },
    }  # fmt: skip
    for name, (ours, theirs) in functions.items():
        made = ours(x)
        if name == "variance" and n == 1:
            assert made.isnan().all()
            continue
        torch.testing.assert_close(made.double(), theirs(x.double()), rtol=2e-6, atol=2e-6)
        powers = name in ("norm 3.0", "norm 0.5")  # a CPU has two programs for them
        for start, m in () if powers and not CUDA else ((0, 1), (0, 16), (33, 1), (5, 64)):
            assert torch.equal(ours(x[start : start + m].clone()), made[start : start + m]), name
    infinite = torch.tensor([[torch.inf, 0.0], [-torch.inf, -torch.inf]], device=DEVICE)
    assert invariant_operators._logarithms(infinite).tolist() == [torch.inf, -torch.inf]


def test_a_result_is_written_where_it_is_asked_for():
    x = draw(3, 40_000)
    for reduce in (torch.sum, torch.mean, torch.logsumexp, torch.std):
        out = torch.empty(1, device=DEVICE)
        with torch.no_grad(), roundoff.invariant():
            wanted = reduce(x[:1], -1)
            assert reduce(x[:1], -1, out=out) is out
        assert torch.equal(out, wanted)


def test_products_go_to_ours():
    a, b, c = draw(5, 16), draw(16, 7, seed=1), draw(7, seed=2)
    batch, vector = draw(3, 5, 16, seed=3), draw(16, seed=4)
    wanted = matmul(a, b.t(), c)
    with torch.no_grad(), roundoff.invariant() as within:
        assert torch.equal(torch.addmm(c, a, b), wanted)
        assert torch.equal(functional.linear(a, b.t(), c), wanted)
        assert torch.equal(functional.linear(a[0], b.t(), c), wanted[0])
        assert torch.equal(torch.mm(a, b), matmul(a, b.t()))
        assert torch.equal(a @ vector, matmul(vector[None], a)[0])
        assert torch.equal(torch.einsum("bij,jk->bik", batch, b), matmul(batch, b.t()))
        torch.testing.assert_close(torch.dot(vector, vector), vector.square().sum())
        bmm = torch.bmm(batch, b.expand(3, -1, -1))
        assert torch.equal(bmm[1:2], torch.bmm(batch[1:2], b[None]))
        more = torch.baddbmm(bmm, batch, b.expand(3, -1, -1), beta=0.5, alpha=2)
        torch.testing.assert_close(more, 2.5 * bmm)
        more = torch.addmm(draw(5, 7), a, b, beta=2, alpha=3)
        torch.testing.assert_close(more, 2 * draw(5, 7) + 3 * matmul(a, b.t()))
        nothing = torch.addmm(torch.full((7,), float("nan"), device=DEVICE), a, b, beta=0)
        torch.testing.assert_close(nothing, matmul(a, b.t()))
        whole = torch.ones(2, 3, dtype=torch.int64) @ torch.ones(3, 4, dtype=torch.int64)
        assert whole.tolist() == [[3] * 4] * 2
        out = torch.empty(5, 7, device=DEVICE)
        assert torch.equal(torch.mm(a, b, out=out), matmul(a, b.t()))
    assert within.replaced["aten::mm"] == 2
    assert within.replaced["aten::bmm"] >= 2
    assert not within.lacking


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_experts_products_go_to_ours(dtype):
    """Rows sorted by expert; an expert without rows, and rows that none has."""
    from transformers.integrations import moe

    x, weights = draw(9, 16, dtype=dtype), draw(4, 8, 16, dtype=dtype, seed=1).mT
    offs = torch.tensor([3, 3, 4, 8], dtype=torch.int32, device=DEVICE)
    parts = [(0, 3, 0), (3, 4, 2), (4, 8, 3)]
    wanted = torch.cat([matmul(x[a:b], weights[e].t()) for a, b, e in parts])
    exact = torch.cat([x[a:b].double() @ weights[e].double() for a, b, e in parts])
    wide = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(wanted.double(), exact, rtol=wide, atol=4 * wide)
    for product in (moe._grouped_mm_fallback, torch.ops.transformers.grouped_mm_fallback) + (
        (functional.grouped_mm,) if hasattr(functional, "grouped_mm") else ()
    ):
        with torch.no_grad(), roundoff.invariant() as within:
            made = product(x, weights, offs=offs)
        assert torch.equal(made[:8], wanted), product
        assert within.replaced, product
        assert not within.lacking


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_attention_goes_to_ours(dtype):
    q, k, v = (draw(2, 4, 9, 16, dtype=dtype, seed=s) for s in range(3))
    few = k[:, :2], v[:, :2]
    sdpa = functional.scaled_dot_product_attention
    mask = torch.ones(9, 9, dtype=torch.bool, device=DEVICE).tril()
    added = torch.zeros(9, 9, device=DEVICE, dtype=dtype).masked_fill(~mask, -float("inf"))
    calls = [
        ((q, k, v), {}), ((q, k, v), {"is_causal": True}), ((q, k, v), {"attn_mask": mask}),
        ((q, k, v), {"attn_mask": added}), ((q, *few), {"enable_gqa": True, "scale": 0.3}),
        ((q[:, :, :4], k, v), {"is_causal": True}), ((q[0], k[0], v[0]), {"is_causal": True}),
    ]  # fmt: skip
    for operands, options in calls:
        wanted = sdpa(*(t.double() for t in operands), **{
            n: o.double() if o is added else o for n, o in options.items()
        })  # fmt: skip
        with roundoff.invariant() as within:
            made = sdpa(*operands, **options)
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(made.double(), wanted, rtol=tolerance, atol=tolerance)
        assert within.replaced["scaled_dot_product_attention"] == 1
    with roundoff.invariant():
        assert torch.equal(sdpa(q, k, v, is_causal=True), attention(q, k, v))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dropout_p": 0.1}, UnsupportedError),
        ({"attn_mask": torch.full((9, 9), 0.5)}, UnsupportedError),
        ({"attn_mask": torch.ones(9, 9, dtype=torch.bool), "is_causal": True}, ArgumentError),
        ({"attn_mask": torch.ones(9, 8, dtype=torch.bool)}, ShapeError),
    ],
)
def test_attention_that_is_not_ours(options, error):
    q = draw(2, 4, 9, 16)
    there = {n: o.to(DEVICE) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    with roundoff.invariant(), pytest.raises(error):
        functional.scaled_dot_product_attention(q, q, q, **there)


def test_an_operator_that_lacks_the_property_is_named_or_counted():
    x, weight = draw(1, 2, 8), draw(3, 2, 2)
    with roundoff.invariant(), pytest.raises(VariantOperatorError, match="aten::convolution"):
        functional.conv1d(x, weight)
    with roundoff.invariant(lacking="count") as within:
        made = functional.conv1d(x, weight)
        functional.conv1d(x, weight)
    assert torch.equal(made, functional.conv1d(x, weight))
    assert dict(within.lacking) == {"aten::convolution": 2}
    complex_ = torch.ones(2, 2, dtype=torch.complex64, device=DEVICE)
    with roundoff.invariant(), pytest.raises(VariantOperatorError, match="aten::mm"):
        complex_ @ complex_
    with pytest.raises(ArgumentError, match="raise"):
        roundoff.invariant(lacking="warn")


def test_types_and_shapes_that_do_not_meet():
    x = draw(2, 4)
    with roundoff.invariant():
        with pytest.raises(DtypeError):
            torch.mm(x, draw(4, 3, dtype=torch.float16))
        with pytest.raises((ShapeError, RuntimeError)):
            torch.mm(x, draw(3, 4))


def test_it_nests_and_ends_where_it_ends():
    x, weight = draw(3, 8), draw(5, 8, seed=1)

    def counted(mode):
        return mode.replaced["aten::mm"]

    outer, inner = roundoff.invariant(), roundoff.invariant()
    with torch.no_grad():
        with outer:
            with inner:
                x @ weight.T
            x @ weight.T
            with outer:  # itself, once more
                x @ weight.T
        x @ weight.T
    assert (counted(outer), counted(inner)) == (2, 1)
    with pytest.raises(KeyError), roundoff.invariant() as within:
        raise KeyError("leaves")
    x @ weight.T
    assert not within.replaced


def test_it_is_of_the_thread_that_enters_it():
    x, weight = draw(3, 8), draw(5, 8, seed=1)
    within = roundoff.invariant()
    inside, done = threading.Event(), threading.Event()

    def other():
        inside.wait(10)
        x @ weight.T
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with within:
        inside.set()
        done.wait(10)
        x @ weight.T
    thread.join()
    assert within.replaced["aten::mm"] == 1


def test_it_is_a_decorator():
    x, weight = draw(3, 8), draw(5, 8, seed=1)
    within = roundoff.invariant()

    @within
    def product(depth):
        """A product."""
        return product(depth - 1) if depth else x @ weight.T

    assert torch.equal(product(3), matmul(x, weight))
    assert within.replaced["aten::mm"] == 1
    assert product.__doc__ == "A product."
    for late in (_generator, _coroutine):
        with pytest.raises(ArgumentError, match="runs after the call"):
            roundoff.invariant()(late)


def _generator():
    yield 1


async def _coroutine():
    return 1


def test_gradients_are_those_of_torch():
    layer = torch.nn.Linear(8, 5, device=DEVICE)
    x = draw(3, 8).requires_grad_()
    wanted = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    with roundoff.invariant():
        made = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    for a, b in zip(made, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_a_compiled_function_runs_uncompiled_within():
    weight = draw(5, 33, seed=1)
    compiled = torch.compile(lambda x: functional.silu(x @ weight.T).sum(-1), backend="eager")
    x = draw(20, 33)
    compiled(x)
    with roundoff.invariant() as within:
        whole = compiled(x)
        for m in (1, 2, 7):
            assert torch.equal(compiled(x[:m]), whole[:m])
    assert within.replaced["aten::mm"] == 4
    torch._dynamo.reset()


def test_it_cannot_be_entered_in_a_compiled_function():
    weight = draw(5, 8, seed=1)

    def product(x):
        with roundoff.invariant():
            return x @ weight.T

    with pytest.raises(Exception, match=r"sees through|invariant"):
        torch.compile(product, backend="eager", fullgraph=True)(draw(3, 8))
    torch._dynamo.reset()


# Models. ------------------------------------------------------------------------------------------

SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 131,
    "intermediate_size": 100, "num_hidden_layers": 2, "max_position_embeddings": 512,
}  # fmt: skip


def model_of(name, dtype):
    import transformers

    more = {"head_dim": 16} if name == "Gemma" else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.to(DEVICE, dtype).eval().requires_grad_(False)


def padded_on_the_left(ids, length):
    more = length - ids.shape[1]
    mask = torch.ones(len(ids), length, dtype=torch.int64, device=DEVICE)
    mask[:, :more] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return functional.pad(ids, (more, 0)), mask, positions


@pytest.mark.parametrize(
    ("name", "dtype", "attention_of"),
    [
        pytest.param(name, dtype, way, marks=[slow] if (i + j + k) % 2 else [])
        for i, name in enumerate(("Llama", "Qwen2", "Gemma", "Mixtral"))
        for j, dtype in enumerate((torch.float32, torch.bfloat16))
        for k, way in enumerate(("roundoff", "sdpa"))
    ],
    ids=str,
)
def test_a_model_of_transformers_has_the_property(name, dtype, attention_of):
    from transformers import StaticCache

    model, tokens = model_of(name, dtype), 70
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 131, (6, tokens), generator=generator).to(DEVICE)
    with roundoff.invariant():
        model.set_attn_implementation(attention_of)
        whole = model(ids).logits
        for rows in ([0], [5], [3, 1], [2, 2, 4]):  # alone and in other company
            assert torch.equal(model(ids[rows]).logits, whole[rows])
        # A prefill in chunks and a token at a time, in a cache that grows.
        made, cache = [], None
        for start, end in ((0, 13), (13, 66), *((i, i + 1) for i in range(66, tokens))):
            out = model(ids[:, start:end], past_key_values=cache, use_cache=True)
            made, cache = [*made, out.logits], out.past_key_values
        assert torch.equal(torch.cat(made, 1), whole)
        # Padded on the left, in a cache of a fixed length, then token by token.
        wide, mask, positions = padded_on_the_left(ids[:2, :66], 75)
        cache = StaticCache(config=model.config, max_cache_len=90)
        mask = functional.pad(mask, (0, 15), value=1)
        options = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
        logits = model(wide, position_ids=positions, **options).logits[:, -66:]
        assert torch.equal(logits, whole[:2, :66])
        for i in range(66, tokens):
            position = torch.full((2, 1), i, device=DEVICE)
            logits = model(ids[:2, i : i + 1], position_ids=position, **options).logits
            assert torch.equal(logits[:, 0], whole[:2, i])


def test_a_model_is_near_what_it_is_without():
    model = model_of("Llama", torch.float32)
    ids = torch.arange(12, device=DEVICE)[None]
    wanted = model(ids).logits
    with roundoff.invariant() as within:
        made = model(ids).logits
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)
    assert within.replaced["scaled_dot_product_attention"] == 2


def test_attention_of_transformers_refuses_what_it_has_not():
    q = draw(1, 2, 3, 16)
    for options in ({"softcap": 5.0}, {"dropout": 0.5}, {"position_bias": q}):
        with pytest.raises(UnsupportedError, match="attention with"):
            invariant_operators.by_transformers(torch.nn.Module(), q, q, q, None, **options)


MKL = ("aten::exp", "aten::sin", "aten::tanh")
FIRST_CALLS = """
import torch, roundoff
from torch.profiler import profile
from roundoff.kernels import attention

q = torch.ones(1, 1, 300, 16)
with profile(record_shapes=True) as seen:
    {call}
sizes = {{}}
for event in seen.events():
    if event.name in {names}:
        sizes.setdefault(event.name, event.input_shapes[0])
print(sizes)
"""


@pytest.mark.parametrize(
    "call", ["attention(q, q, q)", "with roundoff.invariant(): q.sin(), q.tanh(), q.exp()"]
)
def test_a_process_first_calls_a_function_of_mkl_with_one_element(call):
    # Where several threads make the first call, one of them may compute something else.
    script = FIRST_CALLS.format(call=call, names=MKL)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == str({name: [1] for name in MKL}), done.stderr[-2000:]
