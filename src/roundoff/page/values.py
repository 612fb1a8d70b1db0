"""Numbers that pages print: a study defines them, its records hold them, pages quote them.

A value is rows of a table, a statistic, an interval and a test. The sentence stands on the page.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments import check_mapping, check_text
from ..errors import ArgumentError, RoundoffError
from ..record import check_record, row_parts

if TYPE_CHECKING:
    import pandas as pd

    from ..record import Record

__all__ = ["UNDECIDED", "Measured", "StudyError", "Value", "choose"]

#: What stands for a comparison whose interval holds 1, or whose two runs disagree.
UNDECIDED = "no difference measured"


class StudyError(RoundoffError, AssertionError):
    """A value of a study cannot be evaluated; names value and machine.

    Examples
    --------
    >>> print(StudyError("value gap", got="[]", expected="a number"))
    value gap: got [], expected a number
    """


class NoColumnError(ArgumentError, KeyError):
    """A data frame lacks a column.

    Examples
    --------
    >>> print(NoColumnError("no such column", got="'size'", expected="n, t"))
    no such column: got 'size', expected n, t
    """

    __str__ = ArgumentError.__str__  # that of KeyError quotes


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one run says of a value; a test takes it.

    Attributes
    ----------
    value : float
        The number.
    low : float, optional
        The lower end of its interval.
    high : float, optional
        The upper end.
    rows : pandas.DataFrame, optional
        The rows that it comes from.

    Examples
    --------
    >>> Measured(2.3, 2.2, 2.4).low > 1
    True
    """

    value: float
    low: float | None = None
    high: float | None = None
    rows: Any = None


