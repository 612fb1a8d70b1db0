"""A matrix product whose rows do not depend on each other, nor on how many there are."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import cache, partial, reduce, wraps
from itertools import combinations
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.autograd.function import once_differentiable

from ..errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from . import invariant_kernels as kernels
from ._runtime import ceil_div, check_tensor, multiprocessors, power_of_2, run_fitting
from .invariant_cublas import cancelling, route

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_PRODUCTS = 65535  # in a grid's second direction
#: Values of K in a chain of float32, and chains in a sum: part of the definition of its bits.
_CHAIN = 16


_Function = TypeVar("_Function", bound=Callable[..., Any])

#: torch's functions of one element that Intel's MKL computes on a CPU.
_BY_MKL = (
    "acos",
    "asin",
    "atan",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "expm1",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
)


def own_work(function: _Function) -> _Function:
    """Have torch do what a function of ours asks for, under :func:`roundoff.invariant`, too.

    It would replace the operators that the function is made of, and cost more than they do.
    """

    @wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with (
            torch._C._DisableTorchDispatch(),
            torch._C.DisableTorchFunction(),
            torch._C._DisableAutocast(),
        ):
            return function(*args, **kwargs)

    return cast(_Function, alone)


@cache
@own_work
def settle_mkl() -> None:
    """Have MKL choose its programs for functions of one element, in one thread.

    It chooses when a process first calls a function. Where several threads make that call, one may
    compute its part with an error of 1e-4, once: seen with MKL 2024.2, and described with the same
    remedy in https://github.com/pytorch/pytorch/issues/188792.
    """
    for name in _BY_MKL:
        for dtype in (torch.float32, torch.float64):
            getattr(torch, name)(torch.full((1,), 0.5, dtype=dtype, device="cpu"))


@contextlib.contextmanager
def by_torch(given: torch.Tensor) -> Iterator[None]:
    """Have torch compute a gradient or what has one, under :func:`roundoff.invariant`, too.

    A compiler that traces the pass, with tensors of its own, sees it all the same.
    """
    if type(given) is not torch.Tensor:
        yield
        return
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


class Tile(NamedTuple):
    """How our kernel cuts a product; it moves time, not bits.

    Attributes
    ----------
    swap : bool
        Whether the weight is the left operand of the tensor core's product: for few rows.
    rows : int
        Rows of x in a tile.
    columns : int
        Columns of y in a tile.
    depth : int
        Values of K that are loaded at a time; in float32 always 16.
    warps : int
        Warps of a program.
    stages : int
        Loads under way at the same time.

    Examples
    --------
    >>> from roundoff.kernels.invariant_matmul import Tile
    >>> Tile(swap=True, rows=16, columns=32, depth=256, warps=4, stages=6).columns
    32
    """

    swap: bool
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@cache
def tile_for(m: int, n: int, k: int, itemsize: int, processors: int) -> Tile:
    """The tile for a product of M rows with a weight (N, K) of elements of *itemsize* bytes.

    With few rows the time is that of reading the weight: narrow tiles, and many loads under way.
    With many rows it is that of the tensor cores.

    Examples
    --------
    >>> from roundoff.kernels.invariant_matmul import tile_for
    >>> tile_for(1, 4096, 4096, 2, 132)
    Tile(swap=True, rows=16, columns=64, depth=128, warps=4, stages=8)
    """
    if itemsize == 4:  # the registers of fused multiply-adds are few
        return Tile(m <= 32, 16 if m <= 32 else 64, 64, 32, 4, 2)
    if m <= 64:
        # Loads under way count for more than multiprocessors without work.
        rows, columns = max(16, power_of_2(m)), 64 if n >= 1024 else 16
        depth = 64 if k % 128 else 128
        stage = (rows + columns) * depth * itemsize
        return Tile(True, rows, columns, depth, 4, min(8, 200 * 1024 // stage))
    for rows, columns, warps, stages in ((128, 256, 8, 3), (128, 128, 8, 4), (64, 128, 4, 4)):
        if ceil_div(m, rows) * ceil_div(n, columns) >= processors:
            return Tile(False, rows, columns, 64, warps, stages)
    return Tile(False, 64, 64 if m * n >= 64 * 32 * processors else 32, 128, 4, 4)


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> torch.Tensor:
    r"""Product :math:`y = x W^\top + b`, a row of which has the same bits in every batch.

    Each element is one chain over K, ascending, in float32: from zero, a step of the GPU's own
    matrix instruction after the other (16 products at a time on Hopper), the bias added
    last, and one rounding to the type. K is not split.
    The tile does not matter, nor do strides and alignment.

    In float32, which takes no TF32, one chain over thousands of values would err more than cuBLAS.
    There each 16 values of K are a chain of fused multiply-adds from zero, each 16 chains are added
    up in ascending order, and so are these sums.

    On a CUDA device cuBLAS computes the chain of 16-bit types wherever a check shows that it does,
    a check for each shape, type, layout and number of rows when it is first seen; elsewhere a
    kernel of ours does. No result is added by atomics. Two GPUs agree as far as their matrix
    instructions do.

    On a CPU each row is computed in a product of one fixed number of rows, padded, with float32
    accumulation in the order that the processor's library has for that number: as invariant, not
    the same bits as a GPU's, and for one number of threads. Slower than torch, up to three times.
    Where probes show that a row's bits depend on its place there, which is so of many products with
    few columns or few terms, or cannot tell, each row is a product of its own, and of up to eight
    terms a chain of single additions.

    Parameters
    ----------
    x : torch.Tensor
        Shape (…, K), bfloat16, float16 or float32, any strides; no rows and K = 0 as in torch.
    weight : torch.Tensor
        Shape (N, K), of the same type and device.
    bias : torch.Tensor, optional
        Shape (N,), of the same type and device.
    tile : Tile, optional
        Use our kernel, with this tile; by default ``tile_for`` chooses.

    Returns
    -------
    torch.Tensor
        Shape (…, N), contiguous, of the type of `x`. Differentiable once.

    Raises
    ------
    ShapeError
        Shapes that do not meet.
    DtypeError
        Another type, or types mixed.
    ArgumentError
        Tensors on different devices.
    UnsupportedError
        A device that is neither CUDA nor a CPU.

    References
    ----------
    H. He and Thinking Machines Lab, *Defeating Nondeterminism in LLM Inference*, 2025,
    https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels import matmul
    >>> generator = torch.Generator().manual_seed(0)
    >>> x, weight = (torch.randn(n, 64, generator=generator) for n in (100, 32))
    >>> torch.equal(matmul(x, weight)[70:71], matmul(x[70:71], weight))
    True
    """
    check_operands(x=x, weight=weight, bias=bias)
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ShapeError(
            "x and weight do not meet",
            got=f"{tuple(x.shape)} and {tuple(weight.shape)}",
            expected="(…, K) and (N, K)",
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ShapeError("bias", got=tuple(bias.shape), expected=f"({weight.shape[0]},)")
    asked = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if torch.compiler.is_compiling() or (asked and torch.is_grad_enabled()):
        return differentiable(x, weight, bias)
    return _product(x, weight, bias, tile)


def check_operands(bias: Any = None, **tensors: Any) -> None:
    """Tensors of one type and device.

    Raises
    ------
    ArgumentError, DtypeError, UnsupportedError
        They are not.
    """
    if bias is not None:
        tensors["bias"] = bias
    for name, t in tensors.items():
        check_tensor(t, name)
    first, x = next(iter(tensors.items()))
    if x.device.type not in ("cpu", "cuda"):
        raise UnsupportedError("no kernel", got=str(x.device), expected="a CPU or CUDA device")
    known = x.dtype in _TYPES or (x.is_cpu and x.dtype == torch.float64)
    for name, t in tensors.items():
        if not known or t.dtype != x.dtype:
            raise DtypeError(
                f"{name} has another type",
                got=str(t.dtype),
                expected=f"{x.dtype} as {first}" if known else "bfloat16, float16 or float32",
            )
        if t.device != x.device:
            raise ArgumentError(
                f"{name} is on another device", got=str(t.device), expected=f"{x.device} as {first}"
            )


@own_work
def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile | None = None
) -> torch.Tensor:
    n, k = weight.shape
    rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), k)
    if not rows.shape[0] or not n or not k:
        y = rows.new_zeros(rows.shape[0], n)
        y = y if bias is None else y + bias
    elif rows.is_cpu and tile is None:
        y = _on_cpu(rows, weight, bias)
    elif tile is None and (way := route(rows, weight, bias, _one)) is not None:
        y = way(rows, weight, bias)
    else:
        y = _by_kernel(rows[None], weight[None], bias, tile)[0]
    return y if x.dim() == 2 else y.view(*x.shape[:-1], n)


def _one(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of 16-bit types by the kernel."""
    return _by_kernel(x[None], weight[None], bias)[0]


