"""bfloat16 on a CPU, where ONNX Runtime has few kernels: float32, rounded after each operator."""

from __future__ import annotations

import onnx
import onnx_ir as ir

__all__ = ["in_float32"]

NARROW, WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT


def in_float32(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every bfloat16 operator computed in float32 and rounded after.

    float32 holds every bfloat16 number, and each result is rounded as the operator would round
    it: this is bfloat16 arithmetic with float32 inside, which is what torch does on a CPU.
    """
    if not _has_bfloat16(proto):
        return proto
    model = ir.from_proto(onnx.ModelProto.FromString(proto.SerializeToString()))
    for node in list(model.graph):
        # What stays with torch is computed as torch computes it.
        if node.op_type != "Cast" and not node.op_type.startswith("torch."):
            _upcast(model.graph, node)
    model.graph.sort()
    return ir.to_proto(model)


def _has_bfloat16(model: onnx.ModelProto) -> bool:
    """Whether an input, an initialiser or a value of the model is bfloat16."""
    kind = onnx.TensorProto.BFLOAT16
    values = [*model.graph.input, *model.graph.value_info, *model.graph.output]
    return any(v.type.tensor_type.elem_type == kind for v in values) or any(
        i.data_type == kind for i in model.graph.initializer
    )


def _upcast(graph: ir.Graph, node: ir.Node) -> None:
    """Put Casts around a node for its inputs and outputs in bfloat16."""
    for i, value in enumerate(node.inputs):
        if value is None or value.dtype != NARROW:
            continue
        # One Cast of a value serves all its readers.
        cast = next(
            (
                u.node
                for u in value.uses()
                if u.node.op_type == "Cast" and u.node.outputs[0].dtype == WIDE
            ),
            None,
        )
        if cast is None:
            cast = _cast(value, WIDE)
            source = value.producer()
            if source is None:
                graph.insert_before(next(iter(graph)), cast)
            else:
                graph.insert_after(source, cast)
        node.replace_input_with(i, cast.outputs[0])
    for i, value in enumerate(node.outputs):
        if value.name and value.dtype == NARROW:
            _round_to(graph, node, i)


def _cast(value: ir.Value, to: ir.DataType) -> ir.Node:
    out = ir.Value(
        name=f"{value.name}_{to.name.lower()}", shape=value.shape, type=ir.TensorType(to)
    )
    attributes = ir.convenience.convert_attributes({"to": int(to)})
    return ir.Node("", "Cast", [value], attributes, outputs=[out], name=f"{out.name}_cast")


def _round_to(graph: ir.Graph, node: ir.Node, index: int) -> None:
    """Let the node compute float32, and a Cast after it the value under its old name."""
    value = node.outputs[index]
    uses, name = list(value.uses()), value.name
    value.name = f"{name}_wide"
    value.type = ir.TensorType(WIDE)
    cast = _cast(value, NARROW)
    rounded = cast.outputs[0]
    rounded.name = name
    graph.insert_after(node, cast)
    for user, i in uses:
        user.replace_input_with(i, rounded)
    for i, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[i] = rounded
