"""The result of a comparison: a mapping that a script may edit, and one line of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from roundoff.arguments import check_number
from roundoff.errors import ArgumentError

#: What ``hist=True`` counts above, and so the keys of ``rep``.
THRESHOLDS = (0.0, 0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0)


class Difference(dict[str, Any]):
    """How two pytrees of tensors differ: named values, which are the items of a dict as well.

    ``abs``, ``ulp`` and ``n`` do not change when expected and got change places; nor do ``sum``,
    ``rep`` and the counts. ``rel`` does. Every key is an attribute, too, for as long as it is in
    the dict; ``share`` and ``index`` are attributes only. Keys may be added, changed and deleted:
    a list of differences is what ``pandas.DataFrame`` takes.

    ======================= ======================================================================
    key                     value
    ======================= ======================================================================
    ``abs``                 largest absolute difference, a float
    ``rel``                 largest \\|got − expected\\| / \\|expected\\|; 0 / 0 is 0, and infinite
                            where expected is 0 and got is not: ``zeros`` counts these elements,
                            ``rel_nonzero`` is the largest over the others
    ``ulp``                 largest distance in units in the last place of the coarser type, an
                            integer; infinite beside a NaN or an infinity; for integers and bools
                            the difference itself; ``None`` where there is no number
    ``sum``, ``n``          sum of the absolute differences, number of elements; both floats
    ``differ``              number of elements that differ, those NaN in one alone included
    ``dnan``                elements NaN in one alone; NaN in both counts as no difference
    ``dinf``                elements where an infinity meets another value that is not NaN
    ``argm``, ``where``     index of the worst element, and the way to its tensor; ``None``, ``""``
    ``expected``, ``got``   values of the worst element
    ``rep``                 only with ``hist``: a dict with the number of differences above each
                            threshold, under ``">0.0"``, ``">0.0001"`` and so on
    ``mismatch``            what could not be compared: shapes and structures; never empty when
                            they differ, and then ``abs``, ``rel``, ``ulp``, ``sum``, ``n``,
                            ``differ``, ``dnan`` and the counts of ``rep`` are infinite
    ======================= ======================================================================

    Examples
    --------
    >>> from roundoff.compare import max_diff
    >>> d = max_diff([1.0, 2.0], [1.0, 2.5])
    >>> d
    Difference(abs=0.5, rel=0.25, ulp=1125899906842624, share=0.5, n=2, where='[1]', index=())
    >>> d.abs, d["abs"]
    (0.5, 0.5)
    >>> d = max_diff([1.0, 2.0], [1.0, 2.5], hist=True)
    >>> d.update(d["rep"])
    >>> del d["rep"]
    >>> d[">0.1"], d[">1.0"]
    (1, 0)
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this comparison has no {name!r}") from None

    @property
    def share(self) -> float:
        """Share of the elements that differ, from 0 to 1; 1 where the structures differ."""
        if self.mismatch:
            return 1.0
        return float(self.differ / self.n) if self.n else 0.0

    @property
    def index(self) -> tuple[int, ...] | None:
        """Index, in its tensor, of the largest difference (``argm``); ``None`` where none is."""
        place: tuple[int, ...] | None = self.argm
        return place

    def __repr__(self) -> str:
        cells = [f"{key}={self[key]!r}" for key in ("abs", "rel", "ulp") if key in self]
        if {"differ", "n", "mismatch"} <= self.keys():
            cells.append(f"share={self.share:.3g}")
        if "n" in self:
            cells.append(f"n={self['n']:.0f}")
        if self.get("argm") is not None:
            cells += [f"where={self['where']!r}"] * ("where" in self) + [f"index={self.index!r}"]
        cells += [f"{key}={self[key]!r}" for key in ("dnan", "dinf", "mismatch") if self.get(key)]
        return f"Difference({', '.join(cells)})"


def check_thresholds(hist: Any) -> tuple[float, ...]:
    """What ``hist`` asks to be counted above: none where it is False or None.

    Raises
    ------
    ArgumentError
        When it is neither a flag nor some numbers.
    """
    if hist is None or isinstance(hist, bool) or type(hist).__name__ == "bool":  # of NumPy, too
        return THRESHOLDS if hist else ()
    try:
        given = None if isinstance(hist, (str, bytes, Mapping)) else [*hist]
    except TypeError:
        given = None
    if given is None:
        raise ArgumentError("hist", got=repr(hist)[:80], expected="True, False or some numbers")
    checked = [check_number("a threshold of hist", t, 0, finite=False) for t in given]
    return tuple(dict.fromkeys(abs(t) for t in checked))  # each once, and no -0


