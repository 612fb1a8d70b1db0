"""``TorchOnnxEvaluator``: a model, its kernels, and the ways to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .nodes import Node
from .registry import Kernel


class Step(NamedTuple):
    """What one node did: see :meth:`TorchOnnxEvaluator.steps`."""

    node: Node
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    kernel: str


class TorchOnnxEvaluator:
    """Runs an ONNX model node by node.

    Parameters
    ----------
    model : ModelProto, GraphProto, FunctionProto, bytes, str or Path
    providers : sequence of str
    custom_kernels : mapping (domain, op_type) -> Kernel or function
        Used instead of every other kernel, in subgraphs and local functions too. A plain
        function is called as ``f(*inputs, **attributes)``.
    verbose : int
    kernels : sequence of str, or mapping (domain, op_type) -> sequence of str
        Order in which kernels are tried: any of ``"torch"``, ``"ort"``, ``"reference"``.
    truth : bool
        Compute in float64 throughout.

    Attributes
    ----------
    input_names, output_names : list of str
    nodes : tuple of Node
        In execution order, local functions inlined (``node.path`` says where a node comes
        from). If, Loop and Scan are one node each; ``node.subgraphs`` holds their bodies.
    """

    input_names: list[str]
    output_names: list[str]
    nodes: tuple[Node, ...]

    def __init__(
        self,
        model: Any,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
        custom_kernels: Mapping[tuple[str, str], Kernel | Callable[..., Any]] | None = None,
        verbose: int = 0,
        *,
        kernels: Any = ("torch", "ort", "reference"),
        truth: bool = False,
    ) -> None:
        raise NotImplementedError

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Outputs (all, or any named results of the main graph) as torch tensors."""
        raise NotImplementedError

    def intermediates(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Every result of the main graph by name: inputs, constants and outputs too."""
        raise NotImplementedError

    def steps(self, feeds: Mapping[str, Any]) -> Iterator[Step]:
        """Run, and yield after each node; results are freed at last use as in :meth:`run`.

        Two evaluators of one model advance together with
        ``zip(a.steps(feeds), b.steps(feeds), strict=True)``.
        """
        raise NotImplementedError

    def run_node(self, node: Node | int | str, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run one node (itself, its index or its name) on *inputs*, and nothing else.

        *inputs* follow ``node.inputs`` (None for an absent one), then ``node.captures`` for
        an If, Loop or Scan. ``step.inputs`` of another evaluator has that very layout.
        """
        raise NotImplementedError

    def kernels_used(self) -> dict[str, str]:
        """Which kernel ran each node so far: ``node.label`` -> ``"torch"``, ``"ort"``, …"""
        raise NotImplementedError

    def walk(self) -> Iterator[Node]:
        """Every node, those of subgraphs included, depth first."""
        raise NotImplementedError
