r"""
.. _llama-backend:

How do I write a backend for torch.compile?
===========================================

In thirty lines, with ONNX Runtime. Then the harder part: making a Llama layer fast.

.. answer:: nvidia-h200

   **Why.** ``torch.compile`` calls your function with a graph of operators, and runs the function
   that it returns. To convert a Llama layer to ONNX is not enough: each small operator reads its
   inputs from memory and writes its result there. Converted, the layer takes
   :bound:`2.7 <unfused>` times as long as with inductor (small feed-forward part, a prompt in
   float16, no CUDA graph).

   **The cure.** Rewrite the graph by rules, so that one operator replaces several. With Triton
   kernels as well, and CUDA graphs on both sides, the layer takes :bound:`0.86 <best>` of
   inductor's time on an H200, and :bound:`1.11 <fused.graph>` without these kernels.

   **The price.** The best version serves one prompt length. It holds :bound:`710 <memory.best>` MiB
   beside the model, inductor :bound:`196 <memory.graph>`.

   .. code-block:: python

      def my_backend(graph, examples):  # called once a graph
          graph.print_readable()  # what torch.compile hands over
          return graph.forward  # what runs at each call: put yours here
      mine = torch.compile(model, backend=my_backend)  # a function: mine(ids)

      # the fastest one of this page, on a GPU, under torch.no_grad(); packed: see "Memory"
      options = roundoff.OptimizationOptions("default+onnxruntime+experimental", packed=1.0)
      backend = partial(roundoff.onnx_custom_backend, options=options, cuda_graph=True)
      fast = torch.compile(model, backend=backend, dynamic=False)
      y = fast(ids)  # overwritten by the next call
"""

# %%
# Every cell runs on a laptop, the slowest in a minute. A bold number was recorded on an H200 by
# ``studies/llama_backend.py``: click it for its evidence.

import copy
import time
import warnings
from functools import partial

import matplotlib.pyplot as plt
import onnx
import pandas as pd
import torch
from onnxruntime import InferenceSession, SessionOptions
from torch._dynamo.backends.common import aot_autograd

from roundoff.backend import onnx_custom_backend
from roundoff.compare import scaled_error
from roundoff.dtypes import dtype_info
from roundoff.errors import ArgumentError
from roundoff.fusion import Editor, OptimizationOptions, Report, Rule, apply_rules, fuse
from roundoff.models import SIZES, Llama, random_tokens
from roundoff.record import read_table
from roundoff.script import unit_test_going
from roundoff.timing import measure

# %%
# What does torch.compile hand over?
# ----------------------------------
#
# ``torch.compile`` reads the Python code of a model and records the operators in it as a graph. It
# calls the backend once with this graph and with examples of the inputs. The function that the
# backend returns runs at every call. The shortest backend looks at the graph and returns it.


def look(graph, examples):
    for node in graph.graph.nodes:
        print(f"{node.op:14} {node.name}")
    return graph.forward


def gated(gate, up):
    return torch.nn.functional.silu(gate) * up


gate, up = torch.randn(2, 4, 8)
result = torch.compile(gated, backend=look)(gate, up)
print("the bits of eager PyTorch:", torch.equal(result, gated(gate, up)))

# %%
# The graph has two inputs, two operators and an output. This backend makes nothing faster: it runs
# the operators that PyTorch runs anyway.
#
# The next backend uses ONNX Runtime. PyTorch's exporter turns the graph into an ONNX model. A
# session of ONNX Runtime runs the model on the memory of PyTorch's tensors, without a copy. On a
# CPU, PyTorch and ONNX Runtime would disturb each other with several threads. So both get one, and
# the clock counts processor time.

warnings.simplefilter("ignore", FutureWarning)  # of torch's exporter
PROVIDER, DEVICE = ("CPUExecutionProvider", {}), "cpu"
# or ("CUDAExecutionProvider", {"use_tf32": "0"}), "cuda"
budget = 1 if unit_test_going() else 5
timed = partial(measure, device=DEVICE, clock=time.process_time, budget_s=budget)
threads, session_options = torch.get_num_threads(), SessionOptions()
torch.set_num_threads(1)
session_options.intra_op_num_threads = 1

