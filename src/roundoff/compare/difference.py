"""The result of a comparison: a mapping that scripts may edit, merge and judge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from roundoff.arguments import check_number
from roundoff.errors import ArgumentError

#: Thresholds of the histogram, and so the keys of ``rep``.
THRESHOLDS = (0.0, 0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0)


class Difference(dict[str, Any]):
    """How two pytrees of tensors differ: named values, which are the items of a dict as well.

    ``abs``, ``ulp`` and ``n`` do not change when expected and got change places; nor do ``sum``,
    ``rep`` and the counts. ``rel`` does. Every key is an attribute, too, for as long
    as it is in the dict; ``share``, ``index`` and ``histogram`` are attributes only.

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
    ``dev``                 leaves whose devices differ
    ``argm``, ``where``     index of the worst element, and the way to its tensor; ``None``, ``""``
    ``expected``, ``got``   values of the worst element
    ``rep``                 with a histogram: number of differences above each threshold, under
                            ``">0.0"``, ``">0.0001"``, …
    ``notes``               what was compared all the same: types, devices or kinds that differ
    ``mismatch``            what could not be compared: shapes and structures; never empty when
                            they differ, and then ``abs``, ``rel``, ``ulp``, ``sum``, ``n``,
                            ``differ`` and ``dnan`` are infinite
    ======================= ======================================================================

    Examples
    --------
    >>> from roundoff.compare import max_diff
    >>> d = max_diff([1.0, 2.0], [1.0, 2.5])
    >>> d
    Difference(abs=0.5, rel=0.25, ulp=1125899906842624, share=0.5, n=2, where='[1]', index=())
    >>> d.abs, d["abs"], d.within(abs=0.1)
    (0.5, 0.5, False)
    >>> max_diff([1.0, 2.0], [1.0, 2.5], hist=[0.1, 1]).histogram
    {0.1: 1, 1.0: 0}
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this comparison has no {name!r}") from None

    @property
    def share(self) -> float:
        """Share of the elements that differ, from 0 to 1; 1 where the structures differ."""
        if self.get("mismatch"):
            return 1.0
        return float(self["differ"] / self["n"]) if self["n"] else 0.0

    @property
    def index(self) -> tuple[int, ...] | None:
        """Index, in its tensor, of the largest difference (``argm``); ``None`` where none is."""
        place: tuple[int, ...] | None = self["argm"]
        return place

    @property
    def histogram(self) -> dict[float, int]:
        """Threshold -> number of differences above it (``rep``); empty without a histogram."""
        return {float(key[1:]): count for key, count in self.get("rep", {}).items()}

    def __repr__(self) -> str:
        cells = [f"{key}={self[key]!r}" for key in ("abs", "rel", "ulp") if key in self]
        if "n" in self and "differ" in self:
            cells += [f"share={self.share:.3g}", f"n={self['n']:.0f}"]
        if self.get("argm") is not None:
            cells += [f"{at}={getattr(self, at)!r}" for at in ("where", "index")]
        cells += [f"{key}={self[key]!r}" for key in ("dnan", "dinf", "mismatch") if self.get(key)]
        return f"Difference({', '.join(cells)})"

    def within(
        self,
        abs: float | None = None,  # noqa: A002  the keys' own names
        rel: float | None = None,
        ulp: float | None = None,
    ) -> bool:
        """Whether every threshold that is passed holds, and the structures are the same.

        Raises
        ------
        ArgumentError
            When no threshold is passed, one that is no number, or one for a value that this
            comparison has not.

        Examples
        --------
        >>> from roundoff.compare import max_diff
        >>> d = max_diff([1.0, 2.0], [1.0, 2.5])
        >>> d.within(abs=0.5), d.within(rel=0.1)
        (True, False)
        """
        limits = {"abs": abs, "rel": rel, "ulp": ulp}
        limits = {k: v for k, v in limits.items() if v is not None}
        if not limits:
            raise ArgumentError("no threshold", expected="abs=, rel= or ulp=")
        for key, limit in limits.items():
            check_number(f"threshold {key}", limit, finite=False)
            if self.get(key) is None:
                raise ArgumentError(f"this comparison has no {key!r}", got=sorted(self))
        return not self.get("mismatch") and all(self[k] <= v for k, v in limits.items())


def identical(n: float = 0.0, thresholds: Sequence[float] = ()) -> Difference:
    """A difference of nothing, over *n* elements."""
    zero = {"abs": 0.0, "rel": 0.0, "sum": 0.0, "n": float(n), "dnan": 0.0, "ulp": 0}
    difference = Difference(
        zero,
        rel_nonzero=0.0,
        zeros=0,
        differ=0,
        dinf=0,
        dev=0,
        argm=None,
        where="",
        expected=None,
        got=None,
        notes=[],
        mismatch=[],
    )
    if thresholds:
        difference["rep"] = {f">{t}": 0 for t in thresholds}
    return difference


def unlike(what: str) -> Difference:
    """A difference of structure: infinite, with the reason."""
    difference = identical()
    for key in ("abs", "rel", "rel_nonzero", "sum", "n", "dnan", "ulp", "differ"):
        difference[key] = math.inf
    difference["mismatch"] = [what]
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
    for key in ("sum", "n", "differ", "dnan", "zeros", "dinf", "dev"):
        into[key] += other[key]
    for key in ("notes", "mismatch"):
        into[key] = into[key] + [t for t in other[key] if t not in into[key]]
    for key, count in other.get("rep", {}).items():
        into["rep"][key] += count


def string_diff(diff: Mapping[str, Any]) -> str:
    """One line for the result of :func:`~roundoff.compare.max_diff`.

    ``abs=…, rel=…``; then, where something differs, ``n=`` the number of elements; with a
    histogram, ``/#`` the number above each threshold that any is above; then what else must not be
    missed: NaNs on one side, infinities, devices, shapes and structures. Keys that were deleted
    are left out.

    Raises
    ------
    ArgumentError
        When *diff* is no such result.

    Examples
    --------
    >>> from roundoff.compare import max_diff
    >>> string_diff(max_diff([1.0, 2.0], [1.0, 2.5], hist=True))
    'abs=0.5, rel=0.25, n=2.0/#1>0.0-#1>0.0001-#1>0.001-#1>0.01-#1>0.1'
    >>> string_diff(max_diff(1, 1))
    'abs=0, rel=0'
    """
    if not isinstance(diff, Mapping):
        raise ArgumentError("diff", got=type(diff).__name__, expected="what max_diff gives")
    size, ratio = diff.get("abs", 0), diff.get("rel", 0)
    if size == 0 and ratio == 0 and not diff.get("dnan") and not diff.get("mismatch"):
        text = "abs=0, rel=0"
    else:
        text = f"abs={size}, rel={ratio}"
        if "n" in diff:
            text += f", n={diff['n']}"
        counts = [f"#{v}{k}" for k, v in diff.get("rep", {}).items() if v]
        if counts:
            text += "/" + "-".join(counts)
        if diff.get("zeros"):
            text += f", zeros={diff['zeros']} (rel={diff.get('rel_nonzero')} elsewhere)"
    for key in ("dnan", "dinf", "dev"):
        if diff.get(key):
            text += f", {key}={diff[key]}"
    if diff.get("mismatch"):
        text += ", " + "; ".join(diff["mismatch"])
    return text
