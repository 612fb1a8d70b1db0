"""What compiling a model adds to memory: over its weights, for the next call, for each size."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roundoff.backend as rb

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


@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
def test_memory_beside_the_weights_on_cuda() -> None:
    """Four layers in float16: what a call takes at its peak, of torch's memory and the device's.

    The handles of cuBLAS and cuDNN that a session has whatever its model are 0.047 of these
    weights, its arena and the rest 0.025: copies, of which 0.244 would be of use, have no room.
    """
    transformers = pytest.importorskip("transformers")

    def llama(width: int, layers: int) -> Any:
        config = transformers.LlamaConfig(
            hidden_size=width,
            num_attention_heads=width // 64,
            intermediate_size=11 * width // 4,
            vocab_size=256,
            num_hidden_layers=layers,
        )
        model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
        return model.to("cuda", torch.float16)

    def call(run: Callable[..., Any]) -> None:
        run(torch.arange(128, device="cuda")[None], use_cache=False, logits_to_keep=1)
        torch.cuda.synchronize()

    backend = functools.partial(rb.onnx_custom_backend, fallback=False)
    small = torch.compile(llama(128, 1), backend=backend)
    call(small)  # libraries and their workspaces
    model = llama(4096, 4)
    call(model)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    run = torch.compile(model, backend=backend)
    call(run)
    call(run)
    taken = torch.cuda.max_memory_allocated() - allocated
    torch.cuda.empty_cache()
    stays = free - torch.cuda.mem_get_info()[0]  # sessions allocate beside torch
    print(f"of the weights: torch's peak {taken / weights:.3f}, device {stays / weights:.3f}")
    assert taken <= 0.3 * weights
    assert stays <= 0.3 * weights
