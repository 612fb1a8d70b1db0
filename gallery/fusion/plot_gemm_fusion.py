r"""
.. _gemm-fusion:

Is one large Gemm faster than two small ones?
=============================================

:math:`XY` and :math:`XZ` as two products, or as one, :math:`X[Y, Z]`: time, bits and errors, in
ONNX Runtime, PyTorch and inductor.

.. answer:: nvidia-h200

   * **For one token, yes, where the weights are joined before and some are narrow.** In ONNX
     Runtime one Gemm for queries, keys and values, and a Split, take :bound:`0.51 <narrow>` to
     :bound:`0.80 <narrow/2>` of the time of three. For a layer's gate and up weights it is
     :bound:`0.977 <precomputed>` to :bound:`0.985 <precomputed/2>` of the time of two, and
     :bound:`2.85 <inside>` to :bound:`3.87 <inside/2>` where they are joined at each run.
   * **For 4096 tokens, no**: in ONNX Runtime the Split costs more than the larger product gains,
     up to :bound:`1.15 <split/2>` times the time. Squares of 8192, without a Split, take
     :bound:`0.92 <large>` to :bound:`0.98 <large/2>` of it.
   * **Small sizes measure the host.** Replayed as a CUDA graph, two Gemms of side 256 take up to
     :bound:`0.42 <replay>` of the time of the plain call, less than one Gemm as called.

   .. code-block:: python

      weight = torch.cat([query, key, value], 1)  # once, before the first token
      q, k, v = (x @ weight).split(widths, 1)     # views: PyTorch's split copies nothing
"""

# %%
# Two Gemms, one with a Concat at each run, one with weights joined before
# ------------------------------------------------------------------------
#
# The three models that ONNX Runtime runs. *Fused inside* is what a fusion gives that treats
# weights as inputs; *precomputed* is what one gives that treats them as constants.

from functools import cache, partial
from typing import NamedTuple

import onnx.parser
import pandas as pd
import torch

from roundoff.compare import scaled_error
from roundoff.dtypes import DTYPES, onnx_dtype_to_torch_dtype
from roundoff.errors import ArgumentError, UnsupportedError
from roundoff.ort import available, session
from roundoff.page import Study
from roundoff.script import get_parsed_args, run_mode, unit_test_going, usage_error
from roundoff.timing import copies, free_memory, measure, pool, torch_precision

NAME = "plot_gemm_fusion"
quick = unit_test_going()
CONFIGS = {
    "small": (32, 64, 128) if quick else (256, 512, 1024),
    "medium": (512, 1024, 2048),
    "large": (1024, 2048, 4096, 8192),
    "full": (32, 64, 128) if quick else (256, 512, 1024, 2048, 4096, 8192),
}
cuda = torch.cuda.is_available() and bool(available(["CUDAExecutionProvider"]))
args = get_parsed_args(
    NAME,
    __doc__,
    config=("full" if cuda else "small", f"{', '.join(CONFIGS)}, or sizes such as 256,300"),
    itype=("1,10,16" if cuda else "1", "ONNX types: 1 (float32), 10 (float16), 16 (bfloat16)"),
    warmup=(3, "least calls before the first round"),
    repeat=(6, "least number of rounds"),
    budget=(0.0, "seconds to spend on a comparison; 0: chosen for the device"),
)


def numbers(option, text, allowed=None):
    """The whole numbers of an option, or a clear end."""
    wanted = f"some of {', '.join(map(str, allowed))}" if allowed else "a name, or numbers from 1"
    listed = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(listed) < 1 or (allowed and not set(listed) <= set(allowed)):
        usage_error(NAME, f"--{option} {text}: expected {wanted}, separated by commas")
    return list(dict.fromkeys(listed))


sizes = CONFIGS.get(args.config) or sorted(numbers("config", args.config))
itypes = numbers("itype", args.itype, (1, 10, 16))
if args.warmup < 0 or args.repeat < 1 or args.budget < 0:
    usage_error(NAME, "--warmup and --budget take 0 or more, --repeat 1 or more")
