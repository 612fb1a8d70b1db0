"""What quantisation costs, and which node costs it: a QDQ model beside its graph without Q and DQ.

A pair QuantizeLinear, DequantizeLinear rounds a tensor to a grid; one DequantizeLinear of integers
that the model holds stands for a weight that was rounded before. Without the pairs, and with the
module's own parameters in place of the rounded weights, the model is the float model again. All
runs are in float64, so that their difference is quantisation alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from roundoff.dtypes import DType, dtype_info, onnx_dtype_to_np_dtype
from roundoff.evaluator import TorchOnnxEvaluator
from roundoff.evaluator.values import to_value

if TYPE_CHECKING:
    import pandas

__all__ = ["COLUMNS", "Quantization", "is_quantized", "quantization_cost"]

#: Columns of :attr:`Quantization.frame`.
COLUMNS = ("node", "kind", "tensor", "cost", "output")
#: Pairs that are each run alone; of more, those that round their own tensor most.
_MOST = 64
#: A rounded weight is at most so many steps of its grid from the parameter that it was: half of one
#: where it is rounded to nearest, one where a tool chooses the direction.
_STEPS = 1.001
_PARTS = ("QuantizeLinear", "DequantizeLinear")
_WHOLE = {
    "ConvInteger",
    "DynamicQuantizeLinear",
    "DynamicQuantizeLSTM",
    "DynamicQuantizeMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "MatMulNBits",
    "QAttention",
    "QGemm",
    "QLinearAdd",
    "QLinearAveragePool",
    "QLinearConcat",
    "QLinearConv",
    "QLinearGlobalAveragePool",
    "QLinearLeakyRelu",
    "QLinearMatMul",
    "QLinearMul",
    "QLinearSigmoid",
    "QLinearSoftmax",
}


@dataclasses.dataclass
class Quantization:
    """What quantisation costs a model.

    Attributes
    ----------
    total : float
        Root mean square of the change that it makes in an output, over that of the float output;
        the largest of the outputs. Against the module where there is one, else against the model
        without its pairs, whose weights stay rounded. NaN where neither could be had.
    against : str
        What it is against, in words.
    residual : float
        The same for the float graph against the module: what the pairs do not explain; NaN without
        a module.
    unmatched : int
        Rounded weights that are no parameter of the module; they stay rounded.
    frame : pandas.DataFrame
        A row for each pair, the one that costs most first: its DequantizeLinear *node*, its *kind*
        ("activation" or "weight"), the *tensor* that it rounds, the *cost* when it is the only one,
        and the *output* that it changes most. Empty where nodes are not told apart.
    """

    total: float
    against: str
    residual: float
    unmatched: int
    frame: pandas.DataFrame

    @property
    def explains(self) -> bool:
        """Whether the float graph is the module's, to far less than what quantisation costs."""
        return self.residual < 0.1 * self.total or self.residual < 1e-5

    def sentence(self) -> str:
        """What it costs, and where."""
        if math.isnan(self.total):
            return (
                "The model is quantised: what that costs is not known without the float module; "
                "give it as module=."
            )
        text = (
            f"The model is quantised, which moves an output by {self.total:.2g} of its RMS in "
            f"float64 (against {self.against}): this is no rounding of a runtime."
        )
        text += self._rest()
        if not len(self.frame):
            return text + " Its nodes cannot be told apart: export it with QuantizeLinear pairs."
        most = self.frame.iloc[0]
        return text + (
            f" The node that costs most is {most['node']} ({most['kind']} {most['tensor']}), alone "
            f"{most['cost']:.2g}; see .quantization.frame."
        )

    def _rest(self) -> str:
        """What the pairs do not explain."""
        if math.isnan(self.residual):
            return ""
        if self.unmatched:
            many = (
                f"{self.unmatched} rounded weights are"
                if self.unmatched > 1
                else ("1 rounded weight is")
            )
            return (
                f" {many} no parameter of the module (folded, or of another model) and stayed "
                f"rounded: so the float graph is {self.residual:.2g} from the module."
            )
        if self.explains:
            return ""
        return (
            f" The float graph itself is {self.residual:.2g} from the module, which quantisation "
            "does not explain: look at the export."
        )


