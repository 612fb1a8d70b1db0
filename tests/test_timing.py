"""The harness against a clock that the tests turn."""

import contextlib
import gc
import math
import sys

import numpy as np
import pytest
import torch

from roundoff import timing
from roundoff.timing import measure, statistics


class Clock:
    """A clock that only moves when a callable is called; keeps who was called when."""

    def __init__(self, seed=0):
        self.now = 0.0
        self.rng = np.random.default_rng(seed)
        self.called = []

    def __call__(self):
        return self.now

    def callable(self, label, cost):
        """cost: seconds, or a function of (call number, rng) that gives them."""
        count = 0

        def run():
            nonlocal count
            self.now += cost(count, self.rng) if callable(cost) else cost
            count += 1
            self.called.append(label)

        return run


def timed(costs, seed=0, **options):
    clock = Clock(seed)
    callables = {k: clock.callable(k, c) for k, c in costs.items()}
    options = {"budget_s": 1.0, "clock": clock, **options}
    return measure(callables, **options), clock


def noisy(centre, spread=0.05):
    return lambda _, rng: centre * math.exp(spread * rng.standard_normal())


# -- rounds -----------------------------------------------------------------------------------


def test_constant_costs_are_found_exactly():
    found, _ = timed({"a": 0.001, "b": 0.003})
    for column in ("median", "low", "high", "mean", "min", "max"):
        assert found.frame[column].tolist() == pytest.approx([0.001, 0.003], rel=1e-9)
    assert str(found.ratio("b", "a")) == "3 [3, 3]"
    assert found.ratios("b")["ratio"].tolist() == pytest.approx([1 / 3, 1])
    assert len(found.samples) == 10  # as few as allowed: nothing more to learn


def test_fast_calls_are_repeated_within_a_sample():
    found, clock = timed({"fast": 1e-6, "slow": 1e-2}, min_rounds=10, budget_s=0.01)
    assert found.frame["median"].tolist() == pytest.approx([1e-6, 1e-2])
    assert clock.called.count("fast") == pytest.approx(2000, rel=0.02)
    assert clock.called.count("slow") < 20


def test_each_round_times_each_callable_once_in_a_changing_order():
    costs = dict.fromkeys("abc", 0.01)
    found, clock = timed(costs, min_rounds=30)
    rounds = len(found.samples)
    called = clock.called[-3 * rounds :]
    orders = ["".join(called[i : i + 3]) for i in range(0, len(called), 3)]
    assert all(sorted(o) == ["a", "b", "c"] for o in orders)
    assert len(set(orders)) == 6
    assert timed(costs, min_rounds=30)[1].called == clock.called


ROUGH = noisy(0.01, 0.5)


@pytest.mark.parametrize(
    ("costs", "options", "rounds"),
    [
        ({"a": ROUGH, "b": ROUGH}, {"precision": 0.1, "budget_s": 1e9}, range(11, 2000)),
        ({"a": ROUGH, "b": ROUGH}, {"precision": 1e-3}, range(35, 75)),  # a second of 0.01 s
        ({"a": ROUGH}, {"precision": 1e-6, "budget_s": 1e9, "max_rounds": 20}, range(20, 21)),
        ({"a": 1.0}, {"budget_s": 0.0}, range(10, 11)),
    ],
)
def test_rounds_end_when_the_result_is_precise_or_the_budget_spent(costs, options, rounds):
    found, _ = timed(costs, **options)
    assert len(found.samples) in rounds
    assert found.is_precise == (options.get("precision", 0.02) > 0.001)


def test_buffers_are_gone_round_in_turn():
    clock, seen = Clock(), []

    def run(i):
        seen.append(i)
        clock.now += 0.01

    measure({"a": run}, clock=clock, rotate=3, budget_s=0.0)
    assert seen == [i % 3 for i in range(len(seen))]


def test_the_collector_is_off_in_the_rounds_and_back_after():
    states = []
    measure({"a": lambda: states.append(gc.isenabled())}, budget_s=0.0, min_rounds=2)
    assert not any(states)
    with pytest.raises(ZeroDivisionError) as caught:
        measure({"a": lambda: 1 / 0})
    assert gc.isenabled()
    assert "'a'" in caught.value.__notes__[0]


