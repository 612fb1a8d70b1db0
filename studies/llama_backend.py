"""The study behind "How do I write a backend for torch.compile?".

One Llama layer, run by eager torch, by inductor and by ``backend="roundoff"`` in its tiers, with
and without CUDA graphs, in four precisions: time, ratio to inductor, error against float64,
operators and memory; then what compiling costs.

The page tells the story with small experiments. This file measures the full grid, writes the
record, and defines each number that the page may print.

    python studies/llama_backend.py --record
"""

import gc
import time
import warnings
from functools import cache, partial
from unittest import mock

import torch
from torch._inductor import config as inductor

from roundoff import fusion
from roundoff.backend import onnx_custom_backend
from roundoff.compare import scaled_error
from roundoff.fusion import OptimizationOptions
from roundoff.fusion import rules as fusion_rules
from roundoff.models import SIZES, Llama, random_tokens
from roundoff.ort import available
from roundoff.page.measurement import Study
from roundoff.script import unit_test_going
from roundoff.timing import measure, torch_precision

warnings.simplefilter("ignore", FutureWarning)  # torch's exporter uses what torch deprecates
cuda = torch.cuda.is_available() and bool(available(["CUDAExecutionProvider"]))
device, processor = ("cuda", "CUDA") if cuda else ("cpu", "CPU")
study = Study(
    "plot_llama_backend",
    "A Llama layer in eager torch, in inductor and in ONNX Runtime: times, errors, memory.",
    on="nvidia-h200",
    part="processor",
)
full = cuda and not unit_test_going()
CONFIG, BUDGET_S = ("medium", 4.0) if full else ("tiny", 0.2)  # of measuring each precision
PRECISIONS = {  # type, TF32 in its products
    "float16": (torch.float16, False),
    "bfloat16": (torch.bfloat16, False),
    "float32": (torch.float32, False),
    "TF32": (torch.float32, True),
}

# --- Every way to run the layer. -----------------------------------------------------------------

TIERS = {
    "roundoff, unfused": None,
    "roundoff, tier 1": "default",
    "roundoff": "default+onnxruntime",
    "roundoff, tier 3": "default+onnxruntime+experimental",
}
UNFUSED, BACKEND, BEST = "roundoff, unfused", "roundoff", "roundoff, tier 3, CUDA graph"
CHOSEN = ("inductor", "inductor, reduce-overhead", "roundoff", BEST)


def ways():
    """Label, attention that transformers is told to use, whether it replays a CUDA graph."""
    for attention in ("sdpa", "eager"):
        yield "eager", attention, False
        if cuda:
            yield "inductor", attention, False
            yield "inductor, reduce-overhead", attention, True
    for label in TIERS:
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
    run, storage = prepare(model, UNFUSED)
    with torch.no_grad():
        run(*inputs)
    return storage["instance"][0]["compiled"]


# --- Time, error, operators and memory of each. --------------------------------------------------


def free_memory():
    """Bytes that the GPU has free when torch's cache is empty; 0 without one."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] if cuda else 0


def repeated(run, inputs):
    """Five calls in a row on a GPU, one on a processor."""
    for _ in range(5 if cuda else 1):
        run(*inputs)


@cache
def rate_of_a_product(dtype, tf32, side=8192):
    """Operations a second of a large product of random numbers."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in "ab")
    with torch_precision(tf32):
        call = partial(torch.mm, a, b, out=torch.empty_like(a))
        found = measure({"product": call}, device=device, budget_s=0.2, min_rounds=5, warmup=1)
    return 2.0 * side**3 / found.frame["median"].item()


def contest(chosen, precision, config=CONFIG):
    """Time, error, nodes and memory of every chosen way to run a layer."""
    size, (dtype, tf32), calls, rows = SIZES[config], PRECISIONS[precision], {}, {}
    models = {a: Llama(size, 1, dtype, a, device) for a in ("sdpa", "eager")}
    inputs = random_tokens(size, False, device)
    weights = sum(w.numel() for w in models["sdpa"].model.layers.parameters() if w.dim() == 2)
    least = 2e3 * inputs[0].numel() * weights / rate_of_a_product(dtype, tf32) if cuda else None
    with torch.no_grad(), torch_precision(tf32):
        truth = captured(models["sdpa"], inputs).truth()
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
            name = f"{label}, {attention}"
            calls[name] = partial(repeated, run, inputs)
            rows[name] = {
                "precision": precision,
                "config": config,
                "optimization": label,
                "attention": attention,
                "processor": processor,
                "CUDA graph": graph,
                "rms error": scaled_error(truth[0], made[0]).rms,
                "memory": memory / 2**20 if cuda else None,
                "products": least,
                **dict.fromkeys(["n_custom_ops", "nodes", "median", "× inductor", "low", "high"]),
            }
            if storage:
                nodes = storage["instance"][0]["onnx"].graph.node
                custom = sum(node.domain != "" for node in nodes)
                rows[name] |= {"n_custom_ops": custom, "nodes": len(nodes)}
            del made
        times = measure(calls, device=device, budget_s=BUDGET_S, min_rounds=5, warmup=1)
    medians = times.frame.set_index("label")["median"]
    for name, row in rows.items():
        rivals = [
            rival
            for rival, its in rows.items()
            if its["CUDA graph"] == row["CUDA graph"]
            and its["optimization"] in ("inductor", "inductor, reduce-overhead")
        ]
        if cuda:  # a CPU's times are ratios alone
            row["median"] = medians[name] * 1e3 / 5
        if rivals:
            ratio = times.ratio(name, min(rivals, key=medians.get))
            row |= {"× inductor": ratio.value, "low": ratio.low, "high": ratio.high}
    torch._dynamo.reset()
    return list(rows.values())


