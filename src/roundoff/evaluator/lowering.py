"""From protos to :class:`~roundoff.evaluator.nodes.Node`: functions inlined, names resolved.

A local function becomes the nodes of its body, in the place of the call, their results named
after the call; an attribute that refers to one of the function's is replaced by its value.
A subgraph becomes a graph of its own, which lists the outer results it reads.
"""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TypeProto, helper

from roundoff.errors import ModelError

from .checks import check_attributes, check_declared, check_given, infer, schema_of
from .loading import Loaded, attribute_value, sparse_value, tensor_value
from .nodes import Node, Settings
from .values import type_proto

# Functions that call functions can grow exponentially.
_MAX_NODES = 1_000_000
_MAX_DEPTH = 64


@dataclasses.dataclass
class Lowered:
    """A graph of nodes, from which :class:`~roundoff.evaluator.program.Graph` is compiled."""

    path: tuple[str, ...]
    inputs: list[str]
    outputs: list[str]
    nodes: list[Node]
    constants: dict[str, Any]
    optional: set[str]
    types: dict[str, TypeProto]
    captures: tuple[str, ...] = ()
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)  # capture -> in the proto
    results: set[str] = dataclasses.field(default_factory=set)
    prefixes: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class _Scope:
    """Where a list of NodeProto is being lowered to."""

    graph: Lowered
    opsets: Mapping[str, int]
    names: dict[str, str]  # as in the proto -> as in the graph
    path: tuple[str, ...]
    prefix: str = ""
    attributes: Mapping[str, AttributeProto] = dataclasses.field(default_factory=dict)
    calls: tuple[Any, ...] = ()
    outer_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    types: Mapping[str, TypeProto] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def read(self, name: str) -> str:
        """The graph's name of a result that a node reads."""
        if not name:
            return ""
        unique = self.names.get(name)
        if unique is not None:
            return unique
        unique = self.outer_names.get(name)
        if unique is None:
            raise ModelError(
                f"{self.prefix or 'the graph'} reads a result that nothing makes", got=name
            )
        self.graph.aliases.setdefault(unique, name)
        return unique

    def make(self, name: str) -> str:
        """The graph's name of a result that a node makes."""
        if not name:
            return ""
        unique = self.names.setdefault(name, self.prefix + name)
        self.graph.results.add(unique)
        return unique


