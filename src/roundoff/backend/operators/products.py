"""Matrix products and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from roundoff.fusion.editor import Dim

from ..converter import Converter, dims_of
from .table import BOOL, FLOAT, constant_of, fits, kind_of, rank_of, shape_of, writes


@writes("roundoff.linear")
def _linear(c: Converter, node: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    if rank_of(x) == 2 and bias is not None:
        return c.op("Gemm", c.tensor(x), c.tensor(weight), c.tensor(bias), transB=1)
    w = c.tensor(weight)
    turned = c.op("Transpose", w, shape=dims_of(w)[::-1], perm=[1, 0])
    product = c.op("MatMul", c.tensor(x), turned, shape=shape_of(node))
    return product if bias is None else c.op("Add", product, c.tensor(bias))


@writes("roundoff.matmul", "mm", "bmm")
def _matmul(c: Converter, node: Any, a: Any, b: Any) -> Any:
    return c.op("MatMul", c.tensor(a), c.tensor(b))


@writes("addmm")
def _addmm(
    c: Converter, node: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    if rank_of(bias) > 2 or not node.meta["val"].dtype.is_floating_point:
        return NotImplemented
    scales = constant_of(c, alpha), constant_of(c, beta)
    if None in scales:
        return NotImplemented
    inputs = (c.tensor(a), c.tensor(b), c.tensor(bias))
    return c.op("Gemm", *inputs, alpha=scales[0], beta=scales[1])


@writes("convolution")
def _convolution(
    c: Converter,
    node: Any,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[Any],
    padding: Sequence[Any],
    dilation: Sequence[Any],
    transposed: bool,
    output_padding: Sequence[Any],
    groups: int,
) -> Any:
    axes = rank_of(x) - 2
    strides, pads, dilations, more = (
        list(numbers) * (axes // len(numbers))
        for numbers in (stride, padding, dilation, output_padding)
    )
    inputs = [c.tensor(t) if t is not None else None for t in (x, weight, bias)]
    return c.op(
        "ConvTranspose" if transposed else "Conv",
        *inputs,
        strides=strides,
        pads=pads * 2,
        dilations=dilations,
        group=groups,
        output_padding=more if transposed else None,
    )


@writes("roundoff.attention")
def _attention(
    c: Converter,
    node: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    """torch's scaled dot-product attention, spelled out; rows that see no key are zero.

    torch's exporter shuts keys out with the lowest finite number, which makes such a row the
    mean of all values; torch itself makes it zero.
    """
    kind = kind_of(node)
    q, k, v = (c.tensor(x) for x in (query, key, value))
    head, heads = dims_of(q)[-1], (dims_of(q)[1], dims_of(k)[1])
    if not isinstance(head, int) or (enable_gqa and any(isinstance(n, str) for n in heads)):
        return NotImplemented
    factor = constant_of(c, 1 / math.sqrt(head) if scale is None else scale)
    if factor is None or not fits(factor, node.meta["val"].dtype, True):
        return NotImplemented
    if enable_gqa:
        k, v = (_repeated(c, x, dims_of(q)[1]) for x in (k, v))
    scores = [*dims_of(q)[:3], dims_of(k)[2]]
    bias = None if mask is None else c.tensor(mask)
    if is_causal:
        square = scores[2:]
        ones = c.op("Expand", c.constant(np.array(True)), c.shape(square), shape=square)
        bias = c.op("Trilu", ones, c.constant(np.array(0, np.int64)), upper=0)
    seen = None  # which keys a query may see
    if bias is not None and bias.dtype == BOOL:
        seen = bias
        zero, low = (c.tensor(n, kind) for n in (0.0, -math.inf))
        bias = c.op("Where", seen, zero, low, dtype=kind)
    elif bias is not None:
        seen = c.op("Not", c.op("Equal", bias, c.tensor(-math.inf, bias.dtype), dtype=BOOL))
    k_shape = dims_of(k)
    turned = c.op("Transpose", k, shape=[*k_shape[:2], k_shape[3], k_shape[2]], perm=[0, 1, 3, 2])
    scaled = c.op("Mul", q, c.tensor(factor, kind))
    product = c.op("MatMul", scaled, turned, shape=scores)
    if bias is not None:
        product = c.op("Add", product, bias)
    probabilities = c.op("Softmax", product, axis=-1)
    if seen is not None and not is_causal:
        some = [*dims_of(seen)[:-1], 1]
        # Counted: on CUDA ONNX Runtime has no kernel for the maximum of a mask of bool.
        keys = c.op("ReduceSum", c.cast(seen, FLOAT), c.ints([-1]), shape=some, keepdims=1)
        dead = c.op("Equal", keys, c.tensor(0.0, FLOAT), dtype=BOOL)
        probabilities = c.op(
            "Where", dead, c.tensor(0.0, kind), probabilities, shape=scores, dtype=kind
        )
    return c.op("MatMul", probabilities, v)


def _repeated(c: Converter, x: ir.Value, heads: Dim) -> ir.Value:
    """Keys or values with each head repeated for the queries of its group."""
    batch, groups, length, head = dims_of(x)
    times = int(heads) // int(groups)
    if times == 1:
        return x
    thin = c.reshape(x, [batch, groups, 1, length, head])
    wide = c.op(
        "Expand", thin, c.ints([1, 1, times, 1, 1]), shape=[batch, groups, times, length, head]
    )
    return c.reshape(wide, [batch, heads, length, head])
