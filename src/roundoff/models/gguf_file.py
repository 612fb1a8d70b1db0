"""What a GGUF file says and holds.

The package gguf reads it, too, one value at a time: a vocabulary of 49,152 tokens takes it 1.3 s of
a processor, and this 0.1 s. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Tensor", "read_gguf"]

#: By the format's number of a type of values.
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
            10: "<u8", 11: "<i8", 12: "<f8"}  # fmt: skip
_STRING, _ARRAY = 8, 9


class Tensor(NamedTuple):
    """A tensor of the file.

    Attributes
    ----------
    name : str
        Its name in the file.
    kind : gguf.GGMLQuantizationType
        How its values are stored.
    data : numpy.ndarray
        float32, float16 or, of a type that gguf.quants multiplies out, bytes: its last axis is the
        fastest. It is read when it is used.

    Examples
    --------
    >>> import gguf
    >>> kind = gguf.GGMLQuantizationType.F32
    >>> Tensor("output_norm.weight", kind, np.ones(3, np.float32)).data.shape
    (3,)
    """

    name: str
    kind: Any
    data: np.ndarray


def read_gguf(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """Fields and tensors of a file of version 2 or 3, with its least significant bytes first.

    Parameters
    ----------
    path : Path

    Returns
    -------
    dict of str to object, list of Tensor
        A field is a number, a truth value, a string, or a list.

    Raises
    ------
    ValueError, IndexError
        The file is not of this format, or ends too early.
    OSError
        It cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> import gguf
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = gguf.GGUFWriter(Path(folder, "x.gguf"), "llama")
    ...     writer.add_tensor("w", np.ones((2, 3), np.float32))
    ...     writer.write_header_to_file()
    ...     writer.write_kv_data_to_file()
    ...     writer.write_tensors_to_file()
    ...     writer.close()
    ...     fields, tensors = read_gguf(Path(folder, "x.gguf"))
    >>> fields, tensors[0].data.shape
    ({'general.architecture': 'llama'}, (2, 3))
    """
    file = _File(path)
    if bytes(file.take(4)) != b"GGUF" or file.number("<u4") not in (2, 3):
        raise ValueError("no GGUF of version 2 or 3")
    tensors, fields = file.number("<u8"), file.number("<u8")
    found = {file.text(): file.value(file.number("<u4")) for _ in range(fields)}
    infos = [(file.text(), *file.shape_kind_place()) for _ in range(tensors)]
    alignment = found.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-file.at // alignment) * alignment
    return found, [
        Tensor(name, *file.array(shape, kind, start + at)) for name, shape, kind, at in infos
    ]


class _File:
    """A file's bytes, read one after another."""

    def __init__(self, path: Path) -> None:
        self.bytes = np.memmap(path, mode="r").view(np.ndarray)
        self.at = 0

    def take(self, count: int) -> memoryview:
        start, self.at = self.at, self.at + count
        if self.at > len(self.bytes):
            raise ValueError(f"{count} bytes are expected at {start} of {len(self.bytes)}")
        return self.bytes[start : self.at].data

    def number(self, dtype: str) -> Any:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize), dtype).item()

    def text(self) -> str:
        return next(self.texts(1))

    def texts(self, count: int) -> Iterator[str]:
        view, end = self.bytes.data, len(self.bytes)
        for _ in range(count):
            start = self.at + 8
            if start > end:
                break
            (length,) = struct.unpack_from("<Q", view, self.at)
            if start + length > end:
                break
            self.at = start + length
            yield str(view[start : self.at], "utf-8")
        else:
            return
        raise ValueError(f"a string is expected at {self.at} of {end}")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"values of type {kind}")
        kind, count = self.number("<u4"), self.number("<u8")
        if kind == _STRING:
            return list(self.texts(count))
        if kind not in _SCALARS:
            raise ValueError(f"an array of type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def shape_kind_place(self) -> tuple[tuple[int, ...], int, int]:
        """Of a tensor: its shape, whose order the format turns around, its type and its place."""
        shape = tuple(self.value(10) for _ in range(self.number("<u4")))[::-1]
        return shape, self.number("<u4"), self.number("<u8")

    def array(self, shape: tuple[int, ...], kind: int, at: int) -> tuple[Any, np.ndarray]:
        from gguf import GGMLQuantizationType
        from gguf.quants import quant_shape_to_byte_shape

        stored = GGMLQuantizationType(kind)
        dtype = np.dtype({"F32": "<f4", "F16": "<f2"}.get(stored.name, "u1"))
        if dtype.itemsize == 1:
            shape = quant_shape_to_byte_shape(shape, stored)
        self.at = at
        size = math.prod(shape) * dtype.itemsize
        return stored, np.frombuffer(self.take(size), dtype).reshape(shape)
