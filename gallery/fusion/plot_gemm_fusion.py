r"""
.. _gemm-fusion:

Is one large Gemm faster than two small ones?
=============================================

:math:`XY` and :math:`XZ` need two matrix products. :math:`X[Y, Z]`, with the weights side by side,
needs one. Which takes less time?

.. answer:: nvidia-h200

   **Why.** For one token, a Gemm (ONNX's matrix product) spends its time on reading the weights. A
   Concat in each run puts the weights side by side. It also reads and writes them, which makes
   three passes instead of one. In float16, with the two wide weights of a feed-forward layer, one
   Gemm and its Concat take :bound:`3.9 <inside>` times as long as two Gemms.

   **The cure.** Join the weights once, before the first run. Then one Gemm pays for narrow weights
   and one token: for queries, keys and values it takes :bound:`0.51 <narrow>` of the time of three.
   For wide weights there is :bound:`no difference measured <wide>`.

   **The price.** The results come side by side, and ONNX Runtime's Split copies them. With wide
   weights in float16, one Gemm and its Split lose from 16 tokens on. With 4096 tokens they take
   :bound:`1.15 <split>` times as long as two Gemms. PyTorch's ``split`` copies nothing, and there
   is :bound:`no difference measured <split.torch>`. The results may differ in their last bits.

   .. code-block:: python

      weight = torch.cat([query, key, value], 1)  # once, before the first token
      q, k, v = (x @ weight).split(widths, -1)  # views: PyTorch's split copies nothing
"""

# %%
# Every cell runs on a laptop in seconds. A bold number was recorded on an H200 by
# ``studies/gemm_fusion.py``: click it for its evidence.

import time
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
from onnx.parser import parse_model

from roundoff.compare import scaled_error
from roundoff.ort import session
from roundoff.record import read_records
from roundoff.script import unit_test_going
from roundoff.timing import measure

# %%
# One Gemm takes longer than two
# ------------------------------
#
# Two Gemms have the same input X. A fusion puts their weights side by side and makes one Gemm of
# them. Weights that are constants can be joined once, before the first run. Weights that are inputs
# of the model have to be joined by a Concat in each run. These are the models, in ONNX's text form.
# All three return one matrix, so the model with two Gemms joins their small results at its end.

HEAD = '<ir_version: 10, opset_import: ["": 20]> gemms '
TWO = """(float[m,k] X, float[k,y] Y, float[k,z] Z) => (float[m,n] O) {
    A = Gemm(X, Y)
    B = Gemm(X, Z)
    O = Concat<axis=1>(A, B)
}"""
EACH_RUN = """(float[m,k] X, float[k,y] Y, float[k,z] Z) => (float[m,n] O) {
    W = Concat<axis=1>(Y, Z)
    O = Gemm(X, W)
}"""
BEFORE = """(float[m,k] X, float[k,n] W) => (float[m,n] O) {
    O = Gemm(X, W)
}"""
MODELS = {"two Gemms": TWO, "joined in each run": EACH_RUN, "joined before": BEFORE}

# %%
# ``X`` and the weights are normally distributed. ONNX Runtime computes on one core, and its inputs
# are in place before the clock starts. The clock counts processor time, which other programs
# disturb less than wall time.

PROVIDER, DEVICE, CLOCK = "CPUExecutionProvider", "cpu", time.process_time
# or "CUDAExecutionProvider", "cuda", time.perf_counter
timed = partial(measure, device=DEVICE, clock=CLOCK)


def draw(rows, inner, columns, dtype=torch.float32):
    """X, the weights Y and Z, and W, which is Y and Z side by side."""
    normal = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(rows, inner, generator=normal, device=DEVICE)
    y = torch.randn(inner, columns, generator=normal, device=DEVICE) / inner**0.5
    z = torch.randn(inner, columns, generator=normal, device=DEVICE) / inner**0.5
    data = {"X": x, "Y": y, "Z": z, "W": torch.cat([y, z], 1)}
    return {name: value.to(dtype) for name, value in data.items()}


def call(model, data):
    """A function that runs a model on its inputs."""
    dtype = str(data["W"].dtype)[6:].replace("float32", "float")
    proto = parse_model(HEAD + model.replace("float", dtype))
    run = session(proto, [PROVIDER], threads=1)
    return run.bind({name: data[name] for name in run.input_names}).run


