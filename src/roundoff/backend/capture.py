"""From dynamo's graph to ONNX: products and attention stay single operators until then."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import operator
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from roundoff.errors import UnsupportedError

__all__ = ["STRIDED", "keep_composites", "outside", "passes_through"]

# Functionalisation takes a product with a weight apart into views and a two-axis product, and
# attention into whatever kernel torch would have picked. As operators of our own they pass
# through it whole, and rules find them by name afterwards.
_LIBRARY = torch.library.Library("roundoff", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
_LIBRARY.define("matmul(Tensor a, Tensor b) -> Tensor")
_LIBRARY.impl("linear", torch.nn.functional.linear, "CompositeExplicitAutograd")
_LIBRARY.impl("matmul", torch.matmul, "CompositeExplicitAutograd")
_LINEAR, _MATMUL = torch.ops.roundoff.linear.default, torch.ops.roundoff.matmul.default


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # A product of vectors, or of other types than floats, is none that a rule would fuse.
    if a.dim() < 2 or b.dim() < 2 or not a.is_floating_point() or a.dtype != b.dtype:
        return torch.matmul(a, b)
    return _MATMUL(a, b)


def _linear(
    input: torch.Tensor,  # noqa: A002 - the name in torch's signature
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    if input.dim() < 2 or weight.dim() != 2:
        return torch.nn.functional.linear(input, weight, bias)
    return _LINEAR(input, weight, bias)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's scaled dot-product attention, spelled out; the same with rows that see no key.

    torch's exporter shuts keys out with the lowest finite number, which makes such a row the
    mean of all values; torch itself makes it zero.
    """
    if dropout_p or query.dim() != 4:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    groups = query.shape[1] // key.shape[1] if enable_gqa else 1
    if groups > 1:
        key, value = (_repeated(x, groups) for x in (key, value))
    bias = attn_mask
    if is_causal:
        ones = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        attn_mask = ones.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        low = torch.full((), -math.inf, dtype=query.dtype, device=query.device)
        bias = torch.where(attn_mask, zero, low)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = _MATMUL(query * factor, key.transpose(-1, -2))
    if bias is not None:
        scores = scores + bias
    probabilities = torch.softmax(scores, dim=-1)
    if bias is not None and not is_causal:
        dead = bias.amax(-1, keepdim=True) == -math.inf
        probabilities = probabilities.masked_fill(dead, 0)
    return _MATMUL(probabilities, value)


def _repeated(x: torch.Tensor, groups: int) -> torch.Tensor:
    batch, heads, length, head = x.shape
    wide = x[:, :, None].expand(batch, heads, groups, length, head)
    return wide.reshape(batch, heads * groups, length, head)


_KEEP = {
    torch._C._nn.linear: _linear,
    torch.nn.functional.linear: _linear,
    torch.matmul: _product,
    operator.matmul: _product,
    torch._C._nn.scaled_dot_product_attention: _attention,
    torch.nn.functional.scaled_dot_product_attention: _attention,
}


def keep_composites(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of dynamo's graph in which products and attention pass functionalisation whole.

    Left as it is where autocast is on, as autocast chooses types operator by operator.
    """
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for old, new in copies.items():
        # Where an input comes from, beside its meta: AOTAutograd finds the weights by it.
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    autocast = any("autocast" in str(n.target) for n in graph.nodes if n.op == "call_function")
    if not autocast and not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        for node in graph.nodes:
            if node.op == "call_function":
                node.target = _KEEP.get(node.target, node.target)
            elif node.op == "call_method" and node.target in ("matmul", "__matmul__"):
                node.op, node.target = "call_function", _product
    kept = torch.fx.GraphModule(gm, graph)
    kept.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        kept._param_name_to_source = gm._param_name_to_source
    return kept


def _places(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> torch.Tensor:
    """Where the elements of a strided view lie in its contiguous base, flat."""
    if not x.is_contiguous() or x.storage_offset():
        raise UnsupportedError("a strided view of a tensor that is not contiguous itself")
    at = torch.full((), offset or 0, dtype=torch.int64, device=x.device)
    for n, step in zip(size, stride, strict=True):
        at = at[..., None] + torch.arange(n, device=x.device) * step
    return at.reshape(-1)


def _as_strided_scatter(
    x: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    at = _places(x, size, stride, storage_offset)
    return x.reshape(-1).index_put((at,), src.reshape(-1)).reshape(x.shape)


#: AOTAutograd writes inputs that overlap as strided views of one base: the exporter has no form.
STRIDED = {torch.ops.aten.as_strided_scatter.default: _as_strided_scatter}


def passes_through(args: Sequence[Any], examples: Sequence[Any]) -> bool:
    """Whether AOTAutograd leaves nothing to do around a call, which it says while it compiles.

    It then hands the inputs of dynamo's graph to the functional one, and returns what that
    returns: no input is written to, no output is a view, and no mode has to be set back, unless
    autocast is on.

    Parameters
    ----------
    args, examples
        Inputs of dynamo's graph and of the functional one.
    """
    context = torch._guards.TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None or len(args) != len(examples):
        return False
    around = (
        metadata.num_mutated_inp_runtime_indices,
        metadata.num_outputs_aliased,
        metadata.num_intermediate_bases,
        metadata.grad_enabled_mutation is not None,
        metadata.dynamic_outputs,
        metadata.is_rng_op_functionalized,
        metadata.tokens,
        getattr(metadata, "act_input_indices", ()),  # from torch 2.12 on
        any(map(is_traceable_wrapper_subclass, args)),
    )
    return not any(around)


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Out of dynamo's tracing, of fake tensors and every other mode, quietly."""
    with (
        _disable_current_modes(),
        torch._guards.tracing(None),
        torch.inference_mode(False),
        torch.no_grad(),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logs = [logging.getLogger(n) for n in ("torch.onnx", "onnxscript", "onnx_ir")]
        levels = [log.level for log in logs]
        for log in logs:
            log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for log, level in zip(logs, levels, strict=True):
                log.setLevel(level)
