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
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..errors import ArgumentError, DtypeError, ShapeError
from . import _layer_norm_kernels as kernels
from ._runtime import Launch, check_device, interpreting, multiprocessors

__all__ = ["Tiling", "backward_plan", "backward_tiling", "forward_tiling", "layer_norm"]

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_WIDEST = 2**30
_MANY = 8192
_MOST = 2**31 - 1  # Triton takes a larger number as another type


class Tiling(NamedTuple):
    """How a kernel divides its rows; part of what fixes the bits of a result.

    Attributes
    ----------
    rows : int
        Rows of a tile.
    piece : int
        Columns of a piece, a power of two.
    pieces : int
        Pieces of a row; 0 where the kernel loops over chunks of `piece` columns instead.
    warps : int
        Warps of a program.
    stages : int
        Depth of the pipeline: with 2 the next tile is loaded while one is computed.
    per_sm : int
        Programs for each multiprocessor; 0 where each tile has its own.
    hold : bool
        Whether the weight stays in registers.

    Examples
    --------
    >>> from roundoff.kernels._layer_norm import backward_tiling
    >>> tiling = backward_tiling(15872, 2)
    >>> tiling.pieces * tiling.piece  # columns that are computed, padding included
    16384
    """

    rows: int
    piece: int
    pieces: int
    warps: int
    stages: int = 1
    per_sm: int = 0
    hold: bool = False

    def programs(self, tiles: int, index: int | None) -> int:
        """Programs for so many tiles on a CUDA device; None is the interpreter."""
        most = self.per_sm * multiprocessors(-1 if index is None else index)
        return min(tiles, most) if most else tiles


