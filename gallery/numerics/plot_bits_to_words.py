r"""
.. _bits-to-words:

Why does an LLM answer differently at temperature 0?
====================================================

DRAFT
"""

# %%
# Every switch moves the logits by about the error of the type
# -------------------------------------------------------------
#
# TEXT1

import math
from functools import partial

import pandas as pd
import torch
from scipy.stats import binomtest
from torch.nn.functional import linear
from tqdm import tqdm
from transformers import LlamaForCausalLM

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
    prompts=(2 if fast else 4, "prompts, up to 32"),
    tokens=(4 if fast else 32, "tokens of each text"),
    passages=(1 if fast else 2, "passages for the perplexity, up to 8"),
    batch=(32 if gpu else 4, "batch in which attention, padding, threads and compilers differ"),
    most=(64 if gpu else 8, "largest batch, a power of two"),
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


def errors(rows, i, logits, other):
    """Errors of a step of some prompts, and the share of logits with other bits than *other*."""
    z, t = logits.double(), exact[rows, i]
    error, log_t = z - t, t.log_softmax(-1)
    columns = {
        "error": error.square().mean(1),
        "largest": error.abs().amax(1),
        "gap": error.gather(1, top[rows, i]).diff().squeeze(1),
        "differs": logits.argmax(-1) != top[rows, i, 0],
        "KL": (log_t.exp() * (log_t - z.log_softmax(-1))).sum(1),
        "bits": (logits != other).double().mean(1),
    }
    return pd.DataFrame({name: column.tolist() for name, column in columns.items()}).assign(
        prompt=rows, token=i + 1, margin=truth.margin[rows, i], written=written[rows, i]
    )


def batches(count, shift=0):
    """Prompts that are decoded together; where there are too few, some come again."""
    starts = range(shift, len(asked) + shift, count)
    return [[(i + k) % len(asked) for k in range(count)] for i in starts]


steps, logits_of = [], {}


def follow(dtype, way, model, batch=args.batch, like=None, graph=gpu, shift=0, longer=0):
    """Run one way along float64's text; compare its logits with those, and with another way's."""
    own = logits_of.setdefault(like or (dtype, way), torch.zeros(shape, dtype=model.dtype))
    length = longer + (max(map(len, asked)) if batch > 1 else 0)
    for rows in batches(batch, shift):

        def observe(i, logits, rows=rows):
            if like is None:
                own[rows, i] = logits.cpu()
            found = errors(rows, i, logits, own[rows, i].to(device))
            steps.append(found.assign(dtype=dtype, way=way)[: len(asked)])

        given, text = [asked[row] for row in rows], truth.tokens[rows]
        step = GraphStep(model) if graph else None
        decode(model, given, args.tokens, follow=text, observe=observe, step=step, length=length)


def compiled(model, backend):
    """The MLP of each layer compiled; one compilation serves all layers."""
    for layer in model.model.layers:
        layer.mlp.compile(backend=backend)
    return model


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
        follow(dtype, "eager attention", eager, like=(dtype, usual))
        follow(dtype, "64 more columns", model, like=(dtype, usual), longer=64)
        follow(dtype, "rotated by one", model, like=(dtype, usual), shift=1)
if gpu:
    with torch_precision(tf32=True):
        follow("TF32", usual, models["float32"], like=("float32", usual))
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    follow("bfloat16", "float32 reduction", models["bfloat16"], like=("bfloat16", usual))
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
else:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    follow("float32", "one thread", models["float32"], like=("float32", usual))
    torch.set_num_threads(threads)
for backend in ("inductor", "roundoff"):
    model = compiled(trained.model(device=device), backend)
    follow("float32", f"MLPs by {backend}", model, like=("float32", usual), graph=False)
models["converted"] = in_float32(trained.model(device=device))
follow("float32", "bfloat16 weights", models["converted"], like=("float32", usual))
models["weights as read"] = as_read.model(device=device)
follow("float32", "weights as read", models["weights as read"])
models["weights in float16"] = as_read.rounded(torch.float16).model(device=device)
follow("float32", "weights in float16", models["weights in float16"])

steps = pd.concat(steps).query("written").drop(columns="written").reset_index(drop=True)
ways = []
for (dtype, way), rows in steps.groupby(["dtype", "way"], sort=False):
    eps = torch.finfo(getattr(torch, dtype, torch.float32)).eps
    changed = rows[rows["differs"]].groupby("prompt")["token"].min()
    ways.append(
        {"dtype": dtype, "way": way, "rms error": math.sqrt(rows["error"].mean()) / size / eps}
        | {"error abs": rows["largest"].max(), "bits": rows["bits"].mean()}
        | {"flips": rows["differs"].mean(), "texts": len(changed), "of": len(asked)}
        | {"first": changed.median(), "KL": rows["KL"].mean()}
    )
ways = pd.DataFrame(ways)
study.table(
    "ways",
    ways,
    "Each way along float64's texts: error of the logits, share of them with other bits than the "
    f"type's {usual}, tokens and texts that come out different.",
    columns=["dtype", "way", "rms error", "error abs", "bits", "flips", "texts"],
    rows={"way": lambda s: ~s.str.startswith("weights")},
    part=part,
)

# %%

study.dots(
    "errors",
    of="ways",
    x="rms error",
    label="way",
    where={"way": lambda s: ~s.str.startswith("weights")},
    colour="dtype",
    title="Error of the logits against float64",
    xlabel="root mean square, ε of the type × RMS of the logits",
    alt="ALT1",
)

# %%
# bfloat16 writes other texts
# ---------------------------
#
# TEXT2

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
    alt="ALT2",
)

# %%

