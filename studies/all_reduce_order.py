"""The study behind "Why does training on 4 workers give a different loss?".

The orders in which gloo and NCCL add, found from the bits of their sums; what they explain of other
data; what buckets, ranks and the order of the data do to gradients and weights; the ways to equal
bits and their times.

The page tells the story with small experiments. This file measures the full grid, writes the
record, and defines each number that the page may print.

    python studies/all_reduce_order.py --record
"""

import copy
import functools
import time
from itertools import product

import numpy as np
import torch
import torch.distributed as dist

from roundoff.compare import scaled_error
from roundoff.errors import ArgumentError, WorkerError
from roundoff.page.measurement import Study
from roundoff.reductions import (
    add_in_order,
    order_probes,
    orders_found,
    ring_sum,
    round_to,
)
from roundoff.script import unit_test_going
from roundoff.workers import Workers

fast = unit_test_going()
study = Study(
    "plot_all_reduce_order",
    "Sums over ranks: the order found from their bits, training, and equal bits with their times.",
    on="2-nvidia-h200",
    part="backend",
)

SEED, REPEATS, SIZES = 0, 2 if fast else 16, [1000] if fast else [1000, 2**16]
RANKS, DTYPES = [2, 3, 4, 8], ["float32", "float16", "bfloat16"]
NCCL = {
    "default": {},
    "Ring, Simple": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"},
    "Tree, Simple": {"NCCL_ALGO": "Tree", "NCCL_PROTO": "Simple"},
}
GPUS, LIMIT_S = torch.cuda.device_count(), 60  # seconds a run may take


@functools.cache
def backends():
    """Workers by the name of their backend: gloo, and NCCL where there are GPUs."""
    found = {"gloo on cpu": Workers(max(RANKS), limit_s=LIMIT_S)}
    for count, choice in product((GPUS, max(RANKS)), NCCL) if GPUS > 1 else ():
        hosts = f", hosts of {GPUS} GPUs" if count > GPUS else ""
        name = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {choice}{hosts}, on cuda"
        own = {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        found[name] = Workers(  # without sums in the switch
            min(count, max(RANKS)), "nccl", limit_s=LIMIT_S, environment=own | NCCL[choice]
        )
    return found


def run(workers, backend, function, items):
    """What rank 0 returns for an item for each rank; None where these ranks cannot run."""
    team = workers[backend]
    try:
        return team.map(function, items)[0] if len(items) <= team.count else None
    except WorkerError as error:
        team.count = 0  # said once
        print(f"{backend}, {len(items)} ranks: {error}")


# --- The order: found with probes, tried on random data. -----------------------------------------


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


@study.table()
def orders(args):
    """How much of other data the orders found in a message explain."""
    workers = backends()
    for backend, ranks, dtype, size in product(workers, RANKS, DTYPES, SIZES):
        if ranks <= GPUS and "hosts" in backend:
            continue
        shape = (size, dtype, backend.split()[-1])
        probes, parts = order_probes(ranks, dtype).astype(np.float32), draw(ranks, size, dtype)
        wide = parts.astype(np.float32)
        again = np.tile(wide[:, None], (1, REPEATS, 1))
        sums = run(
            workers, backend, all_reduced, [(column[:, None], *shape) for column in probes.T]
        )
        totals = run(workers, backend, all_reduced, [(messages, *shape) for messages in again])
        if sums is None or totals is None:
            continue
        cell = {"backend": backend, "ranks": ranks, "dtype": dtype, "size": size}
        try:
            chunks = orders_found(sums, ranks, dtype)
        except ArgumentError:  # it is no tree of additions
            yield cell | {"explained": 0.0}
            continue
        total, explained = round_to(totals[0], dtype, storage=True), []
        for rows in parts, wide:  # sums are rounded to the type, or to float32 and then to the type
            pieces = [add_in_order(rows[:, c.start : c.stop], c.tree) for c in chunks]
            explained.append(same(total, np.concatenate(pieces).astype(total.dtype)))
        found = {"explained": max(explained), "differ": 1 - same(total, ring_sum(parts))}
        yield cell | found | {"distinct": len({t.tobytes() for t in totals})}


# --- DistributedDataParallel packs gradients into buckets, an all-reduce each. -------------------

WIDTH, CAPS, CPU = 64 if fast else 512, [25, 4], "gloo on cpu"


def data_parallel(item):
    """In each rank: gradients of one batch with buckets of several sizes."""
    width, caps = item
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
    x = torch.randn(8, 4, width)[dist.get_rank()]
    gradients = []
    for cap in caps:
        copied = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap)
        for _ in range(2):  # after the first step DDP arranges its buckets again
            copied.zero_grad()
            copied(x).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in copied.parameters()]).numpy())
    return gradients


