r"""
.. _long-sum:

Why is a long sum in float32 wrong?
===================================

Add 0.1 a million times in float32. The sum is not near 100,000.

.. answer:: MACHINE

   **Why.** The larger the sum, the wider the gaps between float32 numbers, and every addition
   rounds to one of them. The sum of a million times 0.1 is :bound:`0.96 % <drift>` too large.

   **The cure.** Add in float64, and round once at the end.

   **The price.** None that matters here: the numbers stay float32, the one sum is float64.
"""

# %%
# This page is the one to copy: replace each paragraph by yours, and keep the order. Every cell runs
# on a laptop in seconds, after the imports and the cells before it. The bold number was measured by
# the study behind the page, and leads to its evidence at the end.

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

# %%
# The puzzle
# ----------
#
# Show the surprise in ten lines that print. ``np.cumsum`` adds one number after another.

numbers = np.full(1_000_000, 0.1, np.float32)
sums = np.cumsum(numbers)

for count in 1_000, 100_000, 1_000_000:
    print(f"{count:9,} numbers: {sums[count - 1]:12,.3f}, expected {count / 10:10,.1f}")

# %%
# A thousand numbers have the right sum. The sum of a million is wrong by almost a hundredth.
#
# It is not the number 0.1
# ------------------------
#
# Refute the explanation that most people give. No binary number is 0.1, so float32 has a neighbour
# of it, and that error repeats in each addition. We multiply it by a million.

print("error of one 0.1:", float(numbers[0]) - 0.1)
print("a million times: ", 1_000_000 * (float(numbers[0]) - 0.1))
print("error of the sum:", float(sums[-1]) - 100_000)

# %%
# The neighbour explains a thousandth of one. The error is almost a thousand.
#
# Each addition rounds to a gap
# -----------------------------
#
# Show that the cause is the cause. Between 65,536 and 131,072 two float32 numbers are 1/128 apart.
# We add 0.1 to one of them.

large = np.float32(100_000)
print("gap:      ", np.spacing(large))
print("0.1 added:", large + np.float32(0.1) - large)

# %%
# An addition of 0.1 adds 0.1015625, which is thirteen gaps. Draw the mechanism: each stroke is a
# float32 number, and the arrow ends between two of them.

figure, ax = plt.subplots(figsize=(8, 1.4))
figure.set_label("Float32 numbers above 100,000 as strokes; 100,000.1 lies between two of them.")
ax.eventplot(np.arange(16) * float(np.spacing(large)), lineoffsets=0, linelengths=0.6)
ax.annotate("", (0.1, 0.5), (0, 0.5), arrowprops={"arrowstyle": "->"})
ax.annotate("0.1", (0.05, 0.6), ha="center")
ax.plot(0.1015625, 0, "C1o")
ax.set(ylim=(-0.5, 1), yticks=[], xlabel="distance from 100,000")
plt.show()

# %%
# The sum goes to the dot. If rounding is the cause, a number that is a multiple of every gap must
# give no error. 0.125 is one.

eighths = np.cumsum(np.full(1_000_000, 0.125, np.float32))
print("a million times 0.125:", eighths[-1])

# %%
# The sum is exact.
#
# How much it matters
# -------------------
#
# Show the study's smallest case: a data frame at the end of a cell is a table.

rows = []
for number in 0.1, 0.125, 0.3:
    total = np.cumsum(np.full(1_000_000, number, np.float32))[-1]
    rows.append({"number": number, "sum": total, "error %": 100 * (total / 1e6 / number - 1)})
pd.DataFrame(rows).round(3)

# %%
# The sign of the error depends on the number. The picture has the error of the sum of 0.1 as it
# grows.

figure, ax = plt.subplots(figsize=(4.6, 2.6))
figure.set_gid("answer")  # the site shows it beside the answer
figure.set_label("Error of the sum of 0.1 in percent, against the count: near zero, then growing.")
count = np.arange(1_000, 1_000_001, 1_000)
ax.plot(count, 100 * (sums[count - 1] / (count / 10) - 1))
ax.set_xlabel("numbers added")
ax.set_title("Error of the sum in percent")
plt.show()

# %%
# The cure
# --------
#
# Show what to type, and what it costs. In float64 the gap at 100,000 is 2²⁹ times smaller.

print("float64:", np.cumsum(numbers, dtype=np.float64)[-1])
print("np.sum: ", np.sum(numbers))

# %%
# ``np.sum`` adds in a tree, not one after another, and so has no long running sum. It needs no
# float64 here.
#
# Your own numbers
# ----------------
#
# A cell that needs the imports alone, for something that the reader has.

mine = np.full(10_000, 0.3, np.float32)  # or np.load("mine.npy")

loop, exact = np.cumsum(mine)[-1], np.sum(mine, dtype=np.float64)
print(f"one after another {loop}, in float64 {exact}, off by {100 * (loop / exact - 1):.3g} %")

# %%
# Limits, and what to read next
# -----------------------------
#
# * The same number repeats the same rounding. The roundings of different numbers partly cancel.
# * Next: :ref:`reduction-order`, where the same numbers are added in many orders.
