"""A graph fused for one precision, and its weights: packed once, and again when they change."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch

from roundoff.fusion import OptimizationOptions, fuse
from roundoff.fusion.experimental import KERNELS
from roundoff.fusion.rule import Report
from roundoff.ort.binding import CUDA

from .program import (
    CudaGraphProgram,
    Program,
    addresses,
    picked,
    split_precomputed,
    without_counts,
)
from .upcast import in_float32
from .weights import Unwritten

__all__ = ["CompileSettings", "Exported", "Variant", "chosen_providers", "reset"]

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


@dataclasses.dataclass(frozen=True)
class CompileSettings:
    """What :func:`onnx_custom_backend` was asked for."""

    opset: int | None
    verbose: int
    options: OptimizationOptions
    storage: dict[str, Any] | None
    dump_prefix: Path | None
    providers: list[Any] | None
    cuda_graph: bool
    fallback: bool = True
    copy_outputs: bool = False


def has_cuda_graphs(device: torch.device) -> bool:
    """Whether a run on a device can be recorded."""
    return device.type == "cuda"


def chosen_providers(
    model: onnx.ModelProto, device: torch.device, settings: CompileSettings
) -> list[Any] | None:
    """The execution providers of a fused model; None is the device's own, as it comes.

    A decode step that is replayed as a CUDA graph gets ONNX Runtime's unfused attention: where all
    sizes are numbers, and every attention is in float16 (others are not cuDNN's, or not measured)
    and has few rows (queries, times the heads that share keys) in few sequences (texts, times
    heads of keys).
    """
    if settings.providers is not None or not settings.cuda_graph or device.type != "cuda":
        return settings.providers
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


@dataclasses.dataclass(frozen=True)
class Exported:
    """A graph as converted, and what is known of its inputs.

    Attributes
    ----------
    model : onnx.ModelProto
    names : list of str
        Inputs, all of them tensors.
    static : list of str
        Those of them that are weights.
    device : torch.device
        Where all of them are.
    kernels : dict
        What runs the operators that stay with torch.
    steady : list of str
        Inputs that stay where they are, though their values change: caches that are marked so.
    written : list of str
        Inputs that the graph writes to: their new values are its last outputs.
    sizes : list of str
        Inputs that are symbolic sizes.
    """

    model: onnx.ModelProto
    names: list[str]
    static: list[str]
    device: torch.device
    kernels: dict[str, Any]
    steady: list[str]
    written: list[str]
    sizes: list[str]


class Variant:
    """A graph fused for one precision: its models, its programs, and its weights as last read.

    Parameters
    ----------
    exported : Exported
    settings : CompileSettings
    tf32 : bool
        Whether float32 products on CUDA may round to TF32.

    Attributes
    ----------
    fused : onnx.ModelProto
        After fusion.
    model : onnx.ModelProto
        The part of it that is run at each call.
    precomputed : onnx.ModelProto or None
        The part of it that depends on weights alone.
    report : Report
        What each rule did.
    seconds : dict
        Time spent in fusion and in creating sessions.
    """

    def __init__(self, exported: Exported, settings: CompileSettings, tf32: bool) -> None:
        self.exported, self.tf32 = exported, tf32
        self.seconds: dict[str, float] = {}
        start = time.perf_counter()
        fused = self._fuse(settings)
        self.seconds["fuse"] = time.perf_counter() - start
        start = time.perf_counter()
        self._load(in_float32(fused) if exported.device.type == "cpu" else fused, settings)
        self.seconds["sessions"] = time.perf_counter() - start
        place = {n: i for i, n in enumerate(exported.names)}
        self._packed: dict[str, torch.Tensor] = {}
        static = [] if self.precomputed is None else self.precomputed.graph.input
        self._weights = [place[i.name] for i in static]
        # Where weights lay that were packed.
        self._read_at: list[int] | None = None
        self._copied, self._unwritten = picked(self._weights), Unwritten([])
        self._epoch = -1
        # Where the program's inputs are in the list of the arguments and what is packed.
        packed = [] if self._packing is None else self._packing.outputs
        place |= {n: len(place) + i for i, n in enumerate(packed)}
        self._order = [place[n] for n in self.program.inputs]
        self._arranged = picked(self._order)
        self._steady = sorted(place[n] for n in {*exported.static, *exported.steady})
        #: Where steady inputs lie, and lay at the last run that looked.
        self._addresses = addresses(self._steady)
        self._lay: list[int] | None = None
        self._strided = False
        #: Whether a steady input lies on the processor, and is copied to the GPU for each run.
        self._far = False
        #: Whether the program's last run bound what lies at these addresses.
        self._bound = False
        # Inputs that may lie elsewhere at the next call, for a CUDA graph to copy.
        moving = [i not in self._steady and i < len(exported.names) for i in self._order]
        # Whose layout the next call may change; that of the others is dynamo's to guard.
        self._loose = [i for i, m in zip(self._order, moving, strict=True) if m]
        written = [(f"written_{at}", place[n]) for at, n in enumerate(exported.written)]
        returned = [(n, i) for n, i in written if n not in self._counted]
        self._written = len(returned)
        here = [n in self.program.in_place for n, _ in returned]
        self._in_place = [(at, i) for at, (_, i) in enumerate(returned) if here[at]]
        self._apart = [(at, i) for at, (_, i) in enumerate(returned) if not here[at]]
        # Lengths of caches: which to raise by how much.
        self._raised: dict[int, list[int]] = {}
        for name, i in written:
            if name in self._counted:
                self._raised.setdefault(self._counted[name], []).append(i)
        self._lock = threading.Lock()
        self._cuda_graph: CudaGraphProgram | None = None
        if settings.cuda_graph and has_cuda_graphs(exported.device):
            self._cuda_graph = CudaGraphProgram(
                self.program, moving, settings.copy_outputs, exported.sizes
            )

    def _fuse(self, settings: CompileSettings) -> onnx.ModelProto:
        exported, options = self.exported, settings.options
        model = exported.model
        self.report = Report(nodes={"exported": len(model.graph.node)})
        if not options.tiers:
            return model
        if options.processor is None:
            options = dataclasses.replace(options, processor=exported.device.type.upper())
        present = {i.name for i in model.graph.input}
        static = [n for n in exported.static if n in present]
        fused, self.report = fuse(model, options, static=static)
        return fused

    def _load(self, fused: onnx.ModelProto, settings: CompileSettings) -> None:
        """Create the sessions of a model."""
        self.fused, self.model, self.precomputed = fused, fused, None
        if settings.options.tiers and settings.options.constant_folding:
            self.model, self.precomputed = split_precomputed(fused, self.exported.static)
        kernels = KERNELS | self.exported.kernels
        exported = self.exported
        providers = chosen_providers(self.model, exported.device, settings)
        where = (exported.device, kernels, self.tf32, providers)
        steady = {*exported.static, *exported.steady}
        if self.precomputed is not None:
            steady |= {o.name for o in self.precomputed.graph.output}
        written = {f"written_{at}": name for at, name in enumerate(exported.written)}
        self.model, self._counted = without_counts(self.model, written)
        self.program = Program(self.model, *where, steady=steady)
        part = self.precomputed
        self._repacking = None if part is None else functools.partial(Program, part, *where)
        self._packing = None if self._repacking is None else self._repacking()
        self._packs_again = False

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
        settled = self._bound and self._epoch == _epoch and still and not self._far
        if not settled:
            self._look(args)
        if self.precomputed is not None and self._changed(args, settled):
            self._pack(args)
            settled = False
        # Not a generator, which takes longer than what it asks.
        copied = self._strided or not all([args[i].is_contiguous() for i in self._loose])  # noqa: C419
        settled = settled and not copied  # a copy may be a new one
        inputs = list(self._arranged([*args, *self._packed.values()]))
        if copied:
            inputs = [t.contiguous() for t in inputs]
        self._bound = False  # should the run fail
        outputs = (self._cuda_graph or self.program).run(inputs, sizes, settled)
        self._bound = True
        if self._raised:
            self._raise(args)
        if not self._written:
            return outputs
        returned = len(outputs) - self._written
        self._write_back(args, outputs[returned:])
        return outputs[:returned]

    def _look(self, args: Sequence[Any]) -> None:
        """Note where steady inputs lie, and which of them have strides of their own."""
        if self._epoch != _epoch:
            self._read_at = None
        self._epoch = _epoch
        self._lay = self._addresses(args)
        on_gpu = self.exported.device.type == "cuda"
        self._far = on_gpu and any(args[i].device.type == "cpu" for i in self._steady)
        self._strided = any(not args[i].is_contiguous() for i in self._steady)

    def _write_back(self, args: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
        """Copy what was not written where it lies."""
        for at, i in self._in_place:
            if values[at] is not args[i] and values[at].data_ptr() != args[i].data_ptr():
                args[i].copy_(values[at])
        if self._apart:
            pairs = [(args[i], values[at]) for at, i in self._apart]
            torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])

    def _raise(self, args: Sequence[Any]) -> None:
        """Count in the tensors that the graph counts in."""
        for more, places in self._raised.items():
            torch._foreach_add_([args[i] for i in places], more)

    def _changed(self, args: Sequence[Any], settled: bool) -> bool:
        """Whether a weight is not what was packed."""
        if self._read_at is None:
            return True
        if not settled and self._read_at != [args[i].data_ptr() for i in self._weights]:
            return True
        return not self._unwritten.holds(self._copied(args))

    def _pack(self, args: Sequence[Any]) -> None:
        """Compute what depends on weights alone."""
        assert self._repacking is not None
        self._read_at = None  # should it fail
        packing = self._packing or self._repacking()
        with torch.inference_mode(False), torch.no_grad():
            computed = packing.run([args[i].contiguous() for i in self._weights])
        self._packed = dict(zip(packing.outputs, computed, strict=True))
        # Most weights are packed once; on a GPU a session that waits keeps some 70 MiB.
        self._packing = packing if self._packs_again else None
        if not self._packs_again and packing.stream is not None:
            packing.stream.synchronize()  # before its session goes
        self._packs_again = True
        self._read_at = [args[i].data_ptr() for i in self._weights]
        self._unwritten = Unwritten(self._copied(args))
