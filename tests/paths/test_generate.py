"""transformers' ``generate`` through the backend, whole texts: eager's tokens, to the last one.

Small random decoders; on a GPU with CUDA graphs, and a trained model, too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

import roundoff.backend as rb
from roundoff.models import load_trained, padded, prompts

from .pages import prompts_of, small_decoder

pytestmark = pytest.mark.usefixtures("fresh")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
GRAPH = {"mode": "reduce-overhead", "dynamic": False}
#: Name -> options of torch.compile, and of generate.
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "growing": ({"dynamic": True}, {}),
    "growing, graph": ({"mode": "reduce-overhead", "dynamic": True}, {}),
    "static": ({"dynamic": False}, {"cache_implementation": "static"}),
    "static, as it comes": ({}, {"cache_implementation": "static"}),
    "static, graph": (GRAPH, {"cache_implementation": "static"}),
}
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 2}
SIZES |= {"tie_word_embeddings": False}


def decoder(kind: str) -> Any:
    return small_decoder(kind, **SIZES).requires_grad_(False).to(DEVICE)


def batch_of(*lengths: int) -> dict[str, torch.Tensor]:
    return {name: t.to(DEVICE) for name, t in prompts_of([*lengths]).items()}


@contextlib.contextmanager
def compiled(model: Any, **options: Any) -> Iterator[list[rb.Compiled]]:
    """The model with its forward compiled, and the graphs that it takes."""
    storage: dict[str, Any] = {"instance": []}
    plain, mode = model.forward, options.pop("mode", None)
    backend = functools.partial(rb.onnx_custom_backend, storage=storage, mode=mode)
    model.forward = torch.compile(plain, backend=backend, **options)
    try:
        yield storage["instance"]
    finally:
        model.forward = plain


def write(model: Any, inputs: dict[str, torch.Tensor], tokens: int, **more: Any) -> list[Any]:
    made = model.generate(
        **inputs, max_new_tokens=tokens, do_sample=False, disable_compile=True, **more
    )
    return made[:, inputs["input_ids"].shape[1] :].tolist()


def check(model: Any, mode: str, asked: list[dict[str, torch.Tensor]], tokens: int) -> None:
    """Each text twice in a row, then those of another length: eager's tokens."""
    options, more = MODES[mode]
    wanted = [write(model, inputs, tokens, **more) for inputs in asked]
    with compiled(model, **options) as graphs:
        for inputs, text in zip(asked, wanted, strict=True):
            for _ in range(2):
                assert write(model, inputs, tokens, **more) == text
    if CUDA and mode == "static, graph":
        # Those of one token: a prefill reads from the processor how far its cache has come.
        steps = [g for g in graphs if any(list(t.shape)[1:] == [1] for t in g.inputs or ())]
        assert steps
        assert [(g.no_cuda_graph, g.by_torch) for g in steps if g.no_cuda_graph] == []


KINDS = ("Llama", "Qwen2", "Gemma", "GPT2")
slow = pytest.mark.slow(reason="each compiles two to four graphs: 5 to 15 s")


@pytest.mark.parametrize(
    ("kind", "mode", "rows"),
    [
        ("Llama", "static, graph", 2),
        ("GPT2", "static, graph", 2),
        *(
            pytest.param(*case, marks=[pytest.mark.gpu, slow])
            for case in itertools.product(KINDS, MODES, [1, 3, 8])
        ),
    ],
)
def test_a_random_decoder_writes_eagers_text(kind: str, mode: str, rows: int) -> None:
    asked = [batch_of(*[9, 8, 7, 6, 5, 4, 3, 2][:rows]), batch_of(*[6, 5, 4, 3, 2, 1, 6, 5][:rows])]
    check(decoder(kind), mode, asked, 64 if CUDA else 24)


@pytest.mark.slow(reason="three graphs are compiled, 15 s")
def test_a_conversation_goes_on_with_its_cache() -> None:
    """Its second question is of another length, and begins where the first text ended."""
    model, ids = decoder("Llama"), batch_of(9, 9, 9)["input_ids"]
    more = {"max_new_tokens": 10, "do_sample": False, "disable_compile": True}

    def talk() -> list[Any]:
        cache = transformers.StaticCache(model.config, max_cache_len=64)
        first = model.generate(ids, past_key_values=cache, **more)
        asked = torch.cat([first, torch.full((3, 4), 7, device=DEVICE)], 1)
        return [first.tolist(), model.generate(asked, past_key_values=cache, **more).tolist()]

    wanted = talk()
    options, _ = MODES["static, graph"]
    with compiled(model, **options):
        assert [talk() for _ in range(2)] == [wanted] * 2


def test_outputs_that_are_kept_stay_as_they_were() -> None:
    """generate keeps all hidden states, and the cache, as the graph returned them."""
    model, inputs = decoder("Llama"), batch_of(9, 8, 7)
    more = {
        "cache_implementation": "static",
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_hidden_states": True,
        "max_new_tokens": 12,
        "do_sample": False,
        "disable_compile": True,
    }
    wanted = model.generate(**inputs, **more)
    options, _ = MODES["static, graph"]
    close = functools.partial(torch.testing.assert_close, rtol=1e-3, atol=1e-4)
    with compiled(model, **options):
        for _ in range(2):
            made = model.generate(**inputs, **more)
            assert torch.equal(made.sequences, wanted.sequences)
            close(made.logits, wanted.logits)
            close(made.hidden_states, wanted.hidden_states)
            caches = made.past_key_values.layers, wanted.past_key_values.layers
            close(*([(layer.keys, layer.values) for layer in layers] for layers in caches))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_what_draws_random_numbers_is_not_recorded() -> None:
    """The runs before a recording would draw, too, and torch's generator be ahead of eager's."""

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + torch.rand_like(x)

    backend = functools.partial(rb.onnx_custom_backend, mode="reduce-overhead")
    run, x = torch.compile(noisy, backend=backend, dynamic=False), torch.ones(3, device=DEVICE)
    drawn = []
    for f in (run, run, noisy):
        torch.manual_seed(7)
        drawn.append(torch.stack([f(x) for _ in range(5)]))
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[2])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="on two cores 30 layers take minutes")
@pytest.mark.parametrize("rows", [1, 8])
def test_a_trained_model_writes_eagers_text(rows: int) -> None:
    trained = load_trained()
    asked = [trained.prompt(text) for _, text in prompts(rows)]
    model = trained.model(torch.float32, device=DEVICE)
    ids, mask = padded(asked, model.config.pad_token_id, DEVICE)
    check(model, "static, graph", [{"input_ids": ids, "attention_mask": mask}], 64)
