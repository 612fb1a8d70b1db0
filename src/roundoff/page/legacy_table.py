"""What a cell shows: tables, sentences and drawings, as HTML and as text."""

from __future__ import annotations

import dataclasses
import html
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

__all__ = ["Emphasis", "Format", "Shown", "Table", "inline", "minus", "unmarked"]

Format = str | Callable[[Any], str]
Emphasis = str | Callable[[pd.DataFrame], "pd.Series[bool]"]


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
    """A table with a caption, units and number formats.

    Attributes
    ----------
    frame : pandas.DataFrame
        What is shown; floats have three digits, or all before the point from 1,000 to 10 million;
        integers are formatted with ``,d``. Without rows the caption alone is shown.
    caption : str
        One sentence; it stands above the table and is read out with it.
    formats : dict
        Column -> format specification, or a function of the value.
    units : dict
        Column -> unit, shown under the column's name.
    emphasize : dict
        Column -> ``"min"``, ``"max"`` or a function of the frame that says which rows; the cells
        are bold and marked, so that the emphasis does not depend on colour.
    labels : dict
        Column -> heading.
    missing : str
        What stands for NaN and None.
    source : str
        Where the numbers come from.
    identifier : str
        Identifier of the element in the page.
    is_recorded : bool
        Whether the table belongs in a record.

    Examples
    --------
    >>> frame = pd.DataFrame({"n": [2048], "error": [0.00012], "kernel": ["torch"]})
    >>> table = Table(frame, "Largest error.", units={"error": "ULP"}, formats={"error": ".1e"})
    >>> table.cells().values.tolist()
    [['2,048', '1.2e−04', 'torch']]
    """

    frame: pd.DataFrame
    caption: str
    formats: Mapping[str, Format] = dataclasses.field(default_factory=dict)
    units: Mapping[str, str] = dataclasses.field(default_factory=dict)
    emphasize: Mapping[str, Emphasis] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    missing: str = "–"
    source: str = ""
    identifier: str = "table"
    is_recorded: bool = True

    def cells(self) -> pd.DataFrame:
        """The table as text, formatted."""
        columns = {
            name: [_format(v, self.formats.get(name), self.missing) for v in series.tolist()]
            for name, series in self.frame.items()
        }
        return pd.DataFrame(columns, index=self.frame.index, dtype=object)

    def _repr_html_(self) -> str:
        name = html.escape(self.identifier)
        source = f'<span class="ro-source">{html.escape(self.source)}</span>' if self.source else ""
        if self.frame.empty:
            return f'<div class="ro-say" id="{name}"><p>{inline(self.caption)}{source}</p></div>'
        cells, strong = self.cells(), self._emphasized()
        numeric = {c: pd.api.types.is_numeric_dtype(self.frame[c]) for c in cells}
        head = "".join(
            f'<th scope="col"{_class(numeric[c])}>{self._heading(str(c))}</th>' for c in cells
        )
        body = []
        for row, values in enumerate(cells.itertuples(index=False)):
            line = []
            for i, (column, value) in enumerate(zip(cells, values, strict=True)):
                shown = html.escape(value)
                if strong.get(column, {}).get(row):
                    shown = f"<strong>{shown}</strong>"
                tag = 'th scope="row"' if i == 0 else "td"
                line.append(f"<{tag}{_class(numeric[column])}>{shown}</{tag[:2]}>")
            body.append(f"<tr>{''.join(line)}</tr>")
        return (
            f'<div class="ro-table" role="region" aria-labelledby="{name}" tabindex="0" '
            'style="overflow-x:auto"><table>'
            f'<caption id="{name}">{inline(self.caption)}{source}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        )

    def __repr__(self) -> str:
        cells = self.cells().rename(columns=lambda c: _plain(self._heading(str(c))))
        shown = "" if cells.empty else cells.to_string(index=False)
        lines = [self.caption, shown, self.source]
        return "\n".join(line for line in lines if line) + "\n"

    def _heading(self, column: str) -> str:
        unit = self.units.get(column)
        shown = html.escape(self.labels.get(column, column))
        return shown + (f' <span class="ro-unit">{html.escape(unit)}</span>' if unit else "")

    def _emphasized(self) -> dict[str, dict[int, bool]]:
        found = {}
        for column, rule in self.emphasize.items():
            series = self.frame[column]
            if callable(rule):
                chosen = rule(self.frame)
            else:
                chosen = series == (series.min() if rule == "min" else series.max())
            found[column] = dict(enumerate(np.asarray(chosen, dtype=bool).tolist()))
        return found


def _format(value: Any, spec: Format | None, missing: str) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return missing
    if callable(spec):
        return spec(value)
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if spec is not None:
        return f"{value:{spec}}".replace("-", "−")
    if isinstance(value, (int, np.integer)):
        return f"{value:,d}".replace("-", "−")
    if isinstance(value, (float, np.floating)):
        number = float(value)
        spec = ",.0f" if 1000 <= abs(number) < 1e7 else ".3g"
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


def unmarked(text: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"\1", text)


def _plain(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def _class(numeric: bool) -> str:
    return ' class="ro-number"' if numeric else ""
