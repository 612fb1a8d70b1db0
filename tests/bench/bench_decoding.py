"""A decode step of SmolLM2 with CUDA graphs: ours beside torch.compile(mode="reduce-overhead").

Ways: ``inductor``; ``roundoff`` as it comes; the same with ``cuDNN's attention``, not ONNX
Runtime's unfused one; and as ours was ``before``: opset 20, no rule PackedRotary, the attention
that ONNX Runtime chooses. Parts, done for one batch after the other, each a list of rows in
``OUT/decoding.json``:

- ``race``: times of a step over inductor's, rivals interleaved, twice: do the numbers hold? A step
  ends with a launch that sets the caches' lengths back.
- ``launches``: kernels of a step by name, and how many there are for each layer.
- ``host``: our Python before and after the replay; and what the addresses of 364 tensors take to
  compare, one by one and in torch's C++. With the first batch alone.

Each way's tokens are compared with eager torch's. A way that fails prints its traceback and the
next one begins; the exit status is 1 then, and where a token differs. What there is no time for
within ``--seconds`` is named. Run ``python tests/bench/bench_decoding.py all --out results``;
``--dry`` runs every line on a CPU with tiny sizes, what is fused for CUDA.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import StaticCache

from roundoff.backend import OptimizationOptions, onnx_custom_backend
from roundoff.environment import environment
from roundoff.models import PASSAGES, load_trained
from roundoff.timing import measure

#: Name -> what our backend is told; None is torch's own.
WAYS: dict[str, dict[str, Any] | None] = {
    "inductor": None,
    "roundoff": {},
    "cuDNN's attention": {"providers": [("CUDAExecutionProvider", {"sdpa_kernel": "8"})]},
    "before": {
        "target_opset": 20,
        "options": OptimizationOptions(leave=("PackedRotary",)),
        "providers": ["CUDAExecutionProvider"],
    },
}
#: Those whose launches are shown, the most telling first.
SHOWN = ("roundoff", "inductor")
PARTS = ("race", "launches", "host")
START = time.monotonic()


def say(*what: object) -> None:
    """A line with the seconds since the start."""
    print(f"[{time.monotonic() - START:6.1f} s]", *what, flush=True)


class Bench:
    """What all parts share: the model, the compiled steps of a batch, and the rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.dry, self.seconds, self.layers = options.dry, options.seconds, options.layers
        self.device, dtype = ("cpu", torch.float32) if self.dry else ("cuda", torch.float16)
        trained = load_trained(layers=options.layers)
        self.model: Any = trained.model(dtype, device=self.device)
        tokens = trained.tokenizer(" ".join(PASSAGES), return_tensors="pt")["input_ids"]
        self.text = tokens[:, : options.keys].to(self.device)
        self.rows: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
        self.failed: list[str] = []

    def left(self) -> float:
        return self.seconds - (time.monotonic() - START)

    def begin(self, batch: int) -> None:
        """The last token against a cache that it fills, and what eager torch makes of it."""
        self.batch, self.steps, self.graphs = batch, {}, {}
        keys = self.text.shape[1]
        make = partial(StaticCache, config=self.model.config, max_cache_len=keys)
        cache, one = make(), make()
        self.model(self.text[:, :-1], past_key_values=one, logits_to_keep=1)
        self.model(self.text[:, :1].repeat(batch, 1), past_key_values=cache)
        for layer, known in zip(cache.layers, one.layers, strict=True):
            layer.keys.copy_(known.keys)
            layer.values.copy_(known.values)
            layer.cumulative_length.fill_(keys - 1)
        self.lengths = [layer.cumulative_length for layer in cache.layers]
        seen = torch.ones(batch, 1, 1, keys, dtype=torch.bool, device=self.device)
        self.inputs = {
            "input_ids": self.text[:, -1:].repeat(batch, 1), "attention_mask": seen,
            "position_ids": torch.full((batch, 1), keys - 1, device=self.device),
            "past_key_values": cache,
        }  # fmt: skip
        self.eager = self.repeated(self.model, 1).logits.float()

    def repeated(self, run: Callable[..., Any], times: int) -> Any:
        """So many steps at the same place of the cache; what the last one returns."""
        for _ in range(times):
            made = run(**self.inputs)
            torch._foreach_sub_(self.lengths, 1)
        return made

    def step(self, way: str) -> Callable[[int], torch.Tensor] | None:
        """The way, compiled once and its tokens compared; None where it fails or is too late."""
        if way not in self.steps:
            self.steps[way] = None
            if self.left() < (6 if WAYS[way] is not None else 20):  # which compiling takes
                say(f"batch {self.batch}, {way}: left out, time is up")
                return None
            try:
                self.steps[way] = self._compiled(way)
            except Exception:  # whatever it is, the other ways run
                traceback.print_exc(limit=-4)
                self.failed.append(f"{way} of batch {self.batch}")
        return self.steps[way]

    def _compiled(self, way: str) -> Callable[[int], torch.Tensor]:
        def forward(**inputs: Any) -> torch.Tensor:
            return self.model(**inputs).logits

        # Code of its own: rivals do not share dynamo's cache.
        name = f"forward_{self.batch}_{list(WAYS).index(way)}"
        forward.__code__ = forward.__code__.replace(co_name=name)
        stored: dict[str, Any] = {}
        more: dict[str, Any] = {"mode": "reduce-overhead"}
        if (ours := WAYS[way]) is not None:
            if self.dry:
                options = ours.get("options", OptimizationOptions())
                as_on_cuda = dataclasses.replace(options, processor="CUDA")
                ours = ours | {"providers": None, "options": as_on_cuda}
            more["backend"] = partial(onnx_custom_backend, storage=stored, **ours)
        run = torch.compile(forward, dynamic=False, fullgraph=True, **more)
        begin = time.monotonic()
        self.repeated(run, 1)
        what = f"first call {time.monotonic() - begin:.1f} s"
        if ours is not None:
            (graph,) = stored["instance"]
            self.graphs[way] = graph
            counts = graph.report.counts()
            done = [f"{rule} {counts.get(rule, 0)}" for rule in ("PackedRotary", "SpreadLengths")]
            opset = {d.domain: d.version for d in graph.model.opset_import}[""]
            what += f", opset {opset}, {len(graph.model.graph.node)} nodes, {', '.join(done)}"
        logits = self.repeated(run, 3).float()  # recorded, then replayed
        equal = torch.equal(logits.argmax(-1), self.eager.argmax(-1))
        if not equal:
            self.failed.append(f"tokens of {way} of batch {self.batch}")
        say(f"batch {self.batch}, {way}: tokens {'equal' if equal else 'OTHER'}, logits off by "
            f"{float((logits - self.eager).abs().max()):.3g}; {what}")  # fmt: skip
        return partial(self.repeated, run)


