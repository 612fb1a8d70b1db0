"""Element by element: arithmetic, comparisons, choices, types."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ..converter import Converter, onnx_type
from .table import BOOL, FLOAT, INT64, fits, kind_of, shape_of, writes


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
    "relu": "Relu",
    "erf": "Erf",
    "floor": "Floor",
    "reciprocal": "Reciprocal",
}.items():
    writes(_name)(_unary(_op))


@writes("sigmoid")
def _sigmoid(c: Converter, node: Any, x: Any) -> ir.Value:
    value = c.tensor(x, kind_of(node))
    if kind_of(node) != FLOAT:
        return c.op("Sigmoid", value)
    # In float32 ONNX Runtime's own loses digits below -5 and is 0 below -18, on CUDA, too.
    return c.op("Exp", c.op("Neg", c.op("Softplus", c.op("Neg", value))))


@writes("rsqrt")
def _rsqrt(c: Converter, node: Any, x: Any) -> ir.Value:
    return c.op("Reciprocal", c.op("Sqrt", c.tensor(x, kind_of(node))))


@writes("silu")
def _silu(c: Converter, node: Any, x: Any) -> ir.Value:
    value = c.tensor(x, kind_of(node))
    return c.op("Mul", value, c.op("Sigmoid", value))


@writes("gelu")
def _gelu(c: Converter, node: Any, x: Any, approximate: str = "none") -> Any:
    if kind_of(node) == ir.DataType.DOUBLE:
        return NotImplemented  # ONNX Runtime has it in float32
    if not c.on_cpu and all(size == 1 for size in shape_of(node)):
        return NotImplemented  # ONNX Runtime's kernel of the tanh form fails for one element
    if c.opset >= 20:
        return c.op("Gelu", c.tensor(x), approximate=approximate)
    # Opset 20 defines it by these operators. Torch computes 16 bits in float32, too.
    value = c.tensor(x, FLOAT)
    half = c.op("Mul", value, c.tensor(0.5, FLOAT))
    if approximate == "none":
        bent = c.op("Erf", c.op("Mul", value, c.tensor(math.sqrt(0.5), FLOAT)))
    else:
        cube = c.op("Mul", c.op("Mul", value, value), value)
        inner = c.op("Add", value, c.op("Mul", cube, c.tensor(0.044715, FLOAT)))
        bent = c.op("Tanh", c.op("Mul", inner, c.tensor(math.sqrt(2 / math.pi), FLOAT)))
    return c.cast(c.op("Mul", half, c.op("Add", bent, c.tensor(1.0, FLOAT))), kind_of(node))


@writes("bitwise_not")
def _bitwise_not(c: Converter, node: Any, x: Any) -> ir.Value:
    return c.op("Not" if kind_of(node) == BOOL else "BitwiseNot", c.tensor(x))


@writes("alias", "clone", "detach", "lift_fresh_copy")
def _same(c: Converter, node: Any, x: Any, memory_format: Any = None) -> ir.Value:
    return c.tensor(x)


@writes("_to_copy", "prims.convert_element_type")
def _to(c: Converter, node: Any, x: Any, *_: Any, **__: Any) -> Any:
    before, after = x.meta["val"], node.meta["val"]
    if before.device != after.device and before.dim() and c.array(c.tensor(x)) is None:
        return NotImplemented  # a constant and a single number go where they are read
    return c.tensor(x, kind_of(node))


#: Types of 16 bits, with which torch computes in float32.
_SHORT = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _known(x: Any) -> Any:
    """A number, or what is known of a node: a fake tensor, or a number of sizes."""
    return x.meta["val"] if isinstance(x, torch.fx.Node) else x


def _is_number(x: Any) -> bool:
    """Whether an argument is a number of Python's, or one that sizes decide."""
    return not isinstance(_known(x), torch.Tensor)


def _is_other(x: Any, dtype: torch.dtype) -> bool:
    """Whether *x* is a tensor of one number, of another type that has more digits or range."""
    known = _known(x)
    if not isinstance(known, torch.Tensor) or known.dim():
        return False
    return known.dtype not in (dtype, torch.bool, torch.uint8, torch.int8)


def _is_held(x: Any, kind: ir.DataType) -> bool:
    """Whether *x* is a tensor, or a number that *kind* holds as float32 does."""
    known = _known(x)
    if isinstance(known, torch.Tensor):
        return True
    if isinstance(known, torch.SymInt):
        return False
    with np.errstate(over="ignore"):
        single = np.float32(float(known))
        return bool(np.isnan(single) or single.astype(kind.numpy()).astype(np.float32) == single)


def _is_cut(c: Converter, kind: ir.DataType) -> bool:
    """Whether onnxruntime 1.31's Min and Max get the order of numbers beyond 2**31 wrong."""
    return c.on_cpu and kind == INT64


