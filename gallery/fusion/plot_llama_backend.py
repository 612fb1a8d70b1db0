r"""
.. _llama-backend:

How do I write a backend for torch.compile?
===========================================

In thirty lines, with ONNX Runtime behind it. Then the harder part: making a Llama layer faster.

.. answer:: nvidia-h200

   **Why.** ``torch.compile`` hands a backend a graph of operators, and runs the function that the
   backend returns. A conversion to ONNX gains nothing, as each small operator still passes over
   memory. One Llama layer, on a prompt in float16, then takes :bound:`2.7 <unfused>` times as long
   as with inductor, PyTorch's own backend.

   **The cure.** Rewrite the graph by rules, so that several operators become one. With Triton
   kernels for some of them, and CUDA graphs on both sides, the layer is :bound:`faster <best>` than
   inductor's, at :bound:`0.86 <best>` of the time.

   **The price.** That version serves prompts of one length. It holds :bound:`710 <memory.best>` MiB
   beside the model, where inductor holds :bound:`196 <memory.graph>`. Without the Triton kernels
   the layer stays :bound:`slower <fused.graph>` than inductor's.

   .. code-block:: python

      def my_backend(graph, examples):  # called once a graph
          graph.print_readable()  # what torch.compile hands over
          return graph.forward  # what runs at each call: put yours here

      mine = torch.compile(model, backend=my_backend)(ids)

      # the fastest one of this page, on a GPU, under torch.no_grad()
      options = roundoff.OptimizationOptions("default+onnxruntime+experimental", packed=1.0)
      backend = partial(roundoff.onnx_custom_backend, options=options, cuda_graph=True)
      fast = torch.compile(model, backend=backend, dynamic=False)
      y = fast(ids)  # overwritten by the next call
"""

# %%
# Every cell runs on a laptop, the slowest in a minute. A bold number was recorded on an H200 by a
# study of this question: click it for its evidence.

import copy
import warnings
from functools import partial

import matplotlib.pyplot as plt
import onnx
import pandas as pd
import torch
from onnxruntime import InferenceSession
from torch._dynamo.backends.common import aot_autograd

from roundoff.backend import onnx_custom_backend
from roundoff.compare import scaled_error
from roundoff.dtypes import dtype_info
from roundoff.errors import ArgumentError
from roundoff.fusion import Editor, OptimizationOptions, Report, Rule, apply_rules, fuse
from roundoff.models import SIZES, Llama, random_tokens
from roundoff.record import read_records
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
# session of ONNX Runtime runs the model on the memory of PyTorch's tensors, without a copy.

warnings.simplefilter("ignore", FutureWarning)  # torch's exporter uses what torch deprecates
PROVIDER, DEVICE = ("CPUExecutionProvider", {}), "cpu"
# or ("CUDAExecutionProvider", {"use_tf32": "0"}), "cuda"


def run_by_onnxruntime(model, results):
    """A function of a list of tensors that runs an ONNX model."""
    session = InferenceSession(model.SerializeToString(), providers=[PROVIDER])

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
# operators, and makes the weights inputs of that graph. *rewrite* is a hook for the rules below.


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
# These are the thirty lines. We give them one layer of Llama, with random weights. How far is the
# result from the truth, the layer in float64? The unit of an error is ε × RMS: ε is the gap of the
# type beside 1, RMS is the root mean square of the truth (:ref:`unit`). The typical error is the
# root mean square of all errors. To try another layer (``SIZES`` has tiny, small, narrow, medium
# and large), more layers, a mask, or float16 on a GPU, change the first line and run on.

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
# The result is right: ONNX Runtime's error is like that of eager PyTorch. But only nine of the
# operators are products of matrices: seven with weights, two in attention. On the H200 the
# converted layer takes :bound:`2.0 <ms.unfused>` ms in float16. The seven products with weights
# would take :bound:`0.44 <products>` ms at the rate of a large product. Where does the rest go?
#
# It is not the way into ONNX Runtime
# -----------------------------------
#
# The usual suspect is the border: PyTorch calls ONNX Runtime, and tensors go there and back. Then a
# graph that does almost nothing would be slow, too. We compile one addition of eight numbers, and
# time it beside the layer. These are medians of the machine that built this page.

nothing = compiled(lambda x: x + 1)
eight = torch.ones(8, device=DEVICE)
calls = {"layer": partial(thirty_lines, *inputs), "one addition": partial(nothing, eight)}
times = measure(calls, device=DEVICE, budget_s=0.5).frame
for name, seconds in zip(times["label"], times["median"], strict=True):
    print(f"{name:14}{1e6 * seconds:8.0f} µs")

