"""Beside eager: special values, arguments that are rarely given, draws, views of other types."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from through_backend import through

from roundoff.backend import onnx_custom_backend
from roundoff.errors import UnsupportedError

F = torch.nn.functional
INF, NAN = math.inf, math.nan
LARGEST = torch.finfo(torch.float32).max


def same_bits(f: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> None:
    """All elements are eager's, signs of zeros included."""
    with torch.no_grad():
        made, expected = through(f, dynamic=dynamic)(*inputs), f(*inputs)
    made, expected = (x if isinstance(x, tuple) else (x,) for x in (made, expected))
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(one.isnan() | one.signbit(), other.isnan() | other.signbit())


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# Ranges


def test_a_range_of_floats_has_the_length_and_the_numbers_of_torch() -> None:
    """ONNX's Range counts in float32: 12 numbers from 0 to 1.1 by 0.1, where torch has 11."""
    bounds = [(0.0, k * step, step) for step in (0.1, 0.2, 0.3, 1 / 7) for k in (7, 11, 49)]
    bounds += [(1.0, 0.0, -1 / 3000), (-1, 1, 0.1)]
    same_bits(lambda: tuple(torch.arange(*b) for b in bounds))
    same_bits(lambda x: x * torch.arange(0.0, 1.1, 0.1), torch.ones(11))


def test_a_range_of_whole_numbers_that_float32_does_not_hold() -> None:
    bounds = [(16777210, 16777231), (33554430, 33554451, 3), (-5, 40, 7), (5, 0, -2)]
    same_bits(lambda: tuple(torch.arange(*b, dtype=torch.float32) for b in bounds))
    same_bits(lambda: (torch.arange(0, 2.5, dtype=torch.int64), torch.arange(2, 9, 2.5)))


def test_a_range_of_floats_of_a_size() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = x.shape[0]
        return (torch.arange(0, n, 0.1), torch.linspace(0, 1, n), torch.arange(1.0, 0.0, -1 / n),
                torch.arange(n, dtype=torch.float32) * 0.1)  # fmt: skip

    run = torch.compile(f, backend=onnx_custom_backend, dynamic=True)
    for n in (3000, 1777):
        for made, expected in zip(run(torch.ones(n)), f(torch.ones(n)), strict=True):
            assert torch.equal(made, expected)


# Extremes and moments


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [True, False])
def test_topk_knows_infinity_from_the_largest_number(dtype: torch.dtype, largest: bool) -> None:
    most = torch.finfo(dtype).max
    x = torch.tensor([[most, INF, 1.0, -INF, -most], [INF, most, NAN, -most, -INF]], dtype=dtype)
    same_bits(lambda x: tuple(x.topk(5, largest=largest)), x)


@pytest.mark.parametrize("rows", [[[1, 2, NAN], [INF, 0, 0]], [[0, INF], [NAN, 0]]], ids=str)
def test_logsumexp_over_two_axes_keeps_nan(rows: list[list[float]]) -> None:
    same_bits(lambda x: x.logsumexp((0, 1)), torch.tensor(rows))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_a_variance_without_degrees_of_freedom_and_far_from_zero() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.var(1, correction=4), x.std(1, correction=4), x.var(1, correction=9), x.var(1)

    for x in (draw(2, 3), draw(2, 64) + 1e5, draw(2, 64) * 1e19, torch.full((2, 3), LARGEST)):
        same_bits(f, x)


@pytest.mark.parametrize("scale", [1e17, 1e18, 1e20, 1e30])
def test_norms_of_squares_that_overflow_are_as_documented(scale: float) -> None:
    """The bias: from some size on torch has NaN. Below it the norms are right."""
    bias = draw(768)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.reshape(2, 6, 128)
        return (F.layer_norm(x, (768,), torch.ones(768), bias),
                F.group_norm(rows, 1, torch.ones(6), bias[:6]).reshape(2, 768))  # fmt: skip

    x = draw(2, 768) * scale
    added = bias, bias[:6].repeat_interleave(128)
    for made, eager, b in zip(through(f)(x), f(x), added, strict=True):
        if scale == 1e17:
            torch.testing.assert_close(made, eager)
            continue
        torch.testing.assert_close(made, b.expand(2, -1))
        assert (eager.isnan() | (eager == made)).all()


# Indices


