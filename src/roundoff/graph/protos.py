"""What the text and the picture of a graph both read from ONNX protos."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from roundoff.dtypes import onnx_dtype_to_np_dtype
from roundoff.errors import ArgumentError, DtypeError, ModelError


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
    kinds = (onnx.ModelProto, onnx.GraphProto, onnx.FunctionProto, onnx.NodeProto)
    if not isinstance(proto, kinds):
        raise ArgumentError(
            "not an ONNX model",
            got=type(model).__name__,
            expected="a ModelProto, GraphProto, FunctionProto or NodeProto, bytes or a path",
        )
    return proto


def dtype_text(itype: int) -> str:
    """``"float32"`` for 1; ``"?"`` where ONNX says nothing."""
    try:
        dtype = onnx_dtype_to_np_dtype(itype)
    except DtypeError:
        return "?"
    return "str" if dtype == np.dtype(object) else dtype.name


def type_text(proto: onnx.TypeProto) -> str:
    """``"float32"``, ``"sequence(float32)"``, ``"optional(int64)"``, ``"map(int64,…)"``."""
    kind = proto.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        text = dtype_text(getattr(proto, kind).elem_type)
        return text if kind == "tensor_type" else f"sparse({text})"
    if kind in ("sequence_type", "optional_type"):
        return f"{kind[:-5]}({type_text(getattr(proto, kind).elem_type)})"
    if kind == "map_type":
        key = dtype_text(proto.map_type.key_type)
        return f"map({key},{type_text(proto.map_type.value_type)})"
    return "?"


def shape_of(proto: onnx.TypeProto) -> list[int | str] | None:
    """Dimensions as integers, names, or ``"?"``; ``None`` where the shape is unknown."""
    kind = proto.WhichOneof("value")
    if kind in ("sequence_type", "optional_type"):
        return shape_of(getattr(proto, kind).elem_type)
    if kind not in ("tensor_type", "sparse_tensor_type"):
        return None
    tensor = getattr(proto, kind)
    if not tensor.HasField("shape"):
        return None
    return [
        d.dim_value if d.WhichOneof("value") == "dim_value" else d.dim_param or "?"
        for d in tensor.shape.dim
    ]


def small_value(tensor: onnx.TensorProto, limit: int = 4) -> str | None:
    """The values of a tensor of at most *limit* elements, as text; ``None`` for a larger one."""
    count = int(np.prod(tensor.dims, dtype=np.int64))
    if count > limit or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return None
    try:
        array = onnx.numpy_helper.to_array(tensor)
    except Exception:  # a broken constant is still worth drawing
        return None
    if tensor.data_type == onnx.TensorProto.STRING:
        cells = [s.decode("utf-8", "replace") if isinstance(s, bytes) else s for s in array.flat]
        values = [repr(str(c)) for c in cells]
    else:
        values = [str(v) for v in array.ravel()]
    return values[0] if not tensor.dims else f"[{','.join(values)}]"


def attribute_text(attribute: onnx.AttributeProto, limit: int = 24) -> str:
    """``"axis=-1"``: name and value, cut to about *limit* characters of value."""
    kinds = onnx.AttributeProto
    if attribute.ref_attr_name:
        return f"{attribute.name}=@{attribute.ref_attr_name}"
    if attribute.type == kinds.TENSOR:
        text = small_value(attribute.t)
        if text is None:
            text = f"{dtype_text(attribute.t.data_type)}{list(attribute.t.dims)}"
    elif attribute.type == kinds.GRAPH:
        text = "{…}"
    elif attribute.type == kinds.TYPE_PROTO:
        text = type_text(attribute.tp)
    elif attribute.type == kinds.INT and attribute.name in ("to", "dtype"):
        text = dtype_text(attribute.i)
    else:
        value = onnx.helper.get_attribute_value(attribute)
        text = _plain(value)
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return f"{attribute.name}={text}"


def _plain(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float):
        return f"{value:.6g}"
    if hasattr(value, "__len__") and not isinstance(value, str):
        return f"[{','.join(_plain(v) for v in value)}]"
    return str(value)


def bodies(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """(attribute name, graph) of each subgraph of a node."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.name, attribute.g


def captured(graph: onnx.GraphProto) -> list[str]:
    """Names that a subgraph takes from the graphs around it, in order of first use."""
    known = {i.name for i in graph.input} | {i.name for i in graph.initializer}
    known |= {i.values.name for i in graph.sparse_initializer}
    outer: dict[str, None] = {}
    for node in graph.node:
        names = [n for n in node.input if n]
        names += [n for _, body in bodies(node) for n in captured(body)]
        outer.update(dict.fromkeys(n for n in names if n not in known))
        known.update(node.output)
    outer.update(dict.fromkeys(o.name for o in graph.output if o.name and o.name not in known))
    return list(outer)
