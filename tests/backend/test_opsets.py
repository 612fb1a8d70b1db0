"""Each opset that can be asked for: the graph is written in it, is valid, and is eager's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
from through_backend import close, compiled

from roundoff.ort import newest_opset
from roundoff.precision import torch_precision, torch_tf32

F = torch.nn.functional
NEWEST = newest_opset()
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(1))
PLACE = torch.tensor([2])
NORM, BATCH = torch.nn.LayerNorm(6), torch.nn.BatchNorm2d(4).eval()

#: What ONNX writes otherwise in one opset than in another, and what it has in the later ones alone.
FORMS: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "gelu": (F.gelu, X),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), X),
    "sums": (lambda x: (x.sum(), x.mean(0), x.sum((0, 1), keepdim=True), x.mean(-1)), X),
    "extremes": (lambda x: (x.amax(-1), x.amin(0), x.max(), x.argmax(-1), x.prod(0)), X),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 3), value=2.0), X),
    "parts": (lambda x: (*x.split(4, 1), *x.chunk(3, 1), *x.split([1, 3])), X),
    "softmax": (lambda x: (x.softmax(0), x.log_softmax(-1), F.softplus(x)), X),
    "bounds": (lambda x: (x.clamp(-0.5, 0.5), x.clamp(min=0), F.relu6(x)), X),
    "tests": (lambda x: (x.isnan(), x.isinf(), x == 0, x.ge(1), ~(x > 0) & (x < 1)), X),
    "types": (lambda x: (x.double(), x.to(torch.int32), x.bool(), x.half().float()), X),
    "layer norm": (lambda x: NORM(x), X),
    "group norm": (lambda x: F.group_norm(x, 2), IMAGE),
    "batch norm": (lambda x: BATCH(x), IMAGE),
    "convolution": (lambda x: F.conv2d(x, IMAGE[:, :, :3, :3], padding=1), IMAGE),
    "pooling": (lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 3)), IMAGE),
    "resize": (lambda x: F.interpolate(x, scale_factor=2.0), IMAGE),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), IMAGE),
    "views": (lambda x: (x.reshape(3, 8), x.T, x.repeat(2, 1), x[1:, ::2], x.expand(2, 4, 6)), X),
    "places": (
        lambda x: (x[:, [0, 2]], x.cumsum(1), x.index_copy(1, PLACE, x[:, :1])),
        X,
    ),
    "made": (
        lambda x: (torch.arange(5), torch.ones(3, 3).tril() + x[:3, :3], x.new_full((2,), 3.0)),
        X,
    ),
}


BETWEEN = pytest.mark.slow(reason="opsets between the oldest and the newest that there are")


@pytest.mark.parametrize(
    "opset", [18, NEWEST, *(pytest.param(n, marks=BETWEEN) for n in range(19, NEWEST))]
)
def test_a_graph_is_written_in_the_opset_asked_for(opset: int) -> None:
    for name, (f, x) in FORMS.items():
        torch._dynamo.reset()
        run, graphs = compiled(f, target_opset=opset)
        with torch.no_grad():
            got, expected = run(x), f(x)
        close(got, expected)
        (graph,) = graphs
        for model in (graph.exported, graph.model):
            assert {o.domain: o.version for o in model.opset_import}[""] == opset, name
        if not graph.by_torch:
            onnx.checker.check_model(graph.exported, full_check=True)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gelu_by_its_definition(approximate: str, dtype: torch.dtype) -> None:
    special = [0.0, -0.0, math.nan, math.inf, 1e-30, -1e-30, 1e30, -60000.0, 5e-8]
    x = torch.tensor(special + torch.linspace(-12, 12, 97).tolist(), dtype=dtype)

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate=approximate)

    eager, truth = f(x), f(x.double())
    run, graphs = compiled(f, target_opset=18)
    got = run(x)
    assert got.dtype == dtype
    near = {"rtol": 1e-3 if dtype == torch.float16 else 1e-5, "atol": 1e-6}
    # On some processors eager gives NaN of infinity.
    sane = ~(eager.isnan() & x.isinf())
    torch.testing.assert_close(got[sane], eager[sane], equal_nan=True, **near)
    finite = truth.isfinite() & sane
    torch.testing.assert_close(got[finite].double(), truth[finite], **near)
    if "aten.gelu.default" not in graphs[0].by_torch:
        assert {n.op_type for n in graphs[0].exported.graph.node} & {"Erf", "Tanh"}


@pytest.mark.parametrize("opset", [18, 24])
def test_a_cache_is_written_in_place_in_each_opset(opset: int) -> None:
    """By one operator from 24 on, on a GPU where ONNX Runtime has it."""

    def step(cache: torch.Tensor, at: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(2, at, x)
        return cache.sum(-1)

    run, _ = compiled(step, target_opset=opset)
    caches = [torch.zeros(2, 1, 8, 4) for _ in range(2)]
    for n in (0, 3, 7):
        x = torch.randn(2, 1, 1, 4)
        close(run(caches[0], torch.tensor([n]), x), step(caches[1], torch.tensor([n]), x))
    assert torch.equal(*caches)


def test_an_operator_that_an_opset_lacks_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from roundoff.backend.operators import TABLE

    def later(c: Any, node: Any, x: Any, **_: Any) -> Any:
        return c.op("Gelu", c.tensor(x))  # of opset 20

    monkeypatch.setitem(TABLE, torch.ops.aten.gelu.default, later)
    run, graphs = compiled(lambda x: F.gelu(x) + 1, target_opset=18)
    close(run(X), F.gelu(X) + 1)
    assert "Gelu" in graphs[0].by_torch["aten.gelu.default"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dynamic", [False, True])
def test_tf32_follows_each_of_torchs_switches(dynamic: bool) -> None:
    """Dynamo compiles again where an older switch changes, and not where a newer one does."""
    matmul: Any = torch.backends.cuda.matmul
    x = torch.randn(256, 256, device="cuda")
    exact = x.double() @ x.double()
    run, _ = compiled(lambda x: x @ x, dynamic=dynamic)
    with torch_precision(False):
        for name, value in (
            *(("fp32_precision", value) for value in ("tf32", "ieee", "tf32", "none")),
            *(("allow_tf32", value) for value in (True, False)),
            ("fp32_precision", "tf32"),
        ):
            setattr(matmul, name, value)
            error = (run(x).double() - exact).abs().max().item()
            assert (error > 1e-3) is torch_tf32(), (name, value)
