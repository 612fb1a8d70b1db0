"""Run an ONNX model node by node, each node with the kernel one chooses.

:class:`TorchOnnxEvaluator` runs a model with torch kernels where there is one, else with
ONNX Runtime, else with ONNX's reference implementation; the order can be chosen for each
operator, any operator can be replaced, and the whole model can be computed in float64
(``truth=True``), whatever its types say.
"""

from __future__ import annotations

from .generic import OrtKernel, ReferenceKernel
from .nodes import Node, NotHandledError, Settings
from .registry import Kernel, LayerNormalizationOrt, MatMulOrt
from .session import Step, TorchOnnxEvaluator

__all__ = [
    "Kernel",
    "LayerNormalizationOrt",
    "MatMulOrt",
    "Node",
    "NotHandledError",
    "OrtKernel",
    "ReferenceKernel",
    "Settings",
    "Step",
    "TorchOnnxEvaluator",
]
