"""Types proved before a run, and the same proof at run time where that is not possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx
from onnx import NodeProto, TensorProto, TypeProto, helper, shape_inference

from roundoff.dtypes import DTYPES
from roundoff.errors import DtypeError, ModelError, ShapeError, UnsupportedError

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


#: Attributes that may hold any 64-bit integer; all others are stored as 32-bit ones by someone.
_WIDE_ATTRIBUTES = {"start", "end", "starts", "ends", "seed"}
#: Attributes that are 0 or 1: of another number one runtime makes true, the next one false.
_FLAGS = {
    "align_corners", "allowzero", "antialias", "ceil_mode", "count_include_pad",
    "detect_negative", "detect_positive", "exclude_outside", "exclusive", "fmod", "inverse",
    "is_causal", "keepdims", "largest", "new_axis", "noop_with_empty_axes", "onesided",
    "periodic", "reverse", "saturate", "select_last_index", "sorted",
    "storage_order", "training_mode", "transA", "transB", "upper",
}  # fmt: skip


_PADDING = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_REDUCTIONS = ("none", "add", "mul", "max", "min")
#: Attributes with a closed list of values, which runtimes do not all check.
_CHOICES: dict[tuple[str, str], tuple[Any, ...]] = {
    ("Attention", "qk_matmul_output_mode"): (0, 1, 2, 3),
    ("BitShift", "direction"): ("LEFT", "RIGHT"),
    ("DepthToSpace", "mode"): ("DCR", "CRD"),
    ("GatherND", "batch_dims"): tuple(range(8)),  # a negative one is an address to some
    ("Gelu", "approximate"): ("none", "tanh"),
    ("Pad", "mode"): ("constant", "reflect", "edge", "wrap"),
    ("ScatterElements", "reduction"): _REDUCTIONS,
    ("ScatterND", "reduction"): _REDUCTIONS,
    ("SpaceToDepth", "mode"): ("DCR", "CRD"),
    **{
        (op_type, "auto_pad"): _PADDING
        for op_type in (
            "Conv",
            "ConvTranspose",
            "ConvInteger",
            "QLinearConv",
            "AveragePool",
            "MaxPool",
            "LpPool",
            "DeformConv",
        )
    },
    **{
        (op_type, "reduction"): ("none", "mean", "sum")
        for op_type in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
    },
}


def check_attributes(node: Node) -> None:
    """Refuse attributes that runtimes read differently, or that compiled code dies of.

    Raises
    ------
    ModelError, UnsupportedError
    """
    if node.domain != "":
        return
    for name, value in node.attributes.items():
        where = f"node {node.label!r} ({node.operator}): attribute {name!r}"
        choices = (0, 1) if name in _FLAGS else _CHOICES.get((node.op_type, name))
        if (node.op_type, name) == ("Split", "num_outputs"):
            # ONNX's inference would make a type for each, a number the model chooses.
            choices = (len(node.outputs),)
        if choices is not None and value not in choices:
            raise ModelError(where, got=value, expected=" or ".join(map(repr, choices)))
        for item in value if isinstance(value, list) else [value]:
            # ONNX's compiled inference would cut it.
            wide = isinstance(item, int) and not -(2**31) <= item < 2**31
            if wide and name not in _WIDE_ATTRIBUTES:
                raise ModelError(f"{where} is out of range", got=item, expected="a 32-bit integer")


def check_given(node: Node, schema: Any) -> None:
    """Refuse a node that leaves out an input its operator needs: compiled kernels read it.

    Raises
    ------
    ModelError
    """
    for position, name in enumerate(node.inputs):
        formal = schema.inputs[min(position, len(schema.inputs) - 1)] if schema.inputs else None
        if not name and formal is not None and formal.option.name != "Optional":
            raise ModelError(
                f"node {node.label!r} ({node.operator}): input {formal.name!r} is not given",
                expected="a result, or fewer inputs",
            )


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
    if schema is None or untyped or any(n and n not in types for n in proto.input):
        return {}
    try:
        return shape_inference.infer_node_outputs(
            schema,
            proto,
            dict(types),
            {name: value for name, value in (data or {}).items() if value is not None},
            opset_imports=[helper.make_opsetid(node.domain, node.opset)],
        )
    except onnx.checker.ValidationError as error:
        text = _clean(error)
        kind = DtypeError if "type" in text else ModelError
        raise kind(f"node {node.label!r} ({node.operator}): {text}") from error
    except shape_inference.InferenceError as error:
        raise ShapeError(f"node {node.label!r} ({node.operator}): {_clean(error)}") from error
    except (RuntimeError, ValueError, TypeError, IndexError, MemoryError) as error:
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
        types[name], data[name] = type_proto(value), small_integer(value, name)
    return infer(node, types, data)


def small_integer(value: Any, name: str) -> TensorProto | None:
    """An integer of few elements as ONNX's inference takes it, else None."""
    array = to_numpy(value) if getattr(value, "ndim", 9) <= 1 else None
    if array is None or array.dtype.kind not in "iu" or array.size > 64:
        return None
    return onnx.numpy_helper.from_array(array, name)


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


def check_declared(name: str, declared: TypeProto, inferred: TypeProto) -> None:
    """An output has the element type that the graph declares.

    Raises
    ------
    ModelError
    """
    if not (declared.HasField("tensor_type") and inferred.HasField("tensor_type")):
        return
    wanted, actual = declared.tensor_type.elem_type, inferred.tensor_type.elem_type
    if wanted and actual and wanted != actual:
        raise ModelError(
            f"output {name!r} is not of the type that the graph declares",
            got=DTYPES[actual].name,
            expected=DTYPES[wanted].name if wanted in DTYPES else f"unknown type {wanted}",
        )


def check_feed(name: str, value: Any, declared: TypeProto, truth: bool) -> None:
    """An input has the declared element type, rank and fixed dimensions.

    Raises
    ------
    DtypeError, ShapeError
        It does not.
    """
    kind = declared.WhichOneof("value")
    if kind == "tensor_type":
        if not elem_type(value):
            raise DtypeError(f"input {name!r}", got=type_name(value), expected="a tensor")
        _check_tensor(name, value, declared.tensor_type, truth)
    elif kind == "sequence_type" and not isinstance(value, list):
        raise DtypeError(f"input {name!r}", got=type_name(value), expected="a list")
    elif kind == "sequence_type":
        for position, item in enumerate(value):
            check_feed(f"{name}[{position}]", item, declared.sequence_type.elem_type, truth)
    elif kind == "optional_type" and value is not None:
        check_feed(name, value, declared.optional_type.elem_type, truth)


def _check_tensor(name: str, value: Any, wanted: TypeProto.Tensor, truth: bool) -> None:
    got, expected = elem_type(value), wanted.elem_type
    if expected and got != expected:
        info = DTYPES.get(expected)
        if not (truth and info is not None and info.is_float and DTYPES[got].is_float):
            raise DtypeError(
                f"input {name!r}",
                got=type_name(value),
                expected=info.name if info else f"unknown type {expected}",
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