# %%
# X has one row, as in a language model that writes one token. A line of the output has the median
# time, then its ratio to the time of two Gemms, with a 95 % interval.


def show(calls):
    timings = timed(calls, budget_s=1, min_rounds=5)
    medians = timings.frame.set_index("label")["median"] * 1e3
    for name in calls:
        ratio = timings.ratio(name, "two Gemms")
        print(f"{name:18}{medians[name]:7.3f} ms{ratio.value:7.2f}", end=" ")
        print(f"({ratio.low:.2f} to {ratio.high:.2f})")
    return timings


inner, columns = (256, 1024) if unit_test_going() else (1024, 4096)
token = draw(1, inner, columns)
two, each_run = call(TWO, token), call(EACH_RUN, token)
puzzle = show({"two Gemms": two, "joined in each run": each_run})

# %%
# One Gemm with its Concat takes much longer than two Gemms.
#
# It is not the larger product
# ----------------------------
#
# Perhaps a Gemm of twice the width is slow. We run the same large Gemm on weights that were joined
# before.

before = call(BEFORE, token)
large = show({"two Gemms": two, "joined before": before})

# %%
# Joined before, the large Gemm takes no longer than two. So its width is not the cause.
#
# With one row, reading takes the time
# ------------------------------------
#
# A Gemm of one row multiplies each weight once. Reading the weight from memory takes longer, so the
# Gemm's time is the time of reading. Concat reads all weights, too, and writes them. We draw what
# each model moves: a block is one pass over all weights.

passes = {
    "two Gemms": ["Gemms read"],
    "joined in each run": ["Concat reads", "Concat writes", "Gemm reads"],
    "joined before": ["Gemm reads"],
}
figure, ax = plt.subplots(figsize=(6.4, 2.2))
figure.set_label(f"What each model moves, in passes over all weights: {passes}")
for place, steps in enumerate(passes.values()):
    for start, step in enumerate(steps):
        ax.barh(place, 0.96, left=start, color="C1" if "Concat" in step else "C0")
        ax.text(start + 0.48, place, step, ha="center", va="center", color="white")
ax.set_yticks(range(3), list(passes))
ax.invert_yaxis()
ax.set_xticks(range(4))
ax.set_xlabel("passes over the weights")
ax.set_title("Joined in each run: three passes instead of one")
plt.show()

# %%
# The large Gemm with its Concat makes three passes, and should take three times as long as two
# Gemms. Concat alone should take twice the time of two Gemms. We time it by itself.

CONCAT = "(float[k,y] Y, float[k,z] Z) => (float[k,n] W) { W = Concat<axis=1>(Y, Z) }"
alone = call(CONCAT, token)
parts = show({"two Gemms": two, "joined in each run": each_run, "Concat alone": alone})

# %%
# Concat alone takes about twice the time of the two Gemms, as it should. A second test: with more
# rows in X the products take longer, and Concat does not. Then the ratio has to fall.

ROWS = (1, 4, 16, 64) if unit_test_going() else (1, 4, 16, 64, 256)
frames = []
for rows in ROWS:
    data = draw(rows, inner, columns)
    calls = {name: call(model, data) for name, model in MODELS.items()}
    timings = timed(calls, budget_s=1, min_rounds=5)
    frames.append(timings.ratios("two Gemms").assign(rows=rows))
over_two = pd.concat(frames).set_index("rows")
live = over_two.pivot(columns="label", values="ratio")

# %%
# The left half of the figure shows this machine. The right half shows the study, on an H200 with a
# layer's weights. The *wide* ones are *gate* and *up* of the feed-forward part, 4096 × 11264 each.
# The *narrow* ones make queries, keys and values, with 4096, 1024 and 1024 columns. A layer
# needs the results apart. So in the study a Split follows the large Gemm.

COLUMNS = ["case", "shape", "m", "precision", "way", "ratio", "low", "high", "run"]


def recorded(machine):
    """Times over those of separate Gemms, in two runs; no rows without a record."""
    for record in read_records("plot_gemm_fusion"):
        if record.machine == machine:
            first = record.tables["times"].assign(run=1)
            second = first.assign(**record.second["times"], run=2)
            return pd.concat([first, second])[COLUMNS]
    return pd.DataFrame(columns=COLUMNS)