# %%
# Here the border takes a small part of the layer's time. A GPU computes faster, so the H200 needs a
# test of its own. With the rules of this page its layer crosses the same border, and takes
# :bound:`0.84 <ms.fused>` ms instead of :bound:`2.0 <ms.unfused>`. So most of the
# converted layer's time is spent inside ONNX Runtime.
#
# Each operator is a pass over memory
# -----------------------------------
#
# Look at the gate again, silu(g) × u. In ONNX it is a Sigmoid and two Mul. Each operator reads its
# inputs from memory and writes its result there. A blue arrow is a read, an orange one a write.

programs = {
    "three operators": [("Sigmoid", "g", "s"), ("Mul", "gs", "t"), ("Mul", "tu", "y")],
    "one operator": [("silu(g) × u", "gu", "y")],
}
figure, axes = plt.subplots(2, 1, figsize=(5.2, 2.8))
figure.set_label("Three operators move eight tensors to and from memory. One operator moves three.")
for ax, (title, steps) in zip(axes, programs.items(), strict=True):
    place = 0.0
    for op, reads, written in steps:
        ax.text(place + len(reads) / 2, 1.15, op, ha="center")
        for tensor in reads + written:
            up, colour = (1, "C0") if tensor in reads else (-1, "C1")
            ax.arrow(place, (1 - up) / 2, 0, 0.9 * up, color=colour, head_width=0.15)
            ax.text(place, -0.4, tensor, ha="center")
            place += 1
        place += 0.6
    ax.set(title=title, xlim=(-0.6, 9.2), ylim=(-0.5, 1.5))
    ax.axis("off")
plt.show()

# %%
# Three operators move eight tensors, one operator moves three. If the passes over memory make the
# time, two things follow. An exponential needs much more arithmetic than a multiplication by 1.5,
# but the same passes, a read and a write: it should take about as long. And a chain of
# multiplications should take longer with each of them. We try both on four million numbers. The
# output is the time of each, over the time of one multiplication.


def chain(x, operators):
    for _ in range(operators):
        x = x * 1.5
    return x


many = torch.randn(2**22, device=DEVICE)
tried = {f"{n} multiplication(s)": partial(chain, operators=n) for n in (1, 4, 8)}
tried["1 exponential"] = torch.exp
calls = {name: partial(compiled(model), many) for name, model in tried.items()}
growth = measure(calls, device=DEVICE, budget_s=3).ratios("1 multiplication(s)")
print(growth.set_index("label")["ratio"].round(1).to_string())

# %%
# The exponential is not much dearer than the multiplication: arithmetic does not make the time.
# Each operator of a chain adds its passes. So take operators away, and the time of their passes
# goes.
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
                kind = {"domain": "com.microsoft", "alpha": 1.0, "shapes": [g.shape(x)], "like": x}
                made = g.emit("QuickGelu", [x], before=node, **kind)
                g.replace(node.outputs[0], made[0])
                return True
        return False


def one_rule(model):
    editor = Editor(model, DEVICE.upper())
    apply_rules(editor, [SiluToQuickGelu()], Report())
    return editor.proto()


# %%
# :func:`~roundoff.fusion.fuse` has many such rules, in three tiers. *Tier 1*, ``default``, keeps to
# ONNX's operators. *Tier 2*, ``+onnxruntime``, uses those of ONNX Runtime: a norm, a whole
# attention. *Tier 3*, ``+experimental``, adds kernels of our own, in Triton on a GPU. Tier 3 and
# CUDA graphs need the library's backend, :func:`~roundoff.backend.onnx_custom_backend`. This
# backend also computes once, before the first call, what depends on weights only.


def with_tiers(tiers):
    options = OptimizationOptions(tiers, processor=DEVICE.upper())
    return lambda model: fuse(model, options)[0]


def by_library(tiers):
    options = OptimizationOptions(tiers, packed=1.0)
    backend = partial(onnx_custom_backend, options=options, storage=storage)
    return torch.compile(layer, backend=backend, dynamic=False)


