"""Runs of one model by torch, by ONNX Runtime and in float64, and their comparison."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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

from .advice import Advice
from .feeds import alike, draw, drawn_shapes, tables_of, varied
from .module import call_module, first_call
from .quantization import is_quantized, quantization_cost
from .result import OUTPUT_COLUMNS, SOURCES, RuntimeComparison

__all__ = ["compare_runtimes"]

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
#: Two errors are called equal when the larger is at most this many times the smaller.
_EQUAL = 1.1
#: A module whose error is this many times that of the model in torch computes something else.
_ELSEWHERE = 16.0
#: Fewest feeds that a calibration takes, beside those of the comparison.
_LEAST = 15
#: Feeds of a calibration by default: for a model of up to so many weights and inputs, and others.
_SMALL, _OF_SMALL, _OF_LARGE = 1 << 18, 299, 32
#: Outputs on fresh feeds this many times larger or smaller are of another kind.
_OTHER_SIZE = 4.0
_RANDOM = (
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
)


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
    source = proto if folder is None else model
    comparison = _Comparison(proto, source, [(provider, options), *others], module, given)
    return comparison.result(calibration)


def _values(feeds: Any, what: str) -> dict[str, Any]:
    given = check_mapping(what, feeds, "input names to tensors")
    return {name: to_value(value) for name, value in given.items()}


class _Comparison:
    """One model, and what each side made of one feed."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        source: Any,
        providers: list[tuple[str, dict[str, Any]]],
        module: Any,
        given: dict[str, Any] | None,
    ) -> None:
        self.proto, self.source, self.providers, self.module = proto, source, providers, module
        self.is_drawn = given is None
        self.elements = _elements(proto, given or {})
        self.torch = TorchOnnxEvaluator(source, providers)
        self.names = self.torch.output_names
        _check_deterministic(self.torch)
        self.tables = tables_of(self.torch)
        self.shapes = drawn_shapes(proto) if given is None else {}
        self.fed = self._draw(0) if given is None else given
        self.ort = session(source, providers)
        try:
            self._run()
        except (ModelError, ShapeError) as error:
            if self.is_drawn and error.hint is None:
                error.hint = "feeds= that the model takes"
            raise

    def _draw(self, seed: int) -> dict[str, Any]:
        return draw(self.proto, self.shapes, self.tables, seed)

    def _run(self) -> None:
        """Run each side; the evaluators that serve for this alone end here with their weights."""
        self.results = {"ORT": self.ort.run(self.fed)}
        nodes = TorchOnnxEvaluator(
            self.source, self.providers, kernels=("ort", "torch", "reference")
        )
        try:
            true = TorchOnnxEvaluator(self.source, self.providers, truth=True)
            frame = localize(self.torch, nodes, self.fed, truth=true).frame
        except UnsupportedError as error:
            raise UnsupportedError(
                f"no float64 truth of this model: {error.message}",
                got=error.got,
                hint="to compare the two without a truth: max_diff of what "
                "TorchOnnxEvaluator(model).run(feeds) and session(model).run(feeds) give",
            ) from error
        self.frame = frame[list(SOURCES.values())].set_axis(list(SOURCES), axis=1)
        self.truth, self.results["torch"], self.results["nodes"] = (
            evaluator.run(None, self.fed) for evaluator in (true, self.torch, nodes)
        )
        if self.module is not None:
            self.results["module"] = first_call(
                self.module, self._in_order(self.fed), self.names, self.results["torch"]
            )

    def _in_order(self, fed: Mapping[str, Any]) -> dict[str, Any]:
        """Feeds in the order of the model's inputs, which is that of the module's arguments."""
        return {name: fed[name] for name in self.torch.input_names if name in fed}

    def result(self, calibration: int | Sequence[Mapping[str, Any]] | None) -> RuntimeComparison:
        import pandas

        rows = [
            _output_row(name, true, {side: values[k] for side, values in self.results.items()})
            for k, (name, true) in enumerate(zip(self.names, self.truth, strict=True))
        ]
        elsewhere = any(row["elsewhere"] for row in rows)
        quantization = None
        if is_quantized(self.proto):
            loaded = self.proto if self.source is self.proto else onnx.load(self.source)
            quantization = quantization_cost(
                loaded, self.fed, self.truth, self.module, self.results.get("module")
            )
        if elsewhere and quantization is None:
            reason = "the ONNX model does not compute what the module does"
            tolerances = dict.fromkeys(self.names, CalibratedTolerance(reason=reason))
        else:
            with_module = self.module is not None and quantization is None
            tolerances = self._tolerances(calibration, with_module)
        for row in rows:
            tolerance = tolerances[row["output"]]
            row["rtol"], row["atol"] = tolerance.rtol, tolerance.atol
        columns = [c for c in OUTPUT_COLUMNS if self.module is not None or "module" not in c]
        outputs = pandas.DataFrame(rows, columns=columns)
        device = self.torch.settings.device
        advice = Advice(
            self.frame,
            outputs,
            device.type,
            self._tf32(),
            self._odd(bool(outputs["non-finite truth"].any())),
            elsewhere,
            bool((outputs["session abs"] != 0).any()) and self._is_optimised(),
            quantization,
            tolerances,
        )
        types = ", ".join(sorted(advice.types()))
        where = (
            f"{self.proto.graph.name or 'a model'}, {types}, {device}: "
            f"torch {torch.__version__}, ONNX Runtime {onnxruntime.__version__}"
        )
        return RuntimeComparison(
            self.frame, outputs, advice.sentences(), where, tolerances, quantization
        )

    def _tf32(self) -> tuple[bool, bool]:
        name, options = self.providers[0]
        if name != CUDA:
            return False, False
        return torch_tf32(), str(options["use_tf32"]) in ("1", "True")

    def _odd(self, reached: bool) -> list[str]:
        """Inputs with NaN, or an infinity where some *reached* an output: masks of −inf do not."""
        floats = {name: value for name, value in self.fed.items() if is_floating(value)}
        return [
            name
            for name, value in floats.items()
            if value.isnan().any() or (reached and value.isinf().any())
        ]

    def _is_optimised(self) -> bool:
        """Whether graph optimisation makes the difference of the session from its nodes."""
        plain = session(self.source, self.providers, optimization="none").run(self.fed)
        return max_diff(self.results["nodes"], plain)["abs"] == 0

    def _tolerances(
        self, calibration: int | Sequence[Mapping[str, Any]] | None, with_module: bool
    ) -> dict[str, CalibratedTolerance]:
        """Of each output, from how the runtimes and the module differ on more feeds."""
        if calibration is None:
            calibration = _OF_SMALL if self.elements <= _SMALL else _OF_LARGE
        reason = ""
        more: Iterable[Mapping[str, Any]]
        if not isinstance(calibration, int):
            more = calibration
        elif calibration == 0:
            reason = "none was calibrated: calibration=0"
        elif self.is_drawn:
            more = (self._draw(seed) for seed in range(1, calibration + 1))
        elif varied(self.fed, self.tables):
            more = alike(self.fed, self.tables, calibration)
        else:
            reason = "the feeds have no values to draw others from: give calibration=[feeds, …]"
        if reason:
            return dict.fromkeys(self.names, CalibratedTolerance(reason=reason))
        collected = [Calibration() for _ in self.names]
        for done, fed in enumerate(itertools.chain([self.fed], more)):
            try:
                pairs = self._pairs(fed, with_module)
            except RoundoffError as error:
                if not isinstance(calibration, int):
                    raise
                reason = f"the model fails on feed {done} of the calibration: {error.message}"
                return dict.fromkeys(self.names, CalibratedTolerance(reason=reason))
            for one, its_pairs in zip(collected, pairs, strict=True):
                one.add(its_pairs)
        # Any of the floating outputs may fail a feed.
        floating = sum(one.info is not None for one in collected)
        share = FALSE_ALARMS / max(floating, 1)
        tolerances = [one.tolerance(share) for one in collected]
        if isinstance(calibration, int) and not self.is_drawn:
            tolerances = [
                _held_against(one, tolerance)
                for one, tolerance in zip(collected, tolerances, strict=True)
            ]
        return dict(zip(self.names, tolerances, strict=True))

    def _pairs(self, fed: Mapping[str, Any], with_module: bool) -> list[list[tuple[Any, Any]]]:
        """For each output the pairs (torch, ORT) and (module, ORT)."""
        sides = [self.torch.run(None, fed)]
        if with_module:
            sides.append(call_module(self.module, self._in_order(fed), self.names))
        return [[(side[k], b) for side in sides] for k, b in enumerate(self.ort.run(fed))]


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
    return node.op_type in _RANDOM or any(_draws(n) for n in inner)


