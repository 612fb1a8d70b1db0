r"""
.. _reduction_order:

Reproducible parallel reduction is difficult
============================================

A sum depends on the order in which its values are added, and a parallel machine is free to choose
that order. This page adds the same numbers in 128 orders, in four element types and with a dozen
algorithms, and asks of every result how far it is from the others and how far from the exact sum.
The two are not the same: an answer can repeat perfectly and be wrong, and it can vary in its last
bit and be right.
"""

# %%
# Addition does not associate
# ---------------------------
#
# Every floating-point addition rounds. Which roundings happen depends on what meets what:

import math
from fractions import Fraction

import numpy as np
import pandas as pd
import torch

from roundoff.dtypes import dtype_info
from roundoff.page import MARKERS, PALETTE, Study, subplots
from roundoff.reductions import (
    ALGORITHMS,
    DTYPES,
    POPULATIONS,
    SIZES,
    arrange,
    chunked,
    condition,
    draw_orders,
    error_bound,
    exact_sum,
    judge,
    mean,
    normalize,
    overflows,
    population,
    quantize,
    signed_errors,
    spread_study,
)
from roundoff.script import get_parsed_args, unit_test_going
from roundoff.timing import measure

args = get_parsed_args(
    "plot_reduction_order",
    __doc__,
    expose="config",
    config=("fast" if unit_test_going() else "full", "fast, full or large: sizes of the last parts"),
)
study = Study("plot_reduction_order", args)

one, big = np.float32(1), np.float32(2**24)
assert (big + one) + one == big and big + (one + one) != big
study.say(
    f"In float32 (2²⁴ + 1) + 1 is `{(big + one) + one:.0f}`, and 2²⁴ + (1 + 1) is "
    f"`{big + (one + one):.0f}`. Both followed the standard to the letter."
)

# %%
# The numbers and their orders
# ----------------------------
#
# Three populations, of 8192 values each. Shorter vectors are their prefixes; all lengths are powers
# of two, so that dividing a sum by the length rounds nothing.
#
# * **normal**: standard normal, both signs, so the sum cancels;
# * **spikes**: −0.0001 everywhere, and 100 at every 128th place;
# * **pareto**: Pareto of shape 1, moved to start at 0: positive, with a tail so heavy that its mean
#   does not exist.
#
# The vectors are rounded to the element type first. **float16 and bfloat16 values are added in
# float32 and only the result is rounded back**, unless a row says otherwise: that is what NumPy,
# PyTorch and most kernels do. float64 and float32 are added in their own type.
#
# 128 orders: as given, ascending, descending, and 125 random permutations, drawn once for each
# length and shared by all types, populations and statistics.

SEED, ORDERS = 0, 128
values = {name: population(name, max(SIZES), SEED) for name in POPULATIONS}
drawn = {size: draw_orders(size, ORDERS, SEED) for size in SIZES}

# %%
# All orders of a vector go through NumPy as the rows of one array. That is legitimate only because
# each row is added exactly as it would be alone, which depends on the memory layout. The same array
# laid out column by column holds the same values, and gives other sums:

rows = arrange(values["normal"], drawn[8192])
alone = np.array([np.add.reduce(row) for row in rows])
batch = np.add.reduce(rows, axis=-1)
across = np.add.reduce(np.asfortranarray(rows), axis=-1)

assert batch.tobytes() == alone.tobytes(), "the batch must have the bits of separate calls"
study.say(
    f"Rows contiguous: {np.sum(batch == alone)} of {ORDERS} sums have the bits of a separate call. "
    f"Columns contiguous: {np.sum(across == alone)} of {ORDERS}, because NumPy then adds whole rows "
    "to one another, each vector from left to right."
)

# %%
# Two statistics
# --------------
#
# The **mean**, one reduction; and the **normalisation** (x − mean) / (sd + 10⁻⁶) with the
# population's standard deviation, two reductions and the heart of a layer norm [#ba]_:

x = quantize(values["normal"], "float16")
print(mean(x, "float16"), normalize(x, "float16")[:3])

# %%
# For the mean we report the highest result minus the lowest; for the normalisation the largest
# absolute difference between the sorted results of any two orders. Both would be 0 in exact
# arithmetic. This one line evaluates both statistics for every population, type, length and order:

