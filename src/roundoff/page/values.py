"""Numbers that pages print: a study defines them, its records hold them, pages quote them.

A value is rows of a table, a statistic, an interval and a test. The sentence stands on the page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError
from ..record import row_parts

if TYPE_CHECKING:
    import pandas as pd

    from ..record import Record

__all__ = ["UNDECIDED", "Measured", "Value", "choose"]

#: What stands for a comparison whose interval holds 1, or whose two runs disagree.
UNDECIDED = "no difference measured"


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
        if self.test is None and self.words is None:
            raise ArgumentError(
                f"value {self.name}",
                got="neither test= nor words=",
                expected="a test that fails where the sentence is false",
            )

    def measure(self, tables: Mapping[str, pd.DataFrame]) -> Measured | None:
        """The number in the tables of one run; None where the run has no such rows.

        Raises
        ------
        ArgumentError
            When there is no single number.
        """
        if self.of not in tables:
            return None
        rows = choose(tables[self.of], self.where)
        if rows.empty:
            return None
        if isinstance(self.statistic, str):
            given: Any = [rows[column] for column in (self.statistic, *(self.interval or ()))]
        else:
            given = self.statistic(rows)
        value, *ends = given if isinstance(given, (list, tuple)) else [given]
        low, high = map(_single, ends) if ends else (None, None)
        return Measured(_single(value), low, high, rows)

    def judge(self, runs: Sequence[Mapping[str, pd.DataFrame]]) -> dict[str, Any] | None:
        """What a record keeps: number, interval, second run, verdict; None without the rows.

        Parameters
        ----------
        runs : list of mappings
            The tables of the first run, and those of the second where there is one.
        """
        measured = [found for found in map(self.measure, runs) if found is not None]
        if not measured:
            return None
        entry: dict[str, Any] = dict(_plain(measured[0]))
        if len(measured) > 1:
            entry["second"] = _plain(measured[1])
        words = {self._word(found) for found in measured}
        word = words.pop() if len(words) == 1 else UNDECIDED
        if self.test is None:
            entry["test"] = word != UNDECIDED
        else:
            entry["test"] = all(_verdict(self.test(found)) for found in measured)
        return entry | {"word": word} if self.words else entry

    def _word(self, found: Measured) -> str | None:
        if self.words is None:
            return None
        less, more = self.words
        assert found.low is not None
        assert found.high is not None
        return less if found.high < 1 else more if found.low > 1 else UNDECIDED

    def _reads(self, columns: list[str], tables: Mapping[str, pd.DataFrame]) -> bool:
        """Whether rows or statistic read some columns of the table."""
        try:
            return self.measure({**tables, self.of: tables[self.of].drop(columns=columns)}) is None
        except Exception:  # of whatever kind a function raises without its columns
            return True

    def entry(self, record: Record) -> dict[str, Any] | None:
        """What :meth:`judge` says of a record, and what a reader needs to find it there."""
        runs: list[Mapping[str, pd.DataFrame]] = [record.tables]
        if self.of in record.second:
            again = record.second[self.of]
            # A number of what was not measured again would be a copy.
            if self._reads(list(again), record.tables):
                runs.append({**record.tables, self.of: record.tables[self.of].assign(**again)})
        found = self.judge(runs)
        if found is None:
            return None
        rows = choose(record.tables[self.of], self.where)
        parts = set(row_parts(rows, record.parts.get(self.of)))
        part = parts.pop() if len(parts) == 1 else None
        return {"about": self.about, "of": self.of, "part": part, "on": self.on, **found}


def choose(frame: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    """Rows whose columns have the values of *where*.

    A value is one that the column equals, a list of such values, or a function of the column that
    gives a mask. Where a value that is listed is in no row, there are no rows: a number of three
    types needs the rows of three types.

    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"dtype": ["float32", "float16"], "abs": [1.0, 2.0]})
    >>> choose(frame, {"dtype": ["float16"]})["abs"].tolist()
    [2.0]
    >>> len(choose(frame, {"dtype": ["float16", "bfloat16"]}))
    0
    """
    mask, listed = np.ones(len(frame), dtype=bool), {}
    for column, wanted in where.items():
        if callable(wanted):
            mask &= np.asarray(wanted(frame[column]), dtype=bool)
        else:
            listed[column] = wanted if isinstance(wanted, (list, tuple)) else [wanted]
            mask &= np.asarray(frame[column].isin(listed[column]), dtype=bool)
    rows = frame[mask]
    whole = all(set(values) <= set(rows[column]) for column, values in listed.items())
    return rows if whole else rows.iloc[:0]


def _single(given: Any) -> float:
    """The one finite number that a statistic gave, perhaps once for each row."""
    numbers = np.unique(np.asarray(given, dtype=float))
    if len(numbers) != 1 or not np.isfinite(numbers).all():
        raise ArgumentError("no single finite number", got=str(numbers[:4]))
    return float(numbers[0])


def _verdict(given: Any) -> bool:
    """The verdict of a test that gave a bool, or one for each row."""
    # A column of booleans that was recorded is one of objects.
    verdicts = np.asarray(given).ravel().tolist()
    if not verdicts or not all(isinstance(v, bool) for v in verdicts):
        raise ArgumentError(
            "a test gives no verdict", got=str(verdicts[:4]), expected="a bool, or one for each row"
        )
    return all(verdicts)


def _plain(found: Measured) -> dict[str, float]:
    named = {"value": found.value, "low": found.low, "high": found.high}
    return {name: number for name, number in named.items() if number is not None}
