"""max_diff against exact arithmetic, and the properties it promises."""

import collections
import copy
import dataclasses
import json
import math
import pickle
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from roundoff.compare import Difference, max_diff, string_diff, ulp_distance
from roundoff.compare import stats as stats_module
from roundoff.dtypes import dtype_info, ulp
from roundoff.errors import ArgumentError

KEYS = [">0.0", ">0.0001", ">0.001", ">0.01", ">0.1", ">1.0", ">10.0", ">100.0"]
FLOATS = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]
SMALL = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz]
COUNTS = ("dnan", "nan", "dinf", "finite", "n", "differ")

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


def as_torch(array: Any) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)


@given(pairs(elements=finite))
@settings(max_examples=150, deadline=None)
def test_against_exact_arithmetic(pair: tuple[Any, Any]) -> None:
    e, g = pair
    found = max_diff(e, g, hist=True)
    exact = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(e.flat, g.flat, strict=True)
             if math.isfinite(x) and math.isfinite(y)]  # fmt: skip
    if len(exact) < e.size:  # float16 overflowed
        return
    sizes = [abs(y - x) for x, y in exact]
    assert found["n"] == e.size
    assert isinstance(found["n"], float)
    assert found["abs"] == float(max(sizes, default=Fraction(0)))
    assert found["sum"] == pytest.approx(float(sum(sizes)), rel=1e-13)
    ratios = [s / abs(x) for s, (x, _) in zip(sizes, exact, strict=True) if x]
    assert found["rel_nonzero"] == pytest.approx(float(max(ratios, default=0)), rel=1e-15)
    missed = sum(1 for x, y in exact if x == 0 != y)
    assert found["zeros"] == missed
    assert found["rel"] == (math.inf if missed else found["rel_nonzero"])
    bias = sum(y - x for x, y in exact) / max(len(exact), 1)
    assert found["bias"] == pytest.approx(float(bias), rel=1e-10, abs=1e-13 * found["abs"])
    assert list(found["rep"]) == KEYS
    assert list(found["rep"].values()) == [sum(s > float(k[1:]) for s in sizes) for k in KEYS]
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
    assert (ulp_distance(x.astype(dtype), y.astype(dtype)) == steps).all()
    # The wider type is rounded to the narrow one, so that nothing changes.
    assert (ulp_distance(x, y.astype(dtype)) == steps).all()
    assert max_diff(x.astype(dtype), y.astype(dtype))["ulp"] == steps.max()
    assert max_diff(x, y.astype(dtype))["ulp"] == steps.max()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_ulp_at_the_seams(dtype: Any) -> None:
    info = np.finfo(dtype)
    small, one = info.smallest_subnormal, dtype(1)
    cases = [
        (dtype(0), dtype(-0.0), 0),
        (small, -small, 2),
        (np.nextafter(one, dtype(2)), one, 1),
        (np.nextafter(one, dtype(0)), np.nextafter(one, dtype(2)), 2),
        (info.max, -info.max, 2 * (int(info.max.view(f"u{info.bits // 8}")))),
        (info.max, dtype(np.inf), math.inf),
        (dtype(np.inf), dtype(np.inf), 0),
        (dtype(np.nan), dtype(np.nan), 0),
        (dtype(np.nan), one, math.inf),
    ]
    for a, b, steps in cases:
        for x, y in ((a, b), (b, a)):
            found = max_diff(np.array([x, one]), np.array([y, one]))
            assert found["ulp"] == steps, (x, y)
            far = 2**64 - 1 if steps == math.inf else steps
            assert int(ulp_distance(x, y)) == far


@given(pairs(dtypes=[np.float16, ml_dtypes.bfloat16, np.float32]))
@settings(max_examples=80, deadline=None)
def test_err_ulp_is_mullers(pair: tuple[Any, Any]) -> None:
    e, g = pair
    truth = e.astype(np.float64) * (1 + 1e-9)
    found = max_diff(truth, g)
    with np.errstate(invalid="ignore"):
        error = np.abs(g.astype(np.float64) - truth) / ulp(truth, g.dtype)
        error = np.asarray(error)
        error[(g.astype(np.float64) == truth) | (np.isnan(truth) & np.isnan(g))] = 0
        error[np.isnan(error)] = np.inf
    assert found["err_ulp"] == pytest.approx(error.max(initial=0), rel=1e-15)
    assert "err_ulp" not in max_diff(g, truth)