TIERS = ["default", "default+onnxruntime", "default+onnxruntime+experimental"]
models = {"thirty lines": kept[0]}
calls = {
    "eager": layer,
    "thirty lines": thirty_lines,
    "with one rule": compiled(layer, one_rule),
    "with tier 1": compiled(layer, with_tiers(TIERS[0])),
    "with tiers 1, 2": compiled(layer, with_tiers(TIERS[1])),
    "library, tiers 1, 2": by_library(TIERS[1]),
    "library, tiers 1 to 3": by_library(TIERS[2]),
}
calls = {name: partial(call, *inputs) for name, call in calls.items()}

# %%
# The table is live. *error* is the typical error in ε × RMS. *operators* counts the operators of
# the ONNX model, and *custom* those that are outside ONNX's standard. *speed-up* is eager PyTorch's
# time over that of the row.

rows = {}
for name, call in calls.items():
    error = scaled_error(truth, call()).rms
    if name.startswith("library"):
        models[name] = storage["instance"][-1]["onnx"]
    elif name.startswith("with"):
        models[name] = kept[-1]
    domains = [node.domain for node in models[name].graph.node] if name in models else []
    custom = len(domains) - domains.count("")
    rows[name] = {"error": round(error, 2), "operators": len(domains), "custom": custom}
timings = measure(calls, device=DEVICE, budget_s=1)
medians = timings.frame.set_index("label")["median"]
live = pd.DataFrame(rows).T
live["median ms"], live["speed-up"] = 1e3 * medians, medians["eager"] / medians
live.round(2)

# %%
# The rules keep the result right: all errors are like eager PyTorch's. They take most operators
# away: a whole attention, for one, is a single operator after tier 2. On a processor this saves
# little, as the products of matrices take most of the time: rows with close times may change places
# in the next run.
#
# How much it matters
# -------------------
#
# On the H200 the layer has the sizes of Llama-2-7B, but a narrower feed-forward: hidden size 4096,
# 32 heads, intermediate size 1024. The call is a *prefill*, the first pass over a prompt, of
# 2 × 1024 tokens in float16. A CUDA graph replays a recorded call, so that no launch is prepared
# again. The rows *roundoff* are the library's backend. Those that name no tier have tiers 1 and 2.
#
# *nodes* and *n_custom_ops* are the *operators* and *custom* of the table above. *median* is in ms,
# *memory* in MiB beside the model, *rms error* in ε × RMS. *× inductor* is the time over
# inductor's. A row with a CUDA graph is compared with *reduce-overhead*, where inductor uses one.

COLUMNS = ["nodes", "n_custom_ops", "median", "× inductor", "memory", "rms error"]
half = pd.DataFrame(columns=COLUMNS)  # without the record
for record in read_records("plot_llama_backend"):
    if record.machine == "nvidia-h200":
        table = record.tables["times"]
        one = (table["config"] == "medium") & (table["precision"] == "float16")
        one &= table["attention"] == "sdpa"
        half = table[one].set_index("optimization").rename_axis(None)
half[COLUMNS].map("{:.3g}".format).replace("nan", "")

# %%

bars = half["median"] if len(half) else live["median ms"]
title = "Milliseconds, H200, float16" if len(half) else "Milliseconds, this machine"
ax = bars.plot.barh(figsize=(5.4, 2.8), title=title)
ax.figure.set_gid("answer")  # the site shows it beside the answer
ax.figure.set_label(f"{title}, one layer: {bars.round(2).to_dict()}")
ax.bar_label(ax.containers[0], fmt="%.2f", padding=3)
ax.invert_yaxis()
plt.show()

