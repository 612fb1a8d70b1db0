r"""
.. _layer-norm-discrepancies:

Why PyTorch and ONNX Runtime give different results
===================================================

One ONNX file and one set of weights in two runtimes: how far apart, who is right, what to set.

.. answer:: nvidia-h200

   **Why.** On a GPU, ONNX Runtime multiplies float32 matrices in TF32 by default, and PyTorch does
   not. TF32 keeps 11 of float32's 24 bits. Results near 300 differ by up to
   :bound:`0.0256 <gap.default>`.

   **Which is right.** PyTorch. Against float64, ONNX Runtime's typical error is
   :bound:`32 <error.ratio>` times as large. With ``use_tf32`` off, the two differ by
   :bound:`0.00015 <gap.off>` at most.

   **The price.** With ``use_tf32`` off, ONNX Runtime takes :bound:`about 4 <cost.off>` times as
   long. On a processor there is no TF32, and nothing to set.

   .. code-block:: python

      # TF32 in neither: products, and torch's convolutions, which use it by default
      onnxruntime.InferenceSession("model.onnx", providers=[
          ("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"])
      torch.set_float32_matmul_precision("highest")  # torch's default
      torch.backends.cudnn.allow_tf32 = False
"""

# %%
# Every cell runs on a laptop in seconds. A bold number was recorded on a machine with an H200 by a
# study of this question, and leads to its evidence at the end of the page.

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
# adds a bias (Add). PyTorch runs these three nodes of the ONNX file one by one. ONNX Runtime runs
# the same file as one session.

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
# On a processor the two agree in about six digits, as float32 should. On the H200 they are
# :bound:`0.0256 <gap.default>` apart, and four digits agree. Same file, same weights, same type.
#
# It is not LayerNormalization
# ----------------------------
#
# The usual suspect is LayerNormalization. It adds each row twice, and :ref:`the order of a sum
# changes the result <reduction-order>`. So we swap one operator at a time: PyTorch runs the file,
# and one node gets ONNX Runtime's kernel. How far does the result move from each runtime's?

KERNELS = {"LayerNormalization": LayerNormalizationOrt, "MatMul": MatMulOrt}
TYPES = {torch.float32: 1, torch.float16: 10}  # with ONNX's numbers of them
rows = []
for dtype, itype in TYPES.items():
    model = layer_norm_matmul(itype)
    typed = {name: value.to(dtype) for name, value in feeds.items()}
    of_torch, of_ort = by_torch(model, typed), by_onnxruntime(model, typed)
    for op, kernel in KERNELS.items():
        z = by_torch(model, typed, custom_kernels={("", op): kernel})
        row = {"swapped": f"{str(dtype)[6:]}, {op}"}
        row["from torch"] = max_diff(of_torch, z)["abs"]
        row["from ORT"] = max_diff(of_ort, z)["abs"]
        rows.append(row)
swapped = pd.DataFrame(rows).set_index("swapped").rename_axis(None)
swapped.map("{:.2g}".format)

# %%

figure, ax = plt.subplots(figsize=(8, 2.6))
figure.set_label("Bars: how far the result moves when one operator is ONNX Runtime's.")
swapped.plot.barh(ax=ax, log=True, ylabel="")
ax.invert_yaxis()
ax.set_title("Largest difference, one operator swapped")
plt.show()

# %%
# On a processor both operators move the result a little. Here is float32 on the H200, where ONNX
# Runtime may use TF32 and PyTorch may not:


def recorded(table, columns, machine="nvidia-h200"):
    """Columns of a table of the study; no rows where the machine has no record."""
    for record in read_records("plot_layer_norm_discrepancies"):
        if record.machine == machine:
            return record.tables[table][columns]
    return pd.DataFrame(columns=columns)


blame = recorded("blame", ["tf32", "swapped", "from torch", "from ORT"])
blame = blame[blame["tf32"] == "ORT alone"].drop(columns="tf32").set_index("swapped")
blame.rename_axis(None).map("{:.2g}".format)

# %%
# There LayerNormalization moves the result by :bound:`0.00015 <swap.norm>`, and the product by
# :bound:`0.0256 <swap.product>`. So the product is the cause. A different order of its sum cannot
# be: with TF32 off, the orders stay and the difference goes.
#
# TF32 keeps 11 bits of an operand
# --------------------------------
#
# A tensor core multiplies float32 numbers in TF32: it keeps their exponent and 11 of their 24
# significant bits. We round both operands in this way and multiply them in float64, which adds next
# to no error. The :ref:`unit of an error <unit>` is float32's ε times the root mean square of the
# exact product. A typical error is the root mean square of all errors.


