"""Entries of the table against torch, each without its exporter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from through_backend import close, compiled, through

from roundoff.backend import convert
from roundoff.errors import UnsupportedError

F = torch.nn.functional


@pytest.fixture(autouse=True)
def _no_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any, node: torch.fx.Node) -> None:
        raise AssertionError(f"{node.target} is left to torch's exporter")

    monkeypatch.setattr(convert, "by_exporter", refuse)


def same(f: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> None:
    run, graphs = compiled(f, dynamic=dynamic)
    with torch.no_grad():
        close(run(*inputs), f(*inputs))
    assert not graphs[0].by_torch


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_bounds_and_activations() -> None:
    x = draw(3, 50) * 10

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x.clamp_min(-1), x.clamp_max(2), F.hardtanh(x), F.relu6(x), F.hardtanh(x, -3, 4),
            F.leaky_relu(x), F.leaky_relu(x, 0.3), F.softplus(x),
        )  # fmt: skip

    same(f, x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_pads_repeats_and_unbinds(dynamic: bool) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, _ = x.unbind(1)
        return (
            F.pad(x, (1, 2)), F.pad(x, (0, 1, 2, 0), value=3.0), F.pad(x, (-1, 2)),
            x.repeat(2, 1, 3), x.repeat(2, 1, 1, 1), first * 2, second + 1,
        )  # fmt: skip

    same(f, draw(4, 3, 5), dynamic=dynamic)


def test_rolls_and_replaced_parts() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, z, w = x + 1, x + 2, x + 3
        y[1:3] = 0
        z[:, -1] = x[:, 0] * 2
        w[2:, 1:-1] = 5
        rolls = x.roll(2, 0), x.roll((-1, 3), (1, 0)), x.roll(5, 1), torch.roll(x, 9, -1)
        return *rolls, y, z, w, torch.eye(3) * 2

    same(f, draw(4, 5))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("axes", [1, 2])
def test_convolutions(axes: int, transposed: bool) -> None:
    plain = (F.conv_transpose1d, F.conv_transpose2d) if transposed else (F.conv1d, F.conv2d)
    convolve, sizes = plain[axes - 1], (9, 7)[:axes]
    weight, bias = draw(4, 2, *(3,) * axes), None if transposed else draw(4)
    more = {"output_padding": 1} if transposed else {}
    groups = 2 if transposed else 1

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            convolve(x, weight), convolve(x, weight, stride=2, padding=1, **more),
            convolve(x, weight, bias, dilation=2, groups=groups),
        )  # fmt: skip

    same(f, draw(3, 4 if transposed else 2, *sizes))


def test_grouped_convolution_and_its_friends() -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 3, padding=1, groups=4), torch.nn.BatchNorm2d(8), torch.nn.ReLU6(),
        torch.nn.Conv2d(8, 6, (3, 1), stride=(2, 1)),
    ).eval()  # fmt: skip
    layers[1].running_mean.normal_()
    layers[1].running_var.uniform_(0.5, 2)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = layers(x)
        return y, y.norm(dim=-1), torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True)

    same(f, draw(2, 4, 11, 8))


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0, 2.0), (0.5, 0.25)])
def test_products_of_batches_with_a_sum(beta: float, alpha: float) -> None:
    bias, a, b = draw(3, 4, 5), draw(3, 4, 2), draw(3, 2, 5)
    same(lambda bias, a, b: torch.baddbmm(bias, a, b, beta=beta, alpha=alpha), bias, a, b)


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((3, 4, 6), (6, 6, 1), 0),
        ((2, 5), (7, 3), 4),
        ((), (), 5),
        ((4, 6), (1, 6), 0),
        ((5, 4), (3, 1), 0),
    ],
    ids=["windows of rows", "no whole rows", "one element", "turned", "rows that overlap"],
)
@pytest.mark.parametrize("turned", [False, True])
def test_strided_views(
    size: tuple[int, ...], stride: tuple[int, ...], offset: int, turned: bool
) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).T if turned else x * 2
        return y.as_strided(size, stride, offset) + 1

    same(f, draw(6, 6))


@pytest.mark.parametrize("part", [slice(1, 3), slice(0, 2)], ids=str)
def test_strided_views_of_a_part_are_refused(part: slice) -> None:
    """Of memory that the tensor does not fill: what is handed on is a copy of another layout."""
    with pytest.raises(UnsupportedError, match="not all of a tensor"):
        same(lambda x: (x * 2)[:, part].as_strided((2, 2), (1, 5)) + 1, draw(4, 5))


def test_a_residual_before_a_norm_without_a_bias() -> None:
    """An empty name in the place of the bias ended the process."""
    norm = torch.nn.LayerNorm(8, bias=False)
    same(lambda x, y: norm(x + y), draw(2, 3, 8), draw(2, 3, 8))


@pytest.mark.parametrize("dynamic", [False, True])
def test_extremes_and_where_they_lie(dynamic: bool) -> None:
    """NaN is an extreme wherever it stands, and of equal ones the first counts."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x.amax(1), x.amin(0, keepdim=True), x.argmax(-1), x.argmin(0), *x.max(1),
            *x.min(0, keepdim=True), *x.topk(2), *x.topk(2, 0, largest=False), torch.sign(x),
        )  # fmt: skip

    x = draw(4, 5).round()
    x[1, 3], x[2, 0], x[3, 2] = torch.nan, torch.nan, torch.inf
    run = through(f, dynamic=dynamic)
    for made, expected in zip(run(x), f(x), strict=True):
        if made.dtype == torch.int64 and made.shape in ((4, 2), (2, 5)):
            continue  # of equal ones torch promises no order
        torch.testing.assert_close(made, expected, equal_nan=True)


def test_a_sum_of_large_integers_stays_with_torch() -> None:
    """ONNX Runtime adds integers in float64: 2**62 + 1 twice is no number there."""
    x = torch.tensor([2**62 + 1, 2**62 + 1, -(2**62), 1])
    run = through(lambda x: x.sum())
    assert int(run(x)) == int(x.sum())
