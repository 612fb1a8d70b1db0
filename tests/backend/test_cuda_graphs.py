"""What may be recorded as a CUDA graph, what a replay reads and writes, and what is refused."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import onnxruntime
import pytest
import torch

from roundoff.backend import onnx_custom_backend
from roundoff.backend.program import (
    SPLITS_SLICES,
    CudaGraphProgram,
    copies_of_the_processor,
    passes_a_list,
)
from roundoff.errors import UnsupportedError


class Recorded:
    """A program whose CUDA graph is a call that writes over its outputs."""

    def __init__(self, output: str = "output_0") -> None:
        self.recorded, self.outputs = 0, [output]
        self.inputs, self.in_place = ["x", "cache"], dict[str, str]()
        self.bound: torch.Tensor | None = None

    def unrecordable(self, numbers: Any) -> str:
        return ""

    def run(self, inputs: Sequence[torch.Tensor], _: Any, settled: bool) -> list[torch.Tensor]:
        """As it is: a settled run reads the weight that was bound."""
        if not settled:
            self.bound = inputs[1]
        assert self.bound is not None
        return [inputs[0] * self.bound]

    def capture(self, inputs: Sequence[torch.Tensor], _: Any) -> tuple[Any, Any]:
        self.recorded += 1
        self.bound = inputs[1]
        outputs = [torch.empty_like(inputs[0])]
        replay = functools.partial(torch.mul, *inputs, out=outputs[0])
        return types.SimpleNamespace(replay=replay), outputs


@pytest.mark.parametrize("copy", [False, True])
def test_graphs_are_kept_for_some_sizes_and_addresses(copy: bool) -> None:
    program = Recorded()
    graphs = CudaGraphProgram(program, [True, False], copy)  # type: ignore[arg-type]
    weight = torch.full((), 3.0)
    (plain,) = graphs.run([torch.ones(2), weight], {"n": 2})
    assert program.recorded == 0, "sizes that come once"
    (first,) = graphs.run([torch.ones(2), weight], {"n": 2})
    assert plain.tolist() == first.tolist() == [3, 3]
    (second,) = graphs.run([torch.full((2,), 2.0), weight], {"n": 2})
    assert plain.tolist() == [3, 3]
    assert second.tolist() == [6, 6]
    assert first.tolist() == ([3, 3] if copy else [6, 6])
    assert program.recorded == 1


def test_the_graph_that_is_used_outlasts_those_of_caches_that_went() -> None:
    program = Recorded()
    graphs = CudaGraphProgram(program, [True, False])  # type: ignore[arg-type]
    x, kept = torch.ones(2), torch.full((), 3.0)
    others = [torch.full((), float(n)) for n in range(2 * CudaGraphProgram.most)]
    for other in others:
        for weight in (kept, other, other):
            (made,) = graphs.run([x, weight], {"n": 2})
            assert made.tolist() == [weight.item()] * 2
    assert program.recorded == len(others) + 1
    assert len(graphs._recorded) == CudaGraphProgram.most


@pytest.mark.parametrize("moving", [True, False])
def test_a_graph_keeps_no_input_alive_but_its_own_copies(moving: bool) -> None:
    """A cache that stays alive would have the next text's lie elsewhere, and recorded again."""
    program = Recorded()
    program.capture = lambda inputs, _: (  # type: ignore[method-assign]
        types.SimpleNamespace(replay=lambda: None),
        [torch.ones(2)],
    )
    graphs = CudaGraphProgram(program, [moving, False])  # type: ignore[arg-type]
    cache, x = torch.full((), 3.0), torch.ones(2)
    for _ in range(3):
        graphs.run([x, cache], {"n": 2})
    gone = [weakref.ref(cache), weakref.ref(x)]
    program.bound = None
    del cache, x
    assert [ref() for ref in gone] == [None, None]


