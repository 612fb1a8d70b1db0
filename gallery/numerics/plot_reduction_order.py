r"""
.. _reduction-order:

Why does the order of a sum change the result?
==============================================

Shuffle a list of numbers and add it again: the last digits of the sum change. No number was lost.

.. answer:: nvidia-h200

   **Why.** Every addition rounds, and a different order rounds different partial sums. In 128
   orders of the same 8192 float32 numbers, ``np.sum`` has :bound:`27 <np.sum>` results.

   **The cure.** Add in float64 and round once, at the end. All 128 orders then have
   :bound:`1 <float64>` result, and it is the correctly rounded one.

   **The price.** NumPy takes :bound:`2.3 <float64.time>` times as long in float64, on one core.
   PyTorch copies the numbers first: its GPU sum takes :bound:`5.9 <float64.gpu>` times as long.

   .. code-block:: python

      x.sum(dtype=np.float64)  # a NumPy array
      x.sum(dtype=torch.float64)  # a PyTorch tensor
      roundoff.reductions.binned(x)  # the same bits in every order, guaranteed
"""

# %%
# Every cell runs on a laptop in seconds. A bold number was recorded on a machine with an H200 by a
# study of this question, and leads to its evidence at the end of the page.

from functools import partial
from itertools import product

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from roundoff.environment import short_name
from roundoff.record import read_records
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
    round_to,
    sequential,
)

# %%
# One list, many sums
# -------------------
#
# We draw 8192 numbers from a normal distribution and round them to float32. Then we add them in 128
# orders: as they are, from the smallest up, from the largest down, and shuffled 125 times.

x = draw_values("normal", 8192).astype(np.float32)
orders = arrange(x, draw_orders(8192))  # one order a row
sums = np.array([np.sum(order) for order in orders])

for name, place in ("as drawn", 0), ("smallest first", 1), ("shuffled", 3):
    print(f"{name:15}{sums[place]:.6f}")
print("different results:", distinct_bits(sums))

# %%
# Each line adds the same numbers, and the sums agree in a few digits only.
#
# It is not chance
# ----------------
#
# The usual explanation is concurrency: threads finish at different times, so each run adds in a
# different order. Then one array, added twice, would give two results. We add three of the orders a
# thousand times each.

for name, place in ("as drawn", 0), ("smallest first", 1), ("shuffled", 3):
    runs = np.array([np.sum(orders[place]) for _ in range(1000)])
    print(f"{name:15}{distinct_bits(runs)} result in 1000 runs")

# %%
# Each order repeats to the last bit. The sum depends on the numbers and on their order, and not on
# the run. Concurrency matters only where it changes the order. On the H200 PyTorch's ``index_add_``
# adds in whatever order its threads arrive, and 128 runs of one array gave :bound:`87 <atomics>`
# results. With ``torch.use_deterministic_algorithms(True)`` they gave :bound:`1 <atomics.off>`.
#
# Each addition rounds
# --------------------
#
# A float32 has 24 significant bits. From 2²⁴ = 16,777,216 on it counts in steps of two. There is no
# 2²⁴ + 1: the addition rounds it to 2²⁴. Five numbers are enough to see what this does to a sum.
# Each tree is one order. A node shows what float32 makes of the two parts below it.

big = 2.0**24
trees = {
    "largest first": ((((big, 1.0), 1.0), 1.0), 1.0),
    "smallest first": ((((1.0, 1.0), 1.0), 1.0), big),
}


def draw(ax, tree, place):
    """Draw a tree; give its middle, its height, its sum and the next free place."""
    if not isinstance(tree, tuple):
        ax.text(place, -0.5, f"{tree:,.0f}", ha="center", size=9)
        return place, 0, np.float32(tree), place + 1
    x0, y0, left, place = draw(ax, tree[0], place)
    x1, y1, right, place = draw(ax, tree[1], place)
    middle, top, total = (x0 + x1) / 2, max(y0, y1) + 1, left + right
    is_exact = float(left) + float(right) == float(total)  # float64 holds this sum
    ax.plot([x0, middle, x1], [y0, top, y1], "C0o-" if is_exact else "C1s--", ms=4)
    words = f"{total:,.0f}  " if is_exact else f"{total:,.0f}, rounded  "
    ax.text(middle, top, words, ha="right", size=9)
    return middle, top, total, place


# %%

figure, axes = plt.subplots(1, 2, figsize=(8, 3))
figure.set_label(
    "Two trees of additions over 16,777,216 and four ones. Largest first, each addition "
    "is rounded and the sum is 16,777,216. Smallest first, none is: 16,777,220."
)
for ax, (name, tree) in zip(axes, trees.items(), strict=True):
    draw(ax, tree, 0)
    ax.set_title(name)
    ax.set_xlim(-1.5, 4.6)
    ax.axis("off")
plt.show()

# %%
# In the left tree each addition loses its one. In the right tree the ones meet first, and nothing
# is lost. The sums differ by four.
#
# If rounding is the cause, the order must not matter where nothing is rounded. So we round each of
# our 8192 numbers to a multiple of 1/1024, once, before we add. Every partial sum then fits into 24
# bits. The 128 orders stay as they were.

