"""Weights that one product takes together: views of one tensor where the module's may be moved."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx.parser
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from through_backend import close, compiled, through

import roundoff.backend as rb
from roundoff.backend import program
from roundoff.backend.weights import Join, Unwritten, adjacent, move, split_joins
from roundoff.errors import UnsupportedError
from roundoff.fusion import OptimizationOptions
from roundoff.ort import session


class Gated(torch.nn.Module):
    """Two products of one input, each with a bias."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(size, size)
        self.up = torch.nn.Linear(size, size + 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(self.gate(x)) + self.up(x)[..., :-2]


#: The options of most tests here.
MOVED = {"replace_weights": True, "fallback": False}


def memories(module: torch.nn.Module) -> int:
    """In how many pieces of memory the parameters lie."""
    return len({p.untyped_storage().data_ptr() for p in module.parameters()})


# What becomes of the module


@torch.no_grad()
def test_parameters_become_views_and_nothing_is_there_twice() -> None:
    f, x = Gated(), torch.randn(2, 3, 8)
    before, names = f(x), dict(f.named_parameters())
    g, graphs = compiled(f, **MOVED)
    close(g(x), before)
    assert memories(f) == 2, "the weights in one, the biases in another"
    assert all(names[n] is p and p.is_contiguous() for n, p in f.named_parameters())
    (graph,) = graphs
    packed = graph._variant._packed
    owned = {p.untyped_storage().data_ptr() for p in f.parameters()}
    assert packed
    assert {t.untyped_storage().data_ptr() for t in packed.values()} == owned
    kept = [t for n, t in zip(graph.names, graph.inputs, strict=True) if n in graph.static]
    assert {t.untyped_storage().data_ptr() for t in kept} == owned, "inputs of the first call"
    close(f(x), before)


@torch.no_grad()
def test_without_asking_the_parameters_stay() -> None:
    f, x = Gated(), torch.randn(2, 3, 8)
    at = [p.data_ptr() for p in f.parameters()]
    torch.compile(f, backend=rb.onnx_custom_backend)(x)
    assert [p.data_ptr() for p in f.parameters()] == at


@torch.no_grad()
def test_a_second_graph_reads_the_same_memory() -> None:
    f = Gated()
    g, graphs = compiled(f, **MOVED)
    for rows in (3, 5):
        g(torch.randn(2, rows, 8))
    one, two = (graph._variant._packed for graph in graphs)
    assert sorted(t.data_ptr() for t in one.values()) == sorted(t.data_ptr() for t in two.values())


@torch.no_grad()
def test_every_later_change_is_seen() -> None:
    f, x = Gated(), torch.randn(2, 3, 8)
    g = through(f, **MOVED)
    g(x)
    f.gate.weight.mul_(2)
    close(g(x), f(x))
    f.up.bias.data.add_(1)  # moves no version counter, and is seen: there is no copy
    close(g(x), f(x))
    f.load_state_dict({k: torch.randn_like(v) for k, v in f.state_dict().items()})
    close(g(x), f(x))
    assert memories(f) == 2
    others = {k: torch.randn_like(v) for k, v in f.state_dict().items()}
    f.load_state_dict(others, assign=True)
    with pytest.raises(UnsupportedError, match="another tensor"):
        g(x)  # they are the dictionary's tensors, too
    del others
    close(g(x), f(x))
    f.gate.weight.data = torch.randn(8, 8)
    close(g(x), f(x))
    f.up.weight = torch.nn.Parameter(torch.randn(10, 8), requires_grad=False)
    close(g(x), f(x))
    with torch.enable_grad():
        f(x).square().mean().backward()
    torch.optim.SGD(f.parameters(), 0.1).step()
    close(g(x), f(x))


@torch.no_grad()
def test_a_state_dict_is_saved_once_and_loaded() -> None:
    f, x = Gated(64), torch.randn(2, 3, 64)
    before = {k: v.clone() for k, v in f.state_dict().items()}
    sizes = []
    for run in (f, through(f, **MOVED)):
        run(x)
        file = io.BytesIO()
        torch.save(f.state_dict(), file)
        sizes.append(file.tell())
        file.seek(0)
        loaded = torch.load(file)
        assert list(loaded) == list(before)
        assert all(torch.equal(loaded[k], v) for k, v in before.items())
    assert sizes[1] <= sizes[0] + 256


@torch.no_grad()
def test_a_model_of_transformers_is_saved_and_stays_tied(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=96, num_hidden_layers=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    ids = torch.arange(6)[None]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    pieces = memories(model)
    close(through(model, **MOVED)(ids).logits, model(ids).logits)
    assert memories(model) == pieces - 2 * 3, "q, k, v and gate, up in one each, for each layer"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    assert list(loaded) == list(before)
    assert all(torch.equal(loaded[k], v) for k, v in before.items())


# Where it cannot be done


def shared(f: Gated) -> Any:
    return f.gate.weight.detach()


def cut(f: Gated) -> None:
    f.gate.weight.data = torch.randn(9, 8)[1:]


def turned(f: Gated) -> None:
    f.gate.weight.data = torch.randn(8, 8).t()


def no_parameter(f: Gated) -> None:
    weight = f.gate.weight.detach().clone()
    del f.gate.weight
    f.gate.register_buffer("weight", weight)


def inference(f: Gated) -> None:
    with torch.inference_mode():
        f.gate.weight = torch.nn.Parameter(torch.randn(8, 8), requires_grad=False)


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "reason"),
    [(shared, "another tensor"), (cut, "another tensor"), (no_parameter, "is a Tensor"),
     (inference, "inference_mode"), (turned, "not contiguous")],
)  # fmt: skip
def test_a_weight_that_cannot_move_is_an_error(change: Callable[..., Any], reason: str) -> None:
    f, x = Gated(), torch.randn(2, 3, 8)
    kept = change(f)
    at = [p.data_ptr() for p in f.parameters()]
    with pytest.raises(UnsupportedError, match=f"gate.weight.*{reason}"):
        through(f, **MOVED)(x)
    assert [p.data_ptr() for p in f.parameters()] == at, "nothing is moved"
    assert kept is None or torch.equal(kept, f.gate.weight)


