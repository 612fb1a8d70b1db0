"""Localisation finds the node that was tampered with, and says who is nearer the truth."""

import contextlib
import math
from collections.abc import Iterator

import onnx
import onnx.parser
import pytest
import torch

from roundoff.compare import max_diff
from roundoff.errors import ArgumentError
from roundoff.evaluator import TorchOnnxEvaluator
from roundoff.localization import COLUMNS, Runner, localize

TEXT = """<ir_version: 10, opset_import: ["" : 18]>
g (TYPE[4, 8] X, TYPE[8, 8] W) => (TYPE[4, 8] Z) {
  squares = Mul(X, X)
  product = MatMul(squares, W)
  Z = Sqrt(product)
}"""


def model(dtype: str = "float") -> onnx.ModelProto:
    return onnx.parser.parse_model(TEXT.replace("TYPE", dtype))


def feeds(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "X": (torch.rand(4, 8, generator=generator) * scale).to(dtype),
        "W": torch.rand(8, 8, generator=generator).to(dtype),
    }


def off_by(amount: float) -> dict[tuple[str, str], object]:
    return {("", "MatMul"): lambda a, b: torch.matmul(a, b) + amount}


def test_the_node_that_differs_is_found() -> None:
    one, other = (
        TorchOnnxEvaluator(model()),
        TorchOnnxEvaluator(model(), custom_kernels=off_by(0.25)),
    )
    found = localize(one, other, feeds(), truth=TorchOnnxEvaluator(model(), truth=True))
    frame = found.frame.set_index("op")
    assert list(found.frame.columns) == list(COLUMNS)
    assert frame["isolated abs"].tolist() == pytest.approx([0, 0.25, 0], abs=1e-6)
    assert frame.loc["Sqrt", "isolated abs"] == 0
    assert frame.loc["MatMul", "isolated bias"] == pytest.approx(0.25, rel=1e-6)
    assert frame.loc["Sqrt", "propagated abs"] > 0.01
    row = found.first_beyond("propagated abs", 1e-3)
    assert row is not None
    assert row["op"] == "MatMul"
    assert found.first_beyond("isolated abs", 1.0) is None
    assert frame.loc["MatMul", "truth abs first"] < 1e-5 < frame.loc["MatMul", "truth abs second"]
    assert frame.loc["MatMul", "own scaled second"] > 1e5 > frame.loc["MatMul", "own scaled first"]


def test_errors_against_truth_are_those_of_float64() -> None:
    given = feeds()
    found = localize(
        TorchOnnxEvaluator(model()),
        TorchOnnxEvaluator(model()),
        given,
        truth=TorchOnnxEvaluator(model(), truth=True),
    )
    x, w = (given[n].double() for n in "XW")
    exact = torch.sqrt((x * x) @ w)
    ours = torch.sqrt((given["X"] * given["X"]) @ given["W"])
    difference = max_diff(exact, ours)
    last = found.frame.iloc[-1]
    assert last["truth abs first"] == difference["abs"]
    assert last["truth bias second"] == difference["bias"]
    assert last["largest truth"] == float(exact.max())
    product = (x * x).square().mean().sqrt() * 2.0**-23
    largest = ((given["X"] * given["X"]).double() - x * x).abs().max()
    assert found.frame.iloc[0]["own scaled first"] == pytest.approx(float(largest / product))
    assert (found.frame["propagated abs"] == 0).all()
    plain = localize(TorchOnnxEvaluator(model()), TorchOnnxEvaluator(model()), given).frame
    assert plain["truth abs first"].isna().all()


def test_what_is_not_finite_is_counted_and_measured_where_it_is_no_fault_of_a_run() -> None:
    truth = TorchOnnxEvaluator(model(), truth=True)
    one, given = TorchOnnxEvaluator(model()), feeds()
    spoiled = {("", "MatMul"): lambda a, b: torch.full((4, 8), math.nan)}
    found = localize(one, TorchOnnxEvaluator(model(), custom_kernels=spoiled), given, truth=truth)
    for row in (found.first_beyond("propagated abs", 1e30), found.first_non_finite()):
        assert row is not None
        assert row["op"] == "MatMul"
        assert row["non-finite second"] == 32
        assert row["own scaled second"] == math.inf
    given["X"][0, 0] = math.inf  # in the truth, too: no error
    found = localize(one, one, given, truth=truth)
    assert found.frame["truth scaled first"].max() < 8
    assert (found.frame["non-finite truth"] == found.frame["non-finite first"]).all()
    given["X"].fill_(math.nan)  # nothing to measure is no error of zero
    assert localize(one, one, given, truth=truth).frame["truth scaled first"].isna().all()


