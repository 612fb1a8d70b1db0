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

from collections.abc import Sequence

import torch

from ._row_norm import norm


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
