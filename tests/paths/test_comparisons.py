"""Bad input to the functions that compare: each is a typed error that says what to do instead.

``python tests/paths/test_comparisons.py`` prints what each case gives. No raw exception is left:
``MemoryError``, for ONNX Runtime's own lack of memory, is the one that could still come.
"""

import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from cases import Case, Unprintable, no_tensors, raised  # isort: skip

from roundoff import compare
from roundoff.compare import calibrated_tolerance, layer_norm_bound
from roundoff.dtypes import (
    dtype_info,
    onnx_dtype_name,
    onnx_dtype_to_np_dtype,
    onnx_dtype_to_torch_dtype,
    ulp,
)
from roundoff.errors import RoundoffError, UnsupportedError
from roundoff.evaluator import TorchOnnxEvaluator
from roundoff.localization import Runner, localize
from roundoff.models import layer_norm_matmul
from roundoff.runtimes import compare_runtimes

CPU = ["CPUExecutionProvider"]
X = torch.ones(2, 3)
ODD = object()


def small() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[n, 3] X, int64[k] rows) => '
        "(float[k, 3] Z) { Y = Exp(X)  Z = Gather(Y, rows) }"
    )


#: For files that are no models; gone when the process ends.
FOLDER = tempfile.TemporaryDirectory()
GOOD = {"X": torch.ones(4, 3), "rows": torch.tensor([0, 3])}


def comparing(model: Any = None, **options: Any) -> Case:
    model = small() if model is None else model
    return Case(compare_runtimes, (model,), {"providers": CPU, "calibration": 0} | options)


def feeding(**changed: Any) -> Case:
    return comparing(feeds={k: v for k, v in (GOOD | changed).items() if v is not ODD})


def broken(change: str, to: str) -> onnx.ModelProto:
    """A model with one input of a node changed."""
    model = small()
    for node in model.graph.node:
        for k, name in enumerate(node.input):
            if name == change:
                node.input[k] = to
    return model


def renamed(op_type: str) -> onnx.ModelProto:
    model = small()
    model.graph.node[0].op_type = op_type
    return model


