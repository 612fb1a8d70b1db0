"""Claims: sentences that could have come out false, judged on this build and on every record.

A claim is static text. Its rows are chosen by data (``where``), so that one claim is evaluated on
every run of a page; a number in braces is bound to a value of these rows.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments import check_mapping
from ..errors import ArgumentError, RoundoffError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Claim", "ClaimError", "Number", "Outcome", "choose", "prints"]

_NUMBER = re.compile(r"(\b(?:[Aa]bout|[Aa]t least|[Uu]p to|[Aa]t most) )?\{([^{}]*)\}")
_TOLERANCE = 0.2  # of a number after "about"


class ClaimError(RoundoffError, AssertionError):
    """A sentence of a page contradicts its rows, or cannot be judged; names claim and machine.

    Examples
    --------
    >>> print(ClaimError("plot_x: claim gap on nvidia-h200", got="121.6", expected="123"))
    plot_x: claim gap on nvidia-h200: got 121.6, expected 123
    """


class _OutdatedError(Exception):
    """The rows lack a column that this build has."""


@dataclasses.dataclass(frozen=True)
class Number:
    """A number bound in a sentence.

    Attributes
    ----------
    kind : str
        The words before it: "about", "at least", "up to", "at most", or "".
    text : str
        As it is printed, such as ``1,536``, ``2.4e-5`` or ``18.3%`` (of a share, 0.183).

    Examples
    --------
    >>> Number("", "0.0186").holds(0.01863), Number("about", "20").holds(23.5)
    (True, True)
    >>> Number("", "122").shown(98.44)
    '98.4'
    """

    kind: str
    text: str

    def holds(self, value: float) -> bool:
        """Whether *value* rounds to the number as printed; ±20 % after "about"."""
        if self.kind == "about":
            number = _parse(self.text)[0]
            return abs(value - number) <= _TOLERANCE * abs(number)
        return prints(self.text, value)

    def pick(self, values: Sequence[float]) -> float:
        """The value that the number speaks of: the worst row after "at least" and "up to"."""
        if self.kind == "at least":
            return min(values)
        if self.kind in ("up to", "at most"):
            return max(values)
        if len(values) > 1 and len({self.shown(v) for v in values}) > 1:
            raise ClaimError(
                f"number {{{self.text}}} has several values",
                got=", ".join(self.shown(v) for v in values[:4]),
                expected="one row, or 'at least' or 'up to' before the number",
            )
        return values[0]

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


def _is_number(text: str) -> bool:
    try:
        _parse(text)
    except ValueError:
        return False
    return True


def prints(text: str, value: float) -> bool:
    """Whether *value* rounds to *text* at the digits it is printed with.

    Examples
    --------
    >>> prints("0.019", 0.0186), prints("0.018", 0.0186), prints("1,536", 1536.2)
    (True, False, True)
    """
    number, digit = _parse(text)
    return abs(value - number) <= 0.5 * digit * (1 + 1e-9)


class NoColumnError(ArgumentError, KeyError):
    """A data frame lacks a column."""

    __str__ = ArgumentError.__str__  # that of KeyError quotes


def check_frame(frame: Any) -> None:
    """Refuse what is no data frame.

    Raises
    ------
    ArgumentError

    Examples
    --------
    >>> import pandas as pd
    >>> check_frame(pd.DataFrame({"n": [1]}))
    """
    if not hasattr(frame, "columns") or not hasattr(frame, "to_dict"):
        raise ArgumentError("frame", got=type(frame).__name__, expected="a pandas.DataFrame")


def check_columns(frame: pd.DataFrame, *names: Any) -> None:
    """Refuse a column that a data frame lacks; None is none.

    Raises
    ------
    NoColumnError

    Examples
    --------
    >>> import pandas as pd
    >>> check_columns(pd.DataFrame({"n": [1]}), "n", None)
    """
    for name in names:
        if name is not None and (not isinstance(name, str) or name not in frame):
            raise NoColumnError(
                "no such column", got=repr(name), expected=", ".join(map(str, frame))
            )


def choose(frame: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    """Rows whose columns have the values of *where*.

    A value is one that the column equals, a list of such values, None for a missing value, or a
    function of the column that gives a mask.

    Raises
    ------
    NoColumnError
        When there is no such column: a KeyError, too.
    ArgumentError
        When *frame* is no data frame or *where* no mapping.

    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"dtype": ["float32", "float16"], "abs": [1.0, 2.0]})
    >>> choose(frame, {"dtype": ["float16", "bfloat16"]})["abs"].tolist()
    [2.0]
    """
    check_frame(frame)
    mask = np.ones(len(frame), dtype=bool)
    for column, wanted in check_mapping("where", where, "columns to values").items():
        check_columns(frame, column)
        series = frame[column]
        if callable(wanted):
            mask &= np.asarray(wanted(series), dtype=bool)
        elif wanted is None:
            mask &= np.asarray(series.isna(), dtype=bool)
        else:
            many = isinstance(wanted, (list, tuple, set))
            mask &= np.asarray(series.isin(list(wanted) if many else [wanted]), dtype=bool)
    return frame[mask]


def chosen(frame: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    """The rows of :func:`choose`; none where a value that *where* lists is in no row.

    A number of three types needs the rows of three types.
    """
    rows = choose(frame, where)
    lists = ((c, w) for c, w in where.items() if isinstance(w, (list, tuple, set)))
    return rows if all(set(wanted) <= set(rows[c]) for c, wanted in lists) else rows.iloc[:0]


def numbers_of(given: Any, what: str) -> list[float]:
    """What a function of the rows gave for one number: at least one value, and no NaN."""
    values = np.atleast_1d(np.asarray(given, dtype=float)).tolist()
    if not values or any(math.isnan(v) for v in values):
        raise ClaimError(f"no value for {what}", got=str(values))
    return values


def decided(given: Any) -> bool:
    """The verdict of a test that gave a bool, or one for each row."""
    verdicts = np.atleast_1d(np.asarray(given)).ravel().tolist()
    # A column of booleans that was recorded is one of objects.
    if not verdicts or not all(isinstance(v, bool) for v in verdicts):
        raise ClaimError(
            "its test gives no verdict",
            got=str(verdicts[:4]),
            expected="a bool, or one for each row",
        )
    return all(verdicts)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run says of a claim.

    Attributes
    ----------
    state : str
        "true", "false", "value" (a number of another machine, which nothing is claimed of),
        "not tested" (no such rows) or "outdated" (a record without one of the columns).
    values : list of float
        A value for each bound number.
    rows : int
        Number of rows that were chosen.
    detail : str
        Why it is false or outdated.
    """

    state: str
    values: list[float] = dataclasses.field(default_factory=list)
    rows: int = 0
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Claim:
    """One sentence about a table.

    Parameters
    ----------
    page, name : str
        Where it stands; *name* is its address on the page and what an answer box refers to.
    sentence : str
        Plain English; bound numbers stand in braces. "about" before one allows 20 %; "at least"
        and "up to" speak of the worst row.
    of : str
        Name of the table.
    where : mapping
        Column -> value: the rows it speaks of (:func:`~roundoff.page.choose`). A run without one
        of the values of a list does not test it.
    value : callable, optional
        Takes the chosen rows; gives the value of the bound number, or a tuple of them in order.
    test : callable, optional
        Takes the chosen rows; gives a bool, or one for each row, all of which must be true.
    on : str, optional
        The machine that the printed numbers are of.
    holds : sequence of str, optional
        The only machines among the recorded on which *test* is true; by default on all.
    timed : bool
        Whether it is about times, which are judged on records alone.

    Examples
    --------
    >>> import pandas as pd
    >>> rows = pd.DataFrame({"tf32": ["on", "off"], "ratio": [121.6, 1.0]})
    >>> claim = Claim("plot_x", "blame", "TF32 moves Z {122} times as far.", of="t",
    ...               where={"tf32": "on"}, value=lambda t: t["ratio"], on="nvidia-h200")
    >>> claim.judge({"t": rows}, "nvidia-h200").state, claim.plain
    ('true', 'TF32 moves Z 122 times as far.')
    """

    page: str
    name: str
    sentence: str
    of: str
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    value: Callable[[Any], Any] | None = None
    test: Callable[[Any], Any] | None = None
    on: str | None = None
    holds: Sequence[str] | None = None
    timed: bool = False

    def __post_init__(self) -> None:
        expected = None
        if self.value is None and self.test is None:
            expected = "value= or test=, without which nothing can refute it"
        elif bool(self.numbers) != (self.value is not None):
            expected = "as many numbers in braces as value= gives, and none without it"
        elif (self.value is None) != (self.on is None):
            expected = "on=, the machine that its numbers are of, where it has numbers"
        elif not all(_is_number(number.text) for number in self.numbers):
            expected = "numbers in braces, such as {1,536}, {2.4e-5} or {18.3%}"
        elif self.holds is not None and self.test is None:
            expected = "test=, which holds= names the machines of"
        elif self.holds is not None and self.on is not None and self.on not in self.holds:
            # Its expected verdict would be false, whatever number is printed.
            expected = f"holds= with {self.on}, which its numbers are of"
        if expected:
            raise ClaimError(
                f"{self.page}: claim {self.name}", got=self.sentence, expected=expected
            )

    @property
    def numbers(self) -> list[Number]:
        """The bound numbers, in order."""
        return [
            Number((kind or "").strip().lower(), text)
            for kind, text in _NUMBER.findall(self.sentence)
        ]

    @property
    def plain(self) -> str:
        """The sentence without braces."""
        return re.sub(r"\{([^{}]*)\}", r"\1", self.sentence)

    def judge(
        self, tables: Mapping[str, pd.DataFrame], machine: str, known: Sequence[str] = ()
    ) -> Outcome:
        """What the tables of one run say.

        Parameters
        ----------
        tables : mapping of str to pandas.DataFrame
            The run's tables.
        machine : str
            Name of the machine; the printed numbers are compared on the claim's own alone.
        known : sequence of str
            Columns that the table has in another run: one that is missing here alone makes this
            record outdated rather than the claim wrong.

        Raises
        ------
        ClaimError
            When a function of the claim fails, or gives what is not a verdict.
        """
        if self.of not in tables:
            return Outcome("not tested")
        try:
            rows = self._lookup(lambda: chosen(tables[self.of], self.where), tables, known)
            if rows.empty:
                return Outcome("not tested")
            values = self._lookup(lambda: self._values(rows), tables, known)
            verdict = self._lookup(lambda: self._verdict(rows), tables, known)
        except _OutdatedError as error:
            return Outcome("outdated", detail=f"no column {error}")
        except ClaimError as error:
            raise ClaimError(
                f"{self.page}: claim {self.name} on {machine}: {error.message}",
                got=error.got, expected=error.expected,
            ) from error  # fmt: skip
        except Exception as error:
            raise ClaimError(
                f"{self.page}: claim {self.name} on {machine} cannot be evaluated",
                got=f"{type(error).__name__}: {error}", expected="a number or a verdict",
            ) from error  # fmt: skip
        wrong = [
            f"{number.text} is printed and {value:.6g} measured"
            for number, value in zip(self.numbers, values, strict=True)
            if machine == self.on and not number.holds(value)
        ]
        if verdict is False:
            wrong.append("its test is false")
        if wrong:
            return Outcome("false", values, len(rows), "; ".join(wrong))
        judged = verdict is not None or machine == self.on
        return Outcome("true" if judged else "value", values, len(rows))

    def expected(self, machine: str) -> str:
        """The verdict that a record of *machine* must have, where it has the rows."""
        if self.test is not None and self.holds is not None and machine not in self.holds:
            return "false"
        return "true" if self.test is not None or machine == self.on else "value"

    def _lookup(
        self, run: Callable[[], Any], tables: Mapping[str, pd.DataFrame], known: Sequence[str]
    ) -> Any:
        try:
            return run()
        except KeyError as error:
            # The message quotes one column, or the list that was asked for.
            missing = [c for c in known if c not in tables[self.of] and repr(c) in str(error)]
            if missing:
                raise _OutdatedError(", ".join(missing)) from error
            raise

    def _values(self, rows: pd.DataFrame) -> list[float]:
        if self.value is None:
            return []
        given = self.value(rows)
        parts = list(given) if isinstance(given, (tuple, list)) else [given]
        numbers = self.numbers
        if len(parts) != len(numbers):
            raise ClaimError("another number of values", got=str(len(parts)),
                             expected=f"{len(numbers)}, one for each in braces")  # fmt: skip
        found = []
        for number, part in zip(numbers, parts, strict=True):
            found.append(number.pick(numbers_of(part, number.text)))
        return found

    def _verdict(self, rows: pd.DataFrame) -> bool | None:
        return None if self.test is None else decided(self.test(rows))