def counted(thresholds: Sequence[float], count: float) -> dict[str, float]:
    """A histogram with the same count above each threshold."""
    return dict.fromkeys((f">{threshold}" for threshold in thresholds), count)


def identical(n: float = 0.0, thresholds: Sequence[float] = ()) -> Difference:
    """A difference of nothing, over *n* elements, with a histogram where there are thresholds."""
    difference = Difference(
        {"abs": 0.0, "rel": 0.0, "sum": 0.0, "n": float(n), "dnan": 0.0, "ulp": 0},
        rel_nonzero=0.0,
        zeros=0,
        differ=0,
        dinf=0,
        argm=None,
        where="",
        expected=None,
        got=None,
        mismatch=[],
    )
    if thresholds:
        difference["rep"] = counted(thresholds, 0)
    return difference


def unlike(what: str, thresholds: Sequence[float] = ()) -> Difference:
    """A difference of structure: infinite, with the reason."""
    difference = identical()
    for key in ("abs", "rel", "rel_nonzero", "sum", "n", "dnan", "ulp", "differ"):
        difference[key] = math.inf
    difference["mismatch"] = [what]
    if thresholds:
        difference["rep"] = counted(thresholds, math.inf)
    return difference


def merge(into: Difference, other: Difference) -> None:
    """Take in the comparison of another part of the same pytree."""
    if other["abs"] > into["abs"] or (into["argm"] is None and other["abs"] == into["abs"] > 0):
        for key in ("argm", "where", "expected", "got"):
            into[key] = other[key]
    for key in ("abs", "rel", "rel_nonzero"):
        into[key] = max(into[key], other[key])
    units = [u for u in (into["ulp"], other["ulp"]) if u is not None]
    into["ulp"] = max(units) if units else None
    for key in ("sum", "n", "differ", "dnan", "zeros", "dinf"):
        into[key] += other[key]
    for key, count in other.get("rep", {}).items():
        into["rep"][key] += count
    into["mismatch"] = into["mismatch"] + other["mismatch"]


def string_diff(diff: Mapping[str, Any]) -> str:
    """One line for the result of :func:`~roundoff.compare.max_diff`.

    ``abs=…, rel=…``; then, where something differs, ``n=`` the number of elements; with ``hist``,
    after a slash, ``#`` the number above each threshold that any difference is above; and what else
    must not be missed: NaNs on one side, infinities, shapes and structures. What was deleted from
    *diff* is left out.

    Parameters
    ----------
    diff : Difference
        Or another mapping with some of its keys.

    Raises
    ------
    ArgumentError
        When *diff* is no such result.

    Examples
    --------
    >>> from roundoff.compare import max_diff
    >>> string_diff(max_diff([1.0, 2.0], [1.0, 2.5]))
    'abs=0.5, rel=0.25, n=2.0'
    >>> string_diff(max_diff([1.0, 2.0], [1.0, 2.5], hist=True))
    'abs=0.5, rel=0.25, n=2.0/#1>0.0-#1>0.0001-#1>0.001-#1>0.01-#1>0.1'
    >>> string_diff(max_diff(1, 1))
    'abs=0, rel=0'
    """
    if not isinstance(diff, Mapping) or not {"abs", "rel"} & diff.keys():
        raise ArgumentError("diff", got=type(diff).__name__, expected="what max_diff gives")
    if not (diff.get("abs") or diff.get("rel")):
        return "abs=0, rel=0"
    text = ", ".join(f"{key}={diff[key]}" for key in ("abs", "rel", "n") if key in diff)
    counts = [f"#{count}{key}" for key, count in diff.get("rep", {}).items() if count]
    if counts:
        text += "/" + "-".join(counts)
    if diff.get("zeros"):
        text += f", zeros={diff['zeros']} (rel={diff.get('rel_nonzero')} elsewhere)"
    for key in ("dnan", "dinf"):
        if diff.get(key):
            text += f", {key}={diff[key]}"
    return ", ".join([text, *diff.get("mismatch", [])])
