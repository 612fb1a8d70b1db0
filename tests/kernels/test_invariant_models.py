"""roundoff.invariant(model): models that are changed in place."""

import contextlib
import copy
import threading
import warnings

import pytest
import torch
from torch.nn import functional

import roundoff
from roundoff.errors import ArgumentError
from roundoff.kernels import invariant_model, invariant_operators
from roundoff.kernels.invariant_mode import VariantOperatorError

from .test_invariant import DEVICE, draw

slow = pytest.mark.slow(reason="a compiler, for minutes")
MODELS = ("Llama", "Qwen2", "Gemma", "Mixtral", "GPT2")


SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}


def model_of(name, dtype):
    import transformers

    sizes = SIZES | ({"head_dim": 16} if name == "Gemma" else {})
    if name == "GPT2":
        sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 131, "n_inner": 100}
    torch.manual_seed(0)
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**sizes))
    return model.to(DEVICE, dtype).eval().requires_grad_(False)


def padded_on_the_left(ids, length):
    mask = functional.pad(torch.ones_like(ids), (length - ids.shape[1], 0))
    return functional.pad(ids, (length - ids.shape[1], 0)), mask


def changed(name, dtype):
    return roundoff.invariant(model_of(name, dtype))


def tokens(count=70):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 131, (6, count), generator=generator).to(DEVICE)


@pytest.mark.parametrize(
    ("name", "dtype", "way"),
    [
        ("Llama", torch.float32, "changed"),
        ("Llama", torch.bfloat16, "roundoff"),
        ("Qwen2", torch.float32, "sdpa"),
        ("Gemma", torch.float32, "changed"),
        ("Mixtral", torch.bfloat16, "changed"),
        ("Mixtral", torch.float32, "roundoff"),
        ("GPT2", torch.float32, "changed"),
    ],
    ids=str,
)
def test_a_model_has_the_property(name, dtype, way):
    """Changed, or within the context with an attention of transformers."""
    from transformers import StaticCache

    ids = tokens()
    model = changed(name, dtype) if way == "changed" else model_of(name, dtype)
    if way != "changed":
        invariant_operators.register()
        model.set_attn_implementation(way)
    with torch.no_grad(), contextlib.nullcontext() if way == "changed" else roundoff.invariant():
        whole = model(ids).logits
        for rows in ([0], [5], [3, 1], [2, 2, 4]):  # alone and in other company
            assert torch.equal(model(ids[rows]).logits, whole[rows])
        # A prefill in chunks and a token at a time, in a cache that grows.
        made, cache = [], None
        for start, end in ((0, 13), (13, 66), *((i, i + 1) for i in range(66, 70))):
            out = model(ids[:, start:end], past_key_values=cache, use_cache=True)
            made, cache = [*made, out.logits], out.past_key_values
        assert torch.equal(torch.cat(made, 1), whole)
        # Padded on the left, in a cache of a fixed length, then token by token.
        wide, mask = padded_on_the_left(ids[:2, :66], 75)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = StaticCache(config=model.config, max_cache_len=90)
        mask = functional.pad(mask, (0, 15), value=1)
        options = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
        logits = model(wide, position_ids=positions, **options).logits[:, -66:]
        assert torch.equal(logits, whole[:2, :66])
        for i in (66, 67):
            position = torch.full((2, 1), i, device=DEVICE)
            logits = model(ids[:2, i : i + 1], position_ids=position, **options).logits
            assert torch.equal(logits[:, 0], whole[:2, i])


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "GPT2"])
def test_the_forward_pass_of_training_has_the_bits_of_sampling(name):
    """A trainer reads a text whole, with gradients; a sampler wrote it token by token."""
    # torch's gradient of a mixture takes no rows of 200 bytes.
    dtype = torch.float32 if name == "Mixtral" else torch.bfloat16
    model, ids = changed(name, dtype), tokens(20)
    made, cache = [], None
    with torch.no_grad():
        for i in range(20):
            out = model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            made, cache = [*made, out.logits], out.past_key_values
    model.requires_grad_(True)
    logits = model(ids).logits
    assert torch.equal(logits.detach(), torch.cat(made, 1))
    logits.float().log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_torchs(name):
    model, ids = changed(name, torch.float32), tokens(12)
    plain = type(model)(model.config).to(DEVICE).eval()
    plain.load_state_dict(model.state_dict())
    made = []
    for one in (model, plain):
        one.requires_grad_(True)
        out = one(ids, labels=ids)
        made.append((out.logits, *torch.autograd.grad(out.loss, list(one.parameters()))))
    for a, b in zip(*made, strict=True):
        scale = float(b.abs().max())
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 + 1e-4 * scale)
    places = model.invariant_places
    assert len([n for n in places.replaced if n.endswith("lm_head")]) == 1
    assert bool(places.within) == (name == "Mixtral"), places.within  # its experts and routers


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has one way")
@pytest.mark.parametrize(("n", "k"), [(576, 1536), (1024, 8192), (64, 200), (4096, 14336)])
def test_a_linear_takes_each_way_of_the_product(n, k):
    """cuBLAS adds some of these as our kernel does, some by halves, some never."""
    linear = torch.nn.Linear(k, n, bias=False).to(DEVICE, torch.bfloat16)
    changed_one = roundoff.invariant(torch.nn.Sequential(copy.deepcopy(linear)))
    x = draw(300, k).to(torch.bfloat16)
    alone = torch.cat([changed_one(x[i : i + 1]) for i in range(300)])
    for rows in (1, 8, 300):
        made = changed_one(x[:rows])
        assert torch.equal(made, alone[:rows])
        assert made.grad_fn is not None
    torch.testing.assert_close(made, linear(x), rtol=2e-2, atol=2e-2 * float(made.abs().max()))


