r"""Layer normalisation and RMSNorm in Triton: forward and backward, the same bits every run.

For a row :math:`x` of :math:`N` values with mean :math:`\mu` and :math:`r = 1/\sqrt{\sigma^2 +
\epsilon}`,

.. math:: y = (x - \mu)\, r\, w + b.

With :math:`g` the gradient of :math:`y`, :math:`\hat x = (x - \mu) r` and bars for means over the
row, the backward is

.. math:: dx = r\,(w g - \overline{w g} - \hat x\, \overline{\hat x\, w g}), \qquad
          dw = \sum_\text{rows} g\, \hat x, \qquad db = \sum_\text{rows} g.

RMSNorm is the same without mean and bias.

A call looks its :class:`Case` up by the metadata of its tensors: shapes, types, devices, strides.
The case has the launches: what remains is to allocate and to launch.

The sums over rows are taken in two stages, without locks or atomics of values: each program adds
its own rows in float32, a second kernel adds the programs' partial sums, both in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from ..arguments import check_number
from ..errors import ArgumentError, DtypeError, ShapeError
from . import _layer_norm_kernels as kernels
from . import _layer_norm_wide as wide
from ._norm_tilings import CHUNKS, Tiling, backward_tiling, forward_tiling, second_stage_tiling
from ._runtime import (
    Launch,
    ceil_div,
    check_device,
    check_tensor,
    interpreting,
    multiprocessors,
    power_of_2,
    rows_of,
)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST = 2**30
_MANY = 8192
_MOST = 2**31 - 1  # Triton takes a larger number as another type

Tensor = torch.Tensor
Optional = torch.Tensor | None


def check(
    shape: tuple[Any, ...],
    eps: Any,
    x: Tensor,
    weight: Optional,
    bias: Optional,
) -> None:
    """Raise for arguments that do not fit."""
    check_tensor(x, "x")
    if not all(isinstance(n, int) for n in shape):
        raise ShapeError("normalized_shape", got=repr(shape), expected="whole numbers")
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise ShapeError(
            "the last dimensions of x are not normalized_shape",
            got=f"x {tuple(x.shape)}, normalized_shape {shape}",
            expected="x of shape (…, *normalized_shape)",
        )
    columns = math.prod(shape)
    if not 1 <= columns <= _WIDEST or x.numel() // columns > _MOST:
        raise ShapeError(
            "no elements or too many in a row, or too many rows",
            got=tuple(x.shape),
            expected=f"rows of 1 to {_WIDEST} elements, at most {_MOST} of them",
        )
    for name, t in {"x": x, "weight": weight, "bias": bias}.items():
        if t is None:
            continue
        check_tensor(t, name)
        if t.dtype not in _DTYPES:
            raise DtypeError(
                f"{name} has a type that is not taken",
                got=str(t.dtype),
                expected="float16, bfloat16 or float32",
                hint="torch.nn.functional has both norms for float64",
            )
        if name != "x" and tuple(t.shape) != shape:
            raise ShapeError(f"{name} has another shape", got=tuple(t.shape), expected=f"{shape}")
        if t.device != x.device:
            raise ArgumentError(
                f"{name} is on another device than x", got=str(t.device), expected=str(x.device)
            )
    check_number("eps", eps, 0)
    check_device(x.device, "x")


@cache
def _early_launch(index: int) -> bool:
    """Whether a kernel may be launched before the one it depends on has ended (Hopper on)."""
    return not interpreting() and torch.cuda.get_device_capability(index) >= (9, 0)


def _empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """An allocation; with strides given it takes half the time of ``x.new_empty``."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


