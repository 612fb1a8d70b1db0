"""A graph with a kernel bound to each node, and the loop that runs it."""

from __future__ import annotations

import itertools
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
        self.node, self.kernels = node, kernels
        self._functions: dict[int, Callable[..., Any] | None] = {}
        self._reasons: list[str] = []
        first = next(self._by_kernel(), None)
        if first is None:
            raise UnsupportedError(
                f"node {node.name!r}: no kernel for {node.operator}",
                got="; ".join(self._reasons),
                hint="give one in custom_kernels={(domain, op_type): kernel}",
            )
        self.name, function = first
        self.used = self.name
        proved = schema_of(node.domain, node.op_type, node.opset) is not None and all(
            not n or n in node.types for n in node.inputs
        )
        checked = not proved and not node.truth and kernels[0].name != "custom"
        self.call: Callable[..., Any] = guarded(node, function) if checked else function

    def _by_kernel(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """The functions that compute the node, each bound when it is first asked for."""
        for place, kernel in enumerate(self.kernels):
            if place not in self._functions:
                try:
                    self._functions[place] = kernel.bind(self.node)
                except NotHandledError as error:
                    self._functions[place] = None
                    self._reasons.append(str(error))
            function = self._functions[place]
            if function is not None:
                yield kernel.name, function

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
        self._check_fault(self.name, error, inputs)
        failed = [(self.name, error)]
        for name, function in itertools.islice(self._by_kernel(), 1, None):
            try:
                outputs = function(*inputs)
            except Exception as another:
                self._check_fault(name, another, inputs)
                failed.append((name, another))
                continue
            self.used = name
            return outputs
        reasons = [f"{name}: {_brief(e)}" for name, e in failed] + self._reasons
        got = ", ".join(type_name(x) for x in inputs) + "; " + "; ".join(reasons)
        if all(isinstance(e, NotHandledError) for _, e in failed):
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

    def _check_fault(self, kernel: str, error: Exception, inputs: Sequence[Any]) -> None:
        """Raise what is the model's fault, not the kernel's: no other kernel is tried."""
        where = f"node {self.node.name!r} ({self.node.operator})"
        if _out_of_memory(error):
            raise UnsupportedError(
                f"{where} does not fit in memory",
                got=", ".join(type_name(x) for x in inputs),
                hint="smaller feeds",
            ) from error
        if kernel == "torch" and isinstance(error, RoundoffError):
            if not error.message.startswith("node "):
                error.message = f"{where}: {error.message}"
            raise error


def _out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError):
        return True
    wordings = ("allocate memory", "out of memory", "Storage size calculation overflowed")
    return isinstance(error, RuntimeError) and any(w in str(error) for w in wordings)


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 200 else text[:197] + "..."


class Graph:
    """A graph ready to run: the nodes, in the order in which they run, with their kernels."""

    def __init__(self, lowered: Lowered, choice: Choice) -> None:
        self.lowered = lowered
        self.bound = [Bound(node, choice.kernels(node)) for node in lowered.nodes]
        self._plans: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}

    def call(self, arguments: Sequence[Any], names: tuple[str, ...]) -> list[Any]:
        """Run: *arguments* are the inputs in order. Returns the results of these *names*."""
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
        for bound, reads, makes, dead in self._plan(self.lowered.outputs):
            inputs = tuple(values[name] for name in reads)
            result = bound.run(inputs)
            _store(values, makes, result)
            for name in dead:
                del values[name]
            yield bound.node, inputs, result if isinstance(result, tuple) else (result,), bound.used

    def _begin(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """What is known before the first node, by name."""
        given = zip(self.lowered.inputs, arguments, strict=True)
        return {"": None, **self.lowered.constants, **dict(given)}

    def _plan(self, keep: tuple[str, ...]) -> list[tuple[Any, ...]]:
        """For each node what it reads and makes, and the results that nothing reads after it."""
        if keep not in self._plans:
            fixed, last = {"", *self.lowered.constants, *keep}, dict[str, int]()
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
