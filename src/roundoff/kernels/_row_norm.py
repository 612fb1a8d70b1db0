r"""How the normalisations of rows run: kernels chosen once for a kind of call, then launched.

A call looks its :class:`Case` up by the metadata of its tensors: shapes, types, devices, strides.
The case has the launches with their grids and counts: what remains is to allocate and to launch.

The sums over rows are taken in two stages, without locks or atomics of values: each program adds
its own rows in float32, a second kernel adds the programs' partial sums, both in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton

from ..errors import ArgumentError, DtypeError, ShapeError
from . import _layer_norm_kernels as kernels
from . import _layer_norm_wide as wide
from ._norm_tilings import CHUNKS, Tiling, backward_tiling, forward_tiling, second_stage_tiling
from ._runtime import Launch, check_device, check_tensor, interpreting, multiprocessors

__all__ = [
    "LAYER",
    "RMS",
    "Case",
    "Form",
    "case_of",
    "forward_of",
    "gradients_of",
    "norm",
    "normalised",
]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST = 2**30
_MANY = 8192
_MOST_PROGRAMS = 2**20
_MOST = 2**31 - 1  # Triton takes a larger number as another type

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


#: What of a tensor decides how it is processed: shape, strides, type, device.
Like = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


def _like(tensor: Optional) -> Any:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def shape_of(normalized_shape: Any) -> tuple[int, ...]:
    """The last dimensions, as a tuple."""
    try:
        return tuple(normalized_shape)
    except TypeError as error:
        raise ShapeError(
            "normalized_shape", got=repr(normalized_shape), expected="a whole number, or several"
        ) from error


def refuse(shape: tuple[Any, ...], eps: Any, programs: Any, **tensors: Any) -> None:
    """After an exception from further inside: name the argument that is of another kind.

    Raises
    ------
    ArgumentError, ShapeError
        There is one.
    """
    for name, value in tensors.items():
        if value is not None or name == "x":
            check_tensor(value, name)
    if not all(isinstance(n, int) for n in shape):
        raise ShapeError("normalized_shape", got=repr(shape), expected="whole numbers")
    if not isinstance(eps, (int, float)):
        raise ArgumentError("eps", got=type(eps).__name__, expected="a number")
    if not isinstance(programs, int | None):
        raise ArgumentError("programs", got=repr(programs), expected="a whole number")


def check(
    form: Form,
    shape: tuple[int, ...],
    eps: float,
    programs: int | None,
    x: Like,
    others: dict[str, Like | None],
) -> None:
    """Raise for arguments that do not fit; *others* are weight and bias by name."""
    x_shape, _, _, device = x
    refuse(shape, eps, programs)
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
    for name, like in {"x": x, **others}.items():
        if like is None:
            continue
        if like[2] not in _DTYPES:
            raise DtypeError(
                f"{name} has a type that {form.name} does not take",
                got=str(like[2]),
                expected="float16, bfloat16 or float32",
                hint=f"torch.nn.functional.{form.name} for float64",
            )
        expected = tuple(x_shape) if name == "x" else shape
        if tuple(like[0]) != expected:
            raise ShapeError(
                f"{name} has another shape", got=tuple(like[0]), expected=f"{expected}"
            )
        if like[3] != device:
            raise ArgumentError(
                f"{name} is on another device than x", got=str(like[3]), expected=str(device)
            )
    if not eps >= 0:
        raise ArgumentError("eps must not be negative", got=eps, expected="0 or more")
    if programs is not None and not 1 <= programs <= _MOST_PROGRAMS:
        raise ArgumentError(
            "programs out of range", got=programs, expected=f"at least 1, at most {_MOST_PROGRAMS}"
        )
    check_device(device, "x")


def _rows(x: Tensor, columns: int) -> Tensor:
    """x where it is contiguous, else its rows with adjacent elements; copied only where needed."""
    if x.is_contiguous():
        return x
    rows = x.reshape(-1, columns)
    return rows if rows.stride(1) == 1 or columns == 1 else rows.contiguous()


def _stride(rows: Tensor, columns: int) -> int:
    """Elements between the beginnings of two rows, of what :func:`_rows` gives."""
    return columns if rows.is_contiguous() else rows.stride(0)


def _type(tensor: Optional) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


@cache
def _early_launch(index: int) -> bool:
    """Whether a kernel may be launched before the one it depends on has ended (Hopper on).

    Without a device a kernel is compiled ahead of time, for Hopper.
    """
    return index < 0 or torch.cuda.get_device_capability(index) >= (9, 0)


def _empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """An allocation; with strides given it takes half the time of ``x.new_empty``."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


