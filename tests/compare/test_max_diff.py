"""max_diff against exact arithmetic, and the properties it promises."""

import copy
import math
import pickle
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from roundoff.compare import max_diff, string_diff, ulp_distance
from roundoff.compare import stats as stats_module
from roundoff.dtypes import dtype_info
from roundoff.errors import ArgumentError

#: The keys of a histogram, in their order.
KEYS = [">0.0", ">0.0001", ">0.001", ">0.01", ">0.1", ">1.0", ">10.0", ">100.0"]
FLOATS = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]
SMALL = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz]
COUNTS = ("dnan", "dinf", "n", "differ")

finite = st.floats(-1e4, 1e4, width=32)
anything = st.one_of(finite, st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-30]))


@st.composite
def pairs(draw: Any, elements: Any = anything, dtypes: Any = None) -> tuple[Any, Any]:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    found = []
    for _ in range(2):
        dtype = draw(st.sampled_from(dtypes or FLOATS))
        values = draw(hnp.arrays(np.float64, shape, elements=elements))
        with np.errstate(over="ignore"):
            found.append(values.astype(dtype))
    if draw(st.booleans()):  # near each other, as results are
        found[1] = np.asarray(found[0] * np.float64(1 + 1e-3)).astype(found[1].dtype)
    return np.asarray(found[0]), np.asarray(found[1])


@given(pairs(elements=finite))
@settings(max_examples=150, deadline=None)
def test_against_exact_arithmetic(pair: tuple[Any, Any]) -> None:
    e, g = pair
    found = max_diff(e, g, hist=True)
    exact = [
        (Fraction(float(x)), Fraction(float(y)))
        for x, y in zip(e.flat, g.flat, strict=True)
        if math.isfinite(x) and math.isfinite(y)
    ]
    if len(exact) < e.size:  # float16 overflowed
        return
    sizes = [abs(y - x) for x, y in exact]
    assert found["n"] == e.size
    assert found["abs"] == float(max(sizes, default=Fraction(0)))
    assert found["sum"] == pytest.approx(float(sum(sizes)), rel=1e-13)
    ratios = [s / abs(x) for s, (x, _) in zip(sizes, exact, strict=True) if x]
    assert found["rel_nonzero"] == pytest.approx(float(max(ratios, default=0)), rel=1e-15)
    missed = sum(1 for x, y in exact if x == 0 != y)
    assert found["zeros"] == missed
    assert found["rel"] == (math.inf if missed else found["rel_nonzero"])
    assert found["differ"] == sum(s > 0 for s in sizes)
    # Differences are taken in float64: one that is hardly above a threshold may be rounded to it.
    assert found["rep"] == {key: sum(float(s) > float(key[1:]) for s in sizes) for key in KEYS}
    if found["argm"] is not None:
        at = found["argm"]
        assert (found["expected"], found["got"]) == (float(e[at]), float(g[at]))
        assert abs(found["got"] - found["expected"]) == found["abs"]


def ladder(dtype: Any) -> np.ndarray:
    """Every finite number of a narrow format, in order, zero once."""
    info = dtype_info(dtype)
    bits = np.arange(2**info.bits, dtype=f"u{info.bits // 8}").view(dtype)
    with np.errstate(invalid="ignore"):
        bits = bits.astype(np.float32).astype(np.float64)
    return np.unique(bits[np.isfinite(bits)])


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, *SMALL], ids=lambda d: d.__name__
)
def test_ulp_counts_steps_of_the_format(dtype: Any) -> None:
    values = ladder(dtype)
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, len(values), 4000) for _ in range(2))
    x, y = values[a], values[b]
    steps = np.abs(a - b)
    # The wider type is rounded to the narrow one, so that nothing changes.
    for one in x, x.astype(dtype):
        assert (ulp_distance(one, y.astype(dtype)) == steps).all()
        assert max_diff(one, y.astype(dtype)).ulp == steps.max()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_ulp_at_the_seams(dtype: Any) -> None:
    info, one = np.finfo(dtype), dtype(1)
    small, far = info.smallest_subnormal, 2**64 - 1
    for x, y, steps in (
        (dtype(0), dtype(-0.0), 0),
        (small, -small, 2),
        (np.nextafter(one, dtype(2)), one, 1),
        (np.nextafter(one, dtype(0)), np.nextafter(one, dtype(2)), 2),
        (info.max, -info.max, 2 * int(info.max.view(f"u{info.bits // 8}"))),
        (info.max, dtype(np.inf), far),
    ):
        assert int(ulp_distance(x, y)) == int(ulp_distance(y, x)) == steps
        assert max_diff([x, one], [y, one]).ulp == (math.inf if steps == far else steps)


