"""The study behind "Why does the order of a sum change the result?".

128 orders of one vector: how many sums they have, how far these are apart and from the exact one,
for a dozen ways to add, what each takes, and what threads change.

The page tells the story with small experiments. This file measures the full grid, writes the
record, and defines each number that the page may print.

    python studies/reduction_order.py --record
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pandas as pd
import torch

from roundoff.page.measurement import Study
from roundoff.reductions import (
    DISTRIBUTIONS,
    arrange,
    binned,
    draw_orders,
    draw_values,
    exact_sum,
    judge,
    mean,
    neumaier,
    pairwise,
    round_to,
    sequential,
)
from roundoff.script import unit_test_going
from roundoff.timing import measure

fast = unit_test_going()
study = Study(
    "plot_reduction_order",
    "Sums of one vector in 128 orders: results, errors, and what each way to add takes.",
    on="nvidia-h100-80gb-hbm3",
    part="algorithm",
)

SEED, REPEATS = 0, 128
ORDERS = draw_orders(8192, 128, SEED)  # with the given one, ascending and descending
GPU = torch.cuda.is_available()


def arranged(name, dtype, storage=False):
    """8192 values in 128 orders, in a type; the given order is the first."""
    return arrange(round_to(draw_values(name, 8192, SEED), dtype, storage=storage), ORDERS)


# --- Errors against the exact sum. ---------------------------------------------------------------


@study.table()
def means(args):
    """The mean of 8192 float32 values with NumPy's sum, in 128 orders, against the exact one."""
    for name in DISTRIBUTIONS:
        x = arranged(name, "float32")
        found = judge(mean(x, "float32"), exact_sum(x[0]) / 8192, "float32")
        yield {"distribution": name, "dtype": "float32", "algorithm": "np.sum"} | found


# --- Ways to add: results, errors and times. -----------------------------------------------------

WAYS = {  # name: how a vector gets there, how it is added
    "np.sum": (np.asarray, np.sum),
    "np.sum in float64": (np.asarray, partial(np.sum, dtype=np.float64)),
    "torch.sum, CPU": (torch.from_numpy, torch.sum),
    "torch.sum in float64, CPU": (torch.from_numpy, partial(torch.sum, dtype=torch.float64)),
    "one after another": (np.asarray, sequential),
    "full tree": (np.asarray, pairwise),
    "Neumaier": (np.asarray, neumaier),
    # Records from before have a row "binned": an earlier algorithm, which left bits out.
    "binned sum": (np.asarray, binned),
    "math.fsum": (np.asarray, lambda v: math.fsum(v.tolist())),
}
if GPU:
    from roundoff.kernels.binned import sum_binned

    to_gpu = partial(torch.tensor, device="cuda")
    WAYS["torch.sum, GPU"] = to_gpu, torch.sum
    WAYS["torch.sum in float64, GPU"] = to_gpu, partial(torch.sum, dtype=torch.float64)
    WAYS["binned sum, GPU"] = to_gpu, sum_binned


def times():
    """Time over that of ``np.sum`` on one thread; on a GPU over that of ``torch.sum``."""
    long = round_to(draw_values("normal", 2**12 if fast else 2**18, SEED), "float32")
    calls = {w: partial(add, put(long)) for w, (put, add) in WAYS.items() if "GPU" not in w}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = measure(calls, budget_s=0.1 if fast else 4, min_rounds=5).ratios("np.sum")
    torch.set_num_threads(threads)
    if GPU:
        seeded = torch.Generator("cuda").manual_seed(SEED)
        long = torch.randn(2**26, device="cuda", generator=seeded)
        calls = {w: partial(add, long) for w, (_, add) in WAYS.items() if "GPU" in w}
        found = pd.concat([found, measure(calls, device="cuda").ratios("torch.sum, GPU")])
    return found.rename(columns={"ratio": "times base"}).set_index("label").to_dict("index")


@study.table(times=["times base", "low", "high"])
def ways(args):
    """8192 float32 values in 128 orders, the worst of three distributions; and times."""
    taken = times()
    for name, (put, add) in WAYS.items():
        found = {}
        for distribution in DISTRIBUTIONS:
            x = arranged(distribution, "float32")
            sums = np.array([float(add(put(row))) for row in x], np.float32)
            found[distribution] = judge(sums, exact_sum(x[0]), np.float32)
        most = {key: max(f[key] for f in found.values()) for key in found["normal"]}
        normal = found["normal"]["distinct"]
        yield {"algorithm": name} | most | {"normal": normal} | taken[name]


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


@study.table(times=["distinct"])
def runs(args):
    """One order of 8192 normal float32 values, added 128 times."""
    again = {"torch.sum, CPU": ("cpu", torch.sum), "index_add_, CPU": ("cpu", index_add)}
    if GPU:
        again |= {
            "torch.sum, GPU": ("cuda", torch.sum),
            "index_add_, GPU": ("cuda", index_add),
            "index_add_, deterministic algorithms, GPU": ("cuda", deterministic),
        }
    x = arranged("normal", "float32")[0]
    for name, (device, add) in again.items():
        v = torch.tensor(x, device=device)
        sums = np.array([float(add(v)) for _ in range(REPEATS)], np.float32)
        yield {"algorithm": name} | judge(sums, exact_sum(x), "float32")


