r"""
.. _all-reduce-order:

Why does all-reduce give other bits on 2, 4 and 8 ranks?
========================================================

The order in which processes add, found from the bits of their sums, and what it does to training.

.. answer:: 2-nvidia-h200

   * **Why:** the number of ranks decides which gradients are added first. From 3 ranks on, the ring
     of gloo and of NCCL also begins at another rank in each chunk of a message: on 4 ranks
     :bound:`36% <share/2>` of the elements differ from the sum in rank order with gloo,
     :bound:`32% <nccl-share>` with NCCL.
   * **No bug:** the orders found explain every bit. After 128 steps in float32 the weights of 2, 4
     and 8 ranks are up to :bound:`0.79 <moved>` ε of their RMS from those of 1, and the loss
     differs by up to :bound:`6e-8 <loss>` of itself; another order of the data changes the loss by
     :bound:`0.4% <loss/2>`.
   * **Equal bits on 1, 2, 4 and 8 ranks:** yes, if micro-batches of one size are added in one
     order. On 2 ranks gathering them takes :bound:`2.7 <price>` to :bound:`2.8 <price/2>` times
     all-reduce's time with gloo on two cores, :bound:`1.2 <nccl-price>` with NCCL; exchanging
     chunks :bound:`1.5 <price/3>` to :bound:`1.6 <price/4>` with gloo, :bound:`1.6 <nccl-price/2>`
     with NCCL.

   .. code-block:: python

      # mine: a gradient for each micro-batch of this rank, one row each
      every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
      dist.all_gather(every, mine)
      total = functools.reduce(torch.add, torch.cat(every))  # always one order
"""

# %%
# The order depends on where a value lies in the message
# ------------------------------------------------------
#
# An all-reduce adds arrays of one size, one of each process (*rank*), and gives the sum to all of
# them. Addition rounds, so that :ref:`the order <reduction-order>` shows in the bits. No
# documentation promises one, but the bits tell. One rank has a huge number M, another −M, all
# others 1 [#fprev]_: a 1 that is added to M or to −M alone is lost, and the sum counts the ranks
# that come later. The counts for all pairs of ranks are the tree of additions
# (:func:`~roundoff.reductions.orders_found`).
#
# The orders found are then tried on random data. Ranks are processes of this machine, which this
# page starts and ends (:class:`~roundoff.workers.Workers`). NCCL was recorded on two H200s: 2
# ranks, and 3, 4 and 8 ranks that share the two GPUs. To NCCL these are hosts with two GPUs each,
# between which it sends over sockets (``NCCL_HOSTID``).

import copy
import functools
import time
from itertools import product

import numpy as np
import torch
import torch.distributed as dist

from roundoff.compare import scaled_error
from roundoff.dtypes import dtype_info
from roundoff.errors import ArgumentError, WorkerError
from roundoff.page import Study
from roundoff.reductions import (
    add_in_order,
    binned,
    gloo_sum,
    order_probes,
    order_text,
    orders_found,
    ring_sum,
    round_to,
    tree_sum,
    two_level_sum,
)
from roundoff.script import get_parsed_args, unit_test_going
from roundoff.workers import Workers

fast = unit_test_going()
args = get_parsed_args("plot_all_reduce_order", __doc__, limit=(60, "seconds a run may take", 1))
study = Study("plot_all_reduce_order", args)

SEED, REPEATS, SIZES = 0, 2 if fast else 16, [1000] if fast else [1000, 2**16]
RANKS, DTYPES = [2, 3, 4, 8], ["float32", "float16", "bfloat16"]

