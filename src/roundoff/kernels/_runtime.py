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
    "Launch",
    "check_device",
    "interpreting",
    "kernel",
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


class Launch:
    """A kernel and its constants; a call adds the grid, the tensors and the counts.

    At 1024 columns a kernel takes a few microseconds, and Triton's analysis of its arguments
    several times as long. Here that happens on the first call alone, so one object must serve
    only arguments that compile alike: the same types, and the same counts but for those that
    :func:`kernel` does not specialise for.

    Parameters
    ----------
    function : kernel
        Made by :func:`kernel`.
    index : int
        The CUDA device, -1 for the CPU.
    constants : tuple
        The last arguments.
    **options
        ``num_warps`` and the like.

    Attributes
    ----------
    compiled
        Triton's compiled kernel, None before the first call and in the interpreter.
    """

    __slots__ = ("_launch", "compiled", "constants", "function", "index", "options")

    def __init__(self, function: Any, index: int, constants: tuple[Any, ...], **options: Any):
        self.function, self.index = function, index
        self.constants, self.options = constants, options
        self.compiled: Any = None
        self._launch: Any = None

    def __call__(
        self, grid: tuple[int, int], tensors: tuple[torch.Tensor, ...], counts: tuple[int, ...]
    ) -> None:
        """Launch on the current stream. Unaligned tensors take Triton's own way."""
        pointers = [t.data_ptr() for t in tensors]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        if self._launch is None or bits & 15 or torch._C._cuda_getDevice() != self.index:
            self._analysed(grid, tensors, counts, bits & 15 == 0)
            return
        run, function, metadata = self._launch
        # As Triton's own CompiledKernel[grid](…) calls it, without the hooks of a profiler.
        run(
            *grid, 1, torch._C._cuda_getCurrentRawStream(self.index), function, metadata,
            None, None, None, *pointers, *counts, *self.constants,
        )  # fmt: skip

    def _analysed(
        self, grid: tuple[int, int], tensors: tuple[torch.Tensor, ...], counts: tuple[int, ...],
        aligned: bool,
    ) -> None:  # fmt: skip
        with torch.cuda.device(self.index):  # -1: none
            arguments = (*tensors, *counts, *self.constants)
            compiled = self.function[grid](*arguments, **self.options)
        if aligned and compiled is not None:  # the interpreter returns nothing
            self.compiled = compiled
            self._launch = compiled.run, compiled.function, compiled.packed_metadata


@cache
def multiprocessors(index: int) -> int:
    """Multiprocessors of a CUDA device; in the interpreter 4, so that small inputs use several."""
    if index < 0:
        return 4
    return torch.cuda.get_device_properties(index).multi_processor_count


def check_device(device: torch.device, name: str) -> None:
    """Refuse the device of a tensor that the kernels of this process cannot reach.

    Raises
    ------
    UnsupportedError
        It is not a CUDA device and the kernels are compiled.
    """
    if device.type != "cuda" and not interpreting():
        raise UnsupportedError(
            f"{name} is not on a CUDA device, and the kernels of this process are compiled for one",
            got=str(device),
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

    Examples
    --------
    >>> from roundoff.kernels import layer_norm
    >>> x = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    >>> def shuffled(seed):
    ...     with shuffled_programs(seed):
    ...         return layer_norm(x, 8)
    >>> not interpreting() or torch.equal(shuffled(1), shuffled(2))
    True
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
