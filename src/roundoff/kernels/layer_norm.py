r"""Layer normalisation in Triton: forward and backward, the same bits every run.

For a row :math:`x` of :math:`N` values with mean :math:`\mu` and :math:`r = 1/\sqrt{\sigma^2 +
\epsilon}`,

.. math:: y = (x - \mu)\, r\, w + b.

With :math:`g` the gradient of :math:`y`, :math:`\hat x = (x - \mu) r` and bars for means over the
row, the backward is

.. math:: dx = r\,(w g - \overline{w g} - \hat x\, \overline{\hat x\, w g}), \qquad
          dw = \sum_\text{rows} g\, \hat x, \qquad db = \sum_\text{rows} g.

The sums over rows are taken in two stages, without locks or atomics: each program adds its own rows
in float32, a second kernel adds the programs' partial sums, both in a fixed order.

References
----------
J. L. Ba, J. R. Kiros and G. E. Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl

from ..errors import ArgumentError, DtypeError, ShapeError
from . import _layer_norm_kernels as kernels
from ._runtime import check_device, interpreting, launch, multiprocessors

__all__ = ["Plan", "layer_norm", "plan_backward", "plan_forward"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WIDEST = 2**30


class Plan(NamedTuple):
    """How a kernel cuts its rows; part of what fixes the bits of a result.

    Attributes
    ----------
    rows : int
        Rows of a tile.
    piece : int
        Columns of a piece, a power of two.
    pieces : int
        Pieces of a row; 0 where a row is walked in chunks of `piece` columns instead.
    warps : int
        Warps of a program.
    stages : int
        Depth of the pipeline: 2 loads the next tile while one is worked on.
    per_sm : int
        Programs for each multiprocessor; 0 where each tile has its own.
    hold : bool
        Whether the weight stays in registers.
    """

    rows: int
    piece: int
    pieces: int
    warps: int
    stages: int = 1
    per_sm: int = 0
    hold: bool = False


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _pieces(columns: int, rows: int, piece: int, *rest: Any) -> Plan:
    return Plan(rows, piece, -(-columns // piece), *rest)


@cache
def plan_forward(columns: int, itemsize: int) -> Plan:
    """Launch parameters of the forward kernel for rows of `columns` elements of `itemsize` bytes.

    Measured on an H200 in float16 and float32; other types go by the bytes of a row.

    Examples
    --------
    >>> plan_forward(8704, 2)
    Plan(rows=1, piece=2048, pieces=5, warps=4, stages=1, per_sm=0, hold=False)
    """
    size = columns * itemsize // 2
    if size > 32768:
        return Plan(1, 16384 // itemsize, 0, 16)
    if size <= 1024:
        piece = _power_of_two(columns)
        return Plan(max(1, 4096 // itemsize // piece), piece, 1, 1, 1, 0, itemsize == 4)
    if itemsize == 2:
        if size <= 1536:
            return _pieces(columns, 1, 512, 1, 1, 0, True)
        if size <= 4096:
            return _pieces(columns, 1, 1024, 4, 3, 6 if size <= 2048 else 4, True)
        return _pieces(columns, 1, 2048, 4)
    if itemsize == 4:
        if size <= 2048:
            return _pieces(columns, 1, 1024, 1, 1, 0, True)
        if size <= 16384:
            return _pieces(columns, 1, 2048, 4 if size <= 8192 else 8, 1, 0, True)
        return _pieces(columns, 1, 2048, 16 if size <= 24576 else 8)
    return _pieces(columns, 1, 4096 // itemsize, 4)


@cache
def plan_backward(columns: int, itemsize: int) -> Plan:
    """Launch parameters of the backward kernel, likewise.

    Examples
    --------
    >>> plan_backward(8704, 2)
    Plan(rows=1, piece=2048, pieces=5, warps=8, stages=3, per_sm=1, hold=True)
    """
    size = columns * itemsize // 2
    if size > (16384 if itemsize == 2 else 24576):
        return Plan(16, 256, 0, 4, 1, 1)
    small, large = 2048 // itemsize, 4096 // itemsize
    if size <= 1024:
        piece = _power_of_two(columns)
        rows = (4096 if itemsize == 2 else 8192) // itemsize // piece
        return Plan(max(1, rows), piece, 1, 4, 3, 2 if itemsize == 2 else 1, True)
    if size <= 2048:
        rows, per_sm = (2, 2) if itemsize == 2 else (4, 1)
        return _pieces(columns, rows, small, 4, 3, per_sm, True)
    if size <= 3072:
        return _pieces(columns, 2, small, 4, 4, 1, True)
    if size <= 4096:
        return _pieces(columns, 2, large, 8, 3, 1, True)
    if size <= 4608 and itemsize == 2:  # three large pieces would be a third too much
        return _pieces(columns, 1, small, 8, 3, 2, True)
    if size <= 6144:
        return _pieces(columns, 1, large, 8, 4, 1, True)
    # From here on registers are short: wider types and wider rows read the weight again.
    held = size <= (12288 if itemsize == 2 else 8192)
    return _pieces(columns, 1, large, 8, 3 if size <= 14336 else 2, 1, held)


def layer_norm(
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    programs: int | None = None,
) -> torch.Tensor:
    """Layer normalisation over the last dimensions, differentiable once.

    A drop-in for :func:`torch.nn.functional.layer_norm`. Runs compiled on a CUDA device and in
    Triton's interpreter where there is none. Works under :func:`torch.compile` and CUDA graphs.

    Parameters
    ----------
    x : torch.Tensor
        Shape (…, \\*normalized_shape), float16, bfloat16, float32 or float64, any strides. Computed
        in float32, float64 in float64.
    normalized_shape : int or sequence of int
        The last dimensions of `x`, at least 1 and at most 2**30 elements.
    weight, bias : torch.Tensor, optional
        Shape `normalized_shape`; their type may differ from that of `x`.
    eps : float
        Added to the variance, not negative.
    programs : int, optional
        Partial sums of dweight and dbias. By default a multiple of the device's number of
        multiprocessors; give a number to get the same bits on devices of different sizes.

    Returns
    -------
    torch.Tensor
        Shape and type of `x`, contiguous.

    Raises
    ------
    ShapeError
        `normalized_shape` does not end the shape of `x`, is empty, or is not that of `weight` or
        `bias`.
    DtypeError
        A type that is not among the four.
    ArgumentError
        Tensors on different devices, `eps` negative, or `programs` below 1.
    UnsupportedError
        `x` is on the CPU and the kernels of this process are compiled for a GPU.

    References
    ----------
    Ba, Kiros and Hinton, https://arxiv.org/abs/1607.06450

    Examples
    --------
    >>> import torch
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> layer_norm(torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=device), 4, eps=0.0).cpu()
    tensor([[-1.3416, -0.4472,  0.4472,  1.3416]])
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    _check(x, shape, weight, bias, eps, programs)
    if torch.compiler.is_compiling():
        columns = math.prod(shape)
        flat = [None if t is None else t.reshape(columns) for t in (weight, bias)]
        y, _, _ = _forward_op(x.reshape(-1, columns), *flat, eps, programs or 0)
        return y.view(x.shape)
    wanted = x.requires_grad or any(t is not None and t.requires_grad for t in (weight, bias))
    if wanted and torch.is_grad_enabled():
        return _LayerNorm.apply(x, shape, weight, bias, eps, programs or 0)
    y = _forward(_rows(x, shape), _flat(weight), _flat(bias), eps)[0]
    return y if x.dim() == 2 and len(shape) == 1 else y.view(x.shape)


