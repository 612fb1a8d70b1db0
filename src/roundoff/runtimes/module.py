"""The module that a model was exported from: called on the model's feeds."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from roundoff.describe import tree_leaves
from roundoff.errors import ArgumentError, ShapeError
from roundoff.evaluator import TorchOnnxEvaluator
from roundoff.evaluator.values import brief, type_name


def check_module(
    outputs: Sequence[str],
    like: Sequence[Any],
    results: Sequence[Any],
) -> None:
    """The module gives as many tensors as *outputs*, of the shapes of *like*.

    Raises
    ------
    ArgumentError, ShapeError
        It does not.
    """
    if len(results) != len(outputs):
        raise ArgumentError(
            "outputs of the module",
            got=f"{len(results)} ({', '.join(map(type_name, results))})",
            expected=f"{len(outputs)}: {', '.join(outputs)}",
        )
    for name, ours, theirs in zip(outputs, like, results, strict=True):
        if getattr(ours, "shape", None) != getattr(theirs, "shape", None):
            raise ShapeError(
                f"the module's output for {name!r}", got=type_name(theirs), expected=type_name(ours)
            )


def call_module(module: Any, evaluator: TorchOnnxEvaluator, feeds: Mapping[str, Any]) -> list[Any]:
    """Outputs of the module in ``eval()``; those of a dict with the model's names by name.

    It gets copies of the feeds, where its parameters lie: what it writes into them would reach the
    next run. It gets them by name, or else in the order of the model's inputs.

    Raises
    ------
    ArgumentError
        The module fails, or torch's random state shows that it draws.
    """
    is_module = isinstance(module, torch.nn.Module)
    parameter = next(module.parameters(), None) if is_module else None
    device = None if parameter is None else parameter.device
    arguments = {name: feeds[name] for name in evaluator.input_names if name in feeds}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = value.to(device or value.device, copy=True)
    try:
        named = set(inspect.signature(module.forward if is_module else module).parameters)
    except (ValueError, TypeError):  # a compiled function has none
        named = set()
    before = _random_states()
    try:
        with torch.no_grad(), _evaluating(module):
            by_name = set(arguments) <= named
            result = module(**arguments) if by_name else module(*arguments.values())
    except Exception as error:  # the caller's code: whatever it raises
        fed = ", ".join(f"{name}: {type_name(x)}" for name, x in arguments.items())
        raise ArgumentError(
            "the module fails on the model's feeds",
            got=f"{brief(error)} for {fed}",
            expected="the module that the model was exported from",
        ) from error
    if not all(map(torch.equal, before, _random_states())):
        raise ArgumentError(
            "the module draws random numbers",
            got=type(module).__name__,
            expected="a module that gives the same twice",
            hint="make what is drawn an input of it",
        )
    if isinstance(result, Mapping) and set(result) == set(evaluator.output_names):
        result = [result[name] for name in evaluator.output_names]
    return tree_leaves(result)


def _random_states() -> list[torch.Tensor]:
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cards]


@contextlib.contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """The module in the mode of ``eval()``, as it is exported; its parts' own modes after it."""
    parts = list(module.modules()) if isinstance(module, torch.nn.Module) else []
    modes = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
