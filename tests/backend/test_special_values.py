"""Beside eager: special values, numbers beside tensors, indices, signs of zero, draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from through_backend import compiled, through

from roundoff.backend import onnx_custom_backend

F = torch.nn.functional
INF, NAN = math.inf, math.nan


def same_bits(f: Callable[..., Any], *inputs: Any) -> None:
    """All elements are eager's, signs of zeros included."""
    with torch.no_grad():
        made, expected = through(f)(*inputs), f(*inputs)
    made, expected = (x if isinstance(x, tuple) else (x,) for x in (made, expected))
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(one.isnan() | one.signbit(), other.isnan() | other.signbit())


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def test_a_range_has_the_length_and_the_numbers_of_torch() -> None:
    """ONNX's Range counts in float32: 12 numbers from 0 to 1.1 by 0.1, where torch has 11."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = x.shape[0]
        return (
            torch.arange(0.0, 1.1, 0.1),
            torch.arange(33554430, 33554451, 3, dtype=torch.float32),
            torch.arange(5, 0, -2),
            torch.linspace(0, 1, n),
            torch.arange(1.0, 0.0, -1 / n),
            torch.arange(n, dtype=torch.float32) * 0.1,
        )

    run = through(f, dynamic=True)
    for n in (3000, 1777):
        for made, expected in zip(run(torch.ones(n)), f(torch.ones(n)), strict=True):
            assert torch.equal(made, expected)


def test_sums_and_extremes_of_large_integers_are_torchs() -> None:
    """ONNX Runtime adds integers in float64, and its Min of 1 and 2**31 is 2**31."""
    x = torch.tensor([2**62 + 1, 2**62 + 1, -(2**62), 1])
    same_bits(lambda x: (x.sum(), x.int().sum(0), (x > 0).sum()), x)
    same_bits(lambda x: (x.clamp(max=2**31), torch.maximum(x, x.flip(0))), x)


# Indices


@pytest.mark.parametrize("start", [-1, 3])
def test_an_index_that_no_axis_has_writes_nothing(start: int) -> None:
    """A negative one wrote the last row of what is written in place."""

    def f(cache: torch.Tensor, start: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return cache.index_copy_(0, torch.arange(2) + start, new) * 1

    cache = torch.zeros(4, 2)
    with pytest.raises(Exception, match=r"index|indices|out of"):
        through(f)(cache, torch.tensor([start]), torch.ones(2, 2))
    assert not cache.any() or start == 3


INDEXED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index_copy": lambda x, at: x.index_copy(0, at, torch.ones(2, 4)),
    "index": lambda x, at: x[at] * 2,
    "index of two": lambda x, at: x[at, at] * 2,
    "gather": lambda x, at: x.gather(0, at[:, None]),
    "embedding": lambda x, at: F.embedding(at, x),
    "cross_entropy": lambda x, at: F.cross_entropy(x[:2], at),
    "one_hot": lambda x, at: F.one_hot(at, 4),
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_is_taken_as_eager_takes_it(name: str) -> None:
    """A negative one as counted from the end, or not at all; given, and computed."""
    if name == "one_hot" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("older versions of torch trace it without its check, for every backend")
    take = INDEXED[name]
    calls = [lambda x, at: take(x * 1, at), lambda x, at: take(x * 1, at + 1 - 1)]
    x = draw(4, 4)
    for run, f in [(through(f), f) for f in calls]:
        torch.testing.assert_close(run(x, torch.tensor([1, 0])), f(x, torch.tensor([1, 0])))
        for index in (-1, 100, -(2**63)):
            at = torch.tensor([0, index])
            try:
                expected = f(x, at)
            except (IndexError, RuntimeError):
                with pytest.raises((IndexError, RuntimeError, ValueError)):
                    run(x, at)
            else:
                torch.testing.assert_close(run(x, at), expected)


# Numbers beside tensors


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "f",
    [
        lambda x, a: torch.addmm(x, x, x, alpha=a),
        lambda x, a: torch.addmm(x, x, x, beta=a),
        lambda x, a: torch.add(x, x, alpha=a),
        lambda x, a: x / (x * a),
    ],
    ids=["alpha", "beta", "alpha of a sum", "a factor"],
)
def test_a_number_that_changes(f: Callable[..., torch.Tensor], dynamic: bool | None) -> None:
    run, graphs = compiled(f, dynamic=dynamic)
    for n, a in enumerate((2, 3, 0.0, -0.0, 0.5, 2)):
        x = draw(2 + n, 2 + n)
        torch.testing.assert_close(run(x, a), f(x, a))
    # Where an integer changes, Gemm has no attribute for it; of a sum torch rounds once.
    left = {"aten.addmm.default", "aten.add.Tensor"}
    assert {name for graph in graphs for name in graph.by_torch} <= left


class Scaled(torch.nn.Module):
    factor, shift = 0.5, 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, scale=self.factor) + self.shift


@torch.no_grad()
def test_floats_of_a_module_are_constants_that_may_change() -> None:
    """Dynamo traces a frame once for each value: a second try would call the backend again."""
    calls: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, args: Any) -> Any:
        calls.append(gm)
        return onnx_custom_backend(gm, args)

    model = Scaled()
    run = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    numbers = [(0.5, 1e-5), (0.5, 1e-5), (2.0, 1e-5), (0.5, -0.0), (0.5, 0.0)]
    for n, (model.factor, model.shift) in enumerate(numbers):
        x = torch.randn(2, 3, 5 + n, 8)
        torch.testing.assert_close(run(x), model(x))
        assert len(calls) == 1 or n > 1


_BYTES, _HALF = torch.tensor([1, 44, 250], dtype=torch.uint8), torch.tensor([1.0, 2.0]).half()
_BEYOND: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "where": lambda x, n: torch.where(x > 1, n, x),
    "full_like": lambda x, n: torch.full_like(x, n),
    "clamp": lambda x, n: x.clamp(max=n),
    "pad": lambda x, n: F.pad(x, (1, 1), value=n),
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
}


@pytest.mark.parametrize("name", _BEYOND)
@pytest.mark.parametrize(("x", "n"), [(_BYTES, 300), (_HALF, 1e9)], ids=["uint8", "float16"])
def test_a_number_that_the_type_does_not_hold(name: str, x: torch.Tensor, n: float) -> None:
    """torch refuses what a cast wraps around, or makes infinite."""
    f = _BEYOND[name]
    try:
        expected = f(x, n)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="without overflow"):
            through(lambda x: f(x, n))(x)
    else:
        assert torch.equal(through(lambda x: f(x, n))(x), expected)


# The sign of zero


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_choice_keeps_the_sign_of_zero(dtype: torch.dtype) -> None:
    n = 37
    x, y = draw(n, dtype=dtype), draw(n, dtype=dtype).flip(0)
    x[::3], y[::2], x[5], y[7], x[9] = -0.0, -0.0, NAN, INF, -INF

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = x + 1 > y
        return (
            torch.where(c, x, y),
            torch.where(c, x, 1.0),
            torch.where(c, -0.0, x),
            torch.where(c, 2.0, x),
            x.masked_fill(c, -0.0),
            torch.full_like(x, -0.0),
            torch.where(c[:, None], x[:, None], y),
        )

    same_bits(f, x, y)


@torch.no_grad()
@pytest.mark.parametrize("number", [False, True])
@pytest.mark.parametrize("patterns", [None, "default+onnxruntime"])
def test_rows_without_keys_are_zero(patterns: str | None, number: bool) -> None:
    q, mask = draw(2, 2, 5, 8), draw(2, 1, 5, 5) > -0.5
    mask[0, 0, 1] = False
    if number:
        mask = torch.where(mask, 0, -INF)
    run, graphs = compiled(lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask), patterns)
    torch.testing.assert_close(run(q, mask), F.scaled_dot_product_attention(q, q, q, mask))
    fused = any(node.op_type == "MultiHeadAttention" for node in graphs[0].model.graph.node)
    assert fused == (patterns is not None)
