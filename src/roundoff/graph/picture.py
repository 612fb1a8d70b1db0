"""An ONNX graph as an SVG picture that reads on light and on dark pages."""

from __future__ import annotations

import dataclasses
import graphlib
import itertools
from html import escape
from typing import Any

import onnx

from roundoff.errors import ArgumentError, ModelError

from .layout import Layout, layered
from .protos import (
    attribute_text,
    bodies,
    captured,
    dtype_text,
    load,
    shape_of,
    small_value,
    type_text,
)

FONT = 12.0  # px
CHARACTER = 0.62 * FONT  # a little over the advance of a monospaced character
LINE = 1.3 * FONT
PAD = 8.0
GAP = 18.0
PITCH = 34.0  # free height between two ranks

#: Fill of each kind of box. The boxes are opaque and their text is dark, so that both read on any
#: page; lines are a grey with a contrast of at least 3.5 on white and on near-black.
FILLS = {"input": "#b7dcc4", "output": "#b9cdf0", "initializer": "#ead9a2", "node": "#dcdcdc"}
INK, LINES = "#000000", "#808080"


class Svg(str):
    """The text of an SVG picture; a notebook shows the picture itself.

    Examples
    --------
    >>> from roundoff.graph import Svg
    >>> picture = Svg("<svg></svg>")
    >>> picture.startswith("<svg"), picture._repr_html_()
    (True, '<div style="overflow-x:auto"><svg></svg></div>')
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{self}</div>'


@dataclasses.dataclass
class _Box:
    kind: str  # a key of FILLS
    lines: list[str]  # the first one is bold
    tip: str
    has_body: bool = False

    @property
    def width(self) -> float:
        return max(len(line) for line in self.lines) * CHARACTER + 2 * PAD

    @property
    def height(self) -> float:
        return len(self.lines) * LINE + PAD


def plot_dot(model: Any) -> Svg:
    """SVG of a graph: inputs, initializers, nodes and outputs, from top to bottom.

    Small initializers and constants are written into the node that reads them. Bodies of If, Loop
    and Scan are not drawn: their node has a dashed border and a dotted line to each outer value
    that the body reads. A node's tooltip has its name, operands and result types.

    Parameters
    ----------
    model : ModelProto, GraphProto, bytes or path
        What to draw.

    Returns
    -------
    Svg
        A ``str`` without ids, scripts or style sheets, so that a page may hold several.

    Raises
    ------
    ArgumentError, ModelError
        When *model* is not an ONNX graph, or it has a cycle.

    Examples
    --------
    >>> from roundoff.graph import plot_dot
    >>> import onnx.parser
    >>> graph = onnx.parser.parse_graph("g (float[2] X) => (float[2] Z) { Z = Abs(X) }")
    >>> plot_dot(graph)[:4]
    '<svg'
    """
    proto = load(model)
    graph = proto.graph if isinstance(proto, onnx.ModelProto) else proto
    if not isinstance(graph, onnx.GraphProto):
        raise ArgumentError(
            "no graph to draw", got=type(graph).__name__, expected="a ModelProto or a GraphProto"
        )
    boxes, edges = _boxes(graph)
    try:
        layout = layered([box.width for box in boxes], list(edges), GAP)
    except graphlib.CycleError as error:
        names = [boxes[i].lines[-1].removeprefix("→ ") for i in error.args[1]]
        raise ModelError(
            "the graph has a cycle", got=" → ".join(names), expected="an acyclic graph"
        ) from None
    count = sum(1 for box in boxes if box.kind == "node")
    label = f"ONNX graph {graph.name or 'without a name'}, {count} nodes"
    return Svg(_render(boxes, edges, layout, label))


def _value_text(value: Any) -> str:
    shape = shape_of(value.type)
    text = type_text(value.type)
    return text if shape is None else f"{text} {'×'.join(map(str, shape)) or 'scalar'}"


def _short(text: str, limit: int = 30) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2 - 1]}…{text[-limit // 2 :]}"


def _constants(graph: onnx.GraphProto) -> dict[str, str]:
    """Name -> value of the initializers and constants small enough to write into a node."""
    texts = {}
    tensors = {t.name: t for t in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and node.attribute:
            attribute = node.attribute[0]
            if attribute.type == onnx.AttributeProto.TENSOR:
                tensors[node.output[0]] = attribute.t
            else:
                texts[node.output[0]] = attribute_text(attribute, 20).split("=", 1)[1]
    for name, tensor in tensors.items():
        text = small_value(tensor)
        if text is not None and len(text) <= 20:
            texts[name] = text
    outputs = {o.name for o in graph.output}
    return {name: text for name, text in texts.items() if name not in outputs}


def _boxes(
    graph: onnx.GraphProto,
) -> tuple[list[_Box], dict[tuple[int, int], tuple[str, bool]]]:
    """Boxes in the order of the graph, and edges -> (value name, read by a body alone)."""
    boxes: list[_Box] = []
    maker: dict[str, int] = {}
    types = {v.name: _value_text(v) for v in (*graph.value_info, *graph.input, *graph.output)}
    for value in graph.input:
        maker[value.name] = len(boxes)
        boxes.append(_value_box("input", value.name, types[value.name]))
    inline = {name: text for name, text in _constants(graph).items() if name not in maker}
    for tensor in graph.initializer:
        if tensor.name not in maker and tensor.name not in inline:
            types[tensor.name] = f"{dtype_text(tensor.data_type)} " + "×".join(
                map(str, tensor.dims)
            )
            maker[tensor.name] = len(boxes)
            boxes.append(_value_box("initializer", tensor.name, types[tensor.name]))
    nodes = [n for n in graph.node if not (len(n.output) == 1 and n.output[0] in inline)]
    for node in nodes:
        maker.update((o, len(boxes)) for o in node.output if o)
        boxes.append(_node_box(node, inline, types))
    edges: dict[tuple[int, int], tuple[str, bool]] = {}
    for node in nodes:
        me = maker[next(o for o in node.output if o)] if any(node.output) else None
        if me is None:
            continue
        inner = [n for _, body in bodies(node) for n in captured(body)]
        for name, dotted in [(n, True) for n in inner] + [(n, False) for n in node.input]:
            if name in maker:
                edges[maker[name], me] = (name, dotted)
    for value in graph.output:
        if value.name in maker:
            edges[maker[value.name], len(boxes)] = (value.name, False)
        boxes.append(_value_box("output", value.name, types[value.name]))
    return boxes, edges


def _value_box(kind: str, name: str, text: str) -> _Box:
    lines = [_short(name)] + ([_short(text)] if text else [])
    return _Box(kind, lines, f"{kind} {name}: {text}".rstrip(": "))


def _node_box(node: onnx.NodeProto, inline: dict[str, str], types: dict[str, str]) -> _Box:
    small = [f"{inline[n]}" for n in node.input if n in inline]
    has_body = any(True for _ in bodies(node))
    small += [a for a in (attribute_text(a, 20) for a in node.attribute) if not a.endswith("{…}")]
    lines = [_short(node.op_type)]
    if small:
        lines.append(_short(", ".join(small), 34))
    results = [o for o in node.output if o]
    lines.append("→ " + _short(", ".join(results), 28))
    domain = f" of {node.domain}" if node.domain else ""
    tip = f"{node.op_type}{domain} {node.name}".rstrip()
    tip += f" ({', '.join(node.input)}) → " + ", ".join(
        f"{o}: {types[o]}" if o in types else o for o in results
    )
    tip += "".join(f"; {attribute_text(a, 60)}" for a in node.attribute)
    return _Box("node", lines, tip, has_body)


def _render(
    boxes: list[_Box], edges: dict[tuple[int, int], tuple[str, bool]], layout: Layout, label: str
) -> str:
    ranks = max(layout.rank, default=-1) + 1
    heights = [0.0] * ranks
    for box, rank in zip(boxes, layout.rank, strict=True):
        heights[rank] = max(heights[rank], box.height)
    middle, at = [], 2.0
    for height in heights:
        middle.append(at + height / 2)
        at += height + PITCH
    width, height = layout.width + 4, max(at - PITCH, 0) + 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="-2 0 {width:.1f} {height:.1f}" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" '
        f'font-size="{FONT:g}"><title>{escape(label)}</title>'
    ]
    for (a, b), (name, dotted) in edges.items():
        points = [(layout.x[a], middle[layout.rank[a]] + boxes[a].height / 2)]
        for x, rank in layout.routes[a, b]:
            points += [(x, middle[rank] - heights[rank] / 2), (x, middle[rank] + heights[rank] / 2)]
        points.append((layout.x[b], middle[layout.rank[b]] - boxes[b].height / 2))
        parts.append(_edge(points, name, dotted))
    for i, box in enumerate(boxes):
        parts.append(_draw(box, layout.x[i], middle[layout.rank[i]]))
    return "\n".join([*parts, "</svg>"])


def _edge(points: list[tuple[float, float]], name: str, dotted: bool) -> str:
    tip = points[-1]
    points = [*points[:-1], (tip[0], tip[1] - 6)]
    path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    for (xa, ya), (xb, yb) in itertools.pairwise(points):
        half = (ya + yb) / 2
        path += f" C{xa:.1f},{half:.1f} {xb:.1f},{half:.1f} {xb:.1f},{yb:.1f}"
    dash = ' stroke-dasharray="2 3"' if dotted else ""
    x, y = tip
    return (
        f'<g stroke="{LINES}" fill="none"><title>{escape(name)}</title><path d="{path}"'
        f' stroke-width="1.4"{dash}/><path d="M{x:.1f},{y:.1f} l-4,-8 l8,0 z" fill="{LINES}"'
        ' stroke="none"/></g>'
    )


def _draw(box: _Box, x: float, y: float) -> str:
    left, top = x - box.width / 2, y - box.height / 2
    radius = 4 if box.kind == "node" else box.height / 2 if box.kind != "initializer" else 0
    dash = ' stroke-dasharray="5 3"' if box.has_body else ""
    lines = [
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
        f'rx="{min(radius, 16):g}" fill="{FILLS[box.kind]}" stroke="{LINES}"{dash}/>'
    ]
    for i, line in enumerate(box.lines):
        bold = ' font-weight="bold"' if i == 0 else ""
        at = top + PAD / 2 + (i + 0.78) * LINE
        lines.append(
            f'<text x="{x:.1f}" y="{at:.1f}" text-anchor="middle" fill="{INK}"{bold}>'
            f"{escape(line)}</text>"
        )
    return f"<g><title>{escape(box.tip)}</title>{''.join(lines)}</g>"
