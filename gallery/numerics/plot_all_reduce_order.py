r"""
.. _all-reduce-order:

Why does training on 4 workers give a different loss?
=====================================================

The same data, the same seed, the same batch: on 1, 2, 4 and 8 workers the loss ends differently.

.. answer:: 2-nvidia-h200

   **Why.** Every addition rounds, and the number of workers decides which gradients are added
   first. From 3 workers on, all-reduce also adds each chunk of a message in a different order. On
   4 workers, gloo gives :bound:`36% <gloo.4>` of random float32 elements a different sum than the
   order of the workers does. NCCL's default gives it to :bound:`32% <nccl.4>`.

   **The cure.** Most training needs none: a different order of the samples moves the weights of a
   small network :bound:`about 300,000 <data.ratio>` times as far. For equal bits, gather the
   gradients of micro-batches of one size, and add them in one order.

   **The price.** On 2 workers, gathering and adding take :bound:`1.2 <gather.nccl>` times as long
   as an all-reduce with NCCL, and :bound:`3.6 <gather.gloo>` times with gloo. Each worker holds the
   gradients of all micro-batches.

   .. code-block:: python

      # mine: a gradient for each micro-batch of this worker, one row each
      every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
      dist.all_gather(every, mine)
      total = functools.reduce(torch.add, torch.cat(every))  # always one order
"""

# %%
# Every cell runs on a laptop in seconds, with gloo, PyTorch's library for workers on a CPU. A bold
# number was recorded on two H200s, or on their host, by a study of this question. It leads to its
# evidence at the end of the page.

import functools
import time
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from roundoff.compare import scaled_error
from roundoff.errors import ArgumentError
from roundoff.reductions import add_in_order, order_probes, order_text, orders_found
from roundoff.script import unit_test_going
from roundoff.workers import Workers

# %%
# One batch, four losses
# ----------------------
#
# A small network learns a function of 16 variables. Each step takes a batch of 64 samples. On 4
# workers, each worker takes 16 of them, computes their gradient, and an *all-reduce* adds the four
# gradients: every worker gets the sum. Then all workers take the same step.
#
# A worker is a process of this machine. ``Workers(8)`` starts up to eight of them, and
# ``workers.map`` calls a function once in each.

BATCH, MICRO, STEPS = 64, 8, 16 if unit_test_going() else 128
workers = Workers(8)


def start(dtype):
    """The network, 1024 samples and their targets: the same in every worker."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))
    x = torch.randn(1024, 16)
    y = torch.sin(x.sum(dim=1, keepdim=True)) + 0.1 * torch.randn(1024, 1)
    return model.to(dtype), x.to(dtype), y.to(dtype)


# %%


def by_all_reduce(mine):
    """Add the rows of this worker, then those of all workers."""
    total = functools.reduce(torch.add, mine).clone()
    dist.all_reduce(total)
    return total


# %%


def descend(add, rows, seed, dtype):
    """Gradient descent on this worker's part of each batch. The weights after each step."""
    model, x, y = start(dtype)
    weights, generator, track = list(model.parameters()), torch.Generator().manual_seed(seed), []
    for _ in range(STEPS):
        batch = torch.randperm(len(x), generator=generator)[:BATCH]
        mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
        gradients = []  # one for each of this worker's micro-batches, of so many rows
        for part in mine.split(rows):
            loss = (model(x[part]) - y[part]).square().sum() / BATCH
            each = torch.autograd.grad(loss, weights)
            gradients.append(torch.cat([g.flatten() for g in each]))
        total = add(torch.stack(gradients))
        with torch.no_grad():
            for w, step in zip(weights, total.split([w.numel() for w in weights]), strict=True):
                w -= 0.1 * step.view_as(w)
        track.append(torch.cat([w.detach().flatten() for w in weights]).double().numpy())
    return np.array(track)


# %%


def train(item):
    """In each worker: train with an all-reduce at each step."""
    return descend(by_all_reduce, BATCH, *item)


def loss_of(weights):
    """The loss over all samples, computed in float64: float32 would round the difference away."""
    model, x, y = start(torch.float64)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(weights), model.parameters())
    return (model(x) - y).square().mean().item()


runs = {n: workers.map(train, [(0, torch.float32)] * n)[0] for n in (1, 2, 4, 8)}
for n, track in runs.items():
    print(f"workers: {n}  loss after {STEPS} steps: {loss_of(track[-1]):.12f}")

# %%
# The samples and their order are the same in each run. The losses agree in the first eight digits,
# and then differ. A loss computed in float32 has about seven, and may hide that.
#
# It is not chance
# ----------------
#
# The usual explanation is the network: messages arrive in a different order each time, so each run
# adds differently. Then three runs on 4 workers would find several results.

