"""Which node differs first: two runs of one model, compared node by node, as a table.

The *isolated* difference of a node is between its two kernels on the same inputs. The *propagated*
difference is between the two runs, each on its own inputs. The errors against *truth*, the same
model in float64, say which of the two runs is nearer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .arguments import check_mapping
from .compare import max_diff, scaled_error
from .describe import tree_leaves
from .errors import ArgumentError
from .evaluator import Step, TorchOnnxEvaluator

if TYPE_CHECKING:
    import pandas

__all__ = ["COLUMNS", "Localization", "localize"]

#: Columns of the table, in order.
COLUMNS = (
    "node", "op", "outputs", "kernel first", "kernel second",
    "isolated abs", "isolated scaled", "propagated abs", "propagated scaled",
    "own scaled first", "own scaled second", "truth scaled first", "truth scaled second",
    "non-finite first", "non-finite second", "non-finite truth",
)  # fmt: skip


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
        - ``non-finite …``: how many outputs are NaN or infinite.

        ``abs`` is the largest absolute difference, ``scaled`` the largest difference in units of
        eps × RMS (:func:`roundoff.compare.scaled_error`); NaN where no output is floating. What
        needs the truth is NaN without one.

    Examples
    --------
    >>> from roundoff.evaluator import MatMulOrt, TorchOnnxEvaluator
    >>> from roundoff.localization import localize
    >>> from roundoff.models import layer_norm_feeds, layer_norm_matmul
    >>> feeds = {name: value.float() for name, value in layer_norm_feeds(4, 8).items()}
    >>> model, swapped = layer_norm_matmul(), {("", "MatMul"): MatMulOrt}
    >>> other = TorchOnnxEvaluator(model, custom_kernels=swapped)
    >>> localize(TorchOnnxEvaluator(model), other, feeds).frame["op"].tolist()
    ['LayerNormalization', 'MatMul', 'Add']
    """

    frame: pandas.DataFrame


