"""What is refused: with a typed error that names the node and says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from roundoff.errors import ArgumentError, DtypeError, ModelError, RoundoffError
from roundoff.evaluator import TorchOnnxEvaluator

from .models import text

#: A graph, or its functions, and what the error says.
REFUSED = [
    ("agraph (float[n] X) => (float[n] Y) { a = Add(X, b) b = Neg(a) Y = Exp(b) }", "sorted"),
    ("agraph (float[n] X) => (float[n] Y) { Y = Add(X, nowhere) }", "nowhere"),
    ("agraph (float[n] X) => (float[n] Y) { Y = Nonsense(X) }", "Nonsense"),
    ("agraph (float[n] X) => (float[n] Y) { Y = com.microsoft.Nonsense(X) }", "custom_kernels"),
    ("agraph (float[n] X, int64[n] Y) => (float[n] Z) { Z = Add(X, Y) }", "'Add_0'.*int64"),
    ("agraph (float[2, 3] X) => (float[2, 3] Z) { Z = MatMul(X, X) }", "MatMul_0"),
    (
        "agraph (float[n] X) => (float[n] Y) { Y = local.f(X) } "
        '<domain: "local", opset_import: ["": 18, "local": 1]> f (x) => (y) { y = local.f(x) }',
        "recurs",
    ),
]


@pytest.mark.parametrize(("graph", "message"), REFUSED)
def test_what_is_refused_before_a_run(graph: str, message: str) -> None:
    with pytest.raises(RoundoffError, match=message):
        TorchOnnxEvaluator(text(graph))


def test_types_that_are_not_known_before_are_seen_in_the_run() -> None:
    """After a custom kernel nothing is known: the same check, as the node runs."""
    model = text("agraph (float[n] X) => (float[n] Z) { A = Neg(X) Z = Add(A, X) }")
    wide = {("", "Neg"): lambda x: -x.double()}
    evaluator = TorchOnnxEvaluator(model, custom_kernels=wide)
    for _ in range(2):
        with pytest.raises(DtypeError, match="node 'Add_1'"):
            evaluator.run(None, {"X": torch.ones(2)})


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("Y = Concat<axis = 0>(A, B)", "rank"),
        ("Y = Flatten<axis = 3>(A)", "axis"),
        ("Y, Z = Split<num_outputs = 3>(A)", "Split"),
        ("Y = Squeeze(A, axis)", "not 1"),
        ("Y = Unsqueeze(A, twice)", "distinct"),
        ("Y = Slice(A, twice, twice, twice)", "distinct"),
        ("Y = Reshape(B, twice)", "Reshape"),
        ("Y = Reshape(B, below)", "below -1"),
        ("Y = Reshape<allowzero = 1>(E, both)", "0 beside -1"),
        ("Y = Conv<pads = [-1, -1, 0, 0]>(X, one)", "Conv"),
    ],
)
def test_what_torch_would_let_pass_where_no_rank_is_known(node: str, message: str) -> None:
    constants = "<int64[1] axis = {1}, int64[2] twice = {0, 0}, int64[2] below = {-2, 2},"
    constants += " int64[2] both = {0, -1}, float[1, 1, 1, 1] one = {1}>"
    inputs = "float[] A, float[] B, float[] E, float[] X"
    model = text(f"g ({inputs}) => (float[] Y) {constants} {{ {node} }}")
    feeds = {"A": torch.zeros(2, 3), "B": torch.zeros(4), "E": torch.zeros(0, 3)}
    with pytest.raises(RoundoffError, match=message):
        TorchOnnxEvaluator(model).run(feeds | {"X": torch.zeros(1, 1, 4, 4)})


@pytest.mark.parametrize("op_type", ["Div", "Mod"])
@pytest.mark.parametrize("kernels", [None, "ort"])
@pytest.mark.parametrize(
    ("x", "y", "why"),
    [
        (np.int64([1, 2]), np.int64([1, 0]), "division by zero"),
        (np.uint8([1, 2]), np.uint8([1, 0]), "division by zero"),
        (np.int64([-(2**63)]), np.int64([-1]), "overflow"),
    ],
)
def test_a_division_that_would_end_the_process(
    op_type: str, kernels: Any, x: Any, y: Any, why: str
) -> None:
    body = f"g (int[n] X, int[n] Y) => (int[n] Z) {{ Z = {op_type}(X, Y) }}"
    model = text(body.replace("int", str(x.dtype)))
    with pytest.raises(ModelError, match=f"node '{op_type}_0'.*{why}"):
        TorchOnnxEvaluator(model, kernels=kernels).run({"X": x, "Y": y})


def external(location: str, offset: int = 0, length: int = 8) -> onnx.ModelProto:
    model = text("agraph (float[2] X) => (float[2] Y) <float[2] W = {0, 0}> { Y = Add(X, W) }")
    (tensor,) = model.graph.initializer
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
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
    outside = ("../outside.bin", str(tmp_path / "outside.bin"), "link.bin", "", "absent.bin")
    cut = [("inside.bin", *place) for place in ((0, 16), (4, 8), (-4, 8))]
    for place in [*((location,) for location in outside), *cut]:
        with pytest.raises(ModelError, match="'W'"):
            run(external(*place))
    with pytest.raises(ModelError, match="path of the model"):
        TorchOnnxEvaluator(external("inside.bin"))


def test_another_number_of_inputs_is_refused_by_a_node() -> None:
    evaluator = TorchOnnxEvaluator(text("g (float[n] X) => (float[n] Y) { Y = Clip(X) }"))
    for inputs in ([], [torch.ones(1), torch.tensor(2.0)]):
        with pytest.raises(ArgumentError, match="inputs of node 'Clip_0'"):
            evaluator.run_node(0, inputs)


def test_a_constant_with_data_of_two_kinds_is_refused() -> None:
    model = text("g (float[2] X) => (float[2] Y) <float[2] W = {1, 2}> { Y = Add(X, W) }")
    model.graph.initializer[0].raw_data = bytes(8)
    with pytest.raises(ModelError, match="one and only one value field"):
        TorchOnnxEvaluator(model)
