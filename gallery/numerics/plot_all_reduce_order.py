r"""
.. _all-reduce-order:

Why does training on 4 workers give a different loss?
=====================================================

The same data, seed and batches: on 1, 2, 4 and 8 workers the loss ends differently.

.. answer:: 2-nvidia-h200

   **Why.** The number of workers decides how a batch is cut before its gradients are added, and
   additions round. From 3 workers on, a ring all-reduce also adds each chunk of the gradients in a
   different order.

   **The cure.** Most training needs none. After 128 steps of a small network the losses agree in
   eight digits. Other batches move the weights :bound:`about 300,000 <data.ratio>` times as far as
   4 workers do. For equal bits, cut the batch into the same micro-batches on any number of workers,
   gather their gradients, and add them in one order.

   **The price.** Each worker holds the gradients of all micro-batches. Gathering eight gradients
   of 1 MiB takes :bound:`4.4 <gather.gloo.8>` times as long as all-reduce on 8 workers with gloo,
   PyTorch's library for CPUs. With NCCL on two H200s it takes at least
   :bound:`about 1.2 <gather.nccl>` times as long.

   .. code-block:: python

      # mine: a gradient for each micro-batch of this worker, one row each
      every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
      dist.all_gather(every, mine)
      total = functools.reduce(torch.add, torch.cat(every))  # always one order
"""

# %%
# Every cell runs on a laptop in seconds, with gloo. The bold numbers are from a machine with two
# H200s: gloo on its CPU, NCCL on its GPUs. Other machines are named.

import functools
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from roundoff.compare import max_diff, scaled_error, string_diff
from roundoff.errors import ArgumentError
from roundoff.reductions import add_in_order, order_probes, order_text, orders_found
from roundoff.script import unit_test_going
from roundoff.workers import Workers

# %%
# One batch, four losses
# ----------------------
#
# A small network learns a function of 16 variables. Each step takes a batch of 64 samples. On 4
# workers, each worker takes 16 of them and computes their gradient. An *all-reduce* adds the four
# gradients and gives every worker the sum. Then all workers take the same step.
#
# Here a worker is a process of this machine. ``Workers(8)`` starts up to eight of them, and
# ``workers.map`` calls a function once in each.

BATCH, STEPS = 64, 16 if unit_test_going() else 128
workers = Workers(8)


def start(dtype):
    """The network, 1024 samples and their targets: the same in every worker."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 1),
    )
    x = torch.randn(1024, 16)
    y = torch.sin(x.sum(dim=1, keepdim=True)) + 0.1 * torch.randn(1024, 1)
    return model.to(dtype), x.to(dtype), y.to(dtype)


# %%
# A worker can cut its samples into *micro-batches*, each with a gradient. First, each worker has
# one micro-batch, and all-reduce adds the gradients. Later, every worker gathers all gradients and
# adds them itself.


def by_all_reduce(mine):
    """Add the gradients of this worker, then those of all workers."""
    total = functools.reduce(torch.add, mine).clone()
    dist.all_reduce(total)
    return total


def by_gathering(mine):
    """Every worker gathers the gradients of all, and adds them one after another."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return functools.reduce(torch.add, torch.cat(every))


# %%
# This is the training, as each worker runs it.


def descend(item):
    """In each worker: gradient descent. The weights after each step."""
    gather, rows, batches, dtype = item
    model, x, y = start(dtype)
    weights, track = list(model.parameters()), []
    flat = torch.nn.utils.parameters_to_vector(weights).detach()
    torch.nn.utils.vector_to_parameters(flat, weights)  # they share memory
    for batch in batches:
        mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
        gradients = []  # one for each micro-batch
        for part in mine.split(rows):
            loss = (model(x[part]) - y[part]).square().sum() / BATCH
            each = torch.autograd.grad(loss, weights)
            gradients.append(torch.cat([g.flatten() for g in each]))
        add = by_gathering if gather else by_all_reduce
        flat -= 0.1 * add(torch.stack(gradients))
        track.append(flat.double().numpy().copy())
    return np.array(track)


