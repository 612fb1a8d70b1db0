"""What a kernel takes of a multiprocessor, compiled without one."""

from __future__ import annotations

import inspect
import io
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from ..errors import ArgumentError, WorkerError
from ._runtime import kernel

__all__ = ["Compile", "compiled_ahead"]

_CHILD = "from roundoff.kernels.ahead import _compile_cases; _compile_cases()"
_FLOAT32 = ("MEAN", "RSTD", "PART", "SUMS")


class Compile(NamedTuple):
    """A kernel to compile.

    Attributes
    ----------
    kernel
        The kernel; what it calls is found by itself. Arguments in capitals are tensors, but for M,
        N and G.
    warps : int
        Warps of a program.
    constants : mapping
        Its ``tl.constexpr`` arguments, by name.
    """

    kernel: Any
    warps: int
    constants: Mapping[str, Any]


def compiled_ahead(cases: Iterable[Compile]) -> list[dict[str, Any]]:
    """What kernels take of a multiprocessor, compiled for Hopper (sm_90) without a GPU.

    A process of its own compiles them, since the kernels of this one may be interpreted.

    Parameters
    ----------
    cases : iterable of Compile
        Kernels. Arguments named MEAN, RSTD, PART and SUMS are float32, other tensors float16.

    Returns
    -------
    list of dict
        registers (of a thread) and spilled (32-bit words of a thread that are kept in memory) of
        each case, in their order.

    Raises
    ------
    ArgumentError
        The source of a kernel is not to be found.
    WorkerError
        The compiler failed; its last words are in the message.

    Examples
    --------
    >>> from roundoff.kernels.ahead import Compile, compiled_ahead
    >>> from roundoff.kernels.baselines import _stream
    >>> [row] = compiled_ahead([Compile(_stream, 4, {"READS": 1, "BLOCK": 1024})])
    >>> 8 <= row["registers"] <= 255, row["spilled"]
    (True, 0)
    """
    pickled = io.BytesIO()
    _Pickler(pickled).dump(list(cases))
    path = os.pathsep.join(
        filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
    )
    child = subprocess.run(  # noqa: S603 - this module, no shell
        [sys.executable, "-c", _CHILD],
        input=pickled.getvalue(),
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    if child.returncode:
        raise WorkerError("compiling a kernel", got=child.stderr.decode()[-2000:])
    rows: list[dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    return rows


class _Pickler(cloudpickle.Pickler):
    """Sends a kernel as its function, with the lines of the file that Triton will read it from."""

    def reducer_override(self, sent: Any) -> Any:
        if isinstance(sent, (triton.JITFunction, InterpretedFunction)):
            try:
                lines, start = inspect.getsourcelines(sent.fn)
            except OSError as error:
                raise ArgumentError(
                    "a kernel without source",
                    got=sent.fn.__qualname__,
                    expected="a function of a file or of a notebook's cell",
                ) from error
            annotations = {n: v for n, v in sent.fn.__globals__.items() if v is tl.constexpr}
            return _kernel_of, (sent.fn, annotations, "\n" * (start - 1) + "".join(lines))
        return super().reducer_override(sent)


def _kernel_of(function: Any, annotations: dict[str, Any], source: str) -> Any:
    """The kernel of a function that came without its file and the names in its annotations.

    Triton reads the source when it makes the kernel, from a file of this process: that of the
    caller may be gone, or have other lines by now.
    """
    function.__globals__.update(annotations)
    with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8") as file:
        file.write(source)
        file.flush()
        function.__code__ = function.__code__.replace(co_filename=file.name)
        return kernel(function)


def _compile_cases() -> None:
    """In a process of its own: compile what the standard input says, print the rows."""
    cases = pickle.load(sys.stdin.buffer)  # noqa: S301 - the caller's own
    print(json.dumps([_resources(*case) for case in cases]))


def _resources(function: Any, warps: int, constants: Mapping[str, Any]) -> dict[str, Any]:
    signature, attributes = {}, {}
    for place, parameter in enumerate(function.params):
        known = parameter.name
        pointer = known.isupper() and known not in ("M", "N", "G")
        element = "fp32" if known in _FLOAT32 else "fp16"
        kind = f"*{element}" if pointer else "i32"
        signature[known] = "constexpr" if known in constants else kind
        if signature[known][0] == "*" or known in ("N", "stride_x", "stride_dy"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(function, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps},
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    [(registers, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    return {"registers": int(registers), "spilled": int(stack) // 4}
