"""One compiled graph: converted and fused once a set of sizes, run on the caller's tensors."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import torch

from roundoff.errors import UnsupportedError
from roundoff.fusion import OptimizationOptions, fuse
from roundoff.fusion.rule import Report
from roundoff.ort import torch_tf32

from .capture import outside, specialised, to_onnx
from .outputs import Outputs
from .program import Program, split_static
from .widen import has_bfloat16, in_float32, without_kernel

__all__ = ["Compiled", "Graph", "Settings", "reset"]

_epoch = 0


def reset() -> None:
    """Let every compiled graph read its weights anew at its next call.

    Needed after a write that moves no version counter: through ``.data``, or into a parameter
    that was made under ``inference_mode``.
    """
    global _epoch
    _epoch += 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """What :func:`onnx_custom_backend` was asked for."""

    opset: int
    verbose: int
    options: OptimizationOptions
    storage: dict[str, Any] | None
    dump_prefix: Path | None
    providers: list[Any] | None
    check: bool


class Compiled:
    """What AOTAutograd calls: a functional graph on flat inputs.

    Graphs with symbolic sizes are specialised for each set of sizes that arrives, and kept.
    """

    _boxed_call: bool

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        examples: Sequence[Any],
        names: Sequence[str],
        settings: Settings,
    ) -> None:
        self._gm, self._settings = gm, settings
        context = torch._guards.TracingContext.try_get()
        metadata = getattr(context, "fw_metadata", None)
        static = set(getattr(metadata, "static_input_indices", None) or ())
        places = [n.target for n in gm.graph.nodes if n.op == "placeholder"]
        self._names = readable(names if len(names) == len(places) else [str(p) for p in places])
        self._static = [i in static for i in range(len(places))]
        self._graphs: dict[Any, Graph] = {}
        self._graph: Graph | None = None
        if not _symbolic(examples):
            self._graph = self._make(gm, examples)

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run on flat inputs; the list is emptied, as a boxed call may."""
        graph = self._graph
        if graph is not None:
            return graph(args)
        key = tuple(
            (tuple(a.shape), a.stride()) if isinstance(a, torch.Tensor) else a for a in args
        )
        if key not in self._graphs:
            gm = specialised(self._gm, args)
            self._graphs[key] = self._make(gm, args)
        return self._graphs[key](args)

    def _make(self, gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Graph:
        return Graph(gm, examples, self._names, self._static, self._settings)


def _symbolic(examples: Sequence[Any]) -> bool:
    return any(
        isinstance(a, torch.SymInt)
        or (isinstance(a, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in a.shape))
        for a in examples
    )


def readable(names: Sequence[str]) -> list[str]:
    """Dynamo's names of inputs as their owner would write them, each once.

    Examples
    --------
    >>> readable(["L_self_modules_layers_modules_0_modules_up_parameters_weight_", "L_x_"])
    ['layers.0.up.weight', 'x']
    """
    found: list[str] = []
    for name in names:
        short = name.removeprefix("L_").removesuffix("_")
        short = re.sub(r"^self_+modules_+", "", short).replace("_modules_", ".")
        short = re.sub(r"_+(parameters|buffers)_+", ".", short)
        short = re.sub(r"^self\.", "", short) or name
        while short in found:
            short += "_"
        found.append(short)
    return found


class Graph:
    """A graph of static sizes: its models, and the program that runs them.

    Attributes
    ----------
    exported : onnx.ModelProto
        As torch's exporter leaves it.
    whole : onnx.ModelProto
        After fusion.
    model, prepare : onnx.ModelProto
        The part of it that is run at each call, and the part that depends on weights alone.
    report : Report
        What each rule did.
    seconds : dict
        Time spent in conversion, fusion, and making sessions.
    """

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        examples: Sequence[Any],
        names: Sequence[str],
        static: Sequence[bool],
        settings: Settings,
    ) -> None:
        self.settings, self.gm = settings, gm
        start = time.perf_counter()
        given = [i for i, a in enumerate(examples) if isinstance(a, torch.Tensor)]
        tensors = [examples[i] for i in given]
        self.device = _device(tensors, gm)
        self.names = [names[i] for i in given]
        self.static = [n for i, n in zip(given, self.names, strict=True) if static[i]]
        self._given = given
        self._outputs = Outputs(gm)
        self.seconds: dict[str, float] = {}
        if not self._outputs.names:
            return
        self.exported = to_onnx(gm, tensors, self.names, self._outputs.names, settings.opset)
        self.seconds["convert"] = time.perf_counter() - start
        self._fuse()
        start = time.perf_counter()
        self._programs: dict[bool, _Run] = {}
        with outside():
            self._run = self._first_program()
        self.seconds["sessions"] = time.perf_counter() - start
        self._unchecked = settings.check
        self._store()

    def _fuse(self) -> None:
        start = time.perf_counter()
        options = self.settings.options
        processor = options.processor or ("CUDA" if self.device.type == "cuda" else "CPU")
        options = dataclasses.replace(options, processor=processor)
        present = {i.name for i in self.exported.graph.input}
        static = [n for n in self.static if n in present]
        self.whole, self.report = self.exported, Report()
        if options.tiers:
            self.whole, self.report = fuse(self.exported, options, static=static)
        if self.device.type == "cpu" and has_bfloat16(self.whole):
            self.whole = in_float32(self.whole)
        self._split()
        self.seconds["fuse"] = time.perf_counter() - start

    def _split(self) -> None:
        self.model, self.prepare = self.whole, None
        options = self.settings.options
        if options.tiers and options.constant_folding:
            self.model, self.prepare = split_static(self.whole, self.static)

    def _first_program(self) -> _Run:
        tf32 = torch_tf32() if self.device.type == "cuda" else False
        while True:
            try:
                return self._program(tf32)
            except UnsupportedError as e:
                wider = without_kernel(self.whole, e)
                if wider is None:
                    raise
                self.whole = wider
                self._split()

    def _program(self, tf32: bool) -> _Run:
        if tf32 not in self._programs:
            self._programs[tf32] = _Run(self, tf32)
        return self._programs[tf32]

    def _store(self) -> None:
        settings = self.settings
        if settings.verbose:
            print(f"onnx_custom_backend: {len(self.model.graph.node)} nodes, {self.report}")
        number = 0
        if settings.storage is not None:
            instances = settings.storage.setdefault("instance", [])
            number = len(instances)
            instances.append(
                {
                    "onnx": self.model,
                    "whole": self.whole,
                    "prepare": self.prepare,
                    "exported": self.exported,
                    "graph_module": self.gm,
                    "session": self._run.main.sessions,
                    "report": self.report,
                    "seconds": self.seconds,
                    "compiled": self,
                }
            )
        if settings.dump_prefix is not None:
            prefix = settings.dump_prefix
            while (path := prefix.with_name(f"{prefix.name}_{number}.onnx")).exists() and (
                settings.storage is None
            ):
                number += 1
            onnx.save(self.whole, str(path))

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run; *args* as the graph takes them, integers included."""
        if not self._outputs.names:
            return self._outputs.restore([])
        run = self._run
        if self.device.type == "cuda":
            run = self._run = self._program(torch_tf32())
        if self._unchecked:
            self._unchecked = False
            self.verify(args)
        made = run(args if len(self._given) == len(args) else [args[i] for i in self._given])
        return made if self._outputs.plain else self._outputs.restore(made)

    def verify(self, args: Sequence[Any]) -> None:
        """Compare with the graph before fusion on these inputs; see :mod:`.check`."""
        from .check import verify

        verify(self, [args[i] for i in self._given])


class _Run:
    """The two programs of a graph, and what of the weights the first was last run on."""

    def __init__(self, graph: Graph, tf32: bool) -> None:
        from roundoff.fusion.experimental import KERNELS

        make = graph.settings.providers
        self.main = Program(graph.model, graph.device, KERNELS, tf32, make)
        self.ahead = None
        place = {n: i for i, n in enumerate(graph.names)}
        self._ready: dict[str, torch.Tensor] = {}
        self._first: list[int] = []
        self._seen: list[tuple[Any, int, int]] = []
        self._epoch = -1
        if graph.prepare is not None:
            self.ahead = Program(graph.prepare, graph.device, KERNELS, tf32, make)
            self._first = [place[n] for n in self.ahead.inputs]
        self._order = [place.get(n, -1) for n in self.main.inputs]
        # Weights with strides of their own are copied once, and again when they change.
        self._static = {place[n] for n in graph.static}
        self._copies: dict[int, tuple[tuple[Any, int, int], torch.Tensor]] = {}
        made = set(self.main.outputs)
        self._outputs = [o.name for o in graph.whole.graph.output]
        self._all = all(o in made for o in self._outputs)

    def __call__(self, args: Sequence[Any]) -> list[torch.Tensor]:
        if self.ahead is not None or self._copies:
            self._refresh(args)
        inputs = []
        for name, i in zip(self.main.inputs, self._order, strict=True):
            if i < 0:
                inputs.append(self._ready[name])
                continue
            tensor = args[i]
            inputs.append(tensor if tensor.is_contiguous() else self._contiguous(tensor, i))
        made = self.main.run(inputs)
        if self._all:
            return made
        found = dict(zip(self.main.outputs, made, strict=True))
        return [found[n] if n in found else self._ready[n].clone() for n in self._outputs]

    def _refresh(self, args: Sequence[Any]) -> None:
        global _epoch
        if self._epoch != _epoch:
            self._copies.clear()
        elif all(
            args[i] is t and t.data_ptr() == at and _version(t) == v
            for i, (t, at, v) in zip(self._first, self._seen, strict=True)
        ):
            return
        self._epoch = _epoch
        self._seen = [_state(args[i]) for i in self._first]
        if self.ahead is not None:
            made = self.ahead.run([args[i].contiguous() for i in self._first])
            self._ready = dict(zip(self.ahead.outputs, made, strict=True))

    def _contiguous(self, tensor: torch.Tensor, i: int) -> torch.Tensor:
        if i not in self._static:
            return tensor.contiguous()
        state, copy = self._copies.get(i, (None, None))
        now = _state(tensor)
        if copy is None or state is None or state[0] is not tensor or state[1:] != now[1:]:
            copy = tensor.detach().contiguous()
            self._copies[i] = (now, copy)
        return copy


def _version(t: torch.Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _state(t: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    # The tensor itself is kept: its memory cannot be given to another while it is.
    return t, t.data_ptr(), _version(t)


def _device(tensors: Sequence[torch.Tensor], gm: torch.fx.GraphModule) -> torch.device:
    known = [t.device for t in tensors if t.dim()]
    (returned,) = gm.graph.output_node().args
    known += [
        n.meta["val"].device
        for n in returned  # type: ignore[union-attr]
        if isinstance(n, torch.fx.Node) and isinstance(n.meta.get("val"), torch.Tensor)
    ]
    kinds = {d.type for d in known}
    if len(kinds) > 1:
        raise UnsupportedError("the graph moves data between devices", got=", ".join(sorted(kinds)),
                               expected="one device")  # fmt: skip
    return known[0] if known else torch.device("cpu")
