"""The study behind "Why do my trainer's log-probabilities differ from the sampler's?".

SmolLM2-135M-Instruct continues eight passages. A sampler writes token by token with a cache, in a
padded batch. A trainer reads all texts in one packed row. Measured are the log-probabilities of
the same tokens by both, what each of their differences adds, the cures with their times, and short
runs of policy gradient.

The page tells the story with small experiments. This file measures more tokens, writes the record,
and defines each number that the page may print.

    python studies/trainer_sampler.py --record
"""

from __future__ import annotations

import argparse
import copy
import functools
import time
from itertools import pairwise, product
from typing import Any

import pandas as pd
import torch
from scipy.stats import bootstrap, t
from torch.nn.functional import linear, pad

import roundoff
from roundoff.models import PASSAGES, load_trained, padded
from roundoff.page.measurement import Study
from roundoff.script import unit_test_going
from roundoff.timing import measure

quick, GPU = unit_test_going(), torch.cuda.is_available()
DEVICE, PART = ("cuda", "gpu") if GPU else ("cpu", "cpu")
EPYC = "amd-epyc-2-cores"
study = Study(
    "plot_trainer_sampler",
    "Log-probabilities of the same tokens by a sampler and by a trainer.",
    on=EPYC,
    layers=(1 if quick else 30, "layers of SmolLM2", (1, 30)),
    texts=(2 if quick else 64 if GPU else 8, "texts", 2),
    tokens=(4 if quick else 64 if GPU else 48, "tokens of each text", 2),
    half=(2 if quick else 64 if GPU else 16, "tokens of each text in float16", 2),
    seeds=(2 if quick else 16 if GPU else 4, "seeds of the runs", 2),
    steps=(1 if quick else 20 if GPU else 6, "steps of a run", 1),
    updates=(1 if quick else 50 if GPU else 2, "updates before the bits are compared", 1),
    written=(2 if quick else 64 if GPU else 16, "tokens of each text of a run", 1),
)
PROMPT, COLUMNS = 40, 5  # tokens of a passage, padding of the sampler
LIMIT, LARGEST = 0.1, 2  # of a clipped ratio, of an importance weight


# --- Sampler and trainer, as the page has them. --------------------------------------------------


@functools.cache
def trained(layers: int):
    return load_trained(layers=layers)


def asked(layers: int, count: int) -> list[list[int]]:
    """The beginnings of passages, again from the first where there are more texts."""
    texts = (PASSAGES[i % len(PASSAGES)] for i in range(count))
    return [trained(layers).tokenizer(text)["input_ids"][:PROMPT] for text in texts]


def logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The log-probability of each token."""
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def sample(model: Any, prompts: list[list[int]], tokens: int, seed: int = 0):
    """Whole texts, and the logits of their new tokens: a cache, a batch, padding."""
    torch.manual_seed(seed)
    ids, mask = padded(prompts, pad=2, device=DEVICE, length=PROMPT + COLUMNS)
    made = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        do_sample=True,
        top_k=0,
        eos_token_id=None,
        pad_token_id=2,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return made.sequences[:, COLUMNS:], torch.stack(made.logits, 1)


def train(model: Any, texts: torch.Tensor) -> torch.Tensor:
    """Logits of the new tokens: all texts in one row, each with positions of its own."""
    count, length = texts.shape
    places = torch.arange(length, device=texts.device).repeat(count)[None]
    logits = model(texts.reshape(1, -1), position_ids=places, use_cache=False).logits
    return logits.view(count, length, -1)[:, PROMPT - 1 : -1]


def one_pass(model: Any, texts: torch.Tensor, columns: int = 0) -> torch.Tensor:
    """Logits of the new tokens: a batch in one pass, with columns of padding."""
    mask = pad(torch.ones_like(texts), (columns, 0))
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0)}
    wide = pad(texts, (columns, 0))
    logits = model(wide, use_cache=False, **(given if columns else {})).logits
    return logits[:, columns + PROMPT - 1 : -1]


def in_chunks(model: Any, texts: torch.Tensor, size: int) -> torch.Tensor:
    """Logits of the new tokens: the prompt first, then so many tokens at a time, with a cache."""
    cuts = [0, PROMPT, *range(PROMPT + size, texts.shape[1], size), texts.shape[1]]
    cache, made = None, []
    for start, end in pairwise(cuts):
        out = model(texts[:, start:end], past_key_values=cache, use_cache=True)
        cache, made = out.past_key_values, [*made, out.logits]
    return torch.cat(made, 1)[:, PROMPT - 1 : -1]


def wide_head(model: Any, texts: torch.Tensor) -> torch.Tensor:
    """Logits of the new tokens: one pass, the last product in float32."""
    hidden = model.model(texts, use_cache=False).last_hidden_state[:, PROMPT - 1 : -1]
    return linear(hidden.float(), model.lm_head.weight.float())


def rewards_of(layers: int, tokens: torch.Tensor) -> torch.Tensor:
    """The share of a text's new tokens that begin with a space: those that begin a word."""
    words = trained(layers).tokenizer.batch_decode(tokens.reshape(-1, 1))
    begins = torch.tensor([word.startswith(" ") for word in words], device=tokens.device)
    return begins.view(tokens.shape).float().mean(1)