# %%
# A seed draws the batches: every run has the same ones.


def draw_batches(seed):
    """The samples of each step."""
    generator = torch.Generator().manual_seed(seed)
    order = [torch.randperm(1024, generator=generator) for _ in range(STEPS)]
    return torch.stack(order)[:, :BATCH]


BATCHES = draw_batches(0)


def train(n, gather=False, rows=BATCH, batches=BATCHES, dtype=torch.float32):
    """Train on n workers. The weights after each step."""
    return workers.map(descend, [(gather, rows, batches, dtype)] * n)[0]


def loss_of(weights):
    """The loss over all samples, computed in float64."""
    model, x, y = start(torch.float64)
    flat = torch.from_numpy(weights)
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    return (model(x) - y).square().mean().item()


# %%

runs = {n: train(n) for n in (1, 2, 4, 8)}
for n, track in runs.items():
    print(f"workers: {n}  loss after {STEPS} steps: {loss_of(track[-1]):.12f}")

# %%
# The losses agree in the first eight digits, and then differ.
#
# It is not chance
# ----------------
#
# The usual explanation is the network: messages arrive in a different order each time, so each run
# adds differently. Then three runs on 4 workers would differ.

again = [train(4) for _ in range(3)]
print("different results of three runs:", len({track.tobytes() for track in again}))

# %%
# All three runs have the same weights after every step, to the last bit. NCCL, the library for
# GPUs, repeats itself too: on two H200s, sixteen all-reduces of one message gave
# :bound:`1 <nccl.repeats>` result. What changes the result is the number of workers.
#
# Two causes: the cut of the batch, and the order of all-reduce
# -------------------------------------------------------------
#
# From 1 worker to 4, two things change. The batch is cut into four parts, each with a gradient of
# its own. And all-reduce adds the four gradients. We change one thing at a time. First, one worker
# cuts its batch into four micro-batches, and adds their gradients in turn. Next, 4 workers gather
# the same four gradients, and add them in turn. Last, 4 workers all-reduce them.

steps = {
    "1 worker, 64 samples at once": runs[1],
    "1 worker, four micro-batches": train(1, rows=16),
    "4 workers, gathered": train(4, gather=True),
    "4 workers, all-reduce": runs[4],
}
for name, track in steps.items():
    print(f"{loss_of(track[-1]):.12f}  {name}")

# %%
# The second loss differs from the first: on one worker, the cut alone changes the loss. The third
# equals the second: sending the gradients changes nothing. The fourth differs from the third:
# all-reduce adds the same four gradients in :ref:`a different order <reduction-order>`. With 2
# workers the cut is the only cause, as a + b = b + a.
#
# A ring adds each chunk in a different order
# -------------------------------------------
#
# Four numbers can make the order of all-reduce visible. Worker 0 sends 10⁸, worker 1 sends −10⁸,
# and workers 2 and 3 send 1. Each worker's message is 16 copies of its number. Each exact sum is 2.


def all_reduced(x):
    """In each worker: the sum over all workers."""
    total = x.clone()
    dist.all_reduce(total)
    return total


SENT = [1e8, -1e8, 1.0, 1.0]
received = workers.map(all_reduced, [torch.full((16,), value) for value in SENT])[0]
print(received.int().tolist())

# %%
# The same four numbers have three different sums: it depends on the place in the message.
# All-reduce cut the message into four *chunks*. Near 10⁸, neighbouring float32 numbers are 8 apart,
# so a 1 that is added to 10⁸ or to −10⁸ is lost. Only a 1 that is added after both counts: a sum is
# the number of workers added after both.
#
# To find the whole order, we give ±10⁸ to each pair of workers in turn [#fprev]_. ``order_probes``
# makes the messages, and ``orders_found`` reads the sums.


