"""What a user passes by mistake to a public function is refused with a typed error that says why.

``CALLS`` has one right call of each function. Each of its arguments in turn, given or default, is
replaced by what may stand there by mistake. What no single value expresses comes after them.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

import roundoff
from roundoff import compare, dtypes, fusion, models, ort, timing
from roundoff import reductions as r
from roundoff.backend import onnx_custom_backend
from roundoff.errors import RoundoffError
from roundoff.evaluator import OrtKernel, TorchOnnxEvaluator
from roundoff.graph import onnx_simple_text_plot, plot_dot
from roundoff.localization import localize
from roundoff.runtimes import compare_runtimes
from roundoff.workers import Workers

Call = tuple[Callable[..., Any], dict[str, Any]]

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
CPU = ["CPUExecutionProvider"]
X, ROWS = torch.ones(4, 3), torch.tensor([0, 3])
FEEDS = {"X": X, "rows": ROWS}
F = np.ones(4, np.float32)
MODEL = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["" : 18]> g (float[n, 3] X, int64[k] rows) => '
    "(float[k, 3] Z) { Y = Exp(X)  Z = Gather(Y, rows) }"
)
UNKNOWN = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["" : 18, "my.own" : 1]> g (float[3] X) => (float[3] Z) '
    "{ Z = my.own.Twirl(X) }"
)
#: A file that did not arrive whole.
CUT = models.layer_norm_matmul().SerializeToString()[:-1]

#: Type of a right value -> what may stand there by mistake. None is none where a signature has it.
MISTAKES: dict[type, list[Any]] = {
    bool: ["no"],
    int: [None, "text", 1.5, math.nan, -1],
    float: [None, "text", math.nan, -1.0],
    str: [None, "nothing", 3],
    torch.Tensor: [None, "text", X.to("meta"), X.to(torch.complex64)],
    np.ndarray: [None, "text", np.array(["a", "b"]), np.ones(4, complex)],
    Mapping: [None, 3, "text"],
    list: [None, 3],
    onnx.ModelProto: [None, "nothing.onnx", CUT, torch.nn.Linear(2, 2), onnx.ModelProto()],
}
#: Arguments, and arguments with a value, that mean something or are handed on as they are.
ANSWERED = {
    *(
        "OrtKernel.op_type = nothing",
        "OrtKernel.domain = nothing",
        "padded.pad = -1",
        "binned.axis = -1",
        "arrange.x",
    ),
    *("OptimizationOptions.verbose = -1", "Editor.ours"),
    "round_to.storage",
    *("dtype_info.dtype = 3", "orders_found.dtype = 3"),
    *("shuffled.seed = -1", "TrainedLlama.prompt.text = nothing"),
}


def precision(tf32: bool) -> None:
    with timing.torch_precision(tf32):
        pass


# --- a right call of each function


def of_graphs() -> list[Call]:
    one, ours = TorchOnnxEvaluator(MODEL), ort.session(MODEL)
    return [
        (TorchOnnxEvaluator, {"model": MODEL}),
        (one.run, {"names": None, "feeds": FEEDS}),
        (OrtKernel, {"op_type": "Exp"}),
        (ort.session, {"model": MODEL}),
        (ours.run, {"names": None, "feeds": FEEDS}),
        (ours.bind, {"feeds": FEEDS}),
        (ort.available, {"names": CPU}),
        (plot_dot, {"model": MODEL}),
        (onnx_simple_text_plot, {"model": MODEL}),
        (fusion.fuse, {"model": MODEL}),
        (fusion.OptimizationOptions, {}),
        (fusion.rules, {"tier": "default"}),
        (fusion.Editor, {"proto": MODEL}),
        (localize, {"first": one, "second": one, "feeds": FEEDS}),
        (compare_runtimes, {"model": MODEL, "feeds": FEEDS, "providers": CPU, "calibration": 0}),
    ]


def of_numbers() -> list[Call]:
    four, wide, parts = torch.ones(4), torch.ones(4, dtype=torch.float64), np.ones((3, 4), "f4")
    pairs = [(X, X)] * 20
    sums = r.sequential(r.order_probes(3, "float32"))[:, None]
    of_one = [r.sequential, r.pairwise, r.neumaier, r.moments, r.binned, r.exact_sum, r.condition]
    return [
        (compare.string_diff, {"diff": compare.max_diff(X, X)}),
        (compare.scaled_error, {"truth": wide, "got": four}),
        (compare.tolerance, {"dtype": "float32", "terms": 3}),
        (compare.tolerance_used, {"a": four, "b": four, "size": four, "tol": 0.1}),
        (compare.ulp_distance, {"a": four, "b": four}),
        (compare.calibrated_tolerance, {"pairs": pairs}),
        (compare.calibrated_tolerance(pairs).allows, {"got": X, "expected": X}),
        (dtypes.ulp, {"x": F, "dtype": "float32"}),
        (dtypes.dtype_info, {"dtype": "float32"}),
        (dtypes.onnx_dtype_name, {"itype": 1}),
        (dtypes.onnx_dtype_to_np_dtype, {"itype": 1}),
        (dtypes.onnx_dtype_to_torch_dtype, {"itype": 1}),
        *((function, {"x": F}) for function in of_one),
        (r.ring_sum, {"parts": parts}),
        (r.mean, {"x": F, "dtype": "float32"}),
        (r.round_exact, {"value": Fraction(1, 3), "dtype": "float32"}),
        (r.round_to, {"x": F, "dtype": "float16"}),
        (r.distinct_bits, {"results": F}),
        (r.judge, {"results": F, "truth": Fraction(1), "dtype": "float32"}),
        (r.draw_values, {"name": "normal"}),
        (r.draw_orders, {"size": 4}),
        (r.arrange, {"x": F, "drawn": np.array([[0, 1, 3, 2]])}),
        (r.add_in_order, {"parts": parts, "tree": ((0, 1), 2)}),
        (r.order_probes, {"ranks": 3, "dtype": "float32"}),
        (r.orders_found, {"sums": sums, "ranks": 3, "dtype": "float32"}),
        (r.tensor_core_matmul, {"a": np.ones((2, 3), "f2"), "b": np.ones((3, 2), "f2")}),
    ]


def of_times_and_pages() -> list[Call]:
    work = {"sum": lambda: sum(range(10)), "max": lambda: max(range(10))}
    quick: dict[str, Any] = {"budget_s": 0.001, "min_rounds": 1, "max_rounds": 2, "warmup": 1}
    made = timing.measure(work, **quick)
    return [
        (timing.measure, {"callables": work} | quick),
        (made.ratio, {"a": "sum", "b": "max"}),
        (made.ratios, {"to": "sum"}),
        (precision, {"tf32": True}),
        (Workers, {"count": 2}),
    ]


def of_kernels() -> list[Call]:
    pytest.importorskip("triton")
    from roundoff import kernels as k
    from roundoff.kernels.binned import sum_binned

    def shuffled(seed: int) -> None:
        with k.shuffled_programs(seed):
            pass

    x, w = torch.ones(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    q = torch.ones(1, 2, 4, 8, device=DEVICE)
    return [
        (k.layer_norm, {"x": x, "normalized_shape": 8, "weight": w, "bias": w}),
        (k.rms_norm, {"x": x, "normalized_shape": 8, "weight": w}),
        (sum_binned, {"x": w}),
        (k.matmul, {"x": x, "weight": torch.ones(3, 8, device=DEVICE)}),
        (k.attention, {"q": q, "k": q, "v": q}),
        *([(shuffled, {"seed": 0})] * k.interpreting()),
    ]


def of_models() -> list[Call]:
    m, size = models, models.SIZES["tiny"]
    return [
        (m.layer_norm_matmul, {"itype": 1}),
        (m.layer_norm_feeds, {"rows": 2, "width": 4}),
        (m.prompts, {"count": 3}),
        (m.padded, {"prompts": [[1, 2]], "pad": 0}),
        (m.random_tokens, {"size": size, "with_mask": True, "device": "cpu"}),
        (m.Llama(size), {"ids": torch.tensor([[1, 2]])}),
    ]


def of_trained_models() -> list[Call]:
    loaded = models.load_trained(layers=1)
    return [
        (loaded.prompt, {"text": "a"}),
        (models.load_trained, {"layers": 1}),
        (models.load_decoder, {"layers": 1}),
        (models.Float64Llama(loaded), {"input_ids": torch.tensor([[1]])}),
        (models.decode, {"model": loaded.model(), "prompts": [[1, 2]], "tokens": 1}),
    ]


def of_the_backend() -> list[Call]:
    nodes = torch.fx.Graph()
    nodes.output((nodes.call_function(torch.relu, (nodes.placeholder("x"),)),))
    graph = torch.fx.GraphModule(torch.nn.Module(), nodes)
    return [(onnx_custom_backend, {"graph_module": graph, "args": [X]})]


CALLS = [
    of_graphs,
    of_numbers,
    of_times_and_pages,
    of_kernels,
    of_models,
    of_trained_models,
    of_the_backend,
]


def name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]


def mistaken(calls: list[Call]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each right call with each of its arguments replaced by each mistake."""
    for function, arguments in calls:
        for name, parameter in inspect.signature(
            getattr(function, "forward", function)
        ).parameters.items():
            right = arguments.get(name, parameter.default)
            kind = next((kind for kind in MISTAKES if isinstance(right, kind)), None)
            for value in MISTAKES.get(kind, []):
                key = f"{name_of(function)}.{name}"
                said = f"{key} = {value}"
                if value is None and "None" in str(parameter.annotation):
                    continue
                if not ANSWERED & {key, said}:
                    yield said, partial(function, **arguments | {name: value})


