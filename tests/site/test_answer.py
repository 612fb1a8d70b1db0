"""The answer box: where its links lead."""

import sys

from docutils import nodes
from docutils.utils import new_document

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "conf"))
from answer import finish_tree


def tree(title: str) -> nodes.document:
    """A page with an answer, a last section, and Sphinx-Gallery's downloads."""
    document = new_document("page")
    page = nodes.section("", nodes.title("", "A question"), ids=["a-question"])
    link = nodes.reference("", "Run it on your own", refuri="#ro-own")
    other = nodes.reference("", "CSV", refuri="t.csv")
    page += nodes.container("", nodes.paragraph("", "", link, other), classes=["ro-answer"])
    page += nodes.note("", classes=["sphx-glr-download-link-note"])
    page += nodes.section("", nodes.title("", title), ids=["your-own-model", "id1"])
    inner = nodes.container("", classes=["sphx-glr-footer", "sphx-glr-footer-example"])
    page += nodes.container("", inner, classes=["sphx-glr-footer"])
    document += page
    return document


def test_the_box_leads_to_the_readers_own_cell_where_there_is_one() -> None:
    for title, found in (("Your own model", ["#your-own-model", "t.csv"]), ("Limits", ["t.csv"])):
        document = tree(title)
        finish_tree(None, document)
        assert [link["refuri"] for link in document.findall(nodes.reference)] == found
        classes = [c for n in document.findall(nodes.Element) for c in n.get("classes", ())]
        assert classes == ["ro-answer"]
