"""Triton kernels, one file a kernel. Triton is imported when one of them is first used.

Where there is no GPU the kernels run in Triton's interpreter: slowly, on the CPU, with the same
results up to rounding.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC: dict[str, str] = {
    "interpreting": "_runtime",
    "layer_norm": "layer_norm",
    "shuffled_programs": "_runtime",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'roundoff.kernels' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    # Importing the submodule layer_norm has just bound its name here; the function is meant.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
