"""The site's plot style: colours that read on a light page and on a dark one.

This is the only module that imports matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from cycler import cycler

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DARK", "INK", "PALETTE", "RULE", "dark", "subplots", "use_style"]

#: Colours of lines and bars: told apart by colour-blind readers, and at least 3:1 against white
#: and against the dark page, so that one drawing serves both.
PALETTE = ("#2f7fd6", "#cf6a1f", "#16936c", "#a45fc4", "#d64550", "#9a7b1c", "#1490ab", "#7b838d")
#: Colours that turn with the page: those of a light page -> those of a dark one.
DARK = {"#24292f": "#d9dee4", "#d5dae0": "#3a4048", "#ffffff": "#131416"}
INK, RULE, _ = DARK

#: matplotlib's settings.
STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 10,
    "axes.prop_cycle": cycler(color=PALETTE),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "figure.dpi": 100,
    "figure.facecolor": "none",
    "font.size": 10,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "patch.edgecolor": "none",
    "savefig.facecolor": "none",
    "svg.hashsalt": "roundoff",
    "text.color": INK,
    "xtick.color": INK,
    "xtick.labelsize": 9,
    "ytick.color": INK,
    "ytick.labelsize": 9,
}


def use_style() -> None:
    """Set matplotlib's defaults to the site's style.

    Examples
    --------
    >>> use_style()
    >>> mpl.rcParams["axes.titlelocation"]
    'left'
    """
    mpl.rcParams.update(STYLE)


def subplots(
    nrows: int = 1, ncols: int = 1, *, height: float = 3.4, title: str = "", **kwargs: Any
) -> Any:
    """``matplotlib.pyplot.subplots`` in the site's style and width.

    Parameters
    ----------
    nrows, ncols : int
        Rows and columns of axes.
    height : float
        Height of a row in inches; the width is that of a page, 8 inches.
    title : str
        Title of the whole figure, so that it can be read where its page is not at hand.
    **kwargs
        Go to :func:`matplotlib.pyplot.subplots`.

    Returns
    -------
    (matplotlib.figure.Figure, axes)
        One axes object, or an array of them.

    Examples
    --------
    >>> figure, axes = subplots(1, 2, height=3, title="Error by size")
    >>> len(axes), figure.get_suptitle()
    (2, 'Error by size')
    """
    import matplotlib.pyplot as plt

    use_style()
    size = (8, height * nrows + (0.3 if title else 0))
    figure, axes = plt.subplots(nrows, ncols, **{"figsize": size, **kwargs})
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure, axes


class dark:  # noqa: N801 - a context manager, used as a verb
    """Draw a figure for a dark page while the context lasts: ink, rules and paper change places.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        What is drawn; afterwards it has its own colours again.

    Examples
    --------
    >>> figure, axis = subplots()
    >>> with dark(figure):
    ...     mpl.colors.to_hex(axis.xaxis.label.get_color())
    '#d9dee4'
    >>> mpl.colors.to_hex(axis.xaxis.label.get_color())
    '#24292f'
    """

    def __init__(self, figure: Figure) -> None:
        self._figure = figure
        self._undo: list[tuple[Callable[[Any], None], Any]] = []

    def __enter__(self) -> Figure:
        for artist in self._figure.findobj():
            for name in ("color", "edgecolor", "facecolor", "markeredgecolor", "markerfacecolor"):
                self._turn(artist, name)
        return self._figure

    def __exit__(self, *exc: object) -> None:
        for setter, value in reversed(self._undo):
            setter(value)

    def _turn(self, artist: Any, name: str) -> None:
        getter, setter = (getattr(artist, f"{verb}_{name}", None) for verb in ("get", "set"))
        if getter is None or setter is None:
            return
        value = getter()
        try:
            colours = mpl.colors.to_rgba_array(value)
        except (TypeError, ValueError):
            return
        turned = [_turned(c) for c in colours]
        if any(t is not None for t in turned):
            self._undo.append((setter, value))
            new = [c if t is None else t for c, t in zip(colours, turned, strict=True)]
            setter(new[0] if len(new) == 1 else new)


def _turned(rgba: np.ndarray[Any, Any]) -> tuple[float, ...] | None:
    target = DARK.get(mpl.colors.to_hex(rgba[:3]))
    return None if target is None or rgba[3] == 0 else (*mpl.colors.to_rgb(target), float(rgba[3]))
