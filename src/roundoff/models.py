"""The small ONNX models that the pages are about."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import onnx
from onnx import helper

from .dtypes import dtype_info
from .errors import ArgumentError, DtypeError

if TYPE_CHECKING:
    import torch

__all__ = [
    "GEMM_VARIANTS",
    "Cost",
    "Step",
    "gemm_cost",
    "gemm_feeds",
    "gemm_model",
    "layer_norm_feeds",
    "layer_norm_matmul",
    "residual_rms_norm",
    "skip_layer_norm",
]

#: How the products of one matrix with several weights can be computed.
GEMM_VARIANTS = ("not fused", "fused", "fused ahead")
_OPSET, _IR = 20, 10


def gemm_model(
    variant: str,
    itype: int = 1,
    *,
    weights: Sequence[str] = ("Y", "Z"),
    widths: Sequence[int] | None = None,
    separate: bool = False,
) -> onnx.ModelProto:
    """Products of one X with several weights, as several Gemms or as one.

    ``"not fused"`` has a Gemm a weight; ``"fused"`` concatenates the weights at each run and has
    one Gemm; ``"fused ahead"`` takes the weights concatenated before, as a real fusion would store
    them. All three compute the same numbers on paper.

    Parameters
    ----------
    variant : {"not fused", "fused", "fused ahead"}
    itype : int
        ONNX element type of every tensor.
    weights : sequence of str
        Names of the weights, of shape (k, width); in ``"fused ahead"`` one input of shape
        (k, sum of widths) has them all, and its name is theirs joined.
    widths : sequence of int, optional
        Columns of the weights, where they are not all the same and *separate* asks for a Split.
    separate : bool
        Give a product for each weight, as a transformer's queries, keys and values are; else give
        one output, the products side by side.

    Returns
    -------
    onnx.ModelProto
        Inputs X of shape (m, k) and the weights; outputs ``"O"``, or one a weight (``"O_Y"`` …).

    Raises
    ------
    ArgumentError
        The variant is unknown, there are fewer than two weights, or widths of another number.
    DtypeError
        *itype* is not a floating-point type.

    Examples
    --------
    >>> [n.op_type for n in gemm_model("not fused").graph.node]
    ['Gemm', 'Gemm', 'Concat']
    >>> [n.op_type for n in gemm_model("fused ahead", separate=True).graph.node]
    ['Gemm', 'Split']
    """
    _check(variant, itype, weights, widths)
    names = [_joined(weights)] if variant == "fused ahead" else list(weights)
    outputs = [f"O_{w}" for w in weights] if separate else ["O"]
    initializers = []
    if variant == "not fused":
        parts = outputs if separate else [f"P_{w}" for w in weights]
        nodes = [helper.make_node("Gemm", ["X", w], [p]) for w, p in zip(names, parts, strict=True)]
        if not separate:
            nodes.append(helper.make_node("Concat", parts, outputs, axis=1))
    else:
        packed, product = _joined(weights), "P" if separate else "O"
        nodes = []
        if variant == "fused":
            nodes.append(helper.make_node("Concat", names, [packed], axis=1))
        nodes.append(helper.make_node("Gemm", ["X", packed], [product]))
        if separate and widths is not None:
            sizes = helper.make_tensor("widths", onnx.TensorProto.INT64, [len(widths)], widths)
            initializers.append(sizes)
            nodes.append(helper.make_node("Split", [product, "widths"], outputs, axis=1))
        elif separate:
            nodes.append(
                helper.make_node("Split", [product], outputs, axis=1, num_outputs=len(outputs))
            )
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        variant,
        [info("X", itype, ["m", "k"]), *(info(n, itype, ["k", f"n_{n}"]) for n in names)],
        [info(o, itype, ["m", o.lower()]) for o in outputs],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)


def gemm_feeds(
    variant: str, x: torch.Tensor, weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Inputs of :func:`~roundoff.models.gemm_model`.

    ``"fused ahead"`` pays its concatenation here.

    Examples
    --------
    >>> import torch
    >>> weights = {"Y": torch.ones(3, 4), "Z": torch.ones(3, 4)}
    >>> feeds = gemm_feeds("fused ahead", torch.ones(2, 3), weights)
    >>> {name: tuple(x.shape) for name, x in feeds.items()}
    {'X': (2, 3), 'YZ': (3, 8)}
    """
    import torch

    if variant == "fused ahead":
        return {"X": x, _joined(list(weights)): torch.cat(list(weights.values()), dim=1)}
    return {"X": x, **weights}


def _joined(weights: Sequence[str]) -> str:
    return "".join(weights)


