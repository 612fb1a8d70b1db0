"""From a file, bytes or proto to a checked ``ModelProto``, and from its tensors to values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    helper,
    numpy_helper,
)

from roundoff.dtypes import dtype_info, onnx_dtype_to_np_dtype
from roundoff.errors import ModelError

from .values import to_numpy, to_value

# Larger constants are left out of the copy that the checker sees.
_CHECKED_BYTES = 4096


@dataclasses.dataclass
class Loaded:
    """A model that passed ONNX's checker.

    Attributes
    ----------
    graph : GraphProto
    opsets : dict of str to int
    functions : dict of (domain, name, overload) to FunctionProto
    folder : Path or None
        Where external data may lie; None for a model that was not read from a file.
    """

    graph: GraphProto
    opsets: dict[str, int]
    functions: dict[tuple[str, str, str], FunctionProto]
    folder: Path | None


def load(model: Any) -> Loaded:
    """Read *model* and check it.

    Parameters
    ----------
    model : ModelProto, GraphProto, FunctionProto, bytes, str or Path
        A bare graph is taken to use the newest opset that ``onnx`` knows.

    Raises
    ------
    ModelError
        When the model can't be read, or ONNX's checker refuses it.
    """
    model, folder = read(model)
    if isinstance(model, FunctionProto):
        return _from_function(model)
    if isinstance(model, GraphProto):
        newest = helper.make_opsetid("", onnx.defs.onnx_opset_version())
        model = helper.make_model(model, opset_imports=[newest])
    if not isinstance(model, ModelProto):
        raise ModelError(
            "not a model",
            got=type(model).__name__,
            expected="ModelProto, GraphProto, FunctionProto, bytes or a path",
        )
    _check_order(model.graph)
    _check(model)
    return Loaded(
        model.graph,
        {domain_of(o.domain): o.version for o in model.opset_import},
        {(domain_of(f.domain), f.name, f.overload): f for f in model.functions},
        folder,
    )


def read(model: Any) -> tuple[Any, Path | None]:
    """The proto of a model given as path, bytes or proto, and the folder of a path.

    Data in other files is not read.

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
            model = ModelProto.FromString(bytes(model))
        except DecodeError as error:
            raise ModelError("not an ONNX model: the bytes do not decode") from error
    return model, folder


def domain_of(domain: str) -> str:
    """The domain, ``""`` for ONNX's own under its longer name."""
    return "" if domain == "ai.onnx" else domain


def _from_function(function: FunctionProto) -> Loaded:
    """A function as a graph whose inputs have no declared type."""
    graph = GraphProto(name=function.name)
    defaults = {a.name: a for a in function.attribute_proto}
    graph.node.extend(renamed(node, {}, "", defaults) for node in function.node)
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in function.input)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in function.output)
    if function.attribute:
        raise ModelError(
            f"function {function.name!r} has attributes without values",
            got=", ".join(function.attribute),
            hint="call it from a model, where the node gives them",
        )
    try:
        context = onnx.checker.C.CheckerContext()
        context.ir_version = onnx.IR_VERSION
        context.opset_imports = {o.domain: o.version for o in function.opset_import}
        onnx.checker.check_function(function, context)
    except onnx.checker.ValidationError as error:
        raise ModelError("ONNX's checker refuses the function", got=_first_line(error)) from error
    _check_order(graph)
    opsets = {domain_of(o.domain): o.version for o in function.opset_import}
    return Loaded(graph, opsets, {}, None)


def _check(model: ModelProto) -> None:
    """Run ONNX's checker on a copy without the large constants (it serialises the model)."""
    try:
        onnx.checker.check_model(_checked(model))
    except onnx.checker.ValidationError as error:
        raise ModelError("ONNX's checker refuses the model", got=_first_line(error)) from error
    except (ValueError, RuntimeError, TypeError, UnicodeError) as error:
        raise ModelError("ONNX's checker cannot read the model", got=_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300] if lines else type(error).__name__