# %%


def run_by_onnxruntime(model, results):
    """A function of a list of tensors that runs an ONNX model."""
    session = InferenceSession(model.SerializeToString(), session_options, [PROVIDER])

    def place(t):
        return DEVICE, 0, dtype_info(t.dtype).onnx, t.shape, t.data_ptr()

    def run(tensors):
        made = [torch.empty(t.shape, dtype=t.dtype, device=DEVICE) for t in results]
        tensors, binding = [t.contiguous() for t in tensors], session.io_binding()
        for value, t in zip(session.get_inputs(), tensors, strict=True):
            binding.bind_input(value.name, *place(t))
        for value, t in zip(session.get_outputs(), made, strict=True):
            binding.bind_output(value.name, *place(t))
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # ONNX Runtime has a stream of its own
        session.run_with_iobinding(binding)
        return made

    run._boxed_call = True  # it takes one list
    return run


# %%
# ``aot_autograd`` is PyTorch's helper for backends. It hands over a graph without in-place
# operators, with the weights among its inputs. ``rewrite`` changes the ONNX model before it runs:
# the rules below use it.


def convert(graph, examples, rewrite=None):
    """The backend: from a graph to a function."""
    program = torch.onnx.export(
        graph.eval(), tuple(examples), dynamo=True, optimize=True, verbose=False
    )
    model = onnx.shape_inference.infer_shapes(program.model_proto)
    kept.append(model if rewrite is None else rewrite(model))
    results = [node.meta["val"] for node in graph.graph.output_node().args[0]]
    return run_by_onnxruntime(kept[-1], results)


def compiled(model, rewrite=None):
    backend = aot_autograd(fw_compiler=partial(convert, rewrite=rewrite))
    return torch.compile(model, backend=backend, dynamic=False)


kept = []  # the ONNX models

# %%
# These are the thirty lines. We give them one layer of Llama, with random weights. The truth is the
# same layer in float64. The typical error is the root mean square (RMS) of all errors. Its unit is
# ε × the RMS of the truth, where ε is the step of the type at 1 (:ref:`unit`). To try another layer
# (``SIZES`` has tiny, small, narrow, medium and large), a mask or float16, change the first line.
# For a GPU, change ``PROVIDER`` and ``DEVICE`` above, too.

CONFIG, LAYERS, WITH_MASK, DTYPE = "tiny", 1, False, torch.float32
if not unit_test_going():  # in a full build of the site
    CONFIG = "narrow"

torch._dynamo.reset()
layer = Llama(SIZES[CONFIG], LAYERS, DTYPE, device=DEVICE).requires_grad_(False)
inputs = random_tokens(SIZES[CONFIG], WITH_MASK, DEVICE, padding="right")
thirty_lines = compiled(layer)

storage = {}  # the library's backend keeps its graph here, and computes it in float64
torch.compile(layer, backend=partial(onnx_custom_backend, storage=storage))(*inputs)
truth = storage["instance"][0]["compiled"].truth()
for name, call in ("eager", layer), ("thirty lines", thirty_lines):
    print(f"{name:14}typical error {scaled_error(truth, call(*inputs)).rms:.2f} ε × RMS")
products = sum(node.op_type == "MatMul" for node in kept[0].graph.node)
print("operators:", len(kept[0].graph.node), " of them products of matrices:", products)

# %%
# The result is right: its error is like that of eager PyTorch. But only nine of the operators are
# products of matrices: seven with weights, two in attention. On the H200 the layer of the answer
# (``medium``), converted without rules, takes :bound:`2.0 <ms.unfused>` ms in float16. The seven
# products with weights would take :bound:`0.44 <products>` ms at the rate of a large product. Where
# does the rest go?
#
# It is not the way into ONNX Runtime
# -----------------------------------
#
# The usual suspect is the border: PyTorch calls ONNX Runtime, and tensors go there and back. Then a
# graph that does almost nothing would be slow, too. We compile an addition of eight numbers, and
# time it beside the layer.

