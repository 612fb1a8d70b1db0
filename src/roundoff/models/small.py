"""The small ONNX models that the pages are about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx
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


def _model(name: str, nodes: list, inputs: list, outputs: list) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, name, inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _float(dtype: Any) -> int:
    """ONNX's number of a type of floats."""
    info = dtype_info(dtype)
    if not info.is_float:
        raise DtypeError("a model of floats", got=info.name, expected="a float type")
    return info.onnx


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
    itype = _float(itype)
    info = helper.make_tensor_value_info
    shapes = {"X": "abc", "scale": "c", "bias": "c", "weights": "cd", "bias2": "d"}
    nodes = [
        helper.make_node("LayerNormalization", ["X", "scale", "bias"], ["normed"], axis=-1),
        helper.make_node("MatMul", ["normed", "weights"], ["mult"]),
        helper.make_node("Add", ["mult", "bias2"], ["Z"]),
    ]
    inputs = [info(name, itype, list(shape)) for name, shape in shapes.items()]
    return _model("layer_norm_matmul", nodes, inputs, [info("Z", itype, list("abd"))])


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
    check_whole("width", width, 1)

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
    itype = _float(itype)
    info, node = helper.make_tensor_value_info, helper.make_node
    inner = 1 if wide else itype
    narrow = [node("Add", ["X", "residual"], ["hidden"])]
    if wide:
        narrow.append(node("Cast", ["hidden"], ["hidden32"], to=1))
    name = narrow[-1].output[0]
    result = "unrounded" if wide else "normed"
    nodes = [
        *narrow,
        node("Mul", [name, name], ["squares"]),
        node("ReduceMean", ["squares", "last"], ["mean"], keepdims=1),
        node("Add", ["mean", "epsilon"], ["shifted"]),
        node("Sqrt", ["shifted"], ["root"]),
        node("Div", [name, "root"], [result]),
        *([node("Cast", [result], ["normed"], to=itype)] if wide else []),
        node("Mul", ["normed", "scale"], ["Z"]),
    ]
    inputs = [info(n, itype, list("abc")) for n in ("X", "residual")]
    inputs.append(info("scale", itype, ["c"]))
    model = _model("residual_rms_norm", nodes, inputs, [info("Z", itype, list("abc"))])
    model.graph.initializer.extend(
        [
            helper.make_tensor("last", onnx.TensorProto.INT64, [1], [-1]),
            helper.make_tensor("epsilon", inner, [], [1e-5]),
        ]
    )
    return model
