"""Before and after fusion: every value that survives, against the same in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnx
import torch

from roundoff.compare import max_diff
from roundoff.dtypes import dtype_info
from roundoff.errors import ModelError, UnsupportedError
from roundoff.evaluator import TorchOnnxEvaluator

from .program import Program
from .variant import Variant, widened
from .widen import has_bfloat16, in_float32

if TYPE_CHECKING:
    import pandas as pd

    from .compiled import Graph

__all__ = ["COLUMNS", "before_and_after", "truth", "verify"]

#: Columns of the table, in order.
COLUMNS = (
    "value", "made by", "rule", "returned", "shape", "largest",
    "abs before", "abs after", "ulp before", "ulp after", "between", "eps",
)  # fmt: skip
# An error may grow by this factor, and by as many roundings of the largest value: another order
# of the same sums explains that, and a wrong rule is off by far more.
FACTOR, ROUNDINGS = 4.0, 8.0


def before_and_after(
    graph: Graph, variant: Variant, tensors: Sequence[torch.Tensor]
) -> pd.DataFrame:
    """Run a graph before fusion, after it, and in float64, and compare what all three make.

    Parameters
    ----------
    graph, variant
        What was exported, and what fusion made of it.
    tensors : sequence of torch.Tensor
        Inputs, as the graph takes them.

    Returns
    -------
    pandas.DataFrame
        A row for each value that both graphs make under one name, in the order of the fused
        graph: the node that makes it after fusion and the rule that put it there (empty where
        none did), its largest element, and the errors against float64 of the graph before and
        after fusion, absolute and in units in the last place; ``between`` is the largest
        difference of the two.
    """
    import pandas as pd

    before, after = graph.exported, variant.whole
    made = {o for n in before.graph.node for o in n.output if o}
    floating = _floating(after)
    names = [o for n in after.graph.node for o in n.output if o in made and o in floating]
    feeds = dict(zip(graph.names, (t.detach() for t in tensors), strict=True))
    exact = truth(graph, tensors, names)
    values = [_run(m, names, feeds, graph.device, variant.tf32) for m in (before, after)]
    makers = {o: n for n in after.graph.node for o in n.output}
    returned = {o.name for o in after.graph.output}
    rows = [
        _row(n, makers[n], n in returned, *three)
        for n, *three in zip(names, exact, *values, strict=True)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def truth(
    graph: Graph, tensors: Sequence[torch.Tensor], names: Sequence[str]
) -> list[torch.Tensor]:
    """Values of the exporter's graph computed in float64 throughout."""
    feeds = dict(zip(graph.names, (t.detach() for t in tensors), strict=True))
    wanted = {i.name: feeds[i.name] for i in graph.exported.graph.input}
    provider = "CUDAExecutionProvider" if graph.device.type == "cuda" else "CPUExecutionProvider"
    return TorchOnnxEvaluator(graph.exported, providers=(provider,), truth=True).run(names, wanted)


def verify(graph: Graph, tensors: Sequence[torch.Tensor]) -> None:
    """Compare the returned values; nothing is returned where fusion kept them.

    Raises
    ------
    ModelError
        An error against float64 grew past what another order of the same sums explains. The
        message holds the table, and names the first value that is off.
    """
    variant = graph._variant
    table = before_and_after(graph, variant, tensors)
    off = [row["value"] for row in table.to_dict("records") if _is_off(row)]
    wrong = [v for v in off if table.set_index("value").loc[v, "returned"]]
    if not wrong:
        return
    shown = ["value", "made by", "rule", "abs before", "abs after", "between"]
    raise ModelError(
        f"fusion changed what the graph returns ({', '.join(wrong)}); it begins at {off[0]!r}:\n"
        + table[shown].to_string(index=False)
        + "\n",
        hint="OptimizationOptions(leave=(rule,)) leaves a rule out; please report it",
    )


def _is_off(row: dict[str, Any]) -> bool:
    allowed = FACTOR * row["abs before"] + ROUNDINGS * row["eps"] * row["largest"]
    return not row["abs after"] <= allowed


def _row(
    name: str,
    node: onnx.NodeProto,
    returned: bool,
    truth: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
) -> dict[str, Any]:
    rule = {p.key: p.value for p in node.metadata_props}.get("roundoff.rule", "")
    one, two, between = max_diff(truth, before), max_diff(truth, after), max_diff(before, after)
    finite = truth[torch.isfinite(truth)]
    return {
        "value": name,
        "made by": node.op_type,
        "rule": rule,
        "returned": returned,
        "shape": "x".join(map(str, after.shape)),
        "largest": float(finite.abs().max()) if finite.numel() else 0.0,
        "abs before": one["abs"],
        "abs after": two["abs"],
        "ulp before": one["ulp"],
        "ulp after": two["ulp"],
        "between": between["abs"],
        "eps": dtype_info(after.dtype).eps,
    }


def _floating(model: onnx.ModelProto) -> set[str]:
    values = [*model.graph.value_info, *model.graph.output]
    return {v.name for v in values if dtype_info(v.type.tensor_type.elem_type).is_float}


def _run(
    model: onnx.ModelProto,
    names: Sequence[str],
    feeds: dict[str, torch.Tensor],
    device: torch.device,
    tf32: bool,
) -> list[torch.Tensor]:
    """Run a whole model, returning the *names*, with the kernels of the backend."""
    from roundoff.fusion.experimental import KERNELS

    shown = onnx.ModelProto.FromString(model.SerializeToString())
    known = {v.name: v for v in [*model.graph.value_info, *model.graph.output]}
    del shown.graph.output[:]
    shown.graph.output.extend(known[n] for n in names)
    if device.type == "cpu" and has_bfloat16(shown):
        shown = in_float32(shown)
    while True:
        try:
            program = Program(shown, device, KERNELS, tf32)
            return program.run([feeds[n].contiguous() for n in program.inputs])
        except UnsupportedError as e:
            shown = widened(shown, e)
