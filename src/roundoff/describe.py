"""Any pytree of tensors in one line (:func:`string_type`), and what it is made of.

:func:`as_tensor` sees a torch tensor in whatever holds numbers (array, scalar), without a copy
where it can; :func:`opened` sees what a container holds; :func:`tree_leaves` is all that a pytree
of these ends in.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from .dtypes import DType, dtype_info
from .errors import ArgumentError, DtypeError, RoundoffError

__all__ = [
    "TypedTensor",
    "as_tensor",
    "from_numpy",
    "is_text",
    "opened",
    "string_type",
    "tree_leaves",
]

#: Length from which a list or tuple shows its first element only.
_LONG = 20


class TypedTensor(NamedTuple):
    """A tensor and its declared element type.

    Attributes
    ----------
    tensor : torch.Tensor
        The values; shares memory with the object it came from where possible.
    info : DType
        The element type as declared; the tensor may be wider (int8 for int4).

    Examples
    --------
    >>> tensor, info = as_tensor(np.float16([1.5, 2.5]))
    >>> tensor.shape, info.name
    (torch.Size([2]), 'float16')
    """

    tensor: torch.Tensor
    info: DType


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
        if (
            obj.layout is not torch.strided
            or obj.is_meta
            or obj.is_nested
            or obj.is_quantized
            or type(obj).__name__ in ("FakeTensor", "MaskedTensor")
        ):
            raise ArgumentError(
                "no tensor of one shape, all of whose numbers are there",
                got=f"{type(obj).__name__}, {obj.layout}, {obj.device}",
                expected="an ordinary tensor",
                hint=".to_dense() of a sparse one, .dequantize() of a quantised one",
            )
        tensor = obj.detach().resolve_conj().resolve_neg()
        return TypedTensor(tensor, dtype_info(tensor.dtype))
    if isinstance(obj, np.ma.MaskedArray):
        raise ArgumentError(
            "an array with a mask", got=type(obj).__name__, hint="the numbers alone, .compressed()"
        )
    if isinstance(obj, (np.ndarray, np.generic)) and not is_text(obj):
        return TypedTensor(*from_numpy(np.asarray(obj)))
    if isinstance(obj, int) and not -(2**63) <= obj < 2**63:
        raise ArgumentError("an integer beyond int64", got=f"{obj.bit_length()} bits")
    if isinstance(obj, (bool, int, float, complex)):
        return TypedTensor(*from_numpy(np.array(obj)))
    return None


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
    obj: Any, with_shape: bool = False, with_min_max: bool = False, with_device: bool = False
) -> str:
    """One line that describes any pytree of tensors.

    ``CT1s2x3[0.0,5.0:A2.5]`` is a tensor on the CPU (``C``; ``G`` on a GPU) of torch (``T``; ``A``
    is a NumPy array, which has no device letter), with element type 1, ONNX's number of float32,
    shape 2 × 3, smallest value 0, largest 5 and mean 2.5. The mean is taken in float64. NaNs are
    left out of all three and counted: ``[0.0,5.0:A2.5N1nans]``. A complex tensor gives those of its
    modulus. A tensor without dimensions shows its value, ``T1s=3.5``; one without elements says
    ``[empty]``. A list or tuple of 20 or more shows its first element only.

    Parameters
    ----------
    obj : object
        Tensors, arrays, numbers, strings, lists, tuples, dicts, data classes, transformers' caches
        and outputs, nested at will. An unknown class shows as ``Name(...)``, and so do a tensor
        without values and an array of a type that ONNX lacks.
    with_shape : bool
        Shapes (``s2x3``) instead of ranks (``r2``).
    with_min_max : bool
        Smallest, largest and mean; numbers show their value.
    with_device : bool
        A letter for the device of each tensor.

    Examples
    --------
    >>> import numpy as np
    >>> string_type([np.arange(6, dtype=np.float32).reshape(2, 3)], True, True)
    '#1[A1s2x3[0.0,5.0:A2.5]]'
    >>> string_type({"a": (1, 2.5), "b": None}, with_min_max=True)
    'dict(a:(int=1,float=2.5),b:None)'
    """
    return _Describer(with_shape, with_min_max, with_device).line(obj)


@dataclasses.dataclass
class _Describer:
    with_shape: bool
    with_min_max: bool
    with_device: bool

    def line(self, obj: Any) -> str:
        name = type(obj).__name__
        if obj is None:
            return "None"
        if isinstance(obj, (torch.Tensor, np.ndarray, np.generic)):
            return self._tensor(obj)
        if isinstance(obj, (bool, int, float, complex)):
            return f"{name}={obj}" if self.with_min_max else name
        if isinstance(obj, (str, bytes)):
            return name
        held = opened(obj)
        if held is None:
            return f"{name}(...)"
        if isinstance(held, dict):
            cells = ",".join(f"{key}:{self.line(value)}" for key, value in held.items())
            return f"{name}({cells})"
        opening, closing = "()" if isinstance(obj, tuple) else "[]"
        if len(held) >= _LONG:
            return f"#{len(held)}{opening}{self.line(held[0])},...{closing}"
        cells = ",".join(map(self.line, held))
        if isinstance(obj, tuple):
            return f"({cells},)" if len(held) == 1 else f"({cells})"
        cache = "" if isinstance(obj, list) else name
        return f"{cache}#{len(held)}[{cells}]"

    def _tensor(self, obj: Any) -> str:
        is_array = not isinstance(obj, torch.Tensor)
        try:
            typed = as_tensor(obj)
        except RoundoffError:  # of a nested tensor, no shape can be asked for
            return f"{type(obj).__name__}(...)"
        shape = f"s{'x'.join(map(str, obj.shape))}" if self.with_shape else f"r{obj.ndim}"
        if typed is None:
            return f"A8{shape}"
        tensor, info = typed
        device = "" if is_array or not self.with_device else "G" if tensor.is_cuda else "C"
        text = f"{device}{'A' if is_array else 'T'}{info.onnx}{shape}"
        return text + _values(tensor, info) if self.with_min_max else text


def _values(tensor: torch.Tensor, info: DType) -> str:
    """Smallest, largest, mean in float64, and the number of NaNs, which are left out."""
    if tensor.numel() == 0:
        return "[empty]"
    if tensor.dim() == 0:
        return f"={float(tensor) if info.is_float else tensor.item()}"
    if info.kind in ("int", "uint", "bool"):  # torch has no minimum of all of these types
        array = tensor.cpu().numpy()
        return f"[{array.min()},{array.max()}:A{float(array.mean(dtype=np.float64))}]"
    sizes = tensor.abs() if info.kind == "complex" else tensor.to(torch.float64)
    kept = sizes[~sizes.isnan()]
    nans = f"N{sizes.numel() - len(kept)}nans" if len(kept) < sizes.numel() else ""
    if not len(kept):
        return f"[{nans}]"
    low, high = (end.item() for end in kept.aminmax())
    return f"[{low},{high}:A{float(kept.sum(dtype=torch.float64)) / len(kept)}{nans}]"
