"""Record products of a GPU's tensor core, and hold ``tensor_core_matmul`` to every bit of them.

For an H100 or an H200, from the root of the repository, with torch and Triton::

    PYTHONPATH=src python tests/record_tensor_core.py FOLDER

Operands are drawn from seeds. Products come from a Triton kernel whose only sum is one chain of
``tl.dot`` over k, with a tile that Triton compiles to ``wgmma`` and one that it compiles to
``mma.sync`` (read in the PTX), and from cuBLAS. The share of elements with the model's bits is
printed for each, and so are small probes that the model misses. FOLDER gets ``probes.npz``, the
bits of each probe, and ``tensor_core.npz``, a sample of each product. ``tests/test_tensor_core.py``
reads the arrays from ``tests/data``, where their names end in the GPU's.

With ``TRITON_INTERPRET=1`` the kernel runs on the CPU: that tries the script, and says nothing of
a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import zlib
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

from roundoff.dtypes import dtype_info
from roundoff.reductions.tensor_core import HOPPER, Step, chained, converted

#: Rows and columns of each product, and those of them that are kept.
SIZE, KEPT = 64, (8, 16)
KINDS = ("bfloat16", "float16", "tf32", "float8_e4m3fn", "float8_e5m2")
#: Instruction: rows and columns of the tile, and warps.
TILES = {"wgmma": (64, 64, 4), "mma": (16, 32, 4)}
#: Precision, exponents of the smallest and the largest normal number.
FORMATS = {
    kind: (dtype_info(kind).precision, dtype_info(kind).emin, dtype_info(kind).emax)
    for kind in KINDS
    if kind != "tf32"
} | {"tf32": (11, -126, 127)}
#: Types whose products leave float32's range.
WIDE = ("bfloat16", "tf32")


@triton.jit
def chain(X, W, Y, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
          N: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Y = X W^T in float32, X (M, K) and W (N, K) with K contiguous: one chain over K."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, DEPTH):
        x = tl.load(X + m[:, None] * K + (start + k)[None, :])
        w = tl.load(W + n[None, :] * K + (start + k)[:, None])
        total = tl.dot(x, w, total, input_precision=PRECISION)
    tl.store(Y + m[:, None] * N + n[None, :], total)


def torch_type(kind: str) -> torch.dtype:
    return torch.float32 if kind == "tf32" else getattr(torch, kind)


def by_triton(
    x: np.ndarray, y: np.ndarray, kind: str, instruction: str, device: str
) -> tuple[np.ndarray, str]:
    """The product x y by a kernel of one instruction, and that instruction as PTX spells it."""
    rows, columns, warps = TILES[instruction]
    k = x.shape[1]
    depth = min(k, 64)
    left = torch.from_numpy(x).to(torch_type(kind)).to(device)
    right = torch.from_numpy(np.ascontiguousarray(y.T)).to(torch_type(kind)).to(device)
    out = torch.empty(SIZE, SIZE, dtype=torch.float32, device=device)
    precision = "tf32" if kind == "tf32" else "ieee"
    compiled = chain[(SIZE // rows, SIZE // columns)](
        left, right, out, k, rows, columns, depth, SIZE, precision, num_warps=warps, num_stages=2
    )
    if compiled is None:
        return out.numpy(), "interpreter"
    words = compiled.asm["ptx"].split()
    found = {"wgmma": "wgmma.mma_async.", "mma": "mma.sync."}
    used = sorted({word for word in words if word.startswith(tuple(found.values()))})
    if not used or not all(word.startswith(found[instruction]) for word in used):
        raise RuntimeError(f"{kind}, k = {k}: no {instruction} in the PTX but {used}")
    return out.cpu().numpy(), " ".join(used)


def by_cublas(
    x: np.ndarray, y: np.ndarray, kind: str, fast: bool | None, device: str
) -> np.ndarray:
    """The product x y by cuBLAS, in float32; *fast* is float8's kind of accumulation."""
    left = torch.from_numpy(x).to(torch_type(kind)).to(device)
    right = torch.from_numpy(np.ascontiguousarray(y.T)).to(torch_type(kind)).to(device).T
    if fast is not None:
        one = torch.ones((), device=device)
        out = torch._scaled_mm(left, right, one, one, out_dtype=torch.float32, use_fast_accum=fast)
    elif kind == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
        out = torch.mm(left, right)
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        out = torch.mm(left, right, out_dtype=torch.float32)
    return out.cpu().numpy()


# Operands, as float64


