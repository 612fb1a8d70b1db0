"""The simulated tensor core: against rational arithmetic, and what GPUs gave."""

import dataclasses
import zlib
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.dtypes import dtype_info
from roundoff.errors import ArgumentError, DtypeError
from roundoff.reductions import tensor_core_matmul

ONES = np.ones((2, 3), np.float32)
seeds = st.integers(0, 2**32 - 1)
TYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "tf32": np.float32,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
#: What the types hold.
FORMATS = {kind: dtype_info(dtype) for kind, dtype in TYPES.items()}
FORMATS["tf32"] = dataclasses.replace(FORMATS["tf32"], precision=11)


def operands(m: int, k: int, n: int, seed: int, dtype: type = np.float16) -> tuple:
    rng = np.random.default_rng(seed)
    spread = 2.0 ** rng.integers(-6, 7, (m, k))
    return (
        (rng.standard_normal((m, k)) * spread).astype(dtype),
        rng.standard_normal((k, n)).astype(dtype),
    )


def exponent(value: Fraction) -> int:
    value = abs(value)
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if Fraction(2) ** e <= value else e - 1


def cut(value: Fraction, place: Fraction) -> Fraction:
    return int(value / place) * place  # int() cuts towards zero


def described(a: list[float], b: list[float], block: int, bits: int) -> float:
    """One element by a step of so many products and bits, in rational arithmetic."""
    total = Fraction(0)
    for k in range(0, len(a), block):
        pairs = zip(a[k : k + block], b[k : k + block], strict=True)
        addends = [total, *(Fraction(x) * Fraction(y) for x, y in pairs)]
        largest = max(map(abs, addends))
        if largest:
            place = Fraction(2) ** (exponent(largest) + 1 - bits)
            total = sum((cut(v, place) for v in addends), Fraction(0))
        if total:
            total = cut(total, Fraction(2) ** (exponent(total) - 23))
    return float(total)


@given(st.integers(1, 40), st.sampled_from([1, 4, 8, 16]), st.sampled_from([14, 24, 26]), seeds)
@settings(max_examples=60, deadline=None)
def test_a_described_step_in_rational_arithmetic(k: int, block: int, bits: int, seed: int) -> None:
    a, b = operands(1, k, 1, seed)
    got = tensor_core_matmul(a, b, block=block, bits=bits)
    assert float(got[0, 0]) == described(a[0].tolist(), b[:, 0].tolist(), block, bits)


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"block": 8}, [1, 0, 2, -1]), ({}, [0, 0, 1, 0])],
    ids=["to the nearest", "cut off"],
)
def test_tf32_keeps_11_bits(options: dict, steps: list[int]) -> None:
    x = np.float32([[1 + 2**-11 + 2**-20], [1 + 2**-11], [1 + 3 * 2**-11], [-1 - 2**-11 - 2**-20]])
    kept = tensor_core_matmul(x, np.ones((1, 1), np.float32), **options)
    assert ((kept - np.sign(x)) * 2**10).ravel().tolist() == steps


def test_kinds_of_input() -> None:
    a, b = operands(3, 20, 4, 5, np.float32)
    tensor = tensor_core_matmul(torch.from_numpy(a), torch.from_numpy(b))
    assert isinstance(tensor, torch.Tensor)
    assert (tensor.numpy() == tensor_core_matmul(a, b)).all()
    assert tensor_core_matmul(a[:, :0], b[:0]).tolist() == np.zeros((3, 4)).tolist()
    assert tensor_core_matmul(a[:0], b).shape == (0, 4)
    special = np.float32([[np.inf, 1], [3e38, 3e38], [np.nan, 1], [np.inf, -np.inf]])
    found = tensor_core_matmul(special, np.ones((2, 1), np.float32))
    np.testing.assert_array_equal(found[:, 0], [np.inf, np.inf, np.nan, np.nan])


@pytest.mark.parametrize(
    ("a", "gpu", "error"),
    [(ONES, "A100", ArgumentError), (ONES.astype(np.float64), None, DtypeError)],
)
def test_what_no_gpu_does_is_refused(a: np.ndarray, gpu: str | None, error: type) -> None:
    with pytest.raises(error):
        tensor_core_matmul(a, ONES.T, gpu)


# --- what GPUs gave ------------------------------------------------------------------------------
#
# Products of 64 x 64, of which 8 x 16 elements are kept, on an H100 and an H200, with torch 2.11
# and Triton 3.6, 2026-11-25. Each of these is claimed, bit for bit:
#   wgmma by Triton: five types; K 16 (32 for float8), 64, 512, 4096; the data below;
#   cuBLAS where it does not split K: bfloat16 and float16 to K = 512, float8_e4m3fn to K = 64,
#     and float8_e4m3fn with fast accumulation for every K.
# Not claimed: cuBLAS where it splits K and adds the parts in float32. That is 16-bit types at
# K = 4096, TF32 for every K, and float8_e4m3fn without fast accumulation above 128. The split
# belongs to a version of the library, not to the GPU.
RECORDED = [Path(__file__).parent / "data" / f"tensor_core_{gpu}.npz" for gpu in ("h100", "h200")]
#: Largest K for which a source was one chain at 64 x 64.
CHAINS = {(kind, "wgmma"): 4096 for kind in TYPES} | {
    ("bfloat16", "cublas"): 512,
    ("float16", "cublas"): 512,
    ("float8_e4m3fn", "cublas"): 64,
    ("float8_e4m3fn", "cublas fast"): 4096,
}
#: Their places are parts of the seeds.
DATA = ("normal", "wide", "positive", "cancelling", "sparse", "subnormal", "tiny", "full")
#: Largest exponent whose products, 4096 of them, stay below float32's largest number.
HIGHEST = {"bfloat16": 56, "tf32": 56, "float8_e4m3fn": 7, "float16": 15, "float8_e5m2": 15}


