"""What is refused: with a typed error that names the node and says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from roundoff.errors import (
    ArgumentError,
    DtypeError,
    ModelError,
    RoundoffError,
    ShapeError,
    UnsupportedError,
)
from roundoff.evaluator import TorchOnnxEvaluator

sys.path.insert(0, str(Path(__file__).parent))
from models import one, text


def graph(nodes: list[Any], **more: Any) -> onnx.ModelProto:
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None]) for n in "XY"]
    return helper.make_model(
        helper.make_graph(nodes, "g", info[:1], info[1:], **more),
        opset_imports=[helper.make_opsetid("", 20)],
    )


def test_a_cycle_is_told_from_a_wrong_order() -> None:
    cyclic = [
        helper.make_node("Add", ["X", "b"], ["a"], name="first"),
        helper.make_node("Neg", ["a"], ["b"]),
        helper.make_node("Exp", ["b"], ["Y"]),
    ]
    with pytest.raises(ModelError, match=r"cycle: node 'first' \(Add\)"):
        TorchOnnxEvaluator(graph(cyclic))
    unsorted = [helper.make_node("Exp", ["b"], ["Y"]), helper.make_node("Neg", ["X"], ["b"])]
    with pytest.raises(ModelError, match=r"'Exp_0' \(Exp\) reads 'b' before it is made.*Topolog"):
        TorchOnnxEvaluator(graph(unsorted))


def test_a_function_that_calls_itself() -> None:
    model = text(
        "agraph (float[n] X) => (float[n] Y) { Y = local.f(X) }",
        '<domain: "local", opset_import: ["": 18, "local": 1]> f (x) => (y) { y = local.f(x) }',
    )
    with pytest.raises(ModelError, match=r"calls itself|recurs"):
        TorchOnnxEvaluator(model)


def test_what_nothing_makes() -> None:
    with pytest.raises(ModelError, match="nowhere"):
        TorchOnnxEvaluator(graph([helper.make_node("Add", ["X", "nowhere"], ["Y"])]))


def test_an_unknown_operator() -> None:
    with pytest.raises(RoundoffError, match="Nonsense"):
        TorchOnnxEvaluator(graph([helper.make_node("Nonsense", ["X"], ["Y"])]))
    model = text("agraph (float[n] X) => (float[n] Y) { Y = com.microsoft.Nonsense(X) }")
    with pytest.raises(UnsupportedError, match=r"Nonsense_0.*custom_kernels"):
        TorchOnnxEvaluator(model)


def test_types_that_do_not_fit_are_seen_before_the_run() -> None:
    body = "agraph (float[n] X, int64[n] Y) => (float[n] Z) { Z = Add(X, Y) }"
    with pytest.raises(DtypeError, match=r"node 'Add_0' \(Add\).*int64"):
        TorchOnnxEvaluator(text(body))
    with pytest.raises(DtypeError, match="bool"):
        TorchOnnxEvaluator(text("agraph (bool[n] X) => (bool[n] Z) { Z = Add(X, X) }"))


def test_types_that_are_not_known_before_are_seen_in_the_run() -> None:
    """After a custom kernel nothing is known: the same check, as the node runs."""
    model = text("agraph (float[n] X) => (float[n] Z) { A = Neg(X) Z = Add(A, X) }")
    wide = {("", "Neg"): lambda x: -x.double()}
    evaluator = TorchOnnxEvaluator(model, custom_kernels=wide)
    for _ in range(2):
        with pytest.raises(DtypeError, match="node 'Add_1'"):
            evaluator.run(None, {"X": torch.ones(2)})


def test_an_output_of_another_type_than_declared() -> None:
    with pytest.raises(ModelError, match=r"output 'Z'.*float64.*float32"):
        TorchOnnxEvaluator(text("agraph (float[n] X) => (float[n] Z) { Z = Cast<to = 11>(X) }"))


def test_shapes_that_do_not_fit_name_the_node() -> None:
    body = "agraph (float[a, b] X, float[c, d] Y) => (float[a, d] Z) { Z = MatMul(X, Y) }"
    with pytest.raises(ModelError, match=r"node 'MatMul_0' \(MatMul\).*float32\[2,3\]"):
        TorchOnnxEvaluator(text(body)).run(None, {"X": torch.ones(2, 3), "Y": torch.ones(2, 3)})
    with pytest.raises(ShapeError, match="MatMul_0"):
        TorchOnnxEvaluator(text(body.replace("[a, b]", "[2, 3]").replace("[c, d]", "[2, 3]")))


@pytest.mark.parametrize(
    ("model", "feeds", "message"),
    [
        (one("Concat", 2, axis=0), [np.zeros((2, 3)), np.zeros(0)], "rank"),
        (one("Flatten", axis=3), [np.zeros((2, 3))], "axis"),
        (one("Transpose", perm=[0, 0]), [np.zeros((2, 3))], "Transpose|perm"),
        (one("Softmax", axis=2), [np.zeros((2, 3))], "axis|Dimension"),
        (one("Split", 1, 2, num_outputs=3), [np.zeros(4)], "Split"),
        (one("Expand", 2), [np.zeros(3), np.zeros(3)], "Expand|type"),
    ],
)
def test_what_torch_would_let_pass(model: Any, feeds: Any, message: str) -> None:
    named = {f"X{k}": x.astype(np.float32) for k, x in enumerate(feeds)}
    with pytest.raises(RoundoffError, match=message):
        TorchOnnxEvaluator(model).run(None, named)


def test_squeeze_of_a_dimension_that_is_not_one() -> None:
    model = text("agraph (float[a, b] X, int64[1] axes) => (float[c] Y) { Y = Squeeze(X, axes) }")
    with pytest.raises(ShapeError, match="node 'Squeeze_0'"):
        TorchOnnxEvaluator(model).run(None, {"X": torch.ones(2, 3), "axes": torch.tensor([0])})


@pytest.mark.parametrize("op_type", ["Div", "Mod"])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "uint16"])
def test_integer_division_by_zero(op_type: str, dtype: str) -> None:
    body = f"agraph ({dtype}[n] X, {dtype}[n] Y) => ({dtype}[n] Z) {{ Z = {op_type}(X, Y) }}"
    x, zero = np.array([1, 2], dtype=dtype), np.array([1, 0], dtype=dtype)
    for kernels in (None, ["ort"]):
        with pytest.raises(ModelError, match=f"node '{op_type}_0'.*division by zero"):
            TorchOnnxEvaluator(text(body), kernels=kernels).run(None, {"X": x, "Y": zero})


def test_the_one_quotient_that_overflows() -> None:
    model = text("agraph (int64[n] X, int64[n] Y) => (int64[n] Z) { Z = Div(X, Y) }")
    feeds = {"X": np.array([-(2**63)]), "Y": np.array([-1])}
    with pytest.raises(ModelError, match="overflow"):
        TorchOnnxEvaluator(model).run(None, feeds)


def test_a_loop_without_an_end() -> None:
    body = """
    agraph (float X) => (float Y)
    {
        yes = Constant <value = bool {1}> ()
        Y = Loop (COUNT, yes, X) <
            body = turn (int64 i, bool going, float before) => (bool still, float after)
            { still = Identity(going) after = Neg(before) }
        >
    }
    """
    with pytest.raises(
        UnsupportedError, match=r"node 'Loop_1' \(Loop\): no trip count, and no end"
    ):
        TorchOnnxEvaluator(text(body.replace("COUNT", ""))).run(None, {"X": torch.tensor(1.0)})
    body = body.replace("yes =", "many = Constant <value = int64 {1000000000000}> () yes =")
    with pytest.raises(UnsupportedError, match=r"node 'Loop_2' \(Loop\): trip count"):
        TorchOnnxEvaluator(text(body.replace("COUNT", "many"))).run(None, {"X": torch.tensor(1.0)})


def test_more_than_the_memory() -> None:
    model = text("agraph (int64[n] S) => (float Y) { A = ConstantOfShape(S) Y = ReduceMax(A) }")
    with pytest.raises(UnsupportedError, match=r"node 'ConstantOfShape_0'.*memory"):
        TorchOnnxEvaluator(model).run(None, {"S": np.array([2**20, 2**20])})


def test_a_missing_and_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.onnx"):
        TorchOnnxEvaluator(tmp_path / "absent.onnx")
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"\x08\x09nonsense")
    with pytest.raises(ModelError, match=r"not an ONNX model|refuses"):
        TorchOnnxEvaluator(broken)
    with pytest.raises(ModelError, match="not a model"):
        TorchOnnxEvaluator(3)


def external(location: str, offset: int = 0, length: int = 8) -> onnx.ModelProto:
    model = text("agraph (float[2] X) => (float[2] Y) { Y = Add(X, W) }".replace("W", "X"))
    model.graph.node[0].input[1] = "W"
    tensor = TensorProto(name="W", dims=[2], data_type=1, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    model.graph.initializer.append(tensor)
    return model


def test_external_data_stays_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    data = np.float32([3, 4]).tobytes()
    (folder / "inside.bin").write_bytes(data)
    (tmp_path / "outside.bin").write_bytes(data)
    (folder / "link.bin").symlink_to(tmp_path / "outside.bin")

    def run(model: onnx.ModelProto) -> Any:
        (folder / "m.onnx").write_bytes(model.SerializeToString())
        return TorchOnnxEvaluator(folder / "m.onnx").run(None, {"X": torch.ones(2)})[0]

    torch.testing.assert_close(run(external("inside.bin")), torch.tensor([4.0, 5.0]))
    for location in ("../outside.bin", str(tmp_path / "outside.bin"), "link.bin", ""):
        with pytest.raises(ModelError, match="'W' points outside the model's folder"):
            run(external(location))
    with pytest.raises(ModelError, match="missing"):
        run(external("absent.bin"))
    for offset, length in ((0, 16), (4, 8), (-4, 8)):
        with pytest.raises(ModelError, match="cut short"):
            run(external("inside.bin", offset, length))
    with pytest.raises(ModelError, match="path of the model"):
        TorchOnnxEvaluator(external("inside.bin"))


def test_a_provider_that_is_not_there() -> None:
    model = text("agraph (float[n] X) => (float[n] Y) { Y = Neg(X) }")
    with pytest.raises(UnsupportedError, match="provider"):
        TorchOnnxEvaluator(model, providers=["NonsenseExecutionProvider"])
    with pytest.raises(ArgumentError, match="providers"):
        TorchOnnxEvaluator(model, providers="CPUExecutionProvider")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="CUDA"):
            TorchOnnxEvaluator(model, providers=["CUDAExecutionProvider"])


def node_model(op_type: str, inputs: list[str], rank: int, opset: int, **attributes: Any) -> Any:
    made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2] * rank) for n in inputs if n]
    return helper.make_model(
        helper.make_graph(
            [helper.make_node(op_type, inputs, ["Y"], **attributes)], "g", made,
            [helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)],
        ),
        opset_imports=[helper.make_opsetid("", opset)], ir_version=9,
    )  # fmt: skip


NGRAMS = {
    "max_gram_length": 2, "min_gram_length": 1, "max_skip_count": 0, "mode": "TF",
    "ngram_counts": [0, 4], "ngram_indexes": [0, 1, 2, 3, 4, 5, 6],
    "pool_int64s": [2, 3, 5, 4, 5, 6, 7, 8, 6, 7],
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"ngram_indexes": [0, 1, 2]}, {"ngram_counts": [0, 40]}, {"ngram_counts": [4, 0]},
     {"ngram_counts": [0]}, {"ngram_indexes": [0, 1, 2, 3, 4, 5, 2**31 - 1]},
     {"max_skip_count": 2**31 - 1}],
)  # fmt: skip
def test_n_grams_that_do_not_fit_their_pool(change: dict[str, Any]) -> None:
    def model(**attributes: Any) -> Any:
        return helper.make_model(
            helper.make_graph(
                [helper.make_node("TfIdfVectorizer", ["X"], ["Y"], **attributes)], "g",
                [helper.make_tensor_value_info("X", TensorProto.INT32, [6])],
                [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [7])],
            ),
            opset_imports=[helper.make_opsetid("", 9)], ir_version=8,
        )  # fmt: skip

    feeds = {"X": np.int32([2, 3, 5, 4, 5, 6])}
    assert TorchOnnxEvaluator(model(**NGRAMS)).run(None, feeds)[0].shape == (7,)
    with pytest.raises(RoundoffError, match="TfIdfVectorizer"):
        TorchOnnxEvaluator(model(**{**NGRAMS, **change}))


# ONNX's inference, or ONNX Runtime, stops the process at each of these.
DEADLY = {
    "an axis of 33 bits": node_model("LayerNormalization", ["A", "B"], 1, 17, axis=2**31),
    "a bias that is absent": node_model("LayerNormalization", ["A", "B", ""], 1, 17),
    "an input that is absent": node_model("Max", ["A", ""], 1, 13),
    "an optional axis that is absent": node_model("DFT", ["A", "", ""], 3, 20),
    "more outputs than a machine has room for": node_model(
        "Split", ["A"], 1, 18, num_outputs=2**31 - 1
    ),
}


@pytest.mark.parametrize("what", DEADLY)
def test_what_would_stop_the_process(what: str, tmp_path: Path) -> None:
    """In a process of its own, so that this one would live to tell."""
    path = tmp_path / "m.onnx"
    path.write_bytes(DEADLY[what].SerializeToString())
    code = (
        "import sys, torch; from roundoff.errors import RoundoffError\n"
        "from roundoff.evaluator import TorchOnnxEvaluator as T\n"
        "try:\n"
        "    t = T(sys.argv[1], kernels=['ort'])\n"
        "    rank = 3 if 'DFT' in [n.op_type for n in t.nodes] else 1\n"
        "    t.run(None, {n: torch.ones([2] * rank) for n in t.input_names})\n"
        "except RoundoffError as e: print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_bias_that_is_absent_is_zero() -> None:
    model = node_model("LayerNormalization", ["A", "B", ""], 1, 17)
    x = torch.tensor([1.0, 4.0])
    feeds = {"A": x, "B": torch.ones(2)}
    expected = torch.nn.functional.layer_norm(x, (2,))
    for kernels in (["torch"], ["ort"], ["reference"]):
        (got,) = TorchOnnxEvaluator(model, kernels=kernels).run(None, feeds)
        torch.testing.assert_close(got, expected)
