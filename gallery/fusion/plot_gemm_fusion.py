r"""
.. _gemm-fusion:

One large Gemm or two small ones?
=================================

Two products of the same matrix, :math:`XY` and :math:`XZ`, can be had from one: :math:`X[Y, Z]`.
This page times both, and what real fusions do, with intervals and interleaved rounds; first it
checks whether the bits agree. Then it asks a plain model of launches, bytes and operations why.
"""

from collections import namedtuple
from functools import cache, partial

import numpy as np
import pandas as pd
import torch

from roundoff.compare import max_diff
from roundoff.dtypes import DTYPES, onnx_dtype_to_torch_dtype, ulp
from roundoff.errors import UnsupportedError
from roundoff.graph import onnx_simple_text_plot, plot_dot
from roundoff.models import GEMM_VARIANTS, gemm_cost, gemm_feeds, gemm_model
from roundoff.ort import available, session
from roundoff.page import MARKERS, PALETTE, subplots
from roundoff.page.legacy import Study
from roundoff.script import get_parsed_args, run_mode, unit_test_going, usage_error
from roundoff.timing import (
    copies,
    free_memory,
    last_level_cache,
    measure,
    measure_ceilings,
    pool,
    torch_precision,
)

NAME = "plot_gemm_fusion"
CONFIGS = {
    "small": (256, 512, 1024),
    "medium": (512, 1024, 2048),
    "large": (1024, 2048, 4096, 8192),
}
args = get_parsed_args(
    NAME,
    __doc__,
    config=("small", f"{', '.join(CONFIGS)}, or sizes such as 256,300"),
    itype=("1", "ONNX types: 1 (float32), 10 (float16), 16 (bfloat16), or several: 1,10"),
    warmup=(3, "least calls before the first round"),
    repeat=(5, "least number of rounds"),
    budget=(0.0, "seconds to spend on a comparison; 0: chosen for the device"),
)


def numbers(option, text, allowed=None):
    """The whole numbers of an option, or a clear end."""
    wanted = f"some of {', '.join(map(str, allowed))}" if allowed else "numbers from 1 on"
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or (allowed and not set(found) <= set(allowed)):
        usage_error(NAME, f"--{option} {text}: expected {wanted}, separated by commas")
    return found


quick = unit_test_going()
if args.config not in CONFIGS and not args.config[:1].isdigit():
    usage_error(NAME, f"--config {args.config}: expected {', '.join(CONFIGS)}, or sizes: 256,300")
sizes = CONFIGS.get(args.config) or sorted(set(numbers("config", args.config)))
itypes = list(dict.fromkeys(numbers("itype", args.itype, (1, 10, 16))))
if args.warmup < 0 or args.repeat < 1 or args.budget < 0:
    usage_error(NAME, "--warmup and --budget take 0 or more, --repeat 1 or more")
if quick and args.config == "small":
    sizes = (32, 64, 128)

device = "cuda" if torch.cuda.is_available() else "cpu"
provider = "CUDAExecutionProvider" if device == "cuda" else "CPUExecutionProvider"
if not available([provider]):  # a GPU, but ONNX Runtime's CPU build: rivals must share a device
    device, provider = "cpu", "CPUExecutionProvider"
threads = torch.get_num_threads()
if device == "cuda":
    torch.cuda.set_stream(torch.cuda.Stream())  # ONNX Runtime can compute on it; see roundoff.ort
else:
    torch.set_num_threads(1)  # of two thread pools, each waits for cores that the other holds
budget = args.budget or (0.08 if quick else 0.5 if device == "cuda" else 1.5)
study = Study(NAME, args)

# %%
# Three models
# ------------
#
# *Not fused* multiplies twice and joins the products.

print(onnx_simple_text_plot(gemm_model("not fused", itypes[0])))
study.svg(
    "not-fused",
    plot_dot(gemm_model("not fused", itypes[0])),
    alt="X goes into two Gemms, one with Y and one with Z; a Concat joins their results.",
)

# %%
# *Fused* joins the weights, at each run, and multiplies once.

print(onnx_simple_text_plot(gemm_model("fused", itypes[0])))
study.svg(
    "fused",
    plot_dot(gemm_model("fused", itypes[0])),
    alt="A Concat joins Y and Z; one Gemm multiplies X with the result.",
)

# %%
# *Fused ahead* finds the weights already joined, as a fusion of constant weights stores them.

print(onnx_simple_text_plot(gemm_model("fused ahead", itypes[0])))
study.svg(
    "fused-ahead",
    plot_dot(gemm_model("fused ahead", itypes[0])),
    alt="One Gemm multiplies X with YZ.",
)

