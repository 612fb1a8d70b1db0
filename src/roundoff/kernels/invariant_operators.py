"""What :func:`roundoff.kernels.invariant` computes by other means, and what it refuses."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError, UnsupportedError
from . import invariant_kernels as kernels
from ._runtime import power_of_2, rows_of, run
from .invariant_attention import attention
from .invariant_matmul import _TYPES, batched, matmul, own_work

#: The name of our attention in transformers' registry.
TRANSFORMERS = "roundoff"
#: An operator and its arguments -> its result, None for torch's own, NotImplemented for neither.
Handler = Callable[..., Any]


def tensors_of(args: Any) -> list[torch.Tensor]:
    return [a for a in args if isinstance(a, torch.Tensor)]


def concerns(args: tuple[Any, ...]) -> bool:
    """Whether values are computed that can be rounded."""
    rounded = False
    for a in args:
        if isinstance(a, torch.Tensor):
            if not (a.is_cpu or a.is_cuda):
                return False
            rounded = rounded or a.is_floating_point() or a.is_complex()
    return rounded


# Operators that lack the property. --------------------------------------------------------------

_LACKING = frozenset(
    f"aten::{name}"
    for name in (
        "convolution",
        "_convolution",
        "convolution_overrideable",
        "cudnn_convolution",
        "mkldnn_convolution",
        "mkldnn_rnn_layer",
        "_cudnn_rnn",
        "_embedding_bag",
        "addbmm",
        "addmv",
        "baddbmm",
        "dot",
        "glu",
        "_addmm_activation",
        "_scaled_mm",
        "_scaled_grouped_mm",
        "mkldnn_linear",
        "_native_multi_head_attention",
        "_transformer_encoder_layer_fwd",
        "_cdist_forward",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_cudnn_attention_forward",
        "_weight_int4pack_mm",
        "_weight_int8pack_mm",
        "_trilinear",
        "_fft_r2c",
        "_fft_c2c",
        "_fft_c2r",
    )
)
#: These add, or multiply, in an order of their own on CUDA.
_LACKING_ON_CUDA = frozenset(
    f"aten::{name}"
    for name in (
        "index_add",
        "index_add_",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce",
        "index_put",
        "scatter_reduce_",
        "index_put_",
        "_index_put_impl_",
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "prod",
        "nansum",
        "norm",
        "renorm",
        "logsumexp",
        "std",
        "std_mean",
        "var",
        "var_mean",
    )
)
#: Operators of which :func:`lacks` has to be asked.
MAY_LACK = _LACKING | _LACKING_ON_CUDA | {"aten::native_batch_norm", "aten::cudnn_batch_norm"}


def lacks(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in _LACKING:
        return True
    if "batch_norm" in name:
        return bool(args[5])  # in training
    if any(t.is_cuda for t in tensors_of(args)):
        accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
        return bool(accumulates) if "index_put" in name else args[0].is_floating_point()
    return False


# Products. ----------------------------------------------------------------------------------------


def _plain(func: Any, *tensors: torch.Tensor) -> bool:
    """Whether our functions take such operands."""
    return func._overloadname == "default" and all(
        t.layout == torch.strided and t.is_floating_point() for t in tensors
    )


def _mm(func: Any, a: Any, b: Any) -> Any:
    return matmul(a, b.t()) if _plain(func, a, b) else NotImplemented


def _addmm(func: Any, c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    ours = beta == alpha == 1 and c.shape == b.shape[1:] and _plain(func, c, a, b)
    return matmul(a, b.t(), c) if ours else NotImplemented


def _bmm(func: Any, a: Any, b: Any) -> Any:
    if a.dim() != 3 or b.dim() != 3 or a.shape[::2] != b.shape[:2]:
        return None  # torch refuses it
    return batched(a, b.mT) if _plain(func, a, b) else NotImplemented


def _mv(func: Any, a: Any, x: Any) -> Any:
    return matmul(a, x[None])[:, 0] if _plain(func, a, x) else NotImplemented


def _linear(func: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    ours = _plain(func, *tensors_of((x, weight, bias)))
    return matmul(x, weight, bias) if ours else NotImplemented


def _grouped_mm(
    func: Any, x: Any, weights: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Rows (S, K), sorted by expert, each with its expert's weight of (E, K, N).

    ``offs`` are the ends of the experts' rows. Reading them waits for the device, which the
    recording of a CUDA graph does not allow.
    """
    ours = _plain(func, x, weights) and (x.dim(), weights.dim()) == (2, 3) and offs is not None
    recording = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if not ours or recording or bias is not None or out_dtype not in (None, x.dtype):
        return NotImplemented
    y, start = x.new_zeros(len(x), weights.shape[2]), 0
    for weight, end in zip(weights, offs.tolist(), strict=True):
        y[start:end] = matmul(x[start:end], weight.t())
        start = end
    return y


