r"""RMSNorm in Triton: forward and backward, with and without a residual.

For a row :math:`x` of :math:`N` values with :math:`r = 1/\sqrt{\overline{x^2} + \epsilon}`,

.. math:: y = x\, r\, w.

With :math:`g` the gradient of :math:`y` and :math:`\hat x = x r`, the backward is

.. math:: dx = r\,(w g - \hat x\, \overline{\hat x\, w g}), \qquad
          dw = \sum_\text{rows} g\, \hat x.

The kernels are those of layer normalisation, without mean and bias.

References
----------
B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019,
https://arxiv.org/abs/1910.07467
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import torch

from ._row_norm import (
    RMS,
    Form,
    _like,
    accumulator,
    case_of,
    check,
    gradients_of,
    normalised,
    normalised_sum,
    refuse,
    shape_of,
)

__all__ = ["rms_norm"]

_ROUNDED = RMS._replace(round_first=True)


@overload
def rms_norm(
    x: torch.Tensor, normalized_shape: int | Sequence[int], weight: torch.Tensor | None = ...,
    eps: float | None = ..., *, residual: None = ..., round_first: bool = ...,
    programs: int | None = ...,
) -> torch.Tensor: ...  # fmt: skip
@overload
def rms_norm(
    x: torch.Tensor, normalized_shape: int | Sequence[int], weight: torch.Tensor | None = ...,
    eps: float | None = ..., *, residual: torch.Tensor, round_first: bool = ...,
    programs: int | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def rms_norm(
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    residual: torch.Tensor | None = None,
    round_first: bool = False,
    programs: int | None = None,
) -> Any:
    """RMSNorm over the last dimensions, of x or of x + residual; differentiable once.

    A drop-in for ``torch.nn.functional.rms_norm``. Runs compiled on a CUDA device and in
    Triton's interpreter where there is none. Works under :func:`torch.compile` and CUDA graphs.

    Parameters
    ----------
    x : torch.Tensor
        Shape (…, \\*normalized_shape), float16, bfloat16, float32 or float64, any strides. Computed
        in float32, float64 in float64.
    normalized_shape : int or sequence of int
        The last dimensions of `x`, at least 1 and at most 2**30 elements.
    weight : torch.Tensor, optional
        Shape `normalized_shape`; its type may differ from that of `x`.
    eps : float, optional
        Added to the mean square, not negative; by default the spacing of the type in which it is
        computed, as in torch.
    residual : torch.Tensor, optional
        Shape and type of `x`. ``x + residual`` is rounded to their type and then normalised.
    round_first : bool
        Round ``x * r`` to the type of `x` before the weight multiplies, as the RMSNorm of
        transformers' Llama does: two roundings instead of one. The gradient of `weight` is then
        taken from the rounded values; that of `x` is the same.
    programs : int, optional
        Partial sums of dweight. By default a multiple of the device's number of multiprocessors;
        give a number to get the same bits on devices of different sizes.

    Returns
    -------
    torch.Tensor, or two
        Shape and type of `x`, contiguous; with `residual` also ``x + residual``.

    Raises
    ------
    ShapeError
        `normalized_shape` does not end the shape of `x`, is empty, or is not that of `weight`;
        or `residual` has not the shape of `x`.
    DtypeError
        A type that is not among the four, or `residual` of another type than `x`.
    ArgumentError
        Tensors on different devices, `eps` negative, `programs` below 1, or another kind of
        object.
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
    >>> y, summed = rms_norm(x, 4, residual=x)
    >>> summed.cpu()
    tensor([[ 2., -2., 14., 14.]])
    """
    if isinstance(normalized_shape, int):
        shape: tuple[int, ...] = (normalized_shape,)
    else:
        shape = shape_of(normalized_shape)
    if eps is None:
        if not isinstance(x, torch.Tensor):
            refuse(shape, 0.0, programs, x=x)
        eps = torch.finfo(accumulator(x.dtype)).eps
    form = _ROUNDED if round_first else RMS
    if torch.compiler.is_compiling():
        others = {"weight": _like(weight), "residual": _like(residual)}
        check(form, shape, eps, programs, _like(x), others)
        columns = math.prod(shape)
        rows = [None if t is None else t.reshape(-1, columns) for t in (x, residual)]
        flat = None if weight is None else weight.reshape(columns)
        y, summed, _ = _forward_op(rows[0], flat, rows[1], eps, round_first, programs or 0)
        return y.view(x.shape) if residual is None else (y.view(x.shape), summed.view(x.shape))
    case = case_of(form, shape, eps, programs, x, weight, None, residual)
    needed = torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (residual is not None and residual.requires_grad)
    )
    if residual is None:
        if needed:
            return normalised(x, weight, None, case)
        return case.forward(x, weight, None, None, False)[0]
    if needed:
        return normalised_sum(x, residual, weight, case)
    y, summed, _ = case.forward(x, weight, None, residual, False)
    return y, summed


def _form(round_first: bool) -> Form:
    return _ROUNDED if round_first else RMS


# Under torch.compile the kernels are two opaque operators with known output shapes.


@torch.library.custom_op("roundoff::rms_norm_forward", mutates_args=())
def _forward_op(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    round_first: bool,
    programs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    case = case_of(_form(round_first), (x.shape[1],), eps, None, x, weight, None, residual)
    y, summed, stats = case.forward(x, weight, None, residual, True)
    return y, x.new_empty(0) if residual is None else summed, stats


@_forward_op.register_fake
def _(x: Any, weight: Any, residual: Any, eps: float, round_first: bool, programs: int) -> Any:
    summed = x.new_empty(0) if residual is None else x.new_empty(x.shape)
    return x.new_empty(x.shape), summed, x.new_empty((1, x.shape[0]), dtype=accumulator(x.dtype))


@torch.library.custom_op("roundoff::rms_norm_backward", mutates_args=())
def _backward_op(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    dw_type: torch.dtype | None,
    round_first: bool,
    programs: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    form = _form(round_first)
    dx, dw, _ = gradients_of(form, dy, x, weight, stats, dh, dw_type, None, programs)
    return dx, x.new_empty(0) if dw is None else dw


@_backward_op.register_fake
def _(
    dy: Any, dh: Any, x: Any, weight: Any, stats: Any, dw_type: Any, round_first: bool,
    programs: int,
) -> Any:  # fmt: skip
    size = x.new_empty(0) if dw_type is None else x.new_empty(x.shape[1], dtype=dw_type)
    return x.new_empty(x.shape), size


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, residual, _, round_first, programs = inputs
    ctx.save_for_backward(x if residual is None else output[1], weight, output[2])
    ctx.call = (None if weight is None else weight.dtype, residual is None, round_first, programs)


def _op_gradients(ctx: Any, dy: Any, dh: Any, dstats: Any) -> Any:
    x, weight, stats = ctx.saved_tensors
    w_type, alone, round_first, programs = ctx.call
    dw_type = w_type if ctx.needs_input_grad[1] else None
    more = None if alone else dh
    dx, dw = _backward_op(dy, more, x, weight, stats, dw_type, round_first, programs)
    return dx, None if dw_type is None else dw, None if alone else dx.clone(), None, None, None


_forward_op.register_autograd(_op_gradients, setup_context=_setup)
