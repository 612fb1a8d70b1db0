r"""
.. _reduction-order:

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

import numpy as np
import pandas as pd
import torch

from roundoff.page import MARKERS, PALETTE, subplots
from roundoff.page.legacy import Study
from roundoff.reductions import (
    ALGORITHMS,
    DTYPES,
    POPULATIONS,
    SIZES,
    arrange,
    chunked,
    draw_orders,
    mean,
    normalize,
    overflows,
    population,
    quantize,
    spread_study,
)
from roundoff.reductions.stack import build_stack, layer_norm_census, stack_study
from roundoff.reductions.studies import (
    algorithm_study,
    bound_study,
    condition_study,
    split_study,
    truth_study,
)
from roundoff.script import get_parsed_args, unit_test_going
from roundoff.timing import measure

args = get_parsed_args(
    "plot_reduction_order",
    __doc__,
    expose="config",
    config=("fast" if unit_test_going() else "full", "sizes of the last parts: fast, full, large"),
)
study = Study("plot_reduction_order", args)

one, big = np.float32(1), np.float32(2**24)
left, right = (big + one) + one, big + (one + one)
assert left == big < right
study.say(
    f"In float32 (2²⁴ + 1) + 1 is `{left:.0f}`, and 2²⁴ + (1 + 1) is `{right:.0f}`. Both follow "
    "the standard to the letter."
)

# %%
# The numbers and their orders
# ----------------------------
#
# Three populations of 8192 values. Shorter vectors are their prefixes; all lengths are powers of
# two, so that dividing a sum by the length rounds nothing.
#
# * **normal**: standard normal, of both signs, so that the sum cancels;
# * **spikes**: −0.0001 everywhere, and 100 at every 128th place;
# * **pareto**: Pareto of shape 1, moved to start at 0: positive, with a tail so heavy that its mean
#   does not exist.
#
# The vectors are rounded to the element type first. **float16 and bfloat16 values are added in
# float32, and only the result is rounded back**, unless a row says otherwise: so do NumPy, PyTorch
# and most kernels. float64 and float32 are added in their own type.
#
# The 128 orders are the given one, ascending, descending, and 125 random permutations. They are
# drawn once for each length and shared by all types, populations and statistics.

SEED, ORDERS = 0, 128
values = {name: population(name, max(SIZES), SEED) for name in POPULATIONS}
drawn = {size: draw_orders(size, ORDERS, SEED) for size in SIZES}

# %%
# All orders of a vector go through NumPy as the rows of one array. That is legitimate only because
# each row is added exactly as it would be alone, and this depends on the layout in memory. The same
# array laid out column by column holds the same values, and gives other sums:

rows = arrange(values["normal"], drawn[8192])
alone = np.array([np.add.reduce(row) for row in rows])
batch = np.add.reduce(rows, axis=-1)
across = np.add.reduce(np.asfortranarray(rows), axis=-1)
same = int(np.sum(across == alone))

assert batch.tobytes() == alone.tobytes(), "the batch must have the bits of separate calls"
assert same < ORDERS / 2
study.say(
    f"Rows contiguous: {np.sum(batch == alone)} of {ORDERS} sums have the bits of a separate call. "
    f"Columns contiguous: {same}, because NumPy then adds whole columns to one another, and so "
    "each vector from left to right."
)

# %%
# Two statistics
# --------------
#
# The **mean** is one reduction. The **normalisation** (x − mean) / (sd + 10⁻⁶), with the
# population's standard deviation, takes two, and is the heart of a layer norm [#ba]_:

x = quantize(values["normal"], "float16")
print(mean(x, "float16"), normalize(x, "float16")[:3])

# %%
# For the mean we report the highest result minus the lowest; for the normalisation, the largest
# absolute difference between the sorted results of any two orders. In exact arithmetic both are 0.
# One call evaluates both for every population, type, length and order:

spreads = spread_study(values, drawn)


def by_size(name, statistic, what):
    """Show one statistic of one population: a row for each length, a column for each type."""
    chosen = spreads[spreads.population == name]
    frame = chosen.pivot(index="size", columns="dtype", values=statistic)[list(DTYPES)]
    return study.table(
        f"{statistic}-{name}",
        frame.reset_index(),
        caption=f"{what}, population **{name}**, over {ORDERS} orders.",
        formats=dict.fromkeys(DTYPES, ".2g"),
        missing="overflow",
    )


# %%
# Normal
# ^^^^^^
#
# Two values have one sum, whatever their order; long vectors show the last bits of float64 and
# float32. In 16 bits the mean does not move: float32 adds such short significands nearly exactly,
# and the final rounding hides the rest.

normal = spreads[spreads.population == "normal"].set_index("dtype")
assert (normal[normal["size"] == 2]["mean"] == 0).all()
assert (normal[normal["size"] >= 512].loc[["float64", "float32"], "mean"] > 0).all()
assert (normal.loc[["float16", "bfloat16"], "mean"] == 0).all()
by_size("normal", "mean", "Mean: highest minus lowest")

# %%
# Two sums now, and thousands of results to look at. Nearly all lie between −4 and 4, where a last
# place of float16 is at most 0.002. Where float16 shows anything it is such a last place: a value
# that one order rounded up and another down.

assert (normal.loc["float16", "normalized"] <= 2**-9).all()
by_size("normal", "normalized", "Normalisation: largest difference between sorted results")

# %%
# Spikes
# ^^^^^^
#
# Up to 128 values there is a single spike, and float32 shows nothing. Beyond, small values meet one
# spike or many, and are rounded accordingly.

spikes = spreads[(spreads.population == "spikes") & (spreads.dtype == "float32")]
assert ((spikes["mean"] > 0) == (spikes["size"] > 128)).all()
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
    spreads.rename(columns={"normalized": "normalisation"})
    .melt(["population", "dtype"], ["mean", "normalisation"], "statistic", "spread")
    .groupby(["population", "statistic", "dtype"], sort=False)["spread"]
    .max()
    .unstack()[list(DTYPES)]
    .reset_index()
)
study.table(
    "summary",
    summary,
    caption="Largest spread over all nine lengths.",
    formats=dict.fromkeys(DTYPES, ".2g"),
)

# %%

fig, axes = subplots(
    1, 2, height=3.4, sharey=True, title=f"Largest spread over {ORDERS} orders, up to 8192 values"
)
for axis, statistic in zip(axes, ("mean", "normalisation"), strict=True):
    part = summary[summary.statistic == statistic].set_index("population")
    for i, dtype in enumerate(DTYPES):
        places = np.arange(len(part)) + 0.2 * (i - 1.5)
        axis.bar(places, part[dtype], 0.18, color=PALETTE[i], label=dtype)
        for place in places[part[dtype] == 0]:
            axis.text(place, 1.3e-17, "0", color=PALETTE[i], ha="center", fontsize=9)
    axis.set_xticks(range(len(part)), part.index)
    axis.set(yscale="log", ylim=(1e-17, 1), title=statistic.capitalize())
    axis.grid(axis="x", visible=False)
axes[0].set_ylabel("largest spread, absolute")
axes[0].legend(loc="upper left", ncols=2)
study.figure(
    "spread",
    fig,
    alt="Bars on a logarithmic scale: largest spread of mean and normalisation by population and "
    "element type. float64 stays between 1e-16 and 2e-14, float32 between 5e-8 and 2e-5. The "
    "16-bit types show 0 or one unit in the last place.",
)

# %%
# The study that this page grew from [#study]_ published, for the normal population, about 1e-3 in
# float16, 2.4e-7 in float32 and 6.7e-16 in float64, and for Pareto 1.1e-5 in float32. Its vectors
# had 4096 values, so that its row for 8192 was a second row for 4096.

PUBLISHED = {
    ("normal", "float16"): 1e-3,
    ("normal", "float32"): 2.4e-7,
    ("normal", "float64"): 6.7e-16,
    ("pareto", "float32"): 1.1e-5,
}


def against_published(run):
    table = run.tables["summary"]
    ours = table[table.statistic == "normalisation"].set_index("population")
    ratios = {(p, d): ours[d][p] / value for (p, d), value in PUBLISHED.items()}
    assert all(1 / 4 < ratio < 4 for ratio in ratios.values()), ratios
    listed = ", ".join(f"{ratio:.2g} ({p}, {d})" for (p, d), ratio in ratios.items())
    largest = table.groupby("population")[["float64", "float32"]].max()
    gap = largest.float32 / largest.float64
    assert (largest.float64 > 0).all()
    assert gap.between(2**26, 2**32).all()
    return [
        f"Our largest spread of the normalisation over the published one: {listed}. A few last "
        "places more or less are a matter of which orders were drawn.",
        f"From float32 to float64 the largest spreads shrink {gap.min():.1e} to {gap.max():.1e} "
        f"times; the unit shrinks 2²⁹ = {2**29:.1e} times. More digits make the problem smaller "
        "and do not remove it.",
    ]


study.conclude(against_published, "summary")

# %%
# Overflow is a result
# ^^^^^^^^^^^^^^^^^^^^
#
# The largest float16 is 65,504, and one Pareto value in 65,521 rounds to infinity. The vector above
# has none. Other seeds do, and then there is no spread to report: the mean is infinite in every
# order, which is perfectly reproducible.

seeds = range(100 if unit_test_going() else 1000)
lost = np.array([overflows(population("pareto", seed=seed), "float16") for seed in seeds])
unlucky = int(np.argmax(lost > 0))
other = spread_study(
    {"pareto": population("pareto", seed=unlucky)}, {n: drawn[n] for n in (512, 2048, 8192)}
)
frame = other.pivot(index="size", columns="dtype", values="normalized")[list(DTYPES)]
frame["infinite"] = other.groupby("size").overflow.max()
study.table(
    "overflow",
    frame.reset_index(),
    caption=f"Spread of the normalisation for the Pareto vector of seed {unlucky}.",
    formats=dict.fromkeys(DTYPES, ".2g"),
    labels={"infinite": "values that became infinite in float16"},
    missing="overflow",
)

# %%

expected = 1 - (1 - 1 / 65521) ** 8192
assert other[other.dtype != "float16"].normalized.notna().all()
assert abs(np.mean(lost > 0) - expected) < 4 * math.sqrt(expected / len(lost))
study.say(
    f"{np.count_nonzero(lost)} of {len(lost)} seeds have a value that overflows float16; "
    f"{expected:.0%} are expected to. bfloat16 has the exponents of float32 and loses none."
)

# %%
# Truth, and the condition of a sum
# ---------------------------------
#
# Spread compares results with each other. For errors we need the exact sum, and can have it:
# floating-point numbers are rationals, and :class:`fractions.Fraction` or :func:`math.fsum` add
# them without intermediate rounding. The truth is that of the vector after it was rounded to its
# type: rounding the data is not the reduction's fault.
#
# How hard a sum is, its **condition number** tells:
#
# .. math:: \kappa = \frac{\sum |x_i|}{\left|\sum x_i\right|}
#
# It is 1 if all values have one sign and grows as they cancel. Let u be the unit roundoff of the
# type that adds: 2⁻⁵³ for float64, 2⁻²⁴ for float32. Rounding every value to that type can change
# the sum by κ·u, relatively; a sum within a small multiple of κ·u has lost no more than the
# rounding of its data may have lost before. A **ULP** is the spacing of the numbers of the
# result's type at the exact result; a correctly rounded result is within 0.5 (:ref:`ulp`).

study.table(
    "truth",
    truth_study(values, drawn),
    caption=f"Mean of 8192 values with NumPy's sum in {ORDERS} orders: how many different results, "
    "how far apart they are, and how far from the exact mean at most and in the median.",
    formats={"condition": ".4g"},
    units=dict.fromkeys(("spread", "error", "median"), "ULP"),
    labels={"condition": "κ", "worst_order": "worst order"},
    missing="overflow",
)

# %%


def spread_is_not_error(run):
    table = run.tables["truth"]
    assert (table.spread <= 2 * table.error * (1 + 1e-9)).all()
    same = table[table.distinct == 1]
    rounded = same[same.error > 0.05]
    assert len(rounded) > 0
    worst = table.loc[table.error.idxmax()]
    halves = table[table.dtype.isin(["float16", "bfloat16"])]
    assert (halves.error < 0.51).all()
    return [
        f"In {len(same)} of {len(table)} rows all {ORDERS} orders give the same bits; in "
        f"{len(rounded)} of those the result is more than a twentieth of a unit off. Repeating is "
        "no proof of being exact.",
        f"The worst error is {worst.error:.3g} ULP ({worst.population}, {worst['dtype']}, "
        f"{worst.worst_order} order), where κ is {worst.condition:.0f}. The median order is off by "
        f"{worst['median']:.3g}.",
        f"Added in float32, 16-bit means are within {halves.error.max():.4f} ULP of the truth: all "
        "of it is the last rounding.",
        "No spread exceeds twice the worst error: two results cannot be further from each other "
        "than both are from the truth.",
    ]


study.conclude(spread_is_not_error, "truth")

# %%
# Does κ·u set the scale? Here is every vector of the study, added *in its own type*, 16-bit types
# included, by a full binary tree: pairs, pairs of pairs, and so on.

points = condition_study(values, drawn)

fig, axis = subplots(height=4.4, title="The condition number sets the scale of the error")
for marker, name in zip(MARKERS, POPULATIONS, strict=False):
    for colour, dtype in zip(PALETTE, DTYPES, strict=False):
        part = points[(points.population == name) & (points.dtype == dtype) & (points.error > 0)]
        axis.plot(part.scale, part.error, marker, color=colour, alpha=0.85)
line = np.array([1e-17, 20])
axis.plot(line, line, color="#7b838d", linewidth=1.2)
axis.plot(line, 13 * line, color="#7b838d", linewidth=1.2, linestyle="--")
axis.text(2e-11, 5e-12, "κ·u")
axis.text(1e-9, 5e-8, "13 κ·u, the bound for 8192 values", ha="right")
axis.set(xscale="log", yscale="log", xlim=(5e-17, 20), ylim=(5e-18, 20))
axis.set_xlabel("condition number × unit roundoff, κ·u")
axis.set_ylabel("worst relative error of 128 orders")
for colour, dtype in zip(PALETTE, DTYPES, strict=False):
    axis.plot([], [], "o", color=colour, label=dtype)
for marker, name in zip(MARKERS, POPULATIONS, strict=False):
    axis.plot([], [], marker, color="#7b838d", label=name)
axis.legend(ncols=2, loc="lower right")
study.figure(
    "condition",
    fig,
    alt="Relative error against condition number times unit roundoff, both logarithmic over "
    "sixteen decades. The points of all types and populations lie along the diagonal or below it, "
    "and none lies above thirteen times it.",
)

# %%

summed = points[points.error.notna()]
depth = np.log2(summed["size"])
unit = summed.dtype.map(
    {"float64": 2**-53, "float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
)
assert (summed.error <= depth * summed.scale / (1 - depth * unit)).all()
seen = summed[summed.error > 0]
ratio = seen.error / seen.scale
study.say(
    [
        f"The worst error of {len(seen)} sums is {ratio.min():.2g} to {ratio.max():.2g} times κ·u, "
        f"{ratio.median():.2g} in the median, from float64 to bfloat16.",
        f"{len(summed) - len(seen)} more sums are exact in every order. "
        f"{len(points) - len(summed)} overflowed: its values fit in float16, and so would their "
        "mean, but not their sum.",
    ]
)

# %%
# A dozen ways to add
# -------------------
#
# The order of the values is one freedom, the grouping of the additions another:
#
# * **sequential**: one accumulator, left to right;
# * **pairwise, NumPy's**: what :func:`numpy.sum` does with a contiguous vector, eight accumulators
#   for up to 128 values, and a tree of such blocks;
# * **pairwise, to the leaves**: a full binary tree;
# * **Neumaier** [#neumaier]_: sequential, with the error of every addition kept and added at the
#   end;
# * **binned** [#demmel]_: reproducible by construction. All values are cut at the same bit
#   positions, which the largest value determines, so that each of three pieces adds up exactly in
#   any order;
# * **exact**: rationals, rounded once;
# * **torch.sum** on the CPU and, where there is one, on the GPU;
# * **atomics**: GPU programs add to one number in memory in whatever order they finish. PyTorch's
#   ``index_add_`` does so, and a Triton kernel of ours; beside it stands our kernel in two passes,
#   which does not. :ref:`triton-layer-norm` has the same choice to make, with a lock.
#
# Two rows add in a wider type than that of the values: float32 in float64 and float16 in float32,
# as NumPy does. Four add 16-bit values *in 16 bits*.


def one_by_one(add, device="cpu"):
    """A sum for a batch from a sum for one vector: every row in a call of its own."""

    def run(rows):
        return np.array([add(v).item() for v in torch.from_numpy(rows).to(device)], rows.dtype)

    return run


def index_add(v):
    """Every value is added to element 0: on CUDA with an atomic addition each."""
    place = torch.zeros(len(v), dtype=torch.long, device=v.device)
    return torch.zeros(1, device=v.device).index_add_(0, place, v)


NUMPY, TREE = "pairwise, NumPy's", "pairwise, to the leaves"
ways = {(name, "float32", "float32"): known.add for name, known in ALGORITHMS.items()}
ways["torch.sum, CPU", "float32", "float32"] = one_by_one(torch.sum)
ways[NUMPY, "float32", "float64"] = lambda rows: np.add.reduce(rows, -1, np.float64).astype("f4")
ways[NUMPY, "float16", "float32"] = ALGORITHMS[NUMPY].add
for dtype in ("float16", "bfloat16"):
    for name in ("sequential", TREE):
        ways[name, dtype, dtype] = ALGORITHMS[name].add

on_gpu = {}
if torch.cuda.is_available():
    from roundoff.kernels.reduce import sum_atomic, sum_two_pass

    on_gpu = {
        "torch.sum, CUDA": torch.sum,
        "index_add_, CUDA atomics": index_add,
        "Triton, atomics": sum_atomic,
        "Triton, two passes": sum_two_pass,
    }
gpu_ways = {(name, "float32", "float32"): one_by_one(add, "cuda") for name, add in on_gpu.items()}
found = algorithm_study(ways | gpu_ways, values, drawn[8192])

# %%
# What do they cost? Each adds one long vector, all on one thread and in turns, against NumPy's sum
# in float32; those on a GPU against ``torch.sum`` there. It is the cost of *these*
# implementations: the ones written in NumPy pass through memory several times.

length = 2**12 if args.config == "fast" else 2**18
held = {
    dtype: quantize(population("normal", length, SEED), dtype, storage=True)
    for dtype in ("float32", "float16", "bfloat16")
}
calls = {key: (lambda add=add, x=held[key[1]]: add(x)) for key, add in ways.items()}
tensor = torch.from_numpy(held["float32"])
calls["torch.sum, CPU", "float32", "float32"] = lambda: torch.sum(tensor)

threads = torch.get_num_threads()
torch.set_num_threads(1)
budget = 0.2 if args.config == "fast" else 5
times = measure({" ".join(key): f for key, f in calls.items()}, budget_s=budget, min_rounds=5)
torch.set_num_threads(threads)
base = " ".join((NUMPY, "float32", "float32"))
cost = {key: times.ratio(" ".join(key), base).value for key in calls}
if on_gpu:
    long = torch.randn(2**26, device="cuda", generator=torch.Generator("cuda").manual_seed(SEED))
    times = measure({name: (lambda f=f: f(long)) for name, f in on_gpu.items()}, device="cuda")
    cost |= {key: times.ratio(key[0], "torch.sum, CUDA").value for key in gpu_ways}

# %%

found["values"] = [
    data if data == adds_in else f"{data} in {adds_in}"
    for data, adds_in in zip(found.data, found.adds_in, strict=True)
]
wide = found.pivot(
    index=["algorithm", "values"],
    columns="population",
    values=["distinct", "repeats", "spread", "error"],
).loc[list(found.groupby(["algorithm", "values"], sort=False).groups)]
algorithms = wide["distinct"][list(POPULATIONS)].astype(int)
algorithms["repeats"] = wide["repeats"].max(axis=1).astype(int)
algorithms["order_free"] = (wide["distinct"] == 1).all(axis=1)
algorithms["cost"] = [cost[key] for key in ways | gpu_ways]
study.table(
    "algorithms",
    algorithms.reset_index(),
    caption=f"Different bit patterns among {ORDERS} orders of 8192 values, by population, and "
    f"among {ORDERS} repeats of one order; whether no population shows the order; time for a long "
    "vector, relative to NumPy's float32 sum (on a GPU, to torch's there).",
    formats={"cost": lambda ratio: f"{ratio:,.2f}" if ratio < 10 else f"{ratio:,.0f}"},
    emphasize={"order_free": lambda table: table.order_free},
    labels={"order_free": "order-free"},
)

# %%
# The same runs, as distances from each other and from the truth:


def short(value):
    """Three digits, and no exponent for thousands."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