# --- what no single value expresses


def of_feeds_and_providers() -> list[Callable[[], Any]]:
    """Each reader of feeds and of providers with each that it cannot read."""
    one, ours = TorchOnnxEvaluator(MODEL), ort.session(MODEL)
    quick = partial(compare_runtimes, calibration=0)
    feeds: list[Any] = [[X, ROWS], X, {}, {"X": X}, FEEDS | {"more": X}]
    feeds += [FEEDS | {"X": x} for x in (X.double(), X[0], torch.ones(4, 4), None, "text")]
    feeds += [FEEDS | {"rows": rows} for rows in (torch.tensor([9]), torch.tensor([0.0]))]
    providers: list[Any] = ["CPUExecutionProvider", [], ["NoSuchProvider"]]
    providers += [] if HAS_GPU else [["CUDAExecutionProvider"]]
    calls: list[Callable[[], Any]] = []
    for given in feeds:
        calls += [partial(one.run, None, given), partial(ours.run, None, given)]
        calls += [lambda f=given: ours.bind(f).run(), partial(quick, MODEL, given)]
    for given in providers:
        calls += [partial(f, MODEL, providers=given) for f in (TorchOnnxEvaluator, ort.session)]
        calls.append(partial(quick, MODEL, FEEDS, providers=given))
    return calls


