"""How a kernel runs: compiled on a GPU, or in Triton's interpreter where there is none.

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
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction, interpreter_builder
except ImportError as error:  # pragma: no cover - the platform has no Triton
    from ..errors import MissingDependencyError

    raise MissingDependencyError(
        "the kernels are written in Triton, which is not installed",
        got=str(error),
        hint="pip install triton (Linux on x86-64)",
    ) from error

from ..arguments import check_whole
from ..errors import ArgumentError, UnsupportedError

_ASKED = os.environ.get("TRITON_INTERPRET", "").lower()
_INTERPRETING = _ASKED in ("1", "true", "yes", "on", "y")
if not _ASKED:
    _INTERPRETING = not torch.cuda.is_available()


def interpreting() -> bool:
    """Whether the kernels of this process run in Triton's interpreter.

    Returns
    -------
    bool
        ``TRITON_INTERPRET`` where it is set, else whether CUDA is missing.

    Examples
    --------
    >>> from roundoff.kernels import interpreting
    >>> isinstance(interpreting(), bool)
    True
    """
    return _INTERPRETING


#: For kernels: what the interpreter cannot do is left out there.
COMPILED = tl.constexpr(not _INTERPRETING)


_data_ptr = torch.Tensor.data_ptr
_get_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_get_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)

#: Arguments for whose values nothing is compiled: numbers of rows, of programs and of keys. A
#: pointer must not have such a name: the compiler would not learn that it is aligned.
_COUNTS = {
    "M",
    "G",
    "tiles",
    "zero",
    "parts",
    "queries",
    "keys",
    "splits",
    "each",
}


class _Interpreted(InterpretedFunction):
    """A kernel in the interpreter, with annotations as they were evaluated.

    The interpreter compiles a kernel again, and keeps an annotation as text: ``C = tl.constexpr``
    would be no constant to it.
    """

    def rewrite(self) -> Any:
        function = super().rewrite()
        function.__annotations__ = self.fn.__annotations__
        return function


def kernel(function: Callable[..., Any]) -> Any:
    """Make a Triton kernel of a function: interpreted or compiled, as :func:`interpreting` says.

    ``triton.jit`` reads the environment instead, and then only works where nothing imported Triton
    before the variable was set. These kernels use only ``triton.language``'s own builtins: the
    helpers of its standard library (``tl.sum``, ``tl.zeros``, …) were decorated with it.
    """
    if interpreting():
        return _Interpreted(function)
    # One compiled kernel for every number of rows and programs.
    return triton.JITFunction(
        function, do_not_specialize=sorted(_COUNTS & set(inspect.signature(function).parameters))
    )


@kernel
def sum_along(x, axis: tl.constexpr):
    """Sum along one axis. Not ``tl.sum``, which is decorated by whoever imports Triton first."""
    return tl.reduce(x, axis, tl.standard._sum_combine)


@kernel
def max_along(x, axis: tl.constexpr):
    """Largest along one axis."""
    return tl.reduce(x, axis, tl.standard._elementwise_max)


@kernel
def min_along(x, axis: tl.constexpr):
    """Smallest along one axis.

    Not the largest of -x with its sign changed: for Hopper ptxas 12.8 and 13.0 make the largest of
    three integers (VIMNMX3) of two, and lose the minus of the middle one.
    """
    return tl.reduce(x, axis, tl.standard._elementwise_min)


class Launch:
    """A kernel with its grid and numbers; a call adds the tensors.

    At 1024 columns a kernel takes a few microseconds, and Triton's analysis of its arguments
    several times as long. Here that happens on the first call alone, so one object must serve
    only tensors of the same types.

    Parameters
    ----------
    function : kernel
        Made by :func:`kernel`.
    index : int
        The CUDA device, -1 for the CPU.
    grid : tuple of two int
        Programs.
    numbers : tuple
        The arguments after the tensors, constants last.
    **options
        ``num_warps`` and the like.
    """

    def __init__(
        self,
        function: Any,
        index: int,
        grid: tuple[int, int],
        numbers: tuple[Any, ...],
        **options: Any,
    ):
        self.function, self.index, self.grid = function, index, grid
        self.numbers, self.options = numbers, options
        self._launch: Any = None

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch on the current stream; with unaligned tensors through Triton's own launcher."""
        pointers = [*map(_data_ptr, tensors)]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        if self._launch is not None and not bits & 15 and _get_device() == self.index:
            self._launch(_get_stream(self.index), pointers)
            return
        with torch.cuda.device(self.index):  # -1: none
            compiled = self.function[self.grid](*tensors, *self.numbers, **self.options)
        if not bits & 15 and compiled is not None:  # the interpreter returns nothing
            self._launch = _launcher(compiled, self.grid, self.numbers)


