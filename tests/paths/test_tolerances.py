"""A suggested tolerance on fresh inputs: how often it fails what is right, and what it lets pass.

``python tests/paths/test_tolerances.py`` prints both error rates: false alarms of twelve models in
three types on 300 fresh feeds each, and the faults that are caught and that pass.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import numpy_helper

from roundoff.compare import CalibratedTolerance, calibrated_tolerance
from roundoff.dtypes import onnx_dtype_to_torch_dtype
from roundoff.evaluator import TorchOnnxEvaluator
from roundoff.ort import session
from roundoff.runtimes import compare_runtimes

TYPES = ("float32", "float16", "bfloat16")
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FRESH = 300
CPU = ["CPUExecutionProvider"]


@dataclasses.dataclass
class Model:
    """An ONNX graph whose floats are of type ``T``, and how its weights are drawn.

    A weight is a shape and a letter: w for variance 1 / inputs, n for variance 1, p for uniform in
    [0.5, 1.5); or the array itself.
    """

    text: str
    weights: dict[str, Any]

    def proto(self, dtype: str, stored: str | None = None, change: str = "") -> onnx.ModelProto:
        """In one type, with weights that are numbers of another one.

        *change* is "old => new", what is replaced in the text.
        """
        text = self.text
        if change:
            old, new = change.split(" => ")
            assert old in text
            text = text.replace(old, new)
        onnx_name = {"float32": "float"}.get(dtype, dtype)
        text = text.replace("T[", f"{onnx_name}[")
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 22]> {text}')
        random = np.random.default_rng(0)
        for name, spec in self.weights.items():
            array = drawn(random, *spec) if isinstance(spec, tuple) else np.asarray(spec)
            if array.dtype.kind == "f":
                array = array.astype(NUMPY[stored or dtype]).astype(NUMPY[dtype])
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        return model


def drawn(random: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    if kind == "p":
        return random.random(shape) + 0.5
    array = random.standard_normal(shape)
    inputs = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
    return array / np.sqrt(inputs) if kind == "w" else array


def layers(count: int) -> str:
    lines, before = [], "X"
    for k in range(count):
        after = "Z" if k + 1 == count else f"Y{k}"
        lines.append(
            f"A{k} = MatMul({before}, W{k})  T{k} = Tanh(A{k})  {after} = Add(T{k}, {before})"
        )
        before = after
    return "\n".join(lines)


MODELS = {
    "product": Model(
        "g (T[32, 256] X) => (T[32, 64] Z) { Z = MatMul(X, W) }", {"W": ((256, 64), "w")}
    ),
    "long product": Model(
        "g (T[4, 4096] X) => (T[4, 8] Z) { Z = Gemm(X, W, B) }",
        {"W": ((4096, 8), "w"), "B": ((8,), "n")},
    ),
    "layer norm and product": Model(
        """g (T[32, 64] X) => (T[32, 64] Z) {
          N = LayerNormalization <axis = -1, epsilon = 1e-5> (X, S, B)
          Y = MatMul(N, W)  Z = Add(Y, B2) }""",
        {"S": ((64,), "p"), "B": ((64,), "n"), "W": ((64, 64), "w"), "B2": ((64,), "n")},
    ),
    "convolution, batch norm, GELU": Model(
        """g (T[2, 3, 10, 10] X) => (T[2, 8, 10, 10] Z) {
          C = Conv <pads = [1, 1, 1, 1]> (X, W)
          N = BatchNormalization <epsilon = 1e-5> (C, s, b, m, v)  Z = Gelu(N) }""",
        {
            "W": ((8, 3, 3, 3), "w"),
            "s": ((8,), "p"),
            "b": ((8,), "n"),
            "m": ((8,), "n"),
            "v": ((8,), "p"),
        },
    ),
    "GELU": Model(
        """g (T[32, 64] X) => (T[32, 16] Z) { H = MatMul(X, W1)  A = Add(H, B1)
          G = Gelu <approximate = "none"> (A)  Y = MatMul(G, W2)  Z = Add(Y, B2) }""",
        {"W1": ((64, 128), "w"), "B1": ((128,), "n"), "W2": ((128, 16), "w"), "B2": ((16,), "n")},
    ),
    "attention": Model(
        """g (T[16, 32] X) => (T[16, 32] Z) {
          Q = MatMul(X, WQ)  K = MatMul(X, WK)  V = MatMul(X, WV)
          KT = Transpose <perm = [1, 0]> (K)  S = MatMul(Q, KT)  D = Mul(S, c)
          P = Softmax <axis = -1> (D)  M = MatMul(P, V)  O = MatMul(M, WO)  Z = Add(O, X) }""",
        {
            "WQ": ((32, 32), "w"),
            "WK": ((32, 32), "w"),
            "WV": ((32, 32), "w"),
            "WO": ((32, 32), "w"),
            "c": np.array(32**-0.5),
        },
    ),
    "RMS norm": Model(
        """g (T[16, 96] X) => (T[16, 96] Z) { S = Mul(X, X)  M = ReduceMean <keepdims = 1> (S, last)
          E = Add(M, e)  R = Sqrt(E)  N = Div(X, R)  Z = Mul(N, g) }""",
        {"last": np.array([-1]), "e": np.array(1e-5), "g": ((96,), "p")},
    ),
    "log softmax": Model("g (T[16, 50] X) => (T[16, 50] Z) { Z = LogSoftmax <axis = -1> (X) }", {}),
    "four layers": Model(
        f"g (T[8, 64] X) => (T[8, 64] Z) {{ {layers(4)} }}",
        {f"W{k}": ((64, 64), "w") for k in range(4)},
    ),
    "instance norm, pool": Model(
        """g (T[2, 4, 16, 16] X) => (T[2, 4, 8, 8] Z) { N = InstanceNormalization(X, s, b)
          R = Relu(N)  Z = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (R) }""",
        {"s": ((4,), "p"), "b": ((4,), "n")},
    ),
    "exponentials and quotients": Model(
        """g (T[8, 40] X, T[8, 40] Y) => (T[8, 40] Z) { A = Exp(X)  B = Mul(Y, Y)  C = Add(B, one)
          D = Div(A, C)  E = ReduceSum <keepdims = 1> (D, last)  Z = Div(D, E) }""",
        {"one": np.array(1.0), "last": np.array([-1])},
    ),
    "transformer block": Model(
        """g (int64[12] ids) => (T[12, 11] Z) { H = Gather(table, ids)
          N = LayerNormalization <axis = -1> (H, S)  Q = MatMul(N, WQ)  K = MatMul(N, WK)
          KT = Transpose <perm = [1, 0]> (K)  C = MatMul(Q, KT)  P = Softmax <axis = -1> (C)
          M = MatMul(P, N)  A = Add(M, H)  Z = MatMul(A, WO) }""",
        {
            "table": ((50, 32), "n"),
            "S": ((32,), "p"),
            "WQ": ((32, 32), "w"),
            "WK": ((32, 32), "w"),
            "WO": ((32, 11), "w"),
        },
    ),
}


def feeds_of(proto: onnx.ModelProto, seed: int) -> dict[str, torch.Tensor]:
    """Normal floats and ids below 50, by other draws than the library's."""
    generator = torch.Generator().manual_seed(7_000_000_000 + seed)
    feeds = {}
    for info in proto.graph.input:
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        dtype = onnx_dtype_to_torch_dtype(info.type.tensor_type.elem_type)
        if dtype == torch.int64:
            feeds[info.name] = torch.randint(0, 50, shape, generator=generator)
        else:
            feeds[info.name] = torch.randn(shape, generator=generator).to(dtype)
    return feeds


