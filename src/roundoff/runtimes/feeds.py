"""Random inputs of a model, and a check of those that the caller gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch

from roundoff.arguments import check_feeds, check_mapping, check_whole
from roundoff.dtypes import DTYPES, onnx_dtype_to_torch_dtype
from roundoff.errors import ArgumentError, ShapeError, UnsupportedError
from roundoff.evaluator import TorchOnnxEvaluator
from roundoff.evaluator.checks import check_feed

__all__ = ["check_declared", "dims", "draw", "drawn_shapes", "limits"]


def check_declared(proto: onnx.ModelProto, feeds: Mapping[str, Any]) -> None:
    """Names, element types and shapes are those that the model declares."""
    declared = {i.name: i.type for i in proto.graph.input}
    check_feeds(feeds, list(declared), {t.name for t in proto.graph.initializer})
    seen: dict[str, tuple[str, int]] = {}
    for name, value in feeds.items():
        check_feed(name, value, declared[name], False)
        for dim, size in zip(dims(declared[name]) or (), getattr(value, "shape", ()), strict=False):
            if not isinstance(dim, str) or not dim.isidentifier():
                continue
            other, before = seen.setdefault(dim, (name, size))
            if before != size:
                raise ShapeError(
                    f"input {name!r}",
                    got=f"{dim} = {size}",
                    expected=f"{dim} = {before}, as in input {other!r}",
                )


def dims(declared: onnx.TypeProto) -> list[int | str] | None:
    """Declared dimensions of a tensor, "" for an unnamed one; None where the rank is unknown."""
    if not declared.tensor_type.HasField("shape"):
        return None
    return [
        d.dim_value if d.HasField("dim_value") else d.dim_param
        for d in declared.tensor_type.shape.dim
    ]


def drawn_shapes(
    inputs: Sequence[onnx.ValueInfoProto], sizes: Mapping[str, int] | None, seed: int
) -> dict[str, tuple[int, ...]]:
    """A shape for each input: one size for one symbolic name."""
    random = np.random.default_rng(seed)
    declared: dict[str, list[int | str]] = {}
    for info in inputs:
        wanted = dims(info.type)
        if not info.type.HasField("tensor_type") or wanted is None or _undrawable(info.type):
            raise UnsupportedError(
                f"input {info.name!r} can't be drawn",
                got=" ".join(str(info.type).split())[:80] or "no type",
                expected="a tensor of numbers of declared rank",
                hint="feeds=",
            )
        declared[info.name] = wanted
    names = {d for wanted in declared.values() for d in wanted if isinstance(d, str) and d}
    if sizes is not None:
        check_mapping("sizes", sizes, "names to counts")
    unknown = [n for n in sizes or () if n not in names]
    if unknown:
        raise ArgumentError("sizes", got=unknown, expected=f"names among {sorted(names)}")
    for name, size in (sizes or {}).items():
        check_whole(f"size {name!r}", size, 0)
    known = {n: int(random.integers(2, 9)) for n in sorted(names)} | dict(sizes or {})
    return {
        name: tuple(
            d if isinstance(d, int) else known[d] if d else int(random.integers(2, 9))
            for d in wanted
        )
        for name, wanted in declared.items()
    }


def _undrawable(declared: onnx.TypeProto) -> bool:
    info = DTYPES.get(declared.tensor_type.elem_type)
    return info is None or info.kind == "string" or (info.bits < 8 and info.kind != "bool")


#: Operators that look rows of their first input up by the second.
_LOOKUPS = {("", "Gather"), ("", "GatherElements")}
#: Operators that keep the values of their first input, in some shape.
_CARRIERS = {
    "Cast",
    "Identity",
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Transpose",
    "Expand",
    "Slice",
    "Tile",
}
#: Those that keep its shape, too.
_SAME_SHAPE = {"Cast", "Identity", "DequantizeLinear"}


def limits(evaluator: TorchOnnxEvaluator, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Input -> size of the smallest table that it indexes."""
    producers = {name: node for node in evaluator.nodes for name in node.outputs if name}

    def source(name: str, through: set[str]) -> tuple[str, Any]:
        """The input or constant that a result comes from."""
        while (
            name in producers
            and (node := producers[name]).domain == ""
            and (node.op_type in through)
        ):
            if 0 in node.constants:
                return "", node.constants[0]
            name = node.inputs[0]
        return name, None

    smallest: dict[str, int] = {}
    for node in evaluator.nodes:
        if (node.domain, node.op_type) not in _LOOKUPS:
            continue
        ids, _ = source(node.inputs[1], _CARRIERS)
        table, value = source(node.inputs[0], _SAME_SHAPE)
        value = node.constants.get(0, value)
        shape = tuple(value.shape) if value is not None else shapes.get(table)
        axis = node.attribute("axis", 0)
        if ids in shapes and shape and -len(shape) <= axis < len(shape):
            smallest[ids] = min(smallest.get(ids, shape[axis]), shape[axis])
    return smallest


def draw(
    inputs: Mapping[str, onnx.ValueInfoProto],
    shapes: Mapping[str, tuple[int, ...]],
    below: Mapping[str, int],
    seed: int,
) -> dict[str, torch.Tensor]:
    """Floats from a normal distribution, integers below their limit or 2, masks of ones."""
    generator = torch.Generator().manual_seed(seed)
    feeds = {}
    for name, shape in shapes.items():
        code = inputs[name].type.tensor_type.elem_type
        info, dtype = DTYPES[code], onnx_dtype_to_torch_dtype(code)
        if info.kind == "float":
            feeds[name] = torch.randn(shape, generator=generator).to(dtype)
        elif info.kind == "complex":
            feeds[name] = torch.randn(shape, generator=generator, dtype=dtype)
        elif "mask" in name.lower() and name not in below:
            feeds[name] = torch.ones(shape, dtype=dtype)
        else:
            most = min(below.get(name, 2), int(info.max) + 1)
            drawn = torch.randint(0, max(most, 1), shape, generator=generator)
            feeds[name] = drawn.to(dtype)
    return feeds
