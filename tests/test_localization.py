"""Localisation finds the node that was tampered with, and says who is nearer the truth."""

import math

import onnx
import onnx.parser
import pytest
import torch

from roundoff.errors import ArgumentError
from roundoff.evaluator import TorchOnnxEvaluator
from roundoff.localization import COLUMNS, localize

TEXT = """<ir_version: 10, opset_import: ["" : 18]>
g (TYPE[4, 8] X, TYPE[8, 8] W) => (TYPE[4, 8] Z) {
  squares = Mul(X, X)
  product = MatMul(squares, W)
  Z = Sqrt(product)
}"""
ONE = TEXT.replace("TYPE", "float")


def evaluator(text: str = ONE, **options: object) -> TorchOnnxEvaluator:
    return TorchOnnxEvaluator(onnx.parser.parse_model(text), **options)


def feeds(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "X": (torch.rand(4, 8, generator=generator) * scale).to(dtype),
        "W": torch.rand(8, 8, generator=generator).to(dtype),
    }


def off_by(amount: float) -> dict[tuple[str, str], object]:
    return {("", "MatMul"): lambda a, b: torch.matmul(a, b) + amount}


def test_the_node_that_differs_is_found() -> None:
    one, other = evaluator(), evaluator(custom_kernels=off_by(0.25))
    frame = localize(one, other, feeds(), truth=evaluator(truth=True)).frame
    assert list(frame.columns) == list(COLUMNS)
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
    squares = given["X"] * given["X"]
    for row, ours, exact in (
        (0, squares, x * x),
        (2, torch.sqrt(squares @ given["W"]), torch.sqrt((x * x) @ w)),
    ):
        unit = exact.square().mean().sqrt() * 2.0**-23
        error = float((ours.double() - exact).abs().max() / unit)
        assert found["truth scaled first"][row] == pytest.approx(error)
        assert found["truth scaled second"][row] == pytest.approx(error)
    assert found["own scaled first"][0] == found["truth scaled first"][0]
    assert (found["propagated abs"] == 0).all()
    plain = localize(evaluator(), evaluator(), given).frame
    assert plain["truth scaled first"].isna().all()


def test_what_is_not_finite_is_counted_and_measured_where_it_is_no_fault_of_a_run() -> None:
    truth, one, given = evaluator(truth=True), evaluator(), feeds()
    spoiled = {("", "MatMul"): lambda a, b: torch.full((4, 8), math.nan)}
    row = localize(one, evaluator(custom_kernels=spoiled), given, truth=truth).frame.iloc[1]
    assert (row["non-finite first"], row["non-finite second"], row["non-finite truth"]) == (
        0,
        32,
        0,
    )
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
    one, added = evaluator(), ONE.replace("Mul(X, X)", "Add(X, X)")
    with pytest.raises(ArgumentError, match=r"run different nodes.*Mul.*Add"):
        localize(one, evaluator(added), feeds())
    with pytest.raises(ArgumentError, match="run different nodes"):
        localize(one, one, feeds(), truth=evaluator(added, truth=True))

    def scaled_by(value: str, **options: object) -> TorchOnnxEvaluator:
        text = "g (float[4] X) => (float[4] Z) <float[1] factor = {VALUE}> { Z = Mul(X, factor) }"
        return evaluator(ONE.partition("g (")[0] + text.replace("VALUE", value), **options)

    x = {"X": torch.ones(4)}
    for other in (scaled_by("0.5"), scaled_by("0.7", truth=True)):
        truth = other if other.settings.truth else None
        with pytest.raises(ArgumentError, match="different constants: 'factor'"):
            localize(scaled_by("0.3"), scaled_by("0.3") if truth else other, x, truth=truth)
    same = localize(scaled_by("0.3"), scaled_by("0.3"), x, truth=scaled_by("0.3", truth=True))
    assert len(same.frame) == 1
