"""What ONNX cannot say stays with torch, between partitions that ONNX Runtime runs."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from through_backend import compiled

import roundoff.backend as rb
from roundoff.backend import entry
from roundoff.backend.program import CudaGraphProgram
from roundoff.backend.variant import CompileSettings
from roundoff.errors import ArgumentError, UnsupportedError

_LIBRARY = torch.library.Library("roundoff_tests", "FRAGMENT")
_LIBRARY.define("double_odd(Tensor x, SymInt n) -> (Tensor, Tensor)")
_LIBRARY.impl(
    "double_odd", lambda x, n: ((x * 2 + n).T.contiguous().T, x[::2].clone()),  # turned in memory
    "CompositeExplicitAutograd",
)  # fmt: skip
_LIBRARY.define("type_of(Tensor x) -> Tensor")
_LIBRARY.impl("type_of", lambda x: x + int(x.dtype == torch.bfloat16), "CompositeExplicitAutograd")


def with_custom(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x) @ x.mT
    doubled, odd = torch.ops.roundoff_tests.double_odd(y, x.shape[0])
    return torch.sigmoid(doubled)[::2] + odd


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_custom_operator_runs_between_partitions(dynamic: bool) -> None:
    run, graphs = compiled(with_custom, dynamic=dynamic)
    for rows in (4, 6) if dynamic else (4,):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(run(x), with_custom(x))
    (graph,) = graphs
    assert list(graph.by_torch) == ["roundoff_tests.double_odd.default"]
    assert len(graph.sessions) == 2, "one border on each side"


@torch.no_grad()
def test_what_stays_with_torch_keeps_its_type() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.roundoff_tests.type_of(x * 2) + x

    run, graphs = compiled(f)
    x = torch.randn(4, 5, dtype=torch.bfloat16)
    torch.testing.assert_close(run(x), f(x))
    assert graphs[0].borders == 2


@torch.no_grad()
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_the_data_decide() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(x)
        return torch.nonzero(y) + 1, y.sum(0)

    run, graphs = compiled(f)
    for _ in range(3):
        x = torch.randn(5, 4)
        torch.testing.assert_close(run(x), f(x))
    assert len(graphs) == 1


@pytest.mark.parametrize("by_dynamo", [True, False])
def test_an_argument_that_is_none_of_the_known_is_named(by_dynamo: bool) -> None:
    """The error reaches the caller of the compiled function as it is."""
    backend = functools.partial(rb.onnx_custom_backend, target_opset=17)
    run: Any = torch.compile(torch.nn.functional.relu, backend=backend)
    if not by_dynamo:
        run = functools.partial(backend, torch.fx.symbolic_trace(lambda x: x + 1))
    x = torch.ones(3)
    with (
        torch.no_grad(),
        pytest.raises(ArgumentError, match=r"^target_opset: got 17, expected ") as caught,
    ):
        run(x if by_dynamo else [x])
    assert type(caught.value) is ArgumentError


@torch.no_grad()
@pytest.mark.parametrize("asked", [{"options": {"replace_weights": True}}, {"mode": "nonsense"}])
def test_what_torch_compile_hands_over_wrongly_is_named(asked: dict[str, Any]) -> None:
    (name,) = asked
    run = torch.compile(torch.nn.functional.relu, backend=rb.onnx_custom_backend, **asked)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=rf"^{name}: got "):
            run(torch.ones(3))


@torch.no_grad()
@pytest.mark.parametrize(
    ("asked", "graph", "copied"),
    [({}, False, False), ({"mode": "default"}, False, False), ({"cuda_graph": True}, True, False),
     ({"mode": "reduce-overhead"}, True, True),
     ({"mode": "reduce-overhead", "cuda_graph": True}, True, False)],
    ids=str,
)  # fmt: skip
def test_a_mode_records_graphs_and_copies(
    asked: dict[str, Any], graph: bool, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[CompileSettings] = []

    def kept(*args: Any) -> Callable[..., Any]:
        seen.append(args[4])
        return rb.Compiled(*args)

    monkeypatch.setattr(entry, "Compiled", kept)
    run, _ = compiled(torch.nn.functional.relu, **asked)
    run(torch.ones(3))
    (settings,) = seen
    assert (settings.cuda_graph, settings.copy_outputs) == (graph, copied)


class Recorded:
    """A program whose CUDA graph is a call that writes over its outputs."""

    def __init__(self, output: str = "output_0") -> None:
        self.recorded, self.outputs = 0, [output]
        self.inputs, self.in_place = ["x", "cache"], dict[str, str]()
        self.bound: torch.Tensor | None = None

    def unrecordable(self, numbers: Any) -> str:
        return ""

    def run(self, inputs: Sequence[torch.Tensor], _: Any, settled: bool) -> list[torch.Tensor]:
        """As it is: a settled run reads the weight that was bound."""
        if not settled:
            self.bound = inputs[1]
        assert self.bound is not None
        return [inputs[0] * self.bound]

    def capture(self, inputs: Sequence[torch.Tensor], _: Any) -> tuple[Any, Any, Any]:
        self.recorded += 1
        self.bound = inputs[1]
        outputs = [torch.empty_like(inputs[0])]
        replay = functools.partial(torch.mul, *inputs, out=outputs[0])
        return types.SimpleNamespace(replay=replay), outputs, []


@pytest.mark.parametrize("copy", [False, True])
def test_graphs_are_kept_for_some_sizes_and_addresses(copy: bool) -> None:
    program = Recorded()
    graphs = CudaGraphProgram(program, [True, False], copy)  # type: ignore[arg-type]
    weight = torch.full((), 3.0)
    (plain,) = graphs.run([torch.ones(2), weight], {"n": 2})
    assert program.recorded == 0, "sizes that come once"
    (first,) = graphs.run([torch.ones(2), weight], {"n": 2})
    assert plain.tolist() == first.tolist() == [3, 3]
    (second,) = graphs.run([torch.full((2,), 2.0), weight], {"n": 2})
    assert plain.tolist() == [3, 3]
    assert second.tolist() == [6, 6]
    assert first.tolist() == ([3, 3] if copy else [6, 6])
    assert program.recorded == 1
    other = weight.clone()
    for recorded in (1, 2, 2):
        graphs.run([torch.ones(2), other], {"n": 2})
        assert program.recorded == recorded, "a weight elsewhere, for longer than a run"
    for n in range(3, 3 + CudaGraphProgram.most):
        graphs.run([torch.ones(n), weight], {"n": n})
        graphs.run([torch.ones(n), weight], {"n": n})
    before = program.recorded
    graphs.run([torch.ones(n), weight], {"n": n})
    assert program.recorded == before
    for _ in range(2):
        graphs.run([torch.ones(2), other], {"n": 2})
    assert program.recorded == before + 1, "the oldest was given up"


def test_the_graph_that_is_used_outlasts_those_of_caches_that_went() -> None:
    program = Recorded()
    graphs = CudaGraphProgram(program, [True, False])  # type: ignore[arg-type]
    x, kept = torch.ones(2), torch.full((), 3.0)
    others = [torch.full((), float(n)) for n in range(2 * CudaGraphProgram.most)]
    for other in others:
        for weight in (kept, other, other):
            (made,) = graphs.run([x, weight], {"n": 2})
            assert made.tolist() == [weight.item()] * 2
    assert program.recorded == len(others) + 1


@pytest.mark.parametrize("moving", [True, False])
def test_a_graph_keeps_no_input_alive_but_its_own_copies(moving: bool) -> None:
    """A cache that stays alive would have the next text's lie elsewhere, and recorded again."""
    program = Recorded()
    program.capture = lambda inputs, _: (  # type: ignore[method-assign]
        types.SimpleNamespace(replay=lambda: None), [torch.ones(2)], []
    )  # fmt: skip
    graphs = CudaGraphProgram(program, [moving, False])  # type: ignore[arg-type]
    cache, x = torch.full((), 3.0), torch.ones(2)
    for _ in range(3):
        graphs.run([x, cache], {"n": 2})
    gone = [weakref.ref(cache), weakref.ref(x)]
    program.bound = None
    del cache, x
    assert [ref() for ref in gone] == [None, None]


