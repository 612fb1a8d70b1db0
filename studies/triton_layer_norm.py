"""The study behind "Which LayerNorm kernel is fastest on my GPU?".

The forward and the backward of six implementations at 35 widths, of other types and numbers of
rows: rates beside those of a stream, errors against float64, different results of a hundred runs,
and calls with their launches.

The page tells the story with small experiments. This file measures the full grid, writes the
record, and defines each number that the page may print.

    python studies/triton_layer_norm.py --record
"""

import runpy
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

import pandas as pd
import torch
from torch.nn import functional

from roundoff.compare import scaled_error
from roundoff.kernels import interpreting, layer_norm, lessons, shuffled_programs
from roundoff.kernels.baselines import LayerNorm, layer_norms
from roundoff.page.measurement import Study
from roundoff.timing import copies, measure

gpu = torch.cuda.is_available() and not interpreting()
device = "cuda" if gpu else "cpu"
study = Study(
    "plot_triton_layer_norm",
    "LayerNorm of six libraries: rates, errors, different results, launches.",
    on="nvidia-h200",
    part="gpu" if gpu else "cpu",
)
ROWS = 4096
EPS = 1e-5
RATES = ["roundoff", "torch", "inductor", "Liger", "QuACK", "flash-linear-attention"]
TYPES = (torch.float16, torch.bfloat16, torch.float32)

norms, _ = layer_norms(device)

#: The page's ``one_block``: where rows are written step by step, it is the step in two stages.
LADDER = runpy.run_path(str(Path(__file__).with_name("layer_norm_ladder.py")))
inputs = LADDER["inputs"]
LESSON = LayerNorm(
    norms["roundoff"].forward,
    lambda dy, x, w, b, stats: LADDER["backward"]("two stages", dy, x, w, stats),
)


def truth(x, dy, w, b):
    """y, dx, dw and db in float64."""
    x, w, b = leaves = [t.double().requires_grad_() for t in (x, w, b)]
    y = functional.layer_norm(x, w.shape, w, b, EPS)
    gradients = torch.autograd.grad(y, leaves, dy.double())
    return dict(zip(("y", "dx", "dw", "db"), (y.detach(), *gradients), strict=True))


def calls(norm, x, dy, w, b):
    """A forward, and the backward of what it saved."""
    w, b = (t.to(norm.weights or t.dtype) for t in (w, b))
    forward = partial(norm.forward, x, w, b, EPS)
    return forward, partial(norm.backward, dy, x, w, b, *forward()[1:])


def typical(exact, forward, backward, dtype):
    """Typical errors of y, dx, dw and db."""
    results = zip(exact.items(), (forward()[0], *backward()), strict=True)
    return {name: scaled_error(e, t.to(dtype), dtype=dtype).rms for (name, e), t in results}


# --- Different results of many runs: two stages, libraries, and a lock. --------------------------

SHAPES = [(4096, 1024), (4096, 4096), (4096, 8704), (1000, 15872)] if gpu else [(24, 64)]
RUNS = 100 if gpu else 3


def count(call):
    """How many different results the runs give, for each tensor."""
    seen = {}
    for run in range(RUNS):
        with nullcontext() if gpu else shuffled_programs(run):
            results = call()
        for place, t in enumerate(results):
            bits, known = t.contiguous().view(torch.uint8), seen.setdefault(place, [])
            if not any(torch.equal(bits, other) for other in known):
                known.append(bits)
    return [len(known) for known in seen.values()]


