"""A compiled graph: converted and fused, run on the caller's tensors."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import torch

from roundoff.errors import ArgumentError, RoundoffError, UnsupportedError
from roundoff.fusion.rule import Report
from roundoff.ort import OrtSession, torch_tf32

from .capture import outside
from .convert import convert, opset_for
from .converter import Converted
from .outputs import Outputs
from .sizes import dims
from .variant import CompileSettings, Exported, Variant

__all__ = ["ByNumbers", "Compiled", "readable"]


class ByNumbers:
    """What AOTAutograd calls where dynamo passes Python's floats as tensors of one number.

    The first call's are taken as constants, and others make another graph; from the second on,
    what differs stays an input. The *constants* are numbers for good: dynamo guards them.
    """

    _boxed_call = True  # AOTAutograd then hands one list over, and may empty it

    def __init__(
        self,
        numbers: Sequence[int],
        constants: Mapping[int, float],
        compiler: Callable[..., Compiled],
    ) -> None:
        self._places, self._constants, self._compile = list(numbers), constants, compiler
        self._by_numbers: dict[tuple[str, ...], Compiled] = {}

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run on flat inputs."""
        key = tuple([args[i].item().hex() for i in self._places])  # -0.0 equals 0.0, NaN not NaN
        compiled = self._by_numbers.get(key)
        if compiled is None:
            for other in list(self._by_numbers)[:1]:
                same = [a == b for a, b in zip(key, other, strict=True)]
                self._places = [p for p, s in zip(self._places, same, strict=True) if s]
                key = tuple([k for k, s in zip(key, same, strict=True) if s])
                self._by_numbers.clear()
            numbers = dict(zip(self._places, map(float.fromhex, key), strict=True))
            compiled = self._by_numbers[key] = self._compile({**self._constants, **numbers})
        return compiled(args)


def readable(names: Sequence[str]) -> list[str]:
    """Dynamo's names of inputs as their owner would write them, each once.

    Examples
    --------
    >>> readable(["L_self_modules_layers_modules_0_modules_up_parameters_weight_", "L_x_"])
    ['layers.0.up.weight', 'x']
    """
    unique: list[str] = []
    for name in names:
        short = name.removeprefix("L_").removesuffix("_")
        short = re.sub(r"^self_+modules_+", "", short).replace("_modules_", ".")
        short = re.sub(r"_+(parameters|buffers)_+", ".", short)
        short = re.sub(r"^self\.", "", short) or name
        while short in unique:
            short += "_"
        unique.append(short)
    return unique


#: Key of a stored graph -> attribute of :class:`Compiled`.
KEYS = {
    "onnx": "model",
    "whole": "fused",
    "prepare": "precomputed",
    "exported": "exported",
    "graph_module": "graph_module",
    "session": "sessions",
    "report": "report",
    "seconds": "seconds",
}


