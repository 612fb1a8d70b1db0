"""Comparison of two nests of tensors: walk both, compare the leaves, merge."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from roundoff.describe import Held, as_tensor, is_text, parts, string_type
from roundoff.errors import ArgumentError

from .difference import THRESHOLDS, Difference, identical, merge, unlike
from .stats import measure


def max_diff(
    expected: Any, got: Any, hist: bool | Sequence[float] = False, *, flatten: bool = False
) -> Difference:
    """Compare two nests of tensors.

    Parameters
    ----------
    expected, got : object
        Tensors of torch (any device), NumPy arrays, numbers, strings, None, OrtValues,
        TensorProtos, and lists, tuples, dicts, caches and model outputs of these. Element types,
        devices and kinds may differ: the comparison is then done in a wider type, and noted. A
        tensor may stand for a list of one tensor; a list for a tuple; a list or tuple for a dict
        with as many values, in its order.
    hist : bool or sequence of float
        Count the differences above 0, 0.0001, 0.001, 0.01, 0.1, 1, 10 and 100, or above the
        thresholds given.
    flatten : bool
        Where the structures differ, compare the tensors of both in order.

    Returns
    -------
    Difference
        A dict; its class lists the keys.

    Raises
    ------
    ArgumentError
        When a leaf is neither a tensor, a number, a string nor None.
    DtypeError
        When a leaf has an element type that ONNX has not.

    Notes
    -----
    Differences are taken in float64, whatever the types. Equal infinities and NaNs in the same
    place differ by nothing. A NaN against a number, an infinity against another value, and shapes
    or structures that differ are infinite differences. Empty tensors of one shape do not differ.
    Bools count as 0 and 1. Complex numbers differ by the modulus, and in ``ulp`` by the worse
    part. Types of 8 bits or fewer are compared as the numbers that they stand for. Tensors of any
    size and stride are read a piece at a time.

    Examples
    --------
    >>> import numpy as np
    >>> d = max_diff(np.float32([1, 2]), np.float32([1, 2.5]))
    >>> d["abs"], d["rel"], d["n"], d["argm"], d["bias"]
    (0.5, 0.25, 2.0, (1,), 0.25)
    >>> max_diff({"a": 1.0}, {"b": 1.0})["mismatch"]
    ["keys ['a'] against ['b']"]
    """
    if isinstance(hist, bool):
        thresholds: tuple[float, ...] = THRESHOLDS if hist else ()
    else:
        thresholds = tuple(float(h) for h in hist)
    walk = _Walk(thresholds)
    if flatten:
        found = walk.compare(expected, got, "")
        if not found["mismatch"]:
            return found
        return walk.compare(list(leaves(expected)), list(leaves(got)), "")
    return walk.compare(expected, got, "")


def leaves(obj: Any) -> list[Any]:
    """Tensors, numbers and strings of a nest, in order; None is left out.

    A cache gives the key and the value of each layer in turn, as exported models do.

    Examples
    --------
    >>> leaves({"a": [1, None], "b": (2.5, "bits")})
    [1, 2.5, 'bits']
    """
    if obj is None:
        return []
    found = parts(obj)
    if found is not None:
        obj = found[1]
        if isinstance(obj, dict) and list(obj) == ["key_cache", "value_cache"]:
            pairs = zip(obj["key_cache"], obj["value_cache"], strict=False)
            return [leaf for pair in pairs for half in pair for leaf in leaves(half)]
    if isinstance(obj, dict):
        obj = list(obj.values())
    if isinstance(obj, (list, tuple)):
        return [leaf for item in obj for leaf in leaves(item)]
    return [obj]


@dataclasses.dataclass
class _Walk:
    thresholds: tuple[float, ...]

    def compare(self, e: Any, g: Any, where: str) -> Difference:
        if e is None and g is None:
            return identical()
        if is_text(e) or is_text(g):
            return self._text(e, g, where)
        held = as_tensor(e), as_tensor(g)
        if held[0] is not None and held[1] is not None:
            return self._tensors(held[0], held[1], where)
        for one, other, swap in ((held[0], g, False), (held[1], e, True)):
            if one is not None and isinstance(other, (list, tuple)) and len(other) == 1:
                pair = (other[0], g) if swap else (e, other[0])
                found = self.compare(*pair, where)
                found["notes"] = [*found["notes"], f"a tensor against one in a list{_at(where)}"]
                return found
        if (e is None) or (g is None) or held[0] is not None or held[1] is not None:
            return self._unlike(e, g, where)
        return self._containers(e, g, where)

    def _unlike(self, e: Any, g: Any, where: str) -> Difference:
        return unlike(f"{string_type(e, True)} against {string_type(g, True)}{_at(where)}")

    def _containers(self, e: Any, g: Any, where: str) -> Difference:
        notes = []
        opened = [parts(e), parts(g)]
        names = [type(e).__name__, type(g).__name__]
        e, g = (o if p is None else p[1] for o, p in zip((e, g), opened, strict=True))
        if isinstance(e, (set, frozenset)) and isinstance(g, (set, frozenset)):
            return identical(len(e)) if e == g else unlike(f"sets differ{_at(where)}")
        for obj, name in ((e, names[0]), (g, names[1])):
            if not isinstance(obj, (list, tuple, dict)):
                raise ArgumentError(
                    f"cannot compare an object of this class{_at(where)}", got=name,
                    expected="tensors, numbers, strings, None, and lists, tuples and dicts of them",
                )  # fmt: skip
        if names[0] != names[1]:
            notes.append(f"{names[0]} against {names[1]}{_at(where)}")
        if isinstance(e, dict) and isinstance(g, dict):
            if set(e) != set(g):
                only = [sorted(map(str, a.keys() - b.keys())) for a, b in ((e, g), (g, e))]
                return unlike(f"keys {only[0]} against {only[1]}{_at(where)}")
            pairs = [(f"{where}[{k!r}]", e[k], g[k]) for k in e]
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
        found = identical(cells[0].size)
        found["ulp"] = None
        apart = [i for i, (a, b) in enumerate(zip(*(c.flat for c in cells), strict=True))
                 if _decoded(a) != _decoded(b)]  # fmt: skip
        if apart:
            first = tuple(int(i) for i in np.unravel_index(apart[0], cells[0].shape))
            found.update(abs=math.inf, rel=math.inf, rel_nonzero=math.inf, sum=math.inf)
            found.update(argm=first, where=where, bias=0.0)
            found.update(expected=cells[0][first], got=cells[1][first])
        if self.thresholds:
            found["rep"] = {f">{t}": len(apart) for t in self.thresholds}
        return found

    def _tensors(self, e: Held, g: Held, where: str) -> Difference:
        if e.tensor.shape != g.tensor.shape:
            shapes = [tuple(h.tensor.shape) for h in (e, g)]
            return unlike(f"shape {shapes[0]} against {shapes[1]}{_at(where)}")
        stats = measure(e, g, self.thresholds)
        found = identical(stats.n)
        parts_of = [_sum([getattr(c, p) for c in stats.signed]) for p in ("real", "imag")]
        whole = complex(*parts_of) if "complex" in (e.info.kind, g.info.kind) else parts_of[0]
        found["bias"] = whole / max(stats.finite, 1)
        found.update(
            abs=stats.abs, rel=stats.rel, rel_nonzero=stats.rel_nonzero, zeros=stats.zeros,
            sum=_sum(stats.sums),
            dnan=float(stats.dnan), nan=stats.nan, dinf=stats.dinf,
            ulp=stats.ulp, finite=stats.finite,
        )  # fmt: skip
        if _is_truth(e, g):
            found["err_ulp"] = stats.err_ulp
        if stats.at is not None:
            index = tuple(int(i) for i in np.unravel_index(stats.at, tuple(e.tensor.shape)))
            found.update(argm=index, where=where)
            found.update(expected=e.tensor[index].item(), got=g.tensor[index].item())
        if self.thresholds:
            counts = zip(self.thresholds, stats.counts, strict=True)
            found["rep"] = {f">{t}": int(c) for t, c in counts}
        if e.kind == g.kind == "tensor":
            found["dev"] = int(e.device != g.device)
        found["notes"] = [
            f"{what} {a} against {b}{_at(where)}"
            for what, a, b in (("dtype", e.info.name, g.info.name),
                               ("device", e.device, g.device), ("kind", e.kind, g.kind))
            if a != b
        ]  # fmt: skip
        return found


def _sum(values: list[float]) -> float:
    """Exact sum, rounded once."""
    try:
        return math.fsum(values)
    except OverflowError:
        return sum(values)


def _is_truth(e: Held, g: Held) -> bool:
    kinds = ("float", "complex")
    return e.info.kind in kinds and g.info.kind in kinds and e.info.precision > g.info.precision > 0


def _at(where: str) -> str:
    return f" at {where}" if where else ""


def _decoded(cell: Any) -> str:
    return cell.decode("utf-8", "surrogateescape") if isinstance(cell, bytes) else str(cell)
