"""Torch kernels, a file a family; importing this package registers them.

A factory takes the node and returns a function of its inputs that closes over the attributes.
The function may rely on what ONNX's type inference has checked (element types, ranks where they
are known) and raises for what torch would let pass and ONNX does not allow.
"""

from __future__ import annotations

from . import (  # noqa: F401
    elementwise,
    indexing,
    linear,
    normalization,
    quantize,
    reduction,
    shaping,
    slicing,
)
from .common import TorchKernel

__all__ = ["TorchKernel"]
