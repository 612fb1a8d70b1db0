"""The study behind "Is one large Gemm faster than two small ones?".

Products of one matrix with two or three others: as separate Gemms, as one Gemm whose weights are
joined in each run, and as one Gemm whose weights were joined before; in ONNX Runtime, PyTorch and
inductor, called and replayed as CUDA graphs. Times, bits, and errors against float64.

The page tells the story with small experiments. This file measures the full grid, writes the
record, and defines each number that the page may print.

    python studies/gemm_fusion.py --config 256,512 --itype 1 --repeat 10
    python studies/gemm_fusion.py --record
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import NamedTuple

import onnx.parser
import torch

from roundoff.compare import scaled_error
from roundoff.dtypes import DTYPES, onnx_dtype_to_torch_dtype
from roundoff.ort import available, session
from roundoff.page.measurement import Study
from roundoff.script import unit_test_going
from roundoff.timing import copies, measure, pool, torch_precision

quick = unit_test_going()
GPU = torch.cuda.is_available() and bool(available(["CUDAExecutionProvider"]))
DEVICE = "cuda" if GPU else "cpu"
SIZES = "32,64,128" if quick else "256,512,1024,2048,4096,8192" if GPU else "256,512,1024"

study = Study(
    "plot_gemm_fusion",
    "One large Gemm or several small ones: times, bits and errors in ONNX Runtime and PyTorch.",
    on="nvidia-h200",
    part="gpu" if GPU else "cpu",
    config=(SIZES, "sides of the squares"),
    itype=("1,10,16" if GPU else "1", "ONNX types: 1 (float32), 10 (float16), 16 (bfloat16)"),
    warmup=(3, "least calls before the first round", 0),
    repeat=(6, "least number of rounds", 1),
)


class Case(NamedTuple):
    """A product of m × k by matrices of these widths."""

    itype: int
    tf32: bool
    m: int
    k: int
    widths: tuple[int, ...]
    separate: bool = False  # whether the products are used one by one
    name: str = "a shape"


# --- The models and the ways to run them. --------------------------------------------------------


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


# On a GPU four of the ways are also replayed as CUDA graphs. TF32 is set alike on both sides.
WAYS = [
    "ORT, not fused",
    "ORT, fused inside",
    "ORT, precomputed",
    "torch, not fused",
    "torch, precomputed",
    "inductor, not fused",
]
GRAPHS = [f"{way}, CUDA graph" for way in WAYS if "inside" not in way and "inductor" not in way]
ways = [w for w in WAYS if not (quick and "inductor" in w)] + GRAPHS * GPU


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
        run = session(model, [f"{DEVICE.upper()}ExecutionProvider"], tf32=case.tf32)
        return lambda *fed: run.bind(dict(zip(run.input_names, fed, strict=True))).run
    if how == "precomputed":
        return partial(partial, precomputed, case)
    if who == "torch":
        return partial(partial, not_fused, case.separate)
    torch.compiler.reset()
    return partial(partial, torch.compile(partial(not_fused, case.separate), dynamic=False))


def graphed(runs):
    """The calls as CUDA graphs, captured on the current stream, where ONNX Runtime is, too."""
    pool, here = torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
    for run in runs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, here, capture_error_mode="thread_local"):
            outputs = run()
        yield lambda graph=graph, outputs=outputs: (graph.replay(), outputs)[1]


def calls(way, case, buffers):
    """A callable for each set of buffers: x, the weights, the weights joined."""
    who, how, *graph = way.split(", ")
    make = ready(who, how, case)
    fed = [(x, *([joined] if how == "precomputed" else weights)) for x, weights, joined in buffers]
    made = [make(*f) for f in fed]
    for call in made:  # loads, compiles, grows arenas, or fails
        call()
    return list(graphed(made)) if graph else made


# --- One interleaved measurement of all ways. ----------------------------------------------------


def buffers_of(case, touched, seed):
    """Sets of buffers, which rotate, so that no call finds its own in the cache."""
    normal = partial(
        torch.randn, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)
    )
    dtype = onnx_dtype_to_torch_dtype(case.itype)
    x = normal(case.m, case.k).to(dtype)
    weights = [normal(case.k, n).div_(case.k**0.5).to(dtype) for n in case.widths]
    for _ in range(copies(touched, DEVICE, most=4 if quick else 64)):
        yield x.clone(), [w.clone() for w in weights], torch.cat(weights, 1)


def contest(case, warmup, repeat):
    """A row for each way that runs: time, ratio to ORT's unfused time, error against float64.

    A case is set up three times, and the intervals come from how these differ.
    """
    columns = sum(case.widths)
    elements = case.m * case.k + case.k * columns + case.m * columns
    touched = elements * DTYPES[case.itype].bits // 8
    # inductor compiles each shape: the shapes of the tables alone
    todo = [w for w in ways if "inductor" not in w or case.m in (1, case.k)]
    parts = []
    ready.cache_clear()
    for seed in range(3):
        buffers, runs = list(buffers_of(case, touched, seed)), {}
        for way in list(todo):
            try:
                runs[way] = calls(way, case, buffers)
            except Exception as error:  # a compiler that is not there, a matrix that does not fit
                if seed:
                    raise
                print(f"{way} does not run {case.name}: {error}")
                todo.remove(way)
        parts.append(
            measure(
                {way: lambda i, r=r: r[i]() for way, r in runs.items()},
                rotate=len(buffers),
                device=DEVICE,
                budget_s=(0.08 if quick else 0.6 if GPU else 1.5) / 3,
                warmup=warmup,
                min_rounds=-(-repeat // 3),
                seed=seed,
            )
        )
    outputs = {way: torch.cat(tuple(r[0]()), 1) for way, r in runs.items()}
    timings = pool(parts)
    medians = timings.frame.set_index("label")["median"]
    truth = buffers[0][0].double() @ buffers[0][2].double()
    for way, output in outputs.items():
        over = timings.ratio(way, WAYS[0])
        yield {
            "case": case.name,
            "shape": case.name.split()[0].strip(","),
            "m": case.m,
            "k": case.k,
            "n": columns,
            "precision": "TF32" if case.tf32 else DTYPES[case.itype].name,
            "way": way,
            "ratio": over.value,
            "low": over.low,
            "high": over.high,
            "median": 1e3 * medians[way],
            "rms error": scaled_error(truth, output).rms,
            "share": float((output != outputs[WAYS[0]]).float().mean()),
        }


width = 128 if quick else 4096 if GPU else 512
tokens = (1, 16) if quick else (1, 4, 16, 64, 256, 1024, 4096) if GPU else (1, 16, 256)
# A layer's weights: the two wide ones of a feed-forward layer; queries, keys and values, of which
# two are narrow. Each product is used alone, so that the fused models need a Split.
LAYERS = {"gate-up": (width * 11 // 4,) * 2, "QKV": (width, width // 4, width // 4)}


@study.table(times=["ratio", "low", "high", "median"])
def times(args):
    """A row for each case and way: milliseconds, ratio to ORT's unfused time, errors."""
    stream = torch.cuda.Stream() if GPU else None  # ONNX Runtime computes on it, too
    sizes = [int(size) for size in args.config.split(",")]
    if not GPU:
        torch.set_num_threads(1)  # of two thread pools, each waits for cores that the other has
    for number, tf32 in product(map(int, args.itype.split(",")), (False, True)):
        if tf32 and not (GPU and number == 1):
            continue
        cases = [Case(number, tf32, n, n, (n, n), name=f"square {n}") for n in sizes]
        for m in tokens:
            for layer, widths in LAYERS.items():
                if layer == "gate-up" or m in (tokens[0], tokens[-1]):
                    name = f"{layer}, {m} token{'s' * (m > 1)}"
                    cases.append(Case(number, tf32, m, width, widths, True, name))
        # A CUDA graph cannot be captured on torch's default stream.
        with torch_precision(tf32), torch.cuda.stream(stream):
            for case in cases:
                yield from contest(case, args.warmup, args.repeat)


