"""The invariant product, attention and a token of a model beside their rivals, on a CUDA device.

Parts, each a table and a list of rows in ``OUT/invariant.tar.gz``:

- ``tests``: the tests of these functions, with pytest in another process.
- ``products``: K -> N and M of a decoder's layers; over torch's ``linear`` as it comes, cuBLASLt
  told not to split K, cuBLAS by halves and eighths of the weight, the product with ``split=True``
  where that has parts, one tile for all M (as batch_invariant_ops has it), and what of vllm's and
  of batch_invariant_ops' kernels can be imported. Each with whether row 0 has the bits of M = 1.
- ``workspace``: the same ``linear`` in a child process that gives cuBLAS no workspace
  (``CUBLAS_WORKSPACE_CONFIG=:16:8 CUBLASLT_WORKSPACE_SIZE=1``), over our kernel, which both
  processes time, so that the two can be related.
- ``attention``: one token against a cache, over torch's, flash-attention and FlashInfer where
  they are installed.
- ``token``: a decoding step of the trained model as a CUDA graph, with invariant() and without.
- ``tune``: candidates of tiles for few rows, where they are not measured yet; prints the quickest
  of each as a line for TILES.
- ``split``: the product with K in parts, for weights of a long K; prints a line for SPLITS where
  few rows are more than 10 % faster.

``all`` has them all. A part that fails prints its traceback and the next one begins; the exit
status is 1 then. After ``--seconds`` what is left is skipped, and named.

60 launches a CUDA graph replay where a launch takes less than 0.3 ms; rivals interleaved; weights
and caches rotate over more than the L2 cache. Run
``python tests/bench/bench_invariant.py all --out results``; ``--quick`` has a third of the cells,
``--dry`` runs every line on a CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch
from torch.nn import functional

import roundoff
from roundoff.environment import environment
from roundoff.kernels import attention, invariant_attention, invariant_matmul, matmul
from roundoff.kernels.invariant_cublas import _CHOSEN, _ROUTES
from roundoff.kernels.invariant_matmul import SPLITS, TILES, Tile, tile_for
from roundoff.timing import copies, measure

#: K and N.
SHAPES = ((4096, 4096), (4096, 6144), (4096, 11008), (11008, 4096), (14336, 4096), (8192, 1024),
          (4096, 128256), (576, 1536), (576, 49152))  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ONE_TILE = Tile(False, 128, 128, 64, 8, 3)
LAUNCHES, REPLAY_S = 60, 0.018
ALLOWED = {"median": 1.05, "above": 1.15, "most": 1.4}
WITHOUT = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}

#: (N, K, rows) for which no tile beat the usual choice.
USUAL = {(11008, 4096, 32), (4096, 14336, 16), (1024, 8192, 32), (1024, 8192, 64)}
TESTS = [f"tests/kernels/test_invariant_{name}.py" for name in ("matmul", "attention", "mode")]
PARTS = ("tests", "tune", "split", "attention", "token", "products", "workspace")
ARCHIVE = "invariant.tar.gz"
START = time.monotonic()

Function = Callable[..., torch.Tensor]
_Cell = TypeVar("_Cell")


def say(*what: object) -> None:
    """A line with the seconds since the start."""
    print(f"[{time.monotonic() - START:6.1f} s]", *what, flush=True)


def clocks() -> dict[str, str]:
    """Clocks, temperature and power, as the driver has them now."""
    names = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    return dict(zip(names, text.split("\n")[0].split(", "), strict=True))


class Bench:
    """What all parts share: the device, the budget of a cell, and the rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.dry, self.quick, self.budget = options.dry, options.quick, options.budget
        self.device = "cpu" if options.dry else "cuda"
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.seconds = options.seconds

    def cells(self, part: str, cells: Iterable[_Cell]) -> Iterator[_Cell]:
        """The cells of a part until the time is up; how many are left out then."""
        todo = list(cells)
        for i, cell in enumerate(todo):
            if time.monotonic() - START > self.seconds:
                say(f"{part}: time is up, {len(todo) - i} of {len(todo)} cells left out")
                return
            yield cell

    def draw(self, *shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype)

    def time(self, calls: dict[str, Function], sets: int) -> tuple[Any, int]:
        """Times of functions of the number of a set of buffers, and launches a replay."""
        first = next(iter(calls.values()))
        once = measure({"": lambda: first(0)}, device=self.device, budget_s=0.0, min_rounds=2)
        typical = float(once.frame["median"].iloc[0])
        launches = max(3, min(LAUNCHES, int(REPLAY_S / typical)))
        if self.dry:
            launches = 2

        def several(function: Function) -> Callable[[], None]:
            def run() -> None:
                for i in range(launches):
                    function(i % sets)

            return run

        timings = measure(
            {name: several(f) for name, f in calls.items()}, device=self.device,
            cuda_graph=not self.dry, budget_s=self.budget, precision=0.01,
            min_rounds=3 if self.dry else 9, max_rounds=60,
        )  # fmt: skip
        return timings, launches

    def add(
        self, part: str, cell: dict[str, Any], timings: Any, launches: int, **more: Any
    ) -> None:
        """A row for each rival: microseconds and the ratio to the first, with intervals."""
        labels = list(timings.samples)
        for _, row in timings.frame.iterrows():
            label = row["label"]
            ratio = timings.ratio(label, labels[0])
            self.rows.setdefault(part, []).append(
                cell
                | {
                    "rival": label, "us": row["median"] / launches * 1e6,
                    "us_low": row["low"] / launches * 1e6, "us_high": row["high"] / launches * 1e6,
                    "ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high,
                    "launches": launches, "rounds": len(timings.samples),
                }
                | {name: values.get(label) for name, values in more.items()}
            )  # fmt: skip

    def shapes(self) -> list[tuple[int, int]]:
        return [(64, 48), (33, 20)] if self.dry else list(SHAPES)

    def counts(self) -> list[int]:
        if self.dry:
            return [1, 5]
        return list(ROWS[::3]) if self.quick else list(ROWS)

    def types(self) -> dict[str, torch.dtype]:
        return {"float32": torch.float32} if self.dry else TYPES


