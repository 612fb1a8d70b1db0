"""What stands behind a page of the site: a study, its numbers by name, and the style of figures.

A :class:`~roundoff.page.measurement.Study` measures tables, keeps them beside the environment they
were measured in, and defines the values that a page may print.
"""

from .style import DARK, PALETTE, use_style
from .values import choose

__all__ = [
    "DARK",
    "PALETTE",
    "choose",
    "use_style",
]
