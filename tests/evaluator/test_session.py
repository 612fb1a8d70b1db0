"""Runs, feeds, custom kernels, functions and subgraphs, and what localisation is built on."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from roundoff.errors import ArgumentError, DtypeError, ModelError, ShapeError, UnsupportedError
from roundoff.evaluator import (
    Kernel,
    LayerNormalizationOrt,
    MatMulOrt,
    Node,
    NotHandledError,
    OrtKernel,
    ReferenceKernel,
    TorchOnnxEvaluator,
)
from roundoff.evaluator.torch_kernels.common import REGISTERED
from roundoff.precision import torch_precision

from .models import LAYER_NORM_MATMUL, NORM_FEEDS, arrays, expected_norm, text


def test_each_form_of_a_model_is_read_and_bad_feeds_are_refused(tmp_path: Path) -> None:
    model, path = text(LAYER_NORM_MATMUL), tmp_path / "norm.onnx"
    onnx.save(model, path)
    for form in (model, model.SerializeToString(), path, str(path), model.graph):
        evaluator = TorchOnnxEvaluator(form)
        assert evaluator.input_names == list(NORM_FEEDS)
        assert evaluator.output_names == ["Z"]
        (got,) = evaluator.run(None, NORM_FEEDS)
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got, expected_norm(NORM_FEEDS), rtol=1e-5, atol=1e-5)
    x = NORM_FEEDS["X"]
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        (NORM_FEEDS | {"Y": x}, ArgumentError, r"unknown \['Y'\]"),
        (NORM_FEEDS | {"X": x.astype(np.float64)}, DtypeError, "input 'X'.*float64.*float32"),
        (NORM_FEEDS | {"X": x[0]}, ShapeError, "input 'X'"),
        (NORM_FEEDS | {"X": "text"}, DtypeError, "input 'X'"),
        (NORM_FEEDS | {"X": None}, DtypeError, "input 'X'"),
        ({"X": x}, ArgumentError, r"missing \['scale', "),
    ]
    for feeds, kind, message in cases:
        with pytest.raises(kind, match=message):
            evaluator.run(None, feeds)


def test_fixed_dimensions_are_checked_and_feeds_not_written_to() -> None:
    evaluator = TorchOnnxEvaluator(text("agraph (float[2] X) => (float[2] Y) { Y = Neg(X) }"))
    x = torch.ones(2, requires_grad=True)
    (got,) = evaluator.run(["Y"], {"X": x})
    assert not got.requires_grad
    assert x.tolist() == [1, 1]
    with pytest.raises(ShapeError, match=r"got \[3\], expected \[2\]"):
        evaluator.run(None, {"X": torch.zeros(3)})
    frozen = np.arange(2, dtype=">f4")
    frozen.setflags(write=False)
    for feed in (frozen, np.arange(4, dtype=np.float32)[::2]):
        assert evaluator.run({"X": feed})[0].tolist() == [-x for x in feed]


def test_an_input_with_a_default_may_be_left_out() -> None:
    model = text("agraph (float[n] X, int64[2] S) => (float[a, b] Y) { Y = Reshape(X, S) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2, 3]), "S"))
    evaluator = TorchOnnxEvaluator(model)
    x = torch.arange(6.0)
    assert evaluator.run(None, {"X": x})[0].shape == (2, 3)
    assert evaluator.run(None, {"X": x, "S": np.array([3, 2])})[0].shape == (3, 2)


def test_intermediates_are_freed_at_last_use() -> None:
    chain = "agraph (float[n] X) => (float[n] Y) { A = Exp(X) B = Neg(A) C = Abs(B) Y = Sqrt(C) }"
    alive: list[int] = []
    refs: list[Any] = []

    def watching(x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        alive.append(sum(r() is not None for r in refs))
        y = x + 1
        refs.append(weakref.ref(y))
        return y

    custom = {("", op): watching for op in ("Exp", "Neg", "Abs", "Sqrt")}
    TorchOnnxEvaluator(text(chain), custom_kernels=custom).run(None, {"X": torch.zeros(3)})
    assert alive == [0, 1, 1, 1]  # only the input of the node that runs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_results_stay_on_the_device() -> None:
    """Shapes that the graph computes meet data in Mul."""
    model = text("""agraph (float[a, b] X, int64[k] rows) => (float[a, b] Z)
    {
        s = Shape(X)
        first = Constant <value = int64[1] {0}> ()
        n = Gather(s, first)
        picked = Gather(X, rows)
        wide = Expand(picked, s)
        count = Cast <to = 1> (n)
        Z = Mul(wide, count)
    }""")
    evaluator = TorchOnnxEvaluator(model, ["CUDAExecutionProvider", "CPUExecutionProvider"])
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for step in evaluator.steps({"X": x, "rows": np.array([0, -1])}):
        assert all(value.is_cuda for value in (*step.inputs, *step.outputs))
        assert step.kernel == "torch"
    np.testing.assert_array_equal(step.outputs[0].cpu(), 2 * x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_product_by_onnx_runtime_follows_torchs_switch_of_tf32() -> None:
    model = text("g (float[n, n] X) => (float[n, n] Y) { Y = MatMul(X, X) }")
    provider = ["CUDAExecutionProvider"]
    evaluator = TorchOnnxEvaluator(model, provider, {("", "MatMul"): MatMulOrt})
    x = torch.randn(256, 256, device="cuda")
    exact = x.double() @ x.double()
    for tf32 in (False, True, False, True):
        with torch_precision(tf32):
            (got,) = evaluator.run({"X": x})
        assert ((got.double() - exact).abs().max() > 1e-3).item() is tf32


# -- kernels -----------------------------------------------------------------------------------


class Doubled(Kernel):
    """A kernel as a class; bound to each node."""

    name = "doubled"

    def bind(self, node: Node) -> Any:
        return lambda *inputs: 2 * inputs[0]


@pytest.mark.parametrize(
    ("options", "used"),
    [
        *(({"kernels": [name]}, [name] * 3) for name in ("torch", "ort", "reference")),
        ({"kernels": "ort"}, ["ort"] * 3),
        ({"custom_kernels": {("", "MatMul"): MatMulOrt}}, ["torch", "MatMulOrt", "torch"]),
        (
            {"custom_kernels": {("", "LayerNormalization"): LayerNormalizationOrt}},
            ["LayerNormalizationOrt", "torch", "torch"],
        ),
        ({"custom_kernels": {("", "Add"): ReferenceKernel}}, ["torch", "torch", "reference"]),
    ],
)
def test_the_kernels_asked_for_run(options: dict[str, Any], used: list[str]) -> None:
    evaluator = TorchOnnxEvaluator(text(LAYER_NORM_MATMUL), **options)
    (got,) = evaluator.run(None, NORM_FEEDS)
    np.testing.assert_allclose(got, expected_norm(NORM_FEEDS), rtol=1e-5, atol=1e-5)
    assert list(evaluator.kernels_used().values()) == used


def test_a_type_that_torch_lacks_falls_to_the_next_kernel() -> None:
    model = text("agraph (uint16[n] X, uint16[n] Y) => (uint16[n] Z) { Z = Add(X, Y) }")
    evaluator = TorchOnnxEvaluator(model)
    x = np.array([1, 65535], dtype=np.uint16)
    for _ in range(3):
        (got,) = evaluator.run(None, {"X": x, "Y": x})
        assert got.dtype == torch.uint16
        np.testing.assert_array_equal(got.numpy(), x + x)
    assert evaluator.kernels_used() == {"Add_0": "ort"}
    with pytest.raises(ModelError, match=r"node 'Add_0'.*torch: "):
        TorchOnnxEvaluator(model, kernels=["torch"]).run(None, {"X": x, "Y": x})


@pytest.mark.parametrize("way", ["run", "steps", "run_node"])
def test_the_kernel_reported_is_the_one_that_ran_last(way: str) -> None:
    """After a node fell to another kernel once, and back: of a type that no graph declares."""
    model = text("g (float[n] X) => (float[n] Y) { A = Neg(X) Y = Add(A, A) }")
    types = iter([torch.float32, torch.uint16, torch.uint16, torch.float32, torch.float16])
    custom = {("", "Neg"): lambda x: (-x).to(next(types))}
    evaluator = TorchOnnxEvaluator(model, custom_kernels=custom)
    for expected in ("torch", "ort", "ort", "torch", "torch"):
        feeds = {"X": -torch.ones(2)}
        if way == "run":
            (got,) = evaluator.run(None, feeds)
        elif way == "steps":
            *_, step = evaluator.steps(feeds)
            (got,) = step.outputs
            assert step.kernel == expected
        else:
            (value,) = evaluator.run_node(0, [feeds["X"]])
            (got,) = evaluator.run_node(1, [value, value])
        assert got.tolist() == [2, 2]
        assert evaluator.kernels_used()["Add_1"] == expected


class Counting(Kernel):
    """A kernel of three nodes, which counts its runs and fails."""

    def __init__(self, error: Exception) -> None:
        self.error, self.runs = error, 0

    def bind(self, node: Node) -> Any:
        def run(*_: Any) -> Any:
            self.runs += 1
            raise self.error

        return run


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ValueError("odd"), ModelError),
        (ZeroDivisionError("odd"), ModelError),
        (NotHandledError("odd"), UnsupportedError),
        (MemoryError("odd"), MemoryError),
        (torch.OutOfMemoryError("odd"), torch.OutOfMemoryError),
    ],
)
def test_a_kernel_that_fails_runs_once_and_its_node_is_named(error: Any, wanted: Any) -> None:
    kernel = Counting(error)
    evaluator = TorchOnnxEvaluator(text(LAYER_NORM_MATMUL), custom_kernels={("", "Add"): kernel})
    with pytest.raises(wanted, match="odd") as raised:
        evaluator.run(None, NORM_FEEDS)
    assert kernel.runs == 1
    notes = getattr(raised.value, "__notes__", [])
    assert evaluator.nodes[-1].name in " ".join([str(raised.value), *notes])


@pytest.mark.parametrize(
    ("error", "hidden"),
    [
        (RuntimeError, True),
        (TypeError, True),
        (NotHandledError, True),
        (AssertionError, False),
        (AttributeError, False),
        (torch.OutOfMemoryError, False),
    ],
)
def test_a_fault_of_a_kernel_is_not_hidden_by_the_next(
    monkeypatch: pytest.MonkeyPatch, error: Any, hidden: bool
) -> None:
    """What torch raises for inputs that it does not take lets the next kernel run, once each."""
    runs: list[str] = []

    def wrong(*_: Any) -> Any:
        runs.append("torch")
        raise error("odd")

    versions = dict.fromkeys(REGISTERED["Add"], lambda node: wrong)
    monkeypatch.setitem(REGISTERED, "Add", versions)
    evaluator = TorchOnnxEvaluator(text("g (float[n] X) => (float[n] Y) { Y = Add(X, X) }"))
    if hidden:
        assert evaluator.run(None, {"X": torch.ones(2)})[0].tolist() == [2, 2]
        assert evaluator.kernels_used() == {"Add_0": "ort"}
    else:
        with pytest.raises(error, match="odd"):
            evaluator.run(None, {"X": torch.ones(2)})
    assert runs == ["torch"]


@pytest.mark.parametrize("result", [torch.ones(2, 3), (torch.ones(2, 3),), None])
def test_too_few_results_of_a_custom_kernel_are_refused(result: Any) -> None:
    """A tensor is not taken apart by its rows."""
    graph = (
        "g (float[n, m] X) => (float[n, m] Y) { A, B = Split<num_outputs = 2>(X) Y = Add(A, B) }"
    )
    evaluator = TorchOnnxEvaluator(
        text(graph), custom_kernels={("", "Split"): lambda x, num_outputs: result}
    )
    for run in (evaluator.run, lambda feeds: [*evaluator.steps(feeds)]):
        with pytest.raises(ModelError, match=r"node 'Split_0'.*a tuple of 2"):
            run({"X": torch.ones(2, 3)})


#: A local function that calls another, with an attribute handed down, and uses a subgraph.
FUNCTIONS = """
agraph (float[n] X, bool C) => (float[n] Z)
{
    A = local.outer <slope = 0.25> (X, C)
    Z = Add(A, X)
}
<domain: "local", opset_import: ["": 18, "local": 1]>
outer <slope: float> (x, c) => (y)
{
    t = local.inner <alpha: float = @slope> (x)
    y = If (c) <
        then_branch = yes () => (float[n] a) { a = Mul(t, x) },
        else_branch = no () => (float[n] b) { b = Sub(t, x) }
    >
}
"""
INNER = """
<domain: "local", opset_import: ["": 18]>
inner <alpha: float> (x) => (y) { t = LeakyRelu <alpha: float = @alpha> (x) y = Mul(t, t) }
"""


def test_functions_and_branches_are_run_and_custom_kernels_reach_into_functions() -> None:
    evaluator, x = TorchOnnxEvaluator(text(FUNCTIONS + INNER)), torch.tensor([-2.0, 4.0])
    leaky = torch.where(x < 0, 0.25 * x, x)
    for chosen, branch in ((True, leaky**2 * x), (False, leaky**2 - x)):
        (got,) = evaluator.run({"X": x, "C": torch.tensor(chosen)})
        torch.testing.assert_close(got, branch + x)
    torch.testing.assert_close(evaluator.run_node(0, [x])[0], leaky)
    node = next(n for n in evaluator.nodes if n.op_type == "If")
    by_name = dict(zip(node.captures, [2 * x, x], strict=True))
    (got,) = evaluator.run_node(node.index, [torch.tensor(False), *by_name.values()])
    torch.testing.assert_close(got, x)

    graph = "agraph (float[n] X) => (float[n] Z) { A = local.inner<alpha = 0.25>(X) Z = Add(A, X) }"
    for key, kernel, expected in (
        (("", "Mul"), Doubled, 2 * leaky + x),
        (("local", "inner"), lambda x, alpha: x * alpha, 1.25 * x),
    ):
        evaluator = TorchOnnxEvaluator(text(graph + INNER), custom_kernels={key: kernel})
        torch.testing.assert_close(evaluator.run({"X": x})[0], expected)


TWICE = "agraph (float[n] X) => (float[n] Y) { Y = com.microsoft.Twice <by = 3.0> (X) }"
#: Sum of the first n integers with a running list; the body reads X from outside.
LOOP = """
agraph (int64 n, float[2] X) => (float[2] total, float[k, 2] steps)
{
    start = Sub(X, X)
    yes = Constant <value = bool {1}> ()
    total, steps = Loop (n, yes, start) <
        body = turn (int64 i, bool going, float[2] so_far)
            => (bool still, float[2] next, float[2] shown)
        {
            still = Identity(going)
            next = Add(so_far, X)
            shown = Identity(next)
        }
    >
}
"""


def test_a_custom_kernel_makes_an_operator_and_is_refused_where_it_would_not_be_used() -> None:
    custom = {("com.microsoft", "Twice"): lambda x, by: x * by}
    evaluator = TorchOnnxEvaluator(text(TWICE), custom_kernels=custom)
    torch.testing.assert_close(evaluator.run(None, {"X": torch.ones(2)})[0], 3 * torch.ones(2))
    with pytest.raises(UnsupportedError, match=r"'Twice_0'.*com.microsoft\.Twice.*custom_kernels"):
        TorchOnnxEvaluator(text(TWICE))
    for key, kernel in (
        (("", "Add"), MatMulOrt),
        (("com.microsoft", "MatMul"), MatMulOrt),
        (("", "FusedMatMul"), OrtKernel("FusedMatMul", "com.microsoft")),
    ):
        with pytest.raises(ArgumentError, match="custom kernel of"):
            TorchOnnxEvaluator(text(LAYER_NORM_MATMUL), custom_kernels={key: kernel})
    with pytest.raises(UnsupportedError, match="do not reach into the body"):
        TorchOnnxEvaluator(text(LOOP), custom_kernels={("", "Add"): Doubled})


def test_custom_kernels_in_a_domain_that_begins_as_onnx_own() -> None:
    node = "onnx.contrib.Twice"
    model = text(f"g (float[n] X) => (float[n] Y) {{ A = {node}(X) Y = {node}(A) }}")
    model.opset_import.add(domain="ai.onnx.contrib", version=1)
    for n in model.graph.node:
        n.domain = "ai.onnx.contrib"
    custom = {("ai.onnx.contrib", "Twice"): lambda x: 2 * x}
    (got,) = TorchOnnxEvaluator(model, custom_kernels=custom).run({"X": torch.ones(1)})
    assert got == 4


def test_a_custom_kernel_may_give_its_results_as_a_list() -> None:
    model = text("g (float[n] X) => (float[n] Y) { A, B = local.Pair(X) Y = Sub(A, B) }")
    custom = {("local", "Pair"): lambda x: [3 * x, x]}
    evaluator = TorchOnnxEvaluator(model, custom_kernels=custom)
    *_, last = evaluator.steps({"X": torch.ones(1)})
    assert last.outputs[0] == evaluator.run({"X": torch.ones(1)})[0] == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_sign_of_nan_is_nan(dtype: str) -> None:
    model = text(f"g ({dtype}[n] X) => ({dtype}[n] Y) {{ Y = Sign(X) }}")
    x = torch.tensor([float("nan"), -2, 0]).to(getattr(torch, dtype))
    (got,) = TorchOnnxEvaluator(model).run({"X": x})
    torch.testing.assert_close(got, torch.sign(x) + 0 * x, equal_nan=True)


def test_a_loop_runs_whole_by_onnx_runtime_in_the_opset_of_its_body() -> None:
    """Since 18 the axes of ReduceMean are an input; Loop itself is that of 16."""
    turn = "ax = Constant<value = int64[1] {0}>() mean = ReduceMean(X, ax) next = Add(so_far, mean)"
    evaluator = TorchOnnxEvaluator(text(LOOP.replace("next = Add(so_far, X)", turn)))
    total, steps = evaluator.run({"n": torch.tensor(3), "X": torch.tensor([1.5, -2.0])})
    assert total.tolist() == [-0.75, -0.75]
    assert steps[:, 0].tolist() == [-0.25, -0.5, -0.75]
    assert evaluator.kernels_used()["Loop_2"] == "ort"
    with pytest.raises(UnsupportedError, match="node 'Loop_2': no kernel for Loop"):
        TorchOnnxEvaluator(text(LOOP), truth=True)


CONSTANTS = """<int64[2] ends = {0, -1}, int64[2] high = {9, 3}, int64[2] low = {-9, 0},
    int64[2] by = {-2, -1}, int64[2] one = {1, -1}, int64[2] up = {2, 3},
    int64[3] shape = {0, -1, 7}, float[1] single = {3},
    int8[2, 3] Q = {0, 1, 2, -3, 4, 5}, float[2] two = {0.5, 3}, float[3] three = {1, 2, 0.1}>"""


@pytest.mark.parametrize(
    "node",
    [
        "Slice(X, high, low, one, by)",
        "Slice(X, ends, high, one, up)",
        "Gather<axis = 1>(X, ends)",
        "Reshape(X, shape)",
        "Conv<pads = [1, 0, 2, 1], strides = [2, 1]>(X, W)",
        "DequantizeLinear<axis = 0>(Q, two)",
        "DequantizeLinear<axis = -1>(Q, three)",
        "LayerNormalization(X, single, single)",
        "Slice(X, low, low, one, by)",
    ],
)
def test_torch_gives_what_onnx_runtime_gives(node: str) -> None:
    inputs = "float[2, 3, 5, 7] X, float[4, 3, 2, 2] W"
    model = text(f"g ({inputs}) => (float[] Y) {CONSTANTS} {{ Y = {node} }}")
    feeds = arrays(X=(2, 3, 5, 7), W=(4, 3, 2, 2))
    got, wanted = (TorchOnnxEvaluator(model, kernels=k).run(feeds)[0] for k in ("torch", "ort"))
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "body",
    [
        """(int16[2] Y, int16[2] W) <float[2] x = {2, 60000}, int16 z = {30001}, float one = {1},
        int16[2] W = {30003, 32767}>
        { X = Cast<to = 10>(x) s = Cast<to = 10>(one) Y = QuantizeLinear(X, s, z) }""",
        """(uint8[1] Y, uint8[1] W) <float[1] x = {1e-7}, float s = {1e-8}, uint8[1] W = {12}>
        { X = Cast<to = 10>(x) Y = QuantizeLinear(X, s) }""",
        """(float16[1] Y, float16[1] W) <float[1] x = {-1}, int32[1] odd = {2049}>
        { W = Cast<to = 10>(x) Y = Pow(W, odd) }""",
        """(float[1] Y, float[1] W) <float[1] x = {-1}, int64[1] odd = {16777217}>
        { W = Identity(x) Y = Pow(W, odd) }""",
        """(float[1] Y, float[1] W) <float[1] x = {0.01}, float[1] W = {1000000}>
        { X = Cast<to = 10>(x) N, M, Y = LayerNormalization<epsilon = 1e-12>(X, X) }""",
        """(double Y, double W) <double[2] x = {3e100, 4e100}, double W = {5e100}>
        { Y = ReduceL2<keepdims = 0>(x) }""",
        """(double[1] Y, double[1] W) <double[1] x = {-10}, double[1] W = {-7.619853024160525e-23}>
        { Y = Gelu(x) }""",
        "(float Y, float W) <float W = {1}> { Y = Celu(W) }",
        """(int32 Y, int32 W) <int32[2] x = {1, 2}, int32 W = {3}>
        { Y = Einsum<equation = "i->">(x) }""",
        """(int32 Y, int32 W) <int32[0, 3] x = {}, int64[2] axes = {0, -1}, int32 W = {2147483647}>
        { Y = ReduceMin<keepdims = 0>(x, axes) }""",
    ],
)
def test_no_digits_are_lost_inside_and_no_type(body: str) -> None:
    got, wanted = TorchOnnxEvaluator(text(f"g () => {body}", 23)).run({})
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=0)
