"""Llama and its relatives, layers of transformers with random weights: fused, and right."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from roundoff.backend import OptimizationOptions, onnx_custom_backend
from roundoff.compare import scaled_error
from roundoff.models import SIZES, Llama, random_tokens

TIERS = "default+onnxruntime"
SIZE = SIZES["tiny"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Llama, ids: tuple[torch.Tensor, ...]) -> tuple[dict[str, Any], Any]:
    """What the backend stores of a model, and what the compiled one returns."""
    storage: dict[str, Any] = {}
    backend = functools.partial(
        onnx_custom_backend, options=OptimizationOptions(TIERS), storage=storage
    )
    with torch.no_grad():
        made = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*ids)
    return storage["instance"][0], made


def nodes_of_the_angles(graph: Any) -> int:
    """Nodes before Cos: one Mul, or the product and the transpose of older transformers."""
    makers = {name: i for i, node in enumerate(graph.node) for name in node.output}
    wanted = [name for node in graph.node if node.op_type == "Cos" for name in node.input]
    nodes = set()
    while wanted:
        maker = makers.get(wanted.pop())
        if maker is not None and maker not in nodes:
            nodes.add(maker)
            wanted += graph.node[maker].input
    return len(nodes)


slow = pytest.mark.slow(reason="each model, type and attention is in one that is quick")


@pytest.mark.parametrize(
    ("attention", "dtype", "with_mask"),
    [
        ("eager", torch.float32, False),
        ("eager", torch.float16, True),
        ("sdpa", torch.float32, True),
        ("sdpa", torch.float16, False),
        pytest.param("eager", torch.float32, True, marks=slow),
        pytest.param("eager", torch.float16, False, marks=slow),
        pytest.param("sdpa", torch.float32, False, marks=slow),
        pytest.param("sdpa", torch.float16, True, marks=slow),
    ],
    ids=str,
)
def test_one_llama_layer(attention: str, dtype: torch.dtype, with_mask: bool) -> None:
    """At most 21 nodes a call, and an error against float64 like eager torch's."""
    model = Llama(SIZE, 1, dtype, attention)
    ids = random_tokens(SIZE, with_mask, "cpu")
    instance, ours = compiled(model, ids)
    truth = instance["compiled"].truth()
    with torch.no_grad():
        eager = model(*ids)
    # A mask that zeroes rows without keys, as sdpa does, costs five nodes more than one that
    # averages them, as eager attention does.
    zeroes = with_mask and attention == "sdpa"
    nodes = instance["onnx"].graph.node
    assert len(nodes) <= (24 if zeroes else 21)
    if not with_mask:
        whole = instance["whole"].graph
        assert len(whole.node) - nodes_of_the_angles(whole) <= 20
        assert "GroupQueryAttention" in {n.op_type for n in nodes}
    for part in (slice(0, 1), slice(1, None)):  # the hidden state; keys and values
        off, theirs = (scaled_error(truth[part], list(made)[part]) for made in (ours, eager))
        assert off.rms <= 1.3 * theirs.rms


RELATIVES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 4, "head_dim": 16},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Gemma": {"head_dim": 16},
    "Phi3": {"pad_token_id": 0},
}


def relative(name: str, attention: str, **more: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=128, num_hidden_layers=1, max_position_embeddings=64,
        attn_implementation=attention, **(RELATIVES.get(name, {}) | more),
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, f"{name}Model")(config).eval()


def parts(made: Any) -> tuple[torch.Tensor, ...]:
    layer = made.past_key_values.layers[0]
    return made.last_hidden_state, layer.keys, layer.values


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        pytest.param(name, kind, marks=[] if i % 2 == j else slow)
        for i, name in enumerate(RELATIVES)
        for j, kind in enumerate(["eager", "sdpa"])
    ],
)
def test_relatives_are_fused_and_right(name: str, attention: str) -> None:
    model, storage = relative(name, attention), {}
    ids = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    backend = functools.partial(
        onnx_custom_backend, options=OptimizationOptions(TIERS), storage=storage, check=True
    )
    run = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    for inputs in ((ids,), (ids, mask)):
        made, wanted = run(*inputs), model(*inputs)
        for a, b in zip(parts(made), parts(wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for one in storage["instance"]:
        counts = one["report"].counts()
        assert counts["RmsNorm"] >= 3
        assert counts["Rotary"] == 2
        assert counts["Attention"] == 1
        assert len(one["onnx"].graph.node) < len(one["exported"].graph.node) / 2


@torch.no_grad()
@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_other_architectures_with_graph_breaks(name: str) -> None:
    """Not what the rules were written for: whatever is fused, the result is right."""
    sizes = (
        {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
         "intermediate_size": 96, "vocab_size": 128}
        if name == "Bert" else
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 128, "n_positions": 64}
    )  # fmt: skip
    torch.manual_seed(0)
    inner = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes))
    storage: dict[str, Any] = {}

    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner.eval()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            first = self.inner(ids).last_hidden_state
            torch._dynamo.graph_break()
            return torch.nn.functional.gelu(first @ first.mT)

    model = Broken()
    run = torch.compile(model, backend=functools.partial(onnx_custom_backend, storage=storage))
    ids = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(run(ids), model(ids), rtol=1e-4, atol=1e-4)
    assert len(storage["instance"]) >= 2


@torch.no_grad()
def test_check_names_the_rule_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from roundoff.errors import ModelError
    from roundoff.fusion.onnxruntime import Silu

    right = Silu.rewrite

    def wrong(self: Silu, g: Any, node: Any) -> bool:
        import onnx_ir as ir

        done = right(self, g, node)
        for other in g.graph:
            if other.op_type == "QuickGelu":
                other.attributes["alpha"] = ir.AttrFloat32("alpha", 1.702)
        return done

    monkeypatch.setattr(Silu, "rewrite", wrong)
    model = relative("Llama", "sdpa")
    backend = functools.partial(onnx_custom_backend, check=True)
    run = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    with pytest.raises(ModelError, match=r"(?s)it begins at 'silu'.*QuickGelu"):
        run(torch.randint(0, 128, (2, 9)))


@torch.no_grad()
def test_four_layers() -> None:
    instance, _ = compiled(Llama(SIZE, 4), random_tokens(SIZE, False, "cpu"))
    assert len(instance["onnx"].graph.node) == 12 + 3 * 10
    counts = instance["report"].counts()
    assert counts["Attention"] == counts["Silu"] == 4
    assert len(instance["compiled"].compare()) > 40


@torch.no_grad()
def test_entry_point() -> None:
    from importlib.metadata import entry_points

    found = entry_points(group="torch_dynamo_backends", name="roundoff")
    if not found:
        pytest.skip("the package is not installed")
    f = torch.compile(torch.nn.Linear(4, 4).eval(), backend="roundoff")
    assert f(torch.ones(2, 4)).shape == (2, 4)
