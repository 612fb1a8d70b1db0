r"""
.. _triton-layer-norm:

Which LayerNorm kernel is fastest on my GPU?
============================================

Six implementations, forward and backward: which one to take, and why they differ.

.. answer:: nvidia-h200

   **Why.** LayerNorm computes little, so memory traffic sets its time. Each backward has to move
   the same three tensors. But Liger, a library, holds a row in a block of 2ⁿ numbers. 8704 columns
   take 16,384: nearly half is padding, and a kernel of this form spills registers. From 8192 to
   8704 columns of float16, Liger's backward falls from :bound:`2331 <liger.8192>` to
   :bound:`1168 <liger.8704>` GB/s.

   **The cure.** For training in float16, take roundoff, which cuts a row into pieces that fit. At
   five widths its backward is at least :bound:`1.3 <backward.least>` times as fast as the best
   library. Its forward is about as fast as the best library's, and at 8192 columns
   :bound:`1.7 <forward.torch>` times as fast as torch's. On an H100 the backward's least lead is
   :bound:`1.15 <backward.least@nvidia-h100-80gb-hbm3>` (second run: 1.12).

   **The price.** Python launches roundoff's kernels, and a launch takes time. At 1024 columns
   without a CUDA graph, its forward plus backward takes :bound:`1.41 <launches>` times torch's
   time.

   .. code-block:: python

      from roundoff.kernels import layer_norm
      y = layer_norm(x, x.shape[-1], weight, bias)  # for torch.nn.functional.layer_norm
      y.backward(dy)                                # the same dx, dw and db in every run
"""

# %%
# Every cell runs on a laptop in seconds. A bold number was recorded on an H200, unless its sentence
# names another GPU: click it for its evidence.

from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
import triton
import triton.language as tl
from torch.nn import functional

from roundoff.compare import scaled_error
from roundoff.kernels import interpreting
from roundoff.kernels.ahead import Compile, compiled_ahead
from roundoff.kernels.baselines import layer_norms
from roundoff.kernels.lessons import kernel, sum_along
from roundoff.record import read_table
from roundoff.script import unit_test_going
from roundoff.timing import measure

# %%
# One task, six speeds
# --------------------
#
# LayerNorm [#ba]_ takes a row, subtracts its mean, divides by its standard deviation, multiplies by
# a weight and adds a bias. Training also needs three gradients. Let :math:`g` be the gradient of
# the output, :math:`r` one over the standard deviation, :math:`\hat x = (x - \mu)\, r` the
# normalized row and :math:`v = w\, g`. A bar is a mean over the row:
#
# .. math:: dx = r\, \bigl( v - \overline{v} - \hat x\, \overline{v \hat x} \bigr), \qquad
#           dw = \sum_{\text{rows}} g\, \hat x, \qquad db = \sum_{\text{rows}} g.


def forward(x, w, b, eps=1e-5):
    mean = x.mean(1, keepdim=True)
    centred = x - mean
    rstd = 1 / (centred.square().mean(1, keepdim=True) + eps).sqrt()
    return centred * rstd * w + b, mean, rstd


def backward(dy, x, w, b, mean, rstd):
    xhat, v = (x - mean) * rstd, w * dy
    dx = rstd * (v - v.mean(1, keepdim=True) - xhat * (v * xhat).mean(1, keepdim=True))
    return dx, (dy * xhat).sum(0), dy.sum(0)


# %%
# A backward kernel has to move three tensors: it reads :math:`x` and :math:`g`, and writes
# :math:`dx`. Its *rate* is the bytes of these three over its time. The study timed six backwards on
# an H200, with 4096 rows of float16. *inductor* is ``torch.compile``. Liger, QuACK and
# flash-linear-attention are libraries of GPU kernels. The *ceiling* is the rate of a *stream*, a
# kernel that moves the same bytes and computes nothing.

LIBRARIES = ["roundoff", "torch", "inductor", "Liger", "QuACK", "flash-linear-attention"]
STUDY = "plot_triton_layer_norm", "nvidia-h200"
back = read_table(*STUDY, "layer-norm-backward", ["N", *LIBRARIES, "ceiling"])
back = back.set_index("N").astype(float)
cliff = back[back.index.isin([8192, 8704])].T
cliff.columns = [f"{n} columns, GB/s" for n in cliff]
cliff.round().astype(int)

