"""Runs of one model by torch, by ONNX Runtime and in float64, and their comparison."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch

from roundoff.arguments import check_flag, check_mapping, check_providers, check_whole
from roundoff.compare import CalibratedTolerance, max_diff
from roundoff.describe import tree_leaves
from roundoff.errors import (
    ArgumentError,
    ModelError,
    ModelSizeError,
    ShapeError,
    UnsupportedError,
)
from roundoff.evaluator import Step, TorchOnnxEvaluator
from roundoff.evaluator.values import to_value, type_name
from roundoff.graph.protos import read
from roundoff.localization import localize, non_finite, scaled
from roundoff.ort import available, session, torch_tf32
from roundoff.ort.tensors import onnxruntime
from roundoff.timing import free_memory, torch_precision

from .advice import Advice
from .calibrating import alike, calibrate, check_calibration, varied
from .drawing import check_drawing
from .feeds import check_declared, draw, drawn_shapes, limits
from .module import (
    call_module,
    check_module,
    check_outputs,
    in_type_of,
    over_rms,
    without_draws,
)
from .quantization import Quantization, is_quantized, quantization_cost
from .result import OUTPUT_COLUMNS, SOURCES, RuntimeComparison

__all__ = ["compare_runtimes"]

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
#: Two errors are called equal when the larger is at most this many times the smaller.
_EQUAL = 1.1
#: A module whose error is this many times that of the model in torch computes something else.
_ELSEWHERE = 16.0
#: A module of a float64 model that is so far from it, over the RMS, computes something else.
_OFF = 2.0**-20
#: Feeds that a tolerance is calibrated on by default, beside those of the comparison: of a model of
#: up to so many multiplications, which takes milliseconds, and of a larger one.
_SMALL, _OF_SMALL, _OF_LARGE = 2_000_000, 299, 32


def compare_runtimes(
    model: Any,
    feeds: Mapping[str, Any] | None = None,
    *,
    module: Any = None,
    providers: Sequence[Any] | None = None,
    tf32: bool | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    calibration: int | Sequence[Mapping[str, Any]] | None = None,
) -> RuntimeComparison:
    """Which node makes PyTorch and ONNX Runtime differ, which is nearer the truth, what to set.

    Parameters
    ----------
    model : path, bytes or ModelProto
        Give the path when the weights lie in files beside the model.
    feeds : mapping of str to tensor or array, optional
        Inputs by name. By default they are drawn: floats from a normal distribution; integers
        that index a table (token ids) below its size, other integers 0 or 1; ones for integers
        and bools whose name contains "mask".
    module : torch.nn.Module or callable, optional
        What the model was exported from. It is called where its parameters lie, by keyword where
        the parameters of its ``forward`` have the names of the model's inputs, else in the order
        of the inputs. It computes as after ``eval()``, as it is exported.
    providers : sequence, optional
        ONNX Runtime's, which also say where torch computes; by default CUDA where both runtimes
        have it, else the CPU.
    tf32 : bool, optional
        Whether both may use TF32 for float32 matrix products on CUDA. By default each does what
        it does when told nothing: ONNX Runtime uses it, torch follows its own switch (off).
    sizes : mapping of str to int, optional
        Symbolic dimension -> size, for inputs that are drawn. Others are drawn from 2 to 8; one
        that is written as a sum of others ("past + sequence") is a dimension of its own.
    seed : int
        Seed of what is drawn.
    calibration : int or sequence of mappings, optional
        The feeds, beside those of the comparison, from whose differences the tolerances come
        (:func:`~roundoff.compare.calibrated_tolerance`): how many to draw, 0 for none, or feeds of
        your own, 15 or more. Each is run by both runtimes and the module. By default 299, which
        need no assumption about the tail of the differences; 32 where a run has more than two
        million multiplications. Where *feeds* are given the values of each are drawn from its own,
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
        the module draws random numbers, or its inputs or outputs are not the model's.

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
    if not proto.graph.output:
        raise ModelError("the model has no outputs", got="0", expected="at least one to compare")
    if tf32 is not None:
        check_flag("tf32", tf32)
    check_whole("seed", seed, 0, 2**63 - 1)
    check_calibration(calibration)
    if module is not None:
        check_module(module)
    if providers is None:
        usable = torch.cuda.is_available() and available([CUDA])
        providers = [CUDA] if usable else [CPU]
    providers = check_providers(providers)
    if feeds is None:
        optional = {t.name for t in proto.graph.initializer}
        inputs = [i for i in proto.graph.input if i.name not in optional]
        shapes = drawn_shapes(inputs, sizes, seed)
    else:
        if sizes is not None:
            raise ArgumentError("sizes are for inputs that are drawn", hint="leave out feeds")
        feeds = _checked(proto, feeds, "feeds")
        shapes = {name: tuple(getattr(value, "shape", ())) for name, value in feeds.items()}
    if calibration is not None and not isinstance(calibration, int):
        calibration = [_checked(proto, fed, "calibration") for fed in calibration]
    _check_memory(proto, shapes)
    setup = _Setup(proto, proto if folder is None else model, providers, tf32)
    return setup.compare(feeds, shapes, seed, module, calibration)