# %%
# The rules take :bound:`110 <nodes.unfused>` operators to :bound:`12 <nodes.fused>`, and most of
# the time goes with them. Passes and launches are a part of what went. But attention also became
# one kernel, and packed weights made one product of three. No row separates these causes.
#
# With CUDA graphs on both sides, tiers 1 and 2 are :bound:`slower <fused.graph>` than inductor.
# With tier 3 the layer is :bound:`faster <best>` than inductor's, at :bound:`0.86 <best>` of the
# time. It is :bound:`faster <best.bfloat16>` in bfloat16 and :bound:`faster <best.float32>` in
# float32, too. Without CUDA graphs there is :bound:`no difference measured <alone>` between tier 3
# and inductor.
#
# An H100 agrees where both sides use CUDA graphs. Without them, the H100's times are of one run on
# a slow host, and we conclude nothing from these.
#
# No version has more than :bound:`1.22 <error>` times the typical error of eager PyTorch in the
# same type. Compare times within one type only: with TF32 the error is :bound:`128 <tf32>` times
# that of float32.
#
# What it costs
# -------------
#
# The best version holds :bound:`710 <memory.best>` MiB beside the model, where inductor with CUDA
# graphs holds :bound:`196 <memory.graph>` (H200, float16). The rules are not the reason, as the row
# *unfused* holds nearly as much. ``packed=1.0`` copies weights side by side, here 112 MiB. With
# ``packed=0`` there are no copies. We have not timed the layer without them.
#
# The first call converts the model. For two small layers this took :bound:`5.6 <compile>` s on the
# H200's host, in one run, and inductor took :bound:`7.6 <compile.inductor>` s.
#
# With a CUDA graph, the next call overwrites the result: copy what you keep. A graph serves one
# shape, and ``dynamic=False`` compiles again for a new length.
#
# Use the thirty lines to learn, or to bring a runtime of your own to ``torch.compile``. Use
# inductor where it is fast enough: it needs no second runtime. Use the library's backend with tier
# 3 for a prefill of fixed length on a GPU. The more of the time products take, the less fusion can
# save: with the wider feed-forward of Llama-2-7B the best version takes :bound:`0.91 <best.large>`
# of inductor's time.
#
# Your own model
# --------------
#
# Put in a module and a tuple of tensors, on a GPU if you have one, and run this cell after the
# imports. The module is set to ``eval()``. What ``torch.compile`` or the backend cannot compile as
# one graph is refused by name. A line has the speed-up over eager PyTorch and the typical error in
# ε × RMS. Times vary on a busy machine: run the cell twice.

MODEL = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.SiLU(), torch.nn.Linear(1024, 256))
INPUTS = (torch.randn(64, 256),)

are_tensors = isinstance(INPUTS, tuple) and [torch.is_tensor(t) for t in INPUTS]
if not isinstance(MODEL, torch.nn.Module) or not are_tensors or not all(are_tensors):
    raise ArgumentError("MODEL, INPUTS", got=MODEL, expected="a torch module, a tuple of tensors")
own = MODEL.eval().requires_grad_(False)
own_calls = {"eager": partial(own, *INPUTS)}
for label, tiers in ("unfused", None), ("tiers 1, 2", "default+onnxruntime"):
    backend = partial(onnx_custom_backend, options=OptimizationOptions(tiers))
    own_calls[label] = partial(torch.compile(own, backend=backend, fullgraph=True), *INPUTS)
made = {label: torch.utils._pytree.tree_leaves(call()) for label, call in own_calls.items()}
wide = copy.deepcopy(own).double()  # the truth
exact = wide(*(t.double() if t.is_floating_point() else t for t in INPUTS))
exact = torch.utils._pytree.tree_leaves(exact)
speed = measure(own_calls, device=INPUTS[0].device.type, budget_s=0.5)
for label, result in made.items():
    speed_up, error = speed.ratio("eager", label).value, scaled_error(exact, result).rms
    print(f"{label:12}{speed_up:6.2f} × eager, error {error:.3g}")

# %%
# Limits, and what to read next
# -----------------------------
#
# * The forward pass alone, one model family, one length, two GPUs of one generation (Hopper).
#   :ref:`whole-model` has decode steps with a cache. No record has inductor's *max-autotune* yet:
#   ``studies/llama_backend.py --max_autotune 1`` measures it.
# * A token that sees no key has no defined result. Padding on the left makes such tokens. PyTorch's
#   eager attention gives them a mean, and its fused attention (sdpa) gives them zeros. A comparison
#   then shows a large error where nothing is wrong. The mask of this page pads on the right.
# * ``model.half()`` is a different model from one loaded in float16: it also rounds the frequencies
#   of the rotary embedding. On the H200 the error of keys and values is then
#   :bound:`2.9 <half>` times as large.
# * The thirty lines take what PyTorch's exporter takes, with fixed shapes and without gradients.
#   The library's backend refuses training and float8 inputs. Operators that the backend cannot
#   convert run in PyTorch.
# * The question, the options and the columns of the table come from a page of
#   experimental-experiment [#seed]_.
# * Next: :ref:`gemm-fusion`, for what packed weights give, and :ref:`triton-layer-norm`, for a
#   kernel of the kind that tier 3 uses.
#
# .. [#seed] X. Dupré, `Fuse kernels in a small Llama model
#    <https://sdpython.github.io/doc/experimental-experiment/dev/auto_examples/plot_custom_backend_llama_102.html>`_,
#    documentation of experimental-experiment.
