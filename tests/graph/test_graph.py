"""The text and the picture of ONNX graphs."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import onnx
import onnx.helper as oh
import onnx.parser
import pytest

from roundoff.errors import ArgumentError, ModelError
from roundoff.graph import Svg, onnx_simple_text_plot, plot_dot

SVG = "{http://www.w3.org/2000/svg}"
NORM = """<ir_version: 10, opset_import: ["" : 18]>
agraph (float[a,b,c] X, float[c] scale, float[c] bias, float[c,d] weights, float[d] bias2)
    => (float[a,b,d] Z) {
  normed = LayerNormalization<axis=-1>(X, scale, bias)
  mult = MatMul(normed, weights)
  Z = Add(mult, bias2) }"""
BRANCHES = """<ir_version: 10, opset_import: ["" : 18, "my" : 2]>
agraph (float[N] X, bool c, float[N] K) => (float[N] Z, float[N] Q) {
  one = Constant<value = float {1.0}>()
  A = Add(X, one)
  Z = If<then_branch = g1 () => (float[N] o) { t = Mul(A, K) o = Add(t, A) },
         else_branch = g2 () => (float[N] p) { p = my.Twice(X) }>(c)
  Q = Clip(A, , one) }
<domain: "my", opset_import: ["" : 18]>
Twice (x) => (y) { y = Add(x, x) }"""


def texts(svg: str) -> list[str]:
    return [t.text or "" for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_text_has_a_line_for_everything() -> None:
    assert onnx_simple_text_plot(onnx.parser.parse_model(NORM)).splitlines() == [
        "opset: domain='' version=18",
        "input: name='X' type='float32' shape=['a', 'b', 'c']",
        "input: name='scale' type='float32' shape=['c']",
        "input: name='bias' type='float32' shape=['c']",
        "input: name='weights' type='float32' shape=['c', 'd']",
        "input: name='bias2' type='float32' shape=['d']",
        "LayerNormalization(X, scale, bias, axis=-1) -> normed",
        "  MatMul(normed, weights) -> mult",
        "    Add(mult, bias2) -> Z",
        "output: name='Z' type='float32' shape=['a', 'b', 'd']",
    ]


def test_text_of_bodies_and_functions() -> None:
    model = onnx.parser.parse_model(BRANCHES)
    lines = onnx_simple_text_plot(model).splitlines()
    assert "      Mul(A, K) -> t" in lines  # below the If, which is at depth 2 because of A
    assert "      Twice[my](X) -> p" in lines
    assert "    Clip(A, , one) -> Q" in lines
    assert "----- function name='Twice' domain='my'" in lines
    assert lines[-3:] == ["input: name='x'", "Add(x, x) -> y", "output: name='y'"]
    small, large = oh.make_tensor("w", 16, [2], [1.0, 2.0]), oh.make_tensor("W", 1, [8], [0.0] * 8)
    graph = oh.make_graph([], "g", [oh.make_tensor_sequence_value_info("S", 10, None)], [])
    graph.initializer.extend([small, large])
    assert onnx_simple_text_plot(graph).splitlines() == [
        "input: name='S' type='sequence'",
        "init: name='w' type='bfloat16' shape=[2] -- [1,2]",
        "init: name='W' type='float32' shape=[8]",
    ]


def test_depth_is_the_longest_way_and_is_bounded() -> None:
    nodes = [oh.make_node("Abs", [f"r{i}"], [f"r{i + 1}"]) for i in range(60)]
    lines = onnx_simple_text_plot(oh.make_graph(nodes, "g", [], [])).splitlines()
    assert max(len(line) - len(line.lstrip()) for line in lines) == 40
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[1] X) => (float[1] Z) '
        "{ A = Abs(X) B = Abs(A) C = Abs(B) Z = Add(X, C) }"
    )
    assert "      Add(X, C) -> Z" in onnx_simple_text_plot(model).splitlines()


def test_every_form_of_a_model(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(BRANCHES)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    for what in (model, model.SerializeToString(), path, str(path), model.graph):
        assert "Add" in onnx_simple_text_plot(what)
        assert "Add" in texts(plot_dot(what))
    assert "Add" in onnx_simple_text_plot(model.functions[0])
    with pytest.raises(ArgumentError, match="no graph to draw: got FunctionProto"):
        plot_dot(model.functions[0])


def test_picture_has_every_box_and_edge() -> None:
    svg = plot_dot(onnx.parser.parse_model(NORM))
    assert isinstance(svg, Svg)
    assert svg in svg._repr_html_()
    found = texts(svg)
    for word in ("X", "float32 a×b×c", "LayerNormalization", "axis=-1", "→ normed", "Add", "Z"):
        assert word in found
    root = ElementTree.fromstring(svg)
    assert len(list(root.iter(f"{SVG}rect"))) == 5 + 3 + 1
    assert sum(p.get("stroke-width") is not None for p in root.iter(f"{SVG}path")) == 8
    assert root.get("aria-label")
    assert " id=" not in svg  # several pictures may stand on one page
    svg = plot_dot(onnx.parser.parse_model(BRANCHES))
    assert "value=1.0" in texts(svg)
    tips = [t.text for t in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    assert tips.count("A") == 2  # If reads what its bodies read, and it is drawn once


def test_names_are_escaped() -> None:
    node = oh.make_node("Add", ["<&\"'>", "<&\"'>"], ["]]>"], name="</svg><script>")
    value = oh.make_tensor_value_info
    graph = oh.make_graph([node], "<g>", [value("<&\"'>", 1, ["<"])], [value("]]>", 1, None)])
    svg = plot_dot(graph)
    assert "<script>" not in svg
    assert "<&\"'>" in texts(svg)


def test_a_cycle_is_named() -> None:
    nodes = [oh.make_node("Add", ["b", "b"], ["a"]), oh.make_node("Add", ["a", "a"], ["b"])]
    with pytest.raises(ModelError, match="reads what a later one makes: got b"):
        plot_dot(oh.make_graph(nodes, "g", [], []))
