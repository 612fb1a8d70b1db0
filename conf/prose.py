"""Prose of a page as Markdown: what a notebook shows where the site shows HTML.

sphinx-markdown-builder writes it, from the page's resolved tree: every role, label and footnote is
already what it stands for. Ours is what makes a notebook of it: the cells, absolute links, and
nothing of what the gallery or a cell's output put into the tree.
"""

import re
from collections.abc import Iterator
from urllib.parse import urljoin

from docutils import nodes
from sphinx.builders import Builder
from sphinx_markdown_builder.contexts import WrappedContext
from sphinx_markdown_builder.translator import MarkdownTranslator

# What the gallery puts around a page, and what the code of a page shows: none of it is prose.
_SKIPPED = (nodes.raw, nodes.image, nodes.comment, nodes.target, nodes.rubric)
_NOT_PROSE = ("sphx-glr", "ro-drawing", "ro-take", "ro-picture")
# Marks that mean themselves: a formula's, HTML's, and what would begin a list or a heading.
_MARKS = re.compile(r"\$|<(?=[A-Za-z/!])")
_FIRST = re.compile(r"^(\d*)([-+#>]|(?<=\d)[.)])(?=\s)")


class Prose(MarkdownTranslator):
    """Writes the nodes of a page.

    Parameters
    ----------
    document, builder
        What Sphinx's translators take.
    address : str
        Address of the page; links inside the site are relative to it.
    """

    def __init__(self, document: nodes.document, builder: Builder, address: str) -> None:
        super().__init__(document, builder)
        self._address = address

    def dispatch_visit(self, node: nodes.Node) -> None:
        """Leave out what is no prose, wherever it stands."""
        if not _is_prose(node):
            raise nodes.SkipNode
        super().dispatch_visit(node)

    def visit_Text(self, node: nodes.Text) -> None:  # noqa: N802 - docutils' name
        """Escape what a notebook reads, beside what Markdown reads."""
        begins = isinstance(node.parent, nodes.paragraph) and node.parent[0] is node
        before = len(self.ctx.content)
        super().visit_Text(node)
        if self.status.escape_text and len(self.ctx.content) > before:  # white space may add none
            text = _MARKS.sub(r"\\\g<0>", self.ctx.content.pop())
            self.ctx.content.append(_FIRST.sub(r"\1\\\2", text) if begins else text)

    def visit_reference(self, node: nodes.reference) -> None:
        """Link to the site."""
        link = node.get("refuri") or "#" + node.get("refid", "")
        self._push_context(WrappedContext("[", f"]({urljoin(self._address, link)})"))

    def depart_reference(self, node: nodes.reference) -> None:
        """End the link."""
        self._pop_context()

    def visit_footnote_reference(self, node: nodes.footnote_reference) -> None:
        """A number: its note stands below."""
        self.add(f"[{node.astext()}]")
        raise nodes.SkipNode

    def visit_literal_block(self, node: nodes.Element) -> None:
        """Code that is no cell; Sphinx-Gallery has a node of its own for code with links."""
        language = _language(node)
        language = "" if language in ("none", "default") else language
        self.add(f"```{language}\n{node.astext()}\n```", 2, 2)
        raise nodes.SkipNode

    visit_code_links_block = visit_literal_block


def blocks(
    tree: nodes.Element, builder: Builder, address: str, level: int = 1
) -> Iterator[tuple[str, str]]:
    """The page in order: ``("text", markdown)`` for prose, ``("code", source)`` for its cells.

    A cell is a code block whose language is ``Python``, with the capital that Sphinx-Gallery uses
    for the code it has run. The page ends where the gallery says how long it took.
    """
    for node in tree.children:
        if isinstance(node, nodes.Element) and "sphx-glr-timing" in node.get("classes", ()):
            return
        if isinstance(node, nodes.section):
            yield from blocks(node, builder, address, level + 1)
        elif _language(node) == "Python":
            yield "code", node.astext()
        elif _is_prose(node):
            prose = Prose(tree.document, builder, address)
            node.walkabout(prose)
            heading = "#" * (level - 1) + " " if isinstance(node, nodes.title) else ""
            yield "text", heading + prose.astext().strip()


def _language(node: nodes.Element) -> str:
    return node.get("language") or node.get("lang") or ""


def _is_prose(node: nodes.Node) -> bool:
    classes = " ".join(node.get("classes", ())) if isinstance(node, nodes.Element) else ""
    return not isinstance(node, _SKIPPED) and not any(mark in classes for mark in _NOT_PROSE)
