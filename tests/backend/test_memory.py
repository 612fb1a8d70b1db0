"""What compiling a model adds to memory: over its weights, for the next call, for each size."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("transformers")

# Imports, dynamo and the session of a small model are there before it is measured.
BEGIN = """
import gc
from pathlib import Path
import torch, transformers
from roundoff.backend import onnx_custom_backend

def kilobytes(field):
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])

def llama(width, layers):
    config = transformers.LlamaConfig(
        hidden_size=width, num_attention_heads=width // 64, intermediate_size=3 * width,
        vocab_size=256, num_hidden_layers=layers)
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)

@torch.no_grad()
def call(run, rows=1):
    ids = torch.arange(128).repeat(rows, 1)
    return run(ids, use_cache=False, logits_to_keep=1).logits

torch.set_num_threads(1)
call(torch.compile(llama(64, 1), backend=onnx_custom_backend))
"""
WEIGHTS = """
model = llama(1024, 4)
call(model)
weights = sum(p.numel() * p.element_size() for p in model.parameters())
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = kilobytes("VmRSS")
run = torch.compile(model, backend=onnx_custom_backend)
call(run), call(run)
print((kilobytes("VmHWM") - before) * 1024 / weights)
"""
SIZES = """
import random
model = llama(64, 8)
run = torch.compile(model, backend=onnx_custom_backend, dynamic=True)

@torch.no_grad()
def at(batch, length):
    run(torch.arange(length).repeat(batch, 1), use_cache=False)

at(8, 128)  # the largest: arenas grow now
sizes = [(b, n) for b in range(2, 9) for n in range(2, 128)]
random.Random(0).shuffle(sizes)
for i, size in enumerate(sizes):
    at(*size)
    if i == 100:
        before = kilobytes("VmRSS")
print((kilobytes("VmRSS") - before) / 1024)
"""


def printed(script: str) -> float:
    command = [sys.executable, "-c", BEGIN + script]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(made.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow(reason="a model of 200 MB in a process of its own, 15 s")
def test_weights_are_not_kept_twice() -> None:
    assert printed(WEIGHTS) <= 0.3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow(reason="dynamo traces eight layers for symbolic sizes, 25 s")
def test_new_sizes_take_no_memory() -> None:
    """Megabytes: what ONNX Runtime would keep for each size is 2 kB a layer."""
    assert printed(SIZES) < 4
