r"""
.. _reduction-order:

Why does the order of a sum change the result?
==============================================

Shuffle a list of numbers and add it again: the last digits of the sum change. No number was lost.

.. answer:: nvidia-h100-80gb-hbm3

   **Why.** An addition can round, and a different order rounds different partial sums. ``np.sum``
   added the same 8192 normal float32 numbers in 128 orders, and gave :bound:`27 <np.sum>` different
   sums.

   **The cure.** Add in float64, then round the sum to float32: all 128 orders then give one sum,
   correctly rounded. Where sizes differ much, float64 can fail; ``binned`` always gives the exact
   sum, rounded once. On a GPU, ``sum_binned`` does so for float32, and costs less than float64.

   **The price.** On one core, float64 takes :bound:`2.3 <float64.time>` times as long as float32 in
   ``np.sum``, and :bound:`about 13 <float64.torch>` times in ``torch.sum``. The exact ``binned``
   takes :bound:`13 <binned.time>` times as long as ``np.sum`` in float32. On a GPU, float64 takes
   :bound:`5.4 <float64.gpu>` times as long as float32 in ``torch.sum``, and ``sum_binned`` takes
   :bound:`1.3 <binned.gpu>` times.

   .. code-block:: python

      x.sum(dtype=np.float64).astype(x.dtype)  # a NumPy array
      x.sum(dtype=torch.float64).to(x.dtype)  # a PyTorch tensor
      roundoff.reductions.binned(x, axis=None)  # the same bits in every order, guaranteed
      from roundoff.kernels.binned import sum_binned
      sum_binned(x)  # a float32 tensor on a GPU: the bits of binned
"""

# %%
# Every cell runs on a laptop in seconds. The bold numbers were measured on an H100 or on its host's
# processor. Each bold number links to its evidence.

import math
from functools import partial
from itertools import product

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

import roundoff.reductions as reductions
from roundoff.reductions import arrange, binned, distinct_bits, draw_orders, draw_values
from roundoff.timing import measure

# %%
# One list, many sums
# -------------------
#
# We draw 8192 numbers from a normal distribution and round them to float32. Then we add them in 128
# orders: as drawn, ascending (from the most negative to the largest), descending, and shuffled 125
# times. The line *exact* is the truth: all 8192 numbers added as fractions, without rounding.

x = draw_values("normal", 8192).astype(np.float32)
orders = arrange(x, draw_orders(8192))  # one order a row
sums = np.array([np.sum(order) for order in orders])

for name, place in ("as drawn", 0), ("ascending", 1), ("shuffled", 3):
    print(f"{name:15}{sums[place]:.6f}")
print("different results:", distinct_bits(sums))
print(f"{'exact':15}{float(reductions.exact_sum(x)):.6f}")

# %%
# Each line adds the same numbers. The sums agree in about five digits, and none of these three is
# the exact sum.
#
# These threads do not race
# -------------------------
#
# The usual explanation is a race: threads finish at different times, so each run adds in a
# different order. If races were the cause, several threads would find several sums of one array. We
# let PyTorch add a million numbers a hundred times, with one thread and with more. *different*
# counts the different sums of the hundred runs.

million = torch.from_numpy(draw_values("normal", 2**20).astype(np.float32))
usual = torch.get_num_threads()
for threads in 1, 2, 4:
    torch.set_num_threads(threads)
    runs = np.array([million.sum().item() for _ in range(100)])
    print(f"threads: {threads}  sum: {runs[0]:.6f}  different: {distinct_bits(runs)}")
torch.set_num_threads(usual)

# %%
# Each number of threads gives one sum in every run, to the last bit. So these threads do not race.
# But another number of threads cuts the array elsewhere, and so adds in another order. On the
# H100's host we added 2²² numbers with 2, 4, 8, 16, 32 and 64 threads: all :bound:`6 <threads>`
# sums differ from the sum of one thread.
#
# A GPU can repeat its sum, too: on the H100 ``torch.sum`` of our 8192 numbers gave
# :bound:`1 <repeats>` result in 128 runs. Some operations do race: ``index_add_`` adds in whatever
# order its threads arrive. It added our numbers into one place, and 128 runs gave
# :bound:`about 100 <atomics>` results. With ``torch.use_deterministic_algorithms(True)`` the runs
# gave :bound:`1 <atomics.off>` result. But a race only picks the order. Why does the order matter?
#
# An addition can round
# ---------------------
#
# A float32 has 24 significant bits. Between 2²⁴ = 16,777,216 and 2²⁵ it holds only even numbers,
# so the addition 2²⁴ + 1 rounds to 2²⁴. Five numbers are enough to see what that does to a sum.
# Each tree adds them in one order, from the left. A node shows the float32 sum of the two numbers
# below it.

