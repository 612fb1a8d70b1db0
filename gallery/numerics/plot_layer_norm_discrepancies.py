r"""
.. _layer-norm-discrepancies:

Why do PyTorch and ONNX Runtime give different results?
=======================================================

One ONNX file and one set of weights in two runtimes: how far apart, who is right, what to set.

.. answer:: nvidia-h200

   **Why.** On a GPU, ONNX Runtime multiplies float32 matrices in TF32 by default, and PyTorch does
   not. TF32 keeps 11 of float32's 24 significant bits. On this page's model, with results near 300,
   the two runtimes differ by up to :bound:`0.0256 <gap.default>`. ONNX Runtime's largest error is
   :bound:`31 <positive.ratio>` times PyTorch's.

   **The cure.** Turn ONNX Runtime's ``use_tf32`` off. The two then differ by up to
   :bound:`0.00015 <gap.off>`.

   **The price.** ONNX Runtime takes :bound:`about 4 <cost.off>` times as long with 32,768 rows:
   this model is mostly one matrix product. On a CPU TF32 is off by default: set nothing.

   .. code-block:: python

      onnxruntime.InferenceSession("model.onnx", providers=[
          ("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"])
      torch.set_float32_matmul_precision("highest")  # torch's default
      torch.backends.cudnn.allow_tf32 = False  # for convolutions, which use TF32 by default
"""

# %%
# Every cell runs on a laptop, most of them in seconds. On a CPU TF32 is off, so a study of this
# question recorded the bold numbers on an H200 and its host's CPU. Click one for its record.

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from onnxruntime import InferenceSession

from roundoff.compare import max_diff, scaled_error
from roundoff.evaluator import LayerNormalizationOrt, MatMulOrt, TorchOnnxEvaluator
from roundoff.models import layer_norm_feeds, layer_norm_matmul
from roundoff.record import read_table
from roundoff.reductions import tensor_core_matmul
from roundoff.runtimes import compare_runtimes
from roundoff.script import unit_test_going

# %%
# One file, two results
# ---------------------
#
# The model normalizes each row of ``X`` (LayerNormalization), multiplies by a matrix (MatMul) and
# adds a bias (Add). ``X`` is uniform in ±60. Weights, scales and biases are uniform in [0, 1), so
# that all weights are positive. PyTorch runs these three nodes of the ONNX file one by one. ONNX
# Runtime runs the same file as one session.

PROVIDER, DEVICE = "CPUExecutionProvider", "cpu"
# On a GPU: PROVIDER, DEVICE = ("CUDAExecutionProvider", {"use_tf32": "1"}), "cuda"
width = 64 if unit_test_going() else 1152
feeds = {name: value.to(DEVICE) for name, value in layer_norm_feeds(1024, width).items()}


def by_torch(model, feeds, **options):
    return TorchOnnxEvaluator(model, [PROVIDER], **options).run(None, feeds)[0]


def by_onnxruntime(model, feeds):
    session = InferenceSession(model.SerializeToString(), providers=[PROVIDER])
    arrays = {name: value.cpu().numpy() for name, value in feeds.items()}
    return torch.from_numpy(session.run(None, arrays)[0]).to(DEVICE)


model = layer_norm_matmul()
of_torch, of_ort = by_torch(model, feeds), by_onnxruntime(model, feeds)
print(f"typical result:     {of_torch.abs().mean():.3g}")
print(f"largest difference: {(of_torch - of_ort).abs().max():.2g}")

# %%
# On a CPU the two agree in about six digits, as float32 should. On the H200 they differ by up to
# :bound:`0.0256 <gap.default>`, and only four digits agree. File, weights and type are the same.
#
# It is not the order of a sum
# ----------------------------
#
# The usual suspects are LayerNormalization and MatMul: both add many numbers, and :ref:`the order
# of a sum changes the result <reduction-order>`. So we swap one operator at a time. PyTorch runs
# the file, and one node gets ONNX Runtime's kernel. How far does the result move?

KERNELS = {"LayerNormalization": LayerNormalizationOrt, "MatMul": MatMulOrt}
moved = {}
for op, kernel in KERNELS.items():
    swapped = by_torch(model, feeds, custom_kernels={("", op): kernel})
    moved[op] = max_diff(of_torch, swapped)["abs"]