# The import is DistributedDataParallel's, when it is first used.
backends = {"gloo on cpu": Workers(max(RANKS), limit_s=args.limit, imports=["torch._dynamo"])}
GPUS = torch.cuda.device_count()
NCCL = {
    "default": {},
    "Ring, Simple": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"},
    "Tree, Simple": {"NCCL_ALGO": "Tree", "NCCL_PROTO": "Simple"},
}
for count, choice in product((GPUS, max(RANKS)), NCCL) if GPUS > 1 else ():
    hosts = f", hosts of {GPUS} GPUs" if count > GPUS else ""
    name = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {choice}{hosts}, on cuda"
    own = {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    backends[name] = Workers(  # without sums in the switch
        min(count, max(RANKS)), "nccl", limit_s=args.limit, environment=own | NCCL[choice]
    )


def run(backend, function, items):
    """What rank 0 returns for an item for each rank; None where these ranks cannot run."""
    workers = backends[backend]
    try:
        return workers.map(function, items)[0] if len(items) <= workers.count else None
    except WorkerError as error:
        workers.count = 0  # said once
        print(f"{backend}, {len(items)} ranks: {error}")


def all_reduced(item):
    """In each rank: all-reduce its messages, one after another."""
    messages, size, dtype, device = item
    sums = []
    for message in torch.from_numpy(messages):
        x = message.expand(size).to(device, getattr(torch, dtype)).clone()
        dist.all_reduce(x)
        sums.append(x.float().cpu().numpy())
    return np.array(sums) if dist.get_rank() == 0 else None


def draw(ranks, size, dtype):
    """Random data, a row for each rank."""
    drawn = np.random.default_rng((SEED, ranks, size)).standard_normal((ranks, size))
    return round_to(drawn, dtype, storage=True)


def same(a, b):
    """Share of elements with the same bits."""
    return np.mean(a.view(f"u{a.itemsize}") == b.view(f"u{b.itemsize}"))


def evidence(backend, ranks, size, dtype):
    """The orders found in a message, and how much of other data they explain."""
    shape = (size, dtype, backend.split()[-1])
    probes, parts = order_probes(ranks, dtype).astype(np.float32), draw(ranks, size, dtype)
    again = np.tile(parts.astype(np.float32)[:, None], (1, REPEATS, 1))
    sums = run(backend, all_reduced, [(column[:, None], *shape) for column in probes.T])
    totals = run(backend, all_reduced, [(messages, *shape) for messages in again])
    if sums is None or totals is None:
        return []
    cell = {"backend": backend, "ranks": ranks, "dtype": dtype, "size": size}
    try:
        orders = orders_found(sums, ranks, dtype)
    except ArgumentError:  # it is no tree of additions
        return [cell | {"explained": 0.0}]
    total, wide = round_to(totals[0], dtype, storage=True), parts.astype(np.float32)
    explained = {}  # each sum is rounded to the type, or to float32 and at the end to the type
    for accumulator, rows in ((dtype, parts), ("float32", wide)):
        pieces = [add_in_order(rows[:, o.start : o.stop], o.tree) for o in orders]
        explained[accumulator] = same(total, np.concatenate(pieces).astype(total.dtype))
    adds_in = max((dtype, "float32"), key=explained.get)
    return [
        cell
        | {"orders": len({order_text(o.tree) for o in orders}), "adds in": adds_in}
        | {"first order": order_text(orders[0].tree), "last order": order_text(orders[-1].tree)}
        | {"explained": explained[adds_in], "as simulated": same(total, gloo_sum(parts))}
        | {
            "differ": 1 - same(total, ring_sum(parts)),
            "distinct": len({t.tobytes() for t in totals}),
        }
        | {"rms error": scaled_error(wide.sum(axis=0, dtype=float), totals[0], dtype=dtype).rms}
    ]


cells = [
    cell
    for backend, ranks, dtype, size in product(backends, RANKS, DTYPES, SIZES)
    if ranks > GPUS or "hosts" not in backend
    for cell in evidence(backend, ranks, size, dtype)
]
study.table(
    "orders",
    cells,
    "The order in the first and in the last chunk of 1000 float32 values, and what it explains.",
    columns=["ranks", "orders", "explained", "differ", "backend", "first order", "last order"],
    rows={
        "dtype": "float32",
        "size": 1000,
        "ranks": [2, 4, 8],
        "backend": lambda s: ~s.str.contains("Ring"),
    },
    part="backend",
)

# %%

study.claim(
    "The orders found explain every bit of gloo's sums of random data, on 2, 3, 4 and 8 ranks, in "
    "three types. So does gloo's ring, simulated.",
    of="orders",
    where={"backend": "gloo on cpu", "ranks": [2, 3, 4, 8]},
    test=lambda t: (t["explained"] == 1) & (t["as simulated"] == 1),
)

# %%

study.claim(
    "They explain every bit of NCCL 2.28.9's sums, too, in all {60} cells: as it comes, with its "
    "ring and with its tree, three types, two sizes. As it comes it adds as its ring does.",
    name="nccl",
    of="orders",
    where={"backend": lambda s: s.str.startswith("NCCL")},
    on="2-nvidia-h200",
    value=lambda t: (t["explained"] == 1).sum(),
    test=lambda t: (
        (t["explained"] == 1)
        & (
            t[~t["backend"].str.contains("Tree")]
            .groupby(["ranks", "dtype", "size"])["differ"]
            .transform("nunique")
            .max()
            == 1
        )
    ),
)

# %%

study.claim(
    "Of 65,536 float32 values {32%} differ from the sum in rank order with NCCL's ring on 4 ranks, "
    "{52%} on 8; with its tree {30%} and {54%}.",
    name="nccl-share",
    of="orders",
    where={
        "backend": lambda s: s.str.contains("default, hosts|Tree"),
        "dtype": "float32",
        "size": 65536,
        "ranks": [4, 8],
    },
    on="2-nvidia-h200",
    value=lambda t: t.sort_values(
        "backend", ascending=False, key=lambda s: s.str.contains("default")
    )["differ"].tolist(),
)

# %%

study.claim(
    "Of 65,536 float32 values {0%} differ from the sum in rank order on 2 ranks, {36%} on 4 and "
    "{58%} on 8.",
    name="share",
    of="orders",
    where={"backend": "gloo on cpu", "dtype": "float32", "size": 65536},
    on="2-nvidia-h200",
    value=lambda t: t.set_index("ranks")["differ"][[2, 4, 8]].tolist(),
)

# %%

study.claim(
    "Every addition is rounded to the type of the message, float16 and bfloat16 too, with gloo and "
    "with NCCL. 16 all-reduces of the same data give the same bits.",
    of="orders",
    where={"dtype": ["float16", "bfloat16"], "ranks": [3, 4, 8]},
    test=lambda t: (t["adds in"] == t["dtype"]) & (t["distinct"] == 1),
)

# %%
# So it depends on DDP's buckets, too
# -----------------------------------
#
# DistributedDataParallel packs gradients into buckets, an all-reduce each, 25 MiB by default (the
# first one 1 MiB). Where a gradient lies in its bucket decides in which order it is added. Eight
# layers of 512 × 512, 8 MiB of gradients, one batch:

WIDTH, CAPS = 64 if fast else 512, [25, 4, 1]


def data_parallel(item):
    """In each rank: gradients of one batch with buckets of several sizes, and the exact mean."""
    width, caps, device = item
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8))).to(device)
    x = torch.randn(8, 4, width)[dist.get_rank()].to(device)
    gradients = []
    for cap in caps:
        copied = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap)
        for _ in range(2):  # after the first step DDP arranges its buckets again
            copied.zero_grad()
            copied(x).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in copied.parameters()]).cpu().numpy())
    model(x).square().mean().backward()
    exact = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    dist.all_reduce(exact)
    return gradients, exact.cpu().numpy() / dist.get_world_size()


