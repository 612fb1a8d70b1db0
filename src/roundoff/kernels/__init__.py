"""Kernels written in Triton: normalisations, sums, those of a Llama layer, invariant ones.

Where there is no GPU the kernels run in Triton's interpreter: slowly, on the CPU, with the same
results up to rounding. ``TRITON_INTERPRET=1`` in the environment asks for it where there is one.
"""

from ._runtime import interpreting, shuffled_programs  # first: it says that Triton is missing

# isort: split
from ._row_norm import layer_norm, rms_norm
from .invariant_attention import attention
from .invariant_matmul import matmul
from .invariant_mode import invariant

__all__ = [
    "attention",
    "interpreting",
    "invariant",
    "layer_norm",
    "matmul",
    "rms_norm",
    "shuffled_programs",
]
