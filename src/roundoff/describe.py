"""Any pytree of tensors in one line (:func:`string_type`), and what it is made of.

:func:`as_tensor` sees a torch tensor in whatever holds numbers (array, scalar), without a copy
where it can; :func:`opened` sees what a container holds; :func:`tree_leaves` is all that a pytree
of these ends in.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .arguments import check_whole
from .dtypes import DType, dtype_info
from .errors import ArgumentError, DtypeError

__all__ = [
    "TypedTensor",
    "as_tensor",
    "from_numpy",
    "is_text",
    "lacking",
    "opened",
    "string_type",
    "tree_leaves",
]


@dataclasses.dataclass(frozen=True)
class TypedTensor:
    """A tensor, its declared element type, and the kind of object it came from.

    Attributes
    ----------
    tensor : torch.Tensor
        The values; shares memory with the object it came from where possible.
    info : DType
        The element type as declared; the tensor may be wider (int8 for int4).
    kind : str
        ``"tensor"``, ``"array"`` or ``"scalar"``.

    Examples
    --------
    >>> typed = as_tensor(np.float16([1.5, 2.5]))
    >>> typed.kind, typed.info.name, typed.device
    ('array', 'float16', 'cpu')
    """

    tensor: torch.Tensor
    info: DType
    kind: str

    @property
    def device(self) -> str:
        """``"cpu"``, ``"cuda:0"``, …"""
        return str(self.tensor.device)


def is_text(obj: Any) -> bool:
    """Whether *obj* is a string, or an array of strings as ONNX has them.

    Examples
    --------
    >>> is_text("bits"), is_text(np.array(["a", "b"])), is_text(1.0)
    (True, True, False)
    """
    if isinstance(obj, (str, bytes)):
        return True
    return isinstance(obj, np.ndarray) and obj.dtype.kind in "USOT"


def as_tensor(obj: Any) -> TypedTensor | None:
    """The tensor in *obj*, or ``None`` where there is none.

    Parameters
    ----------
    obj : torch.Tensor, numpy array or scalar, or number
        Gradients are dropped.

    Raises
    ------
    DtypeError
        When ONNX has no such element type (``longdouble``, dates), or torch cannot read it.
    ArgumentError
        When it is an array with a mask, an integer beyond int64, or a tensor that is sparse,
        nested, quantised, masked or without values.

    Examples
    --------
    >>> as_tensor(2.5).tensor
    tensor(2.5000, dtype=torch.float64)
    >>> as_tensor("bits") is None
    True
    """
    if isinstance(obj, torch.Tensor):
        if lack := lacking(obj):
            raise ArgumentError(
                "no tensor of one shape, all of whose numbers are there",
                got=lack,
                expected="an ordinary tensor",
                hint=".to_dense() of a sparse one, .dequantize() of a quantised one",
            )
        tensor = obj.detach().resolve_conj().resolve_neg()
        return TypedTensor(tensor, dtype_info(tensor.dtype), "tensor")
    if isinstance(obj, np.ma.MaskedArray):
        raise ArgumentError(
            "an array with a mask", got=type(obj).__name__, hint="the numbers alone, .compressed()"
        )
    if isinstance(obj, (np.ndarray, np.generic)) and not is_text(obj):
        return TypedTensor(*from_numpy(np.asarray(obj)), "array")
    if isinstance(obj, int) and not -(2**63) <= obj < 2**63:
        raise ArgumentError("an integer beyond int64", got=f"{obj.bit_length()} bits")
    if isinstance(obj, (bool, int, float, complex)):
        return TypedTensor(*from_numpy(np.array(obj)), "scalar")
    return None


def lacking(tensor: torch.Tensor) -> str | None:
    """In words, why a torch tensor is not numbers of one shape in memory; None where it is.

    Examples
    --------
    >>> import torch
    >>> lacking(torch.ones(2, device="meta")), lacking(torch.ones(2))
    ('a tensor of the meta device, without values', None)
    """
    name = type(tensor).__name__
    if tensor.is_meta:
        return "a tensor of the meta device, without values"
    if name in ("FakeTensor", "MaskedTensor"):
        return f"a {name}"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return f"a tensor of {tensor.dtype}"
    return None if tensor.layout is torch.strided else f"a tensor of {tensor.layout}"


def from_numpy(array: np.ndarray[Any, Any]) -> tuple[torch.Tensor, DType]:
    """A tensor over an array's memory where torch can read it, and the array's element type.

    A type narrower than a byte becomes int8 or float32, which hold its values.

    Raises
    ------
    DtypeError
        When ONNX or torch has no such element type.

    Examples
    --------
    >>> from_numpy(np.float16([1.5]))[0]
    tensor([1.5000], dtype=torch.float16)
    """
    info = dtype_info(array.dtype)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if info.bits < 8:  # torch cannot compute with these
        array = array.astype(np.float32 if info.is_float else np.int8)
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    dtype = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise DtypeError("torch has no such element type", got=info.name)
    if array.dtype.isbuiltin != 1:  # a type of ml_dtypes
        array = array.view(f"u{array.dtype.itemsize}")
    with warnings.catch_warnings():  # torch warns of arrays that may not be written to
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(array).view(dtype), info


def opened(obj: Any) -> dict[Any, Any] | list[Any] | None:
    """What a container holds, by name or in order; ``None`` where *obj* is none.

    A cache of transformers holds a pair of keys and values for each layer.

    Examples
    --------
    >>> from collections import namedtuple
    >>> Output = namedtuple("Output", "logits loss")
    >>> opened(Output([1.0], 0.5)), opened((1, 2)), opened(3)
    ({'logits': [1.0], 'loss': 0.5}, [1, 2], None)
    """
    if isinstance(obj, Mapping):
        return dict(obj)
    if isinstance(obj, tuple) and hasattr(obj, "_asdict"):
        return dict(obj._asdict())
    if isinstance(obj, (list, tuple)):
        return list(obj)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        fields = [f.name for f in dataclasses.fields(obj)]
        return {name: getattr(obj, name) for name in fields if getattr(obj, name) is not None}
    if "Cache" in type(obj).__name__ and isinstance(getattr(obj, "layers", None), list):
        return [(layer.keys, layer.values) for layer in obj.layers]
    return None


def tree_leaves(tree: Any) -> list[Any]:
    """Tensors, numbers and strings of a pytree, in order; None is left out.

    Examples
    --------
    >>> tree_leaves({"a": [1, None], "b": (2.5, "bits")})
    [1, 2.5, 'bits']
    """
    held = opened(tree)
    if held is None:
        return [] if tree is None else [tree]
    items = held.values() if isinstance(held, dict) else held
    return [leaf for item in items for leaf in tree_leaves(item)]


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
        Tensors, arrays, numbers, strings, lists, tuples, dicts, data classes, transformers' caches
        and outputs, nested at will. An unknown class shows as ``Name(...)``.
    with_shape : bool
        Shapes (``s2x3``) instead of ranks (``r2``).
    with_min_max : bool
        Smallest, largest and mean; numbers show their value.
    with_device : bool
        A letter for the device of each tensor.
    limit : int, default 20
        From this length on, a list or tuple shows its first element only.

    Raises
    ------
    DtypeError
        When ONNX has no such element type as a tensor of torch has.

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


@dataclasses.dataclass
class _Describer:
    with_shape: bool
    with_min_max: bool
    with_device: bool
    limit: int

    def line(self, obj: Any) -> str:
        name = type(obj).__name__
        if obj is None:
            return "None"
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        if type(obj) is np.ndarray or isinstance(obj, np.generic):
            return self._array(np.asarray(obj))
        if isinstance(obj, (bool, int, float, complex)):
            return f"{name}={obj}" if self.with_min_max else name
        if isinstance(obj, (str, bytes)):
            return name
        held = opened(obj)
        if held is None:
            return f"{name}(...)"
        if isinstance(held, list):
            text = self._sequence(held, type(obj) is tuple)
            return text if type(obj) in (list, tuple) else name + text
        cells = ",".join(f"{key}:{self.line(value)}" for key, value in held.items())
        if type(obj) is dict and all(type(key) is int for key in held):
            return f"{{{cells}}}"
        return f"{name}({cells})"

    def _sequence(self, held: list[Any], is_tuple: bool) -> str:
        opening, closing = "()" if is_tuple else "[]"
        if len(held) < self.limit or not held:
            cells = ",".join(map(self.line, held))
            if is_tuple:
                return f"({cells},)" if len(held) == 1 else f"({cells})"
            return f"#{len(held)}[{cells}]"
        text = f"#{len(held)}{opening}{self.line(held[0])},...{closing}"
        if self.with_min_max and all(isinstance(o, (bool, int, float)) for o in held):
            text += f"[{min(held)},{max(held)}:A{sum(float(o) for o in held) / len(held)}]"
        return text

    def _array(self, array: np.ndarray[Any, Any]) -> str:
        shape = self._shape(array.shape)
        if is_text(array):
            return f"A8{shape}"
        try:
            return f"A{dtype_info(array.dtype).onnx}{shape}{self._values(array)}"
        except DtypeError:  # dates, records: NumPy's own name
            return f"A<{array.dtype}>{shape}"

    def _tensor(self, tensor: torch.Tensor) -> str:
        fake = type(tensor).__name__ == "FakeTensor"
        has_values = lacking(tensor) is None
        if not (has_values or fake or tensor.is_meta):
            return f"{type(tensor).__name__}(...)"
        device = "C" if tensor.device.type in ("cpu", "meta") else "G"
        head = (device if self.with_device else "") + ("F" if fake else "T")
        text = f"{head}{dtype_info(tensor.dtype).onnx}{self._shape(tensor.shape)}"
        return text + self._values(tensor) if has_values else text

    def _shape(self, shape: Any) -> str:
        return f"s{'x'.join(map(str, shape))}" if self.with_shape else f"r{len(shape)}"

    def _values(self, obj: Any) -> str:
        typed = as_tensor(obj) if self.with_min_max else None
        if typed is None:
            return ""
        if typed.tensor.numel() == 0:
            return "[empty]"
        if typed.tensor.dim() == 0:
            return f"={float(typed.tensor) if typed.info.is_float else typed.tensor.item()}"
        return _extremes(typed)


def _extremes(typed: TypedTensor) -> str:
    """Smallest, largest, mean in float64, and the number of NaNs, which are left out."""
    tensor, info = typed.tensor.flatten(), typed.info
    if info.kind in ("int", "uint", "bool"):  # torch has no minimum of all of these types
        array = tensor.cpu().numpy()
        mean = float(array.sum(dtype=np.float64)) / len(array)
        return f"[{array.min()},{array.max()}:A{mean}]"
    if info.kind == "complex":
        tensor = tensor.abs()
    elif info.bits < 16:
        tensor = tensor.float()
    kept = tensor[~tensor.isnan()]
    nans = f"N{len(tensor) - len(kept)}nans" if len(kept) < len(tensor) else ""
    if not len(kept):
        return f"[{nans}]"
    low, high = (end.item() for end in kept.aminmax())
    return f"[{low},{high}:A{float(kept.sum(dtype=torch.float64)) / len(kept)}{nans}]"
