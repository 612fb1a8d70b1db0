"""Price of the exact sums, beside plain ones, after a look at their bits.

On a CPU ``roundoff.reductions.binned`` beside ``np.sum``; on a GPU, where one is there,
``roundoff.kernels.binned.sum_binned`` beside ``torch.sum`` in float32 and in float64. All sums of
a length are timed in turns in one run. Every sum is first compared with NumPy's binned one, bit by
bit; the status is 1 where one differs.

Run ``python tests/bench/bench_binned.py [--gpu-only]``, with ``--programs 4 8 --warps 4 8
--blocks 2048 4096`` for other choices than the package's.

With ``--sweep`` several choices of the kernel at two lengths, one line each as soon as it is known,
within ``--limit`` seconds. At lengths below 2**26 CUDA graphs of the calls are timed, too: these
cost what the GPU does, without Python. Where Triton is interpreted the same runs on the CPU:
``TRITON_INTERPRET=1 python tests/bench/bench_binned.py --sweep --sizes 5000 9000``.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product

import numpy as np
import pandas as pd
import torch

from roundoff.reductions import binned
from roundoff.timing import measure

CPU_SIZES = (2**10, 2**18, 2**24)
GPU_SIZES = (2**20, 2**24, 2**28)


def show(title: str, ratios: pd.DataFrame) -> None:
    print(title)
    print(ratios.to_string(index=False, float_format="%.3g"), flush=True)


def on_cpu() -> None:
    torch.set_num_threads(1)
    for n, dtype in product(CPU_SIZES, (np.float32, np.float64, np.float16)):
        x = np.random.default_rng(0).standard_normal(n).astype(dtype)
        for name, values in (("normal", x), ("one binade", (0.75 + x * 0).astype(dtype))):
            calls = {
                "np.sum": partial(np.sum, values),
                "np.sum in float64": partial(np.sum, values, dtype=np.float64),
                "binned": partial(binned, values),
            }
            ratios = measure(calls, budget_s=3, min_rounds=5).ratios("np.sum")
            show(f"CPU, {n:,d} {dtype.__name__}, {name}", ratios)


def truth(x: torch.Tensor) -> float:
    """NumPy's binned sum of a tensor's numbers."""
    numbers = x.cpu().float().numpy()
    if x.dtype == torch.bfloat16:
        import ml_dtypes

        numbers = numbers.astype(ml_dtypes.bfloat16)
    return float(binned(numbers))


def data(n: int, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Normal numbers, the same times powers of two, and in bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    normal = torch.randn(n, device=device, generator=generator)
    yield "normal", normal
    yield "bfloat16", normal.bfloat16()
    exponents = torch.randint(-60, 60, (n,), device=device, generator=generator)
    yield "120 binades", normal.ldexp_(exponents)


def on_gpu(blocks: list[int], warps: list[int], programs: list[int]) -> int:
    """How many sums have other bits than NumPy's."""
    from roundoff.kernels import binned as module

    wrong = 0
    for n in GPU_SIZES:
        for name, x in data(n, "cuda"):
            calls: dict[str, Callable[[], torch.Tensor]] = {
                "torch.sum": partial(torch.sum, x),
                "torch.sum in float64": partial(torch.sum, x, dtype=torch.float64),
                "sum_binned": partial(module.sum_binned, x),
            }
            usual = module._CHOICES[x.dtype]
            for block, warp, program in product(blocks, warps, programs):
                choice = usual._replace(block=block, warps=warp, programs=program)
                calls[label(choice)] = partial(module._sum, x, block, choice)
            want = truth(x)
            for key, call in list(calls.items())[2:]:
                if float(call()) != want:
                    wrong += 1
                    print(f"{name}, {n:,d}: {key}: not the bits of NumPy's")
            ratios = measure(calls, device="cuda", budget_s=3).ratios("torch.sum")
            show(f"{torch.cuda.get_device_name()}, {n:,d} {name}", ratios)
    print(f"{wrong} sums with other bits than NumPy's")
    return wrong


#: block, levels, power, warps, programs, registers: what compiles anew comes first.
SWEEP = {
    torch.float32: [
        (4096, 1, 8, 8, 4, 64),
        (4096, 1, 8, 8, 3, 80),
        (4096, 1, 8, 8, 2, 128),
        (2048, 1, 8, 8, 4, 64),
        (2048, 1, 8, 4, 8, 64),
        (8192, 1, 8, 8, 3, 80),
        (4096, 1, 7, 8, 4, 64),
        (4096, 1, 8, 8, 8, 64),
    ],
    torch.bfloat16: [
        (4096, 0, 8, 8, 4, 64),
        (4096, 0, 8, 4, 8, 64),
        (8192, 0, 8, 8, 4, 64),
        (8192, 0, 8, 8, 3, 80),
        (4096, 1, 8, 8, 4, 64),
        (8192, 1, 8, 8, 3, 80),
        (4096, 0, 7, 8, 4, 64),
        (4096, 0, 8, 8, 8, 64),
    ],
}


