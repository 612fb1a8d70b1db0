"""Orders of all-reduce: simulated, found from bits, and those of gloo's own processes."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.reductions import (
    DTYPES,
    add_in_order,
    gloo_sum,
    order_probes,
    orders_found,
    ring_sum,
    round_to,
)
from roundoff.reductions.orders import gloo_order
from roundoff.workers import Workers

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
    sums = np.stack([gloo_sum(np.repeat(p[:, None], 1000, axis=1)) for p in probes])
    runs = orders_found(sums, 4, "float32")
    assert [(run.start, run.stop) for run in runs] == [(250 * c, 250 * c + 250) for c in range(4)]
    assert [as_sets(r.tree) for r in runs] == [as_sets(gloo_order(c, 4)) for c in range(4)]


# --- what is simulated


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_simulated_ring_is_its_tree(dtype: str) -> None:
    parts = parts_of(4, 300, dtype)
    for first, tree in (0, (((0, 1), 2), 3)), (3, (((3, 0), 1), 2)):
        assert same_bits(ring_sum(parts, first), add_in_order(parts, tree))


# --- what gloo's own processes do


def reduced(item):
    """One all-reduce for each message of this rank; what rank 0 has."""
    messages, name = item
    sums = []
    for message in messages:
        kind = getattr(torch, name)
        total = torch.from_numpy(message).to(kind)
        dist.all_reduce(total)
        sums.append(total.double().numpy())
    return sums if dist.get_rank() == 0 else None


@pytest.fixture(scope="module")
def workers():
    with Workers(8, limit_s=120) as some:
        yield some


SMALL = (1, 7, 1000, 40_001)
#: Ranks and sizes. Beyond 1 MiB a piece a chunk has more than two of them.
LONG = [(3, SMALL), (8, SMALL), (3, [3_700_001]), (2, [3_000_000]), (4, [2_500_003])]
slow = pytest.mark.slow(reason="many processes on two cores, or messages of 15 MB")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers fork")
@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(2, SMALL), (4, SMALL), *(pytest.param(*case, marks=slow) for case in LONG)],
)
def test_gloo_adds_as_simulated_bit_by_bit(workers, ranks: int, sizes: list[int]) -> None:
    for dtype in DTYPES if sizes == SMALL else ["float32"]:
        messages = [parts_of(ranks, size, dtype) for size in sizes]
        items = [([m[r].astype(np.float64) for m in messages], dtype) for r in range(ranks)]
        for parts, total in zip(messages, workers.map(reduced, items)[0], strict=True):
            assert same_bits(round_to(total, dtype, storage=True), gloo_sum(parts)), dtype