def imported() -> dict[str, Function]:
    """Others' invariant products of x (M, K) and w (K, N), as far as they are installed."""
    there: dict[str, Function] = {}
    for label, module in (
        ("batch_invariant_ops", "batch_invariant_ops"),
        ("vllm", "vllm.model_executor.layers.batch_invariant"),
    ):
        try:
            there[label] = importlib.import_module(module).matmul_persistent
        except (ImportError, AttributeError) as error:
            print(f"missing: {label} ({error})")
    return there


def product_rivals(
    x: torch.Tensor, weights: list[torch.Tensor], others: dict[str, Function]
) -> Any:
    """Functions of (rows, number of the weight), the baseline first."""

    def by_kernel(rows: torch.Tensor, i: int, tile: Tile | None = None) -> torch.Tensor:
        return invariant_matmul._by_kernel(rows[None], weights[i][None], None, False, tile)[0]

    rivals: dict[str, Function] = {
        "cuBLAS": lambda r, i: functional.linear(r, weights[i]),
        "ours": lambda r, i: matmul(r, weights[i]),
        "our kernel": by_kernel,
        "one tile": lambda r, i: by_kernel(r, i, ONE_TILE),
    }
    for label, way in list(_ROUTES.items())[1:]:
        rivals[label] = lambda r, i, f=way: f(r, weights[i], None)
    if tuple(weights[0].shape) in SPLITS or not x.is_cuda:
        rivals["ours, split"] = lambda r, i: matmul(r, weights[i], split=True)
    for label, function in others.items():
        rivals[label] = lambda r, i, f=function: f(r, weights[i].t())
    return rivals


def usable(
    rivals: dict[str, Function], x: torch.Tensor, cell: dict[str, Any]
) -> dict[str, Function]:
    """Those that run for this cell; the others are named."""
    kept = {}
    for name, function in rivals.items():
        try:
            function(x, 0)
        except Exception as error:  # whatever another's kernel raises, it is named
            print(f"  left out: {name} at {cell}: {type(error).__name__}: {str(error)[:80]}")
        else:
            kept[name] = function
    return kept


