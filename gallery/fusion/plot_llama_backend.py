r"""
.. _llama-backend:

A Llama layer through our own torch.compile backend
===================================================

``torch.compile(model, backend="roundoff")`` converts a model to ONNX, fuses it with rules that can
be read, and runs it in ONNX Runtime on the tensors where they lie. This page shows what three tiers
of rules make of a Llama layer, and times them against eager torch and inductor **at equal
precision**. Of every result it asks how far it is from a float64 computation.
"""

import math
import time
from functools import cache, partial

import pandas as pd
import torch

from roundoff.backend.llama import SIZES, Llama, compiled, cost, errors, tokens
from roundoff.backend.program import split_static
from roundoff.errors import UnsupportedError
from roundoff.fusion import OptimizationOptions, fuse
from roundoff.graph import plot_dot
from roundoff.ort import available, torch_tf32
from roundoff.page import MARKERS, PALETTE, subplots
from roundoff.page.legacy import Study
from roundoff.record import read_records
from roundoff.script import get_parsed_args, unit_test_going, usage_error
from roundoff.timing import measure, measure_ceilings, torch_precision

NAME = "plot_llama_backend"
args = get_parsed_args(
    NAME,
    __doc__,
    config=("medium", f"one of {', '.join(SIZES)}, or several: medium,large"),
    num_hidden_layers=("1", "layers, or several: 1,4"),
    with_mask=(0, "1: a batch x sequence mask as a second input"),
    dtype=("", "types to compare; by default what is sensible on the device"),
    autotune=(0, "1: tables with inductor's max-autotune too, which compiles for minutes"),
    limit=(0.0, "seconds after which no further table is begun, or two minutes earlier where it "
           "has max-autotune; 0: none"),
    warmup=(0, "least warm-up calls; 0: chosen for the size and the device"),
    repeat=(0, "least measured rounds; 0: chosen for the size and the device"),
    budget=(0.0, "seconds of measuring for a table; 0: chosen for the device"),
)  # fmt: skip

begun = time.perf_counter()
quick = unit_test_going()
configs = args.config.split(",")
if not set(configs) <= set(SIZES):
    usage_error(NAME, f"--config {args.config}: expected some of {', '.join(SIZES)}")
if not all(n.isdigit() and int(n) for n in args.num_hidden_layers.split(",")):
    usage_error(NAME, f"--num_hidden_layers {args.num_hidden_layers}: expected such as 1,4")
sizes = {c: SIZES["small" if quick and c == "medium" else c] for c in configs}
small = SIZES["small"]  # for all but times
depths = [int(n) for n in args.num_hidden_layers.split(",")]
cuda = torch.cuda.is_available() and bool(available(["CUDAExecutionProvider"]))
device, processor = ("cuda", "CUDA") if cuda else ("cpu", "CPU")
budget = args.budget or (6.0 if cuda else 0.5 if quick else 75.0)
study = Study(NAME, args)
with_rows = {name for r in read_records(NAME) for name, t in r.tables.items() if len(t)}


@cache
def llama(size, layers, dtype, attention, on):
    """One model for all rivals that can share it."""
    return Llama(size, layers, dtype, attention, on)


def rival(how, size, layers=1, dtype=torch.float32, attention="sdpa", on=device, **options):
    """A rival, compiled and warm; of a small size, one that was asked for before is it again."""
    kept = size in (SIZES["tiny"], SIZES["small"]) and not torch_tf32()
    make = prepared if kept else prepared.__wrapped__
    return make(how, size, layers, dtype, attention, on, *sorted(options.items()))


@cache
def prepared(how, size, layers, dtype, attention, on, *options):
    model = llama(size, layers, dtype, attention, on)
    return compiled(model, tokens(size, bool(args.with_mask), on), how=how, **dict(options))


# %%
# The model
# ---------
#
# One decoder layer of Llama, with the sizes of Llama-2-7B but for a narrower feed-forward and a
# smaller vocabulary (the configuration ``large`` has its own), from transformers, with random
# weights: an embedding, the layer, the last norm. Every rival returns the same: the hidden state,
# keys and values. Times are of these sizes; all else is shown on a small layer, 256 wide.
#
# A model is **loaded** in a type here. ``model.half()`` does something else: it also rounds the
# frequencies of the rotary embedding, which transformers keeps in float32, and the angle of a token
# is its position times the frequency. The table has both, in float16, against float64.


