"""A Llama with every operation in float64, and greedy decoding for it and for transformers' own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ..arguments import check_device, check_whole
from ..errors import ArgumentError
from .llama import check_tokens

if TYPE_CHECKING:
    from .trained import TrainedLlama

__all__ = [
    "Decoded",
    "Float64Llama",
    "decode",
    "padded",
    "server_batches",
]


#: Types of token numbers.
_TOKENS = (torch.int64, torch.int32)


class _InFloat64(TorchFunctionMode):
    """While it is on, what asks torch for float32 gets float64."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def wide(given: Any) -> Any:
            return torch.float64 if given is torch.float32 else given

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        named = {name: wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(wide, args), **named)


class Float64Llama:
    """A trained model in float64: norms, angles, softmax and products.

    ``model.double()`` of transformers' own is no truth: its norms, angles and softmax pass through
    float32 whatever the type of the module. This one is that model with float64 in their place. It
    is called as transformers' model is, returns an object with ``logits``, and takes transformers'
    caches.

    Parameters
    ----------
    trained : TrainedLlama
        Weights and configuration.
    device : str
        Where the weights go.

    References
    ----------
    H. Touvron et al., *LLaMA*, `arXiv:2302.13971 <https://arxiv.org/abs/2302.13971>`_; rotary
    embedding: J. Su et al., `arXiv:2104.09864 <https://arxiv.org/abs/2104.09864>`_.

    Examples
    --------
    >>> from roundoff.models import Float64Llama, load_trained
    >>> model = Float64Llama(load_trained())
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape, model.dtype
    (torch.Size([1, 3, 49152]), torch.float64)
    """

    dtype = torch.float64

    def __init__(self, trained: TrainedLlama, device: str = "cpu") -> None:
        self.config = trained.config
        self.device = torch.device(device)
        with _InFloat64():
            self._model = trained.model(torch.float64, device=device)

    def __call__(self, input_ids: torch.Tensor, *more: Any, **named: Any) -> Any:
        """Logits, shape (batch, length, vocabulary), in float64.

        Parameters
        ----------
        input_ids : torch.Tensor of int64, shape (batch, length)
        *more, **named
            What transformers' model takes: ``attention_mask``, ``position_ids``,
            ``past_key_values``, ``logits_to_keep`` and others.
        """
        check_tokens(input_ids, self.config.vocab_size)
        with _InFloat64():
            return self._model(input_ids, *more, **named)


