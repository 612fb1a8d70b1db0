"""From dynamo's graph to ONNX: products and attention stay single operators until then."""

from __future__ import annotations

import collections
import contextlib
import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import TensorProperty, TensorPropertySource
from torch._dynamo.symbolic_convert import TensorifyState
from torch.utils._python_dispatch import (
    _disable_current_modes,
)

from .outputs import is_joined
from .views import memory

# Functionalisation takes a product with a weight apart into views and a two-axis product, and
# attention into whatever kernel torch would have picked. As operators of our own they pass
# through it whole, and rules find them by name afterwards.
_LIBRARY = torch.library.Library("roundoff", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
_LIBRARY.define("matmul(Tensor a, Tensor b) -> Tensor")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, float dropout=0.0,"
    " bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor"
)
_LINEAR, _MATMUL = torch.ops.roundoff.linear.default, torch.ops.roundoff.matmul.default
_ATTENTION = torch.ops.roundoff.attention.default


def _by_torch(*tensors: Any, **options: Any) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*tensors, **options).contiguous()


_LIBRARY.impl("linear", torch.nn.functional.linear, "CompositeExplicitAutograd")
_LIBRARY.impl("matmul", torch.matmul, "CompositeExplicitAutograd")
_LIBRARY.impl("attention", _by_torch, "CompositeExplicitAutograd")


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # A product of vectors, or of other types than floats, is none that a rule would fuse.
    plain = a.dim() >= 2 and b.dim() >= 2 and a.is_floating_point() and a.dtype == b.dtype
    return (_MATMUL if plain else torch.matmul)(a, b)


def _linear(
    input: torch.Tensor,  # noqa: A002 - the name in torch's signature
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    plain = input.dim() >= 2 and weight.dim() == 2
    return (_LINEAR if plain else torch.nn.functional.linear)(input, weight, bias)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    plain = not dropout_p and query.dim() == 4 and query.is_floating_point()
    attend = _ATTENTION if plain else torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask, dropout_p, is_causal, **options)


_KEEP = {
    torch.nn.functional.linear: _linear,
    torch.matmul: _product,
    operator.matmul: _product,
    torch.nn.functional.scaled_dot_product_attention: _attention,
}


def fixed_numbers(gm: torch.fx.GraphModule) -> dict[torch.fx.Node, float]:
    """The floats of modules, which are taken as constants: placeholder -> value.

    Dynamo passes a float as a tensor of one number where sizes are symbolic. One that an operator
    takes as a number (an epsilon, a scale) makes AOTAutograd give up half-way, and dynamo trace the
    frame a second time, which takes as long as the first. Here a module's float is a constant, and
    a guard has the frame compiled again when its value is another.
    """
    fixed: dict[torch.fx.Node, float] = {}
    for place in gm.graph.find_nodes(op="placeholder"):
        argument = place.meta.get("grapharg")
        if not getattr(argument, "pass_arg_as_tensor", False):
            continue
        source, example = argument.source, argument.example
        if not source.guard_source.is_unspecialized_nn_module() or example.dtype != torch.float64:
            continue
        value = example.item()
        if value != 0:  # which a guard takes for -0.0
            install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))
            fixed[place] = value
    return fixed


def tensors_of(gm: torch.fx.GraphModule) -> dict[Any, torch.Tensor]:
    """The inputs of dynamo's graph that are tensors: where they come from -> the fake tensor."""
    return {
        place.meta["grapharg"].source: value
        for place in gm.graph.find_nodes(op="placeholder")
        if isinstance(value := place.meta.get("example_value"), torch.Tensor)
        and value.layout == torch.strided
        and place.meta.get("grapharg") is not None
    }


def guard_offsets(tensors: Mapping[Any, torch.Tensor], gm: torch.fx.GraphModule) -> None:
    """Have the frame compiled again where inputs that share memory begin elsewhere in it.

    Inputs that overlap, and one of which is written, AOTAutograd hands over as the memory of all:
    its graph cuts them from it where they began in the call that was traced.

    Parameters
    ----------
    tensors : mapping
        Of :func:`tensors_of`, of dynamo's graph.
    gm : torch.fx.GraphModule
        AOTAutograd's.
    """
    places = gm.graph.find_nodes(op="placeholder")
    if not any(map(is_joined, places)):
        return
    count = collections.Counter(map(memory, tensors.values()))
    for source, value in tensors.items():
        if count[memory(value)] > 1:
            begin = TensorPropertySource(source, TensorProperty.STORAGE_OFFSET)
            install_guard(begin.make_guard(GuardBuilder.EQUALS_MATCH))


@contextlib.contextmanager
def as_constants(places: Iterable[torch.fx.Node]) -> Iterator[None]:
    """Within it AOTAutograd does not ask dynamo to take these floats as constants: they are."""
    names = set()
    for place in places:
        for item in place.users:
            number = item.meta["example_value"].node
            names.add(str(getattr(number, "_expr", number.expr)))  # the name, not the value
    names -= TensorifyState.force_specializations
    TensorifyState.force_specializations |= names
    try:
        yield
    finally:
        TensorifyState.force_specializations -= names


def keep_composites(
    gm: torch.fx.GraphModule, numbers: Mapping[torch.fx.Node, float]
) -> torch.fx.GraphModule:
    """A copy of dynamo's graph in which products and attention pass functionalisation whole.

    Left as it is where autocast is on, as autocast chooses types operator by operator. The
    *numbers* are constants in it: their placeholders stay, and nothing reads them.
    """
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for place, value in numbers.items():
        for item in list(copies[place].users):
            if item.op == "call_method" and item.target == "item":
                item.replace_all_uses_with(cast(Any, value))
                graph.erase_node(item)
    for old, new in copies.items():
        # Where an input comes from, beside its meta: AOTAutograd finds the weights by it.
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    autocast = any("autocast" in str(n.target) for n in graph.nodes if n.op == "call_function")
    if not autocast and not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        for node in graph.nodes:
            if node.op == "call_function" and "out" not in node.kwargs:
                node.target = _KEEP.get(node.target, node.target)
            elif node.op == "call_method" and node.target in ("matmul", "__matmul__"):
                node.op, node.target = "call_function", _product
    kept = torch.fx.GraphModule(gm, graph)
    kept.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        kept._param_name_to_source = gm._param_name_to_source
    return kept


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Out of dynamo's tracing, of fake tensors and every other mode, quietly."""
    with (
        _disable_current_modes(),
        torch._guards.tracing(None),
        torch.inference_mode(False),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield
