"""The study behind "Why do my trainer's log-probabilities differ from the sampler's?".

SmolLM2-135M-Instruct continues eight passages. A sampler writes token by token with a cache, in a
padded batch. A trainer reads all texts in one packed row. Measured are the log-probabilities of
the same tokens by both, what each of their differences adds, the cures with their times, and short
runs of policy gradient.

The page tells the story with small experiments. This file measures more tokens, writes the record,
and defines each number that the page may print.

    python studies/trainer_sampler.py --record
"""

import copy
import functools
import time
from itertools import product

import numpy as np
import pandas as pd
import torch
from scipy.stats import bootstrap, ttest_1samp
from torch.nn.functional import linear, pad

import roundoff
from roundoff.models import PASSAGES, load_trained, padded
from roundoff.page.measurement import Study
from roundoff.script import unit_test_going
from roundoff.timing import measure

quick, GPU = unit_test_going(), torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
study = Study(
    "plot_trainer_sampler",
    "Log-probabilities of the same tokens by a sampler and by a trainer.",
    on="amd-epyc-2-cores",
    part="gpu" if GPU else "cpu",
)
LAYERS, PROMPT, COLUMNS = 1 if quick else 30, 40, 5  # tokens of a passage, padding of the sampler
LIMIT, LARGEST = 0.1, 2  # of a clipped ratio, of an importance weight
#: Texts, their tokens, those in float16; of the runs seeds, steps and tokens of each text.
if quick:
    TEXTS, TOKENS, HALF, SEEDS, STEPS, WRITTEN = 2, 4, 2, 2, 1, 2
elif GPU:
    TEXTS, TOKENS, HALF, SEEDS, STEPS, WRITTEN = 64, 64, 64, 16, 20, 64
else:
    TEXTS, TOKENS, HALF, SEEDS, STEPS, WRITTEN = 8, 48, 16, 4, 6, 16


# --- Sampler and trainer, as the page has them. --------------------------------------------------


@functools.cache
def trained(layers=LAYERS):
    """The model as it is read, with so many layers."""
    return load_trained(layers=layers)


def asked(count):
    """The beginnings of passages, again from the first where there are more texts."""
    texts = (PASSAGES[i % len(PASSAGES)] for i in range(count))
    return [trained().tokenizer(text)["input_ids"][:PROMPT] for text in texts]


def logprobs(logits, tokens):
    """The log-probability of each token."""
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def sample(model, prompts, tokens, seed=0):
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


def train(model, texts):
    """Logits of the new tokens: all texts in one row, each with positions of its own."""
    count, length = texts.shape
    places = torch.arange(length, device=texts.device).repeat(count)[None]
    logits = model(texts.reshape(1, -1), position_ids=places, use_cache=False).logits
    return logits.view(count, length, -1)[:, PROMPT - 1 : -1]


def one_pass(model, texts, columns=0):
    """Logits of the new tokens: a batch in one pass, with columns of padding."""
    mask = pad(torch.ones_like(texts), (columns, 0))
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0)}
    wide = pad(texts, (columns, 0))
    logits = model(wide, use_cache=False, **(given if columns else {})).logits
    return logits[:, columns + PROMPT - 1 : -1]


