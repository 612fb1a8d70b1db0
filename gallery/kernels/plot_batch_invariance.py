r"""
.. _batch-invariance:

The same bits whatever the batch
================================

A row of a product, a token of a text: what must be fixed so that the rest of a batch cannot
change it, and what does that cost?

.. answer:: nvidia-h200

   * **Draft.**

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
# each sum is its rounding, so that another order of addition shows. *torch* is
# ``torch.nn.functional.linear`` as it comes, cuBLAS on a GPU; the *two variables* take from cuBLAS
# the room that it needs to split the sum over K, and are read when a process starts, so that a
# second process runs them; *one tile* is one Triton kernel with one tile for all M, as the
# well-known remedy has it [#bio]_; *roundoff* is :func:`roundoff.kernels.matmul`.

import hashlib
import inspect
import os
import traceback
from contextlib import nullcontext
from functools import cache, partial
from itertools import groupby

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import linear, pad, scaled_dot_product_attention

import roundoff
from roundoff.compare import scaled_error
from roundoff.kernels import attention, interpreting, lessons, matmul
from roundoff.kernels.baselines import invariant_products
from roundoff.kernels.invariant_attention import attend, seen_by_position
from roundoff.kernels.invariant_cublas import routes
from roundoff.kernels.invariant_matmul import Tile
from roundoff.models import GraphStep, decode, load_trained, prompts
from roundoff.page import Study
from roundoff.script import get_parsed_args, unit_test_going
from roundoff.timing import copies, measure, torch_precision

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
ONE_TILE = Tile(swap=False, rows=128, columns=128, depth=64, warps=8, stages=3)

fast, gpu = unit_test_going(), torch.cuda.is_available() and not interpreting()
args = get_parsed_args(
    "plot_batch_invariance",
    __doc__,
    prompts=(8 if gpu else 2 if fast else 3, "prompts, up to 32"),
    tokens=(64 if gpu else 2 if fast else 8, "tokens of each text"),
    completions=(1000 if gpu else 3 if fast else 6, "requests to the server"),
    most=(64 if gpu else 2 if fast else 3, "largest batch"),
    budget=(0.2 if gpu else 0.02, "seconds for each comparison of times"),
    graph=(True, "decode with a CUDA graph, on a GPU"),
    times=(False, "measure times alone"),
)
study = Study("plot_batch_invariance", args)
device, part = ("cuda", "gpu") if gpu else ("cpu", "cpu")
times_alone = args.times or args.second
unsplit = gpu and VARIABLES.items() <= os.environ.items()  # this is the second process
BASE, OTHERS = "two variables" if unsplit else "torch", invariant_products()[0] if gpu else {}

KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KINDS |= {"TF32": torch.float32} if gpu else {}
#: K → N: of models with 7 and 70 billion parameters, and of a small one; the first is telling.
SHAPES = [(4096, 4096), (11008, 4096), (4096, 11008), (8192, 1024), (576, 1536)]
COUNTS = [1, 2, 3, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048, 4096]
TIMED = [1, 4, 16, 64, 128, 512, 1024, 4096]
if not gpu:
    SHAPES, COUNTS, TIMED = [(576, 1536), (1536, 576)], COUNTS[: 7 if fast else 10], [1, 16]


def attempt(row, run, *given):
    """The rows of one experiment; in place of what this machine cannot run, the reason."""
    try:
        found = run(*given)
    except Exception as error:  # named in the table, and the other experiments go on
        traceback.print_exc()
        found = {"note": f"failed: {type(error).__name__}: {' '.join(str(error).split())[:100]}"}
    return [row | one for one in (found if isinstance(found, list) else [found])]


def frame(rows, *columns):
    """Rows with these columns, whatever could run; nothing where nothing was asked for."""
    return pd.DataFrame(rows).reindex(columns=columns) if rows else []


def products(kind):
    """Functions of x and W, by name; torch's first."""
    ours, tiled = partial(matmul, tf32=kind == "TF32"), partial(matmul, tile=ONE_TILE)
    ways = {BASE: linear} | ({"one tile": tiled} if gpu and KINDS[kind].itemsize == 2 else {})
    if unsplit:
        return ways | {"two variables, bias": lambda x, w: linear(x, w, w.new_zeros(len(w)))}
    return ways | {"roundoff": ours} | OTHERS


