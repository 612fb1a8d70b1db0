"""Each rule of the second tier: a hit, a near miss, and the numbers (checked by ``rewritten``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fusion_models import feeds, model, rewritten, run

from roundoff.fusion import OptimizationOptions, fuse

RMS = """g ({t}[2, 3, 8] x, {t}[{w}] w) => ({t}[2, 3, 8] y) {{
  {up} s = Pow(h, two) m = ReduceMean<keepdims = 1>(s, axes) a = Add(m, eps) r = Sqrt(a)
  i = Reciprocal(r) n = Mul(h, i) {down} y = Mul(w, d) }}"""
RMS_CONSTANTS = {"two": np.float32(2), "axes": np.array([-1]), "eps": np.float32(1e-5)}


def rms(t: str = "float", w: str = "8") -> str:
    wide = t == "float"
    up = "h = Identity(x)" if wide else "h = Cast<to = 1>(x)"
    number = {"float16": 10, "bfloat16": 16}.get(t)
    down = "d = Identity(n)" if wide else f"d = Cast<to = {number}>(n)"
    return RMS.format(t=t, w=w, up=up, down=down)


@pytest.mark.parametrize(("kind", "tolerance"), [("float", 1e-5), ("float16", 4e-3)])
def test_rms_norm(kind: str, tolerance: float) -> None:
    left, _ = rewritten(model(rms(kind), **RMS_CONSTANTS), tolerance=tolerance)
    assert left == ["SimplifiedLayerNormalization"]


def test_rms_norm_near_misses() -> None:
    left, report = rewritten(model(rms(w="1"), **RMS_CONSTANTS))
    assert "SimplifiedLayerNormalization" not in left
    assert "last axis" in " ".join(report.refused.values())
    for change in ({"two": np.float32(3)}, {"axes": np.array([1])}):
        left, _ = rewritten(model(rms(), **(RMS_CONSTANTS | change)), tolerance=1e-4)
        assert "SimplifiedLayerNormalization" not in left
    square = rms().replace("2, 3, 8", "8, 8").replace("keepdims = 1", "keepdims = 0")
    left, _ = rewritten(model(square, **RMS_CONSTANTS), tolerance=1e-4)  # of another row each
    assert "SimplifiedLayerNormalization" not in left


SKIP = """g (float[{a}] a, float[2, 3, 8] b, float[8] w) => (float[2, 3, 8] y, float[2, 3, 8] z) {{
  x = Add(a, b) z = Neg(x)
  s = Pow(x, two) m = ReduceMean<keepdims = 1>(s, axes) e = Add(m, eps) r = Sqrt(e)
  i = Reciprocal(r) n = Mul(x, i) y = Mul(n, w) }}"""


def test_skip_rms_norm() -> None:
    hit, _ = rewritten(model(SKIP.format(a="2, 3, 8"), **RMS_CONSTANTS))
    assert sorted(hit) == ["Neg", "SkipSimplifiedLayerNormalization"]
    miss, report = rewritten(model(SKIP.format(a="8"), **RMS_CONSTANTS))
    assert "SkipSimplifiedLayerNormalization" not in miss
    assert "broadcasts" in " ".join(report.refused.values())


ROTARY = """g (float[2, 3, 16] q, float[1, 3, 4] f) => (float[2, 2, 3, 8] y) {{
  q4 = Reshape(q, s) x = Transpose<perm = [0, 2, 1, 3]>(q4)
  t = Concat<axis = -1>(f, {other}) c3 = Cos(t) s3 = Sin(t)
  c = Unsqueeze(c3, one) n = Unsqueeze(s3, one)
  x1 = Slice(x, {first}) x2 = Slice(x, {second}) m = Neg(x2) r = Concat<axis = -1>({turned})
  a = Mul(x, c) b = Mul(r, n) y = Add(a, b) }}"""


def rotary(**change: str) -> list[str]:
    chosen = {"other": "f", "turned": "m, x1", "first": "zero, four, last, one"}
    text = ROTARY.format(**chosen | {"second": "four, end, last"} | change)
    if "halves" in change:
        split = f"{change['halves']} = Split<axis = -1, num_outputs = 2>(x) "
        text = text[: text.index("x1 = Slice")] + split + text[text.index("m = Neg") :]
    if "other" in change:
        text = text.replace("t = Concat", "e = Neg(f) t = Concat")
    numbers = {"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "end": 2**62, "last": -1}
    numbers |= {"minus": -4, "eight": -8}
    constants = {name: np.array([n]) for name, n in numbers.items() if name in text}
    return rewritten(model(text, s=np.array([2, 3, 2, 8]), **constants))[0]


def test_rotary() -> None:
    assert "RotaryEmbedding" in rotary()
    assert "RotaryEmbedding" in rotary(first="eight, four, last", second="minus, end, last")
    assert "RotaryEmbedding" in rotary(halves="x1, x2")


@pytest.mark.parametrize(
    "change",
    [
        {"other": "e"},
        {"turned": "x1, m"},
        {"halves": "x2, x1"},
        {"second": "zero, four, last"},
        {"first": "zero, end, last, two"},
        {"second": "three, end, last", "first": "zero, three, last"},
    ],
    ids=str,
)
def test_rotary_near_misses(change: dict[str, str]) -> None:
    assert "RotaryEmbedding" not in rotary(**change)


PACKED_ROTARY = """g ({t}[2, {n}, 40] x, {t}[{r}, 4] c, {t}[{r}, 4] s, {t}[{r}, 4] z)
  => ({t}[2, {n}, 16] q, {t}[2, {n}, 8] k, {t}[2, {n}, 16] v) {{
  a, b, d = Split<axis = -1>(x, lengths) v = {last}
  q = com.microsoft.RotaryEmbedding<num_heads = 2, interleaved = {i}>(a, ids, c, s)
  k = com.microsoft.RotaryEmbedding<num_heads = 1>(b, more, c, {s}) }}"""
EACH = np.arange(6).reshape(2, 3)


def packed_rotary(
    ids: np.ndarray,
    more: np.ndarray | None = None,
    n: int = 3,
    t: str = "float",
    processor: str = "CUDA",
    **text: str,
) -> tuple[list[str], str]:
    chosen = {"r": 70, "i": 0, "s": "s", "last": "Neg(d)", "n": n, "t": t} | text
    constants = {
        "lengths": np.array([16, 8, 16]),
        "ids": ids,
        "more": ids if more is None else more,
    }
    proto = model(PACKED_ROTARY.format(**chosen), **constants)
    left, report = rewritten(proto, tolerance=0, processor=processor)
    return left, " ".join(report.refused.values())


@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize(
    ("ids", "rows"),  # of which there are fewer than heads, or more
    [(EACH, 6), (EACH, 70), (EACH[::-1].copy(), 7), (np.array([0]), 3), (np.array([2]), 5)],
    ids=str,
)
def test_parts_of_one_product_are_rotated_at_once(ids: np.ndarray, rows: int, kind: str) -> None:
    """To the last bit, the part that is not rotated as well."""
    left, _ = packed_rotary(ids, t=kind, r=str(rows))
    assert sorted(set(left)) == ["Concat", "Neg", "Reshape", "RotaryEmbedding", "Split"]
    assert left.count("RotaryEmbedding") == left.count("Split") == 1
    all_turned = "com.microsoft.RotaryEmbedding<num_heads = 2>(d, ids, c, s)"
    left, _ = packed_rotary(ids, t=kind, r=str(rows), last=all_turned)
    assert left.count("RotaryEmbedding") == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"more": EACH + 1}, "different tables"),
        ({"s": "z"}, "different tables"),
        ({"i": "1"}, ""),
        ({"last": "Concat<axis = -1>(b, b)"}, ""),  # which reads a part before it is rotated
        ({"n": 33, "ids": np.arange(66).reshape(2, 33)}, "more than 64 tokens"),
        ({"processor": "CPU"}, ""),
    ],
    ids=str,
)
def test_parts_are_rotated_apart(change: dict[str, object], reason: str) -> None:
    left, refused = packed_rotary(**({"ids": EACH} | change))  # type: ignore[arg-type]
    assert left.count("RotaryEmbedding") == 2
    assert reason in refused


def spread_lengths(
    batch: int,
    layers: int,
    processor: str = "CUDA",
    first: str = "Reshape(x{0}, one)",
    static: tuple[str, ...] = (),
    more: int = 0,
    odd: str = "int64",
) -> list[str]:
    """What is left of one number a layer, spread over a batch; every layer gets its own."""
    kinds = [odd + "[1]" if i % 2 else "int64" for i in range(layers)]
    long = [batch + more * (i % 2) for i in range(layers)]
    inputs = ", ".join(f"{kind} x{i}" for i, kind in enumerate(kinds))
    outputs = ", ".join(f"{kinds[i].split('[')[0]}[{n}] y{i}" for i, n in enumerate(long))
    nodes = [
        f"e{i} = {first.format(i)} s{i} = Expand(e{i}, b{n}) y{i} = Neg(s{i})"
        for i, n in enumerate(long)
    ]
    proto = model(
        f"g ({inputs}) => ({outputs}) {{ {' '.join(nodes)} }}",
        one=np.array([1]),
        **{f"b{n}": np.array([n]) for n in long},
    )
    made, _ = fuse(proto, OptimizationOptions(processor=processor), static=static)
    given = {name: x.fill_(i) for i, (name, x) in enumerate(feeds(proto).items())}
    for before, after in zip(run(proto, given), run(made, given), strict=True):
        assert before.tolist() == after.tolist()
    return [n.op_type for n in made.graph.node]


@pytest.mark.parametrize("batch", [2, 8])
@pytest.mark.parametrize("layers", [3, 4, 17, 20])
def test_lengths_are_spread_at_once(batch: int, layers: int) -> None:
    """Sixteen together, and what remains where it is at least four."""
    ops, joined = spread_lengths(batch, layers), layers // 16 + (layers % 16 >= 4)
    assert ops.count("Concat") == ops.count("Split") == joined
    assert ops.count("Expand") == joined + (layers % 16 if layers % 16 < 4 else 0)


@pytest.mark.parametrize(
    "change",
    [
        {"processor": "CPU"},
        {"first": "Abs(x{0})"},  # which is no input
        {"static": tuple(f"x{i}" for i in range(6))},  # computed once for all steps
        {"more": 1},  # three of each length
        {"odd": "int32"},  # three of each type
    ],
    ids=str,
)
def test_lengths_are_spread_apart(change: dict[str, Any]) -> None:
    ops = spread_lengths(**({"batch": 2, "layers": 6} | change))
    assert "Split" not in ops
    assert ops.count("Expand") == 6


def test_silu() -> None:
    text = "g (float[2, 4] x, float[2, 4] z) => (float[2, 4] y) { g = Sigmoid(x) y = Mul(g, x) }"
    assert rewritten(model(text))[0] == ["QuickGelu"]
    left, report = rewritten(model(text.replace("Mul(g, x)", "Mul(g, z)")))
    assert left == ["Sigmoid", "Mul"]
    assert "another value" in " ".join(report.refused.values())


def test_transposed_products() -> None:
    text = """g (float[2, 3, 4] a, float[5, 4] w) => (float[2, 3, 5] y)
    { t = Transpose<perm = [1, 0]>(w) y = MatMul(a, t) }"""
    assert rewritten(model(text))[0] == ["FusedMatMul"]
    other = """g (float[2, 3, 4] a, float[4, 2, 5] w) => (float[2, 3, 5] y)
    { t = Transpose<perm = [1, 0, 2]>(w) y = MatMul(a, t) }"""
    assert rewritten(model(other))[0] == ["Transpose", "MatMul"]


PACK = """g (float[2, 3, 4] x, float[5, 4] v, float[6, 4] w)
  => (float[2, 3, 5] y, float[2, 3, 6] z) {
  vt = Transpose<perm = [1, 0]>(v) wt = Transpose<perm = [1, 0]>(w)
  y = MatMul(x, vt) z = MatMul(x, wt) }"""


def test_packed_products() -> None:
    left, _ = rewritten(model(PACK), static=("v", "w"))
    assert left == ["Concat", "FusedMatMul", "Split"]
    left, report = rewritten(model(PACK), static=("v",))
    assert left.count("FusedMatMul") == 2
    assert "anew in each run" in " ".join(report.refused.values())


WIDE = """g (float[2, 3, 1024] x, float[1024, 1024] q, float[1024, 1024] k, float[2048, 1024] v,
  float[4096, 1024] a, float[4096, 1024] b)
  => (float[2, 3, 1024] y, float[2, 3, 1024] z, float[2, 3, 2048] s, float[2, 3, 4096] t,
  float[2, 3, 4096] u) {
  qt = Transpose<perm = [1, 0]>(q) kt = Transpose<perm = [1, 0]>(k)
  vt = Transpose<perm = [1, 0]>(v) at = Transpose<perm = [1, 0]>(a)
  bt = Transpose<perm = [1, 0]>(b) x2 = Neg(x)
  t = MatMul(x, at) u = MatMul(x, bt) y = MatMul(x2, qt) z = MatMul(x2, kt) s = MatMul(x2, vt) }"""


@pytest.mark.parametrize(
    ("share", "products", "processor"),
    [
        *((0, 5, "CUDA"), (None, 5, "CUDA"), (0.32, 5, "CUDA"), (0.34, 3, "CUDA")),
        *((0.99, 3, "CUDA"), (1, 2, "CUDA"), (1, 5, "CPU")),
    ],
)
def test_the_narrowest_products_are_packed_while_there_is_room(
    share: float | None, products: int, processor: str
) -> None:
    """Three take a third of all weights, two the rest; by default there is room for a fifth.

    On a CPU wide ones are no faster packed.
    """
    static, some = ("q", "k", "v", "a", "b"), {} if share is None else {"packed": share}
    left, report = rewritten(model(WIDE), static=static, processor=processor, **some)
    assert left.count("FusedMatMul") == products
    why = "kept twice" if processor == "CPU" else f"{0.2 if share is None else share:.0%} of the"
    assert (why in " ".join(report.refused.values())) == (products > 2)


ATTENTION = """g (float[2, 6, 16] q, float[2, 6, 16] k, float[2, 6, 16] v{more})
  => (float[2, 6, 16] y{returned}) {{
  q3 = Reshape(q, s) q4 = Transpose<perm = [0, 2, 1, 3]>(q3)
  k3 = Reshape(k, s) kt = Transpose<perm = [0, 2, 3, 1]>(k3)
  v3 = Reshape(v, s) v4 = Transpose<perm = [0, 2, 1, 3]>(v3)
  p = MatMul(q4, kt) c = Mul(p, scale) {mask} z = Softmax<axis = -1>(m)
  o = MatMul(z, v4) t = Transpose<perm = [0, 2, 1, 3]>(o) y = Reshape(t, back) }}"""
SHAPES = {"s": np.array([2, 6, 2, 8]), "back": np.array([2, 6, 16]), "scale": np.float32(0.3)}
CAUSAL = np.triu(np.full((6, 6), -np.inf, np.float32), 1)


def attention(
    mask: str = "m = Add(c, bias)",
    more: str = "",
    returned: str = "",
    processor: str = "CPU",
    **constants: np.ndarray,
) -> list[str]:
    text = ATTENTION.format(mask=mask, more=more, returned=returned)
    return rewritten(model(text, **SHAPES, **constants), processor=processor)[0]


@pytest.mark.parametrize("low", [-np.inf, np.finfo(np.float32).min])
def test_causal_attention_is_grouped_query_attention(low: float) -> None:
    assert attention(bias=np.where(CAUSAL < 0, np.float32(low), 0)) == ["GroupQueryAttention"]
    assert attention(bias=np.stack([CAUSAL] * 2)[:, None]) == ["GroupQueryAttention"]


def test_other_masks_are_a_bias() -> None:
    banded = CAUSAL + np.tril(np.full((6, 6), -np.inf, np.float32), -3)
    assert attention(bias=banded)[-1] == "MultiHeadAttention"
    assert attention(bias=CAUSAL.T.copy())[-1] == "MultiHeadAttention"
    weak = np.where(CAUSAL < 0, np.float32(-10), 0)  # does not shut out
    assert attention(bias=weak)[-1] == "MultiHeadAttention"
    assert attention(bias=np.zeros((6, 6), np.float32))[-1] == "MultiHeadAttention"
    assert attention("m = Identity(c)") == ["MultiHeadAttention"]
    assert attention(more=", float[2, 1, 6, 6] bias") == ["MultiHeadAttention"]


def test_attention_near_misses() -> None:
    # The probabilities are returned, the mask is by key alone, the softmax is over queries.
    assert "MultiHeadAttention" not in attention(
        "m = Identity(c)", returned=", float[2, 2, 6, 6] z"
    )
    assert "MultiHeadAttention" not in attention(bias=np.zeros((1, 6), np.float32) - 1)
    text = ATTENTION.format(mask="m = Identity(c)", more="", returned="")
    left, _ = rewritten(model(text.replace("axis = -1", "axis = 2"), **SHAPES))
    assert "MultiHeadAttention" not in left


@pytest.mark.parametrize(
    "turned",
    [
        "kt = Transpose<perm = [0, 1, 3, 2]>(k4)",
        "kt = Transpose<perm = [1, 0, 3, 2]>(k4)",  # batch and heads, of one size
        "k5 = Reshape(k4, merged) k6 = Transpose<perm = [0, 2, 1]>(k5) kt = Reshape(k6, apart)",
        "k5 = Reshape(k4, mixed) k6 = Transpose<perm = [0, 2, 1]>(k5) kt = Reshape(k6, apart)",
    ],
)
def test_keys_are_turned_in_one_way_or_another(turned: str) -> None:
    text = ATTENTION.format(mask="m = Identity(c)", more="", returned="")
    keys = "k2 = Transpose<perm = [0, 2, 1, 3]>(k3) k4 = Neg(k2) "
    text = text.replace("kt = Transpose<perm = [0, 2, 3, 1]>(k3)", keys + turned)
    shapes = {"merged": [4, 6, 8], "mixed": [4, 8, 6], "apart": [2, 2, 8, 6]}
    made = model(text, **SHAPES, **{k: np.array(v) for k, v in shapes.items() if k in text})
    assert rewritten(made)[0][-1] == "MultiHeadAttention"


def test_keys_of_fewer_axes() -> None:
    """Shared by the batch: left alone; or cut into heads when they are turned."""
    text = """g (float[2, 2, 6, 8] q, float[{}] k, float[2, 2, 6, 8] v) => (float[2, 2, 6, 8] y) {{
      {} s = MatMul(q, kt) z = Softmax<axis = -1>(s) y = MatMul(z, v) }}"""
    for keys, turned in (("2, 8, 6", "kt = Neg(k)"), ("6, 8", "kt = Transpose<perm = [1, 0]>(k)")):
        assert "MultiHeadAttention" not in rewritten(model(text.format(keys, turned)))[0]
    turned = "k5 = Reshape(k, m) k6 = Transpose<perm = [0, 2, 1]>(k5) kt = Reshape(k6, a)"
    shapes = {"m": np.array([4, 6, 8]), "a": np.array([2, 2, 8, 6])}
    assert "MultiHeadAttention" in rewritten(model(text.format("24, 8", turned), **shapes))[0]


@pytest.mark.parametrize("axis", [0, 1])
def test_only_heads_are_packed(axis: int) -> None:
    shape, parts = ("6, 4, 16", 2) if axis == 0 else ("2, 12, 16", 4)
    text = f"""g (float[{shape}] x, float[4, 8] c, float[4, 8] s) => (float[2, 4, 16] y) {{
      q, k, v = Split<axis = {axis}>(x, parts)
      y, pk, pv = com.microsoft.GroupQueryAttention<num_heads = 1, kv_num_heads = 1,
        do_rotary = 1, scale = 0.25, rotary_interleaved = 0>(q, k, v, , , last, total, c, s) }}"""
    numbers = {"last": np.int32([3, 3]), "total": np.int32([4]), "parts": np.array([parts] * 3)}
    assert rewritten(model(text, **numbers))[0] == ["Split", "GroupQueryAttention"]


def test_on_cuda_float32_is_multi_head_attention() -> None:
    assert attention(bias=CAUSAL, processor="CUDA") == ["MultiHeadAttention"]
