"""Cost of ``max_diff`` with a histogram on 40 million float32 elements.

Prints its time over that of ``(a - b).abs().max()``, measured in turns on the processor, and the
extra memory each needs. Run: ``python tests/bench/bench_max_diff.py``.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch

from roundoff.compare import max_diff, string_diff


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def peak_mib(call: Callable[[], object]) -> float:
    """Extra memory of the process at the peak, MiB; it only rises."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=40_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(options.elements, generator=generator)
    b = a + 1e-3 * torch.randn(options.elements, generator=generator)

    def full() -> object:
        return max_diff(a, b, hist=True)

    def plain() -> float:
        return float((a - b).abs().max())

    extra = peak_mib(full), peak_mib(plain)
    times: dict[str, list[float]] = {"full": [], "plain": []}
    for round_ in range(options.rounds + 1):
        for name, call in (("full", full), ("plain", plain)):
            times[name].append(seconds(call))
        if round_ == 0:  # the first turn warms both up
            times = {"full": [], "plain": []}
    middle = {k: statistics.median(v) for k, v in times.items()}
    ratios = sorted(f / p for f, p in zip(times["full"], times["plain"], strict=True))
    ratio = statistics.median(ratios)
    print(
        f"{options.elements:,d} float32, {torch.get_num_threads()} threads: "
        f"max_diff {1e3 * middle['full']:.2f} ms, plain {1e3 * middle['plain']:.2f} ms, "
        f"ratio {ratio:.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}], "
        f"extra memory {extra[0]:.0f} MiB against {extra[1]:.0f} MiB"
    )
    print("  ", string_diff(max_diff(a, b, hist=True)))
    return int(ratio > 3)


if __name__ == "__main__":
    sys.exit(main())