h200, h100 = recorded("nvidia-h200"), recorded("nvidia-h100-80gb-hbm3")
float16 = h200[(h200["precision"] == "float16") & (h200["run"] == 1)]
ways = {"joined in each run": "ORT, fused inside", "joined before": "ORT, precomputed"}

# %%


def draw_ratios(ax, ratios):
    """Times over those of two Gemms, with their intervals."""
    for name, marker in ("joined in each run", "C1s-"), ("joined before", "C0o-"):
        mine = ratios[ratios["label"] == name]
        ends = mine["ratio"] - mine["low"], mine["high"] - mine["ratio"]
        ax.errorbar(mine.index, mine["ratio"], ends, fmt=marker, capsize=3, label=name)


figure, axes = plt.subplots(1, 2, figsize=(7, 3), sharey=True)
figure.set_label(f"Time over two Gemms against rows of X, here: {live.to_dict()}")
wide = float16[float16["shape"] == "gate-up"].set_index("m")
draw_ratios(axes[0], over_two)
draw_ratios(axes[1], wide.assign(label=wide["way"].map({v: k for k, v in ways.items()})))
for ax, title in zip(axes, ("This machine, one core", "H200, float16"), strict=True):
    ax.set_xscale("log")
    ax.axhline(1, color="0.5", lw=1)
    ax.set_title(title)
    ax.set_xlabel("rows of X (tokens)")
axes[0].set_ylabel("time over two Gemms")
axes[0].legend(fontsize=8)
plt.show()

# %%
# The orange ratio falls on both machines, on the H200 from 64 rows on. The blue line of the H200
# includes a Split: with 16 rows one Gemm takes :bound:`1.08 <sixteen>` times as long as two.
#
# One token on the H200, in numbers: two Gemms read the wide weights in float32 at :bound:`3.6
# <read>` TB a second; the data sheet promises 4.8 [#h200]_. Float16 has half the bytes, and takes
# :bound:`0.51 <half>` of the time. Concat moves :bound:`3.8 <concat.float32>` TB a second in
# float32, and one Gemm with it takes :bound:`2.9 <inside.float32>` times as long as two. In float16
# Concat moves only :bound:`2.4 <concat.float16>`, so the ratio is :bound:`3.9 <inside>`. We do not
# know why Concat is slower there.
#
# What one Gemm gains
# -------------------
#
# If one Gemm reads as much as two, what is gained? Every operator has a fixed cost: a kernel is
# chosen and started, and a result gets memory. Two Gemms and the Concat of their results pay it
# three times, one Gemm once. It matters where the product is small. We repeat a published benchmark
# [#published]_ of square matrices, in ten rounds after three for warm-up. The table has
# milliseconds.

SIZES = (32, 64, 128) if unit_test_going() else (32, 128, 512, 1024)
DTYPE = torch.float32  # or torch.float16, on a GPU
rounds = {"warmup": 3, "min_rounds": 10, "max_rounds": 10}
frames, squares, differences = [], [], []
for size in SIZES:
    data = draw(size, size, size, DTYPE)
    calls = {name: call(model, data) for name, model in MODELS.items()}
    separate, one = calls["two Gemms"]()[0].clone(), calls["joined before"]()[0]
    differences.append((separate - one).abs().max().item())
    timings = timed(calls, **rounds)
    frames.append(timings.frame.assign(side=size))
    squares.append(timings.ratios("two Gemms").assign(side=str(size)))
print("largest difference between the results:", max(differences))
table = pd.concat(frames).set_index(["side", "label"])
(1e3 * table[["median", "mean", "std", "min", "max"]]).map("{:.3g}".format)

# %%

squares = pd.concat(squares).set_index("side")
figure, ax = plt.subplots(figsize=(5.2, 2.6))
figure.set_label(f"Time over two Gemms, by side: {squares['ratio'].tolist()}")
draw_ratios(ax, squares)
ax.axhline(1, color="0.5", lw=1)
ax.set(xlabel="side of the matrices", ylabel="time over two Gemms")
ax.set_ylim(0)
ax.set_title("Square matrices on this machine")
ax.legend(fontsize=8)
plt.show()

