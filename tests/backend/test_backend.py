"""The contract of a dynamo backend, point by point, on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import pytest
import torch

import roundoff.backend as rb
from roundoff.errors import ArgumentError, DtypeError, UnsupportedError
from roundoff.fusion import OptimizationOptions
from roundoff.fusion.products import TorchProduct

EVERY = "default+onnxruntime+experimental"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(TorchProduct, "least", 1)  # the models are small
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(params=[None, "default+onnxruntime", EVERY], ids=["plain", "fused", "partitions"])
def patterns(request: pytest.FixtureRequest) -> str | None:
    return request.param


def compiled(
    fn: Callable[..., Any],
    patterns: str | None = "default+onnxruntime",
    storage: dict[str, Any] | None = None,
    dynamic: bool = False,
    fullgraph: bool = True,
    **more: Any,
) -> Callable[..., Any]:
    backend = functools.partial(
        rb.onnx_custom_backend, storage=storage, options=OptimizationOptions(patterns), **more
    )
    return torch.compile(fn, backend=backend, fullgraph=fullgraph, dynamic=dynamic)


class Gated(torch.nn.Module):
    """Two products of one input, packed by a rule: weights matter twice."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(size, size, bias=False)
        self.up = torch.nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(self.gate(x)) * self.up(x)


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_values_strides_and_fresh_memory(patterns: str | None) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ x.mT
        return y.transpose(0, 1) * 2, y.sum(-1), (y + 1).permute(2, 0, 1), y[..., :2] * 1.5

    g, x = compiled(f, patterns), torch.randn(3, 4, 5)
    first, second = g(x), g(x)
    for made, again, wanted in zip(first, second, f(x), strict=True):
        close(made, wanted)
        assert made.stride() == wanted.stride()
        assert made.data_ptr() != again.data_ptr()
    kept = first[0].clone()
    g(x + 1)
    assert torch.equal(first[0], kept), "a later call wrote over an earlier result"


@torch.no_grad()
def test_input_mutation(patterns: str | None) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        y[0].mul_(2)
        return x * y

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    x2, y2 = x.clone(), y.clone()
    close(compiled(f, patterns)(x, y), f(x2, y2))
    close((x, y), (x2, y2))


@torch.no_grad()
def test_mutation_through_an_overlapping_view() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(3)
        return y + 1

    base, base2 = torch.arange(12.0), torch.arange(12.0)
    g = compiled(f)
    close(g(base[:8], base[4:]), f(base2[:8], base2[4:]))
    close(base, base2)


@torch.no_grad()
def test_outputs_that_alias(patterns: str | None) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        return x, x.view(-1), y, y.T, y[0], y

    x = torch.randn(3, 4)
    made = compiled(f, patterns)(x)
    close(made, f(x))
    assert made[0] is x
    made[1][0] = 7.0
    assert x[0, 0] == 7, "a view of an input is a view"
    made[2][0, 0] = 9.0
    assert made[3][0, 0] == made[4][0] == 9, "outputs that share memory in torch share it here"


@torch.no_grad()
def test_several_shapes_are_recompiled(patterns: str | None) -> None:
    storage: dict[str, Any] = {}
    g = compiled(torch.nn.Linear(4, 4), patterns, storage)
    f = torch.nn.Linear(4, 4)
    g = compiled(f, patterns, storage)
    for rows in (2, 5, 2, 1):
        x = torch.randn(rows, 4)
        close(g(x), f(x))
    assert len(storage["instance"]) == 3


