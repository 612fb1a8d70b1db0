"""Small functions and modules beside eager: special values, types, sizes that move.

Whatever ``torch.compile(f, backend="roundoff")`` answers is eager's answer: NaN and infinities
where eager has them, its types and shapes, finite numbers within the units that the table states.
Or it is refused with a typed error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from function_table import BOOL, FLOATS, INTS, PARTS, TABLE, Case  # isort: skip

import roundoff.backend as rb
from roundoff.errors import RoundoffError

#: What the quick tests take: rows that were wrong once, and some of each part of the table.
QUICK = {
    *("sign float32", "sign bfloat16", "expm1 float32", "log1p float64", "trunc float32"),
    *(
        "abs int16",
        "abs int8",
        "isinf float64",
        "signbit float32",
        "x // 3 float32",
        "x % 3 float64",
        "fmod 3 int64",
    ),
    *("div trunc 2 int64", "x**0.50 float32", "x**3 int64", "x >> 2 int64", "x > 300 uint8"),
    *("logaddexp float32", "atan2 float32", "heaviside float32", "pow int int64"),
    *("maximum float32", "floor_divide int int64", "remainder float32", "clamp NaN float32"),
    *("gelu float32", "sigmoid float32", "hardswish float32", "logit eps float32"),
    *("sum of axes int64", "sum in int32 of axes int32", "amax of axes float32"),
    *("max of axes float16", "argmin of axes float32", "topk values of axes float32"),
    *("norm inf of axes float32", "cumsum of axes int64", "softmax of axes float32"),
    *("log_softmax of axes float64", "logsumexp of axes float32", "mean of nothing float32"),
    *("any and all of nothing bool", "softmax of nothing float32", "max of nothing float32"),
    *("to uint8 from int64", "to int8 from float32", "to bool from float32"),
    *("index by a tensor", "scatter_reduce mean True", "index_put accumulate"),
    *("cross_entropy ignored", "bce with logits", "addmm without a NaN bias float32"),
    *("matmul NaN float32", "attention with a row that sees nothing float32", "inv"),
    *("layer_norm float32", "batch_norm float64"),
    *("AvgPool2d divisor float32", "EmbeddingBag max", "LSTM float32", "complex"),
}
REST = [case for case in TABLE if case.name not in QUICK]
WHY = "two thousand rows take ten minutes; the quick ones sample them"


def runs(cases: list[Case]) -> Any:
    """A test for each case, by its name; those that are known to differ say why."""
    rows = []
    for case in cases:
        marks = [pytest.mark.xfail(strict=True, reason=case.wrong)] if case.wrong else []
        rows.append(pytest.param(case, id=case.name, marks=marks))
    return pytest.mark.parametrize("case", rows)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def unit(x: torch.Tensor) -> torch.Tensor:
    """One unit in the last place of each number, as float64."""
    kind = torch.finfo(x.dtype)
    size = x.double().abs().clamp(min=kind.smallest_normal)
    return torch.exp2(torch.floor(torch.log2(size))) * kind.eps


def near(case: Case, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Hold a result to eager's."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if expected.is_complex():
        got, expected = torch.view_as_real(got), torch.view_as_real(expected)
    if not expected.is_floating_point():
        assert torch.equal(got, expected), f"{got} for {expected}"
        return
    finite = expected.isfinite()
    same = torch.where(finite, got.isfinite(), (got == expected) | (got.isnan() & expected.isnan()))
    assert same.all(), f"{got[~same][:5]} for {expected[~same][:5]}"
    units = unit(expected).clamp(min=case.floor * torch.finfo(expected.dtype).eps)
    if case.scale and finite.any():
        units = units.clamp(min=float(unit(expected[finite].abs().max())))
    off = torch.where(finite, (got.double() - expected.double()).abs() / units, 0.0)
    assert (off <= case.ulps).all(), (
        f"{float(off.max()):.3g} units: {got[off > case.ulps][:5]} for "
        f"{expected[off > case.ulps][:5]}"
    )
    if case.zeros:
        turned = (expected == 0) & (got.signbit() != expected.signbit())
        assert not turned.any(), f"{int(turned.sum())} zeros of another sign"


def hold(case: Case, sizes: tuple[int, ...]) -> None:
    """One compiled function beside eager, at each of the sizes."""
    run = torch.compile(case.function, backend=rb.onnx_custom_backend, dynamic=len(sizes) > 1)
    for size in sizes:
        inputs = case.inputs(size)
        with torch.no_grad():
            expected = case.function(*(x.clone() for x in inputs))
            try:
                got = run(*(x.clone() for x in inputs))
            except RoundoffError:
                return  # refused
        leaves = torch.utils._pytree.tree_leaves
        for one, other in zip(leaves(got), leaves(expected), strict=True):
            if isinstance(other, torch.Tensor):
                near(case, one, other)
            else:
                assert one == other


def test_the_quick_rows_are_of_each_part_and_type_of_the_table() -> None:
    assert {case.name for case in TABLE} >= QUICK
    assert len({case.name for case in TABLE}) == len(TABLE), "no name twice"
    for name, part in PARTS.items():
        assert any(case.name in QUICK for case in part), name
    types = {str(dtype).removeprefix("torch.") for dtype in (*FLOATS, *INTS, *BOOL)}
    assert types == {name.split()[-1] for name in QUICK} & types


@runs([case for case in TABLE if case.name in QUICK])
def test_a_function(case: Case) -> None:
    hold(case, (64,))


@pytest.mark.slow(reason=WHY)
@runs(REST)
def test_every_function(case: Case) -> None:
    hold(case, (64,))


#: Rows that were wrong with sizes that move: a float that a size decides, nothing, an extreme.
QUICK_MOVING = {
    *("attention of three axes float32", "scaled_dot_product_attention float32", "cross_entropy"),
    *("Upsample bilinear to a size float32", "var of nothing float32", "max of axes float32"),
    *("embedding", "index by a tensor", "BatchNorm1d float32", "softmax of axes float32"),
}
OTHER_TYPES = ("float16", "float64", "int32", "int16", "int8")
MOVING = [case for case in TABLE if not any(t in case.name for t in OTHER_TYPES)]


@runs([case for case in TABLE if case.name in QUICK_MOVING])
def test_a_function_at_three_sizes(case: Case) -> None:
    hold(case, (64, 5, 19))


@pytest.mark.slow(reason=WHY)
@runs([case for case in MOVING if case.name not in QUICK_MOVING])
def test_every_function_at_three_sizes(case: Case) -> None:
    hold(case, (64, 5, 19))
