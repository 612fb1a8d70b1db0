r"""
.. _layer-norm-ladder:

How do I write a fast LayerNorm in Triton, step by step?
========================================================

From the kernels that one writes first to those of this library: each step runs, and says why.

.. answer:: nvidia-h200

   * **4096 columns: no atomics, load ahead, two rows at a time.** The backward with atomics gives
     another dw in each run, and reaches :bound:`18 <climb>` % of a stream with the same bytes; with
     dw and db added in two stages :bound:`44 <climb/2>` %, with the next rows loaded meanwhile
     :bound:`65 <climb/3>` %, two rows at a time :bound:`73 <climb/4>` %. torch's is at
     :bound:`40 <climb/5>` %.
   * **8704 columns: cut the row into pieces.** A block of Triton has a power of two of elements,
     here 16,384: it spills :bound:`104 <spills>` words of every thread and reaches
     :bound:`34 <climb-8704>` %. Five pieces of 2048 spill none and reach
     :bound:`62 <climb-8704/2>` %; loaded ahead, :bound:`79 <climb-8704/3>` %.
   * **32,768 columns: several programs share a row.** dw and db alone are as large as all registers
     of a multiprocessor. Pieces reach :bound:`6.6 <climb-wide/2>` %, a kernel that reads rows twice
     :bound:`34 <climb-wide/4>` %, eight programs a row :bound:`66 <climb-wide/5>` %. On an H100 the
     steps have the same order, up to :bound:`85 <climb/4@nvidia-h100-80gb-hbm3>`,
     :bound:`90 <climb-8704/5@nvidia-h100-80gb-hbm3>` and
     :bound:`82 <climb-wide/5@nvidia-h100-80gb-hbm3>` %.

   .. code-block:: python

      simple_backward[(programs,)](x, dy, w, mean, rstd, dx, part, M, N, P=4096, num_warps=8)
      add_partial_sums[(-(-N // 16), 2)](part, sums, programs, N, R=256, P=16)  # dw and db
"""

# %%
# A program of Triton is a thread block that computes with whole arrays
# ---------------------------------------------------------------------
#
# For who knows CUDA, after ``import triton`` and ``import triton.language as tl``:
#
# * ``kernel[grid](…, num_warps=8)`` starts a thread block for each point of the grid, here of 256
#   threads. Triton calls it a :term:`program`; ``tl.program_id(0)`` is ``blockIdx.x``.
# * ``tl.arange(0, P)`` is an array of P numbers, P a power of two. It and all that is computed from
#   it, a *block*, is spread over the threads: P / 256 elements in registers of each. There is no
#   ``threadIdx``. Two dimensions are written as in NumPy: ``rows[:, None] * N + cols[None, :]`` has
#   shape (R, P).
# * ``tl.load(X + cols, mask=cols < N, other=0.0)`` loads a block; masked elements are not read. A
#   sum over a block goes through shuffles and shared memory by itself.
# * A tensor argument is a pointer: ``X + cols`` counts elements, ``X.dtype.element_ty`` is their
#   type. From 2³¹ elements on ``row * N`` overflows its 32 bits: ``row.to(tl.int64) * N``.
# * ``tl.constexpr`` arguments are constants of the compiler, as template parameters are;
#   ``tl.static_range`` is a loop that is unrolled.
#
# In the listings ``@kernel`` is ``triton.jit``, or Triton's :term:`interpreter` where there is no
# GPU; ``sum_along(x, 0)`` is ``tl.sum(x, 0)``; P is the columns of a block: of a row, of a piece or
# of the second stage. The maths is on :ref:`triton-layer-norm`, which compares libraries.

import inspect
from contextlib import nullcontext
from functools import partial
from html import escape

import pandas as pd
import torch
from torch.nn import functional

from roundoff.compare import digest, scaled_error
from roundoff.kernels import interpreting, ladder, lessons, shuffled_programs
from roundoff.kernels.ahead import compiled_ahead
from roundoff.kernels.baselines import layer_norms, stream
from roundoff.page import Shown, Study
from roundoff.script import get_parsed_args, unit_test_going
from roundoff.timing import copies, measure

args = get_parsed_args(
    "plot_layer_norm_ladder",
    __doc__,
    rows=(4096, "rows of the benchmark", 1),
    budget=(0.4, "seconds for each comparison", 0),
)
study = Study("plot_layer_norm_ladder", args)
quick = unit_test_going()
gpu = torch.cuda.is_available() and not interpreting()
device, part = ("cuda", "gpu") if gpu else ("cpu", "cpu")
TORCH = layer_norms("cpu")[0]["torch"]
STEPS = {"forward": ladder.FORWARD, "backward": ladder.BACKWARD}
WIDTHS = [4096] if quick else [4096, 8704, 32768]


