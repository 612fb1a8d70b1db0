"""The table of switches: every setting of this device, measured against the same defaults."""

import math

import pytest
import torch

from roundoff import switches
from roundoff.compare import max_diff
from roundoff.errors import UnsupportedError
from roundoff.models import layer_norm_feeds, layer_norm_matmul
from roundoff.ort import session
from roundoff.switches import COLUMNS, pointwise_study, skip_study, switch_study

FEEDS = layer_norm_feeds(64, 64)


@pytest.mark.parametrize("itype", [1, 10])
def test_rows_of_the_cpu(itype: int) -> None:
    frame = switch_study(itype, FEEDS, budget_s=0.01)
    assert tuple(frame.columns) == COLUMNS
    default = frame[frame["switch"] == "default"]
    assert default["runtime"].tolist() == ["ORT", "torch"]
    assert (default["moves ulp"] == 0).all()
    assert (default["cost"] == 1).all()
    assert default["gap ulp"].nunique() == 1  # each is the other's rival
    assert (frame["gap share"].between(0, 1)).all()
    assert (frame["cost"] > 0).all()
    assert (frame["error ulp"] >= 0.4).all()  # rounding the output alone gives almost a half


def test_rounding_after_each_node_costs_accuracy() -> None:
    frame = switch_study(10, FEEDS, budget_s=0.01).set_index(["runtime", "switch"])
    each = frame.loc[("ORT", "rounding after each node")]
    assert each["error ulp"] > frame.loc[("ORT", "default"), "error ulp"]
    assert each["gap share"] < frame.loc[("ORT", "default"), "gap share"]


def test_what_onnxruntime_cannot_run_is_said() -> None:
    with pytest.raises(UnsupportedError):
        switch_study(16, FEEDS, budget_s=0.01)


def test_errors_are_those_of_the_results() -> None:
    feeds = {k: v.float() for k, v in FEEDS.items()}
    (z,) = session(layer_norm_matmul()).run(feeds)
    wide = {k: v.double() for k, v in FEEDS.items()}
    normed = torch.nn.functional.layer_norm(wide["X"], (64,), wide["scale"], wide["bias"])
    exact = normed @ wide["weights"] + wide["bias2"]
    row = switch_study(1, FEEDS, budget_s=0.01).iloc[0]
    error = max_diff(exact, z)
    assert row["error abs"] == pytest.approx(error["abs"], rel=1e-6)
    assert row["bias"] == pytest.approx(error["bias"], rel=1e-4, abs=1e-12)


@pytest.mark.slow
def test_inductor_matches_eager_when_asked() -> None:
    try:
        frame = pointwise_study(FEEDS, budget_s=0.01).set_index(["runtime", "switch"])
    except UnsupportedError as error:
        pytest.skip(str(error))
    assert frame.loc[("inductor", "emulate_precision_casts = True"), "gap ulp"] == 0
    assert frame.loc[("inductor", "default"), "gap ulp"] > 0
    assert (
        frame.loc[("inductor", "default"), "error ulp"]
        < frame.loc[("eager", "default"), "error ulp"]
    )


def test_a_result_without_rival_has_no_gap() -> None:
    one = switches._Setting("ORT", "default", lambda: torch.ones(3))
    (row,) = switches._rows([one], torch.ones(3).double(), torch.device("cpu"), 0.01)
    assert math.isnan(row["gap ulp"])
    assert row["error ulp"] == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_of_cuda() -> None:
    frame = switch_study(1, FEEDS, switches.CUDA, budget_s=0.05).set_index(["runtime", "switch"])
    assert ("ORT", "use_tf32 = 0") in frame.index
    assert ("torch", "allow_tf32 = True") in frame.index
    half = switch_study(10, FEEDS, switches.CUDA, budget_s=0.05)
    assert half["switch"].str.startswith("ORT_CUDA_GEMM_OPTIONS").sum() == 3
    assert len(skip_study(FEEDS, budget_s=0.05)) == 3
