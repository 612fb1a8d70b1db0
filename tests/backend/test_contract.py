"""The contract of a dynamo backend, beside eager: shapes, types, modes, writes, aliases."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import onnx
import pytest
import torch
from through_backend import close, compiled, through

import roundoff.backend as rb
from roundoff.errors import ArgumentError, DtypeError, UnsupportedError

F = torch.nn.functional


@pytest.fixture(params=[None, "default+onnxruntime"], ids=["plain", "fused"])
def patterns(request: pytest.FixtureRequest) -> str | None:
    return request.param


class Gated(torch.nn.Module):
    """Two products of one input, packed by a rule: weights matter twice."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(size, size, bias=False)
        self.up = torch.nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * self.up(x)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def memory(*trees: Any) -> list[Any]:
    """What each tensor is: its type and strides, and which of them lies in the memory of which."""
    every = tensors(trees)
    at = [t.untyped_storage().data_ptr() for t in every]
    same = [next(k for k, other in enumerate(every) if other is t) for t in every]
    return [
        (t.dtype, t.stride(), same[k], at.index(at[k]), t.storage_offset() * (at.count(at[k]) > 1))
        for k, t in enumerate(every)
    ]


def as_in_eager(
    f: Callable[..., Any], make: Callable[[], tuple[torch.Tensor, ...]], **options: Any
) -> None:
    """Results, inputs afterwards, what shares memory; no call writes over an earlier result."""
    run, earlier = through(f, **options), []
    for call in range(3):
        torch.manual_seed(call)
        ours = make()
        torch.manual_seed(call)
        theirs = make()
        made, wanted = run(*ours), f(*theirs)
        close((made, ours), (wanted, theirs))
        assert memory(ours, made) == memory(theirs, wanted)
        earlier.append((tensors(made), [t.clone() for t in tensors(made)]))
        if call == 1:
            for results, kept in earlier:
                close(results, kept)
            for t in tensors(made):
                t.zero_()  # what the caller does to a result is of no matter to the next call


# Results, shapes, types


