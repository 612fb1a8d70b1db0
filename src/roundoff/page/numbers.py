"""Numbers as a page prints them, and whether a measured value rounds to one."""

from __future__ import annotations

import dataclasses
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
        number, digit = _parse(self.text.removeprefix("about "))
        if self.text.startswith("about "):
            return abs(value - number) <= _TOLERANCE * abs(number)
        return abs(value - number) <= 0.5 * digit * (1 + 1e-9)

    def shown(self, value: float) -> str:
        """Another machine's value, with as many significant digits."""
        digits = re.sub(r"^[0.]+", "", re.sub(r"[eE].*|[^0-9.]", "", self.text)).replace(".", "")
        share = self.text.endswith("%")
        value = 100 * value if share else value
        text = f"{value:,.{max(len(digits), 1)}g}"
        if "e" in text and 1e-5 < abs(value) < 1e7:
            text = f"{float(text):,.0f}" if abs(value) >= 1 else f"{float(text):.12f}".rstrip("0")
        return text.replace("-", "−") + ("%" if share else "")


def _parse(text: str) -> tuple[float, float]:
    """The number, and the size of its last digit."""
    plain = text.replace(",", "").replace("−", "-").strip()
    plain = f"{plain[:-1].strip()}e-2" if plain.endswith("%") else plain
    mantissa, _, exponent = plain.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return float(plain), 10.0 ** (int(exponent or 0) - decimals)
