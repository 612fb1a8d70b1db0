"""transformers' generate through the backend: caches as inputs and outputs, sizes that grow."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import roundoff.backend as rb

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 96, "num_hidden_layers": 2, "head_dim": 8,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tiny(kind: str, **more: Any) -> Any:
    """A random decoder whose logits are far enough apart for greedy decoding."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | more))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    for p in model.parameters():
        p.mul_(4 if p.dim() > 1 else 1)
    return model


def prompts(batch: int, length: int = 7) -> dict[str, torch.Tensor]:
    """Token numbers and a mask that shuts out the left of every other row."""
    ids = torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1::2, :2] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generated(
    model: Any, inputs: dict[str, torch.Tensor], dynamic: bool, tokens: int = 12, **more: Any
) -> tuple[torch.Tensor, list[rb.Compiled]]:
    """Tokens by the compiled forward, and the graphs that it took."""
    storage: dict[str, Any] = {"instance": []}
    backend = functools.partial(rb.onnx_custom_backend, storage=storage, fallback=False)
    plain = model.forward
    model.forward = torch.compile(plain, backend=backend, dynamic=dynamic)
    try:
        made = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **more)
    finally:
        model.forward = plain
    return made, storage["instance"]


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Gemma"])
def test_a_growing_cache_gives_eagers_tokens(kind: str) -> None:
    model, inputs = tiny(kind), prompts(1)
    wanted = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    tokens, graphs = generated(model, inputs, dynamic=True)
    assert tokens.tolist() == wanted.tolist()
    assert len(graphs) <= 4


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Gemma"])
def test_a_static_cache_gives_eagers_tokens(kind: str, batch: int) -> None:
    model, inputs = tiny(kind), prompts(batch)
    more = {"cache_implementation": "static"}
    wanted = model.generate(**inputs, max_new_tokens=12, do_sample=False, **more)
    for dynamic, most in ((False, 6), (True, 4)):
        torch._dynamo.reset()
        tokens, graphs = generated(model, inputs, dynamic, **more)
        assert tokens.tolist() == wanted.tolist()
        assert len(graphs) <= most


def test_a_growing_cache_with_padding() -> None:
    model, inputs = tiny("Llama"), prompts(4)
    wanted = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    tokens, graphs = generated(model, inputs, dynamic=True)
    assert tokens.tolist() == wanted.tolist()
    assert len(graphs) <= 4
