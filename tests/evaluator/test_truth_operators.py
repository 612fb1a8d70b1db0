"""The truth of many operators, against ONNX Runtime in float32: it may be refused, never wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import helper

from roundoff.evaluator import TorchOnnxEvaluator

onnxruntime.set_default_logger_severity(4)
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def whole(*values: Any) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


X = normal(3, 4, 5)
IMAGE = normal(2, 6, 7, 6)
HEADS = [normal(2, 4, 5, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 8)]
BYTES = [RNG.integers(0, 256, s).astype(np.uint8) for s in ((4, 8), (8, 3), (1, 2, 5, 5))]
FILTERS = RNG.integers(0, 256, (3, 2, 2, 2)).astype(np.uint8)
SMALL = np.float32([0.02, 0.03, 1.7])

#: Operator, inputs, attributes.
CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    # Kernels in torch.
    *((op, [X], {}) for op in ("Abs", "Ceil", "Erf", "Floor", "HardSwish", "Round", "Selu", "Sign",
                               "Sinh", "Softplus", "Elu", "LeakyRelu", "Celu", "Sigmoid", "Tanh")),
    *(("Gelu", [X], {"approximate": a}) for a in ("none", "tanh")),
    ("Sign", [np.float32([np.nan, np.inf, -np.inf, 0, -0.0])], {}),
    ("Clip", [X, np.float32(-0.5), np.float32(0.7)], {}),
    ("IsInf", [np.float32([np.inf, -np.inf, 0])], {"detect_negative": 0}),
    ("Pow", [abs(X), np.float32(0.5)], {}),
    ("Pow", [abs(X), X], {}),
    ("Div", [whole(-7, 7, -8), whole(2, -2, 3)], {}),
    ("Mod", [whole(-7, 7, -8), whole(2, -2, 3)], {}),
    ("Mean", [X, X[:1], X[:, :1]], {}),
    *(("ArgMax", [np.round(X)], {"axis": 1, "select_last_index": k}) for k in (0, 1)),
    *((f"Reduce{op}", [abs(X), whole(0, 2)], {"keepdims": k})
      for op in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum",
                 "SumSquare") for k in (0, 1)),
    ("ReduceSum", [X], {"noop_with_empty_axes": 1}),
    *(("CumSum", [X, whole(1)[0]], {"exclusive": e, "reverse": r}) for e in (0, 1) for r in (0, 1)),
    *((op, [X], {"axis": 1}) for op in ("Softmax", "LogSoftmax")),
    ("LayerNormalization", [X, normal(4, 5), normal(4, 5)], {"axis": 1}),
    ("LayerNormalization", [X, normal(5)], {"axis": 1}),
    ("BatchNormalization", [IMAGE, *(abs(normal(6)) for _ in range(4))], {}),
    ("InstanceNormalization", [IMAGE, normal(6), normal(6)], {}),
    ("Gemm", [X[0], X[1], normal(4, 1)], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("Einsum", [X, X], {"equation": "bij,bkj->bik"}),
    *(("Conv", [IMAGE, normal(4, 3, 3, 2), normal(4)], {"group": 2, **more}) for more in (
        {"strides": [2, 1], "pads": [1, 0, 2, 1]}, {"auto_pad": "SAME_LOWER"})),
    ("ConvTranspose", [IMAGE, normal(6, 2, 3, 3), normal(4)],
     {"group": 2, "strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 0]}),
    *(("MaxPool", [IMAGE], {"kernel_shape": [3, 2], "pads": [1, 1, 1, 1], "strides": [2, 1]})
      for _ in range(1)),
    *(("AveragePool", [IMAGE],
       {"kernel_shape": [3, 2], "pads": [1, 1, 1, 1], "count_include_pad": c}) for c in (0, 1)),
    *(("Pad", [X, whole(0, 1, -1, 0, 2, 1)], {"mode": m}) for m in ("reflect", "edge")),
    ("Slice", [X, whole(9, 3), whole(-9, 0), whole(1, 2), whole(-2, -1)], {}),
    ("Gather", [X, whole([0, -1], [2, 1])], {"axis": 1}),
    ("TopK", [np.round(X), whole(3)], {"axis": 1, "largest": 0}),
    ("Trilu", [X, whole(1)[0]], {"upper": 0}),
    ("Range", [np.float32(1), np.float32(9), np.float32(2.5)], {}),
    # Definitions of ONNX.
    *((op, [X], {}) for op in ("HardSigmoid", "Mish", "Shrink", "Softsign", "ThresholdedRelu")),
    ("PRelu", [X, normal(4, 1)], {}),
    ("GroupNormalization", [IMAGE, normal(6), normal(6)], {"num_groups": 3}),
    *(("SoftmaxCrossEntropyLoss", [X[0], whole(0, 4, 2, 1)], {"reduction": r, "ignore_index": 2})
      for r in ("none", "mean", "sum")),
    ("NegativeLogLikelihoodLoss", [X[0], whole(0, 4, 2, 1), abs(normal(5))], {}),
    *(("Attention", HEADS, more) for more in ({}, {"is_causal": 1}, {"softcap": 2.0})),
    ("Attention", [normal(2, 5, 32), normal(2, 6, 16), normal(2, 6, 16), normal(5, 6)],
     {"q_num_heads": 4, "kv_num_heads": 2}),
    *(("RotaryEmbedding",
       [normal(2, 4, 24), normal(9, 4), normal(9, 4), RNG.integers(0, 9, (2, 4))],
       {"num_heads": 3, "interleaved": k}) for k in (0, 1)),
    # ONNX's reference: elements that move, and whole numbers.
    ("CenterCropPad", [X, whole(2, 9)], {"axes": [0, 2]}),
    ("Compress", [X, np.array([1, 0, 1], bool)], {"axis": 1}),
    *(("DepthToSpace", [normal(1, 8, 2, 3)], {"blocksize": 2, "mode": m}) for m in ("DCR", "CRD")),
    ("SpaceToDepth", [normal(1, 2, 4, 6)], {"blocksize": 2}),
    ("EyeLike", [X[0]], {"k": -1}),
    ("GatherElements", [X, RNG.integers(-4, 4, (3, 2, 5))], {"axis": 1}),
    ("GatherND", [X, RNG.integers(-4, 4, (3, 2, 1))], {"batch_dims": 1}),
    ("NonZero", [np.round(X)], {}),
    ("OneHot", [whole(0, -1, 7, 2), whole(4)[0], normal(2)], {"axis": 0}),
    ("ReverseSequence", [normal(4, 3, 2), whole(1, 2, 4)], {}),
    *(("ScatterElements", [X, whole([[2], [-1]]), normal(1, 2, 1)], {"axis": 1, "reduction": r})
      for r in ("none", "add", "mul", "max")),
    *(("ScatterND", [X, whole([0, -1], [2, 0]), normal(2, 5)], {"reduction": r})
      for r in ("none", "add")),
    ("ReduceMax", [np.zeros((2, 0, 3), np.float32), whole(1)], {}),
    ("MatMulInteger", [BYTES[0], BYTES[1], np.uint8(9), np.uint8(200)], {}),
    ("ConvInteger", [BYTES[2], FILTERS, np.uint8(9), np.uint8(200)], {"pads": [0, 1, 1, 0]}),
    ("QLinearConv", [BYTES[2], SMALL[0], np.uint8(9), FILTERS, SMALL[1], np.uint8(200), SMALL[2],
                     np.uint8(90), RNG.integers(-9999, 9999, 3).astype(np.int32)], {}),
    ("QLinearMatMul", [BYTES[0], SMALL[0], np.uint8(9), BYTES[1], SMALL[1], np.uint8(200), SMALL[2],
                       np.uint8(90)], {}),
    *(("QuantizeLinear", [X * 1000, np.float32(0.5), np.dtype(d).type(3)], {})
      for d in ("int8", "uint8", "int16", "uint16")),
    ("QuantizeLinear", [X, abs(normal(4)), np.zeros(4, np.int8)], {"axis": 1}),
    ("DequantizeLinear", [BYTES[0], abs(normal(8)), BYTES[0][0]], {"axis": 1}),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)), ids=[name for name, *_ in CASES])
def test_a_truth_is_onnx_runtime_s_answer_in_float64(case: int) -> None:
    op_type, inputs, attributes = CASES[case]
    names = [f"x{k}" for k in range(len(inputs))]
    feeds = dict(zip(names, map(np.asarray, inputs), strict=True))
    outputs = ["y", "places"] if op_type == "TopK" else ["y"]
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in feeds.items()
    ]
    ends = [helper.make_tensor_value_info(n, 0, None) for n in outputs]
    for end in ends:
        end.type.tensor_type.elem_type = 0
    node = helper.make_node(op_type, names, outputs, **attributes)
    model = helper.make_model(
        helper.make_graph([node], "one", infos, ends),
        opset_imports=[helper.make_opsetid("", 23)],
        ir_version=10,
    )
    got = TorchOnnxEvaluator(model, truth=True).run(None, feeds)
    plain = TorchOnnxEvaluator(model).run(None, feeds)
    expected = TorchOnnxEvaluator(model, kernels=["ort"]).run(None, feeds)
    for true, ours, other in zip(got, plain, expected, strict=True):
        assert true.shape == ours.shape == other.shape
        assert ours.dtype == other.dtype
        if not other.is_floating_point():
            # Sums in float64 and in float32 may lie on both sides of a tie.
            most = 1 if op_type.startswith("QLinear") else 0
            assert int((true.long() - other.long()).abs().max()) <= most
            continue
        assert true.dtype == torch.float64
        size = float(other[other.isfinite()].abs().max()) if other.isfinite().any() else 1
        close = {"rtol": 2e-5, "atol": 2e-5 * size, "equal_nan": True}
        torch.testing.assert_close(true, other.double(), **close)
        torch.testing.assert_close(ours, other, **close)
