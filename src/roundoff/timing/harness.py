"""The rounds: who is timed when, and for how long."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from roundoff.errors import ArgumentError, UnsupportedError

from .result import Rival, Timings
from .statistics import median_interval, ratio

__all__ = ["measure"]

Clock = Callable[[], float]
#: A sample shorter than this is mostly the clock's own: fast calls are repeated to fill it.
_SAMPLE_S = {"cpu": 2e-4, "cuda": 5e-4}
_MOST_CALLS = 4096
_MOST_CAPTURED = 256


def measure(
    rivals: Mapping[str, Callable[..., object]],
    *,
    budget_s: float = 2.0,
    precision: float = 0.02,
    min_rounds: int = 10,
    max_rounds: int = 2000,
    warmup: int = 3,
    seed: int = 0,
    device: str = "cpu",
    cuda_graph: bool = False,
    rotate: int | None = None,
    bytes: Mapping[str, float] | None = None,  # noqa: A002 - what a reader would call it
    flops: Mapping[str, float] | None = None,
    level: float = 0.95,
    clock: Clock = time.perf_counter,
) -> Timings:
    """Time callables against each other.

    Every round times each rival once, in an order drawn anew, so that whatever the machine goes
    through meets them alike. Rounds go on until each ratio to the first rival is known to within
    *precision*, or the budget is spent. A rival must do its work in full: on CUDA on the current
    stream, or synchronised before it returns.

    Parameters
    ----------
    rivals : mapping
        Label -> callable. Called without arguments, or with *rotate* with the number of the set
        of buffers to use.
    budget_s : float
        Seconds for the rounds of all rivals together; *min_rounds* are made even past it.
    precision : float
        Half the width of an interval that is narrow enough, relative to the estimate.
    min_rounds, max_rounds : int
        Least and most rounds.
    warmup : int
        Least calls before the first round; more follow while calls still get faster.
    seed : int
        Of the orders and of the bootstrap.
    device : str
        ``"cpu"``: wall time. ``"cuda"``, ``"cuda:1"``: CUDA events on the current stream.
    cuda_graph : bool
        Capture each rival's calls in a CUDA graph and time replays: without launch overhead.
    rotate : int, optional
        Sets of buffers to go round, so that each call finds a cold cache: :func:`copies`.
    bytes, flops : mapping, optional
        Label -> bytes moved and operations done by a call.
    level : float
        Coverage of the intervals.
    clock : callable
        Seconds; the tests pass their own.

    Returns
    -------
    Timings

    Raises
    ------
    ArgumentError
        No rivals, or an option out of range.
    UnsupportedError
        A CUDA graph is asked for on a CPU.

    Examples
    --------
    >>> x = torch.ones(100)
    >>> t = measure({"sum": x.sum, "exp": x.exp}, budget_s=0.01, min_rounds=3)
    >>> list(t.frame["label"]), t.ratio("exp", "sum").units == len(t.samples)
    (['sum', 'exp'], True)
    """
    _check(rivals, budget_s, precision, min_rounds, max_rounds, warmup, rotate, level)
    kind = torch.device(device).type
    if cuda_graph and kind != "cuda":
        raise UnsupportedError("a CUDA graph needs a CUDA device", got=device)
    with contextlib.ExitStack() as stack:
        if kind == "cuda":
            stack.enter_context(torch.cuda.device(device))
            sampler: _Sampler = _CudaSampler()
        else:
            sampler = _Sampler(clock)
        stack.enter_context(_no_collection())
        calls, warmed = {}, {}
        for label, rival in rivals.items():
            one = _rotating(rival, rotate)
            try:
                first, count, each = _warm_up(sampler, one, warmup, budget_s / 10, clock)
                n = min(max(math.ceil(_SAMPLE_S[kind] / max(each, 1e-9)), 1), _MOST_CALLS)
                if cuda_graph:
                    one, n = _captured(one, n, rotate or 1)
            except Exception as e:
                e.add_note(f"while warming up {label!r}")
                raise
            calls[label] = (one, n, cuda_graph)
            warmed[label] = Rival(
                label, count, n, first, (bytes or {}).get(label), (flops or {}).get(label)
            )
        samples, stopped = _rounds(
            sampler, calls, budget_s, precision, min_rounds, max_rounds, seed, level, clock
        )
    index = pd.MultiIndex.from_product([[0], range(len(samples))], names=["sitting", "round"])
    frame = pd.DataFrame(samples, columns=list(rivals), index=index)
    return Timings(frame, warmed, stopped, device, precision, level, seed)


def _check(rivals: Mapping[str, Any], budget_s: float, precision: float, min_rounds: int,
           max_rounds: int, warmup: int, rotate: int | None, level: float) -> None:  # fmt: skip
    if not rivals:
        raise ArgumentError("rivals", got=dict(rivals), expected="at least one callable")
    for label, rival in rivals.items():
        if not callable(rival):
            raise ArgumentError(f"rival {label!r}", got=type(rival).__name__, expected="callable")
    for name, value, good, expected in (
        ("budget_s", budget_s, budget_s >= 0, "seconds, 0 or more"),
        ("precision", precision, precision > 0, "more than 0"),
        ("min_rounds", min_rounds, min_rounds >= 1, "at least 1"),
        ("max_rounds", max_rounds, max_rounds >= min_rounds, "min_rounds or more"),
        ("warmup", warmup, warmup >= 0, "0 or more"),
        ("rotate", rotate, rotate is None or rotate >= 1, "at least 1"),
        ("level", level, 0 < level < 1, "between 0 and 1"),
    ):
        if not good:
            raise ArgumentError(name, got=value, expected=expected)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection between samples: it would strike rivals at random."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _rotating(rival: Callable[..., object], rotate: int | None) -> Callable[[], object]:
    if rotate is None:
        return rival
    turn = -1

    def one() -> object:
        nonlocal turn
        turn = (turn + 1) % rotate
        return rival(turn)

    return one


class _Sampler:
    """Seconds of a call by the clock, as the mean of some calls in a row."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __call__(self, call: Callable[[], object], n: int) -> float:
        start = self.clock()
        for _ in range(n):
            call()
        return (self.clock() - start) / n


