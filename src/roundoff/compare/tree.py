"""Comparison of two pytrees of tensors: walk both, compare the leaves, merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from roundoff.describe import TypedTensor, as_tensor, is_text, opened, string_type, tree_leaves
from roundoff.errors import ArgumentError

from .difference import Difference, check_thresholds, counted, identical, merge, unlike
from .stats import measure


def max_diff(expected: Any, got: Any, hist: bool | Sequence[float] | None = False) -> Difference:
    """Compare two pytrees of tensors.

    Parameters
    ----------
    expected, got : object
        Tensors of torch (any device), NumPy arrays, numbers, strings, None, and lists, tuples,
        dicts, caches and model outputs of these. Element types, devices and kinds may differ: the
        comparison is then done in a wider type. A tensor may stand for a list of one tensor; a
        list for a tuple; a list or tuple for a dict, data class or model output with as many
        values, in its order, or for one with as many tensors, in the order in which exported
        models give them.
    hist : bool or sequence of float
        True counts how many differences are above 0, 0.0001, 0.001, 0.01, 0.1, 1, 10 and 100,
        in absolute value; numbers are thresholds in their place. The counts are in
        ``rep``, a key that the result lacks without them.

    Returns
    -------
    Difference
        ``abs``, ``rel``, ``ulp``, ``share``, ``where``, ``index`` and more, as attributes and, as
        a dict, under the keys that its class lists. The dict is the caller's to change.

    Raises
    ------
    ArgumentError
        When a leaf is neither a tensor, a number, a string nor None, is sparse, has no data or a
        mask, or is an integer beyond int64; or a threshold is no number.
    DtypeError
        When a leaf has an element type that ONNX has not.

    Notes
    -----
    Differences are taken in float64, whatever the types. Equal infinities and NaNs in the same
    place differ by nothing. A NaN against a number, an infinity against another value, and shapes
    or structures that differ are infinite differences, above each threshold. Empty tensors of one
    shape do not differ. Bools count as 0 and 1. Complex numbers differ by the modulus, and in
    ``ulp`` by the worse part. Types of 8 bits or fewer are compared as the numbers that they stand
    for. Integers of 64 bits are subtracted exactly. Tensors of any size and stride are read a piece
    at a time.

    Examples
    --------
    >>> import numpy as np
    >>> d = max_diff(np.float32([1, 2]), np.float32([1, 2.5]))
    >>> d.abs, d.rel, d.share, d.index
    (0.5, 0.25, 0.5, (1,))
    >>> max_diff({"a": 1.0}, {"b": 1.0})["mismatch"]
    ["keys ['a'] against ['b']"]
    >>> max_diff([1.0, 2.0, 3.0], [1.0, 2.5, 3.25], hist=[0, 0.3])["rep"]
    {'>0.0': 2, '>0.3': 1}
    """
    return _compare(expected, got, "", check_thresholds(hist))


def _compare(e: Any, g: Any, where: str, thresholds: Sequence[float]) -> Difference:
    at = f" at {where}" if where else ""
    if e is None and g is None:
        return identical(0, thresholds)
    if is_text(e) and is_text(g):
        return _texts(np.asarray(e, dtype=object), np.asarray(g, dtype=object), where, thresholds)
    one, other = as_tensor(e), as_tensor(g)
    if one is not None and other is not None:
        return _tensors(one, other, where, thresholds)
    held, held_got = opened(e), opened(g)
    if held is not None and held_got is not None:
        return _containers(e, g, where, thresholds)
    if one is not None and isinstance(held_got, list) and len(held_got) == 1:
        return _compare(e, held_got[0], where, thresholds)
    if other is not None and isinstance(held, list) and len(held) == 1:
        return _compare(held[0], g, where, thresholds)
    for value, tensor, parts in ((e, one, held), (g, other, held_got)):
        if not (value is None or tensor or parts is not None or is_text(value)):
            raise ArgumentError(
                f"cannot compare an object of this class{at}",
                got=type(value).__name__,
                expected="tensors, arrays, numbers, strings, None, and lists and dicts of them",
            )
    return unlike(f"{string_type(e, True)} against {string_type(g, True)}{at}", thresholds)


def _containers(e: Any, g: Any, where: str, thresholds: Sequence[float]) -> Difference:
    at = f" at {where}" if where else ""
    one, other = opened(e), opened(g)
    if isinstance(one, dict) and isinstance(other, dict):
        if set(one) != set(other):
            only = [sorted(map(str, a.keys() - b.keys())) for a, b in ((one, other), (other, one))]
            return unlike(f"keys {only[0]} against {only[1]}{at}", thresholds)
        pairs = [(repr(key), value, other[key]) for key, value in one.items()]
    else:
        lists = [list(o.values()) if isinstance(o, dict) else list(o or ()) for o in (one, other)]
        if len(lists[0]) != len(lists[1]) and type(one) is not type(other):
            # An output object against its tensors in a list, as exported models give them.
            leaves = [tree_leaves(e), tree_leaves(g)]
            lists = leaves if len(leaves[0]) == len(leaves[1]) else lists
        if len(lists[0]) != len(lists[1]):
            return unlike(f"{len(lists[0])} values against {len(lists[1])}{at}", thresholds)
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(*lists, strict=True))]
    total = identical(0, thresholds)
    for key, a, b in pairs:
        merge(total, _compare(a, b, f"{where}[{key}]", thresholds))
    return total


def _texts(
    e: np.ndarray[Any, Any], g: np.ndarray[Any, Any], where: str, thresholds: Sequence[float]
) -> Difference:
    if e.shape != g.shape:
        at = f" at {where}" if where else ""
        return unlike(f"shape {e.shape} against {g.shape}{at}", thresholds)
    total = identical(e.size, thresholds)
    pairs = zip(e.flat, g.flat, strict=True)
    apart = [place for place, (a, b) in enumerate(pairs) if _decoded(a) != _decoded(b)]
    total.update(ulp=None, differ=len(apart))
    if apart:
        first = tuple(int(i) for i in np.unravel_index(apart[0], e.shape))
        total.update(abs=math.inf, rel=math.inf, rel_nonzero=math.inf, sum=math.inf)
        total.update(argm=first, where=where, expected=e[first], got=g[first])
        if thresholds:
            total["rep"] = counted(thresholds, len(apart))
    return total


def _decoded(cell: Any) -> str:
    return cell.decode("utf-8", "surrogateescape") if isinstance(cell, bytes) else str(cell)


def _tensors(e: TypedTensor, g: TypedTensor, where: str, thresholds: Sequence[float]) -> Difference:
    at = f" at {where}" if where else ""
    shapes = [tuple(t.tensor.shape) for t in (e, g)]
    if shapes[0] != shapes[1]:
        return unlike(f"shape {shapes[0]} against {shapes[1]}{at}", thresholds)
    total = measure(e, g, thresholds)
    if total["argm"] is not None:
        total["where"] = where
    return total
