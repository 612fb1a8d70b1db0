"""Layered drawing of a directed graph: ranks, order within a rank, coordinates.

Method: K. Sugiyama, S. Tagawa, M. Toda, *Methods for visual understanding of hierarchical system
structures*, IEEE Transactions on Systems, Man, and Cybernetics 11 (1981), 109-125. A vertex
stands below all that lead to it, each rank is ordered by the mean place of its neighbours, and is
placed by least squares around its neighbours, with its order and gaps (isotonic regression).
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


#: Ranks of a component, each an ordered list of vertices (dummies are counted after the real
#: ones), and its edges, each the chain of vertices that it goes through.
_Component = tuple[list[list[int]], dict[tuple[int, int], list[int]]]


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
    edges = list(dict.fromkeys(edges))
    touched = sorted({v for edge in edges for v in edge})
    components = [_ranked(touched, edges)] if edges else []
    components += [([[v]], {}) for v in range(len(widths)) if v not in set(touched)]
    result = Layout([0.0] * len(widths), [0] * len(widths), {}, 0.0)
    offset = 0.0
    for ranks, chains in components:
        size = [*widths, *([LANE] * _dummies(ranks, len(widths)))]
        x = _coordinates(ranks, chains, size, gap)
        left = min(x[v] - size[v] / 2 for row in ranks for v in row)
        for level, row in enumerate(ranks):
            for v in row:
                x[v] += offset - left
                if v < len(widths):
                    result.x[v], result.rank[v] = x[v], level
        where = {v: level for level, row in enumerate(ranks) for v in row}
        for edge, chain in chains.items():
            result.routes[edge] = [(x[v], where[v]) for v in chain[1:-1]]
        result.width = max(x[v] + size[v] / 2 for row in ranks for v in row)
        offset = result.width + 2 * gap
    return result


def _dummies(ranks: list[list[int]], real: int) -> int:
    return max(max(row) for row in ranks) + 1 - real if ranks else 0


def _ranked(touched: list[int], edges: list[tuple[int, int]]) -> _Component:
    """Longest-path ranks; order by the mean place of the neighbours, four sweeps."""
    before: dict[int, list[int]] = {v: [] for v in touched}
    for a, b in edges:
        before[b].append(a)
    rank: dict[int, int] = {}
    for v in graphlib.TopologicalSorter(before).static_order():
        rank[v] = max((rank[w] + 1 for w in before[v]), default=0)
    for v in touched:  # a source moves down to just above its first reader
        if not before[v]:
            rank[v] = min(rank[b] for a, b in edges if a == v) - 1
    ranks: list[list[int]] = [[] for _ in range(max(rank.values()) + 1)]
    for v in touched:
        ranks[rank[v]].append(v)
    chains = {}
    fresh = max(touched) + 1
    for a, b in edges:
        chain = [a]
        for level in range(rank[a] + 1, rank[b]):
            ranks[level].append(fresh)
            chain.append(fresh)
            fresh += 1
        chains[a, b] = [*chain, b]
    for down in (True, False, True, False):
        neighbours = _neighbours(chains, down)
        for level in range(len(ranks)) if down else reversed(range(len(ranks))):
            place = {v: float(i) for row in ranks for i, v in enumerate(row)}
            ranks[level].sort(
                key=lambda v: (
                    sum(place[w] for w in neighbours[v]) / len(neighbours[v])
                    if neighbours.get(v)
                    else place[v]
                )
            )
    return ranks, chains


def _neighbours(chains: dict[tuple[int, int], list[int]], above: bool) -> dict[int, list[int]]:
    """Neighbours in the rank above (or below) of each vertex, dummies included."""
    neighbours: dict[int, list[int]] = {}
    for chain in chains.values():
        for a, b in itertools.pairwise(chain):
            neighbours.setdefault(b if above else a, []).append(a if above else b)
    return neighbours


def _coordinates(
    ranks: list[list[int]],
    chains: dict[tuple[int, int], list[int]],
    size: list[float],
    gap: float,
    sweeps: int = 12,
) -> dict[int, float]:
    """Centres: each rank around the mean of its neighbours, sweep after sweep."""
    x: dict[int, float] = {}
    for row in ranks:
        total = sum(size[v] + gap for v in row)
        at = -total / 2
        for v in row:
            x[v] = at + (size[v] + gap) / 2
            at += size[v] + gap
    above, below = _neighbours(chains, True), _neighbours(chains, False)
    for sweep in range(sweeps):
        order = range(len(ranks)) if sweep % 2 == 0 else reversed(range(len(ranks)))
        last = sweep >= sweeps - 2  # the last two sweeps look both ways
        for level in order:
            wanted = []
            for v in ranks[level]:
                near = list(above.get(v, ())) if sweep % 2 == 0 or last else []
                near += list(below.get(v, ())) if sweep % 2 == 1 or last else []
                wanted.append(sum(x[w] for w in near) / len(near) if near else x[v])
            placed = _spread([size[v] for v in ranks[level]], wanted, gap)
            x.update(zip(ranks[level], placed, strict=True))
    return x


def _spread(size: list[float], wanted: list[float], gap: float) -> list[float]:
    """Centres nearest to *wanted* in least squares, in order, boxes at least *gap* apart."""
    from scipy.optimize import isotonic_regression  # takes a while to import

    starts = itertools.accumulate((s + gap for s in size), initial=0.0)
    shift = [start + s / 2 for start, s in zip(starts, size, strict=False)]
    flat = isotonic_regression([w - s for w, s in zip(wanted, shift, strict=True)]).x
    return [float(f) + s for f, s in zip(flat, shift, strict=True)]
