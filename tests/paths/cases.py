"""A call with bad arguments, and what it gives."""

from __future__ import annotations

import dataclasses
import reprlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pandas as pd
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


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


def no_tensors() -> list[Any]:
    """What is no tensor of one shape all of whose numbers are there."""
    x = torch.ones(4)
    with FakeTensorMode():
        fake = torch.ones(4)
    parts = [torch.ones(2), torch.ones(3)]
    return [
        fake,
        x.to("meta"),
        torch.nested.nested_tensor(parts),
        torch.nested.nested_tensor(parts, layout=torch.jagged),
        torch.masked.masked_tensor(x, x > 0),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        np.ones(2, np.longdouble),
        np.ones(2, "M8[s]"),
        np.array([1.0, None], object),
        np.array(["a", "b"]),
        pd.DataFrame({"a": ["x"]}),
        pd.Series(["a"]),
        Unprintable(),
        2**2000,
        None,
        "text",
        {},
        len,
    ]


def short(value: Any) -> str:
    if isinstance(value, onnx.ModelProto):
        return "<model>"
    if isinstance(value, torch.Tensor) and not value.is_nested:
        return f"<{value.dtype} {tuple(value.shape)}>"
    return " ".join(reprlib.repr(value).split())[:60]


def raised(case: Case) -> BaseException | None:
    """What the call raises; a script's own end with a message counts."""
    try:
        case()
    except (Exception, SystemExit) as error:
        return error
    return None
