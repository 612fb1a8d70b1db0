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
from typing import Any

import torch

from ._row_norm import (
    LAYER,
    _like,
    accumulator,
    case_of,
    check,
    gradients_of,
    normalised,
    shape_of,
)

__all__ = ["layer_norm"]


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
        Tensors on different devices, `eps` negative, `programs` below 1, or another kind of
        object.
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
    if isinstance(normalized_shape, int):
        shape: tuple[int, ...] = (normalized_shape,)
    else:
        shape = shape_of(normalized_shape)
    if torch.compiler.is_compiling():
        others = {"weight": _like(weight), "bias": _like(bias)}
        check(LAYER, shape, eps, programs, _like(x), others)
        columns = math.prod(shape)
        flat = [None if t is None else t.reshape(columns) for t in (weight, bias)]
        return _forward_op(x.reshape(-1, columns), *flat, eps, programs or 0)[0].view(x.shape)
    case = case_of(LAYER, shape, eps, programs, x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return normalised(x, weight, bias, case)
    return case.forward(x, weight, bias, False)[0]


def forward_of(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """y, and mean and rstd (2, M), of rows x (M, N)."""
    case = case_of(LAYER, (x.shape[1],), eps, None, x, weight, bias)
    y, _, stats = case.forward(x, weight, bias, True)
    return y, stats


# Under torch.compile the kernels are two opaque operators with known output shapes.


@torch.library.custom_op("roundoff::layer_norm_forward", mutates_args=())
def _forward_op(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    programs: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return forward_of(x, weight, bias, eps)


@_forward_op.register_fake
def _(x: Any, weight: Any, bias: Any, eps: float, programs: int) -> Any:
    return x.new_empty(x.shape), x.new_empty((2, x.shape[0]), dtype=accumulator(x.dtype))


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
    results = gradients_of(LAYER, dy, x, weight, stats, dw_type, db_type, programs)
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
    ctx.types = [None if t is None else t.dtype for t in (weight, bias)]
    ctx.programs = programs


def _op_gradients(ctx: Any, dy: Any, dstats: Any) -> Any:
    x, weight, stats = ctx.saved_tensors
    types = [t if w else None for t, w in zip(ctx.types, ctx.needs_input_grad[1:3], strict=True)]
    dx, dw, db = _backward_op(dy, x, weight, stats, *types, ctx.programs)
    return dx, None if types[0] is None else dw, None if types[1] is None else db, None, None


_forward_op.register_autograd(_op_gradients, setup_context=_setup)
