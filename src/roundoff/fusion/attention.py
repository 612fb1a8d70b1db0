"""Attention, of tier "onnxruntime": GroupQueryAttention where causal, else MultiHeadAttention.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md defines both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from roundoff.dtypes import dtype_info

from .editor import MICROSOFT, Dim, Editor, Refusal, both_orders, size_product, static
from .rule import Rule

_FLOAT = ir.DataType.FLOAT
BY_KEY = [0, 1, 3, 2]  # (batch, heads, key, head) <-> (batch, heads, head, key)
BY_TOKEN = (0, 2, 1, 3)  # (batch, heads, sequence, head) <-> (batch, sequence, heads, head)


@dataclasses.dataclass
class Parts:
    """The parts of attention, searched upwards from its last product.

    Attributes
    ----------
    q : ir.Value
        Queries, (batch, heads, sequence, head).
    k : ir.Value
        Keys, of as many heads.
    v : ir.Value
        Values, of as many heads.
    scale : float
        Of the scores.
    mask : ir.Value or None
        Added to the scores.
    dead : ir.Value or None
        True for the rows that see no key and are zero, (…, sequence, 1).
    """

    q: ir.Value
    k: ir.Value
    v: ir.Value
    scale: float
    mask: ir.Value | None
    dead: ir.Value | None


class Attention(Rule):
    """Pattern: ``softmax(q k^T scale + mask) v``, spelled by any of transformers' attentions.

    Becomes GroupQueryAttention where the mask is exactly causal and the processor has the kernel,
    with grouped keys and values left unrepeated; else MultiHeadAttention, with the mask as its
    bias, or causal by attribute. A row that the exporter zeroes because its mask leaves no key
    is zeroed after.
    Conditions: one head size, the probabilities not returned, and a mask that broadcasts over
    (batch, heads). The sizes of batch and sequences may be symbolic; where there are fewer queries
    than keys (decoding with a cache), the operator is MultiHeadAttention. Of a single query and
    grouped heads, a group's heads become its queries: keys and values are left unrepeated.

    Source: A. Vaswani et al., Attention is all you need, 2017, equation 1.
    """

    ops = ("MatMul",)
    tier = "onnxruntime"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        parts = find(g, node)
        if parts is None:
            return False
        shape, keys = g.shape(parts.q), g.shape(parts.k)
        if shape is None or keys is None or len(shape) != 4 or keys != g.shape(parts.v):
            raise Refusal(f"queries {shape}, keys {keys}, values {g.shape(parts.v)}")
        if shape != (*keys[:2], shape[2], keys[3]) or not static(shape[1], shape[3]):
            raise Refusal(f"queries {shape}, keys {keys}")
        dtype = parts.q.dtype
        check_type(g, dtype)
        if parts.v.dtype != dtype:
            raise Refusal(f"queries of {dtype}, values of {parts.v.dtype}")
        causal, mask = classify(g, parts.mask, shape, keys[2], node)
        dead = _dead_rows(g, parts, shape, node)
        # GroupQueryAttention needs whole 16-byte rows, and has no float32 kernel on CUDA: one of
        # ours takes it there.
        has_kernel = g.processor == "CPU" or dtype != ir.DataType.FLOAT or g.ours
        grouped = causal and shape[3] % 8 == 0 and has_kernel
        flat = (
            self._grouped(g, parts, node) if grouped else self._plain(g, parts, causal, mask, node)
        )
        if dead is not None:
            zero = g.initializer(np.zeros((), dtype.numpy()), "zero")
            flat = g.emit("Where", [dead, zero, flat], node, shapes=[g.shape(flat)], like=flat)[0]
        batch, heads, length, head = shape
        out = g.reshape(flat, [batch, length, heads, head], node)
        g.replace(node.outputs[0], g.transpose(out, BY_TOKEN, node))
        return True

    def _plain(
        self, g: Editor, p: Parts, causal: bool, mask: ir.Value | None, at: ir.Node
    ) -> ir.Value:
        _, heads, length, _ = g.shape(p.q) or ()
        k, v = unrepeated(g, p)
        shared = mask is None or (g.shape(mask) or ())[1] == 1  # by all heads
        if length == 1 and not causal and shared and k is not p.k:
            return self._groups(g, p, k, v, mask, at)
        if g.shape(p.k)[2] != length:  # type: ignore[index]
            # Of a cache, by head: as they lie.
            q, k, v = tokens(g, p.q, at), p.k, p.v
        else:
            q, k, v = (tokens(g, x, at) for x in (p.q, p.k, p.v))
        inputs = [q, k, v, None, None, mask] if mask is not None else [q, k, v]
        more = {"num_heads": heads, "scale": p.scale, "unidirectional": int(causal)}
        return same_shape(g, "MultiHeadAttention", inputs, at, **more)

    def _groups(
        self, g: Editor, p: Parts, k: ir.Value, v: ir.Value, mask: ir.Value | None, at: ir.Node
    ) -> ir.Value:
        """A decode step: each group of heads as a sequence of queries over keys as they lie.

        (batch, groups) becomes the batch, of one head: nothing is transposed or repeated.
        MultiHeadAttention broadcasts a bias over batch and heads, not over queries: it is spread,
        once for all layers that share it.
        """
        batch, heads, _, head = g.shape(p.q) or ()
        groups, keys = (g.shape(k) or ())[1:3]
        rows, each = size_product(batch, groups), heads // groups
        q = g.reshape(p.q, [rows, each, head], at)
        k, v = (g.reshape(x, [rows, 1, keys, head], at) for x in (k, v))
        inputs: list[ir.Value | None] = [q, k, v]
        if mask is not None:
            texts = (g.shape(mask) or ())[0]
            spread = [1, 1 if texts == 1 else groups, each, 1]
            target = g.initializer(np.array(spread, np.int64), "spread")
            wide = [[texts, *spread[1:3], keys]]
            (bias,) = g.emit("Expand", [mask, target], at, shapes=wide, like=mask)
            bias = g.reshape(bias, [1 if texts == 1 else rows, 1, each, keys], at)
            inputs += [None, None, bias]
        more = {"num_heads": 1, "scale": p.scale, "unidirectional": 0}
        out = same_shape(g, "MultiHeadAttention", inputs, at, **more)
        return g.reshape(out, [batch, 1, heads * head], at)

    def _lengths(self, g: Editor, q: ir.Value, at: ir.Node) -> tuple[ir.Value, ir.Value]:
        """(the last token of each sequence, the length of all), int32."""
        batch = (g.shape(q) or ())[0]
        kind = ir.val("", ir.DataType.INT32)
        (total,) = g.emit(
            "Cast", [g.sizes(q, 2, 3, at)], at, shapes=[[1]], like=kind, to=int(ir.DataType.INT32)
        )
        one = g.initializer(np.array([1], np.int32), "one")
        (each,) = g.emit("Sub", [total, one], at, shapes=[[1]], like=total)
        (last,) = g.emit("Expand", [each, g.sizes(q, 0, 1, at)], at, shapes=[[batch]], like=each)
        return last, total

    def _grouped(self, g: Editor, p: Parts, at: ir.Node) -> ir.Value:
        shape = g.shape(p.q) or ()
        batch, heads, length, head = shape
        k, v = unrepeated(g, p)
        some = (g.shape(k) or shape)[1]
        last, total = self._lengths(g, p.q, at)
        inputs = [*(tokens(g, x, at) for x in (p.q, k, v)), None, None, last, total]
        present = [batch, some, length, head]
        outputs = g.emit(
            "GroupQueryAttention",
            inputs,
            at,
            shapes=[[batch, length, heads * head], present, present],
            like=p.q,
            domain=MICROSOFT,
            num_heads=heads,
            kv_num_heads=some,
            scale=p.scale,
            do_rotary=0,
            rotary_interleaved=0,
        )
        # The operator returns what it attended to: keys and values need not be computed twice.
        for source, copy in ((k, outputs[1]), (v, outputs[2])):
            if source.is_graph_output():
                g.replace(source, copy, returned_only=True)
        return outputs[0]


def check_type(g: Editor, dtype: ir.DataType | None) -> None:
    """Refuse an element type that ONNX Runtime's own operators have no kernel for."""
    floats = {ir.DataType.FLOAT, ir.DataType.FLOAT16}
    if dtype not in floats and not (dtype == ir.DataType.BFLOAT16 and g.processor == "CUDA"):
        raise Refusal(f"no kernel for {dtype} on the {g.processor}")


