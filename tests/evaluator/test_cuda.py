"""On a CUDA device: results stay there, shapes are read on the CPU, and the answer is the same."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from roundoff.evaluator import TorchOnnxEvaluator

sys.path.insert(0, str(Path(__file__).parent))
from models import LAYER_NORM_MATMUL, arrays, text

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = ["CUDAExecutionProvider", "CPUExecutionProvider"]

#: Shapes computed by the graph, beside data: the two meet in Mul.
SHAPES = """
agraph (float[a, b] X, int64[k] rows) => (float[c] Y, float[a, b] Z)
{
    s = Shape(X)
    first = Constant <value = int64[1] {0}> ()
    n = Gather(s, first)
    minus = Constant <value = int64[1] {-1}> ()
    flat = Reshape(X, minus)
    picked = Gather(X, rows)
    wide = Expand(picked, s)
    count = Cast <to = 1> (n)
    Z = Mul(X, count)
    Y = Mul(flat, count)
}
"""


def test_results_stay_on_the_device() -> None:
    feeds = arrays(X=(5, 8), scale=(8,), bias=(8,), W=(8, 3), B=(3,))
    model = text(LAYER_NORM_MATMUL)
    (expected,) = TorchOnnxEvaluator(model).run(None, feeds)
    evaluator = TorchOnnxEvaluator(model, CUDA)
    for step in evaluator.steps(feeds):
        assert all(x.is_cuda for x in (*step.inputs, *step.outputs))
    (got,) = evaluator.run(None, {n: torch.from_numpy(x).cuda() for n, x in feeds.items()})
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_shapes_beside_data() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    feeds = {"X": x, "rows": np.array([0, -1])}
    for _ in range(2):
        evaluator = TorchOnnxEvaluator(text(SHAPES), CUDA)
        y, z = evaluator.run(None, feeds)
        np.testing.assert_array_equal(z.cpu().numpy(), 2 * x)
        np.testing.assert_array_equal(y.cpu().numpy(), 2 * x.ravel())
        assert set(evaluator.kernels_used().values()) == {"torch"}
