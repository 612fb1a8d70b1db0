"""Models of the pages: small ONNX graphs, a Llama with random weights, a trained one."""

from .decoding import (
    Decoded,
    Float64Llama,
    decode,
    padded,
    server_batches,
)
from .llama import SIZES, Llama, Size, random_tokens
from .small import layer_norm_feeds, layer_norm_matmul, residual_rms_norm
from .texts import PASSAGES, prompts
from .trained import SMOLLM2, TrainedLlama, load_decoder, load_trained

__all__ = [
    "PASSAGES",
    "SIZES",
    "SMOLLM2",
    "Decoded",
    "Float64Llama",
    "Llama",
    "Size",
    "TrainedLlama",
    "decode",
    "layer_norm_feeds",
    "layer_norm_matmul",
    "load_decoder",
    "load_trained",
    "padded",
    "prompts",
    "random_tokens",
    "residual_rms_norm",
    "server_batches",
]
