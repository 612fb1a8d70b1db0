"""The study behind "Why does the batch size change a model's output?".

Bits of a product's row alone and among others, of attention's tokens in each way that a server
computes them, and of whole texts; and what invariance costs: products, attention and tokens.

The page tells the story with small experiments. This file measures the full grid, writes the
record, and defines each number that the page may print.

    python studies/batch_invariance.py --record

What is called *roundoff* in a table is :func:`roundoff.kernels.matmul`,
:func:`roundoff.kernels.attention`, or a model within ``with roundoff.invariant():``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.nn.functional import linear, pad, scaled_dot_product_attention

import roundoff
from roundoff.compare import digest, scaled_error
from roundoff.errors import WorkerError
from roundoff.kernels import attention, interpreting, matmul
from roundoff.kernels.invariant_attention import attend, seen_by_position
from roundoff.kernels.invariant_cublas import cancelling, routes
from roundoff.kernels.invariant_matmul import Tile
from roundoff.models import (
    GraphStep,
    decode,
    load_trained,
    padded,
    prompts,
    server_batches,
)
from roundoff.page.measurement import Study
from roundoff.page.values import Measured
from roundoff.record import read_record
from roundoff.script import unit_test_going
from roundoff.timing import copies, measure, torch_precision

quick = unit_test_going()
gpu = torch.cuda.is_available() and not interpreting()
device = "cuda" if gpu else "cpu"
PART = "gpu" if gpu else "cpu"
H100 = "nvidia-h100-80gb-hbm3"

study = Study(
    "plot_batch_invariance",
    "Bits of a row, a token and a text alone and in a batch, and what equal bits cost.",
    on="nvidia-h200",
    prompts=(8 if gpu else 2, "prompts", (1, 32)),
    tokens=(64 if gpu else 2 if quick else 8, "tokens of each text", 1),
    completions=(1000 if gpu else 3 if quick else 6, "requests to the server", 1),
)
MOST = 64 if gpu else 2 if quick else 4  # texts in a batch
BUDGET_S = 0.1 if gpu else 0.02  # for each comparison of times

# --- A second process: cuBLAS reads two environment variables when it starts. --------------------

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
unsplit = gpu and VARIABLES.items() <= os.environ.items()  # this is that process
TORCH = "two variables" if unsplit else "torch"
SECOND_S = 200  # seconds that it may take


def attempt(row: Mapping[str, Any], call: Callable[..., Any], *operands: Any) -> list[Any]:
    """The rows of one experiment; in place of what this machine cannot run, the reason."""
    try:
        parts = call(*operands)
    except Exception as error:
        traceback.print_exc()
        words = " ".join(str(error).split())[:100]
        parts = {"note": f"{type(error).__name__}: {words}".strip(": ")}
    several = parts if isinstance(parts, list) else [parts]
    return [{**row, **part, "note": part.get("note")} for part in several]


def with_variables(args: Namespace, table: str) -> pd.DataFrame:
    """A table as a second process computes it, in which cuBLAS has no room to add up parts.

    Raises
    ------
    WorkerError
        When the process fails, whose last words are in the message, or takes too long.
    """
    options = {name: getattr(args, name) for name in study.options}
    options |= {"only": table, "completions": min(args.completions, 200)}
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, __file__, *words, "--record", folder]
        if args.commit:
            command += ["--commit", args.commit]
        try:
            done = subprocess.run(  # noqa: S603 - this script, no shell
                command,
                env=os.environ | VARIABLES,
                capture_output=True,
                text=True,
                timeout=SECOND_S,
            )
        except subprocess.TimeoutExpired as error:
            raise WorkerError(
                "the process with two variables",
                got=f"more than {SECOND_S} s",
                expected="its tables",
                hint="smaller sizes",
            ) from error
        if done.returncode:
            raise WorkerError("the process with two variables", got=done.stderr[-2000:])
        (path,) = Path(folder).glob("*/*.json")
        return read_record(path).tables[table]


def beside(args: Namespace, table: str) -> list[Any]:
    """Rows of the second process; on a CPU, and within it, none."""
    if unsplit or not gpu:
        return []
    return attempt({}, lambda: with_variables(args, table).to_dict("records"))


# --- A row alone, and among others. --------------------------------------------------------------

OPS = "batch_invariant_ops"
ops = import_module(OPS) if gpu and not unsplit and find_spec(OPS) else None
OTHERS = {OPS: lambda x, w: ops.matmul_persistent(x, w.t())} if ops else {}
ONE_TILE = Tile(swap=False, rows=128, columns=128, depth=64, warps=8, stages=3)
KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32} | (
    {"TF32": torch.float32} if gpu else {}
)
#: K → N: on a GPU of models with 7 and 70 billion parameters, and of a small one.
SHAPES = [
    *([(4096, 4096), (11008, 4096), (4096, 11008), (8192, 1024)] if gpu else []),
    *[(576, 1536), (1536, 576)],
]
#: Timed, too: joined weights, vocabularies, and a small model's.
MORE = [(4096, 6144), (14336, 4096), (4096, 128256), (576, 49152), (2048, 12288)] if gpu else []
COUNTS = [1, 2, 3, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048, 4096][
    : None if gpu else 7 if quick else 10
]
TIMED = [2**i for i in range(13)] if gpu else [1, 16]
#: Keys and texts of attention.
DECODED = list(product((512, 2048, 8192), (1, 8, 64))) if gpu else []


def products(kind: str) -> dict[str, Callable[..., torch.Tensor]]:
    """Functions of x and W, by name; torch's first."""
    ways: dict[str, Callable[..., torch.Tensor]] = {TORCH: linear}
    if gpu and KINDS[kind].itemsize == 2:
        ways["one tile"] = partial(matmul, tile=ONE_TILE)
    ways |= OTHERS
    return ways if unsplit else ways | {"roundoff": partial(matmul, tf32=kind == "TF32")}


