"""Formulas as MathML: no JavaScript, no fonts to fetch, readable by screen readers."""

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError


def _markup(latex: str, display: str) -> str:
    try:
        return convert(latex, display=display)
    except Exception as error:  # the library raises a class for each mistake
        raise ExtensionError(f"formula {latex!r} cannot be set: {error!r}") from error


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(f'<span class="math">{_markup(node.astext(), "inline")}</span>')
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    attributes = {"class": "ro-math", "tabindex": "0", "role": "region", "aria-label": "formula"}
    writer.body.append(writer.starttag(node, "div", **attributes))
    if node.get("number"):
        writer.body.append(f'<span class="eqno">({node["number"]})</span>')
    latex = node.astext()
    if "\\\\" in latex and "\\begin" not in latex:
        latex = f"\\begin{{aligned}}{latex}\\end{{aligned}}"
    writer.body.append(_markup(latex, "block") + "</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer under the name ``mathml``."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
