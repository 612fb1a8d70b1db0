"""An ONNX graph as an SVG picture that reads on light and on dark pages."""

from __future__ import annotations

import dataclasses
import graphlib
import itertools
import math
import re
from collections.abc import Mapping
from html import escape
from typing import Any

import onnx

from roundoff.arguments import check_mapping, check_text
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

#: Pale to strong, for numbers: ends of the ramp that shades nodes by the logarithm of theirs.
RAMP = ("#f3ead9", "#e0762f")


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
    names: tuple[str, ...]  # what colours and numbers may call it
    lines: list[str]  # the first one is bold
    tip: str
    fill: str
    has_body: bool = False

    @property
    def width(self) -> float:
        return max(len(line) for line in self.lines) * CHARACTER + 2 * PAD

    @property
    def height(self) -> float:
        return len(self.lines) * LINE + PAD


def plot_dot(
    model: Any,
    *,
    numbers: Mapping[str, Any] | None = None,
    colors: Mapping[str, str] | None = None,
    title: str | None = None,
) -> Svg:
    """SVG of a graph: inputs, initializers, nodes and outputs, from top to bottom.

    Small initializers and constants are written into the node that reads them. Bodies of If, Loop
    and Scan are not drawn: their node has a dashed border and a dotted line to each outer value
    that the body reads. A node's tooltip has its name, operands and result types.

    Parameters
    ----------
    model : ModelProto, GraphProto, FunctionProto, bytes or path
        What to draw.
    numbers : mapping, optional
        Node or result name -> number (or text) written into the node, such as its error.
        Nodes with a number are shaded by its logarithm, unless *colors* says otherwise.
    colors : mapping, optional
        Node or result name -> fill as ``"#rrggbb"``.
    title : str, optional
        What a screen reader says; by default the graph's name and the number of nodes.

    Returns
    -------
    Svg
        A ``str`` without ids, scripts or style sheets, so that a page may hold several.

    Raises
    ------
    ArgumentError
        When *numbers* or *colors* name no node, or a colour is not ``"#rrggbb"``.
    ModelError
        When the graph has a cycle, or is not ONNX.

    Examples
    --------
    >>> from roundoff.graph import plot_dot
    >>> import onnx.parser
    >>> graph = onnx.parser.parse_graph("g (float[2] X) => (float[2] Z) { Z = Abs(X) }")
    >>> plot_dot(graph, numbers={"Z": 0.5})[:4]
    '<svg'
    """
    proto = load(model)
    if isinstance(proto, onnx.NodeProto):
        raise ArgumentError("a node is not a graph", got="NodeProto", expected="a model or graph")
    graph = proto.graph if isinstance(proto, onnx.ModelProto) else proto
    boxes, edges = _boxes(graph)
    numbers = {} if numbers is None else check_mapping("numbers", numbers)
    colors = {} if colors is None else check_mapping("colors", colors)
    if title is not None:
        check_text("title", title)
    _decorate(boxes, _real_or_text(numbers), colors)
    _check_acyclic(boxes, edges)
    layout = layered([box.width for box in boxes], list(edges), GAP)
    count = sum(1 for box in boxes if box.kind == "node")
    label = title or f"ONNX graph {graph.name or 'without a name'}, {count} nodes"
    return Svg(_render(boxes, edges, layout, label))


def _value_text(value: Any) -> str:
    shape = shape_of(value.type)
    text = type_text(value.type)
    return text if shape is None else f"{text} {'×'.join(map(str, shape)) or 'scalar'}"


