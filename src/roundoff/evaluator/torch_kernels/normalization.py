"""Normalisations, in the precision that the definition asks for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's users write it

from .common import (
    Function,
    Node,
    NotHandledError,
    Tensor,
    axis_of,
    element_type,
    torch_kernel,
)


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
            raise NotHandledError("a scale of another shape, or statistics of another type")
        # float16 and bfloat16 are summed in float32 by the kernel, as stash_type=1 asks.
        y = F.layer_norm(x, shape, scale, bias, epsilon)
        if not several:
            return y
        wide = x.to(torch.promote_types(x.dtype, stash))  # for statistics of that type
        _, mean, inverse = torch.native_layer_norm(wide, shape, None, None, epsilon)
        kept = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
        return y, mean.reshape(kept).to(stash), inverse.reshape(kept).to(stash)

    return normalize


@torch_kernel("BatchNormalization", 7)
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


@torch_kernel("Dropout", 7)
def _dropout(node: Node) -> Function:
    if len(node.outputs) > 1:
        raise NotHandledError("the mask of a Dropout")

    def dropout(x: Tensor, ratio: Any = None, training: Tensor | None = None) -> Tensor:
        if training is not None and bool(training):
            raise NotHandledError("Dropout in training")
        return x

    return dropout
