"""A tolerance for two computations of one thing, from their differences on many inputs.

A difference is counted in *steps*: \\|a − b\\| / (eps (\\|b\\| + R)), where eps is that of the
coarser type and R the root mean square of b on the first input. One step covers one unit in the
last place of b. The score of an input is its largest number of steps. A tolerance of c steps is
``rtol = c eps`` and ``atol = c eps R``, for ``|a − b| <= atol + rtol |b|``.

From the scores s_1 … s_n of n inputs, c is chosen so that a fresh input of the same kind exceeds it
with a probability of at most p:

- It is at least 1 + max s. Where the inputs can be exchanged for each other, a fresh one exceeds
  the largest of n with a probability of 1 / (n + 1), whatever the distribution: n + 1 ≥ 1 / p
  inputs need no other assumption.
- With fewer, log(1 + s) is taken to have an exponential tail, so that 1 + s may have a power law's.
  Of the k = n / 2 largest let b be the mean of log(1 + s) − u, u being the largest of the
  others. A fresh score then exceeds exp(u + y) with probability (k / n) (1 + y / (k b))^(−k), in
  which the error of b is counted; y is chosen for 0.3 p, since the tail is an assumption. A kind
  of input that is rare and far off, and of which none was seen, is against it.
- It is at least 2: each result may be a unit in the last place from the truth.

The 1 in 1 + s is one more last place: results are multiples of it, so that a score may jump by one
where no input of the calibration did.
"""

from __future__ import annotations

import dataclasses
import decimal
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from roundoff.arguments import check_flag
from roundoff.describe import TypedTensor
from roundoff.dtypes import DType
from roundoff.errors import ArgumentError

from .pieces import float64_pieces, same_shape, typed_tensor
from .scaled import real_type

#: Share of fresh inputs that may exceed a tolerance.
FALSE_ALARMS = 1 / 300
#: Fewest inputs whose scores show a tail.
LEAST = 16
#: Fewest steps of a tolerance.
_FLOOR = 2.0
#: Part of the false alarms for which an assumed tail is extrapolated.
_CAREFUL = 0.3
#: Largest margin of a tolerance whose inputs are many enough without one.
_MARGIN = 2.0
#: A tolerance this many times all scores is made by the assumed tail, not by the inputs.
_STRETCHED = 10.0
#: Steps beyond which a type of few digits says nothing.
_STEPS = 16


@dataclasses.dataclass(frozen=True)
class CalibratedTolerance:
    """The tolerance of one tensor: see :func:`~roundoff.compare.calibrated_tolerance`.

    Attributes
    ----------
    rtol : float
        For ``|a − b| <= atol + rtol |b|``, as in NumPy and torch; NaN where there is none. A fault
        that changes no element by more than this share of the output's root mean square is not
        seen; one of a few times that is.
    atol : float
        The same; NaN where there is none.
    feeds : int
        Number of inputs that it was calibrated on.
    differ : int
        How many of them gave different bits.
    false_alarms : float
        Probability, at most, with which a fresh input of the same kind exceeds it.
    extrapolated : bool
        Whether a tail was assumed: false with 1 / false_alarms inputs or more.
    reason : str
        Why there is no tolerance; empty where there is one.

    Examples
    --------
    >>> none = CalibratedTolerance(reason="outputs are int64")
    >>> none.found, str(none)
    (False, 'no tolerance can be defended: outputs are int64')
    """

    rtol: float = math.nan
    atol: float = math.nan
    feeds: int = 0
    differ: int = 0
    false_alarms: float = FALSE_ALARMS
    extrapolated: bool = False
    reason: str = ""

    @property
    def found(self) -> bool:
        """Whether there is a tolerance."""
        return not self.reason

    def allows(self, got: Any, expected: Any, *, any_scale: bool = False) -> bool:
        """Whether every element of *got* is within the tolerance of *expected*.

        Infinities and NaN must be the same in both.

        Parameters
        ----------
        got, expected : tensor
            Two results of one input.
        any_scale : bool, default False
            Take ``rtol`` × the root mean square of *expected* for ``atol``. The outputs may then
            be larger or smaller than those of the calibration. It needs a tensor of many elements:
            the root mean square of a single number near zero is near zero, too.

        Raises
        ------
        ArgumentError
            There is no tolerance, or an argument is no tensor.
        DtypeError
            An argument has no floating type.
        ShapeError
            The shapes differ.
        """
        check_flag("any_scale", any_scale)
        if not self.found:
            raise ArgumentError("no tolerance can be defended", got=self.reason)
        a, b = typed_tensor(got, "got"), typed_tensor(expected, "expected")
        least = max(real_type(t.info).tiny * t.info.eps for t in (a, b))
        same_shape(a.tensor, b.tensor)
        atol = max(self.rtol * _rms(b.tensor), least) if any_scale else self.atol
        for one, other in float64_pieces(a.tensor, b.tensor):
            allowed = (one - other).abs() <= atol + self.rtol * other.abs()
            same = (one == other) | (one.isnan() & other.isnan())
            if not bool((same | (allowed & other.isfinite())).all()):
                return False
        return True

    def __str__(self) -> str:
        if not self.found:
            return f"no tolerance can be defended: {self.reason}"
        rate = f"1 fresh input in {round(1 / self.false_alarms)} may fail"
        if self.extrapolated:
            rate += ", if differences have a power law's tail or a lighter one"
        return (
            f"rtol={self.rtol:.2g}, atol={self.atol:.2g}. "
            f"Calibrated on {self.feeds} inputs: {rate}. A fault that moves every element by "
            f"less than {self.rtol:.2g} of the RMS passes. The tolerance holds for inputs of these "
            "ranges, signs and shapes. It does not hold for more cancellation, a larger "
            "|mean| / std before a normalisation, or underflow."
        )


