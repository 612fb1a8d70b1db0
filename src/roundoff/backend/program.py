"""A model as steps: partitions that ONNX Runtime runs, and kernels of our own between them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import onnx
import torch

from roundoff.dtypes import onnx_dtype_to_torch_dtype
from roundoff.errors import ModelError
from roundoff.fusion.editor import Dim, static
from roundoff.fusion.products import Into
from roundoff.ort import OrtSession, session
from roundoff.ort.binding import CUDA, translated
from roundoff.ort.tensors import from_ort

from .sizes import evaluate, known

__all__ = [
    *("CudaGraphProgram", "Program", "addresses", "partitions", "picked", "split_precomputed"),
    *("unmoved", "without_counts"),
]

#: What runs a node of domain "roundoff": (input tensors, attributes) -> output tensors, or one that
#: writes into tensors that it is passed.
TorchKernel = Callable[[Sequence[Any], dict[str, Any]], Sequence[torch.Tensor]] | Into
#: Symbolic sizes -> a new tensor.
Maker = Callable[[Mapping[str, int]], torch.Tensor]
_NO_SIZES: Mapping[str, int] = {}
#: Written outputs up to this many elements keep memory of their own: they are copied from it.
_SMALL = 256


def picked(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes the items at *places* from a list, in their order."""
    first = places[0] if places else 0
    if list(places) == list(range(first, first + len(places))):
        return operator.itemgetter(slice(first, first + len(places)))
    return operator.itemgetter(*places)


def addresses(places: Sequence[int]) -> Callable[[Sequence[Any]], list[int]]:
    """What tells where the tensors at *places* of a list lie."""
    pick, address = picked(places), torch.Tensor.data_ptr
    return lambda tensors: list(map(address, pick(tensors)))


def unmoved(
    places: Sequence[int], known: Sequence[int], tensors: list[Any]
) -> Callable[[Sequence[Any]], bool]:
    """What tells whether the tensors at *places* of a list still lie at the *known* addresses.

    torch built for CUDA compares them in C++, in a fraction of the time that a call for each
    address takes; not public, it is asked here for what it must say of these *tensors*.
    """
    compare = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    if compare is not None and places:
        where: list[int | None] = [None] * len(tensors)
        for i, at in zip(places, known, strict=True):
            where[i] = at
        others = [w if w is None else w + 1 for w in where]
        indices = list(places)
        with contextlib.suppress(TypeError, RuntimeError, IndexError, ValueError):
            if compare(tensors, where, indices) and not compare(tensors, others, indices):
                return lambda tensors: compare(tensors, where, indices)
    look, same = addresses(places), list(known)
    return lambda tensors: look(tensors) == same


@dataclasses.dataclass
class Slot:
    """A value of the program: where it lies in the list of values, its type and its sizes.

    Sizes are numbers or expressions of symbols; None where only the run decides them.
    """

    index: int
    shape: tuple[Dim, ...] | None
    dtype: torch.dtype
    onnx_type: int

    @property
    def moving(self) -> bool:
        """Whether its sizes may differ from call to call."""
        return self.shape is None or not static(*self.shape)

    @property
    def elements(self) -> int:
        """How many, of sizes that are numbers."""
        return math.prod(int(n) for n in self.shape or ())

    def maker(self, device: torch.device) -> Maker:
        """What allocates this value; with strides given, in half the time of torch.empty."""
        if self.moving:
            return functools.partial(self._sized, device)
        shape = tuple(int(n) for n in self.shape or ())
        strides = [math.prod(n or 1 for n in shape[i + 1 :]) for i in range(len(shape))]
        make = functools.partial(
            torch.empty_strided, shape, tuple(strides), dtype=self.dtype, device=device
        )
        return lambda sizes: make()

    def _sized(self, device: torch.device, sizes: Mapping[str, int]) -> torch.Tensor:
        shape = [evaluate(d, sizes) for d in self.shape or ()]
        return torch.empty(shape, dtype=self.dtype, device=device)


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


