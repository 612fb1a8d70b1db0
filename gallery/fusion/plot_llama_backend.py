r"""
.. _llama-backend:

Is an ONNX Runtime backend faster than inductor?
================================================

Prefill of 2 × 1,024 tokens by one Llama layer (hidden size 4096, 32 heads, intermediate size 1024)
under ``torch.compile``: inductor against ``backend="roundoff"``, type by type.

.. answer:: nvidia-h200

   * **Without tier 3, no**: on an H200 it takes :bound:`1.11 <called>` times the fastest
     inductor's time in float16, :bound:`1.12 <called/2>` in bfloat16, :bound:`1.28 <called/4>` in
     TF32, where it keeps attention in float32, and :bound:`0.98 <called/3>` in float32. On an H100
     it is ahead in 16 bits, :bound:`0.96 <h100>` and :bound:`0.92 <h100/2>`.
   * **With tier 3, our Triton kernels, and CUDA graphs on both sides, yes**:
     :bound:`0.86 <best>` in float16, :bound:`0.86 <best/2>` in bfloat16, :bound:`0.94 <best/3>` in
     float32; :bound:`0.91 <large>` in float16 with the feed-forward of Llama-2-7B.
   * **Measured for prefill of one fixed length**; decode and a KV cache are on :ref:`whole-model`.
     With ``dynamic=True`` one conversion serves all lengths. A call takes more memory:
     :bound:`288 <memory>` MiB beside the model, inductor :bound:`80 <memory/2>`.

   .. code-block:: python

      options = roundoff.OptimizationOptions("default+onnxruntime+experimental", packed=1.0)
      backend = partial(roundoff.onnx_custom_backend, options=options, cuda_graph=True)
      fast = torch.compile(model, backend=backend, dynamic=False)  # under torch.no_grad()
      y = fast(ids)  # overwritten by the next call
"""

# %%
# One layer, every way to run it
# ------------------------------
#
# The layer has the sizes of Llama-2-7B's but for a narrower feed-forward (``--config large`` has
# its own). It comes from transformers, with random weights, an embedding before it and a norm after
# it. Every way returns the same: the hidden state, the keys and the values. The backend converts
# dynamo's graph to ONNX, rewrites it in tiers, and runs it in ONNX Runtime on torch's memory:
#
# * *unfused*: the converted graph as it is;
# * *tier 1*, ``default``: fewer operators, all of them ONNX's;
# * *roundoff*: with tier 2, ``+onnxruntime``, operators that ONNX Runtime adds. This is what
#   ``backend="roundoff"`` gives, but that here all weights are packed (``packed=1.0``);
# * *tier 3*, ``+experimental``: our own Triton kernels between those of ONNX Runtime (on a CPU,
#   torch's matrix products).

import dataclasses
import gc
import time
import warnings
from functools import partial

import onnxruntime
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor

from roundoff.backend import onnx_custom_backend
from roundoff.compare import scaled_error
from roundoff.dtypes import dtype_info
from roundoff.errors import ArgumentError
from roundoff.fusion import Editor, OptimizationOptions, Report, Rule, apply_rules, fuse
from roundoff.graph import plot_dot
from roundoff.models import SIZES, Llama, random_tokens
from roundoff.ort import available, session
from roundoff.page import Study
from roundoff.script import get_parsed_args, unit_test_going, usage_error
from roundoff.timing import measure, measure_ceilings, torch_precision

warnings.simplefilter("ignore", FutureWarning)  # torch's exporter uses what torch deprecates
quick = unit_test_going()
cuda = torch.cuda.is_available() and bool(available(["CUDAExecutionProvider"]))
device, processor = ("cuda", "CUDA") if cuda else ("cpu", "CPU")
args = get_parsed_args(
    "plot_llama_backend",
    __doc__,
    config=("tiny" if quick else "medium" if cuda else "narrow", "size of the layer", SIZES),
    num_hidden_layers=(1, "decoder layers", 1),
    with_mask=(False, "a batch × sequence padding mask as a second input"),
    dtype=("", "precisions to compare, such as float16,TF32"),
    budget=(0.2 if quick else 4.0 if cuda else 15.0, "seconds of measuring for each precision", 0),
)
study = Study("plot_llama_backend", args)

TIERS = {
    "roundoff, unfused": None,
    "roundoff, tier 1": "default",
    "roundoff": "default+onnxruntime",
    "roundoff, tier 3": "default+onnxruntime+experimental",
}
BEST = "roundoff, tier 3, CUDA graph"
CHOSEN = ("inductor", "inductor, reduce-overhead", "roundoff", BEST)


