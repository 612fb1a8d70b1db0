"""The simulated tensor core: against plain accumulation, exact sums, and measured figures."""

import math
import sys
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import ArgumentError, DtypeError
from roundoff.models import layer_norm_feeds
from roundoff.reductions import round_exact, tensor_core_matmul

sys.path.insert(0, str(Path(__file__).parent))
import record_tensor_core as record

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
ONES = np.ones((2, 3), np.float32)
sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32 - 1)


def operands(m: int, k: int, n: int, seed: int, dtype: type = np.float16) -> tuple:
    rng = np.random.default_rng(seed)
    spread = 2.0 ** rng.integers(-6, 7, (m, k))
    return (
        (rng.standard_normal((m, k)) * spread).astype(dtype),
        rng.standard_normal((k, n)).astype(dtype),
    )


def one_by_one(a: np.ndarray, b: np.ndarray, block: int) -> float:
    """Sum of products of two vectors, rounded once a block, in rational arithmetic."""
    total = 0.0
    for k in range(0, len(a), block):
        pairs = zip(a[k : k + block].tolist(), b[k : k + block].tolist(), strict=True)
        exact = Fraction(total) + sum(Fraction(x) * Fraction(y) for x, y in pairs)
        total = round_exact(exact, "float32")
    return total


@given(st.integers(1, 30), st.sampled_from([1, 2, 4, 8]), seeds)
@settings(max_examples=60, deadline=None)
def test_to_nearest_each_block_is_rounded_once(k: int, block: int, seed: int) -> None:
    # Products of 48 bits: float64 in between would round twice.
    a, b = operands(1, k, 1, seed, np.float32)
    got = tensor_core_matmul(a, b, operands="float32", accumulate="nearest", block=block)
    assert float(got[0, 0]) == one_by_one(a[0], b[:, 0], block)


def test_a_tie_is_not_rounded_twice() -> None:
    # 1 + 2**-24 + 2**-70: float64 would drop the last term, then see a tie.
    a = np.float32([[1, 2.0**-24, 2.0**-35]])
    b = np.float32([[1], [1], [2.0**-35]])
    up = tensor_core_matmul(a, b, operands="float32", accumulate="nearest", block=4)
    assert float(up[0, 0]) == 1 + 2.0**-23
    b[2] = 0
    tie = tensor_core_matmul(a, b, operands="float32", accumulate="nearest", block=4)
    assert float(tie[0, 0]) == 1


def cut_exactly(a: np.ndarray, b: np.ndarray, block: int, bits: int) -> float:
    """The step of a tensor core in rational arithmetic, written from its description."""

    def cut(value: Fraction, place: Fraction) -> Fraction:
        return int(value / place) * place  # int() cuts towards zero

    def exponent(value: Fraction) -> int:
        e = value.numerator.bit_length() - value.denominator.bit_length()
        return e if Fraction(2) ** e <= value else e - 1

    total = Fraction(0)
    for k in range(0, len(a), block):
        pairs = zip(a[k : k + block].tolist(), b[k : k + block].tolist(), strict=True)
        addends = [total, *(Fraction(x) * Fraction(y) for x, y in pairs)]
        largest = max(abs(v) for v in addends)
        if largest:
            place = Fraction(2) ** (exponent(largest) + 1 - bits)
            total = sum((cut(v, place) for v in addends), Fraction(0))
        if total:
            total = cut(total, Fraction(2) ** (exponent(abs(total)) - 23))
    return float(total)


@given(st.integers(1, 40), st.sampled_from([1, 4, 8, 16]), st.sampled_from([14, 24, 26]), seeds)
@settings(max_examples=80, deadline=None)
def test_the_step_is_what_was_measured(k: int, block: int, bits: int, seed: int) -> None:
    a, b = operands(1, k, 1, seed)
    got = tensor_core_matmul(a, b, operands="float16", block=block, bits=bits)
    assert float(got[0, 0]) == cut_exactly(a[0].astype(float), b[:, 0].astype(float), block, bits)


