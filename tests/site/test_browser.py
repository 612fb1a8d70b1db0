"""The built fast site, as a reader's browser sees it."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.site

# Each width and each scheme; the other two pairs hold nothing that these do not.
LOOKS = ((1280, "light"), (390, "dark"))
SCHEMES = ("light", "dark")
# Pages that hold neither prose nor code of ours.
MACHINE_MADE = {"genindex.html", "py-modindex.html", "search.html"}


def pages(site: Path) -> list[str]:
    return sorted(
        p.relative_to(site).as_posix() for p in site.rglob("*.html") if "_static" not in p.parts
    )


def some(site: Path) -> list[str]:
    """Of the pages of the reference, which are of one making, one in ten; all the others."""
    names = pages(site)
    reference = [name for name in names if name.startswith("generated/")]
    return [name for name in names if name not in reference] + reference[::10]


def studies(site: Path) -> list[str]:
    """The pages of the gallery that have run, the longest first."""
    names = (
        path.relative_to(site).as_posix()
        for path in site.glob("gallery/*/plot_*.html")
        if "ro-drawing" in path.read_text("utf-8")
    )
    return sorted(names, key=lambda name: -(site / name).stat().st_size)


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
    page.on(
        "response",
        lambda r: page.problems.append(f"{r.status} {r.url}") if r.status >= 400 else None,
    )
    page.on(
        "request",
        lambda r: (
            None
            if r.url.startswith((address, "data:"))
            else page.problems.append(f"external request: {r.url}")
        ),
    )
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


# Where the eye reads something: of texts of one look, one. Contrast takes axe longer than all else.
LOOKED_AT = """() => {
    const seen = new Set();
    return [...document.querySelectorAll('body, body *')].filter(e => {
        if (![...e.childNodes].some(n => n.nodeType === Node.TEXT_NODE && n.data.trim())
            || !e.checkVisibility()) return false;
        const {color, fill, fontSize, fontWeight} = getComputedStyle(e), behind = new Set();
        for (let a = e; a; a = a.parentElement) {
            const {backgroundColor, backgroundImage, opacity} = getComputedStyle(a);
            behind.add(backgroundColor).add(backgroundImage).add(opacity);
        }
        const look = [color, fill, fontSize, fontWeight, ...behind].join();
        return !seen.has(look) && seen.add(look);
    });
}"""


def serious(tab, axe: str) -> list[str]:
    """Serious and critical violations, with the first elements concerned."""
    tab.evaluate(f"window.axe || (() => {{ {axe} }})()")
    found = tab.evaluate(f"axe.run({{include: ({LOOKED_AT})()}}, {{runOnly: ['color-contrast']}})")[
        "violations"
    ]
    rules = "{'color-contrast': {enabled: false}, 'target-size': {enabled: true}}"
    found += tab.evaluate(f"axe.run(document, {{resultTypes: ['violations'], rules: {rules}}})")[
        "violations"
    ]
    return [
        f"{v['id']}: {', '.join(str(n['target']) + ' ' + n['html'][:120] for n in v['nodes'][:3])}"
        for v in found
        if v["impact"] in ("serious", "critical")
    ]


def look(tab, width: int, scheme: str) -> None:
    tab.set_viewport_size({"width": width, "height": 900})
    tab.emulate_media(color_scheme=scheme)


def test_pages_open_alone_and_fit(site: Path, address: str, tab) -> None:
    wrong = []
    for name in some(site):
        visit(tab, f"{address}/{name}")
        for width, scheme in LOOKS:
            look(tab, width, scheme)
            if (pixels := overflow(tab)) > 0:
                wrong.append(f"{name} at {width} in {scheme}: {pixels} pixels too wide")
        wrong += [f"{name}: {problem}" for problem in tab.problems]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "names",
    [
        lambda site: ["index.html", "results.html", "install.html"],
        pytest.param(
            some,
            marks=pytest.mark.slow(
                reason="axe takes seconds a page; pages are of three makings, looked at above"
            ),
        ),
    ],
    ids=["few", "more"],
)
def test_a_page_has_no_serious_violation_of_accessibility(site, address, tab, axe, names) -> None:
    wrong = []
    for name in names(site):
        visit(tab, f"{address}/{name}")
        for width, scheme in LOOKS:
            look(tab, width, scheme)
            wrong += [f"{name} at {width} in {scheme}: {v}" for v in serious(tab, axe)]
    assert not wrong, "\n".join(wrong)


MOST_WEIGHT = 600_000


def weight(browser, url: str) -> tuple[int, list[str]]:
    """Bytes, uncompressed, that a first visit loads, and the three largest."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(url, wait_until="networkidle")
    sizes = page.evaluate("""() => [...performance.getEntriesByType('navigation'),
        ...performance.getEntriesByType('resource')].map(e => [e.decodedBodySize, e.name])""")
    page.close()
    largest = [f"{size} {name}" for size, name in sorted(sizes, reverse=True)[:3]]
    return sum(size for size, _ in sizes), largest


