"""The study behind "Which tolerance should I use in assert_close?".

Two error rates of a tolerance, counted: correct results that fail (twelve models, three types,
fresh inputs), and faults that pass (21 of them). Fixed tolerances, the bound of a product, and
tolerances calibrated on inputs are held against the same results.

    python studies/which_tolerance.py --record
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import torch
from onnx import numpy_helper

from roundoff.compare import calibrated_tolerance, tolerance, tolerance_used
from roundoff.dtypes import onnx_dtype_to_torch_dtype
from roundoff.evaluator import TorchOnnxEvaluator
from roundoff.ort import session
from roundoff.page.measurement import Study
from roundoff.script import unit_test_going

fast = unit_test_going()
study = Study(
    "plot_which_tolerance",
    "How often a tolerance fails a correct result, and which faults it lets pass.",
    on="amd-epyc-2-cores",
    part="cpu",
)
FRESH, FEEDS = (20, 5) if fast else (300, 40)  # inputs of each model, and of each fault

TYPES = ("float32", "float16", "bfloat16")
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


# --- Twelve models, each run by torch node by node and by ONNX Runtime. --------------------------


def unchanged(x):
    """What no fault does."""
    return x


@dataclasses.dataclass
class Fault:
    """What makes a model wrong: a change of its text, of its stored floats, or of its result."""

    model: str = ""
    change: tuple[str, str] = ("", "")
    weights: Callable[[np.ndarray], np.ndarray] = unchanged
    result: Callable[[torch.Tensor], torch.Tensor] = unchanged


NONE = Fault()


@dataclasses.dataclass
class Model:
    """An ONNX graph whose floats are of type ``T``, and how its weights are drawn.

    A weight is a shape and a letter: w for variance 1 / inputs, n for variance 1, p for uniform in
    [0.5, 1.5); or the array itself.
    """

    text: str
    weights: dict[str, Any]

    def proto(self, dtype, stored=None, fault=NONE):
        """In one type, with weights that are numbers of another one."""
        onnx_name = {"float32": "float"}.get(dtype, dtype)
        text = self.text.replace(*fault.change).replace("T[", f"{onnx_name}[")
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 22]> {text}')
        random = np.random.default_rng(0)
        for name, spec in self.weights.items():
            array = drawn(random, *spec) if isinstance(spec, tuple) else np.asarray(spec)
            if array.dtype.kind == "f":
                array = array.astype(NUMPY[stored or dtype]).astype(NUMPY[dtype])
                array = fault.weights(array).astype(array.dtype)
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        return model


def drawn(random, shape, kind):
    """Numbers of the kind that the letter names."""
    if kind == "p":
        return random.random(shape) + 0.5
    array = random.standard_normal(shape)
    inputs = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
    return array / np.sqrt(inputs) if kind == "w" else array


def layers(count):
    """So many products, each with a tanh and a residual, as text."""
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


def feeds_of(proto, seed):
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


def sides(model, dtype, fault=NONE):
    """Two ways to run it, the second one changed: torch node by node, and ONNX Runtime.

    ONNX Runtime's processor has no bfloat16: the second is then in float32, from the same numbers,
    and rounded at the end, which is what a fused kernel does.
    """
    torch.set_num_threads(1)
    one = TorchOnnxEvaluator(model.proto(dtype))
    half = dtype == "bfloat16"
    other = session(model.proto("float32" if half else dtype, dtype, fault))

    def second(feeds):
        if half:
            feeds = {n: x.float() if x.is_floating_point() else x for n, x in feeds.items()}
        result = other.run(feeds)[0]
        return fault.result(result.to(torch.bfloat16) if half else result)

    return lambda feeds: one.run(None, feeds)[0], second


# --- 21 faults. ----------------------------------------------------------------------------------


def cut(array):
    """Float32 numbers whose significands keep 10 bits after the first."""
    return (np.ascontiguousarray(array, np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32)


def int8_matrices(array):
    """Matrices rounded to 255 steps of one scale."""
    if array.ndim < 2:
        return array
    wide = array.astype(np.float64)
    step = np.abs(wide).max() / 127
    return np.rint(wide / step) * step


FAULTS = {
    "scale by 10 %": Fault("four layers", result=lambda z: z * 1.1),
    "scale by 1 %": Fault("four layers", result=lambda z: z * 1.01),
    "scale by 0.1 %": Fault("four layers", result=lambda z: z * 1.001),
    "scale by 0.001 %": Fault("four layers", result=lambda z: z * 1.00001),
    "one element off by 1 % of RMS": Fault(
        "four layers", result=lambda z: torch.cat([z[:-1], z[-1:] + 0.01 * z.std()])
    ),
    "eps 1e-3 for 1e-5": Fault("layer norm and product", ("1e-5", "1e-3")),
    "eps 1e-6 for 1e-5": Fault("layer norm and product", ("1e-5", "1e-6")),
    "no bias": Fault("layer norm and product", ("Z = Add(Y, B2)", "Z = Identity(Y)")),
    "transposed weight": Fault(
        "layer norm and product", weights=lambda w: w.T if w.ndim == 2 else w
    ),
    "tanh GELU for erf": Fault("GELU", ('"none"', '"tanh"')),
    "ReLU for GELU": Fault("GELU", ('Gelu <approximate = "none">', "Relu")),
    "int8 weights": Fault("GELU", weights=int8_matrices),
    "operands cut to 10 bits, as TF32": Fault("product", weights=cut),
    "mean over the wrong axis": Fault(
        "RMS norm",
        (
            "M = ReduceMean <keepdims = 1> (S, last)",
            "first = Constant <value_ints = [0]> ()  M = ReduceMean <keepdims = 1> (S, first)",
        ),
    ),
    "mean over n - 1": Fault("RMS norm", result=lambda z: z * (95 / 96) ** 0.5),
    "no residual": Fault("attention", ("Z = Add(O, X)", "Z = Identity(O)")),
    "no 1 / sqrt(d)": Fault("attention", ("D = Mul(S, c)", "D = Identity(S)")),
    "causal mask for none": Fault(
        "attention",
        ("P = Softmax <axis = -1> (D)", "L = Trilu <upper = 0> (D)  P = Softmax <axis = -1> (L)"),
    ),
    "padding on one side": Fault("convolution, batch norm, GELU", ("[1, 1, 1, 1]", "[2, 2, 0, 0]")),
    "batch norm's eps 1e-3 for 1e-5": Fault("convolution, batch norm, GELU", ("1e-5", "1e-3")),
    "softmax over the wrong axis": Fault("transformer block", ("axis = -1> (C)", "axis = 0> (C)")),
}


# --- The tolerances. -----------------------------------------------------------------------------

#: What is often typed for a type, for want of a better one.
TYPED = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
DEFAULTS, RTOL, BOTH = "assert_close, defaults", "fixed rtol", "fixed rtol and atol"
SHARE = "fixed rtol, atol = rtol × RMS"
BOUND, FEW, MANY = "bound of the product", "calibrated, 33 inputs", "calibrated, 300 inputs"
FREE = "calibrated, 33 inputs, any scale"


def close(got, expected, **given):
    """What ``torch.testing.assert_close`` says."""
    try:
        torch.testing.assert_close(got, expected, **given)
    except AssertionError:
        return False
    return True


def rms(result):
    """Root mean square."""
    return float(result.double().square().mean().sqrt())


def beyond_bound(name, dtype, runs):
    """How many results exceed 2nu Σ|a||b|, of a model that is one product."""
    weights = {
        t.name: np.abs(numpy_helper.to_array(t).astype(float))
        for t in MODELS[name].proto("float32", dtype).graph.initializer
    }
    w, bias = (torch.tensor(weights[k]) if k in weights else 0.0 for k in "WB")
    tol, count = tolerance(dtype, len(w) + ("B" in weights), accumulate="float32"), 0
    for feeds, got, expected in runs:
        size = feeds["X"].double().abs() @ w + bias
        count += not tolerance_used(got, expected, size, tol) <= 1
    return count


@cache
def calibrated(name, dtype, count):
    """The tolerance from both results on so many inputs."""
    one, other = sides(MODELS[name], dtype)
    feeds = (feeds_of(MODELS[name].proto(dtype), 10**6 + k) for k in range(count))
    return calibrated_tolerance((one(fed), other(fed)) for fed in feeds)


def rejected(name, dtype, runs):
    """How many results of runs (inputs, result, expected one) each tolerance of a model fails."""
    rtol = TYPED[dtype]
    few, many = (calibrated(name, dtype, count).allows for count in (33, 40 if fast else 300))
    checks = {
        DEFAULTS: close,
        RTOL: partial(close, rtol=rtol, atol=0),
        BOTH: partial(close, rtol=rtol, atol=rtol),
        SHARE: lambda got, expected: close(got, expected, rtol=rtol, atol=rtol * rms(expected)),
        FEW: few,
        FREE: partial(few, any_scale=True),
        MANY: many,
    }
    failed = {
        method: sum(not passes(got, expected) for _, got, expected in runs)
        for method, passes in checks.items()
    }
    if name in ("product", "long product"):
        failed[BOUND] = beyond_bound(name, dtype, runs)
    return failed


@study.table()
def alarms(args):
    """Of fresh inputs of a correct model, those that fail."""
    for name, dtype in product(MODELS, TYPES):
        (one, other), proto = sides(MODELS[name], dtype), MODELS[name].proto(dtype)
        drawn = [feeds_of(proto, seed) for seed in range(FRESH)]
        runs = [(feeds, one(feeds), other(feeds)) for feeds in drawn]
        for method, count in rejected(name, dtype, runs).items():
            case = {"model": name, "dtype": dtype, "fresh": FRESH}
            yield case | {"method": method, "failed": count}


@study.table()
def faults(args):
    """Of inputs of a wrong model, those on which it is caught; its size over the output's RMS."""
    for (name, fault), dtype in product(FAULTS.items(), TYPES):
        model = MODELS[fault.model]
        right, other = sides(model, dtype)
        wrong, runs, sizes = sides(model, dtype, fault)[1], [], []
        for seed in range(10**5, 10**5 + FEEDS):
            feeds = feeds_of(model.proto(dtype), seed)
            got, truth = wrong(feeds), other(feeds).double()
            sizes.append(float((got - truth).square().mean() / truth.square().mean()))
            runs.append((feeds, got, right(feeds)))
        case = {"fault": name, "model": fault.model, "dtype": dtype, "feeds": FEEDS}
        case["size"] = float(np.sqrt(np.mean(sizes)))
        for method, count in rejected(fault.model, dtype, runs).items():
            yield case | {"method": method, "caught": count}


