"""Runs, feeds, custom kernels, functions and subgraphs, and what localisation is built on."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from roundoff.errors import ArgumentError, DtypeError, ModelError, ShapeError, UnsupportedError
from roundoff.evaluator import (
    Kernel,
    LayerNormalizationOrt,
    MatMulOrt,
    Node,
    OrtKernel,
    TorchOnnxEvaluator,
    generic,
)
from roundoff.evaluator.registry import torch_kernels

sys.path.insert(0, str(Path(__file__).parent))
from models import (
    LAYER_NORM_MATMUL,
    LOOP,
    NESTED_FUNCTIONS,
    NESTED_FUNCTIONS_BODIES,
    SCAN,
    arrays,
    one,
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


def test_a_function_alone_runs() -> None:
    model = text(NESTED_FUNCTIONS, NESTED_FUNCTIONS_BODIES)
    inner = onnx.FunctionProto()
    inner.CopyFrom(model.functions[1])
    del inner.attribute[:]
    inner.node[0].attribute[0].ref_attr_name = ""
    inner.node[0].attribute[0].f = 0.5
    evaluator = TorchOnnxEvaluator(inner)
    (got,) = evaluator.run(None, {"x": torch.tensor([-2.0, 3.0])})
    torch.testing.assert_close(got, torch.tensor([1.0, 9.0]))


def test_any_result_by_name(norm: onnx.ModelProto, norm_feeds: dict[str, Any]) -> None:
    evaluator = TorchOnnxEvaluator(norm)
    m, x, z = evaluator.run(["M", "X", "Z"], norm_feeds)
    torch.testing.assert_close(m + torch.from_numpy(norm_feeds["B"]), z)
    np.testing.assert_array_equal(x.numpy(), norm_feeds["X"])
    with pytest.raises(ArgumentError, match="no such result"):
        evaluator.run(["nothing"], norm_feeds)


def test_feeds_are_checked(norm: onnx.ModelProto, norm_feeds: dict[str, Any]) -> None:
    evaluator = TorchOnnxEvaluator(norm)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"Y": norm_feeds["X"]}, ArgumentError, r"unknown \['Y'\]"),
        ({"X": norm_feeds["X"].astype(np.float64)}, DtypeError, "input 'X'.*float64.*float32"),
        ({"X": norm_feeds["X"][0]}, ShapeError, "input 'X'"),
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


def test_fixed_dimensions_are_checked() -> None:
    model = text("agraph (float[2] X) => (float[2] Y) { Y = Neg(X) }")
    with pytest.raises(ShapeError, match=r"got \[3\], expected \[2\]"):
        TorchOnnxEvaluator(model).run(None, {"X": torch.zeros(3)})


def test_an_input_with_a_default_may_be_left_out() -> None:
    model = text("agraph (float[n] X, float[1] S) => (float[n] Y) { Y = Mul(X, S) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([3]), "S"))
    evaluator = TorchOnnxEvaluator(model)
    x = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(evaluator.run(None, {"X": x})[0], 3 * x)
    torch.testing.assert_close(evaluator.run(None, {"X": x, "S": torch.ones(1)})[0], x)


def test_feeds_are_not_written_to_and_may_require_gradients(
    norm: onnx.ModelProto, norm_feeds: dict[str, Any]
) -> None:
    before = {n: x.copy() for n, x in norm_feeds.items()}
    feeds = {n: torch.from_numpy(x).requires_grad_() for n, x in norm_feeds.items()}
    (got,) = TorchOnnxEvaluator(norm).run(None, feeds)
    assert not got.requires_grad
    for name, x in before.items():
        np.testing.assert_array_equal(norm_feeds[name], x)


def test_non_contiguous_and_read_only_feeds() -> None:
    model = text("agraph (float[a, b] X) => (float[b, a] Y) { Y = Transpose(X) }")
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    frozen = x.copy()
    frozen.setflags(write=False)
    for feed in (x.T.copy().T, x[:, ::-1], frozen, x.astype(">f4"), torch.from_numpy(x).t().t()):
        (got,) = TorchOnnxEvaluator(model).run(None, {"X": feed})
        np.testing.assert_array_equal(got.numpy(), np.asarray(feed).T.astype(np.float32))


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
            n.label for n in evaluator.nodes if n.op_type == op_type
        }
        assert kernel.name in used.values()


def test_the_known_names_are_onnx_runtime_s_kernel_of_one_operator(norm: onnx.ModelProto) -> None:
    assert repr(MatMulOrt) == repr(OrtKernel("MatMul"))
    assert repr(LayerNormalizationOrt) == repr(OrtKernel("LayerNormalization"))
    for key, kernel in (
        (("", "Add"), MatMulOrt),
        (("com.microsoft", "MatMul"), MatMulOrt),
        (("", "FusedMatMul"), OrtKernel("FusedMatMul", "com.microsoft")),
    ):
        with pytest.raises(ArgumentError, match="custom kernel of"):
            TorchOnnxEvaluator(norm, custom_kernels={key: kernel})
    TorchOnnxEvaluator(norm, custom_kernels={("ai.onnx", "MatMul"): MatMulOrt})


def test_the_generic_kernel_is_onnx_runtime_to_the_bit(
    norm: onnx.ModelProto, norm_feeds: dict[str, Any]
) -> None:
    import onnxruntime

    node = one("LayerNormalization", 3, axis=-1)
    feeds = dict(zip(("X0", "X1", "X2"), list(norm_feeds.values())[:3], strict=True))
    session = onnxruntime.InferenceSession(
        node.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (expected,) = session.run(None, feeds)
    (got,) = TorchOnnxEvaluator(node, kernels=["ort"]).run(None, feeds)
    np.testing.assert_array_equal(got.numpy(), expected)


def test_the_order_of_kernels(norm: onnx.ModelProto, norm_feeds: dict[str, Any]) -> None:
    for order in (["torch"], ["ort"], ["reference"], "ort"):
        evaluator = TorchOnnxEvaluator(norm, kernels=order)
        evaluator.run(None, norm_feeds)
        assert set(evaluator.kernels_used().values()) == {order if order == "ort" else order[0]}
    evaluator = TorchOnnxEvaluator(norm, kernels={("", "Add"): ["reference"]})
    evaluator.run(None, norm_feeds)
    assert sorted(evaluator.kernels_used().values()) == ["reference", "torch", "torch"]
    with pytest.raises(ArgumentError, match="kernels"):
        TorchOnnxEvaluator(norm, kernels=["tensorflow"])


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


def test_custom_kernels_reach_into_functions_and_subgraphs() -> None:
    model = text(NESTED_FUNCTIONS, NESTED_FUNCTIONS_BODIES)
    x = torch.tensor([-2.0, 4.0])
    leaky = torch.where(x < 0, 0.25 * x, x) ** 2
    for c, plain, swapped in (
        (True, leaky * x + x, 2 * leaky + x),
        (False, leaky - x + x, leaky - x + x),
    ):
        feeds = {"X": x, "C": torch.tensor(c)}
        torch.testing.assert_close(TorchOnnxEvaluator(model).run(None, feeds)[0], plain)
        # Mul in the branch of the function, not the one in the inner function.
        kernels = {("", "Mul"): Doubled}
        evaluator = TorchOnnxEvaluator(model, custom_kernels=kernels)
        inner = 2 * torch.where(x < 0, 0.25 * x, x)
        swapped = (2 * inner if c else inner - x) + x
        torch.testing.assert_close(evaluator.run(None, feeds)[0], swapped)
    labels = [n.label for n in evaluator.walk()]
    assert "outer_0/inner_0/LeakyRelu_0" in labels
    assert "outer_0/If_1/then_branch/Mul_0" in labels
    assert evaluator.kernels_used()["outer_0/If_1/then_branch/Mul_0"] == "doubled"


def test_a_custom_kernel_can_stand_for_a_whole_function() -> None:
    model = text(NESTED_FUNCTIONS, NESTED_FUNCTIONS_BODIES)

    def inner(x: torch.Tensor, alpha: float) -> torch.Tensor:
        return x * alpha

    evaluator = TorchOnnxEvaluator(model, custom_kernels={("local", "inner"): inner})
    x = torch.tensor([-2.0, 4.0])
    (got,) = evaluator.run(None, {"X": x, "C": torch.tensor(False)})
    torch.testing.assert_close(got, 0.25 * x)
    assert evaluator.kernels_used()["outer_0/inner_0"] == "inner"


def test_a_custom_kernel_may_give_its_outputs_as_a_list() -> None:
    model = text("agraph (float[4] X) => (float[2] Y, float[2] Z) { Y, Z = Split(X) }", opset=13)
    halves = {("", "Split"): lambda x: [x[:2], x[2:]]}
    got = TorchOnnxEvaluator(model, custom_kernels=halves).run({"X": torch.arange(4.0)})
    assert [x.tolist() for x in got] == [[0, 1], [2, 3]]


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


def test_operators_of_onnx_runtime() -> None:
    body = "agraph (float[a, b] X, float[b, c] W) => (float[a, c] Y)"
    model = text(body + "{ Y = com.microsoft.FusedMatMul <alpha = 2.0> (X, W) }")
    feeds = arrays(X=(3, 4), W=(4, 5))
    expected = 2 * feeds["X"].astype(np.float64) @ feeds["W"]
    for kernels in (["torch"], ["ort"]):
        (got,) = TorchOnnxEvaluator(model, kernels=kernels).run(None, feeds)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_operators_of_onnx_runtime_where_it_does_not_list_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import onnxruntime

    state = onnxruntime.capi.onnxruntime_pybind11_state
    generic._ort_operators.cache_clear()
    try:
        monkeypatch.delattr(state, "get_all_operator_schema")
        test_operators_of_onnx_runtime()
        model = text("agraph (float[n] X) => (float[n] Y) { Y = com.microsoft.Nonsense(X) }")
        evaluator = TorchOnnxEvaluator(model)
        with pytest.raises(ModelError, match=r"Nonsense_0.*not a registered function"):
            evaluator.run(None, arrays(X=(3,)))
    finally:
        generic._ort_operators.cache_clear()


def test_every_torch_kernel_is_of_a_version_that_onnx_knows() -> None:
    versions: dict[tuple[str, str], set[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        versions.setdefault((schema.domain, schema.name), set()).add(schema.since_version)
    newest = onnx.defs.onnx_opset_version()
    for key, found in torch_kernels().items():
        if key in versions:
            assert {v for v in found if v <= newest} <= versions[key], key


# -- subgraphs ---------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(turns=st.integers(1, 6))
def test_loop_reads_the_enclosing_graph(turns: int) -> None:
    x = torch.tensor([1.5, -2.0])
    total, steps = TorchOnnxEvaluator(text(LOOP)).run(None, {"n": torch.tensor(turns), "X": x})
    torch.testing.assert_close(total, turns * x)
    torch.testing.assert_close(steps, torch.arange(1, turns + 1).unsqueeze(1) * x)


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 6), seed=st.integers(0, 99))
def test_scan_is_a_cumulative_sum(length: int, seed: int) -> None:
    feeds = arrays(seed, start=(2,), xs=(length, 2))
    last, sums = TorchOnnxEvaluator(text(SCAN)).run(None, feeds)
    expected = feeds["start"] + np.cumsum(feeds["xs"].astype(np.float64), 0)
    np.testing.assert_allclose(sums.numpy(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last, sums[-1])


def test_an_input_of_a_body_hides_a_constant_of_its_name() -> None:
    graph = """
    agraph (float[4] X, int64[2] t) => (int64[2] last, float[k, a, b] Y)
    <int64 n = {1}, int64[2] s = {4, 1}>
    {
        last, Y = Loop (n, , t) <body = b (int64 i, bool c, int64[2] s)
            => (bool go, int64[2] s_after, float[a, b] y)
        { go = Identity(c)  s_after = Identity(s)  y = Reshape(X, s) }>
    }
    """
    feeds = {"X": torch.arange(4.0), "t": torch.tensor([2, 2])}
    assert TorchOnnxEvaluator(text(graph)).run(feeds)[1].shape == (1, 2, 2)


def test_an_output_that_is_not_asked_for_is_not_read_as_an_absent_input() -> None:
    graph = """
    agraph (float[3,1,2] X, float[1,8,2] W, float[1,8,2] R, float high)
        => (float[1,1,2] h, float[1,1,2] low, float[1,1,2] lower)
    {
        , h = LSTM <hidden_size = 2> (X, W, R)
        low = Clip(h, , high)
        lower = Clip(low, , high)
    }
    """
    feeds = arrays(X=(3, 1, 2), W=(1, 8, 2), R=(1, 8, 2)) | {"high": np.float32(-0.5)}
    model = text(graph, opset=20)
    for evaluator in (TorchOnnxEvaluator(model), TorchOnnxEvaluator(model, truth=True)):
        h, low, lower = evaluator.run(feeds)
        torch.testing.assert_close(low, torch.clamp(h, max=-0.5))
        assert torch.equal(low, lower)


def test_a_function_uses_the_defaults_of_its_attributes_and_is_named_after_each_call() -> None:
    body = """
    <domain: "local", opset_import: ["" : 20]>
    leak <alpha: float = 0.25> (x) => (y) { z = LeakyRelu <alpha: float = @alpha> (x)  y = Neg(z) }
    """
    graph = """
    agraph (float[2] X) => (float[2] Y) { [f] a = local.leak(X)  [f] Y = local.leak(a) }
    """
    evaluator = TorchOnnxEvaluator(text(graph, body))
    feeds = {"X": torch.tensor([-2.0, 4.0])}
    assert {"f/z", "f.2/z"} <= set(evaluator.intermediates(feeds))
    torch.testing.assert_close(evaluator.run(feeds)[0], torch.tensor([-0.5, 1.0]))
    alone = TorchOnnxEvaluator(text(graph, body).functions[0])
    (got,) = alone.run({"x": torch.tensor([-2.0, 4.0])})
    torch.testing.assert_close(got, torch.tensor([0.5, -4.0]))


def test_the_order_of_kernels_holds_inside_a_body() -> None:
    evaluator = TorchOnnxEvaluator(text(LOOP), kernels=["ort"])
    x = torch.tensor([1.5, -2.0])
    total, _ = evaluator.run(None, {"n": torch.tensor(3), "X": x})
    torch.testing.assert_close(total, 3 * x)
    used = evaluator.kernels_used()
    assert used.pop("Loop_2") == "torch"
    assert set(used.values()) == {"ort"}


def test_a_carried_value_may_not_change_its_type() -> None:
    body = LOOP.replace("next = Add(so_far, X)", "t = Add(so_far, X) next = Cast<to = 11>(t)")
    model = text(body.replace("float[2] next, float[2] shown", "double[2] next, double[2] shown"))
    with pytest.raises((DtypeError, ModelError), match="type"):
        TorchOnnxEvaluator(model).run(None, {"n": torch.tensor(2), "X": torch.ones(2)})


def test_nor_by_a_custom_kernel() -> None:
    wide = {("", "Add"): lambda a, b: (a + b).double()}
    evaluator = TorchOnnxEvaluator(text(LOOP), custom_kernels=wide)
    with pytest.raises(DtypeError, match=r"node 'Loop_2'.*carried value"):
        evaluator.run(None, {"n": torch.tensor(2), "X": torch.ones(2)})


# -- what localisation is built on -------------------------------------------------------------


def test_steps_follow_the_run(norm: onnx.ModelProto, norm_feeds: dict[str, Any]) -> None:
    evaluator = TorchOnnxEvaluator(norm)
    steps = list(evaluator.steps(norm_feeds))
    assert [s.node.op_type for s in steps] == ["LayerNormalization", "MatMul", "Add"]
    assert steps[0].outputs[0] is steps[1].inputs[0]
    torch.testing.assert_close(steps[-1].outputs[0], evaluator.run(None, norm_feeds)[0])
    assert all(s.kernel == "torch" for s in steps)


def test_two_evaluators_advance_together(norm: onnx.ModelProto, norm_feeds: dict[str, Any]) -> None:
    ours = TorchOnnxEvaluator(norm)
    other = TorchOnnxEvaluator(norm, kernels=["ort"])
    for a, b in zip(ours.steps(norm_feeds), other.steps(norm_feeds), strict=True):
        assert a.node.label == b.node.label
        (alone,) = other.run_node(a.node, a.inputs)  # isolated: our inputs, its kernel
        torch.testing.assert_close(alone, a.outputs[0], rtol=1e-4, atol=1e-5)
        assert b.kernel == "ort"


def test_run_node_by_index_name_and_label() -> None:
    evaluator = TorchOnnxEvaluator(text(NESTED_FUNCTIONS, NESTED_FUNCTIONS_BODIES))
    x = torch.tensor([-2.0, 4.0])
    for which in (0, "outer_0/inner_0/LeakyRelu_0", evaluator.nodes[0]):
        (got,) = evaluator.run_node(which, [x])
        torch.testing.assert_close(got, torch.tensor([-0.5, 4.0]))
    node = next(n for n in evaluator.nodes if n.op_type == "If")
    assert len(node.captures) == 2
    by_name = dict(zip(node.captures, [2 * x, x], strict=True))
    (got,) = evaluator.run_node(node, [torch.tensor(False), *by_name.values()])
    torch.testing.assert_close(got, x)
    with pytest.raises(ArgumentError, match="inputs of node"):
        evaluator.run_node(0, [x, x])
    with pytest.raises(ArgumentError, match="no such node"):
        evaluator.run_node("nothing", [x])


def test_intermediates(norm: onnx.ModelProto, norm_feeds: dict[str, Any]) -> None:
    results = TorchOnnxEvaluator(norm).intermediates(norm_feeds)
    assert set(results) == {*norm_feeds, "N", "M", "Z"}


def test_verbose_says_what_runs(
    norm: onnx.ModelProto, norm_feeds: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = {("", "MatMul"): OrtKernel()}
    TorchOnnxEvaluator(norm, custom_kernels=kernels, verbose=2).run(None, norm_feeds)
    out = capsys.readouterr().out
    assert "MatMul_1 MatMul [ort]" in out
    assert "< W float32[8,3]" in out
    assert "> Z float32[5,3]" in out
