"""What of ONNX's reference evaluator is a truth.

The reference has faults of its own, some in one attribute of an operator alone. In float64 it is
taken for the operators below, each of which agrees with the cases of ONNX's suite in float32 over
its attributes; every other operator is refused. ``tests/evaluator/test_suite.py`` is the evidence.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .nodes import Node, NotHandledError
from .values import to_numpy

#: Types whose values float32 does not hold, as ONNX's reference dequantises them.
_WIDE = ("torch.float64", "torch.int32")
#: Values of Resize's attributes, the default first.
_RESIZE: dict[str, tuple[Any, ...]] = {
    "coordinate_transformation_mode": ("half_pixel", "asymmetric"),
    "keep_aspect_ratio_policy": ("stretch",),
    "antialias": (0,),
}
#: Operators that move elements, convert them or round them to integers, and a few more.
_VERIFIED = frozenset({
    "Acos", "Acosh", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh", "Attention",
    "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "CenterCropPad", "Col2Im",
    "Compress", "ConstantOfShape", "ConvInteger", "ConvTranspose", "Cosh", "DepthToSpace",
    "DequantizeLinear", "EyeLike", "GatherElements", "GatherND", "InstanceNormalization", "IsInf",
    "MatMulInteger", "NonMaxSuppression", "NonZero", "OneHot", "Pad", "QLinearConv",
    "QLinearMatMul", "Range", "ReduceMax", "ReduceMin", "ReduceProd", "Resize",
    "ReverseSequence", "ScatterElements", "ScatterND", "Sign", "Sinh", "Size", "SpaceToDepth",
    "Tan", "TensorScatter", "Tile", "TopK", "Trilu",
})  # fmt: skip


def check_verified(node: Node) -> None:
    """Refuse a node of which ONNX's reference is no truth, as far as one can see before a run.

    Raises
    ------
    NotHandledError
    """
    if node.domain or node.op_type not in _VERIFIED:
        _refuse(node, "it is not verified")
    if node.version < (11 if node.op_type == "Resize" else 6):
        _refuse(node, f"it is not verified at version {node.version}")
    for name, verified in _RESIZE.items():
        if node.op_type == "Resize" and node.attribute(name, verified[0]) not in verified:
            _refuse(node, f"it is not verified with this {name}")


def check_values(node: Node, inputs: tuple[Any, ...]) -> None:
    """The same of the values of a run.

    Raises
    ------
    NotHandledError
    """
    if node.op_type == "DequantizeLinear" and str(inputs[0].dtype) in _WIDE:
        _refuse(node, "it goes through float32, which these values leave")
    ordered = node.op_type in ("ArgMax", "ArgMin", "TopK")
    if ordered and np.isnan(to_numpy(inputs[0]).astype(np.float64)).any():
        _refuse(node, "ONNX does not say where NaN stands among these values")


def _refuse(node: Node, why: str) -> None:
    raise NotHandledError(f"ONNX's reference {node.operator} is no truth: {why}")
