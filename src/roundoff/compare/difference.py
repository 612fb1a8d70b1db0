"""The result of a comparison: a mapping, and one line of it."""

from __future__ import annotations

import math
from typing import Any

from roundoff.errors import ArgumentError


class Difference(dict[str, Any]):
    """How two pytrees of tensors differ: named values, which are the items of a dict as well.

    ``abs``, ``ulp`` and ``n`` do not change when expected and got change places; nor do ``sum``
    and the counts. ``rel`` does. Every key is an attribute, too; ``share`` and ``index`` are
    attributes only.

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
    >>> d.abs, d["abs"]
    (0.5, 0.5)
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this comparison has no {name!r}") from None

    @property
    def share(self) -> float:
        """Share of the elements that differ, from 0 to 1; 1 where the structures differ."""
        if self["mismatch"]:
            return 1.0
        return float(self["differ"] / self["n"]) if self["n"] else 0.0

    @property
    def index(self) -> tuple[int, ...] | None:
        """Index, in its tensor, of the largest difference (``argm``); ``None`` where none is."""
        place: tuple[int, ...] | None = self["argm"]
        return place

    def __repr__(self) -> str:
        cells = [f"{key}={self[key]!r}" for key in ("abs", "rel", "ulp")]
        cells += [f"share={self.share:.3g}", f"n={self['n']:.0f}"]
        if self.index is not None:
            cells += [f"where={self['where']!r}", f"index={self.index!r}"]
        cells += [f"{key}={self[key]!r}" for key in ("dnan", "dinf", "mismatch") if self[key]]
        return f"Difference({', '.join(cells)})"


def identical(n: float = 0.0) -> Difference:
    """A difference of nothing, over *n* elements."""
    return Difference(
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
    for key in ("sum", "n", "differ", "dnan", "zeros", "dinf"):
        into[key] += other[key]
    into["mismatch"] = into["mismatch"] + other["mismatch"]


def string_diff(diff: Difference) -> str:
    """One line for the result of :func:`~roundoff.compare.max_diff`.

    ``abs=…, rel=…``; then, where something differs, ``n=`` the number of elements, and what else
    must not be missed: NaNs on one side, infinities, shapes and structures.

    Raises
    ------
    ArgumentError
        When *diff* is no such result.

    Examples
    --------
    >>> from roundoff.compare import max_diff
    >>> string_diff(max_diff([1.0, 2.0], [1.0, 2.5]))
    'abs=0.5, rel=0.25, n=2.0'
    >>> string_diff(max_diff(1, 1))
    'abs=0, rel=0'
    """
    if not isinstance(diff, Difference):
        raise ArgumentError("diff", got=type(diff).__name__, expected="what max_diff gives")
    if diff["abs"] == 0:
        return "abs=0, rel=0"
    text = f"abs={diff['abs']}, rel={diff['rel']}, n={diff['n']}"
    if diff["zeros"]:
        text += f", zeros={diff['zeros']} (rel={diff['rel_nonzero']} elsewhere)"
    for key in ("dnan", "dinf"):
        if diff[key]:
            text += f", {key}={diff[key]}"
    return ", ".join([text, *diff["mismatch"]])