def folded(name, *kernels):
    """Their source, behind a line to open."""
    text = "\n\n".join(inspect.getsource(kernel.fn) for kernel in kernels)
    code = f'<div class="highlight-python highlight"><pre>{escape(text)}</pre></div>'
    return Shown(f"<details><summary>{name}</summary>{code}</details>", text)


# %%
# As first written: a row is a program, and a block
# -------------------------------------------------
#
# The forward reads a row once and keeps it: mean, variance about the mean, result.

print(inspect.getsource(ladder.row_forward.fn))

# %%
# The backward needs two means over the row for dx, and sums over all rows for dw and db. With a
# program for each row, the plain way is to add to one sum in memory. Every row then adds 2N numbers
# to the same 2N places, and no :term:`order <atomics>` is kept.

folded("The backward as first written, with atomics", ladder.atomic_backward)

# %%
# Two stages: sums in registers, added in order
# ---------------------------------------------
#
# A fixed number of programs share the rows: program p takes rows p, p + programs, … and keeps its
# dw and db in registers, in float32. At the end it writes one row of partial sums; the second
# kernel adds these. Memory sees N numbers a program instead of N a row, and every addition has its
# place: the bits change only with the number of programs. The weight is loaded once for all rows.

folded("The two stages", lessons.simple_backward, lessons.add_partial_sums)

# %%
# Pieces: 8704 columns are five blocks of 2048, not one of 16,384
# ---------------------------------------------------------------
#
# A block has a power of two of elements, and the masked ones take registers as well. In pieces only
# the last has a mask, and the padding is at most one piece. A tuple of blocks, indexed in an
# unrolled loop, takes the place of an array, which Triton has not.
#
# The same kernel has the next steps as arguments:
#
# * **Packed** (``PACKED``; False for float32 and in the interpreter): the row is needed twice,
#   before and after its sums are known. A compiler that converts x and dy to float32 once may keep
#   them so, in twice the registers. ``same_bits`` is an XOR with a 0 that the compiler does not
#   know: it has to convert again.
# * **Two programs** for a multiprocessor, 264 on an H200: while one waits for memory the other
#   computes. Both must fit: 65,536 registers are two programs of 256 threads with 128 each.
# * **Prefetch** (``tl.range(…, num_stages=3)``): the compiler asks for the rows of the next rounds
#   before it works on this one's. They lie in shared memory meanwhile: (STAGES − 1) R K P elements
#   of x and as many of dy, in 227 KiB at most.
# * **Tiles** of rows (``R``): one exchange between the warps gives the sums of two rows. Where P
#   elements are 16 bytes a thread or more, as 2048 of float16 are for 256 threads, the rows of a
#   tile lie in the same threads: adding them to dw takes no exchange.

folded("The first stage in pieces", ladder.pieces_backward, ladder.columns_of, ladder.same_bits)

# %%
# Wide rows: read them twice, or share them
# -----------------------------------------
#
# At 32,768 columns dw and db in float32 are 256 KiB: all registers of a multiprocessor, before a
# single x. **Read twice**: a first kernel takes the two sums of each row; a second works on 256
# columns of many rows, so that dw and db are short. It moves five tensors where three would do: at
# most 60 % of the ceiling. **roundoff** lets eight programs share a row: each keeps an eighth of dw
# and db, and of the two sums over the row. The others' shares come through memory, which takes
# longer than a row: a program takes its share two rows ahead (``DEPTH``) and keeps these rows in
# registers. ``STATS`` are the means of all rows, then their rstd; ``HAS_W``, ``DH`` and ``ROUND``
# are options of the library.

folded("The kernels that read twice", ladder.backward_sums, ladder.backward_wide)

# %%
# A share that is missing is -1, and awaited; the launch is cooperative: all programs run.

folded("The kernel that shares rows", ladder.put_share, ladder.sums_of, ladder.backward_shared)

# %%
# What each step gains, and what it takes of a multiprocessor
# -----------------------------------------------------------
#
# Each step runs on 4096 rows in float16, from :term:`CUDA graphs <CUDA graph>`, in interleaved
# rounds, on buffers that are together larger than the cache. GB/s count 2MN elements forward and
# 3MN backward; the :term:`ceiling` is a kernel with the same reads and writes that does not
# compute. Registers and spills are the compiler's, for sm_90 (H100, H200), and need no GPU: Triton
# compiles ahead. The H200's and the H100's are of Triton 3.6, the Xeon's of 3.7.1. A program of a
# backward has 8 warps; at 32,768 columns 16, but roundoff's 4; read twice has 16, then 4. A step
# that is missing at a width does not fit there.

