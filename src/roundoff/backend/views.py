"""Views of torch's graph, followed to the tensor in whose memory they lie, and taken again.

What a view says of its memory (offset, strides, a negative or a conjugate bit) is a fact of the
tensor that it was taken from. The tensor of the traced call has others than that of the next one,
and dynamo guards only some of them: a view is therefore taken anew from the tensor of each call, by
torch's own operators.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .sizes import dim, evaluate

COPY = torch.ops.aten.copy_.default
#: What takes a view of a tensor, for these values of symbolic sizes.
Take = Callable[[torch.Tensor, Mapping[str, int]], Any]


def memory(value: torch.Tensor) -> int:
    """Which memory a fake tensor has: equal of views of one."""
    return value.untyped_storage()._cdata


def viewed(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node whose memory this node's tensor lies in, one operator before it; else None."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return None
    if node.target is operator.getitem:
        (node, *_) = node.all_input_nodes
    for source in node.all_input_nodes:
        given = source.meta.get("val")
        if isinstance(given, torch.Tensor) and memory(given) == memory(value):
            return source
    return None


def chain(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes from the one that owns the memory to this one, which is the last."""
    nodes = [node]
    while (source := viewed(nodes[0])) is not None:
        nodes.insert(0, source)
    return nodes


def take(nodes: Sequence[torch.fx.Node]) -> Take:
    """What takes the views that these nodes take, one of the other."""
    steps = [_step(node) for node in nodes if node.target is not COPY]  # which returns its target

    def taken(tensor: torch.Tensor, sizes: Mapping[str, int]) -> Any:
        for step in steps:
            tensor = step(tensor, sizes)
        return tensor

    return taken


def numbers(nodes: Sequence[torch.fx.Node]) -> list[Any]:
    """Symbolic integers that the views take."""
    calls = [n.all_input_nodes[0] if n.target is operator.getitem else n for n in nodes]
    values = [given.meta.get("val") for call in calls for given in call.all_input_nodes]
    return [value for value in values if isinstance(value, torch.SymInt)]


def _step(node: torch.fx.Node) -> Take:
    """One operator: its other arguments are numbers, which sizes decide."""
    source, index = viewed(node), None
    if node.target is operator.getitem:
        index = node.args[1]
        (node, *_) = node.all_input_nodes
    target: Any = node.target
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    at = [i for i, x in enumerate(leaves) if x is source]
    symbolic = {
        i: dim(x.meta["val"])
        for i, x in enumerate(leaves)
        if isinstance(x, torch.fx.Node) and x is not source
    }

    if at == [0] and not symbolic and index is None:  # mostly, and the quickest
        rest, options = node.args[1:], node.kwargs
        return lambda tensor, sizes: target(tensor, *rest, **options)
    flat = not node.kwargs and leaves == list(node.args)

    def step(tensor: torch.Tensor, sizes: Mapping[str, int]) -> Any:
        given = list(leaves)
        for i in at:
            given[i] = tensor
        for i, size in symbolic.items():
            given[i] = evaluate(size, sizes)
        if flat:
            made = target(*given)
        else:
            args, kwargs = pytree.tree_unflatten(given, spec)
            made = target(*args, **kwargs)
        return made if index is None else made[index]

    return step


def in_order(tensor: torch.Tensor) -> bool:
    """Whether memory, read from the tensor's address on, holds its numbers."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def materialized(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy whose memory holds its numbers in the order of its axes."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def folded(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements of a tensor may lie in one place.

    Examples
    --------
    >>> folded((3, 4), (4, 1)), folded((3, 2), (1, 1)), folded((2, 2), (0, 1))
    (False, True, True)
    """
    if 0 in shape:
        return False
    reach = 0
    for step, size in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an element of *a* lies where one of *b* does.

    Examples
    --------
    >>> table = torch.zeros(4, 6)
    >>> overlap(table[:, :3], table[:, 3:]), overlap(table[1], table[:, 2])
    (False, True)
    """
    if not a.numel() or not b.numel():
        return False
    return _meet(b.data_ptr() - a.data_ptr(), _laid(a), _laid(b))


#: Sizes, and strides in bytes; the last is an element's bytes.
_Laid = tuple[tuple[int, ...], tuple[int, ...]]


def _laid(tensor: torch.Tensor) -> _Laid:
    size = tensor.element_size()
    return (*tensor.shape, size), (*(s * size for s in tensor.stride()), 1)


@functools.lru_cache(1024)  # at the next call they mostly lie to each other as they did
def _meet(apart: int, a: _Laid, b: _Laid) -> bool:
    """Whether a byte of *a* is one of *b*, which begins so many bytes *apart* from it."""
    high, last = _length(a), apart + _length(b)
    if high <= apart or last <= 0:
        return False
    begin = min(0, apart)
    marks = torch.zeros(max(high, last) - begin, dtype=torch.bool)
    marks.as_strided(*a, -begin).fill_(True)
    return bool(marks.as_strided(*b, apart - begin).any())


def _length(laid: _Laid) -> int:
    """From its first byte to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(*laid, strict=True))
