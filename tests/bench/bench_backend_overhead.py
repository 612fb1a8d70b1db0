"""What a call of the backend costs beyond torch.compile itself, on a tiny model.

``python tests/bench/bench_backend_overhead.py`` prints microseconds a call: of torch.compile with a
backend that computes nothing, of ours, and of the model in eager torch. The budget is 30 µs.
"""

import torch

from roundoff.backend import onnx_custom_backend
from roundoff.timing import measure

BUDGET_US = 30.0


def nothing(gm: torch.fx.GraphModule, args: list[torch.Tensor]) -> object:
    """A backend that returns the same output at each call."""
    made = gm(*args)
    return lambda *_: made


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Linear(8, 8))
    x = torch.randn(4, 8)
    ours = torch.compile(lambda x: model(x), backend=onnx_custom_backend, dynamic=False)
    none = torch.compile(lambda x: model(x), backend=nothing, dynamic=False)
    rivals = {"eager": lambda: model(x), "nothing": lambda: none(x), "roundoff": lambda: ours(x)}
    frame = measure(rivals, budget_s=3.0, min_rounds=30).frame.set_index("label")
    print((frame[["median", "low", "high"]] * 1e6).round(2).to_string())
    above = (frame["median"]["roundoff"] - frame["median"]["nothing"]) * 1e6
    print(f"above a backend that does nothing: {above:.1f} µs (budget {BUDGET_US:.0f})")
    if above > BUDGET_US:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
