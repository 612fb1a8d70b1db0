"""Numbers as a page prints them, and whether a measured value rounds to one."""

from __future__ import annotations

import dataclasses
import decimal
import re

__all__ = ["Number"]

_TOLERANCE = 0.2  # of a number after "about"


@dataclasses.dataclass(frozen=True)
class Number:
    """A number that a sentence prints.

    Attributes
    ----------
    text : str
        As it is printed, such as ``1,536``, ``2.4e-5``, ``about 20`` or ``18.3%`` (of a share,
        0.183).

    Examples
    --------
    >>> Number("0.019").holds(0.0186), Number("0.018").holds(0.0186), Number("about 20").holds(23.5)
    (True, False, True)
    >>> Number("122").shown(98.44)
    '98.4'
    """

    text: str

    def holds(self, value: float) -> bool:
        """Whether *value* rounds to the number as printed; ±20 % after "about"."""
        number = _parse(self.text)
        if self.text.startswith("about "):
            return abs(value - float(number)) <= _TOLERANCE * abs(float(number))
        digit = 10.0 ** int(number.as_tuple().exponent)
        return abs(value - float(number)) <= 0.5 * digit * (1 + 1e-9)

    def shown(self, value: float) -> str:
        """Another machine's value, with as many significant digits; one where a word is printed."""
        digits = re.sub(r"\D", "", self.text.partition("e")[0]).lstrip("0")
        share = self.text.endswith("%")
        value = 100 * value if share else value
        text = f"{value:,.{max(len(digits), 1)}g}"
        if "e" in text and 1e-5 < abs(value) < 1e7:
            text = f"{float(text):,.0f}" if abs(value) >= 1 else f"{float(text):.12f}".rstrip("0")
        return text.replace("-", "−") + ("%" if share else "")


def _parse(text: str) -> decimal.Decimal:
    """The number, with the digits that are printed."""
    plain = text.removeprefix("about ").replace(",", "").replace("−", "-")
    plain = plain.replace("%", "e-2").replace(" ", "")
    return decimal.Decimal(plain)