def label(choice: tuple[int, ...]) -> str:
    text = "block {}, levels {}, power {}, warps {}, programs {}, registers {}"
    return text.format(*choice)


def compile_one(dtype: torch.dtype, choice: tuple[int, ...]) -> None:
    """Leave a compiled kernel in Triton's cache, from a process of its own."""
    from roundoff.kernels import binned as module

    module._sum(torch.ones(9, dtype=dtype, device="cuda"), choice[0], module._Choice(*choice))


def sweep(sizes: list[int], limit_s: float, most: int) -> int:
    """Time choices of the kernel; how many sums have other bits than NumPy's."""
    from roundoff.kernels import binned as module
    from roundoff.kernels import interpreting

    start = time.monotonic()
    device = "cpu" if interpreting() else "cuda"
    name = "interpreted" if interpreting() else torch.cuda.get_device_name()
    choices = {dtype: rows[:most] for dtype, rows in SWEEP.items()}
    print(f"{name}, torch {torch.__version__}; ratios to torch.sum, microseconds", flush=True)
    if not interpreting():
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(8, mp_context=context) as pool:
            jobs = [(dtype, row) for dtype, rows in choices.items() for row in rows]
            list(pool.map(compile_one, *zip(*jobs, strict=True)))
        print(f"{len(jobs)} compiled after {time.monotonic() - start:.0f} s", flush=True)
    wrong, left = 0, 3 * sum(2 if graphs(n, device)[-1] else 1 for n in sizes)
    for n in sorted(sizes, reverse=True):
        for kind, x in data(n, device):
            want = truth(x)
            calls: dict[str, Callable[[], torch.Tensor]] = {
                "torch.sum": partial(torch.sum, x),
                "torch.sum in float64": partial(torch.sum, x, dtype=torch.float64),
            }
            for row in choices[x.dtype]:
                call = partial(module._sum, x, row[0], module._Choice(*row))
                found = float(call())
                if found == want and math.copysign(1, found) == math.copysign(1, want):
                    calls[label(row)] = call
                else:
                    wrong += 1
                    print(f"{n:,d} {kind}: {label(row)}: WRONG, {found!r} for {want!r}", flush=True)
            for graph in graphs(n, device):
                rest = limit_s - (time.monotonic() - start)
                if rest < 2:
                    print(f"{n:,d} {kind}: left out, the time is up", flush=True)
                    continue
                # Warming up takes about as long again as the rounds, the truth a few seconds.
                budget = min(4.0, rest / left / 3)
                left -= 1
                times = measure(
                    calls, device=device, budget_s=budget, min_rounds=3, cuda_graph=graph
                )
                for r in times.ratios("torch.sum").itertuples():
                    us = times.samples[r.label].median() * 1e6
                    title = f"{n:,d} {kind}{', graph' if graph else ''}"
                    print(f"{title}: {r.ratio:.3f} [{r.low:.3f}, {r.high:.3f}] {us:.1f} {r.label}")
                sys.stdout.flush()
    print(f"{wrong} sums with other bits than NumPy's; {time.monotonic() - start:.0f} s")
    return wrong


def graphs(n: int, device: str) -> list[bool]:
    """Whether to time CUDA graphs: by the side of plain calls where these are short."""
    return [False, True] if device == "cuda" and n < 2**26 else [False]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[])
    parser.add_argument("--warps", type=int, nargs="+", default=[8])
    parser.add_argument("--programs", type=int, nargs="+", default=[4])
    parser.add_argument("--gpu-only", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2**24, 2**28])
    parser.add_argument("--limit", type=float, default=95, help="seconds for the sweep")
    parser.add_argument("--most", type=int, default=99, help="choices of a type in the sweep")
    options = parser.parse_args()
    if options.sweep:
        return int(sweep(options.sizes, options.limit, options.most) > 0)
    if not options.gpu_only:
        on_cpu()
    if not torch.cuda.is_available():
        print("no GPU")
        return 0
    return int(on_gpu(options.blocks, options.warps, options.programs) > 0)


if __name__ == "__main__":
    sys.exit(main())
