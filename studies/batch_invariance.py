"""The study behind "Why does the batch size change a model's output?".

Bits of a product's row alone and among others, of attention's tokens among other texts and behind
padding, and of whole texts; and what invariance costs: products, attention and tokens.

The page tells the story with small experiments. This file measures the full grid, writes the
record, and defines each number that the page may print.

    python studies/batch_invariance.py --record

What is called *roundoff* in a table is :func:`roundoff.kernels.matmul`,
:func:`roundoff.kernels.attention`, or a model within ``with roundoff.invariant():``.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
from torch.nn.functional import linear, pad, scaled_dot_product_attention

import roundoff
from roundoff.compare import digest, scaled_error
from roundoff.kernels import attention, interpreting, matmul
from roundoff.kernels.invariant_attention import attend, seen_by_position
from roundoff.kernels.invariant_cublas import cancelling, routes
from roundoff.kernels.invariant_matmul import Tile
from roundoff.models import (
    decode,
    load_trained,
    padded,
    prompts,
    server_batches,
)
from roundoff.page.measurement import Study
from roundoff.record import read_record
from roundoff.script import unit_test_going
from roundoff.timing import copies, measure

quick = unit_test_going()
gpu = torch.cuda.is_available() and not interpreting()
device = "cuda" if gpu else "cpu"
study = Study(
    "plot_batch_invariance",
    "Bits of a row, a token and a text alone and in a batch, and what equal bits cost.",
    on="nvidia-h200",
    part="gpu" if gpu else "cpu",
)
#: Prompts, tokens of each text, requests to the server, texts in a batch.
PROMPTS, TOKENS, COMPLETIONS, MOST = (8, 64, 1000, 64) if gpu else (2, 2, 3, 2)
BUDGET_S = 0.1 if gpu else 0.02  # for each comparison of times

# --- A row alone, and among others. --------------------------------------------------------------

OPS = "batch_invariant_ops"
ops = import_module(OPS) if gpu and find_spec(OPS) else None
ONE_TILE = Tile(swap=False, rows=128, columns=128, depth=64, warps=8, stages=3)
KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
#: K → N that are timed: of models with 7 and 70 billion parameters and of small ones; joined
#: weights and vocabularies, too.
SHAPES = [
    (4096, 4096),
    (11008, 4096),
    (4096, 11008),
    (8192, 1024),
    (576, 1536),
    (1536, 576),
    (4096, 6144),
    (14336, 4096),
    (4096, 128256),
    (576, 49152),
    (2048, 12288),
]
if not gpu:
    SHAPES = [(576, 1536)]
COUNTS = [1, 2, 3, 4, 8, 16, 32, 64, 96, 128, *([256, 512, 1024, 2048, 4096] if gpu else [])]
TIMED = [2**i for i in range(13)] if gpu else [1, 16]
#: Functions of x and W.
PRODUCTS = {"torch": linear, "roundoff": matmul}


@study.table()
def alone(args):
    """The first row's bits among others, and the error of ordinary rows."""
    ways = PRODUCTS | ({"one tile": partial(matmul, tile=ONE_TILE)} if gpu else {})
    k, n = SHAPES[0]
    for kind, dtype in KINDS.items():
        generator = torch.Generator(device).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=device)
        ordinary, weight = (draw(rows, k).to(dtype) for rows in (64, n))
        exact = ordinary.double() @ weight.double().T
        empty = (torch.empty(rows, k, dtype=dtype, device=device) for rows in (COUNTS[-1], n))
        x, w = cancelling(*empty)
        for way, function in ways.items():
            rows = [digest(function(x[:m], w)[0]) for m in COUNTS]
            y = function(ordinary, weight)
            yield {
                "dtype": kind,
                "weight": f"{k} → {n}",
                "way": way,
                "checksum": int(digest(y)[:5], 16),
                "one from": next(m for i, m in enumerate(COUNTS) if len({*rows[i:]}) == 1),
                "rms error": scaled_error(exact, y, dtype=dtype).rms,
            }


# --- Attention of a token: in a batch, in pieces, after padding. ---------------------------------

HEADS, GROUPS, HEAD, LENGTH = (32, 8, 128, 300) if gpu else (4, 2, 16, 70)
sdpa = partial(scaled_dot_product_attention, enable_gqa=True)


def attention_by(way, q, k, v, start=0):
    """As a decoder calls it; the first keys are padding."""
    if way == "torch" and start == 0:
        return sdpa(q, k, v, is_causal=True)
    n, keys = q.shape[2], k.shape[2]
    seen = torch.ones(n, keys, dtype=torch.bool, device=q.device).tril(keys - n)
    seen &= torch.arange(keys, device=q.device) >= start
    if way == "torch":
        return sdpa(q, k, v, seen)
    return attention(q, k, v, mask=seen[None, None])


