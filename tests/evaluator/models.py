"""Small models for the evaluator's tests, in ONNX's text form where that is shorter."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, parser


def text(body: str, opset: int = 18) -> ModelProto:
    """A model from ONNX's text: a graph, then local functions of domain ``local``."""
    header = f'<ir_version: 9, opset_import: ["": {opset}, "local": 1, "com.microsoft": 1]>'
    return parser.parse_model(f"{header}\n{body}")


#: LayerNormalization -> MatMul -> Add, as the page on discrepancies has it.
LAYER_NORM_MATMUL = """
agraph (float[n, d] X, float[d] scale, float[d] bias, float[d, e] W, float[e] B) => (float[n, e] Z)
{
    N = LayerNormalization<axis = -1>(X, scale, bias)
    M = MatMul(N, W)
    Z = Add(M, B)
}
"""


def arrays(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Normal float32 arrays of these shapes."""
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


#: Feeds of LAYER_NORM_MATMUL.
NORM_FEEDS = arrays(X=(5, 8), scale=(8,), bias=(8,), W=(8, 3), B=(3,))


def expected_norm(feeds: dict[str, np.ndarray]) -> np.ndarray:
    """What LAYER_NORM_MATMUL gives, in float64."""
    x, scale, bias, w, b = (feeds[n].astype(np.float64) for n in ("X", "scale", "bias", "W", "B"))
    spread = np.sqrt(x.var(-1, keepdims=True) + float(np.float32(1e-5)))
    return ((x - x.mean(-1, keepdims=True)) / spread * scale + bias) @ w + b