@own_work
def batched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Products x[b] weight[b]^T, each as :func:`roundoff.kernels.matmul`.

    Parameters
    ----------
    x : torch.Tensor
        Shape (batch, M, K).
    weight : torch.Tensor
        Shape (batch, N, K), of the same type and device.

    Returns
    -------
    torch.Tensor
        Shape (batch, M, N).

    Raises
    ------
    DtypeError, ArgumentError, UnsupportedError
        As in :func:`roundoff.kernels.matmul`.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels.invariant_matmul import batched
    >>> batched(torch.ones(2, 3, 4), torch.ones(2, 5, 4)).shape
    torch.Size([2, 3, 5])
    """
    check_operands(x=x, weight=weight)
    (batch, m, k), n = x.shape, weight.shape[1]
    if not batch * m * n or not k:
        return x.new_zeros(batch, m, n)
    if x.device.type == "cpu":
        return torch.stack([_on_cpu(a, b, None) for a, b in zip(x, weight, strict=True)])
    if batch > _MOST_PRODUCTS:
        parts = zip(x.split(_MOST_PRODUCTS), weight.split(_MOST_PRODUCTS), strict=True)
        return torch.cat([_by_kernel(*part, None) for part in parts])
    return _by_kernel(x, weight, None)


# Our kernel. ----------------------------------------------------------------------------------


def _by_kernel(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Products of (batch, M, K) and (batch, N, K) by the Triton kernel."""
    (batch, m, k), n = x.shape, weight.shape[1]
    y = x.new_empty(batch, m, n)
    index = x.get_device()
    tile = tile or tile_for(m, n, k, x.element_size(), multiprocessors(index))
    depth = _CHAIN if x.dtype == torch.float32 else tile.depth
    constants = (
        tile.swap,
        tile.rows,
        tile.columns,
        depth,
        k % depth == 0,
        bias is not None,
    )
    grid = (ceil_div(m, tile.rows) * ceil_div(n, tile.columns), batch)
    # The rows decide the stride of a batch of one, which nothing is to be compiled for.
    outer = (x.stride(0), weight.stride(0)) if batch > 1 else (0, 0)
    b = y if bias is None else bias.contiguous()
    strides = (outer[0], *x.stride()[1:], outer[1], *weight.stride()[1:])
    args = (x, weight, b, y, m, n, k, *strides, *constants)
    kind = (index, tile, x.dtype)
    run_fitting(kind, tile.stages, kernels.product, grid, *args, num_warps=tile.warps)
    return y


