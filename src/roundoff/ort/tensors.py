"""Tensors of torch, NumPy and ONNX Runtime over the same memory."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch  # before onnxruntime: its CUDA provider finds cuBLAS and cuDNN through torch

from roundoff.describe import from_numpy, lacking
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
    """A bool tensor as OrtValue.from_dlpack takes it: the bytes of uint8, the name of bool."""

    dtype = "bool"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.bytes = tensor.view(torch.uint8)

    def __dlpack__(self) -> Any:
        return self.bytes.__dlpack__()


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
        For a tensor without data, a sparse tensor, and values that are masked.
    DtypeError
        For a type that ONNX Runtime cannot hold (complex numbers, strings), and for float8, which
        DLPack does not carry.

    Examples
    --------
    >>> x = torch.arange(3.0)
    >>> v = to_ort(x)
    >>> v.data_ptr() == x.data_ptr(), v.data_type()
    (True, 'tensor(float)')
    """
    if isinstance(value, np.ndarray):
        value = _over_array(value)
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(
            "cannot give this to ONNX Runtime",
            got=type(value).__name__,
            expected="a torch tensor or a NumPy array",
        )
    why = lacking(value) if type(value) is not torch.Tensor or value.is_meta else None
    if why is None and value.layout is not torch.strided:
        why = f"a tensor of {value.layout}"
    if why is not None:
        raise ArgumentError("cannot give this to ONNX Runtime", got=why, expected="a dense tensor")
    return _over_tensor(value)


def _over_tensor(value: torch.Tensor) -> onnxruntime.OrtValue:
    make = onnxruntime.OrtValue
    tensor = value.detach().contiguous()
    info = dtype_info(tensor.dtype)
    if info.kind == "bool":
        return make.from_dlpack(_Bool(tensor))
    if info.kind not in ("float", "int", "uint") or _is_float8(info):
        raise DtypeError(
            "cannot share such a tensor with ONNX Runtime",
            got=info.name,
            hint="float16, and a Cast in the model" if info.is_float else None,
        )
    return make.from_dlpack(tensor)


def _over_array(array: np.ndarray) -> torch.Tensor:
    """A torch tensor over the array's memory.

    The way through torch, not ``ortvalue_from_numpy``: that one's memory is freed with the array
    even while a tensor made from the OrtValue still reads it.
    """
    if np.ma.is_masked(array):
        raise ArgumentError("masked values", got="a masked array", hint="x.filled(0)")
    info = dtype_info(array.dtype)
    if info.kind in ("complex", "string") or info.bits < 8:
        raise DtypeError("cannot share this array with ONNX Runtime", got=info.name)
    return from_numpy(array)[0]


def from_ort(value: onnxruntime.OrtValue) -> torch.Tensor:
    """A torch tensor over the memory of an ``OrtValue``, on the device it is on.

    Nothing is copied.

    Examples
    --------
    >>> from_ort(to_ort(torch.tensor([True, False])))
    tensor([ True, False])
    """
    info = element(value.data_type())
    if info is None or info.kind == "string":
        raise DtypeError("not a tensor of numbers", got=value.data_type())
    if _is_float8(info):
        raise DtypeError("cannot share such a tensor with torch", got=info.name)
    tensor = torch.utils.dlpack.from_dlpack(value)
    return tensor.view(torch.bool) if info.kind == "bool" else tensor


def _is_float8(info: DType) -> bool:
    return info.is_float and info.bits == 8


def element(ort_type: str) -> DType | None:
    """The element type of ``"tensor(float)"``; None for sequences, maps and optionals."""
    match = re.fullmatch(r"tensor\((\w+)\)", ort_type)
    return dtype_info(match[1].upper()) if match else None
