"""Link the first mention of a glossary's term in each page of the gallery, wherever it stands.

Ours, as Sphinx links what ``:term:`` marks alone: the pages are scripts, whose comments read better
without markup for every word.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

# Everyday words: a link on them would be noise.
_COMMON = {"bias", "ceiling", "interval", "record", "truth", "fusion", "tolerance", "spread",
           "Gemm", "program", "interpreter"}  # fmt: skip
_NOT_HERE = (
    nodes.reference,
    nodes.literal,
    nodes.title,
    nodes.footnote,
    nodes.caption,
    addnodes.pending_xref,
)


def link_terms(app: Sphinx, tree: nodes.document) -> None:
    """Replace each first mention by a reference, resolved later as ``:term:`` is."""
    name, glossary = app.env.docname, Path(app.srcdir, "glossary.rst")
    # A file that is missing, noted as a dependency, makes a page outdated at each build.
    if "/plot_" not in name or not glossary.exists():
        return
    app.env.note_dependency(str(glossary))
    terms = set(re.findall(r"^   (\S.*)$", glossary.read_text("utf-8"), re.MULTILINE)) - _COMMON
    for term in sorted(terms, key=lambda term: (-len(term), term)):
        # Acronyms as they are written; words at the start of a sentence, too.
        first = term[0] if term[:2].isupper() else f"[{term[0].lower()}{term[0].upper()}]"
        pattern = re.compile(rf"(?<![\w-])({first}{re.escape(term[1:])}s?)(?![\w-])")
        for text in filter(_is_prose, list(tree.findall(nodes.Text))):
            before, *rest = pattern.split(text.astext(), maxsplit=1)
            if rest:
                link = addnodes.pending_xref(
                    "",
                    nodes.inline("", rest[0]),
                    refdomain="std",
                    reftype="term",
                    reftarget=term,
                    refexplicit=True,
                    refwarn=True,
                    refdoc=name,
                )
                text.parent.replace(text, [nodes.Text(before), link, nodes.Text(rest[1])])
                break


def _is_prose(node: nodes.Node) -> bool:
    around = []
    while node := node.parent:
        around.append(node)
    return any(isinstance(n, nodes.paragraph) for n in around) and not any(
        isinstance(n, _NOT_HERE) for n in around
    )


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the step."""
    app.connect("doctree-read", link_terms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
