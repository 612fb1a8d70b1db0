"""Normalisations, in the precision that the definition asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's users write it

from roundoff.evaluator.nodes import Node

from .common import NotHandledError, axis_of, element_type, torch_kernel

Tensor = torch.Tensor
Function = Callable[..., Any]


@torch_kernel("LayerNormalization", 17)
def _layer_normalization(node: Node) -> Function:
    axis, epsilon = node.attribute("axis", -1), node.attribute("epsilon", 1e-5)
    stash = element_type(node, node.attribute("stash_type", 1))
    several = len(node.outputs) > 1

    def normalize(x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Any:
        shape = x.shape[axis_of(axis, x.dim()) :]
        if (
            scale.shape != shape
            or (bias is not None and bias.shape != shape)
            or stash not in (torch.float32, torch.float64)
            or (stash is torch.float64 and x.dtype is not stash)
        ):
            return _layer_norm_by_steps(x, scale, bias, len(shape), epsilon, stash, several)
        if not several:
            return F.layer_norm(x, shape, scale, bias, epsilon)
        # float16 and bfloat16 are summed in float32 by the kernel, as stash_type=1 asks.
        y, mean, inverse = torch.native_layer_norm(x, shape, scale, bias, epsilon)
        kept = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
        return y, mean.reshape(kept).to(stash), inverse.reshape(kept).to(stash)

    return normalize


def _layer_norm_by_steps(
    x: Tensor, scale: Tensor, bias: Tensor | None, axes: int, epsilon: float,
    stash: torch.dtype, several: bool,
) -> Any:  # fmt: skip
    """The definition, step by step, for a scale of another shape."""
    over = list(range(-axes, 0))
    wide = x.to(stash)
    mean = wide.mean(over, keepdim=True)
    centred = wide - mean
    inverse = torch.rsqrt((centred * centred).mean(over, keepdim=True) + epsilon)
    y = (centred * inverse).to(x.dtype) * torch.broadcast_to(scale, x.shape)
    if bias is not None:
        y = y + torch.broadcast_to(bias, x.shape)
    return (y, mean, inverse) if several else y


@torch_kernel("RMSNormalization", 23)
def _rms_normalization(node: Node) -> Function:
    axis, epsilon = node.attribute("axis", -1), node.attribute("epsilon", 1e-5)
    stash = element_type(node, node.attribute("stash_type", 1))

    def normalize(x: Tensor, scale: Tensor) -> Tensor:
        over = list(range(axis_of(axis, x.dim()), x.dim()))
        wide = x.to(stash)
        inverse = torch.rsqrt((wide * wide).mean(over, keepdim=True) + epsilon)
        normalized = (wide * inverse).to(scale.dtype)
        return normalized * torch.broadcast_to(scale, x.shape)

    return normalize


@torch_kernel("BatchNormalization", 7, 9, 14, 15)
def _batch_normalization(node: Node) -> Function:
    epsilon = node.attribute("epsilon", 1e-5)
    if node.attribute("training_mode", 0) or len(node.outputs) > 1:
        raise NotHandledError("BatchNormalization in training")
    if not node.attribute("spatial", 1):
        raise NotHandledError("BatchNormalization per activation")

    def normalize(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        if len({t.dtype for t in (x, scale, bias, mean, var)}) > 1 or x.dim() < 2:
            raise NotHandledError("BatchNormalization of several types")
        return F.batch_norm(x, mean, var, scale, bias, False, 0.0, epsilon)

    return normalize


@torch_kernel("InstanceNormalization", 6, 22)
def _instance_normalization(node: Node) -> Function:
    epsilon = node.attribute("epsilon", 1e-5)

    def normalize(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        if x.dim() < 3:
            raise NotHandledError("InstanceNormalization without spatial axes")
        over = list(range(2, x.dim()))
        shape = (1, -1, *[1] * (x.dim() - 2))
        centred = x - x.mean(over, keepdim=True)
        inverse = torch.rsqrt((centred * centred).mean(over, keepdim=True) + epsilon)
        return scale.reshape(shape) * (centred * inverse) + bias.reshape(shape)

    return normalize


@torch_kernel("GroupNormalization", 21)
def _group_normalization(node: Node) -> Function:
    epsilon, groups = node.attribute("epsilon", 1e-5), node.attribute("num_groups")
    stash = element_type(node, node.attribute("stash_type", 1))

    def normalize(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        rows = x.reshape(x.shape[0], groups, -1).to(stash)
        centred = rows - rows.mean(2, keepdim=True)
        inverse = torch.rsqrt((centred * centred).mean(2, keepdim=True) + epsilon)
        y = (centred * inverse).reshape(x.shape).to(x.dtype)
        shape = (1, -1, *[1] * (x.dim() - 2))
        return y * scale.reshape(shape) + bias.reshape(shape)

    return normalize


@torch_kernel("LpNormalization", 1, 22)
def _lp_normalization(node: Node) -> Function:
    axis, p = node.attribute("axis", -1), node.attribute("p", 2)
    if p not in (1, 2):
        raise NotHandledError(f"LpNormalization p={p}")

    def normalize(x: Tensor) -> Tensor:
        k = axis_of(axis, x.dim())
        size = x.abs() if p == 1 else x * x
        norm = size.sum(k, keepdim=True)
        norm = norm if p == 1 else torch.sqrt(norm)
        return torch.where(norm == 0, torch.zeros_like(x), x / norm)

    return normalize


@torch_kernel("MeanVarianceNormalization", 9, 13)
def _mean_variance_normalization(node: Node) -> Function:
    axes = node.attribute("axes", [0, 2, 3])

    def normalize(x: Tensor) -> Tensor:
        over = [axis_of(a, x.dim()) for a in axes]
        centred = x - x.mean(over, keepdim=True)
        deviation = torch.sqrt((centred * centred).mean(over, keepdim=True))
        return centred / (deviation + 1e-9)

    return normalize


@torch_kernel("Dropout", 12, 13, 22)
def _dropout(node: Node) -> Function:
    several = len(node.outputs) > 1

    def dropout(x: Tensor, ratio: Any = None, training: Tensor | None = None) -> Any:
        drops = ratio is None or float(ratio) != 0
        if training is not None and bool(training) and drops:
            raise NotHandledError("Dropout in training")
        return (x, torch.ones_like(x, dtype=torch.bool)) if several else x

    return dropout


@torch_kernel("Dropout", 7, 10)
def _dropout7(node: Node) -> Function:
    if len(node.outputs) > 1:
        raise NotHandledError("the mask of an old Dropout")
    return lambda x: x
