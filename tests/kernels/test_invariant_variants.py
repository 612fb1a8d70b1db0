"""How many kernels are compiled: none anew for another length of a text, cache or batch.

A process of its own asks for kernels as a GPU would, and notes what Triton would compile.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from roundoff.kernels._runtime import ceil_div, power_of_2

#: Prints the kernels that each part asks for, and the pointers of which the compiler would not
#: learn that they are aligned.
COUNTED = """
import json, sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit
from roundoff.kernels import invariant_attention as attention, invariant_matmul as products


class Hopper:  # all that Triton asks of a driver before it compiles
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


def note(self, key, signature, device, constexprs, options, attrs, warmup):
    asked.add((self.fn.__name__, key))
    for place, (name, kind) in enumerate(signature.items()):
        if kind.startswith("*") and (place,) not in attrs:
            unaligned.add(f"{self.fn.__name__}: {name}")


driver.set_active(Hopper())
jit.JITFunction._do_compile = note
attention.multiprocessors = products.multiprocessors = lambda index: 132
empty = torch.empty


def attend(queries, keys, batch=1, dtype=torch.bfloat16, start=None, offset=0):
    rows = empty(batch, 8, 400, 64, dtype=dtype)
    q, k, v = rows[:, :, offset : offset + queries], rows[:, :2, :keys], rows[:, 2:4, :keys]
    seen = attention.seen_by_position(batch, queries, keys, q.device, True, start)
    attention._by_kernel(q, k, v, seen, 0.125, False)


def by_token(dtype):
    for keys in range(1, 301):
        attend(1, keys, dtype=dtype, offset=keys - 1)


def by_chunks():
    for size in (64, 63, 17):
        for end in range(size, 301, size):
            attend(size, end, offset=end - size)
        attend(300 % size, 300)


def behind_padding():
    for keys in (300, 301, 320, 337):
        attend(300, keys, start=torch.tensor([keys - 300]))


def in_batches():
    for batch in (1, 2, 8, 16, 33):
        for keys in (33, 200, 300, 384):
            attend(1, keys, batch)


def by_mask():
    for queries, keys in ((1, 1), (1, 33), (1, 300), (300, 300), (64, 320), (16, 77)):
        attention._ranges_by_kernel(empty(2, queries, keys, dtype=torch.bool))


def rows_of_a_product(n, k):
    x, weight = empty(300, k, dtype=torch.bfloat16), empty(n, k, dtype=torch.bfloat16)
    for m in range(1, 301):
        tiles.add(products.tile_for(products._upward(m), n, k, 2, 132))
        products._by_kernel(x[None, :m], weight[None], None, False)


parts = {}
for name, call in {
    "token by token": lambda: by_token(torch.bfloat16),
    "token by token, float32": lambda: by_token(torch.float32),
    "chunks": by_chunks, "padding": behind_padding, "batches": in_batches, "masks": by_mask,
    "product": lambda: rows_of_a_product(1536, 576),
    "product of odd sizes": lambda: rows_of_a_product(1537, 577),
}.items():
    asked, unaligned, tiles = set(), set(), set()
    call()
    names = sorted(name for name, _ in asked)
    parts[name] = {"names": names, "unaligned": sorted(unaligned), "tiles": len(tiles)}
print(json.dumps(parts))
"""


SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.fixture(scope="module")
def parts():
    done = subprocess.run(
        [sys.executable, "-c", COUNTED], env=os.environ | {"TRITON_INTERPRET": "0",
         "PYTHONPATH": SOURCE}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_a_kernel_serves_every_length(parts):
    asked = {name: part["names"] for name, part in parts.items() if not part["tiles"]}
    assert asked == {
        # Splits of keys together and apart, in the same kernel.
        "token by token": ["attend", "merge"], "token by token, float32": ["attend", "merge"],
        "chunks": ["attend", "merge"], "padding": ["attend", "merge"],
        "batches": ["attend", "merge"], "masks": ["ranges"],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["product", "product of odd sizes"])
def test_a_product_is_compiled_once_a_tile(parts, name):
    assert parts[name]["names"] == ["product"] * parts[name]["tiles"]


def test_sizes_are_rounded_up_as_triton_does():
    for n in (*range(1, 70), 127, 128, 129, 2**31 - 1):
        assert power_of_2(n) == triton.next_power_of_2(n)
        assert [ceil_div(n, d) for d in (1, 2, 63)] == [triton.cdiv(n, d) for d in (1, 2, 63)]


def test_the_compiler_knows_that_pointers_are_aligned(parts):
    """Where it does not, a thread loads four bytes at a time, not sixteen."""
    assert not [name for part in parts.values() for name in part["unaligned"]]
