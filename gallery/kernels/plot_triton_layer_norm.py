r"""
.. _triton-layer-norm:

Which LayerNorm kernel is fastest on my GPU?
============================================

Six implementations, forward and backward: which one to take, and why they differ.

.. answer:: nvidia-h200

   **Why.** LayerNorm does little arithmetic, so memory sets its time. In float16 at 8192 columns,
   roundoff's forward reaches :bound:`96 % <forward.share>` of the rate of a kernel that only reads
   and writes. The backward also adds over all rows, and there the libraries differ more. None of
   the five that we tried is the best at every width.

   **The cure.** For training in float16, take roundoff. At five widths, its backward has at least
   :bound:`1.30 <backward.least>` times the rate of the best library. For the forward alone, take
   roundoff or flash-linear-attention: :bound:`no difference measured <forward.float16>` at 8192
   columns.

   **The price.** Python launches roundoff's kernels, and a launch takes time. At 1024 columns and
   without a CUDA graph, forward plus backward takes :bound:`1.41 <launches>` times as long as
   torch's.

   .. code-block:: python

      from roundoff.kernels import layer_norm
      y = layer_norm(x, x.shape[-1], weight, bias)  # for torch.nn.functional.layer_norm
      y.backward(dy)                                # the same dx, dw and db in every run
"""

# %%
# Every cell runs on a laptop in seconds. A bold number was recorded on an H200 by a study of this
# question: click it for its evidence.

from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch.nn import functional

from roundoff.compare import scaled_error
from roundoff.kernels import interpreting
from roundoff.kernels.baselines import LayerNorm, layer_norms
from roundoff.record import read_records
from roundoff.script import unit_test_going
from roundoff.timing import measure

# %%
# One formula, two durations
# --------------------------
#
# LayerNorm [#ba]_ takes a row, subtracts its mean, divides by its standard deviation, multiplies by
# a weight and adds a bias. Why does it need a kernel of its own? We write these steps in PyTorch,
# one after another, and compare them with PyTorch's kernel. Both run on the processor. The error is
# the largest one against float64, in the :ref:`unit <unit>` of float32: ε times the root mean
# square of the exact result.


def forward(x, w, b, eps=1e-5):
    mean = x.mean(1, keepdim=True)
    centred = x - mean
    rstd = 1 / (centred.square().mean(1, keepdim=True) + eps).sqrt()
    return centred * rstd * w + b, mean, rstd


m, n = 2048, 4096
x, w, b = torch.randn(m, n), torch.rand(n), torch.rand(n)
exact = forward(x.double(), w.double(), b.double())[0]
ways = {
    "one kernel": lambda: functional.layer_norm(x, (n,), w, b),
    "step by step": lambda: forward(x, w, b)[0],
}
for label, call in ways.items():
    print(f"{label:12} largest error {scaled_error(exact, call()).largest:4.1f}")
times = measure(ways, budget_s=1)
ratio = times.ratio("step by step", "one kernel")
print(f"time of the steps over that of one kernel: {ratio}")

# %%
# Both results are right, up to rounding. But the steps take several times as long. Brackets hold a
# 95 % interval.
#
# It is not the arithmetic
# ------------------------
#
# The usual guess is that the steps compute more. But the steps and the kernel both do about eight
# operations for each value.
#
# And eight operations cost little. On the H200 we timed a *stream*, a kernel that reads one tensor,
# writes one and computes nothing. In float16 at 4096 × 8192, roundoff's forward reaches
# :bound:`96 % <forward.share>` of the stream's rate.
#
# Each step crosses the memory
# ----------------------------
#
# One kernel loads a row once, computes in registers, and stores the row once. A step reads its
# whole input from memory and writes its whole output back. The next step reads that output again.
# We draw one square for each time that a tensor crosses the memory.

PASSES = {
    "one kernel": ["rw"],
    # mean, −, square, mean, ·, ·, +
    "step by step": ["r", "rw", "rw", "r", "rw", "rw", "rw"],
}
figure, ax = plt.subplots(figsize=(6, 1.9))
figure.set_label("Tensors that cross the memory: 2 for one kernel, 12 for seven steps.")
for place, steps in enumerate(PASSES.values()):
    at = 0.0
    for step in steps:
        for letter in step:
            color = "C0" if letter == "r" else "C1"
            ax.barh(place, 0.9, left=at, height=0.5, color=color)
            ax.text(at + 0.45, place, letter, ha="center", va="center", color="white")
            at += 1
        at += 0.4
ax.set_yticks(range(2), PASSES)
ax.invert_yaxis()
ax.set(xticks=[], title="Tensors read (r) and written (w)")
plt.show()

