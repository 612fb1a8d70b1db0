"""The study behind "Why does a model in bfloat16 write a different text?".

SmolLM2-135M-Instruct answers 32 prompts. Its weights are rounded once to bfloat16 and every way
starts from these, so that arithmetic alone differs. The truth is a greedy text with every operation
in float64. Each way runs along it, token by token with a static cache (teacher forcing): up to its
first different token that is its own greedy text. Measured are the errors of the logits, the tokens
and texts that change, what predicts them, batches, perplexity and times.

The page tells the story with small experiments. This file measures the full grid, writes the
record, and defines each number that the page may print.

    python studies/bits_to_words.py --record
"""

import functools
import math
from functools import partial

import pandas as pd
import torch
from scipy.stats import binomtest
from torch.nn.functional import linear

from roundoff.models import PASSAGES, Float64Llama, decode, load_trained, prompts
from roundoff.page.measurement import Study
from roundoff.script import unit_test_going
from roundoff.timing import measure, torch_precision

fast, GPU = unit_test_going(), torch.cuda.is_available()
DEVICE, PART = ("cuda", "gpu") if GPU else ("cpu", "cpu")
study = Study(
    "plot_bits_to_words",
    "Texts of a trained model in several types and ways: errors, tokens and texts that change.",
    on="nvidia-h200",
)
PROMPTS = 2 if fast else 32
TOKENS = 4 if fast else 128 if GPU else 64  # of each text
#: Prompts in a batch in which attention, padding, threads and compilers differ; in the largest one.
BATCH, MOST = (32, 64) if GPU else (2, 2) if fast else (4, 8)


# --- Models: one set of weights, in several types and ways. --------------------------------------


@functools.cache
def as_read():
    """The weights of the file: four bits, a scale and a minimum, as float32."""
    return load_trained(round_to=None, layers=2 if fast else None)


@functools.cache
def trained():
    """The weights that every way has, float64 too."""
    return load_trained(layers=2 if fast else None)


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
    return trained().model(getattr(torch, name), device=DEVICE)


@functools.cache
def asked():
    """The prompts, as tokens."""
    return [trained().prompt(text) for _, text in prompts(PROMPTS)]


# --- Ways along float64's texts. -----------------------------------------------------------------

NAMES = ("error", "gap", "differs")


def batches(given, count):
    """Prompts that are decoded together; where there are too few, some come again."""
    return [[(i + k) % given for k in range(count)] for i in range(0, given, count)]


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
        self.steps = []

    def errors(self, row, logits):
        """Of the steps of a prompt: errors, and whether the token is another."""
        error = logits.double() - self.exact[row]
        columns = {
            "error": error.square().mean(1),
            "gap": error.gather(1, self.top[row]).diff().squeeze(1),
            "differs": logits.argmax(-1) != self.top[row, :, 0],
        }
        return torch.stack([columns[name].double().cpu() for name in NAMES])

    def follow(self, dtype, way, model, batch):
        """Run one way along the texts; compare its logits with those."""
        found = torch.zeros(len(NAMES), *self.shape[:2], dtype=torch.float64)
        for rows in batches(len(self.asked), batch):
            shape = len(rows), *self.shape[1:]
            z = torch.zeros(shape, dtype=model.dtype, device=DEVICE)
            decode(
                model,
                [self.asked[row] for row in rows],
                self.tokens,
                follow=self.truth.tokens[rows],
                observe=lambda i, logits, z=z: z[:, i].copy_(logits),
                length=max(map(len, self.asked)) if batch > 1 else 0,
            )
            each = [self.errors(row, z[k]) for k, row in enumerate(rows)]
            found[:, rows] = torch.stack(each, 1)
        prompt, token = self.written.nonzero().T.numpy()
        table = pd.DataFrame(dict(zip(NAMES, found[:, self.written].numpy(), strict=True)))
        table = table.astype({"differs": bool})
        self.steps.append(table.assign(prompt=prompt, token=token + 1, dtype=dtype, way=way))
        return self.steps[-1]


@functools.cache
def followed():
    """Float64's texts, and the steps of every way along them."""
    along, usual = Along(asked(), TOKENS), f"batch of {BATCH}"
    for dtype in ("float32", "bfloat16", "float16"):
        along.follow(dtype, "alone", model_of(dtype), 1)
        along.follow(dtype, usual, model_of(dtype), BATCH)
    if GPU:
        with torch_precision(tf32=True):
            along.follow("TF32", usual, model_of("float32"), BATCH)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        for way in ("float32 reduction", "repeated"):
            along.follow("bfloat16", way, model_of("bfloat16"), BATCH)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    along.follow("float32", "weights as read", model_of("weights as read"), BATCH)
    return along, pd.concat(along.steps).groupby(["dtype", "way"], sort=False)


@study.table(part=PART)
def ways(args):
    """Each way: error of the logits in ε × RMS, and the share of the tokens that differ."""
    along, groups = followed()
    for (dtype, way), steps in groups:
        eps = torch.finfo(getattr(torch, dtype, torch.float32)).eps
        error = math.sqrt(steps["error"].mean()) / along.size / eps
        yield {"dtype": dtype, "way": way, "rms error": error, "flips": steps["differs"].mean()}


