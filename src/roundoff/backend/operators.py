"""The table of ATen operators that are written as ONNX directly: ``(converter, node, *args)``.

Each follows the schema of the operator (``torch.ops.aten.<name>.<overload>._schema``) and the
definition of the ONNX operators it emits (https://onnx.ai/onnx/operators/). What an entry does not
cover it leaves to torch's exporter, by returning ``NotImplemented``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from roundoff.fusion.editor import Dim

from . import capture  # the operators of ours that the table names
from .converter import Converter, dims_of, onnx_type
from .sizes import dim, dims

__all__ = ["TABLE"]

assert capture.STRIDED

#: Overload -> what writes it.
TABLE: dict[Any, Callable[..., Any]] = {}
_BOOL, _INT64, _FLOAT = ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.FLOAT


def _overload(name: str) -> Any:
    space, name, *overload = name.split(".")
    packet = getattr(getattr(torch.ops, space), name)
    return getattr(packet, overload[0] if overload else "default")


def _writes(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function for overloads: ``add.Tensor`` of ATen, or with another namespace."""

    def enter(write: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            space = "" if name.split(".")[0] in ("aten", "prims", "roundoff") else "aten."
            TABLE[_overload(space + name)] = write
        return write

    return enter


def _kind(node: Any) -> ir.DataType:
    return onnx_type(node.meta["val"].dtype)


def _out(node: Any) -> list[Dim]:
    return dims(node.meta["val"].shape)


def _sizes(arguments: Sequence[Any]) -> list[Any]:
    """Sizes among arguments: numbers and nodes of symbolic integers."""
    return [dim(a.meta["val"]) if isinstance(a, torch.fx.Node) else dim(a) for a in arguments]


def _number(argument: Any) -> Any:
    """One integer argument, as a number or an expression."""
    return _sizes([argument])[0]


def _rank(x: Any) -> int:
    return len(x.meta["val"].shape)


def _axis(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


# Element by element


def _unary(op: str) -> Callable[..., Any]:
    def write(c: Converter, node: Any, x: Any) -> ir.Value:
        return c.op(op, c.tensor(x, _kind(node)))

    return write


for _name, _op in {
    "neg": "Neg", "abs": "Abs", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "cos": "Cos",
    "sin": "Sin", "tanh": "Tanh", "sigmoid": "Sigmoid", "relu": "Relu", "erf": "Erf",
    "floor": "Floor", "ceil": "Ceil", "reciprocal": "Reciprocal", "logical_not": "Not",
}.items():  # fmt: skip
    _writes(_name)(_unary(_op))


@_writes("rsqrt")
def _rsqrt(c: Converter, node: Any, x: Any) -> ir.Value:
    return c.op("Reciprocal", c.op("Sqrt", c.tensor(x, _kind(node))))


@_writes("silu")
def _silu(c: Converter, node: Any, x: Any) -> ir.Value:
    value = c.tensor(x, _kind(node))
    return c.op("Mul", value, c.op("Sigmoid", value))


@_writes("gelu")
def _gelu(c: Converter, node: Any, x: Any, approximate: str = "none") -> Any:
    if c.opset < 20:
        return NotImplemented
    return c.op("Gelu", c.tensor(x), approximate=approximate)


@_writes("bitwise_not")
def _bitwise_not(c: Converter, node: Any, x: Any) -> ir.Value:
    return c.op("Not" if _kind(node) == _BOOL else "BitwiseNot", c.tensor(x))


@_writes("alias", "clone", "detach", "lift_fresh_copy", "contiguous")
def _same(c: Converter, node: Any, x: Any, memory_format: Any = None) -> ir.Value:
    return c.tensor(x)


@_writes("_to_copy", "prims.convert_element_type", "to.dtype")
def _to(c: Converter, node: Any, x: Any, *_: Any, **__: Any) -> Any:
    before, after = x.meta["val"], node.meta["val"]
    if before.device != after.device:
        return NotImplemented
    return c.tensor(x, _kind(node))


def _binary(op: str, boolean: str | None = None) -> Callable[..., Any]:
    def write(c: Converter, node: Any, a: Any, b: Any, alpha: Any = 1) -> ir.Value:
        kind = _kind(node)
        second = c.tensor(b, kind)
        if alpha != 1:
            second = c.op("Mul", second, c.tensor(alpha, kind))
        chosen = boolean if kind == _BOOL and boolean else op
        return c.op(chosen, c.tensor(a, kind), second, shape=_out(node), dtype=kind)

    return write


for _name, _op, _boolean in (
    ("add", "Add", "Or"), ("sub", "Sub", None), ("mul", "Mul", "And"),
    ("bitwise_and", "BitwiseAnd", "And"), ("bitwise_or", "BitwiseOr", "Or"),
    ("bitwise_xor", "BitwiseXor", "Xor"),
):  # fmt: skip
    _writes(f"{_name}.Tensor", f"{_name}.Scalar")(_binary(_op, _boolean))
for _name, _op in (("div.Tensor", "Div"), ("div.Scalar", "Div"), ("logical_and", "And"),
                   ("logical_or", "Or"), ("maximum", "Max"), ("minimum", "Min")):  # fmt: skip
    _writes(_name)(_binary(_op))


@_writes("rsub.Scalar", "rsub.Tensor")
def _rsub(c: Converter, node: Any, a: Any, b: Any, alpha: Any = 1) -> ir.Value:
    return _binary("Sub")(c, node, b, a) if alpha == 1 else NotImplemented


@_writes("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
def _pow(c: Converter, node: Any, a: Any, b: Any) -> ir.Value:
    kind = _kind(node)
    return c.op("Pow", c.tensor(a, kind), c.tensor(b, kind), shape=_out(node), dtype=kind)


def _compared(op: str, negated: bool = False) -> Callable[..., Any]:
    def write(c: Converter, node: Any, a: Any, b: Any) -> ir.Value:
        known = [x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in (a, b)]
        plain = [k if isinstance(k, torch.Tensor) else _python(k) for k in known]
        kind = onnx_type(torch.result_type(*plain))
        chosen = op
        if kind == _BOOL and op != "Equal":
            kind = ir.DataType.INT32
        first, second = c.tensor(a, kind), c.tensor(b, kind)
        made = c.op(chosen, first, second, shape=_out(node), dtype=_BOOL)
        return c.op("Not", made) if negated else made

    return write


def _python(number: Any) -> Any:
    return 1 if isinstance(number, torch.SymInt) else number


for _name, _op, _negated in (
    ("eq", "Equal", False), ("ne", "Equal", True), ("lt", "Less", False),
    ("le", "LessOrEqual", False), ("gt", "Greater", False), ("ge", "GreaterOrEqual", False),
):  # fmt: skip
    _writes(f"{_name}.Tensor", f"{_name}.Scalar")(_compared(_op, _negated))


@_writes("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(c: Converter, node: Any, condition: Any, a: Any, b: Any) -> ir.Value:
    kind = _kind(node)
    inputs = (c.tensor(condition, _BOOL), c.tensor(a, kind), c.tensor(b, kind))
    return c.op("Where", *inputs, shape=_out(node), dtype=kind)


@_writes("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(c: Converter, node: Any, x: Any, mask: Any, value: Any) -> ir.Value:
    kind = _kind(node)
    inputs = (c.tensor(mask, _BOOL), c.tensor(value, kind), c.tensor(x))
    return c.op("Where", *inputs, shape=_out(node), dtype=kind)


@_writes("clamp")
def _clamp(c: Converter, node: Any, x: Any, min: Any = None, max: Any = None) -> ir.Value:  # noqa: A002
    kind = _kind(node)
    value = c.tensor(x, kind)
    for op, bound in (("Max", min), ("Min", max)):
        if bound is not None:
            value = c.op(op, value, c.tensor(bound, kind))
    return value


# Shapes


@_writes("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims",
         "flatten.using_ints", "_reshape_copy")  # fmt: skip
def _reshaped(c: Converter, node: Any, x: Any, *_: Any, **__: Any) -> ir.Value:
    return c.reshape(c.tensor(x), _out(node))


@_writes("expand")
def _expand(c: Converter, node: Any, x: Any, *_: Any, **__: Any) -> ir.Value:
    value, after = c.tensor(x), _out(node)
    before = [*([1] * (len(after) - _rank(x))), *dims_of(value)]
    if before == after and len(before) == _rank(x):
        return value
    # One is what Expand keeps: a size is computed only where it is new.
    target: list[Dim] = [1 if b == a else a for b, a in zip(before, after, strict=True)]
    return c.op("Expand", value, c.shape(target), shape=after)


@_writes("permute")
def _permute(c: Converter, node: Any, x: Any, order: Sequence[int]) -> ir.Value:
    perm = [_axis(p, len(order)) for p in order]
    value = c.tensor(x)
    return value if perm == sorted(perm) else c.op("Transpose", value, shape=_out(node), perm=perm)


@_writes("transpose.int", "t")
def _transpose(c: Converter, node: Any, x: Any, one: int = 0, two: int = 1) -> ir.Value:
    perm = list(range(_rank(x)))
    if not perm or (len(perm) < 2 and node.target is torch.ops.aten.t.default):
        return c.tensor(x)
    one, two = _axis(one, len(perm)), _axis(two, len(perm))
    perm[one], perm[two] = perm[two], perm[one]
    return _permute(c, node, x, perm)


@_writes("slice.Tensor")
def _slice(
    c: Converter, node: Any, x: Any, axis: int = 0, start: Any = None, end: Any = None,
    step: int = 1,
) -> ir.Value:  # fmt: skip
    value, axis = c.tensor(x), _axis(axis, _rank(x))
    start = 0 if start is None else _number(start)
    end = (1 << 63) - 1 if end is None else _number(end)
    if step == 1 and (dims_of(value) == _out(node) or (start, end) == (0, (1 << 63) - 1)):
        return value
    bounds = [c.size(start), c.size(end), c.ints([axis]), c.ints([step])]
    return c.op("Slice", value, *bounds, shape=_out(node))


@_writes("select.int")
def _select(c: Converter, node: Any, x: Any, axis: int, index: Any) -> ir.Value:
    at = c.reshape(c.size(_number(index)), [])
    if isinstance(index, int):
        at = c.constant(np.array(index, np.int64))
    return c.op("Gather", c.tensor(x), at, shape=_out(node), axis=_axis(axis, _rank(x)))


@_writes("cat")
def _cat(c: Converter, node: Any, tensors: Sequence[Any], axis: int = 0) -> ir.Value:
    kind, rank = _kind(node), len(_out(node))
    # An empty vector beside tensors of more axes counts as nothing.
    parts = [c.tensor(t, kind) for t in tensors if _rank(t) == rank]
    axis = _axis(axis, rank)
    parts = [p for p in parts if dims_of(p)[axis] != 0] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    return c.op("Concat", *parts, shape=_out(node), axis=axis)


@_writes("stack")
def _stack(c: Converter, node: Any, tensors: Sequence[Any], axis: int = 0) -> ir.Value:
    out = _out(node)
    axis = _axis(axis, len(out))
    thin = [*out[:axis], 1, *out[axis + 1 :]]
    parts = [c.reshape(c.tensor(t, _kind(node)), thin) for t in tensors]
    return c.op("Concat", *parts, shape=out, axis=axis)


@_writes("split.Tensor", "split_with_sizes")
def _split(c: Converter, node: Any, x: Any, _: Any, axis: int = 0) -> Any:
    axis = _axis(axis, _rank(x))
    examples = node.meta["val"]
    lengths = [dim(e.shape[axis]) for e in examples]
    outputs = [c.value_like(e) for e in examples]
    c.add("Split", [c.tensor(x), c.shape(lengths)], outputs, axis=axis)
    return outputs


def _getitem(c: Converter, node: Any, source: Any, index: int) -> Any:
    return c.values[source][index]


TABLE[operator.getitem] = _getitem


# New tensors


def _filled(c: Converter, node: Any, number: Any) -> ir.Value:
    shape, kind = _out(node), _kind(node)
    value = c.tensor(number, kind)
    if not shape:
        return value
    sizes = [d for d in shape if isinstance(d, int)]
    array = c.array(value)
    if len(sizes) == len(shape) and math.prod(sizes) <= 64 and array is not None:
        return c.constant(np.full(sizes, array))
    return c.op("Expand", value, c.shape(shape), shape=shape)


@_writes("full", "full_like", "new_full")
def _full(c: Converter, node: Any, like: Any, *rest: Any, fill_value: Any = None, **_: Any) -> Any:
    return _filled(c, node, rest[-1] if rest else fill_value)


@_writes("zeros", "zeros_like", "new_zeros", "empty.memory_format", "new_empty", "empty_like")
def _zeros(c: Converter, node: Any, *_: Any, **__: Any) -> ir.Value:
    return _filled(c, node, 0)


@_writes("ones", "ones_like", "new_ones")
def _ones(c: Converter, node: Any, *_: Any, **__: Any) -> ir.Value:
    return _filled(c, node, 1)


@_writes("scalar_tensor")
def _scalar(c: Converter, node: Any, number: Any, **_: Any) -> ir.Value:
    return c.tensor(number, _kind(node))


@_writes("arange", "arange.start", "arange.start_step")
def _arange(c: Converter, node: Any, one: Any, two: Any = None, step: Any = 1, **_: Any) -> Any:
    kind = _kind(node)
    start, end = (0, one) if two is None else (one, two)
    if kind not in (_INT64, ir.DataType.INT32, _FLOAT):
        return NotImplemented
    bounds = [c.tensor(x, kind) for x in (start, end, step)]
    return c.op("Range", *bounds, shape=_out(node), dtype=kind)


@_writes("tril", "triu")
def _tri(c: Converter, node: Any, x: Any, diagonal: int = 0) -> ir.Value:
    upper = int(node.target is torch.ops.aten.triu.default)
    return c.op("Trilu", c.tensor(x), c.constant(np.array(diagonal, np.int64)), upper=upper)


# Reductions


def _reduced(op: str) -> Callable[..., Any]:
    def write(
        c: Converter, node: Any, x: Any, axes: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> ir.Value:
        listed = [axes] if isinstance(axes, int) else list(axes or range(_rank(x)))
        value = c.tensor(x, _kind(node))
        if not _rank(x):
            return value
        axes = sorted(_axis(a, _rank(x)) for a in listed)
        inputs: list[ir.Value] = [value, c.ints(axes)]
        return c.op(op, *inputs, shape=_out(node), keepdims=int(keepdim))

    return write


for _name, _op in (("mean.dim", "ReduceMean"), ("mean", "ReduceMean"), ("amax", "ReduceMax"),
                   ("amin", "ReduceMin"), ("sum.dim_IntList", "ReduceSum"),
                   ("sum", "ReduceSum")):  # fmt: skip
    _writes(_name)(_reduced(_op))


def _without_axes(write: Callable[..., Any]) -> Callable[..., Any]:
    return lambda c, node, x, dtype=None: write(c, node, x)


for _name in ("mean", "sum"):
    TABLE[_overload(f"aten.{_name}")] = _without_axes(TABLE[_overload(f"aten.{_name}")])


@_writes("argmax")
def _argmax(c: Converter, node: Any, x: Any, axis: Any = None, keepdim: bool = False) -> Any:
    if axis is None or not _rank(x):
        return NotImplemented
    return c.op("ArgMax", c.tensor(x), shape=_out(node), dtype=_INT64, axis=axis,
                keepdims=int(keepdim))  # fmt: skip


@_writes("any.dim", "all.dim")
def _any(c: Converter, node: Any, x: Any, axis: int, keepdim: bool = False) -> Any:
    if not _rank(x):
        return NotImplemented
    op = "ReduceMax" if node.target is torch.ops.aten.any.dim else "ReduceMin"
    number = c.cast(c.tensor(x, _BOOL), ir.DataType.INT32)
    found = c.op(op, number, c.ints([_axis(axis, _rank(x))]), shape=_out(node),
                 keepdims=int(keepdim))  # fmt: skip
    return c.cast(found, _BOOL)


@_writes("cumsum")
def _cumsum(c: Converter, node: Any, x: Any, axis: int, dtype: Any = None) -> Any:
    if not _rank(x):
        return NotImplemented
    at = c.constant(np.array(_axis(axis, _rank(x)), np.int64))
    return c.op("CumSum", c.tensor(x, _kind(node)), at)


def _soft(op: str) -> Callable[..., Any]:
    def write(c: Converter, node: Any, x: Any, axis: int, wider: bool = False) -> Any:
        if not _rank(x):
            return NotImplemented
        return c.op(op, c.tensor(x, _kind(node)), axis=_axis(axis, _rank(x)))

    return write


_writes("_softmax")(_soft("Softmax"))
_writes("_log_softmax")(_soft("LogSoftmax"))


@_writes("native_layer_norm")
def _layer_norm(
    c: Converter, node: Any, x: Any, shape: Sequence[Any], weight: Any, bias: Any, eps: Any
) -> Any:
    others = [u for u in node.users if u.args[1] != 0]
    if any(u.users for u in others) or weight is None:
        return NotImplemented
    inputs = [c.tensor(t) if t is not None else None for t in (x, weight, bias)]
    number = _constant(c, eps)
    if number is None:
        return NotImplemented
    out = c.op("LayerNormalization", *inputs, axis=-len(shape), epsilon=float(number))
    return [out, None, None]


def _constant(c: Converter, x: Any) -> float | None:
    if not isinstance(x, torch.fx.Node):
        return float(x)
    value = c.values.get(x)
    array = c.array(value) if isinstance(value, ir.Value) else None
    return None if array is None else float(array)


# Products


@_writes("aten.linear", "roundoff.linear")
def _linear(c: Converter, node: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    if _rank(weight) != 2:
        return NotImplemented
    out = _out(node)
    if _rank(x) == 2 and bias is not None:
        inputs = (c.tensor(x), c.tensor(weight), c.tensor(bias))
        return c.op("Gemm", *inputs, shape=out, transB=1)
    w = c.tensor(weight)
    turned = c.op("Transpose", w, shape=dims_of(w)[::-1], perm=[1, 0])
    product = c.op("MatMul", c.tensor(x), turned, shape=out)
    return product if bias is None else c.op("Add", product, c.tensor(bias), shape=out)


@_writes("aten.matmul", "roundoff.matmul", "mm", "bmm")
def _matmul(c: Converter, node: Any, a: Any, b: Any) -> Any:
    if node.meta["val"].dtype != a.meta["val"].dtype or not _out(node):
        return NotImplemented
    return c.op("MatMul", c.tensor(a), c.tensor(b), shape=_out(node))


@_writes("addmm")
def _addmm(
    c: Converter, node: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    if _rank(bias) > 2 or not node.meta["val"].dtype.is_floating_point:
        return NotImplemented
    inputs = (c.tensor(a), c.tensor(b), c.tensor(bias))
    return c.op("Gemm", *inputs, shape=_out(node), alpha=float(alpha), beta=float(beta))


@_writes("roundoff.attention")
def _attention(
    c: Converter, node: Any, query: Any, key: Any, value: Any, mask: Any, is_causal: bool,
    scale: Any, grouped: bool,
) -> Any:  # fmt: skip
    """torch's scaled dot-product attention, spelled out; rows that see no key are zero.

    torch's exporter shuts keys out with the lowest finite number, which makes such a row the
    mean of all values; torch itself makes it zero.
    """
    kind, out = _kind(node), _out(node)
    q, k, v = (c.tensor(x) for x in (query, key, value))
    factor = _constant(c, 1 / math.sqrt(int(dims_of(q)[-1])) if scale is None else scale)
    if factor is None or not isinstance(dims_of(q)[-1], int):
        return NotImplemented
    if grouped:
        k, v = (_repeated(c, x, dims_of(q)[1]) for x in (k, v))
    scores = [*dims_of(q)[:3], dims_of(k)[2]]
    bias = None if mask is None else c.tensor(mask)
    if is_causal:
        square = scores[2:]
        ones = c.op("Expand", c.constant(np.array(True)), c.shape(square), shape=square)
        bias = c.op("Trilu", ones, c.constant(np.array(0, np.int64)), upper=0)
    if bias is not None and bias.dtype == _BOOL:
        zero, low = (c.tensor(n, kind) for n in (0.0, -math.inf))
        bias = c.op("Where", bias, zero, low, dtype=kind)
    k_shape = dims_of(k)
    turned = c.op("Transpose", k, shape=[*k_shape[:2], k_shape[3], k_shape[2]], perm=[0, 1, 3, 2])
    scaled = c.op("Mul", q, c.tensor(factor, kind))
    product = c.op("MatMul", scaled, turned, shape=scores)
    if bias is not None:
        product = c.op("Add", product, bias)
    probabilities = c.op("Softmax", product, axis=-1)
    if bias is not None and not is_causal:
        some = [*dims_of(bias)[:-1], 1]
        wide = c.cast(bias, _FLOAT)  # ONNX Runtime on CUDA has no maximum in 16 bits
        most = c.op("ReduceMax", wide, c.ints([-1]), shape=some, keepdims=1)
        dead = c.op("Equal", most, c.tensor(-math.inf, _FLOAT), dtype=_BOOL)
        probabilities = c.op("Where", dead, c.tensor(0.0, kind), probabilities, shape=scores,
                             dtype=kind)  # fmt: skip
    return c.op("MatMul", probabilities, v, shape=out)


def _repeated(c: Converter, x: ir.Value, heads: Dim) -> ir.Value:
    """Keys or values with each head repeated for the queries of its group."""
    batch, groups, length, head = dims_of(x)
    times = int(heads) // int(groups)
    if times == 1:
        return x
    thin = c.reshape(x, [batch, groups, 1, length, head])
    wide = c.op("Expand", thin, c.ints([1, 1, times, 1, 1]),
                shape=[batch, groups, times, length, head])  # fmt: skip
    return c.reshape(wide, [batch, heads, length, head])


# Elements by index


@_writes("embedding")
def _embedding(c: Converter, node: Any, table: Any, ids: Any, *_: Any, **__: Any) -> ir.Value:
    return c.op("Gather", c.tensor(table), c.tensor(ids), shape=_out(node), axis=0)


@_writes("index_select")
def _index_select(c: Converter, node: Any, x: Any, axis: int, index: Any) -> Any:
    if not _rank(x) or not _rank(index):
        return NotImplemented
    return c.op("Gather", c.tensor(x), c.tensor(index), shape=_out(node), axis=axis)


@_writes("gather")
def _gather(c: Converter, node: Any, x: Any, axis: int, index: Any, **_: Any) -> Any:
    if not _rank(x) or not _rank(index):
        return NotImplemented
    inputs = (c.tensor(x), c.tensor(index, _INT64))
    return c.op("GatherElements", *inputs, shape=_out(node), axis=axis)


@_writes("index.Tensor")
def _index(c: Converter, node: Any, x: Any, indices: Sequence[Any]) -> Any:
    used = [(i, t) for i, t in enumerate(indices) if t is not None]
    if any(not t.meta["val"].dtype.is_signed for _, t in used):
        return NotImplemented  # bool and bytes choose by condition
    out = _out(node)
    if len(used) == 1:
        axis, index = used[0]
        return c.op("Gather", c.tensor(x), c.tensor(index, _INT64), shape=out, axis=axis)
    if [i for i, _ in used] != list(range(len(used))):
        return NotImplemented
    value = c.tensor(x)
    whole = _whole(dims_of(value), [t for _, t in used])
    if whole is not None and len(used) == _rank(x) and len(whole) == len(out):
        return c.reshape(value, out)
    common = out[: len(out) - (_rank(x) - len(used))]
    parts = []
    for _, t in used:
        index = c.reshape(
            c.tensor(t, _INT64), [1] * (len(common) - _rank(t)) + dims_of(c.tensor(t))
        )
        if dims_of(index) != common:
            index = c.op("Expand", index, c.shape(common), shape=common)
        parts.append(c.reshape(index, [*common, 1]))
    joined = c.op("Concat", *parts, shape=[*common, len(parts)], axis=len(common))
    return c.op("GatherND", value, joined, shape=out)


def _whole(sizes: Sequence[Dim], indices: Sequence[Any]) -> list[Dim] | None:
    """The result's sizes where the indices name every element once, in order.

    Each is a range over its axis, and lies along an axis of the result of its own, in order, as
    transformers' masks are indexed.
    """
    rank = max(_rank(t) for t in indices)
    result: list[Dim] = [1] * rank
    last = -1
    for size, t in zip(sizes, indices, strict=True):
        own = dims(t.meta["val"].shape)
        long = [i + rank - len(own) for i, d in enumerate(own) if d != 1]
        if size == 1 and not long:
            continue
        if len(long) != 1 or long[0] <= last or not _is_range(t, size):
            return None
        last = long[0]
        result[last] = size
    return result


def _is_range(node: Any, size: Dim) -> bool:
    aten = torch.ops.aten
    while node.target in (aten.unsqueeze.default, aten.view.default, aten.alias.default):
        node = node.args[0]
    if node.target is not aten.arange.default:
        return False
    end = node.args[0]
    return (dim(end.meta["val"]) if isinstance(end, torch.fx.Node) else end) == size


@_writes("index_put")
def _index_put(
    c: Converter, node: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False
) -> Any:
    used = [t for t in indices if t is not None]
    if accumulate or len(used) != 1 or indices[0] is None or _rank(used[0]) != 1:
        return NotImplemented
    if not used[0].meta["val"].dtype.is_signed:
        return NotImplemented
    rows = [*dims(used[0].meta["val"].shape), *_out(node)[1:]]
    new = c.tensor(values, _kind(node))
    if dims_of(new) != rows:
        new = c.op("Expand", new, c.shape(rows), shape=rows)
    at = c.reshape(c.tensor(used[0], _INT64), [rows[0], 1])
    return c.op("ScatterND", c.tensor(x), at, new)


@_writes("index_copy")
def _index_copy(c: Converter, node: Any, x: Any, axis: int, index: Any, source: Any) -> Any:
    if not _rank(x) or _rank(index) != 1:
        return NotImplemented
    axis, new = _axis(axis, _rank(x)), c.tensor(source, _kind(node))
    shape = dims_of(new)
    thin: list[Dim] = [1] * len(shape)
    thin[axis] = shape[axis]
    at = c.reshape(c.tensor(index, _INT64), thin)
    target: list[Dim] = [1 if i == axis else d for i, d in enumerate(shape)]
    if any(d != 1 for d in target):
        at = c.op("Expand", at, c.shape(target), shape=shape)
    return c.op("ScatterElements", c.tensor(x), at, new, axis=axis)


@_writes("copy_")
def _copy_into(
    c: Converter, node: Any, target: Any, source: Any, non_blocking: bool = False
) -> Any:
    """A write to an input, which AOTAutograd leaves at the end of the graph."""
    value, out = c.tensor(source, _kind(node)), _out(node)
    if dims_of(value) != out:
        value = c.op("Expand", value, c.shape(out), shape=out)
    c.written[target] = value
    return value


@_writes("_assert_async.msg", "_assert_scalar")
def _dropped(c: Converter, node: Any, *_: Any, **__: Any) -> None:
    return None