distances = pd.concat(
    [wide[what][list(POPULATIONS)].add_prefix(f"{what} ") for what in ("spread", "error")], axis=1
)
study.table(
    "distances",
    distances.reset_index(),
    caption=f"Spread over {ORDERS} orders, and largest error against the exact sum, by population.",
    formats=dict.fromkeys(distances, short),
    units=dict.fromkeys(distances, "ULP"),
    missing="overflow",
)

# %%


def who_sees_the_order(run):
    counts, far = run.tables["algorithms"], run.tables["distances"]
    free = counts[counts.order_free.astype(bool) & (counts["values"] == "float32")].algorithm
    assert {"binned, 3 folds", "exact"} <= set(free)
    assert not {"sequential", NUMPY} & set(free)
    far = far.set_index(["values", "algorithm"])
    worst = far.loc["float32"][[f"error {name}" for name in POPULATIONS]].max(axis=1)
    assert worst["exact"] <= 0.5
    assert worst["Neumaier"] < 1
    assert worst["binned, 3 folds"] < 2
    assert worst["sequential"] > 10 * worst[TREE]
    doubled = far.loc["float32 in float64"].filter(like="error").max(axis=None)
    price = counts[counts["values"] == "float32 in float64"].cost.iloc[0]
    assert doubled < 0.51
    narrow = far.loc["float16", "sequential"]
    accumulated = far.loc["float16 in float32", NUMPY]
    assert narrow["error normal"] > 100 * accumulated["error normal"]
    assert math.isnan(narrow["error pareto"])
    assert math.isnan(accumulated["error pareto"])
    sentences = [
        f"Same bits in all orders of all three populations, in float32: {'; '.join(free)}. Only "
        "binned and exact addition promise it. Neumaier's errors are merely too small, here, to "
        "reach the last bit.",
        f"Worst errors in float32, in ULP: sequential {worst['sequential']:,.0f}, NumPy's pairwise "
        f"{worst[NUMPY]:.3g}, to the leaves {worst[TREE]:.3g}, Neumaier {worst['Neumaier']:.3g}, "
        f"binned {worst['binned, 3 folds']:.3g}, exact {worst['exact']:.3g}.",
        f"NumPy's sum of the float32 values with float64 additions is within {doubled:.3g} ULP, "
        f"for {price:.2g} times the time of its float32 sum.",
        f"float16 values added one by one in float16 end up to {narrow['error normal']:,.0f} ULP "
        "from the sum of the normal population; added in float32, "
        f"{accumulated['error normal']:.2g}. The exact sum of the Pareto values exceeds the "
        "largest float16; their mean, divided before it is rounded back, does not.",
    ]
    atomics = counts[counts.algorithm.str.contains("atomics")]
    if len(atomics) == 0:
        return [
            *sentences,
            "Without a GPU there are no rows for torch on CUDA, atomics and Triton.",
        ]
    fixed = counts[counts.algorithm.isin(["torch.sum, CUDA", "Triton, two passes"])]
    assert (fixed.repeats == 1).all()
    listed = "; ".join(f"{row.algorithm}: {row.repeats}" for row in atomics.itertuples())
    return [
        *sentences,
        f"Different sums when one order is added {ORDERS} times with atomics: {listed}. torch.sum "
        "on CUDA and the kernel in two passes give one.",
    ]


