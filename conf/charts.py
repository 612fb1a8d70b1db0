"""Charts of the page of results: drawn from the tables of one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from figures import save_svg, settled
from roundoff.page import MARKERS, PALETTE, subplots

__all__ = ["CHARTS", "Chart", "draw"]

Tables = Mapping[str, pd.DataFrame]


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart: which page's tables it needs, its title, and what it shows in words."""

    page: str
    name: str
    title: str
    plot: Callable[[Tables], tuple[Any, str] | None]


def draw(chart: Chart, tables: Tables, folder: Path) -> tuple[list[Path], str] | None:
    """Draw for a light page and for a dark one.

    Returns
    -------
    (files, text) or None
        None where the tables do not hold what the chart needs.
    """
    try:
        made = chart.plot(tables)
    except (KeyError, IndexError):
        plt.close("all")
        return None
    if made is None:
        return None
    figure, alt = made
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{chart.name}.svg", folder / f"{chart.name}_dark.svg"]
    with settled(figure):
        save_svg(figure, *files)
    plt.close("all")
    return files, alt


def algorithms(tables: Tables) -> tuple[Any, str] | None:
    """Error of each algorithm, against its spread."""
    rows = tables["distances"]
    rows = rows[rows["values"] == "float32"].drop_duplicates("algorithm").iloc[::-1]
    spread, error = rows["spread normal"], rows["error normal"]
    figure, axis = subplots(height=0.42 * len(rows) + 1.1)
    places = range(len(rows))
    least = 0.1
    axis.barh([p + 0.2 for p in places], error.clip(lower=least), 0.38, color=PALETTE[0],
              label="largest error against the exact sum")  # fmt: skip
    axis.barh([p - 0.2 for p in places], spread.clip(lower=least), 0.38, color=PALETTE[1],
              label="spread over 128 orders")  # fmt: skip
    for p, s in zip(places, spread, strict=True):
        if s == 0:
            axis.text(least * 1.1, p - 0.2, "0", va="center", fontsize=8)
    axis.set_yticks(list(places), rows["algorithm"])
    axis.set(xscale="log", xlabel="units in the last place (ULP)", xlim=(least, None))
    axis.grid(axis="y", visible=False)
    axis.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)
    worst = rows.loc[error.idxmax()]
    steady = ", ".join(rows.loc[spread == 0, "algorithm"])
    return figure, (
        "Error and spread of one float32 sum of 8192 normal values, by algorithm. "
        f"{worst['algorithm'].capitalize()} addition is worst with an error of "
        f"{worst['error normal']:,.0f} ULP; the same sum in every order: {steady or 'none'}."
    )


def gains(tables: Tables) -> tuple[Any, str] | None:
    """Ratio of fused to not fused, with its interval."""
    rows = tables["ratios"]
    rows = rows[(rows["label"] == "fused ahead") & rows["ratio"].notna()]
    groups = list(rows.groupby(["dtype", "tf32"], sort=False))
    figure, axis = subplots(height=3.2)
    for i, ((dtype, tf32), part) in enumerate(groups):
        label = dtype + (" with TF32" if tf32 == "on" else "")
        whiskers = [part["ratio"] - part["low"], part["high"] - part["ratio"]]
        shift = 1 + 0.03 * (i - (len(groups) - 1) / 2)
        axis.errorbar(part["size"] * shift, part["ratio"], [w.clip(lower=0) for w in whiskers],
                      color=PALETTE[i], marker=MARKERS[i], capsize=3, label=label)  # fmt: skip
    axis.axhline(1, color="#7b838d", linewidth=1.2)
    axis.set_xscale("log", base=2)
    sizes = sorted(rows["size"].unique())
    axis.set_xticks(sizes, [str(int(s)) for s in sizes])
    axis.set(xlabel="side of the matrices", ylabel="time over not fused")
    axis.legend()
    won = int((rows["high"] < 1).sum())
    return figure, (
        "Time of one large Gemm over that of two small ones, with its interval, by size and type: "
        f"from {rows['ratio'].min():.2f} to {rows['ratio'].max():.2f}; in {won} of {len(rows)} "
        "cases the whole interval is below 1."
    )


def bandwidth(tables: Tables) -> tuple[Any, str] | None:
    """Backward pass: speed by width, ceilings dashed."""
    table = tables["layer-norm-backward"]
    if len(table) < 3 or table["Triton"].isna().all():
        return None
    ceilings = {"copy": "copy", "add": "two reads, one write"}
    shown = [c for c in table.columns if c != "N" and table[c].notna().any()]
    figure, axis = subplots(height=3.8)
    for i, column in enumerate(shown):
        part = table[table[column].notna()]
        line = axis.plot(part["N"], part[column], marker=MARKERS[i], markersize=3.5)[0]
        line.set(color=PALETTE[i], linestyle="--" if column in ceilings else "-")
        line.set_label(ceilings.get(column, column))
    axis.set(xlabel="width N", ylabel="GB/s", ylim=(0, None))
    axis.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.45, 1.0))
    share = table["Triton"] / table["copy"]
    return figure, (
        "Speed of LayerNorm's backward pass against the width N: "
        + ", ".join(ceilings.get(c, c) for c in shown)
        + f". Triton's, ours, is between {share.min():.0%} and {share.max():.0%} of the copy."
    )


CHARTS = (
    Chart("plot_triton_layer_norm", "results-backward", "A backward pass near the speed of memory",
          bandwidth),
    Chart("plot_reduction_order", "results-algorithms", "Repeatable is not the same as right",
          algorithms),
    Chart("plot_gemm_fusion", "results-gains", "What one large Gemm saves", gains),
)  # fmt: skip
