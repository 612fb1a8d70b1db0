"""The result of a comparison of two runtimes, as tables and as an answer in words."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from roundoff.compare import CalibratedTolerance

from .quantization import Quantization

if TYPE_CHECKING:
    import pandas

#: Columns of :attr:`RuntimeComparison.frame`, and those of ``localize`` that they are.
SOURCES = {
    "node": "node",
    "op": "op",
    "output": "outputs",
    "kernel torch": "kernel first",
    "kernel ORT": "kernel second",
    "isolated abs": "isolated abs",
    "isolated difference": "isolated scaled",
    "propagated abs": "propagated abs",
    "propagated difference": "propagated scaled",
    "own error torch": "own scaled first",
    "own error ORT": "own scaled second",
    "error torch": "truth scaled first",
    "error ORT": "truth scaled second",
    "non-finite torch": "non-finite first",
    "non-finite ORT": "non-finite second",
    "non-finite truth": "non-finite truth",
}
NODE_COLUMNS = tuple(SOURCES)

#: Columns of :attr:`RuntimeComparison.outputs`; those that say "module" are there with a module.
OUTPUT_COLUMNS = (
    "output",
    "type",
    "abs",
    "error torch",
    "error ORT",
    "rms torch",
    "rms ORT",
    "nearer",
    "rtol",
    "atol",
    "session abs",
    "module abs",
    "error module",
    "elements",
    "non-finite torch",
    "non-finite ORT",
    "non-finite truth",
)

#: Those that are shown.
_SHOWN = ("output", "abs", "rms torch", "rms ORT", "module abs", "nearer", "rtol", "atol")

_UNIT = "eps × RMS of the float64 truth"


@dataclasses.dataclass
class RuntimeComparison:
    """The result of :func:`roundoff.runtimes.compare_runtimes`.

    ``print`` it, or show it in a notebook.

    Errors are in one unit: absolute error over eps of the element type times the root mean square
    of the float64 truth. A correctly rounded result is within half such units where it is not
    larger than the root mean square.

    Attributes
    ----------
    frame : pandas.DataFrame
        A row per node, in execution order, with the columns ``NODE_COLUMNS``. *isolated
        difference*: of the two kernels on the same inputs; *propagated difference*: of the two
        runs; *own error*: of a kernel against float64 on the same inputs; *error*: of a run against
        the run in float64. The last three columns count NaNs and infinities.
    outputs : pandas.DataFrame
        A row per output of the model, with the columns ``OUTPUT_COLUMNS``. "ORT" is here one
        session of the whole model with its graph optimisations. *abs*: largest difference between
        torch's kernels and ORT; *error*: the largest, *rms*: the root mean square against float64;
        *nearer*: "torch", "ORT", "equal" where the RMS errors are within 10 %, or "neither" where
        nothing is finite or both overflow; *rtol*, *atol*: those of ``tolerances``, NaN where none
        can be defended; *session abs*: between the session and ONNX Runtime's kernels one by one;
        *module abs*: between torch's kernels and the module. The last columns count all elements,
        and NaNs and infinities.
    advice : list of str
        What to set, the most important first.
    where : str
        Model, element types and device, in words.
    tolerances : dict of str to CalibratedTolerance
        For each output, ``|torch − ORT| <= atol + rtol |ORT|``, and the module likewise: at most
        one fresh feed of the same kind in 300 fails. ``rtol`` is the size of a fault that is not
        seen; ``reason`` says why there is none.
    quantization : object or None
        What quantisation costs a model with quantised nodes, and at which of them.

    Examples
    --------
    >>> from roundoff.runtimes import compare_runtimes
    >>> from roundoff.models import layer_norm_matmul
    >>> comparison = compare_runtimes(layer_norm_matmul())
    >>> comparison.frame["op"].tolist(), comparison.outputs["output"].tolist()
    (['LayerNormalization', 'MatMul', 'Add'], ['Z'])
    >>> comparison.first_nonfinite is None
    True
    """

    frame: pandas.DataFrame
    outputs: pandas.DataFrame
    advice: list[str]
    where: str
    tolerances: dict[str, CalibratedTolerance] = dataclasses.field(default_factory=dict)
    quantization: Quantization | None = None

    @property
    def first(self) -> Mapping[str, Any] | None:
        """The first node whose two kernels differ on the same inputs, or None."""
        return next((row for row in self._rows() if row["isolated abs"] != 0), None)

    @property
    def first_nonfinite(self) -> Mapping[str, Any] | None:
        """The first node with more NaNs and infinities than the truth has, or None."""
        return next((row for row in self._rows() if overflows(row)), None)

    @property
    def largest(self) -> Mapping[str, Any] | None:
        """The node with the largest error of its own, or None where none is floating."""
        own = self.frame[["own error torch", "own error ORT"]].max(axis=1)
        return None if own.isna().all() else self.frame.loc[own.idxmax()].to_dict()

    @property
    def nearer(self) -> str:
        """Which side is nearer the truth: "torch", "ORT", "equal" or "neither".

        Of several outputs that disagree, the one with the largest RMS error decides. "neither"
        where an output is nowhere finite, or both overflow, and no other decides.
        """
        decided = self.outputs[self.outputs["nearer"].isin(("torch", "ORT"))]
        if not len(decided):
            return "neither" if (self.outputs["nearer"] == "neither").any() else "equal"
        worst = decided[["rms torch", "rms ORT"]].max(axis=1).fillna(0.0)
        return str(decided.loc[worst.idxmax(), "nearer"])

    def _rows(self) -> list[dict[str, Any]]:
        return self.frame.to_dict("records")

    def _lines(self) -> list[tuple[str, str]]:
        """The answer, as (question, answer)."""
        first, odd, most = self.first, self.first_nonfinite, self.largest
        text = "none: every pair of kernels gives equal bits on the same inputs"
        if first:
            text = f"{name_of(first)}: {first['isolated abs']:.3g} on the same inputs"
        elif self.outputs[["non-finite torch", "non-finite ORT"]].to_numpy().any():
            text += ", NaN and infinities included"
        lines = [("first differs at node", text)]
        text = self.nearer
        worst = self.outputs[["rms torch", "rms ORT"]].max()
        if not worst.isna().any():
            text += f" (RMS error {worst['rms torch']:.3g} torch, {worst['rms ORT']:.3g} ORT)"
        lines.append(("nearer the truth", text))
        if most is not None:
            errors = f"{most['own error torch']:.3g} torch, {most['own error ORT']:.3g} ORT"
            lines.append(("largest error of its own", f"{name_of(most)}: {errors}"))
        if odd is not None:
            lines.append(("first NaN or infinity", f"{name_of(odd)}, in {overflows(odd)}"))
        return lines + [("advice", text) for text in self.advice]

    def _shown(self) -> pandas.DataFrame:
        return self.outputs[[column for column in _SHOWN if column in self.outputs]]

    def __repr__(self) -> str:
        lines = [f"{what}: {answer}" for what, answer in self._lines()]
        table = self._shown().to_string(index=False, float_format="{:.3g}".format)
        return "\n".join([*lines, table, f"errors are in units of {_UNIT}", self.where])

    def _repr_html_(self) -> str:
        answers = "".join(
            f"<li><strong>{html.escape(what)}</strong>: {html.escape(answer)}</li>"
            for what, answer in self._lines()
        )
        table = self._shown().to_html(index=False, border=0, float_format="{:.3g}".format)
        # Where it is too wide it scrolls, and by keyboard, too.
        table = table.replace("<table ", '<table tabindex="0" ', 1)
        return (
            f"<p>{html.escape(self.where)}; errors in units of {_UNIT}.</p>"
            f"<ul>{answers}</ul>{table}"
        )


def name_of(row: Mapping[str, Any]) -> str:
    """A node in words: name, operator and results."""
    return f"{row['node']} ({row['op']} -> {row['output']})"


def overflows(row: Mapping[str, Any]) -> str:
    """Sides of a node with more NaNs and infinities than the truth."""
    return " and ".join(
        s for s in ("torch", "ORT") if row[f"non-finite {s}"] > row["non-finite truth"]
    )