study.conclude(who_sees_the_order, "algorithms", "distances")

# %%

study.recorded("algorithms")

# %%
# Bounds
# ------
#
# If no value passes through more than d additions, the error of the sum is at most d·u·Σ\|x\| to
# first order: d = n − 1 for sequential addition, ⌈log₂ n⌉ for the full tree (Higham 1993
# [#higham]_), and in between for NumPy's blocks. Roundings have both signs and partly cancel, so
# that √d·u·Σ\|x\| is the size to expect; Higham and Mary (2019 [#mary]_) prove it for independent
# roundings of mean zero, with a probability that grows with a factor in front, drawn here as 1. In
# units of u·Σ\|x\| all vectors fit into one picture. The table has the bound with all its terms:
# d / (1 − d·u), which is a little more than d.

measured = bound_study(values, drawn, ["sequential", NUMPY, TREE])

fig, axes = subplots(
    1, 3, height=3.9, sharey=True, title=f"Error and spread of {ORDERS} orders in float32, and d"
)
for axis, (label, rows) in zip(axes, measured.groupby("algorithm", sort=False), strict=True):
    for colour, marker, name in zip(PALETTE, MARKERS, POPULATIONS, strict=False):
        part = rows[rows.population == name]
        error, spread = (part[c].where(part[c] > 0) for c in ("error", "spread"))
        axis.plot(part["size"], error, marker, color=colour, label=name)
        axis.plot(part["size"], spread, marker, color=colour, markerfacecolor="none")
    axis.plot(part["size"], part.bound, color="#7b838d", linewidth=1.4)
    axis.plot(part["size"], part.expected, color="#7b838d", linewidth=1.4, linestyle="--")
    for height, text in ((part.bound.iloc[-1], "d"), (part.expected.iloc[-1], "√d")):
        axis.annotate(text, (8192, height), (0, 4), textcoords="offset points", ha="center")
    axis.set(
        yscale="log", xlabel="values n", title=label[0].upper() + label[1:].replace(", ", ",\n")
    )
    axis.set_xscale("log", base=2)
