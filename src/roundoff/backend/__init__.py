"""A ``torch.compile`` backend on ONNX Runtime that can be read: capture, fuse, run.

Dynamo's graph is made functional by AOTAutograd (which also takes care of mutated inputs,
aliases and views), converted to ONNX with its sizes symbolic or not, rewritten by the rules of
:mod:`roundoff.fusion`, and run by ONNX Runtime on the tensors where they lie. What has no ONNX form
stays with torch, between partitions.

Examples
--------
>>> import torch, roundoff.backend
>>> model = torch.nn.Linear(3, 2).eval()
>>> compiled = torch.compile(model, backend=roundoff.backend.onnx_custom_backend)
>>> with torch.no_grad():
...     y = compiled(torch.ones(1, 3))
>>> torch.allclose(y, model(torch.ones(1, 3)))
True
"""

from __future__ import annotations

from roundoff.fusion import OptimizationOptions

from .compiled import Compiled
from .entry import onnx_custom_backend
from .runner import reset

__all__ = ["Compiled", "OptimizationOptions", "onnx_custom_backend", "reset"]