def compare_rows(function: Any, x: torch.Tensor, w: torch.Tensor) -> dict[str, Any]:
    """Bits of the first row among others; the error of ordinary rows."""
    rows = {m: digest(function(x[:m], w)[0]) for m in COUNTS}
    other = [m for m in COUNTS if rows[m] != rows[1]]
    generator = torch.Generator(device).manual_seed(0)
    x, w = (torch.randn(t.shape, generator=generator, device=device).to(t) for t in (x[:64], w))
    exact, y = x.double() @ w.double().T, function(x, w)
    return {
        "other": len(other) / (len(COUNTS) - 1),
        "results": len(set(rows.values())),
        "other M": f"{other[0]}–{other[-1]}" if other else "none",
        "checksum": int(digest(y)[:5], 16),
        "one from": next(m for m in COUNTS if len({rows[c] for c in COUNTS if c >= m}) == 1),
        "rms error": scaled_error(exact, y, dtype=y.dtype).rms,
    }


@study.table(part=PART)
def alone(args):
    """Share of the larger M at which the first row has bits that it has not alone."""
    found = []
    for kind, dtype in KINDS.items():
        for k, n in SHAPES if kind == "bfloat16" else SHAPES[:2]:
            empty = (torch.empty(rows, k, dtype=dtype, device=device) for rows in (COUNTS[-1], n))
            x, w = cancelling(*empty)
            for way, function in list(products(kind).items())[: 1 if unsplit else None]:
                row = {"dtype": kind, "weight": f"{k} → {n}", "way": way}
                with torch_precision(tf32=kind == "TF32"):
                    found += attempt(row, compare_rows, function, x, w)
    return [*found, *beside(args, "alone")]


# --- Attention of a token: in a batch, in pieces, after padding. ---------------------------------

HEADS, GROUPS, HEAD, LENGTH = (32, 8, 128, 300) if gpu else (4, 2, 16, 70 if quick else 280)
sdpa = partial(scaled_dot_product_attention, enable_gqa=True)


