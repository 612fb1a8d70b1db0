"""The study behind "Why does a model in bfloat16 write a different text?".

SmolLM2-135M-Instruct answers 32 prompts. Its weights are rounded once to bfloat16 and every way
starts from these, so that arithmetic alone differs. The truth is a greedy text with every operation
in float64. Each way runs along it, token by token with a static cache (teacher forcing): up to its
first different token that is its own greedy text. Measured are the errors of the logits, the tokens
and texts that change, what predicts them, batches, perplexity, times, and which kernels give the
same bits twice.

The page tells the story with small experiments. This file measures the full grid, writes the
record, and defines each number that the page may print.

    python studies/bits_to_words.py --record
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from functools import partial

import pandas as pd
import torch
from scipy.stats import binomtest
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from transformers import LlamaForCausalLM

from roundoff.backend import onnx_custom_backend
from roundoff.compare import tolerance, tolerance_used
from roundoff.models import PASSAGES, Float64Llama, GraphStep, decode, load_trained, prompts
from roundoff.page.measurement import Study
from roundoff.script import unit_test_going
from roundoff.timing import measure, torch_precision

fast, GPU = unit_test_going(), torch.cuda.is_available()
DEVICE, PART = ("cuda", "gpu") if GPU else ("cpu", "cpu")
study = Study(
    "plot_bits_to_words",
    "Texts of a trained model in several types and ways: errors, tokens and texts that change.",
    on="nvidia-h200",
    prompts=(2 if fast else 32, "prompts", (1, 32)),
    tokens=(4 if fast else 128 if GPU else 64, "tokens of each text", 1),
)
PASSAGES_READ = 1 if fast else 8  # for the perplexity
#: Prompts in a batch in which attention, padding, threads and compilers differ; in the largest one.
BATCH, MOST = (32, 64) if GPU else (2, 2) if fast else (4, 8)


# --- Models: one set of weights, in several types and ways. --------------------------------------


@functools.cache
def as_read():
    """The weights of the file: four bits, a scale and a minimum, as float32."""
    progress = partial(tqdm, disable=None)
    return load_trained(round_to=None, progress=progress, layers=2 if fast else None)


@functools.cache
def trained():
    """The weights that every way has, float64 too."""
    return as_read().rounded(torch.bfloat16)


@functools.cache
def float64():
    """The truth."""
    return Float64Llama(trained(), DEVICE)


def in_float32(model):
    """Weights stay in bfloat16; each is converted when its product is computed, in float32."""
    model.model.embed_tokens.bfloat16().register_forward_hook(lambda *call: call[2].float())
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.bfloat16().forward = lambda x, layer=layer: linear(x, layer.weight.float())
    return model


@functools.cache
def model_of(name):
    """A model by its type, or by what its weights are."""
    if name == "converted":
        return in_float32(trained().model(device=DEVICE))
    if name == "weights as read":
        return as_read().model(device=DEVICE)
    if name == "weights in float16":
        return as_read().rounded(torch.float16).model(device=DEVICE)
    return trained().model(getattr(torch, name), device=DEVICE)


def asked_of(count):
    """The first prompts, as tokens."""
    return [trained().prompt(text) for _, text in prompts(count)]


# --- Ways along float64's texts. -----------------------------------------------------------------

NAMES = ("error", "largest", "gap", "KL", "differs", "bits")


def batches(given, count, shift=0):
    """Prompts that are decoded together; where there are too few, some come again."""
    return [[(i + k) % given for k in range(count)] for i in range(shift, given + shift, count)]


class Along:
    """Float64's texts of some prompts, and the ways that follow them."""

    def __init__(self, asked, tokens):
        self.asked, self.tokens = asked, tokens
        self.shape = len(asked), tokens, trained().config.vocab_size
        self.exact = torch.zeros(self.shape, dtype=torch.float64, device=DEVICE)  # every logit
        self.truth = decode(
            float64(), asked, tokens, observe=lambda i, z: self.exact[:, i].copy_(z)
        )
        self.written = ~self.truth.margin.isnan()  # a text ends with its end token
        self.size = float(self.exact[self.written].square().mean().sqrt())
        self.top = self.exact.topk(2).indices
        self.steps, self.logits_of = [], {}

    def errors(self, row, logits, other):
        """Of the steps of a prompt: errors, and whether the token and the logits are others."""
        z, t = logits.double(), self.exact[row]
        error, log_t = z - t, t.log_softmax(-1)
        columns = {
            "error": error.square().mean(1),
            "largest": error.abs().amax(1),
            "gap": error.gather(1, self.top[row]).diff().squeeze(1),
            "KL": (log_t.exp() * (log_t - z.log_softmax(-1))).sum(1),
            "differs": logits.argmax(-1) != self.top[row, :, 0],
            "bits": (logits != other).double().mean(1),
        }
        return torch.stack([columns[name].double().cpu() for name in NAMES])

    def follow(self, dtype, way, model, batch, like=None, graph=GPU, shift=0, longer=0):
        """Run one way along the texts; compare its logits with those, and with another way's."""
        new = partial(torch.zeros, self.shape, dtype=model.dtype, device=DEVICE)
        own = self.logits_of[like] if like else self.logits_of.setdefault((dtype, way), new())
        found = torch.zeros(len(NAMES), *self.shape[:2], dtype=torch.float64)
        length = longer + (max(map(len, self.asked)) if batch > 1 else 0)
        step = GraphStep(model) if graph else None
        for rows in batches(len(self.asked), batch, shift):
            z = own.new_zeros(len(rows), *self.shape[1:])
            decode(
                model,
                [self.asked[row] for row in rows],
                self.tokens,
                follow=self.truth.tokens[rows],
                observe=lambda i, logits, z=z: z[:, i].copy_(logits),
                step=step,
                length=length,
            )
            if like is None:
                own[rows] = z
            each = [self.errors(r, z[k], own[r]) for k, r in enumerate(rows)]
            found[:, rows] = torch.stack(each, 1)
        prompt, token = self.written.nonzero().T.numpy()
        table = pd.DataFrame(dict(zip(NAMES, found[:, self.written].numpy(), strict=True)))
        table = table.astype({"differs": bool})
        self.steps.append(table.assign(prompt=prompt, token=token + 1, dtype=dtype, way=way))
        return self.steps[-1]