axes[0].set_ylabel("in units of u·Σ|x|")
axes[0].legend(loc="upper left", title="error (hollow: spread)", title_fontsize=9)
study.figure(
    "bounds",
    fig,
    alt="Largest error and spread of 128 orders, in units of u times the sum of absolute values, "
    "against the number of values: sequential, NumPy's pairwise and full pairwise addition, each "
    "with its bound d and the square root of d. All errors lie below the bound. Sequential errors "
    "grow with n, and beyond the root for the spikes; pairwise errors stay between 0.1 and 10.",
)

# %%

study.table(
    "bounds",
    measured[measured["size"] == 8192].drop(columns="size"),
    caption=f"8192 float32 values in {ORDERS} orders: largest error and spread in units of u·Σ|x|, "
    "how many orders are within √d, and the bound.",
    formats={"error": short, "spread": short, "expected": short, "bound": ",.0f"},
    labels={"within": "orders within √d", "expected": "√d"},
)

# %%

assert (measured.error <= measured.bound).all()
assert (measured.spread <= 2 * measured.bound).all()


def bounds_hold(run):
    table = run.tables["bounds"]
    assert (table.error <= table.bound).all()
    assert (table.spread <= 2 * table.error * (1 + 1e-9)).all()
    share = (table.error / table.bound).groupby(table.algorithm, sort=False).max()
    listed = ", ".join(f"{value:.0%} ({name})" for name, value in share.items())
    beyond = table[table.within < ORDERS]
    sentences = [
        "No error exceeds its bound, and no spread twice the bound. The most that 8192 values use "
        f"of it: {listed}.",
        f"In {len(table) - len(beyond)} of {len(table)} rows every order is within √d.",
    ]
    if len(beyond):
        row = beyond.loc[beyond.within.idxmin()]
        assert (row.algorithm, row.population) == ("sequential", "spikes")
        sentences.append(
            f"But √d is no bound: of the spikes, added one by one, {ORDERS - row.within} of "
            f"{ORDERS} orders exceed it. Their roundings are not independent: the same small value "
            "is added, and rounded the same way, again and again."
        )
    return sentences


