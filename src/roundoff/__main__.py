"""What runs here: ``python -m roundoff`` prints this machine, its packages and what is missing."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .environment import environment
from .errors import ArgumentError

__all__ = ["main", "report"]

_ABSENT = "not installed"
#: Packages without which no page runs.
_NEEDED = ("numpy", "torch", "onnx", "onnx_ir", "onnxscript", "pandas", "matplotlib")


def report() -> list[str]:
    """Lines about this machine, what is installed, and which of the gallery's needs are met.

    Nothing here fails where a package is absent: the line says so, with the command that adds it.

    Returns
    -------
    list of str
        At most twelve lines, each ``name: what was found``.

    Examples
    --------
    >>> [line.partition(":")[0] for line in report()][-4:]
    ['Pages on the CPU', 'ONNX Runtime on CUDA', 'Triton kernels', 'torch.compile on the CPU']
    """
    env = environment()
    torch, runtime = _load("torch"), _load("onnxruntime")
    gpu, driver = env["gpu"], _nvidia_smi()
    items = {
        "roundoff": f"{__version__}, on Python {env['python']} and {env['os']}",
        "Processor": f"{env['processor']}, {env['cores']} cores",
        "GPU": _gpu(gpu, driver, torch),
        "Driver and CUDA": _driver(driver, torch),
        "Packages": _packages(env["versions"], torch, runtime),
        "Pages on the CPU": _pages(torch, runtime),
        "ONNX Runtime on CUDA": _cuda_provider(gpu, driver, runtime),
        "Triton kernels": _triton(gpu, torch),
        "torch.compile on the CPU": _compile(torch),
    }
    # An error of a package that cannot be loaded may have several lines.
    return [" ".join(f"{name}: {text}".split()) for name, text in items.items()]


def main(arguments: Sequence[str] = ()) -> int:
    """Print the report; the exit status is 0 whatever is missing.

    Parameters
    ----------
    arguments : sequence of str
        ``--help``, ``--version`` or nothing; others end the process with status 2.

    Examples
    --------
    >>> main()
    roundoff: ...
    0
    """
    listed = isinstance(arguments, Sequence) and not isinstance(arguments, str)
    if not listed or not all(isinstance(word, str) for word in arguments):
        raise ArgumentError("arguments", got=repr(arguments), expected="a list of words")
    parser = argparse.ArgumentParser(
        "python -m roundoff", description="Print this machine, its packages and what is missing."
    )
    parser.add_argument("--version", action="version", version=f"roundoff {__version__}")
    parser.parse_args(list(arguments))
    try:
        print("\n".join(report()), flush=True)
    except BrokenPipeError:  # whoever reads had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _load(name: str) -> Any:
    """The module; None where it is absent; the error where it is there and cannot be loaded."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return None if (error.name or name).partition(".")[0] == name else error
    except Exception as error:  # a library that it links to may be missing: any kind of error
        return error


def _is_loaded(module: Any) -> bool:
    return module is not None and not isinstance(module, Exception)