step = GraphStep(models["bfloat16"]) if gpu else None
narrow = [decode(models["bfloat16"], [p], args.tokens, step=step).tokens[0] for p in asked]
narrow = torch.stack(narrow)
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
    rows={"token": lambda s: s.rank(method="first") <= 6},
    part=part,
)

# %%
# Predict
# -------
#
# TEXT3

predicted = []
for (dtype, way), rows in steps.groupby(["dtype", "way"], sort=False):
    odd = rows["prompt"] % 2 == 1
    gap = {half: math.sqrt(rows["gap"][odd == half].pow(2).mean()) for half in (True, False)}
    spread = torch.tensor([gap[not half] for half in odd])  # of the other half of the prompts
    chance = torch.special.ndtr(-torch.tensor(rows["margin"].to_numpy()) / spread)
    interval = binomtest(int(rows["differs"].sum()), len(rows)).proportion_ci(method="wilson")
    lasting = (1 - pd.Series(chance.numpy(), rows["prompt"])).groupby(level=0).prod()
    texts = rows[rows["differs"]]["prompt"].nunique()
    predicted.append(
        {"dtype": dtype, "way": way, "gap": math.sqrt(rows["gap"].pow(2).mean())}
        | {"predicted": float(chance.mean()), "flips": rows["differs"].mean()}
        | {"low": interval.low, "high": interval.high, "tokens": len(rows)}
        | {"texts predicted": float((1 - lasting).sum()), "texts": texts}
    )
shares = {m: float((truth.margin[written] < m).double().mean()) for m in (0.1, 0.2, 0.5, 1, 2, 4)}
study.keep("margins", [{"margin": m, "share": s} for m, s in shares.items()], part=part)
study.table(
    "predicted",
    predicted,
    "CAPTION3",
    columns=["dtype", "way", "gap", "predicted", "flips", "texts predicted", "texts"],
    rows={"gap": lambda s: s > 1e-3},
    part=part,
)

# %%
# Batch
# -----
#
# TEXT4

server = []
for batch in [2**k for k in range(1, args.most.bit_length())]:
    texts = torch.empty_like(narrow)
    for rows in batches(batch):
        given, step = [asked[row] for row in rows], GraphStep(models["bfloat16"]) if gpu else None
        decoded = decode(models["bfloat16"], given, args.tokens, follow=narrow[rows], step=step)
        texts[rows] = decoded.tokens
    other = texts != narrow
    first = other.int().argmax(1)[other.any(1)].double() + 1
    server.append({"batch": batch, "texts": int(other.any(1).sum()), "of": len(asked)})
    server[-1]["first"] = float(first.median()) if len(first) else math.nan
study.table("server", server, "CAPTION4", part=part)

# %%
# Quality
# -------
#
# TEXT5

passages = [trained.tokenizer(text, return_tensors="pt")["input_ids"] for text in PASSAGES]


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
    divergence = ways[(ways["dtype"] == dtype) & (ways["way"] == way)]["KL"].item()
    perplexity = math.exp(float(base.mean()) + mean)
    quality.append({"dtype": dtype, "way": way, "KL": divergence, "perplexity": perplexity})
    quality[-1] |= {"change": mean, "change low": mean - half, "change high": mean + half}
study.table("quality", quality, "CAPTION5", part=part)

# %%
# Cost
# ----
#
# TEXT6

token = torch.tensor([asked[0][:1]], device=device)
names = ("bfloat16", "float32", "converted")
calls = {name: partial(models[name], token, use_cache=False) for name in names}
timings = measure(calls, budget_s=1 if fast else 3, device=device, cuda_graph=gpu)
sizes = [sum(p.nbytes for p in models[name].parameters()) / 2**20 for name in names]
costs = timings.ratios("bfloat16").rename(columns={"label": "computed", "ratio": "× bfloat16"})
costs = costs.assign(MiB=sizes)
study.table("costs", costs, "CAPTION6", part=part, times=["× bfloat16", "low", "high"])

# %%
# Real
# ----
#
# TEXT7


def products(model):
    """The input of every product of one prompt, and the stream between layers."""
    found = {}
    hooks = [
        layer.register_forward_hook(lambda m, x, y, name=name: found.update({name: (x[0], m)}))
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    with torch.no_grad():
        stream = model(torch.tensor([asked[0]], device=device), output_hidden_states=True)
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
        z, total = linear(x.double(), w.double()), linear(x.double().abs(), w.double().abs())
        limit = tolerance("bfloat16", x.shape[1], accumulate="float32")
        kinds.append(
            {"weights": weights, "what": name.split(".")[-1], "largest": float(x.abs().max())}
            | {"condition": float((total / z.abs()).nanmedian())}
            | {"used": 2 * tolerance_used(linear(x, w), z, total, limit)}
        )
kinds = pd.DataFrame(kinds).groupby(["weights", "what"], sort=False)
kinds = kinds.agg({"condition": "median", "largest": "max", "used": "max"}).reset_index()
study.table("products", kinds, "CAPTION7", part=part, rows={"weights": "trained"})
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
    alt="ALT7",
)

# %%
# Your own model
# --------------
#
# TEXT8

MODEL, PROMPTS, DTYPE = SMOLLM2, ["Why is the sky blue?"], torch.bfloat16

own = trained if trained.name == MODEL else load_trained(MODEL)
right, got = [], []
mine = [own.prompt(text) for text in PROMPTS]
text = decode(Float64Llama(own), mine, args.tokens, observe=lambda i, z: right.append(z))
options = {"follow": text.tokens, "observe": lambda i, z: got.append(z.double())}
other = decode(own.model(DTYPE), mine, args.tokens, **options)
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
# TEXT9

study.finish()
