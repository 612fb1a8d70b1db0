"""Types proved before a run, and the same proof at run time where that is not possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
from onnx import TypeProto, helper, shape_inference

from roundoff.dtypes import dtype_info
from roundoff.errors import DtypeError, ShapeError, UnsupportedError
from roundoff.graph.protos import shape_of

from .nodes import Node
from .values import brief, elem_type, signature, type_name, type_proto


def schema_of(domain: str, op_type: str, opset: int) -> Any:
    """ONNX's schema of an operator; None for a domain that ONNX does not define.

    Raises
    ------
    UnsupportedError
        The domain is ONNX's own but has no such operator at this version.
    """
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError as error:
        if domain in {known.domain for known in onnx.defs.get_all_schemas()}:
            raise UnsupportedError(
                f"ONNX has no operator {op_type!r} in domain {domain or 'ai.onnx'!r}",
                got=f"opset {opset}",
                hint="give it in custom_kernels={(domain, op_type): kernel}",
            ) from error
        return None


def infer(node: Node, types: Mapping[str, TypeProto]) -> dict[str, TypeProto]:
    """Types of a node's outputs, from ONNX's inference, which also checks the inputs.

    Returns an empty dict when the types are not all known or ONNX has no such operator.

    Raises
    ------
    DtypeError, ShapeError
        ONNX does not allow these inputs.
    """
    schema = schema_of(node.domain, node.op_type, node.opset)
    known = all(n in types for n in node.inputs if n)
    if schema is None or node.subgraphs or not known:
        return {}
    opsets = [helper.make_opsetid(node.domain, node.opset)]
    try:
        return shape_inference.infer_node_outputs(
            schema, node.proto, dict(types), opset_imports=opsets
        )
    except Exception as error:
        fails = DtypeError if isinstance(error, onnx.checker.ValidationError) else ShapeError
        raise fails(f"node {node.name!r} ({node.operator}): {brief(error)}") from error


def guarded(node: Node, function: Callable[..., Any]) -> Callable[..., Any]:
    """*function* preceded by a check of the element types, once for each combination."""
    seen: set[Any] = set()

    def call(*inputs: Any) -> Any:
        key = signature(inputs)
        if key not in seen:
            given = {n: x for n, x in zip(node.inputs, inputs, strict=False) if x is not None}
            infer(node, {name: type_proto(x, shape=False) for name, x in given.items()})
            seen.add(key)
        return function(*inputs)

    return call


def check_feed(name: str, value: Any, declared: TypeProto, truth: bool) -> None:
    """An input that is a tensor has the declared element type, rank and fixed dimensions.

    Raises
    ------
    DtypeError, ShapeError
        It does not.
    """
    if not declared.HasField("tensor_type"):
        return
    expected, got = dtype_info(declared.tensor_type.elem_type), elem_type(value)
    is_float = truth and got and expected.is_float and dtype_info(got).is_float
    if got != expected.onnx and not is_float:
        raise DtypeError(
            f"input {name!r}", got=type_name(value), expected=expected.name, hint="cast the feed"
        )
    shape = shape_of(declared)
    if shape is None:
        return
    sizes = zip(shape, value.shape, strict=False)
    if len(shape) != value.ndim or any(isinstance(d, int) and d != size for d, size in sizes):
        raise ShapeError(f"input {name!r}", got=str(list(value.shape)), expected=str(shape))
