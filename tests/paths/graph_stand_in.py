"""A CUDA graph on a processor: what a replay would read, where there is no GPU.

A recorded run reads and writes the addresses that it read and wrote when it was recorded. A node
without a kernel on the GPU runs on the processor: ONNX Runtime copies its inputs when they are
bound, and a replay never runs it again. Which operators have a kernel, of which types, is in
``cuda_kernels.json``, as ONNX Runtime assigned them on a machine with a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx.defs
import pytest
import torch
from onnx import TensorProto

from roundoff.backend import program, variant
from roundoff.backend.steps import KernelStep, Partition
from roundoff.errors import UnsupportedError

TABLE = Path(__file__).parents[1] / "data" / "cuda_kernels.json"


@functools.cache
def kernels() -> dict[str, str]:
    """A node's kind -> the execution provider that takes it."""
    return json.loads(TABLE.read_text("utf-8"))["kernels"]


def kinds(model: onnx.ModelProto) -> list[tuple[str, onnx.NodeProto]]:
    """Each node with what decides its kernel: operator, version and types of its inputs."""
    graph = model.graph
    values = [*graph.input, *graph.value_info, *graph.output]
    types = {v.name: v.type.tensor_type.elem_type for v in values}
    types |= {t.name: t.data_type for t in graph.initializer}
    versions = {o.domain: o.version for o in model.opset_import}
    return [(_kind(n, types, versions), n) for n in graph.node if n.domain != "roundoff"]


def _kind(node: onnx.NodeProto, types: Mapping[str, int], versions: Mapping[str, int]) -> str:
    version = 1
    with contextlib.suppress(onnx.defs.SchemaError):  # ONNX Runtime's own operators have one
        schema = onnx.defs.get_schema(node.op_type, versions[node.domain], node.domain)
        version = schema.since_version
    names = [TensorProto.DataType.Name(types.get(i, 0)).lower() if i else "-" for i in node.input]
    to = [TensorProto.DataType.Name(a.i).lower() for a in node.attribute if a.name == "to"]
    called = f"{node.domain}.{node.op_type}".lstrip(".")
    return f"{called}-{version}({', '.join(names)})" + "".join(f" to {kind}" for kind in to)


def without_kernel(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes that run on the processor, as the CUDA provider has no kernel of their types.

    Raises
    ------
    KeyError
        A kind of node that the table lacks.
    """
    model = onnx.shape_inference.infer_shapes(model)
    known = kernels()
    for kind, _ in kinds(model):
        if kind not in known:
            raise KeyError(f"{kind} is not in {TABLE.name}: record_cuda_kernels.py on a GPU host")
    return [n for kind, n in kinds(model) if known[kind] != "CUDAExecutionProvider"]


def read_by_processor(model: onnx.ModelProto) -> frozenset[str]:
    """Inputs of a partition that a node on the processor reads."""
    inputs = {i.name for i in model.graph.input}
    return frozenset(i for n in without_kernel(model) for i in n.input if i in inputs)


class Recording:
    """A run as it was recorded: what it binds stays bound."""

    def __init__(self, run: program.Program, values: list[Any]) -> None:
        self._does = [self._recorded(step, values) for step in run.steps]

    def replay(self) -> None:
        for do in self._does:
            do()

    def _recorded(self, step: Any, values: list[Any]) -> Callable[[], None]:
        if isinstance(step, Partition):
            return _bound_for_good(step, values)
        assert isinstance(step, KernelStep)
        inputs = [None if i is None else values[i] for i in step._inputs]
        kept = [None if o is None else values[o] for o in step._outputs]

        def again() -> None:
            for old, new in zip(kept, step._kernel(inputs, step._attributes), strict=True):
                if old is not None and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        return again


def _bound_for_good(step: Partition, values: list[Any]) -> Callable[[], None]:
    session = step.session
    io = session.raw.io_binding()
    held = []
    for i, (name, slot) in enumerate(zip(step.names, step._slots, strict=True)):
        tensor = values[slot.index]
        bind = io.bind_input if i < len(session.input_names) else io.bind_output
        if name in session.on_processor:
            tensor = tensor.clone()  # as it is now
        held.append(tensor)
        at = tensor.data_ptr() or step._nowhere.data_ptr()
        bind(name, "cpu", 0, slot.onnx_type, tuple(tensor.shape), at)
    return lambda _kept=held: session.raw.run_with_iobinding(io, session.run_options)


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Convert tensors of the processor as those of a GPU, where no index is looked at."""
    patch.setattr("roundoff.backend.operators.indexing.on_cpu", lambda node: False)


def install(patch: pytest.MonkeyPatch) -> list[Recording]:
    """Let the backend record runs on a processor; what it records is in the list."""
    made: list[Recording] = []
    session = program.Program._session

    def with_table(self: Any, part: onnx.ModelProto, *rest: Any) -> Any:
        opened = session(self, part, *rest)
        opened.on_processor = read_by_processor(part)
        return opened

    def capture(
        self: program.Program, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int]
    ) -> tuple[Recording, list[torch.Tensor]]:
        if any(s.session.on_processor for s in self.steps if isinstance(s, Partition)):
            raise UnsupportedError("a run that cannot be recorded", got="a copy")
        for _ in range(2):
            self.run(inputs, sizes)
        values: list[Any] = []
        steps = [_Kept(step, values) for step in self.steps]
        originals, self.steps = self.steps, steps
        try:
            outputs = self._steps(inputs, sizes, False)
        finally:
            self.steps = originals
        recording = Recording(self, values)
        made.append(recording)
        return recording, outputs

    as_on_a_gpu(patch)
    patch.setattr(program.Program, "_session", with_table)
    patch.setattr(program.Program, "capture", capture)
    patch.setattr(variant, "has_cuda_graphs", lambda device: True)
    return made


class _Kept:
    """A step that notes the values which it leaves, before their places are cleared."""

    def __init__(self, step: Any, values: list[Any]) -> None:
        self._step, self._values = step, values

    def run(self, values: list[Any], sizes: Mapping[str, int], settled: bool) -> None:
        self._step.run(values, sizes, settled)
        known = self._values or [None] * len(values)
        self._values[:] = [
            new if new is not None else old for old, new in zip(known, values, strict=True)
        ]
