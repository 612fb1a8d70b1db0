"""A model whose modules compute a row with the same bits in every batch, put in place once."""

from __future__ import annotations

import copy
import dis
import functools
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from . import invariant_kernels as kernels
from ._runtime import power_of_2, rows_of, run
from .invariant_cublas import plainly, route
from .invariant_matmul import (
    _one,
    differentiable,
    is_traced,
    matmul,
    opaque,
    own_work,
)
from .invariant_operators import TRANSFORMERS, _pieces, _reduced, register

#: Modules that no kernel here replaces, whose rows may depend on each other.
_LACKING = (
    torch.nn.modules.conv._ConvNd, torch.nn.RNNBase, torch.nn.RNNCellBase, torch.nn.EmbeddingBag,
    torch.nn.Bilinear, torch.nn.modules.batchnorm._BatchNorm,
)  # fmt: skip
#: Modules of torch that compute each row alone, or nothing.
_PLAIN = ("container", "dropout", "flatten", "padding", "activation", "linear", "sparse")
#: Modules among these that do not: softmax, whose order of additions depends on the layout.
_COMPOSED = (
    torch.nn.MultiheadAttention, torch.nn.Softmax, torch.nn.LogSoftmax, torch.nn.Softmax2d,
    torch.nn.Softmin, torch.nn.GLU,
)  # fmt: skip
#: Where functions of one element are. On a CPU bits depend on the element's place in the tensor.
_ELEMENTWISE = ("torch.nn.modules.activation", "transformers.activations")
#: Names in the code of a module that computes by torch's functions, not by modules alone.
_FUNCTIONS = frozenset(
    (
        "batch_norm", "elu", "rms_norm", "rsqrt", "softplus", "tensordot", "addmm", "baddbmm",
        "bmm", "conv1d", "conv2d", "dot", "einsum", "group_norm", "layer_norm",
        "linear", "log_softmax", "logsumexp", "matmul", "mean", "mm", "norm", "normalize", "pow",
        "scaled_dot_product_attention", "sigmoid", "silu", "gelu", "softmax", "std", "sum", "var",
    )
)  # fmt: skip


class Places(NamedTuple):
    """What :func:`put_in_place` did: names of modules, by what computes them now.

    Attributes
    ----------
    replaced : dict of str to str
        Name of a module -> the kernel that computes it.
    within : list of str
        Modules that run inside of ``with roundoff.invariant()``, operator by operator: slower, and
        a break in a compiled graph.
    lacking : list of str
        Modules whose rows may depend on each other.
    """

    replaced: dict[str, str]
    within: list[str]
    lacking: list[str]


def put_in_place(model: torch.nn.Module, context: AbstractContextManager[Any]) -> Places:
    """Replace the computation of each module of a model, in place.

    Sets ``torch._inductor.config.emulate_precision_casts``. Without it inductor's kernels on a GPU
    round a product and an addition together, where one row alone has them rounded apart.

    Parameters
    ----------
    model : torch.nn.Module
    context : context manager
        ``roundoff.invariant()``, in which modules run whose functions are replaced one by one.

    Returns
    -------
    Places
        Where it names modules that lack the property, nothing was replaced.
    """
    places = Places({}, [], [])
    chosen: list[tuple[torch.nn.Module, Any]] = []
    for name, module in model.named_modules():
        if isinstance(module, _LACKING):
            places.lacking.append(name or type(module).__name__)
            continue
        forward = _forward_of(module)
        if forward is not None:
            chosen.append((module, forward))
            places.replaced[name] = forward.__name__.strip("_")
        elif _computes(module):
            chosen.append((module, None))
            places.within.append(name)
    if places.lacking:
        return places
    from torch._inductor import config  # takes a second

    config.emulate_precision_casts = True
    register()
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(TRANSFORMERS)  # type: ignore[operator]
    for module, forward in chosen:
        known = vars(module)
        if "_roundoff" in known:
            continue  # once is enough
        known["_roundoff"] = True
        if forward is None:
            module.forward = _within(context, module)
            continue
        if forward is _elementwise:
            bare = copy.deepcopy(module)
            for name, value in vars(bare).items():
                if name.endswith("hooks"):  # the module itself calls them
                    value.clear()
            known["_roundoff_text"] = pickle.dumps(bare).hex()
        module.forward = MethodType(forward, module)
    return places


