"""A Llama of transformers with random weights, and its inputs: a model to compile."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..arguments import check_choice, check_device, check_flag, check_float_dtype, check_whole
from ..errors import ArgumentError, DtypeError, ShapeError

__all__ = ["SIZES", "Llama", "Size", "random_tokens"]


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a model and of its input.

    Attributes
    ----------
    hidden : int
        Values of a token between layers.
    heads : int
        Attention heads, for queries and for keys and values.
    intermediate : int
        Values between the products of the feed-forward.
    vocabulary : int
        Token numbers.
    batch : int
        Sequences of the input.
    length : int
        Tokens of a sequence.

    Examples
    --------
    >>> SIZES["medium"].hidden
    4096
    """

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
    "narrow": Size(1024, 16, 1024, 1024, 2, 256),
    "medium": Size(4096, 32, 1024, 1024, 2, 1024),
    "large": Size(4096, 32, 11008, 32000, 2, 1024),
}


class Llama(torch.nn.Module):
    """A Llama of transformers with random weights, whose outputs are flat.

    The weights are drawn in float32 and rounded to *dtype*; the rotary frequencies
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

    Raises
    ------
    ArgumentError
        An argument is not as above.
    UnsupportedError
        This machine has no such device.

    Notes
    -----
    ``forward(ids, mask=None)`` returns the last hidden state, (batch, length, hidden), and the
    keys and values of each layer, (batch, heads, length, hidden / heads).

    Examples
    --------
    >>> hidden, keys, values = Llama(SIZES["tiny"])(*random_tokens(SIZES["tiny"], False, "cpu"))
    >>> hidden.shape, keys.shape
    (torch.Size([2, 16, 64]), torch.Size([2, 4, 16, 16]))
    """

    def __init__(
        self,
        size: Size,
        layers: int = 1,
        dtype: torch.dtype = torch.float32,
        attention: str = "sdpa",
        device: str = "cpu",
    ) -> None:
        check_whole("layers", layers, 0)
        check_float_dtype("dtype", dtype)
        check_choice("attention", attention, ("eager", "sdpa"))
        check_device(device)
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
        generator = torch.Generator(device).manual_seed(0)
        for name, p in self.model.named_parameters():
            # As transformers draws them, except for norms, which would all be one.
            drawn = torch.randn(p.shape, generator=generator, device=device)
            p.data = (1 + 0.1 * drawn if "norm" in name else 0.02 * drawn).to(dtype)
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[Any, ...]:
        """(last hidden state, keys and values of each layer, …)."""
        if not torch.compiler.is_compiling():
            check_tokens(ids, self.model.config.vocab_size)
        made = self.model(ids, mask)
        layers = made.past_key_values.layers
        return (made.last_hidden_state, *(t for c in layers for t in (c.keys, c.values)))


def check_tokens(ids: Any, vocabulary: int) -> None:
    """Refuse what are no tokens; on a CPU, where it takes no wait, those that no model has, too.

    Raises
    ------
    DtypeError, ShapeError, ArgumentError
    """
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
        got = getattr(ids, "dtype", type(ids).__name__)
        raise DtypeError("tokens", got=str(got), expected="a tensor of int64")
    if ids.dim() != 2 or not ids.numel():
        raise ShapeError("tokens", got=tuple(ids.shape), expected="(batch, length), 1 or more")
    if type(ids) is torch.Tensor and ids.device.type == "cpu":
        low, high = (int(t) for t in ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise ArgumentError("tokens", got=f"{low} to {high}", expected=f"0 to {vocabulary - 1}")


def random_tokens(
    size: Size, with_mask: bool, device: str, padding: str = "left"
) -> tuple[torch.Tensor, ...]:
    """Random tokens: (ids,) or (ids, mask), with a mask that shuts out a quarter of the last row.

    Parameters
    ----------
    size : Size
        Its batch, length and vocabulary count.
    with_mask : bool
    device : str
    padding : {"left", "right"}
        Which quarter the mask shuts out. A token in padding on the left sees no key at all, as
        those before it are padding too, and its result is not defined: transformers' eager
        attention gives the mean of all values, sdpa zeros. With padding on the right every token
        sees a key, and both give the same on paper.

    Returns
    -------
    tuple of torch.Tensor
        One or two tensors of int64, (batch, length); the mask is 1 for tokens, 0 for padding.

    Raises
    ------
    ArgumentError
        When an argument is not as above.
    UnsupportedError
        This machine has no such device.

    Examples
    --------
    >>> ids, mask = random_tokens(SIZES["tiny"], True, "cpu")
    >>> ids.shape, mask[-1].tolist()[:6]
    (torch.Size([2, 16]), [0, 0, 0, 0, 1, 1])
    """
    check_device(device)
    check_flag("with_mask", with_mask)
    check_choice("padding", padding, ("left", "right"))
    generator = torch.Generator(device).manual_seed(0)
    shape = (size.batch, size.length)
    ids = torch.randint(0, size.vocabulary, shape, generator=generator, device=device)
    if not with_mask:
        return (ids,)
    mask = torch.ones_like(ids)
    quarter = size.length // 4
    shut_out = slice(quarter) if padding == "left" else slice(size.length - quarter, None)
    mask[-1, shut_out] = 0
    return ids, mask