Run = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def sides(model: Model, dtype: str, change: str = "", weights: Any = None) -> tuple[Run, Run]:
    """Two ways to run it, the second one changed: torch node by node, and ONNX Runtime.

    ONNX Runtime's processor has no bfloat16: the second is then in float32, from the same numbers,
    and rounded at the end, which is what a fused kernel does.
    """
    torch.set_num_threads(1)
    one = TorchOnnxEvaluator(model.proto(dtype))
    half = dtype == "bfloat16"
    proto = model.proto("float32" if half else dtype, dtype, change)
    if weights is not None:
        for tensor in proto.graph.initializer:
            array = numpy_helper.to_array(tensor)
            if array.dtype.kind == "f":
                tensor.CopyFrom(
                    numpy_helper.from_array(weights(array).astype(array.dtype), tensor.name)
                )
    other = session(proto)

    def second(feeds: dict[str, torch.Tensor]) -> torch.Tensor:
        if half:
            feeds = {n: x.float() if x.is_floating_point() else x for n, x in feeds.items()}
        result = other.run(feeds)[0]
        return result.to(torch.bfloat16) if half else result

    return lambda feeds: one.run(None, feeds)[0], second


def suggested(
    model: Model, dtype: str, seed: int = 0, count: int | None = None
) -> CalibratedTolerance:
    """As a user gets it: from two runtimes, or in bfloat16 from both results."""
    proto = model.proto(dtype)
    if dtype != "bfloat16":
        found = compare_runtimes(proto, providers=CPU, seed=seed, calibration=count)
        return found.tolerances["Z"]
    one, other = sides(model, dtype)
    feeds = (feeds_of(proto, 10**6 * (seed + 1) + k) for k in range((count or 299) + 1))
    return calibrated_tolerance((one(fed), other(fed)) for fed in feeds)