@pytest.mark.parametrize("accumulate", ["nearest", "truncate"])
@pytest.mark.parametrize("block", [1, 4, 8, 16])
@pytest.mark.parametrize("kind", ["tf32", "float16", "bfloat16", "float32"])
def test_what_fits_is_exact(accumulate: str, block: int, kind: str | None) -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(-100, 101, (20, 150)).astype(np.float32)
    b = rng.integers(-100, 101, (150, 9)).astype(np.float32)
    got = tensor_core_matmul(a, b, operands=kind, accumulate=accumulate, block=block)
    assert (got == a.astype(int) @ b.astype(int)).all()


@given(sizes, sizes, st.sampled_from([4, 8, 16]), st.integers(24, 40), seeds)
@settings(max_examples=40, deadline=None)
def test_positive_data_moves_towards_zero(k: int, n: int, block: int, bits: int, seed: int) -> None:
    a, b = (np.abs(t) for t in operands(3, k, n, seed))
    # Spread below 2**6 by 11 bits twice: these sums are exact in float64.
    exact = a.astype(np.float64) @ b.astype(np.float64)
    got = tensor_core_matmul(a, b, operands="float16", block=block, bits=bits)
    assert (got <= exact).all()
    assert (tensor_core_matmul(-a, b, operands="float16", block=block, bits=bits) == -got).all()
    cut = tensor_core_matmul(a, b, operands="bfloat16", convert="truncate", block=block)
    assert (cut <= tensor_core_matmul(a, b, operands="float16", block=block)).all()


@pytest.mark.parametrize(
    ("kind", "stored"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)]
)
def test_operands_are_rounded_as_a_cast_rounds(kind: str, stored: type) -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((1, 5000)) * np.exp(rng.uniform(-20, 14, (1, 5000)))).astype(
        np.float32
    )
    x[0, :6] = [65519.99, 65520, 1e-8, -0.0, 3e38, -7e-8]
    with np.errstate(over="ignore"):
        cast = x.astype(stored).astype(np.float32)
    got = tensor_core_matmul(x.T, np.ones((1, 1), np.float32), operands=kind, bits=40)
    assert (cast == got.T).all()
    low = tensor_core_matmul(x.T, np.ones((1, 1), np.float32), operands=kind, convert="truncate")
    assert (np.abs(low.T) <= np.abs(x)).all()
    assert np.isfinite(low).all()


def test_tf32_keeps_11_bits() -> None:
    x = np.float32([[1 + 2**-11 + 2**-20], [1 + 2**-11], [1 + 3 * 2**-11], [-1 - 2**-11 - 2**-20]])
    one = np.ones((1, 1), np.float32)
    nearest = tensor_core_matmul(x, one, convert="nearest").ravel() - np.float32([1, 1, 1, -1])
    assert (nearest * 2**10).tolist() == [1, 0, 2, -1]
    for how in ({}, {"operands": "tf32"}, {"convert": "truncate", "block": 8}):
        cut = tensor_core_matmul(x, one, **how).ravel() - np.float32([1, 1, 1, -1])
        assert (cut * 2**10).tolist() == [0, 0, 1, 0]


def normalised(rows: int = 64, width: int = 1152, columns: int = 64) -> tuple:
    """Operands of the layer-normalisation page, and the exact product."""
    feeds = {name: t.float() for name, t in layer_norm_feeds(rows, width, batch=1).items()}
    x = torch.nn.functional.layer_norm(feeds["X"][0], (width,), feeds["scale"], feeds["bias"])
    w = feeds["weights"][:, :columns]
    return x, w, x.double() @ w.double()


def bias(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got.double() - truth).mean())


