"""Charts of a table: dots or bars with intervals, and lines, in one panel or several.

They take tidy rows, and print the values beside the marks, so that a chart can be read without
its table. One colour means one thing on the whole site (:data:`COLOURS`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments import check_number
from ..errors import ArgumentError
from .claims import check_columns, check_frame
from .style import MARKERS, PALETTE, subplots

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COLOURS", "dots", "lines"]

#: What a colour means, on every page; other series take the rest of the palette, in order.
COLOURS = {
    "torch": PALETTE[0], "eager": PALETTE[0], "PyTorch": PALETTE[0],
    "ORT": PALETTE[1], "ONNX Runtime": PALETTE[1],
    "roundoff": PALETTE[2], "inductor": PALETTE[3], "Liger": PALETTE[4],
    "copy": PALETTE[7], "ceiling": PALETTE[7],
}  # fmt: skip
#: For series that are not listed.
_FREE = (PALETTE[6], PALETTE[5], PALETTE[4], PALETTE[7])
_SMALL = (3.9, 2.7)  # inches: at most 260 pixels high
_NARROW = 5  # inches: below it five columns of a legend do not fit
_MANY = 24  # dots in a panel beyond which a value is not printed beside each

Label = str | Callable[[Any], str]


def _colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each series: its own where it has one, else one that is nobody's."""
    taken = {COLOURS[n] for n in names if n in COLOURS}
    rest = itertools.cycle(
        dict.fromkeys(c for c in (*_FREE, *PALETTE) if c not in taken) or PALETTE
    )
    return {n: COLOURS[n] if n in COLOURS else next(rest) for n in names}


def _text(frame: pd.DataFrame, label: Label) -> list[str]:
    if callable(label):
        return [label(row) for row in frame.to_dict("records")]
    return [str(v) for v in frame[label]]


def _check_numbers(frame: pd.DataFrame, *names: str | None) -> None:
    """Refuse columns of something else than numbers: no axis holds it."""
    for name in names:
        if name is not None and frame[name].dtype.kind not in "iufb":
            raise ArgumentError(
                f"column {name}", got=str(frame[name].dtype), expected="numbers to draw"
            )


def _groups(frame: pd.DataFrame, column: str | None) -> list[tuple[str, pd.DataFrame]]:
    if column is None:
        return [("", frame)]
    return [(str(name), part) for name, part in frame.groupby(column, sort=False)]


def _number(value: float) -> str:
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return text.replace("-", "−")


