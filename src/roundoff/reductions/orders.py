"""Orders in which processes add what each of them has, and the order found from a sum's bits.

An order is a tree of additions. A leaf is the number of a rank, a node the tuple of what it adds:
``(((1, 0), 3), 2)`` adds rank 1 and rank 0, to it rank 3, to it rank 2. A node of more than two is
one operation, rounded once. Parts are arrays of shape (ranks, size), a row for each rank.
"""

from __future__ import annotations

import dataclasses
from itertools import combinations
from itertools import pairwise as neighbours
from typing import Any

import numpy as np
import numpy.typing as npt

from roundoff.arguments import check_whole
from roundoff.dtypes import dtype_info
from roundoff.errors import ArgumentError, ShapeError

from .algorithms import neumaier, sequential
from .data import float_array, round_to

__all__ = [
    "add_in_order",
    "order_probes",
    "order_text",
    "orders_found",
    "ring_sum",
]

Array = npt.NDArray[Any]
Tree = int | tuple[Any, ...]


def add_in_order(parts: Array, tree: Tree) -> Array:
    """The parts of the ranks added in the order of a tree, each addition rounded to their type.

    Parameters
    ----------
    parts : ndarray, shape (ranks, size)
    tree : int or tuple
        With each rank once.

    Returns
    -------
    ndarray, shape (size,), same dtype

    Raises
    ------
    ArgumentError
        When the tree has not each rank once, or parts are masked.
    ShapeError, DtypeError
        When *parts* are not of that shape, or not of a type that :func:`sequential` adds.

    Examples
    --------
    >>> import numpy as np
    >>> parts = np.float32([[1e8], [-1e8], [1]])
    >>> float(add_in_order(parts, ((0, 1), 2))[0]), float(add_in_order(parts, ((2, 1), 0))[0])
    (1.0, 0.0)
    """
    parts, leaves = _parts(parts), sorted(_leaves(tree))
    if leaves != list(range(len(parts))):
        raise ArgumentError("the tree", got=str(leaves), expected=f"ranks 0 to {len(parts) - 1}")
    with np.errstate(over="ignore", invalid="ignore"):
        return _add(parts, tree)


def _parts(parts: Any) -> Array:
    """The parts of the ranks as an array of a type that can be added."""
    array = float_array(parts)
    if array.ndim != 2 or not len(array):
        raise ShapeError("parts", got=array.shape, expected="(ranks, size), ranks at least 1")
    return array


def _add(parts: Array, tree: Tree) -> Array:
    if isinstance(tree, int):
        return parts[tree]
    added = [_add(parts, branch) for branch in tree]
    if len(added) == 2:
        return added[0] + added[1]
    # One operation, rounded once: twice float64 stands for an adder wider than the parts' type.
    wide = [a.astype(np.float64) for a in added]
    return round_to(neumaier(np.stack(wide, axis=-1)), parts.dtype, storage=True)


def _leaves(tree: Tree) -> list[int]:
    if isinstance(tree, int):
        return [tree]
    return [leaf for branch in tree for leaf in _leaves(branch)]


def order_text(tree: Tree) -> str:
    """The tree as a sum, without the brackets that adding from left to right implies.

    Examples
    --------
    >>> order_text((((1, 0), 3), 2)), order_text(((0, 1), (2, 3))), order_text((0, 1, 2))
    ('1 + 0 + 3 + 2', '0 + 1 + (2 + 3)', '{0, 1, 2}')
    """
    if isinstance(tree, int):
        return str(tree)
    if len(tree) > 2:
        return "{" + ", ".join(map(order_text, tree)) + "}"
    first, second = tree
    right = order_text(second)
    bracketed = not isinstance(second, int) and len(second) == 2
    return f"{order_text(first)} + " + (f"({right})" if bracketed else right)


# --- the order, found from the bits of sums


def order_probes(ranks: int, dtype: Any) -> Array:
    """Inputs whose sums tell the order: the masks of FPRev.

    Two ranks have M and −M, so large that a unit added to them is lost, and the others a unit. What
    meets M or −M before these two meet is lost with them: the sum counts the ranks outside the
    smallest subtree with both. The unit is small enough for an accumulator in float32 to lose it,
    too.

    Parameters
    ----------
    ranks : int
    dtype : any
        float64, float32, float16 or bfloat16.

    Returns
    -------
    ndarray, shape (ranks (ranks − 1) / 2, ranks)
        A probe in each row: M in rank i, −M in rank j, for the pairs i < j in order.

    Raises
    ------
    ArgumentError
        Fewer than two ranks, or more than a count of units in this type can tell.

    References
    ----------
    P. Xie, Y. Gao, J. Xue, *FPRev: Revealing the Order of Floating-Point Summation*, 2024,
    `arXiv:2411.00442 <https://arxiv.org/abs/2411.00442>`_.

    Examples
    --------
    >>> order_probes(3, "float16")[0].tolist()
    [32768.0, -32768.0, 6.103515625e-05]
    """
    check_whole("ranks", ranks, 2, 2 ** dtype_info(dtype).precision)
    large, unit = _mask(dtype)
    pairs = list(combinations(range(ranks), 2))
    probes = np.full((len(pairs), ranks), unit)
    for probe, (i, j) in zip(probes, pairs, strict=True):
        probe[[i, j]] = large, -large
    return round_to(probes, dtype, storage=True)