@given(pairs())
@settings(max_examples=150, deadline=None)
def test_symmetry(pair: tuple[Any, Any]) -> None:
    one, other = max_diff(*pair, hist=True), max_diff(*pair[::-1], hist=True)
    for key in ("abs", "ulp", "sum", "rep", *COUNTS):
        assert one[key] == other[key], key
    assert one["bias"] == -other["bias"]


@given(pairs())
@settings(max_examples=150, deadline=None)
def test_torch_and_numpy_agree(pair: tuple[Any, Any]) -> None:
    e, g = pair
    arrays = max_diff(e, g, hist=True)
    for mixed in ((as_torch(e), as_torch(g)), (e, as_torch(g)), (as_torch(e), g)):
        found = max_diff(*mixed, hist=True)
        for key in arrays.keys() - {"notes", "expected", "got", "dev"}:
            assert found[key] == arrays[key], key


@given(pairs(dtypes=[np.float32, np.float16]), st.integers(0, 5), st.sampled_from([1, 4]))
@settings(max_examples=100, deadline=None)
def test_strides_and_pieces_do_not_matter(pair: tuple[Any, Any], seed: int, threads: int) -> None:
    e, g = pair
    whole = max_diff(e, g, hist=True)
    order = tuple(np.random.default_rng(seed).permutation(e.ndim))
    back = tuple(np.argsort(order))
    swapped = [np.array(a.transpose(order), order="C").transpose(back) for a in (e, g)]
    strided = [np.repeat(a[..., None], 2, -1)[..., 0] for a in (e, g)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats_module, "RUN", 3)
        patch.setattr(stats_module, "STRIDED", 7)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        for others in ((e, g), swapped, strided):
            found = max_diff(*others, hist=True)
            for key in whole.keys() - {"sum", "bias", "expected", "got"}:
                assert found[key] == whole[key], key
            assert found["sum"] == pytest.approx(whole["sum"], rel=1e-13)
            assert found["bias"] == pytest.approx(whole["bias"], rel=1e-9, abs=1e-12)


@given(
    st.sampled_from([(np.float16, "u2", 15), (np.float32, "u4", 31), (np.float64, "u8", 63),
                     (ml_dtypes.bfloat16, "u2", 15)]),
    st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.01, 0.5]), st.integers(0, 40),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_runs_on_one_core_give_what_shared_pieces_do(
    format_: tuple[Any, str, int], seed: int, unlike: float, shift: int
) -> None:
    """Any bits, so subnormals, zeros, both signs: a run skips what it takes for smaller."""
    dtype, unsigned, top = format_
    rng = np.random.default_rng(seed)
    n = 400
    bits = rng.integers(0, 2**top, n, dtype=np.uint64) >> rng.integers(0, shift + 1, n, np.uint64)
    other = bits + rng.integers(0, 1 << min(shift, top - 2), n, dtype=np.uint64)
    other = np.where(rng.random(n) < unlike, other | np.uint64(1 << top), other)
    e, g = (torch.from_numpy(b.astype(unsigned).view(f"i{unsigned[1]}")) for b in (bits, other))
    kind = getattr(torch, dtype_info(dtype).name)
    e, g = e.view(kind), g.view(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats_module, "RUN", 32)
        patch.setattr(torch, "get_num_threads", lambda: 1)
        runs = max_diff(e, g, hist=True)
        patch.setattr(stats_module, "RUN", 1 << 20)
        patch.setattr(torch, "get_num_threads", lambda: 16)
        pieces = max_diff(e, g, hist=True)
    for key in pieces.keys() - {"sum", "bias", "expected", "got"}:
        assert runs[key] == pieces[key], key
    assert runs["sum"] == pytest.approx(pieces["sum"], rel=1e-13)


