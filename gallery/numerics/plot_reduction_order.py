r"""
.. _reduction-order:

Why does the order of a sum change the result?
==============================================

Shuffle a list of numbers and add it again: the last digits of the sum change. No number was lost.

.. answer:: nvidia-h200

   **Why.** Every addition rounds, and a different order rounds different partial sums. In 128
   orders of the same 8192 float32 numbers, ``np.sum`` has :bound:`27 <np.sum>` results.

   **The cure.** Add in float64 and round once, at the end. All 128 orders then have
   :bound:`1 <float64>` result, the correctly rounded one. ``binned`` guarantees that for all
   numbers.

   **The price.** NumPy takes :bound:`2.3 <float64.time>` times as long in float64, on one core.
   PyTorch copies the numbers first: its GPU sum takes :bound:`5.9 <float64.gpu>` times as long.
   ``binned`` costs more on a CPU, and :ref:`a cell below <price-of-a-sum>` times it there. On an
   H100 ``sum_binned`` takes :bound:`1.3 <binned.gpu>` times as long as ``torch.sum``.

   .. code-block:: python

      x.sum(dtype=np.float64)  # a NumPy array
      x.sum(dtype=torch.float64)  # a PyTorch tensor
      roundoff.reductions.binned(x)  # the same bits in every order, guaranteed
"""

# %%
# Every cell runs on a laptop in seconds. A bold number was recorded on an H200, or on its host, by
# a study of this question. It leads to its evidence at the end of the page.

from functools import partial
from itertools import product

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

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
    numpy_depth,
    round_to,
    sequential,
)
from roundoff.timing import measure

# %%
# One list, many sums
# -------------------
#
# We draw 8192 numbers from a normal distribution and round them to float32. Then we add them in 128
# orders: as they are, from the smallest up, from the largest down, and shuffled 125 times. The last
# line is the truth: all 8192 numbers added as fractions, without rounding.

x = draw_values("normal", 8192).astype(np.float32)
orders = arrange(x, draw_orders(8192))  # one order a row
sums = np.array([np.sum(order) for order in orders])

for name, place in ("as drawn", 0), ("smallest first", 1), ("shuffled", 3):
    print(f"{name:15}{sums[place]:.6f}")
print("different results:", distinct_bits(sums))
print(f"{'exact':15}{float(exact_sum(x)):.6f}")

# %%
# Each line adds the same numbers. The sums agree in a few digits only. Which one is right? None of
# these three is the exact sum.
#
# It is not chance
# ----------------
#
# The usual explanation is a race: threads finish at different times, so each run adds in a
# different order. If that were the cause, several threads that add one array again and again would
# find several sums. We let PyTorch add a million numbers a hundred times, with one thread and with
# more. *different* counts the results of the hundred runs.

million = torch.from_numpy(draw_values("normal", 2**20).astype(np.float32))
usual = torch.get_num_threads()
for threads in 1, 2, 4:
    torch.set_num_threads(threads)
    runs = np.array([million.sum().item() for _ in range(100)])
    print(f"threads: {threads}  sum: {runs[0]:.6f}  different: {distinct_bits(runs)}")
torch.set_num_threads(usual)

# %%
# Each number of threads gives one sum in every run, to the last bit: the threads do not race. A
# different number of threads cuts the array elsewhere, which is a different order, and gives a
# different sum. On the H200's host, of six numbers of threads :bound:`6 <threads>` changed the sum
# that one thread gives.
#
# There are races, too. On the H200 PyTorch's ``index_add_`` adds in whatever order its threads
# arrive, and 128 runs of one array had :bound:`about 90 <atomics>` results. With
# ``torch.use_deterministic_algorithms(True)`` they had :bound:`1 <atomics.off>`. But a race only
# picks the order. Why does the order matter?
#
# Each addition rounds
# --------------------
#
# A float32 has 24 significant bits. From 2²⁴ = 16,777,216 to 2²⁵ it holds the even numbers alone,
# so the addition 2²⁴ + 1 rounds to 2²⁴. Five numbers are enough to see what that does to a sum.
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
    ax.plot([x0, middle, x1], [y0, top, y1], "C0", zorder=1)
    ax.plot(middle, top, "C0o" if is_exact else "C1s", ms=5 if is_exact else 9)
    words = f"{total:,.0f}   " if is_exact else f"{total:,.0f}, rounded   "
    ax.text(middle, top, words, ha="right", size=9)
    return middle, top, total, place