def false_alarms(
    name: str, dtype: str, seed: int = 0, count: int | None = None
) -> tuple[CalibratedTolerance, int]:
    """The tolerance, and how many of 300 fresh feeds fail it."""
    model = MODELS[name]
    tolerance, (one, other) = suggested(model, dtype, seed, count), sides(model, dtype)
    proto = model.proto(dtype)
    fresh = (feeds_of(proto, k) for k in range(FRESH))
    return tolerance, sum(not tolerance.allows(one(fed), other(fed)) for fed in fresh)


QUICK = [
    ("convolution, batch norm, GELU", "float16"),
    ("attention", "float32"),
    ("transformer block", "bfloat16"),
    ("product", "float16"),
]


@pytest.mark.parametrize(("name", "dtype"), QUICK)
def test_fresh_inputs_keep_within_a_suggested_tolerance(name: str, dtype: str) -> None:
    tolerance, failed = false_alarms(name, dtype)
    assert tolerance.found
    assert failed <= 1
    assert tolerance.rtol >= torch.finfo(getattr(torch, dtype)).eps  # a unit in the last place


@pytest.mark.slow(reason="12 models in 3 types on 300 fresh feeds each, with three calibrations")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MODELS)
def test_fresh_inputs_of_twelve_models_in_three_types(name: str, dtype: str) -> None:
    for seed, count in ((1, 32), (2, 32), (3, 299)):
        tolerance, failed = false_alarms(name, dtype, seed, count)
        assert tolerance.found
        assert failed <= 1


@dataclasses.dataclass
class Fault:
    """A wrong model beside the right one: what changes in its text, in its weights or result."""

    model: str
    change: str = ""
    weights: Callable[[np.ndarray], np.ndarray] | None = None
    result: Callable[[torch.Tensor], torch.Tensor] | None = None


def cut(array: np.ndarray, bits: int = 10) -> np.ndarray:
    """Float32 numbers whose significands keep so many bits after the first."""
    mask = np.uint32(0xFFFFFFFF << (23 - bits) & 0xFFFFFFFF)
    return (np.ascontiguousarray(array, np.float32).view(np.uint32) & mask).view(np.float32)


def int8(array: np.ndarray) -> np.ndarray:
    """Rounded to 255 steps of one scale."""
    wide = array.astype(np.float64)
    step = np.abs(wide).max() / 127
    return np.rint(wide / step) * step


def int8_matrices(array: np.ndarray) -> np.ndarray:
    return int8(array) if array.ndim > 1 else array