# --- Values: what pages may print. ---------------------------------------------------------------

QKV, WIDE, MANY = "QKV, 1 token", "gate-up, 1 token", "gate-up, 4096 tokens"
OVER = "over that of separate Gemms in ONNX Runtime"


def same(v):
    """Whether the interval holds 1: no difference measured."""
    return v.low <= 1 <= v.high


def ratio(name, about, case, way=WAYS[2], precision="float16", test=None):
    """A time over that of ONNX Runtime's separate Gemms, as called."""
    study.value(
        name,
        f"time of {about}, {precision}",
        "times",
        "ratio",
        where={"case": case, "way": way, "precision": precision},
        interval=("low", "high"),
        words=("faster", "slower"),
        test=test,
    )


def quotient(name, about, case, a, b, precision="float16", test=None):
    """A time over another one: the quotient of two ratios, and of the ends of their intervals."""

    def of(rows):
        one, two = (rows[rows["way"] == way].iloc[0] for way in (a, b))
        return one["ratio"] / two["ratio"], one["low"] / two["high"], one["high"] / two["low"]

    study.value(
        name,
        f"time of {about}, {precision}",
        "times",
        of,
        where={"case": case, "way": [a, b], "precision": precision},
        words=("faster", "slower"),
        test=test,
    )


GATE_UP = "one Gemm for a layer's gate and up weights"
JOINED = f"one Gemm, weights joined before, {OVER}"
for precision, name in ("float16", "inside"), ("float32", "inside.float32"):
    ratio(name, f"{GATE_UP}, joined in each run, {OVER}, one token", WIDE, WAYS[1], precision)