def test_a_cache_that_is_written_where_it_lies_is_not_kept_alive() -> None:
    """It is a result, too."""
    program = Recorded("written_0")
    program.in_place["written_0"] = "cache"
    program.capture = lambda inputs, _: (  # type: ignore[method-assign]
        types.SimpleNamespace(replay=lambda: None),
        [inputs[1]],
    )
    graphs = CudaGraphProgram(program, [True, False], True)  # type: ignore[arg-type]
    cache, x = torch.full((), 3.0), torch.ones(2)
    for _ in range(3):
        (made,) = graphs.run([x, cache], {"n": 2})
    assert made is cache
    gone = weakref.ref(cache)
    program.bound = None
    del cache, made
    assert gone() is None


def test_a_cache_that_is_copied_for_the_graph_has_its_result_in_the_copy() -> None:
    program = Recorded("written_0")
    program.in_place["written_0"] = "cache"
    program.capture = lambda inputs, _: (  # type: ignore[method-assign]
        types.SimpleNamespace(replay=lambda: inputs[1].add_(1)),
        [inputs[1]],
    )
    graphs = CudaGraphProgram(program, [True, True], True)  # type: ignore[arg-type]
    cache, x = torch.full((), 3.0), torch.ones(2)
    for _ in range(3):
        (made,) = graphs.run([x, cache], {"n": 2})
    assert (made.item(), cache.item()) == (4, 3)


def test_a_settled_run_replays_no_graph_over_other_memory() -> None:
    """Nor does a run that is not recorded read what the last replay's weights were before."""
    program = Recorded()
    graphs = CudaGraphProgram(program, [True, False])  # type: ignore[arg-type]
    x, weights = torch.ones(2), [torch.full((), 3.0), torch.full((), 5.0)]
    calls = [
        (0, 1, False),
        (0, 1, True),
        (0, 2, True),
        (0, 2, True),
        (1, 2, False),
        (1, 1, True),
        (0, 1, False),
        (0, 3, True),
        (1, 2, False),
        (1, 4, True),
        (1, 4, True),
    ]
    for which, n, settled in calls:
        (made,) = graphs.run([x, weights[which]], {"n": n}, settled)
        assert made.tolist() == [weights[which].item()] * 2
    assert program.recorded == 4, "of 1, 2 and 4, the first of which over both weights"


def test_a_recording_that_fails_is_a_run_and_the_last_try() -> None:
    program, tries = Recorded(), []

    def capture(*_: Any) -> Any:
        tries.append(None)
        raise UnsupportedError("a run that cannot be recorded", got="none left")

    program.capture, weight = capture, torch.full((), 3.0)  # type: ignore[method-assign]
    graphs = CudaGraphProgram(program, [True, False])  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="none left"):
        made = [graphs.run([torch.ones(2), weight], {"n": 2}) for _ in range(4)]
    assert [y.tolist() for (y,) in made] == [[3, 3]] * 4
    assert len(tries) == 1


# On a GPU


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_from_the_processors_memory_is_seen_in_a_graph(pinned: bool) -> None:
    there = torch.ones(1000, device="cuda")
    here = torch.ones(1000, pin_memory=True) if pinned else torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        there.copy_(here, non_blocking=True)
        there.mul_(2)
    assert bool(copies_of_the_processor(graph.raw_cuda_graph())) == pinned