def is_plain(node: ir.Node) -> bool:
    """Whether attention or a rotation does no more than those written here: a model's own may."""
    attributes = {name: a.value for name, a in node.attributes.items()}
    if node.op_type == "RotaryEmbedding":
        return set(attributes) <= {"num_heads", "interleaved"} and not attributes.get("interleaved")
    written = {"num_heads", "kv_num_heads", "scale", "do_rotary", "rotary_interleaved"}
    has_past = any(past is not None for past in node.inputs[3:5])
    return set(attributes) == written and not attributes["rotary_interleaved"] and not has_past


def same_shape(
    g: Editor, op: str, inputs: Sequence[ir.Value | None], at: ir.Node, **attributes: Any
) -> ir.Value:
    """An operator of ONNX Runtime's whose output has the shape and type of its first input."""
    first = inputs[0]
    assert first is not None
    shapes = [g.shape(first)]
    return g.emit(op, inputs, at, shapes=shapes, like=first, domain=MICROSOFT, **attributes)[0]


def find(g: Editor, node: ir.Node) -> Parts | None:
    """The parts of attention whose last product is *node*."""
    probabilities, v = node.inputs
    dead = None
    chosen = g.node(probabilities, "Where")
    if chosen is not None and g.scalar(chosen.inputs[1]) == 0:
        dead, probabilities = chosen.inputs[0], chosen.inputs[2]
    cast = g.node(probabilities, "Cast")
    softmax = g.node(cast.inputs[0] if cast is not None else probabilities, "Softmax")
    if softmax is None or v is None or probabilities is None:
        return None
    rank = len(softmax.inputs[0].shape or ()) if softmax.inputs[0] is not None else 0
    if g.attribute(softmax, "axis", -1) not in (-1, rank - 1):
        return None
    if g.uses(probabilities) > 1:
        raise Refusal("the probabilities are read by others too")
    source = softmax.inputs[0]
    wide = g.node(source, "Cast")
    source = wide.inputs[0] if wide is not None else source
    total = g.node(source, "Add")
    for scores, other in both_orders(total) if total is not None else [(source, None)]:
        operands = _scores(g, scores)
        if operands is not None:
            (q, turned, scale), mask = operands, other
            break
    else:
        return None
    if rank != 4 or len(g.shape(turned) or ()) != 4:
        raise Refusal(f"scores of {rank} axes, keys {g.shape(turned)}")
    k = _by_key(g, turned)
    if k is None:
        k = g.transpose(turned, BY_KEY, node)
    return Parts(q, k, v, scale, mask, dead)


