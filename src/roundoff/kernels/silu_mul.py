"""SiLU of one half times the other: the gate of a Llama layer, from its packed product.

ONNX Runtime needs three kernels for it (Split, QuickGelu, Mul), which move ten bytes for each
six that count in float16; one pass reads the packed product once and writes the result.
"""

# mypy: disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._pieces import run
from ._runtime import kernel

__all__ = ["silu_mul"]


@kernel
def _silu_mul(
    packed,  # (rows, 2 * n): gate, then up
    out,  # (rows, n)
    n,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    gate = tl.load(packed + row * 2 * n + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(packed + row * 2 * n + n + at, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * n + at, y.to(out.dtype.element_ty), mask=inside)


def silu_mul(packed: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` where ``packed = concat(gate, up)`` along the last axis.

    Computed in float32 and rounded once.

    Parameters
    ----------
    packed : torch.Tensor
        (…, 2 n), contiguous, float16, bfloat16 or float32.

    Returns
    -------
    torch.Tensor
        (…, n), of the same type.

    References
    ----------
    N. Shazeer, *GLU variants improve transformer*, 2020.
    """
    n = packed.shape[-1] // 2
    out = torch.empty(*packed.shape[:-1], n, dtype=packed.dtype, device=packed.device)
    block = min(triton.next_power_of_2(n), 1024)
    grid = (out.numel() // max(n, 1), triton.cdiv(n, block))
    if out.numel():
        run(_silu_mul, grid, packed, out, n, block)
    return out