def dots(
    frame: pd.DataFrame,
    x: str,
    label: Label,
    *,
    colour: str | None = None,
    panels: str | None = None,
    low: str | None = None,
    high: str | None = None,
    bars: bool = False,
    log: bool = False,
    reference: float | None = None,
    xlabel: str = "",
    title: str = "",
    small: bool = False,
) -> Any:
    """A row for each label, a dot (or bar) for each value, with its interval where there is one.

    Parameters
    ----------
    frame : pandas.DataFrame
        Tidy rows.
    x : str
        Column of the values.
    label : str or callable
        Column of the rows' labels, or a function of a row (a dict).
    colour, panels : str, optional
        Columns whose values get a colour each, a panel each (small multiples).
    low, high : str, optional
        Columns of the interval's ends.
    bars : bool
        Draw bars from the axis instead of dots.
    log : bool
        Logarithmic axis: a zero stands at its left end, labelled 0.
    reference : float, optional
        A vertical line, such as 1 for ratios.
    xlabel, title : str
        What the axis and the figure show, with the unit.
    small : bool
        For the answer box: half a page wide.

    Returns
    -------
    matplotlib.figure.Figure

    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"way": ["a", "b"], "error": [0.02, 0.0]})
    >>> figure = dots(frame, "error", "way", log=True, title="Error", xlabel="absolute")
    >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
    ['a', 'b']
    """
    check_frame(frame)
    check_columns(frame, x, colour, panels, low, high, None if callable(label) else label)
    _check_numbers(frame, x, low, high)
    if reference is not None:
        check_number("reference", reference)
    parts = _groups(frame, panels)
    names = list(dict.fromkeys(_text(frame, label)))
    series = list(dict.fromkeys(frame[colour].astype(str))) if colour else [""]
    colours = _colours(series)
    height = len(names) * (0.27 + 0.17 * (len(series) - 1)) + 0.75 + 0.25 * (len(series) > 1)
    size = (_SMALL[0], min(height, _SMALL[1])) if small else (8, height + 0.3)
    figure, axes = subplots(
        1, len(parts), title=title, figsize=size, sharey=len(parts) > 1 and panels is not None,
        squeeze=False, sharex=len(parts) > 1,
    )  # fmt: skip
    values = frame[x].astype(float)
    positive = values[values > 0]
    log = log and len(positive) > 0  # zeros alone have no logarithmic axis
    least = 10.0 ** math.floor(math.log10(positive.min()) - 0.15) if log else 0.0
    for axis, (name, part) in zip(axes[0], parts, strict=True):
        places = {
            n: i for i, n in enumerate(names if panels else dict.fromkeys(_text(part, label)))
        }
        printed = len(part) <= _MANY
        for k, one in enumerate(series):
            own = part[part[colour].astype(str) == one] if colour else part
            shift = (k - (len(series) - 1) / 2) * 0.8 / len(series)
            at = np.array([places[t] + shift for t in _text(own, label)])
            found = own[x].to_numpy(dtype=float)
            drawn = np.maximum(found, least) if log else found
            marker = MARKERS[k % len(MARKERS)]
            _marks(axis, at, drawn, colours[one], marker, one, bars, least, len(series))
            if low and high:
                ends = own[[low, high]].to_numpy(dtype=float).T
                axis.errorbar(drawn, at, xerr=np.abs(ends - drawn), fmt="none", capsize=3,
                              color=colours[one])  # fmt: skip
            for y, value, place in zip(at, found, drawn, strict=True) if printed else ():
                if not math.isnan(value):
                    axis.annotate(_number(value), (place, y), (8, 6 if high else 0),
                                  textcoords="offset points", va="center",
                                  fontsize=8.5)  # fmt: skip
        axis.set_yticks(range(len(places)), list(places))
        axis.set_ylim(len(places) - 0.5, -0.5)
        if name:
            axis.set_title(name)
        if log:
            axis.set_xscale("log")
            axis.set_xlim(least, positive.max() * (12 if small else 4))
        else:
            axis.margins(x=0.16)
            if bars:
                axis.set_xlim(left=min(0.0, float(values.min())))
        if reference is not None:
            axis.axvline(reference, color=PALETTE[7], linewidth=1.2)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel(xlabel)
    if colour and len(series) > 1:
        _legend(figure)
    return figure


def _marks(
    axis: Any, at: Any, values: Any, colour: str, marker: str, name: str, bars: bool,
    least: float, count: int,
) -> None:  # fmt: skip
    if bars:
        axis.barh(at, values - least, 0.72 / count, left=least, color=colour, label=name)
        return
    axis.hlines(at, least, values, color=colour, linewidth=1.6)
    axis.plot(values, at, linestyle="none", marker=marker, markersize=6.5, color=colour, label=name)


def _legend(figure: Any) -> None:
    """The series of all panels that have values, in as many columns as the figure has room for."""
    found: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            if _has_values(handle):
                found.setdefault(name, handle)
    ncols = min(len(found), 3 if figure.get_size_inches()[0] < _NARROW else 5)
    if found:
        figure.legend(found.values(), found, loc="outside lower center", ncols=ncols)


def _has_values(handle: Any) -> bool:
    is_bars = hasattr(handle, "datavalues")
    values = np.atleast_2d(handle.datavalues).T if is_bars else handle.get_xydata()
    return bool(np.isfinite(values).all(axis=1).any())


