"""A model as steps: partitions that ONNX Runtime runs, and kernels of our own between them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import onnx
import torch

from roundoff.dtypes import onnx_dtype_to_torch_dtype
from roundoff.errors import ModelError
from roundoff.fusion.products import Into
from roundoff.ort import OrtSession, session
from roundoff.ort.binding import CUDA, translated

__all__ = ["CudaGraphProgram", "Program", "partitions", "split_precomputed"]

#: What runs a node of domain "roundoff": (input tensors, attributes) -> output tensors, or one that
#: writes into tensors that it is passed.
TorchKernel = Callable[[Sequence[Any], dict[str, Any]], Sequence[torch.Tensor]] | Into


@dataclasses.dataclass
class Slot:
    """A value of the program: where it lies in the list of values, and its static type."""

    index: int
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    onnx_type: int

    def maker(self, device: torch.device) -> Callable[[], torch.Tensor]:
        """What allocates this value; with strides given, in half the time of torch.empty."""
        shape = self.shape
        assert shape is not None
        strides = [math.prod(n or 1 for n in shape[i + 1 :]) for i in range(len(shape))]
        return functools.partial(
            torch.empty_strided, shape, tuple(strides), dtype=self.dtype, device=device
        )


def partitions(model: onnx.ModelProto) -> list[list[onnx.NodeProto]]:
    """The nodes in an order of execution, grouped: partitions for ONNX Runtime, single kernels.

    Whatever can run in ONNX Runtime before the next kernel of ours does, so that partitions are
    few.
    """
    known = {"", *(i.name for i in model.graph.input), *(i.name for i in model.graph.initializer)}
    waiting = list(model.graph.node)
    groups: list[list[onnx.NodeProto]] = []
    while waiting:
        partition: list[onnx.NodeProto] = []
        for ours in (False, True):
            rest = []
            for node in waiting:
                ready = all(i in known for i in node.input)
                if ready and (node.domain == "roundoff") == ours:
                    known.update(node.output)
                    if ours:
                        groups.append([node])
                    else:
                        partition.append(node)
                else:
                    rest.append(node)
            moved, waiting = len(rest) < len(waiting), rest
            if not ours and partition:
                groups.append(partition)
            if ours and not moved and not partition:
                raise ModelError("a node waits for a value that nothing computes",
                                 got=waiting[0].name)  # fmt: skip
    return groups


def split_precomputed(
    model: onnx.ModelProto, static: Iterable[str]
) -> tuple[onnx.ModelProto, onnx.ModelProto | None]:
    """(what to run at each call, what to run when a static input has changed).

    The second computes all that depends on static inputs alone; its outputs are inputs of the
    first, under the same names. None where there is nothing of that kind.
    """
    known = {"", *static, *(i.name for i in model.graph.initializer)}
    precomputed, rest = [], []
    for node in model.graph.node:
        if all(i in known for i in node.input) and node.domain != "roundoff":
            known.update(node.output)
            precomputed.append(node)
        else:
            rest.append(node)
    if not precomputed:
        return model, None
    values = {o for n in precomputed for o in n.output}
    needed = {i for n in rest for i in n.input} | {o.name for o in model.graph.output}
    shared = [o for n in precomputed for o in n.output if o in needed]
    # Outputs that nothing but weights decide are returned through the second model as well.
    each_call = [o.name for o in model.graph.output if o.name not in values]
    return _submodel(model, rest, each_call), _submodel(model, precomputed, shared)


def _submodel(
    model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]
) -> onnx.ModelProto:
    """The model of some nodes; what they read and do not compute themselves is an input."""
    graph = model.graph
    known = {v.name: v for v in [*graph.value_info, *graph.input, *graph.output]}
    stored = {i.name: i for i in graph.initializer}
    computed = {o for n in nodes for o in n.output}
    read = dict.fromkeys(i for n in nodes for i in n.input if i and i not in computed)
    inputs = [i.name for i in graph.input if i.name in read]
    inputs += [n for n in read if n not in inputs and n not in stored]
    subgraph = onnx.helper.make_graph(
        list(nodes),
        graph.name,
        [known[n] for n in inputs],
        [known[n] for n in outputs],
        [stored[n] for n in read if n in stored],
        value_info=[known[n] for n in computed if n in known and n not in outputs],
    )
    return onnx.helper.make_model(
        subgraph, opset_imports=list(model.opset_import), ir_version=model.ir_version
    )


class Program:
    """A model ready to run on one device, with torch tensors in and out and no copies.

    Parameters
    ----------
    model : onnx.ModelProto
        Static shapes; nodes of domain "roundoff" run as kernels.
    device : torch.device
    kernels : mapping
        Operator of domain "roundoff" -> :data:`TorchKernel`.
    tf32 : bool
    providers : sequence, optional
        As :func:`roundoff.ort.session` takes them.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        device: torch.device,
        kernels: Mapping[str, TorchKernel],
        tf32: bool = False,
        providers: Sequence[Any] | None = None,
    ) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        graph = model.graph
        self.inputs = [i.name for i in graph.input]
        self.outputs = [o.name for o in graph.output]
        self._slots: dict[str, Slot] = {}
        for value in [*graph.input, *graph.value_info, *graph.output]:
            self._slot(value)
        self._blank: list[Any] = [None] * len(self._slots)
        self.sessions: list[OrtSession] = []
        self.steps: list[_Partition | _KernelStep | _IntoStep] = []
        self._lock = threading.Lock()
        self._in = [self._slots[n].index for n in self.inputs]
        self._out = [self._slots[n].index for n in self.outputs]
        by_kernel = {
            o
            for n in graph.node
            if n.domain == "roundoff" and not isinstance(kernels.get(n.op_type), Into)
            for o in n.output
        }
        self._new = [
            (self._slots[n].index, self._slots[n].maker(device))
            for n in self.outputs
            if n not in by_kernel
        ]
        self._by_kernel = [i for i, n in enumerate(self.outputs) if n in by_kernel]
        chosen = list(providers or [CUDA if self.cuda else "CPUExecutionProvider"])
        for group in partitions(model):
            if group[0].domain == "roundoff":
                self.steps.append(self._kernel(group[0], kernels))
            else:
                self._add_partition(model, group, chosen, tf32)
        #: The one step that is the whole program.
        self._whole: _Partition | None = None
        first = self.steps[0] if len(self.steps) == 1 and not self.cuda else None
        if isinstance(first, _Partition) and first.names == self.inputs + self.outputs:
            self._whole = first

    def _kernel(
        self, node: onnx.NodeProto, kernels: Mapping[str, TorchKernel]
    ) -> _KernelStep | _IntoStep:
        kernel = kernels.get(node.op_type)
        if kernel is None:
            raise ModelError("no kernel of ours has this name", got=node.op_type,
                             expected=", ".join(sorted(kernels)))  # fmt: skip
        if isinstance(kernel, Into):
            return _IntoStep(node, self._slots, kernel, self.device, set(self.outputs))
        return _KernelStep(node, self._slots, kernel)

    def _slot(self, value: onnx.ValueInfoProto) -> None:
        if value.name in self._slots:
            return
        kind = value.type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]
        static = tuple(d for d in dims if d is not None)
        self._slots[value.name] = Slot(
            len(self._slots),
            static if len(static) == len(dims) else None,
            onnx_dtype_to_torch_dtype(kind.elem_type),
            kind.elem_type,
        )

    def _add_partition(
        self,
        model: onnx.ModelProto,
        nodes: list[onnx.NodeProto],
        providers: list[Any],
        tf32: bool,
    ) -> None:
        inside = {n.name for n in nodes}
        outside = {i for n in model.graph.node if n.name not in inside for i in n.input}
        needed = outside | set(self.outputs)
        outputs = {o for n in nodes for o in n.output if o and o in needed}
        returned = [o for o in self.outputs if o in outputs]
        part = _submodel(model, nodes, returned + sorted(outputs.difference(returned)))
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            self.sessions.append(session(part, providers, tf32=tf32))
        returned_names = set(self.outputs)
        self.steps.append(_Partition(self.sessions[-1], self._slots, self.device, returned_names))

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run once. *inputs* are contiguous, in the order of ``self.inputs``, on the device.

        Returns
        -------
        list of torch.Tensor
            New memory, in the order of ``self.outputs``.
        """
        with self._lock:
            if self.stream is None:
                return self._steps(inputs)
            current = torch.cuda.current_stream(self.device)
            self.stream.wait_stream(current)
            outputs = self._steps(inputs)
            current.wait_stream(self.stream)
            for i in self._by_kernel:  # allocated on our stream, and now read on another
                outputs[i].record_stream(current)
            return outputs

    def _steps(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._whole is not None:  # the list of values would take longer than a small run
            outputs = [empty() for _, empty in self._new]
            self._whole.call([*inputs, *outputs])
            return outputs
        values = self._blank.copy()
        for index, tensor in zip(self._in, inputs):  # noqa: B905 - each microsecond counts here
            values[index] = tensor
        # On the caller's stream, whose allocator will reuse them when it frees them.
        for index, empty in self._new:
            values[index] = empty()
        if self.stream is None:
            for step in self.steps:
                step.run(values)
        else:
            with torch.cuda.stream(self.stream):
                for step in self.steps:
                    step.run(values)
        return [values[index] for index in self._out]

    def capture(
        self, inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
        """Record one run as a CUDA graph, over these very inputs; (graph, outputs)."""
        for _ in range(2):  # arenas and workspaces grow now: nothing may be allocated later
            self.run(inputs)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            outputs = self._steps(inputs)
        return graph, outputs


class CudaGraphProgram:
    """A program replayed as a CUDA graph; its outputs are overwritten by the next run.

    Parameters
    ----------
    program : Program
    moving : sequence of bool
        For each input, whether to copy it where the graph reads it. The others are read where
        they lie, and the graph is recorded again when one of them has moved.
    """

    def __init__(self, program: Program, moving: Sequence[bool]) -> None:
        self._program, self._moving = program, moving
        self._key: tuple[int, ...] | None = None
        self._inputs: list[torch.Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: list[torch.Tensor] = []

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As :meth:`Program.run`, over memory that stays."""
        key = tuple(t.data_ptr() for t, m in zip(inputs, self._moving, strict=True) if not m)
        if key != self._key or self._graph is None:
            self._inputs = [
                t.clone() if m else t for t, m in zip(inputs, self._moving, strict=True)
            ]
            self._graph, self._outputs = self._program.capture(self._inputs)
            self._key = key
        for recorded, tensor, m in zip(self._inputs, inputs, self._moving, strict=True):
            if m:
                recorded.copy_(tensor)
        self._graph.replay()
        return list(self._outputs)


