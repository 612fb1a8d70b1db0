"""A graph fused for one precision, and its weights: packed once, and again when they change."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnx
import torch

from roundoff.errors import UnsupportedError
from roundoff.fusion import fuse
from roundoff.fusion.rule import Report

from .program import Graphed, Program, split_static
from .widen import has_bfloat16, in_float32, without_kernel

if TYPE_CHECKING:
    from .compiled import Graph

__all__ = ["Variant", "reset", "widened"]

_epoch = 0


def reset() -> None:
    """Let every compiled graph read its weights anew at its next call.

    Needed after a write that moves no version counter: through ``.data``, or into a parameter
    that was made under ``inference_mode``.

    Examples
    --------
    What depends on weights alone is computed ahead, and a write through ``.data`` goes unseen:

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


class Variant:
    """A graph fused for one precision: its models, its programs, and what it knows of weights.

    Attributes
    ----------
    whole : onnx.ModelProto
        After fusion.
    model, prepare : onnx.ModelProto
        The part of it that is run at each call, and the part that depends on weights alone.
    report : Report
        What each rule did.
    seconds : dict
        Time spent in fusion and in making sessions.
    """

    def __init__(self, exported: onnx.ModelProto, graph: Graph, tf32: bool) -> None:
        self.tf32 = tf32
        self.seconds: dict[str, float] = {}
        start = time.perf_counter()
        self._fuse(exported, graph)
        self.seconds["fuse"] = time.perf_counter() - start
        start = time.perf_counter()
        self._programs(graph)
        self.seconds["sessions"] = time.perf_counter() - start
        place = {n: i for i, n in enumerate(graph.names)}
        self._ready: dict[str, torch.Tensor] = {}
        self._first: list[int] = []
        self._seen: list[tuple[Any, int, int]] = []
        self._epoch = -1
        if self.ahead is not None:
            self._first = [place[n] for n in self.ahead.inputs]
        self._order = [(n, place.get(n, -1)) for n in self.main.inputs]
        self._straight = self.main.inputs == graph.names
        # Weights with strides of their own are copied once, and again when they change.
        self._static = {place[n] for n in graph.static}
        self._copies: dict[int, tuple[tuple[Any, int, int], torch.Tensor]] = {}
        made = set(self.main.outputs)
        self._outputs = [o.name for o in self.whole.graph.output]
        self._all = all(o in made for o in self._outputs)
        # Inputs that may lie elsewhere at the next call, for a CUDA graph to copy.
        self._moving = [i not in self._static and i >= 0 for _, i in self._order]
        self._graphed: Graphed | None = None
        if graph.settings.cuda_graph and graph.device.type == "cuda":
            self._graphed = Graphed(self.main, self._moving)

    def _fuse(self, exported: onnx.ModelProto, graph: Graph) -> None:
        options = graph.settings.options
        processor = options.processor or ("CUDA" if graph.device.type == "cuda" else "CPU")
        options = dataclasses.replace(options, processor=processor)
        present = {i.name for i in exported.graph.input}
        static = [n for n in graph.static if n in present]
        self.whole, self.report = exported, Report(nodes={"exported": len(exported.graph.node)})
        if options.tiers:
            self.whole, self.report = fuse(exported, options, static=static, tf32=self.tf32)
        if graph.device.type == "cpu" and has_bfloat16(self.whole):
            self.whole = in_float32(self.whole)

    def _programs(self, graph: Graph) -> None:
        """Make the sessions; a node without a kernel is widened, until all have one."""
        from roundoff.fusion.experimental import KERNELS

        ahead = graph.settings.options.tiers and graph.settings.options.constant_folding
        while True:
            self.model, self.prepare = self.whole, None
            if ahead:
                self.model, self.prepare = split_static(self.whole, graph.static)
            try:
                make = (graph.device, KERNELS, self.tf32, graph.settings.providers)
                self.main = Program(self.model, *make)
                self.ahead = None if self.prepare is None else Program(self.prepare, *make)
                return
            except UnsupportedError as e:
                self.whole = widened(self.whole, e)

    def __call__(self, args: Sequence[Any]) -> list[torch.Tensor]:
        if self.ahead is not None or self._copies:
            self._refresh(args)
        inputs = args
        if not self._straight:
            inputs = [args[i] if i >= 0 else self._ready[n] for n, i in self._order]
        if not all(map(torch.Tensor.is_contiguous, inputs)):
            inputs = [
                t if t.is_contiguous() else self._contiguous(t, i)
                for t, (_, i) in zip(inputs, self._order, strict=True)
            ]
        graphed = self._graphed
        made = self.main.run(inputs) if graphed is None else graphed.run(inputs)
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


def widened(model: onnx.ModelProto, error: UnsupportedError) -> onnx.ModelProto:
    """The model with the node that *error* names in a wider type; *error* itself where none is."""
    wider = without_kernel(model, error)
    if wider is None:
        raise error
    return wider


def _version(t: torch.Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _state(t: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    # The tensor itself is kept: its memory cannot be given to another while it is.
    return t, t.data_ptr(), _version(t)
