"""Modules as people forget them: in train(), with buffers that change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roundoff.backend as rb

pytestmark = pytest.mark.usefixtures("fresh")
F, N = torch.nn.functional, torch.nn


def compiled(function: Any) -> Any:
    return torch.compile(function, backend=rb.onnx_custom_backend, dynamic=False)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3 + 5


def near(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5, equal_nan=True)


def same_calls(module: N.Module, x: torch.Tensor) -> None:
    """Each of several calls beside eager's: results, the input afterwards, and all that is kept."""
    eager = copy.deepcopy(module)
    run = compiled(module)
    for call in range(3):
        ours, theirs = x + call, x + call
        with torch.no_grad():
            expected, got = eager(theirs), run(ours)
        near(got, expected)
        near(ours, theirs)
        near(dict(module.state_dict()), dict(eager.state_dict()))


# Norms with running statistics


NORMS: dict[str, tuple[Callable[[], N.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: N.BatchNorm1d(3), (8, 3)),
    "of a cumulative mean": (lambda: N.BatchNorm2d(3, momentum=None), (4, 3, 5, 6)),
    "InstanceNorm2d": (
        lambda: N.InstanceNorm2d(3, affine=True, track_running_stats=True),
        (4, 3, 5, 6),
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_in_train(name: str) -> None:
    make, shape = NORMS[name]
    same_calls(make().train(), normal(*shape))


def test_a_norm_from_train_to_eval_and_back() -> None:
    """A later eval() reads the statistics of the calls in train()."""
    module = N.Sequential(N.Conv1d(3, 4, 3), N.BatchNorm1d(4))
    eager = copy.deepcopy(module)
    run = compiled(module)
    for call, training in enumerate([True, True, False, True, False]):
        x = normal(4, 3, 9, seed=call)
        with torch.no_grad():
            near(run.train(training)(x), eager.train(training)(x))
    near(dict(module.state_dict()), dict(eager.state_dict()))


# Chance


RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "randn_like": torch.randn_like,
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 5),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_functions_follow_the_seed(name: str) -> None:
    """Eager's numbers for eager's seed, and others at the next call."""
    x = torch.randn(30, 30, generator=torch.Generator().manual_seed(0))
    run = compiled(RANDOM[name])
    torch.manual_seed(1)
    once, twice = run(x), run(x)
    torch.manual_seed(1)
    near(once, RANDOM[name](x))
    near(twice, RANDOM[name](x))
    assert not torch.equal(once, twice)


# Buffers and attributes that change


class Kept(N.Module):
    """A module with a buffer, written to by the function that it is given."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = [function]  # in a list: no method, and deepcopy keeps it
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(6, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function[0](self, x)


def replaced(m: Kept, x: torch.Tensor) -> torch.Tensor:
    m.mean = 0.9 * m.mean + 0.1 * x.mean(0)
    return x - m.mean


def a_row_of_the_cache(m: Kept, x: torch.Tensor) -> torch.Tensor:
    m.cache[m.count] = x[0]
    m.count.add_(1)
    return m.cache.sum(0)


def the_buffer_itself(m: Kept, x: torch.Tensor) -> torch.Tensor:
    m.mean.add_(x[0])
    return m.mean


@pytest.mark.parametrize(
    "function", [replaced, a_row_of_the_cache, the_buffer_itself], ids=lambda f: f.__name__
)
def test_buffers_that_change(function: Callable[[Kept, torch.Tensor], Any]) -> None:
    same_calls(Kept(function), normal(5, 4))


PARAMETRIZED: dict[str, Callable[[], N.Module]] = {
    "spectral_norm": lambda: N.utils.parametrizations.spectral_norm(N.Linear(5, 5)),
    "weight_norm": lambda: N.utils.parametrizations.weight_norm(N.Linear(5, 5)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_weights(name: str, training: bool) -> None:
    torch.manual_seed(0)
    module = PARAMETRIZED[name]().train(training)
    same_calls(module, normal(2, 5))


def test_an_embedding_that_renormalizes_its_table() -> None:
    torch.manual_seed(0)
    same_calls(N.Embedding(10, 4, max_norm=1.0), torch.tensor([1, 2, 2, 6]))
