"""From protos to :class:`~roundoff.evaluator.nodes.Node`, with constants as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, TypeProto

from roundoff.errors import UnsupportedError
from roundoff.graph.protos import bodies, captured

from .checks import infer, schema_of, small_integer
from .loading import attribute_value, domain_of, tensor_value
from .nodes import Node, Settings
from .values import to_value, type_proto

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

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: dict[str, TypeProto]
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)
    nodes: list[Node] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Lowering:
    """Lowers the graph of a model.

    Attributes
    ----------
    model : ModelProto
    folder : Path or None
        Where external data may lie.
    replaced : callable
        ``(domain, op_type) -> bool``: whether a custom kernel stands for the operator.
    convert : callable
        Applied to every constant: to the device, or to float64.
    settings : Settings
    """

    model: ModelProto
    folder: Path | None
    replaced: Callable[[str, str], bool]
    convert: Callable[[Any], Any]
    settings: Settings

    def main(self) -> Lowered:
        """The graph.

        Raises
        ------
        UnsupportedError, DtypeError, ShapeError, ModelError
        """
        proto = self.model.graph
        self.opsets = {domain_of(o.domain): o.version for o in self.model.opset_import}
        self.graph = graph = Lowered(
            tuple(i.name for i in proto.input),
            tuple(o.name for o in proto.output),
            {i.name: i.type for i in proto.input if i.type.WhichOneof("value")},
        )
        for tensor in proto.initializer:
            self._constant(tensor.name, tensor_value(tensor, self.folder, tensor.name))
        for sparse in proto.sparse_initializer:
            name = sparse.values.name
            raise UnsupportedError(f"constant {name!r} is sparse", expected="a dense constant")
        for position, node in enumerate(proto.node):
            name = node.name or f"{node.op_type}_{position}"
            domain = domain_of(node.domain)
            if (domain, node.op_type) == ("", "Constant") and not self.replaced("", "Constant"):
                self._constant_node(node, name)
            else:
                self._node(node, domain, name)
        return graph

    def _constant(self, name: str, value: Any) -> None:
        self.graph.types.setdefault(name, type_proto(value))
        self.graph.constants[name] = self.convert(value)

    def _constant_node(self, proto: NodeProto, name: str) -> None:
        (attribute,) = proto.attribute  # ONNX's checker sees to it
        value = attribute_value(attribute, self.folder, name)
        if attribute.name in _CONSTANT_KINDS:
            value = to_value(np.array(value, dtype=_CONSTANT_KINDS[attribute.name]))
        self._constant(proto.output[0], value)

    def _node(self, proto: NodeProto, domain: str, name: str) -> None:
        graph, custom = self.graph, self.replaced(domain, proto.op_type)
        opset = self.opsets.get(domain, 0)
        schema = None if custom else schema_of(domain, proto.op_type, opset)
        copy = NodeProto()
        copy.CopyFrom(proto)
        copy.domain, copy.name = domain, name
        inner = dict(bodies(proto))
        node = Node(
            len(graph.nodes),
            name,
            domain,
            proto.op_type,
            schema.since_version if schema else opset,
            opset,
            tuple(proto.input),
            tuple(proto.output),
            captures=tuple(dict.fromkeys(n for body in inner.values() for n in captured(body))),
            attributes={
                attribute.name: attribute_value(attribute, self.folder, name)
                for attribute in proto.attribute
                if attribute.type != AttributeProto.GRAPH
            },
            subgraphs=inner,
            settings=self.settings,
            proto=copy,
        )
        node.types = {n: graph.types[n] for n in node.inputs if n in graph.types}
        for place, read in enumerate(node.inputs):
            if read in graph.constants and read not in graph.inputs:  # else a feed may replace it
                node.constants[place] = graph.constants[read]
        if schema is not None and not inner:  # after a body only the run tells
            data = {
                node.inputs[k]: small_integer(v, node.inputs[k]) for k, v in node.constants.items()
            }
            made = infer(node, node.types, data)
            node.types |= made
            graph.types.update(made)
        graph.nodes.append(node)
