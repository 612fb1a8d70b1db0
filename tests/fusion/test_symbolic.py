"""Rules on graphs whose batch and length are symbols: they match, and hold at several sizes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from fusion_models import FROM_THE_CPU, model

from roundoff.backend.program import Program
from roundoff.fusion import fuse


def fused(proto: onnx.ModelProto, sizes: list[dict[str, int]]) -> list[str]:
    """Fuse once, compare at each of the *sizes*, and give the operators that are left."""
    made, _ = fuse(proto)
    programs = [Program(m, torch.device("cpu"), FROM_THE_CPU) for m in (proto, made)]
    for seed, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed)
        given = {}
        for i in proto.graph.input:
            shape = [size.get(d.dim_param, d.dim_value) for d in i.type.tensor_type.shape.dim]
            given[i.name] = torch.randn(shape, generator=generator)
        before, after = (p.run([given[n] for n in p.inputs], size) for p in programs)
        for a, b in zip(before, after, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return [n.op_type for n in made.graph.node]


SIZES = [{"B": 2, "L": 5, "K": 7}, {"B": 3, "L": 4, "K": 9}, {"B": 2, "L": 5, "K": 7}]
ATTENTION = """g (float[B, L, 16] q, float[B, {k}, 16] k, float[B, {k}, 16] v{more})
  => (float[B, L, 16] y) {{
  q3 = Reshape(q, s) q4 = Transpose<perm = [0, 2, 1, 3]>(q3)
  k3 = Reshape(k, s) kt = Transpose<perm = [0, 2, 3, 1]>(k3)
  v3 = Reshape(v, s) v4 = Transpose<perm = [0, 2, 1, 3]>(v3)
  p = MatMul(q4, kt) c = Mul(p, scale) {mask} z = Softmax<axis = -1>(m)
  o = MatMul(z, v4) t = Transpose<perm = [0, 2, 1, 3]>(o) y = Reshape(t, back) }}"""
SHAPES = {"s": np.array([0, 0, 2, 8]), "back": np.array([0, 0, 16]), "scale": np.float32(0.3)}
LOWER = """n0 = Shape<start = 1, end = 2>(q) nn = Concat<axis = 0>(n0, n0)
  ones = Expand(yes, nn) low = Trilu<upper = {upper}>(ones, k0)
  bias = Where(low, zero, shut) m = Add(c, bias)"""


def lower(upper: int = 0, diagonal: int = 0) -> list[str]:
    constants = {
        "yes": np.array(True),
        "k0": np.array(diagonal),
        "zero": np.float32(0),
        "shut": np.float32(-np.inf),
    }
    text = ATTENTION.format(k="L", more="", mask=LOWER.format(upper=upper))
    # Shapes that inference cannot name.
    text = text.replace("y) {", "y) <bool[L, L] ones, bool[L, L] low, float[L, L] bias> {")
    return fused(model(text, **SHAPES, **constants), SIZES)


@pytest.mark.parametrize("mask", ["m = Identity(c)", "m = Add(c, bias)"])
def test_fewer_queries_than_keys(mask: str) -> None:
    more = ", float[B, 1, L, K] bias" if "bias" in mask else ""
    assert "MultiHeadAttention" in fused(
        model(ATTENTION.format(k="K", more=more, mask=mask), **SHAPES), SIZES
    )


def test_causal_of_any_length() -> None:
    assert "GroupQueryAttention" in lower()


@pytest.mark.parametrize("change", [{"upper": 1}, {"diagonal": 1}], ids=str)
def test_not_causal_of_any_length(change: dict[str, int]) -> None:
    assert "GroupQueryAttention" not in lower(**change)


def one_query(mask: list[int | str] | None, batch: int | str = "B") -> onnx.ModelProto:
    """Attention of one query and four heads over two heads of keys, repeated."""
    bias = ", float[" + ", ".join(map(str, mask)) + "] bias" if mask else ""
    text = f"""g (float[{batch}, 4, 1, 8] q, float[{batch}, 2, K, 8] k, float[{batch}, 2, K, 8] v
      {bias}) => (float[{batch}, 4, 1, 8] y)
      <float[{batch}, 4, K, 8] k3, float[{batch}, 4, K, 8] v3> {{
      k1 = Unsqueeze(k, two) k2 = Expand(k1, wide) k3 = Reshape(k2, s)
      v1 = Unsqueeze(v, two) v2 = Expand(v1, wide) v3 = Reshape(v2, s)
      kt = Transpose<perm = [0, 1, 3, 2]>(k3) p = MatMul(q, kt) c = Mul(p, scale)
      m = {"Add(c, bias)" if mask else "Identity(c)"}
      z = Softmax<axis = -1>(m) y = MatMul(z, v3) }}"""
    return model(
        text,
        two=np.array([2]),
        wide=np.array([1, 1, 2, 1, 1]),
        s=np.array([0, 4, -1, 8]),
        scale=np.float32(0.3),
    )


@pytest.mark.parametrize("batch", ["B", 2, 1])
@pytest.mark.parametrize(("rows", "heads"), [("batch", 1), (1, 1), ("batch", 4), (1, 4), (None, 0)])
def test_one_query_is_a_group_of_queries(
    batch: int | str, rows: int | str | None, heads: int
) -> None:
    mask = None if rows is None else [batch if rows == "batch" else rows, heads, 1, "K"]
    left = fused(one_query(mask, batch), SIZES)
    assert "MultiHeadAttention" in left
    assert left.count("Expand") == (2 if heads == 4 else heads)  # keys and values, head by head


def test_reshapes_that_no_number_can_say_stay() -> None:
    text = """g (float[B, L, 6] x) => (float[L, B, 6] y) <float[L, B, 6] y0> {
      n = Shape(x) b = Gather(n, i) a = Reshape(x, flat) y0 = Reshape(a, b) y = Neg(y0) }"""
    proto = model(text, i=np.array([1, 0, 2]), flat=np.array([-1, 6]))
    assert fused(proto, SIZES).count("Reshape") == 2
