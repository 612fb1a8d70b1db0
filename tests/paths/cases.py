"""A call with bad arguments, and what it gives."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import onnx
import torch


@dataclasses.dataclass
class Case:
    """A call that must be refused with a typed error."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.function(*self.arguments, **self.options)

    def __str__(self) -> str:
        shown = [*map(short, self.arguments), *(f"{k}={short(v)}" for k, v in self.options.items())]
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        return f"{name.removesuffix('.__init__')}({', '.join(shown)})"


class Unprintable:
    """Something that no library of numbers knows."""

    def __repr__(self) -> str:
        return "unprintable"


def short(value: Any) -> str:
    if isinstance(value, onnx.ModelProto):
        return "<model>"
    if isinstance(value, torch.Tensor):
        return f"<{value.dtype} {tuple(value.shape)}>"
    return " ".join(repr(value).split())[:60]


def raised(case: Case) -> BaseException | None:
    """What the call raises; a script's own end with a message counts."""
    try:
        case()
    except (Exception, SystemExit) as error:
        return error
    return None