def localize(
    first: TorchOnnxEvaluator,
    second: TorchOnnxEvaluator,
    feeds: Mapping[str, Any],
    *,
    truth: TorchOnnxEvaluator | None = None,
) -> Localization:
    """Run a model in two ways and compare the two runs node by node.

    Parameters
    ----------
    first, second : TorchOnnxEvaluator
        Evaluators of one model, which may differ in kernels and device. The inputs of the isolated
        comparison are those of the first run.
    feeds : mapping of str to tensor
        Inputs of the model.
    truth : TorchOnnxEvaluator, optional
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

    evaluators = [first, second] if truth is None else [first, second, truth]
    for evaluator in evaluators:
        if not isinstance(evaluator, TorchOnnxEvaluator):
            raise ArgumentError(
                "no evaluator",
                got=type(evaluator).__name__,
                expected="a TorchOnnxEvaluator",
                hint="TorchOnnxEvaluator(model)",
            )
    if truth is not None and not truth.settings.truth:
        raise ArgumentError(
            "this truth is none",
            got="an evaluator that computes in the model's types",
            expected="one that computes in float64",
            hint="TorchOnnxEvaluator(model, truth=True)",
        )
    check_mapping("feeds", feeds, "input names to tensors")
    for evaluator in evaluators[1:]:
        _check_same(first, evaluator, feeds)
    steps = zip(*(evaluator.steps(feeds) for evaluator in evaluators), strict=True)
    rows = [_row(second, truth, *step) for step in steps]
    return Localization(pandas.DataFrame(rows, columns=list(COLUMNS)))


def _check_same(
    one: TorchOnnxEvaluator, other: TorchOnnxEvaluator, feeds: Mapping[str, Any]
) -> None:
    """The two have one model's nodes and constants.

    A node compared in isolation gets the constants of the first: it would not show the second's.
    """
    nodes = [[(n.operator, *n.inputs, n.outputs) for n in e.nodes] for e in (one, other)]
    if nodes[0] != nodes[1]:
        unequal = [f"{a} and {b}" for a, b in zip(*nodes, strict=False) if a != b]
        raise ArgumentError(
            "the two evaluators run different nodes",
            got=unequal[0] if unequal else f"{len(nodes[0])} and {len(nodes[1])} nodes",
            expected="one model, run two ways",
        )
    for name, value in one._constants.items():
        theirs = other._constants.get(name)
        if theirs is None or name in feeds:
            continue
        apart = max_diff(value, theirs)["abs"]
        if apart != 0:
            raise ArgumentError(
                f"the two evaluators have different constants: {name!r}",
                got=f"{apart:.3g} apart",
                expected="one model, run two ways",
            )


def _row(
    second: TorchOnnxEvaluator,
    truth: TorchOnnxEvaluator | None,
    one: Step,
    other: Step,
    true: Step | None = None,
) -> dict[str, Any]:
    isolated = second.run_node(one.node.index, one.inputs)
    row = {
        "node": one.node.name,
        "op": one.node.operator,
        "outputs": ", ".join(n for n in one.node.outputs if n),
        "kernel first": one.kernel,
        "kernel second": other.kernel,
        "isolated abs": max_diff(one.outputs, isolated)["abs"],
        "isolated scaled": scaled(one.outputs, isolated)[0],
        "propagated abs": max_diff(one.outputs, other.outputs)["abs"],
        "propagated scaled": scaled(one.outputs, other.outputs)[0],
        "non-finite first": non_finite(one.outputs),
        "non-finite second": non_finite(other.outputs),
    }
    if truth is None or true is None:
        return row
    for value in true.outputs:  # a kernel of the caller's gives float64, too
        if is_floating(value) and value.dtype != torch.float64:
            raise ArgumentError(
                f"node {true.node.name!r} of the truth",
                got=str(value.dtype),
                expected="float64",
                hint="leave its custom kernel out of the truth",
            )
    ideal = truth.run_node(one.node.index, one.inputs)
    return row | {
        "non-finite truth": non_finite(true.outputs),
        "truth scaled first": scaled(true.outputs, one.outputs)[0],
        "truth scaled second": scaled(true.outputs, other.outputs)[0],
        "own scaled first": scaled(ideal, one.outputs)[0],
        "own scaled second": scaled(ideal, isolated)[0],
    }


def is_floating(value: Any) -> bool:
    """Whether this is a torch tensor of a real floating type."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def scaled(truth: Any, got: Any, dtype: Any = None) -> tuple[float, float]:
    """Largest and RMS error of the floating tensors of two nested structures, in eps × RMS.

    The largest over the tensors; the eps is that of *dtype*, or of each tensor. NaN where none is
    floating and narrower than float64. An infinity or NaN that both have in the same place is no
    error; any other one is an infinite error. Where no number of a tensor is finite there is
    nothing to measure: NaN.
    """
    errors = [
        _scaled(t.to(torch.float64), g.to(t.device), dtype or g.dtype)
        for t, g in zip(tree_leaves(truth), tree_leaves(got), strict=False)
        if is_floating(t) and is_floating(g) and t.shape == g.shape
    ]
    known = [pair for pair in errors if not math.isnan(pair[0])]
    if not known:
        return math.nan, math.nan
    return max(largest for largest, _ in known), max(rms for _, rms in known)


def _scaled(truth: torch.Tensor, got: torch.Tensor, dtype: Any) -> tuple[float, float]:
    finite = truth.isfinite()
    if not bool(finite.all()):
        t, g = truth[~finite], got[~finite].to(torch.float64)
        if not bool(((t == g) | (t.isnan() & g.isnan())).all()):
            return math.inf, math.inf
        if not bool(finite.any()):
            return math.nan, math.nan
        truth, got = truth[finite], got[finite]
    if dtype == torch.float64:
        return math.nan, math.nan
    error = scaled_error(truth, got, dtype)
    return error.largest, error.rms


def non_finite(outputs: Any) -> int:
    """How many floating numbers of a pytree are NaN or infinite."""
    return sum(int((~t.isfinite()).sum()) for t in tree_leaves(outputs) if is_floating(t))
