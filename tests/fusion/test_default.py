"""Each rule of the first tier: a hit, a near miss, and the numbers (checked by ``rewritten``)."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import pytest
from fusion_models import model, rewritten
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import ArgumentError
from roundoff.fusion import Editor, Refusal, Report, Rule, apply_rules, fuse

I64 = np.int64


def ops(text: str, **constants: np.ndarray) -> list[str]:
    return rewritten(model(text, **constants), "default", tolerance=0)[0]


def test_constants_are_folded_and_can_be_kept() -> None:
    m = model(
        "g (float[2] x) => (float[2] y) { c = Add(a, b) y = Mul(x, c) }",
        a=np.float32([1, 2]),
        b=np.float32([3, 4]),
    )
    assert rewritten(m, "default")[0] == ["Mul"]
    assert rewritten(m, "default", constant_folding=False)[0] == ["Add", "Mul"]


def test_what_the_reference_cuts_elsewhere_is_no_constant() -> None:
    text = "g (float[2] x) => (int64[n] y) { y = Slice(a, a, a, b, a) }"
    assert ops(text, a=np.array([-9], I64), b=np.array([0], I64)) == ["Slice"]


def test_a_product_of_floats_is_no_constant() -> None:
    text = "g (float[2] x) => (float[2] y) { c = ReduceProd<keepdims = 0>(a) y = Mul(x, c) }"
    assert ops(text, a=np.float32([2.1, 3.3, 1e-3, 7.7])) == ["ReduceProd", "Mul"]


def test_random_values_are_no_constants() -> None:
    text = """g (float[2] x) => (float[2] y)
    { r = RandomNormal<shape = [2]>() y = Add(x, r) }"""
    made, _ = fuse(model(text), "default")
    assert [n.op_type for n in made.graph.node] == ["RandomNormal", "Add"]
    text = "g (float[2] x) => (float[2] y) { a = Bernoulli(x) b = Bernoulli(x) y = Sub(a, b) }"
    assert len(fuse(model(text), "default")[0].graph.node) == 3


@pytest.mark.parametrize(
    "node",
    [
        "Identity(x)",
        "Reshape(x, s)",
        "Transpose<perm = [0, 1]>(x)",
        "Cast<to = 1>(x)",
        "Mul(one, x)",
        "Div(x, one)",
        "Expand(x, s)",
    ],
)
def test_no_ops_go(node: str) -> None:
    text = f"g (float[2, 3] x) => (float[2, 3] y) {{ h = {node} y = Neg(h) }}"
    assert ops(text, s=np.array([2, 3], I64), one=np.float32(1)) == ["Neg"]


@pytest.mark.parametrize(
    ("kind", "node", "zero"),
    [("int64", "Sub(zero, x)", 1), ("int64", "Add(x, zero)", 2), ("float", "Add(x, zero)", 1)],
)
def test_a_sum_that_is_not_its_operand_stays(kind: str, node: str, zero: int) -> None:
    text = f"g ({kind}[1] x) => (y) {{ h = {node} y = Cast<to = 11>(h) }}"
    array = np.zeros(zero, I64 if kind == "int64" else np.float32)
    assert ops(text, zero=array) == [node[:3], "Cast"]


@pytest.mark.parametrize("node", ["Mul(x, two)", "Div(one, x)", "Expand(x, s)", "Mul(x, ones)"])
def test_near_no_ops_stay(node: str) -> None:
    rows = 2 if "s)" in node else 1
    text = f"g (float[1, 3] x) => (float[{rows}, 3] y) {{ h = {node} y = Neg(h) }}"
    constants = {"one": np.float32(1), "two": np.float32(2), "s": np.array([2, 3], I64)}
    constants["ones"] = np.ones((2, 1), np.float32)
    used = {name: value for name, value in constants.items() if re.search(rf"\b{name}\b", node)}
    assert ops(text, **used) == [node.split("(")[0], "Neg"]


def test_an_output_that_is_an_input_keeps_its_copy() -> None:
    text = "g (float[2] x) => (float[2] y, float[2] z) { y = Identity(x) z = Identity(y) }"
    assert ops(text) == ["Identity", "Identity"]


def test_an_output_keeps_its_type_where_nothing_was_inferred() -> None:
    text = "g (float[2] x) => (float[2] y) { h = com.microsoft.QuickGelu(x) y = Identity(h) }"
    (output,) = fuse(model(text), "default")[0].graph.output
    assert output.type.tensor_type.elem_type == 1


def test_slices_are_a_split() -> None:
    text = """g (float[2, 6] x) => (float[2, 2] a, float[2, 4] b)
    { a = Slice(x, zero, two, one) b = Slice(x, two, end, one) }"""
    constants = {k: np.array([v], I64) for k, v in (("zero", 0), ("two", 2), ("one", 1))}
    constants |= {"end": np.array([2**62], I64), "c": np.float32([np.inf])}
    assert ops(text, **constants) == ["Split"]
    more = text.replace("{", "{ d = Add(x, c)").replace("=> (", "=> (float[2, 6] d, ")
    old = model(more, **constants)
    old.opset_import[0].version = 11
    assert rewritten(old, "default")[0] == ["Add", "Slice", "Slice"]
    short = text.replace("float[2, 4] b", "float[2, 3] b")  # one element is in neither part
    for start, end in ((2, 5), (3, 99)):
        given = constants | {"from": np.array([start], I64), "end": np.array([end], I64)}
        assert ops(short.replace("(x, two", "(x, from"), **given) == ["Slice", "Slice"]


def test_repeated_work_is_done_once() -> None:
    text = """g (float[2] x) => (float[2] y) { a = Sqrt(x) b = Sqrt(x) y = Add(a, b) }"""
    assert ops(text) == ["Sqrt", "Add"]
    assert ops(text.replace("b = Sqrt", "b = Exp")) == ["Sqrt", "Exp", "Add"]
    cast = "g (float[2] x) => (float16[2] y, double[2] z) { y = Cast<to=10>(x) z = Cast<to=11>(x) }"
    assert ops(cast) == ["Cast", "Cast"]


def test_what_a_rewrite_that_is_given_up_leaves_is_not_merged() -> None:
    """Two equal nodes of it would be merged, and made again, for ever."""

    class GivesUp(Rule):
        ops = ("Abs",)

        def rewrite(self, g: Editor, node: ir.Node) -> bool:
            x = node.inputs[0]
            assert x is not None
            g.emit("Neg", [x], node, shapes=[g.shape(x)], like=x)
            raise Refusal("never")

    g = Editor(
        model("g (float[2] x) => (float[2] y) { a = Abs(x) b = Abs(a) c = Abs(x) y = Add(b, c) }")
    )
    while g.merge_equal_nodes():
        pass
    apply_rules(g, [GivesUp(), GivesUp()], Report())
    assert not g.merge_equal_nodes()
    assert g.count() == 3


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_chain_of_shapes_keeps_the_numbers(data: st.DataObject) -> None:
    """Reshapes and transposes at random: the same elements in the same places."""
    shape = [2, 3, 4]
    nodes, value, constants = [], "x", {}
    for i in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()):
            perm = data.draw(st.permutations(range(len(shape))))
            nodes.append(f"v{i} = Transpose<perm = {list(perm)}>({value})")
            shape = [shape[p] for p in perm]
        else:
            shape = data.draw(st.sampled_from([[24], [2, 12], [4, 6], [1, 2, 3, 4], [3, 2, 4]]))
            constants[f"s{i}"] = np.array(shape, I64)
            nodes.append(f"v{i} = Reshape({value}, s{i})")
        value = f"v{i}"
    text = f"g (float[2, 3, 4] x) => (float{shape} y) {{ {' '.join(nodes)} y = Neg({value}) }}"
    assert len(ops(text, **constants)) <= len(nodes) + 1


def test_a_static_input_that_the_model_lacks_is_named() -> None:
    with pytest.raises(ArgumentError, match="static inputs"):
        fuse(model("g (float[2] x) => (float[2] y) { y = Neg(x) }"), static=["w"])


def test_a_constant_that_the_graph_returns_is_folded_once() -> None:
    m = model(
        "g (float[2] x) => (float[2] y, float[2] k) { c = Add(a, b) k = Neg(c) y = Neg(x) }",
        a=np.float32([1, 2]),
        b=np.float32([3, 4]),
    )
    made, report = rewritten(m, "default", tolerance=0)
    assert sorted(made) == ["Identity", "Neg"]
    assert report.counts() == {"FoldConstants": 2}