nothing = compiled(lambda x: x + 1)
eight = torch.ones(8, device=DEVICE)
calls = {"layer": partial(thirty_lines, *inputs), "one addition": partial(nothing, eight)}
times = timed(calls).frame
for name, seconds in zip(times["label"], times["median"], strict=True):
    print(f"{name:14}{1e3 * seconds:9.3f} ms")

# %%
# On this machine the border is a small part of the layer's time. On the H200 products are fast, and
# the border could matter. There the rules below change only what ONNX Runtime runs, and the layer
# takes :bound:`0.84 <ms.fused>` ms instead of :bound:`2.0 <ms.unfused>`. So ONNX Runtime itself
# took most of it.
#
# Small operators move tensors to memory and back
# -----------------------------------------------
#
# Look at the gate again, silu(g) × u. In ONNX it is a Sigmoid and two Mul. Each operator reads its
# inputs from memory (blue) and writes its result there (orange).

programs = {
    "three operators": [("Sigmoid", "g", "s"), ("Mul", "gs", "t"), ("Mul", "tu", "y")],
    "one operator": [("silu(g) × u", "gu", "y")],
}
figure, axes = plt.subplots(2, 1, figsize=(5.2, 2.8))
figure.set_label("Three operators move eight tensors to and from memory, one moves 3.")
for ax, (title, steps) in zip(axes, programs.items(), strict=True):
    place = 0.0
    for op, reads, written in steps:
        ax.text(place + len(reads) / 2, 1.1, op, ha="center")
        for tensor in reads + written:
            up, colour = (1, "C0") if tensor in reads else (-1, "C1")
            ax.arrow(place, (1 - up) / 2, 0, 0.75 * up, color=colour, head_width=0.15)
            ax.text(place, -0.4, tensor, ha="center")
            place += 1
        place += 0.6
    ax.set(title=title, xlim=(-0.6, 9.2), ylim=(-0.5, 1.5))
    ax.axis("off")
plt.show()

# %%
# Three operators move eight tensors, one operator moves three. If the time is spent on moving
# them, two things follow. An exponential needs far more arithmetic than a multiplication, but moves
# as much: it should take about as long. Eight multiplications by 1.5 give the result of one by
# 1.5⁸, but move eight times as much: they should take longer. We try both on four million numbers.
# The output is each time over that of one multiplication.


def chain(x, operators):
    for _ in range(operators):
        x = x * 1.5
    return x


many = torch.randn(2**22, device=DEVICE)
tried = {f"{n} multiplication(s)": partial(chain, operators=n) for n in (1, 4, 8)}
tried["1 exponential"] = torch.exp
calls = {name: partial(compiled(model), many) for name, model in tried.items()}
growth = timed(calls).ratios("1 multiplication(s)")
print(growth.set_index("label")["ratio"].round(1).to_string())

# %%
# The exponential takes about as long as the multiplication: for both, memory sets the time. Each
# operator of the chain adds its passes, so one operator in place of several saves time. Eight need
# not take eight times as long: a cache can hold part of the numbers.
#
# One rule
# --------
#
# A rule names the last operator of a pattern, looks at what comes before it, and replaces the
# pattern by one operator. ONNX Runtime has such operators, in the domain ``com.microsoft``. One of
# them is QuickGelu, which is SiLU where alpha = 1. This is a rule in full.