# --- How sharp a bound is, and where a tolerance is of no use. -----------------------------------


@study.table()
def sharp(args):
    """How much of its bound a sum of chosen terms reaches."""
    terms, u = 1000, 2.0**-24
    values = np.array([1] + [u] * (terms - 1), np.float32)  # each addition is a tie, back to 1
    exact = values.sum(dtype=float)
    error = (exact - np.cumsum(values)[-1]) / exact
    return [{"rounding": "nearest", "terms": terms, "used": error / tolerance("float32", terms)}]


def draw(seed):
    """Two matrices of normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(32, 1024, generator=generator), torch.randn(1024, 64, generator=generator)


def norm(x, one_pass):
    """Rows of mean 0 and variance 1; in one pass from the mean of the squares."""
    mean = x.mean(1, keepdim=True)
    if one_pass:
        variance = x.square().mean(1, keepdim=True) - mean.square()
    else:
        variance = (x - mean).square().mean(1, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt()


@study.table()
def limits(args):
    """Inputs on which a result exceeds a tolerance: correct results that fail, faults caught."""
    count = min(FRESH, 100)
    # Operands that were normalised in two ways exceed the 2nu Σ|a||b| of one product.
    beyond, tol = 0, tolerance("float32", 1024)
    for seed in range(count):
        x, w = draw(seed)
        one, other = norm(x + 300, True), norm(x + 300, False)
        size = other.double().abs() @ w.double().abs()
        beyond += tolerance_used(one @ w, other @ w, size, tol) > 1
    case = "operands from two normalisations, mean 300 times the deviation"
    yield {"case": case, "beyond": beyond, "inputs": count}
    # Two normalisations, calibrated on normal inputs, exceed it on inputs of another kind.
    usual = (draw(10_000 + seed)[0] for seed in range(40 if fast else 300))
    found = calibrated_tolerance((norm(x, True), norm(x, False)) for x in usual)
    fresh = [draw(seed)[0] + 30 for seed in range(count)]
    beyond = sum(not found.allows(norm(x, True), norm(x, False)) for x in fresh)
    case = "float32 normalisation, mean 30 times the deviation"
    yield {"case": case, "beyond": beyond, "inputs": count}
    # A fixed pair depends on the unit of the outputs: correct ones fail, and all zeros pass.
    rtol, large, small = TYPED["float32"], 0, 0
    for name in MODELS:
        one, other = sides(MODELS[name], "float32")
        for seed in range(count // 10):
            feeds = feeds_of(MODELS[name].proto("float32"), seed)
            expected, got = one(feeds), other(feeds)
            large += not close(got * 2.0**16, expected * 2.0**16, rtol=rtol, atol=rtol)
            small += not close(0 * expected, expected * 2.0**-16, rtol=rtol, atol=rtol)
    inputs = len(MODELS) * (count // 10)
    yield {"case": "twelve models, outputs near 65,536", "beyond": large, "inputs": inputs}
    yield {"case": "all zeros, outputs near 1/65,536", "beyond": small, "inputs": inputs}


# --- Values: what pages may print. Name, datum and statistic, table, column; rows; a test. -------


def failed(rows):
    """Fresh inputs of all models that fail."""
    return rows["failed"].sum()


def share(rows):
    """Of the fresh inputs of all models, those that fail."""
    return rows["failed"].sum() / rows["fresh"].sum()


def unseen(rows):
    """Faults that pass on an input or more; what changes no bit in a type is no fault."""
    return ((rows["size"] > 0) & (rows["caught"] < rows["feeds"])).sum()


study.value(
    "alarms.defaults",
    "share of correct results that fail assert_close's defaults, twelve models in float16",
    "alarms",
    share,
    where={"method": DEFAULTS, "dtype": "float16"},
    test=lambda v: v.value > 0.5,  # most
)
study.value(
    "alarms.defaults.float32",
    "correct results that fail assert_close's defaults, twelve models in float32",
    "alarms",
    failed,
    where={"method": DEFAULTS, "dtype": "float32"},
    test=lambda v: v.value < v.rows["fresh"].sum() / 300,  # good
)
study.value(
    "alarms.share",
    "correct results that fail a fixed rtol, atol = rtol × RMS, twelve models in three types",
    "alarms",
    failed,
    where={"method": SHARE},
    test=lambda v: v.value < v.rows["fresh"].sum() / 300,
)
study.value(
    "alarms.any_scale",
    "correct results that fail a tolerance calibrated on 33 inputs, whose atol is a share of the "
    "RMS of each result, twelve models in three types",
    "alarms",
    failed,
    where={"method": FREE},
    test=lambda v: v.value <= v.rows["fresh"].sum() / 300,
)
study.value(
    "alarms.rtol",
    "share of correct results that fail rtol=1e-4, atol=0, twelve models in float32",
    "alarms",
    share,
    where={"method": RTOL, "dtype": "float32"},
    test=lambda v: v.value > 0.1,
)
study.value(
    "faults.defaults",
    "faults in float32 that pass assert_close's defaults, on one of 40 inputs or more",
    "faults",
    unseen,
    where={"method": DEFAULTS, "dtype": "float32"},
    test=lambda v: v.value == 0,  # as good as a calibration
)
for kind in "float32", "float16":
    study.value(
        f"faults.share.{kind}",
        f"faults in {kind} that pass rtol = {TYPED[kind]:g}, atol = rtol × RMS, "
        "on one of 40 inputs or more",
        "faults",
        unseen,
        where={"method": SHARE, "dtype": kind},
        test=lambda v: v.value < len(v.rows) / 2,
    )
for kind in TYPES:
    study.value(
        f"faults.{kind}",
        f"faults in {kind} that pass a share of the RMS calibrated on 33 inputs, on one of 40 or "
        "more",
        "faults",
        unseen,
        where={"method": FREE, "dtype": kind},
        test=lambda v: v.value < len(v.rows) / 2,
    )
    study.value(
        f"faults.all.{kind}",
        f"faults that change a bit in {kind}",
        "faults",
        lambda rows: (rows["size"] > 0).sum(),
        where={"method": FEW, "dtype": kind},
        test=lambda v: v.value > 15,
    )
FIXED = "rtol = atol = 1e-4 in float32"
for name, tested, case, wrong in [
    ("limits.large", FIXED, "twelve models, outputs near 65,536", False),
    ("limits.small", FIXED, "all zeros, outputs near 1/65,536", True),
    (
        "limits.mean",
        "a calibrated rtol and atol",
        "float32 normalisation, mean 30 times the deviation",
        False,
    ),
    (
        "limits.operands",
        "the bound of a product",
        "operands from two normalisations, mean 300 times the deviation",
        False,
    ),
]:
    study.value(
        name,
        f"wrong verdicts of {tested}: {case}",
        "limits",
        lambda rows, wrong=wrong: rows["inputs"] - rows["beyond"] if wrong else rows["beyond"],
        where={"case": case},
        test=lambda v: v.value > v.rows["inputs"].sum() / 10,
    )
study.value(
    "sharp.nearest",
    "error of a sum of 1000 chosen terms, rounded to nearest, over its bound nu Σ|a||b|",
    "sharp",
    "used",
    where={"rounding": "nearest"},
    test=lambda v: 0.99 < v.value <= 1,
)


if __name__ == "__main__":
    study.main()