buckets = []
for backend, ranks in product([*backends][:2], (2, 4)):
    if results := run(backend, data_parallel, [(WIDTH, CAPS, backend.split()[-1])] * ranks):
        for cap, gradient in zip(CAPS, results[0], strict=True):
            buckets.append(
                {"backend": backend, "ranks": ranks, "cap": cap}
                | {"differ": 1 - same(gradient, results[0][0])}
                | {"rms error": scaled_error(results[1], gradient, dtype="float32").rms}
            )
study.table(
    "buckets",
    buckets,
    "DDP's gradients against those with buckets of 25 MiB: elements that differ; error against the "
    "mean in float64.",
    columns=["ranks", "cap", "differ", "rms error"],
    rows={"backend": "gloo on cpu"},
    part="backend",
)

# %%

study.claim(
    "On 4 ranks buckets of 4 MiB change {30%} of the gradients, and of 1 MiB {30%}; the error is "
    "{0.32} to {0.33} ε with each. On 2 ranks nothing changes.",
    of="buckets",
    where={"backend": "gloo on cpu", "ranks": [2, 4]},
    on="2-nvidia-h200",
    value=lambda t: (
        t["differ"][(t["ranks"] == 4) & (t["cap"] == 4)],
        t["differ"][(t["ranks"] == 4) & (t["cap"] == 1)],
        t["rms error"][t["ranks"] == 4].min(),
        t["rms error"][t["ranks"] == 4].max(),
    ),
    test=lambda t: t["differ"][t["ranks"] == 2] == 0,
)