class SiluToQuickGelu(Rule):
    """Mul(x, Sigmoid(x)) becomes com.microsoft.QuickGelu(x, alpha=1)."""

    ops = ("Mul",)

    def rewrite(self, g, node):
        for x, gate in (node.inputs, node.inputs[::-1]):
            sigmoid = g.node(gate, "Sigmoid")
            if sigmoid is not None and sigmoid.inputs[0] is x:
                kind = {"domain": "com.microsoft", "alpha": 1.0}
                kind |= {"shapes": [g.shape(x)], "like": x}
                made = g.emit("QuickGelu", [x], before=node, **kind)
                g.replace(node.outputs[0], made[0])
                return True
        return False


def one_rule(model):
    editor = Editor(model, DEVICE.upper())
    apply_rules(editor, [SiluToQuickGelu()], Report())
    return editor.proto()


# %%
# :func:`~roundoff.fusion.fuse` has many such rules, in three tiers:
#
# * *tier 1*, ``default``, makes operators of the ONNX standard;
# * *tier 2*, ``+onnxruntime``, makes operators of ONNX Runtime, such as a whole attention;
# * *tier 3*, ``+experimental``, makes kernels of our own, in Triton on a GPU.
#
# Tier 3 and CUDA graphs need the library's backend,
# :func:`~roundoff.backend.onnx_custom_backend`. This backend also computes once, before the first
# call, what depends on the weights alone.


def with_tiers(model):
    tiers = OptimizationOptions("default+onnxruntime", processor=DEVICE.upper())
    return fuse(model, tiers)[0]


options = OptimizationOptions("default+onnxruntime+experimental", packed=1.0)
backend = partial(onnx_custom_backend, options=options, storage=storage)
calls = {
    "eager": layer,
    "thirty lines": thirty_lines,
    "with one rule": compiled(layer, one_rule),
    "with tiers 1, 2": compiled(layer, with_tiers),
    "library, tiers 1 to 3": torch.compile(layer, backend=backend, dynamic=False),
}
calls = {name: partial(call, *inputs) for name, call in calls.items()}
models = {"thirty lines": kept[0]}

# %%
# The table is from this machine. *operators* counts the operators of the ONNX model, and *custom*
# those outside the ONNX standard. *error* is the typical error in ε × RMS. *time* is the time over
# eager PyTorch's, with its 95 % interval from *low* to *high*. The methods take turns.

rows = {}
for name, call in calls.items():
    error = scaled_error(truth, call()).rms
    if name.startswith("with"):
        models[name] = kept[-1]
    models["library, tiers 1 to 3"] = storage["instance"][-1]["onnx"]
    nodes = models[name].graph.node if name in models else []
    custom = sum(node.domain != "" for node in nodes) if nodes else ""
    rows[name] = {"operators": len(nodes) or "", "custom": custom, "error": error}
live = pd.DataFrame(rows.values(), index=list(rows))
over_eager = timed(calls).ratios("eager").set_index("label")
torch.set_num_threads(threads)
live = live.join(over_eager).rename(columns={"ratio": "time"})
live.round(2)

# %%
# The rules keep the result right: all errors are like eager PyTorch's. Tiers 1 and 2 remove most
# operators: attention, for one, becomes a single operator. From *thirty lines* to the last row the
# time changes little: on one core of a CPU the removed operators took little of it. A GPU has to
# show the gain.
#
# How much it matters
# -------------------
#
# On the H200 the layer has the sizes of Llama-2-7B, but a smaller feed-forward part: hidden size
# 4096, 32 heads, intermediate size 1024. The call is a *prefill*, the first pass over a prompt: 2
# prompts of 1024 tokens each, in float16.
#
# *roundoff* is the library's backend. A row without a tier in its name has tiers 1 and 2. *MiB* is
# the memory held beside the model. *× inductor* is the time over inductor's. Rows with a CUDA graph
# (a recorded call, replayed) are compared with *reduce-overhead*, inductor's own CUDA graph.