again = [workers.map(train, [(0, torch.float32)] * 4)[0] for _ in range(3)]
print("different results of three runs on 4 workers:", len({track.tobytes() for track in again}))

# %%
# All three have the same weights after every step, to the last bit. What changes the result is the
# number of workers, not the moment when a message arrives.
#
# A ring adds each chunk in a different order
# -------------------------------------------
#
# Two things change with the number of workers. On fewer workers each one adds more samples by
# itself, inside the matrix products of its gradient. And all-reduce adds fewer gradients. Either
# way the same numbers are added in :ref:`a different order <reduction-order>`, and each addition
# rounds. The first alone makes 2 workers differ from 1, as a + b = b + a.
#
# The order in all-reduce can be made visible. Each of 4 workers sends 16 numbers, all the same:
# worker 0 sends 10⁸, worker 1 sends −10⁸, and workers 2 and 3 send 1. Each of the 16 sums must be
# 2.


def all_reduced(x):
    """In each worker: the sum over all workers."""
    total = x.clone()
    dist.all_reduce(total)
    return total


SENT = [1e8, -1e8, 1.0, 1.0]
received = workers.map(all_reduced, [torch.full((16,), value) for value in SENT])[0]
print(received.int().tolist())

# %%
# The same four numbers have different sums, and the place in the message decides which. All-reduce
# cuts the message into four *chunks*. Near 10⁸, neighbouring float32 numbers are 8 apart, so a 1
# that is added to 10⁸ or to −10⁸ is lost. Each sum counts the ones that were added late enough.
#
# With 10⁸ and −10⁸ on each pair of workers in turn, the counts give the whole order [#fprev]_.
# ``order_probes`` makes these messages, and ``orders_found`` reads the sums. The first two workers
# of an order may be swapped, as a + b = b + a.


def find_orders(workers, ranks, size, dtype):
    """The order of additions in each chunk of an all-reduce of this size and type."""
    sums, name = [], str(dtype).removeprefix("torch.")
    for probe in order_probes(ranks, name):
        messages = [torch.full((size,), float(value), dtype=dtype) for value in probe]
        sums.append(workers.map(all_reduced, messages)[0].float().numpy())
    return orders_found(np.array(sums), ranks, name)


chunks = find_orders(workers, 4, 16, torch.float32)
for chunk in chunks:
    print(f"elements {chunk.start:2} to {chunk.stop - 1:2}: workers {order_text(chunk.tree)}")

# %%
# The workers form a ring: worker 3 sends to worker 2, 2 to 1, 1 to 0, and 0 to 3. In each chunk the
# sum begins at a different worker, travels around the ring, and takes up one number at each stop.
# So all workers are busy at once, each with a different chunk. The drawing follows the four numbers
# from above. Each arrow has the sum after the addition to which it leads.


def draw(ax, route):
    """A ring of workers, and the sum of one chunk on its way; where it ends."""
    places = [(0, 1), (1, 0), (0, -1), (-1, 0)]
    words = {1e8: "10⁸", -1e8: "−10⁸"}
    for worker, place in enumerate(places):
        color = "C2" if worker == route[0] else "C7"
        label = f"worker {worker}\n{words.get(SENT[worker], '1')}"
        box = {"boxstyle": "round", "fc": "none", "ec": color, "lw": 2}
        ax.text(*place, label, ha="center", va="center", size=8, bbox=box)
    total = np.float32(SENT[route[0]])
    for here, there in pairwise(route):
        exact = float(total) + SENT[there]
        total = total + np.float32(SENT[there])
        (x0, y0), (x1, y1) = places[here], places[there]
        color = "C0" if float(total) == exact else "C1"
        arrow = {"arrowstyle": "->", "color": color, "lw": 2, "shrinkA": 22, "shrinkB": 22}
        ax.annotate("", (x1, y1), (x0, y0), arrowprops=arrow)
        label = words.get(float(total), f"{total:.0f}")
        ax.text(0.72 * (x0 + x1), 0.72 * (y0 + y1), label, color=color, ha="center", va="center")
    return total


# %%

figure, axes = plt.subplots(2, 2, figsize=(5.2, 5.4))
figure.set_gid("answer")  # the site shows it beside the answer
sums = []
for number, (ax, chunk) in enumerate(zip(axes.flat, chunks, strict=True)):
    last = int(order_text(chunk.tree)[-1])
    sums.append(draw(ax, [(last + n) % 4 for n in (3, 2, 1, 0)]))
    ax.set_title(f"chunk {number}: the sum is {sums[-1]:.0f}", size=10)
    ax.set(xlim=(-1.6, 1.6), ylim=(-1.4, 1.4))
    ax.axis("off")