def numbers(rng: np.random.Generator, kind: str, shape: tuple, low: int, high: int) -> np.ndarray:
    """Numbers of a type: any significand and sign, exponents uniform from low to high."""
    precision, emin = FORMATS[kind].precision, FORMATS[kind].emin
    steps = rng.integers(0, 1 << (precision - 1), shape)
    significands = 1.0 + steps * 2.0 ** (1 - precision)
    exponents = rng.integers(low, high + 1, shape)
    # Below the normal numbers the type has fewer places.
    signed = np.ldexp(significands * rng.choice([-1.0, 1.0], shape), exponents)
    return converted(signed, kind, "truncate") if low < emin else signed


def converted(x: np.ndarray, kind: str, how: str) -> np.ndarray:
    """Numbers of a type: the nearest, ties to even, or cut towards zero."""
    precision = FORMATS[kind].precision
    last = np.maximum(np.frexp(x)[1], FORMATS[kind].emin + 1) - precision
    steps = np.ldexp(x, -last)
    return np.ldexp(np.rint(steps) if how == "nearest" else np.trunc(steps), last)


def draw(kind: str, data: str, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Operands as they were recorded, float64, shapes (64, k) and (k, 64)."""
    rng = np.random.default_rng([list(TYPES).index(kind), DATA.index(data), k])
    precision, emin = FORMATS[kind].precision, FORMATS[kind].emin
    shapes = (64, k), (k, 64)
    if data in ("normal", "positive", "cancelling"):
        x, y = (converted(rng.standard_normal(shape), kind, "nearest") for shape in shapes)
    elif data == "wide":
        high = HIGHEST[kind]
        x, y = (numbers(rng, kind, shape, max(emin, -high), high) for shape in shapes)
    elif data == "sparse":
        x = numbers(rng, kind, shapes[0], emin, emin + 6)
        y = numbers(rng, kind, shapes[1], -6, 0)
        x[rng.random(x.shape) < 0.3] = 0.0
        y[rng.random(y.shape) < 0.3] = -0.0
        # Large numbers that meet zeros alone: zeros with an exponent would show.
        alone = rng.permutation(k)[: k // 4]
        x[:, alone] = 0.0
        y[alone] = np.ldexp(1.0, HIGHEST[kind])
    elif data == "subnormal":
        # Even rows hold subnormal numbers alone; y is large enough for the sum to be normal.
        x = numbers(rng, kind, shapes[0], emin - precision + 1, emin + 2)
        x[::2] = numbers(rng, kind, x[::2].shape, emin - precision + 1, emin - 1)
        wide = kind in ("bfloat16", "tf32")
        low, high = (10, 36) if wide else (emin - precision + 1, HIGHEST[kind])
        y = numbers(rng, kind, shapes[1], low, high)
    elif data == "tiny":  # products from 2^-160, sums below 2^-126
        x, y = (numbers(rng, kind, shape, -80, -67) for shape in shapes)
    else:  # float32 numbers, which TF32 does not hold
        x, y = (rng.standard_normal(shape).astype(np.float32).astype(float) for shape in shapes)
    if data == "positive":
        x, y = np.abs(x), np.abs(y)
    if data == "cancelling":
        pairs = rng.permutation(k).reshape(2, k // 2)
        x[:, pairs[1]] = -x[:, pairs[0]]
        y[pairs[1]] = y[pairs[0]]
        changed = pairs[1, : k // 8]
        y[changed] = converted(y[changed] * (1 + 2.0 ** (1 - precision)), kind, "nearest")
    return x, y


@pytest.mark.parametrize(
    "longest",
    [512, pytest.param(4096, marks=pytest.mark.slow(reason="long products; short ones are quick"))],
)
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_bits_that_a_gpu_gave(path: Path, longest: int) -> None:
    seen = set()
    with np.load(path) as stored:
        arrays = [stored[key] for key in ("names", "bits", "checksums")]
    for name, bits, checksum in zip(*arrays, strict=True):
        kind, source, data, k = str(name).split("/")
        if int(k) > min(CHAINS.get((kind, source), 0), longest):
            continue
        seen.add((kind, source, data))
        x, y = draw(kind, data, int(k))
        x, y = x[: bits.shape[0]], y[:, : bits.shape[1]]
        found = zlib.crc32(np.ascontiguousarray(y).tobytes(), zlib.crc32(x.tobytes()))
        assert found == checksum, f"{name}: other operands than were recorded"
        got = tensor_core_matmul(x.astype(TYPES[kind]), y.astype(TYPES[kind]), "H100")
        assert (got.view(np.uint32) == bits).all(), name
    assert {(kind, source) for kind, source, _ in seen} == set(CHAINS)
    assert {data for _, _, data in seen} == set(DATA)