# %%
# What is compared
# ----------------
#
# A case is a shape, a type and a precision. TF32 rounds the operands of a float32 product to 11
# binary digits; ONNX Runtime's CUDA provider does that unless told not to, torch only when told
# to. Here both are told the same, and the setting is a column. ``torch`` has the weights joined
# ahead too: it shows what the runtime itself costs.

Case = namedtuple("Case", "itype tf32 m k widths separate name", defaults=(False, ""))
LABELS = (*GEMM_VARIANTS, "torch")


def precisions():
    """(element type, TF32) in the order of the tables."""
    for itype in itypes:
        for tf32 in (False, True) if itype == 1 and device == "cuda" else (False,):
            yield itype, tf32


def named(case):
    """The first columns of every table."""
    tf32 = ("on" if case.tf32 else "off") if case.itype == 1 else "–"
    return {"dtype": DTYPES[case.itype].name, "tf32": tf32}


def matrices(case, seed):
    """X and the weights, normal, scaled so that the products are too."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, device=device, generator=generator)
    dtype = onnx_dtype_to_torch_dtype(case.itype)
    weights = [normal(case.k, n).div_(case.k**0.5).to(dtype) for n in case.widths]
    return normal(case.m, case.k).to(dtype), dict(zip("YZVW", weights, strict=False))


# %%
# Every rival gets the same buffers, and several sets of them: the calls go round, so that each
# finds a cold cache. A rival that cannot run gives its reason instead.


def bytes_of_a_set(case):
    """Inputs, the weights joined, and what each rival writes."""
    columns = sum(case.widths)
    elements = case.m * case.k + 2 * case.k * columns + 8 * case.m * columns
    return elements * DTYPES[case.itype].bits // 8


def rivals(case, sets, seed=0):
    """Label -> a list of callables, one a set of buffers, or the reason why there are none."""
    needed, free = bytes_of_a_set(case), free_memory(device)
    if needed > 0.8 * free:
        reason = f"does not fit: {needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} free"
        return dict.fromkeys(LABELS, reason)
    x, weights = matrices(case, seed)
    buffers = [(x.clone(), {n: w.clone() for n, w in weights.items()}) for _ in range(sets)]
    return {label: ready(label, case, buffers) for label in LABELS}


def ready(label, case, buffers):
    """Callables that have run once: what does not fit or is not there shows at the first run."""
    try:
        made = with_torch(case, buffers) if label == "torch" else with_ort(label, case, buffers)
        for run in made:
            run()
        return made
    except UnsupportedError:
        return f"{provider} has no Gemm of this type"
    except (MemoryError, torch.OutOfMemoryError):
        return "does not fit: out of memory"


@cache
def runtime(variant, itype, tf32, names, widths, separate):
    """A session, for all sizes of a measurement."""
    model = gemm_model(variant, itype, weights=names, widths=widths, separate=separate)
    return session(model, [provider], tf32=tf32)


def with_ort(variant, case, buffers):
    widths = case.widths if case.separate and len(set(case.widths)) > 1 else None
    names = tuple(buffers[0][1])
    run = runtime(variant, case.itype, case.tf32, names, widths, case.separate)
    return [run.bind(gemm_feeds(variant, *b)).run for b in buffers]


def with_torch(case, buffers):
    def one(x, weights):
        joined = torch.cat(list(weights.values()), dim=1)
        out = torch.empty(len(x), joined.shape[1], dtype=x.dtype, device=device)
        return partial(product, case, x, joined, out)

    return [one(*b) for b in buffers]


def product(case, x, joined, out):
    torch.mm(x, joined, out=out)
    return out.split(case.widths, 1) if case.separate else [out]


# %%
# Do the bits agree?
# ------------------
#
# On paper every element is the same sum of the same products. A library picks its kernel by the
# shape of the product, and the kernel decides in how many parts a sum is cut and in which order
# they are added (:ref:`reduction-order` says what that does); a wider product may get another one.
# So the table counts the elements whose bits differ from *not fused*, and measures each variant
# against a float64 product of the same inputs. One ULP (:ref:`ulp`) is that of a typical output,
# the root mean square: where a sum cancels almost to zero its own unit is tiny, and a distance in
# that unit says how close to zero the sum came. Here that root mean square is about 1, where the
# unit doubles, and chance puts it on either side: across sizes and machines, compare absolute
# errors.


def discrepancy(case):
    """A row a rival: against *not fused*, and against float64."""
    with torch_precision(case.tf32):
        outputs = {
            label: runs if isinstance(runs, str) else runs[0]()[0]
            for label, runs in rivals(case, 1).items()
        }
    ran = [label for label, out in outputs.items() if not isinstance(out, str)]
    if ran:
        x, weights = matrices(case, 0)
        truth = x.double() @ torch.cat(list(weights.values()), 1).double()
        unit = float(ulp(truth.square().mean().sqrt().item(), DTYPES[case.itype]))
    for label, out in outputs.items():
        row = named(case) | {"size": case.m, "label": label}
        if label not in ran:
            yield row | {"note": out}
            continue
        off = max_diff(truth, out)
        row |= {
            "error": off["abs"],
            "mean_error": off["sum"] / off["n"],
            "error_ulp": off["abs"] / unit,
        }
        if "not fused" in ran:
            apart = max_diff(outputs["not fused"], out, hist=(0.0,))
            row |= {"differ": apart["rep"][">0.0"] / apart["n"]}
            row |= {"apart": apart["abs"], "apart_ulp": apart["abs"] / unit}
        yield row


bits = pd.DataFrame(
    [
        row
        for itype, tf32 in precisions()
        for size in sorted({16, *sizes})
        for row in discrepancy(Case(itype, tf32, size, size, (size, size)))
    ],
    columns=[
        *("dtype", "tf32", "size", "label", "differ", "apart", "apart_ulp"),
        *("mean_error", "error", "error_ulp", "note"),
    ],
)
study.table(
    "discrepancy",
    bits,
    caption="Differences from **not fused**, and errors against float64.",
    formats={"size": "d", "differ": ".1%", "apart_ulp": ".3g", "error_ulp": ".3g"},
    labels={
        "differ": "other bits",
        "apart": "apart, largest",
        "apart_ulp": "apart, largest",
        "mean_error": "error, mean",
        "error": "error, largest",
        "error_ulp": "error, largest",
    },
    units={"apart_ulp": "ULP", "error_ulp": "ULP"},
)

# %%
study.recorded("discrepancy")

# %%


def on_bits(run):
    """Where fusing changes bits, and whether it costs accuracy."""
    table = run.tables["discrepancy"].dropna(subset=["differ"])
    for precision, part in table.groupby(["dtype", "tf32"], sort=False):
        name = spoken(*precision)
        fused = part[part["label"].isin(GEMM_VARIANTS[1:])]
        if fused.empty:
            continue
        changed = sorted(fused.loc[fused["differ"] > 0, "size"].unique())
        if not changed:
            assert (fused["apart"] == 0).all()
            yield f"{name}: all three variants agree to the last bit at every size."
            continue
        base = part[part["label"] == "not fused"].set_index("size")["mean_error"]
        factor = fused["mean_error"].to_numpy() / base[fused["size"]].to_numpy()
        nearer = verdict(factor.min(), factor.max())
        yield (
            f"{name}: fusing changes bits at {', '.join(map(str, changed))}, by "
            f"{fused['apart_ulp'].max():.3g} ULP of a typical output at most; the result is "
            f"{nearer} float64 ({factor.min():.2f} to {factor.max():.2f} times the mean error of "
            "not fused)."
        )


def verdict(least, most):
    """What a range of errors over that of *not fused* says; a quarter more or less says nothing."""
    if least > 0.8 and most < 1.25:
        return "as near to"
    if most < 1.25:
        return "as near to, or nearer,"
    if least > 0.8:
        return "as near to, or further from,"
    return "nearer at some sizes and further at others from"


def spoken(dtype, tf32):
    return f"**{dtype}**" + ({"on": " with TF32", "off": ""}.get(tf32, ""))


study.conclude(lambda run: list(on_bits(run)) or "Nothing to compare.", "discrepancy")

# %%
# What this machine can do
# ------------------------
#
# The ceilings are measured by the same harness in the same run: a copy, two reads with one write,
# and torch's matrix product for each type. They are the denominators of the shares below.

ceilings = measure_ceilings(
    device,
    dtypes=sorted({1, *itypes}),
    side=128 if quick else None,
    nbytes=2**20 if quick else None,
    budget_s=0.05 if quick else 0.4,
)
study.table(
    "ceilings",
    ceilings.frame.assign(
        rate=ceilings.frame["rate"] / 1e9,
        low=ceilings.frame["low"] / 1e9,
        high=ceilings.frame["high"] / 1e9,
        unit="G" + ceilings.frame["unit"],
    ),
    caption="Measured ceilings: median and the interval of the median. Size: bytes of a buffer, or "
    "side of the matrices.",
)

# %%
study.recorded("ceilings")

# %%
# Time
# ----
#
# Each case is a contest of four rivals in one process. A round times each once, in an order drawn
# anew; the rounds of a sitting end when each ratio to *not fused* is known to 2 %, or the budget
# is spent. Then the next case has its turn, and so on round the cases, several times, each sitting
# with new buffers. What stays the same throughout a sitting (where its buffers lie, who else is
# busy) shows between sittings, and the intervals come from there. They hold the true median 95
# times in 100. On a CPU, times are divided by the median of *not fused* at the same
# size (of ``torch`` for a type that ONNX Runtime lacks): only ratios mean anything there.


def sitting(case, seed):
    """Timings of the rivals that run, and the reasons of those that do not."""
    cost = gemm_cost("fused ahead", case.m, case.k, case.widths, DTYPES[case.itype].bits // 8)
    room = free_memory(device) // 3 // bytes_of_a_set(case)
    sets = max(1, min(copies(int(cost.bytes), device, most=4 if quick else 64), room))
    found = rivals(case, sets, seed)
    reasons = {label: why for label, why in found.items() if isinstance(why, str)}
    runs = {label: r for label, r in found.items() if label not in reasons}
    if not runs:
        return None, reasons
    with torch_precision(case.tf32):
        agree(runs)
        timings = measure(
            {label: partial(call, r) for label, r in runs.items()},
            rotate=sets,
            device=device,
            budget_s=budget / SITTINGS,
            precision=0.02,
            warmup=args.warmup,
            min_rounds=-(-args.repeat // SITTINGS),
            seed=seed,
            bytes=dict.fromkeys(runs, cost.bytes),
            flops=dict.fromkeys(runs, cost.flops),
        )
    return timings, reasons


SITTINGS = 5


def timed(cases, seed=0):
    """Case -> (timings, reasons), its sittings spread over the time that all cases take."""
    runtime.cache_clear()
    found = {case: [] for case in cases}
    for turn in range(SITTINGS):
        for case, parts in found.items():
            parts.append(sitting(case, seed + turn))
    return {
        case: (pool([t for t, _ in parts if t is not None]), parts[0][1])
        if any(t is not None for t, _ in parts)
        else (None, parts[0][1])
        for case, parts in found.items()
    }


def agree(runs):
    """Rivals must return the same outputs: these are of order one, and no rounding moves 0.1."""
    first, *others = [r[0]() for r in runs.values()]
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert a.shape == b.shape
            assert (a.float() - b.float()).abs().max() < 0.1


def call(runs, i):
    return runs[i]()


def rows_of(case, timings, reasons):
    """A row a rival: in microseconds, on a CPU in medians of *not fused*."""
    frame = pd.DataFrame() if timings is None else timings.frame.set_index("label")
    base = 1e-6
    if device == "cpu" and len(frame):
        base = frame["median"].get("not fused", frame["median"].iloc[0])
    for label in LABELS:
        row = named(case) | {"size": case.m, "label": label, "note": reasons.get(label, "")}
        if label in frame.index:
            found = frame.loc[label]
            times = {
                "time": "mean",
                **{c: c for c in ("std", "min", "max", "median", "low", "high")},
            }
            row |= {column: found[source] / base for column, source in times.items()}
            row |= {"warmup": found["warmup"], "repeat": found["rounds"]}
            row |= {"stopped": found["stopped"], "note": found["warnings"], "unit": unit}
        yield row


unit = "µs" if device == "cuda" else "of not fused"
squares = [
    Case(itype, tf32, size, size, (size, size)) for itype, tf32 in precisions() for size in sizes
]
contests = timed(squares)
columns = "dtype tf32 size label warmup time std min max median low high unit repeat stopped note"
times = pd.DataFrame(
    [row for case, found in contests.items() for row in rows_of(case, *found)],
    columns=columns.split(),
)
study.table(
    "times",
    times,
    caption="Times of the rivals: mean, spread, and the median with its interval.",
    formats={"size": "d", "warmup": ".0f", "repeat": ".0f"},
    labels={"time": "mean", "warmup": "warm-up", "repeat": "rounds"},
)

# %%
study.recorded("times")

# %%
# The ratios are medians of the ratios of the rounds, so that what slows a whole round down
# cancels, averaged over the sittings. An interval that holds 1 shows no difference.


def ratios_of(case, timings, **more):
    """A row a rival: its time over that of *not fused*."""
    if timings is None or "not fused" not in timings.samples:
        return
    for label in timings.samples.columns[1:]:
        r = timings.ratio(label, "not fused")
        found = {"ratio": r.value, "low": r.low, "high": r.high, "se": r.se, "units": r.units}
        yield named(case) | {"size": case.m, "label": label} | found | more


ratios = pd.DataFrame(
    [row for case, (timings, _) in contests.items() for row in ratios_of(case, timings)],
    columns=["dtype", "tf32", "size", "label", "ratio", "low", "high", "se", "units"],
)
study.table("ratios", ratios, caption="Time over that of **not fused**.", formats={"size": "d"})


def pivot(frame, *keys):
    """Keys x label, each cell a ratio with its interval."""
    shown = frame["ratio"].map("{:.3f}".format) + frame.apply(
        lambda row: f" [{row['low']:.3f}, {row['high']:.3f}]", axis=1
    )
    wide = frame.assign(shown=shown).pivot(index=list(keys), columns="label", values="shown")
    order = [label for label in LABELS if label in wide]
    return wide.reindex(frame.set_index(list(keys)).index.unique())[order]


def pivot_table(name, frame, caption, *keys):
    if frame.empty:
        return study.say("ONNX Runtime runs none of these cases here, so there is no ratio.")
    return study.table(
        name,
        pivot(frame, *keys),
        caption=caption,
        index=True,
        formats={"size": "d"},
    )


pivot_table("pivot", ratios, "Time over that of **not fused**.", "dtype", "tf32", "size")

# %%
study.recorded("pivot")

# %%
# A script keeps the same as a spreadsheet.

if run_mode() == "script":
    try:
        with pd.ExcelWriter(study.output / f"{NAME}.xlsx") as book:
            for sheet, frame in {"times": times, "ratios": ratios, "discrepancy": bits}.items():
                frame.to_excel(book, sheet_name=sheet, index=False)
    except ImportError:
        print("no spreadsheet: openpyxl is not installed")

# %%


def draw_times(axis, part):
    for i, label in enumerate(LABELS):
        rows = part[(part["label"] == label) & part["median"].notna()]
        if rows.empty:
            continue
        errors = [rows["median"] - rows["low"], rows["high"] - rows["median"]]
        aside = 1.03 ** (i - 1.5)  # else the markers hide one another
        axis.errorbar(
            rows["size"] * aside, rows["median"], errors, label=label, color=PALETTE[i],
            marker=MARKERS[i], capsize=3,
        )  # fmt: skip
    unit = part["unit"].iloc[0]
    axis.set(xscale="log", yscale="log", xlabel="side of the matrices")
    axis.set_ylabel(f"median time, {unit}")
    axis.set_xticks(sorted(part["size"].unique()), map(str, sorted(part["size"].unique())))
    axis.minorticks_off()


def rescaled(times):
    """Absolute on CUDA; on a CPU in units of *not fused* at the smallest size, one unit for all."""
    if device == "cuda":
        return times
    first = {}
    for case, (timings, _) in contests.items():
        if timings is not None:
            medians = timings.frame.set_index("label")["median"]
            first[case.itype, case.m] = medians.get("not fused", medians.iloc[0])
    frame = times.copy()
    for column in ("median", "low", "high"):
        frame[column] = [
            value
            * first.get((itype_of(dtype), size), np.nan)
            / first.get((itype_of(dtype), min(sizes)), np.nan)
            for value, dtype, size in zip(frame[column], frame["dtype"], frame["size"], strict=True)
        ]
    return frame.assign(unit=f"× not fused at {min(sizes)}")


def itype_of(name):
    return next(d.onnx for d in DTYPES.values() if d.name == name)


panels = [
    (precision, part, "this build" if run.is_build else run.label.split(";")[0])
    for run in study.runs("times")
    for precision, part in (rescaled(times) if run.is_build else run.tables["times"])
    .dropna(subset=["median"])
    .groupby(["dtype", "tf32"], sort=False)
]
fig, axes = subplots(
    -(-len(panels) // 2), 2, squeeze=False, title="Time of the rivals, by side of the matrices"
)
for axis, (precision, part, machine) in zip(axes.flat, panels, strict=False):
    draw_times(axis, part)
    axis.set_title(f"{spoken(*precision).replace('*', '')}, {machine}", fontsize=9)
axes.flat[0].legend()
for axis in axes.flat[len(panels) :]:
    axis.set_axis_off()
study.figure(
    "times",
    fig,
    alt="Median time of not fused, fused, fused ahead and torch over the side of the matrices, "
    "both logarithmic, with error bars: a panel for each machine and precision. The lines lie "
    "close together where the matrices are large.",
)

# %%
# Share of what the machine can do
# --------------------------------
#
# Operations a second over the matrix product of the type: the measured ceiling, or the fastest
# rival where one beats it. Bytes a second over the measured copy. Bytes are those of *fused
# ahead*, the least that any rival must move.


def rate_name(case):
    return DTYPES[case.itype].name + (" tf32" if case.tf32 else "")


fastest = {rate_name(case): ceilings[rate_name(case)] for case in squares}
for case, (timings, _) in contests.items():
    if timings is not None:
        reached = timings.frame["gflop_s"].max() * 1e9
        fastest[rate_name(case)] = float(np.nanmax([fastest[rate_name(case)], reached]))


def shares_of(case, timings):
    if timings is None:
        return
    for _, row in timings.against(ceilings).iterrows():
        rates = {"product": fastest[rate_name(case)] / 1e9, "copy": ceilings["copy"] / 1e9}
        found = {
            "of_product": row["gflop_s"] / rates["product"],
            "of_copy": row["gb_s"] / rates["copy"],
        }
        yield named(case) | {"size": case.m, "label": row["label"]} | found | rates


shares = pd.DataFrame(
    [row for case, (timings, _) in contests.items() for row in shares_of(case, timings)],
    columns=[*["dtype", "tf32", "size", "label", "of_product", "of_copy", "product", "copy"]],
)
study.table(
    "shares",
    shares,
    caption="Share of the measured ceilings.",
    formats={"of_product": ".1%", "of_copy": ".1%", "size": "d"},
    labels={
        "of_product": "of the product",
        "of_copy": "of the copy",
        "product": "fastest product",
        "copy": "measured copy",
    },
    units={"product": "GFLOP/s", "copy": "GB/s"},
)

# %%
study.recorded("shares")

# %%
# Beyond squares
# --------------
#
# In a transformer X is a batch of tokens and the weights stay. With one token the products only
# read weights; with thousands they only compute. The products of queries, keys and values, and of
# gate and up, are used one by one: there the unfused model needs no Concat and the fused ones need
# a Split (``torch`` gives views, without a copy).

width = 128 if quick else 4096 if device == "cuda" else 512
tokens = (
    (1, 16, 64)
    if quick
    else (1, 4, 16, 64, 256, 1024, 4096)
    if device == "cuda"
    else (1, 4, 16, 64, 256, 1024)
)
last = tokens[-1] if device == "cuda" else 64


def shapes(itype, tf32):
    for m in tokens:
        yield Case(itype, tf32, m, width, (width, width), name=f"{m} × {width} × 2·{width}")
    for m, batch in ((1, "1 token"), (last, f"{last} tokens")):
        quarter, wide = width // 4, width * 11 // 4
        yield Case(itype, tf32, m, width, (width, quarter, quarter), True, f"QKV, {batch}")
        yield Case(itype, tf32, m, width, (wide, wide), True, f"gate-up, {batch}")


others = timed([case for p in precisions() for case in shapes(*p)])
beyond = pd.DataFrame(
    [
        row
        for case, (timings, _) in others.items()
        for row in ratios_of(case, timings, shape=case.name)
    ],
    columns=["dtype", "tf32", "shape", "size", "label", "ratio", "low", "high", "se", "units"],
)
study.table("beyond", beyond, caption="Time over that of **not fused**.", formats={"size": "d"})
pivot_table("beyond-pivot", beyond, "Time over that of **not fused**.", "dtype", "tf32", "shape")

# %%
study.recorded("beyond-pivot")

# %%
# A plain model
# -------------
#
# Each kernel takes its bytes over the measured copy or its operations over the fastest product,
# whichever is longer; what one kernel leaves for the next is free while it fits in the last cache.
# What a call and a launch cost on top comes from a 16 × 16 case, where nothing else counts: *not
# fused* starts three kernels there, *fused ahead* one. On CUDA the host starts kernels while others
# compute, so the longer of the two counts; on a CPU they add.


def overheads(timings):
    """Seconds of a call, and of a launch, from the smallest case."""
    if timings is None or "not fused" not in timings.samples:
        return None
    medians = timings.samples.median()
    launch = max(0.0, (medians["not fused"] - medians["fused ahead"]) / 2)
    return {"call": max(0.0, medians["fused ahead"] - launch), "launch": launch}


def predicted(case, label):
    """Time of *label* over that of *not fused*, by the model."""
    if label == "torch" or overhead[case.itype, case.tf32] is None:
        return np.nan
    rates = {"byte_rate": ceilings["copy"], "flop_rate": fastest[rate_name(case)]}
    machine = {"overlap": device == "cuda", "cache": last_level_cache(device)}
    size = DTYPES[case.itype].bits // 8
    found = [
        gemm_cost(variant, case.m, case.k, case.widths, size, case.separate).seconds(
            **rates, **machine, **overhead[case.itype, case.tf32]
        )
        for variant in (label, "not fused")
    ]
    return found[0] / found[1]


smallest = timed([Case(*precision, 16, 16, (16, 16)) for precision in precisions()])
overhead = {case[:2]: overheads(timings) for case, (timings, _) in smallest.items()}
measured = pd.concat(
    [
        pd.DataFrame(
            [
                row | {"series": series, "model": predicted(case, row["label"])}
                for case, (timings, _) in cases.items()
                if not case.separate
                for row in ratios_of(case, timings)
            ]
        )
        for series, cases in (("squares", contests), ("tokens", others))
    ]
)
measured = measured.reindex(
    columns=["series", "dtype", "tf32", "size", "label", "ratio", "low", "high", "model"]
)
study.table(
    "model",
    measured[measured["label"] != "torch"],
    caption="Time over that of **not fused**: measured, and by the model.",
    formats={"size": "d"},
)

# %%
study.recorded("model")

# %%
# Markers are measured, with their intervals; lines are the model.


def draw_model(axis, part):
    for i, label in enumerate(GEMM_VARIANTS[1:], start=1):
        rows = part[part["label"] == label].sort_values("size")
        errors = [rows["ratio"] - rows["low"], rows["high"] - rows["ratio"]]
        aside = 1.03 ** (i - 1.5)
        axis.errorbar(
            rows["size"] * aside, rows["ratio"], errors, color=PALETTE[i], marker=MARKERS[i],
            linestyle="none", capsize=3, label=label,
        )  # fmt: skip
        axis.plot(rows["size"], rows["model"], color=PALETTE[i], linestyle="--", linewidth=1.2)
    axis.axhline(1, color="#7b838d", linewidth=1)
    ticks = sorted(part["size"].unique())
    axis.set(xscale="log", ylabel="time over not fused")
    axis.set_xticks(ticks, map(str, ticks))
    axis.minorticks_off()


found = study.runs("model")
panels = [
    (run, precision, part)
    for run in found
    for precision, part in run.tables["model"].groupby(["dtype", "tf32"], sort=False)
]
fig, axes = subplots(
    max(len(panels), 1), 2, height=2.8, squeeze=False,
    title="Measured (markers) and by the model (dashed)",
)  # fmt: skip
for row, (run, precision, part) in zip(axes, panels, strict=False):
    machine = "this build" if run.is_build else run.label.split(";")[0]
    for axis, series in zip(row, ("squares", "tokens"), strict=True):
        draw_model(axis, part[part["series"] == series])
        axis.set_title(f"{series}, {spoken(*precision).replace('*', '')}, {machine}", fontsize=9)
        axis.set_xlabel("side of the matrices" if series == "squares" else "tokens")
axes.flat[0].legend()
study.figure(
    "model",
    fig,
    alt="Time of the two fused variants over that of not fused, measured with error bars and as "
    "dashed lines by the model: over the size of squares, and over the number of tokens.",
)

# %%


def on_model(run):
    """How far the model is from what was measured."""
    table = run.tables["model"].dropna(subset=["model"])
    for precision, part in table.groupby(["dtype", "tf32"], sort=False):
        off = np.log(part["model"] / part["ratio"]).abs()
        worst = part.loc[off.idxmax()]
        assert np.expm1(off.median()) <= np.expm1(off.max())
        yield (
            f"{spoken(*precision)}: half of the model's ratios are within "
            f"{np.expm1(off.median()):.0%} of the measured ones; the worst is {worst['label']} at "
            f"{worst['series']} {worst['size']}, {worst['model']:.2f} instead of "
            f"{worst['ratio']:.2f}."
        )


study.conclude(lambda run: list(on_model(run)) or "Nothing to model.", "model")

# %%
# Would a second run say the same?
# --------------------------------
#
# The intervals say how well this run knows its ratios. The proof is another run: everything is
# made anew (sessions, buffers, orders) and each ratio is compared with the first by a test of the
# difference at 5 %. Of ratios that did not change, one in twenty fails that test.


def again(case):
    """Each ratio measured twice, and how likely chance sets the two this far apart."""
    first, second = contests[case][0], repeats[case][0]
    if first is None or "not fused" not in first.samples:
        return
    for label in first.samples.columns[1:]:
        one, two = (t.ratio(label, "not fused") for t in (first, second))
        row = named(case) | {"size": case.m, "label": label, "ratio": one.value}
        yield row | {"again": two.value, "p": one.p_value(two)}


repeats = timed(squares, seed=SITTINGS)
repeated = pd.DataFrame(
    [row for case in squares for row in again(case)],
    columns=["dtype", "tf32", "size", "label", "ratio", "again", "p"],
)
study.table(
    "again",
    repeated,
    caption="The ratios, measured twice. Bold: different at 5 %.",
    formats={"size": "d", "p": ".2g", "ratio": ".3f", "again": ".3f"},
    emphasize={"p": lambda frame: frame["p"] < 0.05},
)

# %%


def on_repeats(run):
    table = run.tables["again"]
    count, different = len(table), int((table["p"] < 0.05).sum())
    if not count:
        return "Nothing to repeat."
    apart = (table["again"] / table["ratio"]).map(np.log).abs().max()
    # As many as chance gives, or fewer, 95 times in 100.
    likely = next(k for k in range(count + 1) if binomial_below(k, count) >= 0.95)
    verdict = "no more than chance explains" if different <= likely else "more than chance explains"
    assert (different <= likely) == (binomial_below(different - 1, count) < 0.95)
    return (
        f"{different} of {count} ratios differ between the two runs at 5 %: {verdict} "
        f"(up to {likely}). The furthest apart are {np.expm1(apart):.1%}."
    )


def binomial_below(k, n, p=0.05):
    """Chance of at most k in n."""
    from scipy.special import bdtr

    return float(bdtr(k, n, p)) if k >= 0 else 0.0


study.conclude(on_repeats, "again")

# %%
# When is it worth it?
# --------------------


def on_time(run):
    """Range of each fused variant's ratios, and from which size on they do not matter."""
    table = run.tables["ratios"]
    for precision, part in table.groupby(["dtype", "tf32"], sort=False):
        for label in GEMM_VARIANTS[1:]:
            rows = part[part["label"] == label].sort_values("size")
            faster = int((rows["high"] < 1).sum())
            slower = int((rows["low"] > 1).sum())
            assert faster + slower <= len(rows)
            yield (
                f"{spoken(*precision)}, {label}: {rows['ratio'].min():.2f} to "
                f"{rows['ratio'].max():.2f} of the unfused time; shown faster at {faster} and "
                f"slower at {slower} of {len(rows)} sizes{close_from(rows)}."
            )


