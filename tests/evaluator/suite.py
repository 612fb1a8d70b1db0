"""ONNX's own backend suite: its cases, and the comparison that it defines."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import ModelProto, OptionalProto, SequenceProto, TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner


class Case(NamedTuple):
    """A model with the feeds and results that ONNX ships for it."""

    name: str
    model: ModelProto
    data: list[tuple[list[Any], list[Any]]]
    rtol: float
    atol: float


def cases() -> Iterator[Case]:
    """1884 node cases, then the 140 models whose files ship with onnx."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for c in load_model_tests(kind="node"):
            data = [([_plain(x) for x in i], [_plain(x) for x in o]) for i, o in c.data_sets]
            yield Case(c.name, c.model, data, c.rtol, c.atol)
        for kind in ("simple", "pytorch-converted", "pytorch-operator"):
            for c in load_model_tests(kind=kind):
                folder = Path(c.model_dir)
                model = onnx.load(folder / "model.onnx")
                sets = sorted(folder.glob("test_data_set*"))
                data = [
                    (_read(s, "input", model.graph.input), _read(s, "output", model.graph.output))
                    for s in sets
                ]
                yield Case(c.name, model, data, c.rtol, c.atol)


def _plain(x: Any) -> Any:
    if isinstance(x, TensorProto):
        return numpy_helper.to_array(x)
    if isinstance(x, SequenceProto):
        return numpy_helper.to_list(x)
    return numpy_helper.to_optional(x) if isinstance(x, OptionalProto) else x


def _read(folder: Path, kind: str, infos: Any) -> list[Any]:
    found = []
    for k, info in enumerate(infos):
        path = folder / f"{kind}_{k}.pb"
        if not path.exists():
            break
        proto = {"sequence_type": SequenceProto, "optional_type": OptionalProto}.get(
            info.type.WhichOneof("value"), TensorProto
        )
        found.append(_plain(proto.FromString(path.read_bytes())))
    return found


def check(expected: Any, got: Any, rtol: float, atol: float) -> None:
    """As ONNX compares: type, shape, and values to the tolerances; sequences item by item."""
    for e, g in zip(expected, got, strict=True):
        if isinstance(e, (list, tuple)):
            assert isinstance(g, (list, tuple)), "not a sequence"
            check(e, g, rtol, atol)
        elif e is None or g is None:
            assert e is g
        else:
            Runner.assert_similar_outputs([np.asarray(e)], [np.asarray(g)], rtol, atol)