def test_a_ratio_of_subnormal_numbers_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_module, "RUN", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    tiny = 5e-324  # 0.7 of it rounds to itself
    assert max_diff(np.array([1.0, tiny]), np.array([1.7, 2 * tiny])).rel == 1.0


def test_non_finite_values_have_an_answer() -> None:
    e = np.float32([np.nan, np.nan, 1, np.inf, np.inf, np.inf, 0])
    g = np.float32([np.nan, 1, np.nan, np.inf, -np.inf, 7, 0])
    found = max_diff(e, g, hist=True)
    assert found["nan"] == 1
    assert found["dnan"] == 2
    assert found["dinf"] == 2
    assert (found["abs"], found["sum"], found["ulp"]) == (math.inf, math.inf, math.inf)
    assert found["argm"] == (1,)
    assert found["bias"] == 0
    assert found["rep"][">100.0"] == 4
    same = max_diff(e, e.copy(), hist=True)
    assert (same["abs"], same["rel"], same["ulp"], same["nan"]) == (0, 0, 0, 2)
    assert string_diff(same) == "abs=0, rel=0"
    assert string_diff(found).endswith("dnan=2.0, dinf=2")


def test_zero_expected_is_shown() -> None:
    found = max_diff(np.float64([0, 0, 2]), np.float64([0, 1e-9, 2.5]))
    assert (found["rel"], found["zeros"], found["rel_nonzero"]) == (math.inf, 1, 0.25)
    assert "zeros=1 (rel=0.25 elsewhere)" in string_diff(found)
    tiny = max_diff(np.float64([5e-324]), np.float64([1.5e-323]))
    assert (tiny["rel"], tiny["zeros"]) == (2.0, 0)


@pytest.mark.parametrize(
    ("e", "g", "size", "units"),
    [
        (np.array([True, False]), np.array([True, True]), 1.0, 1),
        (np.array([2**63 - 1]), np.array([-(2**63)]), float(2**64 - 1), None),
        (np.array([2**62 + 1]), np.array([2**62]), 1.0, 1),
        (np.array([2**64 - 1], np.uint64), np.array([2**64 - 3], np.uint64), 2.0, 2),
        (np.array([2**64 - 1], np.uint64), np.array([-1]), float(2**64), None),
        (np.array([200], np.uint8), np.array([-100], np.int8), 300.0, 300),
        (np.array([7], ml_dtypes.int4), np.array([-8], ml_dtypes.int4), 15.0, 15),
        (np.array([3 + 4j]), np.array([0j]), 5.0, None),
        (np.array([1 + 1j], np.complex64), np.array([1 + 1.0000001j], np.complex64), 2.0**-23, 1),
        (3, 3.5, 0.5, None),
        (True, 2, 1.0, 1),
        (10**30, 10**30, 0.0, 0),
    ],
)
def test_other_types(e: Any, g: Any, size: float, units: int | None) -> None:
    for x, y in ((e, g), (g, e)):
        found = max_diff(x, y)
        assert found["abs"] == size
        if units is not None:
            assert found["ulp"] == units


def test_complex_bias_and_nan() -> None:
    found = max_diff(np.array([1 + 1j, 2]), np.array([1 + 2j, 2 + 1j]))
    assert found["bias"] == 1j
    assert found["rel"] == pytest.approx(1 / math.sqrt(2))
    half = max_diff(np.array([complex(math.nan, 0)]), np.array([1j]))
    assert (half["dnan"], half["abs"]) == (1, math.inf)


def test_what_differs_is_noted() -> None:
    found = max_diff({"x": [np.float32([1])]}, {"x": [torch.tensor([1.0], dtype=torch.float64)]})
    assert found["notes"] == [
        "dtype float32 against float64 at ['x'][0]",
        "kind array against tensor at ['x'][0]",
    ]
    assert max_diff(torch.ones(1), torch.ones(1, dtype=torch.float16))["notes"] == [
        "dtype float32 against float16"
    ]
    assert max_diff((1.0,), [1.0])["notes"] == ["tuple against list"]
    assert max_diff(np.ones(2), [np.ones(2)])["notes"] == ["a tensor against one in a list"]