def products(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ x.mT
    return y.transpose(0, 1) * 2, y.sum(-1), (y + 1).permute(2, 0, 1), y[..., :2] * 1.5


def partitions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.relu(x).roll(1, 0)  # torch's, between two that ONNX Runtime runs
    return y, y * 2, y[0]


def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    y[0].mul_(2)
    return x * y


def written_by_index(x: torch.Tensor) -> torch.Tensor:
    x[torch.tensor([0, 2])] = -1
    x[x > 1] = 0
    torch.add(x, 2, out=x)
    return x.max()


def part() -> tuple[torch.Tensor, torch.Tensor]:
    base = torch.randn(8, 8)
    return base[1:5, 2:6], base


def aliases(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x + 1
    return x, x.view(-1), y, y.T, y[0], y[1:], y


def overlapping() -> tuple[torch.Tensor, ...]:
    base = torch.randn(12)
    return base[:8], base[4:]


#: A function, and its inputs.
CONTRACT: dict[str, tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "products": (products, lambda: (torch.randn(3, 4, 5),)),
    "partitions": (partitions, lambda: (torch.randn(3, 4),)),
    "inputs are written to": (written, lambda: (torch.randn(3, 4), torch.randn(3, 4))),
    "through a view": (lambda x, y: (x.mul_(3), y + 1)[1], overlapping),
    "by index": (written_by_index, lambda: (torch.randn(4, 4),)),
    "a part is written to": (lambda x, base: written(x, x + 1), part),
    "a row of what was written": (lambda x: x.add_(1)[0], lambda: (torch.randn(4, 4),)),
    "rows": (lambda x: (x + 1).unbind(0), lambda: (torch.randn(4, 4),)),
    "nothing is returned": (lambda x: (x.add_(1), None)[1], lambda: (torch.randn(3),)),
    "outputs share memory": (aliases, lambda: (torch.randn(3, 4),)),
    "nothing to compute": (lambda x: (x, 3, None), lambda: (torch.ones(2),)),
    # An empty name in the place of the bias ended the process.
    "a residual before a norm": (
        lambda x, y: F.layer_norm(x + y, (8,), torch.ones(8)),
        lambda: (torch.randn(2, 3, 8), torch.randn(2, 3, 8)),
    ),
    "a scalar": (lambda x, s: (x * s, s + 1), lambda: (torch.randn(2, 3), torch.tensor(2.0))),
    "no elements": (lambda x: (x * 2).reshape(2, 0, 3), lambda: (torch.randn(0, 6),)),
    "a constant": (lambda x: x * torch.tensor([2.0, -3.0]), lambda: (torch.randn(2),)),
    "a strided view": (
        lambda x: (x * 2).as_strided((3, 2, 6), (6, 6, 1), 6) + 1,
        lambda: (torch.randn(6, 6),),
    ),
    "another type": (lambda x: (x.view(torch.int32), x.t()), lambda: (torch.randn(3, 4),)),
    "an FFT": (
        lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.tensor([2, 1j, 0, 1])),
        lambda: (torch.randn(6),),
    ),
    **{
        f"an input lies {how}": (Gated(4), lambda view=view: (view(torch.randn(6, 8)),))
        for how, view in {
            "in columns": lambda x: x[:, 2:6],
            "turned": lambda x: x.T[2:6].T,
            "in steps": lambda x: x[::2, ::2],
            "expanded": lambda x: x[:1, :4].expand(5, 4),
        }.items()
    },
}


@torch.no_grad()
@pytest.mark.parametrize("name", CONTRACT)
def test_it_does_what_eager_does(name: str, patterns: str | None) -> None:
    as_in_eager(*CONTRACT[name], patterns=patterns)


@torch.no_grad()
def test_views_by_sizes_of_inputs_are_cut_where_torch_cuts_them() -> None:
    """AOTAutograd cut the input by the strides of what came without gaps."""

    def f(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [*x.chunk(2, 1), y.add_(1)[:, y.shape[1] // 2 :]]

    x = torch.randn(3, 8)
    made = through(f, dynamic=True)(x[:, ::2], x.clone())
    assert all(map(torch.equal, made, f(x[:, ::2], x)))


@torch.no_grad()
def test_several_shapes_graph_breaks_and_autocast() -> None:
    f = Gated()

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = f(x)
        torch._dynamo.graph_break()
        return torch.relu(y) + x

    g, graphs = compiled(broken, fullgraph=False)
    for rows in (2, 5, 2):
        x = torch.randn(rows, 8)
        close(g(x), broken(x))
    assert len(graphs) == 4
    with torch.autocast("cpu", torch.bfloat16):
        made, wanted = through(f)(x), f(x)
    assert made.dtype == wanted.dtype
    close(made.float(), wanted.float(), 0.02)


@torch.no_grad()
def test_any_sizes_take_one_conversion() -> None:
    """Products, attention, masks, joins, reshapes and pads at random sizes from 2 on."""
    torch._dynamo.utils.counters.clear()

    def f(x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        batch, length, _ = x.shape
        q = x.view(batch, length, 4, 8).transpose(1, 2)
        k = torch.cat([past, q[:, :2]], 2)
        mask = torch.arange(k.shape[2])[None, :] <= torch.arange(length)[:, None] + past.shape[2]
        y = F.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True)
        flat = y.transpose(1, 2).reshape(batch, length, -1)
        first, _ = F.pad(x, (1, 1), value=3.0).repeat(1, 2, 1).split([9, 25], -1)
        return flat + x.mean(1, keepdim=True) + first.sum() * x.shape[0], k, batch * length + 1

    run, graphs = compiled(f, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        batch, length, keys = torch.randint(2, 6, (3,), generator=generator).tolist()
        # Dynamo takes sizes that are equal at its first call for one: these never are.
        batch, length, keys = batch * 2 + 1, length * 10, keys * 17
        x = torch.randn(batch, length, 32, generator=generator)
        past = torch.randn(batch, 2, keys, 8, generator=generator)
        torch.testing.assert_close(run(x, past), f(x, past), rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "dynamo recompiled"


@torch.no_grad()
def test_layers_of_a_network_of_images_are_converted() -> None:
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, (3, 1), stride=(2, 1), padding=1, dilation=2, groups=4),
        torch.nn.BatchNorm2d(8),
        torch.nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1),
    ).eval()
    layers[1].running_mean.normal_()
    layers[1].running_var.uniform_(0.5, 2)
    run, graphs = compiled(layers)
    x = torch.randn(2, 4, 11, 8)
    close(run(x), layers(x))
    assert not graphs[0].by_torch


# Weights and modes


@torch.no_grad()
def test_weights_that_change_are_seen(patterns: str | None) -> None:
    f = Gated()
    (g, graphs), x = compiled(f, patterns), torch.randn(2, 3, 8)
    close(g(x), f(x))
    if patterns:
        assert graphs[0].precomputed is not None, "nothing is packed: a weak test"
    f.gate.weight.mul_(2)
    f.gate.weight.view(-1)[:3].zero_()
    f.up.bias.add_(1)
    close(g(x), f(x))
    f.gate.weight.data = f.gate.weight.data * 3
    close(g(x), f(x))
    f.up.weight = torch.nn.Parameter(torch.randn(8, 8))
    close(g(x), f(x))
    f.load_state_dict({k: torch.randn_like(v) for k, v in f.state_dict().items()})
    close(g(x), f(x))
    for _ in range(20):  # perhaps where the last one lay
        f.gate.weight = None
        f.gate.weight = torch.nn.Parameter(torch.randn(8, 8))
        close(g(x), f(x))


@pytest.mark.parametrize("inference", [False, True])
def test_writes_without_a_version_need_reset(inference: bool, patterns: str | None) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        f = Gated()
        g, x = through(f, patterns), torch.randn(2, 3, 8)
        close(g(x), f(x))
        (f.gate.weight if inference else f.gate.weight.data).mul_(2)
        rb.reset()
        close(g(x), f(x))


@torch.no_grad()
def test_what_weights_alone_decide_survives_later_calls() -> None:
    f = Gated()

    def h(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return f(x), f.up.weight + f.gate.weight

    g, x = through(h), torch.randn(2, 3, 8)
    g(x)[1].zero_()
    close(g(x), h(x))


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_modes(order: tuple[bool, bool], patterns: str | None) -> None:
    f = Gated()
    x, g = torch.randn(2, 8, requires_grad=True), through(f, patterns)
    for inference in order:
        with torch.inference_mode(inference), torch.no_grad():
            close(g(x), f(x))
            close(g(x.detach().clone()), f(x))


def test_gradients_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"training.*no_grad"):
        through(Gated())(torch.randn(2, 3, 8))

    def within(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return (x * 2).sum()

    with torch.no_grad():
        y = through(within)(torch.ones(3, requires_grad=True))
    with pytest.raises(UnsupportedError, match="enable_grad"):
        y.backward()


def test_a_check_beside_a_counter_alone() -> None:
    """What counts is no output of the model: the check still has one to hang on."""

    def f(count: torch.Tensor, x: torch.Tensor) -> None:
        torch._assert_async(x.sum() > 0, "not positive")
        count.add_(1)

    count, g = torch.tensor([3]), through(f)
    g(count, torch.ones(2))
    with pytest.raises(RuntimeError, match="not positive"):
        g(count, -torch.ones(2))
    assert count.item() == 4


# Arguments, and what is stored


@torch.no_grad()
def test_what_is_stored() -> None:
    f, x = Gated(), torch.randn(2, 3, 8)
    g, graphs = compiled(f, "default")
    y = g(x)
    close(y, f(x))
    (one,) = graphs
    onnx.checker.check_model(one["onnx"], full_check=True)
    assert one.report.nodes["exported"] == len(one.exported.graph.node)
    assert one["compiled"] is one
    assert [
        tuple(t.shape) for n, t in zip(one.names, one.inputs, strict=True) if n not in one.static
    ] == [(2, 3, 8)]
    close(one(one.inputs)[0], y)
    close(one.truth()[0].float(), y)


@torch.no_grad()
def test_an_argument_that_is_none_of_the_known_is_named() -> None:
    """The error reaches the caller of the compiled function as it is."""
    bound = functools.partial(rb.onnx_custom_backend, cuda_graph=1)  # type: ignore[arg-type]
    for run, said in (
        (torch.compile(F.relu, backend=bound), "cuda_graph"),
        (torch.compile(F.relu, backend=rb.onnx_custom_backend, options={"x": True}), "options"),
    ):
        for _ in range(2):
            with pytest.raises(ArgumentError, match=rf"^{said}: got "):
                run(torch.ones(3))


@torch.no_grad()
def test_called_without_dynamo_and_by_name() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2 + 1,)

    x = torch.randn(3)
    g = rb.onnx_custom_backend(torch.fx.symbolic_trace(f), [x])
    close(g(x), f(x))
    if entry_points(group="torch_dynamo_backends", name="roundoff"):
        close(torch.compile(f, backend="roundoff")(x), f(x))


# What is refused


@torch.no_grad()
@pytest.mark.parametrize(
    ("f", "x", "error", "said"),
    [
        (lambda x: x + 1, torch.ones(2, device="meta"), UnsupportedError, "device: got meta"),
        (lambda x: x + 1, torch.ones(2).to(torch.float8_e4m3fn), DtypeError, "does not take"),
        # torch's check is an operator with an effect, whose token is no tensor.
        (torch.linalg.inv, torch.zeros(4, 4), UnsupportedError, "an effect"),
        (lambda x: torch.linalg.solve(x, x[:, :2]), torch.eye(4), UnsupportedError, "an effect"),
    ],
)
def test_it_is_refused_by_name(f: Any, x: torch.Tensor, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        through(f)(x)


@torch.no_grad()
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x / (x.shape[0] / 3),
        lambda x: x.abs() ** (x.shape[0] / 3),
        lambda x: torch.where(x > 0, x, x.shape[0] / 3),
    ],
    ids=["quotient", "power", "choice"],
)
def test_a_number_that_a_size_decides_is_that_of_each_call(f: Callable[..., Any]) -> None:
    run = through(f, dynamic=True)
    for rows in (5, 7, 11):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(run(x), f(x))


@torch.no_grad()
def test_several_devices_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"several devices.*cpu, meta"):
        through(lambda x, y: (x + 1, y + 1))(torch.ones(2), torch.ones(2, device="meta"))


@torch.no_grad()
@pytest.mark.parametrize(
    ("f", "x", "said"),
    [
        (lambda x: torch.fft.rfft(x).abs(), torch.ones(4), "complex numbers have no kernels"),
        (lambda x: torch.linalg.eigvalsh(x), torch.eye(4), "linalg"),
        (lambda x: x.reshape(2, 1) * 2, torch.ones(2, dtype=torch.complex64), "complex numbers"),
        (lambda x: x.clamp(0, 1), torch.tensor([3], dtype=torch.int16), "for Max"),
        (lambda x: x * 2, torch.ones(2).double(), "in float32"),
        (lambda x: x * 2, torch.ones(2).bfloat16(), "bfloat16 on a processor"),
        (lambda x: x.half() < x, torch.tensor([2049]), "does not round to float16"),
        (lambda x: (x * x).int(), torch.tensor([45.3]).half(), "does not round to float16"),
    ],
)
def test_without_fallback_what_torch_would_compute_is_refused(
    f: Callable[..., Any], x: torch.Tensor, said: str
) -> None:
    torch.testing.assert_close(through(f)(x), f(x))
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match=said):
        through(f, fallback=False)(x)