def _pieces(columns: int, rows: int, piece: int, *rest: Any) -> Tiling:
    return Tiling(rows, piece, -(-columns // piece), *rest)


@cache
def forward_tiling(columns: int, itemsize: int, many: bool = False) -> Tiling:
    """Launch parameters of the forward kernel for rows of `columns` elements of `itemsize` bytes.

    Measured on an H200 in float16 and float32; other types go by the bytes of a row. With `many`
    rows, more than 8192, some widths do better without a pipeline. Pieces and warps, which fix the
    order of the sums, stay the same: the bits of a row do not depend on how many others there are.

    Examples
    --------
    >>> from roundoff.kernels._layer_norm import forward_tiling
    >>> forward_tiling(8704, 2)
    Tiling(rows=1, piece=2048, pieces=5, warps=4, stages=1, per_sm=0, hold=False)
    """
    size = columns * itemsize // 2
    if size > 32768:
        return Tiling(1, 16384 // itemsize, 0, 16)
    if size <= 1024:
        piece = triton.next_power_of_2(columns)
        return Tiling(max(1, 4096 // itemsize // piece), piece, 1, 1, 1, 0, itemsize == 4)
    if itemsize == 2:
        if size <= 1536:
            return _pieces(columns, 1, 512, 1, 1, 0, True)
        if size <= 3072 or (size <= 4096 and not many):
            return _pieces(columns, 1, 1024, 4, 3, 6 if size <= 2048 else 4, True)
        if size <= 7168:
            if many:
                return _pieces(columns, 1, 1024, 4)
            return _pieces(columns, 1, 1024, 4, *((3, 3) if size <= 6144 else (4, 2)), True)
        return _pieces(columns, 1, 2048, 4)
    if itemsize == 4:
        if size <= 2048:
            return _pieces(columns, 1, 1024, 1, 1, 0, True)
        if size <= 8192:
            return _pieces(columns, 1, 1024, 2 if size <= 4096 else 4, 1, 0, True)
        if size <= 16384:
            return _pieces(columns, 1, 2048, 8, 1, 0, True)
        return _pieces(columns, 1, 2048, 16 if size <= 24576 else 8)
    return _pieces(columns, 1, 4096 // itemsize, 4)


@cache
def backward_tiling(columns: int, itemsize: int) -> Tiling:
    """Launch parameters of the backward kernel, as :func:`forward_tiling`.

    Examples
    --------
    >>> from roundoff.kernels._layer_norm import backward_tiling
    >>> backward_tiling(8704, 2)
    Tiling(rows=1, piece=2048, pieces=5, warps=8, stages=3, per_sm=1, hold=True)
    """
    size = columns * itemsize // 2
    if size > (16384 if itemsize == 2 else 24576):
        return Tiling(16, 256, 0, 4, 1, 1)
    small, large = 2048 // itemsize, 4096 // itemsize
    if size <= 1024:
        piece = triton.next_power_of_2(columns)
        rows = (4096 if itemsize == 2 else 8192) // itemsize // piece
        return Tiling(max(1, rows), piece, 1, 4, 3, 2 if itemsize == 2 else 1, True)
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
    hold = size <= (12288 if itemsize == 2 else 8192)
    return _pieces(columns, 1, large, 8, 3 if size <= 14336 else 2, 1, hold)


def backward_plan(columns: int, dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """How the backward divides a row, and the registers that its compiled kernel uses.

    Parameters
    ----------
    columns : int
        Elements of a row.
    dtype : torch.dtype
        Their type.

    Returns
    -------
    dict
        Keys: N, piece, pieces, padded (columns that are computed), rows (of a tile), warps,
        registers and spilled (32-bit words of a thread; None in the interpreter, or before such a
        row was computed in this process).

    Examples
    --------
    >>> from roundoff.kernels import backward_plan
    >>> plan = backward_plan(8704)
    >>> plan["pieces"], plan["padded"]
    (5, 10240)
    """
    tiling = backward_tiling(columns, dtype.itemsize)
    row: dict[str, Any] = {"N": columns, "piece": tiling.piece, "pieces": tiling.pieces}
    row |= {"padded": tiling.piece * tiling.pieces, "rows": tiling.rows, "warps": tiling.warps}
    row |= {"registers": None, "spilled": None}
    index = -1 if interpreting() else torch.cuda.current_device()
    widths = (columns, columns, columns)
    kernel = _backward_launch(*widths, *(dtype,) * 3, True, False, index).launch.compiled
    if kernel is not None:
        row |= {"registers": kernel.n_regs, "spilled": kernel.n_spills}
    return row


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
    >>> from roundoff.kernels import layer_norm
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> layer_norm(torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=device), 4, eps=0.0).cpu()
    tensor([[-1.3416, -0.4472,  0.4472,  1.3416]])
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    call = (shape, eps, programs, *map(_like, (x, weight, bias)))
    if torch.compiler.is_compiling():
        _check(*call)
        columns = math.prod(shape)
        flat = [None if t is None else t.reshape(columns) for t in (weight, bias)]
        return _forward_op(x.reshape(-1, columns), *flat, eps, programs or 0)[0].view(x.shape)
    case = _case(*call)
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return _LayerNorm.apply(x, weight, bias, case)
    return case.forward(x, weight, bias, False)[0]


#: What of a tensor decides how it is processed: shape, strides, type, device.
Like = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def _like(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _check(
    shape: tuple[int, ...], eps: float, programs: int | None, x: Like, weight: Like | None,
    bias: Like | None,
) -> None:  # fmt: skip
    x_shape, _, _, device = x
    if not shape or x_shape[-len(shape) :] != shape:
        raise ShapeError(
            "the last dimensions of x are not normalized_shape",
            got=f"x {tuple(x_shape)}, normalized_shape {shape}",
            expected="x of shape (…, *normalized_shape)",
        )
    if not 1 <= math.prod(shape) <= _WIDEST:
        raise ShapeError(
            "a row has no elements or too many", got=shape, expected=f"1 to {_WIDEST} elements"
        )
    for name, like in (("x", x), ("weight", weight), ("bias", bias)):
        if like is None:
            continue
        if like[2] not in _DTYPES:
            raise DtypeError(
                f"{name} has a type that layer_norm does not take",
                got=str(like[2]),
                expected="float16, bfloat16, float32 or float64",
            )
        if like is not x and like[0] != shape:
            raise ShapeError(f"{name} has another shape", got=tuple(like[0]), expected=f"{shape}")
        if like[3] != device:
            raise ArgumentError(
                f"{name} is on another device than x", got=str(like[3]), expected=str(device)
            )
    if not eps >= 0:
        raise ArgumentError("eps must not be negative", got=eps, expected="0 or more")
    if programs is not None and programs < 1:
        raise ArgumentError("programs out of range", got=programs, expected="at least 1")
    check_device(device, "x")


def _rows(x: torch.Tensor, columns: int) -> torch.Tensor:
    """x where it is contiguous, else its rows with adjacent elements; copied only where needed."""
    if x.is_contiguous():
        return x
    rows = x.reshape(-1, columns)
    return rows if rows.stride(1) == 1 or columns == 1 else rows.contiguous()


def _stride(rows: torch.Tensor, columns: int) -> int:
    """Elements between the beginnings of two rows, of what :func:`_rows` gives."""
    return columns if rows.is_contiguous() else rows.stride(0)


def _flat(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _type(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, case: Any
    ) -> torch.Tensor:
        y, rows, stats = case.forward(x, weight, bias, True)
        ctx.save_for_backward(rows, weight, stats)
        ctx.case = case
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        # once_differentiable takes time, and is only needed for double backward.
        return (_refusing if torch.is_grad_enabled() else _gradients)(ctx, dy)


def _gradients(ctx: Any, dy: torch.Tensor) -> Any:
    rows, weight, stats = ctx.saved_tensors
    _, needs_dw, needs_db, _ = ctx.needs_input_grad
    return *ctx.case.backward(dy, rows, weight, stats, needs_dw, needs_db), None


_refusing = torch.autograd.function.once_differentiable(_gradients)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _constant(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32


class _Case:
    """What calls with the same metadata share: launch parameters and kernels, chosen once.

    Each call only reads the metadata of its tensors, looks its case up, and launches.
    """

    def __init__(
        self, shape: tuple[int, ...], eps: float, programs: int | None, x: Like,
        weight: Like | None, bias: Like | None,
    ) -> None:  # fmt: skip
        _check(shape, eps, programs, x, weight, bias)
        self.shape, self.columns, self.programs = shape, math.prod(shape), programs or 0
        self.x_shape, _, self.dtype, device = x
        self.w_type, self.b_type = (None if t is None else t[2] for t in (weight, bias))
        meta = torch.empty_strided(*x[:2], dtype=x[2], device="meta")
        self.plain = meta.is_contiguous()
        stride = _stride(_rows(meta, self.columns), self.columns)
        self.m = math.prod(self.x_shape) // self.columns
        # With strides given an allocation takes half the time of x.new_empty.
        self.stats = partial(
            torch.empty_strided, (2, self.m), (self.m, 1), dtype=_accumulator(self.dtype),
            device=device,
        )  # fmt: skip
        many = self.m > _MANY
        self.launches = [
            _forward_launch(
                self.columns, stride, self.dtype, self.w_type, self.b_type, float(eps), keep,
                many, self.m > _MOST, -1 if device.index is None else device.index,
            )
            for keep in (False, True)
        ]  # fmt: skip
        tiling = forward_tiling(self.columns, self.dtype.itemsize, many)
        if tiling.pieces:
            tiles = -(-self.m // tiling.rows)
            self.grid = tiling.programs(tiles, device.index), 1
            self.counts: tuple[int, ...] = (self.m, self.columns, stride, tiles, 0)
        else:
            self.grid = self.m, 1
            self.counts = (self.m, self.columns, stride)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """y of x's shape, x as rows, and with `keep` mean and rstd (2, M) of its M rows."""
        if self.plain:
            rows, y = x, torch.empty_like(x)
        else:
            rows, y = _rows(x, self.columns), x.new_empty(self.x_shape)
        stats = self.stats() if keep else y
        if self.m:
            w = rows if weight is None else weight.contiguous()
            b = rows if bias is None else bias.contiguous()
            self.launches[keep](self.grid, (rows, w, b, y, stats), self.counts)
        return y, rows, stats

    def backward(
        self, dy: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor | None,
        stats: torch.Tensor, needs_dw: bool, needs_db: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        """dx, dw and db in the shapes of x, weight and bias; None where one is not needed."""
        dx, dw, db = _backward(
            dy, rows, weight, stats, self.columns,
            self.w_type if needs_dw else None, self.b_type if needs_db else None, self.programs,
        )  # fmt: skip
        if not self.plain:
            dx = dx.view(self.x_shape)
        if len(self.shape) > 1:
            dw, db = (None if t is None else t.view(self.shape) for t in (dw, db))
        return dx, dw, db


_case = lru_cache(4096)(_Case)


def _forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """y, and mean and rstd (2, M), of rows x (M, N)."""
    case = _case((x.shape[1],), eps, None, *map(_like, (x, weight, bias)))
    y, _, stats = case.forward(x, weight, bias, True)
    return y, stats


@lru_cache(4096)
def _forward_launch(
    n: int, stride: int, dtype: torch.dtype, w_type: torch.dtype | None,
    b_type: torch.dtype | None, eps: float, keep: bool, many: bool, wide_counts: bool, index: int,
) -> Launch:  # fmt: skip
    """The forward for rows of one width, stride and type."""
    tiling, kind = forward_tiling(n, dtype.itemsize, many), _constant(dtype)
    flags = (w_type is not None, b_type is not None, keep)
    if not tiling.pieces:
        wide = (eps, kind, tiling.piece, *flags)
        return Launch(kernels.forward_wide, index, wide, num_warps=tiling.warps)
    short = dtype.itemsize == 2
    opaque = short and not interpreting()
    constants = (eps, kind, *tiling[:3], tiling.stages, tiling.hold, *flags, not short, opaque)
    return Launch(kernels.forward, index, constants, num_warps=tiling.warps)


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    columns: int,
    dw_type: torch.dtype | None,
    db_type: torch.dtype | None,
    programs: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """dx of x's shape, and dweight and dbias (N,) of the types asked for, None where none is."""
    rows, dy = _rows(x, columns), _rows(dy, columns)
    dx = torch.empty_like(x) if rows is x else x.new_empty(x.shape)
    m = x.numel() // columns
    if m == 0:
        zeros = [None if t is None else x.new_zeros(columns, dtype=t) for t in (dw_type, db_type)]
        return dx, zeros[0], zeros[1]
    w = _flat(weight)
    sums = dw_type is not None or db_type is not None
    first = _backward_launch(
        columns, _stride(rows, columns), _stride(dy, columns), x.dtype, dy.dtype, _type(w), sums,
        m > _MOST, x.get_device(),
    )  # fmt: skip
    tiles = -(-m // first.rows)
    count = min(tiles, programs or first.most)
    part = stats.new_empty((2, count, columns)) if sums else stats
    first.call(m, tiles, count, (rows, dy, rows if w is None else w, stats, dx, part))
    if not sums:
        return dx, None, None
    dw = x.new_empty(columns, dtype=dw_type or db_type)
    db = (
        torch.empty_like(dw)
        if dw_type == db_type
        else x.new_empty(columns, dtype=db_type or dw_type)
    )
    _second_stage(part, dw, db)
    return dx, None if dw_type is None else dw, None if db_type is None else db


class _Backward(NamedTuple):
    """The first stage for rows of one kind: rows of a tile, most programs, and the call.

    The call is a function of the numbers of rows, tiles and programs, and (x, dy, w, stats, dx,
    part).
    """

    rows: int
    most: int
    call: Callable[[int, int, int, tuple[torch.Tensor, ...]], None]
    launch: Launch


@lru_cache(4096)
def _backward_launch(
    n: int, stride_x: int, stride_dy: int, dtype: torch.dtype, dy_type: torch.dtype,
    w_type: torch.dtype | None, sums: bool, wide_counts: bool, index: int,
) -> _Backward:  # fmt: skip
    tiling, kind = backward_tiling(n, dtype.itemsize), _constant(dtype)
    weighted, strides = w_type is not None, (stride_x, stride_dy)
    most = multiprocessors(index) * tiling.per_sm
    if not tiling.pieces:
        add = Launch(kernels.backward_sums, index, (kind, 4096, weighted), num_warps=16)
        shape = (kind, tiling.rows, tiling.piece, weighted, sums)
        finish = Launch(kernels.backward_wide, index, shape, num_warps=tiling.warps)

        def twice(m: int, tiles: int, count: int, tensors: tuple[torch.Tensor, ...]) -> None:
            x, dy, w, stats, dx, part = tensors
            of_rows = torch.empty_like(stats)
            add((m, 1), (x, dy, w, stats, of_rows), (m, n, *strides))
            grid = (count, -(-n // tiling.piece))
            finish(grid, (x, dy, w, stats, of_rows, dx, part), (m, n, *strides, tiles))

        return _Backward(tiling.rows, most, twice, finish)
    # A single column is its own mean: nothing would remain but the rounding of the difference.
    short, compiled = dtype.itemsize == 2 and n > 1, not interpreting()
    # Whether each thread has the same columns in every row of a tile.
    shared = tiling.rows == 1 or tiling.piece * dtype.itemsize >= tiling.warps * 512
    early = compiled and _early_launch(index)
    constants = (
        kind, *tiling[:3], tiling.stages, tiling.hold, shared, short, weighted, sums,
        compiled and dtype.itemsize == 2, early,
    )  # fmt: skip
    # So many registers that per_sm programs fit on a multiprocessor.
    limit = min(65536 // (tiling.per_sm * tiling.warps * 32), 255) if tiling.per_sm > 1 else None
    options = {"num_warps": tiling.warps, "maxnreg": limit}
    launch = Launch(kernels.backward, index, constants, **options)

    def once(m: int, tiles: int, count: int, tensors: tuple[torch.Tensor, ...]) -> None:
        launch((count, 1), tensors, (m, n, *strides, tiles, 0))

    return _Backward(tiling.rows, most, once, launch)


@cache
def _early_launch(index: int) -> bool:
    """Whether a kernel may be launched before the one it depends on has ended (Hopper on)."""
    return torch.cuda.get_device_capability(index) >= (9, 0)


def second_stage_tiling(count: int, columns: int) -> tuple[int, int, int]:
    """Partial sums and columns of a tile of the second stage, and its warps."""
    # The interpreter is quicker with few large tiles; the order of the sum stays the same.
    return (
        min(triton.next_power_of_2(count), 64),
        min(triton.next_power_of_2(columns), 1024 if interpreting() else 16),
        4,
    )


def _second_stage(part: torch.Tensor, dw: torch.Tensor, db: torch.Tensor) -> None:
    _, count, n = part.shape
    columns, launch = _second_launch(
        min(count, 64), n, part.dtype, dw.dtype, db.dtype, part.get_device()
    )
    launch((-(-n // columns), 2), (part, dw, db), (count, n))


@lru_cache(4096)
def _second_launch(
    count: int, n: int, dtype: torch.dtype, dw_type: torch.dtype, db_type: torch.dtype, index: int
) -> tuple[int, Launch]:
    rows, columns, warps = second_stage_tiling(count, n)
    early = not interpreting() and _early_launch(index)
    options = {"launch_pdl": True} if early else {}
    constants = (_constant(dtype), rows, columns, early)
    return columns, Launch(kernels.second_stage, index, constants, num_warps=warps, **options)


# Under torch.compile the kernels are two opaque operators with known output shapes.


@torch.library.custom_op("roundoff::layer_norm_forward", mutates_args=())
def _forward_op(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    programs: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(x, weight, bias, eps)


@_forward_op.register_fake
def _(x: Any, weight: Any, bias: Any, eps: float, programs: int) -> Any:
    return x.new_empty(x.shape), x.new_empty((2, x.shape[0]), dtype=_accumulator(x.dtype))


@torch.library.custom_op("roundoff::layer_norm_backward", mutates_args=())
def _backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    dw_type: torch.dtype | None,
    db_type: torch.dtype | None,
    programs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    results = _backward(dy, x, weight, stats, x.shape[1], dw_type, db_type, programs)
    none = [x.new_empty(0) if r is None else r for r in results]
    return none[0], none[1], none[2]


@_backward_op.register_fake
def _(dy: Any, x: Any, weight: Any, stats: Any, dw_type: Any, db_type: Any, programs: int) -> Any:
    sizes = [
        x.new_empty(0) if t is None else x.new_empty(x.shape[1], dtype=t)
        for t in (dw_type, db_type)
    ]
    return x.new_empty(x.shape), sizes[0], sizes[1]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, _, programs = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.types = _type(weight), _type(bias)
    ctx.programs = programs


def _op_gradients(ctx: Any, dy: Any, dstats: Any) -> Any:
    x, weight, stats = ctx.saved_tensors
    types = [t if w else None for t, w in zip(ctx.types, ctx.needs_input_grad[1:3], strict=True)]
    dx, dw, db = _backward_op(dy, x, weight, stats, *types, ctx.programs)
    return dx, None if types[0] is None else dw, None if types[1] is None else db, None, None


_forward_op.register_autograd(_op_gradients, setup_context=_setup)
