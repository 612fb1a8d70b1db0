"""The study behind "How do I write a fast LayerNorm backward in Triton?".

Each step of the page at three widths: its rate over that of a kernel with the same reads and
writes, its registers and spills, its errors, and how many different dw its runs give.

The kernels are the page's own. The last step of each direction is the library's kernel, and "read
twice" is the library's for rows that no registers hold. GB/s count 2MN elements forward and 3MN
backward. Registers and spills are the compiler's, for sm_90 (H100, H200), and need no GPU.

    python studies/layer_norm_ladder.py --record
"""

# A language of its own, typed by Triton.
# ruff: noqa: RUF005

import ast
from contextlib import nullcontext
from functools import cache, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import torch
import triton
import triton.language as tl
from torch.nn import functional

from roundoff.compare import digest, scaled_error
from roundoff.errors import ShapeError
from roundoff.kernels import interpreting, shuffled_programs
from roundoff.kernels._norm_tilings import CHUNKS
from roundoff.kernels._row_norm import LAYER, Backward, Case, _like
from roundoff.kernels._runtime import multiprocessors
from roundoff.kernels.ahead import Compile, compiled_ahead
from roundoff.kernels.baselines import layer_norms, stream
from roundoff.kernels.lessons import kernel, sum_along
from roundoff.page.measurement import Study
from roundoff.script import unit_test_going
from roundoff.timing import copies, measure

quick = unit_test_going()
gpu = torch.cuda.is_available() and not interpreting()
device, part = ("cuda", "gpu") if gpu else ("cpu", "cpu")
study = Study(
    "plot_layer_norm_ladder",
    "A layer norm in Triton, step by step: rates, registers, errors.",
    on="nvidia-h200",
)
ROWS = 4096

# --- The kernels: those of the page, and a forward that the page does not need. ------------------

PAGE = Path(__file__).parents[1] / "gallery" / "kernels" / "plot_layer_norm_ladder.py"


def kernels_of(path: Path) -> SimpleNamespace:
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
def pieces_forward(X, W, B, Y, MEAN, RSTD, M, N, EPS: C, P: C, K: C, STAGES: C):
    """A row is K pieces of P columns, which stay in registers; a program may take many rows."""
    cols = tl.arange(0, P)
    last = (K - 1) * P + cols < N  # only the last piece ends beyond the row
    w, b = (), ()
    if STAGES > 1:  # once for all rows
        for k in tl.static_range(K):
            w = w + (column_piece(W, k, K, P, cols, last),)
            b = b + (column_piece(B, k, K, P, cols, last),)
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
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
            weight = w[k] if STAGES > 1 else column_piece(W, k, K, P, cols, last)
            bias = b[k] if STAGES > 1 else column_piece(B, k, K, P, cols, last)
            xhat = (x[k].to(tl.float32) - mean) * rstd
            y = xhat * weight.to(tl.float32) + bias.to(tl.float32)
            inside = k * P + cols < N
            tl.store(Y + row * N + k * P + cols, y.to(Y.dtype.element_ty), mask=inside)
        tl.store(MEAN + row, mean)
        tl.store(RSTD + row, rstd)


# --- Steps: which kernel a step is, and how it is launched. --------------------------------------

FORWARD = ("one block", "pieces", "prefetch", "roundoff")
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


class Step(SimpleNamespace):
    """A kernel, its warps, its programs a multiprocessor (0: one a row), its constants."""


