"""Tier "default": ONNX operators only, fewer of them than conversion leaves.

Every rule here keeps the bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from .editor import Dim, Editor, Refusal, both_orders, reshape_target, static
from .rule import Rule

#: Operators that give the same elements, in the same order, another shape.
RELABEL = ("Reshape", "Unsqueeze", "Squeeze", "Flatten")


class FoldConstants(Rule):
    """Pattern: a node whose inputs are all constant. Becomes the constant.

    Conditions: the value has at most 2**22 elements (a constant is stored in the model), or 4096
    where the operator makes many of few (Expand, Tile, ConstantOfShape).
    """

    ops = ("Add", "Sub", "Mul", "Div", "Neg", "Sqrt", "Cast", "Concat", "Gather", "GatherND",
           "Slice", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Where", "And", "Or", "Not",
           "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Range", "Shape", "Expand",
           "Tile", "Trilu", "ConstantOfShape", "CumSum", "Max", "Min", "Identity", "Sum",
           "ReduceProd")  # fmt: skip

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        if node.op_type == "Identity" and node.outputs[0].is_graph_output():
            return False  # a constant that the graph returns stays behind one
        size = g.size(node.outputs[0])
        if size is None or len(node.outputs) != 1 or not _all_constant(g, node):
            return False
        grows = node.op_type in ("Expand", "Tile", "ConstantOfShape")
        if size > (4096 if grows else 1 << 22):
            raise Refusal(f"{size} elements are too many to store")
        value = g.constant(node.outputs[0])
        ordered = node.op_type in ("ReduceProd", "CumSum", "Range", "Sum")
        if value is None or (ordered and value.dtype.kind != "i"):
            return False  # of floats their bits depend on the order in which they are computed
        g.replace(node.outputs[0], g.initializer(value, f"{node.outputs[0].name}_folded"))
        return True


def _all_constant(g: Editor, node: ir.Node) -> bool:
    """Cheap: no value is computed unless every input is one already."""
    return all(
        i is None or i.name in g.graph.initializers or g.node(i, "Constant") is not None
        for i in node.inputs
    )


class DropNoOps(Rule):
    """Pattern: a node whose output has its input's elements, bit for bit. Becomes the input.

    Identity; Reshape and Expand to the same shape; Cast to the same type; Mul or Div by one; Add of
    an integer zero. Where the input gets axes of one, a Reshape is left.
    """

    ops = ("Identity", "Reshape", "Expand", "Cast", "Mul", "Div", "Add")

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        (out,), kept = node.outputs, node.inputs[0]
        if node.op_type == "Identity":
            if kept is None or kept.dtype != out.dtype:
                return False  # an output keeps its type
            if out.is_graph_output() and _is_copied(kept):
                return False
            g.replace(out, kept)
            return True
        if node.op_type in ("Mul", "Div", "Add"):
            orders = both_orders(node)[: 1 if node.op_type == "Div" else 2]
            neutral = 0 if node.op_type == "Add" else 1
            kept = next((x for x, other in orders if g.scalar(other) == neutral), None)
            if neutral == 0 and (out.dtype is None or not out.dtype.is_integer()):
                return False  # -0 + 0 is another number than -0
        before, shape = g.shape(kept), g.shape(out)
        if kept is None or kept.dtype != out.dtype or before is None or shape is None:
            return False
        if before != shape:
            if node.op_type == "Reshape" or _long(before) != _long(shape):
                return False
            kept = g.reshape(kept, shape, node)
        g.replace(out, kept)
        return True


def _is_copied(value: ir.Value) -> bool:
    """Whether an output that is this value too needs its copy: an input, or another output."""
    return value.producer() is None or value.is_graph_output()


def _long(shape: Sequence[Dim]) -> list[Dim]:
    """The sizes that are not one."""
    return [d for d in shape if d != 1]


class MergeReshapes(Rule):
    """Pattern: Reshape (Unsqueeze, Squeeze, Flatten) of another. Becomes one Reshape.

    Conditions: at most one size of the last shape is symbolic and new.
    """

    ops = RELABEL

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        first = g.node(node.inputs[0], *RELABEL)
        shape = g.shape(node.outputs[0])
        if first is None or shape is None or first.inputs[0] is None:
            return False
        if reshape_target(g.shape(first.inputs[0]) or (), shape) is None:
            return False
        g.replace(node.outputs[0], g.reshape(first.inputs[0], shape, node))
        return True


class MergeTransposes(Rule):
    """Pattern: Transpose of a Transpose, or one that only moves axes of one element.

    Becomes one Transpose, or a Reshape.
    """

    ops = ("Transpose",)

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        perm, x = g.attribute(node, "perm"), node.inputs[0]
        shape = g.shape(x)
        if perm is None or x is None or shape is None:
            return False
        long = [p for p in perm if shape[p] != 1]
        if long == sorted(long):
            g.replace(node.outputs[0], g.reshape(x, [shape[p] for p in perm], node))
            return True
        first = g.node(x, "Transpose")
        before = g.attribute(first, "perm") if first is not None else None
        if first is None or before is None or first.inputs[0] is None:
            return False
        both = [before[p] for p in perm]
        g.replace(node.outputs[0], g.transpose(first.inputs[0], both, node))
        return True


class SlicesToSplit(Rule):
    """Pattern: Slices that cut one axis of a value into its consecutive parts. Becomes a Split.

    Conditions: constant bounds, step one, the parts cover the axis once.
    """

    ops = ("Slice",)

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        x, first = node.inputs[0], self._bounds(g, node)
        if x is None or first is None or g.opset < 13:  # its Split has an attribute
            return False
        axis, parts = first[0], {}
        for use in x.uses():
            bounds = self._bounds(g, use.node) if use.idx == 0 else None
            if bounds is not None and bounds[0] == axis:
                parts[bounds[1]] = (bounds[2], use.node)
        sizes, nodes, at = [], [], 0
        while at in parts:
            end, piece = parts[at]
            sizes.append(end - at)
            nodes.append(piece)
            at = end
        if at != (g.shape(x) or ())[axis] or len(nodes) < 2:
            return False
        earliest = next(n for n in g.graph if n in nodes)
        lengths = g.initializer(np.array(sizes, dtype=np.int64), "lengths")
        pieces = [n.outputs[0] for n in nodes]
        g.replace_by(pieces, "Split", [x, lengths], earliest, axis=axis)
        return True

    @staticmethod
    def _bounds(g: Editor, node: ir.Node) -> tuple[int, int, int] | None:
        """(axis, start, end) of a Slice along one axis with step one."""
        shape = g.shape(node.inputs[0])
        if node.op_type != "Slice" or shape is None:
            return None
        numbers = [g.ints(i) for i in node.inputs[1:]]
        if numbers[3:] not in ([], [[1]]):
            return None
        if len(numbers) < 3 or any(n is None or len(n) != 1 for n in numbers):
            return None
        (start,), (end,), (axis,) = numbers[:3]  # type: ignore[misc]
        size = shape[axis]
        if not static(size):
            return None
        start, end, _ = slice(start, end).indices(size)
        return (axis % len(shape), start, end) if end > start else None


#: The rules of the tier, in the order in which they are tried.
DEFAULT: tuple[Rule, ...] = (
    FoldConstants(),
    DropNoOps(),
    MergeReshapes(),
    MergeTransposes(),
    SlicesToSplit(),
)
