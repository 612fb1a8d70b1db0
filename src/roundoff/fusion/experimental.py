"""Tier "experimental": kernels that are not ONNX Runtime's, between partitions that it runs.

On CUDA a rule replaces several kernels that are bound by memory by one in Triton that moves each
element once. Its node, of domain ``roundoff``, runs there, or with
``OptimizationOptions(interpret=True)`` on the CPU in Triton's interpreter (slow, and right).
Anywhere else the rule refuses.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from .attention import BY_TOKEN
from .editor import Editor
from .rule import Refusal, Rule

__all__ = [
    "EXPERIMENTAL",
    "KERNELS",
    "AddRmsNorm",
    "EmbedRmsNorm",
    "OwnAttention",
    "RotaryQkv",
    "SiluTimesUp",
]

OURS = "roundoff"
MICROSOFT = "com.microsoft"


def missing(processor: str, interpret: bool) -> str | None:
    """Why our kernels cannot run there; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if processor != "CUDA" and not interpret:
        return "Triton needs CUDA; OptimizationOptions(interpret=True) runs its interpreter"
    return None


class Ours(Rule):
    """A rule whose result is a kernel of ours."""

    tier = "experimental"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        match = self.match(g, node)
        if match is None:
            return False
        if not g.ours:
            raise Refusal(missing(g.processor, False) or "kernels of ours were not asked for")
        self.emit(g, node, match)
        return True

    def match(self, g: Editor, node: ir.Node) -> Any:
        """What the pattern consists of; None where it is not there."""
        raise NotImplementedError

    def emit(self, g: Editor, node: ir.Node, match: Any) -> None:
        """Put the kernel in its place."""
        raise NotImplementedError


class SiluTimesUp(Ours):
    """Pattern: QuickGelu of one half of a Split, times the other. Becomes SiluMul of the whole.

    Three kernels that move 12 elements for each result become one that moves 3.
    """

    ops = ("Mul",)
    source = "N. Shazeer, GLU variants improve transformer, 2020"

    def match(self, g: Editor, node: ir.Node) -> ir.Value | None:
        for gated, up in (node.inputs, tuple(reversed(node.inputs))):
            gelu = g.node(gated, "QuickGelu")
            if gelu is None or float(g.attribute(gelu, "alpha", 1.702)) != 1.0:
                continue
            halves = g.node(gelu.inputs[0], "Split")
            if halves is None or list(halves.outputs) != [gelu.inputs[0], up]:
                return None
            first, second = (g.shape(o) for o in halves.outputs)
            last = len(first or ()) - 1
            if first is None or first != second or g.axis(halves, 0) != last:
                return None
            return halves.inputs[0]
        return None

    def emit(self, g: Editor, node: ir.Node, match: ir.Value) -> None:
        out = node.outputs[0]
        outputs = g.emit(
            "SiluMul", [match], node, shapes=[g.shape(out)], like=out, domain=OURS, rule=self.name
        )
        g.replace(out, outputs[0])


class RotaryQkv(Ours):
    """Pattern: GroupQueryAttention that rotates a packed product.

    Becomes RotaryQkv, which takes it apart in one pass, and attention of what it makes: queries
    by token, keys and values by head.
    """

    ops = ("GroupQueryAttention",)
    source = "J. Su et al., RoFormer, 2021, equation 34"

    def match(self, g: Editor, node: ir.Node) -> ir.Node | None:
        if g.attribute(node, "do_rotary", 0) != 1 or node.inputs[1] is not None:
            return None
        alone = node.outputs[0].dtype == ir.DataType.FLOAT and g.processor == "CUDA"
        grouped = g.attribute(node, "num_heads") != g.attribute(node, "kv_num_heads")
        if grouped and not alone and not OwnAttention.pays(g, node):
            raise Refusal("grouped heads: repeating keys and values would cost more than it saves")
        return node

    def emit(self, g: Editor, node: ir.Node, match: ir.Node) -> None:
        heads = int(g.attribute(node, "num_heads"))
        groups = int(g.attribute(node, "kv_num_heads"))
        shapes = [g.shape(v) for v in node.outputs]
        q, k, v = g.emit(
            "RotaryQkv",
            [node.inputs[0], *node.inputs[7:9]],
            node,
            shapes=shapes,
            like=node.outputs[0],
            domain=OURS,
            rule=self.name,
            num_heads=heads,
            kv_num_heads=groups,
        )
        attend(g, node, q, k, v, self.name)


