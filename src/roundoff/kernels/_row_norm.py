r"""How the normalisations of rows run: checked, divided into tiles, launched, differentiated.

The sums over rows are taken in two stages, without locks or atomics of values: each program adds
its own rows in float32, a second kernel adds the programs' partial sums, both in a fixed order.
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
from . import _layer_norm_wide as wide
from ._norm_tilings import CHUNKS, Tiling, backward_tiling, forward_tiling, second_stage_tiling
from ._runtime import (
    ceil_div,
    check_device,
    check_tensor,
    interpreting,
    multiprocessors,
    power_of_2,
    run,
)

__all__ = ["LAYER", "RMS", "Form", "accumulator", "forward_of", "gradients_of", "norm"]

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_WIDEST = 2**30
_MANY = 8192
_MOST_PROGRAMS = 2**20

Tensor = torch.Tensor
Optional = torch.Tensor | None


class Form(NamedTuple):
    """What is computed of a row.

    Attributes
    ----------
    name : str
        The public function, for errors.
    centred : bool
        Layer normalisation; else RMSNorm.
    """

    name: str
    centred: bool


LAYER = Form("layer_norm", True)
RMS = Form("rms_norm", False)


def shape_of(normalized_shape: Any) -> tuple[int, ...]:
    """The last dimensions, as a tuple."""
    if isinstance(normalized_shape, int):
        return (normalized_shape,)
    try:
        return tuple(normalized_shape)
    except TypeError as error:
        raise ShapeError(
            "normalized_shape", got=repr(normalized_shape), expected="a whole number, or several"
        ) from error


def check(
    form: Form,
    shape: tuple[int, ...],
    eps: Any,
    programs: Any,
    tensors: dict[str, Optional],
) -> None:
    """Raise for arguments that do not fit; *tensors* are x, weight and bias by name."""
    if not torch.compiler.is_compiling():
        for name, tensor in tensors.items():
            if tensor is not None or name == "x":
                check_tensor(tensor, name)
    if not all(isinstance(n, int) for n in shape):
        raise ShapeError("normalized_shape", got=repr(shape), expected="whole numbers")
    if not isinstance(eps, (int, float)):
        raise ArgumentError("eps", got=type(eps).__name__, expected="a number")
    if not isinstance(programs, int | None):
        raise ArgumentError("programs", got=repr(programs), expected="a whole number")
    x = tensors["x"]
    assert x is not None
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
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in _DTYPES:
            raise DtypeError(
                f"{name} has a type that {form.name} does not take",
                got=str(tensor.dtype),
                expected="float16, bfloat16, float32 or float64",
            )
        if name != "x" and tensor.shape != shape:
            raise ShapeError(
                f"{name} has another shape", got=tuple(tensor.shape), expected=f"{shape}"
            )
        if tensor.device != x.device:
            raise ArgumentError(
                f"{name} is on another device than x",
                got=str(tensor.device),
                expected=str(x.device),
            )
    if not eps >= 0:
        raise ArgumentError("eps must not be negative", got=eps, expected="0 or more")
    if programs is not None and not 1 <= programs <= _MOST_PROGRAMS:
        raise ArgumentError(
            "programs out of range", got=programs, expected=f"at least 1, at most {_MOST_PROGRAMS}"
        )
    check_device(x.device, "x")


def _rows(x: Tensor, columns: int) -> Tensor:
    """The rows of x, with adjacent elements; copied only where needed."""
    rows = x.reshape(-1, columns)
    return rows if rows.stride(1) == 1 or columns == 1 else rows.contiguous()


def _stride(rows: Tensor) -> int:
    """Elements between the beginnings of two rows, of what :func:`_rows` gives."""
    return rows.shape[1] if rows.is_contiguous() else rows.stride(0)


def _type(tensor: Optional) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type of sums: float32, for float64 float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _constant(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32


@cache
def _early_launch(index: int) -> bool:
    """Whether a kernel may be launched before the one it depends on has ended (Hopper on)."""
    return not interpreting() and torch.cuda.get_device_capability(index) >= (9, 0)


def _limited(tiling: Tiling) -> dict[str, Any]:
    """Options: so many registers that per_sm programs fit on a multiprocessor."""
    limit = min(65536 // (max(1, tiling.per_sm) * tiling.warps * 32) // 8 * 8, 255)
    return {"num_warps": tiling.warps, "maxnreg": limit if tiling.per_sm > 1 else None}


def forward_of(
    form: Form, x: Tensor, weight: Optional, bias: Optional, eps: float, keep: bool = True
) -> tuple[Tensor, Tensor]:
    """y of rows x (M, N); with `keep` mean and rstd (2, M), of RMSNorm rstd (1, M)."""
    m, n = x.shape
    rows = _rows(x, n)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    stats = x.new_empty((1 + form.centred, m), dtype=accumulator(x.dtype)) if keep else y
    if not m:
        return y, stats
    w = rows if weight is None else weight.contiguous()
    b = rows if bias is None else bias.contiguous()
    tiling = forward_tiling(n, x.itemsize, m > _MANY, not form.centred)
    common = (rows, w, b, y, stats, m, n, _stride(rows))
    kind, flags = _constant(x.dtype), (weight is not None, bias is not None, keep)
    constants: tuple[Any, ...]
    if not tiling.pieces:
        constants = (float(eps), kind, tiling.piece, *flags, form.centred)
        run(kernels.forward_wide, (m, 1), *common, *constants, num_warps=tiling.warps)
        return y, stats
    tiles, short = ceil_div(m, tiling.rows), x.itemsize == 2
    opaque = short and not interpreting()
    sizes = (*tiling[:3], tiling.stages, tiling.hold)
    constants = (float(eps), kind, *sizes, *flags, not short, opaque, tiling.again, form.centred)
    # Wide rows take all registers that they may have, and then fewer programs fit.
    options = _limited(tiling) if n * x.itemsize >= 32768 else {"num_warps": tiling.warps}
    grid = (tiling.programs(tiles, x.get_device()), 1)
    run(kernels.forward, grid, *common, tiles, 0, *constants, **options)
    return y, stats


def gradients_of(
    form: Form,
    dy: Tensor,
    x: Tensor,
    weight: Optional,
    stats: Tensor,
    dw_type: torch.dtype | None,
    db_type: torch.dtype | None,
    programs: int,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Optional, Optional]:
    """dx of x (M, N), dweight and dbias (N,) of the types asked for, None where none is."""
    (m, n), index = x.shape, x.get_device()
    rows, dy = _rows(x, n), _rows(dy, n)
    dx = x.new_empty(x.shape)
    dw, db = (None if t is None else x.new_empty(n, dtype=t) for t in (dw_type, db_type))
    if not m:
        return dx, None if dw is None else dw.zero_(), None if db is None else db.zero_()
    tiling = tiling or backward_tiling(n, x.itemsize)
    if index >= 0 and tiling.shares > tiling.per_sm * multiprocessors(index):
        tiling = CHUNKS  # the device has no room for all the programs that share a row
    tiles, partials = ceil_div(m, tiling.rows), dw_type is not None or db_type is not None
    groups = tiling.programs(tiles, index)
    count = min(tiles, programs) if programs else groups
    part = stats
    if partials:
        part = x.new_empty((1 + form.centred, count, n), dtype=accumulator(x.dtype))
    w, weighted = (rows, False) if weight is None else (weight.contiguous(), True)
    kind, compiled = _constant(x.dtype), not interpreting()
    common: tuple[Any, ...] = (m, n, _stride(rows), _stride(dy))
    # A single column is its own mean: nothing would remain but the rounding of the difference.
    short = x.itemsize == 2 and n > 1
    opaque = compiled and x.itemsize == 2
    constants: tuple[Any, ...]
    if not tiling.pieces:
        sums, grid = torch.empty_like(stats), (count, ceil_div(n, tiling.piece))
        constants = (*common, kind, 4096, weighted, form.centred)
        run(kernels.backward_sums, (m, 1), rows, dy, w, stats, sums, *constants, num_warps=16)
        constants = (*common, tiles, kind, tiling.rows, tiling.piece, weighted, partials)
        tensors = (rows, dy, w, stats, sums, dx, part)
        warps = tiling.warps
        run(kernels.backward_wide, grid, *tensors, *constants, form.centred, num_warps=warps)
    elif tiling.shares > 1:
        groups = min(groups, count)
        shares = x.new_full((m, tiling.shares), -1, dtype=torch.int64)  # no share yet
        tensors = (rows, dy, w, stats, dx, part, shares)
        lines = power_of_2(ceil_div(tiling.piece * tiling.pieces * x.itemsize, 128))
        constants = (*common, groups, count, 0, *tiling[1:3], tiling.shares)
        constants += (lines if compiled else 0, tiling.stages, tiling.hold, short, weighted)
        constants += (partials, opaque, form.centred, compiled)
        options = _limited(tiling) | {"launch_cooperative_grid": compiled}
        for finish in (True,) if compiled else (False, True):
            grid = (groups * tiling.shares, 1)
            run(wide.backward_shared, grid, *tensors, *constants, finish, **options)
    else:
        # Whether each thread has the same columns in every row of a tile.
        shared = tiling.rows == 1 or tiling.piece * x.itemsize >= tiling.warps * 512
        constants = (*common, tiles, 0, kind, *tiling[:3], tiling.stages, tiling.hold, shared)
        constants += (short, weighted, partials, opaque, _early_launch(index), form.centred)
        options = _limited(tiling)
        run(kernels.backward, (count, 1), rows, dy, w, stats, dx, part, *constants, **options)
    if partials:
        # Where the kernel adds two and nobody wants the other, that needs a place.
        lone = form.centred and (dw is None or db is None)
        spare = x.new_empty(n, dtype=dw_type or db_type) if lone else dw
        targets = (spare if t is None else t for t in (dw, db))
        height, columns, warps = second_stage_tiling(count, n)
        early, grid = _early_launch(index), (ceil_div(n, columns), 1 + form.centred)
        options = {"num_warps": warps} | ({"launch_pdl": True} if early else {})
        constants = (count, n, kind, height, columns, early)
        run(kernels.second_stage, grid, part, *targets, *constants, **options)
    return dx, dw, db


class Normalised(torch.autograd.Function):
    """(x, weight, bias, form, shape, eps, programs) -> y."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Optional,
        bias: Optional,
        form: Form,
        shape: tuple[int, ...],
        eps: float,
        programs: int,
    ) -> Tensor:
        rows = _rows(x, math.prod(shape))
        y, stats = forward_of(form, rows, weight, bias, eps)
        ctx.save_for_backward(rows, weight, stats)
        ctx.of = form, x.shape, shape, _type(weight), _type(bias), programs
        return y.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        rows, weight, stats = ctx.saved_tensors
        form, x_shape, shape, dw_type, db_type, programs = ctx.of
        _, needs_dw, needs_db, *_ = ctx.needs_input_grad
        types = dw_type if needs_dw else None, db_type if needs_db else None
        dx, dw, db = gradients_of(form, dy, rows, weight, stats, *types, programs)
        dw, db = (None if t is None else t.view(shape) for t in (dw, db))
        return dx.view(x_shape), dw, db, None, None, None, None