def in_chunks(model, texts, size):
    """Logits of the new tokens: the prompt first, then so many tokens at a time, with a cache."""
    cache, made = None, []
    for part in texts[:, :PROMPT], *texts[:, PROMPT:].split(size, 1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache, made = out.past_key_values, [*made, out.logits]
    return torch.cat(made, 1)[:, PROMPT - 1 : -1]


def wide_head(model, texts):
    """Logits of the new tokens: one pass, the last product in float32."""
    hidden = model.model(texts, use_cache=False).last_hidden_state[:, PROMPT - 1 : -1]
    return linear(hidden.float(), model.lm_head.weight.float())


def rewards_of(tokens):
    """The share of a text's new tokens that begin with a space: those that begin a word."""
    words = trained().tokenizer.batch_decode(tokens.reshape(-1, 1))
    begins = torch.tensor([word.startswith(" ") for word in words], device=tokens.device)
    return begins.view(tokens.shape).float().mean(1)


def advantages_of(rewards):
    """Rewards, less their mean, over their deviation; one for each text."""
    return ((rewards - rewards.mean()) / (rewards.std() + 1e-6))[:, None]


def clipped(ratio, gain):
    """The weight of each token in PPO's gradient: its ratio, or 0 beyond the limit."""
    beyond = torch.where(gain > 0, ratio > 1 + LIMIT, ratio < 1 - LIMIT)
    return ratio.masked_fill(beyond, 0)


def weights_of(way, ratio, gain):
    """The weight of each token in the gradient, by the trainer's cure."""
    return ratio.clamp(max=LARGEST) if way == "importance weights" else clipped(ratio, gain)


# --- What differs. -------------------------------------------------------------------------------


@functools.cache
def model_of(way, layers=LAYERS):
    """The model by type, or as ``roundoff.invariant`` changes it."""
    if way == "invariant":
        return roundoff.invariant(copy.deepcopy(model_of("bfloat16", layers)))
    if way == "eager":
        return trained(layers).model(torch.bfloat16, "eager", DEVICE)
    return trained(layers).model(getattr(torch, way), device=DEVICE)


@functools.cache
def sampled(way, tokens=TOKENS):
    """Texts of a model, and their logits."""
    with torch.no_grad():
        return sample(model_of(way), asked(TEXTS), tokens)


def compared(of, by, texts):
    """Logits of a sampler and of a trainer: what differs, for the tokens written."""
    new = texts[:, PROMPT:]
    p, q = (z.float().log_softmax(-1) for z in (of, by))
    log_ratio = logprobs(by, new) - logprobs(of, new)
    ratio = log_ratio.exp()
    outside = ((ratio - 1).abs() > LIMIT).double()
    each = outside.mean(1).cpu().numpy()  # a share for each text
    ends = bootstrap((each,), np.mean, rng=0, method="percentile").confidence_interval
    return {
        "different": int((log_ratio != 0).sum()),
        "KL": float((p.exp() * (p - q)).sum(-1).mean()),
        "outside": float(outside.mean()),
        "low": float(ends.low),
        "high": float(ends.high),
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


@study.table()
def causes(args):
    """One change at a time, against one pass of the batch in bfloat16."""
    texts, written = sampled("bfloat16")
    model, new = model_of("bfloat16"), texts[:, PROMPT:]
    with torch.no_grad():
        plain = one_pass(model, texts)
        pairs = {name: (f(model, texts), plain) for name, f in CAUSES.items()}
        for way, name in ("eager", "attention as single operators"), ("float32", "float32"):
            pairs[name] = one_pass(model_of(way), texts), plain
        pairs["sampler and trainer"] = written, pairs["packed into one row"][0]
    later = model.model.layers[-6:].requires_grad_(True)
    gain = advantages_of(rewards_of(new))
    learned = logprobs(one_pass(model, texts), new)

    def gradient(weights):
        parts = torch.autograd.grad(
            learned, list(later.parameters()), weights * gain, retain_graph=True
        )
        return torch.cat([part.flatten().float() for part in parts])

    exact = gradient(torch.ones_like(learned))
    for name, (of, by) in pairs.items():
        ratio = (logprobs(by, new) - logprobs(of, new)).exp()
        moved = float((gradient(clipped(ratio, gain)) - exact).norm() / exact.norm())
        yield {"cause": name, **compared(of, by, texts), "gradient": moved}
    later.requires_grad_(False)


#: Differences of which parts of the model are told apart.
APART = (
    "5 columns of padding",
    "packed into one row",
    "cache, token by token",
    "cache, 8 tokens at a time",
)


@study.table()
def parts(args):
    """Logits that a pass changes, where attention or products alone add in a fixed order."""
    texts = sampled("bfloat16")[0][: TEXTS // 2]
    attention, products = (copy.deepcopy(model_of(way)) for way in ("bfloat16", "invariant"))
    attention.set_attn_implementation("roundoff")
    products.set_attn_implementation("sdpa")
    for name, model in {"products": products, "attention": attention}.items():
        with torch.no_grad():
            expected = one_pass(model, texts)
            for cause in APART:
                changed = float((CAUSES[cause](model, texts) != expected).float().mean())
                yield {"cause": cause, "fixed": name, "logits": changed}


# --- Cures. --------------------------------------------------------------------------------------


@study.table()
def cures(args):
    """Sampler with a cache against trainer in one packed row, each with its own texts."""
    for way, tokens in {"bfloat16": TOKENS, "float16": HALF, "invariant": TOKENS}.items():
        texts, written = sampled(way, tokens)
        with torch.no_grad():
            read = train(model_of(way), texts)
        yield {"way": way, **compared(written, read, texts)}


def step_of(model, texts, logits, cure=""):
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


@study.table(times=["ratio", "low", "high"])
def prices(args):
    """Times of sampling and of a training step over torch's in bfloat16; of two texts on a CPU."""
    layers = LAYERS if GPU else min(LAYERS, 6)
    prompts = asked(TEXTS if GPU else 1 if quick else 2)
    tokens, rounds = (2, 2) if quick else (TOKENS if GPU else 8, 5)
    ways = {way: model_of(way, layers) for way in ("bfloat16", "float16", "invariant")}
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
    timed = functools.partial(
        measure,
        clock=time.perf_counter if GPU else time.process_time,
        device=DEVICE,
        warmup=0 if quick else 1,
    )
    found = {"sampling": timed(writes, min_rounds=rounds, max_rounds=rounds)}
    rounds *= 5 if GPU else 1
    found["training step"] = timed(steps, min_rounds=rounds, max_rounds=rounds)
    rows = pd.concat([times.ratios().assign(what=what) for what, times in found.items()])
    return rows.rename(columns={"label": "way"})


# --- Short runs of policy gradient. --------------------------------------------------------------


def policy_gradient(model, way, steps, written, seed):
    """Each step: write texts, reward beginnings of words, update; the numbers of each step.

    The embedding, which is the last product's weight, too, stays as it is. The optimizer updates
    float32 copies of the other weights.
    """
    learning = list(model.model.layers.requires_grad_(True).parameters())
    masters = [p.detach().float() for p in learning]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0)
    for step in range(steps):
        with torch.no_grad():
            texts, logits = sample(model, asked(TEXTS), written, seed=1000 * seed + step)
        new = texts[:, PROMPT:]
        rewards = rewards_of(new)
        gain = advantages_of(rewards)
        by_sampler, learned = logprobs(logits, new), logprobs(train(model, texts), new)
        log_ratio = learned.detach() - by_sampler
        (-weights_of(way, log_ratio.exp(), gain) * gain * learned).mean().backward()
        for p, master in zip(learning, masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        for p, master in zip(learning, masters, strict=True):
            p.data.copy_(master)
        model.zero_grad()
        yield {"step": step, "reward": float(rewards.mean()), **apart(log_ratio)}


def apart(log_ratio):
    """Tokens, how many of their log-probabilities differ, and an estimate of KL."""
    return {
        "tokens": log_ratio.numel(),
        "different": int((log_ratio != 0).sum()),
        "KL": float((log_ratio.exp() - 1 - log_ratio).mean()),
    }


@study.table()
def runs(args):
    """Policy gradient with the first two layers: each step of each seed and way."""
    for seed in range(SEEDS):
        for way in "clipped", "importance weights", "invariant":
            model = model_of("invariant" if way == "invariant" else "bfloat16", min(LAYERS, 2))
            for row in policy_gradient(copy.deepcopy(model), way, STEPS, WRITTEN, seed):
                yield {"way": way, "seed": seed, **row}


@study.table()
def updated(args):
    """After updates: each token by a cache, in batches and chunks, against one packed pass.

    A pass of few tokens reads a single batch of texts; longer ones read all texts.
    """
    model, updates = copy.deepcopy(model_of("invariant")), 1 if quick else 50 if GPU else 2
    for _ in policy_gradient(model, "invariant", updates, min(WRITTEN, 16), seed=0):
        pass
    rounds = [sample(model, asked(TEXTS), TOKENS, seed) for seed in (1, 2)]
    texts = torch.cat([ids for ids, _ in rounds])

    def compare(batch, chunk, read):
        kept = {"way": "invariant", "updates": updates, "batch": batch, "chunk": chunk}
        return kept | apart(by_trainer[: len(read)] - read)

    with torch.no_grad():
        by_trainer = torch.cat([logprobs(train(model, t), t[:, PROMPT:]) for t, _ in rounds])
        by_sampler = torch.cat([logits for _, logits in rounds])
        yield compare(TEXTS, 1, logprobs(by_sampler, texts[:, PROMPT:]))
        for batch, chunk in product((1, 3, 8, 17, 32)[: 2 if quick else 5], (1, 4, 16, 64)):
            some = texts if batch * chunk >= 32 else texts[:batch]
            read = [logprobs(in_chunks(model, t, chunk), t[:, PROMPT:]) for t in some.split(batch)]
            yield compare(batch, chunk, torch.cat(read))


# --- Values: what pages may print. Name, datum and statistic, table, column; rows; a test. -------


def mean_interval(values):
    """The mean over seeds, and its interval of 95 % by Student's t."""
    return [values.mean(), *ttest_1samp(values, 0).confidence_interval()]


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


study.value(
    "parts.attention",
    "largest share of the logits that padding, packing or a cache changes where attention alone "
    "adds in a fixed order, SmolLM2-135M, bfloat16",
    "parts",
    lambda rows: rows["logits"].max(),
    where={"fixed": "attention"},
    test=lambda v: v.value == 0 and set(v.rows["cause"]) == set(APART),
)
study.value(
    "parts.products",
    "share of the logits that a cache changes, token by token, where products alone add in a fixed "
    "order, SmolLM2-135M, bfloat16",
    "parts",
    "logits",
    where={"fixed": "products", "cause": "cache, token by token"},
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
        test=lambda v, low=low, high=high: low < v.low and v.high < high,
    )


for column, about in (
    ("different", "log-probabilities that differ"),
    ("tokens", "log-probabilities that differ, of so many"),
):
    study.value(
        f"updated.{column}",
        f"{about}, roundoff.invariant after updates: a cache, batches of 1 to 64, chunks of 1 to "
        "64 tokens, against one packed pass",
        "updated",
        lambda t, column=column: t[column].sum(),
        where={"way": "invariant"},
        test=lambda v: (
            (v.rows["different"] == 0).all()
            and v.rows["tokens"].sum() >= 100_000
            and (v.rows["updates"] == 50).all()
        ),
        on="nvidia-h100-80gb-hbm3",
    )


def by_run(rows, column):
    """The mean of a column over the steps of each run: seeds down, ways across."""
    return rows.pivot_table(index="seed", columns="way", values=column)


def rewards_apart(rows, way):
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
        test=lambda v: 0.95 < v.low < 1 < v.high < 1.05,
    )
study.value(
    "runs.seeds",
    "runs of each way",
    "runs",
    lambda rows: rows["seed"].nunique(),
    test=lambda v: (
        v.value == v.rows["seed"].max() + 1 >= 4 and (by_run(v.rows, "KL")["invariant"] == 0).all()
    ),
)

if __name__ == "__main__":
    study.main()
