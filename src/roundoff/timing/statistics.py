"""Medians and ratios with intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy.special

__all__ = ["Interval", "median_interval", "pooled", "ratio"]

#: Coverage of each interval.
LEVEL = 0.95
_RESAMPLES = 1999


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate, and the ends of its interval of 95 %.

    Examples
    --------
    >>> from roundoff.timing import Interval
    >>> print(Interval(0.9, 0.85, 0.96))
    0.9 [0.85, 0.96]
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"

    @property
    def half_width(self) -> float:
        """Half the width of the interval, relative to the estimate."""
        return (self.high - self.low) / 2 / abs(self.value) if self.value else math.inf

    def exp(self) -> Interval:
        """The interval of what this is the logarithm of."""
        return Interval(math.exp(self.value), math.exp(self.low), math.exp(self.high))


def median_interval(x: np.ndarray, seed: int = 0) -> Interval:
    """Median of a series in the order it was taken, with a bootstrap interval.

    Short series have wider percentiles, by Hesterberg's expansion. Correlated neighbours make the
    interval wider: a machine that is slow for a while gives fewer independent values than rounds.
    With five values the widest possible interval, smallest to largest, covers the median 94 times
    in 100; from six on 95 can be reached.

    References
    ----------
    T. Hesterberg, *What teachers should know about the bootstrap*, Am. Stat. 69(4), 2015.
    """
    n = x.size
    centre = float(np.median(x))
    if n < 2:
        return Interval(centre, -math.inf, math.inf)
    # Student's t at n - 1 degrees, back to a normal probability: the expanded percentile.
    t = scipy.special.stdtrit(n - 1, (1 - LEVEL) / 2)
    tail = float(scipy.special.ndtr(math.sqrt(n / (n - 1)) * t))
    index = np.random.default_rng(seed).integers(0, n, (_RESAMPLES, n))
    medians = np.median(x[index], axis=1)
    low, high = np.quantile(medians, [tail, 1 - tail], method="inverted_cdf")
    wider = _correlation_factor(x)
    return Interval(
        centre, centre - wider * (centre - float(low)), centre + wider * (float(high) - centre)
    )


def _correlation_factor(x: np.ndarray) -> float:
    """The factor by which correlated neighbours widen an interval: sqrt((1 + rho) / (1 - rho)).

    That is the factor of a first-order autoregressive series. The correlation rho is that of
    ranks, so that one outlier does not decide, corrected for short series (Kendall, 1954).
    """
    import scipy.stats

    n = x.size
    if n < 8 or (x == x[0]).all():
        return 1.0
    ranks = scipy.stats.rankdata(x)
    ranks -= ranks.mean()
    rho = float(ranks[1:] @ ranks[:-1]) / float(ranks @ ranks)
    if rho < 1.28 / math.sqrt(n):  # one chance series in ten
        return 1.0
    rho = min(rho + (1 + 3 * rho) / n, 0.95)
    return math.sqrt((1 + rho) / (1 - rho))


def pooled(sessions: Sequence[np.ndarray], seed: int = 0) -> Interval:
    """Mean of the medians of several sessions, with Student's interval over sessions.

    What stays the same throughout a session (addresses of buffers, load of the machine) changes
    all its rounds alike: more rounds do not narrow the interval, more sessions do. A single
    session has the interval of its median, :func:`median_interval`.
    """
    if len(sessions) == 1:
        return median_interval(sessions[0], seed)
    medians = np.array([np.median(x) for x in sessions])
    n, centre = medians.size, float(medians.mean())
    spread = float(medians.std(ddof=1)) / math.sqrt(n)
    half = -float(scipy.special.stdtrit(n - 1, (1 - LEVEL) / 2)) * spread
    return Interval(centre, centre - half, centre + half)


def ratio(a: Sequence[np.ndarray], b: Sequence[np.ndarray], seed: int = 0) -> Interval:
    """Ratio of two callables' sessions, paired by round: what slows a whole round down cancels.

    Of the logarithms, so that ``ratio(b, a)`` is the inverse of ``ratio(a, b)``.
    """
    return pooled([np.log(x) - np.log(y) for x, y in zip(a, b, strict=True)], seed).exp()
