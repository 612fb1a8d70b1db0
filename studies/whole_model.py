"""The study behind "Should I use ONNX Runtime under torch.compile?".

SmolLM2-135M-Instruct, trained, run by eager PyTorch, by inductor and by ONNX Runtime under
``torch.compile``: times of a prefill and of a decode step, seconds and memory of compiling, and the
texts of ``generate``.

The page tells the story with small experiments. This file measures the full grid, writes the
record, and defines each number that the page may print.

    python studies/whole_model.py --record

*times* and *costs*: a prefill keeps no cache; a decode step reads one token over a static cache of
512 keys, and is repeated at that place. The ways take turns, round by round, in one process. A
ratio is the median over the rounds, with its interval. On a processor it is a ratio of processor
time, of all threads together; on a GPU a sample is five calls in a row. The truth is every
operation in float64, the error is in ε × RMS. *memory* is what stays after four calls, and what
the next takes at its peak, less what the way before has freed by then: a negative number is a
measurement that failed.

*generate*: each way is a process of its own. It writes a first text, which compiles what the way
compiles; all processes do so at the same time. Then the ways take turns, text by text: a rate is
that of a whole text, new tokens over seconds, prefill included. A rate says something only of a
right text, so the texts that were timed are compared with eager's, and read again in float64:
*behind* is how far the logit of a written token is from the best one at its place, at worst.
"""

import functools
import gc
import multiprocessing
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import median

import pandas as pd
import torch
from torch._inductor.utils import fresh_cache
from transformers import CompileConfig, StaticCache

from roundoff.backend import onnx_custom_backend
from roundoff.compare import scaled_error
from roundoff.models import PASSAGES, Float64Llama, load_trained, padded, prompts
from roundoff.ort import available
from roundoff.page.measurement import Study
from roundoff.script import unit_test_going
from roundoff.timing import measure

warnings.simplefilter("ignore", FutureWarning)
QUICK = unit_test_going()
CUDA = torch.cuda.is_available() and bool(available(["CUDAExecutionProvider"]))
DEVICE, PROCESSOR = ("cuda", "CUDA") if CUDA else ("cpu", "CPU")
study = Study(
    "plot_whole_model",
    "A trained model in eager PyTorch, inductor and ONNX Runtime: times, costs, texts.",
    on="nvidia-h200",
    part="processor",
)
LAYERS = 1 if QUICK else None  # all
#: Rows of a decode step; types, after the first without CUDA graphs; seconds for each case.
BATCHES = (1,) if QUICK else (1, 8, 64)
DTYPES = ("float16", "bfloat16") if CUDA else ("float32",)
BUDGET_S = 0.2 if QUICK else 1.5 if CUDA else 4.0
TOKENS, KEYS = (16, 32) if QUICK else (512 if CUDA else 128, 512)
#: Of generate: type, questions at once, new tokens of each text, texts that are timed.
TEXTS_IN = "float16" if CUDA else "float32"
QUESTIONS, WRITTEN, ROUNDS = ((1,), 4, 2) if QUICK else ((1, 8), 128, 3)
GRAPH, BEST = "inductor, reduce-overhead", "roundoff, CUDA graph"
WAYS = {
    "eager": None,
    "inductor": {},
    GRAPH: {"mode": "reduce-overhead"},
    "roundoff": {"backend": onnx_custom_backend},
    BEST: {"backend": onnx_custom_backend, "mode": "reduce-overhead"},
}


@functools.cache
def loaded():
    """The model, the token numbers of a text, and float64's logits at the end of each case."""
    trained = load_trained(layers=LAYERS)
    ids = trained.tokenizer(" ".join(PASSAGES), return_tensors="pt")["input_ids"]
    ids = ids[:, :KEYS].to(DEVICE)
    model, ends = Float64Llama(trained, DEVICE), {"prefill": TOKENS, "decode": KEYS}
    truth = {case: model(ids[:, :n], logits_to_keep=1).logits.cpu() for case, n in ends.items()}
    return trained, ids, truth


