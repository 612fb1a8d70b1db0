"""The bound of a LayerNorm holds where a tolerance of the product after it does not."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.compare import layer_norm_bound, tolerance, tolerance_used
from roundoff.models import layer_norm_matmul
from roundoff.ort import session

norm = torch.nn.functional.layer_norm


def rows(n: int, offset: float, seed: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, n, generator=generator) * spread + offset


@given(
    st.integers(1, 2000),
    st.sampled_from([0.0, 0.1, -3.0, 100.0, -1e4, 1e6]),
    st.sampled_from([1e-6, 1.0, 1e3]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.integers(0, 2**20),
)
@settings(max_examples=120, deadline=None)
def test_torch_keeps_within(
    n: int, offset: float, spread: float, dtype: torch.dtype, seed: int
) -> None:
    x = rows(n, offset, seed, spread).clamp(-6e4, 6e4).to(dtype)
    scale, bias = (rows(n, 0.5, seed + k)[0].to(dtype) for k in (1, 2))
    exact = norm(x.double(), (n,), scale.double(), bias.double())
    error = (norm(x, (n,), scale, bias).double() - exact).abs()
    assert bool((error <= layer_norm_bound(x, scale, bias)).all())
    plain = (norm(x, (n,)).double() - norm(x.double(), (n,))).abs()
    assert bool((plain <= layer_norm_bound(x)).all())


def plain(x: np.ndarray, how: str) -> np.ndarray:
    """A LayerNorm in float32 that adds one number after the other."""

    def total(values: np.ndarray) -> np.ndarray:
        return np.cumsum(values, axis=-1, dtype=np.float32)[..., -1:]

    n = np.float32(x.shape[-1])
    mean = total(x) / n
    if how == "two-pass":
        variance = total((x - mean) ** 2) / n
    else:
        mean, squares = x[..., :1] * 0, x[..., :1] * 0
        for k in range(x.shape[-1]):
            step = x[..., k : k + 1] - mean
            mean = mean + step / np.float32(k + 1)
            squares = squares + step * (x[..., k : k + 1] - mean)
        variance = squares / n
    return (x - mean) / np.sqrt(variance + np.float32(1e-5))


@pytest.mark.parametrize("how", ["two-pass", "updating"])
@pytest.mark.parametrize("offset", [0.0, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("n", [3, 64, 700])
def test_each_way_to_the_variance_keeps_within(how: str, offset: float, n: int) -> None:
    x = rows(n, offset, n).abs()  # one sign: errors of a sum add up
    exact = norm(x.double(), (n,)).numpy()
    error = np.abs(plain(x.numpy(), how) - exact)
    assert (error <= layer_norm_bound(x).numpy()).all()


def test_what_follows_the_norm_is_within_both_bounds_together() -> None:
    """X + 10⁴ breaks the tolerance of the product alone; with the norm's own error it holds."""
    x = rows(64, 1e4, 1)
    generator = torch.Generator().manual_seed(2)
    w = torch.randn(64, 64, generator=generator) / 8
    ones, zeros = torch.ones(64), torch.zeros(64)
    feeds = {"X": x[None], "scale": ones, "bias": zeros, "weights": w, "bias2": zeros}
    normed = norm(x.double(), (64,))
    exact = normed @ w.double()
    results = norm(x, (64,)) @ w, session(layer_norm_matmul()).run(feeds)[0][0]
    size = normed.abs() @ w.double().abs()
    tol = tolerance("float32", 64)
    assert tolerance_used(*results, size, tol) > 10
    error = layer_norm_bound(x)
    bound = error @ w.double().abs() + tol * ((normed.abs() + error) @ w.double().abs())
    assert 0.001 < tolerance_used(*results, bound, 1.0) <= 1
    for result in results:
        assert 2 * tolerance_used(exact, result, bound, 1.0) <= 1
