"""The study behind "Should I use ONNX Runtime under torch.compile?".

SmolLM2-135M-Instruct, trained, run by eager PyTorch, by inductor and by ONNX Runtime under
``torch.compile``: times of a prefill and of a decode step, seconds and memory of compiling, and the
texts of ``generate``.

The page tells the story with small experiments. This file measures the full grid, writes the
record, and defines each number that the page may print.

    python studies/whole_model.py --record
    python studies/whole_model.py --record --only generate --tokens 128 --rounds 3 --prompts 1

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

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd
import torch
from transformers import CompileConfig, StaticCache

from roundoff.backend import onnx_custom_backend
from roundoff.compare import scaled_error
from roundoff.models import PASSAGES, Float64Llama, load_trained, padded, prompts
from roundoff.ort import available
from roundoff.page.measurement import Study
from roundoff.script import unit_test_going, usage_error
from roundoff.timing import compile_cache, measure

warnings.simplefilter("ignore", FutureWarning)
QUICK = unit_test_going()
CUDA = torch.cuda.is_available() and bool(available(["CUDAExecutionProvider"]))
DEVICE, PROCESSOR = ("cuda", "CUDA") if CUDA else ("cpu", "CPU")
NAME = "plot_whole_model"
TEXTS_IN = "float16" if CUDA else "float32"
study = Study(
    NAME,
    "A trained model in eager PyTorch, inductor and ONNX Runtime: times, costs, texts.",
    on="nvidia-h200",
    tokens=(4 if QUICK else 128, "new tokens of a text of generate", (2, 1000)),
    rounds=(1 if QUICK else 5, "texts of generate that are timed", (1, 100)),
    prompts=("1" if QUICK else "1,8", "questions at once, such as 1,8"),
)
LAYERS = 1 if QUICK else None  # all
#: Rows of a decode step; types, after the first without CUDA graphs; seconds for each case.
BATCHES = (1,) if QUICK else (1, 8, 64)
DTYPES = ("float16", "bfloat16") if CUDA else ("float32",)
BUDGET_S = 0.2 if QUICK else 1.5 if CUDA else 4.0
TOKENS, KEYS = (16, 32) if QUICK else (512 if CUDA else 128, 512)
GRAPH, BEST = "inductor, reduce-overhead", "roundoff, CUDA graph"
WAYS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {},
    GRAPH: {"mode": "reduce-overhead"},
    "roundoff": {"backend": onnx_custom_backend},
    BEST: {"backend": onnx_custom_backend, "mode": "reduce-overhead"},
}


@functools.cache
def loaded() -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
    """The model, the token numbers of a text, and float64's logits at the end of each case."""
    trained = load_trained(layers=LAYERS)
    ids = trained.tokenizer(" ".join(PASSAGES), return_tensors="pt")["input_ids"]
    ids = ids[:, :KEYS].to(DEVICE)
    model, ends = Float64Llama(trained, DEVICE), {"prefill": TOKENS, "decode": KEYS}
    truth = {case: model(ids[:, :n], logits_to_keep=1).logits for case, n in ends.items()}
    return trained, ids, truth


# --- times and costs: a prefill and a decode step


def prefill(model: Any, text: torch.Tensor, batch: int) -> tuple[dict[str, Any], list[Any]]:
    """Inputs of a prefill, and no cache to rewind."""
    ids = text[:, :TOKENS].repeat(batch, 1)
    return {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}, []


def decode(model: Any, text: torch.Tensor, batch: int) -> tuple[dict[str, Any], list[Any]]:
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


