"""Localisation finds the node that was tampered with, and says who is nearer the truth."""

import math

import onnx
import onnx.parser
import pytest
import torch

from roundoff.errors import ArgumentError
from roundoff.evaluator import TorchOnnxEvaluator
from roundoff.localization import localize

ONE = """<ir_version: 10, opset_import: ["" : 18]>
g (float[4, 8] X, float[8, 8] W) => (float[4, 8] Z) {
  squares = Mul(X, X)
  product = MatMul(squares, W)
  Z = Sqrt(product)
}"""


def evaluator(text: str = ONE, **options: object) -> TorchOnnxEvaluator:
    return TorchOnnxEvaluator(onnx.parser.parse_model(text), **options)


def feeds() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"X": torch.rand(4, 8, generator=generator), "W": torch.rand(8, 8, generator=generator)}


def test_the_node_that_differs_is_found() -> None:
    kernels = {("", "MatMul"): lambda a, b: torch.matmul(a, b) + 0.25}
    one, other = evaluator(), evaluator(custom_kernels=kernels)
    frame = localize(one, other, feeds(), truth=evaluator(truth=True)).frame
    assert frame["isolated abs"].tolist() == pytest.approx([0, 0.25, 0], abs=1e-6)
    frame = frame.set_index("op")
    assert frame.loc["Mul", "propagated abs"] == 0
    assert frame.loc["Sqrt", "propagated abs"] > 0.01
    for kind in ("own", "truth"):
        errors = [frame.loc["MatMul", f"{kind} scaled {side}"] for side in ("first", "second")]
        assert errors[0] < 8 < 1e5 < errors[1]


def test_errors_against_truth_are_those_of_float64() -> None:
    given = feeds()
    found = localize(evaluator(), evaluator(), given, truth=evaluator(truth=True)).frame
    x, w = (given[n].double() for n in "XW")
    exact, ours = torch.sqrt((x * x) @ w), torch.sqrt((given["X"] * given["X"]) @ given["W"])
    error = float((ours.double() - exact).abs().max() / exact.square().mean().sqrt()) * 2.0**23
    for side in ("first", "second"):
        assert found[f"truth scaled {side}"][2] == pytest.approx(error)
        assert found[f"own scaled {side}"][0] == found[f"truth scaled {side}"][0]
    assert (found["propagated abs"] == 0).all()
    plain = localize(evaluator(), evaluator(), given).frame
    assert plain["truth scaled first"].isna().all()


def test_what_is_not_finite_is_counted_and_measured_where_it_is_no_fault_of_a_run() -> None:
    truth, one, given = evaluator(truth=True), evaluator(), feeds()
    spoiled = {("", "MatMul"): lambda a, b: torch.full((4, 8), math.nan)}
    row = localize(one, evaluator(custom_kernels=spoiled), given, truth=truth).frame.iloc[1]
    assert [row[f"non-finite {of}"] for of in ("first", "second", "truth")] == [0, 32, 0]
    assert row["own scaled second"] == row["propagated abs"] == math.inf
    given["X"][0, 0] = math.inf  # in the truth, too: no error
    found = localize(one, one, given, truth=truth).frame
    assert found["truth scaled first"].max() < 8
    assert (found["non-finite truth"] == found["non-finite first"]).all()
    given["X"].fill_(math.nan)  # nothing to measure is no error of zero
    assert localize(one, one, given, truth=truth).frame["truth scaled first"].isna().all()


def test_a_truth_that_is_none_is_refused() -> None:
    one = evaluator()
    with pytest.raises(ArgumentError, match=r"this truth is none.*truth=True"):
        localize(one, one, feeds(), truth=one)
    kernels = {("", "MatMul"): lambda a, b: torch.matmul(a.float(), b.float())}
    with pytest.raises(ArgumentError, match=r"of the truth: got torch.float32, expected float64"):
        localize(one, one, feeds(), truth=evaluator(truth=True, custom_kernels=kernels))


def test_another_model_is_refused() -> None:
    text = ONE.partition("g (")[0] + "g (float[4] X, float[4] W) => (float[4] Z) { Z = Sub(X, W) }"
    x = {"X": torch.ones(4), "W": torch.zeros(4)}
    with pytest.raises(ArgumentError, match="run different nodes"):
        localize(evaluator(text), evaluator(text.replace("(X, W)", "(W, X)")), x)
    one, added = evaluator(), ONE.replace("Mul(X, X)", "Add(X, X)")
    for others in ({"second": evaluator(added)}, {"truth": evaluator(added, truth=True)}):
        with pytest.raises(ArgumentError, match=r"run different nodes.*Mul.*Add"):
            localize(**{"first": one, "second": one, "feeds": feeds()} | others)
    text = ONE.partition("g (")[0] + (
        "g (float[4] X) => (float[4] Z) <float[1] factor = {0.3}> { Z = Mul(X, factor) }"
    )
    one, x = evaluator(text), {"X": torch.ones(4)}
    with pytest.raises(ArgumentError, match="different constants: 'factor'"):
        localize(one, evaluator(text.replace("0.3", "0.5")), x)
    assert len(localize(one, one, x, truth=evaluator(text, truth=True)).frame) == 1