class Compiled:
    """A compiled graph, for all its sizes: what ``storage["instance"]`` lists.

    Call it with the list of the graph's inputs. Its parts are attributes, and those that the table
    names are items, too: ``graph["onnx"]`` is ``graph.model``. What fusion decides is of the
    precision that ran last (TF32 or not).

    ================= ==========================
    item              attribute
    ================= ==========================
    ``onnx``          ``model``
    ``whole``         ``fused``
    ``prepare``       ``precomputed``
    ``exported``      ``exported``
    ``graph_module``  ``graph_module``
    ``session``       ``sessions``
    ``report``        ``report``
    ``seconds``       ``seconds``
    ``compiled``      the object itself
    ================= ==========================

    Attributes
    ----------
    exported : onnx.ModelProto
        As converted.
    fused : onnx.ModelProto
        After fusion.
    model : onnx.ModelProto
        What is run at each call: *fused* without what is precomputed.
    precomputed : onnx.ModelProto or None
        What depends on weights alone: run once, and again when a weight changes.
    graph_module : torch.fx.GraphModule
        The functional graph of ATen operators that was converted.
    sessions : list of OrtSession
        One for each partition of *model*, equal ones have the same.
    report : Report
        What each rule of :mod:`roundoff.fusion` did.
    seconds : dict
        Time spent: ``"convert"``, ``"fuse"``, ``"sessions"``.
    by_torch : dict of str to str
        Operator that stays with torch -> why.
    borders : int
        How often a call goes from one partition or kernel to the next.
    no_cuda_graph : str
        Why no CUDA graph is recorded where one was asked for; else empty.
    names : list of str
        Inputs that are tensors, weights included.
    static : list of str
        Those of them that are weights.
    inputs : list of torch.Tensor or None
        Those of the first call, in the order of *names*; None before it.
    device : torch.device

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
        static: Sequence[bool],
        settings: CompileSettings,
        numbers: Mapping[int, float] | None = None,
    ) -> None:
        self._settings, self.graph_module = settings, gm
        numbers = numbers or {}
        places = [
            i for i, a in enumerate(examples) if isinstance(a, torch.Tensor) and i not in numbers
        ]
        self.device = _device([examples[i] for i in places], gm)
        self.names = [names[i] for i in places]
        writes = {n.args[0] for n in gm.graph.nodes if n.target is torch.ops.aten.copy_.default}
        written = [p in writes for p in gm.graph.find_nodes(op="placeholder")]
        fixed = [n for i, n in zip(places, self.names, strict=True) if static[i]]
        overwritten = {n for i, n in zip(places, self.names, strict=True) if written[i]}
        self.static = [n for n in fixed if n not in overwritten]
        # Written to, and of one size: a cache. transformers marks it as static, but not where its
        # first step is compiled.
        self._steady = [
            self.names[at]
            for at, i in enumerate(places)
            if self.names[at] in overwritten and _is_of_one_size(examples[i])
        ]
        self._places, self._all_tensors = places, len(places) == len(examples)
        self._cuda = self.device.type == "cuda"
        self._outputs = Outputs(gm)
        self._first = True
        self.inputs: list[torch.Tensor] | None = None
        self._variants: dict[bool, Variant] = {}
        self._convert_seconds = 0.0
        processor = settings.options.processor or self.device.type.upper()
        converter = functools.partial(
            convert,
            gm,
            examples,
            names,
            self._outputs.names,
            settings.opset or opset_for(gm, processor),
            numbers,
            fallback=settings.fallback,
        )
        self._prepare(converter)
        self._announce()

    def _prepare(self, converter: Callable[..., Converted]) -> None:
        """Convert and load; what ONNX Runtime refuses goes to torch."""
        refused: dict[str, str] = {}
        while True:
            start = time.perf_counter()
            with outside():
                self._converted = converter(refused=refused)
            self.exported = self._converted.model
            self._convert_seconds += time.perf_counter() - start
            try:
                self._variants.clear()
                self._variant = self._for_precision(self._cuda and torch_tf32())
                return
            except RoundoffError as e:
                name = _culprit(self.exported, e)
                if name is None or name in refused or not self._settings.fallback:
                    raise
                refused[name] = str(e)

    def _for_precision(self, tf32: bool) -> Variant:
        if tf32 not in self._variants:
            converted = self._converted
            names = self.names + converted.integers
            by_argument = dict(zip(self._places, self.names, strict=True))
            exported = Exported(
                self.exported,
                names,
                self.static,
                self.device,
                converted.kernels,
                self._steady,
                [by_argument[i] for i in converted.written],
                converted.integers,
            )
            with outside():
                self._variants[tf32] = Variant(exported, self._settings, tf32)
        return self._variants[tf32]

    @property
    def by_torch(self) -> dict[str, str]:
        return self._converted.by_torch

    @property
    def no_cuda_graph(self) -> str:
        return self._variant.no_cuda_graph

    @property
    def borders(self) -> int:
        """Between steps of the program: each waits for the one before, some 5 to 20 µs."""
        return max(len(self._variant.program.steps) - 1, 0)

    def _announce(self) -> None:
        """Print, store and write what the settings ask for."""
        settings, variant = self._settings, self._variant
        if settings.verbose:
            nodes = len(variant.model.graph.node)
            print(
                f"onnx_custom_backend: {nodes} nodes a call, {self.borders} borders; "
                f"{variant.report}"
            )
            for name, reason in self.by_torch.items():
                print(f"onnx_custom_backend: {name} stays with torch: {reason}")
        number = 0
        if settings.storage is not None:
            instances = settings.storage.setdefault("instance", [])
            number = len(instances)
            instances.append(self)
        if settings.dump_prefix is not None:
            prefix = settings.dump_prefix
            while (path := prefix.with_name(f"{prefix.name}_{number}.onnx")).exists() and (
                settings.storage is None
            ):
                number += 1
            onnx.save(variant.fused, str(path))

    @property
    def fused(self) -> onnx.ModelProto:
        return self._variant.fused

    @property
    def model(self) -> onnx.ModelProto:
        return self._variant.model

    @property
    def precomputed(self) -> onnx.ModelProto | None:
        return self._variant.precomputed

    @property
    def sessions(self) -> list[OrtSession]:
        return self._variant.program.sessions

    @property
    def report(self) -> Report:
        return self._variant.report

    @property
    def seconds(self) -> dict[str, float]:
        return {"convert": self._convert_seconds} | self._variant.seconds

    def __getitem__(self, key: str) -> Any:
        return self if key == "compiled" else getattr(self, KEYS[key])

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run; *args* as the graph takes them, integers included."""
        sizes = {
            s.name: args[s.argument] if s.axis is None else args[s.argument].shape[s.axis]
            for s in self._converted.symbols
        }
        if not (self._outputs.names or self._converted.written):
            return self._outputs.restore([], sizes)
        variant = self._variant
        if self._cuda and variant.tf32 != torch_tf32():
            variant = self._variant = self._for_precision(torch_tf32())
        tensors = args if self._all_tensors else [args[i] for i in self._places]
        if self._converted.integers:
            tensors += [torch.tensor([sizes[n]]) for n in self._converted.integers]
        if self._first:
            self._first = False
            if self._settings.storage is not None:
                self.inputs = [t.detach() for t in tensors]
        outputs = variant(tensors, sizes)
        return outputs if self._outputs.plain else self._outputs.restore(outputs, sizes)

    def truth(self, inputs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """What the graph returns on the inputs of its first call, in float64 throughout.

        Computed by :class:`roundoff.evaluator.TorchOnnxEvaluator` from the converted graph, so
        that nothing is rounded to float32 inside, as ``module.double()`` would.

        Parameters
        ----------
        inputs : sequence of torch.Tensor, optional
            Others in their place, in the order of ``names``.
        """
        from roundoff.evaluator import TorchOnnxEvaluator

        given = self.inputs if inputs is None else inputs
        if given is None:
            raise ArgumentError(
                "no inputs to run the graph on",
                hint="give onnx_custom_backend a storage, and call the compiled function once",
            )
        known = dict(zip(self._variant.exported.names, given, strict=True))
        graph = self.exported.graph
        feeds = {i.name: known[i.name].detach() for i in graph.input}
        names = [o.name for o in graph.output]
        provider = f"{self.device.type.upper()}ExecutionProvider"
        evaluator = TorchOnnxEvaluator(self.exported, providers=(provider,), truth=True)
        return evaluator.run(names, feeds)


def _is_of_one_size(example: torch.Tensor) -> bool:
    return all(isinstance(d, int) for d in dims(example.shape))


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
