"""Link the first mention of a glossary's term in each page of the gallery, wherever it stands.

The pages are scripts: their comments read better without markup for every word.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

# Everyday words: a link on them would be noise.
_COMMON = {
    "bias",
    "ceiling",
    "interval",
    "record",
    "truth",
    "fusion",
    "tolerance",
    "spread",
    "Gemm",
    "program",
    "interpreter",
}
_NOT_HERE = (nodes.reference, nodes.literal, nodes.title, nodes.footnote, nodes.caption,
             addnodes.pending_xref)  # fmt: skip


def terms(glossary: Path) -> list[str]:
    """The glossary's terms, longest first; none where there is no glossary."""
    if not glossary.exists():
        return []
    found = re.findall(r"^   (\S.*)$", glossary.read_text("utf-8"), re.MULTILINE)
    return sorted(set(found) - _COMMON, key=lambda term: (-len(term), term))


def link_terms(app: Sphinx, tree: nodes.document) -> None:
    """Replace each first mention by a reference, resolved later as ``:term:`` is."""
    name = app.env.docname
    if not re.search(r"(^|/)plot_\w+$", name):
        return
    glossary = Path(app.srcdir, "glossary.rst")
    if glossary.exists():  # a file that is missing makes a page outdated at each build
        app.env.note_dependency(str(glossary))
    for term in terms(glossary):
        # Acronyms as they are written; words at the start of a sentence, too.
        first = term[0] if term[:2].isupper() else f"[{term[0].lower()}{term[0].upper()}]"
        pattern = re.compile(rf"(?<![\w-]){first}{re.escape(term[1:])}s?(?![\w-])")
        for text in list(tree.findall(nodes.Text)):
            found = pattern.search(text)
            if found and _is_prose(text):
                _link(text, found, term, name)
                break


def _is_prose(text: nodes.Text) -> bool:
    parents, node = [], text.parent
    while node is not None:
        parents.append(node)
        node = node.parent
    return any(isinstance(p, nodes.paragraph) for p in parents) and not any(
        isinstance(p, _NOT_HERE) or "sphx-glr-script-out" in p.get("classes", ()) for p in parents
    )


def _link(text: nodes.Text, found: re.Match[str], term: str, name: str) -> None:
    words = text.astext()
    link = addnodes.pending_xref(
        "", nodes.inline("", found[0]), refdomain="std", reftype="term", reftarget=term,
        refexplicit=True, refwarn=True, refdoc=name,
    )  # fmt: skip
    around = [nodes.Text(words[: found.start()]), link, nodes.Text(words[found.end() :])]
    text.parent.replace(text, [node for node in around if node.astext()])


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the step."""
    app.connect("doctree-read", link_terms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