def of_one_model() -> list[Callable[[], Any]]:
    one = TorchOnnxEvaluator(MODEL)
    options: list[dict[str, Any]] = [
        *({"module": m} for m in (lambda x, r: x[:1], lambda x, r: 1 / 0, torch.nn.Dropout())),
        *({"calibration": c} for c in (1, 14, [FEEDS] * 3, [{"X": X}] * 20)),
    ]
    return [
        *(partial(compare_runtimes, MODEL, **{"calibration": 0} | o) for o in options),
        lambda: TorchOnnxEvaluator(MODEL, custom_kernels={("", "Exp"): 3}),
        *(partial(reader, UNKNOWN) for reader in (ort.session, compare_runtimes)),
        lambda: ort.session(MODEL, session_options={"intra_op_num_threads": "two"}),
        lambda: localize(one, TorchOnnxEvaluator(models.layer_norm_matmul()), FEEDS),
        lambda: localize(one, one, FEEDS, truth=one),
    ]


def of_values() -> list[Callable[[], Any]]:
    parts, ones, half = np.ones((2, 4), "f4"), np.ones(3), np.ones((2, 4), "f2")
    used = compare.tolerance_used
    return [
        partial(compare.scaled_error, ones * math.nan, ones.astype("f4")),
        partial(compare.scaled_error, F, F),
        partial(used, F, F, -F, 0.1),
        partial(used, F, F, F * math.inf, 0.1),
        partial(compare.calibrated_tolerance, [(X, X[0])]),
        partial(r.exact_sum, [math.nan]),
        partial(r.binned, F, axis=3),
        *(partial(r.arrange, F, [order]) for order in ([0, 1, 2, 9], [0] * 4, [0, 1])),
        partial(r.arrange, F, np.array([[0, 1, 2, -1]])),
        partial(r.round_to, np.array([2**60 + 1]), "bfloat16"),
        *(partial(r.add_in_order, parts, t) for t in ((0, 1, 2), ((0, 1), 1), (0, 2))),
        partial(r.ring_sum, parts, 3),
        partial(r.order_probes, 2**12, "float16"),
        partial(r.orders_found, np.full((3, 4), np.nan, np.float32), 3, "float32"),
        partial(r.tensor_core_matmul, half, parts.T),
        partial(r.tensor_core_matmul, half, half.T, "H100", block=4),
        partial(timing.measure, {}),
        partial(timing.measure, {"a": len}, bytes={"nothing": 1}),
        *([partial(timing.measure, {"a": len}, device="cuda")] * (not HAS_GPU)),
        partial(models.layer_norm_matmul, 7),
        partial(models.Llama(models.SIZES["tiny"]), torch.tensor([[10**6]])),
    ]