def is_quantized(proto: onnx.ModelProto) -> bool:
    """Whether a node of the main graph quantises or computes with quantised numbers."""
    return any(n.op_type in _WHOLE or n.op_type in _PARTS for n in proto.graph.node)


@dataclasses.dataclass
class _Pair:
    """A DequantizeLinear, and what stands in its place in the float graph."""

    index: int  # of its node
    name: str
    kind: str
    tensor: str
    float_value: np.ndarray[Any, Any] | None = None


def quantization_cost(
    proto: onnx.ModelProto,
    feeds: Mapping[str, Any],
    truth: Sequence[Any],
    module: Any,
    results: Sequence[Any] | None,
) -> Quantization:
    """Measure it.

    Parameters
    ----------
    proto : onnx.ModelProto
        The quantised model, with its weights in it.
    feeds : mapping
        Inputs.
    truth : sequence
        Its outputs in float64, quantisation included.
    module : torch.nn.Module or None
        The float module, whose parameters are searched for the weights.
    results : sequence or None
        Outputs of the module on these feeds.
    """
    import pandas

    pairs = _pairs(proto)
    unmatched = _find_weights(proto, pairs, module)
    usable = [p for p in pairs if p.kind == "activation" or p.float_value is not None]
    frame = pandas.DataFrame(columns=list(COLUMNS))
    base: Sequence[Any] | None = None
    against, residual = "the model without its pairs, whose weights stay rounded", math.nan
    if usable:
        ends = (True, False) if results is not None else (True,)
        bases = [_run(_without(proto, usable, both), feeds) for both in ends]
        distances = [0.0] if results is None else [_moved(results, b)[0] for b in bases]
        best = int(np.argmin(distances))
        base, residual = bases[best], distances[best] if results is not None else math.nan
        rows = [
            _alone(proto, usable, p, feeds, base, ends[best])
            for p in _largest(proto, usable, feeds)
        ]
        rows.sort(key=lambda row: -row["cost"])
        frame = pandas.DataFrame(rows, columns=list(COLUMNS))
    reference = base
    if results is not None:
        against, reference = "the module", list(results)
    total = math.nan if reference is None else _moved(reference, truth)[0]
    return Quantization(total, against, residual, unmatched, frame)


def _pairs(proto: onnx.ModelProto) -> list[_Pair]:
    graph = proto.graph
    producers = {name: node for node in graph.node for name in node.output if name}
    constants = {t.name for t in graph.initializer}
    constants |= {n.output[0] for n in graph.node if n.op_type == "Constant"}
    pairs = []
    for index, node in enumerate(graph.node):
        if node.op_type != "DequantizeLinear":
            continue
        name = node.name or f"DequantizeLinear -> {node.output[0]}"
        source = producers.get(node.input[0])
        if source is not None and source.op_type == "QuantizeLinear":
            pairs.append(_Pair(index, name, "activation", source.input[0]))
        elif node.input[0] in constants and all(n in constants for n in node.input if n):
            pairs.append(_Pair(index, name, "weight", node.input[0]))
    return pairs


def _find_weights(proto: onnx.ModelProto, pairs: Sequence[_Pair], module: Any) -> int:
    """Give each rounded weight the parameter of the module that it was; how many have none."""
    parameters = []
    if isinstance(module, torch.nn.Module):
        parameters = [p for _, p in (*module.named_parameters(), *module.named_buffers())]
    arrays = [p.detach().double().cpu().numpy() for p in parameters if p.is_floating_point()]
    arrays += [a.T for a in arrays if a.ndim == 2]
    unmatched = 0
    for pair in pairs:
        if pair.kind != "weight":
            continue
        near = [a for a in arrays if _is_rounding_of(proto, pair, a)]
        rounded = _dequantized(proto, pair)
        if near:
            chosen = min(near, key=lambda a: float(np.mean((a - rounded) ** 2)))
            pair.float_value = chosen.astype(_result_type(proto, pair))
        else:
            unmatched += 1
    return unmatched