def close_from(rows, within=0.03):
    """The size from which on every interval is within 3 % of 1, if there is one."""
    close = (rows["low"] >= 1 - within) & (rows["high"] <= 1 + within)
    sizes = [s for s in rows["size"] if close[rows["size"] >= s].all()]
    if sizes:
        return f"; known to be within {within:.0%} of it from {min(sizes)} on"
    end = rows.iloc[-1]
    return f"; at {end['size']} it is {end['ratio']:.3f} [{end['low']:.3f}, {end['high']:.3f}]"


study.conclude(lambda run: list(on_time(run)) or "No ratio to speak of.", "ratios")

# %%


def on_shapes(run):
    table = run.tables["beyond"]
    rows = table[table["label"] == "fused ahead"]
    for precision, part in rows.groupby(["dtype", "tf32"], sort=False):
        best, worst = part.loc[part["ratio"].idxmin()], part.loc[part["ratio"].idxmax()]
        assert best["ratio"] <= worst["ratio"]
        yield (
            f"{spoken(*precision)}, fused ahead, shapes of a transformer: from "
            f"{best['ratio']:.2f} of the unfused time ({best['shape']}) to {worst['ratio']:.2f} "
            f"({worst['shape']})."
        )


study.conclude(lambda run: list(on_shapes(run)) or "No ratio to speak of.", "beyond")

# %%
# What to do
# ----------
#
# * **Join constant weights ahead** where the products are short: that saves launches, and a pass
#   over what a Concat moves. Where they are long it may lose, above all if a Split has to follow.
# * **Do not join large weights at each run** when the batch is small: the product is then one pass
#   over the weights, and joining them adds two. Where launches take the time, that costs nothing.
# * **Measure your own shapes.** A ratio belongs to a size, a type and a machine, and one row of one
#   table belongs to chance until a second run has said the same.
# * **Be ready for other bits**, nearer to the truth or further from it: compare with float64 before
#   and after, as above.
#
# :ref:`llama-backend` has a rule that packs the products of queries, keys and values in this way,
# and what the whole layer gains.

runtime.cache_clear()
torch.set_num_threads(threads)
if device == "cuda":
    torch.cuda.set_stream(torch.cuda.default_stream())
study.finish()
