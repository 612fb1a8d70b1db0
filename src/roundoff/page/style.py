"""The site's plot style: colours that read on a light page and on a dark one.

This is the only module that imports matplotlib.
"""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
from cycler import cycler

__all__ = ["DARK", "INK", "PALETTE", "RULE", "use_style"]

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