def product_cell(
    bench: Bench, cell: dict[str, Any], rivals: dict[str, Function], x: torch.Tensor, sets: int
) -> None:
    """One shape and number of rows: bits, then times."""
    rivals = usable(rivals, x, cell)
    (m, k), n = x.shape, cell["N"]
    alone = {name: torch.equal(f(x[:1], 0)[0], f(x, 0)[0]) for name, f in rivals.items()}
    chain = rivals["our kernel"](x, 0)
    same = {name: torch.equal(f(x, 0), chain) for name, f in rivals.items()}
    ways = [key for key in _CHOSEN if key[3:5] == (m, k) and key[7:9] == (n, k)]
    way = {"ours": (_CHOSEN[ways[-1]] or "kernel") if ways else "kernel"}
    calls = {name: partial(f, x) for name, f in rivals.items()}
    timings, launches = bench.time(calls, sets)
    bench.add("products", cell, timings, launches, alone=alone, chain=same, way=way)


def products(bench: Bench, only: tuple[str, ...] = ()) -> None:
    """The product's cells."""
    others = imported()
    todo = itertools.product(bench.shapes(), bench.types().items())
    for (k, n), (kind, dtype) in bench.cells("products", todo):
        size = n * k * dtype.itemsize
        sets = 2 if bench.dry else copies(size, bench.device)
        weights = [bench.draw(n, k, dtype=dtype, seed=s) for s in range(sets)]
        x = bench.draw(max(bench.counts()), k, dtype=dtype, seed=99)
        for m in bench.counts():
            rivals = product_rivals(x, weights, others)
            rivals = {name: f for name, f in rivals.items() if not only or name in only}
            product_cell(bench, {"K": k, "N": n, "type": kind, "M": m}, rivals, x[:m], sets)
        del weights
        say(f"{kind} {k} -> {n}: {sets} weights, {clocks()}")


def judged(rows: pd.DataFrame, rival: str = "ours") -> str:
    ratios = rows[rows.rival == rival]
    over = ratios[ratios.ratio > ALLOWED["above"]].sort_values("ratio", ascending=False)
    columns = ["K", "N", "type", "M", "us", "ratio", "ratio_low", "ratio_high", "way"]
    share = len(over) / max(1, len(ratios))
    text = (
        f"{rival}: median {ratios.ratio.median():.3f} (allowed {ALLOWED['median']}), "
        f"above {ALLOWED['above']}: {share:.1%} of {len(ratios)} cells (allowed 10 %), "
        f"largest {ratios.ratio.max():.2f} (allowed {ALLOWED['most']})"
    )
    return text + ("\n" + over[columns].to_string(index=False) if len(over) else "")


def workspace(bench: Bench, options: argparse.Namespace, folder: Path) -> None:
    """The products in a child process whose cuBLAS has no workspace."""
    left = bench.seconds - (time.monotonic() - START)
    command = [sys.executable, __file__, "child", "--quick", "--budget", str(options.budget)]
    command += ["--dry"] * bench.dry + ["--seconds", str(left), "--out", str(folder)]
    subprocess.run(command, check=True, env=os.environ | WITHOUT)
    with tarfile.open(folder / ARCHIVE) as archive:
        file = archive.extractfile("products.json")
        assert file is not None
        bench.rows["workspace"] = json.load(file)


def tests(options: argparse.Namespace, folder: Path) -> None:
    """The tests, in another process; their log is kept and its end printed."""
    log = folder / "tests.txt"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-W", "ignore", *TESTS]
    command += ["-n", str(options.workers)] if options.workers else []
    if options.dry:
        command += ["-k", "tile_is_chosen"]
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
    lines = log.read_text().splitlines()
    wrong = [line for line in lines if line.startswith(("E  ", "FAILED", "ERROR"))]
    print("\n".join([*(line[:200] for line in wrong), *lines[-3:]]), flush=True)
    if code:
        raise RuntimeError(f"pytest ended with {code}")