# %%

figure, axes = plt.subplots(2, 1, figsize=(4.6, 3.8))
figure.set_label(
    "Two trees of additions over 16,777,216 and four ones. Largest first, each addition "
    "is rounded and the sum is 16,777,216. Smallest first, none is: 16,777,220."
)
for ax, (name, tree) in zip(axes, trees.items(), strict=True):
    draw(ax, tree, 0)
    ax.set_title(f"{name}: orange nodes are rounded" if name == "largest first" else name)
    ax.set_xlim(-1.5, 4.6)
    ax.axis("off")
plt.show()

# %%
# Largest first, each addition loses its one. Smallest first, the ones meet before they meet the
# large number, and nothing is lost. The sums differ by four.
#
# Is that the cause for our 8192 numbers? Then the order must not matter where no addition rounds.
# So we snap each number to a multiple of 1/1024 before we add. A partial sum is then a multiple of
# 1/1024, too, and smaller than Σ\|x\| < 2¹⁴: 14 bits before the binary point and 10 behind it fit
# into 24. The 128 orders stay as they were.

snapped = np.round(orders * 1024) / 1024
print(f"Σ|x| = {np.abs(snapped[0]).sum():.0f} < {2**14}")
print("different results:", distinct_bits(np.sum(snapped, axis=1)))

# %%
# One result. The orders are different and no addition rounds, so it was the rounding.
#
# Cancellation decides how much it matters
# ----------------------------------------
#
# Large terms that cancel leave a small sum, and the roundings of the large partial sums stay in it.
# The condition number Σ\|x\| / \|Σx\| measures that. It is 1 where all terms have one sign, and
# large where the terms nearly cancel. We draw 40 lists of 8192 normal numbers and add a constant to
# each list: the larger the constant, the less cancels. The error is that of the worst of 128
# orders, in :ref:`ULP <ulp>`, units in the last place of the exact sum.

points = []
for seed, shift in product(range(40), (0, 0.03, 0.3)):
    values = (draw_values("normal", 8192, seed) + shift).astype(np.float32)
    sums = np.sum(arrange(values, draw_orders(8192)), axis=1)
    error = judge(sums, exact_sum(values), np.float32)["error ulp"]
    points.append({"shift": shift, "condition": condition(values), "ULP": error})
points = pd.DataFrame(points)

# %%

figure, ax = plt.subplots(figsize=(5.2, 3.0))
figure.set_label(
    "Worst error of 128 orders in ULP against the condition number, both on logarithmic "
    "axes. The error grows in proportion to the condition number, and stays below a bound."
)
for shift, group in points.groupby("shift"):
    ax.loglog(group["condition"], group["ULP"], "o", ms=4, label=f"normal + {shift:g}")
ends = np.array([points["condition"].min(), points["condition"].max()])
ax.loglog(ends, numpy_depth(8192) * ends, "C3--", lw=1, label="bound")
ax.set_xlabel("condition number")
ax.set_ylabel("worst error (ULP)")
ax.set_title("Cancellation makes the error")
ax.legend(fontsize=8)
plt.show()

# %%
# The error grows with the condition number, over three decades. That is a tendency: a list may be
# far below it. The dashed line is certain: no error exceeds the condition number times the depth of
# the tree, which is 24 for ``np.sum`` of 8192 numbers. Our first list cancels more than most of the
# 40, and its worst sum is :bound:`94 <np.sum.error>` ULP off. Positive numbers do not cancel. The
# worst sum of 8192 *pareto* numbers, which are positive with a heavy tail, is
# :bound:`1.3 <pareto.error>` ULP off.
#
# Now the whole grid: 2 to 8192 numbers, four types, 128 orders, and three kinds of numbers:
# *normal*, *pareto* and *spikes*, where every 128th number is 100 and the rest −0.0001. We take
# three statistics: the *sum*, the *mean*, and the *normalisation* of a layer norm,
# (x − mean) / (sd + 10⁻⁶). Numbers of float16 and bfloat16 are added in float32, and the result is
# rounded back. The *spread* is the highest minus the lowest of 128 results, as it is and not in
# ULP. The table has the largest spread of all sizes.

