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


def parts_of(ranks: int, size: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng((seed, ranks, size))
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


def chain_of(ranks):
    tree, *rest = ranks
    for rank in rest:
        tree = (tree, rank)
    return tree


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_simulated_ring_is_its_tree(dtype: str) -> None:
    parts = parts_of(8, 300, dtype)
    for first in (0, 3):
        ring = chain_of([(first + k) % 8 for k in range(8)])
        assert same_bits(ring_sum(parts, first), add_in_order(parts, ring))


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


def gloo(workers, messages: list[np.ndarray], dtype: str) -> list[np.ndarray]:
    """Sums by gloo of messages of shape (ranks, size)."""
    ranks = len(messages[0])
    items = [([m[r].astype(np.float64) for m in messages], dtype) for r in range(ranks)]
    return [round_to(s, dtype, storage=True) for s in workers.map(reduced, items)[0]]


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers fork")
slow = pytest.mark.slow(reason="eight processes on two cores; 2 and 4 ranks are quick")


@needs_fork
@pytest.mark.parametrize("ranks", [2, 4, pytest.param(3, marks=slow), pytest.param(8, marks=slow)])
def test_gloo_adds_as_simulated_bit_by_bit(workers, ranks: int) -> None:
    for dtype in DTYPES:
        messages = [parts_of(ranks, size, dtype) for size in (1, 7, 1000, 40_001)]
        for parts, total in zip(messages, gloo(workers, messages, dtype), strict=True):
            assert same_bits(total, gloo_sum(parts)), (dtype, parts.shape)


@needs_fork
@pytest.mark.slow(reason="messages of 15 MB; the small ones are quick")
@pytest.mark.parametrize(("ranks", "size"), [(3, 3_700_001), (2, 3_000_000), (4, 2_500_003)])
def test_pieces_of_large_messages_are_simulated(workers, ranks: int, size: int) -> None:
    """Beyond 1 MiB a piece a chunk has more than two of them."""
    parts = parts_of(ranks, size)
    (total,) = gloo(workers, [parts], "float32")
    assert same_bits(total, gloo_sum(parts))