def _held_against(calibration: Calibration, tolerance: CalibratedTolerance) -> CalibratedTolerance:
    """None where the feeds of the comparison are not of the kind that was drawn from them."""
    own, *others = calibration.scores or [0.0]
    ratios = [size / calibration.rms for size in calibration.sizes[1:] if calibration.rms]
    reason = ""
    if ratios and not 1 / _OTHER_SIZE <= sorted(ratios)[len(ratios) // 2] <= _OTHER_SIZE:
        reason = "outputs have another size on feeds drawn from the values given"
    elif own > 2 * (1 + max(others, default=0.0)):
        reason = "the feeds given differ more than those drawn from their values"
    if not reason or not tolerance.found:
        return tolerance
    reason += (
        "; their values relate to each other in a way that drawing loses: give feeds of yours, "
        "calibration=[feeds, …]"
    )
    return CalibratedTolerance(feeds=tolerance.feeds, differ=tolerance.differ, reason=reason)


def _output_row(name: str, truth: Any, results: Mapping[str, Any]) -> dict[str, Any]:
    ours, theirs = results["torch"], results["ORT"]
    row: dict[str, Any] = {
        "output": name,
        "type": type_name(ours),
        "abs": float(max_diff(ours, theirs)["abs"]),
        "session abs": float(max_diff(results["nodes"], theirs)["abs"]),
        "elements": sum(t.numel() for t in tree_leaves(ours) if isinstance(t, torch.Tensor)),
        "non-finite torch": non_finite(ours),
        "non-finite ORT": non_finite(theirs),
        "non-finite truth": non_finite(truth),
        "elsewhere": False,
    }
    for side, result in (("torch", ours), ("ORT", theirs)):
        row[f"error {side}"], row[f"rms {side}"] = scaled(truth, result)
    row["nearer"] = _nearer(row, truth, results)
    if "module" in results:
        module = results["module"]
        # A module that computes in a wider type than the model is measured in the model's.
        eps = {k: torch.finfo(v.dtype).eps for k, v in results.items() if is_floating(v)}
        coarse = max(("torch", "module"), key=lambda side: eps.get(side, 0.0))
        unit = results[coarse].dtype if eps else None
        row["error module"], row["rms module"] = scaled(truth, module, unit)
        row["module abs"] = float(max_diff(ours, module)["abs"])
        # In float64 no truth is more precise, but what is far off in float32 is no rounding.
        unit = torch.float32 if unit == torch.float64 else unit
        most = row["error torch"] if row["error torch"] > 1 else 1.0
        row["elsewhere"] = scaled(truth, module, unit)[0] > _ELSEWHERE * most
    return row


def _nearer(row: Mapping[str, Any], truth: Any, results: Mapping[str, Any]) -> str:
    errors = [row[f"rms {side}"] for side in ("torch", "ORT")]
    kind = row["type"].partition("[")[0]
    is_narrow = kind in ("float32", "float16", "bfloat16")
    if min(errors) == math.inf or (is_narrow and row["elements"] and all(map(math.isnan, errors))):
        return "neither"  # both overflow, or nothing is finite
    if row["abs"] == 0 or kind == "float64":  # the truth is no more precise
        return "equal"
    if all(map(math.isnan, errors)):  # not floating: the sum of absolute errors
        errors = [max_diff(truth, results[side])["sum"] for side in ("torch", "ORT")]
    errors = [math.inf if math.isnan(e) else e for e in errors]
    if max(errors) <= _EQUAL * min(errors):
        return "equal"
    return "torch" if errors[0] < errors[1] else "ORT"
