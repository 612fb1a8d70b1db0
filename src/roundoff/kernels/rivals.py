"""Other layer norms to compare with: forward and backward, each as far as it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError
from .layer_norm import _backward, _forward

__all__ = ["LayerNorm", "layer_norms"]

Tensors = tuple[torch.Tensor, ...]


class LayerNorm(NamedTuple):
    """One implementation, split where autograd splits it.

    Attributes
    ----------
    label : str
        Name in tables.
    forward : callable
        (x, w, b, eps) -> (y, *saved), x of shape (M, N); saved are mean and rstd in its own form.
    backward : callable
        (dy, x, w, b, *saved) -> (dx, dw, db), from what its own forward saved.
    """

    label: str
    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]


def _ours() -> LayerNorm:
    def backward(dy: Any, x: Any, w: Any, b: Any, stats: Any) -> Any:
        return _backward(dy, x, w, stats, x.shape[1], w.dtype, b.dtype, 0)

    return LayerNorm("Triton", _forward, backward)


def _torch_forward(x: Any, w: Any, b: Any, eps: float) -> Any:
    return torch.ops.aten.native_layer_norm(x, [x.shape[1]], w, b, eps)


def _torch_backward(dy: Any, x: Any, w: Any, b: Any, mean: Any, rstd: Any) -> Any:
    call = torch.ops.aten.native_layer_norm_backward
    return call(dy, x, [x.shape[1]], mean, rstd, w, b, [True, True, True])


def _torch() -> LayerNorm:
    return LayerNorm("Torch", _torch_forward, _torch_backward)


def _inductor() -> LayerNorm:
    return LayerNorm(
        "Inductor",
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

    return LayerNorm("Liger", forward, backward)


def _apex() -> LayerNorm:
    ops = importlib.import_module("fused_layer_norm_cuda")

    def forward(x: Any, w: Any, b: Any, eps: float) -> Any:
        return ops.forward_affine(x, (x.shape[1],), w, b, eps)

    def backward(dy: Any, x: Any, w: Any, b: Any, mean: Any, rstd: Any) -> Any:
        return ops.backward_affine(dy, mean, rstd, x, (x.shape[1],), w, b, 1e-5, False)

    return LayerNorm("Apex", forward, backward)


_KNOWN: dict[str, Callable[[], LayerNorm]] = {
    "Triton": _ours,
    "Torch": _torch,
    "Liger": _liger,
    "Inductor": _inductor,
    "Apex": _apex,
}


def layer_norms(*labels: str, device: str = "cuda") -> tuple[dict[str, LayerNorm], list[str]]:
    """The implementations asked for that are there, and a sentence for each that is not.

    Parameters
    ----------
    *labels : str
        Of Triton, Torch, Liger, Inductor, Apex; all by default.
    device : str
        On a CPU only torch is compared: the others are made for a GPU.

    Returns
    -------
    (dict, list of str)
        Label -> :class:`LayerNorm`, in the order asked for; what is missing and why.

    Raises
    ------
    ArgumentError
        A label is none of these.

    Examples
    --------
    >>> found, missing = layer_norms("Torch", "Liger", device="cpu")
    >>> list(found), missing
    (['Torch'], ['Liger is left out: it is made for a GPU.'])
    """
    found, missing = {}, []
    for label in labels or _KNOWN:
        if label not in _KNOWN:
            raise ArgumentError("no such layer norm", got=label, expected=f"one of {list(_KNOWN)}")
        if not device.startswith("cuda") and label != "Torch":
            missing.append(f"{label} is left out: it is made for a GPU.")
            continue
        try:
            found[label] = _KNOWN[label]()
        except (ImportError, OSError) as error:
            missing.append(f"{label} is left out: {type(error).__name__}: {error}.")
    return found, missing
