"""Price of the exact sums, beside plain ones, after a look at their bits.

On a CPU ``roundoff.reductions.binned`` beside ``np.sum``; on a GPU, where one is there,
``roundoff.kernels.binned.sum_binned`` beside ``torch.sum`` in float32 and in float64. All sums of
a length are timed in turns in one run. Every sum is first compared with NumPy's binned one, bit by
bit; the status is 1 where one differs.

Run ``python tests/bench/bench_binned.py [--programs 4 8 16 --warps 4 8 --blocks 2048 4096]``.
"""

from __future__ import annotations

import argparse
import sys
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


def on_gpu(blocks: list[int], warps: list[int], programs: list[int]) -> int:
    """How many sums have other bits than NumPy's."""
    from roundoff.kernels import binned as module

    def sum_binned(x: torch.Tensor, block: int, warp: int, program: int) -> torch.Tensor:
        module._WARPS, module._PROGRAMS = warp, program
        return module.sum_binned(x, block)

    wrong = 0
    generator = torch.Generator("cuda").manual_seed(0)
    for n in GPU_SIZES:
        normal = torch.randn(n, device="cuda", generator=generator)
        wide = normal * 2.0 ** torch.randint(-60, 60, (n,), device="cuda", generator=generator)
        for name, x in (("normal", normal), ("120 binades", wide), ("bfloat16", normal.bfloat16())):
            calls = {
                "torch.sum": partial(torch.sum, x),
                "torch.sum in float64": partial(torch.sum, x, dtype=torch.float64),
            }
            numbers = x.cpu().float().numpy()
            if x.dtype == torch.bfloat16:
                import ml_dtypes

                numbers = numbers.astype(ml_dtypes.bfloat16)
            want = float(binned(numbers))
            for choice in product(blocks, warps, programs):
                label = "block {}, {} warps, {} programs".format(*choice)
                calls[label] = partial(sum_binned, x, *choice)
                if float(calls[label]()) != want:
                    wrong += 1
                    print(f"{name}, {n:,d}: {label}: not the bits of NumPy's")
            ratios = measure(calls, device="cuda", budget_s=3).ratios("torch.sum")
            show(f"{torch.cuda.get_device_name()}, {n:,d} {name}", ratios)
    print(f"{wrong} sums with other bits than NumPy's")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4096])
    parser.add_argument("--warps", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--programs", type=int, nargs="+", default=[8])
    parser.add_argument("--gpu-only", action="store_true")
    options = parser.parse_args()
    if not options.gpu_only:
        on_cpu()
    if not torch.cuda.is_available():
        print("no GPU")
        return 0
    return int(on_gpu(options.blocks, options.warps, options.programs) > 0)


if __name__ == "__main__":
    sys.exit(main())
