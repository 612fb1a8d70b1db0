"""Programs of many steps: what they share, and that sharing changes no result."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from roundoff.backend import OptimizationOptions, onnx_custom_backend
from roundoff.backend.lists import SPLITS_SLICES, passes_a_list, without_lists
from roundoff.backend.program import (
    CudaGraphProgram,
    Program,
    copies_of_the_processor,
)
from roundoff.errors import ModelError, UnsupportedError
from roundoff.fusion.products import Into

CPU = torch.device("cpu")


def _write_double(inputs: Any, outputs: Any, attributes: dict[str, Any]) -> None:
    outputs[0].zero_()  # before it reads: no two of its values may lie at one place
    outputs[0].add_(inputs[0], alpha=2)


#: What a node computes of one value or two: by ONNX Runtime, by a kernel that writes into memory
#: that it is given, by one that makes its own, and by one that returns a view of what it reads.
KERNELS: dict[str, Any] = {
    "Into": Into(_write_double),
    "New": lambda inputs, attributes: (inputs[0] - 1,),
    "View": lambda inputs, attributes: (inputs[0].view(inputs[0].shape),),
}
MEANS = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Into": lambda a: a + a,
    "New": lambda a: a - 1,
    "View": lambda a: a,
}


def built(nodes: list[tuple[str, tuple[int, ...]]], outputs: set[int], size: str) -> Any:
    """The model of nodes that read values by number, of which 0 and 1 are inputs."""
    needed = set(outputs)
    for at in reversed(range(len(nodes))):
        needed |= set(nodes[at][1]) if at + 2 in needed else set()
    made = [
        onnx.helper.make_node(
            op, [f"v{i}" for i in read], [f"v{at + 2}"], f"node{at}",
            domain="roundoff" if op in KERNELS else "",
        )
        for at, (op, read) in enumerate(nodes) if at + 2 in needed
    ]  # fmt: skip
    shape = [2, size if size == "n" else int(size)]
    info = [
        onnx.helper.make_tensor_value_info(f"v{i}", onnx.TensorProto.FLOAT, shape)
        for i in range(len(nodes) + 2)
    ]
    graph = onnx.helper.make_graph(
        made, "steps", info[:2], [info[i] for i in sorted(outputs)],
        value_info=[v for i, v in enumerate(info) if i > 1 and i in needed - outputs],
    )  # fmt: skip
    imports = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("roundoff", 1)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[tuple[str, tuple[int, ...]]], set[int]]:
    nodes: list[tuple[str, tuple[int, ...]]] = []
    for at in range(draw(st.integers(1, 14))):
        op = draw(st.sampled_from(sorted(MEANS)))
        # Near values more often: those that are far keep all memory in use.
        near = st.integers(max(0, at - 2), at + 1) | st.integers(0, at + 1)
        nodes.append((op, tuple(draw(near) for _ in range(2 if op in ("Add", "Sub") else 1))))
    last = len(nodes) + 1
    return nodes, {last} | draw(st.sets(st.integers(2, last), max_size=2))


@example(([("Into", (0,)), ("View", (2,)), ("Into", (1,)), ("Sub", (3, 4))], {5}), "3")
@example(([("Into", (0,)), ("View", (2,)), ("Into", (2,)), ("Into", (4,)), ("Into", (1,)),
           ("Sub", (6, 3)), ("Sub", (7, 5))], {8}), "3")  # fmt: skip
@example(([("Add", (0, 1)), ("Into", (2,)), ("Add", (3, 1)), ("Into", (4,)), ("Add", (5, 1))],
          {4, 6}), "3")  # fmt: skip
@example(([("Into", (0,)), ("View", (2,)), ("Into", (1,)), ("Into", (4,))], {3, 5}), "3")
@given(graphs(), st.sampled_from(["3", "n"]))
def test_memory_is_used_again_only_when_nothing_reads_it(
    graph: tuple[list[tuple[str, tuple[int, ...]]], set[int]], size: str
) -> None:
    nodes, outputs = graph
    program = Program(built(nodes, outputs, size), CPU, KERNELS)
    earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
    for run in range(3):
        n = 3 + (run if size == "n" else 0)
        values = [torch.arange(2.0 * n).reshape(2, n) + 10 * i + run for i in (1, 2)]
        made = program.run(values, {"n": n})
        for op, read in nodes:
            values.append(MEANS[op](*(values[i] for i in read)))  # type: ignore[no-untyped-call]
        for name, tensor in zip(program.outputs, made, strict=True):
            assert torch.equal(tensor, values[int(name[1:])]), name
            earlier.append((tensor, values[int(name[1:])]))
        assert all(torch.equal(a, b) for a, b in earlier), "what was returned is the caller's"


def layered(layers: int) -> Any:
    """Layers of two partitions with a kernel between them."""
    nodes: list[tuple[str, tuple[int, ...]]] = []
    for _ in range(layers):
        last = len(nodes) + 1
        nodes += [("Add", (last, 0)), ("Into", (last + 1,)), ("Sub", (last + 2, 0))]
        nodes += [("New", (last + 3,))]
    return built(nodes, {len(nodes) + 1}, "3")


def test_thirty_layers_take_the_sessions_and_the_memory_of_two() -> None:
    few, many = (Program(layered(n), CPU, KERNELS) for n in (2, 30))
    x = [torch.ones(2, 3), torch.ones(2, 3)]
    few.run(x)
    (y,) = many.run(x)
    assert len(few.sessions) == len(many.sessions) == 2
    assert len(few.buffers.memory) == len(many.buffers.memory) <= 3
    assert torch.equal(y, torch.full((2, 3), 2.0**30)), "a layer is 2 (y + 1) - 1 - 1"


def test_what_a_kernel_makes_is_let_go_of_when_it_has_been_read() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def new(inputs: Any, attributes: dict[str, Any]) -> tuple[torch.Tensor]:
        alive.append(sum(ref() is not None for ref in made))
        y = inputs[0] - 1
        made.append(weakref.ref(y))
        return (y,)

    program = Program(layered(6), CPU, KERNELS | {"New": new})
    program.run([torch.ones(2, 3), torch.ones(2, 3)])
    assert alive == [0] * 6


def test_equal_nodes_with_other_attributes_or_types_are_others() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20, "roundoff": 1]>
      g (float[2] x) => (float[2] z, double[2] w) {
        [n1] a = LeakyRelu <alpha = 0.5> (x)
        [n2] b = roundoff.Into (a)
        [n3] c = LeakyRelu <alpha = 0.25> (b)
        [n4] d = roundoff.Into (c)
        [n5] z = Neg (d)
        [n6] e = Cast <to = 11> (d)
        [n7] f = roundoff.Into (e)
        [n8] h = roundoff.Into (f)
        [n9] w = Neg (h) }""")
    kinds = {"a": 1, "b": 1, "c": 1, "d": 1, "e": 11, "f": 11, "h": 11}
    model.graph.value_info.extend(
        onnx.helper.make_tensor_value_info(n, kind, [2]) for n, kind in kinds.items()
    )
    program = Program(model, CPU, KERNELS)
    z, w = program.run([torch.tensor([-1.0, 1.0])])
    assert z.tolist() == [0.5, -4.0], "-2 · 0.25 · 2 · 0.5 · x, and -2 · 2 x"
    assert w.tolist() == [2.0, -16.0]
    assert w.dtype == torch.float64


