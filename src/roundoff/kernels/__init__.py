"""Triton kernels, one file a kernel.

Where there is no GPU the kernels run in Triton's interpreter: slowly, on the CPU, with the same
results up to rounding. ``TRITON_INTERPRET=1`` in the environment asks for it where there is one.
"""

from ._runtime import interpreting, shuffled_programs
from .layer_norm import layer_norm

__all__ = ["interpreting", "layer_norm", "shuffled_programs"]
