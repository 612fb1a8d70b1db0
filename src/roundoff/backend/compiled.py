"""One compiled graph: converted and fused once a set of sizes, run on the caller's tensors."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch

from roundoff.errors import ArgumentError, UnsupportedError
from roundoff.fusion import OptimizationOptions
from roundoff.ort import torch_tf32

from .capture import outside, specialised, to_onnx
from .outputs import Outputs
from .variant import Variant

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Compiled", "Graph", "Settings"]


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
    cuda_graph: bool


class Compiled:
    """What AOTAutograd calls: a functional graph on flat inputs.

    Graphs with symbolic sizes are specialised for each set of sizes that arrives, and kept.

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
    >>> len(storage["instance"])  # two sets of sizes
    2
    """

    _boxed_call = True  # AOTAutograd then hands one list over, and may empty it

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

    def callable(self) -> Compiled | Graph:
        """What to call: the one graph, where sizes are static."""
        return self._graph or self

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run on flat inputs."""
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
    names, static : list of str
        Inputs that are tensors, and those of them that are weights.
    device : torch.device
    seconds : dict
        Time spent in conversion.
    """

    _boxed_call = True

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
        self._given, self._whole = given, len(given) == len(examples)
        self._cuda = self.device.type == "cuda"
        self._outputs = Outputs(gm)
        self.seconds: dict[str, float] = {}
        if not self._outputs.names:
            return
        self.exported = to_onnx(gm, tensors, self.names, self._outputs.names, settings.opset)
        self.seconds["convert"] = time.perf_counter() - start
        self._first = True
        #: Inputs of the first call, where a storage was given: weights and examples to study.
        self.inputs: list[torch.Tensor] | None = None
        self._variants: dict[bool, Variant] = {}
        self._variant = self._for_precision(self._cuda and torch_tf32())
        self._store(self._variant)

    def _for_precision(self, tf32: bool) -> Variant:
        if tf32 not in self._variants:
            with outside():
                self._variants[tf32] = Variant(self.exported, self, tf32)
        return self._variants[tf32]

    def _store(self, variant: Variant) -> None:
        settings = self.settings
        if settings.verbose:
            nodes = len(variant.model.graph.node)
            print(f"onnx_custom_backend: {nodes} nodes a call; {variant.report}")
        number = 0
        if settings.storage is not None:
            instances = settings.storage.setdefault("instance", [])
            number = len(instances)
            instances.append(
                {
                    "onnx": variant.model,
                    "whole": variant.whole,
                    "prepare": variant.prepare,
                    "exported": self.exported,
                    "graph_module": self.gm,
                    "session": variant.main.sessions,
                    "report": variant.report,
                    "seconds": self.seconds | variant.seconds,
                    "compiled": self,
                }
            )
        if settings.dump_prefix is not None:
            prefix = settings.dump_prefix
            while (path := prefix.with_name(f"{prefix.name}_{number}.onnx")).exists() and (
                settings.storage is None
            ):
                number += 1
            onnx.save(variant.whole, str(path))

    def __call__(self, args: list[Any]) -> list[Any]:
        """Run; *args* as the graph takes them, integers included."""
        if not self._outputs.names:
            return self._outputs.restore([])
        variant = self._variant
        if self._cuda and variant.tf32 != torch_tf32():
            variant = self._variant = self._for_precision(torch_tf32())
        if self._first:
            self._first = False
            if self.settings.storage is not None:
                self.inputs = [args[i].detach() for i in self._given]
            if self.settings.check:
                self.verify(args)
        made = variant(args if self._whole else [args[i] for i in self._given])
        return made if self._outputs.plain else self._outputs.restore(made)

    def verify(self, args: Sequence[Any]) -> None:
        """Raise where fusion changed the result on these inputs; see :mod:`.check`."""
        from .check import verify

        verify(self, [args[i] for i in self._given])

    def compare(self) -> pd.DataFrame:
        """Before and after fusion, value by value; see :func:`.check.before_and_after`.

        Raises
        ------
        ArgumentError
            Nothing is known to run it on: no call was made yet, or no *storage* was given.
        """
        from .check import before_and_after

        return before_and_after(self, self._variant, self._known_inputs())

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
        return truth(self, self._known_inputs() if inputs is None else inputs, names)

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
