"""Kernels and their registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .nodes import Node


class Kernel:
    """Turns a node into a function of its inputs: ``bind(node) -> f(*inputs) -> output(s)``."""

    def bind(self, node: Node) -> Callable[..., Any]:
        raise NotImplementedError


class OrtKernel(Kernel):
    """Runs a node in ONNX Runtime."""


class ReferenceKernel(Kernel):
    """Runs a node in ONNX's reference evaluator."""


LayerNormalizationOrt = OrtKernel()
MatMulOrt = OrtKernel()