class OwnAttention(Ours):
    """Pattern: GroupQueryAttention of float32 on CUDA, where ONNX Runtime has no kernel.

    Becomes CausalAttention, of ours, where TF32 is allowed (ONNX Runtime's attention would stay
    in float32), else MultiHeadAttention.
    """

    ops = ("GroupQueryAttention",)
    source = "T. Dao, FlashAttention-2, 2023"
    #: (type, TF32 allowed) for which ours is faster than ONNX Runtime's on an H200.
    types: ClassVar[set[tuple[str, bool]]] = {("FLOAT", True)}

    def match(self, g: Editor, node: ir.Node) -> ir.Node | None:
        packed = node.inputs[1] is None
        wide = node.outputs[0].dtype == ir.DataType.FLOAT and g.processor == "CUDA"
        return node if not packed and (wide or self.pays(g, node)) else None

    @classmethod
    def pays(cls, g: Editor, node: ir.Node) -> bool:
        """Whether the kernel is ours for this node's type and precision."""
        dtype = node.outputs[0].dtype
        return dtype is not None and (dtype.name, g.tf32) in cls.types

    def emit(self, g: Editor, node: ir.Node, match: ir.Node) -> None:
        q, k, v = node.inputs[:3]
        batch, groups, length, head = g.shape(node.outputs[1]) or ()
        if g.attribute(node, "do_rotary", 0):
            q, k = (
                self._rotated(g, node, x, n)
                for x, n in ((q, int(g.attribute(node, "num_heads"))), (k, groups))
            )
        keys, values = (
            g.transpose(g.reshape(x, [batch, length, groups, head], node), BY_TOKEN, node)
            for x in (k, v)
            if x is not None
        )
        attend(g, node, q, keys, values, self.name)

    def _rotated(self, g: Editor, node: ir.Node, x: ir.Value | None, heads: int) -> ir.Value:
        assert x is not None
        ids = g.initializer(np.zeros(1, np.int64), "position_ids")
        return g.emit(
            "RotaryEmbedding",
            [x, ids, *node.inputs[7:9]],
            node,
            shapes=[g.shape(x)],
            like=x,
            domain=MICROSOFT,
            rule=self.name,
            interleaved=0,
            num_heads=heads,
        )[0]


def attend(
    g: Editor, node: ir.Node, q: ir.Value | None, k: ir.Value, v: ir.Value, rule: str
) -> None:
    """Causal attention of queries by token with keys and values by head, in place of *node*."""
    out, keys, values = node.outputs
    heads, scale = int(g.attribute(node, "num_heads")), float(g.attribute(node, "scale"))
    shape = g.shape(out)
    if OwnAttention.pays(g, node):
        outputs = g.emit(
            "CausalAttention",
            [q, k, v],
            node,
            shapes=[shape],
            like=out,
            domain=OURS,
            rule=rule,
            tf32=int(g.tf32),
            num_heads=heads,
            scale=scale,
        )
    else:
        inputs = [q, _repeated(g, k, heads, node), _repeated(g, v, heads, node)]
        outputs = g.emit(
            "MultiHeadAttention",
            inputs,
            node,
            shapes=[shape],
            like=out,
            domain=MICROSOFT,
            rule=rule,
            num_heads=heads,
            scale=scale,
            unidirectional=1,
        )
    g.replace(out, outputs[0])
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