# %%
# In training the ranks matter far less than the order of the data
# ----------------------------------------------------------------
#
# A network of 5,313 weights learns a function of 16 variables by gradient descent, 64 samples a
# step. The samples and their order are the same on 1, 2, 4 and 8 ranks; each rank takes its part of
# the 64. So the order changes twice: within a rank, where fewer samples are added, and between
# ranks. That is why 2 ranks differ from 1, although an all-reduce of two has one order.

STEPS, BATCH, MICRO = 4 if fast else 128, 64, 8


def by_all_reduce(parts):
    """Each rank adds its own parts, all-reduce adds the rest."""
    total = functools.reduce(torch.add, parts).clone()
    dist.all_reduce(total)
    return total


def by_all_gather(parts):
    """Every rank has all parts, and adds them one after another."""
    every = [torch.empty_like(parts) for _ in range(dist.get_world_size())]
    dist.all_gather(every, parts)
    return functools.reduce(torch.add, torch.cat(every))


def train(item):
    """In each rank: gradient descent on its share of each batch; the weights after each step."""
    steps, way, order, dtype, device = item
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 1),
    )
    x = torch.randn(1024, 16)
    y = torch.sin(x.sum(dim=1, keepdim=True)) + 0.1 * torch.randn(1024, 1)
    model, x, y = (part.to(device, getattr(torch, dtype)) for part in (model, x, y))
    weights, pick = list(model.parameters()), torch.Generator().manual_seed(order)

    def gradient(rows):
        loss = (model(x[rows]) - y[rows]).square().sum() / BATCH
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])

    track = []
    for _ in range(steps):
        batch = torch.randperm(len(x), generator=pick)[:BATCH].to(device)
        mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
        add, count = (by_all_gather, MICRO) if way == "micro-batches" else (by_all_reduce, BATCH)
        total = add(torch.stack([gradient(rows) for rows in mine.split(count)]))
        with torch.no_grad():
            for w, step in zip(weights, total.split([w.numel() for w in weights]), strict=True):
                w -= 0.1 * step.view_as(w)
        track.append(torch.cat([w.detach().flatten() for w in weights]).double().cpu().numpy())
    return np.array(track), (model(x) - y).square().mean().item()


CASES = [
    *(("all-reduce", n, SEED, "float32") for n in (1, 2, 4, 8)),
    *(("micro-batches", n, SEED, "float32") for n in (1, 2, 4, 8)),
    ("other data order", 1, SEED + 1, "float32"),
    ("float64", 1, SEED, "float64"),
]
training = []
for backend, workers in [*backends.items()][:2]:
    tracks = {}
    for way, ranks, order, dtype in CASES:
        item = (STEPS, way, order, dtype, backend.split()[-1])
        if result := run(backend, train, [item] * ranks):
            tracks[way, ranks] = result
    for (way, ranks), (track, loss) in tracks.items() if workers.count else ():
        (base, base_loss), (truth, _) = (
            tracks[way if way == "micro-batches" else "all-reduce", 1],
            tracks["float64", 1],
        )
        differs = (track != base).any(axis=1)
        for step in [2**k for k in range(STEPS.bit_length())]:
            one, first, true = (weights[step - 1] for weights in (track, base, truth))
            training.append(
                {"backend": backend, "way": way, "ranks": ranks, "step": step}
                | {"run": f"{ranks} ranks" if way == "all-reduce" else f"{ranks}, {way}"}
                | {"first step": differs.argmax() + 1 if differs.any() else np.nan}
                | {"differ": np.mean(one != first), "loss": loss / base_loss - 1}
                | {"moved": scaled_error(true, one - first + true, dtype="float32").rms}
                | {"rms error": scaled_error(true, one, dtype="float32").rms}
            )
