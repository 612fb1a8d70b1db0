"""What the built fast site carries beside its pages: notebooks and the library's wheel."""

import json
import re
import sys
import zipfile
from pathlib import Path

import pytest
from docutils import nodes

from .conftest import ROOT, SITE

sys.path.insert(0, str(ROOT / "conf"))
from prose import Prose, blocks

pytestmark = [pytest.mark.site, pytest.mark.xdist_group("site")]


def test_notebooks_hold_markdown_and_the_cells_of_their_script(site: Path) -> None:
    for script in sorted((SITE / "docs" / "gallery").glob("*/plot_*.py")):
        cells = json.loads(script.with_suffix(".ipynb").read_text("utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells]
        assert "%pip install" in sources[0]
        assert "/wheels/roundoff-" in sources[0]
        prose = [s for s, c in zip(sources, cells, strict=True) if c["cell_type"] == "markdown"]
        assert prose[0].startswith("# ")
        assert len(prose) > 5, script.name
        text = re.sub(r"`[^`]+`", "", "\n\n".join(prose))
        for raw in (r":\w+:`", r"^\.\. ", r"\w`_", r"\[#", r"\|[a-z]+\|_", r"^[=~^-]{4,}$"):
            assert not re.search(raw, text, re.M), f"{script.name}: {raw} in the notebook"
        assert text.count("$") % 2 == 0
        assert not re.search(r"\]\((?!https?://)", text), "a link that leads nowhere"
        code = [s for s, c in zip(sources, cells, strict=True) if c["cell_type"] == "code"][1:]
        for source in code:
            assert source in script.read_text("utf-8")


def test_archives_hold_the_notebooks_of_the_site(site: Path) -> None:
    gallery = SITE / "docs" / "gallery"
    with zipfile.ZipFile(gallery / "gallery_jupyter.zip") as zipped:
        held = {name: zipped.read(name) for name in zipped.namelist()}
    assert held == {p.relative_to(gallery).as_posix(): p.read_bytes()
                    for p in gallery.glob("*/*.ipynb")}  # fmt: skip
    for archive in gallery.glob("*/plot_*.zip"):
        with zipfile.ZipFile(archive) as zipped:
            names = {archive.with_suffix(s).name for s in (".py", ".ipynb")}
            assert set(zipped.namelist()) == names
            for name in names:
                assert zipped.read(name) == archive.with_name(name).read_bytes()


def test_the_wheel_is_the_library(site: Path) -> None:
    (wheel,) = (site / "wheels").glob("roundoff-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as zipped:
        held = {n: zipped.read(n) for n in zipped.namelist() if n.startswith("roundoff/")}
    library = ROOT / "src" / "roundoff"
    there = [p for p in library.rglob("*") if p.suffix in (".py", ".json", ".typed")]
    assert held == {f"roundoff/{p.relative_to(library).as_posix()}": p.read_bytes() for p in there}


def paragraph(*children: nodes.Node) -> nodes.paragraph:
    return nodes.paragraph("", "", *children)


def test_markdown_means_what_the_page_says() -> None:
    prose = Prose("https://example.org/gallery/a.html")
    link = nodes.reference("", "there", refuri="../b.html#c", internal=True)
    text = paragraph(
        nodes.Text("2 * 3 costs $5 in snake_case, _so_ <b>, "),
        nodes.math("", r"x_i \le 1"),
        nodes.Text("\nand "),
        link,
        nodes.literal("", "a_b"),
    )
    assert prose.block(text) == (
        r"2 \* 3 costs \$5 in snake_case, \_so\_ \<b>, $x_i \le 1$ and "
        "[there](https://example.org/b.html#c)`a_b`"
    )
    assert prose.block(paragraph(nodes.Text("1. is no list"))) == r"1\. is no list"
    inner = nodes.bullet_list("", nodes.list_item("", paragraph(nodes.Text("b"))))
    item = nodes.list_item("", paragraph(nodes.Text("a")), inner)
    assert prose.block(nodes.bullet_list("", item)) == "* a\n\n  * b"
    with pytest.raises(TypeError, match="no Markdown for"):
        prose.block(nodes.sidebar())


def test_what_a_cell_showed_is_not_in_the_notebook() -> None:
    code = nodes.literal_block("x = 1", "x = 1", language="Python")
    output = nodes.literal_block("1", "1", language="none", classes=["sphx-glr-script-out"])
    timing = nodes.block_quote("", paragraph(nodes.Text("Total")), classes=["sphx-glr-timing"])
    section = nodes.section("", nodes.title("", "T"), code, output, timing,
                            paragraph(nodes.Text("after")))  # fmt: skip
    tree = nodes.Element("", section)
    assert list(blocks(tree, "https://example.org/")) == [("text", "# T"), ("code", "x = 1")]
