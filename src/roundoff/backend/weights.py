"""Weights of one product: one after the other in one tensor, as copies or as they lie."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import onnx
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.errors import UnsupportedError

__all__ = ["Join", "Unwritten", "adjacent", "move", "split_joins"]

# Parameter -> where it was moved to: a tensor of ours, which it may leave again.
_moved = WeakIdKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Join:
    """A value that is weights joined along their first axis: its name, and theirs."""

    name: str
    weights: tuple[str, ...]


class _Saved(torch.autograd.Function):
    """Tensors that autograd keeps, and looks in C++ whether they were written since."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return one.clone()


class Unwritten:
    """Says whether tensors are those that they were, and none was written through its counter.

    The tensors are kept: their memory cannot be reused for others meanwhile.

    Examples
    --------
    >>> x, y = torch.ones(2), torch.ones(3)
    >>> known = Unwritten([x, y])
    >>> known.holds([x, y])
    True
    >>> _ = y.add_(1)
    >>> known.holds([x, y])
    False
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        counted = [t for t in self._tensors if not t.is_inference()]  # those have no counter
        self._counted, self._versions = counted, list(map(_version, counted))
        self._saved: Any = None  # alive, else autograd makes its node anew at each look
        # Refused where hooks would pack what is saved: they look at no counter.
        hooks = torch.autograd.graph.disable_saved_tensors_hooks("weights are no activations")
        graph = torch.enable_grad()
        with contextlib.suppress(RuntimeError), hooks, torch.inference_mode(False), graph:
            self._saved = _Saved.apply(torch.ones((), requires_grad=True), counted)
            self._node = self._saved.grad_fn

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors, unwritten."""
        if not all(map(operator.is_, tensors, self._tensors)):
            return False
        if self._saved is None:
            return list(map(_version, self._counted)) == self._versions
        try:
            _ = self._node.saved_tensors  # a third of the time of asking each
        except RuntimeError:
            return False
        return True


_version = operator.attrgetter("_version")


def split_joins(model: onnx.ModelProto) -> tuple[list[Join], onnx.ModelProto | None]:
    """The outputs that do no more than join inputs, and the model of all others.

    Parameters
    ----------
    model : onnx.ModelProto
        What depends on weights alone.
    """
    graph = model.graph
    inputs, outputs = ({v.name for v in values} for values in (graph.input, graph.output))
    read = {i for n in graph.node for i in n.input}
    nodes, joins = [], []
    for node in graph.node:
        axis = next((a.i for a in node.attribute if a.name == "axis"), None)
        alone = node.op_type == "Concat" and axis == 0 and inputs.issuperset(node.input)
        if alone and node.output[0] in outputs and node.output[0] not in read:
            joins.append(Join(node.output[0], tuple(node.input)))
        else:
            nodes.append(node)
    if not nodes:
        return joins, None
    rest = onnx.ModelProto.FromString(model.SerializeToString())
    del rest.graph.node[:], rest.graph.input[:], rest.graph.output[:]
    read = {i for n in nodes for i in n.input}
    joined = {j.name for j in joins}
    rest.graph.node.extend(nodes)
    rest.graph.input.extend(v for v in graph.input if v.name in read)
    rest.graph.output.extend(v for v in graph.output if v.name not in joined)
    return joins, rest


def adjacent(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor that tensors make up along their first axis, where they lie so; else None.

    Examples
    --------
    >>> whole = torch.arange(6).reshape(3, 2)
    >>> adjacent([whole[:1], whole[1:]])
    tensor([[0, 1],
            [2, 3],
            [4, 5]])
    >>> adjacent([whole[1:], whole[:1]]) is None
    True
    """
    first = tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for t in tensors:
        if t.untyped_storage().data_ptr() != storage or t.data_ptr() != end:
            return None
        if not t.is_contiguous() or t.dtype != first.dtype:
            return None
        end += t.numel() * t.element_size()
    shape = [sum(len(t) for t in tensors), *first.shape[1:]]
    return first.detach().as_strided(shape, first.stride())


def move(groups: Sequence[Sequence[torch.Tensor]], names: Sequence[Sequence[str]]) -> None:
    """Let the parameters of each group lie one after the other: their data become views.

    A group is moved at a time, so that no more than one is there twice. Groups that lie so
    already are left.

    Parameters
    ----------
    groups : sequence of sequences of torch.nn.Parameter
        Each of equal sizes but for the first.
    names : sequence of sequences of str
        For the error.

    Raises
    ------
    UnsupportedError
        One of them is no parameter, shares its memory with another tensor, which would no longer
        see its changes, is an inference tensor, or belongs to two groups. Nothing is moved then.
    """
    chosen: dict[tuple[int, ...], Sequence[torch.Tensor]] = {}
    owner: dict[int, tuple[int, ...]] = {}
    for group, called in zip(groups, names, strict=True):
        if adjacent(group) is not None:
            continue
        key = tuple(map(id, group))
        chosen[key] = group
        for weight, name in zip(group, called, strict=True):
            reason = _held(weight)
            if owner.setdefault(id(weight), key) != key or key.count(id(weight)) > 1:
                reason = "is packed twice, with other weights or with itself"
            if reason:
                raise UnsupportedError(
                    "a weight that cannot become a view of packed ones",
                    got=f"{name} {reason}",
                    expected="contiguous parameters that own their memory, each packed once",
                    hint="replace_weights=False packs copies",
                )
    with torch.inference_mode(False), torch.no_grad():
        for group in chosen.values():
            _move(group)


def _move(group: Sequence[torch.Tensor]) -> None:
    first = group[0]
    rows = sum(len(w) for w in group)
    whole = torch.empty([rows, *first.shape[1:]], dtype=first.dtype, device=first.device)
    start = 0
    for weight in group:
        part = whole[start : start + len(weight)]
        start += len(weight)
        weight.data = part.copy_(weight.detach())
        _moved[weight] = weight.data_ptr()
    if first.is_cuda:
        # What they leave is in pieces too small for the next group: back to the device.
        torch.cuda.empty_cache()


def _held(weight: torch.Tensor) -> str:
    """Why a weight's memory cannot be exchanged; empty where it can."""
    if not isinstance(weight, torch.nn.Parameter) or is_traceable_wrapper_subclass(weight):
        return f"is a {type(weight).__name__}"
    if weight.is_inference():
        return "was made under inference_mode"
    if not weight.is_contiguous():
        return "is not contiguous"
    if _moved.get(weight) == weight.data_ptr():
        return ""
    storage = weight.untyped_storage()
    # Its own reference, and the one of this variable.
    users = getattr(torch._C, "_storage_Use_Count", lambda _: 2)(storage._cdata)
    if storage.nbytes() != weight.numel() * weight.element_size() or users > 2:
        return "shares its memory with another tensor"
    return ""
