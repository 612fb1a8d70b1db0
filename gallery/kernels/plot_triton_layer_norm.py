r"""
.. _triton-layer-norm:

LayerNorm in Triton: near the speed of memory, the same bits every run
======================================================================

Layer normalisation does little arithmetic, and its speed is that of memory. This page derives the
backward, writes it without locks, counts its bit patterns and its errors against float64, and then
measures it beside PyTorch, its compiler and Liger, from 1024 to 15,872 columns. Where there is no
GPU the kernels run in Triton's interpreter on small inputs, and a recorded machine gives the speed.
"""

# %%
# Bound by memory
# ---------------
#
# A row :math:`x` of :math:`N` values has the mean :math:`\mu` and the variance :math:`\sigma^2`.
# With :math:`r = 1 / \sqrt{\sigma^2 + \epsilon}` and :math:`\hat x = (x - \mu)\, r`, layer
# normalisation [#ba]_ is
#
# .. math:: y = \hat x\, w + b.
#
# The forward reads :math:`x` and writes :math:`y`; the backward reads :math:`x` and the gradient
# :math:`g` of :math:`y`, and writes :math:`dx`. For each of those elements there are about ten
# operations, and the H200 of the record can do 24 in float32 while a float16 element arrives
# (:ref:`gemm-fusion` has its ceilings). So we count bytes: :math:`2MN` elements forward,
# :math:`3MN` backward for :math:`M` rows. The partial sums that the backward needs (below) are
# extra, and count against us:

import inspect
import itertools

import pandas as pd
import torch

from roundoff.kernels import interpreting, lessons
from roundoff.kernels.layer_norm import plan_backward
from roundoff.kernels.rivals import layer_norms
from roundoff.kernels.studies import accuracy, bit_patterns, draw, exact, spills
from roundoff.page import MARKERS, PALETTE, subplots
from roundoff.page.legacy import Study
from roundoff.script import get_parsed_args, unit_test_going
from roundoff.timing import copies, measure, pool

args = get_parsed_args(
    "plot_triton_layer_norm",
    __doc__,
    expose="rows,sittings,budget",
    rows=(4096, "rows of the benchmark"),
    sittings=(2, "fresh sets of buffers for each comparison"),
    budget=(0.25, "seconds for each sitting"),
)
study = Study("plot_triton_layer_norm", args)
quick = unit_test_going()
gpu = torch.cuda.is_available() and not interpreting()
device = "cuda" if gpu else "cpu"
processors = torch.cuda.get_device_properties(0).multi_processor_count if gpu else 132

M = args.rows


