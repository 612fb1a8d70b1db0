"""Comparison of tensors: by how much, in which unit, where, and whether that may ship."""

from __future__ import annotations

from .bounds import tolerance
from .difference import Difference, string_diff
from .nest import leaves, max_diff
from .ulps import ulp_distance

__all__ = ["Difference", "leaves", "max_diff", "string_diff", "tolerance", "ulp_distance"]
