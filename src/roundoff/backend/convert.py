"""AOTAutograd's functional graph of ATen operators as one ONNX graph, sizes symbolic or not.

An operator of the table (:mod:`.operators`) is written down directly. Any other stays with torch,
as a step between partitions: torch's exporter writes some hundred of them otherwise than eager
computes them (NaN, -0, overflow, train()), so it is not asked. A float that sizes decide is taken
as it is: dynamo guards it, and compiles again where it is another.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundoff.errors import RoundoffError, UnsupportedError

from .converter import Converted, Converter, LeftToTorchError
from .operators import TABLE
from .others import by_torch
from .sizes import is_empty

#: How the reason begins why an operator stays with torch for arguments that nobody foresaw.
UNFORESEEN = "its ONNX form fails for these arguments"


def opset_for(gm: torch.fx.GraphModule, processor: str) -> int:
    """The opset of a graph.

    24, which has TensorScatter, on CUDA for a graph that may write one place of an input (a step of
    a static cache): on an H200 it then takes 0.96 to 0.98 of the time. Others keep 20, of which all
    operators are known to have kernels there.
    """
    written = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.index_copy.default)
    return 24 if processor == "CUDA" and written else 20


def convert(
    gm: torch.fx.GraphModule,
    examples: Sequence[Any],
    names: Sequence[str],
    outputs: Sequence[str],
    opset: int,
    refused: Mapping[str, str],
    fallback: bool,
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
    refused : mapping of str to str
        Nodes of *gm* that have to stay with torch -> why.
    fallback : bool
        Whether any may.

    Raises
    ------
    UnsupportedError
        Without *fallback*, an operator has no ONNX form; the message names it.
    """
    converter = Converter(gm, examples, names, opset)
    for node in gm.graph.nodes:
        try:
            if converter.begin(node):
                converter.end(node, _written(converter, node, refused))
        except RoundoffError:
            raise
        except Exception as e:
            raise UnsupportedError(
                "an operator that cannot be converted",
                got=f"{node.target} ({type(e).__name__}: {e})",
                hint="torch.compiler.disable on the part that holds it breaks the graph there",
            ) from e
        if converter.by_torch and not fallback:
            (reason,) = set(converter.by_torch.values())
            raise UnsupportedError(reason, got=str(node.target))
    return converter.finish(gm, outputs)


def _lost_its_check(node: torch.fx.Node) -> bool:
    """Whether a linear solver of torch 2.11 lost the check that refuses a singular matrix.

    The check has no result, and AOTAutograd left it out. Such an operator's last result says of
    each matrix whether it was solved.
    """
    name = str(node.target)
    if "_linalg_check_errors" in name:
        return True
    if "linalg_" not in name or "_ex." not in name:
        return False
    last = len(node.meta["val"]) - 1
    return not any(user.args[1] == last and user.users for user in node.users)


def _written(c: Converter, node: torch.fx.Node, refused: Mapping[str, str]) -> Any:
    """A node's values: by the table, or by torch itself."""
    if node.target is torch.ops.higher_order.with_effects or _lost_its_check(node):
        # Its order among others is kept by a token, which is no tensor when the graph is called.
        raise UnsupportedError(
            "an operator with an effect",
            got=str(node.target if _lost_its_check(node) else node.args[1]),
            hint="torch.compiler.disable on the part that holds it breaks the graph there",
        )
    reason = refused.get(node.name) or _of_its_types(c, node)
    if reason is None:
        result, reason = _in_onnx(c, node)
        if result is not NotImplemented:
            return result
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        # Handed copies by a partition, torch would write to them.
        raise UnsupportedError("an operator that writes to its inputs", got=str(node.target))
    result = by_torch(c, node)
    c.by_torch[str(node.target)] = reason
    return result


def _in_onnx(c: Converter, node: torch.fx.Node) -> tuple[Any, str]:
    """A node's values as the table writes them, or ``NotImplemented`` and why."""
    write: Any = TABLE.get(node.target)
    reason = "no form in ONNX is known to compute the same"
    if write is None:
        return NotImplemented, reason
    before = c.state()
    try:
        result = write(c, node, *node.args, **node.kwargs)
    except (LeftToTorchError, RoundoffError) as e:
        result, reason = NotImplemented, str(e)
    except Exception as e:
        # A writer counts with numbers where a graph may have a symbol (a stride, a number of
        # groups): what it cannot write torch computes.
        result, reason = NotImplemented, f"{UNFORESEEN}: {type(e).__name__}: {e}"
    if result is NotImplemented:
        c.forget(before)
    return result, reason


def _of_its_types(c: Converter, node: torch.fx.Node) -> str | None:
    """Why an operator stays with torch for the types of its tensors, if it does."""
    if node.target in (operator.getitem, torch.ops.aten.copy_.default):
        return None  # which compute nothing
    values = pytree.tree_leaves([n.meta.get("val") for n in (node, *node.all_input_nodes)])
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if _lacks_elements(node):
        return "without elements ONNX Runtime's kernels leave out terms that torch's add"
    if any(v.is_complex() for v in tensors):
        return "complex numbers have no kernels in ONNX Runtime"
    if any(v.dtype == torch.float64 and v.dim() for v in tensors):  # not a number of Python's
        return "ONNX Runtime holds the scale and the epsilon of an operator in float32"
    if c.on_cpu and any(v.dtype == torch.bfloat16 for v in tensors):
        return "ONNX Runtime has few kernels of bfloat16 on a processor"
    if c.on_cpu and any(v.dtype == torch.float16 for v in tensors):
        return "ONNX Runtime does not round to float16 between operators on a processor"
    return None


#: What hands its tensor on, or a part of it: no kernel computes.
_PASSING = [
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.lift_fresh_copy.default,
    torch.ops.aten.slice.Tensor,
]


def _lacks_elements(node: torch.fx.Node) -> bool:
    """Whether a tensor that a node reads, or that others read of it, has no elements."""
    if node.target in _PASSING:
        return False
    made = node.meta.get("val")
    if isinstance(made, (list, tuple)):
        # A norm that is not in train() has statistics without elements, which nothing reads.
        made = [made[user.args[1]] for user in node.users if user.users]  # type: ignore[index]
    # An empty part of a cat adds nothing, and is not written.
    joins = node.target is torch.ops.aten.cat.default
    read = [] if joins else [n.meta.get("val") for n in node.all_input_nodes]
    tensors = pytree.tree_leaves([made, read])
    return any(is_empty(v) for v in tensors if isinstance(v, torch.Tensor))
