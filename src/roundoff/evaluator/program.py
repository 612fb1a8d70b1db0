"""A graph with a kernel bound to each node, and the loop that runs it.

Kernels are bound before a run, and names become slot numbers: a result takes the slot of one that
has been read for the last time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from roundoff.errors import ModelError, RoundoffError, UnsupportedError

from .checks import guarded, schema_of
from .generic import NotHandledError
from .lowering import Lowered
from .nodes import Node
from .registry import Choice
from .values import signature, type_name


class Bound:
    """A node with its kernels: the first that can is used, the others where it fails.

    Attributes
    ----------
    call : callable
        Computes the node: the first kernel itself where nothing has to be checked.
    used : str or None
        Name of the kernel that ran the node last.
    """

    def __init__(self, node: Node, kernels: Sequence[Any]) -> None:
        self.node = node
        self.kernels = list(kernels)
        self.functions: list[Callable[..., Any] | None] = [None] * len(self.kernels)
        self.reasons: list[str] = []
        self.starts: dict[Any, int] = {}
        proved = schema_of(node.domain, node.op_type, node.opset) is not None and all(
            not n or n in node.types for n in node.inputs
        )
        self.guard = not proved and not node.truth and self.kernels[0].name != "custom"
        self.first = self._bind_from(0)
        self.used: str | None = self.kernels[self.first].name
        function: Any = self.functions[self.first]
        self.call: Callable[..., Any] = guarded(node, function) if self.guard else function
        self.first_call = self.call

    def _bind_from(self, start: int) -> int:
        for index in range(start, len(self.kernels)):
            if self.functions[index] is None:
                try:
                    self.functions[index] = self.kernels[index].bind(self.node)
                except NotHandledError as error:
                    self.reasons.append(str(error))
                    continue
            return index
        raise UnsupportedError(
            f"node {self.node.label!r}: no kernel for {self.node.operator}",
            got="; ".join(dict.fromkeys(self.reasons)),
            hint="give one in custom_kernels={(domain, op_type): kernel}",
        )

    def run(self, inputs: tuple[Any, ...]) -> Any:
        """The output of the node, or as many as it has."""
        try:
            return self.call(*inputs)
        except Exception as error:
            return self.recover(inputs, error)

    def recover(self, inputs: tuple[Any, ...], error: Exception) -> Any:
        """Outputs by the kernels after the first, which failed with *error*.

        Raises
        ------
        RoundoffError
            Every kernel failed; the message names the node.
        """
        moved = self._moved(inputs)
        if moved is not None:
            return moved
        failures: list[str] = []
        left = True  # by each kernel so far to the next one
        index, self.reasons = self.first, []
        while True:
            name = self.kernels[index].name
            if self._is_final(name, error):
                raise self._typed(error, inputs) from error
            failures.append(f"{name}: {_brief(error)}")
            left = left and isinstance(error, NotHandledError)
            try:
                index = self._bind_from(index + 1)
            except UnsupportedError:
                break
            function: Any = self.functions[index]
            try:
                outputs = function(*inputs)
            except Exception as next_error:
                error = next_error
                continue
            self.starts[signature(inputs)] = index
            self.used = self.kernels[index].name
            self.call = self.dispatch
            return outputs
        got = ", ".join(type_name(x) for x in inputs) + "; " + "; ".join(failures + self.reasons)
        if left:
            raise UnsupportedError(
                f"node {self.node.label!r}: no kernel for {self.node.operator} on these inputs",
                got=got,
                hint="give one in custom_kernels={(domain, op_type): kernel}",
            ) from error
        raise ModelError(
            f"node {self.node.label!r} ({self.node.operator}) fails on these inputs",
            got=got,
            hint="check the node's inputs and attributes, or give another kernel",
        ) from error

    def _moved(self, inputs: tuple[Any, ...]) -> Any:
        """Outputs after moving shapes that were read on the CPU beside other inputs, if any."""
        device = self.node.settings.device
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if device.type == "cpu" or len({x.device.type for x in tensors}) < 2:
            return None

        def call(*inputs: Any) -> Any:
            return self.first_call(
                *[x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs]
            )

        try:
            outputs = call(*inputs)
        except Exception:  # the kernel's own reason is told by its failure without the move
            return None
        self.call = call
        return outputs

    def dispatch(self, *inputs: Any) -> Any:
        """Compute the node with the kernel that managed inputs of these types before."""
        index = self.starts.get(signature(inputs), self.first)
        self.used = self.kernels[index].name
        function: Any = self.first_call if index == self.first else self.functions[index]
        return function(*inputs)

    def _is_final(self, name: str, error: Exception) -> bool:
        """Whether the failure is the model's rather than the kernel's."""
        return _out_of_memory(error) or (name == "torch" and isinstance(error, RoundoffError))

    def _typed(self, error: Exception, inputs: tuple[Any, ...]) -> Exception:
        where = f"node {self.node.label!r} ({self.node.operator})"
        if _out_of_memory(error):
            return UnsupportedError(
                f"{where} does not fit in memory",
                got=", ".join(type_name(x) for x in inputs),
                hint="smaller feeds",
            )
        assert isinstance(error, RoundoffError)
        if error.message.startswith("node "):
            return error
        return type(error)(
            f"{where}: {error.message}", got=error.got, expected=error.expected, hint=error.hint
        )


def _out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError):
        return True
    wordings = ("allocate memory", "out of memory", "Storage size calculation overflowed")
    return isinstance(error, RuntimeError) and any(w in str(error) for w in wordings)


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 200 else text[:197] + "..."


class Graph:
    """A graph ready to run: the main one, or the body of an If, Loop or Scan.

    Attributes
    ----------
    bound : list of Bound
        The nodes, in the order in which they run.
    input_names : tuple of str
    output_names : tuple of str
    captures : tuple of str
        Results of the enclosing graph that the nodes read.
    constants : dict of str to value
    optional : set of str
        Inputs that have a default.
    names : set of str
        All results.
    """

    def __init__(self, lowered: Lowered, choice: Choice) -> None:
        self.input_names = tuple(lowered.inputs)
        self.output_names = tuple(lowered.outputs)
        self.captures = tuple(lowered.captures)
        self.constants = lowered.constants
        self.optional = set(lowered.inputs) & set(lowered.constants)
        self.names = {*lowered.results, *self.captures}
        for node in lowered.nodes:
            node.subgraphs = {k: Graph(body, choice) for k, body in node.subgraphs.items()}
        self.bound = [Bound(node, choice.kernels(node)) for node in lowered.nodes]
        self._plans: dict[tuple[str, ...], _Plan] = {}

    def _plan(self, keep: tuple[str, ...]) -> _Plan:
        """How to compute the results named in *keep*."""
        if keep not in self._plans:
            self._plans[keep] = _planned(self, keep)
        return self._plans[keep]

    def call(self, arguments: Sequence[Any], keep: tuple[str, ...] | None = None) -> list[Any]:
        """Run: *arguments* are the inputs in order, then the captures."""
        plan = self._plan(self.output_names if keep is None else keep)
        values = plan.begin(arguments)
        for bound, reads, first, second, output, makes, clears in plan.rows:
            try:
                if second:  # two inputs and one output: the commonest, and faster so
                    values[output] = bound.call(values[first], values[second])
                else:
                    plan.store(values, makes, bound.call(*[values[slot] for slot in reads]))
            except Exception as error:
                inputs = tuple(values[slot] for slot in reads)
                plan.store(values, makes, bound.recover(inputs, error))
            if clears:
                for slot in clears:
                    values[slot] = None
        return [values[slot] for slot in plan.kept]

    def observe(
        self, arguments: Sequence[Any]
    ) -> Iterator[tuple[Node, tuple[Any, ...], tuple[Any, ...], str]]:
        """Run, giving (node, inputs, outputs, kernel) after each node."""
        plan = self._plan(self.output_names)
        values = plan.begin(arguments)
        for bound, reads, *_, makes, clears in plan.rows:
            inputs = tuple(values[slot] for slot in reads)
            result = bound.run(inputs)
            plan.store(values, makes, result)
            outputs = result if isinstance(result, tuple) else (result,)
            for slot in clears:
                values[slot] = None
            yield bound.node, inputs, outputs, bound.used or ""


class _Plan(NamedTuple):
    """A run over numbered slots, of which the first is no result's."""

    template: list[Any]
    arguments: list[int]
    rows: list[tuple[Any, ...]]
    kept: list[int]

    def begin(self, arguments: Sequence[Any]) -> list[Any]:
        """What the slots hold before the first node."""
        values = self.template.copy()
        for slot, value in zip(self.arguments, arguments, strict=True):
            values[slot] = value
        return values

    @staticmethod
    def store(values: list[Any], makes: tuple[int, ...], result: Any) -> None:
        """Put a node's outputs into their slots."""
        outputs = (result,) if len(makes) == 1 else result
        for slot, value in zip(makes, outputs, strict=False):
            values[slot] = value


