"""transformers' generate through the backend: caches as inputs and outputs, sizes that grow."""

from __future__ import annotations

import random
from typing import Any

import onnx.parser
import pytest
import torch
from test_architectures import DECODER, built
from through_backend import compiled

from roundoff.backend.program import written_in_place
from roundoff.backend.runner import chosen_providers
from roundoff.errors import UnsupportedError
from roundoff.fusion import OptimizationOptions

transformers = pytest.importorskip("transformers")


def test_a_step_as_on_cuda_repeats_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused for CUDA and run on the CPU: grouped heads, keys that are shut out, a row without."""
    monkeypatch.setattr("roundoff.backend.operators.indexing.on_cpu", lambda node: False)
    batch = 3
    model = built("Llama", "ForCausalLM", **DECODER | {"num_hidden_layers": 4, "pad_token_id": 0})

    def step(**inputs: Any) -> torch.Tensor:
        return model(**inputs).logits

    run, graphs = compiled(step, fallback=False, options=OptimizationOptions(processor="CUDA"))
    results = []
    with torch.no_grad():
        for call in (step, run):
            cache = transformers.StaticCache(config=model.config, max_cache_len=9)
            model(torch.arange(3, 3 + 7 * batch).view(batch, 7), past_key_values=cache)
            mask = torch.ones(batch, 1, 1, 9, dtype=torch.bool)
            mask[..., 8] = mask[:1, ..., 2] = False
            mask[2:] = False
            logits = call(
                input_ids=torch.full((batch, 1), 5),
                attention_mask=mask,
                past_key_values=cache,
                position_ids=torch.full((batch, 1), 7),
            )
            results.append([logits, *(x for y in cache.layers for x in (y.keys, y.values))])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    (graph,) = graphs
    left = [node.op_type for node in graph.model.graph.node]
    assert left.count("Expand") == 2  # of all lengths at once; and of the mask, once


@pytest.mark.parametrize("processor", ["CPU", "CUDA"])
@pytest.mark.parametrize("shape", [(1, 6, 3), (2, 4, 6, 3), (3, 6)])
def test_a_static_cache_is_written_where_it_lies(shape: tuple[int, ...], processor: str) -> None:
    """No copy of a cache: what the step returns for it is its own memory.

    By TensorScatter, where the index has one element; of more they need not be neighbours.
    """
    axis = shape.index(6)

    def f(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(axis, at, new)
        return cache.sum(axis)

    run, graphs = compiled(f, options=OptimizationOptions(processor=processor))
    caches = [torch.randn(shape) for _ in range(2)]
    caches[1].copy_(caches[0])
    with torch.no_grad():
        for places in ([4], [0], [5], [4, 1]):
            at = torch.tensor(places)
            new = torch.randn([len(places) if i == axis else n for i, n in enumerate(shape)])
            torch.testing.assert_close(run(caches[0], at, new), f(caches[1], at, new))
            assert torch.equal(caches[0], caches[1])
    for graph, several in zip(graphs, (False, True), strict=True):
        written = "TensorScatter" if processor == "CUDA" and not several else "Scatter"
        assert any(node.op_type.startswith(written) for node in graph.model.graph.node)
        assert list(written_in_place(graph.model).values()) == [graph.names[0]]


UNFUSED = [("CUDAExecutionProvider", {"sdpa_kernel": "16"})]


@pytest.mark.parametrize(
    ("expected", "change"),
    [
        (UNFUSED, {}),
        (UNFUSED, {"rows": "16", "batch": "32"}),
        (None, {"rows": "17"}),  # a prefill
        (None, {"batch": "33"}),
        (None, {"kind": "float"}),
        (None, {"more": "17"}),  # of which one attention has too many
        (None, {"op": "Other"}),  # no attention
    ],
    ids=str,
)
def test_a_decode_step_in_a_cuda_graph_gets_unfused_attention(
    expected: Any, change: dict[str, Any]
) -> None:
    chosen = {
        "kind": "float16",
        "batch": "2",
        "rows": "3",
        "more": "1",
        "op": "MultiHeadAttention",
    } | change
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>
      g ({kind}[{batch}, {rows}, 8] q, {kind}[{batch}, 1, 9, 8] k, {kind}[2, {more}, 8] r,
         {kind}[2, 1, 9, 8] c) => ({kind}[{batch}, {rows}, 8] y, {kind}[2, {more}, 8] z) {{
        y = com.microsoft.{op}<num_heads = 1>(q, k, k)
        z = com.microsoft.{op}<num_heads = 1>(r, c, c) }}""".format(**chosen)
    )
    assert chosen_providers(proto) == expected