def _within(context: AbstractContextManager[Any], module: torch.nn.Module) -> Any:
    bound = module.forward
    forward = getattr(bound, "__func__", None)  # a copy of the module has weights of its own

    @torch.compiler.disable
    @functools.wraps(forward or bound)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return (forward or bound)(*args, **kwargs)

    return MethodType(run, module) if forward else run


def _forward_of(module: torch.nn.Module) -> Any:
    """Our forward for a module; None where there is none."""
    cls = type(module)
    if isinstance(module, torch.nn.Linear) and cls.forward is torch.nn.Linear.forward:
        return _linear
    if cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils":
        return _linear_by_columns
    if isinstance(module, torch.nn.LayerNorm) and cls.forward is torch.nn.LayerNorm.forward:
        return _layer_norm if len(module.normalized_shape) == 1 else None
    if cls.__name__.endswith("RMSNorm"):
        kind = vars(module)["_roundoff_kind"] = _kind_of(module)
        return None if kind is None else _rms_norm
    elementwise = cls.__module__ in _ELEMENTWISE and not isinstance(module, _COMPOSED)
    return _elementwise if elementwise and not list(module.parameters()) else None


def _computes(module: torch.nn.Module) -> bool:
    """Whether a module computes what the modules in it do not."""
    if isinstance(module, _COMPOSED):
        return True
    cls = type(module)
    if cls.__module__.startswith("torch.nn.modules"):
        return cls.__module__.rpartition(".")[2] not in _PLAIN
    # Of an embedding a row of its table is no computation.
    own = any(p.is_floating_point() for p in module.parameters(recurse=False))
    if own and not isinstance(module, torch.nn.Embedding):
        return True
    code = getattr(getattr(cls.forward, "__wrapped__", cls.forward), "__code__", None)
    if code is None or cls.__name__.endswith("RotaryEmbedding"):  # its products have one term
        return False
    product = any(s.argrepr == "@" for s in dis.get_instructions(code))
    return product or not _FUNCTIONS.isdisjoint(code.co_names)


# Products. ----------------------------------------------------------------------------------------


def _linear(self: Any, x: torch.Tensor) -> torch.Tensor:
    return product(self, x, self.weight, self.bias)


def _linear_by_columns(self: Any, x: torch.Tensor) -> torch.Tensor:
    """transformers' Conv1D: a product with a weight (K, N)."""
    return product(self, x, self.weight.t(), self.bias)