@functools.cache
def texts(count, tokens):
    """Float64's texts of the first prompts."""
    return Along(asked_of(count), tokens)


@functools.cache
def alone(count, tokens):
    """Each prompt alone, in three types."""
    along = Along(asked_of(count), tokens)
    for dtype in ("float32", "bfloat16", "float16"):
        along.follow(dtype, "alone", model_of(dtype), 1)
    return along


@functools.cache
def followed(count, tokens):
    """Every way along float64's texts."""
    along, usual = Along(asked_of(count), tokens), f"batch of {BATCH}"
    for dtype in ("float32", "bfloat16", "float16"):
        model, like = model_of(dtype), {"batch": BATCH, "like": (dtype, usual)}
        along.follow(dtype, "alone", model, 1)
        along.follow(dtype, usual, model, BATCH)
        if dtype != "float16":
            eager = trained().model(model.dtype, "eager", DEVICE)
            along.follow(dtype, "eager attention", eager, graph=False, **like)
            along.follow(dtype, "64 more columns", model, longer=64, **like)
            along.follow(dtype, "rotated by one", model, shift=1, **like)
    single, narrow = ({"batch": BATCH, "like": (d, usual)} for d in ("float32", "bfloat16"))
    if GPU:
        with torch_precision(tf32=True):
            along.follow("TF32", usual, model_of("float32"), **single)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        along.follow("bfloat16", "float32 reduction", model_of("bfloat16"), **narrow)
        along.follow("bfloat16", "repeated", model_of("bfloat16"), **narrow)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    else:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        along.follow("float32", "one thread", model_of("float32"), **single)
        torch.set_num_threads(threads)
    for name, backend in {"inductor": "inductor", "roundoff": onnx_custom_backend}.items():
        model = trained().model(device=DEVICE)
        for layer in model.model.layers:  # one compilation serves the MLPs of all layers
            layer.mlp.compile(backend=backend)
        along.follow("float32", f"MLPs by {name}", model, graph=False, **single)
    along.follow("float32", "bfloat16 weights", model_of("converted"), **single)
    for name in ("weights as read", "weights in float16"):
        along.follow("float32", name, model_of(name), BATCH)
    return along


