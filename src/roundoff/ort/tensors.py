"""Tensors of torch, NumPy and ONNX Runtime over the same memory."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import torch  # before onnxruntime: its CUDA provider finds cuBLAS and cuDNN through torch

from roundoff.describe import as_tensor
from roundoff.dtypes import DType, dtype_info
from roundoff.errors import ArgumentError, DtypeError, MissingDependencyError

try:
    import onnxruntime
except ImportError as e:  # pragma: no cover - the test environment has it
    raise MissingDependencyError(
        "roundoff.ort needs onnxruntime", hint="pip install onnxruntime (or onnxruntime-gpu)"
    ) from e

# What fails is raised; the warnings of its C++ log go past any capture.
onnxruntime.set_default_logger_severity(3)

__all__ = ["element", "from_ort", "onnxruntime", "to_ort"]


class _Bool:
    """A bool tensor as onnxruntime before 1.32 takes it: the bytes of uint8, the name of bool."""

    dtype = "bool"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.bytes = tensor.view(torch.uint8)

    def __dlpack__(self) -> Any:
        return self.bytes.__dlpack__()


@cache
def _reads_bool() -> bool:
    """Whether ONNX Runtime reads DLPack's own bool: from 1.32 on, where it ignores the name."""
    try:
        made = onnxruntime.OrtValue.from_dlpack(torch.zeros(1, dtype=torch.bool))
    except RuntimeError:
        return False
    return made.data_type() == "tensor(bool)"


def to_ort(value: torch.Tensor | np.ndarray) -> onnxruntime.OrtValue:
    """An ``OrtValue`` over the memory of a torch tensor or NumPy array, on the device it is on.

    Nothing is copied unless the value is not contiguous. The ``OrtValue`` keeps the memory alive.

    Parameters
    ----------
    value : torch.Tensor or numpy.ndarray
        Any shape, contiguous or not; numbers or bool. Gradients are not followed.

    Raises
    ------
    ArgumentError
        For a tensor without data, a sparse tensor, strings, and values that are masked.
    DtypeError
        For a type that ONNX Runtime cannot hold (complex numbers), and for those of 8 bits or
        fewer that DLPack does not carry.

    Examples
    --------
    >>> x = torch.arange(3.0)
    >>> v = to_ort(x)
    >>> v.data_ptr() == x.data_ptr(), v.data_type()
    (True, 'tensor(float)')
    """
    # Of an array through torch: the memory of ``ortvalue_from_numpy`` is freed with the array even
    # while a tensor made from the OrtValue still reads it.
    typed = as_tensor(value) if isinstance(value, (torch.Tensor, np.ndarray)) else None
    if typed is None:
        raise ArgumentError(
            "cannot give this to ONNX Runtime",
            got=type(value).__name__,
            expected="a torch tensor or a NumPy array of numbers",
        )
    tensor, info = typed.tensor.contiguous(), typed.info
    if info.kind == "bool":
        given = tensor if _reads_bool() else _Bool(tensor)
        return onnxruntime.OrtValue.from_dlpack(given)
    if info.kind == "complex" or _is_narrow(info):
        raise DtypeError(
            "cannot share such a tensor with ONNX Runtime",
            got=info.name,
            hint="float16, and a Cast in the model" if info.is_float else None,
        )
    return onnxruntime.OrtValue.from_dlpack(tensor)


def from_ort(value: onnxruntime.OrtValue) -> torch.Tensor:
    """A torch tensor over the memory of an ``OrtValue``, on the device it is on.

    Nothing is copied.

    Raises
    ------
    DtypeError
        For strings, and for the types that :func:`to_ort` refuses.

    Examples
    --------
    >>> from_ort(to_ort(torch.tensor([True, False])))
    tensor([ True, False])
    """
    info = element(value.data_type())
    if info is None or info.kind == "string":
        raise DtypeError("not a tensor of numbers", got=value.data_type())
    if _is_narrow(info):
        raise DtypeError(
            "cannot share such a tensor with torch", got=info.name, hint="a Cast in the model"
        )
    tensor = torch.utils.dlpack.from_dlpack(value)
    return tensor.view(torch.bool) if info.kind == "bool" else tensor


def _is_narrow(info: DType) -> bool:
    """Whether torch and ONNX Runtime do not both give and take this type by DLPack."""
    return info.kind not in ("bool", "string") and info.bits < (9 if info.is_float else 8)


def element(ort_type: str) -> DType | None:
    """The element type of ``"tensor(float)"``; None for sequences, maps and optionals."""
    match = re.fullmatch(r"tensor\((\w+)\)", ort_type)
    return dtype_info(match[1].upper()) if match else None
