"""An ONNX graph as an SVG picture that reads on light and on dark pages.

The boxes stand in one column, each below all that it reads. What a box reads from the one above it
comes by an arrow, everything else by an arc on the right, so that no line crosses a box.
"""

from __future__ import annotations

import dataclasses
from html import escape
from typing import Any

import onnx

from roundoff.errors import ArgumentError, ModelError

from .protos import (
    attribute_text,
    captured,
    dtype_text,
    load,
    reads,
    shape_of,
    small_value,
    type_text,
)

FONT = 12.0  # px
CHARACTER = 0.62 * FONT  # a little over the advance of a monospaced character
LINE = 1.3 * FONT
PAD = 8.0
GAP = 22.0  # free height between two boxes
_INLINE = 20  # characters of a value that is written into a node
ARC, WIDEST = 14.0, 220.0  # how far an arc reaches out for each box that it passes, and at most

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
    reads: dict[int, str] = dataclasses.field(default_factory=dict)  # box -> name of the value
    top: float = 0.0

    @property
    def height(self) -> float:
        return len(self.lines) * LINE + PAD

    @property
    def middle(self) -> float:
        return self.top + self.height / 2


def plot_dot(model: Any) -> Svg:
    """SVG of a graph: inputs, initializers, nodes and outputs, from top to bottom.

    Small initializers are written into the node that reads them. Bodies of If, Loop and Scan are
    not drawn: their node reads what they read. A tooltip has the texts of a box in full.

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
        When *model* is not an ONNX graph, or a node reads what a later one makes.

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
    made = {name for node in graph.node for name in node.output}
    late = [name for name in captured(graph) if name in made]
    if late:
        raise ModelError("a node reads what a later one makes", got=", ".join(late[:5]))
    boxes = _boxes(graph)
    count = sum(box.kind == "node" for box in boxes)
    return Svg(_render(boxes, f"ONNX graph {graph.name or 'without a name'}, {count} nodes"))


def _boxes(graph: onnx.GraphProto) -> list[_Box]:
    """From top to bottom; an input or initializer stands above the first node that reads it."""
    inline: dict[str, str] = {}
    waiting: dict[str, _Box] = {}
    for tensor in graph.initializer:
        value = small_value(tensor)
        if value is not None and len(value) <= _INLINE:
            inline[tensor.name] = value
        else:
            shape = "×".join(map(str, tensor.dims))
            text = f"{dtype_text(tensor.data_type)} {shape}"
            waiting[tensor.name] = _Box("initializer", [tensor.name, text])
    for value in graph.input:
        waiting[value.name] = _value_box("input", value)
    boxes: list[_Box] = []
    place: dict[str, int] = {}
    for node in graph.node:
        names = reads(node)
        for name in names:
            if name in waiting:
                place[name] = len(boxes)
                boxes.append(waiting.pop(name))
        read = {place[name]: name for name in names if name in place}
        small = [inline[name] for name in names if name in inline]
        small += [attribute_text(a, _INLINE) for a in node.attribute]
        lines = [node.op_type, ", ".join(small), "→ " + ", ".join(filter(None, node.output))]
        place.update(dict.fromkeys(node.output, len(boxes)))
        boxes.append(_Box("node", [line for line in lines if line], read))
    for name, box in waiting.items():  # which no node reads
        place[name] = len(boxes)
        boxes.append(box)
    for value in graph.output:
        box = _value_box("output", value)
        if value.name in place:
            box.reads[place[value.name]] = value.name
        boxes.append(box)
    return boxes


def _value_box(kind: str, value: onnx.ValueInfoProto) -> _Box:
    shape = shape_of(value.type)
    text = type_text(value.type)
    if shape is not None:
        text += " " + ("×".join(map(str, shape)) or "scalar")
    return _Box(kind, [value.name, text])


def _render(boxes: list[_Box], label: str) -> str:
    bottom = 2.0
    for box in boxes:
        box.top = bottom
        bottom += box.height + GAP
    longest = max((len(_short(line)) for box in boxes for line in box.lines), default=0)
    wide = longest * CHARACTER + 2 * PAD
    parts, reach = [], 0.0
    for index, box in enumerate(boxes):
        for source, name in box.reads.items():
            out = 0.0 if source == index - 1 else min(ARC * (index - source), WIDEST)
            reach = max(reach, out)
            parts.append(_edge(boxes[source], box, wide, out, name))
    parts += [_draw(box, wide) for box in boxes]
    width, height = wide + reach + 4, max(bottom - GAP, 0.0) + 2
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="-2 0 {width:.1f} {height:.1f}" '
        f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" '
        f'font-size="{FONT:g}"><title>{escape(label)}</title>'
    )
    return "\n".join([head, *parts, "</svg>"])


def _short(text: str) -> str:
    return text if len(text) <= 30 else f"{text[:14]}…{text[-15:]}"


def _edge(source: _Box, box: _Box, wide: float, out: float, name: str) -> str:
    """An arrow down between neighbours, else an arc from right side to right side."""
    if out:
        top, bottom, far = source.middle + 4, box.middle - 4, wide + out * 4 / 3
        path = f"M{wide:.1f},{top:.1f} C{far:.1f},{top:.1f} {far:.1f},{bottom:.1f} "
        path += f"{wide + 6:.1f},{bottom:.1f}"
        tip = f"M{wide:.1f},{bottom:.1f} l8,-4 l0,8 z"
    else:
        path = f"M{wide / 2:.1f},{source.top + source.height:.1f} V{box.top - 6:.1f}"
        tip = f"M{wide / 2:.1f},{box.top:.1f} l-4,-8 l8,0 z"
    return (
        f'<g stroke="{LINES}" fill="none"><title>{escape(name)}</title><path d="{path}"'
        f' stroke-width="1.4"/><path d="{tip}" fill="{LINES}" stroke="none"/></g>'
    )


def _draw(box: _Box, wide: float) -> str:
    rounded = 14 if box.kind in ("input", "output") else 4
    lines = [
        f'<rect x="0" y="{box.top:.1f}" width="{wide:.1f}" height="{box.height:.1f}" '
        f'rx="{rounded}" fill="{FILLS[box.kind]}" stroke="{LINES}"/>'
    ]
    for i, line in enumerate(box.lines):
        bold = ' font-weight="bold"' if i == 0 else ""
        at = box.top + PAD / 2 + (i + 0.78) * LINE
        lines.append(
            f'<text x="{wide / 2:.1f}" y="{at:.1f}" text-anchor="middle" fill="{INK}"{bold}>'
            f"{escape(_short(line))}</text>"
        )
    return f"<g><title>{escape(chr(10).join(box.lines))}</title>{''.join(lines)}</g>"
