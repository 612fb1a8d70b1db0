"""Types proved before a run, and the same proof at run time where that is not possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
from onnx import NodeProto, TensorProto, TypeProto, helper, shape_inference

from roundoff.dtypes import DTYPES
from roundoff.errors import (
    DtypeError,
    ModelError,
    RoundoffError,
    ShapeError,
    UnsupportedError,
)

from .nodes import Node
from .values import elem_type, signature, to_numpy, type_name, type_proto

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
    node: Node,
    types: Mapping[str, TypeProto],
    data: Mapping[str, TensorProto | None] | None = None,
) -> dict[str, TypeProto]:
    """Types of a node's outputs, from ONNX's inference, which also checks the inputs.

    Returns an empty dict when the types are not all known or ONNX has no such operator.

    Raises
    ------
    DtypeError, ShapeError, ModelError
        ONNX does not allow these inputs.
    """
    schema = schema_of(node.domain, node.op_type, node.opset)
    proto: NodeProto = node.proto
    untyped = (node.domain, node.op_type) in _UNTYPED_BODIES
    known = all(n in types for n in node.inputs if n)
    if schema is None or untyped or node.subgraphs or not known:
        return {}
    try:
        return shape_inference.infer_node_outputs(
            schema,
            proto,
            dict(types),
            {name: value for name, value in (data or {}).items() if value is not None},
            opset_imports=[helper.make_opsetid(node.domain, node.opset)],
        )
    except Exception as error:
        text = _clean(error)
        kind: type[RoundoffError] = ModelError
        if isinstance(error, shape_inference.InferenceError):
            kind = ShapeError
        elif isinstance(error, onnx.checker.ValidationError) and "type" in text:
            kind = DtypeError
        raise kind(f"node {node.name!r} ({node.operator}): {text}") from error


def _clean(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.replace("[ShapeInferenceError] ", "").replace("[TypeInferenceError] ", "")[:300]


def small_integer(value: Any, name: str) -> TensorProto | None:
    """An integer of few elements as ONNX's inference takes it, else None."""
    array = to_numpy(value) if getattr(value, "ndim", 9) <= 1 else None
    if array is None or array.dtype.kind not in "iu" or array.size > 64:
        return None
    return onnx.numpy_helper.from_array(array, name)


def guarded(node: Node, function: Callable[..., Any]) -> Callable[..., Any]:
    """*function* preceded by a check of the element types, once for each combination."""
    seen: set[Any] = set()
    names = node.inputs

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
    """An input that is a tensor has the declared element type, rank and fixed dimensions.

    Raises
    ------
    DtypeError, ShapeError
        It does not.
    """
    if not declared.HasField("tensor_type"):
        return
    wanted, got = declared.tensor_type, elem_type(value)
    expected = DTYPES.get(wanted.elem_type)
    floats = truth and got and expected is not None and expected.is_float and DTYPES[got].is_float
    if not got or (expected is not None and got != expected.onnx and not floats):
        raise DtypeError(
            f"input {name!r}",
            got=type_name(value),
            expected=expected.name if expected else "a tensor",
            hint="cast the feed",
        )
    if not wanted.HasField("shape"):
        return
    dims = wanted.shape.dim
    if len(dims) != value.ndim or any(
        d.HasField("dim_value") and d.dim_value != size
        for d, size in zip(dims, value.shape, strict=True)
    ):
        text = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in dims]
        raise ShapeError(f"input {name!r}", got=str(list(value.shape)), expected=str(text))
