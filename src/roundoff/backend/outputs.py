"""What a graph returns: strides as torch gives them, memory shared where torch shares it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from roundoff.errors import UnsupportedError

from .sizes import dim, dims, evaluate, hint

__all__ = ["Outputs", "contiguous", "memory", "permutation"]

Restore = Callable[[list[torch.Tensor], Mapping[str, int]], Any]


@dataclasses.dataclass(frozen=True)
class _Returned:
    """One tensor that the ONNX graph returns: ``node.permute(perm)``, contiguous."""

    node: torch.fx.Node
    perm: tuple[int, ...] | None


class Outputs:
    """Change a graph to return contiguous tensors of memory of their own, and undo it after.

    An output that is a permutation of a contiguous one is returned as that one and permuted
    back, which copies nothing. Outputs that share memory in torch are computed once, as the tensor
    that contains all of them, and cut from it. What is no tensor is kept aside.

    Parameters
    ----------
    gm : torch.fx.GraphModule
        Functional, with fake values in ``meta["val"]``; changed in place.

    Attributes
    ----------
    names : list of str
        One for each tensor that the ONNX graph returns.
    plain : bool
        Whether the tensors that it returns are the outputs already.
    """

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        last = gm.graph.output_node()
        (returned,) = last.args
        self._returned: list[_Returned] = []
        self._restore: list[Restore] = []
        bases = _bases(gm, returned)  # type: ignore[arg-type]
        for node in returned:  # type: ignore[union-attr]
            self._restore.append(self._restoring(node, bases))
        nodes = []
        for item in self._returned:
            node = item.node
            if item.perm is not None:
                with gm.graph.inserting_before(last):
                    node = gm.graph.call_function(
                        torch.ops.aten.permute.default, (node, list(item.perm))
                    )
                node.meta["val"] = item.node.meta["val"].permute(item.perm)
            nodes.append(node)
        last.args = (tuple(nodes),)
        self.names = [f"output_{i}" for i in range(len(nodes))]
        self.plain = all(isinstance(r, _Same) for r in self._restore)

    def restore(self, tensors: list[torch.Tensor], sizes: Mapping[str, int]) -> list[Any]:
        """The outputs that torch would return, for these values of symbolic sizes."""
        return [r(tensors, sizes) for r in self._restore]

    def _restoring(self, node: Any, bases: dict[int, torch.fx.Node]) -> Restore:
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if isinstance(value, torch.SymInt):
            number = dim(value)
            return lambda tensors, sizes: evaluate(number, sizes)
        if not isinstance(value, torch.Tensor):
            return lambda tensors, sizes: node
        base = bases.get(memory(value))
        if base is not None:
            index, whole = self._index(base), base.meta["val"]
            shape, stride = dims(value.shape), dims(value.stride())
            offset = dim(value.storage_offset())
            back = _unpermuted(permutation(whole.shape, whole.stride()))
            return lambda tensors, sizes: back(tensors[index]).as_strided(
                [evaluate(d, sizes) for d in shape],
                [evaluate(d, sizes) for d in stride],
                evaluate(offset, sizes),
            )
        perm = permutation(value.shape, value.stride())
        index = self._index(node)
        if perm is None and not contiguous(value) and 0 not in value.stride():
            return _strided(index, value.stride())
        return _Same(index) if perm is None else _permuted(index, perm)

    def _index(self, node: torch.fx.Node) -> int:
        for i, item in enumerate(self._returned):
            if item.node is node:
                return i
        value = node.meta["val"]
        self._returned.append(_Returned(node, permutation(value.shape, value.stride())))
        return len(self._returned) - 1


class _Same:
    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, tensors: list[torch.Tensor], sizes: Mapping[str, int]) -> torch.Tensor:
        return tensors[self.index]


def _unpermuted(perm: tuple[int, ...] | None) -> Callable[[torch.Tensor], torch.Tensor]:
    if perm is None:
        return lambda t: t
    inverse = sorted(range(len(perm)), key=perm.__getitem__)
    return lambda t: t.permute(inverse)


def _permuted(index: int, perm: tuple[int, ...]) -> Restore:
    back = _unpermuted(perm)
    return lambda tensors, sizes: back(tensors[index])


def _strided(index: int, stride: Sequence[Any]) -> Restore:
    steps = dims(stride)

    def restore(tensors: list[torch.Tensor], sizes: Mapping[str, int]) -> torch.Tensor:
        t = tensors[index]
        known = [evaluate(s, sizes) for s in steps]
        return torch.empty_strided(t.shape, known, dtype=t.dtype, device=t.device).copy_(t)

    return restore


def permutation(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The axes from the widest stride to the closest, where that order is contiguous.

    None where the tensor is contiguous as it is, or in no order of its axes.

    Examples
    --------
    >>> permutation((2, 3, 4), (12, 1, 3))
    (0, 2, 1)
    """
    long = [i for i, n in enumerate(shape) if dim(n) != 1]
    by_stride = sorted(long, key=lambda i: (-hint(stride[i]), i))
    expected = 1
    for i in reversed(by_stride):
        if not statically_known_true(stride[i] == expected):
            return None
        expected *= shape[i]
    if by_stride == long:
        return None
    return tuple([i for i in range(len(shape)) if shape[i] == 1] + by_stride)


def contiguous(value: torch.Tensor) -> bool:
    """Whether it is for all sizes; asks for no guard."""
    expected: Any = 1
    for size, stride in reversed(list(zip(value.shape, value.stride(), strict=True))):
        if dim(size) != 1 and not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def memory(value: torch.Tensor) -> int:
    """Which memory a fake tensor has: equal of views of one."""
    return value.untyped_storage()._cdata


def _bases(gm: torch.fx.GraphModule, returned: Sequence[Any]) -> dict[int, torch.fx.Node]:
    """For each memory that several outputs share: the node whose tensor is all of it."""
    seen: dict[int, int] = {}
    for node in returned:
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if isinstance(value, torch.Tensor):
            seen[memory(value)] = seen.get(memory(value), 0) + 1
    shared = {m for m, n in seen.items() if n > 1}
    bases: dict[int, torch.fx.Node] = {}
    for node in gm.graph.nodes if shared else ():
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or memory(value) not in shared:
            continue
        size = math.prod(value.shape) * value.element_size()
        dense = contiguous(value) or permutation(value.shape, value.stride()) is not None
        whole = statically_known_true(size == value.untyped_storage().nbytes())
        if dense and dim(value.storage_offset()) == 0 and whole:
            bases.setdefault(memory(value), node)
    for node in returned if bases else ():
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if not isinstance(value, torch.Tensor):
            continue
        base = bases.get(memory(value))
        if base is not None and _seen_as(value) != _seen_as(base.meta["val"]):
            # No strides cut it from the base. AOTAutograd itself makes views of an input.
            if base.op != "placeholder":
                raise UnsupportedError(
                    "outputs that share memory in different types of numbers",
                    got=f"{_seen_as(value)} beside {_seen_as(base.meta['val'])}",
                    hint="return clone() of one of them",
                )
            del bases[memory(value)]
    return bases


def _seen_as(value: torch.Tensor) -> str:
    """What the memory of a tensor is read as."""
    marks = " conjugated" * value.is_conj() + " negated" * value.is_neg()
    return str(value.dtype).removeprefix("torch.") + marks
