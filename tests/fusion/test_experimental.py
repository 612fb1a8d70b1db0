"""The third tier: each rule's hit, near miss and numbers, by the kernels as they run here."""

from __future__ import annotations

import numpy as np
import pytest
from fusion_models import model, rewritten
from test_onnxruntime import CAUSAL, SKIP

from roundoff.fusion import OptimizationOptions, fuse
from roundoff.fusion.onnxruntime import ONNXRUNTIME

EVERY = "default+onnxruntime+experimental"
RMS = {"two": np.float32(2), "axes": np.array([-1]), "eps": np.float32(1e-5)}

GATE = """g ({t}[2, 3, 16] x) => ({t}[2, 3, 8] y) {{
  a, b = Split<axis = -1>(x, halves) s = Sigmoid(a) g = Mul(a, s) y = Mul({last}) }}"""


@pytest.mark.parametrize(("kind", "tolerance"), [("float", 1e-5), ("float16", 3e-3)])
def test_silu_times_up(kind: str, tolerance: float) -> None:
    halves = {"halves": np.array([8, 8])}
    for last in ("g, b", "b, g"):
        made = model(GATE.format(t=kind, last=last), **halves)
        assert rewritten(made, EVERY, tolerance)[0] == ["SiluMul"]
    left, _ = rewritten(model(GATE.format(t=kind, last="g, a"), **halves), EVERY, tolerance)
    assert "SiluMul" not in left


def test_add_rms_norm() -> None:
    text = SKIP.format(a="2, 3, 8")
    assert sorted(rewritten(model(text, **RMS), EVERY)[0]) == ["AddRmsNorm", "Neg"]
    alone = text.replace(", float[2, 3, 8] z", "").replace("z = Neg(x)", "")
    assert rewritten(model(alone, **RMS), EVERY)[0] == ["AddRmsNorm"]


EMBED = """g (int64[2, 3] ids, float[5, 8] table, float[8] w)
  => (float[2, 3, 8] y, float[2, 3, 8] x) {{
  x = Gather<axis = {axis}>(table, ids) s = Pow(x, two) m = ReduceMean<keepdims = 1>(s, axes)
  a = Add(m, eps) r = Sqrt(a) i = Reciprocal(r) n = Mul(x, i) y = Mul(n, w) }}"""


def test_embed_rms_norm() -> None:
    assert rewritten(model(EMBED.format(axis=0), **RMS), EVERY)[0] == ["EmbedRmsNorm"]
    narrow = EMBED.format(axis=0).replace("int64[2, 3]", "int32[2, 3]")
    left, report = rewritten(model(narrow, **RMS), EVERY)
    assert left == ["Gather", "SimplifiedLayerNormalization"]
    assert "int64" in " ".join(report.refused.values())


LAYER = """g (float[2, 6, 64] x, float[{w}, 64] w, float[1, 6, 8] f) => (float[2, 6, 64] y,
  float[2, {g}, 6, 16] keys, float[2, {g}, 6, 16] v4) {{
  wt = Transpose<perm = [1, 0]>(w) p = MatMul(x, wt)
  q, k, v = Split<axis = -1>(p, parts)
  q3 = Reshape(q, by_head) qt = Transpose<perm = [0, 2, 1, 3]>(q3)
  k3 = Reshape(k, by_group) k4 = Transpose<perm = [0, 2, 1, 3]>(k3)
  v3 = Reshape(v, by_group) v4 = Transpose<perm = [0, 2, 1, 3]>(v3)
  t = Concat<axis = -1>(f, f) c3 = Cos(t) s3 = Sin(t) c = Unsqueeze(c3, one) s = Unsqueeze(s3, one)
  q1 = Slice(qt, zero, eight, last) q2 = Slice(qt, eight, end, last)
  qn = Neg(q2) qr = Concat<axis = -1>(qn, q1)
  qa = Mul(qt, c) qb = Mul(qr, s) queries = Add(qa, qb)
  k1 = Slice(k4, zero, eight, last) k2 = Slice(k4, eight, end, last)
  kn = Neg(k2) kr = Concat<axis = -1>(kn, k1)
  ka = Mul(k4, c) kb = Mul(kr, s) keys = Add(ka, kb)
  {repeat} kt = Transpose<perm = [0, 1, 3, 2]>(kk)
  m = MatMul(queries, kt) sc = Mul(m, scale) b = Add(sc, bias) z = Softmax<axis = -1>(b)
  o = MatMul(z, vv) ot = Transpose<perm = [0, 2, 1, 3]>(o) y = Reshape(ot, flat) }}"""


