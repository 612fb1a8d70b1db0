"""The values to add, rounded to a type, and the orders in which they are added."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from roundoff.arguments import check_choice, check_whole
from roundoff.dtypes import dtype_info, onnx_dtype_to_np_dtype
from roundoff.errors import ArgumentError, DtypeError, ShapeError

__all__ = [
    "DISTRIBUTIONS",
    "DTYPES",
    "arrange",
    "draw_orders",
    "draw_values",
    "float_array",
    "plain_array",
    "real_array",
    "round_to",
    "work_dtype",
]

#: Element types of the vectors.
DTYPES = ("float64", "float32", "float16", "bfloat16")

#: What :func:`~roundoff.reductions.draw_values` knows how to draw.
DISTRIBUTIONS = ("normal", "spikes", "pareto")

#: Orders that are not drawn: unchanged, ascending, descending.
FIXED_ORDERS = 3


def draw_values(name: str, size: int = 8192, seed: int = 0) -> npt.NDArray[np.float64]:
    """Values of one of the three distributions.

    ``"normal"`` is standard normal; ``"spikes"`` is −1e-4 with 100 at every 128th place, the
    first included, and draws nothing; ``"pareto"`` is Pareto of shape 1 shifted to start at 0
    (Lomax), whose mean does not exist.

    Parameters
    ----------
    name : str
        One of ``DISTRIBUTIONS``.
    size : int
        How many values. The first n of a longer vector are not those of a shorter one drawn
        afresh by every generator: draw the longest and take its prefixes.
    seed : int
        Seed of :func:`numpy.random.default_rng`.

    Returns
    -------
    ndarray of float64, shape (size,)

    Raises
    ------
    ArgumentError
        When the name is unknown.

    Examples
    --------
    >>> from roundoff.reductions import draw_values
    >>> draw_values("spikes", size=3)
    array([ 1.e+02, -1.e-04, -1.e-04])
    """
    check_choice("distribution", name, DISTRIBUTIONS)
    check_whole("size", size, 0)
    check_whole("seed", seed, 0)
    rng = np.random.default_rng(seed)
    if name == "normal":
        return rng.standard_normal(size)
    if name == "spikes":
        values = np.full(size, -1e-4)
        values[::128] = 100.0
        return values
    return rng.pareto(1.0, size)


def work_dtype(dtype: Any) -> np.dtype[Any]:
    """Type in which values of *dtype* are added: float32 for the 16-bit types, else their own.

    Raises
    ------
    DtypeError
        When *dtype* is none of ``DTYPES``.

    Examples
    --------
    >>> from roundoff.reductions.data import work_dtype
    >>> work_dtype("float16"), work_dtype("float64")
    (dtype('float32'), dtype('float64'))
    """
    name = dtype_info(dtype).name
    if name not in DTYPES:
        raise DtypeError(
            "no reduction in this type",
            got=name,
            expected=", ".join(DTYPES),
            hint="x.astype(np.float64)",
        )
    return np.dtype(np.float64 if name == "float64" else np.float32)


def round_to(x: Any, dtype: Any, *, storage: bool = False) -> Any:
    """Values, or results, rounded to *dtype* and stored in the type in which they are added.

    Parameters
    ----------
    x : array_like or scalar
        Any shape.
    dtype : any
        One of ``DTYPES``, as :func:`roundoff.dtypes.dtype_info` takes it.
    storage : bool
        Store the values in *dtype* itself (bfloat16 is then the type of ``ml_dtypes``).

    Returns
    -------
    ndarray or scalar, same shape
        A value past the largest one of *dtype* is infinite: overflow is kept, not clipped.

    Raises
    ------
    DtypeError
        When *dtype* is none of ``DTYPES``, or *x* is not made of real numbers of at most 64 bits.
    ArgumentError
        When values are masked, or whole numbers above 2**53.

    Examples
    --------
    >>> import numpy as np
    >>> from roundoff.reductions import round_to
    >>> round_to([1 / 3, 1e5], "float16")
    array([0.33325195,        inf], dtype=float32)
    >>> round_to(np.float32(1) + np.float32(2) ** -12, "float16")
    np.float32(1.0)
    """
    work, info, values = work_dtype(dtype), dtype_info(dtype), real_array(x)
    with np.errstate(over="ignore", invalid="ignore"):
        if info.name == "bfloat16":
            values = _to_odd(values)
        stored = values.astype(onnx_dtype_to_np_dtype(info.onnx), copy=False)
        return (stored if storage else stored.astype(work, copy=False))[()]


def _to_odd(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """float32 neighbours of float64 values, the odd ones of two: a second rounding is then right.

    ``ml_dtypes`` rounds float64 to float32 and that to bfloat16; a value just above the middle of
    two bfloat16 numbers comes to the middle, and then to the wrong one.
    """
    near = x.astype(np.float32)
    even = near.view(np.uint32) % 2 == 0
    towards = np.where(x > near, np.float32(np.inf), np.float32(-np.inf))
    return np.where((near != x) & even, np.nextafter(near, towards), near)


def float_array(x: npt.ArrayLike) -> npt.NDArray[Any]:
    """*x* as an array, if it is one of a type that can be added here.

    Raises
    ------
    DtypeError
        When it is no array, or not of one of ``DTYPES``.
    ArgumentError
        When values are masked: an array has no place for what they are.

    Examples
    --------
    >>> from roundoff.reductions.data import float_array
    >>> float_array([0.5, 2]).dtype
    dtype('float64')
    """
    values = plain_array(x)
    work_dtype(values.dtype)
    return values


def plain_array(x: Any) -> npt.NDArray[Any]:
    """*x* as an array of any type, in the byte order of this machine.

    Raises
    ------
    DtypeError
        When NumPy makes none of it.
    ArgumentError
        When values are masked.

    Examples
    --------
    >>> from roundoff.reductions.data import plain_array
    >>> plain_array([1, 2]).shape
    (2,)
    """
    if np.ma.is_masked(x):
        raise ArgumentError("masked values", got="a masked array", hint="x.compressed()")
    try:
        values = np.asarray(x)
        return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeError(
            "not an array that NumPy reads",
            got=type(x).__name__,
            expected=", ".join(DTYPES),
            hint="of a torch tensor x.detach().cpu(), of bfloat16 .float()",
        ) from error


def real_array(x: Any) -> npt.NDArray[np.float64]:
    """*x* in float64, which holds each of its values.

    Raises
    ------
    DtypeError
        When *x* is not made of real numbers of at most 64 bits.
    ArgumentError
        When values are masked, or whole numbers above 2**53.

    Examples
    --------
    >>> from roundoff.reductions.data import real_array
    >>> real_array([1, 2])
    array([1., 2.])
    """
    values = plain_array(x)
    if values.dtype.kind not in "iub":
        if not dtype_info(values.dtype).is_float:
            raise DtypeError("no real numbers", got=str(values.dtype), expected="at most 64 bits")
    elif (np.abs(values) > 2**53).any():
        largest = np.abs(values).max()
        raise ArgumentError(
            "whole numbers", got=str(largest), expected="at most 2**53, which float64 holds"
        )
    return values.astype(np.float64, copy=False)


def draw_orders(size: int, count: int = 128, seed: int = 0) -> npt.NDArray[np.intp]:
    """Random permutations for *count* orders, without the three that are not drawn.

    They depend on nothing but the arguments, so one draw serves every distribution,
    element type and statistic.

    Returns
    -------
    ndarray of intp, shape (count - 3, size)

    Raises
    ------
    ArgumentError
        When *count* is below 3: the unchanged, the ascending and the descending order.

    Examples
    --------
    >>> from roundoff.reductions import draw_orders
    >>> draw_orders(4, count=5).shape
    (2, 4)
    """
    check_whole("size", size, 0)
    check_whole("number of orders", count, FIXED_ORDERS)
    check_whole("seed", seed, 0)
    rng = np.random.default_rng((seed, size))
    return rng.permuted(np.tile(np.arange(size), (count - FIXED_ORDERS, 1)), axis=1)


def arrange(x: npt.NDArray[Any], drawn: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
    """The values of *x* in every order: as given, ascending, descending, then as drawn.

    The result is C-contiguous, each order in a row of its own. NumPy adds such a row exactly
    as it adds the same values alone; the transposed layout it adds in another order.

    Parameters
    ----------
    x : ndarray, shape (n,)
        Values, any floating type.
    drawn : ndarray of intp, shape (k, n)
        Permutations, from :func:`~roundoff.reductions.draw_orders`.

    Returns
    -------
    ndarray, shape (k + 3, n), same dtype

    Raises
    ------
    ShapeError
        When the permutations are not as long as the vector.
    ArgumentError, DtypeError
        When a row of *drawn* has not each place once, or values are masked or no array.

    Examples
    --------
    >>> import numpy as np
    >>> from roundoff.reductions import arrange
    >>> arrange(np.array([2.0, 3.0, 1.0]), np.array([[2, 0, 1]]))
    array([[2., 3., 1.], [1., 2., 3.], [3., 2., 1.], [1., 2., 3.]])
    """
    x, drawn = plain_array(x), plain_array(drawn)
    if x.ndim != 1 or drawn.shape[1:] != x.shape:
        raise ShapeError(
            "orders and values do not match",
            got=f"values {x.shape}, orders {drawn.shape}",
            expected="(n,) and (k, n)",
        )
    if not (np.sort(drawn, axis=1) == np.arange(x.size)).all():
        raise ArgumentError(
            "no permutations", expected=f"each of 0 to {x.size - 1} once", hint="draw_orders(size)"
        )
    rows = np.empty((FIXED_ORDERS + len(drawn), x.size), x.dtype)
    rows[0] = x
    rows[1] = np.sort(x)
    rows[2] = rows[1, ::-1]
    np.take(x, drawn, out=rows[FIXED_ORDERS:], mode="clip")  # "raise" would copy first
    return rows
