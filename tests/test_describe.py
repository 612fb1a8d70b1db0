"""The line that describes a nest of tensors."""

import dataclasses
import math
from collections import namedtuple
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from roundoff.describe import as_tensor, from_numpy, string_type
from roundoff.dtypes import DTYPES, onnx_dtype_to_np_dtype


def test_the_published_line() -> None:
    t = torch.zeros(2, 1024, 1152)
    t[0, 0, 0], t[1, 2, 3] = 240.0, 333.25
    line = string_type([t], with_shape=True, with_min_max=True, with_device=True)
    head, mean = line.split(":A")
    assert head == "#1[CT1s2x1024x1152[0.0,333.25"
    assert mean == f"{573.25 / (2 * 1024 * 1152)}]]"
    assert (string_type(t), string_type(t.numpy(), with_device=True)) == ("T1r3", "A1r3")


@given(
    hnp.arrays(
        st.sampled_from([np.float16, np.float32, np.float64, np.int32, np.bool_]),
        hnp.array_shapes(min_dims=0, max_dims=3),
    )
)
@settings(max_examples=30, deadline=None)
def test_torch_and_numpy_say_the_same(array: Any) -> None:
    array = np.asarray(array)
    other = torch.from_numpy(array.copy())
    assert string_type(array, True, True)[1:] == string_type(other, True, True)[1:]


@pytest.mark.parametrize(
    "info", [d for d in DTYPES.values() if d.kind != "string"], ids=lambda d: d.name
)
def test_every_onnx_type(info: Any) -> None:
    array = np.array([1, 1]).astype(onnx_dtype_to_np_dtype(info.onnx))
    one = {"bool": "True", "int": "1", "uint": "1"}.get(info.kind, "1.0")
    assert string_type(array, True, True) == f"A{info.onnx}s2[{one},{one}:A1.0]"
    assert as_tensor(array).info == info  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("obj", "line"),
    [
        (None, "None"),
        (1j, "complex=1j"),
        ("x", "str"),
        ((), "()"),
        ((1,), "(int=1,)"),
        ([1, (2.0, None)], "#2[int=1,(float=2.0,None)]"),
        ({"a": 1}, "dict(a:int=1)"),
        (list(range(30)), "#30[int=0,...]"),
        (np.float32(3), "A1s=3.0"),
        (torch.zeros(0, 2), "T1s0x2[empty]"),
        (torch.tensor([math.nan, 1.0, 3.0]), "T1s3[1.0,3.0:A2.0N1nans]"),
        (np.array([3 + 4j, 0]), "A15s2[0.0,5.0:A2.5]"),
        (
            np.array([2**64 - 1, 2**64 - 1], np.uint64),
            "A13s2[18446744073709551615,18446744073709551615:A1.8446744073709552e+19]",
        ),
        (np.array(["a", "b"]), "A8s2"),
    ],
)
def test_values(obj: Any, line: str) -> None:
    found = string_type(obj, with_shape=True, with_min_max=True)
    assert found == line


def test_caches_and_outputs() -> None:
    from transformers import DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithPast

    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    output = CausalLMOutputWithPast(logits=torch.ones(2), past_key_values=cache)
    _, name = output  # transformers 5.24 names the field "cache"
    assert string_type(output, with_shape=True) == (
        f"CausalLMOutputWithPast(logits:T1s2,{name}:DynamicCache#1[(T1s1x2x3x4,T1s1x2x3x4)])"
    )


def test_data_classes_and_named_tuples() -> None:
    pair, box = namedtuple("Pair", "x y"), dataclasses.make_dataclass("Box", ["x", "y"])
    assert string_type(pair(1, (2.0,))) == "Pair(x:int,y:(float,))"
    assert string_type([box(1, None)]) == "#1[Box(x:int)]"


def test_a_tensor_without_values_shows_its_class() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(2)
    assert string_type(fake, True, True) == "FakeTensor(...)"
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    for tensor in (torch.zeros(2).to_sparse(), nested):
        assert string_type(tensor, True, True) == "Tensor(...)"


def test_memory_is_shared_where_it_can_be() -> None:
    for array in (np.zeros(3, np.float32), np.zeros(3, ml_dtypes.bfloat16)):
        assert from_numpy(array)[0].data_ptr() == array.ctypes.data
    for array in (np.arange(3.0)[::-1], np.arange(3, dtype=">f4"), np.broadcast_to(1.0, (2, 2))):
        assert (from_numpy(array)[0].numpy() == array).all()