study.table(
    "training",
    training,
    "The weights at the end against those of 1 rank: first step that differs, weights that differ, "
    "distance; error against training in float64; change of the loss.",
    columns=["way", "ranks", "first step", "differ", "moved", "rms error", "loss"],
    rows={
        "step": lambda s: s == s.max(),
        "way": lambda s: s != "float64",
        "backend": "gloo on cpu",
    },
    part="backend",
)

# %%

study.lines(
    "training",
    of="training",
    where={
        "moved": lambda s: s > 0,
        "way": ["all-reduce", "other data order"],
        "backend": "gloo on cpu",
    },
    x="step",
    y="moved",
    series="run",
    logx=True,
    logy=True,
    title="How far the weights are from those of 1 rank",
    xlabel="steps",
    ylabel="ε × RMS",
    alt="Distance of the weights from those of one rank against steps, on logarithmic axes. 2, 4 "
    "and 8 ranks lie on one line that rises from below 0.1 to 0.8; another order of the data lies "
    "five to six orders of magnitude above it.",
)

# %%

study.claim(
    "After 128 steps the weights of 2, 4 and 8 ranks are up to {0.79} ε from those of 1 rank; with "
    "another order of the data they are about {300,000} times as far.",
    name="moved",
    of="training",
    where={"backend": "gloo on cpu", "step": 128, "way": ["all-reduce", "other data order"]},
    on="2-nvidia-h200",
    value=lambda t: (
        t["moved"][t["way"] == "all-reduce"],
        t["moved"][t["way"] != "all-reduce"].max() / t["moved"][t["way"] == "all-reduce"].max(),
    ),
)

# %%

study.claim(
    "2, 4 and 8 ranks change the loss by up to {6e-8} of itself, another order of the data by "
    "{0.4%}.",
    name="loss",
    of="training",
    where={
        "backend": "gloo on cpu",
        "step": 128,
        "way": ["all-reduce", "other data order"],
    },
    on="2-nvidia-h200",
    value=lambda t: (
        t["loss"][t["way"] == "all-reduce"].abs(),
        t["loss"][t["way"] != "all-reduce"].abs(),
    ),
)

# %%

study.claim(
    "All are about as far from the truth: after 128 steps {2.15} to {2.19} ε from training in "
    "float64.",
    of="training",
    where={"backend": "gloo on cpu", "step": 128, "way": "all-reduce", "ranks": [1, 2, 4, 8]},
    on="2-nvidia-h200",
    value=lambda t: (t["rms error"].min(), t["rms error"].max()),
)

# %%

study.claim(
    "With micro-batches of 8 samples, gathered and added in one order, 2, 4 and 8 ranks have the "
    "weights of 1 rank after every step, bit for bit.",
    of="training",
    where={"way": "micro-batches", "ranks": [1, 2, 4, 8]},
    test=lambda t: (t["moved"] == 0) & t["first step"].isna(),
)

# %%

study.dots(
    "distance",
    of="training",
    where={
        "step": 128,
        "backend": "gloo on cpu",
        "run": ["2 ranks", "4 ranks", "8 ranks", "8, micro-batches", "1, other data order"],
    },
    x="moved",
    label="run",
    log=True,
    title="Weights after 128 steps",
    xlabel="distance from 1 rank, ε × RMS",
    answer=True,
    alt="A dot for each run: distance of the weights from those of one rank after 128 steps. 2, 4 "
    "and 8 ranks are below one ε, micro-batches on 8 ranks at 0, another order of the data above "
    "100,000.",
)

