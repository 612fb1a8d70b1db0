"""Operators that read or write at computed positions."""

from __future__ import annotations

import torch

from roundoff.errors import ModelError, ShapeError

from .common import (
    Function,
    Node,
    NotHandledError,
    Tensor,
    axis_of,
    read,
    refuse_larger_than_memory,
    torch_function,
    torch_kernel,
)


def _positions(indices: Tensor, size: int, what: str) -> Tensor:
    """Indices counted from the front, as int64.

    Raises
    ------
    ShapeError
        One is out of range.
    """
    indices = indices.to(torch.int64)
    if indices.device.type == "cpu" and indices.numel():
        low, high = (int(t) for t in torch.aminmax(indices))
        if low < -size or high >= size:
            raise ShapeError(f"{what}: index out of range", got=f"{low}..{high}",
                             expected=f"within {-size}..{size - 1}")  # fmt: skip
        if low >= 0:
            return indices
    # On another device a check would wait for it; the kernel there checks by itself.
    return torch.where(indices < 0, indices + size, indices)


@torch_kernel("Gather", 1, 11, 13)
def _gather(node: Node) -> Function:
    axis = node.attribute("axis", 0)
    fixed = node.constants.get(1)
    single = int(fixed) if fixed is not None and fixed.dim() == 0 else None

    def gather(x: Tensor, indices: Tensor) -> Tensor:
        k = axis_of(axis, x.dim())
        size = x.shape[k]
        if single is not None and -size <= single < size:
            return x.select(k, single)
        if x.device.type != "cpu":
            indices = _positions(indices.to(x.device), size, "Gather")
        try:  # torch refuses negative indices, and those beyond the end
            if k == 0 and x.dim() == 2:
                return torch.embedding(x, indices)
            flat = x.index_select(k, indices.reshape(-1))
        except (IndexError, RuntimeError):
            flat = x.index_select(k, _positions(indices, size, "Gather").reshape(-1))
        if indices.dim() == 1:
            return flat
        return flat.reshape(x.shape[:k] + indices.shape + x.shape[k + 1 :])

    return gather


@torch_function("GatherElements", 11, 13, axis=0)
def _gather_elements(x: Tensor, indices: Tensor, *, axis: int) -> Tensor:
    k = axis_of(axis, x.dim())
    return torch.gather(x, k, _positions(indices, x.shape[k], "GatherElements"))


@torch_function("GatherND", 11, 12, 13, batch_dims=0)
def _gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int) -> Tensor:
    depth = indices.shape[-1]
    if batch_dims + depth > x.dim() or x.shape[:batch_dims] != indices.shape[:batch_dims]:
        raise ShapeError("GatherND", got=f"{list(x.shape)}, {list(indices.shape)}")
    lead = [
        torch.arange(d, device=x.device).reshape([-1 if j == k else 1
                                                  for j in range(indices.dim() - 1)])
        for k, d in enumerate(x.shape[:batch_dims])
    ]  # fmt: skip
    return x[(*lead, *indices.unbind(-1))]  # torch takes negative ones, and checks


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@torch_kernel("ScatterElements", 11, 13, 16, 18)
@torch_kernel("Scatter", 9)
def _scatter_elements(node: Node) -> Function:
    axis, reduction = node.attribute("axis", 0), node.attribute("reduction", "none")
    if reduction != "none" and reduction not in _REDUCTIONS:
        raise NotHandledError(f"reduction={reduction}")

    def scatter(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        k = axis_of(axis, x.dim())
        if indices.shape != updates.shape:
            raise ShapeError("ScatterElements", got=f"{list(indices.shape)}, {list(updates.shape)}")
        positions = _positions(indices, x.shape[k], "ScatterElements")
        if reduction == "none":
            return x.scatter(k, positions, updates)
        return x.scatter_reduce(k, positions, updates, _REDUCTIONS[reduction], include_self=True)

    return scatter


@torch_function("ScatterND", 11, 13, 16, 18, reduction="none")
def _scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str) -> Tensor:
    depth = indices.shape[-1]
    if depth > x.dim() or updates.shape != (*indices.shape[:-1], *x.shape[depth:]):
        raise ShapeError("ScatterND", got=f"{list(x.shape)}, {list(indices.shape)}, "
                         f"{list(updates.shape)}")  # fmt: skip
    places = tuple(_positions(indices[..., j], x.shape[j], "ScatterND") for j in range(depth))
    y = x.clone(memory_format=torch.contiguous_format)
    if reduction == "none":
        y[places] = updates
    elif reduction == "add":
        y.index_put_(places, updates, accumulate=True)
    else:
        raise NotHandledError(f"reduction={reduction}")
    return y


@torch_kernel("OneHot", 9, 11, 28)
def _one_hot(node: Node) -> Function:
    axis = node.attribute("axis", -1)

    def one_hot(indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
        size = int(read(node, 1, depth)[0])
        k = axis_of(axis, indices.dim() + 1)
        shape = [*indices.shape[:k], size, *indices.shape[k:]]
        refuse_larger_than_memory(shape, values.dtype, values.device)
        places = indices.to(torch.int64)
        places = torch.where(places < 0, places + size, places).unsqueeze(k)
        columns = torch.arange(size, device=indices.device)
        columns = columns.reshape([-1 if j == k else 1 for j in range(len(shape))])
        return torch.where(columns == places, values[1], values[0])

    return one_hot


@torch_kernel("TopK", 10, 11, 24)
def _topk(node: Node) -> Function:
    axis, largest = node.attribute("axis", -1), bool(node.attribute("largest", 1))

    def topk(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        k, n = axis_of(axis, x.dim()), int(read(node, 1, count)[0])
        if not 0 <= n <= x.shape[k]:
            raise ShapeError("TopK", got=n, expected=f"at most {x.shape[k]}")
        # A stable sort: of equals the first comes first, which torch.topk does not promise.
        values, places = torch.sort(x, dim=k, descending=largest, stable=True)
        return values.narrow(k, 0, n), places.narrow(k, 0, n)

    return topk


@torch_function("NonZero", 9, 13)
def _non_zero(x: Tensor) -> Tensor:
    if x.dim() == 0:
        raise NotHandledError("NonZero of a scalar")
    return torch.nonzero(x).t().contiguous()


@torch_function("Compress", 9, 11, 28, axis=None)
def _compress(x: Tensor, condition: Tensor, *, axis: int | None) -> Tensor:
    if axis is None:
        x, axis = x.reshape(-1), 0
    k = axis_of(axis, x.dim())
    if condition.numel() > x.shape[k]:
        raise ShapeError("Compress", got=condition.numel(), expected=f"up to {x.shape[k]}")
    return x.index_select(k, torch.nonzero(condition.reshape(-1)).reshape(-1))


@torch_function("ReverseSequence", 10, 28, time_axis=0, batch_axis=1)
def _reverse_sequence(x: Tensor, lengths: Tensor, *, time_axis: int, batch_axis: int) -> Tensor:
    if {time_axis, batch_axis} != {0, 1}:
        raise ModelError("ReverseSequence: time_axis and batch_axis are 0 and 1")
    steps = torch.arange(x.shape[time_axis], device=x.device).unsqueeze(1)
    ends = lengths.to(x.device).unsqueeze(0)
    if bool((ends > x.shape[time_axis]).any()) or bool((ends < 0).any()):
        raise ShapeError("ReverseSequence: a length is out of range")
    places = torch.where(steps < ends, ends - 1 - steps, steps)
    places = places if time_axis == 0 else places.t()
    places = places.reshape(*places.shape, *[1] * (x.dim() - 2)).expand(x.shape)
    return torch.gather(x, time_axis, places)
