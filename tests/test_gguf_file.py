"""A GGUF file as this library reads it, against the package gguf's own reader."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.models.gguf_file import read_gguf

gguf = pytest.importorskip("gguf")

KINDS = gguf.GGUFValueType
NUMBERS = {
    KINDS.UINT8: st.integers(0, 2**8 - 1), KINDS.INT8: st.integers(-(2**7), 2**7 - 1),
    KINDS.UINT16: st.integers(0, 2**16 - 1), KINDS.INT16: st.integers(-(2**15), 2**15 - 1),
    KINDS.UINT32: st.integers(0, 2**32 - 1), KINDS.INT32: st.integers(-(2**31), 2**31 - 1),
    KINDS.UINT64: st.integers(0, 2**64 - 1), KINDS.INT64: st.integers(-(2**63), 2**63 - 1),
    KINDS.FLOAT32: st.floats(allow_nan=False, width=32), KINDS.FLOAT64: st.floats(allow_nan=False),
    KINDS.BOOL: st.booleans(), KINDS.STRING: st.text(min_size=1, max_size=9),
}  # fmt: skip
SINGLE = st.sampled_from(list(NUMBERS)).flatmap(
    lambda kind: st.tuples(st.just(kind), st.just(None), NUMBERS[kind])
)
# What the writer takes for an array: it finds out the type by itself.
SEVERAL = st.sampled_from([KINDS.INT32, KINDS.FLOAT32, KINDS.BOOL, KINDS.STRING]).flatmap(
    lambda kind: st.tuples(
        st.just(KINDS.ARRAY), st.just(kind), st.lists(NUMBERS[kind], min_size=1, max_size=5)
    )
)
FIELDS = st.lists(st.one_of(SINGLE, SEVERAL), max_size=6)
STORED = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_1", "Q8_0")]
TENSORS = st.lists(st.tuples(st.sampled_from(STORED), st.integers(1, 3), st.booleans()), max_size=4)


def write(path: Path, fields, tensors, alignment: int | None = None) -> None:
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    if alignment:
        writer.add_custom_alignment(alignment)
    for i, (kind, of, value) in enumerate(fields):
        writer.add_key_value(f"field.{i}", value, kind, of)
    for i, (kind, rows, flat) in enumerate(tensors):
        shape = (64,) if flat else (rows, 32)
        stored = gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind)
        writer.add_tensor(f"tensor.{i}", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@settings(max_examples=15, deadline=None)
@given(FIELDS, TENSORS, st.sampled_from([None, 8, 64]))
def test_fields_and_tensors_are_those_of_gguf(tmp_path_factory, fields, tensors, alignment) -> None:
    path = tmp_path_factory.mktemp("gguf") / "any.gguf"
    write(path, fields, tensors, alignment)
    got, found = read_gguf(path)
    reader = gguf.GGUFReader(path)
    expected = {n: f.contents() for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    assert got == expected
    for tensor, other in zip(found, reader.tensors, strict=True):
        assert (tensor.name, tensor.kind) == (other.name, other.tensor_type)
        values = gguf.quants.dequantize(tensor.data, tensor.kind)
        np.testing.assert_array_equal(values, gguf.quants.dequantize(other.data, other.tensor_type))


@settings(max_examples=15, deadline=None)
@given(FIELDS, TENSORS, st.data())
def test_a_part_of_a_file_is_no_file(tmp_path_factory, fields, tensors, data) -> None:
    path = tmp_path_factory.mktemp("gguf") / "part.gguf"
    write(path, fields, tensors)
    whole = path.read_bytes()
    # The last tensor is padded: what it lacks there was never read.
    least = len(whole) - 32 if tensors else whole.rfind(b"llama") + 5
    path.write_bytes(whole[: data.draw(st.integers(0, least - 1))])
    with pytest.raises((ValueError, IndexError)):
        read_gguf(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(16), "no GGUF of version 2 or 3"),
        (b"FUGG" + (3).to_bytes(4, "little") + bytes(16), "no GGUF of version 2 or 3"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(16), "no GGUF of version 2 or 3"),
    ],
)
def test_another_format(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_gguf(path)


@pytest.mark.parametrize(
    ("kind", "rest", "words"),
    [
        (13, b"", "values of type 13"),
        (9, (9).to_bytes(4, "little") + bytes(8), "an array of type 9"),
        (8, (2**63).to_bytes(8, "little"), "a string is expected"),
        (9, (0).to_bytes(4, "little") + (2**62).to_bytes(8, "little"), "bytes are expected"),
    ],
)
def test_fields_that_cannot_be(tmp_path: Path, kind: int, rest: bytes, words: str) -> None:
    path = tmp_path / "odd.gguf"
    numbers = [(3, 4), (0, 8), (1, 8), (1, 8)]  # version, tensors, fields, length of its name
    head = b"GGUF" + b"".join(value.to_bytes(size, "little") for value, size in numbers)
    path.write_bytes(head + b"x" + kind.to_bytes(4, "little") + rest)
    with pytest.raises(ValueError, match=words):
        read_gguf(path)