def _is_rounding_of(proto: onnx.ModelProto, pair: _Pair, array: np.ndarray[Any, Any]) -> bool:
    """Whether a weight is within a step of *array*, wherever its grid did not end before."""
    stored = _constants(proto).get(pair.tensor)
    if stored is None or tuple(stored.dims) != array.shape:
        return False
    integers = numpy_helper.to_array(stored)
    info = dtype_info(stored.data_type)
    ends = (integers == integers.dtype.type(info.max)) | (
        integers == integers.dtype.type(_least(info))
    )
    ones = _dequantized(proto, pair, np.ones_like(integers))
    step = np.abs(ones - _dequantized(proto, pair, np.zeros_like(integers)))
    near = np.abs(array - _dequantized(proto, pair)) <= _STEPS * step
    return bool((near | ends).all())


def _least(info: DType) -> float:
    """Smallest number of an integer type."""
    return -info.max - 1 if info.kind == "int" else 0.0


def _result_type(proto: onnx.ModelProto, pair: _Pair) -> np.dtype[Any]:
    """Type that a DequantizeLinear gives: that of its scale."""
    scale, stored = proto.graph.node[pair.index].input[1], _constants(proto)
    return onnx_dtype_to_np_dtype(stored[scale].data_type if scale in stored else 1)


def _dequantized(
    proto: onnx.ModelProto, pair: _Pair, integers: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, Any]:
    """A rounded weight in float64, or what other integers in its place stand for."""
    node = proto.graph.node[pair.index]
    part = onnx.ModelProto()
    part.CopyFrom(proto)
    needed = set(node.input)
    kept = [n for n in part.graph.node if n.op_type == "Constant" and n.output[0] in needed]
    kept = [onnx.NodeProto.FromString(n.SerializeToString()) for n in (*kept, node)]
    tensors = [
        onnx.TensorProto.FromString(t.SerializeToString())
        for t in part.graph.initializer
        if t.name in needed
    ]
    if integers is not None:
        kept = [n for n in kept if pair.tensor not in n.output]
        tensors = [t for t in tensors if t.name != pair.tensor]
        tensors.append(numpy_helper.from_array(integers, pair.tensor))
    for field in ("node", "initializer", "input", "output", "value_info", "sparse_initializer"):
        part.graph.ClearField(field)
    part.graph.node.extend(kept)
    part.graph.initializer.extend(tensors)
    part.graph.output.append(helper.make_tensor_value_info(node.output[0], 1, None))
    value = TorchOnnxEvaluator(part, truth=True).run(None, {})[0]
    return value.double().cpu().numpy()


