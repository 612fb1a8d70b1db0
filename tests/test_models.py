"""The models of the pages: valid, and equal on paper."""

import dataclasses

import onnx
import pytest
import torch

from roundoff import ort
from roundoff.compare import scaled_error
from roundoff.models import (
    SIZES,
    Llama,
    layer_norm_feeds,
    layer_norm_matmul,
    random_tokens,
    residual_rms_norm,
)


def result(model: onnx.ModelProto, feeds: dict[str, torch.Tensor]) -> torch.Tensor:
    onnx.checker.check_model(model, full_check=True)
    return ort.session(model).run(feeds)[0].double()


@pytest.mark.parametrize("wide", [False, True])
def test_residual_rms_norm_is_its_formula(wide: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, r, scale = (torch.rand(2, 3, 8, generator=generator) for _ in range(3))
    feeds = {"X": x, "residual": r, "scale": scale[0, 0]}
    h = (x + r).double()
    exact = h / torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-5) * scale[0, 0]
    assert (result(residual_rms_norm(1, wide=wide), feeds) - exact).abs().max() < 1e-6


def test_layer_norm_matmul_is_its_formula() -> None:
    feeds = {k: v.half().float() for k, v in layer_norm_feeds(5, 16).items()}
    x, scale, bias, weights, bias2 = (v.double() for v in feeds.values())
    exact = torch.nn.functional.layer_norm(x, (16,), scale, bias) @ weights + bias2
    assert (result(layer_norm_matmul(), feeds) - exact).abs().max() < 1e-5


def test_feeds_are_those_of_their_seed_whatever_the_batch() -> None:
    feeds = layer_norm_feeds(5, 16)
    again, other = layer_norm_feeds(5, 16, batch=4), layer_norm_feeds(5, 16, seed=1)
    assert torch.equal(feeds["X"], again["X"][:2])
    assert torch.equal(feeds["weights"], again["weights"])
    assert not torch.equal(feeds["X"], other["X"])
    assert layer_norm_feeds(5, 256, weights="normal")["weights"].min() < 0 <= feeds["weights"].min()


@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_mask_means_the_same_in_both_attentions_where_every_token_sees_a_key(
    padding: str,
) -> None:
    size = dataclasses.replace(SIZES["tiny"], batch=3, length=11)
    ids, mask = random_tokens(size, True, "cpu", padding=padding)
    assert mask.sum(1).tolist() == [11, 11, 9]
    tokens = mask.bool() if padding == "left" else torch.ones_like(mask, dtype=torch.bool)
    made = [Llama(size, 2, attention=a)(ids, mask)[0] for a in ("sdpa", "eager")]
    assert scaled_error(made[0][tokens].double(), made[1][tokens]).largest < 32
    if padding == "left":  # a token that sees no key has no defined result
        assert scaled_error(made[0][~tokens].double(), made[1][~tokens]).largest > 1e5