@pytest.mark.skipif(DEVICE == "cpu", reason="transformers compiles each step on a GPU alone")
def test_generate_compiled_into_graphs_writes_what_each_prompt_gets_alone():
    torch._dynamo.reset()
    model, ids = changed("Llama", torch.bfloat16), tokens(12)
    wide, mask = padded_on_the_left(ids, 17)

    def text(rows):
        return model.generate(
            wide[rows],
            attention_mask=mask[rows],
            max_new_tokens=20,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
            eos_token_id=None,
        )

    alone = [text([row]) for row in range(4)]
    for rows in ([0, 1, 2, 3], [3, 1], [2, 2, 0]):
        assert torch.equal(text(rows), torch.cat([alone[row] for row in rows]))
    torch._dynamo.reset()


def test_norms_are_told_apart_and_functions_have_gradients():
    from transformers.activations import ACT2FN
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norms = [LlamaRMSNorm(6), GemmaRMSNorm(6), torch.nn.RMSNorm(6)]
    kinds = ["rounded first", "of one", "rounded last"]
    assert [invariant_model._kind_of(norm) for norm in norms] == kinds
    x = torch.randn(2, 3, 6, dtype=torch.float64).requires_grad_()
    for layer in (torch.nn.LayerNorm(6), norms[2], ACT2FN["silu"], torch.nn.GELU()):
        ours = roundoff.invariant(copy.deepcopy(layer).double())
        torch.testing.assert_close(ours(x), copy.deepcopy(layer).double()(x))
        assert torch.autograd.gradcheck(ours, (x,))


class OwnRMSNorm(torch.nn.Module):
    """With an epsilon by another name, and added to the mean square or to its root."""

    def __init__(self, to_root, epsilon):
        super().__init__()
        self.weight, self.to_root, self.epsilon = (
            torch.nn.Parameter(torch.ones(64)),
            to_root,
            epsilon,
        )

    def forward(self, x):
        square = x.float().pow(2).mean(-1, keepdim=True)
        root = square.sqrt() + self.epsilon if self.to_root else (square + self.epsilon).sqrt()
        return (x.float() / root * self.weight).to(x.dtype)


@pytest.mark.parametrize("to_root", [False, True])
@pytest.mark.parametrize("epsilon", [1e-6, 1e-3])
def test_a_norm_with_another_epsilon_keeps_its_values(to_root, epsilon):
    """It shows in small rows alone."""
    norm, x = OwnRMSNorm(to_root, epsilon).to(DEVICE), draw(5, 64)
    assert invariant_model._kind_of(norm) is None
    changed_one = roundoff.invariant(copy.deepcopy(norm))
    assert changed_one.invariant_places.within == [""]
    for scale in (1, 1e-3, 1e-6):
        torch.testing.assert_close(changed_one(x * scale), norm(x * scale), rtol=1e-5, atol=0)


def test_hooks_of_a_function_of_one_element_run_once():
    """Those of the module, and those of all modules."""
    x, seen = draw(3, 64), []
    layer = torch.nn.SiLU()
    layer.register_forward_hook(lambda module, args, made: made * 2)
    every = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, made: seen.append(module)
    )
    try:
        made = roundoff.invariant(layer)(x)
    finally:
        every.remove()
    assert len(seen) == 1
    torch.testing.assert_close(made, 2 * functional.silu(x))