class AddRmsNorm(Ours):
    """Pattern: SkipSimplifiedLayerNormalization. Becomes AddRmsNorm, one row in registers.

    The sum is stored where something reads it. Conditions: rows of at most 16,384 elements.
    """

    ops = ("SkipSimplifiedLayerNormalization",)
    source = "B. Zhang, R. Sennrich, Root Mean Square Layer Normalization, 2019"

    def match(self, g: Editor, node: ir.Node) -> ir.Node | None:
        _fits(g, node.inputs[2])
        return node if len(node.inputs) == 3 else None

    def emit(self, g: Editor, node: ir.Node, match: ir.Node) -> None:
        out, total = node.outputs[0], node.outputs[3]
        shape, keep = g.shape(out), g.uses(total) > 0
        outputs = g.emit(
            "AddRmsNorm",
            list(node.inputs),
            node,
            shapes=[shape, shape if keep else None],
            like=out,
            domain=OURS,
            rule=self.name,
            epsilon=float(g.attribute(node, "epsilon")),
            keep=int(keep),
        )
        g.replace(out, outputs[0])
        if keep:
            g.replace(total, outputs[1])


class EmbedRmsNorm(Ours):
    """Pattern: SimplifiedLayerNormalization of rows gathered from a table. Becomes EmbedRmsNorm.

    Conditions: int64 tokens, rows of at most 16,384 elements.
    """

    ops = ("SimplifiedLayerNormalization",)
    source = "B. Zhang, R. Sennrich, Root Mean Square Layer Normalization, 2019"

    def match(self, g: Editor, node: ir.Node) -> ir.Node | None:
        gathered = g.node(node.inputs[0], "Gather")
        if gathered is None or gathered.inputs[0] is None or gathered.inputs[1] is None:
            return None
        if g.axis(gathered, 0) != 0 or len(g.shape(gathered.inputs[0]) or ()) != 2:
            return None
        if gathered.inputs[1].dtype != ir.DataType.INT64:
            raise Refusal(f"tokens are {gathered.inputs[1].dtype}, not int64")
        _fits(g, node.inputs[1])
        return gathered

    def emit(self, g: Editor, node: ir.Node, gathered: ir.Node) -> None:
        out = node.outputs[0]
        shape = g.shape(out)
        outputs = g.emit(
            "EmbedRmsNorm",
            [*gathered.inputs, node.inputs[1]],
            node,
            shapes=[shape, shape],
            like=out,
            domain=OURS,
            rule=self.name,
            epsilon=float(g.attribute(node, "epsilon")),
        )
        g.replace(out, outputs[0])
        g.replace(gathered.outputs[0], outputs[1])


def _fits(g: Editor, weight: ir.Value | None) -> None:
    width = (g.shape(weight) or (0,))[-1]
    if width > 16384:
        raise Refusal(f"a row of {width} does not fit the registers")


Kernel = Callable[[Sequence[Any], dict[str, Any]], Sequence[Any]]


def _kernel(name: str, *attributes: str) -> Kernel:
    """A function of ours, which takes these attributes of the node behind its inputs."""

    def run(inputs: Sequence[Any], a: dict[str, Any]) -> Sequence[Any]:
        from roundoff.kernels import llama

        made = getattr(llama, name)(*inputs, *(a[attribute] for attribute in attributes))
        return made if isinstance(made, tuple) else (made,)

    return run


def _add_rms_norm(inputs: Sequence[Any], a: dict[str, Any]) -> tuple[Any, ...]:
    from roundoff.kernels.llama import add_rms_norm

    x, residual, weight = inputs
    outputs = add_rms_norm(x, residual, weight, a["epsilon"], bool(a["keep"]))
    return outputs if a["keep"] else outputs[:1]


#: Operator of domain "roundoff" -> what runs it on torch tensors: (inputs, attributes) -> outputs.
KERNELS: dict[str, Kernel] = {
    "SiluMul": _kernel("silu_mul"),
    "RotaryQkv": _kernel("rotary_qkv", "num_heads", "kv_num_heads"),
    "CausalAttention": _kernel("causal_attention", "num_heads", "scale", "tf32"),
    "AddRmsNorm": _add_rms_norm,
    "EmbedRmsNorm": _kernel("embed_rms_norm", "epsilon"),
}

#: The rules of the tier, in the order in which they are tried.
EXPERIMENTAL: tuple[Rule, ...] = (
    RotaryQkv(),
    OwnAttention(),
    SiluTimesUp(),
    AddRmsNorm(),
    EmbedRmsNorm(),
)
