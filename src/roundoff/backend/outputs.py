"""What a graph returns: axes in memory as torch has them, memory shared where torch shares it."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from roundoff.errors import UnsupportedError
from roundoff.fusion.editor import static

from .sizes import dim, dims, evaluate, hint

_COPY = torch.ops.aten.copy_.default
Restore = Callable[[list[torch.Tensor], Mapping[str, int]], Any]


class Outputs:
    """Change a graph to return contiguous tensors of memory of their own, and undo it after.

    An output that is a permutation of a contiguous one is returned as that one, and seen through
    its own strides after, which copies nothing. Outputs that share memory in torch are computed
    once, as the tensor that contains all of them, and cut from it. Of a view of an input by
    symbolic sizes AOTAutograd reads the strides alone. Another output with gaps in its memory comes
    without them. What is no tensor is kept aside.

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
        self.plain = True
        self._nodes: list[torch.fx.Node] = []
        bases = _bases(gm, returned)  # type: ignore[arg-type]
        places = [place.meta["val"] for place in gm.graph.find_nodes(op="placeholder")]
        self._inputs = [_memory(v) for v in places if isinstance(v, torch.Tensor)]
        self._restore = [self._restoring(node, bases) for node in returned]  # type: ignore[union-attr]
        nodes = []
        for node in self._nodes:
            value, order = node.meta["val"], axes_by_stride(node.meta["val"])
            if order is not None and not contiguous(value):
                with gm.graph.inserting_before(last):
                    node = gm.graph.call_function(
                        torch.ops.aten.permute.default, (node, list(order))
                    )
                node.meta["val"] = value.permute(order)
            nodes.append(node)
        last.args = (tuple(nodes),)
        self.names = [f"output_{i}" for i in range(len(nodes))]
        self.plain &= len(nodes) == len(self._restore)  # what is returned twice is computed once

    def restore(self, tensors: list[torch.Tensor], sizes: Mapping[str, int]) -> list[Any]:
        """The outputs that torch would return, for these values of symbolic sizes."""
        return [r(tensors, sizes) for r in self._restore]

    def _restoring(self, node: Any, bases: dict[int, torch.fx.Node]) -> Restore:
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if isinstance(value, torch.SymInt):
            self.plain = False
            number = dim(value)
            return lambda tensors, sizes: evaluate(number, sizes)
        if not isinstance(value, torch.Tensor):
            self.plain = False
            return lambda tensors, sizes: node
        base = bases.get(_memory(value), node)
        index, order = self._index(base), axes_by_stride(value)
        shape, stride = dims(value.shape), dims(value.stride())
        offset = dim(value.storage_offset())
        viewed = node.op != "placeholder" and _memory(value) in self._inputs
        viewed &= not static(*shape, *stride, offset)
        if base is node and not viewed:
            offset = 0
            if order is None or contiguous(value):
                return lambda tensors, sizes: tensors[index]
        self.plain = False
        kind = value.dtype
        return lambda tensors, sizes: (
            torch.empty(0, dtype=kind, device="meta") if viewed else tensors[index]
        ).as_strided(
            [evaluate(d, sizes) for d in shape],
            [evaluate(d, sizes) for d in stride],
            evaluate(offset, sizes),
        )

    def _index(self, node: torch.fx.Node) -> int:
        if node not in self._nodes:
            self._nodes.append(node)
        return self._nodes.index(node)


def axes_by_stride(value: torch.Tensor) -> tuple[int, ...] | None:
    """The axes from the widest stride to the closest, where that order is contiguous; else None.

    It holds for all sizes, and asks for no guard.

    Examples
    --------
    >>> axes_by_stride(torch.empty(2, 4, 3).mT), axes_by_stride(torch.empty(4, 3)[:, :2])
    ((0, 2, 1), None)
    """
    shape, stride = value.shape, value.stride()
    long = [i for i, n in enumerate(shape) if dim(n) != 1]
    by_stride = sorted(long, key=lambda i: (-hint(stride[i]), i))
    expected: Any = 1
    for i in reversed(by_stride):
        if not statically_known_true(stride[i] == expected):
            return None
        expected = expected * shape[i]
    if by_stride == long:
        return tuple(range(len(shape)))
    return tuple([i for i in range(len(shape)) if i not in long] + by_stride)


def contiguous(value: torch.Tensor) -> bool:
    """Whether it is for all sizes."""
    return axes_by_stride(value) == tuple(range(value.dim()))


def _memory(value: torch.Tensor) -> int:
    """Which memory a fake tensor has: equal of views of one."""
    return value.untyped_storage()._cdata


def _bases(gm: torch.fx.GraphModule, returned: Sequence[Any]) -> dict[int, torch.fx.Node]:
    """For each memory that several outputs share: the node whose tensor is all of it."""
    values = [node.meta.get("val") for node in returned if isinstance(node, torch.fx.Node)]
    outputs = [value for value in values if isinstance(value, torch.Tensor)]
    # What is written to an input counts, too: of its views AOTAutograd reads the strides.
    written = [n.args[1].meta["val"] for n in gm.graph.nodes if n.target is _COPY]
    seen = collections.Counter(
        _memory(v) for v in outputs + [w for w in written if not static(*dims(w.shape))]
    )
    bases: dict[int, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or seen[_memory(value)] < 2:
            continue
        size = math.prod(value.shape) * value.element_size()
        whole = statically_known_true(size == value.untyped_storage().nbytes())
        if whole and dim(value.storage_offset()) == 0 and axes_by_stride(value) is not None:
            bases.setdefault(_memory(value), node)
    for value in outputs:
        base = bases.get(_memory(value))
        if base is not None and _seen_as(value) != _seen_as(base.meta["val"]):
            # No strides cut it from the base. AOTAutograd itself makes views of an input.
            if base.op != "placeholder":
                raise UnsupportedError(
                    "outputs that share memory in different types of numbers",
                    got=f"{_seen_as(value)} beside {_seen_as(base.meta['val'])}",
                    hint="return clone() of one of them",
                )
            del bases[_memory(value)]
    return bases


def _seen_as(value: torch.Tensor) -> str:
    """What the memory of a tensor is read as."""
    marks = " conjugated" * value.is_conj() + " negated" * value.is_neg()
    return str(value.dtype).removeprefix("torch.") + marks
