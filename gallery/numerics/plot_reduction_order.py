r"""
.. _reduction-order:

Why does the order of a sum change the result?
==============================================

Every addition rounds. One set of numbers, 128 orders, a dozen ways to add, in NumPy and PyTorch.

.. answer:: nvidia-h200

   * **8,192 float32 values, 128 orders:** :bound:`27 <orders>` results from ``np.sum``, up to
     :bound:`116 <orders/2>` ULP apart; :bound:`109 <loop>` from a loop. ``torch.sum`` on a GPU
     gives :bound:`25 <gpu>`.
   * **Added in float64 there is one here**, correctly rounded, in :bound:`about 2.3 <cost>` times
     ``np.sum``'s time; on a GPU in :bound:`about 5.9 <gpu-cost>` times ``torch.sum``'s, as PyTorch
     copies first. A binned sum guarantees one, and rounds it correctly.
   * **The same in every order may still be wrong:** bfloat16 values added in bfloat16, one after
     another, give :bound:`6208 <wrong>`; their sum is :bound:`6399 <wrong/2>`.

   .. code-block:: python

      x.sum(dtype=np.float64)  # NumPy: float32 values, added in float64
      x.sum(dtype=torch.float64)  # PyTorch: a float64 copy is made, and added
      roundoff.reductions.binned(x)  # NumPy: one result in every order, by construction
      torch.use_deterministic_algorithms(True)  # one result in every run of one order
"""

# %%
# A few values are enough for the order to show
# ---------------------------------------------
#
# Addition rounds, so that it does not associate: in float32 (2²⁴ + 1) + 1 is 16,777,216 and
# 2²⁴ + (1 + 1) is 16,777,218. How much do 128 orders of the same numbers differ?
#
# Three distributions: **normal**, of both signs, so that the sum cancels; **spikes**, 100 at every
# 128th place and −0.0001 elsewhere; **pareto**, positive with a heavy tail. Shorter vectors are
# prefixes. The 128 orders are the given one, ascending, descending, and 125 random ones. 16-bit
# values are added in float32 and the result is rounded back.
#
# The mean is one reduction, the normalisation (x − mean) / (sd + 10⁻⁶) of a layer norm takes two.

import math
from functools import partial
from itertools import product

import numpy as np
import pandas as pd
import torch

from roundoff.compare import scaled_error
from roundoff.dtypes import dtype_info
from roundoff.page import Study
from roundoff.reductions import (
    DISTRIBUTIONS,
    DTYPES,
    arrange,
    binned,
    condition,
    distinct_bits,
    draw_orders,
    draw_values,
    exact_sum,
    judge,
    mean,
    moments,
    neumaier,
    numpy_depth,
    pairwise,
    pairwise_numpy,
    round_to,
    sequential,
    signed_errors,
)
from roundoff.script import get_parsed_args, unit_test_going
from roundoff.timing import measure

fast = unit_test_going()
args = get_parsed_args(
    "plot_reduction_order",
    __doc__,
    length=(2**14 if fast else 2**22, "values of a sum that is split", 1024),
    width=(128 if fast else 256, "values in a row of the network", 1),
    layers=(4 if fast else 32, "layers of the network", 1),
)
study = Study("plot_reduction_order", args)

SEED, ORDERS = 0, 128
SIZES = [2, 4, 64, 128, 8192] if fast else [2**k for k in range(1, 14)]
values = {name: draw_values(name, 8192, SEED) for name in DISTRIBUTIONS}
orders = {size: draw_orders(size, ORDERS, SEED) for size in SIZES}

spreads = []
for size, (name, dtype) in product(SIZES, product(DISTRIBUTIONS, DTYPES)):
    x = round_to(values[name][:size], dtype)
    rows = arrange(x, orders[size])  # NumPy adds each contiguous row as it would add it alone
    means = mean(rows, dtype)
    mu, sd = np.unique(moments(rows), axis=1)[:, :, None]  # each pair once
    # Normalising keeps the order of the values: these are the sorted results of every row.
    normalized = round_to((np.sort(x) - mu) / (sd + 1e-6), dtype)
    case = {"distribution": name, "dtype": dtype, "size": size, "distinct": distinct_bits(means)}
    for statistic, results in (("mean", means), ("normalisation", normalized)):
        spreads.append(case | {"statistic": statistic, "spread": np.ptp(results, axis=0).max()})
