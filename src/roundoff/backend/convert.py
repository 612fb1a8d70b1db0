"""AOTAutograd's functional graph of ATen operators as one ONNX graph, sizes symbolic or not.

An operator of the table (:mod:`.operators`) is written down directly, which takes microseconds;
any other is converted by torch's exporter, alone, each kind once; what that refuses stays with
torch, as a step between partitions.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundoff.errors import UnsupportedError

from .converter import Converted, Converter, fixed_number
from .operators import TABLE, writes_one_place
from .others import EXPORTED, EXPORTED_DIVISIONS, EXPORTED_INTEGERS, by_exporter, by_torch
from .sizes import dims

__all__ = ["convert", "opset_for"]


#: Operators of torch whose operator of ONNX has a later version than opset 20's: which of these
#: have a kernel on CUDA is not known, and what runs on the processor cannot be recorded in a graph.
_LATER = {"constant_pad_nd", "convolution", "eye", "max_pool2d_with_indices", "softplus"}


def opset_for(gm: torch.fx.GraphModule, processor: str) -> int:
    """The opset of a graph for which none is asked.

    24, which has TensorScatter, on CUDA for a graph that writes one place of an input (a step of a
    static cache): on an H200 it then takes 0.96 to 0.98 of the time. Others keep 20, and graphs
    with an operator that was not run in opset 24.
    """
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = [node.args[1] for node in copies if node.args[1].args[:1] == node.args[:1]]
    if processor != "CUDA" or not any(map(writes_one_place, written)):
        return 20
    called = {getattr(node.target, "overloadpacket", None) for node in gm.graph.nodes}
    return 20 if any(getattr(torch.ops.aten, name) in called for name in _LATER) else 24


def convert(
    gm: torch.fx.GraphModule,
    examples: Sequence[Any],
    names: Sequence[str],
    outputs: Sequence[str],
    opset: int,
    numbers: Mapping[int, float] | None = None,
    refused: Mapping[str, str] | None = None,
    fallback: bool = True,
) -> Converted:
    """Convert a functional graph.

    Parameters
    ----------
    gm : torch.fx.GraphModule
        Flat inputs, a flat tuple of tensors out, fake values in ``meta["val"]``.
    examples : sequence
        The inputs' fake values: tensors and integers.
    names, outputs : sequence of str
        Names for the ONNX graph's inputs (integers have one, too) and outputs.
    opset : int
    numbers : mapping of int to float, optional
        Inputs of one number that are taken as constants.
    refused : mapping of str to str, optional
        Nodes of *gm* that have to stay with torch -> why.
    fallback : bool
        Whether any may.

    Raises
    ------
    UnsupportedError
        Without *fallback*, an operator has no ONNX form; the message names it.
    """
    converter = Converter(opset)
    converter.read_inputs(gm, examples, names, numbers or {})
    for node in gm.graph.nodes:
        if converter.begin(node):
            converter.end(node, _written(converter, node, refused or {}, fallback))
            if converter.by_torch and not fallback:
                (reason,) = set(converter.by_torch.values())
                raise UnsupportedError(reason, got=str(node.target))
    return converter.finish(gm, outputs)


def _written(c: Converter, node: torch.fx.Node, refused: Mapping[str, str], fallback: bool) -> Any:
    """A node's values: by the table, by torch's exporter, or by torch itself."""
    reason = refused.get(node.name)
    if node.target is torch.ops.higher_order.with_effects:
        # Its order among others is kept by a token, which is no tensor when the graph is called.
        raise UnsupportedError(
            "an operator with an effect",
            got=str(node.args[1]),
            hint="torch.compiler.disable on the part that holds it breaks the graph there",
        )
    if reason is None and _is_complex(node):
        reason = "complex numbers have no kernels in ONNX Runtime"
        if not fallback:
            raise UnsupportedError(reason, got=str(node.target))
    if reason is None and _counts_on_a_size(node):
        reason = "a number that depends on a size"
    if reason is None:
        write: Any = TABLE.get(node.target)
        if write is not None and _takes(write, node):
            result = write(c, node, *node.args, **node.kwargs)
            if result is not NotImplemented:
                return result
        reason = _only_torch(node)
        if reason is not None and not fallback:
            raise UnsupportedError(reason, got=str(node.target))
    if reason is None:
        try:
            return by_exporter(c, node)
        except UnsupportedError as e:
            if not fallback:
                raise
            reason = str(e)
    result = by_torch(c, node)
    c.by_torch[str(node.target)] = reason
    return result


def _only_torch(node: torch.fx.Node) -> str | None:
    """Why a node outside of the table is not for torch's exporter, which writes what it can.

    The exporter writes a norm in train() as one in eval(), dropout as the identity, random numbers
    without torch's generator, and an operator that writes to its inputs as one that does not. So it
    is asked for operators of which its form is known to compute what eager does.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None
    if schema.name == "roundoff::checked":
        return "torch looks whether LAPACK failed"
    if schema.is_mutable:
        # Handed copies by a partition, torch would write to them.
        raise UnsupportedError("an operator that writes to its inputs", got=str(node.target))
    if torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
        return "an operator that draws random numbers, which torch's generator has to"
    given = {a.name: x for a, x in zip(schema.arguments, node.args, strict=False)} | node.kwargs
    if any(given.get(name) is True for name in ("train", "training")):
        return "an operator in training, which the exporter writes as in evaluation"
    tensors = _tensors(node)
    known = EXPORTED
    if not any(v.dtype.is_floating_point for v in tensors):
        known = known | EXPORTED_INTEGERS
        divisor = node.args[1] if len(node.args) > 1 else None
        if isinstance(divisor, int) and divisor not in (0, -1):
            known = known | EXPORTED_DIVISIONS
    if schema.name.startswith("aten::") and str(node.target) not in known:
        return "of the form that torch's exporter gives it nobody knows that it computes the same"
    shapes = [dims(v.shape) for v in tensors]
    if "index" in schema.name and any(isinstance(n, str) for shape in shapes for n in shape):
        return "torch's exporter loses the shape of what is indexed where sizes are symbolic"
    if given.get("divisor_override") is not None:
        return "torch's exporter leaves out the divisor"
    if any(v.dtype == torch.float64 for v in tensors):
        return "torch's exporter writes constants in float32"
    if any(0 in shape for shape in shapes):
        return "nothing is reduced to 0 by ONNX Runtime, and to NaN by torch"
    return None


def _counts_on_a_size(node: torch.fx.Node) -> bool:
    """Whether an argument is no integer, and a size decides it: 1 / sqrt(head), a scale."""
    values = [n.meta.get("val") for n in node.all_input_nodes]
    return any(isinstance(v, torch.SymFloat) and fixed_number(v) is None for v in values)


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    """The fake tensors that go in and come out."""
    values = pytree.tree_leaves([n.meta.get("val") for n in (node, *node.all_input_nodes)])
    return [v for v in values if isinstance(v, torch.Tensor)]


def _is_complex(node: torch.fx.Node) -> bool:
    """Whether a complex tensor goes in or comes out."""
    return any(v.is_complex() for v in _tensors(node))


def _takes(write: Any, node: torch.fx.Node) -> bool:
    """Whether an entry of the table knows all arguments of this call."""
    try:
        inspect.signature(write).bind(None, node, *node.args, **node.kwargs)
    except TypeError:
        return False
    return True
