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

from .module import over_rms

if TYPE_CHECKING:
    import pandas

__all__ = ["COLUMNS", "Quantization", "is_quantized", "quantization_cost"]

#: Columns of :attr:`Quantization.frame`.
COLUMNS = ("node", "kind", "tensor", "cost", "output")
#: A rounded weight is at most so many steps of its grid from the parameter that it was: half of one
#: where it is rounded to nearest, one where a tool chooses the direction.
_STEPS = 1.001
_PARTS = ("QuantizeLinear", "DequantizeLinear")
#: How the names of operators begin that compute with quantised numbers.
_WHOLE = ("QLinear", "DynamicQuantize", "MatMulInteger", "ConvInteger")


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
            return (
                f" Rounded weights that are no parameter of the module (folded, or of another "
                f"model): {self.unmatched}. They stayed rounded: so the float graph is "
                f"{self.residual:.2g} from the module."
            )
        if self.explains:
            return ""
        return (
            f" The float graph itself is {self.residual:.2g} from the module, which quantisation "
            "does not explain: look at the export."
        )


def is_quantized(proto: onnx.ModelProto) -> bool:
    """Whether a node of the main graph quantises or computes with quantised numbers."""
    return any(n.op_type in _PARTS or n.op_type.startswith(_WHOLE) for n in proto.graph.node)


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
        rows = [_alone(proto, usable, p, feeds, base, ends[best]) for p in usable]
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
    constants = _constants(proto)
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
    weights = [pair for pair in pairs if pair.kind == "weight"]
    rounded, zeros, ones = (_dequantized(proto, weights, fill) for fill in (None, 0, 1))
    for k, pair in enumerate(weights):
        step = np.abs(ones[k] - zeros[k])
        integers = numpy_helper.to_array(_constants(proto)[pair.tensor]).astype(np.int64)
        info = dtype_info(_constants(proto)[pair.tensor].data_type)
        # Where its grid ended the weight may have been any number.
        ends = (integers == info.max) | (integers == _least(info))
        near = [
            array
            for array in arrays
            if array.shape == rounded[k].shape
            and ((np.abs(array - rounded[k]) <= _STEPS * step) | ends).all()
        ]
        if near:
            chosen = min(near, key=lambda array: float(np.mean((array - rounded[k]) ** 2)))
            scale = _constants(proto).get(proto.graph.node[pair.index].input[1])
            kind = scale.data_type if scale is not None else onnx.TensorProto.FLOAT
            pair.float_value = chosen.astype(onnx_dtype_to_np_dtype(kind))
    return sum(pair.float_value is None for pair in weights)


def _least(info: DType) -> float:
    """Smallest number of an integer type."""
    return -info.max - 1 if info.kind == "int" else 0.0


def _dequantized(
    proto: onnx.ModelProto, weights: Sequence[_Pair], fill: int | None
) -> list[np.ndarray[Any, Any]]:
    """Rounded weights in float64, or what one integer in place of all of theirs stands for."""
    nodes, stored = [proto.graph.node[pair.index] for pair in weights], _constants(proto)
    needed = {name: stored[name] for node in nodes for name in node.input if name}
    tensors = []
    for name, tensor in needed.items():
        value = numpy_helper.to_array(tensor)
        if fill is not None and name in {pair.tensor for pair in weights}:
            value = np.full_like(value, fill)
        tensors.append(numpy_helper.from_array(value, name))
    outputs = [helper.make_tensor_value_info(node.output[0], 1, None) for node in nodes]
    model = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    model.graph.CopyFrom(helper.make_graph(nodes, "weights", [], outputs, tensors))
    return [value.cpu().numpy() for value in _run(model, {})]


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
    if low is None:
        return [helper.make_node("Identity", [pair.tensor], [name])]
    if not both_ends:
        low, high = low if low == 0 else np.full_like(low, -np.inf), np.full_like(high, np.inf)
    nodes, source = [], pair.tensor
    for op_type, end, result in (("Max", low, f"{name}|max"), ("Min", high, name)):
        value = numpy_helper.from_array(np.asarray(end))
        nodes.append(helper.make_node("Constant", [], [f"{result}|end"], value=value))
        nodes.append(helper.make_node(op_type, [source, f"{result}|end"], [result]))
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
    low, high = (np.array((end - middle) * step, scale.dtype) for end in (_least(info), info.max))
    return low, high


def _constants(proto: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Tensors that the model holds, by name."""
    stored = {t.name: t for t in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type != "Constant":
            continue
        value = helper.get_attribute_value(node.attribute[0])
        if isinstance(value, (int, float)):
            kind = np.float32 if isinstance(value, float) else np.int64
            value = numpy_helper.from_array(np.array(value, kind))
        if isinstance(value, onnx.TensorProto):
            stored[node.output[0]] = value
    return stored


def _run(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    return TorchOnnxEvaluator(model, truth=True).run(None, feeds)


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
    """Largest RMS of a change over that of the floating output that it is of, and which one."""
    changes = [over_rms(a, b)[1] for a, b in zip(reference, got, strict=False)]
    known = [(c, k) for k, c in enumerate(changes) if not math.isnan(c)]
    return max(known, default=(math.nan, 0))