@pytest.mark.parametrize(
    ("e", "g", "text"),
    [
        (np.zeros((2, 3)), np.zeros((3, 2)), "shape (2, 3) against (3, 2)"),
        (np.zeros((0, 3)), np.zeros((0, 2)), "shape (0, 3) against (0, 2)"),
        ([1, 2], [1], "2 values against 1"),
        ({"a": 1}, {"a": 1, "b": 2}, "keys [] against ['b']"),
        (None, 1.0, "None against float"),
        ([np.ones(2), None], [np.ones(2), np.ones(2)], "None against A11s2 at [1]"),
        ("a", 1, "str against int"),
        (np.ones(1), np.array(["a"]), "A11s1 against A8s1"),
    ],
)
def test_structure_is_never_zero(e: Any, g: Any, text: str) -> None:
    found = max_diff(e, g, hist=True)
    assert found["mismatch"] == [text]
    assert {found[k] for k in ("abs", "rel", "sum", "n", "dnan", "ulp")} == {math.inf}
    assert not found.within(abs=math.inf)
    assert text in string_diff(found)


def test_pytrees_merge() -> None:
    e = [np.float32([1, 2]), {"k": torch.tensor([3.0]), "n": None}, (4, "s")]
    g = [np.float32([1, 2.5]), {"k": torch.tensor([1.0]), "n": None}, (4, "s")]
    found = max_diff(e, g, hist=True)
    assert (found["abs"], found["n"], found["sum"]) == (2.0, 5.0, 2.5)
    assert (found["where"], found["argm"], found["expected"], found["got"]) == (
        "[1]['k']", (0,), 3.0, 1.0,
    )  # fmt: skip
    assert found["bias"] == pytest.approx((0.5 - 2) / 4)  # the string has none
    assert found["rep"][">0.1"] == 2
    assert found["rep"][">1.0"] == 1
    assert max_diff(e, e, hist=True)["rep"] == dict.fromkeys(KEYS, 0)


@given(pairs(dtypes=[np.float32]), pairs(dtypes=[np.float32]))
@settings(max_examples=50, deadline=None)
def test_a_list_is_its_concatenation(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    nested = max_diff([one[0], other[0]], [one[1], other[1]], hist=True)
    joined = [np.concatenate([one[i].ravel(), other[i].ravel()]) for i in (0, 1)]
    flat = max_diff(*joined, hist=True)
    for key in ("abs", "rel", "rel_nonzero", "zeros", "ulp", "rep", *COUNTS):
        assert nested[key] == flat[key], key
    assert nested["sum"] == pytest.approx(flat["sum"], rel=1e-12)
    assert nested["bias"] == pytest.approx(flat["bias"], rel=1e-9, abs=1e-9)


def test_strings() -> None:
    found = max_diff(np.array(["a", "b"], object), np.array([b"a", b"c"], object), hist=True)
    assert (found["abs"], found["argm"], found["n"]) == (math.inf, (1,), 2)
    assert max_diff("x", "x")["abs"] == 0


def test_flatten_keeps_keys_together() -> None:
    expected = {"a": np.ones(2), "b": [np.zeros(2), np.zeros(2)]}
    got = {"b": [[np.zeros(2)], [np.zeros(2)], []], "a": np.ones(2)}
    assert max_diff(expected, got).abs == math.inf
    assert max_diff(expected, got, flatten=True).abs == 0


def test_other_containers() -> None:
    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.float32([1, 2]))
    proto = onnx.numpy_helper.from_array(np.float32([1, 4]))
    assert max_diff(value, proto)["abs"] == 2
    assert max_diff(torch.ones(2, 2).to_sparse(), torch.ones(2, 2))["abs"] == 0
    assert max_diff(torch.nn.Parameter(torch.ones(2)), torch.ones(2))["abs"] == 0


