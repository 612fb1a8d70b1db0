r"""
.. _which-tolerance:

Which tolerance should I use in assert_close?
=============================================

A test compares two results, and CI fails on a correct one. Raise ``rtol``, and a wrong one passes.

.. answer:: amd-epyc-2-cores

   **Why.** Rounding moves a sum in proportion to its terms, not to its result. Where large terms
   cancel, a result near zero keeps the whole error, and no ``rtol`` covers that. The defaults fail
   :bound:`DD % <alarms.defaults>` of the correct results of twelve small models in float32.

   **The cure.** For one matrix product, allow 2 n u Σ\|a\|\|b\|: no rounding exceeds it. For
   anything else, measure how far two correct results differ on many inputs. Calibrated so,
   :bound:`CC % <alarms.calibrated>` of correct results fail.

   **The price.** The bound costs a second product. A calibration runs both functions on 33 inputs
   or more. A fault smaller than the rounding passes: in float16, :bound:`FF <faults.float16>` of
   21 faults do.

   .. code-block:: python

      # got is to be a @ b, one product in float32
      size = a.double().abs() @ b.double().abs()
      tol = roundoff.tolerance("float32", terms=a.shape[-1])
      assert roundoff.compare.tolerance_used(got, a @ b, size, tol) <= 1
      # anything else: inputs has 33 or more of yours
      found = roundoff.compare.calibrated_tolerance((new(x), old(x)) for x in inputs)
      torch.testing.assert_close(got, expected, rtol=found.rtol, atol=found.atol)
"""

# %%
# Every cell runs on a laptop in seconds. A bold number was recorded on two cores of an AMD EPYC by a
# study of this question. It leads to its evidence at the end of the page.

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from torch.testing import assert_close

from roundoff.compare import calibrated_tolerance, tolerance, tolerance_used
from roundoff.record import read_records

# %%
# A correct result fails, and zeros pass
# --------------------------------------
#
# We multiply two matrices of normal numbers in float32. The result to test is the same product from
# two halves of the inner dimension, added at the end. Fast kernels split a long product in this
# way. We try 100 inputs, and then the same inputs times 2⁻²⁴. We test a result of zeros, too.


def draw(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 1024, generator=generator)
    return x, torch.randn(1024, 64, generator=generator)


def split(x, w):
    return x[:, :512] @ w[:512] + x[:, 512:] @ w[512:]


def passes(got, expected, **tolerances):
    try:
        assert_close(got, expected, **tolerances)
    except AssertionError:
        return False
    return True


# %%

inputs = [draw(seed) for seed in range(100)]
for scale in 1.0, 2.0**-24:
    right = sum(passes(split(scale * x, w), scale * x @ w) for x, w in inputs)
    zeros = sum(passes(torch.zeros(32, 64), scale * x @ w) for x, w in inputs)
    print(f"inputs times {scale:<8.2g} of 100 pass: the split {right}, zeros {zeros}")

# %%
# At the first scale the correct result fails. At the second, an array of zeros passes. A power of
# two changes no significant bit, so the rounding errors are the same share of the result in both
# lines.
#
# In float32 ``assert_close`` allows 10⁻⁵ + 1.3·10⁻⁶ \|expected\|. The first number, ``atol``, has a
# scale of its own. Gradients are often smaller than 10⁻⁵, and then everything passes.
#
# It is not that rtol is too small
# --------------------------------
#
# The usual repair is ``atol=0`` and a larger ``rtol``, which has no scale. How large must it be? We
# take the smallest ``rtol`` that accepts each of 10, 100 and 1000 inputs.


def needed(got, expected):
    return float(((got - expected).abs() / expected.abs()).max())


more = (draw(seed) for seed in range(1000))
rtols = np.array([needed(split(x, w), x @ w) for x, w in more])
for count in 10, 100, 1000:
    print(f"{count:4} inputs need rtol = {rtols[:count].max():.1g}")
wrong = sum(passes(1.01 * (x @ w), x @ w, rtol=rtols.max(), atol=0) for x, w in inputs)
print(f"with the last one, results that are 1 % too large pass: {wrong} of 100")

