"""Compare the statistics of the kernel with those of the CPU; prints what differs."""

import itertools
import math
import sys

import numpy as np
import torch

import roundoff.kernels  # noqa: F401 - mends the interpreter of Triton 3.6 under NumPy 2.5
from roundoff.compare import gpu, stats
from roundoff.describe import as_tensor

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LIMITS = (0.1, 0.0, 0.0001, 0.001, 0.01, 1.0, 10.0, 100.0)  # not in order, on purpose


def tensors(first: torch.dtype, second: torch.dtype, special: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    n = 3000 if special else 2500
    e = torch.randn(n, dtype=torch.float64, generator=generator)
    g = e + 1e-3 * torch.randn(n, dtype=torch.float64, generator=generator)
    e[:50], g[:20] = 0, 0
    g[30:60] *= -1
    e[60:90] *= 1e-40
    if special:
        e[100] = g[100] = math.nan
        e[200], g[300] = math.nan, math.inf
        e[400] = g[400] = math.inf
        e[500], g[501], e[501] = 1e30, 70000.0, math.inf
    return [e.to(first), g.to(second)]


def disagreements(a: stats.Stats, b: stats.Stats) -> list[str]:
    problems = []
    for key, one in vars(a).items():
        other = getattr(b, key)
        if key in ("sums", "signed"):
            x, y = sum(one), sum(other)
            near = abs(x - y) <= 1e-13 * sum(a.sums)
            same = x == y or near or (math.isnan(x) and math.isnan(y))
        else:
            same = bool(np.all(one == other))
        if not same:
            problems.append(f"{key} {one} {other}")
    return problems


def main(device: str) -> None:
    wrong = total = 0
    for first, second, special in itertools.product(TYPES, TYPES, (False, True)):
        e, g = tensors(first, second, special)
        typed = as_tensor(e), as_tensor(g)
        pair = stats.dtype_pair(*typed)
        moved = as_tensor(e.to(device)), as_tensor(g.to(device))
        one = stats.measure(*typed, pair, LIMITS)
        other = gpu.measure(*moved, pair, LIMITS)
        problems = ["the kernel refused"] if other is None else disagreements(one, other)
        total += 1
        wrong += bool(problems)
        for problem in problems:
            print(first, second, special, problem)
    print(f"{wrong} of {total} pairs disagree")


if __name__ == "__main__":
    main(sys.argv[1])
