"""What a rewrite rule is, and how a list of them is applied until nothing changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import onnx_ir as ir

from roundoff.arguments import check_whole
from roundoff.errors import ArgumentError

from .editor import Editor, Refusal


class Rule:
    """One rewrite. A subclass states its pattern, its conditions and their source.

    Attributes
    ----------
    ops : tuple of str
        Operators of the node on which the rule is tried: the last node of its pattern.
    tier : str
        ``"default"``, ``"onnxruntime"`` or ``"experimental"``.

    Examples
    --------
    >>> class NegNeg(Rule):
    ...     __doc__ = "Pattern: Neg of Neg. Becomes the input."
    ...
    ...     ops = ("Neg",)
    ...
    ...     def rewrite(self, g, node):
    ...         inner = g.node(node.inputs[0], "Neg")
    ...         if inner is None:
    ...             return False
    ...         g.replace(node.outputs[0], inner.inputs[0])
    ...         return True
    >>> NegNeg().name
    'NegNeg'
    """

    ops: ClassVar[tuple[str, ...]] = ()
    tier: ClassVar[str] = "default"

    def rewrite(self, g: Editor, node: ir.Node) -> bool:
        """Rewrite the pattern that ends in *node*; False where there is none.

        Raises
        ------
        Refusal
            The pattern is there and a condition is not met; the text says which.
        """
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The class's name."""
        return type(self).__name__


@dataclasses.dataclass(frozen=True)
class Matched:
    """One rewrite: the rule, and the value that is now computed otherwise."""

    rule: str
    tier: str
    value: str


@dataclasses.dataclass
class Report:
    """What each rule did to one model.

    Attributes
    ----------
    matched : list
        Each with ``rule``, ``tier`` and ``value``, in the order in which they were applied.
    refused : dict
        ``(rule, value) -> reason`` of every pattern that was seen and left alone.
    nodes : dict
        Number of nodes: as exported, and after each tier.

    Examples
    --------
    >>> Report().counts()
    {}
    """

    matched: list[Matched] = dataclasses.field(default_factory=list)
    refused: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    nodes: dict[str, int] = dataclasses.field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """How many times each rule matched."""
        counts: dict[str, int] = {}
        for m in self.matched:
            counts[m.rule] = counts.get(m.rule, 0) + 1
        return counts

    def __str__(self) -> str:
        done = ", ".join(f"{rule} {n}" for rule, n in self.counts().items()) or "nothing"
        nodes = " -> ".join(f"{n} {tier}" for tier, n in self.nodes.items())
        return f"{nodes}; matched: {done}"


#: A whole Llama takes a dozen; rules that go on and on would never end.
_MOST_PASSES = 500


def apply_rules(g: Editor, rules: Sequence[Rule], report: Report, verbose: int = 0) -> None:
    """Try every rule on every node, again and again, until none matches.

    Parameters
    ----------
    g : Editor
        The graph, which is changed.
    rules : sequence of Rule
        Tried in this order.
    report : Report
        It gets what matched and what was refused.
    verbose : int
        Prints each match.

    Raises
    ------
    ArgumentError
        An argument is not as above.

    Examples
    --------
    >>> import onnx.parser
    >>> from roundoff.fusion import Editor
    >>> class NegNeg(Rule):
    ...     ops = ("Neg",)
    ...
    ...     def rewrite(self, g, node):
    ...         inner = g.node(node.inputs[0], "Neg")
    ...         return inner is not None and not g.replace(node.outputs[0], inner.inputs[0])
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["" : 20]>'
    ...     "g (float[2] x) => (float[2] y) { a = Neg(x)  b = Neg(a)  y = Abs(b) }"
    ... )
    >>> editor, report = Editor(model), Report()
    >>> apply_rules(editor, [NegNeg()], report)
    >>> report.counts(), editor.count()
    ({'NegNeg': 1}, 1)
    """
    for name, value, kind in (("g", g, Editor), ("report", report, Report)):
        if not isinstance(value, kind):
            raise ArgumentError(
                name, got=type(value).__name__, expected=f"a roundoff.fusion.{kind.__name__}"
            )
    if not isinstance(rules, Sequence) or not all(isinstance(rule, Rule) for rule in rules):
        raise ArgumentError(
            "rules", got=repr(rules)[:80], expected="a list of rules", hint="rules('default')"
        )
    check_whole("verbose", verbose)
    changed, passes = True, 0
    while changed:
        changed, passes = False, passes + 1
        assert passes <= _MOST_PASSES, f"rules that undo each other: {report.matched[-3:]}"
        for rule in rules:
            matched = False
            for node in list(g.graph):
                if node.op_type in rule.ops and node.graph is not None:
                    matched |= _attempt(g, rule, node, report, verbose)
            if matched:
                g.clean()
            changed |= matched


def _attempt(g: Editor, rule: Rule, node: ir.Node, report: Report, verbose: int) -> bool:
    if not any(g.uses(o) for o in node.outputs):
        return False  # dead since an earlier rewrite of this pass
    value = next((o.name for o in node.outputs if o.name), "") or ""
    try:
        done = rule.rewrite(g, node)
    except Refusal as e:
        report.refused[rule.name, value] = str(e)
        return False
    if done:
        report.matched.append(Matched(rule.name, rule.tier, value))
        report.refused.pop((rule.name, value), None)
        if verbose:
            print(f"{rule.tier}: {rule.name} at {value}")
    return done