def _mask(dtype: Any) -> tuple[float, float]:
    # float16: its largest power of two, and its smallest normal number.
    return (2.0**15, 2.0**-14) if dtype_info(dtype).name == "float16" else (2.0**100, 1.0)


@dataclasses.dataclass(frozen=True)
class OrderRun:
    """Elements next to each other that are added in one order.

    Attributes
    ----------
    start : int
        The first element.
    stop : int
        The one after the last.
    tree : int or tuple
        The order.

    Examples
    --------
    >>> OrderRun(0, 8, ((0, 1), 2)).tree
    ((0, 1), 2)
    """

    start: int
    stop: int
    tree: Tree


def orders_found(sums: Array, ranks: int, dtype: Any) -> list[OrderRun]:
    """The order of each element, from the sums of the probes.

    Parameters
    ----------
    sums : ndarray, shape (probes, size)
        What the probes of :func:`order_probes` add up to, with each probe in all elements.
    ranks : int
    dtype : any
        As the probes were asked for.

    Returns
    -------
    list of OrderRun

    Raises
    ------
    ShapeError
        When there is not a sum for each probe.
    ArgumentError
        When no tree gives these sums: a unit was not lost, or it was not one order.

    Examples
    --------
    >>> from roundoff.reductions import sequential
    >>> probes = order_probes(4, "float32")
    >>> orders_found(sequential(probes)[:, None], 4, "float32")[0].tree
    (((0, 1), 2), 3)
    """
    sums = float_array(sums)
    check_whole("ranks", ranks, 1)
    pairs = list(combinations(range(ranks), 2))
    if sums.ndim != 2 or len(sums) != len(pairs):
        raise ShapeError("sums", got=sums.shape, expected=f"({len(pairs)}, size)")
    with np.errstate(invalid="ignore"):
        outside = sums.astype(np.float64) / _mask(dtype)[1]
    changes = np.flatnonzero((outside[:, 1:] != outside[:, :-1]).any(axis=0)) + 1
    bounds = [0, *changes.tolist(), sums.shape[1]]
    runs = []
    for start, stop in neighbours(bounds):
        common = np.zeros((ranks, ranks))
        for (i, j), count in zip(pairs, outside[:, start], strict=True):
            common[i, j] = common[j, i] = ranks - count
        tree = _tree_of(common)
        if not np.array_equal(_common(tree, ranks), common):
            raise ArgumentError(
                f"no order of additions gives the sums of element {start}",
                got=str(outside[:, start].tolist()),
                expected="numbers of ranks outside of subtrees",
            )
        runs.append(OrderRun(start, stop, tree))
    return runs


def _tree_of(common: Array) -> Tree:
    """The tree, put together from the smallest subtrees up."""
    nodes: list[Tree] = list(range(len(common)))
    for size in np.unique(common[common > 0]):
        groups: list[list[Tree]] = []
        for node in nodes:
            first = _leaves(node)[0]
            group = next((g for g in groups if common[_leaves(g[0])[0], first] <= size), None)
            if group is None:
                groups.append([node])
            else:
                group.append(node)
        # Addition commutes: the larger branch comes first, as one would write a chain.
        for group in groups:
            group.sort(key=lambda node: (-len(_leaves(node)), min(_leaves(node))))
        nodes = [group[0] if len(group) == 1 else tuple(group) for group in groups]
    return nodes[0]


def _common(tree: Tree, ranks: int) -> Array:
    """Leaves of the smallest subtree with both, for each pair of ranks that meet."""
    common = np.zeros((ranks, ranks))
    if isinstance(tree, int):
        return common
    for one, other in combinations(map(_leaves, tree), 2):
        common[np.ix_(one, other)] = common[np.ix_(other, one)] = len(_leaves(tree))
    for branch in tree:
        common += _common(branch, ranks)
    return common


# --- orders of all-reduce algorithms


def ring_sum(parts: Array, first: int = 0) -> Array:
    """Around a ring of ranks, from one of them: n − 1 additions, one after another.

    Shapes are those of :func:`add_in_order`; so are those of the next two.

    Examples
    --------
    >>> import numpy as np
    >>> parts = np.float32([[1e8], [-1e8], [1]])
    >>> float(ring_sum(parts)[0]), float(ring_sum(parts, first=1)[0])
    (1.0, 0.0)
    """
    parts = _parts(parts)
    check_whole("first", first, 0, len(parts) - 1)
    return sequential(np.roll(parts, -first, axis=0).T)