# A CPU. ---------------------------------------------------------------------------------------

#: Bytes that a row of vectors begins at: what torch allocates does.
_ALIGNED = 64
#: Rows of a fixed product, and of a larger one where it has the same bits.
_LARGE = 128
#: From so many terms on there is more than one sum, in an order that the bits can show.
_ORDERED = 3
#: Up to so many terms a chain of torch's own additions is quicker than a product for each row.
_FEW = 8


def _on_cpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Products of a fixed number of rows; where their places matter, each row by itself."""
    (m, k), n = x.shape, weight.shape[0]
    small, large = _cpu_rows(m, n, k, x.dtype, bias is not None)
    if small == 1 and k <= _FEW:
        return _by_terms(x, weight, bias)
    weight = _aligned(weight)
    whole = m // large * large
    rest = torch.nn.functional.pad(x[whole:], (0, 0, 0, -(m - whole) % small))
    pieces = (*x[:whole].split(large), *rest.split(small))
    return torch.cat([_fixed(_aligned(piece), weight, bias) for piece in pieces if len(piece)])[:m]


def _fixed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _by_terms(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The chain over K by products and sums of elements: IEEE 754 defines each, anywhere."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows, columns = x.to(wide), weight.to(wide).t()
    y = rows[:, :1] * columns[0]
    for i in range(1, len(columns)):
        y += rows[:, i : i + 1] * columns[i]
    return (y if bias is None else y.add_(bias)).to(x.dtype)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A matrix by rows that begins where torch would allocate one."""
    if tensor.data_ptr() % _ALIGNED or not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    # A single row counts as contiguous whatever its stride, which decides what torch calls.
    return tensor if tensor.stride(0) == tensor.shape[1] else tensor.view(-1).view(tensor.shape)