def product(
    owner: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """:func:`roundoff.kernels.matmul`, whose way is remembered by module and number of rows.

    Where that way is torch's own product, gradients are torch's, too.
    """
    if torch.compiler.is_compiling():
        return differentiable(x, weight, bias)
    dtype = x.dtype
    if type(x) is not torch.Tensor or not (x.is_cuda and dtype in _REDUCED and x.is_contiguous()):
        return matmul(x, weight, bias)
    # Each of these costs a tenth of a microsecond, and decides what cuBLAS computes.
    library = int(torch._C._get_blas_preferred_backend())  # type: ignore[call-overload]
    alignment, place = x.data_ptr() & 255, weight.data_ptr()
    key = x.shape, dtype, alignment, place, _REDUCED[dtype](), library
    ways: dict[Any, Callable[..., torch.Tensor]] = owner.__dict__.setdefault("_roundoff_ways", {})
    way = ways.get(key)
    if way is None:
        way = matmul
        rows = x.view(-1, x.shape[-1])
        if not torch.cuda.is_current_stream_capturing() and rows.numel():
            if route(rows, weight, bias, _one) is plainly:
                way = functional.linear
            ways[key] = way
    return way(x, weight, bias)


#: Types of 16 bits, and whether torch may round their partial sums.
_REDUCED = {
    torch.bfloat16: torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    torch.float16: torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
}


# Norms and functions of one element, opaque to a compiler; gradients by torch's formulas. --------


def _layer_norm_of_torch(x: Any, weight: Any, bias: Any, eps: float) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


@opaque("invariant_layer_norm", _layer_norm_of_torch)
def _layer_norm_op(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return _layer_norm_of_torch(x, weight, bias, eps)  # a program of its own for each row


def _layer_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():  # else a compiler adds in its own order
        return _layer_norm_op(x, self.weight, self.bias, self.eps)
    return _layer_norm_of_torch(x, self.weight, self.bias, self.eps)


def _rms_formula(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: str) -> torch.Tensor:
    if x.is_cuda and x.dtype == weight.dtype != torch.float64:
        return _rms_rows(x, weight, eps, kind)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = _mean(wide.pow(2)) + eps
    scale = _pieces(torch.rsqrt, mean)
    made = wide * (torch.rsqrt(mean) if scale is None else scale)
    if kind == "rounded first":
        return weight * made.to(x.dtype)
    return (made * (1.0 + weight.float() if kind == "of one" else weight)).to(x.dtype)


@own_work
def _rms_rows(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: str) -> torch.Tensor:
    """The formula by one kernel, a program a row."""
    n = x.shape[-1]
    rows, stride = rows_of(x, n)
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    flags = (kind == "rounded first", kind == "of one")
    sizes = (n, stride, float(n), eps, *flags, min(2048, power_of_2(n)))
    run(
        kernels.rms_rows,
        (x.numel() // n, 1),
        rows,
        weight.contiguous(),
        made,
        *sizes,
        num_warps=4,
    )
    return made


def _mean(x: torch.Tensor) -> torch.Tensor:
    """Means of rows as within ``roundoff.invariant()``."""
    mean = torch.ops.aten.mean.dim
    made: torch.Tensor | None = _reduced(mean, x, [-1], True)
    return mean(x, [-1], True) if made is None else made


def _rms_norm_of_torch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, kind: str
) -> torch.Tensor:
    """Torch's, for its gradients."""
    dtype = torch.promote_types(x.dtype, weight.dtype) if kind == "rounded first" else x.dtype
    if kind == "of one":
        wide = torch.promote_types(x.dtype, torch.float32)
        x, weight = x.to(wide), 1.0 + weight.to(wide)
    return functional.rms_norm(x, x.shape[-1:], weight, eps).to(dtype)


@opaque("invariant_rms_norm", _rms_norm_of_torch)
def _rms_norm_op(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: str) -> torch.Tensor:
    return _rms_formula(x, weight, eps, kind)


def _eps_of(module: Any, x: torch.Tensor) -> float:
    for name in ("variance_epsilon", "eps"):
        if getattr(module, name, None) is not None:
            return float(getattr(module, name))
    # torch's default, of the type that it computes in
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    weight, eps, kind = self.weight, _eps_of(self, x), self._roundoff_kind
    if is_traced(x) or torch.is_grad_enabled():
        made: torch.Tensor = _rms_norm_op(x, weight, eps, kind)
        return made
    return _rms_formula(x, weight, eps, kind)


def _kind_of(module: torch.nn.Module) -> str | None:
    """Which RMSNorm has this module's values, on numbers of bfloat16; None where none has.

    Classes of this name differ in where they round, and in what they add to the weight.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or weight.is_meta:
        return None
    if len(list(module.parameters())) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, len(weight), generator=generator)
    # Of numbers near 1 another epsilon, or one that is added to the root, would not show.
    x = x * torch.exp2(-(torch.arange(64) % 32))[:, None]
    x = x.to(weight.device, torch.bfloat16)
    probe = torch.nn.Parameter(torch.randn(len(weight), generator=generator).to(x))
    before = module.weight
    with torch.no_grad():
        try:
            module.weight = probe
            wanted = module(x)
            alike = {
                kind: (_rms_formula(x, probe, _eps_of(module, x), kind) == wanted).float().mean()
                for kind in ("rounded first", "of one", "rounded last")
            }
        except (RuntimeError, TypeError):
            return None
        finally:
            module.weight = before
    kind = max(alike, key=alike.__getitem__)
    return kind if float(alike[kind]) > 0.99 else None


@functools.cache
def _function_of(text: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of one element, by the text that stands for its module in a compiled graph."""
    module: torch.nn.Module = pickle.loads(bytes.fromhex(text))  # noqa: S301 - our own
    return module.forward


def _of_one(x: torch.Tensor, text: str) -> torch.Tensor:
    return _function_of(text)(x)


@opaque("invariant_elementwise", _of_one)
def _elementwise_op(x: torch.Tensor, text: str) -> torch.Tensor:
    made = _pieces(_function_of(text), x)
    return _of_one(x, text).clone() if made is None else made


def _elementwise(self: Any, x: torch.Tensor) -> torch.Tensor:
    """On CUDA torch's: there the bits do not depend on an element's place."""
    if x.is_cuda:
        made: torch.Tensor = type(self).forward(self, x)
        return made
    return _elementwise_op(x, self._roundoff_text)
