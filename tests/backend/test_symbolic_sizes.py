"""Sizes that are no numbers yet, where an operator wants a number: beside eager, at every size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from through_backend import compiled

F = torch.nn.functional
draw = torch.randn

#: A function of sizes, and its inputs for a size.
SYMBOLIC: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "the padding of a convolution": (
        lambda x, w: F.conv2d(x, w, padding="same"),
        lambda n: (draw(2, 3, n, n + 1), draw(4, 3, 3, 3)),
    ),
    "its groups": (
        lambda x, w: F.conv1d(x, w, groups=x.shape[1]),
        lambda n: (draw(2, n, 9), draw(n, 1, 3)),
    ),
    "its stride and dilation": (
        lambda x, w: F.conv1d(x, w, stride=x.shape[0], dilation=x.shape[0]),
        lambda n: (draw(n, 3, 29), draw(5, 3, 3)),
    ),
    "a step": (lambda x, n: x[:, ::n] * 2, lambda n: (draw(3, 20), n)),
    "a position": (lambda x, n: (x[:, n] * 2, x[-n] * 2), lambda n: (draw(20, 20), n)),
    "a size in floats": (
        lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear"),
        lambda n: (draw(1, 2, n + 4, n + 4),),
    ),
    "a factor of many digits": (
        lambda x: x[: math.floor(x.shape[0] * (0.1 + 0.2))] * 2,
        lambda n: (draw(10 * n, 3),),
    ),
    "a division that rounds up": (
        lambda x: (x[:, : -(-x.shape[1] // 2)] * 2, x[:, -x.shape[1] // 2 :] * 2),
        lambda n: (draw(3, n),),
    ),
    "a rest": (
        lambda x: F.pad(x, (0, -x.shape[1] % 8)).view(x.shape[0], -1, 8) * 2,
        lambda n: (draw(3, 3 * n),),
    ),
    "a square": (
        lambda x: (x[:, None] * x).reshape(x.shape[0] ** 2) * 2,
        lambda n: (draw(n),),
    ),
    "an epsilon": (
        lambda x: F.layer_norm(x, x.shape[-1:], torch.ones(x.shape[-1]), None, 1 / x.shape[0]),
        lambda n: (draw(n, n + 1),),
    ),
    "alpha and beta": (
        lambda x: torch.addmm(x, x, x, alpha=x.shape[0], beta=x.shape[1] / 2),
        lambda n: (draw(n, n),),
    ),
    "the scale and the heads of attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, scale=1 / x.shape[0]),
        lambda n: (draw(n, n, 5, 4),),
    ),
    "a threshold": (lambda x, n: F.softplus(x, 1, n), lambda n: (4 * draw(4, 4), n)),
    "bounds": (lambda x, n: x.clamp(-n, n / 3), lambda n: (4 * draw(4, 4), n)),
    "a share of dropout": (lambda x: F.dropout(x, 1 / x.shape[0]), lambda n: (draw(n, 4),)),
    "sizes that are returned": (
        lambda x: (x * 2, x.shape[0] // 2, math.ceil(x.shape[0] * 0.3)),
        lambda n: (draw(n, 3),),
    ),
    "sizes of complex numbers": (
        lambda x: x.flatten().view(-1, 2),
        lambda n: (draw(2, n, dtype=torch.complex64).T,),
    ),
    "what may have no elements": (
        lambda x, n: (torch.addmm(x[0, :2], x[:, n:], x[n:, :2]), x[n:].mean(0)),
        lambda n: (draw(5, 5), n),
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", SYMBOLIC)
def test_a_symbolic_number_is_eagers(name: str, dynamic: bool | None) -> None:
    f, make = SYMBOLIC[name]
    run, _ = compiled(f, dynamic=dynamic)
    for n in (4, 5, 1, 2):
        inputs = make(n)
        torch.manual_seed(n)
        expected = f(*inputs)
        torch.manual_seed(n)
        torch.testing.assert_close(run(*inputs), expected, equal_nan=True)


@torch.no_grad()
def test_one_graph_serves_sizes_that_onnx_cannot_compute() -> None:
    run, graphs = compiled(lambda x: x[: int(x.shape[0] * 0.3)] * 2, dynamic=True)
    for n in (10, 13, 21):
        assert run(torch.ones(n)).shape == (int(n * 0.3),)
    (graph,) = graphs
    assert [node.op_type for node in graph.model.graph.node] == ["Slice", "Mul"]