def test_an_error_names_where_it_is() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20, "roundoff": 1]>
      g (float[3] x, int64[1] i, int64[1] j) => (float[1] z) {
        [first] a = Gather (x, i)
        [into] b = roundoff.Into (x)
        [second] z = Gather (b, j) }""")
    info = [("a", [1]), ("b", [3])]
    model.graph.value_info.extend(onnx.helper.make_tensor_value_info(n, 1, s) for n, s in info)
    model.graph.output.append(model.graph.value_info[0])
    program = Program(model, CPU, KERNELS)
    x, zero, bad = torch.ones(3), torch.tensor([0]), torch.tensor([7])
    assert len(program.sessions) == 1
    with pytest.raises(ModelError, match="'first'") as caught:
        program.run([x, bad, zero])
    assert "second" not in str(caught.value)
    with pytest.raises(ModelError, match="begins with node 'second'"):
        program.run([x, zero, bad])


class Graph:
    """A CUDA graph that records nothing; the first *fails* recordings find no memory."""

    fails = 0

    def __init__(self, keep_graph: bool) -> None:
        assert keep_graph

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        assert not gc.isenabled(), "memory that is given back would end the recording"
        if Graph.fails:
            Graph.fails -= 1
            raise torch.OutOfMemoryError("none left")

    def capture_end(self) -> None:
        pass

    def raw_cuda_graph(self) -> int:
        return 0

    def replay(self) -> None:
        pass


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """What :class:`Graph` stands in for; how often torch gave memory back, or garbage was."""
    seen: list[None] = []
    monkeypatch.setattr(Graph, "fails", 0)
    monkeypatch.setattr("roundoff.backend.program.copies_of_the_processor", lambda graph: "")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(None))
    monkeypatch.setattr(gc, "collect", lambda *a: seen.append(None))
    return seen


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_recording_gives_memory_back_where_there_is_none_left(
    fails: int, emptied: list[None]
) -> None:
    """Else the next text's cache would lie elsewhere, and be recorded again."""
    Graph.fails = fails
    program = Program(built([("Add", (0, 1))], {2}, "n"), CPU, KERNELS)
    graphs = CudaGraphProgram(program, [True, True], copy=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            graphs.run([torch.ones(2, 4)] * 2, {"n": 4})
    assert len(emptied) == min(fails, 1)
    assert ("none left" in graphs.refused) == (fails == 2)


def test_a_recorded_graph_keeps_the_memory_that_it_reads(emptied: list[None]) -> None:
    """Of two sizes, in turn: nobody else may be given the first one's memory."""
    nodes: list[tuple[str, tuple[int, ...]]] = [("Add", (0, 1)), ("Into", (2,)), ("Add", (3, 0))]
    program = Program(built(nodes, {4}, "n"), CPU, KERNELS)
    graphs = CudaGraphProgram(program, [True, True], copy=True)
    held = []
    for n in (4, 4, 8, 8, 4):  # recorded at the second call
        graphs.run([torch.ones(2, n)] * 2, {"n": n})
        held.append([weakref.ref(t) for t in program.buffers.memory])
    held = [held[1], held[3]]
    assert all(ref() is not None for refs in held for ref in refs)


@torch.no_grad()
def test_kernels_are_not_interpreted_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for the GPU, they would be handed tensors of the processor."""
    monkeypatch.setattr("roundoff.kernels.interpreting", lambda: False)
    options = OptimizationOptions("default+onnxruntime+experimental", interpret=True)
    backend = functools.partial(onnx_custom_backend, options=options)
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):
        torch.compile(torch.nn.functional.silu, backend=backend)(torch.ones(2, 8))


@torch.no_grad()
def test_layers_of_other_weights_share_sessions() -> None:
    """On a GPU where there is one: beside it kernels are not interpreted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    transformers = pytest.importorskip("transformers")
    counts = []
    for layers in (2, 5):
        config = transformers.LlamaConfig(
            hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
            vocab_size=64, num_hidden_layers=layers,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval().to(device)
        options = OptimizationOptions("default+onnxruntime+experimental", interpret=True)
        storage: dict[str, Any] = {}
        backend = functools.partial(onnx_custom_backend, options=options, storage=storage)
        run = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        ids = torch.arange(8, device=device)[None]
        made, wanted = (f(ids, use_cache=False).logits for f in (run, model))
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)
        counts.append(len(storage["instance"][0].sessions))
        torch._dynamo.reset()
    assert counts[0] == counts[1] > 1


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


@pytest.mark.parametrize(
    ("parts", "listed"), [((2, 2, 2, 2), False), ((1, 2, 3), False), ((1, 2, 3, 2), True)]
)
def test_unequal_parts_are_passed_as_a_list(parts: tuple[int, ...], listed: bool) -> None:
    names = [f"y{i}" for i in range(len(parts))]
    outputs = ", ".join(f"float[4, {n}] {name}" for n, name in zip(parts, names, strict=True))
    sizes = ", ".join(map(str, parts))
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20]>
      g (float[4, {sum(parts)}] x) => ({outputs})
      <int64[{len(parts)}] k = {{{sizes}}}>
      {{ [cut] {", ".join(names)} = Split<axis = 1>(x, k) }}""")
    assert passes_a_list(model) == ("cut" if listed else "")
    assert ("'cut'" in Program(model, CPU, {}).unrecordable()) == listed
    assert (without_lists(model) is model) != listed


#: Models whose kernels are passed lists; parts of no element, a negative axis, one part of rank 1.
_LISTS = {
    "split": """g (float[4, 11] x) => (float[4, 1] a, float[4, 0] b, float[4, 7] c, float[4, 3] d)
      <int64[4] k = {1, 0, 7, 3}> { [cut] a, b, c, d = Split<axis = -1>(x, k) }""",
    "concat": """g (float[11, 2] x) => (float[39, 2] y)
      <int64[4] k = {1, 2, 5, 3}>
      { a, b, c, e = Split<axis = 0>(x, k)
        [join] y = Concat<axis = 0>(a, x, b, c, e, x, b, b, a, a) }""",
    "rank 1": """g (float[2] a, float[3] b, float[1] c, float[n] d) => (float[m] y)
      { [join] y = Concat<axis = 0>(a, b, c, d) }""",
}


@pytest.mark.parametrize("name", _LISTS)
def test_no_list_is_passed_and_the_values_are_the_same(name: str) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20]> {_LISTS[name]}""")
    model = onnx.shape_inference.infer_shapes(model)
    assert passes_a_list(model)
    other = without_lists(model)
    assert bool(passes_a_list(other)) == (name == "rank 1")  # a size that is no constant
    onnx.checker.check_model(other, full_check=True)
    rng, sizes = np.random.default_rng(0), {"n": 4}
    feeds = {
        i.name: rng.random(
            [d.dim_value or sizes[d.dim_param] for d in i.type.tensor_type.shape.dim], np.float32
        )
        for i in model.graph.input
    }
    expected, got = (ReferenceEvaluator(m).run(None, feeds) for m in (model, other))
    assert all(np.array_equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("left_out", ["", SPLITS_SLICES])
def test_onnxruntime_makes_no_split_of_the_slices(left_out: str, tmp_path: Path) -> None:
    """It would without the option: the option has the name that this version of it knows."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
      g (float[4, 8] x) => (float[4, 1] a, float[4, 2] b, float[4, 4] c, float[4, 1] d)
      <int64[4] k = {1, 2, 4, 1}> { y = Relu(x)  a, b, c, d = Split<axis = 1>(y, k) }""")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.add_session_config_entry("optimization.disable_specified_optimizers", left_out)
    sliced = without_lists(onnx.shape_inference.infer_shapes(model))
    onnxruntime.InferenceSession(sliced.SerializeToString(), options)
    kinds = {n.op_type for n in onnx.load(options.optimized_model_filepath).graph.node}
    assert ("Split" in kinds) == (not left_out)


@on_a_gpu
@pytest.mark.gpu
@torch.no_grad()
def test_five_unequal_parts_are_recorded() -> None:
    """ONNX Runtime would pass their sizes through memory that it uses again: they stay Slices."""
    storage: dict[str, Any] = {}
    backend = functools.partial(onnx_custom_backend, storage=storage, mode="reduce-overhead")
    parts = [7, 1, 5, 2, 3]

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.relu(2 * part) for part in torch.relu(x).split(parts, -1)]

    run = torch.compile(function, backend=backend, dynamic=False)
    for _ in range(6):
        x = torch.randn(4, sum(parts), device="cuda")
        for made, wanted in zip(run(x), function(x), strict=True):
            assert torch.equal(made, wanted)
    (graph,) = storage["instance"]
    assert not graph.no_cuda_graph