def padded(
    prompts: Sequence[Sequence[int]], pad: int, device: str = "cpu", length: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths as one batch, padded on the left, and its mask.

    Parameters
    ----------
    prompts : sequence of sequence of int
    pad : int
        The token that fills.
    device : str
    length : int
        At least this many columns.

    Returns
    -------
    ids, mask : torch.Tensor of int64, shape (batch, length)
        The mask is 0 where a token is padding.

    Raises
    ------
    ArgumentError
        No prompt, or one that is no list of token numbers.

    Examples
    --------
    >>> padded([[5, 6, 7], [8]], pad=2)
    (tensor([[5, 6, 7],
            [2, 2, 8]]), tensor([[1, 1, 1],
            [0, 0, 1]]))
    """
    tokens = _tokens(prompts)
    check_whole("pad", pad)
    check_whole("length", length, 0)
    check_device(device)
    length = max(length, *map(len, tokens))
    ids = torch.full((len(tokens), length), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(tokens):
        ids[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _tokens(prompts: Any) -> list[torch.Tensor]:
    """Each prompt's token numbers."""
    try:
        tokens = [torch.as_tensor(prompt) for prompt in prompts]
        fits = all(t.dim() == 1 and t.numel() and t.dtype in _TOKENS for t in tokens)
    except (TypeError, ValueError, RuntimeError):
        fits = False
    if not fits or not tokens:
        raise ArgumentError(
            "prompts",
            got=repr(prompts)[:80],
            expected="a list of prompts, each a list of token numbers",
        )
    return tokens


def server_batches(
    requests: int, prompts: int, most: int, multiple: int = 1
) -> Iterator[tuple[list[int], int]]:
    """Batches in which a server could decode requests that arrive at random.

    A batch begins when the one before is done and takes those that wait: one, and a geometric
    number of others with the mean *most*, no more than *most* in all.

    Parameters
    ----------
    requests : int
        How many there are in all.
    prompts : int
        Each request is for one of these, at random.
    most : int
        Largest batch.
    multiple : int
        Wait until a batch is a multiple of this, if so many requests are left: a server that has
        recorded some sizes as CUDA graphs decodes those.

    Yields
    ------
    (list of int, int)
        Numbers of the prompts, and columns of padding in front of the longest, 0 to 32.

    Examples
    --------
    >>> [len(rows) for rows, _ in server_batches(9, 3, 4)]
    [4, 3, 2]
    """
    generator = np.random.default_rng(0)
    while requests > 0:
        waiting = 1 + int(generator.geometric(1 / most))
        size = min(-(-waiting // multiple) * multiple, most, requests)
        requests -= size
        yield generator.integers(prompts, size=size).tolist(), int(generator.integers(33))


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What greedy decoding gave.

    Attributes
    ----------
    tokens : torch.Tensor
        int64, shape (batch, tokens): the most likely token of each step; after the first end
        token (of the text that was followed, where there is one) nothing else.
    margin : torch.Tensor
        float64, shape (batch, tokens): how far the largest logit is above the second; NaN after
        the end.

    Examples
    --------
    >>> Decoded(torch.tensor([[5, 2]]), torch.tensor([[0.5, 1.0]])).tokens.shape
    torch.Size([1, 2])
    """

    tokens: torch.Tensor
    margin: torch.Tensor


def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    follow: torch.Tensor | None = None,
    observe: Callable[[int, torch.Tensor], Any] | None = None,
    length: int = 0,
    room: int = 0,
) -> Decoded:
    """Greedy decoding with a static cache: equal shapes at every step, whatever runs the model.

    Where two logits are equal the smaller token number is taken, as ``torch.argmax`` and
    transformers' ``generate`` do.

    Parameters
    ----------
    model : transformers' causal language model or Float64Llama
    prompts : sequence of sequence of int
        A batch; shorter prompts are padded on the left.
    tokens : int
        How many to write.
    follow : torch.Tensor of int64, shape (batch, tokens), optional
        A text that every step goes on from, whatever it would have written itself (teacher
        forcing). Up to the first token that differs both ways compute the same.
    observe : callable, optional
        Called with the number of each step and its logits, shape (batch, vocabulary), in the
        model's type; it must not change them.
    length : int
        Pad the prompts to at least this many columns.
    room : int
        Columns of the cache, if that is more than padded prompts and tokens take: texts of several
        lengths then run kernels of one shape.

    Returns
    -------
    Decoded

    Raises
    ------
    ArgumentError
        When an argument is not as above, or a prompt has a token that the model lacks.
    DtypeError
        When a text to follow is none of token numbers.

    Examples
    --------
    >>> from roundoff.models import decode, load_trained
    >>> trained = load_trained()
    >>> made = decode(trained.model(), [trained.prompt("What is the capital of France?")], 7)
    >>> trained.tokenizer.decode(made.tokens[0], skip_special_tokens=True)
    'The capital of France is Paris.'
    """
    from transformers import StaticCache

    check_whole("tokens", tokens, 1)
    check_whole("room", room, 0)
    end = model.config.eos_token_id
    pad = model.config.pad_token_id
    ids, mask = padded(prompts, end if pad is None else pad, length=length)
    check_tokens(ids, model.config.vocab_size)
    ids, mask = ids.to(model.device), mask.to(model.device)
    batch, length = ids.shape
    if follow is not None:
        check_tokens(follow, model.config.vocab_size)
        if follow.shape != (batch, tokens):
            raise ArgumentError(
                "a text to follow",
                got=str(tuple(follow.shape)),
                expected=f"({batch}, {tokens}): (prompts, tokens)",
            )
    room = max(room, length + tokens)
    cache = StaticCache(config=model.config, max_cache_len=room)
    # One mask of the cache's whole length; what is not written yet is later than any query.
    whole = torch.nn.functional.pad(mask, (0, room - length), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ends = torch.tensor([end] if isinstance(end, int) else end or [-1], device=ids.device)
    finished = torch.zeros(batch, dtype=torch.bool, device=ids.device)
    written, margins = [], []
    # A prompt's last position is a slice. On a CPU the product with one is a loop: in a narrow type
    # it takes 40 times as long as the product with the copy that an index makes.
    last = 1 if ids.is_cuda else torch.tensor([-1])
    for i in range(tokens):
        with torch.no_grad():
            logits = model(
                input_ids=ids,
                attention_mask=whole,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=last,
            ).logits[:, -1]
        last = 1
        if observe:
            observe(i, logits)
        best = logits.topk(2).values.double()
        written.append(torch.where(finished, ends[0], logits.argmax(-1)))
        margins.append((best[:, 0] - best[:, 1]).masked_fill(finished, torch.nan))
        token = written[-1] if follow is None else follow[:, i].to(ids.device)
        finished = finished | torch.isin(token, ends)
        if bool(finished.all()):
            break
        ids, positions = token[:, None], positions[:, -1:] + 1
    rest = tokens - len(written)
    text = torch.nn.functional.pad(torch.stack(written, 1), (0, rest), value=int(ends[0]))
    margin = torch.nn.functional.pad(torch.stack(margins, 1), (0, rest), value=float("nan"))
    return Decoded(text.cpu(), margin.cpu())