def numbers(rng: np.random.Generator, kind: str, shape: tuple, low: int, high: int) -> np.ndarray:
    """Numbers of a type: any significand and sign, exponents uniform from low to high."""
    precision, emin, _ = FORMATS[kind]
    steps = rng.integers(0, 1 << (precision - 1), shape)
    significands = 1.0 + steps * 2.0 ** (1 - precision)
    exponents = rng.integers(low, high + 1, shape)
    # Below the normal numbers the type has fewer places.
    signed = np.ldexp(significands * rng.choice([-1.0, 1.0], shape), exponents)
    return converted(signed, kind, "truncate") if low < emin else signed


def highest(kind: str) -> int:
    """Largest exponent whose products, 4096 of them, stay below float32's largest number."""
    return {"bfloat16": 56, "tf32": 56, "float8_e4m3fn": 7}.get(kind, FORMATS[kind][2])


def draw(kind: str, data: str, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Operands of a kind of data, shapes (64, k) and (k, 64), from a seed of their own."""
    rng = np.random.default_rng([KINDS.index(kind), DATA.index(data), k])
    precision, emin, _ = FORMATS[kind]
    shapes = (SIZE, k), (k, SIZE)

    def normal() -> tuple[np.ndarray, np.ndarray]:
        x, y = (converted(rng.standard_normal(shape), kind, "nearest") for shape in shapes)
        return x, y

    if data == "normal":
        return normal()
    if data == "positive":
        x, y = normal()
        return np.abs(x), np.abs(y)
    if data == "wide":
        high = highest(kind)
        x, y = (numbers(rng, kind, shape, max(emin, -high), high) for shape in shapes)
        return x, y
    if data == "sparse":
        x = numbers(rng, kind, shapes[0], emin, emin + 6)
        y = numbers(rng, kind, shapes[1], -6, 0)
        x[rng.random(x.shape) < 0.3] = 0.0
        y[rng.random(y.shape) < 0.3] = -0.0
        # Large numbers that meet zeros alone: zeros with an exponent would show.
        alone = rng.permutation(k)[: k // 4]
        x[:, alone] = 0.0
        y[alone] = np.ldexp(1.0, highest(kind))
        return x, y
    if data == "cancelling":
        x, y = normal()
        pairs = rng.permutation(k).reshape(2, k // 2)
        x[:, pairs[1]] = -x[:, pairs[0]]
        y[pairs[1]] = y[pairs[0]]
        changed = pairs[1, : k // 8]
        y[changed] = converted(y[changed] * (1 + 2.0 ** (1 - precision)), kind, "nearest")
        return x, y
    if data == "subnormal":
        # Even rows hold subnormal numbers alone; y is large enough for the sum to be normal.
        x = numbers(rng, kind, shapes[0], emin - precision + 1, emin + 2)
        x[::2] = numbers(rng, kind, x[::2].shape, emin - precision + 1, emin - 1)
        low, high = (10, 36) if kind in WIDE else (emin - precision + 1, highest(kind))
        return x, numbers(rng, kind, shapes[1], low, high)
    if data == "tiny":  # products from 2^-160, sums below 2^-126
        x, y = (numbers(rng, kind, shape, -80, -67) for shape in shapes)
        return x, y
    if data == "full":  # float32 numbers, which TF32 does not hold
        x, y = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        return x.astype(np.float64), y.astype(np.float64)
    raise ValueError(data)


DATA = ("normal", "wide", "positive", "cancelling", "sparse", "subnormal", "tiny", "full")


def data_of(kind: str) -> list[str]:
    out = [data for data in DATA if data not in ("tiny", "full")]
    return out + (["tiny"] if kind in WIDE else []) + (["full"] if kind == "tf32" else [])


def depths(kind: str) -> tuple[int, ...]:
    return (32 if kind.startswith("float8") else 16, 64, 512, 4096)


# Comparison


def equal_bits(got: np.ndarray, expected: np.ndarray) -> float:
    """Share of elements with the same bits; any NaN equals any other."""
    same = got.view(np.uint32) == expected.view(np.uint32)
    return float(np.mean(same | (np.isnan(got) & np.isnan(expected))))


def model(x: np.ndarray, y: np.ndarray, kind: str, source: str) -> np.ndarray:
    """The product as the model has it; what cuBLAS calls is wgmma."""
    instruction = source if source in TILES else "wgmma"
    with np.errstate(all="ignore"):
        x, y = (converted(t, kind, "truncate") for t in (x, y))
        return chained(x, y, kind, HOPPER[kind, instruction], by_mma=instruction == "mma")


# Probes: a question each, in rows and columns of one product


def probes(kind: str, step: Step) -> dict[str, list[tuple[int, float, float]]]:
    """Question -> (place in k, left operand, right operand) of the products that are not 0."""
    precision, emin, emax = FORMATS[kind]
    nan, inf, top = math.nan, math.inf, 2.0**emax
    second = step.block  # the first place of the second step
    largest = (2 - 2.0 ** (1 - precision)) * top if kind != "float8_e4m3fn" else 448.0
    small = emin - 1 + emax - step.fraction  # below a subnormal's product by the fraction
    out = {
        "all products -0": [(k, -0.0, 1.0) for k in range(64)],
        "1 - 1": [(0, 1.0, 1.0), (1, -1.0, 1.0)],
        "-1, then 1": [(0, -1.0, 1.0), (second, 1.0, 1.0)],
        "0 x largest, beside the smallest": [(0, 0.0, largest), (1, 2.0**emin, 2.0**emin)],
        "0 x 1, beside the smallest": [(0, 0.0, 1.0), (1, 2.0**emin, 2.0**emin)],
        "the smallest normal squared": [(0, 2.0**emin, 2.0**emin)],
        "subnormal: small beside it": [
            (0, 2.0 ** (emin - 1), top),
            (1, -(2.0 ** (emin + 1)), top / 4),
            (2, 2.0 ** (small - small // 2), 2.0 ** (small // 2)),
        ],
        "NaN": [(0, nan, 1.0)],
        "NaN x 0": [(0, nan, 0.0)],
    }
    if kind != "float8_e4m3fn":
        out |= {
            "inf": [(0, inf, 1.0)],
            "-inf": [(0, -inf, 1.0)],
            "inf - inf": [(0, inf, 1.0), (1, -inf, 1.0)],
            "inf, then -inf": [(0, inf, 1.0), (second, -inf, 1.0)],
            "inf x 0": [(0, inf, 0.0)],
            "inf x subnormal": [(0, inf, 2.0 ** (emin - 1))],
            "inf + NaN": [(0, inf, 1.0), (1, nan, 1.0)],
        }
    if kind in WIDE:
        out |= {
            "2^128": [(0, 2.0**127, 1.0), (1, 2.0**127, 1.0)],
            "-2^128": [(0, -(2.0**127), 1.0), (1, 2.0**127, 1.0)],
            "a product of 2^200": [(0, 2.0**100, 2.0**100)],
            "products of 2^200 and -2^200": [(0, 2.0**100, 2.0**100), (1, -(2.0**100), 2.0**100)],
            "2^128 and -2^127 in a step": [
                (0, 2.0**127, 1.0),
                (1, 2.0**127, 1.0),
                (2, -(2.0**127), 1.0),
            ],
            "2^128, then -2^127": [
                (0, 2.0**127, 1.0),
                (1, 2.0**127, 1.0),
                (second, -(2.0**127), 1.0),
            ],
            "largest, then half a place": [(0, largest, 1.0), (second, 2.0**102, 1.0)],
            "2^128, then -inf": [
                (0, 2.0**127, 1.0),
                (1, 2.0**127, 1.0),
                (second, -inf, 1.0),
            ],
            "2^-149": [(0, 2.0**-75, 2.0**-74)],
            "1.5 x 2^-149": [(0, 1.5 * 2.0**-75, 2.0**-74)],
            "-1.5 x 2^-149": [(0, -1.5 * 2.0**-75, 2.0**-74)],
            "2^-150": [(0, 2.0**-75, 2.0**-75)],
            "-2^-150": [(0, -(2.0**-75), 2.0**-75)],
            "-2^-150 in the last step": [(63, -(2.0**-75), 2.0**-75)],
            "-2^-160 in the last step": [(63, -(2.0**-80), 2.0**-80)],
            "-2^-160": [(0, -(2.0**-80), 2.0**-80)],
            "-2^-250": [(0, -(2.0**-125), 2.0**-125)],
            "1.75 x 2^-127": [(0, 1.75 * 2.0**-63, 2.0**-64)],
            "2^-149, then 2^-149": [(0, 2.0**-75, 2.0**-74), (second, 2.0**-75, 2.0**-74)],
            "2^-126, then -2^-149": [(0, 2.0**-63, 2.0**-63), (second, -(2.0**-75), 2.0**-74)],
        }
        # The lowest alignment: 8 equal products, the sum of which is 8 times as large.
        for e in range(-161, -148):
            left, right = 2.0 ** (e - e // 2), 2.0 ** (e // 2)
            out[f"8 of 2^{e}"] = [(k, left, right) for k in range(8)]
            out[f"2^-149, then 8 of 2^{e}"] = [(0, 2.0**-75, 2.0**-74)] + [
                (second + k, left, right) for k in range(8)
            ]
    return {
        name: cells
        for name, cells in out.items()
        if all(fits(value, kind) for _, *pair in cells for value in pair)
    }


def fits(value: float, kind: str) -> bool:
    """Whether the type has the number, so that no conversion moves it."""
    if not math.isfinite(value):
        return True
    return float(converted(np.array([value]), kind, "nearest")[0]) == value


def probe_operands(cells: list[list[tuple[int, float, float]]]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.zeros((SIZE, 64)), np.zeros((64, SIZE))
    for row, products in enumerate(cells):
        for k, left, right in products:
            x[row, k], y[k, row] = left, right
    return x, y


def probe(kind: str, instruction: str, device: str) -> dict[str, int]:
    """The bits of each probe by its name; those that the model misses are printed."""
    asked = probes(kind, HOPPER[kind, instruction])
    given = {}
    for first in range(0, len(asked), SIZE):
        some = list(asked)[first : first + SIZE]
        x, y = probe_operands([asked[name] for name in some])
        got, _ = by_triton(x, y, kind, instruction, device)
        made = model(x, y, kind, instruction)
        for i, name in enumerate(some):
            given[f"{kind}/{instruction}/{name}"] = int(got[i, i].view(np.uint32))
            if got[i, i].view(np.uint32) != made[i, i].view(np.uint32):
                print(f"! {kind} {instruction} {name}: {got[i, i]:.7g}, model {made[i, i]:.7g}")
    return given


# The run


def record(device: str) -> dict[tuple[str, str, str, int], np.ndarray]:
    """All products: (type, source, data, k) -> result. A case that fails is reported."""
    results = {}
    sources = [*TILES, "cublas", "cublas fast"]
    for kind, source in itertools.product(KINDS, sources):
        if source == "cublas fast" and not kind.startswith("float8"):
            continue
        if source.startswith("cublas") and (device == "cpu" or kind == "float8_e5m2"):
            continue  # cuBLAS multiplies no e5m2 by e5m2
        for data, k in itertools.product(data_of(kind), depths(kind)):
            x, y = draw(kind, data, k)
            try:
                if source in TILES:
                    got, spelled = by_triton(x, y, kind, source, device)
                else:
                    fast = source == "cublas fast" if kind.startswith("float8") else None
                    got, spelled = by_cublas(x, y, kind, fast, device), "cuBLAS"
            except RuntimeError as error:
                print(f"FAILED {kind} {source} {data} k = {k}: {error}", flush=True)
                continue
            results[kind, source, data, k] = got
            share = equal_bits(got, model(x, y, kind, source))
            print(f"{share:7.2%} {kind} {source} {data} k = {k} ({spelled})", flush=True)
    return results


def save(results: dict, path: Path, about: str) -> None:
    """A sample of each product, beside a checksum of its operands."""
    rows, columns = KEPT
    names, samples, checksums = [], [], []
    for (kind, source, data, k), got in results.items():
        x, y = draw(kind, data, k)
        names.append(f"{kind}/{source}/{data}/{k}")
        samples.append(got[:rows, :columns].view(np.uint32))
        checksums.append(checksum(x[:rows], y[:, :columns]))
    np.savez_compressed(
        path, names=np.array(names), bits=np.array(samples),
        checksums=np.array(checksums, np.uint32), about=np.array(about),
    )  # fmt: skip


def checksum(x: np.ndarray, y: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(y).tobytes(), zlib.crc32(x.tobytes()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the outputs are written")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    gpu = "interpreter" if device == "cpu" else torch.cuda.get_device_name()
    about = f"{gpu}, torch {torch.__version__}, Triton {triton.__version__}, NumPy {np.__version__}"
    print(about)
    save(record(device), folder / "tensor_core.npz", about)
    answers: dict[str, int] = {}
    for kind, instruction in HOPPER:
        answers |= probe(kind, instruction, device)
    np.savez_compressed(
        folder / "probes.npz", names=np.array(list(answers)),
        bits=np.array(list(answers.values()), np.uint32), about=np.array(about),
    )  # fmt: skip


if __name__ == "__main__":
    main()