study = Study(NAME, args)
device = "cuda" if cuda else "cpu"
threads = torch.get_num_threads()
stream = torch.cuda.Stream() if cuda else None  # ONNX Runtime computes on it, too
if not cuda:
    torch.set_num_threads(1)  # of two thread pools, each waits for cores that the other has


class Case(NamedTuple):
    itype: int
    tf32: bool
    m: int
    k: int
    widths: tuple
    separate: bool = False  # whether the products are used one by one
    name: str = "your own"


def gemms(how, case):
    """The model as text."""
    dtype, weights = DTYPES[case.itype].name.replace("float32", "float"), "YZV"[: len(case.widths)]
    parts = [f"O_{w}" for w in weights]
    products = [f"{p} = Gemm(X, {w})" for p, w in zip(parts, weights, strict=True)]
    split = [
        f"widths = Constant<value_ints={list(case.widths)}>()",
        f"{', '.join(parts)} = Split<axis=1>(P, widths)",
    ]
    one = ["P = Gemm(X, W)", *split] if case.separate else ["O = Gemm(X, W)"]
    nodes = {
        "not fused": products + [f"O = Concat<axis=1>({', '.join(parts)})"] * (not case.separate),
        "fused inside": [f"W = Concat<axis=1>({', '.join(weights)})", *one],
        "precomputed": one,
    }
    inputs, outputs = "W" if how == "precomputed" else weights, parts if case.separate else ["O"]
    given = ", ".join([f"{dtype}[m,k] X", *(f"{dtype}[k,n_{w}] {w}" for w in inputs)])
    body = "".join(f"\n  {node}" for node in nodes[how])
    made = ", ".join(f"{dtype}[m,{o.lower()}] {o}" for o in outputs)
    return f'<ir_version: 10, opset_import: ["": 20]>\ngemms ({given}) => ({made}) {{{body}\n}}'


for how in ("not fused", "fused inside", "precomputed"):
    print(f"{how}:\n{gemms(how, Case(1, False, 1, 1, (1, 1)))}\n")

# %%
# Every way in one interleaved measurement
# ----------------------------------------
#
# PyTorch computes the same, unfused and precomputed, and inductor compiles the unfused code. On a
# GPU four of the ways are also replayed as CUDA graphs. TF32 is set alike on both sides.

WAYS = [
    "ORT, not fused",
    "ORT, fused inside",
    "ORT, precomputed",
    "torch, not fused",
    "torch, precomputed",
    "inductor, not fused",
]
GRAPHS = [f"{way}, CUDA graph" for way in WAYS if "inside" not in way and "inductor" not in way]
ways = [w for w in WAYS if not (quick and "inductor" in w)] + GRAPHS * cuda
REASONS = {
    UnsupportedError: "no Gemm of this type",
    MemoryError: "does not fit",
    torch.OutOfMemoryError: "does not fit",
}


def not_fused(separate, x, *weights):
    parts = [x @ w for w in weights]
    return parts if separate else [torch.cat(parts, 1)]


def precomputed(case, x, joined):
    return (x @ joined).split(case.widths, 1) if case.separate else [x @ joined]


@cache
def ready(who, how, case):
    """What makes a call of a set of buffers; sessions and compiled code serve all sets."""
    if who == "ORT":
        model = onnx.parser.parse_model(gemms(how, case))
        run = session(model, [f"{device.upper()}ExecutionProvider"], tf32=case.tf32)
        return lambda *fed: run.bind(dict(zip(run.input_names, fed, strict=True))).run
    if how == "precomputed":
        return partial(partial, precomputed, case)
    if who == "torch":
        return partial(partial, not_fused, case.separate)
    torch.compiler.reset()
    return partial(partial, torch.compile(partial(not_fused, case.separate), dynamic=False))


def graphed(runs):
    """The calls as CUDA graphs, captured on the current stream, where ONNX Runtime is, too."""
    replays, pool = [], ()
    for run in runs:
        run()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        graph.capture_begin(*pool, capture_error_mode="thread_local")
        try:
            outputs = run()
        finally:
            graph.capture_end()
        replays.append(lambda graph=graph, outputs=outputs: (graph.replay(), outputs)[1])
        pool = (graph.pool(),)
    return replays