spreads = spread_study(values, drawn)


def by_size(name, statistic, what):
    """Show one statistic of one population: a row a length, a column a type."""
    of_it = spreads[spreads.population == name]
    frame = of_it.pivot(index="size", columns="dtype", values=statistic)[list(DTYPES)]
    return study.table(
        f"{statistic}-{name}",
        frame.reset_index(),
        caption=f"{what}, population **{name}**, over {ORDERS} orders.",
        formats={dtype: ".2g" for dtype in DTYPES},
        missing="overflow",
    )


# %%
# Normal
# ^^^^^^
#
# Two values have one sum, whatever their order; from 4 or 8 on float64 and float32 show their last
# bits. In 16 bits the mean hardly moves: float32 adds such short significands nearly exactly, and
# the final rounding hides the rest.

by_size("normal", "mean", "Mean: highest minus lowest")

# %%
# The normalised values are of size 1 to 4, and so are their last places. Where float16 shows
# anything it is one whole unit: a value that fell on the other side of a rounding boundary.

by_size("normal", "normalized", "Normalisation: largest difference between sorted results")

# %%
# Spikes
# ^^^^^^
#
# Up to 128 values there is one spike. Then several, and the small values that are added to one or to
# many of them are rounded differently.

by_size("spikes", "mean", "Mean: highest minus lowest")

# %%

by_size("spikes", "normalized", "Normalisation: largest difference between sorted results")

# %%
# Pareto
# ^^^^^^
#
# A few giants decide the sum, and small values meet them early or late.

by_size("pareto", "mean", "Mean: highest minus lowest")

# %%

by_size("pareto", "normalized", "Normalisation: largest difference between sorted results")

# %%
# All at once
# ^^^^^^^^^^^

summary = (
    spreads.melt(["population", "dtype"], ["mean", "normalized"], "statistic", "spread")
    .groupby(["population", "statistic", "dtype"], sort=False)["spread"]
    .max()
    .unstack()[list(DTYPES)]
    .reset_index()
)
study.table(
    "summary",
    summary,
    caption="Largest spread over all nine lengths.",
    formats={dtype: ".2g" for dtype in DTYPES},
    labels={"population": "population", "statistic": "statistic"},
)

# %%

fig, axes = subplots(1, 2, height=3.3, sharey=True)
width = 0.2
for axis, statistic in zip(axes, ("mean", "normalized"), strict=True):
    part = summary[summary.statistic == statistic].set_index("population")
    for i, dtype in enumerate(DTYPES):
        place = np.arange(len(part)) + (i - 1.5) * width
        bars = axis.bar(place, part[dtype], width * 0.9, color=PALETTE[i], label=dtype)
        for bar, height in zip(bars, part[dtype], strict=True):
            if height == 0:
                axis.annotate("0", (bar.get_x() + bar.get_width() / 2, 0.02), ha="center",
                              xycoords=("data", "axes fraction"), color=PALETTE[i], fontsize=9)  # fmt: skip
    axis.set_xticks(range(len(part)), part.index)
    axis.set_yscale("log")
    axis.set_title({"mean": "Mean", "normalized": "Normalisation"}[statistic])
    axis.grid(axis="x", visible=False)
axes[0].set_ylabel("largest spread")
axes[0].legend(loc="upper left", ncols=2)
axes[0].set_ylim(1e-17, 1)
study.figure(
    "spread",
    fig,
    alt="Bars on a logarithmic scale: the largest spread of mean and normalisation by population "
    "and element type. float64 bars end near 1e-15, float32 bars between 1e-7 and 1e-5; 16-bit "
    "types show nothing, or one unit in the last place.",
)

# %%
# The study this page grew from [#study]_ published, for the normal population, about 1e-3 in
# float16, 2.4e-7 in float32 and 6.7e-16 in float64, and 1.1e-5 in float32 for Pareto. Its vector had
# 4096 values, so its 8192 was a second 4096.

PUBLISHED = {
    ("normal", "float16"): 1e-3,
    ("normal", "float32"): 2.4e-7,
    ("normal", "float64"): 6.7e-16,
    ("pareto", "float32"): 1.1e-5,
}


