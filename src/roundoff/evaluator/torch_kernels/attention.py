"""Attention and rotary embedding as ONNX defines them from opset 23."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's users write it

from roundoff.errors import DtypeError, ShapeError
from roundoff.evaluator.nodes import Node

from .common import NotHandledError, element_type, torch_kernel

Tensor = torch.Tensor
Function = Callable[..., Any]


@torch_kernel("RotaryEmbedding", 23)
def _rotary(node: Node) -> Function:
    interleaved = bool(node.attribute("interleaved", 0))
    width, heads = node.attribute("rotary_embedding_dim", 0), node.attribute("num_heads", 0)

    def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
        y = x
        if x.dim() == 3:
            if not heads or x.shape[2] % heads:
                raise ShapeError("num_heads", got=heads, expected=f"a divisor of {x.shape[2]}")
            y = x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)
        if positions is not None:
            cos, sin = cos[positions], sin[positions]
        y = rotated(y, cos.unsqueeze(1), sin.unsqueeze(1), width or y.shape[-1], interleaved)
        return y.transpose(1, 2).reshape(x.shape) if x.dim() == 3 else y

    return rotate


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
    causal = bool(node.attribute("is_causal", 0))
    cap, mode = node.attribute("softcap", 0.0), node.attribute("qk_matmul_output_mode", 0)
    left, right = node.attribute("left_window_size", -1), node.attribute("right_window_size", -1)
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
        bias = _bias(q, k, mask, _Window(causal, left, right, offset, lengths))
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


class _Window(NamedTuple):
    """Which keys a query may see.

    Attributes
    ----------
    causal : bool
    left, right : int
        Keys before and after the query's own place; -1 for any number.
    offset : int
        Place of the first query, when a cache comes before it.
    lengths : Tensor or None
        (batch,): valid keys of a cache of fixed size; its last queries are the newest.
    """

    causal: bool
    left: int
    right: int
    offset: int
    lengths: Tensor | None

    def hidden(self, rows: int, columns: int, device: Any) -> Tensor | None:
        """True where a key is not seen; (rows, columns), with lengths (batch, 1, …)."""
        keys = torch.arange(columns, device=device)
        queries = torch.arange(rows, device=device).unsqueeze(1) + self.offset
        valid = None if self.lengths is None else self.lengths.reshape(-1, 1, 1, 1)
        if valid is not None:
            queries = queries + (valid - rows)
        tests = [keys > queries] if self.causal else []
        if self.left >= 0:
            tests.append(queries - keys > self.left)
        if self.right >= 0:
            tests.append(keys - queries > self.right)
        if valid is not None:
            tests.append(keys >= valid)
        hidden = None
        for test in tests:
            hidden = test if hidden is None else hidden | test
        return hidden


def _bias(q: Tensor, k: Tensor, mask: Tensor | None, window: _Window) -> Tensor | None:
    """What is added to the scores: 0 or the mask's number where a key is seen, else -inf."""
    rows, columns = q.shape[2], k.shape[2]
    bias = None
    if mask is not None:
        if mask.dtype == torch.bool:
            bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
        elif mask.is_floating_point():
            bias = mask.to(q.dtype)
        else:
            raise DtypeError("mask", got=str(mask.dtype), expected="bool or a floating type")
        if bias.shape[-1] < columns:
            bias = F.pad(bias, (0, columns - bias.shape[-1]), value=-math.inf)
    hidden = window.hidden(rows, columns, q.device)
    if hidden is None:
        return bias
    start = torch.zeros((), dtype=q.dtype, device=q.device) if bias is None else bias
    return torch.where(hidden, torch.full_like(start, -math.inf), start)