class Calibration:
    """Collects the differences of one tensor over many inputs.

    Examples
    --------
    >>> import numpy as np
    >>> rng, calibration = np.random.default_rng(0), Calibration()
    >>> for _ in range(32):
    ...     x = rng.standard_normal((64, 100)).astype("float32")
    ...     calibration.add([(x.sum(1), x.astype("float64").sum(1).astype("float32"))])
    >>> calibration.tolerance().differ
    32
    """

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.sizes: list[float] = []
        self.info: DType | None = None
        self.rms = 0.0
        self._reason = ""

    def add(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Take in pairs of results of one input: the one that differs most counts."""
        typed = [(typed_tensor(a, "a result"), typed_tensor(b, "a result")) for a, b in pairs]
        if typed[0][0].tensor.numel() or typed[0][1].tensor.numel():
            scores = [self._score(a, b) for a, b in typed]
            self.scores.append(max(scores))
            self.sizes.append(_rms(typed[0][1].tensor))

    def _score(self, a: TypedTensor, b: TypedTensor) -> float:
        """Largest difference in steps; infinities and NaN in the same place differ by nothing."""
        same_shape(a.tensor, b.tensor)
        info = min(a.info, b.info, key=lambda i: i.precision)
        if not (a.info.is_float and b.info.is_float and info.precision > 1):
            names = " and ".join(sorted({a.info.name, b.info.name}))
            self._reason = f"the results are {names}: count the elements that differ"
            return 0.0
        if self.info is None:
            self.info, self.rms = info, _rms(b.tensor)
        elif self.info != info:
            self._reason = f"some results are {self.info.name}, others {info.name}"
        most, finite = 0.0, 0
        for one, other in float64_pieces(a.tensor, b.tensor):
            same = (one == other) | (one.isnan() & other.isnan())
            fits = one.isfinite() & other.isfinite()
            finite += int(fits.sum())
            if not bool((same | fits).all()):
                self._reason = "one result is NaN or infinite where the other is not"
            steps = (one - other).abs_().div_(other.abs_().add_(self.rms).mul_(info.eps))
            steps.masked_fill_(same | ~fits, 0.0)
            most = max(most, float(steps.amax()))
        if not finite:
            self._reason = "no result is finite"
        return most

    def tolerance(self, false_alarms: float = FALSE_ALARMS) -> CalibratedTolerance:
        """What the inputs so far give; *false_alarms* is the share of fresh ones that may fail."""
        n, differ = len(self.scores), sum(s > 0 for s in self.scores)
        steps, reason = 0.0, self._reason
        extrapolated = n + 1 < 1 / false_alarms
        if not reason and self.info is None:
            reason = "there are no results"
        elif not reason and n < LEAST:
            reason = f"{n} inputs: at least {LEAST} show a tail"
        elif not reason:
            steps, reason = self._steps(false_alarms, extrapolated)
        if reason or self.info is None:
            return CalibratedTolerance(
                feeds=n, differ=differ, false_alarms=false_alarms, reason=reason
            )
        part = steps * self.info.eps
        # The latter is the spacing of the subnormal numbers.
        atol = max(part * self.rms, self.info.tiny * self.info.eps)
        return CalibratedTolerance(
            _rounded_up(part), _rounded_up(atol), n, differ, false_alarms, extrapolated
        )

    def _steps(self, false_alarms: float, extrapolated: bool) -> tuple[float, str]:
        """Steps that a fresh input exceeds as rarely, and why they make no tolerance."""
        assert self.info is not None
        least = 1 + max(self.scores)
        tail = _tail(self.scores, _CAREFUL * false_alarms)
        if not extrapolated:  # no assumption is needed, and the tail is only a margin
            tail = min(tail, _MARGIN * least)
        steps = max(_FLOOR, least, tail)
        stretched = steps > max(_FLOOR, _STRETCHED * least)
        eps, told = self.info.eps, least if stretched else steps
        # Beyond this a difference is no rounding, or the tolerance hides every fault.
        if not told * eps <= max(math.sqrt(eps), _STEPS * eps):
            reason = f"it would be {told * eps:.2g} of the output's RMS, more than rounding alone "
            if self.rms >= self.info.tiny / eps:
                return steps, reason + "explains without cancellation"
            where = f"of RMS {self.rms:.2g}, underflow in {self.info.name}"
            return steps, reason + f"explains: the results, {where}"
        if stretched:
            return steps, (
                f"the largest of the {len(self.scores)} inputs differs by {least - 1:.2g} last "
                f"places, and their tail reaches {steps:.2g}: calibrate on "
                f"{math.ceil(1 / false_alarms)} inputs"
            )
        return steps, ""


def _tail(scores: list[float], p: float) -> float:
    """What 1 + a fresh score exceeds with probability p, by the tail of the larger half."""
    ordered = sorted((1 + s for s in scores), reverse=True)
    k, n = len(ordered) // 2, len(ordered)
    mean = sum(math.log(s / ordered[k]) for s in ordered[:k]) / k
    y = k * mean * ((k / (n * p)) ** (1 / k) - 1)
    return ordered[k] * math.exp(min(y, 700.0))


def _rounded_up(value: float) -> float:
    """The smallest number of two decimal digits that is not below *value*."""
    # The shortest decimal that reads as this float: the float 0.04 itself is a little above 0.04.
    context = decimal.Context(prec=2, rounding=decimal.ROUND_CEILING)
    return float(context.plus(decimal.Decimal(repr(float(value)))))


def _rms(tensor: torch.Tensor) -> float:
    """Of the finite elements; their squares are those of fractions of the largest one."""
    largest, squares, count = 0.0, 0.0, 0
    for (piece,) in float64_pieces(tensor):
        finite = piece[piece.isfinite()].abs()
        largest = max(largest, float(finite.max()) if len(finite) else 0.0)
    for (piece,) in float64_pieces(tensor):
        finite = piece[piece.isfinite()]
        squares += float((finite / (largest or 1.0)).square().sum())
        count += len(finite)
    return largest * math.sqrt(squares / max(count, 1))


def calibrated_tolerance(pairs: Iterable[tuple[Any, Any]]) -> CalibratedTolerance:
    """A tolerance for two computations of one tensor, from both results on many inputs.

    At most one fresh input in 300 fails. The floor of ``rtol`` is 2 eps: a unit in the last place
    of each result. With fewer than 299 inputs the tail of the differences is assumed to be a power
    law's, or lighter, and extrapolated. Where no tolerance can be defended, ``reason`` says why:
    infinities or NaN on one side, integers, a difference beyond what rounding explains, or too few
    inputs for their spread.

    It holds for inputs like those given, on these two implementations: of the same ranges, signs
    and shapes. More cancellation, a larger \\|mean\\| / std before a LayerNorm, and underflow need
    a calibration of their own. It says nothing about which of the two is right.

    Its two error rates, for twelve models in float32, float16 and bfloat16: of 300 fresh inputs of
    each none fails. Of 21 faults all are caught in float32: a scale of 0.001 %, an epsilon of 1e-6
    for 1e-5 and TF32 included. In float16 two change no bit (a scale of 0.001 %, operands cut to 10
    bits). Five more pass, all below 0.2 % of the output: a scale of 0.1 %, three epsilons, tanh
    GELU for erf. A scale of 1 % and int8 weights are caught. In bfloat16 these two pass, too, as
    do one element off by 1 % and a mean over n − 1; ten faults of 8 % and more are caught.

    Parameters
    ----------
    pairs : iterable of (tensor, tensor)
        Both results on one input after the other, at least 16; of one shape within a pair.

    Raises
    ------
    ArgumentError
        *pairs* holds something else.
    ShapeError
        The shapes of a pair differ.

    Examples
    --------
    >>> import torch
    >>> from roundoff.compare import calibrated_tolerance
    >>> draws = [torch.randn(64, 256) for _ in range(32)]
    >>> w = torch.randn(256, 8)
    >>> found = calibrated_tolerance((x @ w, (x.double() @ w.double()).float()) for x in draws)
    >>> found.found, 2.0**-23 <= found.rtol < 1e-4
    (True, True)
    >>> x = torch.randn(64, 256)
    >>> found.allows(x @ w, x @ w * 1.01)
    False
    """
    if not isinstance(pairs, Iterable):
        raise ArgumentError("pairs", got=type(pairs).__name__, expected="pairs of results")
    calibration = Calibration()
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ArgumentError(
                "a pair", got=type(pair).__name__, expected="two results for each input"
            )
        calibration.add([(pair[0], pair[1])])
    return calibration.tolerance()