def loaded_or_halved():
    """Errors of eager float16, for the two ways to get there."""
    ids = tokens(small, bool(args.with_mask), "cpu")
    graph = rival("onnx", small, on="cpu").instance["compiled"]
    truth = graph.truth([
        t.half().float() if name in graph.static and "inv_freq" not in name else t
        for name, t in zip(graph.names, graph.inputs, strict=True)
    ])  # fmt: skip
    for label in ("loaded in float16", "model.half()"):
        model = Llama(small, dtype=torch.float16)
        if label == "model.half()":
            model.half()
        with torch.no_grad():
            yield {"way": label} | errors(truth, model(*ids))


halved = pd.DataFrame(loaded_or_halved())
study.table(
    "half",
    halved,
    caption="Float16 errors of eager torch: weights the same, frequencies rounded or not.",
    labels={"error": "hidden, largest", "error_ulp": "hidden, largest",
            "mean_ulp": "hidden, mean", "keys_ulp": "keys and values, largest"},
    units={"error_ulp": "ULP", "mean_ulp": "ULP", "keys_ulp": "ULP"},
)  # fmt: skip

# %%
# One ULP (:ref:`ulp`) is that of a typical element, the root mean square. Truth is the exporter's
# graph evaluated in float64 throughout (:class:`roundoff.evaluator.TorchOnnxEvaluator`), with the
# weights of the type; ``model.double()`` would not do: transformers' norms and angles go through
# float32 whatever the type of the model.


def on_halves(run):
    loaded, half = run.tables["half"]["keys_ulp"]
    assert half > loaded
    return (
        f"Rounding the frequencies takes the keys from {loaded:.2g} to {half:.3g} ULP: "
        f"{half / loaded:.1f} times as far from the model that was trained."
    )


study.conclude(on_halves, "half")

# %%
# The backend
# -----------
#
# Dynamo hands over a graph; AOTAutograd makes it functional; torch's exporter turns it into ONNX;
# rules rewrite that; ONNX Runtime runs it. The options choose the tiers::
#
#     from functools import partial
#     from roundoff.backend import OptimizationOptions, onnx_custom_backend
#
#     backend = partial(
#         onnx_custom_backend, options=OptimizationOptions("default+onnxruntime"), storage=found
#     )
#     compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
#
# ``found["instance"][0]`` then holds the model that is run, what is computed from weights alone
# (packed weights, as in :ref:`gemm-fusion`, tables of cosines: once, and again when a weight
# changes), and a report.
#
# ``default``
#     ONNX alone: no-ops, chains of reshapes and transposes, slices that are a split, repeated work.
# ``+onnxruntime``
#     operators that ONNX Runtime adds: RMS norms, rotary embedding, attention, packed products.
# ``+experimental``
#     kernels that are not ONNX Runtime's, as nodes of domain ``roundoff`` between islands of it. On
#     CUDA they are our own, in Triton: :ref:`triton-layer-norm` shows how one is made. On a CPU
#     they are torch's products: those read a weight where it lies, while ONNX Runtime's are made
#     for weights that they may copy and pack.

TIERS = {
    "exported": "onnx",
    "default": "default",
    "+onnxruntime": "default+onnxruntime",
    "+experimental": "default+onnxruntime+experimental",
}
stages = {label: rival(how, small).instance for label, how in TIERS.items()}
tiers = pd.DataFrame(
    {
        "tier": label,
        "nodes": len(one["onnx"].graph.node),
        "not ONNX's": sum(n.domain != "" for n in one["onnx"].graph.node),
        "ahead": len(one["prepare"].graph.node) if one["prepare"] else 0,
        "whole": len(one["whole"].graph.node),
        "islands": len(one["session"]),
    }
    for label, one in stages.items()
)
study.table(
    "tiers",
    tiers,
    caption=f"Nodes of one small layer in float32 on {'a GPU' if cuda else 'a CPU'}: run at each "
    "call, computed ahead from weights, and both.",
    labels={"not ONNX's": "not ONNX's own"},
)

# %%
products = sum(n.op_type == "TorchProduct" for n in stages["+experimental"]["onnx"].graph.node)
third = f"and {tiers['nodes'][3]} with kernels of our own" if cuda else (
    f"of which the third tier gives {products}, the large products, to torch"
)  # fmt: skip
study.say(
    f"The exporter leaves {tiers['nodes'][0]} nodes. Fused, a call runs {tiers['nodes'][2]}, "
    f"{third}; ONNX Runtime then has {tiers['islands'][3]} islands."
)

