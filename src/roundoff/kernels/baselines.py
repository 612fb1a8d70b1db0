"""Norms and invariant products to compare with, and the stream that bounds their rates."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..errors import ArgumentError, ShapeError
from ..workers import Workers
from ._layer_norm import forward_of
from ._row_norm import LAYER, RMS, case_of, gradients_of
from ._runtime import check_device, interpreting, kernel, multiprocessors, run
from .invariant_matmul import Tile, _upward, matmul, tile_for

__all__ = [
    "LayerNorm", "RmsNorm", "compile_ahead", "decode_attentions", "invariant_modes",
    "invariant_products", "layer_norms", "rms_norms", "stream", "vllm_tile",
]  # fmt: skip

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


class RmsNorm(NamedTuple):
    """One RMSNorm, split where autograd splits it.

    Attributes
    ----------
    forward : callable
        (x, residual or None, w, eps) -> (y, h, \\*saved): h is x + residual, or x; saved is rstd in
        its own form.
    backward : callable
        (dy, dh or None, h, w, \\*saved) -> (dx, dw), dh the gradient of h: given with a residual.
    """

    forward: Callable[..., Tensors]
    backward: Callable[..., Tensors]


def _loaded(name: str) -> Any:
    """A module of somebody else's; ImportError where it cannot run here, whatever it says."""
    try:
        return importlib.import_module(name)
    except RuntimeError as error:  # QuACK's, without the part of CUDA that it is built on
        raise ImportError(f"{name} does not load: {error}") from error


def _ours() -> LayerNorm:
    def backward(dy: Any, x: Any, w: Any, b: Any, stats: Any) -> Any:
        return gradients_of(LAYER, dy, x, w, stats, None, w.dtype, b.dtype, 0)

    return LayerNorm(forward_of, backward)


def _torch_forward(x: Any, w: Any, b: Any, eps: float) -> Any:
    return torch.ops.aten.native_layer_norm(x, [x.shape[1]], w, b, eps)


def _torch_backward(dy: Any, x: Any, w: Any, b: Any, mean: Any, rstd: Any) -> Any:
    call = torch.ops.aten.native_layer_norm_backward
    return call(dy, x, [x.shape[1]], mean, rstd, w, b, [True, True, True])


def _torch() -> LayerNorm:
    return LayerNorm(_torch_forward, _torch_backward)


def _prepare_compiler() -> None:
    """Settings that ``torch.compile`` needs where many shapes are compared."""
    # Every shape is compiled for itself; after eight, torch would give up.
    importlib.import_module("torch._dynamo").config.recompile_limit = 256
    # inductor moves Triton's cache when it makes its first kernel, unless this variable is set:
    # what another process compiled before that is then compiled again.
    os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)


@cache
def _inductor() -> LayerNorm:
    _prepare_compiler()
    return LayerNorm(
        torch.compile(_torch_forward, dynamic=False, fullgraph=True),
        torch.compile(_torch_backward, dynamic=False, fullgraph=True),
    )


def _liger() -> LayerNorm:
    ops = _loaded("liger_kernel.ops.layer_norm")

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
    ops = _loaded("quack.rmsnorm")
    configs = _loaded("quack.rmsnorm_config").RmsNormFwdConfig

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


def _fla_module() -> Any:
    try:
        return _loaded("fla.modules.norm.layernorm")
    except ImportError:  # before 0.6
        return _loaded("fla.modules.layernorm")


def _fla() -> LayerNorm:
    ops = _fla_module()

    def forward(x: Any, w: Any, b: Any, eps: float) -> Any:
        return ops.layer_norm_fwd(x, w, b, eps)[:3]

    def backward(dy: Any, x: Any, w: Any, b: Any, mean: Any, rstd: Any) -> Any:
        return ops.layer_norm_bwd(dy, x, w, b, mean=mean, rstd=rstd)[:3]

    return LayerNorm(forward, backward)


def _apex() -> LayerNorm:
    ops = _loaded("fused_layer_norm_cuda")

    def forward(x: Any, w: Any, b: Any, eps: float) -> Any:
        return ops.forward_affine(x, (x.shape[1],), w, b, eps)

    def backward(dy: Any, x: Any, w: Any, b: Any, mean: Any, rstd: Any) -> Any:
        return ops.backward_affine(dy, mean, rstd, x, (x.shape[1],), w, b, 0.0, False)

    return LayerNorm(forward, backward)


