"""Fresh feeds like those of a comparison, and the tolerances that runs on them give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from roundoff.compare import CalibratedTolerance, Calibration
from roundoff.errors import ArgumentError, RoundoffError

__all__ = ["LEAST_FEEDS", "alike", "calibrate", "check_calibration", "varied"]

#: Fewest feeds that a calibration takes.
LEAST_FEEDS = 16
#: A tensor of fewer values, or of fewer different ones, is a setting or a mask: it stays.
_FEW = 16
#: Steps between the quantiles that are drawn from.
_QUANTILES = 1 << 14
#: Outputs this many times larger or smaller than those of the feeds given are of another kind.
_OTHER_SIZE = 4.0

#: Runs one feed and gives, for each output, its results to compare: (got, expected) pairs.
Run = Callable[[Mapping[str, Any]], list[list[tuple[Any, Any]]]]


def check_calibration(value: Any) -> None:
    """Raise unless it is None, a number of feeds or a sequence of feeds."""
    if value is None:
        return
    if isinstance(value, int) and not isinstance(value, bool):
        if value != 0 and value < LEAST_FEEDS:
            raise ArgumentError(
                "calibration",
                got=value,
                expected=f"0, or at least {LEAST_FEEDS} feeds",
                hint="299 need no assumption about the tail of the differences",
            )
        return
    listed = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if not listed or not all(isinstance(feeds, Mapping) for feeds in value):
        raise ArgumentError(
            "calibration",
            got=type(value).__name__,
            expected="a number of feeds, or a sequence of mappings of input names to tensors",
        )
    if len(value) < LEAST_FEEDS - 1:
        raise ArgumentError(
            "calibration", got=f"{len(value)} feeds", expected=f"at least {LEAST_FEEDS - 1}"
        )


def alike(
    feeds: Mapping[str, Any], tables: Iterable[str], count: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Feeds whose values are drawn from those of *feeds*, each independently.

    Floats are drawn from their quantiles, and between neighbours: they have the same range, signs
    and share of zeros. Integers that index a table (*tables* names them) are drawn from those
    given. Everything else stays: bools, other integers, floats with few different values or with
    an infinity or NaN (masks). What relates one element to another is lost.
    """
    generator = torch.Generator().manual_seed(seed)
    values = {name: _values(value, name in tables) for name, value in feeds.items()}
    for _ in range(count):
        drawn = {}
        for name, value in feeds.items():
            known = values[name]
            drawn[name] = value if known is None else _draw(known, value, generator)
        yield drawn


def varied(feeds: Mapping[str, Any], tables: Iterable[str]) -> list[str]:
    """Names of the feeds that :func:`alike` draws."""
    return [name for name, value in feeds.items() if _values(value, name in tables) is not None]


def _values(value: Any, indexes: bool) -> torch.Tensor | None:
    """The values to draw from, all as often; None where the feed stays as it is."""
    if not isinstance(value, torch.Tensor) or value.is_complex() or not value.numel():
        return None
    if not value.is_floating_point():
        return value.reshape(-1).cpu() if indexes else None
    wide = value.detach().reshape(-1).cpu().to(torch.float64)
    if len(wide) < _FEW or not bool(wide.isfinite().all()):
        return None
    ordered = wide.sort().values
    if 1 + int((ordered.diff() != 0).sum()) < _FEW:
        return None
    # Between the sorted values, so that few of them give many, and many fit in a core's cache.
    place = torch.linspace(0, len(ordered) - 1, _QUANTILES + 1, dtype=torch.float64)
    below = place.long().clamp_(max=len(ordered) - 2)
    between = ordered[below] + (ordered[below + 1] - ordered[below]) * (place - below)
    return between.to(value.dtype)


def _draw(known: torch.Tensor, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    chosen = torch.randint(0, len(known), like.shape, generator=generator)
    return known[chosen].to(like.device)


def calibrate(
    run: Run,
    names: Sequence[str],
    first: list[list[tuple[Any, Any]]],
    feeds: Iterable[Mapping[str, Any]],
    drawn_alike: bool,
) -> dict[str, CalibratedTolerance]:
    """A tolerance for each output, from the results of the comparison and of more feeds.

    Parameters
    ----------
    run : callable
        From feeds to (got, expected) pairs of each output.
    names : sequence of str
        Of the outputs.
    first : list
        What *run* gave for the feeds of the comparison itself.
    feeds : iterable of mappings
        More feeds.
    drawn_alike : bool
        Whether these were drawn from the values of the comparison's feeds, which are then held
        against them.
    """
    collected = [Calibration() for _ in names]
    _add(collected, first)
    done = 0
    try:
        for fed in feeds:
            _add(collected, run(fed))
            done += 1
    except RoundoffError as error:
        reason = f"the model fails on feed {done + 1} of the calibration: {error.message}"
        return {name: CalibratedTolerance(reason=reason) for name in names}
    # Any of the floating outputs may fail a feed.
    floating = sum(calibration.info is not None for calibration in collected)
    share = CalibratedTolerance().false_alarms / max(floating, 1)
    found = {}
    for name, calibration in zip(names, collected, strict=True):
        tolerance = calibration.tolerance(share)
        if drawn_alike and tolerance.found:
            reason = _unlike(calibration)
            if reason:
                tolerance = dataclasses.replace(
                    CalibratedTolerance(reason=reason),
                    feeds=tolerance.feeds,
                    differ=tolerance.differ,
                )
        found[name] = tolerance
    return found


def _add(collected: list[Calibration], outputs: list[list[tuple[Any, Any]]]) -> None:
    """Of one feed: where an output has several pairs, the one that differs most counts."""
    for calibration, pairs in zip(collected, outputs, strict=True):
        calibration.add_worst(pairs)


def _unlike(calibration: Calibration) -> str:
    """Why the feeds of the comparison are not of the kind that was drawn; empty where they are."""
    own, *others = calibration.scores
    ratios = [size / calibration.rms for size in calibration.sizes[1:] if calibration.rms]
    lost = (
        "their values relate to each other in a way that drawing loses: give feeds of yours, "
        "calibration=[feeds, …]"
    )
    if ratios and not 1 / _OTHER_SIZE <= sorted(ratios)[len(ratios) // 2] <= _OTHER_SIZE:
        return f"outputs have another size on feeds drawn from the values given; {lost}"
    if own > 2 * (1 + max(others)):
        return f"the feeds given differ more than those drawn from their values; {lost}"
    return ""