lists = {
    "largest first: orange nodes are rounded": [2.0**24, 1, 1, 1, 1],
    "smallest first: no node is rounded": [1, 1, 1, 1, 2.0**24],
}
figure, axes = plt.subplots(2, 1, figsize=(4.6, 3.4))
figure.set_label("Two trees of additions. " + "; ".join(lists))
for ax, (title, numbers) in zip(axes, lists.items(), strict=True):
    total, place = np.float32(numbers[0]), 0.0
    for i in range(1, 5):
        wanted = float(total) + numbers[i]  # float64 holds this sum
        total = total + np.float32(numbers[i])
        left, place = place, (place + i) / 2
        ax.plot([left, place, i], [i - 1, i, 0], "C0", zorder=1)
        ax.plot(place, i, "C0o" if float(total) == wanted else "C1s", ms=7)
        ax.text(place, i, f"{total:,.0f}    ", ha="right", size=9)
    for i in range(5):
        ax.text(i, -0.5, f"{numbers[i]:,.0f}", ha="center", size=9)
    ax.set(title=title, xlim=(-1.5, 4.6))
    ax.axis("off")
plt.show()

# %%
# Largest first, every 1 is lost. Smallest first, the ones are added up before they meet the large
# number, and nothing is lost. The sums differ by four.
#
# Is rounding the cause for our 8192 numbers, too? Then the order must not matter where no addition
# rounds. So we snap each number to a multiple of 2⁻ᵏ before we add, and keep the 128 orders. Every
# partial sum is then a multiple of 2⁻ᵏ. No partial sum exceeds Σ\|x\|, which is below 2¹³. So a
# partial sum has at most 13 bits before the binary point, and k bits after it. For k = 11 these
# are 24 bits, and no addition rounds. A finer grid needs more bits.

print(f"Σ|x| = {np.abs(x).sum():.0f} < {2**13}")
for k in 11, 14, 20, 24:
    snapped = np.round(orders * 2.0**k) / 2.0**k
    sums = np.sum(snapped, axis=1)
    print(f"multiples of 2^-{k}, different results: {distinct_bits(sums)}")

# %%
# With k = 11 no addition rounds, and all orders have one result. On finer grids additions round,
# and different results return. So rounding is the cause.
#
# Cancellation decides how much it matters
# ----------------------------------------
#
# Large terms can cancel and leave a small sum. The partial sums on the way were large, and their
# roundings stay. The condition number Σ\|x\| / \|Σx\| measures cancellation: it is 1 where all
# terms have one sign, and large where the terms nearly cancel. We draw 40 lists of 8192 normal
# numbers and add a constant to each list: the larger the constant, the less cancels. We plot the
# worst error of the shuffled orders, and of the two sorted orders. Errors are in :ref:`ULP <ulp>`:
# units in the last place of the exact sum.

points = []
for seed, shift in product(range(40), (0, 0.03, 0.3)):
    values = (draw_values("normal", 8192, seed) + shift).astype(np.float32)
    sums = np.sum(arrange(values, draw_orders(8192)), axis=1)
    exact = reductions.exact_sum(values)
    shuffled = reductions.judge(sums[3:], exact, np.float32)["error ulp"]
    ordered = reductions.judge(sums[1:3], exact, np.float32)["error ulp"]
    points.append([reductions.condition(values), shuffled, ordered])
points = pd.DataFrame(points, columns=["condition", "shuffled", "sorted"])

# %%

figure, ax = plt.subplots(figsize=(5.2, 2.6))
figure.set_label(
    "Worst error in ULP against the condition number, for shuffled and for sorted orders. "
    "Both grow with the condition number. Where much cancels, sorted orders are worse."
)
for kind, marker in ("sorted", "C1s"), ("shuffled", "C0o"):
    ax.loglog(points["condition"], points[kind], marker, ms=4, label=kind)
    ax.loglog(points["condition"][0], points[kind][0], "ko", ms=9, mfc="none")
