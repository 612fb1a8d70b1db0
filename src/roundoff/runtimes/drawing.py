"""Nodes that draw random numbers: each runtime draws its own, so that no two runs agree."""

from __future__ import annotations

from onnx import GraphProto

from roundoff.errors import UnsupportedError
from roundoff.evaluator import Node, TorchOnnxEvaluator
from roundoff.graph.protos import bodies

__all__ = ["check_drawing"]

_ALWAYS = frozenset(
    {
        ("", "Bernoulli"),
        ("", "Multinomial"),
        ("", "RandomNormal"),
        ("", "RandomNormalLike"),
        ("", "RandomUniform"),
        ("", "RandomUniformLike"),
    }
)
#: First version of Dropout that has a training mode, of those that ONNX Runtime has.
_TRAINS = 12


def check_drawing(evaluator: TorchOnnxEvaluator) -> None:
    """Refuse a model that draws, in its functions and in the bodies of its nodes, too.

    Raises
    ------
    UnsupportedError
        The message names the nodes.
    """
    told = [f"{node.name!r} ({node.operator})" for node in evaluator.nodes if _draws(node)]
    if not told:
        return
    more = f" and {len(told) - 4} more" if len(told) > 4 else ""
    raise UnsupportedError(
        "the model draws random numbers: what follows differs in every run, whichever runtime",
        got=f"{', '.join(told[:4])}{more}",
        expected="a model that gives the same twice",
        hint="export after module.eval() (Dropout without training), or make what is drawn an "
        "input of the model and feed both runtimes the same",
    )


def _draws(node: Node) -> bool:
    if any(_draws_within(body) for body in node.subgraphs.values()):
        return True
    key = (node.domain, node.op_type)
    if key in _ALWAYS:
        return True
    if key != ("", "Dropout") or node.version < _TRAINS:
        return False
    return node.has_input(2) and bool(node.constants.get(2, True))


def _draws_within(graph: GraphProto) -> bool:
    """Whether the body of a node draws; a Dropout there counts where it has a training mode."""
    return any(
        ("", node.op_type) in _ALWAYS
        or (node.op_type == "Dropout" and len(node.input) > 2)
        or any(_draws_within(body) for _, body in bodies(node))
        for node in graph.node
    )
