"""Operators that read or write at computed positions."""

from __future__ import annotations

import torch

from roundoff.errors import ShapeError

from .common import (
    Function,
    Node,
    Tensor,
    axis_of,
    torch_kernel,
)


def _positions(indices: Tensor, size: int) -> Tensor:
    """Indices counted from the front, as int64.

    Raises
    ------
    ShapeError
        One is out of range.
    """
    indices = indices.to(torch.int64)
    if indices.numel():  # on a GPU, too: a kernel that asserts would end all its later work
        low, high = (int(t) for t in torch.aminmax(indices))
        if low < -size or high >= size:
            raise ShapeError(
                "Gather: index out of range",
                got=f"{low}..{high}",
                expected=f"within {-size}..{size - 1}",
            )
        if low >= 0:
            return indices
    return torch.where(indices < 0, indices + size, indices)


@torch_kernel("Gather", 1)
def _gather(node: Node) -> Function:
    axis = node.attribute("axis", 0)

    def gather(x: Tensor, indices: Tensor) -> Tensor:
        k = axis_of(axis, x.dim())
        size = x.shape[k]
        if x.device.type != "cpu":
            indices = _positions(indices, size)
        try:  # torch refuses negative indices, and those beyond the end
            flat = x.index_select(k, indices.reshape(-1))
        except (IndexError, RuntimeError):
            flat = x.index_select(k, _positions(indices, size).reshape(-1))
        return flat.reshape(x.shape[:k] + indices.shape + x.shape[k + 1 :])

    return gather
