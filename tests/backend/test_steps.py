"""Programs of many steps: what they share, and that sharing changes no result."""

from __future__ import annotations

import weakref
from typing import Any

import onnx
import onnx.parser
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from roundoff.backend.program import Program

CPU = torch.device("cpu")


#: What a node computes of one value or two: by ONNX Runtime, by kernels that make new memory, and
#: by one that returns a view of what it reads.
KERNELS: dict[str, Any] = {
    "Twice": lambda inputs, attributes: (inputs[0] * 2,),
    "New": lambda inputs, attributes: (inputs[0] - 1,),
    "View": lambda inputs, attributes: (inputs[0].view(inputs[0].shape),),
}


def built(nodes: list[tuple[str, tuple[int, ...]]], outputs: set[int], size: str) -> Any:
    """The model of nodes that read values by number, of which 0 and 1 are inputs."""
    made = [
        onnx.helper.make_node(
            op,
            [f"v{i}" for i in read],
            [f"v{at + 2}"],
            f"node{at}",
            domain="roundoff" if op in KERNELS else "",
        )
        for at, (op, read) in enumerate(nodes)
    ]
    shape = [2, size if size == "n" else int(size)]
    info = [
        onnx.helper.make_tensor_value_info(f"v{i}", onnx.TensorProto.FLOAT, shape)
        for i in range(len(nodes) + 2)
    ]
    graph = onnx.helper.make_graph(
        made,
        "steps",
        info[:2],
        [info[i] for i in sorted(outputs)],
        value_info=[v for i, v in enumerate(info) if i > 1 and i not in outputs],
    )
    imports = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("roundoff", 1)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)


#: What a node computes, of one value or of two.
MEANS: dict[str, Any] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Twice": lambda x: x * 2,
    "New": lambda x: x - 1,
    "View": lambda x: x,
}


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, tuple[int, ...]]]:
    """Nodes, most of which read values made shortly before: only such memory is used again."""
    nodes = []
    for at in range(draw(st.integers(1, 14))):
        op = draw(st.sampled_from(sorted(MEANS)))
        near = st.integers(max(0, at - 2), at + 1) | st.integers(0, at + 1)
        nodes.append((op, tuple(draw(near) for _ in range(2 if op in ("Add", "Sub") else 1))))
    return nodes


@example([("Add", (0, 1)), ("View", (2,)), ("Sub", (1, 0)), ("View", (4,)), ("Sub", (3, 5))], "3")
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(programs(), st.sampled_from(["3", "n"]))
def test_what_was_returned_is_the_callers(
    nodes: list[tuple[str, tuple[int, ...]]], size: str
) -> None:
    """Later runs write over none of it, nor over what a kernel returns a view of."""
    outputs = set(range(2, len(nodes) + 2)) - {i for _, read in nodes for i in read}
    program = Program(built(nodes, outputs | {2}, size), CPU, KERNELS)
    earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
    for run in range(3):
        n = 3 + (run if size == "n" else 0)
        values = [torch.arange(2.0 * n).reshape(2, n) + 10 * i + run for i in (1, 2)]
        made = program.run(values, {"n": n})
        for op, read in nodes:
            values.append(MEANS[op](*(values[i] for i in read)))
        wanted = [values[int(name[1:])] for name in program.outputs]
        earlier += zip(made, wanted, strict=True)
        assert all(torch.equal(a, b) for a, b in earlier)


def layered(layers: int) -> Any:
    """Layers of two partitions with a kernel between them."""
    nodes: list[tuple[str, tuple[int, ...]]] = []
    for _ in range(layers):
        last = len(nodes) + 1
        nodes += [("Add", (last, 0)), ("Twice", (last + 1,)), ("Sub", (last + 2, 0))]
        nodes += [("New", (last + 3,))]
    return built(nodes, {len(nodes) + 1}, "3")


def test_thirty_layers_take_the_sessions_of_two() -> None:
    few, many = (Program(layered(n), CPU, KERNELS) for n in (2, 30))
    x = [torch.ones(2, 3), torch.ones(2, 3)]
    few.run(x)
    (y,) = many.run(x)
    assert len(few.sessions) == len(many.sessions) == 2
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


def test_equal_nodes_with_other_attributes_are_others() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20, "roundoff": 1]>
      g (float[2] x) => (float[2] c) <float[2] a, float[2] b> {
        [n1] a = LeakyRelu <alpha = 0.5> (x)
        [n2] b = roundoff.Twice (a)
        [n3] c = LeakyRelu <alpha = 0.25> (b) }""")
    (made,) = Program(model, CPU, KERNELS).run([torch.tensor([-1.0, 1.0])])
    assert made.tolist() == [-0.25, 2.0], "-0.25 · 2 · 0.5 · x"


def test_a_settled_run_reads_what_changes_its_size() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
      g (float[n] cache, float[2] weight) => (float[n] twice, float[2] less) {
        twice = Add(cache, cache)
        less = Neg(weight) }""")
    program = Program(model, CPU, {}, steady=["cache", "weight"])
    weight = torch.ones(2)
    for n, settled in [(2, False), (3, True), (2, True)]:
        inputs = [torch.ones(n), None if settled else weight]
        twice, less = program.run(inputs, {"n": n}, settled)  # type: ignore[arg-type]
        assert (twice.tolist(), less.tolist()) == ([2] * n, [-1, -1])
