"""Which node differs first: two ways to run one model, node by node, as data.

Three questions have three answers. The *isolated* difference of a node is what its two kernels
give on the same inputs: the kernel's own part. The *propagated* difference is what the two runs
have come to at that node, each on its own inputs. The errors against *truth*, the same model in
float64, say which of the two is nearer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .compare import Difference, leaves, max_diff, scaled_error
from .errors import ArgumentError

if TYPE_CHECKING:
    import pandas

    from .evaluator import Step, TorchOnnxEvaluator

__all__ = ["COLUMNS", "Localization", "Way", "localize"]

#: Columns of the table, in order.
COLUMNS = (
    "node", "op", "outputs", "kernel first", "kernel second",
    "isolated abs", "isolated ulp", "isolated bias",
    "propagated abs", "propagated ulp", "propagated bias",
    "own error first", "own error second",
    "truth abs first", "truth abs second", "truth ulp first", "truth ulp second",
    "truth bias first", "truth bias second",
    "largest first", "largest second", "largest truth",
    "non-finite first", "non-finite second", "non-finite truth",
    "isolated scaled", "propagated scaled", "own scaled first", "own scaled second",
    "truth scaled first", "truth scaled second",
)  # fmt: skip


@dataclasses.dataclass
class Way:
    """One way to run a model.

    Parameters
    ----------
    name : str
        What tables call it.
    evaluator : TorchOnnxEvaluator
        The model with its kernels, on its device.
    context : callable, optional
        Gives a context manager in which nodes run, such as a switch of torch.
    dtype : torch.dtype, optional
        Floating feeds are converted to it.

    Examples
    --------
    >>> from roundoff.evaluator import TorchOnnxEvaluator
    >>> from roundoff.models import residual_rms_norm
    >>> half = Way("float16", TorchOnnxEvaluator(residual_rms_norm(10)), dtype=torch.float16)
    >>> half.feeds({"X": torch.ones(1, 1, 2)})["X"].dtype
    torch.float16
    """

    name: str
    evaluator: TorchOnnxEvaluator
    context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    dtype: torch.dtype | None = None

    def feeds(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """The feeds in this way's type."""
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
        return self.context() if self.context else contextlib.nullcontext()

    def run_node(self, index: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """One node on given inputs, inside the context."""
        with self._inside():
            return self.evaluator.run_node(index, inputs)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return value
    if not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value)
    return value.to(dtype) if value.is_floating_point() else value


@dataclasses.dataclass
class Localization:
    """The result of :func:`roundoff.localize.localize`.

    Attributes
    ----------
    frame : pandas.DataFrame
        A row a node, in execution order, with the columns of ``COLUMNS``:

        - ``isolated …`` and ``propagated …``: of the second way against the first; ``bias`` is
          the mean of second − first;
        - ``own error …``: largest error of each kernel against float64 on the same inputs, in
          units in the last place of its type;
        - ``truth …``: errors of the two runs against the run in float64;
        - ``largest …``: largest magnitude among the finite outputs, and ``non-finite …`` how many
          outputs are NaN or infinite;
        - ``… scaled``: the same differences and errors in units of eps × RMS, as
          :func:`roundoff.compare.scaled_error` has them; NaN where no output is floating.

        What needs the truth is NaN without one.
    names : (str, str)
        Of the first and the second way.

    Examples
    --------
    >>> from roundoff.evaluator import MatMulOrt, TorchOnnxEvaluator
    >>> from roundoff.models import layer_norm_feeds, layer_norm_matmul
    >>> feeds = {name: value.float() for name, value in layer_norm_feeds(4, 8).items()}
    >>> model, swapped = layer_norm_matmul(), {("", "MatMul"): MatMulOrt}
    >>> other = TorchOnnxEvaluator(model, custom_kernels=swapped)
    >>> found = localize(TorchOnnxEvaluator(model), other, feeds)
    >>> found.frame["op"].tolist(), found.first_non_finite() is None
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
            When there is no such column.
        """
        if column not in self.frame:
            raise ArgumentError("no such column", got=column, expected=", ".join(COLUMNS))
        for row in self.frame.to_dict("records"):
            value = row[column]
            if not abs(value) <= threshold:
                return row
        return None

    def first_non_finite(self) -> Mapping[str, Any] | None:
        """Row of the first node of which either way gives a NaN or an infinity."""
        for row in self.frame.to_dict("records"):
            if row["non-finite first"] or row["non-finite second"]:
                return row
        return None

    def numbers(self, column: str) -> dict[str, float]:
        """First output of each node -> value, as :func:`roundoff.graph.plot_dot` takes it."""
        pairs = zip(self.frame["outputs"], self.frame[column], strict=True)
        return {outputs.split(", ")[0]: float(value) for outputs, value in pairs}


def localize(
    first: Way | TorchOnnxEvaluator,
    second: Way | TorchOnnxEvaluator,
    feeds: Mapping[str, Any],
    *,
    truth: Way | TorchOnnxEvaluator | None = None,
) -> Localization:
    """Run a model two ways side by side and compare them node by node.

    Parameters
    ----------
    first, second : Way or TorchOnnxEvaluator
        Evaluators of one model, or of two with the same nodes in other types. They may differ in
        kernels, device, element type and switches. The inputs of the isolated comparison are the
        first way's, converted to the second's types: give the narrower type first, which makes
        that conversion exact.
    feeds : mapping of str to tensor
        Inputs of the model.
    truth : Way or TorchOnnxEvaluator, optional
        The model with ``truth=True``.

    Raises
    ------
    ArgumentError
        When the two do not have the same nodes.

    Examples
    --------
    >>> import onnx.parser
    >>> from roundoff.evaluator import MatMulOrt, TorchOnnxEvaluator
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 18]>
    ... g (float[2, 2] X) => (float[2, 2] Z) { Y = MatMul(X, X)  Z = Neg(Y) }''')
    >>> ours = TorchOnnxEvaluator(model)
    >>> other = TorchOnnxEvaluator(model, custom_kernels={("", "MatMul"): MatMulOrt})
    >>> found = localize(ours, other, {"X": torch.eye(2)})
    >>> found.frame[["op", "kernel second", "isolated abs"]].values.tolist()
    [['MatMul', 'MatMulOrt', 0.0], ['Neg', 'torch', 0.0]]
    """
    ways = [
        w if isinstance(w, Way) else Way(n, w) for w, n in ((first, "first"), (second, "second"))
    ]
    _check_same(ways[0].evaluator, ways[1].evaluator)
    exact = truth if isinstance(truth, Way) or truth is None else Way("truth", truth)
    if exact is not None:
        _check_same(ways[0].evaluator, exact.evaluator)
    streams = [w.steps(feeds) for w in ways]
    # The truth starts from what the narrower way is fed, so that no feed is rounded for it alone.
    true_steps = exact.steps(ways[0].feeds(feeds)) if exact is not None else None
    rows = []
    for index, (one, other) in enumerate(zip(*streams, strict=True)):
        true = next(true_steps) if true_steps is not None else None
        rows.append(_row(index, ways, one, other, exact, true))
    import pandas

    frame = pandas.DataFrame(rows, columns=list(COLUMNS))
    return Localization(frame, (ways[0].name, ways[1].name))


def _check_same(one: TorchOnnxEvaluator, other: TorchOnnxEvaluator) -> None:
    found = [[(n.operator, tuple(n.outputs)) for n in e.nodes] for e in (one, other)]
    if found[0] == found[1]:
        return
    apart = [(a, b) for a, b in zip(*found, strict=False) if a != b]
    got = (
        f"{apart[0][0]} and {apart[0][1]}"
        if apart
        else f"{len(found[0])} and {len(found[1])} nodes"
    )
    raise ArgumentError(
        "the two evaluators run different nodes", got=got, expected="one model, run two ways",
        hint="two models of different types must have the same nodes with the same result names",
    )  # fmt: skip