def _short(text: str, limit: int = 30) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2 - 1]}…{text[-limit // 2 :]}"


def _constants(graph: Any) -> dict[str, str]:
    """Name -> value of the initializers and constants small enough to write into a node."""
    texts = {}
    tensors = {t.name: t for t in getattr(graph, "initializer", ())}
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and node.attribute:
            attribute = node.attribute[0]
            if attribute.type == onnx.AttributeProto.TENSOR:
                tensors[node.output[0]] = attribute.t
            elif not attribute.ref_attr_name:
                texts[node.output[0]] = attribute_text(attribute, 20).split("=", 1)[1]
    for name, tensor in tensors.items():
        text = small_value(tensor)
        if text is not None and len(text) <= 20:
            texts[name] = text
    outputs = {o if isinstance(o, str) else o.name for o in graph.output}
    return {name: text for name, text in texts.items() if name not in outputs}


def _boxes(graph: Any) -> tuple[list[_Box], dict[tuple[int, int], tuple[str, bool]]]:
    """Boxes in the order of the graph, and edges -> (value name, read by a body alone)."""
    boxes: list[_Box] = []
    maker: dict[str, int] = {}
    types = {v.name: _value_text(v) for v in getattr(graph, "value_info", ())}
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            if not isinstance(value, str):
                types[value.name] = _value_text(value)
            if kind == "input":
                name = value if isinstance(value, str) else value.name
                maker[name] = len(boxes)
                boxes.append(_value_box("input", name, types.get(name, "")))
    inline = _constants(graph)
    inline = {name: text for name, text in inline.items() if name not in maker}
    for tensor in getattr(graph, "initializer", ()):
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
        name = value if isinstance(value, str) else value.name
        if name in maker:
            edges[maker[name], len(boxes)] = (name, False)
        boxes.append(_value_box("output", name, types.get(name, "")))
    return boxes, edges


def _value_box(kind: str, name: str, text: str) -> _Box:
    lines = [_short(name)] + ([_short(text)] if text else [])
    return _Box(kind, (name,), lines, f"{kind} {name}: {text}".rstrip(": "), FILLS[kind])


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
    names = tuple(n for n in (node.name, *results) if n)
    return _Box("node", names, lines, tip, FILLS["node"], has_body)


def _real_or_text(numbers: Mapping[str, Any]) -> dict[str, float | str]:
    """The numbers as floats; texts stay what they are."""
    found: dict[str, float | str] = {}
    for name, value in numbers.items():
        try:
            found[name] = value if isinstance(value, str) else float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ArgumentError(
                f"number of {name!r}", got=type(value).__name__, expected="a number or a text"
            ) from error
    return found


def _decorate(boxes: list[_Box], numbers: Mapping[str, Any], colors: Mapping[str, str]) -> None:
    """Write numbers and fills into the boxes that they name."""
    nodes: dict[str, _Box] = {}
    for kind in ("output", "input", "initializer", "node"):  # nodes last: they win a shared name
        nodes.update((n, box) for box in boxes if box.kind == kind for n in box.names)
    unknown = [n for n in (*numbers, *colors) if n not in nodes]
    if unknown:
        raise ArgumentError(
            "no node or value of this name",
            got=unknown[0],
            expected="a name of the graph",
            hint="use a node's name or one of its results; small constants are not drawn",
        )
    sizes = {
        name: math.log10(abs(float(v)))
        for name, v in numbers.items()
        if not isinstance(v, str) and math.isfinite(float(v)) and float(v) != 0
    }
    low, high = min(sizes.values(), default=0.0), max(sizes.values(), default=0.0)
    for name, value in numbers.items():
        text = value if isinstance(value, str) else f"{float(value):.3g}"
        nodes[name].lines.append(_short(text))
        if isinstance(value, str):
            continue
        if name in sizes:
            part = 1.0 if high == low else (sizes[name] - low) / (high - low)
        else:  # zero is the palest; infinity and NaN are the strongest
            part = 0.0 if float(value) == 0 else 1.0
        nodes[name].fill = _mix(*RAMP, part)
    for name, color in colors.items():
        try:
            _mix(color, color, 0.0)
        except ValueError:
            raise ArgumentError("not a colour", got=repr(color), expected='"#rrggbb"') from None
        nodes[name].fill = color


def _channels(color: str) -> list[int]:
    if not isinstance(color, str) or not re.fullmatch("#[0-9a-fA-F]{6}", color):
        raise ValueError(color)
    return [int(color[i : i + 2], 16) for i in (1, 3, 5)]


def _mix(low: str, high: str, part: float) -> str:
    pairs = zip(_channels(low), _channels(high), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in pairs)


def _ink(fill: str) -> str:
    """Dark or white text, whichever has more contrast on *fill* (WCAG 2.2 relative luminance)."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (v / 255 for v in _channels(fill))
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return INK if luminance > 0.179 else "#ffffff"


def _check_acyclic(boxes: list[_Box], edges: Mapping[tuple[int, int], Any]) -> None:
    sorter: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter()
    for a, b in edges:
        sorter.add(b, a)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        names = [boxes[i].names[0] for i in error.args[1]]
        raise ModelError(
            "the graph has a cycle", got=" → ".join(names), expected="an acyclic graph"
        ) from None


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
        f'rx="{min(radius, 16):g}" fill="{box.fill}" stroke="{LINES}"{dash}/>'
    ]
    for i, line in enumerate(box.lines):
        bold = ' font-weight="bold"' if i == 0 else ""
        at = top + PAD / 2 + (i + 0.78) * LINE
        lines.append(
            f'<text x="{x:.1f}" y="{at:.1f}" text-anchor="middle" fill="{_ink(box.fill)}"{bold}>'
            f"{escape(line)}</text>"
        )
    return f"<g><title>{escape(box.tip)}</title>{''.join(lines)}</g>"