def groups(along):
    """The steps of each way."""
    steps = pd.concat(along.steps, ignore_index=True)
    return steps.groupby(["dtype", "way"], sort=False)


@functools.cache
def all_ways(count, tokens):
    """The rows of the table of ways."""
    along, rows = followed(count, tokens), []
    for (dtype, way), steps in groups(along):
        eps = torch.finfo(getattr(torch, dtype, torch.float32)).eps
        changed = steps[steps["differs"]].groupby("prompt")["token"].min()
        error = math.sqrt(steps["error"].mean()) / along.size / eps
        rows.append(
            {"dtype": dtype, "way": way, "rms error": error}
            | {"error abs": steps["largest"].max()}
            | {"bits": math.nan if (dtype, way) in along.logits_of else steps["bits"].mean()}
            | {"flips": steps["differs"].mean(), "texts": len(changed), "of": count}
            | {"first": changed.median(), "KL": steps["KL"].mean()}
        )
    return rows


@study.table(part=PART)
def ways(args):
    """Each way: error of the logits in ε × RMS, bits, tokens and texts that differ."""
    return all_ways(args.prompts, args.tokens)


@study.table(part=PART)
def survival(args):
    """The share of texts that are still float64's, token by token, each prompt alone."""
    rows = []
    for (dtype, way), steps in groups(followed(args.prompts, args.tokens)):
        if way == "alone":
            changed = steps[steps["differs"]].groupby("prompt")["token"].min()
            rows += [
                {
                    "series": dtype,
                    "token": token,
                    "same": 1 - (changed <= token).sum() / args.prompts,
                }
                for token in range(args.tokens + 1)
            ]
    return sorted(rows, key=lambda row: ["float32", "float16", "bfloat16"].index(row["series"]))


@functools.cache
def narrow(count, tokens):
    """What bfloat16 writes by itself, each prompt alone."""
    model = model_of("bfloat16")
    step = GraphStep(model) if GPU else None
    return torch.cat([decode(model, [p], tokens, step=step).tokens for p in asked_of(count)])


@study.table(part=PART)
def examples(args):
    """Where a text alone in bfloat16 leaves float64's: eight tokens before, eight from there."""
    rows = []
    right = texts(args.prompts, args.tokens).truth.tokens
    for text, other in zip(right, narrow(args.prompts, args.tokens), strict=True):
        if not text.equal(other):
            at = int((text != other).nonzero()[0])
            for dtype, ids in (("float64", text), ("bfloat16", other)):
                shown = ids[max(at - 8, 0) : at + 8]
                words = trained().tokenizer.decode(shown, skip_special_tokens=True)
                rows.append({"dtype": dtype, "token": at + 1, "text": words.replace("\n", " ")})
    return rows


# --- What predicts them: the gap between the two largest logits. ---------------------------------


@study.table(part=PART)
def margins(args):
    """The share of float64's gaps below a number of logits."""
    along = texts(args.prompts, args.tokens)
    gaps = along.truth.margin[along.written]
    limits = (0.1, 0.2, 0.5, 1, 2, 4)
    return [{"margin": m, "share": float((gaps < m).double().mean())} for m in limits]


@study.table(part=PART)
def predicted(args):
    """With a normal error whose σ is that of the other half of the prompts: tokens expected."""
    along, rows = followed(args.prompts, args.tokens), []
    for (dtype, way), steps in groups(along):
        odd = steps["prompt"] % 2 == 1
        gap = {half: math.sqrt(steps["gap"][odd == half].pow(2).mean()) for half in (True, False)}
        spread = torch.tensor([gap[not half] for half in odd])
        chance = torch.special.ndtr(-along.truth.margin[along.written] / spread)
        interval = binomtest(int(steps["differs"].sum()), len(steps)).proportion_ci(method="wilson")
        lasting = (1 - pd.Series(chance.numpy(), steps["prompt"])).groupby(level=0).prod()
        rows.append(
            {"dtype": dtype, "way": way, "gap": math.sqrt(steps["gap"].pow(2).mean())}
            | {"predicted": float(chance.mean()), "flips": steps["differs"].mean()}
            | {"low": interval.low, "high": interval.high, "tokens": len(steps)}
            | {"texts predicted": float((1 - lasting).sum())}
            | {"texts": steps[steps["differs"]]["prompt"].nunique()}
        )
    return rows