largest = pd.DataFrame(spreads).groupby(["statistic", "distribution", "dtype"], sort=False)
largest = largest["spread"].max()
study.keep("largest", largest.reset_index(), part="cpu")
study.keep("summary", largest.unstack("dtype").reset_index(), part="cpu")
study.keep("spreads", spreads, part="cpu")

# %%

study.dots(
    "spread",
    of="largest",
    x="spread",
    label="distribution",
    colour="dtype",
    panels="statistic",
    bars=True,
    log=True,
    title="Largest spread over 128 orders, up to 8192 values",
    xlabel="highest minus lowest result",
    alt="Bars on a logarithmic axis: largest spread of mean and normalisation, for each "
    "distribution and element type. float64 lies near 1e-15, float32 near 1e-6; the means of "
    "16-bit values have none.",
)

# %%

study.claim(
    "Two values have one mean in any order; four Pareto values have {2} in float32.",
    of="spreads",
    where={"distribution": "pareto", "dtype": "float32", "statistic": "mean", "size": [2, 4]},
    on="nvidia-h200",
    value=lambda t: t["distinct"].max(),
    test=lambda t: t["distinct"][t["size"] == 2] == 1,
)

# %%

study.claim(
    "By ``np.sum`` in float32, the mean of 16-bit values is the same in all orders, at every size: "
    "the last rounding hides what float32 lost.",
    of="spreads",
    where={"dtype": ["float16", "bfloat16"], "statistic": "mean"},
    test=lambda t: t["distinct"] == 1,
)

# %%

study.claim(
    "From float32 to float64 the largest spreads shrink by at least {1.3e8} times; the unit of "
    "the type shrinks 2²⁹ = 5.4e8 times.",
    of="summary",
    on="nvidia-h200",
    value=lambda t: t["float32"] / t["float64"],
)

# %%
# The condition number sets the size of the error
# -----------------------------------------------
#
# Spread compares results with one another; an error needs the exact sum, which rationals give
# (:func:`~roundoff.reductions.exact_sum`). How hard a sum is, its condition number tells,
# κ = Σ\|x\| / \|Σx\|: 1 where all values have one sign, more as they cancel. Rounding each value
# once, with unit roundoff u, may move the sum by κ·u, relatively. A :ref:`ULP <ulp>` is the spacing
# of the type's numbers at the exact result; a correctly rounded result is within 0.5.

truths = []
for name, dtype in product(DISTRIBUTIONS, DTYPES):
    x = round_to(values[name], dtype)
    means = mean(arrange(x, orders[8192]), dtype)
    truth = exact_sum(x) / 8192
    random = judge(means[3:], truth, dtype)
    truths.append(
        {"distribution": name, "dtype": dtype, "condition": condition(x)}
        | judge(means, truth, dtype)
        | {"random distinct": random["distinct"], "random spread": random["spread ulp"]}
    )
# Every vector again, added in its own type by a full binary tree.
conditions = []
for size, (name, dtype) in product(SIZES, product(DISTRIBUTIONS, DTYPES)):
    x = round_to(values[name][:size], dtype, storage=True)
    truth, scale = exact_sum(x), condition(x) * dtype_info(dtype).unit_roundoff
    error = np.abs(signed_errors(pairwise(arrange(x, orders[size])), truth)).max()
    relative = error / abs(float(truth)) if np.isfinite(error) else math.nan
    conditions.append(
        {"distribution": name, "dtype": dtype, "size": size, "scale": scale, "rel": relative}
        | {"over scale": relative / scale}
    )
study.keep("condition", conditions, part="cpu")
study.table(
    "means",
    truths,
    "The mean of 8192 values with NumPy's sum, in 128 orders, against the exact one.",
    columns=[
        "distribution",
        "dtype",
        "condition",
        "distinct",
        "spread ulp",
        "random spread",
        "error ulp",
    ],
    rows={"dtype": "float32"},
    part="cpu",
)

# %%