class _Partition:
    """One session with its inputs and outputs bound by address; only what moved is bound again."""

    def __init__(
        self, session: OrtSession, slots: dict[str, Slot], device: torch.device, returned: set[str]
    ) -> None:
        self.session = session
        self._io = session.raw.io_binding()
        self._run = functools.partial(session.raw.run_with_iobinding, self._io, session.run_options)
        self._place = (device.type, device.index or 0)
        self.names = [*session.input_names, *session.output_names]
        self._slots = [slots[n] for n in self.names]
        self._places = [slot.index for slot in self._slots]
        self._bound: list[int | None] = [None] * len(self.names)  # addresses in use
        # A tensor without elements has no address, and ONNX Runtime wants one.
        self._nowhere = torch.empty(1, device=device)
        # What passes from step to step keeps one buffer; what is returned is new each time.
        self.buffers = {
            s.index: torch.empty(s.shape, dtype=s.dtype, device=device)  # type: ignore[arg-type]
            for n, s in zip(self.names, self._slots, strict=True)
            if n in session.output_names and n not in returned
        }

    def run(self, values: list[Any]) -> None:
        for index, buffer in self.buffers.items():
            values[index] = buffer
        self.call([values[index] for index in self._places])

    def call(self, tensors: Sequence[torch.Tensor]) -> None:
        """Run on inputs and outputs, in the order of ``names``."""
        bound = self._bound
        for i, tensor in enumerate(tensors):
            if tensor.data_ptr() != bound[i]:
                self._bind(i, tensor)
        try:
            self._run()
        except Exception as e:
            raise translated(e, "ONNX Runtime fails in the run") from e

    def _bind(self, i: int, tensor: torch.Tensor) -> None:
        at, name, slot = tensor.data_ptr(), self.names[i], self._slots[i]
        key = at or self._nowhere.data_ptr()
        if i < len(self.session.input_names):
            place = self._place if tensor.device.type != "cpu" else ("cpu", 0)
            self._io.bind_input(name, *place, slot.onnx_type, tuple(tensor.shape), key)
        else:
            self._io.bind_output(name, *self._place, slot.onnx_type, slot.shape, key)
        self._bound[i] = at