@study.table()
def buckets(args):
    """DDP's gradients against those with buckets of 25 MiB."""
    gradients = run(backends(), CPU, data_parallel, [(WIDTH, CAPS)] * 4)
    for cap, gradient in zip(CAPS, gradients, strict=True):
        differ = 1 - same(gradient, gradients[0])
        yield {"backend": CPU, "ranks": 4, "cap": cap, "differ": differ}


# --- Training: 5,313 weights, 64 samples a step, on 1 and 4 ranks. -------------------------------

STEPS, BATCH = 4 if fast else 128, 64


def by_all_reduce(parts):
    """Each rank adds its own parts, all-reduce adds the rest."""
    total = functools.reduce(torch.add, parts).clone()
    dist.all_reduce(total)
    return total


def train(item):
    """In each rank: gradient descent on its share of each batch; the weights after each step."""
    steps, order, dtype = item
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
    model, x, y = (part.to(getattr(torch, dtype)) for part in (model, x, y))
    weights, pick = list(model.parameters()), torch.Generator().manual_seed(order)

    def gradient(rows):
        loss = (model(x[rows]) - y[rows]).square().sum() / BATCH
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, weights)])

    track = []
    for _ in range(steps):
        batch = torch.randperm(len(x), generator=pick)[:BATCH]
        total = gradient(batch.chunk(dist.get_world_size())[dist.get_rank()])
        dist.all_reduce(total)
        with torch.no_grad():
            for w, step in zip(weights, total.split([w.numel() for w in weights]), strict=True):
                w -= 0.1 * step.view_as(w)
        track.append(torch.cat([w.detach().flatten() for w in weights]).double().numpy())
    return np.array(track)


CASES = [
    ("all-reduce", 1, SEED, "float32"),
    ("all-reduce", 4, SEED, "float32"),
    ("other data order", 1, SEED + 1, "float32"),
    ("float64", 1, SEED, "float64"),
]


@study.table()
def training(args):
    """How far the weights at the end are from those of 1 rank, beside training in float64.

    ``other data order`` draws other batches of the same 1024 samples: it is no order of the same
    batches.
    """
    ends = [
        run(backends(), CPU, train, [(STEPS, order, dtype)] * ranks)[-1]
        for _, ranks, order, dtype in CASES
    ]
    for (way, ranks, *_), end in zip(CASES, ends, strict=True):
        moved = scaled_error(ends[-1], end - ends[0] + ends[-1], dtype="float32").rms
        yield {"backend": CPU, "way": way, "ranks": ranks, "step": STEPS, "moved": moved}


# --- Equal bits on any number of ranks, and what they take. --------------------------------------

PARTS, LONG = 8, 2**12 if fast else 2**18


def by_all_gather(parts):
    """Every rank has all parts, and adds them one after another."""
    every = [torch.empty_like(parts) for _ in range(dist.get_world_size())]
    dist.all_gather(every, parts)
    return functools.reduce(torch.add, torch.cat(every))


def by_chunks(parts):
    """Every rank adds a chunk of all parts; all gather the chunks."""
    sent = parts.view(len(parts), dist.get_world_size(), -1).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    mine = functools.reduce(torch.add, received.flatten(0, 1))
    chunks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(chunks, mine)
    return torch.cat(chunks)


def compared(item):
    """In each rank: every way in turns; sums, and seconds of each round."""
    parts, device, rounds = item
    parts = torch.from_numpy(parts).to(device)
    ways = {
        "all-reduce": by_all_reduce,
        "all-gather": by_all_gather,
        "chunks, float32": by_chunks,
    }
    totals, times = {}, {way: [] for way in ways}
    for _, (way, add) in product(range(rounds + 1), ways.items()):
        dist.barrier()
        start = time.perf_counter()
        totals[way] = add(parts).cpu().numpy()
        times[way].append(time.perf_counter() - start)
    return totals, {way: np.array(seconds[1:]) for way, seconds in times.items()}