def prepare(model: Any, way: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model as one of the ways runs it, and the graphs that our backend stores."""

    def forward(**inputs: Any) -> Any:
        return model(**inputs).logits

    # torch.compile keeps what it compiled by code object: one for each way.
    forward.__code__ = forward.__code__.replace(co_name=way.replace(", ", "_").replace("-", "_"))
    storage: dict[str, Any] = {"instance": []}
    chosen = WAYS[way]
    if chosen is None:
        return forward, storage
    chosen = chosen | {"dynamic": False, "fullgraph": True} | options
    if "backend" in chosen:
        chosen["backend"] = partial(chosen["backend"], storage=storage)
    return torch.compile(forward, **chosen), storage


def repeated(run: Any, inputs: dict[str, Any], lengths: list[Any], times: int = 1) -> Any:
    """Calls in a row, each over the cache as it was."""
    for _ in range(times):
        logits = run(**inputs)
        if lengths:
            torch._foreach_sub_(lengths, 1)
    return logits


def synchronized() -> float:
    """Seconds on the clock when the GPU is idle."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def free_memory() -> int:
    """Bytes that the GPU has free when torch's cache is empty; 0 without one."""
    if not CUDA:
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@torch.no_grad()
def contest(model: Any, case: str, batch: int, chosen: tuple[str, ...]) -> list[dict[str, Any]]:
    """Speed, error, seconds to compile and memory of every chosen way to run a case."""
    trained, text, truth = loaded()
    inputs, lengths = {"prefill": prefill, "decode": decode}[case](model, text, batch)
    calls, rows = {}, {}
    for way in chosen:
        before, (run, storage) = free_memory(), prepare(model, way)
        start = synchronized()
        logits = repeated(run, inputs, lengths).clone()
        seconds = synchronized() - start
        repeated(run, inputs, lengths, 3)  # a CUDA graph is recorded by the second call
        memory = before - free_memory()  # what stays
        if CUDA:
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            repeated(run, inputs, lengths)
            memory += torch.cuda.max_memory_allocated() - held  # and what comes and goes
        calls[way] = partial(repeated, run, inputs, lengths, 5 if CUDA else 1)
        graphs = storage["instance"]
        rows[way] = {
            "case": case,
            "dtype": str(model.dtype).removeprefix("torch."),
            "batch": batch,
            "optimization": way,
            "layers": trained.config.num_hidden_layers,
            "processor": PROCESSOR,
            "CUDA graph": way in (BEST, GRAPH),
            "rms error": scaled_error(truth[case].expand(batch, -1, -1), logits).rms,
            "first call": seconds if WAYS[way] is not None else None,
            "nodes": len(graphs[0].model.graph.node) if graphs else None,
            "sessions": len(graphs[0].sessions) if graphs else None,
            "memory": memory / 2**20 if CUDA else None,
        }
    clock = time.perf_counter if CUDA else time.process_time
    times = measure(calls, device=DEVICE, clock=clock, budget_s=BUDGET_S, min_rounds=5, warmup=1)
    frame = times.frame.set_index("label")
    for way, row in rows.items():
        alike = [w for w in rows if rows[w]["CUDA graph"] == row["CUDA graph"]]
        base = next((w for w in alike if w.startswith("inductor")), None)
        ratio = times.ratio(way, base) if base else None
        each = frame["median"][way] / (5 if CUDA else 1)
        row |= {
            "× inductor": ratio.value if ratio else None,
            "low": ratio.low if ratio else None,
            "high": ratio.high if ratio else None,
            "× eager": times.ratio(way, "eager").value,
            # A CPU's times are ratios alone.
            "tokens/s": batch * (TOKENS if case == "prefill" else 1) / each if CUDA else None,
        }
    torch._dynamo.reset()
    return list(rows.values())


@functools.cache
def contests(again: bool) -> pd.DataFrame:
    """A row for each case, type and way, once for both tables."""
    trained, text, _ = loaded()
    plain = ("inductor", "roundoff")[QUICK:]
    graphs = (GRAPH, BEST)[QUICK:] if CUDA else ()
    with torch.no_grad():  # what a first compilation imports is no part of the others
        for way in plain + graphs:
            options: Any = WAYS[way]
            torch.compile(torch.nn.Linear(4, 4, device=DEVICE), **options)(text[:, :4].float())
    steps = [("decode", n) for n in BATCHES]
    prefills = [("prefill", 4 if CUDA else 1)]
    cases = steps[:2] + prefills + steps[2:]  # what tells most comes first
    found: list[dict[str, Any]] = []
    for dtype in DTYPES:
        model = trained.model(getattr(torch, dtype), device=DEVICE)
        for case, batch in cases if dtype == DTYPES[0] else cases[:1] + prefills:
            # On a GPU compiling takes most of the time: each case has the ways that tell most.
            replayed = graphs if case == "decode" and dtype == DTYPES[0] else ()
            ways = (plain if batch == BATCHES[0] or not replayed else ()) + replayed
            name = f"{trained.config.num_hidden_layers} {dtype} {case} {batch}"
            with compile_cache(name, again=again):  # empty at first
                found += contest(model, case, batch, ("eager", *ways))
    found.sort(key=lambda row: (row["dtype"] == "bfloat16", row["case"] == "decode", row["batch"]))
    return pd.DataFrame(found)


APART = ["first call", "nodes", "sessions", "memory"]
RATIOS = ["× inductor", "low", "high", "× eager", "tokens/s"]


@study.table(part="processor", times=RATIOS)
def times(args):
    """Time over inductor's and tokens a second, by case and batch."""
    return contests(args.second).drop(columns=APART)


@study.table(part="processor", times=["first call", "memory"])
def costs(args):
    """Seconds of the first call; nodes of ONNX that a call runs; memory beside the model."""
    same = ["case", "dtype", "batch", "optimization", "layers", "processor"]
    rows = contests(args.second)
    return rows[rows["first call"].notna()][same + APART]


# --- words: generate in float32, compiled once for all lengths or for each


@torch.no_grad()
def generated(model: Any, questions: list[list[int]], **options: Any) -> tuple[Any, float]:
    """What the model writes, greedily, and seconds."""
    ids, mask = padded(questions, model.config.pad_token_id, DEVICE)
    number, start = 6 if QUICK else 48, synchronized()
    count = {"max_new_tokens": number, "min_new_tokens": number}
    options |= {"do_sample": False, "disable_compile": True} | count
    written = model.generate(input_ids=ids, attention_mask=mask, **options)
    return written[:, ids.shape[1] :], synchronized() - start


@study.table(part="processor", times=["first run", "known run", "eager run"])
def words(args):
    """Greedy texts in float32: tokens, those that differ from eager's, conversions, seconds."""
    # To trace all layers for symbolic sizes takes minutes.
    trained = load_trained(layers=LAYERS or (4 if CUDA else None))
    asked, model = [trained.prompt(text) for _, text in prompts(3)], trained.model(device=DEVICE)
    texts = {"first": asked[:1], "another length": asked[1:2], "two at once": asked[1:]}
    texts = dict(list(texts.items())[: 1 if QUICK else 2 if CUDA else 3])
    plain, rows = model.forward, []
    caches = {"growing": True, "static": None}
    for cache in ["static"] if QUICK else ["growing"] if CUDA else caches:
        options = {"cache_implementation": "static"} if cache == "static" else {}
        storage: dict[str, Any] = {"instance": []}
        backend = partial(onnx_custom_backend, storage=storage)
        compiled = torch.compile(plain, backend=backend, dynamic=caches[cache])
        for name, questions in texts.items():
            eager, usual = generated(model, questions, **options)
            known, model.forward = len(storage["instance"]), compiled
            written, first = generated(model, questions, **options)
            _, again = generated(model, questions, **options)
            model.forward = plain
            rows.append(
                {"cache": cache, "asked": name, "layers": trained.config.num_hidden_layers}
                | {"processor": PROCESSOR}
                | {"tokens": written.numel(), "other words": int((written != eager).sum())}
                | {"conversions": len(storage["instance"]) - known}
                | {"first run": first, "known run": again, "eager run": usual}
            )
        torch._dynamo.reset()
    return rows


# --- generate, as people call it

#: A call of generate: options of torch.compile, those of generate, and whether transformers
#: compiles by itself.
CALLS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], bool]] = {
    "eager": (None, {}, False),
    "eager, static cache": (None, {"cache_implementation": "static"}, False),
    "inductor": ({"dynamic": True}, {}, False),
    "inductor, reduce-overhead": (None, {"cache_implementation": "static"}, True),
    "roundoff": ({"backend": onnx_custom_backend, "dynamic": True}, {}, False),
    "roundoff, CUDA graph": (
        {"backend": onnx_custom_backend, "mode": "reduce-overhead", "dynamic": False},
        {"cache_implementation": "static"},
        False,
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
        True,
    ),
}


