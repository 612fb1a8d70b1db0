"""Orders of all-reduce: simulated, and found from bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.reductions import (
    DTYPES,
    add_in_order,
    order_probes,
    orders_found,
    ring_sum,
    round_to,
)

from .test_reductions import same_bits


def parts_of(ranks: int, size: int, dtype: str) -> np.ndarray:
    rng = np.random.default_rng((ranks, size))
    return round_to(rng.standard_normal((ranks, size)), dtype, storage=True)


@st.composite
def trees(draw, ranks: int, most: int = 2):
    """Any tree over ranks, with nodes of 2 to *most* branches."""
    nodes = list(range(ranks))
    while len(nodes) > 1:
        count = draw(st.integers(2, min(most, len(nodes))))
        taken = [nodes.pop(draw(st.integers(0, len(nodes) - 1))) for _ in range(count)]
        nodes.append(tuple(taken))
    return nodes[0]


def as_sets(tree):
    """A tree without the order within its nodes: addition commutes."""
    return tree if isinstance(tree, int) else frozenset(map(as_sets, tree))


# --- what is found


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=st.integers(2, 12), dtype=st.sampled_from(DTYPES))
def test_any_tree_is_found_from_its_sums(data, ranks: int, dtype: str) -> None:
    tree = data.draw(trees(ranks))
    sums = add_in_order(np.ascontiguousarray(order_probes(ranks, dtype).T), tree)
    (run,) = orders_found(sums[:, None], ranks, dtype)
    assert as_sets(run.tree) == as_sets(tree)


def test_a_sum_of_many_at_once_is_one_node() -> None:
    """{0, 1, 2} + 3, in an adder that loses units beside M."""
    probes = order_probes(4, "float32")
    sums = np.array([1.0 if set(np.flatnonzero(abs(p) > 1)) <= {0, 1, 2} else 0.0 for p in probes])
    assert orders_found(sums[:, None], 4, "float32")[0].tree == ((0, 1, 2), 3)


def test_elements_of_one_order_are_one_run() -> None:
    probes = order_probes(4, "float32")
    rings = [(((0, 1), 2), 3), (((1, 2), 3), 0), (((2, 3), 0), 1), (((3, 0), 1), 2)]
    sums = np.stack([[add_in_order(p[:, None], ring).item() for ring in rings] for p in probes])
    runs = orders_found(np.repeat(sums, 250, axis=1), 4, "float32")
    assert [(run.start, run.stop) for run in runs] == [(250 * c, 250 * c + 250) for c in range(4)]
    assert [as_sets(r.tree) for r in runs] == [as_sets(ring) for ring in rings]


# --- what is simulated


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_simulated_ring_is_its_tree(dtype: str) -> None:
    parts = parts_of(4, 300, dtype)
    for first, tree in (0, (((0, 1), 2), 3)), (3, (((3, 0), 1), 2)):
        assert same_bits(ring_sum(parts, first), add_in_order(parts, tree))


def test_a_node_of_three_is_rounded_once() -> None:
    parts = np.array([[1.0], [2.0**-53], [2.0**-60]])
    assert add_in_order(parts, (0, 1, 2)).item() == 1 + 2.0**-52