QUICK = ["one block", "atomic", "two stages", "pieces", "roundoff", "torch"]
cases = [
    (direction, name, n)
    for n in WIDTHS
    for direction, names in STEPS.items()
    for name in names
    if ladder.fits(direction, name, n) and (not quick or name in QUICK)
]
SPILLS = {"one block": "two stages", "not packed": "unpacked", "packed": "roundoff"}
SPILL_WIDTHS = [4096] if quick else [4096, 8192, 8704, 12288, 14336, 15872]
SPILL_CASES = [("backward", name, n) for n in SPILL_WIDTHS for name in SPILLS.values()]
every = list(dict.fromkeys(cases + SPILL_CASES))
compiled = dict(zip(every, compiled_ahead(every), strict=True))


def inputs(m, n, dtype=torch.float16, sets=1):
    """Some sets of (x, dy), and w and b."""
    g = torch.Generator(device).manual_seed(n)
    normal = partial(torch.randn, m, n, generator=g, device=device)
    pairs = [((0.5 * normal() - 2.3).to(dtype), (0.1 * normal()).to(dtype)) for _ in range(sets)]
    return pairs, *(torch.rand(n, generator=g, device=device).to(dtype) for _ in "wb")


def rates(direction, n):
    """GB/s of each step that fits, of torch and of the ceiling."""
    size, moved = args.rows * n * 2, 2 if direction == "forward" else 3
    sets = copies(moved * size, device, most=16)
    pairs, w, b = inputs(args.rows, n, sets=sets)
    calls = {name: [] for d, name, columns in cases if (d, columns) == (direction, n)}
    calls |= {"torch": [], "ceiling": []}
    for x, dy in pairs:
        out = torch.empty_like(x)
        if direction == "forward":
            ways = {name: partial(ladder.forward, name, x, w, b) for name in calls}
            ways["torch"] = partial(TORCH.forward, x, w, b, 1e-5)
            ways["ceiling"] = partial(stream, (x,), (out,))
        else:
            stats = ladder.forward("roundoff", x, w, b)[1]
            ways = {name: partial(ladder.backward, name, dy, x, w, stats) for name in calls}
            ways["torch"] = partial(TORCH.backward, dy, x, w, b, *TORCH.forward(x, w, b, 1e-5)[1:])
            ways["ceiling"] = partial(stream, (x, dy), (out,))
        for name, way in ways.items():
            calls[name].append(way)
    kept = {}  # an output lives until its set's next turn: no call writes where another just wrote

    def turn(name, i):
        kept[name, i] = calls[name][i]()

    found = measure(
        {name: partial(turn, name) for name in calls},
        device=device,
        cuda_graph=True,
        rotate=sets,
        budget_s=args.budget,
        min_rounds=5,
        bytes=dict.fromkeys(calls, moved * size),
    )
    return found.frame.set_index("label")["gb_s"].to_dict()


def climb(direction):
    """A row for each width and step."""
    for n in WIDTHS:
        found = rates(direction, n) if gpu else {}
        for name in [*STEPS[direction], *(["torch"] if gpu else [])]:
            takes = compiled.get((direction, name, n), {})
            if takes or name in found:
                row = {"N": n, "step": name, "GB/s": found.get(name)}
                row["of ceiling"] = found[name] / found["ceiling"] if gpu else None
                yield row | {k: takes.get(k) for k in ("registers", "spilled", "shared", "fit")}


def cell_of(t, step, column="of ceiling"):
    """One value of a step."""
    return t.loc[t["step"] == step, column].iloc[0]


def shares(t, *steps, n=None):
    """Their shares of the ceiling in per cent, of one width."""
    t = t if n is None else t[t["N"] == n]
    return [100 * cell_of(t, step) for step in steps]


def rises(t, *steps):
    """Whether each has a larger share of the ceiling than the one before it, in every run."""
    found = t.set_index("step").filter(regex="^of ceiling").loc[list(steps)]
    return found.diff().iloc[1:] > 0