# %%
# The more inputs, the larger the ``rtol`` that they need. float32 has about seven digits, and an
# ``rtol`` that accepts all of the correct results leaves one digit or two. A result that is 1 % too
# large is wrong in every element, and it passes.
#
# The sum comes back to zero, its error does not
# ----------------------------------------------
#
# We look at the element of the first product that is nearest to zero. It is a sum of 1024 terms. We
# add them one after another in float32, and in float64 to see the error.

x, w = draw(0)
exact = x.double() @ w.double()
row, column = divmod(int(exact.abs().argmin()), 64)
sums = np.cumsum((x[row].double() * w[:, column].double()).numpy())
errors = np.cumsum((x[row] * w[:, column]).numpy()) - sums
print(f"result {sums[-1]:.1e}, error {errors[-1]:.1e}, ratio {abs(errors[-1] / sums[-1]):.1g}")

figure, axes = plt.subplots(2, 1, figsize=(4.8, 3.6), sharex=True)
figure.set_label(
    "Above, the running sum of 1024 terms: it wanders far from zero and ends at zero. "
    "Below, its rounding error, which grows on the way and does not come back."
)
for ax, line, title in zip(axes, (sums, errors), ("running sum", "its error"), strict=True):
    ax.axhline(0, color="0.6", lw=1)
    ax.plot(np.arange(1, 1025), line, "C0" if ax is axes[0] else "C1")
    ax.set_title(title)
axes[1].set_xlabel("terms added")
plt.show()

# %%
# Each addition rounds the running sum as it then is. While the sum is far from zero, its roundings
# are large. The later terms cancel the sum, but not the roundings.
#
# If cancellation is the cause, the effect goes where nothing cancels. We drop the signs of all
# numbers. Terms and roundings keep their sizes.

rows = {"both signs": rtols[:100]}
rows["one sign"] = [needed(split(x.abs(), w.abs()), x.abs() @ w.abs()) for x, w in inputs]
pd.DataFrame(rows).describe().loc[["min", "50%", "max"]].map("{:.1g}".format)

# %%
# The table has the smallest, the median and the largest ``rtol`` that an input needs. With one sign
# all inputs need about the same, a few ε. ε is the gap between 1 and the next float32, 1.2·10⁻⁷.
#
# A bound, where you know the operation
# -------------------------------------
#
# So a tolerance has to grow with the terms. Let S = Σ\|a\|\|b\| be the sum of their magnitudes, n
# their number, and u = ε/2 the largest relative error of one rounding. In any order, a sum of n
# products is within n u S of the exact one [#rump]_. Two such results are within 2 n u S of each
# other. :func:`~roundoff.compare.tolerance` gives n u, and
# :func:`~roundoff.compare.tolerance_used` the difference over 2 n u S: up to 1 is allowed.


def used(got, x, w):
    size = x.double().abs() @ w.double().abs()  # S of each element
    return tolerance_used(got, x @ w, size, tolerance("float32", terms=x.shape[1]))