def test_what_reads_the_old_values_gets_them() -> None:
    """A cache that is read before it is written cannot be overwritten first."""

    def f(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        before = cache * 2
        cache.index_copy_(0, at, new)
        return before + cache

    run, graphs = compiled(f)
    one = torch.randn(6, 3)
    two = one.clone()
    with torch.no_grad():
        at, new = torch.tensor([4, 1]), torch.randn(2, 3)
        torch.testing.assert_close(run(one, at, new), f(two, at, new))
    assert torch.equal(one, two)
    assert not written_in_place(graphs[0].model)


def step(
    cache: torch.Tensor, length: torch.Tensor, weight: torch.Tensor, new: torch.Tensor
) -> torch.Tensor:
    """One of a static cache of transformers': the length is a tensor, and written."""
    at = torch.arange(1, device=length.device) + length
    length.add_(1)
    cache.index_copy_(1, at, new)
    return cache.sum(1) @ weight


def count_on(length: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x * length
    length.add_(3)
    return y


def count_only(length: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    length.add_(3)
    return x


def count_and_read(length: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * length.add_(3)


def count_down(length: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x * length
    length.sub_(1)
    return y


def count_twice(length: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = x * length
    length.add_(3)
    length.mul_(2)
    return y


@torch.no_grad()
@pytest.mark.parametrize("patterns", [None, "default"])
@pytest.mark.parametrize(
    ("f", "length", "adds"),
    [
        (count_on, torch.tensor(2), 0),
        (count_on, torch.tensor([2]), 0),
        (count_only, torch.tensor(2), 0),
        (count_and_read, torch.tensor(2), 1),
        (count_down, torch.tensor(2), 1),
        (count_twice, torch.tensor(2), 1),
        (count_on, torch.tensor([2, 1, 0]), 1),
        (count_on, torch.tensor(2.0), 1),
        (count_on, torch.tensor(2, dtype=torch.int32), 1),
    ],
)
def test_lengths_are_counted_without_a_node_each(
    f: Any, length: torch.Tensor, adds: int, patterns: str | None
) -> None:
    run, graphs = compiled(f, patterns)
    ours, wanted, x = length.clone(), length.clone(), torch.randn(3)
    for n in range(5):
        torch.testing.assert_close(run(ours, x), f(wanted, x))
        assert torch.equal(ours, wanted)
        if n == 2:
            elsewhere(ours)
    (graph,) = graphs
    names = [node.op_type for node in graph.model.graph.node]
    assert patterns is None or sum(names.count(op) for op in ("Add", "Sub")) == adds


def elsewhere(t: torch.Tensor) -> None:
    t.data = t.data.clone()


def turned(t: torch.Tensor) -> None:
    t.data = t.data.transpose(0, -1).contiguous().transpose(0, -1)


def swapped(t: torch.Tensor) -> None:
    torch.utils.swap_tensors(t, t.clone())


def resized(t: torch.Tensor) -> None:
    kept, storage = t.clone(), t.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    between = torch.zeros_like(kept)  # perhaps where the old memory was
    storage.resize_(size)
    t.copy_(kept)
    del between


@torch.no_grad()
@pytest.mark.parametrize("seed", range(6))
def test_tensors_that_move_are_read_and_written_where_they_lie(seed: int) -> None:
    """Two sets of tensors in turn; one moves now and then; a row of the cache is refused."""
    rng, (run, graphs) = random.Random(seed), compiled(step)
    torch.manual_seed(seed)
    first, *sets = [
        [torch.randn(2, 6, 3), torch.tensor(0), torch.randn(3, 3), torch.randn(2, 1, 3)]
        for _ in range(3)
    ]
    first[2] = torch.nn.Parameter(first[2])
    for t in first[:2]:
        torch._dynamo.mark_static_address(t)
    run(*first)
    (graph,) = graphs
    at = [t.data_ptr() for t in first]
    order = [at.index(t.data_ptr()) for t in graph.inputs]

    def call(*args: torch.Tensor) -> torch.Tensor:  # past the guards of dynamo
        return graph([args[i] for i in order])[0]

    wanted = [[t.clone() for t in tensors] for tensors in sets]
    which = 0
    for _ in range(30):
        which ^= rng.random() < 0.3
        ours, theirs = sets[which], wanted[which]
        event = rng.choice(["none", "none", "moved", "emptied", "freed", "a row"])
        if event == "moved":
            rng.choice([elsewhere, turned, swapped, resized])(rng.choice(ours))
        if event == "freed":  # and used again: other tensors where others lay
            ours[:] = [t.view(t.shape) for t in ours]
        if event == "emptied" or int(theirs[1]) == 6:
            ours[1].zero_(), theirs[1].zero_()
        row = event == "a row"
        if row:  # whether it is read before the cache is written, or after, the graph cannot know
            with pytest.raises(UnsupportedError, match="overlaps another"):
                call(*ours[:3], ours[0][:, :1])
        else:
            made = call(*ours)
            torch.testing.assert_close(made, step(*theirs))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), event
