"""The font of the formulas: shipped, loaded where there is a formula, and drawing its radical.

In a browser that finds no system font with a ``MATH`` table.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import FLAGS, ROOT

sys.path.insert(0, str(ROOT / "conf"))
import mathml

pytestmark = pytest.mark.site

FONTS = ROOT / "conf" / "static" / "fonts"
OURS = {("STIX Two Math", True)}
LETTERS = "math mi, math mn, math mo, math mtext"
# Debian's DejaVu Math has a MATH table, and so would hide that ours is missing.
NO_MATHS = """<?xml version="1.0"?>
<fontconfig>
  <selectfont><rejectfont><glob>*Math*</glob></rejectfont></selectfont>
  <include ignore_missing="yes">/etc/fonts/fonts.conf</include>
</fontconfig>
"""


@pytest.fixture(scope="module")
def bare_browser(browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Chromium on a system without a maths font."""
    fonts = tmp_path_factory.mktemp("fontconfig") / "fonts.conf"
    fonts.write_text(NO_MATHS)
    # Pages are opened as files, which is how a reader of a downloaded site opens them.
    chromium = browser.browser_type.launch(
        executable_path=shutil.which("chromium") or shutil.which("chromium-browser"),
        args=[*FLAGS, "--allow-file-access-from-files"],
        env=os.environ | {"FONTCONFIG_FILE": str(fonts)},
    )
    yield chromium
    chromium.close()


def fonts_of(tab, selector: str) -> list[set[tuple[str, bool]]]:
    """For each element: the fonts that draw it, and whether the site ships them."""
    session = tab.context.new_cdp_session(tab)
    for domain in ("DOM", "CSS"):
        session.send(f"{domain}.enable")
    root = session.send("DOM.getDocument")["root"]["nodeId"]
    found = session.send("DOM.querySelectorAll", {"nodeId": root, "selector": selector})
    used = [session.send("CSS.getPlatformFontsForNode", {"nodeId": n}) for n in found["nodeIds"]]
    return [{(font["familyName"], font["isCustomFont"]) for font in u["fonts"]} for u in used]


def test_formulas_and_they_alone_are_drawn_in_the_font_that_is_shipped(
    site: Path, bare_browser
) -> None:
    pages = [*site.glob("*.html"), *site.glob("gallery/*/plot_*.html")]
    with_formulas = [page for page in pages if "<math" in page.read_text("utf-8")]
    without = [page for page in pages if page not in with_formulas][:3]
    assert with_formulas
    assert without
    tab, fonts = bare_browser.new_page(), []
    tab.on("request", lambda r: fonts.append(r.url) if ".woff" in r.url else None)
    for page in with_formulas + without:
        fonts.clear()
        tab.goto(page.as_uri(), wait_until="load")
        tab.evaluate("document.fonts.ready")
        if page in with_formulas:
            assert fonts == [(site / "_static" / "fonts" / "stix-two-math.woff2").as_uri()]
            assert set().union(*fonts_of(tab, LETTERS)) == OURS, page
        else:
            assert not fonts, page
    tab.close()


def test_the_font_is_small_and_its_licence_comes_with_it() -> None:
    assert (FONTS / "stix-two-math.woff2").stat().st_size < 60_000
    assert "STIX Fonts Project Authors" in (FONTS / "OFL.txt").read_text("utf-8")


def test_a_bar_is_as_long_as_what_it_stands_on_and_has_no_space_beside() -> None:
    assert 'stretchy="true"' in mathml._markup(r"\overline{v x}", "block")
    assert mathml._markup("|x|", "inline").count('lspace="0" rspace="0"') == 2


def test_the_index_of_a_letter_with_an_accent_stands_beside_it() -> None:
    assert "<msub>" in mathml._markup(r"\hat x_i", "block")