def tf32(x):
    """Round to 11 of the 24 significant bits."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


for scale in 1.0, 2.0**-24:
    scaled = [(scale * x, w) for x, w in inputs]
    print(f"inputs times {scale:.2g}: part of the bound that is used")
    print(f"  split          at most  {max(used(split(x, w), x, w) for x, w in scaled):.1g}")
    print(f"  zeros          at least {min(used(0 * x @ w, x, w) for x, w in scaled):.0f}")
    print(f"  a term missing at least {min(used(x[:, 1:] @ w[1:], x, w) for x, w in scaled):.0f}")
    print(f"  TF32           at most  {max(used(tf32(x) @ tf32(w), x, w) for x, w in scaled):.1g}")

# %%
# The scale has no effect any more. The split passes. Zeros fail, and so does a product that forgets
# one of its 1024 terms.
#
# No smaller factor of S would do: one chosen sum of 1000 terms has reached
# :bound:`0.999 <sharp.nearest>` of its bound n u S. Tensor cores cut instead of rounding, which
# doubles the bound (``rounding="truncation"``), and there a simulated sum reached
# :bound:`0.998 <sharp>` of it.
#
# But these are the worst sums. Errors of normal numbers partly cancel, and use a thousandth. So an
# error a thousand times larger than rounding can pass, and TF32, with its 11 bits, does.
#
# A calibration, for everything else
# ----------------------------------
#
# A model is no single product, and its bound would be useless. So we measure. For each of 33 inputs
# we take the largest difference, in units of ε (\|b\| + R), where R is the root mean square (RMS)
# of the result. :func:`~roundoff.compare.calibrated_tolerance` extrapolates from these to a
# tolerance that one fresh input in 300 may exceed, and gives it as ``rtol`` and ``atol``.

fixed = draw(0)[1]  # the weights stay, the inputs change
found = calibrated_tolerance((split(x, fixed), x @ fixed) for x, _ in inputs[:33])
print(found)

fresh = [draw(seed)[0] for seed in range(100, 400)]
faults = {
    "none": lambda x: split(x, fixed),
    "0.01 % too large": lambda x: 1.0001 * (x @ fixed),
    "TF32": lambda x: tf32(x) @ tf32(fixed),
    "a term missing": lambda x: x[:, 1:] @ fixed[1:],
}
for fault, run in faults.items():
    failed = sum(not found.allows(run(x), x @ fixed) for x in fresh)
    print(f"fault: {fault:18} fails {failed} of 300")

# %%
# The figure has every element of ten products: how far the two results are apart, over the size of
# the result.

results = [(split(x, fixed).double(), (x @ fixed).double()) for x in fresh[:10]]
apart = torch.stack([(got - expected).abs() for got, expected in results]).flatten()
result = torch.stack([expected.abs() for _, expected in results]).flatten()
edge = np.geomspace(float(result.min()), float(result.max()), 99)
bound = 2 * tolerance("float32", terms=1024) * float((fresh[0].abs() @ fixed.abs()).mean())

# %%

figure, ax = plt.subplots(figsize=(4.8, 3.4))
figure.set_gid("answer")  # the site shows it beside the answer
figure.set_label(
    "Difference of two correct results against the size of the result, on logarithmic axes. "
    "The points do not fall towards small results. The line of a fixed rtol does, and so cuts "
    "through them. The defaults do, too. The calibrated tolerance and the bound lie above them."
)
ax.loglog(result, apart, ".", ms=2, color="0.6")
ax.loglog(edge, 1e-4 * edge, "C1--", label="rtol = 1e-4")
ax.loglog(edge, 1e-5 + 1.3e-6 * edge, "C3:", label="assert_close, defaults")
ax.loglog(edge, found.atol + found.rtol * edge, "C0", label="calibrated")
ax.axhline(bound, color="C2", ls="-.", label="bound 2nu Σ|a||b|")
ax.set_xlabel("size of the result")
ax.set_title("Difference of two correct results")
ax.legend(fontsize=8, loc="lower right")
plt.show()

# %%
# A point above a line fails. The error does not shrink with the result, so a line that does goes
# through the points.
#
# How much it matters
# -------------------
#
# The study ran twelve small models (products, norms, a convolution, attention, a transformer block)
# in PyTorch and in ONNX Runtime, in three types. It held six tolerances against 300 fresh inputs of
# each model, and against 21 faults: a wrong scale, a missing bias, int8 weights, a wrong axis, and
# others. A fault passes where it goes unseen on one of 40 inputs. The fixed ``rtol`` is 10⁻⁴ in
# float32, 10⁻² in float16 and 0.05 in bfloat16.


def recorded(table):
    for record in read_records("plot_which_tolerance"):
        if record.machine == "amd-epyc-2-cores":
            return record.tables[table]
    return pd.DataFrame(columns=["method", "dtype", "failed", "fresh", "caught", "feeds"])


alarms, unseen = recorded("alarms"), recorded("faults")
alarms["rate"] = 100 * alarms["failed"] / alarms["fresh"]
unseen["passes"] = 1.0 * (unseen["caught"] < unseen["feeds"])
shape = {"index": "method", "columns": "dtype", "sort": False}
false_alarms = alarms.pivot_table("rate", aggfunc="mean", **shape)
faults_pass = unseen.pivot_table("passes", aggfunc="sum", **shape)
both = {"correct results that fail (%)": false_alarms, "faults that pass": faults_pass}
table = pd.concat(both, axis=1)