def _cpu_rows(m: int, n: int, k: int, dtype: torch.dtype, bias: bool) -> tuple[int, int]:
    """(rows of a fixed product, rows of a large one with the same bits), for *m* rows.

    A row's bits must not depend on its place in the product. Libraries keep to that for most
    shapes. (1, 1) where one does not, and where it cannot be told: a row alone has one place.
    """
    small = 8 if dtype.itemsize == 2 else 16
    shape = n, k, dtype, bias, torch.get_num_threads(), small
    if k < _ORDERED or not _alike(*shape, small):
        return 1, 1
    return small, _LARGE if m >= _LARGE and _alike(*shape, _LARGE) else small


@cache
def _alike(
    n: int, k: int, dtype: torch.dtype, bias: bool, threads: int, small: int, count: int
) -> bool:
    """Whether each row of *count* has the bits of the first of *small*, as far as it shows."""
    if k <= _SEEN and not _tells(n, k, dtype, bias):
        return False
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]  # tells zeros apart
    for rows, weight, biases in _probes(n, k, dtype, bias):
        for row, b in zip(rows, biases, strict=True):
            # All rows of a product are the same: whatever differs is the place's.
            products = [
                _fixed(row.expand(m, k).contiguous(), weight, b).view(bits)
                for m in sorted({small, count})
            ]
            if not torch.equal(products[-1], products[0][:1].expand(count, n)):
                return False
    return True


# What shows an order of addition. ---------------------------------------------------------------

#: Up to so many terms it is looked at whether the probes tell orders apart; more have more power.
_SEEN = 64
#: Columns that this is looked at for: they are drawn alike.
_LOOKED_AT = 256
#: Probes of a kind, and of a long sum, which has many roundings; all pairs of up to so many terms.
_PROBES, _FEW_PROBES, _FEW_PAIRS = 24, 6, 8

Probes = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]


def _probes(n: int, k: int, dtype: torch.dtype, bias: bool) -> Iterator[Probes]:
    """Rows (probes, K), a weight (N, K) and the rows' biases, of three kinds.

    Random operands show whether a product is rounded before it is added. Of two terms that cancel
    each other, and swallow what is added before they do, the result is the sum of what is added
    later: taken pair by pair that determines a tree of additions (FPRev; see
    :func:`roundoff.reductions.order_probes`). Operands that cancel as a whole leave nothing but
    roundings.
    """
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=dtype)
    count = _PROBES if k <= _SEEN else _FEW_PROBES

    def biases(values: torch.Tensor) -> list[torch.Tensor | None]:
        return [b.contiguous() if bias else None for b in values.expand(-1, n)]

    yield draw(count, k), draw(n, k), biases(draw(count, n if bias else 1))

    if k <= _FEW_PAIRS:
        pairs = list(combinations(range(k + bias), 2))
    else:
        pairs = [
            tuple(torch.randperm(k + bias, generator=generator)[:2].tolist()) for _ in range(count)
        ]
    # float16 ends at 2^16, and what is swallowed has to be no subnormal.
    large, unit = (2.0**15, 2.0**-13) if dtype == torch.float16 else (2.0**60, 1.0)
    terms = (1 + draw(len(pairs), k + 1).abs() % 1) * unit
    for row, (i, j) in zip(terms, pairs, strict=True):
        row[i], row[j] = large, -large
    terms = torch.cat([terms, terms.new_full((1, k + 1), -0.0)])  # the sign of a sum of zeros
    yield terms[:, :k], terms.new_ones(n, k), biases(terms[:, k:])

    rows, weight = cancelling(terms.new_empty(count, k), terms.new_empty(n, k))
    yield rows, weight, biases(terms.new_zeros(count, 1))


