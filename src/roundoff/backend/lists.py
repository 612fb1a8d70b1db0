"""Split and Concat of many unequal parts, written so that ONNX Runtime passes its kernels no list.

ONNX Runtime's CUDA kernels take the sizes and addresses of parts as arguments where the parts are
few or equal. Else they read a list from memory of the processor. ONNX Runtime uses that memory
again after the run, which a replayed CUDA graph does not know, and frees it in a callback of the
stream, where CUDA forbids it and the process ends.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import helper, numpy_helper

__all__ = ["SPLITS_SLICES", "passes_a_list", "sizes_of", "without_lists"]

#: ONNX Runtime's optimizer that would make one Split of these Slices again.
SPLITS_SLICES = "GatherSliceToSplitFusion"

#: Parts that a kernel takes as arguments, whatever their sizes.
_FEW = 3


def _parts(node: onnx.NodeProto) -> list[str]:
    names = {"Split": node.output, "Concat": node.input}.get(node.op_type, [])
    return list(names) if node.domain in ("", "ai.onnx") else []


def _values(graph: onnx.GraphProto) -> dict[str, onnx.ValueInfoProto]:
    stored = [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in graph.initializer]
    return {v.name: v for v in [*graph.input, *graph.output, *graph.value_info, *stored]}


def sizes_of(value: onnx.ValueInfoProto | None) -> list[Any]:
    """Sizes, names of sizes, and None for a size, or for a shape, that nothing is known of."""
    if value is None or not value.type.tensor_type.HasField("shape"):
        return [None]
    dims = value.type.tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims]


def _listed(model: onnx.ModelProto) -> list[int]:
    """The places of the nodes whose kernels are passed a list."""
    values = _values(model.graph)
    found = []
    for place, node in enumerate(model.graph.node):
        sizes = [sizes_of(values.get(name)) for name in _parts(node)]
        if len(sizes) > _FEW and any(None in s or s != sizes[0] for s in sizes):
            found.append(place)
    return found


def passes_a_list(model: onnx.ModelProto) -> str:
    """The first node whose CUDA kernel is passed a list, by its name or output; else empty."""
    nodes = [model.graph.node[place] for place in _listed(model)[:1]]
    return "".join(str(node.name or node.output[0]) for node in nodes)


def without_lists(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with such nodes written in others, which copy the same values.

    A Split becomes a Slice for each part. A Concat becomes a tree of Concats of three parts. What
    has sizes that are no constants stays.

    Returns
    -------
    onnx.ModelProto
        A copy, or *model* where it has no such node.
    """
    listed = set(_listed(model))
    if not listed:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    constants = {t.name: t for t in copy.graph.initializer}
    values = _values(copy.graph)
    nodes: list[onnx.NodeProto] = []
    for number, node in enumerate(list(copy.graph.node)):
        name = f"roundoff.parts.{number}"
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        if number not in listed:
            nodes.append(node)
        elif node.op_type == "Concat":
            made, between = _tree(node, axis, name, values)
            nodes += made
            copy.graph.value_info.extend(between)
        elif len(node.input) > 1 and node.input[1] in constants:
            sizes = numpy_helper.to_array(constants[node.input[1]])
            made, ends = _slices(node, axis, sizes.cumsum().tolist(), name)
            nodes += made
            copy.graph.initializer.extend(ends)
        else:
            nodes.append(node)
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy


def _tree(
    node: onnx.NodeProto, axis: int, name: str, values: dict[str, onnx.ValueInfoProto]
) -> tuple[list[onnx.NodeProto], list[onnx.ValueInfoProto]]:
    shapes = {part: sizes_of(values.get(part)) for part in node.input}
    if any(None in shape or not isinstance(shape[axis], int) for shape in shapes.values()):
        return [node], []
    kind = values[node.input[0]].type.tensor_type.elem_type
    nodes: list[onnx.NodeProto] = []
    between: list[onnx.ValueInfoProto] = []
    parts = list(node.input)
    while len(parts) > _FEW:
        groups = [parts[i : i + _FEW] for i in range(0, len(parts), _FEW)]
        parts = []
        for group in groups:
            if len(group) == 1:
                parts += group
                continue
            whole = f"{name}.{len(nodes)}"
            shapes[whole] = list(shapes[group[0]])
            shapes[whole][axis] = sum(shapes[part][axis] for part in group)
            between.append(helper.make_tensor_value_info(whole, kind, shapes[whole]))
            nodes.append(helper.make_node("Concat", group, [whole], whole, axis=axis))
            parts.append(whole)
    nodes.append(helper.make_node("Concat", parts, node.output, node.name, axis=axis))
    return nodes, between


def _slices(
    node: onnx.NodeProto, axis: int, ends: list[int], name: str
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    places = [helper.make_tensor(f"{name}.axis", onnx.TensorProto.INT64, [1], [axis])]
    for end in [0, *ends]:
        places.append(helper.make_tensor(f"{name}.{end}", onnx.TensorProto.INT64, [1], [end]))
    unique = {place.name: place for place in places}  # parts may be empty
    nodes = [
        helper.make_node(
            "Slice",
            [node.input[0], f"{name}.{start}", f"{name}.{end}", f"{name}.axis"],
            [part],
            f"{node.name}.{number}",
        )
        for number, (part, start, end) in enumerate(
            zip(node.output, [0, *ends], ends, strict=False)
        )
    ]
    return nodes, list(unique.values())