def _launcher(
    compiled: Any, grid: tuple[int, int], numbers: tuple[Any, ...]
) -> Callable[[int, list[int]], None]:
    """A function of the stream and the addresses of tensors that launches a compiled kernel.

    ``CompiledKernel.run`` is how Triton's own ``CompiledKernel[grid](…)`` launches, without the
    hooks of a profiler. In the versions named here the C function behind it is called directly:
    what lies between allocates scratch memory, which these kernels have none of, and takes half a
    microsecond.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    sizes = [getattr(run, name + "_scratch_size", None) for name in ("global", "profile")]
    version = triton.__version__.split(".")[:2] if sizes == [0, 0] else []
    x, y = grid
    fixed: tuple[Any, ...]
    launch, fixed = run, (metadata, None, None, None)
    if version == ["3", "6"]:
        launch = run.launch
        fixed = (run.launch_cooperative_grid, run.launch_pdl, None, None, *fixed)
    if version == ["3", "7"]:
        launch = run.launch
        fixed = (run.launch_cooperative_grid, run.launch_pdl, *fixed, None, None)
        fixed = (*fixed, run.arg_annotations, run.kernel_signature)
        return lambda stream, pointers: launch(
            x, y, 1, stream, function, *fixed, (*pointers, *numbers)
        )
    return lambda stream, pointers: launch(x, y, 1, stream, function, *fixed, *pointers, *numbers)


_LAUNCHES: dict[Any, Launch] = {}


def run(function: Any, grid: tuple[int, int], *args: Any, **options: int) -> None:
    """Launch a kernel on its arguments in order: tensors, then numbers and constants."""
    count = 0
    for argument in args:
        if not isinstance(argument, torch.Tensor):
            break
        count += 1
    tensors, rest, index = args[:count], args[count:], args[0].get_device()
    # By identity: hashing one of Triton's functions takes a lock.
    key = (id(function), index, grid, rest, *[t.dtype for t in tensors], *options.values())
    launch = _LAUNCHES.get(key)
    if launch is None:
        launch = _LAUNCHES[key] = Launch(function, index, grid, rest, **options)
    launch(*tensors)


#: What did not fit on a device -> the stages that do.
_STAGES: dict[Any, int] = {}


def run_fitting(
    kind: Any, stages: int, function: Any, grid: tuple[int, int], *args: Any, **options: int
) -> None:
    """:func:`run` with fewer *stages* (loads under way) where the device has no room for them.

    How many fit is remembered by function and *kind*.
    """
    key = (id(function), kind)
    stages = _STAGES.get(key, stages)
    while True:
        try:
            run(function, grid, *args, num_stages=stages, **options)
        except triton.OutOfResources:
            if stages == 1:
                raise
            stages = _STAGES[key] = stages - 1
        else:
            return


def ceil_div(n: int, d: int) -> int:
    """n / d, rounded up. ``triton.cdiv`` serves kernels, too, and takes two microseconds."""
    return -(-n // d)


def power_of_2(n: int) -> int:
    """The least power of two that is at least n, from 1 on, as ``triton.next_power_of_2``."""
    return 1 << (n - 1).bit_length()


def rows_of(x: torch.Tensor, columns: int) -> tuple[torch.Tensor, int]:
    """x as rows of adjacent elements, and elements between their beginnings.

    Copied only where it must be, and as it is where it is contiguous.
    """
    if x.is_contiguous():
        return x, columns
    rows = x.reshape(-1, columns)
    if rows.stride(1) != 1 and columns > 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


@cache
def multiprocessors(index: int) -> int:
    """Multiprocessors of a CUDA device; in the interpreter 4, so that small inputs use several."""
    if index < 0:
        return 4
    return torch.cuda.get_device_properties(index).multi_processor_count


def check_device(device: torch.device, name: str) -> None:
    """Check that the kernels of this process can run on the device of a tensor.

    Raises
    ------
    UnsupportedError
        It is neither a CUDA device nor the CPU, or the CPU and the kernels are compiled.
    """
    if device.type != "cuda" and not (device.type == "cpu" and interpreting()):
        raise UnsupportedError(
            f"{name} is on another device than the kernels of this process",
            got=str(device),
            expected="a CPU where they are interpreted" if interpreting() else "cuda",
            hint="move it with .cuda(), or set TRITON_INTERPRET=1 before the first import",
        )


def check_tensor(x: Any, name: str) -> None:
    """Check that this is a torch tensor with memory of its own.

    Raises
    ------
    ArgumentError
        It is something else.
    """
    if not isinstance(x, torch.Tensor) or type(x).__name__ == "MaskedTensor":
        raise ArgumentError(name, got=type(x).__name__, expected="a torch tensor")


@contextlib.contextmanager
def shuffled_programs(seed: int) -> Iterator[None]:
    """Let the interpreter run the programs of each launch in a shuffled order.

    A GPU runs programs in no defined order; the interpreter runs them one after another. Under
    this context manager it does so in a random order, so that a result that depends on the order
    shows without a GPU.

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
    >>> import torch
    >>> from roundoff.kernels import interpreting, layer_norm, shuffled_programs
    >>> x = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    >>> def shuffled(seed):
    ...     with shuffled_programs(seed):
    ...         return layer_norm(x, 8)
    >>> not interpreting() or torch.equal(shuffled(1), shuffled(2))
    True
    """
    check_whole("seed", seed)
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