def _check(
    x: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    programs: int | None,
) -> None:
    if not shape or x.shape[-len(shape) :] != shape:
        raise ShapeError(
            "the last dimensions of x are not normalized_shape",
            got=f"x {tuple(x.shape)}, normalized_shape {shape}",
            expected="x of shape (…, *normalized_shape)",
        )
    if not 1 <= math.prod(shape) <= _WIDEST:
        raise ShapeError(
            "a row has no elements or too many", got=shape, expected=f"1 to {_WIDEST} elements"
        )
    device = x.device
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype not in _DTYPES:
            raise DtypeError(
                f"{name} has a type that layer_norm does not take",
                got=str(tensor.dtype),
                expected="float16, bfloat16, float32 or float64",
            )
        if tensor is not x and tensor.shape != shape:
            raise ShapeError(
                f"{name} has another shape", got=tuple(tensor.shape), expected=f"{shape}"
            )
        if tensor.device != device:
            raise ArgumentError(
                f"{name} is on another device than x", got=str(tensor.device), expected=str(device)
            )
    if not eps >= 0:
        raise ArgumentError("eps must not be negative", got=eps, expected="0 or more")
    if programs is not None and programs < 1:
        raise ArgumentError("programs out of range", got=programs, expected="at least 1")
    check_device(x, "x")