# %%
# Before, and after the first two tiers:

study.svg(
    "exported",
    plot_dot(stages["exported"]["onnx"]),
    alt="The exported layer: norms, rotary embedding and attention in their single operations.",
)

# %%
study.svg(
    "fused",
    plot_dot(stages["+onnxruntime"]["onnx"]),
    alt="The fused layer: norm, packed product, attention, product, norm with sum, gate, norm.",
)

# %%
# The third tier on CUDA, with Triton kernels of our own:

exported, static = stages["exported"]["exported"], stages["exported"]["compiled"].static
fused = {
    p: fuse(exported, OptimizationOptions(TIERS["+experimental"], processor=p), static=static)
    for p in ("CPU", "CUDA")
}
study.svg(
    "experimental",
    plot_dot(split_static(fused["CUDA"][0], static)[0]),
    alt="Products and attention are left to ONNX Runtime; all between them are single kernels.",
)

# %%
# What each rule matched, and where one saw its pattern and left it alone, why:

report = pd.concat([r.frame().assign(processor=p) for p, (_, r) in fused.items()])
report = report[["processor", "tier", "rule", "matched", "refused", "reason"]]
study.table("rules", report, caption="Rules on one small layer in float32, by processor.")

# %%
# Does fusion keep the numbers?
# -----------------------------
#
# Values that survive fusion keep their names. Each is compared with float64, before and after: the
# table localises what a rule changes. ``onnx_custom_backend(…, check=True)`` does this on the first
# call, and raises where an error grew by more than another order of the same sums explains.

kept = stages["+onnxruntime"]["compiled"].compare()
study.table(
    "kept",
    kept[["value", "made by", "rule", "shape", "largest", "abs before", "abs after"]],
    caption="Largest errors of each surviving value, before and after fusion.",
    labels={"abs before": "error before", "abs after": "error after"},
)

# %%
# And through several layers? The same, with eager torch beside it.


def through_layers():
    """Error against depth, by type and by rival."""
    for dtype in (torch.float32,) if quick else (torch.float32, torch.float16):
        for depth in (1,) if quick else (1, 2, 4, 8):
            made = {
                "eager": rival("eager", small, depth, dtype),
                "+onnxruntime": rival(TIERS["+onnxruntime"], small, depth, dtype),
            }
            truth = made["+onnxruntime"].instance["compiled"].truth()
            for label, one in made.items():
                row = {"dtype": str(dtype).removeprefix("torch."), "layers": depth, "label": label}
                yield row | errors(truth, one.outputs)


deep = pd.DataFrame(through_layers())
study.table(
    "depth",
    deep[["dtype", "layers", "label", "mean_ulp", "error_ulp"]],
    caption="Error of the hidden state against float64, with depth.",
    labels={"mean_ulp": "mean", "error_ulp": "largest"},
    units={"mean_ulp": "ULP", "error_ulp": "ULP"},
)

# %%
kinds = list(deep["dtype"].unique())
fig, axes = subplots(
    1, len(kinds), height=3.2, title="Error of the hidden state against float64, by depth"
)
for ax, kind in zip([axes] if len(kinds) == 1 else axes, kinds, strict=True):
    for i, (label, part) in enumerate(deep[deep["dtype"] == kind].groupby("label", sort=False)):
        ax.plot(part["layers"], part["mean_ulp"], label=label, color=PALETTE[i], marker=MARKERS[i])
    ax.set_title(kind)
    ax.set_xlabel("layers")
    ax.set_ylabel("mean error, ULP")
    ax.set_ylim(bottom=0)
    ax.legend()
study.figure(
    "depth",
    fig,
    alt="Mean error of the hidden state in ULP against depth, eager and fused, a panel for each "
    "type.",
)

# %%


def on_depth(run):
    table = run.tables["depth"]
    for kind, part in table.groupby("dtype", sort=False):
        wide = part.pivot(index="layers", columns="label", values="mean_ulp")
        factor = wide["+onnxruntime"] / wide["eager"]
        far = "nearer to float64 than" if factor.max() < 1 else (
            "further from float64 than" if factor.min() > 1 else "about as far from float64 as"
        )  # fmt: skip
        yield (
            f"**{kind}**: the fused graph is {far} eager torch, {factor.min():.2f} to "
            f"{factor.max():.2f} times its mean error, through "
            f"{'one layer' if len(wide) == 1 else f'1 to {wide.index.max()} layers'}."
        )