def test_an_output_object_against_its_tensors_in_a_list() -> None:
    from transformers import DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithPast

    @dataclasses.dataclass
    class Output:
        logits: Any
        hidden: Any = None

    logits, hidden = torch.arange(3.0), (torch.zeros(2), torch.ones(2))
    for output in (
        CausalLMOutputWithPast(logits=logits, hidden_states=hidden),
        Output(logits, hidden),
        collections.namedtuple("Named", "logits hidden")(logits, hidden),
        {"logits": logits, "hidden": hidden},
    ):
        for values in ((logits, hidden), [logits, list(hidden)], [logits, *hidden]):
            for pair in ((output, values), (values, output)):
                assert max_diff(*pair)["mismatch"] == []
                assert max_diff(*pair)["n"] == 7
                assert max_diff(*pair)["abs"] == 0
        shifted = max_diff(output, [logits, hidden[0], hidden[1] + 1])
        assert (shifted.abs, shifted.where, shifted.index) == (1.0, "[2]", (0,))
        assert max_diff(output, (logits,))["mismatch"] == ["2 values against 1"]
    cache = DynamicCache()
    layers = [tuple(torch.full((1, 1, 2, 2), 2.0 * i + j) for j in (0, 1)) for i in (0, 1)]
    for layer, (key, value) in enumerate(layers):
        cache.update(key, value, layer)
    # A pair of lists, of keys and of values, is not a pair of layers.
    assert max_diff(cache, tuple(layers)).abs == 0
    output = CausalLMOutputWithPast(logits=logits, past_key_values=cache)
    assert max_diff(output, (logits, tuple(layers))).abs == 0
    assert max_diff([logits, *layers[0], *layers[1]], output).abs == 0


def test_values_have_names() -> None:
    found = max_diff([np.zeros(1), np.float64([1, 2])], [np.zeros(1), np.float32([1, 2.5])])
    assert (found.abs, found.rel, found.ulp, found.n, found.differ) == (0.5, 0.25, 2**21, 3.0, 1)
    assert (found.where, found.index, found.expected, found.got) == ("[1]", (1,), 2.0, 2.5)
    assert found.share == 1 / 3
    assert found.histogram == {}
    assert repr(found) == (
        "Difference(abs=0.5, rel=0.25, ulp=2097152, err_ulp=2097152.0, share=0.333, n=3, "
        "where='[1]', index=(1,))"
    )
    assert max_diff([1.0, 5.0], [1.0, 5.5], hist=[0.1, 1]).histogram == {0.1: 1, 1.0: 0}
    with pytest.raises(AttributeError, match="'rep'"):
        found.rep  # noqa: B018
    assert {"abs", "err_ulp", "within"} <= set(dir(found))
    assert copy.deepcopy(found) == pickle.loads(pickle.dumps(found)) == found
    same, apart = max_diff(np.ones(2), np.ones(2)), max_diff([1], [1, 2])
    assert (same.share, apart.share, max_diff([], []).share) == (0.0, 1.0, 0.0)
    assert repr(same) == "Difference(abs=0.0, rel=0.0, ulp=0, share=0, n=2)"
    assert "mismatch=['1 values against 2']" in repr(apart)
    assert max_diff(np.array([math.nan, 1.0]), np.ones(2)).share == 0.5


def test_a_mapping_that_scripts_edit() -> None:
    found = max_diff(np.float32([1, 2]), np.float32([1, 2.5]), hist=True)
    assert isinstance(found, Difference)
    found["name"] = "Z"
    found.update(found["rep"])
    del found["rep"]
    assert found[">0.1"] == 1
    assert string_diff(found) == "abs=0.5, rel=0.25, n=2.0"
    assert json.loads(json.dumps(found))["argm"] == [1]
    custom = max_diff(np.float32([1, 2]), np.float32([1, 2.5]), hist=[0.4, 0.6])
    assert custom["rep"] == {">0.4": 1, ">0.6": 0}


