"""Mean and normalisation in 128 orders, an order a row of one array, against one call each.

Both get the same values and the same orders, and must return the same spreads, bit for bit.
They take turns in one process; the ratio is the median over rounds, with the range it had.

Run ``python tests/bench/bench_reduction_order.py [--rounds 5]``; the status is 1 below 4x.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Mapping

import numpy as np
import pandas as pd

from roundoff.reductions import (
    DISTRIBUTIONS,
    DTYPES,
    arrange,
    draw_orders,
    draw_values,
    mean,
    moments,
    round_to,
)

SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
COLUMNS = ["distribution", "size", "dtype", "mean", "normalized"]
REQUIRED = 4.0


def batched(values: Mapping[str, np.ndarray], orders: int, seed: int) -> pd.DataFrame:
    """The study as the page on reduction order makes it."""
    rows = []
    for size in SIZES:
        drawn = draw_orders(size, orders, seed)
        for name, x64 in values.items():
            for dtype in DTYPES:
                x = round_to(x64[:size], dtype)
                arranged = arrange(x, drawn)
                mu, sd = np.unique(moments(arranged), axis=1)[:, :, None]
                y = round_to((np.sort(x) - mu) / (sd + 1e-6), dtype)
                of_mean = np.ptp(mean(arranged, dtype).astype(float))
                rows.append((name, size, dtype, of_mean, float(np.ptp(y, axis=0).max())))
    return pd.DataFrame(rows, columns=COLUMNS).replace([math.inf, -math.inf], math.nan)


def normalize(x: np.ndarray, dtype: str) -> np.ndarray:
    mu, sd = moments(x)
    with np.errstate(invalid="ignore"):
        return round_to((x - mu[..., np.newaxis]) / (sd[..., np.newaxis] + 1e-6), dtype)


def one_at_a_time(values: Mapping[str, np.ndarray], orders: int, seed: int) -> pd.DataFrame:
    """The study as one would first write it: a mean and a normalisation for each order."""
    rows = []
    for size in SIZES:
        drawn = draw_orders(size, orders, seed)
        for name, x64 in values.items():
            for dtype in DTYPES:
                x = round_to(x64[:size], dtype)
                up = np.sort(x)
                means, low, high = [], np.full(size, np.inf), np.full(size, -np.inf)
                for vector in (x, up, up[::-1].copy(), *(x[order] for order in drawn)):
                    means.append(mean(vector, dtype))
                    y = np.sort(normalize(vector, dtype))
                    np.minimum(low, y, out=low)
                    np.maximum(high, y, out=high)
                with np.errstate(invalid="ignore"):
                    of_mean = float(np.float64(max(means)) - np.float64(min(means)))
                    of_normalized = float(np.max(high - low))
                rows.append((name, size, dtype, of_mean, of_normalized))
    frame = pd.DataFrame(rows, columns=COLUMNS)
    return frame.replace([math.inf, -math.inf], math.nan)


def compare(rounds: int, orders: int = 128, seed: int = 0) -> list[float]:
    """Seconds of the loop over seconds of the batch, a round."""
    values = {name: draw_values(name, max(SIZES), seed) for name in DISTRIBUTIONS}
    ratios = []
    for round_ in range(rounds + 1):
        start = time.perf_counter()
        batch = batched(values, orders, seed)
        middle = time.perf_counter()
        loop = one_at_a_time(values, orders, seed)
        end = time.perf_counter()
        pd.testing.assert_frame_equal(batch, loop, check_exact=True)
        if round_:  # the first is a warm-up
            ratios.append((end - middle) / (middle - start))
            print(f"  round {round_}: batch {middle - start:.3f} s, loop {end - middle:.3f} s")
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    ratios = compare(parser.parse_args().rounds)
    median = statistics.median(ratios)
    evaluations = len(DISTRIBUTIONS) * len(SIZES) * len(DTYPES) * 128
    print(
        f"reduction order: {evaluations:,} means and {evaluations:,} normalisations, bits equal; "
        f"batch {median:.1f} times quicker than the loop ({min(ratios):.1f} to {max(ratios):.1f}; "
        f"at least {REQUIRED:g} wanted)"
    )
    return 0 if median >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