def against_published(run):
    table = run.tables["summary"]
    ours = table[table.statistic == "normalized"].set_index("population")
    ratios = {key: ours[key[1]][key[0]] / value for key, value in PUBLISHED.items()}
    assert all(1 / 4 < ratio < 4 for ratio in ratios.values()), ratios
    parts = [f"{ratio:.2g} times for {p} in {dtype}" for (p, dtype), ratio in ratios.items()]
    wide = table.groupby("population")[["float64", "float32"]].max()
    gap = (wide.float32 / wide.float64).min()
    assert gap > 1e6
    return [
        "The largest spread of the normalisation against the published figure: "
        + ", ".join(parts)
        + ". A few last places more or less are a matter of which orders were drawn.",
        f"float64 shrinks the spread by at least {gap:.1e} and never to 0 for these populations: "
        "more digits make the problem smaller, not absent.",
    ]


study.conclude(against_published, "summary")

# %%
# Overflow is a result
# ^^^^^^^^^^^^^^^^^^^^
#
# The largest float16 is 65504, and one Pareto value in 65,521 rounds to infinity. The vector above
# had none. Other seeds do, and then no spread can be reported: the mean is infinite in every order,
# which is perfectly reproducible.

seeds = range(100 if unit_test_going() else 1000)
lost = [overflows(population("pareto", seed=seed), "float16") for seed in seeds]
unlucky = {"pareto": population("pareto", seed=int(np.argmax(np.array(lost) > 0)))}
other = spread_study(unlucky, {size: drawn[size] for size in (512, 2048, 8192)})
frame = other.pivot(index="size", columns="dtype", values="normalized")[list(DTYPES)]
frame["became infinite in float16"] = other.groupby("size").overflow.max()
study.table(
    "overflow",
    frame.reset_index(),
    caption=f"Spread of the normalisation for the Pareto vector of seed {int(np.argmax(np.array(lost) > 0))}.",
    formats={dtype: ".2g" for dtype in DTYPES},
    missing="overflow",
)

# %%

expected = 1 - (1 - 1 / 65521) ** 8192
assert abs(np.mean(np.array(lost) > 0) - expected) < 4 * math.sqrt(expected / len(lost))
study.say(
    f"{np.count_nonzero(lost)} of {len(lost)} seeds have at least one value that overflows float16 "
    f"({expected:.0%} expected); bfloat16, with the exponents of float32, loses none."
)

# %%
# Truth, and the condition of a sum
# ---------------------------------
#
# Spread compares results with each other. For the error we need the exact sum, and can have it:
# floating-point numbers are rationals, and :func:`math.fsum` or :class:`fractions.Fraction` add them
# without rounding. The truth is that of the vector after it was rounded to its type: rounding the
# data is not the reduction's fault.
#
# How hard a sum is, its **condition number** tells:
#
# .. math:: \kappa = \frac{\sum |x_i|}{\left|\sum x_i\right|}
#
# It is 1 if all values have one sign and grows as they cancel. With u the unit roundoff of the type
# that adds (2⁻⁵³ for float64, 2⁻²⁴ for float32), a good algorithm cannot be expected to have a
# relative error much below κ·u. A **ULP** here is the spacing of the result's type at the exact result;
# a correctly rounded result is within 0.5.

truths = []
for name in POPULATIONS:
    for dtype in DTYPES:
        x = quantize(values[name], dtype)
        results = mean(arrange(x, drawn[x.size]), dtype)
        found = judge(results, exact_sum(x) / x.size, dtype)
        truths.append({"population": name, "dtype": dtype, "condition": condition(x)} | found)
study.table(
    "truth",
    pd.DataFrame(truths),
    caption=f"Mean of 8192 values with NumPy's sum in {ORDERS} orders: how many different results, "
    "how far apart they are, and how far from the exact mean (the worst and the median order).",
    formats={"condition": ".4g", "spread": ".3g", "error": ".3g", "median": ".3g"},
    units={"spread": "ULP", "error": "ULP", "median": "ULP"},
    labels={"condition": "κ", "error": "worst error", "median": "median error"},
    missing="overflow",
)

# %%


