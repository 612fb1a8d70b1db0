"""A digest of a tensor: of its bits, and of nothing else."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from roundoff.compare import digest

ARRAYS = hnp.arrays(
    np.float32, hnp.array_shapes(max_dims=3, max_side=5), elements=st.floats(width=32)
)


@given(ARRAYS)
def test_it_is_of_the_bytes_by_rows(values):
    wanted = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
    assert digest(torch.from_numpy(values)) == wanted[:8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_strides_do_not_matter_and_every_type_has_one(dtype):
    x = torch.arange(24).view(2, 3, 4).to(dtype)
    assert digest(x.permute(2, 0, 1).contiguous().permute(1, 2, 0)) == digest(x)
    assert digest(x[:, ::2]) == digest(x[:, ::2].clone()) != digest(x)
    assert digest(x[:0]) == hashlib.sha256(b"").hexdigest()[:8]
