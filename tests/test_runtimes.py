"""Two runtimes compared: where they differ, who is nearer, what to set, what is refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from roundoff.errors import (
    ArgumentError,
    DtypeError,
    ModelError,
    ModelSizeError,
    RoundoffError,
    ShapeError,
    UnsupportedError,
)
from roundoff.models import layer_norm_feeds, layer_norm_matmul, residual_rms_norm
from roundoff.runtimes import NODE_COLUMNS, OUTPUT_COLUMNS, RuntimeComparison, compare_runtimes
from roundoff.runtimes.advice import Advice
from roundoff.runtimes.memory import check_memory

CPU = ["CPUExecutionProvider"]


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 18]> ' + text)


def product(dtype: str = "float") -> onnx.ModelProto:
    """Relu of X @ W, with W in the model."""
    model = parsed(f"g ({dtype}[n, 8] X) => ({dtype}[n, 4] Z) {{ Y = MatMul(X, W) Z = Relu(Y) }}")
    weights = np.random.default_rng(0).standard_normal((8, 4))
    given = weights.astype(
        {"float": np.float32, "float16": np.float16, "double": np.float64}[dtype]
    )
    model.graph.initializer.append(numpy_helper.from_array(given, "W"))
    return model


def transformer(rows: int = 11, width: int = 16) -> onnx.ModelProto:
    """Token ids, a mask of -inf, attention of one head, and a classifier."""
    random = np.random.default_rng(1)
    model = parsed(
        """g (int64[batch, seq] input_ids, int64[batch, seq] attention_mask)
        => (float[batch, seq, 11] logits, int64[batch, seq] best) {
          shaped = Identity(input_ids)
          hidden = Gather(table, shaped)
          normed = LayerNormalization <axis = -1> (hidden, scale)
          q = MatMul(normed, wq)  k = MatMul(normed, wk)
          kt = Transpose <perm = [0, 2, 1]> (k)
          scores = MatMul(q, kt)
          keep = Cast <to = 9> (attention_mask)
          one = Constant <value_ints: ints = [1]> ()
          wide = Unsqueeze(keep, one)
          masked = Where(wide, scores, out)
          lower = Trilu <upper = 0> (masked)
          weights = Softmax <axis = -1> (lower)
          mixed = MatMul(weights, normed)
          sum = Add(mixed, hidden)
          logits = MatMul(sum, head)
          best = ArgMax <axis = -1, keepdims = 0> (logits)
        }"""
    )
    shapes = {"table": (rows, width), "scale": (width,), "wq": (width, width),
              "wk": (width, width), "head": (width, 11)}  # fmt: skip
    for name, shape in shapes.items():
        array = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    out = np.array(-np.inf, dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(out, "out"))
    return model


def half_feeds(rows: int, width: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype) for name, value in layer_norm_feeds(rows, width).items()}


@pytest.mark.parametrize("itype", [1, 10])
def test_layer_norm_and_product(itype: int) -> None:
    feeds = half_feeds(64, 64, {1: torch.float32, 10: torch.float16}[itype])
    found = compare_runtimes(layer_norm_matmul(itype), feeds, providers=CPU)
    assert tuple(found.frame.columns) == NODE_COLUMNS
    assert list(found.outputs.columns) == [c for c in OUTPUT_COLUMNS if "module" not in c]
    assert found.frame["op"].tolist() == ["LayerNormalization", "MatMul", "Add"]
    assert set(found.frame["kernel torch"]) == {"torch"}
    assert set(found.frame["kernel ORT"]) == {"ort"}
    assert found.nearer == found.outputs["nearer"].iloc[0]
    assert found.first_nonfinite is None
    assert found.largest is not None
    row = found.outputs.iloc[0]
    assert 0 < row["error torch"] < 32
    assert 0 < row["error ORT"] < 32
    assert row["rms torch"] <= row["error torch"]
    assert row["abs"] <= row["atol"]
    text = repr(found)
    assert text.startswith("first differs at node: ")
    assert "\nnearer the truth: " in text
    assert "\nset: " in text
    assert len(text.splitlines()) <= 15
    assert ("rounds after each node" in text) == (itype == 10 and row["abs"] > 0)


def test_first_is_none_exactly_where_no_isolated_difference_is() -> None:
    for model in (layer_norm_matmul(1), layer_norm_matmul(10), product(), product("float16"),
                  transformer(), residual_rms_norm(10)):  # fmt: skip
        found = compare_runtimes(model, providers=CPU, sizes=None, seed=3)
        isolated = found.frame["isolated abs"]
        first = found.first
        assert (first is None) == bool((isolated == 0).all())
        if first is not None:
            index = found.frame.index[isolated != 0][0]
            assert first["node"] == found.frame.loc[index, "node"]


def test_ids_stay_below_their_table_and_a_masked_infinity_is_none() -> None:
    for seed in range(4):
        found = compare_runtimes(transformer(rows=5), providers=CPU, seed=seed)
        assert found.first_nonfinite is None, "the truth has these infinities, too"
    assert found.outputs["output"].tolist() == ["logits", "best"]
    best = found.outputs.iloc[1]
    assert best["type"].startswith("int64")
    assert math.isnan(best["error torch"])
    assert best["nearer"] in ("torch", "ORT", "equal")
    assert found.nearer in ("torch", "ORT", "equal")


def test_a_table_that_is_an_input_bounds_its_ids() -> None:
    model = parsed(
        "g (int32[n, m] position, float[3, 4] table) => (float[n, m, 4] Z) "
        "{ flat = Cast <to = 7> (position)  wide = Neg(table)  same = Identity(table) "
        "  Y = Gather(same, flat)  Z = Abs(Y) }"
    )
    for seed in range(5):
        assert compare_runtimes(model, providers=CPU, seed=seed, sizes={"n": 9}).first is None


def test_overflow_is_found_and_what_to_do_said() -> None:
    x = torch.full((1, 2, 64), 200.0, dtype=torch.float16)
    feeds = {"X": x, "residual": x, "scale": torch.ones(64, dtype=torch.float16)}
    found = compare_runtimes(residual_rms_norm(10), feeds, providers=CPU)
    row = found.first_nonfinite
    assert row is not None
    assert row["output"] == "squares"
    assert found.largest is not None
    assert found.largest["output"] == "squares"
    assert math.isinf(found.largest["own error torch"])
    assert "Cast to float32" in found.advice[0]
    assert "Mul_1" in found.advice[0]
    assert "first NaN or infinity: Mul_1" in repr(found)
    wide = compare_runtimes(residual_rms_norm(10, wide=True), feeds, providers=CPU)
    assert wide.first_nonfinite is None


def test_equal_bits_need_nothing() -> None:
    model = parsed("g (float[n, 2] X) => (float[n, 2] Z) { Y = Relu(X)  Z = Neg(Y) }")
    found = compare_runtimes(model, providers=CPU)
    assert found.first is None
    assert found.nearer == "equal"
    assert found.advice == ["Nothing: every node and every output has equal bits in both."]


def test_numbers_are_the_same_twice_and_depend_on_the_seed() -> None:
    one, again, other = (
        compare_runtimes(transformer(), providers=CPU, seed=seed) for seed in (1, 1, 2)
    )
    assert one.frame.equals(again.frame)
    assert one.outputs.equals(again.outputs)
    assert repr(one) == repr(again)
    assert not one.frame.equals(other.frame)


def test_sizes_of_symbols_and_of_their_sums() -> None:
    model = parsed(
        'g (float[batch, "past + new"] X, float[batch, past] P, float[batch, new] N, float[?] V) '
        "=> (float[batch, m] Z) { PN = Concat <axis = 1> (P, N)  Y = Add(X, PN)  S = ReduceSum(V)"
        "  Z = Mul(Y, S) }"
    )
    found = compare_runtimes(model, providers=CPU, sizes={"batch": 3, "past": 5})
    assert found.outputs["type"].iloc[0].startswith("float32[3,")
    with pytest.raises(ArgumentError, match=r"sizes.*'depth'.*batch.*new.*past"):
        compare_runtimes(model, providers=CPU, sizes={"depth": 3})
    with pytest.raises(ArgumentError, match="counts"):
        compare_runtimes(model, providers=CPU, sizes={"batch": -1})


class Product(torch.nn.Module):
    """What ``product`` was exported from; the wrong order where asked."""

    def __init__(self, model: onnx.ModelProto, wrong: bool = False) -> None:
        super().__init__()
        weights = torch.from_numpy(numpy_helper.to_array(model.graph.initializer[0]).copy())
        self.W, self.wrong = torch.nn.Parameter(weights), wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) @ self.W if self.wrong else torch.relu(x @ self.W)


def test_a_module_that_is_the_model_and_one_that_is_not() -> None:
    model = product()
    found = compare_runtimes(model, module=Product(model), providers=CPU)
    assert list(found.outputs.columns) == list(OUTPUT_COLUMNS)
    assert found.outputs["error module"].iloc[0] < 8
    assert not any("export" in text for text in found.advice)
    assert " module" in repr(found)
    found = compare_runtimes(model, module=Product(model, wrong=True), providers=CPU)
    assert found.outputs["error module"].iloc[0] > 1e5
    assert "Look at the export" in found.advice[0]


def test_a_module_is_called_by_name_where_its_parameters_have_the_names() -> None:
    model = parsed("g (float[2] A, float[2] B) => (float[2] Z) { Z = Sub(A, B) }")

    def swapped(B: torch.Tensor, A: torch.Tensor) -> tuple[torch.Tensor]:
        return (A - B,)

    assert compare_runtimes(model, module=swapped, providers=CPU).outputs["module abs"].eq(0).all()
    found = compare_runtimes(model, module=lambda a, b: {"z": b - a}, providers=CPU)
    assert found.outputs["module abs"].gt(0).all()


@pytest.mark.parametrize(
    ("module", "kind", "text"),
    [
        (lambda x: (x, x), ArgumentError, "outputs of the module.*got 2.*expected 1: Z"),
        (lambda x: x, ShapeError, "the module's output for 'Z'"),
        (lambda x, y: x, ArgumentError, "does not take the model's inputs"),
        (lambda x: x @ x @ x.T, ArgumentError, "the module fails on the model's feeds"),
        (3, ArgumentError, "module"),
        (torch.nn.Dropout(), ArgumentError, r"training mode.*module.eval\(\)"),
        (torch.nn.Sequential(torch.nn.BatchNorm1d(8)), ArgumentError, "training mode"),
    ],
)
def test_modules_that_are_not_the_models(module: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        compare_runtimes(product(), module=module, providers=CPU, sizes={"n": 3})


def test_a_graph_optimisation_that_changes_bits_is_named() -> None:
    # Conv and BatchNormalization become one Conv, whose weights are rounded once more.
    random = np.random.default_rng(0)
    model = parsed(
        "g (float[1, 3, 9, 9] X) => (float[1, 4, 7, 7] Z) { Y = Conv(X, W) "
        " Z = BatchNormalization(Y, scale, bias, mean, var) }"
    )
    arrays = {"W": random.standard_normal((4, 3, 3, 3))}
    arrays |= {n: random.random(4) + 0.5 for n in ("scale", "bias", "mean", "var")}
    for name, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    found = compare_runtimes(model, providers=CPU)
    assert found.outputs["session abs"].iloc[0] > 0
    assert any("ORT_ENABLE_BASIC" in t and "ORT_DISABLE_ALL" in t for t in found.advice)


def test_float64_has_no_truth() -> None:
    found = compare_runtimes(product("double"), providers=CPU)
    assert found.nearer == "equal"
    assert math.isnan(found.outputs["error torch"].iloc[0])
    assert found.largest is None
    assert repr(found)


def test_both_texts_say_the_same_and_names_are_escaped() -> None:
    model = parsed("g (float[2, 2] X) => (float[2, 2] Z) { Z = MatMul(X, X) }")
    model.graph.node[0].output[0] = model.graph.output[0].name = "<b>&"
    shown = compare_runtimes(model, providers=CPU)._repr_html_()
    assert "&lt;b&gt;&amp;" in shown
    assert "<b>" not in shown
    for part in ("first differs at node", "nearer the truth", "<li>", "<table>"):
        assert part in shown


def test_files_bytes_and_protos_are_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(product(), path)
    apart = tmp_path / "apart.onnx"
    onnx.save(product(), apart, save_as_external_data=True, location="data", size_threshold=0)
    given = [path, str(path), path.read_bytes(), onnx.load(path), apart]
    frames = [compare_runtimes(model, providers=CPU).frame for model in given]
    assert all(frames[0].equals(frame) for frame in frames[1:])
    (tmp_path / "data").unlink()
    with pytest.raises(ModelError, match=r"data of constant 'W' is missing.*beside the model"):
        compare_runtimes(apart, providers=CPU)
    with pytest.raises(ModelError, match="lies in a file beside the model"):
        compare_runtimes(apart.read_bytes(), providers=CPU)
    with pytest.raises(ModelError, match=r"cannot read the model nothing.onnx"):
        compare_runtimes(tmp_path / "nothing.onnx")
    with pytest.raises(ModelError, match="cannot read the model"):
        compare_runtimes(tmp_path)
    path.write_text("a picture of a cat")
    with pytest.raises(ModelError):
        compare_runtimes(path)
    with pytest.raises(ModelError, match="not a model"):
        compare_runtimes(3)


X = torch.ones(3, 8)


@pytest.mark.parametrize(
    ("feeds", "kind", "text"),
    [
        ({}, ArgumentError, r"missing \['X'\].*expected \['X'\]"),
        ({"X": X, "Y": X}, ArgumentError, r"unknown \['Y'\].*expected \['X'\]"),
        ({"X": X.double()}, DtypeError, r"input 'X'.*float64\[3,8\].*float32"),
        ({"X": X.long()}, DtypeError, r"input 'X'.*int64\[3,8\].*float32"),
        ({"X": X[:, :7]}, ShapeError, r"input 'X'.*\[3, 7\].*\['n', 8\]"),
        ({"X": X[0]}, ShapeError, r"input 'X'.*\[8\].*\['n', 8\]"),
        ({"X": "text"}, DtypeError, "input 'X'"),
    ],
)
def test_feeds_that_the_model_does_not_take(
    feeds: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        compare_runtimes(product(), feeds, providers=CPU)


def test_one_name_is_one_size_and_sizes_are_for_drawn_inputs() -> None:
    feeds = half_feeds(4, 8, torch.float32) | {"scale": torch.ones(7)}
    with pytest.raises(ShapeError, match=r"input 'scale'.*c = 7.*c = 8, as in input 'X'"):
        compare_runtimes(layer_norm_matmul(), feeds, providers=CPU)
    with pytest.raises(ArgumentError, match="sizes"):
        compare_runtimes(product(), {"X": X}, sizes={"n": 3}, providers=CPU)


def test_an_operator_that_neither_has_and_a_type_without_kernels() -> None:
    model = parsed("g (float[2] X) => (float[2] Z) { Y = Abs(X)  Z = Neg(Y) }")
    model.graph.node[0].op_type, model.graph.node[0].domain = "Twirl", "nowhere"
    model.opset_import.append(helper.make_opsetid("nowhere", 1))
    with pytest.raises(UnsupportedError, match=r"nowhere\.Twirl"):
        compare_runtimes(model, providers=CPU)
    with pytest.raises(UnsupportedError, match=r"MatMul.*another element type"):
        compare_runtimes(layer_norm_matmul(16), providers=CPU)


def test_inputs_that_cannot_be_drawn() -> None:
    for text in ("string[2] X", "seq(float[2]) X"):
        with pytest.raises(UnsupportedError, match=r"input 'X' can't be drawn.*feeds="):
            compare_runtimes(parsed(f"g ({text}) => (float[2] Z) {{ Z = Shape(X) }}"))


def test_a_failure_on_drawn_feeds_says_how_to_go_on() -> None:
    model = parsed("g (float[a, b] X, float[c, d] Y) => (float[a, d] Z) { Z = MatMul(X, Y) }")
    with pytest.raises(RoundoffError, match="feeds= that the model takes, or sizes="):
        compare_runtimes(model, providers=CPU, sizes={"b": 3, "c": 4})
    assert compare_runtimes(model, providers=CPU, sizes={"b": 3, "c": 3}).frame.shape[0] == 1


def huge(size: int) -> onnx.ModelProto:
    """A model that declares a large weight in another file."""
    model = product()
    del model.graph.initializer[:]
    weight = TensorProto(name="W", data_type=1, dims=[8, size])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="data")
    model.graph.initializer.append(weight)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = size
    return model


def test_what_does_not_fit_is_refused_first(tmp_path: Path) -> None:
    path = tmp_path / "huge.onnx"
    onnx.save(huge(10**13), path)
    with pytest.raises(ModelSizeError, match=r"got about \d.* GiB.*extract_model") as caught:
        compare_runtimes(path, providers=CPU)
    assert isinstance(caught.value, MemoryError)
    with pytest.raises(ModelSizeError, match=r"at most 1e-06 GiB"):
        compare_runtimes(product(), providers=CPU, memory_gib=1e-6)
    assert compare_runtimes(product(), providers=CPU, memory_gib=1.0).frame.shape[0] == 2
    with pytest.raises(ModelSizeError):  # drawn inputs and results count, too
        compare_runtimes(product(), providers=CPU, sizes={"n": 10**14})


def test_float16_weights_count_for_float64() -> None:
    sizes = []
    for dtype in ("float16", "float"):
        model = product(dtype)
        weight = model.graph.initializer[0]
        weight.CopyFrom(TensorProto(name="W", data_type=weight.data_type, dims=[8, 2**27]))
        with pytest.raises(ModelSizeError) as caught:
            check_memory(model, {"X": (1, 8)}, False, 1e-3)
        sizes.append(float(str(caught.value.got).split()[1]))
    assert sizes[0] >= 8 + 2 * 2  # GiB of float64, and of float16 as stored and in each evaluator
    assert sizes[1] >= 8 + 3 * 4


def comparison(tf32: tuple[bool, bool], device: str) -> tuple[RuntimeComparison, list[str]]:
    found = compare_runtimes(layer_norm_matmul(), half_feeds(64, 64, torch.float32), providers=CPU)
    found.outputs["abs"] = 1.0
    told = Advice(found.frame, found.outputs, tf32, None, None, torch.device(device)).sentences()
    return found, told


def test_tf32_on_one_side_is_told() -> None:
    _, told = comparison((False, True), "cuda")
    assert told[0].startswith("ONNX Runtime may use TF32")
    assert "use_tf32=0" in told[0]
    assert "torch.set_float32_matmul_precision" in told[0]
    _, told = comparison((True, False), "cuda")
    assert told[0].startswith("torch may use TF32")
    _, told = comparison((True, True), "cuda")
    assert not any("TF32" in text for text in told)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_each_does_what_it_does_by_default() -> None:
    feeds = half_feeds(256, 256, torch.float32)
    found = compare_runtimes(layer_norm_matmul(), feeds)
    if "cuda" not in found.where:
        pytest.skip("this ONNX Runtime has no CUDA")
    assert found.nearer == "torch"
    assert "use_tf32=0" in found.advice[0]
    same = compare_runtimes(layer_norm_matmul(), feeds, tf32=False)
    assert not any("TF32" in text for text in same.advice)
    assert same.outputs["error ORT"].iloc[0] < found.outputs["error ORT"].iloc[0] / 10