rows = []
for name, dtype, size in product(DISTRIBUTIONS, DTYPES, [2**k for k in range(1, 14)]):
    values = round_to(draw_values(name, 8192)[:size], dtype)
    arranged = arrange(values, draw_orders(size))
    means, sd = moments(arranged)  # of each order
    scaled = (np.sort(values) - means[:, None]) / (sd[:, None] + 1e-6)
    spread = np.ptp(mean(arranged, dtype))
    found = {
        "sum": spread * size,  # exact: each size is a power of two
        "mean": spread,
        "normalisation": np.ptp(round_to(scaled, dtype), axis=0).max(),
    }
    case = {"numbers": name, "type": dtype, "size": size}
    rows += [{"statistic": key, **case, "spread": found[key]} for key in found]

spreads = pd.DataFrame(rows)
summary = spreads.pivot_table("spread", ["statistic", "numbers"], "type", "max", sort=False)
summary.map("{:.1e}".format)

# %%
# Does the spread grow with the size? The plot has the normal numbers, without spreads of zero.

figure, axes = plt.subplots(1, 3, figsize=(8, 2.8), sharey=True)
figure.set_label(
    "Spread of 128 orders against the number of values, on logarithmic axes. That of a sum "
    "grows with the size, those of mean and normalisation hardly. float64 lies far below float32."
)
normal = spreads[(spreads["numbers"] == "normal") & (spreads["spread"] > 0)]
for ax, statistic in zip(axes, ("sum", "mean", "normalisation"), strict=True):
    chosen = normal[normal["statistic"] == statistic]
    for number, dtype in enumerate(DTYPES):
        line = chosen[chosen["type"] == dtype]
        ax.loglog(line["size"], line["spread"], f"C{number}o-", ms=4, label=dtype)
    ax.set_xscale("log", base=2)
    ax.set_title(statistic)
    ax.set_xlabel("numbers added")
axes[0].set_ylabel("spread of 128 orders")
axes[2].legend(fontsize=8)
plt.show()

# %%
# A sum's spread grows with the size. The mean divides it by the size, and its line is nearly flat.
# The type matters most: float64 has 53 significant bits, 29 more than float32, and its lines lie
# far below.
#
# A mean in float16 or bfloat16 has no spread here: rounding back hides what float32 lost. Sometimes
# it makes it larger. A normalised value between 1 and 2 moves by a whole ULP of float16, 2⁻¹⁰,
# when its orders lie on either side of the middle between two float16 numbers.
#
# What helps, and what it costs
# -----------------------------
#
# Fewer roundings help. In a loop a number passes through up to 8191 additions. ``np.sum`` cuts the
# list in halves and adds these first (pairwise summation): a number passes through at most 24.
#
# Smaller roundings help more. In float64 each is 2²⁹ times smaller, and rounding to float32, the
# last step, hides them.
#
# The guarantee is no rounding. The float32 numbers of one sign and one exponent are multiples of
# one unit, each below 2²⁴ units, and float64 holds all whole numbers up to 2⁵³. So it adds 2²⁹ of
# them without rounding. :func:`~roundoff.reductions.binned` keeps such a sum, a *bin*, for each
# sign and exponent, adds the bins exactly, and rounds once [#neal]_.

methods = {
    "a loop": sequential,
    "np.sum": partial(np.sum, axis=1),
    "np.sum in float64": partial(np.sum, axis=1, dtype=np.float64),
    "binned": binned,
}
rows = []
for method, add in methods.items():
    row, right = {"method": method}, 0
    for name in DISTRIBUTIONS:
        values = draw_values(name, 8192).astype(np.float32)
        sums = add(arrange(values, draw_orders(8192))).astype(np.float32)
        row[name] = distinct_bits(sums)
        right += np.count_nonzero(sums == np.float32(float(exact_sum(values))))
    rows.append(row | {"right": f"{right} of {3 * 128}"})