def find_orders(workers, ranks, size, dtype):
    """The order of additions in each chunk of an all-reduce of this size and type."""
    sums, name = [], str(dtype).removeprefix("torch.")
    for probe in order_probes(ranks, name):
        messages = [torch.full((size,), float(value), dtype=dtype) for value in probe]
        sums.append(workers.map(all_reduced, messages)[0].float().numpy())
    return orders_found(np.array(sums), ranks, name)


chunks = find_orders(workers, 4, 16, torch.float32)
for chunk in chunks:
    elements = f"elements {chunk.start:2} to {chunk.stop - 1:2}"
    print(f"{elements}: workers {order_text(chunk.tree)}")

# %%
# Each line is a walk around one ring, 3 → 2 → 1 → 0 → 3, from a different start. The first two
# workers of a line may be swapped, as a + b = b + a: 2 + 3 + 1 + 0 is the walk 3 → 2 → 1 → 0. All
# workers are busy at once, each with a different chunk. We draw the walks with the numbers above.
# The number at an arrow is the sum after it.


def draw(ax, route):
    """A ring of workers, and the sum of one chunk on its way; where it ends."""
    places = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])
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
        color = "C0" if float(total) == exact else "C1"
        arrow = {"arrowstyle": "-|>", "color": color, "shrinkA": 24, "shrinkB": 24}
        ax.annotate("", places[there], places[here], arrowprops=arrow)
        label = words.get(float(total), f"{total:.0f}")
        middle = 0.72 * (places[here] + places[there])
        ax.text(*middle, label, color=color, ha="center", va="center")
    return total


# %%

figure, axes = plt.subplots(2, 2, figsize=(5.2, 5.2))
sums = []
for number, (ax, chunk) in enumerate(zip(axes.flat, chunks, strict=True)):
    last = int(order_text(chunk.tree)[-1])
    sums.append(draw(ax, [(last + n) % 4 for n in (3, 2, 1, 0)]))
    ax.set_title(f"chunk {number}: the sum is {sums[-1]:.0f}", size=10)
    ax.set(xlim=(-1.6, 1.6), ylim=(-1.4, 1.4))
    ax.axis("off")
figure.suptitle("Green: the sum begins here. Orange: ones are lost.", size=10)
figure.set_label(
    "Four chunks of one message in a ring of four workers. Each begins at a different "
    "worker, and an arrow has the sum so far. "
    f"They end with the sums {', '.join(f'{s:.0f}' for s in sums)}."
)
plt.show()

# %%
# Do these orders explain real data, to the bit? We add 65,536 normal numbers of each worker in the
# orders found, then worker 0, 1, 2 and 3 in turn, and compare both sums with all-reduce. A second
# pass takes multiples of 1/1024: float32 holds their sums exactly, so nothing rounds.


generator = np.random.default_rng((0, 4, 65536))  # the study's numbers
drawn = generator.standard_normal((4, 65536)).astype(np.float32)
chunks = find_orders(workers, 4, 65536, torch.float32)
for name, parts in ("as drawn", drawn), ("multiples", np.round(drawn * 1024) / 1024):
    sent = [torch.from_numpy(part) for part in parts]
    total = workers.map(all_reduced, sent)[0].numpy()
    found = [add_in_order(parts[:, c.start : c.stop], c.tree) for c in chunks]
    in_turn = add_in_order(parts, (((0, 1), 2), 3))
    missed = np.mean(total != np.concatenate(found))
    print(f"{name}: {missed:.0%} differ from the orders found,")
    print(f"    {np.mean(total != in_turn):.0%} from the order of the workers")