def ways():
    """Label, attention that transformers is told to use, whether it replays a CUDA graph."""
    for attention in ("sdpa", "eager"):
        yield "eager", attention, False
        if not quick and (cuda or attention == "sdpa"):
            yield "inductor", attention, False
        if cuda:
            yield "inductor, reduce-overhead", attention, True
    for label in list(TIERS)[2 * quick :]:
        yield label, "sdpa", False
        if cuda and label in list(TIERS)[2:]:
            yield f"{label}, CUDA graph", "sdpa", True


def prepare(model, label, **options):
    """A model as one of the ways runs it, and what our backend stores of the graph."""

    def forward(*inputs):
        return model(*inputs)

    # torch.compile keeps what it compiled by code object: one for each way.
    forward.__code__ = forward.__code__.replace(co_name="forward_apart")
    storage = {}
    by, _, mode = label.partition(", ")
    if by == "eager":
        return forward, storage
    options = {"dynamic": False, "fullgraph": True} | options
    if by == "inductor":
        return torch.compile(forward, mode=mode or None, **options), storage
    tiers = OptimizationOptions(TIERS[label.removesuffix(", CUDA graph")], packed=1.0)
    graph = label.endswith("CUDA graph")
    backend = partial(onnx_custom_backend, options=tiers, cuda_graph=graph, storage=storage)
    return torch.compile(forward, backend=backend, **options), storage


def captured(model, inputs):
    """The graph of a model as exported; its ``truth()`` is in float64 from first to last."""
    run, storage = prepare(model, "roundoff, unfused")
    with torch.no_grad():
        run(*inputs)
    return storage["instance"][0]["compiled"]


# %%
# Without tier 3 it is behind on an H200; with it and CUDA graphs it is ahead
# ---------------------------------------------------------------------------
#
# The ways take turns, round by round, in one process; a sample is five calls in a row, so that
# launches overlap as they do in a model. *× inductor* is the ratio to the fastest inductor, of
# either attention, that replays a CUDA graph where this way does. The type is the same on both
# sides of every ratio; in TF32 the fastest inductor has eager attention, in TF32 as well, and the
# backend without tier 3 has float32's. *Memory*, beside the model, is what stays taken after
# compiling and what comes and goes in a call. The H100's times are of one run.


