"""Runs of one model by torch, by ONNX Runtime and in float64, and their comparison."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch

from roundoff.compare import max_diff, round_up
from roundoff.errors import ArgumentError, ModelError, ShapeError, UnsupportedError
from roundoff.evaluator import Step, TorchOnnxEvaluator
from roundoff.evaluator.loading import read
from roundoff.evaluator.values import to_value, type_name
from roundoff.localization import Runner, localize, scaled
from roundoff.ort import available, session, torch_tf32
from roundoff.ort.tensors import onnxruntime
from roundoff.timing import torch_precision

from .advice import Advice
from .feeds import check_feeds, draw, drawn_shapes, limits
from .memory import check_memory, has_external
from .module import call_module, check_module, check_outputs
from .result import OUTPUT_COLUMNS, SOURCES, RuntimeComparison

__all__ = ["compare_runtimes"]

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
#: Two errors are called equal when the larger is at most this many times the smaller.
_EQUAL = 1.1


def compare_runtimes(
    model: Any,
    feeds: Mapping[str, Any] | None = None,
    *,
    module: Any = None,
    providers: Sequence[Any] | None = None,
    tf32: bool | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    memory_gib: float | None = None,
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
        of the inputs.
    providers : sequence, optional
        ONNX Runtime's, which also say where torch computes; by default CUDA where both runtimes
        have it, else the CPU.
    tf32 : bool, optional
        Whether both may use TF32 for float32 matrix products on CUDA. By default each does what
        it does when told nothing: ONNX Runtime uses it, torch follows its own switch (off).
    sizes : mapping of str to int, optional
        Symbolic dimension -> size, for inputs that are drawn. Others are drawn from 2 to 8.
    seed : int
        Seed of what is drawn.
    memory_gib : float, optional
        Memory that the comparison may use; by default what the machine has free.

    Returns
    -------
    RuntimeComparison

    Raises
    ------
    ModelError
        The model can't be read, is not valid, or lacks its external data.
    ModelSizeError
        The comparison would not fit in memory; known before anything large is allocated.
    UnsupportedError
        An operator has no kernel, or an input can't be drawn.
    ArgumentError, DtypeError, ShapeError
        A feed is missing, unknown, or not what the model declares; or the module's inputs or
        outputs are not the model's.

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
    ['Nothing: every node and every output has equal bits in both.']
    """
    proto, folder = read(model)
    if not isinstance(proto, onnx.ModelProto):
        raise ModelError(
            "not a model", got=type(model).__name__, expected="path, bytes, ModelProto"
        )
    if module is not None:
        check_module(module)
    providers = _providers(providers)
    if feeds is None:
        optional = {t.name for t in proto.graph.initializer}
        inputs = [i for i in proto.graph.input if i.name not in optional]
        shapes = drawn_shapes(inputs, sizes, seed)
    else:
        if sizes is not None:
            raise ArgumentError("sizes are for inputs that are drawn", hint="leave out feeds")
        feeds = {name: to_value(value) for name, value in feeds.items()}
        check_feeds(proto, feeds)
        shapes = {name: tuple(getattr(value, "shape", ())) for name, value in feeds.items()}
    check_memory(proto, shapes, _is_cuda(providers), memory_gib)
    # All evaluators share one proto; data in other files is only reachable by the path.
    shared = model if folder is not None and has_external(proto) else proto
    setup = _Setup(proto, shared, proto if folder is None else model, providers, tf32)
    try:
        return setup.compare(feeds, shapes, seed, module)
    except (ModelError, ShapeError, UnsupportedError) as error:
        if feeds is None and error.hint is None:
            error.hint = "feeds= that the model takes, or sizes= of its dimensions"
        raise


def _providers(providers: Sequence[Any] | None) -> Sequence[Any]:
    if providers is not None:
        return providers
    return [CUDA] if torch.cuda.is_available() and available([CUDA]) else [CPU]


def _is_cuda(providers: Sequence[Any]) -> bool:
    first = providers[0] if providers else ""
    return (first if isinstance(first, str) else first[0]) == CUDA


