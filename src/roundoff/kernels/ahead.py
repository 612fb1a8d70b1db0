"""What a kernel takes of a multiprocessor, compiled without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..errors import ShapeError, WorkerError
from ._norm_tilings import CHUNKS, backward_tiling, forward_tiling
from ._row_norm import LAYER, _first_stage, _forward_launch
from .ladder import REAL, fits, step_of

__all__ = ["compiled_ahead"]

_CHILD = "from roundoff.kernels.ahead import _compile_cases; _compile_cases()"
#: What a multiprocessor of Hopper has: registers, warps, bytes of shared memory.
_REGISTERS, _MOST_WARPS, _SHARED = 65536, 64, 233472
_TYPES = {"MEAN": "fp32", "RSTD": "fp32", "PART": "fp32", "SUMS": "fp32", "STATS": "fp32",
          "SHARES": "i64"}  # fmt: skip


def compiled_ahead(
    cases: Iterable[tuple[str, str, int]], dtype: torch.dtype = torch.float16
) -> list[dict[str, Any]]:
    """What steps take of a multiprocessor, compiled for Hopper (sm_90) without a GPU.

    Processes of their own compile them, since the kernels of this one may be interpreted.

    Parameters
    ----------
    cases : iterable of tuple
        (direction, name, columns), as for :func:`fits`; the name may also be ``"unpacked"``: the
        library's backward without the instruction that keeps a row packed.
    dtype : torch.dtype
        Type of the rows, float16 or float32.

    Returns
    -------
    list of dict
        direction, step, N, warps (of a program), registers (of a thread), spilled (32-bit words of
        a thread that are kept in memory), shared (KiB of a program), fit (programs that a
        multiprocessor holds) of each case, in their order. Of a step that launches several kernels
        for the rows, the last, which writes the result.

    Raises
    ------
    ArgumentError
        There is no such step.
    ShapeError
        A row does not fit its step.
    WorkerError
        The compiler failed; its last words are in the message.

    Examples
    --------
    >>> from roundoff.kernels.ahead import compiled_ahead
    >>> [row] = compiled_ahead([("forward", "one block", 1024)])
    >>> row["warps"], row["spilled"]
    (4, 0)
    """
    cases = list(cases)
    for direction, name, columns in cases:
        if name != "unpacked" and not fits(direction, name, columns, dtype):
            raise ShapeError(f"a row does not fit the step {name}", got=columns)
    count = max(1, min(len(os.sched_getaffinity(0)), len(cases) // 6))
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(  # noqa: S603 - this module, no shell
            [sys.executable, "-c", _CHILD, json.dumps(cases[i::count]), str(dtype.itemsize)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(count)
    ]  # fmt: skip
    outputs = [child.communicate() for child in children]  # waits for each
    for child, (_, errors) in zip(children, outputs, strict=True):
        if child.returncode:
            raise WorkerError("compiling a step of the ladder", got=errors[-2000:])
    rows = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    return [rows[i % count][i // count] for i in range(len(cases))]


def _compile_cases() -> None:
    """In a process of its own: compile what its argument says, print the rows."""
    cases, itemsize = json.loads(sys.argv[1]), int(sys.argv[2])
    print(json.dumps([_resources(way, name, n, itemsize) for way, name, n in cases]))


def _resources(direction: str, name: str, columns: int, itemsize: int) -> dict[str, Any]:
    function, warps, constants, options = _to_compile(direction, name, columns, itemsize)
    signature, attributes = {}, {}
    for place, parameter in enumerate(function.params):
        known = parameter.name
        if known in ("RES", "SUM", "DH"):
            constants[known] = None
        pointer = known.isupper() and known not in ("M", "N", "G")
        kind = "*" + _TYPES.get(known, f"fp{8 * itemsize}") if pointer else "i32"
        signature[known] = "constexpr" if known in constants else kind
        if signature[known][0] == "*" or known in ("N", "stride_x", "stride_dy"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(function, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, **options},
    )  # fmt: skip
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
    return {"direction": direction, "step": name, "N": columns, "warps": warps,
            "registers": registers, "spilled": spilled, "shared": shared / 1024,
            "fit": fit}  # fmt: skip


def _to_compile(
    direction: str, name: str, n: int, itemsize: int
) -> tuple[Any, int, dict[str, Any], Any]:
    """Kernel, warps, constants by name, and options of a step."""
    kind = torch.float16 if itemsize == 2 else torch.float32
    if name not in (*REAL, "unpacked"):
        step = step_of(direction, name, n, itemsize, None)
        constants = dict(step.constants)
        if direction == "forward":
            constants["EPS"] = 1e-5
        return step.function, step.warps, constants, {}
    if direction == "forward":
        tiling = forward_tiling(n, itemsize)
        rest = (1e-5, True, False, False, -1)
        launch = _forward_launch(LAYER, tiling, n, n, *(kind,) * 3, *rest)[-1]
    else:
        tiling = CHUNKS if name == "read twice" else backward_tiling(n, itemsize)
        launch = _first_stage(LAYER, tiling, n, n, n, *(kind,) * 3, True, False, False, -1)[-1]
    names = [p.name for p in launch.function.params if p.is_constexpr]
    constants = dict(zip(names, launch.constants, strict=True))
    if name == "unpacked":
        constants["OPAQUE"] = False
    options = {key: value for key, value in launch.options.items() if value is not None}
    return launch.function, options.pop("num_warps"), constants, options
