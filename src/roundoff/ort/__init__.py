"""ONNX Runtime in one place: sessions, tensors shared with torch without a copy, bound runs.

Only public names of ``onnxruntime`` are used. Tensors cross in both directions by DLPack, so
nothing is copied where ONNX Runtime can read the tensor where it lies.

On CUDA a session made inside ``with torch.cuda.stream(s)`` computes on ``s`` and returns without
waiting, as a torch operator would. torch's *default* stream cannot be handed over (its handle is
zero, which ONNX Runtime reads as "none given"); there the session has a stream of its own, and a
run waits for torch before and for ONNX Runtime after.
"""

from __future__ import annotations

from roundoff.precision import torch_tf32

from .binding import Binding, OrtSession
from .sessions import available, newest_opset, session
from .tensors import from_ort, to_ort

__all__ = [
    "Binding",
    "OrtSession",
    "available",
    "from_ort",
    "newest_opset",
    "session",
    "to_ort",
    "torch_tf32",
]
