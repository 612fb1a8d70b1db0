"""A compiled graph: converted and fused, run on the caller's tensors."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch

from roundoff.errors import ArgumentError, RoundoffError, UnsupportedError
from roundoff.fusion import OptimizationOptions, fuse
from roundoff.fusion.editor import static
from roundoff.fusion.rule import Report
from roundoff.ort import OrtSession
from roundoff.precision import torch_tf32

from .capture import outside
from .convert import convert, opset_for
from .converter import Symbol, reads
from .outputs import Outputs
from .program import split_precomputed
from .runner import Runner
from .sizes import dim, dims, evaluate, symbols_in


@dataclasses.dataclass(frozen=True)
class CompileSettings:
    """What :func:`onnx_custom_backend` was asked for.

    Attributes
    ----------
    opset : int or None
        None: the backend chooses one.
    verbose : int
    dump_prefix : Path or None
        How the names of written models begin.
    """

    options: OptimizationOptions
    storage: dict[str, Any] | None
    cuda_graph: bool
    copy_outputs: bool
    fallback: bool
    opset: int | None = None
    verbose: int = 0
    dump_prefix: Path | None = None


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
        self._cuda = self._device.type == "cuda"
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
        context = torch._guards.TracingContext.try_get()
        self._outputs = Outputs(gm, getattr(context, "fw_metadata", None))
        self.inputs: list[torch.Tensor] | None = None
        optimised = self._load(gm, examples, names)
        needed = [*self._outputs.numbers, *self._converted.numbers]
        self._marks = marks(examples, needed, self._converted.symbols)
        self.exported, self.by_torch = self._converted.model, self._converted.by_torch
        self.names = self._converted.names[: len(self._places)]
        written = self._dump(optimised)
        if settings.storage is not None:
            settings.storage.setdefault("instance", []).append(self)
        if settings.verbose:
            self._announce(written)

    def _load(
        self,
        gm: torch.fx.GraphModule,
        examples: Sequence[Any],
        names: Sequence[str],
    ) -> onnx.ModelProto:
        """Convert, fuse and create sessions; what ONNX Runtime refuses goes to torch.

        Returns the fused model, before what is precomputed is taken out of it.
        """
        settings, options = self._settings, self._settings.options
        processor = options.processor or self._device.type.upper()
        verbose = max(options.verbose, settings.verbose - 1)
        options = dataclasses.replace(options, processor=processor, verbose=verbose)
        opset = settings.opset or opset_for(gm, processor)
        self._tf32 = self._cuda and torch_tf32()
        self._runners: dict[bool, Runner] = {}
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
                self._converted, fused = converted, converted.model
                try:
                    self.report = Report(nodes={"exported": len(self.model.graph.node)})
                    if options.tiers:
                        fused, self.report = fuse(self.model, options, static=self.static)
                        self.model = fused
                        if options.constant_folding:
                            self.model, self.precomputed = split_precomputed(
                                self.model, self.static
                            )
                    self._runner = self._runner_for(self._tf32)
                    return fused
                except RoundoffError as e:
                    name = _culprit(converted.model, e)
                    if name is None or name in refused or not settings.fallback:
                        raise
                    refused[name] = str(e)

    def _runner_for(self, tf32: bool) -> Runner:
        """What runs the model, with TF32 in float32 products on CUDA or without it."""
        if tf32 not in self._runners:
            self._runners[tf32] = Runner(
                self.model,
                self.precomputed,
                self._converted,
                [*self.static, *self._caches],
                self._device,
                tf32,
                self._settings.cuda_graph,
                self._settings.copy_outputs,
            )
        return self._runners[tf32]

    def _dump(self, optimised: onnx.ModelProto) -> list[Path]:
        """Write the model as exported and as optimised, where that was asked for."""
        prefix = self._settings.dump_prefix
        if prefix is None:
            return []
        number = 0
        while True:
            stem = f"{prefix.name}_{number}"
            paths = [prefix.with_name(f"{stem}{end}") for end in (".exported.onnx", ".onnx")]
            if not any(path.exists() for path in paths):
                break
            number += 1
        models = self._converted.model, optimised
        try:
            for path, model in zip(paths, models, strict=True):
                path.write_bytes(model.SerializeToString())
        except OSError as error:
            raise ArgumentError(
                "dump_prefix", got=str(error), expected="a path that can be written"
            ) from error
        return paths

    def _announce(self, written: Sequence[Path]) -> None:
        """Print what was converted, fused, left to torch and written."""
        exported = self._converted.model
        opset = next(o.version for o in exported.opset_import if not o.domain)
        kinds = Counter(node.op_type for node in exported.graph.node)
        lines = [
            f"converted to {kinds.total()} nodes of opset {opset}: "
            + (", ".join(f"{kind} {n}" for kind, n in kinds.most_common()) or "none")
        ]
        tiers = self._settings.options.patterns
        lines.append(f"fused by {tiers}: {self.report}" if tiers else "fused nothing: no rule runs")
        if self._settings.verbose > 1:
            refused = self.report.refused.items()
            lines += [f"left alone by {rule} at {value}: {why}" for (rule, value), why in refused]
        left = self._converted.by_torch.items()
        lines += [f"left to torch: {name}, because {why}" for name, why in left] or [
            "left to torch: nothing"
        ]
        lines += [f"wrote {path}" for path in written]
        for line in lines:
            print(f"onnx_custom_backend: {line}")

    @property
    def sessions(self) -> list[OrtSession]:
        return self._runner.program.sessions

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
        for s in self._marks:
            sizes[s.name] = s.read(args)
        if not (self._outputs.names or converted.written or converted.counted):
            return self._outputs.restore(args, [], sizes)
        tensors = args if self._all_tensors else [args[i] for i in self._places]
        if converted.integers or converted.strided:
            numbers = [evaluate(size, sizes) for size in converted.integers.values()]
            tensors = [*tensors, *(torch.tensor([n]) for n in numbers)]
            tensors += [view(args[i], sizes) for _, i, view in converted.strided]
        if self._cuda and torch_tf32() is not self._tf32:  # dynamo guards one of its switches
            self._tf32 = not self._tf32
            with outside():
                self._runner = self._runner_for(self._tf32)
        if self.inputs is None and self._settings.storage is not None:
            self.inputs = [t.detach() for t in tensors]
        outputs = self._runner(tensors, sizes)
        return outputs if self._outputs.plain else self._outputs.restore(args, outputs, sizes)

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


def marks(examples: Sequence[Any], numbers: Sequence[Any], known: Sequence[Symbol]) -> list[Symbol]:
    """Where to read the symbols of *numbers* that no size decides: in strides and offsets."""
    missing = {name for n in numbers for name in symbols_in(dim(n))} - {s.name for s in known}
    found: dict[str, Symbol] = {}
    for i, example in enumerate(examples):
        if missing and isinstance(example, torch.Tensor):
            for axis, n in enumerate(example.stride()):
                found.setdefault(str(dim(n)), Symbol(str(dim(n)), i, axis, "stride"))
            start = str(dim(example.storage_offset()))
            found.setdefault(start, Symbol(start, i, None, "offset"))
    if missing - found.keys():
        raise UnsupportedError("a size that no input decides", got=", ".join(sorted(missing)))
    return [found[name] for name in sorted(missing)]


def _culprit(model: onnx.ModelProto, error: Exception) -> str | None:
    """The node of torch's graph to which an ONNX node belongs that an error names."""
    for node in model.graph.node:
        if any(form.format(node.name) in str(error) for form in ("'{}'", "({})", '"{}"')):
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