def test_size_and_sign_of_each_cause() -> None:
    x, w, exact = normalised()
    assert 250 < exact.mean() < 350
    rounded = tensor_core_matmul(x, w, accumulate="nearest")
    assert abs(bias(rounded, exact)) < 1e-3
    cut = tensor_core_matmul(x, w, convert="truncate", accumulate="nearest")
    assert -0.2 < bias(cut, exact) < -0.05
    # The accumulator's part: what it does to operands that are rounded alike.
    by_block = {
        (block, bits): bias(tensor_core_matmul(x, w, block=block, bits=bits), rounded)
        for block, bits in ((4, 40), (8, 40), (4, 24), (8, 24), (8, 26))
    }
    assert by_block[4, 40] == pytest.approx(-1.8e-3, rel=0.2)  # the sum alone is cut
    assert by_block[8, 40] == pytest.approx(-0.9e-3, rel=0.2)
    assert by_block[8, 26] == pytest.approx(-1.6e-3, rel=0.2)  # as an H100 keeps them
    assert all(-6e-3 < by_block[block, 24] < -2e-3 for block in (4, 8))


def test_rows_do_not_depend_on_each_other() -> None:
    x, w, _ = normalised(rows=200)
    whole = tensor_core_matmul(x, w)
    assert torch.equal(whole[150:], tensor_core_matmul(x[150:], w))


def test_kinds_of_input() -> None:
    a, b = operands(3, 20, 4, 5, np.float32)
    got = tensor_core_matmul(a, b)
    tensor = tensor_core_matmul(torch.from_numpy(a), torch.from_numpy(b))
    assert isinstance(tensor, torch.Tensor)
    assert (tensor.numpy() == got).all()
    wide = tensor_core_matmul(a.astype(np.float64), b.astype(np.float64), operands="tf32")
    assert (wide == got).all()
    for shape in ((2, 0), (0, 3)), ((0, 2), (2, 3)), ((2, 2), (2, 0)):
        empty = tensor_core_matmul(*(np.ones(s, np.float16) for s in shape))
        assert empty.dtype == np.float32
        assert empty.tolist() == np.zeros((shape[0][0], shape[1][1])).tolist()


@pytest.mark.parametrize("accumulate", ["nearest", "truncate"])
def test_what_is_not_finite(accumulate: str) -> None:
    a = np.float32([[np.inf, 1], [np.nan, 1], [3e38, 3e38], [np.inf, -np.inf]])
    b = np.ones((2, 1), np.float32)
    got = tensor_core_matmul(a, b, operands="float32", accumulate=accumulate, block=8)
    assert got[0, 0] == np.inf
    assert np.isnan(got[1, 0])
    assert got[2, 0] == np.inf
    assert np.isnan(got[3, 0])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"gpu": "A100"}, ArgumentError, r"'H100' or 'H200'; try: block=8, bits=25"),
        ({"gpu": "H100", "block": 16}, ArgumentError, "one or the other"),
        ({"instruction": "mma", "bits": 24}, ArgumentError, "one or the other"),
        ({"gpu": "H100", "accumulate": "nearest"}, ArgumentError, "one or the other"),
        ({"operands": "float32"}, DtypeError, "wgmma instruction of an H100"),
    ],
)
def test_what_no_gpu_does_is_refused(options: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        tensor_core_matmul(ONES, ONES.T, **options)


@pytest.mark.parametrize(
    "kinds", [(np.float16, E4M3), (E4M3, E5M2), (ml_dtypes.bfloat16, np.float16)]
)
def test_operands_of_two_types_are_refused(kinds: tuple[type, type]) -> None:
    with pytest.raises(DtypeError, match="different types"):
        tensor_core_matmul(ONES.astype(kinds[0]), ONES.T.astype(kinds[1]))


# The instructions of a Hopper GPU

TYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "float8_e4m3fn": E4M3,
    "float8_e5m2": E5M2,
}
#: Precision, exponents of the smallest and the largest normal number.
FORMATS = {
    "float16": (11, -14, 15),
    "bfloat16": (8, -126, 127),
    "tf32": (11, -126, 127),
    "float8_e4m3fn": (4, -6, 7),
    "float8_e5m2": (3, -14, 15),
}