CLIMB = ("atomic", "two stages", "pieces", "prefetch", "tiles", "roundoff")
WIDE = ("two stages", "pieces", "packed", "read twice", "roundoff")
SHOWN = ["N", "step", "of ceiling", "registers", "spilled"]
TYPES = dict.fromkeys(["GB/s", "of ceiling"], float)
TYPES |= dict.fromkeys(["registers", "spilled", "fit"], "Int64")
TIMED = {"GB/s": lambda s: s.notna()}
study.table(
    "backward",
    pd.DataFrame(climb("backward")).astype(TYPES),
    "The backward, step by step, in float16, at 4096 columns; registers are its first stage's.",
    columns=SHOWN,
    rows={"N": 4096},
    part=part,
    times=["of ceiling"],
)

# %%

study.dots(
    "climb",
    of="backward",
    where={"N": [4096, 8704], "step": list(CLIMB), **TIMED},
    x="of ceiling",
    label="step",
    colour="N",
    xlabel="rate over that of the same reads and writes",
    title="Backward, 4096 and 8704 columns",
    answer=True,
    alt="Rate of each step of the backward over that of a stream with the same bytes, at 4096 and "
    "at 8704 columns. At both it rises from atomics over two stages and pieces to prefetch; tiles "
    "of two rows, at 4096 columns, and roundoff's own kernel reach most.",
)

# %%
# **4096 columns.** With atomics every row sends 8N bytes of additions to the same places, beside
# the 6N that it has to move. Pieces add little: a power of two needs no padding. What is left is
# waiting for memory, as a second program and prefetch show.

study.claim(
    "The backward of 4096 columns reaches {18} % of the ceiling with atomics, {44} % in two "
    "stages, {65} % with prefetch and {73} % in tiles of two rows; torch's {40} %.",
    name="climb",
    of="backward",
    where={"N": 4096, "step": [*CLIMB, "torch"], **TIMED},
    on="nvidia-h200",
    timed=True,
    value=lambda t: shares(t, "atomic", "two stages", "prefetch", "tiles", "torch"),
    test=lambda t: rises(t, "atomic", "two stages", "pieces", "prefetch", "tiles"),
)

# %%

study.claim(
    "A second program on each multiprocessor lifts pieces to {60} %; prefetch, with one program, "
    "lifts them to {65} %.",
    name="two-programs",
    of="backward",
    where={"N": 4096, "step": ["pieces", "two programs", "prefetch"], **TIMED},
    on="nvidia-h200",
    timed=True,
    value=lambda t: shares(t, "two programs", "prefetch"),
    test=lambda t: rises(t, "pieces", "two programs", "prefetch"),
)

# %%
# **8704 columns.** Nearly half of the block of 16,384 is padding, and it spills; pieces end that.

study.claim(
    "The backward of 8704 columns reaches {34} % of the ceiling in two stages, {62} % in pieces, "
    "{79} % with prefetch, in a second run {84} %, and {85} % as roundoff has it; torch's {34} %.",
    name="climb-8704",
    of="backward",
    where={"N": 8704, "step": ["atomic", "two stages", "pieces", "prefetch", "roundoff", "torch"]}
    | TIMED,
    on="nvidia-h200",
    timed=True,
    value=lambda t: [
        *shares(t, *CLIMB[1:4]),
        100 * cell_of(t, "prefetch", t.filter(regex="^of ceiling").columns[-1]),
        *shares(t, "roundoff", "torch"),
    ],
    test=lambda t: rises(t, *CLIMB[:4], "roundoff"),
)

# %%

study.claim(
    "The backward of 32,768 columns reaches {6.5} % of the ceiling in two stages, {6.6} % in "
    "pieces, {16} % packed, {34} % reading twice and {66} % as roundoff has it; torch's {36} %.",
    name="climb-wide",
    of="backward",
    where={"N": 32768, "step": [*WIDE, "torch"], **TIMED},
    on="nvidia-h200",
    timed=True,
    value=lambda t: shares(t, *WIDE, "torch"),
    test=lambda t: rises(t, *WIDE),
)

# %%
# **Packing alone costs** at 4096 and 8704 columns: it converts twice, and the table's registers do
# not fall. At 32,768 the compiler also gave packed pieces more registers: that gain has two causes.
# Prefetch and tiles were measured packed only.

study.claim(
    "Packed, pieces reach {44} % instead of {46} at 4096 columns and {58} instead of {62} at 8704.",
    name="packing",
    of="backward",
    where={"N": [4096, 8704], "step": ["packed", "pieces"], **TIMED},
    on="nvidia-h200",
    timed=True,
    value=lambda t: [s for n in (4096, 8704) for s in shares(t, "packed", "pieces", n=n)],
    test=lambda t: [rises(t[t["N"] == n], "packed", "pieces") for n in (4096, 8704)],
)