FAULTS = {
    "scale by 10 %": Fault("four layers", result=lambda z: z * 1.1),
    "scale by 1 %": Fault("four layers", result=lambda z: z * 1.01),
    "scale by 0.1 %": Fault("four layers", result=lambda z: z * 1.001),
    "scale by 0.001 %": Fault("four layers", result=lambda z: z * 1.00001),
    "one element off by 1 % of RMS": Fault(
        "four layers", result=lambda z: torch.cat([z[:-1], z[-1:] + 0.01 * z.std()])
    ),
    "eps 1e-3 for 1e-5": Fault("layer norm and product", "1e-5 => 1e-3"),
    "eps 1e-6 for 1e-5": Fault("layer norm and product", "1e-5 => 1e-6"),
    "no bias": Fault("layer norm and product", "Z = Add(Y, B2) => Z = Identity(Y)"),
    "transposed weight": Fault(
        "layer norm and product", weights=lambda w: w.T if w.ndim == 2 else w
    ),
    "tanh GELU for erf": Fault("GELU", '"none" => "tanh"'),
    "ReLU for GELU": Fault("GELU", 'Gelu <approximate = "none"> => Relu'),
    "int8 weights": Fault("GELU", weights=int8_matrices),
    "operands cut to 10 bits, as TF32": Fault("product", weights=cut),
    "mean over the wrong axis": Fault(
        "RMS norm", "ReduceMean <keepdims = 1> (S, last) => ReduceMean <keepdims = 1> (S, first)"
    ),
    "mean over n - 1": Fault("RMS norm", result=lambda z: z * (95 / 96) ** 0.5),
    "no residual": Fault("attention", "Z = Add(O, X) => Z = Identity(O)"),
    "no 1 / sqrt(d)": Fault("attention", "D = Mul(S, c) => D = Identity(S)"),
    "causal mask for none": Fault(
        "attention",
        "P = Softmax <axis = -1> (D) => L = Trilu <upper = 0> (D)  P = Softmax <axis = -1> (L)",
    ),
    "padding on one side": Fault("convolution, batch norm, GELU", "[1, 1, 1, 1] => [2, 2, 0, 0]"),
    "batch norm's eps 1e-3 for 1e-5": Fault("convolution, batch norm, GELU", "1e-5 => 1e-3"),
    "softmax over the wrong axis": Fault("transformer block", "axis = -1> (C) => axis = 0> (C)"),
}


def caught(name: str, dtype: str, feeds: int = 40) -> tuple[CalibratedTolerance, float, float]:
    """The tolerance, the share of feeds on which a fault is seen, and its size over the RMS."""
    fault = FAULTS[name]
    model = MODELS[fault.model]
    if "first" in fault.change:
        model = dataclasses.replace(model, weights=model.weights | {"first": np.array([0])})
    tolerance = suggested(MODELS[fault.model], dtype)
    right, other = sides(MODELS[fault.model], dtype)
    wrong = sides(model, dtype, fault.change, fault.weights)[1]
    proto, seen, sizes = MODELS[fault.model].proto(dtype), 0, []
    for k in range(feeds):
        fed = feeds_of(proto, 10**5 + k)
        result = wrong(fed)
        if fault.result is not None:
            result = fault.result(result)
        seen += not tolerance.allows(right(fed), result)
        truth = other(fed).double()
        sizes.append(float((result.double() - truth).square().mean() / truth.square().mean()))
    return tolerance, seen / feeds, float(np.sqrt(np.mean(sizes)))


#: Faults that pass, on some feeds or on all: too small for the type. The others are always caught.
SMALL = {
    "scale by 0.1 %",
    "scale by 0.001 %",
    "eps 1e-3 for 1e-5",
    "eps 1e-6 for 1e-5",
    "tanh GELU for erf",
    "operands cut to 10 bits, as TF32",
    "batch norm's eps 1e-3 for 1e-5",
}
PASS = {
    "float32": set(),
    "float16": SMALL,
    "bfloat16": SMALL
    | {"scale by 1 %", "one element off by 1 % of RMS", "int8 weights", "mean over n - 1"},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("scale by 1 %", "float16"), ("tanh GELU for erf", "float32"), ("no bias", "bfloat16")],
)
def test_a_fault_is_caught(name: str, dtype: str) -> None:
    assert caught(name, dtype, 10)[1] == 1


@pytest.mark.slow(reason="21 faults in 3 types")
@pytest.mark.parametrize("dtype", TYPES)
def test_which_faults_are_caught(dtype: str) -> None:
    missed = {name for name in FAULTS if caught(name, dtype)[1] < 1}
    assert missed == PASS[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["four layers", "layer norm and product"])
def test_the_size_that_passes_is_what_is_told(name: str, dtype: str) -> None:
    tolerance, (_, other) = suggested(MODELS[name], dtype), sides(MODELS[name], dtype)
    proto = MODELS[name].proto(dtype)
    for k in range(20):
        result = other(feeds_of(proto, k)).double()
        size = tolerance.passes * result.square().mean().sqrt()
        assert tolerance.allows(result + 0.8 * size, result)
        assert tolerance.allows(result * (1 + 0.9 * tolerance.passes), result)
        assert not tolerance.allows(result * (1 + 4 * tolerance.passes), result)


KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "of one sign": lambda shape, g: torch.rand(shape, generator=g),
    "far from zero": lambda shape, g: 30 + torch.randn(shape, generator=g),
    "mostly zero": lambda shape, g: (torch.randn(shape, generator=g) - 1.2).clamp_min(0),
    "large": lambda shape, g: 40 * torch.randn(shape, generator=g),
    "with a heavy tail": lambda shape, g: torch.randn(shape, generator=g) ** 3,
}


def kinds_alarms(name: str, dtype: str, kind: str) -> tuple[CalibratedTolerance, int]:
    """The tolerance from one feed of a kind, and how many of 300 others of the kind fail it."""
    proto = MODELS[name].proto(dtype)

    def feed(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(8_000_000_000 + seed)
        draw = KINDS[kind]
        return {n: draw(x.shape, generator).to(x.dtype) for n, x in feeds_of(proto, 0).items()}

    tolerance = compare_runtimes(proto, feed(10**6), providers=CPU).tolerances["Z"]
    if not tolerance.found:
        return tolerance, 0
    one, other = sides(MODELS[name], dtype)
    fresh = (feed(k) for k in range(FRESH))
    return tolerance, sum(not tolerance.allows(one(fed), other(fed)) for fed in fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_the_feeds_given_say_of_which_kind_fresh_ones_are(kind: str) -> None:
    tolerance, failed = kinds_alarms("layer norm and product", "float32", kind)
    assert tolerance.found, tolerance
    assert failed <= 1


@pytest.mark.slow(reason="five kinds of feeds, 300 fresh ones each, of five models in two types")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    ["product", "convolution, batch norm, GELU", "attention", "RMS norm", "four layers"],
)
def test_fresh_feeds_of_five_kinds(name: str, kind: str, dtype: str) -> None:
    tolerance, failed = kinds_alarms(name, dtype, kind)
    assert failed <= 1
    # In float16 the exponents of large scores leave no number to compare, on either side.
    assert tolerance.found or dtype == "float16", tolerance


def structured(seed: int) -> dict[str, torch.Tensor]:
    """Rows of very different sizes, as a model's hidden states are: a LayerNorm evens them out."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 64, generator=generator)
    return {"X": x * 10.0 ** torch.arange(-4, 4).repeat_interleave(4)[:, None]}


def test_feeds_whose_structure_drawing_loses_may_be_given() -> None:
    model = MODELS["layer norm and product"]
    listed = [structured(k) for k in range(32)]
    proto = model.proto("float32")
    found = compare_runtimes(proto, structured(99), providers=CPU, calibration=listed)
    tolerance, (one, other) = found.tolerances["Z"], sides(model, "float32")
    assert tolerance.feeds == 33
    fresh = [structured(1000 + k) for k in range(FRESH)]
    assert sum(not tolerance.allows(one(fed), other(fed)) for fed in fresh) <= 1


def test_without_an_assumption_about_the_tail() -> None:
    found = compare_runtimes(MODELS["GELU"].proto("float32"), providers=CPU, calibration=299)
    tolerance = found.tolerances["Z"]
    assert (tolerance.feeds, tolerance.extrapolated) == (300, False)
    assert "tail" not in str(tolerance)
    usual = compare_runtimes(
        MODELS["GELU"].proto("float32"), providers=CPU, calibration=32
    ).tolerances["Z"]
    assert usual.extrapolated
    assert "tail" in str(usual)
    assert tolerance.rtol <= usual.rtol


def main() -> None:
    """Print both error rates."""
    for count in (32, 299):
        print(f"false alarms of 300 fresh feeds, calibrated on {count + 1}")
        for name in MODELS:
            cells = []
            for dtype in TYPES:
                tolerance, failed = false_alarms(name, dtype, count=count)
                cells.append(f"{dtype} {failed} (rtol {tolerance.rtol:.2g})")
            print(f"{name:32}", "  ".join(cells), flush=True)
    print("\nfaults: share of 40 feeds on which it is caught (its RMS over the output's)")
    for name in FAULTS:
        cells = []
        for dtype in TYPES:
            _, share, size = caught(name, dtype)
            cells.append(f"{dtype} {share:4.0%} ({size:.1g})")
        print(f"{name:34}", "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
