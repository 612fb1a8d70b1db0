"""Symbolic sizes: torch's expressions as text, and back to numbers when a call brings them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from roundoff.fusion.editor import Dim

_EXPRESSIONS: dict[str, sympy.Expr] = {}


def dim(size: Any) -> Dim:
    """A size of a fake tensor as a number or as text.

    Examples
    --------
    >>> dim(3)
    3
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    if expression.is_Integer:
        return int(expression)
    text = str(expression)
    _EXPRESSIONS[text] = expression
    return text


def dims(sizes: Sequence[Any]) -> list[Dim]:
    """All sizes of a shape."""
    return [dim(s) for s in sizes]


def symbols_of(text: str) -> sympy.Expr:
    """The expression that :func:`dim` wrote down."""
    return _EXPRESSIONS[text] if text in _EXPRESSIONS else sympy.Symbol(text)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "Max": max,
    "Min": min,
}


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(text, "<size>", "eval")


def evaluate(size: Dim, values: Mapping[str, int]) -> int:
    """A size for the *values* of the symbols.

    Examples
    --------
    >>> evaluate("s0 + 1", {"s0": 4}), evaluate("Max(2, s0)", {"s0": 4}), evaluate(7, {})
    (5, 4, 7)
    """
    if isinstance(size, int):
        return size
    known = values.get(size)
    if known is not None:
        return known
    # The text is torch's own, of an expression of sizes.
    names = {**_FUNCTIONS, **values}
    return int(eval(_compiled(size), {"__builtins__": {}}, names))  # noqa: S307


def known(size: Dim, values: Mapping[str, int] | set[str]) -> bool:
    """Whether the *values* decide a size."""
    if isinstance(size, int) or size in values:
        return True
    names = set(_compiled(size).co_names) - set(_FUNCTIONS)
    return bool(names) and all(n in values for n in names)


def hint(size: Any) -> int:
    """The size that torch saw when it traced the graph."""
    return (size.node.hint or 8) if isinstance(size, torch.SymInt) else int(size)