# %%
# Small squares gain most. On the H200 in float16, one Gemm takes :bound:`0.57 <small>` of the time
# of two at side 256, and :bound:`0.92 <large>` at side 8192. The Concat of the results belongs to
# the time of two. At side 8192 it moves 537 MB. At :bound:`2.4 <concat.float16>` TB a second this
# takes two thirds of the time gained.
#
# A CUDA graph tests the fixed cost: it replays the recorded starts of all kernels, at little fixed
# cost. In a CUDA graph, two Gemms of side 256 take :bound:`0.24 <replay>` of the time of a plain
# call. So most of the plain call of two was fixed cost. At side 256 a CUDA graph saves more than
# joining does.
#
# Part of the gain stays. With CUDA graphs on both sides, one Gemm of side 256 takes
# :bound:`0.45 <small.graph>` of the time of two. It saves :bound:`30 % <small.left>` of the
# microseconds that it saves in plain calls. We do not know why.
#
# What holds on both GPUs
# -----------------------
#
# We measured an H200 and an H100, twice each. The table has the time of one Gemm in ONNX Runtime,
# over that of two or three. *undecided* means that no difference was measured: an interval holds 1,
# or the two runs disagree. Wide and narrow rows have one token, unless they name 4096, and their
# one Gemm pays a Split. In squares two Gemms pay a Concat, and one Gemm pays nothing.

before_run = ways["joined before"]
CASES = {
    "wide, joined in each run": ("gate-up, 1 token", ways["joined in each run"]),
    "narrow, joined in each run": ("QKV, 1 token", ways["joined in each run"]),
    "wide, joined before": ("gate-up, 1 token", before_run),
    "narrow, joined before": ("QKV, 1 token", before_run),
    "wide, joined before, 4096 tokens": ("gate-up, 4096 tokens", before_run),
    "narrow, joined before, 4096 tokens": ("QKV, 4096 tokens", before_run),
}
sides = 256, 1024, 4096, 8192
CASES |= {f"square {n}, joined before": (f"square {n}", before_run) for n in sides}

# %%

columns = {"case": list(CASES)}
for precision in "float16", "float32":
    for machine, times in ("H200", h200), ("H100", h100):
        of_type = times[times["precision"] == precision]
        columns[f"{machine} {precision}"] = cells = []
        for case, way in CASES.values():
            runs = of_type[(of_type["case"] == case) & (of_type["way"] == way)]
            decided = (runs["high"] < 1).all() or (runs["low"] > 1).all()
            for ratio in runs["ratio"][:1]:
                cells.append(f"{ratio:.2f}" if decided else "undecided")
        cells += ["–"] * (len(CASES) - len(cells))  # without a record
both_gpus = pd.DataFrame(columns).set_index("case").rename_axis(None)
both_gpus

# %%
# Both GPUs agree, but for squares of side 4096 in float16. Joined before, narrow weights and small
# squares gain. Wide weights in float32 and float16 do not. In float16 they lose from 16 tokens on,
# on both GPUs. Joined in each run, wide weights lose. Narrow ones lose in float32 and are undecided
# in float16: our guess is that the fixed cost hides the passes. With 4096 tokens in float16, narrow
# weights lose, too.

figure, ax = plt.subplots(figsize=(4.6, 2.6))
figure.set_gid("answer")  # the site shows it beside the answer
ratios = float16.set_index(["case", "way"])["ratio"]
names = [list(CASES)[place] for place in (0, 2, 3, 4)]
bars = pd.Series({name: ratios.get(CASES[name]) for name in names}, dtype=float).dropna()
figure.set_label(f"Time of one Gemm over separate ones, H200, float16: {bars.to_dict()}")
words = both_gpus["H200 float16"].replace("undecided", "no difference measured")
ax.barh(bars.index, bars)
for name, value in bars.items():
    ax.text(max(value, 1) + 0.06, name, words[name], va="center")
ax.axvline(1, color="0.5", lw=1)
ax.invert_yaxis()
ax.margins(x=0.15)
ax.set_title("H200, float16")
ax.set_xlabel("one Gemm's time over two or three")
plt.show()