study.conclude(bounds_hold, "bounds")

# %%
# One large sum, more workers
# ---------------------------
#
# Nobody permutes values in practice; one adds a machine. A sum that is split over workers is
# grouped in another way, and the number of workers becomes part of the answer. Does
# :func:`torch.sum` depend on its number of threads? We look; and beside it stands a split of our
# own, contiguous shares that NumPy adds, and then the partial sums.

length = {"fast": 2**16, "full": 2**22, "large": 2**26}[args.config]
WORKERS = (1, 2, 4, 8, 16, 32, 64)


def torch_with(x, workers):
    """``torch.sum`` with this many threads; the setting is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(workers)
    try:
        return torch.from_numpy(x).sum().item()
    finally:
        torch.set_num_threads(before)


large = {name: population(name, length, SEED) for name in ("normal", "pareto")}
splits = split_study(large, {"torch": torch_with, "chunks": chunked}, WORKERS)
moves = [c for c in splits if c.endswith(("change", "error"))]
study.table(
    "splits",
    splits,
    caption=f"One float32 sum of {length:,} values by a growing number of workers: change from one "
    "worker, and error against the exact sum.",
    formats=dict.fromkeys(moves, lambda v: f"{v:+.3g}".replace("-", "−") if v else "0"),
    units=dict.fromkeys(moves, "ULP"),
)

# %%


def workers_matter(run):
    table = run.tables["splits"]
    counts = {
        way: table.groupby("population", sort=False)[f"{way} error"].nunique()
        for way in ("torch", "chunks")
    }
    listed = {
        way: " and ".join(f"{n} ({name})" for name, n in c.items()) for way, c in counts.items()
    }
    assert counts["chunks"].max() > 1
    if counts["torch"].max() > 1:
        first = (
            f"Yes: torch's sum depends on its threads. {len(WORKERS)} settings give "
            f"{listed['torch']} different results; our chunks {listed['chunks']}."
        )
    else:
        first = (
            "No: at this length torch's sum has the same bits with any number of threads. Our "
            f"chunks show what a split does: {listed['chunks']} results from {len(WORKERS)} splits."
        )
    normal = table[table.population == "normal"].set_index("workers")
    moved = normal[["torch change", "chunks change"]].abs().max().max()
    way = "torch" if counts["torch"]["normal"] > 1 else "chunks"
    error = normal[f"{way} error"].abs()
    return [
        first,
        f"The sum of the normal population moves by up to {moved:.3g} ULP. Its error is smallest "
        f"with {error.idxmin()} workers and largest with {error.idxmax()} ({way}): more workers "
        "are neither more exact nor less.",
    ]


study.conclude(workers_matter, "splits")

# %%
# What a network makes of it
# --------------------------
#
# A layer norm over a batch of 16 × 32 × 1024 rows has 524,288 of them and two reductions in each: a
# million sums, once or twice a layer, for tens of layers. An event of one in a hundred thousand
# happens every time. Here are rows of normal values, their two sums added in the given order and in
# one other (:ref:`layer-norm-discrepancies` compares those of two libraries):

ROWS, WIDTH = {"fast": (4096, 256), "full": (65_536, 1024), "large": (524_288, 1024)}[args.config]
TYPES = DTYPES[1:]
order = draw_orders(WIDTH, 4, SEED)[0]
census = pd.DataFrame(
    {"dtype": dtype} | layer_norm_census(ROWS, WIDTH, dtype, order, seed=SEED) for dtype in TYPES
)
study.table(
    "census",
    census,
    caption=f"One layer norm over rows of {WIDTH} values, its sums in two orders: share of the "
    "rows whose mean, deviation or result has other bits, and share of all results.",
    formats=dict.fromkeys(("mean", "sd", "row"), ".2%") | {"value": ".2g"},
    labels={"mean": "mean differs", "sd": "deviation differs", "row": "any result differs",
            "value": "share of results"},
)  # fmt: skip

# %%


def census_in_words(run):
    table = run.tables["census"].set_index("dtype")
    assert table.row["float32"] > table.row["float16"] > table.row["bfloat16"] > 0
    every = 16 * 32 * 1024
    listed = ", ".join(f"{table.row[dtype] * every:,.0f} in {dtype}" for dtype in TYPES)
    return (
        f"Of {every:,} rows that makes {listed}. The shorter the type, the rarer a row that "
        "differs, and the larger what it differs by: a last place of float16 is 8,192 times one of "
        "float32."
    )


study.conclude(census_in_words, "census")

# %%
# The next layer takes the difference as its input. Here is a stack in which every layer normalises,
# multiplies by a matrix, clips at zero, multiplies by a second matrix and adds the result to its
# input. Weights are random, every result is rounded to the type, matrix products are computed in
# float32. Two runs differ in nothing but the order of the sums inside the normalisations. A third
# runs in float64 on the same rounded input and weights, and rounds nothing: the truth.

ROWS, WIDTH, LAYERS = {"fast": (16, 128, 4), "full": (128, 768, 32), "large": (256, 1024, 48)}[
    args.config
]
stack = build_stack(ROWS, WIDTH, LAYERS, SEED)
other = draw_orders(WIDTH, 4, SEED)[0]
followed = {dtype: stack_study(stack, dtype, other) for dtype in TYPES}

fig, axis = subplots(height=4, title="Error, and difference between two orders, by layer")
for colour, (dtype, frame) in zip(PALETTE[1:], followed.items(), strict=False):
    apart = frame.between.where(frame.between > 0)
    axis.plot(frame.layer, frame.error, color=colour, label=f"{dtype}, from the truth")
    axis.plot(frame.layer, apart, "--", color=colour, label=f"{dtype}, between two orders")
axis.set(yscale="log", xlim=(0.5, LAYERS + 0.5), xlabel="layer")
axis.set_ylabel("root mean square, relative to the state")
axis.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.45, 1.0))
study.figure(
    "stack",
    fig,
    alt="Error against float64 (solid) and difference between two orders (dashed) by layer, on a "
    "logarithmic scale, in float32, float16 and bfloat16. All grow with depth. In every type the "
    "dashed line starts below the solid one and closes in on it; in float32 they meet.",
)

# %%

depths = {1, LAYERS // 4, LAYERS}
chosen = pd.concat(
    frame[frame.layer.isin(depths)].assign(dtype=dtype) for dtype, frame in followed.items()
)
study.table(
    "stack",
    chosen[["dtype", "layer", "differing", "between", "error", "largest_between"]],
    caption=f"{ROWS} rows of {WIDTH} values through {LAYERS} layers. Differences and errors are "
    "relative to the root mean square of the true state.",
    formats={"differing": ".2%"} | dict.fromkeys(("between", "error", "largest_between"), ".2g"),
    labels={"differing": "values that differ", "between": "between orders, rms",
            "error": "from the truth, rms", "largest_between": "between orders, largest"},
)  # fmt: skip

# %%


def stack_in_words(run):
    table = run.tables["stack"]
    first, last = (table.groupby("dtype", sort=False).nth(i).set_index("dtype") for i in (0, -1))
    assert (last["between"] >= first["between"]).all()
    assert (last["error"] > first["error"]).all()
    share = last["between"] / last["error"]
    assert 0.5 < share["float32"] < 2
    assert (share < 2).all()
    return [
        *(
            f"{dtype}: {first.differing[dtype]:.2%} of the values differ after layer 1, "
            f"{last.differing[dtype]:.1%} after layer {last.layer[dtype]:.0f}; the two orders are "
            f"then {share[dtype]:.0%} as far from each other as from the truth."
            for dtype in last.index
        ),
        "Both runs are correct, and in float32 they end about as far from each other as each is "
        "from the truth. A test that holds two implementations to less tests the order of their "
        "sums.",
    ]


study.conclude(stack_in_words, "stack")

# %%

study.recorded("stack")

# %%
# What to do
# ----------
#
# * **Compare with a truth, not only with each other.** A float64 or exact reference and an error in
#   ULP tell a harmless order from a wrong kernel.
# * **Derive tolerances** from κ·u and the depth of the sum, not from what passed last week:
#   :ref:`layer-norm-discrepancies` does so.
# * **Accumulate in a wider type.** Nothing on this page helps as much and costs as little: float32
#   for 16-bit values, float64 for float32 values that cancel.
# * **If the bits must repeat**, fix the grouping: threads, block sizes, library versions, no
#   atomics. Or use a reproducible sum, whose bits depend on nothing but the values. What either
#   costs on large machines is discussed in [#shanmugavelu]_.
#
# Each set of 128 orders ran as one batch, with the bits of 128 separate calls; ``make bench`` times
# the whole study against the plain loop.
#
# .. [#ba] J. L. Ba, J. R. Kiros, G. E. Hinton, *Layer normalization*, 2016,
#    `arXiv:1607.06450 <https://arxiv.org/abs/1607.06450>`_. Layer norms usually add their small
#    constant to the variance; this study adds it to the deviation.
# .. [#study] X. Dupré, `Reproducible parallelized reduction is difficult
#    <https://sdpython.github.io/doc/onnx-diagnostic/dev/auto_technical/plot_parallelized_reduction.html>`_,
#    documentation of onnx-diagnostic. It compares each order with the first; this page compares
#    all.
# .. [#neumaier] A. Neumaier, *Rundungsfehleranalyse einiger Verfahren zur Summation endlicher
#    Summen*, ZAMM 54, 1974,
#    `doi:10.1002/zamm.19740540106 <https://doi.org/10.1002/zamm.19740540106>`_; after W. Kahan,
#    *Further remarks on reducing truncation errors*, CACM 8, 1965,
#    `doi:10.1145/363707.363723 <https://doi.org/10.1145/363707.363723>`_.
# .. [#demmel] J. Demmel, H. D. Nguyen, *Fast reproducible floating-point summation*, ARITH 2013,
#    `doi:10.1109/ARITH.2013.9 <https://doi.org/10.1109/ARITH.2013.9>`_; P. Ahrens, J. Demmel,
#    H. D. Nguyen, *Algorithms for efficient reproducible floating point summation*, ACM TOMS 46,
#    2020, `doi:10.1145/3389360 <https://doi.org/10.1145/3389360>`_.
# .. [#higham] N. J. Higham, *The accuracy of floating point summation*, SIAM J. Sci. Comput. 14,
#    1993, `doi:10.1137/0914050 <https://doi.org/10.1137/0914050>`_.
# .. [#mary] N. J. Higham, T. Mary, *A new approach to probabilistic rounding error analysis*, SIAM
#    J. Sci. Comput. 41, 2019, `doi:10.1137/18M1226312 <https://doi.org/10.1137/18M1226312>`_.
# .. [#shanmugavelu] S. Shanmugavelu and others, *Impacts of floating-point non-associativity on
#    reproducibility for HPC and deep learning applications*, 2024,
#    `arXiv:2408.05148 <https://arxiv.org/abs/2408.05148>`_.

study.finish()