def test_judged_afterwards() -> None:
    found = max_diff(np.float64([1, 2]), np.float32([1, 2.5]))
    assert found.within(abs=0.5)
    assert not found.within(abs=0.4)
    assert not found.within(abs=0.5, rel=0.2)
    assert found.within(err_ulp=found["err_ulp"])
    with pytest.raises(ArgumentError, match="no threshold"):
        found.within()
    with pytest.raises(ArgumentError, match="no 'err_ulp'"):
        max_diff(1.0, 1.0).within(err_ulp=1)


def test_published_line() -> None:
    found = {"abs": 0.000152587890625, "rel": 5.568541537966721e-07, "n": 2359296.0,
             "rep": {">0.0": 1484455, ">0.0001": 2032, ">0.001": 0}}  # fmt: skip
    assert string_diff(found) == (
        "abs=0.000152587890625, rel=5.568541537966721e-07, n=2359296.0/#1484455>0.0-#2032>0.0001"
    )
    assert string_diff(max_diff(torch.ones(3), torch.ones(3), hist=True)) == "abs=0, rel=0"


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (2**63, 2**63 + 1, 1),
        (-(2**63) - 1, -(2**63), 1),
        (2**64, 3, 2**64 - 3),
        (2**63 + 1, 2.0**63, 1),
        (np.uint64(2**63), 2**63 + 1, 1),
        (np.array([2**63], np.uint64), np.array([2**63 + 1], np.uint64), 1),
        (np.array([2**63 + 1], np.uint64), np.array([2.0**63]), 1),
        (np.array([2**53 + 1]), np.array([2.0**53]), 1),
        (np.array([2**53 + 1]), np.array([2**53], np.float32), 1),
        (np.array([-(2**60) - 1, 0]), torch.tensor([-(2.0**60), 0.25]).double(), 1),
    ],
)
def test_large_integers_are_subtracted_exactly(one: object, other: object, apart: int) -> None:
    for e, g in ((one, other), (other, one)):
        found = max_diff(e, g, hist=[0.5])
        assert (found.abs, found["differ"] > 0) == (float(apart), True)
        assert found.histogram[0.5] == 1
    assert max_diff(one, one).abs == max_diff(other, other).abs == 0


def test_integers_beyond_float64_differ() -> None:
    for other in (1, 1.5, math.inf, -(2**2000), math.nan):
        found = max_diff([2**2000], [other])
        assert (found.abs, found.where) == (math.inf, "[0]")
        assert repr(found)
    assert max_diff(2**2000, 2**2000).abs == 0
    for other in ("text", None, [1.0, 2.0]):
        assert max_diff(2**2000, other)["mismatch"]


def test_a_mask_is_respected() -> None:
    masked = np.ma.masked_array([[1.0, 2.0], [3.0, 4.0]], mask=[[0, 1], [0, 0]])
    found = max_diff(masked, np.array([[1.0, 99.0], [3.0, 4.0]]))
    assert (found.abs, found["n"]) == (0, 3)
    assert found["notes"] == ["1 masked elements left out"]
    found = max_diff({"a": torch.tensor([[1.0, 0.0], [3.0, 5.0]])}, {"a": masked})
    assert (found.abs, found.where, found.index) == (1, "['a']", (1, 1))
    again = np.ma.masked_array([[1.0, 77.0], [3.0, 4.5]], mask=masked.mask)
    assert (max_diff(masked, again).abs, max_diff(masked, again).index) == (0.5, (1, 1))
    other = np.ma.masked_array(masked.data, mask=[[1, 0], [0, 0]])
    assert max_diff(masked, other)["mismatch"] == ["masks differ at 2 of 4 elements"]
    assert max_diff(masked, np.ones((2, 3)))["mismatch"]
    assert max_diff(masked, None)["mismatch"]
    nothing = np.ma.masked_all((2, 2))
    assert (max_diff(nothing, nothing).abs, max_diff(nothing, nothing)["n"]) == (0, 0)
    open_ = np.ma.masked_array([1.0, 2.0])
    assert max_diff(open_, np.array([1.0, 2.5])).index == (1,)
    text = np.ma.masked_array(["a", "b"], mask=[0, 1])
    assert max_diff(text, np.array(["a", "c"])).abs == 0
    assert max_diff(text, np.array(["c", "c"])).index == (0,)
