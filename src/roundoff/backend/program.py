"""A model as steps: partitions that ONNX Runtime runs, and kernels of our own between them."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import operator
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import onnx.utils
import torch

from roundoff.dtypes import onnx_dtype_to_torch_dtype
from roundoff.errors import RoundoffError, UnsupportedError
from roundoff.ort import OrtSession, session
from roundoff.ort.binding import CUDA
from roundoff.timing.harness import no_collection

from .sizes import known
from .steps import Kernel, KernelStep, Partition, Slot, Step, constant, signature, unread_after

_NO_SIZES: Mapping[str, int] = {}


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


def partitions(model: onnx.ModelProto) -> list[list[onnx.NodeProto]]:
    """The nodes in an order of execution, grouped: partitions for ONNX Runtime, single kernels.

    Whatever can run in ONNX Runtime before the next kernel of ours does, so that partitions are
    few.
    """
    known = {"", *(i.name for i in model.graph.input), *(i.name for i in model.graph.initializer)}
    waiting = list(model.graph.node)
    groups: list[list[onnx.NodeProto]] = []
    while waiting:
        before = len(waiting)
        for ours in (False, True):
            group, rest = [], []
            for node in waiting:
                if (node.domain == "roundoff") == ours and known.issuperset(node.input):
                    known.update(node.output)
                    group.append(node)
                else:
                    rest.append(node)
            waiting = rest
            if ours:
                groups += [[node] for node in group]
            elif group:
                groups.append(group)
        assert len(waiting) < before, "a node waits for a value that nothing computes"
    return groups


def split_precomputed(
    model: onnx.ModelProto, static: Iterable[str]
) -> tuple[onnx.ModelProto, onnx.ModelProto | None]:
    """(what to run at each call, what to run when a static input has changed).

    The second computes what depends on static inputs alone, and is not returned; its outputs are
    inputs of the first, under the same names. None where there is nothing of that kind.
    """
    known = {"", *static, *(i.name for i in model.graph.initializer)}
    returned = [o.name for o in model.graph.output]
    precomputed, rest = [], []
    for node in model.graph.node:
        inside = node.domain != "roundoff" and not any(o in returned for o in node.output)
        if inside and all(i in known for i in node.input):
            known.update(node.output)
            precomputed.append(node)
        else:
            rest.append(node)
    if not precomputed:
        return model, None
    needed = {i for n in rest for i in n.input}
    shared = [o for n in precomputed for o in n.output if o in needed]
    return _submodel(model, rest, returned), _submodel(model, precomputed, shared)


def _submodel(
    model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]
) -> onnx.ModelProto:
    """The model of some nodes; what they read and do not compute themselves is an input."""
    apart = {o for n in nodes for o in n.output} | {t.name for t in model.graph.initializer}
    read = dict.fromkeys(i for n in nodes for i in n.input if i and i not in apart)
    first = [i.name for i in model.graph.input if i.name in read]
    inputs = list(dict.fromkeys([*first, *read]))
    return onnx.utils.Extractor(model).extract_model(inputs, list(outputs))


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
    readers = collections.Counter(name for node in model.graph.node for name in node.input)
    inputs = {i.name for i in model.graph.input}
    returned = {o.name for o in model.graph.output}
    return {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type in ("ScatterElements", "TensorScatter")
        and node.output[0] in returned
        and node.output[0].startswith("written_")
        and node.input[0] in inputs
        and readers[node.input[0]] == 1
    }


def sizes_of(value: onnx.ValueInfoProto) -> list[Any]:
    """Sizes, names of sizes, and None for a size, or for a shape, that nothing is known of."""
    if not value.type.tensor_type.HasField("shape"):
        return [None]
    dims = value.type.tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims]


#: ONNX Runtime's optimizer that makes one Split of Slices.
SPLITS_SLICES = "GatherSliceToSplitFusion"


def passes_a_list(model: onnx.ModelProto) -> str:
    """The first Split or Concat whose CUDA kernel is passed a list, by name or output; else empty.

    Of at most three parts, or of equal ones, sizes and addresses are arguments of the kernel. Else
    it reads them from memory of the processor. ONNX Runtime uses that memory again after the run,
    which a replayed CUDA graph does not know, and frees it in a callback of the stream, where CUDA
    forbids it and the process ends.
    """
    graph = model.graph
    sizes = {v.name: sizes_of(v) for v in [*graph.input, *graph.output, *graph.value_info]}
    sizes |= {t.name: list(t.dims) for t in graph.initializer}
    for node in graph.node:
        names = {"Split": node.output, "Concat": node.input}.get(node.op_type, [])
        parts = [sizes.get(name, [None]) for name in names]
        if len(parts) > 3 and any(None in part or part != parts[0] for part in parts):
            return str(node.name or node.output[0])
    return ""


class _MemcpyNode(ctypes.Structure):
    """``cudaMemcpy3DParms``."""

    _fields_ = (
        ("before", ctypes.c_byte * 152),  # arrays, positions, pointers and the extent
        ("kind", ctypes.c_int),
    )


@functools.cache
def _of_cudart(name: str) -> Callable[..., int] | None:
    """A function of the CUDA runtime, which torch has loaded: for all, or under its own name."""
    for library in (None, f"libcudart.so.{(torch.version.cuda or '0').split('.')[0]}"):
        with contextlib.suppress(OSError, AttributeError):
            function: Callable[..., int] = getattr(ctypes.CDLL(library), name)
            return function
    return None


def copies_of_the_processor(graph: int) -> str:
    """What a CUDA graph reads from the processor's memory, or lets the processor do; else empty.

    ONNX Runtime passes lists to some kernels (Split and Concat of unequal parts) through memory of
    the processor, which it uses again after the run: a replay would read what is there by then.

    Parameters
    ----------
    graph : int
        A ``cudaGraph_t``.
    """

    def call(name: str, *args: Any) -> None:
        function = _of_cudart(name)
        status = "not found" if function is None else function(*args)
        if status:
            clear = _of_cudart("cudaGetLastError")
            if clear is not None:
                clear()  # whoever checks for an error next would take it for its own
            raise UnsupportedError("a CUDA graph that cannot be looked at", got=f"{name}: {status}")

    handle, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    call("cudaGraphGetNodes", handle, None, ctypes.byref(count))
    if not count.value:  # a run on tensors without elements; asking for no nodes is an error
        return ""
    nodes = (ctypes.c_void_p * count.value)()
    call("cudaGraphGetNodes", handle, nodes, ctypes.byref(count))
    kind, copied = ctypes.c_int(), _MemcpyNode()
    for node in map(ctypes.c_void_p, nodes):
        call("cudaGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value in (_HOST_NODE, _CHILD_NODE):
            return "a function of the processor, or a graph within the graph"
        if kind.value == _MEMCPY_NODE:
            call("cudaGraphMemcpyNodeGetParams", node, ctypes.byref(copied))
            if copied.kind != _ON_THE_GPU:
                return "a copy from or to the processor's memory"
    return ""


#: ``cudaGraphNodeType`` and ``cudaMemcpyKind``.
_MEMCPY_NODE, _HOST_NODE, _CHILD_NODE, _ON_THE_GPU = 1, 3, 4, 3


class Program:
    """A model ready to run on one device, with torch tensors in and out and no copies.

    Parameters
    ----------
    model : onnx.ModelProto
        Nodes of domain "roundoff" run as kernels.
    device : torch.device
    kernels : mapping
        Operator of domain "roundoff" -> :data:`Kernel`.
    tf32 : bool
    providers : sequence, optional
        As :func:`roundoff.ort.session` takes them.
    steady : iterable of str
        Inputs that rarely move, weights and caches: a run may be told that they lie where they did.

    Notes
    -----
    Runs share what is bound: let no two go on at a time.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        device: torch.device,
        kernels: Mapping[str, Kernel],
        tf32: bool = False,
        providers: Sequence[Any] | None = None,
        steady: Iterable[str] = (),
    ) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        self._on_stream: Callable[[], Any] = contextlib.nullcontext
        if self.cuda:
            self._on_stream = functools.partial(torch.cuda.stream, self.stream)
        graph = model.graph
        self.inputs = [i.name for i in graph.input]
        self.outputs = [o.name for o in graph.output]
        self._slots: dict[str, Slot] = {}
        # What the caller will say: sizes of inputs, and integers.
        sizes = [d.dim_param for i in graph.input for d in i.type.tensor_type.shape.dim]
        self._symbols = {n for n in [*sizes, *self.inputs] if n.isidentifier()}
        groups = partitions(model)
        between = _between(groups)  # what one partition computes for itself needs no place
        for value in [*graph.input, *graph.value_info, *graph.output]:
            if value.name in between or value.name in self.inputs or value.name in self.outputs:
                self._slot(value)
        stored = [t for t in graph.initializer if t.name in between]
        for tensor in stored:
            self._slot(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
        self.sessions: list[OrtSession] = []
        self._known: dict[bytes, tuple[OrtSession, list[str]]] = {}
        self.steps: list[Step] = []
        #: Values for which a kernel makes new memory at each run.
        self._made = {o for n in graph.node if n.domain == "roundoff" for o in n.output}
        #: Outputs that are written where an input lies.
        self.in_place = in_place = written_in_place(model)
        for output, name in in_place.items():  # one place for both
            self._slots[output].index = self._slots[name].index
        self._lists = passes_a_list(model)
        apart = [n for n in self.outputs if n not in {*in_place, *self._made, *self.inputs}]
        self._new = [(self._slots[n].index, self._slots[n].maker(device)) for n in apart]
        # Values that no input gives: constants, and places for what a run computes.
        self._blank: list[Any] = [None] * (len(self._slots) - len(self.inputs))
        for tensor in stored:
            place = self._slots[tensor.name].index - len(self.inputs)
            self._blank[place] = constant(tensor, device)
        self._out = picked([self._slots[n].index for n in self.outputs])
        self._steady = set(steady)
        self._steady |= {o for o, i in in_place.items() if i in self._steady}
        self._by_kernel = [i for i, n in enumerate(self.outputs) if n in self._made]
        chosen = list(providers or [CUDA if self.cuda else "CPUExecutionProvider"])
        for group in groups:
            if group[0].domain == "roundoff":
                node = group[0]
                self.steps.append(KernelStep(node, self._slots, kernels[node.op_type]))
            else:
                self._add_partition(model, group, chosen, tf32)
        #: For each step: what it passes on, and what nothing reads after it.
        self._passed = [[(s.index, s.maker(device)) for s in step.passed] for step in self.steps]
        self._gone = unread_after(self.steps, {self._slots[n].index for n in self.outputs})

    def _slot(self, value: onnx.ValueInfoProto) -> None:
        if value.name in self._slots:
            return
        sizes = sizes_of(value)
        if not all(d is not None and known(d, self._symbols) for d in sizes):
            raise UnsupportedError(
                "a size that the data decide",
                got=value.name,
                hint="torch._dynamo.config.capture_dynamic_output_shape_ops = False breaks the "
                "graph there",
            )
        kind = value.type.tensor_type.elem_type
        self._slots[value.name] = Slot(
            len(self._slots), tuple(sizes), onnx_dtype_to_torch_dtype(kind), kind
        )

    def _add_partition(
        self,
        model: onnx.ModelProto,
        nodes: list[onnx.NodeProto],
        providers: list[Any],
        tf32: bool,
    ) -> None:
        inside = {n.name for n in nodes}
        needed = {i for n in model.graph.node if n.name not in inside for i in n.input}
        needed.update(self.outputs)
        made = [o for n in nodes for o in n.output if o in needed - {""}]
        if not made:
            return
        part = _submodel(model, nodes, made)
        key, names = signature(part)
        if key not in self._known:
            self._known[key] = self._session(part, providers, tf32), names
            self.sessions.append(self._known[key][0])
        equal, its = self._known[key]
        own = dict(zip(its, names, strict=True))
        slots = {n: self._slots[own[n]] for n in [*equal.input_names, *equal.output_names]}
        self.steps.append(
            Partition(
                equal,
                slots,
                self.device,
                passed={n for n in slots if own[n] not in self.outputs},
                steady={n for n in slots if own[n] in self._steady},
            )
        )

    def _session(self, part: onnx.ModelProto, providers: list[Any], tf32: bool) -> OrtSession:
        # A plan of the memory would be kept for each set of sizes that is ever seen, and takes a
        # block beside what the first run has left in the arena: twice the memory of activations,
        # and no less time (SmolLM2, 1 and 128 tokens, two cores: 1.00 and 0.99 without).
        options: dict[str, Any] = {"enable_mem_pattern": False}
        if self.cuda:
            # It makes one Split of Slices, whose parts may be many.
            options["optimization.disable_specified_optimizers"] = SPLITS_SLICES
        with self._on_stream():
            return session(part, providers, tf32=tf32, session_options=options)

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
            Whether the steady inputs are where they were in the run before.

        Returns
        -------
        list of torch.Tensor
            New memory, in the order of ``self.outputs``; those of ``self.in_place`` are the inputs
            themselves.
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
        with self._on_stream():
            for step, passed, gone in zip(self.steps, self._passed, self._gone, strict=True):
                for index, empty in passed:  # on our stream, which alone uses them
                    values[index] = empty(sizes)
                step.run(values, sizes, settled)
                for index in gone:
                    values[index] = None
        return list(self._out(values))

    def unrecordable(self, numbers: Container[str] = ()) -> str:
        """Why no CUDA graph may record a run; empty where nothing speaks against it.

        A graph replays what the GPU did. What the processor read or computed stays as it was.

        Parameters
        ----------
        numbers : container of str
            Inputs that are sizes: a graph is of one set of them.
        """
        if self._lists:
            return f"ONNX Runtime passes a list to {self._lists!r} through the processor's memory"
        fixed = {self._slots[n].index for n in self.inputs if n in numbers}
        for step in self.steps:
            if isinstance(step, KernelStep) and step.draws:
                return f"{step.draws} draws random numbers, and would once more for the recording"
            if isinstance(step, Partition):
                for index, name in step.on_processor.items():
                    if index not in fixed:
                        return f"ONNX Runtime reads {name!r} on the processor"
        return ""

    def capture(
        self, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int]
    ) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
        """Record one run as a CUDA graph, over these very inputs: the graph, and its outputs.

        What passes from step to step lies in memory that torch keeps for the graph.

        Raises
        ------
        UnsupportedError
            The run waits for the GPU, or copies between it and the processor, or an input that is
            no size lies there.
        """
        numbers = {self.inputs.index(n) for n in sizes if n in self.inputs}
        for i, tensor in enumerate(inputs):
            if self.cuda and tensor.device.type == "cpu" and i not in numbers:
                raise UnsupportedError(
                    "a run that cannot be recorded", got=f"{self.inputs[i]!r} lies on the processor"
                )
        for settled in (False, True):  # arenas and workspaces grow now: nothing may later
            self.run(inputs, sizes, settled)
        try:
            graph, outputs = self._capture(inputs, sizes)
        except (RuntimeError, RoundoffError) as e:
            reason = str(e).splitlines()[0]
            raise UnsupportedError("a run that cannot be recorded", got=reason) from e
        copies = copies_of_the_processor(graph.raw_cuda_graph())
        if copies:
            raise UnsupportedError("a run that cannot be recorded", got=copies)
        return graph, outputs

    def _capture(
        self, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int]
    ) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
        """Record a run.

        ``torch.cuda.graph`` would give back all memory that torch keeps: the next text's cache then
        is allocated anew, lies elsewhere, and is recorded again. Nor is garbage collected, which
        takes 0.7 s in a process that has compiled a model of thirty layers.
        """
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with (
            no_collection(),
            self._on_stream(),
        ):  # memory that is given back would end the recording
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                outputs = self._steps(inputs, sizes, True)
            finally:
                graph.capture_end()
        return graph, outputs


