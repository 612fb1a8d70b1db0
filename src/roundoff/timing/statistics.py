"""Medians and ratios with intervals, and checks of a series of times for trends and modes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy.special

from roundoff.arguments import check_number
from roundoff.errors import ArgumentError

__all__ = [
    "Interval",
    "Ratio",
    "bimodal",
    "bootstrapped",
    "drift",
    "median_interval",
    "pooled",
    "ratio",
]

_RESAMPLES = 1999


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate, the ends of its interval, and its standard error."""

    value: float
    low: float
    high: float
    se: float

    @property
    def half_width(self) -> float:
        """Half the width of the interval, relative to the estimate."""
        return (self.high - self.low) / 2 / abs(self.value) if self.value else math.inf


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Time of one callable over time of another, with its interval.

    Attributes
    ----------
    value : float
        Median of the ratios of the rounds (of their logarithms, so that ``ratio(b, a)`` is the
        inverse of ``ratio(a, b)``), and the mean of that over sessions.
    low : float
        Lower end of its interval.
    high : float
        Upper end of its interval.
    se : float
        Standard error of the logarithm of the value.
    units : int
        Independent values behind the standard error: sessions, or the rounds of a single one.

    Examples
    --------
    >>> from roundoff.timing import Ratio
    >>> ratio = Ratio(0.9, 0.85, 0.96, se=0.02, units=5)
    >>> str(ratio), ratio.equal
    ('0.9 [0.85, 0.96]', False)
    """

    value: float
    low: float
    high: float
    se: float
    units: int

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"

    @property
    def equal(self) -> bool:
        """Whether the interval holds 1: no difference is shown."""
        return self.low <= 1 <= self.high


def median_interval(
    x: np.ndarray, level: float = 0.95, seed: int = 0, resamples: int = _RESAMPLES
) -> Interval:
    """Median of a series in the order it was taken, with a bootstrap interval.

    Short series have wider percentiles, by Hesterberg's expansion. Correlated neighbours make the
    interval wider: a machine that is slow for a while gives fewer independent values than rounds.
    With five values the widest possible interval, smallest to largest, covers the median 94 times
    in 100; from six on 95 can be reached.

    Parameters
    ----------
    x : array of shape (n,)
        At least one value, all of them finite.
    level : float
        Coverage wanted, between 0 and 1.

    Raises
    ------
    ArgumentError
        When *x* is not that, or *level* not between 0 and 1.

    References
    ----------
    T. Hesterberg, *What teachers should know about the bootstrap*, Am. Stat. 69(4), 2015.

    Examples
    --------
    >>> import numpy as np
    >>> from roundoff.timing import median_interval
    >>> median = median_interval(np.array([10.0, 12, 14, 11, 16, 13, 15]))
    >>> median.value, median.low <= 11 < 15 <= median.high
    (13.0, True)
    """
    check_number("level", level, above=0, below=1)
    try:
        series = np.asarray(x, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ArgumentError("a series", got=type(x).__name__, expected="numbers") from error
    if series.ndim != 1 or not series.size or not np.isfinite(series).all():
        raise ArgumentError(
            "a series", got=f"{x!r}"[:80], expected="at least one number, all of them finite"
        )
    return bootstrapped(series, level, seed, resamples)


def bootstrapped(
    x: np.ndarray, level: float = 0.95, seed: int = 0, resamples: int = _RESAMPLES
) -> Interval:
    """:func:`median_interval` of a series that was made here; infinite logarithms may be in it."""
    x = np.asarray(x, dtype=np.float64)
    n = x.size
    centre = float(np.median(x))
    if n < 2:
        return Interval(centre, -math.inf, math.inf, math.inf)
    # Student's t at n - 1 degrees, back to a normal probability: the expanded percentile.
    t = scipy.special.stdtrit(n - 1, (1 - level) / 2)
    tail = float(scipy.special.ndtr(math.sqrt(n / (n - 1)) * t))
    index = np.random.default_rng(seed).integers(0, n, (resamples, n))
    medians = np.median(x[index], axis=1)
    low, high = np.quantile(medians, [tail, 1 - tail], method="inverted_cdf")
    wider = _correlation_factor(x)
    return Interval(
        centre,
        centre - wider * (centre - float(low)),
        centre + wider * (float(high) - centre),
        wider * float(medians.std(ddof=1)),
    )


def _correlation_factor(x: np.ndarray) -> float:
    """The factor by which correlated neighbours widen an interval: sqrt((1 + rho) / (1 - rho)).

    That is the factor of a first-order autoregressive series. The correlation rho is that of
    ranks, so that one outlier does not decide, corrected for short series (Kendall, 1954).
    """
    n = x.size
    if n < 8:
        return 1.0
    _, place, count = np.unique(x, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count + 1) / 2)[place]  # equal values share their mean rank
    ranks -= ranks.mean()
    total = float(ranks @ ranks)
    rho = float(ranks[1:] @ ranks[:-1]) / total if total else 0.0
    if rho < 1.28 / math.sqrt(n):  # one chance series in ten
        return 1.0
    rho = min(rho + (1 + 3 * rho) / n, 0.95)
    return math.sqrt((1 + rho) / (1 - rho))


def pooled(sessions: Sequence[np.ndarray], level: float = 0.95, seed: int = 0) -> Interval:
    """Mean of the medians of several sessions, with Student's interval over sessions.

    What stays the same throughout a session (addresses of buffers, load of the machine) changes
    all its rounds alike: more rounds do not narrow the interval, more sessions do. A single
    session has the interval of its median, :func:`median_interval`.
    """
    if len(sessions) == 1:
        return bootstrapped(sessions[0], level, seed)
    medians = np.array([np.median(x) for x in sessions])
    n = medians.size
    se = float(medians.std(ddof=1)) / math.sqrt(n)
    half_width = -float(scipy.special.stdtrit(n - 1, (1 - level) / 2)) * se
    centre = float(medians.mean())
    return Interval(centre, centre - half_width, centre + half_width, se)


def ratio(
    a: Sequence[np.ndarray], b: Sequence[np.ndarray], level: float = 0.95, seed: int = 0
) -> Ratio:
    """Ratio of two callables' sessions, paired by round: what slows a whole round down cancels."""
    logs = [np.log(x) - np.log(y) for x, y in zip(a, b, strict=True)]
    log = pooled(logs, level, seed)
    value, low, high = (math.exp(v) for v in (log.value, log.low, log.high))
    units = len(logs) if len(logs) > 1 else int(np.size(logs[0]))
    return Ratio(value, low, high, log.se, units)