def spread_is_not_error(run):
    table = run.tables["truth"]
    assert (table.spread <= 2 * table.error * (1 + 1e-9)).all()
    same = table[table.distinct == 1]
    off = same[same.error > 0.05]
    assert len(off) > 0, "a result that repeats and is not exact"
    worst = table.loc[table.error.idxmax()]
    halves = table[table.dtype.isin(["float16", "bfloat16"])]
    assert (halves.error < 0.51).all()
    return [
        f"In {len(same)} of {len(table)} rows all {ORDERS} orders give the same bits; in {len(off)} "
        "of those the result is still rounded away from the exact mean. Repeating is no proof of "
        "being right.",
        f"The worst error is {worst.error:.3g} ULP ({worst.population}, {worst['dtype']}), where κ is "
        f"{worst.condition:.0f}; its orders spread over {worst.spread:.3g} ULP.",
        f"Added in float32, the 16-bit means are within {halves.error.max():.4f} ULP of the truth: "
        "the half unit is their final rounding, and nothing else is visible.",
        "The spread never exceeds twice the worst error: two results cannot be further from each "
        "other than both are from the truth.",
    ]


study.conclude(spread_is_not_error, "truth")

# %%
# Does κ·u really set the scale? Every vector of the study, now added *in its own type* by the
# deepest-cutting algorithm (pairs, pairs of pairs, down to the leaves), 16-bit types included:

points = []
for name in POPULATIONS:
    for dtype in DTYPES:
        stored = quantize(values[name], dtype, storage=True)
        for size in SIZES:
            x = stored[:size]
            truth = exact_sum(x)
            sums = ALGORITHMS["pairwise, to the leaves"].add(arrange(x, drawn[size]))
            error = float(np.max(np.abs(signed_errors(sums, truth)))) / abs(float(truth))
            scale = condition(x) * dtype_info(dtype).unit_roundoff
            points.append((name, dtype, size, scale, error))
points = pd.DataFrame(points, columns=["population", "dtype", "size", "scale", "error"])

fig, axis = subplots(height=4.2)
for marker, name in zip(MARKERS, POPULATIONS, strict=False):
    for colour, dtype in zip(PALETTE, DTYPES, strict=False):
        part = points[(points.population == name) & (points.dtype == dtype)]
        part = part[np.isfinite(part.error) & (part.error > 0)]
        axis.plot(part.scale, part.error, marker, color=colour, alpha=0.85,
                  label=f"{dtype}, {name}")  # fmt: skip
span = np.array([1e-17, 3])
axis.plot(span, span, color="#7b838d", linewidth=1.2)
axis.plot(span, 13 * span, color="#7b838d", linewidth=1.2, linestyle="--")
axis.annotate("κ·u", (3e-12, 3e-12), (5, -12), textcoords="offset points")
axis.annotate("13·κ·u, the bound for 8192 values", (3e-12, 3.9e-11), (-5, 5),
              textcoords="offset points", ha="right")  # fmt: skip
axis.set(xscale="log", yscale="log", xlim=(5e-17, 1), ylim=(5e-18, 5))
axis.set_xlabel("condition number × unit roundoff, κ·u")
axis.set_ylabel("worst relative error of 128 orders")
axis.legend(ncols=2, loc="lower right", fontsize=8)
study.figure(
    "condition",
    fig,
    alt="Relative error against condition number times unit roundoff, both logarithmic over sixteen "
    "decades. The points of all types and populations lie along the diagonal, most of them within "
    "a factor of ten below or slightly above it, and none above thirteen times it.",
)

# %%

finite = points[np.isfinite(points.error)]
depth = np.log2(finite["size"])
limit = depth * finite.scale / (1 - depth * finite.scale.clip(upper=0.05))
assert (finite.error <= limit).all()
visible = finite[finite.error > 0]
ratio = visible.error / visible.scale
study.say(
    [
        f"Over {len(visible)} sums the worst error is between {ratio.min():.2g} and {ratio.max():.2g} "
        f"times κ·u, {ratio.median():.2g} in the median, from float64 to bfloat16.",
        f"{len(finite) - len(visible)} more are exact in every order, and {len(points) - len(finite)} "
        "overflowed: positive values whose sum leaves float16, though their mean would not.",
    ]
)

