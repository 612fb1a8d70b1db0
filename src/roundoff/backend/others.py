"""Operators outside of the table: calls of torch, on the tensors where they lie."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import sympy  # type: ignore[import-untyped]
import torch
from torch.utils import _pytree as pytree

from roundoff.errors import UnsupportedError

from .converter import Converter, fixed_number
from .outputs import contiguous, memory, permutation
from .sizes import dim, hint

__all__ = ["by_torch"]

_STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_integer(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def by_torch(c: Converter, node: torch.fx.Node) -> Any:
    """A step that calls the operator in torch, on the tensors where they lie."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    strided = node.target in _STRIDED
    if strided:
        base = leaves[0].meta["val"]
        dense = contiguous(base) or permutation(base.shape, base.stride()) is not None
        # An input is handed over as it is; a view of one, or one that is turned, as a copy, which
        # tells nothing of where that began.
        handed = leaves[0].op == "placeholder" and contiguous(base)
        places = [] if handed else node.graph.find_nodes(op="placeholder")
        inside = any(memory(p.meta["val"]) == memory(base) for p in places if _is_tensor(p))
        if not dense or inside or dim(base.storage_offset()):
            raise UnsupportedError("a strided view of memory that is not all of a tensor")
    inputs: list[ir.Value] = []
    template: list[Any] = []
    for x in leaves:
        if not isinstance(x, torch.fx.Node):
            template.append((None, x))
        elif _is_tensor(x):
            template.append((len(inputs), torch.Tensor))
            inputs.append(c.values[x])
        elif _is_integer(x):
            template.append((len(inputs), int))
            inputs.append(c.size(dim(x.meta["val"])))
        elif isinstance(x.meta.get("val"), (float, torch.SymFloat)):
            number = _Number(x.meta["val"])
            template.append((len(inputs), number))
            inputs.extend(c.size(symbol) for symbol in number.symbols)
        else:
            template.append((None, _module(x)))
    expected = node.meta["val"]
    single = isinstance(expected, torch.Tensor)
    examples = [expected] if single else list(expected or ())
    if any(e is not None and not isinstance(e, torch.Tensor) for e in examples):
        raise UnsupportedError("an operator that returns no tensors", got=str(node.target))
    kept = [i for i, e in enumerate(examples) if e is not None]
    # What reads the result counts on the type that torch foretold, and a few operators return
    # another: a norm in train() its new statistics in float16, foretold in float32.
    kinds = [(i, examples[i].dtype) for i in kept]
    target = node.target
    # What is drawn goes to elements in the order of their memory, and strides count in it.
    draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    tensors = [x for x in leaves if isinstance(x, torch.fx.Node) and _is_tensor(x)]
    places = [place for place, kind in template if kind is torch.Tensor]
    laid = {
        place: _layout(x.meta["val"])
        for place, x in zip(places, tensors, strict=True)
        if (draws or strided) and not contiguous(x.meta["val"])
    }

    def run(given: Sequence[Any], _: dict[str, Any]) -> list[torch.Tensor]:
        if laid:
            given = [laid[i](x) if i in laid else x for i, x in enumerate(given)]
        plain = [_argument(given, place, kind) for place, kind in template]
        args, kwargs = pytree.tree_unflatten(plain, spec)
        made = target(*args, **kwargs)  # type: ignore[operator]
        listed = [made] if single else list(made)
        return [listed[i].to(dtype).contiguous() for i, dtype in kinds]

    # A recording runs a step twice before it records it: torch's generator would go on.
    if draws:
        run.draws = str(target)  # type: ignore[attr-defined]
    name = f"torch.{node.name}"
    c.kernels[name] = run
    outputs = [c.value_like(examples[i]) for i in kept]
    c.add(name, inputs, outputs, domain="roundoff")
    found: list[Any] = [None] * len(examples)
    for i, value in zip(kept, outputs, strict=True):
        found[i] = value
    return found[0] if single else found


def _layout(example: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What gives a contiguous copy the order of axes in memory that *example* has."""
    strides = [hint(s) for s in example.stride()]
    order = sorted(range(len(strides)), key=lambda i: -strides[i])
    back = sorted(order, key=order.__getitem__)
    repeated = [
        i
        for i, (s, n) in enumerate(zip(strides, example.shape, strict=True))
        if s == 0 and dim(n) != 1
    ]

    def lay(x: torch.Tensor) -> torch.Tensor:
        single = x
        for axis in repeated if x.numel() else ():
            single = single.narrow(axis, 0, 1)
        return single.permute(order).contiguous().permute(back).expand(x.shape)

    return lay


class _Number:
    """A float that sizes decide, as torch writes it down."""

    def __init__(self, number: float | torch.SymFloat) -> None:
        known = fixed_number(number)
        self._expression = sympy.Float(known) if known is not None else number.node.expr  # type: ignore[union-attr]
        self.symbols = sorted(str(s) for s in self._expression.free_symbols)
        self._known: dict[tuple[int, ...], float] = {}

    def __call__(self, sizes: tuple[int, ...]) -> float:
        if sizes not in self._known:
            values = dict(zip(self.symbols, sizes, strict=True))
            symbols = {s: values[str(s)] for s in self._expression.free_symbols}
            self._known[sizes] = float(self._expression.subs(symbols))
        return self._known[sizes]


def _argument(given: Sequence[Any], place: int | None, kind: Any) -> Any:
    """An argument of a call: a constant, an integer or a float of sizes, or a tensor."""
    if place is None:
        return kind
    if isinstance(kind, _Number):
        return kind(tuple(int(n) for n in given[place : place + len(kind.symbols)]))
    return int(given[place]) if kind is int else given[place]


def _module(node: torch.fx.Node) -> Any:
    """What an argument that is no tensor stands for: a module of the graph's own."""
    if node.op != "get_attr":
        raise UnsupportedError("an argument that is no tensor", got=str(node.meta.get("val")))
    return operator.attrgetter(str(node.target))(node.graph.owning_module)
