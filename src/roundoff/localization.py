"""Which node differs first: two runs of one model, compared node by node, as a table.

The *isolated* difference of a node is between its two kernels on the same inputs. The *propagated*
difference is between the two runs, each on its own inputs. The errors against *truth*, the same
model in float64, say which of the two runs is nearer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .compare import max_diff, scaled_error
from .compare.pieces import float64_pieces
from .describe import tree_leaves
from .dtypes import dtype_info
from .errors import ArgumentError, DtypeError

if TYPE_CHECKING:
    import pandas

    from .evaluator import Step, TorchOnnxEvaluator

__all__ = ["COLUMNS", "Localization", "Runner", "localize"]

#: Columns of the table, in order.
COLUMNS = (
    "node", "op", "outputs", "kernel first", "kernel second",
    "isolated abs", "isolated bias", "isolated scaled",
    "propagated abs", "propagated bias", "propagated scaled",
    "own scaled first", "own scaled second",
    "truth abs first", "truth abs second", "truth bias first", "truth bias second",
    "truth scaled first", "truth scaled second",
    "largest first", "largest second", "largest truth",
    "non-finite first", "non-finite second", "non-finite truth",
)  # fmt: skip


@dataclasses.dataclass
class Runner:
    """A model with its kernels, the type of its feeds, and the context in which its nodes run.

    Parameters
    ----------
    name : str
        Its name in tables.
    evaluator : TorchOnnxEvaluator
        The model with its kernels, on its device.
    context : callable, optional
        Returns a context manager in which nodes run, such as one that sets a switch of torch.
    dtype : torch.dtype, optional
        Type to which floating feeds are converted.

    Raises
    ------
    ArgumentError, DtypeError
        An argument is of another kind.

    Examples
    --------
    >>> import torch
    >>> from roundoff.evaluator import TorchOnnxEvaluator
    >>> from roundoff.localization import Runner
    >>> from roundoff.models import residual_rms_norm
    >>> half = Runner("float16", TorchOnnxEvaluator(residual_rms_norm(10)), dtype=torch.float16)
    >>> half.feeds({"X": torch.ones(1, 1, 2)})["X"].dtype
    torch.float16
    """

    name: str
    evaluator: TorchOnnxEvaluator
    context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        from .evaluator import TorchOnnxEvaluator

        if not isinstance(self.evaluator, TorchOnnxEvaluator):
            raise ArgumentError(
                f"the evaluator of {self.name!r}",
                got=type(self.evaluator).__name__,
                expected="a TorchOnnxEvaluator",
                hint="TorchOnnxEvaluator(model)",
            )
        if self.context is not None and not callable(self.context):
            raise ArgumentError(
                "context",
                got=type(self.context).__name__,
                expected="a function that returns a context manager",
            )
        floating = isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point
        if self.dtype is not None and not floating:
            raise DtypeError("dtype of a Runner", got=repr(self.dtype), expected="a floating type")

    def feeds(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """The feeds, floating ones converted to ``dtype``."""
        if not isinstance(feeds, Mapping):
            raise ArgumentError(
                "feeds", got=type(feeds).__name__, expected="a mapping of input names to tensors"
            )
        return {name: _cast(value, self.dtype) for name, value in feeds.items()}

    def steps(self, feeds: Mapping[str, Any]) -> Iterator[Step]:
        """The evaluator's steps, each run inside the context."""
        running = self.evaluator.steps(self.feeds(feeds))
        while True:
            with self._inside():
                step = next(running, None)
            if step is None:
                return
            yield step

    def _inside(self) -> contextlib.AbstractContextManager[Any]:
        manager = self.context() if self.context else contextlib.nullcontext()
        if not hasattr(manager, "__enter__"):
            raise ArgumentError(
                f"the context of {self.name!r}",
                got=type(manager).__name__,
                expected="a function that returns a context manager",
            )
        return manager

    def run_node(self, index: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Outputs of one node on *inputs*, inside the context."""
        with self._inside():
            return self.evaluator.run_node(index, inputs)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return value
    from .evaluator.values import to_value

    if not isinstance(value, torch.Tensor):
        value = to_value(value)
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(dtype) if value.is_floating_point() else value


@dataclasses.dataclass
class Localization:
    """The result of :func:`roundoff.localization.localize`.

    Attributes
    ----------
    frame : pandas.DataFrame
        A row per node, in execution order, with the columns of ``COLUMNS``:

        - ``isolated …`` and ``propagated …``: differences of the second run from the first;
        - ``own …``: largest error of each kernel against float64 on the same inputs;
        - ``truth …``: errors of the two runs against the run in float64;
        - ``largest …``: largest magnitude among the finite outputs, and ``non-finite …`` how many
          outputs are NaN or infinite.

        ``abs`` is the largest absolute difference, ``bias`` the mean difference, ``scaled`` the
        largest difference in units of eps × RMS (:func:`roundoff.compare.scaled_error`) with the
        eps of the run that is compared, the second where both are; NaN where no output is
        floating. What needs the truth is NaN without one.
    names : (str, str)
        Of the first and the second run.

    Examples
    --------
    >>> from roundoff.evaluator import MatMulOrt, TorchOnnxEvaluator
    >>> from roundoff.localization import localize
    >>> from roundoff.models import layer_norm_feeds, layer_norm_matmul
    >>> feeds = {name: value.float() for name, value in layer_norm_feeds(4, 8).items()}
    >>> model, swapped = layer_norm_matmul(), {("", "MatMul"): MatMulOrt}
    >>> other = TorchOnnxEvaluator(model, custom_kernels=swapped)
    >>> nodes = localize(TorchOnnxEvaluator(model), other, feeds)
    >>> nodes.frame["op"].tolist(), nodes.first_non_finite() is None
    (['LayerNormalization', 'MatMul', 'Add'], True)
    """

    frame: pandas.DataFrame
    names: tuple[str, str]

    def first_beyond(self, column: str, threshold: float) -> Mapping[str, Any] | None:
        """Row of the first node with a value above *threshold* in a column; None where none is.

        NaN counts as above: a difference that cannot be measured is not small.

        Raises
        ------
        ArgumentError
            When there is no such column, it holds no numbers, or *threshold* is not one.
        """
        if column not in list(self.frame):
            raise ArgumentError("no such column", got=repr(column), expected=", ".join(COLUMNS))
        if column in COLUMNS[:5]:
            raise ArgumentError("a column without numbers", got=column, expected="a difference")
        number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
        if not number or math.isnan(threshold):
            raise ArgumentError("threshold", got=repr(threshold), expected="a number")
        for row in self.frame.to_dict("records"):
            value = row[column]
            if not abs(value) <= threshold:
                return row
        return None

    def first_non_finite(self) -> Mapping[str, Any] | None:
        """Row of the first node with a NaN or an infinity in either run."""
        for row in self.frame.to_dict("records"):
            if row["non-finite first"] or row["non-finite second"]:
                return row
        return None


def localize(
    first: Runner | TorchOnnxEvaluator,
    second: Runner | TorchOnnxEvaluator,
    feeds: Mapping[str, Any],
    *,
    truth: Runner | TorchOnnxEvaluator | None = None,
) -> Localization:
    """Run a model in two ways and compare the two runs node by node.

    Parameters
    ----------
    first, second : Runner or TorchOnnxEvaluator
        Evaluators of one model, or of two with the same nodes in other types. They may differ in
        kernels, device, element type and switches. The inputs of the isolated comparison are those
        of the first run, converted to the types of the second: give the narrower type first, so
        that this conversion is exact.
    feeds : mapping of str to tensor
        Inputs of the model.
    truth : Runner or TorchOnnxEvaluator, optional
        The model with ``truth=True``: it computes in float64 throughout.

    Raises
    ------
    ArgumentError
        When the two do not have the same nodes and constants, an argument is of another kind, or
        *truth* does not compute in float64.
    DtypeError, ShapeError, ModelError, UnsupportedError
        As the evaluators raise them.

    Examples
    --------
    >>> import onnx.parser, torch
    >>> from roundoff.evaluator import MatMulOrt, TorchOnnxEvaluator
    >>> from roundoff.localization import localize
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 18]>
    ... g (float[2, 2] X) => (float[2, 2] Z) { Y = MatMul(X, X)  Z = Neg(Y) }''')
    >>> ours = TorchOnnxEvaluator(model)
    >>> other = TorchOnnxEvaluator(model, custom_kernels={("", "MatMul"): MatMulOrt})
    >>> nodes = localize(ours, other, {"X": torch.eye(2)})
    >>> nodes.frame[["op", "kernel second", "isolated abs"]].values.tolist()
    [['MatMul', 'MatMulOrt', 0.0], ['Neg', 'torch', 0.0]]
    """
    import pandas

    one, other = _runner(first, "first"), _runner(second, "second")
    if not isinstance(feeds, Mapping):
        raise ArgumentError(
            "feeds", got=type(feeds).__name__, expected="a mapping of input names to tensors"
        )
    _check_same(one.evaluator, other.evaluator)
    _check_constants(one.evaluator, other.evaluator, feeds)
    steps = zip(one.steps(feeds), other.steps(feeds), strict=True)
    if truth is None:
        rows = [_row(index, other, *pair) for index, pair in enumerate(steps)]
    else:
        true = _runner(truth, "truth")
        _check_truth(true)
        _check_same(one.evaluator, true.evaluator)
        _check_constants(one.evaluator, true.evaluator, feeds)
        # The truth gets the feeds of the first run: those of the narrower type.
        true_steps = true.steps(one.feeds(feeds))
        rows = [
            _row(index, other, *pair, true, step)
            for index, (pair, step) in enumerate(zip(steps, true_steps, strict=True))
        ]
    frame = pandas.DataFrame(rows, columns=list(COLUMNS))
    return Localization(frame, (one.name, other.name))


def _runner(value: Runner | TorchOnnxEvaluator, name: str) -> Runner:
    return value if isinstance(value, Runner) else Runner(name, value)


def _check_truth(runner: Runner) -> None:
    """The evaluator computes in float64 throughout, on feeds that nothing narrows."""
    if not runner.evaluator.settings.truth:
        raise ArgumentError(
            "this truth is none",
            got="an evaluator that computes in the model's types",
            expected="one that computes in float64",
            hint="TorchOnnxEvaluator(model, truth=True)",
        )
    if runner.dtype not in (None, torch.float64):
        raise ArgumentError(
            "the feeds of the truth are rounded", got=str(runner.dtype), expected="no dtype"
        )


def _check_wide(step: Step) -> None:
    """A kernel of the caller's gives float64, too."""
    for value in step.outputs:
        narrow = isinstance(value, torch.Tensor) and value.dtype != torch.float64
        if narrow and value.is_floating_point():
            raise ArgumentError(
                f"node {step.node.label!r} of the truth",
                got=str(value.dtype),
                expected="float64",
                hint="leave its custom kernel out of the truth",
            )


def _check_same(one: TorchOnnxEvaluator, other: TorchOnnxEvaluator) -> None:
    nodes = [[(n.operator, tuple(n.outputs)) for n in e.nodes] for e in (one, other)]
    if nodes[0] == nodes[1]:
        return
    unequal = [f"{a} and {b}" for a, b in zip(*nodes, strict=False) if a != b]
    got = unequal[0] if unequal else f"{len(nodes[0])} and {len(nodes[1])} nodes"
    raise ArgumentError(
        "the two evaluators run different nodes",
        got=got,
        expected="one model, run two ways",
        hint="two models of different types must have the same nodes with the same result names",
    )


def _check_constants(
    one: TorchOnnxEvaluator, other: TorchOnnxEvaluator, feeds: Mapping[str, Any]
) -> None:
    """Weights are those of one model, up to what the coarser of two types rounds.

    A node compared in isolation gets the constants of the first: it would not show the second's.
    """
    for name, value in one._graph.constants.items():
        theirs = other._graph.constants.get(name)
        if theirs is None or name in feeds:
            continue
        difference = _apart(value, theirs)
        if difference:
            raise ArgumentError(
                f"the two evaluators have different constants: {name!r}",
                got=difference,
                expected="one model, run two ways",
                hint="two models of different types must have the same weights",
            )


def _apart(value: Any, other: Any) -> str:
    """How two constants differ beyond the rounding of the coarser type, or nothing."""
    shapes = [tuple(getattr(x, "shape", ())) for x in (value, other)]
    if shapes[0] != shapes[1]:
        return f"shapes {list(shapes[0])} and {list(shapes[1])}"
    tensors = isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
    if not tensors or not (value.is_floating_point() and other.is_floating_point()):
        if tensors and value.dtype == other.dtype and value.device == other.device:
            return "" if torch.equal(value, other) else "other values"
        return "" if max_diff(value, other)["abs"] == 0 else "other values"
    coarse = max((dtype_info(x.dtype) for x in (value, other)), key=lambda info: info.eps)
    least = coarse.tiny * coarse.eps
    same_type, most = value.dtype == other.dtype, 0.0
    for a, b in float64_pieces(value, other):
        gap = (a - b).abs_()
        alike = (a == b) | (a.isnan() & b.isnan())
        if not same_type:  # rounded, or beyond the largest number of the coarser type
            size = torch.minimum(a.abs(), b.abs())
            alike |= gap <= coarse.eps * size + least
            alike |= (size >= coarse.max) & (a.sign() == b.sign())
        if not bool(alike.all()):
            most = max(most, float(torch.nan_to_num(gap[~alike], nan=math.inf).max()))
    return f"values up to {most:.3g} apart" if most else ""


def _row(
    index: int,
    second: Runner,
    one: Step,
    other: Step,
    truth: Runner | None = None,
    true: Step | None = None,
) -> dict[str, Any]:
    shared = tuple(_like(a, b) for a, b in zip(one.inputs, other.inputs, strict=True))
    isolated = second.run_node(index, shared)
    row: dict[str, Any] = dict.fromkeys(COLUMNS, math.nan)
    row |= {
        "node": one.node.label,
        "op": one.node.operator,
        "outputs": ", ".join(n for n in one.node.outputs if n),
        "kernel first": one.kernel,
        "kernel second": other.kernel,
    }
    for name, outputs in (("isolated", isolated), ("propagated", other.outputs)):
        difference = max_diff(list(one.outputs), list(outputs))
        row[f"{name} abs"], row[f"{name} bias"] = difference["abs"], difference["bias"]
        row[f"{name} scaled"] = scaled(one.outputs, outputs)[0]
    for name, outputs in (("first", one.outputs), ("second", other.outputs)):
        row[f"largest {name}"], row[f"non-finite {name}"] = _extent(outputs)
    if truth is None or true is None:
        return row
    _check_wide(true)
    ideal = truth.run_node(index, one.inputs)
    row["largest truth"], row["non-finite truth"] = _extent(true.outputs)
    for name, outputs, own in (
        ("first", one.outputs, one.outputs),
        ("second", other.outputs, isolated),
    ):
        error = max_diff(list(true.outputs), list(outputs))
        row[f"truth abs {name}"], row[f"truth bias {name}"] = error["abs"], error["bias"]
        row[f"truth scaled {name}"] = scaled(true.outputs, outputs)[0]
        row[f"own scaled {name}"] = scaled(ideal, own)[0]
    return row


def _like(value: Any, other: Any) -> Any:
    """*value* in the element type of *other*."""
    tensors = isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
    return value.to(other.dtype) if tensors and value.dtype != other.dtype else value


def scaled(truth: Any, got: Any) -> tuple[float, float]:
    """Largest and RMS error of the floating tensors of two nested structures, in eps × RMS.

    The largest over the tensors; NaN where none is floating and narrower than float64. An infinity
    or NaN that both have in the same place is no error; any other one is an infinite error. Where
    no number of a tensor is finite there is nothing to measure: NaN.
    """
    errors = [
        _scaled(t, g)
        for t, g in zip(tree_leaves(truth), tree_leaves(got), strict=False)
        if isinstance(t, torch.Tensor)
        and isinstance(g, torch.Tensor)
        and t.is_floating_point()
        and g.is_floating_point()
        and g.dtype != torch.float64
        and t.shape == g.shape
    ]
    known = [pair for pair in errors if not math.isnan(pair[0])]
    if not known:
        return math.nan, math.nan
    return max(largest for largest, _ in known), max(rms for _, rms in known)


def _scaled(truth: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    truth = truth.to(torch.float64)
    finite = truth.isfinite()
    if not bool(finite.all()):
        t, g = truth[~finite], got[~finite].to(torch.float64)
        if not bool(((t == g) | (t.isnan() & g.isnan())).all()):
            return math.inf, math.inf
        if not bool(finite.any()):
            return math.nan, math.nan
        truth, got = truth[finite], got[finite]
    error = scaled_error(truth, got)
    return error.largest, error.rms


def _extent(outputs: tuple[Any, ...]) -> tuple[float, int]:
    """Largest finite magnitude, and the number of values that are not finite."""
    largest, non_finite = 0.0, 0
    for value in outputs:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        finite = value.isfinite()
        non_finite += int(value.numel() - finite.sum())
        if bool(finite.any()):
            largest = max(largest, float(value[finite].abs().max()))
    return largest, non_finite
