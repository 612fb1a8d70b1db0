"""Bad input to everything public: each call is refused with a typed error that says why.

``CALLS`` has one right call of each function. Each of its arguments in turn is replaced by each odd
value that is not of the kind that the signature names: no answer without a word may come, and no
exception from deep inside. What no single odd value expresses stands below, as a call.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import os
import re
import reprlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx.parser
import pandas as pd
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import roundoff
from roundoff import (
    compare,
    describe,
    dtypes,
    environment,
    models,
    ort,
    page,
    record,
    script,
    timing,
)
from roundoff import reductions as r
from roundoff.__main__ import main as report_main
from roundoff.backend import onnx_custom_backend
from roundoff.errors import RoundoffError
from roundoff.evaluator import OrtKernel, TorchOnnxEvaluator
from roundoff.fusion import Editor, OptimizationOptions, Report, apply_rules, fuse, rules
from roundoff.graph import onnx_simple_text_plot, plot_dot
from roundoff.localization import localize
from roundoff.page.measurement import Study
from roundoff.page.values import Value
from roundoff.runtimes import compare_runtimes
from roundoff.workers import Workers

Call = tuple[Callable[..., Any], dict[str, Any]]

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
CPU = ["CPUExecutionProvider"]
X, ROWS = torch.ones(4, 3), torch.tensor([0, 3])
FEEDS = {"X": X, "rows": ROWS}
#: For files; gone when the process ends.
FOLDER = tempfile.TemporaryDirectory()
ODD = object()


class Unprintable:
    """Something that no library of numbers knows."""

    def __repr__(self) -> str:
        return "unprintable"


def no_tensors() -> list[Any]:
    """What is no tensor of one shape all of whose numbers are there."""
    x = torch.ones(4)
    with FakeTensorMode():
        fake = torch.ones(4)
    return [
        *(fake, x.to("meta"), torch.masked.masked_tensor(x, x > 0), np.ones(2, np.longdouble)),
        *(np.ma.masked_array([1.0, 2.0], [True, False]), np.ones(2, "M8[s]")),
        *(np.array([1.0, None], object), np.array(["a", "b"]), pd.DataFrame({"a": ["x"]})),
    ]


#: Of one kind or another, or of none, or past the end of what a number may be.
VALUES: list[Any] = [None, True, -1, 0, 1.5, math.nan, math.inf, "", "text", b"x", [], [None]]
VALUES += [{}, {3: 4}, 1j, ODD, Unprintable(), len]
NUMBERS = [True, -1, 0, 1.5, math.nan, math.inf, []]
#: Odd, and yet answered: by the argument's name, or the function's and the argument's.
ANSWERED: list[tuple[tuple[str, ...], list[Any]]] = [
    (("seed", "layers", "length", "room", "rows", "size", "chunk"), [0]),
    (("packed", "limit", "budget_s", "eps", "count", "first"), [0]),
    (("batch", "queries", "keys", "epsilon", "warmup", "causal"), [0]),
    (("TorchOnnxEvaluator.run_node.node", "round_up.value"), [0]),
    (("compare_runtimes.calibration",), [0]),
    (("low", "high", "pad", "abs", "rel", "ulp", "tree"), [-1, 0]),
    (("round_exact.value", "signed_errors.truth", "judge.truth"), [-1, 0, 1.5]),
    (("verbose",), [True, -1, 0]),
    (("name", "title", "text", "op_type", "domain", "page", "on"), ["text"]),
    (("folder", "commit"), ["", "text", {}]),
    (("OrtKernel.op_type", "OrtKernel.domain"), [""]),
    (("axis", "parts", "times", "Workers.environment"), [0, "", [], {}]),
    (("binned.axis",), [-1]),
    (("Workers.map.items",), [b"x", [None]]),
    (
        ("ulp.x", "round_to.x", "signed_errors.results", "binned.x", "distinct_bits.results"),
        NUMBERS,
    ),
    (("judge.results", "Calibration.add.got", "Calibration.add.expected"), NUMBERS),
    (("ulp.x",), [np.ones(2, np.longdouble)]),
    (("exact_sum.x", "condition.x"), [[]]),
    (("hist", "diff"), [b"x", {3: 4}]),
    (("layer_norm.eps", "rms_norm.eps", "programs"), [True]),
    (("attention.scale", "attend.scale"), [True, -1, 0]),
    (("shuffled_programs.seed",), [-1]),
    (("apply_rules.verbose",), [-1]),
]
#: Handed on to torch, transformers or Python as they are.
NOT_CHECKED = {
    *("with_shape", "with_min_max", "with_device", "storage"),
    *("ours", "about", "description", "second"),
    *(
        "mask",
        "attention_mask",
        "position_ids",
        "past_key_values",
        "logits_to_keep",
        "obj",
    ),
    *("parsed.argv", "parsed.size", "follow", "clock"),
    *("onnx_custom_backend.args", "onnx_custom_backend.verbose", "dump_prefix"),
    *("max_diff.expected", "max_diff.got"),
}


def small() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[n, 3] X, int64[k] rows) => '
        "(float[k, 3] Z) { Y = Exp(X)  Z = Gather(Y, rows) }"
    )


def changed(op_type: str = "Exp", domain: str = "", reads: str = "Y") -> onnx.ModelProto:
    """The model with another first operator, or another input of the second."""
    model = small()
    model.graph.node[0].op_type, model.graph.node[0].domain = op_type, domain
    model.graph.node[1].input[0] = reads
    return model


def no_models() -> list[Any]:
    """What is no model, whoever reads it."""
    folder = Path(FOLDER.name)
    (folder / "text.onnx").write_text("a picture of a cat")
    whole = models.layer_norm_matmul().SerializeToString()
    return [
        *(None, ODD, b"", "", "nothing.onnx", "a\0b", folder, folder / "text.onnx"),
        *(torch.nn.Linear(2, 2), onnx.ModelProto(), whole[:-1]),
    ]


def bad_feeds() -> list[Any]:
    """What the model of :func:`small` cannot be fed."""
    odd: list[Any] = [None, "text", X.double(), X[0], torch.ones(4, 4), ODD, X.to_sparse()]
    odd += [X.to("meta"), X.to(torch.complex64), np.ones((4, 3), np.longdouble)]
    odd += [np.array([["a"] * 3] * 4)]
    odd += [np.ma.masked_array(np.ones((4, 3), np.float32), mask=np.eye(4, 3))]
    return [
        *([X, ROWS], X, {}, {"X": X}, FEEDS | {"more": X}, FEEDS | {3: X}),
        *(FEEDS | {"X": x} for x in odd),
        *(FEEDS | {"rows": rows} for rows in (torch.tensor([9]), torch.tensor([0.0]))),
    ]


def bad_providers() -> list[Any]:
    found = ["CPUExecutionProvider", [], [None], ["NoSuchProvider"], [()]]
    found += [[("CPUExecutionProvider", None)], [("CPUExecutionProvider", {"foo": 1})]]
    return found if HAS_GPU else [*found, ["CUDAExecutionProvider"]]


def ended(function: Callable[..., Any], **options: Any) -> Any:
    """A command line: one that ends with status 2 and a message has refused."""
    with contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            return function(**options)
        except SystemExit as end:
            if end.code == 2 and "error: " in told.getvalue():
                raise RoundoffError(told.getvalue().splitlines()[-1]) from end
            raise


def within(manager: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    with manager(*arguments, **options):
        pass


def parsed(argv: Any, size: Any = (8, "how many", 1), **more: Any) -> Any:
    way = ("a", "which", ["a", "b"])
    parse = script.get_parsed_args
    return ended(parse, name="p", argv=argv, size=size, way=way, **more)


def with_variable(name: str, value: str, function: Callable[..., Any], *arguments: Any) -> Any:
    with mock.patch.dict(os.environ, {name: value}):
        return function(*arguments)


def compiled(**options: Any) -> Any:
    """What ``torch.compile`` with this backend gives; dynamo wraps a typed error, and quotes it."""
    torch._dynamo.reset()
    backend = partial(onnx_custom_backend, **options)
    try:
        with torch.no_grad():
            return torch.compile(torch.nn.Linear(3, 2).eval(), backend=backend)(torch.ones(4, 3))
    except torch._dynamo.exc.BackendCompilerFailed as error:
        inner = error.inner_exception
        if isinstance(inner, RoundoffError) and str(inner) in str(error):
            raise inner from error
        raise


# --- a right call of each function


def of_graphs() -> list[Call]:
    model, one, ours = small(), TorchOnnxEvaluator(small()), ort.session(small())
    return [
        (TorchOnnxEvaluator, {"model": model}),
        (one.run, {"names": None, "feeds": FEEDS}),
        (one.run_node, {"node": 0, "inputs": (X,)}),
        (OrtKernel, {"op_type": "Exp"}),
        (ort.session, {"model": model}),
        (ours.run, {"names": None, "feeds": FEEDS}),
        (ours.bind, {"feeds": FEEDS}),
        (ort.available, {"names": CPU}),
        (ort.from_ort, {"value": ort.to_ort(X)}),
        (ort.to_ort, {"value": X}),
        (ort.run_apart, {"model": model, "feeds": FEEDS, "variables": {}}),
        (plot_dot, {"model": model}),
        (onnx_simple_text_plot, {"model": model}),
        (describe.string_type, {"obj": X}),
        (fuse, {"model": model}),
        (OptimizationOptions, {}),
        (rules, {"tier": "default"}),
        (Editor, {"proto": model}),
        (apply_rules, {"g": Editor(model), "rules": [], "report": Report()}),
        (localize, {"first": one, "second": one, "feeds": FEEDS}),
        (compare_runtimes, {"model": model, "feeds": FEEDS, "providers": CPU, "calibration": 0}),
    ]


def of_numbers() -> list[Call]:
    four, wide = torch.ones(4), torch.ones(4, dtype=torch.float64)
    pairs, f = [(X, X)] * 20, np.ones(4, np.float32)
    parts, tree = np.ones((3, 4), np.float32), ((0, 1), 2)
    calibration = compare.Calibration()
    vectors = [r.sequential, r.pairwise, r.pairwise_numpy, r.neumaier, r.moments, r.binned]
    vectors += [r.exact_sum, r.condition]
    several = [r.gloo_sum, r.ring_sum]
    return [
        (compare.max_diff, {"expected": X, "got": X}),
        (compare.string_diff, {"diff": compare.max_diff(X, X)}),
        (compare.max_diff(1.0, 2.0).within, {"abs": 1.0}),
        (compare.scaled_error, {"truth": wide, "got": four}),
        (compare.tolerance, {"dtype": "float32", "terms": 3}),
        (compare.tolerance_used, {"a": four, "b": four, "size": four, "tol": 0.1}),
        (compare.round_up, {"value": 1.0}),
        (compare.ulp_distance, {"a": four, "b": four}),
        (compare.digest, {"tensor": X}),
        (compare.calibrated_tolerance, {"pairs": pairs}),
        (compare.calibrated_tolerance(pairs).allows, {"got": X, "expected": X}),
        (calibration.add, {"got": X, "expected": X}),
        (dtypes.ulp, {"x": f, "dtype": "float32"}),
        (dtypes.dtype_info, {"dtype": "float32"}),
        (dtypes.onnx_dtype_name, {"itype": 1}),
        (dtypes.onnx_dtype_to_np_dtype, {"itype": 1}),
        (dtypes.onnx_dtype_to_torch_dtype, {"itype": 1}),
        *((function, {"x": f}) for function in vectors),
        *((function, {"parts": parts}) for function in several),
        (r.mean, {"x": f, "dtype": "float32"}),
        (r.round_exact, {"value": Fraction(1, 3), "dtype": "float32"}),
        (r.round_to, {"x": f, "dtype": "float16"}),
        (r.signed_errors, {"results": f, "truth": Fraction(1)}),
        (r.distinct_bits, {"results": f}),
        (r.judge, {"results": f, "truth": Fraction(1), "dtype": "float32"}),
        (r.draw_values, {"name": "normal"}),
        (r.draw_orders, {"size": 4}),
        (r.arrange, {"x": f, "drawn": np.array([[0, 1, 3, 2]])}),
        (r.add_in_order, {"parts": parts, "tree": tree}),
        (r.order_text, {"tree": tree}),
        (r.order_probes, {"ranks": 3, "dtype": "float32"}),
        (
            r.orders_found,
            {
                "sums": r.sequential(r.order_probes(3, "float32"))[:, None],
                "ranks": 3,
                "dtype": "float32",
            },
        ),
        (r.gloo_order, {"chunk": 0, "ranks": 3}),
        (r.gloo_bounds, {"size": 8, "ranks": 3, "itemsize": 4}),
        (r.tensor_core_matmul, {"a": np.ones((2, 3), "f2"), "b": np.ones((3, 2), "f2")}),
    ]


def of_times() -> list[Call]:
    work = {"sum": lambda: sum(range(10)), "max": lambda: max(range(10))}
    quick: dict[str, Any] = {"budget_s": 0.001, "min_rounds": 1, "max_rounds": 2, "warmup": 1}
    made = timing.measure(work, **quick)
    return [
        (timing.measure, {"callables": work} | quick),
        (made.ratio, {"a": "sum", "b": "max"}),
        (made.ratios, {"to": "sum"}),
        (timing.pool, {"sessions": [made]}),
        (timing.copies, {"nbytes": 8}),
        (timing.free_memory, {}),
        (timing.last_level_cache, {}),
        (partial(within, timing.torch_precision), {"tf32": True}),
        (partial(within, timing.compile_cache), {"name": "a"}),
    ]


def of_kernels() -> list[Call]:
    pytest.importorskip("triton")
    from roundoff import kernels as k
    from roundoff.kernels import binned, invariant_attention, invariant_matmul

    x, w = torch.ones(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    q, device = torch.ones(1, 2, 4, 8, device=DEVICE), torch.device(DEVICE)
    seen = invariant_attention.seen_by_position(1, 4, 4, device)
    ones = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=DEVICE)
    sizes = {"batch": 1, "queries": 2, "keys": 3}
    return [
        (k.layer_norm, {"x": x, "normalized_shape": 8, "weight": w, "bias": w}),
        (k.rms_norm, {"x": x, "normalized_shape": 8, "weight": w}),
        (binned.sum_binned, {"x": w}),
        (k.matmul, {"x": x, "weight": torch.ones(3, 8, device=DEVICE)}),
        (k.attention, {"q": q, "k": q, "v": q}),
        (k.invariant, {}),
        (invariant_matmul.batched, {"x": q[0], "weight": q[0]}),
        (invariant_attention.seen_by_position, sizes | {"device": device}),
        (invariant_attention.seen_by_mask, {"mask": ones, "batch": 1, "queries": 4, "keys": 4}),
        (invariant_attention.attend, {"q": q, "k": q, "v": q, "seen": seen}),
        *([(partial(within, k.shuffled_programs), {"seed": 0})] * k.interpreting()),
    ]


def of_models() -> list[Call]:
    m, size = models, models.SIZES["tiny"]
    batches = {"requests": 3, "prompts": 2, "most": 2}
    return [
        (m.layer_norm_matmul, {"itype": 1}),
        (m.residual_rms_norm, {"itype": 1}),
        (m.layer_norm_feeds, {"rows": 2, "width": 4}),
        (m.prompts, {"count": 3}),
        (m.padded, {"prompts": [[1, 2]], "pad": 0}),
        (lambda **o: list(m.server_batches(**batches | o)), batches),
        (m.random_tokens, {"size": size, "with_mask": True, "device": "cpu"}),
        (m.Llama, {"size": size}),
        (m.Llama(size), {"ids": torch.tensor([[1, 2]])}),
        (m.GraphStep, {"model": torch.nn.Linear(2, 2)}),
    ]


def of_trained_models() -> list[Call]:
    pytest.importorskip("gguf")
    loaded = models.load_trained(layers=1)
    model = loaded.model()
    return [
        (loaded.model, {}),
        (loaded.rounded, {"dtype": torch.float16}),
        (loaded.prompt, {"text": "a"}),
        (models.load_trained, {"layers": 1}),
        (models.load_decoder, {"layers": 1}),
        (models.Float64Llama, {"trained": loaded}),
        (models.Float64Llama(loaded), {"input_ids": torch.tensor([[1]])}),
        (models.decode, {"model": model, "prompts": [[1, 2]], "tokens": 1}),
    ]


def of_pages() -> list[Call]:
    folder, frame = Path(FOLDER.name), pd.DataFrame({"n": [1], "t": [2.5], "who": ["cpu"]})
    env, tables = environment.environment("4f2a1c"), {"t": frame}
    study = Study("plot_x", on="m")
    study.value("a", "b", "t", "n", test=lambda v: True)
    value = {"name": "a", "about": "b", "of": "t", "statistic": "n", "test": lambda v: True}
    made = record.write_record(folder, "p", tables, env)
    return [
        (script.get_parsed_args, {"name": "p", "argv": [], "size": (8, "how many", 1)}),
        (parsed, {"argv": [], "size": (8, "how many", 1)}),
        (environment.environment, {}),
        (environment.summary, {"env": env}),
        (environment.short_name, {"env": env}),
        (environment.machine_name, {"env": env}),
        (environment.short_commit, {"commit": "4f2a1c"}),
        (record.read_record, {"path": made}),
        (record.read_records, {"page": "p", "folder": folder}),
        (
            record.write_record,
            {"folder": folder, "page": "p", "tables": tables, "environment": env},
        ),
        (record.write_values, {"path": made, "values": {}}),
        (record.row_parts, {"frame": frame, "part": "cpu"}),
        (page.choose, {"frame": frame, "where": {}}),
        (Study, {"page": "p", "on": "m"}),
        (study.evaluate, {"record": record.read_record(made)}),
        (lambda **o: Value(**value | o).judge([tables]), value),
        (study.values[0].judge, {"runs": [tables]}),
    ]


def of_workers() -> list[Call]:
    workers = Workers(2)
    return [
        (Workers, {"count": 2}),
        (workers.map, {"function": within, "items": [1, 2, 3]}),
    ]


def of_the_backend() -> list[Call]:
    relu = torch.fx.symbolic_trace(torch.nn.ReLU())
    return [(onnx_custom_backend, {"graph_module": relu, "args": [X]}), (compiled, {})]


CALLS = {
    "graphs": of_graphs,
    "numbers": of_numbers,
    "times": of_times,
    "kernels": of_kernels,
    "models": of_models,
    "trained models": of_trained_models,
    "pages": of_pages,
    "workers": of_workers,
    "the backend": of_the_backend,
}


def name_of(function: Any) -> str:
    inner = function.args[0] if isinstance(function, partial) else function
    return getattr(inner, "__qualname__", type(inner).__name__)


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    inner = function.args[0] if isinstance(function, partial) else function
    if isinstance(inner, torch.nn.Module):
        inner = inner.forward
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(inner).parameters
    return {name: p for name, p in found.items() if p.kind not in kinds}


def words(parameter: inspect.Parameter) -> set[str]:
    return set(re.findall(r"\w+", str(parameter.annotation)))


def is_of(value: Any, parameter: inspect.Parameter) -> bool:
    """Whether a value is of the kind that a signature names."""
    kinds = words(parameter)
    if value is None:
        return "None" in kinds or parameter.default is None
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, float):
        return "float" in kinds and value > 0
    if isinstance(value, (str, list, dict)) and not value:
        return bool(kinds & {"Mapping", "Sequence", "Iterable", "dict", "list", "tuple"})
    return value is len and "Callable" in kinds


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and repr(one) == repr(other)


def replaced(group: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each right call with each of its arguments replaced by each odd value."""
    for function, arguments in CALLS[group]():
        for name, parameter in parameters(function).items():
            key = f"{name_of(function)}.{name}"
            if name in NOT_CHECKED or key in NOT_CHECKED:
                continue
            answered = [v for keys, found in ANSWERED if {name, key} & set(keys) for v in found]
            takes_tensors = words(parameter) & {"Tensor", "Array", "ArrayLike", "NDArray", "Any"}
            more = no_tensors() if takes_tensors and "Mapping" not in words(parameter) else []
            for value in VALUES + more:
                if is_of(value, parameter) or any(same(value, known) for known in answered):
                    continue
                shown = " ".join(repr(value).split())[:60]
                yield f"{key} = {shown}", partial(function, **arguments | {name: value})


