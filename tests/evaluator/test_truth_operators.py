"""The truth of operators without a plain torch kernel, against ONNX Runtime in float32.

Each operator is drawn with many attributes. A truth may be refused, never wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import ModelProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from roundoff.errors import UnsupportedError
from roundoff.evaluator import TorchOnnxEvaluator

onnxruntime.set_default_logger_severity(4)


class Drawn(NamedTuple):
    """A node, its inputs, and which of them are constants of the model."""

    op_type: str
    inputs: list[Any]
    attributes: dict[str, Any]
    outputs: int = 1
    opset: int = 20
    constants: tuple[int, ...] = ()

    def model(self) -> tuple[ModelProto, dict[str, Any]]:
        names = [f"x{k}" if x is not None else "" for k, x in enumerate(self.inputs)]
        made = [f"y{k}" for k in range(self.outputs)]
        node = helper.make_node(self.op_type, names, made, **self.attributes)
        fixed = [f"x{k}" for k in self.constants]
        feeds = {
            n: np.asarray(x)
            for n, x in zip(names, self.inputs, strict=True)
            if n and n not in fixed
        }
        infos = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for n, x in feeds.items()
        ]
        graph = helper.make_graph(
            [node], "one", infos, [helper.make_empty_tensor_value_info(n) for n in made],
            [numpy_helper.from_array(np.asarray(self.inputs[k]), f"x{k}") for k in self.constants],
        )  # fmt: skip
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9), feeds


Draw = Callable[[np.random.Generator], Drawn]
DRAWN: dict[str, Draw] = {}


def drawn(function: Draw) -> Draw:
    DRAWN[function.__name__] = function
    return function


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(np.float32)


def int64(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


@drawn
def lrn(rng: np.random.Generator) -> Drawn:
    # ONNX Runtime has no window of even size.
    size = int(rng.choice([1, 3, 5, 7]))
    attributes = {"size": size, "alpha": rng.uniform(0.1, 2), "beta": rng.uniform(0.3, 1)}
    attributes["bias"] = float(rng.uniform(0.5, 2))
    return Drawn("LRN", [normal(rng, 2, int(rng.integers(1, 9)), 3, 2)], attributes)


def windows(rng: np.random.Generator, rank: int) -> dict[str, Any]:
    kernel = rng.integers(1, 4, rank).tolist()
    attributes = {"kernel_shape": kernel, "strides": rng.integers(1, 4, rank).tolist()}
    mode = rng.choice(["NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"])
    if mode == "NOTSET":
        attributes["pads"] = [int(rng.integers(0, k)) for k in kernel * 2]
        attributes["ceil_mode"] = int(rng.integers(0, 2))
    else:
        attributes["auto_pad"] = str(mode)
    return attributes


def pooled(rng: np.random.Generator, op_type: str, **more: Any) -> Drawn:
    rank = int(rng.integers(1, 4))
    attributes = windows(rng, rank) | more
    if rng.integers(0, 2) and attributes.get("auto_pad") != "VALID":
        attributes["dilations"] = rng.integers(1, 3, rank).tolist()
    x = normal(rng, 2, 2, *rng.integers(6, 10, rank))
    return Drawn(op_type, [x], attributes)


@drawn
def max_pool(rng: np.random.Generator) -> Drawn:
    given = pooled(rng, "MaxPool")
    if rng.integers(0, 2):
        order = {"storage_order": int(rng.integers(0, 2))}
        return given._replace(outputs=2, attributes=given.attributes | order)
    return given


@drawn
def average_pool(rng: np.random.Generator) -> Drawn:
    return pooled(rng, "AveragePool", count_include_pad=int(rng.integers(0, 2)))


@drawn
def lp_pool(rng: np.random.Generator) -> Drawn:
    return pooled(rng, "LpPool", p=int(rng.integers(1, 5)))


@drawn
def global_lp_pool(rng: np.random.Generator) -> Drawn:
    return Drawn("GlobalLpPool", [normal(rng, 2, 3, 4, 5)], {"p": int(rng.integers(1, 5))})


@drawn
def conv_transpose(rng: np.random.Generator) -> Drawn:
    rank, group = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    attributes = windows(rng, rank)
    attributes.pop("ceil_mode", None)
    attributes |= {"group": group, "dilations": rng.integers(1, 3, rank).tolist()}
    kernel, strides = attributes["kernel_shape"], attributes["strides"]
    if "pads" in attributes:
        attributes["output_padding"] = [int(rng.integers(0, s)) for s in strides]
    x = normal(rng, 2, 2 * group, *rng.integers(3, 6, rank))
    if "pads" in attributes and rng.integers(0, 2):
        whole = [
            (n - 1) * s + (k - 1) * d + 1 + o
            for n, s, k, d, o in zip(
                x.shape[2:], strides, kernel, attributes["dilations"],
                attributes["output_padding"], strict=True,
            )
        ]  # fmt: skip
        del attributes["pads"]
        attributes["output_shape"] = [max(n - int(rng.integers(0, 3)), 1) for n in whole]
    w = normal(rng, 2 * group, 2, *kernel)
    bias = [normal(rng, 2 * group)] if rng.integers(0, 2) else []
    return Drawn("ConvTranspose", [x, w, *bias], attributes, opset=18)


@drawn
def grid_sample(rng: np.random.Generator) -> Drawn:
    rank = int(rng.integers(2, 4))
    modes = ["linear", "nearest", "cubic"][: 3 if rank == 2 else 2]
    attributes = {
        "mode": str(rng.choice(modes)), "align_corners": int(rng.integers(0, 2)),
        "padding_mode": str(rng.choice(["zeros", "border", "reflection"])),
    }  # fmt: skip
    grid = rng.uniform(-1.6, 1.6, (2, *[3] * rank, rank)).astype(np.float32)
    return Drawn("GridSample", [normal(rng, 2, 2, *rng.integers(2, 7, rank)), grid], attributes)


@drawn
def affine_grid(rng: np.random.Generator) -> Drawn:
    rank = int(rng.integers(2, 4))
    size = int64(2, 3, *rng.integers(2, 6, rank))
    inputs = [normal(rng, 2, rank, rank + 1), size]
    attributes = {"align_corners": int(rng.integers(0, 2))}
    return Drawn("AffineGrid", inputs, attributes, constants=(1,))


def recurrent(rng: np.random.Generator, op_type: str) -> Drawn:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op_type]
    times, batch, size, hidden = 4, 3, 2, 3
    direction = str(rng.choice(["forward", "reverse", "bidirectional"]))
    d = 2 if direction == "bidirectional" else 1
    inputs = [normal(rng, times, batch, size), normal(rng, d, gates * hidden, size),
              normal(rng, d, gates * hidden, hidden)]  # fmt: skip
    states = [normal(rng, d, batch, hidden) for _ in range(2 if op_type == "LSTM" else 1)]
    given = rng.integers(0, 2, 4)
    optional: list[Any] = [
        normal(rng, d, 2 * gates * hidden) if given[0] else None,
        rng.integers(1, times + 1, batch).astype(np.int32) if given[1] else None,
        *[s if given[2] else None for s in states],
    ]
    if op_type == "LSTM":
        optional.append(normal(rng, d, 3 * hidden) if given[3] else None)
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    if rng.integers(0, 3) == 0:
        attributes["clip"] = float(rng.uniform(0.2, 1))
    if op_type == "GRU":
        attributes["linear_before_reset"] = int(rng.integers(0, 2))
    if op_type == "LSTM" and rng.integers(0, 3) == 0:
        attributes["input_forget"] = 1
    if rng.integers(0, 2):
        names = ["Relu", "Tanh", "Sigmoid", "HardSigmoid", "Softsign"]
        count = d * {"RNN": 1, "GRU": 2, "LSTM": 3}[op_type]
        attributes["activations"] = [str(n) for n in rng.choice(names, count)]
    outputs = 3 if op_type == "LSTM" else 2
    return Drawn(op_type, inputs + optional, attributes, outputs)


@drawn
def rnn(rng: np.random.Generator) -> Drawn:
    return recurrent(rng, "RNN")


@drawn
def gru(rng: np.random.Generator) -> Drawn:
    return recurrent(rng, "GRU")


@drawn
def lstm(rng: np.random.Generator) -> Drawn:
    return recurrent(rng, "LSTM")


@drawn
def resize(rng: np.random.Generator) -> Drawn:
    x = normal(rng, 1, 2, *rng.integers(3, 7, 2))
    attributes: dict[str, Any] = {
        "mode": str(rng.choice(["nearest", "linear", "cubic"])),
        "coordinate_transformation_mode": str(
            rng.choice(["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric",
                        "half_pixel_symmetric"])
        ),
    }  # fmt: skip
    if attributes["mode"] == "nearest":
        names = ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"]
        attributes["nearest_mode"] = str(rng.choice(names))
    if attributes["mode"] == "cubic":
        attributes |= {"exclude_outside": int(rng.integers(0, 2)), "cubic_coeff_a": -0.5}
    if attributes["mode"] != "nearest" and rng.integers(0, 2):
        attributes["antialias"] = 1
    sizes = int64(1, 2, *rng.integers(1, 12, 2))
    opset = int(rng.choice([11, 13, 18, 20]))
    if opset < 18:
        attributes.pop("antialias", None)
        if attributes["coordinate_transformation_mode"] == "half_pixel_symmetric":
            attributes["coordinate_transformation_mode"] = "half_pixel"
    roi = np.zeros(0, np.float32)
    # ONNX Runtime rounds the size of an output with aligned corners before it takes the scale.
    if rng.integers(0, 2) and attributes["coordinate_transformation_mode"] != "align_corners":
        scales = np.array([1, 1, *rng.uniform(0.4, 2.5, 2)], np.float32)
        return Drawn("Resize", [x, roi, scales], attributes, opset=opset, constants=(1, 2))
    if opset >= 18 and rng.integers(0, 2):
        policies = ["stretch", "not_larger", "not_smaller"]
        attributes |= {"axes": [2, 3], "keep_aspect_ratio_policy": str(rng.choice(policies))}
        return Drawn("Resize", [x, None, None, sizes[2:]], attributes, 1, opset, (3,))
    if opset >= 13:
        return Drawn("Resize", [x, None, None, sizes], attributes, 1, opset, (3,))
    return Drawn("Resize", [x, roi, roi, sizes], attributes, 1, opset, (1, 2, 3))


@drawn
def deform_conv(rng: np.random.Generator) -> Drawn:
    groups, stride = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    pad, dilation = int(rng.integers(0, 2)), int(rng.integers(1, 3))
    size = int(rng.integers(5, 8))
    out = (size + 2 * pad - (dilation + 1)) // stride + 1
    inputs = [normal(rng, 2, 2 * groups, size, size), normal(rng, 4, 2 * groups, 2, 2),
              normal(rng, 2, 8 * groups, out, out), normal(rng, 4)]  # fmt: skip
    if rng.integers(0, 2):
        inputs.append(normal(rng, 2, 4 * groups, out, out))
    attributes = {"kernel_shape": [2, 2], "offset_group": groups, "strides": [stride] * 2,
                  "pads": [pad] * 4, "dilations": [dilation] * 2}  # fmt: skip
    return Drawn("DeformConv", inputs, attributes)


@drawn
def col2im(rng: np.random.Generator) -> Drawn:
    pad, stride, dilation = (int(rng.integers(a, a + 2)) for a in (0, 1, 1))
    size = 6
    out = (size + 2 * pad - (dilation + 1)) // stride + 1
    attributes = {"pads": [pad] * 4, "strides": [stride] * 2, "dilations": [dilation] * 2}
    inputs = [normal(rng, 2, 8, out * out), int64(size, size), int64(2, 2)]
    return Drawn("Col2Im", inputs, attributes, constants=(1, 2))


@drawn
def dft(rng: np.random.Generator) -> Drawn:
    inverse, onesided = [(0, 0), (0, 1), (1, 0)][int(rng.integers(0, 3))]
    parts = 1 if onesided else int(rng.integers(1, 3))
    length = np.array(rng.integers(3, 9)) if rng.integers(0, 2) else None
    inputs = [normal(rng, 2, 5, 6, parts), length, np.array(rng.choice([1, 2, -2, -3]))]
    constants = (1, 2) if length is not None else (2,)
    return Drawn("DFT", inputs, {"inverse": inverse, "onesided": onesided}, constants=constants)


@drawn
def stft(rng: np.random.Generator) -> Drawn:
    step, frame = np.array(rng.integers(1, 5)), int(rng.integers(3, 9))
    window = normal(rng, frame) if rng.integers(0, 2) else None
    inputs = [normal(rng, 2, 16, 1), step, window, np.array(frame)]
    onesided = {"onesided": int(rng.integers(0, 2))}
    return Drawn("STFT", inputs, onesided, opset=17, constants=(1, 3))


@drawn
def det(rng: np.random.Generator) -> Drawn:
    n = int(rng.integers(1, 5))
    return Drawn("Det", [normal(rng, *rng.integers(1, 4, int(rng.integers(0, 3))), n, n)], {})


@drawn
def roi_align(rng: np.random.Generator) -> Drawn:
    corners = rng.uniform(0, 4, (3, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(0.5, 5, (3, 2))], 1)
    attributes = {
        "mode": str(rng.choice(["avg", "max"])), "output_height": 2, "output_width": 3,
        "sampling_ratio": int(rng.integers(0, 3)), "spatial_scale": float(rng.choice([0.5, 1])),
        "coordinate_transformation_mode": str(rng.choice(["half_pixel", "output_half_pixel"])),
    }  # fmt: skip
    inputs = [normal(rng, 2, 2, 7, 6), boxes.astype(np.float32), rng.integers(0, 2, 3)]
    return Drawn("RoiAlign", inputs, attributes)


@drawn
def max_unpool(rng: np.random.Generator) -> Drawn:
    # Without padding, of which ONNX Runtime has another reading.
    places = np.stack([rng.permutation(36)[:9].reshape(3, 3) for _ in range(2)])[None]
    attributes = {"kernel_shape": [2, 2], "strides": [2, 2]}
    return Drawn("MaxUnpool", [normal(rng, 1, 2, 3, 3), places + 36 * int64(0, 1)[:, None, None]],
                 attributes)  # fmt: skip


@drawn
def loss(rng: np.random.Generator) -> Drawn:
    tail = [2] * int(rng.integers(0, 3))
    inputs = [normal(rng, 3, 4, *tail), rng.integers(0, 4, (3, *tail))]
    if rng.integers(0, 2):
        inputs.append(np.abs(normal(rng, 4)))
    attributes: dict[str, Any] = {"reduction": str(rng.choice(["none", "mean", "sum"]))}
    if rng.integers(0, 2):
        attributes["ignore_index"] = int(rng.integers(-1, 4))
    names = ["NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"]
    return Drawn(str(rng.choice(names)), inputs, attributes)


@drawn
def batch_normalization(rng: np.random.Generator) -> Drawn:
    scale, bias, mean = (normal(rng, 3) for _ in range(3))
    inputs = [normal(rng, 4, 3, *rng.integers(1, 4, int(rng.integers(0, 3)))), scale, bias, mean]
    attributes = {"training_mode": 1, "momentum": float(rng.uniform()), "epsilon": 0.01}
    return Drawn("BatchNormalization", [*inputs, np.abs(normal(rng, 3))], attributes, 3)


@drawn
def center_crop_pad(rng: np.random.Generator) -> Drawn:
    inputs = [normal(rng, *rng.integers(3, 9, 3)), int64(*rng.integers(2, 10, 2))]
    axes = [[0, 1], [1, 2], [-1, 0]][int(rng.integers(0, 3))]
    return Drawn("CenterCropPad", inputs, {"axes": axes}, constants=(1,))


@drawn
def unique(rng: np.random.Generator) -> Drawn:
    x = rng.integers(0, 3, (4, 2)).astype(np.float32)
    attributes = {"sorted": int(rng.integers(0, 2))}
    if rng.integers(0, 2):
        attributes["axis"] = int(rng.integers(-2, 2))
    return Drawn("Unique", [x], attributes, 4)


@drawn
def scatter(rng: np.random.Generator) -> Drawn:
    reduction = {"reduction": str(rng.choice(["add", "mul", "max", "min"]))}
    if rng.integers(0, 2):
        inputs = [normal(rng, 4, 3), rng.integers(-4, 4, (5, 1)), normal(rng, 5, 3)]
        return Drawn("ScatterND", inputs, reduction)
    axis = int(rng.integers(-2, 2))
    inputs = [normal(rng, 4, 3), rng.integers(-3, 3, (2, 3)), normal(rng, 2, 3)]
    return Drawn("ScatterElements", inputs, reduction | {"axis": axis})


@drawn
def non_max_suppression(rng: np.random.Generator) -> Drawn:
    corners = rng.uniform(0, 2, (2, 6, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(0.5, 1.5, (2, 6, 2))], 2)
    scores = rng.uniform(size=(2, 2, 6)).astype(np.float32)
    limits = [np.array([rng.integers(1, 6)]), np.float32([rng.uniform(0.1, 0.7)])]
    inputs = [boxes.astype(np.float32), scores, *limits, np.float32([rng.uniform(0, 0.5)])]
    return Drawn(
        "NonMaxSuppression", inputs, {"center_point_box": int(rng.integers(0, 2))}, constants=(2,)
    )


def whole(rng: np.random.Generator, dtype: Any, *shape: int) -> np.ndarray[Any, Any]:
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


@drawn
def quantized_product(rng: np.random.Generator) -> Drawn:
    a, b = (np.dtype(rng.choice(["int8", "uint8"])) for _ in range(2))
    per_column = bool(rng.integers(0, 2))
    columns = 3 if per_column else 1
    zero_b = whole(rng, b, columns) if per_column else whole(rng, b, 1)[0].reshape(())
    inputs = [whole(rng, a, 2, 4), whole(rng, b, 4, 3), whole(rng, a, 1)[0].reshape(())]
    if rng.integers(0, 2):
        return Drawn("MatMulInteger", [*inputs, zero_b], {}, opset=18)
    scale = rng.uniform(0.01, 0.1, columns).astype(np.float32)
    return Drawn(
        "QLinearMatMul",
        [inputs[0], np.float32(0.03), inputs[2], inputs[1], scale if per_column else scale[0],
         zero_b, np.float32(1.3), whole(rng, a, 1)[0].reshape(())],
        {}, opset=18,
    )  # fmt: skip


@drawn
def quantized_convolution(rng: np.random.Generator) -> Drawn:
    attributes = {"pads": rng.integers(0, 2, 4).tolist(), "strides": rng.integers(1, 3, 2).tolist()}
    x, w = whole(rng, np.uint8, 1, 2, 5, 5), whole(rng, np.uint8, 3, 2, 2, 2)
    zeros = [np.uint8(rng.integers(0, 256)), np.uint8(rng.integers(0, 256))]
    if rng.integers(0, 2):
        return Drawn("ConvInteger", [x, w, *zeros], attributes, opset=18)
    inputs = [x, np.float32(0.02), zeros[0], w, np.float32(0.03), zeros[1], np.float32(1.7),
              np.uint8(90)]  # fmt: skip
    if rng.integers(0, 2):
        inputs.append(rng.integers(-9999, 9999, 3).astype(np.int32))
    return Drawn("QLinearConv", inputs, attributes, opset=18, constants=(3,))


@drawn
def quantization(rng: np.random.Generator) -> Drawn:
    dtype = np.dtype(rng.choice(["int8", "uint8", "int16", "uint16"]))
    zero = whole(rng, dtype, 1)[0].reshape(())
    if rng.integers(0, 2):
        inputs = [whole(rng, dtype, 3, 4), np.float32(rng.uniform(0.01, 1)), zero]
        return Drawn("DequantizeLinear", inputs, {}, opset=21)
    x = np.concatenate([normal(rng, 8) * 1000, np.float32([np.inf, -np.inf, 1e20])])
    return Drawn("QuantizeLinear", [x.astype(np.float32), np.float32(0.5), zero], {}, opset=21)


@drawn
def extremes_of_nothing(rng: np.random.Generator) -> Drawn:
    shape = [int(n) for n in rng.integers(1, 4, 3)]
    shape[int(rng.integers(0, 3))] = 0
    attributes = {"keepdims": int(rng.integers(0, 2))}
    inputs = [np.zeros(shape, np.float32), int64(shape.index(0))]
    name = str(rng.choice(["ReduceMax", "ReduceMin"]))
    return Drawn(name, inputs, attributes, constants=(1,))


@drawn
def sign(rng: np.random.Generator) -> Drawn:
    return Drawn("Sign", [np.float32([np.nan, np.inf, -np.inf, 0, -0.0, rng.normal()])], {})


#: ONNX Runtime's transforms lose digits, and its recurrent operators approximate functions.
_LOOSE = {"DFT": 1e-3, "STFT": 1e-3, "RNN": 1e-4, "GRU": 1e-4, "LSTM": 1e-4}


def _is_quantized(given: Drawn) -> bool:
    """Without VNNI ONNX Runtime adds pairs of such products in 16 bits, which may not hold them."""
    return given.op_type in ("MatMulInteger", "QLinearMatMul", "ConvInteger", "QLinearConv")


def _is_exact(model: ModelProto, feeds: dict[str, Any], got: Any, most: int) -> bool:
    """Whether ONNX's reference, which adds whole numbers in 32 bits, gives the truth."""
    exact = ReferenceEvaluator(model).run(None, feeds)
    pairs = zip(got, exact, strict=True)
    return all(np.abs(a.numpy().astype(np.int64) - b).max(initial=0) <= most for a, b in pairs)


