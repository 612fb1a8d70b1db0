"""Tier "experimental": kernels that are not ONNX Runtime's, between partitions that it runs.

On CUDA a rule replaces several kernels that are bound by memory by one in Triton that moves each
element once. Its node, of domain ``roundoff``, runs there, or with
``OptimizationOptions(interpret=True)`` on the CPU in Triton's interpreter (slow, and right).
Anywhere else none of these rules is tried.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from .attention import BY_TOKEN, is_plain, same_shape
from .editor import OURS, Editor, Refusal, both_orders
from .rule import Rule


def missing(processor: str, interpret: bool) -> str | None:
    """Why our kernels cannot run there; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if processor != "CUDA" and not interpret:
        return "Triton needs CUDA; OptimizationOptions(interpret=True) runs its interpreter"
    return None


class SiluTimesUp(Rule):
    """Pattern: QuickGelu of one half of a Split, times the other. Becomes SiluMul of the whole.

    Three kernels that move 12 elements for each result become one that moves 3.

    Source: N. Shazeer, GLU variants improve transformer, 2020.
    """

    ops = ("Mul",)
    tier = "experimental"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        for gated, up in both_orders(node):
            nodes = g.path(gated, "QuickGelu", "Split")
            if not nodes:
                continue
            gelu, halves = nodes
            if list(halves.outputs) != [gelu.inputs[0], up]:
                continue
            shape = g.shape(up)
            if shape is None or g.shape(gelu.inputs[0]) != shape:
                continue
            if g.attribute(gelu, "alpha", 1.702) != 1 or g.axis(halves, 0) != len(shape) - 1:
                continue
            g.replace_by(node.outputs, "SiluMul", [halves.inputs[0]], node, OURS)
            return True
        return False


class RotaryQkv(Rule):
    """Pattern: GroupQueryAttention that rotates a packed product.

    Becomes RotaryQkv, which takes it apart in one pass, and attention of what it makes: queries
    by token, keys and values by head.

    Source: J. Su et al., RoFormer, 2021, equation 34.
    """

    ops = ("GroupQueryAttention",)
    tier = "experimental"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        if not is_plain(node) or not g.attribute(node, "do_rotary") or node.inputs[1] is not None:
            return False
        if len(g.shape(node.outputs[1]) or ()) != 4:
            raise Refusal("keys whose shape is not known")
        heads, groups = g.attribute(node, "num_heads"), g.attribute(node, "kv_num_heads")
        if heads != groups and not _lacks_kernel(g, node):
            raise Refusal("grouped heads: repeating keys and values would cost more than it saves")
        q, k, v = g.emit(
            "RotaryQkv",
            [node.inputs[0], *node.inputs[7:9]],
            node,
            shapes=[g.shape(o) for o in node.outputs],
            like=node.outputs[0],
            domain=OURS,
            heads=heads,
            groups=groups,
        )
        _attend(g, node, q, k, v)
        return True


class PlainAttention(Rule):
    """Pattern: GroupQueryAttention of float32 on CUDA, where ONNX Runtime has no kernel.

    Becomes MultiHeadAttention.
    """

    ops = ("GroupQueryAttention",)
    tier = "experimental"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        q, k, v = node.inputs[:3]
        if k is None or v is None or q is None or not _lacks_kernel(g, node) or not is_plain(node):
            return False
        shape = g.shape(node.outputs[1]) or ()
        if len(shape) != 4:
            raise Refusal("keys whose shape is not known")
        batch, groups, length, head = shape
        if g.attribute(node, "do_rotary", 0):
            ids = g.initializer(np.zeros(1, np.int64), "position_ids")
            tables = node.inputs[7:9]
            q, k = (
                same_shape(
                    g, "RotaryEmbedding", [x, ids, *tables], node, interleaved=0, num_heads=heads
                )
                for x, heads in ((q, g.attribute(node, "num_heads")), (k, groups))
            )
        k, v = (
            g.transpose(g.reshape(x, [batch, length, groups, head], node), BY_TOKEN, node)
            for x in (k, v)
        )
        _attend(g, node, q, k, v)
        return True


def _lacks_kernel(g: Editor, node: ir.Node) -> bool:
    return g.processor == "CUDA" and node.outputs[0].dtype == ir.DataType.FLOAT