def test_a_cache_that_is_written_where_it_lies_is_not_kept_alive() -> None:
    """It is a result, too."""
    program = Recorded("written_0")
    program.in_place["written_0"] = "cache"
    program.capture = lambda inputs, _: (  # type: ignore[method-assign]
        types.SimpleNamespace(replay=lambda: None), [inputs[1]], []
    )  # fmt: skip
    graphs = CudaGraphProgram(program, [True, False], True)  # type: ignore[arg-type]
    cache, x = torch.full((), 3.0), torch.ones(2)
    for _ in range(3):
        (made,) = graphs.run([x, cache], {"n": 2})
    assert made is cache
    gone = weakref.ref(cache)
    program.bound = None
    del cache, made
    assert gone() is None


def test_a_cache_that_is_copied_for_the_graph_has_its_result_in_the_copy() -> None:
    program = Recorded("written_0")
    program.in_place["written_0"] = "cache"
    program.capture = lambda inputs, _: (  # type: ignore[method-assign]
        types.SimpleNamespace(replay=lambda: inputs[1].add_(1)), [inputs[1]], []
    )  # fmt: skip
    graphs = CudaGraphProgram(program, [True, True], True)  # type: ignore[arg-type]
    cache, x = torch.full((), 3.0), torch.ones(2)
    for _ in range(3):
        (made,) = graphs.run([x, cache], {"n": 2})
    assert (made.item(), cache.item()) == (4, 3)


