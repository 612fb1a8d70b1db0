"""Attention and rotary embedding as ONNX defines them from opset 23."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's users write it

from roundoff.errors import DtypeError, ShapeError

from .common import (
    Function,
    Node,
    NotHandledError,
    Tensor,
    element_type,
    torch_function,
    torch_kernel,
)


@torch_function("RotaryEmbedding", 23, interleaved=0, rotary_embedding_dim=0, num_heads=0)
def _rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: int,
    rotary_embedding_dim: int,
    num_heads: int,
) -> Tensor:
    y = _by_heads(x, num_heads) if x.dim() == 3 else x
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    width = rotary_embedding_dim or y.shape[-1]
    y = rotated(y, cos.unsqueeze(1), sin.unsqueeze(1), width, bool(interleaved))
    return y.transpose(1, 2).reshape(x.shape) if x.dim() == 3 else y


def rotated(x: Tensor, cos: Tensor, sin: Tensor, width: int, interleaved: bool) -> Tensor:
    """The first *width* channels of x turned by the angles of *cos* and *sin*.

    Parameters
    ----------
    x : Tensor
        (batch, heads, length, channels).
    cos, sin : Tensor
        (batch, 1, length, width / 2).
    """
    if cos.shape[-1] * 2 != width or sin.shape != cos.shape:
        raise ShapeError("cosines and sines", got=list(cos.shape), expected=f"(…, {width // 2})")
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., : width // 2], turned[..., width // 2 :]
    real, imaginary = cos * a - sin * b, sin * a + cos * b
    if interleaved:
        joined = torch.stack((real, imaginary), -1).reshape(turned.shape)
    else:
        joined = torch.cat((real, imaginary), -1)
    return torch.cat((joined, rest), -1) if rest.shape[-1] else joined


@torch_kernel("Attention", 23, 24, 25)
def _attention(node: Node) -> Function:
    cap, mode = node.attribute("softcap", 0.0), node.attribute("qk_matmul_output_mode", 0)
    left, right = node.attribute("left_window_size", -1), node.attribute("right_window_size", -1)
    if node.attribute("is_causal", 0):
        right = 0
    precision = node.attribute("softmax_precision")
    soft = None if precision is None else element_type(node, precision)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, past_k: Tensor | None = None,
        past_v: Tensor | None = None, lengths: Tensor | None = None,
    ) -> Any:  # fmt: skip
        flat = q.dim() == 3
        if flat:
            q = _by_heads(q, node.attribute("q_num_heads"))
            k = _by_heads(k, node.attribute("kv_num_heads"))
            v = _by_heads(v, node.attribute("kv_num_heads"))
        if (past_k is None) != (past_v is None) or (past_k is not None and lengths is not None):
            raise NotHandledError("an incomplete cache")
        offset = 0
        if past_k is not None and past_v is not None:
            offset = past_k.shape[2]
            k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
        present = (k, v)
        k, v = _grouped(k, q.shape[1]), _grouped(v, q.shape[1])
        bias = _bias(q, k, mask)
        if lengths is not None or max(left, right) >= 0:
            hidden = _hidden(q, k, left, right, offset, lengths)
            bias = torch.where(hidden, -math.inf, q.new_zeros(()) if bias is None else bias)
        scale = node.attribute("scale")
        root = math.sqrt(1 / math.sqrt(q.shape[3]) if scale is None else scale)
        root = torch.tensor(root, dtype=q.dtype).item()  # ONNX's definition casts it
        scores = torch.matmul(q * root, (k * root).transpose(2, 3))
        shown = scores
        if cap > 0:
            scores = torch.tanh(scores / cap) * cap
        shown = scores if mode == 1 else shown
        if bias is not None:
            scores = scores + bias
        shown = scores if mode == 2 else shown
        weights = torch.softmax(scores if soft is None else scores.to(soft), -1)
        if bias is not None:  # a row without any key: zeros, not NaN
            weights = weights.masked_fill(torch.isneginf(bias.amax(-1, keepdim=True)), 0)
        weights = weights.to(q.dtype)
        shown = weights if mode == 3 else shown
        y = torch.matmul(weights, v)
        if flat:
            y = y.transpose(1, 2).flatten(2)
        return (y, *present, shown)[: len(node.outputs)] if len(node.outputs) > 1 else y

    return attention


def _by_heads(x: Tensor, heads: int | None) -> Tensor:
    if not heads or x.shape[2] % heads:
        raise ShapeError("number of heads", got=heads, expected=f"a divisor of {x.shape[2]}")
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _grouped(x: Tensor, heads: int) -> Tensor:
    if x.shape[1] == heads:
        return x
    if heads % x.shape[1]:
        raise ShapeError("heads of keys", got=x.shape[1], expected=f"a divisor of {heads}")
    return x.repeat_interleave(heads // x.shape[1], 1)


def _hidden(
    q: Tensor, k: Tensor, left: int, right: int, offset: int, lengths: Tensor | None
) -> Tensor:
    """True where a key is not seen: (rows, columns), with lengths (batch, 1, rows, columns).

    Parameters
    ----------
    left, right : int
        Keys before and after the query's own place; -1 for any number.
    offset : int
        Place of the first query, when a cache comes before it.
    lengths : Tensor or None
        (batch,): valid keys of a cache of fixed size; its last queries are the newest.
    """
    rows, keys = q.shape[2], torch.arange(k.shape[2], device=q.device)
    away = keys - torch.arange(offset, offset + rows, device=q.device).unsqueeze(1)
    hidden = torch.zeros_like(away, dtype=torch.bool)
    if lengths is not None:
        valid = lengths.reshape(-1, 1, 1, 1)
        away, hidden = away - (valid - rows), keys >= valid
    if left >= 0:
        hidden = hidden | (away < -left)
    return hidden | (away > right) if right >= 0 else hidden


def _bias(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """What a mask adds to the scores: its number or 0 where a key is seen, else -inf."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
    elif mask.is_floating_point():
        bias = mask.to(q.dtype)
    else:
        raise DtypeError("mask", got=str(mask.dtype), expected="bool or a floating type")
    return F.pad(bias, (0, max(k.shape[2] - bias.shape[-1], 0)), value=-math.inf)