# %%
# Equal bits on any number of ranks have a price
# ----------------------------------------------
#
# What is added must not depend on the number of ranks, nor must the order. Eight arrays (a gradient
# for each of eight micro-batches) lie on 1, 2, 4 or 8 ranks. **all-gather** gives every rank all
# eight, and every rank adds them: four times the bytes of an all-reduce. **chunks**: every rank
# gets its chunk of all eight, adds it in a wider type or by a :func:`binned sum
# <roundoff.reductions.binned>`, rounds once, and all gather the chunks: 2.5 times the bytes of an
# all-reduce on 2 ranks, as many on 8.

PARTS, LONG = 8, 2**12 if fast else 2**18


def by_chunks(parts, add):
    """Every rank adds a chunk of all parts and rounds once; all gather the chunks."""
    sent = parts.view(len(parts), dist.get_world_size(), -1).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    mine = add(received.flatten(0, 1)).to(parts.dtype)
    chunks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(chunks, mine)
    return torch.cat(chunks)


def reproducible(rows):
    """A sum that no order changes."""
    return torch.from_numpy(binned(rows.float().cpu().numpy().T)).to(rows.device)


def compared(item):
    """In each rank: every way in turns; sums, and seconds of each round."""
    parts, dtype, device, rounds = item
    parts = torch.from_numpy(parts).to(device, getattr(torch, dtype))
    ways = {
        "all-reduce": by_all_reduce,
        "all-gather": by_all_gather,
        "chunks, float32": lambda p: by_chunks(p, lambda r: functools.reduce(torch.add, r.float())),
        "chunks, float64": lambda p: by_chunks(
            p, lambda r: functools.reduce(torch.add, r.double())
        ),
        "chunks, binned": lambda p: by_chunks(p, reproducible),
    }
    totals, times = {}, {way: [] for way in ways}
    for _, (way, add) in product(range(rounds + 1), ways.items()):
        dist.barrier()
        start = time.perf_counter()
        totals[way] = add(parts).float().cpu().numpy()
        times[way].append(time.perf_counter() - start)
    return totals, {way: np.array(seconds[1:]) for way, seconds in times.items()}


cures = []
for backend, dtype in product([*backends][:2], ("float32", "bfloat16")):
    parts, results = draw(PARTS, LONG, dtype).astype(np.float32), {}
    for ranks in (1, 2, 4, 8):
        if result := run(
            backend,
            compared,
            [
                (own, dtype, backend.split()[-1], 1 if fast else 41 if ranks == 2 else 7)
                for own in np.split(parts, ranks)
            ],
        ):
            results[ranks] = result
    truth = parts.astype(np.float64).sum(axis=0)
    for way in results[1][0] if 1 in results else ():
        sums = [totals[way] for totals, _ in results.values()]
        cures.append(
            {"way": way, "backend": backend, "dtype": dtype}
            | {"differ": max(1 - same(total, sums[0]) for total in sums)}
            | {"rms error": max(scaled_error(truth, total, dtype=dtype).rms for total in sums)}
            | {f"cost {n}": np.median(t[way] / t["all-reduce"]) for n, (_, t) in results.items()}
        )
study.table(
    "cures",
    cures,
    "Eight arrays of 2¹⁸ float32 values on 1, 2, 4 or 8 ranks: elements that differ from those of "
    "1 rank, error of the worst, time over all-reduce's.",
    columns=["way", "differ", "rms error", "cost 2", "backend"],
    rows={"dtype": "float32"},
    part="backend",
    times=["cost 2", "cost 4", "cost 8"],
)

# %%

study.claim(
    "All-reduce differs from 1 rank in up to {58%} of the elements; all-gather, chunks in float64, "
    "chunks in float32 and the binned sum in none.",
    of="cures",
    where={
        "way": ["all-reduce", "all-gather", "chunks, float32", "chunks, float64", "chunks, binned"],
    },
    on="2-nvidia-h200",
    value=lambda t: t["differ"],
    test=lambda t: (t["differ"] > 0) == (t["way"] == "all-reduce"),
)

# %%

