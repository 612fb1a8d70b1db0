"""A Llama layer, its rivals and what they are measured against: the subject of the page."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roundoff.dtypes import dtype_info, ulp
from roundoff.errors import ArgumentError
from roundoff.fusion import OptimizationOptions

from .entry import onnx_custom_backend

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SIZES", "Llama", "Rival", "Size", "compiled", "cost", "errors", "tokens"]


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a model and of its input."""

    hidden: int
    heads: int
    intermediate: int
    vocabulary: int
    batch: int
    length: int


#: By name; "medium" and "large" are Llama-2-7B's layer, with a narrow and its own feed-forward.
SIZES: dict[str, Size] = {
    "tiny": Size(64, 4, 96, 128, 2, 16),
    "small": Size(256, 8, 512, 256, 2, 64),
    "medium": Size(4096, 32, 1024, 1024, 2, 1024),
    "large": Size(4096, 32, 11008, 32000, 2, 1024),
}


class Llama(torch.nn.Module):
    """A Llama of transformers with random weights, whose outputs are flat.

    The weights are drawn in float32 from *seed* and rounded to *dtype*; the rotary frequencies
    stay in float32, as they do when a checkpoint is loaded in that type. ``module.half()`` would
    round them as well.

    Parameters
    ----------
    size : Size
    layers : int
    dtype : torch.dtype
    attention : {"eager", "sdpa"}
        What transformers is told to use.
    device : str
    seed : int

    Notes
    -----
    ``forward(ids, mask=None)`` returns the last hidden state, (batch, length, hidden), and the
    keys and values of each layer, (batch, heads, length, hidden / heads).
    """

    def __init__(
        self,
        size: Size,
        layers: int = 1,
        dtype: torch.dtype = torch.float32,
        attention: str = "sdpa",
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        config = LlamaConfig(
            hidden_size=size.hidden,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            intermediate_size=size.intermediate,
            vocab_size=size.vocabulary,
            num_hidden_layers=layers,
            max_position_embeddings=max(size.length, 2048),
            attn_implementation=attention,
        )
        with torch.device(device):
            self.model = LlamaModel(config).eval()
        generator = torch.Generator(device).manual_seed(seed)
        for name, p in self.model.named_parameters():
            # As transformers draws them, except for norms, which would all be one.
            drawn = torch.randn(p.shape, generator=generator, device=device)
            p.data = (1 + 0.1 * drawn if "norm" in name else 0.02 * drawn).to(dtype)
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[Any, ...]:
        """(last hidden state, keys and values of each layer, …)."""
        made = self.model(ids, mask)
        layers = made.past_key_values.layers
        return (made.last_hidden_state, *(t for c in layers for t in (c.keys, c.values)))


def tokens(size: Size, with_mask: bool, device: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(ids,) or (ids, mask): random tokens, and a mask that shuts out the left of the last row."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (size.batch, size.length)
    ids = torch.randint(0, size.vocabulary, shape, generator=generator, device=device)
    if not with_mask:
        return (ids,)
    mask = torch.ones_like(ids)
    mask[-1, : size.length // 4] = 0
    return ids, mask


@dataclasses.dataclass
class Rival:
    """One way to run the model, compiled and warm.

    Attributes
    ----------
    call : callable
        Without arguments; returns the model's outputs.
    outputs : tuple of torch.Tensor
        Of one call, in memory of their own.
    instance : dict or None
        What the backend stored, where the rival is ours.
    seconds : float
        From nothing to the end of the first call.
    memory : float
        MiB by which the process, or its memory on the GPU, grew.
    """

    call: Callable[[], tuple[Any, ...]]
    outputs: tuple[torch.Tensor, ...]
    instance: Mapping[str, Any] | None
    seconds: float
    memory: float

    @property
    def nodes(self) -> int | None:
        """Nodes run at each call."""
        return None if self.instance is None else len(self.instance["onnx"].graph.node)

    @property
    def custom(self) -> int | None:
        """Those of them that are not ONNX's own."""
        if self.instance is None:
            return None
        return sum(n.domain != "" for n in self.instance["onnx"].graph.node)


def compiled(
    model: Callable[..., Any],
    inputs: tuple[torch.Tensor, ...],
    *,
    how: str,
    cuda_graph: bool = False,
    **options: Any,
) -> Rival:
    """Prepare one rival and call it twice.

    Parameters
    ----------
    how : str
        ``"eager"``; ``"inductor"`` or ``"inductor:<mode>"``; ``"onnx"`` for the exported graph,
        or the tiers of :class:`roundoff.fusion.OptimizationOptions`.
    cuda_graph : bool
        For our backend on CUDA.
    **options
        Further options of :class:`roundoff.fusion.OptimizationOptions`.
    """
    device = inputs[0].device
    storage: dict[str, Any] = {}
    before, start = _memory(device), time.perf_counter()
    name, _, mode = how.partition(":")
    run: Callable[..., Any] = model
    model = _alone(model)
    if name == "inductor":
        run = torch.compile(model, mode=mode or None, fullgraph=True, dynamic=False)
    elif name != "eager":
        chosen = OptimizationOptions(None if how == "onnx" else how, **options)
        backend = functools.partial(
            onnx_custom_backend, options=chosen, storage=storage, cuda_graph=cuda_graph
        )
        run = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)

    with torch.no_grad():
        run(*inputs)
        _wait(device)
        seconds = time.perf_counter() - start
        outputs = tuple(t.clone() for t in run(*inputs))
        _wait(device)
    grown = (_memory(device) - before) / 2**20
    instance = storage["instance"][0] if storage else None
    return Rival(functools.partial(_quietly, run, inputs), outputs, instance, seconds, grown)


def _alone(model: Callable[..., Any]) -> Any:
    """The model behind a function whose code is its own.

    torch.compile keeps what it compiled by the code of a function: rivals of one forward would
    wait for each other's guards at every call.
    """

    def forward(*inputs: Any) -> Any:
        return model(*inputs)

    forward.__code__ = forward.__code__.replace(co_name="forward_alone")
    return forward


def _quietly(run: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Any:
    with torch.no_grad():
        return run(*inputs)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return float(total - free)
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return float("nan")
    return float(pages.read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def errors(
    truth: tuple[torch.Tensor, ...] | list[torch.Tensor], made: tuple[torch.Tensor, ...]
) -> dict[str, float]:
    """Largest error of the hidden state and of keys and values.

    One ULP is that of a typical element, the root mean square of the truth, in the type of the
    result: where an element is nearly zero its own unit says how near, not how far it is off.

    Returns
    -------
    dict
        ``error``, ``error_ulp``, ``mean_ulp`` of the hidden state; ``keys_ulp`` of all the rest.
    """
    if len(truth) != len(made):
        raise ArgumentError("outputs", got=len(made), expected=f"{len(truth)}, as many as truth")
    found = [_error(t, m) for t, m in zip(truth, made, strict=True)]
    first, rest = found[0], found[1:]
    return first | {"keys_ulp": max((r["error_ulp"] for r in rest), default=0.0)}


def _error(truth: torch.Tensor, made: torch.Tensor) -> dict[str, float]:
    off = (truth.double() - made.double()).abs()
    unit = float(ulp(float(truth.double().square().mean().sqrt()), dtype_info(made.dtype)))
    largest = float(off.max())
    return {
        "error": largest,
        "error_ulp": largest / unit,
        "mean_ulp": float(off.mean()) / unit,
    }


def cost(size: Size, layers: int, itemsize: int) -> pd.DataFrame:
    """Operations and bytes that one call cannot do without, by part.

    Products: seven a layer. Attention: causal, so half of the scores. The rest: each
    normalisation, rotation and gate reads its operands and writes its results once; the embedding
    reads and writes its rows.

    Returns
    -------
    pandas.DataFrame
        Columns part, flops, bytes.
    """
    import pandas as pd

    n, h, i = size.batch * size.length, size.hidden, size.intermediate
    weights = 4 * h * h + 3 * h * i
    products = {"flops": 2 * n * weights, "bytes": (weights + n * (8 * h + 3 * i)) * itemsize}
    attention = {"flops": 2 * n * size.length * h, "bytes": 4 * n * h * itemsize}
    # Per layer: two norms with a sum (4 each), rotation and layout of q, k, v (6), the gate (3).
    rest = {"flops": 0, "bytes": (14 * n * h + 3 * n * i) * itemsize}
    parts = {"products": products, "attention": attention, "the rest": rest}
    frame = pd.DataFrame(parts).T * layers
    frame.loc["the rest", "bytes"] += 3 * n * h * itemsize  # the embedding, and the last norm
    return frame.rename_axis("part").reset_index()
