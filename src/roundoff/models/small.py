"""The small ONNX models that the pages are about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx
import onnx.parser
from onnx import helper

from ..arguments import check_choice, check_whole
from ..dtypes import dtype_info
from ..errors import DtypeError

if TYPE_CHECKING:
    import torch

__all__ = [
    "layer_norm_feeds",
    "layer_norm_matmul",
    "residual_rms_norm",
]


_HEAD = '<ir_version: 10, opset_import: ["": 18]> '
_LAYER_NORM_MATMUL = """
layer_norm_matmul (T[a, b, c] X, T[c] scale, T[c] bias, T[c, d] weights, T[d] bias2)
    => (T[a, b, d] Z)
{
    normed = LayerNormalization <axis = -1> (X, scale, bias)
    mult = MatMul (normed, weights)
    Z = Add (mult, bias2)
}
"""
_RESIDUAL_RMS_NORM = """
residual_rms_norm (T[a, b, c] X, T[a, b, c] residual, T[c] scale) => (T[a, b, c] Z)
{
    hidden = Add (X, residual)
    squares = Mul (hidden, hidden)
    mean = ReduceMean <keepdims = 1> (squares, last)
    shifted = Add (mean, epsilon)
    root = Sqrt (shifted)
    normed = Div (hidden, root)
    Z = Mul (normed, scale)
}
"""
_WIDE_RESIDUAL_RMS_NORM = """
residual_rms_norm (T[a, b, c] X, T[a, b, c] residual, T[c] scale) => (T[a, b, c] Z)
{
    hidden = Add (X, residual)
    hidden32 = Cast <to = 1> (hidden)
    squares = Mul (hidden32, hidden32)
    mean = ReduceMean <keepdims = 1> (squares, last)
    shifted = Add (mean, epsilon)
    root = Sqrt (shifted)
    unrounded = Div (hidden32, root)
    normed = Cast <to = TO> (unrounded)
    Z = Mul (normed, scale)
}
"""


def _parsed(text: str, itype: Any) -> tuple[onnx.ModelProto, int]:
    """A model whose tensors T are of a type of floats, and ONNX's number of it."""
    info = dtype_info(itype)
    if not info.is_float:
        raise DtypeError("a model of floats", got=info.name, expected="a float type")
    name = onnx.TensorProto.DataType.Name(info.onnx).lower()
    text = text.replace("T[", f"{name}[").replace("TO", str(info.onnx))
    return onnx.parser.parse_model(_HEAD + text), info.onnx


def layer_norm_matmul(itype: int | torch.dtype = 1) -> onnx.ModelProto:
    """LayerNormalization, MatMul and Add: ``Z = LN(X; scale, bias) @ weights + bias2``.

    Parameters
    ----------
    itype : int or torch.dtype
        ONNX element type of every tensor.

    Returns
    -------
    onnx.ModelProto
        Opset 18. Inputs X (a, b, c), scale (c,), bias (c,), weights (c, d), bias2 (d,);
        intermediate results ``normed`` and ``mult``; output Z (a, b, d).

    Raises
    ------
    DtypeError
        *itype* is not a floating-point type.

    Examples
    --------
    >>> from roundoff.models import layer_norm_matmul
    >>> [n.op_type for n in layer_norm_matmul().graph.node]
    ['LayerNormalization', 'MatMul', 'Add']
    """
    return _parsed(_LAYER_NORM_MATMUL, itype)[0]


def layer_norm_feeds(
    rows: int,
    width: int,
    *,
    batch: int = 2,
    weights: str = "uniform",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Feeds of :func:`~roundoff.models.layer_norm_matmul` in float32, to round to other types.

    Parameters
    ----------
    rows, width, batch : int
        X has the shape (batch, rows, width), and is uniform between -60 and 60; weights are
        (width, width); the others are uniform in [0, 1).
    weights : {"uniform", "normal"}
        The weights alone: uniform in [0, 1), all of one sign, or normal with variance 1 / width,
        of both signs, as a trained layer's are.
    seed : int
        Seed of the draws.

    Raises
    ------
    ArgumentError
        The distribution of the weights is unknown, or there is no width.

    Examples
    --------
    >>> from roundoff.models import layer_norm_feeds
    >>> {name: tuple(x.shape) for name, x in layer_norm_feeds(4, 8).items()}
    {'X': (2, 4, 8), 'scale': (8,), 'bias': (8,), 'weights': (8, 8), 'bias2': (8,)}
    """
    import torch

    check_choice("weights", weights, ("uniform", "normal"))
    for name, number in {"rows": rows, "width": width, "batch": batch}.items():
        check_whole(name, number, 1)
    check_whole("seed", seed, 0)

    def draw(stream: int, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=torch.Generator().manual_seed(1000 * seed + stream))

    # One stream for each item: the first items of a large batch are those of a small one.
    items = [draw(10 + i, rows, width) for i in range(batch)]
    feeds = {"X": torch.stack(items) * 120.0 - 60.0}
    shapes = {"scale": (width,), "bias": (width,), "weights": (width, width), "bias2": (width,)}
    feeds |= {name: draw(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    if weights == "normal":
        generator = torch.Generator().manual_seed(1000 * seed + 5)
        feeds["weights"] = torch.randn(width, width, generator=generator) / width**0.5
    return feeds


def residual_rms_norm(itype: int | torch.dtype = 10, *, wide: bool = False) -> onnx.ModelProto:
    """RMSNorm of a residual sum, written out in elementary operators.

    Inputs X and residual (a, b, c), scale (c,); output Z (a, b, c). The squares are the result
    ``squares``, their mean ``mean``.

    Parameters
    ----------
    itype : int or torch.dtype
        ONNX element type of inputs and output.
    wide : bool
        Convert to float32 before squaring and back after scaling.

    Raises
    ------
    DtypeError
        *itype* is not a floating-point type.

    Examples
    --------
    >>> from roundoff.models import residual_rms_norm
    >>> [n.op_type for n in residual_rms_norm(wide=True).graph.node][:4]
    ['Add', 'Cast', 'Mul', 'ReduceMean']
    """
    text = _WIDE_RESIDUAL_RMS_NORM if wide else _RESIDUAL_RMS_NORM
    model, number = _parsed(text, itype)
    epsilon = helper.make_tensor("epsilon", 1 if wide else number, [], [1e-5])
    last = helper.make_tensor("last", onnx.TensorProto.INT64, [1], [-1])
    model.graph.initializer.extend([last, epsilon])
    return model