study.claim(
    "Normal float32 values have {27} means, {116} ULP apart. The farthest are those of the sorted "
    "orders: without these there are {26}, {52} ULP apart.",
    name="orders",
    of="means",
    where={"distribution": "normal", "dtype": "float32"},
    on="nvidia-h200",
    value=lambda t: (
        t[["distinct", "spread ulp", "random distinct", "random spread"]].iloc[0].tolist()
    ),
)

# %%

study.claim(
    "With κ = {439} the worst of them is {94} ULP off; the Pareto values, κ = 1, are off by "
    "{1.3} at most.",
    of="means",
    where={"distribution": ["normal", "pareto"], "dtype": "float32"},
    on="nvidia-h200",
    value=lambda t: (t["condition"].max(), *t["error ulp"]),
)

# %%

study.claim(
    "From float64 to bfloat16 the worst relative error of 128 orders is up to {2.7} times κ·u, and "
    "{0.64} times in the median.",
    of="condition",
    where={"rel": lambda s: s.notna()},
    on="nvidia-h200",
    value=lambda t: (t["over scale"].max(), t["over scale"].median()),
)

# %%
# Added in float64, the order no longer shows here
# ------------------------------------------------
#
# The same 128 orders, with other ways to add. "one after another" is a loop with one accumulator,
# "full tree" adds pairs, then pairs of pairs. Neumaier's sum [#neumaier]_ keeps the rounding error
# of every addition and adds these at the end. The binned sum adds the values of each sign and
# exponent by themselves, which float64 does without rounding, and rounds the exact total once
# [#neal]_. ``math.fsum`` is exact and rounded once, too.

WAYS = {  # name: how a vector gets there, how it is added
    "np.sum": (np.asarray, np.sum),
    "np.sum in float64": (np.asarray, partial(np.sum, dtype=np.float64)),
    "torch.sum, CPU": (torch.from_numpy, torch.sum),
    "torch.sum in float64, CPU": (torch.from_numpy, partial(torch.sum, dtype=torch.float64)),
    "one after another": (np.asarray, sequential),
    "full tree": (np.asarray, pairwise),
    "Neumaier": (np.asarray, neumaier),
    "binned": (np.asarray, binned),
    "math.fsum": (np.asarray, lambda v: math.fsum(v.tolist())),
}
if torch.cuda.is_available():
    from roundoff.kernels.reduce import sum_atomic, sum_two_pass

    to_gpu = partial(torch.tensor, device="cuda")
    WAYS["torch.sum, GPU"] = to_gpu, torch.sum
    WAYS["torch.sum in float64, GPU"] = to_gpu, partial(torch.sum, dtype=torch.float64)


def over_orders(name, rows):
    """What one way to add makes of the orders of one vector, judged by its exact sum."""
    put, add = WAYS[name]
    sums = np.array([float(add(put(row))) for row in rows], rows.dtype)
    return judge(sums, exact_sum(rows[0]), rows.dtype)


# %%
# Each is timed on one long vector, in turns: on the CPU with one thread, 2¹⁸ values, against
# ``np.sum``; on a GPU 2²⁶ values, against ``torch.sum`` there. Neumaier's and the binned sum are
# written in NumPy here, and Neumaier's passes through memory several times. PyTorch makes a float64
# copy and adds that [#torch]_: 20 bytes for each value are read or written, instead of 4.
#
# The recorded price of the binned sum was that of an earlier algorithm, and is not shown. The next
# record measures the present one. :func:`~roundoff.kernels.binned.sum_binned` gives the same bits
# on a GPU. On an H200 this kernel took less time than ``torch.sum`` in float64, of 2²⁴ and of 2²⁸
# normal values (``tests/bench/bench_binned.py``).

long = round_to(draw_values("normal", 2**12 if fast else 2**18, SEED), "float32")
calls = {name: partial(add, put(long)) for name, (put, add) in WAYS.items() if "GPU" not in name}
threads = torch.get_num_threads()
torch.set_num_threads(1)
costs = measure(calls, budget_s=0.1 if fast else 4, min_rounds=5).ratios("np.sum")
torch.set_num_threads(threads)
if torch.cuda.is_available():
    long = torch.randn(2**26, device="cuda", generator=torch.Generator("cuda").manual_seed(SEED))
    calls = {name: partial(add, long) for name, (_, add) in WAYS.items() if "GPU" in name}
    costs = pd.concat([costs, measure(calls, device="cuda").ratios("torch.sum, GPU")])
