"""Formulas as MathML: no JavaScript, for screen readers too, in the font of ``static/fonts``.

Ours, as Sphinx's renderers draw pictures or load a script; docutils' converter sets the index of a
letter with an accent below the letter.
"""

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

# What the converter writes -> what browsers set as TeX does.
_BETTER = (
    # The bar over several letters is as long as they are.
    ('<mo accent="true">&#x02015;</mo>', '<mo accent="true" stretchy="true">&#x0203E;</mo>'),
    # A bar that is neither opening nor closing has a relation's space on both sides.
    (
        '<mo stretchy="false">&#x0007C;</mo>',
        '<mo stretchy="false" lspace="0" rspace="0">&#x0007C;</mo>',
    ),
)


def _markup(latex: str, display: str) -> str:
    try:
        markup = convert(latex, display=display)
    except Exception as error:  # the library raises a class for each mistake
        raise ExtensionError(f"formula {latex!r} cannot be set: {error!r}") from error
    for written, better in _BETTER:
        markup = markup.replace(written, better)
    return markup


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(f'<span class="math">{_markup(node.astext(), "inline")}</span>')
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    attributes = {"class": "ro-math", "tabindex": "0", "role": "region", "aria-label": "formula"}
    writer.body.append(writer.starttag(node, "div", **attributes))
    writer.body.append(_markup(node.astext(), "block") + "</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer under the name ``mathml``."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