def visible(q: Any, k: Any, start: int) -> torch.Tensor:
    """Which keys a query sees: the last query is at the last key, the first keys are padding."""
    n, keys = q.shape[2], k.shape[2]
    seen = torch.ones(n, keys, dtype=torch.bool, device=q.device).tril(keys - n)
    return seen & (torch.arange(keys, device=q.device) >= start)


def torch_attention(q: Any, k: Any, v: Any, start: int = 0) -> torch.Tensor:
    """As a decoder calls it."""
    if start == 0 and q.shape[2] in (1, k.shape[2]):
        return sdpa(q, k, v, is_causal=q.shape[2] > 1)
    return sdpa(q, k, v, attn_mask=visible(q, k, start))


def by_mask(q: Any, k: Any, v: Any, start: int = 0) -> torch.Tensor:
    return attention(q, k, v, mask=visible(q, k, start)[None, None])


def compare_tokens(compute: Any, q: Any, k: Any, v: Any) -> list[dict[str, Any]]:
    """Tokens of the first text whose bits are not those of one pass over it alone."""

    def pieces(size: int) -> torch.Tensor:
        # cuDNN plans each length that is new, which takes long on a processor: several at once.
        each = ThreadPoolExecutor().map if gpu and compute is torch_attention else map
        parts = (
            (q[:1, :, end - size : end], k[:1, :, :end], v[:1, :, :end])
            for end in range(size, LENGTH + size, size)
        )
        return torch.cat([*each(lambda part: compute(*part), parts)], 2)

    whole = compute(q[:1], k[:1], v[:1])
    padded = compute(q[:1], *(pad(t[:1], (0, 0, 37, 0)) for t in (k, v)), start=37)
    ways = {
        "among 8 texts": compute(q, k, v)[:1],
        "in chunks of 64": pieces(64),
        "token by token": pieces(1),
        "behind padding": padded,
    }
    return [
        {"text": name, "checksum": int(digest(whole)[:5], 16)}
        | {"other tokens": float((y != whole).any(3).any(1).float().mean())}
        for name, y in ways.items()
    ]


@study.table("attention", part=PART)
def tokens_of_attention(args):
    """Share of the tokens whose bits are not those of one pass alone; padding is 37 columns."""
    found, draw = [], partial(torch.rand, generator=torch.Generator().manual_seed(0))
    for kind in ["bfloat16", "float16", "float32"]:
        qkv = [
            draw(8, heads, LENGTH, HEAD).sub(0.5).mul(4).to(device, KINDS[kind])
            for heads in (HEADS, GROUPS, GROUPS)
        ]
        for way, compute in {"torch": torch_attention, "roundoff": by_mask}.items():
            found += attempt({"dtype": kind, "way": way}, compare_tokens, compute, *qkv)
    return found


# --- A trained model's texts, in the batches of a server. ----------------------------------------

OURS = {} if unsplit else {"roundoff": roundoff.invariant}
MODES: dict[str, Callable[[], Any]] = {TORCH: nullcontext}
MODES |= {OPS: ops.set_batch_invariant_mode} if ops else {}
MODES |= OURS
trained = cache(lambda: load_trained(layers=2 if quick else None))
model = cache(lambda: trained().model(torch.bfloat16, device=device))
steps: dict[str, Any] = {}  # by way: of one room for all texts a graph is recorded for each batch


def written(args: Namespace, way: str, batches: Any) -> list[Any]:
    """Prompt and text of each request."""
    step = steps.setdefault(way, GraphStep(model()) if gpu else None)
    asked, made = [trained().prompt(text) for _, text in prompts(args.prompts)], []
    for rows, longer in batches:
        given = [asked[row] for row in rows]
        with MODES[way]():
            text = decode(
                model(),
                given,
                args.tokens,
                step=step,
                length=longer + max(map(len, given)),
                room=gpu * (32 + max(map(len, asked)) + args.tokens),
            ).tokens
        made += zip(rows, map(tuple, text.tolist()), strict=True)
    return made