TIMES = ["median", "× inductor", "low", "high", "memory", "products"]


@study.table(times=TIMES)
def times(args):
    """One call: time, its ratio to inductor's, error of the hidden state, operators, memory.

    *× inductor* is the ratio to the fastest inductor, of either attention, that replays a CUDA
    graph where this way does. *Memory* is what stays taken after compiling, beside the model, and
    what comes and goes in a call.
    """
    rows = []
    for precision in PRECISIONS if full else ["float32"]:
        rows += contest(list(ways()), precision)
    if full:
        telling = [w for w in ways() if w[1] == "sdpa" and w[0] in ("eager", *CHOSEN)]
        rows += contest(telling, "float16", "large")
    return rows


@study.table(times=TIMES)
def autotuned(args):
    """Inductor's ``max-autotune``, which takes minutes to compile, beside its ``reduce-overhead``.

    All replay a CUDA graph, and take turns. In float32 ``max-autotune`` takes too long to compile.
    """
    labels = ["inductor, reduce-overhead", "inductor, max-autotune", BEST]
    for precision in ("float16", "bfloat16") if full else ():
        yield from contest([(label, "sdpa", True) for label in labels], precision)


def attention_alone(tier):
    """The rules of a tier without those of tier 2 that do not write attention."""
    return tuple(r for r in fusion_rules(tier) if tier == "default" or r.name == "Attention")


@study.table(times=TIMES)
def separated(args):
    """The converted layer with one thing taken away: starts of kernels, attention, the rest.

    A CUDA graph takes the starts away. *rules* says which rules of tier 2 there are.
    """
    chosen = [(label, "sdpa", False) for label in (UNFUSED, BACKEND)]
    if cuda:
        chosen += [(f"{label}, CUDA graph", "sdpa", True) for label in (UNFUSED, BACKEND)]
    for name, rules in ("attention", attention_alone), ("all", fusion_rules):
        with mock.patch.object(fusion, "rules", rules):
            for row in contest(chosen, "float16" if full else "float32"):
                yield {"rules": name} | row


# --- What compiling costs. -----------------------------------------------------------------------


@study.table(times=["first length", "known length"])
def costs(args):
    """Seconds of the first call and of a later one, of small layers; ``dynamic=True``."""
    small, depth = SIZES["small" if full else "tiny"], 2 if full else 0
    for label in ("inductor", "roundoff") if cuda else ("roundoff",):
        run, _ = prepare(Llama(small, depth, device=device), label, dynamic=True)
        ids, seconds = random_tokens(small, False, device), []
        for _ in range(3):
            with inductor.patch(fx_graph_cache=False), torch.no_grad():
                start = time.perf_counter()
                float(run(*ids)[0].sum())
                seconds.append(time.perf_counter() - start)
        yield {
            "optimization": label,
            "layers": depth,
            "processor": processor,
            "first length": seconds[0],
            "known length": seconds[-1],
        }
        torch._dynamo.reset()


# --- Values: what pages may print. Name, datum and statistic, table, column; rows; a test. -------

LAYER = "a prefill of 2 × 1024 tokens by one Llama layer"
TIME = {"interval": ("low", "high"), "words": ("faster", "slower")}


def row(optimization, precision="float16", config="medium"):
    return {
        "optimization": optimization,
        "attention": "sdpa",
        "precision": precision,
        "config": config,
    }


for name, optimization, words, precision in (
    ("unfused", UNFUSED, "unfused", "float16"),
    ("fused.graph", "roundoff, CUDA graph", "fused, CUDA graphs on both sides", "float16"),
    ("fused.float32", "roundoff, CUDA graph", "fused, CUDA graphs on both sides", "float32"),
    ("best", BEST, "with Triton kernels, CUDA graphs on both sides", "float16"),
    ("best.bfloat16", BEST, "with Triton kernels, CUDA graphs on both sides", "bfloat16"),
    ("best.float32", BEST, "with Triton kernels, CUDA graphs on both sides", "float32"),
):
    study.value(
        name,
        f"time of the backend ({words}) over the fastest inductor's, {LAYER}, {precision}",
        "times",
        "× inductor",
        where=row(optimization, precision),
        **TIME,
    )