# %%
# Twelve ways to add
# ------------------
#
# The order of the values is one freedom, the order of the additions another:
#
# * **sequential**: one accumulator, left to right;
# * **pairwise, NumPy's**: what :func:`numpy.sum` does, eight accumulators for up to 128 values, then
#   a tree of such blocks;
# * **pairwise, to the leaves**: a full binary tree;
# * **Neumaier** [#neumaier]_: sequential, but the error of every addition is computed and added at the end;
# * **binned** [#demmel]_: reproducible by construction: all values are cut at the same bit positions,
#   chosen from the largest, so that each of three pieces adds up exactly in any order;
# * **exact**: rationals, rounded once;
# * **torch.sum** on the CPU and, where there is one, on the GPU;
# * **atomics**: GPU programs that add to one number in memory, in whatever order they finish, as
#   PyTorch's ``index_add_`` does and a Triton kernel of ours; beside it our Triton kernel in two
#   passes, which does not.
#
# One row adds float16 values in float32, as NumPy does; four add 16-bit values *in 16 bits*.


def one_by_one(add, device="cpu"):
    """A sum for a batch from a sum for one vector: every row in a call of its own."""

    def run(rows):
        return np.array([add(v).item() for v in torch.from_numpy(rows).to(device)], rows.dtype)

    return run


def index_add(v):
    place = torch.zeros(len(v), dtype=torch.long, device=v.device)
    return torch.zeros(1, device=v.device).index_add_(0, place, v)


on_cpu = {(name, "float32", "float32"): a.add for name, a in ALGORITHMS.items()}
on_cpu["torch.sum, CPU", "float32", "float32"] = one_by_one(torch.sum)
on_cpu["pairwise, NumPy's", "float16", "float32"] = ALGORITHMS["pairwise, NumPy's"].add
for dtype in ("float16", "bfloat16"):
    for name in ("sequential", "pairwise, to the leaves"):
        on_cpu[name, dtype, dtype] = ALGORITHMS[name].add

kernels = {}
if torch.cuda.is_available():
    from roundoff.kernels.reduce import sum_atomic, sum_two_pass

    kernels = {
        "torch.sum, CUDA": torch.sum,
        "index_add_, CUDA atomics": index_add,
        "Triton, atomics": sum_atomic,
        "Triton, two passes": sum_two_pass,
    }
on_gpu = {(name, "float32", "float32"): one_by_one(add, "cuda") for name, add in kernels.items()}

# %%
# Each adds every population in all 128 orders, and the given order 128 times. The cost is the time
# for one long float32 or 16-bit vector on one thread against NumPy's, and on a GPU against
# ``torch.sum`` there, everything in turns in one process. It is the cost of *these* implementations:
# those written in NumPy go through memory several times.

judged, repeated = {}, {}
for key, add in (on_cpu | on_gpu).items():
    for name in POPULATIONS:
        x = quantize(values[name], key[1], storage=True)
        judged[key, name] = judge(add(arrange(x, drawn[x.size])), exact_sum(x), key[1])
        again = judge(add(np.tile(x, (ORDERS, 1))), exact_sum(x), key[1])
        repeated[key] = max(repeated.get(key, 1), again["distinct"])

length = 2**12 if args.config == "fast" else 2**18
long = population("normal", length, SEED)
held = {d: quantize(long, d, storage=True) for d in ("float32", "float16", "bfloat16")}
rivals = {key: (lambda add=add, x=held[key[1]]: add(x)) for key, add in on_cpu.items()}
single = torch.from_numpy(held["float32"])
rivals["torch.sum, CPU", "float32", "float32"] = lambda: torch.sum(single)
threads = torch.get_num_threads()
torch.set_num_threads(1)
times = measure({" | ".join(k): f for k, f in rivals.items()}, budget_s=6 if length > 2**12 else 0.2,
                min_rounds=5)  # fmt: skip
torch.set_num_threads(threads)
cost = {k: times.ratio(" | ".join(k), "pairwise, NumPy's | float32 | float32").value for k in rivals}
if on_gpu:
    large = torch.randn(2**26, device="cuda", generator=torch.Generator("cuda").manual_seed(SEED))
    times = measure({n: (lambda f=f: f(large)) for n, f in kernels.items()}, device="cuda")
    cost |= {(n, "float32", "float32"): times.ratio(n, "torch.sum, CUDA").value for n in kernels}