costs = costs.rename(columns={"ratio": "times base"}).set_index("label").to_dict("index")

ways = []
for name in WAYS:
    found = {
        d: over_orders(name, arrange(round_to(values[d], "float32"), orders[8192]))
        for d in DISTRIBUTIONS
    }
    most = {key: max(f[key] for f in found.values()) for key in found["normal"]}
    free = "here" if most["distinct"] == 1 else "no"
    free = "always" if name in ("binned", "math.fsum") else free
    each = {d: f["distinct"] for d, f in found.items()}
    ways.append({"algorithm": name, "free": free} | most | each | costs[name])
study.table(
    "ways",
    ways,
    "8192 float32 values in 128 orders, the worst of the three distributions; time over that of "
    "`np.sum`, on a GPU of `torch.sum`.",
    columns=["algorithm", "distinct", "free", "spread ulp", "error ulp", "times base"],
    rows={"algorithm": lambda s: s != "binned"},
    part="algorithm",
    times=["times base", "low", "high"],
)

# %%

study.claim(
    "A loop gives up to {109} results, up to {4,340} ULP apart, and up to {4,130} ULP off.",
    name="loop",
    of="ways",
    where={"algorithm": "one after another"},
    on="nvidia-h200",
    value=lambda t: (t["distinct"], t["spread ulp"], t["error ulp"]),
)

# %%

study.claim(
    "Adding in float64 is free of the order here, in NumPy and in PyTorch, and correctly rounded.",
    of="ways",
    where={"algorithm": ["np.sum in float64", "torch.sum in float64, CPU"]},
    test=lambda t: (t["distinct"] == 1) & (t["error ulp"] <= 0.5),
)

# %%

study.claim(
    "It takes about {2.3} times the time of `np.sum`, Neumaier's sum about {38} times.",
    name="cost",
    of="ways",
    where={"algorithm": ["np.sum in float64", "Neumaier"]},
    timed=True,
    on="nvidia-h200",
    value=lambda t: t.set_index("algorithm")["times base"][
        ["np.sum in float64", "Neumaier"]
    ].tolist(),
)

# %%

study.claim(
    "On a GPU `torch.sum` gives {25} results, and added in float64 {1}.",
    name="gpu",
    of="ways",
    where={"algorithm": ["torch.sum, GPU", "torch.sum in float64, GPU"]},
    on="nvidia-h200",
    value=lambda t: t["distinct"].tolist(),
)

# %%

study.claim(
    "In PyTorch float64 takes about {5.9} times `torch.sum`'s time on a GPU, and at least {10} "
    "times in one thread of a CPU.",
    name="gpu-cost",
    of="ways",
    where={
        "algorithm": [
            "torch.sum, CPU",
            "torch.sum in float64, CPU",
            "torch.sum, GPU",
            "torch.sum in float64, GPU",
        ]
    },
    timed=True,
    on="nvidia-h200",
    value=lambda t: (
        t["times base"].iloc[3] / t["times base"].iloc[2],
        t.filter(like="times base").iloc[1] / t.filter(like="times base").iloc[0],
    ),
)

# %%

study.dots(
    "ways",
    of="ways",
    x="distinct",
    label=lambda row: f"{row['algorithm']} ({row['times base']:.3g}×)",
    where={"algorithm": lambda s: ~s.str.contains("tree|binned|Triton|64, CPU|torch.sum, CPU")},
    title="8192 values, 128 orders",
    xlabel="results (and time)",
    answer=True,
    alt="A dot for each way to add, with its time in brackets: how many different results 128 "
    "orders of the same float32 values give. A loop gives over a hundred, np.sum and torch.sum a "
    "few dozen; added in float64, Neumaier's and math.fsum give one.",
)

# %%
# That float64 is no guarantee, the means above tell: two orders differ after all where their sums
# lie on two sides of a boundary at which float32 rounds.

study.claim(
    "The float64 sums of the normal values are up to {330} float64 ULP apart, that is {6.1e-7} "
    "ULP of float32: about one such sum in 1.6 million would show the order.",
    of="means",
    where={"distribution": "normal", "dtype": "float64"},
    on="nvidia-h200",
    value=lambda t: (t["spread ulp"], t["spread ulp"] / 2**29),
)

