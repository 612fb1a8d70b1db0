"""Elementwise operators, with ONNX's broadcasting."""

from __future__ import annotations

import functools
import math
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

#: Operators that torch has under the same name.
_SAME = (
    "Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "IsNaN", "Log", "Reciprocal", "Relu", "Round",
    "Sigmoid", "Sin", "Sqrt", "Tanh",
)  # fmt: skip
# For the commonest, Python's operator is a shorter way to the same code than torch's function.
_OTHERS: dict[str, Function] = {
    "Add": operator.add,
    "And": torch.logical_and,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Identity": lambda x: x,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Mul": operator.mul,
    "Neg": operator.neg,
    "Not": torch.logical_not,
    "Or": torch.logical_or,
    "Sub": operator.sub,
    "Where": torch.where,
    "Xor": torch.logical_xor,
}

for _op_type in _SAME:
    torch_function(_op_type, 1)(getattr(torch, _op_type.lower()))
# Before version 7 those of two inputs broadcast in another way.
for _op_type, _function in _OTHERS.items():
    torch_function(_op_type, 1 if _op_type in ("Identity", "Neg", "Not") else 7)(_function)


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
        if a.dtype == b.dtype:
            return torch.pow(a, b)
        if not a.is_floating_point():
            raise NotHandledError("a power of a wider type")
        return torch.pow(a.double(), b.double()).to(a.dtype)

    fixed = node.constants.get(1)
    if not isinstance(fixed, Tensor) or fixed.numel() != 1 or not fixed.is_floating_point():
        return power
    exponent = fixed.item()  # torch has shorter ways for 2, 0.5 and their like

    def known_power(a: Tensor, b: Tensor) -> Tensor:
        if a.is_floating_point() and b.dim() <= a.dim():
            return torch.pow(a, exponent)
        return power(a, b)

    return known_power


def _register_variadic(op_type: str, pair: Function) -> None:
    @torch_function(op_type, 8)
    def of_all(*inputs: Tensor) -> Tensor:
        return functools.reduce(pair, inputs)


_register_variadic("Max", torch.maximum)
_register_variadic("Min", torch.minimum)
_register_variadic("Sum", torch.add)


@torch_function("Clip", 11)
def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    return x if low is None and high is None else torch.clamp(x, low, high)


# -- activations -------------------------------------------------------------------------------


torch_function("Elu", 6, alpha=1.0)(F.elu)
torch_function("Celu", 12, alpha=1.0)(F.celu)


@torch_function("Gelu", 20, approximate="none")
def _gelu(x: Tensor, *, approximate: str) -> Tensor:
    if x.dtype == torch.float64 and approximate == "none":
        # F.gelu has no digits left where x is below -8.
        return x / 2 * torch.special.erfc(x * -math.sqrt(0.5))
    return F.gelu(x, approximate=approximate)


@torch_function("LeakyRelu", 6, alpha=0.01)
def _leaky_relu(x: Tensor, *, alpha: float) -> Tensor:
    return F.leaky_relu(x, alpha)


@torch_function("HardSwish", 14)
def _hard_swish(x: Tensor) -> Tensor:
    return x * torch.clamp(x / 6 + 0.5, 0, 1)


@torch_function("Softplus", 1)
def _softplus(x: Tensor) -> Tensor:
    # F.softplus becomes the identity above 20, which is off by 2e-9.
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device))


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