moved = pd.DataFrame({f"here ({DEVICE})": moved})

# %%
# We draw the largest change of a result, with each operator swapped. The H200's bars were recorded
# with TF32 in ONNX Runtime's kernels (its default) and without. PyTorch's kernels use no TF32.

STUDY = "plot_layer_norm_discrepancies", "nvidia-h200"
blame = read_table(*STUDY, "blame", ["tf32", "swapped", "from torch"]).set_index("swapped")
for tf32, how in {"ORT alone": "TF32", "neither": "no TF32"}.items():
    moved[f"H200, {how}"] = blame[blame["tf32"] == tf32]["from torch"].astype(float)
ax = moved.plot.barh(figsize=(5.2, 2.8), width=0.8)
ax.figure.set_label(f"Largest change of a result, one operator swapped: {moved.to_dict()}")
for bars in ax.containers:
    ax.bar_label(bars, fmt="%.2g", padding=3)
ax.invert_yaxis()  # in the order of the legend
ax.set_xscale("symlog", linthresh=1e-5)
ax.set(xlim=(0, 1), xlabel="largest change of a result (results near 300)", ylabel="")
plt.show()

# %%
# On the CPU a swap moves only the last digits, as another order of addition does. On the H200,
# LayerNormalization moves the result by :bound:`0.00015 <swap.norm>`, and MatMul, in TF32, moves it
# by :bound:`0.0256 <swap.product>`. So MatMul is the cause.
#
# Does MatMul add in a different order on the H200? Without TF32, MatMul moves the result by
# :bound:`0 <swap.off>`: the two float32 kernels give equal bits. So the cause is TF32. TF32 can
# lose bits in two places: the operands and the sum.
#
# TF32 keeps 11 bits of an operand
# --------------------------------
#
# A tensor core multiplies float32 numbers in TF32: it keeps their exponent and 11 of their 24
# significant bits. We round both operands in this way and multiply them in float64, which adds next
# to no error. The :ref:`unit <unit>` of an error is ε times the root mean square (RMS) of the exact
# product, with float32's ε = 2⁻²³. We take every eighth row, as the simulation below is slow.