# --- times and costs: a prefill and a decode step

APART = ["first call", "memory"]
RATIOS = ["× inductor", "low", "high", "× eager", "tokens/s"]


def prefill(model, text, batch):
    """Inputs of a prefill, and no cache to rewind."""
    ids = text[:, :TOKENS].repeat(batch, 1)
    return {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}, []


def decode(model, text, batch):
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
        "attention_mask": torch.ones(batch, 1, 1, KEYS, dtype=torch.bool, device=DEVICE),
        "position_ids": torch.full((batch, 1), KEYS - 1, device=DEVICE),
        "past_key_values": cache,
    }
    return inputs, [layer.cumulative_length for layer in cache.layers]


def prepare(model, way):
    """A model as one of the ways runs it."""

    def forward(**inputs):
        return model(**inputs).logits

    # torch.compile keeps what it compiled by code object: one for each way.
    forward.__code__ = forward.__code__.replace(co_name="forward_apart")
    if WAYS[way] is None:
        return forward
    return torch.compile(forward, dynamic=False, fullgraph=True, **WAYS[way])


def repeated(run, inputs, lengths, times=1):
    """Calls in a row, each over the cache as it was."""
    for _ in range(times):
        logits = run(**inputs)
        if lengths:
            torch._foreach_sub_(lengths, 1)
    return logits


def free_memory():
    """Bytes that the GPU has free when torch's cache is empty; 0 without one."""
    if not CUDA:
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@torch.no_grad()
def contest(model, case, batch, chosen):
    """Speed, error, seconds to compile and memory of every chosen way to run a case."""
    _, text, truth = loaded()
    inputs, lengths = {"prefill": prefill, "decode": decode}[case](model, text, batch)
    calls, rows = {}, {}
    for way in chosen:
        before, run = free_memory(), prepare(model, way)
        start = time.perf_counter()
        logits = repeated(run, inputs, lengths).cpu()  # waits for the GPU
        seconds = time.perf_counter() - start
        error = scaled_error(truth[case].expand(batch, -1, -1), logits).rms
        repeated(run, inputs, lengths, 3)  # a CUDA graph is recorded by the second call
        memory = before - free_memory()  # what stays
        if CUDA:
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            repeated(run, inputs, lengths)
            memory += torch.cuda.max_memory_allocated() - held  # and what comes and goes
        calls[way] = partial(repeated, run, inputs, lengths, 5 if CUDA else 1)
        rows[way] = {
            "case": case,
            "dtype": str(model.dtype).removeprefix("torch."),
            "batch": batch,
            "optimization": way,
            "processor": PROCESSOR,
            "CUDA graph": way in (BEST, GRAPH),
            "rms error": error,
            **dict.fromkeys(RATIOS),
            "first call": seconds if WAYS[way] is not None else None,
            "memory": memory / 2**20 if CUDA else None,
        }
    clock = time.perf_counter if CUDA else time.process_time
    times = measure(calls, device=DEVICE, clock=clock, budget_s=BUDGET_S, min_rounds=5, warmup=1)
    medians = times.frame.set_index("label")["median"]
    for way, row in rows.items():
        base = GRAPH if row["CUDA graph"] else "inductor"
        if base in rows:
            ratio = times.ratio(way, base)
            row |= {"× inductor": ratio.value, "low": ratio.low, "high": ratio.high}
        row["× eager"] = times.ratio(way, "eager").value
        if CUDA:  # a CPU's times are ratios alone
            row["tokens/s"] = 5 * inputs["input_ids"].numel() / medians[way]
    torch._dynamo.reset()
    return list(rows.values())