def _row(
    index: int, ways: list[Way], one: Step, other: Step, exact: Way | None, true: Step | None
) -> dict[str, Any]:
    shared = tuple(_like(a, b) for a, b in zip(one.inputs, other.inputs, strict=True))
    again = ways[1].run_node(index, shared)
    row: dict[str, Any] = dict.fromkeys(COLUMNS, math.nan)
    row.update(
        {
            "node": one.node.label, "op": one.node.operator,
            "outputs": ", ".join(n for n in one.node.outputs if n),
            "kernel first": one.kernel, "kernel second": other.kernel,
        }
    )  # fmt: skip
    for name, difference in (
        ("isolated", _compare(one.outputs, again)),
        ("propagated", _compare(one.outputs, other.outputs)),
    ):
        row[f"{name} abs"], row[f"{name} ulp"] = difference["abs"], _ulp(difference)
        row[f"{name} bias"] = difference["bias"]
    row["isolated scaled"] = scaled(one.outputs, again)[0]
    row["propagated scaled"] = scaled(one.outputs, other.outputs)[0]
    for name, outputs in (("first", one.outputs), ("second", other.outputs)):
        row[f"largest {name}"], row[f"non-finite {name}"] = _extent(outputs)
    if exact is None or true is None:
        return row
    ideal = exact.run_node(index, one.inputs)
    row["largest truth"], row["non-finite truth"] = _extent(true.outputs)
    for name, outputs, own in (("first", one.outputs, one.outputs),
                               ("second", other.outputs, again)):  # fmt: skip
        error = _compare(true.outputs, outputs)
        row[f"truth abs {name}"], row[f"truth ulp {name}"] = error["abs"], _ulp(error)
        row[f"truth bias {name}"] = error["bias"]
        row[f"own error {name}"] = _ulp(_compare(ideal, own))
        row[f"truth scaled {name}"] = scaled(true.outputs, outputs)[0]
        row[f"own scaled {name}"] = scaled(ideal, own)[0]
    return row


def _like(value: Any, other: Any) -> Any:
    """*value* in the element type of *other*."""
    tensors = isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
    return value.to(other.dtype) if tensors and value.dtype != other.dtype else value


def _compare(expected: tuple[Any, ...], got: tuple[Any, ...]) -> Difference:
    return max_diff(list(expected), list(got))


def _ulp(difference: Difference) -> float:
    """Units against a truth where there is one, else the distance; NaN where there is neither."""
    units = difference.get("err_ulp", difference["ulp"])
    return math.nan if units is None else float(units)


def scaled(truth: Any, got: Any) -> tuple[float, float]:
    """Largest and RMS error of the floating tensors of two nests, in units of eps × RMS.

    That of the worst tensor; NaN where none is floating and narrower than float64. An infinity or
    NaN that both have in one place is no error; any other one is infinite.
    """
    found = [
        _scaled(t, g)
        for t, g in zip(leaves(truth), leaves(got), strict=False)
        if isinstance(t, torch.Tensor) and isinstance(g, torch.Tensor)
        and t.is_floating_point() and g.is_floating_point()
        and g.dtype != torch.float64 and t.shape == g.shape
    ]  # fmt: skip
    if not found:
        return math.nan, math.nan
    return max(largest for largest, _ in found), max(rms for _, rms in found)


def _scaled(truth: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    truth = truth.to(torch.float64)
    finite = truth.isfinite()
    if not bool(finite.all()):
        t, g = truth[~finite], got[~finite].to(torch.float64)
        if not bool(((t == g) | (t.isnan() & g.isnan())).all()):
            return math.inf, math.inf
        truth, got = truth[finite], got[finite]
    error = scaled_error(truth, got)
    return error.largest, error.rms


def _extent(outputs: tuple[Any, ...]) -> tuple[float, int]:
    """Largest finite magnitude, and the number of values that are not finite."""
    largest, odd = 0.0, 0
    for value in outputs:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        finite = value.isfinite()
        odd += int(value.numel() - finite.sum())
        if bool(finite.any()):
            largest = max(largest, float(value[finite].abs().max()))
    return largest, odd
