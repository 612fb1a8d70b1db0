"""``TorchOnnxEvaluator``: a model, its kernels, and the ways to run them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from roundoff.arguments import check_feeds, check_flag, check_providers
from roundoff.dtypes import dtype_info
from roundoff.errors import ArgumentError, UnsupportedError

from .checks import check_feed
from .loading import load
from .lowering import lower
from .nodes import Node, Settings
from .program import Bound
from .registry import check_custom, check_order, kernels_for
from .values import elem_type, on_device, to_value


class Step(NamedTuple):
    """What one node did: see :meth:`~roundoff.evaluator.TorchOnnxEvaluator.steps`.

    Examples
    --------
    >>> import onnx.parser
    >>> graph = onnx.parser.parse_graph("g (float[2] X) => (float[2] Z) { Z = Abs(X) }")
    >>> (step,) = TorchOnnxEvaluator(graph).steps({"X": -torch.ones(2)})
    >>> step.node.op_type, step.kernel, step.outputs
    ('Abs', 'torch', (tensor([1., 1.]),))
    """

    node: Node
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    kernel: str


class TorchOnnxEvaluator:
    """Runs an ONNX model node by node.

    Parameters
    ----------
    model : ModelProto, GraphProto, bytes, str or Path
        A bare graph is taken to use the newest opset that ``onnx`` knows.
    providers : sequence of str
        ``("CPUExecutionProvider",)`` or with ``"CUDAExecutionProvider"`` first: where every
        result is computed, by torch as by ONNX Runtime. Feeds are moved there.
    custom_kernels : mapping (domain, op_type) -> Kernel or function
        Used instead of every other kernel, in local functions too. A plain
        function is called as ``f(*inputs, **attributes)``.
    kernels : sequence of str
        Order in which kernels are tried: any of ``"torch"``, ``"ort"``, ``"reference"``; by
        default all three in this order.
        An If, Loop or Scan runs as a whole in the first of them that has it, which is none in
        truth mode. Where ONNX Runtime departs
        from ONNX's definition (DFT, STFT, Resize, MaxUnpool, Dropout, Sign, Shrink, some
        reductions) the default
        has ONNX's reference before it.
    truth : bool
        Compute in float64 throughout, whatever the model's types say: every floating constant
        and feed is converted, a Cast to a floating type gives float64, and attributes such as
        ``stash_type`` that ask for a narrower type are ignored. Integers keep their types and
        their wrapping: QuantizeLinear still rounds to its integer type, so a quantised model's
        truth includes its quantisation, but none of the rounding of its floating arithmetic.
        An operator without a kernel that is verified in float64 is refused, not guessed.

    Attributes
    ----------
    input_names : list of str
        Inputs, in the model's order; one that has a default value (an initializer of the same
        name) may be left out of the feeds.
    output_names : list of str
        Outputs, in the model's order.
    nodes : tuple of Node
        In execution order, local functions inlined. If, Loop and Scan are one node each;
        ``node.subgraphs`` holds their bodies.
        Constant nodes are not among them: they are constants before the run.

    Raises
    ------
    ModelError
        The model is broken, cyclic, or refers to data outside its folder.
    UnsupportedError
        An operator has no kernel, or a provider is not available.
    DtypeError, ShapeError
        The model's types or shapes do not fit together.

    Examples
    --------
    >>> from onnx import TensorProto, helper
    >>> info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in "XYZ"]
    >>> node = helper.make_node("Add", ["X", "Y"], ["Z"], name="sum")
    >>> model = helper.make_model(helper.make_graph([node], "add", info[:2], info[2:]),
    ...                           opset_imports=[helper.make_opsetid("", 20)])
    >>> evaluator = TorchOnnxEvaluator(model)
    >>> evaluator.run(None, {"X": torch.ones(2), "Y": torch.tensor([1.0, 2.0])})
    [tensor([2., 3.])]
    >>> evaluator.kernels_used()
    {'sum': 'torch'}
    """

    def __init__(
        self,
        model: Any,
        providers: Sequence[Any] = ("CPUExecutionProvider",),
        custom_kernels: Mapping[tuple[str, str], Any] | None = None,
        *,
        kernels: Sequence[str] | None = None,
        truth: bool = False,
    ) -> None:
        device = _device(providers)
        self.settings = Settings(tuple(providers), device, check_flag("truth", truth))
        custom = check_custom(custom_kernels)
        order = None if kernels is None else check_order(kernels)
        proto, folder = load(model, custom)
        nodes, self._constants = lower(proto, folder, custom, self._prepared, self.settings)
        self._bound = [Bound(node, kernels_for(node, custom, order)) for node in nodes]
        self._plans: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
        self._declared = {i.name: i.type for i in proto.graph.input if i.type.WhichOneof("value")}
        self.input_names = [i.name for i in proto.graph.input]
        self.output_names = [o.name for o in proto.graph.output]
        self.nodes = tuple(nodes)

    def run(
        self,
        names: Sequence[str] | Mapping[str, Any] | None = None,
        feeds: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run the model; ``run(feeds)`` is ``run(None, feeds)``.

        Parameters
        ----------
        names : sequence of str or None
            Results to return: outputs, or any other result of the main graph; None for the
            outputs.
        feeds : mapping of str to tensor or array
            Checked against the declared element types, ranks and fixed dimensions.

        Returns
        -------
        list
            Torch tensors; NumPy arrays for strings and types narrower than a byte; lists for
            sequences. A result may share memory with a feed; no feed is ever written to.

        Raises
        ------
        ArgumentError, DtypeError, ShapeError
            A feed is missing, unknown, or of the wrong type or shape.
        ModelError, UnsupportedError
            A node fails; the message names it.
        """
        if feeds is None and isinstance(names, Mapping):
            names, feeds = None, names
        keep = tuple(self.output_names) if names is None else self._known(names)
        with torch.no_grad():
            values = self._begin(feeds)
            read = values.__getitem__
            for bound, reads, makes, dead in self._plan(keep):
                # As bound.run does, without its call, which takes a tenth of a small node's time.
                try:
                    if len(reads) == 2:  # the commonest, and faster so
                        first, second = reads
                        result = bound.call(values[first], values[second])
                    else:
                        result = bound.call(*map(read, reads))
                except Exception as error:
                    result = bound.instead(error, [*map(read, reads)])
                else:
                    bound.used = bound.first
                if len(makes) == 1:
                    values[makes[0]] = result
                else:
                    results = zip(makes, bound.several(result), strict=False)
                    values.update((n, x) for n, x in results if n)
                for name in dead:
                    del values[name]
        return [values[name] for name in keep]

    def _known(self, names: Iterable[str]) -> tuple[str, ...]:
        names = (names,) if isinstance(names, str) else tuple(names)
        made = {name for node in self.nodes for name in node.outputs if name}
        known = {*self.input_names, *self._constants, *made}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ArgumentError(
                "no such result",
                got=unknown[0],
                expected=f"outputs {self.output_names}",
                hint="run(None, feeds)",
            )
        return names

    def _plan(self, keep: tuple[str, ...]) -> list[tuple[Any, ...]]:
        """For each node what it reads and makes, and the results that nothing reads after it."""
        if keep not in self._plans:
            needed, backwards = {"", *self._constants, *keep}, []
            for bound in reversed(self._bound):
                reads, makes = (*bound.node.inputs, *bound.node.captures), bound.node.outputs
                backwards.append((bound, reads, makes, tuple({*reads, *makes} - needed)))
                needed |= {*reads, *makes}
            self._plans[keep] = backwards[::-1]
        return self._plans[keep]

    def steps(self, feeds: Mapping[str, Any]) -> Iterator[Step]:
        """Run, and yield after each node; results are freed at last use as in :meth:`run`.

        Two evaluators of one model advance together with
        ``zip(a.steps(feeds), b.steps(feeds), strict=True)``.
        """
        values = self._begin(feeds)
        for bound, reads, makes, dead in self._plan(tuple(self.output_names)):
            inputs = tuple(values[name] for name in reads)
            outputs = _outputs(bound, inputs)
            values.update((n, x) for n, x in zip(makes, outputs, strict=False) if n)
            for name in dead:
                del values[name]
            yield Step(bound.node, inputs, outputs, bound.used)

    def run_node(self, node: int, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run one node of ``nodes``, by its index, on *inputs*, and nothing else.

        *inputs* follow ``node.inputs`` (None for an absent one), then ``node.captures`` for
        an If, Loop or Scan: the layout of ``step.inputs``, here or in another evaluator of the
        same model. A constant that steers a kernel (a shape, axes) is the model's, whatever
        stands in its place.
        """
        bound = self._bound[node]
        expected = len(bound.node.inputs) + len(bound.node.captures)
        if len(inputs) != expected:
            raise ArgumentError(
                f"inputs of node {bound.node.name!r}", got=len(inputs), expected=str(expected)
            )
        return _outputs(bound, [self._prepared(to_value(x)) for x in inputs])

    def kernels_used(self) -> dict[str, str]:
        """Which kernel ran, or would run, each node: ``node.name`` -> ``"torch"``, ``"ort"``, …

        A kernel that leaves some types to the next is reported as of the last run.
        """
        return {bound.node.name: bound.used for bound in self._bound}

    def _begin(self, feeds: Any) -> dict[str, Any]:
        """What is known before the first node, by name: inputs are converted and checked."""
        check_feeds(feeds, self.input_names, self._constants)
        values = {"": None, **self._constants}
        for name in feeds:
            value = to_value(feeds[name])
            if name in self._declared:
                check_feed(name, value, self._declared[name], self.settings.truth)
            values[name] = self._prepared(value)
        return values

    def _prepared(self, value: Any) -> Any:
        """The value on the device, in float64 in truth mode."""
        if isinstance(value, list):
            return [self._prepared(item) for item in value]
        if self.settings.truth and elem_type(value) and dtype_info(value.dtype).is_float:
            value = torch.as_tensor(value if torch.is_tensor(value) else value.astype("float64"))
            value = value.to(torch.float64)
        return on_device(value, self.settings.device)


@torch.no_grad()
def _outputs(bound: Bound, inputs: Sequence[Any]) -> tuple[Any, ...]:
    result = bound.run(inputs)
    return tuple(bound.several(result)) if len(bound.node.outputs) > 1 else (result,)


def _device(providers: Sequence[Any]) -> torch.device:
    name, options = check_providers(providers)[0]
    if name == "CPUExecutionProvider":
        return torch.device("cpu")
    if name != "CUDAExecutionProvider":
        raise UnsupportedError(
            "provider", got=name, expected="CPUExecutionProvider or CUDAExecutionProvider"
        )
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "torch sees no CUDA device", got=name, hint='providers=["CPUExecutionProvider"]'
        )
    return torch.device("cuda", int(options.get("device_id", torch.cuda.current_device())))