# --- The same in every order, and wrong: an accumulator of 16 bits. ------------------------------

SPIKES = {
    "distribution": "spikes",
    "dtype": "bfloat16",
    "adds in": "bfloat16",
    "algorithm": "one after another",
}


@study.table()
def narrow(args):
    """The spikes in bfloat16, added in their own type."""
    x = arranged("spikes", "bfloat16", storage=True)
    sums, exact = sequential(x), exact_sum(x[0])
    found = {"given": float(sums[0]), "exact": float(exact)} | judge(sums, exact, "bfloat16")
    return [SPIKES | found]


# --- Threads reorder sums, too. ------------------------------------------------------------------


@study.table()
def elsewhere(args):
    """How many of the sums of several threads differ from that of one."""
    x = round_to(draw_values("normal", 2**14 if fast else 2**22, SEED), "float32")
    threads, sums = torch.get_num_threads(), []
    for number in (1, 2, 4, 8, 16, 32, 64):
        torch.set_num_threads(number)
        sums.append(float(torch.from_numpy(x).sum()))
    torch.set_num_threads(threads)
    changed = np.mean(np.not_equal(sums[0], sums[1:]))
    case = {"case": "torch.sum, 2 to 64 threads, float32", "algorithm": "torch.sum, CPU"}
    return [case | {"changed": changed}]


# --- Values: what pages may print. Name, datum and statistic, table, column; rows; a test. -------


def is_right(found):
    """Whether all orders give one result, correctly rounded."""
    return found.value == 1 and (found.rows["error ulp"] <= 0.5).all()


study.value(
    "np.sum",
    "different results of np.sum, 8192 normal float32 values in 128 orders",
    "ways",
    "normal",
    where={"algorithm": "np.sum"},
    test=lambda v: v.value > 1,
)
for name, kind, distribution, holds in (
    # where nothing cancels it is below 5
    ("np.sum.error", "normal", "normal", lambda v: v.value > 20),
    ("pareto.error", "Pareto", "pareto", lambda v: v.value < 5),
):
    study.value(
        name,
        f"largest error of np.sum in ULP, 8192 {kind} float32 values in 128 orders",
        "means",
        "error ulp",
        where={"distribution": distribution, "dtype": "float32"},
        test=holds,
    )
study.value(
    "float64",
    "most results of 128 orders added in float64, three kinds of values",
    "ways",
    "distinct",
    where={"algorithm": "np.sum in float64"},
    test=is_right,
)
CORE, GPUS = "2¹⁸ values, one thread", "2²⁶ values, on a GPU"
for name, over, algorithm in (
    ("float64.time", f"np.sum in float64 over np.sum in float32, {CORE}", "np.sum in float64"),
    ("binned.time", f"binned over np.sum in float32, {CORE}", "binned sum"),
    (
        "float64.gpu",
        f"torch.sum in float64 over torch.sum in float32, {GPUS}",
        "torch.sum in float64, GPU",
    ),
    ("binned.gpu", f"sum_binned over torch.sum in float32, {GPUS}", "binned sum, GPU"),
):
    study.value(
        name,
        f"time of {over}",
        "ways",
        "times base",
        where={"algorithm": algorithm},
        interval=("low", "high"),
        words=("faster", "slower"),
    )
study.value(
    "float64.torch",
    "time of torch.sum in float64 over torch.sum in float32, 2¹⁸ values, one thread of a CPU",
    "ways",
    lambda t: t["times base"].iloc[1] / t["times base"].iloc[0],
    where={"algorithm": ["torch.sum, CPU", "torch.sum in float64, CPU"]},
    test=lambda v: v.value > 5,
)
for name, about, algorithm, holds in (
    (
        "repeats",
        "torch.sum on a GPU, 128 runs of one order of 8192 values",
        "torch.sum, GPU",
        lambda v: v.value == 1,
    ),
    (
        "atomics",
        "index_add_ on a GPU, 128 runs of one order of 8192 values",
        "index_add_, GPU",
        lambda v: v.value > 40,  # dozens: how many, changes from run to run
    ),
    (
        "atomics.off",
        "index_add_ on a GPU, with deterministic algorithms, 128 runs",
        "index_add_, deterministic algorithms, GPU",
        lambda v: v.value == 1,
    ),
):
    study.value(
        name,
        f"different results of {about}",
        "runs",
        "distinct",
        where={"algorithm": algorithm},
        test=holds,
    )
study.value(
    "stagnation",
    "sum of the spikes added one after another in bfloat16, the same in 128 orders",
    "narrow",
    "given",
    where=SPIKES,
    test=lambda v: v.rows["distinct"].item() == 1,
)
study.value(
    "stagnation.exact",
    "exact sum of the spikes in bfloat16",
    "narrow",
    "exact",
    where=SPIKES,
    test=lambda v: v.value > v.rows["given"].item(),
)
study.value(
    "threads",
    "of six numbers of threads, those that change torch.sum of 2²² values",
    "elsewhere",
    lambda t: 6 * t["changed"],
    where={"case": "torch.sum, 2 to 64 threads, float32"},
    test=lambda v: v.value == 6,
)

if __name__ == "__main__":
    study.main()
