"""A graph compiled to a flat list of closures over numbered slots.

Everything that can be decided before a run is: kernels are bound, names become slot numbers, and
a result takes the slot of one that has just been read for the last time, which frees it. An
instruction of the inner loop is then one call: ``values[o] = f(values[a], values[b])``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from roundoff.errors import ModelError, RoundoffError, UnsupportedError

from .checks import guarded, schema_of
from .generic import NotHandledError
from .lowering import Lowered
from .nodes import Node
from .registry import Choice, check_supported
from .values import signature, type_name

Values = list[Any]
Instruction = Callable[[Values], None]


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


@dataclasses.dataclass
class Schedule:
    """Slots and instructions of a graph for one choice of the results to return."""

    template: Values
    slots: dict[str, int]  # inputs and captures
    instructions: list[Instruction]
    inputs: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    clears: list[tuple[int, ...]]
    kept: list[int]


class Graph:
    """A compiled graph: the main one, or the body of an If, Loop or Scan.

    Attributes
    ----------
    nodes : tuple of Node
        In the order in which they run.
    input_names : tuple of str
    output_names : tuple of str
    captures : tuple of str
    constants : dict of str to value
    """

    def __init__(self, lowered: Lowered, choice: Choice) -> None:
        self.nodes = tuple(lowered.nodes)
        self.path = lowered.path
        self.input_names = tuple(lowered.inputs)
        self.output_names = tuple(lowered.outputs)
        self.captures = lowered.captures
        self.constants = lowered.constants
        self.optional = lowered.optional
        self.bound: list[Bound] = []
        for node in self.nodes:
            node.subgraphs = {k: Graph(body, choice) for k, body in node.subgraphs.items()}
            kernels = choice.kernels(node)
            check_supported(node, kernels)
            self.bound.append(Bound(node, kernels))
        self._schedules: dict[tuple[str, ...], Schedule] = {}
        self.names = {*self.input_names, *self.captures, *self.constants} | {
            n for node in self.nodes for n in node.outputs if n
        }

    def schedule(self, keep: tuple[str, ...]) -> Schedule:
        """Slots and instructions to compute the results named in *keep*."""
        schedule = self._schedules.get(keep)
        if schedule is None:
            schedule = self._schedules[keep] = _Scheduler(self, keep).schedule()
        return schedule

    def call(self, arguments: Sequence[Any], keep: tuple[str, ...] | None = None) -> list[Any]:
        """Run: *arguments* are the inputs in order, then the captures."""
        schedule = self.schedule(self.output_names if keep is None else keep)
        values = schedule.template.copy()
        for slot, value in zip(schedule.slots.values(), arguments, strict=True):
            values[slot] = value
        self.execute(schedule, values)
        return [values[k] for k in schedule.kept]

    def execute(self, schedule: Schedule, values: Values) -> None:
        """Run all instructions; where a kernel fails, the node's next kernel takes its place."""
        remaining = iter(schedule.instructions)
        while True:
            try:
                for instruction in remaining:
                    instruction(values)
                return
            except Exception as error:
                self._take_over(schedule, values, schedule.instructions.index(instruction), error)

    def _take_over(self, schedule: Schedule, values: Values, index: int, error: Exception) -> None:
        bound = self.bound[index]
        inputs = tuple(values[k] for k in schedule.inputs[index])
        outputs = bound.recover(inputs, error)
        _store(values, schedule.outputs[index], outputs)
        for slot in schedule.clears[index]:
            values[slot] = None
        schedule.instructions[index] = _instruction(
            bound.call, schedule.inputs[index], schedule.outputs[index], schedule.clears[index]
        )

    def observe(
        self, arguments: Sequence[Any]
    ) -> Iterator[tuple[Node, tuple[Any, ...], tuple[Any, ...], str]]:
        """Run, giving (node, inputs, outputs, kernel) after each node."""
        schedule = self.schedule(self.output_names)
        values = schedule.template.copy()
        for slot, value in zip(schedule.slots.values(), arguments, strict=True):
            values[slot] = value
        for index, bound in enumerate(self.bound):
            inputs = tuple(values[k] for k in schedule.inputs[index])
            result = self.run_bound(bound, inputs)
            _store(values, schedule.outputs[index], result)
            outputs = result if isinstance(result, tuple) else (result,)
            for slot in schedule.clears[index]:
                values[slot] = None
            yield bound.node, inputs, outputs, bound.used or ""

    @staticmethod
    def run_bound(bound: Bound, inputs: tuple[Any, ...]) -> Any:
        """Run one node."""
        try:
            return bound.call(*inputs)
        except Exception as error:
            return bound.recover(inputs, error)


