"""Kernels and how one is chosen for a node.

Torch kernels are registered for an operator and the versions of it that they implement. An
operator's version is the opset in which ONNX last changed it, so a kernel is never used for a
definition that it was not written for: a newer one falls to a generic kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roundoff.errors import ArgumentError, UnsupportedError

from .generic import NotHandledError, OrtKernel, ReferenceKernel, definition
from .nodes import Node
from .torch_kernels import factory_of

Function = Callable[..., Any]


class Kernel:
    """Turns a node into a function of its inputs.

    A subclass defines :meth:`bind`; the function it returns takes the node's inputs (None for an
    absent one), then its captures, and returns the output, or a tuple of as many as the node has.

    Attributes
    ----------
    name : str
        What :meth:`~roundoff.evaluator.TorchOnnxEvaluator.kernels_used` reports.

    Examples
    --------
    >>> import onnx.parser
    >>> import torch
    >>> from roundoff.evaluator import TorchOnnxEvaluator
    >>> class Twice(Kernel):
    ...     name = "twice"
    ...
    ...     def bind(self, node):
    ...         return lambda x: 2 * x
    >>> graph = onnx.parser.parse_graph("g (float[2] X) => (float[2] Z) { Z = Abs(X) }")
    >>> evaluator = TorchOnnxEvaluator(graph, custom_kernels={("", "Abs"): Twice()})
    >>> evaluator.run(None, {"X": torch.ones(2)})
    [tensor([2., 2.])]
    """

    name = "custom"

    def bind(self, node: Node) -> Function:
        """The function that computes *node*."""
        raise NotImplementedError


class TorchKernel(Kernel):
    """The torch kernel of an operator."""

    name = "torch"

    def bind(self, node: Node) -> Function:
        """The function that computes *node* with torch.

        Raises
        ------
        NotHandledError
            Torch computes no such operator, version or combination of attributes.
        """
        factory = factory_of(node)
        if factory is None:
            raise NotHandledError(f"no torch kernel for {node.operator} version {node.version}")
        return factory(node)


class DefinitionKernel(Kernel):
    """The torch kernels of the operators that ONNX defines an operator by."""

    name = "torch"

    def bind(self, node: Node) -> Function:
        """The function that computes *node* by its definition."""
        return definition(node)


class FunctionKernel(Kernel):
    """A plain function of inputs and attributes as a kernel."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def bind(self, node: Node) -> Function:
        """The function, the node's attributes given by keyword."""
        function, attributes = self.function, dict(node.attributes)
        if not attributes:
            return function
        return lambda *inputs: function(*inputs, **attributes)


#: The kernels that ``kernels=`` names, in the default order.
BY_NAME: dict[str, list[Any]] = {
    "torch": [TorchKernel(), DefinitionKernel()],
    "ort": [OrtKernel()],
    "reference": [ReferenceKernel()],
}
#: In truth mode ONNX Runtime is left out: its kernels may round to float32 inside.
TRUTH_ORDER: tuple[str, ...] = ("torch", "reference")

#: Operators for which ONNX's reference comes before ONNX Runtime, and why.
REFERENCE_FIRST: dict[tuple[str, str], str] = {
    ("", "DFT"): "ONNX Runtime's loses four digits",
    ("", "STFT"): "ONNX Runtime's loses two digits",
    ("", "Resize"): "ONNX Runtime's align_corners rounds the output size before the scale",
    ("", "MaxUnpool"): "ONNX Runtime's reads indices in the shape before output_shape",
    ("", "Dropout"): "a seed gives the mask that ONNX's own test data has",
}

#: ``custom_kernels={("", "LayerNormalization"): LayerNormalizationOrt}``: torch everywhere else.
LayerNormalizationOrt = OrtKernel("LayerNormalization")
#: ``custom_kernels={("", "MatMul"): MatMulOrt}``: torch everywhere but in matrix products.
MatMulOrt = OrtKernel("MatMul")


class Choice:
    """Which kernels to try for a node, in order.

    Parameters
    ----------
    custom : mapping (domain, op_type) -> Kernel or function
    order : sequence of names, or None for the default
    truth : bool
    """

    def __init__(
        self, custom: Mapping[tuple[str, str], Any] | None, order: Any, truth: bool
    ) -> None:
        if custom is not None and not isinstance(custom, Mapping):
            raise ArgumentError(
                "custom_kernels",
                got=type(custom).__name__,
                expected='a mapping, such as {("", "MatMul"): kernel}',
            )
        self.custom = {_key(k): _kernel(_key(k), v) for k, v in dict(custom or {}).items()}
        self.given = order is not None
        self.order = _order(order) if self.given else TRUTH_ORDER if truth else tuple(BY_NAME)

    def replaced(self, domain: str, op_type: str) -> bool:
        """Whether a custom kernel stands for the operator."""
        return (domain, op_type) in self.custom

    def kernels(self, node: Node) -> list[Any]:
        """The kernels to try for *node*."""
        key = (node.domain, node.op_type)
        if key in self.custom:
            return [self.custom[key]]
        order = self.order
        if key in REFERENCE_FIRST and not self.given:
            order = ("torch", "reference", *(name for name in order if name == "ort"))
        if node.subgraphs and self.custom:
            raise UnsupportedError(
                f"node {node.name!r}: custom kernels do not reach into the body of a"
                f" {node.op_type}",
                hint="no custom kernels",
            )
        return [kernel for name in order for kernel in BY_NAME[name]]


def _key(key: Any) -> tuple[str, str]:
    if not (isinstance(key, tuple) and len(key) == 2 and all(isinstance(k, str) for k in key)):
        raise ArgumentError(
            "a kernel's key", got=key, expected='(domain, op_type), such as ("", "MatMul")'
        )
    return ("" if key[0] == "ai.onnx" else key[0], key[1])


def _kernel(key: tuple[str, str], kernel: Any) -> Any:
    if isinstance(kernel, type):
        kernel = kernel()
    if isinstance(kernel, OrtKernel) and kernel.operator not in (None, key):
        raise ArgumentError(
            f"custom kernel of {key}",
            got=f"an OrtKernel of {kernel.operator}",
            expected=f"OrtKernel({key[1]!r}, {key[0]!r})",
        )
    if hasattr(kernel, "bind"):
        return kernel
    if callable(kernel):
        return FunctionKernel(kernel)
    raise ArgumentError(
        f"custom kernel of {key}", got=type(kernel).__name__, expected="a Kernel or a function"
    )


def _order(names: Any) -> tuple[str, ...]:
    order = (names,) if isinstance(names, str) else names
    order = tuple(order) if isinstance(order, Sequence) else ()
    if not order or any(n not in BY_NAME for n in order):
        raise ArgumentError("kernels", got=names, expected=f"names among {', '.join(BY_NAME)}")
    return order
