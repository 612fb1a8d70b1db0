"""Overload -> what writes it, and what every writer asks of a node."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from roundoff.fusion.editor import Dim

from ..converter import Converter, onnx_type
from ..sizes import dim, dims

#: Overload -> what writes it.
TABLE: dict[Any, Callable[..., Any]] = {}
BOOL, INT64 = ir.DataType.BOOL, ir.DataType.INT64
FLOAT = ir.DataType.FLOAT


def overload(name: str) -> Any:
    """The operator of torch's that ``namespace.name[.overload]`` names."""
    space, name, *rest = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), name), rest[0] if rest else "default")


#: Operators that torch writes in others, of the same values, before they are converted.
WRITTEN_IN_OTHERS = [
    overload(f"aten.{name}")
    for name in (
        *("arange", "arange.start", "clamp_max", "clamp_min", "new_full", "new_ones", "new_zeros"),
        *("ones", "ones_like", "rsub.Scalar", "rsub.Tensor", "stack", "t", "transpose.int"),
        *("tril", "triu", "unbind.int", "zeros", "zeros_like"),
    )
]


def writes(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function for overloads: ``add.Tensor`` of ATen, or with another namespace."""

    def enter(write: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            space = "" if name.split(".")[0] in ("aten", "prims", "roundoff") else "aten."
            TABLE[overload(space + name)] = write
        return write

    return enter


def kind_of(node: Any) -> ir.DataType:
    """The type of a node's elements."""
    return onnx_type(node.meta["val"].dtype)


def shape_of(node: Any) -> list[Dim]:
    """The sizes of a node's tensor: numbers and expressions."""
    return dims(node.meta["val"].shape)


def size_of(argument: Any) -> Dim:
    """An integer argument: a number, or the expression of a node of torch's graph."""
    return dim(argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument)


def rank_of(x: Any) -> int:
    """How many axes a node's tensor has."""
    return len(x.meta["val"].shape)


def on_cpu(node: Any) -> bool:
    """Whether a node's tensor lies on the CPU."""
    return bool(node.meta["val"].device.type == "cpu")


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis + rank if axis < 0 else axis


def constant_of(c: Converter, x: Any) -> float | None:
    """A number that is one at conversion, or a node's that is known then."""
    if not isinstance(x, torch.fx.Node):
        return float(x)
    if isinstance(x.meta.get("val"), (float, torch.SymFloat)):
        return float(x.meta["val"])
    value = c.values.get(x)
    array = c.array(value) if isinstance(value, ir.Value) else None
    return None if array is None else float(array)


def fits(x: Any, dtype: torch.dtype, factor: bool = False) -> bool:
    """Whether a type of torch's holds a number: torch raises where it does not, a cast wraps it.

    A factor has no digits to lose below the normal numbers: torch multiplies float16 in float32.
    """
    known = x.meta["val"] if isinstance(x, torch.fx.Node) else x
    if isinstance(known, torch.Tensor) or dtype == torch.bool:
        return True
    if isinstance(known, torch.SymInt):
        return dtype.is_floating_point or dtype == torch.int64
    known = float(known)
    if dtype.is_floating_point:
        kind, size = torch.finfo(dtype), abs(known)
        small = factor and 0 < size < kind.tiny
        return not math.isfinite(known) or (size <= kind.max and not small)
    whole = torch.iinfo(dtype)
    return math.isfinite(known) and whole.min <= known <= whole.max