def test_a_settled_run_replays_no_graph_over_other_memory() -> None:
    """Nor does a run that is not recorded read what the last replay's weights were before."""
    program = Recorded()
    graphs = CudaGraphProgram(program, [True, False])  # type: ignore[arg-type]
    x, weights = torch.ones(2), [torch.full((), 3.0), torch.full((), 5.0)]
    calls = [(0, 1, False), (0, 1, True), (0, 2, True), (0, 2, True), (1, 2, False), (1, 1, True),
             (0, 1, False), (0, 3, True), (1, 2, False), (1, 4, True), (1, 4, True)]  # fmt: skip
    for which, n, settled in calls:
        (made,) = graphs.run([x, weights[which]], {"n": n}, settled)
        assert made.tolist() == [weights[which].item()] * 2
    assert program.recorded == 4, "of 1, 2 and 4, the first of which over both weights"


def test_a_cache_that_a_graph_writes_is_not_copied() -> None:
    graphs = CudaGraphProgram(Recorded("written_0"), [False, False], True)  # type: ignore[arg-type]
    inputs = [torch.ones(2), torch.ones(())]
    graphs.run(inputs)
    assert graphs.run(inputs)[0] is graphs.run(inputs)[0]


@torch.no_grad()
@pytest.mark.parametrize("fallback", [True, False])
def test_what_onnx_runtime_refuses_stays_with_torch(
    fallback: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no convolution in float64 on a CPU, which its error says of the one node."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(x)
        one = torch.nn.functional.conv1d(y, y[:1, :, :3].clone())
        return torch.tanh(one), torch.nn.functional.conv1d(y.float(), y[:1, :, :3].float())

    run, graphs = compiled(f, fallback=fallback, verbose=1)
    x = torch.randn(2, 3, 9, dtype=torch.float64)
    if not fallback:
        with pytest.raises(UnsupportedError, match="implementation for Conv"):
            run(x)
        return
    torch.testing.assert_close(run(x), f(x), rtol=1e-6, atol=1e-6)
    (graph,) = graphs
    assert list(graph.by_torch) == ["aten.convolution.default"]
    assert "implementation for Conv" in graph.by_torch["aten.convolution.default"]
    kept = [n.op_type for n in graph.model.graph.node]
    assert kept.count("Conv") == 1, "the other one has a kernel"
    assert sum(k.startswith("torch.") for k in kept) == 1
    assert graph.borders == 2
    assert "aten.convolution.default stays with torch: " in capsys.readouterr().out


@torch.no_grad()
@pytest.mark.parametrize(
    ("f", "said"),
    [
        (with_custom, "double_odd"),
        (lambda x: torch.fft.rfft(x).abs(), "complex numbers have no kernels in ONNX Runtime"),
        (lambda x: torch.linalg.eigvalsh(x[:, :4]), "_linalg_eigh|linalg"),
    ],
)
def test_without_fallback_it_is_refused_by_name(f: Callable[..., Any], said: str) -> None:
    run, _ = compiled(f, fallback=False)
    with pytest.raises(UnsupportedError, match=said):
        run(torch.randn(4, 5))


class Rotary(torch.nn.Module):
    """A rotation of pairs by complex numbers, which are a buffer, as in Meta's Llama."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(16.0), torch.tensor([1.0, 0.1, 0.01]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(torch.relu(x).reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[: x.shape[0]]).flatten(-2) + 1


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_complex_numbers_stay_with_torch(dynamic: bool) -> None:
    model = Rotary()
    run, graphs = compiled(model, dynamic=dynamic)
    for rows in (5, 9) if dynamic else (5,):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(run(x), model(x))
    (graph,) = graphs
    assert {"aten.view_as_complex.default", "aten.mul.Tensor"} <= set(graph.by_torch)
    assert all("complex" in reason for reason in graph.by_torch.values())
    assert len(graph.sessions) == 2


@torch.no_grad()
@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.tensor([2, 1j, 0, 1])),
        lambda x: (torch.polar(torch.ones(6), x) * torch.view_as_complex(x.reshape(3, 2))[0]).real,
        lambda x: torch.view_as_complex(x.reshape(3, 2)).conj() + 1j,
    ],
    ids=["a constant", "a tensor of ones", "conjugate, returned"],
)
def test_what_is_complex_has_torchs_values(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    run, _ = compiled(f)
    x = torch.randn(6)
    torch.testing.assert_close(run(x), f(x))


@pytest.mark.slow(reason="torch's exporter is imported and asked, which takes 5 s")
@torch.no_grad()
def test_an_operator_without_a_form_runs() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvalsh(x + x.mT).abs() + 1

    run, graphs = compiled(f)
    x = torch.randn(4, 4)
    torch.testing.assert_close(run(x), f(x))
    assert any("linalg" in name for name in graphs[0].by_torch)


@pytest.mark.slow(reason="torch's exporter is imported and asked, which takes 5 s")
@torch.no_grad()
def test_an_operator_of_the_exporter_is_whole() -> None:
    """Outside of the table, but torch's exporter has a form: nothing stays with torch."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pixel_shuffle(x, 2).roll(1, -1).cumprod(-1)

    run, graphs = compiled(f)
    x = torch.rand(2, 8, 3, 3)
    torch.testing.assert_close(run(x), f(x))
    assert "aten.roll.default" not in graphs[0].by_torch


@torch.no_grad()
def test_floats_that_dynamo_passes_as_tensors() -> None:
    """With dynamic sizes Python's floats are inputs: constants until one of them changes."""

    def f(x: torch.Tensor, scale: float, shift: float) -> torch.Tensor:
        return torch.relu(x) * scale + shift

    run, graphs = compiled(f, dynamic=True)
    for rows, scale in ((3, 0.5), (4, 0.5), (5, 0.25), (6, 0.125), (7, 0.1)):
        x = torch.randn(rows, 2)
        torch.testing.assert_close(run(x, scale, 1.5), f(x, scale, 1.5))
    assert len(graphs) <= 3


@torch.no_grad()
def test_any_sizes_take_one_conversion() -> None:
    """Products, attention, masks, joins and reshapes at random sizes from 2 on."""

    def f(x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        batch, length, _ = x.shape
        q = x.view(batch, length, 4, 8).transpose(1, 2)
        k = torch.cat([past, q[:, :2]], 2)
        mask = torch.arange(k.shape[2])[None, :] <= torch.arange(length)[:, None] + past.shape[2]
        y = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True)
        flat = y.transpose(1, 2).reshape(batch, length, -1)
        return flat + x.mean(1, keepdim=True), k, batch * length + 1

    run, graphs = compiled(f, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        batch, length, keys = torch.randint(2, 6, (3,), generator=generator).tolist()
        # Dynamo takes sizes that are equal at its first call for one: these never are.
        batch, length, keys = batch * 2 + 1, length * 10, keys * 17
        x = torch.randn(batch, length, 32, generator=generator)
        past = torch.randn(batch, 2, keys, 8, generator=generator)
        torch.testing.assert_close(run(x, past), f(x, past), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


def a_matrix(kind: str) -> torch.Tensor:
    """Positive definite, several of them, or singular."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 5, 5, generator=generator)
    x = x @ x.mT + torch.eye(5)
    return {"one": x[0], "three": x, "singular": torch.zeros(5, 5), "none": x[:0]}[kind]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["one", "three", "none", "singular"])
@pytest.mark.parametrize(
    "f",
    [
        torch.linalg.inv, lambda x: x.inverse() + 1, lambda x: torch.inverse(input=x),
        torch.linalg.cholesky, lambda x: torch.linalg.cholesky(x + 0, upper=True),
        lambda x: torch.linalg.solve(x, x[..., :2]),
        lambda x: torch.linalg.solve(x, x.mT[..., :2, :] + 1, left=False),
    ],
)  # fmt: skip
def test_what_lapack_says_of_a_matrix_is_raised(f: Any, kind: str) -> None:
    """torch's check is an operator with an effect, whose token is no tensor."""
    run, _ = compiled(f)
    x = a_matrix(kind)
    if kind != "singular":
        torch.testing.assert_close(run(x), f(x))
        return
    said = []
    for call in (f, run, run):
        with pytest.raises(torch.linalg.LinAlgError) as caught:
            call(x)
        said.append(str(caught.value))
    assert said == [said[0]] * 3


@torch.no_grad()
def test_integers_are_rounded_to_float16_before_they_are_compared() -> None:
    """On a processor ONNX Runtime joins the Cast with that to float32, in which it compares."""
    numbers = [2049, 4095, -2051, 7, 16385, 32767]
    for dtype in (torch.int64, torch.int32, torch.int16):
        torch._dynamo.reset()
        run, graphs = compiled(lambda a, b: (a < b, torch.maximum(a, b), b.half() - a))
        x = torch.tensor(numbers, dtype=dtype)
        got, wanted = run(x.half(), x), (x.half() < x, torch.maximum(x.half(), x), x.half() * 0)
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(one, other)
        assert "rounding of integers" in graphs[0].by_torch["torch.half"]
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match="rounding of integers"):
        compiled(lambda a, b: a < b, fallback=False)[0](x.half(), x)