class _CudaSampler(_Sampler):
    """The same by CUDA events on the current stream, from an idle device."""

    def __init__(self) -> None:
        super().__init__(time.perf_counter)
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, call: Callable[[], object], n: int) -> float:
        torch.cuda.synchronize()
        self.start.record()
        for _ in range(n):
            call()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1e3 / n


def _warm_up(
    sampler: _Sampler, call: Callable[[], object], least: int, limit_s: float, clock: Clock
) -> tuple[float, int, float]:
    """(first call, calls made, a typical call): until calls get no faster, or the time is up."""
    start = clock()
    first = sampler(call, 1)
    times = [first]
    while len(times) < max(least, 1) or not (
        (len(times) >= 4 and min(times[-3:]) >= 0.95 * min(times[:-3]))
        or clock() - start >= limit_s
    ):
        times.append(sampler(call, 1))
    return first, len(times), float(np.median(times[-3:]))


def _captured(call: Callable[[], object], n: int, rotate: int) -> tuple[Callable[[], object], int]:
    """Some calls as one CUDA graph, every set of buffers equally often."""
    n = rotate * max(1, -(-min(n, _MOST_CAPTURED) // rotate))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(rotate):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(n):
            call()
    return graph.replay, n


def _rounds(
    sampler: _Sampler,
    calls: Mapping[str, tuple[Callable[[], object], int, bool]],
    budget_s: float, precision: float, min_rounds: int, max_rounds: int,
    seed: int, level: float, clock: Clock,
) -> tuple[np.ndarray, str]:  # fmt: skip
    from tqdm import tqdm

    rng = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    todo = list(calls.values())
    check, start = min_rounds, clock()
    # disable=None: a bar in a terminal only
    with tqdm(total=max_rounds, disable=None, leave=False, unit="round") as bar:
        while True:
            row = np.empty(len(todo))
            for j in rng.permutation(len(todo)):
                call, n, replayed = todo[j]
                row[j] = sampler(call, 1) / n if replayed else sampler(call, n)
            found.append(row)
            bar.update()
            n_rounds = len(found)
            if n_rounds < min_rounds:
                continue
            spent = clock() - start >= budget_s
            last = spent or n_rounds >= max_rounds
            # Looking at every round would stop at a lucky one: look ever more rarely.
            if n_rounds >= check or last:
                if _precise(np.array(found), precision, seed, level):
                    return np.array(found), "precise"
                check = math.ceil(1.3 * n_rounds)
            if last:
                return np.array(found), "budget" if spent else "rounds"


def _precise(samples: np.ndarray, precision: float, seed: int, level: float) -> bool:
    if len(samples) < 2:
        return False
    if samples.shape[1] == 1:
        return median_interval(samples[:, 0], level, seed).half_width <= precision
    base = samples[:, 0]
    for other in samples.T[1:]:
        r = ratio([other], [base], level, seed)
        if (r.high - r.low) / 2 > precision * r.value:
            return False
    return True