def programs(n):
    """How many programs our backward shares its rows among: one or two a multiprocessor."""
    plan = plan_backward(n, itemsize=2)
    return min(-(-M // plan.rows), plan.per_sm * processors)


traffic = pd.DataFrame(
    {
        "N": n,
        "forward": 2 * M * n * 2 / 1e6,
        "backward": 3 * M * n * 2 / 1e6,
        "programs": programs(n),
        "partial": 2 * 2 * programs(n) * n * 4 / 1e6,
    }
    for n in (1024, 4096, 8192, 15872)
)
if M >= 4096:
    assert (traffic["partial"] < traffic["backward"] / 5).all()
study.table(
    "traffic",
    traffic,
    caption=f"Bytes that must move in float16, {M} rows, and two partial sums a program and "
    f"column, written once and read once; {processors} multiprocessors.",
    units=dict.fromkeys(("forward", "backward", "partial"), "MB"),
    labels={"partial": "partial sums"},
    formats={"N": ",d"},
)

# %%
# The backward
# ------------
#
# :math:`w` and :math:`b` see every row: :math:`db = \sum_\text{rows} g` and
# :math:`dw = \sum_\text{rows} g\, \hat x`. For :math:`dx` let :math:`v = w\, g`, the gradient of
# :math:`\hat x`. Because :math:`\mu` and :math:`r` depend on every :math:`x_j`,
#
# .. math:: \frac{\partial \hat x_i}{\partial x_j} =
#           r \left( \delta_{ij} - \frac1N - \frac{\hat x_i \hat x_j}{N} \right),
#
# and summing :math:`v_i` times this over :math:`i` gives, with bars for means over the row,
#
# .. math:: dx = r\, \bigl( v - \overline{v} - \hat x\, \overline{v \hat x} \bigr).
#
# Two means, then one more look at the row. The difficulty is elsewhere: :math:`dw` and :math:`db`
# are sums over *rows*, and the rows are spread over the machine.
#
# Two stages
# ^^^^^^^^^^
#
# A fixed number of programs share the rows: program :math:`p` takes rows :math:`p`, :math:`p + P`,
# :math:`p + 2P`, … and adds their :math:`g \hat x` and :math:`g` in float32. A second kernel adds
# the :math:`P` partial sums of each column. No program waits for another, and every addition has
# its place. This is the whole first stage; it lacks nothing but speed:

print(inspect.getsource(lessons.simple_backward.fn))

# %%
# And the second:

print(inspect.getsource(lessons.add_partial_sums.fn))

# %%
# A lock instead
# ^^^^^^^^^^^^^^
#
# The well-known alternative [#tutorial]_ gives each row its own program. Programs add to one of a
# few shared sums, whoever holds its lock first, in the type of the input:

print(inspect.getsource(lessons.locked_sums.fn))

# %%
# Addition does not associate (:ref:`reduction-order`), so the result depends on who came first.
# The barrier before the release matters as well: without it the lock may be free before all threads
# have stored, and the next program may read a sum half written. How often that happens depends on
# the shape and the machine, and a run that shows no sign of it proves nothing. The barrier mends
# the race. It does not mend the order.
#
# The same bits every run
# -----------------------
#
# We call each backward many times on one input and count different results. In the interpreter
# programs run one after another, and we shuffle their order each time.

SHAPES = [(4096, 1024), (4096, 4096), (4096, 8704), (4096, 12288), (1000, 15872)] if gpu else (
    [(24, 64), (24, 200)] if quick else [(64, 64), (64, 200), (48, 1024), (24, 2500)]
)  # fmt: skip
runs = 100 if gpu else 3 if quick else 12
norms, missing = layer_norms("Triton", "Torch", "Liger", device="cuda" if gpu else "cpu")
if not gpu:  # interpreted
    norms = {**layer_norms("Triton", device="cuda")[0], **norms}


def patterns(m, n):
    """Rows of the table for one shape."""
    [(x, dy)], w, b = draw(m, n, torch.float16, device, seed=n)
    truth = exact(x, dy, w, b)["dw"]
    saved = {label: norm.forward(x, w, b, 1e-5)[1:] for label, norm in norms.items()}
    mean, rstd = saved["Triton"][0]
    calls = {
        **{label: lambda f=norm.backward, s=saved[label]: f(dy, x, w, b, *s)
           for label, norm in norms.items()},
        "two stages (lesson)": lambda: lessons.two_stage(dy, x, mean, rstd, w),
        "lock, no barrier": lambda: [None, lessons.locked(dy, x, mean, rstd, barrier=False)],
        "lock and barrier": lambda: [None, lessons.locked(dy, x, mean, rstd)],
    }  # fmt: skip
    for label, call in calls.items():
        found = [t for t in call() if t is not None]
        counts = bit_patterns(lambda c=call: [t for t in c() if t is not None], runs)
        dx, dw, db = counts if len(counts) == 3 else (None, counts[0], None)
        error = (found[min(1, len(found) - 1)].double() - truth).abs().max().item()
        yield {
            "shape": f"{m} × {n}",
            "backward": label,
            "dx": dx,
            "dw": dw,
            "db": db,
            "error": error,
        }


study.table(
    "patterns",
    pd.DataFrame(itertools.chain.from_iterable(patterns(m, n) for m, n in SHAPES)).convert_dtypes(),
    caption="Different results in 100 runs on a GPU (interpreted: 3 or 12), float16, and the "
    "largest error of dw against float64 in one of them.",
    formats={"error": ".2g"},
)

# %%


def steady(run):
    table = run.tables["patterns"]
    ours = table[table.backward == "Triton"]
    assert (ours[["dx", "dw", "db"]].astype(float) == 1).all(axis=None)
    locks = table[table.backward.str.startswith("lock")]
    moving = int((locks.dw > 1).sum())
    barrier = locks[locks.backward == "lock and barrier"]
    ratio = barrier.error.max() / ours.error.max()
    return [
        f"Ours: one dx, one dw and one db at each of the {len(ours)} shapes.",
        f"Under a lock dw changes at {moving} of {len(locks)} rows of the table, up to "
        f"{int(locks.dw.max())} different results; with the barrier up to {int(barrier.dw.max())}. "
        f"With the barrier the largest error of dw is {ratio:.1f} times ours.",
    ]


study.conclude(steady, "patterns")

# %%

study.recorded(
    "patterns",
    caption="Different results in 100 runs, float16, and the largest error of dw against float64 "
    "in one of them.",
)

# %%
# The number of programs is part of the bits: a GPU with more multiprocessors gets another grouping.
# ``layer_norm(…, programs=132)`` fixes it, and then the bits no longer depend on the machine's
# size.
#
# Proof
# -----
#
# Every result against a float64 computation from the formulas above, in units in the last place
# (:ref:`ulp`) of the element type, taken as the root mean square over the result: near a zero of
# the truth an element's own unit is next to nothing. A correctly rounded result has an error of
# 0.29 in the root mean square. For the 16-bit types dw is also given as it is *before* its final
# rounding, with a float32 weight: so little is lost in the sum itself.

m, n = (4096, 2304) if gpu else (12, 96) if quick else (64, 1000)
rows = [
    row
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    for row in accuracy({k: norms[k] for k in ("Triton", "Torch")}, m, n, dtype, device, seed=1)
]
study.table(
    "accuracy",
    pd.DataFrame(rows),
    caption=f"Errors against float64 in units in the last place, {m} × {n}.",
    formats=dict.fromkeys((f"{k} {v}" for k in ("Triton", "Torch") for v in ("rms", "max")), ".3g"),
)

# %%


def proven(run):
    table = run.tables["accuracy"]
    rounded = table[table.result != "dw, not rounded"]
    assert (rounded["Triton rms"] <= 1.1 * rounded["Torch rms"] + 0.5).all()
    halves = rounded[rounded.dtype != "float32"]
    sums = table[table.result == "dw, not rounded"]
    assert (sums["Triton rms"] < 0.1).all()
    return [
        "No root mean square exceeds 1.1 times torch's plus half a unit. The worst of the 16-bit "
        f"types is {halves['Triton rms'].max():.2f} units; torch: {halves['Torch rms'].max():.2f}.",
        f"Before its final rounding dw is within {sums['Triton rms'].max():.2g} units of the truth "
        "in the root mean square: what is lost is lost by rounding the result.",
    ]


study.conclude(proven, "accuracy")

# %%

study.recorded(
    "accuracy", caption="Errors against float64 in units in the last place, 4096 × 2304."
)

# %%
# Interpreted, bfloat16 results are cut off, not rounded: twice the error of a GPU, where the record
# was taken.
#
# A large offset
# ^^^^^^^^^^^^^^
#
# The variance can be had from one pass over a row as the mean of the squares minus the square of
# the mean. In float32, for rows of mean 10,000 and deviation 1, that subtracts two numbers near
# 10⁸, whose spacing is 8. We centre first, and the row is still in registers for the second look:


def one_pass(x, w, b, eps):
    mean = x.mean(1, keepdim=True)
    variance = (x * x).mean(1, keepdim=True) - mean * mean
    return (x - mean) / (variance.clamp_min(0) + eps).sqrt() * w + b


[(x, dy)], w, b = draw(16, 96 if quick else 1000, torch.float32, device, offset=1e4, sd=1.0)
true = exact(x, dy, w, b)["y"]
results = {label: norms[label].forward(x, w, b, 1e-5)[0] for label in ("Triton", "Torch")}
results["one pass"] = one_pass(x, w, b, 1e-5)
offset = pd.DataFrame(
    {
        "forward": label,
        "largest": (y.double() - true).abs().max().item(),
    }
    for label, y in results.items()
)
study.table(
    "offset",
    offset,
    caption="Errors of y for float32 rows of mean 10,000 and deviation 1.",
    labels={"largest": "largest error"},
)

# %%


def offsets(run):
    table = run.tables["offset"].set_index("forward").largest
    assert table["one pass"] > 10 * table["Triton"]
    assert table["Triton"] < 2**-9
    return (
        f"One pass is off by up to {table['one pass']:,.0f}; ours by {table['Triton']:.1g}, torch "
        f"by {table['Torch']:.1g}. What remains is the error of the mean, a sum of "
        "numbers and a rounding: near 10,000 the spacing is 2⁻¹⁰."
    )


study.conclude(offsets, "offset")

# %%
# No cliff
# --------
#
# A Triton block has a power of two of columns, and a thread keeps its share of the row in
# registers: :math:`x` and :math:`g`, and two float32 sums for every column. At 8192 columns that
# fits. At 8704 a block would have 16,384, the registers overflow into memory, and Liger's kernel,
# in the tables below, loses half its speed there. Ours differs in a few ways, and each is a line or
# two of the kernel:
#
# * A row is cut into pieces of 1024 or 2048 columns, so that 8704 costs five of 2048, not eight.
#   Only the last has a mask.
# * Between its two looks at a row a thread keeps the row *as it was stored*, two values in a
#   register. Left alone, the compiler converts once and keeps the float32 values; an exclusive or
#   with a zero it does not know to be zero persuades it to convert again.
# * The sums take their rows in the second look, not the first, so that products need not wait.
# * While one row is worked on, the next ones are on their way to shared memory
#   (``tl.range(…, num_stages=…)``, two to four), and narrow rows share a tile.
# * The second stage is launched before the first has ended and waits inside [#pdl]_.
#
# What the compiler makes of it, float16:

WIDTHS = list(range(1024, 15873, 512))
chosen = WIDTHS if gpu else [1024, 2048, 3072, 4096, 6144, 8192, 8704, 12288, 14336, 15872]
if gpu:
    for n in WIDTHS:
        [(x, dy)], w, b = draw(256, n, torch.float16, device)
        norms["Triton"].backward(dy, x, w, b, *norms["Triton"].forward(x, w, b, 1e-5)[1:])
study.table(
    "registers",
    pd.DataFrame([spills(n) for n in chosen]).astype(
        {"registers": "Float64", "spilled": "Float64"}
    ),
    caption="How the backward cuts its rows; registers of a thread, and words that did not fit.",
    formats=dict.fromkeys(("N", "piece", "padded"), ",d")
    | dict.fromkeys(("registers", "spilled"), ".0f"),
)

# %%

study.recorded("registers")

# %%
# Speed
# -----
#
# All implementations in one process, in interleaved rounds; CUDA graphs, so that device time is
# measured and not launches; every call finds its inputs, and leaves its outputs, in another set of
# buffers, together several times the cache. Two ceilings run among the rivals: a copy of
# :math:`x`, and ``torch.add(x, g)``, which reads twice and writes once. Rates are
# :math:`3MN` and :math:`2MN` elements over the time.

INDUCTOR = (1024, 2048, 4096, 6144, 8192, 8704, 12288, 15872)
COLUMNS = ["N", "Triton", "Torch", "Liger", "Inductor", "Apex", "copy", "add"]
_, absent = layer_norms(device=device)
study.say([*dict.fromkeys([*missing, *absent])] or ["Every rival is here."])

# %%


def sitting(direction, m, n, dtype, labels, seed):
    """One comparison with fresh buffers: seconds for each label."""
    size = m * n * dtype.itemsize
    sets = copies(3 * size, device, most=16)
    pairs, w, b = draw(m, n, dtype, device, sets=sets, seed=seed)
    found, _ = layer_norms(*labels, device=device)
    kept = {}  # an output lives until its set's next turn: no call writes where another just wrote

    def keeping(label, call):
        def one(i):
            kept[label, i] = call(i)

        return one

    outs = [torch.empty_like(x) for x, _ in pairs]
    calls = {
        "copy": keeping("copy", lambda i: outs[i].copy_(pairs[i][0])),
        "add": keeping("add", lambda i: torch.add(*pairs[i], out=outs[i])),
    }
    for label, norm in found.items():
        saved = [norm.forward(x, w, b, 1e-5)[1:] for x, _ in pairs]
        if direction == "forward":
            call = lambda i, f=norm.forward: f(pairs[i][0], w, b, 1e-5)  # noqa: E731
        else:
            call = lambda i, f=norm.backward, s=saved: f(*pairs[i][::-1], w, b, *s[i])  # noqa: E731
        calls[label] = keeping(label, call)
    moved = {"forward": 2, "backward": 3}[direction] * size
    return measure(
        calls, device=device, cuda_graph=gpu, rotate=sets, budget_s=args.budget, min_rounds=5,
        bytes=dict.fromkeys(calls, moved) | {"copy": 2 * size, "add": 3 * size}, seed=seed,
    )  # fmt: skip


def rates(direction, m, n, dtype, labels):
    """GB/s for each label."""
    runs = [sitting(direction, m, n, dtype, labels, seed) for seed in range(args.sittings)]
    return pool(runs).frame.set_index("label").gb_s.to_dict()


def sweep(direction, cases):
    """A row for each (m, n, dtype, labels)."""
    frame = pd.DataFrame(
        [
            {"M": m, "N": n, "dtype": str(dtype).removeprefix("torch.")}
            | rates(direction, m, n, dtype, labels)
            for m, n, dtype, labels in cases
        ]
    )
    frame = frame.reindex(columns=["M", "dtype", *COLUMNS]).astype(
        dict.fromkeys(COLUMNS[1:], float)
    )
    if not gpu:  # times of a busy CPU mean little by themselves
        frame[COLUMNS[1:]] = frame[COLUMNS[1:]].div(frame["copy"], axis=0)
    return frame


ALL = ("Triton", "Torch", "Liger", "Apex")
if gpu:
    CASES = [
        (M, n, torch.float16, (*ALL, "Inductor") if n in INDUCTOR else ALL) for n in WIDTHS
    ]  # fmt: skip
else:
    CASES = [(64, n, torch.float32, ("Torch",)) for n in ((256,) if quick else (1024, 4096))]
    args.budget = min(args.budget, 0.02 if quick else 0.25)
FORMATS = dict.fromkeys(COLUMNS[1:], lambda v: f"{v:,.0f}" if v > 20 else f"{v:.2f}")
FORMATS |= {"N": ",d", "M": ",d"}
OF_COPY = "without one 64 rows, float32, over the rate of the copy."
NOTE = f"GB/s on a GPU, 4096 rows, float16; {OF_COPY}"
speed = {direction: sweep(direction, CASES) for direction in ("backward", "forward")}
study.table(
    "layer-norm-backward",
    speed["backward"][COLUMNS],
    caption=f"Backward: {NOTE}",
    formats=FORMATS,
    labels={"add": "two reads, one write"},
)

# %%

study.recorded("layer-norm-backward", caption="Backward: GB/s, 4096 rows, float16.")

# %%

study.table(
    "layer-norm-forward",
    speed["forward"][COLUMNS],
    caption=f"Forward: {NOTE}",
    formats=FORMATS,
    labels={"add": "two reads, one write"},
)

# %%

study.recorded("layer-norm-forward", caption="Forward: GB/s, 4096 rows, float16.")

# %%
# The lines below are those of the machine named above each plot: this build's where it has a GPU,
# else the recorded one's.

RIVALS = ["Torch", "Liger", "Inductor", "Apex"]
LINES = ["Triton", *RIVALS, "copy", "add"]


def plot(direction):
    """Rates by width, of every run that measured the kernels."""
    name = f"layer-norm-{direction}"
    measured = [r for r in study.runs(name) if r.tables[name]["Triton"].notna().any()]
    shown = measured[:1] or study.runs(name)[:1]
    fig, axes = subplots(
        len(shown), 1, height=4.2, squeeze=False, title=f"{direction.capitalize()}: speed by width"
    )
    for axis, run in zip(axes[:, 0], shown, strict=True):
        table = run.tables[name]
        for i, label in enumerate(LINES):
            line = table[["N", label]].dropna()
            if len(line):
                style = "--" if label in ("copy", "add") else "-"
                text = "two reads, one write" if label == "add" else label
                axis.plot(line.N, line[label].astype(float), style, color=PALETTE[i],
                          marker=MARKERS[i], markersize=4, label=text)  # fmt: skip
        axis.set(title=run.label.split(";")[0], ylim=(0, None))
        axis.set_ylabel("GB/s")
        axis.legend(ncols=3, fontsize=9)
    axes[-1, 0].set_xlabel("columns N")
    return fig


study.figure(
    "layer-norm-backward",
    plot("backward"),
    alt="Backward, GB/s against columns. On a GPU our kernel follows the copy, at 80 to 90 percent "
    "of it for most widths, and does not fall after 8192; torch stays near 1500, Liger rises to "
    "8192 and then falls by half.",
)

# %%

study.figure(
    "layer-norm-forward",
    plot("forward"),
    alt="Forward, GB/s against columns. On a GPU our kernel stays a tenth to a fifth below the "
    "copy; torch stays near 2100, Liger falls behind above 8192.",
)

# %%


def shares(run):
    sentences = []
    for direction in ("backward", "forward"):
        table = run.tables[f"layer-norm-{direction}"].set_index("N").astype(float)
        if table["Triton"].isna().all():
            assert not gpu or not run.is_build
            return "No GPU, and so no speed of the kernels here: torch and two ceilings alone."
        rivals = table[RIVALS].max(axis=1)
        share = table["Triton"] / table["copy"]
        behind = table.index[table["Triton"] < rivals]
        wide = share[share.index >= 2048]
        lead = (table["Triton"] / rivals).dropna()
        beside = lead[table["Inductor"].notna()]
        sentences.append(
            f"{direction.capitalize()}: {wide.min():.0%} to {wide.max():.0%} of the copy from 2048 "
            f"columns on (least at {wide.idxmin():,}), and {lead.min():.2f} to {lead.max():.2f} "
            f"times the best rival that ran at each; at the {len(beside)} widths where Inductor "
            f"ran too, {beside.min():.2f} to {beside.max():.2f} times."
        )
        if len(behind):
            sentences.append(f"Behind a rival at {', '.join(f'{n:,}' for n in behind)} columns.")
        low = wide[wide < (0.85 if direction == "backward" else 0.9)]
        if len(low):
            sentences.append(
                f"{len(low)} of these {len(wide)} widths are below our aim of "
                f"{0.85 if direction == 'backward' else 0.9:.0%}."
            )
    return sentences


study.conclude(shares, "layer-norm-backward", "layer-norm-forward")

# %%
# What holds a width back is mostly in its registers, and they count in steps. In the backward, from
# 14,848 columns on, some words of every thread are spilled, and only one row, not two, can be on
# its way while another is worked on, because the weight is fetched again with every row. In the
# forward, 168 registers let three programs of four warps share a multiprocessor, and 176 let two:
# to divide with correct rounding, which no float16 result can show, took eight, and with them a
# sixth of the speed at 5632 and 6144 columns. The kernel does so for float32 and float64 alone. The
# backward's narrowest rows take 12 to 20 µs, two or three of them in the second stage. Between
# multiples of a piece a part of the last is padding, for which instructions are spent, if no bytes.
#
# Other types, other numbers of rows
# ----------------------------------

if gpu:
    cases = [(M, n, d, ALL) for d in (torch.bfloat16, torch.float32) for n in INDUCTOR]
else:
    cases = [(64, 256, torch.float64, ("Torch",))]
types = pd.concat([sweep(d, cases).assign(direction=d) for d in ("backward", "forward")])
study.table(
    "types",
    types[["direction", "dtype", *COLUMNS]],
    caption="bfloat16 and float32: GB/s on a GPU, 4096 rows; without one float64, over the copy.",
    formats=FORMATS,
    labels={"add": "two reads, one write"},
)

# %%

study.recorded("types", caption="bfloat16 and float32: GB/s, 4096 rows.")

# %%


def others(name, what):
    """Where a rival is ahead, and the worst of it, for one table."""

    def sentences(run):
        table = run.tables[name]
        ours = table["Triton"].astype(float)
        if ours.isna().all():
            return "No GPU, and so no kernels to compare here."
        ran = [rival for rival in RIVALS if table[rival].notna().any()]
        every = f"every rival that ran ({', '.join(ran)})"
        lead = ours / table[ran].astype(float).max(axis=1)
        behind = table[lead < 1]
        if behind.empty:
            return f"Ahead of {every}, {lead.min():.2f} to {lead.max():.2f} times the best."
        rows = (f"{r.direction}, {what(r)}: {lead[i]:.2f}" for i, r in behind.iterrows())
        return [
            f"Ahead of {every} in {len(table) - len(behind)} of {len(table)} rows, by up to "
            f"{lead.max():.2f} times the best.",
            f"Behind, as a share of the best rival: {'; '.join(rows)}.",
        ]

    return sentences


study.conclude(others("types", lambda r: f"{r['dtype']}, {r['N']:,} columns"), "types")

# %%
# In float32 the rounding of a row's sum is the largest error of all. To add up what is left of each
# row once its mean is off, and correct the mean by that, took 160 registers instead of 128 at 8192
# columns, one program on a multiprocessor instead of two, and a third of the speed. So the numbers
# are taken from the first of their row before they are added: their sum is small to begin with, and
# that costs no registers.

# %%

if gpu:
    cases = [(m, 4096, torch.float16, ALL) for m in (256, 512, 1024, 2048, 4096, 16384, 65536)]
else:
    cases = [(m, 256, torch.float32, ("Torch",)) for m in (16, 64)]
batches = pd.concat([sweep(d, cases).assign(direction=d) for d in ("backward", "forward")])
study.table(
    "rows",
    batches[["direction", "M", *COLUMNS]],
    caption="From few rows to many: GB/s on a GPU, 4096 columns, float16; without one over the "
    "rate of the copy.",
    formats=FORMATS,
    labels={"add": "two reads, one write"},
)

# %%

study.recorded("rows", caption="From few rows to many: GB/s, 4096 columns, float16.")

# %%
study.conclude(others("rows", lambda r: f"{r.M:,} rows"), "rows")

# %%
# The copy is the driver's, and at half a gibibyte a tensor it is slower than our kernels: the
# ceiling is then two reads and one write.

# %%
# Launches included
# -----------------
#
# At 1024 columns a forward takes less time on the device than Python takes to launch it. What a
# user sees is the call, autograd and all, one after another. Torch's call is C++ throughout. Ours
# looks its shapes up, allocates, and goes through Triton's launcher, which alone takes as long as a
# whole ``torch.add`` into a given output; the backward is Python on autograd's thread. In a CUDA
# graph, or under ``torch.compile(mode="reduce-overhead")``, none of this is left.

from torch.nn import functional

from roundoff.kernels import layer_norm

m, n = (M, 1024) if gpu else (16, 64)
[(x, dy)], w, b = draw(m, n, torch.float16 if gpu else torch.float32, device)
x, w, b = (t.requires_grad_() for t in (x, w, b))


def forward_only(norm):
    with torch.no_grad():
        norm(x, (n,), w, b)


def both(norm):
    torch.autograd.grad(norm(x, (n,), w, b), (x, w, b), dy)


found = {}
contenders = {"Triton": layer_norm, "Torch": functional.layer_norm} if gpu else {
    "Torch": functional.layer_norm
}  # fmt: skip
for what, f in (("forward", forward_only), ("forward and backward", both)):
    calls = {label: lambda norm=norm, f=f: f(norm) for label, norm in contenders.items()}
    found[what] = measure(
        calls, device=device, budget_s=1 if gpu else 0.05, min_rounds=10 if gpu else 3
    ).frame.set_index("label")["median"]
launches = pd.DataFrame(
    [{"call": what} | {k: 1e6 * v for k, v in row.items()} for what, row in found.items()]
).reindex(columns=["call", "Triton", "Torch"])
if not gpu:
    launches["Torch"] /= launches["Torch"].iloc[0]
study.table(
    "launches",
    launches.astype({"Triton": float}),
    caption="Time of a call, launches included: µs on a GPU, 4096 × 1024; without one over that of "
    "torch's forward.",
    formats={"Triton": ".3g", "Torch": ".3g"},
)

# %%


def launched(run):
    table = run.tables["launches"].set_index("call").astype(float)
    if table["Triton"].isna().all():
        return "No GPU: nothing was launched."
    ratio = table["Triton"] / table["Torch"]
    return [
        f"{call.capitalize()}: our call takes {r:.2f} times as long as torch's."
        for call, r in ratio.items()
    ]


study.conclude(launched, "launches")

# %%

study.recorded("launches", caption="Time of a call, launches included, 4096 × 1024, in µs.")

# %%
# What to do
# ----------
#
# * **Give every addition its place.** Partial sums and a second stage cost less than a fifth of
#   the bytes at 4096 rows, and the bits repeat. Sums kept in the type of the input, as beside that
#   lock, cost accuracy as well.
# * **Count bytes, then registers.** Once the bytes are minimal, what separates a kernel from the
#   copy is what has to be alive at once.
# * **Look again rather than keep.** Converting a row twice is cheaper than holding it converted.
# * **Measure beside a ceiling**, in the same rounds and on the same kind of buffers.
# * **Replay small kernels from a graph.** Below some tens of microseconds it is the launch that is
#   timed.
#
# :ref:`layer-norm-discrepancies` says what two such kernels do to a model, and :ref:`llama-backend`
# uses kernels made in this way.
#
# .. [#ba] J. L. Ba, J. R. Kiros, G. E. Hinton, *Layer normalization*, 2016,
#    `arXiv:1607.06450 <https://arxiv.org/abs/1607.06450>`_.
# .. [#tutorial] Triton's tutorial `Layer Normalization
#    <https://triton-lang.org/main/getting-started/tutorials/05-layer-norm.html>`_. Ours is a few
#    lines written for this page; the barrier was added to the tutorial in
#    `pull 6307 <https://github.com/triton-lang/triton/pull/6307>`_.
# .. [#pdl] NVIDIA, *CUDA C++ Programming Guide*, section on programmatic dependent launch.

study.finish()
