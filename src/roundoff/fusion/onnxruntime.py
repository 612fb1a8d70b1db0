"""Tier "onnxruntime": operators that ONNX Runtime adds to ONNX (domain ``com.microsoft``).

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md defines them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from .attention import (
    Attention,
    RotaryAttention,
    check_type,
    is_plain,
    same_shape,
    swaps_last,
)
from .editor import MICROSOFT, Editor, Refusal, both_orders, size_product, static
from .rule import Rule

#: Attributes of FusedMatMul of a transposed second operand.
TRANSPOSED: dict[str, Any] = {"transA": 0, "transB": 1, "alpha": 1.0}


def uncast(g: Editor, value: ir.Value | None, to: ir.DataType | None = None) -> ir.Value | None:
    """What *value* was before a Cast (to *to*, where given), or *value* itself."""
    node = g.node(value, "Cast")
    if node is None or (to is not None and value is not None and value.dtype != to):
        return value
    return node.inputs[0]


class RmsNorm(Rule):
    """Pattern: ``x * (1 / sqrt(mean(x^2) + eps)) * w`` over the last axis, computed in float32.

    Becomes SimplifiedLayerNormalization. A cast of a 16-bit x up to float32 and back before the
    product with w goes with it: the operator computes in float32 inside.
    Conditions: w has the last axis' length, and the type of x.

    Source: B. Zhang, R. Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    ops = ("Mul",)
    tier = "onnxruntime"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        for normed, weight in both_orders(node):
            inner = uncast(g, normed)
            parts = self._normed(g, inner)
            if parts is None or weight is None:
                continue
            wide, epsilon = parts
            x = uncast(g, wide, ir.DataType.FLOAT) if normed is not inner else wide
            shape, (out,) = g.shape(x), node.outputs
            if x is None or shape is None or g.shape(weight) != shape[-1:]:
                raise Refusal(f"the weight's shape is {g.shape(weight)}, not the last axis alone")
            if not x.dtype == weight.dtype == out.dtype:
                raise Refusal(f"types differ: x {x.dtype}, weight {weight.dtype}, out {out.dtype}")
            g.replace_by(
                [out],
                "SimplifiedLayerNormalization",
                [x, weight],
                node,
                axis=-1,
                epsilon=epsilon,
                stash_type=1,
            )
            return True
        return False

    @staticmethod
    def _normed(g: Editor, value: ir.Value | None) -> tuple[ir.Value, float] | None:
        """(x, eps) where *value* is ``x * (1 / sqrt(mean(x^2) + eps))``, in float32."""
        node = g.node(value, "Mul")
        if node is None or node.outputs[0].dtype != ir.DataType.FLOAT:
            return None
        x, inverse = node.inputs
        nodes = g.path(inverse, "Reciprocal", "Sqrt", "Add", "ReduceMean")
        if not nodes or x is None:
            return None
        *_, shifted, mean = nodes
        square = g.node(mean.inputs[0], "Mul", "Pow")
        if square is None or square.inputs[0] is not x:
            return None
        if square.inputs[1] is not x and (
            square.op_type == "Mul" or g.scalar(square.inputs[1]) != 2
        ):
            return None
        epsilon, axes = g.scalar(shifted.inputs[1]), mean.inputs[1:]
        last = len(x.shape) - 1 if x.shape is not None else -1
        if epsilon is None or not axes or g.ints(axes[0]) not in ([-1], [last]):
            return None
        return (x, epsilon) if g.attribute(mean, "keepdims", 1) else None


class SkipRmsNorm(Rule):
    """Pattern: SimplifiedLayerNormalization of ``a + b``. Becomes SkipSimplifiedLayerNormalization.

    The sum stays available as the operator's fourth output.
    Conditions: a and b have the sum's shape, of two or three axes.
    """

    ops = ("SimplifiedLayerNormalization",)
    tier = "onnxruntime"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        total = g.node(node.inputs[0], "Add")
        if total is None:
            return False
        a, b = total.inputs
        shape = g.shape(total.outputs[0])
        if shape is None or not g.shape(a) == g.shape(b) == shape or len(shape) not in (2, 3):
            raise Refusal(f"the sum broadcasts: {g.shape(a)} + {g.shape(b)}")
        if g.axis(node) != len(shape) - 1:
            raise Refusal("the norm is not of the last axis alone")
        check_type(g, total.outputs[0].dtype)
        g.replace_by(
            [node.outputs[0], None, None, total.outputs[0]],
            "SkipSimplifiedLayerNormalization",
            [a, b, node.inputs[1]],
            node,
            MICROSOFT,
            epsilon=g.attribute(node, "epsilon", 1e-5),
        )
        return True


