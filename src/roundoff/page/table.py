"""What a cell shows: a table, and the same table of several machines as tabs."""

from __future__ import annotations

import dataclasses
import html
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..compare.bounds import round_up
from ..errors import ArgumentError
from .claims import check_frame
from .columns import column

__all__ = ["WIDEST", "Shown", "Table", "inline", "minus", "tabs"]

#: Columns that a page can show at once.
WIDEST = 7
#: Rows that the switch can bring into view; a longer table is downloaded.
_LONGEST = 16


class Shown:
    """Something a cell shows: HTML in a page or notebook, text in a terminal.

    Examples
    --------
    >>> Shown("<strong>bits</strong>", "bits")
    bits
    """

    def __init__(self, markup: str, text: str) -> None:
        self._markup = markup
        self._text = text

    def _repr_html_(self) -> str:
        return self._markup

    def __repr__(self) -> str:
        return self._text


@dataclasses.dataclass(frozen=True)
class Table:
    """One table of one run, its telling columns and rows in sight.

    Labels, units and formats come from one registry, by the column's name.

    Attributes
    ----------
    frame : pandas.DataFrame
        All of it.
    caption : str
        One sentence that says what the table shows.
    columns : sequence of str
        The telling columns, at most seven; the others are behind a switch.
    telling : sequence of bool, optional
        The rows in sight; the others are behind the switch, or in the CSV file where they are
        more than 16.
    machine : str
        Name of the run in addresses, such as ``nvidia-h200``.
    name : str
        Name of the run for a reader, such as "H200".
    source : str
        Machine, date and commit.
    csv : str
        Address of the table as CSV, where there is one.

    Raises
    ------
    ArgumentError
        When more than seven columns would be in sight, or one of them does not exist.

    Examples
    --------
    >>> frame = pd.DataFrame({"N": [2048], "error": [0.00012], "kernel": ["torch"]})
    >>> table = Table(frame, "Largest error.", ["N", "error"])
    >>> table.cells().values.tolist()
    [['2048', '0.00012', 'torch']]
    >>> table.heading("error")
    ('largest error', 'ε × RMS')
    """

    frame: pd.DataFrame
    caption: str
    columns: Sequence[str]
    telling: Sequence[bool] | None = None
    machine: str = "this-build"
    name: str = "This build"
    source: str = ""
    csv: str = ""

    def __post_init__(self) -> None:
        check_frame(self.frame)
        if isinstance(self.columns, str) or not hasattr(self.columns, "__iter__"):
            raise ArgumentError("columns", got=repr(self.columns)[:80], expected="a list of names")
        rows = len(self.frame)
        if self.telling is not None and np.shape(self.telling) != (rows,):
            raise ArgumentError("telling", got=f"{self.telling!r:.80}", expected=f"{rows} bools")
        missing = [c for c in self.columns if c not in self.frame]
        if missing:
            raise ArgumentError("no such column", got=", ".join(map(str, missing)),
                                expected=", ".join(map(str, self.frame)))  # fmt: skip
        if len(self.columns) > WIDEST:
            raise ArgumentError(
                f"the table {self.caption[:40]!r} is too wide", got=f"{len(self.columns)} columns",
                expected=f"at most {WIDEST} in sight", hint="columns= names the telling ones",
            )  # fmt: skip

    def heading(self, name: str) -> tuple[str, str]:
        """Label and unit of a column; a second run's column is named after the first's."""
        first = name.removesuffix(AGAIN)
        label = column(first).label + (AGAIN if first != name else "")
        return label, column(first).unit

    def cells(self) -> pd.DataFrame:
        """The table as text, formatted."""
        columns = {
            name: [
                _format(v, column(str(name).removesuffix(AGAIN)).format) for v in series.tolist()
            ]
            for name, series in self.frame.items()
        }
        return pd.DataFrame(columns, index=self.frame.index, dtype=object)

    def markup(self, *, switch: bool) -> str:
        """The ``table`` element; *switch*: with what is behind the switch."""
        cells = self.cells()
        telling = self._telling()
        hidden = [c for c in cells if c not in self.columns] if switch else []
        order = [*self.columns, *hidden]
        rows = range(len(cells)) if self._can_unfold() and switch else np.flatnonzero(telling)
        numeric = {c: _is_number(self.frame[c]) for c in order}
        head = "".join(self._th(c, numeric[c], c in hidden) for c in order)
        body = []
        for row in rows:
            line = []
            for i, name in enumerate(order):
                shown = html.escape(cells[name].iloc[row])
                tag = 'th scope="row"' if i == 0 else "td"
                line.append(f"<{tag}{_class(numeric[name], name in hidden)}>{shown}</{tag[:2]}>")
            more = "" if telling[row] else ' class="ro-more"'
            body.append(f"<tr{more}>{''.join(line)}</tr>")
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"

    def more(self) -> str:
        """Label of the switch; empty where all is in sight."""
        rest = len(self.frame.columns) - len(self.columns)
        rows = len(self.frame) if self._can_unfold() and not all(self._telling()) else 0
        parts = [f"{rows} rows"] if rows else []
        parts += [f"{len(self.frame.columns)} columns"] if rest else []
        return f"All {' and '.join(parts)}" if parts else ""

    def _can_unfold(self) -> bool:
        return len(self.frame) <= _LONGEST

    def _telling(self) -> list[bool]:
        return [True] * len(self.frame) if self.telling is None else [bool(t) for t in self.telling]

    def _th(self, name: str, numeric: bool, more: bool) -> str:
        label, unit = self.heading(str(name))
        about = column(str(name).removesuffix(AGAIN)).about
        title = f' title="{html.escape(about, quote=True)}"' if about else ""
        shown = html.escape(label)
        shown += f' <span class="ro-unit">{html.escape(unit)}</span>' if unit else ""
        return f'<th scope="col"{_class(numeric, more)}{title}>{shown}</th>'

    def __repr__(self) -> str:
        names = {c: " ".join(filter(None, self.heading(str(c)))) for c in self.frame}
        telling = np.asarray(self._telling(), dtype=bool)
        cells = self.cells()[telling][list(self.columns)].rename(columns=names)
        shown = "" if cells.empty else cells.to_string(index=False)
        return "\n".join(line for line in (self.caption, shown, _sources(self, ())) if line) + "\n"