def verdict(given: Drawn) -> str:
    """ "same", "refused", "not in ONNX Runtime", or what is wrong."""
    model, feeds = given.model()
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        expected = session.run(None, feeds)
    except Exception:
        return "not in ONNX Runtime"
    for output, value in zip(model.graph.output, expected, strict=True):
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        output.CopyFrom(helper.make_tensor_value_info(output.name, kind, None))
    try:
        got = TorchOnnxEvaluator(model, truth=True).run(None, feeds)
    except UnsupportedError:
        return "refused"
    for true, other in zip(got, expected, strict=True):
        if tuple(true.shape) != other.shape:
            return f"shape {tuple(true.shape)} and {other.shape}: {given}"
        if other.dtype.kind != "f":
            apart = np.abs(true.numpy().astype(np.float64) - other).max(initial=0)
            # Sums in float64 and in float32 may lie on both sides of a tie.
            most = 1 if given.op_type.startswith("QLinear") else 0
            if apart > most and not (_is_quantized(given) and _is_exact(model, feeds, got, most)):
                return f"{apart} apart: {given}"
            continue
        assert true.dtype == torch.float64
        size = np.abs(other[np.isfinite(other)]).max(initial=1e-3)
        loose = _LOOSE.get(given.op_type, 2e-5)
        if not np.allclose(true.numpy(), other, rtol=loose, atol=loose * size, equal_nan=True):
            return f"{np.nanmax(np.abs(true.numpy() - other))} apart: {given}"
    return "same"


def check(name: str, seeds: Iterator[int] | range) -> Counter[str]:
    found = Counter(verdict(DRAWN[name](np.random.default_rng(seed))) for seed in seeds)
    wrong = set(found) - {"same", "refused", "not in ONNX Runtime"}
    assert not wrong, "\n".join(wrong)
    return found


@pytest.mark.parametrize("name", list(DRAWN))
def test_a_truth_is_right_or_refused(name: str) -> None:
    assert check(name, range(6))["same"] >= 1


@pytest.mark.slow(reason="six attributes of each operator stand for them until a kernel changes")
@pytest.mark.parametrize("name", list(DRAWN))
def test_truths_of_many_attributes_are_right_or_refused(name: str) -> None:
    assert check(name, range(6, 60))["same"] >= 5
