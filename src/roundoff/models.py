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

__all__ = ["GEMM_VARIANTS", "Cost", "Step", "gemm_cost", "gemm_feeds", "gemm_model"]

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
    """Inputs of :func:`gemm_model`; ``"fused ahead"`` pays its concatenation here."""
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
    """One kernel: the bytes it must move at least, and its operations."""

    op: str
    bytes: float
    flops: float = 0.0


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a model must do at least, kernel by kernel."""

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
        self, *, byte_rate: float, flop_rate: float, call: float, launch: float, overlap: bool
    ) -> float:
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
        """
        host = call + launch * self.launches
        work = sum(max(s.bytes / byte_rate, s.flops / flop_rate) for s in self.steps)
        return max(host, work) if overlap else host + work


def gemm_cost(
    variant: str, m: int, k: int, widths: Sequence[int], itemsize: int, separate: bool = False
) -> Cost:
    """Kernels, bytes and operations of :func:`gemm_model` on X of shape (m, k).

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

    def gemm(n: int) -> Step:
        return Step("Gemm", itemsize * (m * k + k * n + m * n), 2.0 * m * k * n)

    weights, products = 2 * itemsize * k * total, 2 * itemsize * m * total
    if variant == "not fused":
        steps = [gemm(n) for n in widths]
        return Cost(tuple(steps if separate else [*steps, Step("Concat", products)]))
    steps = [Step("Concat", weights)] if variant == "fused" else []
    steps.append(gemm(total))
    return Cost(tuple([*steps, Step("Split", products)] if separate else steps))