NEAR = 0.2  # logits: gaps below are counted for their density at zero


@study.table(part=PART)
def rule(args):
    """Density of small gaps × mean absolute change of the gap / 2, beside the tokens that change.

    *rest* is the share of the changed tokens that neither of float64's two best became.
    """
    along, rows = alone(args.prompts, args.tokens), []
    gaps = along.truth.margin[along.written].numpy()
    density = float((gaps < NEAR).mean()) / NEAR
    for (dtype, _), steps in groups(along):
        change, differs = steps["gap"], steps["differs"]
        interval = binomtest(int(differs.sum()), len(steps)).proportion_ci(method="wilson")
        rows.append(
            {"dtype": dtype, "tokens": len(steps), "density": density}
            | {"mean change": change.abs().mean(), "rms change": math.sqrt(change.pow(2).mean())}
            | {"expected": density * change.abs().mean() / 2, "flips": differs.mean()}
            | {"low": interval.low, "high": interval.high}
            | {"closed": float((change.to_numpy() > gaps).mean())}
        )
    return rows


# --- Batches: what a notebook writes, one prompt alone, against what a server writes. ------------


@study.table(part=PART)
def server(args):
    """Texts in bfloat16 that differ from the same prompt's alone, by the size of the batch."""
    asked, right, rows = asked_of(args.prompts), narrow(args.prompts, args.tokens), []
    model = model_of("bfloat16")
    for batch in [2**k for k in range(1, MOST.bit_length())]:
        written, step = torch.empty_like(right), GraphStep(model) if GPU else None
        for places in batches(args.prompts, batch):
            given, text = [asked[place] for place in places], right[places]
            written[places] = decode(model, given, args.tokens, follow=text, step=step).tokens
        other = written != right
        first = other.int().argmax(1)[other.any(1)].double() + 1
        rows.append(
            {"batch": batch, "texts": len(first), "of": args.prompts}
            | {"first": float(first.median()) if len(first) else math.nan}
        )
    return rows


# --- Which kernel gives other bits when it runs again. -------------------------------------------


class Again(TorchDispatchMode):
    """Runs every kernel again with the same inputs, and counts the calls whose bits change."""

    def __init__(self, runs=1):
        super().__init__()
        self.runs, self.calls, self.changed = runs, Counter(), Counter()

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        first = kernel(*args, **(kwargs or {}))
        if kernel._schema.is_mutable or "empty" in kernel.name():
            return first  # it would change its inputs twice, or has nothing to repeat
        result = first[0] if isinstance(first, tuple) else first
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.calls[kernel.name()] += 1
            for _ in range(self.runs):
                again = kernel(*args, **(kwargs or {}))
                again = again[0] if isinstance(first, tuple) else again
                if not torch.equal(result.nan_to_num(), again.nan_to_num()):
                    self.changed[kernel.name()] += 1
                    break
        return first


@study.table(part=PART)
def repeats(args):
    """Each kernel of a batch, run again with equal inputs: calls, and those whose bits change.

    *whole* and *whole, graph* are all the logits of the batch, the steps without and with a graph.
    """
    rows, tokens = [], min(args.tokens, 4 if fast else 16)
    given = [asked_of(args.prompts)[i] for i in batches(args.prompts, BATCH)[0]]
    right = decode(model_of("float32"), given, tokens).tokens
    for dtype in ("float32", "bfloat16", "float16"):
        model = model_of(dtype)

        def logits(model=model, step=None):
            found = []
            decode(
                model,
                given,
                tokens,
                follow=right,
                step=step,
                observe=lambda i, z: found.append(z.clone()),
            )
            return torch.stack(found)

        with Again(1 if fast else 20) as again:
            first = logits()
        for kernel, calls in again.calls.items():
            changed = again.changed[kernel]
            rows.append({"dtype": dtype, "kernel": kernel, "calls": calls, "changed": changed})
        step = GraphStep(model) if GPU else None
        for name, way in {"whole": None, "whole, graph": step}.items():
            if name == "whole" or GPU:
                first = logits(step=way)
                changed = sum(not torch.equal(first, logits(step=way)) for _ in range(4))
                rows.append({"dtype": dtype, "kernel": name, "calls": 4, "changed": changed})
    return rows