# %%
# On a GPU atomics change the sum from run to run
# -----------------------------------------------
#
# On a GPU the order may change from run to run: with atomics, programs add to one number in memory
# in whatever order they finish. PyTorch's ``index_add_`` and ``scatter_add_`` do so, and a Triton
# kernel of ours. 128 runs of one order:


def index_add(v):
    """Add every value to element 0."""
    place = torch.zeros(len(v), dtype=torch.long, device=v.device)
    return torch.zeros(1, device=v.device).index_add_(0, place, v)


def deterministic(v):
    """The same, with the switch on for its time."""
    torch.use_deterministic_algorithms(True)
    total = index_add(v)
    torch.use_deterministic_algorithms(False)
    return total


again = {"torch.sum, CPU": ("cpu", torch.sum), "index_add_, CPU": ("cpu", index_add)}
if torch.cuda.is_available():
    again |= {
        "torch.sum, GPU": ("cuda", torch.sum),
        "index_add_, GPU": ("cuda", index_add),
        "index_add_, deterministic algorithms, GPU": ("cuda", deterministic),
        "Triton, atomics, GPU": ("cuda", sum_atomic),
        "Triton, two passes, GPU": ("cuda", sum_two_pass),
    }
x = round_to(values["normal"], "float32")
runs = []
for name, (device, add) in again.items():
    v = torch.tensor(x, device=device)
    sums = np.array([float(add(v)) for _ in range(ORDERS)], np.float32)
    runs.append({"algorithm": name} | judge(sums, exact_sum(x), "float32"))
study.table(
    "runs",
    runs,
    "One order of 8192 normal float32 values, added 128 times.",
    columns=["algorithm", "distinct", "spread ulp", "error ulp"],
    part="algorithm",
    times=["distinct"],
)

# %%

study.claim(
    "On a GPU `index_add_` gives about {87} results in 128 runs of one order, our kernel with one "
    "atomic addition for each block at least {3}; `torch.sum`, the kernel in two passes and "
    "`index_add_` with deterministic algorithms give {1}.",
    of="runs",
    where={
        "algorithm": [
            "torch.sum, GPU",
            "index_add_, GPU",
            "index_add_, deterministic algorithms, GPU",
            "Triton, atomics, GPU",
            "Triton, two passes, GPU",
        ]
    },
    on="nvidia-h200",
    value=lambda t: (
        t["distinct"].iloc[1],
        t.filter(like="distinct").iloc[3],
        t["distinct"].iloc[[0, 2, 4]],
    ),
    test=lambda t: t.filter(like="distinct").iloc[[1, 3]].min(axis=None) > 1,
)

# %%

study.claim(
    "On a CPU `torch.sum` and `index_add_` give the same bits in every run.",
    of="runs",
    where={"algorithm": ["torch.sum, CPU", "index_add_, CPU"]},
    test=lambda t: t["distinct"] == 1,
)

# %%
# ``index_put_`` with ``accumulate=True`` does not: of a million values on two threads of a CPU,
# nearly every run gave another result. With deterministic algorithms every run gave the same one.
#
# The same in every order, and wrong: 16-bit accumulators
# -------------------------------------------------------
#
# A value that is added to a large running sum is rounded to the sum's last place, the same way
# again and again; where it is less than half of that, it is lost, and the sum stagnates. This may
# happen in every order alike. Which accumulator a call takes depends on library, type and axis:
# NumPy adds float16 in float32 along the contiguous axis alone.

narrow = []
for name, dtype in product(DISTRIBUTIONS, ("float16", "bfloat16")):
    rows = arrange(round_to(values[name], dtype, storage=True), orders[8192])
    for accumulator, way in product((dtype, "float32"), ("one after another", "full tree")):
        add = {"one after another": sequential, "full tree": pairwise}[way]
        with np.errstate(over="ignore"):
            sums = add(rows.astype(np.float32) if accumulator == "float32" else rows)
            sums = sums.astype(rows.dtype)
        narrow.append(
            {"distribution": name, "dtype": dtype, "adds in": accumulator, "algorithm": way}
            | {"given": float(sums[0]), "exact": float(exact_sum(rows[0]))}
            | judge(sums, exact_sum(rows[0]), dtype)
        )