class _Recorded(Runner):
    """A runner that keeps the model's outputs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kept: dict[str, Any] = {}

    def steps(self, feeds: Mapping[str, Any]) -> Iterator[Step]:
        names = set(self.evaluator.output_names)
        for step in super().steps(feeds):
            pairs = zip(step.node.outputs, step.outputs, strict=False)
            self.kept.update((n, x) for n, x in pairs if n in names)
            yield step

    def outputs(self, feeds: Mapping[str, Any]) -> list[Any]:
        """In order; those of no node (an input, a constant) need another run."""
        names = self.evaluator.output_names
        absent = [n for n in names if n not in self.kept]
        if absent:
            self.kept.update(zip(absent, self.evaluator.run(absent, feeds), strict=True))
        return [self.kept[n] for n in names]


@dataclasses.dataclass
class _Setup:
    """One model, and the providers and switches with which each runtime runs it."""

    proto: onnx.ModelProto
    model: Any  # what evaluators read
    file: Any  # what ONNX Runtime reads: a path where there is one
    providers: Sequence[Any]
    tf32: bool | None

    def __post_init__(self) -> None:
        self.cuda = _is_cuda(self.providers)
        self.torch_tf32 = self.cuda and (torch_tf32() if self.tf32 is None else self.tf32)
        self.ort_tf32 = self.cuda and self.tf32 is not False
        if self.cuda:  # sessions of single nodes get the switch of the whole one
            first, *others = self.providers
            name, options = (first, {}) if isinstance(first, str) else first
            self.ort_tf32 = str(options.get("use_tf32", int(self.ort_tf32))) in ("1", "True")
            self.providers = [(name, {**options, "use_tf32": int(self.ort_tf32)}), *others]

    def evaluator(self, **options: Any) -> TorchOnnxEvaluator:
        return TorchOnnxEvaluator(self.model, self.providers, **options)

    def session(self, feeds: Mapping[str, Any], optimization: str = "all") -> list[Any]:
        """Outputs of one session of the whole model."""
        try:
            whole = session(self.file, self.providers, optimization=optimization)
        except UnsupportedError as error:
            error.hint = error.hint or "another provider, or the model in another element type"
            raise
        return whole.run(feeds)

    def inside(self) -> contextlib.AbstractContextManager[Any]:
        return torch_precision(self.torch_tf32) if self.cuda else contextlib.nullcontext()

    def compare(
        self, feeds: Mapping[str, Any] | None, shapes: Mapping[str, tuple[int, ...]], seed: int,
        module: Any,
    ) -> RuntimeComparison:  # fmt: skip
        fed, frame, truth, results, device = self._by_node(feeds, shapes, seed)
        names = [o.name for o in self.proto.graph.output]
        if module is not None:
            inputs = [i.name for i in self.proto.graph.input]
            with self.inside():
                results["module"] = call_module(module, inputs, fed, device)
            check_outputs(names, results["torch"], results["module"])
        rows = [
            _output_row(name, true, {side: values[k] for side, values in results.items()})
            for k, (name, true) in enumerate(zip(names, truth, strict=True))
        ]
        columns = [c for c in OUTPUT_COLUMNS if module is not None or "module" not in c]
        import pandas

        outputs = pandas.DataFrame(rows, columns=columns)
        differs = bool((outputs["session abs"] != 0).any())
        level = self._level(fed, results["nodes"]) if differs else None
        tf32 = (self.torch_tf32, self.ort_tf32)
        advice = Advice(frame, outputs, tf32, level, module, device).sentences()
        types = ", ".join(sorted({row["type"].partition("[")[0] for row in rows}))
        where = (
            f"{self.proto.graph.name or 'a model'}, {types}, {device}: "
            f"torch {torch.__version__}, ONNX Runtime {onnxruntime.__version__}"
        )
        return RuntimeComparison(frame, outputs, advice, where)

    def _by_node(
        self, feeds: Mapping[str, Any] | None, shapes: Mapping[str, tuple[int, ...]], seed: int
    ) -> tuple[Mapping[str, Any], Any, list[Any], dict[str, list[Any]], torch.device]:
        """Feeds, the table of nodes, the true outputs, those of each side, and the device.

        The evaluators and their copies of the weights end here.
        """
        first = self.evaluator()
        if feeds is None:
            inputs = {i.name: i for i in self.proto.graph.input}
            feeds = draw(inputs, shapes, limits(first, shapes), seed)
        results = {"ORT": self.session(feeds)}
        runners = [
            _Recorded("torch", first, self.inside),
            _Recorded("ORT", self.evaluator(kernels=("ort", "torch", "reference"))),
        ]
        true = _Recorded("truth", self.evaluator(truth=True))
        nodes = localize(runners[0], runners[1], feeds, truth=true).frame
        frame = nodes[list(SOURCES.values())].set_axis(list(SOURCES), axis=1)
        results["torch"], results["nodes"], truth = (r.outputs(feeds) for r in (*runners, true))
        return feeds, frame, truth, results, first.settings.device

    def _level(self, feeds: Mapping[str, Any], nodes: list[Any]) -> str:
        """The first level of graph optimisation whose session differs from its nodes."""
        for level in ("none", "basic", "extended", "layout"):
            if max_diff(nodes, self.session(feeds, level))["abs"] != 0:
                return level
        return "all"


def _output_row(name: str, truth: Any, results: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"output": name, "type": type_name(results["torch"])}
    row["abs"] = _distance(results["torch"], results["ORT"])
    row["session abs"] = _distance(results["nodes"], results["ORT"])
    for side in ("torch", "ORT", "module"):
        if side in results:
            row[f"error {side}"], row[f"rms {side}"] = scaled(truth, results[side])
    worst = max(_distance(truth, results[side]) for side in ("torch", "ORT"))
    row["atol"] = round_up(2 * worst) if worst >= 0 else math.nan
    row["nearer"] = _nearer(row, truth, results)
    if "module" in results:
        row["module abs"] = _distance(results["torch"], results["module"])
    return row


def _distance(one: Any, other: Any) -> float:
    return float(max_diff(one, other)["abs"])


def _nearer(row: Mapping[str, Any], truth: Any, results: Mapping[str, Any]) -> str:
    if row["abs"] == 0:
        return "equal"
    errors = [float(row[f"rms {side}"]) for side in ("torch", "ORT")]
    if "float64" in row["type"]:  # the truth is no more precise
        return "equal"
    if all(math.isnan(e) for e in errors):  # not floating: the sum of absolute errors
        errors = [float(max_diff(truth, results[side])["sum"]) for side in ("torch", "ORT")]
    errors = [math.inf if math.isnan(e) else e for e in errors]
    if max(errors) <= _EQUAL * min(errors):
        return "equal"
    return "torch" if errors[0] < errors[1] else "ORT"