def outcome(call: Callable[[], Any]) -> str:
    """ "typed", "silent" or "raw", and what is said."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except RoundoffError as error:
        return "typed" if str(error).strip() else "raw: no message"
    except (Exception, SystemExit) as error:
        return f"raw: {type(error).__name__} {error}"
    return "silent"


# --- what no single odd value expresses


def of_models_and_feeds() -> list[Callable[[], Any]]:
    """Each reader of a model, of feeds and of providers with each of what it cannot read."""
    model, one, ours = small(), TorchOnnxEvaluator(small()), ort.session(small())
    quick = partial(compare_runtimes, calibration=0)
    readers: list[Callable[[Any], Any]] = [TorchOnnxEvaluator, ort.session, plot_dot, fuse, Editor]
    readers += [onnx_simple_text_plot, quick, lambda m: ort.run_apart(m, FEEDS, {})]
    fed: list[Callable[[Any], Any]] = [
        *(partial(one.run, None), partial(ours.run, None)),
        *(
            lambda feeds: list(one.steps(feeds)),
            lambda feeds: ours.bind(feeds).run(),
        ),
        *(lambda feeds: quick(model, feeds), lambda feeds: localize(one, one, feeds)),
    ]
    provided: list[Callable[[Any], Any]] = [
        *(lambda p: TorchOnnxEvaluator(model, p), lambda p: ort.session(model, p)),
        lambda p: quick(model, FEEDS, providers=p),
    ]
    # Not all readers of a model run it.
    broken = [changed("Twirl"), changed(""), changed(domain="my.own"), changed(reads="nothing")]
    pairs = [(function, m) for function in (readers[0], readers[1], quick) for m in broken]
    pairs += [(function, m) for function in readers for m in no_models()]
    pairs += [(function, feeds) for function in fed for feeds in bad_feeds()]
    pairs += [(function, p) for function in provided for p in bad_providers()]
    return [partial(function, value) for function, value in pairs]


def of_one_model() -> list[Callable[[], Any]]:
    model, one = small(), TorchOnnxEvaluator(small())
    cyclic = changed()
    cyclic.graph.node[0].input[0] = "Z"
    other = TorchOnnxEvaluator(models.layer_norm_matmul())
    options: list[dict[str, Any]] = [
        *({"sizes": {"depth": 3}}, {"sizes": {"n": 10**14}}),
        *({"sizes": {"n": n}} for n in (-1, 1.5, None, "3", True)),
        *({"module": m} for m in (lambda x, r: x[:1], lambda x, r: 1 / 0, torch.nn.Dropout())),
        *({"calibration": c} for c in (1, 15, 30.0, [FEEDS] * 3, [{"X": X}] * 20)),
        {"seed": 2**70},
    ]
    return [
        lambda: plot_dot(cyclic),
        *(partial(compare_runtimes, model, **{"calibration": 0} | o) for o in options),
        lambda: TorchOnnxEvaluator(model, custom_kernels={("", "Exp"): 3}),
        lambda: ort.session(model, threads=10**12),
        lambda: ort.session(model, session_options={"intra_op_num_threads": "two"}),
        lambda: ort.run_apart(model, FEEDS, {"A": "\0"}),
        lambda: localize(one, other, FEEDS),
        lambda: localize(one, one, FEEDS, truth=one),
    ]


def of_values() -> list[Callable[[], Any]]:
    f, parts, ones = np.ones(4, np.float32), np.ones((2, 4), np.float32), np.ones(3)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    used, bound, error = compare.tolerance_used, compare.tolerance, compare.scaled_error
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = ()
    order: Any = 0
    for rank in range(1, 5000):
        deep, order = [deep], (order, rank)
    return [
        *(partial(compare.max_diff, v, 1) for v in (ODD, [Unprintable()], len, nested)),
        *(partial(compare.max_diff, v, X) for v in no_tensors()[:4]),
        *(partial(compare.max_diff, tree, tree) for tree in (endless, deep)),
        *(partial(error, tree, tree) for tree in (endless, deep, [], f)),
        *(partial(compare.max_diff, 1, 2, hist) for hist in ("x", [math.nan], [[1]])),
        lambda: error(ones * math.nan, ones.astype("f4")),
        lambda: bound("float32", 3, rounding="truncation", confidence=0.9),
        lambda: bound("float32", 3, confidence=1),
        lambda: bound("float32", 2**25, confidence=0.9),
        lambda: used(f, f, -f, 0.1),
        lambda: used(f, f, f * math.inf, 0.1),
        lambda: compare.calibrated_tolerance([(X, X[0])]),
        lambda: dtypes.ulp([[1], [1, 2]], "float32"),
        *(partial(r.exact_sum, v) for v in ([math.nan], [math.inf, 1.0])),
        *(partial(r.binned, f, axis=a) for a in (3, -2, (0, 0))),
        *(partial(r.arrange, f, [order]) for order in ([0, 1, 2, 9], [0] * 4, [0, 1])),
        lambda: r.arrange(f, np.array([[0, 1, 2, -1]])),
        lambda: r.round_to(np.array([2**60 + 1]), "bfloat16"),
        *(partial(r.add_in_order, parts, t) for t in ((0, 1, 2), ((0, 1), 1), (0, 2))),
        lambda: r.order_text(order),
        lambda: r.ring_sum(parts, 3),
        lambda: r.order_probes(2**12, "float16"),
        lambda: r.orders_found(np.full((3, 4), np.nan, np.float32), 3, "float32"),
        lambda: r.tensor_core_matmul(parts.astype("f2"), parts.T.astype("f4")),
        lambda: r.tensor_core_matmul(parts.astype("f2"), parts.T.astype("f2"), "H100", block=4),
        lambda: timing.measure({}),
        lambda: timing.measure({"a": lambda: 1}, bytes={"nothing": 1}),
        *([lambda: timing.measure({"a": lambda: 1}, device="cuda")] * (not HAS_GPU)),
    ]


def of_tensors() -> list[Callable[[], Any]]:
    """Shapes, types and layouts that no kernel reads."""
    pytest.importorskip("triton")
    from roundoff import kernels as k
    from roundoff.kernels import binned, invariant_attention

    x, w = torch.ones(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    q, mask = torch.ones(1, 2, 4, 8, device=DEVICE), torch.ones(1, 1, 4, 4, device=DEVICE)

    def odd(t: torch.Tensor) -> list[torch.Tensor]:
        quantized = torch.quantize_per_tensor(t.cpu(), 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([t, t])
        return [t.to("meta"), t.to_sparse(), quantized, nested, t.int(), t.to(torch.complex64)]

    takes: list[tuple[Callable[[Any], Any], torch.Tensor]] = [
        *((lambda t: k.layer_norm(t, 8), x), (lambda t: k.layer_norm(x, 8, t), w)),
        (lambda t: k.rms_norm(t, 8), x),
        *((lambda t: k.matmul(t, x), x), (lambda t: k.matmul(x, t), x)),
        *((lambda t: k.attention(t, q, q), q), (lambda t: k.attention(q, q, t), q)),
        (binned.sum_binned, w),
    ]
    return [
        *(partial(take, t) for take, right in takes for t in odd(right)),
        *(partial(k.layer_norm, x, s) for s in (4, (), (8.0,))),
        lambda: k.layer_norm(x, 8, programs=2**40),
        lambda: k.attention(q, q, q, mask=mask.int()),
        lambda: k.attention(q, q, q, mask=mask[..., :2] > 0),
        lambda: invariant_attention.attend(
            q, q, q, invariant_attention.seen_by_position(1, 3, 4, q.device)
        ),
        lambda: in_mode(torch.nn.functional.conv1d, torch.ones(1, 1, 3), torch.ones(1, 1, 2)),
    ]


def in_mode(function: Callable[..., Any], *arguments: Any) -> Any:
    with roundoff.invariant():
        return function(*arguments)


def of_models_and_texts() -> list[Callable[[], Any]]:
    m, size = models, models.SIZES["tiny"]
    llama = m.Llama(size)
    return [
        lambda: m.layer_norm_matmul(7),
        lambda: m.padded([[]], 0),
        lambda: m.Llama(m.Size(10, 3, 4, 8, 1, 2)),
        *(partial(llama, tokens) for tokens in (torch.tensor([1]), torch.tensor([[10**6]]))),
    ]


def of_pages_and_records() -> list[Callable[[], Any]]:
    folder, frame = Path(FOLDER.name), pd.DataFrame({"n": [1], "t": [2.5]})
    env, write = environment.environment("4f2a1c"), record.write_record
    write(folder, "q", {"t": frame}, env)
    (folder / "list.json").write_text("[]")
    value = {"name": "a", "about": "b", "of": "t", "statistic": "n", "test": lambda v: True}
    changes: list[dict[str, Any]] = [
        *({"statistic": s} for s in ("nothing", lambda rows: "x", lambda rows: [1, 2])),
        *({"where": {"nothing": 1}}, {"interval": ("low", "high")}, {"test": lambda v: "yes"}),
        {"words": ("a", "b"), "test": None},
    ]
    command = partial(Study("plot_x", on="m").main)
    written = partial(write, folder, "q", {"t": frame}, env)
    return [
        lambda: record.read_record(folder / "list.json"),
        lambda: write("/proc/nothing", "q", {"t": frame}, env),
        lambda: written(parts={"t": "nothing"}),
        lambda: written(times={"t": []}),
        lambda: write(folder, "never", {"t": frame}, env, second=True),
        lambda: page.choose(frame, {"nothing": 1}),
        *(partial(Value(**value | c).judge, [{"t": frame}]) for c in changes[:5]),
        lambda: Value(**value | changes[-1]).judge([{"t": frame}]),
        *(partial(ended, command, argv=a) for a in (["--only", "no"], ["--no"], [3])),
        *(partial(parsed, [], size) for size in ((8, "a", "b"), (8, 3))),
        lambda: with_variable("UNITTEST_GOING", "maybe", script.unit_test_going),
        *(partial(ended, report_main, arguments=a) for a in (["compare"], [3])),
    ]


def of_processes() -> list[Callable[[], Any]]:
    workers = Workers(2)
    return [
        lambda: Workers(2, environment={"A": 3}),  # type: ignore[dict-item]
        lambda: workers.map(len, [1]),
    ]


OTHERS = {
    "models and feeds": of_models_and_feeds,
    "one model": of_one_model,
    "values": of_values,
    "tensors": of_tensors,
    "models and texts": of_models_and_texts,
    "pages and records": of_pages_and_records,
    "processes": of_processes,
}


def others(group: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    for call in OTHERS[group]():
        if isinstance(call, partial):
            yield (
                f"{name_of(call.func)} {reprlib.repr(call.args)} {reprlib.repr(call.keywords)}",
                call,
            )
        else:
            yield f"line {call.__code__.co_firstlineno}", call


def wrong_of(calls: Iterator[tuple[str, Callable[[], Any]]]) -> list[str]:
    found = ((name, outcome(call)) for name, call in calls)
    return [f"{name}: {said}" for name, said in found if said != "typed"]


@pytest.mark.parametrize("group", CALLS)
def test_no_odd_value_is_answered(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = wrong_of(replaced(group))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("group", OTHERS)
def test_bad_input_is_a_typed_error(group: str) -> None:
    wrong = wrong_of(others(group))
    assert not wrong, "\n".join(wrong)


def test_the_right_calls_are_right() -> None:
    """As they stand each is answered: an odd value alone is why one is refused."""
    for group in ("graphs", "numbers", "kernels", "models", "pages"):
        for function, arguments in CALLS[group]():
            said = outcome(partial(function, **arguments))
            assert said == "silent" or function is models.GraphStep, f"{name_of(function)}: {said}"


def test_a_session_and_an_evaluator_take_the_same_arguments() -> None:
    for way in (ort.session(small()), TorchOnnxEvaluator(small())):
        for results in (way.run(FEEDS), way.run(None, FEEDS), way.run(["Z"], FEEDS)):
            torch.testing.assert_close(results, [X.exp()[ROWS]])
