"""Runs of one model by torch, by ONNX Runtime and in float64, and their comparison."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import onnx
import onnxruntime
import torch

from roundoff.arguments import check_mapping, check_providers, check_whole
from roundoff.compare import CalibratedTolerance, Calibration, max_diff
from roundoff.compare.calibration import FALSE_ALARMS
from roundoff.describe import tree_leaves
from roundoff.errors import (
    ArgumentError,
    ModelError,
    ModelSizeError,
    RoundoffError,
    ShapeError,
    UnsupportedError,
)
from roundoff.evaluator import TorchOnnxEvaluator
from roundoff.evaluator.values import to_value, type_name
from roundoff.graph.protos import bodies, read
from roundoff.localization import is_floating, localize, non_finite, scaled
from roundoff.ort import available, session, torch_tf32
from roundoff.timing import free_memory

from .advice import advise, types_of
from .feeds import alike, draw, drawn_shapes, tables_of, varied
from .module import call_module, check_module
from .quantization import is_quantized, quantization_cost
from .result import OUTPUT_COLUMNS, SOURCES, RuntimeComparison

if TYPE_CHECKING:
    import pandas

__all__ = ["compare_runtimes"]

Sides = dict[str, Callable[[Mapping[str, Any]], list[Any]]]

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
#: Two errors are called equal when the larger is at most this many times the smaller.
_EQUAL = 1.1
#: A module whose error is this many times that of the model in torch computes something else. In
#: 128 draws of 23 models it was at most 1.8; with another eps of LayerNorm, in float32, at least 6.
_ELSEWHERE = 5.0
#: Fewest feeds that a calibration takes, beside those of the comparison.
_LEAST = 15
#: Feeds of a calibration by default: for a model of up to so many weights and inputs, and others.
_SMALL, _OF_SMALL, _OF_LARGE = 1 << 18, 299, 32
#: Outputs on fresh feeds this many times larger or smaller are of another kind.
_OTHER_SIZE = 4.0
#: How the names of operators begin that draw.
_RANDOM = ("Bernoulli", "Multinomial", "Random")


def compare_runtimes(
    model: Any,
    feeds: Mapping[str, Any] | None = None,
    *,
    module: Any = None,
    providers: Sequence[Any] | None = None,
    calibration: int | Sequence[Mapping[str, Any]] | None = None,
) -> RuntimeComparison:
    """Which node makes PyTorch and ONNX Runtime differ, which is nearer the truth, what to set.

    Parameters
    ----------
    model : path, bytes or ModelProto
        Give the path when the weights lie in files beside the model.
    feeds : mapping of str to tensor or array, optional
        Inputs by name. By default they are drawn: symbolic dimensions from 2 to 8; floats from a
        normal distribution; integers that index a table (token ids) below its size, other integers
        0 or 1; ones for integers and bools whose name contains "mask".
    module : torch.nn.Module or callable, optional
        What the model was exported from. It is called where its parameters lie, by keyword where
        the parameters of its ``forward`` have the names of the model's inputs, else in the order
        of the inputs. It computes as after ``eval()``, as it is exported.
    providers : sequence, optional
        ONNX Runtime's, which also say where torch computes; by default CUDA where both runtimes
        have it, else the CPU. On CUDA each runtime uses TF32 for float32 matrix products as it does
        when told nothing: ONNX Runtime does unless its option ``use_tf32`` is 0, torch follows its
        own switch (off).
    calibration : int or sequence of mappings, optional
        The feeds, beside those of the comparison, from whose differences the tolerances come
        (:func:`~roundoff.compare.calibrated_tolerance`): how many to draw, 0 for none, or feeds of
        your own, 15 or more. Each is run by both runtimes and the module. By default 299, which
        need no assumption about the tail of the differences; 32 for a model of more than 262,144
        weights and inputs. Where *feeds* are given the values of each are drawn from its own,
        independently: ranges and signs are kept, what relates one element to another is not, and
        integers, masks and tensors of fewer than 16 different values stay.

    Returns
    -------
    RuntimeComparison
        Its ``advice`` has an answer of its own for NaN and infinities in the inputs, for those that
        the model makes in float64, too, for an overflow of one type, and for a quantised model,
        whose ``quantization`` says what that costs and at which node. Its ``tolerances`` fail at
        most one fresh feed of the same kind in 300, and say how large a fault passes, or why no
        tolerance can be defended.

    Raises
    ------
    ModelError
        The model can't be read, is not valid, or lacks its external data.
    ModelSizeError
        The weights and feeds would not fit in memory; known before anything large is allocated.
    UnsupportedError
        An operator has no kernel or no float64 truth, a provider is not there, an input can't be
        drawn, or a node draws random numbers (Dropout in training, RandomNormal, Bernoulli, …).
    ArgumentError, DtypeError, ShapeError
        An argument is of another kind; a feed is missing, unknown, or not what the model declares;
        the module draws random numbers, or its outputs are not the model's.

    Examples
    --------
    >>> import onnx.parser
    >>> from roundoff.runtimes import compare_runtimes
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 18]>
    ... g (float[n, 2] X) => (float[n, 2] Z) { Y = Relu(X)  Z = Neg(Y) }''')
    >>> comparison = compare_runtimes(model)
    >>> comparison.first is None, comparison.nearer
    (True, 'equal')
    >>> comparison.advice
    ['Nothing: every output has equal bits in both.']
    """
    import pandas

    proto, folder = read(model)
    if not isinstance(proto, onnx.ModelProto):
        raise ModelError(
            "not a model", got=type(model).__name__, expected="path, bytes, ModelProto"
        )
    if module is not None and not callable(module):
        raise ArgumentError("module", got=type(module).__name__, expected="a torch.nn.Module")
    given = None if feeds is None else _values(feeds, "feeds")
    if isinstance(calibration, Sequence):
        calibration = [_values(more, "calibration") for more in calibration]
        if len(calibration) < _LEAST:
            raise ArgumentError(
                "feeds of the calibration", got=len(calibration), expected=f"at least {_LEAST}"
            )
    elif calibration is not None and calibration != 0:
        check_whole("calibration, where it is not 0,", calibration, _LEAST)
    if providers is None:
        providers = [CUDA] if torch.cuda.is_available() and available([CUDA]) else [CPU]
    (provider, options), *others = check_providers(providers)
    if provider == CUDA:
        options = {"use_tf32": 1} | options
    source, providers = proto if folder is None else model, [(provider, options), *others]
    elements = _elements(proto, given or {})
    ours = TorchOnnxEvaluator(source, providers)
    _check_deterministic(ours)
    names, tables = ours.output_names, tables_of(ours)
    drawn = partial(draw, proto, drawn_shapes(proto) if given is None else {}, tables)
    fed = drawn(0) if given is None else given
    sides: Sides = {"torch": ours.run, "ORT": session(source, providers).run}
    if module is not None:
        sides["module"] = partial(call_module, module, ours)
    try:
        frame, results = _run(source, providers, ours, sides, fed)
    except (ModelError, ShapeError) as error:
        if given is None and error.hint is None:
            error.hint = "feeds= that the model takes"
        raise
    if module is not None:
        check_module(names, results["torch"], results["module"])
    rows = [
        _output_row(name, {side: outputs[place] for side, outputs in results.items()})
        for place, name in enumerate(names)
    ]
    quantization = None
    if is_quantized(proto):
        loaded = proto if folder is None else onnx.load(model)
        quantization = quantization_cost(loaded, ours, fed, module, results)
        sides.pop("module", None)  # whose difference is no rounding
    is_elsewhere = quantization is None and any(row["elsewhere"] for row in rows)

    if calibration is None:
        calibration = _OF_SMALL if elements <= _SMALL else _OF_LARGE
    if is_elsewhere:
        reason = "the ONNX model does not compute what the module does"
        tolerances = [CalibratedTolerance(reason=reason)] * len(names)
    else:
        fresh = drawn if given is None else None
        tolerances = _tolerances(sides, fed, calibration, fresh, tables, len(names))
    for row, tolerance in zip(rows, tolerances, strict=True):
        row["rtol"], row["atol"] = tolerance.rtol, tolerance.atol

    columns = [c for c in OUTPUT_COLUMNS if module is not None or "module" not in c]
    outputs = pandas.DataFrame(rows, columns=columns)
    is_optimised = False
    if (outputs["session abs"] != 0).any():  # by its optimisations, or by other kernels
        plain = session(source, providers, optimization="none").run(fed)
        is_optimised = max_diff(results["nodes"], plain)["abs"] == 0
    told = dict(zip(names, tolerances, strict=True))
    device = ours.settings.device
    advice = advise(
        frame,
        outputs,
        device.type,
        tf32=(torch_tf32(), str(options["use_tf32"]) in ("1", "True")) if provider == CUDA else (),
        odd=_odd(fed, bool(outputs["non-finite truth"].any())),
        is_elsewhere=is_elsewhere,
        is_optimised=is_optimised,
        quantization=quantization,
        tolerances=told,
    )
    where = (
        f"{proto.graph.name or 'a model'}, {', '.join(types_of(outputs))}, {device}: "
        f"torch {torch.__version__}, ONNX Runtime {onnxruntime.__version__}"
    )
    return RuntimeComparison(frame, outputs, advice, where, told, quantization)


def _values(feeds: Any, what: str) -> dict[str, Any]:
    given = check_mapping(what, feeds, "input names to tensors")
    return {name: to_value(value) for name, value in given.items()}


def _run(
    source: Any,
    providers: Sequence[Any],
    ours: TorchOnnxEvaluator,
    sides: Sides,
    fed: Mapping[str, Any],
) -> tuple[pandas.DataFrame, dict[str, list[Any]]]:
    """A row per node, and the outputs of each side, of the truth, and of ONNX Runtime's kernels.

    The evaluators that serve for this alone end here with their weights.
    """
    results = {"ORT": sides["ORT"](fed)}
    nodes = TorchOnnxEvaluator(source, providers, kernels=("ort", "torch", "reference"))
    try:
        true = TorchOnnxEvaluator(source, providers, truth=True)
        frame = localize(ours, nodes, fed, truth=true).frame
    except UnsupportedError as error:
        raise UnsupportedError(
            f"no float64 truth of this model: {error.message}",
            got=error.got,
            hint="to compare the two without a truth: max_diff of what "
            "TorchOnnxEvaluator(model).run(feeds) and session(model).run(feeds) give",
        ) from error
    runs: Sides = {"truth": true.run, "nodes": nodes.run} | sides
    results |= {side: run(fed) for side, run in runs.items() if side not in results}
    return frame[list(SOURCES.values())].set_axis(list(SOURCES), axis=1), results


def _odd(fed: Mapping[str, Any], reached: bool) -> list[str]:
    """Inputs with NaN, or an infinity where some *reached* an output: masks of −inf do not."""
    return [
        name
        for name, value in fed.items()
        if is_floating(value) and (value.isnan().any() or (reached and value.isinf().any()))
    ]


def _tolerances(
    sides: Sides,
    fed: Mapping[str, Any],
    calibration: int | Sequence[Any],
    drawn: Callable[[int], Mapping[str, Any]] | None,
    tables: Mapping[str, int],
    count: int,
) -> list[CalibratedTolerance]:
    """Of each output, from the feeds of the comparison and more; *drawn* gives those of a seed."""
    more: Iterable[Any] = ()
    reason, check = "", None
    if calibration == 0:
        reason = "none was calibrated: calibration=0"
    elif not isinstance(calibration, int):
        more = calibration
    elif drawn is not None:
        more = map(drawn, range(1, calibration + 1))
    elif varied(fed, tables):
        more, check = alike(fed, tables, calibration), _held_against
    else:
        reason = "the feeds have no values to draw others from: give calibration=[feeds, …]"
    if not reason:
        try:
            return _calibrated(sides, itertools.chain([fed], more), count, check)
        except RoundoffError as error:
            if not isinstance(calibration, int):
                raise
            reason = f"the model fails on a feed of the calibration: {error.message}"
    return [CalibratedTolerance(reason=reason)] * count


def _calibrated(
    sides: Sides, feeds: Iterable[Mapping[str, Any]], count: int, check: Any
) -> list[CalibratedTolerance]:
    """A tolerance for each output, from how torch and the module differ from ONNX Runtime."""
    collected = [Calibration() for _ in range(count)]
    for fed in feeds:
        results = {side: run(fed) for side, run in sides.items()}
        expected = results.pop("ORT")
        for place, one in enumerate(collected):
            one.add([(outputs[place], expected[place]) for outputs in results.values()])
    # Any of the floating outputs may fail a feed.
    floating = sum(one.info is not None for one in collected)
    tolerances = [one.tolerance(FALSE_ALARMS / max(floating, 1)) for one in collected]
    return list(map(check, collected, tolerances)) if check else tolerances


def _elements(proto: onnx.ModelProto, feeds: Mapping[str, Any]) -> int:
    """Weights and inputs; refused where the float64 of them does not fit in the host's memory."""
    shapes = [tensor.dims for tensor in proto.graph.initializer]
    shapes += [getattr(value, "shape", ()) for value in feeds.values()]
    elements, free = sum(map(math.prod, shapes)), free_memory()
    if 8 * elements > free:
        raise ModelSizeError(
            "the comparison of this model would not fit in memory",
            got=f"over {8 * elements / 2**30:.3g} GiB",
            expected=f"at most {free / 2**30:.3g} GiB",
            hint="a part of the model: onnx.utils.extract_model",
        )
    return elements


def _check_deterministic(evaluator: TorchOnnxEvaluator) -> None:
    """Refuse a model that draws, in its functions and in the bodies of its nodes, too."""
    told = [
        f"{node.name!r} ({node.operator})"
        for node in evaluator.nodes
        if _draws(node.proto, node.constants.get(2))
    ]
    if told:
        raise UnsupportedError(
            "the model draws random numbers: what follows differs in every run, whichever runtime",
            got=", ".join(told[:4]),
            expected="a model that gives the same twice",
            hint="export after module.eval() (Dropout without training), or make what is drawn an "
            "input of the model and feed both runtimes the same",
        )


def _draws(node: onnx.NodeProto, training: Any = None) -> bool:
    """Whether a node, or one of its bodies, draws; a Dropout may where *training* is not known."""
    if node.op_type == "Dropout":
        return len(node.input) > 2 and (training is None or bool(training))
    inner = (n for _, body in bodies(node) for n in body.node)
    return node.op_type.startswith(_RANDOM) or any(_draws(n) for n in inner)


def _held_against(calibration: Calibration, tolerance: CalibratedTolerance) -> CalibratedTolerance:
    """None where the feeds of the comparison are not of the kind that was drawn from them."""
    own, *others = calibration.scores or [0.0]
    ratios = [size / calibration.rms for size in calibration.sizes[1:] if calibration.rms]
    size, most = statistics.median_high(ratios or [1.0]), 2 * (1 + max(others, default=0.0))
    if not tolerance.found or (1 / _OTHER_SIZE <= size <= _OTHER_SIZE and own <= most):
        return tolerance
    reason = (
        "the values of the feeds given relate to each other in a way that drawing loses: give "
        "feeds of yours, calibration=[feeds, …]"
    )
    return CalibratedTolerance(feeds=tolerance.feeds, differ=tolerance.differ, reason=reason)


def _output_row(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    truth, ours, theirs = results["truth"], results["torch"], results["ORT"]
    row: dict[str, Any] = {
        "output": name,
        "type": type_name(ours),
        "abs": float(max_diff(ours, theirs)["abs"]),
        "session abs": float(max_diff(results["nodes"], theirs)["abs"]),
        "elements": sum(t.numel() for t in tree_leaves(ours) if isinstance(t, torch.Tensor)),
        "elsewhere": False,
    }
    for side in ("torch", "ORT", "truth"):
        row[f"non-finite {side}"] = non_finite(results[side])
    for side in ("torch", "ORT"):
        row[f"error {side}"], row[f"rms {side}"] = scaled(truth, results[side])
    row["nearer"] = _nearer(row, results)
    if "module" in results:
        module = results["module"]
        # A module that computes in a wider type than the model is measured in the model's.
        types = [value.dtype for value in (ours, module) if is_floating(value)]
        unit = max(types, key=lambda dtype: torch.finfo(dtype).eps, default=None)
        row["error module"] = scaled(truth, module, unit)[0]
        row["module abs"] = float(max_diff(ours, module)["abs"])
        # In float64 no truth is more precise, but what is far off in float32 is no rounding.
        unit = torch.float32 if unit == torch.float64 else unit
        most = _ELSEWHERE * max(1.0, row["error torch"])
        row["elsewhere"] = scaled(truth, module, unit)[0] > most
    return row


def _nearer(row: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    errors = [row["rms torch"], row["rms ORT"]]
    kind = row["type"].partition("[")[0]
    is_narrow = kind in ("float32", "float16", "bfloat16")
    if min(errors) == math.inf or (is_narrow and row["elements"] and all(map(math.isnan, errors))):
        return "neither"  # both overflow, or nothing is finite
    if row["abs"] == 0 or kind == "float64":  # the truth is no more precise
        return "equal"
    if all(map(math.isnan, errors)):  # not floating: the sum of absolute errors
        errors = [max_diff(results["truth"], results[side])["sum"] for side in ("torch", "ORT")]
    errors = [math.inf if math.isnan(e) else e for e in errors]
    if max(errors) <= _EQUAL * min(errors):
        return "equal"
    return "torch" if errors[0] < errors[1] else "ORT"