figure.suptitle("Green: it begins here. Orange: ones are lost.", size=10)
figure.set_label(
    "Four chunks of one message in a ring of four workers. Each begins at a different worker, and "
    f"an arrow has the sum so far. They end with the sums {', '.join(f'{s:.0f}' for s in sums)}."
)
plt.show()

# %%
# Does this order explain real data, to the bit? We draw 65,536 normal numbers for each worker, add
# them in the orders found, and compare with what all-reduce gives. The second line adds in the
# order of the workers. Then the cause is taken away: numbers that are multiples of 1/1024 have sums
# that float32 holds, so that no addition rounds.


def share(a, b):
    """Share of the elements that differ."""
    return f"{np.mean(a != b):.0%}"


drawn = np.random.default_rng(0).standard_normal((4, 65536)).astype(np.float32)
chunks = find_orders(workers, 4, 65536, torch.float32)
for name, parts in ("as drawn", drawn), ("multiples of 1/1024", np.round(drawn * 1024) / 1024):
    total = workers.map(all_reduced, [torch.from_numpy(part) for part in parts])[0].numpy()
    found = [add_in_order(parts[:, c.start : c.stop], c.tree) for c in chunks]
    print(f"{name}: {share(total, np.concatenate(found))} differ from the orders found,")
    print(f"    {share(total, add_in_order(parts, (((0, 1), 2), 3)))} from the workers' order")

# %%
# The orders found explain every bit. Where nothing rounds, the order makes no difference.
#
# On two H200s the study found the orders of NCCL, too. They explain every bit of
# :bound:`60 <nccl.explained>` messages of random data: on 2, 3, 4 and 8 workers, in three types,
# with NCCL's default, its ring and its tree. Only two workers had a GPU each. More of them shared
# the two GPUs, as if on several hosts.
#
# The place in the message matters in DistributedDataParallel (DDP), too. It packs gradients into
# *buckets*, an all-reduce each. On 4 workers with gloo, on the H200s' host, a bucket size of 4 MiB
# changes :bound:`30% <buckets>` of the gradients that the default of 25 MiB gives.
#
# A different order of the data matters far more
# ----------------------------------------------
#
# How far does training drift? We compare the weights with those of 1 worker. For scale we train on
# 1 worker with a different order of the samples, and on 1 worker in float64, which stands for the
# exact result. The unit is :ref:`ε <ulp>` = 2⁻²³, the step of float32 at 1, times the root mean
# square (RMS) of the exact weights.

runs["data order"] = workers.map(train, [(1, torch.float32)])[0]
truth = workers.map(train, [(0, torch.float64)])[0]
rows, first = [], runs[1]
for run, track in runs.items():
    for step in [2**k for k in range(STEPS.bit_length())]:
        right, weights, base = (t[step - 1] for t in (truth, track, first))
        found = {"from 1 worker": weights - base + right, "from float64": weights}
        errors = {name: scaled_error(right, w, dtype="float32").rms for name, w in found.items()}
        rows.append({"run": run, "step": step} | errors)
drift = pd.DataFrame(rows)
final = drift[drift["step"] == STEPS].set_index("run").drop(columns="step")
final["change of loss"] = [loss_of(track[-1]) / loss_of(first[-1]) - 1 for track in runs.values()]
final.map("{:.2g}".format)

# %%

figure, ax = plt.subplots(figsize=(5.2, 3.2))
figure.set_label(
    "Distance of the weights from those of 1 worker against the step, on logarithmic axes. Runs on "
    "2, 4 and 8 workers lie together, far below the run with a different order of the data."
)
for run, line in drift[drift["run"] != 1].groupby("run", sort=False):
    name = f"{run} workers" if run in (2, 4, 8) else "1 worker, different data order"
    ax.loglog(line["step"], line["from 1 worker"], "o-", ms=4, label=name)
ax.set_xlabel("step")
ax.set_ylabel("distance from 1 worker (ε × RMS)")
ax.set_title("Workers move the weights little")
ax.legend(fontsize=8)
plt.show()

# %%
# The runs on 2, 4 and 8 workers stay together. A different order of the samples moves the weights
# more than a hundred thousand times as far. And each number of workers is nearer to 1 worker than
# either is to the exact result: no number of workers is the right one.
#
# That is one small network, and training that is stable. And a ring of many workers rounds more
# often. The study simulates 65,536 of them: a ring's float32 sums of normal numbers have a typical
# (RMS) error of :bound:`39 <cluster.ring>` ε. A tree, which adds in pairs, has
# :bound:`0.82 <cluster.tree>` ε.
#
# Equal bits: one order, whatever the number of workers
# -----------------------------------------------------
#
# What is added must not depend on the number of workers, nor may the order. So each worker cuts its
# samples into *micro-batches* of 8, and computes a gradient for each. All workers gather all eight
# gradients, and add them one after another.


