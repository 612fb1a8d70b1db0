"""What the harness asks of the machine: caches, free memory, precision switches."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from roundoff.arguments import check_device, check_flag, check_text, check_whole

__all__ = ["compile_cache", "copies", "free_memory", "last_level_cache", "torch_precision"]


def last_level_cache(device: str = "cpu") -> int:
    """Size in bytes of the last cache before memory: L2 of a CUDA device, L3 of a CPU.

    32 MiB where the machine does not tell.

    Examples
    --------
    >>> from roundoff.timing import last_level_cache
    >>> last_level_cache() >= 2**10
    True
    """
    if check_device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM]?)", path.read_text("ascii").strip())
        if match:
            sizes.append(int(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[match[2]])
    return max(sizes, default=32 * 2**20)


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
    check_whole("bytes of a call", nbytes, 1)
    check_whole("most", most, 1)
    wanted = max(2, -(-3 * last_level_cache(device) // nbytes))
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
    if check_device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    limits = [n for n in (_meminfo(), *_control_group()) if n is not None]
    return min(limits) if limits else 4 * 2**30


def _meminfo() -> int | None:
    with contextlib.suppress(OSError):
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text("ascii"))
        if match:
            return int(match[1]) * 1024
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return None


def _control_group() -> list[int]:
    """What the limits of the process' control group leave, in versions 2 and 1."""
    root = Path("/sys/fs/cgroup")
    remaining = []
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            top = int((root / limit).read_text("ascii"))
            remaining.append(max(0, top - int((root / used).read_text("ascii"))))
    return remaining


@contextlib.contextmanager
def torch_precision(tf32: bool) -> Iterator[None]:
    """Let torch use TF32 in float32 matrix products on CUDA, or not, within a block.

    Examples
    --------
    >>> import torch
    >>> from roundoff.timing import torch_precision
    >>> with torch_precision(True):
    ...     torch.backends.cuda.matmul.allow_tf32
    True
    >>> torch.backends.cuda.matmul.allow_tf32
    False
    """
    check_flag("tf32", tf32)
    matmul = torch.backends.cuda.matmul
    try:
        before = matmul.allow_tf32
        matmul.allow_tf32 = tf32
    except RuntimeError:  # the program uses the newer switch: the two may not be mixed
        newer = matmul.fp32_precision
        matmul.fp32_precision = "tf32" if tf32 else "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = newer
        return
    try:
        yield
    finally:
        matmul.allow_tf32 = before


@contextlib.contextmanager
def compile_cache(name: str, again: bool = False) -> Iterator[Path]:
    """Let torch.compile begin with empty caches, and another process find what it compiled.

    Parameters
    ----------
    name : str
        Of what is compiled: a process that asks for the same name gets the same folder.
    again : bool
        Whether to take what is there, so that compiling takes a part of the time.

    Yields
    ------
    pathlib.Path
        The folder, within that of temporary files.

    Examples
    --------
    >>> from roundoff.timing import compile_cache
    >>> with compile_cache("example") as folder:
    ...     sorted(folder.iterdir())
    []
    """
    check_text("name", name)
    check_flag("again", again)
    from torch._inductor.utils import clear_caches

    users = Path(tempfile.gettempdir()) / f"roundoff-compiled-{os.getuid()}"
    folder = users / re.sub(r"\W+", "-", name)
    if not again:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    variables = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder / "triton"}
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update({key: str(path) for key, path in variables.items()})
    clear_caches()
    try:
        yield folder
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        clear_caches()
