"""Kernels written in Triton: layer normalisation, sums, and those of a Llama layer.

Where there is no GPU the kernels run in Triton's interpreter: slowly, on the CPU, with the same
results up to rounding. ``TRITON_INTERPRET=1`` in the environment asks for it where there is one.
"""

from ._runtime import interpreting, shuffled_programs  # first: it says that Triton is missing

# isort: split
from ._layer_norm import backward_plan, layer_norm

__all__ = ["backward_plan", "interpreting", "layer_norm", "shuffled_programs"]