def race(bench: Bench) -> None:
    """All ways, over inductor's time."""
    steps = {way: step for way in WAYS if (step := bench.step(way)) is not None}
    if "inductor" not in steps:
        return
    calls = {way: partial(step, 5) for way, step in steps.items()}
    for turn in (1, 2):
        budget = 0.1 if bench.dry else min(1.5, max(bench.left(), 0.3))
        times = measure(calls, device=bench.device, budget_s=budget, warmup=1, seed=turn,
                        min_rounds=2 if bench.dry else 5)  # fmt: skip
        for way, median in zip(times.frame["label"], times.frame["median"], strict=True):
            ratio, us = times.ratio(way, "inductor"), median / 5 * 1e6
            row = {"batch": bench.batch, "way": way, "turn": turn, "us": us,
                   "ratio": ratio.value, "low": ratio.low, "high": ratio.high}  # fmt: skip
            bench.rows["race"].append(row)
            say(f"batch {bench.batch}, {way:17} {us:8.1f} us a step, {ratio.value:.3f} of "
                f"inductor's [{ratio.low:.3f}, {ratio.high:.3f}]")  # fmt: skip


def launches(bench: Bench) -> None:
    """Kernels of a step: how often each is launched, and its time."""
    for way in SHOWN:
        step = bench.step(way)
        if step is None or bench.left() < 3:
            continue
        step(2)
        seen: dict[str, list[float]] = collections.defaultdict(list)
        activity = ProfilerActivity.CPU if bench.dry else ProfilerActivity.CUDA
        with profile(activities=[activity]) as recorded:
            step(3)
            if not bench.dry:
                torch.cuda.synchronize()
        for event in recorded.events() or ():
            on_device = bench.dry or str(event.device_type).endswith("CUDA")
            if on_device and not getattr(event, "is_user_annotation", False):
                seen[event.name].append(event.time_range.elapsed_us())
        count, us = sum(map(len, seen.values())) / 3, sum(map(sum, seen.values())) / 3
        say(f"batch {bench.batch}, {way}: {count:.1f} launches a step, {us:.0f} us of kernels; "
            f"{count / bench.layers:.1f} launches a layer")  # fmt: skip
        ordered = sorted(seen.items(), key=lambda item: -sum(item[1]))
        rows = [{"batch": bench.batch, "way": way, "kernel": name, "launches": len(took) / 3,
                 "us": sum(took) / len(took)} for name, took in ordered]  # fmt: skip
        bench.rows["launches"].extend(rows)
        for row in rows[:24]:
            print(f"  {row['launches']:6.1f} x {row['us']:7.2f} us  {row['kernel'][:90]}")


