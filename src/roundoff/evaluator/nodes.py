"""A node as the evaluator sees it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch


class NotHandledError(Exception):
    """A kernel leaves this node, or these inputs, to the next one.

    The evaluator then tries the next kernel of its order; a custom kernel has none after it.

    Examples
    --------
    >>> from roundoff.evaluator import Node, ReferenceKernel
    >>> node = Node(0, "twice", "nowhere", "Twice", 1, 1, ("X",), ("Z",))
    >>> try:
    ...     ReferenceKernel().bind(node)
    ... except NotHandledError as error:
    ...     print(error)
    ONNX's reference evaluator has no operator nowhere.Twice
    """


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all nodes of an evaluator share.

    Attributes
    ----------
    providers : tuple
        ONNX Runtime's, in order of preference.
    device : torch.device
        Where results live.
    truth : bool
        Whether nodes compute in float64 whatever their types say.

    Examples
    --------
    >>> Settings().device, Settings().truth
    (device(type='cpu'), False)
    """

    providers: tuple[Any, ...] = ("CPUExecutionProvider",)
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    truth: bool = False


@dataclasses.dataclass(eq=False)
class Node:
    """One node of the graph, ready to run.

    Attributes
    ----------
    index : int
        Position in the ``nodes`` of its graph.
    name : str
        As in the model; an empty one is replaced by ``"<op_type>_<position>"``.
    domain : str
        As in the model; ``""`` for ONNX's own.
    op_type : str
        As in the model.
    version : int
        Version of the operator: the opset in which its definition last changed. For a domain
        that ONNX does not define, the version of the opset that the model imports.
    opset : int
        Version of the opset of *domain* that the model imports.
    inputs : tuple of str
        Names of the results that it reads, unique in the graph; ``""`` for an absent one.
    outputs : tuple of str
        Names of its results, unique in the graph; ``""`` for one that is not asked for.
    captures : tuple of str
        Results of the graph that the node's subgraphs read.
    attributes : dict
        Attributes that the node has, as Python objects; a tensor is a value.
    subgraphs : dict of str to GraphProto
        Bodies of If, Loop, Scan by attribute name.
    constants : dict of int to value
        Inputs that are constants of the model, by position.
    types : dict of str to TypeProto
        What is known of inputs and outputs before a run; a name that is missing is not known.
    settings : Settings
        What all nodes of an evaluator share.

    Examples
    --------
    >>> from roundoff.evaluator import TorchOnnxEvaluator
    >>> from roundoff.models import layer_norm_matmul
    >>> node = TorchOnnxEvaluator(layer_norm_matmul()).nodes[0]
    >>> node.operator, node.version, node.outputs, node.attribute("axis")
    ('LayerNormalization', 17, ('normed',), -1)
    """

    index: int
    name: str
    domain: str
    op_type: str
    version: int
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    captures: tuple[str, ...] = ()
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    subgraphs: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    constants: dict[int, Any] = dataclasses.field(default_factory=dict, repr=False)
    types: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    settings: Settings = dataclasses.field(default_factory=Settings, repr=False)
    proto: Any = dataclasses.field(default=None, repr=False)

    @property
    def operator(self) -> str:
        """Domain and operator: ``"Add"``, ``"com.microsoft.FusedMatMul"``."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type

    @property
    def truth(self) -> bool:
        """Whether the node computes in float64 whatever its types say."""
        return self.settings.truth

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute, or *default* where the node has none.

        ONNX's floating attributes, defaults included, are float32: 1e-5 is 9.99999974737875e-06.
        """
        value = self.attributes.get(name, default)
        return float(np.float32(value)) if isinstance(value, float) else value
