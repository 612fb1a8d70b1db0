"""Layer norms to compare with, and the stream that bounds their rates."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ._row_norm import forward_of, gradients_of
from ._runtime import interpreting, kernel, run

__all__ = ["LayerNorm", "layer_norms", "stream"]

Tensors = tuple[torch.Tensor | None, ...]


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


def _torch_forward(x: Any, w: Any, b: Any, eps: float) -> Any:
    return torch.ops.aten.native_layer_norm(x, [x.shape[1]], w, b, eps)


def _torch_backward(dy: Any, x: Any, w: Any, b: Any, mean: Any, rstd: Any) -> Any:
    call = torch.ops.aten.native_layer_norm_backward
    return call(dy, x, [x.shape[1]], mean, rstd, w, b, [True, True, True])


@cache
def _inductor() -> LayerNorm:
    # Every shape is compiled for itself; after eight, torch would give up.
    importlib.import_module("torch._dynamo").config.recompile_limit = 256
    # inductor moves Triton's cache when it makes its first kernel, unless this variable is set:
    # what another process compiled before that is then compiled again.
    os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)
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
    """QuACK's, with more threads for a row where its own choice runs out of registers.

    A thread keeps its elements of x, w and b in float32. QuACK 0.6.5 gives it up to 128 of a row
    (3072, 6144, 12,288 and 16,384 columns), so that there are not the 255 registers of a thread for
    three times as many: on an H200 its forward fell to 285 GB/s. With twice the threads it has 64.
    """
    ops = importlib.import_module("quack.rmsnorm")
    configs = importlib.import_module("quack.rmsnorm_config").RmsNormFwdConfig

    @cache
    def wider(n: int, width: int) -> Any:
        usual = configs.from_analytical_heuristic(n, width, is_layernorm=True)
        threads = usual.threads_per_row
        if n <= 64 * threads * usual.cluster_n or threads >= 256:
            return None
        more = {"threads_per_row": 2 * threads, "num_threads": max(usual.num_threads, 2 * threads)}
        return dataclasses.replace(usual, **more)

    def forward(x: Any, w: Any, b: Any, eps: float) -> Any:
        config = wider(x.shape[1], 8 * x.element_size())
        if config is None:
            return ops.layernorm_fwd(x, w, b, eps, return_rstd=True, return_mean=True)
        y = torch.empty_like(x)
        rstd, mean = (torch.empty(len(x), device=x.device) for _ in range(2))
        launch = ops.rmsnorm_fwd_tuned.fn  # without its search over all configurations
        launch(x, w, y, b, rstd, mean, eps=eps, is_layernorm=True, config=config)
        return y, rstd, mean

    def backward(dy: Any, x: Any, w: Any, b: Any, rstd: Any, mean: Any) -> Any:
        return ops.layernorm_bwd(x, w, dy, rstd, mean)

    return LayerNorm(forward, backward, torch.float32)


def _fla() -> LayerNorm:
    ops = importlib.import_module("fla.modules.norm.layernorm")

    def forward(x: Any, w: Any, b: Any, eps: float) -> Any:
        return ops.layer_norm_fwd(x, w, b, eps)[:3]

    def backward(dy: Any, x: Any, w: Any, b: Any, mean: Any, rstd: Any) -> Any:
        return ops.layer_norm_bwd(dy, x, w, b, mean=mean, rstd=rstd)[:3]

    return LayerNorm(forward, backward)


_MADE: dict[str, Callable[[], LayerNorm]] = {
    "roundoff": lambda: LayerNorm(forward_of, gradients_of),
    "torch": lambda: LayerNorm(_torch_forward, _torch_backward),
    "inductor": _inductor,
    "Liger": _liger,
    "QuACK": _quack,
    "flash-linear-attention": _fla,
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
        Label -> :class:`LayerNorm`, of roundoff, torch, inductor, Liger, QuACK and
        flash-linear-attention; label -> reason, of those that are missing.

    Examples
    --------
    >>> from roundoff.kernels.baselines import layer_norms
    >>> norms, missing = layer_norms("cpu")
    >>> "torch" in norms, missing["Liger"]
    (True, 'made for a GPU')
    """
    norms, missing = {}, {}
    on_cpu = ("roundoff", "torch") if interpreting() else ("torch",)
    for label, make in _MADE.items():
        if not device.startswith("cuda") and label not in on_cpu:
            missing[label] = "made for a GPU"
            continue
        try:
            norms[label] = make()
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            # A RuntimeError is QuACK's, without the part of CUDA that it is built on.
            missing[label] = f"{type(error).__name__}: {error}"
    return norms, missing


# --- the ceiling ----------------------------------------------------------------------------------


@kernel
def _stream(A, B, Y, n, READS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    x = tl.load(A + at, mask=here)
    if READS > 1:
        x += tl.load(B + at, mask=here)
    tl.store(Y + at, x, mask=here)


def stream(inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    """Read and write as many tensors as a layer norm does: the ceiling of its rate.

    Writes the sum of the inputs, added in their own type. A forward reads one and writes one, a
    backward reads two and writes one. torch's own copy slows down at half a gibibyte a tensor;
    this does not depend on the size.

    Parameters
    ----------
    inputs : tuple of torch.Tensor
        One or two, contiguous, of one shape and type.
    output : torch.Tensor
        Of the same shape and type.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels.baselines import stream
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> x, y = torch.ones(100, device=device), torch.empty(100, device=device)
    >>> stream((x, x), y)
    >>> y.unique().tolist()
    [2.0]
    """
    first, last = inputs[0], inputs[-1]
    n, block = first.numel(), 16384 // first.element_size()
    grid = (-(-n // block), 1)
    run(_stream, grid, first, last, output, n, len(inputs), block, num_warps=8)