ax.loglog([20, 20000], [1, 1000], "C7--", lw=1, label="condition / 20")
ax.set_xlabel("condition number")
ax.set_ylabel("worst error (ULP)")
ax.set_title("Cancellation makes the error; ringed: our list")
ax.legend(fontsize=8)
plt.show()

# %%
# Both errors grow with the condition number. A rule of thumb for these lists: above a condition
# number of 20, the worst shuffled sum is off by about condition / 20 ULP, within a factor of two.
# Where much cancels, sorted orders are worse: they add negative and positive numbers apart, and at
# the end two sums in the thousands cancel.
#
# Our list is unlucky: of the 40 lists without a constant, only one cancels more. In its worst
# order, ascending, the sum is :bound:`94 <np.sum.error>` ULP off, and in its worst shuffle a third
# of that. Positive numbers do not cancel: with 8192 *pareto* numbers, which are positive and now
# and then very large, the worst sum is :bound:`1.3 <pareto.error>` ULP off.
#
# The type matters more than the length
# -------------------------------------
#
# Do the orders of a longer list differ more? We add 2 to 8192 numbers in 128 orders, in four types.
# Each column's numbers are rounded to its type. float16 and bfloat16 are added in float32, and the
# result is rounded back. The numbers are *normal*, *pareto*, or *spikes*: every 128th is 100, and
# the rest are −0.0001.
#
# Two statistics use the sums: the *mean*, and the *normalisation* (x − mean) / (sd + 10⁻⁶), where
# sd is the standard deviation. A layer norm does nearly the same. The *spread* is the highest minus
# the lowest of the 128 results. We divide the spread of the mean by the mean of \|x\|. The
# normalisation is already divided by sd. The table shows the largest spread over all lengths.

rows = []
lengths = [2**k for k in range(1, 14)]
for name, dtype, length in product(reductions.DISTRIBUTIONS, reductions.DTYPES, lengths):
    values = reductions.round_to(draw_values(name, 8192)[:length], dtype)
    arranged = arrange(values, draw_orders(length))
    means, sd = reductions.moments(arranged)  # of each order
    scaled = (values - means[:, None]) / (sd[:, None] + 1e-6)
    spread = np.ptp(reductions.mean(arranged, dtype))
    spread_scaled = np.ptp(reductions.round_to(scaled, dtype), axis=0).max()
    of_mean = spread / (float(reductions.exact_sum(np.abs(values))) / length)
    case = {"numbers": name, "type": dtype, "length": length}
    rows.append({"statistic": "mean", **case, "spread": spread, "relative": of_mean})
    case |= {"spread": spread_scaled, "relative": spread_scaled}
    rows.append({"statistic": "normalisation", **case})

spreads = pd.DataFrame(rows)
lines = ["statistic", "numbers"]
summary = spreads.pivot_table("relative", lines, "type", "max", sort=False)
summary.rename_axis(columns=None).map("{:.1g}".format)

# %%
# Does the length matter? For three lengths of the normal numbers, the table has the spread of the
# mean, divided by the mean of \|x\|, in two types. The last column is the spread of the float32
# sum, not divided.

means = spreads[(spreads["statistic"] == "mean") & (spreads["numbers"] == "normal")]
by_length = means.pivot(index="length", columns="type", values="relative")
short = by_length.loc[[16, 512, 8192], ["float32", "float64"]].rename_axis(columns=None)
in_float32 = means[means["type"] == "float32"].set_index("length")["spread"]
short["float32, sum"] = in_float32 * in_float32.index
short.map("{:.1g}".format)

# %%
# The type matters more: float64 has 29 bits more than float32, and a spread more than a hundred
# million times smaller. The length matters less: divided by the mean of \|x\|, the spread of
# float32 even falls from 16 to 8192 numbers. The spread of the sum itself grows.
#
# In float16 and bfloat16 the means of all 128 orders are equal: rounding back hides the differences
# in float32. But rounding back can also enlarge a difference. Two float32 results may lie on either
# side of the middle between two float16 numbers. They are then rounded apart, by a whole ULP. So
# the normalisation has ``0.001``: one ULP of a float16 between 1 and 2.
#
# What helps, and what it costs
# -----------------------------
#
# Fewer roundings help. In a loop a number passes through up to 8191 additions. ``np.sum`` adds
# blocks of 128 numbers, each in eight running sums, and joins the sums in pairs (*pairwise
# summation*). A number passes through at most 24 additions. *Neumaier's* sum is a loop, too, but
# collects what each addition lost, and adds these losses at the end.
#
# Smaller roundings help more: in float64 each is 2²⁹ times smaller. float64 adds our three kinds of
# numbers without rounding: all partial sums fit into its 53 bits. So we try a fourth kind, the
# *cubes* of the normal numbers, which float64 must round.
#
# Only a sum without any rounding gives a guarantee. Take the float32 numbers of one sign and one
# exponent. Each is the same unit times a whole number below 2²⁴. float64 holds all whole numbers up
# to 2⁵³, so float64 can add 2²⁹ such numbers without rounding. :func:`~roundoff.reductions.binned`
# keeps such a sum, a *bin*, for each sign and exponent. At the end it adds the bins exactly and
# rounds once [#neal]_.

