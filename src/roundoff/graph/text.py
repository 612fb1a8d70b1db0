"""An ONNX graph as text: one line for each opset, input, initializer, node and output."""

from __future__ import annotations

from typing import Any

import onnx

from .protos import (
    attribute_text,
    bodies,
    dtype_text,
    load,
    reads,
    shape_of,
    small_value,
    type_text,
)

#: Depth from which nodes are not indented further.
_MOST_INDENT = 20


def onnx_simple_text_plot(model: Any) -> str:
    """Text of a model, a line for each opset, input, initializer, node and output.

    A node is indented by its depth, up to 20: two spaces for each node on the longest way from an
    input to it. Bodies of If, Loop and Scan stand below their node, local functions below the
    graph, missing optional inputs and outputs as empty names.

    Parameters
    ----------
    model : ModelProto, GraphProto, FunctionProto, bytes or path
        What to show; weights stored in other files are not read.

    Raises
    ------
    ArgumentError, ModelError
        When *model* is not an ONNX model.

    Examples
    --------
    >>> from roundoff.graph import onnx_simple_text_plot
    >>> import onnx.parser
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 18]>
    ... agraph (float[N, 4] X, float[4] B) => (float[N, 4] Z) {
    ...     Y = Softmax<axis = -1>(X)
    ...     Z = Add(Y, B) }''')
    >>> print(onnx_simple_text_plot(model))
    opset: domain='' version=18
    input: name='X' type='float32' shape=['N', 4]
    input: name='B' type='float32' shape=[4]
    Softmax(X, axis=-1) -> Y
      Add(Y, B) -> Z
    output: name='Z' type='float32' shape=['N', 4]
    """
    proto = load(model)
    if isinstance(proto, onnx.GraphProto):
        return "\n".join(_graph_lines(proto, 0))
    if isinstance(proto, onnx.FunctionProto):
        return "\n".join([*_opset_lines(proto), *_graph_lines(proto, 0)])
    lines = [*_opset_lines(proto), *_graph_lines(proto.graph, 0)]
    for function in proto.functions:
        lines.append(f"----- function name={function.name!r} domain={function.domain!r}")
        lines += [*_opset_lines(function), *_graph_lines(function, 0)]
    return "\n".join(lines)


def _opset_lines(proto: Any) -> list[str]:
    return [f"opset: domain={o.domain!r} version={o.version}" for o in proto.opset_import]


def _graph_lines(graph: Any, indent: int) -> list[str]:
    """Lines of a GraphProto or FunctionProto, all indented by *indent* steps at least."""
    lines = [_value_line("input", i) for i in graph.input]
    if isinstance(graph, onnx.FunctionProto):
        lines += [f"attribute: {name!r}" for name in graph.attribute]
        lines += [f"attribute: {a.name!r} {attribute_text(a)}" for a in graph.attribute_proto]
    else:
        lines += [_initializer_line(t) for t in graph.initializer]
    lines = ["  " * indent + line for line in lines]
    depth: dict[str, int] = {}
    for node in graph.node:
        level = max((depth.get(n, 0) for n in reads(node)), default=0)
        depth.update(dict.fromkeys((o for o in node.output if o), level + 1))
        lines += _node_lines(node, indent + min(level, _MOST_INDENT))
    return lines + ["  " * indent + _value_line("output", o) for o in graph.output]


def _value_line(kind: str, value: Any) -> str:
    if isinstance(value, str):  # a function's inputs and outputs have no types
        return f"{kind}: name={value!r}"
    text = f"{kind}: name={value.name!r} type={type_text(value.type)!r}"
    shape = shape_of(value.type)
    return text if shape is None else f"{text} shape={shape}"


def _initializer_line(tensor: onnx.TensorProto) -> str:
    kind, value = dtype_text(tensor.data_type), small_value(tensor)
    text = f"init: name={tensor.name!r} type={kind!r} shape={list(tensor.dims)}"
    return text if value is None else f"{text} -- {value}"


def _node_lines(node: onnx.NodeProto, step: int) -> list[str]:
    domain = f"[{node.domain}]" if node.domain not in ("", "ai.onnx") else ""
    arguments = ", ".join([*node.input, *map(attribute_text, node.attribute)])
    lines = [f"{'  ' * step}{node.op_type}{domain}({arguments}) -> {', '.join(node.output)}"]
    for name, body in bodies(node):
        lines.append("  " * (step + 1) + f"----- {name}")
        lines += _graph_lines(body, step + 1)
    return lines
