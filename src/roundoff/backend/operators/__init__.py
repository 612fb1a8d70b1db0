"""The table of ATen operators that are written as ONNX directly: ``(converter, node, *args)``.

Each follows the schema of the operator (``torch.ops.aten.<name>.<overload>._schema``) and the
definition of the ONNX operators it emits (https://onnx.ai/onnx/operators/). Its result gets the
type and the sizes of torch's tensor; what lies between has those of its first input, or states its
own. What an entry does not cover it leaves to torch, by returning ``NotImplemented``.
"""

from __future__ import annotations

# Importing a module enters its operators.
from . import elementwise, indexing, products, reductions, shapes
from .table import TABLE, WRITTEN_IN_OTHERS

__all__ = [
    "TABLE",
    "WRITTEN_IN_OTHERS",
    "elementwise",
    "indexing",
    "products",
    "reductions",
    "shapes",
]
