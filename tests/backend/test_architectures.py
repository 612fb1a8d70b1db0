"""Architectures of transformers, small and with random weights: fused, and as right as eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from through_backend import compiled

from roundoff.compare import scaled_error
from roundoff.models import SIZES, Llama, random_tokens

transformers = pytest.importorskip("transformers")

WORDS = 96
ENCODER = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": WORDS,
    "num_hidden_layers": 2,
}
DECODER = ENCODER | {"num_key_value_heads": 2, "head_dim": 8}
VISION = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "image_size": 32,
    "patch_size": 8,
}
SPEECH = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 16,
    "max_source_positions": 20,
    "max_target_positions": 20,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def ids(length: int = 17) -> torch.Tensor:
    return torch.randint(3, WORDS, (2, length), generator=torch.Generator().manual_seed(0))


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def words() -> dict[str, Any]:
    return {"input_ids": ids(), "use_cache": False}


def padded() -> dict[str, Any]:
    mask = torch.ones(2, 17, dtype=torch.int64)
    mask[1, 11:] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def left() -> dict[str, Any]:
    """A text beside one that begins later."""
    return {"input_ids": ids(), "attention_mask": padded()["attention_mask"].flip(1)}


def image() -> dict[str, Any]:
    return {"pixel_values": drawn(2, 3, 32, 32)}


def translated() -> dict[str, Any]:
    return {"input_ids": ids(), "decoder_input_ids": ids(5), "use_cache": False}


def spoken() -> dict[str, Any]:
    return {"input_features": drawn(2, 16, 40), "decoder_input_ids": ids(5), "use_cache": False}


#: Name of the configuration -> (kind of model, configuration, inputs).
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "Gemma2": ("ForCausalLM", DECODER, words),
    "GPT2": ("LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS}, words),
    "Bert": ("Model", ENCODER, padded),
    "ModernBert": ("Model", ENCODER | {"pad_token_id": 0, "local_attention": 8}, padded),
    "T5": (
        "ForConditionalGeneration",
        {
            "vocab_size": WORDS,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
        },
        translated,
    ),
    "Whisper": (
        "ForConditionalGeneration",
        SPEECH | {"vocab_size": WORDS, "d_model": 32, "pad_token_id": 0},
        spoken,
    ),
    "ViT": ("ForImageClassification", VISION, image),
    "Mamba": (
        "ForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": WORDS, "state_size": 8},
        words,
    ),
    "Mixtral": (
        "ForCausalLM",
        DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2},
        words,
    ),
}
#: Relatives of Llama: configuration, and the attention that they are traced with.
RELATIVES: dict[str, tuple[dict[str, Any], str]] = {
    "Llama": ({}, "eager"),
    "Mistral": ({"sliding_window": 4}, "sdpa"),
    "Qwen2": ({}, "eager"),
    "Qwen3": ({}, "sdpa"),
    "Gemma": ({}, "eager"),
    "Phi3": ({"pad_token_id": 0}, "sdpa"),
}
#: What stays with torch.
PARTLY = {
    "Mixtral": {
        "transformers.grouped_mm_fallback.default",
        "aten.topk.default",
        "aten.sort.default",
        "aten.histc.default",
        "aten.floor_divide.default",
        "aten.index_put.default",
    },
}
QUICK = ("GPT2", "Bert", "ViT")


def built(name: str, kind: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    # Of two labels, which is the default, the error is that of four numbers: a matter of chance.
    config = getattr(transformers, f"{name}Config")(**{"num_labels": 256} | sizes)
    model = getattr(transformers, f"{name}{kind}")(config).eval().requires_grad_(False)
    for p in model.parameters():
        p.mul_(4 if p.dim() == 2 else 1)  # attention looks at some keys more than at others
    return model


def tensors(outputs: Any) -> list[torch.Tensor]:
    """What a model of transformers returns in floating point, keys and values included."""
    leaves = torch.utils._pytree.tree_leaves(outputs.to_tuple())
    caches = [x for x in leaves if isinstance(x, transformers.Cache)]
    leaves += [x for cache in caches for y in cache.layers for x in (y.keys, y.values)]
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]


@torch.no_grad()
def over_eagers(model: Any, run: Any, inputs: dict[str, Any]) -> float:
    """Root mean square of our error over that of eager's, of the worst output.

    The truth is the model in float64: what it rounds to float32 inside is off for both.
    """
    double = copy.deepcopy(model).double()
    if hasattr(double, "set_experts_implementation"):
        double.set_experts_implementation("eager")  # the grouped product takes no float64
    wide = {
        k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v
        for k, v in inputs.items()
    }
    ratios = []
    for ours, eagers, truth in zip(
        *(tensors(f(**i)) for f, i in ((run, inputs), (model, inputs), (double, wide))), strict=True
    ):
        one, two = (float((t - truth).square().mean().sqrt()) for t in (ours, eagers))
        ratios.append(one / two)
    return max(ratios)


def slow_but(names: tuple[str, ...]) -> list[Any]:
    slow = pytest.mark.slow(reason="an architecture more: traced, converted and fused")
    return [pytest.param(n, marks=() if n in names else slow) for n in MODELS]


@pytest.mark.parametrize("name", slow_but(QUICK))
def test_an_architecture_is_right(name: str) -> None:
    kind, sizes, inputs = MODELS[name]
    model = built(name, kind, **sizes)
    run, graphs = compiled(model, fullgraph=False)
    assert over_eagers(model, run, inputs()) <= 2
    assert len(graphs) == 1
    assert set(graphs[0].by_torch) == PARTLY.get(name, set())
    assert (len(graphs[0].sessions) > 1) == (name in PARTLY)


@pytest.mark.parametrize("name", RELATIVES)
def test_a_relative_of_llama_is_fused_and_right(name: str) -> None:
    sizes, attention = RELATIVES[name]
    sizes = DECODER | {"num_hidden_layers": 1, "attn_implementation": attention} | sizes
    model = built(name, "Model", **sizes)
    run, graphs = compiled(model, fullgraph=False)
    # Of a token that sees no key eager's attention is NaN in float64.
    for inputs in (left() if attention == "sdpa" else padded(), {"input_ids": ids()}):
        assert over_eagers(model, run, inputs) <= 2
    assert len(graphs) == 2
    for graph in graphs:
        counts = graph.report.counts()
        assert (counts["Attention"], counts["Rotary"], counts["RmsNorm"] >= 3) == (1, 2, True)
        assert not graph.by_torch


@pytest.mark.parametrize(("attention", "with_mask"), [("eager", True), ("sdpa", False)])
def test_one_llama_layer(attention: str, with_mask: bool) -> None:
    """Of the study's layer: the error of hidden state, keys and values is eager torch's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = (
        torch.float16 if device == "cuda" else torch.float32
    )  # which a processor leaves to torch
    model = Llama(SIZES["tiny"], 1, dtype, attention).to(device)
    given = random_tokens(SIZES["tiny"], with_mask, device)
    run, graphs = compiled(model, fullgraph=False)
    with torch.no_grad():
        ours, eager = run(*given), model(*given)
    truth = graphs[0].truth()
    for part in (slice(0, 1), slice(1, None)):  # the hidden state; keys and values
        off, theirs = (scaled_error(truth[part], list(made)[part]) for made in (ours, eager))
        assert off.rms <= 1.3 * theirs.rms
