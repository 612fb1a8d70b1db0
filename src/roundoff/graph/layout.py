"""Layered drawing of a directed graph: ranks, order within a rank, coordinates.

After K. Sugiyama, S. Tagawa, M. Toda, *Methods for visual understanding of hierarchical system
structures*, IEEE Transactions on Systems, Man, and Cybernetics 11 (1981), 109-125. A vertex
stands below all that lead to it, each rank is ordered by the mean place of its neighbours, and
stands in the middle.
"""

from __future__ import annotations

import dataclasses
import graphlib
import itertools
from collections.abc import Sequence

#: Width that an edge takes where it passes a rank.
LANE = 12.0


@dataclasses.dataclass
class Layout:
    """Where to draw.

    Attributes
    ----------
    x : list of float
        Centre of each vertex, in the unit of the widths; the smallest left side is 0.
    rank : list of int
        Rank of each vertex; 0 is at the top.
    routes : dict
        Edge -> [(x, rank)] of the points it goes through between its two ends.
    width : float
        Right side of the rightmost vertex or edge.
    """

    x: list[float]
    rank: list[int]
    routes: dict[tuple[int, int], list[tuple[float, int]]]
    width: float


def layered(widths: Sequence[float], edges: Sequence[tuple[int, int]], gap: float) -> Layout:
    """Lay out vertices ``0 … len(widths) - 1`` of an acyclic graph.

    Parameters
    ----------
    widths : sequence of float
        Width of each vertex.
    edges : sequence of (int, int)
        From, to; every edge goes down by at least one rank.
    gap : float
        Smallest distance between two neighbours of a rank.
    """
    rank = _ranks(len(widths), edges)
    rows: list[list[int]] = [[] for _ in range(max(rank, default=-1) + 1)]
    for v, level in enumerate(rank):
        rows[level].append(v)
    size = list(widths)  # of the vertices, then of each edge where it passes a rank
    chains: dict[tuple[int, int], list[int]] = {}
    for a, b in dict.fromkeys(edges):
        chains[a, b] = [a]
        for level in range(rank[a] + 1, rank[b]):
            rows[level].append(len(size))
            chains[a, b].append(len(size))
            size.append(LANE)
        chains[a, b].append(b)
    _order(rows, chains)
    spans = [sum(size[v] for v in row) + gap * (len(row) - 1) for row in rows]
    width = max(spans, default=0.0)
    x = [0.0] * len(size)
    for row, span in zip(rows, spans, strict=True):
        left = (width - span) / 2
        for v in row:
            x[v] = left + size[v] / 2
            left += size[v] + gap
    routes = {
        (a, b): [(x[v], level) for level, v in enumerate(chain[1:-1], rank[a] + 1)]
        for (a, b), chain in chains.items()
    }
    return Layout(x[: len(widths)], rank, routes, width)


def _ranks(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The longest way from a source; a source stands just above its first reader."""
    before: dict[int, list[int]] = {v: [] for v in range(count)}
    for a, b in edges:
        before[b].append(a)
    rank = [0] * count
    for v in graphlib.TopologicalSorter(before).static_order():
        rank[v] = max((rank[w] + 1 for w in before[v]), default=0)
    for v in range(count):
        if not before[v]:
            rank[v] = min((rank[b] for a, b in edges if a == v), default=1) - 1
    return rank


def _order(rows: list[list[int]], chains: dict[tuple[int, int], list[int]]) -> None:
    """Sort each rank by the mean place of its neighbours above, then below, twice."""
    neighbours: dict[bool, dict[int, list[int]]] = {True: {}, False: {}}
    for chain in chains.values():
        for a, b in itertools.pairwise(chain):
            neighbours[True].setdefault(b, []).append(a)
            neighbours[False].setdefault(a, []).append(b)
    for down in (True, False, True, False):
        for row in rows if down else reversed(rows):
            place = {v: k for row in rows for k, v in enumerate(row)}
            near = {v: neighbours[down].get(v, [v]) for v in row}
            row.sort(key=lambda v: sum(place[w] for w in near[v]) / len(near[v]))
