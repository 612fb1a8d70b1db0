"""Layered layout: every edge goes down, boxes keep their distance, whatever the graph."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from roundoff.graph.layout import LANE, Layout, layered

GAP = 10.0
Graph = tuple[list[float], list[tuple[int, int]]]


@st.composite
def graphs(draw: Callable[[Any], Any]) -> Graph:
    n = draw(st.integers(1, 25))
    widths = draw(st.lists(st.floats(20, 200), min_size=n, max_size=n))
    pairs = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=40))
    return widths, [(min(p), max(p)) for p in pairs if p[0] != p[1]]


def check(layout: Layout, widths: list[float], edges: list[tuple[int, int]]) -> None:
    assert len(layout.x) == len(layout.rank) == len(widths)
    for a, b in edges:
        assert layout.rank[a] < layout.rank[b]
        passed = [rank for _, rank in layout.routes[a, b]]
        assert passed == list(range(layout.rank[a] + 1, layout.rank[b]))
    rows: dict[int, list[tuple[float, float]]] = {}
    for x, rank, width in zip(layout.x, layout.rank, widths, strict=True):
        rows.setdefault(rank, []).append((x - width / 2, x + width / 2))
    for route in layout.routes.values():
        for x, rank in route:
            rows.setdefault(rank, []).append((x - LANE / 2, x + LANE / 2))
    for row in rows.values():
        row.sort()
        assert row[0][0] >= -1e-6
        assert row[-1][1] <= layout.width + 1e-6
        for (_, right), (left, _) in pairwise(row):
            assert left - right >= GAP - 1e-6


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_edges_go_down_and_boxes_keep_apart(graph: Graph) -> None:
    widths, edges = graph
    layout = layered(widths, edges, GAP)
    check(layout, widths, edges)
    assert layered(widths, edges, GAP) == layout


def test_an_edge_does_not_pass_through_a_box() -> None:
    layout = layered([50, 50, 50], [(0, 1), (1, 2), (0, 2)], GAP)
    [(x, rank)] = layout.routes[0, 2]
    assert rank == layout.rank[1]
    assert abs(x - layout.x[1]) >= 25 + LANE / 2 + GAP - 1e-6