def test_it_keeps_the_property_when_weights_move():
    model, ids = changed("Llama", torch.float32), tokens(20)
    other = copy.deepcopy(model)
    other.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()})
    assert roundoff.invariant(model) is model  # twice is once
    for one in (other, other.half(), other.to(torch.bfloat16), model):
        with torch.no_grad():
            whole = one(ids).logits
            assert torch.equal(one(ids[2:3]).logits, whole[2:3])
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, other.float()(ids).logits)


class Own(torch.nn.Module):
    """A module as people write them: attention by a function, a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.into, self.scale = torch.nn.Linear(64, 192), torch.nn.Parameter(torch.ones(64))
        self.norm = torch.nn.LayerNorm(64)

    def forward(self, x):
        q, k, v = self.into(self.norm(x)).view(*x.shape[:-1], 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return functional.silu(y.transpose(1, 2).flatten(2)) @ torch.diag(self.scale)


def test_a_module_that_computes_by_functions_runs_within():
    torch.manual_seed(0)
    model = roundoff.invariant(torch.nn.Sequential(Own(), torch.nn.Linear(64, 8)).to(DEVICE))
    assert model.invariant_places.within == ["0"]
    x = draw(9, 33, 64)
    with torch.no_grad():
        whole = model(x)
        for rows in (1, 2, 5):
            assert torch.equal(model(x[3 : 3 + rows]), whole[3 : 3 + rows])


def test_a_model_within_is_advised_of_the_quicker_way_once():
    """Not a layer, nor a model that was changed, nor what a changed one computes within."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Own(), torch.nn.Linear(64, 8)).to(DEVICE), draw(2, 3, 64)
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    with roundoff.invariant() as within:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model[1](x)
        with pytest.warns(UserWarning, match=r"Sequential .* roundoff\.invariant\(model\)"):
            wanted = model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with within:  # it has said so
            model(x)
        changed_one = roundoff.invariant(copy.deepcopy(model))
        made = changed_one(x)
        with roundoff.invariant():
            changed_one(x)
            assert hooks == {}
        with roundoff.invariant():
            thread = threading.Thread(target=lambda: model(x))
            thread.start()
            thread.join()
    assert hooks == {}
    torch.testing.assert_close(made, wanted)


class Product(torch.nn.Module):
    def forward(self, x):
        return x @ x.mT


def test_a_product_by_its_sign_runs_within():
    assert roundoff.invariant(Product()).invariant_places.within


def test_a_copy_computes_with_its_own_weights():
    other = copy.deepcopy(roundoff.invariant(Own().to(DEVICE)))
    other.scale.data.zero_()
    assert not other(draw(2, 3, 64)).any()


def test_what_lacks_the_property_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Conv1d(2, 2, 1))
    with pytest.raises(VariantOperatorError) as error:
        roundoff.invariant(model)
    assert error.value.got == "1"
    assert "forward" not in vars(model[0])  # nothing was changed
    with pytest.raises(VariantOperatorError):
        roundoff.invariant(torch.nn.BatchNorm1d(3))
    with pytest.raises(ArgumentError, match="Module"):
        roundoff.invariant("count")


@pytest.mark.parametrize(
    ("name", "backend"),
    [("Llama", "aot_eager")]
    + [pytest.param(n, "inductor", marks=slow) for n in MODELS if n != "Mixtral"],
)
def test_it_compiles_without_a_break(name, backend):
    """A compiler traces the backward pass, too, with tensors of its own."""
    torch._dynamo.reset()
    model, ids = changed(name, torch.float32).requires_grad_(True), tokens(24)
    assert torch._inductor.config.emulate_precision_casts  # what a GPU shows without it

    def logits(ids):
        return model(ids, use_cache=False).logits

    run = torch.compile(logits, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        whole = run(ids)
        for rows in ([0], [4], [3, 1], [2, 2, 4]):
            assert torch.equal(run(ids[rows]), whole[rows])
    made = []
    for function in (run, logits):
        out = function(ids)
        made.append((out, *torch.autograd.grad(out.sin().sum(), list(model.parameters()))))
    for a, b in zip(*made, strict=True):
        largest = float(b.detach().abs().max())
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 + 1e-4 * largest)
    torch._dynamo.reset()
