"""A fused model on the arguments of a call; its weights are packed once, and when they change."""

from __future__ import annotations

import bisect
import functools
import math
import operator
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import onnx
import torch

from roundoff.errors import UnsupportedError
from roundoff.fusion.experimental import KERNELS
from roundoff.ort.binding import CUDA

from .converter import Converted
from .program import CudaGraphProgram, Program, addresses, picked
from .views import folded, in_order, materialized, overlap

_epoch = 0

#: Rows of queries, and sequences, up to which attention in a CUDA graph is left to plain products;
#: 0: never. cuDNN's kernel computes tiles of 64 rows: for one query it takes 10.3 µs on an H200 and
#: needs a Memset, and its launch costs more than those of the products.
FEW_ROWS, FEW_SEQUENCES = 16, 32


def reset() -> None:
    """Let every compiled graph read its weights anew at its next call.

    Needed after a write that moves no version counter: through ``.data``, or into a parameter
    that was created under ``inference_mode``.

    Examples
    --------
    What depends on weights alone is precomputed, and a write through ``.data`` goes unseen:

    >>> from roundoff.backend import onnx_custom_backend, reset
    >>> weight = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    >>> double = torch.compile(lambda x: x @ (2 * weight), backend=onnx_custom_backend)
    >>> x = torch.ones(1, 2)
    >>> double(x)
    tensor([[4., 4.]])
    >>> _ = weight.data.zero_()
    >>> reset()
    >>> double(x)
    tensor([[0., 0.]])
    """
    global _epoch
    _epoch += 1


def chosen_providers(model: onnx.ModelProto) -> list[Any] | None:
    """The execution providers of a model in a CUDA graph; None is the device's own, as it comes.

    A decode step gets ONNX Runtime's unfused attention: where all sizes are numbers, and every
    attention is in float16 (others are not cuDNN's, or not measured) and has few rows (queries,
    times the heads that share keys) in few sequences (texts, times heads of keys).
    """
    graph = model.graph
    kinds = {v.name: v.type.tensor_type for v in [*graph.input, *graph.value_info]}
    nodes = [n for n in graph.node if n.domain != "roundoff" and n.op_type.endswith("Attention")]
    # GroupQueryAttention need not have an unfused form.
    few = all(n.op_type == "MultiHeadAttention" and _is_few(kinds.get(n.input[0])) for n in nodes)
    numbers = all(d.HasField("dim_value") for i in graph.input for d in kinds[i.name].shape.dim)
    return [(CUDA, {"sdpa_kernel": "16"})] if nodes and few and numbers else None


def _is_few(queries: onnx.TypeProto.Tensor | None) -> bool:
    """Whether queries (sequences, rows, heads times head) are few, in float16."""
    if queries is None or queries.elem_type != onnx.TensorProto.FLOAT16:
        return False
    sizes = [d.dim_value if d.HasField("dim_value") else math.inf for d in queries.shape.dim]
    return len(sizes) == 3 and sizes[0] <= FEW_SEQUENCES and sizes[1] <= FEW_ROWS


class Unwritten:
    """Says whether tensors are those that they were, and none was written through its counter.

    The tensors are kept: their memory cannot be reused for others meanwhile.

    Examples
    --------
    >>> x, y = torch.ones(2), torch.ones(3)
    >>> known = Unwritten([x, y])
    >>> known.holds([x, y])
    True
    >>> _ = y.add_(1)
    >>> known.holds([x, y])
    False
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._counted = [t for t in self._tensors if not t.is_inference()]  # those have a counter
        self._versions = list(map(_version, self._counted))

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors, unwritten."""
        same = all(map(operator.is_, tensors, self._tensors))
        return same and list(map(_version, self._counted)) == self._versions


_version = operator.attrgetter("_version")


class Memories(NamedTuple):
    """Memories that do not overlap, in their order: where they begin and end, what lies in each."""

    begins: list[int]
    ends: list[int]
    places: list[list[int]]


def _span(tensor: torch.Tensor, place: int) -> tuple[int, int, int]:
    """Where a tensor's memory begins and ends, and which input it is."""
    storage = tensor.untyped_storage()
    begin = storage.data_ptr()
    return begin, begin + storage.nbytes(), place


