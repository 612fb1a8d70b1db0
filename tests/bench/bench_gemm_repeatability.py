"""Runs the Gemm-fusion page several times and counts the ratios that did not repeat.

Each ratio of each later run is compared with the same ratio of the first by a test of the
difference at 5 %; of ratios that did not change, one in twenty fails it by chance. Not a test:
run it by hand, ``python tests/bench/bench_gemm_repeatability.py [runs]``.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
from scipy.stats import binom

from roundoff.timing import Ratio

PAGE = Path(__file__).parents[2] / "gallery" / "fusion" / "plot_gemm_fusion.py"
KEYS = ["dtype", "tf32", "size", "label"]


def one_run() -> pd.DataFrame:
    """Ratios of a fast run of the page, in a process and a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, str(PAGE)],
            cwd=folder,
            env={**os.environ, "UNITTEST_GOING": "1", "MPLBACKEND": "agg"},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        tables = Path(folder, "build", PAGE.stem)
        return pd.concat([pd.read_csv(tables / f"{t}.csv") for t in ("ratios", "again")])


def as_ratio(row: pd.Series) -> Ratio:
    return Ratio(row["ratio"], row["low"], row["high"], row["se"], int(row["units"]))


def main(runs: int) -> None:
    found = []
    for i in range(runs):
        table = one_run()
        inside = table[table["p"].notna()]
        print(f"run {i + 1}: {(inside['p'] < 0.05).sum()} of {len(inside)} differ within the run")
        found.append(table[table["se"].notna()].set_index(KEYS))
    first, differing, total = found[0], 0, 0
    for i, later in enumerate(found[1:], start=2):
        both = first.join(later, rsuffix="_later", how="inner")
        p = [
            as_ratio(first.loc[key]).p_value(as_ratio(later.loc[key])) for key in both.index
        ]  # fmt: skip
        print(f"run {i} against run 1: {sum(v < 0.05 for v in p)} of {len(p)} ratios differ")
        differing, total = differing + sum(v < 0.05 for v in p), total + len(p)
    limit = int(binom.ppf(0.95, total, 0.05))
    print(f"in all {differing} of {total} ratios differ at 5 %; chance gives up to {limit}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