# %%
# One block spills at 8704 columns, pieces do not
# -----------------------------------------------
#
# What a thread has no register for goes to memory and back, for every row. It has 255 registers
# at most. *Not packed* is roundoff's own kernel without ``same_bits``.

spills = [
    {"N": n} | {label: compiled["backward", name, n]["spilled"] for label, name in SPILLS.items()}
    for n in SPILL_WIDTHS
]
study.keep("spills", spills, part="cpu")

# %%

study.claim(
    "At 8704 columns one block spills {104} words of each thread, roundoff's five pieces {0}.",
    name="spills",
    of="spills",
    where={"N": 8704},
    on="nvidia-h200",
    value=lambda t: (t["one block"], t["packed"]),
    test=lambda t: t["one block"] > 4 * t["packed"],
)

# %%

study.claim(
    "Without packing roundoff's kernel spills {58} words at 12,288 columns and {102} at 15,872; "
    "with it {0} and {18}.",
    name="packed",
    of="spills",
    where={"N": [12288, 15872]},
    on="nvidia-h200",
    value=lambda t: [*t["not packed"], *t["packed"]],
)

# %%
# The forward needs less
# ----------------------
#
# It has no sums over rows: a program for each row is enough, and pieces keep the padding away.
# **Prefetch** has four programs for each multiprocessor (two above 4096 columns) that loop over
# rows and keep w and b in registers, where these fit: it gains at 4096 columns and spills at 8704.
# **roundoff** keeps a wide row packed and converts it again for the result.

study.table(
    "forward",
    pd.DataFrame(climb("forward")).astype(TYPES),
    "The forward, step by step, in float16.",
    columns=SHOWN,
    rows={"N": [8704, 32768]},
    part=part,
    times=["of ceiling"],
)

# %%

folded("The forward in pieces", ladder.pieces_forward)

# %%

study.claim(
    "At 8704 columns one block reaches {68} % of the ceiling, pieces {90} %, prefetched ones "
    "{89} %; torch's forward {56} %.",
    name="forward-8704",
    of="forward",
    where={"N": 8704, "step": ["one block", "pieces", "prefetch", "torch"], **TIMED},
    on="nvidia-h200",
    timed=True,
    value=lambda t: shares(t, "one block", "pieces", "prefetch", "torch"),
    test=lambda t: rises(t, "one block", "prefetch", "pieces"),
)

# %%

study.claim(
    "At 32,768 columns roundoff's, of which two programs fit, reaches {98} %, pieces {85} %.",
    name="forward-wide",
    of="forward",
    where={"N": 32768, "step": ["pieces", "roundoff"], **TIMED},
    on="nvidia-h200",
    timed=True,
    value=lambda t: shares(t, "roundoff", "pieces"),
    test=lambda t: rises(t, "pieces", "roundoff"),
)

# %%
# Every step is right, and only atomics lose the order
# ----------------------------------------------------
#
# Typical errors in :ref:`one unit <unit>`, and how many different dw the runs of one input gave.
# The interpreter runs programs one after another, here in an order shuffled anew.

m, n, PIECE, RUNS = (4096, 2048, None, 20) if gpu else (12, 48, 16, 2 if quick else 8)


def exact(x, dy, w, norm=functional.layer_norm):
    """dx and dw in float64."""
    x, dy, w = (t.double() for t in (x, dy, w))
    y = norm(x.requires_grad_(), w.shape, w.requires_grad_(), eps=1e-5)
    return torch.autograd.grad(y, (x, w), dy)


def errors(name):
    """Typical errors of dx and dw in float16, and different dw of some runs in float32."""
    for dtype in (torch.float32, torch.float16):
        [(x, dy)], w, b = inputs(m, n, dtype)
        if name == "torch":
            call = partial(TORCH.backward, dy, x, w, b, *TORCH.forward(x, w, b, 1e-5)[1:])
        else:
            stats = ladder.forward("one block", x, w, b)[1]
            call = partial(ladder.backward, name, dy, x, w, stats, piece=PIECE)
        if dtype == torch.float32:
            seen = set()
            for run in range(RUNS):
                with nullcontext() if gpu else shuffled_programs(run):
                    seen.add(digest(call()[1]))
    found = [scaled_error(e, a).rms for e, a in zip(exact(x, dy, w), call(), strict=False)]
    return {"step": name, "dx error": found[0], "dw error": found[1], "dw": len(seen)}


