"""Values between nodes, and their conversions.

A tensor is a ``torch.Tensor`` where torch has the element type; strings and the types narrower
than a byte (int4, uint4, int2, uint2, float4) stay NumPy arrays, the latter with the dtypes of
``ml_dtypes``. A sequence is a list, an absent optional is None, a map is a dict.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from onnx import TypeProto, helper

from roundoff.describe import from_numpy, is_text
from roundoff.dtypes import dtype_info, onnx_dtype_to_np_dtype
from roundoff.errors import ArgumentError, DtypeError


def to_value(x: Any) -> Any:
    """A value of the evaluator from a tensor, array, scalar, list or dict.

    Raises
    ------
    ArgumentError
        When values are masked.
    DtypeError
        When ONNX has no such element type.
    """
    if x is None or isinstance(x, (torch.Tensor, dict)):
        return x
    if isinstance(x, (list, tuple)):
        return [to_value(item) for item in x]
    if np.ma.is_masked(x):
        raise ArgumentError("masked values", got="a masked array", hint="x.filled(0)")
    array = np.asarray(x)
    if is_text(array):
        return array.astype(object)
    return array if dtype_info(array.dtype).bits < 8 else from_numpy(array)[0]


def on_device(x: Any, device: torch.device) -> Any:
    """A value there; strings and narrow types stay arrays."""
    return x.to(device) if isinstance(x, torch.Tensor) else x


def to_numpy(x: Any) -> Any:
    """The NumPy form of a value; lists and dicts keep their nesting."""
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu().resolve_conj().resolve_neg()
        dtype = onnx_dtype_to_np_dtype(elem_type(x))
        if dtype.isbuiltin == 1:
            return x.numpy()
        # A type of ml_dtypes, which torch does not give: by the integers of the same width.
        whole = torch.uint8 if x.element_size() == 1 else torch.int16
        return x.contiguous().view(whole).numpy().view(dtype)
    if isinstance(x, (list, tuple)):
        return [to_numpy(item) for item in x]
    return x


def elem_type(x: Any) -> int:
    """ONNX element type of a tensor or array (0 for anything else)."""
    return dtype_info(x.dtype).onnx if isinstance(x, (torch.Tensor, np.ndarray)) else 0


def type_proto(x: Any, shape: bool = True) -> TypeProto:
    """``TypeProto`` of a value; an empty sequence counts as one of float tensors."""
    if isinstance(x, (list, tuple)):
        item = type_proto(x[0], False) if x else helper.make_tensor_type_proto(1, None)
        if any(type_proto(other, False) != item for other in x[1:]):
            raise DtypeError("a sequence holds values of several types", got=type_name(x[:4]))
        return helper.make_sequence_type_proto(item)
    code = elem_type(x)
    if code == 0:
        raise DtypeError("not a value that ONNX knows", got=type_name(x))
    return helper.make_tensor_type_proto(code, list(x.shape) if shape else None)


def type_name(x: Any) -> str:
    """Short description of a value for messages: ``float32[2,3]``."""
    if isinstance(x, (torch.Tensor, np.ndarray)):
        return f"{dtype_info(x.dtype).name}[{','.join(str(d) for d in x.shape)}]"
    if isinstance(x, (list, tuple)):
        return f"sequence of {len(x)}" + (f" ({type_name(x[0])}, …)" if x else "")
    return "nothing" if x is None else type(x).__name__


def signature(values: Iterable[Any], shape: bool = False) -> tuple[Any, ...]:
    """A hashable key of the types (and shapes) of *values*."""
    key: list[Any] = []
    for x in values:
        if isinstance(x, (torch.Tensor, np.ndarray)):
            key.append((x.dtype, x.shape) if shape else x.dtype)
        elif isinstance(x, (list, tuple)):
            key.append(("seq", signature(x[:1])))
        else:
            key.append(type(x))
    return tuple(key)


def brief(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
