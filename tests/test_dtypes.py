import math
from fractions import Fraction

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundoff.dtypes import (
    DTYPES,
    dtype_info,
    onnx_dtype_name,
    onnx_dtype_to_np_dtype,
    onnx_dtype_to_torch_dtype,
    ulp,
)
from roundoff.errors import DtypeError
from roundoff.reductions import round_to

FLOATS = [d for d in DTYPES.values() if d.is_float]
TORCH_FLOATS = [d for d in FLOATS if hasattr(torch, d.name) and d.bits >= 8 and d.precision > 1]


def test_every_type_of_onnx_is_in_the_table() -> None:
    for name, number in onnx.TensorProto.DataType.items():
        if name != "UNDEFINED":
            assert onnx_dtype_name(number) == name


@pytest.mark.parametrize("info", [d for d in DTYPES.values() if d.kind != "string"], ids=str)
def test_numpy_dtype_agrees_with_onnx(info) -> None:
    assert onnx_dtype_to_np_dtype(info.onnx) == onnx.helper.tensor_dtype_to_np_dtype(info.onnx)


@pytest.mark.parametrize("info", TORCH_FLOATS, ids=lambda d: d.name)
def test_constants_agree_with_torch(info) -> None:
    theirs = torch.finfo(onnx_dtype_to_torch_dtype(info.onnx))
    # torch says 2**-3 for float8_e5m2fnuz, whose significand has three bits as float8_e5m2's has.
    eps = info.eps / 2 if info.name == "float8_e5m2fnuz" else info.eps
    assert (eps, info.max, info.bits) == (theirs.eps, theirs.max, theirs.bits)
    assert info.tiny == theirs.smallest_normal


@pytest.mark.parametrize(
    "given_as",
    [1, np.int64(1), "float32", "FLOAT", "torch.float32", "float", torch.float32, np.float32],
)
def test_one_type_by_all_its_names(given_as) -> None:
    assert dtype_info(given_as).onnx == 1


def test_a_tensor_has_ulps_and_nothing_is_no_type() -> None:
    assert ulp(torch.tensor([1, 300], dtype=torch.bfloat16), "float16").tolist() == [2**-10, 0.25]
    with pytest.raises(DtypeError, match="unknown element type: got None"):
        ulp(1.0, None)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_ulp_is_numpys_spacing_in_float32(x: float) -> None:
    if abs(x) >= 2.0**-126:  # NumPy's spacing is that of the subnormals below
        largest = float(np.finfo(np.float32).max)
        expected = 2.0**104 if abs(x) == largest else abs(float(np.spacing(np.float32(abs(x)))))
        assert float(ulp(x, "float32")) == expected


@given(st.floats(min_value=-65504, max_value=65504), st.sampled_from(["float16", "bfloat16"]))
def test_rounding_errs_by_half_an_ulp_at_most(x: float, name: str) -> None:
    info = dtype_info(name)
    rounded = float(round_to(x, info.name))  # ml_dtypes rounds float64 to bfloat16 twice
    if math.isfinite(rounded):
        assert abs(Fraction(rounded) - Fraction(x)) <= Fraction(float(ulp(x, name))) / 2


def test_ulp_at_the_edges() -> None:
    tiny = 2.0**-24
    assert ulp([0.0, 2.0**-15, math.inf, 1e9], "float16").tolist() == [tiny, tiny, 32.0, 32.0]
    assert math.isnan(ulp(math.nan, "float16"))
    assert ulp([255.9, 256.0, 511.0], "float16").tolist() == [0.125, 0.25, 0.25]