# %%
# What to do, and what it costs
# -----------------------------
#
# Join the weights when the model is loaded, and drop the separate ones. If you keep both, these
# weights need twice the memory.
#
# In PyTorch the two lines under the answer are enough. A view of many rows has gaps in memory: what
# needs contiguous memory copies it. In float16 on the H200, one product for queries, keys and
# values of one token takes :bound:`0.42 <narrow.torch>` of the time of three. With wide weights one
# product takes :bound:`0.91 <wide.torch>` of the time of two. On the H100 no difference was
# measured with wide weights.
#
# A ``Linear`` keeps its weight transposed. Join such weights along their rows,
# ``torch.cat([q.weight, k.weight, v.weight])``, and biases in the same way. Multiply with
# ``torch.nn.functional.linear``.
#
# Plain ``torch.compile`` does not join the weights. It adds a cost to each call: compiled, the
# three products of one token take :bound:`2.1 <inductor>` times as long as in eager PyTorch (H200,
# float16). With squares of side 4096 in float32 there is
# :bound:`no difference measured <inductor.large>`.
#
# In ONNX Runtime the Split is the price. For 4096 tokens and wide weights in float16 it moves 369
# MB. At the rate of Concat in float16, this takes most of the time that one Gemm loses. In float16
# leave wide Gemms apart: from 16 tokens on, one loses. For long prompts leave narrow ones apart,
# too. Where small calls are the trouble, try a CUDA graph first.
#
# Bits may change, too. A library chooses its kernel by the shape of the product, and the kernel
# decides :ref:`how a sum is cut <reduction-order>`. For one token in float32, one Gemm changed
# :bound:`93 % <changed>` of the queries, keys and values on the H200. Neither is always more
# accurate: where bits changed, one Gemm had :bound:`0.58 <error.least>` to
# :bound:`1.54 <error.most>` times the typical error of separate ones.
#
# Your own weights
# ----------------
#
# Put in your rows and your weights, on a CPU or a GPU. Of a ``Linear`` take ``linear.weight.T``.
# Try your number of rows, too: the library chooses its kernels by the shape, and the ratio may
# jump. On a CPU the cell times one thread.

X = torch.randn(1, 512)
WEIGHTS = [torch.randn(512, columns) for columns in (512, 128, 128)]

linear = all(weight.T.is_contiguous() for weight in WEIGHTS)
rows = [weight.T for weight in WEIGHTS]
joined = torch.cat(rows).T if linear else torch.cat(WEIGHTS, 1)
widths = [weight.shape[1] for weight in WEIGHTS]
products = {
    "separate": lambda: [X @ weight for weight in WEIGHTS],
    "one product": lambda: (X @ joined).split(widths, -1),
}
with torch.no_grad():
    exact = X.double() @ joined.double()
    errors = [scaled_error(exact, torch.cat(p(), -1)).rms for p in products.values()]
    threads, clock = torch.get_num_threads(), time.process_time
    torch.set_num_threads(1)
    prices = measure(products, device=X.device.type, clock=clock, budget_s=0.5).ratios()
    torch.set_num_threads(threads)
for price, error in zip(prices.itertuples(), errors, strict=True):
    print(f"{price.label:12}{price.ratio:5.2f}", end=" ")
    print(f"({price.low:.2f} to {price.high:.2f}), typical error {error:.2f}")

# %%
# A line has the time over that of separate products, its interval, and the error in the
# :ref:`unit <unit>` of the type. Where the interval holds 1, no difference was measured.
#
# Limits, and what to read next
# -----------------------------
#
# * Two GPUs of one generation (Hopper), and one layer's sizes. To time your sizes and types, run
#   ``python studies/gemm_fusion.py --config 256,512 --itype 1,10 --warmup 3 --repeat 6``.
# * One Gemm can lose even with weights joined before: squares of side 4096 in TF32 took
#   :bound:`1.07 <loss>` times the time of two on the H200. On the H100 there is
#   :bound:`no difference measured <loss@nvidia-h100-80gb-hbm3>`.
# * On the GPUs no weight was in a cache. A model that fits into a cache may have different ratios.
# * The transposed weights of a ``Linear`` were not timed on a GPU.
# * inductor can join constant weights itself where its option ``freezing`` is on. Here the weights
#   were arguments.
# * The benchmark that posed the question [#published]_ timed five calls of each model, one model
#   after the other. Here the models take turns, so that a change of speed affects all alike.
# * Next: :ref:`llama-backend`, for what joined weights give a whole layer.
#
# .. [#h200] NVIDIA, `H200 Tensor Core GPU <https://www.nvidia.com/en-us/data-center/h200/>`_.
# .. [#published] X. Dupré, `Gemm Exploration with CUDA
#    <https://sdpython.github.io/doc/onnx-extended/dev/auto_examples/plot_op_gemm2_cuda.html>`_,
#    documentation of onnx-extended.