def attention_rivals(
    q: torch.Tensor, caches: list[tuple[torch.Tensor, ...]]
) -> dict[str, Function]:
    """Functions of the number of a cache, (batch, groups, keys, head) twice."""
    sdpa = functional.scaled_dot_product_attention
    rivals: dict[str, Function] = {
        "torch": lambda i: sdpa(q, *caches[i], enable_gqa=True),
        "ours": lambda i: attention(q, *caches[i]),
    }
    if q.is_cuda:
        batch, _, _, head = q.shape
        seen = invariant_attention.seen_by_position(batch, 1, caches[0][0].shape[2], q.device)
        for each in (1, 2, 4, 8, 1000):
            rivals[f"ours, {each} splits of a program"] = lambda i, each=each: (
                invariant_attention._by_kernel(q, *caches[i], seen, head**-0.5, False, None, each)
            )
    try:
        flash = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
    except ImportError as error:
        print(f"missing: flash-attention 3 ({error})")
    else:
        tokens = [[t.transpose(1, 2).contiguous() for t in cache] for cache in caches]
        one = q.transpose(1, 2).contiguous()
        rivals["flash-attention 3"] = lambda i: flash(one, *tokens[i])
        rivals["flash-attention 3, one split"] = lambda i: flash(one, *tokens[i], num_splits=1)
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        print(f"missing: FlashInfer ({error})")
    else:
        if len(q) == 1:
            rivals["FlashInfer"] = lambda i: flashinfer.single_decode_with_kv_cache(
                q[0, :, 0], caches[i][0][0], caches[i][1][0], kv_layout="HND"
            )
    return rivals


