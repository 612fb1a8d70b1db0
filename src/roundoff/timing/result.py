"""The results of a measurement, as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from roundoff.errors import ArgumentError

from .statistics import Interval, drift, pooled, ratio

__all__ = ["Sampling", "Timings", "pool"]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one callable was timed.

    Attributes
    ----------
    warmup : int
        Calls to warm up.
    calls : int
        Calls for each sample.
    first : float
        Seconds of the first call.
    bytes : float, optional
        Bytes that a call moves.
    """

    warmup: int
    calls: int
    first: float
    bytes: float | None = None


@dataclasses.dataclass(frozen=True)
class Timings:
    """Times of some callables, taken in interleaved rounds.

    Attributes
    ----------
    samples : pandas.DataFrame
        Seconds per call; a row per round, a column per callable; the index is (session, round).

    Examples
    --------
    >>> from roundoff.timing import measure
    >>> callables = {"short": lambda: sum(range(100)), "long": lambda: sum(range(10_000))}
    >>> timings = measure(callables, budget_s=0.05)
    >>> timings.frame["label"].tolist(), timings.ratio("long", "short").value > 1
    (['short', 'long'], True)
    """

    samples: pd.DataFrame
    sampling: dict[str, Sampling]
    device: str
    precision: float
    seed: int = 0

    @property
    def frame(self) -> pd.DataFrame:
        """A row per callable; times in seconds, rates in 1e9 per second.

        Columns: label, device, median (of several sessions: the geometric mean of their medians),
        low, high (the ends of its interval), mean, std, min, max, rounds, calls (a sample),
        warmup (calls), first (the first call), warnings; and gb_s where ``measure`` was
        told the bytes of a call.
        """
        return pd.DataFrame([self._row(label) for label in self.samples.columns])

    def _row(self, label: str) -> dict[str, Any]:
        x, sampling = self.samples[label].to_numpy(), self.sampling[label]
        centre = self._median(label)
        row: dict[str, Any] = {
            "label": label,
            "device": self.device,
            "median": centre.value,
            "low": centre.low,
            "high": centre.high,
            "mean": x.mean(),
            "std": x.std(ddof=1) if x.size > 1 else float("nan"),
            "min": x.min(),
            "max": x.max(),
            "rounds": x.size,
            "calls": sampling.calls,
            "warmup": sampling.warmup,
            "first": sampling.first,
            "warnings": "; ".join(self.warnings(label)),
        }
        if sampling.bytes is not None:
            row["gb_s"] = sampling.bytes / centre.value / 1e9
        return row

    def _sessions(self, label: str) -> list[np.ndarray]:
        if label not in self.samples:
            raise ArgumentError(
                "no such label", got=repr(label), expected=f"one of {list(self.samples)}"
            )
        session = self.samples.index.get_level_values(0).to_numpy()
        cuts = np.flatnonzero(np.diff(session)) + 1
        return np.split(self.samples[label].to_numpy(), cuts)

    def _median(self, label: str) -> Interval:
        sessions = self._sessions(label)
        if len(sessions) == 1:
            return pooled(sessions, self.seed)
        with np.errstate(divide="ignore"):
            return pooled([np.log(x) for x in sessions], self.seed).exp()

    def ratio(self, a: str, b: str) -> Interval:
        """Time of *a* over time of *b*, paired by round."""
        return ratio(self._sessions(a), self._sessions(b), self.seed)

    @property
    def is_precise(self) -> bool:
        """Whether each ratio to the first, or the median of a single one, is known as asked."""
        first, *others = self.samples.columns
        if not others:
            return self._median(first).half_width <= self.precision
        return all(self.ratio(label, first).half_width <= self.precision for label in others)

    def ratios(self, to: str | None = None) -> pd.DataFrame:
        """The ratio of each to one of them (the first): label, ratio, low, high."""
        base = self.samples.columns[0] if to is None else to
        rows = []
        for label in self.samples.columns:
            r = self.ratio(label, base)
            rows.append({"label": label, "ratio": r.value, "low": r.low, "high": r.high})
        return pd.DataFrame(rows)

    def warnings(self, label: str) -> list[str]:
        """Reasons to distrust the times of a callable: compilation, or a trend."""
        x, first = self.samples[label].to_numpy(), self.sampling[label].first
        centre = float(np.median(x))
        texts = []
        # Loading a library takes milliseconds; compiling takes longer, and many times a call.
        if first > 10 * centre and first - centre > 0.02:
            texts.append(f"first call took {first:.2g} s (compiled or loaded); left out")
        change = drift(x, self.precision)
        if change is not None:
            texts.append(f"drifts by {change:+.0%} over the rounds")
        return texts


def pool(sessions: Sequence[Timings]) -> Timings:
    """Several measurements of the same callables, each from a new set-up, as one.

    Intervals then come from the differences between the sessions. They cover what is the same
    throughout one session: the addresses of its buffers, and the load of the machine.

    Examples
    --------
    >>> from roundoff.timing import measure, pool
    >>> sessions = [measure({"sum": lambda: sum(range(100))}, budget_s=0.02) for _ in range(2)]
    >>> pool(sessions).samples.index.get_level_values("session").unique().tolist()
    [0, 1]
    """
    first = sessions[0]
    samples = pd.concat(
        [s.samples.droplevel(0) for s in sessions], keys=range(len(sessions)), names=["session"]
    )
    sampling = {}
    for label, sampled in first.sampling.items():
        parts = [session.sampling[label] for session in sessions]
        sampling[label] = dataclasses.replace(
            sampled,
            warmup=sum(r.warmup for r in parts),
            calls=max(r.calls for r in parts),
            first=max(r.first for r in parts),
        )
    return dataclasses.replace(first, samples=samples, sampling=sampling)
