"""Kernels and how one is chosen for a node.

Torch kernels are registered for an operator and the versions of it that they implement. An
operator's version is the opset in which ONNX last changed it, so a kernel is never used for a
definition that it was not written for: a newer one falls to a generic kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roundoff.errors import ArgumentError, UnsupportedError

from .generic import DefinitionKernel, OrtKernel, ReferenceKernel
from .loading import domain_of
from .nodes import Node
from .torch_kernels import TorchKernel

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


class FunctionKernel(Kernel):
    """A plain function of inputs and attributes as a kernel."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def bind(self, node: Node) -> Function:
        """The function, the node's attributes given by keyword."""
        return functools.partial(self.function, **node.attributes)


#: The kernels that ``kernels=`` names, in the default order.
BY_NAME: dict[str, list[Any]] = {
    "torch": [TorchKernel(), DefinitionKernel()],
    "ort": [OrtKernel()],
    "reference": [ReferenceKernel()],
}
#: In truth mode ONNX Runtime is left out: its kernels may round to float32 inside.
TRUTH_ORDER = ("torch", "reference")
#: Operators for which ONNX's reference comes before ONNX Runtime. That one's DFT and STFT lose
#: digits, as its ReduceProd of int64 and Shrink of float64 do; its Resize rounds the output size
#: before the scale, its MaxUnpool reads indices in another shape, its ReduceMax and ReduceMin of
#: nothing may have another shape, its Sign of NaN in 16 bits is 0; a seed of Dropout gives the mask
#: of ONNX's own test data.
REFERENCE_FIRST = {
    "DFT", "Dropout", "MaxUnpool", "ReduceMax", "ReduceMin", "ReduceProd", "Resize", "STFT",
    "Shrink", "Sign",
}  # fmt: skip

#: ``custom_kernels={("", "LayerNormalization"): LayerNormalizationOrt}``: torch everywhere else.
LayerNormalizationOrt = OrtKernel("LayerNormalization")
#: ``custom_kernels={("", "MatMul"): MatMulOrt}``: torch everywhere but in matrix products.
MatMulOrt = OrtKernel("MatMul")


def kernels_for(
    node: Node, custom: Mapping[tuple[str, str], Any], order: Sequence[str] | None
) -> list[Any]:
    """The kernels to try for a node, in order."""
    if (node.domain, node.op_type) in custom:
        return [custom[node.domain, node.op_type]]
    if node.subgraphs and custom:
        raise UnsupportedError(
            f"node {node.name!r}: custom kernels do not reach into the body of a {node.op_type}",
            hint="no custom kernels",
        )
    if order is None:
        order = TRUTH_ORDER if node.truth else tuple(BY_NAME)
        if node.operator in REFERENCE_FIRST:
            order = sorted(order, key="ort".__eq__)
    return [kernel for name in order for kernel in BY_NAME[name]]


def check_custom(kernels: Any) -> dict[tuple[str, str], Any]:
    """Custom kernels by (domain, op_type).

    Raises
    ------
    ArgumentError
        A key or a kernel is none, or stands for another operator.
    """
    if kernels is not None and not isinstance(kernels, Mapping):
        raise ArgumentError(
            "custom_kernels",
            got=type(kernels).__name__,
            expected='a mapping, such as {("", "MatMul"): kernel}',
        )
    checked = {}
    for key, kernel in (kernels or {}).items():
        if not (isinstance(key, tuple) and [type(part) for part in key] == [str, str]):
            raise ArgumentError(
                "a kernel's key", got=key, expected='(domain, op_type), such as ("", "MatMul")'
            )
        key = domain_of(key[0]), key[1]
        if isinstance(kernel, type):
            kernel = kernel()
        if isinstance(kernel, OrtKernel) and kernel.operator not in (None, key):
            raise ArgumentError(
                f"custom kernel of {key}",
                got=f"an OrtKernel of {kernel.operator}",
                expected=f"OrtKernel({key[1]!r}, {key[0]!r})",
            )
        if not hasattr(kernel, "bind"):
            if not callable(kernel):
                raise ArgumentError(
                    f"custom kernel of {key}",
                    got=type(kernel).__name__,
                    expected="a Kernel or a function",
                )
            kernel = FunctionKernel(kernel)
        checked[key] = kernel
    return checked


def check_order(names: Any) -> Sequence[str]:
    """Names of kernels, in the order in which they are tried; a single one stands for itself.

    Raises
    ------
    ArgumentError
        One is none, or there is no name.
    """
    order = [names] if isinstance(names, str) else names
    if not isinstance(order, Sequence) or not order or any(name not in BY_NAME for name in order):
        raise ArgumentError("kernels", got=names, expected=f"names among {', '.join(BY_NAME)}")
    return order