def warps_of(block: int) -> int:
    """As Triton's tutorial has it up to 16,384 columns; a wider block has more threads."""
    return 16 if block > 16384 else min(max(block // 256, 1), 8)


def forward_step(name: str, n: int, itemsize: int, piece: int | None) -> Step | None:
    size, block = n * itemsize // 2, triton.next_power_of_2(n)
    if name == "one block":
        return Step(
            kernel=ours.row_forward, warps=warps_of(block), per_sm=0, constants={"P": block}
        )
    warps = 8 if size > 16384 else 4
    piece = piece or (1024 if size <= 7168 else warps * 512) * 2 // itemsize
    sizes = {"P": piece, "K": -(-n // piece)}
    if name == "pieces":
        constants = {**sizes, "STAGES": 1}
        return Step(kernel=pieces_forward, warps=warps, per_sm=0, constants=constants)
    # A program holds w and b beside its row: above, they no longer fit its registers.
    if size > 10240:
        return None
    per_sm, constants = 4 if size <= 4096 else 2, {**sizes, "STAGES": 3}
    return Step(kernel=pieces_forward, warps=warps, per_sm=per_sm, constants=constants)


def backward_step(name: str, n: int, itemsize: int, piece: int | None) -> Step | None:
    size, block = n * itemsize // 2, triton.next_power_of_2(n)
    whole = {"warps": warps_of(block), "constants": {"P": block}}
    if name == "atomic":
        return Step(kernel=ours.atomic_backward, per_sm=0, **whole)
    if name == "two stages":
        return Step(kernel=ours.simple_backward, per_sm=1, **whole)
    warps = 16 if size > 16384 else 8
    rows, per_sm, stages = {
        "two programs": (1, 2, 1),
        "prefetch": (1, 1, 3 if size <= 14336 else 2),
        "tiles": (2, 1, 3),
    }.get(name, (1, 1, 1))
    # Two programs or two rows need the registers of two; a tile that is prefetched lies in shared
    # memory, of which there are 227 KiB.
    if size > {"two programs": 4096, "tiles": 4096, "prefetch": 16384}.get(name, size):
        return None
    piece = piece or warps * 512 // itemsize
    constants = {"R": rows, "P": piece, "K": -(-n // piece), "STAGES": stages}
    constants["PACKED"] = name != "pieces" and itemsize == 2 and not interpreting()
    return Step(kernel=ours.pieces_backward, warps=warps, per_sm=per_sm, constants=constants)


def step_of(direction: str, name: str, n: int, itemsize: int = 2, piece: int | None = None):
    """The kernel of a step with its launch; None where a row does not fit it."""
    return (forward_step if direction == "forward" else backward_step)(name, n, itemsize, piece)


def fits(direction: str, name: str, n: int) -> bool:
    """Whether registers and shared memory hold what a step keeps there, in float16."""
    return name in REAL or step_of(direction, name, n) is not None


def launch(direction, name, x, values, piece):
    """Run a step; gives its programs."""
    step = step_of(direction, name, x.shape[1], x.element_size(), piece)
    if step is None:
        raise ShapeError(f"a row does not fit the step {name}", got=x.shape[1])
    tiles = -(-len(x) // step.constants.get("R", 1))
    most = step.per_sm * multiprocessors(x.get_device())
    programs = min(tiles, most) if step.per_sm else tiles
    if direction == "backward" and name != "atomic":
        values["PART"] = x.new_empty((2 * programs, x.shape[1]), dtype=torch.float32)
    values |= {"M": len(x), "N": x.shape[1], "end": tiles, "zero": 0}
    constants = step.constants | ({"EPS": values["EPS"]} if "EPS" in values else {})
    names = [p for p in step.kernel.arg_names if p not in constants]
    step.kernel[(programs,)](*(values[p] for p in names), **constants, num_warps=step.warps)
    return programs


def forward(name, x, w, b, eps=1e-5, piece=None):
    """y (M, N); mean and rstd (2, M)."""
    if name in REAL:
        return case_of(*x.shape, x.dtype, x.device, eps).forward(x, w, b, True)[::2]
    y, stats = torch.empty_like(x), x.new_empty((2, len(x)), dtype=torch.float32)
    values = {"X": x, "W": w, "B": b, "Y": y, "MEAN": stats[0], "RSTD": stats[1], "EPS": eps}
    launch("forward", name, x, values, piece)
    return y, stats


def backward(name, dy, x, w, stats, piece=None):
    """dx (M, N), dw and db (N,), from the statistics of a forward."""
    n = x.shape[1]
    if name in REAL:
        return gradients_of(name, *x.shape, x.dtype, x.device)(dy, x, w, stats)
    dx = torch.empty_like(x)
    values = {"X": x, "DY": dy, "W": w, "MEAN": stats[0], "RSTD": stats[1], "DX": dx}
    if name == "atomic":
        values["SUMS"] = x.new_zeros((2, n), dtype=torch.float32)
        launch("backward", name, x, values, piece)
        return dx, *values["SUMS"].to(w.dtype)
    programs = launch("backward", name, x, values, piece)
    sums, columns = w.new_empty((2, n)), 1024 if interpreting() else 16
    grid, rows = (-(-n // columns), 2), triton.next_power_of_2(programs)
    ours.add_partial_sums[grid](values["PART"], sums, programs, n, rows, columns)
    return dx, sums[0], sums[1]


@lru_cache(256)
def case_of(m, n, dtype, device, eps):
    x, w = _like(torch.empty(m, n, dtype=dtype, device="meta")), _like(torch.empty(n, dtype=dtype))
    return Case(LAYER, (n,), eps, None, (*x[:3], device), *((*w[:3], device),) * 2)


@lru_cache(256)
def gradients_of(name, m, n, dtype, device):
    tiling, types = CHUNKS if name == "read twice" else None, (dtype,) * 5
    return Backward(LAYER, (m, n), n, n, n, *types, 0, device, tiling)


# --- What each step gains, and what it takes of a multiprocessor. --------------------------------

TORCH = layer_norms("cpu")[0]["torch"]
WIDTHS = [4096] if quick else [4096, 8704, 32768]
QUICK = ["one block", "atomic", "two stages", "pieces", "roundoff", "torch"]
CASES = [
    (direction, name, n)
    for n in WIDTHS
    for direction, names in STEPS.items()
    for name in names
    if fits(direction, name, n) and (not quick or name in QUICK)
]


def to_compile(direction, name, n):
    """A step as :func:`compiled_ahead` takes it."""
    step = step_of(direction, name, n)
    constants = step.constants | ({"EPS": 1e-5} if direction == "forward" else {})
    if "PACKED" in constants:  # in the interpreter, too
        constants["PACKED"] = name != "pieces"
    return Compile(step.kernel, step.warps, constants)


@cache
def compiled():
    """Registers, spills and so on of each kernel of the page, compiled for Hopper."""
    every = [case for case in dict.fromkeys(CASES) if case[1] not in REAL]
    return dict(zip(every, compiled_ahead([to_compile(*case) for case in every]), strict=True))


def inputs(m, n, dtype=torch.float16, sets=1):
    """Some sets of (x, dy), and w and b."""
    g = torch.Generator(device).manual_seed(n)
    normal = partial(torch.randn, m, n, generator=g, device=device)
    pairs = [((0.5 * normal() - 2.3).to(dtype), (0.1 * normal()).to(dtype)) for _ in range(sets)]
    return pairs, *(torch.rand(n, generator=g, device=device).to(dtype) for _ in "wb")


def rates(direction, n):
    """GB/s of each step that fits, of torch and of the ceiling."""
    size, moved = ROWS * n * 2, 2 if direction == "forward" else 3
    sets = copies(moved * size, device, most=16)
    pairs, w, b = inputs(ROWS, n, sets=sets)
    calls = {name: [] for d, name, columns in CASES if (d, columns) == (direction, n)}
    calls |= {"torch": [], "ceiling": []}
    for x, dy in pairs:
        out = torch.empty_like(x)
        if direction == "forward":
            ways = {name: partial(forward, name, x, w, b) for name in calls}
            ways["torch"] = partial(TORCH.forward, x, w, b, 1e-5)
            ways["ceiling"] = partial(stream, (x,), out)
        else:
            stats = forward("roundoff", x, w, b)[1]
            ways = {name: partial(backward, name, dy, x, w, stats) for name in calls}
            ways["torch"] = partial(TORCH.backward, dy, x, w, b, *TORCH.forward(x, w, b, 1e-5)[1:])
            ways["ceiling"] = partial(stream, (x, dy), out)
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
        budget_s=0.4,
        min_rounds=5,
        bytes=dict.fromkeys(calls, moved * size),
    )
    return found.frame.set_index("label")["gb_s"].to_dict()


def climb(direction):
    """A row for each width and step."""
    for n in WIDTHS:
        found = rates(direction, n) if gpu else {}
        for name in [*STEPS[direction], *(["torch"] if gpu else [])]:
            takes = compiled().get((direction, name, n), {})
            if takes or name in found:
                row = {"N": n, "step": name, "GB/s": found.get(name)}
                row["of ceiling"] = found[name] / found["ceiling"] if gpu else None
                yield row | {k: takes.get(k) for k in ("registers", "spilled", "shared", "fit")}


TYPES = dict.fromkeys(["GB/s", "of ceiling"], float)
TYPES |= dict.fromkeys(["registers", "spilled", "fit"], "Int64")


@study.table("backward", part=part, times=["of ceiling"])
def backward_rates(args):
    """The backward, step by step, in float16; registers are its first stage's."""
    return pd.DataFrame(climb("backward")).astype(TYPES)


@study.table("forward", part=part, times=["of ceiling"])
def forward_rates(args):
    """The forward, step by step, in float16."""
    return pd.DataFrame(climb("forward")).astype(TYPES)


# --- Every step is right, and only atomics lose the order. ---------------------------------------

M, COLUMNS, PIECE, RUNS = (4096, 2048, None, 20) if gpu else (12, 48, 16, 2 if quick else 8)


def exact(x, dy, w):
    """dx and dw in float64."""
    x, dy, w = (t.double() for t in (x, dy, w))
    y = functional.layer_norm(x.requires_grad_(), w.shape, w.requires_grad_(), eps=1e-5)
    return torch.autograd.grad(y, (x, w), dy)


def error(name):
    """Typical errors of dx and dw in float16, and different dw of some runs in float32."""
    for dtype in (torch.float32, torch.float16):
        [(x, dy)], w, b = inputs(M, COLUMNS, dtype)
        if name == "torch":
            call = partial(TORCH.backward, dy, x, w, b, *TORCH.forward(x, w, b, 1e-5)[1:])
        else:
            stats = forward("one block", x, w, b)[1]
            call = partial(backward, name, dy, x, w, stats, piece=PIECE)
        if dtype == torch.float32:
            seen = set()
            for run in range(RUNS):
                with nullcontext() if gpu else shuffled_programs(run):
                    seen.add(digest(call()[1]))
    found = [scaled_error(e, a).rms for e, a in zip(exact(x, dy, w), call(), strict=False)]
    return {"step": name, "dx error": found[0], "dw error": found[1], "dw": len(seen)}


@study.table(part=part)
def errors(args):
    """Errors in float16, and different dw in float32: 4096 × 2048 in 20 runs; 12 × 48 in 8."""
    return [error(name) for name in (*BACKWARD, "torch") if not quick or name in QUICK]


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
for name, step in ("stages", "two stages"), ("pieces", "pieces"):
    study.value(
        f"narrow.{name}",
        "rate of the backward of 4096 columns over that of the same reads and writes: "
        f"{step}; pieces gain less than a tenth",
        "backward",
        share(step),
        where={"N": 4096, "step": ["two stages", "pieces"], "GB/s": lambda s: s.notna()},
        test=lambda v: 1 < share("pieces")(v.rows) / share("two stages")(v.rows) < 1.1,
    )
for name, step in ("packed", "packed"), ("two", "two programs"):
    study.value(
        f"narrow.{name}",
        "rate of the backward of 4096 columns over that of the same reads and writes: "
        f"{step}; a second program on each multiprocessor gains at least a fifth",
        "backward",
        share(step),
        where={"N": 4096, "step": ["packed", "two programs"], "GB/s": lambda s: s.notna()},
        test=lambda v: 1.2 < share("two programs")(v.rows) / share("packed")(v.rows) < 1.6,
    )
add("wide.packed", "packed", "backward", 32768, "pieces", "packed", "torch", "roundoff")
study.value(
    "wide.spilled",
    "32-bit words that a thread of packed spills at 32,768 columns, with all registers in use",
    "backward",
    share("packed", "spilled"),
    where={"N": 32768, "step": ["packed", "pieces"], "GB/s": lambda s: s.notna()},
    test=lambda v: (
        share("packed", "registers")(v.rows) * 16 * 32 == 65536
        and 0 < share("packed", "spilled")(v.rows) < share("pieces", "spilled")(v.rows)
    ),
)
study.value(
    "wide.pieces.spilled",
    "32-bit words that a thread of pieces spills at 32,768 columns",
    "backward",
    share("pieces", "spilled"),
    where={"N": 32768, "step": ["packed", "pieces"], "GB/s": lambda s: s.notna()},
    test=lambda v: v.value > share("packed", "spilled")(v.rows),
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