class _KernelStep:
    """One node of domain "roundoff", whose kernel makes its outputs."""

    def __init__(
        self,
        node: onnx.NodeProto,
        slots: dict[str, Slot],
        kernel: Callable[[Sequence[Any], dict[str, Any]], Sequence[torch.Tensor]],
    ) -> None:
        self._kernel, self._attributes = kernel, _attributes(node)
        self._inputs = [slots[i].index if i else None for i in node.input]
        self._outputs = [slots[o].index if o else None for o in node.output]

    def run(self, values: list[Any]) -> None:
        inputs = [None if i is None else values[i] for i in self._inputs]
        outputs = self._kernel(inputs, self._attributes)
        for index, tensor in zip(self._outputs, outputs, strict=True):
            if index is not None:
                values[index] = tensor


class _IntoStep:
    """One node of domain "roundoff", whose kernel writes into buffers as a partition does."""

    def __init__(
        self,
        node: onnx.NodeProto,
        slots: dict[str, Slot],
        kernel: Into,
        device: torch.device,
        returned: set[str],
    ) -> None:
        self._kernel, self._attributes = kernel.run, _attributes(node)
        self._inputs = [slots[i].index for i in node.input]
        self._outputs = [slots[o].index for o in node.output]
        with torch.inference_mode(False):  # else a call outside of it could not write them
            self.buffers = {
                slots[o].index: torch.empty(slots[o].shape, dtype=slots[o].dtype, device=device)  # type: ignore[arg-type]
                for o in node.output
                if o not in returned
            }

    def run(self, values: list[Any]) -> None:
        for index, buffer in self.buffers.items():
            values[index] = buffer
        inputs = [values[i] for i in self._inputs]
        self._kernel(inputs, [values[o] for o in self._outputs], self._attributes)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