def _checked(model: ModelProto) -> ModelProto:
    """What the checker gets."""
    graph = GraphProto(
        name=model.graph.name, node=model.graph.node, input=model.graph.input,
        output=model.graph.output, sparse_initializer=model.graph.sparse_initializer,
        initializer=map(_light, model.graph.initializer),
    )  # fmt: skip
    copy = ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions,
        graph=graph,
    )  # fmt: skip
    _lighten(copy)
    for info in (*copy.graph.input, *copy.graph.output):
        # The checker asks for a shape; ONNX Runtime and the specification take an unknown rank.
        if info.type.HasField("tensor_type") and info.type.tensor_type.elem_type:
            info.type.tensor_type.shape.SetInParent()
    return copy


def _light(tensor: TensorProto) -> TensorProto:
    """The tensor; an empty one for a large one, or for data that the checker would look for."""
    external = tensor.data_location == TensorProto.EXTERNAL
    if not external and tensor.ByteSize() <= _CHECKED_BYTES:
        return tensor
    return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0], raw_data=b"")


def _lighten(message: Message) -> None:
    """Make large and external tensors inside a message empty."""
    if isinstance(message, TensorProto):
        message.CopyFrom(_light(message))
        return
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for item in value if field.is_repeated else [value]:
                _lighten(item)


def _check_order(graph: GraphProto) -> None:
    """Every result is computed before it is read; if not, a cycle or the order is to blame."""
    makers = {name: k for k, node in enumerate(graph.node) for name in node.output if name}
    needs = {k: [n for n in _reads(node) if n in makers] for k, node in enumerate(graph.node)}
    try:
        list(TopologicalSorter({k: map(makers.get, n) for k, n in needs.items()}).static_order())
    except CycleError as error:
        index = min(error.args[1])
        raise ModelError(
            f"the graph has a cycle: node {_label(graph, index)} needs its own output",
            got=f"{list(graph.node[index].output)} depends on itself",
            hint="break the cycle; ONNX graphs are acyclic (Loop and Scan iterate)",
        ) from error
    for index, names in needs.items():
        for name in names:
            if makers[name] > index:
                raise ModelError(
                    f"node {_label(graph, index)} reads {name!r} before it is made",
                    expected="nodes in topological order",
                    hint="onnx_ir's TopologicalSortPass sorts a model",
                )


def _label(graph: GraphProto, index: int) -> str:
    node = graph.node[index]
    return f"{node.name or f'{node.op_type}_{index}'!r} ({node.op_type})"


def _reads(node: Any) -> list[str]:
    names = list(node.input)
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            inside = {i.name for i in body.input} | {t.name for t in body.initializer}
            for inner in body.node:
                names += [name for name in _reads(inner) if name not in inside]
                inside |= set(inner.output)
    return names


def renamed(
    node: NodeProto,
    names: Mapping[str, str],
    prefix: str,
    attributes: Mapping[str, AttributeProto],
) -> NodeProto:
    """A node of a function's body where it is called: its names and attributes, subgraphs too."""

    def rename(name: str) -> str:
        return names.get(name, prefix + name)

    copy = NodeProto()
    copy.CopyFrom(node)
    copy.input[:], copy.output[:] = map(rename, node.input), map(rename, node.output)
    del copy.attribute[:]
    for given in node.attribute:
        attribute = given
        if given.ref_attr_name:
            if given.ref_attr_name not in attributes:
                continue
            attribute = AttributeProto()
            attribute.CopyFrom(attributes[given.ref_attr_name])
            attribute.name = given.name
        copy.attribute.append(attribute)
        body = copy.attribute[-1].g
        if given.type == AttributeProto.GRAPH and not given.ref_attr_name:
            for item in (*body.input, *body.output, *body.initializer):
                item.name = rename(item.name)
            for sparse in body.sparse_initializer:
                sparse.values.name = rename(sparse.values.name)
            nodes = [renamed(n, names, prefix, attributes) for n in body.node]
            del body.node[:]
            body.node.extend(nodes)
    return copy


