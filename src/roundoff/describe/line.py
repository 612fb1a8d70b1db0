"""Any pytree of tensors in one line: kinds, element types, shapes, smallest, largest and mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from roundoff.arguments import check_whole
from roundoff.dtypes import DType, dtype_info
from roundoff.errors import DtypeError

from .tensors import TypedTensor, as_tensor, is_text, parts

__all__ = ["string_type"]


def string_type(
    obj: Any,
    with_shape: bool = False,
    with_min_max: bool = False,
    with_device: bool = False,
    limit: int = 20,
) -> str:
    """One line that describes any pytree of tensors.

    ``CT1s2x3[0.0,5.0:A2.5]`` is a tensor on the CPU (``C``; ``G`` on a GPU) of torch (``T``; ``A``
    is a NumPy array, which has no device letter; ``F`` a fake tensor), with element type 1, ONNX's
    number of float32, shape 2 × 3, smallest value 0, largest 5 and mean 2.5. The mean is taken in
    float64. NaNs are left out of all three and counted: ``[0.0,5.0:A2.5N1nans]``. A complex tensor
    gives those of its modulus. A tensor without dimensions shows its value, ``T1s=3.5``; one
    without elements says ``[empty]``.

    Parameters
    ----------
    obj : object
        Tensors, arrays, numbers, strings, lists, tuples, sets, dicts, data classes, OrtValues
        (``OV…``), ONNX tensors (``OT…``), transformers' caches and outputs, nested at will. An
        unknown class shows as ``Name(...)``.
    with_shape : bool
        Shapes (``s2x3``) instead of ranks (``r2``).
    with_min_max : bool
        Smallest, largest and mean; numbers show their value.
    with_device : bool
        A letter for the device of each tensor.
    limit : int, default 20
        From this length on, a list or tuple shows its first element only.

    Examples
    --------
    >>> import numpy as np
    >>> string_type([np.arange(6, dtype=np.float32).reshape(2, 3)], True, True)
    '#1[A1s2x3[0.0,5.0:A2.5]]'
    >>> string_type({"a": (1, 2.5), "b": None}, with_min_max=True)
    'dict(a:(int=1,float=2.5),b:None)'
    """
    check_whole("limit", limit, 0)
    return _Describer(with_shape, with_min_max, with_device, limit).line(obj)


#: Levels of containers that a line shows.
_DEEPEST = 100


@dataclasses.dataclass
class _Describer:
    with_shape: bool
    with_min_max: bool
    with_device: bool
    limit: int
    inside: list[int] = dataclasses.field(default_factory=list)

    def line(self, obj: Any) -> str:
        if id(obj) in self.inside or len(self.inside) > _DEEPEST:
            return "..."  # a list that holds itself, or very many in each other
        self.inside.append(id(obj))
        try:
            return self._line(obj)
        finally:
            self.inside.pop()

    def _line(self, obj: Any) -> str:
        if obj is None:
            return "None"
        if isinstance(obj, (bool, int, float, complex)) and not isinstance(obj, np.generic):
            kind = next(t.__name__ for t in (bool, int, float, complex) if isinstance(obj, t))
            return f"{kind}={obj}" if self.with_min_max else kind
        if isinstance(obj, (str, bytes)):
            return type(obj).__name__
        if isinstance(obj, (np.ndarray, np.generic)):
            return self._array(np.asarray(obj))
        if type(obj) in (list, tuple):
            return self._sequence(obj)
        if isinstance(obj, (set, frozenset)):
            cells = sorted(self.line(o) for o in obj)
            return f"{{{','.join(cells)}}}" if len(cells) < self.limit else f"#{len(cells)}{{...}}"
        if type(obj) is dict:
            return self._dict(obj)
        return self._other(obj)

    def _sequence(self, obj: Any) -> str:
        opening, closing = ("(", ")") if isinstance(obj, tuple) else (f"#{len(obj)}[", "]")
        if len(obj) < self.limit:
            cells = ",".join(self.line(o) for o in obj)
            comma = "," if isinstance(obj, tuple) and len(obj) == 1 else ""
            return f"{opening}{cells}{comma}{closing}"
        opening = f"#{len(obj)}{opening[-1]}"
        text = f"{opening}{self.line(obj[0])},...{closing}"
        if self.with_min_max and all(isinstance(o, (bool, int, float)) for o in obj):
            text += f"[{min(obj)},{max(obj)}:A{sum(float(o) for o in obj) / len(obj)}]"
        return text

    def _dict(self, obj: Mapping[Any, Any], name: str = "dict") -> str:
        cells = ",".join(f"{k}:{self.line(v)}" for k, v in obj.items())
        if name == "dict" and all(type(k) is int for k in obj):
            return f"{{{cells}}}"
        return f"{name}({cells})"

    def _array(self, array: np.ndarray[Any, Any]) -> str:
        try:
            kind: Any = 8 if is_text(array) else dtype_info(array.dtype).onnx
        except DtypeError:  # dates, records: NumPy's own name
            return f"A<{array.dtype}>{self._shape(array.shape)}"
        return self._tensor("A", kind, array.shape, array)

    def _tensor(self, letters: str, kind: int, shape: Any, obj: Any) -> str:
        typed = as_tensor(obj) if self.with_min_max and kind != 8 else None
        values = "" if typed is None else self._values(typed)
        return f"{letters}{kind}{self._shape(shape)}{values}"

    def _shape(self, shape: Any) -> str:
        return f"s{'x'.join(map(str, shape))}" if self.with_shape else f"r{len(shape)}"

    def _values(self, typed: TypedTensor) -> str:
        tensor = typed.tensor
        if tensor.numel() == 0:
            return "[empty]"
        if tensor.dim() == 0:
            return f"={_number(tensor, typed.info)}"
        low, high, mean, nans = extremes(typed)
        tail = f"N{nans}nans" if nans else ""
        return f"[{tail}]" if low is None else f"[{low},{high}:A{mean}{tail}]"

    def _device(self, on_gpu: bool) -> str:
        return ("G" if on_gpu else "C") if self.with_device else ""

    def _other(self, obj: Any) -> str:
        name = type(obj).__name__
        if name == "OrtValue" and obj.has_value() and obj.is_tensor():
            letters = self._device(obj.device_name().lower() not in ("cpu", "")) + "OV"
            return self._tensor(letters, int(obj.element_type()), obj.shape(), obj)
        if name == "TensorProto":
            return self._tensor("OT", obj.data_type, tuple(obj.dims), obj)
        if isinstance(obj, torch.Tensor):
            letter = "F" if name == "FakeTensor" else "T"
            if obj.is_nested:
                return f"Nested{self._sequence(list(obj.unbind()))}"
            letters = self._device(obj.device.type not in ("cpu", "meta")) + letter
            there = letter == "T" and obj.device.type != "meta"
            return self._tensor(
                letters, dtype_info(obj.dtype).onnx, obj.shape, obj if there else None
            )
        if isinstance(obj, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return name
        if isinstance(obj, (torch.device, torch.dtype, torch.layout, torch.memory_format)):
            return f"{name}({obj})"
        opened = parts(obj)
        if opened is None:
            return f"{name}(...)"
        inner = opened[1]
        if isinstance(inner, dict) and ("key_cache" in inner or name.endswith("Cache")):
            return f"{name}({', '.join(f'{k}={self.line(v)}' for k, v in inner.items())})"
        if isinstance(inner, dict):
            return self._dict(inner, name)
        return f"{name}{self._sequence(inner)}"


def _number(tensor: torch.Tensor, info: DType) -> Any:
    """A value as Python has it: all digits, whatever its type."""
    return float(tensor) if info.is_float else tensor.item()


def extremes(typed: TypedTensor) -> tuple[Any, Any, float, int]:
    """Smallest, largest, mean in float64, and the number of NaNs, which are left out.

    The first two are ``None`` and the mean NaN where nothing is left.
    """
    tensor, info = typed.tensor.flatten(), typed.info
    if info.kind in ("uint", "bool"):  # torch has no minimum of these types on every device
        array = tensor.cpu().numpy()
        mean = float(array.sum(dtype=np.float64)) / len(array)
        return array.min().item(), array.max().item(), mean, 0
    if info.kind == "complex":
        tensor = tensor.abs()
    elif info.is_float and info.bits < 16:
        tensor = tensor.float()
    nans = 0
    if tensor.is_floating_point():
        mask = tensor.isnan()
        nans = int(mask.sum())
        tensor = tensor[~mask] if nans else tensor
        if tensor.numel() == 0:
            return None, None, float("nan"), nans
    low, high = tensor.aminmax()
    mean = float(tensor.sum(dtype=torch.float64)) / tensor.numel()
    return low.item(), high.item(), mean, nans