study.conclude(lambda run: list(on_depth(run)), "depth")

# %%
# Time, at equal precision
# ------------------------
#
# One table a precision, as a time means nothing without it: float32 with TF32 is another
# computation than float32. The rivals take turns, round by round, in one process. On CUDA a sample
# is five calls in a row, so that launches overlap as they do in a model; *reduce-overhead* and
# *CUDA graph* replay recorded launches, and overwrite their outputs at the next call. On a CPU,
# times are ratios to eager. All rivals meet at one layer; with several layers, the best of each
# kind.
#
# *N* counts the measured calls, *n_custom_ops* the nodes that are not ONNX's own. *memory* is by
# how much the process, or its memory on the GPU, grew; it may shrink. *compile* counts the seconds
# from nothing to the end of the first call, in the order of the rows: the backend keeps what the
# exporter made for the tiers that follow, as inductor keeps its kernels.
#
# In float32 the keys of all rivals are far off, in units of float32, for one reason: the angle of a
# rotation, position times frequency, is itself rounded before its cosine is taken.


#: Name -> type, TF32; the most telling first, as --limit may cut the last.
PRECISIONS = {
    "float16": (torch.float16, False),
    "float32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False),
}
asked = args.dtype.split(",") if args.dtype else list(PRECISIONS) if cuda else ["float32"]
if not set(asked) <= set(PRECISIONS):
    usage_error(NAME, f"--dtype {args.dtype}: expected some of {', '.join(PRECISIONS)}")


def suffix(config):
    """What tells the tables of a configuration from those of ``medium``."""
    return "" if config == "medium" else f"-{config}"


def contests():
    """(table, precision, config, layers, few, max-autotune): all rivals once, then the best."""
    best = asked if args.dtype else [p for p in ("float16", "tf32", "float32") if p in asked]
    for config in configs:
        for layers in depths if config == configs[0] else depths[:1]:
            few = (config, layers) != (configs[0], depths[0])
            rest = best if config == configs[0] or args.dtype else best[:2]
            for precision in rest if few else asked:
                yield f"time-{precision}{suffix(config)}", precision, config, layers, few, False
    for precision in ("float16", "tf32") if args.autotune and cuda else ():
        if precision in asked:
            yield f"time-{precision}-autotune", precision, configs[0], depths[0], True, True


def field(few, tuned):
    """(label, attention, how, options) of every rival in one table."""
    for attention in ("eager", "sdpa"):
        named = "eager attention" if attention == "eager" else attention
        yield f"eager, {named}", attention, "eager", {}
        if not cuda and attention == "eager":
            continue  # one attention is enough for a ratio on a CPU, and saves the reader a minute
        modes = ["reduce-overhead", *([] if few else [""])] if cuda else [""] * (not quick)
        for mode in modes + ["max-autotune"] * tuned:
            label = ", ".join(filter(None, ("inductor", attention, mode)))
            yield label, attention, f"inductor:{mode}", {}
    for label, how in TIERS.items():
        ours = label.startswith("+")
        if not few or (ours and not cuda):
            yield label, "sdpa", how, {}
        if ours and cuda:
            yield f"{label}, CUDA graph", "sdpa", how, {"cuda_graph": True}