def saved(rows, rules, optimization):
    """The share of the converted layer's time that this way saves, in one contest."""
    median = rows[rows["rules"] == rules].set_index("optimization")["median"]
    return float(1 - median[optimization] / median[UNFUSED])


for name, words, rules, optimization, low, high in (
    ("graph", "a CUDA graph", "all", f"{UNFUSED}, CUDA graph", 0, 0.15),
    ("attention", "attention as one operator", "attention", BACKEND, 0.15, 0.35),
    ("rules", "all rules of tiers 1 and 2", "all", BACKEND, 0.5, 0.7),
):
    study.value(
        f"saved.{name}",
        f"share of the time of the converted layer that {words} saves, {LAYER}, float16",
        "separated",
        partial(saved, rules=rules, optimization=optimization),
        where={"processor": "CUDA"},
        on="nvidia-h100-80gb-hbm3",
        test=lambda v, low=low, high=high: low < v.value < high,
    )
study.value(
    "autotune",
    "time of inductor's max-autotune over that of its reduce-overhead, CUDA graphs on both sides, "
    f"{LAYER}, float16",
    "autotuned",
    "× inductor",
    where={"optimization": "inductor, max-autotune", "precision": "float16"},
    on="nvidia-h100-80gb-hbm3",
    test=lambda v: 0.95 < v.low < 1 < v.high < 1.05,
    **TIME,
)
study.value(
    "best.large",
    "time of the backend with Triton kernels over inductor's, CUDA graphs on both sides, a layer "
    "with Llama-2-7B's feed-forward, float16",
    "times",
    "× inductor",
    where=row(BEST, config="large"),
    **TIME,
)
study.value(
    "alone",
    f"time of the backend with Triton kernels over inductor's, no CUDA graphs, {LAYER}, float16",
    "times",
    "× inductor",
    where=row("roundoff, tier 3"),
    **TIME,
    test=lambda v: v.low < 1.05 and v.high > 0.95,  # no difference that counts
)
for name, optimization in (("nodes.unfused", UNFUSED), ("nodes.fused", BACKEND)):
    study.value(
        name,
        f"operators that run at each call of {optimization}, one Llama layer, float16",
        "times",
        "nodes",
        where=row(optimization),
        test=lambda v, most=200 if optimization == UNFUSED else 21: 0 < v.value <= most,
    )
for name, optimization, least in (
    ("graph", "inductor, reduce-overhead", 150),
    ("best", BEST, 500),
    ("tiers", "roundoff, CUDA graph", 300),
    ("plain", BACKEND, 200),
):
    study.value(
        f"memory.{name}",
        f"MiB beside the model, {optimization}, {LAYER}, float16",
        "times",
        "memory",
        where=row(optimization),
        test=lambda v, least=least: least < v.value < 2 * least,
    )
study.value(
    "ms.unfused",
    f"milliseconds, median, {UNFUSED}, {LAYER}, float16",
    "times",
    "median",
    where=row(UNFUSED),
    test=lambda v: v.value > 3 * v.rows["products"].item(),
)
study.value(
    "ms.fused",
    f"milliseconds, median, {BACKEND}, {LAYER}, float16",
    "times",
    "median",
    where=row(BACKEND),
    test=lambda v: 0 < v.value < 1,
)
study.value(
    "products",
    "milliseconds of the seven products of the layer, at the rate of a large one, float16",
    "times",
    "products",
    where=row(UNFUSED),
    test=lambda v: v.value < 0.5 * v.rows["median"].item(),
)


def over_eager(rows):
    """The largest typical error over that of eager torch with sdpa, of all precisions."""
    eager = rows[rows["optimization"] == "eager"].set_index("precision")["rms error"]
    return (rows["rms error"] / rows["precision"].map(eager)).max()


study.value(
    "error",
    "largest typical error of the backend and of inductor over that of eager torch, four types",
    "times",
    over_eager,
    where={"attention": "sdpa", "config": "medium"},
    test=lambda v: v.value <= 1.25,
)
study.value(
    "tf32",
    "typical error of the backend in TF32 over that in float32",
    "times",
    lambda t: t["rms error"].max() / t["rms error"].min(),
    where={
        "optimization": BACKEND,
        "config": "medium",
        "precision": ["float32", "TF32"],
    },
    test=lambda v: v.value > 100,
)
for name, optimization in (("compile", BACKEND), ("compile.inductor", "inductor")):
    study.value(
        name,
        f"seconds of the first call, two small layers, {optimization}",
        "costs",
        "first length",
        where={"optimization": optimization},
        test=lambda v: v.value > 1,
    )
for name, optimization in (("later", BACKEND), ("later.inductor", "inductor")):
    study.value(
        name,
        f"milliseconds of one later call, two small layers, {optimization}",
        "costs",
        lambda t, way=optimization: 1e3 * t.set_index("optimization")["known length"][way],
        where={"optimization": ["inductor", BACKEND]},
        test=lambda v: v.rows.set_index("optimization")["known length"].pipe(
            lambda s: s[BACKEND] > 1.2 * s["inductor"]
        ),
    )

if __name__ == "__main__":
    study.main()
