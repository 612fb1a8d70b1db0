"""Same maths, different bits, different speed: the library behind the roundoff gallery.

Importing :mod:`roundoff` is cheap: public names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

__version__ = "0.1.0"

#: Public name -> the module that defines it.
ROOMS: dict[str, str] = {
    "LayerNormalizationOrt": "evaluator",
    "MatMulOrt": "evaluator",
    "OptimizationOptions": "fusion",
    "RoundoffError": "errors",
    "TorchOnnxEvaluator": "evaluator",
    "compare_runtimes": "runtimes",
    "fuse": "fusion",
    "get_parsed_args": "script",
    "invariant": "kernels",
    "layer_norm": "kernels",
    "localize": "localization",
    "max_diff": "compare",
    "measure": "timing",
    "onnx_custom_backend": "backend",
    "onnx_dtype_name": "dtypes",
    "onnx_dtype_to_np_dtype": "dtypes",
    "onnx_dtype_to_torch_dtype": "dtypes",
    "onnx_simple_text_plot": "graph",
    "plot_dot": "graph",
    "scaled_error": "compare",
    "session": "ort",
    "string_diff": "compare",
    "string_type": "describe",
    "tolerance": "compare",
    "ulp": "dtypes",
    "unit_test_going": "script",
}

__all__ = ["__version__", *ROOMS]


def __getattr__(name: str) -> Any:
    module = ROOMS.get(name)
    if module is None:
        if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module 'roundoff' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