def to_tf32(x):
    """Round float32 to 11 significant bits."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def show(what, exact, result):
    error = scaled_error(exact, result, "float32")
    print(f"{what:16}  RMS {error.rms:6.1f}  mean {error.mean:+6.1f}")


x = TorchOnnxEvaluator(layer_norm_matmul(), [PROVIDER]).run(["normed"], feeds)[0]
x, w = x.reshape(-1, width)[::8].cpu(), feeds["weights"].cpu()
x11, w11 = to_tf32(x), to_tf32(w)
exact, rounded = x.double() @ w.double(), x11.double() @ w11.double()
show("PyTorch, float32", exact, x @ w)
show("rounded operands", exact, rounded)

# %%
# The tensor core drops bits of the sum
# -------------------------------------
#
# Rounding to nearest errs up as often as down, so that its mean error is small beside its RMS
# error. But ONNX Runtime's results on the H200 are too small: their mean error is
# :bound:`−44.7 <measured.mean>` units. Does the H200 cut the operands instead of rounding them? No:
# in a simulation on the host's CPU, operands that are cut give a mean error of
# :bound:`−5654 <cut.mean>` units. So bits are lost later, in the sum.
#
# On a Hopper GPU, such as the H200, a tensor core adds eight products at a time to a running sum.
# The tensor core shifts these nine numbers so that their binary places line up, and keeps 26
# places. The bits beyond are dropped, which moves each number towards zero. We draw one such step,
# from the middle of a result.

step = width // 2 // 8 * 8
running = tensor_core_matmul(x11[:1, :step], w11[:step, :1], gpu="H200")[0].double()
products = x11[0, step : step + 8].double() * w11[step : step + 8, 0].double()
size = torch.cat([running, products]).abs().numpy()[:, None]  # one number a row

first = np.floor(np.log2(size))  # the place of a number's first bit: 3 for 8 to 15
places = first.max() - np.arange(36)  # from the first bit of the largest number on
bits = np.floor(size / 2.0**places) % 2  # one place a column
last = first - np.array([24] + 8 * [22])[:, None]  # 11 bits times 11 bits are 22
bits[(places > first) | (places <= last)] = np.nan  # outside of the number

# %%

figure, ax = plt.subplots(figsize=(5.2, 3.2))
figure.set_label(
    "Nine numbers in binary, lined up: a running sum and eight products. "
    "The last bits of the products lie beyond a line after 26 places, and are dropped."
)
kept = places > places[26]
colours = {"vmin": -1, "vmax": 1.5}
ax.pcolormesh(np.where(kept, bits, np.nan), cmap="Blues", **colours)
ax.pcolormesh(np.where(kept, np.nan, bits), cmap="Oranges", **colours)
ax.axvline(26, color="C1")
ax.invert_yaxis()
names = ["running sum"] + [f"product {step + i}" for i in range(8)]
ax.set_yticks(np.arange(9) + 0.5, names)
ax.set_xlabel("binary place, from the first bit of the running sum")
ax.set_title("Blue bits are added, orange bits are dropped")
plt.show()

# %%
# A dark square is a one, a light square a zero; signs are not drawn. A product is smaller than the
# running sum, so the product begins further right, and its last bits lie beyond the line. Here most
# sums are positive, so that dropping bits makes them smaller.
#
# :func:`~roundoff.reductions.tensor_core_matmul` simulates these additions. Its operands are
# rounded already, so its result differs from ``rounded`` by the dropped bits alone.

core = tensor_core_matmul(x11, w11, gpu="H200")
show("dropped bits", rounded, core)
show("both", exact, core)

# %%
# Does the simulation match the H200? The lines above use every eighth row. The study simulated
# rounding for all 2048 rows, and dropping, which is slow, for 32 rows and 64 columns. Rounding has
# an RMS error of :bound:`129 <rounded.rms>` units, and dropping :bound:`46 <dropped.rms>`. The two
# errors are unrelated, so that their squares add up: √(129² + 46²) = 137. ONNX Runtime's RMS error
# on the H200 is :bound:`137 <measured.rms>`, too. The mean error fits as well: the two simulated
# means add up to :bound:`−45.6 <both.mean>`, and the H200 has :bound:`−44.7 <measured.mean>`. If
# the sum were cut as on an A100, the means would add up to :bound:`−82.2 <older.mean>`.
#
# Which error is larger in a longer sum, rounding or dropping? We multiply matrices of numbers
# between 0 and 1, and print the RMS error of each.

torch.manual_seed(0)
parts = {}
for terms in 128, 1024, 4096:
    a, b = torch.rand(32, terms), torch.rand(terms, 32)
    a11, b11 = to_tf32(a), to_tf32(b)
    exact, rounded = a.double() @ b.double(), a11.double() @ b11.double()
    core = tensor_core_matmul(a11, b11, gpu="H200")
    of_parts = {"rounded operands": (exact, rounded), "dropped bits": (rounded, core)}
    parts[terms] = {k: scaled_error(*pair, "float32").rms for k, pair in of_parts.items()}
pd.DataFrame(parts).T.rename_axis("terms").round(1)

# %%
# With more terms the error of rounding falls relative to the result, as errors average out. The
# error of dropping grows: each step drops about the same share of the running sum, and always makes
# the sum smaller. With 4096 positive terms dropping is the larger error.
#
# Weights of both signs
# ---------------------
#
# A trained layer has weights of both signs, and the terms of a sum cancel. We draw such weights.

w = layer_norm_feeds(1024, width, weights="normal")["weights"]
w11 = to_tf32(w)
exact, rounded = x.double() @ w.double(), x11.double() @ w11.double()
core = tensor_core_matmul(x11, w11, gpu="H200")
show("PyTorch, float32", exact, x @ w)
show("rounded operands", exact, rounded)
show("dropped bits", rounded, core)
show("both", exact, core)

# %%
# Dropped bits no longer shift the results: dropping moves positive sums down and negative sums up.
# Nearly all of TF32's error comes from rounded operands. (Its mean here is chance: all rows share
# one set of rounded weights.) In our unit this error is over ten times that with positive weights:
# the terms cancel, so results and unit are small.
#
# On the H200 the study divided each error by the sum of the terms' magnitudes, which cannot cancel.
# With both signs TF32's largest error hardly changes (:bound:`1.1 <signed.tf32>` times): TF32
# rounds the operands, whatever their signs. PyTorch's largest error is
# :bound:`5.5 <signed.float32>` times smaller: float32 rounds the running sum, which stays small. So
# ONNX Runtime's largest error is :bound:`31 <positive.ratio>` times PyTorch's with positive
# weights, and :bound:`182 <signed.ratio>` times with both signs.
#
# How much it matters
# -------------------
#
# Back to positive weights. The table has float32 on the H200 and on its host's CPU. *difference* is
# the largest difference between the two results. *torch* and *ORT* (ONNX Runtime) are the RMS
# errors against float64, in the unit above.

gaps = read_table(*STUDY, "gaps", ["case", "dtype", "abs", "torch error", "ORT error"])
gaps = gaps[gaps["dtype"] == "float32"].drop(columns="dtype")
gaps = gaps.set_index("case").rename_axis(None)
gaps.index = gaps.index.str.replace("GPU float32", "H200").str.replace("alone", "only")
gaps.index = gaps.index.str.replace("CPU float32", "host's CPU")
gaps.columns = ["difference", "torch", "ORT"]
gaps.map("{:.3g}".format)

# %%
# This cell draws the figure beside the answer.

figure, ax = plt.subplots(figsize=(4.6, 2.8), layout="constrained")
figure.set_gid("answer")  # the site shows it beside the answer
shown = gaps["difference"].filter(regex="CPU|ORT|both|neither").sort_values()
shown.index = shown.index.str.replace("ORT", "ONNX Runtime").str.replace(", ", "\n")
figure.set_label(f"Largest difference of the two runtimes: {shown.to_dict()}")
bars = ax.barh(shown.index, shown)
ax.bar_label(bars, fmt="%.3g", padding=3)
ax.set_xscale("log")
ax.margins(x=0.25)
ax.set_title("Largest difference")
ax.set_xlabel("results near 300")
plt.show()

# %%
# With TF32 in both, the two results are within :bound:`0.0020 <gap.both>` of each other, and both
# have the error that ONNX Runtime has by default: agreement is not accuracy. The rest comes from
# LayerNormalization. Before a MatMul in TF32, swapping LayerNormalization moves the result by
# :bound:`0.0020 <swap.norm.tf32>`. Our guess, not tested: where LayerNormalization's last bits
# differ, TF32 can round to another coarse number.
#
# Without TF32, either runtime may have the smaller error. On the H200 their errors are equal in
# three digits. On the host's CPU, PyTorch's RMS error is :bound:`2.2 <error.cpu>` times that of
# ONNX Runtime. These errors depend on the machine's kernels.
#
# On a CPU the type matters more. Here are the two runtimes in two types, on this page's machine.
# *difference* is the largest difference. The row *> 0.01* counts results that differ by more than
# 0.01.

rows, limits = {}, (1e-4, 0.001, 0.01, 0.1, 1)
for dtype in torch.float32, torch.float16:
    typed = {name: value.to(dtype) for name, value in feeds.items()}
    ours = by_torch(layer_norm_matmul(dtype), typed).float()
    apart = (ours - by_onnxruntime(layer_norm_matmul(dtype), typed).float()).abs()
    numbers = {"min": ours.min(), "max": ours.max(), "mean": ours.mean()}
    numbers["difference"] = apart.max()
    shown = {name: f"{value:.3g}" for name, value in numbers.items()}
    counts = {f"> {limit:g}": int((apart > limit).sum()) for limit in limits}
    rows[str(dtype).removeprefix("torch.")] = {"shape": tuple(ours.shape)} | shown | counts
pd.DataFrame(rows)

# %%
# Near 300 a step of float16 is 0.25. So a result of float16 that differs at all differs by more
# than 0.1.
#
# What to set, and what it costs
# ------------------------------
#
# The table has every switch that we tried on the H200 in float32. *changed* is the share of results
# that the switch changes. *time* is the runtime's median time with the switch, divided by that
# without it, for 32,768 rows that stay on the GPU.

columns = ["runtime", "switch", "dtype", "provider", "moved", "cost"]
switches = read_table(*STUDY, "switches", columns).dropna()
tried = (switches["dtype"] == "float32") & (switches["provider"] == "CUDA")
switches = switches[tried].set_index("switch").rename_axis(None)
switches["changed"] = switches["moved"].map("{:.1%}".format)
switches["time"] = switches["cost"].map("{:.2f}".format)
switches[["changed", "time", "runtime"]]

# %%
# ``use_tf32 = 0`` gives float32 back, and ONNX Runtime takes :bound:`about 4 <cost.off>` times as
# long. ``torch.set_float32_matmul_precision("high")`` lets PyTorch use TF32, too: PyTorch then
# takes :bound:`about 0.3 <cost.high>` of its default time, and has ONNX Runtime's error. The other
# switches changed :bound:`0 <other.switches>` results of this model.
#
# A model pays less if it spends time outside of matrix products. A GPU runs LayerNormalization,
# softmax and additions without tensor cores, so TF32 does not concern them.
#
# Turn TF32 off to compare two runtimes, to search for a fault, and where large terms cancel. Keep
# TF32 where bfloat16 would be good enough: bfloat16 has 8 significant bits, and TF32 has 11.
#
# .. _your-own-model:
#
# Your own model
# --------------
#
# Put in an ONNX file, and the module that it was exported from, if there is one.
# :func:`~roundoff.runtimes.compare_runtimes` names the first node that differs (here
# LayerNormalization, in its last bits), the runtime with the smaller error, what to set, and a
# tolerance for your test. It runs on the GPU if there is one, and then says which runtime may use
# TF32. The tolerance takes 300 runs, up to a minute here.

MODEL = layer_norm_matmul()  # or "model.onnx"
FEEDS = layer_norm_feeds(64, 48)  # or {"X": an array}, or None: random ones
MODULE = None  # or the torch module
compare_runtimes(MODEL, FEEDS, module=MODULE)

# %%
# Limits, and what to read next
# -----------------------------
#
# * One small model, two GPUs of one generation (Hopper). TF32 needs an Ampere GPU (such as an A100)
#   or a later one.
# * In float16 and bfloat16, the two runtimes are at most :bound:`1 <half.ulp>` :ref:`ULP <ulp>`
#   apart on the H200. Near 300 an ULP is 0.25 in float16 and 2 in bfloat16.
# * In float16 look for overflow, too. An RMSNorm squares its input. 256² is infinite in float16,
#   and trained models have channels that large [#massive]_. We gave 32 rows one channel of numbers
#   in ±800: on the H200 both runtimes turned :bound:`21 <overflow.rows>` rows into zeros. Squares
#   in float32 avoid that.
# * Fasi et al. found how tensor cores before Hopper drop bits [#fasi]_. On an H100 and an H200,
#   ``tensor_core_matmul`` gives the bits of a Triton kernel that adds up to 4096 terms in one
#   chain. cuBLAS, which ONNX Runtime calls, may cut a long sum into parts. So this page compares
#   the sizes of errors with the simulation, not bits.
# * The page that posed the question [#published]_ found a difference of 0.0196 on a GPU, and left
#   open why.
# * Next: :ref:`bits-to-words`, for when such a difference changes an answer.
#
# .. [#massive] M. Sun, X. Chen, J. Z. Kolter, Z. Liu, *Massive activations in large language
#    models*, 2024, :arxiv:`2402.17762`.
# .. [#fasi] M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, *Numerical behavior of NVIDIA tensor
#    cores*, PeerJ Computer Science 7, 2021, :doi:`10.7717/peerj-cs.330`.
# .. [#published] X. Dupré, `LayerNormalization implementation cannot be exchanged
#    <https://sdpython.github.io/doc/onnx-diagnostic/dev/auto_technical/
#    plot_layer_norm_discrepancies.html>`_, documentation of onnx-diagnostic.