study.claim(
    "In bfloat16 the error falls from {0.47} ε to {0.21} ε where float32 adds and rounds once.",
    of="cures",
    where={
        "backend": "gloo on cpu",
        "dtype": "bfloat16",
        "way": ["all-reduce", "chunks, float32"],
    },
    on="2-nvidia-h200",
    value=lambda t: t["rms error"].tolist(),
)

# %%

study.claim(
    "In float32 on 2 ranks, four arrays each, all-gather takes {2.7} to {2.8} times all-reduce's "
    "time in two runs, chunks added in float32 {1.5} to {1.6} times, with gloo on two cores.",
    name="price",
    of="cures",
    where={
        "backend": "gloo on cpu",
        "dtype": "float32",
        "way": ["all-gather", "chunks, float32"],
    },
    timed=True,
    on="intel-xeon-2-cores",
    value=lambda t: (
        t[t["way"] == "all-gather"].filter(like="cost 2").min(axis=None),
        t[t["way"] == "all-gather"].filter(like="cost 2").max(axis=None),
        t[t["way"] != "all-gather"].filter(like="cost 2").min(axis=None),
        t[t["way"] != "all-gather"].filter(like="cost 2").max(axis=None),
    ),
)

# %%

study.claim(
    "With NCCL on two H200s all-gather takes {1.2} times all-reduce's time, chunks added in "
    "float32 {1.6} times.",
    name="nccl-price",
    of="cures",
    where={
        "backend": lambda s: s.str.startswith("NCCL"),
        "dtype": "float32",
        "way": ["all-gather", "chunks, float32"],
    },
    timed=True,
    on="2-nvidia-h200",
    value=lambda t: t["cost 2"].tolist(),
)

# %%
# With many ranks a ring's error grows, a tree's hardly does
# ----------------------------------------------------------
#
# Simulated, 64 elements on 8 to 65,536 ranks: one chunk of a **ring**, a **tree** of pairs
# (recursive doubling), and **two levels**, 8 ranks of a host one after another and the hosts in a
# ring or a tree. Data of both signs (*normal*) cancel; *positive* ones, their absolute values, do
# not. A part that passes through d additions is bound to be within d·u·Σ\|x\| of the exact sum, to
# first order [#higham]_.