def _binary(op: str, boolean: str | None = None) -> Callable[..., Any]:
    def write(c: Converter, node: Any, a: Any, b: Any, alpha: Any = 1) -> Any:
        kind, dtype, chosen = kind_of(node), node.meta["val"].dtype, op
        if kind == BOOL:
            chosen = boolean or op
        if alpha != 1:
            if kind.is_floating_point():
                if isinstance(alpha, torch.fx.Node) or alpha != -1:
                    return NotImplemented  # torch rounds the product and the sum once
                chosen = "Sub" if op == "Add" else "Add"
            elif kind == BOOL or not fits(alpha, dtype):
                return NotImplemented
        if op in ("Max", "Min") and _is_cut(c, kind):
            return NotImplemented
        if op == "Div" and not c.on_cpu and _is_on_processor(b):
            return _times_reciprocal(c, node, a, b)
        if kind in _SHORT and op in ("Add", "Sub", "Mul", "Div"):
            return _in_float32(c, chosen, node, a, b)
        if not fits(a, dtype) or not fits(b, dtype):
            return NotImplemented
        first, second = c.tensor(a, kind), c.tensor(b, kind)
        if not kind.is_floating_point() and alpha != 1:
            second = c.op("Mul", second, c.tensor(alpha, kind))
        return c.op(chosen, first, second)

    return write


def _is_on_processor(x: Any) -> bool:
    """Whether an argument is a number, or a tensor of one number that lies on the processor."""
    known = _known(x)
    return not isinstance(known, torch.Tensor) or (not known.dim() and known.device.type == "cpu")


def _times_reciprocal(c: Converter, node: Any, a: Any, b: Any) -> Any:
    """A quotient by a number, as torch computes it on CUDA: times the reciprocal, in float32.

    Its kernel is ``div_true_kernel_cuda``, in ATen's ``BinaryDivTrueKernel.cu``.
    """
    kind = kind_of(node)
    if _is_other(b, node.meta["val"].dtype) or not fits(b, torch.float32):
        return NotImplemented
    if isinstance(b, torch.fx.Node):
        reciprocal = c.op("Reciprocal", c.tensor(b, FLOAT))
    else:
        with np.errstate(divide="ignore", over="ignore"):
            reciprocal = c.constant(np.float32(1) / np.array(b, np.float32))
    if kind == FLOAT:
        return c.op("Mul", c.tensor(a, kind), reciprocal)
    wide = c.cast(c.tensor(a, kind), FLOAT)
    return c.cast(c.op("Mul", wide, reciprocal, shape=shape_of(node)), kind)


def _in_float32(c: Converter, op: str, node: Any, a: Any, b: Any) -> Any:
    """An operator of a type of 16 bits beside a number: torch takes the number as a float32.

    The result is rounded once. Where the type holds the number, this is what the operator does
    without casts.
    """
    kind, dtype = kind_of(node), node.meta["val"].dtype
    if _is_other(a, dtype) or _is_other(b, dtype):
        return NotImplemented  # torch reads it as float32 where it lies on the processor
    if _is_held(a, kind) and _is_held(b, kind):
        return c.op(op, c.tensor(a, kind), c.tensor(b, kind))
    if not fits(a, torch.float32) or not fits(b, torch.float32):
        return NotImplemented
    wide = [
        c.tensor(x, FLOAT) if _is_number(x) else c.cast(c.tensor(x, kind), FLOAT) for x in (a, b)
    ]
    return c.cast(c.op(op, *wide, shape=shape_of(node)), kind)


for _name, _op, _boolean in (
    ("add", "Add", "Or"),
    ("sub", "Sub", None),
    ("mul", "Mul", "And"),
    ("bitwise_and", "BitwiseAnd", "And"),
    ("bitwise_or", "BitwiseOr", "Or"),
):
    writes(f"{_name}.Tensor", f"{_name}.Scalar")(_binary(_op, _boolean))
for _name, _op in (
    ("div.Tensor", "Div"),
    ("maximum", "Max"),
    ("minimum", "Min"),
):
    writes(_name)(_binary(_op))


