"""The font of the formulas: shipped, small, and loaded where there is a formula alone."""

import sys
from pathlib import Path

import pytest

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "conf"))
import mathml

pytestmark = pytest.mark.site

FONTS = ROOT / "conf" / "static" / "fonts"


def test_a_page_loads_the_font_where_it_has_a_formula(site: Path, address: str, browser) -> None:
    pages = [*site.glob("*.html"), *site.glob("gallery/*/plot_*.html")]
    with_formulas = [page for page in pages if "<math" in page.read_text("utf-8")]
    without = [page for page in pages if page not in with_formulas]
    for page in with_formulas[:2] + without[:2]:
        tab, asked = browser.new_page(), []
        tab.on("request", lambda r, asked=asked: asked.append(r.url.removeprefix(address)))
        tab.goto(f"{address}/{page.relative_to(site)}", wait_until="networkidle")
        tab.close()
        font = "/_static/fonts/stix-two-math.woff2"
        assert (font in asked) == (page in with_formulas), page


def test_the_font_is_small_and_its_licence_comes_with_it() -> None:
    assert (FONTS / "stix-two-math.woff2").stat().st_size < 60_000
    assert "STIX Fonts Project Authors" in (FONTS / "OFL.txt").read_text("utf-8")


def test_a_bar_is_as_long_as_what_it_stands_on_and_has_no_space_beside() -> None:
    assert 'stretchy="true"' in mathml._markup(r"\overline{v x}", "block")
    assert mathml._markup("|x|", "inline").count('lspace="0" rspace="0"') == 2


def test_the_index_of_a_letter_with_an_accent_stands_beside_it() -> None:
    assert "<msub>" in mathml._markup(r"\hat x_i", "block")
