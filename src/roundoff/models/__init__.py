"""Models of the pages: small ONNX graphs, a Llama with random weights, a trained one."""

from .decoding import Decoded, TrueLlama, decode, padded
from .llama import SIZES, Llama, Size, tokens
from .small import layer_norm_feeds, layer_norm_matmul, residual_rms_norm
from .trained import SMOLLM2, Trained, load_trained

__all__ = [
    "SIZES",
    "SMOLLM2",
    "Decoded",
    "Llama",
    "Size",
    "Trained",
    "TrueLlama",
    "decode",
    "layer_norm_feeds",
    "layer_norm_matmul",
    "load_trained",
    "padded",
    "residual_rms_norm",
    "tokens",
]