@study.table(part=PART)
def survival(args):
    """The share of texts that are still float64's, token by token, each prompt alone."""
    for dtype in "float32", "float16", "bfloat16":
        steps = followed()[1].get_group((dtype, "alone"))
        changed = steps[steps["differs"]].groupby("prompt")["token"].min()
        for token in range(TOKENS + 1):
            same = 1 - (changed <= token).sum() / PROMPTS
            yield {"series": dtype, "token": token, "same": same}


# --- What predicts them: the gap between the two largest logits. ---------------------------------


@study.table(part=PART)
def predicted(args):
    """With a normal error whose σ is that of the other half of the prompts: tokens expected."""
    along, groups = followed()
    for (dtype, way), steps in groups:
        odd = steps["prompt"] % 2 == 1
        gap = {half: math.sqrt(steps["gap"][odd == half].pow(2).mean()) for half in (True, False)}
        spread = torch.tensor([gap[not half] for half in odd])
        chance = torch.special.ndtr(-along.truth.margin[along.written] / spread)
        interval = binomtest(int(steps["differs"].sum()), len(steps)).proportion_ci(method="wilson")
        lasting = (1 - pd.Series(chance.numpy(), steps["prompt"])).groupby(level=0).prod()
        yield (
            {"dtype": dtype, "way": way, "gap": math.sqrt(steps["gap"].pow(2).mean())}
            | {"predicted": float(chance.mean()), "flips": steps["differs"].mean()}
            | {"low": interval.low, "high": interval.high, "tokens": len(steps)}
            | {"texts predicted": float((1 - lasting).sum())}
            | {"texts": steps[steps["differs"]]["prompt"].nunique()}
        )


# --- Batches: what a notebook writes, one prompt alone, against what a server writes. ------------


@study.table(part=PART)
def server(args):
    """Texts in bfloat16 that differ from the same prompt's alone, by the size of the batch."""
    model = model_of("bfloat16")
    right = torch.cat([decode(model, [p], TOKENS).tokens for p in asked()])
    for batch in [2**k for k in range(1, MOST.bit_length())]:
        written = torch.empty_like(right)
        for places in batches(PROMPTS, batch):
            given, text = [asked()[place] for place in places], right[places]
            written[places] = decode(model, given, TOKENS, follow=text).tokens
        yield {"batch": batch, "texts": int((written != right).any(1).sum()), "of": PROMPTS}


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
    """Perplexity, and its change from float64 with a 95 % interval."""
    tokenizer = trained().tokenizer
    passages = [
        tokenizer(text, return_tensors="pt")["input_ids"][:, : 32 if fast else None]
        for text in PASSAGES[: 1 if fast else 8]
    ]
    base = surprise(float64(), passages)
    for dtype in ("float32", "bfloat16", "float16"):
        change = surprise(model_of(dtype), passages) - base
        mean, half = float(change.mean()), 1.96 * float(change.std()) / math.sqrt(len(change))
        yield (
            {"dtype": dtype}
            | {"perplexity": math.exp(float(base.mean()) + mean), "change": mean}
            | {"change low": mean - half, "change high": mean + half}
        )


# --- The price. ----------------------------------------------------------------------------------


@study.table(part=PART, times=["× bfloat16", "low", "high"])
def costs(args):
    """Time of one token, without earlier ones, over bfloat16's.

    *converted*: bfloat16 weights, float32 products. On a GPU by a CUDA graph.
    """
    token = torch.tensor([asked()[0][:1]], device=DEVICE)
    names = ("bfloat16", "float32", "converted")
    calls = {name: partial(model_of(name), token, use_cache=False) for name in names}
    timings = measure(
        calls,
        budget_s=0 if fast else 1,
        min_rounds=3 if fast else 10,
        device=DEVICE,
        cuda_graph=GPU,
    )
    return timings.ratios().rename(columns={"label": "computed", "ratio": "× bfloat16"})


# --- How near to the end of float16 the largest values are. --------------------------------------


@study.table(part=PART)
def layers(args):
    """The largest value after each layer of the trained model."""
    ids = torch.tensor([asked()[0][: 8 if fast else None]], device=DEVICE)
    with torch.no_grad():
        stream = model_of("float32")(ids, output_hidden_states=True).hidden_states
    return [
        {"layer": i, "weights": "trained", "largest": float(state.abs().max())}
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
for name, dtype, way, about, holds in (
    ("batch", "bfloat16", "batch of 32", "in bfloat16", lambda v: v.value > 16),
    # "Another cause", and the smaller one.
    (
        "weights",
        "float32",
        "weights as read",
        "in float32 with unrounded weights",
        lambda v: 0 < v.value <= 16,
    ),
):
    study.value(
        f"texts.{name}",
        f"texts that differ from float64's with rounded weights, {about}, of 32, in a batch",
        "predicted",
        "texts",
        where={"dtype": dtype, "way": way},
        test=holds,
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


def is_unseen(found):
    """Whether the interval holds 0, ends within half a percent, and holds a loss of a tenth."""
    low, high = found.rows["change low"].item(), found.rows["change high"].item()
    return -0.005 < low <= 0 and 0.001 < high < 0.005


for name, column in {"low": "change low", "high": "change high"}.items():
    study.value(
        f"perplexity.{name}",
        f"relative {column} of the perplexity in bfloat16, eight passages, 95 % interval",
        "quality",
        lambda rows, column=column: rows[column].map(math.expm1),
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