methods = {
    "a loop": reductions.sequential,
    "np.sum": partial(np.sum, axis=1),
    "Neumaier": reductions.neumaier,
    "float64": partial(np.sum, axis=1, dtype=np.float64),
    "float64, rounded": lambda a: np.sum(a, axis=1, dtype=np.float64).astype(np.float32),
    "binned": binned,
}
kinds = {name: draw_values(name, 8192) for name in reductions.DISTRIBUTIONS}
kinds["cubes"] = kinds["normal"] ** 3

# %%

rows = []
for method, add in methods.items():
    row, right = {"method": method}, 0
    for name, numbers in kinds.items():
        values = numbers.astype(np.float32)
        sums = add(arrange(values, draw_orders(8192)))
        row[name] = distinct_bits(sums)
        wanted = reductions.round_exact(reductions.exact_sum(values), sums.dtype)
        right += np.count_nonzero(sums == wanted)
    rows.append(row | {"right": right})
counts = pd.DataFrame(rows).set_index("method").rename_axis(None)
counts

# %%

figure, ax = plt.subplots(figsize=(4.6, 2.6))
figure.set_gid("answer")  # the site shows it beside the answer
shown = counts["normal"].drop(["Neumaier", "float64"])
figure.set_label("Different results of 128 orders: " + str(shown.to_dict()))
bars = ax.barh(shown.index, shown)
ax.bar_label(bars, padding=3)
ax.invert_yaxis()
ax.margins(x=0.15)
ax.set_title("Different results of 128 orders")
plt.show()

# %%
# The table counts the different results of each kind of numbers. The cell below it draws the figure
# beside the answer. *right* counts how many of the 512 sums (four kinds, 128 orders) are the exact
# sum, rounded once. Most sums of ``np.sum`` are wrong. The float64 sums of the cubes are wrong in
# their last digits. Rounded to float32, all sums are right. The H100's host agrees: float64 gave
# :bound:`1 <float64>` result for each of the first three kinds.
#
# Numbers of very different sizes break float64, and Neumaier's sum, too.

a, b = 2.0**60, 2.0**30
for order in [a, b, 1.0, -a, -b], [a, -a, b, -b, 1.0]:
    hard = np.array(order, np.float32)
    in_float64, compensated = np.sum(hard, dtype=np.float64), reductions.neumaier(hard)
    print(f"in float64: {in_float64}  Neumaier: {compensated}  binned: {binned(hard)}")

# %%
# 2⁶⁰ + 1 needs 61 bits, and float64 has 53. Neumaier's sum adds up the lost parts, 2³⁰ and 1, in
# float32: their sum needs 31 bits, and float32 has 24. ``binned`` is right in both orders.
#
# .. _price-of-a-sum:
#
# What does it cost? We add 2¹⁸ float32 numbers on one core of the machine that built this page.
# Each line shows a method's time divided by that of ``np.sum`` in float32, with its 95 % interval.

large = draw_values("normal", 2**18).astype(np.float32)
tensor = torch.from_numpy(large)
calls = {
    "np.sum": partial(np.sum, large),
    "np.sum, float64": partial(np.sum, large, dtype=np.float64),
    "torch.sum": tensor.sum,
    "torch.sum, float64": partial(tensor.sum, dtype=torch.float64),
    "binned": partial(binned, large),
    "Neumaier": partial(reductions.neumaier, large),
    "math.fsum": lambda: math.fsum(large.tolist()),
}
torch.set_num_threads(1)
prices = measure(calls, budget_s=2, min_rounds=5).ratios("np.sum")
torch.set_num_threads(usual)
for price in prices.itertuples():
    print(f"{price.label:18}{price.ratio:6.1f}  ({price.low:.1f} to {price.high:.1f})")

