"""A node with the kernels bound to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from roundoff.errors import ModelError, RoundoffError, UnsupportedError

from .checks import guarded
from .nodes import Node, NotHandledError
from .values import brief, type_name


class Bound:
    """A node with its kernels: the first that can is used, the others where it fails.

    Attributes
    ----------
    used : str
        Name of the kernel that ran the node last.
    call : callable
        The function of the first kernel.
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
        self.used, self.call = self.functions[0]
        if not node.truth and not all(name in node.types for name in node.inputs if name):
            self.call = guarded(node, self.call)
            self.functions[0] = self.used, self.call

    def run(self, inputs: Sequence[Any]) -> Any:
        """The output by the first kernel that does not fail, or a tuple of as many as there are.

        Raises
        ------
        RoundoffError
            Every kernel failed, or torch's found a fault of the model; the message names the node.
        """
        where, failed = f"node {self.node.name!r} ({self.node.operator})", []
        for name, function in self.functions:
            try:
                result = function(*inputs)
            except Exception as error:
                if name == "torch" and isinstance(error, RoundoffError):
                    if not error.message.startswith("node "):
                        error.message = f"{where}: {error.message}"
                    raise
                failed.append((name, error))
                continue
            self.used = name
            return result
        told = [f"{name}: {brief(error)}" for name, error in failed] + self.reasons
        unknown = all(isinstance(error, NotHandledError) for _, error in failed)
        raise (UnsupportedError if unknown else ModelError)(
            f"{where}: no kernel computes it on these inputs",
            got="; ".join([", ".join(map(type_name, inputs)), *told]),
            hint="other inputs, or a kernel in custom_kernels={(domain, op_type): kernel}",
        ) from failed[0][1]
