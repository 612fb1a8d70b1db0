"""Runs, feeds, custom kernels, functions and subgraphs, and what localisation is built on."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import helper

from roundoff.errors import ArgumentError, DtypeError, ModelError, ShapeError, UnsupportedError
from roundoff.evaluator import (
    Kernel,
    LayerNormalizationOrt,
    MatMulOrt,
    Node,
    OrtKernel,
    ReferenceKernel,
    TorchOnnxEvaluator,
)

sys.path.insert(0, str(Path(__file__).parent))
from models import (
    LAYER_NORM_MATMUL,
    LOOP,
    NESTED_FUNCTIONS,
    NESTED_FUNCTIONS_BODIES,
    SCAN,
    arrays,
    text,
)


@pytest.fixture
def norm() -> onnx.ModelProto:
    return text(LAYER_NORM_MATMUL)


@pytest.fixture
def norm_feeds() -> dict[str, np.ndarray]:
    return arrays(X=(5, 8), scale=(8,), bias=(8,), W=(8, 3), B=(3,))


def expected_norm(feeds: dict[str, np.ndarray]) -> np.ndarray:
    x, scale, bias, w, b = (feeds[n].astype(np.float64) for n in ("X", "scale", "bias", "W", "B"))
    n = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return (n * scale + bias) @ w + b


def test_model_bytes_path_graph_agree(
    norm: onnx.ModelProto, norm_feeds: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "norm.onnx"
    onnx.save(norm, path)
    expected = expected_norm(norm_feeds)
    for model in (norm, norm.SerializeToString(), path, str(path), norm.graph):
        evaluator = TorchOnnxEvaluator(model)
        assert evaluator.input_names == ["X", "scale", "bias", "W", "B"]
        assert evaluator.output_names == ["Z"]
        (got,) = evaluator.run(None, norm_feeds)
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_feeds_are_checked(norm: onnx.ModelProto, norm_feeds: dict[str, Any]) -> None:
    evaluator = TorchOnnxEvaluator(norm)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"Y": norm_feeds["X"]}, ArgumentError, r"unknown \['Y'\]"),
        ({"X": norm_feeds["X"].astype(np.float64)}, DtypeError, "input 'X'.*float64.*float32"),
        ({"X": norm_feeds["X"][0]}, ShapeError, "input 'X'"),
        ({"X": norm_feeds["X"][:, :2], "s": norm_feeds["X"]}, ArgumentError, "unknown"),
        ({"X": "text"}, DtypeError, "input 'X'"),
        ({"X": None}, DtypeError, "input 'X'"),
    ]
    for change, kind, message in cases:
        with pytest.raises(kind, match=message):
            evaluator.run(None, {**norm_feeds, **change})
    missing = dict(norm_feeds)
    del missing["W"]
    with pytest.raises(ArgumentError, match=r"missing \['W'\]"):
        evaluator.run(None, missing)


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


# -- kernels -----------------------------------------------------------------------------------


def test_one_operator_by_onnx_runtime(norm: onnx.ModelProto, norm_feeds: dict[str, Any]) -> None:
    for op_type, kernel in (("LayerNormalization", LayerNormalizationOrt), ("MatMul", MatMulOrt)):
        evaluator = TorchOnnxEvaluator(norm, custom_kernels={("", op_type): kernel})
        (got,) = evaluator.run(None, norm_feeds)
        np.testing.assert_allclose(got.numpy(), expected_norm(norm_feeds), rtol=1e-5, atol=1e-5)
        used = evaluator.kernels_used()
        assert {k for k, v in used.items() if v != "torch"} == {
            n.name for n in evaluator.nodes if n.op_type == op_type
        }
        assert kernel.name in used.values()


def test_the_order_of_kernels(norm: onnx.ModelProto, norm_feeds: dict[str, Any]) -> None:
    for order in (["torch"], ["ort"], ["reference"], "ort"):
        evaluator = TorchOnnxEvaluator(norm, kernels=order)
        evaluator.run(None, norm_feeds)
        assert set(evaluator.kernels_used().values()) == {order if order == "ort" else order[0]}
    evaluator = TorchOnnxEvaluator(norm, custom_kernels={("", "Add"): ReferenceKernel})
    evaluator.run(None, norm_feeds)
    assert sorted(evaluator.kernels_used().values()) == ["reference", "torch", "torch"]
    model = text(
        "agraph (float[a, b] X, float[b, c] W) => (float[a, c] Y)"
        "{ Y = com.microsoft.FusedMatMul <alpha = 2.0> (X, W) }"
    )
    feeds = arrays(X=(3, 4), W=(4, 5))
    (got,) = TorchOnnxEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(got, 2 * feeds["X"] @ feeds["W"], rtol=1e-4, atol=1e-5)


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


class Doubled(Kernel):
    """A kernel as a class; bound to each node."""

    name = "doubled"

    def bind(self, node: Node) -> Any:
        return lambda *inputs: 2 * inputs[0]


def test_a_custom_kernel_reaches_into_functions() -> None:
    model = text(NESTED_FUNCTIONS, NESTED_FUNCTIONS_BODIES)
    x = torch.tensor([-2.0, 4.0])
    leaky = torch.where(x < 0, 0.25 * x, x)
    for chosen, branch in ((True, leaky**2 * x), (False, leaky**2 - x)):
        (got,) = TorchOnnxEvaluator(model).run({"X": x, "C": torch.tensor(chosen)})
        torch.testing.assert_close(got, branch + x)
    model = text(
        "agraph (float[n] X) => (float[n] Z) { A = local.inner<alpha = 0.25>(X) Z = Add(A, X) }",
        NESTED_FUNCTIONS_BODIES[
            NESTED_FUNCTIONS_BODIES.index('<domain: "local", opset_import: ["": 18]>') :
        ],
    )
    evaluator = TorchOnnxEvaluator(model, custom_kernels={("", "Mul"): Doubled})
    torch.testing.assert_close(evaluator.run({"X": x})[0], 2 * leaky + x)
    assert "doubled" in evaluator.kernels_used().values()

    def inner(x: torch.Tensor, alpha: float) -> torch.Tensor:
        return x * alpha

    whole = TorchOnnxEvaluator(model, custom_kernels={("local", "inner"): inner})
    torch.testing.assert_close(whole.run({"X": x})[0], 1.25 * x)
    assert "inner" in whole.kernels_used().values()


def test_a_custom_kernel_that_would_not_be_used_is_refused() -> None:
    for key, kernel in (
        (("", "Add"), MatMulOrt),
        (("com.microsoft", "MatMul"), MatMulOrt),
        (("", "FusedMatMul"), OrtKernel("FusedMatMul", "com.microsoft")),
    ):
        with pytest.raises(ArgumentError, match="custom kernel of"):
            TorchOnnxEvaluator(text(LAYER_NORM_MATMUL), custom_kernels={key: kernel})
    feeds = arrays(0, start=(2,), xs=(5, 2))
    last, sums = TorchOnnxEvaluator(text(SCAN)).run(feeds)
    np.testing.assert_allclose(sums, feeds["start"] + np.cumsum(feeds["xs"], 0), rtol=1e-5)
    torch.testing.assert_close(last, sums[-1])
    for body in (SCAN, LOOP):
        with pytest.raises(UnsupportedError, match="do not reach into the body"):
            TorchOnnxEvaluator(text(body), custom_kernels={("", "Add"): Doubled})


def test_a_new_domain_with_a_custom_kernel() -> None:
    node = helper.make_node("Twice", ["X"], ["Y"], domain="roundoff", by=3.0)
    info = [helper.make_tensor_value_info(n, 1, [None]) for n in "XY"]
    model = helper.make_model(
        helper.make_graph([node], "g", info[:1], info[1:]),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("roundoff", 1)],
    )
    evaluator = TorchOnnxEvaluator(
        model, custom_kernels={("roundoff", "Twice"): lambda x, by: x * by}
    )
    torch.testing.assert_close(evaluator.run(None, {"X": torch.ones(2)})[0], 3 * torch.ones(2))
    with pytest.raises(UnsupportedError, match=r"node 'Twice_0'.*roundoff\.Twice.*custom_kernels"):
        TorchOnnxEvaluator(model)


# -- subgraphs ---------------------------------------------------------------------------------


def test_a_loop_runs_whole_by_onnx_runtime_in_the_opset_of_its_body() -> None:
    """Since 18 the axes of ReduceMean are an input; Loop itself is that of 16."""
    turn = "ax = Constant<value = int64[1] {0}>() mean = ReduceMean(X, ax) next = Add(so_far, mean)"
    x, trips = torch.tensor([1.5, -2.0]), torch.tensor(3)
    for body, step in ((LOOP, x), (LOOP.replace("next = Add(so_far, X)", turn), x.mean())):
        evaluator = TorchOnnxEvaluator(text(body))
        total, steps = evaluator.run({"n": trips, "X": x})
        torch.testing.assert_close(total, 3 * step.expand(2))
        torch.testing.assert_close(steps, torch.arange(1, 4).unsqueeze(1) * step.expand(2))
        assert evaluator.kernels_used()["Loop_2"] == "ort"
    with pytest.raises(UnsupportedError, match="node 'Loop_2': no kernel for Loop"):
        TorchOnnxEvaluator(text(LOOP), truth=True)


def test_a_scale_of_another_shape_is_broadcast() -> None:
    """In LayerNormalization against its definition, in a quantisation along an axis."""
    x = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    for shape in ([1], [2, 1]):
        scale = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape) * 2
        model = text(f"""norm (float[2, 3] X, float{shape} s) => (float[2, 3] Y)
            {{ Y = LayerNormalization(X, s, s) }}""")
        (got,) = TorchOnnxEvaluator(model).run(None, {"X": x, "s": scale})
        np.testing.assert_allclose(got.numpy(), expected * scale + scale, rtol=1e-5, atol=1e-5)
    levels = np.arange(6, dtype=np.int8).reshape(2, 3)
    for axis, scale in (0, [1, 2]), (1, [1, 2, 4]), (-2, [1, 2]):
        model = text(f"""levels (int8[2, 3] X, float[{len(scale)}] s) => (float[2, 3] Y)
            {{ Y = DequantizeLinear<axis = {axis}>(X, s) }}""")
        feeds = {"X": levels, "s": np.array(scale, np.float32)}
        (got,) = TorchOnnxEvaluator(model, kernels=["torch"]).run(None, feeds)
        wide = np.expand_dims(feeds["s"], 1 if axis in (0, -2) else 0)
        np.testing.assert_array_equal(got.numpy(), levels * wide)


# -- what localisation is built on -------------------------------------------------------------


def test_one_node_runs_alone() -> None:
    evaluator = TorchOnnxEvaluator(text(NESTED_FUNCTIONS, NESTED_FUNCTIONS_BODIES))
    x = torch.tensor([-2.0, 4.0])
    (got,) = evaluator.run_node(0, [x])
    torch.testing.assert_close(got, torch.tensor([-0.5, 4.0]))
    node = next(n for n in evaluator.nodes if n.op_type == "If")
    by_name = dict(zip(node.captures, [2 * x, x], strict=True))
    (got,) = evaluator.run_node(node.index, [torch.tensor(False), *by_name.values()])
    torch.testing.assert_close(got, x)
