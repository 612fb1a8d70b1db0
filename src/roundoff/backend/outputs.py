"""What a graph returns: views of the inputs of a call, and new tensors that lie as torch's do."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from roundoff.errors import UnsupportedError

from .sizes import dim, dims, evaluate, hint
from .views import COPY, chain, memory, numbers, take, viewed

#: (Arguments of the call, tensors that the ONNX graph returned, sizes) -> an output.
Restore = Callable[[Sequence[Any], list[torch.Tensor], Mapping[str, int]], Any]


@dataclasses.dataclass(frozen=True)
class Alias:
    """What AOTAutograd knows of an output: the input of which it makes a view of it, if any.

    Attributes
    ----------
    place : int or None
        Which input; None where the output has memory of its own.
    metadata : object or None
        Sizes, strides, offset and bits that the view has in eager.
    replayed : bool
        Whether AOTAutograd takes the view itself, and asks an output for its shape alone.
    """

    place: int | None
    metadata: Any = None
    replayed: bool = False


def aliases(metadata: Any, inputs: int, outputs: int) -> list[Alias | None]:
    """What AOTAutograd's *metadata* say of each output; None where nothing is known.

    Outputs that are new values of an input come first, and are none of the caller's.
    """
    nothing: list[Alias | None] = [None] * outputs
    if metadata is None or len(metadata.input_info) > inputs:
        return nothing
    first = len(metadata.mutated_inp_runtime_indices)
    if first + len(metadata.output_info) > outputs:
        return nothing
    for i, info in enumerate(metadata.output_info):
        if info.output_type.name in ("alias_of_input", "is_input"):
            views = getattr(info, "view_meta_sequence", None)
            replayed = info.output_type.name == "is_input" or (
                views is not None and not any(v.has_symbolic_inputs for v in views.sequence)
            )
            nothing[first + i] = Alias(info.base_idx, getattr(views, "metadata", None), replayed)
        elif "alias" not in info.output_type.name or "unsafe" in info.output_type.name:
            nothing[first + i] = Alias(None)
    return nothing


def is_joined(place: torch.fx.Node) -> bool:
    """Whether AOTAutograd made this input of several that share memory, of which one is written."""
    return "BaseAOTInput" in type(place.meta.get("desc")).__name__


class Outputs:
    """Change a graph to return contiguous tensors of memory of their own, and undo it after.

    An output that is a view of an input is taken from the input of the call, by the same operators.
    One that is a permutation of a contiguous tensor is returned as that one, and permuted after,
    which copies nothing. Outputs that share memory in torch are computed once, as the tensor whose
    memory it is, and are views of it. Another output with gaps in its memory comes without them.
    What is no tensor is kept aside.

    Parameters
    ----------
    gm : torch.fx.GraphModule
        Functional, with fake values in ``meta["val"]``; changed in place.
    metadata : object, optional
        AOTAutograd's, of which :func:`aliases` reads.

    Attributes
    ----------
    names : list of str
        One for each tensor that the ONNX graph returns.
    plain : bool
        Whether the tensors that it returns are the outputs already.
    numbers : list
        Symbolic integers that :meth:`restore` needs.
    """

    def __init__(self, gm: torch.fx.GraphModule, metadata: Any = None) -> None:
        last = gm.graph.output_node()
        (returned,) = last.args
        places = gm.graph.find_nodes(op="placeholder")
        self._places = {node: i for i, node in enumerate(places)}
        self._examples = [node.meta.get("val") for node in places]
        # What is written to an input at the end is the input, seen through its own strides.
        self._written: dict[torch.fx.Node, list[int]] = {}
        for node in gm.graph.nodes:
            if node.target is COPY and node.args[0] in self._places:
                self._written.setdefault(node.args[1], []).append(self._places[node.args[0]])
        known = aliases(metadata, len(places), len(returned))  # type: ignore[arg-type]
        joined = [i for i, node in enumerate(places) if is_joined(node)]
        if any(alias and alias.place in joined for alias in known):
            # AOTAutograd itself takes the view where the input began in the traced call.
            raise UnsupportedError(
                "a view of an input that shares memory with one that is written",
                hint="return clone() of the view, or hand in tensors that share no memory",
            )
        self.numbers: list[Any] = []
        self._nodes: list[torch.fx.Node] = []
        self._orders: list[tuple[int, ...] | None] = []
        #: Outputs, each once; and which of them each place of the result has.
        self._made: list[Restore] = []
        self._which: list[int] = []
        seen: dict[Any, int] = {}
        shared = self._shared(returned, known)  # type: ignore[arg-type]
        for node, alias in zip(returned, known, strict=True):  # type: ignore[arg-type]
            key = (node, alias and (alias.place, alias.replayed))
            if key not in seen:
                seen[key] = len(self._made)
                self._made.append(self._restoring(node, alias, shared))
            self._which.append(seen[key])
        nodes = []
        for node in self._nodes:
            value, order = node.meta["val"], axes_by_stride(node.meta["val"])
            self._orders.append(None)
            if order is not None and not contiguous(value):
                with gm.graph.inserting_before(last):
                    node = gm.graph.call_function(
                        torch.ops.aten.permute.default, (node, list(order))
                    )
                node.meta["val"] = value.permute(order)
                self._orders[-1] = tuple(order.index(i) for i in range(len(order)))
            nodes.append(node)
        last.args = (tuple(nodes),)
        self._drop_views(gm)
        self.names = [f"output_{i}" for i in range(len(nodes))]
        #: Whether the ONNX graph's tensors are the outputs, in their order.
        self.plain = self._plain and self._which == list(range(len(nodes)))
        self.plain &= not any(self._orders)

    _plain = True

    def restore(
        self, args: Sequence[Any], tensors: list[torch.Tensor], sizes: Mapping[str, int]
    ) -> list[Any]:
        """The outputs that torch would return, for these arguments and values of sizes."""
        seen = [
            t if o is None else t.permute(o) for t, o in zip(tensors, self._orders, strict=True)
        ]
        made = [make(args, seen, sizes) for make in self._made]
        return [made[i] for i in self._which]

    def _restoring(
        self, node: Any, alias: Alias | None, shared: Mapping[torch.fx.Node, torch.fx.Node]
    ) -> Restore:
        value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        if isinstance(value, torch.SymInt):
            self._plain = False
            self.numbers.append(value)
            number = dim(value)
            return lambda args, tensors, sizes: evaluate(number, sizes)
        if not isinstance(value, torch.Tensor):
            self._plain = False
            return lambda args, tensors, sizes: node
        nodes = chain(node)
        if self._places.get(nodes[0]) is not None and (alias is None or alias.place is not None):
            return self._of_input(self._places[nodes[0]], nodes[1:])
        if alias is not None and alias.place is not None:
            for i in reversed(range(len(nodes))):
                if alias.place in self._written.get(nodes[i], ()) and self._alike(nodes[i], alias):
                    return self._of_input(alias.place, nodes[i + 1 :])
            return self._as_foretold(value, alias)
        base = shared.get(node, node)
        index = self._index(base)
        if base is node:
            return lambda args, tensors, sizes: tensors[index]
        self._plain = False
        steps = nodes[nodes.index(base) + 1 :]
        self.numbers += numbers(steps)
        view = take(steps)
        return lambda args, tensors, sizes: view(tensors[index], sizes)

    def _alike(self, node: torch.fx.Node, alias: Alias) -> bool:
        """Whether a node's tensor has the type and the sizes of an input."""
        value, source = node.meta["val"], self._examples[alias.place or 0]
        return value.dtype == source.dtype and dims(value.shape) == dims(source.shape)

    def _of_input(self, place: int, nodes: Sequence[torch.fx.Node]) -> Restore:
        """A view of an argument of the call."""
        self._plain = False
        self.numbers += numbers(nodes)
        view = take(nodes)
        return lambda args, tensors, sizes: view(args[place], sizes)

    def _as_foretold(self, value: torch.Tensor, alias: Alias) -> Restore:
        """A view of an argument that no operator of the graph takes: of a part that is written."""
        self._plain = False
        place, found, kind = alias.place, alias.metadata, value.dtype
        assert place is not None
        if alias.replayed:
            shape = dims(value.shape)
            self.numbers += value.shape
            return lambda args, tensors, sizes: torch.empty(
                [evaluate(d, sizes) for d in shape], dtype=kind, device="meta"
            )
        source = self._examples[place]
        same = found is not None and source.dtype == kind
        if not (same and (found.is_conj, found.is_neg) == (source.is_conj(), source.is_neg())):
            raise UnsupportedError(
                "a part of an input that is written, and returned as other numbers than its own",
                got=str(kind).removeprefix("torch."),
                hint="return clone() of it",
            )
        shape, stride = [n.val for n in found.size], [n.val for n in found.stride]
        start = source.storage_offset()
        start = start.node.expr if isinstance(start, torch.SymInt) else start
        offset = found.storage_offset.val - start  # from where the input begins
        self.numbers += [*shape, *stride, offset]
        wanted, apart, further = dims(shape), dims(stride), dim(offset)

        def restore(args: Sequence[Any], _: Any, sizes: Mapping[str, int]) -> Any:
            tensor = args[place]
            return tensor.as_strided(
                [evaluate(d, sizes) for d in wanted],
                [evaluate(d, sizes) for d in apart],
                evaluate(further, sizes) + tensor.storage_offset(),
            )

        return restore

    def _shared(
        self, returned: Sequence[Any], known: Sequence[Alias | None]
    ) -> dict[torch.fx.Node, torch.fx.Node]:
        """For each output that shares memory with another: the node whose tensor is all of it."""
        outputs = [
            node
            for node, alias in zip(returned, known, strict=True)
            if isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)
            if alias is None or alias.place is None
        ]
        count = collections.Counter(memory(node.meta["val"]) for node in set(outputs))
        bases = {}
        for node in outputs:
            (first, *_) = chain(node)
            value = first.meta["val"]
            if count[memory(node.meta["val"])] < 2 or first in self._places:
                continue
            size = math.prod(value.shape) * value.element_size()
            whole = statically_known_true(size == value.untyped_storage().nbytes())
            if whole and dim(value.storage_offset()) == 0 and axes_by_stride(value) is not None:
                bases[node] = first
        return bases

    def _index(self, node: torch.fx.Node) -> int:
        if node not in self._nodes:
            self._nodes.append(node)
        return self._nodes.index(node)

    @staticmethod
    def _drop_views(gm: torch.fx.GraphModule) -> None:
        """Leave out views that nothing reads any more: they are taken after the run."""
        for node in reversed(list(gm.graph.nodes)):
            source = viewed(node)
            if source is not None and not node.users and node.target is not COPY:
                before = node.all_input_nodes
                gm.graph.erase_node(node)
                for one in before:  # what cut the parts, where this was one of them
                    if isinstance(one.meta.get("val"), (list, tuple)) and not one.users:
                        gm.graph.erase_node(one)


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
