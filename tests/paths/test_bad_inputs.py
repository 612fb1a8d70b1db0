"""Bad input to everything public but the comparisons, which have a table of their own.

Each case is a call that has no right answer. It must be refused with a typed error, which says what
was got, what was expected and, where there is one, what to try: no answer without a word, and no
exception from deep inside. ``python tests/paths/test_bad_inputs.py`` prints what each case gives;
a name of a group after it prints that group alone.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import sys
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx.parser
import pandas as pd
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from cases import Case, Unprintable, no_tensors, raised  # isort: skip

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
    reductions,
    script,
    timing,
)
from roundoff.__main__ import main as report_main
from roundoff.backend import onnx_custom_backend
from roundoff.errors import RoundoffError
from roundoff.evaluator import (
    LayerNormalizationOrt,
    MatMulOrt,
    OrtKernel,
    ReferenceKernel,
    TorchOnnxEvaluator,
)
from roundoff.fusion import Editor, OptimizationOptions, Report, apply_rules, fuse, rules
from roundoff.graph import onnx_simple_text_plot, plot_dot
from roundoff.ort import run_apart, session
from roundoff.page.measurement import Study
from roundoff.page.values import Value
from roundoff.script import get_parsed_args, usage_error
from roundoff.timing import measure
from roundoff.workers import Workers

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
CUDA = "CUDAExecutionProvider"
ODD = object()
X = torch.ones(4, 3)
ROWS = torch.tensor([0, 3])
FEEDS = {"X": X, "rows": ROWS}
#: For files that are no models; gone when the process ends.
FOLDER = tempfile.TemporaryDirectory()


def small() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[n, 3] X, int64[k] rows) => '
        "(float[k, 3] Z) { Y = Exp(X)  Z = Gather(Y, rows) }"
    )


def changed(**fields: str) -> onnx.ModelProto:
    """The model with the operator, or the second input, of its first or last node changed."""
    model = small()
    if "op_type" in fields:
        model.graph.node[0].op_type = fields["op_type"]
    if "domain" in fields:
        model.graph.node[0].domain = fields["domain"]
    if "reads" in fields:
        model.graph.node[1].input[0] = fields["reads"]
    return model


def no_models() -> list[Any]:
    """What is no model, whoever reads it."""
    folder = Path(FOLDER.name)
    (folder / "text.onnx").write_text("a picture of a cat")
    (folder / "empty.onnx").write_bytes(b"")
    return [
        None,
        3,
        [],
        ODD,
        b"",
        b"xxxx",
        "",
        "nothing.onnx",
        "a\0b",
        folder,
        folder / "text.onnx",
        folder / "empty.onnx",
        np.ones(3),
        torch.nn.Linear(2, 2),
        onnx.ModelProto(),
        onnx.TensorProto(),
    ]


def bad_feeds() -> list[Any]:
    """What the model of :func:`small` cannot be fed."""
    return [
        None,
        [X, ROWS],
        (X, ROWS),
        X,
        3,
        "X",
        {},
        {"X": X},
        FEEDS | {"more": X},
        FEEDS | {3: X},
        FEEDS | {"X": None},
        FEEDS | {"X": "text"},
        FEEDS | {"X": X.double()},
        FEEDS | {"X": X.int()},
        FEEDS | {"X": X[0]},
        FEEDS | {"X": torch.ones(4, 4)},
        FEEDS | {"X": [[1.0]]},
        FEEDS | {"X": {}},
        FEEDS | {"X": ODD},
        FEEDS | {"X": Unprintable()},
        FEEDS | {"X": X.to_sparse()},
        FEEDS | {"X": torch.ones(4, 3, device="meta")},
        FEEDS | {"X": X.to(torch.complex64)},
        FEEDS | {"X": np.ones((4, 3))},
        FEEDS | {"X": np.ones((4, 3), complex)},
        FEEDS | {"X": np.ones((4, 3), np.longdouble)},
        FEEDS | {"X": np.array([["a"] * 3] * 4)},
        FEEDS | {"X": np.ma.masked_array(np.ones((4, 3), np.float32), mask=np.eye(4, 3))},
        FEEDS | {"rows": torch.tensor([9])},
        FEEDS | {"rows": torch.tensor([0.0])},
        FEEDS | {"rows": torch.tensor(0)},
        FEEDS | {"rows": torch.tensor([0], dtype=torch.int32)},
    ]


def evaluators() -> list[Case]:
    one, model = TorchOnnxEvaluator(small()), small()
    made = TorchOnnxEvaluator
    custom = [3, [], {"Exp": len}, {("", "Exp"): 3}, {("Exp",): len}, {3: len}]
    custom += [{("", "Exp"): LayerNormalizationOrt}, {("", "Exp"): MatMulOrt}]
    kernels = ["", "cuda", ["torch", "tensorrt"], [], 3, {"Exp": ["torch"]}, {("", "Exp"): ["no"]}]
    providers = ["CPUExecutionProvider", [], None, 3, [None], [3], ["NoSuchProvider"], [()]]
    providers += [[("CPUExecutionProvider", None)], [("CPUExecutionProvider", {"foo": 1})]]
    if not HAS_GPU:
        providers += [[CUDA], [(CUDA, {"device_id": 7})]]
    return [
        *(Case(made, (m,)) for m in no_models()),
        Case(made, (changed(op_type="Twirl"),)),
        Case(made, (changed(op_type=""),)),
        Case(made, (changed(domain="my.own"),)),
        Case(made, (changed(reads="nothing"),)),
        *(Case(made, (model,), {"custom_kernels": c}) for c in custom),
        *(Case(made, (model,), {"kernels": k}) for k in kernels),
        *(Case(made, (model,), {"providers": p}) for p in providers),
        Case(made, (model,), {"truth": "yes"}),
        Case(made, (model,), {"truth": None}),
        *(Case(one.run, (None, feeds)) for feeds in bad_feeds()),
        Case(one.run, ("nothing", FEEDS)),
        Case(one.run, (["Z", "nothing"], FEEDS)),
        Case(one.run, (3, FEEDS)),
        Case(one.run, ([3], FEEDS)),
        Case(one.run, ([["Z"]], FEEDS)),
        Case(one.run, ({"Z"}, FEEDS)),
        Case(one.run, (FEEDS, FEEDS)),
        Case(one.run),
        Case(lambda feeds: list(one.steps(feeds)), ([X],)),
        Case(lambda feeds: list(one.steps(feeds)), (FEEDS | {"X": X.double()},)),
        Case(one.run_node, (99, (X,))),
        Case(one.run_node, (-1, (X,))),
        Case(one.run_node, ("nothing", (X,))),
        Case(one.run_node, (None, (X,))),
        Case(one.run_node, (0, ())),
        Case(one.run_node, (0, X)),
        Case(one.run_node, (0, None)),
        Case(one.run_node, (0, (None,))),
        Case(one.run_node, (0, ("text",))),
        Case(one.run_node, (0, (X.to(torch.int64),))),
        Case(OrtKernel, (3,)),
        Case(OrtKernel, ("Exp", 3)),
    ]


def sessions() -> list[Case]:
    model, ours = small(), session(small())
    bound = ours.bind
    providers = ["CPUExecutionProvider", [], None, 3, [None], [3], ["NoSuchProvider"], [()]]
    providers += [[("CPUExecutionProvider", None)], [("CPUExecutionProvider", {"foo": 1})]]
    if not HAS_GPU:
        providers += [[CUDA], [(CUDA, {"device_id": 7})]]
    switches = [{"foo": True}, {"enable_cuda_graph": True}, [], 3, {3: 4}]
    return [
        *(Case(session, (m,)) for m in no_models()),
        Case(session, (changed(op_type="Twirl"),)),
        Case(session, (changed(reads="nothing"),)),
        *(Case(session, (model,), {"providers": p}) for p in providers),
        *(Case(session, (model,), {"provider_options": s}) for s in switches),
        Case(session, (model,), {"tf32": "yes"}),
        Case(session, (model,), {"tf32": 2}),
        Case(session, (model,), {"threads": 0}),
        Case(session, (model,), {"threads": 1.5}),
        Case(session, (model,), {"threads": "2"}),
        Case(session, (model,), {"threads": True}),
        Case(session, (model,), {"threads": 10**12}),
        Case(session, (model,), {"optimization": "best"}),
        Case(session, (model,), {"optimization": None}),
        Case(session, (model,), {"optimization": ["all"]}),
        Case(session, (model,), {"session_options": {"no_such": 1}}),
        Case(session, (model,), {"session_options": {"intra_op_num_threads": "two"}}),
        Case(session, (model,), {"session_options": {3: 1}}),
        Case(session, (model,), {"session_options": 3}),
        Case(session, (model,), {"session_options": ["a"]}),
        *(Case(ours.run, (feeds,)) for feeds in bad_feeds()),
        *(Case(ours.run, (None, feeds)) for feeds in bad_feeds()[:3]),
        Case(ours.run, (["nothing"], FEEDS)),
        Case(ours.run, ([["Z"]], FEEDS)),
        Case(session, (model,), {"session_options": {"a.b": ODD}}),
        Case(run_apart, (model, FEEDS, {"A": "\0"})),
        Case(ours.run, (3, FEEDS)),
        Case(ours.run, (FEEDS, FEEDS)),
        Case(ours.run),
        Case(bound, (None,)),
        Case(bound, ([X],)),
        Case(bound, (FEEDS, {"nothing": X})),
        Case(bound, (FEEDS, {"Z": None})),
        Case(bound, (FEEDS, {"Z": 3})),
        Case(bound, (FEEDS, [X])),
        Case(bound, (FEEDS, {"Z": torch.ones(2, 3).T})),
        Case(lambda z: bound(FEEDS, {"Z": z}).run(), (torch.ones(2, 2),)),
        Case(lambda z: bound(FEEDS, {"Z": z}).run(), (torch.ones(2, 3).double(),)),
        Case(lambda: session(strings()).bind({"X": np.array(["a"])})),
        Case(lambda: session(strings()).run({"X": torch.ones(1)})),
        Case(lambda: session(strings()).run({"X": np.ones(1)})),
        Case(ort.available, (3,)),
        Case(ort.available, ("CPUExecutionProvider",)),
        Case(ort.available, (None,)),
        Case(ort.available, ([3],)),
        Case(run_apart, (None, {}, {})),
        Case(run_apart, (b"xxxx", {}, {})),
        Case(run_apart, (model, None, {})),
        Case(run_apart, (model, {"X": 3}, {})),
        Case(run_apart, (model, FEEDS, None)),
        Case(run_apart, (model, FEEDS, {"A": 3})),
        Case(run_apart, (model, FEEDS, {}, "CPUExecutionProvider")),
        Case(run_apart, (model, FEEDS, {}, [])),
    ]


def strings() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (string[1] X) => (string[1] Z) '
        "{ Z = Identity(X) }"
    )


def cyclic() -> onnx.ModelProto:
    model = small()
    model.graph.node[0].input[0] = "Z"
    return model


def graphs() -> list[Case]:
    model = small()
    node = model.graph.node[0]
    numbers = [3, ["Y"], {"nothing": 1}, {"Y": None}, {"Y": []}, {"Y": ODD}, {"Y": 1j}, {3: 1}]
    colors = [3, {"Y": "red"}, {"Y": 3}, {"Y": None}, {"Y": "#12345"}, {"Y": "#gggggg"}]
    colors += [{"nothing": "#000000"}, {"Y": "#-1-1-1"}, {"Y": '"><script>'}]
    return [
        *(Case(plot_dot, (m,)) for m in no_models()),
        Case(plot_dot, (node,)),
        Case(plot_dot, (cyclic(),)),
        *(Case(plot_dot, (model,), {"numbers": n}) for n in numbers),
        *(Case(plot_dot, (model,), {"colors": c}) for c in colors),
        Case(plot_dot, (model,), {"title": 3}),
        Case(plot_dot, (model,), {"title": b"x"}),
        *(Case(onnx_simple_text_plot, (m,)) for m in no_models()),
        Case(onnx_simple_text_plot, (model,), {"max_indent": None}),
        Case(onnx_simple_text_plot, (model,), {"max_indent": "3"}),
        Case(onnx_simple_text_plot, (model,), {"max_indent": -1}),
        Case(onnx_simple_text_plot, (model,), {"max_indent": 1.5}),
        Case(describe.string_type, (X,), {"limit": None}),
        Case(describe.string_type, ([X],), {"limit": "3"}),
        Case(describe.string_type, ([X],), {"limit": -1}),
    ]


def fusions() -> list[Case]:
    model, editor = small(), Editor(small())
    options = OptimizationOptions
    return [
        *(Case(fuse, (m,)) for m in no_models()),
        Case(fuse, (changed(reads="nothing"),)),
        Case(fuse, (model, "fast")),
        Case(fuse, (model, "onnxruntime")),
        Case(fuse, (model, "default+default")),
        Case(fuse, (model, 3)),
        Case(fuse, (model, ["default"])),
        Case(fuse, (model, "")),
        Case(fuse, (model,), {"static": "X"}),
        Case(fuse, (model,), {"static": ["nothing"]}),
        Case(fuse, (model,), {"static": 3}),
        Case(fuse, (model,), {"static": None}),
        Case(fuse, (model,), {"static": [3]}),
        Case(fuse, (model,), {"tf32": "yes"}),
        Case(fuse, (model,), {"replaced": "yes"}),
        Case(options, (3,)),
        Case(options, (True,)),
        Case(options, ("Default",)),
        Case(options, (["default"],)),
        Case(options, (b"default",)),
        Case(options, (), {"processor": "GPU"}),
        Case(options, (), {"processor": 3}),
        Case(options, (), {"packed": -1}),
        Case(options, (), {"packed": math.nan}),
        Case(options, (), {"packed": None}),
        Case(options, (), {"packed": "1"}),
        Case(options, (), {"leave": "FoldConstants"}),
        Case(fuse, (model, options(leave=("NoSuchRule",)))),
        Case(options, (), {"leave": 3}),
        Case(options, (), {"leave": None}),
        Case(options, (), {"constant_folding": "no"}),
        Case(options, (), {"interpret": "no"}),
        Case(options, (), {"verbose": "loud"}),
        Case(rules, ("fast",)),
        Case(rules, (None,)),
        Case(rules, (3,)),
        Case(rules, ("default+onnxruntime",)),
        *(Case(Editor, (m,)) for m in no_models()[:6]),
        Case(Editor, (model, "GPU")),
        Case(Editor, (model, "CPU", "X")),
        Case(Editor, (model, "CPU", 3)),
        Case(Editor, (model,), {"packed": -1}),
        Case(apply_rules, (None, [], Report())),
        Case(apply_rules, (model, [], Report())),
        Case(apply_rules, (editor, None, Report())),
        Case(apply_rules, (editor, ["FoldConstants"], Report())),
        Case(apply_rules, (editor, [3], Report())),
        Case(apply_rules, (editor, [], None)),
    ]


def timed() -> list[Case]:
    work = {"sum": lambda: sum(range(10)), "max": lambda: max(range(10))}
    quick: dict[str, Any] = {"budget_s": 0.001, "min_rounds": 1, "max_rounds": 2, "warmup": 1}
    made = measure(work, **quick)
    options: list[dict[str, Any]] = [
        *({"budget_s": v} for v in (-1, math.nan, None, "1", True)),
        *({"precision": v} for v in (0, -1, math.nan, None, "x")),
        *({"min_rounds": v} for v in (0, 1.5, None, "2", True, 10**9)),
        *({"max_rounds": v} for v in (0, 1.5, None, "2", math.nan)),
        *({"warmup": v} for v in (-1, 1.5, None, "2")),
        *({"seed": v} for v in (-1, 1.5, None, "0")),
        *({"device": v} for v in ("gpu", "", None, 3, "meta", "cuda:99", "mps")),
        *({"rotate": v} for v in (0, -1, 1.5, "2")),
        *({"bytes": v} for v in (3, ["sum"], {"nothing": 1}, {"sum": -1}, {"sum": "1"})),
        {"clock": None},
        {"bytes": {"sum": -(10**400)}},
        {"clock": 3},
        {"cuda_graph": "yes"},
    ]
    if not HAS_GPU:
        options += [{"device": "cuda"}, {"cuda_graph": True}]
    return [
        *(Case(measure, (c,), quick) for c in (None, {}, [], 3, [len], {"a": 3}, {"a": None})),
        Case(measure, (lambda: None,), quick),
        *(Case(measure, (work,), quick | o) for o in options),
        Case(made.ratio, ("sum", "nothing")),
        Case(made.ratio, (None, "sum")),
        Case(made.ratio, (["sum"], "max")),
        Case(made.ratios, ("nothing",)),
        Case(made.ratios, (3,)),
        Case(made.warnings, ("nothing",)),
        Case(timing.pool, ([],)),
        Case(timing.pool, (None,)),
        Case(timing.pool, (made,)),
        Case(timing.pool, ([made, 3],)),
        Case(timing.pool, ([made, measure({"other": work["sum"]}, **quick)],)),
        Case(timing.copies, (0,)),
        Case(timing.copies, (None,)),
        Case(timing.copies, (1.5,)),
        Case(timing.copies, ("1",)),
        Case(timing.copies, (8,), {"device": "gpu"}),
        Case(timing.copies, (8,), {"most": 0}),
        Case(timing.copies, (8,), {"most": None}),
        Case(timing.free_memory, ("gpu",)),
        Case(timing.free_memory, (None,)),
        Case(timing.last_level_cache, ("gpu",)),
        Case(within, (timing.torch_precision, "yes")),
        Case(within, (timing.torch_precision, None)),
        Case(within, (timing.compile_cache, None)),
        Case(within, (timing.compile_cache, "")),
        Case(within, (timing.compile_cache, "a", "yes")),
    ]


def within(manager: Callable[..., Any], *arguments: Any) -> None:
    with manager(*arguments):
        pass


def no_vectors() -> list[Any]:
    """What cannot be added along a last axis in a floating type."""
    return [
        None,
        [],
        3.0,
        np.float32(3),
        "text",
        ["a", "b"],
        [[1.0], [1.0, 2.0]],
        {},
        ODD,
        np.ones((2, 0)),
        np.array([1, 2]),
        np.array([200, 100], np.uint8),
        np.array([True, True]),
        np.array([1j, 2]),
        np.array([1.0, None], object),
        np.ones(2, np.longdouble),
        np.ones(2, "M8[s]"),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, requires_grad=True),
        torch.ones(3).to_sparse(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        torch.ones(3).to(torch.float8_e4m3fn),
        [np.ma.masked_array([1.0, 2.0], [True, False])],
        *no_tensors(),
    ]


def summed() -> list[Case]:
    r, f = reductions, np.ones(4, np.float32)
    parts = np.ones((2, 4), np.float32)
    plain = [r.sequential, r.pairwise, r.pairwise_numpy, r.neumaier, r.moments]
    # One vector with nothing in it has a sum, and a bool or whole number one without rounding.
    exact = [x for x in no_vectors() if not _is_exact(x)]
    return [
        *(Case(function, (x,)) for function in plain for x in no_vectors()),
        *(Case(r.mean, (x, "float32")) for x in no_vectors()),
        *(Case(r.binned, (x,)) for x in exact if not isinstance(x, (float, np.float32))),
        *(Case(r.exact_sum, (x,)) for x in exact),
        *(Case(r.condition, (x,)) for x in exact),
        Case(r.exact_sum, ([math.nan],)),
        Case(r.exact_sum, ([math.inf, 1.0],)),
        Case(r.exact_sum, (parts,)),
        Case(r.condition, ([math.nan],)),
        *(Case(r.mean, (f, d)) for d in (None, "int8", "float8_e5m2", "", ODD, 3.5)),
        *(Case(r.binned, (f,), {"axis": a}) for a in (3, -2, (0, 0), "0", 1.5)),
        Case(r.round_exact, (Fraction(1, 3), None)),
        Case(r.round_exact, (Fraction(1, 3), "int8")),
        Case(r.round_exact, (math.nan, "float32")),
        Case(r.round_exact, ("1", "float32")),
        Case(r.round_exact, (None, "float32")),
        Case(r.round_exact, (np.longdouble(1), "float32")),
        Case(r.round_to, (np.array([2**60 + 1]), "bfloat16")),
        Case(r.arrange, (f, np.array([[0, 1, 2, -1]]))),
        Case(r.round_exact, (1j, "float32")),
        *(Case(r.round_to, (f, d)) for d in (None, "int8", "", ODD, "float8_e4m3fn")),
        *(Case(r.round_to, (x, "float16")) for x in (None, "text", ["1", "2"], 1j, ODD, {})),
        Case(r.round_to, (np.ma.masked_array([1.0, 2.0], [True, False]), "float16")),
        *(Case(r.signed_errors, (x, Fraction(1))) for x in (None, "a", [1j], ODD, [[1.0], []])),
        *(Case(r.signed_errors, (f, t)) for t in (None, "1", math.nan, math.inf, 1j, f)),
        Case(r.signed_errors, (np.ma.masked_array(f, f > 0), Fraction(1))),
        *(Case(r.distinct_bits, (x,)) for x in (None, "a", [None], ODD, {}, [[1.0], []])),
        Case(r.distinct_bits, (np.ma.masked_array(f, [1, 0, 0, 0]),)),
        Case(r.distinct_bits, (np.ones(2, np.longdouble),)),
        Case(r.judge, (f, Fraction(1), None)),
        Case(r.judge, (f, Fraction(1), "int8")),
        Case(r.judge, (f, None, "float32")),
        Case(r.judge, (f, math.nan, "float32")),
        Case(r.judge, ([], Fraction(1), "float32")),
        Case(r.judge, (None, Fraction(1), "float32")),
        Case(r.judge, ([1j], Fraction(1), "float32")),
        *(Case(r.numpy_depth, (n,)) for n in (0, -1, 2.5, None, "8", True, math.inf)),
        *(Case(r.draw_values, (n,)) for n in ("uniform", None, 3, "")),
        *(Case(r.draw_values, ("normal", n)) for n in (-1, 1.5, None, "3", True)),
        *(Case(r.draw_values, ("normal", 3, s)) for s in (-1, 1.5, None, "0")),
        *(Case(r.draw_orders, (n,)) for n in (-1, 1.5, None, "3")),
        *(Case(r.draw_orders, (4, c)) for c in (2, -1, 5.5, None, "8")),
        Case(r.draw_orders, (4, 5, -1)),
        Case(r.draw_orders, (4, 5, None)),
        Case(r.arrange, (f, np.zeros((1, 3), int))),
        Case(r.arrange, (f, None)),
        Case(r.arrange, (None, np.zeros((1, 4), int))),
        Case(r.arrange, ([[1.0, 2.0]], [[0, 1]])),
        Case(r.arrange, (f, np.array([[0, 1, 2, 9]]))),
        Case(r.arrange, (f, np.array([[0, 0, 0, 0]]))),
        Case(r.arrange, (f, np.array([[0.0, 1, 2, 3]]))),
        Case(r.arrange, (parts, np.zeros((1, 4), int))),
    ]


def _is_exact(x: Any) -> bool:
    """Whether the exact sum of *x* is defined, whatever rounds when the type adds."""
    array = x if isinstance(x, np.ndarray) else np.zeros(1, complex)
    return (isinstance(x, list) and not x) or array.dtype.kind in "iub" or array.size == 0


def ordered() -> list[Case]:
    r, parts = reductions, np.ones((3, 4), np.float32)
    trees: list[Any] = [None, (), (0, 1), (0, 1, 2, 3), ((0, 1), 1), "012", 1.5]
    trees += [((0, 1), True), ((0, 1), (2,)), (0, (1, -1))]
    no_parts: list[Any] = [None, 3, "x", np.ones(3), np.ones((0, 4)), np.ones((3, 4), int)]
    no_parts += [np.ones((3, 4), complex), np.ma.masked_array(parts, parts > 0), [[1.0], [1, 2]]]
    sums = np.ones((3, 4), np.float32)
    return [
        *(Case(r.add_in_order, (parts, t)) for t in trees),
        *(Case(r.add_in_order, (p, ((0, 1), 2))) for p in no_parts),
        *(Case(r.gloo_sum, (p,)) for p in no_parts),
        *(Case(r.ring_sum, (p,)) for p in no_parts),
        *(Case(r.tree_sum, (p,)) for p in no_parts),
        *(Case(r.two_level_sum, (p, 1)) for p in no_parts),
        *(Case(r.two_level_sum, (parts, n)) for n in (0, 2, -1, 1.5, None, "1")),
        *(Case(r.ring_sum, (parts, n)) for n in (1.5, None, "1", 3, -1)),
        *(Case(r.order_text, (t,)) for t in (None, "01", 1.5, (0,), ())),
        *(Case(r.order_probes, (n, "float32")) for n in (1, 0, -1, 2.5, None, "3", True)),
        *(Case(r.order_probes, (3, d)) for d in (None, "int8", "float8_e5m2", ODD)),
        Case(r.order_probes, (2**12, "float16")),
        *(Case(r.orders_found, (s, 3, "float32")) for s in (None, sums[0], sums[:2], sums)),
        Case(r.orders_found, (sums * math.nan, 3, "float32")),
        Case(r.orders_found, (sums, 3, None)),
        Case(r.orders_found, (sums, None, "float32")),
        Case(r.orders_found, (sums, 0, "float32")),
        *(Case(r.gloo_order, (0, n)) for n in (0, -1, 1.5, None)),
        *(Case(r.gloo_order, (c, 3)) for c in (3, -1, 0.5, None)),
        *(Case(r.gloo_bounds, a) for a in ((-1, 3, 4), (8, 0, 4), (8, 3, 0), (8.5, 3, 4))),
        *(Case(r.gloo_bounds, a) for a in ((None, 3, 4), (8, None, 4), (8, 3, "4"))),
    ]


def tensor_cores() -> list[Case]:
    matmul = reductions.tensor_core_matmul
    a, b = np.ones((2, 3), np.float16), np.ones((3, 2), np.float16)
    options: list[dict[str, Any]] = [
        *({"gpu": v} for v in ("A100", "V100", "h100", 3, "", ["H100"])),
        *({"operands": v} for v in ("int8", "float64", 3, "", "float32")),
        *({"convert": v} for v in ("up", 3, True)),
        *({"block": v} for v in (0, -1, 1.5, "8", True, 5000)),
        *({"bits": v} for v in (0, 1, 41, 24.5, "24", math.nan)),
        {"gpu": "H100", "block": 4},
    ]
    wrong: list[Any] = [None, "a", 3, [[1.0]], a[0], a[:, :2], a.astype(int), a.astype(complex)]
    wrong += [a.astype(np.float64), a.astype(np.float32), np.ma.masked_array(a, a > 0), ODD]
    wrong += [torch.ones(2, 3, device="meta"), torch.ones(2, 3).to_sparse(), *no_tensors()]
    return [
        *(Case(matmul, (a, b), o) for o in options),
        *(Case(matmul, (w, b)) for w in wrong),
        Case(matmul, (a, None)),
        Case(matmul, (a, a)),
        Case(matmul, (a, b.astype(np.float32))),
        Case(matmul, (a, np.ma.masked_array(b, b > 0))),
    ]


def kernels() -> list[Case]:
    """Calls of the kernels; on a GPU with its tensors."""
    pytest.importorskip("triton")
    from roundoff import kernels as k
    from roundoff.kernels import binned, invariant_attention, invariant_matmul, reduce

    x, w = torch.ones(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    cases = []
    for norm in (k.layer_norm, k.rms_norm):
        shapes: list[Any] = [4, (2, 4), (), 0, -8, None, "8", 8.0, (8.0,), [[8]], True]
        tensors: list[Any] = [None, 3, [1.0], x.cpu().numpy(), x.int(), x.bool(), x[:, :0]]
        tensors += [x.to(torch.complex64), torch.tensor(1.0, device=DEVICE), *odd_tensors(x)]
        weights: list[Any] = [3, [1.0], w[:4], w[None], w.int(), w.to("meta"), "w"]
        weights += [w.to(torch.float8_e5m2), *odd_tensors(w)]
        cases += [Case(norm, (x, s)) for s in shapes]
        cases += [Case(norm, (t, 8)) for t in tensors]
        cases += [Case(norm, (x, 8, t)) for t in weights]
        cases += [Case(norm, (x, 8), {"eps": e}) for e in (-1.0, math.nan, "1e-5", w)]
        cases += [Case(norm, (x, 8), {"programs": p}) for p in (0, -1, 1.5, "2", 2**40)]
    cases += [Case(k.layer_norm, (x, 8, w, b)) for b in (3, w[:4], w.int(), w.to("meta"))]
    cases += [Case(k.layer_norm, (x, 8), {"eps": None})]
    for add in (reduce.sum_atomic, reduce.sum_two_pass, binned.sum_binned):
        vectors: list[Any] = [None, 3.0, [1.0], np.ones(3, np.float32), w.int(), w.double()]
        vectors += [
            w.to(torch.complex64),
            w.bool(),
            w.to_sparse(),
            torch.ones(2, 2).to_sparse_csr(),
        ]
        vectors += [
            torch.quantize_per_tensor(w.cpu(), 0.1, 0, torch.qint8),
            w.to(torch.float8_e5m2),
        ]
        cases += [Case(add, (t,)) for t in vectors + no_tensors()]
        cases += [Case(add, (w, b)) for b in (0, 3, -2, 2.5, "64", True, 2**40)]
    cases += [Case(reduce.sum_atomic, (x,)), Case(reduce.sum_two_pass, (w[::2],))]
    cases += [Case(reduce.sum_atomic, (w[:0],)), Case(reduce.sum_two_pass, (w[:0],))]
    cases += [Case(add, (w.clone().requires_grad_(),)) for add in (reduce.sum_atomic,)]
    matrix = torch.ones(3, 8, device=DEVICE)
    for factor in (None, 3, [1.0], w.int(), x.int(), x.double(), x[:, :4], *odd_tensors(x)):
        cases.append(Case(k.matmul, (factor, matrix)))
        cases.append(Case(k.matmul, (matrix, factor)))
    cases += [Case(k.matmul, (x, matrix, b)) for b in (3, w, w[:3].half(), w[:3].to("meta"))]
    cases += [Case(k.matmul, (x, matrix), {"tile": t}) for t in (3, "big", (1, 2))]
    cases += [Case(invariant_matmul.batched, p) for p in ((None, x), (x, x), (x[None], x[None, 0]))]
    cases += [Case(invariant_matmul.batched, (x[None], t)) for t in odd_tensors(x[None])]
    q = torch.ones(1, 2, 4, 8, device=DEVICE)
    for t in (None, 3, q[0], q.int(), q[:, :, :, :4], q.half(), *odd_tensors(q)):
        cases.append(Case(k.attention, (t, q, q)))
        cases.append(Case(k.attention, (q, q, t)))
    ones = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=DEVICE)
    lengths: list[Any] = [3, [4], torch.ones(1), torch.ones(2, dtype=torch.int64)]
    lengths = [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in lengths]
    cases += [Case(k.attention, (q, q, q), {"causal": c}) for c in ("bottom", None, 3)]
    cases += [Case(k.attention, (q, q, q), {"start": t}) for t in lengths]
    cases += [Case(k.attention, (q, q, q), {"length": t}) for t in lengths]
    cases += [
        Case(k.attention, (q, q, q), {"mask": m}) for m in (3, ones.int(), ones[0], ones[..., :2])
    ]
    cases += [Case(k.attention, (q, q, q), {"mask": ones, "start": lengths[2].long()})]
    cases += [Case(k.attention, (q, q, q), {"scale": s}) for s in ("1", q)]
    cases += [Case(k.invariant, (v,)) for v in ("ignore", 3, True, [])]
    cases += [Case(k.invariant, (None,), {"lacking": v}) for v in ("ignore", None, 3, True, [])]
    cases += [Case(k.invariant, (len,)), Case(k.invariant(), (3,)), Case(k.invariant(), (None,))]
    cases += [Case(k.invariant(), (generator,))]
    convolved = torch.nn.functional.conv1d
    cases += [Case(in_mode, (convolved, torch.ones(1, 1, 3), torch.ones(1, 1, 2)))]
    cases += [Case(invariant_attention.seen_by_mask, (ones, 2, 3, 4))]
    if not k.interpreting():
        cases += [Case(within, (k.shuffled_programs, 0))]
    else:
        cases += [Case(within, (k.shuffled_programs, s)) for s in (None, "0", 1.5)]
    return cases


def odd_tensors(x: torch.Tensor) -> list[Any]:
    """The same numbers as a tensor that no kernel reads."""
    return [
        x.to("meta"),
        x.to_sparse(),
        torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([x, x]),
        torch.masked.masked_tensor(x.clone(), torch.ones_like(x, dtype=torch.bool)),
    ]


def inner_kernels() -> list[Case]:
    """What the kernels are made of, as far as the reference lists it."""
    pytest.importorskip("triton")
    from roundoff.kernels import invariant_attention as a
    from roundoff.kernels.invariant_cublas import cancelling
    from roundoff.kernels.invariant_matmul import tile_for

    device, x = torch.device(DEVICE), torch.ones(2, 8, device=DEVICE)
    sizes: list[Any] = [
        (-1, 2, 3),
        (1, -2, 3),
        (1, 2, None),
        ("1", 2, 3),
        (1.5, 2, 3),
        (1, True, 3),
    ]
    places: list[Any] = [3, [1], torch.ones(1), torch.ones(3, dtype=torch.int64)]
    mask = torch.ones(1, 1, 2, 3, dtype=torch.bool)
    q, seen = torch.ones(1, 2, 4, 8, device=DEVICE), a.seen_by_position(1, 4, 4, device)
    other = a.seen_by_position(1, 3, 4, device)
    beyond = [] if HAS_GPU else [a.seen_by_position(1, 4, 9, device)]
    return [
        *(Case(a.seen_by_position, (*size, device)) for size in sizes),
        *(Case(a.seen_by_position, (1, 2, 3, d)) for d in ("gpu", None)),
        *(Case(a.seen_by_position, (1, 2, 3, device, c)) for c in ("bottom", None, 3)),
        *(Case(a.seen_by_position, (1, 2, 3, device), {"start": t}) for t in places),
        *(Case(a.seen_by_position, (1, 2, 3, device), {"length": t}) for t in places),
        *(Case(a.seen_by_mask, (m, 1, 2, 3)) for m in (None, 3, mask.float(), mask[0])),
        Case(a.seen_by_mask, (mask, None, 2, 3)),
        Case(a.seen_by_mask, (mask, 1, 2, 4)),
        *(Case(a.attend, (t, q, q, seen)) for t in (None, q[0], q[:, :, :, :4])),
        Case(a.attend, (q, q[:, :, :2], q, seen)),
        *(Case(a.attend, (q, q, q, s)) for s in (None, 3, (1, 2), a.Seen(None, None), other)),
        *(Case(a.attend, (q, q, q, s)) for s in beyond),
        Case(a.attend, (q, q, q, seen, "1")),
        *(Case(tile_for, (m, 1, 1, 2, 132)) for m in (None, 0, -1, "1", 1.5)),
        Case(tile_for, (1, 0, 1, 2, 132)),
        Case(tile_for, (1, 1, 1, 2, 0)),
        *(Case(cancelling, (t, x)) for t in (None, 0, x[0], x[:, :4], x.to_sparse())),
    ]


def pytrees() -> list[Case]:
    """Containers without an end, and what is calibrated one by one."""
    endless: list[Any] = []
    endless.append(endless)
    circle: dict[str, Any] = {}
    circle["a"] = circle
    deep: Any = ()
    for _ in range(5000):
        deep = [deep]
    c = compare.Calibration()
    order: Any = 0
    for rank in range(1, 5000):
        order = (order, rank)
    trees = [endless, circle, deep]
    return [
        *(Case(compare.max_diff, (t, t)) for t in trees),
        *(Case(compare.max_diff, (t, [t]), {"flatten": True}) for t in trees),
        *(Case(compare.scaled_error, (t, t)) for t in trees),
        *(Case(describe.tree_leaves, (t,)) for t in trees),
        *(Case(compare.calibrated_tolerance, (t,)) for t in trees),
        *(Case(reductions.binned, (t,)) for t in trees),
        Case(reductions.order_text, (order,)),
        Case(reductions.add_in_order, (np.ones((5000, 1), np.float32), order)),
        *(Case(c.add, (v, v)) for v in (None, "a", [X])),
        Case(c.add, (X, X[0])),
        *(Case(c.add_worst, (v,)) for v in (None, 3, "a", X, [X], {})),
        *(Case(c.tolerance, (p,)) for p in (0, 1, -1, 2, None, "a", math.nan, True)),
    ]


def handed() -> list[Case]:
    """What is given its arguments by a library, as a rule."""
    relu = torch.fx.symbolic_trace(torch.nn.ReLU())
    llama = models.Llama(models.SIZES["tiny"], 1)
    tokens = torch.tensor
    no_tokens: list[Any] = [None, 3, "a", torch.ones(1, 3), tokens([1]), tokens([[10**6]])]
    no_tokens += [tokens([[-1]]), torch.ones(1, 0, dtype=torch.int64)]
    binders = (OrtKernel("Exp"), ReferenceKernel(), LayerNormalizationOrt)
    return [
        *(Case(onnx_custom_backend, (g, [X])) for g in (None, 3, "a", torch.nn.ReLU())),
        *(Case(onnx_custom_backend, (relu, args)) for args in (None, 3, "a", X)),
        *(Case(kernel.bind, (node,)) for kernel in binders for node in (None, 3, "a")),
        *(Case(ort.from_ort, (v,)) for v in (None, 3, "a", X, ODD)),
        *(Case(ort.to_ort, (v,)) for v in (None, 3, "a", X.to("meta"), X.to(torch.complex64), ODD)),
        *(Case(llama, (t,)) for t in no_tokens),
    ]


def shown() -> list[Case]:
    """Tables, figures and values of a page, and the study behind it."""
    frame = pd.DataFrame({"n": [1], "t": [2.5], "who": ["cpu"]})
    tables = {"t": frame}

    def judged(**changed: Any) -> Case:
        options = {"name": "a", "about": "b", "of": "t", "statistic": "n", "test": lambda v: True}
        return Case(lambda **o: Value(**o).judge([tables]), (), options | changed)

    def study() -> Study:
        made = Study("plot_x", on="m")
        made.value("a", "b", "t", "n", test=lambda v: True)
        return made

    def rows_of(rows: Any) -> Case:
        made = study()
        made.table("t", part="cpu")(lambda args: rows)
        return Case(made.main, ([],))

    value = study().values[0]
    number = {"value": 1, "test": True, "about": "a", "of": "t"}
    path = record.write_record(Path(FOLDER.name), "plot_v", tables, environment.environment("4f2a"))
    bad_values: list[Any] = [None, 3, [1], {"a": None}, {"a": 3}, {"a": {}}, {3: number}]
    bad_values += [{"a": number | {"value": v}} for v in ("x", math.nan, math.inf, ODD)]
    bad_values += [{"a": number | {"test": "yes"}}]
    ways: list[Any] = ["nothing", None, 3, "who", lambda r: "x", lambda r: [1, 2]]
    tests: list[Any] = [3, None, lambda v: "yes", lambda v: None, lambda v: v.nothing]
    return [
        *(Case(page.choose, (f, {})) for f in (None, 3, tables)),
        *(Case(page.choose, (frame, w)) for w in (None, 3, {"nothing": 1}, {3: 1})),
        *(judged(statistic=s) for s in ways),
        *(judged(where=w) for w in (3, {"nothing": 1})),
        *(judged(interval=i) for i in (3, ("low", "high"))),
        *(judged(test=t) for t in tests),
        *(judged(words=w, test=None) for w in (3, ("a",), ("a", "b"))),
        *(judged(name=n) for n in (None, 3, "")),
        judged(of=None),
        *(Case(value.judge, (r,)) for r in (None, 3, [None], [3], [{"t": 3}], tables)),
        *(Case(value.measure, (t,)) for t in (None, 3, {"t": None})),
        *(Case(value.entry, (r,)) for r in (None, 3, "a")),
        *(Case(Study, (p,), {"on": "m"}) for p in (None, 3, "")),
        *(Case(Study, ("p",), {"on": o}) for o in (None, 3, "")),
        *(Case(study().table, ("t",), {"part": p}) for p in (None, 3, "")),
        *(Case(study().table, ("t",), {"part": "cpu", "times": t}) for t in ("t", 3)),
        *(Case(study().table("t", part="cpu"), (r,)) for r in (None, 3, [])),
        Case(study().value, ("a", "b", "t", "n"), {"test": len}),
        *(Case(study().evaluate, (r,)) for r in (None, 3, "a")),
        *(Case(study().main, (a,)) for a in (3, "--only t")),
        *(Case(ended, (study().main, a)) for a in (["--only", "no"], ["--no"], ["--second"], [3])),
        *(rows_of(r) for r in (3, "x")),
        *(Case(record.write_values, (path, v)) for v in bad_values),
        *(Case(record.write_values, (p, {})) for p in (None, 3, "", "nothing.json", FOLDER.name)),
    ]


def generator() -> Any:
    yield 1


def in_mode(function: Callable[..., Any], *arguments: Any) -> Any:
    with roundoff.invariant():
        return function(*arguments)


def modelled() -> list[Case]:
    m = models
    sizes = m.SIZES["tiny"]
    feeds = m.layer_norm_feeds
    odd = m.Size(10, 3, 4, 8, 1, 2)
    counted = [-1, 1.5, None, "3", True]
    return [
        *(Case(m.layer_norm_matmul, (t,)) for t in (None, 7, 99, "x", 1.5, True, 14)),
        *(Case(m.residual_rms_norm, (t,)) for t in (None, 7, 99, "x", 8)),
        Case(m.residual_rms_norm, (10,), {"wide": "no"}),
        *(Case(feeds, (n, 4)) for n in counted),
        *(Case(feeds, (4, n)) for n in [*counted, 0]),
        *(Case(feeds, (2, 4), {"batch": n}) for n in [*counted, 0]),
        *(Case(feeds, (2, 4), {"seed": s}) for s in (None, 1.5, "0", -1, 2**70)),
        *(Case(feeds, (2, 4), {"low": v}) for v in (math.nan, None, "0", math.inf, 61)),
        *(Case(feeds, (2, 4), {"weights": v}) for v in ("ones", None, 3)),
        *(Case(m.prompts, (n,)) for n in [*counted, 33]),
        *(Case(m.padded, (p, 0)) for p in ([], [[]], None, 3, [3], ["ab"], [[1.5]], [[None]])),
        *(Case(m.padded, ([[1, 2]], p)) for p in (None, 1.5, "0", 2**70)),
        Case(m.padded, ([[2**70]], 0)),
        Case(m.padded, ([[1, 2]], 0, "gpu")),
        *(Case(m.padded, ([[1, 2]], 0), {"length": n}) for n in (-1, None, 1.5, "3")),
        *(
            Case(lambda *a: list(m.server_batches(*a)), a)
            for a in (
                (3, 0, 2),
                (3, 2, 0),
                (None, 2, 2),
                (3, None, 2),
                (3, 2, None),
                (-1, 2, 2),
                (3, 2, 1.5),
                (2.5, 2, 2),
            )
        ),
        Case(lambda: list(m.server_batches(3, 2, 2, multiple=0))),
        Case(lambda: list(m.server_batches(3, 2, 2, padding=-1))),
        Case(lambda: list(m.server_batches(3, 2, 2, seed=-1))),
        *(
            Case(m.random_tokens, a)
            for a in (
                (None, True, "cpu"),
                ("tiny", True, "cpu"),
                (sizes, True, "gpu"),
                (sizes, True, None),
                (sizes, "no", "cpu"),
                (sizes, True, "cpu", -1.5),
                (sizes, True, "cpu", None),
                (sizes, True, "cpu", 0, "top"),
                (sizes, True, "cpu", 0, None),
            )
        ),
        *(
            Case(m.Llama, a)
            for a in (
                (None,),
                ("tiny",),
                (odd,),
                (sizes, -1),
                (sizes, 1.5),
                (sizes, None),
                (sizes, 1, "float32"),
                (sizes, 1, torch.int8),
                (sizes, 1, None),
                (sizes, 1, torch.float32, "fast"),
                (sizes, 1, torch.float32, None),
                (sizes, 1, torch.float32, "sdpa", "gpu"),
                (sizes, 1, torch.float32, "sdpa", "cpu", None),
            )
        ),
        Case(m.Float64Llama, (None,)),
        Case(m.Float64Llama, (torch.nn.Linear(2, 2),)),
        Case(m.GraphStep, (None,)),
        Case(m.GraphStep, (torch.nn.Linear(2, 2),)),
        Case(m.decode, (None, [[1]], 1)),
        Case(m.decode, (torch.nn.Linear(2, 2), [[1]], 1)),
        Case(m.decode_step, (None, 1, 1)),
    ]


def trained() -> list[Case]:
    """What takes a trained model of two layers; where it is not installed, nothing."""
    m = models
    loaded = m.load_trained(layers=1)
    model = loaded.model()
    wide = m.Float64Llama(loaded)
    return [
        *(
            Case(loaded.model, a)
            for a in (
                ("float32",),
                (torch.int8,),
                (None,),
                (torch.float32, "fast"),
                (torch.float32, "sdpa", "gpu"),
            )
        ),
        *(Case(loaded.rounded, (t,)) for t in (None, "float16", torch.int8)),
        *(Case(loaded.prompt, (t,)) for t in (None, 3, ["a"], b"a")),
        *(Case(m.load_trained, (s,)) for s in (None, 3, "", "nothing.gguf", "a\0b", FOLDER.name)),
        *(Case(m.load_trained, (), {"layers": n}) for n in (0, -1, 31, 1.5, "2", True)),
        *(Case(m.load_trained, (), {"round_to": t, "layers": 1}) for t in ("bfloat16", 3)),
        Case(m.load_trained, (), {"round_to": torch.int8, "layers": 1}),
        Case(m.load_trained, (), {"progress": 3, "layers": 1}),
        *(Case(m.load_decoder, (s,)) for s in (None, 3, "", "nothing.gguf", "a\0b", FOLDER.name)),
        *(Case(m.load_decoder, (), {"layers": n}) for n in (0, -1, 31, 1.5, "2", True)),
        *(Case(m.load_decoder, (), {"dtype": t}) for t in ("bfloat16", torch.int8, None)),
        Case(m.load_decoder, (), {"device": "gpu"}),
        Case(m.Float64Llama, (loaded, "gpu")),
        *(Case(wide, (t,)) for t in (None, [[1]], torch.ones(1, 2), torch.tensor([1]))),
        Case(wide, (torch.tensor([[10**6]]),)),
        Case(m.GraphStep, (model,)) if not HAS_GPU else Case(m.GraphStep, (None,)),
        *(Case(m.decode, (model, [[1, 2]], n)) for n in (0, -1, 1.5, None, "2", True)),
        *(Case(m.decode, (model, p, 1)) for p in ([], None, [[]], [[10**6]], [[-1]], ["ab"])),
        Case(m.decode, (model, [[1, 2]], 2), {"follow": torch.ones(3, 2, dtype=torch.int64)}),
        Case(m.decode, (model, [[1, 2]], 2), {"follow": [[1, 2]]}),
        Case(m.decode, (model, [[1, 2]], 2), {"follow": torch.ones(1, 2)}),
        Case(m.decode, (model, [[1, 2]], 1), {"observe": 3}),
        Case(m.decode, (model, [[1, 2]], 2), {"step": 3}),
        Case(m.decode, (model, [[1, 2]], 1), {"progress": 3}),
        Case(m.decode, (model, [[1, 2]], 1), {"length": -1}),
        Case(m.decode, (model, [[1, 2]], 1), {"room": None}),
        *(Case(m.decode_step, (model, b, 1)) for b in (0, -1, None, 1.5)),
        *(Case(m.decode_step, (model, 1, p)) for p in (-1, None, 1.5)),
        Case(m.decode_step, (model, 1, 1), {"mode": 3}),
        Case(m.decode_step, (model, 1, 1), {"room": -1}),
    ]


def asked() -> list[Case]:
    """Options of a page, the environment, and the program that reports it."""
    args = get_parsed_args
    one: dict[str, Any] = {"size": (8, "how many", 1), "way": ("a", "which", ["a", "b"])}
    env = {"gpu": None, "processor": "x", "cores": 2, "python": "3", "versions": {}}
    lines: list[Any] = [["--size", "0"], ["--size", "x"], ["--size", "1.5"], ["--size", "nan"]]
    lines += [["--way", "c"], ["--nothing"], ["--second"], ["word"], ["--size"], ["--record", "\0"]]
    lines += [["--record", "/proc/nothing/x"]]
    return [
        *(Case(ended, (args, "p"), {"argv": v, **one}) for v in lines),
        *(Case(ended, (args, "p"), {"argv": v, **one}) for v in (3, "--size 3", [3], [None])),
        Case(args, (None,), {"argv": [], **one}),
        Case(args, (3,), {"argv": [], **one}),
        Case(args, ("p", 3), {"argv": [], **one}),
        Case(args, ("p", None, "nothing"), {"argv": [], **one}),
        Case(args, ("p", None, 3), {"argv": [], **one}),
        *(
            Case(args, ("p",), {"argv": [], "size": v})
            for v in (
                (8, "text", "a"),
                (8, "text", ["a"]),
                ("a", "text", 3),
                (8, "text", (1, 2, 3)),
                (8, "text", (9, 1)),
                (),
                (1, 2, 3, 4),
                [1],
                {"a": 1},
                ODD,
                (8, 3),
                len,
                (8, "text", None),
                (True, "text", 1),
            )
        ),
        Case(args, ("p",), {"argv": [], "record": "x"}),
        Case(args, ("p",), {"argv": [], "second": 3}),
        Case(unit_test, ("maybe",)),
        Case(unit_test, ("2",)),
        Case(rendering, (usage_error, "p", "wrong")),
        Case(environment.environment, (3,)),
        *(Case(environment.summary, (e,)) for e in (None, {}, 3, {"gpu": 3}, [])),
        *(Case(environment.summary, (env, p)) for p in ("GPU", 3, "", [])),
        *(Case(environment.short_name, (e,)) for e in (None, {}, {"gpu": 3})),
        *(Case(environment.machine_name, (e,)) for e in (None, {}, {"gpu": None}, 3)),
        *(Case(environment.short_commit, (c,)) for c in (3, [])),
        *(Case(ended, (report_main, a)) for a in (["compare"], ["--no-such"], ["a", "b"], [3])),
        Case(report_main, ("--version",)),
        Case(report_main, (3,)),
        *(Case(dtypes.ulp, (x, "float32")) for x in (None, "1", [1j], ODD, [[1], []], {})),
        Case(dtypes.ulp, (np.ma.masked_array([1.0, 2.0], [True, False]), "float32")),
        Case(dtypes.ulp, (X.to("meta"), "float32")),
        *(Case(dtypes.ulp, (1.0, d)) for d in (None, "", "int8", "bool", ODD, 7, True, {})),
        *(Case(dtypes.dtype_info, (d,)) for d in (None, "", ODD, -1, 3.5, {}, True)),
        *(Case(dtypes.onnx_dtype_name, (d,)) for d in (None, 0, 99, -1, "FLOAT", 1.0, True)),
        *(Case(dtypes.onnx_dtype_to_np_dtype, (d,)) for d in (None, 0, "float32", 1.0)),
        *(Case(dtypes.onnx_dtype_to_torch_dtype, (d,)) for d in (None, 0, 8, "float32", 1.0)),
    ]


def ended(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """A command line: what it prints before it ends with status 2 is kept."""
    with contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            return function(*arguments, **options)
        except SystemExit as end:
            if end.code == 2 and "error: " in told.getvalue():
                raise RoundoffError(told.getvalue().splitlines()[-1]) from end
            raise


def unit_test(value: str) -> bool:
    with mock.patch.dict(os.environ, UNITTEST_GOING=value):
        return script.unit_test_going()


def rendering(function: Callable[..., Any], *arguments: Any) -> Any:
    with mock.patch.dict(os.environ, ROUNDOFF_RENDERING="1"):
        return function(*arguments)


def recorded() -> list[Case]:
    folder, write = Path(FOLDER.name), record.write_record
    frame = pd.DataFrame({"n": [1], "t": [2.5], "who": ["cpu"]})
    env = environment.environment("4f2a1c")
    (folder / "page").mkdir(exist_ok=True)
    broken = ["{", "[]", "3", '{"schema": 1}', '{"schema": 2}', '{"schema": "2"}', "\udcff"]
    paths = []
    for k, text in enumerate(broken):
        path = folder / "page" / f"machine-{k}.json"
        path.write_text(text, "utf-8", "surrogateescape")
        paths.append(path)
    tables: list[Any] = [None, 3, [frame], {"t": None}, {"t": 3}, {"t": [1]}, {3: frame}]
    tables += [{"t": pd.DataFrame({"a": [ODD]})}, {"t": pd.DataFrame({"a": [1j]})}]
    tables += [{"t": pd.DataFrame({"a": [[1]]})}, {"t": pd.DataFrame([[1, 2]], columns=["a", "a"])}]
    return [
        *(Case(record.read_record, (p,)) for p in (*paths, None, 3, "", "a\0b", folder)),
        Case(record.read_record, (folder / "no.json",)),
        *(Case(record.read_records, (p,)) for p in (None, 3, "", "../x", "a\0b")),
        Case(record.read_records, ("page", folder)),
        Case(record.read_records, ("page", None)),
        *(Case(write, (folder, "p", t, env)) for t in tables),
        *(
            Case(write, (folder, p, {"t": frame}, env))
            for p in (None, 3, "", "../x", "a/b", "a\0b")
        ),
        *(Case(write, (f, "p", {"t": frame}, env)) for f in (None, 3, "/proc/nothing", "a\0b")),
        *(Case(write, (folder, "p", {"t": frame}, e)) for e in (None, {}, 3, {"gpu": None})),
        *(Case(write, (folder, "p", {"t": frame}, env, o)) for o in (3, [1], {"a": ODD})),
        *(
            Case(write, (folder, "p", {"t": frame}, env), {"parts": p})
            for p in (
                3,
                {"t": "nothing"},
                {"t": 3},
                {"t": "n"},
            )
        ),
        *(
            Case(write, (folder, "p", {"t": frame}, env), {"times": p})
            for p in (
                3,
                {"t": ["nothing"]},
                {"t": []},
                {"t": 3},
                {"t": "t"},
            )
        ),
        Case(write, (folder, "never", {"t": frame}, env), {"second": True}),
        Case(record.row_parts, (frame, "nothing")),
        Case(record.row_parts, (frame, 3)),
        Case(record.row_parts, (None, "cpu")),
    ]


def processes() -> list[Case]:
    workers = Workers(2)
    return [
        *(Case(Workers, (n,)) for n in (0, -1, 1.5, None, "2", math.nan, True)),
        *(Case(Workers, (2, b)) for b in ("mpi", "no-such", None, 3, "")),
        *(Case(Workers, (2,), {"limit_s": s}) for s in (0, -1, None, "1", math.nan)),
        *(Case(Workers, (2,), {"idle_s": s}) for s in (0, None, "1", math.nan)),
        *(Case(Workers, (2,), {"environment": e}) for e in (3, ["A"], {"A": 3}, {3: "a"})),
        *(Case(Workers, (2,), {"imports": i}) for i in (3, "torch", [3])),
        *(Case(workers.map, (f, [1])) for f in (None, 3, "len", len, workers.map)),
        *(Case(workers.map, (unit_test, i)) for i in ([], [1, 2, 3], None, 3)),
        Case(workers.map, (unit_test, [lambda: 1])),
        *(Case(workers.map, (unit_test, [1]), {"limit_s": s}) for s in (0, -1, "1", math.nan)),
    ]


def compiled(**options: Any) -> Any:
    """What ``torch.compile`` with this backend gives; dynamo wraps a typed error, and quotes it."""
    import torch._dynamo

    torch._dynamo.reset()
    backend = functools.partial(onnx_custom_backend, **options)
    try:
        with torch.no_grad():
            return torch.compile(torch.nn.Linear(3, 2).eval(), backend=backend)(torch.ones(4, 3))
    except torch._dynamo.exc.BackendCompilerFailed as error:
        inner = error.inner_exception
        if isinstance(inner, RoundoffError) and str(inner) in str(error):
            raise inner from error
        raise


def backends() -> list[Case]:
    options: list[dict[str, Any]] = [
        *({"target_opset": v} for v in (17, 0, "18", 18.5, 99, True)),
        *({"options": v} for v in ("default", 3, {}, True)),
        *({"storage": v} for v in ([], 3, "x")),
        *({"dump_prefix": v} for v in (3, "/proc/nothing/x", "a\0b")),
        *({"providers": v} for v in ("CPUExecutionProvider", [], 3, [None], ["NoSuch"])),
        *({"providers": v} for v in ([("CPUExecutionProvider", {"foo": 1})],)),
        *({"mode": v} for v in ("max-autotune", "fast", 3, "")),
        *({"fallback": v} for v in ("no", None)),
        *({"optimize": v} for v in ("no", None)),
        *({"verbose": v} for v in ("loud", None)),
        *({"cuda_graph": v} for v in ("yes", None)),
    ]
    if not HAS_GPU:
        options += [{"providers": [CUDA]}]
    return [Case(compiled, (), o) for o in options]


GROUPS: dict[str, Callable[[], list[Case]]] = {
    "evaluators": evaluators,
    "sessions": sessions,
    "graphs": graphs,
    "fusions": fusions,
    "timed": timed,
    "summed": summed,
    "ordered": ordered,
    "tensor_cores": tensor_cores,
    "kernels": kernels,
    "inner_kernels": inner_kernels,
    "pytrees": pytrees,
    "handed": handed,
    "shown": shown,
    "modelled": modelled,
    "trained": trained,
    "asked": asked,
    "recorded": recorded,
    "processes": processes,
    "backends": backends,
}


#: Exceptions that are not ours, by the beginning of the case, and why.
RAW: dict[str, str] = {}
#: Groups that take seconds: the quick test takes one case in so many.
SLOW = {"trained": 4, "backends": 8}


def kind_of(error: BaseException | None) -> str:
    if error is None:
        return "silent"
    return "typed" if isinstance(error, RoundoffError) else "raw"


def wrong_of(cases: list[Case]) -> list[str]:
    """What was silent, or raised something of another kind without a reason."""
    wrong = []
    for case in cases:
        error = raised(case)
        if kind_of(error) != "typed" and str(case) not in RAW:
            wrong.append(f"{kind_of(error)}: {case}: {type(error).__name__} {error}")
        elif not str(error).strip():
            wrong.append(f"{case}: no message")
    return wrong


def cases_of(group: str) -> list[Case]:
    if group == "trained":
        pytest.importorskip("gguf")
    return GROUPS[group]()


@pytest.mark.parametrize("group", GROUPS)
def test_bad_input_is_a_typed_error(group: str) -> None:
    wrong = wrong_of(cases_of(group)[:: SLOW.get(group, 1)])
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow(reason="every case of the groups that take seconds; the quick test samples")
@pytest.mark.parametrize("group", SLOW)
def test_every_bad_input_is_a_typed_error(group: str) -> None:
    wrong = wrong_of(cases_of(group))
    assert not wrong, "\n".join(wrong)


def test_few_exceptions_are_raw_and_each_has_a_reason() -> None:
    assert len(RAW) <= 10
    assert all(RAW.values())


def test_a_session_and_an_evaluator_take_the_same_arguments() -> None:
    ways = [session(small()), TorchOnnxEvaluator(small())]
    for way in ways:
        expected = X.exp()[ROWS]
        for results in (way.run(FEEDS), way.run(None, FEEDS), way.run(["Z"], FEEDS)):
            assert len(results) == 1
            torch.testing.assert_close(results[0], expected)


def main() -> None:
    """Print what each case gives, and how many of each kind."""
    counts: dict[str, int] = {}
    for group in sys.argv[1:] or GROUPS:
        for case in GROUPS[group]():
            error = raised(case)
            kind = kind_of(error)
            counts[kind] = counts.get(kind, 0) + 1
            text = " ".join(str(error).split())[:200]
            print(f"{kind:6} {group} {case}: {type(error).__name__}: {text}", flush=True)
    print(counts)


if __name__ == "__main__":
    main()