class Rotary(Rule):
    """Pattern: ``x cos + rotate_half(x) sin``. Becomes RotaryEmbedding.

    cos and sin are of ``Concat(f, f)``, perhaps cast and given axes of one: the operator takes the
    half table. Conditions: x is (batch, heads, sequence, head), all of it rotated.

    Source: J. Su et al., RoFormer, 2021, equation 34.
    """

    ops = ("Add",)
    tier = "onnxruntime"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        parts = self._parts(g, node)
        if parts is None:
            return False
        x, cos, sin = parts
        shape = g.shape(x)
        if shape is None or len(shape) != 4 or not static(shape[1], shape[3]) or shape[3] % 2:
            raise Refusal(f"x is {shape}, not (batch, heads, sequence, an even head size)")
        check_type(g, x.dtype)
        batch, heads, length, head = shape
        tables = [self._table(g, t, op, node) for t, op in ((cos, "Cos"), (sin, "Sin"))]
        if any(t is None or t.dtype != x.dtype for t in tables):
            raise Refusal("cos and sin are not of two equal halves, in the type of x")
        dims = g.shape(tables[0]) or ()
        dims = (1,) * (4 - len(dims)) + dims
        same = g.shape(tables[0]) == g.shape(tables[1])
        if not same or dims[0] not in (1, batch) or dims[1:3] != (1, length):
            raise Refusal(f"cos is {dims}, for {batch} x {length} tokens")
        each = dims[0] != 1
        flat_x = g.reshape(g.transpose(x, [0, 2, 1, 3], node), [batch, length, heads * head], node)
        rows = size_product(batch, length) if each else length
        flat = [g.reshape(t, [rows, head // 2], node) for t in tables if t is not None]
        ids = (
            self._ids(g, flat_x, batch, length, node)
            if each
            else g.initializer(np.zeros(1, np.int64), "position_ids")
        )
        inputs = [flat_x, ids, *flat]
        rotated = same_shape(g, "RotaryEmbedding", inputs, node, interleaved=0, num_heads=heads)
        back = g.reshape(rotated, [batch, length, heads, head], node)
        g.replace(node.outputs[0], g.transpose(back, [0, 2, 1, 3], node))
        return True

    @staticmethod
    def _ids(g: Editor, x: ir.Value, batch: Any, length: Any, at: ir.Node) -> ir.Value:
        """Each token's row of a table that has one for each: (batch, length)."""
        sizes = g.sizes(x, 0, 2, at)
        (rows,) = g.emit("ReduceProd", [sizes], at, shapes=[[]], like=sizes, keepdims=0)
        zero, one = (g.initializer(np.array(i, np.int64), "number") for i in (0, 1))
        (flat,) = g.emit(
            "Range", [zero, rows, one], at, shapes=[[size_product(batch, length)]], like=sizes
        )
        return g.emit("Reshape", [flat, sizes], at, shapes=[[batch, length]], like=flat)[0]

    def _parts(self, g: Editor, node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
        """(x, cos, sin) of the sum, whatever the order of its operands."""
        for one, two in both_orders(node):
            straight, turned = g.node(one, "Mul"), g.node(two, "Mul")
            if straight is None or turned is None:
                continue
            for rotated, sin in both_orders(turned):
                x = self._half_turn(g, rotated)
                for same, cos in both_orders(straight):
                    if x is not None and same is x and cos is not None and sin is not None:
                        return x, cos, sin
        return None

    @staticmethod
    def _half_turn(g: Editor, value: ir.Value | None) -> ir.Value | None:
        """x, where *value* is Concat(-x2, x1) and x1, x2 are the halves of x."""
        joined = g.node(value, "Concat")
        if joined is None or len(joined.inputs) != 2:
            return None
        negated = g.node(joined.inputs[0], "Neg")
        x = Rotary._whole(g, joined.inputs[1], 0)
        if x is None or negated is None or g.shape(value) != g.shape(x):
            return None
        return x if Rotary._whole(g, negated.inputs[0], 1) is x else None

    @staticmethod
    def _whole(g: Editor, value: ir.Value | None, which: int) -> ir.Value | None:
        """x, of which a Slice or a Split along the last axis cuts *value*, its half *which*."""
        node = g.node(value, "Slice", "Split")
        shape = g.shape(node.inputs[0]) if node is not None else None
        if node is None or not shape or not static(shape[-1]):
            return None
        half, step = shape[-1] // 2, node.inputs[4:]
        if g.shape(value) != (*shape[:-1], half) or (step and g.ints(step[0]) != [1]):
            return None
        if node.op_type == "Split":
            found = len(node.outputs) == 2 and node.outputs[which] is value
        else:
            start = which * half
            found = g.ints(node.inputs[1]) in ([start], [start - shape[-1]])
        return node.inputs[0] if found else None

    def _table(self, g: Editor, value: ir.Value | None, op: str, at: ir.Node) -> ir.Value | None:
        """The half of a table of cosines or sines: the same nodes over f instead of (f, f)."""
        node = g.node(value, "Reshape", "Unsqueeze", "Cast", op)
        full = g.shape(value)
        if node is None or full is None or value is None:
            return None
        half = [*full[:-1], full[-1] // 2]
        source = node.inputs[0]
        if node.op_type == op:
            joined = g.node(source, "Concat")
            if (
                joined is None
                or len(joined.inputs) != 2
                or joined.inputs[0] is not joined.inputs[1]
            ):
                return None
            if joined.inputs[0] is None or g.axis(joined) != len(full) - 1:
                return None
            return g.emit(op, [joined.inputs[0]], at, shapes=[half], like=value)[0]
        before = self._table(g, source, op, at)
        if before is None or source is None:
            return None
        if node.op_type == "Cast":
            to = int(g.attribute(node, "to"))
            return g.emit("Cast", [before], at, shapes=[half], like=value, to=to)[0]
        if (g.shape(source) or (0,))[-1] != full[-1]:
            return None
        return g.reshape(before, half, at)


class PackedRotary(Rule):
    """Pattern: RotaryEmbedding of several parts of one Split. Becomes one of the whole before it.

    Its heads are the operator's tokens, each with its row of the tables: those of the parts that
    are not rotated have cosines of one and sines of zero, which leave every number as it is.
    Conditions: CUDA; few tokens, of sizes that are numbers (a decode step, where a launch takes
    longer than its work); and the same tables for all parts. A CPU gains nothing: a step of four
    layers takes 0.99 to 1.00 of its time.
    """

    #: Tokens at most.
    few = 64

    ops = ("Split",)
    tier = "onnxruntime"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        x, shape = node.inputs[0], g.shape(node.inputs[0])
        turned = {i: t for i, o in enumerate(node.outputs) if (t := self._turned(g, o)) is not None}
        if len(turned) < 2 or x is None or g.axis(node, 0) not in (2, -1) or g.processor != "CUDA":
            return False
        if shape is None or len(shape) != 3 or not static(*shape) or shape[0] * shape[1] > self.few:
            raise Refusal(f"{shape}: more than {self.few} tokens, or a size that is not known")
        first = next(iter(turned.values()))
        if any(t.inputs[1:] != first.inputs[1:] for t in turned.values()):
            raise Refusal("the parts are rotated by different tables, or by other rows of them")
        ids, cos, sin = first.inputs[1:4]
        table, tokens, row = g.shape(cos), shape[0] * shape[1], self._rows(g, ids, shape[:2])
        if table is None or not static(*table) or row is None or cos is None or sin is None:
            raise Refusal(f"tables of {table}, or rows of them that vary")
        head = 2 * table[1]
        widths = [(g.shape(o) or (0,))[-1] for o in node.outputs]
        heads = [w // head for w in widths]
        if any(w % head for w in widths) or any(
            g.attribute(t, "num_heads", 0) != heads[i] for i, t in turned.items()
        ):
            raise Refusal(f"parts of {widths}, heads of {head}")
        more = max(sum(heads) - table[0], 1)  # as many rows as "tokens", and one to stay as it is
        tables = [self._longer(g, t, more, fill, node) for t, fill in ((cos, 1), (sin, 0))]
        rows = np.full((tokens, sum(heads)), table[0])
        for i in turned:
            start = sum(heads[:i])
            rows[:, start : start + heads[i]] = row.reshape(tokens, 1)
        places = g.initializer(rows.astype(np.int64), "position_ids")
        flat = g.reshape(x, [tokens, sum(heads), head], node)
        inputs = [flat, places, *tables]
        whole = same_shape(g, "RotaryEmbedding", inputs, node, interleaved=0, num_heads=1)
        whole = g.reshape(whole, shape, node)
        parts = [turned[i].outputs[0] if i in turned else o for i, o in enumerate(node.outputs)]
        g.replace_by(parts, "Split", [whole, *node.inputs[1:]], node, axis=-1)
        return True

    @staticmethod
    def _turned(g: Editor, part: ir.Value) -> ir.Node | None:
        """The RotaryEmbedding that alone reads a part."""
        if g.uses(part) != 1 or part.is_graph_output():
            return None
        (use,) = part.uses()
        turns = use.node.op_type == "RotaryEmbedding" and use.idx == 0
        return use.node if turns and is_plain(use.node) else None

    @staticmethod
    def _rows(g: Editor, ids: ir.Value | None, tokens: Sequence[int]) -> np.ndarray | None:
        """Each token's row of the tables."""
        start = g.constant(ids)
        if start is None or start.size > 1:
            return start
        return start + np.arange(tokens[1]) + np.zeros((tokens[0], 1))

    @staticmethod
    def _longer(g: Editor, table: ir.Value, more: int, fill: int, at: ir.Node) -> ir.Value:
        """The table with rows that leave a number as it is."""
        rows, half = g.shape(table) or ()
        still = g.initializer(np.full((more, half), fill, table.dtype.numpy()), "still")
        shape = [rows + more, half]
        return g.emit("Concat", [table, still], at, shapes=[shape], like=table, axis=0)[0]


class SpreadLengths(Rule):
    """Pattern: Expand of several inputs of one element to one length. Becomes one Expand of all.

    A decode step over static caches has one for each layer: how long its cache is, for each text
    of a batch. A Concat joins them before and a Split parts them after.
    Conditions: CUDA, where a launch takes longer than its work; four or more, as these three take
    their place; a length that is a number. At most sixteen are joined: the kernels of Concat and
    Split take up to 32 addresses by value, and more from memory that they copy from the host, which
    a CUDA graph must not record.
    """

    #: How many are joined.
    least, most = 4, 16

    ops = ("Expand",)
    tier = "onnxruntime"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        kind = self._kind(g, node)
        if g.processor != "CUDA" or kind is None:
            return False
        nodes = [n for n in g.graph if n.op_type == "Expand" and self._kind(g, n) == kind]
        nodes = nodes[: self.most]
        if len(nodes) < self.least or node is not nodes[0]:
            return False
        length, out = kind[0], node.outputs[0]
        ones = [g.reshape(n.inputs[0], [1], node) for n in nodes if n.inputs[0] is not None]
        shape = [len(nodes), length]
        (joined,) = g.emit("Concat", ones, node, shapes=[shape[:1]], like=out, axis=0)
        column = g.reshape(joined, [len(nodes), 1], node)
        target = g.initializer(np.array(shape, np.int64), "shape")
        (spread,) = g.emit("Expand", [column, target], node, shapes=[shape], like=out)
        flat = g.reshape(spread, [math.prod(shape)], node)
        lengths = g.initializer(np.full(len(nodes), length, np.int64), "lengths")
        g.replace_by([n.outputs[0] for n in nodes], "Split", [flat, lengths], node, axis=0)
        return True

    @staticmethod
    def _kind(g: Editor, node: ir.Node) -> tuple[int, ir.DataType | None] | None:
        """(length, type) of one element of an input that is spread; None of anything else."""
        x, shape = node.inputs[0], g.shape(node.outputs[0])
        before = g.node(x, "Reshape")
        x = x if before is None else before.inputs[0]
        if x is None or x not in g.graph.inputs or g.is_static(x) or g.size(x) != 1:
            return None
        if shape is None or len(shape) != 1 or not static(*shape):
            return None
        return shape[0], x.dtype


class Silu(Rule):
    """Pattern: ``x * Sigmoid(x)``. Becomes QuickGelu with alpha one.

    Source: S. Elfwing et al., Sigmoid-weighted linear units, 2017.
    """

    ops = ("Mul",)
    tier = "onnxruntime"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        for x, gate in both_orders(node):
            sigmoid = g.node(gate, "Sigmoid")
            if sigmoid is None or x is None:
                continue
            if sigmoid.inputs[0] is not x:
                raise Refusal("a sigmoid gate, but of another value")
            check_type(g, x.dtype)
            g.replace_by(node.outputs, "QuickGelu", [x], node, MICROSOFT, alpha=1.0)
            return True
        return False


class TransposedProduct(Rule):
    """Pattern: MatMul with the Transpose of its second operand. Becomes FusedMatMul(transB=1).

    Conditions: the Transpose swaps the last two axes alone.
    """

    ops = ("MatMul",)
    tier = "onnxruntime"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        turned, a = g.node(node.inputs[1], "Transpose"), node.inputs[0]
        if turned is None or a is None:
            return False
        if not swaps_last(g, turned):
            raise Refusal("the transpose is not of the last two axes")
        check_type(g, a.dtype)
        if len(g.shape(a) or ()) < 2:
            raise Refusal("the left operand is a vector, or of unknown shape")
        g.replace_by(
            node.outputs,
            "FusedMatMul",
            [a, turned.inputs[0]],
            node,
            MICROSOFT,
            **TRANSPOSED,
        )
        return True


class PackedProducts(Rule):
    """Pattern: products of one value with several weights. Becomes one product and a Split.

    The packed weight is a Concat of the weights alone, so that it is computed once and again
    when a weight changes.
    Conditions: FusedMatMul(transB=1) of two-axis weights that rarely change; they are narrow, or,
    on CUDA, there is room for a copy (:attr:`OptimizationOptions.packed`).

    Source: T. Dao et al., FlashAttention, 2022 (packed QKV); N. Shazeer, GLU variants, 2020.
    """

    #: Elements from which on the copy counts. There a CPU gains nothing: a product of one token
    #: takes 1.00 to 1.03 of the packed one's time, of 128 tokens 0.91 to 0.94.
    wide = 1 << 19

    ops = ("FusedMatMul",)
    tier = "onnxruntime"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        x = node.inputs[0]
        if x is None or not self._fits(g, node):
            return False
        nodes = self._beside(g, node)
        if len(nodes) < 2 or nodes[0] is not node:
            return False
        if not all(g.is_static(n.inputs[1]) for n in nodes):
            raise Refusal("a weight is computed anew in each run: packing it would be too")
        size = sum(g.size(n.inputs[1]) or 0 for n in nodes)
        if g.processor == "CPU" and size >= self.wide:
            raise Refusal("wide weights are no faster packed on a CPU, and kept twice")
        elif size >= self.wide and size > self._widest(g):
            raise Refusal(f"packed weights may take {g.packed:.0%} of the weights' memory")
        shapes = [g.shape(n.outputs[0]) or () for n in nodes]
        sizes = [s[-1] for s in shapes]
        width = (g.shape(node.inputs[1]) or ())[-1]
        weights = [n.inputs[1] for n in nodes]
        (weight,) = g.emit("Concat", weights, node, shapes=[[sum(sizes), width]], like=x, axis=0)
        (product,) = g.emit(
            "FusedMatMul",
            [x, weight],
            node,
            shapes=[[*shapes[0][:-1], sum(sizes)]],
            like=x,
            domain=MICROSOFT,
            **TRANSPOSED,
        )
        lengths = g.initializer(np.array(sizes, dtype=np.int64), "lengths")
        g.replace_by([n.outputs[0] for n in nodes], "Split", [product, lengths], node, axis=-1)
        return True

    def _beside(self, g: Editor, node: ir.Node) -> list[ir.Node]:
        """The products of one value that one product can be, in the graph's order."""
        (x, _, *_) = node.inputs
        assert x is not None
        beside = {u.node for u in x.uses() if u.idx == 0 and self._fits(g, u.node)}
        return [n for n in g.graph if n in beside] if len(beside) > 1 else []

    def _widest(self, g: Editor) -> int:
        """The widest group for which there is room, where narrower ones are packed first."""
        if g.widest is None:
            sizes: dict[int, int] = {}
            for nodes in {tuple(self._beside(g, node)) for node in g.graph if self._fits(g, node)}:
                if len(nodes) > 1 and all(g.is_static(n.inputs[1]) for n in nodes):
                    size = sum(g.size(n.inputs[1]) or 0 for n in nodes)
                    sizes[size] = sizes.get(size, 0) + size
            weights = [g.size(v) or 0 for v in g.graph.inputs if v.name in g.static]
            left, g.widest = g.packed * sum(weights), 0
            for size, all_of_them in sorted(sizes.items()):
                left -= all_of_them
                if left < 0:
                    break
                g.widest = size
        return g.widest

    @staticmethod
    def _fits(g: Editor, node: ir.Node) -> bool:
        plain = {name: a.value for name, a in node.attributes.items()} == TRANSPOSED
        two = plain and node.op_type == "FusedMatMul" and len(g.shape(node.inputs[1]) or ()) == 2
        return two and g.shape(node.outputs[0]) is not None


#: The rules of the tier, in the order in which they are tried; the default tier's come before.
ONNXRUNTIME: tuple[Rule, ...] = (
    RmsNorm(),
    SkipRmsNorm(),
    Rotary(),
    Silu(),
    Attention(),
    TransposedProduct(),
    PackedProducts(),
    RotaryAttention(),
    PackedRotary(),
    SpreadLengths(),
)