@study.table(times=["dw"])
def patterns(args):
    """Different results of float16 in 100 runs (interpreted 3), and the error of dw in one."""
    for m, n in SHAPES:
        [(x, dy)], w, b = inputs(m, n, torch.float16)
        exact = truth(x, dy, w, b)["dw"]
        for label, norm in norms.items():
            call = calls(norm, x, dy, w, b)[1]
            row = {"shape": f"{m} × {n}", "implementation": label}
            row |= dict(zip(("dx", "dw", "db"), count(call), strict=True))
            yield row | {"rms error": scaled_error(exact, call()[1].half()).rms}
        mean, rstd = norms["roundoff"].forward(x, w, b, EPS)[1]
        groups = None if gpu else max(1, m // 16)  # 16 rows or more in each
        locked = partial(lessons.locked, dy, x, mean, rstd, groups)
        row = {"shape": f"{m} × {n}", "implementation": "lock and barrier"}
        yield row | {"dw": count(lambda locked=locked: [locked()])[0]}


# --- Errors against float64. ---------------------------------------------------------------------


@study.table()
def accuracy(args):
    """Errors in ε × RMS of the truth: 4096 × 8192, interpreted 12 × 96."""
    m, n = (4096, 8192) if gpu else (12, 96)
    for dtype in TYPES:
        [(x, dy)], w, b = inputs(m, n, dtype)
        exact = truth(x, dy, w, b)
        found = {of: typical(exact, *calls(norm, x, dy, w, b), dtype) for of, norm in norms.items()}
        for result in exact:
            row = {"dtype": str(dtype).removeprefix("torch."), "result": result}
            yield row | {f"{label} RMS": found.get(label, {}).get(result) for label in RATES}


# --- Rates, beside those of a stream with the same reads and writes. -----------------------------


def compare(m, n, dtype, labels):
    """For each direction: GB/s, our share of the ceiling, and our rate over the best baseline's."""
    size = m * n * dtype.itemsize
    pairs, w, b = inputs(m, n, dtype, copies(3 * size, device, most=16))
    exact, ways = truth(*pairs[0], w, b), {}
    for label in labels:
        norm = LESSON if label == "lesson" else norms[label]
        try:
            made = [calls(norm, *pair, w, b) for pair in pairs]
            right = max(typical(exact, *made[0], dtype).values()) < 16
        except Exception as error:  # another's limit: a block of 64 KiB, for instance
            print(f"{label} does not take {m} × {n}: {error}")
            continue
        if right:
            ways[label] = made
        else:
            print(f"{label} is not timed, its result is wrong: {m} × {n}")
    for place, direction in enumerate(("forward", "backward")):
        timed = {label: [way[place] for way in each] for label, each in ways.items()}
        if direction == "forward":
            timed.pop("lesson", None)  # it has roundoff's
        found = LADDER["timed"](direction, timed, pairs, 0.2)
        rates = found.frame.set_index("label")["gb_s"].to_dict()
        row = {"direction": direction, "M": m, "N": n} | rates
        if "roundoff" in rates:
            others = set(rates) - {"roundoff", "lesson", "ceiling"}
            best = max(others, key=rates.__getitem__)
            lead = found.ratio(best, "roundoff")
            row |= {"of ceiling": rates["roundoff"] / rates["ceiling"], "best": best}
            row |= {"lead": lead.value, "lead low": lead.low, "lead high": lead.high}
        yield row


TELLING = [1024, 4096, 8192, 8704, 12288, 15872]
WIDE = [16384, 24576, 32768, 65536, 131072]
WIDTHS = [*range(1024, 15873, 512), *WIDE] if gpu else [256]
ALL = list(norms) if gpu else ["torch"]
LEAD = ["best", "lead", "lead low", "lead high"]


@cache
def speed():
    """Both directions at every width; measured once."""
    rows = []
    for n in WIDTHS:
        # As many rows as make 256 MiB a tensor, and no more than those of the benchmark.
        m = min(ROWS, 2**27 // n) if gpu else 64
        # inductor and QuACK compile for each width: they run at eleven of 35.
        slow = () if n in TELLING + WIDE else ("inductor", "QuACK")
        labels = [label for label in ALL if label not in slow]
        if n in TELLING:
            labels.append("lesson")
        rows += compare(m, n, torch.float16, labels)
    columns = ["direction", "M", "N", *RATES, "lesson", "ceiling", "of ceiling", *LEAD]
    return pd.DataFrame(rows).reindex(columns=columns)


@study.table("layer-norm-backward", times=LEAD)
def backward(args):
    """GB/s of the backward in float16, and roundoff's share of the ceiling."""
    found = speed()
    return found[found["direction"] == "backward"].drop(columns="direction")


@study.table("layer-norm-forward", times=LEAD)
def forward(args):
    """GB/s of the forward in float16, and roundoff's rate over the best baseline's."""
    found = speed()
    return found[found["direction"] == "forward"].drop(columns=["direction", "lesson"])


CASES = [
    (torch.bfloat16, 4096, 8192),
    (torch.float32, 4096, 8192),
    (torch.float32, 4096, 15872),
    (torch.float16, 256, 4096),
    (torch.float16, 16384, 4096),
    (torch.float16, 4096, 24576),
    (torch.float32, 4096, 32768),
]
if not gpu:
    CASES = [(torch.float32, 64, 256)]


@study.table(times=LEAD)
def types(args):
    """Other types, numbers of rows and widths."""
    rows = []
    for dtype, m, n in CASES:
        name = str(dtype).removeprefix("torch.")
        for row in compare(m, n, dtype, ALL):
            rows.append({"case": f"{row['direction']}, {name}, {m} × {n}"} | row)
    columns = ["case", "direction", *RATES, "ceiling", "of ceiling", *LEAD]
    return pd.DataFrame(rows).reindex(columns=columns)


# --- Calls as a user writes them, launches included. ---------------------------------------------


@study.table(times=["× torch", "low", "high"])
def launches(args):
    """Time of a call over torch's, launches included: float16, 4096 × 1024."""
    m, n = (ROWS, 1024) if gpu else (16, 64)
    [(x, dy)], w, b = inputs(m, n, torch.float16)
    leaves = [t.requires_grad_() for t in (x, w, b)]

    def call(norm):
        torch.autograd.grad(norm(x, (n,), w, b), leaves, dy)

    contenders = {"torch": functional.layer_norm} | ({"roundoff": layer_norm} if gpu else {})
    found = measure(
        {label: partial(call, norm) for label, norm in contenders.items()},
        device=device,
        budget_s=1 if gpu else 0.05,
        min_rounds=10 if gpu else 3,
    )
    frame = found.ratios("torch").rename(columns={"label": "implementation", "ratio": "× torch"})
    return frame.assign(call="forward and backward")


# --- Values: what pages may print. Name, datum and statistic, table, column; rows; a test. -------

#: Widths at which the dw of every implementation was compared with float64 in the same run.
COMPARED = [1024, 4096, 8192, 8704, 15872]
ENDS = ("lead low", "lead high")
WORDS = ("slower", "faster")


def least(t):
    """The smallest lead, with its interval."""
    return t.sort_values("lead")[["lead", *ENDS]].iloc[0].tolist()


def most(t):
    """The largest lead, with its interval."""
    return t.sort_values("lead")[["lead", *ENDS]].iloc[-1].tolist()


for name, statistic in (("backward.least", least), ("backward.most", most)):
    study.value(
        name,
        f"{statistic.__name__} rate of roundoff's backward over that of the best of five "
        "libraries, float16, 4096 rows of 1024, 4096, 8192, 8704 and 15,872 columns",
        "layer-norm-backward",
        statistic,
        where={"N": COMPARED, "lead": lambda s: s.notna()},
        test=lambda v: (v.rows["lead low"] > 1).all(),
    )
study.value(
    "forward.share",
    "rate of roundoff's forward over that of a stream that reads and writes one tensor, float16, "
    "4096 × 8192",
    "layer-norm-forward",
    "of ceiling",
    where={"N": 8192, "of ceiling": lambda s: s.notna()},
    test=lambda v: 0.9 < v.value < 1.05,
)
study.value(
    "forward.float16",
    "rate of roundoff's forward over that of the best of five libraries, float16, 4096 × 8192",
    "layer-norm-forward",
    "lead",
    interval=ENDS,
    where={"N": 8192, "lead": lambda s: s.notna()},
    words=WORDS,
    test=lambda v: 0.95 < v.value < 1.05,
)
study.value(
    "forward.least",
    "least rate of roundoff's forward over that of the best of five libraries, float16, 4096 rows "
    "of 1024, 4096, 8192, 8704 and 15,872 columns",
    "layer-norm-forward",
    least,
    where={"N": COMPARED, "lead": lambda s: s.notna()},
    test=lambda v: v.value > 0.95,
)
study.value(
    "forward.torch",
    "rate of roundoff's forward over that of torch's, float16, 4096 × 8192",
    "layer-norm-forward",
    lambda t: t["roundoff"] / t["torch"],
    where={"N": 8192, "ceiling": lambda s: s.notna()},
    test=lambda v: 1.5 < v.value < 2,
)
for direction, dtype, low in ("forward", "bfloat16", 0.95), ("backward", "float32", 1):
    study.value(
        f"{direction}.{dtype}",
        f"rate of roundoff's {direction} over that of the best of five libraries, {dtype}, "
        "4096 × 8192",
        "types",
        "lead",
        interval=ENDS,
        where={"case": f"{direction}, {dtype}, 4096 × 8192"},
        words=WORDS,
        test=lambda v, low=low: v.value > low,
    )
study.value(
    "launches",
    "time of roundoff's forward plus backward over torch's, launches included, float16, "
    "4096 × 1024",
    "launches",
    "× torch",
    interval=("low", "high"),
    where={"implementation": "roundoff", "call": "forward and backward"},
    words=("faster", "slower"),
    test=lambda v: v.low > 1,
)
study.value(
    "repeat",
    "most different results of dx, dw or db in 100 runs, six libraries, float16, four shapes",
    "patterns",
    lambda t: t[["dx", "dw", "db"]].max().max(),
    where={"implementation": RATES},
    test=lambda v: v.value == 1,
)
study.value(
    "lock",
    "different dw in 100 runs, the lock of Triton's tutorial with a barrier, float16, 4096 × 4096",
    "patterns",
    "dw",
    where={"implementation": "lock and barrier", "shape": "4096 × 4096"},
    test=lambda v: v.value > 50,
)
for name, kinds, words, low, high in (
    ("error", ["float32"], "float32", 0, 1),
    ("error.half", ["float16", "bfloat16"], "float16 and bfloat16", 0.99, 1.01),
):
    study.value(
        name,
        f"largest ratio of roundoff's typical error to torch's, y, dx, dw and db, {words}, "
        "4096 × 8192",
        "accuracy",
        lambda t: (t["roundoff RMS"] / t["torch RMS"]).max(),
        where={
            "dtype": kinds,
            "result": ["y", "dx", "dw", "db"],
            "inductor RMS": lambda s: s.notna(),
        },
        test=lambda v, low=low, high=high: low < v.value < high,
    )
for columns, low, high in (8192, 0.4, 0.7), (8704, 0.2, 0.38):
    study.value(
        f"liger.{columns}",
        f"GB/s of Liger's backward, float16, 4096 × {columns}; near half of the ceiling at 8192 "
        "columns, and near a quarter at 8704",
        "layer-norm-backward",
        "Liger",
        where={"N": columns, "ceiling": lambda s: s.notna()},
        test=lambda v, low=low, high=high: low < v.value / v.rows["ceiling"].iloc[0] < high,
    )
for columns in 8192, 8704, 15872:
    study.value(
        f"lesson.{columns}",
        f"GB/s of the page's kernel, 8 warps, float16, 4096 × {columns}; at 8192 columns it has "
        "more than 1.5 times the rate at 8704, and less than 1.4 times the rate at 15,872",
        "layer-norm-backward",
        lambda t, columns=columns: t.loc[t["N"] == columns, "lesson"].iloc[0],
        where={"N": [8192, 8704, 15872], "lesson": lambda s: s.notna()},
        test=lambda v: v.rows.set_index("N")["lesson"].pipe(
            lambda s: s[8192] > 1.5 * s[8704] and s[8192] < 1.4 * s[15872]
        ),
    )

if __name__ == "__main__":
    study.main()