@contextlib.contextmanager
def compiled(model: Any, options: dict[str, Any] | None) -> Iterator[None]:
    """The model with its forward compiled, where the way compiles it."""
    plain = model.forward
    if options is not None:
        model.forward = torch.compile(plain, **options)
    yield
    model.forward = plain


def one_way(pipe: Any, way: str, rows: int, tokens: int) -> None:
    """A process: writes a text whenever it is told to; None ends it."""
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = load_trained(layers=LAYERS)
    asked = [trained.prompt(words) for _, words in prompts(rows)]
    model = trained.model(getattr(torch, TEXTS_IN), device=device)
    ids, mask = padded(asked, model.config.pad_token_id, device)
    options, more, by_transformers = CALLS[way]
    more = more | {"disable_compile": not by_transformers, "do_sample": False}
    more |= {"max_new_tokens": tokens, "min_new_tokens": tokens}
    with compiled(model, options):
        while pipe.recv() is not None:
            start = time.perf_counter()
            try:
                made = model.generate(input_ids=ids, attention_mask=mask, **more)
                written = made[:, ids.shape[1] :].tolist()  # waits for the GPU
            except Exception as error:
                pipe.send((str(error).splitlines()[0], 0.0))
                return
            pipe.send((written, time.perf_counter() - start))


