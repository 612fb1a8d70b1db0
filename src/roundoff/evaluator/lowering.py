"""From protos to :class:`~roundoff.evaluator.nodes.Node`, with constants as values."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto

from roundoff.errors import UnsupportedError
from roundoff.graph.protos import bodies, captured

from .checks import infer, schema_of
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


def lower(
    model: ModelProto,
    folder: Path | None,
    replaced: Collection[tuple[str, str]],
    convert: Callable[[Any], Any],
    settings: Settings,
) -> tuple[list[Node], dict[str, Any]]:
    """The nodes and the constants of a model's graph.

    Parameters
    ----------
    model : ModelProto
    folder : Path or None
        Where external data may lie.
    replaced : collection of (domain, op_type)
        Operators for which a custom kernel stands: nothing is known of their results.
    convert : callable
        Applied to every constant: to the device, or to float64.
    settings : Settings

    Raises
    ------
    UnsupportedError, DtypeError, ShapeError, ModelError
    """
    graph = model.graph
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        raise UnsupportedError(f"constant {name!r} is sparse", expected="a dense constant")
    opsets = {domain_of(o.domain): o.version for o in model.opset_import}
    given = {i.name: i.type for i in graph.input}
    fixed = {t.name: tensor_value(t, folder, t.name) for t in graph.initializer}
    protos = []
    for position, original in enumerate(graph.node):
        proto = NodeProto()
        proto.CopyFrom(original)
        proto.domain = domain_of(proto.domain)
        proto.name = proto.name or f"{proto.op_type}_{position}"
        operator = proto.domain, proto.op_type
        if operator == ("", "Constant") and operator not in replaced:
            fixed[proto.output[0]] = _constant(proto, folder)
        else:
            protos.append(proto)
    types = {name: type_proto(value) for name, value in fixed.items()}
    types |= {name: type_ for name, type_ in given.items() if type_.WhichOneof("value")}
    constants = {name: convert(value) for name, value in fixed.items()}
    nodes: list[Node] = []
    for proto in protos:
        is_custom = (proto.domain, proto.op_type) in replaced
        opset = opsets.get(proto.domain, 0)
        schema = None if is_custom else schema_of(proto.domain, proto.op_type, opset)
        inner = dict(bodies(proto))
        node = Node(
            len(nodes),
            proto.name,
            proto.domain,
            proto.op_type,
            schema.since_version if schema else opset,
            opset,
            tuple(proto.input),
            tuple(proto.output),
            captures=tuple(dict.fromkeys(n for body in inner.values() for n in captured(body))),
            attributes={
                attribute.name: attribute_value(attribute, folder, proto.name)
                for attribute in proto.attribute
                if attribute.type != AttributeProto.GRAPH
            },
            subgraphs=inner,
            constants={
                place: constants[name]
                for place, name in enumerate(proto.input)
                if name in constants and name not in given  # else a feed may replace it
            },
            types={name: types[name] for name in proto.input if name in types},
            settings=settings,
            proto=proto,
        )
        if not is_custom:
            made = infer(node, node.types)
            node.types |= made
            types |= made
        nodes.append(node)
    return nodes, constants


def _constant(proto: NodeProto, folder: Path | None) -> Any:
    (attribute,) = proto.attribute  # ONNX's checker sees to it
    value = attribute_value(attribute, folder, proto.name)
    kind = _CONSTANT_KINDS.get(attribute.name)
    return value if kind is None else to_value(np.array(value, kind))
