"""A compiled graph: converted and fused, run on the caller's tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from typing import Any

import onnx
import torch

from roundoff.errors import RoundoffError, UnsupportedError
from roundoff.fusion import OptimizationOptions, fuse
from roundoff.fusion.editor import static
from roundoff.fusion.rule import Report
from roundoff.ort import torch_tf32

from .capture import outside
from .convert import convert, opset_for
from .converter import reads
from .outputs import Outputs
from .program import split_precomputed
from .runner import Runner
from .sizes import dims, evaluate


@dataclasses.dataclass(frozen=True)
class CompileSettings:
    """What :func:`onnx_custom_backend` was asked for."""

    options: OptimizationOptions
    storage: dict[str, Any] | None
    cuda_graph: bool
    copy_outputs: bool
    fallback: bool


class Compiled:
    """A compiled graph, for all its sizes: what ``storage["instance"]`` lists.

    Call it with the list of the graph's inputs. ``graph["onnx"]`` is ``graph.model``, and
    ``graph["compiled"]`` the object itself.

    Attributes
    ----------
    exported : onnx.ModelProto
        As converted.
    model : onnx.ModelProto
        What is run at each call: after fusion, without what is precomputed.
    precomputed : onnx.ModelProto or None
        What depends on weights alone: run once, and again when a weight changes.
    sessions : list of OrtSession
        One for each partition of *model*, equal ones have the same.
    report : Report
        What each rule of :mod:`roundoff.fusion` did.
    by_torch : dict of str to str
        Operator that stays with torch -> why.
    no_cuda_graph : str
        Why no CUDA graph is recorded where one was asked for; else empty.
    names : list of str
        Inputs that are tensors, weights included.
    static : list of str
        Those of them that are weights.
    inputs : list of torch.Tensor or None
        Those of the first call, in the order of *names*; None before it.

    Examples
    --------
    >>> from roundoff.backend import onnx_custom_backend
    >>> storage = {}
    >>> run = torch.compile(
    ...     torch.nn.functional.relu, dynamic=True,
    ...     backend=lambda gm, args: onnx_custom_backend(gm, args, storage=storage),
    ... )
    >>> [tuple(run(torch.ones(n, 2)).shape) for n in (3, 4, 3)]
    [(3, 2), (4, 2), (3, 2)]
    >>> (graph,) = storage["instance"]  # one graph for both sizes
    >>> [node.op_type for node in graph.model.graph.node], graph.inputs[0].shape
    (['Relu'], torch.Size([3, 2]))
    >>> graph["onnx"] is graph.model
    True
    """

    _boxed_call = True

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        examples: Sequence[Any],
        names: Sequence[str],
        weights: Container[int],
        settings: CompileSettings,
    ) -> None:
        self._settings = settings
        writes = {n.args[0] for n in gm.graph.nodes if n.target is torch.ops.aten.copy_.default}
        placeholders = gm.graph.find_nodes(op="placeholder")
        self._places = [i for i, node in enumerate(placeholders) if reads(node)]
        self._all_tensors = len(self._places) == len(examples)
        self._device = _device([examples[i] for i in self._places], gm)
        self.static: list[str] = []
        # Written to, and of one size: a cache. transformers marks it as static, but not where its
        # first step is compiled.
        self._caches: list[str] = []
        for i in self._places:
            if examples[i].device != self._device:
                continue  # a number on the processor is copied to the GPU for each run
            if placeholders[i] not in writes:
                if i in weights:
                    self.static.append(names[i])
            elif static(*dims(examples[i].shape)):
                self._caches.append(names[i])
        self._outputs = Outputs(gm)
        self.inputs: list[torch.Tensor] | None = None
        self._load(gm, examples, names)
        self.exported, self.by_torch = self._converted.model, self._converted.by_torch
        self.names = self._converted.names[: len(self._places)]
        self.sessions = self._runner.program.sessions
        if settings.storage is not None:
            settings.storage.setdefault("instance", []).append(self)

    def _load(
        self,
        gm: torch.fx.GraphModule,
        examples: Sequence[Any],
        names: Sequence[str],
    ) -> None:
        """Convert, fuse and create sessions; what ONNX Runtime refuses goes to torch."""
        settings, options = self._settings, self._settings.options
        processor = options.processor or self._device.type.upper()
        options = dataclasses.replace(options, processor=processor)
        opset = opset_for(gm, processor)
        tf32 = self._device.type == "cuda" and torch_tf32()  # which dynamo guards
        refused: dict[str, str] = {}
        while True:
            with outside():
                converted = convert(
                    gm,
                    examples,
                    names,
                    self._outputs.names,
                    opset,
                    refused,
                    settings.fallback,
                )
                self.model, self.precomputed = converted.model, None
                self._converted = converted
                try:
                    self.report = Report(nodes={"exported": len(self.model.graph.node)})
                    if options.tiers:
                        self.model, self.report = fuse(self.model, options, static=self.static)
                        if options.constant_folding:
                            self.model, self.precomputed = split_precomputed(
                                self.model, self.static
                            )
                    self._runner = Runner(
                        self.model,
                        self.precomputed,
                        converted,
                        [*self.static, *self._caches],
                        self._device,
                        tf32,
                        settings.cuda_graph,
                        settings.copy_outputs,
                    )
                    return
                except RoundoffError as e:
                    name = _culprit(converted.model, e)
                    if name is None or name in refused or not settings.fallback:
                        raise
                    refused[name] = str(e)

    @property
    def no_cuda_graph(self) -> str:
        return self._runner.no_cuda_graph

    def __getitem__(self, key: str) -> Any:
        return {"onnx": self.model, "compiled": self}[key]

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run; *args* as the graph takes them, integers included."""
        converted = self._converted
        sizes = {
            s.name: args[s.argument] if s.axis is None else args[s.argument].shape[s.axis]
            for s in converted.symbols
        }
        if not (self._outputs.names or converted.written or converted.counted):
            return self._outputs.restore([], sizes)
        tensors = args if self._all_tensors else [args[i] for i in self._places]
        if converted.integers:
            numbers = [evaluate(size, sizes) for size in converted.integers.values()]
            tensors = [*tensors, *(torch.tensor([n]) for n in numbers)]
        if self.inputs is None and self._settings.storage is not None:
            self.inputs = [t.detach() for t in tensors]
        outputs = self._runner(tensors, sizes)
        return outputs if self._outputs.plain else self._outputs.restore(outputs, sizes)

    def truth(self) -> list[torch.Tensor]:
        """What the graph returns on the inputs of its first call, in float64 throughout.

        Computed by :class:`roundoff.evaluator.TorchOnnxEvaluator` from the converted graph, so
        that nothing is rounded to float32 inside, as ``module.double()`` would.
        """
        from roundoff.evaluator import TorchOnnxEvaluator

        graph, given = self.exported.graph, self.inputs or []
        feeds = dict(zip([i.name for i in graph.input], given, strict=True))
        provider = f"{self._device.type.upper()}ExecutionProvider"
        evaluator = TorchOnnxEvaluator(self.exported, providers=(provider,), truth=True)
        return evaluator.run([o.name for o in graph.output], feeds)


def _culprit(model: onnx.ModelProto, error: Exception) -> str | None:
    """The node of torch's graph to which an ONNX node belongs that an error names."""
    for node in model.graph.node:
        if f"'{node.name}'" in str(error) or f"({node.name})" in str(error):
            return {p.key: p.value for p in node.metadata_props}.get("roundoff.fx")
    return None


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
        raise UnsupportedError(
            "the graph moves data between devices",
            got=", ".join(sorted(kinds)),
            expected="one device",
        )
    return known[0] if known else torch.device("cpu")