def by_gathering(mine):
    """Every worker gathers the rows of all workers, and adds them one after another."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return functools.reduce(torch.add, torch.cat(every))


def train_alike(item):
    """In each worker: train with gradients that are added in one order."""
    return descend(by_gathering, MICRO, *item)


alike = {n: workers.map(train_alike, [(0, torch.float32)] * n)[0] for n in (1, 2, 4, 8)}
for n, track in alike.items():
    print(f"workers: {n}  loss after {STEPS} steps: {loss_of(track[-1]):.12f}")
print("different results:", len({track.tobytes() for track in alike.values()}))

# %%
# One result on 1, 2, 4 and 8 workers, after every step. What does it cost? Two workers with four
# gradients each, of 2¹⁸ float32 numbers, add them in both ways, in turns.


def timed(parts):
    """In each worker: the time of gathering over that of all-reduce, round by round."""
    ratios = []
    for _ in range(21):
        taken = []
        for add in by_all_reduce, by_gathering:
            dist.barrier()
            begin = time.perf_counter()
            add(parts)
            taken.append(time.perf_counter() - begin)
        ratios.append(taken[1] / taken[0])
    return ratios[1:]  # the first round warms up


ratios = workers.map(timed, [torch.randn(4, 2**18) for _ in range(2)])[0]
low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
print(f"gathering over all-reduce: {median:.1f}, half of the rounds {low:.1f} to {high:.1f}")

# %%
# On two H200s with NCCL it took :bound:`1.2 <gather.nccl>` times as long, in the median of one run.
# On their host gloo took :bound:`3.6 <gather.gloo>` times as long. There is a second way: each
# worker collects one chunk of all eight gradients, adds it, and all gather the results. With NCCL
# it took :bound:`1.6 <chunks.nccl>` times as long as all-reduce, with gloo
# :bound:`2.3 <chunks.gloo>` times.
#
# That is not the whole price. Each worker holds eight gradients, not one. Small micro-batches use
# the hardware less well. And DDP adds while the backward pass still computes. Gathering at the end
# gives that up, and the times above do not include it.
#
# Use it to find a bug, where a run on 8 workers must repeat a run on 4. Don't use it to get a
# better model: a different order of the data changes the result far more.

# %%
# Your own gradients
# ------------------
#
# Put in a tensor for each worker, all of one shape and one floating-point type, and run this cell
# after the imports. It tells what all-reduce with gloo makes of them.

mine = [torch.randn(100_000) for _ in range(5)]  # or [torch.load(f"{n}.pt") for n in range(2)]


def added(x):
    """In each worker: the sum over all workers."""
    total = x.clone()
    dist.all_reduce(total)
    return total


sent = [x.detach().cpu().contiguous() for x in mine]
kinds = sorted({f"{tuple(x.shape)} {x.dtype}" for x in sent})
if len(kinds) != 1 or not sent[0].is_floating_point():
    raise ArgumentError("mine", got=kinds, expected="tensors of one shape and floating type")
with Workers(len(sent)) as team:
    total = team.map(added, sent)[0]
in_order = functools.reduce(torch.add, sent)
differ = (total != in_order) & ~(total.isnan() & in_order.isnan())
print(f"{differ.double().mean():.1%} of {differ.numel()} elements differ from the order of workers")
exact = functools.reduce(torch.add, [x.double() for x in sent])
print(f"largest error of all-reduce: {(total.double() - exact).abs().max():.2e}")

# %%
# Limits, and what to read next
# -----------------------------
#
# * The study has gloo on up to 8 workers, and NCCL on two H200s alone. Four or eight GPUs of one
#   host, joined by NVLink, may add in a different order. So may sums in the switch (NVLink SHARP),
#   which the study turned off.
# * The orders are those of one version of each library. No documentation promises them.
# * The recorded times with NCCL are of one run, without an interval.
# * The network is small, and its training stable. Where training is not, distances grow faster.
# * Next: :ref:`reduction-order`, for what an order does to one sum, and :ref:`bits-to-words`, for
#   what different bits do to a trained model.
#
# .. [#fprev] P. Xie, Y. Gao, J. Xue, *FPRev: Revealing the Order of Floating-Point Summation*,
#    2024, `arXiv:2411.00442 <https://arxiv.org/abs/2411.00442>`_. Written anew here.