def report(bench: Bench, piece: str, call: Callable[[], object]) -> None:
    """Microseconds of a call on the host, the least of nine loops."""
    times, loops = 3 if bench.dry else 200, []
    for _ in range(9):
        begin = time.perf_counter()
        for _ in range(times):
            call()
        loops.append((time.perf_counter() - begin) / times * 1e6)
    bench.rows["host"].append({"piece": piece, "us": min(loops)})
    say(f"{piece}: {min(loops):.1f} us")


def host(bench: Bench) -> None:
    """Our part of a call on the host: the compiled graph without what runs it."""
    tensors = [torch.zeros(4, 4) for _ in range(364)]
    known, places = [t.data_ptr() for t in tensors], list(range(364))
    report(bench, "364 addresses, one by one",
           lambda: list(map(torch.Tensor.data_ptr, tensors)) == known)  # fmt: skip
    if compare := getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None):
        report(bench, "364 addresses, in C++", lambda: compare(tensors, known, places))
    if bench.step("roundoff") is None:
        return
    graph = bench.graphs["roundoff"]
    args = graph.inputs  # of its first call: the model's own tensors, where they still lie
    variant: Any = graph._variant
    program = variant._cuda_graph or variant.program
    run, made = program.run, []
    with (
        patch.object(variant, "_write_back", lambda *_: None),
        patch.object(variant, "_raise", lambda *_: None),
        patch.object(program, "run", lambda *given: made.append(run(*given)) or made[-1]),
    ):
        graph(list(args))
        program.run = lambda *_: made[-1]
        report(bench, f"our Python around the replay, {len(args)} inputs",
               lambda: graph(list(args)))  # fmt: skip


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=(*PARTS, "all"))
    parser.add_argument("--out", type=Path, default=Path("build/decoding"))
    parser.add_argument("--layers", type=int, default=12, help="of 30")
    parser.add_argument("--keys", type=int, default=512, help="length of the cache")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=1e9, help="after which the rest is left")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU")
    if len(sys.argv) == 1:  # as `make bench` runs it
        print("nothing runs unless it is asked for:", parser.format_usage())
        return 0
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry runs without one")
    if options.dry:
        options.layers, options.keys, options.batches = 1, 16, options.batches[:1]
    options.out.mkdir(parents=True, exist_ok=True)
    bench, known = Bench(options), environment()
    chosen = PARTS if "all" in options.parts else options.parts
    for batch in options.batches:
        bench.begin(batch)
        for part in (race, launches, host):
            if part.__name__ not in chosen or (part is host and batch != options.batches[0]):
                continue
            say(f"== {part.__name__} of batch {batch}")
            try:
                part(bench)
            except Exception:  # whatever it is, the other parts run
                traceback.print_exc()
                bench.failed.append(f"{part.__name__} of batch {batch}")
            text = json.dumps({"environment": known, **bench.rows}, default=str, indent=1)
            (options.out / "decoding.json").write_text(text)  # so far, should time run out
    say(f"failed: {'; '.join(bench.failed) or 'nothing'}")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