def cancelling(m, n, k, dtype):
    """x and W; every sum of their products is zero but for rounding. The same on any machine."""
    generator = torch.Generator().manual_seed(k)
    a, b = (8 * torch.rand(rows, k // 2, generator=generator) - 4 for rows in (m, n))
    return [torch.cat(pair, 1).to(device, dtype) for pair in ((a, -a), (b, b))]


def digest(tensor):
    bits = tensor.contiguous().cpu().view(torch.uint8).numpy()
    return hashlib.sha256(bits.tobytes()).hexdigest()[:8]


def compare_rows(product, x, w, counts=COUNTS):
    """At which numbers of rows the first has other bits than alone; a hash of the largest."""
    alone = product(x[:1], w)
    other = [m for m in counts if not torch.equal(product(x[:m], w)[:1], alone)]
    runs = [list(run) for differs, run in groupby(counts, other.__contains__) if differs]
    text = ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    hashed = digest(product(x, w)[:64])
    return {"other M": text or "none", "other": len(other), "hash": hashed, "note": None}


def compare_all():
    rows = []
    for kind, dtype in KINDS.items():
        for k, n in SHAPES if kind == "bfloat16" else SHAPES[:2]:
            x, w = cancelling(max(COUNTS), n, k, dtype)
            for way, product in products(kind).items():
                row = {"dtype": kind, "weight": f"{k} → {n}", "way": way}
                with torch_precision(tf32=kind == "TF32"):
                    rows += attempt(row, compare_rows, product, x, w)
    return rows


def from_second(table):
    """The second process' rows of what it alone computes."""
    rows = second[table].to_dict("records") if table in second else [second] * ("note" in second)
    return [r for r in rows if "two variables" in r.setdefault("way", "two variables")]


again = partial(study.again, VARIABLES, times=times_alone)
[second] = attempt({}, again) if gpu and not unsplit else [{}]
study.table(
    "alone",
    frame(
        ([] if times_alone else compare_all()) + from_second("alone"),
        *("dtype", "weight", "way", "other M", "other", "hash", "note"),
    ),
    "At which M the first row has other bits than alone, of 15 from 1 to 4096 (10 up to 128 on a "
    "CPU); a hash of 64 rows at the largest M.",
    columns=["dtype", "weight", "way", "other M", "hash"],
    rows={"dtype": "bfloat16"},
    part=part,
)

# %%
# Splits of K change bits, tiles do not
# -------------------------------------
#
# A product's element is a sum over K. A kernel cuts the matrices into tiles, and each tile has the
# tensor core add a few products at a time, ascending in K, to what it has: a chain. A tile changes
# how many elements are computed together, not the chain. A split of K makes several chains that
# are added last; cuBLAS splits when there are too few tiles for the multiprocessors, and that
# depends on M. Here is the loop, and what it gives for a dozen tiles:

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
    x, w = (torch.randn(m, 4096, generator=generator, device=device) for m in (512, 4096))
    x, w = (t.to(getattr(torch, kind, torch.float32)) for t in (x, w))
    exact, run = x.double() @ w.double().T, partial(lessons.plain_product, x, w, splits=splits)
    tiles = TILES if (kind, splits) == SPLITS[0] else TILES[:2]  # of these one is mma's
    made = [run(tile, warps=warps, tf32=kind == "TF32") for tile, warps in tiles]
    y, by = made[0][0], [instruction for _, instruction in made]
    narrow = torch.bfloat16 if x.dtype.itemsize == 1 else x.dtype
    return {
        "mma": by.count("mma"), "wgmma": by.count("wgmma"), "hash": digest(y), "note": None,
        "results": len({digest(result) for result, _ in made}),
        "before": scaled_error(exact, y, dtype=torch.float32).rms,
        "rounded": scaled_error(exact, y.to(narrow), dtype=narrow).rms,
    }  # fmt: skip


chains = [
    row
    for kind, splits in (SPLITS if gpu and not unsplit and not times_alone else [])
    for row in attempt({"dtype": kind, "splits": splits}, by_tiles, kind, splits)
]
CHAINS = ["dtype", "splits", "mma", "wgmma", "results", "before", "rounded"]
study.table(
    "tiles",
    frame(chains, *CHAINS, "hash", "note"),
    "One product, 512 rows, 4096 → 4096: different results of several tiles, and the error before "
    "and after the final rounding.",
    columns=CHAINS,
    part=part,
)

# %%
# The chain costs nothing where cuBLAS gives it
# ---------------------------------------------
#
# Times over torch's as it comes, 60 launches of few rows replayed from a CUDA graph, in
# interleaved rounds; each launch finds another copy of the weight, together larger than the cache.
# The two variables' times come from the second process; the kernel with one tile, which both
# processes time, relates them.

WAYS = ["one tile", "two variables", "roundoff"]


def ratios(calls, launches=1):
    """Time of each call over the first's; a call is told the number of its launch."""
    found = measure(
        calls, device=device, cuda_graph=gpu, rotate=launches, budget_s=args.budget,
        precision=0.01, min_rounds=9 if gpu else 3, max_rounds=60,
    )  # fmt: skip
    over = found.ratios().set_index("label")
    row = over["ratio"].to_dict() | {"µs": found.frame["median"].iloc[0] * 1e6, "note": None}
    return row | over[["low", "high"]].reindex(["roundoff"]).iloc[0].to_dict()


def compare_times(kind, x, weights):
    tried, calls = {}, {}
    for way, product in products(kind).items():
        [tried[way]] = attempt({}, lambda product=product: {"y": product(x, weights[0])})
        calls[way] = lambda i, product=product: product(x, weights[i % len(weights)])
    launches = max(len(weights), 60 * 256 // max(len(x), 256)) if gpu else 1
    row = ratios({way: f for way, f in calls.items() if "y" in tried[way]}, launches)
    notes = [f"{way} {one['note']}" for way, one in tried.items() if "note" in one]
    return row | {"note": "; ".join(notes) or None}


def cost():
    rows = []
    for kind, shapes in {"bfloat16": SHAPES, "float16": SHAPES[:1]}.items():
        for k, n in shapes:
            generator = torch.Generator(device).manual_seed(n)
            draw = partial(torch.randn, generator=generator, device=device, dtype=KINDS[kind])
            weights = [draw(n, k) for _ in range(copies(2 * n * k, device) if gpu else 1)]
            for m in TIMED:
                row = {"dtype": kind, "weight": f"{k} → {n}", "M": m}
                rows += attempt(row, compare_times, kind, draw(m, k), weights)
    return frame(rows, "dtype", "weight", "M", "µs", *WAYS, "low", "high", *OTHERS, "note")


times = cost()
if "cost" in second:
    keys = ["dtype", "weight", "M"]
    tiled = times[keys].merge(second["cost"], "left", keys)["one tile"]
    times["two variables"] = times["one tile"] / tiled
study.table(
    "cost",
    times,
    "Time over torch's as it comes; low and high are the interval of roundoff's.",
    columns=["dtype", "weight", "M", "µs", *WAYS],
    rows={"weight": lambda s: s == s.iloc[0], "dtype": "bfloat16"},
    part=part,
    times=["µs", *WAYS, "low", "high", *OTHERS, "note"],
)

# %%

study.lines(
    "cost",
    of="cost",
    where={"weight": lambda s: s == s.iloc[0], "dtype": "bfloat16"},
    x="M",
    y=WAYS,
    logx=True,
    logy=True,
    reference=1,
    title="Time of a product, bfloat16",
    xlabel="rows M",
    ylabel="× cuBLAS as it comes",
    answer=True,
    alt="Draft.",
)

# %%
# What computed roundoff's products of all these types, weights and numbers of rows:

taken = {} if times_alone else routes()
study.table(
    "routes",
    [{"computed by": way, "cases": count} for way, count in taken.items()],
    "How many products, by type, weight and number of rows, cuBLAS computes with the chain's bits.",
    part=part,
)

# %%
# In attention the tile does matter
# ---------------------------------
#
# Attention over a cache is a sum over keys, and each tile of keys rescales what was summed before.
# :func:`roundoff.kernels.attention` counts tiles and splits from the first key that a query sees.
# Keys and values of 300 tokens (280 on a CPU), computed at once (prefill), and in other ways:
# tokens whose bits are others.

HEADS, GROUPS, HEAD, LENGTH = (32, 8, 128, 300) if gpu else (4, 2, 16, 70 if fast else 280)
sdpa = partial(scaled_dot_product_attention, enable_gqa=True)


def torch_attention(q, k, v, start=0):
    """As a decoder calls it: the last query at the last key, the first keys padding."""
    n, keys = q.shape[2], k.shape[2]
    if start == 0 and n in (1, keys):
        return sdpa(q, k, v, is_causal=n > 1)
    seen = torch.ones(n, keys, dtype=torch.bool, device=q.device).tril(keys - n)
    return sdpa(q, k, v, attn_mask=seen & (torch.arange(keys, device=q.device) >= start))


def our_attention(q, k, v, start=0):
    return attention(q, k, v, start=torch.full((len(q),), start, device=q.device))


def compare_tokens(compute, q, k, v):
    """Tokens of the first text that have other bits than when it is computed alone, at once."""

    def pieces(size):
        ends = range(size, LENGTH + size, size)
        parts = ((q[:1, :, end - size : end], k[:1, :, :end], v[:1, :, :end]) for end in ends)
        return torch.cat([compute(*part) for part in parts], 2)

    whole = compute(q[:1], k[:1], v[:1])
    padded = compute(q[:1], *(pad(t[:1], (0, 0, 37, 0)) for t in (k, v)), start=37)
    made = {"among": compute(q, k, v)[:1], "chunks": pieces(64), "token by token": pieces(1)}
    made |= {"padded": padded}
    share = {name: float((y != whole).any(3).any(1).float().mean()) for name, y in made.items()}
    return share | {"hash": digest(whole), "note": None}


def decode_times(keys, batch):
    """Time of one token for each of a batch, over torch's."""
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    sets = copies(4 * batch * GROUPS * keys * HEAD, device)
    caches = [[draw(batch, GROUPS, keys, HEAD) for _ in "kv"] for _ in range(sets)]
    q, seen = draw(batch, HEADS, 1, HEAD), seen_by_position(batch, 1, keys, torch.device(device))
    ways = {"torch": sdpa, "roundoff": partial(attend, seen=seen)}
    calls = {way: lambda i, f=f: f(q, *caches[i % sets]) for way, f in ways.items()}
    return ratios(calls, max(sets, 60))


tokens, decoding, generator = [], [], torch.Generator().manual_seed(0)
shapes = [(8, heads, LENGTH, HEAD) for heads in (HEADS, GROUPS, GROUPS)]
for kind in [] if unsplit or times_alone else ["bfloat16", "float16"]:
    qkv = [
        (torch.rand(s, generator=generator) - 0.5).mul(4).to(device, KINDS[kind]) for s in shapes
    ]
    for way, compute in {"torch": torch_attention, "roundoff": our_attention}.items():
        tokens += attempt({"dtype": kind, "way": way}, compare_tokens, compute, *qkv)
for keys in (512, 2048, 8192) if gpu and not unsplit else ():
    for batch in (1, 8, 64):
        decoding += attempt({"keys": keys, "batch": batch}, decode_times, keys, batch)
TOKENS = ["dtype", "way", "among", "chunks", "token by token", "padded", "hash"]
study.table(
    "attention",
    frame(tokens, *TOKENS, "note"),
    "Share of the tokens whose bits are others than in one prefill alone: among 8 texts, in chunks "
    "of 64, token by token, behind 37 columns of padding.",
    columns=TOKENS,
    part=part,
)
DECODING = ["keys", "batch", "µs", "roundoff", "low", "high"]
study.table(
    "decoding",
    frame(decoding, *DECODING, "note"),
    "Attention of one token a text, 32 heads in 8 groups, bfloat16: time over torch's.",
    columns=DECODING,
    part=part,
    times=["µs", "roundoff", "low", "high", "note"],
)

# %%
# A trained model writes one text a prompt
# ----------------------------------------
#
# SmolLM2-135M-Instruct [#smollm]_ in bfloat16, greedy, with a static cache, as a CUDA graph on a
# GPU. Eight prompts, each alone; then in batches of 8 to 64 in which each comes several times; then
# 1,000 requests in a seeded schedule: a batch begins when the last one is done and takes those who
# wait, padded to the longest and by up to 32 columns more. A text ends with its end token.


@cache
def trained():
    return load_trained(layers=2 if fast else None)


@cache
def model_of(way):
    """The model, with one tile for all products of one of the ways; and what it runs within."""
    model = trained().model(torch.bfloat16, device=device)
    for layer in model.modules() if way == "one tile" else ():
        if isinstance(layer, torch.nn.Linear):
            layer.forward = lambda x, layer=layer: matmul(x, layer.weight, tile=ONE_TILE)
    return model, roundoff.invariant if way == "roundoff" else nullcontext


def written(way, batches):
    """Prompt and text of each request."""
    model, within = model_of(way)
    step, made = GraphStep(model) if gpu and args.graph else None, []
    asked = [trained().prompt(text) for _, text in prompts(args.prompts)]
    for rows, longer in batches:
        given = [asked[row] for row in rows]
        length = longer + max(map(len, given))
        with within():
            text = decode(model, given, args.tokens, step=step, length=length).tokens
        made += zip(rows, map(tuple, text.tolist()), strict=True)
    return made


def schedule(seed=0):
    """Batches of a server: the prompts that wait, and columns of padding."""
    generator, rest = np.random.default_rng(seed), args.completions
    while rest:
        size = min(1 + generator.geometric(1 / args.most), args.most, rest)
        rest -= size
        yield generator.integers(args.prompts, size=size).tolist(), int(generator.integers(33))


def compare_texts(way, batches, alone):
    """Texts of the requests, beside those that the prompts get alone."""
    made = written(way, batches)
    same = [np.equal(text, alone[row]) for row, text in made]
    first = [1 + int(np.argmin(tokens)) for tokens in same if not tokens.all()]
    return {
        "completions": len(made), "texts": len(set(made)), "of": len({row for row, _ in made}),
        "changed": len(first) / len(made), "first": min(first, default=None), "note": None,
        "hash": digest(torch.tensor(list(alone.values()))),
    }  # fmt: skip


def all_texts(way):
    """Each prompt alone, then in batches of one size, then as a server has them."""
    count, rows = args.prompts, []
    alone = dict(written(way, [([row], 0) for row in range(count)]))
    sizes = [n for n in (8, 16, 32, 64) if count <= n <= args.most]
    served = {f"batch of {n}": [([i % count for i in range(n)], 0)] for n in sizes}
    for name, batches in (served | {"server": schedule()}).items():
        rows += attempt({"served": name}, compare_texts, way, batches, alone)
    return rows


def token_times(batch):
    """Time of one token for each of a batch, without earlier ones."""
    token = torch.ones(batch, 1, dtype=torch.int64, device=device)

    def call(i, way):
        model, within = model_of(way)
        with within():
            model(token, use_cache=False)

    return ratios({way: partial(call, way=way) for way in MODELS})


MODELS = [way for way in [BASE, "one tile", "roundoff"] if gpu or way != "one tile"]
texts, per_token = [], []
for way in [] if times_alone else MODELS[:1] if unsplit else MODELS:
    texts += attempt({"way": way}, all_texts, way)
for batch in [] if unsplit else (1, 8, 64) if gpu else (1,):
    per_token += attempt({"batch": batch}, token_times, batch)
TEXTS = ["way", "served", "completions", "texts", "of", "changed", "first"]
study.table(
    "texts",
    frame(texts + from_second("texts"), *TEXTS, "hash", "note"),
    "Texts of 64 tokens in bfloat16: how many different ones, of how many prompts; completions "
    "that are not what the prompt gets alone, and the first token at which one leaves it.",
    columns=TEXTS,
    part=part,
)
TOKEN = ["batch", "µs", "one tile", "roundoff", "low", "high"]
study.table(
    "token",
    frame(per_token, *TOKEN, "note"),
    "Time of one token for each text of a batch, without earlier ones, over torch's.",
    columns=TOKEN,
    part=part,
    times=[*TOKEN[1:], "note"],
)

# %%
# Your own shape
# --------------
#
# A weight, numbers of rows and a type: where a row depends on them, and what the chain costs.

K, N, ROWS, KIND = (
    (5120, 13824, [1, 7, 64, 300], "bfloat16") if gpu else (200, 300, [1, 7], "float32")
)

x, w = cancelling(max(ROWS), N, K, KINDS[KIND])
for way, product in products(KIND).items():
    print(way, attempt({}, compare_rows, product, x, w, ROWS)[0])
for m in ROWS:
    print(m, attempt({}, compare_times, KIND, x[:m], [w])[0])

# %%
# Limits, and what to read next
# -----------------------------
#
# * Draft.
#
# .. [#bio] Draft
# .. [#smollm] Draft

study.finish()