def _without(proto: onnx.ModelProto, pairs: Sequence[_Pair], both_ends: bool) -> onnx.ModelProto:
    """The model with the float value in place of each pair's result."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    instead = {p.index: _float_nodes(proto, p, both_ends) for p in pairs}
    model.graph.ClearField("node")
    for index, node in enumerate(proto.graph.node):
        model.graph.node.extend(instead.get(index, [node]))
    model.graph.ClearField("value_info")
    return model


def _float_nodes(proto: onnx.ModelProto, pair: _Pair, both_ends: bool) -> list[onnx.NodeProto]:
    """Nodes that give what a pair rounds: a constant, or its input clipped to the grid."""
    name = proto.graph.node[pair.index].output[0]
    if pair.kind == "weight":
        value = numpy_helper.from_array(np.ascontiguousarray(pair.float_value))
        return [helper.make_node("Constant", [], [name], value=value)]
    low, high = _grid(proto, pair)
    steps = [("Max", low)] if low is not None and (both_ends or low == 0) else []
    steps += [("Min", high)] if high is not None and both_ends else []
    if not steps:
        return [helper.make_node("Identity", [pair.tensor], [name])]
    nodes, source = [], pair.tensor
    for k, (op_type, end) in enumerate(steps):
        bound, result = f"{name}|end {k}", name if k + 1 == len(steps) else f"{name}|clipped {k}"
        value = numpy_helper.from_array(end)
        nodes.append(helper.make_node("Constant", [], [bound], value=value))
        nodes.append(helper.make_node(op_type, [source, bound], [result]))
        source = result
    return nodes


def _grid(proto: onnx.ModelProto, pair: _Pair) -> tuple[Any, Any]:
    """Ends of the grid of an activation, where it has one scale that the model holds."""
    node, stored = proto.graph.node[pair.index], _constants(proto)
    if node.input[1] not in stored or len(node.input) < 3 or node.input[2] not in stored:
        return None, None
    scale, zero = (numpy_helper.to_array(stored[n]) for n in node.input[1:3])
    info = dtype_info(stored[node.input[2]].data_type)
    if scale.size != 1 or info.kind not in ("int", "uint"):
        return None, None
    middle, step = float(zero.reshape(-1)[0]), float(scale.reshape(-1)[0])
    ends = (np.array((end - middle) * step, scale.dtype) for end in (_least(info), info.max))
    low, high = ends
    return low, high


def _constants(proto: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Tensors that the model holds, by name."""
    stored = {t.name: t for t in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "Constant" and node.attribute[0].HasField("t"):
            stored[node.output[0]] = node.attribute[0].t
    return stored


def _run(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    return TorchOnnxEvaluator(model, truth=True).run(None, feeds)


def _largest(
    proto: onnx.ModelProto, pairs: Sequence[_Pair], feeds: Mapping[str, Any]
) -> Sequence[_Pair]:
    """The pairs that are run alone: all, or those that round their own tensor most."""
    if len(pairs) <= _MOST:
        return pairs
    inputs: dict[str, Any] = dict(feeds)
    own: dict[str, float] = {}
    results = {proto.graph.node[p.index].output[0]: p for p in pairs}
    for step in TorchOnnxEvaluator(proto, truth=True).steps(feeds):
        if step.node.op_type == "QuantizeLinear":
            inputs[step.node.inputs[0]] = step.inputs[0]
        pair = results.get(step.node.outputs[0])
        if pair is not None and pair.kind == "activation":
            own[pair.name] = _relative(inputs[pair.tensor], step.outputs[0])
    for pair in pairs:
        if pair.float_value is not None:
            own[pair.name] = _relative(
                to_value(pair.float_value), to_value(_dequantized(proto, pair))
            )
    return sorted(pairs, key=lambda p: -own.get(p.name, 0.0))[:_MOST]


def _alone(
    proto: onnx.ModelProto,
    pairs: Sequence[_Pair],
    pair: _Pair,
    feeds: Mapping[str, Any],
    base: Sequence[Any],
    both_ends: bool,
) -> dict[str, Any]:
    others = [p for p in pairs if p is not pair]
    cost, output = _moved(base, _run(_without(proto, others, both_ends), feeds))
    name = proto.graph.output[output].name
    return dict(zip(COLUMNS, (pair.name, pair.kind, pair.tensor, cost, name), strict=True))


def _moved(reference: Sequence[Any], got: Sequence[Any]) -> tuple[float, int]:
    """Largest relative change over the floating outputs, and of which."""
    changes = [_relative(a, b) for a, b in zip(reference, got, strict=False)]
    known = [(c, k) for k, c in enumerate(changes) if not math.isnan(c)]
    return max(known, default=(math.nan, 0))


def _relative(reference: Any, got: Any) -> float:
    """Root mean square of the difference over that of the reference; NaN where none is floating."""
    tensors = isinstance(reference, torch.Tensor) and isinstance(got, torch.Tensor)
    if not tensors or not reference.is_floating_point() or reference.shape != got.shape:
        return math.nan
    a, b = reference.double(), got.to(reference.device).double()
    fits = a.isfinite() & b.isfinite()
    if not bool(fits.any()):
        return math.nan
    a, b = a[fits], b[fits]
    rms = float(a.square().mean().sqrt())
    return float((b - a).square().mean().sqrt()) / rms if rms else math.nan
