"""Types proved before a run, and the same proof at run time where that is not possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
from onnx import NodeProto, TensorProto, TypeProto, helper, shape_inference

from ..errors import DtypeError, ModelError, ShapeError, UnsupportedError
from .nodes import Node
from .values import signature, to_numpy, type_name, type_proto

# ONNX's inference cannot type the constants inside the function body of these.
_UNTYPED_BODIES = {("", "MeanVarianceNormalization")}
_KNOWN_DOMAINS = {"", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training"}


def schema_of(domain: str, op_type: str, opset: int) -> Any:
    """ONNX's schema of an operator; None for a domain that ONNX does not define.

    Raises
    ------
    UnsupportedError
        The domain is ONNX's own but has no such operator at this version.
    """
    try:
        schema = onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError as error:
        if domain in _KNOWN_DOMAINS:
            raise UnsupportedError(
                f"ONNX has no operator {op_type!r} in domain {domain or 'ai.onnx'!r}",
                got=f"opset {opset}",
                hint="give it in custom_kernels={(domain, op_type): kernel}",
            ) from error
        return None
    return schema


def infer(
    node: Node, types: Mapping[str, TypeProto], data: Mapping[str, TensorProto] | None = None
) -> dict[str, TypeProto]:
    """Types of a node's outputs, from ONNX's inference, which also checks the inputs.

    Returns an empty dict when the types are not all known or ONNX has no such operator.

    Raises
    ------
    DtypeError, ShapeError, ModelError
        ONNX does not allow these inputs.
    """
    key = (node.domain, node.op_type)
    schema = schema_of(node.domain, node.op_type, node.opset)
    proto: NodeProto = node.proto
    if schema is None or any(n and n not in types for n in proto.input) or key in _UNTYPED_BODIES:
        return {}
    try:
        return shape_inference.infer_node_outputs(
            schema, proto, dict(types), dict(data or {}),
            opset_imports=[helper.make_opsetid(node.domain, node.opset)],
        )  # fmt: skip
    except onnx.checker.ValidationError as error:
        text = _clean(error)
        kind = DtypeError if "type" in text else ModelError
        raise kind(f"node {node.label!r} ({node.operator}): {text}") from error
    except shape_inference.InferenceError as error:
        raise ShapeError(f"node {node.label!r} ({node.operator}): {_clean(error)}") from error
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ModelError(f"node {node.label!r} ({node.operator}): {_clean(error)}") from error


def _clean(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.replace("[ShapeInferenceError] ", "").replace("[TypeInferenceError] ", "")[:300]


def infer_from_values(node: Node, inputs: tuple[Any, ...]) -> dict[str, TypeProto]:
    """:func:`infer` for the inputs of a run: shapes are known, and small integers too."""
    types, data = {}, {}
    for name, value in zip(node.proto.input, inputs, strict=False):
        if not name:
            continue
        if value is None or isinstance(value, dict):
            return {}
        types[name] = type_proto(value)
        array = to_numpy(value) if getattr(value, "ndim", 9) <= 1 else None
        if array is not None and array.dtype.kind in "iu" and array.size <= 64:
            data[name] = onnx.numpy_helper.from_array(array, name)
    return infer(node, types, data)


def guarded(node: Node, function: Callable[..., Any]) -> Callable[..., Any]:
    """*function* preceded by a check of the element types, once for each combination."""
    seen: set[Any] = set()
    names = node.proto.input

    def call(*inputs: Any) -> Any:
        key = signature(inputs)
        if key not in seen:
            if not any(isinstance(x, dict) for x in inputs):
                types = {}
                for name, value in zip(names, inputs, strict=False):
                    if name and value is not None:
                        types[name] = type_proto(value, shape=False)
                infer(node, types)
            seen.add(key)
        return function(*inputs)

    return call


def check_feed(name: str, value: Any, declared: TypeProto, truth: bool) -> None:
    """An input has the declared element type, rank and fixed dimensions.

    Raises
    ------
    DtypeError, ShapeError
        It does not.
    """
    kind = declared.WhichOneof("value")
    if kind == "tensor_type":
        given = type_proto(value) if value is not None else TypeProto()
        if not given.HasField("tensor_type"):
            raise DtypeError(f"input {name!r}", got=type_name(value), expected="a tensor")
        _check_tensor(name, value, given, declared.tensor_type, truth)
    elif kind == "sequence_type" and not isinstance(value, list):
        raise DtypeError(f"input {name!r}", got=type_name(value), expected="a list")
    elif kind == "sequence_type":
        for position, item in enumerate(value):
            check_feed(f"{name}[{position}]", item, declared.sequence_type.elem_type, truth)
    elif kind == "optional_type" and value is not None:
        check_feed(name, value, declared.optional_type.elem_type, truth)


def _check_tensor(
    name: str, value: Any, given: TypeProto, wanted: TypeProto.Tensor, truth: bool
) -> None:
    from ..dtypes import DTYPES

    found = given.tensor_type.elem_type
    if wanted.elem_type and found != wanted.elem_type:
        both_float = DTYPES[found].is_float and DTYPES[wanted.elem_type].is_float
        if not (truth and both_float):
            raise DtypeError(
                f"input {name!r}",
                got=type_name(value),
                expected=DTYPES[wanted.elem_type].name,
                hint="cast the feed",
            )
    if not wanted.HasField("shape"):
        return
    dims = [d.dim_value if d.HasField("dim_value") else None for d in wanted.shape.dim]
    shape = list(value.shape)
    if len(dims) != len(shape) or any(
        d is not None and d != s for d, s in zip(dims, shape, strict=True)
    ):
        text = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?"
                for d in wanted.shape.dim]  # fmt: skip
        raise ShapeError(f"input {name!r}", got=str(shape), expected=str(text))
