"""What the home page says of ``torch.compile`` without this library."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("fresh")


def chain(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Operators that inductor puts into one kernel."""
    y = torch.nn.functional.gelu(x * scale + shift)
    return y * torch.sigmoid(shift) - x


@pytest.mark.slow(reason="inductor compiles two programs")
def test_inductor_is_nearer_and_rounds_where_eager_does_when_told() -> None:
    inputs = torch.randn(3, 300, 257, generator=torch.Generator().manual_seed(0)).bfloat16()
    eager, truth = chain(*inputs), chain(*inputs.double())
    compiled = torch.compile(chain)(*inputs)
    assert (compiled - truth).square().mean() < 0.6 * (eager - truth).square().mean()
    torch.compiler.reset()
    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert torch.equal(torch.compile(chain)(*inputs), eager)
