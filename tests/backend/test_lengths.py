"""One Llama at many lengths and batch sizes: conversions, errors, memory."""

from __future__ import annotations

import random
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from through_backend import compiled

import roundoff.backend as rb
from roundoff.models import Float64Llama

transformers = pytest.importorskip("transformers")


def llama(layers: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=96, num_hidden_layers=layers, max_position_embeddings=1024,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for p in model.parameters():
        p.mul_(4 if p.dim() > 1 else 1)  # attention looks at some keys more than at others
    return model


def inputs(batch: int, length: int) -> dict[str, Any]:
    """Tokens, and a mask that shuts out the left of every other row."""
    generator = torch.Generator().manual_seed(1000 * batch + length)
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[1::2, : length // 3] = 0
    ids = torch.randint(0, 96, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}


def resident() -> float:
    """Megabytes of this process."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096 / 2**20


@torch.no_grad()
def errors(model: Any, run: Any, sizes: Sequence[tuple[int, int]]) -> tuple[list[float], ...]:
    """Root mean squares of ours and of eager's error against float64, for each size."""
    weights = types.SimpleNamespace(config=model.config, weights=model.state_dict())
    truth = Float64Llama(weights)  # type: ignore[arg-type]
    ours, eagers = [], []
    for size in sizes:
        given = inputs(*size)
        seen = given["attention_mask"].bool()
        exact = truth(**given).logits[seen]
        for f, listed in ((run, ours), (model, eagers)):
            off = f(**given).logits[seen].double() - exact
            listed.append(float(off.square().mean().sqrt()))
    return ours, eagers


def within_eagers(ours: Sequence[float], eagers: Sequence[float]) -> None:
    """Another order of the same sums: no worse on the whole, and nowhere by much."""
    assert sum(ours) <= 1.1 * sum(eagers)
    assert max(a / b for a, b in zip(ours, eagers, strict=True)) <= 1.5


@pytest.mark.slow(reason="dynamo traces for symbolic sizes: 10 s a conversion on a busy machine")
def test_twenty_lengths_take_one_conversion() -> None:
    model = llama(1)
    run, graphs = compiled(model, dynamic=True, fullgraph=False, fallback=False)
    draw = random.Random(0)
    sizes = list(zip(draw.sample(range(9, 601), 20), draw.choices(range(2, 9), k=20), strict=True))
    within_eagers(*errors(model, run, [(b, n) for n, b in sizes]))
    assert len(graphs) == 1
    assert len(graphs[0].sessions) == 1


@pytest.mark.slow(reason="dynamo traces eight layers for symbolic sizes, 25 s")
@torch.no_grad()
def test_new_sizes_take_no_memory() -> None:
    """What ONNX Runtime would keep for each size is 2 kB a layer."""
    model = llama(8)
    run, graphs = compiled(model, dynamic=True, fullgraph=False, fallback=False)

    def call(batch: int, length: int) -> None:
        # Without a mask every size inside is known beforehand: then it plans its memory.
        run(input_ids=inputs(batch, length)["input_ids"], use_cache=False)

    call(8, 128)  # the largest: arenas grow now
    before = 0.0
    sizes = [(b, n) for b in range(2, 9) for n in range(2, 128)]
    random.Random(0).shuffle(sizes)
    for i, size in enumerate(sizes):
        call(*size)
        if i == 100:
            before = resident()
    assert resident() - before < 4
    assert len(graphs) == 1


def scaled(x: torch.Tensor, factor: float, shift: float) -> torch.Tensor:
    product = torch.nn.functional.scaled_dot_product_attention(x, x, x, scale=factor)
    return product + shift


@torch.no_grad()
def test_floats_are_constants_that_may_change() -> None:
    """Dynamo traces a frame once for each value: a second try would call the backend again."""
    calls, storage = [], {"instance": []}  # type: ignore[var-annotated]

    def backend(gm: torch.fx.GraphModule, args: Any) -> Any:
        calls.append(gm)
        return rb.onnx_custom_backend(gm, args, storage=storage)

    run = torch.compile(scaled, backend=backend, dynamic=True, fullgraph=True)
    numbers = [(0.5, 1e-5), (0.5, 1e-5), (2.0, 1e-5), (3.0, 1e-5), (0.5, 1e-5), (0.5, -0.0)]
    for n, (factor, shift) in enumerate(numbers):
        x = torch.randn(2, 3, 5 + n, 8)
        torch.testing.assert_close(run(x, factor, shift), scaled(x, factor, shift))
        if n == 1:
            assert len(calls) == len(storage["instance"]) == 1


@torch.no_grad()
def test_a_zero_keeps_its_sign() -> None:
    run = torch.compile(lambda x, s: x / (x * s), backend=rb.onnx_custom_backend, dynamic=True)
    for n, zero in enumerate((0.0, -0.0, 0.0, 2.0, -0.0)):
        x = torch.arange(1.0, 5 + n)
        assert torch.equal(run(x, zero), x / (x * zero))
