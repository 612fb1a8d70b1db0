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
# each sum is its rounding, so that another order of addition shows. *As it comes* is
# ``torch.nn.functional.linear``; the *two variables* forbid cuBLAS the room that it needs to split
# the sum over K, and are read when a process starts, so that a second process runs them; *one tile*
# is one Triton kernel with one tile for all M, as the well-known remedy has it [#bio]_; *roundoff*
# is :func:`roundoff.kernels.matmul`.

import hashlib
import importlib
import inspect
import os
import subprocess
import sys
import tempfile
import traceback
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import linear, pad, scaled_dot_product_attention

import roundoff
from roundoff.compare import scaled_error
from roundoff.kernels import attention, interpreting, lessons, matmul
from roundoff.kernels.invariant_attention import attend, seen_by_position
from roundoff.kernels.invariant_cublas import routes
from roundoff.kernels.invariant_matmul import Tile
from roundoff.models import GraphStep, decode, load_trained, prompts
from roundoff.page import Study
from roundoff.record import read_record
from roundoff.script import get_parsed_args, run_mode, unit_test_going
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
    graph=(True, "decode with a CUDA graph"),
    times=(False, "measure times alone"),
)
study = Study("plot_batch_invariance", args)
device, part = ("cuda", "gpu") if gpu else ("cpu", "cpu")
unsplit = gpu and VARIABLES.items() <= os.environ.items()  # this is the second process
timed_only = args.times or args.second
AS_IT_COMES = "two variables" if unsplit else "torch"

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
        found = {"note": f"failed: {type(error).__name__}: {str(error).splitlines()[0][:80]}"}
    return [row | one for one in (found if isinstance(found, list) else [found])]


def frame(rows, *columns):
    """Rows with these columns, whatever could run; nothing where nothing was asked for."""
    return pd.DataFrame(rows).reindex(columns=columns) if len(rows) else []


def products(kind):
    """Functions of x and W, by name; torch's first."""
    ways = {AS_IT_COMES: linear}
    if gpu and KINDS[kind].itemsize == 2:
        ways["one tile"] = partial(matmul, tile=ONE_TILE)
    return ways if unsplit else ways | {"roundoff": partial(matmul, tf32=kind == "TF32")} | others()


def others():
    """Others' invariant products, where they are installed."""
    found = {}
    for package, module in (
        ("batch_invariant_ops", "batch_invariant_ops"),
        ("vLLM", "vllm.model_executor.layers.batch_invariant"),
    ):
        try:
            product = importlib.import_module(module).matmul_persistent
        except (ImportError, AttributeError):
            continue
        found[package] = lambda x, w, product=product: product(x, w.t())
    return found