def calls(way, case, buffers):
    """A callable for each set of buffers: x, the weights, the weights joined."""
    who, how, *graph = way.split(", ")
    make = ready(who, how, case)
    fed = [(x, *([joined] if how == "precomputed" else weights)) for x, weights, joined in buffers]
    made = [make(*f) for f in fed]
    for call in made:  # loads, compiles, grows arenas, or fails
        call()
    return graphed(made) if graph else made


# %%
# The buffers rotate, so that no call finds its own in the cache. A case is set up three times, and
# the intervals come from how these differ. Each way's error is taken against float64.


def buffers_of(case, touched, seed):
    normal = partial(
        torch.randn, device=device, generator=torch.Generator(device).manual_seed(seed)
    )
    dtype = onnx_dtype_to_torch_dtype(case.itype)
    x = normal(case.m, case.k).to(dtype)
    weights = [normal(case.k, n).div_(case.k**0.5).to(dtype) for n in case.widths]
    room = int(free_memory(device) // 8 // touched)
    for _ in range(max(1, min(copies(touched, device, most=4 if quick else 64), room))):
        yield x.clone(), [w.clone() for w in weights], torch.cat(weights, 1)


MEASURED = ["ratio", "low", "high", "median", "mean", "std", "min", "max", "warmup", "rounds"]
ERRORS = ["error", "rms error", "mean error", "share"]


def contest_here(case):
    """The rows, on the current stream and with torch's TF32 as it is set."""
    columns = sum(case.widths)
    elements = case.m * case.k + case.k * columns + case.m * columns
    touched = elements * DTYPES[case.itype].bits // 8
    notes, runs, parts, rows = {}, {}, [], []
    # inductor compiles each shape: the shapes of the tables alone
    todo = [w for w in ways if "inductor" not in w or case.m in (1, case.k)]
    ready.cache_clear()
    if 5 * touched + 16 * elements > 0.8 * free_memory(device):
        notes = dict.fromkeys(todo, "does not fit")
    for seed in range(0 if notes else 3):
        buffers, runs = list(buffers_of(case, touched, seed)), {}
        for way in [way for way in todo if way not in notes]:
            try:
                runs[way] = calls(way, case, buffers)
            except Exception as error:  # a compiler that is not there, a refused capture
                notes[way] = REASONS.get(type(error), f"{error!r:.60}")
        if not runs:
            break
        parts.append(
            measure(
                {way: lambda i, r=r: r[i]() for way, r in runs.items()},
                rotate=len(buffers),
                device=device,
                budget_s=(args.budget or (0.08 if quick else 0.6 if cuda else 1.5)) / 3,
                warmup=args.warmup,
                min_rounds=-(-args.repeat // 3),
                seed=seed,
            )
        )
    outputs = {way: torch.cat(tuple(r[0]()), 1) for way, r in runs.items()}
    if runs:
        timings = pool([t for t in parts if list(t.samples) == list(runs)])
        frame = timings.frame.set_index("label")
        truth = buffers[0][0].double() @ buffers[0][2].double()
    for way in todo:
        row = {
            "case": case.name,
            "shape": case.name.split()[0].strip(","),
            "m": case.m,
            "k": case.k,
            "n": columns,
            "precision": "TF32" if case.tf32 else DTYPES[case.itype].name,
            "tf32": "on" if case.tf32 else "off" if case.itype == 1 else "–",
            "way": way,
            "note": notes.get(way, ""),
            **dict.fromkeys([*MEASURED, *ERRORS], float("nan")),
        }
        if way in runs:
            error, times = scaled_error(truth, outputs[way]), frame.loc[way]
            row |= {c: 1e3 * times[c] for c in ("median", "mean", "std", "min", "max")}
            row |= times[["warmup", "rounds", "warnings"]].to_dict() | {
                "error": error.largest,
                "rms error": error.rms,
                "mean error": error.mean,
            }
            if WAYS[0] in runs:
                ratio = timings.ratio(way, WAYS[0])
                row |= {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
                row["share"] = float((outputs[way] != outputs[WAYS[0]]).float().mean())
        rows.append(row)
    return rows


def contest(case):
    """A row for each way: time, ratio to ORT's unfused time, error; or why there is none."""
    # A CUDA graph cannot be captured on torch's default stream.
    with torch_precision(case.tf32), torch.cuda.stream(stream):
        return contest_here(case)


width = 128 if quick else 4096 if cuda else 512
tokens = (1, 16) if quick else (1, 4, 16, 64, 256, 1024, 4096) if cuda else (1, 16, 256)
LAYERS = {"gate-up": (width * 11 // 4,) * 2, "QKV": (width, width // 4, width // 4)}
rows = []
for itype, tf32 in [(i, t) for i in itypes for t in (False, True)[: 1 + (i == 1 and cuda)]]:
    for n in sizes:
        rows += contest(Case(itype, tf32, n, n, (n, n), name=f"square {n}"))
    for m in tokens:
        for layer, widths in LAYERS.items():
            if layer == "gate-up" or m in (tokens[0], tokens[-1]):
                rows += contest(
                    Case(itype, tf32, m, width, widths, True, f"{layer}, {m} token{'s' * (m > 1)}")
                )
times = pd.DataFrame(rows)
ran = times[times["median"].notna()]
study.keep("times", ran, part="gpu" if cuda else "cpu", times=[*MEASURED, "warnings"])


def pivot(shapes, columns):
    """Ratios with their intervals: a row for a case and precision, a column for a way."""
    chosen, keys = times[times["shape"].isin(shapes)], ["case", "m", "precision"]
    cells = [
        f"{r.ratio:.2f} [{r.low:.2f}, {r.high:.2f}]" if r.ratio > 0 else r.note
        for r in chosen.itertuples()
    ]
    wide = chosen.assign(cell=cells).pivot(index=keys, columns="way", values="cell")
    rows = chosen.set_index(keys).index.unique()
    return wide.reindex(rows, columns=columns).replace("", "–").fillna("–").reset_index()


def over(t, a, b):
    """Time of one way over that of another, case by case, in both runs; a build has one."""
    wide = t.pivot(index=["case", "precision"], columns="way")
    runs = [wide[c] for c in ("ratio", "ratio, second run") if c in wide]
    return pd.concat([run[a] / run[b] for run in runs])


def agrees(t):
    """Whether a second run gives the ratio within 5 %."""
    return (t.get("ratio, second run", t["ratio"]) / t["ratio"] - 1).abs() < 0.05


# %%
# One token: weights joined at each run cost more than the products
# -----------------------------------------------------------------
#
# With one token a product reads its weights once and does little else. A Concat reads and writes
# them first, which makes three passes of one. Joined before, it is one pass again. QKV: queries,
# keys and values, of which two are narrow. gate-up: the two wide products of a feed-forward layer.
# Each product is used alone, so that the fused models need a Split.

study.table(
    "one-token",
    pivot(["gate-up", "QKV"], WAYS[1:]),
    "Time over that of **ORT, not fused**, with its interval.",
    columns=["case", "precision", *(w for w in WAYS[1:] if w != "torch, not fused")],
    rows={"m": 1, "precision": ["float32", "float16"]},
    part="gpu" if cuda else "cpu",
    times=WAYS[1:],
)

# %%

study.claim(
    "For one token, joining the gate and up weights at each run takes at least {2.85} and up to "
    "{3.87} times the time of two Gemms, and a second run agrees within 5 %.",
    name="inside",
    of="times",
    where={"case": "gate-up, 1 token", "way": "ORT, fused inside"},
    on="nvidia-h200",
    value=lambda t: (t["ratio"], t["ratio"]),
    test=lambda t: (t["low"] > 1) & agrees(t),
    timed=True,
)

# %%

study.claim(
    "Joined before, it takes at least {0.977} and up to {0.985} of it, and a second run agrees "
    "within 5 %.",
    name="precomputed",
    of="times",
    where={"case": "gate-up, 1 token", "way": "ORT, precomputed"},
    on="nvidia-h200",
    value=lambda t: (t["ratio"], t["ratio"]),
    test=agrees,
    timed=True,
)

# %%

study.claim(
    "For queries, keys and values one Gemm of weights joined before takes at least {0.51} and up "
    "to {0.80} of the time of three, and a second run agrees within 5 %.",
    name="narrow",
    of="times",
    where={"case": "QKV, 1 token", "way": "ORT, precomputed"},
    on="nvidia-h200",
    value=lambda t: (t["ratio"], t["ratio"]),
    test=lambda t: (t["high"] < 1) & agrees(t),
    timed=True,
    holds=["nvidia-h200"],
)

# %%

study.claim(
    "PyTorch, whose split copies nothing, gains on the gate and up weights, too: precomputed, it "
    "takes at least {0.89} and up to {0.93} of the time of ONNX Runtime's two Gemms, and a second "
    "run agrees within 5 %.",
    name="torch",
    of="times",
    where={"case": "gate-up, 1 token", "way": "torch, precomputed"},
    on="nvidia-h200",
    value=lambda t: (t["ratio"], t["ratio"]),
    test=lambda t: (t["high"] < 1) & agrees(t),
    timed=True,
    holds=["nvidia-h200"],
)

# %%
# Many tokens: the Split costs more than the larger product gains
# ---------------------------------------------------------------
#
# With more tokens the product computes more for each weight that it reads, the Concat counts for
# less, and the Split, which copies the results, for more.

study.lines(
    "tokens",
    of="times",
    where={"shape": "gate-up", "way": [*WAYS[1:3], "torch, precomputed"]},
    x="m",
    y="ratio",
    series="way",
    panels="precision",
    logx=True,
    reference=1,
    title="gate-up: time over two Gemms of ONNX Runtime",
    xlabel="tokens",
    ylabel="time over ORT, not fused",
    alt="A panel for each precision, time over ORT's two Gemms against the number of tokens. "
    "Joined at each run, one token costs most. Joined before, many tokens cost more than two.",
)

# %%

study.claim(
    "With 4096 tokens one Gemm of precomputed weights and a Split take at least {1.02} and up to "
    "{1.15} times the time of two Gemms, and a second run agrees within 5 %.",
    name="split",
    of="times",
    where={"case": "gate-up, 4096 tokens", "way": "ORT, precomputed"},
    on="nvidia-h200",
    value=lambda t: (t["ratio"], t["ratio"]),
    test=lambda t: (t["low"] > 1) & agrees(t),
    timed=True,
)

# %%
# Squares: fusing saves launches and a Concat, so large ones gain least
# ---------------------------------------------------------------------
#
# The usual benchmark: square matrices, and the products side by side in one output, which the
# unfused model needs a Concat for.

study.table(
    "squares",
    pivot(["square"], WAYS[1:]),
    "Time over that of **ORT, not fused**, with its interval.",
    columns=["case", "precision", *(w for w in WAYS[1:] if w != "torch, not fused")],
    rows={"precision": ["float32", "float16"], "m": [256, 1024, 4096, 8192]},
    part="gpu" if cuda else "cpu",
    times=WAYS[1:],
)

# %%

study.lines(
    "squares",
    of="times",
    where={"shape": "square", "way": ["ORT, not fused", *WAYS[2:5]]},
    x="m",
    y="median",
    series="way",
    panels="precision",
    logx=True,
    logy=True,
    title="Median time of a call, squares",
    xlabel="side",
    ylabel="ms",
    alt="A panel for each precision, median time against the side of the matrices, both "
    "logarithmic. ONNX Runtime's lines are flat below about 1024; "
    "all meet where matrices are large.",
)

# %%

study.claim(
    "At side 256 precomputed weights take at least {0.50} and up to {0.58} of the unfused time, "
    "and a second run agrees within 5 %.",
    name="small",
    of="times",
    where={"case": "square 256", "way": "ORT, precomputed"},
    on="nvidia-h200",
    value=lambda t: (t["ratio"], t["ratio"]),
    test=lambda t: (t["high"] < 1) & agrees(t),
    timed=True,
)

# %%

study.claim(
    "At side 8192 they take at least {0.92} and up to {0.98} of it, and a second run agrees "
    "within 5 %.",
    name="large",
    of="times",
    where={"case": "square 8192", "way": "ORT, precomputed"},
    on="nvidia-h200",
    value=lambda t: (t["ratio"], t["ratio"]),
    test=lambda t: (t["high"] < 1) & agrees(t),
    timed=True,
)

# %%

study.claim(
    "In TF32 at side 4096 one Gemm of precomputed weights loses: {1.07} of the unfused time, and a "
    "second run agrees within 5 %.",
    name="loss",
    of="times",
    where={"case": "square 4096", "precision": "TF32", "way": "ORT, precomputed"},
    on="nvidia-h200",
    value=lambda t: t["ratio"],
    test=lambda t: (t["low"] > 1) & agrees(t),
    timed=True,
)

# %%
# Small sizes measure the host, which a CUDA graph leaves out
# -----------------------------------------------------------
#
# A call of a small product is mostly the host's work: checks, allocations, launches, in PyTorch as
# in ONNX Runtime. A CUDA graph records the launches once. What fusing gains in it is the kernels'
# own.

study.table(
    "graphs",
    pivot(["square", "gate-up"], GRAPHS),
    "Replayed as a CUDA graph: time over that of **ORT, not fused** as called.",
    columns=["case", "precision", *GRAPHS],
    rows={"precision": "float16", "case": lambda s: s.str.contains("256|1024|8192|1 token")},
    part="gpu" if cuda else "cpu",
    times=GRAPHS,
)

# %%

study.claim(
    "At side 256 the two Gemms and their Concat, replayed as a CUDA graph, take up to {0.42} of "
    "the time of the plain call, in both runs.",
    name="replay",
    of="times",
    where={"case": "square 256", "way": ["ORT, not fused, CUDA graph", "ORT, not fused"]},
    on="nvidia-h200",
    value=lambda t: over(t, "ORT, not fused, CUDA graph", "ORT, not fused"),
    timed=True,
)

# %%

study.claim(
    "They take up to {0.76} of the time of one Gemm of precomputed weights as called, in both "
    "runs.",
    name="graph",
    of="times",
    where={"case": "square 256", "way": ["ORT, not fused, CUDA graph", "ORT, precomputed"]},
    on="nvidia-h200",
    value=lambda t: over(t, "ORT, not fused, CUDA graph", "ORT, precomputed"),
    test=lambda t: over(t, "ORT, not fused, CUDA graph", "ORT, precomputed") < 1,
    timed=True,
)

# %%

study.claim(
    "Unfused and as called, PyTorch takes at least {0.85} and up to {0.92} of ONNX Runtime's time "
    "at side 256, and a second run agrees within 5 %.",
    name="host",
    of="times",
    where={"case": "square 256", "way": "torch, not fused"},
    on="nvidia-h200",
    value=lambda t: (t["ratio"], t["ratio"]),
    test=lambda t: (t["high"] < 1) & agrees(t),
    timed=True,
    holds=["nvidia-h200"],
)

# %%

study.claim(
    "For one token's queries, keys and values, both replayed, one Gemm takes at least {0.68} and "
    "up to {0.79} of the time of three, in both runs: the kernels gain, not the host alone.",
    name="kernels",
    of="times",
    where={
        "case": "QKV, 1 token",
        "way": ["ORT, precomputed, CUDA graph", "ORT, not fused, CUDA graph"],
    },
    on="nvidia-h200",
    value=lambda t: (over(t, "ORT, precomputed, CUDA graph", "ORT, not fused, CUDA graph"),) * 2,
    test=lambda t: over(t, "ORT, precomputed, CUDA graph", "ORT, not fused, CUDA graph") < 1,
    timed=True,
)

# %%
# Fusing may change bits, and neither side is always nearer
# ---------------------------------------------------------
#
# On paper every element is the same sum. A library picks its kernel by the shape of the product,
# and the kernel decides in how many parts a sum is cut (:ref:`reduction-order`). Errors are in
# :ref:`one unit <unit>`.

fused, base = (times[times["way"] == w].reset_index() for w in ("ORT, precomputed", WAYS[0]))
bits = fused[["case", "shape", "precision", "share"]].assign(
    **{"not fused error": base["error"], "fused error": fused["error"]},
    **{"not fused rms": base["rms error"], "fused rms": fused["rms error"]},
)
study.table(
    "discrepancy",
    bits,
    "Elements that differ between **ORT, not fused** and **ORT, precomputed**, and the errors of "
    "both against float64: largest and typical. Cases whose bits change.",
    columns=[c for c in bits if c != "shape"],
    rows={"share": lambda s: s > 0, "precision": ["float32", "float16"]},
    part="gpu" if cuda else "cpu",
)

# %%

study.claim(
    "Where bits differ, fusing multiplies the typical error by at least {0.58} and up to {1.54}: "
    "neither side is always nearer.",
    name="nearer",
    of="discrepancy",
    where={"share": lambda s: s > 0},
    on="nvidia-h200",
    value=lambda t: (t["fused rms"] / t["not fused rms"],) * 2,
    test=lambda t: (t["fused rms"] < t["not fused rms"]).nunique() == 2,
)

# %%

study.claim(
    "In float16 and bfloat16 no bit of a square product changes.",
    name="squares16",
    of="discrepancy",
    where={"shape": "square", "precision": ["float16", "bfloat16"], "share": lambda s: s.notna()},
    test=lambda t: t["share"] == 0,
)

# %%

study.claim(
    "Joined inside or before, as many elements differ, with the same errors.",
    name="same",
    of="times",
    where={"way": ["ORT, fused inside", "ORT, precomputed"], "share": lambda s: s.notna()},
    test=lambda t: t.groupby(["case", "precision"])[["share", "rms error"]].nunique() == 1,
)

# %%

study.claim(
    "Unfused, PyTorch gives ONNX Runtime's bits, called or replayed: fusing changes more "
    "than the runtime does.",
    name="runtime",
    of="times",
    where={"way": ["torch, not fused", "torch, not fused, CUDA graph"]},
    test=lambda t: t["share"] == 0,
)

# %%

study.dots(
    "answer",
    of="times",
    where={
        "case": "QKV, 1 token",
        "precision": lambda s: s == ("float16" if "float16" in set(s) else s.iloc[0]),
        "way": [WAYS[0], *WAYS[2:]],
    },
    x="ratio",
    label="way",
    low="low",
    high="high",
    reference=1,
    answer=True,
    title="Queries, keys, values of one token",
    xlabel="time over ORT, not fused (float16)",
    alt="A dot for each way of computing the queries, keys and values of one token: precomputed "
    "takes half the time of not fused, PyTorch's less; inductor takes twice the time.",
)

# %%
# Your own shapes
# ---------------
#
# Rows of X, inner size, and the columns of one to three weights; the products used one by one.

SHAPE = Case(itypes[0], False, 1, width, (2 * width, width), separate=True)

is_case = isinstance(SHAPE, Case) and isinstance(SHAPE.widths, tuple) and 0 < len(SHAPE.widths) < 4
given = (SHAPE.m, SHAPE.k, *SHAPE.widths) if is_case else (0,)
if not all(isinstance(n, int) and n > 0 for n in given) or SHAPE.itype not in (1, 10, 16):
    raise ArgumentError(
        "SHAPE",
        got=SHAPE,
        expected="the ONNX type 1, 10 or 16, and sizes from 1 with one to three widths",
        hint="Case(1, False, 8, 64, (32, 32))",
    )
own = pd.DataFrame(contest(SHAPE))
print(own[["way", "ratio", "low", "high", "rms error", "note"]].to_string(index=False))

# %%
# Limits, and what to read next
# -----------------------------
#
# * Inputs are normal and dense, and lie where no cache has them. Weights that stay in a cache, or
#   are quantized, are another question. ONNX Runtime runs through a binding, without copies.
# * inductor can join constant weights itself, before the first run, where ``freezing`` is on; here
#   weights are arguments. Its default mode is measured, not ``max-autotune``.
# * A CPU's ratios are those of one thread. A time of one size, type and machine is no rule: put
#   your shapes into the cell above.
# * Next: :ref:`llama-backend`, whose rule packs queries, keys and values, for what a whole layer
#   gains; :ref:`reduction-order`, for why a kernel's partition of a sum changes bits.

if run_mode() == "script":
    try:
        times.to_excel(study.output / f"{NAME}.xlsx", index=False)
    except ImportError as error:
        print(f"no spreadsheet: {error}")
torch.set_num_threads(threads)
study.finish()