@torch.no_grad()
@pytest.mark.parametrize(
    "f",
    [
        lambda x, _: x * 3e-8,
        lambda x, _: x / 70000.1,
        lambda x, _: 70000.1 + x,
        lambda x, _: torch.sub(x, x, alpha=3e-8),
        lambda x, single: x * single,
        lambda x, single: torch.softmax(x, 0) / single,
        lambda x, _: torch.nn.functional.scaled_dot_product_attention(
            x, x / 50000, x, scale=70000.0
        ),
    ],
)
def test_a_number_that_float16_has_not(f: Callable[..., Any]) -> None:
    inputs = torch.tensor([[[[-60000.0, 1.0, 300.0, 0.25]]]]).half(), torch.tensor(3e-8)
    torch.testing.assert_close(through(f)(*inputs), f(*inputs), rtol=0, atol=0)


def test_a_small_probability_has_a_logarithm() -> None:
    x = torch.tensor([-80.0, -20.0, -5.0, 0.0, 9.0])
    torch.testing.assert_close(through(torch.sigmoid)(x).log(), torch.nn.functional.logsigmoid(x))


# What stays with torch

_LIBRARY = torch.library.Library("roundoff_tests", "FRAGMENT")
_LIBRARY.define("double_odd(Tensor x, SymInt n) -> (Tensor, Tensor)")
_LIBRARY.impl(
    "double_odd",
    lambda x, n: ((x * 2 + n).T.contiguous().T, x[::2].clone()),  # turned in memory
    "CompositeExplicitAutograd",
)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_custom_operator_runs_between_partitions(dynamic: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) @ x.mT
        doubled, odd = torch.ops.roundoff_tests.double_odd(y, x.shape[0])
        return torch.sigmoid(doubled)[::2] + odd

    run, graphs = compiled(f, dynamic=dynamic)
    for rows in (4, 6) if dynamic else (4,):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(run(x), f(x))
    (graph,) = graphs
    assert list(graph.by_torch) == ["roundoff_tests.double_odd.default"]
    assert len(graph.sessions) == 2, "one before it, and one after"


@torch.no_grad()
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_the_data_decide_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"data decide.*capture_dynamic_output_shape_ops"):
        through(lambda x: torch.nonzero(torch.relu(x)) + 1)(torch.randn(5, 4))