@given(pairs())
@settings(max_examples=150, deadline=None)
def test_symmetry(pair: tuple[Any, Any]) -> None:
    one, other = max_diff(*pair, hist=True), max_diff(*pair[::-1], hist=True)
    for key in ("abs", "ulp", "sum", "rep", *COUNTS):
        assert one[key] == other[key], key


@given(pairs(dtypes=[np.float32, np.float16]), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_strides_and_pieces_do_not_matter(pair: tuple[Any, Any], seed: int) -> None:
    e, g = pair
    whole = max_diff(e, g, hist=True)
    order = tuple(np.random.default_rng(seed).permutation(e.ndim))
    back = tuple(np.argsort(order))
    swapped = [np.array(a.transpose(order), order="C").transpose(back) for a in (e, g)]
    strided = [np.repeat(a[..., None], 2, -1)[..., 0] for a in (e, g)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats_module, "PIECE", 7)
        for others in ((e, g), swapped, strided):
            found = max_diff(*others, hist=True)
            for key in whole.keys() - {"sum", "expected", "got"}:
                assert found[key] == whole[key], key
            assert found["sum"] == pytest.approx(whole["sum"], rel=1e-13)


def test_non_finite_values_have_an_answer() -> None:
    e = np.float32([np.nan, np.nan, 1, np.inf, np.inf, np.inf, 0])
    g = np.float32([np.nan, 1, np.nan, np.inf, -np.inf, 7, 0])
    found = max_diff(e, g)
    assert (found.dnan, found.dinf, found.differ, found.index) == (2, 2, 4, (1,))
    assert found.abs == found.sum == found.ulp == math.inf
    same = max_diff(e, e.copy())
    assert (same.abs, same.rel, same.ulp) == (0, 0, 0)
    assert string_diff(same) == "abs=0, rel=0"
    assert string_diff(found).endswith("dnan=2.0, dinf=2")
    assert max_diff(np.int64([2**53 + 1, 0]), np.float64([2**53, np.nan])).differ == 2


@pytest.mark.parametrize(
    ("e", "g", "size", "units"),
    [
        (np.array([True, False]), np.array([True, True]), 1.0, 1),
        (np.array([2**63 - 1]), np.array([-(2**63)]), float(2**64 - 1), None),
        (np.array([2**63 + 1], np.uint64), np.array([2.0**63]), 1.0, None),
        (np.array([2**64 - 1], np.uint64), np.array([2**64 - 3], np.uint64), 2.0, 2),
        (np.array([2**64 - 1], np.uint64), np.array([-1]), float(2**64), None),
        (np.array([200], np.uint8), np.array([-100], np.int8), 300.0, 300),
        (np.array([7], ml_dtypes.int4), np.array([-8], ml_dtypes.int4), 15.0, 15),
        (np.array([3 + 4j]), np.array([0j]), 5.0, None),
        (np.array([1 + 1j], np.complex64), np.array([1 + 1.0000001j], np.complex64), 2.0**-23, 1),
        (3, 3.5, 0.5, None),
    ],
)
def test_other_types(e: Any, g: Any, size: float, units: int | None) -> None:
    for x, y in ((e, g), (g, e)):
        found = max_diff(x, y)
        assert (found.abs, found.differ) == (size, 1)
        if units is not None:
            assert found["ulp"] == units


def test_complex_numbers_and_nan() -> None:
    assert max_diff([1 + 1j, 2], [1 + 2j, 2 + 1j]).rel == pytest.approx(1 / math.sqrt(2))
    half = max_diff(complex(math.nan, 0), 1j)
    assert (half.dnan, half.abs) == (1, math.inf)


@pytest.mark.parametrize(
    ("e", "g", "text"),
    [
        (np.zeros((2, 3)), np.zeros((3, 2)), "shape (2, 3) against (3, 2)"),
        ([1, 2], [1], "2 values against 1"),
        ({"a": 1}, {"a": 1, "b": 2}, "keys [] against ['b']"),
        (None, 1.0, "None against float"),
        ([np.ones(2), None], [np.ones(2), np.ones(2)], "None against A11s2 at [1]"),
        (np.ones(1), np.array(["a"]), "A11s1 against A8s1"),
    ],
)
def test_structure_is_never_zero(e: Any, g: Any, text: str) -> None:
    found = max_diff(e, g)
    assert found["mismatch"] == [text]
    assert {found[k] for k in ("abs", "rel", "sum", "n", "dnan", "ulp")} == {math.inf}
    assert text in string_diff(found)


def test_pytrees_merge() -> None:
    e = [np.float32([1, 2]), {"k": torch.tensor([3.0]), "n": None}, (4, "s")]
    g = [np.float32([1, 2.5]), {"k": torch.tensor([1.0]), "n": None}, (4, "s")]
    found = max_diff(e, g)
    assert (found.abs, found.n, found.sum, found.differ) == (2.0, 5.0, 2.5, 2)
    assert (found.where, found.index, found.expected, found.got) == ("[1]['k']", (0,), 3.0, 1.0)
    assert max_diff(e, e).differ == 0


def test_strings() -> None:
    found = max_diff(np.array(["a", "b"], object), np.array([b"a", b"c"], object))
    assert (found["abs"], found["differ"], found["n"]) == (math.inf, 1, 2)
    assert (found.index, found.expected, found.got) == ((1,), "b", b"c")
    assert max_diff(["x", {"k": "y"}], ["x", {"k": "z"}]).where == "[1]['k']"
    assert max_diff("x", "x")["abs"] == 0


def test_an_output_object_against_its_tensors_in_a_list() -> None:
    """As a session gives them: in a flat list, of a cache the keys and values of each layer."""
    logits, hidden = torch.arange(3.0), (torch.zeros(2), torch.ones(2))
    output = CausalLMOutputWithPast(logits=logits, hidden_states=hidden)
    for values in ((logits, hidden), [logits, *hidden]):
        for pair in ((output, values), (values, output)):
            assert (max_diff(*pair).n, max_diff(*pair).abs) == (7, 0)
    shifted = max_diff(output, [logits, hidden[0], hidden[1] + 1])
    assert (shifted.abs, shifted.where, shifted.index) == (1.0, "[2]", (0,))
    assert max_diff(output, (logits,))["mismatch"] == ["2 values against 1"]
    cache = DynamicCache()
    layers = [tuple(torch.full((1, 1, 2, 2), 2.0 * i + j) for j in (0, 1)) for i in (0, 1)]
    for layer, (key, value) in enumerate(layers):
        cache.update(key, value, layer)
    # A pair of lists, of keys and of values, is not a pair of layers.
    output = CausalLMOutputWithPast(logits=logits, past_key_values=cache)
    assert max_diff(output, (logits, tuple(layers))).abs == 0
    assert max_diff([logits, *layers[0], *layers[1]], output).abs == 0


def test_values_have_names() -> None:
    found = max_diff([np.zeros(1), np.float64([1, 2])], [np.zeros(1), np.float32([1, 2.5])])
    assert (found.rel, found.ulp, found.differ) == (0.25, 2**21, 1)
    assert pickle.loads(pickle.dumps(found)) == found
    shares = [max_diff([1], [1, 2]), max_diff([], []), max_diff([math.nan, 1.0], [1.0, 1.0]), found]
    assert [each.share for each in shares] == [1, 0, 0.5, 1 / 3]


def test_a_histogram_counts_what_is_above_each_threshold() -> None:
    e = [torch.zeros(3), {"k": np.zeros((2, 2), np.int64)}, None, "s", np.zeros((0, 3))]
    g = [np.float16([0, 0.25, math.nan]), {"k": torch.ones(2, 2, dtype=torch.bool)}, None, "t"]
    found = max_diff(e, [*g, torch.zeros(0, 3)], hist=True)
    # 0.25, NaN beside 0, four times 1 and a string: seven differ, of 0.25 and 1 fewer are large.
    assert found["rep"] == dict(zip(KEYS, [7, 7, 7, 7, 7, 2, 2, 2], strict=True))
    assert (found["rep"][">0.0"], found["dnan"]) == (found["differ"], 1)
    assert max_diff(e, e, hist=True)["rep"] == dict.fromkeys(KEYS, 0)
    assert max_diff(1, 3, hist=np.array([2, 1, 0.5, 1]))["rep"] == {">2.0": 0, ">1.0": 1, ">0.5": 1}
    assert max_diff(math.inf, -math.inf, hist=(1e300, math.inf))["rep"] == {">1e+300": 1, ">inf": 0}
    for nothing in (None, False, (), np.bool_(False)):
        assert "rep" not in max_diff(1, 3, hist=nothing)


@pytest.mark.parametrize(
    ("e", "g"), [([1, 2], [1]), (np.zeros(2), np.zeros(3)), (None, 1.0), ({"a": 1}, {"b": 1})]
)
def test_where_the_structures_differ_the_counts_are_infinite(e: Any, g: Any) -> None:
    assert max_diff(e, g, hist=True)["rep"] == dict.fromkeys(KEYS, math.inf)
    assert max_diff([e, 0.0], [g, 0.5], hist=True)["rep"] == dict.fromkeys(KEYS, math.inf)


@pytest.mark.parametrize("hist", ["0.1", 0.1, [math.nan], [-1], ["a"], {0.1: 1}, object()])
def test_a_threshold_is_a_number(hist: Any) -> None:
    with pytest.raises(ArgumentError, match="hist"):
        max_diff(1, 2, hist=hist)


def test_a_script_may_change_a_difference() -> None:
    """As published pages do, which take a row of a table out of it."""
    rows = []
    for shift in (0.0, 0.25):
        diff = max_diff([torch.zeros(4)], [np.full(4, shift, np.float32)], hist=True)
        diff["dtype"] = "FLOAT"
        diff.update(diff["rep"])
        for key in ("rep", "dnan", ">100.0", ">10.0"):
            del diff[key]
        rows.append(diff)
    frame = pd.DataFrame(rows).set_index("dtype")
    assert frame["abs"].tolist() == [0, 0.25]
    assert frame[KEYS[:6]].to_numpy().tolist() == [[0] * 6, [4, 4, 4, 4, 4, 0]]
    for lost in ([], ["n", "rel"], [*rows[1].keys() - {"abs"}]):
        left = copy.deepcopy(rows[1])
        for key in lost:
            del left[key]
        assert repr(left).startswith("Difference(abs=0.25")
        assert string_diff(left).startswith("abs=0.25")
        assert ("n=4" in repr(left)) is ("n=4.0" in string_diff(left)) is (not lost)


def test_a_line_has_the_counts_that_are_not_zero() -> None:
    diff = max_diff(torch.zeros(8), torch.tensor([0.25] * 3 + [0.0002] * 2 + [0.0] * 3), hist=True)
    ends = ", zeros=5 (rel=0.0 elsewhere)"
    counts = "/#5>0.0-#5>0.0001-#3>0.001-#3>0.01-#3>0.1"
    assert string_diff(diff) == f"abs=0.25, rel=inf, n=8.0{counts}{ends}"
    assert string_diff(dict(diff)) == string_diff(diff)
    del diff["rep"]
    assert string_diff(diff) == f"abs=0.25, rel=inf, n=8.0{ends}"
    assert string_diff(max_diff(1, 2, hist=[5])) == "abs=1.0, rel=1.0, n=1.0"
    assert string_diff(max_diff(1, 1, hist=True)) == "abs=0, rel=0"
    for wrong in ({}, {"rep": {}}, "abs", None, 0.5):
        with pytest.raises(ArgumentError, match="diff"):
            string_diff(wrong)  # type: ignore[arg-type]
