"""Operators of ONNX Runtime (domain com.microsoft) that a fused transformer layer holds.

ONNX Runtime computes them as well; with these a fused graph has a float64 truth, and runs
without ONNX Runtime. Source: ONNX Runtime's ContribOperators.md.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's users write it

from .common import Function, Node, NotHandledError, Tensor, axis_of, torch_function, torch_kernel

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
        return (y, None, inverse, total)[: len(node.outputs)] if len(node.outputs) > 1 else y

    return normalize


@torch_kernel("SkipLayerNormalization", 1, domain=_MS)
def _skip_layer(node: Node) -> Function:
    epsilon = node.attribute("epsilon", 1e-5)
    if node.wants(1) or node.wants(2):
        raise NotHandledError("SkipLayerNormalization with its statistics")

    def normalize(
        x: Tensor, skip: Tensor, gamma: Tensor, beta: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Any:  # fmt: skip
        total = x + skip if bias is None else x + skip + bias
        y = F.layer_norm(total, total.shape[-1:], gamma, beta, epsilon)
        return (y, None, None, total)[: len(node.outputs)] if len(node.outputs) > 1 else y

    return normalize


@torch_function("QuickGelu", 1, domain=_MS, alpha=1.702)
def _quick_gelu(x: Tensor, *, alpha: float) -> Tensor:
    return x * torch.sigmoid(alpha * x)


def _gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate=approximate)


torch_function("Gelu", 1, domain=_MS)(_gelu)
torch_function("BiasGelu", 1, domain=_MS)(_gelu)
torch_function("FastGelu", 1, domain=_MS)(functools.partial(_gelu, approximate="tanh"))


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