def _transformer_engine() -> LayerNorm:
    _loaded("transformer_engine.pytorch")
    ops = _loaded("transformer_engine_torch")

    def forward(x: Any, w: Any, b: Any, eps: float) -> Any:
        kind = getattr(ops.DType, {2: "kFloat16", 4: "kFloat32"}[x.element_size()])
        kind = ops.DType.kBFloat16 if x.dtype == torch.bfloat16 else kind
        return ops.layernorm_fwd(x, w, b, eps, None, None, kind, 0, False)

    def backward(dy: Any, x: Any, w: Any, b: Any, mean: Any, rstd: Any) -> Any:
        return ops.layernorm_bwd(dy, x, mean, rstd, w, 0, False)

    return LayerNorm(forward, backward)


# How each is made, and whether it runs on a CPU.
_KNOWN: dict[str, tuple[Callable[[], LayerNorm], Callable[[], bool]]] = {
    "roundoff": (_ours, interpreting),
    "torch": (_torch, lambda: True),
    "inductor": (_inductor, lambda: False),
    "Liger": (_liger, lambda: False),
    "QuACK": (_quack, lambda: False),
    "flash-linear-attention": (_fla, lambda: False),
    "Apex": (_apex, lambda: False),
    "Transformer Engine": (_transformer_engine, lambda: False),
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
        Label -> :class:`LayerNorm`, of roundoff, torch, inductor, Liger, QuACK,
        flash-linear-attention, Apex and Transformer Engine; label -> reason, of those that are
        missing.

    Examples
    --------
    >>> from roundoff.kernels.baselines import layer_norms
    >>> norms, missing = layer_norms("cpu")
    >>> "torch" in norms, missing["Liger"]
    (True, 'made for a GPU')
    """
    return _installed(_KNOWN, device)


def _installed(known: dict[str, tuple[Callable[[], Any], Callable[[], bool]]], device: str) -> Any:
    norms, missing = {}, {}
    for label, (make, on_cpu) in known.items():
        if not device.startswith("cuda") and not on_cpu():
            missing[label] = "made for a GPU"
            continue
        try:
            norms[label] = make()
        except (ImportError, OSError, AttributeError) as error:
            missing[label] = f"{type(error).__name__}: {error}"
    return norms, missing


# --- RMSNorm --------------------------------------------------------------------------------------


def _our_rms() -> RmsNorm:
    def forward(x: Any, residual: Any, w: Any, eps: float) -> Any:
        case = case_of(RMS, (x.shape[1],), eps, None, x, w, None, residual)
        return case.forward(x, w, None, residual, True)

    def backward(dy: Any, dh: Any, h: Any, w: Any, stats: Any) -> Any:
        return gradients_of(RMS, dy, h, w, stats, dh, w.dtype, None, 0)[:2]

    return RmsNorm(forward, backward)


def _torch_rms_forward(x: Any, residual: Any, w: Any, eps: float) -> Any:
    h = x if residual is None else x + residual
    y, rstd = torch.ops.aten._fused_rms_norm(h, [h.shape[1]], w, eps)
    return y, h, rstd


def _torch_rms_backward(dy: Any, dh: Any, h: Any, w: Any, rstd: Any) -> Any:
    call = torch.ops.aten._fused_rms_norm_backward
    dx, dw = call(dy, h, [h.shape[1]], rstd, w, [True, True])
    return dx if dh is None else dx + dh, dw


def _torch_rms() -> RmsNorm:
    return RmsNorm(_torch_rms_forward, _torch_rms_backward)


def _plain_rms_forward(x: Any, residual: Any, w: Any, eps: float) -> Any:
    h = x if residual is None else x + residual
    wide = h.float()
    rstd = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    return (wide * rstd * w.float()).to(h.dtype), h, rstd


def _plain_rms_backward(dy: Any, dh: Any, h: Any, w: Any, rstd: Any) -> Any:
    g, xhat = dy.float(), h.float() * rstd
    wg = g * w.float()
    dx = rstd * (wg - xhat * (wg * xhat).mean(1, keepdim=True))
    dx = (dx if dh is None else dx + dh.float()).to(h.dtype)
    return dx, (g * xhat).sum(0).to(w.dtype)


@cache
def _inductor_rms() -> RmsNorm:
    _prepare_compiler()
    return RmsNorm(
        torch.compile(_plain_rms_forward, dynamic=False, fullgraph=True),
        torch.compile(_plain_rms_backward, dynamic=False, fullgraph=True),
    )


def _liger_rms() -> RmsNorm:
    ops = _loaded("liger_kernel.ops.rms_norm")
    fused = _loaded("liger_kernel.ops.fused_add_rms_norm")

    def forward(x: Any, residual: Any, w: Any, eps: float) -> Any:
        if residual is None:
            y, h, *saved = ops.rms_norm_forward(x, w, eps, 0.0, "none", False)
        else:
            y, h, *saved = fused.fused_add_rms_norm_forward(x, residual, w, eps, 0.0, "none")
        return y, h, *saved

    def backward(dy: Any, dh: Any, h: Any, w: Any, rstd: Any, *how: Any) -> Any:
        block, warps, *stages, casting = how
        if dh is None:
            call = ops.rms_norm_backward
            return call(dy, h, w, rstd, 0.0, casting, block, warps, False, False)
        call = fused.fused_add_rms_norm_backward
        dx, _, dw = call(dy, dh, h, w, rstd, 0.0, casting, block, warps, *stages, False)
        return dx, dw

    return RmsNorm(forward, backward)


def _quack_rms() -> RmsNorm:
    ops = _loaded("quack.rmsnorm")

    def forward(x: Any, residual: Any, w: Any, eps: float) -> Any:
        return ops.rmsnorm_fwd(x, w, residual=residual, eps=eps, store_rstd=True)

    def backward(dy: Any, dh: Any, h: Any, w: Any, rstd: Any) -> Any:
        return ops.rmsnorm_bwd(h, w, dy, rstd, dresidual_out=dh, has_residual=dh is not None)[:2]

    return RmsNorm(forward, backward)


def _fla_rms() -> RmsNorm:
    ops = _fla_module()

    def forward(x: Any, residual: Any, w: Any, eps: float) -> Any:
        y, _, rstd, h = ops.layer_norm_fwd(x, w, None, eps, residual, is_rms_norm=True)
        return y, h, rstd

    def backward(dy: Any, dh: Any, h: Any, w: Any, rstd: Any) -> Any:
        more = {"dres": dh, "has_residual": True} if dh is not None else {}
        call = ops.layer_norm_bwd
        return call(dy, h, w, None, mean=None, rstd=rstd, is_rms_norm=True, **more)[:2]

    return RmsNorm(forward, backward)


_KNOWN_RMS: dict[str, tuple[Callable[[], RmsNorm], Callable[[], bool]]] = {
    "roundoff": (_our_rms, interpreting),
    "torch": (_torch_rms, lambda: False),
    "inductor": (_inductor_rms, lambda: False),
    "Liger": (_liger_rms, lambda: False),
    "QuACK": (_quack_rms, lambda: False),
    "flash-linear-attention": (_fla_rms, lambda: False),
}


def rms_norms(device: str = "cuda") -> tuple[dict[str, RmsNorm], dict[str, str]]:
    """This package's RMSNorm and the baselines that are installed.

    All multiply by the weight before the only rounding of y.

    Parameters
    ----------
    device : str
        As for :func:`layer_norms`.

    Returns
    -------
    (dict, dict)
        Label -> :class:`RmsNorm`, of roundoff, torch, inductor, Liger, QuACK and
        flash-linear-attention; label -> reason, of those that are missing.

    Examples
    --------
    >>> from roundoff.kernels.baselines import rms_norms
    >>> norms, missing = rms_norms("cpu")
    >>> missing["torch"]  # its fused backward is there for CUDA alone
    'made for a GPU'
    """
    return _installed(_KNOWN_RMS, device)


# --- the ceiling ----------------------------------------------------------------------------------


@kernel
def _stream(
    A, B, C,  # (n,); only the first READS are read
    Y, Z,  # (n,); only the first WRITES are written
    n,
    READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    x = tl.load(A + at, mask=here)
    if READS > 1:
        x += tl.load(B + at, mask=here)
    if READS > 2:
        x += tl.load(C + at, mask=here)
    tl.store(Y + at, x, mask=here)
    if WRITES > 1:
        tl.store(Z + at, x, mask=here)


def stream(
    inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...], block: int | None = None
) -> None:
    """Read and write as many tensors as a normalisation does: the ceiling of its rate.

    Writes the sum of the inputs, added in their own type, to each output. A forward reads one and
    writes one, with a residual two and two; a backward reads two and writes one, with the gradient
    of the sum three and one. torch's own copy slows down at half a gibibyte a tensor; this does not
    depend on the size.

    Parameters
    ----------
    inputs : tuple of torch.Tensor
        One to three, contiguous, of one shape and type.
    outputs : tuple of torch.Tensor
        One or two, of the same shape and type.
    block : int, optional
        Elements of a program, a power of two; by default 16 KiB.

    Raises
    ------
    ArgumentError
        Another number of tensors.
    UnsupportedError
        They are on the CPU and the kernels of this process are compiled for a GPU.

    Examples
    --------
    >>> import torch
    >>> from roundoff.kernels.baselines import stream
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> x, y = torch.ones(100, device=device), torch.empty(100, device=device)
    >>> stream((x, x), (y,))
    >>> y.unique().tolist()
    [2.0]
    """
    if not 1 <= len(inputs) <= 3 or not 1 <= len(outputs) <= 2:
        raise ArgumentError(
            "tensors of a stream", got=f"{len(inputs)} and {len(outputs)}",
            expected="1 to 3 inputs, 1 or 2 outputs",
        )  # fmt: skip
    first = inputs[0]
    check_device(first.device, "the first input")
    block = block or 16384 // first.element_size()
    tensors = (*inputs, *(first,) * (3 - len(inputs)), *outputs, *(first,) * (2 - len(outputs)))
    n = first.numel()
    if n:
        grid = (-(-n // block), 1)
        run(_stream, grid, *tensors, n, len(inputs), len(outputs), block, num_warps=8)


# --- products that do not depend on the batch -----------------------------------------------------


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
            persistent = _loaded(module).matmul_persistent
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
        return {label: _loaded(label).set_batch_invariant_mode}, {}
    except (ImportError, OSError, AttributeError) as error:
        return {}, {label: f"{type(error).__name__}: {error}"}


# vLLM's: rows of x up to which a tile is taken -> rows, columns, warps and stages of the tile. With
# another weight, or in float16, it has one tile for all; its block of K is fixed for a weight.
_VLLM_ONE = Tile(swap=False, rows=128, columns=128, depth=64, warps=8, stages=3)
_VLLM: dict[tuple[int, int], dict[int, tuple[int, int, int, int]]] = {  # by N and K
    (12288, 2048): {
        1: (16, 256, 4, 3), 4: (16, 256, 4, 4), 16: (16, 64, 4, 4), 32: (32, 64, 8, 5),
        64: (64, 64, 4, 4), 256: (64, 128, 4, 3), 512: (128, 128, 8, 3), 2048: (128, 256, 8, 2),
    },
    (2048, 6144): {
        1: (16, 32, 4, 4), 8: (16, 64, 4, 4), 16: (16, 32, 4, 3), 32: (32, 32, 8, 3),
        64: (64, 32, 4, 5), 256: (64, 128, 4, 3), 512: (128, 128, 4, 3), 1024: (64, 64, 4, 5),
        2048: (64, 128, 4, 4),
    },
}  # fmt: skip


def vllm_tile(m: int, n: int, k: int) -> Tile:
    """The tile of vLLM's invariant product on Hopper, in bfloat16.

    Its table has five weights, those of Qwen3-1.7B, measured on an H20; two of them are here. All
    others take one tile, which is that of batch_invariant_ops, too.

    Parameters
    ----------
    m, n, k : int
        Rows of x, and the weight (N, K).

    Returns
    -------
    Tile
        For :func:`roundoff.kernels.matmul`.

    References
    ----------
    https://github.com/vllm-project/vllm/pull/53247

    Examples
    --------
    >>> from roundoff.kernels.baselines import vllm_tile
    >>> vllm_tile(1, 12288, 2048).rows, vllm_tile(1, 4096, 4096).rows
    (16, 128)
    """
    tiles = _VLLM.get((n, k))
    if tiles is None:
        return _VLLM_ONE
    most = next((rows for rows in tiles if rows >= m), max(tiles))
    rows, columns, warps, stages = tiles[most]
    return Tile(swap=False, rows=rows, columns=columns, depth=128, warps=warps, stages=stages)


# --- attention of one token -----------------------------------------------------------------------

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def decode_attentions(parts: int = 16, keys_a_part: int = 256) -> dict[str, Attention]:
    """Others' attention of one token over a cache.

    FlexDecoding, which torch compiles for a GPU, cuts the keys into as many parts as give each
    multiprocessor two, so that the number of parts depends on the batch; its option ``SPLIT_KV``
    fixes it. It is given a block mask of all keys: torch 2.11 to 2.13 count the parts in blocks of
    the mask, and without one there is a single block. FlashInfer's decode with tensor cores is
    told how many keys a part has (``fixed_split_size``), in pages of 16 that lie in the cache as
    it is; what it plans for a shape is not part of a call.

    Parameters
    ----------
    parts : int
        Parts of the keys in "FlexDecoding, fixed".
    keys_a_part : int
        Keys of a part in the ways that are named after them; a multiple of 16.

    Returns
    -------
    dict
        "FlexDecoding", "FlexDecoding, fixed", "FlexDecoding, 256 keys" and, where it is installed,
        "FlashInfer, 256 keys" -> function of q (batch, heads, 1, head), keys and values (batch,
        groups, keys, head), contiguous, that gives (batch, heads, 1, head). Each shape is compiled
        or planned when it is first seen, which takes seconds.

    Raises
    ------
    ShapeError
        By FlashInfer's way: keys that are no multiple of 16.

    References
    ----------
    https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html

    https://docs.flashinfer.ai/api/attention.html

    Examples
    --------
    >>> from roundoff.kernels.baselines import decode_attentions
    >>> list(decode_attentions())[:2]
    ['FlexDecoding', 'FlexDecoding, fixed']
    """
    ways: dict[str, Attention] = {
        "FlexDecoding": partial(_flex, lambda keys: None),
        "FlexDecoding, fixed": partial(_flex, lambda keys: parts),
        f"FlexDecoding, {keys_a_part} keys": partial(
            _flex, lambda keys: max(1, keys // keys_a_part)
        ),
    }
    if importlib.util.find_spec("flashinfer") is not None:
        ways[f"FlashInfer, {keys_a_part} keys"] = partial(_flashinfer, keys_a_part // _PAGE)
    return ways


_PAGE = 16  #: keys of a page, as FlashInfer is told


def _flashinfer(
    pages_a_part: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    batch, groups, keys, head = k.shape
    if keys % _PAGE:
        raise ShapeError("keys", got=keys, expected=f"a multiple of {_PAGE}")
    planned = _planned(pages_a_part, tuple(q.shape), tuple(k.shape), q.dtype, q.device)
    # Pages of one text lie 16 keys apart, those of the next behind all groups of the last.
    own = keys // _PAGE
    shape = (own * (groups * (batch - 1) + 1), groups, _PAGE, head)
    pages = [t.as_strided(shape, (_PAGE * head, keys * head, head, 1)) for t in (k, v)]
    made: torch.Tensor = planned.run(q.view(batch, -1, head), tuple(pages))
    return made.view(q.shape)


@cache
def _planned(
    pages_a_part: int, q: tuple[int, ...], k: tuple[int, ...], dtype: torch.dtype, device: Any
) -> Any:
    """FlashInfer's plan for a shape: which program takes which keys."""
    (batch, heads, _, head), (_, groups, keys, _) = q, k
    own = keys // _PAGE
    decode = importlib.import_module("flashinfer.decode")
    # Of each part float32 results of 16 rows a head, a tile, and 128 MiB for what is small.
    parts = batch * -(-own // pages_a_part)
    room = torch.empty(parts * heads * 16 * head * 4 + 2**27, dtype=torch.uint8, device=device)
    plan = decode.BatchDecodeWithPagedKVCacheWrapper(room, "HND", use_tensor_cores=True)
    texts = torch.arange(batch + 1, dtype=torch.int32)
    pages = texts[:-1, None] * (groups * own) + torch.arange(own, dtype=torch.int32)
    plan.plan(
        texts * own, pages.flatten().to(device), torch.full((batch,), _PAGE, dtype=torch.int32),
        heads, groups, head, _PAGE, q_data_type=dtype, fixed_split_size=pages_a_part,
    )  # fmt: skip
    return plan


@cache
def _compiled_flex() -> Any:
    flex = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    _prepare_compiler()
    return torch.compile(flex, dynamic=False, fullgraph=True)


@cache
def _all_keys(keys: int, device: torch.device) -> Any:
    """A block mask that shuts nothing out. Without one, FlexDecoding gives all keys to one part."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    return flex.create_block_mask(lambda b, h, q, k: k >= 0, None, None, 1, keys, device)


def _flex(
    parts_of: Callable[[int], int | None], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    keys = k.shape[2]
    parts = parts_of(keys)
    made: torch.Tensor = _compiled_flex()(
        q, k, v, enable_gqa=True, kernel_options=parts and {"SPLIT_KV": parts},
        block_mask=_all_keys(keys, k.device),
    )  # fmt: skip
    return made


# --- what is timed, compiled ahead ----------------------------------------------------------------

Sizes = Sequence[tuple[int, int]]


def compile_ahead(
    weights: Sizes, counts: Sequence[int], caches: Sizes, limit_s: float = 90
) -> dict[str, int]:
    """Compile what invariant products and others' attention of a token launch, by all cores.

    In processes of their own, which leave it to the caches of Triton and inductor. What cannot be
    compiled is left to whom it concerns.

    Parameters
    ----------
    weights : sequence of (int, int)
        K and N, multiples of 16.
    counts : sequence of int
        Numbers of rows.
    caches : sequence of (int, int)
        Keys and batch of attention, with 32 heads of 128 in 8 groups.
    limit_s : float
        Seconds that it may take.

    Returns
    -------
    dict
        How many kernels and graphs were compiled, of how many.

    Raises
    ------
    WorkerError
        The time was up, or a process died.

    Examples
    --------
    >>> from roundoff.kernels.baselines import compile_ahead
    >>> compile_ahead([], [1], [])
    {'compiled': 0, 'of': 0}
    """
    ways: list[tuple[Any, ...]] = [
        (*sizes, way) for sizes in caches for way in decode_attentions() if "FlashInfer" not in way
    ]
    processors = multiprocessors(-1 if interpreting() else 0)
    tiles: dict[tuple[torch.dtype, Tile, bool], tuple[int, int]] = {}
    for dtype, (k, n), m in product((torch.bfloat16, torch.float16), weights, counts):
        for tile in (tile_for(_upward(m), n, k, 2, processors), vllm_tile(m, n, k)):
            # One compiled kernel serves all weights that are or are not multiples of its depth.
            tiles.setdefault((dtype, tile, k % tile.depth == 0), (n, k))
    tasks = ways + [(*case[:2], *sizes) for case, sizes in tiles.items()]
    parts = min(len(os.sched_getaffinity(0)), len(tasks))
    if not parts:
        return {"compiled": 0, "of": 0}
    with Workers(
        parts, limit_s=limit_s, imports=[__name__],
        environment={"TORCHINDUCTOR_COMPILE_THREADS": "1"},  # and not all cores for each process
    ) as workers:  # fmt: skip
        done = workers.map(_compile_each, [tasks[part::parts] for part in range(parts)])
    return {"compiled": sum(done), "of": len(tasks)}


def _compile_each(tasks: list[tuple[Any, ...]]) -> int:
    """In a process of its own: launch each once; how many could be."""
    done = 0
    for task in tasks:
        with suppress(Exception):
            (_multiply_once if isinstance(task[0], torch.dtype) else _attend_once)(*task)
            done += 1
    return done


def _device() -> str:
    return "cpu" if interpreting() else "cuda"


def _multiply_once(dtype: torch.dtype, tile: Tile, n: int, k: int) -> None:
    x, weight = (torch.empty(rows, k, dtype=dtype, device=_device()) for rows in (1, n))
    matmul(x, weight, tile=tile)


def _attend_once(keys: int, batch: int, way: str) -> None:
    shapes = (batch, 32, 1, 128), (batch, 8, keys, 128), (batch, 8, keys, 128)
    tensors = [torch.empty(s, dtype=torch.bfloat16, device=_device()) for s in shapes]
    decode_attentions()[way](*tensors)
