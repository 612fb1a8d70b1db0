from __future__ import annotations
from .rule import Rule

EXPERIMENTAL: tuple[Rule, ...] = ()
from typing import Any

KERNELS: dict[str, Any] = {}
