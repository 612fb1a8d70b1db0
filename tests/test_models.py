"""The models of the pages: valid, equal on paper, and priced right."""

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff import ort
from roundoff.errors import ArgumentError, DtypeError
from roundoff.models import GEMM_VARIANTS, Cost, Step, gemm_cost, gemm_feeds, gemm_model

WIDTHS = st.lists(st.integers(1, 6), min_size=2, max_size=4)


@given(m=st.integers(1, 6), k=st.integers(1, 9), widths=WIDTHS, separate=st.booleans())
@settings(max_examples=25, deadline=None)
def test_every_variant_computes_the_products(m, k, widths, separate):
    g = torch.Generator().manual_seed(0)
    # Whole numbers: exact whatever the order of the sums, so that equality can be asked for.
    x = torch.randint(-9, 9, (m, k), generator=g).float()
    weights = {
        f"W{i}": torch.randint(-9, 9, (k, n), generator=g).float() for i, n in enumerate(widths)
    }
    want = [x @ w for w in weights.values()]
    for variant in GEMM_VARIANTS:
        model = gemm_model(variant, weights=list(weights), widths=widths, separate=separate)
        onnx.checker.check_model(model, full_check=True)
        got = ort.session(model).run(gemm_feeds(variant, x, weights))
        if separate:
            assert len(got) == len(want)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        else:
            assert torch.equal(got[0], torch.cat(want, 1))


@pytest.mark.parametrize("variant", GEMM_VARIANTS)
@pytest.mark.parametrize("itype", [1, 10, 11, 16])
def test_equal_widths_need_no_sizes_and_types_are_kept(variant, itype):
    model = gemm_model(variant, itype, separate=True)
    onnx.checker.check_model(model, full_check=True)
    assert {v.type.tensor_type.elem_type for v in [*model.graph.input, *model.graph.output]} == {
        itype
    }
    assert [o.name for o in model.graph.output] == ["O_Y", "O_Z"]
    assert not model.graph.initializer


def test_the_names_a_reader_knows():
    assert [i.name for i in gemm_model("not fused").graph.input] == ["X", "Y", "Z"]
    assert [i.name for i in gemm_model("fused").graph.input] == ["X", "Y", "Z"]
    assert [i.name for i in gemm_model("fused ahead").graph.input] == ["X", "YZ"]


@pytest.mark.parametrize("variant", GEMM_VARIANTS)
@pytest.mark.parametrize("separate", [False, True])
def test_the_cost_counts_the_nodes_and_operands_of_the_model(variant, separate):
    m, k, widths, itemsize = 3, 5, [2, 7, 4], 2
    names = [f"W{i}" for i in range(3)]
    model = gemm_model(variant, 10, weights=names, widths=widths, separate=separate)
    cost = gemm_cost(variant, m, k, widths, itemsize, separate)
    assert [s.op for s in cost.steps] == [n.op_type for n in model.graph.node]
    feeds = gemm_feeds(
        variant,
        torch.zeros(m, k, dtype=torch.float16),
        {n: torch.zeros(k, w, dtype=torch.float16) for n, w in zip(names, widths, strict=True)},
    )
    shapes = {n: tuple(t.shape) for n, t in feeds.items()} | {
        f"{kind}_{n}": (m, w) for n, w in zip(names, widths, strict=True) for kind in "PO"
    }
    shapes |= {"O": (m, 13), "P": (m, 13), "W0W1W2": (k, 13)}
    for step, node in zip(cost.steps, model.graph.node, strict=True):
        operands = [n for n in [*node.input, *node.output] if n != "widths"]
        assert step.bytes == itemsize * sum(np.prod(shapes[n]) for n in operands)
    assert cost.flops == 2 * m * k * 13
    assert cost.launches == len(model.graph.node)


def test_the_plain_model_takes_the_longer_of_bytes_and_operations():
    cost = Cost((Step("a", 100.0, 10.0), Step("b", 1.0, 50.0)))
    options = {"byte_rate": 10.0, "flop_rate": 5.0, "call": 1.0, "launch": 2.0}
    assert cost.seconds(overlap=False, **options) == 5 + 10 + 10
    assert cost.seconds(overlap=True, **options) == 20
    assert cost.seconds(overlap=True, **(options | {"call": 30.0})) == 34


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: gemm_model("half fused"), ArgumentError, "variant"),
        (lambda: gemm_model("fused", weights=["Y"]), ArgumentError, "two or more"),
        (lambda: gemm_model("fused", weights=["Y", "Y"]), ArgumentError, "different"),
        (lambda: gemm_model("fused", widths=[3]), ArgumentError, "2 numbers"),
        (lambda: gemm_model("fused", 7), DtypeError, "int64"),
        (lambda: gemm_cost("half fused", 1, 1, [1, 1], 4), ArgumentError, "variant"),
    ],
)
def test_wrong_arguments(call, error, match):
    with pytest.raises(error, match=match):
        call()
