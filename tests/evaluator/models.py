"""Small models for the evaluator's tests, in ONNX's text form where that is shorter."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, parser

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def text(body: str, functions: str = "", opset: int = 18, ir: int = 9) -> ModelProto:
    """A model from ONNX's text: a graph, then local functions of domain ``local``."""
    header = f'<ir_version: {ir}, opset_import: ["": {opset}, "local": 1, "com.microsoft": 1]>'
    return parser.parse_model(f"{header}\n{body}\n{functions}")


def one(op_type: str, inputs: int = 1, outputs: int = 1, opset: int = 18, **attributes: Any) -> Any:
    """A model of one node over float32 inputs X0, X1, … of any rank."""
    names = [f"X{k}" for k in range(inputs)]
    made = [f"Y{k}" for k in range(outputs)]
    return helper.make_model(
        helper.make_graph(
            [helper.make_node(op_type, names, made, name="the_node", **attributes)],
            "one",
            [helper.make_tensor_value_info(n, FLOAT, None) for n in names],
            [helper.make_tensor_value_info(n, FLOAT, None) for n in made],
        ),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=10,
    )


#: LayerNormalization -> MatMul -> Add, as the page on discrepancies has it.
LAYER_NORM_MATMUL = """
agraph (float[n, d] X, float[d] scale, float[d] bias, float[d, e] W, float[e] B) => (float[n, e] Z)
{
    N = LayerNormalization<axis = -1>(X, scale, bias)
    M = MatMul(N, W)
    Z = Add(M, B)
}
"""

#: A local function that calls another, with an attribute handed down, and uses a subgraph.
NESTED_FUNCTIONS = """
agraph (float[n] X, bool C) => (float[n] Z)
{
    A = local.outer <slope = 0.25> (X, C)
    Z = Add(A, X)
}
"""
NESTED_FUNCTIONS_BODIES = """
<domain: "local", opset_import: ["": 18, "local": 1]>
outer <slope: float> (x, c) => (y)
{
    t = local.inner <alpha: float = @slope> (x)
    y = If (c) <
        then_branch = yes () => (float[n] a) { a = Mul(t, x) },
        else_branch = no () => (float[n] b) { b = Sub(t, x) }
    >
}
<domain: "local", opset_import: ["": 18]>
inner <alpha: float> (x) => (y)
{
    t = LeakyRelu <alpha: float = @alpha> (x)
    y = Mul(t, t)
}
"""

#: Sum of the first n integers with a running list, through Loop; the body reads X from outside.
LOOP = """
agraph (int64 n, float[2] X) => (float[2] total, float[k, 2] steps)
{
    start = Sub(X, X)
    yes = Constant <value = bool {1}> ()
    total, steps = Loop (n, yes, start) <
        body = turn (int64 i, bool going, float[2] so_far)
            => (bool still, float[2] next, float[2] shown)
        {
            still = Identity(going)
            next = Add(so_far, X)
            shown = Identity(next)
        }
    >
}
"""

SCAN = """
agraph (float[2] start, float[n, 2] xs) => (float[2] last, float[n, 2] sums)
{
    last, sums = Scan <num_scan_inputs = 1,
        body = step (float[2] before, float[2] x) => (float[2] after, float[2] out)
        {
            after = Add(before, x)
            out = Identity(after)
        }
    > (start, xs)
}
"""


def arrays(seed: int = 0, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Normal float32 arrays of these shapes."""
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