# %%

algorithms = pd.DataFrame(
    {
        "algorithm": key[0],
        "data": key[1],
        "adds in": key[2],
        **{name: judged[key, name]["distinct"] for name in POPULATIONS},
        "repeats": repeated[key],
        "order-free": all(judged[key, name]["distinct"] == 1 for name in POPULATIONS),
        "cost": cost[key],
    }
    for key in on_cpu | on_gpu
)
study.table(
    "algorithms",
    algorithms,
    caption=f"Different bit patterns among {ORDERS} orders of 8192 values, by population; among "
    f"{ORDERS} repeats of one order, at most; whether no population shows the order; and relative "
    "time for a long vector (NumPy's sum, or torch's on the GPU, is 1).",
    formats={"cost": ".2g"},
    emphasize={"order-free": lambda table: table["order-free"]},
    labels={"repeats": "repeats of one order", "cost": "relative cost"},
)

# %%
# The same runs, as distances. A tenth of a ULP is invisible in the result; half a ULP is what the
# last rounding alone may cost.

distances = pd.DataFrame(
    {
        "algorithm": key[0],
        "data": key[1],
        "adds in": key[2],
        **{f"spread {name}": judged[key, name]["spread"] for name in POPULATIONS},
        **{f"error {name}": judged[key, name]["error"] for name in POPULATIONS},
    }
    for key in on_cpu | on_gpu
)
study.table(
    "distances",
    distances,
    caption=f"Spread over {ORDERS} orders, and largest error against the exact sum, by population.",
    formats={c: ".3g" for c in distances.columns[3:]},
    units={c: "ULP" for c in distances.columns[3:]},
    missing="overflow",
)

# %%


def who_sees_the_order(run):
    counts, far = run.tables["algorithms"], run.tables["distances"]
    free = set(counts.algorithm[counts["order-free"].astype(bool) & (counts.data == "float32")])
    assert {"binned, 3 folds", "exact"} <= free
    assert not {"sequential", "pairwise, NumPy's"} & free
    errors = far[far.data == "float32"].set_index("algorithm")[[f"error {p}" for p in POPULATIONS]]
    worst = errors.max(axis=1)
    assert worst["exact"] <= 0.5
    assert worst["Neumaier"] < 1 and worst["binned, 3 folds"] < 2
    assert worst["sequential"] > worst["pairwise, to the leaves"]
    half = far[(far["adds in"] == "float16") & (far.algorithm == "sequential")].iloc[0]
    wide = far[(far.data == "float16") & (far["adds in"] == "float32")].iloc[0]
    assert half["error normal"] > 10 * wide["error normal"] and math.isnan(half["error pareto"])
    sentences = [
        "In float32 the sum has the same bits in all orders, for all three populations, with: "
        + ", ".join(sorted(free)) + ".",
        f"Worst errors in float32: sequential {worst['sequential']:.3g} ULP, NumPy's pairwise "
        f"{worst[chr(34)[:0] + 'pairwise, NumPy' + chr(39) + 's']:.3g}, to the leaves "
        f"{worst['pairwise, to the leaves']:.3g}, Neumaier {worst['Neumaier']:.3g}, exact "
        f"{worst['exact']:.3g}.",
        f"float16 added in float16 is off by up to {half['error normal']:.3g} ULP where float32 "
        f"accumulation is off by {wide['error normal']:.3g}, and it overflows for the Pareto values.",
    ]
    atomic = counts[counts.algorithm.str.contains("atomics")]
    if len(atomic):
        fixed = counts[counts.algorithm.isin(["torch.sum, CUDA", "Triton, two passes"])]
        assert (fixed.repeats == 1).all()
        found = ", ".join(f"{row.algorithm} {row.repeats}" for row in atomic.itertuples())
        sentences.append(
            f"One order, added {ORDERS} times with atomics, gave this many different sums: {found}. "
            "torch.sum and the two-pass kernel gave one."
        )
    else:
        sentences.append("This machine has no GPU: the rows of torch on CUDA, atomics and Triton are "
                         "in the records of machines that have one.")  # fmt: skip
    return sentences


