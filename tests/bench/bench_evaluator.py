"""What running a model node by node costs beside torch eager, side by side in one process.

Two models: a chain of 1,000 tiny Add and Mul nodes, where the cost a node is all there is; and
the one-layer Llama that torch exports, against torch eager running the same operators (straight-
line code written from the graph, operator by operator) and against the module itself. Not a test:
run it by hand, ``python tests/bench/bench_evaluator.py [small|medium|wide|large]``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from roundoff.evaluator import TorchOnnxEvaluator
from roundoff.timing import measure

# hidden, intermediate, heads, batch, tokens
SIZES = {
    "small": (64, 64, 4, 1, 8),
    "medium": (512, 512, 8, 2, 128),
    "wide": (4096, 1024, 32, 1, 64),
    "large": (4096, 1024, 32, 2, 1024),  # minutes on a CPU
}


def chain(nodes: int) -> onnx.ModelProto:
    """X + a, then * b, and so on, on four numbers."""
    made, last = [], "X"
    for k in range(nodes):
        op_type, other = (("Add", "a"), ("Mul", "b"))[k % 2]
        made.append(helper.make_node(op_type, [last, other], [f"r{k}"]))
        last = f"r{k}"
    values = [helper.make_tensor_value_info(n, 1, [4]) for n in ("X", last)]
    constants = [
        numpy_helper.from_array(np.full(4, v, dtype=np.float32), n)
        for n, v in (("a", 1e-3), ("b", 0.999))
    ]
    graph = helper.make_graph(made, "chain", values[:1], values[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def bench_chain(nodes: int = 1000) -> None:
    model = chain(nodes)
    evaluator, reference = TorchOnnxEvaluator(model), ReferenceEvaluator(model)
    x, a, b = torch.ones(4), torch.full((4,), 1e-3), torch.full((4,), 0.999)

    def eager() -> torch.Tensor:
        y = x
        with torch.no_grad():
            for _ in range(nodes // 2):
                y = y + a
                y = y * b
        return y

    def ours() -> torch.Tensor:
        return evaluator.run(None, {"X": x})[0]

    assert torch.equal(eager(), ours())
    feeds = {"X": x.numpy()}
    report(
        f"chain of {nodes} Add and Mul",
        {"eager": eager, "evaluator": ours, "onnx.reference": lambda: reference.run(None, feeds)},
        nodes,
        limit=2.0,
    )


def llama(hidden: int, intermediate: int, heads: int, batch: int, tokens: int) -> Any:
    """(module, feeds, exported model), attention "eager", no cache."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, num_hidden_layers=1, vocab_size=1024, intermediate_size=intermediate,
        max_position_embeddings=2048, num_attention_heads=heads, num_key_value_heads=heads,
        attn_implementation="eager",
    )  # fmt: skip

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = LlamaModel(config)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            made = self.model(input_ids=ids, attention_mask=mask, use_cache=False)
            return made.last_hidden_state

    module = Layer().eval()
    feeds = {
        "ids": torch.randint(0, 1024, (batch, tokens)),
        "mask": torch.ones(batch, tokens, dtype=torch.int64),
    }
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        program = torch.onnx.export(
            module, tuple(feeds.values()), dynamo=True, optimize=True, opset_version=20,
            verbose=False,
        )  # fmt: skip
        path = Path(folder, "llama.onnx")
        program.save(path)
        model = onnx.load(path)
    return module, feeds, model


def straight_line(model: onnx.ModelProto) -> Callable[..., Any]:
    """The graph as a Python function of torch calls: what eager mode would run, no more."""
    constants = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy())
                 for t in model.graph.initializer}  # fmt: skip
    names: dict[str, str] = {}
    scope: dict[str, Any] = {"torch": torch}

    def name(result: str) -> str:
        if result not in names:
            names[result] = f"v{len(names)}"
            if result in constants:
                scope[names[result]] = constants[result]
        return names[result]

    lines = []
    for node in model.graph.node:
        inputs = [name(n) for n in node.input]
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        fixed = [constants[n].tolist() if n in constants else None for n in node.input]
        lines.append(f"  {name(node.output[0])} = {call(node.op_type, inputs, attributes, fixed)}")
    outputs = ", ".join(name(o.name) for o in model.graph.output)
    arguments = ", ".join(name(i.name) for i in model.graph.input)
    code = f"def run({arguments}):\n" + "\n".join(lines) + f"\n  return ({outputs},)\n"
    exec(code, scope)
    return scope["run"]


