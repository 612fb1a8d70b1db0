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

from collections.abc import Sequence

import torch

from ._row_norm import norm


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