ratio("narrow", f"one Gemm for queries, keys and values {OVER}, one token", QKV)
ratio("wide", f"{GATE_UP}, joined before, {OVER}, one token", WIDE, test=same)
for name, case, count in ("split", MANY, 4096), ("sixteen", "gate-up, 16 tokens", 16):
    ratio(name, f"{GATE_UP}, joined before, and a Split, {OVER}, {count} tokens", case)
for name, side in ("small", 256), ("large", 8192):
    ratio(name, f"{JOINED}, side {side}", f"square {side}")
# no gain
ratio("loss", f"{JOINED}, side 4096", "square 4096", precision="TF32", test=lambda v: v.high > 1)
ratio(
    "replay",
    "two Gemms replayed as a CUDA graph over the plain call, ONNX Runtime, side 256",
    "square 256",
    GRAPHS[0],
)
SMALL = "one Gemm over two, side 256, both replayed as CUDA graphs"
quotient("small.graph", SMALL, "square 256", GRAPHS[1], GRAPHS[0])


def saving_left(rows):
    """What one Gemm saves in CUDA graphs, over what it saves in plain calls."""
    over = rows.set_index("way")["ratio"]
    return float((over[GRAPHS[0]] - over[GRAPHS[1]]) / (1 - over[WAYS[2]]))


study.value(
    "small.left",
    "time that one Gemm saves over two in CUDA graphs, over that in plain calls, side 256, float16",
    "times",
    saving_left,
    where={"case": "square 256", "way": [WAYS[2], *GRAPHS[:2]], "precision": "float16"},
    test=lambda v: 0.1 < v.value < 0.5,
)
for name, case, test in (
    ("narrow.torch", QKV, None),
    ("wide.torch", WIDE, None),
    ("split.torch", MANY, same),
):
    about = f"one product and a split over separate products, PyTorch, {case}"
    quotient(name, about, case, "torch, precomputed", "torch, not fused", test=test)
for name, about, case, precision, test in (
    ("inductor", "queries, keys, values of one token", QKV, "float16", None),
    ("inductor.large", "side 4096", "square 4096", "float32", lambda v: v.value < 1.1),
):
    about = f"separate products, torch.compile over PyTorch without it, {about}"
    quotient(name, about, case, "inductor, not fused", "torch, not fused", precision, test)


def milliseconds(rows, way, precision):
    chosen = rows[(rows["way"] == way) & (rows["precision"] == precision)].iloc[0]
    return chosen["median"], chosen["k"] * chosen["n"] * {"float32": 4, "float16": 2}[precision]


def rate(rows, precision="float32"):
    """Terabytes of weights a second: two Gemms read each weight once."""
    taken, size = milliseconds(rows, WAYS[0], precision)
    return size / taken / 1e9


def concat(rows, precision):
    """Terabytes a second of what joining adds: each weight is read once and written once."""
    taken, size = milliseconds(rows, WAYS[1], precision)
    return 2 * size / (taken - milliseconds(rows, WAYS[2], precision)[0]) / 1e9


ONE = {"case": WIDE, "way": WAYS[:3], "precision": ["float32", "float16"]}
study.value(
    "read",
    "TB/s at which two Gemms read a layer's gate and up weights for one token, float32",
    "times",
    rate,
    where=ONE,
    test=lambda v: v.value > 2,  # terabytes: memory's rate, not the arithmetic's
)
study.value(
    "half",
    "time of two Gemms in float16 over float32, a layer's gate and up weights, one token",
    "times",
    lambda rows: (
        milliseconds(rows, WAYS[0], "float16")[0] / milliseconds(rows, WAYS[0], "float32")[0]
    ),
    where=ONE,
    test=lambda v: 0.4 < v.value < 0.65,
)
for precision in ("float32", "float16"):
    study.value(
        f"concat.{precision}",
        f"TB/s read and written by joining a layer's gate and up weights, {precision}",
        "times",
        partial(concat, precision=precision),
        where=ONE,
        test=lambda v: v.value > 1,
    )

study.value(
    "changed",
    "share of the results that one Gemm for queries, keys and values changes, one token, float32",
    "times",
    "share",
    where={"case": QKV, "precision": "float32", "way": WAYS[2]},
    test=lambda v: v.value > 0.5,
)


def errors_over(rows):
    """The typical error of one Gemm over that of two, of each case in which bits change."""
    rows = rows.set_index(["case", "precision"])
    one, two = (rows[rows["way"] == way] for way in (WAYS[2], WAYS[0]))
    return (one["rms error"] / two["rms error"])[one["share"] > 0]


for name, statistic in ("error.least", "min"), ("error.most", "max"):
    study.value(
        name,
        f"typical error of one Gemm over that of two where bits change, {statistic}imum of cases",
        "times",
        lambda rows, statistic=statistic: errors_over(rows).agg(statistic),
        where={"way": [WAYS[2], WAYS[0]], "precision": ["float32", "TF32", "float16", "bfloat16"]},
        test=lambda v, least=statistic == "min": v.value < 1 if least else v.value > 1,
    )

if __name__ == "__main__":
    study.main()