def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards, less their mean, over their deviation; one for each text."""
    return ((rewards - rewards.mean()) / (rewards.std() + 1e-6))[:, None]


def clipped(ratio: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """The weight of each token in PPO's gradient: its ratio, or 0 beyond the limit."""
    beyond = torch.where(gain > 0, ratio > 1 + LIMIT, ratio < 1 - LIMIT)
    return ratio.masked_fill(beyond, 0)


def weights_of(way: str, ratio: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """The weight of each token in the gradient, by the trainer's cure."""
    if way == "recomputed":
        return torch.ones_like(ratio)
    return ratio.clamp(max=LARGEST) if way == "importance weights" else clipped(ratio, gain)


# --- What differs. -------------------------------------------------------------------------------


@functools.cache
def model_of(layers: int, way: str):
    """The model by type, or as ``roundoff.invariant`` changes it."""
    if way == "invariant":
        return roundoff.invariant(copy.deepcopy(model_of(layers, "bfloat16")))
    if way == "eager":
        return trained(layers).model(torch.bfloat16, "eager", DEVICE)
    return trained(layers).model(getattr(torch, way), device=DEVICE)


@functools.cache
def sampled(layers: int, texts: int, tokens: int, way: str):
    with torch.no_grad():
        return sample(model_of(layers, way), asked(layers, texts), tokens)


def compared(of: torch.Tensor, by: torch.Tensor, texts: torch.Tensor) -> dict[str, Any]:
    """Logits of a sampler and of a trainer: what differs, for the tokens written."""
    new = texts[:, PROMPT:]
    p, q = (z.float().log_softmax(-1) for z in (of, by))
    log_ratio = logprobs(by, new) - logprobs(of, new)
    ratio = log_ratio.exp()
    outside = ((ratio - 1).abs() > LIMIT).double()
    per_text = outside.mean(1).cpu().numpy()
    low = high = float(per_text[0])
    if per_text.std():
        found = bootstrap((per_text,), lambda x, axis: x.mean(axis), rng=0, method="percentile")
        low, high = found.confidence_interval
    return {
        "tokens": new.numel(),
        "different": int((log_ratio != 0).sum()),
        "KL": float((p.exp() * (p - q)).sum(-1).mean()),
        "outside": float(outside.mean()),
        "low": float(low),
        "high": float(high),
        "largest ratio": float(torch.maximum(ratio, 1 / ratio).max()),
    }


#: What gives logits, beside one pass of the batch in bfloat16 with torch's own attention.
CAUSES = {
    "the same again": one_pass,
    "each text alone": lambda m, texts: torch.cat([one_pass(m, text[None]) for text in texts]),
    "5 columns of padding": functools.partial(one_pass, columns=COLUMNS),
    "16 columns of padding": functools.partial(one_pass, columns=16),
    "packed into one row": train,
    "cache, token by token": functools.partial(in_chunks, size=1),
    "cache, 8 tokens at a time": functools.partial(in_chunks, size=8),
    "last product in float32": wide_head,
}


@study.table(part=PART)
def causes(args):
    """One change at a time, against one pass of the batch in bfloat16."""
    texts, written = sampled(args.layers, args.texts, args.tokens, "bfloat16")
    model, new = model_of(args.layers, "bfloat16"), texts[:, PROMPT:]
    with torch.no_grad():
        plain = one_pass(model, texts)
        made = {name: f(model, texts) for name, f in CAUSES.items()}
        for way, name in ("eager", "attention as single operators"), ("float32", "float32"):
            made[name] = one_pass(model_of(args.layers, way), texts)
        made["sampler and trainer"] = None
        packed = made["packed into one row"]
    later = model.model.layers[-6:].requires_grad_(True)
    gain = advantages_of(rewards_of(args.layers, new))
    learned = logprobs(one_pass(model, texts), new)

    def gradient(weights):
        parts = torch.autograd.grad(
            learned, list(later.parameters()), weights * gain, retain_graph=True
        )
        return torch.cat([part.flatten().float() for part in parts])

    exact = gradient(torch.ones_like(learned))
    for name, logits in made.items():
        pair = (written, packed) if logits is None else (logits, plain)
        ratio = (logprobs(pair[1], new) - logprobs(pair[0], new)).exp()
        moved = float((gradient(clipped(ratio, gain)) - exact).norm() / exact.norm())
        yield {"cause": name, **compared(*pair, texts), "gradient": moved}
    later.requires_grad_(False)


#: Differences of which parts of the model are told apart.
APART = (
    "5 columns of padding",
    "packed into one row",
    "cache, token by token",
    "cache, 8 tokens at a time",
)


@study.table(part=PART)
def parts(args):
    """Logits that a pass changes, where attention or products alone add in a fixed order."""
    texts, _ = sampled(args.layers, args.texts, args.tokens, "bfloat16")
    texts = texts[: max(args.texts // 2, 1)]
    fixed = model_of(args.layers, "invariant")
    attention = copy.deepcopy(model_of(args.layers, "bfloat16"))
    attention.set_attn_implementation("roundoff")
    products = copy.deepcopy(fixed)
    products.set_attn_implementation("sdpa")
    ways = {"nothing": model_of(args.layers, "bfloat16"), "products": products}
    for name, model in (ways | {"attention": attention, "both": fixed}).items():
        with torch.no_grad():
            plain = one_pass(model, texts)
            made = {cause: CAUSES[cause](model, texts) for cause in APART}
        for cause, logits in made.items():
            changed = float((logits != plain).float().mean())
            kept = {"cause": cause, "fixed": name, "logits": changed}
            yield kept | compared(logits, plain, texts)


# --- Cures. --------------------------------------------------------------------------------------


@study.table(part=PART)
def cures(args):
    """Sampler with a cache against trainer in one packed row, each with its own texts."""
    given = {"bfloat16": args.tokens, "float16": args.half, "invariant": args.tokens}
    for way, tokens in given.items():
        texts, written = sampled(args.layers, args.texts, tokens, way)
        with torch.no_grad():
            read = train(model_of(args.layers, way), texts)
        yield {"way": way, **compared(written, read, texts)}


def step_of(model: Any, texts: torch.Tensor, logits: torch.Tensor, cure: str = ""):
    """A training step: one packed pass, its gradients, and a pass before for recomputing.

    ``logits`` are the sampler's, for importance weights.
    """
    model, new = copy.deepcopy(model).requires_grad_(True), texts[:, PROMPT:]
    written = logprobs(logits, new)

    def step():
        if cure == "recomputed":
            with torch.no_grad():
                logprobs(train(model, texts), new)
        learned = logprobs(train(model, texts), new)
        if cure == "importance weights":
            learned = (learned.detach() - written).exp().clamp(max=LARGEST) * learned
        learned.mean().backward()
        model.zero_grad()

    return step


@study.table(part=PART, times=["ratio", "low", "high"])
def prices(args):
    """Times of sampling and of a training step over torch's in bfloat16; of two texts on a CPU."""
    layers = args.layers if GPU else min(args.layers, 6)
    prompts = asked(args.layers, args.texts if GPU else 1 if quick else 2)
    ways = {way: model_of(layers, way) for way in ("bfloat16", "float16", "invariant")}
    tokens, least = (2, 2) if quick else (args.tokens if GPU else 8, 5)
    writes = {
        way: functools.partial(torch.no_grad()(sample), model, prompts, tokens)
        for way, model in ways.items()
    }
    texts, logits = writes["bfloat16"]()
    if quick:
        del ways["float16"]  # its gradients take longer than all the rest
    steps = {way: step_of(model, texts, logits) for way, model in ways.items()}
    for cure in "recomputed", "importance weights":
        steps[cure] = step_of(ways["bfloat16"], texts, logits, cure)
    clock = time.perf_counter if GPU else time.process_time
    measured = {"sampling": (writes, least), "training step": (steps, 5 * least if GPU else least)}
    for what, (calls, rounds) in measured.items():
        limits = {"warmup": 0 if quick else 1, "min_rounds": rounds, "max_rounds": rounds}
        found = measure(calls, clock=clock, device=DEVICE, **limits).ratios()
        for row in found.to_dict("records"):
            kept = {name: row[name] for name in ("ratio", "low", "high")}
            yield {"what": what, "way": row["label"], **kept}


# --- Short runs of policy gradient. --------------------------------------------------------------


def policy_gradient(model: Any, way: str, steps: int, args: Any, seed: int):
    """Each step: write texts, reward beginnings of words, update; the numbers of each step.

    The embedding, which is the last product's weight, too, stays as it is. The optimizer updates
    float32 copies of the other weights.
    """
    layers = args.layers
    learning = list(model.model.layers.requires_grad_(True).parameters())
    masters = [p.detach().float() for p in learning]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0)
    for step in range(steps):
        with torch.no_grad():
            prompts = asked(layers, args.texts)
            texts, logits = sample(model, prompts, args.written, seed=1000 * seed + step)
        new = texts[:, PROMPT:]
        rewards = rewards_of(layers, new)
        gain = advantages_of(rewards)
        written, learned = logprobs(logits, new), logprobs(train(model, texts), new)
        ratio = (learned.detach() - written).exp()
        (-weights_of(way, ratio, gain) * gain * learned).mean().backward()
        for p, master in zip(learning, masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        for p, master in zip(learning, masters, strict=True):
            p.data.copy_(master)
        model.zero_grad()
        yield {
            "step": step,
            "reward": float(rewards.mean()),
            "tokens": new.numel(),
            "different": int((ratio != 1).sum()),
            "KL": float((ratio - 1 - ratio.log()).mean()),
            "outside": float(((ratio - 1).abs() > LIMIT).float().mean()),
        }


WAYS = ("clipped", "recomputed", "importance weights", "invariant")


@study.table(part=PART)
def runs(args):
    """Policy gradient with the first two layers: each step of each seed and way."""
    for seed in range(args.seeds):
        for way in WAYS:
            model = model_of(min(args.layers, 2), "invariant" if way == "invariant" else "bfloat16")
            for row in policy_gradient(copy.deepcopy(model), way, args.steps, args, seed):
                yield {"way": way, "seed": seed, **row}


#: Texts read with a cache at a time, and tokens of each at a time.
BATCHES, CHUNKS = ((1, 2), (1, 2)) if quick else ((1, 3, 8, 17, 32), (1, 4, 16, 64))


@study.table(part=PART)
def updated(args):
    """After updates: each token by a cache, in batches and chunks, against one packed pass.

    A pass of few tokens reads a single batch of texts; longer ones read all texts.
    """
    for way in ("clipped", "invariant"):
        model = copy.deepcopy(model_of(args.layers, "bfloat16" if way == "clipped" else way))
        few = argparse.Namespace(**{**vars(args), "written": min(args.written, 16)})
        for _ in policy_gradient(model, way, args.updates, few, seed=0):
            pass
        rounds = [sample(model, asked(args.layers, args.texts), args.tokens, s) for s in (1, 2)]
        texts = torch.cat([ids for ids, _ in rounds])
        new = texts[:, PROMPT:]
        with torch.no_grad():
            by_trainer = torch.cat([logprobs(train(model, t), t[:, PROMPT:]) for t, _ in rounds])
            by_sampler = logprobs(torch.cat([logits for _, logits in rounds]), new)
        kept = {"way": way, "updates": args.updates}
        yield kept | {"batch": args.texts, "chunk": 1} | apart(by_sampler, by_trainer)
        for batch, chunk in product(BATCHES, CHUNKS) if way == "invariant" else ():
            some = texts if batch * chunk >= 32 else texts[:batch]
            with torch.no_grad():
                read = [
                    logprobs(in_chunks(model, t, chunk), t[:, PROMPT:]) for t in some.split(batch)
                ]
            yield kept | {"batch": batch, "chunk": chunk} | apart(torch.cat(read), by_trainer)


def apart(of: torch.Tensor, by: torch.Tensor) -> dict[str, Any]:
    """Tokens, how many of their log-probabilities differ, and an estimate of KL."""
    log_ratio = by[: len(of)] - of
    return {
        "tokens": of.numel(),
        "different": int((log_ratio != 0).sum()),
        "KL": float((log_ratio.exp() - 1 - log_ratio).mean()),
    }


# --- Values: what pages may print. Name, datum and statistic, table, column; rows; a test. -------


def mean_interval(values: pd.Series) -> list[float]:
    """The mean over seeds, and its interval of 95 % by Student's t."""
    half = t.ppf(0.975, len(values) - 1) * values.std() / len(values) ** 0.5
    return [values.mean(), values.mean() - half, values.mean() + half]


OUTSIDE = "importance ratios outside [0.9, 1.1], SmolLM2-135M, bfloat16"
WHOLE = {"cause": "sampler and trainer"}
study.value(
    "total.outside",
    f"share of {OUTSIDE}: sampler with a cache and padding, trainer with packed texts",
    "causes",
    "outside",
    where=WHOLE,
    interval=("low", "high"),
    test=lambda v: v.low > 0.05 and v.high < 0.15,
)
study.value(
    "total.gradient",
    "norm of the change of PPO's gradient in the last six layers, over the gradient's norm, by the "
    "ratios of sampler and trainer, limit 0.1",
    "causes",
    "gradient",
    where=WHOLE,
    test=lambda v: 0.2 < v.value < 0.5,
)


def changed_by(rows: pd.DataFrame, cause: str, part: str) -> float:
    """The share of the logits that a cause changes where this part adds in a fixed order."""
    return float(rows.set_index(["cause", "fixed"])["logits"][cause, part])


def most_changed(rows: pd.DataFrame) -> float:
    """The largest share of the logits that any cause changes."""
    return float(rows["logits"].max())


study.value(
    "parts.attention",
    "largest share of the logits that padding, packing or a cache changes where attention alone "
    "adds in a fixed order, SmolLM2-135M, bfloat16",
    "parts",
    most_changed,
    where={"fixed": "attention"},
    test=lambda v: v.value == 0 and set(v.rows["cause"]) == set(APART),
)
study.value(
    "parts.products",
    "share of the logits that a cache changes, token by token, where products alone add in a fixed "
    "order, SmolLM2-135M, bfloat16",
    "parts",
    functools.partial(changed_by, cause="cache, token by token", part="products"),
    test=lambda v: v.value > 0.5,
)
study.value(
    "float16.outside",
    "share of importance ratios outside [0.9, 1.1], SmolLM2-135M, float16 on both sides",
    "cures",
    "outside",
    where={"way": "float16"},
    test=lambda v: v.value == 0 and v.rows["largest ratio"].iloc[0] < 1.1,
)
for name, what, way, low, high in (
    ("step", "training step", "invariant", 0.9, 2.5),
    ("sampling", "sampling", "invariant", 0.6, 1.7),
    ("recomputed", "training step", "recomputed", 1, 1.6),
    ("weighted", "training step", "importance weights", 0.9, 1.1),
    ("half", "training step", "float16", 20, 80),
):
    study.value(
        f"price.{name}",
        f"time of {'a ' * (what != 'sampling')}{what}, {way}, over torch's in bfloat16: processor "
        "time of six layers of SmolLM2 and two texts; on a GPU all layers and 64 texts",
        "prices",
        "ratio",
        where={"what": what, "way": way},
        interval=("low", "high"),
        test=lambda v, low=low, high=high: bool(v.low and low < v.low and v.high < high),
    )


for name, column in ("different", "different"), ("tokens", "tokens"):
    study.value(
        f"updated.{name}",
        "log-probabilities that differ"
        + ", of so many" * (name == "tokens")
        + ", roundoff.invariant after updates: a cache, batches of 1 to 64, chunks of 1 to 64 "
        "tokens, against one packed pass",
        "updated",
        lambda t, column=column: t[column].sum(),
        where={"way": "invariant"},
        test=lambda v: bool(
            (v.rows["different"] == 0).all()
            and v.rows["tokens"].sum() >= 100_000
            and (v.rows["updates"] == 50).all()
        ),
        on="nvidia-h100-80gb-hbm3",
    )


def by_run(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """The mean of a column over the steps of each run: seeds down, ways across."""
    return rows.pivot_table(index="seed", columns="way", values=column)


def rewards_apart(rows: pd.DataFrame, way: str) -> list[float]:
    """Reward of the runs of one way over that of the invariant ones, by seed, with interval."""
    reward = by_run(rows, "reward")
    return mean_interval(reward[way] / reward["invariant"])


for name, way in ("reward", "clipped"), ("weighted", "importance weights"):
    study.value(
        f"runs.{name}",
        f"reward of a run ({way}) over that of a run with roundoff.invariant, mean of the steps, "
        "over seeds",
        "runs",
        functools.partial(rewards_apart, way=way),
        where={"way": [way, "invariant"]},
        test=lambda v: v.low is not None and 0.95 < v.low < 1 < v.high < 1.05,
    )
study.value(
    "runs.seeds",
    "runs of each way",
    "runs",
    lambda rows: rows["seed"].nunique(),
    test=lambda v: bool(
        v.value == v.rows["seed"].max() + 1 >= 4 and (by_run(v.rows, "KL")["invariant"] == 0).all()
    ),
)

if __name__ == "__main__":
    study.main()
