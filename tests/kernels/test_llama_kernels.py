"""The kernels of the experimental tier against float64: on CUDA where it is, else interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from roundoff.kernels.llama import (
    add_rms_norm,
    causal_attention,
    embed_rms_norm,
    rotary_qkv,
    silu_mul,
)

from .test_invariant import DEVICE, TYPES, draw

# Triton's interpreter cuts bfloat16 off instead of rounding it, and multiplies its bits.
EXACT = TYPES if DEVICE == "cuda" else TYPES[:2]


def near(made: torch.Tensor, truth: torch.Tensor, units: float = 1.0) -> None:
    """Within *units* roundings of the largest element."""
    allowed = units * torch.finfo(made.dtype).eps * float(truth.abs().max())
    assert float((made.double() - truth).abs().max()) <= allowed


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("n", [1, 24, 1030])
def test_silu_mul(dtype: torch.dtype, n: int) -> None:
    packed = draw(2, 3, 2 * n, dtype=dtype)
    gate, up = packed.double().chunk(2, -1)
    near(silu_mul(packed), torch.nn.functional.silu(gate) * up, 2)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "groups", "head"), [(4, 4, 16), (4, 2, 12), (3, 1, 2)])
def test_rotary(dtype: torch.dtype, heads: int, groups: int, head: int) -> None:
    batch, length = 2, 5
    packed = draw(batch, length, (heads + 2 * groups) * head, dtype=dtype)
    angle = draw(length, head // 2, dtype=torch.float32, seed=1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    q, k, v = rotary_qkv(packed, cos, sin, heads, groups)
    wide = packed.double().view(batch, length, heads + 2 * groups, head)
    c, s = cos.double()[:, None], sin.double()[:, None]
    one, two = wide.chunk(2, -1)
    turned = torch.cat([one * c - two * s, two * c + one * s], -1)
    near(q, turned[:, :, :heads].reshape(batch, length, -1), 2)
    near(k, turned[:, :, heads : heads + groups].transpose(1, 2), 2)
    assert torch.equal(v.double(), wide[:, :, heads + groups :].transpose(1, 2))


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("n", [1, 40, 1024])
@pytest.mark.parametrize("keep", [True, False])
def test_add_rms_norm(dtype: torch.dtype, n: int, keep: bool) -> None:
    x, residual = (draw(3, 2, n, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = draw(n, dtype=dtype, seed=2)
    out, total = add_rms_norm(x, residual, weight, 1e-5, keep)
    summed = (x.float() + residual.float()).to(dtype)
    near(out, normed(summed, weight, 1e-5), 3)
    assert not keep or torch.equal(total, summed)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_embed_rms_norm(dtype: torch.dtype) -> None:
    table, weight = draw(7, 24, dtype=dtype), draw(24, dtype=dtype, seed=1)
    ids = torch.tensor([[0, 6, -1], [3, 99, 2]], device=DEVICE)  # one from the end, one outside
    out, embedded = embed_rms_norm(table, ids, weight, 1e-6)
    rows = table[torch.tensor([[0, 6, 6], [3, 0, 2]], device=DEVICE)].clone()
    rows[1, 1] = 0
    assert torch.equal(embedded, rows)
    near(out, normed(rows, weight, 1e-6), 3)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("length", [1, 7, 64, 130])
@pytest.mark.parametrize(("heads", "groups", "head"), [(2, 2, 16), (4, 2, 12)])
def test_causal_attention(
    dtype: torch.dtype, length: int, heads: int, groups: int, head: int
) -> None:
    q = draw(2, length, heads * head, dtype=dtype)
    k, v = (draw(2, groups, length, head, dtype=dtype, seed=s) for s in (1, 2))
    made = causal_attention(q, k, v, heads, 0.3)
    by_head = q.double().view(2, length, heads, head).transpose(1, 2)
    truth = torch.nn.functional.scaled_dot_product_attention(
        by_head, k.double(), v.double(), is_causal=True, scale=0.3, enable_gqa=True
    )
    # The probabilities are rounded to the type before the second product.
    near(made, truth.transpose(1, 2).reshape(q.shape), 4)


def nearest(t: torch.Tensor) -> torch.Tensor:
    """TF32's nearest numbers, in float64."""
    bits = (t.float().view(torch.int32) + 0x1000) & -0x2000
    return bits.view(torch.float32).double()


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention in float64, by head, with every factor rounded to TF32."""
    scores = nearest(q) @ nearest(k).mT * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(future, float("-inf"))
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    return nearest(p) @ nearest(v) / p.sum(-1, keepdim=True)


@pytest.mark.parametrize("head", [64, 256])
def test_attention_in_tf32_rounds_its_factors(head: int) -> None:
    """To the nearest: a tensor core left to itself cuts them off, and errs up to 3.5 times more."""
    length, heads = 96, 2
    q = draw(1, length, heads * head, dtype=torch.float32)
    k, v = (draw(1, heads, length, head, dtype=torch.float32, seed=s) for s in (1, 2))
    by_head = q.view(1, length, heads, head).transpose(1, 2)
    best = attended(by_head, k, v, head**-0.5)
    wide = (t.double() for t in (by_head, k, v))
    truth = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    made = causal_attention(q, k, v, heads, head**-0.5, tf32=True)
    made = made.view(by_head.shape[0], length, heads, head).transpose(1, 2).double()
    error, least = (float((x - truth).abs().mean()) for x in (made, best))
    assert error <= 1.15 * least
    assert error > 1e-6  # it is TF32