# %%
# Twelve squares against two. If these crossings are the cause, then the same steps must take less
# time when their intermediate results stay in the processor's cache. So we run the steps on all
# rows at once (*all rows*), and then on 64 rows at a time (*64 rows*). Both write into buffers that
# exist already. *new memory* is ``forward`` from above, in which each step asks for a new tensor.
# We print the fastest of many calls, as another program on this machine can only make a call
# slower.

y, squares = torch.empty_like(x), torch.empty_like(x)


def by_rows(rows):
    for part, result in zip(x.split(rows), y.split(rows), strict=True):
        torch.sub(part, part.mean(1, keepdim=True), out=result)
        variance = torch.square(result, out=squares[:rows]).mean(1, keepdim=True)
        result.mul_(1 / (variance + 1e-5).sqrt()).mul_(w).add_(b)
    return y


blocks = {"all rows": partial(by_rows, m), "64 rows": partial(by_rows, 64)}
blocks["new memory"] = ways["step by step"]
times = measure(blocks, budget_s=2)
for label, call in blocks.items():
    error, fastest = scaled_error(exact, call()).largest, times.samples[label].min()
    print(f"{label:10} largest error {error:.1f}, {1e3 * fastest:5.1f} ms")

# %%
# The arithmetic is the same, and with 64 rows at a time PyTorch is called 32 times as often. Yet 64
# rows at a time take less time than all rows at once. So what costs is to cross the memory. To ask
# for new memory costs more on top. One kernel does neither.
#
# A backward adds over the rows
# -----------------------------
#
# Training needs three gradients. Let :math:`g` be the gradient of the output,
# :math:`\hat x = (x - \mu)\, r` the normalized row and :math:`v = w\, g`. A bar is a mean over the
# row:
#
# .. math:: dx = r\, \bigl( v - \overline{v} - \hat x\, \overline{v \hat x} \bigr), \qquad
#           dw = \sum_{\text{rows}} g\, \hat x, \qquad db = \sum_{\text{rows}} g.


def backward(dy, x, w, b, mean, rstd):
    xhat, v = (x - mean) * rstd, w * dy
    dx = rstd * (v - v.mean(1, keepdim=True) - xhat * (v * xhat).mean(1, keepdim=True))
    return dx, (dy * xhat).sum(0), dy.sum(0)


# %%
# A backward kernel reads two tensors, :math:`x` and :math:`g`, and writes :math:`dx`. But for
# :math:`dw` and :math:`db` it adds over all rows, and a GPU works on many rows at once. Triton's
# tutorial [#tutorial]_ protects a sum by a lock: the *program* that holds the lock adds next. (A
# program is what Triton runs in parallel.) So the order of the additions changes from run to run,
# and :ref:`an order changes the sum <reduction-order>`. On an H200, a hundred runs with the lock
# gave :bound:`100 <lock>` different :math:`dw`, at 4096 × 4096 in float16.
#
# roundoff adds in two stages. Each program keeps sums of its own in registers, and a second kernel
# adds these in a fixed order. A hundred runs of each of the six implementations below gave
# :bound:`1 <repeat>` result. :ref:`layer-norm-ladder` writes such a backward and makes it fast.
#
# How much it matters
# -------------------
#
# The study ran all implementations in one process, in turns, from CUDA graphs. So a time is time on
# the GPU, without launches. Each call found its tensors outside the cache. *inductor* is
# ``torch.compile``. Liger, QuACK and flash-linear-attention are libraries of GPU kernels. A rate is
# the bytes that a kernel has to move, over its time: three tensors backward, two forward. The
# *ceiling* is the rate of a stream that moves the same bytes. The figure of this cell stands beside
# the answer.


LIBRARIES = ["roundoff", "torch", "inductor", "Liger", "QuACK", "flash-linear-attention"]
NEEDED = ["N", "case", *LIBRARIES, "ceiling", "best", "lead", "lead low", "lead high"]


def recorded(table):
    """A table of the study on the H200; no rows without its record."""
    for record in read_records("plot_triton_layer_norm"):
        if record.machine == "nvidia-h200":
            return record.tables[table]
    return pd.DataFrame(columns=NEEDED)


back = recorded("layer-norm-backward")
back = back[back["N"].isin([1024, 4096, 8192, 8704, 15872])].set_index("N")
figure, ax = plt.subplots(figsize=(4.6, 3.6))
figure.set_gid("answer")  # the site shows it beside the answer
figure.set_label("GB/s of six backwards, at five widths: roundoff is highest at each.")
lines = back[[*LIBRARIES, "ceiling"]].astype(float)
title = "Backward in float16, GB/s"
lines.plot(ax=ax, style=["o-"] * 6 + ["C7--"], xlabel="columns", ylim=0, title=title)
ax.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
plt.show()