def one_token(
    bench: Bench, heads: int, groups: int, head: int, keys: int, batch: int
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
    """A query, and caches in turn."""
    draw = partial(bench.draw, dtype=torch.float32 if bench.dry else torch.bfloat16)
    sets = 2 if bench.dry else copies(4 * batch * groups * keys * head, bench.device)
    caches = [tuple(draw(batch, groups, keys, head, seed=2 * s + t) for t in (0, 1))
              for s in range(sets)]  # fmt: skip
    return draw(batch, heads, 1, head, seed=99), caches


def attentions(bench: Bench) -> None:
    """One token against a cache: heads of Llama 3's 8 billion parameters, and of SmolLM2."""
    heads = [(32, 8, 128), (9, 3, 64)]
    lengths, batches = (512, 1024, 2048, 4096, 8192), (1, 4, 16, 64)
    if bench.quick:
        lengths, batches = (512, 8192), (1, 16, 64)
    if bench.dry:
        heads, lengths, batches = [(4, 2, 16)], (70,), (1, 2)
    todo = itertools.product(heads, lengths, batches)
    for (h, g, d), keys, batch in bench.cells("attention", todo):
        q, caches = one_token(bench, h, g, d, keys, batch)
        cell = {"heads": h, "groups": g, "head": d, "keys": keys, "batch": batch}
        rivals = {n: lambda _, i, f=f: f(i) for n, f in attention_rivals(q, caches).items()}
        calls = {n: partial(f, q) for n, f in usable(rivals, q, cell).items()}
        timings, launches = bench.time(calls, len(caches))
        bench.add("attention", cell, timings, launches)
        del caches, rivals, calls
    say(f"attention: {clocks()}")


def step_of(model: Any, batch: int, past: int, ours: bool) -> Function:
    """A decoding step that writes at the same place each time, in a cache of its own."""
    from transformers import StaticCache

    device = model.device
    cache = StaticCache(config=model.config, max_cache_len=past + 64)
    mask = torch.ones(batch, past + 64, dtype=torch.int64, device=device)
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        prompt = torch.full((batch, past), 7, device=device)
        model(prompt, past_key_values=cache, use_cache=True)
    options = {
        "input_ids": torch.full((batch, 1), 5, device=device), "attention_mask": mask,
        "position_ids": torch.full((batch, 1), past, device=device),
        "past_key_values": cache, "use_cache": True,
    }  # fmt: skip
    lengths = [getattr(layer, "cumulative_length", None) for layer in cache.layers]

    def step(_: int) -> torch.Tensor:
        for length in lengths:
            if isinstance(length, torch.Tensor):
                length.fill_(past)
        with torch.no_grad(), roundoff.invariant() if ours else contextlib.nullcontext():
            model.set_attn_implementation("roundoff" if ours else "sdpa")
            return model(**options).logits

    return step


def token(bench: Bench) -> None:
    """A decoding step of the trained model as a CUDA graph, torch's and ours."""
    from roundoff.models import load_trained

    dtype = torch.float32 if bench.dry else torch.bfloat16
    model = load_trained().model(dtype=dtype, device=bench.device)
    past = 8 if bench.dry else 256
    for batch in bench.cells("token", (1, 2) if bench.dry else (1, 4, 16, 64)):
        calls = {name: step_of(model, batch, past, name == "ours") for name in ("torch", "ours")}
        for name, function in calls.items():
            say(f"token, batch {batch}, {name}: {function(0)[0, 0, :2].tolist()}")
        timings, launches = bench.time(calls, 1)
        bench.add("token", {"batch": batch, "past": past}, timings, launches)
    say(f"token: {clocks()}")


def candidates(usual: Tile, itemsize: int) -> list[Tile]:
    """Tiles with as many rows, the usual one first."""
    tiles = set()
    for columns, depth, warps in itertools.product((32, 64, 128), (64, 128), (4, 8)):
        stage = (usual.rows + columns) * depth * itemsize
        for room in (72, 110, 200):
            stages = min(8, room * 1024 // stage)
            if stages >= 2 and (warps == 8) == (columns == 128):
                tiles.add(Tile(True, usual.rows, columns, depth, warps, stages))
    return [usual, *sorted(tiles - {usual})]


def tune(bench: Bench) -> None:
    """Tiles for few rows, of the shapes that have none and are not known to need none."""
    dtype = next(iter(bench.types().values()))
    size = dtype.itemsize
    todo = [
        (k, n, m)
        for (k, n), m in itertools.product(bench.shapes(), (1, 5) if bench.dry else (16, 32, 64))
        if (n, k, size, m) not in TILES and (n, k, m) not in USUAL
    ]
    for k, n, m in bench.cells("tune", todo):
        sets = 2 if bench.dry else copies(n * k * size, bench.device)
        weights = [bench.draw(n, k, dtype=dtype, seed=s) for s in range(sets)]
        x = bench.draw(m, k, dtype=dtype, seed=99)
        processors = invariant_matmul.multiprocessors(x.get_device())
        usual = tile_for(m, n, k, size, processors)
        tune_cell(bench, x, weights, candidates(usual, size)[: 3 if bench.dry else None])


def split(bench: Bench) -> None:
    """K in parts beside one chain, for weights of a long K: by few rows whether it is worth it."""
    dtype = next(iter(bench.types().values()))
    counts = (1, 5) if bench.dry else (1, 16, 64, 256, 1024, 4096)
    shapes = [(k, n) for k, n in bench.shapes() if bench.dry or k >= 2 * n]
    for k, n in bench.cells("split", shapes):
        sets = 2 if bench.dry else copies(n * k * dtype.itemsize, bench.device)
        weights = [bench.draw(n, k, dtype=dtype, seed=s) for s in range(sets)]
        x = bench.draw(max(counts), k, dtype=dtype, seed=99)
        shares = {m: split_cell(bench, x[:m], weights) for m in counts}
        most = pd.DataFrame([s for m, s in shares.items() if m <= 64]).filter(like="parts").max()
        if len(most) and most.min() < 0.9:
            parts = str(most.idxmin()).split()[0]
            share = f"at most {most.min():.2f} of one chain's time"
            say(f"SPLITS ({n}, {k}): ({parts}, None),  # {share}")


def split_cell(bench: Bench, x: torch.Tensor, weights: list[torch.Tensor]) -> dict[str, float]:
    """One number of rows: times over one chain's."""
    (m, k), n = x.shape, len(weights[0])

    def in_parts(i: int, parts: int) -> torch.Tensor:
        return invariant_matmul._in_parts(x, weights[i], None, False, parts)

    calls: dict[str, Function] = {"one chain": lambda i: matmul(x, weights[i])}
    for parts in (2, 4, 8):
        if k % (parts * 16) == 0:
            calls[f"{parts} parts"] = partial(in_parts, parts=parts)
    calls["cuBLAS"] = lambda i: functional.linear(x, weights[i])
    timings, launches = bench.time(calls, len(weights))
    bench.add("split", {"K": k, "N": n, "M": m}, timings, launches)
    rows = bench.rows["split"][-len(calls) :]
    times = ", ".join(f"{row['rival']} {row['us']:.2f} us" for row in rows)
    say(f"split {k} -> {n}, {m} rows: {times}")
    return {row["rival"]: row["ratio"] for row in rows}


def tune_cell(
    bench: Bench, x: torch.Tensor, weights: list[torch.Tensor], tiles: list[Tile]
) -> None:
    """One shape: all tiles, and cuBLAS."""
    (m, k), n = x.shape, len(weights[0])
    cell = {"K": k, "N": n, "M": m}

    def by_kernel(rows: torch.Tensor, i: int, tile: Tile) -> torch.Tensor:
        return invariant_matmul._by_kernel(rows[None], weights[i][None], None, False, tile)

    rivals: dict[str, Function] = {str(tuple(t)): partial(by_kernel, tile=t) for t in tiles}
    calls = {name: partial(f, x) for name, f in usable(rivals, x, cell).items()}
    calls["cuBLAS"] = lambda i: functional.linear(x, weights[i])
    timings, launches = bench.time(calls, len(weights))
    bench.add("tune", cell, timings, launches)
    times = {row["rival"]: row["us"] for row in bench.rows["tune"][-len(calls) :]}
    cublas = times.pop("cuBLAS")
    best = min(times, key=times.__getitem__)
    say(
        f"TILES ({n}, {k}, {x.element_size()}, {m}): Tile{best},  # {times[best]:.2f}, "
        f"{times[str(tuple(tiles[0]))]:.2f}, {cublas:.2f}"
    )


def shown(part: str, rows: list[dict[str, Any]]) -> None:
    frame = pd.DataFrame(rows)
    keys = [c for c in ("K", "N", "type", "heads", "head", "keys", "past") if c in frame]
    across = "M" if "M" in frame else "batch"
    print(f"\n== {part}: times {frame.rival.iloc[0]}")
    for rival in dict.fromkeys(frame.rival):
        table = frame[frame.rival == rival].pivot_table(index=keys, columns=across, values="ratio")
        values = frame[frame.rival == rival].ratio
        print(f"-- {rival}: median {statistics.median(values):.3f}, largest {values.max():.2f}")
        if len(dict.fromkeys(frame.rival)) < 12:
            print(table.round(2).to_string())
    if "alone" in frame:
        print("-- cells whose row 0 has not the bits of M = 1")
        print(frame[frame.alone == False].groupby("rival").size().to_string())  # noqa: E712
    if part == "products" and "ours" in set(frame.rival):
        print(judged(frame))


def kept(folder: Path, out: Path) -> None:
    """All files of a folder as one archive."""
    with tarfile.open(out / ARCHIVE, "w:gz") as archive:
        for file in sorted(folder.glob("*.*")):
            if file.name != ARCHIVE:
                archive.add(file, file.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=(*PARTS, "all", "child"))
    parser.add_argument("--out", type=Path, default=Path("build/invariant"))
    parser.add_argument("--budget", type=float, default=0.25, help="seconds of rounds for a cell")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which cells are left out")
    parser.add_argument("--workers", type=int, default=0, help="processes of pytest")
    parser.add_argument("--quick", action="store_true", help="a third of the cells")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU")
    if len(sys.argv) == 1:  # as `make bench` runs it
        print("nothing runs unless it is asked for:", parser.format_usage())
        return 0
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry runs without one")
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    say(f"reduced-precision reduction as it comes: {reduced}; {clocks()}")
    failures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "environment.json").write_text(json.dumps(environment(), default=str, indent=1))
        runs: dict[str, Callable[[], None]] = {
            "tests": lambda: tests(options, folder),
            "products": lambda: products(bench),
            "child": lambda: products(bench, ("cuBLAS", "our kernel")),
            "workspace": lambda: workspace(bench, options, folder),
            "attention": lambda: attentions(bench),
            "token": lambda: token(bench),
            "tune": lambda: tune(bench),
            "split": lambda: split(bench),
        }
        for part in PARTS if "all" in options.parts else options.parts:
            say(f"== {part}")
            try:
                runs[part]()
            except Exception:  # whatever it is, the other parts run
                traceback.print_exc()
                failures.append(part)
            for name, rows in bench.rows.items():
                (folder / f"{name}.json").write_text(json.dumps(rows))
            kept(folder, options.out)  # what is there so far, should time run out
    for name, rows in bench.rows.items():
        shown(name, rows)
    say(f"failed: {', '.join(failures) or 'nothing'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
