"""What quantisation costs, and which node costs it: a QDQ model beside its graph without Q and DQ.

A pair QuantizeLinear, DequantizeLinear rounds a tensor to a grid; one DequantizeLinear of integers
that the model holds stands for a weight that was rounded before. Without the pairs, and with the
module's own parameters in place of the rounded weights, the model is the float model again. All
runs are in float64, so that their difference is quantisation alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from roundoff.dtypes import dtype_info
from roundoff.evaluator import Node, TorchOnnxEvaluator
from roundoff.evaluator.values import to_numpy
from roundoff.localization import scaled

if TYPE_CHECKING:
    import pandas

#: Columns of :attr:`Quantization.frame`.
COLUMNS = ("node", "kind", "tensor", "cost", "output")
#: A rounded weight is at most so many steps of its grid from the parameter that it was: half of one
#: where it is rounded to nearest, one where a tool chooses the direction.
_STEPS = 1.001
#: How the names of operators begin that quantise, or compute with quantised numbers.
_QUANTIZED = (
    "QuantizeLinear",
    "DequantizeLinear",
    "QLinear",
    "DynamicQuantize",
    "MatMulInteger",
    "ConvInteger",
)


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

    def sentence(self) -> str:
        """What it costs, and where."""
        if math.isnan(self.total):
            return (
                "The model is quantised: what that costs is not known without the float module; "
                "give it as module=."
            )
        texts = [
            f"The model is quantised, which moves an output by {self.total:.2g} of its RMS in "
            f"float64 (against {self.against}): this is no rounding of a runtime."
        ]
        if self.residual >= max(0.1 * self.total, 1e-5):
            texts.append(
                f"The float graph itself is {self.residual:.2g} from the module ({self.unmatched} "
                "rounded weights are no parameter of it, and stayed rounded): quantisation does "
                "not explain this. A Clip (ReLU6, Hardtanh) that the quantiser left out may; else "
                "look at the export."
            )
        if len(self.frame):
            most = self.frame.iloc[0]
            texts.append(
                f"The node that costs most is {most['node']} ({most['kind']} {most['tensor']}), "
                f"alone {most['cost']:.2g}; see .quantization.frame."
            )
        return " ".join(texts)


def is_quantized(proto: onnx.ModelProto) -> bool:
    """Whether a node of the main graph quantises or computes with quantised numbers."""
    return any(node.op_type.startswith(_QUANTIZED) for node in proto.graph.node)


def quantization_cost(
    proto: onnx.ModelProto,
    evaluator: TorchOnnxEvaluator,
    feeds: Mapping[str, Any],
    module: Any,
    results: Mapping[str, Sequence[Any]],
) -> Quantization:
    """Measure it.

    Parameters
    ----------
    proto : onnx.ModelProto
        The quantised model, with its weights in it.
    evaluator : TorchOnnxEvaluator
        One of it.
    feeds : mapping
        Inputs.
    module : torch.nn.Module or None
        The float module, whose parameters are searched for the weights.
    results : mapping
        Outputs in float64, quantisation included ("truth"), and those of the module, if any.
    """
    import pandas

    pairs = _pairs(proto, evaluator, module)
    floats = [pair for pair in pairs if pair.in_float is not None]
    reference, against = results.get("module"), "the module"
    residual, rows = math.nan, []
    if floats:
        base = _run(proto, floats, feeds)
        if reference is None:
            reference, against = base, "the model without its pairs, whose weights stay rounded"
        else:
            residual = _moved(reference, base)[0]
        for pair in floats:
            others = [other for other in floats if other is not pair]
            cost, output = _moved(base, _run(proto, others, feeds))
            name = proto.graph.output[output].name
            rows.append((pair.name, pair.kind, pair.tensor, cost, name))
    frame = pandas.DataFrame(rows, columns=list(COLUMNS)).sort_values("cost", ascending=False)
    total = math.nan if reference is None else _moved(reference, results["truth"])[0]
    unmatched = len(pairs) - len(floats)
    return Quantization(total, against, residual, unmatched, frame)


class _Pair(NamedTuple):
    """A DequantizeLinear, and the node that stands in its place in the float graph, if any does."""

    name: str
    kind: str
    tensor: str
    in_float: onnx.NodeProto | None


def _pairs(proto: onnx.ModelProto, evaluator: TorchOnnxEvaluator, module: Any) -> list[_Pair]:
    parameters = []
    if isinstance(module, torch.nn.Module):
        arrays = [p.detach().double().cpu().numpy() for p in module.state_dict().values()]
        parameters = arrays + [a.T for a in arrays if a.ndim == 2]
    makers = {name: node for node in evaluator.nodes for name in node.outputs}
    pairs = []
    for result in [name for node in proto.graph.node for name in node.output]:
        node = makers.get(result)
        if node is None or node.operator != "DequantizeLinear":
            continue
        source = makers.get(node.inputs[0])
        if source is not None and source.operator == "QuantizeLinear":
            zero, tensor = node.constants.get(2), source.inputs[0]
            # A grid that begins at zero does what a Relu before it did.
            from_zero = zero is not None and not dtype_info(zero.dtype).is_float
            if from_zero:
                lowest = to_numpy(zero)
                from_zero = bool((lowest == ml_dtypes.iinfo(lowest.dtype).min).all())
            in_float = helper.make_node("Relu" if from_zero else "Identity", [tensor], [result])
            pairs.append(_Pair(node.name, "activation", tensor, in_float))
        elif len(node.constants) == len(node.inputs):
            weight = _parameter(node, parameters)
            in_float = None
            if weight is not None:
                value = numpy_helper.from_array(weight)
                in_float = helper.make_node("Constant", [], [result], value=value)
            pairs.append(_Pair(node.name, "weight", node.inputs[0], in_float))
    return pairs


def _parameter(node: Node, parameters: Sequence[Any]) -> np.ndarray[Any, Any] | None:
    """The parameter that a weight was before it was rounded."""
    integers, scale, *zeros = (to_numpy(node.constants[place]) for place in range(len(node.inputs)))
    if scale.ndim > 1 or dtype_info(integers.dtype).is_float:  # blocks, or float8
        return None
    limits = ml_dtypes.iinfo(integers.dtype)
    grid, step, start = (x.astype(np.float64) for x in (integers, scale, *zeros, 0 * scale)[:3])
    if scale.size > 1:
        shape = [1] * grid.ndim
        shape[node.attribute("axis", 1)] = scale.size
        step, start = step.reshape(shape), start.reshape(shape)
    near = []
    for array in parameters:
        if array.shape == grid.shape:
            apart = np.abs(np.clip(array / step + start, limits.min, limits.max) - grid)
            if (apart <= _STEPS).all():
                near.append((float(np.mean(apart**2)), array))
    if not near:
        return None
    _, closest = min(near, key=lambda pair: pair[0])
    return np.ascontiguousarray(closest.astype(scale.dtype))


def _run(
    proto: onnx.ModelProto, in_float: Collection[_Pair], feeds: Mapping[str, Any]
) -> list[Any]:
    """Outputs in float64 of the model with the float value in place of each pair's result."""
    instead = {pair.in_float.output[0]: pair.in_float for pair in in_float if pair.in_float}
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    model.graph.ClearField("node")
    model.graph.ClearField("value_info")
    for node in proto.graph.node:
        model.graph.node.append(instead.get(node.output[0]) or node)
    return TorchOnnxEvaluator(model, truth=True).run(None, feeds)


def _moved(reference: Sequence[Any], got: Sequence[Any]) -> tuple[float, int]:
    """Largest RMS of a change over that of the floating output that it is of, and which one."""
    eps = dtype_info("float32").eps
    changes = [eps * scaled(a, b, "float32")[1] for a, b in zip(reference, got, strict=True)]
    known = [(change, k) for k, change in enumerate(changes) if not math.isnan(change)]
    return max(known, default=(math.nan, 0))