def _rows(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """View x as rows of contiguous elements; a copy only where its strides ask for one."""
    if x.dim() != 2 or len(shape) != 1:
        x = x.reshape(-1, math.prod(shape))
    return _adjacent(x)


def _adjacent(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _flat(parameter: torch.Tensor | None) -> torch.Tensor | None:
    if parameter is None or (parameter.dim() == 1 and parameter.is_contiguous()):
        return parameter
    return parameter.reshape(-1).contiguous()


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        shape: tuple[int, ...],
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        programs: int,
    ) -> torch.Tensor:
        rows, flat = _rows(x, shape), _flat(weight)
        y, mean, rstd = _forward(rows, flat, _flat(bias), eps)
        ctx.save_for_backward(rows, flat, mean, rstd)
        ctx.programs = programs
        ctx.shape, ctx.normalized = x.shape, shape
        ctx.types = (weight.dtype if weight is not None else None,
                     bias.dtype if bias is not None else None)  # fmt: skip
        return y if y.shape == x.shape else y.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        _, _, needs_dw, needs_db, _, _ = ctx.needs_input_grad
        dw_type, db_type = ctx.types
        dx, dw, db = _backward(
            dy if dy.shape == x.shape else dy.reshape(x.shape),
            x, weight, mean, rstd,
            dw_type if needs_dw else None, db_type if needs_db else None, ctx.programs,
        )  # fmt: skip
        if dx.shape != ctx.shape:
            dx = dx.view(ctx.shape)
        if len(ctx.normalized) > 1:
            dw, db = (None if t is None else t.view(ctx.normalized) for t in (dw, db))
        return dx, None, dw, db, None, None


def _multiprocessors(x: torch.Tensor) -> int:
    return multiprocessors(x.get_device())


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y (M, N), mean (M,) and 1/sqrt(variance + eps) (M,) of rows x (M, N)."""
    m, n = x.shape
    dtype = x.dtype
    y = x.new_empty((m, n))
    mean = x.new_empty(m, dtype=_accumulator(dtype))
    rstd = torch.empty_like(mean)
    if m == 0:
        return y, mean, rstd
    w, b = x if weight is None else weight, x if bias is None else bias
    plan, stride = plan_forward(n, x.itemsize), x.stride(0)
    flags = (weight is not None, bias is not None)
    tensors = (x, w, b, y, mean, rstd)
    key = (plan, dtype, w.dtype, b.dtype, n, stride, eps, flags)
    kind = _constant(dtype)
    if plan.pieces:
        tiles = -(-m // plan.rows)
        grid = min(tiles, _multiprocessors(x) * plan.per_sm) if plan.per_sm else tiles
        opaque = x.itemsize == 2 and not interpreting()
        rest: tuple[Any, ...] = (
            m, n, stride, tiles, 0,
            float(eps), kind, *plan[:3], plan.stages, plan.hold, *flags, opaque,
        )  # fmt: skip
        launch(kernels.forward, (grid, 1), key, tensors, rest, num_warps=plan.warps)
    else:
        rest = (m, n, stride, float(eps), kind, plan.piece, *flags)
        launch(kernels.forward_wide, (m, 1), key, tensors, rest, num_warps=plan.warps)
    return y, mean, rstd


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dw_type: torch.dtype | None,
    db_type: torch.dtype | None,
    programs: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """dx (M, N), and dweight and dbias (N,) of the types asked for, None where none is."""
    m, n = x.shape
    dy = _adjacent(dy)
    dx = x.new_empty((m, n))
    if m == 0:
        zeros = [None if t is None else x.new_zeros(n, dtype=t) for t in (dw_type, db_type)]
        return dx, zeros[0], zeros[1]
    plan = plan_backward(n, x.itemsize)
    sums = dw_type is not None or db_type is not None
    tiles = -(-m // plan.rows)
    count = programs or _multiprocessors(x) * plan.per_sm
    count = min(tiles, count)
    part = mean.new_empty((2, count, n)) if sums else mean
    if plan.pieces:
        _backward_rows(plan, count, dy, x, weight, mean, rstd, dx, part, sums)
    else:
        _backward_wide(plan, count, dy, x, weight, mean, rstd, dx, part, sums)
    if not sums:
        return dx, None, None
    dw = x.new_empty(n, dtype=dw_type or db_type)
    db = x.new_empty(n, dtype=db_type or dw_type)
    _second_stage(part, dw, db)
    return dx, None if dw_type is None else dw, None if db_type is None else db


def _constant(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32


def _backward_rows(
    plan: Plan, count: int, dy: Any, x: Any, weight: Any, mean: Any, rstd: Any, dx: Any, part: Any,
    sums: bool,
) -> None:  # fmt: skip
    m, n = x.shape
    w = x if weight is None else weight
    short = x.itemsize == 2
    strides = (x.stride(0), dy.stride(0))
    # Whether each thread has the same columns in every row of a tile.
    shared = plan.rows == 1 or plan.piece * x.itemsize >= plan.warps * 512
    compiled = not interpreting()
    flags = (
        weight is not None,
        sums,
        compiled and short,
        compiled and _early_launch(x.get_device()),
    )
    key = (plan, x.dtype, dy.dtype, w.dtype, n, strides, flags)
    rest = (
        m, n, *strides, -(-m // plan.rows), 0,
        _constant(x.dtype), *plan[:3], plan.stages, plan.hold, shared, short, *flags,
    )  # fmt: skip
    # So many registers that per_sm programs fit on a multiprocessor.
    limit = min(65536 // (plan.per_sm * plan.warps * 32), 255) if plan.per_sm > 1 else None
    tensors = (x, dy, w, mean, rstd, dx, part)
    options = {"num_warps": plan.warps, "maxnreg": limit}
    launch(kernels.backward, (count, 1), key, tensors, rest, **options)


def _backward_wide(
    plan: Plan, count: int, dy: Any, x: Any, weight: Any, mean: Any, rstd: Any, dx: Any, part: Any,
    sums: bool,
) -> None:  # fmt: skip
    m, n = x.shape
    w = x if weight is None else weight
    strides = (x.stride(0), dy.stride(0))
    tensors = (x, dy, w, mean, rstd, torch.empty_like(mean), torch.empty_like(mean))
    acc, has_weight = _constant(x.dtype), weight is not None
    key = (plan, x.dtype, dy.dtype, w.dtype, n, strides, has_weight, sums)
    rest: tuple[Any, ...] = (n, *strides, acc, 4096, has_weight)
    launch(kernels.backward_sums, (m, 1), key, tensors, rest, num_warps=16)
    tiles = -(-m // plan.rows)
    rest = (m, n, *strides, tiles, acc, plan.rows, plan.piece, has_weight, sums)
    grid = (count, -(-n // plan.piece))
    launch(kernels.backward_wide, grid, key, (*tensors, dx, part), rest, num_warps=plan.warps)


@cache
def _early_launch(index: int) -> bool:
    """Whether a kernel may be launched before the one it depends on has ended (Hopper on)."""
    return torch.cuda.get_device_capability(index) >= (9, 0)


def plan_second_stage(count: int, columns: int) -> tuple[int, int, int]:
    """Partial sums and columns of a tile of the second stage, and its warps."""
    # The interpreter is quicker with few large tiles; the order of the sum stays the same.
    return (
        min(_power_of_two(count), 64),
        min(_power_of_two(columns), 1024 if interpreting() else 16),
        4,
    )


def _second_stage(part: torch.Tensor, dw: torch.Tensor, db: torch.Tensor) -> None:
    _, count, n = part.shape
    rows, columns, warps = plan_second_stage(count, n)
    early = not interpreting() and _early_launch(part.get_device())
    rest = (count, n, _constant(part.dtype), rows, columns, early)
    key = (part.dtype, dw.dtype, db.dtype, n, rows, columns)
    options = {"launch_pdl": True} if early else {}
    grid = (-(-n // columns), 2)
    launch(kernels.second_stage, grid, key, (part, dw, db), rest, num_warps=warps, **options)


# Under torch.compile the kernels are two opaque operators with shapes that can be predicted.


@torch.library.custom_op("roundoff::layer_norm_forward", mutates_args=())
def _forward_op(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    programs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _forward(_adjacent(x), _flat(weight), _flat(bias), eps)


@_forward_op.register_fake
def _(x: Any, weight: Any, bias: Any, eps: float, programs: int) -> Any:
    stats = x.new_empty(x.shape[0], dtype=_accumulator(x.dtype))
    return x.new_empty(x.shape), stats, torch.empty_like(stats)


@torch.library.custom_op("roundoff::layer_norm_backward", mutates_args=())
def _backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dw_type: torch.dtype | None,
    db_type: torch.dtype | None,
    programs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    results = _backward(dy, _adjacent(x), _flat(weight), mean, rstd, dw_type, db_type, programs)
    none = [x.new_empty(0) if r is None else r for r in results]
    return none[0], none[1], none[2]


@_backward_op.register_fake
def _(
    dy: Any, x: Any, weight: Any, mean: Any, rstd: Any, dw_type: Any, db_type: Any, programs: int
) -> Any:
    sizes = [
        x.new_empty(0) if t is None else x.new_empty(x.shape[1], dtype=t)
        for t in (dw_type, db_type)
    ]
    return x.new_empty(x.shape), sizes[0], sizes[1]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, _, programs = inputs
    ctx.save_for_backward(x, weight, output[1], output[2])
    ctx.types = tuple(None if t is None else t.dtype for t in (weight, bias))
    ctx.programs = programs
    ctx.set_materialize_grads(True)


def _gradients(ctx: Any, dy: Any, dmean: Any, drstd: Any) -> Any:
    x, weight, mean, rstd = ctx.saved_tensors
    types = [t if w else None for t, w in zip(ctx.types, ctx.needs_input_grad[1:3], strict=True)]
    dx, dw, db = _backward_op(dy, x, weight, mean, rstd, *types, ctx.programs)
    return dx, None if types[0] is None else dw, None if types[1] is None else db, None, None


_forward_op.register_autograd(_gradients, setup_context=_setup)