@torch.no_grad()
def test_a_weight_of_two_products_is_an_error() -> None:
    class Twice(Gated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            weights = (self.gate.weight, self.up.weight)
            return torch.cat([torch.nn.functional.linear(y + 1, w) for w in reversed(weights)], -1)

    with pytest.raises(UnsupportedError, match="packed twice"):
        through(Twice(), **MOVED)(torch.randn(2, 3, 8))


# The parts


@torch.no_grad()
@given(st.data())
def test_what_is_moved_is_adjacent_and_keeps_its_values(data: st.DataObject) -> None:
    draw = data.draw
    rest = draw(st.lists(st.integers(1, 3), max_size=2))
    rows = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    values = [torch.randn(n, *rest) for n in rows]
    weights = [torch.nn.Parameter(v.clone(), requires_grad=False) for v in values]
    assert adjacent(weights) is None
    move([weights], [["w"] * len(weights)])
    whole = adjacent(weights)
    assert whole is not None
    assert torch.equal(whole, torch.cat(values))
    assert adjacent(weights[1:]) is not None
    assert adjacent(weights[::-1]) is None
    at = whole.data_ptr()
    move([weights], [["w"] * len(weights)])
    assert adjacent(weights).data_ptr() == at  # type: ignore[union-attr]


def test_only_joins_of_inputs_along_rows_are_split_off() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
      g (float[2, 3] a, float[4, 3] b, float[2, 3] c)
        => (float[6, 3] joined, float[2, 6] beside, float[4, 3] read, float[4, 3] turned) {
        joined = Concat<axis = 0>(a, b)
        beside = Concat<axis = 1>(a, c)
        read = Concat<axis = 0>(a, c)
        turned = Neg(read) }""")
    joins, rest = split_joins(model)
    assert joins == [Join("joined", ("a", "b"))]
    assert rest is not None
    assert [o.name for o in rest.graph.output] == ["beside", "read", "turned"]
    assert [i.name for i in rest.graph.input] == ["a", "c"]
    onnx.checker.check_model(rest)


# Sessions that compute from weights alone


class Doubled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.w * 2)


@torch.no_grad()
def test_a_session_that_packs_waits_only_where_weights_change(monkeypatch) -> None:
    made: list[weakref.ref[Any]] = []

    def counted(*args: Any, **options: Any) -> Any:
        new = session(*args, **options)
        made.append(weakref.ref(new))
        return new

    def alive() -> list[bool]:
        gc.collect()
        return [ref() is not None for ref in made]

    monkeypatch.setattr(program, "session", counted)
    f, x = Doubled(), torch.randn(2, 4)
    run = through(f, fallback=False)
    for seen in ([True, False], [True, False, True], [True, False, True]):
        for _ in range(2):
            torch.testing.assert_close(run(x), f(x))
        assert alive() == seen
        f.w.add_(1)


# Memory on a GPU


@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
@pytest.mark.parametrize(
    ("patterns", "replace"),
    [
        ("default+onnxruntime", False),
        ("default+onnxruntime", True),
        ("default+onnxruntime+experimental", True),
    ],
)
def test_memory_beside_the_weights_on_cuda(patterns: str, replace: bool) -> None:
    """Four layers in float16: what a call takes at its peak, of torch's memory and the device's.

    The handles of cuBLAS and cuDNN that a session has whatever its model are 0.047 of these
    weights, its arena and the rest 0.025: copies, of which 0.244 would be of use, have no room.
    """
    transformers = pytest.importorskip("transformers")

    def llama(width: int, layers: int) -> Any:
        config = transformers.LlamaConfig(
            hidden_size=width, num_attention_heads=width // 64, intermediate_size=11 * width // 4,
            vocab_size=256, num_hidden_layers=layers,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
        return model.to("cuda", torch.float16)

    def call(run: Callable[..., Any]) -> None:
        run(torch.arange(128, device="cuda")[None], use_cache=False, logits_to_keep=1)
        torch.cuda.synchronize()

    options = OptimizationOptions(patterns)
    backend = functools.partial(
        rb.onnx_custom_backend, options=options, replace_weights=replace, fallback=False
    )
    small = torch.compile(llama(128, 1), backend=backend)
    call(small)  # libraries and their workspaces
    model = llama(4096, 4)
    call(model)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    run = torch.compile(model, backend=backend)
    call(run)
    call(run)
    taken = torch.cuda.max_memory_allocated() - allocated
    torch.cuda.empty_cache()
    stays = free - torch.cuda.mem_get_info()[0]  # sessions allocate beside torch
    print(f"of the weights: torch's peak {taken / weights:.3f}, device {stays / weights:.3f}")
    assert taken <= 0.3 * weights
    assert stays <= 0.3 * weights


# Whether a copy is of what is there now


def identity(t: torch.Tensor) -> torch.Tensor:
    return t


@pytest.mark.parametrize("around", ["nothing", "no_grad", "inference", "hooks"])
@pytest.mark.parametrize("change", ["add_", "copy_", "view", "set_", "other", "alias"])
@pytest.mark.parametrize("which", range(3))
def test_a_tensor_written_or_exchanged_is_noticed(around: str, change: str, which: int) -> None:
    tensors = [torch.zeros(2, 2), torch.nn.Parameter(torch.zeros(2, 2)), torch.ones(4)[::2]]
    contexts = {
        "nothing": contextlib.nullcontext(),
        "no_grad": torch.no_grad(),
        "inference": torch.inference_mode(),
        "hooks": torch.autograd.graph.saved_tensors_hooks(identity, identity),
    }
    with contexts[around]:
        known = Unwritten(tensors)
        assert all(known.holds(tensors) for _ in range(3))
        now = list(tensors)
        with torch.no_grad():
            if change == "add_":
                tensors[which].add_(1)
            elif change == "copy_":
                tensors[which].copy_(torch.ones_like(tensors[which]))
            elif change == "view":  # the counter is one for a tensor and its views
                tensors[which].detach()[0].zero_()
            elif change == "set_":
                tensors[which].set_(torch.ones_like(tensors[which]))
            elif change == "other":
                now[which] = tensors[which].clone()
            else:
                now[which] = tensors[which].detach()
        assert not known.holds(now)


def test_inference_tensors_are_known_by_identity_alone() -> None:
    with torch.inference_mode():
        tensors = [torch.zeros(2), torch.zeros(2)]
    known = Unwritten([torch.zeros(1), *tensors][1:])
    assert known.holds(tensors)
    with torch.inference_mode():
        tensors[0].add_(1)  # which no counter tells: reset() is for it
    assert known.holds(tensors)
    assert not known.holds([tensors[1], tensors[0]])
    assert Unwritten([]).holds([])
