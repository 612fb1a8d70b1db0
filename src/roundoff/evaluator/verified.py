"""What of ONNX's reference evaluator is a truth.

The reference has faults of its own, some in one attribute of an operator alone. In float64 it is
taken for the operators below, each of which agrees with the cases of ONNX's suite in float32 over
its attributes; every other operator is refused. ``tests/evaluator/test_suite.py`` is the evidence.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .nodes import Node
from .values import to_numpy

__all__ = ["refusal", "refusal_of_values"]

#: Types whose values float32 does not hold, as ONNX's reference dequantises them.
_WIDE = ("torch.float64", "torch.int32")
#: Operators that move elements, convert them or round them to integers, and a few more.
_VERIFIED = frozenset({
    "Acos", "Acosh", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh", "Attention",
    "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "CenterCropPad", "Col2Im",
    "Compress", "ConstantOfShape", "ConvInteger", "ConvTranspose", "Cosh", "DepthToSpace",
    "DequantizeLinear", "EyeLike", "GatherElements", "GatherND", "InstanceNormalization",
    "IsInf", "MatMulInteger", "NonMaxSuppression", "NonZero", "OneHot", "Pad", "QLinearConv",
    "QLinearMatMul", "QuantizeLinear", "Range", "ReduceMax", "ReduceMin", "ReduceProd",
    "Resize", "ReverseSequence", "ScatterElements", "ScatterND", "Sinh", "SpaceToDepth", "Tan",
    "TensorScatter", "Tile", "TopK", "Trilu",
})  # fmt: skip


def refusal(node: Node) -> str:
    """Why ONNX's reference is no truth of this node; empty where it is, as far as one can see."""
    if node.domain != "" or node.op_type not in _VERIFIED:
        return "it is not verified"
    if node.version < (11 if node.op_type == "Resize" else 6):
        return f"it is not verified at version {node.version}"
    return _resize(node) if node.op_type == "Resize" else ""


def _resize(node: Node) -> str:
    mode = node.attribute("coordinate_transformation_mode", "half_pixel")
    if mode not in ("half_pixel", "asymmetric"):
        return f"it is not verified with {mode}"
    if node.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        return "it is not verified with keep_aspect_ratio_policy"
    return "it is not verified with antialias" if node.attribute("antialias", 0) else ""


def refusal_of_values(node: Node, inputs: tuple[Any, ...]) -> str:
    """The same of the values of a run."""
    if node.op_type == "DequantizeLinear" and str(inputs[0].dtype) in _WIDE:
        return "it goes through float32, which these values leave"
    ordered = node.op_type in ("ArgMax", "ArgMin", "TopK")
    if ordered and np.isnan(to_numpy(inputs[0]).astype(np.float64)).any():
        return "ONNX does not say where NaN stands among these values"
    if node.op_type == "QuantizeLinear":
        steps = np.abs(to_numpy(inputs[0])).max(initial=0.0) / np.abs(to_numpy(inputs[1])).min()
        if not steps < 2**31:
            return "it goes through 32-bit integers, which these values leave"
    return ""
