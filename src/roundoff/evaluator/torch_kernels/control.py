"""If and Loop: their bodies run on the evaluator's own steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from roundoff.errors import DtypeError, ModelError, ShapeError, UnsupportedError
from roundoff.evaluator.values import type_name

from .common import Function, Node, NotHandledError, Tensor, ints, torch_kernel

Body = Callable[[list[Any], tuple[Any, ...]], list[Any]]


#: A loop of more turns, or without a trip count of more than the second, is taken for endless.
MOST_TURNS = 10_000_000
MOST_OPEN_TURNS = 10_000


def _body(node: Node, name: str) -> Body:
    """A subgraph as a function of its inputs and of all of the node's captures."""
    graph = node.subgraphs.get(name)
    if graph is None:
        raise ModelError(f"node {node.label!r} ({node.op_type}) has no {name}")
    places = [node.captures.index(c) for c in graph.captures]

    def call(inputs: list[Any], captures: tuple[Any, ...]) -> list[Any]:
        return graph.call([*inputs, *[captures[k] for k in places]])

    return call


def _truth_of(condition: Tensor) -> bool:
    if condition.numel() != 1 or condition.dtype != torch.bool:
        raise ShapeError("condition", got=type_name(condition), expected="one bool")
    return bool(condition)


def _outputs_of(node: Node, results: list[Any]) -> Any:
    if len(results) != len(node.outputs):
        raise ModelError(
            f"node {node.label!r} ({node.op_type})",
            got=f"{len(results)} results",
            expected=str(len(node.outputs)),
        )
    return results[0] if len(results) == 1 else tuple(results)


@torch_kernel("If", 1)
def _if(node: Node) -> Function:
    then_branch, else_branch = _body(node, "then_branch"), _body(node, "else_branch")

    def branch(condition: Tensor, *captures: Any) -> Any:
        chosen = then_branch if _truth_of(condition) else else_branch
        return _outputs_of(node, chosen([], captures))

    return branch


@torch_kernel("Loop", 1)
def _loop(node: Node) -> Function:
    body, graph = _body(node, "body"), node.subgraphs["body"]
    carried = max(len(node.inputs) - 2, 0)
    scans = len(graph.output_names) - 1 - carried
    if len(graph.input_names) != 2 + carried or scans < 0:
        raise ModelError(
            f"node {node.label!r} (Loop): the body's inputs and outputs do not fit",
            got=f"{len(graph.input_names)} and {len(graph.output_names)}",
            expected=f"{2 + carried} and at least {1 + carried}",
        )

    def loop(*inputs: Any) -> Any:
        own = len(node.inputs)
        captures = inputs[own:]
        trips = inputs[0] if own > 0 else None
        condition = inputs[1] if own > 1 else None
        limit = None if trips is None else ints(trips)[0]
        going = True if condition is None else _truth_of(condition)
        state = list(inputs[2:own])
        rows: list[list[Any]] = [[] for _ in range(scans)]
        count = 0
        if limit is not None and limit > MOST_TURNS and going:
            raise UnsupportedError("trip count", got=limit, expected=f"at most {MOST_TURNS}")
        while going and (limit is None or count < limit):
            if limit is None and count == MOST_OPEN_TURNS:
                raise UnsupportedError(
                    f"no trip count, and no end after {count} turns",
                    hint="give a trip count, or a condition that turns false",
                )
            results = body([torch.tensor(count), torch.tensor(going), *state], captures)
            going = _truth_of(results[0])
            _check_carried(node, state, results[1 : 1 + carried])
            state = results[1 : 1 + carried]
            for row, value in zip(rows, results[1 + carried :], strict=True):
                row.append(value)
            count += 1
        return _outputs_of(node, state + [_stacked(row) for row in rows])

    return loop


def _check_carried(node: Node, before: list[Any], after: list[Any]) -> None:
    """A carried value may change its shape from turn to turn, not its type."""
    for old, new in zip(before, after, strict=True):
        if isinstance(old, Tensor) and (not isinstance(new, Tensor) or old.dtype != new.dtype):
            raise DtypeError(
                f"node {node.label!r} ({node.op_type}): a carried value changes its type",
                got=type_name(new),
                expected=type_name(old),
            )


def _stacked(rows: list[Any]) -> Tensor:
    if not rows:
        raise NotHandledError("a loop that never turns has no shape for its scan outputs")
    if not all(isinstance(r, Tensor) for r in rows):
        raise NotHandledError("scan outputs that are no tensors")
    return torch.stack(rows)
