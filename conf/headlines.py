"""The one figure of each study that a reader would tell a colleague, computed from its tables.

A function takes the tables of one run, by name, and returns a :class:`Figure`, or None where the
run does not hold what the figure needs: without a GPU there is no TF32, for instance.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

import pandas as pd

__all__ = ["HEADLINES", "Figure", "Headline", "figure_of"]

Tables = Mapping[str, pd.DataFrame]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number with its unit, and the sentence that it begins or proves."""

    value: str
    sentence: str


@dataclasses.dataclass(frozen=True)
class Headline:
    """What is asked of a page: a short name for the column, and where the answer comes from."""

    page: str
    asks: str
    compute: Callable[[Tables], Figure | None]


def figure_of(headline: Headline, tables: Tables) -> Figure | None:
    """The figure, or None where a table, a column or a row that it needs is not there."""
    try:
        return headline.compute(tables)
    except (KeyError, IndexError):
        return None


def spread(tables: Tables) -> Figure | None:
    rows = tables["truth"].set_index(["population", "dtype"])
    row = rows.loc[("normal", "float32")]
    return Figure(
        f"{int(row['distinct'])} answers",
        f"One float32 sum of 8192 normal values, added in 128 orders: {int(row['distinct'])} "
        f"different results, up to {row['spread']:,.0f} units in the last place apart.",
    )


def tf32_gap(tables: Tables) -> Figure | None:
    rows = tables["truth"].fillna({"TF32": ""})
    cuda = rows[rows["provider"].str.startswith("CUDA") & (rows["dtype"] == "float32")]
    if len(cuda):
        errors = cuda.set_index(["runtime", "TF32"])["abs"]
        factor = errors["ORT", "on"] / errors["torch", "off"]
        return Figure(
            f"{factor:.0f}×",
            f"As they come, ONNX Runtime's float32 result on a GPU is {factor:.0f} times further "
            "from the truth than PyTorch's: TF32 is on in one and off in the other. It is a "
            "switch, not a kernel.",
        )
    errors = rows[rows["dtype"] == "float32"].set_index("runtime")["err_ulp"]
    return Figure(
        f"{errors['ORT']:,.0f} and {errors['torch']:,.0f} ULP",
        "LayerNorm and product in float32 on a CPU: largest error of ONNX Runtime and of PyTorch.",
    )


def fusion_gain(tables: Tables) -> Figure | None:
    rows = tables["ratios"]
    chosen = rows[(rows["label"] == "fused ahead") & rows["ratio"].notna()]
    low, high = chosen["ratio"].min(), chosen["ratio"].max()
    ordered = chosen.sort_values("ratio").iloc[[0, -1]]
    best, worst = (
        f"{r['dtype']}{' with TF32' * (r['tf32'] == 'on')}, {int(r['size'])}"
        for _, r in ordered.iterrows()
    )
    return Figure(
        f"{low:.2f} to {high:.2f}",
        "One large Gemm in the time of two small ones and their Concat: from "
        f"{low:.2f} ({best}) to {high:.2f} ({worst}) of it, weights joined ahead.",
    )


def speed_up(tables: Tables) -> Figure | None:
    best = None
    for name, table in tables.items():
        # time-float16, and not time-float16-large: one layer of the page's own size.
        if not re.fullmatch(r"time-\w+", name) or table.empty:
            continue
        one = table[table["layers"] == table["layers"].min()].set_index("optimization")
        ours = one[one.index.str.startswith(("+", "default"))]["speedup"].dropna()
        if len(ours) and (best is None or ours.max() > best[0]):
            rival = one.loc[one.index.str.startswith("inductor"), "median"].min()
            ratio = one.loc[ours.idxmax(), "median"] / rival
            best = ours.max(), ours.idxmax(), name.removeprefix("time-"), ratio
    if best is None:
        return None
    gain, way, precision, ratio = best
    beside = f", and {ratio:.2f} of the time of inductor's best that ran" if ratio == ratio else ""
    return Figure(
        f"{gain:.2f}×",
        f"A Llama layer on our ONNX Runtime backend ({way}, {precision}): {gain:.2f} times as fast "
        f"as PyTorch with eager attention at the same precision{beside}.",
    )


def copy_share(tables: Tables) -> Figure | None:
    table = tables["layer-norm-backward"]
    share = (table["Triton"] / table["copy"]).dropna()
    if share.empty:
        return None
    best, worst = (int(table.loc[i, "N"]) for i in (share.idxmax(), share.idxmin()))
    return Figure(
        f"{share.max():.0%}",
        f"LayerNorm's backward pass in Triton reaches {share.max():.0%} of a plain copy's speed "
        f"(N = {best:,}), and {share.min():.0%} where it is slowest (N = {worst:,}).",
    )


HEADLINES = (
    Headline("plot_reduction_order", "Spread", spread),
    Headline("plot_layer_norm_discrepancies", "TF32 gap", tf32_gap),
    Headline("plot_gemm_fusion", "Fusion gain", fusion_gain),
    Headline("plot_llama_backend", "Speed-up at equal precision", speed_up),
    Headline("plot_triton_layer_norm", "Share of copy bandwidth", copy_share),
)
