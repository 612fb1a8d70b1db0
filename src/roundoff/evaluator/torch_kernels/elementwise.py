"""Elementwise operators, with ONNX's broadcasting."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's users write it

from roundoff.evaluator.generic import check_divisor

from .common import (
    Function,
    Node,
    NotHandledError,
    Tensor,
    element_type,
    torch_function,
    torch_kernel,
)

_UNARY: dict[str, tuple[Function, int]] = {
    "Abs": (torch.abs, 6),
    "Ceil": (torch.ceil, 6),
    "Cos": (torch.cos, 7),
    "Erf": (torch.erf, 9),
    "Exp": (torch.exp, 6),
    "Floor": (torch.floor, 6),
    "Identity": (lambda x: x, 1),
    "IsNaN": (torch.isnan, 9),
    "Log": (torch.log, 6),
    "Neg": (operator.neg, 6),
    "Not": (torch.logical_not, 1),
    "Reciprocal": (torch.reciprocal, 6),
    "Relu": (torch.relu, 6),
    "Round": (torch.round, 11),
    "Sigmoid": (torch.sigmoid, 6),
    "Sin": (torch.sin, 7),
    "Sqrt": (torch.sqrt, 6),
    "Tanh": (torch.tanh, 6),
}
# For the commonest, Python's operator is a shorter way to the same code than torch's function.
_BINARY: dict[str, tuple[Function, int]] = {
    "Add": (operator.add, 7),
    "And": (torch.logical_and, 7),
    "Equal": (torch.eq, 7),
    "Greater": (torch.gt, 7),
    "GreaterOrEqual": (torch.ge, 12),
    "Less": (torch.lt, 7),
    "LessOrEqual": (torch.le, 12),
    "Mul": (operator.mul, 7),
    "Or": (torch.logical_or, 7),
    "Sub": (operator.sub, 7),
    "Where": (torch.where, 9),
    "Xor": (torch.logical_xor, 7),
}


for _op_type, (_function, _since) in (_UNARY | _BINARY).items():
    torch_function(_op_type, _since)(_function)


@torch_function("Div", 7)
def _div(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return torch.div(a, b)
    check_divisor(a, b)
    return torch.div(a, b, rounding_mode="trunc")


@torch_function("Mod", 10, fmod=0)
def _mod(a: Tensor, b: Tensor, *, fmod: int) -> Tensor:
    if not a.is_floating_point():
        check_divisor(a, b)
    elif not fmod:
        raise NotHandledError("Mod of floats needs fmod=1")
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


@torch_kernel("Pow", 7)
def _pow(node: Node) -> Function:
    def power(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype != b.dtype:
            raise NotHandledError("a power of another type")
        return torch.pow(a, b)

    fixed = node.constants.get(1)
    if not isinstance(fixed, Tensor) or fixed.numel() != 1 or not fixed.is_floating_point():
        return power
    exponent = fixed.item()  # torch has shorter ways for 2, 0.5 and their like

    def known_power(a: Tensor, b: Tensor) -> Tensor:
        if a.is_floating_point() and b.dim() <= a.dim():
            return torch.pow(a, exponent)
        return power(a, b)

    return known_power


def _variadic(op_type: str, since: int, pair: Function) -> None:
    @torch_function(op_type, since)
    def of_all(*inputs: Tensor) -> Tensor:
        return functools.reduce(pair, inputs)


_variadic("Max", 8, torch.maximum)
_variadic("Min", 8, torch.minimum)
_variadic("Sum", 8, torch.add)


@torch_function("Clip", 11)
def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    if low is None and high is None:
        return x
    if x.is_floating_point():  # a NaN bound would otherwise be ignored
        return torch.clamp(x, low, high)
    y = x if low is None else torch.maximum(x, low)
    return y if high is None else torch.minimum(y, high)


# -- activations -------------------------------------------------------------------------------


torch_function("Gelu", 20, approximate="none")(F.gelu)


def _softplus(x: Tensor) -> Tensor:
    # F.softplus becomes the identity above 20, which is off by 2e-9.
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device))


#: Activations with numbers as attributes: function, first version, attributes with defaults.
_PARAMETRIC: dict[str, tuple[Function, int, dict[str, Any]]] = {
    "Elu": (F.elu, 6, {"alpha": 1.0}),
    "LeakyRelu": (lambda x, alpha: F.leaky_relu(x, alpha), 6, {"alpha": 0.01}),
    "HardSwish": (lambda x: x * torch.clamp(x / 6 + 0.5, 0, 1), 14, {}),
    "Softplus": (_softplus, 1, {}),
}


for _op_type, (_function, _since, _defaults) in _PARAMETRIC.items():
    torch_function(_op_type, _since, **_defaults)(_function)


# -- casts -------------------------------------------------------------------------------------

_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}


@torch_kernel("Cast", 6)
def _cast(node: Node) -> Function:
    dtype = element_type(node, node.attribute("to"))
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise NotHandledError("ONNX defines its own conversion to float8")

    def cast(x: Any) -> Tensor:
        if not isinstance(x, Tensor):
            raise NotHandledError("torch has no such element type")
        if x.is_floating_point() and dtype in _UNSIGNED:
            raise NotHandledError("torch goes through int64")
        return x.to(dtype)

    return cast
