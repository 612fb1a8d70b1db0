"""The models of the pages: valid, and equal on paper."""

import onnx
import pytest
import torch

from roundoff import ort
from roundoff.errors import ArgumentError, DtypeError
from roundoff.models import layer_norm_feeds, layer_norm_matmul, residual_rms_norm


@pytest.mark.parametrize("wide", [False, True])
def test_residual_rms_norm_is_its_formula(wide: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, r = (torch.rand(2, 3, 8, generator=generator) for _ in "xr")
    scale = torch.rand(8, generator=generator)
    feeds = {"X": x, "residual": r, "scale": scale}
    model = residual_rms_norm(1, wide=wide)
    onnx.checker.check_model(model, full_check=True)
    (z,) = ort.session(model).run(feeds)
    h = (x + r).double()
    exact = h / torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-5) * scale.double()
    assert (z.double() - exact).abs().max() < 1e-6


def test_layer_norm_models_are_their_formulas() -> None:
    single = layer_norm_feeds(5, 16)
    assert {v.dtype for v in single.values()} == {torch.float32}
    assert single["X"].shape == (2, 5, 16)
    assert single["X"].min() < -30
    assert single["weights"].min() >= 0
    again = layer_norm_feeds(5, 16)
    assert all(torch.equal(single[k], again[k]) for k in single)
    assert torch.equal(layer_norm_feeds(5, 16, batch=4)["X"][:2], single["X"])
    assert not torch.equal(layer_norm_feeds(5, 16, seed=1)["X"], single["X"])
    normal = layer_norm_feeds(5, 256, weights="normal")
    assert normal["weights"].min() < 0 < normal["weights"].max()
    assert 0.9 < normal["weights"].std() * 16 < 1.1
    with pytest.raises(ArgumentError, match="uniform or normal"):
        layer_norm_feeds(5, 16, weights="gaussian")
    half = {k: v.half() for k, v in single.items()}
    feeds = {k: v.double() for k, v in half.items()}
    normed = torch.nn.functional.layer_norm(feeds["X"], (16,), feeds["scale"], feeds["bias"])
    exact = normed @ feeds["weights"] + feeds["bias2"]
    model = layer_norm_matmul(1)
    onnx.checker.check_model(model, full_check=True)
    (z,) = ort.session(model).run({k: v.float() for k, v in half.items()})
    assert (z.double() - exact).abs().max() < 1e-5


@pytest.mark.parametrize("make", [layer_norm_matmul, residual_rms_norm])
def test_norms_of_integers_are_refused(make: object) -> None:
    with pytest.raises(DtypeError, match="got int64"):
        make(7)
