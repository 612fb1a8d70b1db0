"""What runs here: ``python -m roundoff`` prints this machine, its packages and what is missing."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .environment import command_output, environment
from .errors import ArgumentError

__all__ = ["main", "report"]

_ABSENT = "not installed"
_NEEDED = (
    "numpy",
    "torch",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "pandas",
    "matplotlib",
    "transformers",
)
_ADD_GPU = "pip install 'roundoff[gpu]'"


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
    gpu, torch, runtime = env["gpu"], _load("torch"), _load("onnxruntime")
    items = {
        "roundoff": f"{__version__}, on Python {env['python']} and {env['os']}",
        "Processor": f"{env['processor']}, {env['cores']} cores",
        "GPU": _gpu(gpu),
        "Packages": _packages(env["versions"], torch, runtime),
        "Pages on the CPU": _pages(torch, runtime),
        "ONNX Runtime on CUDA": _cuda_provider(gpu, runtime),
        "Triton kernels": _triton(gpu),
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


def _gpu(gpu: dict[str, Any] | None) -> str:
    if gpu:
        return (
            f"{gpu['name']}, {gpu['memory_gib']} GiB, compute capability {gpu['capability']}, "
            f"driver {gpu['driver'] or 'unknown'}, CUDA {gpu['cuda']}"
        )
    # The driver's own tool sees one that torch does not.
    name = command_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if name is None:
        return "none found"
    return (
        f"{name.splitlines()[0]}, but torch cannot use it; to add a build for CUDA: see "
        "https://pytorch.org/get-started"
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
    return "yes"


def _cuda_provider(gpu: dict[str, Any] | None, runtime: Any) -> str:
    if not gpu:
        return "no, torch has no GPU (see above)"
    if not _is_loaded(runtime):
        return f"no, ONNX Runtime is missing or cannot be loaded; to add it: {_ADD_GPU}"
    if not _provides_cuda(runtime):
        # Both builds install the same module: the one that is there has to go first.
        return f"no, this is the CPU build; to add it: pip uninstall onnxruntime, then {_ADD_GPU}"
    if not _computes_on_cuda(runtime):
        return f"no, its CUDA libraries cannot be loaded; to add them: {_ADD_GPU}, torch for CUDA"
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


def _triton(gpu: dict[str, Any] | None) -> str:
    if not _has("triton"):
        return "not at all, Triton is missing; to add it, on Linux: pip install triton"
    if os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "yes", "on", "y"}:
        return "in the interpreter, since TRITON_INTERPRET is set"
    if not gpu:
        return "in the interpreter (TRITON_INTERPRET=1), since torch has no GPU"
    missing = _missing_for("CC", "gcc", "clang")
    return f"in the interpreter alone (TRITON_INTERPRET=1), {missing}" if missing else "on the GPU"


def _compile(torch: Any) -> str:
    if not _is_loaded(torch):
        return "no, torch is missing or cannot be loaded; to add it: pip install 'roundoff[cpu]'"
    missing = _missing_for("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return f"no, {missing}" if missing else "yes"


def _missing_for(variable: str, *names: str) -> str:
    """What is missing to compile a module for this Python, and what adds it; empty: nothing.

    The compiler is the one that the environment *variable* names, else the first of *names*.
    """
    chosen = shlex.split(os.environ.get(variable, ""))[:1]
    if not any(shutil.which(name) for name in chosen or names):
        if chosen:
            return f"there is no compiler {chosen[0]}; to use {names[0]}: unset {variable}"
        return f"there is no compiler {names[0]}; to add it: apt install {names[0]}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers are missing; to add them: apt install python3-dev"
    return ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