def in_mode(function: Callable[..., Any], *arguments: Any) -> Any:
    with roundoff.invariant():
        return function(*arguments)


def of_tensors() -> list[Callable[[], Any]]:
    """Shapes and types that no kernel reads."""
    pytest.importorskip("triton")
    from roundoff import kernels as k

    x, w = torch.ones(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    q, mask = torch.ones(1, 2, 4, 8, device=DEVICE), torch.ones(1, 1, 4, 4, device=DEVICE)
    return [
        *(partial(k.layer_norm, x, s) for s in (4, (), (8.0,))),
        lambda: k.layer_norm(x, 8, w[:4]),
        lambda: k.layer_norm(x.int(), 8),
        lambda: k.rms_norm(x.int(), 8),
        lambda: k.matmul(x, x[:, :4]),
        lambda: k.matmul(x.int(), x.int()),
        lambda: k.attention(q.int(), q.int(), q.int()),
        lambda: k.attention(q, q, q[:, :, :2]),
        lambda: k.attention(q, q, q, mask=mask.int()),
        lambda: k.attention(q, q, q, mask=mask[..., :2] > 0),
        lambda: in_mode(torch.nn.functional.conv1d, torch.ones(1, 1, 3), torch.ones(1, 1, 2)),
    ]


def outcome(call: Callable[[], Any]) -> str:
    """ "typed", "silent" or "raw", and what is said."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except RoundoffError as error:
        return "typed" if str(error).strip() else "raw: no message"
    except Exception as error:
        return f"raw: {type(error).__name__} {error}"
    return "silent"


@pytest.mark.parametrize("right", CALLS, ids=name_of)
def test_no_mistake_is_answered(
    right: Callable[[], list[Call]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the call as it stands is: the mistake alone is why it is refused."""
    monkeypatch.chdir(tmp_path)
    calls = right()
    for function, arguments in calls:
        assert outcome(partial(function, **arguments)) == "silent", name_of(function)
    found = [f"{name}: {outcome(call)}" for name, call in mistaken(calls)]
    assert not [line for line in found if not line.endswith(": typed")]


@pytest.mark.parametrize(
    "wrong", [of_feeds_and_providers, of_one_model, of_values, of_tensors], ids=name_of
)
def test_a_wrong_call_is_a_typed_error(wrong: Callable[[], list[Callable[[], Any]]]) -> None:
    for number, call in enumerate(wrong()):
        assert outcome(call) == "typed", (number, call)