def _limited(tiling: Tiling) -> dict[str, Any]:
    """Options: so many registers that per_sm programs fit on a multiprocessor."""
    limit = min(65536 // (max(1, tiling.per_sm) * tiling.warps * 32) // 8 * 8, 255)
    return {"num_warps": tiling.warps, "maxnreg": limit if tiling.per_sm > 1 else None}


class Case:
    """What calls with the same metadata share: launch parameters and kernels, chosen once."""

    def __init__(
        self,
        centred: bool,
        shape: tuple[int, ...],
        eps: float,
        x: Tensor,
        weight: Optional,
        bias: Optional,
    ) -> None:
        check(shape, eps, x, weight, bias)
        self.centred, self.shape, self.columns = centred, shape, math.prod(shape)
        self.dtype, self.device = x.dtype, x.device
        self.like_x = _empty(x.shape, x.dtype, x.device)
        self.index = x.get_device()
        self.types = tuple(None if t is None else t.dtype for t in (weight, bias))
        self.m = x.numel() // self.columns
        self.stats = _empty((1 + centred, self.m), torch.float32, self.device)
        self.gradients: dict[Any, Backward] = {}
        tiling = forward_tiling(self.columns, x.dtype.itemsize, self.m > _MANY)
        flags = (centred, weight is not None, bias is not None)
        numbers: tuple[Any, ...]
        numbers = (self.m, self.columns, rows_of(x, self.columns)[1])
        if tiling.pieces:
            function, tiles = kernels.forward, ceil_div(self.m, tiling.rows)
            programs = tiling.programs(tiles, self.index)
            numbers = (*numbers, tiles, 0, float(eps), *tiling[:3])
            numbers = (*numbers, tiling.stages, tiling.hold, tiling.again)
        else:
            function, programs = kernels.forward_wide, self.m
            numbers = (*numbers, float(eps), tiling.piece)
        options: dict[str, Any] = {"num_warps": tiling.warps}
        if self.columns * x.dtype.itemsize >= 32768:
            # Wide rows take all registers that they may have, and then fewer programs fit.
            options = _limited(tiling)
        self.launches = [
            Launch(function, self.index, (programs, 1), (*numbers, *flags, keep), **options)
            for keep in (False, True)
        ]

    def forward(
        self, x: Tensor, weight: Optional, bias: Optional, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """y of x's shape; x as rows; with `keep` the statistics."""
        rows, y = rows_of(x, self.columns)[0], self.like_x()
        stats = self.stats() if keep else y
        w = rows if weight is None else weight.contiguous()
        b = rows if bias is None else bias.contiguous()
        self.launches[keep](rows, w, b, y, stats)
        return y, rows, stats

    def backward(
        self,
        dy: Tensor,
        rows: Tensor,
        weight: Optional,
        stats: Tensor,
        tiling: Tiling | None = None,
    ) -> tuple[Tensor, Optional, Optional]:
        """dx, dw and db, in the shapes of x, weight and bias; None of None."""
        dy, stride_dy = rows_of(dy, self.columns)
        rows, stride = rows_of(rows, self.columns)
        key = (dy.dtype, stride, stride_dy, tiling)
        call = self.gradients.get(key)
        if call is None:
            call = self.gradients[key] = Backward(self, stride, stride_dy, tiling)
        return call(dy, rows, weight, stats)


_cases: dict[Any, Case] = {}


def case_of(
    centred: bool,
    shape: tuple[int, ...],
    eps: float,
    x: Tensor,
    weight: Optional,
    bias: Optional,
) -> Case:
    """The case of a call. Parameters are made contiguous where they are not: no key has strides."""
    try:
        key = (
            centred,
            shape,
            eps,
            x.shape,
            x.dtype,
            x.device,
            x.is_contiguous() or x.stride(),
            None if weight is None else (weight.shape, weight.dtype, weight.device),
            None if bias is None else (bias.shape, bias.dtype, bias.device),
        )
        case = _cases.get(key)
    except (AttributeError, TypeError):
        check(shape, eps, x, weight, bias)
        raise
    if case is None:
        case = Case(centred, shape, eps, x, weight, bias)
        if len(_cases) >= 4096:
            _cases.clear()
        _cases[key] = case
    return case


class Backward:
    """dx, dweight and dbias for rows of one kind: allocations, first and second stage."""

    def __init__(self, case: Case, stride: int, stride_dy: int, tiling: Tiling | None) -> None:
        n, m, index, centred = case.columns, case.m, case.index, case.centred
        tiling = tiling or backward_tiling(n, case.dtype.itemsize)
        if index >= 0 and tiling.shares > tiling.per_sm * multiprocessors(index):
            tiling = CHUNKS  # not all the programs that share a row can run at the same time
        tiles = ceil_div(m, tiling.rows)
        count = max(1, tiling.programs(tiles, index))
        self.centred, self.given = centred, [t is not None for t in case.types]
        self.dx = case.like_x
        self.part = _empty((1 + centred, count, n), torch.float32, case.device)
        # Where the kernel adds two and there is one parameter, the other needs a place.
        either = case.types[0] or case.types[1] or case.dtype
        self.dw, self.db = (_empty(case.shape, t or either, case.device) for t in case.types)
        self.add: Launch | None = None
        self.shares: Callable[[], Tensor] | None = None
        sizes = (m, n, stride, stride_dy)
        flags, early = (centred, case.types[0] is not None), _early_launch(index)
        options, grid = _limited(tiling), (count, 1)
        turns: list[tuple[bool, ...]] = [()]
        numbers: tuple[Any, ...]
        if not tiling.pieces:
            add = (*sizes, 4096, *flags)
            self.add = Launch(kernels.backward_sums, index, (m, 1), add, num_warps=16)
            function, grid = kernels.backward_wide, (count, ceil_div(n, tiling.piece))
            numbers = (*sizes, tiles, tiling.rows, tiling.piece)
        elif tiling.shares > 1:
            self.shares = _empty((m, tiling.shares), torch.int64, case.device)
            function, grid = wide.backward_shared, (count * tiling.shares, 1)
            width = tiling.piece * tiling.pieces * case.dtype.itemsize
            lines = power_of_2(ceil_div(width, 128))
            numbers = (*sizes, count, 0, *tiling[1:3], tiling.shares, lines)
            numbers = (*numbers, tiling.stages, tiling.hold)
            options["launch_cooperative_grid"] = not interpreting()
            # Where a program cannot wait for another a first launch writes all shares.
            turns = [(False,), (True,)] if interpreting() else [(True,)]
        else:
            # Whether each thread has the same columns in every row of a tile.
            shared = tiling.rows == 1 or tiling.piece * case.dtype.itemsize >= tiling.warps * 512
            function = kernels.backward
            numbers = (*sizes, tiles, 0, *tiling[:3], tiling.stages, tiling.hold, shared)
            numbers = (*numbers, early)
        self.first = [
            Launch(function, index, grid, (*numbers, *flags, *turn), **options) for turn in turns
        ]
        size, columns = second_stage_tiling(count, n)
        options = {"num_warps": 4} | ({"launch_pdl": True} if early else {})
        grid = (ceil_div(n, columns), 1 + centred)
        numbers = (count, n, size, columns, early)
        self.second = Launch(kernels.second_stage, index, grid, numbers, **options)

    def __call__(
        self, dy: Tensor, rows: Tensor, weight: Optional, stats: Tensor
    ) -> tuple[Tensor, Optional, Optional]:
        dx = self.dx()
        w = rows if weight is None else weight.contiguous()
        part = self.part()
        more: tuple[Tensor, ...] = ()
        if self.add is not None:
            more = (torch.empty_like(stats),)
            self.add(rows, dy, w, stats, *more)
        elif self.shares is not None:
            more = (self.shares().fill_(-1),)  # no share yet
        for launch in self.first:
            launch(rows, dy, w, stats, dx, part, *more)
        dw = self.dw()
        db = self.db() if self.centred else dw
        self.second(part, dw, db)
        return dx, dw if self.given[0] else None, db if self.given[1] else None


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
    return *ctx.case.backward(dy, rows, weight, stats), None


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
    centred: bool,
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Optional,
    bias: Optional,
    eps: Any,
) -> Tensor:
    """A normalisation of the last dimensions, as the public functions describe it."""
    if isinstance(normalized_shape, (tuple, list)):
        shape: tuple[Any, ...] = tuple(normalized_shape)
    else:
        shape = (normalized_shape,)
    if torch.compiler.is_compiling():
        check(shape, eps, x, weight, bias)
        rows = x.reshape(-1, math.prod(shape))
        flat = [None if t is None else t.reshape(-1) for t in (weight, bias)]
        return _forward_op(rows, *flat, eps, centred)[0].view(x.shape)
    case = case_of(centred, shape, eps, x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return normalised(x, weight, bias, case)
    return case.forward(x, weight, bias, False)[0]


def forward_of(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centred: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y, and mean and rstd (2, M), without mean (1, M), of rows x (M, N)."""
    case = case_of(centred, (x.shape[1],), eps, x, weight, bias)
    y, _, stats = case.forward(x, weight, bias, True)
    return y, stats


def gradients_of(
    dy: Tensor,
    x: Tensor,
    weight: Optional,
    bias: Optional,
    stats: Tensor,
    *,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Optional, Optional]:
    """dx of x (M, N), dweight and dbias (N,) from the statistics of :func:`forward_of`."""
    case = case_of(len(stats) == 2, (x.shape[1],), 0.0, x, weight, bias)
    return case.backward(dy, x, weight, stats, tiling)


# Under torch.compile the kernels are two opaque operators with known output shapes.


_forward_op = torch.library.custom_op("roundoff::norm_forward", forward_of, mutates_args=())


@_forward_op.register_fake
def _(x: Any, weight: Any, bias: Any, eps: float, centred: bool = True) -> Any:
    stats = x.new_empty((1 + centred, x.shape[0]), dtype=torch.float32)
    return x.new_empty(x.shape), stats


@torch.library.custom_op("roundoff::norm_backward", mutates_args=())
def _backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    stats: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    results = gradients_of(dy, x, weight, bias, stats)
    none = [x.new_empty(0) if r is None else r for r in results]
    return none[0], none[1], none[2]


@_backward_op.register_fake
def _(dy: Any, x: Any, weight: Any, bias: Any, stats: Any) -> Any:
    dw, db = (
        x.new_empty(0) if t is None else x.new_empty(x.shape[1], dtype=t.dtype)
        for t in (weight, bias)
    )
    return x.new_empty(x.shape), dw, db


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, *_ = inputs
    ctx.save_for_backward(x, weight, bias, output[1])


def _op_gradients(ctx: Any, dy: Any, dstats: Any) -> Any:
    x, weight, bias, stats = ctx.saved_tensors
    dx, dw, db = _backward_op(dy, x, weight, bias, stats)
    dw, db = None if weight is None else dw, None if bias is None else db
    return dx, dw, db, None, None


_forward_op.register_autograd(_op_gradients, setup_context=_setup)


# --- the functions of a user ----------------------------------------------------------------------


def layer_norm(
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Layer normalisation over the last dimensions, differentiable once.

    A drop-in for :func:`torch.nn.functional.layer_norm`. Runs compiled on a CUDA device and in
    Triton's interpreter where there is none. Works under :func:`torch.compile` and CUDA graphs.

    Parameters
    ----------
    x : torch.Tensor
        Shape (…, \\*normalized_shape), float16, bfloat16 or float32, any strides. Computed in
        float32.
    normalized_shape : int or sequence of int
        The last dimensions of `x`, at least 1 and at most 2**30 elements.
    weight, bias : torch.Tensor, optional
        Shape `normalized_shape`; their type may differ from that of `x`.
    eps : float
        Added to the variance, not negative.

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
        A type that is not among the three.
    ArgumentError
        Tensors on different devices, `eps` negative, or another kind of object.
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
    return norm(True, x, normalized_shape, weight, bias, eps)


def rms_norm(
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """RMSNorm over the last dimensions, differentiable once.

    A drop-in for ``torch.nn.functional.rms_norm``. Runs compiled on a CUDA device and in
    Triton's interpreter where there is none. Works under :func:`torch.compile` and CUDA graphs.

    Parameters
    ----------
    x : torch.Tensor
        Shape (…, \\*normalized_shape), float16, bfloat16 or float32, any strides. Computed in
        float32.
    normalized_shape : int or sequence of int
        The last dimensions of `x`, at least 1 and at most 2**30 elements.
    weight : torch.Tensor, optional
        Shape `normalized_shape`; its type may differ from that of `x`.
    eps : float, optional
        Added to the mean square, not negative; by default the spacing of float32, as in torch.

    Returns
    -------
    torch.Tensor
        Shape and type of `x`, contiguous.

    Raises
    ------
    ShapeError
        `normalized_shape` does not end the shape of `x`, is empty, or is not that of `weight`.
    DtypeError
        A type that is not among the three.
    ArgumentError
        Tensors on different devices, `eps` negative, or another kind of object.
    UnsupportedError
        `x` is on the CPU and the kernels of this process are compiled for a GPU.

    References
    ----------
    Zhang and Sennrich, https://arxiv.org/abs/1910.07467

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels import rms_norm
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> x = torch.tensor([[1.0, -1.0, 7.0, 7.0]], device=device)
    >>> rms_norm(x, 4, eps=0.0).cpu()
    tensor([[ 0.2000, -0.2000,  1.4000,  1.4000]])
    """
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    return norm(False, x, normalized_shape, weight, None, eps)