def without_counts(
    model: onnx.ModelProto, written: Mapping[str, str]
) -> tuple[onnx.ModelProto, dict[str, int]]:
    """The model without counting, and what is added to which written output, by one call for all.

    A cache's length is such: each layer has its own, and an `Add` for it takes as long to launch
    as one that does work.

    Parameters
    ----------
    model : onnx.ModelProto
    written : mapping
        Written output -> the input whose new values it has.
    """
    graph = model.graph
    read = {i for n in graph.node for i in n.input}
    numbers = {t.name: t for t in graph.initializer
               if t.data_type == onnx.TensorProto.INT64 and math.prod(t.dims) == 1}  # fmt: skip
    single = {v.name for v in graph.output
              if v.type.tensor_type.elem_type == onnx.TensorProto.INT64
              and all(d.dim_value == 1 for d in v.type.tensor_type.shape.dim)}  # fmt: skip
    counts: dict[str, int] = {}
    for node in graph.node:
        output, inputs = node.output[0], list(node.input)
        if node.op_type != "Add" or output not in single or output in read:
            continue
        at = [i for i in inputs if i in numbers]
        if len(at) == 1 and written.get(output) in inputs:
            counts[output] = int(onnx.numpy_helper.to_array(numbers[at[0]]).item())
    rest = [n for n in graph.node if n.output[0] not in counts]
    if not counts or not rest:
        return model, {}
    left = [o.name for o in graph.output if o.name not in counts]
    return _submodel(model, rest, left), counts


def _between(groups: Sequence[Sequence[onnx.NodeProto]]) -> set[str]:
    """What passes from one group of nodes to another, or is a kernel's."""
    made = {o: at for at, nodes in enumerate(groups) for n in nodes for o in n.output}
    return {
        name
        for at, nodes in enumerate(groups)
        for n in nodes
        for name in [*n.input, *(n.output if n.domain == "roundoff" else ())]
        if n.domain == "roundoff" or made.get(name, at) != at
    }


def written_in_place(model: onnx.ModelProto) -> dict[str, str]:
    """Outputs that may lie where an input does -> that input.

    Those are an input with some elements replaced, whose old elements nothing else reads: ONNX
    Runtime copies the rest only where the two lie apart.
    """
    readers: dict[str, int] = {}
    for node in model.graph.node:
        for name in node.input:
            readers[name] = readers.get(name, 0) + 1
    inputs = {i.name for i in model.graph.input}
    returned = {o.name for o in model.graph.output}
    return {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type in ("ScatterElements", "ScatterND", "TensorScatter")
        and node.output[0] in returned
        and node.output[0].startswith("written_")
        and node.input[0] in inputs
        and readers[node.input[0]] == 1
    }


