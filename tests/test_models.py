"""The models of the pages: valid, equal on paper, and priced right."""

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff import ort
from roundoff.errors import ArgumentError, DtypeError
from roundoff.models import (
    GEMM_VARIANTS,
    Cost,
    Step,
    gemm_cost,
    gemm_feeds,
    gemm_model,
    layer_norm_feeds,
    layer_norm_matmul,
    residual_rms_norm,
    skip_layer_norm,
)

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
        outer = {v.name for v in [*model.graph.input, *model.graph.output]}
        inner = [n for n in operands if n not in outer]
        assert step.between == itemsize * sum(np.prod(shapes[n]) for n in inner)
    assert cost.flops == 2 * m * k * 13
    assert cost.launches == len(model.graph.node)


def test_the_plain_model_takes_the_longer_of_bytes_and_operations():
    cost = Cost((Step("a", 100.0, 10.0), Step("b", 1.0, 50.0)))
    options = {"byte_rate": 10.0, "flop_rate": 5.0, "call": 1.0, "launch": 2.0}
    assert cost.seconds(overlap=False, **options) == 5 + 10 + 10
    assert cost.seconds(overlap=True, **options) == 20
    assert cost.seconds(overlap=True, **(options | {"call": 30.0})) == 34


def test_what_fits_in_a_cache_costs_no_memory_traffic():
    cost = Cost((Step("a", 100.0, between=60.0),))
    options = {"byte_rate": 10.0, "flop_rate": 1.0, "call": 0.0, "launch": 0.0, "overlap": True}
    assert [cost.seconds(cache=c, **options) for c in (0.0, 59.0, 60.0)] == [10, 10, 4]


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


@pytest.mark.parametrize("wide", [False, True])
def test_residual_rms_norm_is_its_formula(wide: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, r = (torch.rand(2, 3, 8, generator=generator) for _ in "xr")
    scale = torch.rand(8, generator=generator)
    feeds = {"X": x, "residual": r, "scale": scale}
    model = residual_rms_norm(1, wide=wide)
    onnx.checker.check_model(model, full_check=True)
    (z,) = ort.session(model).run(feeds)
    h = (x + r).double()
    exact = h / torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-5) * scale.double()
    assert (z.double() - exact).abs().max() < 1e-6


def test_layer_norm_models_are_their_formulas() -> None:
    single = layer_norm_feeds(5, 16)
    assert {v.dtype for v in single.values()} == {torch.float32}
    assert single["X"].shape == (2, 5, 16)
    assert single["X"].min() < -30
    assert single["weights"].min() >= 0
    again = layer_norm_feeds(5, 16)
    assert all(torch.equal(single[k], again[k]) for k in single)
    assert torch.equal(layer_norm_feeds(5, 16, batch=4)["X"][:2], single["X"])
    assert not torch.equal(layer_norm_feeds(5, 16, seed=1)["X"], single["X"])
    normal = layer_norm_feeds(5, 256, weights="normal")
    assert normal["weights"].min() < 0 < normal["weights"].max()
    assert 0.9 < normal["weights"].std() * 16 < 1.1
    with pytest.raises(ArgumentError, match="uniform or normal"):
        layer_norm_feeds(5, 16, weights="gaussian")
    half = {k: v.half() for k, v in single.items()}
    feeds = {k: v.double() for k, v in half.items()}
    normed = torch.nn.functional.layer_norm(feeds["X"], (16,), feeds["scale"], feeds["bias"])
    exact = normed @ feeds["weights"] + feeds["bias2"]
    model = layer_norm_matmul(1)
    onnx.checker.check_model(model, full_check=True)
    (z,) = ort.session(model).run({k: v.float() for k, v in half.items()})
    assert (z.double() - exact).abs().max() < 1e-5
    inputs = {k: half[k].float() for k in ("X", "scale", "bias")} | {"skip": half["X"].float()}
    (z,) = ort.session(skip_layer_norm(1)).run(inputs)
    twice = torch.nn.functional.layer_norm(2 * feeds["X"], (16,), feeds["scale"], feeds["bias"])
    assert (z.double() - twice).abs().max() < 1e-5


@pytest.mark.parametrize("make", [layer_norm_matmul, skip_layer_norm, residual_rms_norm])
def test_norms_of_integers_are_refused(make: object) -> None:
    with pytest.raises(DtypeError, match="got int64"):
        make(7)