def tensor_value(tensor: TensorProto, folder: Path | None, where: str) -> Any:
    """The value of a constant; external data is read only from inside *folder*.

    Raises
    ------
    ModelError
        When the data is missing, malformed, or outside the model's folder.
    """
    try:
        if tensor.data_location == TensorProto.EXTERNAL:
            array = _read_external(tensor, folder, where)
        else:
            array = numpy_helper.to_array(tensor)
        if list(array.shape) != list(tensor.dims):
            raise ModelError(f"constant {where!r} has data of the wrong size")
        return to_value(array)
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError, UnicodeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"constant {where!r} is malformed", got=_first_line(error)) from error


def _read_external(tensor: TensorProto, folder: Path | None, where: str) -> Any:
    info = {entry.key: entry.value for entry in tensor.external_data}
    location = info.get("location", "")
    if folder is None:
        raise ModelError(
            f"constant {where!r} lies in a file beside the model",
            got=location,
            hint="give the path of the model instead of its content",
        )
    path = (folder / location).resolve()
    if not location or Path(location).is_absolute() or not path.is_relative_to(folder):
        raise ModelError(
            f"constant {where!r} points outside the model's folder",
            got=location,
            expected="a relative path inside the folder",
            hint="move the data beside the model",
        )
    if not path.is_file():
        raise ModelError(
            f"the data of constant {where!r} is missing", got=location,
            hint="put that file beside the model",
        )  # fmt: skip
    offset, length = int(info.get("offset", 0)), int(info.get("length", -1))
    size = path.stat().st_size
    length = size - offset if length < 0 else length
    if offset < 0 or length < 0 or offset + length > size:
        raise ModelError(
            f"the data of constant {where!r} is cut short",
            got=f"{size} bytes in {location}",
            expected=f"{length} from {offset}",
        )
    with path.open("rb") as stream:
        stream.seek(offset)
        raw = stream.read(length)
    if dtype_info(tensor.data_type).bits >= 8:  # a protobuf holds at most 2 GB
        dtype = onnx_dtype_to_np_dtype(tensor.data_type)
        return np.frombuffer(bytearray(raw), dtype=dtype).reshape(tuple(tensor.dims))
    packed = TensorProto(dims=tensor.dims, data_type=tensor.data_type, raw_data=raw)
    return numpy_helper.to_array(packed)


def sparse_value(sparse: SparseTensorProto, folder: Path | None, where: str) -> Any:
    """A sparse constant, made dense."""
    values = to_numpy(tensor_value(sparse.values, folder, where))
    indices = to_numpy(tensor_value(sparse.indices, folder, where))
    dims = tuple(sparse.dims)
    dense = np.zeros(int(np.prod(dims)), dtype=values.dtype)
    try:
        if indices.ndim == 2:
            indices = np.ravel_multi_index(tuple(indices.T), dims)
        dense[indices] = values
    except (IndexError, ValueError) as error:
        raise ModelError(f"constant {where!r} is malformed", got=_first_line(error)) from error
    return to_value(dense.reshape(dims))


def attribute_value(attribute: AttributeProto, folder: Path | None, where: str) -> Any:
    """An attribute as a Python object: bytes become str, tensors values, graphs stay protos."""
    kind = attribute.type
    if kind == AttributeProto.TENSOR:
        return tensor_value(attribute.t, folder, where)
    if kind == AttributeProto.SPARSE_TENSOR:
        return sparse_value(attribute.sparse_tensor, folder, where)
    if kind in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        return attribute.g if kind == AttributeProto.GRAPH else list(attribute.graphs)
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if kind == AttributeProto.STRINGS:
        return [v.decode("utf-8", "replace") for v in value]
    return list(value) if kind in (AttributeProto.INTS, AttributeProto.FLOATS) else value