class Writer:
    """A way in a process of its own."""

    def __init__(self, *task: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=one_way, args=(other, *task), daemon=True)
        self._process.start()
        self.texts: list[Any] = []
        self.seconds: list[float] = []
        self.failure = ""

    def ask(self) -> None:
        """Begin a text."""
        self._pipe.send(True)

    def answer(self) -> None:
        """Wait for it."""
        written, seconds = self._pipe.recv()
        if isinstance(written, str):
            self.failure = written
        else:
            self.texts.append(written)
            self.seconds.append(seconds)

    def end(self) -> None:
        """Let its memory go."""
        if not self.failure:
            self._pipe.send(None)
        self._process.join()


@torch.no_grad()
def behind(truth: Float64Llama, asked: list[list[int]], written: list[list[int]]) -> float:
    """How far a written token's logit is from the best at its place, at worst, by float64.

    A text of a fixed length may not end: the tokens that would end it do not count.
    """
    ends = truth.config.eos_token_id
    worst = 0.0
    for question, answer in zip(asked, written, strict=True):
        ids = torch.tensor([question + answer], device=truth.device)
        logits = truth(ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
        logits[:, ends] = -torch.inf
        chosen = logits.gather(1, ids[0, len(question) :, None])
        worst = max(worst, float((logits.max(1, keepdim=True).values - chosen).max()))
    return worst


def first_texts(batches: list[int], args: Any) -> dict[int, dict[str, Writer]]:
    """Writers of each number of rows, a process a way: all write a first text at the same time."""
    writers: dict[int, dict[str, Writer]] = {}
    ways = ("eager", "roundoff") if QUICK else CALLS
    for rows in batches:
        # Symbolic sizes take longest to trace: one row tells.
        chosen = [w for w in ways if rows == 1 or (CALLS[w][0] or {}).get("dynamic") is not True]
        writers[rows] = {way: Writer(way, rows, args.tokens) for way in chosen}
    everyone = [writer for of in writers.values() for writer in of.values()]
    for writer in everyone:
        writer.ask()
    for writer in everyone:
        writer.answer()
    return writers


def race(rows: int, writers: dict[str, Writer], args: Any) -> list[dict[str, Any]]:
    """A row for each way: seconds of the first text, tokens a second, and whether it is right."""
    for _ in range(args.rounds + 1):  # a CUDA graph is recorded while the second text is written
        for writer in writers.values():
            if not writer.failure:
                writer.ask()
                writer.answer()
    for writer in writers.values():
        writer.end()
    trained = load_trained(layers=LAYERS)
    truth = Float64Llama(trained, "cuda" if torch.cuda.is_available() else "cpu")
    asked = [trained.prompt(words) for _, words in prompts(rows)]
    eager, found = writers["eager"], []
    for way, writer in writers.items():
        row = {
            "optimization": way,
            "dtype": TEXTS_IN,
            "batch": rows,
            "tokens": rows * args.tokens,
        }
        row |= {"failure": writer.failure or None}
        if not writer.failure:
            timed, usual = writer.seconds[2:], eager.seconds[2:]
            ratios = sorted(b / a for a, b in zip(timed, usual, strict=True))
            row |= {
                "behind": max(behind(truth, asked, t) for t in unlike(writer.texts)),
                "not eager's": sum(
                    a != b
                    for ours, theirs in zip(writer.texts[-1], eager.texts[-1], strict=True)
                    for a, b in zip(ours, theirs, strict=True)
                ),
                "different texts": len(unlike(writer.texts)),
                "first text": writer.seconds[0],
                "tokens/s": rows * args.tokens / sorted(timed)[len(timed) // 2],
                "× eager": ratios[len(ratios) // 2],
                "low": ratios[0],
                "high": ratios[-1],
            }
        found.append(row)
    return found


def unlike(texts: list[Any]) -> list[Any]:
    """Each text once."""
    return [t for i, t in enumerate(texts) if t not in texts[:i]]


@study.table(part="processor", times=["first text", "tokens/s", "× eager", "low", "high"])
def generate(args):
    """generate, as it is called: seconds of the first text, tokens a second, and its text."""
    parts = [part.strip() for part in args.prompts.split(",")]
    batches = [int(part) if part.isdecimal() else 0 for part in dict.fromkeys(parts)]
    if min(batches) < 1:
        usage_error(NAME, f"--prompts: got {args.prompts}, expected numbers from 1, such as 1,8")
    found = []
    for rows, writers in first_texts(batches, args).items():
        found += race(rows, writers, args)
    frame = pd.DataFrame(found)
    frame["processor"] = PROCESSOR
    return frame


# --- Values: what pages may print. Name, datum and statistic, table, column; rows; a test. -------

XEON = "intel-xeon-2-cores"
ENDS = ("low", "high")
FASTER = ("faster", "slower")


def undecided(found: Any) -> bool:
    """Whether the interval of a ratio holds 1."""
    return found.low <= 1 <= found.high


def all_of(*ways: str) -> Any:
    """Chooses the rows of these ways; none where one of them did not run."""
    return lambda column: column.isin(ways) & set(ways).issubset(set(column))


def there(column: Any) -> Any:
    """Chooses the rows that have a number."""
    return column.notna()


def quotient(rows: pd.DataFrame, of: str, over: str, column: str) -> tuple[float, float, float]:
    """A ratio of two ratios to one base, and the quotients of their ends, which are the widest."""
    by = rows.set_index("optimization")
    return (
        by[column][of] / by[column][over],
        by["low"][of] / by["high"][over],
        by["high"][of] / by["low"][over],
    )


TEXT = {"batch": 1, "dtype": "float16", "processor": "CUDA", "tokens": 128}
RIGHT = "one prompt, 128 tokens, float16, the text is eager's"
for name, way in (
    ("text.eager", "eager"),
    ("text.inductor", GRAPH),
):
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
    where=TEXT | {"optimization": all_of(BEST, GRAPH)},
    words=("slower", "faster"),
    test=undecided,
)
for name, way in ("first.inductor", GRAPH), ("first.roundoff", BEST):
    study.value(
        name,
        f"seconds of the first decode step, an empty compile cache, {way}, float16, 1 row",
        "costs",
        lambda t, way=way: t.set_index("optimization")["first call"][way],
        where={
            "case": "decode",
            "batch": 1,
            "dtype": "float16",
            "optimization": all_of(GRAPH, BEST),
        },
        test=lambda v: v.rows.set_index("optimization")["first call"].pipe(
            lambda s: s[GRAPH] > 2 * s[BEST]
        ),
    )
study.value(
    "graph.inductor",
    "tokens a second of a decode step of inductor, with CUDA graph over without, float16, 1 row",
    "times",
    lambda t: t.set_index("optimization")["tokens/s"].pipe(lambda s: s[GRAPH] / s["inductor"]),
    where={
        "case": "decode",
        "dtype": "float16",
        "batch": 1,
        "optimization": all_of("inductor", GRAPH),
    },
    # The same kernels, so that the logits have the same error.
    test=lambda v: v.value > 5 and v.rows["rms error"].nunique() == 1,
)
for name, case, batch in ("plain.prefill", "prefill", 4), ("plain.step", "decode", 1):
    study.value(
        name,
        f"time over inductor's, {case} of {batch} rows, float16, both without CUDA graphs",
        "times",
        "× inductor",
        where={
            "case": case,
            "batch": batch,
            "dtype": "float16",
            "optimization": "roundoff",
            "processor": "CUDA",
            "× inductor": there,
        },
        interval=ENDS,
        words=FASTER,
        test=lambda v: v.high < 1,
    )
for batch in 1, 8, 64:
    study.value(
        f"graph.rows{batch}",
        f"time over inductor's, decode step, float16, both in CUDA graphs, rows: {batch}",
        "times",
        "× inductor",
        where={
            "case": "decode",
            "batch": batch,
            "dtype": "float16",
            "optimization": BEST,
            "processor": "CUDA",
            "× inductor": there,
        },
        interval=ENDS,
        words=FASTER,
        test=lambda v, batch=batch: v.high < 1 if batch == 64 else undecided(v) or v.value > 0.9,
    )


def over_eager(rows: pd.DataFrame) -> tuple[float, float, float]:
    """Time over eager's, and the widest ends that the two intervals over inductor's allow."""
    _, low, high = quotient(rows, "roundoff", "eager", "× inductor")
    return rows.set_index("optimization")["× eager"]["roundoff"], low, high


study.value(
    "cpu.rows64",
    "processor time over eager's, decode step, float32, rows: 64",
    "times",
    over_eager,
    where={
        "case": "decode",
        "batch": 64,
        "dtype": "float32",
        "processor": "CPU",
        "optimization": all_of("eager", "roundoff"),
        "× inductor": there,
    },
    words=FASTER,
    on=XEON,
    test=undecided,
)
study.value(
    "cpu.inductor64",
    "processor time of inductor over eager's, decode step of 64 rows, float32",
    "times",
    "× eager",
    where={"case": "decode", "batch": 64, "dtype": "float32", "optimization": "inductor"},
    on=XEON,
    test=lambda v: v.value > 3,
)
for name, way in ("memory.roundoff", "roundoff"), ("memory.inductor", "inductor"):
    study.value(
        name,
        f"MiB beside the model after a prefill of 4 × 512 tokens in float16, {way}",
        "costs",
        lambda t, way=way: t.set_index("optimization")["memory"][way],
        where={
            "case": "prefill",
            "dtype": "float16",
            "processor": "CUDA",
            "optimization": all_of("inductor", "roundoff"),
        },
        test=lambda v: (
            v.rows["memory"].min() > 0
            and v.rows.set_index("optimization")["memory"].pipe(
                lambda m: m["roundoff"] > 4 * m["inductor"]
            )
        ),
    )
for name, way in ("memory.graph.inductor", GRAPH), ("memory.graph.roundoff", BEST):
    study.value(
        name,
        f"MiB beside the model and the cache of keys, decode step, 64 rows in float16, {way}",
        "costs",
        lambda t, way=way: t.set_index("optimization")["memory"][way],
        where={
            "case": "decode",
            "batch": 64,
            "dtype": "float16",
            "optimization": all_of(GRAPH, BEST),
        },
        # A session holds less.
        test=lambda v: v.rows.set_index("optimization")["memory"].pipe(
            lambda m: m[BEST] < m[GRAPH]
        ),
    )
GROWING = {"cache": "growing", "asked": ["first", "another length", "two at once"]}
study.value(
    "words.tokens",
    "tokens of three greedy texts, float32, a growing cache, dynamic=True",
    "words",
    lambda t: t["tokens"].sum(),
    where=GROWING,
    on=XEON,
    test=lambda v: v.value == 192,
)
study.value(
    "words.other",
    "tokens of three greedy texts that differ from eager's, float32, a growing cache, dynamic=True",
    "words",
    lambda t: t["other words"].sum(),
    where=GROWING,
    on=XEON,
    test=lambda v: v.value == 0 and v.rows["tokens"].sum() == 192,
)
study.value(
    "words.conversions",
    "conversions for a prompt of another length, dynamic=True",
    "words",
    "conversions",
    where={"cache": "growing", "asked": "another length", "layers": 30},
    on=XEON,
    test=lambda v: v.value == 0,
)
study.value(
    "words.again",
    "conversions for two texts at once after single ones, dynamic=True",
    "words",
    "conversions",
    where={"cache": "growing", "asked": "two at once", "layers": 30},
    on=XEON,
    test=lambda v: v.value > 0,
)
study.value(
    "words.first",
    "seconds of the first text of one prompt, dynamic=True, 30 layers, float32",
    "words",
    "first run",
    where={"cache": "growing", "asked": "first", "layers": 30},
    on=XEON,
    test=lambda v: v.value > 10 * v.rows["known run"].item(),
)
study.value(
    "words.time",
    "seconds of a known text over eager's, one text each, dynamic=True, 30 layers, float32",
    "words",
    lambda t: (t["known run"] / t["eager run"]).item(),
    where={"cache": "growing", "asked": "first", "layers": 30},
    on=XEON,
    test=lambda v: v.value < 1,
)
study.value(
    "words.two",
    "seconds of two known texts at once over eager's, dynamic=True, 30 layers, float32",
    "words",
    lambda t: (t["known run"] / t["eager run"]).item(),
    where={"cache": "growing", "asked": "two at once", "layers": 30},
    on=XEON,
    test=lambda v: abs(v.value - 1) > 0.1,
)


def errors(rows: pd.DataFrame) -> pd.Series:
    """Typical error over inductor's, by case, batch and type, without CUDA graphs."""
    table = rows.pivot_table("rms error", ["case", "dtype", "batch"], "optimization")
    return table["roundoff"] / table["inductor"]


for name, end in ("error.least", "min"), ("error.most", "max"):
    study.value(
        name,
        f"{end} of the typical error of the logits over inductor's, by case and type",
        "times",
        lambda t, end=end: getattr(errors(t), end)(),
        where={"optimization": all_of("inductor", "roundoff"), "processor": "CUDA"},
        test=lambda v: errors(v.rows).min() > 0.5 and errors(v.rows).max() < 2,
    )

if __name__ == "__main__":
    study.main()