COLUMNS = {"nodes": "operators", "n_custom_ops": "custom", "median": "median ms"}
COLUMNS |= {"× inductor": "× inductor", "memory": "MiB", "rms error": "error"}
CASE = "config == 'medium' and precision == 'float16' and attention == 'sdpa'"
names = ["config", "precision", "attention", "optimization", *COLUMNS]
half = read_table("plot_llama_backend", "nvidia-h200", "times", names)
half = half.query(CASE).set_index("optimization")
shown = half[list(COLUMNS)].rename(columns=COLUMNS).rename_axis(None)
shown.map("{:.3g}".format).replace("nan", "")

# %%

NAMES = {
    "roundoff, unfused": "no rules",
    "roundoff": "rules",
    "inductor": "inductor",
    "roundoff, CUDA graph": "rules, CUDA graph",
    "roundoff, tier 3, CUDA graph": "rules, Triton, CUDA graph",
    "inductor, reduce-overhead": "inductor, CUDA graph",
}
bars = half["median"].reindex(list(NAMES)).rename(NAMES)
title = "Milliseconds, H200, float16"
colors = ["C1" if "inductor" in name else "C0" for name in bars.index]
ax = bars.plot.barh(figsize=(4.8, 2.7), title=title, color=colors)
ax.figure.set_gid("answer")  # the site shows it beside the answer
ax.figure.set_label(f"{title}: {bars.round(2).to_dict()}")
ax.bar_label(ax.containers[0], fmt="%.2f", padding=3)
ax.set_ylabel("")
ax.margins(x=0.12)
ax.invert_yaxis()
plt.show()

# %%
# The rules of tiers 1 and 2 turn :bound:`110 <nodes.unfused>` operators into
# :bound:`12 <nodes.fused>`, and most of the time goes. They remove three things at once: starts of
# kernels, an attention of many operators, and passes over memory. On an H100 the study took away
# one at a time, in float16.
#
# Starting the kernels takes little. A CUDA graph starts all kernels at once: without rules, it
# saves :bound:`6 % <saved.graph@nvidia-h100-80gb-hbm3>` of the time on the H100. Attention as one
# operator saves :bound:`24 % <saved.attention@nvidia-h100-80gb-hbm3>` on the H100, and all rules
# together save :bound:`59 % <saved.rules@nvidia-h100-80gb-hbm3>`. So the other rules save more than
# attention does. They make each norm, rotation and gate one operator, which saves passes, and join
# products.
#
# With CUDA graphs on both sides, tiers 1 and 2 take :bound:`1.11 <fused.graph>` times inductor's
# time in float16, and :bound:`0.97 <fused.float32>` in float32. Tier 3 takes :bound:`0.86 <best>`
# in float16. In bfloat16 it takes :bound:`0.86 <best.bfloat16>`, and in float32
# :bound:`0.94 <best.float32>`. Without CUDA graphs there is :bound:`no difference measured <alone>`
# between tier 3 and inductor in float16.
#
# No version has more than :bound:`1.22 <error>` times the typical error of eager PyTorch in the
# same type. Compare times within one type only: with TF32 the error is :bound:`128 <tf32>` times
# that of float32.
#
# What it costs
# -------------
#
# **Memory.** The best version holds :bound:`710 <memory.best>` MiB beside the model, where inductor
# with CUDA graphs holds :bound:`196 <memory.graph>` (H200, float16). Of these 710 MiB, 112 are
# copies of weights, side by side (``packed=1.0`` allows them; ``packed=0`` makes none, and was not
# timed). We do not know what takes the rest. Tiers 1 and 2 hold :bound:`402 <memory.tiers>` MiB
# with a CUDA graph, and :bound:`288 <memory.plain>` without.
#
# **The first call** converts the model. For two small layers this took :bound:`5.6 <compile>` s on
# the H200's host, and inductor took :bound:`7.6 <compile.inductor>`. One later call took
# :bound:`2.0 <later>` ms, and inductor's :bound:`1.0 <later.inductor>`. On the H100 the two were
# alike.
#
# **A CUDA graph** serves one shape, and ``dynamic=False`` compiles again for a new length. The next
# call overwrites the result: copy what you keep.
#
# Use the thirty lines to learn, or to bring a runtime of your own to ``torch.compile``. Use
# inductor where it is fast enough: it needs no second runtime. Use the library's backend with tier
# 3 for a prefill of fixed length on a GPU. Tier 3 gains less where products take more of the time:
# with the full feed-forward part of Llama-2-7B the best version takes :bound:`0.91 <best.large>` of
# inductor's time.
#
# Your own model
# --------------
#
# Put in a module and a tuple of tensors, on a GPU if you have one, and run this cell after the
# imports. The cell sets the module to ``eval()``. A model that ``torch.compile`` or the backend
# cannot compile as one graph is refused, with the reason. On a GPU both compiled versions use CUDA
# graphs. On a CPU one thread is timed, and inductor needs a C++ compiler. A line has the time over
# eager PyTorch's, its 95 % interval, and the typical error in ε × RMS.