@study.table("attention")
def tokens_of_attention(args):
    """Share of the tokens whose bits are not those of one pass alone; padding is 37 columns."""
    draw = partial(torch.rand, generator=torch.Generator().manual_seed(0))
    q, k, v = (
        draw(8, heads, LENGTH, HEAD).sub(0.5).mul(4).to(device, torch.bfloat16)
        for heads in (HEADS, GROUPS, GROUPS)
    )
    behind = [pad(t[:1], (0, 0, 37, 0)) for t in (k, v)]
    for way in "torch", "roundoff":
        whole = attention_by(way, q[:1], k[:1], v[:1])
        texts = {
            "among 8 texts": attention_by(way, q, k, v)[:1],
            "behind padding": attention_by(way, q[:1], *behind, start=37),
        }
        for text, y in texts.items():
            yield {
                "dtype": "bfloat16",
                "way": way,
                "text": text,
                "checksum": int(digest(whole)[:5], 16),
                "other tokens": float((y != whole).any(3).any(1).float().mean()),
            }


# --- A trained model's texts, in the batches of a server. ----------------------------------------

# cuBLAS reads two variables when it starts, so a second process gives it no room to add up parts.
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
SPLITS = not VARIABLES.items() <= os.environ.items()
MODES = {"torch": nullcontext, "roundoff": roundoff.invariant}
MODES |= {OPS: ops.set_batch_invariant_mode} if ops else {}
if not SPLITS:
    MODES = {"two variables": nullcontext}
trained = cache(lambda: load_trained(layers=2 if quick else None))
model = cache(lambda: trained().model(torch.bfloat16, device=device))


def asked_of(rows):
    """These prompts, as tokens."""
    return [trained().prompt(prompts(PROMPTS)[row][1]) for row in rows]


def written(way, batches):
    """Prompt and text of each request."""
    longest, made = max(map(len, asked_of(range(PROMPTS)))), []
    for rows, longer in batches:
        given = asked_of(rows)
        with MODES[way]():
            text = decode(
                model(),
                given,
                TOKENS,
                length=longer + max(map(len, given)),
                room=gpu * (32 + longest + TOKENS),
            ).tokens
        made += zip(rows, map(tuple, text.tolist()), strict=True)
    return made


@study.table()
def texts(args):
    """Completions in bfloat16 that are not what the prompt gets alone, with a static cache."""
    for way in MODES:
        requests = COMPLETIONS if way in ("torch", "roundoff") else 200
        batches = server_batches(requests, prompts=PROMPTS, most=MOST, multiple=8 if gpu else 1)
        expected = dict(written(way, [([row], 0) for row in range(PROMPTS)]))
        made = written(way, batches)
        yield {
            "way": way,
            "served": "server",
            "completions": len(made),
            "different": len(set(made)),
            "of": len({row for row, _ in made}),
            "other texts": sum(text != expected[row] for row, text in made) / len(made),
            "checksum": int(digest(torch.tensor(list(expected.values())))[:5], 16),
        }
    if gpu and SPLITS:
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, __file__, "--only", "texts", "--record", folder]
            subprocess.run(words, env=os.environ | VARIABLES, check=True)  # noqa: S603 - this script
            (path,) = Path(folder).glob("*/*.json")
            yield from read_record(path).tables["texts"].to_dict("records")


# --- What it costs: products, a token, attention. ------------------------------------------------


def ratios(calls, launches=1):
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
    return over["ratio"].drop("torch").to_dict() | over.loc["roundoff", ["low", "high"]].to_dict()


