"""What the text and the picture of a graph both read from ONNX protos."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from roundoff.dtypes import DTYPES
from roundoff.errors import ArgumentError, ModelError


def read(model: Any) -> tuple[Any, Path | None]:
    """The proto of a model given as path, bytes or proto, and the folder of a path.

    Weights kept in files beside the model are not read.

    Raises
    ------
    ModelError
        When the model can't be read.
    """
    folder = None
    if isinstance(model, (str, Path)):
        path = Path(model)
        try:
            content = path.read_bytes()
        except (OSError, ValueError) as error:  # the latter of a NUL in the path
            raise ModelError(
                f"cannot read the model {path.name}", got=getattr(error, "strerror", str(error))
            ) from error
        folder, model = path.resolve().parent, content
    if isinstance(model, (bytes, bytearray, memoryview)):
        try:
            model = onnx.ModelProto.FromString(bytes(model))
        except DecodeError as error:
            raise ModelError("not an ONNX model: the bytes do not decode") from error
    return model, folder


def load(model: Any) -> Any:
    """The proto behind *model*: a proto of ONNX, its bytes, or a path to a file.

    Raises
    ------
    ArgumentError
        When *model* is none of these.
    ModelError
        When the bytes or the file are not an ONNX model.
    """
    proto, _ = read(model)
    if isinstance(proto, onnx.ModelProto) and not proto.HasField("graph"):
        # Bytes of another kind often decode to a model that has nothing in it.
        raise ModelError("there is no graph in this model", expected="a ModelProto with a graph")
    if not isinstance(proto, (onnx.ModelProto, onnx.GraphProto, onnx.FunctionProto)):
        raise ArgumentError(
            "not an ONNX model",
            got=type(model).__name__,
            expected="a ModelProto, GraphProto or FunctionProto, bytes or a path",
        )
    return proto


def dtype_text(itype: int) -> str:
    """``"float32"`` for 1; ``"?"`` where ONNX says nothing."""
    return DTYPES[itype].name if itype in DTYPES else "?"


def type_text(proto: onnx.TypeProto) -> str:
    """``"float32"`` of a tensor; ``"sequence"``, ``"optional"``, ``"map"`` of the others."""
    kind = proto.WhichOneof("value")
    if kind == "tensor_type":
        return dtype_text(proto.tensor_type.elem_type)
    return (kind or "?").removesuffix("_type")


def shape_of(proto: onnx.TypeProto) -> list[int | str] | None:
    """Dimensions as integers, names, or ``"?"``; ``None`` where the shape is unknown."""
    if not proto.tensor_type.HasField("shape"):
        return None
    return [
        d.dim_value if d.HasField("dim_value") else d.dim_param or "?"
        for d in proto.tensor_type.shape.dim
    ]


def small_value(tensor: onnx.TensorProto) -> str | None:
    """The values of a tensor of at most four elements, as text; ``None`` for a larger one."""
    if math.prod(tensor.dims) > 4 or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return None
    values = onnx.numpy_helper.to_array(tensor).ravel()
    text = ",".join(map(str, values))
    return f"[{text}]" if tensor.dims else text


def attribute_text(attribute: onnx.AttributeProto, limit: int = 24) -> str:
    """``"axis=-1"``: name and value, cut to about *limit* characters of value."""
    kinds = onnx.AttributeProto
    if attribute.ref_attr_name:
        text = f"@{attribute.ref_attr_name}"
    elif attribute.type == kinds.TENSOR:
        shape = f"{dtype_text(attribute.t.data_type)}{list(attribute.t.dims)}"
        text = small_value(attribute.t) or shape
    elif attribute.type == kinds.GRAPH:
        text = "{…}"
    elif attribute.type == kinds.INT and attribute.name in ("to", "dtype"):
        text = dtype_text(attribute.i)
    else:
        text = _plain(onnx.helper.get_attribute_value(attribute))
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return f"{attribute.name}={text}"


def _plain(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(_plain, value))}]"
    return " ".join(str(value).split())


def bodies(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """(attribute name, graph) of each subgraph of a node."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.name, attribute.g


def reads(node: onnx.NodeProto) -> list[str]:
    """Names that a node reads: its inputs, then what its bodies take from outside."""
    names = [n for n in node.input if n]
    return names + [n for _, body in bodies(node) for n in captured(body)]


def captured(graph: onnx.GraphProto) -> list[str]:
    """Names that a graph takes from outside, or before they are made, in order of first use."""
    known = {i.name for i in graph.input} | {i.name for i in graph.initializer}
    known |= {i.values.name for i in graph.sparse_initializer}
    outer: dict[str, None] = {}
    for node in graph.node:
        outer.update(dict.fromkeys(n for n in reads(node) if n not in known))
        known.update(node.output)
    outer.update(dict.fromkeys(o.name for o in graph.output if o.name and o.name not in known))
    return list(outer)