def lines(
    frame: pd.DataFrame,
    x: str,
    y: str | Sequence[str],
    *,
    series: str | None = None,
    panels: str | None = None,
    low: str | None = None,
    high: str | None = None,
    logx: bool = False,
    logy: bool = False,
    reference: float | None = None,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    dashed: Sequence[str] = (),
    own_scales: bool = False,
    small: bool = False,
) -> Any:
    """A line for each series, against a size.

    Parameters
    ----------
    frame : pandas.DataFrame
        Tidy rows, with a column *series*; or wide ones, with a column for each of *y*.
    x : str
        Column of the sizes.
    y : str or sequence of str
        Column of the values, or the columns that are lines.
    series, panels : str, optional
        Columns whose values get a line each, a panel each (small multiples).
    low, high : str, optional
        Columns of the interval's ends, drawn as a band.
    logx, logy : bool
        Logarithmic axes; the horizontal one has base 2 and its ticks at the sizes.
    reference : float, optional
        A horizontal line, such as 1 for ratios.
    xlabel, ylabel, title : str
        What the axes and the figure show, with units.
    dashed : sequence of str
        Series that are ceilings rather than measurements of a kernel.
    own_scales : bool
        Each panel has vertical limits of its own, for values that differ by orders of magnitude.
    small : bool
        For the answer box: half a page wide.

    Returns
    -------
    matplotlib.figure.Figure

    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"N": [1, 2, 4], "torch": [1.0, 2.0, 3.0], "copy": [3.0, 3.0, 3.0]})
    >>> figure = lines(frame, "N", ["torch", "copy"], dashed=["copy"], ylabel="GB/s", title="Speed")
    >>> [line.get_label() for line in figure.axes[0].lines]
    ['torch', 'copy']
    """
    check_frame(frame)
    if not isinstance(y, (str, Sequence)):
        raise ArgumentError("y", got=repr(y)[:80], expected="a column, or several")
    shown = [y] if isinstance(y, str) else list(y)
    check_columns(frame, x, *shown, series, panels, low, high)
    _check_numbers(frame, x, *shown, low, high)
    if reference is not None:
        check_number("reference", reference)
    if not isinstance(y, str):
        frame = frame.melt([c for c in frame if c not in y], list(y), "series", "value")
        series, y = "series", "value"
    parts = _groups(frame, panels)
    names = list(dict.fromkeys(frame[series].astype(str))) if series else [""]
    colours = _colours(names)
    figure, axes = subplots(
        1, len(parts), title=title, figsize=_SMALL if small else (8, 3.7),
        sharey=not own_scales, squeeze=False,
    )  # fmt: skip
    for axis, (name, part) in zip(axes[0], parts, strict=True):
        for k, one in enumerate(names):
            own = part[part[series].astype(str) == one] if series else part
            own = own[own[y].notna()].sort_values(x)
            axis.plot(
                own[x], own[y], marker=None if one in dashed else MARKERS[k % len(MARKERS)],
                markersize=3.5, linestyle="--" if one in dashed else "-", color=colours[one],
                label=one, markevery=max(1, len(own) // 32),
            )  # fmt: skip
            if low and high:
                axis.fill_between(own[x], own[low], own[high], color=colours[one], alpha=0.18)
        if name:
            axis.set_title(name)
        if logx:
            axis.set_xscale("log", base=2)
            sizes = sorted(part[x].unique())
            if len(sizes) > 20:  # powers of two among them are where labels do not overlap
                sizes = [s for s in sizes if math.log2(s).is_integer()] or sizes
            step = math.ceil(len(sizes) / (5 if len(parts) > 1 or small else 10))
            axis.set_xticks(sizes[::step], [f"{int(s):,}" for s in sizes[::step]])
            axis.minorticks_off()
        if logy:
            axis.set_yscale("log")
        elif own_scales:
            axis.set_ylim(0, 1.1 * part[y].max())
        elif reference is None:
            axis.set_ylim(bottom=0)
        if reference is not None:
            axis.axhline(reference, color=PALETTE[7], linewidth=1.2)
        axis.set_xlabel(xlabel)
    axes[0][0].set_ylabel(ylabel)
    if names != [""]:
        _legend(figure)
    return figure