# %%
# The orders found explain every bit. Where nothing rounds, the order makes no difference.
#
# The study does the same with NCCL on two H200s: with its default, with its ring and with its tree.
# The orders found explain every bit of :bound:`60 <nccl.explained>` messages of random numbers.
# With the tree, all chunks of 4 workers have one order. With NCCL's default, on 4 workers,
# :bound:`32% <nccl.4>` of the sums differ from adding the workers in turn (with gloo
# :bound:`36% <gloo.4>`). The 4 workers shared two GPUs. NCCL took each pair of workers for a host.
#
# DistributedDataParallel (DDP) packs gradients into *buckets*, and makes an all-reduce of each. So
# the size of a bucket decides where a gradient lies in its message. We took eight layers of 512 ×
# 512 weights on 4 workers with gloo: ``bucket_cap_mb=4`` instead of 25 changes
# :bound:`30% <buckets>` of the gradient's elements.
#
# Other batches matter far more
# -----------------------------
#
# How far do the weights drift from those of 1 worker? For comparison we change the run of 1 worker
# in four ways: micro-batches, the samples of each batch backwards, the batches backwards, and
# batches of another seed. Training in float64 stands for the exact result. A distance is the root
# mean square (RMS) of the difference of the weights, in units of :ref:`ε <ulp>` = 2⁻²³ times their
# RMS in float64.

tracks = {f"{n} workers": runs[n] for n in (2, 4, 8)} | {
    "micro-batches": steps["1 worker, four micro-batches"],
    "samples backwards": train(1, batches=BATCHES.flip(1)),
    "batches backwards": train(1, batches=BATCHES.flip(0)),
    "other batches": train(1, batches=draw_batches(1)),
}
first, truth = runs[1][-1], train(1, dtype=torch.float64)[-1]
rows = []
for name, track in tracks.items():
    # scaled_error subtracts the truth: both distances get one unit
    found = {"from 1 worker": track[-1] - first + truth, "from float64": track[-1]}
    row = {k: scaled_error(truth, w, dtype="float32").rms for k, w in found.items()}
    row["relative change of loss"] = loss_of(track[-1]) / loss_of(first) - 1
    rows.append({"run": name} | row)
drift = pd.DataFrame(rows).set_index("run")


def short(value):
    """Two digits, without an exponent where it is large."""
    return f"{float(f'{value:.2g}'):,g}"


print("1 worker, from float64:", short(scaled_error(truth, first, dtype="float32").rms))
drift.rename_axis(None).map(short)

# %%

figure, ax = plt.subplots(figsize=(3.6, 3.5))
figure.set_gid("answer")  # the site shows it beside the answer
figure.set_label(
    "Distance of the weights from those of 1 worker, a dot for each run, on a log axis. "
    "2, 4 and 8 workers, micro-batches and samples backwards are alike. Batches "
    "backwards and other batches are far off."
)
ax.plot(drift["from 1 worker"], drift.index, "o")
for name, value in drift["from 1 worker"].items():
    ax.text(3 * value, name, short(value), va="center")
ax.set(xscale="log", xlim=(0.1, 1e8), xlabel="distance to 1 worker (ε × RMS)")
ax.invert_yaxis()
ax.set_title(f"Weights after {STEPS} steps")
plt.show()

# %%
# The figure beside the answer shows the column *from 1 worker*. Workers, micro-batches and samples
# backwards only regroup the same sums, and move the weights by less than one unit. Other batches,
# or batches backwards, move the weights more than a hundred thousand times as far. If your losses
# differ in the first digits, look for another cause first: different batches, seeds, dropout, batch
# normalization.
#
# Which number of workers is right? All end about as far from float64 as 1 worker. So none is right.
#
# Equal bits: one cut and one order
# ---------------------------------
#
# Two causes need two cures. First, each worker cuts its part into micro-batches of 8. Then 1, 2, 4
# and 8 workers have the same eight gradients. Second, all workers gather these gradients, and add
# them in turn. We try each cure alone, then both.


def results(gather, rows):
    """How many different results 1, 2, 4 and 8 workers have."""
    return len({train(n, gather, rows).tobytes() for n in (1, 2, 4, 8)})


print("gathered, one gradient a worker:", results(True, BATCH))
print("all-reduced, micro-batches of 8:", results(False, 8))
print("gathered, micro-batches of 8:", results(True, 8))

