"""The module that a model was exported from: called on the model's feeds."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from roundoff.describe import tree_leaves
from roundoff.errors import ArgumentError, DtypeError, RoundoffError, ShapeError
from roundoff.evaluator.values import type_name

__all__ = ["call_module", "check_module", "check_outputs", "without_draws"]


def check_module(module: Any) -> None:
    """Raise for what cannot be called."""
    if not callable(module):
        raise ArgumentError("module", got=type(module).__name__, expected="a torch.nn.Module")


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


def without_draws(
    module: Any,
    names: Sequence[str],
    feeds: Mapping[str, Any],
    device: torch.device,
    outputs: Sequence[str] = (),
) -> list[Any]:
    """Outputs of the module; an ArgumentError where torch's random state shows that it draws."""

    def states() -> list[torch.Tensor]:
        card = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [torch.get_rng_state(), *card]

    before = states()
    results = call_module(module, names, feeds, device, outputs)
    if not all(map(torch.equal, before, states())):
        raise ArgumentError(
            "the module draws random numbers",
            got=type(module).__name__,
            expected="a module that gives the same twice",
            hint="make what is drawn an input of it",
        )
    return results


def call_module(
    module: Any,
    names: Sequence[str],
    feeds: Mapping[str, Any],
    device: torch.device,
    outputs: Sequence[str] = (),
) -> list[Any]:
    """Outputs of the module in ``eval()``; those of a dict with the names *outputs* by name.

    It gets copies of the feeds: what it writes into them would reach the next run.
    """
    tensors = next(iter(module.parameters()), None) if hasattr(module, "parameters") else None
    place = tensors.device if isinstance(tensors, torch.Tensor) else device
    arguments = {
        n: feeds[n].to(place, copy=True) if isinstance(feeds[n], torch.Tensor) else feeds[n]
        for n in names
        if n in feeds
    }
    function = module.forward if isinstance(module, torch.nn.Module) else module
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # a compiled function has none
        return _outputs(module, tuple(arguments.values()), {}, outputs)
    named = {n for n, p in signature.parameters.items() if p.kind != p.POSITIONAL_ONLY}
    by_name = set(arguments) <= named
    positional, keywords = ((), arguments) if by_name else (tuple(arguments.values()), {})
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        raise ArgumentError(
            "the module does not take the model's inputs",
            got=str(list(arguments)),
            expected=f"arguments {signature}",
        ) from error
    return _outputs(module, positional, keywords, outputs)


def _outputs(
    module: Any, positional: tuple[Any, ...], named: Mapping[str, Any], names: Sequence[str]
) -> list[Any]:
    with torch.no_grad(), _evaluating(module):
        try:
            result = module(*positional, **named)
            if isinstance(result, Mapping) and set(result) == set(names):
                result = [result[name] for name in names]
            return tree_leaves(result)
        except RoundoffError:
            raise
        except Exception as error:  # the caller's code: whatever it raises
            text = (str(error).splitlines() or [type(error).__name__])[0]
            fed = ", ".join(type_name(x) for x in (*positional, *named.values()))
            raise ArgumentError(
                "the module fails on the model's feeds",
                got=f"{text[:200]} for {fed}",
                expected="the module that the model was exported from",
            ) from error


def check_outputs(names: Sequence[str], expected: Sequence[Any], got: Sequence[Any]) -> None:
    """The module gives as many tensors as the model has outputs, of the same shapes."""
    if len(names) != len(got):
        raise ArgumentError(
            "outputs of the module",
            got=f"{len(got)} ({', '.join(map(type_name, got))})",
            expected=f"{len(names)}: {', '.join(names)}",
        )
    for name, ours, theirs in zip(names, expected, got, strict=True):
        shapes = [getattr(x, "shape", None) for x in (ours, theirs)]
        if shapes[0] != shapes[1]:
            raise ShapeError(
                f"the module's output for {name!r}", got=type_name(theirs), expected=type_name(ours)
            )
        if _is_floating(ours) != _is_floating(theirs):
            raise DtypeError(
                f"the module's output for {name!r}", got=type_name(theirs), expected=type_name(ours)
            )


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def in_type_of(like: Any, value: Any) -> Any:
    """A result in the type of *like* where its own is wider, so that both have one unit."""
    if not (_is_floating(like) and _is_floating(value)):
        return value
    wider = torch.finfo(value.dtype).eps < torch.finfo(like.dtype).eps
    return value.to(like.dtype) if wider else value


def over_rms(reference: Any, got: Any) -> tuple[float, float]:
    """Largest and RMS difference over the RMS of the reference, of what is finite in both.

    NaN where there is nothing to measure. A reference of zeros has no RMS: any error is infinite.
    """
    if not (_is_floating(reference) and _is_floating(got)) or reference.shape != got.shape:
        return math.nan, math.nan
    a, b = reference.double(), got.to(reference.device).double()
    fits = a.isfinite() & b.isfinite()
    a, apart = a[fits], (b - a)[fits].abs()
    top = float(a.abs().max()) if len(a) else 0.0
    if not top:
        return (math.inf if bool(apart.any()) else 0.0), math.nan
    a, apart = a / top, apart / top  # no square leaves float64
    rms = float(a.square().mean().sqrt())
    return float(apart.max()) / rms, float(apart.square().mean().sqrt()) / rms