half, bf16 = np.ones((4096, 2), np.float16), round_to(np.ones(4096), "bfloat16", storage=True)
ones = {
    "np, float16, (2, 4096).sum(axis=1)": np.ascontiguousarray(half.T).sum(axis=1)[0],
    "np, float16, (4096, 2).sum(axis=0)": half.sum(axis=0)[0],
    "np, float16, (4096, 2).sum(axis=0, dtype=float32)": half.sum(axis=0, dtype=np.float32)[0],
    "np with ml_dtypes, bfloat16, (4096,).sum()": bf16.sum(),
    "torch, float16, (4096, 2).sum(0)": torch.from_numpy(half).sum(0)[0],
    "torch, bfloat16, (4096,).sum()": torch.ones(4096, dtype=torch.bfloat16).sum(),
}
study.keep("narrow", narrow, part="cpu")
study.table(
    "ones",
    [{"call": call, "sum": float(total)} for call, total in ones.items()],
    "4096 ones, added.",
    part="cpu",
)

# %%

study.claim(
    "The spikes, added one after another in bfloat16, give {6208} in all 128 orders; the exact sum "
    "of these values is {6399.19}.",
    name="wrong",
    of="narrow",
    where={
        "distribution": "spikes",
        "dtype": "bfloat16",
        "adds in": "bfloat16",
        "algorithm": "one after another",
    },
    on="nvidia-h200",
    value=lambda t: (t["given"], t["exact"]),
    test=lambda t: t["distinct"] == 1,
)

# %%

study.claim(
    "The Pareto values sum to {69,534}, more than float16 holds. Added in float32 they are "
    "infinite in every order; in float16, one after another, they stagnate at {59,392}.",
    of="narrow",
    where={"distribution": "pareto", "dtype": "float16", "algorithm": "one after another"},
    on="nvidia-h200",
    value=lambda t: (t["exact"], t["given"].min()),
    test=lambda t: np.isinf(t["given"]) == (t["adds in"] == "float32"),
)

# %%

study.claim(
    "4096 float16 ones are {2048} down the columns of a NumPy array, 4096 ones of bfloat16 "
    "{256}; PyTorch gives 4096 for both.",
    of="ones",
    on="nvidia-h200",
    value=lambda t: t["sum"].iloc[[1, 3]].tolist(),
    test=lambda t: t["sum"].iloc[-2:] == 4096,
)

# %%
# Bounds hold, and say little of the typical error
# ------------------------------------------------
#
# If no value passes through more than d additions, the error is at most d·u·Σ\|x\| to first order
# [#higham]_: d = n − 1 one after another, log₂ n in a full tree, 24 in NumPy's sum of 8192 values.
# For roundings that are independent and of mean zero √d takes the place of d, up to a factor that
# grows with the probability asked for [#mary]_. That is an envelope. For data of mean zero the
# bound need not grow with n at all [#mary]_; where a sum stagnates, the roundings share a sign, and
# √d fails.

bounds = []
for name, add, depth in (
    ("one after another", sequential, lambda n: n - 1),
    ("np.sum", pairwise_numpy, numpy_depth),
    ("full tree", pairwise, lambda n: (n - 1).bit_length()),
):
    for distribution, size in product(DISTRIBUTIONS, SIZES):
        x = round_to(values[distribution][:size], "float32")
        unit = 2.0**-24 * float(exact_sum(np.abs(x)))
        errors = np.abs(signed_errors(add(arrange(x, orders[size])), exact_sum(x))) / unit
        bounds.append(
            {"algorithm": name, "distribution": distribution, "size": size}
            | {"median error": np.median(errors), "largest error": errors.max()}
            | {"√d": math.sqrt(depth(size)), "d": float(depth(size))}
            | {"within √d": int(np.sum(errors <= math.sqrt(depth(size))))}
        )
study.keep("bounds", bounds, part="cpu")

# %%