CLUSTER = [8, 64, 512] if fast else [8, 64, 512, 4096, 2**15, 2**16]
ORDERS = {  # the sum, and its most additions for one part
    "ring": (ring_sum, lambda n: n - 1),
    "tree": (tree_sum, lambda n: np.log2(n)),
    "two levels, ring": (functools.partial(two_level_sum, of_host=8), lambda n: n // 8 + 6),
    "two levels, tree": (
        functools.partial(two_level_sum, of_host=8, tree=True),
        lambda n: 7 + np.log2(n // 8),
    ),
}
cluster = []
for data, dtype, ranks in product(("normal", "positive"), ("float32", "bfloat16"), CLUSTER):
    drawn = np.random.default_rng(SEED).standard_normal((ranks, 64))
    parts = round_to(np.abs(drawn) if data == "positive" else drawn, dtype, storage=True)
    truth, absolute = (f(parts.astype(np.float64)).sum(axis=0) for f in (np.positive, np.abs))
    base = ring_sum(parts).astype(float)
    for order, (add, depth) in ORDERS.items():
        total, info = add(parts).astype(float), dtype_info(dtype)
        cluster.append(
            {"data": data, "dtype": dtype, "ranks": ranks, "order": order}
            | {"rms error": scaled_error(truth, total, dtype=dtype).rms}
            | {"moved": scaled_error(truth, total - base + truth, dtype=dtype).rms}
            | {"bound used": np.max(np.abs(total - truth) / absolute / info.unit_roundoff)
               / depth(ranks)}
        )  # fmt: skip
study.keep("cluster", cluster, part="cpu")

# %%

study.lines(
    "cluster",
    of="cluster",
    where={"dtype": "bfloat16"},
    x="ranks",
    y="rms error",
    series="order",
    panels="data",
    logx=True,
    logy=True,
    title="Error of a bfloat16 sum over ranks, simulated",
    xlabel="ranks",
    ylabel="ε × RMS",
    alt="Error against the number of ranks on logarithmic axes, for data of both signs and for "
    "positive data. The ring's rises with the ranks, the ring over hosts' later; both trees stay "
    "near one.",
)

# %%

study.claim(
    "A float32 ring of 65,536 ranks is {39} ε off with data of both signs, a tree {0.82} ε; "
    "ring and tree are {39} ε apart, nearly all of it the ring's error.",
    of="cluster",
    where={"data": "normal", "dtype": "float32", "ranks": 65536},
    on="2-nvidia-h200",
    value=lambda t: (
        t["rms error"][t["order"] == "ring"],
        t["rms error"][t["order"] == "tree"],
        t["moved"][t["order"] == "tree"],
    ),
)

# %%

study.claim(
    "With positive data a bfloat16 ring of 65,536 ranks stagnates: its error is {125} ε, that is "
    "all but {2%} of the sum. In a tree it is {0.29} ε, in two levels with a tree {0.29} ε.",
    of="cluster",
    where={"data": "positive", "dtype": "bfloat16", "ranks": 65536},
    on="2-nvidia-h200",
    value=lambda t: (
        t["rms error"][t["order"] == "ring"],
        1 - t["rms error"][t["order"] == "ring"] * 2**-7,
        t["rms error"][t["order"] == "tree"],
        t["rms error"][t["order"] == "two levels, tree"],
    ),
)

# %%

study.claim(
    "From 512 ranks on, sums of both signs use at most {2.2%} of the bound.",
    of="cluster",
    where={"data": "normal", "ranks": lambda s: s >= 512},
    on="2-nvidia-h200",
    value=lambda t: t["bound used"],
)

# %%
# Your own: ranks, size and type
# ------------------------------
#
# Put in what you run: 2 to 8 ranks, any number of elements, one of the three types.

YOURS = {"ranks": 5, "size": 100_000, "dtype": "bfloat16"}

known = set(YOURS) == {"ranks", "size", "dtype"} and YOURS["dtype"] in DTYPES
if not known or not 2 <= YOURS["ranks"] <= max(RANKS) or YOURS["size"] < 1:
    raise ArgumentError(
        "YOURS",
        got=YOURS,
        expected=f"2 to {max(RANKS)} ranks, a size from 1, one of {', '.join(DTYPES)}",
        hint='{"ranks": 5, "size": 100_000, "dtype": "bfloat16"}',
    )
study.table(
    "yours",
    evidence("gloo on cpu", **YOURS),
    "The orders of your all-reduce.",
    columns=["ranks", "orders", "explained", "differ", "rms error", "first order", "last order"],
    part="backend",
)

# %%
study.finish()

# %%
# Limits, and what to read next
# -----------------------------
#
# * PyTorch takes gloo's ring for every message. NCCL chooses by size, ranks and links: here sockets
#   joined its hosts, and no host had more than two GPUs. Four or eight GPUs of one host, joined by
#   NVLink, are not recorded; the page runs what it finds.
# * NCCL's times are of one run, and on two GPUs alone: ranks that share a GPU take turns on it.
# * NVLink multicast (NVLS), which NCCL uses by default where the hardware has it and which adds in
#   the switch, is off in these runs.
# * The order found is that of this version of PyTorch. No version promises it to the next.
# * One small network, 128 steps of plain gradient descent. Where training is less stable, distances
#   grow faster, those of another order of the data too.
# * The processes share two cores: times are told for 2 ranks, as ratios. In bfloat16 the two runs
#   do not confirm each other.
# * The simulated clusters add in the orders named, and in no library's.
# * Next: :ref:`reduction-order`, for why an order changes a sum, and :ref:`bits-to-words`, for what
#   other bits do to a trained model.
#
# .. [#fprev] P. Xie, Y. Gao, J. Xue, *FPRev: Revealing the Order of Floating-Point Summation*,
#    2024, `arXiv:2411.00442 <https://arxiv.org/abs/2411.00442>`_. Written anew here.
# .. [#higham] N. J. Higham, *The accuracy of floating point summation*, SIAM J. Sci. Comput. 14,
#    1993, `doi:10.1137/0914050 <https://doi.org/10.1137/0914050>`_.