study.table(
    "errors",
    [errors(name) for name in (*ladder.BACKWARD, "torch") if not quick or name in QUICK],
    "Typical errors in float16, and different dw in float32: 4096 × 2048 in 20 runs, interpreted "
    "12 × 48 in 8.",
    rows={"step": ["atomic", "two stages", "roundoff", "torch"]},
    part=part,
)

# %%

study.claim(
    "With atomics {20} runs gave as many different dw; every other step gave {1}.",
    name="order",
    of="errors",
    where={"step": list(ladder.BACKWARD)},
    on="nvidia-h200",
    value=lambda t: (t["dw"][t["step"] == "atomic"], t["dw"][t["step"] != "atomic"].max()),
    test=lambda t: (t["dw"] > 1) == (t["step"] == "atomic"),
)

# %%
# What did not fit
# ----------------
#
# At 32,768 columns one block with 16 warps has 128 registers a thread at most, and spills still; at
# 8704 columns two rows at a time spill. Of wide rows two other ways were slower on an H200, not
# recorded: shares awaited at once, and rows read again from the cache.
#
# Your own backward, of RMSNorm for instance
# ------------------------------------------
#
# RMSNorm takes no mean: with :math:`\hat x = x r`, :math:`r = 1/\sqrt{\overline{x^2} + \epsilon}`
# it is :math:`y = \hat x\, w`. Its backward is
# :math:`dx = r\,(w g - \hat x\, \overline{\hat x\, w g})` and :math:`dw = \sum g\, \hat x`, in the
# same two stages. Copy the first stage in pieces, leave out what is about the mean and db, set
# ``NORM`` to ``functional.rms_norm`` and put your function in place of ``mine``: the cell says how
# far it is from float64. Helpers are in ``roundoff.kernels.ladder``.
#
# A launch takes tensors and numbers, then constants by name. P is 2048, or for a narrower row the
# next power of two; a block may have fewer elements than threads. K is N / P and tiles M / R,
# rounded up, ``zero`` 0, ``programs`` 132 on an H200. Keep STAGES so low that the prefetched rows
# fit shared memory: 16,384 columns of float32 take 256 KiB with 3, 128 KiB with 2. The second
# stage's R is a power of two not below ``programs``, for 264 of them 512: what is beyond R it would
# leave out. Its grid has 1 for dw alone. For rows apart, N in an offset becomes ``x.stride(0)``.
#
# .. code-block:: python
#
#    part = torch.empty(programs, N, dtype=torch.float32, device=x.device)
#    sums = torch.empty(1, N, dtype=w.dtype, device=x.device)
#    my_stage_1[(programs,)](x, dy, w, rstd, dx, part, M, N, tiles, 0,
#                            R=1, P=2048, K=K, PACKED=True, STAGES=3, num_warps=8)
#    lessons.add_partial_sums[(-(-N // 16), 1)](part, sums, programs, N, R=256, P=16)

ROWS, COLUMNS, NORM = (1000, 5120, functional.layer_norm) if gpu else (7, 80, functional.layer_norm)


def mine(dy, x, w, mean, rstd):
    """dx and dw: yours."""
    return ladder.backward("pieces", dy, x, w, torch.stack([mean, rstd]), piece=PIECE)[:2]


[(x, dy)], w, _ = inputs(ROWS, COLUMNS)
about = x.double().mean(1) if NORM is functional.layer_norm else torch.zeros(ROWS).to(x)
rstd = ((x.double() - about[:, None]).square().mean(1) + 1e-5).rsqrt()
results = mine(dy, x, w, about.float(), rstd.float())
for name, e, a in zip(("dx", "dw"), exact(x, dy, w, NORM), results, strict=True):
    print(f"{name}: typical error {scaled_error(e, a).rms:.2g} ε × RMS")

# %%
# Limits, and what to read next
# -----------------------------
#
# * Registers are those of one version of Triton and its assembler. Not looked into: why some
#   kernels come out with 32 of them at 32,768 columns.
# * What roundoff's kernel has beside these steps: both sums of a row in one exchange, strides,
#   types up to float64, and a second stage that is launched early [#pdl]_.
# * Next: :ref:`triton-layer-norm` for other libraries' kernels, other types and launches, and
#   :ref:`reduction-order` for why an order of addition matters.
#
# .. [#pdl] NVIDIA, *CUDA C++ Programming Guide*, section on programmatic dependent launch.

folded("The first stage of roundoff's backward", lessons.fast_backward)

# %%

study.finish()