study.lines(
    "bounds",
    of="bounds",
    where={"distribution": "spikes"},
    x="size",
    y=["largest error", "√d", "d"],
    panels="algorithm",
    dashed=["√d", "d"],
    logx=True,
    logy=True,
    title="Largest error of 128 orders of the spikes",
    xlabel="values",
    ylabel="in units of u·Σ|x|",
    alt="Largest error against the number of values, for a loop, np.sum and a full tree, with the "
    "bound d and its square root. The loop's errors grow past the root; the others stay below it.",
)

# %%

study.claim(
    "With normal values the median error is {0.001} to {0.004} of the envelope √d.",
    of="bounds",
    where={"distribution": "normal", "size": 8192},
    on="nvidia-h200",
    value=lambda t: (
        (t["median error"] / t["√d"]).min(),
        (t["median error"] / t["√d"]).max(),
    ),
)

# %%

study.claim(
    "The spikes, one after another, stagnate: {1} of 128 orders is within √d, and the largest "
    "error is {24} times √d.",
    of="bounds",
    where={"distribution": "spikes", "size": 8192, "algorithm": "one after another"},
    on="nvidia-h200",
    value=lambda t: (t["within √d"], t["largest error"] / t["√d"]),
)

# %%
# Threads and layers reorder sums, too
# ------------------------------------
#
# In practice nobody permutes values; one adds a thread, a block, a GPU. And a network takes two
# sums in each normalisation. The sum has 2²² values, the rows of LayerNorm 1024. The 32 layers of
# width 256 normalise, multiply, clip at zero, multiply and add to their input, with random weights;
# the second run takes the sums of its normalisations in another order.


def normalize(x, dtype, order):
    """Normalise rows whose sums are taken in another order."""
    mu, sd = moments(np.take(x, order, axis=1))
    return round_to((x - mu[:, None]) / (sd[:, None] + 1e-6), dtype)


def network(x, weights, dtype, order):
    """The state after all layers, every result rounded to the type."""
    for up, down in weights:
        hidden = round_to(np.maximum(normalize(x, dtype, order) @ up, 0), dtype)
        x = round_to(x + round_to(hidden @ down, dtype), dtype)
    return x


def evidence(case, dtype, one, other, truth):
    """How often and how far two results differ, beside the error of the first."""
    rms = np.sqrt(np.mean(np.square(truth)))
    moved = np.sqrt(np.mean(np.square(np.subtract(one, other, dtype=float))))
    error = scaled_error(truth, one, dtype=dtype).rms
    return {
        "case": f"{case}, {dtype}",
        "changed": np.mean(np.not_equal(one, other)),
        "moved": moved / rms / dtype_info(dtype).eps,
        "rms error": error,
    }


WORKERS = [2, 4, 8, 16, 32, 64]
x = round_to(draw_values("normal", args.length, SEED), "float32")
truth = np.full(len(WORKERS), float(exact_sum(x)))
split = np.array([np.sum([np.sum(part) for part in np.array_split(x, w)]) for w in WORKERS])
in_threads = []
for threads_now in (1, *WORKERS):
    torch.set_num_threads(threads_now)
    in_threads.append(float(torch.from_numpy(x).sum()))
