"""A node with the kernels bound to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundoff.errors import ModelError, RoundoffError, UnsupportedError

from .checks import guarded
from .nodes import Node, NotHandledError
from .values import brief, type_name

#: What a kernel raises for inputs that it does not take: its own refusal, a typed error, and what
#: torch, NumPy and ONNX raise for types and shapes. Any other error is a fault of the kernel, which
#: the result of another kernel would hide.
REFUSALS = (NotHandledError, RoundoffError, RuntimeError, TypeError, ValueError, LookupError)


class Bound:
    """A node with its kernels: the first is used, the others where it refuses the inputs.

    Attributes
    ----------
    first : str
        Name of the first kernel.
    call : callable
        The function of the first kernel.
    used : str
        Name of the kernel that gave the node's last result; before a run, of the first.
    """

    def __init__(self, node: Node, kernels: Sequence[Any]) -> None:
        self.node = node
        self.functions: list[tuple[str, Callable[..., Any]]] = []
        self.reasons: list[str] = []
        for kernel in kernels:
            try:
                self.functions.append((kernel.name, kernel.bind(node)))
            except NotHandledError as error:
                self.reasons.append(str(error))
        if not self.functions:
            raise UnsupportedError(
                f"node {node.name!r}: no kernel for {node.operator}",
                got="; ".join(self.reasons),
                hint="give one in custom_kernels={(domain, op_type): kernel}",
            )
        self.first, self.call = self.functions[0]
        self.used = self.first
        if not node.truth and not all(name in node.types for name in node.inputs if name):
            self.call = guarded(node, self.call)

    def run(self, inputs: Sequence[Any]) -> Any:
        """The output by the first kernel that takes the inputs, or a tuple of as many as there are.

        Raises
        ------
        RoundoffError
            Every kernel failed, or torch's found a fault of the model; the message names the node.
        """
        try:
            result = self.call(*inputs)
        except Exception as error:
            return self.instead(error, inputs)
        self.used = self.first
        return result

    def instead(self, error: Exception, inputs: Sequence[Any]) -> Any:
        """As :meth:`run`, by the kernels after the first, which raised *error*."""
        self._pass_on(self.first, error, inputs)
        failed = [(self.first, error)]
        for name, function in self.functions[1:]:
            try:
                result = function(*inputs)
            except Exception as another:
                self._pass_on(name, another, inputs)
                failed.append((name, another))
                continue
            self.used = name
            return result
        told = [f"{name}: {brief(error)}" for name, error in failed] + self.reasons
        unknown = all(isinstance(error, NotHandledError) for _, error in failed)
        raise (UnsupportedError if unknown else ModelError)(
            f"{self._where}: no kernel computes it on these inputs",
            got="; ".join([", ".join(map(type_name, inputs)), *told]),
            hint="other inputs, or a kernel in custom_kernels={(domain, op_type): kernel}",
        ) from error

    def several(self, result: Any) -> Sequence[Any]:
        """The results of a node with several outputs.

        Raises
        ------
        ModelError
            The kernel gave fewer, or one that is no sequence; the message names the node.
        """
        wanted = len(self.node.outputs)
        if not isinstance(result, (tuple, list)) or len(result) < wanted:
            raise ModelError(
                f"{self._where}: results of its kernel {self.used!r}",
                got=type_name(result),
                expected=f"a tuple of {wanted}",
            )
        return result

    def _pass_on(self, name: str, error: Exception, inputs: Sequence[Any]) -> None:
        """Raise an error that no other kernel is to hide, with the node's name."""
        if name == "torch" and isinstance(error, RoundoffError):
            if not error.message.startswith("node "):
                error.message = f"{self._where}: {error.message}"
            raise error
        # A kernel of torch's takes tensors, and may fail in any way on what else a value can be.
        tensors = all(isinstance(x, torch.Tensor) for x in inputs)
        alone = len(self.functions) == 1  # such as a custom kernel: the node is named
        refused = isinstance(error, REFUSALS) or not tensors or alone
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or not refused:
            error.add_note(f"in {self._where}, by its kernel {name!r}")
            raise error

    @property
    def _where(self) -> str:
        return f"node {self.node.name!r} ({self.node.operator})"
