"""What a value is made of: the torch tensor in it, or its parts, or the leaves of these.

:func:`as_tensor` sees a torch tensor in whatever holds one (array, scalar, OrtValue, TensorProto),
without a copy where it can; :func:`parts` sees a cache or a model's output as the dict or list it
stands for; :func:`tree_leaves` is all that a pytree of these ends in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from roundoff.dtypes import DType, dtype_info
from roundoff.errors import ArgumentError, DtypeError

__all__ = [
    "TypedTensor",
    "as_tensor",
    "from_numpy",
    "is_text",
    "lacking",
    "no_bottomless",
    "parts",
    "tree_leaves",
]

#: Views of ml_dtypes' types that torch has too, by the width of their integers.
_BITS = {8: np.uint8, 16: np.uint16}
_BYTES = {"int": np.int8, "uint": np.uint8}


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
        ``"tensor"``, ``"array"``, ``"scalar"``, ``"OrtValue"`` or ``"TensorProto"``.

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
    """The tensor in *obj*, or ``None`` where there is none, as of an integer beyond float64.

    Parameters
    ----------
    obj : torch.Tensor, numpy array or scalar, number, OrtValue, or TensorProto
        Sparse tensors become dense; gradients are dropped.

    Raises
    ------
    DtypeError
        When ONNX has no such element type (``longdouble``, dates), or torch cannot read it.
    ArgumentError
        When it is a nested or a masked tensor of torch.

    Examples
    --------
    >>> as_tensor(2.5).tensor
    tensor(2.5000, dtype=torch.float64)
    >>> as_tensor("bits") is None
    True
    """
    if isinstance(obj, (np.ndarray, np.generic)) and not is_text(obj):
        return TypedTensor(*from_numpy(np.asarray(obj)), "array")
    if isinstance(obj, (bool, int, float, complex)):
        try:
            return TypedTensor(*from_numpy(_scalar_array(obj)), "scalar")
        except OverflowError:
            return None
    name = type(obj).__name__
    if name == "OrtValue" and obj.has_value() and obj.is_tensor():
        return _from_ort(obj)
    if name == "TensorProto":
        import onnx

        array = onnx.numpy_helper.to_array(obj)
        if not is_text(array):
            tensor, _ = from_numpy(array)
            return TypedTensor(tensor, dtype_info(obj.data_type), "TensorProto")
    if isinstance(obj, torch.Tensor):
        if (lack := lacking(obj)) and "values" not in lack:
            raise ArgumentError(
                "no tensor of one shape, all of whose numbers count",
                got=lack,
                expected="an ordinary tensor",
                hint=".unbind() or .to_padded_tensor() of a nested "
                "tensor, .to_tensor(value) of a masked one",
            )
        tensor = obj.detach()
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        return TypedTensor(tensor.resolve_conj().resolve_neg(), dtype_info(tensor.dtype), "tensor")
    return None


def lacking(tensor: torch.Tensor) -> str | None:
    """In words, why a torch tensor is not numbers of one shape; None where it is.

    Examples
    --------
    >>> import torch
    >>> lacking(torch.ones(2, device="meta")), lacking(torch.ones(2))
    ('a tensor of the meta device, without values', None)
    """
    name = type(tensor).__name__
    if tensor.is_meta:
        return "a tensor of the meta device, without values"
    if name == "FakeTensor":
        return "a FakeTensor, without values"
    if name == "MaskedTensor":
        return "a MaskedTensor"
    return "a nested tensor" if tensor.is_nested else None


def _scalar_array(value: complex) -> np.ndarray[Any, Any]:
    if isinstance(value, bool):
        return np.array(value)
    if isinstance(value, int):
        inside = -(2**63) <= value < 2**63
        return np.array(value, dtype=np.int64 if inside else np.float64)
    return np.array(value, dtype=np.float64 if isinstance(value, float) else np.complex128)


def from_numpy(array: np.ndarray[Any, Any]) -> tuple[torch.Tensor, DType]:
    """A tensor over an array's memory where torch can read it, and the array's element type.

    A type narrower than a byte becomes int8, uint8 or float32, which hold its values.

    Raises
    ------
    DtypeError
        When ONNX or torch has no such element type.

    Examples
    --------
    >>> from_numpy(np.float16([1.5]))[0]
    tensor([1.5000], dtype=torch.float16)
    """
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    info = dtype_info(array.dtype)
    narrow = info.bits < 8  # torch cannot compute with these: a wider type holds them exactly
    if narrow:
        array = array.astype(np.float32 if info.is_float else _BYTES[info.kind])
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    foreign = info.is_float and info.bits <= 16 and info.name != "float16"  # from ml_dtypes
    if foreign and not narrow:
        dtype = getattr(torch, info.name, None)
        if dtype is None:
            raise DtypeError("torch has no such element type", got=info.name)
        return _share(array.view(_BITS[info.bits])).view(dtype), info
    return _share(array), info


def _share(array: np.ndarray[Any, Any]) -> torch.Tensor:
    with warnings.catch_warnings():  # torch warns of arrays that may not be written to
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(array)


def _from_ort(value: Any) -> TypedTensor:
    """Through DLPack, which keeps bfloat16 and the GPU; else through NumPy."""
    inner = getattr(value, "_ortvalue", value)
    info = dtype_info(int(value.element_type()))
    try:
        tensor = torch.utils.dlpack.from_dlpack(inner.to_dlpack())
        if info.kind == "bool":  # ONNX Runtime hands out bool as uint8
            tensor = tensor.to(torch.bool)
    except Exception:  # a build without DLPack, or a type that DLPack has not
        tensor, _ = from_numpy(np.asarray(value.numpy()))
    return TypedTensor(tensor, info, "OrtValue")


def parts(obj: Any) -> tuple[str, Any] | None:
    """(class name, dict or list of what it holds) of a cache, model output or data class.

    A cache of keys and values is ``{"key_cache": [...], "value_cache": [...]}``, a layer at a
    time; ``None`` where *obj* is no such container. Lists, tuples and dicts are not taken apart.

    Examples
    --------
    >>> from collections import namedtuple
    >>> Output = namedtuple("Output", "logits loss")
    >>> parts(Output([1.0], 0.5))
    ('Output', {'logits': [1.0], 'loss': 0.5})
    """
    name = type(obj).__name__
    if type(obj) in (dict, list, tuple, set, frozenset) or as_is(obj):
        return None
    if hasattr(obj, "self_attention_cache") and hasattr(obj, "cross_attention_cache"):
        both = ("self_attention_cache", "cross_attention_cache")
        return name, {k: getattr(obj, k) for k in both}
    if isinstance(layers := getattr(obj, "layers", None), list) and "Cache" in name:
        return name, {
            "key_cache": [getattr(layer, "keys", None) for layer in layers],
            "value_cache": [getattr(layer, "values", None) for layer in layers],
        }
    if "Layer" in name and hasattr(obj, "keys") and not callable(obj.keys):
        return name, {"keys": obj.keys, "values": obj.values}
    if isinstance(obj, Mapping):
        return name, dict(obj)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        values = {f.name: getattr(obj, f.name, None) for f in dataclasses.fields(obj)}
        return name, {k: v for k, v in values.items() if v is not None}
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return name, {k: getattr(obj, k) for k in obj._fields}
    if isinstance(obj, (list, tuple)):  # their other subclasses, such as torch.Size
        return name, list(obj)
    return None


def as_is(obj: Any) -> bool:
    """Whether *obj* is a leaf that :func:`parts` must not look into."""
    return obj is None or isinstance(
        obj, (str, bytes, bool, int, float, complex, np.ndarray, np.generic, type)
    )


def tree_leaves(tree: Any) -> list[Any]:
    """Tensors, numbers and strings of a pytree, in order; None is left out.

    A cache gives the key and the value of each layer in turn, as exported models do.

    Raises
    ------
    ArgumentError
        A container holds itself, or so many others in each other that Python cannot follow.

    Examples
    --------
    >>> tree_leaves({"a": [1, None], "b": (2.5, "bits")})
    [1, 2.5, 'bits']
    """
    with no_bottomless(tree):
        return _leaves(tree)


@contextlib.contextmanager
def no_bottomless(tree: Any) -> Iterator[None]:
    """Name a container that Python cannot follow to its end.

    Raises
    ------
    ArgumentError
        Python's recursion ended in the block.

    Examples
    --------
    >>> with no_bottomless([1]):
    ...     pass
    """
    try:
        yield
    except RecursionError:
        raise ArgumentError(
            "a container holds itself, or has too many levels",
            got=type(tree).__name__,
            expected="a tree of tensors",
        ) from None


def _leaves(tree: Any) -> list[Any]:
    if tree is None:
        return []
    if (opened := parts(tree)) is not None:
        tree = opened[1]
        if isinstance(tree, dict) and list(tree) == ["key_cache", "value_cache"]:
            layers = zip(tree["key_cache"], tree["value_cache"], strict=False)
            return [leaf for layer in layers for half in layer for leaf in _leaves(half)]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in _leaves(item)]
    return [tree]
