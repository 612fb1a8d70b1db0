"""A suggested tolerance on fresh inputs: how often it fails what is right, and what it lets pass.

The twelve models and the faults are those of ``studies/which_tolerance.py``, which records both
error rates. Here the tolerance is the one that a user gets, from ``compare_runtimes``.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from roundoff.compare import CalibratedTolerance, calibrated_tolerance
from roundoff.runtimes import compare_runtimes

from .pages import ROOT

FRESH = 300
CPU = ["CPUExecutionProvider"]


def load() -> Any:
    """The study as a module."""
    spec = importlib.util.spec_from_file_location(
        "which_tolerance", ROOT / "studies" / "which_tolerance.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their fields' types up
    spec.loader.exec_module(module)
    return module


STUDY = load()
TYPES = STUDY.TYPES
MODELS, FAULTS = STUDY.MODELS, STUDY.FAULTS
feeds_of, sides, faulty = STUDY.feeds_of, STUDY.sides, STUDY.faulty


def suggested(
    model: Any, dtype: str, seed: int = 0, count: int | None = None
) -> CalibratedTolerance:
    """As a user gets it: from two runtimes, or in bfloat16 from both results."""
    proto = model.proto(dtype)
    if dtype != "bfloat16":
        found = compare_runtimes(proto, providers=CPU, seed=seed, calibration=count)
        return found.tolerances["Z"]
    one, other = sides(model, dtype)
    feeds = (feeds_of(proto, 10**6 * (seed + 1) + k) for k in range((count or 299) + 1))
    return calibrated_tolerance((one(fed), other(fed)) for fed in feeds)


def false_alarms(
    name: str, dtype: str, seed: int = 0, count: int | None = None, any_scale: bool = False
) -> tuple[CalibratedTolerance, int]:
    """The tolerance, and how many of 300 fresh feeds fail it."""
    model = MODELS[name]
    tolerance, (one, other) = suggested(model, dtype, seed, count), sides(model, dtype)
    proto = model.proto(dtype)
    fresh = (feeds_of(proto, k) for k in range(FRESH))
    if not tolerance.found:
        return tolerance, 0
    allows = functools.partial(tolerance.allows, any_scale=any_scale)
    return tolerance, sum(not allows(one(fed), other(fed)) for fed in fresh)


QUICK = [
    ("convolution, batch norm, GELU", "float16"),
    ("attention", "float32"),
    ("transformer block", "bfloat16"),
    ("product", "float16"),
]


@pytest.mark.parametrize("any_scale", [False, True])
@pytest.mark.parametrize(("name", "dtype"), QUICK)
def test_fresh_inputs_keep_within_a_suggested_tolerance(
    name: str, dtype: str, any_scale: bool
) -> None:
    tolerance, failed = false_alarms(name, dtype, any_scale=any_scale)
    assert tolerance.found
    assert failed <= 1
    assert tolerance.rtol >= torch.finfo(getattr(torch, dtype)).eps  # a unit in the last place


def caught(name: str, dtype: str, feeds: int = 40) -> tuple[CalibratedTolerance, float, float]:
    """The tolerance, the share of feeds on which a fault is seen, and its size over the RMS."""
    fault = FAULTS[name]
    tolerance = suggested(MODELS[fault.model], dtype)
    right, other = sides(MODELS[fault.model], dtype)
    wrong = faulty(fault, dtype)
    proto, seen, sizes = MODELS[fault.model].proto(dtype), 0, []
    for k in range(feeds):
        fed = feeds_of(proto, 10**5 + k)
        result = wrong(fed)
        seen += not tolerance.allows(right(fed), result)
        truth = other(fed).double()
        sizes.append(float((result.double() - truth).square().mean() / truth.square().mean()))
    return tolerance, seen / feeds, float(np.sqrt(np.mean(sizes)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("scale by 1 %", "float16"), ("tanh GELU for erf", "float32"), ("no bias", "bfloat16")],
)
def test_a_fault_is_caught(name: str, dtype: str) -> None:
    assert caught(name, dtype, 10)[1] == 1


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["four layers", "layer norm and product"])
def test_the_size_that_passes_is_what_is_told(name: str, dtype: str) -> None:
    tolerance, (_, other) = suggested(MODELS[name], dtype), sides(MODELS[name], dtype)
    proto = MODELS[name].proto(dtype)
    for k in range(20):
        result = other(feeds_of(proto, k)).double()
        size = tolerance.passes * result.square().mean().sqrt()
        assert tolerance.allows(result + 0.8 * size, result)
        assert tolerance.allows(result * (1 + 0.9 * tolerance.passes), result)
        assert not tolerance.allows(result * (1 + 4 * tolerance.passes), result)


KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "of one sign": lambda shape, g: torch.rand(shape, generator=g),
    "far from zero": lambda shape, g: 30 + torch.randn(shape, generator=g),
    "mostly zero": lambda shape, g: (torch.randn(shape, generator=g) - 1.2).clamp_min(0),
    "large": lambda shape, g: 40 * torch.randn(shape, generator=g),
    "with a heavy tail": lambda shape, g: torch.randn(shape, generator=g) ** 3,
}


def kinds_alarms(name: str, dtype: str, kind: str) -> tuple[CalibratedTolerance, int]:
    """The tolerance from one feed of a kind, and how many of 300 others of the kind fail it."""
    proto = MODELS[name].proto(dtype)

    def feed(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(8_000_000_000 + seed)
        draw = KINDS[kind]
        return {n: draw(x.shape, generator).to(x.dtype) for n, x in feeds_of(proto, 0).items()}

    tolerance = compare_runtimes(proto, feed(10**6), providers=CPU).tolerances["Z"]
    if not tolerance.found:
        return tolerance, 0
    one, other = sides(MODELS[name], dtype)
    fresh = (feed(k) for k in range(FRESH))
    return tolerance, sum(not tolerance.allows(one(fed), other(fed)) for fed in fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_the_feeds_given_say_of_which_kind_fresh_ones_are(kind: str) -> None:
    tolerance, failed = kinds_alarms("layer norm and product", "float32", kind)
    assert tolerance.found, tolerance
    assert failed <= 1


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