def hopper(a: list[float], b: list[float], kind: str, instruction: str) -> float:
    """One element in rational arithmetic, as the documentation says it is computed."""
    block, f, p = 16, 25, 24
    smallest = FORMATS[kind][1]
    if kind == "tf32":
        block = 8
    if kind.startswith("float8"):
        order = list(range(len(a)))
        if instruction == "wgmma":
            block, f, p = 32, 13, 14
        else:
            smallest = -14  # they are float16 by then
            tiles = [order[i : i + 32] for i in range(0, len(order), 32)]
            order = []
            for tile in tiles:
                tile += [-1] * (32 - len(tile))
                order += [k for i, k in enumerate(tile) if i % 4 < 2]
                order += [k for i, k in enumerate(tile) if i % 4 >= 2]
        a, b = ([t[k] if k >= 0 else 0.0 for k in order] for t in (a, b))

    def exponent(value: Fraction) -> int:
        value = abs(value)
        e = value.numerator.bit_length() - value.denominator.bit_length()
        return e if Fraction(2) ** e <= value else e - 1

    total = Fraction(0)
    for k in range(0, len(a), block):
        addends, exponents = [total], [-133]
        if total:
            exponents.append(max(exponent(total), -126))
        for left, right in zip(a[k : k + block], b[k : k + block], strict=True):
            x, y = Fraction(left), Fraction(right)
            if x and y:
                addends.append(x * y)
                exponents.append(max(exponent(x), smallest) + max(exponent(y), smallest))
        place = Fraction(2) ** (max(exponents) - f)
        total = sum((int(value / place) * place for value in addends), Fraction(0))
        if total:
            place = Fraction(2) ** max(exponent(total) + 1 - p, -149)
            total = int(total / place) * place
        if abs(total) >= 2**128:
            return math.copysign(math.inf, total)
    return float(total)


def hopper_operands(kind: str, k: int, seed: int) -> list[np.ndarray]:
    """Vectors of a type: exponents over a part of its range or all of it, zeros, subnormals."""
    rng = np.random.default_rng(seed)
    precision, emin, emax = FORMATS[kind]
    low = int(rng.integers(emin - precision + 1, emax - 2))
    high = int(rng.integers(low, emax))
    out = []
    for _ in range(2):
        significands = 1 + rng.integers(0, 2 ** (precision - 1), k) * 2.0 ** (1 - precision)
        values = np.ldexp(significands, rng.integers(low, high + 1, k))
        values = values * rng.choice([-1, 1], k) * (rng.random(k) < 0.9)
        with np.errstate(over="ignore"):
            out.append(values.astype(TYPES[kind]))
        # Products about 2**-20, or where float32 is subnormal.
        place = -20 if emin > -126 else int(rng.choice([-20, -140]))
        low, high = place - high, place - low
        low, high = (min(max(e, emin - precision + 1), emax - 1) for e in (low, high))
    if kind == "tf32":  # subnormal ones fall between its numbers
        out = [np.ldexp(np.trunc(np.ldexp(t.astype(float), 136)), -136).astype(np.float32)
               for t in out]  # fmt: skip
    return out


@pytest.mark.parametrize("instruction", ["wgmma", "mma"])
@pytest.mark.parametrize("kind", TYPES)
@given(st.integers(1, 80), seeds)
@settings(max_examples=40, deadline=None)
def test_a_hopper_step_in_rational_arithmetic(
    kind: str, instruction: str, k: int, seed: int
) -> None:
    a, b = hopper_operands(kind, k, seed)
    got = tensor_core_matmul(a[None], b[:, None], "H100", instruction)[0, 0]
    expected = hopper(a.astype(float).tolist(), b.astype(float).tolist(), kind, instruction)
    assert got.tobytes() == np.float32(expected).tobytes()  # the sign of a zero as well
    assert tensor_core_matmul(a[None], b[:, None], "H200", instruction)[0, 0] == got


