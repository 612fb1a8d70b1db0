"""Rewrite rules on ONNX graphs, in three tiers: default, onnxruntime, experimental.

A rule is a short class that states its pattern, its conditions and their source. Whatever does
not match exactly is left alone, and the :class:`Report` says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from roundoff.arguments import check_choice

from .editor import Editor, Refusal
from .options import TIERS, OptimizationOptions
from .rule import Report, Rule, apply_rules

if TYPE_CHECKING:
    import onnx

__all__ = [
    "TIERS",
    "Editor",
    "OptimizationOptions",
    "Refusal",
    "Report",
    "Rule",
    "apply_rules",
    "fuse",
    "rules",
]


def rules(tier: str) -> tuple[Rule, ...]:
    """The rules of one tier, in the order in which they are tried.

    Raises
    ------
    ArgumentError
        There is no such tier.

    Examples
    --------
    >>> [r.name for r in rules("default")][:2]
    ['FoldConstants', 'DropNoOps']
    """
    check_choice("tier", tier, TIERS)
    if tier == "default":
        from .default import DEFAULT

        return DEFAULT
    if tier == "onnxruntime":
        from .onnxruntime import ONNXRUNTIME

        return ONNXRUNTIME
    from .experimental import EXPERIMENTAL

    return EXPERIMENTAL


def fuse(
    model: onnx.ModelProto,
    options: OptimizationOptions | str | None = "default+onnxruntime",
    *,
    static: Iterable[str] = (),
) -> tuple[onnx.ModelProto, Report]:
    """Rewrite a model with the rules of the tiers asked for, until none matches.

    Parameters
    ----------
    model : onnx.ModelProto
        With shapes inferred, as conversion leaves it; it is not changed.
    options : OptimizationOptions or str or None
        A string stands for ``OptimizationOptions(patterns=...)``.
    static : iterable of str
        Inputs that rarely change (weights): products with them may be packed.

    Raises
    ------
    ArgumentError
        *model* is none, an option is unknown or no flag, or *static* names no input.
    ModelError
        The model has no graph, or a node reads what nothing before it makes.

    Returns
    -------
    model : onnx.ModelProto
        The rewritten graph; inputs, outputs and their names are the same.
    report : Report
        What matched, what was refused and why, nodes after each tier.

    Examples
    --------
    >>> import onnx
    >>> from onnx import parser
    >>> model = parser.parse_model('''
    ...     <ir_version: 10, opset_import: ["" : 20]>
    ...     g (float[2, 3] x) => (float[2, 3] y) { s = Sigmoid(x)  y = Mul(x, s) }
    ... ''')
    >>> fused, report = fuse(onnx.shape_inference.infer_shapes(model))
    >>> [node.op_type for node in fused.graph.node]
    ['QuickGelu']
    >>> report.nodes["exported"], len(fused.graph.node)
    (2, 1)
    """
    if not isinstance(options, OptimizationOptions):
        options = OptimizationOptions(options)
    processor, tiers = options.processor or "CPU", list(options.tiers)
    report = Report()
    if "experimental" in tiers:
        from .experimental import missing

        why = missing(processor, options.interpret)
        if why is not None:
            tiers.remove("experimental")
            report.refused["experimental", ""] = why
    g = Editor(model, processor, static, "experimental" in tiers, options.packed)
    report.nodes["exported"] = g.count()
    chosen: list[Rule] = []
    for tier in tiers:
        chosen += [r for r in rules(tier) if r.name != "FoldConstants" or options.constant_folding]
        again, rounds = True, 0
        while again:
            rounds += 1
            assert rounds <= 100, "rules make again what is merged"
            apply_rules(g, chosen, report, options.verbose)
            again = g.merge_equal_nodes()
        report.nodes[tier] = g.count()
    return g.proto(), report