class Lowering:
    """Lowers the graphs of one model.

    Parameters
    ----------
    loaded : Loaded
    replaced : callable
        ``(domain, op_type) -> bool``: whether a custom kernel stands for the operator, in which
        case a local function of that name is not inlined.
    convert : callable
        Applied to every constant: to the device, or to float64.
    """

    def __init__(
        self,
        loaded: Loaded,
        replaced: Callable[[str, str], bool],
        convert: Callable[[Any], Any],
        settings: Settings,
    ) -> None:
        self.loaded = loaded
        self.replaced = replaced
        self.convert = convert
        self.settings = settings
        self.count = 0

    def main(self) -> Lowered:
        """The main graph."""
        return self._graph(self.loaded.graph, (), self.loaded.opsets, None, {})

    def _graph(
        self,
        proto: GraphProto,
        path: tuple[str, ...],
        opsets: Mapping[str, int],
        parent: _Scope | None,
        input_types: Mapping[str, TypeProto],
    ) -> Lowered:
        if len(path) > _MAX_DEPTH:
            raise ModelError("subgraphs are nested too deeply", got="/".join(path)[:100])
        prefix = "/".join((*path, "")) if parent is not None else ""
        inputs = [prefix + i.name for i in proto.input]
        graph = Lowered(path, inputs, [], [], {}, set(), {}, results=set(inputs))
        names = {i.name: prefix + i.name for i in proto.input}
        scope = _Scope(graph, opsets, names, path, prefix, types=graph.types,
                       constants=graph.constants)  # fmt: skip
        if parent is not None:
            scope.attributes, scope.calls = parent.attributes, parent.calls
            scope.types = ChainMap(graph.types, parent.types)  # type: ignore[arg-type]
            scope.constants = ChainMap(graph.constants, parent.constants)  # type: ignore[arg-type]
            scope.outer_names = ChainMap(parent.names, parent.outer_names)  # type: ignore[arg-type]
            graph.types.update({prefix + n: t for n, t in input_types.items()})
        else:
            graph.types.update({i.name: i.type for i in proto.input if i.type.WhichOneof("value")})
        self._constants(proto, scope)
        for position, node in enumerate(proto.node):
            self._node(node, position, scope)
        graph.outputs = [scope.read(o.name) for o in proto.output]
        graph.captures = tuple(graph.aliases)
        for declared, name in zip(proto.output, graph.outputs, strict=True):
            known = scope.types.get(name)
            if known is not None:
                check_declared(declared.name, declared.type, known)
        return graph

    def _constants(self, proto: GraphProto, scope: _Scope) -> None:
        graph, folder = scope.graph, self.loaded.folder
        for tensor in proto.initializer:
            self._constant(scope, tensor.name, tensor_value(tensor, folder, tensor.name))
        for sparse in proto.sparse_initializer:
            name = sparse.values.name
            self._constant(scope, name, sparse_value(sparse, folder, name))
        graph.optional = set(graph.inputs) & set(graph.constants)

    def _constant(self, scope: _Scope, name: str, value: Any) -> None:
        unique = scope.make(name)
        scope.graph.types.setdefault(unique, type_proto(value))
        scope.graph.constants[unique] = self.convert(value)

    def _node(self, proto: NodeProto, position: int, scope: _Scope) -> None:
        self.count += 1
        if self.count > _MAX_NODES:
            raise ModelError("the model's functions expand to too many nodes", got=self.count)
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        name = proto.name or f"{proto.op_type}_{position}"
        function = self.loaded.functions.get((domain, proto.op_type, proto.overload))
        custom = self.replaced(domain, proto.op_type)
        if function is not None and not custom:
            self._call(function, proto, name, scope)
            return
        attributes = self._attributes(proto, scope)
        if (domain, proto.op_type) == ("", "Constant") and not custom:
            self._constant_node(proto, name, attributes, scope)
            return
        self._plain(proto, domain, name, attributes, scope, custom)

    def _attributes(self, proto: NodeProto, scope: _Scope) -> list[AttributeProto]:
        """The node's attributes, references to those of the function resolved."""
        attributes = []
        for attribute in proto.attribute:
            if not attribute.ref_attr_name:
                attributes.append(attribute)
            elif attribute.ref_attr_name in scope.attributes:
                copy = AttributeProto()
                copy.CopyFrom(scope.attributes[attribute.ref_attr_name])
                copy.name = attribute.name
                attributes.append(copy)
        return attributes

    def _constant_node(
        self, proto: NodeProto, name: str, attributes: list[AttributeProto], scope: _Scope
    ) -> None:
        if len(attributes) != 1 or len(proto.output) != 1:
            raise ModelError(
                f"node {name!r} (Constant)", got=f"{len(attributes)} values", expected="one"
            )
        import numpy as np

        from .values import to_value

        attribute = attributes[0]
        value = attribute_value(attribute, self.loaded.folder, name)
        kinds = {"value_float": np.float32, "value_floats": np.float32,
                 "value_int": np.int64, "value_ints": np.int64,
                 "value_string": object, "value_strings": object}  # fmt: skip
        if attribute.name in kinds:
            value = to_value(np.array(value, dtype=kinds[attribute.name]))
        elif attribute.name not in ("value", "sparse_value"):
            raise ModelError(f"node {name!r} (Constant)", got=f"attribute {attribute.name!r}")
        self._constant(scope, proto.output[0], value)

    def _plain(
        self,
        proto: NodeProto,
        domain: str,
        name: str,
        attributes: list[AttributeProto],
        scope: _Scope,
        custom: bool,
    ) -> None:
        graph = scope.graph
        opset = scope.opsets.get(domain, 0)
        if domain not in scope.opsets and not custom:
            raise ModelError(
                f"node {name!r} ({domain or 'ai.onnx'}.{proto.op_type}): the model does not import"
                " the node's domain",
                expected=f"an opset_import for {domain!r}",
            )
        schema = None if custom else schema_of(domain, proto.op_type, opset)
        inputs = tuple(scope.read(n) for n in proto.input)
        node = Node(
            len(graph.nodes), scope.path, name, domain, proto.op_type,
            schema.since_version if schema else opset, opset, inputs, (),
            settings=self.settings,
        )  # fmt: skip
        node.types = {n: scope.types[n] for n in inputs if n in scope.types}
        node.constants = {
            k: scope.constants[n]
            for k, n in enumerate(inputs)
            if n in scope.constants and n not in graph.optional
        }
        for attribute in attributes:
            if attribute.type == AttributeProto.GRAPH:
                body = self._body(node, attribute, scope)
                node.subgraphs[attribute.name] = body
                node.aliases.update(body.aliases)
            else:
                node.attributes[attribute.name] = attribute_value(
                    attribute, self.loaded.folder, name
                )
        node.captures = tuple(node.aliases)
        for outer, alias in node.aliases.items():  # what the body takes from beyond this graph
            if outer not in graph.results:
                graph.aliases.setdefault(outer, alias)
        node.outputs = tuple(scope.make(n) for n in proto.output)
        node.proto = NodeProto(
            op_type=proto.op_type, domain=domain, name=name, input=inputs,
            output=node.outputs, attribute=attributes, overload=proto.overload,
        )  # fmt: skip
        check_attributes(node)
        if schema is not None:
            check_given(node, schema)
        if not custom:
            graph.types.update(self._outputs(node, schema))
        graph.nodes.append(node)

    def _body(self, node: Node, attribute: AttributeProto, scope: _Scope) -> Lowered:
        types: dict[str, TypeProto] = {}
        if node.operator == "Loop":
            actuals = [None, None, *node.inputs[2:]]
            for position, (formal, actual) in enumerate(
                zip(attribute.g.input, actuals, strict=False)
            ):
                if actual is None:
                    types[formal.name] = helper.make_tensor_type_proto(9 if position else 7, [])
                elif actual in node.types:  # a carried value may change its shape, not its type
                    types[formal.name] = _without_shape(node.types[actual])
        return self._graph(
            attribute.g, (*scope.path, node.name, attribute.name), scope.opsets, scope, types
        )

    def _outputs(self, node: Node, schema: Any) -> dict[str, TypeProto]:
        """What is known of the outputs' types before a run."""
        if schema is None:
            return {}
        if not node.subgraphs:
            data = {node.inputs[k]: _small(v, node.inputs[k]) for k, v in node.constants.items()}
            return infer(node, node.types, {k: v for k, v in data.items() if v is not None})
        if node.op_type == "If" and node.domain == "":
            return _agreed(node)
        return {}

    def _call(self, function: FunctionProto, proto: NodeProto, name: str, scope: _Scope) -> None:
        key = (function.domain, function.name, function.overload)
        if key in scope.calls or len(scope.calls) > _MAX_DEPTH:
            raise ModelError(
                f"local function {function.domain}.{function.name} calls itself",
                hint="ONNX functions may not recurse",
            )
        label = "/".join((*scope.path, name))
        values = {a.name: a for a in function.attribute_proto}
        values.update({a.name: a for a in self._attributes(proto, scope)})
        if len(proto.input) > len(function.input) or len(proto.output) > len(function.output):
            raise ModelError(f"node {label!r} has more inputs or outputs than its function takes")
        actual = [scope.read(n) for n in proto.input]
        actual += [""] * (len(function.input) - len(actual))
        inner = _Scope(
            scope.graph,
            {("" if o.domain == "ai.onnx" else o.domain): o.version for o in function.opset_import},
            dict(zip(function.input, actual, strict=True)),
            (*scope.path, name),
            self._unique(scope, label) + "/",
            values,
            (*scope.calls, key),
            types=scope.types,
            constants=scope.constants,
        )
        computed = {n for node in function.node for n in node.output}
        aliases = []
        for formal, actual_output in zip(function.output, proto.output, strict=False):
            if not actual_output:
                continue
            if formal in computed and formal not in inner.names:
                inner.names[formal] = scope.make(actual_output)
            else:
                aliases.append((formal, actual_output))
        for position, node in enumerate(function.node):
            self._node(node, position, inner)
        opset = inner.opsets.get("", 13)
        for formal, actual_output in aliases:
            copy = _Scope(**{**inner.__dict__, "opsets": {"": opset}})
            source = copy.read(formal)
            copy.names = {source: source, actual_output: scope.make(actual_output)}
            node = helper.make_node("Identity", [source], [actual_output])
            self._plain(node, "", f"Identity_{actual_output}", [], copy, False)

    def _unique(self, scope: _Scope, label: str) -> str:
        """A prefix that no result of the graph has yet: node names need not be unique."""
        unique, count = label, 1
        while unique in scope.graph.prefixes:
            count += 1
            unique = f"{label}.{count}"
        scope.graph.prefixes.add(unique)
        return unique


def _without_shape(known: TypeProto) -> TypeProto:
    if known.WhichOneof("value") != "tensor_type":
        return known
    return helper.make_tensor_type_proto(known.tensor_type.elem_type, None)


def _agreed(node: Node) -> dict[str, TypeProto]:
    """Types of the outputs of an If: element types on which both branches agree."""
    agreed: dict[str, TypeProto] = {}
    branches = list(node.subgraphs.values())
    for position, name in enumerate(node.outputs):
        types = [b.types.get(b.outputs[position]) for b in branches if position < len(b.outputs)]
        if len(types) == 2 and None not in types:
            first, second = (_without_shape(t) for t in types if t is not None)
            if first == second:
                agreed[name] = first
    return agreed


def _small(value: Any, name: str) -> Any:
    """A small integer constant as ONNX's inference takes it, else None."""
    from .values import to_numpy

    if getattr(value, "ndim", 9) > 1:
        return None
    array = to_numpy(value)
    if array.dtype.kind not in "iu" or array.size > 64 or array.dtype.isbuiltin != 1:
        return None
    return onnx.numpy_helper.from_array(array, name)
