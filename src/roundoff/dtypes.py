"""One table of element types: their ONNX, torch and NumPy names, eps, ulp and largest value.

ONNX numbers its element types in ``TensorProto.DataType``; those numbers are the keys here. Their
limits are ml_dtypes'. Neither torch nor onnx is imported until a function needs it.

Source: ONNX ``onnx.proto`` (TensorProto.DataType); IEEE 754-2019 for the binary formats;
`OCP 8-bit Floating Point Specification <https://www.opencompute.org/documents/>`_ for float8.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .errors import DtypeError

if TYPE_CHECKING:
    import torch

__all__ = [
    "DTYPES",
    "DType",
    "dtype_info",
    "onnx_dtype_name",
    "onnx_dtype_to_np_dtype",
    "onnx_dtype_to_torch_dtype",
    "ulp",
]


@dataclasses.dataclass(frozen=True)
class DType:
    """An element type.

    Attributes
    ----------
    onnx : int
        Number in ``onnx.TensorProto.DataType``.
    onnx_name : str
        Name in ``onnx.TensorProto.DataType``, such as ``"FLOAT16"``.
    name : str
        The name that torch, NumPy and ml_dtypes share, such as ``"float16"``.
    bits : int
        Width of an element in bits (0 for strings).
    kind : str
        ``"float"``, ``"int"``, ``"uint"``, ``"complex"``, ``"bool"`` or ``"string"``.
    precision : int
        Binary digits of the significand, the leading one included (0 unless a float; for a
        complex type, of each part).
    emax : int
        Exponent of the largest finite number.
    emin : int
        Exponent of the smallest normal number.
    max : float
        Largest finite value (``nan`` where the kind has none).

    Examples
    --------
    >>> half = dtype_info("float16")
    >>> half.eps, half.unit_roundoff, half.max, half.tiny == 2.0**-14
    (0.0009765625, 0.00048828125, 65504.0, True)
    """

    onnx: int
    onnx_name: str
    name: str
    bits: int
    kind: str
    precision: int = 0
    emax: int = 0
    emin: int = 0
    max: float = math.nan

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger number, 2**(1 - precision)."""
        return math.ldexp(1.0, 1 - self.precision) if self.precision else math.nan

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of one rounding to nearest, eps / 2."""
        return self.eps / 2

    @property
    def tiny(self) -> float:
        """Smallest positive normal number, 2**emin."""
        return math.ldexp(1.0, self.emin) if self.precision else math.nan

    @property
    def is_float(self) -> bool:
        """Whether this is a real floating-point type."""
        return self.kind == "float"


_NAMES = {
    1: ("FLOAT", "float32"),
    2: ("UINT8", "uint8"),
    3: ("INT8", "int8"),
    4: ("UINT16", "uint16"),
    5: ("INT16", "int16"),
    6: ("INT32", "int32"),
    7: ("INT64", "int64"),
    8: ("STRING", "str"),
    9: ("BOOL", "bool"),
    10: ("FLOAT16", "float16"),
    11: ("DOUBLE", "float64"),
    12: ("UINT32", "uint32"),
    13: ("UINT64", "uint64"),
    14: ("COMPLEX64", "complex64"),
    15: ("COMPLEX128", "complex128"),
    16: ("BFLOAT16", "bfloat16"),
    17: ("FLOAT8E4M3FN", "float8_e4m3fn"),
    18: ("FLOAT8E4M3FNUZ", "float8_e4m3fnuz"),
    19: ("FLOAT8E5M2", "float8_e5m2"),
    20: ("FLOAT8E5M2FNUZ", "float8_e5m2fnuz"),
    21: ("UINT4", "uint4"),
    22: ("INT4", "int4"),
    23: ("FLOAT4E2M1", "float4_e2m1fn"),
    24: ("FLOAT8E8M0", "float8_e8m0fnu"),
    25: ("UINT2", "uint2"),
    26: ("INT2", "int2"),
    27: ("FLOAT6E2M3", "float6_e2m3fn"),
    28: ("FLOAT6E3M2", "float6_e3m2fn"),
}


def _described(onnx: int, onnx_name: str, name: str) -> DType:
    if name == "str":
        return DType(onnx, onnx_name, name, 0, "string")
    if name == "bool":
        return DType(onnx, onnx_name, name, 8, "bool", max=1.0)
    kind = name.rstrip("0123456789") if "int" in name or "complex" in name else "float"
    if "int" in name:
        limits = ml_dtypes.iinfo(name)
        return DType(onnx, onnx_name, name, limits.bits, kind, max=float(limits.max))
    limits = ml_dtypes.finfo(name)
    bits = limits.bits * (2 if kind == "complex" else 1)
    emax, emin = (math.frexp(x)[1] - 1 for x in (limits.max, limits.smallest_normal))
    largest = math.nan if kind == "complex" else float(limits.max)
    return DType(onnx, onnx_name, name, bits, kind, limits.nmant + 1, emax, emin, largest)


#: Every element type of ONNX, by its number.
DTYPES: dict[int, DType] = {number: _described(number, *names) for number, names in _NAMES.items()}

_BY_NAME: dict[str, DType] = {d.name: d for d in DTYPES.values()} | {
    d.onnx_name: d for d in DTYPES.values()
}
_BY_NAME["float"] = DTYPES[1]  # as in torch and ONNX; NumPy's is float64


def dtype_info(dtype: Any) -> DType:
    """The :class:`~roundoff.dtypes.DType` that goes by any of its names.

    Parameters
    ----------
    dtype : any
        An ONNX number or name, a torch dtype, or anything NumPy takes for a dtype.

    Raises
    ------
    DtypeError
        When no ONNX element type corresponds.

    Examples
    --------
    >>> dtype_info(10).name, dtype_info("bfloat16").onnx, dtype_info(np.float64).precision
    ('float16', 16, 53)
    """
    if isinstance(dtype, DType):
        return dtype
    name = str(dtype).removeprefix("torch.")
    if isinstance(dtype, numbers.Integral) and not isinstance(dtype, bool):
        found = DTYPES.get(int(dtype))
    elif dtype is None or not name:  # NumPy takes them for float64
        found = None
    else:
        found = _BY_NAME.get(name) or _from_numpy(name if isinstance(dtype, str) else dtype)
    if found is None:
        raise DtypeError(
            "unknown element type",
            got=repr(dtype) if dtype is None or isinstance(dtype, str) else dtype,
            expected="an ONNX number (1 is float32), a torch or NumPy dtype, or a name",
            hint="roundoff.dtypes.DTYPES lists them all",
        )
    return found


def _from_numpy(dtype: Any) -> DType | None:
    try:
        np_dtype = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # the last two of a structure's fields
        return None
    if np_dtype.kind in "USOT":
        return _BY_NAME["str"]
    return _BY_NAME.get(np_dtype.name)


def onnx_dtype_name(itype: int) -> str:
    """Name of an ONNX element type: ``onnx_dtype_name(1) == "FLOAT"``.

    Raises
    ------
    DtypeError
        When *itype* is not in ``TensorProto.DataType``.

    Examples
    --------
    >>> onnx_dtype_name(1), onnx_dtype_name(16)
    ('FLOAT', 'BFLOAT16')
    """
    return dtype_info(itype).onnx_name


def onnx_dtype_to_np_dtype(itype: int) -> np.dtype[Any]:
    """NumPy dtype of an ONNX element type; types that NumPy lacks come from ``ml_dtypes``.

    Raises
    ------
    DtypeError
        When *itype* is not in ``TensorProto.DataType``.

    Examples
    --------
    >>> onnx_dtype_to_np_dtype(10)
    dtype('float16')
    """
    name = dtype_info(itype).name
    return np.dtype(object if name == "str" else getattr(ml_dtypes, name, name))


def onnx_dtype_to_torch_dtype(itype: int) -> torch.dtype:
    """Torch dtype of an ONNX element type.

    Raises
    ------
    DtypeError
        When torch has none (strings, for instance).

    Examples
    --------
    >>> onnx_dtype_to_torch_dtype(16)
    torch.bfloat16
    """
    import torch

    info = dtype_info(itype)
    found = getattr(torch, info.name, None)
    if not isinstance(found, torch.dtype):
        raise DtypeError(
            "no torch dtype for this ONNX type", got=info.onnx_name, expected="a numeric type"
        )
    return found


def ulp(x: Any, dtype: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Unit in the last place of *dtype* at each real *x*, as float64.

    Goldberg's definition: the spacing of the numbers of the format in the binade that holds
    \\|x\\|; below the smallest normal number the spacing of the subnormals; past the largest
    number the spacing of the last binade; ``nan`` where x is.

    Parameters
    ----------
    x : array_like of float64
        Any shape.
    dtype : any
        A floating-point type, as :func:`dtype_info` takes it.

    Raises
    ------
    DtypeError
        When *dtype* is not a floating-point type, or *x* is not made of real numbers.

    References
    ----------
    D. Goldberg, *What every computer scientist should know about floating-point arithmetic*, 1991;
    compared with others in J.-M. Muller, *On the definition of ulp(x)*, INRIA RR-5504, 2005.

    Examples
    --------
    >>> float(ulp(300.0, "float16")), float(ulp(1.0, "float32")) == 2.0**-23
    (0.25, True)
    """
    info = dtype_info(dtype)
    if not info.is_float:
        raise DtypeError("no unit in the last place", got=info.name, expected="a floating type")
    x = np.abs(_real_numbers(x))
    exponent = np.frexp(np.clip(x, info.tiny, info.max))[1]  # x < 2**exponent <= 2 x
    return np.where(np.isnan(x), np.nan, np.ldexp(1.0, exponent - info.precision))


def _real_numbers(x: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """*x* as an array of float64; a DtypeError for what is not made of real numbers."""
    if np.ma.is_masked(x):
        raise DtypeError(
            "no real numbers to take the unit of", got="a masked array", hint="x.compressed()"
        )
    try:
        if hasattr(x, "detach"):  # a tensor of torch, of a type that NumPy may lack
            x = x.detach().cpu()
            x = x if x.is_complex() else x.double()
        array = np.asarray(x)
        if array.dtype.kind in "cOSUMm":
            raise TypeError(array.dtype)
        return array.astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # the last of a tensor without data
        raise DtypeError(
            "no real numbers to take the unit of", got=type(x).__name__, expected="numbers"
        ) from error