def drift(x: np.ndarray, least: float) -> float | None:
    """Relative change from the first to the last round, when there is a trend; else None.

    A trend is what chance gives once in a thousand series by the Mann-Kendall test, and moves by
    more than *least* of the median by the Theil-Sen line. Long series are thinned: both look at
    all pairs of rounds.

    References
    ----------
    H. Mann, *Nonparametric tests against trend*, Econometrica 13, 1945. P. Sen, *Estimates of the
    regression coefficient based on Kendall's tau*, JASA 63, 1968.
    """
    x = np.asarray(x, dtype=np.float64)
    rounds = np.arange(x.size)[:: -(-x.size // 400) or 1]
    n = rounds.size
    if n < 8:
        return None
    i, j = np.triu_indices(n, 1)
    rise = x[rounds[j]] - x[rounds[i]]
    score = abs(float(np.sign(rise).sum())) - 1  # the continuity correction
    if scipy.special.ndtr(-score / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)) > 0.5e-3:
        return None
    slope = float(np.median(rise / (rounds[j] - rounds[i])))
    change = slope * (x.size - 1) / float(np.median(x))
    return change if abs(change) > least else None


def bimodal(x: np.ndarray, least: float) -> tuple[float, float, float] | None:
    """(lower mode, upper mode, share of the upper), when a series has two; else None.

    The series is cut in two where the variance between the parts is largest. Two modes are two
    parts of at least 15 % each, further apart than *least* of the median and than four times the
    spread of a part (Ashman's D, 2.7 for a normal series and 3.5 for a uniform one), with at most
    one value in twenty in the middle half of the way from one to the other.

    References
    ----------
    N. Otsu, *A threshold selection method from gray-level histograms*, 1979.
    K. Ashman, C. Bird, S. Zepf, *Detecting bimodality in astronomical datasets*, 1994.
    """
    x = np.sort(np.asarray(x, dtype=np.float64))
    n = x.size
    if n < 20:
        return None
    sizes = np.arange(1, n)
    left = np.cumsum(x)[:-1] / sizes
    right = (x.sum() - np.cumsum(x)[:-1]) / (n - sizes)
    between = sizes * (n - sizes) * (right - left) ** 2
    share = sizes / n
    between[(share < 0.15) | (share > 0.85)] = -1
    cut = int(np.argmax(between)) + 1
    a, b = x[:cut], x[cut:]
    apart = float(np.median(b) - np.median(a))
    spread = math.sqrt((_spread(a) ** 2 + _spread(b) ** 2) / 2)
    low, high = float(np.median(a)), float(np.median(b))
    between_them = np.mean((x > low + apart / 4) & (x < high - apart / 4))
    if apart <= 4 * spread or apart <= least * float(np.median(x)) or between_them > 0.05:
        return None
    return low, high, b.size / n


def _spread(x: np.ndarray) -> float:
    """Standard deviation of the bulk: one far outlier must not hide two modes."""
    inner = x[(x >= np.quantile(x, 0.05)) & (x <= np.quantile(x, 0.95))]
    return float((inner if inner.size > 2 else x).std())