#: What a column of a second run is called after.
AGAIN = ", second run"


def tabs(name: str, tables: Sequence[Table], *, alone: bool = False) -> Shown:
    """The same table of several machines, a tab each; equal ones are shown once.

    The tabs of a page move together: their labels belong to the page's one set of radio buttons,
    which the site puts below the answer.

    Parameters
    ----------
    name : str
        Name of the table.
    tables : sequence of Table
        The most telling first.
    alone : bool
        Whether this is a notebook, whose page has no radio buttons: the first table is shown, the
        others fold.

    Examples
    --------
    >>> table = Table(pd.DataFrame({"n": [1]}), "One number.", ["n"])
    >>> "ro-pane" in tabs("numbers", [table])._repr_html_()
    True
    """
    merged: list[tuple[Table, list[Table]]] = []
    for table in tables:
        for first, others in merged:
            if first.cells().astype(str).equals(table.cells().astype(str)):
                others.append(table)
                break
        else:
            merged.append((table, []))
    text = "\n".join(map(repr, (first for first, _ in merged)))
    if alone:
        return Shown(_folded(name, merged), text)
    panes = "".join(_pane(name, i, first, others) for i, (first, others) in enumerate(merged))
    bar = "".join(
        f'<label for="ro-m-{t.machine}">{html.escape(t.name)}</label>'
        for first, others in merged
        for t in (first, *others)
    )
    bar = f'<div class="ro-bar">{bar}</div>' if len(tables) > 1 else ""
    caption = inline(tables[0].caption)
    markup = (
        f'<div class="ro-tabs" id="table-{name}"><p class="ro-caption" id="caption-{name}">'
        f"{caption}</p>{bar}{panes}</div>"
    )
    return Shown(markup, text)


def _pane(name: str, place: int, table: Table, equal: Sequence[Table]) -> str:
    machines = " ".join(t.machine for t in (table, *equal))
    more = table.more()
    switch = (
        f'<label class="ro-switch"><input type="checkbox"> {html.escape(more)}</label>'
        if more
        else ""
    )
    links = f'<a href="{html.escape(table.csv)}">CSV</a>' if table.csv else ""
    sources = _sources(table, equal)
    identifier = f"table-{name}-{place}"
    return (
        f'<div class="ro-pane" data-m="{machines}">{switch}'
        f'<div class="ro-table" role="region" aria-labelledby="caption-{name} {identifier}" '
        f'tabindex="0">{table.markup(switch=True)}</div>'
        f'<p class="ro-source"><span id="{identifier}">{html.escape(sources)}</span> {links}</p>'
        "</div>"
    )


def _sources(table: Table, equal: Sequence[Table]) -> str:
    """Names of the machines, and once what is the same of them."""
    named: dict[str, list[str]] = {}
    for t in (table, *equal):
        named.setdefault(t.source, []).append(t.name)
    return "; ".join(f"{' and '.join(names)}, {source}".rstrip(", ")
                     for source, names in named.items())  # fmt: skip


def _folded(name: str, merged: Sequence[tuple[Table, Sequence[Table]]]) -> str:
    shown = []
    for i, (table, equal) in enumerate(merged):
        sources = html.escape(_sources(table, equal))
        inner = table.markup(switch=False)
        if i == 0:
            caption = f'<p id="caption-{name}"><b>{inline(table.caption)}</b></p>'
            shown.append(f"{caption}{inner}<p><small>{sources}</small></p>")
        else:
            shown.append(f"<details><summary>{sources}</summary>{inner}</details>")
    return "".join(shown)


def _format(value: Any, spec: str) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if spec == "up":  # a limit that is rounded down holds no longer
        return f"{round_up(value):.2g}"
    if spec == "share":
        return f"{100 * value:.3g} %".replace("-", "−").replace("inf", "∞")
    if isinstance(value, (int, np.integer)):
        return f"{value:{spec if spec.endswith('d') else ',d'}}".replace("-", "−")
    if isinstance(value, (float, np.floating)):
        number = float(value)
        if not math.isfinite(number):
            return "∞" if number > 0 else "−∞"
        if not spec or (spec.endswith("g") and 1000 <= abs(number) < 1e7):
            spec = ",.0f" if 1000 <= abs(number) < 1e7 else ".3g"
        spec = ".0f" if spec.endswith("d") else spec
        return f"{number:{spec}}".replace("-", "−")
    return str(value)


def inline(text: str) -> str:
    """Escape, then turn ``code`` (one or two backquotes) and **bold** into elements."""
    text = re.sub(r"(``?)(.+?)\1", r"<code>\2</code>", html.escape(text, quote=False))
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)


_HYPHEN = re.compile(r"(`[^`]*`)|(?<![\w-])-(?=\d)|(?<=\de)-(?=\d)")


def minus(text: str) -> str:
    """A minus sign where a number begins, or its exponent, with a hyphen; code is left alone."""
    return _HYPHEN.sub(lambda found: found[1] or "−", text)


def _is_number(series: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(series) and not pd.api.types.is_bool_dtype(series)


def _class(numeric: bool, more: bool = False) -> str:
    names = " ".join(n for n, given in (("ro-number", numeric), ("ro-more", more)) if given)
    return f' class="{names}"' if names else ""