def to_tf32(x):
    """Round float32 to 11 significant bits."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


x = TorchOnnxEvaluator(layer_norm_matmul(), [PROVIDER]).run(["normed"], feeds)[0]
x = x.reshape(-1, width).cpu()
w = feeds["weights"].cpu()
x11, w11 = to_tf32(x), to_tf32(w)
exact = x.double() @ w.double()
operands = scaled_error(exact, x11.double() @ w11.double(), "float32")
print(f"rounded operands: typical error {operands.rms:.0f}, mean error {operands.mean:+.1f}")

# %%
# The tensor core cuts the sum
# ----------------------------
#
# Rounding errs up as often as down, and its mean error is next to nothing. The H200's mean error is
# :bound:`−45 <measured.mean>`: its results are too small. So the sum does something besides. A
# tensor core lines up eight products below its running sum, keeps the bits above a fixed place, and
# drops the rest. We draw one such step, in the middle of a result.

x11, w11 = x11[:32], w11[:, :64].contiguous()  # the simulation is slow
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

figure, ax = plt.subplots(figsize=(8, 3))
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
# A dark square is a one, a light square a zero. The products are smaller than the running sum, and
# their last bits lie beyond the line. Most products are positive, so that most losses make the sum
# smaller. :func:`~roundoff.reductions.tensor_core_matmul` adds in this way. It gets operands that
# TF32 holds, so that the cut is its only error.

exact = x11.double() @ w11.double()
sums = scaled_error(exact, tensor_core_matmul(x11, w11, gpu="H100"), "float32")
print(f"sums that are cut: typical error {sums.rms:.0f}, mean error {sums.mean:+.1f}")
print(f"both together:     typical error {np.hypot(operands.rms, sums.rms):.0f}")

# %%
# The two errors are independent, so their squares add: √(129² + 46²) = 137. ONNX Runtime's typical
# error on the H200 is :bound:`137 <measured.rms>`. Rounded operands and sums that are cut explain
# all of it.
#
# How much it matters
# -------------------
#
# First the processor, live, in two types: the largest difference, the mean one, and how many
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
# Then the H200, with TF32 in one runtime, in both and in neither, and its processor. The errors are
# typical errors against float64, in the unit above.

gaps = recorded("gaps", ["case", "abs", "torch error", "ORT error"])
gaps["case"] = gaps["case"].str.replace("GPU float32, ", "")
gaps = gaps.rename(columns={"abs": "largest difference"}).dropna()
gaps = gaps.set_index("case").rename_axis(None)
gaps.map("{:.3g}".format)

# %%

figure, ax = plt.subplots(figsize=(4.6, 2.8))
figure.set_gid("answer")
shown = gaps["largest difference"].filter(regex="TF32 in (ORT|both|neither)|CPU float32")
figure.set_label(f"Largest difference of the two runtimes: {shown.to_dict()}")
ax.barh(shown.index, shown)
ax.set_xscale("log")
ax.set_title("Largest difference in float32")
plt.show()

# %%
# TF32 in both brings the two within :bound:`0.0020 <gap.both>` of each other. Both are then as far
# from float64 as ONNX Runtime was alone: agreement is not accuracy.
#
# In float16 and bfloat16 on the GPU the two are at most :bound:`1 <half.ulp>` unit in the last
# place apart. On a processor in float32 the products add in different orders. There the typical
# error of PyTorch is :bound:`2.2 <error.cpu>` times that of ONNX Runtime.
#
# What to set, and what it costs
# ------------------------------
#
# ``use_tf32`` is ONNX Runtime's switch, and ``set_float32_matmul_precision`` is PyTorch's. The
# table has every switch that we tried on the H200 in float32: the share of the results that it
# moves, and the time over that of the default.

switches = recorded("switches", ["switch", "dtype", "provider", "moved", "cost"])
tried = (switches["dtype"] == "float32") & (switches["provider"] == "CUDA")
switches = switches[tried].dropna().set_index("switch").rename_axis(None)
moved, cost = switches["moved"].map("{:.1%}".format), switches["cost"].map("{:.2f}".format)
pd.DataFrame({"moved": moved, "time": cost})

# %%
# ``use_tf32`` off brings back float32, in :bound:`about 4 <cost.off>` times the time: this model is
# mostly one product. ``high`` in PyTorch is the way back, in :bound:`about 0.3 <cost.high>` of the
# time, with ONNX Runtime's error. The other switches, on the processor also the number of threads,
# moved :bound:`0 <other.switches>` results.
#
# Turn TF32 off to compare runtimes, to search for a fault, and where large terms cancel. Leave TF32
# on where bfloat16 would do, which has three bits less.
#
# .. _your-own-model:
#
# Your own model
# --------------
#
# Put in an ONNX file, and the module that it was exported from, if there is one.
# :func:`~roundoff.runtimes.compare_runtimes` names the first node that differs, the runtime with
# the smaller error, the switch, and a tolerance for your test.

MODEL = layer_norm_matmul()  # or "model.onnx"
FEEDS = layer_norm_feeds(64, 48)  # or {"X": an array}, or None: random ones
MODULE = None  # or the torch module
compare_runtimes(MODEL, FEEDS, module=MODULE)

# %%
# Limits, and what to read next
# -----------------------------
#
# * One small model, two GPUs of one generation (Hopper). TF32 needs an A100 or a later GPU.
# * A tolerance: :func:`roundoff.compare.tolerance` bounds what rounding does in the product, and
#   :func:`roundoff.compare.layer_norm_bound` what LayerNormalization adds.
# * In float16 look for overflow first. RMSNorm squares its input, and a number above 256 has no
#   square in float16. With one such channel [#massive]_ both runtimes gave zeros for
#   :bound:`21 <overflow.rows>` of 64 rows. Squares in float32 avoid that.
# * Others found that tensor cores cut their sums [#fasi]_. Recorded products of an H100 and an H200
#   have the bits of :func:`~roundoff.reductions.tensor_core_matmul`.
# * The study that posed the question [#published]_ has differences of TF32's size, too.
# * Next: :ref:`bits-to-words`, for when such a difference changes an answer.
#
# .. [#massive] M. Sun, X. Chen, J. Z. Kolter, Z. Liu, *Massive activations in large language
#    models*, 2024, :arxiv:`2402.17762`.
# .. [#fasi] M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, *Numerical behavior of NVIDIA tensor
#    cores*, PeerJ Computer Science 7, 2021, :doi:`10.7717/peerj-cs.330`.
# .. [#published] X. Dupré, `LayerNormalization implementation cannot be exchanged
#    <https://sdpython.github.io/doc/onnx-diagnostic/dev/auto_technical/
#    plot_layer_norm_discrepancies.html>`_, documentation of onnx-diagnostic.
