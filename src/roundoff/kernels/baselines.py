"""Layer norms and invariant products to compare with: those that are installed here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from ._layer_norm import _backward, _forward
from ._runtime import interpreting

__all__ = ["LayerNorm", "invariant_modes", "invariant_products", "layer_norms"]

Tensors = tuple[torch.Tensor, ...]


class LayerNorm(NamedTuple):
    """One implementation, split where autograd splits it.

    Attributes
    ----------
    forward : callable
        (x, w, b, eps) -> (y, \\*saved), x of shape (M, N); saved are mean and rstd in its own form.
    backward : callable
        (dy, x, w, b, \\*saved) -> (dx, dw, db), from what its own forward saved.
    weights : torch.dtype, optional
        The type of w and b that it needs; None: that of x.
    """

    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]
    weights: torch.dtype | None = None


def _ours() -> LayerNorm:
    def backward(dy: Any, x: Any, w: Any, b: Any, stats: Any) -> Any:
        return _backward(dy, x, w, stats, x.shape[1], w.dtype, b.dtype, 0)

    return LayerNorm(_forward, backward)


def _torch_forward(x: Any, w: Any, b: Any, eps: float) -> Any:
    return torch.ops.aten.native_layer_norm(x, [x.shape[1]], w, b, eps)


def _torch_backward(dy: Any, x: Any, w: Any, b: Any, mean: Any, rstd: Any) -> Any:
    call = torch.ops.aten.native_layer_norm_backward
    return call(dy, x, [x.shape[1]], mean, rstd, w, b, [True, True, True])


def _torch() -> LayerNorm:
    return LayerNorm(_torch_forward, _torch_backward)


@cache
def _inductor() -> LayerNorm:
    # Every shape is compiled for itself; after eight, torch would give up.
    importlib.import_module("torch._dynamo").config.recompile_limit = 256
    return LayerNorm(
        torch.compile(_torch_forward, dynamic=False, fullgraph=True),
        torch.compile(_torch_backward, dynamic=False, fullgraph=True),
    )


def _liger() -> LayerNorm:
    ops = importlib.import_module("liger_kernel.ops.layer_norm")

    def forward(x: Any, w: Any, b: Any, eps: float) -> Any:
        y, _, mean, rstd, *_ = ops.layer_norm_forward(x, w, b, eps)
        return y, mean, rstd

    def backward(dy: Any, x: Any, w: Any, b: Any, mean: Any, rstd: Any) -> Any:
        return ops.layer_norm_backward(dy, x, w, b, mean, rstd)[:3]

    return LayerNorm(forward, backward)


def _quack() -> LayerNorm:
    ops = importlib.import_module("quack.rmsnorm")

    def forward(x: Any, w: Any, b: Any, eps: float) -> Any:
        return ops.layernorm_fwd(x, w, b, eps, return_rstd=True, return_mean=True)

    def backward(dy: Any, x: Any, w: Any, b: Any, rstd: Any, mean: Any) -> Any:
        return ops.layernorm_bwd(x, w, dy, rstd, mean)

    return LayerNorm(forward, backward, torch.float32)


# How each is made, and whether it runs on a CPU.
_KNOWN: dict[str, tuple[Callable[[], LayerNorm], Callable[[], bool]]] = {
    "roundoff": (_ours, interpreting),
    "torch": (_torch, lambda: True),
    "inductor": (_inductor, lambda: False),
    "Liger": (_liger, lambda: False),
    "QuACK": (_quack, lambda: False),
}


def layer_norms(device: str = "cuda") -> tuple[dict[str, LayerNorm], dict[str, str]]:
    """This package's layer norm and the baselines that are installed.

    Parameters
    ----------
    device : str
        On a CPU only torch's, and this package's where its kernels are interpreted: the others are
        made for a GPU.

    Returns
    -------
    (dict, dict)
        Label -> :class:`LayerNorm`, of roundoff, torch, inductor, Liger and QuACK; label -> reason,
        of those that are missing.

    Examples
    --------
    >>> from roundoff.kernels.baselines import layer_norms
    >>> norms, missing = layer_norms("cpu")
    >>> "torch" in norms, missing["Liger"]
    (True, 'made for a GPU')
    """
    norms, missing = {}, {}
    for label, (make, on_cpu) in _KNOWN.items():
        if not device.startswith("cuda") and not on_cpu():
            missing[label] = "made for a GPU"
            continue
        try:
            norms[label] = make()
        except (ImportError, OSError, AttributeError) as error:
            missing[label] = f"{type(error).__name__}: {error}"
    return norms, missing


# Others' invariant products: label -> module with ``matmul_persistent`` of x (M, K) and (K, N).
_PRODUCTS = {
    "batch_invariant_ops": "batch_invariant_ops",
    "vLLM": "vllm.model_executor.layers.batch_invariant",
}
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _transposed(product: Product, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return product(x, weight.t())


def invariant_products() -> tuple[dict[str, Product], dict[str, str]]:
    """Others' products whose rows do not depend on how many there are, as far as installed.

    Returns
    -------
    (dict, dict)
        Label -> function of x (M, K) and a weight (N, K), both on a GPU, that gives x weight^T, of
        batch_invariant_ops and vLLM; label -> reason, of those that are missing.

    References
    ----------
    https://github.com/thinking-machines-lab/batch_invariant_ops,
    https://docs.vllm.ai/en/latest/features/batch_invariance/

    Examples
    --------
    >>> from roundoff.kernels.baselines import invariant_products
    >>> products, missing = invariant_products()
    >>> sorted([*products, *missing])
    ['batch_invariant_ops', 'vLLM']
    """
    products: dict[str, Product] = {}
    missing = {}
    for label, module in _PRODUCTS.items():
        try:
            persistent = importlib.import_module(module).matmul_persistent
        except (ImportError, OSError, AttributeError) as error:
            missing[label] = f"{type(error).__name__}: {error}"
        else:
            products[label] = partial(_transposed, persistent)
    return products, missing


def invariant_modes() -> tuple[
    dict[str, Callable[[], AbstractContextManager[Any]]], dict[str, str]
]:
    """Others' contexts within which torch's operators are independent of the batch, on a GPU.

    Returns
    -------
    (dict, dict)
        Label -> function that gives a context manager, of batch_invariant_ops; label -> reason, of
        what is missing.

    References
    ----------
    https://github.com/thinking-machines-lab/batch_invariant_ops

    Examples
    --------
    >>> from roundoff.kernels.baselines import invariant_modes
    >>> modes, missing = invariant_modes()
    >>> [*modes, *missing]
    ['batch_invariant_ops']
    """
    label = "batch_invariant_ops"
    try:
        return {label: importlib.import_module(label).set_batch_invariant_mode}, {}
    except (ImportError, OSError, AttributeError) as error:
        return {}, {label: f"{type(error).__name__}: {error}"}