# --- Quality: does a way know less? --------------------------------------------------------------


def surprise(model, passages):
    """−ln of the probability of each token of the passages."""
    each = []
    for ids in passages:
        log_p = model(ids.to(DEVICE)).logits[0, :-1].double().log_softmax(-1).cpu()
        each.append(-log_p.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(each)


@study.table(part=PART)
def quality(args):
    """Distance from float64: KL divergence along the texts, perplexity with its 95 % interval."""
    tokenizer = trained().tokenizer
    passages = [
        tokenizer(text, return_tensors="pt")["input_ids"][:, : 32 if fast else None]
        for text in PASSAGES[:PASSAGES_READ]
    ]
    found = all_ways(args.prompts, args.tokens)
    divergence = {(row["dtype"], row["way"]): row["KL"] for row in found}
    base, rows = surprise(float64(), passages), []
    for dtype, way in (
        ("float32", "alone"),
        ("bfloat16", "alone"),
        ("float16", "alone"),
        ("float32", "weights as read"),
        ("float32", "weights in float16"),
    ):
        change = surprise(model_of(dtype if way == "alone" else way), passages) - base
        mean, half = float(change.mean()), 1.96 * float(change.std()) / math.sqrt(len(change))
        rows.append(
            {"dtype": dtype, "way": way, "KL": divergence[dtype, way]}
            | {"perplexity": math.exp(float(base.mean()) + mean), "change": mean}
            | {"change low": mean - half, "change high": mean + half}
        )
    return rows


# --- The price. ----------------------------------------------------------------------------------


@study.table(part=PART, times=["× bfloat16", "low", "high"])
def costs(args):
    """Time of one token, without earlier ones, over bfloat16's; and memory.

    *converted*: bfloat16 weights, float32 products. On a GPU by a CUDA graph.
    """
    token = torch.tensor([asked_of(1)[0][:1]], device=DEVICE)
    names = ("bfloat16", "float32", "converted")
    calls = {name: partial(model_of(name), token, use_cache=False) for name in names}
    timings = measure(
        calls,
        budget_s=0 if fast else 1,
        min_rounds=3 if fast else 10,
        device=DEVICE,
        cuda_graph=GPU,
    )
    found = timings.ratios("bfloat16").rename(columns={"label": "computed", "ratio": "× bfloat16"})
    found["MiB"] = [sum(p.nbytes for p in model_of(n).parameters()) / 2**20 for n in names]
    return found


# --- A trained model has a few values that are thousands of times the others. --------------------


@functools.cache
def seen():
    """Of trained and random weights: the stream between layers, and each product's input."""
    torch.manual_seed(0)
    random = LlamaForCausalLM(trained().config).to(DEVICE)
    ids = torch.tensor([asked_of(1)[0][: 8 if fast else None]], device=DEVICE)
    result = {}
    for weights, model in {"trained": model_of("float32"), "random": random}.items():
        found = {}
        hooks = [
            layer.register_forward_hook(
                lambda m, x, y, name=name, found=found: found.update({name: (x[0], m)})
            )
            for name, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear)
        ]
        with torch.no_grad():
            stream = model(ids, output_hidden_states=True).hidden_states
        for hook in hooks:
            hook.remove()
        result[weights] = stream, found
    return result


@study.table(part=PART)
def products(args):
    """Products of one prompt in bfloat16, over all layers: median κ, largest input, most used."""
    kinds = []
    for weights, (_, found) in seen().items():
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
    return kinds.agg({"condition": "median", "largest": "max", "used": "max"}).reset_index()


@study.table(part=PART)
def layers(args):
    """The largest value after each layer, with trained and with random weights."""
    return [
        {"layer": i, "weights": weights, "largest": float(state.abs().max())}
        for weights, (stream, _) in seen().items()
        for i, state in enumerate(stream)
    ]