def _index(device: torch.device) -> int:
    return -1 if device.index is None else device.index


def _limited(tiling: Tiling) -> dict[str, Any]:
    """Options: so many registers that per_sm programs fit on a multiprocessor."""
    limit = min(65536 // (max(1, tiling.per_sm) * tiling.warps * 32) // 8 * 8, 255)
    return {"num_warps": tiling.warps, "maxnreg": limit if tiling.per_sm > 1 else None}


# --- forward --------------------------------------------------------------------------------------


@lru_cache(4096)
def _forward_launch(
    form: Form,
    tiling: Tiling,
    n: int,
    stride: int,
    dtype: torch.dtype,
    w_type: torch.dtype | None,
    b_type: torch.dtype | None,
    eps: float,
    keep: bool,
    wide_counts: bool,
    index: int,
) -> Launch:
    """The forward for rows of one width, stride and type."""
    flags = (w_type is not None, b_type is not None, keep)
    short = dtype.itemsize == 2
    opaque = short and not interpreting()
    if not tiling.pieces:
        constants: tuple[Any, ...] = (eps, tiling.piece, *flags, form.centred)
        return Launch(kernels.forward_wide, index, constants, num_warps=tiling.warps)
    constants = (
        eps,
        *tiling[:3],
        tiling.stages,
        tiling.hold,
        *flags,
        not short,
        opaque,
        tiling.again,
        form.centred,
    )
    # Wide rows take all registers that they may have, and then fewer programs fit.
    wide_row = n * dtype.itemsize >= 32768
    options = _limited(tiling) if wide_row else {"num_warps": tiling.warps}
    return Launch(kernels.forward, index, constants, **options)


class Case:
    """What calls with the same metadata share: launch parameters and kernels, chosen once."""

    def __init__(
        self,
        form: Form,
        shape: tuple[int, ...],
        eps: float,
        programs: int | None,
        x: Like,
        weight: Like | None,
        bias: Like | None,
    ) -> None:
        others = {"weight": weight, "bias": bias}
        check(form, shape, eps, programs, x, others)
        self.form, self.shape, self.columns = form, shape, math.prod(shape)
        self.programs = programs or 0
        self.x_shape, _, self.dtype, self.device = x
        self.w_type, self.b_type = (None if t is None else t[2] for t in (weight, bias))
        meta = torch.empty_strided(*x[:2], dtype=x[2], device="meta")
        self.plain = meta.is_contiguous()
        stride = _stride(_rows(meta, self.columns), self.columns)
        self.m = math.prod(self.x_shape) // self.columns
        self.stats = _empty((1 + form.centred, self.m), torch.float32, self.device)
        self.gradients: dict[Any, Backward] = {}
        index, itemsize = _index(self.device), self.dtype.itemsize
        tiling = forward_tiling(self.columns, itemsize, self.m > _MANY, not form.centred)
        kind = (self.columns, stride, self.dtype, self.w_type, self.b_type, float(eps))
        many = self.m > _MOST
        self.launches = [
            _forward_launch(form, tiling, *kind, keep, many, index) for keep in (False, True)
        ]
        tiles = -(-self.m // tiling.rows)
        counts: tuple[Any, ...] = (self.m, self.columns, stride)
        groups = tiling.programs(tiles, index)
        if not tiling.pieces:
            self.grid = self.m, 1
        else:
            self.grid, counts = (groups, 1), (*counts, tiles, 0)
        self.counts = counts

    def forward(
        self, x: Tensor, weight: Optional, bias: Optional, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """y of x's shape; x as rows; with `keep` the statistics."""
        if self.plain:
            rows, y = x, torch.empty_like(x)
        else:
            rows, y = _rows(x, self.columns), x.new_empty(self.x_shape)
        stats = self.stats() if keep else y
        w = rows if weight is None else weight.contiguous()
        b = rows if bias is None else bias.contiguous()
        if self.m:
            self.launches[keep](self.grid, (rows, w, b, y, stats), self.counts)
        return y, rows, stats

    def backward(
        self,
        dy: Tensor,
        rows: Tensor,
        weight: Optional,
        stats: Tensor,
        needs_dw: bool,
        needs_db: bool,
    ) -> tuple[Tensor, Optional, Optional]:
        """dx, dw and db in the shapes of x, weight and bias; None where one is not needed."""
        contiguous = dy.is_contiguous() and rows.is_contiguous()
        if not contiguous:
            dy, rows = _rows(dy, self.columns), _rows(rows, self.columns)
        key = (dy.dtype, needs_dw, needs_db, contiguous or (dy.stride(), rows.stride()))
        call = self.gradients.get(key)
        if call is None:
            call = self.gradients[key] = _backward_of(
                self.form,
                self.x_shape,
                self.columns,
                _stride(rows, self.columns),
                _stride(dy, self.columns),
                self.dtype,
                dy.dtype,
                self.w_type,
                self.w_type if needs_dw else None,
                self.b_type if needs_db else None,
                self.programs,
                self.device,
                None,
            )
        dx, dw, db = call(dy, rows, weight, stats)
        if len(self.shape) > 1:
            dw, db = (None if t is None else t.view(self.shape) for t in (dw, db))
        return dx, dw, db


_cases: dict[Any, Case] = {}


def case_of(
    form: Form,
    shape: tuple[int, ...],
    eps: float,
    programs: int | None,
    x: Tensor,
    weight: Optional,
    bias: Optional,
) -> Case:
    """The case of a call. Parameters are made contiguous where they are not: no key has strides."""
    try:
        key = (
            form,
            shape,
            eps,
            programs,
            type(x),
            x.shape,
            x.dtype,
            x.device,
            x.layout,
            x.is_contiguous() or x.stride(),
            None
            if weight is None
            else (type(weight), weight.shape, weight.dtype, weight.device, weight.layout),
            None
            if bias is None
            else (type(bias), bias.shape, bias.dtype, bias.device, bias.layout),
        )
        case = _cases.get(key)
    except (AttributeError, TypeError, RuntimeError):
        refuse(shape, eps, programs, x=x, weight=weight, bias=bias)
        raise
    if case is None:
        refuse(shape, eps, programs, x=x, weight=weight, bias=bias)
        case = Case(form, shape, eps, programs, *map(_like, (x, weight, bias)))
        if len(_cases) >= 4096:
            _cases.clear()
        _cases[key] = case
    return case


# --- backward -------------------------------------------------------------------------------------


def running(tiling: Tiling, index: int) -> Tiling:
    """The tiling; in chunks where a device is too small for all the programs that share a row."""
    few = index >= 0 and tiling.shares > tiling.per_sm * multiprocessors(index)
    return CHUNKS if few else tiling


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
    columns = x.shape[1]
    rows, dy = _rows(x, columns), _rows(dy, columns)
    strides = (_stride(rows, columns), _stride(dy, columns))
    call = _backward_of(
        form,
        x.shape,
        columns,
        *strides,
        x.dtype,
        dy.dtype,
        _type(weight),
        dw_type,
        db_type,
        programs,
        x.device,
        tiling,
    )
    return call(dy, rows, weight, stats)


class Backward:
    """dx, dweight and dbias for rows of one kind: allocations, first and second stage."""

    def __init__(
        self,
        form: Form,
        shape: tuple[int, ...],
        n: int,
        stride_x: int,
        stride_dy: int,
        dtype: torch.dtype,
        dy_type: torch.dtype,
        w_type: torch.dtype | None,
        dw_type: torch.dtype | None,
        db_type: torch.dtype | None,
        programs: int,
        device: torch.device,
        tiling: Tiling | None,
    ) -> None:
        index, m = _index(device), math.prod(shape) // n
        tiling = running(tiling or backward_tiling(n, dtype.itemsize), index)
        self.m = m
        self.sums = dw_type is not None or db_type is not None
        self.dw = None if dw_type is None else _empty((n,), dw_type, device)
        self.db = None if db_type is None else _empty((n,), db_type, device)
        self.dx = _empty(tuple(shape), dtype, device)
        if not m:
            return
        tiles = -(-m // tiling.rows)
        groups = tiling.programs(tiles, index)
        count = min(tiles, programs) if programs else groups
        kind = (form, tiling, n, stride_x, stride_dy, dtype, dy_type, w_type, self.sums)
        self.first = _first_stage(*kind, m > _MOST, index)
        self.part = _empty((1 + form.centred, count, n), torch.float32, device)
        self.wide = not tiling.pieces
        self.shared = tiling.shares > 1
        sizes = (m, n, stride_x, stride_dy)
        counts: tuple[Any, ...] = (*sizes, tiles, 0)
        self.grid = count, 1
        if self.wide:
            self.row_grid, self.row_counts = (m, 1), sizes
            self.grid, counts = (count, -(-n // tiling.piece)), (*sizes, tiles)
        elif self.shared:
            groups = min(groups, count)
            self.shares = _empty((m, tiling.shares), torch.int64, device)
            self.grid, counts = (groups * tiling.shares, 1), (*sizes, groups, count, 0)
        self.counts = counts
        types = (dw_type or db_type, db_type or dw_type)
        if types[0] is not None and types[1] is not None:
            columns, self.second = _second_launch(min(count, 64), n, types[0], types[1], index)
            self.second_grid, self.second_counts = (-(-n // columns), 1 + form.centred), (count, n)
            # Where the kernel adds two and nobody wants the other, that needs a place.
            both = form.centred and (dw_type is None or db_type is None)
            self.spare = _empty((n,), types[0], device) if both else None

    def __call__(
        self, dy: Tensor, rows: Tensor, weight: Optional, stats: Tensor
    ) -> tuple[Tensor, Optional, Optional]:
        dx = self.dx()
        dw = None if self.dw is None else self.dw()
        db = None if self.db is None else self.db()
        if not self.m:
            return dx, None if dw is None else dw.zero_(), None if db is None else db.zero_()
        part = self.part() if self.sums else stats
        w = rows if weight is None else weight.contiguous()
        tensors: tuple[Tensor, ...] = (rows, dy, w, stats, dx, part)
        if self.wide:
            sums = torch.empty_like(stats)
            self.first[0](self.row_grid, (rows, dy, w, stats, sums), self.row_counts)
            tensors = (rows, dy, w, stats, sums, dx, part)
        elif self.shared:
            tensors = (*tensors, self.shares().fill_(-1))  # no share yet
        for launch in self.first[1:] if self.wide else self.first:
            launch(self.grid, tensors, self.counts)
        if self.sums:
            spare = None if self.spare is None else self.spare()
            first, last = (spare if dw is None else dw), (spare if db is None else db)
            targets: Any = (first, first if last is None else last)
            self.second(self.second_grid, (part, *targets), self.second_counts)
        return dx, dw, db


_backward_of = lru_cache(4096)(Backward)


@lru_cache(4096)
def _first_stage(
    form: Form,
    tiling: Tiling,
    n: int,
    stride_x: int,
    stride_dy: int,
    dtype: torch.dtype,
    dy_type: torch.dtype,
    w_type: torch.dtype | None,
    sums: bool,
    wide_counts: bool,
    index: int,
) -> tuple[Launch, ...]:
    """The launches that give dx and the partial sums."""
    weighted = w_type is not None
    if not tiling.pieces:
        add = (4096, weighted, form.centred)
        finish = (tiling.rows, tiling.piece, weighted, sums, form.centred)
        return (
            Launch(kernels.backward_sums, index, add, num_warps=16),
            Launch(kernels.backward_wide, index, finish, num_warps=tiling.warps),
        )
    # A single column is its own mean: nothing would remain but the rounding of the difference.
    short, compiled = dtype.itemsize == 2 and n > 1, not interpreting()
    opaque = compiled and dtype.itemsize == 2
    if tiling.shares > 1:
        lines = triton.next_power_of_2(-(-tiling.piece * tiling.pieces * dtype.itemsize // 128))
        sizes = (*tiling[1:3], tiling.shares, lines if compiled else 0, tiling.stages, tiling.hold)
        flags = (short, weighted, sums, opaque, form.centred, compiled)
        options = _limited(tiling) | {"launch_cooperative_grid": compiled}
        return tuple(
            Launch(wide.backward_shared, index, (*sizes, *flags, finish), **options)
            for finish in ((True,) if compiled else (False, True))
        )
    # Whether each thread has the same columns in every row of a tile.
    shared = tiling.rows == 1 or tiling.piece * dtype.itemsize >= tiling.warps * 512
    early = compiled and _early_launch(index)
    constants = (
        *tiling[:3],
        tiling.stages,
        tiling.hold,
        shared,
        short,
        weighted,
        sums,
        opaque,
        early,
    )
    return (Launch(kernels.backward, index, (*constants, form.centred), **_limited(tiling)),)


@lru_cache(4096)
def _second_launch(
    count: int, n: int, dw_type: torch.dtype, db_type: torch.dtype, index: int
) -> tuple[int, Launch]:
    rows, columns, warps = second_stage_tiling(count, n)
    early = not interpreting() and _early_launch(index)
    options = {"launch_pdl": True} if early else {}
    constants = (rows, columns, early)
    return columns, Launch(kernels.second_stage, index, constants, num_warps=warps, **options)


# --- autograd -------------------------------------------------------------------------------------


class Normalised(torch.autograd.Function):
    """(x, weight, bias, case) -> y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Optional, bias: Optional, case: Case) -> Tensor:
        y, rows, stats = case.forward(x, weight, bias, True)
        ctx.save_for_backward(rows, weight, stats)
        ctx.case = case
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        # once_differentiable takes time, and is only needed for double backward.
        return (_refusing if torch.is_grad_enabled() else _gradients)(ctx, dy)


def _gradients(ctx: Any, dy: Tensor) -> Any:
    rows, weight, stats = ctx.saved_tensors
    _, needs_dw, needs_db, _ = ctx.needs_input_grad
    return *ctx.case.backward(dy, rows, weight, stats, needs_dw, needs_db), None


_refusing = torch.autograd.function.once_differentiable(_gradients)


def _applied(function: Any) -> Callable[..., Any]:
    """``function.apply`` without what torch does for ``torch.func`` in every call: 2 of 10 µs."""
    direct = super(torch.autograd.Function, function).apply
    active = torch._C._are_functorch_transforms_active

    def apply(*arguments: Any) -> Any:
        return (function.apply if active() else direct)(*arguments)

    return apply


normalised = _applied(Normalised)


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
    if isinstance(normalized_shape, int):
        shape: tuple[int, ...] = (normalized_shape,)
    else:
        shape = shape_of(normalized_shape)
    if eps is None:
        refuse(shape, eps, programs, x=x)
    if torch.compiler.is_compiling():
        check(form, shape, eps, programs, _like(x), {"weight": _like(weight), "bias": _like(bias)})
        rows = x.reshape(-1, math.prod(shape))
        flat = [None if t is None else t.reshape(-1) for t in (weight, bias)]
        return _forward_op(rows, *flat, eps, programs or 0, form.centred)[0].view(x.shape)
    case = case_of(form, shape, eps, programs, x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return normalised(x, weight, bias, case)
    return case.forward(x, weight, bias, False)[0]


def forward_of(
    form: Form, x: Tensor, weight: Optional, bias: Optional, eps: float
) -> tuple[Tensor, Tensor]:
    """y, and mean and rstd (2, M), without mean (1, M), of rows x (M, N)."""
    case = case_of(form, (x.shape[1],), eps, None, x, weight, bias)
    y, _, stats = case.forward(x, weight, bias, True)
    return y, stats


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
    stats = x.new_empty((1 + centred, x.shape[0]), dtype=torch.float32)
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
