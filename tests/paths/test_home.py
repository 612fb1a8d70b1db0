"""What the home page says of ``torch.compile`` without this library."""

import pytest
import torch


def chain(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Operators that inductor puts into one kernel."""
    y = torch.nn.functional.gelu(x * scale + shift)
    return y * torch.sigmoid(shift) - x


@pytest.mark.slow(reason="inductor compiles four programs")
def test_inductor_is_nearer_and_rounds_where_eager_does_when_told() -> None:
    inputs = [torch.randn(300, 257, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    inputs = [tensor.bfloat16() for tensor in inputs]
    eager, truth = chain(*inputs), chain(*(tensor.double() for tensor in inputs))
    torch._dynamo.reset()
    compiled = torch.compile(chain)(*inputs)
    assert not torch.equal(compiled, eager)
    assert (compiled - truth).square().mean() < 0.6 * (eager - truth).square().mean()
    torch._dynamo.reset()
    assert torch.equal(torch.compile(chain, backend="aot_eager")(*inputs), eager)
    torch._dynamo.reset()
    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert torch.equal(torch.compile(chain)(*inputs), eager)
    torch._dynamo.reset()
