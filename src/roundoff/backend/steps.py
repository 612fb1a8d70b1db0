"""What a program does one after the other: partitions for ONNX Runtime, and kernels of our own.

Equal partitions share a session, which takes 75 to 100 MiB of a GPU, and a value is let go of when
no step reads it any more: layers after layers take no more than one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import onnx
import torch

from roundoff.evaluator.values import to_value
from roundoff.fusion.editor import Dim, static
from roundoff.ort import OrtSession
from roundoff.ort.binding import translated

from .sizes import evaluate

#: What runs a node of domain "roundoff": (input tensors, attributes) -> output tensors.
Kernel = Callable[[Sequence[Any], dict[str, Any]], Sequence[torch.Tensor]]
#: Symbolic sizes -> a new tensor.
Maker = Callable[[Mapping[str, int]], torch.Tensor]


@dataclasses.dataclass
class Slot:
    """A value of the program: where it lies in the list of values, its type and its sizes.

    Sizes are numbers or expressions of symbols.
    """

    index: int
    shape: tuple[Dim, ...]
    dtype: torch.dtype
    onnx_type: int

    def maker(self, device: torch.device) -> Maker:
        """What allocates this value."""

        def make(sizes: Mapping[str, int]) -> torch.Tensor:
            shape = [evaluate(d, sizes) for d in self.shape]
            return torch.empty(shape, dtype=self.dtype, device=device)

        return make


def signature(model: onnx.ModelProto) -> tuple[bytes, list[str]]:
    """What decides a model's computation whatever its values are called, and those names.

    Two models of which the first result is the same compute the same of values with other names,
    which correspond in their order. No node has a graph of its own.
    """
    names: dict[str, str] = {}

    def number(name: str) -> str:
        return names.setdefault(name, str(len(names))) if name else ""

    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    graph = plain.graph
    for node in graph.node:
        node.ClearField("name")
        node.input[:] = [number(n) for n in node.input]
        node.output[:] = [number(n) for n in node.output]
        node.ClearField("metadata_props")
    for values in (graph.input, graph.output, graph.value_info, graph.initializer):
        for value in values:
            value.name = number(value.name)
        values.sort(key=lambda value: int(value.name))
    return plain.SerializeToString(deterministic=True), list(names)


def unread_after(steps: Sequence[Step], returned: Container[int]) -> list[list[int]]:
    """After each step: values of the steps' own that no later one reads, and none is returned."""
    last = {index: at for at, step in enumerate(steps) for index in step.reads}
    gone: list[list[int]] = [[] for _ in steps]
    for at, step in enumerate(steps):
        for index in [*step.made, *(slot.index for slot in step.passed)]:
            if index not in returned:
                gone[last.get(index, at)].append(index)
    return gone


class Partition:
    """One session with its inputs and outputs bound by address; only what moved is bound again.

    Parameters
    ----------
    session : OrtSession
        Equal partitions may have the same: each binds for itself.
    slots : mapping
        Name of the session's -> where that value lies here.
    device : torch.device
    passed : container of str
        The session's names of what it makes for later steps.
    steady : container of str
        Those of what lies where it lay at most runs.
    """

    made: tuple[int, ...] = ()

    def __init__(
        self,
        session: OrtSession,
        slots: Mapping[str, Slot],
        device: torch.device,
        passed: Container[str],
        steady: Container[str],
    ) -> None:
        self.session = session
        self._io = session.raw.io_binding()
        self._run = functools.partial(session.raw.run_with_iobinding, self._io, session.run_options)
        self._place = (device.type, device.index or 0)
        self.names = [*session.input_names, *session.output_names]
        self._slots = [slots[n] for n in self.names]
        self._places = [slot.index for slot in self._slots]
        # Addresses in use, and sizes where they move.
        self._bound: list[Any] = [-1] * len(self.names)
        self._moving = [not static(*slot.shape) for slot in self._slots]
        # What stays where it is, and what does not: weights are too many to look at one by one.
        copied = session.on_processor
        self._steady = [
            i
            for i, n in enumerate(self.names)
            if n in steady and not self._moving[i] and n not in copied
        ]
        # On a GPU: what a node of the processor reads, copied for each run.
        self._copied = [i for i, n in enumerate(session.input_names) if n in copied]
        self._copies: dict[int, torch.Tensor] = {}
        apart = {*self._steady, *self._copied}
        self._others = [i for i in range(len(self.names)) if i not in apart]
        #: Values of the program that are read in the processor's memory.
        self.on_processor = {slots[n].index: n for n in session.input_names if n in copied}
        # A tensor without elements has no address, and ONNX Runtime wants one.
        self._nowhere = torch.empty(1, device=device)
        self.passed = [slots[n] for n in session.output_names if n in passed]
        self.reads = [slots[n].index for n in session.input_names]

    def run(self, values: list[Any], sizes: Mapping[str, int], settled: bool) -> None:
        bound, moving, places = self._bound, self._moving, self._places
        if not settled:
            for i in self._steady:
                tensor = values[places[i]]
                if tensor.data_ptr() != bound[i]:
                    self._bind(i, tensor)
        for i in self._copied:  # bound where it lies, what it holds now would be read ever after
            self._copies[i] = values[places[i]].cpu()
            self._bind(i, self._copies[i])
        for i in self._others:
            tensor = values[places[i]]
            if tensor.data_ptr() != bound[i] or moving[i]:
                self._bind(i, tensor)
        try:
            self._run()
        except Exception as e:
            # Of a session that equal partitions share, names are those of the first.
            raise translated(e, "ONNX Runtime fails in the run") from e

    def _bind(self, i: int, tensor: Any) -> None:
        at, name, slot = tensor.data_ptr(), self.names[i], self._slots[i]
        key = at or self._nowhere.data_ptr()
        if i < len(self.session.input_names):
            place = self._place if tensor.device.type != "cpu" else ("cpu", 0)
            self._io.bind_input(name, *place, slot.onnx_type, tuple(tensor.shape), key)
            if place[0] != self._place[0]:
                at = -1  # copied now: what is written there is seen where it is bound again
        else:
            self._io.bind_output(name, *self._place, slot.onnx_type, tuple(tensor.shape), key)
        self._bound[i] = at


class KernelStep:
    """One node of domain "roundoff", whose kernel makes its outputs."""

    passed: tuple[Slot, ...] = ()

    def __init__(self, node: onnx.NodeProto, slots: Mapping[str, Slot], kernel: Kernel) -> None:
        self._kernel = kernel
        self._attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        #: The operator that draws random numbers by torch's generator; else empty.
        self.draws: str = getattr(kernel, "draws", "")
        self._inputs = [slots[i].index if i else None for i in node.input]
        self._outputs = [slots[o].index if o else None for o in node.output]
        self.reads = [i for i in self._inputs if i is not None]
        self.made = [o for o in self._outputs if o is not None]

    def run(self, values: list[Any], sizes: Mapping[str, int], settled: bool) -> None:
        inputs = [None if i is None else values[i] for i in self._inputs]
        outputs = self._kernel(inputs, self._attributes)
        for index, tensor in zip(self._outputs, outputs, strict=False):
            if index is not None:
                values[index] = tensor


Step = Partition | KernelStep


def constant(tensor: onnx.TensorProto, device: torch.device) -> torch.Tensor:
    """A constant that a kernel of ours reads."""
    with torch.inference_mode(False):  # else a call outside of it could not use it
        value: torch.Tensor = to_value(onnx.numpy_helper.to_array(tensor))
        return value.to(device)
