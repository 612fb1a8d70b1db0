"""The page that writes a layer norm step by step: each step against float64, in any shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.kernels import interpreting, shuffled_programs

from .pages import study_of
from .test_answers import norm_of

STUDY = study_of("layer_norm_ladder")
FORWARD, BACKWARD = STUDY["FORWARD"], STUDY["BACKWARD"]
TYPES = (torch.float16, torch.bfloat16, torch.float32)


def near(a, e, dtype, rows=1):
    """Within one rounding of the type, and that of float32 sums of so many rows."""
    largest = e.abs().max().item()
    computed = 64 * rows * torch.finfo(torch.float32).eps * max(largest, 1.0)
    # Interpreted, bfloat16 is cut off, not rounded: a whole unit.
    assert (a.double() - e).abs().max() <= 1.01 * torch.finfo(dtype).eps * largest + computed


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(3, 150),
    dtype=st.sampled_from(TYPES),
    piece=st.sampled_from([8, 32, 256]),
    forward=st.sampled_from(FORWARD),
    backward=st.sampled_from(BACKWARD),
)
def test_any_shape_against_float64(rows, columns, dtype, piece, forward, backward):
    norm = norm_of(rows, columns, dtype)
    x, w = norm["x"], norm["weight"]
    y, stats = STUDY["forward"](forward, x, w, norm["bias"], piece=piece)
    near(y, norm["exact y"], dtype)
    near(stats, torch.stack([norm["mean"], norm["rstd"]]), torch.float32)
    results = STUDY["backward"](backward, norm["dy"], x, w, stats, piece=piece)
    for a, name, more in zip(results, ("dx", "dw", "db"), (1, rows, rows), strict=True):
        e = norm[f"exact {name}"]
        assert (a.shape, a.dtype) == (e.shape, dtype)
        near(a, e, dtype, more)


@pytest.mark.parametrize("name", BACKWARD)
def test_only_atomics_depend_on_the_order_of_programs(name):
    if not interpreting():
        pytest.skip("needs the interpreter's order of programs")
    norm = norm_of(12, 20, torch.float32)
    x, w = norm["x"], norm["weight"]
    _, stats = STUDY["forward"]("pieces", x, w, norm["bias"])
    seen = set()
    for seed in range(3):
        with shuffled_programs(seed):
            results = STUDY["backward"](name, norm["dy"], x, w, stats, piece=16)
        seen.add(tuple(t.numpy().tobytes() for t in results))
    assert (len(seen) > 1) == (name == "atomic")
