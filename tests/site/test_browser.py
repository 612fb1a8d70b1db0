"""The built fast site, as a reader's browser sees it."""

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.site, pytest.mark.xdist_group("site")]

WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
# Pages that hold neither prose nor code of ours.
MACHINE_MADE = {"genindex.html", "py-modindex.html", "search.html"}


def pages(site: Path) -> list[str]:
    return sorted(p.relative_to(site).as_posix() for p in site.rglob("*.html")
                  if "_static" not in p.parts)  # fmt: skip


@pytest.fixture(scope="module")
def axe() -> str:
    import axe_playwright_python

    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text("utf-8")


@pytest.fixture(scope="module")
def tab(browser, address):
    """One tab that notes what a page complains of and asks for."""
    page = browser.new_page()
    page.problems = []
    page.on("console", lambda m: page.problems.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: page.problems.append(str(e)))
    page.on("response", lambda r: page.problems.append(f"{r.status} {r.url}") if r.status >= 400
            else None)  # fmt: skip
    page.on("request", lambda r: None if r.url.startswith((address, "data:"))
            else page.problems.append(f"external request: {r.url}"))  # fmt: skip
    yield page
    page.close()


def visit(tab, url: str) -> None:
    tab.problems.clear()
    tab.goto(url, wait_until="load")


def overflow(tab) -> float:
    """Pixels by which something stands out of the window on the right.

    The theme clips what does, so that the page's own scroll width says nothing; what lies in a
    region that scrolls by itself does not count.
    """
    return tab.evaluate("""() => {
        const width = document.documentElement.clientWidth;
        const held = new Set();
        let most = document.documentElement.scrollWidth - width;
        for (const e of document.querySelectorAll('article, article *')) {
            const scrolls = ['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX);
            if (held.has(e.parentElement)) { held.add(e); continue; }
            most = Math.max(most, e.getBoundingClientRect().right - width);
            if (scrolls) held.add(e);
        }
        return Math.ceil(most - 0.5);
    }""")


def serious(tab, axe: str) -> list[str]:
    """Serious and critical violations, with the first elements concerned."""
    tab.evaluate(f"window.axe || (() => {{ {axe} }})()")
    found = tab.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{v['id']}: {', '.join(str(n['target']) + ' ' + n['html'][:120] for n in v['nodes'][:3])}"
        for v in found
        if v["impact"] in ("serious", "critical")
    ]


def test_every_page_opens_alone_and_fits(site: Path, address: str, tab) -> None:
    wrong = []
    for name in pages(site):
        tab.set_viewport_size({"width": WIDTHS[0], "height": 900})
        tab.emulate_media(color_scheme=SCHEMES[0])
        visit(tab, f"{address}/{name}")
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 900})
            for scheme in SCHEMES:
                tab.emulate_media(color_scheme=scheme)
                if overflow(tab) > 0:
                    wrong.append(f"{name} at {width} in {scheme}: {overflow(tab)} pixels too wide")
        wrong += [f"{name}: {problem}" for problem in tab.problems]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_no_serious_violation_of_accessibility(site: Path, address: str, tab, axe: str) -> None:
    wrong = []
    for name in pages(site):
        visit(tab, f"{address}/{name}")
        # Pages of the reference are of one making: each is looked at once, in turn.
        reference = name.startswith("generated/") or name in MACHINE_MADE
        looks = [(w, s) for w in WIDTHS for s in SCHEMES]
        for width, scheme in looks[hash_of(name) % 4 :][:1] if reference else looks:
            tab.set_viewport_size({"width": width, "height": 900})
            tab.emulate_media(color_scheme=scheme)
            wrong += [f"{name} at {width} in {scheme}: {v}" for v in serious(tab, axe)]
    assert not wrong, "\n".join(wrong)


def hash_of(name: str) -> int:
    return sum(name.encode())


def test_a_wide_table_and_bad_contrast_would_be_seen(address: str, tab, axe: str) -> None:
    visit(tab, f"{address}/index.html")
    tab.set_viewport_size({"width": 390, "height": 900})
    tab.evaluate(
        "document.querySelector('article').insertAdjacentHTML('beforeend',"
        "'<table style=\"width:900px\"><tr><td>a</td></tr></table>'"
        "+ '<p style=\"color:#ccc;background:#fff\">pale</p>')"
    )
    assert overflow(tab) > 0
    assert any(v.startswith("color-contrast") for v in serious(tab, axe))


def test_search_finds_reduction(address: str, tab) -> None:
    visit(tab, f"{address}/search.html?q=reduction")
    tab.wait_for_selector("ul.search li", timeout=10_000)
    found = tab.locator("ul.search li a").all_text_contents()
    assert any("eduction" in title for title in found), found


def test_a_page_offers_its_notebook_script_and_archive(site: Path, address: str, tab) -> None:
    for name in (n for n in pages(site) if re.search(r"gallery/\w+/plot_\w+\.html", n)):
        visit(tab, f"{address}/{name}")
        links = tab.locator("a.download").evaluate_all("links => links.map(a => a.href)")
        assert {Path(link).suffix for link in links} == {".ipynb", ".py", ".zip"}, name
        for link in links:
            assert tab.request.get(link).ok, link


def test_figures_follow_the_theme_and_say_what_they_show(site: Path, address: str, tab) -> None:
    for name in (n for n in pages(site) if re.search(r"gallery/\w+/plot_\w+\.html", n)):
        visit(tab, f"{address}/{name}")
        for scheme, other in (SCHEMES, SCHEMES[::-1]):
            tab.emulate_media(color_scheme=scheme)
            assert tab.locator(f"article img.only-{scheme}").count() > 0, f"{name} shows no figure"
            for image in tab.locator(f"article img.only-{scheme}").all():
                image.scroll_into_view_if_needed()
                assert image.is_visible()
                tab.wait_for_function(
                    "i => i.complete && i.naturalWidth > 0", arg=image.element_handle()
                )
                assert len(image.get_attribute("alt")) > 20, f"{name}: an alt text says too little"
            assert not any(i.is_visible() for i in tab.locator(f"article img.only-{other}").all())