@torch.no_grad()
def test_dynamic_shapes() -> None:
    storage: dict[str, Any] = {}
    torch._dynamo.utils.counters.clear()

    def f(x: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
        return x.reshape(-1) * x.shape[0], x.shape[0] * 2, x @ x.mT

    g = compiled(f, storage=storage, dynamic=True)
    for rows in (3, 5, 3, 8):
        x = torch.randn(rows, 4)
        made, wanted = g(x), f(x)
        close(made[0], wanted[0])
        close(made[2], wanted[2])
        assert made[1] == wanted[1]
    assert len(storage["instance"]) == 1, "one conversion for all sizes"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "dynamo recompiled"


@torch.no_grad()
def test_graph_breaks_make_a_session_each(patterns: str | None) -> None:
    storage: dict[str, Any] = {}

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return torch.relu(y) + x

    x = torch.randn(4)
    close(compiled(f, patterns, storage, fullgraph=False)(x), f(x))
    assert len(storage["instance"]) == 2
    assert all(i["session"] for i in storage["instance"])


@torch.no_grad()
def test_parameters_changed_in_place(patterns: str | None) -> None:
    f = Gated()
    storage: dict[str, Any] = {}
    g, x = compiled(f, patterns, storage), torch.randn(2, 3, 8)
    close(g(x), f(x))
    if patterns:
        assert storage["instance"][0]["prepare"] is not None, "nothing is packed: a weak test"
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
    g, x = compiled(f), torch.randn(2, 3, 8)
    before = g(x)
    f.gate.weight.data.mul_(2)
    rb.reset()
    close(g(x), f(x))
    assert not torch.allclose(g(x), before)


def test_inference_tensors_as_weights(patterns: str | None) -> None:
    with torch.inference_mode():
        f = Gated()
        g, x = compiled(f, patterns), torch.randn(2, 3, 8)
        close(g(x), f(x))
        f.gate.weight.mul_(2)
        rb.reset()
        close(g(x), f(x))


@torch.no_grad()
def test_weights_replaced_at_the_same_address(patterns: str | None) -> None:
    """A packed weight must not survive its parameter, wherever the next one lies."""
    f = Gated()
    g, x = compiled(f, patterns), torch.randn(2, 3, 8)
    for _ in range(20):
        f.gate.weight = None
        f.gate.weight = torch.nn.Parameter(torch.randn(8, 8))
        close(g(x), f(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("grad", [False, True])
def test_modes(mode: Callable[[], Any], grad: bool, patterns: str | None) -> None:
    f = Gated()
    x = torch.randn(2, 8, requires_grad=grad)
    with mode():
        g = compiled(f, patterns)
        close(g(x), f(x))
        close(g(x.detach().clone()), f(x))


@torch.no_grad()
def test_views_and_strides_of_inputs(patterns: str | None) -> None:
    f = Gated(4)
    g, base = compiled(f, patterns), torch.randn(6, 8)
    for x in (
        base[:, 2:6],
        base.T[2:6].T,
        base[::2, ::2],
        base[1:3, 4:],
        base[:1, :4].expand(5, 4),
    ):
        close(g(x), f(x))


@torch.no_grad()
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16,
              torch.bfloat16, torch.float64], ids=str,
)  # fmt: skip
def test_types(dtype: torch.dtype) -> None:
    def f(x: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.where(m, x, x.flip(0))
        return chosen, ~m

    x, m = (torch.randn(4, 3) * 5).to(dtype), torch.rand(4, 3) > 0.5
    made = compiled(f)(x, m)
    for a, b in zip(made, f(x, m), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_computes_as_near_as_torch(dtype: torch.dtype, patterns: str | None) -> None:
    f = Gated(64).to(dtype)
    x = torch.randn(16, 64, dtype=dtype)
    truth = Gated(64).double()
    truth.load_state_dict(f.state_dict())
    exact = truth(x.double())
    ours = (compiled(f, patterns)(x).double() - exact).abs().max()
    torchs = (f(x).double() - exact).abs().max()
    # Rounded in the same places: the same error up to a rounding of the largest result.
    assert ours <= torchs + exact.abs().max() * torch.finfo(dtype).eps


@torch.no_grad()
def test_empty_and_scalar_tensors() -> None:
    def f(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * s, s + 1

    g = compiled(f)
    for rows in (0, 2):
        x, s = torch.randn(rows, 3), torch.tensor(2.0)
        close(g(x, s), f(x, s))


@torch.no_grad()
def test_a_graph_without_tensors_to_compute() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, int, None]:
        return x, 3, None

    x = torch.ones(2)
    made = compiled(f)(x)
    assert made[0] is x
    assert made[1:] == (3, None)


@torch.no_grad()
def test_constant_outputs_survive_later_calls() -> None:
    f = Gated()

    def h(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return f(x), f.up.weight + f.gate.weight

    g, x = compiled(h), torch.randn(2, 3, 8)
    first = g(x)[1]
    first.zero_()
    close(g(x), h(x))


def test_training_is_refused() -> None:
    g = compiled(Gated())
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
            compiled(lambda x: x.reshape(2, 1), fallback=fallback)(x)


@torch.no_grad()
def test_devices_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"several devices.*cpu, meta"):
        compiled(lambda x, y: (x + 1, y + 1))(torch.ones(2), torch.ones(2, device="meta"))
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match="device: got meta"):
        compiled(lambda x: x + 1)(torch.ones(2, device="meta"))


@torch.no_grad()
def test_an_operator_without_a_form_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"_linalg_eigh|linalg"):
        compiled(lambda x: torch.linalg.eigvalsh(x), fallback=False)(torch.eye(3))


def test_tiers_are_checked() -> None:
    with pytest.raises(ArgumentError, match="default\\+onnxruntime"):
        OptimizationOptions("onnxruntime")


@torch.no_grad()
def test_constants_tell_graphs_apart() -> None:
    x = torch.randn(3)
    for value in (2.0, 3.0):

        def f(x: torch.Tensor, value: float = value) -> torch.Tensor:
            return x * torch.tensor([value, -value, 1.0])

        torch._dynamo.reset()
        close(compiled(f)(x), f(x))


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
    storage: dict[str, Any] = {}
    f, x = Gated(), torch.randn(2, 3, 8)
    g = compiled(f, "default", storage, target_opset=opset, dump_prefix=tmp_path / "gated")
    close(g(x), f(x))
    (one,) = storage["instance"]
    assert {d.domain: d.version for d in one["onnx"].opset_import}[""] == opset
    onnx.checker.check_model(onnx.load(tmp_path / "gated_0.onnx"), full_check=True)
    assert one["report"].nodes["exported"] == len(one["exported"].graph.node)
    assert isinstance(one["graph_module"], torch.fx.GraphModule)


@torch.no_grad()
def test_a_stored_graph_has_named_parts_and_todays_keys() -> None:
    storage: dict[str, Any] = {}
    f, x = Gated(), torch.randn(2, 3, 8)
    y = compiled(f, storage=storage)(x)
    (one,) = storage["instance"]
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
        made, wanted = compiled(f)(x), f(x)
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
    storage: dict[str, Any] = {}
    f = torch.nn.Sequential(
        torch.nn.Linear(8, 6, bias=False), torch.nn.ReLU(), torch.nn.Linear(6, 4, bias=False)
    )
    g, x = compiled(f, EVERY, storage), torch.randn(5, 8)
    first = g(x)
    (one,) = storage["instance"]
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
    g, x = compiled(f, EVERY), torch.randn(5, 8)
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
        close(compiled(f, chosen)(q, mask), f(q, mask))
