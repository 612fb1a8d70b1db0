"""Prose of a page as Markdown: what a notebook shows where the site shows HTML.

It reads the page's resolved tree rather than its source, so that every role, label and footnote is
already what it stands for; links become absolute, formulas become ``$…$``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from urllib.parse import urljoin

from docutils import nodes

__all__ = ["Prose", "blocks"]

# What the gallery puts around a page, and what the code of a page shows: none of it is prose.
_SKIPPED = (
    nodes.raw, nodes.image, nodes.figure, nodes.comment, nodes.target, nodes.system_message,
    nodes.substitution_definition, nodes.rubric,
)  # fmt: skip
_NOT_PROSE = ("sphx-glr", "ro-drawing", "ro-take", "ro-picture")


class Prose:
    """Writes nodes as Markdown.

    Parameters
    ----------
    address : str
        Address of the page; links inside the site are relative to it.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def block(self, node: nodes.Node) -> str:
        """One block: a paragraph, list, formula, table, quotation or note."""
        writer: Callable | None = getattr(self, f"_{type(node).__name__}", None)
        if writer is None:
            raise TypeError(f"no Markdown for {type(node).__name__}: {node.astext()[:80]!r}")
        return writer(node)

    def inline(self, node: nodes.Node) -> str:
        """The text of a paragraph, on one line."""
        return "".join(self._span(child) for child in node.children).strip()

    def _span(self, node: nodes.Node) -> str:
        if isinstance(node, nodes.Text):
            return _escaped(re.sub(r"\s+", " ", node.astext()))
        if isinstance(node, nodes.math):
            return f"${node.astext().strip()}$"
        if isinstance(node, nodes.literal):
            text = re.sub(r"\s+", " ", node.astext())
            return f"`` {text} ``" if "`" in text else f"`{text}`"
        if isinstance(node, nodes.footnote_reference):
            return f"[{node.astext()}]"
        if isinstance(node, (nodes.target, nodes.problematic)):
            return ""
        inner = "".join(self._span(child) for child in node.children)
        if isinstance(node, nodes.reference):
            link = node.get("refuri") or "#" + node.get("refid", "")
            return f"[{inner}]({urljoin(self._address, link)})"
        if isinstance(node, nodes.emphasis):
            return f"*{inner}*"
        if isinstance(node, nodes.strong):
            return f"**{inner}**"
        if isinstance(node, nodes.superscript):
            return f"<sup>{inner}</sup>"
        if isinstance(node, nodes.subscript):
            return f"<sub>{inner}</sub>"
        return inner

    def _paragraph(self, node: nodes.Node) -> str:
        text = self.inline(node)
        # What would begin a list or a heading.
        return re.sub(r"^(\d+)([.)])(?=\s)", r"\1\\\2", re.sub(r"^([-+#>])(?=\s)", r"\\\1", text))

    def _math_block(self, node: nodes.Node) -> str:
        latex = node.astext().strip()
        if "\\\\" in latex and "\\begin" not in latex:
            latex = f"\\begin{{aligned}}{latex}\\end{{aligned}}"
        return f"$$\n{latex}\n$$"

    def _literal_block(self, node: nodes.Node) -> str:
        language = _language(node)
        return f"```{'' if language in ('none', 'default') else language}\n{node.astext()}\n```"

    _doctest_block = _code_links_block = _literal_block

    def _bullet_list(self, node: nodes.Node) -> str:
        return "\n".join(self._item(item, "* ") for item in node.children)

    def _enumerated_list(self, node: nodes.Node) -> str:
        start = node.get("start", 1)
        return "\n".join(self._item(item, f"{start + i}. ") for i, item in enumerate(node.children))

    def _item(self, item: nodes.Node, mark: str) -> str:
        text = "\n\n".join(self.block(child) for child in item.children if _is_prose(child))
        return mark + _indented(text, " " * len(mark))

    def _definition_list(self, node: nodes.Node) -> str:
        items = []
        for item in node.children:
            terms = [self.inline(c) for c in item.children if isinstance(c, nodes.term)]
            body = [self.block(c) for d in item.findall(nodes.definition) for c in d.children]
            items.append(
                f"* **{', '.join(terms)}**: "
                + "\n\n  ".join(_indented(part, "  ") for part in body)
            )
        return "\n".join(items)

    def _glossary(self, node: nodes.Node) -> str:
        return self._inside(node)

    def _block_quote(self, node: nodes.Node) -> str:
        return "> " + self._inside(node).replace("\n", "\n> ")

    def _admonition(self, node: nodes.Node) -> str:
        title = node.children[0].astext() if isinstance(node, nodes.admonition) else node.tagname
        rest = node.children[1:] if isinstance(node, nodes.admonition) else node.children
        body = "\n\n".join(self.block(child) for child in rest)
        return f"> **{title.capitalize()}.** " + body.replace("\n", "\n> ")

    _note = _warning = _tip = _important = _hint = _seealso = _admonition

    def _footnote(self, node: nodes.Node) -> str:
        label, *rest = node.children
        return f"[{label.astext()}] " + "\n\n".join(self.block(child) for child in rest)

    _citation = _footnote

    def _table(self, node: nodes.Node) -> str:
        rows = [
            [" ".join(self.inline(p) for p in entry.children).replace("|", "\\|") for entry in row]
            for row in node.findall(nodes.row)
        ]
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines.insert(1, "|" + " --- |" * len(rows[0]))
        title = next(iter(node.findall(nodes.title)), None)
        return "\n".join([f"**{self.inline(title)}**", "", *lines] if title else lines)

    def _inside(self, node: nodes.Node) -> str:
        return "\n\n".join(self.block(child) for child in node.children if _is_prose(child))

    _container = _compound = _topic = _definition = _inside


def blocks(tree: nodes.Node, address: str, level: int = 1) -> Iterator[tuple[str, str]]:
    """The page in order: ``("text", markdown)`` for prose, ``("code", source)`` for its cells.

    A cell is a code block whose language is ``Python``, with the capital that Sphinx-Gallery uses
    for the code it has run. The page ends where the gallery says how long it took.
    """
    prose = Prose(address)
    for node in tree.children:
        if isinstance(node, nodes.Element) and "sphx-glr-timing" in node.get("classes", ()):
            return
        if isinstance(node, nodes.section):
            title = node[node.first_child_matching_class(nodes.title)]
            yield "text", f"{'#' * level} {prose.inline(title)}"
            yield from blocks(node, address, level + 1)
        elif isinstance(node, nodes.title) or not _is_prose(node):
            continue
        elif _language(node) == "Python":
            yield "code", node.astext()
        else:
            yield "text", prose.block(node)


def _language(node: nodes.Element) -> str:
    """Language of a code block; Sphinx-Gallery has a node of its own for code with links."""
    return node.get("language") or node.get("lang") or ""


def _is_prose(node: nodes.Node) -> bool:
    classes = " ".join(node.get("classes", ())) if isinstance(node, nodes.Element) else ""
    return not isinstance(node, _SKIPPED) and not any(mark in classes for mark in _NOT_PROSE)


def _indented(text: str, by: str) -> str:
    return re.sub(r"\n(?=[^\n])", "\n" + by, text)


def _escaped(text: str) -> str:
    """Marks of Markdown that mean themselves; an underscore inside a word needs no help."""
    text = re.sub(r"([\\`*$])", r"\\\1", text)
    text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)
    text = re.sub(r"<(?=[A-Za-z/!])", r"\\<", text)
    return text.replace("](", "]\\(")
