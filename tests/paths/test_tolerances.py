"""A suggested tolerance on fresh inputs: how often it fails what is right, and what it lets pass.

The models are those of ``studies/which_tolerance.py``, which records both error rates, with its
faults. Here the tolerance is the one that a user gets, from ``compare_runtimes``.
"""

import sys
from collections.abc import Callable

import pytest
import torch

from roundoff.runtimes import compare_runtimes

from .pages import ROOT

sys.path.insert(0, str(ROOT / "studies"))
from which_tolerance import MODELS, feeds_of, sides

FRESH = 300
CPU = ["CPUExecutionProvider"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["four layers", "layer norm and product"])
def test_the_size_that_passes_is_what_is_told(name: str, dtype: str) -> None:
    proto, (_, other) = MODELS[name].proto(dtype), sides(MODELS[name], dtype)
    tolerance = compare_runtimes(proto, providers=CPU).tolerances["Z"]
    for k in range(20):
        result = other(feeds_of(proto, k)).double()
        size = tolerance.passes * result.square().mean().sqrt()
        assert tolerance.allows(result + 0.8 * size, result)
        assert tolerance.allows(result * (1 + 0.9 * tolerance.passes), result)
        assert not tolerance.allows(result * (1 + 4 * tolerance.passes), result)


KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "of one sign": lambda shape, g: torch.rand(shape, generator=g),
    "far from zero": lambda shape, g: 30 + torch.randn(shape, generator=g),
    "with a heavy tail": lambda shape, g: torch.randn(shape, generator=g) ** 3,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_feeds_given_say_of_which_kind_fresh_ones_are(kind: str) -> None:
    model = MODELS["layer norm and product"]
    proto = model.proto("float32")

    def feed(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(8_000_000_000 + seed)
        draw = KINDS[kind]
        return {n: draw(x.shape, generator).to(x.dtype) for n, x in feeds_of(proto, 0).items()}

    tolerance = compare_runtimes(proto, feed(10**6), providers=CPU).tolerances["Z"]
    one, other = sides(model, "float32")
    fresh = (feed(k) for k in range(FRESH))
    assert sum(not tolerance.allows(one(fed), other(fed)) for fed in fresh) <= 1


def structured(seed: int) -> dict[str, torch.Tensor]:
    """Rows of very different sizes, as a model's hidden states are: a LayerNorm evens them out."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 64, generator=generator)
    return {"X": x * 10.0 ** torch.arange(-4, 4).repeat_interleave(4)[:, None]}


def test_feeds_whose_structure_drawing_loses_may_be_given() -> None:
    model = MODELS["layer norm and product"]
    listed = [structured(k) for k in range(32)]
    proto = model.proto("float32")
    found = compare_runtimes(proto, structured(99), providers=CPU, calibration=listed)
    tolerance, (one, other) = found.tolerances["Z"], sides(model, "float32")
    assert tolerance.feeds == 33
    fresh = [structured(1000 + k) for k in range(FRESH)]
    assert sum(not tolerance.allows(one(fed), other(fed)) for fed in fresh) <= 1
