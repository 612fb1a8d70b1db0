"""The quickest tiles of our kernels on this GPU, beside those that the package uses.

``products``: tiles for few rows, a line for ``TILES`` of ``kernels/invariant_matmul.py`` each; and
K in parts beside one chain, a line for ``SPLITS``. ``norms``: ways to divide a row, for
``kernels/_norm_tilings.py``. A tile that does not fit the device is named and left out.

Run ``python tests/bench/tune_tiles.py products norms [--widths 4096 8192]``; ``--dry`` runs every
line in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from roundoff.kernels import _row_norm, interpreting, invariant_matmul
from roundoff.kernels._norm_tilings import Tiling, backward_tiling, forward_tiling
from roundoff.kernels.invariant_matmul import Tile, tile_for
from roundoff.timing import copies, measure

#: K and N of a decoder's weights.
SHAPES = ((4096, 4096), (4096, 6144), (4096, 11008), (11008, 4096), (14336, 4096), (8192, 1024),
          (576, 1536))  # fmt: skip
WIDTHS = (4096, 8192, 16384, 32768, 65536)
#: Candidates that are drawn of all that fit.
MOST = 24

Calls = dict[Any, Callable[[int], Any]]


def times(calls: Calls, sets: int, device: str) -> dict[Any, float]:
    """Seconds of a call with buffers that rotate over more than the L2 cache."""
    kept: Calls = {}
    for label, call in calls.items():
        try:
            call(0)
        except Exception as error:  # whatever Triton says of a tile that is too large
            print(f"  left out {label}: {type(error).__name__}: {str(error)[:80]}")
        else:
            kept[label] = call
    dry = device == "cpu"
    timings = measure(
        {str(i): call for i, call in enumerate(kept.values())}, device=device, rotate=sets,
        cuda_graph=not dry, budget_s=0.0 if dry else 0.3, min_rounds=3 if dry else 9, max_rounds=60,
    )  # fmt: skip
    return dict(zip(kept, timings.frame["median"].tolist(), strict=True))


def tiles(usual: Tile, itemsize: int) -> list[Tile]:
    """Tiles with as many rows, the usual one first."""
    found = set()
    for columns, depth, warps, room in product((32, 64, 128), (64, 128), (4, 8), (72, 110, 200)):
        stages = min(8, room * 1024 // ((usual.rows + columns) * depth * itemsize))
        if stages >= 2 and (warps == 8) == (columns == 128):
            found.add(Tile(True, usual.rows, columns, depth, warps, stages))
    return [usual, *sorted(found - {usual})]


def products(device: str, dry: bool) -> None:
    dtype = torch.float32 if dry else torch.bfloat16
    make = partial(torch.randn, device=device, dtype=dtype)
    shapes, counts = (((64, 48),), (1, 5)) if dry else (SHAPES, (16, 32, 64))
    for (k, n), m in product(shapes, counts):
        sets = 2 if dry else copies(n * k * dtype.itemsize, device)
        x, weights = make(m, k), [make(n, k) for _ in range(sets)]
        processors = invariant_matmul.multiprocessors(x.get_device())
        usual = tile_for(m, n, k, dtype.itemsize, processors)

        def by_tile(i: int, tile: Tile, x: Any = x, weights: Any = weights) -> Any:
            return invariant_matmul._by_kernel(x[None], weights[i][None], None, False, tile)

        def in_parts(i: int, parts: int, x: Any = x, weights: Any = weights) -> Any:
            return invariant_matmul._in_parts(x, weights[i], None, False, parts)

        calls: Calls = {tile: partial(by_tile, tile=tile) for tile in tiles(usual, dtype.itemsize)}
        calls = dict(list(calls.items())[: 3 if dry else None])
        splits = [parts for parts in (2, 4, 8) if k % (parts * 16) == 0 and (dry or k >= 2 * n)]
        calls |= {f"{parts} parts": partial(in_parts, parts=parts) for parts in splits}
        calls["cuBLAS"] = lambda i, x=x, weights=weights: functional.linear(x, weights[i])
        found = times(calls, sets, device)
        best = min((t for t in found if isinstance(t, Tile)), key=found.__getitem__)
        print(f"TILES ({n}, {k}, {dtype.itemsize}, {m}): {best}", flush=True)
        for label in (best, usual, *(f"{parts} parts" for parts in splits), "cuBLAS"):
            print(f"  {1e6 * found.get(label, float('nan')):.2f} us {label}")


def tilings(n: int, itemsize: int, backward: bool, usual: Tiling) -> list[Tiling]:
    """The usual one first. Below 16,384 columns piece and warps fix the bits and stay."""
    pieces = [2**i // itemsize for i in range(11, 15)] if n >= 16384 else [usual.piece]
    warps = (4, 8, 16) if n >= 16384 else (usual.warps,)
    found = [
        Tiling(1 if n >= 16384 else usual.rows, piece, -(-n // piece), count, stages, per_sm, hold)
        for piece, count, stages, per_sm, hold in product(
            pieces, warps, (1, 2, 3, 4), (0, 1, 2, 4), (True, False)
        )
        if n <= 16 * piece and (per_sm or (stages == 1 and not backward))
    ]
    for columns, piece, count, stages in product((2**13, 2**15), (2**11, 2**13), (8, 16), (1, 2)):
        shares = -(-n * itemsize // columns)
        pieces_of_share = -(-n * itemsize // (shares * piece))
        if n >= 12288 and shares > 1 and pieces_of_share <= 8:
            tiling = Tiling(1, piece // itemsize, pieces_of_share, count, stages, 1, True, shares)
            found.append(tiling)
    others = sorted(set(found) - {usual})
    return [usual, *random.Random(0).sample(others, min(MOST, len(others)))]


def norms(device: str, dry: bool, widths: list[int] | None) -> None:
    dtype = torch.float32 if dry else torch.float16
    make = partial(torch.randn, device=device, dtype=dtype)
    for n, backward in product(widths or ((70,) if dry else WIDTHS), (False, True)):
        m, find = (5 if dry else 2**27 // n), (backward_tiling if backward else forward_tiling)
        sets = 2 if dry else copies(3 * m * n * dtype.itemsize, device, most=16)
        w, b = make(n), make(n)
        buffers = [(make(m, n), make(m, n)) for _ in range(sets)]

        def call(i: int, tiling: Tiling, n: int = n, backward: bool = backward, w: Any = w,
                 b: Any = b, buffers: Any = buffers) -> Any:  # fmt: skip
            x, dy = buffers[i]
            likes = [*map(_row_norm._like, (x, w, b)), _row_norm._like(None)]
            forward = None if backward else tiling
            case = _row_norm.Case(_row_norm.LAYER, (n,), 1e-5, None, *likes, (forward, None))
            result = case.forward(x, w, b, None, True)
            if not backward:
                return result
            _, rows, stats = result
            return _row_norm.gradients_of(
                _row_norm.LAYER, dy, rows, w, stats, None, w.dtype, b.dtype, 0, tiling
            )

        chosen = tilings(n, dtype.itemsize, backward, find(n, dtype.itemsize))[: 3 if dry else None]
        found = times({t: partial(call, tiling=t) for t in chosen}, sets, device)
        print(f"{'backward' if backward else 'forward'} of {n} columns, {m} rows", flush=True)
        for tiling in [chosen[0], *sorted(found, key=found.__getitem__)[:3]]:
            print(f"  {1e6 * found.get(tiling, float('nan')):.1f} us {tuple(tiling)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=("products", "norms"))
    parser.add_argument("--widths", type=int, nargs="*", help="of norms")
    parser.add_argument("--dry", action="store_true", help="tiny sizes in Triton's interpreter")
    options = parser.parse_args()
    if interpreting() and not options.dry:
        parser.error("no CUDA device; --dry runs without one")
    device = "cpu" if options.dry else "cuda"
    if "products" in options.parts:
        products(device, options.dry)
    if "norms" in options.parts:
        norms(device, options.dry, options.widths)


if __name__ == "__main__":
    main()