# %%
# Both cures together give one result on 1, 2, 4 and 8 workers, after every step.
#
# What does it cost? The study adds eight gradients of 1 MiB each. The baseline: each worker adds
# its gradients and all-reduces the sum. The table shows times divided by the baseline's. *By
# chunks* sends less: each worker receives one chunk of every gradient (an *all-to-all*), adds
# these, and sends the sum to all. The study, linked under *Evidence* below, has the code,
# ``by_chunks``.
#
# .. list-table::
#    :header-rows: 1
#
#    * - method
#      - gloo, 2 workers
#      - gloo, 8 workers
#      - NCCL, two H200s
#    * - gathering
#      - :bound:`3.6 <gather.gloo>`
#      - :bound:`4.4 <gather.gloo.8>`
#      - :bound:`1.2 <gather.nccl>`
#    * - by chunks
#      - :bound:`2.3 <chunks.gloo>`
#      - :bound:`1.4 <chunks.gloo.8>`
#      - :bound:`1.6 <chunks.nccl>`
#
# With gloo, *by chunks* is cheaper than gathering, by far on 8 workers. With NCCL it is dearer; we
# don't know why. NCCL's times include a copy of the sum to the host. Without the copy the ratios
# would be larger.
#
# Two more prices are not in these times. Small micro-batches use the hardware less well. And DDP
# adds gradients while the backward pass still computes. Gathering at the end gives that up.
#
# Equal bits help to find a bug: a run on 8 workers then repeats a run on 4. They don't make a
# better model.
#
# Your own gradients
# ------------------
#
# Put in a tensor for each worker, all of one shape and one floating-point type, and run this cell
# after the imports. It compares the sum of gloo's all-reduce with adding your tensors in turn.

mine = [torch.randn(100_000) for _ in range(5)]  # or torch.load(f"{n}.pt") for each n


def added(x):
    """In each worker: the sum over all workers."""
    total = x.clone()
    dist.all_reduce(total)
    return total


tensors = all(torch.is_tensor(x) for x in mine)
kinds = {f"{tuple(x.shape)} {x.dtype}" if tensors else type(x).__name__ for x in mine}
if not tensors or len(kinds) != 1 or not mine[0].is_floating_point():
    hint = "for a state_dict, torch.cat([x.flatten() for x in d.values()])"
    expected = "tensors of one shape and floating type"
    raise ArgumentError("mine", got=sorted(kinds), expected=expected, hint=hint)
sent = [x.detach().cpu().contiguous() for x in mine]
with Workers(len(sent)) as team:
    total = team.map(added, sent)[0]
in_order = functools.reduce(torch.add, sent)
differ = (total != in_order) & ~(total.isnan() & in_order.isnan())
print(f"{differ.sum()} of {differ.numel()} elements differ from adding in turn")
print("difference:", string_diff(max_diff(in_order, total)))

# %%
# Limits, and what to read next
# -----------------------------
#
# * The study ran gloo on up to 8 workers, and NCCL on two H200s only. Four or eight GPUs of one
#   host, joined by NVLink, may add in a different order. So may a switch that adds (NVLink SHARP),
#   which the study turned off.
# * The recorded orders are those of NCCL 2.28.9 and of gloo in PyTorch 2.11. No documentation
#   promises them. Gloo rounds the length of a chunk up, so a short message may have fewer chunks
#   than workers.
# * The recorded times are medians without intervals, of one run. On the two cores of an Intel Xeon
#   gathering took :bound:`1.4 <gather.gloo.8@intel-xeon-2-cores>` times the baseline on 8 workers.
#   Longer messages were not timed.
# * The network is small, its training stable and short. Longer or unstable training drifts farther.
# * Next: :ref:`reduction-order`, for what an order does to one sum, and :ref:`bits-to-words`, for
#   what different bits do to a trained model.
#
# .. [#fprev] P. Xie, Y. Gao, J. Xue, *FPRev: Revealing the Order of Floating-Point Summation*,
#    2024, `arXiv:2411.00442 <https://arxiv.org/abs/2411.00442>`_.