# %%
# 8704 columns are only 512 more than 8192. Yet Liger's rate halves, from
# :bound:`2331 <liger.8192>` to :bound:`1168 <liger.8704>` GB/s. QuACK falls, too. roundoff and
# flash-linear-attention hardly change. torch is slow at both widths.
#
# It is not the arithmetic
# ------------------------
#
# The usual guess is that a slow kernel computes more. But LayerNorm computes little. On the H200,
# at 4096 × 8192 in float16, roundoff's forward reaches :bound:`96 % <forward.share>` of the rate of
# a stream.
#
# On a processor we compute one forward in two ways, with the same arithmetic. PyTorch's kernel
# works row by row. Our forward reads and writes all rows in each step. An error is the largest
# against float64, in float32's :ref:`unit <unit>`: ε times the exact result's root mean square.

m, n = 2048, 4096
x, w, b = torch.randn(m, n), torch.rand(n), torch.rand(n)
exact = forward(x.double(), w.double(), b.double())[0]
ways = {
    "one kernel": lambda: functional.layer_norm(x, (n,), w, b),
    "step by step": lambda: forward(x, w, b)[0],
}
times = measure(ways, budget_s=2)
for label, call in ways.items():
    error, fastest = scaled_error(exact, call()).largest, times.samples[label].min()
    print(f"{label:12} largest error {error:.1f}, {1e3 * fastest:5.1f} ms")

# %%
# Both errors are a few units: rounding. With the same arithmetic, the steps take several times as
# long as the kernel.
#
# But Liger's backward, too, is one kernel that works row by row. Why does its rate halve?
#
# A backward adds over the rows
# -----------------------------
#
# :math:`dw` and :math:`db` are sums over all rows. So a *program* (Triton's parallel unit) takes
# many rows, and keeps both sums in registers. Here is such a kernel, of Liger's form. ``P``, the
# length of the *block* that holds a row, has to be a power of two.

C = tl.constexpr  # a constant of the compiler


