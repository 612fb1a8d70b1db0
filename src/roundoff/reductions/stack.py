"""Two orders of the same reductions, followed through a stack of layers.

The network is the bare skeleton of a transformer's feed-forward path: every layer normalises its
input, multiplies it by a matrix, clips it at zero, multiplies it by a second matrix and adds the
result to its input. Nothing but the order in which the normalisation adds its two sums differs
between the runs that are compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .data import quantize, round_to
from .spread import EPSILON, moments

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Stack", "build_stack", "layer_norm", "layer_norm_census", "run_stack", "stack_study"]

Array = npt.NDArray[Any]


def layer_norm(x: Array, order: npt.NDArray[np.intp] | None, dtype: Any) -> Array:
    """Normalise each row of *x*; its two sums add the row's values in *order*.

    Parameters
    ----------
    x : ndarray of float64 or float32, shape (rows, width)
        Values of *dtype*.
    order : ndarray of intp, shape (width,), or None
        A permutation; None is the given order.
    dtype : any
        Type to which the result is rounded; it is held in the type of *x*.
    """
    mu, sd = moments(x if order is None else np.take(x, order, axis=1))
    return round_to((x - mu[:, np.newaxis]) / (sd[:, np.newaxis] + EPSILON), dtype)


@dataclasses.dataclass(frozen=True)
class Stack:
    """Weights and input of the network, in float64 before they are rounded to a type.

    Attributes
    ----------
    x : numpy.ndarray
        Input, of shape (rows, width).
    up : numpy.ndarray
        First matrices, of shape (layers, width, width).
    down : numpy.ndarray
        Second matrices, of the same shape.
    """

    x: npt.NDArray[np.float64]
    up: npt.NDArray[np.float64]
    down: npt.NDArray[np.float64]


def build_stack(rows: int, width: int, layers: int, seed: int = 0) -> Stack:
    """Normal input and weights; each layer adds about as much variance as the input has."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width))
    # Clipping at zero halves the mean square: the second matrix makes up for it.
    up = rng.standard_normal((layers, width, width)) / np.sqrt(width)
    down = rng.standard_normal((layers, width, width)) * np.sqrt(2 / width)
    return Stack(x, up, down)


def run_stack(
    stack: Stack, dtype: Any, order: npt.NDArray[np.intp] | None, *, truth: bool = False
) -> Iterator[Array]:
    """State after each layer.

    Parameters
    ----------
    stack : Stack
        Rounded to *dtype* first.
    dtype : any
        Every operation's result is rounded to it; 16-bit types compute in float32.
    order : ndarray of intp or None
        Order of the sums in the normalisation.
    truth : bool
        Compute in float64 on the same rounded input and weights, and round nothing.

    Yields
    ------
    ndarray, shape (rows, width)
        One array, updated in place: copy it to keep it.
    """
    kept = "float64" if truth else dtype

    def rounded(values: Array) -> Array:
        held = quantize(values, dtype)
        return held.astype(np.float64) if truth else held

    x = rounded(stack.x)
    for up, down in zip(stack.up, stack.down, strict=True):
        hidden = round_to(layer_norm(x, order, kept) @ rounded(up), kept)
        np.maximum(hidden, 0, out=hidden)
        x = round_to(x + round_to(hidden @ rounded(down), kept), kept)
        yield x


def stack_study(stack: Stack, dtype: Any, order: npt.NDArray[np.intp]) -> pd.DataFrame:
    """Two orders of the same stack, against each other and against float64, layer by layer.

    Parameters
    ----------
    stack : Stack
        The network.
    dtype : any
        Type of weights, input and results.
    order : ndarray of intp, shape (width,)
        The other order; the first is the given one.

    Returns
    -------
    pandas.DataFrame
        A row a layer: layer (from 1), differing (share of values whose bits differ between the
        two orders), between (root mean square of their difference), error (root mean square of
        the error of the given order), error_other (of the other), largest_between and
        largest_error. All but the share are divided by the root mean square of the true state.
    """
    import pandas as pd

    rows = []
    runs = zip(
        run_stack(stack, dtype, None),
        run_stack(stack, dtype, order),
        run_stack(stack, dtype, None, truth=True),
        strict=True,
    )
    for layer, (given, other, true) in enumerate(runs, start=1):
        size = _rms(true)
        gap = np.subtract(given, other, dtype=np.float64)
        error, error_other = given - true, other - true
        rows.append(
            {
                "layer": layer,
                "differing": float(np.mean(given != other)),
                "between": _rms(gap) / size,
                "error": _rms(error) / size,
                "error_other": _rms(error_other) / size,
                "largest_between": float(np.max(np.abs(gap))) / size,
                "largest_error": float(np.max(np.abs(error))) / size,
            }
        )
    return pd.DataFrame(rows)


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def layer_norm_census(
    rows: int, width: int, dtype: Any, order: npt.NDArray[np.intp], *, seed: int = 0
) -> dict[str, float]:
    """How much of one layer norm changes when its sums add the same values in another order.

    The rows are standard normal, drawn in blocks from one generator, and never held at once.

    Returns
    -------
    dict
        rows, and the shares: mean (of the rows, mean with other bits), sd (the same for the
        standard deviation), row (of the rows, at least one value of the result with other bits),
        value (of all values of the result).
    """
    rng = np.random.default_rng(seed)
    counts = np.zeros(4, np.int64)
    block = max(1, (1 << 20) // width)
    for start in range(0, rows, block):
        drawn = rng.standard_normal((min(block, rows - start), width), dtype=np.float32)
        x = quantize(drawn, dtype)
        mu, sd = moments(x)
        mu_other, sd_other = moments(np.take(x, order, axis=1))
        changed = np.flatnonzero((mu != mu_other) | (sd != sd_other))
        x = x[changed]  # the other rows cannot change
        one, other = (
            round_to((x - m[changed, np.newaxis]) / (s[changed, np.newaxis] + EPSILON), dtype)
            for m, s in ((mu, sd), (mu_other, sd_other))
        )
        differ = one != other
        counts += (
            np.count_nonzero(mu != mu_other),
            np.count_nonzero(sd != sd_other),
            np.count_nonzero(differ.any(axis=1)),
            np.count_nonzero(differ),
        )
    shares = counts / (rows, rows, rows, rows * width)
    return {"rows": rows, **dict(zip(("mean", "sd", "row", "value"), shares.tolist(), strict=True))}