grid = np.round(orders * 1024) / 1024
print("different results:", distinct_bits(np.sum(grid, axis=1)))

# %%
# One result. The orders are still there and the rounding is not, so the rounding was the cause.
#
# Cancellation decides how much it matters
# ----------------------------------------
#
# Large terms that cancel leave a small sum, and the roundings of the large partial sums stay in it.
# The condition number Σ\|x\| / \|Σx\| measures that: it is 1 where all numbers have one sign. We
# compare three kinds of numbers. *normal* has both signs, *spikes* a hundred at every 128th place
# among many −0.0001, and *pareto* is positive with a heavy tail. The error is in :ref:`ULP <ulp>`,
# units in the last place of the exact sum.

print("numbers  condition  results  ULP off")
for name in DISTRIBUTIONS:
    values = draw_values(name, 8192).astype(np.float32)
    sums = np.sum(arrange(values, draw_orders(8192)), axis=1)
    found = judge(sums, exact_sum(values), np.float32)
    print(f"{name:9}{condition(values):9.0f}", end="")
    print(f"{found['distinct']:9}{found['error ulp']:9.1f}")

# %%
# The normal numbers cancel most and have the largest error. On the H200's host their worst sum is
# :bound:`94 <np.sum.error>` ULP off. Positive numbers do not cancel: the worst sum of *pareto* is
# :bound:`1.3 <pareto.error>` ULP off.
#
# Now the whole grid: 2 to 8192 numbers, four types, 128 orders. We take two statistics. The *mean*
# needs one sum. The *normalisation* of a layer norm, (x − mean) / (sd + 10⁻⁶), needs two. Numbers
# of 16 bits are added in float32, and the result is rounded back. The table has the spread, the
# highest minus the lowest of 128 results, at its largest over all sizes.

rows = []
for name, dtype, size in product(DISTRIBUTIONS, DTYPES, [2**k for k in range(1, 14)]):
    values = round_to(draw_values(name, 8192)[:size], dtype)
    arranged = arrange(values, draw_orders(size))
    means, sd = moments(arranged)
    scaled = (np.sort(values) - means[:, None]) / (sd[:, None] + 1e-6)
    case = {"numbers": name, "type": dtype, "size": size}
    spread = np.ptp(mean(arranged, dtype))
    rows.append({"statistic": "mean", **case, "spread": spread})
    spread = np.ptp(round_to(scaled, dtype), axis=0).max()
    rows.append({"statistic": "normalisation", **case, "spread": spread})

spreads = pd.DataFrame(rows)
summary = spreads.pivot_table("spread", ["statistic", "numbers"], "type", "max", sort=False)
summary.map("{:.1e}".format)

# %%
# Does the spread grow with the size? The plot has the normal numbers. A spread of zero has no place
# on a logarithmic axis.

figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True)
figure.set_label(
    "Spread of 128 orders against the number of values, on logarithmic axes. Each type "
    "has a level of its own, float64 far below float32, and hardly rises with the size."
)
normal = spreads[(spreads["numbers"] == "normal") & (spreads["spread"] > 0)]
for ax, statistic in zip(axes, ("mean", "normalisation"), strict=True):
    chosen = normal[normal["statistic"] == statistic]
    for dtype, line in chosen.groupby("type", sort=False):
        ax.semilogx(line["size"], line["spread"], "o-", base=2, label=dtype)
    ax.set_yscale("log")
    ax.set_title(statistic)
    ax.set_xlabel("numbers in the sum")
axes[0].set_ylabel("spread of 128 orders")
axes[1].legend()
plt.show()

# %%
# The type matters far more than the size. float64 has 29 bits more than float32, and its largest
# spread is at least :bound:`134 <spread.ratio>` million times smaller. Means of 16 bits have no
# spread here: rounding back to 16 bits hides what float32 lost.
#
# What helps, and what it costs
# -----------------------------
#
# The same trick works for float32: add with more bits than the result has. In float64 each rounding
# is 2²⁹ times smaller, and rounding back to float32 hides it. :func:`~roundoff.reductions.binned`
# goes further. It adds the numbers of each sign and exponent by themselves, which float64 does
# without rounding, and rounds the exact total once [#neal]_. We count the results of 128 orders.

methods = {
    "a loop": sequential,
    "np.sum": partial(np.sum, axis=1),
    "np.sum in float64": partial(np.sum, axis=1, dtype=np.float64),
    "binned": binned,
}
counts = {}
for method, add in methods.items():
    for name in DISTRIBUTIONS:
        values = draw_values(name, 8192).astype(np.float32)
        sums = add(arrange(values, draw_orders(8192))).astype(np.float32)
        counts[method, name] = distinct_bits(sums)
counts = pd.Series(counts).unstack(sort=False)
counts

# %%

figure, ax = plt.subplots(figsize=(4.6, 2.6))
figure.set_gid("answer")  # the site shows it beside the answer
figure.set_label("Different results of 128 orders: " + str(counts["normal"].to_dict()))
bars = ax.barh(counts.index, counts["normal"])
ax.bar_label(bars, padding=3)
ax.invert_yaxis()
ax.margins(x=0.15)
ax.set_title("Different results of 128 orders")
plt.show()