@kernel
def one_block(X, DY, W, MEAN, RSTD, DX, PART, M, N, P: C):
    program, programs, cols = tl.program_id(0), tl.num_programs(0), tl.arange(0, P)
    here = cols < N
    w = tl.load(W + cols, mask=here, other=0.0).to(tl.float32)
    dw, db = tl.full((P,), 0.0, tl.float32), tl.full((P,), 0.0, tl.float32)
    for row in range(program, M, programs):
        x = tl.load(X + row * N + cols, mask=here, other=0.0).to(tl.float32)
        g = tl.load(DY + row * N + cols, mask=here, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        xhat = tl.where(here, (x - tl.load(MEAN + row)) * rstd, 0.0)
        c1, c2 = sum_along(xhat * w * g, 0) / N, sum_along(w * g, 0) / N
        dx = rstd * (w * g - c2 - xhat * c1)
        tl.store(DX + row * N + cols, dx.to(DX.dtype.element_ty), mask=here)
        dw += g * xhat
        db += g
    tl.store(PART + program * N + cols, dw, mask=here)
    tl.store(PART + (programs + program) * N + cols, db, mask=here)


# %%
# A *spilled* word is one that finds no register: the kernel writes it to memory and reads it back.
# The compiler counts the spilled words of a thread, and needs no GPU for that. We compile for an
# H200, with 8 :term:`warps <warp>` (256 threads), as in the rates below, and with 16, as Liger has.

cases = [(columns, warps) for columns in (8192, 8704) for warps in (8, 16)]
blocks = [triton.next_power_of_2(columns) for columns, _ in cases]
pairs = zip(cases, blocks, strict=True)
launches = [Compile(one_block, warps, {"P": block}) for (_, warps), block in pairs]
taken = pd.DataFrame(compiled_ahead(launches))
taken.index = [f"{columns} columns, {warps} warps" for columns, warps in cases]
taken["row"] = [columns for columns, _ in cases]
taken["padding"] = blocks - taken["row"]

title = "A row in its block, and the words that a thread spills"
ax = taken[["row", "padding"]].plot.barh(stacked=True, figsize=(7, 2.4), title=title, xlim=(0, 2e4))
labels = [f"{words} spilled" for words in taken["spilled"]]
ax.bar_label(ax.containers[1], labels, padding=3)
ax.invert_yaxis()
ax.figure.set_label(f"Spilled words: {taken['spilled'].to_dict()}")
plt.show()

# %%
# At 8192 columns nothing spills. A row of 8704 columns needs a block of 16,384, and nearly half of
# this block is padding. Padding takes registers, too, so a thread spills. With 8 warps, the rate of
# this kernel on the H200 falls from :bound:`2408 <lesson.8192>` to :bound:`1396 <lesson.8704>`
# GB/s. A row of 15,872 columns has the same block, hence the same spills, and little padding. It
# reaches :bound:`1979 <lesson.15872>` GB/s. The fuller block has the higher rate, so padding costs.
# It stays below the rate at 8192 columns, so spills cost.
#
# roundoff's pieces need little padding, and at 8704 columns its rate does not fall. Cut into
# pieces, this kernel spills nothing, and its rate nearly doubles: see :ref:`layer-norm-ladder`. We
# do not know why QuACK (not Triton) falls at 8704 columns, flash-linear-attention at 12,800 and
# 14,848, and roundoff, by a tenth, at 14,848.
#
# How much it matters
# -------------------
#
# The study ran all implementations in one process, in turns. It used
# :term:`CUDA graphs <CUDA graph>`, so a time excludes launches. Each call read its tensors from
# memory. This cell's figure is at the top.

figure, ax = plt.subplots(figsize=(4.6, 3.6))
figure.set_gid("answer")  # the site shows it beside the answer
figure.set_label("GB/s of six backwards, at five widths: roundoff is highest at each.")
lines = back[back.index.isin([1024, 4096, 8192, 8704, 15872])]
lines.index = lines.index.astype(str)  # evenly spaced, to part 8192 from 8704
title = "Backward in float16 on an H200, GB/s"
lines.plot(ax=ax, style=["o-"] * 6 + ["C7--"], xlabel="columns", ylim=0, title=title)
ax.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
plt.show()

# %%
# At each of these widths roundoff's backward has the highest rate: in the first run
# :bound:`1.3 <backward.least>` to :bound:`2.0 <backward.most>` times the best library's. The best
# library changes with the width: torch at 1024 columns, QuACK at 4096, flash-linear-attention at
# 8704.
#
# The next table adds bfloat16 and float32, at 4096 × 8192. *lead* is roundoff's rate over that of
# the best library. Its 95 % interval goes from *lead low* to *lead high*.

types = read_table(*STUDY, "types", ["case", "lead", "lead low", "lead high", "best"])
types = types.set_index("case").rename_axis(None)
types[types.index.str.contains("float.*, 4096 × 8192")].round(2)

# %%
# roundoff's forward in float16 has at least :bound:`0.97 <forward.least>` of the best library's
# rate at the five widths. At 8192 columns there is
# :bound:`no difference measured <forward.float16>` on the H200: the interval of each run holds 1.
# In bfloat16 roundoff's forward has :bound:`0.97 <forward.bfloat16>` of flash-linear-attention's
# rate.
#
# Which one to take
# -----------------
#
# * **Training in float16 or bfloat16**, on an H100 or an H200: roundoff, for its backward. (In
#   bfloat16 only 8192 columns were timed.) Accuracy is no price: at 4096 × 8192 the typical errors
#   of ``y``, ``dx``, ``dw`` and ``db`` are at most :bound:`1.00 <error.half>` times torch's.
# * **Training in float32** at 8192 columns: roundoff. Its backward has
#   :bound:`1.04 <backward.float32>` times QuACK's rate, and its errors are at most
#   :bound:`0.94 <error>` times torch's. At 15,872 columns: QuACK. Its backward leads on both GPUs.
# * **Inference** with thousands of rows: roundoff or flash-linear-attention. Neither leads at every
#   width. We did not measure the few rows of a decode step.
# * **About 1024 columns, without a CUDA graph**: torch. Torch launches its kernels from C++, and
#   roundoff from Python. In float16 at 4096 × 1024, roundoff's forward plus backward takes
#   :bound:`1.41 <launches>` times as long. A CUDA graph, or
#   ``torch.compile(mode="reduce-overhead")``, saves the launches.
# * **The same bits in every run**: any of the six. In 100 runs each gave :bound:`1 <repeat>`
#   result. Triton's tutorial [#tutorial]_ adds under a lock: with a barrier added, 100 runs at 4096
#   × 4096 gave :bound:`100 <lock>` different ``dw``.
# * **No GPU**: torch. Triton's interpreter is for tests.
#
# Each kernel against float64
# ---------------------------
#
# The rest runs on the machine that built this page. The table has typical errors, the root mean
# square of all errors, in the unit of the type. Without a GPU, Triton's interpreter runs roundoff's
# kernels. It truncates to bfloat16 where a GPU rounds, so roundoff's errors in bfloat16 are twice a
# GPU's.


def inputs(m, n, dtype):
    g = torch.Generator(device).manual_seed(n)
    w, b = (torch.rand(n, generator=g, device=device).to(dtype) for _ in range(2))
    x, dy = (torch.randn(m, n, generator=g, device=device) for _ in range(2))
    return (0.5 * x - 2.3).to(dtype), (0.1 * dy).to(dtype), w, b


def typical_errors(norm, x, dy, w, b):
    y, *saved = forward(x.double(), w.double(), b.double())
    exact = [y, *backward(dy.double(), x.double(), w.double(), b.double(), *saved)]
    w, b = (t.to(norm.weights or t.dtype) for t in (w, b))  # QuACK's weights are float32
    y, *saved = norm.forward(x, w, b, 1e-5)
    pairs = zip(exact, (y, *norm.backward(dy, x, w, b, *saved)), strict=True)
    return [scaled_error(e, r.to(x.dtype), dtype=x.dtype).rms for e, r in pairs]


# %%

device = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
norms, missing = layer_norms(device)
typical = {}
for dtype in torch.float16, torch.bfloat16, torch.float32:
    data = inputs(12, 96, dtype)
    for label, norm in norms.items():
        typical[f"{label}, {str(dtype)[6:]}"] = typical_errors(norm, *data)
typical = pd.DataFrame(typical, index=["y", "dx", "dw", "db"]).T
typical.round(2)

# %%
# The last figure has the rates of the backward on this machine. On a GPU the cell times 4096 rows
# of float16 at the thirty widths of Triton's tutorial, in each correct kernel that compiles
# quickly. On a processor the time of an interpreted kernel says nothing. There the cell times 256
# rows of float32 at eight widths, with PyTorch's kernel and step by step.

gpu = device == "cuda"
rows, dtype = (4096, torch.float16) if gpu else (256, torch.float32)
slow = "inductor", "QuACK"  # to compile, at each width
timed = {k: v for k, v in norms.items() if k == "torch" or (gpu and k not in slow)}


def rates(n):
    """GB/s of each backward at n columns."""
    x, dy, w, b = inputs(rows, n, dtype)
    saved = forward(x, w, b)[1:]
    calls = {} if gpu else {"step by step": partial(backward, dy, x, w, b, *saved)}
    for label, norm in timed.items():
        if max(typical_errors(norm, x, dy, w, b)) < 16:  # in units: correct
            scale, shift = (t.to(norm.weights or t.dtype) for t in (w, b))
            _, *saved = norm.forward(x, scale, shift, 1e-5)
            calls[label] = partial(norm.backward, dy, x, scale, shift, *saved)
    moved = dict.fromkeys(calls, 3 * x.nbytes)
    found = measure(calls, bytes=moved, device=device, cuda_graph=gpu, budget_s=0.05)
    return found.frame.set_index("label")["gb_s"]


# %%

widths = range(1024, 15873, 7424 if unit_test_going() else 512 if gpu else 2048)
live = pd.DataFrame({n: rates(n) for n in widths}).T.rename_axis(columns=None)
title = "Backward on this machine, GB/s"
ax = live.plot(figsize=(5.2, 2.4), xlabel="columns", ylim=0, title=title)
ax.figure.set_label("GB/s of the backward by columns, on this machine.")
plt.show()

# %%
# On a processor PyTorch's kernel is the faster one at each width: the steps move the rows several
# times, but their rate counts one move.
#
# Your own rows and columns
# -------------------------
#
# Put in a shape and a type. The cell compares every kernel that is installed with float64. On a GPU
# it also times each correct backward.

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
# * The five widths of the chart are those at which the study compared each library's ``dw`` with
#   float64. The study has 35 widths, to 131,072 columns; QuACK and inductor have 11. At 24,576
#   columns the backwards of Liger and flash-linear-attention have less than a third of torch's
#   rate. At 16,384 roundoff's lead is smaller, 1.27 on the H200 and 1.09 on the H100.
# * At 8704 columns of float16 on the H200, flash-linear-attention's forward leads roundoff's
#   by 3 %.
# * With 256 rows of 4096 in float16, Liger's forward leads roundoff's: by 2 and 4 % in two runs on
#   the H200, by 3 and 8 % on the H100.
# * We did not look for why torch and inductor are slow.
# * Apex and Transformer Engine were not measured: their kernels for PyTorch are built from source,
#   with CUDA's compiler.
# * Rates in GB/s are of one run. Leads and launches are of two, both in the evidence.
# * Next: :ref:`layer-norm-ladder`, for how the backward became fast, and
#   :ref:`layer-norm-discrepancies`, for what two such kernels do to a model.
#
# .. [#ba] \J. L. Ba, J. R. Kiros, G. E. Hinton, *Layer normalization*, 2016, :arxiv:`1607.06450`.
# .. [#tutorial] Triton's tutorial `Layer Normalization
#    <https://triton-lang.org/main/getting-started/tutorials/05-layer-norm.html>`_.
