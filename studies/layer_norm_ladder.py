"""The study behind "How do I write a fast LayerNorm backward in Triton?".

Each step of the page at three widths: its rate over that of a kernel with the same reads and
writes, its registers and spills, and how many different dw its runs give.

The kernels are the page's own, and a forward in pieces. The last step of the backward is the
library's kernel, and "read twice" is the library's for rows that no registers hold. GB/s count 2MN
elements forward and 3MN backward. Registers and spills are the compiler's, for sm_90 (H100, H200),
and need no GPU.

    python studies/layer_norm_ladder.py --record
"""

# A language of its own, typed by Triton.
# ruff: noqa: RUF005

import ast
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from roundoff.compare import digest
from roundoff.kernels import interpreting, shuffled_programs
from roundoff.kernels._norm_tilings import CHUNKS
from roundoff.kernels._row_norm import gradients_of
from roundoff.kernels._runtime import multiprocessors
from roundoff.kernels.ahead import Compile, compiled_ahead
from roundoff.kernels.baselines import layer_norms, stream
from roundoff.kernels.lessons import kernel, sum_along
from roundoff.page.measurement import Study
from roundoff.script import unit_test_going
from roundoff.timing import copies, measure

quick = unit_test_going()
gpu = torch.cuda.is_available() and not interpreting()
device = "cuda" if gpu else "cpu"
study = Study(
    "plot_layer_norm_ladder",
    "A layer norm in Triton, step by step: rates, registers, errors.",
    on="nvidia-h200",
    part="gpu" if gpu else "cpu",
)
ROWS, EPS = 4096, 1e-5

# --- The kernels: those of the page, and a forward that the page does not need. ------------------

PAGE = Path(__file__).parents[1] / "gallery" / "kernels" / "plot_layer_norm_ladder.py"


def kernels_of(path):
    """The kernels that a page defines, without its experiments."""
    kept = []
    for statement in ast.parse(path.read_text("utf-8")).body:
        decorated = isinstance(statement, ast.FunctionDef) and statement.decorator_list
        imported = isinstance(statement, (ast.Import, ast.ImportFrom))
        if decorated or imported or ast.unparse(statement) == "C = tl.constexpr":
            kept.append(statement)
    names = {"__name__": path.stem}
    exec(compile(ast.Module(kept, []), str(path), "exec"), names)  # noqa: S102 - our own page
    return SimpleNamespace(**names)


ours = kernels_of(PAGE)
C = tl.constexpr


@kernel
def column_piece(W, k: C, K: C, P: C, cols, last):
    """Piece k of a vector; only the last of K pieces can end beyond it."""
    if k == K - 1:
        return tl.load(W + cols + k * P, mask=last, other=0.0)
    else:
        return tl.load(W + cols + k * P)


@kernel
def pieces_forward(X, W, B, Y, MEAN, RSTD, N, EPS: C, P: C, K: C):
    """A row is K pieces of P columns, which stay in registers."""
    row, cols = tl.program_id(0), tl.arange(0, P)
    last = (K - 1) * P + cols < N  # only the last piece ends beyond the row
    x = ()
    total = tl.full((P,), 0.0, tl.float32)
    for k in tl.static_range(K):
        x = x + (column_piece(X + row * N, k, K, P, cols, last),)
        total += x[k].to(tl.float32)
    mean = sum_along(total, 0) / N
    squares = tl.full((P,), 0.0, tl.float32)
    for k in tl.static_range(K):
        centred = x[k].to(tl.float32) - mean
        if k == K - 1:
            centred = tl.where(last, centred, 0.0)
        squares += centred * centred
    rstd = 1 / tl.sqrt(sum_along(squares, 0) / N + EPS)
    for k in tl.static_range(K):
        weight = column_piece(W, k, K, P, cols, last).to(tl.float32)
        bias = column_piece(B, k, K, P, cols, last).to(tl.float32)
        y = (x[k].to(tl.float32) - mean) * rstd * weight + bias
        inside = k * P + cols < N
        tl.store(Y + row * N + k * P + cols, y.to(Y.dtype.element_ty), mask=inside)
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)


# --- Steps: which kernel a step is, and how it is launched. --------------------------------------

