"""From protos to :class:`~roundoff.evaluator.nodes.Node`, with names resolved.

A subgraph becomes a graph of its own, which lists the results of the enclosing graph it reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TypeProto

from roundoff.errors import ModelError, UnsupportedError

from .checks import (
    check_attributes,
    check_declared,
    check_given,
    infer,
    schema_of,
    small_integer,
)
from .loading import attribute_value, domain_of, tensor_value
from .nodes import Node, Settings
from .values import to_value, type_proto

_MAX_DEPTH = 64
#: Attributes of Constant that are numbers or text, and their types.
_CONSTANT_KINDS: dict[str, Any] = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
    "value_string": object,
    "value_strings": object,
}


@dataclasses.dataclass
class Lowered:
    """A graph of nodes, to which :class:`~roundoff.evaluator.program.Graph` binds kernels."""

    path: tuple[str, ...]
    opsets: Mapping[str, int]
    outer: Lowered | None
    inputs: list[str]
    types: dict[str, TypeProto]
    #: Constants that no feed replaces.
    known: dict[str, Any] = dataclasses.field(default_factory=dict)
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: list[str] = dataclasses.field(default_factory=list)
    nodes: list[Node] = dataclasses.field(default_factory=list)
    captures: dict[str, None] = dataclasses.field(default_factory=dict)
    results: set[str] = dataclasses.field(default_factory=set)

    def has(self, name: str) -> bool:
        """Whether the graph, or one that encloses it, makes a result of this name."""
        return name in self.results or (self.outer is not None and self.outer.has(name))

    def read(self, name: str) -> str:
        """The name, noted as a capture where an enclosing graph makes the result."""
        if name and name not in self.results:
            if not self.has(name):
                raise ModelError(
                    f"{'/'.join(self.path) or 'the graph'} reads a result that nothing makes",
                    got=name,
                    expected="a result of an earlier node, an input or a constant",
                )
            self.captures[name] = None
        return name


class Lowering:
    """Lowers the graphs of one model.

    Parameters
    ----------
    model : ModelProto
    folder : Path or None
        Where external data may lie.
    replaced : callable
        ``(domain, op_type) -> bool``: whether a custom kernel stands for the operator.
    convert : callable
        Applied to every constant: to the device, or to float64.
    """

    def __init__(
        self,
        model: ModelProto,
        folder: Path | None,
        replaced: Callable[[str, str], bool],
        convert: Callable[[Any], Any],
        settings: Settings,
    ) -> None:
        self.model = model
        self.folder = folder
        self.replaced = replaced
        self.convert = convert
        self.settings = settings

    def main(self) -> Lowered:
        """The main graph."""
        graph = self.model.graph
        declared = {i.name: i.type for i in graph.input if i.type.WhichOneof("value")}
        opsets = {domain_of(o.domain): o.version for o in self.model.opset_import}
        return self._graph(graph, (), opsets, None, declared)

    def _graph(
        self,
        proto: GraphProto,
        path: tuple[str, ...],
        opsets: Mapping[str, int],
        outer: Lowered | None,
        input_types: Mapping[str, TypeProto],
    ) -> Lowered:
        if len(path) > _MAX_DEPTH:
            raise ModelError("subgraphs are nested too deeply", got="/".join(path)[:100])
        inputs = [i.name for i in proto.input]
        graph = Lowered(path, opsets, outer, inputs, dict(input_types), results=set(inputs))
        for tensor in proto.initializer:
            self._constant(graph, tensor.name, tensor_value(tensor, self.folder, tensor.name))
        for sparse in proto.sparse_initializer:
            name = sparse.values.name
            raise UnsupportedError(f"constant {name!r} is sparse", expected="a dense constant")
        self._nodes(proto.node, graph)
        for output in proto.output:
            graph.outputs.append(graph.read(output.name))
            if output.name in graph.types:
                check_declared(output.name, output.type, graph.types[output.name])
        return graph

    def _nodes(self, protos: Iterable[NodeProto], graph: Lowered) -> None:
        for position, proto in enumerate(protos):
            name = proto.name or f"{proto.op_type}_{position}"
            domain = domain_of(proto.domain)
            if (domain, proto.op_type) == ("", "Constant") and not self.replaced("", "Constant"):
                self._constant_node(proto, name, graph)
            else:
                self._node(proto, domain, name, graph)

    def _constant(self, graph: Lowered, name: str, value: Any) -> None:
        graph.types.setdefault(name, type_proto(value))
        graph.constants[name] = self.convert(value)
        if name not in graph.inputs:  # else a default, which a feed may replace
            graph.known[name] = graph.constants[name]
        graph.results.add(name)

    def _constant_node(self, proto: NodeProto, name: str, graph: Lowered) -> None:
        if len(proto.attribute) != 1 or len(proto.output) != 1:
            raise ModelError(
                f"node {name!r} (Constant)", got=f"{len(proto.attribute)} values", expected="one"
            )
        attribute = proto.attribute[0]
        value = attribute_value(attribute, self.folder, name)
        if attribute.name in _CONSTANT_KINDS:
            value = to_value(np.array(value, dtype=_CONSTANT_KINDS[attribute.name]))
        elif attribute.name != "value":
            raise ModelError(f"node {name!r} (Constant)", got=f"attribute {attribute.name!r}")
        self._constant(graph, proto.output[0], value)

    def _node(self, proto: NodeProto, domain: str, name: str, graph: Lowered) -> None:
        custom = self.replaced(domain, proto.op_type)
        opset = graph.opsets.get(domain, 0)
        if domain not in graph.opsets and not custom:
            raise ModelError(
                f"node {name!r} ({domain or 'ai.onnx'}.{proto.op_type}): the model does not import"
                " the node's domain",
                expected=f"an opset_import for {domain!r}",
            )
        schema = None if custom else schema_of(domain, proto.op_type, opset)
        inputs = tuple(graph.read(n) for n in proto.input)
        node = Node(
            len(graph.nodes),
            graph.path,
            name,
            domain,
            proto.op_type,
            schema.since_version if schema else opset,
            opset,
            inputs,
            tuple(proto.output),
            settings=self.settings,
            proto=NodeProto(),
        )
        node.proto.CopyFrom(proto)
        node.proto.domain, node.proto.name = domain, name
        node.types = {n: graph.types[n] for n in inputs if n in graph.types}
        node.constants = {k: graph.known[n] for k, n in enumerate(inputs) if n in graph.known}
        for attribute in proto.attribute:
            if attribute.type == AttributeProto.GRAPH:
                path = (*graph.path, name, attribute.name)
                body = self._graph(attribute.g, path, graph.opsets, graph, {})
                node.subgraphs[attribute.name] = body
            else:
                value = attribute_value(attribute, self.folder, name)
                node.attributes[attribute.name] = value
        captures = [n for body in node.subgraphs.values() for n in body.captures]
        node.captures = tuple(dict.fromkeys(graph.read(n) for n in captures))
        check_attributes(node)
        if schema is not None:
            check_given(node, schema)
            graph.types.update(_output_types(node))
        graph.results.update(n for n in node.outputs if n)
        graph.nodes.append(node)


def _output_types(node: Node) -> dict[str, TypeProto]:
    """What is known of the outputs' types before a run; after a body only the run tells."""
    if node.subgraphs:
        return {}
    data = {node.inputs[k]: small_integer(v, node.inputs[k]) for k, v in node.constants.items()}
    return infer(node, node.types, data)