def free_memory():
    """Bytes that the GPU has free when torch's cache is empty; 0 without one."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] if cuda else 0


def repeated(run, inputs, times):
    for _ in range(times):
        run(*inputs)


def contest(models, inputs, chosen, budget, tf32=False):
    """Time, error, nodes and memory of every chosen way to run a model."""
    calls, rows = {}, {}
    with torch.no_grad(), torch_precision(tf32):
        truth = captured(next(iter(models.values())), inputs).truth()
        for label, attention, graph in chosen:
            before = free_memory()
            run, storage = prepare(models[attention], label)
            run(*inputs)
            memory = before - free_memory()  # what stays, compiling aside
            start = torch.cuda.memory_allocated()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            made = run(*inputs)
            memory += torch.cuda.max_memory_allocated() - start  # and what comes and goes
            nodes = storage["instance"][0]["onnx"].graph.node if storage else None
            key = f"{label}, {attention} attention"
            calls[key] = partial(repeated, run, inputs, 5 if cuda else 1)
            rows[key] = {
                "optimization": label,
                "runtime": label.removesuffix(", CUDA graph").removesuffix(", reduce-overhead"),
                "attention": attention,
                "processor": processor,
                "CUDA graph": graph,
                "n_custom_ops": None if nodes is None else sum(n.domain != "" for n in nodes),
                "nodes": None if nodes is None else len(nodes),
                "rms error": scaled_error(truth[0], made[0]).rms,
                "error": scaled_error(truth[0], made[0]).largest,
                "keys error": scaled_error(truth[1:], made[1:]).rms if made[1:] else None,
                "memory": memory / 2**20 if cuda else None,
            }
            del made
        times = measure(calls, device=device, budget_s=budget, min_rounds=5, warmup=1)
    frame = times.frame.set_index("label")
    for key, row in rows.items():
        alike = [k for k in rows if rows[k]["CUDA graph"] == row["CUDA graph"]]
        rivals = [k for k in alike if k.startswith("inductor")]
        base = min(rivals, key=frame["median"].get) if rivals else None
        ratio = times.ratio(key, base) if base else None
        n, ms = (5, 1e3 / 5) if cuda else (1, float("nan"))  # a CPU's times are ratios alone
        row |= {
            "median": frame["median"][key] * ms,
            "avg_time": frame["mean"][key] * ms,
            "warmup": int(frame["warmup"][key]) * n,
            "N calls": int(frame["rounds"][key]) * n,
            "speedup": times.ratio(next(iter(rows)), key).value,
            "× inductor": ratio.value if ratio else float("nan"),
            "low": ratio.low if ratio else float("nan"),
            "high": ratio.high if ratio else float("nan"),
        }
    torch._dynamo.reset()
    return list(rows.values())


PRECISIONS = {  # type, TF32 in its products
    "float16": (torch.float16, False),
    "bfloat16": (torch.bfloat16, False),
    "float32": (torch.float32, False),
    "TF32": (torch.float32, True),
}
known = list(PRECISIONS) if cuda else ["float32"]
asked = args.dtype.split(",") if args.dtype else known
if not set(asked) <= set(known):
    usage_error(
        "plot_llama_backend", f"--dtype {args.dtype}: on {device} expected {', '.join(known)}"
    )
cases = [(args.config, precision) for precision in asked]
if cuda and args.config == "medium" and not args.dtype:
    cases.append(("large", "float16"))
rates = measure_ceilings(
    device,
    dtypes=("float32", "float16", "bfloat16") if cuda else ("float32",),
    side=128 if quick else None,
    nbytes=2**20,
    budget_s=0.2,
)
layers, contests = args.num_hidden_layers, []
telling = [w for w in ways() if w[1] == "sdpa" and w[0] in ("eager", *CHOSEN)]
for config, precision in cases:
    size, (dtype, tf32) = SIZES[config], PRECISIONS[precision]
    models = {a: Llama(size, layers, dtype, a, device) for a in ("sdpa", "eager")}
    inputs = random_tokens(size, args.with_mask, device, padding="right")
    weights = sum(w.numel() for w in models["sdpa"].model.layers.parameters() if w.dim() == 2)
    least = 2 * inputs[0].numel() * weights / rates["float32 tf32" if tf32 else precision]
    chosen = telling if config == "large" else list(ways())
    head = {"precision": precision, "config": config, "layers": layers}
    for row in contest(models, inputs, chosen, args.budget, tf32):
        contests.append(head | row | {"products": 1e3 * least if cuda else None})
study.table(
    "times",
    contests,
    "One call: time, its ratio to inductor's, error of the hidden state.",
    columns=["precision", "optimization", "median", "× inductor", "rms error"],
    rows={
        "attention": "sdpa",
        "optimization": [c for c in CHOSEN if "reduce" not in c],
        "config": lambda config: config != "large",
    },
    part="processor",
    times=[
        "median",
        "avg_time",
        "warmup",
        "N calls",
        "speedup",
        "× inductor",
        "low",
        "high",
        "memory",
        "products",
    ],
)

# %%

study.dots(
    "ratio",
    of="times",
    where={"config": "medium", "optimization": ["roundoff", BEST]},
    x="× inductor",
    label="precision",
    colour="optimization",
    low="low",
    high="high",
    reference=1,
    title="Time of one call",
    xlabel="time of the fastest inductor = 1",
    answer=True,
    alt="Two dots for each precision: the backend without tier 3, near or above inductor's time, "
    "and with tier 3 and CUDA graphs, below it.",
)

# %%

study.claim(
    "Without tier 3 the backend takes {1.11} times the fastest inductor's time in float16, {1.12} "
    "in bfloat16, {0.98} in float32 and {1.28} in TF32.",
    name="called",
    of="times",
    where={"optimization": "roundoff", "config": "medium", "precision": list(PRECISIONS)},
    on="nvidia-h200",
    timed=True,
    value=lambda t: t.set_index("precision")["× inductor"][list(PRECISIONS)].tolist(),
)

# %%

study.claim(
    "On an H100 it takes {0.96}, {0.92}, {0.98} and {1.19}: inductor without CUDA graphs is slower "
    "there.",
    name="h100",
    of="times",
    where={"optimization": "roundoff", "config": "medium", "precision": list(PRECISIONS)},
    on="nvidia-h100-80gb-hbm3",
    timed=True,
    value=lambda t: t.set_index("precision")["× inductor"][list(PRECISIONS)].tolist(),
)

# %%

study.claim(
    "With tier 3, and CUDA graphs on both sides, it takes {0.86}, {0.86}, {0.94} and {0.94}: less "
    "in each of the four.",
    name="best",
    of="times",
    where={"optimization": BEST, "config": "medium", "precision": list(PRECISIONS)},
    on="nvidia-h200",
    timed=True,
    value=lambda t: t.set_index("precision")["× inductor"][list(PRECISIONS)].tolist(),
    test=lambda t: t["× inductor"] < 1,
)

# %%

study.claim(
    "In float16 tier 3 alone gives {1.02}, CUDA graphs alone {1.11}.",
    name="alone",
    of="times",
    where={
        "optimization": ["roundoff, tier 3", "roundoff, CUDA graph"],
        "config": "medium",
        "precision": "float16",
    },
    on="nvidia-h200",
    timed=True,
    value=lambda t: t.set_index("optimization")["× inductor"].sort_index(ascending=False).tolist(),
)

# %%

study.claim(
    "With Llama-2-7B's own feed-forward, where products take more of the time, it is {0.91}.",
    name="large",
    of="times",
    where={"optimization": BEST, "config": "large"},
    on="nvidia-h200",
    timed=True,
    value=lambda t: t["× inductor"],
)

# %%

study.claim(
    "The seven products alone take {71%} of that best time in float16, at the rate of a large "
    "product: fusion has the rest to work on.",
    name="products",
    of="times",
    where={"optimization": BEST, "config": "medium", "precision": "float16"},
    on="nvidia-h200",
    timed=True,
    value=lambda t: t["products"] / t["median"],
)

# %%
# Faster at the same error, not at a larger one
# ---------------------------------------------
#
# The truth is the converted graph evaluated in float64 throughout: ``model.double()`` would not
# do, as transformers' norms and angles pass through float32 whatever the model's type. The error is
# in :ref:`one unit <unit>`, ε of the type times the root mean square of the truth. In TF32, sdpa
# and ONNX Runtime's attention keep float32; eager attention and tier 3's use TF32 there, too. The
# mask of ``--with_mask 1`` shuts out the end of the last sequence, since a token that sees no key,
# as in padding on the left, has no defined result: sdpa gives zeros, eager attention a mean.

study.lines(
    "speed-error",
    of="times",
    where={"attention": "sdpa", "config": "medium"},
    x="speedup",
    y="rms error",
    series="runtime",
    panels="precision",
    own_scales=True,
    title="Error against speed",
    xlabel="speed, × eager",
    ylabel="typical error, ε × RMS",
    alt="A panel for each precision, a mark for each way, joined to the same with a CUDA graph: "
    "speed to the right, error upwards.",
)

# %%

study.claim(
    "No way has more than 1.25 times the typical error of eager PyTorch with sdpa.",
    name="error",
    of="times",
    where={"attention": "sdpa", "config": "medium"},
    test=lambda t: (
        t["rms error"] <= 1.25 * t["precision"].map(t.groupby("precision")["rms error"].first())
    ),
)

# %%

study.claim(
    "TF32 has more than 100 times the error of float32: its times are those of another "
    "computation.",
    name="tf32",
    of="times",
    where={"optimization": "roundoff", "config": "medium", "precision": ["float32", "TF32"]},
    test=lambda t: t["rms error"].max() > 100 * t["rms error"].min(),
)

# %%
# ``model.half()`` is another model than one loaded in float16
# ------------------------------------------------------------
#
# It also rounds the frequencies of the rotary embedding, which transformers keeps in float32, and a
# token's angle is its position times the frequency. All models of this page are loaded in their
# type, so that no way is blamed for this.

small = SIZES["tiny" if quick else "small"]
inputs = random_tokens(small, args.with_mask, device, padding="right")
graph = captured(Llama(small, device=device), inputs)
half = [
    t.half().float() if name in graph.static and "inv_freq" not in name else t
    for name, t in zip(graph.names, graph.inputs, strict=True)
]
truth, loading = graph.truth(half), []
for name in ("loaded in float16", "model.half()"):
    model = Llama(small, dtype=torch.float16, device=device)
    made = (model.half() if name == "model.half()" else model)(*inputs)
    hidden, keys = scaled_error(truth[0], made[0]).rms, scaled_error(truth[1:], made[1:]).rms
    loading.append({"model": name, "rms error": hidden, "keys error": keys, "processor": processor})
study.table(
    "loading",
    loading,
    "Errors of eager PyTorch in float16 on a small layer, against the model as it was loaded.",
    columns=["model", "rms error", "keys error"],
    part="processor",
)

# %%

study.claim(
    "Rounding the frequencies makes the error of keys and values more than twice as large.",
    name="half",
    of="loading",
    test=lambda t: t["keys error"].iloc[1] > 2 * t["keys error"].iloc[0],
)

# %%
# A torch.compile backend on ONNX Runtime in thirty lines
# -------------------------------------------------------
#
# Dynamo hands over a graph, AOTAutograd makes it functional with the weights as inputs, torch's
# exporter turns it into ONNX, and a session runs it on the memory of torch's tensors. It takes what
# the exporter takes, which is not every fused attention of CUDA.
# :func:`roundoff.backend.onnx_custom_backend` adds rules, new lengths, weights that change, aliases
# and CUDA graphs.


def convert(graph, examples):
    """What runs a functional graph in ONNX Runtime."""
    program = torch.onnx.export(
        graph.eval(), tuple(examples), dynamo=True, optimize=False, verbose=False
    )
    place = examples[-1].device.type
    made = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(),
        providers=[("CUDAExecutionProvider", {"use_tf32": "0"})] if place == "cuda" else None,
    )
    results = [node.meta["val"] for node in graph.graph.output_node().args[0]]

    def run(inputs):
        inputs = [t.contiguous() for t in inputs]
        outputs = [torch.empty(v.shape, dtype=v.dtype, device=place) for v in results]
        binding = made.io_binding()
        for bind, values, tensors in (
            (binding.bind_input, made.get_inputs(), inputs),
            (binding.bind_output, made.get_outputs(), outputs),
        ):
            for value, t in zip(values, tensors, strict=True):
                bind(value.name, place, 0, dtype_info(t.dtype).onnx, t.shape, t.data_ptr())
        if place == "cuda":
            torch.cuda.synchronize()  # ONNX Runtime's stream is another one
        made.run_with_iobinding(binding)
        return outputs

    run._boxed_call = True  # it takes one list
    return run


thirty_lines = aot_autograd(fw_compiler=convert)
with torch.no_grad():
    model = Llama(small, attention="eager", device=device)
    made = torch.compile(model, backend=thirty_lines, dynamic=False)(*inputs)
print(f"typical error {scaled_error(graph.truth(), made).rms:.3g} ε × RMS")

# %%
# One rewrite rule in full
# ------------------------
#
# A rule names the last operator of its pattern, looks at what comes before it, and replaces it;
# anything else is left alone. ``x * Sigmoid(x)``, SiLU, is one node of ONNX Runtime's:


class SiluToQuickGelu(Rule):
    """Mul(x, Sigmoid(x)) becomes com.microsoft.QuickGelu(x, alpha=1)."""

    ops = ("Mul",)

    def rewrite(self, g, node):
        for x, gate in (node.inputs, node.inputs[::-1]):
            sigmoid = g.node(gate, "Sigmoid")
            if sigmoid is not None and sigmoid.inputs[0] is x:
                (new,) = g.emit(
                    "QuickGelu",
                    [x],
                    before=node,
                    shapes=[g.shape(x)],
                    like=x,
                    domain="com.microsoft",
                    alpha=1.0,
                )
                g.replace(node.outputs[0], new)
                return True
        return False


editor, report = Editor(graph.exported, processor), Report()
apply_rules(editor, [SiluToQuickGelu()], report)
rewritten = session(editor.proto(), [f"{processor}ExecutionProvider"])
made = rewritten.run(dict(zip(graph.names, graph.inputs, strict=True)))
error = scaled_error(graph.truth(), made).rms
print(f"{report.counts()}: {editor.count()} nodes, typical error {error:.3g} ε × RMS")

# %%
# With every rule of the first two tiers. What depends on weights alone, the packed weights and the
# tables of cosines, is computed once, and again when a weight changes; the rest runs at each call.
# The report says which rules saw their pattern and left it alone, and why.

options = OptimizationOptions(TIERS["roundoff"], processor=processor, packed=1.0)
fused, report = fuse(graph.exported, options, static=graph.static)
print(report, report.refused)
study.svg(
    "fused",
    plot_dot(fused),
    alt="The fused layer: norm, packed product, attention with its rotation, product, norm with "
    "sum, gate, norm.",
)

# %%

study.claim(
    "Of {101} nodes that the model has in ONNX in float32, {19} run at each call without "
    "tier 3, and {10} with it.",
    name="nodes",
    of="times",
    where={
        "optimization": ["roundoff, unfused", "roundoff", "roundoff, tier 3"],
        "config": "medium",
        "precision": "float32",
    },
    on="nvidia-h200",
    value=lambda t: t["nodes"].sort_values(ascending=False).tolist(),
)

# %%
# It costs seconds to compile, and memory
# ---------------------------------------
#
# Small layers, as the sizes of tensors do not matter here, with ``dynamic=True``: a second length
# needs no second conversion. The process is warm and inductor's cache of graphs is off. Memory
# is a column of the first table in full.

costs, depth = [], 0 if quick else 2
for i, label in enumerate(("roundoff",) if quick else ("inductor", "roundoff")):
    model = Llama(small, depth, device=device)
    run, _ = prepare(model, label, dynamic=True)
    seconds = []
    for length in (9 + 8 * i, 12 + 8 * i, 9 + 8 * i):
        ids = random_tokens(dataclasses.replace(small, length=length), False, device)
        with inductor.patch(fx_graph_cache=False), torch.no_grad():
            start = time.perf_counter()
            float(run(*ids)[0].sum())
            seconds.append(time.perf_counter() - start)
    costs.append(
        {"optimization": label, "layers": depth, "processor": processor}
        | dict(zip(("first length", "second length", "known length"), seconds, strict=True))
    )
    torch._dynamo.reset()
study.table(
    "costs",
    costs,
    "Seconds of the first call at a first length, at a second one, and of a call at a known one.",
    columns=["optimization", "first length", "second length", "known length"],
    part="processor",
    times=["first length", "second length", "known length"],
)

# %%

study.claim(
    "The backend takes {288} MiB beside the model in float16, inductor {80}; with tier 3 and a "
    "CUDA graph {710}.",
    name="memory",
    of="times",
    where={
        "optimization": ["inductor", "roundoff", BEST],
        "attention": "sdpa",
        "config": "medium",
        "precision": "float16",
    },
    on="nvidia-h200",
    timed=True,
    value=lambda t: t.set_index("optimization")["memory"][["roundoff", "inductor", BEST]].tolist(),
)

# %%
# Your own model
# --------------
#
# Put in a module and a tuple of tensors: each way's speed, error against float64, and nodes. The
# module is set to ``eval()`` and moved to the GPU where there is one. Call it once with
# ``check=True`` before you rely on it: :func:`~roundoff.backend.onnx_custom_backend` then raises
# where fusion changed a result.

MODEL = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.SiLU(), torch.nn.Linear(1024, 256))
INPUTS = (torch.randn(64, 256, generator=torch.Generator().manual_seed(0)),)

are_tensors = isinstance(INPUTS, tuple) and all(isinstance(t, torch.Tensor) for t in INPUTS)
if not isinstance(MODEL, torch.nn.Module) or not are_tensors or not INPUTS:
    raise ArgumentError(
        "MODEL, INPUTS",
        got=f"{type(MODEL).__name__}, {INPUTS!r:.60}",
        expected="a torch module, a tuple of tensors",
        hint="torch.nn.Linear(256, 8), (torch.randn(64, 256),)",
    )
own = MODEL.eval().requires_grad_(False).to(device)
inputs = [t.to(device) for t in INPUTS]


def flat(*inputs):
    return torch.utils._pytree.tree_leaves(own(*inputs))


for row in contest({"sdpa": flat}, inputs, telling, args.budget):
    shown = "{optimization:28} {speedup:6.2f} × eager, error {rms error:.3g}, nodes {nodes}"
    print(shown.format(**row))

# %%
# Limits, and what to read next
# -----------------------------
#
# * The forward pass alone, gradients off, one static length, one device, one model family. Decoding
#   with a cache is on the page :ref:`whole-model`. vLLM, TensorRT-LLM and inductor's *max-autotune*
#   were not measured.
# * Refused with an error that names it: training, inputs on several devices, float8 inputs. An
#   operator that cannot be converted stays with torch, and so do complex numbers. Not fused:
#   attention that returns its probabilities, bfloat16 on a CPU.
# * Outputs of *CUDA graph* and *reduce-overhead* are overwritten by the next call.
# * Next: :ref:`gemm-fusion`, for what packing weights gives, :ref:`triton-layer-norm`, for a kernel
#   of the kind that tier 3 uses, and :ref:`layer-norm-discrepancies`, for the tolerance to ship.

study.finish()
