"""A graph with a kernel bound to each node, and the loop that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from roundoff.errors import ModelError, RoundoffError, UnsupportedError

from .checks import guarded, schema_of
from .generic import NotHandledError
from .lowering import Lowered
from .nodes import Node
from .registry import Choice
from .values import type_name


class Bound:
    """A node with its kernels: the first that can is used, the others where it fails.

    Attributes
    ----------
    used : str
        Name of the kernel that ran the node last.
    """

    def __init__(self, node: Node, kernels: Sequence[Any]) -> None:
        self.node = node
        self.kernels = list(kernels)
        self.functions: list[Callable[..., Any] | None] = [None] * len(self.kernels)
        self.reasons: list[str] = []
        self.first = self._bind_from(0)
        self.used: str = self.kernels[self.first].name
        self.name = self.used
        proved = schema_of(node.domain, node.op_type, node.opset) is not None and all(
            not n or n in node.types for n in node.inputs
        )
        function: Any = self.functions[self.first]
        checked = not proved and not node.truth and self.kernels[0].name != "custom"
        self.call: Callable[..., Any] = guarded(node, function) if checked else function

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
            f"node {self.node.name!r}: no kernel for {self.node.operator}",
            got="; ".join(dict.fromkeys(self.reasons)),
            hint="give one in custom_kernels={(domain, op_type): kernel}",
        )

    def run(self, inputs: Sequence[Any]) -> Any:
        """The output of the node, or as many as it has.

        Raises
        ------
        RoundoffError
            Every kernel failed; the message names the node.
        """
        self.used = self.name
        try:
            return self.call(*inputs)
        except Exception as error:
            return self.recover(inputs, error)

    def recover(self, inputs: Sequence[Any], error: Exception) -> Any:
        """Outputs by the kernels after the first, which failed with *error*."""
        moved = self._moved(inputs)
        if moved is not None:
            return moved
        failures: list[str] = []
        left = True  # by each kernel so far to the next one
        index, self.reasons = self.first, []
        while True:
            name = self.kernels[index].name
            if _out_of_memory(error) or (name == "torch" and isinstance(error, RoundoffError)):
                raise self._typed(error, inputs) from error  # the model's fault, not the kernel's
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
            self.used = self.kernels[index].name
            return outputs
        got = ", ".join(type_name(x) for x in inputs) + "; " + "; ".join(failures + self.reasons)
        if left:
            raise UnsupportedError(
                f"node {self.node.name!r}: no kernel for {self.node.operator} on these inputs",
                got=got,
                hint="give one in custom_kernels={(domain, op_type): kernel}",
            ) from error
        raise ModelError(
            f"node {self.node.name!r} ({self.node.operator}) fails on these inputs",
            got=got,
            hint="check the node's inputs and attributes, or give another kernel",
        ) from error

    def _moved(self, inputs: Sequence[Any]) -> Any:
        """Outputs after moving shapes that were read on the CPU beside other inputs, if any."""
        device, first = self.node.settings.device, self.call
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if device.type == "cpu" or len({x.device.type for x in tensors}) < 2:
            return None

        def call(*inputs: Any) -> Any:
            return first(*[x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs])

        try:
            outputs = call(*inputs)
        except Exception:  # the kernel's own reason is told by its failure without the move
            return None
        self.call = call
        return outputs

    def _typed(self, error: Exception, inputs: Sequence[Any]) -> Exception:
        where = f"node {self.node.name!r} ({self.node.operator})"
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
    """A graph ready to run.

    Attributes
    ----------
    bound : list of Bound
        The nodes, in the order in which they run.
    input_names : tuple of str
    output_names : tuple of str
    constants : dict of str to value
    optional : set of str
        Inputs that have a default.
    names : set of str
        All results.
    """

    def __init__(self, lowered: Lowered, choice: Choice) -> None:
        self.input_names = tuple(lowered.inputs)
        self.output_names = tuple(lowered.outputs)
        self.constants = lowered.constants
        self.optional = set(lowered.inputs) & set(lowered.constants)
        made = (name for node in lowered.nodes for name in node.outputs if name)
        self.names = {*lowered.inputs, *lowered.constants, *made}
        self.bound = [Bound(node, choice.kernels(node)) for node in lowered.nodes]
        self._plans: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}

    def call(self, arguments: Sequence[Any], keep: tuple[str, ...] | None = None) -> list[Any]:
        """Run: *arguments* are the inputs in order.

        Returns the results named in *keep*, by default the outputs.
        """
        names = self.output_names if keep is None else keep
        values = self._begin(arguments)
        read = values.__getitem__
        for bound, reads, makes, dead in self._plan(names):
            try:
                if len(reads) == 2:  # the commonest, and faster so
                    first, second = reads
                    result = bound.call(values[first], values[second])
                else:
                    result = bound.call(*map(read, reads))
            except Exception as error:
                result = bound.recover([*map(read, reads)], error)
            if len(makes) == 1:
                values[makes[0]] = result
            else:
                _store(values, makes, result)
            for name in dead:
                del values[name]
        return [values[name] for name in names]

    def observe(
        self, arguments: Sequence[Any]
    ) -> Iterator[tuple[Node, tuple[Any, ...], tuple[Any, ...], str]]:
        """Run, giving (node, inputs, outputs, kernel) after each node."""
        values = self._begin(arguments)
        for bound, reads, makes, dead in self._plan(self.output_names):
            inputs = tuple(values[name] for name in reads)
            result = bound.run(inputs)
            _store(values, makes, result)
            for name in dead:
                del values[name]
            yield bound.node, inputs, result if isinstance(result, tuple) else (result,), bound.used

    def _begin(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """What is known before the first node, by name."""
        given = zip(self.input_names, arguments, strict=True)
        return {"": None, **self.constants, **dict(given)}

    def _plan(self, keep: tuple[str, ...]) -> list[tuple[Any, ...]]:
        """For each node what it reads and makes, and the results that nothing reads after it."""
        if keep not in self._plans:
            fixed, last = {"", *self.constants, *keep}, dict[str, int]()
            names = [((*b.node.inputs, *b.node.captures), b.node.outputs) for b in self.bound]
            for index, (reads, makes) in enumerate(names):
                last.update(dict.fromkeys((*makes, *reads), index))
            self._plans[keep] = [
                (bound, reads, makes, [n for n in {*reads, *makes} - fixed if last[n] == index])
                for index, (bound, (reads, makes)) in enumerate(zip(self.bound, names, strict=True))
            ]
        return self._plans[keep]


def _store(values: dict[str, Any], names: tuple[str, ...], result: Any) -> None:
    """Add a node's results."""
    if len(names) == 1:
        values[names[0]] = result
    else:
        values.update((n, x) for n, x in zip(names, result, strict=False) if n)
