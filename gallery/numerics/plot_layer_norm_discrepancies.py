r"""
.. _layer-norm-discrepancies:

Why PyTorch and ONNX Runtime give different results
===================================================

One ONNX file and one set of weights in two runtimes: how far apart, who is right, what to set.

.. answer:: nvidia-h200

   **Why.** On a GPU, ONNX Runtime multiplies float32 matrices in TF32 by default, and PyTorch does
   not. TF32 keeps 11 of float32's 24 bits. Results near 300 differ by up to
   :bound:`0.0256 <gap.default>`.

   **The cure.** Turn ``use_tf32`` off. The two then differ by :bound:`0.00015 <gap.off>` at most.
   PyTorch was right before: ONNX Runtime's typical error was :bound:`32 <error.ratio>` times as
   large.

   **The price.** ONNX Runtime takes :bound:`about 4 <cost.off>` times as long for this model, which
   is mostly one product. On a CPU there is no TF32, and nothing to set.

   .. code-block:: python

      onnxruntime.InferenceSession("model.onnx", providers=[
          ("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"])
      torch.set_float32_matmul_precision("highest")  # torch's default
      torch.backends.cudnn.allow_tf32 = False  # torch's convolutions use TF32 by default
"""

# %%
# Every cell runs on a laptop in seconds. A bold number was recorded on an H200, or on its host, by
# a study of this question. It leads to its evidence at the end of the page.

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from onnxruntime import InferenceSession

from roundoff.compare import max_diff, scaled_error
from roundoff.evaluator import LayerNormalizationOrt, MatMulOrt, TorchOnnxEvaluator
from roundoff.models import layer_norm_feeds, layer_norm_matmul
from roundoff.record import read_records
from roundoff.reductions import tensor_core_matmul
from roundoff.runtimes import compare_runtimes
from roundoff.script import unit_test_going

# %%
# One file, two results
# ---------------------
#
# The model normalizes each row of ``X`` (LayerNormalization), multiplies by a matrix (MatMul) and
# adds a bias (Add). ``X`` is uniform in ±60; weights, scales and biases are uniform in [0, 1).
# PyTorch runs these three nodes of the ONNX file one by one. ONNX Runtime runs the same file as one
# session.

PROVIDER, DEVICE = "CPUExecutionProvider", "cpu"  # or "CUDAExecutionProvider", "cuda"
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
# On a CPU the two agree in about six digits, as float32 should. On the H200 the difference is
# :bound:`0.0256 <gap.default>`, and only four digits agree. Same file, same weights, same type.
#
# It is not the order of a sum
# ----------------------------
#
# The usual suspect is LayerNormalization, or the product: both add many numbers, and :ref:`the
# order of a sum changes the result <reduction-order>`. So we swap one operator at a time. PyTorch
# runs the file, and one node gets ONNX Runtime's kernel. We measure how far the result moves.

KERNELS = {"LayerNormalization": LayerNormalizationOrt, "MatMul": MatMulOrt}
TYPES = {torch.float32: 1, torch.float16: 10}  # with ONNX's numbers of them
rows = []
for dtype, itype in TYPES.items():
    model = layer_norm_matmul(itype)
    typed = {name: value.to(dtype) for name, value in feeds.items()}
    of_torch, of_ort = by_torch(model, typed), by_onnxruntime(model, typed)
    for op, kernel in KERNELS.items():
        z = by_torch(model, typed, custom_kernels={("", op): kernel})
        row = {"swapped": f"CPU {str(dtype)[6:]}, {op}"}
        row["moved"] = max_diff(of_torch, z)["abs"]
        row["left to ORT"] = max_diff(of_ort, z)["abs"]
        rows.append(row)
live = pd.DataFrame(rows)

# %%
# The rows of the H200 are recorded: with TF32 in ONNX Runtime, which is the default, and without.


def recorded(table, columns):
    """Columns of a table of the study on the H200; no rows without its record."""
    for record in read_records("plot_layer_norm_discrepancies"):
        if record.machine == "nvidia-h200":
            return record.tables[table][columns]
    return pd.DataFrame(columns=columns)


blame = recorded("blame", ["tf32", "swapped", "from torch", "from ORT"])
blame = blame[blame["tf32"] != ""]  # float32 on the GPU
names = {"ORT alone": "H200 with TF32", "neither": "H200 without"}
cases = [f"{names[tf32]}, {op}" for tf32, op in zip(blame["tf32"], blame["swapped"], strict=True)]
h200 = pd.DataFrame({"swapped": cases}, index=blame.index)
h200["moved"], h200["left to ORT"] = blame["from torch"], blame["from ORT"]
swapped = pd.concat([live, h200]).set_index("swapped").rename_axis(None)
swapped.map("{:.2g}".format)

# %%

