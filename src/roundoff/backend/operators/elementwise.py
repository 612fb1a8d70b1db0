"""Element by element: arithmetic, comparisons, choices, types."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from roundoff.fusion.editor import Dim

from ..converter import Converter, dims_of, onnx_type
from .table import BOOL, DOUBLE, fits, kind_of, shape_of, writes


def _unary(op: str) -> Callable[..., Any]:
    def write(c: Converter, node: Any, x: Any) -> ir.Value:
        return c.op(op, c.tensor(x, kind_of(node)))

    return write


for _name, _op in {
    "neg": "Neg",
    "abs": "Abs",
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "cos": "Cos",
    "sin": "Sin",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "relu": "Relu",
    "erf": "Erf",
    "floor": "Floor",
    "ceil": "Ceil",
    "reciprocal": "Reciprocal",
    "logical_not": "Not",
}.items():
    writes(_name)(_unary(_op))


@writes("rsqrt")
def _rsqrt(c: Converter, node: Any, x: Any) -> ir.Value:
    return c.op("Reciprocal", c.op("Sqrt", c.tensor(x, kind_of(node))))


@writes("silu")
def _silu(c: Converter, node: Any, x: Any) -> ir.Value:
    value = c.tensor(x, kind_of(node))
    return c.op("Mul", value, c.op("Sigmoid", value))


@writes("gelu")
def _gelu(c: Converter, node: Any, x: Any, approximate: str = "none") -> Any:
    if c.opset < 20 or kind_of(node) == DOUBLE:
        return NotImplemented  # ONNX Runtime has no Erf in float64
    return c.op("Gelu", c.tensor(x), approximate=approximate)


@writes("bitwise_not")
def _bitwise_not(c: Converter, node: Any, x: Any) -> ir.Value:
    return c.op("Not" if kind_of(node) == BOOL else "BitwiseNot", c.tensor(x))


@writes("alias", "clone", "detach", "lift_fresh_copy", "contiguous")
def _same(c: Converter, node: Any, x: Any, memory_format: Any = None) -> ir.Value:
    return c.tensor(x)


@writes("_to_copy", "prims.convert_element_type", "to.dtype")
def _to(c: Converter, node: Any, x: Any, *_: Any, **__: Any) -> Any:
    before, after = x.meta["val"], node.meta["val"]
    if before.device != after.device and before.dim() and c.array(c.tensor(x)) is None:
        return NotImplemented  # a constant and a single number go where they are read
    return c.tensor(x, kind_of(node))


def _binary(op: str, boolean: str | None = None) -> Callable[..., Any]:
    def write(c: Converter, node: Any, a: Any, b: Any, alpha: Any = 1) -> Any:
        kind = kind_of(node)
        if not fits(alpha, node.meta["val"].dtype):
            return NotImplemented
        second = c.tensor(b, kind)
        if alpha != 1:
            second = c.op("Mul", second, c.tensor(alpha, kind))
        chosen = boolean if kind == BOOL and boolean else op
        return c.op(chosen, c.tensor(a, kind), second, shape=shape_of(node), dtype=kind)

    return write


for _name, _op, _boolean in (
    ("add", "Add", "Or"),
    ("sub", "Sub", None),
    ("mul", "Mul", "And"),
    ("bitwise_and", "BitwiseAnd", "And"),
    ("bitwise_or", "BitwiseOr", "Or"),
    ("bitwise_xor", "BitwiseXor", "Xor"),
):
    writes(f"{_name}.Tensor", f"{_name}.Scalar")(_binary(_op, _boolean))
for _name, _op in (
    ("div.Tensor", "Div"),
    ("div.Scalar", "Div"),
    ("logical_and", "And"),
    ("logical_or", "Or"),
    ("maximum", "Max"),
    ("minimum", "Min"),
):
    writes(_name)(_binary(_op))


@writes("rsub.Scalar", "rsub.Tensor")
def _rsub(c: Converter, node: Any, a: Any, b: Any, alpha: Any = 1) -> ir.Value:
    return _binary("Sub")(c, node, b, a) if alpha == 1 else NotImplemented


@writes("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def _pow(c: Converter, node: Any, a: Any, b: Any) -> Any:
    kind = kind_of(node)
    if not kind.is_floating_point() and b not in (2, 3):
        return NotImplemented  # ONNX Runtime computes in float64 what torch wraps around
    if kind != ir.DataType.FLOAT16 and b in (0.5, -0.5) and not isinstance(b, torch.fx.Node):
        root = c.op("Sqrt", c.tensor(a, kind))  # as torch does: NaN of -inf
        return root if b == 0.5 else c.op("Reciprocal", root)
    return c.op("Pow", c.tensor(a, kind), c.tensor(b, kind), shape=shape_of(node), dtype=kind)


def _compared(op: str, negated: bool = False) -> Callable[..., Any]:
    def write(c: Converter, node: Any, a: Any, b: Any) -> ir.Value:
        known = [x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in (a, b)]
        plain = [k if isinstance(k, torch.Tensor) else _python(k) for k in known]
        kind = onnx_type(torch.result_type(*plain))
        chosen = op
        if kind == BOOL and op != "Equal":
            kind = ir.DataType.INT32
        first, second = c.tensor(a, kind), c.tensor(b, kind)
        made = c.op(chosen, first, second, shape=shape_of(node), dtype=BOOL)
        return c.op("Not", made) if negated else made

    return write


def _python(number: Any) -> Any:
    return 1 if isinstance(number, torch.SymInt) else number


for _name, _op, _negated in (
    ("eq", "Equal", False),
    ("ne", "Equal", True),
    ("lt", "Less", False),
    ("le", "LessOrEqual", False),
    ("gt", "Greater", False),
    ("ge", "GreaterOrEqual", False),
):
    writes(f"{_name}.Tensor", f"{_name}.Scalar")(_compared(_op, _negated))


@writes("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(c: Converter, node: Any, condition: Any, a: Any, b: Any) -> Any:
    kind, dtype = kind_of(node), node.meta["val"].dtype
    if not (fits(a, dtype) and fits(b, dtype)):
        return NotImplemented
    return _chosen(c, node, c.tensor(condition, BOOL), c.tensor(a, kind), c.tensor(b, kind))


@writes("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(c: Converter, node: Any, x: Any, mask: Any, value: Any) -> Any:
    if not fits(value, node.meta["val"].dtype):
        return NotImplemented
    return _chosen(c, node, c.tensor(mask, BOOL), c.tensor(value, kind_of(node)), c.tensor(x))


def _chosen(
    c: Converter, node: Any, condition: ir.Value, first: ir.Value, second: ir.Value
) -> ir.Value:
    """*first* where the condition is true, else *second*.

    Of its first choice ONNX Runtime's Where makes a -0 to 0 on a processor. One that is no constant
    becomes the second choice, under the opposite condition; where the other may be -0, too, each is
    1 where it is not chosen, and the product is what is.
    """
    kind, out = kind_of(node), shape_of(node)
    options: dict[str, Any] = {"shape": out, "dtype": kind}
    if not c.on_cpu or not kind.is_floating_point() or not _may_be_minus_zero(c, first):
        return c.op("Where", condition, first, second, **options)
    # Equal, as ONNX Runtime swaps the choices of a Not.
    opposite = c.op("Equal", condition, c.constant(np.array(False)), dtype=BOOL)
    if not _may_be_minus_zero(c, second):
        return c.op("Where", opposite, second, first, **options)
    parts = []
    for hidden, value in ((opposite, first), (condition, second)):
        shape = _broadcast(dims_of(hidden), dims_of(value))
        parts.append(c.op("Where", hidden, c.tensor(1, kind), value, shape=shape, dtype=kind))
    return c.op("Mul", *parts, **options)


def _broadcast(a: list[Dim], b: list[Dim]) -> list[Dim]:
    """The sizes of what two tensors of these sizes make together."""
    pairs = itertools.zip_longest(reversed(a), reversed(b), fillvalue=1)
    return [n if m == 1 else m for m, n in pairs][::-1]


def _may_be_minus_zero(c: Converter, value: ir.Value) -> bool:
    array = c.array(value)
    return array is None or bool(np.any((array == 0) & np.signbit(array.astype(np.float64))))


@writes("clamp")
def _clamp(c: Converter, node: Any, x: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002
    bounds = [bound for bound in (min, max) if bound is not None]
    if any(isinstance(bound, float) and math.isnan(bound) for bound in bounds):
        return NotImplemented  # torch gives NaN on a processor, and x on a GPU
    if not all(fits(bound, node.meta["val"].dtype) for bound in bounds):
        return NotImplemented
    kind = kind_of(node)
    value = c.tensor(x, kind)
    for op, bound in (("Max", min), ("Min", max)):
        if bound is not None:
            value = c.op(op, value, c.tensor(bound, kind))
    return value


@writes("clamp_min")
def _clamp_min(c: Converter, node: Any, x: Any, bound: Any) -> Any:
    return _clamp(c, node, x, bound)


@writes("clamp_max")
def _clamp_max(c: Converter, node: Any, x: Any, bound: Any) -> Any:
    return _clamp(c, node, x, None, bound)


@writes("softplus")
def _softplus(c: Converter, node: Any, x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    # From the threshold on torch returns x itself: nearer than the type's rounding from 20 on.
    if beta != 1 or threshold < 20:
        return NotImplemented
    return c.op("Softplus", c.tensor(x))