@study.table(times=["roundoff", "low", "high"])
def cost(args):
    """Products: time over torch's, in interleaved rounds, each launch with another weight."""
    for kind, each in {"bfloat16": SHAPES, "float16": SHAPES[:10]}.items():
        for k, n in each:
            generator = torch.Generator(device).manual_seed(n)
            draw = partial(torch.randn, generator=generator, device=device, dtype=KINDS[kind])
            weights = [draw(n, k) for _ in range(copies(2 * n * k, device) if gpu else 1)]
            for m in TIMED:
                x, work = draw(m, k), max(m, 256) * max(1, n * k >> 25)
                calls = {
                    way: lambda i, f=f, x=x, w=weights: f(x, w[i % len(w)])
                    for way, f in PRODUCTS.items()
                }
                over = ratios(calls, max(len(weights), 60 * 256 // work) if gpu else 1)
                yield {"dtype": kind, "weight": f"{k} → {n}", "M": m} | over


@study.table("routes")
def routes_taken(args):
    """How many of the products that were timed before went which way."""
    return [{"way": way, "cases": count} for way, count in routes().items()]


# --- generate, as it is called: a model changed by roundoff.invariant, beside torch's. -----------

changed = cache(lambda: roundoff.invariant(trained().model(torch.bfloat16, device=device)))
GENERATED = ["roundoff", "low", "high"]


def text_of(model, rows, compiled):
    """A call of generate for these prompts; its tokens are lists, for which it waits."""
    ids, mask = padded(asked_of(rows), model.config.pad_token_id, device)
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": TOKENS}
    given |= {"min_new_tokens": TOKENS, "do_sample": False, "disable_compile": not compiled}
    given |= {"cache_implementation": "static"} if compiled else {}
    return lambda: model.generate(**given)[:, ids.shape[1] :].tolist()


@cache
def called_alone(model, compiled):
    """What each prompt gets alone."""
    return [text_of(model, [row], compiled)()[0] for row in range(PROMPTS)]


def called_times(batch, compiled):
    """Time of generate over torch's; share of texts that are not what the prompt gets alone."""
    rows, calls, found = [i % PROMPTS for i in range(batch)], {}, {}
    for way, its in {"torch": model(), "roundoff": changed()}.items():
        # Without it, as torch comes, while torch's model is compiled.
        torch._inductor.config.emulate_precision_casts = way == "roundoff"
        calls[way] = text_of(its, rows, compiled)
        alone = called_alone(its, compiled)
        other = sum(text != alone[row] for row, text in zip(rows, calls[way](), strict=True))
        found["other texts" if way == "roundoff" else "torch's other texts"] = other / batch
    rounds = {"warmup": 1, "min_rounds": 5 if gpu else 3, "max_rounds": 5}
    over = measure(calls, budget_s=BUDGET_S, **rounds).ratio("roundoff", "torch")
    return {"roundoff": over.value, "low": over.low, "high": over.high} | found


@study.table(times=GENERATED)
def called(args):
    """generate of SmolLM2, bfloat16, default cache: time of a changed model over torch's."""
    for batch in (1, 3, 8, 17, 64) if gpu else (1, 3):
        yield {"cache": "dynamic", "batch": batch} | called_times(batch, compiled=False)


@study.table("compiled", times=GENERATED)
def compiled_calls(args):
    """As ``called``, static cache, where transformers compiles each step into a CUDA graph."""
    for batch in (1, 8) if gpu else ():
        yield {"cache": "static", "batch": batch} | called_times(batch, compiled=True)


# Ours cuts the keys into parts of 256, which a second kernel joins where texts are few.
@study.table(times=["roundoff", "low", "high", "other bits"])
def decoding(args):
    """Attention of one token over a cache, bfloat16: time over torch's, and who changes bits."""
    for keys, batch in product((512, 2048, 8192), (1, 8, 64)) if gpu else ():
        generator = torch.Generator(device).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
        caches = [
            [draw(batch, GROUPS, keys, HEAD) for _ in "kv"]
            for _ in range(copies(4 * batch * GROUPS * keys * HEAD, device))
        ]
        q, calls, other = draw(batch, HEADS, 1, HEAD), {}, []
        one = [t[:1] for t in (q, *caches[0])]
        seen, seen_alone = (seen_by_position(b, 1, keys, q.device) for b in (batch, 1))
        for way, f, alone in (
            ("torch", sdpa, sdpa),
            ("roundoff", partial(attend, seen=seen), partial(attend, seen=seen_alone)),
        ):
            calls[way] = lambda i, f=f, q=q, of=caches: f(q, *of[i % len(of)])
            if digest(alone(*one)) != digest(calls[way](0)[:1]):
                other.append(way)
        over = ratios(calls, max(len(caches), 60))
        yield {"keys": keys, "batch": batch} | over | {"other bits": ", ".join(other) or "none"}


# --- Values: what pages may print. Name, datum and statistic, table, column; rows; a test. -------

# A small run of a few requests shows no share.
SERVER = {"served": "server", "completions": lambda s: s >= 100}
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
    # As many texts as prompts, of enough requests to mean it.
    test=lambda v: (
        v.value == 0
        and (v.rows["different"] == v.rows["of"]).all()
        and (v.rows["completions"] >= 1000).all()
    ),
)
study.value(
    "texts.completions",
    "completions of the server, torch",
    "texts",
    "completions",
    where=SERVER | {"way": "torch"},
    test=lambda v: v.value >= 1000,
)
SQUARE = {"dtype": "bfloat16", "weight": "4096 → 4096", "way": ["torch", "one tile"]}
study.value(
    "product.unsplit",
    "rows from which on torch's product 4096 → 4096 in bfloat16 has one result",
    "alone",
    lambda t: t.set_index("way")["one from"]["torch"],
    where=SQUARE,
    # From there on its bits are those of a kernel that does not split K.
    test=lambda v: v.value > 1 and v.rows["checksum"].nunique() == 1,
)
study.value(
    "product.error",
    "typical error of a product by roundoff over that of torch's, bfloat16, 4096 → 4096, 64 rows",
    "alone",
    lambda t: t.set_index("way")["rms error"].pipe(lambda of: of["roundoff"] / of["torch"]),
    where=SQUARE | {"way": ["torch", "roundoff"]},
    test=lambda v: 0.99 < v.value < 1.01,
)
for name, change, text, holds in (
    ("padding", "37 columns of padding change", "behind padding", lambda v: v.value > 0.5),
    ("neighbours", "7 more texts change", "among 8 texts", lambda v: v.value == 0),
):
    study.value(
        f"attention.{name}",
        f"share of 300 tokens whose bits {change}, torch's attention, bfloat16",
        "attention",
        "other tokens",
        where={"way": "torch", "text": text, "dtype": "bfloat16"},
        test=holds,
    )


def least(t):
    """The least ratio of a table, with its interval."""
    return t.sort_values("roundoff")[["roundoff", "low", "high"]].iloc[0].tolist()


def most(t):
    """The largest ratio of a table, with its interval."""
    return t.sort_values("roundoff")[["roundoff", "low", "high"]].iloc[-1].tolist()


AS_CALLED = {"batch": [1, 3, 8, 17, 64], "cache": "dynamic"}
for statistic in least, most:
    study.value(
        f"decoding.{statistic.__name__}",
        f"{statistic.__name__} time of roundoff's attention of one token over torch's, bfloat16, "
        "nine shapes, in a CUDA graph",
        "decoding",
        statistic,
        test=lambda v: (v.rows["low"] > 1).all(),
    )
    study.value(
        f"called.{statistic.__name__}",
        f"{statistic.__name__} time of generate over torch's, a model changed by "
        "`roundoff.invariant(model)`, SmolLM2-135M, bfloat16, batches of 1 to 64, default cache",
        "called",
        statistic,
        where=AS_CALLED,
        # A speed of texts that are what each prompt gets alone.
        test=lambda v: v.low < 1 and (v.rows["other texts"] == 0).all(),
    )
study.value(
    "compiled.most",
    "most time of generate over torch's, both compiled into CUDA graphs by transformers, a model "
    "changed by `roundoff.invariant(model)`, SmolLM2-135M, bfloat16, batches of 1 and 8",
    "compiled",
    most,
    where={"batch": [1, 8]},
    on="nvidia-h100-80gb-hbm3",
    test=lambda v: v.low < 1 < v.high < 1.1 and (v.rows["other texts"] == 0).all(),
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
study.value(
    "decoding.keys",
    "least number of keys at which torch's attention of one token has different bits in a batch of "
    "8 or 64 texts than alone, bfloat16; 512, 2048 and 8192 were tried",
    "decoding",
    lambda t: t["keys"].min(),
    where={"other bits": lambda s: s.str.contains("torch")},
    # From there on in both batches, and without 8 texts or more never.
    test=lambda v: v.rows.groupby("keys")["batch"].agg(set).map({8, 64}.__eq__).all(),
)
COST = (
    (
        "median",
        "median time of roundoff's product over torch's, 273 shapes in float16 and bfloat16, in a "
        "CUDA graph",
        lambda t: t["roundoff"].median(),
        lambda v: 0.97 < v.value < 1.03,
    ),
    (
        "most",
        "most time of roundoff's product over torch's, 273 shapes in float16 and bfloat16, in a "
        "CUDA graph",
        most,
        lambda v: v.low > 1.2,
    ),
    (
        "shapes",
        "products that were timed: shapes, each in float16 or in bfloat16",
        lambda t: t["roundoff"].count(),
        # Where it is beyond 1.15, the weight is 8192 → 1024 and there are few rows.
        lambda v: (
            v.rows[v.rows["roundoff"] > 1.15]
            .pipe(lambda t: (t["weight"] == "8192 → 1024") & (t["M"] <= 256))
            .all()
        ),
    ),
)
for name, about, statistic, holds in COST:
    study.value(
        f"product.{name}",
        about,
        "cost",
        statistic,
        where={"M": [2**i for i in range(13)]},  # as on a GPU
        test=holds,
    )

if __name__ == "__main__":
    study.main()
