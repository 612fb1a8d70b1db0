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
    aligned: bool,
    device: torch.device,
    args: tuple[Any, ...],
    **options: Any,
) -> None:
    """Launch a kernel, with Triton's analysis of each argument on the first call alone.

    Parameters
    ----------
    function : kernel
        Made by :func:`kernel`.
    grid : (int, int)
        Programs along each axis.
    key : hashable
        What the compiled code depends on besides the kernel and the device: element types, sizes
        and strides, and whatever chooses the constants. Equal keys share one compiled kernel.
    aligned : bool
        Whether every pointer is a multiple of 16 bytes; where not, Triton looks at each again.
    device : torch.device
        Where the tensors are.
    args : tuple
        Every argument of the kernel in order, its constants too.
    **options
        ``num_warps`` and the like.
    """
    if device.type != "cuda":
        function[grid](*args, **options)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(function, grid, key, aligned, device, args, **options)
        return
    key = (function, device.index, key)
    compiled = _COMPILED.get(key) if aligned else None
    if compiled is not None:
        compiled[(*grid, 1)](*args)
        return
    compiled = function[grid](*args, **options)
    if aligned and compiled is not None:  # the interpreter returns nothing
        _COMPILED[key] = compiled


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
