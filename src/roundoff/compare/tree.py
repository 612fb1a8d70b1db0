"""Comparison of two pytrees of tensors: walk both, compare the leaves, merge."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from roundoff.describe import (
    TypedTensor,
    as_tensor,
    is_text,
    no_bottomless,
    parts,
    string_type,
    tree_leaves,
)
from roundoff.errors import ArgumentError

from .difference import THRESHOLDS, Difference, identical, merge, unlike
from .pieces import typed_tensor, with_data
from .stats import dtype_pair, measure, safe_fsum


def max_diff(expected: Any, got: Any, hist: bool | Sequence[float] = False) -> Difference:
    """Compare two pytrees of tensors.

    Parameters
    ----------
    expected, got : object
        Tensors of torch (any device), NumPy arrays, numbers, strings, None, OrtValues,
        TensorProtos, and lists, tuples, dicts, caches and model outputs of these. Element types,
        devices and kinds may differ: the comparison is then done in a wider type, and noted. A
        tensor may stand for a list of one tensor; a list for a tuple; a list or tuple for a dict,
        data class or model output with as many values, in its order, or for one with as many
        tensors, in the order in which exported models give them.
    hist : bool or sequence of float
        Count the differences above 0, 0.0001, 0.001, 0.01, 0.1, 1, 10 and 100, or above the
        thresholds given.

    Returns
    -------
    Difference
        ``abs``, ``rel``, ``ulp``, ``share``, ``where``, ``index``, ``histogram`` and more, as
        attributes and, as a dict, under the keys that its class lists.

    Raises
    ------
    ArgumentError
        When a leaf is neither a tensor, a number, a string nor None, has no data or a mask of
        NumPy, is an integer beyond int64, or a threshold is no number.
    DtypeError
        When a leaf has an element type that ONNX has not.

    Notes
    -----
    Differences are taken in float64, whatever the types. Equal infinities and NaNs in the same
    place differ by nothing. A NaN against a number, an infinity against another value, and shapes
    or structures that differ are infinite differences. Empty tensors of one shape do not differ.
    Bools count as 0 and 1. Complex numbers differ by the modulus, and in ``ulp`` by the worse
    part. Types of 8 bits or fewer are compared as the numbers that they stand for. Integers of 64
    bits are subtracted exactly. Tensors of any size and stride are read a piece at a time.

    Examples
    --------
    >>> import numpy as np
    >>> d = max_diff(np.float32([1, 2]), np.float32([1, 2.5]))
    >>> d.abs, d.rel, d.share, d.index
    (0.5, 0.25, 0.5, (1,))
    >>> max_diff({"a": 1.0}, {"b": 1.0})["mismatch"]
    ["keys ['a'] against ['b']"]
    """
    walk = _Walk(_thresholds(hist))
    with no_bottomless(expected):
        return walk.compare(expected, got, "")


def _thresholds(hist: bool | Sequence[float]) -> tuple[float, ...]:
    if isinstance(hist, bool):
        return THRESHOLDS if hist else ()
    try:
        thresholds = tuple(float(h) for h in hist)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            "thresholds of the histogram", got=repr(hist), expected="True, or numbers"
        ) from error
    if any(math.isnan(h) for h in thresholds):
        raise ArgumentError("a threshold of the histogram is NaN", got=thresholds)
    return thresholds


@dataclasses.dataclass
class _Walk:
    thresholds: tuple[float, ...]

    def compare(self, e: Any, g: Any, where: str) -> Difference:
        if e is None and g is None:
            return identical()
        for value in (e, g):
            if isinstance(value, np.ma.MaskedArray):
                typed_tensor(value, f"a tensor{_at(where)}")  # refused
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ArgumentError(
                    f"an integer beyond int64{_at(where)}", got=f"{value.bit_length()} bits"
                )
        if is_text(e) or is_text(g):
            return self._text(e, g, where)
        tensors = as_tensor(e), as_tensor(g)
        if tensors[0] is not None and tensors[1] is not None:
            return self._tensors(tensors[0], tensors[1], where)
        for one, other, swap in ((tensors[0], g, False), (tensors[1], e, True)):
            if one is not None and isinstance(other, (list, tuple)) and len(other) == 1:
                pair = (other[0], g) if swap else (e, other[0])
                total = self.compare(*pair, where)
                total["notes"] = [*total["notes"], f"a tensor against one in a list{_at(where)}"]
                return total
        if (e is None) or (g is None) or tensors[0] is not None or tensors[1] is not None:
            return self._unlike(e, g, where)
        return self._containers(e, g, where)

    def _unlike(self, e: Any, g: Any, where: str) -> Difference:
        for obj in (e, g):
            known = (
                obj is None or is_text(obj) or isinstance(obj, int) or as_tensor(obj) is not None
            )
            if not known and parts(obj) is None and not isinstance(obj, _CONTAINERS):
                raise _unknown(obj, where)
        return unlike(f"{string_type(e, True)} against {string_type(g, True)}{_at(where)}")

    def _containers(self, e: Any, g: Any, where: str) -> Difference:
        notes = []
        opened = [parts(e), parts(g)]
        names = [type(e).__name__, type(g).__name__]
        leaves = [tree_leaves(e), tree_leaves(g)]  # of a cache, a layer at a time
        e, g = (o if p is None else p[1] for o, p in zip((e, g), opened, strict=True))
        for obj, name in ((e, names[0]), (g, names[1])):
            if not isinstance(obj, (list, tuple, dict)):
                raise _unknown(obj, where, name)
        if names[0] != names[1]:
            notes.append(f"{names[0]} against {names[1]}{_at(where)}")
        if isinstance(e, dict) and isinstance(g, dict):
            if set(e) != set(g):
                only = [sorted(map(str, a.keys() - b.keys())) for a, b in ((e, g), (g, e))]
                return unlike(f"keys {only[0]} against {only[1]}{_at(where)}")
            pairs = [(f"{where}[{k!r}]", e[k], g[k]) for k in e]
        elif len(leaves[0]) == len(leaves[1]) and (_one_by_one(e, g) or _one_by_one(g, e)):
            notes.append(f"tensor by tensor{_at(where)}")
            pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(*leaves, strict=True))]
        else:
            lists = [list(o.values()) if isinstance(o, dict) else list(o) for o in (e, g)]
            if len(lists[0]) != len(lists[1]):
                return unlike(f"{len(lists[0])} values against {len(lists[1])}{_at(where)}")
            pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(*lists, strict=True))]
        total = identical()
        if self.thresholds:
            total["rep"] = {f">{t}": 0 for t in self.thresholds}
        for path, a, b in pairs:
            merge(total, self.compare(a, b, path))
        total["notes"] = notes + total["notes"]
        return total

    def _text(self, e: Any, g: Any, where: str) -> Difference:
        if not (is_text(e) and is_text(g)):
            return self._unlike(e, g, where)
        cells = [np.asarray(o, dtype=object) for o in (e, g)]
        if cells[0].shape != cells[1].shape:
            return unlike(f"shape {cells[0].shape} against {cells[1].shape}{_at(where)}")
        total = identical(cells[0].size)
        total["ulp"] = None
        apart = [
            i
            for i, (a, b) in enumerate(zip(*(c.flat for c in cells), strict=True))
            if _decoded(a) != _decoded(b)
        ]
        if apart:
            first = tuple(int(i) for i in np.unravel_index(apart[0], cells[0].shape))
            total.update(abs=math.inf, rel=math.inf, rel_nonzero=math.inf, sum=math.inf)
            total.update(argm=first, where=where)
            total.update(expected=cells[0][first], got=cells[1][first])
        total["differ"] = len(apart)
        if self.thresholds:
            total["rep"] = {f">{t}": len(apart) for t in self.thresholds}
        return total

    def _tensors(self, e: TypedTensor, g: TypedTensor, where: str) -> Difference:
        for tensor in (e, g):
            with_data(tensor, f"a tensor{_at(where)}")
        if e.tensor.shape != g.tensor.shape:
            shapes = [tuple(h.tensor.shape) for h in (e, g)]
            return unlike(f"shape {shapes[0]} against {shapes[1]}{_at(where)}")
        # Zero is among the thresholds, for the share that differs.
        thresholds = (*self.thresholds, *(() if 0.0 in self.thresholds else (0.0,)))
        stats = measure(e, g, dtype_pair(e, g), thresholds)
        counts = dict(zip(thresholds, stats.counts.tolist(), strict=True))
        total = identical(stats.n)
        total.update(
            abs=stats.abs,
            rel=stats.rel,
            rel_nonzero=stats.rel_nonzero,
            zeros=stats.zeros,
            sum=safe_fsum(stats.sums),
            differ=counts[0.0],
            dnan=float(stats.dnan),
            dinf=stats.dinf,
            ulp=stats.ulp,
        )
        if stats.at is not None:
            index = tuple(int(i) for i in np.unravel_index(stats.at, tuple(e.tensor.shape)))
            total.update(argm=index, where=where)
            total.update(expected=e.tensor[index].item(), got=g.tensor[index].item())
        if self.thresholds:
            total["rep"] = {f">{t}": counts[t] for t in self.thresholds}
        if e.kind == g.kind == "tensor":
            total["dev"] = int(e.device != g.device)
        total["notes"] = [
            f"{what} {a} against {b}{_at(where)}"
            for what, a, b in (
                ("dtype", e.info.name, g.info.name),
                ("device", e.device, g.device),
                ("kind", e.kind, g.kind),
            )
            if a != b
        ]
        return total


_CONTAINERS = (list, tuple, dict)


def _unknown(obj: Any, where: str, name: str = "") -> ArgumentError:
    return ArgumentError(
        f"cannot compare an object of this class{_at(where)}",
        got=name or type(obj).__name__,
        expected="tensors, numbers, strings, None, and lists, tuples and dicts of them",
    )


def _one_by_one(fields: Any, values: Any) -> bool:
    """Whether a list or tuple is not the fields of an output object, but may be its tensors."""
    if not isinstance(fields, dict) or not isinstance(values, (list, tuple)):
        return False
    # A list of keys and one of values is not a pair for each layer, even of two layers.
    return len(fields) != len(values) or list(fields) == ["key_cache", "value_cache"]


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def _decoded(cell: Any) -> str:
    return cell.decode("utf-8", "surrogateescape") if isinstance(cell, bytes) else str(cell)
