"""What of ONNX's reference evaluator is a truth.

The reference has faults of its own, some in one attribute of an operator alone. In float64 it is
taken for the operators below, each of which agrees with ONNX Runtime or torch in float32 over its
attributes; every other operator is refused. ``tests/evaluator/test_truth_operators.py`` is the
evidence: a new line here needs its cases there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .nodes import Node
from .values import to_numpy

__all__ = ["refusal", "refusal_of_values"]


def _is_float(node: Node, inputs: tuple[Any, ...]) -> bool:
    return any(x is not None and not isinstance(x, list) and _floating(x) for x in inputs)


def _floating(value: Any) -> bool:
    if hasattr(value, "is_floating_point"):
        return bool(value.is_floating_point())
    return getattr(value, "dtype", np.dtype(bool)).kind in "fcV"


#: Operators of whole numbers, flags and text, each one function of NumPy; of floats torch's kernel
#: is the truth, or there is none.
_WHOLE = frozenset({
    "Abs", "Add", "And", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
    "ConvInteger", "Div", "Equal", "Expand", "Gather", "Greater", "GreaterOrEqual", "Less",
    "LessOrEqual", "MatMulInteger", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "ReduceProd",
    "ReduceSum", "RegexFullMatch", "Reshape", "Sign", "Slice", "Squeeze", "StringConcat",
    "StringNormalizer", "StringSplit", "Sub", "Sum", "Tile", "Transpose", "Unsqueeze", "Where",
    "Xor",
})  # fmt: skip

#: Since which version an operator is verified, and what of it is not: its attributes or inputs.
_VERIFIED: dict[tuple[str, str], tuple[int, Callable[[Node], str] | None]] = {}


def _verified(op_type: str, since: int = 7, domain: str = "") -> Callable[[Any], Any]:
    def register(function: Callable[[Node], str]) -> Callable[[Node], str]:
        _VERIFIED[domain, op_type] = (since, function)
        return function

    return register


#: ``ReduceMax`` and ``ReduceMin`` come here with nothing to reduce, which torch refuses.
for _name in (
    "Cast", "CastLike", "CenterCropPad", "Col2Im", "ConstantOfShape", "DFT", "DeformConv",
    "DequantizeLinear", "Det", "NegativeLogLikelihoodLoss", "NonMaxSuppression", "QLinearConv",
    "QLinearMatMul", "QuantizeLinear", "ReduceMax", "ReduceMin", "RoiAlign", "STFT",
    "ScatterElements", "ScatterND", "SoftmaxCrossEntropyLoss", "TensorScatter",
):  # fmt: skip
    _VERIFIED["", _name] = (7, None)
for _name in ("ArrayFeatureExtractor", "LabelEncoder"):
    _VERIFIED["ai.onnx.ml", _name] = (1, None)


@_verified("BatchNormalization", 14)
def _batch_normalization(node: Node) -> str:
    return "" if node.attribute("training_mode", 0) else "another form than training"


@_verified("Resize", 11)
def _resize(node: Node) -> str:
    mode = node.attribute("coordinate_transformation_mode", "half_pixel")
    policy = node.attribute("keep_aspect_ratio_policy", "stretch")
    if mode == "tf_crop_and_resize":
        return mode
    if node.attribute("antialias", 0):
        if mode in ("align_corners", "half_pixel_symmetric"):
            return f"antialias and {mode}"
        if node.attribute("exclude_outside", 0):
            return "antialias and exclude_outside"
    return f"{policy} and {mode}" if mode == "align_corners" and policy != "stretch" else ""


@_verified("Unique", 11)
def _unique(node: Node) -> str:
    if "axis" in node.attributes:
        return "an axis"
    return "" if node.attribute("sorted", 1) else "sorted=0"


@_verified("MaxUnpool", 9)
def _max_unpool(node: Node) -> str:
    return "output_shape, which ONNX and its runtimes read differently" if node.has_input(2) else ""


def refusal(node: Node) -> str:
    """Why ONNX's reference is no truth of this node; empty where it is, as far as one can see."""
    if node.domain == "" and node.op_type in _WHOLE:
        return ""
    since, reservation = _VERIFIED.get((node.domain, node.op_type), (0, None))
    if not since:
        return "it is not verified"
    if node.version < since:
        return f"it is verified from version {since} on, and this is version {node.version}"
    what = reservation(node) if reservation is not None else ""
    return f"it is not verified with {what}" if what else ""


def refusal_of_values(node: Node, inputs: tuple[Any, ...]) -> str:
    """The same of the values of a run."""
    if node.domain != "":
        return ""
    if node.op_type in _WHOLE:
        if node.version < 7:
            return f"it is not verified at version {node.version}"
        if _is_float(node, inputs):
            return "it is not verified for floating types"
    if node.op_type == "Resize":
        # Where one element is left, ONNX Runtime and the reference take different ones.
        mode = node.attribute("coordinate_transformation_mode", "half_pixel")
        if mode == "pytorch_half_pixel" and _least_size(inputs) < 2:
            return "it is not verified for an axis of one element with pytorch_half_pixel"
    if node.op_type == "QuantizeLinear":
        steps = np.abs(to_numpy(inputs[0])).max(initial=0.0) / np.abs(to_numpy(inputs[1])).min()
        if not steps < 2**31:
            return "it goes through 32-bit integers, which these values leave"
    return ""


def _least_size(inputs: tuple[Any, ...]) -> float:
    """The smallest axis of a resized tensor, of those that are resized."""
    shape = inputs[0].shape
    if len(inputs) > 3 and inputs[3] is not None:
        sizes = to_numpy(inputs[3])
        changed = sizes[-2:] if len(sizes) == len(shape) else sizes
        return float(changed.min(initial=2))
    scales = to_numpy(inputs[2])
    if len(scales) != len(shape):
        return 0  # of some axes
    resized = [n * s for n, s in zip(shape, scales.tolist(), strict=True) if s != 1]
    return min(resized, default=2)
