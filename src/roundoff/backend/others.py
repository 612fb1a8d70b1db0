"""Operators outside of the table: calls of torch, on the tensors where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from roundoff.errors import UnsupportedError

from .converter import Converter
from .outputs import axes_by_stride
from .sizes import dim, hint
from .views import chain, folded, materialized, memory

_STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)

_UNFOLDED = torch.ops.aten.unfold_backward.default

_FOLDED = "a write to a view of which several elements lie in one place"
_SCATTERED = "a write through unfold() that does not reach each element once"


def reaches_all(shape: Sequence[int], axis: int, size: int, step: int) -> bool:
    """Whether each element of a tensor lies in one window of ``unfold``, and in one alone.

    What a graph makes of a write to the windows is 0 in all others.

    Examples
    --------
    >>> reaches_all((6,), 0, 2, 2), reaches_all((7,), 0, 2, 2), reaches_all((6,), 0, 2, 1)
    (True, False, False)
    """
    count = shape[axis] if shape else 1
    return count in (0, size) or (step == size and count % step == 0)


def _laid(order: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What gives a tensor the order of axes in memory that it has in torch."""
    back = [order.index(i) for i in range(len(order))]
    return lambda tensor: tensor.permute(order).contiguous().permute(back)


def leaves_of(node: torch.fx.Node) -> dict[int, torch.Tensor]:
    """The fake tensors among the arguments of a node, by their place in the flat list."""
    leaves, _ = pytree.tree_flatten((node.args, node.kwargs))
    values = {i: x.meta.get("val") for i, x in enumerate(leaves) if isinstance(x, torch.fx.Node)}
    return {i: value for i, value in values.items() if isinstance(value, torch.Tensor)}


def by_torch(c: Converter, node: torch.fx.Node) -> Any:
    """A step that calls the operator in torch, on the tensors where they lie."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    inputs: list[ir.Value] = []
    # An argument that a call brings, as its place among the inputs; or a constant.
    tensors: dict[int, int] = {}
    integers: dict[int, int] = {}
    for i, x in enumerate(leaves):
        if not isinstance(x, torch.fx.Node):
            continue
        value = x.meta.get("val")
        leaves[i] = None
        if isinstance(value, torch.Tensor):
            tensors[i] = len(inputs)
            inputs.append(c.values[x])
        elif isinstance(value, (int, torch.SymInt)):
            integers[i] = len(inputs)
            inputs.append(c.size(dim(value)))
        elif isinstance(value, (float, torch.SymFloat)):
            leaves[i] = float(value)
        else:
            raise UnsupportedError("an argument that is no tensor", got=str(value))
    # What reads memory around its tensor is handed all of it.
    restored: Callable[[torch.Tensor], torch.Tensor] = materialized
    if node.target in _STRIDED:
        (*_, base) = nodes = chain(node.args[0])  # type: ignore[arg-type]
        if node.target is _STRIDED[0]:
            view = c.view_of_input([*nodes, node])
            if view is not None:
                return view
            base = nodes[0]
        value = base.meta["val"]
        order = axes_by_stride(value)
        if order is None or dim(value.storage_offset()):
            raise UnsupportedError("a strided view of memory that is not all of a tensor")
        inputs[0] = c.values[base]
        if node.target is _STRIDED[0] and len(node.args) < 4 and node.args[0] is not base:
            raise UnsupportedError("a strided view of memory that begins where another view does")
        restored = _laid(order)
    scatters = str(node.target).split(".")[1].endswith("_scatter")
    if scatters:
        written = node.args[0].meta["val"]  # type: ignore[union-attr]
        if folded([hint(n) for n in written.shape], [hint(n) for n in written.stride()]):
            raise UnsupportedError(_FOLDED, hint="clone() it")
    expected = node.meta["val"]
    single = isinstance(expected, torch.Tensor)
    given_values = [x.meta.get("val") for x in node.all_input_nodes]
    read = {memory(value) for value in given_values if isinstance(value, torch.Tensor)}
    examples = [expected] if single else list(expected or ())
    if any(e is not None and not isinstance(e, torch.Tensor) for e in examples):
        raise UnsupportedError("an operator that returns no tensors", got=str(node.target))
    kept = [i for i, e in enumerate(examples) if e is not None]
    # What reads the result counts on the type that torch foretold, and a few operators return
    # another: a norm in train() its new statistics in float16, foretold in float32.
    kinds = [(i, examples[i].dtype) for i in kept]
    # A single number of the processor's is a float32 to torch; on the GPU it would be cast first.
    single_numbers = [
        i
        for i, x in leaves_of(node).items()
        if i in tensors and not c.on_cpu and x.dim() == 0 and x.device.type == "cpu"
    ]
    target, strided = node.target, node.target in _STRIDED

    def run(given: Sequence[Any], _: dict[str, Any]) -> list[torch.Tensor]:
        arguments = list(leaves)
        for i, place in tensors.items():
            arguments[i] = given[place]
        for i in single_numbers:
            arguments[i] = arguments[i].cpu()
        for i, place in integers.items():
            arguments[i] = int(given[place])
        if strided:
            arguments[0] = restored(arguments[0])
        args, kwargs = pytree.tree_unflatten(arguments, spec)
        if strided and scatters and folded(*args[2:4]):
            raise UnsupportedError(_FOLDED, hint="clone() it")
        if target is _UNFOLDED and not reaches_all(*args[1:5]):
            raise UnsupportedError(_SCATTERED, hint="write to narrow() of it first")
        made = target(*args, **kwargs)  # type: ignore[operator]
        listed = [made] if single else list(made)
        return [materialized(listed[i].to(dtype)) for i, dtype in kinds]

    # A recording runs a step twice before it records it: torch's generator would go on.
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        run.draws = str(target)  # type: ignore[attr-defined]
    name = f"torch.{node.name}"
    c.kernels[name] = run
    outputs = [c.value_like(examples[i]) for i in kept]
    if any(memory(examples[i]) in read for i in kept):
        c.views.update(outputs)  # perhaps in memory that is the caller's
    c.add(name, inputs, outputs, domain="roundoff")
    found: list[Any] = [None] * len(examples)
    for i, value in zip(kept, outputs, strict=True):
        found[i] = value
    return found[0] if single else found