def compare_texts(args: Namespace, way: str, batches: Any, expected: Any) -> dict[str, Any]:
    """Texts of the requests, beside those that the prompts get alone."""
    made = written(args, way, batches)
    same = [[a == b for a, b in zip(text, expected[row], strict=True)] for row, text in made]
    first = [1 + equal.index(False) for equal in same if not all(equal)]
    return {
        "completions": len(made),
        "different": len(set(made)),
        "of": len({row for row, _ in made}),
        "other texts": len(first) / len(made),
        "first other": min(first, default=None),
        "checksum": int(digest(torch.tensor(list(expected.values())))[:5], 16),
    }


@study.table(part=PART)
def texts(args):
    """Completions in bfloat16 that are not what the prompt gets alone, with a static cache."""
    single = [([row], 0) for row in range(args.prompts)]
    served = {"alone, again": single} | {
        f"batch of {n}": [([i % args.prompts for i in range(n)], 0)]
        for n in (8, 16, 32, 64)
        if args.prompts <= n <= MOST
    }
    found = []
    for way in MODES:
        requests = args.completions if way in ("torch", "roundoff") else min(args.completions, 200)
        batches = server_batches(
            requests, prompts=args.prompts, most=MOST, multiple=8 if gpu else 1
        )
        texts_alone = cache(lambda way=way: dict(written(args, way, single)))
        for name, chosen in (served | {"server": list(batches)}).items():
            row = {"way": way, "served": name}
            found += attempt(
                row, lambda c=chosen, t=texts_alone, w=way: compare_texts(args, w, c, t())
            )
    return [*found, *beside(args, "texts")]


# --- What it costs: products, a token, attention. ------------------------------------------------

WAYS = ["one tile", "batch_invariant_ops", "two variables", "roundoff"]


def ratios(calls: Any, launches: int = 1) -> dict[str, Any]:
    """Time of each call over the first's; a call is told the number of its launch."""
    timings = measure(
        calls,
        device=device,
        cuda_graph=gpu,
        rotate=launches,
        budget_s=BUDGET_S,
        precision=0.01,
        min_rounds=9 if gpu else 3,
        max_rounds=60,
    )
    over = timings.ratios().set_index("label")
    row = over["ratio"].to_dict() | over.reindex(["roundoff"])[["low", "high"]].iloc[0].to_dict()
    return row | {"µs": timings.frame["median"].iloc[0] * 1e6}


