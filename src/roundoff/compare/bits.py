"""A short name for the bits of a tensor."""

from __future__ import annotations

import hashlib

import torch

from roundoff.describe import lacking
from roundoff.errors import ArgumentError

__all__ = ["digest"]


def digest(tensor: torch.Tensor) -> str:
    """Eight hexadecimal digits that say whether two tensors have the same bits.

    Of the values in their order by rows, wherever they are and however they are laid out; not of
    shape and type. Zeros of both signs differ, and so do NaN of other bits. Two tensors that differ
    get the same digits with a probability of 2⁻³².

    Parameters
    ----------
    tensor : torch.Tensor
        Any type, shape, strides and device.

    Returns
    -------
    str
        The first digits of the SHA-256 of its bytes.

    Raises
    ------
    ArgumentError
        It is no torch tensor, or has no data.

    Examples
    --------
    >>> import torch
    >>> from roundoff.compare import digest
    >>> x = torch.arange(6.0).view(2, 3)
    >>> digest(x) == digest(x.T.contiguous().T), digest(x) == digest(x + 1e-6)
    (True, False)
    """
    lack = lacking(tensor) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
    if lack:
        raise ArgumentError("no bits", got=lack, expected="a torch.Tensor with data")
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().cpu()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:8]
