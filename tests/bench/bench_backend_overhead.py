"""What a call of the backend costs beyond torch.compile itself, on a tiny model.

``python tests/bench/bench_backend_overhead.py`` prints microseconds a call: of torch.compile with a
backend that computes nothing, of ours, and of the model in eager torch; then what our Python and
the binding of inputs and outputs take in a decode step of a Llama with weights and static cache
bound, the session's run and dynamo's guards left out. The budget is 30 µs for four layers and 80
for 30. With 30 most of it is one call of torch for each address (364 tensors, some 70 ns each) and
for the version of each weight that was packed (150): that part is printed beside it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from roundoff.backend import onnx_custom_backend
from roundoff.backend.compiled import Compiled
from roundoff.timing import measure

BUDGETS_US = {4: 30.0, 30: 80.0}


def nothing(gm: torch.fx.GraphModule, args: list[torch.Tensor]) -> object:
    """A backend that returns the same output at each call."""
    made = gm(*args)
    return lambda *_: made


def alone(model: torch.nn.Module) -> object:
    """The model behind code of its own, so that rivals do not share torch's cache."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    forward.__code__ = forward.__code__.replace(co_name="forward_alone")
    return forward


def step(layers: int, **options: Any) -> tuple[Compiled, list[Any]]:
    """The graph of a decode step over a static cache, and what it was called with."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=96,
        num_hidden_layers=layers,
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    cache = transformers.StaticCache(config=config, max_cache_len=32)
    model(torch.arange(4)[None], past_key_values=cache)
    calls: list[tuple[Compiled, list[Any]]] = []
    call = Compiled.__call__

    def seen(self: Compiled, args: list[Any]) -> list[Any]:
        calls.append((self, list(args)))
        return call(self, args)

    Compiled.__call__ = seen  # type: ignore[method-assign]
    backend = functools.partial(onnx_custom_backend, fallback=False, **options)
    run = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    for _ in range(2):
        run(torch.ones(1, 1, dtype=torch.int64), past_key_values=cache)
    Compiled.__call__ = call  # type: ignore[method-assign]
    return calls[-1]


def processor_us(call: Callable[[], object]) -> float:
    """Processor time of a call, the least of nine loops."""
    times = []
    for _ in range(9):
        start = time.process_time()
        for _ in range(1000):
            call()
        times.append((time.process_time() - start) * 1000)
    return min(times)


def ours(layers: int, **options: Any) -> tuple[float, float]:
    """µs of (a call without the session's run, its look at what may have moved or changed)."""
    graph, args = step(layers, **options)
    variant = graph._variant
    for part in variant.program.steps:
        part._run = lambda: None  # type: ignore[union-attr]
    return (
        processor_us(lambda: graph(list(args))),
        processor_us(lambda: (variant._addresses(args), variant._changed(args, True))),
    )


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Linear(8, 8))
    x = torch.randn(4, 8)
    rivals = {"eager": lambda: model(x)}
    for label, backend in (("nothing", nothing), ("roundoff", onnx_custom_backend)):
        run = torch.compile(alone(model.eval()), backend=backend, fullgraph=True, dynamic=False)
        run(x)
        rivals[label] = lambda run=run: run(x)
    frame = measure(rivals, budget_s=3.0, min_rounds=30).frame.set_index("label")
    print((frame[["median", "low", "high"]] * 1e6).round(2).to_string())
    above = (frame["median"]["roundoff"] - frame["median"]["nothing"]) * 1e6
    print(f"above a backend that does nothing: {above:.1f} µs (budget {BUDGETS_US[4]:.0f})")
    torch._dynamo.reset()
    steps = {layers: ours(layers) for layers in BUDGETS_US}
    for layers, (us, looks) in steps.items():
        print(
            f"our part of a decode step of {layers} layers: {us:.1f} µs of processor time, "
            f"{looks:.1f} of them to see that nothing has moved or changed"
        )
    late = [layers for layers, budget in BUDGETS_US.items() if steps[layers][0] > budget]
    if late or above > BUDGETS_US[4]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
