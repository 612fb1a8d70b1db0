"""The answer box: where its links lead."""

import sys

from docutils import nodes
from docutils.utils import new_document

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "conf"))
from answer import finish_tree


def tree(*, box: bool = True, own: bool = True, title: str = "Your own model") -> nodes.document:
    """A page with an answer, a section for the reader's own, and Sphinx-Gallery's downloads."""
    document = new_document("page")
    page = nodes.section("", nodes.title("", "A question"), ids=["a-question"])
    if box:
        link = nodes.reference("", "Run it on your own", refuri="#ro-own")
        other = nodes.reference("", "CSV", refuri="t.csv")
        page += nodes.container("", nodes.paragraph("", "", link, other), classes=["ro-answer"])
    page += nodes.note("", nodes.paragraph("", "Go to the end."),
                       classes=["sphx-glr-download-link-note"])  # fmt: skip
    if own:
        page += nodes.section("", nodes.title("", title), ids=["your-own-model", "id1"])
    inner = nodes.container("", classes=["sphx-glr-footer", "sphx-glr-footer-example"])
    page += nodes.container("", inner, classes=["sphx-glr-footer"])
    document += page
    return document


def links(document: nodes.document) -> list[str]:
    return [link["refuri"] for link in document.findall(nodes.reference)]


def classes(document: nodes.document) -> str:
    return " ".join(c for n in document.findall(nodes.Element) for c in n.get("classes", ()))


def test_the_box_leads_to_the_readers_own_cell() -> None:
    document = tree()
    finish_tree(None, document)
    assert links(document) == ["#your-own-model", "t.csv"]
    assert "sphx-glr" not in classes(document)
    assert "ro-answer" in classes(document)


def test_a_page_without_such_a_cell_has_no_such_link() -> None:
    for document in (tree(own=False), tree(title="Limits of your own")):
        finish_tree(None, document)
        assert links(document) == ["t.csv"]


def test_a_page_without_an_answer_is_left_alone() -> None:
    document = tree(box=False)
    before = document.pformat()
    finish_tree(None, document)
    assert document.pformat() == before