def _checked(proto: onnx.ModelProto, feeds: Any, what: str) -> dict[str, Any]:
    """Feeds as values of the evaluator, of the names, types and shapes that the model declares."""
    given = check_mapping(what, feeds, "input names to tensors")
    values = {name: to_value(value) for name, value in given.items()}
    check_declared(proto, values)
    return values


def _check_memory(proto: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse what does not fit in the host's memory: the float64 of the weights and of the feeds.

    Raises
    ------
    ModelSizeError
    """
    sizes = [*shapes.values(), *(tensor.dims for tensor in proto.graph.initializer)]
    needed, free = 8 * sum(map(math.prod, sizes)), free_memory()
    if needed > free:
        raise ModelSizeError(
            "the comparison of this model would not fit in memory",
            got=f"over {needed / 2**30:.3g} GiB",
            expected=f"at most {free / 2**30:.3g} GiB",
            hint="a machine with more memory, smaller feeds, or a part of the model: "
            "onnx.utils.extract_model",
        )


@contextlib.contextmanager
def _running(drawn: bool) -> Iterator[None]:
    """What fails while drawn feeds run may be due to them; what fails before is not."""
    try:
        yield
    except (ModelError, ShapeError) as error:
        if drawn and error.hint is None:
            error.hint = "feeds= that the model takes, or sizes= of its dimensions"
        raise


def _without_truth(error: UnsupportedError) -> UnsupportedError:
    return UnsupportedError(
        f"no float64 truth of this model: {error.message}",
        got=error.got,
        hint="to compare the two without a truth: max_diff of what "
        "TorchOnnxEvaluator(model).run(feeds) and session(model).run(feeds) give",
    )


def _work(step: Step) -> int:
    """About how many multiplications a node takes."""
    shapes = [getattr(x, "shape", ()) for x in step.inputs]
    size = sum(math.prod(getattr(x, "shape", ())) for x in step.outputs)
    if step.node.op_type in ("MatMul", "Gemm", "MatMulInteger") and shapes[0]:
        return size * max(shapes[0])
    if "Conv" in step.node.op_type and len(shapes) > 1:
        return size * math.prod(shapes[1][1:])
    return size


@dataclasses.dataclass
class _Setup:
    """One model, and the providers and switches with which each runtime runs it."""

    proto: onnx.ModelProto
    model: Any  # what each run reads: a path where there is one
    providers: list[tuple[str, dict[str, Any]]]
    tf32: bool | None

    def __post_init__(self) -> None:
        (name, options), *others = self.providers
        self.cuda = name == CUDA
        self.torch_tf32 = self.cuda and (torch_tf32() if self.tf32 is None else self.tf32)
        self.ort_tf32 = self.cuda and self.tf32 is not False
        if self.cuda:  # sessions of single nodes get the switch of the whole one
            self.ort_tf32 = str(options.get("use_tf32", int(self.ort_tf32))) in ("1", "True")
            self.providers = [(name, {**options, "use_tf32": int(self.ort_tf32)}), *others]

    def evaluator(self, **options: Any) -> TorchOnnxEvaluator:
        return TorchOnnxEvaluator(self.model, self.providers, **options)

    def session(self, optimization: str = "all") -> Any:
        """One session of the whole model."""
        try:
            return session(self.model, self.providers, optimization=optimization)
        except UnsupportedError as error:
            error.hint = error.hint or "another provider, or the model in another element type"
            raise

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        return torch_precision(self.torch_tf32) if self.cuda else contextlib.nullcontext()

    def compare(
        self,
        feeds: Mapping[str, Any] | None,
        shapes: Mapping[str, tuple[int, ...]],
        seed: int,
        module: Any,
        calibration: Any,
    ) -> RuntimeComparison:
        import pandas

        fed, frame, truth, results, device = self._by_node(feeds, shapes, seed)
        names = [o.name for o in self.proto.graph.output]
        inputs = [i.name for i in self.proto.graph.input]
        if module is not None:
            with self.inside():
                results["module"] = without_draws(module, inputs, fed, device, names)
            check_outputs(names, results["torch"], results["module"])
        quantization = self._quantization(fed, truth, module, results.get("module"))
        rows = [
            _output_row(name, true, {side: values[k] for side, values in results.items()})
            for k, (name, true) in enumerate(zip(names, truth, strict=True))
        ]
        same = module is not None and quantization is None and not _is_elsewhere(rows)
        if same or module is None or quantization is not None:
            tolerances = self._tolerances(
                feeds, fed, shapes, seed, module if same else None, calibration, results, device
            )
        else:
            reason = "the ONNX model does not compute what the module does"
            tolerances = {name: CalibratedTolerance(reason=reason) for name in names}
        for row in rows:
            row["rtol"], row["atol"] = (
                getattr(tolerances[row["output"]], k) for k in ("rtol", "atol")
            )
        columns = [c for c in OUTPUT_COLUMNS if module is not None or "module" not in c]
        outputs = pandas.DataFrame(rows, columns=columns)
        differs = bool((outputs["session abs"] != 0).any())
        level = self._level(fed, results["nodes"]) if differs else None
        tf32 = (self.torch_tf32, self.ort_tf32)
        advice = Advice(
            frame,
            outputs,
            tf32,
            level,
            module,
            device,
            tolerances,
            quantization,
            _odd(fed, bool(outputs["non-finite truth"].any())),
            _is_elsewhere(rows),
        )
        types = ", ".join(sorted({row["type"].partition("[")[0] for row in rows}))
        where = (
            f"{self.proto.graph.name or 'a model'}, {types}, {device}: "
            f"torch {torch.__version__}, ONNX Runtime {onnxruntime.__version__}"
        )
        return RuntimeComparison(
            frame, outputs, advice.sentences(), where, tolerances, quantization
        )

    def _by_node(
        self, feeds: Mapping[str, Any] | None, shapes: Mapping[str, tuple[int, ...]], seed: int
    ) -> tuple[Mapping[str, Any], Any, list[Any], dict[str, list[Any]], torch.device]:
        """Feeds, the table of nodes, the true outputs, those of each side, and the device.

        The evaluators and their copies of the weights end here.
        """
        first, drawn = self.evaluator(), feeds is None
        if feeds is None:
            feeds = self._draw(first, shapes, seed)
        check_drawing(first)
        whole = self.session()
        with _running(drawn):
            results = {"ORT": whole.run(feeds)}
        del whole  # and its copy of the weights
        second = self.evaluator(kernels=("ort", "torch", "reference"))
        try:
            true = self.evaluator(truth=True)
        except UnsupportedError as error:  # of an operator without a kernel in float64
            raise _without_truth(error) from error
        with _running(drawn), self.inside():
            try:
                nodes = localize(first, second, feeds, truth=true).frame
            except UnsupportedError as error:  # of these values, which only a run shows
                raise (_without_truth(error) if "is no truth" in str(error) else error) from error
            results["torch"], results["nodes"], truth = (
                evaluator.run(None, feeds) for evaluator in (first, second, true)
            )
        frame = nodes[list(SOURCES.values())].set_axis(list(SOURCES), axis=1)
        return feeds, frame, truth, results, first.settings.device

    def _draw(
        self, evaluator: TorchOnnxEvaluator, shapes: Mapping[str, tuple[int, ...]], seed: int
    ) -> dict[str, Any]:
        inputs = {i.name: i for i in self.proto.graph.input}
        return draw(inputs, shapes, limits(evaluator, shapes), seed)

    def _level(self, feeds: Mapping[str, Any], nodes: list[Any]) -> str:
        """The first level of graph optimisation whose session differs from its nodes."""
        for level in ("none", "basic", "extended", "layout"):
            if max_diff(nodes, self.session(level).run(feeds))["abs"] != 0:
                return level
        return "all"

    def _quantization(
        self, feeds: Mapping[str, Any], truth: list[Any], module: Any, results: list[Any] | None
    ) -> Quantization | None:
        if not is_quantized(self.proto):
            return None
        proto = onnx.load(self.model) if self.model is not self.proto else self.proto
        return quantization_cost(proto, feeds, truth, module, results)

    def _tolerances(
        self,
        given: Mapping[str, Any] | None,
        fed: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        seed: int,
        module: Any,
        calibration: Any,
        results: Mapping[str, list[Any]],
        device: torch.device,
    ) -> dict[str, CalibratedTolerance]:
        """Of each output, from how the runtimes and the module differ on more feeds."""
        names = [o.name for o in self.proto.graph.output]
        if calibration == 0:
            told = CalibratedTolerance(reason="none was calibrated: calibration=0")
            return dict.fromkeys(names, told)
        evaluator, whole = self.evaluator(), self.session()
        if calibration is None:
            work = sum(map(_work, evaluator.steps(fed)))
            calibration = _OF_SMALL if work <= _SMALL else _OF_LARGE
        inputs = [i.name for i in self.proto.graph.input]

        def run(feeds: Mapping[str, Any]) -> list[list[tuple[Any, Any]]]:
            with self.inside():
                sides = [evaluator.run(None, feeds)]
                if module is not None:
                    sides.append(call_module(module, inputs, feeds, device, names))
            return _paired(sides, whole.run(feeds))

        sides = [results["torch"], *([results["module"]] if module is not None else [])]
        first = _paired(sides, results["ORT"])
        if not isinstance(calibration, int):
            return calibrate(run, names, first, calibration, False)
        if given is None:
            seeds = (1_000_003 * (k + 1) + seed for k in range(calibration))
            more = (self._draw(evaluator, shapes, s % 2**63) for s in seeds)
            return calibrate(run, names, first, more, False)
        tables = set(limits(evaluator, shapes))
        if not varied(fed, tables):
            told = CalibratedTolerance(
                reason="the feeds have no values to draw others from: give calibration=[feeds, …]"
            )
            return dict.fromkeys(names, told)
        return calibrate(run, names, first, alike(fed, tables, calibration, seed), True)


def _paired(sides: Sequence[list[Any]], expected: list[Any]) -> list[list[tuple[Any, Any]]]:
    """For each output the pairs (torch, ORT) and (module, ORT)."""
    return [[(side[k], other) for side in sides] for k, other in enumerate(expected)]


def _odd(feeds: Mapping[str, Any], reached: bool) -> list[str]:
    """Inputs that hold NaN, or an infinity where some *reached* an output: masks of −inf do not."""
    return [
        name
        for name, value in feeds.items()
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and (value.isnan().any() or (reached and value.isinf().any()))
    ]


def _is_elsewhere(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the module's error is far above that of the model, which torch runs, too.

    ONNX Runtime's error says nothing here: TF32 makes it large by itself.
    """
    if any(row.get("module off", 0.0) > _OFF and "float64" in row["type"] for row in rows):
        return True  # no truth is more precise than float64, but this is no rounding of it
    known = [row for row in rows if not math.isnan(row.get("error module", math.nan))]
    if not known:
        return False
    most = max((e for row in known if not math.isnan(e := row["error torch"])), default=0.0)
    return bool(max(row["error module"] for row in known) > _ELSEWHERE * max(most, 1.0))


def _output_row(name: str, truth: Any, results: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"output": name, "type": type_name(results["torch"])}
    row["abs"] = _distance(results["torch"], results["ORT"])
    row["session abs"] = _distance(results["nodes"], results["ORT"])
    for side in ("torch", "ORT", "module"):
        if side in results:
            value = results[side]
            if side == "module":
                # A module that computes in a wider type than the model is measured in the model's.
                value = in_type_of(results["torch"], value)
            row[f"error {side}"], row[f"rms {side}"] = scaled(truth, value)
    if "module" in results:
        row["module off"] = over_rms(truth, results["module"])[0]
    row["nearer"] = _nearer(row, truth, results)
    if "module" in results:
        row["module abs"] = _distance(results["torch"], results["module"])
    sides = {"truth": truth, "torch": results["torch"], "ORT": results["ORT"]}
    row |= {f"non-finite {side}": non_finite(value) for side, value in sides.items()}
    row["elements"] = _elements(results["torch"])
    return row


def _elements(value: Any) -> int:
    return sum(t.numel() for t in tree_leaves(value) if isinstance(t, torch.Tensor))


def _distance(one: Any, other: Any) -> float:
    return float(max_diff(one, other)["abs"])


def _nearer(row: Mapping[str, Any], truth: Any, results: Mapping[str, Any]) -> str:
    if _is_undefined(row):
        return "neither"
    errors = [float(row[f"rms {side}"]) for side in ("torch", "ORT")]
    if min(errors) == math.inf:  # both overflow
        return "neither"
    if row["abs"] == 0 or "float64" in row["type"]:  # the truth is no more precise
        return "equal"
    if all(math.isnan(e) for e in errors):  # not floating: the sum of absolute errors
        errors = [float(max_diff(truth, results[side])["sum"]) for side in ("torch", "ORT")]
    errors = [math.inf if math.isnan(e) else e for e in errors]
    if max(errors) <= _EQUAL * min(errors):
        return "equal"
    return "torch" if errors[0] < errors[1] else "ORT"


def _is_undefined(row: Mapping[str, Any]) -> bool:
    """Whether a floating output is NaN or infinite in float64, or in both runtimes, altogether."""
    everywhere = [math.isnan(row[f"rms {side}"]) for side in ("torch", "ORT")]
    floating = row["type"].partition("[")[0] in ("float32", "float16", "bfloat16")
    return floating and all(everywhere) and not row["type"].endswith("[0]")
