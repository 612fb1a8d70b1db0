"""If: its branches run on the evaluator's own steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from roundoff.errors import ModelError, ShapeError
from roundoff.evaluator.values import type_name

from .common import Function, Node, Tensor, torch_kernel

Body = Callable[[tuple[Any, ...]], list[Any]]


def _body(node: Node, name: str) -> Body:
    """A branch as a function of all of the node's captures."""
    graph = node.subgraphs.get(name)
    if graph is None:
        raise ModelError(f"node {node.label!r} ({node.op_type}) has no {name}")
    places = [node.captures.index(c) for c in graph.captures]
    return lambda captures: graph.call([captures[k] for k in places])


def _truth_of(condition: Tensor) -> bool:
    if condition.numel() != 1 or condition.dtype != torch.bool:
        raise ShapeError("condition", got=type_name(condition), expected="one bool")
    return bool(condition)


@torch_kernel("If", 1)
def _if(node: Node) -> Function:
    then_branch, else_branch = _body(node, "then_branch"), _body(node, "else_branch")

    def branch(condition: Tensor, *captures: Any) -> Any:
        results = (then_branch if _truth_of(condition) else else_branch)(captures)
        if len(results) != len(node.outputs):
            raise ModelError(
                f"node {node.label!r} ({node.op_type})",
                got=f"{len(results)} results",
                expected=str(len(node.outputs)),
            )
        return results[0] if len(results) == 1 else tuple(results)

    return branch