class _Scheduler:
    """Gives results their slots, in the order of the nodes."""

    def __init__(self, graph: Graph, keep: tuple[str, ...]) -> None:
        self.graph = graph
        self.keep = keep
        self.free: list[int] = []
        self.template: Values = []
        self.slots: dict[str, int] = {}
        self.none = self._new(None)
        for name in (*graph.input_names, *graph.captures):
            if name not in self.slots:
                self.slots[name] = self._new(graph.constants.get(name))
        for name, value in graph.constants.items():
            if name not in self.slots:
                self.slots[name] = self._new(value)

    def _new(self, value: Any) -> int:
        self.template.append(value)
        return len(self.template) - 1

    def schedule(self) -> Schedule:
        graph = self.graph
        fixed = set(graph.constants) | set(self.keep)
        last: dict[str, int] = {}
        for index, node in enumerate(graph.nodes):
            last.update(dict.fromkeys((*node.inputs, *node.captures), index))
        arguments = {n: self.slots[n] for n in (*graph.input_names, *graph.captures)}
        schedule = Schedule(self.template, arguments, [], [], [], [], [])
        for index, (node, bound) in enumerate(zip(graph.nodes, graph.bound, strict=True)):
            reads = (*node.inputs, *node.captures)
            inputs = tuple(self.slots[n] if n else self.none for n in reads)
            dying = {n for n in reads if n and last[n] == index and n not in fixed}
            self.free += [self.slots.pop(n) for n in sorted(dying)]
            outputs = tuple(self._place(n) for n in node.outputs)
            unread = [n for n in node.outputs if n and n not in last and n not in fixed]
            freed = {inputs[k] for k, n in enumerate(reads) if n in dying} - set(outputs)
            freed |= {self.slots[n] for n in unread}
            self.free += [self.slots.pop(n) for n in unread]
            schedule.inputs.append(inputs)
            schedule.outputs.append(outputs)
            schedule.clears.append(tuple(sorted(freed)))
            schedule.instructions.append(
                _instruction(bound.call, inputs, outputs, schedule.clears[-1])
            )
        schedule.kept = [self.slots[n] if n else self.none for n in self.keep]
        return schedule

    def _place(self, name: str) -> int:
        if not name:
            return -1
        slot = self.free.pop() if self.free else self._new(None)
        self.slots[name] = slot
        return slot


def _store(values: Values, slots: tuple[int, ...], result: Any) -> None:
    if len(slots) == 1:
        values[slots[0]] = result
        return
    for slot, value in zip(slots, result, strict=False):
        if slot >= 0:
            values[slot] = value


def _instruction(
    f: Callable[..., Any], ins: tuple[int, ...], outs: tuple[int, ...], clears: tuple[int, ...]
) -> Instruction:
    """The closure that runs one node; the common shapes have one of their own."""
    if len(outs) == 1 and len(ins) == 2 and len(clears) == 1:
        return _pair_instruction(f, ins, outs[0], clears[0])
    if len(outs) != 1 or clears or not 1 <= len(ins) <= 3:
        return _any_instruction(f, ins, outs, clears)
    o = outs[0]
    if len(ins) == 1:
        (a,) = ins

        def one(v: Values) -> None:
            v[o] = f(v[a])

        return one
    if len(ins) == 2:
        a, b = ins

        def two(v: Values) -> None:
            v[o] = f(v[a], v[b])

        return two
    a, b, c = ins

    def three(v: Values) -> None:
        v[o] = f(v[a], v[b], v[c])

    return three


def _pair_instruction(
    f: Callable[..., Any], ins: tuple[int, ...], o: int, clear: int
) -> Instruction:
    """Two inputs, both read for the last time: one slot is taken, the other cleared."""
    a, b = ins

    def two(v: Values) -> None:
        v[o] = f(v[a], v[b])
        v[clear] = None

    return two


def _any_instruction(
    f: Callable[..., Any], ins: tuple[int, ...], outs: tuple[int, ...], clears: tuple[int, ...]
) -> Instruction:
    if len(outs) == 1:
        o = outs[0]

        def single(v: Values) -> None:
            v[o] = f(*[v[k] for k in ins])
            for k in clears:
                v[k] = None

        return single

    def several(v: Values) -> None:
        _store(v, outs, f(*[v[k] for k in ins]))
        for k in clears:
            v[k] = None

    return several
