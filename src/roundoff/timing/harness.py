"""The rounds of a measurement: which callable is timed when, and how often."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from roundoff.arguments import check_device, check_number, check_whole
from roundoff.errors import ArgumentError, UnsupportedError

from .result import Timings

__all__ = ["measure", "no_collection"]

Clock = Callable[[], float]
#: Seconds of one of so many calls.
Sample = Callable[[Callable[[], object], int], float]
#: A sample shorter than this is mostly the clock's own: fast calls are repeated to fill it.
_SAMPLE_S = {"cpu": 2e-4, "cuda": 5e-4}
_MOST_CALLS = 4096
_MOST_CAPTURED = 256


def measure(
    callables: Mapping[str, Callable[..., object]],
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
    clock: Clock = time.perf_counter,
) -> Timings:
    """Time callables beside each other.

    Every round times each callable once, in a new random order, so that a change of the machine's
    speed affects all of them. Rounds go on until the ratio of each to the first, the baseline, is
    known to within *precision*, or the budget is spent. A callable must do its work in full: on
    CUDA on the current stream, or synchronised before it returns.

    Parameters
    ----------
    callables : mapping
        Label -> callable; the first is the baseline. Called without arguments, or with *rotate*
        with the number of the set of buffers to use.
    budget_s : float
        Seconds for the rounds of all callables together; at least *min_rounds* are made.
    precision : float
        Half the width of an interval that is narrow enough, relative to the estimate.
    min_rounds, max_rounds : int
        Smallest and largest number of rounds.
    warmup : int
        Smallest number of calls before the first round; more follow while calls still get faster.
    seed : int
        Of the orders and of the bootstrap.
    device : str
        ``"cpu"``: wall time. ``"cuda"``, ``"cuda:1"``: CUDA events on the current stream.
    cuda_graph : bool
        Capture the calls of each in a CUDA graph and time replays: without launch overhead.
    rotate : int, optional
        Sets of buffers to rotate over, so that each call finds a cold cache: ``timing.copies``.
    bytes : mapping, optional
        Label -> bytes that a call moves.
    clock : callable
        Seconds: ``time.process_time`` counts what the process computes.

    Returns
    -------
    Timings

    Raises
    ------
    ArgumentError
        No callables, bytes of none of them, or a number of rounds or calls out of range.
    UnsupportedError
        This machine has no such device, or a CUDA graph is asked for on a CPU.

    Examples
    --------
    >>> import torch
    >>> from roundoff.timing import measure
    >>> x = torch.ones(100)
    >>> t = measure({"sum": x.sum, "exp": x.exp}, budget_s=0.01, min_rounds=3)
    >>> list(t.frame["label"]), t.ratio("sum", "sum").value
    (['sum', 'exp'], 1.0)
    """
    if not isinstance(callables, Mapping) or not callables:
        raise ArgumentError("callables", got=repr(callables)[:80], expected="{label: function}")
    for label, function in callables.items():
        if not callable(function):
            raise ArgumentError(
                f"{label!r} is not callable", got=type(function).__name__, expected="a function"
            )
    check_number("budget_s", budget_s, 0)
    check_number("precision", precision, 0)
    check_whole("seed", seed, 0)
    moved = bytes or {}
    if unknown := [label for label in moved if label not in callables]:
        raise ArgumentError(
            "bytes of no callable", got=str(unknown), expected=f"some of {list(callables)}"
        )
    check_whole("min_rounds", min_rounds, 1)
    check_whole("max_rounds", max_rounds, min_rounds)
    check_whole("warmup", warmup, 0)
    if rotate is not None:
        check_whole("rotate", rotate, 1)
    kind = check_device(device).type
    if cuda_graph and kind != "cuda":
        raise UnsupportedError("a CUDA graph needs a CUDA device", got=device)
    on_device = torch.cuda.device(device) if kind == "cuda" else contextlib.nullcontext()
    with on_device, no_collection():
        sample = _by_events() if kind == "cuda" else _by_clock(clock)
        timed = []
        for label, function in callables.items():
            call = _rotating(function, rotate)
            try:
                each = _warm_up(sample, call, warmup, budget_s / 10, clock)
                n = min(max(math.ceil(_SAMPLE_S[kind] / max(each, 1e-9)), 1), _MOST_CALLS)
                if cuda_graph:
                    call, n = _captured(call, n, rotate or 1)
            except Exception as e:
                e.add_note(f"while warming up {label!r}")
                raise
            timed.append((call, n))

        rng, samples = np.random.default_rng(seed), list[np.ndarray]()
        check, start = min_rounds, clock()
        # disable=None: a bar in a terminal only
        with tqdm(total=max_rounds, disable=None, leave=False, unit="round") as bar:
            while True:
                row = np.empty(len(timed))
                for j in rng.permutation(len(timed)):
                    call, n = timed[j]
                    row[j] = sample(call, 1) / n if cuda_graph else sample(call, n)
                samples.append(row)
                bar.update()
                last = clock() - start >= budget_s or len(samples) >= max_rounds
                # A check after every round would stop at a lucky one: check ever more rarely.
                if len(samples) >= check or (last and len(samples) >= min_rounds):
                    frame = pd.DataFrame(np.array(samples), columns=list(callables))
                    timings = Timings((frame,), precision, seed, moved)
                    if timings.is_precise or last:
                        return timings
                    check = math.ceil(1.3 * len(samples))


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected within: it would slow some samples down at random."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _rotating(function: Callable[..., object], rotate: int | None) -> Callable[[], object]:
    if rotate is None:
        return function
    turns = itertools.cycle(range(rotate))
    return lambda: function(next(turns))


def _by_clock(clock: Clock) -> Sample:
    """Seconds of a call by the clock, as the mean of some calls in a row."""

    def sample(call: Callable[[], object], n: int) -> float:
        start = clock()
        for _ in range(n):
            call()
        return (clock() - start) / n

    return sample


def _by_events() -> Sample:
    """The same by CUDA events on the current stream, from an idle device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(call: Callable[[], object], n: int) -> float:
        torch.cuda.synchronize()
        start.record()
        for _ in range(n):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / n

    return sample


def _warm_up(
    sample: Sample, call: Callable[[], object], least: int, limit_s: float, clock: Clock
) -> float:
    """Seconds of a typical call, once calls get no faster or the time is up."""
    start = clock()
    times = [sample(call, 1)]
    while len(times) < least or not (
        (len(times) >= 4 and min(times[-3:]) >= 0.95 * min(times[:-3]))
        or clock() - start >= limit_s
    ):
        times.append(sample(call, 1))
    return float(np.median(times[-3:]))


def _captured(call: Callable[[], object], n: int, rotate: int) -> tuple[Callable[[], object], int]:
    """About *n* calls as one CUDA graph, every set of buffers equally often; and their number."""
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