study.conclude(who_sees_the_order, "algorithms", "distances")

# %%

study.recorded("algorithms")

# %%
# Bounds
# ------
#
# If every value passes through at most d additions, the error of the sum is at most
# d·u·Σ\|x\| to first order: d = n − 1 for sequential addition, ⌈log₂ n⌉ for the full tree
# (Higham 1993 [#higham]_), and in between for NumPy's blocks. Rounding errors of both signs cancel,
# so that √d·u·Σ\|x\| is the size to expect (Higham and Mary 2019 [#mary]_, who prove it with a
# probability that grows with a factor in front; drawn here without). Divided by u·Σ\|x\| all vectors
# fit in one picture.

ADDERS = ("sequential", "pairwise, NumPy's", "pairwise, to the leaves")
UNIT = dtype_info("float32").unit_roundoff
measured = []
for label in ADDERS:
    algorithm = ALGORITHMS[label]
    for name in POPULATIONS:
        for size in SIZES:
            x = quantize(values[name][:size], "float32")
            unit = UNIT * float(exact_sum(np.abs(x)))
            sums = algorithm.add(arrange(x, drawn[size]))
            errors = np.abs(signed_errors(sums, exact_sum(x)))
            measured.append(
                {
                    "algorithm": label,
                    "population": name,
                    "size": size,
                    "error": errors.max() / unit,
                    "spread": (float(sums.max()) - float(sums.min())) / unit,
                    "within": int(np.sum(errors <= math.sqrt(algorithm.depth(size)) * unit)),
                    "expected": math.sqrt(algorithm.depth(size)),
                    "bound": error_bound(algorithm.depth(size), 1.0, "float32") / UNIT,
                }
            )
measured = pd.DataFrame(measured)

fig, axes = subplots(1, 3, height=3.8, sharey=True)
for axis, label in zip(axes, ADDERS, strict=True):
    for colour, marker, name in zip(PALETTE, MARKERS, POPULATIONS, strict=False):
        part = measured[(measured.algorithm == label) & (measured.population == name)]
        axis.plot(part["size"], part.error.where(part.error > 0), marker, color=colour, label=name)
        axis.plot(part["size"], part.spread.where(part.spread > 0), marker, color=colour,
                  markerfacecolor="none")  # fmt: skip
    axis.plot(part["size"], part.bound, color="#7b838d", linewidth=1.4)
    axis.plot(part["size"], part.expected, color="#7b838d", linewidth=1.4, linestyle="--")
    axis.annotate("bound d", (8192, part.bound.iloc[-1]), (0, 5), textcoords="offset points", ha="right")
    axis.annotate("√d", (8192, part.expected.iloc[-1]), (0, 5), textcoords="offset points", ha="right")
    axis.set(xscale="log", yscale="log", xlabel="values n", title=label.replace("pairwise, ", "Pairwise,\n"))
    axis.set_xscale("log", base=2)
axes[0].set_title("Sequential\n")
axes[0].set_ylabel("in units of u·Σ|x|")
axes[0].legend(loc="upper left", title="error; hollow: spread")
study.figure(
    "bounds",
    fig,
    alt="Largest error and spread of 128 orders in units of u times the sum of absolute values, "
    "against the number of values, for sequential, NumPy's and full pairwise addition, with the "
    "deterministic bound d and its square root. All errors lie below the bound; sequential errors "
    "grow towards the square root of n, pairwise errors stay near or below 1.",
)

# %%

study.table(
    "bounds",
    measured[measured["size"] == 8192].drop(columns="size"),
    caption=f"Largest error and spread of {ORDERS} orders of 8192 float32 values in units of u·Σ|x|, "
    "orders whose error is within √d, and the bound.",
    formats={"error": ".3g", "spread": ".3g", "expected": ".3g", "bound": ",.0f"},
    labels={"within": "orders within √d", "expected": "√d", "bound": "bound"},
)

# %%

assert (measured.error <= measured.bound * (1 + 1e-9)).all()
assert (measured.spread <= 2 * measured.bound).all()


