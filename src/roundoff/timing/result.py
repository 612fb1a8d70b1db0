"""The results of a measurement, as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from roundoff.errors import ArgumentError

from .statistics import Interval, pooled, ratio

__all__ = ["Timings", "pool"]


@dataclasses.dataclass(frozen=True)
class Timings:
    """Times of some callables, taken in interleaved rounds.

    Attributes
    ----------
    sessions : tuple of pandas.DataFrame
        Seconds per call, of each session (:func:`~roundoff.timing.measure` makes one): a row per
        round, a column per callable.
    precision : float
        Half the width of an interval that is narrow enough, relative to the estimate.
    seed : int
        Of the bootstrap.
    bytes : mapping
        Label -> bytes that a call moves, where they are known.

    Examples
    --------
    >>> from roundoff.timing import measure
    >>> callables = {"short": lambda: sum(range(100)), "long": lambda: sum(range(10_000))}
    >>> timings = measure(callables, budget_s=0.05)
    >>> timings.frame["label"].tolist(), timings.ratio("long", "short").value > 1
    (['short', 'long'], True)
    """

    sessions: tuple[pd.DataFrame, ...]
    precision: float
    seed: int
    bytes: Mapping[str, float]

    @property
    def samples(self) -> pd.DataFrame:
        """Seconds per call in all rounds of all sessions."""
        return pd.concat(self.sessions, ignore_index=True)

    @property
    def frame(self) -> pd.DataFrame:
        """A row per callable; times in seconds, rates in 1e9 per second.

        Columns: label, median (of several sessions: the geometric mean of their medians), low, high
        (the ends of its interval), mean, std, min, max, rounds; and gb_s where ``measure`` was told
        the bytes of a call.
        """
        samples = self.samples
        rows = []
        for label in samples:
            centre = self._median(label)
            row: dict[str, Any] = {
                "label": label,
                "median": centre.value,
                "low": centre.low,
                "high": centre.high,
                **samples[label].agg(["mean", "std", "min", "max"]),
                "rounds": len(samples),
            }
            if label in self.bytes:
                row["gb_s"] = self.bytes[label] / centre.value / 1e9
            rows.append(row)
        return pd.DataFrame(rows)

    def _times(self, label: str) -> list[np.ndarray]:
        if label not in self.sessions[0]:
            raise ArgumentError(
                "no such label", got=repr(label), expected=f"one of {list(self.sessions[0])}"
            )
        return [session[label].to_numpy() for session in self.sessions]

    def _median(self, label: str) -> Interval:
        times = self._times(label)
        if len(times) == 1:
            return pooled(times, self.seed)
        with np.errstate(divide="ignore"):
            return pooled([np.log(x) for x in times], self.seed).exp()

    def ratio(self, a: str, b: str) -> Interval:
        """Time of *a* over time of *b*, paired by round."""
        return ratio(self._times(a), self._times(b), self.seed)

    @property
    def is_precise(self) -> bool:
        """Whether each ratio to the first, or the median of a single one, is known as asked."""
        first, *others = self.sessions[0]
        if not others:
            return self._median(first).half_width <= self.precision
        return all(self.ratio(label, first).half_width <= self.precision for label in others)

    def ratios(self, to: str | None = None) -> pd.DataFrame:
        """The ratio of each to one of them (the first): label, ratio, low, high."""
        base = self.sessions[0].columns[0] if to is None else to
        rows = []
        for label in self.sessions[0]:
            r = self.ratio(label, base)
            rows.append({"label": label, "ratio": r.value, "low": r.low, "high": r.high})
        return pd.DataFrame(rows)


def pool(sessions: Sequence[Timings]) -> Timings:
    """Several measurements of the same callables, each from a new set-up, as one.

    Intervals then come from the differences between the sessions. They cover what is the same
    throughout one session: the addresses of its buffers, and the load of the machine.

    Examples
    --------
    >>> from roundoff.timing import measure, pool
    >>> parts = [measure({"sum": lambda: sum(range(100))}, budget_s=0.02) for _ in range(2)]
    >>> len(pool(parts).sessions)
    2
    """
    every = tuple(session for timings in sessions for session in timings.sessions)
    return dataclasses.replace(sessions[0], sessions=every)
