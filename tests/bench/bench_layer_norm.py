"""Layer norm and RMSNorm on a CUDA device: right, tuned, beside their rivals, and launched.

Parts, each a table and a list of rows in ``--out``:

- ``check``: the ways of dividing a row against float64, and ten more runs each with one result: a
  line for each width, type and form, and no new one after ``--seconds``.
- ``tune``: candidates of tilings for each width, type and direction; prints the quickest three
  beside the usual one and the ceiling, a stream with the same reads and writes.
- ``race``: torch, inductor, Liger, QuACK, flash-linear-attention, Apex and Transformer Engine, as
  far as they can be imported, beside ours and the ceiling.
- ``warm``: ours, inductor and the rivals in Triton and QuACK compile what the race's page and this
  bench's ``race`` launch, in processes of their own; all keep it on disk. Run it before them, with
  the same ``TRITON_CACHE_DIR`` and ``TORCHINDUCTOR_CACHE_DIR`` where these are set.
- ``bytes``: the kernels that a call of torch's launches, and the bytes that each moves where
  CUPTI's counters may be read.
- ``launches``: a call with its launches, as a user writes it: torch's, ours, and an empty
  autograd function with the same allocations; then the pieces of ours on the host.
- ``bits``: a digest of dx, dw and db of eight shapes with ``programs`` fixed, and how many there
  are in 100 runs: to be compared between machines.

Device times are CUDA graph replays over buffers that rotate over more than the L2, rivals
interleaved. A part first prints its cells and an estimate of its seconds. ``tune`` compiles in
processes of its own, as many as there are cores. Run
``python tests/bench/bench_layer_norm.py check tune --out results``; ``--dry`` runs every line on a
CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch.nn import functional

from roundoff.environment import environment
from roundoff.kernels import baselines, interpreting, layer_norm, lessons, rms_norm
from roundoff.kernels._norm_tilings import Tiling, backward_tiling, forward_tiling
from roundoff.timing import copies, measure

engine = importlib.import_module("roundoff.kernels._row_norm")

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
FORMS = ("layer", "rms", "rms+residual")
DIRECTIONS = ("forward", "backward")
WIDTHS = (256, 512, 1024, 2048, 3072, 4096, 6144, 8192, 8704, 12288, 15872, 16384, 24576, 32768,
          65536, 131072)  # fmt: skip
#: A row over three programs, of a width that the interpreter takes quickly.
DRY = [Tiling(1, 16, 2, 1, 1, 1, True, 3)]
#: inductor compiles each for itself, which takes seconds.
TELLING = (1024, 4096, 8192, 12288, 15872, 32768)
EPS = 1e-5
MOST = 2**30
REGISTERS = 65536


class Cell(NamedTuple):
    """What is timed: rows, columns, type, form and direction."""

    form: str
    direction: str
    kind: str
    m: int
    n: int

    @property
    def dtype(self) -> torch.dtype:
        return TYPES[self.kind]

    @property
    def moved(self) -> tuple[int, int]:
        """Tensors read and written."""
        residual = self.form == "rms+residual"
        if self.direction == "forward":
            return (2, 2) if residual else (1, 1)
        return (3, 1) if residual else (2, 1)

    @property
    def nbytes(self) -> int:
        return sum(self.moved) * self.m * self.n * self.dtype.itemsize


class Bench:
    """What all parts share: the device, the budget of a cell, and the rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.dry, self.budget = options, options.dry, options.budget
        self.device = "cpu" if options.dry else "cuda"
        self.rows: dict[str, list[dict[str, Any]]] = {}

    def draw(self, *shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype)

    def cells(self, forms: tuple[str, ...], widths: tuple[int, ...]) -> Iterator[Cell]:
        options = self.options
        kinds = options.types or (["float32"] if self.dry else ["float16"])
        for form, kind, n, direction in itertools.product(
            options.forms or forms, kinds, options.widths or widths, DIRECTIONS
        ):
            m = 5 if self.dry else max(1, min(options.rows, MOST // n))
            if direction in (options.directions or DIRECTIONS):
                yield Cell(form, direction, kind, m, n)

    def sets(self, cell: Cell) -> int:
        # Outputs live as long as their set: inputs, outputs and what another rival keeps.
        return 2 if self.dry else copies(cell.nbytes, self.device, most=16)

    def inputs(self, cell: Cell, sets: int) -> list[list[torch.Tensor]]:
        """Tensors that the cell reads, a list for each set; w and b are the last two."""
        w, b = (self.draw(cell.n, dtype=cell.dtype, seed=s) for s in (1, 2))
        shape = (cell.m, cell.n)
        return [
            [*(self.draw(*shape, dtype=cell.dtype, seed=9 * s + i) for i in range(3)), w, b]
            for s in range(sets)
        ]

    def time(self, calls: dict[str, Callable[[int], Any]], cell: Cell, sets: int) -> Any:
        last: dict[tuple[str, int], Any] = {}

        def turn(label: str, i: int) -> None:
            # An output lives until its set's next turn: no call writes where another just wrote.
            last[label, i] = calls[label](i)

        if not self.dry:
            gc.collect()
            torch.cuda.empty_cache()  # the last cell's graphs
        return measure(
            {label: partial(turn, label) for label in calls}, device=self.device,
            cuda_graph=not self.dry, rotate=sets, budget_s=self.budget, precision=0.01,
            min_rounds=3 if self.dry else 7, max_rounds=60,
            bytes=dict.fromkeys(calls, cell.nbytes),
        )  # fmt: skip

    def add(self, part: str, cell: Cell, timings: Any, first: str) -> dict[str, float]:
        """A row for each rival: GB/s, and its rate over the first's with the interval."""
        rates = {}
        for _, row in timings.frame.iterrows():
            label = row["label"]
            over = timings.ratio(first, label)  # of times: a rate over the first's
            self.rows.setdefault(part, []).append(
                cell._asdict()
                | {"rival": label, "us": row["median"] * 1e6, "us_low": row["low"] * 1e6,
                   "us_high": row["high"] * 1e6, "gb_s": row["gb_s"], "ratio": over.value,
                   "ratio_low": over.low, "ratio_high": over.high}
            )  # fmt: skip
            rates[label] = float(row["gb_s"])
        return rates


# --- ours, with any tiling ------------------------------------------------------------------------


def form_of(cell: Cell) -> Any:
    return engine.LAYER if cell.form == "layer" else engine.RMS


def call_of(cell: Cell, tensors: list[torch.Tensor], tiling: Tiling | None) -> Callable[[], Any]:
    """One call of our kernels on one set of buffers."""
    x, dy, more, w, b = tensors
    form, layer = form_of(cell), cell.form == "layer"
    residual = more if cell.form == "rms+residual" else None
    likes = map(engine._like, (x, w, b if layer else None, residual))
    tilings = (tiling if cell.direction == "forward" else None, None)
    case = engine.Case(form, (cell.n,), EPS, None, *likes, tilings)
    arguments = (x, w, b if layer else None, residual, True)
    if cell.direction == "forward":
        return lambda: case.forward(*arguments)
    _, rows, stats = case.forward(*arguments)
    types = (w.dtype, b.dtype if layer else None)
    return lambda: engine.gradients_of(form, dy, rows, w, stats, residual, *types, 0, tiling)


def stream_of(cell: Cell, tensors: list[torch.Tensor]) -> Callable[[], Any]:
    reads, writes = cell.moved
    outputs = tuple(torch.empty_like(tensors[0]) for _ in range(writes))
    return lambda: baselines.stream(tuple(tensors[:reads]), outputs)


# --- check ----------------------------------------------------------------------------------------


def truth_of(cell: Cell, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """y, or dx, dw (and db), in float64."""
    x, dy, more, w, b = (t.double() for t in tensors)
    residual = cell.form == "rms+residual"
    h = (tensors[0] + tensors[2]).double() if residual else x
    leaves = [t.requires_grad_() for t in ((h, w, b) if cell.form == "layer" else (h, w))]
    y = (
        functional.layer_norm(h, (cell.n,), w, b, EPS)
        if cell.form == "layer"
        else functional.rms_norm(h, (cell.n,), w, EPS)
    )
    if cell.direction == "forward":
        return [y.detach()]
    grads = list(torch.autograd.grad(y, leaves, dy))
    if residual:
        grads[0] = grads[0] + more
    return grads


CHECKED = (1000, 15872, 24576, 32768, 65536, 131072)
#: Rows: more than the programs of a device, so that some take two, and a last tile that is short.
CHECKED_ROWS = 301


def check(bench: Bench) -> None:
    """Every way of dividing a row, against float64 and against itself; a line for each width."""
    options = bench.options
    groups = check_groups(bench)
    if options.compile:
        compile_some(bench, [pair for group in groups for pair in ways_of(bench, group)])
        return
    print(f"check: {len(groups)} groups, at most {options.seconds:.0f} s", flush=True)
    start, worst, wrong = time.perf_counter(), 0.0, 0
    if not bench.dry:
        compiled_apart(bench, "check")
    for group in groups:
        n, kind, form = group
        began = time.perf_counter()
        if began - start > options.seconds:
            print(f"check: out of time before {form} {kind} {n}", flush=True)
            break
        largest = 0.0
        expected: dict[str, Any] = {}
        for cell, tiling in ways_of(bench, group):
            (tensors,) = bench.inputs(cell, 1)
            if cell.direction not in expected:
                expected[cell.direction] = truth_of(cell, tensors)
            errors, same = checked(bench, cell, tensors, tiling, expected[cell.direction])
            row = cell._asdict() | {"tiling": str(tuple(tiling)), "errors": errors}
            bench.rows.setdefault("check", []).append(row | {"same": same})
            largest = max(largest, *errors)
            # A sum in float32 is rounded many times, one in 16 bits once.
            if not max(errors) <= (2 if kind == "float32" else 0.6) or not same:
                wrong += 1
                print(f"WRONG {row} same {same}", flush=True)
        worst = max(worst, largest)
        took = time.perf_counter() - began
        print(f"  {form} {kind} {n}: largest error {largest:.2f}, {took:.1f} s", flush=True)
    count = len(bench.rows.get("check", []))
    print(f"check: {count} ways, {wrong} wrong, largest error {worst:.2f} units (RMS)", flush=True)


def check_groups(bench: Bench) -> list[tuple[int, str, str]]:
    """Width, type and form."""
    options = bench.options
    widths = options.widths or ((70,) if bench.dry else CHECKED)
    kinds = options.types or (("float32",) if bench.dry else ("float16", "float32"))
    return [*itertools.product(widths, kinds, options.forms or FORMS)]


def ways_of(bench: Bench, group: tuple[int, str, str]) -> Iterator[tuple[Cell, Tiling]]:
    """Cells of a group with their usual tiling; with --all also those chosen for their width."""
    n, kind, form = group
    for direction in bench.options.directions or DIRECTIONS:
        cell = Cell(form, direction, kind, 5 if bench.dry else CHECKED_ROWS, n)
        find = forward_tiling if direction == "forward" else backward_tiling
        usual = find(n, cell.dtype.itemsize)
        others = directed(cell, usual) if bench.options.all else []
        for tiling in dict.fromkeys([usual, *others, *DRY * bench.dry]):
            yield cell, tiling


def checked(
    bench: Bench, cell: Cell, tensors: list[torch.Tensor], tiling: Tiling, expected: Any
) -> tuple[list[float], bool]:
    """Errors of one way in units, and whether more runs give the same bits."""
    call = call_of(cell, tensors, tiling)
    first = [t for t in call() if t is not None]
    errors = [
        ((a.double() - e).square().mean().sqrt() / e.square().mean().sqrt()).item()
        / torch.finfo(cell.dtype).eps
        for a, e in zip(first, expected, strict=False)
    ]
    same = True
    for _ in range(2 if bench.dry else 10):
        pairs = zip(first, call(), strict=False)
        same &= all(torch.equal(a, b) for a, b in pairs)
    return errors, same


# --- tune -----------------------------------------------------------------------------------------


def registers(cell: Cell, t: Tiling) -> float:
    """About how many registers a thread needs; more than 255 spill."""
    columns, words = t.piece * t.pieces, cell.dtype.itemsize / 4
    if cell.direction == "forward":
        held = (2 if cell.form == "layer" else 1) * columns * words if t.hold else 0
        tiles = t.rows * columns * words * (2 if t.shares > 1 else 1)
        return (tiles + held + 2 * t.rows * t.piece) / (t.warps * 32) + 30
    sums = (2 if cell.form == "layer" else 1) * columns
    tiles = 2 * t.rows * columns * words * (2 if t.shares > 1 else 1)
    held = columns * words if t.hold else 0
    return (sums + tiles + held + 2 * t.rows * t.piece) / (t.warps * 32) + 30


def fits(cell: Cell, t: Tiling) -> bool:
    need = registers(cell, t)
    memory = t.stages * t.rows * t.piece * t.pieces * cell.dtype.itemsize
    memory *= 2 if cell.direction == "backward" else 1
    threads = t.warps * 32 * max(1, t.per_sm)
    room = threads <= 2048 and (t.stages == 1 or memory * max(1, t.per_sm) <= 220 * 1024)
    return need <= 250 and need * threads <= REGISTERS * 1.02 and room


def shared_tilings(cell: Cell) -> Iterator[Tiling]:
    size = cell.dtype.itemsize
    for columns, piece, rows, warps, stages, per_sm, hold in itertools.product(
        (8192 // size, 16384 // size, 24576 // size, 32768 // size),
        (2048 // size, 4096 // size, 8192 // size),
        (1, 2), (4, 8, 16), (1, 2, 3), (1, 2), (True, False),
    ):  # fmt: skip
        shares = -(-cell.n // columns)
        pieces = -(-cell.n // (shares * piece))
        if 1 < shares <= 64 and pieces <= 8:
            yield Tiling(rows, piece, pieces, warps, stages, per_sm, hold, shares)


def whole_tilings(cell: Cell, usual: Tiling) -> Iterator[Tiling]:
    """Whole rows; below 16,384 columns with the usual pieces and warps, which fix the bits."""
    size = cell.dtype.itemsize
    pieces = (2048 // size, 4096 // size, 8192 // size, 16384 // size)
    warps = (4, 8, 16)
    if cell.n < 16384:
        pieces, warps = (usual.piece,), (usual.warps,)
    for piece, count, stages, per_sm, hold in itertools.product(
        pieces, warps, (1, 2, 3, 4), (0, 1, 2, 3, 4, 6), (True, False)
    ):
        parts = -(-cell.n // piece)
        persistent = per_sm > 0 or stages == 1
        if parts <= 16 and persistent and (per_sm or cell.direction == "forward"):
            yield Tiling(
                usual.rows if cell.n < 16384 else 1, piece, parts, count, stages, per_sm, hold
            )


#: Forward, two-byte types, by columns: rows, piece, pieces, warps, stages, per_sm, hold. Each is
#: tried with the row converted again, which halves its registers. ptxas says that none of them
#: spills by more than 12 words of a thread, and that per_sm programs fit.
DIRECTED = {
    16384: [
        (1, 2048, 8, 4, 1, 0), (1, 2048, 8, 4, 1, 4), (1, 4096, 4, 8, 1, 2), (1, 4096, 4, 8, 1, 3),
        (1, 4096, 4, 8, 2, 2), (1, 4096, 4, 16, 3, 1, True), (1, 4096, 4, 16, 2, 1, True),
        (2, 4096, 4, 16, 1, 1),
    ],
    24576: [
        (1, 4096, 6, 8, 1, 2), (1, 4096, 6, 8, 2, 2), (1, 8192, 3, 8, 1, 2), (1, 4096, 6, 8, 1, 0),
        (1, 4096, 6, 4, 1, 2), (1, 2048, 12, 4, 1, 0), (1, 4096, 6, 16, 2, 2),
        (1, 8192, 3, 16, 1, 2), (1, 4096, 6, 16, 2, 1, True), (1, 4096, 6, 16, 3, 1),
    ],
    32768: [
        (1, 4096, 8, 8, 1, 2), (1, 4096, 8, 8, 2, 2), (1, 4096, 8, 8, 1, 0), (1, 8192, 4, 8, 1, 2),
        (1, 2048, 16, 8, 2, 2), (1, 8192, 4, 8, 1, 1), (1, 8192, 4, 16, 2, 1),
        (1, 8192, 4, 16, 3, 1), (2, 4096, 8, 16, 1, 1),
    ],
    65536: [
        (1, 4096, 16, 16, 1, 1), (1, 4096, 16, 16, 1, 0), (1, 8192, 8, 16, 1, 1),
        (1, 8192, 8, 16, 2, 1), (1, 8192, 0, 16), (1, 16384, 0, 16),
    ],
    131072: [(1, 8192, 0, 16), (1, 16384, 0, 16), (1, 8192, 0, 8), (1, 32768, 0, 32)],
}  # fmt: skip


def directed(cell: Cell, usual: Tiling) -> list[Tiling]:
    """Tilings chosen for a width, and the usual one with rows converted again."""
    if cell.direction == "backward" or cell.dtype.itemsize != 2:
        return []
    tilings = [Tiling(*t)._replace(again=True) for t in DIRECTED.get(cell.n, ())]
    if usual.shares == 1 and usual.stages == 1 and not usual.hold:
        tilings.append(usual._replace(again=True))
    return tilings


def candidates(cell: Cell, most: int) -> list[Tiling]:
    """The usual tiling, then some of the others that fit, the same ones in every process."""
    find = forward_tiling if cell.direction == "forward" else backward_tiling
    usual = find(cell.n, cell.dtype.itemsize)
    others = []
    if cell.n * cell.dtype.itemsize <= 65536:
        others += [t for t in whole_tilings(cell, usual) if fits(cell, t)]
    shared = [t for t in shared_tilings(cell) if fits(cell, t)] if cell.n >= 12288 else []
    others = [t for t in others if t != usual]
    shared = [t for t in shared if t != usual]
    for name, tilings in (("others", others), ("shared", shared)):
        room = max(1, most // (2 if others and shared else 1))
        picked = random.Random(0).sample(tilings, min(room, len(tilings)))
        others, shared = (picked, shared) if name == "others" else (others, picked)
    if cell.n == 70:
        return [usual, *DRY]
    return [*dict.fromkeys([usual, *directed(cell, usual), *others, *shared])][: most + 1]


TUNED = (4096, 8192, 16384, 20480, 24576, 32768, 65536, 131072)


def compiled_apart(bench: Bench, part: str) -> None:
    """Let processes of their own compile every candidate; Triton keeps the results on disk."""
    workers = 1 if bench.dry else min(14, os.cpu_count() or 1)
    options = bench.options
    command = [sys.executable, __file__, part, "--out", str(options.out), "--most",
               str(options.most), "--rows", str(options.rows)]  # fmt: skip
    for name in ("widths", "types", "forms", "directions"):
        values = getattr(options, name)
        command += [f"--{name}", *map(str, values)] if values else []
    command += ["--dry"] * bench.dry + ["--all"] * options.all
    start = time.perf_counter()
    # inductor's own processes would be as many again for each of these.
    env = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    running = [
        subprocess.Popen(
            [*command, "--compile", f"{i}/{workers}"], stdout=subprocess.DEVNULL, env=env
        )
        for i in range(workers)
    ]
    try:
        codes = [process.wait() for process in running]
    finally:  # an interrupt reaches this process alone
        for process in running:
            process.kill()
    took = time.perf_counter() - start
    print(f"{part}: compiled in {took:.0f} s, {codes.count(0)}/{workers} ended well", flush=True)


def compile_some(bench: Bench, tasks: list[tuple[Cell, Tiling]]) -> None:
    """What one of those processes does: its share of the candidates, on a few rows."""
    index, count = map(int, bench.options.compile.split("/"))
    for cell, tiling in tasks[index::count]:
        small = cell._replace(m=5)
        (tensors,) = bench.inputs(small, 1)
        try:
            call_of(small, tensors, tiling)()
        except Exception as error:  # too large for this device, say: left out again when timed
            print(f"{cell} {tiling}: {type(error).__name__}", flush=True)


def tune(bench: Bench) -> None:
    """Tilings, the quickest of each cell."""
    cells = list(bench.cells(("layer", "rms"), (70,) if bench.dry else TUNED))
    cells = [c._replace(m=max(1, min(c.m, 2**27 // c.n))) for c in cells]
    count = sum(len(candidates(c, bench.options.most)) for c in cells)
    if bench.options.compile:
        compile_some(bench, [(c, t) for c in cells for t in candidates(c, bench.options.most)])
        return
    seconds = len(cells) * (bench.budget + 1.5) + count * (0.15 + 4 / 14)
    print(f"tune: {len(cells)} cells, {count} candidates, about {seconds:.0f} s", flush=True)
    if not bench.options.estimate:
        compiled_apart(bench, "tune")
        for cell in cells:
            tune_cell(bench, cell)


def tune_cell(bench: Bench, cell: Cell) -> None:
    sets = bench.sets(cell)
    buffers = bench.inputs(cell, sets)
    calls: dict[str, Any] = {}
    usual, *others = candidates(cell, bench.options.most)
    expected: Any = None
    for tiling in (usual, *others):
        try:
            each = [call_of(cell, tensors, tiling) for tensors in buffers]
            results = [t for t in each[0]() if t is not None]
            expected = expected or [t.double() for t in results]
            near = all(
                (a.double() - e).abs().max() <= 0.05 * e.abs().max()
                for a, e in zip(results, expected, strict=False)
            )
        except Exception as error:  # too large, or not to be launched: named and left out
            print(f"  left out {tuple(tiling)}: {type(error).__name__}: {str(error)[:80]}")
            continue
        if near:
            calls[str(tuple(tiling))] = lambda i, each=each: each[i]()
        else:
            print(f"  WRONG {cell} {tuple(tiling)}", flush=True)
    streams = [stream_of(cell, tensors) for tensors in buffers]
    calls["ceiling"] = lambda i: streams[i]()
    timings = bench.time(calls, cell, sets)
    rates = bench.add("tune", cell, timings, str(tuple(usual)))
    ceiling = rates.pop("ceiling")
    order = sorted(rates, key=rates.__getitem__, reverse=True)[:3]
    print(
        f"{cell.form} {cell.direction} {cell.kind} {cell.m} x {cell.n}: usual "
        f"{rates[str(tuple(usual))]:.0f} {tuple(usual)}; best "
        + "; ".join(f"{rates[label]:.0f} {label}" for label in order)
        + f"; ceiling {ceiling:.0f} GB/s",
        flush=True,
    )


# --- race -----------------------------------------------------------------------------------------


def rivals_of(bench: Bench, cell: Cell, buffers: Any, skipped: set[str]) -> dict[str, Any]:
    """Label -> call of the number of a set; ours first, the ceiling last."""
    layer = cell.form == "layer"
    norms, missing = (baselines.layer_norms if layer else baselines.rms_norms)(bench.device)
    for label, reason in missing.items():
        if label not in skipped:
            print(f"missing: {label} ({reason})")
            skipped.add(label)
    calls: dict[str, Any] = {}
    for label, norm in norms.items():
        if label == "inductor" and (cell.n not in TELLING or bench.options.no_inductor):
            continue
        try:
            each = [rival_call(cell, norm, tensors) for tensors in buffers]
            each[0]()
        except Exception as error:  # whatever another's kernel raises, it is named
            print(f"  left out: {label} at {cell}: {type(error).__name__}: {str(error)[:80]}")
            continue
        calls[label] = lambda i, each=each: each[i]()
    streams = [stream_of(cell, tensors) for tensors in buffers]
    return calls | {"ceiling": lambda i: streams[i]()}


def rival_call(cell: Cell, norm: Any, tensors: list[torch.Tensor]) -> Callable[[], Any]:
    x, dy, more, w, b = tensors
    if cell.form == "layer":
        w, b = (t.to(norm.weights or t.dtype) for t in (w, b))
        forward = partial(norm.forward, x, w, b, EPS)
        if cell.direction == "forward":
            return forward
        _, *saved = forward()
        return partial(norm.backward, dy, x, w, b, *saved)
    residual = more if cell.form == "rms+residual" else None
    forward = partial(norm.forward, x, residual, w, EPS)
    if cell.direction == "forward":
        return forward
    _, h, *saved = forward()
    return partial(norm.backward, dy, residual, h, w, *saved)


def race(bench: Bench) -> None:
    """Ours beside the rivals."""
    cells = list(bench.cells(FORMS, (70,) if bench.dry else WIDTHS))
    slow = sum(c.n in TELLING for c in cells) * (not bench.options.no_inductor)
    print(f"race: {len(cells)} cells, about {len(cells) * (bench.budget + 1.2) + slow * 7:.0f} s",
          flush=True)  # fmt: skip
    skipped: set[str] = set()
    for cell in [] if bench.options.estimate else cells:
        sets = bench.sets(cell)
        buffers = bench.inputs(cell, sets)
        calls = rivals_of(bench, cell, buffers, skipped)
        if "roundoff" not in calls:
            continue
        timings = bench.time(calls, cell, sets)
        rates = bench.add("race", cell, timings, "roundoff")
        ours, ceiling = rates.pop("roundoff"), rates.pop("ceiling")
        best = max(rates, key=rates.__getitem__) if rates else "roundoff"
        lead = timings.ratio(best, "roundoff")
        print(
            f"{cell.form} {cell.direction} {cell.kind} {cell.m} x {cell.n}: {ours:.0f} GB/s, "
            f"{ours / ceiling:.2f} of the ceiling, {lead.value:.3f} ({lead.low:.3f} to "
            f"{lead.high:.3f}) of {best}"
            + (" BEHIND" if lead.high < 0.97 else ""),
            flush=True,
        )  # fmt: skip


#: Columns, and rows where they are not those of the page: 4096, at most 2**27 elements.
WARM = [(1024, 0), (4096, 0), (8192, 0), (8704, 0), (12288, 0), (15872, 0), (16384, 0), (24576, 0),
        (32768, 0), (65536, 0), (131072, 0), (15872, 1000), (5120, 2048), (4096, 256),
        (4096, 16384)]  # fmt: skip
TRITON = ("roundoff", "Liger", "flash-linear-attention")
WARM_TYPES = [("bfloat16", 8192), ("float32", 8192), ("float32", 15872), ("float32", 32768)]
#: What the page launches beside these: label, type and columns.
BESIDE = [
    *(("lesson", "float16", n) for n in (1024, 4096, 8192, 8704)),
    *(("lesson", kind, 8192) for kind in ("bfloat16", "float32")),
    *(("locks", "float16", n) for n in (1024, 4096, 8704)),
    *(("float32 weights", kind, 8192) for kind in ("float16", "bfloat16")),
    ("float32 weights", "float16", 5120), ("no gradient", "float16", 1024),
]  # fmt: skip


def beside(bench: Bench, cell: Cell, label: str, tensors: list[torch.Tensor]) -> Any:
    """One call of what the page launches beside the race's implementations."""
    x, dy, more, w, b = tensors
    if label == "ceiling":
        return stream_of(cell, tensors)()
    if label == "no gradient":
        return layer_norm(x, cell.n, w, b)
    ours = baselines.layer_norms(bench.device)[0]["roundoff"]
    if label == "float32 weights":
        return rival_call(cell, ours, [x, dy, more, w.float(), b.float()])()
    mean, rstd = ours.forward(x, w, b, EPS)[1]
    if label == "lesson":
        return lessons.two_stage(dy, x, mean, rstd, w)
    return [lessons.locked(dy, x, mean, rstd, None, barrier) for barrier in (False, True)]


def warm_tasks() -> list[tuple[Cell, str]]:
    """Cells and labels that the page and this bench's race compile."""
    layers = [("layer", "float16", n, m) for n, m in WARM]
    layers += [("layer", kind, n, 0) for kind, n in WARM_TYPES]
    layers += [(f, "float16", n, 0) for f in FORMS[1:] for n in (4096, 8192, 15872, 32768)]
    tasks = [
        (Cell(form, "backward", kind, m or min(4096, 2**27 // n), n), label)
        for label in ("inductor", "QuACK", *TRITON)  # the slow ones first, over all processes
        for form, kind, n, m in layers
    ]
    # Triton's kernels at the page's other widths: half a second each, of thirty.
    tasks += [
        (Cell("layer", "backward", "float16", 4096, n), label)
        for n in range(1024, 15873, 512)
        if (n, 0) not in WARM
        for label in TRITON
    ]
    tasks += [(Cell("layer", "backward", kind, 4096, n), label) for label, kind, n in BESIDE]
    streams = [("layer", kind) for kind in TYPES] + [("rms+residual", "float16")]
    tasks += [(Cell(f, d, kind, 16, 1024), "ceiling") for f, kind in streams for d in DIRECTIONS]
    # Each of these takes most of a minute: they come first, one to a process.
    slow = [t for t in tasks if t[1] == "flash-linear-attention" and t[0].n >= 16384]
    return slow + [task for task in tasks if task not in slow]


def warm(bench: Bench) -> None:
    """Compile what the race's page runs, in processes of their own."""
    tasks = warm_tasks()
    if not bench.options.compile:
        print(f"warm: {len(tasks)} kernels, three minutes or more", flush=True)
        if not (bench.dry or bench.options.estimate):
            compiled_apart(bench, "warm")
        return
    index, count = map(int, bench.options.compile.split("/"))
    for cell, label in tasks[index::count]:
        find = baselines.layer_norms if cell.form == "layer" else baselines.rms_norms
        norm = find(bench.device)[0].get(label)
        (tensors,) = bench.inputs(cell, 1)
        start = time.perf_counter()
        try:
            if norm is not None:
                rival_call(cell, norm, tensors)()
            elif label not in ("inductor", "QuACK", *TRITON):
                beside(bench, cell, label, tensors)
        except Exception as error:  # whatever another's kernel raises, it is named
            print(f"{label} at {cell}: {type(error).__name__}: {error}", file=sys.stderr)
        if (took := time.perf_counter() - start) > 20:
            print(f"{label} at {cell}: {took:.0f} s to compile", file=sys.stderr, flush=True)


# --- bytes ----------------------------------------------------------------------------------------


def bytes_moved(bench: Bench) -> None:
    """Kernels of torch's and of ours, and what they move."""
    print("bytes: 8 cells, about 15 s", flush=True)
    counters = ["dram__bytes_read.sum", "dram__bytes_write.sum"]
    for n, direction in itertools.product(
        (70,) if bench.dry else (1024, 4096, 15872, 32768), DIRECTIONS
    ):
        cell = Cell("layer", direction, "float32" if bench.dry else "float16",
                    5 if bench.dry else 4096, n)  # fmt: skip
        (tensors,) = bench.inputs(cell, 1)
        norms = baselines.layer_norms(bench.device)[0]
        for label in ("torch", "roundoff"):
            call = rival_call(cell, norms[label], tensors)
            call()
            for metrics in ([], counters):
                for row in kernels_of(bench, call, metrics):
                    row = cell._asdict() | {"rival": label, "of": cell.nbytes} | row
                    bench.rows.setdefault("bytes", []).append(row)
                    print({k: row[k] for k in ("direction", "n", "rival", "kernel", "us", "moved")},
                          flush=True)  # fmt: skip


def kernels_of(bench: Bench, call: Any, metrics: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each kernel of a call; with metrics, the sum of their bytes."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    options: dict[str, Any] = {}
    if metrics:
        options["experimental_config"] = _ExperimentalConfig(
            profiler_metrics=metrics, profiler_measure_per_kernel=True
        )
    activity = ProfilerActivity.CPU if bench.dry else ProfilerActivity.CUDA
    path = bench.options.out / "trace.json"
    try:
        with profile(activities=[activity], **options) as recorded:
            call()
            if not bench.dry:
                torch.cuda.synchronize()
        recorded.export_chrome_trace(str(path))
    except RuntimeError as error:  # the counters need rights that a container may not have
        print(f"  no counters: {str(error)[:200]}", flush=True)
        return
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") in ("kernel", "cuda_profiler_range"):
            args = event.get("args", {})
            moved = [float(args[m]) for m in metrics if m in args]
            yield {
                "kernel": event["name"][:60],
                "us": event.get("dur"),
                "moved": sum(moved) or None,
            }


# --- launches -------------------------------------------------------------------------------------


class Empty(torch.autograd.Function):
    """The allocations of ours, and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, b: Any, stats: Any) -> Any:
        y = torch.empty_like(x)
        ctx.save_for_backward(x, w, stats())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, w, _ = ctx.saved_tensors
        torch.empty_strided((2, 132, x.shape[1]), (132 * x.shape[1], x.shape[1], 1),
                            dtype=torch.float32, device=x.device)  # fmt: skip
        return torch.empty_like(x), torch.empty_like(w), torch.empty_like(w), None


def launches(bench: Bench) -> None:
    """A call with its launches."""
    print("launches: 8 cells, about 20 s", flush=True)
    shapes = [(5, 64)] if bench.dry else [(256, 1024), (4096, 1024)]
    for form, (m, n) in itertools.product(("layer", "rms"), shapes):
        cell = Cell(form, "backward", "float32" if bench.dry else "float16", m, n)
        (tensors,) = bench.inputs(cell, 1)
        x, dy, _, w, b = (t.requires_grad_() for t in tensors)
        leaves = (x, w, b) if form == "layer" else (x, w)
        likes = map(engine._like, (x, w, b if form == "layer" else None))
        case = engine.Case(form_of(cell), (n,), EPS, None, *likes)
        calls: dict[str, Callable[[], Any]] = {
            "torch": partial(functional.layer_norm, x, (n,), w, b, EPS),
            "roundoff": partial(layer_norm, x, n, w, b, EPS),
            "empty": partial(Empty.apply, x, w, b, case.stats),
        }
        if form == "rms":
            calls["torch"] = partial(functional.rms_norm, x, (n,), w, EPS)
            calls["roundoff"] = partial(rms_norm, x, n, w, EPS)
        grad = partial(torch.autograd.grad, inputs=leaves, grad_outputs=dy.detach())

        def both(function: Any, grad: Any = grad) -> None:
            grad(function(), allow_unused=True)

        modes = {
            "forward": calls,
            "forward and backward": {k: partial(both, f) for k, f in calls.items()},
        }
        for name, functions in modes.items():
            timings = measure(functions, device=bench.device, budget_s=0.05 if bench.dry else 2,
                              min_rounds=3 if bench.dry else 20)  # fmt: skip
            over, above = timings.ratio("roundoff", "torch"), timings.frame.set_index("label")
            extra = above["median"]["roundoff"] - above["median"]["empty"]
            row = {"form": form, "m": m, "n": n, "call": name, "over_torch": over.value,
                   "low": over.low, "high": over.high, "above_empty_us": extra * 1e6}  # fmt: skip
            row |= {f"{k}_us": v * 1e6 for k, v in above["median"].items()}
            bench.rows.setdefault("launches", []).append(row)
            print(", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}"
                            for k, v in row.items()), flush=True)  # fmt: skip
        if form == "layer":
            pieces(bench, case, [t.detach() for t in (x, dy, w, b)])


def pieces(bench: Bench, case: Any, tensors: list[torch.Tensor]) -> None:
    """Where the time of a call goes on the host, each piece by itself."""
    x, dy, w, b = tensors
    _, rows, stats = case.forward(x, w, b, None, True)
    case.backward(dy, rows, w, stats, None, True, True)
    ((_, gradient),) = case.gradients.items()
    part, dx, dw, db = gradient.part(), gradient.dx(), gradient.dw(), gradient.db()
    (launch,) = case.launches[1]
    second = (gradient.second, gradient.second_grid, part, (dw, db), gradient.second_counts)
    steps: dict[str, Callable[[], Any]] = {
        "look the case up": partial(
            engine.case_of, engine.LAYER, case.shape, EPS, None, x, w, b
        ),
        "allocate y and the statistics": lambda: (torch.empty_like(x), case.stats()),
        "launch the forward": partial(launch, case.grid, (x, w, b, dx, stats), case.counts),
        "allocate dx, dw, db and partial sums": lambda: (
            gradient.dx(), gradient.dw(), gradient.db(), gradient.part()
        ),
        "launch the first stage": partial(
            gradient.first[0], gradient.grid, (rows, dy, w, stats, dx, part), gradient.counts
        ),
        "launch the second stage": partial(engine._second_stage, *second),
    }  # fmt: skip
    repeats, calls = (2, 3) if bench.dry else (20, 200)
    for name, step in steps.items():
        best = float("inf")
        for _ in range(repeats):
            if not bench.dry:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                step()
            best = min(best, (time.perf_counter() - start) / calls)
        row = {"m": len(x), "n": x.shape[1], "piece": name, "us": best * 1e6}
        bench.rows.setdefault("pieces", []).append(row)
        print(f"  {name}: {best * 1e6:.2f} us", flush=True)


# --- bits -----------------------------------------------------------------------------------------


def bits(bench: Bench) -> None:
    """Digests with a fixed number of programs, and different results among many runs."""
    shapes = [(4096, 1024), (4096, 4096), (4096, 8704), (1000, 15872), (512, 24576), (256, 32768),
              (128, 65536), (100, 131072)]  # fmt: skip
    shapes = [(5, 70)] if bench.dry else shapes
    print(f"bits: {len(shapes)} shapes, about 30 s", flush=True)
    for (m, n), kind in itertools.product(shapes, ("float32",) if bench.dry else TYPES):
        # Drawn on the CPU: the same numbers on every machine.
        generator = torch.Generator().manual_seed(n)
        x, dy = (torch.randn(m, n, generator=generator) for _ in "xd")
        w, b = (torch.rand(n, generator=generator) for _ in "wb")
        tensors = [t.to(TYPES[kind]).to(bench.device) for t in (x, w, b, dy)]
        leaves = [t.requires_grad_() for t in tensors[:3]]
        seen: dict[str, set[str]] = {}
        for _ in range(2 if bench.dry else 100):
            y = layer_norm(leaves[0], n, *leaves[1:], programs=7)
            results = (y.detach(), *torch.autograd.grad(y, leaves, tensors[3]))
            for name, t in zip(("y", "dx", "dw", "db"), results, strict=True):
                seen.setdefault(name, set()).add(digest(t))
        row = {"m": m, "n": n, "type": kind} | {k: sorted(v)[0] for k, v in seen.items()}
        row["different"] = max(map(len, seen.values()))
        bench.rows.setdefault("bits", []).append(row)
        print(row, flush=True)


def digest(t: torch.Tensor) -> str:
    """Of the bits; summed on the device first, as integers, so that little is copied."""
    words = t.contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32).long()
    place = torch.arange(words.numel(), device=t.device).view_as(words) % 65521 + 1
    sums = torch.stack([words.sum(), (words * place).sum(), (words * words).sum()])
    return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()[:12]


def main() -> int:
    parts: dict[str, Callable[[Bench], None]] = {
        "check": check, "tune": tune, "warm": warm, "race": race, "bytes": bytes_moved,
        "launches": launches, "bits": bits,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=parts)
    parser.add_argument("--out", type=Path, default=Path("build/layer-norm"))
    parser.add_argument("--budget", type=float, default=0.4, help="seconds of rounds for a cell")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--widths", type=int, nargs="*")
    parser.add_argument("--types", choices=TYPES, nargs="*", help="float16 where not given")
    parser.add_argument("--forms", choices=FORMS, nargs="*")
    parser.add_argument("--directions", choices=DIRECTIONS, nargs="*")
    parser.add_argument("--most", type=int, default=24, help="candidates of a cell")
    parser.add_argument("--seconds", type=float, default=60, help="check begins no group after it")
    parser.add_argument("--all", action="store_true", help="check what tune tries first, too")
    parser.add_argument("--no-inductor", action="store_true", help="which compiles for seconds")
    parser.add_argument("--estimate", action="store_true", help="print cells and seconds only")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    if len(sys.argv) == 1:  # as `make bench` runs it
        print("nothing runs unless it is asked for:", parser.format_usage())
        return 0
    options = parser.parse_args()
    if interpreting() and not (options.dry or options.estimate):
        parser.error("no CUDA device; --dry runs without one")
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    if not options.compile:
        text = json.dumps(environment(), default=str, indent=1)
        (options.out / "environment.json").write_text(text)
    for part in options.parts:
        parts[part](bench)
        for name, rows in bench.rows.items():  # what is there so far, should time run out
            (options.out / f"{name}.json").write_text(json.dumps(rows, default=str))
            pd.DataFrame(rows).to_csv(options.out / f"{name}.csv", index=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