# --- Values: what pages may print. Name, datum and statistic, table, column; rows; a test. -------

ALONE = "each of 32 prompts alone, SmolLM2-135M"
for dtype, holds in {
    "bfloat16": lambda v: v.value > 16,  # "most"
    "float16": lambda v: 0 < v.value < 16,
    "float32": lambda v: v.value == 0,
}.items():
    study.value(
        f"texts.{dtype}",
        f"texts that differ from float64's within 128 tokens in {dtype}, {ALONE}",
        "survival",
        lambda t: 32 * (1 - t["same"]),
        where={"token": 128, "series": dtype},
        test=holds,
    )
for name, dtype, way, about in (
    ("texts.batch", "bfloat16", "batch of 32", "in bfloat16"),
    ("texts.weights", "float32", "weights as read", "in float32 with unrounded weights"),
):
    study.value(
        name,
        f"texts that differ from float64's with rounded weights, {about}, of 32, in a batch",
        "predicted",
        "texts",
        where={"dtype": dtype, "way": way},
        # "Another cause", and the smaller one.
        test={
            "texts.batch": lambda v: v.value > 16,
            "texts.weights": lambda v: 0 < v.value <= 16,
        }[name],
    )
study.value(
    "tokens.predicted",
    f"share of the tokens that the rule expects to change in bfloat16, σ of other prompts, {ALONE}",
    "predicted",
    "predicted",
    # One prompt has no others to predict from.
    where={"dtype": "bfloat16", "way": "alone", "predicted": lambda share: share.notna()},
    # "A little low, and within the interval" of what was counted.
    test=lambda v: v.rows["low"].item() < v.value < v.rows["flips"].item(),
)
study.value(
    "tokens.bfloat16",
    f"share of the tokens that change in bfloat16, {ALONE}",
    "predicted",
    "flips",
    where={"dtype": "bfloat16", "way": "alone"},
    test=lambda v: v.rows["low"].item() > 0.01,
)
study.value(
    "server",
    "texts in bfloat16 that a batch of 8 changes, of 32, 128 tokens",
    "server",
    "texts",
    where={"batch": 8},
    test=lambda v: v.value > 16,
)
for name, way in {"first": "float32 reduction", "second": "repeated"}.items():
    study.value(
        f"repeat.{name}",
        f"share of the tokens that change in bfloat16, {name} of two equal runs of a batch of 32, "
        "products reduced in float32",
        "ways",
        lambda t, way=way: t.set_index("way")["flips"][way],
        where={"dtype": "bfloat16", "way": ["float32 reduction", "repeated"]},
        # Two runs that differ, and both as far from float64 as bfloat16 is.
        test=lambda v: (
            v.rows["rms error"].nunique() == 2 and v.rows["flips"].between(0.01, 0.03).all()
        ),
    )


def percent_of(column):
    """A change in nats as a relative change of the perplexity."""
    return lambda rows: rows[column].map(math.expm1)


def is_unseen(found):
    """Whether the interval holds 0, ends within half a percent, and holds a loss of a tenth."""
    low, high = found.rows["change low"].item(), found.rows["change high"].item()
    return -0.005 < low <= 0 and 0.001 < high < 0.005


for name, column in {"low": "change low", "high": "change high"}.items():
    study.value(
        f"perplexity.{name}",
        f"relative {column} of the perplexity in bfloat16, eight passages, 95 % interval",
        "quality",
        percent_of(column),
        where={"dtype": "bfloat16"},
        test=is_unseen,
    )
for name, what in {
    "float32": "float32",
    "converted": "float32 products of bfloat16 weights",
}.items():
    study.value(
        f"time.{name}",
        f"time of one token in {what} over bfloat16, SmolLM2-135M, batch of 1",
        "costs",
        "× bfloat16",
        where={"computed": name},
        interval=("low", "high"),
        words=("faster", "slower"),
    )
study.value(
    "largest",
    "largest value between the layers of the trained model, one prompt",
    "layers",
    lambda t: t["largest"].max(),
    where={"weights": "trained"},
    test=lambda v: 1000 < v.value < 65504,
)

if __name__ == "__main__":
    study.main()
