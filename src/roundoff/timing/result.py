"""What a measurement found, as tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd

from roundoff.errors import ArgumentError

from .ceilings import Ceilings
from .statistics import Ratio, bimodal, drift, median_interval, ratio

__all__ = ["Rival", "Timings"]


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
        Seconds a call; a row a round, a column a rival.
    stopped : str
        ``"precise"`` (every ratio to the first rival is known as well as asked, or the median of
        a lone one), ``"budget"`` or ``"rounds"``: why the rounds ended.
    level : float
        Coverage of every interval.
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

        Columns: label, device, median, low, high (the ends of the interval of the median), mean,
        std, min, max, rounds, calls (a sample), warmup (calls), first (the first call), stopped,
        warnings; and gb_s and gflop_s where the bytes and operations of a call were given.
        """
        return pd.DataFrame([self._row(label) for label in self.samples.columns])

    def _row(self, label: str) -> dict[str, Any]:
        x, rival = self.samples[label].to_numpy(), self.rivals[label]
        centre = median_interval(x, self.level, self.seed)
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
        x, y = self.samples[a].to_numpy(), self.samples[b].to_numpy()
        return ratio(x, y, self.level, self.seed)

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