figure, ax = plt.subplots(figsize=(6, 3))
figure.set_label(f"How far the result moves, one operator swapped: {swapped['moved'].to_dict()}")
bars = ax.barh(swapped.index, swapped["moved"])
ax.bar_label(bars, fmt="%.2g", padding=3)
ax.set_xscale("log")
ax.invert_yaxis()
ax.margins(x=0.15)
ax.set_title("How far the result moves, one operator swapped")
plt.show()

# %%
# With TF32, LayerNormalization moves the H200's result by :bound:`0.00015 <swap.norm>`, and the
# product moves it by :bound:`0.0256 <swap.product>`. So the product is the cause. Without TF32, the
# product of ONNX Runtime moves it by :bound:`0 <swap.off>`: the two products then have equal bits,
# so no order of addition is left that could differ.
#
# TF32 keeps 11 bits of an operand
# --------------------------------
#
# A tensor core multiplies float32 numbers in TF32: it keeps their exponent and 11 of their 24
# significant bits. We round both operands in this way and multiply them in float64, which adds next
# to no error. We give an error in the :ref:`unit <unit>` of float32: ε times the root mean square
# of the exact product. The typical error is the root mean square of all errors.


def to_tf32(x):
    """Round float32 to 11 significant bits."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def show(what, exact, result):
    error = scaled_error(exact, result, "float32")
    print(f"{what:18} typical error {error.rms:4.0f}, mean error {error.mean:+6.1f}")


x = TorchOnnxEvaluator(layer_norm_matmul(), [PROVIDER]).run(["normed"], feeds)[0]
x, w = x.reshape(-1, width)[::8].cpu(), feeds["weights"].cpu()
x11, w11 = to_tf32(x), to_tf32(w)
exact, rounded = x.double() @ w.double(), x11.double() @ w11.double()
show("rounded operands", exact, rounded)

# %%
# The tensor core cuts the sum
# ----------------------------
#
# Rounding to nearest errs up as often as down, so that the errors nearly cancel in the mean. The
# H200's mean error is :bound:`−45 <measured.mean>`: its results are too small. So the tensor core
# loses something when it adds, too. It adds eight products at a time to a running sum. It shifts
# the nine numbers so that their binary places line up, keeps 26 places, and drops the bits beyond.
# We draw one such step, from the middle of a result.

step = width // 2 // 8 * 8
running = tensor_core_matmul(x11[:1, :step], w11[:step, :1], gpu="H100")[0].double()
addends = torch.cat([running, x11[0, step : step + 8].double() * w11[step : step + 8, 0]])

size = addends.abs().numpy()[:, None]
first = np.floor(np.log2(size))  # the place of each first bit
places = first.max() - np.arange(36)
bits = np.floor(size / 2.0**places) % 2
length = np.array([24] + 8 * [22])[:, None]  # a product of two numbers of 11 bits has 22
bits[(places > first) | (places <= first - length)] = np.nan

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
# A dark square is a one, a light square a zero. A product is smaller than the running sum, so it
# begins further right, and its last bits lie beyond the line. Most products are positive here:
# dropping their bits makes the sum smaller.
#
# :func:`~roundoff.reductions.tensor_core_matmul` adds in this way. Its operands are already
# rounded, so that its only error is what it drops.

core = tensor_core_matmul(x11, w11, gpu="H100")
show("dropped bits", rounded, core)
show("both", exact, core)

# %%
# Independent errors add as squares. Over all rows the rounded operands have 129 of these units and
# the dropped bits 46, which makes √(129² + 46²) = 137. ONNX Runtime's typical error on the H200 is
# :bound:`137 <measured.rms>`. Rounded operands and dropped bits explain all of it.
#
# If the lost bits make the mean, the mean must go where the terms have both signs. We draw weights
# with both.

w11 = to_tf32(layer_norm_feeds(1024, width, weights="normal")["weights"])
core = tensor_core_matmul(x11, w11, gpu="H100")
show("dropped bits", x11.double() @ w11.double(), core)

# %%
# It does. Sums of both signs lose bits in both directions.
#
# How much it matters
# -------------------
#
# First the CPU, live, in two types: the largest difference, the mean difference, and how many
# results differ by more than a limit.

rows = {}
for dtype, itype in TYPES.items():
    model = layer_norm_matmul(itype)
    typed = {name: value.to(dtype) for name, value in feeds.items()}
    z = by_torch(model, typed)
    apart = max_diff(z, by_onnxruntime(model, typed), hist=[1e-4, 0.01])
    row = {"results": f"{z.numel():,}", "largest": f"{apart['abs']:.2g}"}
    row["mean"] = f"{apart['sum'] / z.numel():.2g}"
    for limit, count in apart["rep"].items():
        row[f"over {limit[1:]}"] = f"{count:,}"
    rows[str(dtype)[6:]] = row
pd.DataFrame(rows).T

# %%
# Then float32 on the H200 and on its host's CPU. The last two columns are typical errors against
# float64, in the unit above.

gaps = recorded("gaps", ["case", "dtype", "abs", "torch error", "ORT error"])
gaps = gaps[gaps["dtype"] == "float32"].drop(columns="dtype")
gaps["case"] = gaps["case"].str.replace("GPU float32", "H200")
gaps = gaps.rename(columns={"abs": "largest difference"}).set_index("case").rename_axis(None)
gaps.map("{:.3g}".format)

# %%

figure, ax = plt.subplots(figsize=(4.6, 2.8))
figure.set_gid("answer")  # the site shows it beside the answer
shown = gaps["largest difference"].filter(regex="CPU|ORT|both|neither").sort_values()
figure.set_label(f"Largest difference of the two runtimes: {shown.to_dict()}")
bars = ax.barh(shown.index, shown)
ax.bar_label(bars, fmt="%.2g", padding=3)
ax.set_xscale("log")
ax.margins(x=0.2)
ax.set_title("Largest difference")
plt.show()

# %%
# With TF32 in both, the two are within :bound:`0.0020 <gap.both>` of each other. Both then have the
# error that ONNX Runtime has by default: agreement is not accuracy.
#
# Without TF32 both round in float32, and either runtime may have the smaller error. On the host's
# CPU in float32, the typical error of PyTorch is :bound:`2.2 <error.cpu>` times that of ONNX
# Runtime. On the GPU in float16 and bfloat16, the two are at most :bound:`1 <half.ulp>` unit in the
# last place apart.
#
# What to set, and what it costs
# ------------------------------
#
# The table has every switch that we tried on the H200 in float32. The last is PyTorch's, the others
# are ONNX Runtime's. *moved* is the share of the results that a switch changes, and *time* is the
# time with the switch over that runtime's time without.

switches = recorded("switches", ["switch", "dtype", "provider", "moved", "cost"]).dropna()
tried = (switches["dtype"] == "float32") & (switches["provider"] == "CUDA")
switches = switches[tried].set_index("switch").rename_axis(None)
moved = switches["moved"].map("{:.1%}".format)
pd.DataFrame({"moved": moved, "time": switches["cost"].map("{:.2f}".format)})

# %%
# ``use_tf32 = 0`` gives float32 back, and ONNX Runtime takes :bound:`about 4 <cost.off>` times as
# long. ``high`` lets PyTorch use TF32, too. PyTorch then takes :bound:`about 0.3 <cost.high>` of
# its time, and has ONNX Runtime's error. In float32 the other switches changed
# :bound:`0 <other.switches>` results of this model.
#
# A model with more than one product pays less. A GPU runs LayerNormalization, softmax and additions
# without a tensor core, and TF32 does not change their time.
#
# Turn TF32 off to compare two runtimes, to search for a fault, and where large terms cancel. Leave
# it on where bfloat16 would be good enough: bfloat16 has 8 bits, and TF32 has 11.
#
# .. _your-own-model:
#
# Your own model
# --------------
#
# Put in an ONNX file, and the module that it was exported from, if there is one.
# :func:`~roundoff.runtimes.compare_runtimes` names the first node that differs, the runtime with
# the smaller error, what to set, and a tolerance for your test. It runs on the GPU if there is one.

MODEL = layer_norm_matmul()  # or "model.onnx"
FEEDS = layer_norm_feeds(64, 48)  # or {"X": an array}, or None: random ones
MODULE = None  # or the torch module
compare_runtimes(MODEL, FEEDS, module=MODULE)

# %%
# Limits, and what to read next
# -----------------------------
#
# * One small model with positive weights, two GPUs of one generation (Hopper). With weights of both
#   signs the terms cancel, and TF32's error is larger beside the result. TF32 needs an A100 or a
#   later GPU.
# * For a tolerance without feeds, :func:`roundoff.compare.tolerance` bounds the rounding of a
#   product, and :func:`roundoff.compare.layer_norm_bound` that of a LayerNormalization.
# * In float16 look for overflow first. RMSNorm squares its input, and a number above 256 has no
#   square in float16. Deep transformers have channels with such numbers [#massive]_. With one of
#   them, both runtimes gave zeros in :bound:`21 <overflow.rows>` of 64 rows on the H200. Squares in
#   float32 avoid that.
# * Others found how tensor cores drop bits [#fasi]_. ``tensor_core_matmul`` has the bits of all
#   products that we recorded on an H100 and an H200.
# * The study that posed the question [#published]_ found 0.0196 on a GPU, and left open why.
# * Next: :ref:`bits-to-words`, for when such a difference changes an answer.
#
# .. [#massive] M. Sun, X. Chen, J. Z. Kolter, Z. Liu, *Massive activations in large language
#    models*, 2024, :arxiv:`2402.17762`.
# .. [#fasi] M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, *Numerical behavior of NVIDIA tensor
#    cores*, PeerJ Computer Science 7, 2021, :doi:`10.7717/peerj-cs.330`.
# .. [#published] X. Dupré, `LayerNormalization implementation cannot be exchanged
#    <https://sdpython.github.io/doc/onnx-diagnostic/dev/auto_technical/
#    plot_layer_norm_discrepancies.html>`_, documentation of onnx-diagnostic.