def cancelling(m, n, k, dtype):
    """x and W; every sum of their products is zero but for rounding. The same on any machine."""
    generator = torch.Generator().manual_seed(k)
    a, b = (8 * torch.rand(rows, k // 2, generator=generator) - 4 for rows in (m, n))
    return [torch.cat(pair, 1).to(device, dtype) for pair in ((a, -a), (b, b))]


def digest(tensor):
    bits = tensor.contiguous().cpu().view(torch.uint8).numpy()
    return hashlib.sha256(bits.tobytes()).hexdigest()[:8]


def compare_rows(product, x, w, counts=COUNTS):
    first = product(x[:1], w)
    other = [m for m in counts if not torch.equal(product(x[:m], w)[:1], first)]
    runs = [list(run) for differs, run in groupby(counts, other.__contains__) if differs]
    text = ", ".join(f"{r[0]}–{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
    hashed = digest(product(x, w)[:64])
    return {"other M": text or "none", "other": len(other), "hash": hashed, "note": None}


def alone():
    """Each type and weight, each way: at which M the first row has other bits than alone."""
    rows = []
    for kind, dtype in KINDS.items():
        for k, n in SHAPES if kind == "bfloat16" else SHAPES[:2]:
            x, w = cancelling(max(COUNTS), n, k, dtype)
            for way, product in products(kind).items():
                row = {"dtype": kind, "weight": f"{k} → {n}", "way": way}
                with torch_precision(tf32=kind == "TF32"):
                    rows += attempt(row, compare_rows, product, x, w)
    return rows


def with_variables():
    """The tables of this script, run in a process with the two variables."""
    with tempfile.TemporaryDirectory() as folder:
        names = ("prompts", "tokens", "completions", "most", "budget", "graph")
        options = [f"--{name}={getattr(args, name)}" for name in names]
        command = [sys.executable, sys.argv[0], f"--times={timed_only}", *options]
        command += ["--record", folder, "--commit", args.commit or "unknown"]
        environment = os.environ | VARIABLES
        done = subprocess.run(  # noqa: S603 - this script
            command, env=environment, capture_output=True, text=True, timeout=150
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-2000:])
        [path] = Path(folder).glob("*/*.json")
        return [read_record(path).tables]


def theirs(table):
    """The second process' rows of what it alone computes."""
    if "note" in second:
        return [{"way": "two variables"} | second]
    rows = second.get(table, pd.DataFrame({"way": []}))
    return rows[rows["way"] == "two variables"].to_dict("records")


second = {}
if gpu and not unsplit and run_mode() == "script":
    [second] = attempt({}, with_variables)
    print("second process:", second.get("note", ", ".join(second)), file=sys.stderr)
bits = [] if timed_only else alone()
bits += theirs("alone")
study.table(
    "alone",
    frame(bits, "dtype", "weight", "way", "other M", "other", "hash", "note"),
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
    ((16, 16, 64), 4), ((16, 32, 128), 4), ((32, 32, 128), 4), ((32, 64, 64), 2),
    ((64, 32, 64), 4), ((64, 64, 64), 4), ((64, 128, 64), 4), ((128, 64, 64), 4),
    ((128, 128, 32), 8), ((128, 128, 64), 8), ((128, 256, 64), 8), ((256, 64, 64), 8),
]  # fmt: skip
FEW = [TILES[2], TILES[9]]  # one of mma, one of wgmma
SPLITS = [("bfloat16", 1, TILES), ("bfloat16", 4, FEW), ("float16", 1, FEW), ("TF32", 1, FEW),
          ("float8_e4m3fn", 1, FEW)]  # fmt: skip


def by_tiles(kind, splits, tiles):
    """Results of one product by several tiles, and the error of the first."""
    generator = torch.Generator(device).manual_seed(0)
    x, w = (torch.randn(m, 4096, generator=generator, device=device) for m in (512, 4096))
    x, w = (t.to(getattr(torch, kind, torch.float32)) for t in (x, w))
    exact = x.double() @ w.double().T
    made = [
        lessons.plain_product(x, w, tile, warps=warps, splits=splits, tf32=kind == "TF32")
        for tile, warps in tiles
    ]
    y, narrow = made[0][0], torch.bfloat16 if x.dtype.itemsize == 1 else x.dtype
    by = [instruction for _, instruction in made]
    return {
        "mma": by.count("mma"), "wgmma": by.count("wgmma"),
        "results": len({digest(result) for result, _ in made}), "hash": digest(y), "note": None,
        "before": scaled_error(exact, y, dtype=torch.float32).rms,
        "rounded": scaled_error(exact, y.to(narrow), dtype=narrow).rms,
    }  # fmt: skip


SPLIT, ERRORS = ("dtype", "splits", "mma", "wgmma", "results"), ("before", "rounded")
chains = []
for kind, splits, tiles in SPLITS if gpu and not unsplit and not timed_only else []:
    chains += attempt({"dtype": kind, "splits": splits}, by_tiles, kind, splits, tiles)
study.table(
    "tiles",
    frame(chains, *SPLIT, *ERRORS, "hash", "note"),
    "One product, 512 rows, 4096 → 4096: different results of several tiles, and the error before "
    "and after the final rounding.",
    columns=[*SPLIT, *ERRORS],
    part=part,
)

# %%
# The chain costs nothing where cuBLAS gives it
# ---------------------------------------------
#
# Times over torch's as it comes, launches replayed from a CUDA graph, in interleaved rounds; each
# launch finds another copy of the weight, together larger than the cache. The two variables' times
# come from the second process; the kernel with one tile, which both processes time, relates them.

WAYS = ["one tile", "two variables", "roundoff"]


def compare_times(kind, x, weights):
    """Times over torch's of the ways that run here."""
    tried = {way: attempt({}, lambda f=f: {"call": f(x, weights[0])})[0]
             for way, f in products(kind).items()}  # fmt: skip
    calls = {way: f for way, f in products(kind).items() if "note" not in tried[way]}
    notes = [f"{way} {one['note']}" for way, one in tried.items() if "note" in one]
    time = partial(measure, device=device, min_rounds=2)
    once = time({"": partial(linear, x, weights[0])}, budget_s=0).frame["median"].iloc[0]
    launches = max(3, min(60, int(0.018 / once))) if gpu else 1

    def several(product):
        for i in range(launches):
            product(x, weights[i % len(weights)])

    found = measure(
        {way: partial(several, product) for way, product in calls.items()},
        device=device, cuda_graph=gpu, budget_s=args.budget, precision=0.01,
        min_rounds=9 if gpu else 3, max_rounds=60,
    )  # fmt: skip
    ratios = found.ratios().set_index("label")
    row = ratios["ratio"].to_dict() | {"µs": found.frame["median"].iloc[0] / launches * 1e6}
    if "roundoff" in calls:
        row |= {"low": ratios["low"]["roundoff"], "high": ratios["high"]["roundoff"]}
    return row | {"note": "; ".join(notes) or None}


def cost():
    rows = []
    for kind, shapes in {"bfloat16": SHAPES, "float16": SHAPES[:1]}.items():
        for k, n in shapes:
            sets = copies(2 * n * k, device) if gpu else 1
            generator = torch.Generator(device).manual_seed(n)
            draw = partial(torch.randn, generator=generator, device=device, dtype=KINDS[kind])
            weights = [draw(n, k) for _ in range(sets)]
            for m in TIMED:
                row = {"dtype": kind, "weight": f"{k} → {n}", "M": m}
                rows += attempt(row, compare_times, kind, draw(m, k), weights)
    return frame(rows, "dtype", "weight", "M", "µs", *WAYS, "low", "high", *others(), "note")


times = cost()
if "cost" in second:
    keys = ["dtype", "weight", "M"]
    slower = times[keys].merge(second["cost"], "left", keys)["one tile"]
    times["two variables"] = times["one tile"] / slower
study.table(
    "cost",
    times,
    "Time over torch's as it comes; low and high are the interval of roundoff's.",
    columns=["dtype", "weight", "M", "µs", *WAYS],
    rows={"weight": lambda s: s == s.iloc[0], "dtype": "bfloat16"},
    part=part,
    times=["µs", *WAYS, "low", "high", *others(), "note"],
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
# What roundoff's product took for the types, weights and numbers of rows above:

taken = routes() if not timed_only else {}
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
# Keys and values of 300 tokens, computed at once (prefill), and in other ways: tokens whose bits
# are others.

HEADS, GROUPS, HEAD = (32, 8, 128) if gpu else (4, 2, 16)
LENGTH = 300 if gpu else 70 if fast else 280


def torch_attention(q, k, v, start=0):
    """As a decoder calls it: the last query at the last key, the first keys padding."""
    n, keys = q.shape[2], k.shape[2]
    if start == 0 and n in (1, keys):
        return scaled_dot_product_attention(q, k, v, is_causal=n > 1, enable_gqa=True)
    mask = torch.ones(n, keys, dtype=torch.bool, device=q.device).tril(keys - n)
    mask[:, :start] = False
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def our_attention(q, k, v, start=0):
    return attention(q, k, v, start=torch.full((len(q),), start, device=q.device))


def compare_tokens(compute, q, k, v):
    """Tokens of the first text that have other bits than when it is computed alone, at once."""

    def pieces(size):
        ends = range(size, LENGTH + size, size)
        return torch.cat(
            [compute(q[:1, :, e - size : e], k[:1, :, :e], v[:1, :, :e]) for e in ends], 2
        )

    whole = compute(q[:1], k[:1], v[:1])
    padded = [pad(t, (0, 0, 37, 0)) for t in (k[:1], v[:1])]
    made = {"among": compute(q, k, v)[:1], "chunks": pieces(64), "token by token": pieces(1)}
    made["padded"] = compute(q[:1], *padded, start=37)
    share = {name: float((y != whole).any(3).any(1).float().mean()) for name, y in made.items()}
    return share | {"hash": digest(whole), "note": None}


def decode_times(keys, batch):
    """Time of one token for each of a batch, over torch's."""
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    nbytes = 4 * batch * GROUPS * keys * HEAD
    sets = copies(nbytes, device)
    caches = [[draw(batch, GROUPS, keys, HEAD) for _ in "kv"] for _ in range(sets)]
    q, count = draw(batch, HEADS, 1, HEAD), 60

    def several(compute):
        for i in range(count):
            compute(q, *caches[i % sets])

    torchs = partial(scaled_dot_product_attention, enable_gqa=True)
    ours = partial(attend, seen=seen_by_position(batch, 1, keys, q.device))
    found = measure(
        {"torch": partial(several, torchs), "roundoff": partial(several, ours)},
        device=device, cuda_graph=True, budget_s=args.budget, min_rounds=9,
    )  # fmt: skip
    ratio = found.ratio("roundoff", "torch")
    return {"µs": found.frame["median"].iloc[0] / count * 1e6, "roundoff": ratio.value,
            "low": ratio.low, "high": ratio.high, "note": None}  # fmt: skip


TOKENS = ["dtype", "way", "among", "chunks", "token by token", "padded", "hash"]
DECODING = ["keys", "batch", "µs", "roundoff", "low", "high"]
tokens, decoding = [], []
if not unsplit and not timed_only:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, heads, LENGTH, HEAD) for heads in (HEADS, GROUPS, GROUPS)]
    for kind in ("bfloat16", "float16"):
        qkv = [
            torch.rand(s, generator=generator).sub(0.5).mul(4).to(device, KINDS[kind])
            for s in shapes
        ]
        for way, compute in {"torch": torch_attention, "roundoff": our_attention}.items():
            tokens += attempt({"dtype": kind, "way": way}, compare_tokens, compute, *qkv)
if gpu and not unsplit:
    for keys in (512, 2048, 8192):
        for batch in (1, 8, 64):
            decoding += attempt({"keys": keys, "batch": batch}, decode_times, keys, batch)
study.table(
    "attention",
    frame(tokens, *TOKENS, "note"),
    "Share of the tokens whose bits are others than in one prefill alone: among 8 texts, in chunks "
    "of 64, token by token, behind 37 columns of padding.",
    columns=TOKENS,
    part=part,
)
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


def written(model, batches):
    """Prompt and text of each request."""
    step = GraphStep(model) if gpu and args.graph else None
    for rows, longer in batches:
        given = [asked[row] for row in rows]
        length = longer + max(map(len, given))
        text = decode(model, given, args.tokens, step=step, length=length).tokens
        yield from zip(rows, map(tuple, text.tolist()), strict=True)


def schedule(seed=0):
    """Batches of a server: the prompts that wait, and columns of padding."""
    generator, rest = np.random.default_rng(seed), args.completions
    while rest:
        size = min(1 + generator.geometric(1 / args.most), args.most, rest)
        rest -= size
        yield generator.integers(len(asked), size=size).tolist(), int(generator.integers(33))


def compare_texts(model, within, batches, single):
    """Texts of the requests, beside those that the prompts get alone."""
    with within():
        made = list(written(model, batches))
    first = [
        1 + min(i for i, pair in enumerate(zip(text, single[row], strict=True)) if len({*pair}) > 1)
        for row, text in made
        if text != single[row]
    ]
    return {
        "completions": len(made), "texts": len(set(made)), "of": len({row for row, _ in made}),
        "changed": len(first) / len(made), "first": min(first, default=None),
        "hash": digest(torch.tensor(list(single.values()))), "note": None,
    }  # fmt: skip


def all_texts(model, within):
    """Each prompt alone, then in batches of one size, then as a server has them."""
    with within():
        single = dict(written(model, [([row], 0) for row in range(len(asked))]))
    count = len(asked)
    served = {f"batch of {n}": [([i % count for i in range(n)], 0)]
              for n in (2, 8, 16, 32, 64) if count <= n <= args.most}  # fmt: skip
    rows = []
    for name, batches in (served | {"server": list(schedule())}).items():
        rows += attempt({"served": name}, compare_texts, model, within, batches, single)
    return rows


def token_times(batch):
    """Time of one token for each of a batch, without earlier ones."""
    token = torch.full((batch, 1), asked[0][0], device=device)

    def call(model, within):
        with within():
            model(token, use_cache=False)

    calls = {way: partial(call, *one) for way, one in models.items()}
    found = measure(calls, device=device, cuda_graph=gpu, budget_s=args.budget, min_rounds=5)
    ratios = found.ratios().set_index("label")
    row = ratios["ratio"].to_dict() | {"µs": found.frame["median"].iloc[0] * 1e6, "note": None}
    return row | {"low": ratios["low"]["roundoff"], "high": ratios["high"]["roundoff"]}


def load():
    """The prompts, and for each way its model and what it runs within."""
    trained = load_trained(layers=2 if fast else None)
    asked.extend(trained.prompt(text) for _, text in prompts(args.prompts))
    model = trained.model(torch.bfloat16, device=device)
    models[AS_IT_COMES] = model, nullcontext
    if gpu and not unsplit:
        tiled = trained.model(torch.bfloat16, device=device)
        for layer in tiled.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.forward = lambda x, layer=layer: matmul(x, layer.weight, tile=ONE_TILE)
        models["one tile"] = tiled, nullcontext
    if not unsplit:
        models["roundoff"] = model, roundoff.invariant
    return []


TEXTS = ["way", "served", "completions", "texts", "of", "changed", "first"]
TOKEN = ["batch", "µs", "one tile", "roundoff", "low", "high"]
asked, models, texts, per_token = [], {}, [], []
texts += attempt({"way": "all"}, load)
for way, one in {} if timed_only else models.items():
    texts += attempt({"way": way}, all_texts, *one)
texts += theirs("texts")
if models and not unsplit:
    for batch in (1, 8, 64) if gpu else (1,):
        per_token += attempt({"batch": batch}, token_times, batch)
study.table(
    "texts",
    frame(texts, *TEXTS, "hash", "note"),
    "Texts of 64 tokens in bfloat16: how many different ones, of how many prompts; completions "
    "that are not what the prompt gets alone, and the first token at which one leaves it.",
    columns=TEXTS,
    part=part,
)
study.table(
    "token",
    frame(per_token, *TOKEN, "note"),
    "Time of one token for each text of a batch, without earlier ones, over torch's.",
    columns=TOKEN,
    part=part,
    times=["µs", "one tile", "roundoff", "low", "high", "note"],
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
