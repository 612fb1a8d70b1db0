"""The kernels of the experimental tier against float64: on CUDA where it is, else interpreted."""

import pytest
import torch

pytest.importorskip("triton")

from roundoff.kernels.llama import (
    add_rms_norm,
    embed_rms_norm,
    rotary_qkv,
    silu_mul,
)

from .test_invariant import DEVICE, TYPES, draw

# Triton's interpreter cuts bfloat16 off instead of rounding it, and multiplies its bits.
EXACT = TYPES if DEVICE == "cuda" else TYPES[:2]


def near(made, truth, units=1.0):
    """Within *units* roundings of the largest element."""
    allowed = units * torch.finfo(made.dtype).eps * float(truth.abs().max())
    assert float((made.double() - truth).abs().max()) <= allowed


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("n", [1, 24, 1030])
def test_silu_mul(dtype, n):
    packed = draw(2, 3, 2 * n, dtype=dtype)
    gate, up = packed.double().chunk(2, -1)
    near(silu_mul(packed), torch.nn.functional.silu(gate) * up, 2)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "groups", "head"), [(4, 4, 16), (4, 2, 12), (3, 1, 2)])
def test_rotary(dtype, heads, groups, head):
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


def normed(x, weight, epsilon):
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("n", [1, 40, 1024])
@pytest.mark.parametrize("keep", [True, False])
def test_add_rms_norm(dtype, n, keep):
    x, residual = (draw(3, 2, n, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = draw(n, dtype=dtype, seed=2)
    out, total = add_rms_norm(x, residual, weight, 1e-5, keep)
    summed = (x.float() + residual.float()).to(dtype)
    near(out, normed(summed, weight, 1e-5), 3)
    assert not keep or torch.equal(total, summed)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_embed_rms_norm(dtype):
    table, weight = draw(7, 24, dtype=dtype), draw(24, dtype=dtype, seed=1)
    ids = torch.tensor([[0, 6, -1], [3, 99, 2]], device=DEVICE)  # one from the end, one outside
    out, embedded = embed_rms_norm(table, ids, weight, 1e-6)
    rows = table[torch.tensor([[0, 6, 6], [3, 0, 2]], device=DEVICE)]
    for made in out, embedded:
        assert made[1, 1].isnan().all()
        made[1, 1] = rows[1, 1]
    assert torch.equal(embedded, rows)
    exact = normed(rows, weight, 1e-6)
    exact[1, 1] = rows[1, 1].double()
    near(out, exact, 3)