def layer(groups: int = 4) -> tuple[str, dict[str, np.ndarray]]:
    repeat = "kk = Identity(keys) vv = Identity(v4)"
    if groups != 4:
        repeat = " ".join(
            f"{n}5 = Unsqueeze({s}, two) {n}w = Expand({n}5, wide) {n}{n} = Reshape({n}w, full)"
            for n, s in (("k", "keys"), ("v", "v4"))
        )
    constants = {
        "parts": np.array([64, 16 * groups, 16 * groups]),
        "by_head": np.array([2, 6, 4, 16]),
        "by_group": np.array([2, 6, groups, 16]),
        "one": np.array([1]),
        "two": np.array([2]),
        "zero": np.array([0]),
        "eight": np.array([8]),
        "end": np.array([16]),
        "last": np.array([-1]),
        "scale": np.float32(0.25),
        "bias": CAUSAL,
        "flat": np.array([2, 6, 64]),
        "wide": np.array([2, groups, 4 // groups, 6, 16]),
        "full": np.array([2, 4, 6, 16]),
    }
    text = LAYER.format(w=64 + 32 * groups, g=groups, repeat=repeat)
    return text, {k: v for k, v in constants.items() if k in text}


def test_rotary_and_attention_of_a_packed_product() -> None:
    text, constants = layer()
    left, _ = rewritten(model(text, **constants), EVERY, static=["w", "f"], tolerance=1e-4)
    assert [n for n in left if n not in ("Cos", "Sin", "Reshape")] == [
        "FusedMatMul",
        "RotaryQkv",
        "MultiHeadAttention",
    ]


def test_grouped_heads_stay_with_onnx_runtime() -> None:
    text, constants = layer(groups=2)
    left, report = rewritten(model(text, **constants), EVERY, static=["w", "f"], tolerance=1e-4)
    assert "GroupQueryAttention" in left
    assert "grouped heads" in " ".join(report.refused.values())


@pytest.mark.parametrize("groups", [4, 2])
def test_no_float32_grouped_attention_is_left_on_cuda(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, constants = layer(groups)
    made = model(text, **constants)
    options = OptimizationOptions(EVERY, processor="CUDA")
    for left_out in ("", "RotaryAttention", "PackedProducts", "Rotary"):
        some = tuple(rule for rule in ONNXRUNTIME if rule.name != left_out)
        monkeypatch.setattr("roundoff.fusion.onnxruntime.ONNXRUNTIME", some)
        left, _ = fuse(made, options, static=["w", "f"])
        ops = [n.op_type for n in left.graph.node]
        assert "GroupQueryAttention" not in ops
        assert "MultiHeadAttention" in ops


def test_without_cuda_or_interpreter_every_rule_refuses() -> None:
    text, constants = layer()
    made, report = fuse(model(text, **constants), EVERY, static=["w", "f"])
    assert not [n for n in made.graph.node if n.domain == "roundoff"]
    assert "Triton needs CUDA" in " ".join(report.refused.values())


GROUPED = """g (float[2, 3, 32] q, float[2, 3, 16] k, float[2, 3, 16] v, float[2, 1, 0, 16] p,
  float[3, 8] c) => (float[2, 3, 32] y) {{
  {more} y, a, b = com.microsoft.GroupQueryAttention<num_heads = 2, kv_num_heads = 1, scale = 0.25,
    {how}>({inputs}, last, total{tables}) }}"""
#: What a model's own attention may do more.
OWN = {
    "a past": {"inputs": "q, k, v, p, p"},
    "a window": {"how": "do_rotary = 0, rotary_interleaved = 0, local_window_size = 2"},
    "pairs": {"how": "do_rotary = 1, rotary_interleaved = 1", "tables": ", c, c"},
    "keys without a shape": {"tables": ", c, c", "how": "do_rotary = 1, rotary_interleaved = 0"},
    "pairs before": {
        "more": """x = com.microsoft.RotaryEmbedding<interleaved = 1, num_heads = 2>(q, zero, c, c)
          z = com.microsoft.RotaryEmbedding<interleaved = 1, num_heads = 1>(k, zero, c, c)""",
        "inputs": "x, z, v, , ",
        "how": "do_rotary = 0, rotary_interleaved = 0, softcap = 2.0",
    },
}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_attention_that_does_more_stays(own: dict[str, str]) -> None:
    chosen = {"more": "", "how": "do_rotary = 0, rotary_interleaved = 0", "tables": ""}
    chosen |= {"inputs": "q, k, v, , "} | own
    arrays = {"last": np.int32([2, 2]), "total": np.int32([3]), "zero": np.array([0])}
    made = model(GROUPED.format(**chosen), **arrays)
    left, _ = fuse(made, OptimizationOptions(EVERY, processor="CUDA"))
    assert [n.op_type for n in left.graph.node] == [n.op_type for n in made.graph.node]