def test_warms_up_until_calls_get_no_faster():
    cost = lambda i, _: 0.01 * (1 + 20 * 0.5**i)  # noqa: E731
    found, _ = timed({"a": cost}, warmup=1, budget_s=100.0, max_rounds=50)
    assert found.frame["median"].item() == pytest.approx(0.01, rel=0.02)


# -- intervals --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [6, 10, 30])
@pytest.mark.parametrize("kind", ["normal", "exponential", "outliers"])
def test_intervals_of_the_median_cover_what_they_say(kind, n):
    rng = np.random.default_rng(0)
    trials = (150, n)
    draws, truth = {
        "normal": (rng.standard_normal(trials), 0.0),
        "exponential": (rng.exponential(size=trials), math.log(2)),
        "outliers": (np.where(rng.random(trials) < 0.1, 50, 1) * rng.standard_normal(trials), 0.0),
    }[kind]
    found = [statistics.median_interval(100 + x) for x in draws]
    hits = sum(each.low <= 100 + truth <= each.high for each in found)
    # Three standard errors of a count below 95 %; a 90 % interval would fail this.
    assert hits / 150 >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 150)


def test_neighbours_that_are_alike_widen_the_interval():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(100):
        x = np.zeros(150)
        for i in range(1, 150):
            x[i] = 0.7 * x[i - 1] + rng.standard_normal()
        found = statistics.median_interval(x[50:])
        hits += found.low <= 0 <= found.high
    assert hits / 100 >= 0.85  # about 0.65 were they taken for independent


def pooled(seed, sessions):
    """A measurement in some sessions, each with an offset of its own, as a real machine gives."""
    rng = np.random.default_rng(seed)
    parts = []
    for session in range(sessions):
        shifted = 0.01 * math.exp(0.1 * rng.standard_normal())
        costs = {"a": noisy(0.01), "b": noisy(shifted)}
        found, _ = timed(costs, seed=1000 * seed + session, min_rounds=10, budget_s=0.0)
        parts.append(found)
    return timing.pool(parts)


def test_sessions_cover_what_differs_between_them():
    def share(sessions):
        found = [pooled(seed, sessions).ratio("b", "a") for seed in range(60)]
        return sum(r.low <= 1 <= r.high for r in found) / 60

    assert share(5) >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 60)
    # The reason for sessions: rounds of a single one do not see its offset.
    assert share(1) < 0.7


def test_pooled_sessions_as_tables():
    one, _ = timed({"a": 0.01, "b": 0.02}, bytes={"a": 1e7})
    two, _ = timed({"a": 0.04, "b": 0.08})
    both = timing.pool([one, two])
    row = both.frame.iloc[0]
    assert (row["gb_s"], row["rounds"]) == (pytest.approx(0.5), 20)
    assert row["median"] == pytest.approx(0.02)  # geometric mean
    assert row["low"] < 0.01 < 0.04 < row["high"]
    assert both.is_precise  # the ratio is 2 in each, whatever the times are


# -- the machine ------------------------------------------------------------------------------


def test_precision_is_put_back():
    before = torch.backends.cuda.matmul.allow_tf32
    with contextlib.suppress(KeyError), timing.torch_precision(not before):
        assert torch.backends.cuda.matmul.allow_tf32 is not before
        raise KeyError
    assert torch.backends.cuda.matmul.allow_tf32 is before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.alone
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_half_the_work_takes_about_half_the_time_on_a_gpu(cuda_graph):
    x = [torch.randn(2**26, device="cuda") for _ in range(2)]
    out = torch.empty_like(x[0])
    found = measure(
        {"all": lambda i: out.copy_(x[i]), "half": lambda i: out[: 2**25].copy_(x[i][: 2**25])},
        device="cuda",
        cuda_graph=cuda_graph,
        rotate=2,
        budget_s=1.0,
    )
    assert 0.4 < found.ratio("half", "all").value < 0.65


@pytest.mark.parametrize("in_a_terminal", [True, False])
def test_a_bar_shows_progress_in_a_terminal_alone(monkeypatch, capsys, in_a_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: in_a_terminal, raising=False)
    measure({"sum": lambda: sum(range(100))}, budget_s=0.2, min_rounds=3)
    assert ("round/s" in capsys.readouterr().err) == in_a_terminal