def test_a_first_visit_loads_at_most_600_kilobytes(site, address, browser) -> None:
    for name in ["index.html", "results.html", *studies(site)[:3]]:
        size, largest = weight(browser, f"{address}/{name}")
        assert 50_000 < size < MOST_WEIGHT, f"{name}: {largest}"


def test_images_load_and_their_texts_mean_something(site: Path, address: str, tab) -> None:
    wrong = []
    shown = (n for n in pages(site) if not n.startswith("generated/") and n not in MACHINE_MADE)
    for name in shown:
        visit(tab, f"{address}/{name}")
        wrong += tab.evaluate(
            """async name => {
            const wrong = [];
            for (const image of document.querySelectorAll('img')) {
                image.loading = 'eager';
                try { await image.decode(); } catch { wrong.push(`${name}: ${image.src}`); }
                const text = image.alt, linked =
                    image.closest(".sphx-glr-thumbcontainer, .sidebar-brand");
                if (!linked && (text.length < 20 || !/ /.test(text) || /\\.(png|svg)/.test(text)))
                    wrong.push(`${name}: "${text}" says too little`);
            }
            return wrong;
        }""",
            name,
        )
    assert not wrong, "\n".join(wrong)


# Elements that take the keyboard's focus, as the page lies there: folded ones do not.
REACHABLE = """() => [...document.querySelectorAll(
    'a[href], button, input, select, textarea, summary, [tabindex]')].filter(e => {
        if (e.tabIndex < 0 || e.disabled || !e.checkVisibility({visibilityProperty: true}))
            return false;
        const box = e.getBoundingClientRect();
        return box.width > 0 && box.height > 0;
    })"""


def test_the_keyboard_alone_reaches_everything(site: Path, address: str, tab) -> None:
    wrong = []
    look(tab, *LOOKS[0])
    for name in ["index.html", "results.html", studies(site)[0]]:
        visit(tab, f"{address}/{name}")
        expected = tab.evaluate(
            # Of a group of radio buttons the chosen one is a stop; arrows lead to the others.
            f"({REACHABLE})().filter(e => e.type !== 'radio' || e.checked)"
            ".map((e, i) => { e.dataset.stop = i; return i; })"
        )
        tab.evaluate(
            "() => { window.reached = []; document.addEventListener("
            "'focusin', e => window.reached.push(e.target.dataset.stop), true); }"
        )
        for _ in range(len(expected) + 20):
            tab.keyboard.press("Tab")
        reached = set(tab.evaluate("window.reached"))
        missed = [i for i in expected if str(i) not in reached]
        if missed or not expected:
            wrong.append(f"{name}: {len(missed)} of {len(expected)} out of reach")
    assert not wrong, "\n".join(wrong)


def test_figures_follow_the_theme(site: Path, address: str, tab) -> None:
    """Each scheme shows its own figures, and none of the other's."""
    for name in studies(site)[:2]:
        visit(tab, f"{address}/{name}")
        for scheme, other in (SCHEMES, SCHEMES[::-1]):
            tab.emulate_media(color_scheme=scheme)
            assert tab.locator(f"article img.only-{scheme}").count() > 0, f"{name} shows no figure"
            assert all(i.is_visible() for i in tab.locator(f"article img.only-{scheme}").all())
            assert not any(i.is_visible() for i in tab.locator(f"article img.only-{other}").all())