def one_step(
    x: torch.Tensor, mask: torch.Tensor, at: torch.Tensor, cache: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Parts of a product, a cache, keys that are shut out, a row that sees none, a mask's sum."""
    q, k, v = (x @ w).split([32, 16, 16], -1)
    cache.index_copy_(2, at, k[:, None])
    q = q.view(3, 1, 2, 16).transpose(1, 2)
    attended = torch.nn.functional.scaled_dot_product_attention(
        q, cache, cache, mask, enable_gqa=True
    )
    joined = torch.cat([attended.transpose(1, 2).flatten(2), v], -1)
    return joined, (joined * mask[:, 0].any(-1, keepdim=True)).amax(-1), mask.sum((1, 2, 3))


@on_a_gpu
@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_after_a_capture_every_input_may_change(dtype: torch.dtype) -> None:
    """A replay agrees with a run that is not recorded, and with torch."""
    storage: dict[str, Any] = {}
    backend = functools.partial(onnx_custom_backend, storage=storage)
    recorded = torch.compile(
        one_step, backend=functools.partial(backend, mode="reduce-overhead"), dynamic=False
    )
    plain = torch.compile(lambda *a: one_step(*a), backend=backend, dynamic=False)
    make = functools.partial(torch.randn, device="cuda", dtype=dtype)
    w = make(32, 64) / 6
    caches = [torch.zeros(3, 1, 8, 16, device="cuda", dtype=dtype) for _ in range(3)]
    for n in range(8):
        x, at = make(3, 1, 32), torch.tensor([n % 8], device="cuda")
        mask = torch.rand(3, 1, 1, 8, device="cuda") < 0.5
        mask[n % 3] = False
        if n == 5:
            caches = [c.clone() for c in caches]
            w = w.clone()
        made = [f(x, mask, at, c, w) for f, c in zip((recorded, plain), caches, strict=False)]
        caches[2].index_copy_(2, at, caches[1][:, :, at])
        # In float64: of rows that see no key torch's kernels of narrow types make what they like.
        exact = one_step(x.double(), mask, at, caches[2].double(), w.double())
        for replayed, ran, wanted in zip(*made, exact, strict=True):
            torch.testing.assert_close(replayed, ran, rtol=2e-2, atol=2e-2)  # another kernel
            torch.testing.assert_close(ran, wanted.to(ran.dtype), rtol=2e-2, atol=2e-2)
        assert torch.equal(caches[0], caches[1])
    assert [g.no_cuda_graph for g in storage["instance"]] == ["", ""]


@on_a_gpu
@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_number_on_the_processor_is_read_at_each_run(mode: str | None) -> None:
    """It is copied to the GPU when it is bound: what is written there later counts."""
    backend = functools.partial(onnx_custom_backend, mode=mode)
    run = torch.compile(lambda x, number: torch.relu(x) * number, backend=backend, dynamic=False)
    x, number = torch.ones(4, device="cuda"), torch.tensor(2.0)
    for n in range(6):
        number.fill_(n)
        assert run(x, number).tolist() == [n] * 4


PARTS = """<ir_version: 10, opset_import: ["": 20]>
  g (float[4, 8] x, float[4, 1] w, float[n, 1] v) => (float[4, 12] y)
  <float[4, 1] a, float[4, 1] b, float[4, 1] c, float[4, 5] d, int64[4] k = {1, 1, 1, 5}> {
    [cut] a, b, c, d = Split<axis = 1>(x, k)  [join] y = Concat<axis = 1>(JOINED) }"""


@pytest.mark.parametrize(
    ("cut", "joined", "found"),
    [
        ("a, b, c, d", "a, b, c", "cut"),
        ("a, b, c", "a, b, c, w", ""),  # equal parts
        ("a, b, c", "a, b, d", ""),  # few
        ("a, b, c", "a, b, c, d", "join"),
        ("a, b, c", "a, b, c, v", "join"),  # of a size that is no constant
    ],
)
def test_unequal_parts_of_which_many_are_a_list(cut: str, joined: str, found: str) -> None:
    text = PARTS.replace("a, b, c, d = Split", f"{cut} = Split").replace("JOINED", joined)
    assert passes_a_list(onnx.parser.parse_model(text)) == found


@pytest.mark.parametrize("left_out", ["", SPLITS_SLICES])
def test_onnxruntime_makes_no_split_of_slices(left_out: str, tmp_path: Path) -> None:
    """It would without the option: the option has the name that this version of it knows."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
      g (float[4, 8] x) => (float[4, 3] a, float[4, 5] b)
      <int64[1] start = {0}, int64[1] middle = {3}, int64[1] end = {8}, int64[1] axis = {1}> {
        y = Relu(x) a = Slice(y, start, middle, axis) b = Slice(y, middle, end, axis) }""")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.add_session_config_entry("optimization.disable_specified_optimizers", left_out)
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    kinds = {n.op_type for n in onnx.load(options.optimized_model_filepath).graph.node}
    assert ("Split" in kinds) == (not left_out)
