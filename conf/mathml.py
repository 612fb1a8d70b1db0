"""Formulas as MathML: no JavaScript, for screen readers too, in the font of ``static/fonts``.

Sphinx's own renderers draw pictures or load a script; docutils, which it is built on, writes the
markup, and this hands it the formulas.
"""

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

# What docutils writes -> what browsers set as TeX does.
_BETTER = (
    # The bar over several letters is as long as they are.
    ('<mo accent="true">_</mo>', '<mo accent="true" stretchy="true">‾</mo>'),
    # A bar that is neither opening nor closing has a relation's space on both sides.
    ('<mo stretchy="false">|</mo>', '<mo stretchy="false" lspace="0" rspace="0">|</mo>'),
)


def _markup(latex: str, block: bool = False) -> str:
    try:
        markup = tex2mathml(latex, as_block=block)
    except Exception as error:  # of many classes
        raise ExtensionError(f"formula {latex!r} cannot be set: {error!r}") from error
    for written, better in _BETTER:
        markup = markup.replace(written, better)
    return markup


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(f'<span class="math">{_markup(node.astext())}</span>')
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    attributes = {"class": "ro-math", "tabindex": "0", "role": "region", "aria-label": "formula"}
    writer.body.append(writer.starttag(node, "div", **attributes))
    if node.get("number"):
        writer.body.append(f'<span class="eqno">({node["number"]})</span>')
    writer.body.append(_markup(node.astext(), block=True) + "</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer under the name ``mathml``."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