@functools.cache
def contests():
    """A row for each case, type and way, once for both tables."""
    plain = ("inductor", "roundoff")[QUICK:]
    graphs = (GRAPH, BEST)[QUICK:] if CUDA else ()
    # The first call of the prefill imports what compiling needs.
    cases = [("prefill", 4 if CUDA else 1), *(("decode", batch) for batch in BATCHES)]
    found = []
    for dtype in DTYPES:
        model = loaded()[0].model(getattr(torch, dtype), device=DEVICE)
        for case, batch in cases if dtype == DTYPES[0] else cases[:2]:
            # On a GPU compiling takes most of the time: each case has the ways that tell most.
            replayed = graphs if case == "decode" and dtype == DTYPES[0] else ()
            ways = (plain if batch == BATCHES[0] or not replayed else ()) + replayed
            with fresh_cache():  # of compiled code
                found += contest(model, case, batch, ("eager", *ways))
    return pd.DataFrame(found)


@study.table(times=RATIOS)
def times(args):
    """Time over inductor's and tokens a second, by case and batch."""
    return contests().drop(columns=APART)


@study.table(times=APART)
def costs(args):
    """Seconds of the first call; memory beside the model."""
    same = ["case", "dtype", "batch", "optimization", "processor"]
    return contests().dropna(subset="first call")[same + APART]


# --- words: generate in float32, compiled once for all lengths