@dataclasses.dataclass(frozen=True)
class Value:
    """A number that a page may print, and the test that fails where its sentence is false.

    Parameters
    ----------
    name : str
        What the page refers to, such as ``orders.numpy``.
    about : str
        Its datum and its statistic, in words.
    of : str
        Name of the table.
    statistic : str or callable
        Column of the one row that *where* leaves; or a function of the rows, which gives the
        number, or the number and the ends of its interval.
    where : mapping
        Column -> value: the rows (:func:`roundoff.page.choose`).
    interval : (str, str), optional
        Columns of the interval's ends.
    test : callable, optional
        Takes what was measured (:class:`~roundoff.page.values.Measured`), gives a bool. It must be
        true in each of two runs. By default a comparison's interval leaves 1 out.
    words : (str, str), optional
        Of a comparison, a ratio: the words for less than 1 and for more, such as faster, slower.
        Which one is true, the interval says.
    on : str
        The machine whose number pages print.

    Examples
    --------
    >>> import pandas as pd
    >>> rows = pd.DataFrame({"way": ["a", "b"], "ratio": [1.0, 2.3], "low": [1.0, 2.2],
    ...                      "high": [1.0, 2.4]})
    >>> value = Value("cost", "time of b over a", "t", "ratio", {"way": "b"}, ("low", "high"),
    ...               words=("faster", "slower"))
    >>> value.judge([{"t": rows}])
    {'value': 2.3, 'low': 2.2, 'high': 2.4, 'test': True, 'word': 'slower'}
    """

    name: str
    about: str
    of: str
    statistic: str | Callable[[Any], Any]
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    interval: tuple[str, str] | None = None
    test: Callable[[Measured], Any] | None = None
    words: tuple[str, str] | None = None
    on: str = ""

    def __post_init__(self) -> None:
        check_text("name of a value", self.name)
        check_text("name of a table", self.of)
        if self.test is not None and not callable(self.test):
            raise ArgumentError("test", got=repr(self.test)[:80], expected="a function")
        if self.words is not None and (
            not isinstance(self.words, (tuple, list)) or len(self.words) != 2
        ):
            raise ArgumentError("words", got=repr(self.words)[:80], expected="two words")
        if self.test is None and self.words is None:
            raise StudyError(
                f"value {self.name}",
                got="neither test= nor words=",
                expected="a test that fails where the sentence is false",
            )

    def measure(self, tables: Mapping[str, pd.DataFrame]) -> Measured | None:
        """The number in the tables of one run; None where the run has no such rows.

        Raises
        ------
        StudyError
            When there is no single number.
        """
        if self.of not in check_mapping("tables", tables, "names to data frames"):
            return None
        try:
            rows = chosen(tables[self.of], self.where)
            if rows.empty:
                return None
            columns: tuple[str, ...] = ()
            if isinstance(self.statistic, str):
                columns = (self.statistic, *(self.interval or ()))
                given: Any = [rows[column] for column in columns]
            else:
                given = self.statistic(rows)
            parts = given if isinstance(given, (list, tuple)) else [given]
            found = []
            for part in parts:
                numbers = set(numbers_of(part, self.name))
                if len(numbers) > 1 or math.inf in map(abs, numbers):
                    raise StudyError("no single finite number", got=str(sorted(numbers)[:4]))
                found.append(numbers.pop())
        except StudyError:
            raise
        except Exception as error:
            raise StudyError(
                f"value {self.name} cannot be evaluated",
                got=f"{type(error).__name__}: {error}",
                expected=f"a number from the rows of {self.of}",
            ) from error
        if len(found) not in (1, 3):
            raise StudyError(f"value {self.name}", got=str(found), expected="a number, low, high")
        return dataclasses.replace(Measured(*found), rows=rows)

    def judge(self, runs: list[Mapping[str, pd.DataFrame]]) -> dict[str, Any] | None:
        """What a record keeps: number, interval, second run, verdict; None without the rows.

        Parameters
        ----------
        runs : list of mappings
            The tables of the first run, and those of the second where there is one.
        """
        if not isinstance(runs, (list, tuple)):
            raise ArgumentError("runs", got=type(runs).__name__, expected="a list of tables")
        measured = [found for found in map(self.measure, runs) if found is not None]
        if not measured:
            return None
        entries = [_plain(found) for found in measured]
        entry: dict[str, Any] = dict(entries[0])
        if len(entries) > 1:
            entry["second"] = entries[1]
        if self.words is None:
            word = None
        else:
            words = {self._word(found) for found in measured}
            word = words.pop() if len(words) == 1 else UNDECIDED
        if self.test is None:
            entry["test"] = word != UNDECIDED
        else:
            entry["test"] = all(self._true_of(found) for found in measured)
        return entry if word is None else entry | {"word": word}

    def _true_of(self, found: Measured) -> bool:
        assert self.test is not None
        try:
            return decided(self.test(found))
        except RoundoffError:
            raise
        except Exception as error:
            raise StudyError(
                f"the test of value {self.name}",
                got=f"{type(error).__name__}: {error}",
                expected="True or False",
            ) from error

    def _word(self, found: Measured) -> str:
        if found.low is None or found.high is None or self.words is None:
            raise StudyError(f"value {self.name} compares", got="no interval", expected="interval=")
        less, more = self.words
        return less if found.high < 1 else more if found.low > 1 else UNDECIDED

    def _needs(self, again: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> bool:
        """Whether rows or statistic read what was measured again; else its number is a copy."""
        if isinstance(self.statistic, str):
            return self.statistic in again
        once = tables[self.of].drop(columns=list(again))
        try:
            return self.measure({**tables, self.of: once}) is None
        except StudyError:  # it reads what is gone
            return True

    def entry(self, record: Record) -> dict[str, Any] | None:
        """What :meth:`judge` says of a record, and what a reader needs to find it there."""
        check_record(record)
        runs: list[Mapping[str, pd.DataFrame]] = [record.tables]
        if self.of in record.second:
            again = record.second[self.of]
            both = record.tables[self.of].assign(**{c: again[c] for c in again})
            if self._needs(again, record.tables):
                runs.append({**record.tables, self.of: both})
        try:
            found = self.judge(runs)
        except StudyError as error:
            raise StudyError(
                f"{record.page} on {record.machine}: {error.message}",
                got=error.got,
                expected=error.expected,
            ) from error
        if found is None:
            return None
        frame = chosen(record.tables[self.of], self.where)
        parts = set(row_parts(frame, record.parts.get(self.of)))
        part = parts.pop() if len(parts) == 1 else None
        return {"about": self.about, "of": self.of, "part": part, "on": self.on, **found}


def choose(frame: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    """Rows whose columns have the values of *where*.

    A value is one that the column equals, a list of such values, None for a missing value, or a
    function of the column that gives a mask.

    Raises
    ------
    KeyError
        When there is no such column.
    ArgumentError
        When *frame* is no data frame or *where* no mapping.

    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"dtype": ["float32", "float16"], "abs": [1.0, 2.0]})
    >>> choose(frame, {"dtype": ["float16", "bfloat16"]})["abs"].tolist()
    [2.0]
    """
    if not hasattr(frame, "columns") or not hasattr(frame, "to_dict"):
        raise ArgumentError("frame", got=type(frame).__name__, expected="a pandas.DataFrame")
    mask = np.ones(len(frame), dtype=bool)
    for column, wanted in check_mapping("where", where, "columns to values").items():
        if not isinstance(column, str) or column not in frame:
            raise NoColumnError(
                "no such column", got=repr(column), expected=", ".join(map(str, frame))
            )
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
        raise StudyError(f"no value for {what}", got=str(values))
    return values


def decided(given: Any) -> bool:
    """The verdict of a test that gave a bool, or one for each row."""
    verdicts = np.atleast_1d(np.asarray(given)).ravel().tolist()
    # A column of booleans that was recorded is one of objects.
    if not verdicts or not all(isinstance(v, bool) for v in verdicts):
        raise StudyError(
            "its test gives no verdict",
            got=str(verdicts[:4]),
            expected="a bool, or one for each row",
        )
    return all(verdicts)


def _plain(found: Measured) -> dict[str, float]:
    ends = {"low": found.low, "high": found.high}
    return {"value": found.value} | {k: v for k, v in ends.items() if v is not None}
