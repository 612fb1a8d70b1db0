"""Twelve architectures of transformers, small and with random weights, through the backend.

``python tests/backend/test_architectures.py`` prints a row for each: graphs, operators that stay
with torch, error over eager's own, time over eager's, seconds of the first call.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import roundoff.backend as rb

transformers = pytest.importorskip("transformers")

WORDS = 96
ENCODER = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
           "vocab_size": WORDS, "num_hidden_layers": 2}  # fmt: skip
DECODER = ENCODER | {"num_key_value_heads": 2, "head_dim": 8}
VISION = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
          "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}  # fmt: skip
SPEECH = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
          "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
          "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 20,
          "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip


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


def image() -> dict[str, Any]:
    return {"pixel_values": drawn(2, 3, 32, 32)}


def translated() -> dict[str, Any]:
    return {"input_ids": ids(), "decoder_input_ids": ids(5), "use_cache": False}


def spoken() -> dict[str, Any]:
    return {"input_features": drawn(2, 16, 40), "decoder_input_ids": ids(5), "use_cache": False}


#: Name of the configuration -> (kind of model, configuration, inputs).
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "Llama": ("ForCausalLM", DECODER, words),
    "Gemma2": ("ForCausalLM", DECODER, words),
    "GPT2": ("LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": WORDS}, words),
    "Bert": ("Model", ENCODER, padded),
    "ModernBert": ("Model", ENCODER | {"pad_token_id": 0, "local_attention": 8}, padded),
    "DebertaV2": (
        "Model", ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, padded,
    ),
    "T5": (
        "ForConditionalGeneration",
        {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
         "num_heads": 4},
        translated,
    ),
    "Whisper": (
        "ForConditionalGeneration",
        SPEECH | {"vocab_size": WORDS, "d_model": 32, "pad_token_id": 0}, spoken,
    ),
    "ViT": ("ForImageClassification", VISION, image),
    "Swin": (
        "ForImageClassification",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2],
         "num_heads": [2, 4], "window_size": 4}, image,
    ),
    "Mamba": (
        "ForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": WORDS,
                        "state_size": 8}, words,
    ),
    "Mixtral": (
        "ForCausalLM", DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}, words,
    ),
}  # fmt: skip
#: The products of the experts are an operator of transformers' own.
PARTLY = {"Mixtral": ["transformers.grouped_mm_fallback.default"]}
QUICK = ("GPT2", "Bert", "ViT")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def built(name: str) -> tuple[Any, dict[str, Any]]:
    kind, sizes, inputs = MODELS[name]
    torch.manual_seed(0)
    # Of two labels, which is the default, the error is that of four numbers: a matter of chance.
    config = getattr(transformers, f"{name}Config")(**{"num_labels": 256} | sizes)
    model = getattr(transformers, f"{name}{kind}")(config).eval().requires_grad_(False)
    for p in model.parameters():
        p.mul_(4 if p.dim() == 2 else 1)  # attention looks at some keys more than at others
    return model, inputs()


def tensors(outputs: Any) -> list[torch.Tensor]:
    """What a model of transformers returns in floating point."""
    leaves = torch.utils._pytree.tree_leaves(outputs.to_tuple())
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]


def compiled(model: Any) -> tuple[Any, list[rb.Compiled]]:
    storage: dict[str, Any] = {"instance": []}
    backend = functools.partial(rb.onnx_custom_backend, storage=storage)
    return torch.compile(model, backend=backend), storage["instance"]


@torch.no_grad()
def over_eagers(model: Any, run: Any, inputs: dict[str, Any]) -> float:
    """Root mean square of our error over that of eager's, of the worst output.

    The truth is the model in float64: what it rounds to float32 inside is off for both.
    """
    double = copy.deepcopy(model).double()
    if hasattr(double, "set_experts_implementation"):
        double.set_experts_implementation("eager")  # the grouped product takes no float64
    wide = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in inputs.items()}  # fmt: skip
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
def test_an_architecture_is_converted_whole(name: str) -> None:
    model, inputs = built(name)
    run, graphs = compiled(model)
    assert over_eagers(model, run, inputs) <= 2
    assert len(graphs) == 1
    assert list(graphs[0].by_torch) == PARTLY.get(name, [])
    assert bool(graphs[0].borders) == (name in PARTLY)


def fastest(call: Callable[[], Any], rounds: int = 30) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@torch.no_grad()
def main() -> None:
    print(f"{'':12s} graphs  borders  error  time  first call, s  by torch")
    for name in MODELS:
        torch._dynamo.reset()
        model, inputs = built(name)
        run, graphs = compiled(model)
        start = time.perf_counter()
        run(**inputs)
        first = time.perf_counter() - start
        calls = [functools.partial(f, **inputs) for f in (run, model)]
        ratio = fastest(calls[0]) / fastest(calls[1])
        print(f"{name:12s} {len(graphs):6d} {sum(g.borders for g in graphs):8d} "
              f"{over_eagers(model, run, inputs):6.2f} {ratio:5.2f} {first:14.1f}  "
              f"{', '.join(o for g in graphs for o in g.by_torch)}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