def cuts() -> list[bytes]:
    """A model's bytes, cut short or with some of them changed."""
    whole = layer_norm_matmul().SerializeToString()
    random = np.random.default_rng(0)
    found = [whole[:k] for k in (1, len(whole) // 3, len(whole) // 2, len(whole) - 1)]
    for _ in range(6):
        changed = bytearray(whole)
        for at in random.integers(0, len(whole), 12):
            changed[at] ^= int(random.integers(1, 256))
        found.append(bytes(changed))
    return found


def models() -> list[Case]:
    folder = Path(FOLDER.name)
    (folder / "text.onnx").write_text("a picture of a cat")
    (folder / "empty.onnx").write_bytes(b"")
    wrong: list[Any] = [
        3,
        1.5,
        True,
        [],
        {},
        (),
        ODD,
        b"",
        b"xxxx",
        "",
        "nothing.onnx",
        folder,
        Path("no/such/folder/x.onnx"),
        folder / "text.onnx",
        folder / "empty.onnx",
        "a\0b",
        np.ones(3),
        X,
        torch.nn.Linear(2, 2),
        lambda x: x,
        onnx.ModelProto(),
        onnx.GraphProto(),
        broken("Y", "nothing"),
        renamed("Twirl"),
        renamed(""),
    ]
    return [Case(compare_runtimes, (None,)), *(comparing(m) for m in (*wrong, *cuts()[:4]))]


def options() -> list[Case]:
    without = [["CUDAExecutionProvider"], [("CUDAExecutionProvider", {"device_id": 0})]]
    return [
        *(comparing(providers=p) for p in without if not torch.cuda.is_available()),
        comparing(feeds=[]),
        comparing(feeds=[X]),
        comparing(feeds="X"),
        comparing(feeds=3),
        comparing(feeds={}),
        comparing(feeds={"X": X}),
        comparing(feeds=GOOD | {"more": X}),
        comparing(feeds={1: X}),
        comparing(feeds={None: X}),
        comparing(feeds=X),
        feeding(X=None),
        feeding(X="text"),
        feeding(X=3.0),
        feeding(X=X.double()),
        feeding(X=X.int()),
        feeding(X=X[0]),
        feeding(X=torch.ones(4, 4)),
        feeding(X=[1.0]),
        feeding(X=ODD),
        feeding(X=Unprintable()),
        feeding(X={}),
        feeding(X=b"x"),
        feeding(rows=torch.tensor([9])),
        feeding(rows=torch.tensor([-9])),
        feeding(rows=torch.tensor([0.0])),
        feeding(rows=torch.tensor(0)),
        feeding(rows=None),
        feeding(X=X.to_sparse()),
        feeding(X=torch.ones(4, 3, device="meta")),
        feeding(X=np.ones((4, 3))),
        feeding(X=np.array([["a"] * 3] * 4)),
        feeding(X=np.ones((4, 3), complex)),
        feeding(X=np.ones((4, 3), np.longdouble)),
        feeding(X=np.ma.masked_array(np.ones((4, 3), np.float32), mask=np.eye(4, 3))),
        comparing(providers="CPUExecutionProvider"),
        comparing(providers=[]),
        comparing(providers=["NoSuchExecutionProvider"]),
        comparing(providers=3),
        comparing(providers=[None]),
        comparing(providers=[3]),
        comparing(providers=b"x"),
        comparing(providers=[("CPUExecutionProvider",)]),
        comparing(providers=[("CPUExecutionProvider", None)]),
        comparing(providers={"CPUExecutionProvider": {}}),
        comparing(sizes={"depth": 3}),
        comparing(sizes={"n": -1}),
        comparing(sizes={"n": 1.5}),
        comparing(sizes={"n": None}),
        comparing(sizes={"n": "3"}),
        comparing(sizes=[3]),
        comparing(sizes=3),
        comparing(sizes="n"),
        comparing(sizes={"n": 10**14}),
        comparing(sizes={"n": True}),
        comparing(sizes={None: 3}),
        comparing(feeds=GOOD, sizes={"n": 3}),
        comparing(seed=-1),
        comparing(seed=1.5),
        comparing(seed=None),
        comparing(seed="0"),
        comparing(seed=2**70),
        comparing(seed=math.nan),
        comparing(tf32="yes"),
        comparing(tf32=1),
        comparing(module=3),
        comparing(module="m"),
        comparing(module=lambda: None),
        comparing(module=lambda x, r: None),
        comparing(module=lambda x, r: "text"),
        comparing(module=lambda x, r: x[:1]),
        comparing(module=lambda x, r: 1 / 0),
        comparing(module=lambda x, r: x.nothing),
        comparing(module=lambda x, r: {}["a"]),
        comparing(module=lambda x, r: (x, x)),
        comparing(module=torch.nn.Linear(7, 7)),
        comparing(module=torch.nn.Dropout()),
        comparing(module=lambda x, r: [ODD]),
        comparing(calibration=-1),
        comparing(calibration=1),
        comparing(calibration=15),
        comparing(calibration=True),
        comparing(calibration="300"),
        comparing(calibration=30.0),
        comparing(calibration=[]),
        comparing(calibration=[GOOD] * 3),
        comparing(calibration=[X] * 20),
        comparing(calibration=[{}] * 20),
        comparing(calibration=[{"X": X}] * 20),
        comparing(calibration={"X": X}),
        comparing(calibration=math.nan),
        comparing(calibration=[GOOD] * 19 + [None]),
    ]


def located() -> list[Case]:
    model = small()
    one, wide = TorchOnnxEvaluator(model), TorchOnnxEvaluator(model, truth=True)
    other = TorchOnnxEvaluator(layer_norm_matmul())
    nodes = localize(one, one, GOOD)
    beyond = nodes.first_beyond
    return [
        Case(localize, (None, one, GOOD)),
        Case(localize, (one, None, GOOD)),
        Case(localize, (one, "two", GOOD)),
        Case(localize, (model, model, GOOD)),
        Case(localize, (one, one, None)),
        Case(localize, (one, one, [X])),
        Case(localize, (one, one, {})),
        Case(localize, (one, one, {"X": X})),
        Case(localize, (one, one, GOOD | {"more": X})),
        Case(localize, (one, other, GOOD)),
        Case(localize, (one, one, GOOD | {"X": X.double()})),
        Case(localize, (one, one, GOOD | {"X": "text"})),
        Case(localize, (one, one, GOOD | {"rows": torch.tensor([99])})),
        Case(localize, (one, one, GOOD), {"truth": one}),
        Case(localize, (one, one, GOOD), {"truth": True}),
        Case(localize, (one, one, GOOD), {"truth": "float64"}),
        Case(localize, (one, one, GOOD), {"truth": Runner("t", one)}),
        Case(localize, (one, one, GOOD), {"truth": Runner("t", wide, dtype=torch.float32)}),
        Case(
            localize,
            (one, one, GOOD),
            {"truth": TorchOnnxEvaluator(layer_norm_matmul(), truth=True)},
        ),
        Case(Runner, ("r", None)),
        Case(Runner, ("r", model)),
        Case(Runner, ("r", one, 3)),
        Case(Runner, ("r", one, None, torch.int32)),
        Case(Runner, ("r", one, None, "float32")),
        Case(localize, (Runner("r", one, lambda: None), one, GOOD)),
        Case(Runner("r", one).feeds, ([X],)),
        Case(Runner("r", one).feeds, (None,)),
        Case(Runner("r", one, None, torch.float16).feeds, ({"X": np.ones(2, np.longdouble)},)),
        Case(Runner("r", one).run_node, (99, (X,))),
        Case(Runner("r", one).run_node, (0, ())),
        Case(beyond, ("abs", 1)),
        Case(beyond, ("node", 1)),
        Case(beyond, (None, 1)),
        Case(beyond, (["op"], 1)),
        Case(beyond, ("isolated abs", math.nan)),
        Case(beyond, ("isolated abs", None)),
        Case(beyond, ("isolated abs", "1")),
    ]


def compared() -> list[Case]:
    f, ones = np.float32(X), np.ones(3)
    bound, used, error = compare.tolerance, compare.tolerance_used, compare.scaled_error
    found = compare.max_diff(1.0, 2.0)
    four = torch.ones(4)
    takes: list[Callable[[Any], Any]] = [
        lambda v: error(v, four),
        lambda v: error(four.double(), v),
        lambda v: used(v, four, four, 0.1),
        lambda v: used(four, v, four, 0.1),
        lambda v: used(four, four, v, 0.1),
        lambda v: bound(v, 10),
        lambda v: bound("float32", v),
        lambda v: compare.ulp_distance(v, v),
        lambda v: compare.ulp_distance(four, v),
        lambda v: calibrated_tolerance([(v, v)] * 20),
        lambda v: calibrated_tolerance([(four, v)] * 20),
        calibrated_tolerance,
        compare.digest,
        layer_norm_bound,
    ]
    # Text, None and an integer of any size can be compared with max_diff, and be unlike.
    both: list[Callable[[Any], Any]] = [
        lambda v: compare.max_diff(v, v),
        lambda v: compare.max_diff(v, four),
        lambda v: compare.max_diff(four, v),
    ]
    return [
        *(Case(function, (v,)) for function in takes for v in no_tensors()),
        *(Case(function, (v,)) for function in both for v in no_tensors()[:5]),
        *(Case(bound, (v, 10)) for v in (f, X, np.array([]), np.ones(2, "V4"))),
        Case(compare.max_diff, (ODD, 1)),
        Case(compare.max_diff, (1, ODD)),
        Case(compare.max_diff, ([Unprintable()], [1])),
        Case(compare.max_diff, (len, len)),
        Case(compare.max_diff, (np.longdouble(1), 1.0)),
        Case(compare.max_diff, (np.ones(2, "M8[s]"), 1.0)),
        Case(compare.max_diff, (torch.ones(2, 3, device="meta"), X)),
        Case(compare.max_diff, (1, 2), {"hist": ["a"]}),
        Case(compare.max_diff, (1, 2), {"hist": 3}),
        Case(compare.max_diff, (1, 2), {"hist": None}),
        Case(compare.max_diff, (1, 2), {"hist": "x"}),
        Case(compare.max_diff, (1, 2), {"hist": [math.nan]}),
        Case(compare.max_diff, (1, 2), {"hist": [[1]]}),
        Case(compare.string_diff, (None,)),
        Case(compare.string_diff, ([],)),
        Case(compare.string_diff, (1.0,)),
        Case(compare.string_diff, ("abs",)),
        Case(compare.string_diff, ({"abs": 1.0, "mismatch": 3},)),
        Case(compare.string_diff, ({"rep": 3, "abs": 1.0},)),
        Case(found.within, ()),
        Case(found.within, (), {"abs": "1"}),
        Case(found.within, (), {"abs": math.nan}),
        Case(found.within, (), {"err_ulp": 1}),
        Case(found.within, (), {"rel": [1]}),
        Case(found.within, (), {"abs": True}),
        Case(error, (None, None)),
        Case(error, ([], [])),
        Case(error, ("a", f)),
        Case(error, (ones, None)),
        Case(error, (ones, f)),
        Case(error, (f, f)),
        Case(error, (ones, np.ones(3, int))),
        Case(error, (ones * math.nan, ones.astype("f4"))),
        Case(error, (ones, ones.astype("f4")), {"dtype": "int8"}),
        Case(error, (ones, ones.astype("f4")), {"dtype": ODD}),
        Case(error, (ones, ones.astype("f4")), {"dtype": ""}),
        Case(error, (np.ma.masked_array(ones, [0, 0, 1]), ones.astype("f4"))),
        Case(error, (torch.ones(3, dtype=torch.float64, device="meta"), torch.ones(3))),
        Case(bound, (None, 10)),
        Case(bound, ("int8", 10)),
        Case(bound, ("float99", 10)),
        Case(bound, (ODD, 10)),
        Case(bound, ("float32", 0)),
        Case(bound, ("float32", -3)),
        Case(bound, ("float32", 2.5)),
        Case(bound, ("float32", None)),
        Case(bound, ("float32", "3")),
        Case(bound, ("float32", True)),
        Case(bound, ("float32", math.nan)),
        Case(bound, ("float32", math.inf)),
        Case(bound, ("float32", [3])),
        Case(bound, ("float32", 3), {"condition": 0.5}),
        Case(bound, ("float32", 3), {"condition": math.nan}),
        Case(bound, ("float32", 3), {"condition": None}),
        Case(bound, ("float32", 3), {"confidence": 0}),
        Case(bound, ("float32", 3), {"confidence": 1}),
        Case(bound, ("float32", 3), {"confidence": "0.9"}),
        Case(bound, ("float32", 3), {"confidence": math.nan}),
        Case(bound, ("float32", 2**25), {"confidence": 0.9}),
        Case(bound, ("float32", 3), {"accumulate": "int32"}),
        Case(bound, ("float32", 3), {"operands": "int8"}),
        Case(bound, ("float32", 3), {"operands": ODD}),
        Case(bound, ("float32", 3), {"rounding": "up"}),
        Case(bound, ("float32", 3), {"rounding": None}),
        Case(bound, ("float32", 3), {"rounding": ["nearest"]}),
        Case(bound, ("float32", 3), {"elements": 0}),
        Case(bound, ("float32", 3), {"elements": None}),
        Case(bound, ("float32", 3), {"rounding": "truncation", "confidence": 0.9}),
        Case(used, (None, f, f, 0.1)),
        Case(used, (f, "b", f, 0.1)),
        Case(used, (f, f, None, 0.1)),
        Case(used, (f, f, f, 0)),
        Case(used, (f, f, f, -1)),
        Case(used, (f, f, f, None)),
        Case(used, (f, f, f, "1")),
        Case(used, (f, f, f, math.nan)),
        Case(used, (f, f[0], f, 0.1)),
        Case(used, (f, f, -f, 0.1)),
        Case(used, (f, f, f * math.nan, 0.1)),
        Case(used, (np.ones(2, int), f, f, 0.1)),
        Case(used, (f, f, np.ones((2, 3), complex), 0.1)),
        Case(used, (np.ma.masked_array(f, f > 0), f, f, 0.1)),
        Case(compare.round_up, (-1.0,)),
        Case(compare.round_up, (math.nan,)),
        Case(compare.round_up, (None,)),
        Case(compare.round_up, ("1",)),
        Case(compare.round_up, ([1.0],)),
        Case(compare.round_up, (1.0, 0)),
        Case(compare.round_up, (1.0, 1.5)),
        Case(compare.round_up, (1.0, None)),
        Case(compare.round_up, (1.0, "2")),
        Case(compare.round_up, (1.0, math.inf)),
        Case(compare.ulp_distance, (None, 1.0)),
        Case(compare.ulp_distance, (1, 2)),
        Case(compare.ulp_distance, ("a", 1.0)),
        Case(compare.ulp_distance, (ones, np.ones(4))),
        Case(compare.ulp_distance, ([1.0], [1.0])),
        Case(compare.ulp_distance, (1j, 1.0)),
        Case(compare.ulp_distance, (np.ones(2, complex), np.ones(2))),
        Case(compare.ulp_distance, (np.ma.masked_array(ones, [0, 0, 1]), ones)),
        Case(compare.ulp_distance, (2**2000, 1.0)),
        Case(error, (2**2000, f)),
        Case(used, (2**2000, f, f, 0.1)),
        Case(compare.digest, (None,)),
        Case(compare.digest, (1.0,)),
        Case(compare.digest, ("a",)),
        Case(compare.digest, ([X],)),
        Case(compare.digest, (torch.ones(2, device="meta"),)),
        Case(layer_norm_bound, (None,)),
        Case(layer_norm_bound, ([1.0],)),
        Case(layer_norm_bound, (X, "scale")),
        Case(layer_norm_bound, (X, None, torch.ones(9))),
        Case(layer_norm_bound, (X,), {"epsilon": "1e-5"}),
        Case(layer_norm_bound, (X,), {"variance": None}),
        Case(layer_norm_bound, (X.int(),)),
        Case(calibrated_tolerance, (None,)),
        Case(calibrated_tolerance, ([1],)),
        Case(calibrated_tolerance, ([(X, None)],)),
        Case(calibrated_tolerance, ([(X, X[0])],)),
        Case(calibrated_tolerance, (3,)),
        Case(calibrated_tolerance, ([(X, X)] * 20,), {"false_alarms": 2}),
        Case(calibrated_tolerance([(X, X)] * 20).allows, (None, X)),
        Case(calibrated_tolerance([(X, X)] * 20).allows, (X, X[0])),
        Case(ulp, (1.0, None)),
        Case(ulp, (1.0, "int8")),
        Case(ulp, (None, "float32")),
        Case(ulp, ("a", "float32")),
        Case(ulp, (1j, "float32")),
        Case(ulp, (1.0, ODD)),
        Case(ulp, ([[1], [1, 2]], "float32")),
        Case(ulp, (X, "")),
        Case(dtype_info, (None,)),
        Case(dtype_info, (3.5,)),
        Case(dtype_info, ("",)),
        Case(dtype_info, ([],)),
        Case(dtype_info, (99,)),
        Case(dtype_info, ("a,b",)),
        Case(onnx_dtype_name, (None,)),
        Case(onnx_dtype_name, ("FLOAT",)),
        Case(onnx_dtype_to_np_dtype, (None,)),
        Case(onnx_dtype_to_np_dtype, (99,)),
        Case(onnx_dtype_to_torch_dtype, (8,)),
        Case(onnx_dtype_to_torch_dtype, ([],)),
    ]


GROUPS = {"models": models, "options": options, "located": located, "compared": compared}


@pytest.mark.parametrize("group", GROUPS)
def test_bad_input_is_a_typed_error(group: str) -> None:
    wrong = []
    for case in GROUPS[group]():
        error = raised(case)
        if not isinstance(error, RoundoffError):
            wrong.append(f"{case}: {type(error).__name__} {error}")
        elif not str(error).strip():
            wrong.append(f"{case}: no message")
    assert not wrong, "\n".join(wrong)


def test_bytes_that_are_changed_are_no_silent_answer_about_another_model() -> None:
    """Some changed bytes are a valid model of another meaning; no other exception comes."""
    for content in cuts():
        error = raised(comparing(content))
        assert error is None or isinstance(error, RoundoffError), repr(error)


def test_the_table_is_large() -> None:
    assert sum(len(group()) for group in GROUPS.values()) >= 300


def test_hints_are_of_their_own_error() -> None:
    for case in (*models(), *options()):
        text = str(raised(case))
        if "feeds= that the model takes" in text:
            assert "feeds" not in case.options, f"{case}: {text}"


#: Quantised operators whose inputs are uint8: text of the node, and types beside the first two.
INTEGER = {
    "MatMulInteger": "int32[4, 3] Z) <uint8 za = {128}, uint8 zb = {120}> "
    "{ Z = MatMulInteger(A, B, za, zb) }",
    "QLinearMatMul": "uint8[4, 3] Z) <float sa = {0.02}, uint8 za = {128}, float sb = {0.01}, "
    "uint8 zb = {120}, float sz = {0.05}, uint8 zz = {128}> "
    "{ Z = QLinearMatMul(A, sa, za, B, sb, zb, sz, zz) }",
}


@pytest.mark.parametrize("operator", INTEGER)
def test_quantised_products_are_right(operator: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (uint8[4, 8] A, uint8[8, 3] B) => '
        f"({INTEGER[operator]}"
    )
    random = np.random.default_rng(11)
    a, b = (random.integers(0, 256, shape, dtype=np.uint8) for shape in ((4, 8), (8, 3)))
    expected = (a.astype(int) - 128) @ (b.astype(int) - 120)
    if operator == "QLinearMatMul":
        expected = np.clip(np.rint(expected * (0.02 * 0.01 / 0.05)) + 128, 0, 255)
    feeds = {"A": a, "B": b}
    for truth in (False, True):
        (got,) = TorchOnnxEvaluator(model, truth=truth).run(None, feeds)
        assert np.array_equal(got.numpy(), expected)
    found = compare_runtimes(model, feeds, providers=CPU, calibration=0)
    assert "first differs at node: none" in str(found)


def test_a_model_whose_feeds_have_scales_of_their_own() -> None:
    """As quantize_dynamic of ONNX Runtime writes it."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[4, 8] X) => (float[4, 8] Z) '
        "{ Q, s, z = DynamicQuantizeLinear(X)  Z = DequantizeLinear(Q, s, z) }"
    )
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    (got,) = TorchOnnxEvaluator(model).run(None, {"X": x})
    assert (got - x).abs().max() <= (x.max() - x.min()) / 255
    found = compare_runtimes(model, {"X": x}, providers=CPU, calibration=0)
    assert "first differs at node: none" in str(found)
    assert "quantised" in str(found)
    found = compare_runtimes(model, {"X": x}, providers=CPU, calibration=0, module=lambda x: x)
    assert 1e-4 < found.quantization.total < 1e-2


def test_a_model_without_a_truth_is_refused_by_the_name_of_its_operator() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[4, 8] X) => (float[k, 8] Z) '
        "{ Z = Unique<axis=0>(X) }"
    )
    with pytest.raises(UnsupportedError, match=r"no float64 truth.*Unique.*max_diff"):
        compare_runtimes(model, {"X": torch.ones(4, 8)}, providers=CPU, calibration=0)


def test_equal_bits_that_are_both_wrong_are_no_nothing() -> None:
    """An underflow, a cancellation, a sum that swallows: the same in both runtimes."""
    for text, x in (
        ("float16[4] X) => (float16[4] Z) { Z = Mul(X, X) }", torch.full((4,), 1e-4).half()),
        (
            "float[4] X) => (float[4] Z) <float c = {1e8}> { Y = Add(X, c)  Z = Sub(Y, c) }",
            X[0, :1],
        ),
    ):
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> g ({text}')
        feeds = {"X": x.expand(4) * 1.3}
        told = compare_runtimes(model, feeds, providers=CPU, calibration=0).advice
        assert not any(sentence.startswith("Nothing") for sentence in told)
        assert any("both are wrong" in sentence for sentence in told)


class Adds(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1).exp()


class Draws(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp() + 1e-3 * torch.rand(x.shape)


def test_a_module_neither_writes_into_the_feeds_nor_draws() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[2, 3] x) => (float[2, 3] Z) '
        "<float[1] c = {1.0}> { Y = Add(x, c)  Z = Exp(Y) }"
    )
    feeds = {"x": X.clone()}
    for mode in (False, True):
        found = compare_runtimes(
            model, feeds, providers=CPU, calibration=0, module=Adds().train(mode)
        )
        assert torch.equal(feeds["x"], X)
        assert found.outputs["error module"].max() < 2
        with pytest.raises(RoundoffError, match="draws random numbers"):
            compare_runtimes(model, feeds, providers=CPU, calibration=0, module=Draws().train(mode))


def main() -> None:
    """Print what each case gives."""
    for group, cases in GROUPS.items():
        for case in cases():
            error = raised(case)
            kind = "ok" if isinstance(error, RoundoffError) else "RAW"
            print(f"{kind} {group} {case}: {type(error).__name__}: {str(error)[:150]}", flush=True)


if __name__ == "__main__":
    main()
