"""The simulated tensor core: against plain accumulation, exact sums, and measured figures."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import ArgumentError, DtypeError, ShapeError
from roundoff.models import layer_norm_feeds
from roundoff.reductions import round_exact, tensor_core_matmul

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32 - 1)


def operands(m: int, k: int, n: int, seed: int, dtype: type = np.float16) -> tuple:
    rng = np.random.default_rng(seed)
    spread = 2.0 ** rng.integers(-6, 7, (m, k))
    return (
        (rng.standard_normal((m, k)) * spread).astype(dtype),
        rng.standard_normal((k, n)).astype(dtype),
    )


@given(sizes, sizes, seeds)
@settings(max_examples=40, deadline=None)
def test_one_product_at_a_time_to_nearest_is_plain_float32(k: int, n: int, seed: int) -> None:
    a, b = operands(3, k, n, seed)
    plain = np.zeros((3, n), np.float32)
    for i in range(k):  # products of float16 numbers are float32 numbers
        plain += a[:, i : i + 1].astype(np.float32) * b[i].astype(np.float32)
    got = tensor_core_matmul(a, b, operands=None, accumulate="nearest", block=1)
    assert got.dtype == np.float32
    assert got.tobytes() == plain.tobytes()


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
    got = tensor_core_matmul(a, b, operands=None, accumulate="nearest", block=block)
    assert float(got[0, 0]) == one_by_one(a[0], b[:, 0], block)


def test_a_tie_is_not_rounded_twice() -> None:
    # 1 + 2**-24 + 2**-70: float64 would drop the last term, then see a tie.
    a = np.float32([[1, 2.0**-24, 2.0**-35]])
    b = np.float32([[1], [1], [2.0**-35]])
    up = tensor_core_matmul(a, b, operands=None, accumulate="nearest", block=4)
    assert float(up[0, 0]) == 1 + 2.0**-23
    b[2] = 0
    tie = tensor_core_matmul(a, b, operands=None, accumulate="nearest", block=4)
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
@pytest.mark.parametrize("kind", ["tf32", "float16", "bfloat16", None])
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
    nearest = tensor_core_matmul(x, one).ravel() - np.float32([1, 1, 1, -1])
    assert (nearest * 2**10).tolist() == [1, 0, 2, -1]
    cut = tensor_core_matmul(x, one, convert="truncate").ravel() - np.float32([1, 1, 1, -1])
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
    wide = tensor_core_matmul(a.astype(np.float64), b.astype(np.float64))
    assert (wide == got).all()
    assert tensor_core_matmul(np.ones((2, 0)), np.ones((0, 3))).tolist() == [[0] * 3] * 2
    assert tensor_core_matmul(np.ones((0, 2)), np.ones((2, 3))).shape == (0, 3)


@pytest.mark.parametrize("accumulate", ["nearest", "truncate"])
def test_what_is_not_finite(accumulate: str) -> None:
    a = np.float32([[np.inf, 1], [np.nan, 1], [3e38, 3e38], [np.inf, -np.inf]])
    got = tensor_core_matmul(a, np.ones((2, 1), np.float32), operands=None, accumulate=accumulate)
    assert got[0, 0] == np.inf
    assert np.isnan(got[1, 0])
    assert got[2, 0] == np.inf
    assert np.isnan(got[3, 0])


def test_the_smallest_float32() -> None:
    a, b = np.float32([[2.0**-75, 2.0**-75]]), np.float32([[2.0**-74], [2.0**-75]])
    got = tensor_core_matmul(a, b, operands=None)
    assert got[0, 0] == np.float32(2.0**-149)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"operands": "float8"}, ArgumentError, "operands"),
        ({"convert": "up"}, ArgumentError, "'nearest' or 'truncate'"),
        ({"accumulate": "exact"}, ArgumentError, "accumulate"),
        ({"block": 0}, ArgumentError, "1 to 4096"),
        ({"block": 2.5}, ArgumentError, "block"),
        ({"bits": 60}, ArgumentError, "2 to 40"),
        ({"a": np.ones((2, 3), np.int32)}, DtypeError, "got int32"),
        ({"a": np.ones((2, 3)), "operands": None}, DtypeError, "float64"),
        ({"a": "bits"}, ArgumentError, "a is no tensor"),
        ({"b": np.ones((2, 3))}, ShapeError, r"\(2, 3\) and \(2, 3\)"),
        ({"b": np.ones(3)}, ShapeError, "no matrix product"),
    ],
)
def test_bad_arguments(options: dict, error: type, text: str) -> None:
    given_ = {"a": np.ones((2, 3)), "b": np.ones((3, 2))} | options
    with pytest.raises(error, match=text):
        tensor_core_matmul(**given_)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    x, w, _ = normalised()
    for accumulate in ("nearest", "truncate"):
        here = tensor_core_matmul(x, w, accumulate=accumulate)
        there = tensor_core_matmul(x.cuda(), w.cuda(), accumulate=accumulate)
        assert there.is_cuda
        assert torch.equal(there.cpu(), here)