def _planned(graph: Graph, keep: tuple[str, ...]) -> _Plan:
    """Give results their slots: one is free again after the last node that reads it."""
    fixed, last = {*graph.constants, *keep}, dict[str, int]()
    names = [(b.node.outputs, (*b.node.inputs, *b.node.captures)) for b in graph.bound]
    for index, (outputs, inputs) in enumerate(names):
        last.update(dict.fromkeys((*outputs, *inputs), index))
    given = (*graph.input_names, *graph.captures)
    slots = {n: k for k, n in enumerate(dict.fromkeys(("", *given, *graph.constants)))}
    template: list[Any] = [graph.constants.get(n) for n in slots]
    arguments, rows, free = [slots[n] for n in given], [], list[int]()
    for index, (bound, (outputs, inputs)) in enumerate(zip(graph.bound, names, strict=True)):
        reads = tuple(slots[n] for n in inputs)
        dead = {n for n in (*outputs, *inputs) if last[n] == index} - fixed
        dying = {slots[n] for n in dead.difference(outputs)}
        free += filter(None, sorted(dying))  # an output takes the slot of a dying input
        for name in filter(None, outputs):
            if not free:
                free.append(len(template))
                template.append(None)
            slots[name] = free.pop()
        makes = tuple(slots[n] for n in outputs)
        unread = {slots[n] for n in outputs if not n or n in dead}
        free += filter(None, sorted(unread))
        clears = tuple(dying.difference(makes) | unread)
        first, second = reads if len(reads) == 2 and len(makes) == 1 else (0, 0)
        rows.append((bound, reads, first, second, (*makes, 0)[0], makes, clears))
    return _Plan(template, arguments, rows, [slots[n] for n in keep])