def _check(variant: str, itype: int, weights: Sequence[str], widths: Sequence[int] | None) -> None:
    if variant not in GEMM_VARIANTS:
        raise ArgumentError("variant", got=variant, expected=f"one of {GEMM_VARIANTS}")
    if len(weights) < 2 or len(set(weights)) != len(weights):
        raise ArgumentError("weights", got=list(weights), expected="two or more different names")
    if widths is not None and len(widths) != len(weights):
        raise ArgumentError("widths", got=list(widths), expected=f"{len(weights)} numbers")
    if not dtype_info(itype).is_float:
        raise DtypeError("a Gemm of floats", got=dtype_info(itype).name, expected="a float type")


@dataclasses.dataclass(frozen=True)
class Step:
    """One kernel: the bytes of its operands, its operations, and where its operands are.

    ``between`` are those of the bytes that another kernel of the model has written or will read:
    as long as they fit in a cache, memory does not see them.

    Examples
    --------
    >>> step = Step("Concat", bytes=300.0, between=100.0)
    >>> step.traffic(cache=128.0), step.traffic(cache=64.0)
    (200.0, 300.0)
    """

    op: str
    bytes: float
    flops: float = 0.0
    between: float = 0.0

    def traffic(self, cache: float) -> float:
        """Bytes that memory sees."""
        return self.bytes - (self.between if self.between <= cache else 0.0)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a model must do at least, kernel by kernel.

    Examples
    --------
    >>> cost = Cost((Step("Gemm", 4e9, 8e12), Step("Concat", 2e9)))
    >>> cost.launches, cost.bytes
    (2, 6000000000.0)
    >>> cost.seconds(byte_rate=1e12, flop_rate=1e15, call=1e-5, launch=5e-6, overlap=True)
    0.01
    """

    steps: tuple[Step, ...]

    @property
    def launches(self) -> int:
        """Kernels to start."""
        return len(self.steps)

    @property
    def bytes(self) -> float:
        """Bytes to read and write: each operand of each kernel once."""
        return sum(s.bytes for s in self.steps)

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return sum(s.flops for s in self.steps)

    def seconds(
        self, *, byte_rate: float, flop_rate: float, call: float, launch: float, overlap: bool,
        cache: float = 0.0,
    ) -> float:  # fmt: skip
        """Time of the plain model: launches beside, or under, the work of the kernels.

        A kernel takes as long as its bytes or its operations, whichever is longer.

        Parameters
        ----------
        byte_rate, flop_rate : float
            Bytes and operations a second, measured.
        call, launch : float
            Seconds a call of the model costs, and each of its launches.
        overlap : bool
            Whether the host starts kernels while the device computes (CUDA), so that only the
            longer of the two counts.
        cache : float
            Bytes of a cache that keeps what one kernel leaves for another.
        """
        host = call + launch * self.launches
        work = sum(max(s.traffic(cache) / byte_rate, s.flops / flop_rate) for s in self.steps)
        return max(host, work) if overlap else host + work


def gemm_cost(
    variant: str, m: int, k: int, widths: Sequence[int], itemsize: int, separate: bool = False
) -> Cost:
    """Kernels, bytes and operations of :func:`~roundoff.models.gemm_model` on X of shape (m, k).

    Parameters
    ----------
    widths : sequence of int
        Columns of the weights.
    itemsize : int
        Bytes an element.

    Examples
    --------
    >>> cost = gemm_cost("not fused", 2, 3, [4, 4], 4)
    >>> cost.launches, cost.bytes, cost.flops
    (3, 336, 96.0)
    """
    _check(variant, 1, [str(i) for i in range(len(widths))], None)
    total = sum(widths)
    weights, products = itemsize * k * total, itemsize * m * total

    def gemm(n: int, between: float) -> Step:
        return Step("Gemm", itemsize * (m * k + k * n + m * n), 2.0 * m * k * n, between)

    if variant == "not fused":
        steps = [gemm(n, 0 if separate else itemsize * m * n) for n in widths]
        return Cost(
            tuple(steps if separate else [*steps, Step("Concat", 2 * products, 0, products)])
        )
    steps = [Step("Concat", 2 * weights, 0, weights)] if variant == "fused" else []
    steps.append(gemm(total, weights * (variant == "fused") + products * separate))
    return Cost(tuple([*steps, Step("Split", 2 * products, 0, products)] if separate else steps))


_NORM_OPSET = 18


def _model(
    name: str, nodes: list, inputs: list, outputs: list, more: Sequence = ()
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, name, inputs, outputs)
    opsets = [helper.make_opsetid("", _NORM_OPSET), *more]
    return helper.make_model(graph, opset_imports=opsets, ir_version=_IR)


def _check_float(itype: int) -> None:
    if not dtype_info(itype).is_float:
        raise DtypeError("a model of floats", got=dtype_info(itype).name, expected="a float type")


def layer_norm_matmul(itype: int = 1) -> onnx.ModelProto:
    """LayerNormalization, MatMul and Add: ``Z = LN(X; scale, bias) @ weights + bias2``.

    Parameters
    ----------
    itype : int
        ONNX element type of every tensor.

    Returns
    -------
    onnx.ModelProto
        Opset 18. Inputs X (a, b, c), scale (c,), bias (c,), weights (c, d), bias2 (d,); results
        ``normed`` and ``mult`` on the way; output Z (a, b, d).

    Raises
    ------
    DtypeError
        *itype* is not a floating-point type.

    Examples
    --------
    >>> [n.op_type for n in layer_norm_matmul().graph.node]
    ['LayerNormalization', 'MatMul', 'Add']
    """
    _check_float(itype)
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
    low: float = -60.0,
    high: float = 60.0,
    weights: str = "uniform",
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Feeds of :func:`~roundoff.models.layer_norm_matmul` in float32, to round to other types.

    Parameters
    ----------
    rows, width, batch : int
        X has the shape (batch, rows, width); weights (width, width).
    low, high : float
        X is uniform between them; the others are uniform in [0, 1).
    weights : {"uniform", "normal"}
        The weights alone: uniform in [0, 1), all of one sign, or normal with variance 1 / width,
        of both signs, as a trained layer's are.
    seed : int
        Seed of the draws.

    Raises
    ------
    ArgumentError
        The distribution of the weights is unknown.

    Examples
    --------
    >>> {name: tuple(x.shape) for name, x in layer_norm_feeds(4, 8).items()}
    {'X': (2, 4, 8), 'scale': (8,), 'bias': (8,), 'weights': (8, 8), 'bias2': (8,)}
    """
    import torch

    if weights not in ("uniform", "normal"):
        raise ArgumentError("weights", got=weights, expected="uniform or normal")

    def draw(stream: int, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=torch.Generator().manual_seed(1000 * seed + stream))

    # A stream each: the first items of a large batch are those of a small one.
    items = [draw(10 + i, rows, width) for i in range(batch)]
    feeds = {"X": torch.stack(items) * (high - low) + low}
    shapes = {"scale": (width,), "bias": (width,), "weights": (width, width), "bias2": (width,)}
    feeds |= {name: draw(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    if weights == "normal":
        generator = torch.Generator().manual_seed(1000 * seed + 5)
        feeds["weights"] = torch.randn(width, width, generator=generator) / width**0.5
    return feeds


def skip_layer_norm(itype: int = 10) -> onnx.ModelProto:
    """LayerNormalization of a sum, as ONNX Runtime's fused ``SkipLayerNormalization``.

    Inputs X and skip (a, b, c), scale and bias (c,); output Z (a, b, c).

    Examples
    --------
    >>> [(n.domain, n.op_type) for n in skip_layer_norm().graph.node]
    [('com.microsoft', 'SkipLayerNormalization')]
    """
    _check_float(itype)
    info = helper.make_tensor_value_info
    node = helper.make_node(
        "SkipLayerNormalization", ["X", "skip", "scale", "bias"], ["Z"],
        domain="com.microsoft", epsilon=1e-5,
    )  # fmt: skip
    inputs = [info(n, itype, list("abc")) for n in ("X", "skip")]
    inputs += [info(n, itype, ["c"]) for n in ("scale", "bias")]
    more = [helper.make_opsetid("com.microsoft", 1)]
    return _model("skip_layer_norm", [node], inputs, [info("Z", itype, list("abc"))], more)


def residual_rms_norm(itype: int = 10, *, wide: bool = False) -> onnx.ModelProto:
    """RMSNorm of a residual sum, written out in elementary operators.

    Inputs X and residual (a, b, c), scale (c,); output Z (a, b, c). The squares are the result
    ``squares``, their mean ``mean``.

    Parameters
    ----------
    itype : int
        ONNX element type of inputs and output.
    wide : bool
        Convert to float32 before squaring and back after scaling.

    Examples
    --------
    >>> [n.op_type for n in residual_rms_norm(wide=True).graph.node][:4]
    ['Add', 'Cast', 'Mul', 'ReduceMean']
    """
    _check_float(itype)
    info, node = helper.make_tensor_value_info, helper.make_node
    inner = 1 if wide else itype
    narrow = [node("Add", ["X", "residual"], ["hidden"])]
    if wide:
        narrow.append(node("Cast", ["hidden"], ["widened"], to=1))
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