def _has(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None


def _nvidia_smi() -> tuple[str, str] | None:
    """Name of the first GPU and version of its driver, as the driver's own tool tells them."""
    command = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        done = subprocess.run(  # noqa: S603 - a fixed command, no shell
            command, capture_output=True, text=True, timeout=20, check=True
        )
        name, _, version = done.stdout.strip().splitlines()[0].rpartition(", ")
        return name, version
    return None


def _gpu(gpu: dict[str, Any] | None, driver: tuple[str, str] | None, torch: Any) -> str:
    if gpu:
        return f"{gpu['name']}, {gpu['memory_gib']} GiB, compute capability {gpu['capability']}"
    if not driver:
        return "none found"
    if torch is None:
        why = "torch is not installed"
    elif isinstance(torch, Exception):
        why = "torch cannot be loaded"
    elif torch.version.cuda is None:
        why = "torch is a build for the CPU"
    else:
        why = "torch cannot use it"
    return f"{driver[0]}, but {why}; to add a build for CUDA: see https://pytorch.org/get-started"


def _driver(driver: tuple[str, str] | None, torch: Any) -> str:
    cuda = torch.version.cuda if _is_loaded(torch) else None
    return (
        f"{f'driver {driver[1]}' if driver else 'no driver found'}, "
        f"{f'CUDA {cuda} in torch' if cuda else 'no CUDA in torch'}"
    )


def _packages(versions: dict[str, str | None], torch: Any, runtime: Any) -> str:
    found = [f"torch {_version(torch, versions['torch'])}"]
    build = versions["onnxruntime-gpu"] or versions["onnxruntime"]
    text = f"onnxruntime {_version(runtime, build)}"
    if _is_loaded(runtime):
        text += " (CUDA build)" if _provides_cuda(runtime) else " (CPU build)"
    found.append(text)
    for name in ("triton", "transformers"):
        found.append(f"{name} {versions[name] if _has(name) and versions[name] else _ABSENT}")
    return ", ".join(found)


def _version(module: Any, version: str | None) -> str:
    if isinstance(module, Exception):
        return f"{version or ''} cannot be loaded ({textwrap.shorten(str(module), 80)})"
    return _ABSENT if module is None else version or module.__version__


def _provides_cuda(runtime: Any) -> bool:
    return "CUDAExecutionProvider" in runtime.get_available_providers()


def _pages(torch: Any, runtime: Any) -> str:
    missing = [name for name in _NEEDED if not _has(name)]
    if missing:
        return f"no, {', '.join(missing)} missing; to add: pip install 'roundoff[cpu]'"
    for name, module in {"torch": torch, "ONNX Runtime": runtime}.items():
        if isinstance(module, Exception):
            return f"no, {name} cannot be loaded; to repair: pip install 'roundoff[cpu]'"
    if runtime is None:
        return "no, ONNX Runtime is missing; to add it: pip install 'roundoff[cpu]'"
    if not _has("transformers"):
        return "yes, but for the Llama layer; to add it: pip install transformers"
    return "yes"


def _cuda_provider(gpu: dict[str, Any] | None, driver: tuple[str, str] | None, runtime: Any) -> str:
    add = "pip install 'roundoff[gpu]'"
    if not gpu:
        if not driver:
            return f"no, there is no NVIDIA GPU; on a machine that has one: {add}"
        return "no, torch cannot use the GPU (see above)"
    if runtime is None:
        return f"no, ONNX Runtime is missing; to add it: {add}"
    if isinstance(runtime, Exception):
        return f"no, ONNX Runtime cannot be loaded; to repair: {add}"
    if not _provides_cuda(runtime):
        # Both builds install the same module: the one that is there has to go first.
        return f"no, this is the CPU build; to add it: pip uninstall onnxruntime, then {add}"
    if not _computes_on_cuda(runtime):
        return f"no, its CUDA libraries cannot be loaded; to add them: {add}, torch for CUDA"
    return "yes"


def _computes_on_cuda(runtime: Any) -> bool:
    """Whether a session keeps the CUDA provider: it falls back to the CPU where a library lacks."""
    with contextlib.suppress(Exception):
        from onnx.parser import parse_model

        model = parse_model(
            '<ir_version: 10, opset_import: ["": 18]> one (float[1] X) => (float[1] Y) '
            "{ Y = Neg(X) }"
        )
        session = runtime.InferenceSession(
            model.SerializeToString(), providers=["CUDAExecutionProvider"]
        )
        return "CUDAExecutionProvider" in session.get_providers()
    return False


def _triton(gpu: dict[str, Any] | None, torch: Any) -> str:
    if not _has("triton"):
        if sys.platform != "linux":
            return "not at all, Triton has builds for Linux alone"
        return "not at all, Triton is missing; to add it: pip install triton"
    if not _is_loaded(torch):
        return "not at all, they need torch; to add it: pip install 'roundoff[cpu]'"
    wish = os.environ.get("TRITON_INTERPRET", "").lower()
    if wish in {"1", "true", "yes", "on", "y"}:
        instead = "; to use the GPU: unset it" if gpu else ""
        return f"in the interpreter, since TRITON_INTERPRET is set{instead}"
    if not gpu and wish:
        return f"not at all, there is no GPU; for the interpreter: TRITON_INTERPRET=1, not {wish}"
    if not gpu:
        return "in the interpreter (TRITON_INTERPRET=1), since torch has no GPU"
    missing = _missing_for("CC", "gcc", "clang")
    if missing:
        return f"in the interpreter alone (TRITON_INTERPRET=1), {missing}"
    return "on the GPU"


def _compile(torch: Any) -> str:
    if not _is_loaded(torch):
        what = "is missing" if torch is None else "cannot be loaded"
        return f"no, torch {what}; to add it: pip install 'roundoff[cpu]'"
    default = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    missing = _missing_for("CXX", default)
    return f"no, {missing}" if missing else f"yes, with {os.environ.get('CXX') or default}"


def _missing_for(variable: str, *names: str) -> str:
    """What is missing to compile a module for this Python, and what adds it; empty: nothing.

    The compiler is the one that the environment *variable* names, else the first of *names*.
    """
    chosen = shlex.split(os.environ.get(variable, ""))[:1]
    if not any(shutil.which(name) for name in chosen or names):
        if chosen:
            return f"there is no compiler {chosen[0]}; to use {names[0]}: unset {variable}"
        add = {"linux": f"apt install {names[0]}", "darwin": "xcode-select --install"}
        return (
            f"there is no compiler {names[0]}; "
            f"to add it: {add.get(sys.platform, 'install the build tools of Visual Studio')}"
        )
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers are missing; to add them: apt install python3-dev"
    return ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
