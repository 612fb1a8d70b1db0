"""Operators of ONNX Runtime (domain com.microsoft) that a fused transformer layer holds.

ONNX Runtime computes them as well; with these a fused graph has a float64 truth, and runs
without ONNX Runtime. Source: ONNX Runtime's ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's users write it

from roundoff.evaluator.nodes import Node

from .common import NotHandledError, axis_of, torch_kernel

Tensor = torch.Tensor
Function = Callable[..., Any]
_MS = "com.microsoft"


def _rms(x: Tensor, scale: Tensor, epsilon: float, rank: int) -> tuple[Tensor, Tensor]:
    wide = x if x.dtype is torch.float64 else x.float()
    over = list(range(-rank, 0))
    inverse = torch.rsqrt((wide * wide).mean(over, keepdim=True) + epsilon)
    return (wide * inverse * scale).to(x.dtype), inverse


@torch_kernel("SimplifiedLayerNormalization", 1)
def _simplified(node: Node) -> Function:
    axis, epsilon = node.attribute("axis", -1), node.attribute("epsilon", 1e-5)

    def normalize(x: Tensor, scale: Tensor) -> Any:
        y, inverse = _rms(x, scale, epsilon, x.dim() - axis_of(axis, x.dim()))
        return (y, inverse) if len(node.outputs) > 1 else y

    return normalize


@torch_kernel("SkipSimplifiedLayerNormalization", 1, domain=_MS)
def _skip_simplified(node: Node) -> Function:
    epsilon = node.attribute("epsilon", 1e-5)

    def normalize(x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None) -> Any:
        total = x + skip if bias is None else x + skip + bias
        y, inverse = _rms(total, gamma, epsilon, 1)
        return _some(node, (y, None, inverse, total))

    return normalize


@torch_kernel("SkipLayerNormalization", 1, domain=_MS)
def _skip_layer(node: Node) -> Function:
    epsilon = node.attribute("epsilon", 1e-5)

    def normalize(
        x: Tensor, skip: Tensor, gamma: Tensor, beta: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Any:  # fmt: skip
        total = x + skip if bias is None else x + skip + bias
        y = F.layer_norm(total, total.shape[-1:], gamma, beta, epsilon)
        if node.wants(1) or node.wants(2):
            raise NotHandledError("SkipLayerNormalization with its statistics")
        return _some(node, (y, None, None, total))

    return normalize


def _some(node: Node, results: tuple[Any, ...]) -> Any:
    return results[0] if len(node.outputs) == 1 else results[: len(node.outputs)]


@torch_kernel("QuickGelu", 1, domain=_MS)
def _quick_gelu(node: Node) -> Function:
    alpha = node.attribute("alpha", 1.702)
    return lambda x: x * torch.sigmoid(alpha * x)


@torch_kernel("Gelu", 1, domain=_MS)
def _gelu(node: Node) -> Function:
    return F.gelu


@torch_kernel("BiasGelu", 1, domain=_MS)
def _bias_gelu(node: Node) -> Function:
    return lambda x, bias: F.gelu(x + bias)


@torch_kernel("FastGelu", 1, domain=_MS)
def _fast_gelu(node: Node) -> Function:
    def gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.gelu(x if bias is None else x + bias, approximate="tanh")

    return gelu


@torch_kernel("FusedMatMul", 1, domain=_MS)
def _fused_matmul(node: Node) -> Function:
    alpha = node.attribute("alpha", 1.0)
    trans_a, trans_b = node.attribute("transA", 0), node.attribute("transB", 0)
    if node.attribute("transBatchA", 0) or node.attribute("transBatchB", 0):
        raise NotHandledError("FusedMatMul of transposed batches")

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        a = a.transpose(-1, -2) if trans_a and a.dim() > 1 else a
        b = b.transpose(-1, -2) if trans_b and b.dim() > 1 else b
        y = torch.matmul(a, b)
        return y if alpha == 1 else y * alpha

    return matmul
