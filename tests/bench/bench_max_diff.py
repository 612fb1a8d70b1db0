"""Cost of ``max_diff`` with a histogram on 40 million float32 elements.

Prints its time over that of ``(a - b).abs().max()``, measured in turns on each device that is
there, and the extra memory each needs. Run: ``python tests/bench/bench_max_diff.py``.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch

from roundoff.compare import max_diff, string_diff


def seconds(call: Callable[[], object], device: str) -> float:
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def peak_mib(call: Callable[[], object], device: str) -> float:
    """Extra memory at the peak, MiB: of the GPU's allocator, or of the process (only rises)."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=40_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    worst = 0.0
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        generator = torch.Generator(device).manual_seed(0)
        a = torch.randn(options.elements, device=device, generator=generator)
        b = a + 1e-3 * torch.randn(options.elements, device=device, generator=generator)

        def full(a: torch.Tensor = a, b: torch.Tensor = b) -> object:
            return max_diff(a, b, hist=True)

        def plain(a: torch.Tensor = a, b: torch.Tensor = b) -> float:
            return float((a - b).abs().max())

        extra = peak_mib(full, device), peak_mib(plain, device)
        times: dict[str, list[float]] = {"full": [], "plain": []}
        for round_ in range(options.rounds + 1):
            for name, call in (("full", full), ("plain", plain)):
                times[name].append(seconds(call, device))
            if round_ == 0:  # the first turn warms both up
                times = {"full": [], "plain": []}
        middle = {k: statistics.median(v) for k, v in times.items()}
        ratios = sorted(f / p for f, p in zip(times["full"], times["plain"], strict=True))
        ratio = statistics.median(ratios)
        worst = max(worst, ratio)
        print(
            f"{device}: {options.elements:,d} float32, {torch.get_num_threads()} threads: "
            f"max_diff {1e3 * middle['full']:.2f} ms, plain {1e3 * middle['plain']:.2f} ms, "
            f"ratio {ratio:.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}], "
            f"extra memory {extra[0]:.0f} MiB against {extra[1]:.0f} MiB"
        )
        print("  ", string_diff(max_diff(a, b, hist=True)))
    print(f"worst ratio {worst:.2f}, limit 3")
    return int(worst > 3)


if __name__ == "__main__":
    sys.exit(main())