# %%
# ``math.fsum``, from Python's standard library, is right in every order, too, but takes longer than
# ``binned``. Neumaier's sum, written here with NumPy, also takes longer, and does not guarantee one
# result.
#
# These ratios depend on the processor. On the H100's host ``binned`` took :bound:`13 <binned.time>`
# times as long as ``np.sum``, and ``torch.sum`` in float64 took :bound:`13 <float64.torch>` times
# as long as in float32. On the H200's host ``torch.sum`` in float64 took
# :bound:`10 <float64.torch@nvidia-h200>` times as long, in a second run 17 times.
#
# In float64, ``torch.sum`` first writes a copy of the numbers in float64 [#torch]_. The copy takes
# twice their memory. On the H100, the sum of 2²⁶ numbers takes :bound:`5.4 <float64.gpu>` times as
# long. The copy explains 5 times: for each number PyTorch reads 4 bytes, writes 8 and reads 8, 20
# bytes instead of 4. :func:`~roundoff.kernels.binned.sum_binned` makes no copy. On the H100 it
# takes :bound:`1.3 <binned.gpu>` times as long as ``torch.sum`` in float32.
#
# Where the last digits do not matter, change nothing. Where they do, add narrower types in float64.
# On a GPU, ``sum_binned`` costs less for float32. Use ``binned`` where the bits must always agree:
# between two machines, in a test, in a checksum. For float64 numbers, NumPy's default, use
# ``binned``.

# %%
# Your own numbers
# ----------------
#
# Put in a list, an array or a tensor of floating-point numbers, of any shape, and run this cell
# after the imports. It adds all the numbers in 8 random orders.

mine = draw_values("normal", 1000).astype(np.float32)  # or [0.1, 0.2], np.load("mine.npy")

if isinstance(mine, torch.Tensor):
    mine = mine.detach().cpu()
    if mine.dtype == torch.bfloat16:  # NumPy has none of its own
        mine = reductions.round_to(mine.float(), "bfloat16", storage=True)
    mine = np.asarray(mine)
exact = binned(mine, axis=None)  # the exact sum, rounded once
values = np.ravel(np.asarray(mine, exact.dtype))
shuffled = [np.random.default_rng(seed).permutation(values) for seed in range(8)]
print(f"{values.size} numbers of {values.dtype}, their sum is {exact!s}")
narrow = np.promote_types(exact.dtype, np.float32)
for dtype in dict.fromkeys([narrow, np.dtype(np.float64)]):
    with np.errstate(over="ignore", invalid="ignore"):  # of infinities
        sums = np.array([np.sum(order, dtype=dtype) for order in shuffled])
        sums = sums.astype(exact.dtype)
    right = np.count_nonzero((sums == exact) | (np.isnan(sums) & np.isnan(exact)))
    told = f"{distinct_bits(sums)} different sums of 8 orders, {right} right"
    print(f"added in {dtype}: {told}, from {sums.min()!s} to {sums.max()!s}")
if right < 8:
    print("float64 is not enough for these numbers: the cure is binned.")

# %%
# Limits, and what to read next
# -----------------------------
#
# * One result in every order may still be wrong. The spikes, added one by one in bfloat16, give
#   :bound:`6208 <stagnation>` in all 128 orders. Their exact sum is
#   :bound:`6399.2 <stagnation.exact>`.
# * A product of matrices adds, too, and picks its order by shape: :ref:`batch-invariance`. A sum
#   over several GPUs depends on their number: :ref:`all-reduce-order`.
# * The question, the kinds of numbers and the statistics come from a page of onnx-diagnostic
#   [#study]_.
# * Next: :ref:`layer-norm-discrepancies`, where two runtimes differ for a different reason.
#
# .. [#neal] R. M. Neal, *Fast exact summation using small and large superaccumulators*, 2015,
#    `arXiv:1505.05571 <https://arxiv.org/abs/1505.05571>`_.
# .. [#torch] PyTorch 2.11, `ReduceOpsUtils.h
#    <https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/ReduceOpsUtils.h>`_,
#    ``make_reduction``.
# .. [#study] X. Dupré, `Reproducible parallelized reduction is difficult
#    <https://sdpython.github.io/doc/onnx-diagnostic/dev/auto_technical/plot_parallelized_reduction.html>`_,
#    documentation of onnx-diagnostic.