def compare_times(kind: str, x: Any, weights: Any) -> dict[str, Any]:
    ways, (n, k) = products(kind), weights[0].shape
    calls = {way: lambda i, f=f: f(x, weights[i % len(weights)]) for way, f in ways.items()}
    work = max(len(x), 256) * max(1, n * k >> 25)
    return ratios(calls, max(len(weights), 60 * 256 // work) if gpu else 1)


@study.table(part=PART, times=["µs", *WAYS, "low", "high"])
def cost(args):
    """Products: time over torch's, in interleaved rounds, each launch with another weight."""
    found: list[Any] = []
    shapes = {"bfloat16": SHAPES + MORE, "float16": (SHAPES + MORE)[: 10 if gpu else 1]}
    for kind, each in shapes.items():
        for k, n in each:
            generator = torch.Generator(device).manual_seed(n)
            draw = partial(torch.randn, generator=generator, device=device, dtype=KINDS[kind])
            weights = [draw(n, k) for _ in range(copies(2 * n * k, device) if gpu else 1)]
            for m in TIMED:
                row = {"dtype": kind, "weight": f"{k} → {n}", "M": m}
                found += attempt(row, compare_times, kind, draw(m, k), weights)
    keys = ["dtype", "weight", "M"]
    frame = pd.DataFrame(found, columns=[*keys, "µs", *WAYS, "low", "high", "note"])
    second = pd.DataFrame(beside(args, "cost"))
    if "one tile" in second:  # both processes time it: it relates their times
        tiled = frame[keys].merge(second, "left", keys)["one tile"]
        frame["two variables"] = frame["one tile"] / tiled
    return frame


@study.table("routes", part=PART)
def routes_taken(args):
    """How many of the products that were timed before went which way."""
    return [{"way": way, "cases": count} for way, count in routes().items()]


# --- generate, as it is called: a model changed by roundoff.invariant, beside torch's. -----------

CALLED = ["tokens/s", "roundoff", "low", "high", "torch's other texts", "other texts", "note"]
changed = cache(lambda: roundoff.invariant(trained().model(torch.bfloat16, device=device)))


def text_of(model: Any, rows: list[int], tokens: int, kind: str | None) -> Callable[[], Any]:
    """A call of generate for these prompts; its tokens are lists, for which it waits."""
    asked = [trained().prompt(text) for _, text in prompts(max(rows) + 1)]
    ids, mask = padded([asked[row] for row in rows], model.config.pad_token_id, device)
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": tokens}
    given |= {"min_new_tokens": tokens, "do_sample": False}
    given |= {"cache_implementation": "static"} if kind else {}
    given |= {"disable_compile": kind != "compiled"}
    return lambda: model.generate(**given)[:, ids.shape[1] :].tolist()


@cache
def called_alone(way: str, count: int, tokens: int, kind: str | None) -> list[Any]:
    """What each prompt gets alone."""
    its = {"torch": model, "roundoff": changed}[way]()
    return [text_of(its, [row], tokens, kind)()[0] for row in range(count)]


def called_times(args: Namespace, batch: int, kind: str | None) -> dict[str, Any]:
    """Time of generate over torch's; share of texts that are not what the prompt gets alone."""
    rows = [i % args.prompts for i in range(batch)]
    calls = {"torch": text_of(model(), rows, args.tokens, kind)}
    calls["roundoff"] = text_of(changed(), rows, args.tokens, kind)
    found = {}
    for way, call in calls.items():
        # Without it, as torch comes, while torch's model is compiled.
        torch._inductor.config.emulate_precision_casts = way == "roundoff"
        alone = called_alone(way, args.prompts, args.tokens, kind)
        other = sum(text != alone[row] for row, text in zip(rows, call(), strict=True))
        found["other texts" if way == "roundoff" else "torch's other texts"] = other / batch
    rounds = {"warmup": 1, "min_rounds": 5 if gpu else 3, "max_rounds": 5}
    timings = measure(calls, budget_s=BUDGET_S, **rounds)
    (over,) = (row for row in timings.ratios().to_dict("records") if row["label"] == "roundoff")
    found |= {"tokens/s": batch * args.tokens / timings.frame["median"].iloc[0]}
    return found | {"roundoff": over["ratio"], "low": over["low"], "high": over["high"]}


@study.table(part=PART, times=["tokens/s", "roundoff", "low", "high"])
def called(args):
    """generate of SmolLM2, bfloat16: tokens a second of torch, time of a changed model over it."""
    batches = (1, 3, 8, 17, 64) if gpu else (1, 2) if quick else (1, 3)
    found: list[Any] = []
    for kind in (None, "static") if not unsplit else ():
        for batch in batches:
            row = {"cache": kind or "dynamic", "batch": batch}
            found += attempt(row, called_times, args, batch, kind)
    return pd.DataFrame(found, columns=["cache", "batch", *CALLED])


@study.table("compiled", part=PART, times=["tokens/s", "roundoff", "low", "high"])
def compiled_calls(args):
    """As ``called``, static cache, where transformers compiles each step into a CUDA graph."""
    found: list[Any] = []
    for batch in (1, 8) if gpu and not unsplit else ():
        row = {"cache": "static", "batch": batch}
        found += attempt(row, called_times, args, batch, "compiled")
    return pd.DataFrame(found, columns=["cache", "batch", *CALLED]) if found else []


def decode_times(keys: int, batch: int) -> dict[str, Any]:
    """Attention of one token for each of a batch: times over torch's, whose bits depend on it."""
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    sets = copies(4 * batch * GROUPS * keys * HEAD, device)
    caches = [[draw(batch, GROUPS, keys, HEAD) for _ in "kv"] for _ in range(sets)]
    q, seen = draw(batch, HEADS, 1, HEAD), seen_by_position(batch, 1, keys, torch.device(device))
    ways = {"torch": sdpa, "roundoff": partial(attend, seen=seen)}
    calls = {way: lambda i, f=f: f(q, *caches[i % sets]) for way, f in ways.items()}
    one = [t[:1] for t in (q, *caches[0])]
    single = ways | {"roundoff": partial(attend, seen=seen_by_position(1, 1, keys, q.device))}
    other = [way for way, f in single.items() if digest(f(*one)) != digest(calls[way](0)[:1])]
    return {"other bits": ", ".join(other) or "none"} | ratios(calls, max(sets, 60))


# Ours cuts the keys into parts of 256, which a second kernel joins where texts are few.
TAKEN = ["µs", "roundoff", "low", "high", "other bits"]


@study.table(part=PART, times=TAKEN)
def decoding(args):
    """Attention of one token over a cache, bfloat16: time over torch's, and who changes bits."""
    found: list[Any] = []
    for keys, batch in DECODED if not unsplit else ():
        row = {"keys": keys, "batch": batch}
        found += attempt(row, decode_times, keys, batch)
    return pd.DataFrame(found, columns=["keys", "batch", *TAKEN, "note"]) if found else []


# --- Values: what pages may print. Name, datum and statistic, table, column; rows; a test. -------

# A small run of a few requests shows neither share.
SERVER = {"served": "server", "completions": lambda s: s >= 100}


def all_prompts(v: Measured) -> bool:
    """As many texts as prompts, of enough requests to mean it."""
    row = v.rows.iloc[0]
    return bool(row["different"] == row["of"] and row["completions"] >= 1000)


study.value(
    "texts.changed",
    "share of a server's completions that differ from what the prompt gets alone, torch, "
    "SmolLM2-135M, bfloat16, 64 tokens",
    "texts",
    "other texts",
    where=SERVER | {"way": "torch"},
    test=lambda v: v.value > 0.5,
)
study.value(
    "texts.invariant",
    "share of a server's completions that differ from what the prompt gets alone, within `with "
    "roundoff.invariant()`, SmolLM2-135M, bfloat16, 64 tokens",
    "texts",
    "other texts",
    where=SERVER | {"way": "roundoff"},
    test=lambda v: v.value == 0 and all_prompts(v),
)
study.value(
    "texts.completions",
    "completions of the server, torch",
    "texts",
    "completions",
    where=SERVER | {"way": "torch"},
    test=lambda v: v.value >= 1000,
)


def at_one_weight(t: pd.DataFrame, column: str) -> Any:
    return t.set_index("way")[column]


SQUARE = {"dtype": "bfloat16", "weight": "4096 → 4096", "way": ["torch", "one tile"]}
study.value(
    "product.unsplit",
    "rows from which on torch's product 4096 → 4096 in bfloat16 has one result",
    "alone",
    lambda t: at_one_weight(t, "one from")["torch"],
    where=SQUARE,
    # From there on its bits are those of a kernel that does not split K.
    test=lambda v: v.value > 1 and v.rows["checksum"].nunique() == 1,
)
study.value(
    "product.error",
    "typical error of a product by roundoff over that of torch's, bfloat16, 4096 → 4096, 64 rows",
    "alone",
    lambda t: at_one_weight(t, "rms error")["roundoff"] / at_one_weight(t, "rms error")["torch"],
    where=SQUARE | {"way": ["torch", "roundoff"]},
    test=lambda v: 0.99 < v.value < 1.01,
)
study.value(
    "attention.padding",
    "share of 300 tokens whose bits 37 columns of padding change, torch's attention, bfloat16",
    "attention",
    "other tokens",
    where={"way": "torch", "text": "behind padding", "dtype": "bfloat16"},
    test=lambda v: v.value > 0.5,
)
study.value(
    "attention.neighbours",
    "share of 300 tokens whose bits 7 more texts change, torch's attention, bfloat16",
    "attention",
    "other tokens",
    where={"way": "torch", "text": "among 8 texts", "dtype": "bfloat16"},
    test=lambda v: v.value == 0,
)


def column_of(statistic: str) -> Callable[[pd.DataFrame], list[float]]:
    """The least or the largest ratio of a table, with its interval."""

    def pick(t: pd.DataFrame) -> list[float]:
        row = t.sort_values("roundoff").iloc[0 if statistic == "least" else -1]
        return row[["roundoff", "low", "high"]].tolist()

    return pick


def all_above(v: Measured) -> bool:
    return bool((v.rows["low"] > 1).all())


for statistic in "least", "most":
    study.value(
        f"decoding.{statistic}",
        f"{statistic} time of roundoff's attention of one token over torch's, bfloat16, nine "
        "shapes, in a CUDA graph",
        "decoding",
        column_of(statistic),
        test=all_above,
    )
AS_CALLED = {
    "batch": lambda s: s.isin([1, 3, 8, 17, 64]) & (s == 64).any(),
    "cache": "dynamic",
}
for statistic in "least", "most":
    study.value(
        f"called.{statistic}",
        f"{statistic} time of generate over torch's, a model changed by "
        "`roundoff.invariant(model)`, SmolLM2-135M, bfloat16, batches of 1 to 64, default cache",
        "called",
        column_of(statistic),
        where=AS_CALLED,
        # A speed of texts that are what each prompt gets alone.
        test=lambda v: v.low is not None and v.low < 1 and (v.rows["other texts"] == 0).all(),
    )
study.value(
    "compiled.most",
    "most time of generate over torch's, both compiled into CUDA graphs by transformers, a model "
    "changed by `roundoff.invariant(model)`, SmolLM2-135M, bfloat16, batches of 1 and 8",
    "compiled",
    column_of("most"),
    on=H100,
    test=lambda v: (
        v.low is not None
        and v.low < 1 < v.high < 1.1
        and len(v.rows) == 2
        and bool((v.rows["other texts"] == 0).all())
    ),
)
study.value(
    "called.torch",
    "largest share of a batch's texts that are not what the prompt gets alone, generate of torch, "
    "SmolLM2-135M, bfloat16, batches of 1 to 64",
    "called",
    lambda t: t["torch's other texts"].max(),
    where=AS_CALLED,
    test=lambda v: v.value > 0.3,
)
TORCH_CHANGES = {"other bits": lambda s: s.str.split(", ").map(lambda ways: "torch" in ways)}
study.value(
    "decoding.keys",
    "least number of keys at which torch's attention of one token has different bits in a batch of "
    "8 or 64 texts than alone, bfloat16; 512, 2048 and 8192 were tried",
    "decoding",
    lambda t: t["keys"].min(),
    where=TORCH_CHANGES,
    # From there on in both batches, and without 8 texts or more never.
    test=lambda v: v.rows.groupby("keys")["batch"].agg(set).map({8, 64}.__eq__).all(),
)
study.value(
    "product.median",
    "median time of roundoff's product over torch's, 273 shapes in float16 and bfloat16, in a CUDA "
    "graph",
    "cost",
    lambda t: t["roundoff"].median(),
    where={"batch_invariant_ops": lambda s: s.notna()},
    test=lambda v: 0.97 < v.value < 1.03,
)
study.value(
    "product.most",
    "most time of roundoff's product over torch's, 273 shapes in float16 and bfloat16, in a CUDA "
    "graph",
    "cost",
    column_of("most"),
    where={"batch_invariant_ops": lambda s: s.notna()},
    test=lambda v: v.low is not None and v.low > 1.2,
)
study.value(
    "product.shapes",
    "products that were timed: shapes, each in float16 or in bfloat16",
    "cost",
    len,
    where={"batch_invariant_ops": lambda s: s.notna()},
    # Where it is beyond 1.15, the weight is 8192 → 1024 and there are few rows.
    test=lambda v: (
        v.rows[v.rows["roundoff"] > 1.15]
        .pipe(lambda t: (t["weight"] == "8192 → 1024") & (t["M"] <= 256))
        .all()
    ),
)

if __name__ == "__main__":
    study.main()
