"""Nodes that draw random numbers: each runtime draws its own, so that no two runs agree."""

from __future__ import annotations

from roundoff.errors import UnsupportedError
from roundoff.evaluator import Node, TorchOnnxEvaluator

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
    told = [f"{node.label!r} ({node.operator})" for node in evaluator.walk() if _draws(node)]
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
    key = (node.domain, node.op_type)
    if key in _ALWAYS:
        return True
    if key != ("", "Dropout") or node.version < _TRAINS:
        return False
    return node.has_input(2) and bool(node.constants.get(2, True))