# Sums of rows, and functions of one element. ------------------------------------------------------

#: Elements of a piece that a CPU computes in one thread; a last one is filled to a multiple.
_PIECE, _UNIT = 16384, 64
#: From so many elements on torch adds a single row in several threads.
_PARALLEL = 32768


def _last_only(x: torch.Tensor, dim: Any) -> bool:
    dims = [dim] if isinstance(dim, int) else dim
    return x.dim() > 0 and dims is not None and [d % x.dim() for d in dims] == [x.dim() - 1]


def _twice(x: torch.Tensor) -> torch.Tensor | None:
    """A single long row on a CPU twice: torch adds each of two in one thread, as it adds more."""
    n = x.shape[-1]
    if x.device.type != "cpu" or n < _PARALLEL or x.numel() != n:
        return None
    return x.reshape(1, n).expand(2, n).contiguous()


@own_work
def _reduced(
    func: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Sums and means of rows, where the number of rows decides how torch adds; None: as torch."""
    if not _last_only(x, dim) or not x.numel():
        return None
    if (pair := _twice(x)) is not None:
        made = func(pair, dim=[1], dtype=dtype)[0]
    elif _is_added(x, dtype):
        mean = "mean" in func.overloadpacket._qualified_op_name
        made = _sums(x, float(x.shape[-1]) if mean else 1.0, dtype or x.dtype)
    else:
        return None
    return made.view(*x.shape[:-1], *([1] if keepdim else []))


def _is_added(x: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether our kernel adds rows such as these: torch's plan on CUDA has their number."""
    return x.is_cuda and x.dtype in _TYPES and dtype in (None, *_TYPES)


def _sums(x: torch.Tensor, divisor: float = 1.0, into: torch.dtype = torch.float32) -> torch.Tensor:
    """Sums of rows (…, n) over a divisor, by the kernel."""
    n = x.shape[-1]
    rows, stride = rows_of(x, n)
    made = x.new_empty(x.numel() // n, dtype=into)
    sizes = (n, stride, divisor, min(1024, power_of_2(n)))
    run(kernels.sum_rows, (len(made), 1), rows, made, *sizes, num_warps=4)
    return made


@own_work
def _vector_norm(
    func: Any, x: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if not _last_only(x, dim) or not x.numel():
        return None
    if (pair := _twice(x)) is not None:
        made = func(pair, order, [1], dtype=dtype)[0]
    elif not _is_added(x, dtype):
        return None
    elif order == 2:
        made = _sums(x.float().square()).sqrt().to(dtype or x.dtype)
    else:
        return NotImplemented
    return made.view(*x.shape[:-1], *([1] if keepdim else []))


@own_work
def _softmax(func: Any, x: Any, dim: int, widen: bool) -> Any:
    """Softmax on CUDA of rows that do not begin alike: torch adds up to a boundary of 16 bytes."""
    if x.is_cpu and x.dim() and not _last_only(x, dim):  # there the other axes are vectors
        return func(x.transpose(dim, -1).contiguous(), -1, widen).transpose(dim, -1)
    if not _last_only(x, dim) or not x.numel() or not _is_added(x, None):
        return None
    n = x.shape[-1]
    if n <= 1024 or n * x.element_size() % 16 == 0:
        return None
    rows = x.reshape(-1, n).float()
    rows = rows - rows.amax(1, keepdim=True)
    total = _sums(rows.exp())[:, None]
    log = "log" in func.overloadpacket._qualified_op_name
    made = rows - total.log() if log else rows.exp() / total
    return made.to(torch.float32 if widen else x.dtype).view(x.shape)


@own_work
def _pieces(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of one element of each operand, on a CPU.

    torch computes whole vectors by one program, and what is left at the end of a tensor, or of a
    thread's part of it, by another, with other bits. Here whole vectors are all there is.
    """
    tensors = tensors_of(args)
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    count = math.prod(shape)
    if tensors[0].device.type != "cpu" or not count:
        return None
    more = -count % _UNIT
    flat = [t.expand(shape).reshape(-1) for t in tensors]
    flat = [torch.nn.functional.pad(t, (0, more), value=1.0) for t in flat]
    made = []
    for pieces in zip(*(t.split(_PIECE) for t in flat), strict=True):
        of = iter(pieces)
        operands = (next(of) if isinstance(a, torch.Tensor) else a for a in args)
        made.append(func(*operands, **kwargs))
    return torch.cat(made)[:count].view(shape)


def _power(func: Any, x: Any, exponent: Any) -> Any:
    return None if isinstance(exponent, int) and exponent == 2 else _pieces(func, x, exponent)


def _scaled_sum(func: Any, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    """a + alpha b, in one rounding or two in 16 bits; a plain sum has one anyway."""
    return None if alpha == 1 else _pieces(func, a, b, alpha=alpha)


def _by_number(func: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    """A single whole number, which torch does not round to 16 bits first as it does several."""
    whole = isinstance(b, torch.Tensor) and b.dtype == torch.int64 and b.dim()
    return func(a, b.to(a.dtype), **kwargs) if whole and a.is_floating_point() else None


_NAMED: dict[str, Handler] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "mv": _mv,
    "linear": _linear,
    "_grouped_mm": _grouped_mm,
    "sum": _reduced,
    "mean": _reduced,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "linalg_vector_norm": _vector_norm,
    "pow": _power,
    "add": _scaled_sum,
    "sub": _scaled_sum,
    "rsub": _scaled_sum,
    "div": _by_number,
    "mul": _by_number,
}
#: Functions of one element that differ between vectors and what is left over, as measured.
_NAMED |= dict.fromkeys(
    (
        "silu",
        "gelu",
        "sigmoid",
        "softplus",
        "mish",
        "elu",
        "exp2",
        "rsqrt",
        "logit",
        "atan2",
        "hypot",
        "sinh",
        "cosh",
        "atanh",
        "celu",
        "ldexp",
        "logaddexp",
        "logaddexp2",
        "special_i0e",
    ),
    _pieces,
)
HANDLERS = {f"aten::{name}": handler for name, handler in _NAMED.items()}
#: What transformers calls where torch has no grouped product.
HANDLERS["transformers::grouped_mm_fallback"] = _grouped_mm


# Attention. ---------------------------------------------------------------------------------------


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention by :func:`roundoff.kernels.attention`."""
    if dropout_p:
        raise UnsupportedError("attention with dropout", got=dropout_p, expected="dropout_p=0")
    if attn_mask is not None and is_causal:
        raise ArgumentError("attn_mask with is_causal", expected="one of them")
    if attn_mask is not None:
        return attention(query, key, value, mask=_booleans(attn_mask), scale=scale)
    if is_causal:  # to torch the first query is at the first key; here the last is at the last
        if query.shape[2] > key.shape[2]:
            raise UnsupportedError(
                "is_causal with more queries than keys", got=f"{query.shape[2]}, {key.shape[2]}"
            )
        key, value = (t[:, :, : query.shape[2]] for t in (key, value))
    return attention(query, key, value, causal=bool(is_causal), scale=scale)


def _booleans(mask: torch.Tensor) -> torch.Tensor:
    """A mask of booleans for one that is added to the scores: zeros, and what shuts out."""
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    if not (mask.is_cuda and torch.cuda.is_current_stream_capturing()) and bool(
        (~seen & (mask > -1e4)).any()
    ):
        raise UnsupportedError(
            "attention with a bias",
            got="a mask with numbers in it",
            expected="0 where a key is seen, the smallest number where it is not",
        )
    return seen


def by_transformers(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Our attention as transformers calls it: (batch, queries, heads, head), and no weights."""
    for name in ("softcap", "s_aux", "position_bias", "cache"):
        if options.get(name) is not None:
            raise UnsupportedError(f"attention with {name}", got=type(options[name]).__name__)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1
    made = sdpa(query, key, value, attention_mask, dropout, causal, scaling)
    return made.transpose(1, 2).contiguous(), None


def register() -> None:
    """Our attention under its name in transformers, where that is imported."""
    if "transformers" not in sys.modules:
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(TRANSFORMERS, by_transformers)
    AttentionMaskInterface.register(TRANSFORMERS, sdpa_mask)