counts = pd.DataFrame(rows).set_index("method").rename_axis(None)
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
# *right* counts the sums that are the exact one, rounded to float32. In float64 all are right. That
# is no guarantee: numbers of very different size break float64.

for order in [2.0**60, 1.0, -(2.0**60)], [2.0**60, -(2.0**60), 1.0]:
    hard = np.array(order, np.float32)
    print("in float64:", np.sum(hard, dtype=np.float64), " binned:", binned(hard))

# %%
# 2⁶⁰ + 1 needs 61 bits, and float64 has 53. ``binned`` is right in both orders.
#
# .. _price-of-a-sum:
#
# What does it cost? We add 2¹⁸ float32 numbers on one core of the machine that built this page. A
# line has the time over that of ``np.sum`` in float32, and its 95 % interval.

large = draw_values("normal", 2**18).astype(np.float32)
calls = {"np.sum": partial(np.sum, large), "binned": partial(binned, large)}
calls["np.sum in float64"] = partial(np.sum, large, dtype=np.float64)
prices = measure(calls, budget_s=0.5, min_rounds=5).ratios("np.sum")
for price in prices.itertuples():
    print(f"{price.label:18}{price.ratio:5.1f}  ({price.low:.1f} to {price.high:.1f})")

# %%
# ``binned`` costs several times what float64 does. PyTorch pays more for float64 than NumPy. It
# first writes a copy in float64, which takes 8 bytes for each number, and so moves 20 bytes instead
# of 4 [#torch]_. On one core of the H200's host its float64 sum is
# :bound:`slower <float64.torch>`: in both of two runs it took at least :bound:`10 <float64.torch>`
# times as long as its float32 sum.
#
# On a GPU :func:`~roundoff.kernels.binned.sum_binned` gives the bits of ``binned``. On an H100 it
# takes :bound:`1.3 <binned.gpu>` times as long as ``torch.sum`` for 2²⁶ float32 numbers.
#
# Use float64 where a rare exception does no harm. Use ``binned`` where the bits must agree always:
# between two machines, in a test, in a checksum. Use neither where a result that differs in its
# last digits is good enough.

# %%
# Your own numbers
# ----------------
#
# Put in a list, an array or a tensor of floating-point numbers, of any shape, and run this cell
# after the imports.

mine = draw_values("normal", 1000).astype(np.float32)  # or [0.1, 0.2], or np.load("mine.npy")

if isinstance(mine, torch.Tensor):
    mine = mine.detach().cpu()
    # NumPy has no bfloat16. float32 holds all its numbers.
    mine = mine.float().numpy() if mine.dtype == torch.bfloat16 else mine.numpy()
exact = binned(mine, axis=None)  # the exact sum, rounded once
values = np.ravel(np.asarray(mine, exact.dtype))
shuffled = [np.random.default_rng(seed).permutation(values) for seed in range(8)]
print(f"{values.size} numbers of {values.dtype}, their sum is {exact!s}")
for dtype in dict.fromkeys([exact.dtype, np.dtype(np.float64)]):
    with np.errstate(over="ignore", invalid="ignore"):  # of infinities
        sums = np.array([np.sum(order, dtype=dtype) for order in shuffled]).astype(exact.dtype)
    print(f"added in {dtype}, different sums of 8 orders: {distinct_bits(sums)},")
    print(f"    from {sums.min()!s} to {sums.max()!s}")
if exact.dtype == np.float64:
    print("These numbers are float64 already: where the sums differ, the cure is binned.")

# %%
# Limits, and what to read next
# -----------------------------
#
# * The same in every order may still be wrong. The spikes, added one by one in bfloat16, give
#   :bound:`6208 <stagnation>` in all 128 orders. Their exact sum is
#   :bound:`6399 <stagnation.exact>`.
# * A product of matrices is a sum, too, and picks its order by shape: :ref:`batch-invariance`. So
#   does a sum over several GPUs: :ref:`all-reduce-order`.
# * There is a cheaper guarantee: a sum that keeps the highest bins alone has the same bits in every
#   order and a small error [#demmel]_.
# * The question, the kinds of numbers and the statistics come from a page of onnx-diagnostic
#   [#study]_.
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
