"""What the families share: their registry, axes, constants that steer a kernel, element types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from roundoff.dtypes import dtype_info
from roundoff.errors import ShapeError
from roundoff.evaluator.nodes import Node, NotHandledError

__all__ = [
    "NEWEST",
    "REGISTERED",
    "Function",
    "Node",
    "NotHandledError",
    "ShapeError",
    "Tensor",
    "TorchKernel",
    "axis_of",
    "element_type",
    "ints",
    "steering",
    "torch_function",
    "torch_kernel",
    "torch_steered",
]

Tensor = torch.Tensor
Function = Callable[..., Any]
Factory = Callable[[Node], Function]

#: The newest opset whose definitions the kernels implement.
NEWEST = 28
#: Operator -> version -> factory of its torch kernel.
REGISTERED: dict[str, dict[int, Factory]] = {}


def torch_kernel(op_type: str, since: int) -> Callable[[Factory], Factory]:
    """Register a factory ``node -> function`` for *op_type*, from this version of it on."""

    def register(factory: Factory) -> Factory:
        REGISTERED.setdefault(op_type, {})[since] = factory
        return factory

    return register


def torch_function(op_type: str, since: int, **attributes: Any) -> Callable[[Function], Function]:
    """Register a function of the inputs, and by keyword of these attributes with defaults."""

    def register(function: Function) -> Function:
        @torch_kernel(op_type, since)
        def factory(node: Node) -> Function:
            given = {name: node.attribute(name, value) for name, value in attributes.items()}
            return functools.partial(function, **given) if given else function

        return function

    return register


class TorchKernel:
    """The torch kernel of an operator."""

    name = "torch"

    def bind(self, node: Node) -> Function:
        """The function that computes *node* with torch.

        Raises
        ------
        NotHandledError
            Torch computes no such operator, version or combination of attributes.
        """
        versions = REGISTERED.get("" if node.domain else node.op_type, {})
        known = [since for since in versions if since <= node.version <= NEWEST]
        if not known:
            raise NotHandledError(f"no torch kernel for {node.operator} version {node.version}")
        return versions[max(known)](node)


def element_type(node: Node, onnx_type: int) -> torch.dtype:
    """The torch dtype for an element type that an attribute names; float64 in truth mode."""
    info = dtype_info(onnx_type)
    if node.truth and info.is_float:
        return torch.float64
    dtype = getattr(torch, info.name, None)
    if dtype is None or info.bits < 8:
        raise NotHandledError(f"torch has no {info.name}")
    return dtype


def axis_of(axis: int, rank: int) -> int:
    """A non-negative axis.

    Raises
    ------
    ShapeError
        When it is not in [-rank, rank).
    """
    if not -rank <= axis < rank:
        raise ShapeError("axis out of range", got=axis, expected=f"within {-rank}..{rank - 1}")
    return axis % rank if rank else 0


def ints(value: Any) -> list[int]:
    """An integer tensor as a list of Python integers (a scalar as a list of one)."""
    numbers: Any = value.tolist()
    return numbers if isinstance(numbers, list) else [numbers]


def steering(node: Node, position: int, name: str = "") -> list[int] | None:
    """Integers that the model fixes, else None.

    They are the input at *position*, or the attribute *name* that older versions have for it.
    """
    value = node.constants.get(position)
    return node.attribute(name) if value is None else ints(value)


def torch_steered(
    op_type: str, since: int, name: str = "", **attributes: Any
) -> Callable[[Function], Function]:
    """Register a function of an input, and of the integers that its second input holds.

    Older versions have the attribute *name* for them; they are None where neither is given. By
    keyword it gets these attributes with defaults.
    """

    def register(function: Function) -> Function:
        @torch_kernel(op_type, since)
        def factory(node: Node) -> Function:
            fixed = steering(node, 1, name)
            given = {key: node.attribute(key, value) for key, value in attributes.items()}

            def call(x: Tensor, numbers: Any = None) -> Any:
                known = ints(numbers) if fixed is None and numbers is not None else fixed
                return function(x, known, **given)

            return call

        return function

    return register
