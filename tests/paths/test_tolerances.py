"""A suggested tolerance on fresh inputs: how often it fails what is right.

The model is one of ``studies/which_tolerance.py``, which records both error rates, with its faults.
Here the tolerance is the one that a user gets, from ``compare_runtimes``.
"""

import sys
from collections.abc import Callable

import pytest
import torch

from roundoff.runtimes import compare_runtimes

from .pages import ROOT

sys.path.insert(0, str(ROOT / "studies"))
from which_tolerance import MODELS, sides

STRUCTURED = "rows of very different sizes, as a model's hidden states"
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of one sign": torch.abs,
    "far from zero": lambda x: 30 + x,
    "with a heavy tail": lambda x: x**3,
    STRUCTURED: lambda x: x * 10.0 ** torch.arange(-4, 4).repeat_interleave(4)[:, None],
}


def feed(kind: str, seed: int) -> dict[str, torch.Tensor]:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
    return {"X": KINDS[kind](x)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_feeds_given_say_of_which_kind_fresh_ones_are(kind: str) -> None:
    model, options = MODELS["layer norm and product"], {}
    if kind == STRUCTURED:  # which drawing loses
        options["calibration"] = [feed(kind, k) for k in range(32)]
    first, cpu = feed(kind, 10**6), ["CPUExecutionProvider"]
    found = compare_runtimes(model.proto("float32"), first, providers=cpu, **options)
    tolerance, (one, other) = found.tolerances["Z"], sides(model, "float32")
    fresh = [feed(kind, 1000 + k) for k in range(300)]
    assert sum(not tolerance.allows(one(fed), other(fed)) for fed in fresh) <= 1