def _by_key(g: Editor, turned: ir.Value) -> ir.Value | None:
    """What a Transpose of the last two axes makes *turned* of.

    torch's exporter has three axes meanwhile: (b, h, s, d) -> (b h, s, d) -> (b h, d, s) ->
    (b, h, d, s).
    """
    nodes = g.path(turned, "Transpose") or g.path(turned, "Reshape", "Transpose", "Reshape")
    if not nodes:
        return None
    (*_, first), middle = nodes, nodes[len(nodes) // 2]
    k, within = g.shape(first.inputs[0]), g.shape(middle.inputs[0])
    if k is None or within is None or g.shape(turned) != (*k[:2], *k[:1:-1]):
        return None
    return first.inputs[0] if swaps_last(g, middle) and within[-2:] == k[2:] else None


def swaps_last(g: Editor, node: ir.Node) -> bool:
    """Whether a Transpose swaps the last two axes alone."""
    perm = list(g.attribute(node, "perm") or ())
    rank = len(perm)
    return perm == [*range(rank - 2), rank - 1, rank - 2]


def _scores(g: Editor, value: ir.Value | None) -> tuple[ir.Value, ir.Value, float] | None:
    """(q, k transposed, scale) of ``q @ k * scale``, scaled before or after the product."""
    value, scale = _unscaled(g, value)
    product = g.node(value, "MatMul")
    if product is None:
        return None
    q, first = _unscaled(g, product.inputs[0])
    k, second = _unscaled(g, product.inputs[1])
    return None if q is None or k is None else (q, k, scale * first * second)


def _unscaled(g: Editor, value: ir.Value | None) -> tuple[ir.Value | None, float]:
    """What *value* was before it was scaled by a number, perhaps in float32, and that number."""
    ways = (("Mul",), ("Div",), ("Cast", "Mul", "Cast"), ("Cast", "Div", "Cast"))
    nodes = next((found for ops in ways if (found := g.path(value, *ops))), [])
    if not nodes or value is None:
        return value, 1.0
    node, before = nodes[len(nodes) // 2], nodes[-1].inputs[0]
    factor = g.scalar(node.inputs[1])
    if factor is None or before is None or node.outputs[0].dtype not in (value.dtype, _FLOAT):
        return value, 1.0
    if before.dtype != value.dtype or g.shape(before) != g.shape(value):
        return value, 1.0
    return before, 1 / factor if node.op_type == "Div" else factor


def classify(
    g: Editor, mask: ir.Value | None, shape: tuple[Any, ...], keys: Dim, at: ir.Node
) -> tuple[bool, ir.Value | None]:
    """(exactly causal, bias): the mask as the operators take it."""
    if mask is None:
        return False, None
    batch, heads, length, _ = shape
    dims = g.shape(mask)
    array = g.constant(mask)
    square = length == keys
    if square and array is not None and is_causal(array, length):
        return True, None
    if square and _is_lower(g, mask, length):
        return True, None
    if array is not None and not array.any():
        return False, None
    if dims is None or dims[-2:] != (length, keys):
        raise Refusal(f"the mask is {dims}: it does not reach all queries and keys by itself")
    dims = (1,) * (4 - len(dims)) + dims
    if dims[0] not in (1, batch) or dims[1] not in (1, heads):
        raise Refusal(f"the mask is {dims}, scores are {(batch, heads, length, keys)}")
    return False, g.reshape(mask, dims, at)


def _is_lower(g: Editor, mask: ir.Value, length: Dim) -> bool:
    """Whether *mask* is ``Where(Trilu(ones), 0, -inf)``, of any length: causal."""
    nodes = g.path(mask, "Where", "Trilu", "Expand")
    if not nodes or (g.shape(mask) or ())[-2:] != (length, length):
        return False
    chosen, lower, spread = nodes
    numbers = [g.scalar(v) for v in (*spread.inputs[:1], *lower.inputs[1:], *chosen.inputs[1:])]
    return numbers == [1, 0, 0, -math.inf] and not g.attribute(lower, "upper", 1)


def is_causal(mask: np.ndarray, length: int) -> bool:
    """Whether an additive mask is zero up to the diagonal and shuts out all beyond it.

    What shuts out is -inf, or so low that no score can bring it back: half the lowest number of
    its type or less.

    Parameters
    ----------
    mask : numpy.ndarray
        (..., length, length), of a floating type; every leading index must be causal.

    Examples
    --------
    >>> is_causal(np.triu(np.full((3, 3), -np.inf, np.float32), 1), 3)
    True
    """
    if mask.shape[-2:] != (length, length):
        return False
    lowest = np.float64(dtype_info(mask.dtype).max) * -0.5
    below = np.tril(np.ones((length, length), bool))
    mask = mask.reshape(-1, length, length)
    return bool((mask[:, below] == 0).all() and (mask[:, ~below] <= lowest).all())


def _dead_rows(g: Editor, p: Parts, shape: tuple[Any, ...], at: ir.Node) -> ir.Value | None:
    """Which rows are zero, (batch or 1, sequence, 1) of bool; None where there is none."""
    array = g.constant(p.dead)
    if p.dead is None or (array is not None and not array.any()):
        return None
    batch, _, length, _ = shape
    dims = g.shape(p.dead)
    if dims not in ((batch, 1, length, 1), (1, 1, length, 1)):
        raise Refusal(f"rows are zeroed head by head: {dims}")
    return g.reshape(p.dead, [dims[0], length, 1], at)


def tokens(g: Editor, x: ir.Value, at: ir.Node) -> ir.Value:
    """(batch, heads, sequence, head) as (batch, sequence, heads * head)."""
    batch, heads, length, head = g.shape(x) or ()
    return g.reshape(g.transpose(x, BY_TOKEN, at), [batch, length, heads * head], at)


def unrepeated(g: Editor, p: Parts) -> tuple[ir.Value, ir.Value]:
    """Keys and values before each head was repeated for its group; as they are where not both."""
    k, v = _narrow(g, p.k), _narrow(g, p.v)
    return (k, v) if k is not None and v is not None and g.shape(k) == g.shape(v) else (p.k, p.v)


def _narrow(g: Editor, x: ir.Value) -> ir.Value | None:
    merged = g.node(x, "Reshape")
    wide = g.node(merged.inputs[0], "Expand") if merged is not None else None
    thin = g.node(wide.inputs[0], "Reshape", "Unsqueeze") if wide is not None else None
    if wide is None or thin is None:
        return None
    small, five = g.shape(thin.inputs[0]), g.shape(wide.outputs[0])
    if small is None or five is None or len(small) != 4 or len(five) != 5:
        return None
    repeated = (*five[:2], *five[3:]) == small
    grouped = g.shape(thin.outputs[0]) == (*small[:2], 1, *small[2:])
    return thin.inputs[0] if grouped and repeated else None


class RotaryAttention(Rule):
    """Pattern: GroupQueryAttention of rotated queries and keys. Becomes its ``do_rotary``.

    Then, of the three parts of one Split, that of the whole.
    Conditions: both rotated with the same tables, from position zero on; the rotated keys are
    returned by the operator alone; the head size is a multiple of 16.
    """

    ops = ("GroupQueryAttention",)
    tier = "onnxruntime"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        whole = g.node(node.inputs[0], "Split")
        if g.attribute(node, "do_rotary", 0):
            if whole is None or list(whole.outputs) != list(node.inputs[:3]):
                return False
            if g.axis(whole, 0) not in (2, -1):
                return False
            _again(g, node, [whole.inputs[0], None, None, *node.inputs[3:]])
            return True
        turned = [g.node(i, "RotaryEmbedding") for i in node.inputs[:2]]
        if turned[0] is None or turned[1] is None:
            return False
        if not all(is_plain(n) for n in (node, turned[0], turned[1])):
            return False
        if turned[0].inputs[2:] != turned[1].inputs[2:]:
            raise Refusal("queries and keys are rotated by different tables")
        if any(g.ints(t.inputs[1]) != [0] for t in turned if t):
            raise Refusal("positions do not start at zero in every sequence")
        if any(g.uses(t.outputs[0]) > 1 for t in turned if t):
            raise Refusal("rotated queries or keys have other readers")
        head = (g.shape(node.outputs[1]) or (0,))[-1]
        if head % 16:
            raise Refusal(f"head size {head} is not a multiple of 16")
        inputs = list(node.inputs)
        inputs[:2] = [t.inputs[0] for t in turned if t]
        inputs[7:] = turned[0].inputs[2:4]
        _again(g, node, inputs, do_rotary=1)
        return True


def _again(g: Editor, node: ir.Node, inputs: list[ir.Value | None], **changed: int) -> None:
    """The node once more, with other inputs and attributes, in place of itself."""
    attributes = {k: a.value for k, a in node.attributes.items()} | changed
    g.replace_by(node.outputs, node.op_type, inputs, node, node.domain, **attributes)