class Program:
    """A model ready to run on one device, with torch tensors in and out and no copies.

    Parameters
    ----------
    model : onnx.ModelProto
        Nodes of domain "roundoff" run as kernels.
    device : torch.device
    kernels : mapping
        Operator of domain "roundoff" -> :data:`TorchKernel`.
    tf32 : bool
    providers : sequence, optional
        As :func:`roundoff.ort.session` takes them.
    symbols : iterable of str
        Symbolic sizes whose values each run is told, beside those of the model's inputs.
    steady : iterable of str
        Inputs that rarely move, weights and caches: a run may be told that they lie where they did.

    Notes
    -----
    Runs share buffers: let no two go on at a time.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        device: torch.device,
        kernels: Mapping[str, TorchKernel],
        tf32: bool = False,
        providers: Sequence[Any] | None = None,
        symbols: Iterable[str] = (),
        steady: Iterable[str] = (),
    ) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        graph = model.graph
        self.inputs = [i.name for i in graph.input]
        self.outputs = [o.name for o in graph.output]
        self._slots: dict[str, Slot] = {}
        # What the caller will say: sizes of inputs, and integers.
        sizes = [d.dim_param for i in graph.input for d in i.type.tensor_type.shape.dim]
        self._symbols = {n for n in [*sizes, *self.inputs, *symbols] if n.isidentifier()}
        groups = partitions(model)
        between = _between(groups)  # what one partition computes for itself needs no place
        for value in [*graph.input, *graph.value_info, *graph.output]:
            if value.name in between or value.name in self.inputs or value.name in self.outputs:
                self._slot(value)
        stored = {t.name: t for t in graph.initializer}
        wanted = [i for n in graph.node if n.domain == "roundoff" for i in n.input if i in stored]
        constants = {name: _constant(stored[name], device) for name in wanted}
        for name, tensor in constants.items():
            kind = stored[name].data_type
            self._slot(onnx.helper.make_tensor_value_info(name, kind, list(tensor.shape)))
        self.sessions: list[OrtSession] = []
        self.steps: list[_Partition | _KernelStep | _IntoStep] = []
        #: Values for which a kernel makes new memory at each run.
        self._made = {
            o
            for n in graph.node
            if n.domain == "roundoff" and not isinstance(kernels.get(n.op_type), Into)
            for o in n.output
        }
        #: Outputs that are written where an input lies.
        self.in_place = in_place = {
            o: i for o, i in written_in_place(model).items() if self._slots[o].shape is not None
        }
        for output, name in in_place.items():  # one place for both
            self._slots[output].index = self._slots[name].index
        apart = [n for n in self.outputs if n not in {*in_place, *self._made}]
        #: Outputs with memory of their own, which the next run overwrites.
        self.kept: dict[str, torch.Tensor] = {}
        with torch.inference_mode(False):  # else a call outside of it could not write them
            for name in filter(self._is_kept, apart):
                self.kept[name] = self._slots[name].maker(device)(_NO_SIZES)
        self._new = [
            (self._slots[n].index, self._slots[n].maker(device))
            for n in apart
            if n not in self.kept and self._slots[n].shape is not None
        ]
        # Values that no input gives: constants, and places for what a run computes.
        self._blank: list[Any] = [None] * (len(self._slots) - len(self.inputs))
        for name, tensor in (constants | self.kept).items():
            self._blank[self._slots[name].index - len(self.inputs)] = tensor
        self._out = picked([self._slots[n].index for n in self.outputs])
        self._steady = set(steady)
        self._steady |= {o for o, i in in_place.items() if i in self._steady}
        self._steady |= self.kept.keys()
        read = {i for n in graph.node if n.domain == "roundoff" for i in n.input}
        #: Places of the inputs that a settled run reads: the others are bound.
        self.live = [
            at
            for at, n in enumerate(self.inputs)
            if n not in self._steady or n in read or self._slots[n].moving
        ]
        self._by_kernel = [i for i, n in enumerate(self.outputs) if n in self._made]
        chosen = list(providers or [CUDA if self.cuda else "CPUExecutionProvider"])
        for group in groups:
            if group[0].domain == "roundoff":
                self.steps.append(self._kernel(group[0], kernels))
            else:
                self._add_partition(model, group, chosen, tf32)

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
        sizes: list[Dim | None] = [
            d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in kind.shape.dim
        ]
        decided = [d for d in sizes if d is not None and known(d, self._symbols)]
        self._slots[value.name] = Slot(
            len(self._slots),
            tuple(decided) if len(decided) == len(sizes) and kind.HasField("shape") else None,
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
        # ONNX Runtime would keep a plan of the memory for each set of sizes that it ever sees.
        moving = not self.cuda and any(self._slots[i.name].moving for i in part.graph.input)
        options = {"enable_mem_pattern": False} if moving else None
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            self.sessions.append(session(part, providers, tf32=tf32, session_options=options))
        moving_names = {*self.inputs, *self.outputs, *self._made} - self._steady
        self.steps.append(
            _Partition(self.sessions[-1], self._slots, self.device, set(self.outputs), moving_names)
        )

    def _is_kept(self, name: str) -> bool:
        """Whether an output keeps its memory: it is copied to where it belongs after each run."""
        slot = self._slots[name]
        return name.startswith("written_") and not slot.moving and slot.elements <= _SMALL

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        sizes: Mapping[str, int] = _NO_SIZES,
        settled: bool = False,
    ) -> list[torch.Tensor]:
        """Run once. *inputs* are contiguous, in the order of ``self.inputs``, on the device.

        Parameters
        ----------
        inputs : sequence of torch.Tensor
        sizes : mapping
            Symbolic size -> its value.
        settled : bool
            Whether the steady inputs are where they were in the run before: then only those of
            ``self.live`` are looked at.

        Returns
        -------
        list of torch.Tensor
            New memory, in the order of ``self.outputs``. Those named ``written_`` are overwritten
            by the next run; those of ``self.in_place`` are the inputs themselves.
        """
        if self.stream is None:
            return self._steps(inputs, sizes, settled)
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        outputs = self._steps(inputs, sizes, settled)
        current.wait_stream(self.stream)
        for i in self._by_kernel:  # allocated on our stream, and now read on another
            outputs[i].record_stream(current)
        return outputs

    def _steps(
        self, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int], settled: bool
    ) -> list[torch.Tensor]:
        values = [*inputs, *self._blank]
        # On the caller's stream, whose allocator will reuse them when it frees them.
        for index, empty in self._new:
            values[index] = empty(sizes)
        if self.stream is None:
            for step in self.steps:
                step.run(values, sizes, settled)
        else:
            with torch.cuda.stream(self.stream):
                for step in self.steps:
                    step.run(values, sizes, settled)
        return list(self._out(values))

    def capture(
        self, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int]
    ) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
        """Record one run as a CUDA graph, over these very inputs; (graph, outputs)."""
        for _ in range(2):  # arenas and workspaces grow now: nothing may be allocated later
            self.run(inputs, sizes)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            outputs = self._steps(inputs, sizes, True)
        return graph, outputs


class CudaGraphProgram:
    """A program replayed as a CUDA graph; its outputs are overwritten by the next run.

    Parameters
    ----------
    program : Program
    moving : sequence of bool
        For each input, whether to copy it where the graph reads it. The others are read where
        they lie, and the graph is recorded again when one of them has moved.
    copy : bool
        Whether to return copies of the outputs, which the next run leaves alone.
    """

    most = 8  # graphs are kept for this many sets of sizes

    def __init__(self, program: Program, moving: Sequence[bool], copy: bool = False) -> None:
        self._program, self._copy = program, copy
        self._moving = [i for i, m in enumerate(moving) if m]
        self._addresses = addresses([i for i, m in enumerate(moving) if not m])
        self._at: list[int] = []  # where the inputs lie that are not copied
        self._recorded: dict[Any, _Recorded] = {}

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        sizes: Mapping[str, int] = _NO_SIZES,
        settled: bool = False,
    ) -> list[torch.Tensor]:
        """As :meth:`Program.run`, over memory that stays."""
        if not settled:
            self._at = self._addresses(inputs)
        key = tuple(sizes.values())
        recorded = self._recorded.get(key)
        if recorded is None or recorded.addresses != self._at:
            self._recorded.pop(key, None)
            while len(self._recorded) >= self.most:
                self._recorded.pop(next(iter(self._recorded)))
            copies = list(inputs)
            for i in self._moving:
                copies[i] = inputs[i].clone()
            recorded = _Recorded(self._at, copies, *self._program.capture(copies, sizes))
            self._recorded[key] = recorded
        for i in self._moving:
            recorded.inputs[i].copy_(inputs[i])
        recorded.graph.replay()
        if not self._copy:
            return list(recorded.outputs)
        # What was written is the caller's cache itself, or is copied to where it belongs.
        names = self._program.outputs
        return [o if n.startswith("written_") else o.clone()
                for n, o in zip(names, recorded.outputs, strict=True)]  # fmt: skip


@dataclasses.dataclass
class _Recorded:
    """A CUDA graph, and the memory that it reads and writes."""

    addresses: list[int]
    inputs: list[torch.Tensor]
    graph: torch.cuda.CUDAGraph
    outputs: list[torch.Tensor]


class _Buffers:
    """Memory for what passes from step to step: one for each value, as long as its sizes stay."""

    def __init__(self, slots: Sequence[Slot], device: torch.device) -> None:
        self._makers = [(s.index, s.moving, s.maker(device)) for s in slots if s.shape is not None]
        self._moving = any(s.moving for s in slots)
        self._sizes: tuple[int, ...] = ()
        self._buffers: dict[int, torch.Tensor] = {}

    def into(self, values: list[Any], sizes: Mapping[str, int]) -> None:
        """Put the buffers among the values."""
        first = not self._buffers
        if self._makers and (first or (self._moving and self._sizes != tuple(sizes.values()))):
            with torch.inference_mode(False):  # else a call outside of it could not write them
                for index, moving, make in self._makers:
                    if first or moving:  # the address of the others is bound
                        self._buffers[index] = make(sizes)
            self._sizes = tuple(sizes.values())
        for index, buffer in self._buffers.items():
            values[index] = buffer


class _Partition:
    """One session with its inputs and outputs bound by address; only what moved is bound again."""

    def __init__(
        self,
        session: OrtSession,
        slots: dict[str, Slot],
        device: torch.device,
        returned: set[str],
        moving: set[str],
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
        self._moving = [slot.moving for slot in self._slots]
        # What stays where it is, and what does not: weights are too many to look at one by one.
        unknown = [slot.shape is None for slot in self._slots]
        self._steady = [i for i, n in enumerate(self.names)
                        if n not in moving and not unknown[i] and not self._moving[i]]  # fmt: skip
        self._others = [i for i in range(len(self.names)) if i not in set(self._steady)]
        # A tensor without elements has no address, and ONNX Runtime wants one.
        self._nowhere = torch.empty(1, device=device)
        # What passes from step to step keeps one buffer; what is returned is new each time.
        made = [slots[n] for n in session.output_names]
        self.buffers = _Buffers(
            [s for n, s in zip(session.output_names, made, strict=True) if n not in returned],
            device,
        )
        # Outputs whose sizes the run alone decides: ONNX Runtime allocates them.
        self._unknown = [(i, s.index) for i, s in enumerate(made) if s.shape is None]
        self._first = len(session.input_names)

    def run(self, values: list[Any], sizes: Mapping[str, int], settled: bool) -> None:
        self.buffers.into(values, sizes)
        for i, index in self._unknown:
            values[index] = None
            self._bound[self._first + i] = ()
        bound, moving, places = self._bound, self._moving, self._places
        if not settled:
            for i in self._steady:
                self._bind(i, values[places[i]])
        for i in self._others:
            tensor = values[places[i]]
            if tensor is None:
                self._io.bind_output(self.names[i], *self._place)
            elif tensor.data_ptr() != bound[i] or moving[i]:
                self._bind(i, tensor)
        try:
            self._run()
        except Exception as e:
            raise translated(e, "ONNX Runtime fails in the run") from e
        if self._unknown:
            outputs = self._io.get_outputs()
            for i, index in self._unknown:
                values[index] = from_ort(outputs[i])

    def _bind(self, i: int, tensor: Any) -> None:
        at, name, slot = tensor.data_ptr(), self.names[i], self._slots[i]
        key = at or self._nowhere.data_ptr()
        if i < len(self.session.input_names):
            place = self._place if tensor.device.type != "cpu" else ("cpu", 0)
            self._io.bind_input(name, *place, slot.onnx_type, tuple(tensor.shape), key)
        else:
            self._io.bind_output(name, *self._place, slot.onnx_type, tuple(tensor.shape), key)
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

    def run(self, values: list[Any], sizes: Mapping[str, int], settled: bool) -> None:
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
        self.buffers = _Buffers([slots[o] for o in node.output if o not in returned], device)

    def run(self, values: list[Any], sizes: Mapping[str, int], settled: bool) -> None:
        self.buffers.into(values, sizes)
        inputs = [values[i] for i in self._inputs]
        self._kernel(inputs, [values[o] for o in self._outputs], self._attributes)


def _constant(tensor: onnx.TensorProto, device: torch.device) -> torch.Tensor:
    """A constant that a kernel of ours reads."""
    from roundoff.evaluator.values import to_value

    with torch.inference_mode(False):  # else a call outside of it could not use it
        value: torch.Tensor = to_value(onnx.numpy_helper.to_array(tensor))
        return value.to(device)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
