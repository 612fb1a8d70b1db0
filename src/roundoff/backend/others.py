"""Operators outside of the table: by torch's exporter, one at a time, or by torch itself."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import sympy  # type: ignore[import-untyped]
import torch
from torch.utils import _pytree as pytree

from roundoff.errors import UnsupportedError

from .capture import outside
from .converter import Converter, fixed_number
from .outputs import contiguous
from .sizes import dim, dims, hint

__all__ = ["EXPORTED", "EXPORTED_DIVISIONS", "EXPORTED_INTEGERS", "by_exporter", "by_torch"]

_KNOWN = """
exp2.default tan.default asin.default acos.default atan.default sinh.default cosh.default
asinh.default acosh.default atanh.default log2.default log10.default round.default
deg2rad.default
isnan.default isinf.default isposinf.default isneginf.default nan_to_num.default
logical_xor.default clamp.Tensor clamp_min.Tensor clamp_max.Tensor
elu.default mish.default softplus.default
histc.default count_nonzero.default
flip.default roll.default diag_embed.default diagonal.default
diagonal_copy.default trace.default unfold.default slice_scatter.default unsafe_split.Tensor
index.Tensor _unsafe_index.Tensor bucketize.Tensor isin.Tensor_Tensor
reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default
replication_pad1d.default replication_pad2d.default replication_pad3d.default
mse_loss.default smooth_l1_loss.default huber_loss.default
mv.default dot.default addmv.default addmm.default addbmm.default linalg_cross.default
native_group_norm.default native_layer_norm.default _native_batch_norm_legit.no_stats
avg_pool1d.default avg_pool2d.default avg_pool3d.default _adaptive_avg_pool2d.default
pixel_shuffle.default pixel_unshuffle.default channel_shuffle.default col2im.default
im2col.default _upsample_bilinear2d_aa.default
"""
#: Operators of which the form that torch's exporter gives computes what eager does, with special
#: values, at every size, in all types but float64: ``tests/paths/test_functions.py`` holds them to
#: it. Left out are those that take NaN, -0, an overflow, nothing or a negative index otherwise, or
#: leave an argument out.
EXPORTED = frozenset(f"aten.{name}" for name in _KNOWN.split())
# What the exporter made of one operator, by all that decides it: a model of thirty layers asks for
# the same one thirty times. Bytes, which nobody can change.
_exported: dict[Hashable, bytes | str] = {}
_MOST = 256

#: As :data:`EXPORTED`, for integers alone: of floats NaN has no order.
EXPORTED_INTEGERS = frozenset(["aten.sort.default"])
#: As :data:`EXPORTED`, for integers by a number, which is not -1: the lowest integer divided by -1
#: ends the process.
EXPORTED_DIVISIONS = frozenset(["aten.floor_divide.default", "aten.remainder.Scalar"])


def by_exporter(c: Converter, node: torch.fx.Node) -> Any:
    """The nodes that torch's exporter writes for one operator, put into the graph.

    Raises
    ------
    UnsupportedError
        It has no form for the operator, or none for all sizes at once.
    """
    space = str(getattr(node.target, "namespace", ""))
    if space not in ("aten", "prims"):  # a library's or a user's own: no need to ask
        raise _unsupported(node, f"an operator of {space or type(node.target).__name__}")
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.fx.Node) and _is_tensor(x)]
    tensors = list(dict.fromkeys(tensors))
    others = [x for x in leaves if isinstance(x, torch.fx.Node) and not _is_tensor(x)]
    if any(isinstance(dim(x.meta["val"]), str) for x in others if _is_integer(x)):
        raise _unsupported(node, "an argument is a symbolic size")
    if not tensors or any(not _is_integer(x) for x in others):
        raise _unsupported(node, "no tensor among its arguments")
    examples = [x.meta["val"] for x in tensors]
    kinds = tuple((tuple(dims(e.shape)), e.dtype, e.device) for e in examples)
    place = {x: i for i, x in enumerate(tensors)}
    plain = tuple(_plain(x, place) for x in leaves)
    key = str((node.target, plain, spec, kinds, c.opset))
    data = _exported.get(key)
    if data is None:
        data = _export(node, tensors, examples, leaves, spec, c.opset)
        while len(_exported) >= _MOST:
            _exported.pop(next(iter(_exported)))
        _exported[key] = data
    if isinstance(data, str):
        raise _unsupported(node, data)
    return _inlined(c, data, [c.values[x] for x in tensors], node.meta["val"])


def _plain(x: Any, place: dict[torch.fx.Node, int]) -> Any:
    if not isinstance(x, torch.fx.Node):
        return repr(x)
    return ("tensor", place[x]) if x in place else dim(x.meta["val"])


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_integer(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _unsupported(node: torch.fx.Node, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"torch's exporter does not convert {node.target}", got=reason,
        hint="torch.compiler.disable on the part that holds it breaks the graph there",
    )  # fmt: skip


def _export(
    node: torch.fx.Node,
    tensors: Sequence[torch.fx.Node],
    examples: Sequence[torch.Tensor],
    leaves: Sequence[Any],
    spec: Any,
    opset: int,
) -> bytes | str:
    """The exporter's model of one operator, as bytes; or why there is none."""

    def forward(*inputs: torch.Tensor) -> Any:
        given = dict(zip(tensors, inputs, strict=True))
        plain = [
            given[x] if x in given else dim(x.meta["val"]) if isinstance(x, torch.fx.Node) else x
            for x in leaves
        ]
        args, kwargs = pytree.tree_unflatten(plain, spec)
        made = node.target(*args, **kwargs)  # type: ignore[operator]
        return tuple(m for m in made if m is not None) if isinstance(made, (list, tuple)) else made

    class Alone(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> Any:
            return forward(*inputs)

    with outside():
        # Never read and never written: memory that costs nothing.
        inputs = tuple(
            torch.empty([hint(n) for n in e.shape], dtype=e.dtype, device=e.device)
            for e in examples
        )
        symbolic = torch.export.Dim.DYNAMIC
        moving = tuple(
            {i: symbolic for i, n in enumerate(e.shape) if isinstance(dim(n), str)}
            for e in examples
        )
        try:
            program = torch.export.export(
                Alone(), inputs, dynamic_shapes=(moving,) if any(moving) else None, strict=False
            )
            result = torch.onnx.export(
                program, dynamo=True, optimize=True, verbose=False, opset_version=opset
            )
        except Exception as e:
            return _reason(e)
        assert result is not None
        return bytes(result.model_proto.SerializeToString())


def _reason(error: BaseException) -> str:
    """The innermost message, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300]


def _inlined(c: Converter, data: bytes, inputs: Sequence[ir.Value], expected: Any) -> Any:
    """Put a model's nodes into the graph; its outputs, in the form of *expected*."""
    model = ir.from_proto(onnx.ModelProto.FromString(data))
    graph = model.graph
    if model.functions or any(
        a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
        for n in graph
        for a in n.attributes.values()
    ):
        raise UnsupportedError("torch's exporter makes a function or a branch of it")
    given = dict(zip(graph.inputs, inputs, strict=True))
    outputs = [given.get(o, o) for o in graph.outputs]
    nodes = list(graph)
    constants = list(graph.initializers.values())
    graph.remove(nodes)
    for value in constants:
        value.name = c.fresh(f"{c.current}/{value.name}")
    graph.initializers.clear()
    graph.outputs.clear()
    for node in nodes:
        for i, x in enumerate(node.inputs):
            if x in given:
                node.replace_input_with(i, given[x])
        for out in node.outputs:
            out.name = c.fresh(f"%{c.current}") if out.name else ""
            if out.shape is not None and not out.shape.is_static():
                out.shape = ir.Shape([d if isinstance(d, int) else None for d in out.shape])
        node.name = c.fresh(f"{c.current}/{node.op_type}")
        node.metadata_props.clear()
        node.metadata_props["roundoff.fx"] = c.current
        c.append(node)
    c.append_initializers(constants)
    if not isinstance(expected, (list, tuple)):
        return outputs[0]
    rest = iter(outputs)
    return [None if e is None else next(rest) for e in expected]


def by_torch(c: Converter, node: torch.fx.Node) -> Any:
    """A step that calls the operator in torch, on the tensors where they lie."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
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
    # What is drawn goes to elements in the order of their memory.
    draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    tensors = [x for x in leaves if isinstance(x, torch.fx.Node) and _is_tensor(x)] if draws else []
    places = [place for place, kind in template if kind is torch.Tensor]
    laid = {
        place: _layout(x.meta["val"])
        for place, x in zip(places, tensors, strict=False)
        if not contiguous(x.meta["val"])
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
    repeated = [i for i, (s, n) in enumerate(zip(strides, example.shape, strict=True))
                if s == 0 and dim(n) != 1]  # fmt: skip

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
