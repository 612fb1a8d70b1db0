"""RMSNorm of a sum, with the sum: what stands between two blocks of a Llama layer.

One program a row, the row held in registers: x and the residual are read once, the sum and the
normalised row written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["add_rms_norm"]


@triton.jit
def _add_rms_norm(
    x,  # (rows, n)
    residual,  # (rows, n)
    weight,  # (n,)
    total,  # (rows, n): x + residual
    out,  # (rows, n)
    n,
    epsilon,
    BLOCK: tl.constexpr,  # n, up to a power of two
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + row * n + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(residual + row * n + at, mask=inside, other=0.0).to(tl.float32)
    # Rounded before it is normalised, as it would be when another operator reads it.
    y = (a + b).to(total.dtype.element_ty)
    tl.store(total + row * n + at, y, mask=inside)
    y = y.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(y * y, axis=0) / n + epsilon)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * n + at, (y * scale * w).to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm(x + residual) * weight`` and ``x + residual``, in one pass.

    Parameters
    ----------
    x, residual : torch.Tensor
        (…, n), contiguous, of one type.
    weight : torch.Tensor
        (n,).
    epsilon : float
        Added to the mean square.

    Returns
    -------
    normed, total : torch.Tensor
        (…, n).

    References
    ----------
    B. Zhang and R. Sennrich, *Root Mean Square Layer Normalization*, 2019.
    """
    n = x.shape[-1]
    total, out = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(n)
    warps = min(max(block // 512, 1), 16)
    if x.numel():
        _add_rms_norm[(x.numel() // n,)](x, residual, weight, total, out, n, epsilon,
                                         BLOCK=block, num_warps=warps)  # fmt: skip
    return out, total
