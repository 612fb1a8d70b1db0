"""What the harness asks of the machine: caches and free memory."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

__all__ = ["copies", "free_memory"]


def _last_level_cache(device: str) -> int:
    """Size in bytes of the last cache before memory: L2 of a CUDA device, L3 of a CPU.

    32 MiB where the machine does not tell.
    """
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    kib = [int(size.read_text("ascii").strip().removesuffix("K")) for size in sizes]
    return max(kib, default=32 * 2**10) * 2**10


def copies(nbytes: int, device: str = "cpu", most: int = 64) -> int:
    """How many sets of buffers to rotate over so that none is still in the cache at its turn.

    Three times the last cache in all, and at least two sets; never more than *most*, nor than
    fit in a quarter of the free memory.

    Parameters
    ----------
    nbytes : int
        Bytes that one call touches.

    Examples
    --------
    >>> from roundoff.timing import copies
    >>> copies(2**40)  # larger than the memory: one set
    1
    """
    wanted = max(2, -(-3 * _last_level_cache(device) // nbytes))
    fitting = free_memory(device) // 4 // nbytes
    return int(max(1, min(wanted, most, fitting)))


def free_memory(device: str = "cpu") -> int:
    """Bytes that can still be allocated on *device*, what torch's cache would give back included.

    On a CPU the smaller of the machine's and the control group's: a process that exceeds the
    group's limit is killed instead of getting an error. 4 GiB where the machine does not tell.

    Examples
    --------
    >>> from roundoff.timing import free_memory
    >>> free_memory() > 2**20
    True
    """
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    try:
        text = Path("/proc/meminfo").read_text("ascii")
        limits = [int(re.findall(r"MemAvailable:\s+(\d+) kB", text)[0]) * 1024]
    except OSError:
        limits = [4 * 2**30]
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # there is none, or it has no limit
        most = int((group / "memory.max").read_text("ascii"))
        limits.append(most - int((group / "memory.current").read_text("ascii")))
    return max(0, min(limits))
