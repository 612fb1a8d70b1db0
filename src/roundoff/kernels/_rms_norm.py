r"""RMSNorm in Triton: forward and backward, the same bits every run.

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
from typing import Any

import torch

from ._row_norm import (
    RMS,
    _like,
    accumulator,
    case_of,
    check,
    gradients_of,
    normalised,
    refuse,
    shape_of,
)

__all__ = ["rms_norm"]


def rms_norm(
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    programs: int | None = None,
) -> torch.Tensor:
    """RMSNorm over the last dimensions, differentiable once.

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
    programs : int, optional
        Partial sums of dweight. By default a multiple of the device's number of multiprocessors;
        give a number to get the same bits on devices of different sizes.

    Returns
    -------
    torch.Tensor
        Shape and type of `x`, contiguous.

    Raises
    ------
    ShapeError
        `normalized_shape` does not end the shape of `x`, is empty, or is not that of `weight`.
    DtypeError
        A type that is not among the four.
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
    """
    if isinstance(normalized_shape, int):
        shape: tuple[int, ...] = (normalized_shape,)
    else:
        shape = shape_of(normalized_shape)
    if eps is None:
        if not isinstance(x, torch.Tensor):
            refuse(shape, 0.0, programs, x=x)
        eps = torch.finfo(accumulator(x.dtype)).eps
    if torch.compiler.is_compiling():
        check(RMS, shape, eps, programs, _like(x), {"weight": _like(weight)})
        columns = math.prod(shape)
        flat = None if weight is None else weight.reshape(columns)
        return _forward_op(x.reshape(-1, columns), flat, eps, programs or 0)[0].view(x.shape)
    case = case_of(RMS, shape, eps, programs, x, weight, None)
    if torch.is_grad_enabled() and (
        x.requires_grad or (weight is not None and weight.requires_grad)
    ):
        return normalised(x, weight, None, case)
    return case.forward(x, weight, None, False)[0]


# Under torch.compile the kernels are two opaque operators with known output shapes.


@torch.library.custom_op("roundoff::rms_norm_forward", mutates_args=())
def _forward_op(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, programs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    case = case_of(RMS, (x.shape[1],), eps, None, x, weight, None)
    y, _, stats = case.forward(x, weight, None, True)
    return y, stats


@_forward_op.register_fake
def _(x: Any, weight: Any, eps: float, programs: int) -> Any:
    return x.new_empty(x.shape), x.new_empty((1, x.shape[0]), dtype=accumulator(x.dtype))


@torch.library.custom_op("roundoff::rms_norm_backward", mutates_args=())
def _backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    stats: torch.Tensor,
    dw_type: torch.dtype | None,
    programs: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dw, _ = gradients_of(RMS, dy, x, weight, stats, dw_type, None, programs)
    return dx, x.new_empty(0) if dw is None else dw


@_backward_op.register_fake
def _(dy: Any, x: Any, weight: Any, stats: Any, dw_type: Any, programs: int) -> Any:
    size = x.new_empty(0) if dw_type is None else x.new_empty(x.shape[1], dtype=dw_type)
    return x.new_empty(x.shape), size


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, ctx.programs = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.w_type = None if weight is None else weight.dtype


def _op_gradients(ctx: Any, dy: Any, dstats: Any) -> Any:
    x, weight, stats = ctx.saved_tensors
    dw_type = ctx.w_type if ctx.needs_input_grad[1] else None
    dx, dw = _backward_op(dy, x, weight, stats, dw_type, ctx.programs)
    return dx, None if dw_type is None else dw, None, None


_forward_op.register_autograd(_op_gradients, setup_context=_setup)
