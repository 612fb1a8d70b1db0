"""Whether a comparison fits in memory, from what the model declares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import onnx

from roundoff.dtypes import DTYPES
from roundoff.errors import ModelSizeError
from roundoff.timing import free_memory

from .feeds import dims as declared_dims

__all__ = ["check_memory", "has_external"]


def check_memory(
    proto: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]], cuda: bool,
    memory_gib: float | None,
) -> None:  # fmt: skip
    """Refuse what would not fit, from the sizes that the model declares.

    The weights are in memory as the model stores them, once for each of two evaluators and for
    the session, and in float64. On a CPU ONNX Runtime adds two copies in float32 of those in 16
    bits. Each run has intermediate results of its own.
    """
    stored, wide, half = _weights(proto)
    intermediate = _intermediates(proto, shapes)
    needed = {"cpu": 4 * stored + wide + 5 * half + intermediate}
    if cuda:
        needed = {"cpu": 3 * stored, "cuda": 3 * stored + wide + intermediate}
    for device, size in needed.items():
        limit = free_memory(device) if memory_gib is None else memory_gib * 2**30
        if size > limit:
            memory = "CUDA" if device == "cuda" else "host"
            raise ModelSizeError(
                f"the comparison of this model would not fit in {memory} memory",
                got=f"about {size / 2**30:.3g} GiB", expected=f"at most {limit / 2**30:.3g} GiB",
                hint="a machine with more memory, smaller feeds, or a part of the model: "
                "onnx.utils.extract_model",
            )  # fmt: skip


def _tensors(part: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.TensorProto]:
    """Every constant of a graph or function, those of its nodes and subgraphs too."""
    if isinstance(part, onnx.GraphProto):
        yield from part.initializer
        for sparse in part.sparse_initializer:
            yield onnx.TensorProto(dims=sparse.dims, data_type=sparse.values.data_type)
    for node in part.node:
        yield from _node_tensors(node)


def _node_tensors(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        for graph in (attribute.g, *attribute.graphs):
            yield from _tensors(graph)


def _weights(proto: onnx.ModelProto) -> tuple[float, float, float]:
    """Bytes of all constants as stored, of all with floats in float64, of the 16-bit ones."""
    stored = wide = half = 0.0
    for part in (proto.graph, *proto.functions):
        for tensor in _tensors(part):
            size, info = math.prod(tensor.dims), DTYPES.get(tensor.data_type)
            stored += size * _width(tensor.data_type, False)
            wide += size * _width(tensor.data_type, True)
            if info is not None and info.is_float and info.bits == 16:
                half += 2 * size
    return stored, wide, half


def _width(code: int, truth: bool) -> float:
    info = DTYPES.get(code)
    if info is None:
        return 8.0
    return 8.0 if truth and info.is_float else info.bits / 8


def has_external(proto: onnx.ModelProto) -> bool:
    """Whether constants of the model lie in other files."""
    return any(
        t.data_location == onnx.TensorProto.EXTERNAL
        for part in (proto.graph, *proto.functions)
        for t in _tensors(part)
    )


def _intermediates(proto: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Peak bytes of intermediate results over the three runs, where shapes can be inferred."""
    light = onnx.ModelProto(ir_version=max(proto.ir_version, 4), opset_import=proto.opset_import)
    light.graph.name = "sizes"
    light.graph.node.extend(proto.graph.node)
    for info in (*proto.graph.input, *proto.graph.output):
        if info.name in shapes and info.type.HasField("tensor_type"):
            element = info.type.tensor_type.elem_type
            light.graph.input.append(
                onnx.helper.make_tensor_value_info(info.name, element, shapes[info.name])
            )
    for tensor in proto.graph.initializer:
        small = tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.ByteSize() <= 4096
        if small:
            light.graph.initializer.append(tensor)
        elif tensor.name not in shapes:
            light.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    try:
        graph = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    except Exception:  # an estimate: without shapes only the weights are counted
        return 0.0
    sizes: dict[str, float] = {}
    for info in (*graph.value_info, *graph.input):
        dims = declared_dims(info.type)
        if dims is not None and all(isinstance(d, int) for d in dims):
            code = info.type.tensor_type.elem_type
            each = 2 * _width(code, False) + 2 * _width(code, True)
            sizes[info.name] = math.prod(d for d in dims if isinstance(d, int)) * each
    last = {name: k for k, node in enumerate(graph.node) for name in node.input}
    alive = sum(sizes.get(name, 0.0) for name in shapes)
    most = alive
    for k, node in enumerate(graph.node):
        alive += sum(sizes.get(name, 0.0) for name in node.output)
        most = max(most, alive)
        ends = {n for n in node.input if last[n] == k and n not in shapes}
        alive -= sum(sizes.get(n, 0.0) for n in ends if n in sizes)
    return most