# %%
# In float64 one result is left. That is no guarantee. A float64 sum may lie so near the middle of
# two float32 numbers that its orders round to both. For the normal numbers we expect that in about
# one sum of :bound:`1.6 <float64.odds>` million. Numbers of very different size break float64 at
# once.

for order in [2.0**60, 1.0, -(2.0**60)], [2.0**60, -(2.0**60), 1.0]:
    hard = np.array(order, np.float32)
    print("in float64:", np.sum(hard, dtype=np.float64), " binned:", binned(hard))

# %%
# 2⁶⁰ + 1 needs 61 bits, and float64 has 53. ``binned`` is right in both orders. On a GPU
# :func:`~roundoff.kernels.binned.sum_binned` gives the same bits.
#
# What does it cost? The table has the time of each method as a multiple of the usual one: of
# ``np.sum`` for 2¹⁸ numbers on one core, or of ``torch.sum`` for 2²⁶ numbers on the GPU. A method
# without a row has not been recorded yet.

METHODS = ["np.sum in float64", "binned sum", "math.fsum"]
METHODS += ["torch.sum in float64, GPU", "binned sum, GPU"]
prices = {}
for record in read_records("plot_reduction_order"):
    ways = record.tables["ways"].set_index("algorithm")
    machine = short_name(record.provenance["ways"].environment)
    prices[machine] = ways["times base"].reindex(METHODS)
pd.DataFrame(prices).dropna(how="all").rename_axis(None).round(1)

# %%
# ``np.sum`` in float64 is :bound:`slower <float64.time>` than in float32, and far cheaper than
# ``math.fsum``, Python's exact sum. PyTorch pays more. It first writes a copy in float64, which
# takes 8 bytes for each number, and so moves 20 bytes instead of 4 [#torch]_. On one core of the
# H200's host its float64 sum takes at least :bound:`10 <float64.torch>` times as long.
#
# Use float64 where results must agree on one machine and a rare exception does no harm. Use
# ``binned`` where they must agree always, such as in a test or a checksum. Use neither where a
# result that differs in its last digits is good enough.

# %%
# Your own numbers
# ----------------
#
# Put in a list, an array or a tensor of floating-point numbers, of any shape. This cell needs the
# imports alone.

mine = draw_values("normal", 1000).astype(np.float32)  # or [0.1, 0.2], or np.load("mine.npy")

exact = binned(mine, axis=None)  # the exact sum, rounded once
values = np.ravel(np.asarray(mine, exact.dtype))
shuffled = [np.random.default_rng(seed).permutation(values) for seed in range(8)]
print(f"{values.size} numbers of {values.dtype}, their sum is {exact!s}")
for dtype in exact.dtype, np.float64:
    sums = np.array([np.sum(order, dtype=dtype) for order in shuffled]).astype(exact.dtype)
    print(f"added in {np.dtype(dtype)}, different sums of 8 orders: {distinct_bits(sums)},")
    print(f"    from {sums.min()!s} to {sums.max()!s}")

# %%
# Limits, and what to read next
# -----------------------------
#
# * The same in every order may still be wrong. The spikes, added one by one in bfloat16, give
#   :bound:`6208 <stagnation>` in all 128 orders. Their exact sum is
#   :bound:`6399 <stagnation.exact>`.
# * Nobody shuffles numbers in practice, but a thread more is a different order. We tried six
#   numbers of threads, and :bound:`6 <threads>` changed PyTorch's sum of four million numbers.
# * A network passes the difference on. After 32 layers whose normalisations add in a different
#   order, :bound:`96 % <layers>` of the float32 values have changed.
# * A product of matrices is a sum, too, and picks its order by shape: :ref:`batch-invariance`. So
#   does a sum over several GPUs: :ref:`all-reduce-order`.
# * A binned sum that keeps the highest bins alone has one result and less work [#demmel]_.
# * The study that posed the question [#study]_ compares each order with the first.
# * Next: :ref:`layer-norm-discrepancies`, where two runtimes differ for a different reason.
#
# .. [#neal] R. M. Neal, *Fast exact summation using small and large superaccumulators*, 2015,
#    `arXiv:1505.05571 <https://arxiv.org/abs/1505.05571>`_.
# .. [#torch] PyTorch 2.11, `ReduceOpsUtils.h
#    <https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/ReduceOpsUtils.h>`_,
#    ``make_reduction``.
# .. [#demmel] J. Demmel, H. D. Nguyen, *Fast reproducible floating-point summation*, ARITH 2013,
#    :doi:`10.1109/ARITH.2013.9`; P. Ahrens, J. Demmel, H. D. Nguyen, *Algorithms for efficient
#    reproducible floating point summation*, ACM TOMS 46, 2020, :doi:`10.1145/3389360`.
# .. [#study] X. Dupré, `Reproducible parallelized reduction is difficult
#    <https://sdpython.github.io/doc/onnx-diagnostic/dev/auto_technical/plot_parallelized_reduction.html>`_,
#    documentation of onnx-diagnostic.
