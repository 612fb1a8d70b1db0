"""The answer box: bound numbers, one set of machine buttons, and where its links lead."""

import json
import re
import sys
from pathlib import Path

import pytest
from docutils import nodes
from docutils.utils import new_document

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "conf"))
from answer import claims_of, finish_tree, machine_buttons, wrong

H200, H100 = "nvidia-h200", "nvidia-h100-80gb-hbm3"
FAR = {
    "name": "far", "on": H200,
    "numbers": [{"kind": "", "text": "122"}, {"kind": "about", "text": "4"}],
    "machines": {H200: {"state": "true", "values": [121.6, 4.3]},
                 H100: {"state": "value", "values": [98.4, 3.9]}},
}  # fmt: skip
BITS = {
    "name": "bits",
    "on": None,
    "numbers": [],
    "machines": {H200: {"state": "true", "values": []}},
}


@pytest.mark.parametrize(
    ("text", "target"),
    [("122", "far"), ("122", "far/1"), ("121.6", "far"), ("about 4", "far/2"), ("about 110", "far"),
     ("4.3", "far/2"), ("at least 122", "far"), ("up to 1.2e2", "far")],
)  # fmt: skip
def test_a_number_of_the_claim_may_be_printed(text: str, target: str) -> None:
    assert wrong(text, target, [BITS, FAR]) == ""


@pytest.mark.parametrize(
    ("text", "target", "why"),
    [
        ("121", "far", f"claim far on {H200}: 121 is printed and 121.6 measured"),
        ("98.4", "far", f"claim far on {H200}: 98.4 is printed and 121.6 measured"),
        ("about 6", "far/2", f"claim far on {H200}: about 6 is printed and 4.3 measured"),
        ("up to 121", "far", f"claim far on {H200}: up to 121 is printed and 121.6 measured"),
        ("122", "fat", "no claim fat: bits, far"),
        ("122", "far/3", f"claim far on {H200} has 2 values, no number 3"),
        ("122", "far/0", f"claim far on {H200} has 2 values, no number 0"),
        ("122", "bits", "claim bits on None has 0 values, no number 1"),
        ("many", "far", "claim far: 'many' is no number"),
    ],
)
def test_another_number_is_refused_with_its_reason(text: str, target: str, why: str) -> None:
    assert wrong(text, target, [BITS, FAR]) == why


def test_a_page_without_claims_has_no_number_to_quote() -> None:
    assert wrong("122", "far", []) == "no claim far: the page has none"


def test_claims_are_read_from_the_last_run(tmp_path: Path) -> None:
    assert claims_of(tmp_path, "plot_x") == []
    path = tmp_path / "gallery" / "numerics" / "tables" / "plot_x" / "claims.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps([FAR]), "utf-8")
    assert claims_of(tmp_path, "plot_x") == [FAR]
    assert claims_of(tmp_path, "plot_y") == []


# --- machine buttons

LABEL = '<label for="ro-m-{}">{}</label>'
BODY = (
    '<section id="title"><h1>T</h1><div class="ro-answer">A</div><section id="one"><h2>One</h2>'
    + LABEL.format(H200, "H200&#x27;s host") + LABEL.format("this-build", "This build")
    + LABEL.format(H200, "H200") + LABEL.format(H100, "H100") + LABEL.format(H200, "H200")
    + '</section><section id="two"></section></section>'
)  # fmt: skip


def buttons(body: str) -> str:
    context = {"body": body}
    machine_buttons(None, "gallery/numerics/plot_x", "page.html", context, None)
    return context["body"]


def test_there_is_one_set_of_buttons_with_one_for_each_machine() -> None:
    body = buttons(BODY)
    assert body.count("<fieldset") == 1
    inputs = re.findall("<input [^>]+>", body)
    assert re.findall('id="ro-m-([^"]+)"', body) == [H200, H100, "this-build"]
    assert all('type="radio" name="ro-machine"' in one for one in inputs)
    assert [one.endswith(" checked>") for one in inputs] == [True, False, False]
    fieldset = re.search("<fieldset.*</fieldset>", body)[0]
    assert re.findall(LABEL.format("(.+?)", "(.+?)"), fieldset) == [
        (H200, "H200"), (H100, "H100"), ("this-build", "This build"),
    ]  # fmt: skip
    assert 'aria-label="H200"' in inputs[0]


def test_buttons_stand_below_the_answer() -> None:
    body = buttons(BODY)
    assert body.index("ro-answer") < body.index("<fieldset") < body.index('<section id="one">')
    without = re.sub("<style>.*</fieldset>", "", body)
    assert without == BODY


def test_each_machine_has_rules_of_its_own() -> None:
    style = re.search("<style>(.*)</style>", buttons(BODY))[1]
    assert style.startswith("@supports selector(:has(a)){@media screen{")
    assert style.count("{") == style.count("}")
    for machine in (H200, H100, "this-build"):
        chosen = f"body:has(#ro-m-{machine}:checked)"
        assert (
            f'{chosen} .ro-tabs:has([data-m~="{machine}"])>.ro-pane:not([data-m~="{machine}"])'
            in style
        )
        assert f'{chosen} label[for="ro-m-{machine}"]' in style
        # A table that this machine lacks shows its first pane.
        assert f'{chosen} .ro-tabs:not(:has([data-m~="{machine}"]))>.ro-pane~.ro-pane' in style
    assert style.count("display:none") == 6


@pytest.mark.parametrize("context", [{"body": "<section ><p>No tabs.</p></section>"}, {}])
def test_a_page_without_tabs_has_no_buttons(context) -> None:
    before = dict(context)
    machine_buttons(None, "install", "page.html", context, None)
    assert context == before


# --- the tree


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