@pytest.mark.parametrize("counted", [False, True], ids=["an argument", "counted from one"])
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("start", [-1, 3, 1])
def test_an_index_that_no_axis_has_is_refused(counted: bool, written: bool, start: int) -> None:
    """A negative one wrote the last row of what is written in place."""

    def f(cache: torch.Tensor, start: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        at = torch.arange(2) + start if counted else torch.cat([start, start + 1])
        return (cache.index_copy_ if written else cache.index_copy)(0, at, new) * 1

    inputs = torch.tensor([start]), torch.ones(2, 2)
    if start == 1:
        assert torch.equal(through(f)(torch.zeros(4, 2), *inputs), f(torch.zeros(4, 2), *inputs))
        return
    cache = torch.zeros(4, 2)
    with pytest.raises(Exception, match=r"index|indices|out of"):
        through(f)(cache, *inputs)
    assert not cache[-1].any() or start == 3


_AT = torch.tensor([0, -1])
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index_put": lambda x, at: x.index_put((at,), torch.ones(2, 2)),
    "index_put of two": lambda x, at: x.index_put((at, at), torch.ones(2)),
    "index_put, added": lambda x, at: x.index_put((at,), torch.ones(2, 2), accumulate=True),
    "index_add": lambda x, at: x.index_add(0, at, torch.ones(2, 2)),
    "index_fill": lambda x, at: x.index_fill(0, at, 3.0),
    "index_copy": lambda x, at: x.index_copy(0, at, torch.ones(2, 2)),
    "scatter": lambda x, at: x.scatter(0, at[:, None], torch.ones(2, 2)),
    "scatter_add": lambda x, at: x.scatter_add(0, at[:, None], torch.ones(2, 2)),
    "scatter_reduce": lambda x, at: x.scatter_reduce(0, at[:, None], torch.ones(2, 2), "amax"),
    "masked_scatter": lambda x, at: x.masked_scatter(x == at[1], torch.ones(8)),
    "slice_scatter": lambda x, at: x.slice_scatter(torch.ones(1, 2), 0, -1),
    "select_scatter": lambda x, at: x.select_scatter(torch.ones(2), 0, -1),
    "diagonal_scatter": lambda x, at: x.diagonal_scatter(torch.ones(2), -1),
    "index": lambda x, at: x[at] * 2,
    "gather": lambda x, at: x.gather(0, at[:, None]),
    "take": lambda x, at: x.take(at),
    "index_select": lambda x, at: x.index_select(0, at),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_negative_index_is_taken_as_eager_takes_it(name: str) -> None:
    """As counted from the end, or not at all; given, and computed."""
    write = WRITES[name]
    calls = [lambda x, at: write(x * 1, at), lambda x, at: write(x * 1, at + 1 - 1)]
    x = draw(4, 2)
    try:
        expected = calls[0](x, _AT)
    except (IndexError, RuntimeError):
        for f in calls:
            with pytest.raises(Exception, match=r"ind(ex|ices)"):
                through(f)(x, _AT)
    else:
        for made in through(lambda x, at: tuple(f(x, at) for f in calls))(x, _AT):
            assert torch.equal(made, expected)


# Numbers beside tensors


def test_scales_of_a_product_in_float64() -> None:
    x = draw(4, 4, dtype=torch.float64)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.addmm(x, x, x, alpha=0.1, beta=0.3), F.leaky_relu(x, 0.1), F.elu(x, 0.1),
                F.celu(x, 0.3), F.selu(x), F.hardsigmoid(x), F.threshold(x, 0.1, 0.3),
                F.layer_norm(x, (4,), x[0], x[1], 0.1), F.hardtanh(x, -0.1, 0.3),
                F.batch_norm(x, x[0], x[1].abs(), x[2], x[3], eps=0.1), F.softplus(x, 1.1),
                F.group_norm(x, 2, x[0], x[1], 0.1), torch.nan_to_num(x, 0.1),
                F.pad(x, (1, 1), value=0.1), F.hardshrink(x, 0.1))  # fmt: skip

    for made, expected in zip(through(f)(x), f(x), strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "f",
    [
        lambda x, a: F.leaky_relu(x, a), lambda x, a: torch.addmm(x, x, x, alpha=a),
        lambda x, a: torch.addmm(x, x, x, beta=a), lambda x, a: torch.add(x, x, alpha=a),
    ],
    ids=["slope", "alpha", "beta", "alpha of a sum"],
)  # fmt: skip
def test_a_whole_number_that_changes(f: Callable[..., torch.Tensor], dynamic: bool | None) -> None:
    run, x = through(f, dynamic=dynamic), draw(2, 2)
    for a in (2, 3, 4, 0.5):
        torch.testing.assert_close(run(x, a), f(x, a))


def test_a_norm_spelled_out_in_float64_keeps_its_epsilon() -> None:
    """ONNX Runtime joins its nodes to one, whose epsilon is an attribute in float32."""
    weight, bias = draw(2, 8, dtype=torch.float64)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        root = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1)
        return (centred / torch.sqrt(variance + 0.1) * weight + bias,
                centred * torch.rsqrt(variance + 0.1) * weight + bias, root * weight)  # fmt: skip

    x = draw(6, 8, dtype=torch.float64)
    for made, expected in zip(through(f)(x), f(x), strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-14, atol=1e-15)


