"""Nodes that draw random numbers: each runtime draws its own, so that no two runs agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from roundoff.errors import UnsupportedError
from roundoff.evaluator import Node, TorchOnnxEvaluator
from roundoff.evaluator.values import to_numpy

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


def check_drawing(evaluator: TorchOnnxEvaluator, feeds: Mapping[str, Any]) -> None:
    """Refuse a model that draws, in its functions and in the bodies of its nodes, too.

    Raises
    ------
    UnsupportedError
        The message names the nodes.
    """
    told = [f"{node.label!r} ({node.operator})" for node in evaluator.walk() if _draws(node, feeds)]
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


def _draws(node: Node, feeds: Mapping[str, Any]) -> bool:
    key = (node.domain, node.op_type)
    if key in _ALWAYS:
        return True
    if key != ("", "Dropout") or node.version < _TRAINS:
        return False
    ratio, training = (_known(node, k, feeds) for k in (1, 2))
    if not node.has_input(2) or (training is not None and not training):
        return False
    return ratio is None or ratio != 0


def _known(node: Node, position: int, feeds: Mapping[str, Any]) -> float | None:
    """A number that the model or the feeds give; None where only a run would tell."""
    if not node.has_input(position):
        return None
    value = node.constants.get(position, feeds.get(node.inputs[position]))
    return None if value is None else float(np.asarray(to_numpy(value)).reshape(-1)[0])