# %%
# At each of these widths roundoff's backward has the highest rate: at least
# :bound:`1.30 <backward.least>` and at most :bound:`2.02 <backward.most>` times that of the best
# library. On an H100 it is at least :bound:`1.15 <backward.least@nvidia-h100-80gb-hbm3>` times, and
# 1.12 in the second run. The best library changes with the width: torch at 1024 columns, QuACK at
# 4096, flash-linear-attention at 8704.
#
# What makes the difference? Look at Liger. At 8192 columns its backward moves
# :bound:`2331 <liger.8192>` GB/s, and at 8704 columns :bound:`1168 <liger.8704>`. Liger keeps a row
# in one block of Triton, and the length of a block is a power of two. For 8704 columns that is
# 16,384. :ref:`layer-norm-ladder` shows what so large a block costs, and how to do without.
#
# The next table has three types, at 4096 × 8192. *lead* is roundoff's rate over that of the best
# library. Its 95 % interval goes from *lead low* to *lead high*. Where the interval of one of the
# two runs holds 1, no difference was measured.

parts = []
more = recorded("types")
for way in "forward", "backward":
    half = recorded(f"layer-norm-{way}")
    parts.append(half[half["N"] == 8192].assign(case=f"{way}, float16"))
    parts.append(more[more["case"].str.match(rf"{way}, b?float\d+, 4096 × 8192")])
table = pd.concat(parts).set_index("case").rename_axis(None)
table.index = table.index.str.removesuffix(", 4096 × 8192")
table[["lead", "lead low", "lead high", "best"]].round(2)

# %%
# The forwards are close. In float16, two runs together say
# :bound:`no difference measured <forward.float16>`. In bfloat16 roundoff's forward has
# :bound:`0.97 <forward.bfloat16>` of flash-linear-attention's rate. In float32 the backwards are
# close, too: roundoff's has :bound:`1.04 <backward.float32>` times QuACK's rate.
#
# Which one to take
# -----------------
#
# * **Training in float16 or bfloat16**, on a GPU like an H100 or an H200: roundoff, for its
#   backward. It costs no accuracy. At 4096 × 8192 the typical errors of ``y``, ``dx``, ``dw`` and
#   ``db`` are at most :bound:`1.00 <error.half>` times torch's, and in float32 at most
#   :bound:`0.94 <error>` times.
# * **Inference** with thousands of rows: roundoff or flash-linear-attention, whichever you have
#   installed. We did not measure the few rows of a decode step.
# * **About 1024 columns, without a CUDA graph**: torch. Torch launches its kernels from C++, and
#   roundoff from Python. In float16 at 4096 × 1024, roundoff's forward plus backward takes
#   :bound:`1.41 <launches>` times as long. A CUDA graph, or
#   ``torch.compile(mode="reduce-overhead")``, saves the launches.
# * **Rows of 15,872 columns in float32**: QuACK. Its backward leads on both GPUs.
# * **No GPU**: torch. Triton's interpreter is for tests.
#
# First right, then fast
# ----------------------
#
# The rest runs on the machine that built this page. First come the typical errors: a typical error
# is the root mean square of all errors, in the unit of its type. Without a GPU, roundoff's kernels
# run in Triton's interpreter, and torch's kernels are those for a processor. The interpreter cuts a
# result off to bfloat16, where a GPU rounds. So roundoff's errors in bfloat16 are twice as large
# here as on a GPU.

gpu = torch.cuda.is_available() and not interpreting()
device = "cuda" if gpu else "cpu"
norms, missing = layer_norms(device)


def inputs(m, n, dtype):
    g = torch.Generator(device).manual_seed(n)
    w, b = (torch.rand(n, generator=g, device=device).to(dtype) for _ in range(2))
    x, dy = (torch.randn(m, n, generator=g, device=device) for _ in range(2))
    return (0.5 * x - 2.3).to(dtype), (0.1 * dy).to(dtype), w, b


def attempt(norm, x, dy, w, b):
    """Typical errors of y, dx, dw and db, and the calls that make them."""
    y, *saved = forward(x.double(), w.double(), b.double())
    exact = [y, *backward(dy.double(), x.double(), w.double(), b.double(), *saved)]
    w, b = (t.to(norm.weights or t.dtype) for t in (w, b))
    calls = {"forward": partial(norm.forward, x, w, b, 1e-5)}
    y, *saved = calls["forward"]()
    calls["backward"] = partial(norm.backward, dy, x, w, b, *saved)
    pairs = zip(exact, (y, *calls["backward"]()), strict=True)
    return [scaled_error(e, r.to(x.dtype), dtype=x.dtype).rms for e, r in pairs], calls


# %%

typical = {}
for dtype in torch.float16, torch.bfloat16, torch.float32:
    data = inputs(12, 96, dtype)
    for label, norm in norms.items():
        typical[f"{label}, {str(dtype)[6:]}"] = attempt(norm, *data)[0]
typical = pd.DataFrame(typical, index=["y", "dx", "dw", "db"]).T
typical.round(2)

