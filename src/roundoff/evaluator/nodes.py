"""A node as the evaluator sees it."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(eq=False)
class Node:
    """One node of the graph, ready to run.

    Attributes
    ----------
    index : int
        Position in the ``nodes`` of its graph.
    path : tuple of str
        Function calls and subgraphs that hold it; empty in the main graph.
    name, domain, op_type : str
        As in the model; an empty name is replaced by ``"<op_type>_<index>"``.
    version : int
        Version of the opset of *domain* that the node is written in.
    inputs, outputs : tuple of str
        Names of the results, unique in the graph; ``""`` for an absent one.
    captures : tuple of str
        Results of the enclosing graph that the node's subgraphs read.
    attributes : dict
        Attribute values as Python objects (TensorProto and GraphProto stay protos).
    subgraphs : dict of str to object with ``nodes``
        Bodies of If, Loop, Scan by attribute name.
    """

    index: int
    path: tuple[str, ...]
    name: str
    domain: str
    op_type: str
    version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    captures: tuple[str, ...] = ()
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    subgraphs: dict[str, Any] = dataclasses.field(default_factory=dict)
    proto: Any = dataclasses.field(default=None, repr=False)

    @property
    def label(self) -> str:
        """Path and name: ``"layer_0/if_3/then_branch/Add_7"``."""
        return "/".join((*self.path, self.name))
