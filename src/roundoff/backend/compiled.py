"""A compiled graph: converted and fused for a set of sizes, run on the caller's tensors."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import onnx
import torch

from roundoff.errors import ArgumentError, UnsupportedError
from roundoff.fusion.rule import Report
from roundoff.ort import OrtSession, torch_tf32

from .capture import outside, specialised, to_onnx
from .outputs import Outputs
from .variant import CompileSettings, Exported, Variant

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["BySizes", "Compiled"]


class BySizes:
    """What AOTAutograd calls: a functional graph on flat inputs.

    Graphs with symbolic sizes are specialised for each set of sizes that arrives, and kept.
    """

    _boxed_call = True  # AOTAutograd then hands one list over, and may empty it

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        examples: Sequence[Any],
        names: Sequence[str],
        settings: CompileSettings,
    ) -> None:
        self._gm, self._settings = gm, settings
        context = torch._guards.TracingContext.try_get()
        metadata = getattr(context, "fw_metadata", None)
        static = set(getattr(metadata, "static_input_indices", None) or ())
        places = [n.target for n in gm.graph.nodes if n.op == "placeholder"]
        self._names = readable(names if len(names) == len(places) else [str(p) for p in places])
        self._static = [i in static for i in range(len(places))]
        self._by_sizes: dict[Any, Compiled] = {}
        self._only: Compiled | None = None
        if not _symbolic(examples):
            self._only = self._compile(gm, examples)

    def callable(self) -> BySizes | Compiled:
        """What to call: the one compiled graph, where sizes are static."""
        return self if self._only is None else self._only

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run on flat inputs."""
        key = tuple(
            (tuple(a.shape), a.stride()) if isinstance(a, torch.Tensor) else a for a in args
        )
        if key not in self._by_sizes:
            self._by_sizes[key] = self._compile(specialised(self._gm, args), args)
        return self._by_sizes[key](args)

    def _compile(self, gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Compiled:
        return Compiled(gm, examples, self._names, self._static, self._settings)


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
    """A compiled graph of one set of sizes: what ``storage["instance"]`` lists.

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
        As torch's exporter leaves it.
    fused : onnx.ModelProto
        After fusion.
    model : onnx.ModelProto
        What is run at each call: *fused* without what is precomputed.
    precomputed : onnx.ModelProto or None
        What depends on weights alone: run once, and again when a weight changes.
    graph_module : torch.fx.GraphModule
        The functional graph of ATen operators that was exported.
    sessions : list of OrtSession
        One for each partition of *model*.
    report : Report
        What each rule of :mod:`roundoff.fusion` did.
    seconds : dict
        Time spent: ``"convert"``, ``"fuse"``, ``"sessions"``.
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
    >>> three, four = storage["instance"]  # two sets of sizes
    >>> [node.op_type for node in three.model.graph.node], four.inputs[0].shape
    (['Relu'], torch.Size([4, 2]))
    >>> three["onnx"] is three.model
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
    ) -> None:
        self._settings, self.graph_module = settings, gm
        start = time.perf_counter()
        places = [i for i, a in enumerate(examples) if isinstance(a, torch.Tensor)]
        tensors = [examples[i] for i in places]
        self.device = _device(tensors, gm)
        self.names = [names[i] for i in places]
        self.static = [n for i, n in zip(places, self.names, strict=True) if static[i]]
        self._places, self._all_tensors = places, len(places) == len(examples)
        self._cuda = self.device.type == "cuda"
        self._outputs = Outputs(gm)
        if not self._outputs.names:
            return
        self.exported = to_onnx(gm, tensors, self.names, self._outputs.names, settings.opset)
        self._convert_seconds = time.perf_counter() - start
        self._first = True
        self.inputs: list[torch.Tensor] | None = None
        self._variants: dict[bool, Variant] = {}
        self._variant = self._for_precision(self._cuda and torch_tf32())
        self._announce()

    def _for_precision(self, tf32: bool) -> Variant:
        if tf32 not in self._variants:
            exported = Exported(self.exported, self.names, self.static, self.device)
            with outside():
                self._variants[tf32] = Variant(exported, self._settings, tf32)
        return self._variants[tf32]

    def _announce(self) -> None:
        """Print, store and write what the settings ask for."""
        settings, variant = self._settings, self._variant
        if settings.verbose:
            nodes = len(variant.model.graph.node)
            print(f"onnx_custom_backend: {nodes} nodes a call; {variant.report}")
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

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> list[str]:
        """The items' names."""
        return [*KEYS, "compiled"]

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run; *args* as the graph takes them, integers included."""
        if not self._outputs.names:
            return self._outputs.restore([])
        variant = self._variant
        if self._cuda and variant.tf32 != torch_tf32():
            variant = self._variant = self._for_precision(torch_tf32())
        tensors = args if self._all_tensors else [args[i] for i in self._places]
        if self._first:
            self._first = False
            if self._settings.storage is not None:
                self.inputs = [t.detach() for t in tensors]
            if self._settings.check:
                from .check import verify

                verify(variant, tensors)
        outputs = variant(tensors)
        return outputs if self._outputs.plain else self._outputs.restore(outputs)

    def compare(self) -> pd.DataFrame:
        """Before and after fusion, value by value; see ``backend/check.py``.

        Raises
        ------
        ArgumentError
            Nothing is known to run it on: no call was made yet, or no *storage* was given.
        """
        from .check import before_and_after

        return before_and_after(self._variant, self._known_inputs())

    def truth(self, inputs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """What the graph returns on the inputs of its first call, in float64 throughout.

        Computed by :class:`roundoff.evaluator.TorchOnnxEvaluator` from the exporter's graph, so
        that nothing is rounded to float32 inside, as ``module.double()`` would.

        Parameters
        ----------
        inputs : sequence of torch.Tensor, optional
            Others in their place, in the order of ``names``.
        """
        from .check import truth

        names = [o.name for o in self.exported.graph.output]
        inputs = self._known_inputs() if inputs is None else inputs
        return truth(self._variant.exported, inputs, names)

    def _known_inputs(self) -> list[torch.Tensor]:
        if self.inputs is None:
            raise ArgumentError(
                "no inputs to run the graph on",
                hint="give onnx_custom_backend a storage, and call the compiled function once",
            )
        return self.inputs


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