torch.set_num_threads(threads)
one = np.full(len(WORKERS), in_threads[0])
elsewhere = [
    evidence("np.sum, split in 2 to 64", "float32", np.full(6, np.sum(x)), split, truth),
    evidence("torch.sum, 2 to 64 threads", "float32", one, np.array(in_threads[1:]), truth),
]
rng = np.random.default_rng(SEED)
many = rng.standard_normal((args.length // 1024, 1024))
state = rng.standard_normal((64, args.width))
weights = rng.standard_normal((args.layers, 2, args.width, args.width)) / math.sqrt(args.width)
weights[:, 1] *= math.sqrt(2)  # clipping at zero halved the mean square
for dtype in DTYPES[1:]:
    x, given, other = round_to(many, dtype), np.arange(1024), draw_orders(1024, 4, SEED)[0]
    truth = normalize(x.astype(float), "float64", given)
    results = (normalize(x, dtype, order) for order in (given, other))
    elsewhere.append(evidence("one LayerNorm", dtype, *results, truth))
    x, w = round_to(state, dtype), round_to(weights, dtype)
    given, other = np.arange(args.width), draw_orders(args.width, 4, SEED)[0]
    truth = network(x.astype(float), w.astype(float), "float64", given)
    results = (network(x, w, dtype, order) for order in (given, other))
    elsewhere.append(evidence("all layers", dtype, *results, truth))
study.table(
    "elsewhere",
    elsewhere,
    "How many results change with the order of the sums inside, how far, and the error.",
    rows={"case": lambda s: ~s.str.contains("bfloat16")},
    part="cpu",
)

# %%

study.claim(
    "Of six numbers of threads {6} change PyTorch's sum of four million values; of six splits {3} "
    "change NumPy's.",
    of="elsewhere",
    where={"case": ["np.sum, split in 2 to 64, float32", "torch.sum, 2 to 64 threads, float32"]},
    on="nvidia-h200",
    value=lambda t: (6 * t.set_index("case")["changed"]).iloc[[1, 0]].tolist(),
)

# %%

study.claim(
    "After 32 float32 layers {96%} of the values have changed; the two runs are {1.0} times as "
    "far from each other as from float64.",
    of="elsewhere",
    where={"case": "all layers, float32"},
    on="nvidia-h200",
    value=lambda t: (t["changed"], t["moved"] / t["rms error"]),
)

# %%
# Your own array
# --------------
#
# Put in an array of float32 or float64: how many results do its orders have?

ARRAY = draw_values("normal", 2000).astype(np.float32)  # or np.load("mine.npy").ravel()

rows = arrange(ARRAY, draw_orders(ARRAY.size, ORDERS))
own = [{"algorithm": name} | over_orders(name, rows) for name in WAYS]
print(f"condition number {condition(ARRAY):.3g}")
print(pd.DataFrame(own).to_string(index=False, float_format="%.3g"))

# %%
# Limits, and what to read next
# -----------------------------
#
# * Sums of vectors; products of matrices choose their order by shape and GPU.
# * A binned sum that keeps the highest bins alone [#demmel]_ has one result, too, and costs less:
#   NVIDIA reports 20 to 30 % for large inputs on a GPU, in CUB [#cub]_.
# * ``use_deterministic_algorithms`` fixes the order on one GPU; two kinds may differ.
# * The study that posed the question [#study]_ compares each order with the first.
# * Next: :ref:`layer-norm-discrepancies`, for a tolerance that follows from these bounds, and
#   :ref:`triton-layer-norm`, for a backward pass without atomics.
#
# .. [#neumaier] A. Neumaier, *Rundungsfehleranalyse einiger Verfahren zur Summation endlicher
#    Summen*, ZAMM 54, 1974, :doi:`10.1002/zamm.19740540106`.
# .. [#neal] R. M. Neal, *Fast exact summation using small and large superaccumulators*, 2015,
#    `arXiv:1505.05571 <https://arxiv.org/abs/1505.05571>`_.
# .. [#demmel] J. Demmel, H. D. Nguyen, *Fast reproducible floating-point summation*, ARITH 2013,
#    :doi:`10.1109/ARITH.2013.9`; P. Ahrens, J. Demmel, H. D. Nguyen, *Algorithms for efficient
#    reproducible floating point summation*, ACM TOMS 46, 2020, :doi:`10.1145/3389360`.
# .. [#torch] PyTorch 2.11, `ReduceOpsUtils.h
#    <https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/ReduceOpsUtils.h>`_,
#    ``make_reduction``.
# .. [#higham] N. J. Higham, *The accuracy of floating point summation*, SIAM J. Sci. Comput. 14,
#    1993, :doi:`10.1137/0914050`.
# .. [#mary] N. J. Higham, T. Mary, *A new approach to probabilistic rounding error analysis*, SISC
#    41, 2019, :doi:`10.1137/18M1226312`; *Sharper probabilistic backward error analysis …*, SISC
#    42, 2020, :doi:`10.1137/20M1314355`.
# .. [#cub] NVIDIA, `Controlling floating-point determinism in NVIDIA CCCL
#    <https://developer.nvidia.com/blog/controlling-floating-point-determinism-in-nvidia-cccl/>`_,
#    2026.
# .. [#study] X. Dupré, `Reproducible parallelized reduction is difficult
#    <https://sdpython.github.io/doc/onnx-diagnostic/dev/auto_technical/plot_parallelized_reduction.html>`_,
#    documentation of onnx-diagnostic.

study.finish()