@writes("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def _pow(c: Converter, node: Any, a: Any, b: Any) -> Any:
    kind = kind_of(node)
    if not isinstance(b, (bool, torch.fx.Node)) and b in _POWERS and kind != BOOL:
        return _power(c, c.tensor(a, kind), b)
    if not kind.is_floating_point() or kind in _SHORT:
        return NotImplemented  # ONNX Runtime computes in float64 what torch wraps around
    if any(isinstance(x, torch.fx.Node) and _is_number(x) for x in (a, b)):
        return NotImplemented  # its value decides how torch computes
    if _is_number(b) and float(np.float32(b)) != b:
        return NotImplemented  # of few elements torch takes the exponent in float64
    if not _is_number(b) and all(size == 1 for size in shape_of(b)):
        return NotImplemented  # ONNX Runtime multiplies where it finds 2 or 3, torch does not
    return c.op("Pow", c.tensor(a, kind), c.tensor(b, kind))


#: Exponents that torch takes apart, and those of integers, which it multiplies.
_POWERS = (0.5, -0.5, -1, -2, *range(1, 65))


def _power(c: Converter, x: ir.Value, exponent: Any) -> Any:
    """A power of torch's own steps: ONNX Runtime's Pow of one element rounds in other ones.

    Products of integers wrap around; its Pow computes in float64, and saturates.
    """
    assert x.dtype is not None
    if exponent == 1:
        return x
    if not x.dtype.is_floating_point():
        return _product(c, x, int(exponent)) if exponent > 0 else NotImplemented
    if exponent in (2, 3):
        return _product(c, x, int(exponent))
    if x.dtype in _SHORT:
        return NotImplemented
    if exponent == 0.5:
        return c.op("Sqrt", x)  # NaN of -inf
    if exponent == -0.5:
        return c.op("Reciprocal", c.op("Sqrt", x))
    if exponent < 0:
        return c.op("Reciprocal", _product(c, x, int(-exponent)))
    return c.op("Pow", x, c.tensor(float(exponent), x.dtype))


def _product(c: Converter, x: ir.Value, times: int) -> ir.Value:
    """x * x * ..., by squares: of integers all orders are equal, and of floats there is one."""
    result, square = None, x
    while times:
        if times % 2:
            result = square if result is None else c.op("Mul", result, square)
        times //= 2
        if times:
            square = c.op("Mul", square, square)
    assert result is not None
    return result


def _compared(op: str, negated: bool = False) -> Callable[..., Any]:
    def write(c: Converter, node: Any, a: Any, b: Any) -> ir.Value:
        known = [x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in (a, b)]
        plain = [1 if isinstance(k, torch.SymInt) else k for k in known]
        kind = onnx_type(torch.result_type(*plain))
        if kind == BOOL and op != "Equal":
            kind = ir.DataType.INT32
        made = c.op(op, c.tensor(a, kind), c.tensor(b, kind), shape=shape_of(node), dtype=BOOL)
        return c.op("Not", made) if negated else made

    return write


for _name, _op, _negated in (
    ("eq", "Equal", False),
    ("ne", "Equal", True),
    ("lt", "Less", False),
    ("le", "LessOrEqual", False),
    ("gt", "Greater", False),
    ("ge", "GreaterOrEqual", False),
):
    writes(f"{_name}.Tensor", f"{_name}.Scalar")(_compared(_op, _negated))


@writes("where.self")
def _where(c: Converter, node: Any, condition: Any, a: Any, b: Any) -> Any:
    kind = kind_of(node)
    return _chosen(c, c.tensor(condition, BOOL), c.tensor(a, kind), c.tensor(b, kind))


@writes("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(c: Converter, node: Any, x: Any, mask: Any, value: Any) -> Any:
    if not fits(value, node.meta["val"].dtype):
        return NotImplemented
    return _chosen(c, c.tensor(mask, BOOL), c.tensor(value, kind_of(node)), c.tensor(x))


def _chosen(c: Converter, condition: ir.Value, first: ir.Value, second: ir.Value) -> Any:
    """*first* where the condition is true, else *second*.

    Of its first choice ONNX Runtime's Where makes a -0 to 0 on a processor. One that is no constant
    becomes the second choice, under the opposite condition.
    """
    floating = first.dtype is not None and first.dtype.is_floating_point()
    if not c.on_cpu or not floating or not _may_be_minus_zero(c, first):
        return c.op("Where", condition, first, second)
    if _may_be_minus_zero(c, second):
        return NotImplemented
    # Equal, as ONNX Runtime swaps the choices of a Not.
    opposite = c.op("Equal", condition, c.constant(np.array(False)), dtype=BOOL)
    return c.op("Where", opposite, second, first)


def _may_be_minus_zero(c: Converter, value: ir.Value) -> bool:
    array = c.array(value)
    return array is None or bool(np.any((array == 0) & np.signbit(array.astype(np.float64))))


@writes("clamp")
def _clamp(c: Converter, node: Any, x: Any, min: Any = None, max: Any = None) -> Any:  # noqa: A002
    bounds = [bound for bound in (min, max) if bound is not None]
    if any(isinstance(bound, float) and math.isnan(bound) for bound in bounds):
        return NotImplemented  # torch gives NaN on a processor, and x on a GPU
    kind = kind_of(node)
    if not all(fits(bound, node.meta["val"].dtype) for bound in bounds) or _is_cut(c, kind):
        return NotImplemented
    value = c.tensor(x, kind)
    for op, bound in (("Max", min), ("Min", max)):
        if bound is not None:
            value = c.op(op, value, c.tensor(bound, kind))
    return value


@writes("softplus")
def _softplus(c: Converter, node: Any, x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    # From the threshold on torch returns x itself: nearer than the type's rounding from 20 on.
    if beta != 1 or threshold < 20:
        return NotImplemented
    return c.op("Softplus", c.tensor(x))