def bounds_hold(run):
    table = run.tables["bounds"]
    assert (table.error <= table.bound).all()
    assert (table.spread <= 2 * table.error * (1 + 1e-9)).all()
    share = (table.error / table.bound).groupby(table.algorithm, sort=False).max()
    beyond = table[table.within < ORDERS]
    text = "; ".join(f"{name}: {value:.2g}" for name, value in share.items())
    sentences = [
        "No error exceeds its bound and no spread twice the error. The largest share of the bound "
        f"that 8192 values used, by algorithm: {text}.",
        f"In {len(table) - len(beyond)} of {len(table)} rows every order is within √d.",
    ]
    if len(beyond):
        row = beyond.loc[beyond.within.idxmin()]
        sentences.append(
            f"It is an estimate and not a bound: with {row.algorithm} addition of the {row.population} "
            f"population {ORDERS - row.within} of {ORDERS} orders are beyond it. Its roundings are not "
            "independent: the same small value is added again and again."
        )
    return sentences


study.conclude(bounds_hold, "bounds")

# %%
# One large sum, more workers
# ---------------------------
#
# Nobody permutes the values in practice; one adds a machine. A sum split over workers is added in
# another grouping, and the number of workers is part of the answer. Does ``torch.sum`` depend on its
# number of threads? We look, and put beside it a split of our own: contiguous shares, each added by
# NumPy, then the partial sums.

length = {"fast": 2**16, "full": 2**22, "large": 2**26}[args.config]
WORKERS = (1, 2, 4, 8, 16, 32, 64)


def torch_with(workers, x):
    """``torch.sum`` with this many threads; the setting is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(workers)
    try:
        return torch.from_numpy(x).sum().item()
    finally:
        torch.set_num_threads(before)


splits = []
for name in ("normal", "pareto"):
    x = quantize(population(name, length, SEED), "float32")
    truth = exact_sum(x)
    unit = math.ulp(float(truth)) * 2.0**29  # float32 has 29 bits less than float64
    ways = {
        "torch": [torch_with(w, x) for w in WORKERS],
        "chunks": [float(chunked(x, w)) for w in WORKERS],
    }
    for i, workers in enumerate(WORKERS):
        row = {"population": name, "workers": workers}
        for way, sums in ways.items():
            row[f"{way} change"] = (sums[i] - sums[0]) / unit
            row[f"{way} error"] = float(Fraction(sums[i]) - truth) / unit
        splits.append(row)
study.table(
    "splits",
    pd.DataFrame(splits),
    caption=f"One float32 sum of {length:,} values split over workers: change from one worker, and "
    "error against the exact sum.",
    formats={f"{w} {what}": "+.3g" for w in ("torch", "chunks") for what in ("change", "error")},
    units={f"{w} {what}": "ULP" for w in ("torch", "chunks") for what in ("change", "error")},
    labels={
        "torch change": "torch.sum, threads: change",
        "torch error": "error",
        "chunks change": "our chunks: change",
        "chunks error": "error",
    },
)

# %%


def threads_matter(run):
    table = run.tables["splits"]
    parts = {name: t.reset_index(drop=True) for name, t in table.groupby("population", sort=False)}
    counts = {
        way: [int(t[f"{way} error"].nunique()) for t in parts.values()] for way in ("torch", "chunks")
    }
    if max(counts["torch"]) > 1:
        text = (
            "Yes: torch's sum depends on the number of threads. Over "
            f"{len(WORKERS)} settings it gives "
            + " and ".join(f"{n} results ({p})" for p, n in zip(parts, counts["torch"], strict=True))
        )
    else:
        text = "At this size torch's sum does not depend on its threads; our chunks show the effect"
    sentences = [
        text
        + "; chunks give "
        + " and ".join(f"{n} ({p})" for p, n in zip(parts, counts["chunks"], strict=True))
        + "."
    ]
    assert max(counts["chunks"]) > 1
    normal = parts["normal"]
    moved = normal[["torch change", "chunks change"]].abs().max().max()
    sentences.append(
        f"The largest change is {moved:.3g} ULP (normal). More workers are not less exact: each adds "
        "fewer values, so a split is itself a step towards pairwise addition."
    )
    return sentences


study.conclude(threads_matter, "splits")