@study.table(times=["cost 2", "cost 4", "cost 8"])
def cures(args):
    """Eight arrays on 1, 2, 4 or 8 ranks: difference from 1 rank, error of the worst, time."""
    workers, rows, dtype = backends(), [], "float32"
    for backend in [*workers][:2]:
        parts, results = draw(PARTS, LONG, dtype), {}
        for ranks in (1, 2, 4, 8):
            rounds = 1 if fast else 41 if ranks == 2 else 7
            items = [(own, backend.split()[-1], rounds) for own in np.split(parts, ranks)]
            if result := run(workers, backend, compared, items):
                results[ranks] = result
        truth = parts.astype(np.float64).sum(axis=0)
        for way in results[1][0] if 1 in results else ():
            sums = [totals[way] for totals, _ in results.values()]
            error = max(scaled_error(truth, total, dtype=dtype).rms for total in sums)
            rows.append(
                {"way": way, "backend": backend, "dtype": dtype}
                | {"differ": max(1 - same(total, sums[0]) for total in sums), "rms error": error}
                | {
                    f"cost {n}": np.median(t[way] / t["all-reduce"])
                    for n, (_, t) in results.items()
                }
            )
    return rows


# --- Values: what pages may print. Name, datum and statistic, table, column; rows; a test. -------


GLOO = {"backend": "gloo on cpu"}
NCCL_DEFAULT = {"backend": lambda s: s.str.startswith("NCCL") & s.str.contains("default")}
LARGE = {"dtype": "float32", "size": 65536}
END = GLOO | {"step": 128}


def differs(found):
    """Whether the order in each chunk is known, and is not the order of the ranks."""
    return found.value > 0.1 and (found.rows["explained"] == 1).all()


for name, backend in ("gloo", GLOO), ("NCCL", NCCL_DEFAULT):
    study.value(
        f"{name.lower()}.4",
        f"share of 65,536 float32 elements whose sum is not the one in rank order, 4 ranks, {name}",
        "orders",
        "differ",
        where=backend | LARGE | {"ranks": 4},
        test=differs,
    )
study.value(
    "nccl.explained",
    "messages of random data whose every bit the orders found explain, NCCL, ring and tree",
    "orders",
    lambda rows: (rows["explained"] == 1).sum(),
    where={"backend": lambda s: s.str.startswith("NCCL")},
    test=lambda v: v.value == len(v.rows),
)
study.value(
    "nccl.repeats",
    "different sums of one message that is all-reduced 16 times, the most of any message, NCCL",
    "orders",
    lambda rows: rows["distinct"].max(),
    where={"backend": lambda s: s.str.startswith("NCCL")},
    test=lambda v: v.value == 1,
)
study.value(
    "buckets",
    "share of gradients that DDP's bucket_cap_mb=4 changes against 25, 4 ranks, gloo",
    "buckets",
    "differ",
    where=GLOO | {"ranks": 4, "cap": 4},
    test=lambda v: v.value > 0.1,
)
study.value(
    "data.ratio",
    "distance of the weights on other batches over the distance on 4 ranks, both from 1 rank",
    "training",
    lambda t: t.set_index("way")["moved"]["other data order"] / t[t["ranks"] == 4]["moved"],
    where=END | {"way": ["all-reduce", "other data order"], "ranks": [1, 4]},
    test=lambda v: v.value > 100_000,
)
for name, backend in ("gloo", GLOO), ("nccl", NCCL_DEFAULT):
    for way, short in ("all-gather", "gather"), ("chunks, float32", "chunks"):
        study.value(
            f"{short}.{name}",
            f"time to add eight arrays of 2¹⁸ float32 values by {way}, over that by all-reduce "
            f"(with the additions of each rank), 2 ranks, {name}",
            "cures",
            "cost 2",
            where=backend | {"dtype": "float32", "way": way},
            test=lambda v: v.value > 1.1 and (v.rows["differ"] == 0).all(),
        )
CURES = ["all-gather", "chunks, float32"]
for way, short in zip(CURES, ("gather", "chunks"), strict=True):
    study.value(
        f"{short}.gloo.8",
        f"time to add eight arrays of 2¹⁸ float32 values by {way}, over that by all-reduce (with "
        "the additions of each rank), 8 ranks, gloo",
        "cures",
        lambda t, way=way: t.set_index("way")["cost 8"][way],
        where=GLOO | {"dtype": "float32", "way": CURES},
        # "by chunks is much the cheaper one"
        test=lambda v, far=way == CURES[0]: (
            (v.rows["differ"] == 0).all()
            and (v.value > 1.1 if far else v.value < 0.7 * v.rows["cost 8"].max())
        ),
    )

if __name__ == "__main__":
    study.main()
