"""Comparison of tensors: by how much, in which unit, where, and whether that may ship."""

from __future__ import annotations

from .bits import digest, ulp_distance
from .bounds import tolerance, tolerance_used
from .calibration import CalibratedTolerance, Calibration, calibrated_tolerance
from .difference import Difference, string_diff
from .scaled import ScaledError, scaled_error
from .tree import max_diff

__all__ = [
    "CalibratedTolerance",
    "Calibration",
    "Difference",
    "ScaledError",
    "calibrated_tolerance",
    "digest",
    "max_diff",
    "scaled_error",
    "string_diff",
    "tolerance",
    "tolerance_used",
    "ulp_distance",
]
