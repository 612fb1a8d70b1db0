"""Symbolic sizes: torch's expressions as text, and back to numbers when a call brings them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from roundoff.errors import UnsupportedError
from roundoff.fusion.editor import Dim

_EXPRESSIONS: dict[str, sympy.Expr] = {}


def dim(size: Any) -> Dim:
    """A size of a fake tensor, or torch's expression of one, as a number or as text.

    Examples
    --------
    >>> dim(3), dim(sympy.Symbol("s0") + 1)
    (3, 's0 + 1')
    """
    if not isinstance(size, (torch.SymInt, sympy.Expr)):
        return int(size)
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
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
    try:
        return int(eval(_compiled(size), {"__builtins__": {}}, names))  # noqa: S307
    except NameError:  # a function of torch's that is not among ours
        expression = symbols_of(size)
    found = expression.xreplace(
        {s: sympy.Integer(values.get(str(s), 0)) for s in expression.free_symbols}
    )
    if not found.is_Integer or not symbols_in(size) <= values.keys():
        raise UnsupportedError("a size that no input decides", got=size)
    return int(found)


def symbols_in(size: Dim) -> set[str]:
    """Names of the symbols of a size.

    Examples
    --------
    >>> sorted(symbols_in(dim(sympy.Symbol("s0") + sympy.Symbol("s1")))), symbols_in(3)
    (['s0', 's1'], set())
    """
    return set() if isinstance(size, int) else {str(s) for s in symbols_of(size).free_symbols}


def known(size: Dim, values: Mapping[str, int] | set[str]) -> bool:
    """Whether the *values* decide a size."""
    if isinstance(size, int) or size in values:
        return True
    names = set(_compiled(size).co_names) - set(_FUNCTIONS)
    return bool(names) and all(n in values for n in names)


def hint(size: Any) -> int:
    """The size that torch saw when it traced the graph."""
    return (size.node.hint or 8) if isinstance(size, torch.SymInt) else int(size)