def contest(precision, config, layers, few, tuned):
    """The rows of one table, and reasons for what does not run."""
    dtype, tf32 = PRECISIONS[precision]
    rivals, reasons = {}, {}
    with torch_precision(tf32):
        for label, attention, how, options in field(few, tuned):
            try:
                rivals[label] = rival(how, sizes[config], layers, dtype, attention, **options)
            except (UnsupportedError, MemoryError, RuntimeError) as e:
                reasons[label] = str(e).strip().splitlines()[0][:160]
        truth = next(r.instance["compiled"].truth() for r in rivals.values() if r.instance)
        calls = 5 if cuda else 1
        least = 25 if config == "large" else 50
        repeat = args.repeat or (least if cuda else 2 if quick else 5)
        timings = measure(
            {label: partial(repeated, r.call, calls) for label, r in rivals.items()},
            device=device,
            budget_s=budget,
            min_rounds=math.ceil(repeat / calls),
            max_rounds=max(repeat, 100),
            warmup=math.ceil((args.warmup or (least // 5 if cuda else 1)) / calls),
        )
        return list(rows_of(timings, rivals, truth, calls)), reasons


def repeated(call, times):
    for _ in range(times):
        made = call()
    return made


def rows_of(timings, rivals, truth, calls):
    frame = timings.frame.set_index("label")
    base = frame["median"]["eager, eager attention"]
    unit = 1e3 / calls if cuda else 1 / base
    for label, one in rivals.items():
        t = frame.loc[label]
        yield {
            "optimization": label,
            "processor": processor,
            "avg_time": t["mean"] * unit,
            "median": t["median"] * unit,
            "low": t["low"] * unit,
            "high": t["high"] * unit,
            "warmup": int(t["warmup"]) * calls,
            "N": int(t["rounds"]) * calls,
            "n_custom_ops": one.custom,
            "nodes": one.nodes,
            "speedup": base / t["median"],
            "memory": one.memory,
            "compile": one.seconds,
        } | errors(truth, one.outputs)


results, skipped = [], []
for table, precision, config, layers, few, tuned in contests():
    what = f"{table.removeprefix('time-')}, {layers} layer{'s' if layers > 1 else ''}"
    spent = time.perf_counter() - begun + 120 * tuned
    if results and args.limit and spent > args.limit:
        skipped.append(f"{what}: there was no time left.")
        continue
    rows, reasons = contest(precision, config, layers, few, tuned)
    key = {"table": table, "precision": precision, "config": config, "layers": layers}
    results += [key | row for row in rows]
    skipped += [f"{what}: {label} does not run here: {why}." for label, why in reasons.items()]
    if not quick:
        llama.cache_clear()  # large models are not kept

times = pd.DataFrame(results)
COLUMNS = ["layers", "optimization", "processor", "avg_time", "median", "low", "high", "warmup",
           "N", "n_custom_ops", "nodes", "speedup", "error_ulp", "mean_ulp", "keys_ulp", "memory",
           "compile"]  # fmt: skip


def units(environment):
    """Times are absolute on a GPU, and ratios on a CPU, which others share."""
    unit = "ms" if environment["gpu"] else "× eager"
    return {"avg_time": unit, "median": unit, "low": unit, "high": unit, "error_ulp": "ULP",
            "mean_ulp": "ULP", "keys_ulp": "ULP", "memory": "MiB", "compile": "s"}  # fmt: skip


def caption(what):
    return f"One call at {what}: time, size of the graph, error against float64."


def show(name, what):
    """A table of this build; without rows where it has none, and then not recorded."""
    part = times[times["table"] == f"time-{name}"]
    why = "torch takes many seconds a call on a CPU"
    if cuda or name == "tf32":
        why = "no time for it" if cuda else "no CUDA"
    absent = f"{what}: not in this build ({why})"
    absent += "; recorded runs have it." if f"time-{name}" in with_rows else "."
    return study.table(
        f"time-{name}",
        part[COLUMNS],
        caption=absent if part.empty else caption(what),
        recorded=not part.empty,
        formats={"avg_time": ".4g", "median": ".4g", "low": ".4g", "high": ".4g",
                 "n_custom_ops": ".0f", "nodes": ".0f", "speedup": ".3g", "memory": ".0f",
                 "compile": ".1f"},
        units=units(study.environment),
        labels={"error_ulp": "hidden, largest", "mean_ulp": "hidden, mean",
                "keys_ulp": "keys, values"},
    )  # fmt: skip


def recorded(name, what):
    """The same from every recorded machine, where there is one."""
    if f"time-{name}" not in with_rows:
        return None
    return study.recorded(f"time-{name}", caption=caption(what), units=units, like="time-float32")


show("float32", "float32")

# %%
recorded("float32", "float32")

# %%
# With TF32, which keeps 11 binary digits of the operands of float32 products. Attention differs:
# sdpa's and ONNX Runtime's own stay as near as float32; eager attention and the first tier's are
# two products in TF32; our third tier's kernel computes in TF32 as well. Left to itself a tensor
# core does not round a float32 to TF32, it ignores the last 13 bits: every factor is a little too
# small, and the errors of a sum add up instead of cancelling. So the kernel rounds its factors to
# the nearest first, and is as near to float64 as eager attention.

show("tf32", "float32 with TF32")

# %%
recorded("tf32", "float32 with TF32")

# %%
show("float16", "float16")

# %%
recorded("float16", "float16")

# %%
show("bfloat16", "bfloat16")

# %%
recorded("bfloat16", "bfloat16")

# %%
# With the feed-forward and the vocabulary of Llama-2-7B (``large``):

shown = {f"time-{p}" for p in PRECISIONS}
for table in dict.fromkeys(times["table"]):
    if table not in shown:
        show(table.removeprefix("time-"), table.removeprefix("time-").replace("-", ", "))
recorded("float16-large", "float16, large")

# %%
recorded("tf32-large", "float32 with TF32, large")

# %%
# Inductor's *max-autotune* tries many kernels, which takes up to minutes, and has a table of its
# own, beside the best of the others:

recorded("float16-autotune", "float16, with max-autotune")

# %%
# With TF32 it found kernels that compute something else. Nothing but the column of errors tells:

recorded("tf32-autotune", "float32 with TF32, with max-autotune")

# %%
if not cuda:
    skipped.append(
        "Triton kernels of our own need CUDA: on a CPU the third tier is torch's products, and the "
        "tests run the Triton kernels in Triton's interpreter, whose time says nothing."
    )
if quick and not cuda:
    skipped.append("Inductor is left to a full build: its compiler takes as long as all the rest.")
study.say(skipped or ["Every rival ran."])

# %%


def on_times(run, names):
    """Ours against the best of inductor, and against eager, for each precision and depth."""
    for name in names:
        what = name.removeprefix("time-").replace("-", ", ")
        for layers, part in run.tables[name].groupby("layers", sort=False):
            part = part.set_index("optimization")
            off = part["mean_ulp"] > 10 * part["mean_ulp"]["eager, sdpa"]
            for label in part.index[off]:
                yield (
                    f"**{what}**: ``{label}`` is "
                    f"{part['mean_ulp'][label] / part['mean_ulp']['eager, sdpa']:.0f} times as far "
                    "from float64 as eager torch with sdpa: its time is that of another result, "
                    "and it is left out of the comparison."
                )
            part = part[~off]
            best = {
                who: part.loc[part.index.str.startswith(start), "median"]
                for who, start in (("inductor", "inductor"), ("ours", ("+", "default")))
            }
            if best["inductor"].empty or best["ours"].empty:
                continue
            theirs, own = best["inductor"].idxmin(), best["ours"].idxmin()
            ratio = part["median"][own] / part["median"][theirs]
            low, high = part["low"], part["high"]
            how = "ahead of" if high[own] < low[theirs] else "level with"
            how = "behind" if low[own] > high[theirs] else how
            near = {
                k: part["mean_ulp"][own] / part["mean_ulp"][f"eager, {k}"]
                for k in ("sdpa", "eager attention")
            }
            # A product in TF32 errs alike, whoever computes it.
            assert "tf32" not in name or near["eager attention"] < 1.05
            yield (
                f"**{what}**, {layers} layer{'s' if layers > 1 else ''}: "
                f"``{own}`` takes {ratio:.2f} of the time of the best inductor (``{theirs}``), "
                f"{how} it, and is {part['speedup'][own]:.2f} times as fast as eager attention in "
                f"eager torch. Its mean error is {near['sdpa']:.2f} of that of eager torch with "
                f"sdpa, and {near['eager attention']:.2f} with eager attention."
            )


def on_main_times(run):
    names = [t for t in run.tables if t.startswith("time-") and not t.endswith("-autotune")]
    return list(on_times(run, names)) or "Nothing of ours ran beside inductor here."


study.conclude(on_main_times, times["table"].iloc[0])

# %%
# With *max-autotune*, each measured in a run of its own:


def on_autotune(name):
    def sentences(run):
        names = [name] if name in run.tables else []
        return list(on_times(run, names)) or "max-autotune did not run here."

    return sentences


study.conclude(on_autotune("time-float16-autotune"), "time-float16-autotune")

# %%
study.conclude(on_autotune("time-tf32-autotune"), "time-tf32-autotune")

# %%
# Where the time goes
# -------------------
#
# A call cannot do without its products, its attention, and one pass over what lies between them.
# Operations over the measured rate of matrix products, and bytes over that of a copy, give a least
# time for each; fusion can take away no more than the rest.

ceilings = measure_ceilings(
    device,
    dtypes=("float32", "float16", "bfloat16") if cuda else ("float32",),
    side=128 if quick else None,
    nbytes=2**20 if quick else None,
    budget_s=0.05 if quick else 0.4,
).frame
study.table(
    "ceilings",
    ceilings.assign(rate=ceilings["rate"] / 1e9, low=ceilings["low"] / 1e9,
                    high=ceilings["high"] / 1e9, unit="G" + ceilings["unit"]),
    caption="Measured ceilings of this machine.",
    formats={"size": "d"},
)  # fmt: skip

# %%


def bounds(config):
    """Least times by part, next to the best measured time."""
    copy = ceilings.set_index("ceiling")["rate"]["copy"]
    chosen = times[(times["config"] == config) & ~times["table"].str.endswith("-autotune")]
    for (name, layers), part in chosen.groupby(["precision", "layers"], sort=False):
        wanted = "float32" if name == "tf32" else name
        rates = ceilings[ceilings["ceiling"].str.contains(wanted)]
        is_tf32 = rates["ceiling"].str.contains("TF32", case=False) | rates["note"].astype(
            str).str.contains("TF32", case=False)  # fmt: skip
        rates = rates[is_tf32] if name == "tf32" else rates[~is_tf32] if len(rates) > 1 else rates
        if rates.empty:
            continue
        parts = cost(sizes[config], layers, 4 if wanted == "float32" else 2).set_index("part")
        least = pd.concat([parts["flops"] / rates["rate"].iloc[0], parts["bytes"] / copy], axis=1)
        least = least.max(axis=1) * 1e3
        best = part.loc[part["median"].idxmin()]
        yield (
            {"precision": name, "layers": layers}
            | least.to_dict()
            | {
                "least": least.sum(),
                "measured": best["median"] if cuda else float("nan"),
                "share": least.sum() / best["median"] if cuda else float("nan"),
                "by": best["optimization"],
            }
        )


def show_shares(config):
    return study.table(
        f"shares{suffix(config)}",
        pd.DataFrame(
            bounds(config),
            columns=["precision", "layers", "products", "attention", "the rest", "least",
                     "measured", "share", "by"],
        ),
        caption="Least time of each part at the measured ceilings, and the best measured time.",
        formats={"share": ".0%"},
        units=dict.fromkeys(("products", "attention", "the rest", "least", "measured"), "ms"),
        labels={"share": "least / measured"},
    )  # fmt: skip


for config in configs[1:]:
    show_shares(config)
show_shares(configs[0])

# %%
study.recorded("shares", like=f"shares{suffix(configs[0])}")

# %%
# And with the sizes of ``large``:

study.recorded("shares-large", like=f"shares{suffix(configs[0])}")

# %%


def on_shares(run):
    names = [n for n in run.tables if n.startswith("shares")]
    for name, row in ((n, row) for n in names for row in run.tables[n].to_dict("records")):
        part = row["products"] / row["least"]
        what = row["precision"] + name.removeprefix("shares").replace("-", ", ")
        yield (
            f"**{what}**, {row['layers']} layer{'s' if row['layers'] > 1 else ''}: "
            f"products alone are {part:.0%} of the least time"
            + (f"; the least time is {row['share']:.0%} of what the quickest takes."
               if row["share"] == row["share"] else ".")
        )  # fmt: skip


study.conclude(lambda run: list(on_shares(run)), f"shares{suffix(configs[0])}")

# %%
# What a tier refuses
# -------------------
#
# A rule that sees its pattern but not all of its conditions leaves the graph alone and says why;
# the report has the line. Refused as a whole, with a typed error that names it: training (call
# under ``torch.no_grad()``), inputs on several devices, complex and float8 inputs, an operator
# that the exporter cannot convert. Not fused: attention whose probabilities are returned, or with
# fewer queries than keys; bfloat16 on a CPU, where ONNX Runtime has no kernels (it is computed
# operator by operator in float32 and rounded); grouped heads with a padding mask (the heads stay
# repeated).
#
# What to do
# ----------
#
# * **Compare times only at equal precision**, between rivals that return the same, with the error
#   beside the time: a fast row that is far from float64 is another result.
# * **Load a model in its type.** Halving it rounds what should stay in float32.
# * **Count nodes, then look at the ceilings.** Few nodes are the means; what the products leave of
#   the time is all that fusion can take away.
# * **Read the report** of what each rule matched and refused, before you believe that a model of
#   your own was fused.
# * **Call it once with** ``check=True`` before use: it raises where fusion changed a result.
#   :ref:`layer-norm-discrepancies` has the tolerance to ship.
# * **On CUDA, where a call is short,** ``cuda_graph=True`` takes the launches away; its outputs are
#   overwritten by the next call.

study.finish()
