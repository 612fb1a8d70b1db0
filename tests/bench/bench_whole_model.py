"""A whole trained model, SmolLM2-135M, by eager torch, by inductor and by our backend.

``python tests/bench/bench_whole_model.py`` prints the seconds of the first call (caches cold), the
milliseconds of a prefill of 128 tokens and of one decode step over a static cache of 512 keys, the
largest difference of the logits from eager's, and ratios to inductor, side by side in one run.
``--device cuda --dtype float16`` also has inductor's reduce-overhead mode and our CUDA graphs;
``--dynamic`` compiles for symbolic sizes; ``--batch`` and ``--layers`` say how much.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from roundoff.backend import OptimizationOptions, onnx_custom_backend
from roundoff.models import load_trained
from roundoff.timing import measure

KEYS, TOKENS = 512, 128


def alone(model: Any, label: str) -> Callable[..., Any]:
    """The model behind code of its own, so that rivals do not share torch's cache."""

    def forward(**inputs: Any) -> Any:
        return model(**inputs).logits

    forward.__code__ = forward.__code__.replace(co_name=f"forward_{label.replace(' ', '_')}")
    return forward


def rivals(model: Any, device: str, dynamic: bool) -> dict[str, Callable[..., Any]]:
    """Label -> a forward that compiles at its first call."""
    every = OptimizationOptions("default+onnxruntime+experimental")
    ours = {"roundoff": {}, "roundoff every tier": {"options": every}}
    modes: dict[str, dict[str, Any]] = {"inductor": {}}
    if device == "cuda":
        ours["roundoff graph"] = {"options": every, "cuda_graph": True}
        modes["inductor reduce-overhead"] = {"mode": "reduce-overhead"}
    made = {"eager": alone(model, "eager")}
    for label, more in modes.items():
        made[label] = torch.compile(alone(model, label), dynamic=dynamic, **more)
    for label, more in ours.items():
        backend = functools.partial(onnx_custom_backend, **more)
        made[label] = torch.compile(alone(model, label), backend=backend, dynamic=dynamic)
    return made


def prefill(model: Any, batch: int) -> dict[str, Any]:
    """Inputs of a prefill without a cache."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (batch, TOKENS), generator=generator)
    return {"input_ids": ids.to(model.device), "use_cache": False, "logits_to_keep": 1}


def step(model: Any, batch: int) -> dict[str, Any]:
    """Inputs of one decode step, the cache full but for one key."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=KEYS)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (batch, KEYS - 1), generator=generator)
    model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
    for layer in cache.layers:
        torch._dynamo.mark_static_address(layer.keys)
        torch._dynamo.mark_static_address(layer.values)
    mask = torch.ones(batch, 1, 1, KEYS, dtype=torch.bool, device=model.device)
    return {
        "input_ids": ids[:, :1].to(model.device), "attention_mask": mask,
        "position_ids": torch.full((batch, 1), KEYS - 1, device=model.device),
        "past_key_values": cache, "use_cache": True,
    }  # fmt: skip


def rewound(inputs: dict[str, Any]) -> None:
    """Let the cache write the same place again."""
    cache = inputs.get("past_key_values")
    for layer in cache.layers if cache is not None else ():
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length.fill_(KEYS - 1)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--dynamic", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_trained().model(getattr(torch, args.dtype), device=args.device)
    model.model.layers = model.model.layers[: args.layers]
    model.config.num_hidden_layers = args.layers
    for name, make in (("prefill", prefill), ("decode", step)):
        inputs = make(model, args.batch)
        torch._dynamo.reset()
        wanted = None
        runs: dict[str, Callable[[], Any]] = {}
        for label, forward in rivals(model, args.device, args.dynamic).items():
            rewound(inputs)
            cpu, wall = time.process_time(), time.perf_counter()
            logits = forward(**inputs).clone()
            if args.device == "cuda":
                torch.cuda.synchronize()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            wanted = logits if wanted is None else wanted
            error = float((logits.float() - wanted.float()).abs().max())
            print(f"{name}: {label}: first call {wall:.1f} s ({cpu:.1f} s of CPU), "
                  f"difference from eager {error:.2g}", flush=True)  # fmt: skip

            def run(forward: Callable[..., Any] = forward, inputs: Any = inputs) -> Any:
                rewound(inputs)
                return forward(**inputs)

            runs[label] = run
        frame = measure(runs, budget_s=args.seconds, min_rounds=10).frame.set_index("label")
        shown = (frame[["median", "low", "high"]] * 1e3).round(3)
        shown["of inductor"] = (frame["median"] / frame["median"]["inductor"]).round(3)
        print(f"{name}, milliseconds:\n{shown.to_string()}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        main()
