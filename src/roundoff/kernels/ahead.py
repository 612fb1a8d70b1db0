"""What a kernel takes of a multiprocessor, compiled without one."""

from __future__ import annotations

import ast
import dis
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..errors import WorkerError

__all__ = ["Compile", "compiled_ahead"]

_CHILD = "from roundoff.kernels.ahead import _compile_cases; _compile_cases()"
#: What a multiprocessor of Hopper has: registers, warps, bytes of shared memory.
_REGISTERS, _MOST_WARPS, _SHARED = 65536, 64, 233472
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
        warps (of a program), registers (of a thread), spilled (32-bit words of a thread that are
        kept in memory), shared (KiB of a program), fit (programs that a multiprocessor holds) of
        each case, in their order.

    Raises
    ------
    WorkerError
        The compiler failed; its last words are in the message.

    Examples
    --------
    >>> from roundoff.kernels.ahead import Compile, compiled_ahead
    >>> from roundoff.kernels.baselines import _stream
    >>> [row] = compiled_ahead([Compile(_stream, 4, {"READS": 1, "BLOCK": 1024})])
    >>> row["warps"], row["spilled"]
    (4, 0)
    """
    made = [
        (_source(kernel), kernel.fn.__name__, warps, dict(constants))
        for kernel, warps, constants in cases
    ]
    path = os.pathsep.join(
        filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
    )
    child = subprocess.run(  # noqa: S603 - this module, no shell
        [sys.executable, "-c", _CHILD],
        input=json.dumps(made),
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if child.returncode:
        raise WorkerError("compiling a kernel", got=child.stderr[-2000:])
    rows: list[dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    return rows


def _source(kernel: Any) -> str:
    """The text of a module that defines a kernel, and what it uses: imports, and other kernels."""
    lines: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if name in lines:
            return
        function = getattr(value, "fn", None)
        home = getattr(function or value, "__module__", None) or ""
        if isinstance(value, ModuleType):
            lines[name] = f"import {value.__name__} as {name}\n"
        elif value is tl.constexpr:
            lines[name] = f"from triton.language import constexpr as {name}\n"
        elif home.startswith("roundoff."):
            lines[name] = f"from {home} import {(function or value).__name__} as {name}\n"
        elif function is not None:
            own(function)
        else:
            lines[name] = f"{name} = {value!r}\n"

    def own(function: Any) -> None:
        text = inspect.getsource(function)
        lines[function.__name__] = ""
        (tree,) = ast.parse(text).body
        assert isinstance(tree, ast.FunctionDef)
        heads = [*tree.decorator_list, *(a.annotation for a in tree.args.args if a.annotation)]
        used = [node.id for head in heads for node in ast.walk(head) if isinstance(node, ast.Name)]
        used += [x.argval for x in dis.get_instructions(function) if x.opname == "LOAD_GLOBAL"]
        for name in used:
            if name in function.__globals__:  # else Python's own
                add(name, function.__globals__[name])
        del lines[function.__name__]
        lines[function.__name__] = text

    own(kernel.fn)
    return "\n".join(lines.values())


def _compile_cases() -> None:
    """In a process of its own: compile what the standard input says, print the rows."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (source, name, warps, constants) in enumerate(json.load(sys.stdin)):
            module = Path(folder) / f"kernel_{number}.py"  # Triton reads a kernel's source
            module.write_text(source, encoding="utf-8")
            names: dict[str, Any] = {"__name__": module.stem}
            exec(compile(source, str(module), "exec"), names)  # noqa: S102 - the caller's own
            rows.append(_resources(names[name], warps, constants))
    print(json.dumps(rows))


def _resources(function: Any, warps: int, constants: dict[str, Any]) -> dict[str, Any]:
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
    registers, spilled = int(registers), int(stack) // 4
    allocated = -(-registers // 8) * 8 * warps * 32
    shared = compiled.metadata.shared
    fit = min(_REGISTERS // allocated, _MOST_WARPS // warps, _SHARED // (shared + 1024))
    return {
        "warps": warps,
        "registers": registers,
        "spilled": spilled,
        "shared": shared / 1024,
        "fit": fit,
    }