_BYTES, _HALF = torch.tensor([1, 44, 250], dtype=torch.uint8), torch.tensor([1.0, 2.0]).half()
_BEYOND: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "where": lambda x, n: torch.where(x > 1, n, x),
    "masked_fill": lambda x, n: x.masked_fill(x > 1, n),
    "full_like": lambda x, n: torch.full_like(x, n),
    "clamp": lambda x, n: x.clamp(max=n),
    "pad": lambda x, n: F.pad(x, (1, 1), value=n),
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "threshold": lambda x, n: F.threshold(x, 1, n),
}


@pytest.mark.parametrize("name", _BEYOND)
@pytest.mark.parametrize(("x", "n"), [(_BYTES, 300), (_HALF, 1e9), (_HALF.float(), 1e39)],
                         ids=["uint8", "float16", "float32"])  # fmt: skip
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_choice_keeps_the_sign_of_zero(dtype: torch.dtype) -> None:
    n = 37
    x, y = draw(n, dtype=dtype), draw(n, dtype=dtype).flip(0)
    x[::3], y[::2], x[5], y[7], x[9] = -0.0, -0.0, NAN, INF, -INF

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = x + 1 > y
        return (torch.where(c, x, y), torch.where(c, x, 1.0), torch.where(c, -0.0, x),
                torch.where(c, 2.0, x), x.masked_fill(c, -0.0), torch.full_like(x, -0.0),
                torch.where(c[:, None], x[:, None], y))  # fmt: skip

    same_bits(f, x, y)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_choice_of_several_shapes(dynamic: bool | None) -> None:
    def f(c: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.where(c, x, y) for x in given for y in given)

    shapes = [(7,), (3, 7), (3, 1), ()]
    inputs = [torch.where(draw(*s) > 0, draw(*s), -0.0) for s in shapes]
    for shape in shapes[:2]:
        same_bits(f, draw(*shape) > 0, *inputs, dynamic=dynamic)


@pytest.mark.parametrize("slope", [0.25, -0.25, 0.0])
def test_a_slope_keeps_the_sign_of_zero(slope: float) -> None:
    x = torch.tensor([-0.0, 0.0, 1.0, -1.0, INF, -INF, NAN])

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.leaky_relu(x, slope), F.prelu(x, torch.full((1,), slope))

    same_bits(f, x)


# Draws, gradients, views


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 2), lambda x: x.permute(1, 2, 0), lambda x: x[:, ::2].mT,
        lambda x: x[:, :1].expand(-1, 5, -1).mT,
    ],
    ids=["turned", "turned twice", "cut", "repeated"],
)  # fmt: skip
def test_draws_of_a_view_are_those_of_eager(
    view: Callable[[torch.Tensor], torch.Tensor], dynamic: bool | None
) -> None:
    """Elements get their draws in the order of their memory: a contiguous copy has another."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = view(x * 1)
        return (F.dropout(x, 0.5), torch.rand_like(x), torch.bernoulli(x.sigmoid()),
                torch.normal(x, 1.0), torch.randint_like(x, 9))  # fmt: skip

    x = draw(2, 4, 3)
    torch.manual_seed(5)
    expected = f(x)
    torch.manual_seed(5)
    for made, eager in zip(through(f, dynamic=dynamic)(x), expected, strict=True):
        torch.testing.assert_close(made, eager)


def test_gradients_that_the_graph_switches_on_are_refused() -> None:
    """Its result would have none, where eager's has."""

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return x * 2

    x = torch.ones(3, requires_grad=True)
    with torch.no_grad(), pytest.raises(UnsupportedError, match="enable_grad"):
        through(f)(x)
    with torch.no_grad():
        assert torch.equal(through(f)(x.detach()), f(x.detach()))


@pytest.mark.parametrize("dynamic", [None, True])
def test_views_of_an_input_in_another_type(dynamic: bool | None) -> None:
    x = draw(3, 4)
    same_bits(lambda x: (x.view(torch.int32), x.t()), x, dynamic=dynamic)
    f, z = lambda z: (z.conj(), torch.view_as_real(z)), torch.complex(x, x + 1)
    for made, expected in zip(through(f, dynamic=dynamic)(z), f(z), strict=True):
        assert torch.equal(made, expected)


@pytest.mark.parametrize(
    ("name", "f"),
    [
        ("int32", lambda x: ((y := x * 2), y.view(torch.int32))),
        ("conjugated", lambda x: ((y := torch.complex(x, x)).conj(), torch.view_as_real(y))),
        ("float32", lambda x: ((y := torch.complex(x, x)).real, y.imag)),
    ],
)
def test_outputs_that_share_memory_in_several_types_are_refused(
    name: str, f: Callable[..., Any]
) -> None:
    """The second was cut from the first, in its type."""
    with pytest.raises(UnsupportedError, match=f"share memory.*{name}"):
        through(f)(draw(3, 4))
