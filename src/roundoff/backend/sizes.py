"""Symbolic sizes: torch's expressions as text, and back to numbers when a call brings them."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.utils._sympy.printers import PythonPrinter

from roundoff.errors import UnsupportedError
from roundoff.fusion.editor import Dim

_EXPRESSIONS: dict[str, sympy.Expr] = {}


def dim(size: Any) -> Dim:
    """A size of a fake tensor, or torch's expression of one, as a number or as text.

    The text is an expression of Python's, of all digits: torch prints its guards so.

    Examples
    --------
    >>> dim(3), dim(sympy.Symbol("s0") + 1)
    (3, '1 + s0')
    """
    if not isinstance(size, (torch.SymInt, sympy.Expr)):
        return int(size)
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    if expression.is_Integer:
        return int(expression)
    text = _printed(expression)
    _EXPRESSIONS[text] = expression
    return text


@functools.lru_cache(maxsize=4096)
def _printed(expression: sympy.Expr) -> str:
    return str(PythonPrinter().doprint(expression))


def dims(sizes: Sequence[Any]) -> list[Dim]:
    """All sizes of a shape."""
    return [dim(s) for s in sizes]


def is_empty(value: torch.Tensor) -> bool:
    """Whether a fake tensor has no elements.

    Where sizes are symbolic, dynamo guards the answer, and compiles again where it is another.
    """
    unknown: list[torch.SymInt] = []
    for size in value.shape:
        if not isinstance(size, torch.SymInt):
            if size == 0:
                return True
        elif not size.node.expr.is_positive:
            unknown.append(size)
    return any(guard_or_false(size == 0) for size in unknown)


def symbols_of(text: str) -> sympy.Expr:
    """The expression that :func:`dim` wrote down."""
    return _EXPRESSIONS[text] if text in _EXPRESSIONS else sympy.Symbol(text)


#: What the text of an expression may name beside its symbols.
_NAMES: dict[str, Any] = {
    "abs": abs,
    "float": float,
    "int": int,
    "math": math,
    "max": max,
    "min": min,
    "round": round,
    "torch": torch,
}


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(text, "<size>", "eval")


@functools.lru_cache(maxsize=4096)
def _symbols_in(text: str) -> frozenset[str]:
    """The names in an expression that a call has to bring."""
    named = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    return frozenset(named - set(_NAMES))


def evaluate(size: Dim, values: Mapping[str, int]) -> int:
    """A size for the *values* of the symbols.

    Examples
    --------
    >>> evaluate("s0 + 1", {"s0": 4}), evaluate("max(2, s0)", {"s0": 4}), evaluate(7, {})
    (5, 4, 7)
    >>> evaluate("math.trunc(1.3*torch.sym_float(s0))", {"s0": 6})
    7
    """
    if isinstance(size, int):
        return size
    known = values.get(size)
    if known is not None:
        return known
    # The text is torch's own, of an expression of sizes.
    names = {**_NAMES, **values}
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
    names = _symbols_in(size)
    return bool(names) and all(n in values for n in names)


def hint(size: Any) -> int:
    """The size that torch saw when it traced the graph."""
    return (size.node.hint or 8) if isinstance(size, torch.SymInt) else int(size)