@torch.no_grad()
def text_of(model, asked, tokens, **options):
    """What the model writes, greedily, and seconds."""
    ids, mask = padded(asked, model.config.pad_token_id, DEVICE)
    options |= {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    start = time.perf_counter()
    made = model.generate(input_ids=ids, attention_mask=mask, **options)
    written = made[:, ids.shape[1] :].cpu()  # waits for the GPU
    return written, time.perf_counter() - start


@study.table(times=["first run", "known run", "eager run"])
def words(args):
    """Greedy texts in float32: tokens, those that differ from eager's, conversions, seconds."""
    trained = load_trained(layers=LAYERS)
    asked, model = [trained.prompt(text) for _, text in prompts(3)], trained.model(device=DEVICE)
    texts = {"first": asked[:1], "another length": asked[1:2], "two at once": asked[1:]}
    plain, graphs = model.forward, []
    backend = partial(onnx_custom_backend, storage={"instance": graphs})
    compiled = torch.compile(plain, backend=backend, dynamic=True)
    write = partial(text_of, model, tokens=6 if QUICK else 48, disable_compile=True)
    for name in ["first"] if QUICK else texts:
        eager, usual = write(texts[name])
        known, model.forward = len(graphs), compiled
        written, first = write(texts[name])
        _, again = write(texts[name])
        model.forward = plain
        yield {
            "cache": "growing",
            "asked": name,
            "layers": trained.config.num_hidden_layers,
            "processor": PROCESSOR,
            "tokens": written.numel(),
            "other words": int((written != eager).sum()),
            "conversions": len(graphs) - known,
            "first run": first,
            "known run": again,
            "eager run": usual,
        }
    torch._dynamo.reset()


# --- generate, as people call it

STATIC = {"cache_implementation": "static", "disable_compile": True}
GROWING = {"disable_compile": True}
#: A call of generate: options of torch.compile, and those of generate, which may compile by itself.
CALLS = {
    "eager": (None, GROWING),
    "eager, static cache": (None, STATIC),
    "inductor": ({"dynamic": True}, GROWING),
    GRAPH: (None, {"cache_implementation": "static"}),
    "roundoff": ({"backend": onnx_custom_backend, "dynamic": True}, GROWING),
    BEST: (
        {"backend": onnx_custom_backend, "mode": "reduce-overhead", "dynamic": False},
        STATIC,
    ),
    # transformers compiles the decode step alone, and with the backend that it is given.
    "roundoff, compile_config": (
        None,
        {
            "cache_implementation": "static",
            "compile_config": CompileConfig(
                backend=onnx_custom_backend, mode="reduce-overhead", dynamic=False
            ),
        },
    ),
}


@functools.cache
def caller(count, way):
    """What writes texts in one of the ways, made once in each process."""
    trained = load_trained(layers=LAYERS)
    model = trained.model(getattr(torch, TEXTS_IN), device=DEVICE)
    asked = [trained.prompt(words) for _, words in prompts(count)]
    compiled, options = CALLS[way]
    if compiled is not None:
        model.forward = torch.compile(model.forward, **compiled)
    return partial(text_of, model, asked, WRITTEN, **options)


def write(count, way):
    """A text, in a process that one way has for itself, and seconds."""
    written, seconds = caller(count, way)()
    return tuple(map(tuple, written.tolist())), seconds


@torch.no_grad()
def behind(truth, asked, written):
    """How far a written token's logit is from the best at its place, at worst, by float64.

    A text of a fixed length may not end: the tokens that would end it do not count.
    """
    worst = 0.0
    for question, answer in zip(asked, written, strict=True):
        ids = torch.tensor([[*question, *answer]], device=DEVICE)
        logits = truth(ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
        logits[:, truth.config.eos_token_id] = -torch.inf
        chosen = logits.gather(1, ids[0, len(question) :, None])
        worst = max(worst, float((logits.max(1, keepdim=True).values - chosen).max()))
    return worst


def race():
    """Texts and seconds of each way, a process each: first all at the same time, then in turns."""
    ways = ("eager", "roundoff") if QUICK else CALLS
    spawn = multiprocessing.get_context("spawn")
    pools = {
        (count, way): ProcessPoolExecutor(1, spawn)
        for count in QUESTIONS
        for way in ways
        # Symbolic sizes take longest to trace: one row tells.
        if count == 1 or way not in ("inductor", "roundoff")
    }
    begun = {task: pool.submit(write, *task) for task, pool in pools.items()}
    made = {task: [first.result()] for task, first in begun.items()}
    for _ in range(ROUNDS + 1):  # a CUDA graph is recorded while the second text is written
        for task, pool in pools.items():
            made[task].append(pool.submit(write, *task).result())
    for pool in pools.values():
        pool.shutdown()
    return made


@study.table(times=["tokens/s", "× eager", "low", "high"])
def generate(args):
    """generate, as it is called: tokens a second, and its text."""
    made, trained = race(), load_trained(layers=LAYERS)
    truth = Float64Llama(trained, DEVICE)
    for (count, way), found in made.items():
        texts, seconds = zip(*found, strict=True)
        usual, base = zip(*made[count, "eager"], strict=True)
        timed, asked = seconds[2:], [trained.prompt(words) for _, words in prompts(count)]
        ratios = [b / a for a, b in zip(timed, base[2:], strict=True)]
        other = torch.tensor(texts[-1]) != torch.tensor(usual[-1])
        yield {
            "optimization": way,
            "dtype": TEXTS_IN,
            "batch": count,
            "tokens": count * WRITTEN,
            "behind": max(behind(truth, asked, text) for text in set(texts)),
            "not eager's": int(other.sum()),
            "different texts": len(set(texts)),
            "tokens/s": count * WRITTEN / median(timed),
            "× eager": median(ratios),
            "low": min(ratios),
            "high": max(ratios),
            "processor": PROCESSOR,
        }


# --- Values: what pages may print. Name, datum and statistic, table, column; rows; a test. -------

XEON = "intel-xeon-2-cores"
TIME = {"interval": ("low", "high"), "words": ("faster", "slower")}


def undecided(found):
    """Whether the interval of a ratio holds 1."""
    return found.low <= 1 <= found.high


def by_way(rows, column):
    """A column, by the way that each row is of."""
    return rows.set_index("optimization")[column]


def quotient(rows, of, over, column):
    """A ratio of two ratios to one base, and the quotients of their ends, which are the widest."""
    value, low, high = (by_way(rows, name) for name in (column, "low", "high"))
    return value[of] / value[over], low[of] / high[over], high[of] / low[over]


TEXT = {"batch": 1, "dtype": "float16", "processor": "CUDA", "tokens": 128}
RIGHT = "one prompt, 128 tokens, float16, the text is eager's"
for name, way in (("text.eager", "eager"), ("text.inductor", GRAPH)):
    study.value(
        name,
        f"tokens a second of generate, {way}, {RIGHT}",
        "generate",
        "tokens/s",
        where=TEXT | {"optimization": way},
        # The text is eager's, and eager's own rate is a ninth of the others'.
        test=lambda v, slow=way == "eager": (
            (v.rows["not eager's"] == 0).all()
            and (v.value < 70 if slow else v.rows["low"].item() > 4)
        ),
    )
study.value(
    "text.behind",
    "the logit of a written token behind the best of float64, at worst, eight prompts, 128 tokens "
    "each, float16, all ways in which generate was called",
    "generate",
    lambda t: t["behind"].max(),
    where={"batch": 8, "dtype": "float16", "processor": "CUDA", "tokens": 1024},
    test=lambda v: 0 < v.value < 0.02 and len(v.rows) == 5,
)
study.value(
    "text.ratio",
    f"tokens a second of generate, ONNX Runtime over inductor, both in CUDA graphs, {RIGHT}",
    "generate",
    lambda t: quotient(t, BEST, GRAPH, "× eager"),
    where=TEXT | {"optimization": [BEST, GRAPH]},
    words=("slower", "faster"),
    test=undecided,
)
for prefix, about, case, batch, column, ways, holds in (
    (
        "first",
        "seconds of the first decode step, an empty compile cache, {}, float16, 1 row",
        "decode",
        1,
        "first call",
        (GRAPH, BEST),
        lambda of: of[GRAPH] > 2 * of[BEST],
    ),
    (
        "memory",
        "MiB beside the model after a prefill of 4 × 512 tokens in float16, {}",
        "prefill",
        4,
        "memory",
        ("inductor", "roundoff"),
        lambda of: of["roundoff"] > 4 * of["inductor"] > 0,
    ),
    (
        "memory.graph",
        "MiB beside the model and the cache of keys, decode step, 64 rows in float16, {}",
        "decode",
        64,
        "memory",
        (GRAPH, BEST),
        lambda of: of[BEST] < of[GRAPH],  # a session holds less
    ),
):
    for runtime, way in zip(("inductor", "roundoff"), ways, strict=True):
        study.value(
            f"{prefix}.{runtime}",
            about.format(way),
            "costs",
            lambda t, way=way, column=column: by_way(t, column)[way],
            where={
                "case": case,
                "batch": batch,
                "dtype": "float16",
                "optimization": ways,
            },
            test=lambda v, holds=holds, column=column: holds(by_way(v.rows, column)),
        )
study.value(
    "graph.inductor",
    "tokens a second of a decode step of inductor, with CUDA graph over without, float16, 1 row",
    "times",
    lambda t: by_way(t, "tokens/s")[GRAPH] / by_way(t, "tokens/s")["inductor"],
    where={
        "case": "decode",
        "dtype": "float16",
        "batch": 1,
        "optimization": ["inductor", GRAPH],
    },
    # The same kernels, so that the logits have the same error.
    test=lambda v: v.value > 5 and v.rows["rms error"].nunique() == 1,
)
#: A quick run leaves inductor out, and with it the ratio.
COMPARED = {"× inductor": pd.Series.notna}
for name, case, batch in ("plain.prefill", "prefill", 4), ("plain.step", "decode", 1):
    study.value(
        name,
        f"time over inductor's, {case} of {batch} rows, float16, both without CUDA graphs",
        "times",
        "× inductor",
        where={"case": case, "batch": batch, "dtype": "float16", "optimization": "roundoff"}
        | COMPARED,
        test=lambda v: v.high < 1,
        **TIME,
    )
for batch in 1, 8, 64:
    study.value(
        f"graph.rows{batch}",
        f"time over inductor's, decode step, float16, both in CUDA graphs, rows: {batch}",
        "times",
        "× inductor",
        where={"case": "decode", "batch": batch, "dtype": "float16", "optimization": BEST}
        | COMPARED,
        test=lambda v, batch=batch: v.high < 1 if batch == 64 else undecided(v) or v.value > 0.9,
        **TIME,
    )


def over_eager(rows):
    """Time over eager's, and the widest ends that the two intervals over inductor's allow."""
    _, low, high = quotient(rows, "roundoff", "eager", "× inductor")
    return by_way(rows, "× eager")["roundoff"], low, high


ON_A_CPU = {"case": "decode", "batch": 64, "dtype": "float32", "processor": "CPU"}
study.value(
    "cpu.rows64",
    "processor time over eager's, decode step, float32, rows: 64",
    "times",
    over_eager,
    where=ON_A_CPU | {"optimization": ["eager", "roundoff"]},
    words=TIME["words"],
    on=XEON,
    test=undecided,
)
study.value(
    "cpu.inductor64",
    "processor time of inductor over eager's, decode step of 64 rows, float32",
    "times",
    "× eager",
    where=ON_A_CPU | {"optimization": "inductor"},
    on=XEON,
    test=lambda v: v.value > 3,
)


def over_known(rows):
    """Seconds of a known text over eager's."""
    return rows["known run"] / rows["eager run"]


ALL = ["first", "another length", "two at once"]
for name, about, asked, statistic, holds in (
    (
        "tokens",
        "tokens of three greedy texts, float32, a growing cache, dynamic=True",
        ALL,
        lambda t: t["tokens"].sum(),
        lambda v: v.value == 192,
    ),
    (
        "other",
        "tokens of three greedy texts that differ from eager's, float32, a growing cache, "
        "dynamic=True",
        ALL,
        lambda t: t["other words"].sum(),
        lambda v: v.value == 0 and v.rows["tokens"].sum() == 192,
    ),
    (
        "conversions",
        "conversions for a prompt of another length, dynamic=True",
        "another length",
        "conversions",
        lambda v: v.value == 0,
    ),
    (
        "again",
        "conversions for two texts at once after single ones, dynamic=True",
        "two at once",
        "conversions",
        lambda v: v.value > 0,
    ),
    (
        "first",
        "seconds of the first text of one prompt, dynamic=True, 30 layers, float32",
        "first",
        "first run",
        lambda v: v.value > 10 * v.rows["known run"].item(),
    ),
    (
        "time",
        "seconds of a known text over eager's, one text each, dynamic=True, 30 layers, float32",
        "first",
        over_known,
        lambda v: v.value < 1,
    ),
    (
        "two",
        "seconds of two known texts at once over eager's, dynamic=True, 30 layers, float32",
        "two at once",
        over_known,
        lambda v: abs(v.value - 1) > 0.1,
    ),
):
    study.value(
        f"words.{name}",
        about,
        "words",
        statistic,
        where={"cache": "growing", "asked": asked, "layers": 30},
        on=XEON,
        test=holds,
    )


def errors(rows):
    """Typical error over inductor's, by case, batch and type, without CUDA graphs."""
    table = rows.pivot_table("rms error", ["case", "dtype", "batch"], "optimization")
    return table["roundoff"] / table["inductor"]


for name, end in ("error.least", "min"), ("error.most", "max"):
    study.value(
        name,
        f"{end} of the typical error of the logits over inductor's, by case and type",
        "times",
        lambda t, end=end: errors(t).agg(end),
        where={"optimization": ["inductor", "roundoff"], "processor": "CUDA"},
        test=lambda v: errors(v.rows).between(0.5, 2, inclusive="neither").all(),
    )

if __name__ == "__main__":
    study.main()