class Runner:
    """A model and its weights as last read, run on the arguments of a call.

    Parameters
    ----------
    model : onnx.ModelProto
        What is run at each call.
    precomputed : onnx.ModelProto or None
        What depends on weights alone.
    converted : Converted
        What is known of the arguments and of the operators that stay with torch.
    steady : collection of str
        Inputs on the device that stay where they are, though values may change: weights, caches.
    device : torch.device
        Where all of them are.
    tf32 : bool
        Whether float32 products on CUDA may round to TF32.
    cuda_graph, copy_outputs : bool
        Whether to record a CUDA graph, and to return copies of its outputs.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        precomputed: onnx.ModelProto | None,
        converted: Converted,
        steady: Collection[str],
        device: torch.device,
        tf32: bool,
        cuda_graph: bool,
        copy_outputs: bool,
    ) -> None:
        record = cuda_graph and device.type == "cuda"
        providers = chosen_providers(model) if record else None
        where = (device, KERNELS | converted.kernels, tf32, providers)
        place = {n: i for i, n in enumerate(converted.names)}
        self._packing: Program | None = None
        packed: list[str] = []
        self._weights: list[int] = []
        if precomputed is not None:
            self._repacking = functools.partial(Program, precomputed, *where)
            self._packing = self._repacking()
            packed = self._packing.outputs
            self._weights = [place[n] for n in self._packing.inputs]
        self._packs, self._packs_again = precomputed is not None, False
        self._packed: list[torch.Tensor] = []
        # Where weights lay that were packed.
        self._read_at: list[int] | None = None
        self._copied, self._unwritten = picked(self._weights), Unwritten([])
        self._epoch = -1
        self.program = Program(model, *where, steady=[*steady, *packed])
        # Where the program's inputs are in the list of the arguments and what is packed.
        place |= {n: len(place) + i for i, n in enumerate(packed)}
        order = [place[n] for n in self.program.inputs]
        self._arranged = picked(order)
        self._steady = sorted(place[n] for n in steady)
        #: Where steady inputs lie, and lay at the last run that looked.
        self._addresses = addresses(self._steady)
        self._lay: list[int] | None = None
        self._strided = False
        #: Whether the program's last run bound what lies at these addresses.
        self._bound = False
        # Inputs that may lie elsewhere at the next call, for a CUDA graph to copy.
        moving = [i not in self._steady and i < len(converted.names) for i in order]
        # Whose layout the next call may change; that of the others is dynamo's to guard.
        self._loose = [i for i, m in zip(order, moving, strict=True) if m]
        self._written = [place[n] for n in converted.written.values()]
        # Lengths of caches: which to raise by how much.
        self._raised: dict[int, list[int]] = {}
        for name, more in converted.counted.items():
            self._raised.setdefault(more, []).append(place[name])
        # What is written, and what else a write to it could change.
        names = converted.names[: len(converted.names) - len(converted.strided)]
        self._tensors = [place[n] for n in names if n not in converted.integers]
        self._changing = {*self._written, *(i for many in self._raised.values() for i in many)}
        loose = [i for i in self._loose if i in self._tensors]
        self._apart = loose if self._changing else []
        #: Where steady inputs lie.
        self._memories = Memories([], [], [])
        self._lock = threading.Lock()
        self._cuda_graph: CudaGraphProgram | None = None
        if record:
            self._cuda_graph = CudaGraphProgram(
                self.program, moving, copy_outputs, converted.integers
            )

    @property
    def no_cuda_graph(self) -> str:
        """Why no CUDA graph is recorded where one was asked for; else empty."""
        return "" if self._cuda_graph is None else self._cuda_graph.refused

    def __call__(self, args: Sequence[Any], sizes: Mapping[str, int]) -> list[torch.Tensor]:
        with self._lock:
            return self._run(args, sizes)

    def _run(self, args: Sequence[Any], sizes: Mapping[str, int]) -> list[torch.Tensor]:
        # Weights are too many to look at one by one: one comparison says that none has moved.
        still = self._addresses(args) == self._lay
        settled = self._bound and self._epoch == _epoch and still
        self._bound = False  # should the call be refused, or the run fail
        if not settled:
            self._look(args)
        if self._packs and self._changed(args, settled):
            self._pack(args)
            settled = False
        for i in self._changing:
            if not args[i].is_contiguous() and folded(args[i].shape, args[i].stride()):
                raise UnsupportedError(
                    "a write to an input of which several elements lie in one place",
                    got=f"strides {args[i].stride()}",
                    hint="clone() it",
                )
        if self._apart:
            self._keep_apart(args, self._apart, self._memories)
        # Not a generator, which takes longer than what it asks.
        copied = self._strided or not all([in_order(args[i]) for i in self._loose])  # noqa: C419
        settled = settled and not copied  # a copy may be a new one
        inputs = list(self._arranged([*args, *self._packed]))
        if copied:
            inputs = [materialized(t) for t in inputs]
        outputs = (self._cuda_graph or self.program).run(inputs, sizes, settled)
        self._bound = True
        for more, places in self._raised.items():
            torch._foreach_add_([args[i] for i in places], more)
        if not self._written:
            return outputs
        returned = len(outputs) - len(self._written)
        self._write_back(args, outputs[returned:])
        return outputs[:returned]

    def _look(self, args: Sequence[Any]) -> None:
        """Note where steady inputs lie, and which of them have strides of their own."""
        if self._epoch != _epoch:
            self._read_at = None
        self._epoch = _epoch
        self._lay = self._addresses(args)
        self._strided = not all(in_order(args[i]) for i in self._steady)
        if self._changing:
            loose = {*self._apart}
            steady = [i for i in self._tensors if i not in loose]
            self._memories = self._keep_apart(args, steady, Memories([], [], []))

    def _keep_apart(self, args: Sequence[Any], places: Sequence[int], others: Memories) -> Memories:
        """Refuse inputs that overlap one that is written, which none did in the traced call.

        What the graph reads was read before the write, or after it: that is no longer known.
        Arrays of NumPy that overlap come in storages of their own: addresses are compared.

        Returns
        -------
        Memories
            Those in which these inputs lie.
        """
        begins, ends, found = Memories([], [], [])
        for begin, end, i in sorted([_span(args[i], i) for i in places]):
            at = bisect.bisect_left(others.begins, end)
            while at and others.ends[at - 1] > begin:
                at -= 1
                self._refuse_overlap(args, i, others.places[at])
            if ends and begin < ends[-1]:
                self._refuse_overlap(args, i, found[-1])
                found[-1].append(i)
                ends[-1] = max(end, ends[-1])
            else:
                begins.append(begin)
                ends.append(end)
                found.append([i])
        return Memories(begins, ends, found)

    def _refuse_overlap(self, args: Sequence[Any], i: int, near: Sequence[int]) -> None:
        for k in near:
            written = i in self._changing or k in self._changing
            if written and overlap(args[i], args[k]):
                raise UnsupportedError(
                    "an input that is written, and overlaps another, as it did not before",
                    hint="clone() one of them, or torch._dynamo.reset() before the call",
                )

    def _write_back(self, args: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        """Copy what was not written where it lies."""
        targets, sources = [], []
        for i, value in zip(self._written, values, strict=True):
            target = args[i]
            if value is target or value.data_ptr() == target.data_ptr():
                continue
            if target.is_neg() or target.is_conj():  # of which torch writes no list
                target.copy_(value)
            else:
                targets.append(target)
                sources.append(value)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _changed(self, args: Sequence[Any], settled: bool) -> bool:
        """Whether a weight is not what was packed."""
        if self._read_at is None:
            return True
        if not settled and self._read_at != [args[i].data_ptr() for i in self._weights]:
            return True
        return not self._unwritten.holds(self._copied(args))

    def _pack(self, args: Sequence[Any]) -> None:
        """Compute what depends on weights alone."""
        self._read_at = None  # should it fail
        packing = self._packing or self._repacking()
        with torch.inference_mode(False), torch.no_grad():
            self._packed = packing.run([materialized(args[i]) for i in self._weights])
        # Most weights are packed once; on a GPU a session that waits keeps some 70 MiB.
        self._packing = packing if self._packs_again else None
        if not self._packs_again and packing.stream is not None:
            packing.stream.synchronize()  # before its session goes
        self._packs_again = True
        self._read_at = [args[i].data_ptr() for i in self._weights]
        self._unwritten = Unwritten(self._copied(args))