MODEL = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.SiLU())
INPUTS = (torch.randn(64, 256),)

if not isinstance(MODEL, torch.nn.Module) or not isinstance(INPUTS, tuple):
    raise ArgumentError("MODEL, INPUTS", got=MODEL, expected="a torch module, a tuple")
own, leaves = MODEL.eval().requires_grad_(False), torch.utils._pytree.tree_leaves
wide = copy.deepcopy(own).double()  # the truth
exact = leaves(wide(*(t.double() if t.is_floating_point() else t for t in INPUTS)))
usual, graph = torch.get_num_threads(), INPUTS[0].is_cuda
torch.set_num_threads(1)
fixed = partial(torch.compile, own, fullgraph=True, dynamic=False)
options = OptimizationOptions("default+onnxruntime+experimental")
backend = partial(onnx_custom_backend, options=options, cuda_graph=graph)
ways = {"eager": partial(own, *INPUTS)}
ways["inductor"] = partial(fixed(mode="reduce-overhead" if graph else None), *INPUTS)
ways["ONNX Runtime"] = partial(fixed(backend=backend), *INPUTS)
errors = {name: scaled_error(exact, leaves(way())).rms for name, way in ways.items()}
speed = measure(ways, device=INPUTS[0].device.type, budget_s=1, clock=time.process_time)
torch.set_num_threads(usual)
for name, ratio, low, high in speed.ratios().itertuples(index=False):
    print(f"{name:12} {ratio:.2f} ({low:.2f} to {high:.2f}) error {errors[name]:.3g}")

# %%
# Limits, and what to read next
# -----------------------------
#
# * The forward pass alone, one model family, one length, two GPUs of one generation (Hopper).
#   :ref:`whole-model` has decode steps with a cache.
# * Inductor's *max-autotune* gains nothing here: on an H100 there is
#   :bound:`no difference measured <autotune@nvidia-h100-80gb-hbm3>` to *reduce-overhead*.
# * On an H100 the best version takes :bound:`0.88 <best@nvidia-h100-80gb-hbm3>` of inductor's time.
# * Padding on the left leaves tokens with nothing to attend to: their result is undefined.
#   PyTorch's eager attention gives them a mean, its fused attention (sdpa) zeros. A comparison then
#   shows a large error where nothing is wrong. The mask of this page pads on the right.
# * The thirty lines take what PyTorch's exporter takes, with fixed shapes and without gradients.
#   The library's backend refuses training and float8 inputs. Operators that the backend cannot
#   convert run in PyTorch.
# * The question and the options come from the documentation of experimental-experiment [#seed]_.
# * Next: :ref:`gemm-fusion`, for what packed weights give, and :ref:`triton-layer-norm`, for a
#   kernel of the kind that tier 3 uses.
#
# .. [#seed] X. Dupré, `Fuse kernels in a small Llama model
#    <https://sdpython.github.io/doc/experimental-experiment/dev/auto_examples/plot_custom_backend_llama_102.html>`_,
#    documentation of experimental-experiment.