FORWARD = ("one block", "pieces")
BACKWARD = (
    "atomic",
    "two stages",
    "two programs",
    "pieces",
    "packed",
    "prefetch",
    "tiles",
    "read twice",
    "roundoff",
)
STEPS = {"forward": FORWARD, "backward": BACKWARD}
#: Steps that are the library's kernels.
REAL = ("read twice", "roundoff")
#: Programs of each multiprocessor, where a program does not take one row.
PER_SM = dict.fromkeys(BACKWARD, 1) | {"atomic": 0, "two programs": 2}


def step_of(direction, name, n, itemsize=2, piece=None):
    """Kernel, warps and constants of a step; None where a row does not fit it."""
    size, block = n * itemsize // 2, triton.next_power_of_2(n)
    # As Triton's tutorial has it up to 16,384 columns; a wider block has more threads.
    few = 16 if block > 16384 else min(max(block // 256, 1), 8)
    if name == "one block":
        return Compile(ours.row_forward, few, {"P": block, "EPS": EPS})
    if direction == "forward":
        warps = 8 if size > 16384 else 4
        piece = piece or (1024 if size <= 7168 else warps * 512) * 2 // itemsize
        return Compile(pieces_forward, warps, {"P": piece, "K": -(-n // piece), "EPS": EPS})
    if name in ("atomic", "two stages"):
        kernel = ours.atomic_backward if name == "atomic" else ours.simple_backward
        return Compile(kernel, few, {"P": block})
    # Two programs or two rows need the registers of two; a tile that is prefetched lies in shared
    # memory, of which there are 227 KiB.
    if size > {"two programs": 4096, "tiles": 4096, "prefetch": 16384}.get(name, size):
        return None
    warps = 16 if size > 16384 else 8
    piece = piece or warps * 512 // itemsize
    stages = {"prefetch": 3 if size <= 14336 else 2, "tiles": 3}.get(name, 1)
    constants = {"R": 1 + (name == "tiles"), "P": piece, "K": -(-n // piece), "STAGES": stages}
    constants["PACKED"] = name != "pieces" and itemsize == 2
    return Compile(ours.pieces_backward, warps, constants)


def fits(direction, name, n):
    """Whether registers and shared memory hold what a step keeps there, in float16."""
    return name in REAL or step_of(direction, name, n) is not None


def launch(step, programs, values):
    """Run a step with so many programs."""
    names = [p for p in step.kernel.arg_names if p not in step.constants]
    step.kernel[(programs,)](*(values[p] for p in names), **step.constants, num_warps=step.warps)


def forward(name, x, w, b, piece=None):
    """y (M, N); mean and rstd (2, M)."""
    y, stats = torch.empty_like(x), x.new_empty((2, len(x)), dtype=torch.float32)
    values = {"X": x, "W": w, "B": b, "Y": y, "MEAN": stats[0], "RSTD": stats[1], "N": x.shape[1]}
    launch(step_of("forward", name, x.shape[1], x.element_size(), piece), len(x), values)
    return y, stats


def backward(name, dy, x, w, stats, piece=None):
    """dx (M, N), dw and db (N,), from the statistics of a forward."""
    if name in REAL:
        tiling = CHUNKS if name == "read twice" else None
        return gradients_of(dy, x, w, w, stats, tiling=tiling)
    (m, n), dx = x.shape, torch.empty_like(x)
    step = step_of("backward", name, n, x.element_size(), piece)
    if interpreting() and "PACKED" in step.constants:
        step.constants["PACKED"] = False
    tiles = -(-m // step.constants.get("R", 1))
    most = PER_SM[name] * multiprocessors(x.get_device())
    programs = min(tiles, most or tiles)
    values = {"X": x, "DY": dy, "W": w, "MEAN": stats[0], "RSTD": stats[1], "DX": dx}
    values |= {"M": m, "N": n, "end": tiles, "zero": 0}
    if name == "atomic":
        values["SUMS"] = x.new_zeros((2, n), dtype=torch.float32)
        launch(step, programs, values)
        return dx, *values["SUMS"].to(w.dtype)
    values["PART"] = x.new_empty((2 * programs, n), dtype=torch.float32)
    launch(step, programs, values)
    sums, columns = w.new_empty((2, n)), 1024 if interpreting() else 16
    grid, rows = (-(-n // columns), 2), triton.next_power_of_2(programs)
    ours.add_partial_sums[grid](values["PART"], sums, programs, n, rows, columns)
    return dx, sums[0], sums[1]


# --- What each step gains, and what it takes of a multiprocessor. --------------------------------

TORCH = layer_norms("cpu")[0]["torch"]
WIDTHS = [4096] if quick else [4096, 8704, 32768]
MEASURED = ("atomic", "two stages", "pieces", "roundoff") if quick else BACKWARD


def inputs(m, n, dtype=torch.float16, sets=1):
    """Some sets of (x, dy), and w and b."""
    g = torch.Generator(device).manual_seed(n)
    w, b = (torch.rand(n, generator=g, device=device).to(dtype) for _ in "wb")
    normal = partial(torch.randn, m, n, generator=g, device=device)
    pairs = [((0.5 * normal() - 2.3).to(dtype), (0.1 * normal()).to(dtype)) for _ in range(sets)]
    return pairs, w, b


def timed(direction, calls, pairs, budget_s):
    """Times of calls, one for each pair, which take turns; and of the same reads and writes."""
    reads = 1 if direction == "forward" else 2
    moved = (reads + 1) * pairs[0][0].nbytes
    ceiling = [partial(stream, pair[:reads], torch.empty_like(pair[0])) for pair in pairs]
    calls = calls | {"ceiling": ceiling}
    kept = {}  # an output lives until its set's next turn: no call writes where another just wrote

    def turn(name, i):
        kept[name, i] = calls[name][i]()

    return measure(
        {name: partial(turn, name) for name in calls},
        device=device,
        cuda_graph=gpu,
        rotate=len(pairs),
        budget_s=budget_s,
        min_rounds=5,
        bytes=dict.fromkeys(calls, moved),
    )


def rates(direction, n, names):
    """GB/s of these steps, of torch and of the ceiling."""
    moved = 2 if direction == "forward" else 3
    pairs, w, b = inputs(ROWS, n, sets=copies(moved * ROWS * n * 2, device, most=16))
    calls = {name: [] for name in (*names, "torch")}
    for x, dy in pairs:
        if direction == "forward":
            ways = {name: partial(forward, name, x, w, b) for name in names}
            ways["torch"] = partial(TORCH.forward, x, w, b, EPS)
        else:
            stats = forward("pieces", x, w, b)[1]
            ways = {name: partial(backward, name, dy, x, w, stats) for name in names}
            ways["torch"] = partial(TORCH.backward, dy, x, w, b, *TORCH.forward(x, w, b, EPS)[1:])
        for name, way in ways.items():
            calls[name].append(way)
    return timed(direction, calls, pairs, 0.4).frame.set_index("label")["gb_s"].to_dict()


def climb(direction, steps):
    """A row for each width and step; registers and spills are those of a kernel of the page."""
    for n in WIDTHS:
        names = [name for name in steps if fits(direction, name, n)]
        own = [name for name in names if name not in REAL]
        compiled = compiled_ahead([step_of(direction, name, n) for name in own])
        taken, found = dict(zip(own, compiled, strict=True)), {}
        if gpu:
            found = rates(direction, n, names)
        for name in [*names, "torch"] if gpu else own:
            row = {"N": n, "step": name, "GB/s": found.get(name, float("nan"))}
            row["of ceiling"] = row["GB/s"] / found.get("ceiling", 1)
            takes = taken.get(name, {})
            yield row | {k: takes.get(k, float("nan")) for k in ("registers", "spilled")}


@study.table("backward", times=["of ceiling"])
def backward_rates(args):
    """The backward, step by step, in float16; registers are its first stage's."""
    return climb("backward", MEASURED)


@study.table("forward", times=["of ceiling"])
def forward_rates(args):
    """The forward, step by step, in float16."""
    return climb("forward", FORWARD)


# --- Only atomics lose the order. ----------------------------------------------------------------

M, COLUMNS, PIECE, RUNS = (4096, 2048, None, 20) if gpu else (12, 48, 16, 2 if quick else 8)


@study.table()
def errors(args):
    """Different dw in float32: 4096 × 2048 in 20 runs; interpreted 12 × 48 in 8."""
    [(x, dy)], w, b = inputs(M, COLUMNS, torch.float32)
    stats = forward("one block", x, w, b)[1]
    for name in MEASURED:
        seen = set()
        for run in range(RUNS):
            with nullcontext() if gpu else shuffled_programs(run):
                seen.add(digest(backward(name, dy, x, w, stats, piece=PIECE)[1]))
        yield {"step": name, "dw": len(seen)}


# --- Values: what pages may print. ----------------------------------------------------------------


def share(step, column="of ceiling"):
    """A statistic: the rate of a step over that of the same reads and writes."""
    return lambda t: t.loc[t["step"] == step, column].iloc[0]


def climbs(*steps):
    """A test: each step has a larger share than the one before it."""

    def test(found):
        shares = found.rows.set_index("step")["of ceiling"]
        return all(shares[a] < shares[b] for a, b in pairwise(steps))

    return test


def add(name, step, direction, n, *order):
    study.value(
        name,
        f"rate of the {direction} of {n} columns over that of the same reads and writes: {step}",
        direction,
        share(step),
        where={"N": n, "step": list(dict.fromkeys([step, *order])), "GB/s": lambda s: s.notna()},
        test=climbs(*order),
    )


ORDER = "atomic", "two stages", "pieces", "prefetch", "roundoff"
add("atomic", "atomic", "backward", 8704, "atomic", "torch", "pieces")
add("torch", "torch", "backward", 8704, "atomic", "torch", "pieces")
for step in ORDER[1:]:
    add("stages" if step == "two stages" else step, step, "backward", 8704, *ORDER)
add("packed", "packed", "backward", 8704, "two stages", "packed", "pieces")
add("tiles", "tiles", "backward", 4096, "two stages", "pieces", "prefetch", "tiles", "roundoff")
for gains, names, steps, least, most in (
    (
        "pieces gain less than a tenth",
        ("stages", "pieces"),
        ("two stages", "pieces"),
        1,
        1.1,
    ),
    (
        "a second program on each multiprocessor gains at least a fifth",
        ("packed", "two"),
        ("packed", "two programs"),
        1.2,
        1.6,
    ),
):
    for name, step in zip(names, steps, strict=True):
        study.value(
            f"narrow.{name}",
            "rate of the backward of 4096 columns over that of the same reads and writes: "
            f"{step}; {gains}",
            "backward",
            share(step),
            where={"N": 4096, "step": steps, "GB/s": lambda s: s.notna()},
            test=lambda v, steps=steps, least=least, most=most: (
                least < share(steps[1])(v.rows) / share(steps[0])(v.rows) < most
            ),
        )
add("wide.packed", "packed", "backward", 32768, "pieces", "packed", "torch", "roundoff")
for name, step, words in (
    ("wide.spilled", "packed", ", with all registers in use"),
    ("wide.pieces.spilled", "pieces", ""),
):
    study.value(
        name,
        f"32-bit words that a thread of {step} spills at 32,768 columns{words}",
        "backward",
        share(step, "spilled"),
        where={"N": 32768, "step": ["packed", "pieces"], "GB/s": lambda s: s.notna()},
        test=lambda v: (
            share("packed", "registers")(v.rows) * 16 * 32 == 65536
            and 0 < share("packed", "spilled")(v.rows) < share("pieces", "spilled")(v.rows)
        ),
    )
add("wide.pieces", "pieces", "backward", 32768, "pieces", "packed", "read twice", "roundoff")
add("wide.twice", "read twice", "backward", 32768, "pieces", "packed", "read twice", "roundoff")
add("wide.torch", "torch", "backward", 32768, "pieces", "torch", "roundoff")
add("wide.roundoff", "roundoff", "backward", 32768, "pieces", "packed", "read twice", "roundoff")
add("forward", "one block", "forward", 8704, "torch", "one block", "pieces")
add("forward.pieces", "pieces", "forward", 8704, "torch", "one block", "pieces")
study.value(
    "orders",
    "different dw of 20 runs of the backward with atomics; every other step has one",
    "errors",
    lambda t: t.loc[t["step"] == "atomic", "dw"],
    where={"step": list(BACKWARD)},
    test=lambda v: ((v.rows["dw"] > 1) == (v.rows["step"] == "atomic")).all(),
)

if __name__ == "__main__":
    study.main()
