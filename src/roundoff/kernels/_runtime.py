"""Where a kernel runs: compiled on a GPU, or in Triton's interpreter where there is none.

The choice is made once, when a kernel's module is imported: ``TRITON_INTERPRET`` decides where it
is set; else kernels are compiled if CUDA is there and interpreted if it is not. It does not matter
whether another package imported Triton before.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

try:
    import triton
    from triton.runtime.interpreter import InterpretedFunction, interpreter_builder
except ImportError as error:  # pragma: no cover - the platform has no Triton
    from ..errors import MissingDependencyError

    raise MissingDependencyError(
        "the kernels are written in Triton, which is not installed",
        got=str(error),
        hint="pip install triton (Linux on x86-64)",
    ) from error

from ..errors import ArgumentError, UnsupportedError

__all__ = [
    "check_device",
    "compiled_kernels",
    "interpreting",
    "kernel",
    "launch",
    "multiprocessors",
    "shuffled_programs",
]


def _choose() -> bool:
    wish = os.environ.get("TRITON_INTERPRET", "").lower()
    return wish in {"1", "true", "yes", "on", "y"} if wish else not torch.cuda.is_available()


_INTERPRETING = _choose()


def interpreting() -> bool:
    """Whether the kernels of this process run in Triton's interpreter.

    Returns
    -------
    bool
        ``TRITON_INTERPRET`` where it is set, else whether CUDA is missing.

    Examples
    --------
    >>> isinstance(interpreting(), bool)
    True
    """
    return _INTERPRETING


_COUNTS = {"M", "G", "tiles", "zero"}


def _names(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def kernel(function: Callable[..., Any]) -> Any:
    """Make a Triton kernel of a function: interpreted or compiled, as :func:`interpreting` says.

    ``triton.jit`` reads the environment instead, and then only works where nothing imported Triton
    before the variable was set. Kernels made here keep to ``triton.language``'s own builtins: the
    helpers of its standard library (``tl.sum``, ``tl.zeros``, …) were decorated with it.
    """
    if interpreting():
        return InterpretedFunction(function)
    # One compiled kernel for every number of rows and programs.
    return triton.JITFunction(function, do_not_specialize=sorted(_COUNTS & set(_names(function))))


_COMPILED: dict[Any, Any] = {}


def launch(
    function: Any,
    grid: tuple[int, int],
    key: Any,
    tensors: tuple[torch.Tensor, ...],
    rest: tuple[Any, ...],
    **options: Any,
) -> None:
    """Launch a kernel, with Triton's analysis of each argument on the first call alone.

    At 1024 columns a kernel takes a few microseconds, and that analysis several times as long.

    Parameters
    ----------
    function : kernel
        Made by :func:`kernel`.
    grid : (int, int)
        Programs along each axis.
    key : hashable
        What the compiled code depends on besides the kernel and the device: element types, sizes
        and strides, and whatever chooses the constants. Equal keys share one compiled kernel.
    tensors : tuple
        The first arguments; all on one device. Where one is not aligned to 16 bytes, Triton looks
        at each argument again.
    rest : tuple
        The other arguments in order, constants too.
    **options
        ``num_warps`` and the like.
    """
    if not tensors[0].is_cuda:
        function[grid](*tensors, *rest, **options)
        return
    index = tensors[0].device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            launch(function, grid, key, tensors, rest, **options)
        return
    key = (function, index, key)
    compiled = _COMPILED.get(key)
    pointers = [t.data_ptr() for t in tensors]
    bits = 0
    for pointer in pointers:
        bits |= pointer
    if compiled is None or bits & 15:
        compiled = function[grid](*tensors, *rest, **options)
        if not bits & 15 and compiled is not None:  # the interpreter returns nothing
            _COMPILED[key] = compiled
        return
    stream = torch._C._cuda_getCurrentRawStream(index)
    # As Triton's own CompiledKernel[grid](…) calls it, without the hooks of a profiler.
    compiled.run(
        *grid, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
        *pointers, *rest,
    )  # fmt: skip


def compiled_kernels() -> list[tuple[Any, Any]]:
    """What :func:`launch` has compiled in this process: (key, Triton's compiled kernel)."""
    return [(key[2], compiled) for key, compiled in _COMPILED.items()]


@cache
def multiprocessors(index: int) -> int:
    """Multiprocessors of a CUDA device; in the interpreter 4, so that small inputs use several."""
    if index < 0:
        return 4
    return torch.cuda.get_device_properties(index).multi_processor_count


def check_device(tensor: torch.Tensor, name: str) -> None:
    """Refuse a tensor that the kernels of this process cannot reach.

    Raises
    ------
    UnsupportedError
        The tensor is not on a CUDA device and the kernels are compiled.
    """
    if not tensor.is_cuda and not interpreting():
        raise UnsupportedError(
            f"{name} is not on a CUDA device, and the kernels of this process are compiled for one",
            got=str(tensor.device),
            expected="cuda",
            hint="move it with .cuda(), or set TRITON_INTERPRET=1 before the first import",
        )


@contextlib.contextmanager
def shuffled_programs(seed: int) -> Iterator[None]:
    """Let the interpreter run the programs of each launch in a shuffled order.

    A GPU gives no promise about the order in which programs run; the interpreter runs them one
    after another. Under this manager it does so in an order drawn from `seed`, so that a result
    that depends on the order shows without a GPU.

    Parameters
    ----------
    seed : int
        Seed of the permutation.

    Raises
    ------
    ArgumentError
        The kernels of this process are compiled: the GPU chooses the order.
    """
    if not interpreting():
        raise ArgumentError(
            "programs can be shuffled only in Triton's interpreter",
            expected="TRITON_INTERPRET=1 before the first import",
        )
    original = interpreter_builder.set_grid_idx

    def shuffled(x: int, y: int, z: int) -> None:
        order = torch.randperm(
            interpreter_builder.grid_dim[0], generator=torch.Generator().manual_seed(seed)
        )
        original(int(order[x]), y, z)

    interpreter_builder.set_grid_idx = shuffled
    try:
        yield
    finally:
        interpreter_builder.set_grid_idx = original
