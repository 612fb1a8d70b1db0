"""Types for which ONNX Runtime lacks a kernel: that operator in a wider type, rounded after."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import onnx
import onnx_ir as ir

from roundoff.errors import UnsupportedError

__all__ = ["with_kernels"]

T = TypeVar("T")

#: Type without a kernel -> one that holds all its values, and usually has one.
WIDER = {
    ir.DataType.BFLOAT16: ir.DataType.FLOAT,
    ir.DataType.FLOAT16: ir.DataType.FLOAT,
    ir.DataType.BOOL: ir.DataType.UINT8,
    ir.DataType.UINT8: ir.DataType.INT32,
    ir.DataType.INT8: ir.DataType.INT32,
    ir.DataType.INT16: ir.DataType.INT32,
    ir.DataType.UINT16: ir.DataType.INT32,
    ir.DataType.INT32: ir.DataType.INT64,
    ir.DataType.UINT32: ir.DataType.INT64,
}
# Inputs whose type is not that of the values computed with.
_FIXED = {"Where": {0}, "Not": {0}, "And": {0, 1}, "Or": {0, 1}, "Xor": {0, 1}}


def with_kernels(model: onnx.ModelProto, cpu: bool, prepare: Callable[[onnx.ModelProto], T]) -> T:
    """``prepare(model)``, where operators without a kernel are computed in a wider type.

    Parameters
    ----------
    model : onnx.ModelProto
        With the types of its values.
    cpu : bool
        Whether it is to run on the CPU: bfloat16 is then computed in float32 throughout, and
        rounded after each operator.
    prepare : callable
        Makes sessions of a model; called again, on a model with one more node in a wider type,
        as long as it raises for a node that can be helped this way.

    Raises
    ------
    UnsupportedError
        What *prepare* raises, where it names no node, or no wider type is left.
    """
    if cpu and _has_bfloat16(model):
        model = _in_float32(model)
    while True:
        try:
            return prepare(model)
        except UnsupportedError as error:
            wider = _without_kernel(model, error)
            if wider is None:
                raise
            model = wider


def _has_bfloat16(model: onnx.ModelProto) -> bool:
    """Whether an input, an initialiser or a value of the model is bfloat16."""
    kind = onnx.TensorProto.BFLOAT16
    values = [*model.graph.input, *model.graph.value_info, *model.graph.output]
    return any(v.type.tensor_type.elem_type == kind for v in values) or any(
        i.data_type == kind for i in model.graph.initializer
    )


def _in_float32(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every bfloat16 operator computed in float32 and rounded after.

    float32 holds every bfloat16 number, and each result is rounded as the operator would round
    it: this is bfloat16 arithmetic with float32 inside, which is what torch does on a CPU.
    """
    model = _copy(proto)
    for node in list(model.graph):
        # What stays with torch is computed as torch computes it.
        if node.op_type != "Cast" and not node.op_type.startswith("torch."):
            _upcast(model.graph, node, {ir.DataType.BFLOAT16})
    model.graph.sort()
    return ir.to_proto(model)


def _without_kernel(proto: onnx.ModelProto, error: Exception) -> onnx.ModelProto | None:
    """The model with the node that a session's *error* names computed in a wider type.

    None where the error names no node, or there is no wider type to try.
    """
    match = re.search(r"implementation for (\w+)\(\d+\) node with name '([^']*)'", str(error))
    model = _copy(proto)
    node = next((n for n in model.graph if match and n.name == match[2]), None)
    if node is None:
        return None
    values = [v for v in (*node.inputs, *node.outputs) if v is not None and v.dtype in WIDER]
    kinds = {v.dtype for v in values if v.dtype is not None}
    if not kinds or not _upcast(model.graph, node, kinds):
        return None
    model.graph.sort()
    return ir.to_proto(model)


def _copy(model: onnx.ModelProto) -> ir.Model:
    return ir.from_proto(onnx.ModelProto.FromString(model.SerializeToString()))


def _upcast(graph: ir.Graph, node: ir.Node, kinds: set[ir.DataType | None]) -> bool:
    """Put Casts around a node for its inputs and outputs of the *kinds*."""
    changed = False
    fixed = _FIXED.get(node.op_type, set())
    for i, value in enumerate(node.inputs):
        if value is None or value.dtype not in kinds or i in fixed:
            continue
        assert value.dtype is not None
        wide = WIDER[value.dtype]
        # One Cast of a value serves all its readers.
        cast = next(
            (
                u.node
                for u in value.uses()
                if u.node.op_type == "Cast" and u.node.outputs[0].dtype == wide
            ),
            None,
        )
        if cast is None:
            cast = _cast(value, wide)
            source = value.producer()
            if source is None:
                graph.insert_before(next(iter(graph)), cast)
            else:
                graph.insert_after(source, cast)
        node.replace_input_with(i, cast.outputs[0])
        changed = True
    for i, value in enumerate(node.outputs):
        if value.name and value.dtype in kinds:
            _round_to(graph, node, i)
            changed = True
    return changed


def _cast(value: ir.Value, to: ir.DataType) -> ir.Node:
    out = ir.Value(
        name=f"{value.name}_{to.name.lower()}", shape=value.shape, type=ir.TensorType(to)
    )
    attributes = ir.convenience.convert_attributes({"to": int(to)})
    return ir.Node("", "Cast", [value], attributes, outputs=[out], name=f"{out.name}_cast")


def _round_to(graph: ir.Graph, node: ir.Node, index: int) -> None:
    """Let the node compute the wider type, and a Cast after it the value under its old name."""
    value = node.outputs[index]
    uses, name, kind = list(value.uses()), value.name, value.dtype
    assert kind is not None
    value.name = f"{name}_wide"
    value.type = ir.TensorType(WIDER[kind])
    cast = _cast(value, kind)
    rounded = cast.outputs[0]
    rounded.name = name
    graph.insert_after(node, cast)
    for user, i in uses:
        user.replace_input_with(i, rounded)
    for i, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[i] = rounded