def norm(
    form: Form,
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Optional,
    bias: Optional,
    eps: Any,
    programs: int | None,
) -> Tensor:
    """A normalisation of the last dimensions, as the public functions describe it."""
    shape = shape_of(normalized_shape)
    check(form, shape, eps, programs, {"x": x, "weight": weight, "bias": bias})
    compiling = torch.compiler.is_compiling()
    parameters = [t for t in (x, weight, bias) if t is not None]
    if not compiling and torch.is_grad_enabled() and any(t.requires_grad for t in parameters):
        return Normalised.apply(x, weight, bias, form, shape, eps, programs or 0)
    rows = x.reshape(-1, math.prod(shape))
    if compiling:
        flat = [None if t is None else t.reshape(-1) for t in (weight, bias)]
        return _forward_op(rows, *flat, eps, programs or 0, form.centred)[0].view(x.shape)
    return forward_of(form, rows, weight, bias, eps, keep=False)[0].view(x.shape)


# Under torch.compile the kernels are two opaque operators with known output shapes.


@torch.library.custom_op("roundoff::norm_forward", mutates_args=())
def _forward_op(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    programs: int,
    centred: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return forward_of(LAYER if centred else RMS, x, weight, bias, eps)


@_forward_op.register_fake
def _(x: Any, weight: Any, bias: Any, eps: float, programs: int, centred: bool) -> Any:
    stats = x.new_empty((1 + centred, x.shape[0]), dtype=accumulator(x.dtype))
    return x.new_empty(x.shape), stats


@torch.library.custom_op("roundoff::norm_backward", mutates_args=())
def _backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    dw_type: torch.dtype | None,
    db_type: torch.dtype | None,
    programs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    form = LAYER if len(stats) == 2 else RMS
    results = gradients_of(form, dy, x, weight, stats, dw_type, db_type, programs)
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
    x, weight, bias, _, ctx.programs, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.types = [_type(weight), _type(bias)]


def _op_gradients(ctx: Any, dy: Any, dstats: Any) -> Any:
    x, weight, stats = ctx.saved_tensors
    types = [t if w else None for t, w in zip(ctx.types, ctx.needs_input_grad[1:3], strict=True)]
    dx, dw, db = _backward_op(dy, x, weight, stats, *types, ctx.programs)
    dw, db = (None if t is None else d for t, d in zip(types, (dw, db), strict=True))
    return dx, dw, db, None, None, None


_forward_op.register_autograd(_op_gradients, setup_context=_setup)