def _attend(g: Editor, node: ir.Node, q: ir.Value, k: ir.Value, v: ir.Value) -> None:
    """Causal attention of queries by token with keys and values by head, in place of *node*."""
    out, keys, values = node.outputs
    heads, scale = g.attribute(node, "num_heads"), g.attribute(node, "scale")
    wide = [q, _repeated(g, k, heads, node), _repeated(g, v, heads, node)]
    more = {"num_heads": heads, "scale": scale, "unidirectional": 1}
    g.replace(out, same_shape(g, "MultiHeadAttention", wide, node, **more))
    g.replace(keys, k)
    g.replace(values, v)


def _repeated(g: Editor, x: ir.Value, heads: int, at: ir.Node) -> ir.Value:
    """Keys or values with each head repeated for the queries of its group."""
    batch, groups, length, head = g.shape(x) or ()
    if groups == heads:
        return x
    wide = [batch, groups, heads // groups, length, head]
    target = g.initializer(np.array([1, 1, heads // groups, 1, 1], dtype=np.int64), "shape")
    thin = g.reshape(x, [batch, groups, 1, length, head], at)
    repeated = g.emit("Expand", [thin, target], at, shapes=[wide], like=x)[0]
    return g.reshape(repeated, [batch, heads, length, head], at)


class AddRmsNorm(Rule):
    """Pattern: SkipSimplifiedLayerNormalization. Becomes AddRmsNorm, one row in registers.

    The sum is stored where something reads it. Conditions: rows of at most 16,384 elements.

    Source: B. Zhang, R. Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    ops = ("SkipSimplifiedLayerNormalization",)
    tier = "experimental"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        _check_width(g, node.inputs[2])
        out, *middle = node.outputs
        if len(node.inputs) != 3 or any(g.uses(o) for o in middle[:2]):
            return False
        keep = len(middle) == 3 and g.uses(middle[2]) > 0
        g.replace_by(
            [out, middle[2] if keep else None],
            "AddRmsNorm",
            node.inputs,
            node,
            OURS,
            epsilon=g.attribute(node, "epsilon", 1e-12),
            keep=int(keep),
        )
        return True


class EmbedRmsNorm(Rule):
    """Pattern: SimplifiedLayerNormalization of rows gathered from a table. Becomes EmbedRmsNorm.

    A token outside the table gives NaN; ONNX Runtime's Gather gives zeros on CUDA. Conditions:
    int64 tokens, rows of at most 16,384 elements.

    Source: B. Zhang, R. Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    ops = ("SimplifiedLayerNormalization",)
    tier = "experimental"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        gathered = g.node(node.inputs[0], "Gather")
        last = len(node.outputs[0].shape or ()) - 1
        if gathered is None or g.axis(gathered, 0) != 0 or g.axis(node) != last:
            return False
        table, tokens = gathered.inputs
        if len(g.shape(table) or ()) != 2 or tokens is None:
            return False
        if tokens.dtype != ir.DataType.INT64:
            raise Refusal(f"tokens are {tokens.dtype}, not int64")
        _check_width(g, node.inputs[1])
        g.replace_by(
            [node.outputs[0], gathered.outputs[0]],
            "EmbedRmsNorm",
            [table, tokens, node.inputs[1]],
            node,
            OURS,
            epsilon=g.attribute(node, "epsilon", 1e-5),
        )
        return True


def _check_width(g: Editor, weight: ir.Value | None) -> None:
    width = (g.shape(weight) or (0,))[-1]
    if width > 16384:
        raise Refusal(f"a row of {width} does not fit the registers")


Kernel = Callable[[Sequence[Any], dict[str, Any]], Sequence[Any]]


def _kernel(name: str) -> Kernel:
    """A function of ours, which takes the node's attributes by name."""

    def run(inputs: Sequence[Any], attributes: dict[str, Any]) -> Sequence[Any]:
        from roundoff.kernels import llama

        made = getattr(llama, name)(*inputs, **attributes)
        return made if isinstance(made, tuple) else (made,)

    return run


#: Operator of domain "roundoff" -> what runs it on torch tensors: (inputs, attributes) -> outputs.
KERNELS: dict[str, Kernel] = {
    "SiluMul": _kernel("silu_mul"),
    "RotaryQkv": _kernel("rotary_qkv"),
    "AddRmsNorm": _kernel("add_rms_norm"),
    "EmbedRmsNorm": _kernel("embed_rms_norm"),
}

#: The rules of the tier, in the order in which they are tried.
EXPERIMENTAL: tuple[Rule, ...] = (
    RotaryQkv(),
    PlainAttention(),
    SiluTimesUp(),
    AddRmsNorm(),
    EmbedRmsNorm(),
)