# Products and probes recorded by record_tensor_core.py with torch 2.11 and Triton 3.6, 2026-11-25.
#
# Products: 64 x 64, of which 8 x 16 elements are kept, on an H100 and an H200. Each of these is
# claimed, bit for bit:
#   wgmma and mma by Triton: five types; K 16 (32 for float8), 64, 512, 4096; data normal, wide,
#     positive, cancelling, sparse, subnormal, and for bfloat16 and TF32 tiny, for TF32 full;
#   cuBLAS where it does not split K: bfloat16 and float16 to K = 512, float8_e4m3fn to K = 64,
#     and float8_e4m3fn with fast accumulation for every K.
# Not claimed: cuBLAS where it splits K and adds the parts in float32. That is 16-bit types at
# K = 4096, TF32 for every K, and float8_e4m3fn without fast accumulation above 128. The split
# belongs to a version of the library, not to the GPU.
# Probes: signed zeros, NaN, infinities, overflow, subnormals, on an H200, NaN's bits included.
DATA = Path(__file__).parent / "data"
RECORDED = [DATA / "tensor_core_h100.npz", DATA / "tensor_core_h200.npz"]
#: Largest K for which cuBLAS was one chain at 64 x 64.
UNSPLIT = {
    ("bfloat16", "cublas"): 512,
    ("float16", "cublas"): 512,
    ("float8_e4m3fn", "cublas"): 64,
    ("float8_e4m3fn", "cublas fast"): 4096,
}


def claimed(longest: int) -> set[str]:
    """Names of the recorded products that the model claims, with K at most *longest*."""
    chains = {(kind, tile): 4096 for kind in record.KINDS for tile in record.TILES} | UNSPLIT
    return {
        f"{kind}/{source}/{data}/{k}"
        for (kind, source), unsplit in chains.items()
        for data in record.data_of(kind)
        for k in record.depths(kind)
        if k <= min(unsplit, longest)
    }


def assert_recorded(path: Path, longest: int) -> None:
    """Each claimed product is there, of the operands drawn here, and has the model's bits."""
    left = claimed(longest)
    with np.load(path) as stored:
        arrays = [stored[key] for key in ("names", "bits", "checksums")]
    rows, columns = arrays[1].shape[1:]
    for name, bits, checksum in zip(*arrays, strict=True):
        if str(name) not in left:
            continue
        left.remove(str(name))
        kind, source, data, k = str(name).split("/")
        x, y = record.draw(kind, data, int(k))
        x, y = x[:rows], y[:, :columns]
        assert record.checksum(x, y) == checksum, f"{name}: other operands than were recorded"
        dtype = TYPES[kind]
        instruction = "mma" if source == "mma" else "wgmma"
        got = tensor_core_matmul(x.astype(dtype), y.astype(dtype), "H100", instruction)
        same = got.view(np.uint32) == bits  # none of them is NaN
        assert same.all(), f"{name}: {100 * same.mean():.2f} % of the elements"
    assert not left, f"not recorded: {sorted(left)[:5]}"


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_bits_that_a_gpu_gave(path: Path) -> None:
    assert_recorded(path, 512)


@pytest.mark.slow(reason="products of 4096 terms; the short ones are tried above")
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_bit_that_a_gpu_gave(path: Path) -> None:
    assert_recorded(path, 4096)


def test_bits_of_probes_that_a_gpu_gave() -> None:
    with np.load(DATA / "tensor_core_probes_h200.npz") as stored:
        left = dict(zip(stored["names"].tolist(), stored["bits"].tolist(), strict=True))
    for kind, instruction in record.HOPPER:
        asked = record.probes(kind, record.HOPPER[kind, instruction])
        for name, cells in asked.items():
            x, y = record.probe_operands([cells])
            x, y = x[:1].astype(TYPES[kind]), y[:, :1].astype(TYPES[kind])
            got = tensor_core_matmul(x, y, "H200", instruction)[0, 0]
            there = left.pop(f"{kind}/{instruction}/{name}")
            assert int(got.view(np.uint32)) == there, f"{kind} {instruction}: {name}"
    assert not left


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    x, w, _ = normalised()
    for accumulate in ("nearest", "truncate"):
        here = tensor_core_matmul(x, w, accumulate=accumulate)
        there = tensor_core_matmul(x.cuda(), w.cuda(), accumulate=accumulate)
        assert there.is_cuda
        assert torch.equal(there.cpu(), here)