def test_different_models_are_refused() -> None:
    proto = model()
    proto.graph.node[0].op_type = "Add"
    one = TorchOnnxEvaluator(model())
    for other in (TorchOnnxEvaluator(proto), TorchOnnxEvaluator(proto, truth=True)):
        with pytest.raises(ArgumentError, match=r"run different nodes.*Mul.*Add"):
            localize(
                one,
                one if other.settings.truth else other,
                feeds(),
                truth=other if other.settings.truth else None,
            )


def test_overflow_in_float16_is_found() -> None:
    half = Runner("float16", TorchOnnxEvaluator(model("float16")), dtype=torch.float16)
    single = Runner("float32", TorchOnnxEvaluator(model()), dtype=torch.float32)
    truth = TorchOnnxEvaluator(model(), truth=True)
    found = localize(half, single, feeds(torch.float16, 400.0), truth=truth)
    row = found.first_non_finite()
    assert row is not None
    assert row["op"] == "Mul"
    assert row["non-finite first"] > 0
    assert row["non-finite second"] == 0
    assert 65504 < row["largest second"] <= 400.0**2
    assert found.names == ("float16", "float32")
    row = found.first_beyond("propagated abs", 1e9)
    assert row is not None
    assert row["op"] == "Mul"
    calm = localize(half, single, feeds(torch.float16), truth=truth)
    assert calm.first_non_finite() is None
    assert calm.frame["own scaled first"].max() <= 2  # a float16 kernel on float16 inputs


def test_the_context_is_entered_for_each_node_only() -> None:
    inside: list[str] = []

    @contextlib.contextmanager
    def switch() -> Iterator[None]:
        inside.append("in")
        yield
        inside.append("out")

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert inside[-1] == "in"
        return torch.matmul(a, b)

    one = Runner("plain", TorchOnnxEvaluator(model()))
    kernels = {("", "MatMul"): watched}
    other = Runner("switched", TorchOnnxEvaluator(model(), custom_kernels=kernels), context=switch)
    localize(one, other, feeds())
    assert inside.count("in") == inside.count("out") >= 6


def test_a_truth_that_is_none_is_refused() -> None:
    one, wide = TorchOnnxEvaluator(model()), TorchOnnxEvaluator(model(), truth=True)
    with pytest.raises(ArgumentError, match=r"this truth is none.*truth=True"):
        localize(one, one, feeds(), truth=one)
    with pytest.raises(ArgumentError, match=r"feeds of the truth are rounded: got torch.float16"):
        localize(one, one, feeds(), truth=Runner("truth", wide, dtype=torch.float16))
    kernels = {("", "MatMul"): lambda a, b: torch.matmul(a.float(), b.float())}
    narrow = TorchOnnxEvaluator(model(), truth=True, custom_kernels=kernels)
    with pytest.raises(ArgumentError, match=r"of the truth: got torch.float32, expected float64"):
        localize(one, one, feeds(), truth=narrow)
    assert len(localize(one, one, feeds(), truth=Runner("truth", wide)).frame) == 3


@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16"])
def test_another_model_s_constants_are_refused_by_name(dtype: str) -> None:
    def scaled_by(value: float, kind: str = "float") -> TorchOnnxEvaluator:
        proto = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 18]> '
            "g (TYPE[4] X) => (TYPE[4] Z) { Y = Mul(X, factor) Z = Neg(Y) }".replace("TYPE", kind)
        )
        torch_type = {"float": torch.float32, "float16": torch.float16}.get(kind, torch.bfloat16)
        constant = onnx.helper.make_tensor(
            "factor",
            onnx.TensorProto.DataType.Value(kind.upper()),
            [1],
            [torch.tensor(value, dtype=torch_type).item()],
        )
        proto.graph.initializer.append(constant)
        return TorchOnnxEvaluator(proto)

    x = {"X": torch.ones(4)}
    half = {"float": None, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]
    for value in (2.0, 1 / 3 + 0.1, math.inf):
        other = Runner("other", scaled_by(value, dtype), dtype=half)
        with pytest.raises(ArgumentError, match="different constants: 'factor'"):
            localize(scaled_by(1 / 3), other, x)
    same = Runner("same", scaled_by(1 / 3, dtype), dtype=half)
    full = Runner("full", scaled_by(1 / 3), dtype=torch.float32)
    assert len(localize(same, full, x).frame) == 2
    nan = localize(scaled_by(math.nan), Runner("nan", scaled_by(math.nan, dtype), dtype=half), x)
    assert nan.first_non_finite() is not None
