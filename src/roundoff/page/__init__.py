"""Tables, figures and sentences of a page, the same in the site, a notebook and a terminal.

A page makes one :class:`Study`. Its methods return small objects that show themselves: HTML where
the last expression of a cell is shown (the site, a notebook), text in a terminal. Run as a script,
a study also saves its tables (CSV) and figures (PNG) under ``build/<page>/``, and with ``--record``
keeps the tables beside the environment they were measured in.
"""

from .charts import dots, lines
from .claims import Claim, ClaimError, choose
from .study import Run, Study, attempt
from .style import DARK, MARKERS, PALETTE, dark, subplots, use_style
from .table import Shown, Table

__all__ = [
    "DARK",
    "MARKERS",
    "PALETTE",
    "Claim",
    "ClaimError",
    "Run",
    "Shown",
    "Study",
    "Table",
    "attempt",
    "choose",
    "dark",
    "dots",
    "lines",
    "subplots",
    "use_style",
]
