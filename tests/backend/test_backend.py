"""The contract of a dynamo backend, point by point, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from through_backend import close, compiled, through

import roundoff.backend as rb
from roundoff.errors import DtypeError, ModelError, UnsupportedError
from roundoff.fusion.onnxruntime import Silu
from roundoff.fusion.products import TorchProduct

EVERY = "default+onnxruntime+experimental"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchProduct, "least", 1)


@pytest.fixture(params=[None, "default+onnxruntime", EVERY], ids=["plain", "fused", "partitions"])
def patterns(request: pytest.FixtureRequest) -> str | None:
    return request.param


class Gated(torch.nn.Module):
    """Two products of one input, packed by a rule: weights matter twice."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(size, size, bias=False)
        self.up = torch.nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(self.gate(x)) * self.up(x)


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


def products(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ x.mT
    return y.transpose(0, 1) * 2, y.sum(-1), (y + 1).permute(2, 0, 1), y[..., :2] * 1.5


def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    y[0].mul_(2)
    return x * y


def aliases(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x + 1
    return x, x.view(-1), y, y.T, y[0], y


def overlapping() -> tuple[torch.Tensor, ...]:
    base = torch.randn(12)
    return base[:8], base[4:]


#: A function, and its inputs.
CONTRACT: dict[str, tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "products": (products, lambda: (torch.randn(3, 4, 5),)),
    "inputs are written to": (written, lambda: (torch.randn(3, 4), torch.randn(3, 4))),
    "through a view": (lambda x, y: (x.mul_(3), y + 1)[1], overlapping),
    "nothing is returned": (lambda x: (x.add_(1), None)[1], lambda: (torch.randn(3),)),
    "outputs share memory": (aliases, lambda: (torch.randn(3, 4),)),
    "nothing to compute": (lambda x: (x, 3, None), lambda: (torch.ones(2),)),
    "a scalar": (lambda x, s: (x * s, s + 1), lambda: (torch.randn(2, 3), torch.tensor(2.0))),
    "no elements": (lambda x, s: (x * s, s + 1), lambda: (torch.randn(0, 3), torch.tensor(2.0))),
    "a constant": (lambda x: x * torch.tensor([2.0, -3.0]), lambda: (torch.randn(2),)),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", CONTRACT)
def test_it_does_what_eager_does(name: str, patterns: str | None) -> None:
    as_in_eager(*CONTRACT[name], patterns=patterns)


@torch.no_grad()
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 2:6], lambda x: x.T[2:6].T, lambda x: x[::2, ::2],
        lambda x: x[:1, :4].expand(5, 4), lambda x: x[:, :4].t()[:, :4],
    ],
    ids=["columns", "of the transpose", "steps", "expanded", "transposed"],
)  # fmt: skip
def test_inputs_lie_as_they_like(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    as_in_eager(Gated(4), lambda: (view(torch.randn(6, 8)),), patterns=EVERY)


@torch.no_grad()
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16,
              torch.bfloat16, torch.float64], ids=str,
)  # fmt: skip
def test_types(dtype: torch.dtype) -> None:
    def f(x: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.where(m, x, x.roll(1, 0)), ~m

    as_in_eager(f, lambda: ((torch.randn(4, 3) * 5).to(dtype), torch.rand(4, 3) > 0.5))


@torch.no_grad()
def test_several_shapes_are_rethrough(patterns: str | None) -> None:
    f = torch.nn.Linear(4, 4)
    g, graphs = compiled(f, patterns)
    for rows in (2, 5, 2, 1):
        x = torch.randn(rows, 4)
        close(g(x), f(x))
    assert len(graphs) == 3


@torch.no_grad()
def test_dynamic_shapes() -> None:
    torch._dynamo.utils.counters.clear()

    def f(x: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
        return x.reshape(-1) * x.shape[0], x.shape[0] * 2, x @ x.mT

    g, graphs = compiled(f, dynamic=True)
    for rows in (3, 5, 3, 8):
        x = torch.randn(rows, 4)
        made, wanted = g(x), f(x)
        close(made[0], wanted[0])
        close(made[2], wanted[2])
        assert made[1] == wanted[1]
    assert len(graphs) == 1, "one conversion for all sizes"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "dynamo recompiled"


@torch.no_grad()
def test_graph_breaks_make_a_session_each(patterns: str | None) -> None:

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return torch.relu(y) + x

    x = torch.randn(4)
    g, graphs = compiled(f, patterns, fullgraph=False)
    close(g(x), f(x))
    assert len(graphs) == 2
    assert all(i["session"] for i in graphs)


@torch.no_grad()
def test_parameters_changed_in_place(patterns: str | None) -> None:
    f = Gated()
    (g, graphs), x = compiled(f, patterns), torch.randn(2, 3, 8)
    close(g(x), f(x))
    if patterns:
        assert graphs[0]["prepare"] is not None, "nothing is packed: a weak test"
    f.gate.weight.mul_(2)
    f.up.bias.add_(1)
    close(g(x), f(x))
    f.up.weight = torch.nn.Parameter(torch.randn(8, 8))
    close(g(x), f(x))
    f.load_state_dict({k: torch.randn_like(v) for k, v in f.state_dict().items()})
    close(g(x), f(x))


@torch.no_grad()
def test_writes_without_a_version_need_reset() -> None:
    f = Gated()
    g, x = through(f), torch.randn(2, 3, 8)
    before = g(x)
    f.gate.weight.data.mul_(2)
    rb.reset()
    close(g(x), f(x))
    assert not torch.allclose(g(x), before)


def test_inference_tensors_as_weights(patterns: str | None) -> None:
    with torch.inference_mode():
        f = Gated()
        g, x = through(f, patterns), torch.randn(2, 3, 8)
        close(g(x), f(x))
        f.gate.weight.mul_(2)
        rb.reset()
        close(g(x), f(x))


@torch.no_grad()
def test_weights_replaced_at_the_same_address(patterns: str | None) -> None:
    """A packed weight must not survive its parameter, wherever the next one lies."""
    f = Gated()
    g, x = through(f, patterns), torch.randn(2, 3, 8)
    for _ in range(20):
        f.gate.weight = None
        f.gate.weight = torch.nn.Parameter(torch.randn(8, 8))
        close(g(x), f(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes(mode: Callable[[], Any], patterns: str | None) -> None:
    f = Gated()
    x = torch.randn(2, 8, requires_grad=True)
    with mode():
        g = through(f, patterns)
        close(g(x), f(x))
        close(g(x.detach().clone()), f(x))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_computes_as_near_as_torch(dtype: torch.dtype, patterns: str | None) -> None:
    f = Gated(64).to(dtype)
    x = torch.randn(16, 64, dtype=dtype)
    truth = Gated(64).double()
    truth.load_state_dict(f.state_dict())
    exact = truth(x.double())
    ours = (through(f, patterns)(x).double() - exact).abs().max()
    torchs = (f(x).double() - exact).abs().max()
    # Rounded in the same places: the same error up to a rounding of the largest result.
    assert ours <= torchs + exact.abs().max() * torch.finfo(dtype).eps


@torch.no_grad()
def test_constant_outputs_survive_later_calls() -> None:
    f = Gated()

    def h(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return f(x), f.up.weight + f.gate.weight

    g, x = through(h), torch.randn(2, 3, 8)
    first = g(x)[1]
    first.zero_()
    close(g(x), h(x))


def test_training_is_refused() -> None:
    g = through(Gated())
    with pytest.raises(UnsupportedError, match=r"training.*no_grad"):
        g(torch.randn(2, 3, 8))


@torch.no_grad()
def test_unsupported_types_are_refused() -> None:
    for x, fallback in (
        (torch.ones(2, dtype=torch.complex64), False),
        (torch.ones(2).to(torch.float8_e4m3fn), True),
    ):
        torch._dynamo.reset()
        with pytest.raises(DtypeError, match="ONNX Runtime does not take"):
            through(lambda x: x.reshape(2, 1), fallback=fallback)(x)


@torch.no_grad()
def test_devices_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"several devices.*cpu, meta"):
        through(lambda x, y: (x + 1, y + 1))(torch.ones(2), torch.ones(2, device="meta"))
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match="device: got meta"):
        through(lambda x: x + 1)(torch.ones(2, device="meta"))


@torch.no_grad()
def test_called_without_dynamo() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2 + 1,)

    x = torch.randn(3)
    g = rb.onnx_custom_backend(torch.fx.symbolic_trace(f), [x], optimize=False)
    close(g(x), f(x))


@torch.no_grad()
@pytest.mark.parametrize("opset", [18, 19, 20, 21])
def test_opsets_and_what_is_stored(opset: int, tmp_path: Any) -> None:
    f, x = Gated(), torch.randn(2, 3, 8)
    g, graphs = compiled(f, "default", target_opset=opset, dump_prefix=tmp_path / "gated")
    close(g(x), f(x))
    (one,) = graphs
    assert {d.domain: d.version for d in one["onnx"].opset_import}[""] == opset
    onnx.checker.check_model(onnx.load(tmp_path / "gated_0.onnx"), full_check=True)
    assert one["report"].nodes["exported"] == len(one["exported"].graph.node)
    assert isinstance(one["graph_module"], torch.fx.GraphModule)


@torch.no_grad()
def test_a_stored_graph_has_named_parts_and_todays_keys() -> None:
    f, x = Gated(), torch.randn(2, 3, 8)
    g, graphs = compiled(f)
    y = g(x)
    (one,) = graphs
    parts = {
        "onnx": one.model, "whole": one.fused, "prepare": one.precomputed,
        "exported": one.exported, "graph_module": one.graph_module, "session": one.sessions,
        "report": one.report, "seconds": one.seconds, "compiled": one,
    }  # fmt: skip
    assert dict(one) == parts
    assert "onnx" in one
    with pytest.raises(KeyError):
        one["nothing"]
    assert [tuple(t.shape) for n, t in zip(one.names, one.inputs, strict=True)
            if n not in one.static] == [(2, 3, 8)]  # fmt: skip
    close(one(one.inputs)[0], y)
    close(one.truth()[0].float(), y)


@torch.no_grad()
def test_autocast_keeps_its_types() -> None:
    f, x = Gated(), torch.randn(2, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        made, wanted = through(f)(x), f(x)
    assert made.dtype == wanted.dtype
    close(made.float(), wanted.float(), 0.02)


def written(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("f", "direct"),
    [
        (lambda x: torch.relu(x) * 2, True),
        (lambda x: (torch.exp(x), x.sum(0)), True),
        (written, False),
        (lambda x: x.t(), False),
        (lambda x: (x * 2, x[1:]), False),
        (lambda x: [(y := x * 2), y.view(-1)], True),  # shared as Outputs has it
    ],
    ids=["plain", "two outputs", "an input is written to", "a view", "beside another", "shared"],
)
def test_a_wrapper_stands_between_where_it_has_work_alone(
    f: Callable[..., Any], direct: bool, dynamic: bool
) -> None:
    made: list[Callable[..., Any]] = []

    def backend(*args: Any) -> Callable[..., Any]:
        made.append(rb.onnx_custom_backend(*args))
        return made[-1]

    run = torch.compile(f, backend=backend, fullgraph=True, dynamic=dynamic)
    for _ in range(2):
        x = torch.randn(3, 4)
        y = x.clone()
        close(run(x), f(y))
        close(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        close(run(x), f(y))
    # AOTAutograd's own function is closed to dynamo. It also marks sizes that may change, and
    # ends autocast.
    wrapped = [hasattr(one, "_torchdynamo_disable") for one in made]
    assert wrapped == [not direct or dynamic, True]


@torch.no_grad()
def test_products_by_torch_between_partitions() -> None:
    """Weights are read where they lie, results are new, and what is passed on is kept."""
    f = torch.nn.Sequential(
        torch.nn.Linear(8, 6, bias=False), torch.nn.ReLU(), torch.nn.Linear(6, 4, bias=False)
    )
    (g, graphs), x = compiled(f, EVERY), torch.randn(5, 8)
    first = g(x)
    (one,) = graphs
    assert [n.op_type for n in one["onnx"].graph.node] == ["TorchProduct", "Relu", "TorchProduct"]
    assert one["prepare"] is None, "no weight is packed or turned"
    assert len(one["session"]) == 1
    assert torch.equal(first, f(x))
    kept = first.clone()
    f[0].weight.mul_(-1)
    f[2].weight.data.mul_(3)  # moves no version: seen all the same
    assert torch.equal(g(x + 1), f(x + 1))
    assert torch.equal(first, kept), "a later call wrote over an earlier result"


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_products_by_torch_in_and_out_of_inference_mode(order: tuple[bool, bool]) -> None:
    f = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
    f.requires_grad_(False)
    g, x = through(f, EVERY), torch.randn(5, 8)
    for inference in order:
        with torch.inference_mode(inference):
            close(g(x), f(x))


@torch.no_grad()
def test_rows_without_keys_are_zero() -> None:
    def f(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)

    q, mask = torch.randn(2, 2, 5, 8), torch.rand(2, 1, 5, 5) > 0.3
    mask[0, 0, 1] = False
    for chosen in (None, "default+onnxruntime"):
        torch._dynamo.reset()
        close(through(f, chosen)(q, mask), f(q, mask))


@torch.no_grad()
def test_check_names_the_rule_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Silu.rewrite

    def wrong(self: Silu, g: Any, node: Any) -> bool:
        done = right(self, g, node)
        for other in g.graph:
            if other.op_type == "QuickGelu":
                other.attributes["alpha"] = ir.AttrFloat32("alpha", 1.702)
        return done

    monkeypatch.setattr(Silu, "rewrite", wrong)
    with pytest.raises(ModelError, match=r"(?s)it begins at 'silu'.*QuickGelu"):
        through(Gated(), check=True)(torch.randn(2, 8))


@torch.no_grad()
def test_entry_point() -> None:
    if not entry_points(group="torch_dynamo_backends", name="roundoff"):
        pytest.skip("the package is not installed")
    f = torch.compile(torch.nn.Linear(4, 4).eval(), backend="roundoff")
    assert f(torch.ones(2, 4)).shape == (2, 4)