# %%
# Then come the rates, at the thirty widths of Triton's tutorial, from 1024 to 15,872. On a GPU we
# time 4096 rows in float16, and all kernels that need no compilation for each width. On a processor
# we time 64 rows in float32, PyTorch's kernel and our steps. A kernel is timed
# only where its results are right. An interpreted kernel is not timed, as its time says nothing.

slow = "inductor", "QuACK"  # to compile
timed = {k: v for k, v in norms.items() if k == "torch" or (gpu and k not in slow)}
timed["step by step"] = LayerNorm(forward, backward)


def rates(m, n, dtype):
    data = inputs(m, n, dtype)
    made = {label: attempt(norm, *data) for label, norm in timed.items()}
    for way, tensors in ("forward", 2), ("backward", 3):
        calls = {k: both[way] for k, (errors, both) in made.items() if max(errors) < 16}
        moved = dict.fromkeys(calls, tensors * m * n * dtype.itemsize)
        run = {"bytes": moved, "device": device, "cuda_graph": gpu, "budget_s": 0.05}
        frame = measure(calls, **run).frame.set_index("label")
        yield {"N": n, "way": way} | frame["gb_s"].to_dict()


m, dtype = (4096, torch.float16) if gpu else (64, torch.float32)
widths = range(1024, 15873, 7424 if unit_test_going() else 512)
live = pd.DataFrame([row for n in widths for row in rates(m, n, dtype)])

# %%

figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
figure.set_label("GB/s of forward and backward by columns, on this machine.")
for ax, way in zip(axes, ["forward", "backward"], strict=True):
    lines = live[live["way"] == way].set_index("N").drop(columns="way")
    lines.plot(ax=ax, title=f"{way.capitalize()}, GB/s", xlabel="columns", ylim=0)
plt.show()

# %%
# Tensors of this size may fit into a cache, and then a rate exceeds that of the memory. The study
# takes different tensors at each call.
#
# Your own rows and columns
# -------------------------
#
# Put in a shape and a type. The cell compares every kernel that is installed with float64. On a GPU
# it also times the backwards of those that are right.

ROWS, COLUMNS, DTYPE = 12, 200, torch.float16

device = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
x, dy = (torch.randn(ROWS, COLUMNS, device=device).to(DTYPE) for _ in range(2))
w, b = (torch.rand(COLUMNS, device=device).to(DTYPE) for _ in range(2))
norms, missing = layer_norms(device)
calls, errors = {}, {}
for label, norm in norms.items():
    scale, shift = (t.to(norm.weights or DTYPE) for t in (w, b))
    y, *saved = norm.forward(x, scale, shift, 1e-5)
    calls[label] = partial(norm.backward, dy, x, scale, shift, *saved)
    wide = [t.double().requires_grad_() for t in (x, w, b)]
    exact = functional.layer_norm(wide[0], (COLUMNS,), *wide[1:])
    exact = [exact, *torch.autograd.grad(exact, wide, dy.double())]
    pairs = zip(exact, (y, *calls[label]()), strict=True)
    errors[label] = [scaled_error(e, r.to(DTYPE), dtype=DTYPE).rms for e, r in pairs]
right = {k: v for k, v in calls.items() if max(errors[k]) < 16 and device == "cuda"}
print(pd.DataFrame(errors, index=["y", "dx", "dw", "db"]).T.to_string())
print("not here:", *missing)
if right:
    print(measure(right, device=device, cuda_graph=True).frame.to_string())

# %%
# Limits, and what to read next
# -----------------------------
#
# * Two GPUs were measured, an H100 and an H200, of one generation (Hopper). On another GPU run the
#   cell above.
# * The chart shows kernels whose ``dw`` the study compared with float64 at that width. The table
#   shows kernels whose ``y``, ``dx``, ``dw`` and ``db`` it compared. The study has 35 widths, to
#   131,072 columns, and seven more shapes. At 16,384 columns the backward's lead is smaller, 1.27
#   on the H200 and 1.09 on the H100.
# * The forward was compared with float64 at 8192 columns. At other widths the two forwards are not
#   always equal: at 8704 columns on the H200, flash-linear-attention's leads by a few percent.
# * Apex and Transformer Engine were not measured: their kernels for PyTorch are built from source,
#   with CUDA's compiler.
# * Each rate is that of the first of two runs. The evidence has the second one, too.
# * Next: :ref:`layer-norm-ladder`, for how the backward became fast, and
#   :ref:`layer-norm-discrepancies`, for what two such kernels do to a model.
#
# .. [#ba] \J. L. Ba, J. R. Kiros, G. E. Hinton, *Layer normalization*, 2016, :arxiv:`1607.06450`.
# .. [#tutorial] Triton's tutorial `Layer Normalization
#    <https://triton-lang.org/main/getting-started/tutorials/05-layer-norm.html>`_.
