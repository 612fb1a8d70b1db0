"""Two runtimes compared: where they differ, who is nearer, what to set, what is refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import numpy_helper

from roundoff.errors import (
    ModelError,
    ModelSizeError,
    RoundoffError,
    UnsupportedError,
)
from roundoff.evaluator import TorchOnnxEvaluator
from roundoff.models import layer_norm_feeds, layer_norm_matmul
from roundoff.runtimes import (
    RuntimeComparison,
    compare_runtimes,
)
from roundoff.runtimes.advice import advise
from roundoff.runtimes.feeds import alike, tables_of, varied

CPU = ["CPUExecutionProvider"]


def compare(model: Any, feeds: Any = None, **options: Any) -> RuntimeComparison:
    """On the CPU, without tolerances unless asked for."""
    return compare_runtimes(model, feeds, **{"providers": CPU, "calibration": 0} | options)


def parsed(text: str, **constants: Any) -> onnx.ModelProto:
    """A model, with these constants in it."""
    head = '<ir_version: 10, opset_import: ["" : 18, "local" : 1]> '
    model = onnx.parser.parse_model(head + text)
    for name, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return model


WEIGHTS = np.random.default_rng(0).standard_normal((8, 4))


def product(kind: str = "float", dtype: type = np.float32) -> onnx.ModelProto:
    """Relu of X @ W, with W in the model."""
    text = f"g ({kind}[n, 8] X) => ({kind}[n, 4] Z) {{ Y = MatMul(X, W) Z = Relu(Y) }}"
    return parsed(text, W=WEIGHTS.astype(dtype))


def norm_feeds(rows: int, width: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {name: value.to(dtype) for name, value in layer_norm_feeds(rows, width).items()}


@pytest.mark.parametrize(("itype", "dtype"), [(1, torch.float32), (10, torch.float16)])
def test_layer_norm_and_product(itype: int, dtype: torch.dtype) -> None:
    feeds = norm_feeds(64, 64, dtype)
    found, again = (compare(layer_norm_matmul(itype), feeds, calibration=None) for _ in range(2))
    assert repr(found) == repr(again)
    assert found.frame["op"].tolist() == ["LayerNormalization", "MatMul", "Add"]
    kernels = found.frame[["kernel torch", "kernel ORT"]]
    assert kernels.drop_duplicates().to_numpy().tolist() == [["torch", "ort"]]
    own = found.frame[["own error torch", "own error ORT"]].max(axis=1)
    assert found.largest == found.frame.loc[own.idxmax()].to_dict()
    row = found.outputs.iloc[0]
    errors = row[["rms torch", "rms ORT"]].astype(float)
    assert 0 < errors.min() < errors.max() < 32
    nearer = errors.idxmin().split()[1]
    assert found.nearer == ("equal" if errors.max() <= 1.1 * errors.min() else nearer)
    assert torch.finfo(dtype).eps < row["rtol"] < 1e-2
    assert found.tolerances["Z"].feeds == 300
    assert ("rounds after each node" in repr(found)) == (itype == 10 and row["abs"] > 0)


def test_files_bytes_and_protos_are_read_alike(tmp_path: Path) -> None:
    path, apart = tmp_path / "model.onnx", tmp_path / "apart.onnx"
    onnx.save(product(), path)
    onnx.save(product(), apart, save_as_external_data=True, location="data", size_threshold=0)
    found = [compare(model) for model in (product(), path, str(path), path.read_bytes(), apart)]
    assert all(found[0].frame.equals(other.frame) for other in found[1:])
    (tmp_path / "data").unlink()
    for wrong in (apart, apart.read_bytes(), tmp_path / "nothing.onnx"):
        with pytest.raises(ModelError):
            compare(wrong)


@pytest.mark.parametrize(
    ("tf32", "begins"),
    [((False, True), ["ONNX Runtime may"]), ((True, False), ["torch may"]), ((True, True), [])],
)
def test_tf32_on_one_side_is_told(tf32: tuple[bool, bool], begins: list[str]) -> None:
    found = compare(layer_norm_matmul(), norm_feeds(4, 8))
    found.outputs["abs"] = 1.0
    told = advise(found.frame, found.outputs, "cuda", tf32=tf32, tolerances={})
    assert [text.partition(" use")[0] for text in told if "use_tf32=0" in text] == begins


SQUARES = "g (float16[4] X) => (float16[4] Z) { Y = Mul(X, X)  Z = Neg(Y) }"
NONE_FINITE = "0 of 4 elements of the outputs are finite"


@pytest.mark.parametrize(
    ("text", "x", "advice"),
    [
        ("g (float[4] X) => (float[4] Z) { Y = Relu(X)  Z = Neg(Y) }", [1, -2, 3, 0], ["Nothing"]),
        (
            "g (float[4] X) => (float[4] Z) { Y = Relu(X)  Z = Neg(Y) }",
            [math.nan, math.inf, 1, 2],
            ["NaN or infinity in the input X", "2 of 4 elements"],
        ),
        (
            "g (float[4] X) => (float[4] Z) { Z = Sqrt(X) }",
            [-1, -2, -3, -4],
            ["NaN or infinity in float64, too: output Z, first at node Sqrt_0", NONE_FINITE],
        ),
        (
            SQUARES,
            [300, 1, 2, 3],
            [
                "Node Mul_0 (Mul -> Y) gives NaN or infinity in torch and ORT",
                "Both give the same bits, and both are wrong",
            ],
        ),
        (
            "g (float[4] X) => (float[4] Z) { Y = Neg(X) Z = Softmax(Y) }",
            [math.inf, 0, 0, math.inf],
            ["Nothing"],
        ),
    ],
)
def test_what_is_not_finite_has_an_answer_of_its_own(
    text: str, x: list[float], advice: list[str]
) -> None:
    dtype = torch.float16 if "float16" in text else torch.float32
    feeds = {"X": torch.tensor(x, dtype=dtype)}
    found = compare(parsed(text), feeds)
    assert len(found.advice) == len(advice)
    for said, begins in zip(found.advice, advice, strict=True):
        assert said.startswith(begins)
    assert found.nearer == ("neither" if NONE_FINITE in advice or "Mul" in text else "equal")


def test_outputs_without_a_tolerance_say_why() -> None:
    model = parsed(
        "g (float[4, 8] X) => (int64[4] best) { best = ArgMax <axis=1, keepdims=0> (X) }"
    )
    found = compare(model, calibration=16)
    assert found.outputs["nearer"].tolist() == ["equal"]
    assert "count the elements that differ" in found.tolerances["best"].reason
    model = parsed("g (float[2, 2] X) => (float[2, 2] Z) { Y = Exp(X)  Z = MatMul(Y, Y) }")
    found = compare(model, {"X": torch.rand(2, 2)}, calibration=None)
    assert "give calibration=[feeds, …]" in found.tolerances["Z"].reason
    found = compare(product("double", np.float64))
    assert "calibration=0" in found.tolerances["Z"].reason
    assert found.nearer == "equal"  # a model in float64 has no truth
    assert math.isnan(found.outputs["error torch"].iloc[0])


@pytest.mark.parametrize("rows", [1, 3])
def test_ids_stay_below_their_table(rows: int) -> None:
    model = parsed(
        "g (int32[n, m] position) => (float[n, m, 4] Z) "
        "{ flat = Cast <to = 7> (position)  Y = Gather(W, flat)  Z = Abs(Y) }",
        W=np.zeros((rows, 4), np.float32),
    )
    assert tables_of(TorchOnnxEvaluator(model)) == {"position": rows}
    assert compare(model).first is None


def test_what_cannot_be_drawn_is_to_be_fed() -> None:
    model = parsed("g (float[a, b] X, float[c, d] Y) => (float[a, d] Z) { Z = MatMul(X, Y) }")
    with pytest.raises(RoundoffError, match="try: feeds= that the model takes"):
        compare(model)
    strings = parsed("g (string[2] X) => (int64[1] Z) { Z = Shape(X) }")
    with pytest.raises(UnsupportedError, match=r"input 'X' can't be drawn.*feeds="):
        compare(strings)


def test_a_module_that_is_the_model_and_one_that_is_not() -> None:
    weights = torch.from_numpy(WEIGHTS).float()
    found = compare(product(), module=lambda x: torch.relu(x @ weights), calibration=None)
    assert found.outputs["error module"].iloc[0] < 8
    assert not any("export" in text for text in found.advice)
    assert found.tolerances["Z"].found
    found = compare(product(), module=lambda x: torch.relu(x) @ weights, calibration=None)
    assert found.outputs["error module"].iloc[0] > 1e5
    assert "Look at the export" in found.advice[0]
    assert "does not compute what the module does" in found.tolerances["Z"].reason
    exact = {"X": torch.eye(8)}
    near = compare(product(), exact, module=lambda x: torch.relu(x @ weights) * (1 + 5e-7))
    assert "does not compute what the module does" in near.tolerances["Z"].reason
    shown = found._repr_html_()
    for part in ("first differs at node", "nearer the truth", "<table ", "(MatMul -&gt; Y)"):
        assert part in shown


def test_a_module_is_called_and_its_outputs_taken_by_name() -> None:
    model = parsed(
        "g (float[2] A, float[2] B) => (float[2] Y, float[2] Z) { Y = Sub(A, B) Z = Neg(A) }"
    )
    ways = {
        lambda B, A: (A - B, -A): True,
        lambda a, b: [a - b, -a]: True,
        lambda A, B: {"Z": -A, "Y": A - B}: True,
        lambda a, b: (b - a, -a): False,
    }
    for module, same in ways.items():
        found = compare(model, module=module)
        assert found.outputs["module abs"].eq(0).all() == same


def test_a_graph_optimisation_that_changes_bits_is_named() -> None:
    # Conv and BatchNormalization become one Conv, whose weights are rounded once more.
    random = np.random.default_rng(0)
    found = compare(
        parsed(
            "g (float[1, 3, 9, 9] X) => (float[1, 4, 7, 7] Z) { Y = Conv(X, W) "
            " Z = BatchNormalization(Y, scale, bias, mean, var) }",
            W=random.standard_normal((4, 3, 3, 3), np.float32),
            **{n: random.random(4, np.float32) + 0.5 for n in ("scale", "bias", "mean", "var")},
        )
    )
    assert found.outputs["session abs"].iloc[0] > 0
    assert any("ORT_DISABLE_ALL" in text for text in found.advice)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_each_does_what_it_does_by_default() -> None:
    feeds = norm_feeds(256, 256)
    found = compare_runtimes(layer_norm_matmul(), feeds)
    if "cuda" not in found.where:
        pytest.skip("this ONNX Runtime has no CUDA")
    assert found.nearer == "torch"
    assert "use_tf32=0" in found.advice[0]
    off = [("CUDAExecutionProvider", {"use_tf32": 0})]
    same = compare_runtimes(layer_norm_matmul(), feeds, providers=off)
    assert not any("TF32" in text for text in same.advice)
    assert same.outputs["error ORT"].iloc[0] < found.outputs["error ORT"].iloc[0] / 10


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False)
    return torch.nn.Sequential(first, torch.nn.ReLU(), second)


def rounded(weight: torch.Tensor, step: float) -> np.ndarray:
    return np.clip(np.rint(weight.detach().numpy().T / step), -128, 127).astype(np.int8)


def quantized(coarse: float = 2.0**-10, relu: str = "Relu", grid: Any = np.uint8) -> Any:
    """The layers with input, weights and middle rounded; without Relu the grid begins at 0."""
    text = """g (float[6, 8] X) => (float[6, 4] Z) {
          xq = QuantizeLinear(X, s5, zi)  x = DequantizeLinear(xq, s5, zi)
          w1 = DequantizeLinear(q1, s6)  Y = MatMul(x, w1)  R = RELU(Y)
          yq = QuantizeLinear(R, s5, zu)  y = DequantizeLinear(yq, s5, zu)
          w2 = DequantizeLinear(q2, s2, zi)  Z = MatMul(y, w2) }"""
    scales = {"s5": 2.0**-5, "s6": [2.0**-6] * 16, "s2": coarse}
    module = layers()
    return parsed(
        text.replace("RELU", relu),
        q1=rounded(module[0].weight, 2.0**-6),
        q2=rounded(module[2].weight, coarse),
        zi=np.int8(0),
        zu=grid(np.iinfo(grid).min),
        **{name: np.float32(value) for name, value in scales.items()},
    )


@pytest.mark.parametrize(
    "grid", [("Relu",), ("Identity",), ("Relu", np.int8), ("Identity", np.int8)]
)
def test_quantisation_is_named_with_its_cost_and_its_node(grid: tuple) -> None:
    module, x = layers(), torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    found = compare(quantized(0.25, *grid), {"X": x}, module=module)
    told = found.quantization
    assert told is not None
    assert found.outputs["error module"].iloc[0] > 1e4  # far beyond rounding
    assert "does not compute what the module does" not in repr(found)
    assert f"moves an output by {told.total:.2g} of its RMS" in found.advice[0]
    assert "costs most is DequantizeLinear_7 (weight q2)" in found.advice[0]
    assert "look at the export" not in found.advice[0]
    assert sorted(told.frame["kind"]) == ["activation", "activation", "weight", "weight"]
    # The coarse weight alone, by hand.
    module.double()
    alone = module[:2](x.double()) @ torch.from_numpy(rounded(module[2].weight, 0.25) * 0.25)
    exact = module(x.double())
    cost = (alone - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert told.frame["cost"].iloc[0] == pytest.approx(cost.item(), rel=1e-5)
    assert told.total == pytest.approx(math.sqrt(sum(told.frame["cost"] ** 2)), rel=0.3)


def test_what_quantisation_does_not_explain_and_what_it_is_against() -> None:
    other = layers()
    with torch.no_grad():
        other[0].weight.mul_(1.001)  # within a step of the grid
        other[2].weight[0, 0] += 0.2  # one element, 50 steps
    for module, told in (
        (other, "1 rounded weights"),
        (torch.nn.Sequential(layers(), torch.nn.Tanh(), torch.nn.Dropout()), "0 rounded weights"),
        (None, "against the model without its pairs"),
    ):
        found = compare(quantized(), module=module)
        assert told in found.advice[0]
    assert found.quantization is not None
    assert set(found.quantization.frame["kind"]) == {"activation"}


def test_drawn_feeds_have_the_ranges_and_signs_of_those_given() -> None:
    generator = torch.Generator().manual_seed(0)
    given = {
        "X": torch.randn(40, 30, generator=generator).clamp_min(0).half() + 5,
        "ids": torch.tensor([3, 9, 4]),
        "mask": torch.tensor([0.0, -math.inf] * 10),
        "flags": torch.tensor([0.0, 1.0] * 10),
    }
    assert list(varied(given, ["ids"])) == ["X", "ids"]
    one, other = alike(given, ["ids"], 2)
    assert not torch.equal(one["X"], other["X"])
    assert abs(float((one["X"] == 5).float().mean()) - 0.5) < 0.1
    for name, value in given.items():
        assert one[name].dtype == value.dtype
        assert set(one[name].flatten().tolist()) <= set(value.flatten().tolist())
        assert name in ("X", "ids") or torch.equal(one[name], value)


RANDOM = {
    "always": "g (float[9] X) => (float[9] Y) { R = RandomNormalLike(X) Y = Add(X, R) }",
    "a branch": """g (float[9] X, bool c) => (float[9] Y) { Y = If (c) <
        then_branch = a () => (float[9] p) { p = Bernoulli(X) },
        else_branch = b () => (float[9] q) { q = Identity(X) }> }""",
    "training": "g (float[9] X, float r, bool t) => (float[9] Y) { Y = Dropout(X, r, t) }",
    "a function": """g (float[9] X) => (float[9] Y) { Y = local.noisy(X) }
        <domain: "local", opset_import: ["" : 18]> noisy (x) => (y) { y = RandomNormalLike(x) }""",
}


@pytest.mark.parametrize("name", list(RANDOM))
def test_a_model_that_draws_is_refused_and_the_node_named(name: str) -> None:
    model, yes = parsed(RANDOM[name]), torch.tensor(True)
    values = {"X": torch.linspace(0.1, 0.9, 9), "c": yes, "r": torch.tensor(0.5), "t": yes}
    given = {i.name: values[i.name] for i in model.graph.input}
    with pytest.raises(UnsupportedError, match=r"draws random numbers.*(Random|Dropout|Bernoulli)"):
        compare(model, given)
    if "t" in given:  # a dropout that does not draw is compared
        del given["t"]
        assert (
            compare(parsed(RANDOM[name].replace(", bool t", ""), t=False), given).nearer == "equal"
        )


@pytest.mark.parametrize("kind", ["float", "double"])
def test_a_module_in_float64_that_computes_something_else_is_told(kind: str) -> None:
    proto = parsed(f"g ({kind}[2,3] X) => ({kind}[2,3] Y) {{ Y = Relu(X) }}")
    x = {"X": torch.tensor([[1, 2, -3], [4, -5, 6]]).to(getattr(torch, kind))}
    twice, same = (compare(proto, x, module=lambda x, k=k: x.double().relu() * k) for k in (2, 1))
    assert "does not compute what the module does" in twice.advice[0]
    assert "module does" not in " ".join(same.advice)
    if kind == "float":
        assert [side.outputs["error module"][0] > 1e6 for side in (twice, same)] == [True, False]


def test_only_what_drawn_feeds_may_cause_says_so() -> None:
    """A missing kernel, a missing provider and a broken model are not the feeds' fault."""
    neg = parsed("g (float[4, 8] X) => (float[4, 8] Z) { Z = Neg(X) }")
    cases: list[tuple[Any, dict[str, Any]]] = [
        (parsed("g (float[2] X) => (float[2] Z) { Z = local.Twirl(X) }"), {}),
        (layer_norm_matmul(16), {}),
        (b"no model", {}),
        (neg, {"providers": ["NoSuchExecutionProvider"]}),
        (neg, {"feeds": {"X": torch.ones(4, 9)}}),
    ]
    for model, options in cases:
        with pytest.raises(RoundoffError) as caught:
            compare(model, **options)
        assert "feeds= that" not in str(caught.value)
    huge = product()
    huge.graph.initializer[0].dims[1] = 10**13
    with pytest.raises(ModelSizeError):
        compare(huge)


def test_feeds_that_drawing_makes_another_kind_have_no_tolerance() -> None:
    """A sum of rows that cancel: drawn one by one they do not."""
    text = "g (float[64, 8] X) => (float[8] Z) { Z = ReduceSum <keepdims = 0> (X, axes) }"
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    cancelling = torch.cat([x, -x + 1e-4])
    found = compare(parsed(text, axes=[0]), {"X": cancelling}, calibration=None)
    assert "in a way that drawing loses" in found.tolerances["Z"].reason
