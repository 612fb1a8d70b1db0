"""Why PyTorch and ONNX Runtime give different results for a model, from its ONNX file alone.

:func:`roundoff.runtimes.compare_runtimes` runs the model node by node with torch's kernels and
with ONNX Runtime's, as one ONNX Runtime session, and in float64. It says which node differs first,
which of the two is nearer the truth, and what to set.
"""

from __future__ import annotations

from .comparing import compare_runtimes
from .result import NODE_COLUMNS, OUTPUT_COLUMNS, RuntimeComparison

__all__ = ["NODE_COLUMNS", "OUTPUT_COLUMNS", "RuntimeComparison", "compare_runtimes"]
