"""What runs here: ``python -m roundoff`` prints this machine, its packages and what is missing."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import sysconfig
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .environment import command_output, environment

__all__ = ["main", "report"]

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
_SHOWN = ("torch", "onnxruntime", "onnxruntime-gpu", "triton", "transformers")


def report() -> list[str]:
    """Lines about this machine, what is installed, and which of the gallery's needs are met.

    Nothing here fails where a package is absent or broken: the line says so.

    Returns
    -------
    list of str
        Each ``name: what was found``.

    Examples
    --------
    >>> [line.partition(":")[0] for line in report()][-4:]
    ['Pages on the CPU', 'ONNX Runtime on CUDA', 'Triton kernels', 'torch.compile on the CPU']
    """
    env = environment()
    versions = {name: env["versions"][name] for name in _SHOWN}
    items = {
        "roundoff": f"{__version__}, on Python {env['python']} and {env['os']}",
        "Processor": f"{env['processor']}, {env['cores']} cores",
        "GPU": _gpu(env["gpu"]),
        "Packages": ", ".join(f"{name} {v}" for name, v in versions.items() if v),
        "Pages on the CPU": _pages(),
        "ONNX Runtime on CUDA": _cuda_provider(),
        "Triton kernels": _triton(),
        "torch.compile on the CPU": _compile(),
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
    parser = argparse.ArgumentParser(
        "python -m roundoff", description="Print this machine, its packages and what is missing."
    )
    parser.add_argument("--version", action="version", version=f"roundoff {__version__}")
    parser.parse_args(list(arguments))
    print("\n".join(report()))
    return 0


def _broken(name: str) -> str:
    """Why a module cannot be imported; empty where it can."""
    try:
        importlib.import_module(name)
    except Exception as error:  # a library that it links to may be missing: any kind of error
        return f"{name} ({textwrap.shorten(str(error), 80)})"
    return ""


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


def _pages() -> str:
    broken = [text for text in map(_broken, _NEEDED) if text]
    return f"no: {', '.join(broken)}; try: pip install 'roundoff[cpu]'" if broken else "yes"


def _cuda_provider() -> str:
    try:
        from .models import layer_norm_matmul
        from .ort import session

        session(layer_norm_matmul(), ["CUDAExecutionProvider"])
    except Exception as error:  # a package or a library may be missing: any kind of error
        return f"no: {error}"
    return "yes"


def _triton() -> str:
    if broken := _broken("roundoff.kernels"):
        return f"no: {broken}"
    from .kernels import interpreting

    if interpreting():
        return "in the interpreter, without a GPU or with TRITON_INTERPRET=1"
    missing = _missing_for("CC", "gcc", "clang")
    return f"no: {missing}" if missing else "on the GPU"


def _compile() -> str:
    missing = _broken("torch") or _missing_for("CXX", "g++", "clang++")
    return f"no: {missing}" if missing else "yes"


def _missing_for(variable: str, *names: str) -> str:
    """What is missing to compile a module for this Python; empty where nothing is.

    The compiler is the one that the environment *variable* names, else the first of *names*.
    """
    chosen = os.environ.get(variable, "").split()[:1] or names
    if not any(map(shutil.which, chosen)):
        return f"there is no compiler {chosen[0]}; try: apt install {names[0]}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "there are no headers of Python; try: apt install python3-dev"
    return ""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
