"""Before and after fusion: every value that survives, against the same in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnx
import torch

from roundoff.compare import max_diff
from roundoff.dtypes import dtype_info
from roundoff.errors import ModelError
from roundoff.evaluator import TorchOnnxEvaluator
from roundoff.fusion.experimental import KERNELS

from .program import Program
from .upcast import with_kernels
from .variant import Exported, Variant

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COLUMNS", "before_and_after", "truth", "verify"]

#: Columns of the table, in order.
COLUMNS = (
    "value", "made by", "rule", "returned", "shape", "largest",
    "abs before", "abs after", "ulp before", "ulp after", "between", "eps",
)  # fmt: skip
# An error may grow by this factor, and by as many roundings of the largest value: another order
# of the same sums explains that, and a wrong rule is off by far more.
FACTOR, ROUNDINGS = 4.0, 8.0


def before_and_after(variant: Variant, tensors: Sequence[torch.Tensor]) -> pd.DataFrame:
    """Run a graph before fusion, after it, and in float64, and compare the values of all three.

    Parameters
    ----------
    variant : Variant
    tensors : sequence of torch.Tensor
        Inputs, as the graph takes them.

    Returns
    -------
    pandas.DataFrame
        A row for each value that both graphs compute under one name, in the order of the fused
        graph: the operator that computes it after fusion and the rule that put it there (empty
        where none did), its largest element, and the errors against float64 of the graph before
        and after fusion, absolute and in units in the last place; ``between`` is the largest
        difference of the two.
    """
    import pandas as pd

    exported = variant.exported
    before, after = exported.model, variant.fused
    names_before = {o for n in before.graph.node for o in n.output if o}
    floating = _floating(after)
    names = [o for n in after.graph.node for o in n.output if o in names_before and o in floating]
    float64 = truth(exported, tensors, names)
    values = [_run(m, names, exported, tensors, variant.tf32) for m in (before, after)]
    producers = {o: n for n in after.graph.node for o in n.output}
    returned = {o.name for o in after.graph.output}
    rows = [
        _row(n, producers[n], n in returned, *three)
        for n, *three in zip(names, float64, *values, strict=True)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def truth(
    exported: Exported, tensors: Sequence[torch.Tensor], names: Sequence[str]
) -> list[torch.Tensor]:
    """Values of the converted graph computed in float64 throughout."""
    known = _feeds(exported, tensors)
    feeds = {i.name: known[i.name] for i in exported.model.graph.input}
    provider = "CUDAExecutionProvider" if exported.device.type == "cuda" else "CPUExecutionProvider"
    return TorchOnnxEvaluator(exported.model, providers=(provider,), truth=True).run(names, feeds)


def _feeds(exported: Exported, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(exported.names, (t.detach() for t in tensors), strict=True))


def verify(variant: Variant, tensors: Sequence[torch.Tensor]) -> None:
    """Compare the returned values; nothing is returned where fusion kept them.

    Raises
    ------
    ModelError
        An error against float64 grew past what another order of the same sums explains. The
        message holds the table, and names the first value that is off.
    """
    table = before_and_after(variant, tensors)
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
    exported: Exported,
    tensors: Sequence[torch.Tensor],
    tf32: bool,
) -> list[torch.Tensor]:
    """Run a whole model, returning the *names*, with the kernels of the backend."""
    returning = onnx.ModelProto.FromString(model.SerializeToString())
    known = {v.name: v for v in [*model.graph.value_info, *model.graph.output]}
    del returning.graph.output[:]
    returning.graph.output.extend(known[n] for n in names)
    program = with_kernels(
        returning,
        exported.device.type == "cpu",
        lambda m: Program(m, exported.device, KERNELS | exported.kernels, tf32),
    )
    feeds = _feeds(exported, tensors)
    sizes = sizes_of(exported, tensors)
    return program.run([feeds[n].contiguous() for n in program.inputs], sizes)


def sizes_of(exported: Exported, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """The values of the symbolic sizes that inputs have."""
    sizes: dict[str, int] = {}
    feeds = _feeds(exported, tensors)
    for value in exported.model.graph.input:
        tensor = feeds[value.name]
        for d, n in zip(value.type.tensor_type.shape.dim, tensor.shape, strict=True):
            sizes.setdefault(d.dim_param, int(n))
        if value.name.isidentifier() and tensor.dtype == torch.int64 and tensor.shape == (1,):
            sizes.setdefault(value.name, int(tensor))  # a size that is an input by itself
    return sizes