def call(op_type: str, x: list[str], attributes: dict[str, Any], fixed: list[Any]) -> str:
    """One node as a torch expression."""
    binary = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "MatMul": "@", "And": "&", "Or": "|",
              "Less": "<", "LessOrEqual": "<=", "Greater": ">", "Equal": "=="}  # fmt: skip
    if op_type in binary:
        return f"{x[0]} {binary[op_type]} {x[1]}"
    if op_type == "Cast":
        kinds = {1: "float32", 7: "int64", 9: "bool"}
        return f"{x[0]}.to(torch.{kinds[attributes['to']]})"
    if op_type == "Slice":
        (start,), (end,), (axis,) = fixed[1], fixed[2], fixed[3]
        return f"{x[0]}[{':, ' * axis}{start}:{end}]"
    if op_type == "GatherND":
        return f"{x[0]}[{x[1]}.unbind(-1)]"
    if op_type == "Gather" and isinstance(fixed[1], int):
        return f"{x[0]}.select({attributes.get('axis', 0)}, {fixed[1]})"
    second = fixed[1] if len(x) > 1 else None
    axis = second[0] if isinstance(second, list) and second else None
    one_of = {
        "Gather": "torch.nn.functional.embedding({1}, {0})",
        "Transpose": f"{{0}}.permute({attributes.get('perm')})",
        "Reshape": f"{{0}}.reshape({second})",
        "Unsqueeze": f"{{0}}.unsqueeze({axis})",
        "Expand": f"{{0}}.expand({second})",
        "Pow": f"{{0}} ** {second}",
        "ReduceMean": f"{{0}}.mean({second}, keepdim=True)",
        "Concat": f"torch.cat(({', '.join(x)}), {attributes.get('axis')})",
        "Softmax": f"torch.softmax({{0}}, {attributes.get('axis', -1)})",
        "Where": "torch.where({0}, {1}, {2})",
        "Sqrt": "torch.sqrt({0})", "Reciprocal": "torch.reciprocal({0})",
        "Neg": "-{0}", "Sigmoid": "torch.sigmoid({0})", "Cos": "torch.cos({0})",
        "Sin": "torch.sin({0})",
    }  # fmt: skip
    return one_of[op_type].format(*x)


def bench_llama(size: str) -> None:
    module, feeds, model = llama(*SIZES[size])
    evaluator, same = TorchOnnxEvaluator(model), straight_line(model)
    given = {n: feeds[n] for n in evaluator.input_names}

    def eager() -> torch.Tensor:
        with torch.no_grad():
            return same(*given.values())[0]

    def whole() -> torch.Tensor:
        with torch.no_grad():
            return module(**feeds)

    def ours() -> torch.Tensor:
        return evaluator.run(None, given)[0]

    torch.testing.assert_close(ours(), eager(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours(), whole(), rtol=1e-4, atol=1e-4)
    used = evaluator.kernels_used()
    through = sum(v == "torch" for v in used.values())
    print(f"{through} of {len(used)} nodes through torch kernels")
    rivals = {"eager, same operators": eager, "evaluator": ours, "the module": whole}
    report(f"one-layer Llama, {size}: {SIZES[size]}", rivals, len(used), limit=1.15)


def report(title: str, rivals: dict[str, Any], nodes: int, limit: float) -> None:
    timings = measure(rivals, budget_s=10.0, precision=0.01)
    base = next(iter(rivals))
    ratio = timings.ratio("evaluator", base)
    print(f"{title} ({torch.get_num_threads()} threads)")
    for label in rivals:
        median = timings.samples[label].median()
        print(f"  {label:24} {1e3 * median:9.3f} ms  {1e6 * median / nodes:8.2f} µs a node")
    print(
        f"  evaluator / {base}: {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        f" (at most {limit})"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)  # a second thread waits for whoever has the second core
    bench_chain()
    for chosen in sys.argv[1:] or ["small", "medium"]:
        bench_llama(chosen)