class CudaGraphProgram:
    """A program replayed as a CUDA graph; its outputs are overwritten by the next run.

    A set of sizes is recorded when it comes a second time within eight, over inputs that lie where
    they lay: a prefill of another length, or a cache that grows or moves, is run as it is. A cache
    that a next text has at the same addresses is read by the same graph.

    Parameters
    ----------
    program : Program
    moving : sequence of bool
        For each input, whether to copy it where the graph reads it. The others are read where
        they lie, and not kept alive; another graph is recorded when one of them has moved.
    copy : bool
        Whether to return copies of the outputs, which the next run leaves alone.
    numbers : container of str
        Inputs that are sizes.

    Attributes
    ----------
    refused : str
        Why nothing is recorded; empty where it may be.
    """

    most = 8  # graphs are kept for this many sets of sizes and addresses

    def __init__(
        self,
        program: Program,
        moving: Sequence[bool],
        copy: bool = False,
        numbers: Container[str] = (),
    ) -> None:
        self._program = program
        self._moving = [i for i, m in enumerate(moving) if m]
        self._addresses = addresses([i for i, m in enumerate(moving) if not m])
        self._copied = [copy and not n.startswith("written_") for n in program.outputs]
        # Results that are an input, which was written where it lies; not in a copy of it.
        self._in_place: dict[int, int] = {}
        for at, name in enumerate(program.outputs):
            i = program.inputs.index(program.in_place[name]) if name in program.in_place else None
            if i is not None and not moving[i]:
                self._in_place[at] = i
        self._at: tuple[int, ...] = ()  # where the inputs lie that are not copied
        self._ran_at: tuple[int, ...] | None = None  # where they lay when the program bound them
        self._recorded: dict[Any, _Recorded] = {}  # the one that was used last comes last
        self._known: list[Any] = []  # sizes that were run of late, and where inputs lay
        self.refused = program.unrecordable(numbers)
        if self.refused:
            _warn(self.refused)

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        sizes: Mapping[str, int] = _NO_SIZES,
        settled: bool = False,
    ) -> list[torch.Tensor]:
        """As :meth:`Program.run`, over memory that stays."""
        if not settled:
            self._at = tuple(self._addresses(inputs))
        recorded = None if self.refused else self._record(inputs, sizes)
        if recorded is None:
            settled = settled and self._ran_at == self._at
            self._ran_at = None  # should the run fail
            outputs = self._program.run(inputs, sizes, settled)
            self._ran_at = self._at
            return outputs
        for i in self._moving:
            recorded.inputs[i].copy_(inputs[i])
        recorded.graph.replay()
        # What was written is the caller's cache itself, or is copied to where it belongs.
        made = [o.clone() if c else o for o, c in zip(recorded.outputs, self._copied, strict=True)]
        for at, i in self._in_place.items():
            made[at] = inputs[i]
        return made

    def _record(self, inputs: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> _Recorded | None:
        """The graph of these sizes over what lies where it lies; None where a run is due first."""
        key = (tuple(sizes.values()), self._at)
        recorded = self._recorded.pop(key, None)
        if recorded is not None:
            self._recorded[key] = recorded
            return recorded
        if key not in self._known:
            self._known = [*self._known[1 - self.most :], key]
            return None
        while len(self._recorded) >= self.most:
            self._recorded.pop(next(iter(self._recorded)))
        copies = list(inputs)
        for i in self._moving:
            copies[i] = inputs[i].clone()
        self._ran_at = None
        try:
            graph, outputs = self._program.capture(copies, sizes)
        except UnsupportedError as e:
            self.refused = str(e)
            _warn(self.refused)
            return None
        self._ran_at = self._at
        # Not the others: a cache that is kept alive would have the next text's lie elsewhere.
        own = {i: copies[i] for i in self._moving}
        for at in self._in_place:
            outputs[at] = torch.empty(0)
        self._recorded[key] = _Recorded(own, graph, outputs)
        return self._recorded[key]


def _warn(reason: str) -> None:
    warnings.warn(f"no CUDA graph is recorded: {reason}; runs are right, and slower", stacklevel=2)


@dataclasses.dataclass
class _Recorded:
    """A CUDA graph, and the memory that it reads and writes."""

    inputs: dict[int, torch.Tensor]
    graph: torch.cuda.CUDAGraph
    outputs: list[torch.Tensor]