@cache
@own_work
def _tells(n: int, k: int, dtype: torch.dtype, bias: bool) -> bool:
    """Whether each column of the probes has other bits for each two of a few known orders."""
    orders: list[list[torch.Tensor]] = []
    for rows, weight, biases in _probes(n, k, dtype, bias):
        columns = weight[:_LOOKED_AT]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        terms = list((rows[:, None].to(wide) * columns.to(wide)).unbind(-1))  # (probes, columns)
        given = [b[:_LOOKED_AT] for b in biases if b is not None]
        last = [torch.stack(given).to(wide)] if given else []
        made = [
            _added([*terms, *last]),
            _added([*terms[::-1], *last]),
            _added([_added(terms[::2]) + _added(terms[1::2]), *last]),
        ]
        if last:
            made.append(_added([*last, *terms]))
        if dtype == torch.float32:  # of 16 bits a product is exact
            exact = rows[:, None].double() * columns.double()
            fused = torch.zeros_like(terms[0])
            for term in exact.unbind(-1):
                fused = (fused + term).float()
            made.append(_added([fused, *last]))
        orders.append([order.to(dtype) for order in made])
    return all(
        bool(torch.cat([a != b for a, b in zip(one, other, strict=True)]).any(0).all())
        for one, other in combinations(zip(*orders, strict=True), 2)
    )


def _added(terms: list[torch.Tensor]) -> torch.Tensor:
    return reduce(torch.add, terms)


# Under torch.compile and autograd the product is an opaque operator. ----------------------------


def is_traced(x: torch.Tensor) -> bool:
    """Whether a compiler follows what is computed with *x*."""
    return torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter)


def operator(
    name: str,
    function: Callable[..., torch.Tensor],
    fake: Callable[..., torch.Tensor],
    setup: Callable[..., None],
    gradients: Callable[..., Any],
) -> Callable[..., torch.Tensor]:
    """A function with gradients; where a compiler traces it, the operator ``roundoff::name``.

    Eager calls the function without the operator, which would take ten times as long.

    Parameters
    ----------
    name : str
        Of the operator.
    function : callable
        (tensor, …) -> tensor, with annotations.
    fake : callable
        (tensor, …) -> an empty result.
    setup, gradients : callable
        As ``setup_context`` and ``backward`` of :class:`torch.autograd.Function`.
    """
    traced = torch.library.custom_op(f"roundoff::{name}", function, mutates_args=())
    traced.register_fake(fake)
    traced.register_autograd(gradients, setup_context=setup)

    class Eager(torch.autograd.Function):
        forward = staticmethod(function)
        setup_context = staticmethod(setup)
        backward = staticmethod(once_differentiable(gradients))  # type: ignore[assignment]

    def call(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        y: torch.Tensor = traced(x, *rest) if is_traced(x) else Eager.apply(x, *rest)
        return y

    return call


def opaque(
    name: str,
    formula: Callable[..., torch.Tensor],
    fake: Callable[..., torch.Tensor] = lambda x, *_: torch.empty_like(x),
) -> Callable[[Any], Any]:
    """An :func:`operator` whose gradients are those of *formula*, torch's own, at the same values.

    Unless *fake* says otherwise its result is laid out as its first argument.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.tensors = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        ctx.rest = [None if i in ctx.tensors else value for i, value in enumerate(inputs)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.tensors))

    def gradients(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        inputs: list[Any] = list(ctx.rest)
        for i, saved in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            inputs[i] = saved.detach().requires_grad_(bool(ctx.needs_input_grad[i]))
        asked = [i for i in ctx.tensors if ctx.needs_input_grad[i]]
        with by_torch(dy), torch.enable_grad():
            grads = torch.autograd.grad(formula(*inputs), [inputs[i] for i in asked], dy)
        found = dict(zip(asked, grads, strict=True))
        return tuple(found.get(i) for i in range(len(inputs)))

    return lambda function: operator(name, function, fake, setup, gradients)


def _matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _product(x, weight, bias)


def _empty(x: Any, weight: Any, bias: Any) -> Any:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, *_ = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, dy: torch.Tensor) -> Any:
    """Torch's products: what is promised of a gradient is its value, not its bits."""
    x, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    with by_torch(dy):
        flat = dy.reshape(-1, dy.shape[-1])
        dx = dy @ weight if needs[0] else None
        dw = flat.t() @ x.reshape(-1, x.shape[-1]) if needs[1] else None  # over the rows
        return dx, dw, flat.sum(0) if needs[2] else None


differentiable = operator("invariant_matmul", _matmul, _empty, _setup, _gradients)
