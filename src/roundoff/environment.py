"""What a number was measured on: machine, driver, versions, precision switches, commit.

Every entry is plain data (strings, numbers, lists, dicts), so that a record can hold it. Nothing
here fails where torch, ONNX Runtime or git is absent: the entry says ``None``.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["environment", "machine_name", "short_commit", "short_name", "summary"]

#: Packages whose version decides what bits come out.
COMPUTING = (
    "numpy",
    "torch",
    "onnx",
    "onnxscript",
    "onnx-ir",
    "triton",
    "transformers",
    "pandas",
)


def environment(commit: str | None = None) -> dict[str, Any]:
    """Describe this machine and what computes on it.

    Parameters
    ----------
    commit : str, optional
        Commit of the code that runs, where git cannot tell (a copy without its history).

    Returns
    -------
    dict
        ``processor``, ``cores``, ``os``, ``python``, ``versions`` (package -> version or None),
        ``blas``, ``threads``, ``gpu`` (None, or name, count, memory, capability, multiprocessors,
        driver, cuda, cudnn), ``precision`` (torch's switches; None for one that torch does not
        tell), ``commit``.

    Examples
    --------
    >>> from roundoff.environment import environment
    >>> env = environment(commit="4f2a1c")
    >>> env["commit"], "torch" in env["versions"], env["cores"] > 0
    ('4f2a1c', True, True)
    """
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "os": _os(),
        "python": platform.python_version(),
        "versions": _versions(),
        "blas": _blas(),
        **_torch(),
        "commit": commit or _commit(),
    }


def machine_name(env: dict[str, Any]) -> str:
    """A short name for a file: the GPU where there is one, with their number, else the processor.

    Examples
    --------
    >>> from roundoff.environment import machine_name
    >>> machine_name({"gpu": {"name": "NVIDIA H200"}})
    'nvidia-h200'
    >>> machine_name({"gpu": {"name": "NVIDIA H200", "count": 4}})
    '4-nvidia-h200'
    >>> machine_name({"gpu": None, "processor": "AMD EPYC 9654 96-Core Processor", "cores": 2})
    'amd-epyc-9654-2-cores'
    """
    if env.get("gpu"):
        return _slug(_gpus(env["gpu"]["name"], env["gpu"]))
    return _slug(f"{_short(env['processor'], _PROCESSOR_NOISE)} {env['cores']} cores")


def short_name(env: dict[str, Any], part: str | None = None) -> str:
    """A short name for a reader: the GPU's model where there is one, else the processor's.

    Parameters
    ----------
    env : dict
        As :func:`environment` gives it.
    part : str, optional
        What computed: ``"cpu"``, the host's processor, or ``"gpu"``; None where both did or it is
        unknown.

    Examples
    --------
    >>> from roundoff.environment import short_name
    >>> short_name({"gpu": {"name": "NVIDIA H100 80GB HBM3"}})
    'H100'
    >>> short_name({"gpu": {"name": "NVIDIA H200"}}, part="cpu")
    "H200's host"
    >>> short_name({"gpu": None, "processor": "Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz"})
    'Intel Xeon Platinum 8480C'
    """
    gpu = env.get("gpu")
    if gpu:
        return _gpus(_short(gpu["name"], _GPU_NOISE), gpu) + ("'s host" if part == "cpu" else "")
    return _short(env["processor"], _PROCESSOR_NOISE)


def summary(env: dict[str, Any], part: str | None = None) -> str:
    """One line for a reader: machine, then the versions that matter.

    Parameters
    ----------
    env : dict
        As :func:`environment` gives it.
    part : str, optional
        What computed: ``"cpu"``, the host's processor, or ``"gpu"``; None where both did or it is
        unknown. A GPU's host is named by its processor, and by the GPU it belongs to.

    Examples
    --------
    >>> from roundoff.environment import summary
    >>> env = {"gpu": {"name": "NVIDIA H200"}, "python": "3.12.3", "processor": "Intel Xeon",
    ...        "cores": 16, "versions": {"torch": "2.11.0", "triton": None}}
    >>> summary(env)
    'NVIDIA H200; Python 3.12.3, torch 2.11.0'
    >>> summary(env, part="cpu")
    'Intel Xeon, 16 cores (host of the NVIDIA H200); Python 3.12.3, torch 2.11.0'
    """
    gpu = env.get("gpu")
    if gpu and part != "cpu":
        where = _gpus(gpu["name"], gpu)
    else:
        where = f"{env['processor']}, {env['cores']} cores"
        where += f" (host of the {gpu['name']})" if gpu else ""
    versions = [f"Python {env['python']}"]
    versions += [
        f"{name} {version}"
        for name, version in env["versions"].items()
        if version and name in {"torch", "onnxruntime", "onnxruntime-gpu", "triton", "numpy"}
    ]
    return f"{where}; {', '.join(versions)}"


#: What a short name leaves out of a GPU's: maker, memory, socket.
_GPU_NOISE = r"\b(NVIDIA|GeForce|Tesla|AMD|PCIe|NVL|GPU)\b|\bSXM\d*\b|\bHBM\w*|\b\d+ ?(GB|MB)\b"
#: And out of a processor's: marks, numbers of cores, built-in graphics, clock.
_PROCESSOR_NOISE = r"\((R|TM)\)|@.*|\b(with|w/) .*Graphics\b|\b[\w-]+-Cores?\b|\b(Processor|CPU)\b"


def _short(name: str, noise: str) -> str:
    rest = re.sub(noise, " ", name, flags=re.IGNORECASE)
    return " ".join(rest.split()).strip(" -,") or name


def _gpus(name: str, gpu: dict[str, Any]) -> str:
    """The name, with the number of GPUs where there are several."""
    return f"{gpu['count']} × {name}" if gpu.get("count", 1) > 1 else name


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text("utf-8") if cpuinfo.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _os() -> str:
    # The distribution rather than the kernel's release: the latter names a host, not a platform.
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return f"{platform.system()} {platform.release()}"


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in (*COMPUTING, "onnxruntime", "onnxruntime-gpu"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    # A runtime unpacked onto the path has a module that shadows the one that is installed.
    with contextlib.suppress(ImportError, OSError):
        import onnxruntime

        gpu = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
        versions["onnxruntime-gpu" if gpu else "onnxruntime"] = onnxruntime.__version__
        versions["onnxruntime" if gpu else "onnxruntime-gpu"] = None
    return versions


def _blas() -> str | None:
    with contextlib.suppress(ImportError, KeyError):
        import numpy as np

        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return f"{blas['name']} {blas['version']}"
    return None


def _torch() -> dict[str, Any]:
    try:
        import torch
    except (ImportError, OSError):  # OSError: a library that torch links to is missing
        return {"threads": None, "gpu": None, "precision": None}
    from .precision import switches

    denormal = torch.tensor(2.0**-140, dtype=torch.float32).mul(1.0)
    matmul = torch.backends.cuda.matmul
    gpu = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        query = ("--query-gpu=driver_version", "--format=csv,noheader")
        gpu = {
            "name": properties.name,
            "count": torch.cuda.device_count(),
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "driver": command_output("nvidia-smi", "-i", "0", *query),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return {
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "precision": {
            **switches(),
            "allow_fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
            "allow_bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "flush_denormal": bool(denormal == 0.0),
        },
    }


def _commit() -> str | None:
    """Commit of the checkout this package runs from, with ``+`` where files were changed since."""
    here = str(Path(__file__).parent)
    # An installed copy may lie inside somebody else's repository: its commit is not ours.
    if not command_output("git", "-C", here, "ls-files", "--error-unmatch", __file__):
        return None
    commit = command_output("git", "-C", here, "rev-parse", "HEAD")
    # A page that is not committed yet is no part of that commit either. A record is no code: the
    # first run's is there, not committed, when the second one runs.
    code = ("src", "gallery", "studies", ":(exclude)src/roundoff/recorded")
    top = command_output("git", "-C", here, "rev-parse", "--show-toplevel") or here
    changed = command_output("git", "-C", top, "status", "--porcelain", "--", *code)
    return f"{commit}+" if commit and changed else commit


def short_commit(commit: str | None) -> str:
    """Ten digits of a commit, and the mark of changed files where there is one.

    Examples
    --------
    >>> short_commit("0123456789abcdef+"), short_commit("0123456789abcdef"), short_commit(None)
    ('0123456789+', '0123456789', 'unknown')
    """
    return "unknown" if commit is None else commit[:10] + "+" * commit.endswith("+")


def command_output(*command: str) -> str | None:
    """What a command prints; None where it is absent, fails or prints nothing."""
    try:
        done = subprocess.run(  # noqa: S603 - fixed commands, no shell
            command, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
