"""Feeds of a model: random ones, and fresh ones like those that are given."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import torch

from roundoff.dtypes import DTYPES, onnx_dtype_to_torch_dtype
from roundoff.errors import UnsupportedError
from roundoff.evaluator import TorchOnnxEvaluator

#: Operators that keep the values of their first input, in some shape.
_CARRIERS = ("Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Expand")
#: A tensor of fewer different values is a setting or a mask: it stays.
_FEW = 16


def drawn_shapes(proto: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """A shape for each input without a default: one size, 2 to 8, for one symbolic name."""
    random = np.random.default_rng(0)
    sizes: dict[str, int] = {}
    shapes = {}
    optional = {t.name for t in proto.graph.initializer}
    for info in proto.graph.input:
        if info.name in optional:
            continue
        declared = info.type.tensor_type
        kind = DTYPES.get(declared.elem_type)
        numbers = kind is not None and kind.kind not in ("string", "complex") and kind.bits >= 8
        if not numbers or not declared.HasField("shape"):
            raise UnsupportedError(
                f"input {info.name!r} can't be drawn",
                got=" ".join(str(info.type).split())[:80] or "no type",
                expected="a tensor of numbers of declared rank",
                hint="feeds=",
            )
        shape = []
        for axis, dim in enumerate(declared.shape.dim):
            symbol = dim.dim_param or f"{info.name}[{axis}]"
            drawn = sizes.setdefault(symbol, int(random.integers(2, 9)))
            shape.append(dim.dim_value if dim.HasField("dim_value") else drawn)
        shapes[info.name] = tuple(shape)
    return shapes


def tables_of(evaluator: TorchOnnxEvaluator) -> dict[str, int]:
    """Input -> rows of the smallest table of the model that it indexes."""
    makers = {name: node for node in evaluator.nodes for name in node.outputs}
    smallest: dict[str, int] = {}
    for node in evaluator.nodes:
        if node.operator != "Gather" or 0 not in node.constants:
            continue
        name = node.inputs[1]
        while name in makers and makers[name].operator in _CARRIERS:
            name = makers[name].inputs[0]
        rows = node.constants[0].shape[node.attribute("axis", 0)]
        smallest[name] = min(smallest.get(name, rows), rows)
    return smallest


def draw(
    proto: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    tables: Mapping[str, int],
    seed: int,
) -> dict[str, Any]:
    """Floats from a normal distribution, integers below their table or 2, masks of ones."""
    generator = torch.Generator().manual_seed(seed)
    types = {i.name: i.type.tensor_type.elem_type for i in proto.graph.input}
    feeds = {}
    for name, shape in shapes.items():
        dtype = onnx_dtype_to_torch_dtype(types[name])
        if dtype.is_floating_point:
            feeds[name] = torch.randn(shape, generator=generator).to(dtype)
        elif "mask" in name.lower() and name not in tables:
            feeds[name] = torch.ones(shape, dtype=dtype)
        else:
            most = min(tables.get(name, 2), int(DTYPES[types[name]].max) + 1)
            feeds[name] = torch.randint(most, shape, generator=generator).to(dtype)
    return feeds


def varied(feeds: Mapping[str, Any], tables: Collection[str]) -> dict[str, torch.Tensor]:
    """The values of the feeds that :func:`alike` draws anew.

    Floats, and integers that index a table (*tables* names them). All else stays: bools, other
    integers, floats with few different values or with an infinity or NaN (masks).
    """
    values = {}
    for name, value in feeds.items():
        if not isinstance(value, torch.Tensor) or not value.numel():
            continue
        if value.is_floating_point():
            wide = value.double()
            varies = bool(wide.isfinite().all()) and len(wide.unique()) >= _FEW
        else:
            varies = name in tables
        if varies:
            values[name] = value.reshape(-1).cpu()
    return values


def alike(
    feeds: Mapping[str, Any], tables: Collection[str], count: int
) -> Iterator[dict[str, Any]]:
    """Feeds whose values are drawn from those of *feeds*, each independently.

    They have the same range, signs and share of zeros. What relates one element to another is lost.
    """
    generator = torch.Generator().manual_seed(0)
    values = varied(feeds, tables)
    for _ in range(count):
        fresh = dict(feeds)
        for name, known in values.items():
            places = torch.randint(len(known), feeds[name].shape, generator=generator)
            fresh[name] = known[places].to(feeds[name].device)
        yield fresh
