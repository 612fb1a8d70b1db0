"""What a measurement found, as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from roundoff.errors import ArgumentError

from .ceilings import Ceilings
from .statistics import Interval, Ratio, bimodal, drift, pooled, ratio

__all__ = ["Rival", "Timings", "pool"]


@dataclasses.dataclass(frozen=True)
class Rival:
    """How one rival was timed: calls to warm up, calls a sample, seconds of the first call."""

    label: str
    warmup: int
    calls: int
    first: float
    bytes: float | None = None
    flops: float | None = None


@dataclasses.dataclass(frozen=True)
class Timings:
    """Times of some rivals, taken in interleaved rounds.

    Attributes
    ----------
    samples : pandas.DataFrame
        Seconds a call; a row a round, a column a rival; the index is (sitting, round).
    stopped : str
        ``"precise"`` (every ratio to the first rival is known as well as asked, or the median of
        a lone one), ``"budget"`` or ``"rounds"``: why the rounds ended.
    level : float
        Coverage of every interval.

    Examples
    --------
    >>> from roundoff.timing import measure
    >>> rivals = {"short": lambda: sum(range(100)), "long": lambda: sum(range(10_000))}
    >>> found = measure(rivals, budget_s=0.05)
    >>> found.frame["label"].tolist(), found.ratio("long", "short").value > 1
    (['short', 'long'], True)
    """

    samples: pd.DataFrame
    rivals: dict[str, Rival]
    stopped: str
    device: str
    precision: float
    level: float = 0.95
    seed: int = 0

    @property
    def frame(self) -> pd.DataFrame:
        """A row a rival; times in seconds, rates in 1e9 a second.

        Columns: label, device, median (of several sittings: the geometric mean of their medians),
        low, high (the ends of its interval), mean, std, min, max, rounds, calls (a sample),
        warmup (calls), first (the first call), stopped, warnings; and gb_s and gflop_s where the
        bytes and operations of a call were given.
        """
        return pd.DataFrame([self._row(label) for label in self.samples.columns])

    def _row(self, label: str) -> dict[str, Any]:
        x, rival = self.samples[label].to_numpy(), self.rivals[label]
        centre = self._median(label)
        row: dict[str, Any] = {
            "label": label, "device": self.device,
            "median": centre.value, "low": centre.low, "high": centre.high,
            "mean": x.mean(), "std": x.std(ddof=1) if x.size > 1 else float("nan"),
            "min": x.min(), "max": x.max(),
            "rounds": x.size, "calls": rival.calls, "warmup": rival.warmup, "first": rival.first,
            "stopped": self.stopped, "warnings": "; ".join(self.warnings(label)),
        }  # fmt: skip
        if rival.bytes is not None:
            row["gb_s"] = rival.bytes / centre.value / 1e9
        if rival.flops is not None:
            row["gflop_s"] = rival.flops / centre.value / 1e9
        return row

    def _sittings(self, label: str) -> list[np.ndarray]:
        sitting = self.samples.index.get_level_values(0).to_numpy()
        cuts = np.flatnonzero(np.diff(sitting)) + 1
        return np.split(self.samples[label].to_numpy(), cuts)

    def _median(self, label: str) -> Interval:
        parts = self._sittings(label)
        if len(parts) == 1:
            return pooled(parts, self.level, self.seed)
        with np.errstate(divide="ignore"):
            found = pooled([np.log(x) for x in parts], self.level, self.seed)
        value, low, high = np.exp([found.value, found.low, found.high])
        return Interval(float(value), float(low), float(high), found.se * float(value))

    def against(self, ceilings: Ceilings, memory: str = "copy", matmul: str = "") -> pd.DataFrame:
        """:attr:`frame` with shares of ceilings: share_memory, and share_matmul when one is named.

        Parameters
        ----------
        memory, matmul : str
            Names of ceilings, such as ``"copy"`` and ``"float32"``.
        """
        frame = self.frame
        if "gb_s" in frame:
            frame["share_memory"] = frame["gb_s"] * 1e9 / ceilings[memory]
        if "gflop_s" in frame and matmul:
            frame["share_matmul"] = frame["gflop_s"] * 1e9 / ceilings[matmul]
        return frame

    def ratio(self, a: str, b: str) -> Ratio:
        """Time of *a* over time of *b*, paired by round."""
        for label in (a, b):
            if label not in self.samples:
                raise ArgumentError(
                    "no such rival", got=label, expected=f"one of {list(self.samples.columns)}"
                )
        return ratio(self._sittings(a), self._sittings(b), self.level, self.seed)

    @property
    def is_precise(self) -> bool:
        """Whether each ratio to the first rival, or the median of a lone one, is known as asked."""
        first, *others = self.samples.columns
        if not others:
            return self._median(first).half_width <= self.precision
        found = [self.ratio(label, first) for label in others]
        return all((r.high - r.low) / 2 <= self.precision * r.value for r in found)

    def ratios(self, to: str | None = None) -> pd.DataFrame:
        """Every rival's ratio to one of them (the first): label, ratio, low, high."""
        base = to if to is not None else str(self.samples.columns[0])
        rows = []
        for label in self.samples.columns:
            r = self.ratio(label, base)
            rows.append({"label": label, "ratio": r.value, "low": r.low, "high": r.high})
        return pd.DataFrame(rows)

    def warnings(self, label: str) -> list[str]:
        """What a reader should know before trusting a rival's times."""
        x, rival = self.samples[label].to_numpy(), self.rivals[label]
        centre = float(pd.Series(x).median())
        found = []
        # Loading a library takes milliseconds; compiling takes longer, and many times a call.
        if rival.first > 10 * centre and rival.first - centre > 0.02:
            found.append(f"first call took {rival.first:.2g} s (compiled or loaded); left out")
        change = drift(x, self.precision)
        if change is not None:
            found.append(f"drifts by {change:+.0%} over the rounds")
        modes = bimodal(x, self.precision)
        if modes is not None:
            low, high, share = modes
            found.append(f"bimodal: {share:.0%} of the rounds take {high / low:.2f} times as long")
        return found


def pool(sittings: Sequence[Timings]) -> Timings:
    """Several measurements of the same rivals, each from a new set-up, as one.

    Intervals then come from how the sittings differ, which covers what rounds of one sitting
    cannot see: where its buffers lie, and who else was busy while it lasted.

    Raises
    ------
    ArgumentError
        There are none, or their rivals differ.

    Examples
    --------
    >>> from roundoff.timing import measure
    >>> sittings = [measure({"sum": lambda: sum(range(100))}, budget_s=0.02) for _ in range(2)]
    >>> pool(sittings).samples.index.get_level_values("sitting").unique().tolist()
    [0, 1]
    """
    if not sittings or any(
        list(s.samples.columns) != list(sittings[0].samples.columns) for s in sittings
    ):
        raise ArgumentError(
            "sittings", got=len(sittings), expected="at least one, all with the same rivals"
        )
    first = sittings[0]
    samples = pd.concat(
        [s.samples.droplevel(0) for s in sittings], keys=range(len(sittings)), names=["sitting"]
    )
    rivals = {}
    for label, rival in first.rivals.items():
        parts = [s.rivals[label] for s in sittings]
        rivals[label] = dataclasses.replace(
            rival,
            warmup=sum(r.warmup for r in parts),
            calls=max(r.calls for r in parts),
            first=max(r.first for r in parts),
        )
    found = dataclasses.replace(first, samples=samples, rivals=rivals)
    limits = [s.stopped for s in sittings if s.stopped != "precise"]
    stopped = "precise" if found.is_precise or not limits else limits[0]
    return dataclasses.replace(found, stopped=stopped)
