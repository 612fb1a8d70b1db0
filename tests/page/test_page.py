"""The site's colours, and its tables cell by cell."""

import math
import re

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundoff.errors import ArgumentError
from roundoff.page import DARK, PALETTE, Table, dark, subplots
from roundoff.page.columns import COLUMNS, Column
from roundoff.page.table import inline, minus, tabs

mpl.use("agg")


def luminance(colour: str) -> float:
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
                for c in mpl.colors.to_rgb(colour)]  # fmt: skip
    return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colour", PALETTE)
@pytest.mark.parametrize("background", ["#ffffff", "#131416"])
def test_a_line_is_seen_on_a_light_and_on_a_dark_page(colour: str, background: str) -> None:
    assert contrast(colour, background) >= 3.0


def test_text_is_read_on_a_light_and_on_a_dark_page() -> None:
    (ink, dark_ink), _, (paper, dark_paper) = DARK.items()
    assert contrast(ink, paper) >= 7
    assert contrast(dark_ink, dark_paper) >= 7


def test_a_figure_turns_dark_and_back() -> None:
    figure, axes = subplots()
    axes.bar([0, 1], [1, 2], edgecolor="#24292f")
    axes.plot([0, 1], [1, 2], color=PALETTE[0])
    axes.set_title("a title")
    figure.canvas.draw()

    def colours() -> list[str]:
        found = []
        for artist in figure.findobj():
            for name in ("get_color", "get_edgecolor", "get_facecolor"):
                if hasattr(artist, name):
                    found += [mpl.colors.to_hex(c) for c in mpl.colors.to_rgba_array(
                        getattr(artist, name)())]  # fmt: skip
        return found

    before = colours()
    assert "#24292f" in before
    with dark(figure):
        during = colours()
        assert "#24292f" not in during
        assert "#d9dee4" in during
        assert PALETTE[0] in during
    assert colours() == before


def test_a_figure_carries_its_title() -> None:
    figure, axes = subplots(1, 2, title="Error by size")
    assert figure.get_suptitle() == "Error by size"
    assert len(axes) == 2
    assert subplots()[0].get_suptitle() == ""


# --- tables


FRAME = pd.DataFrame({"dtype": ["<a>", None], "N": [256, 1024], "error": [0.63, 1.16]})


def test_a_table_is_scoped_and_escaped() -> None:
    markup = tabs("t", [Table(FRAME, "The `ratio` < 1.", list(FRAME))])._repr_html_()
    assert 'id="caption-t">The <code>ratio</code> &lt; 1.</p>' in markup
    assert markup.count('scope="col"') == 3
    assert markup.count('<th scope="row"') == 2
    assert 'role="region" aria-labelledby="caption-t table-t-0" tabindex="0"' in markup
    assert 'id="table-t-0"' in markup
    assert "&lt;a&gt;" in markup
    assert "<a>" not in markup


def test_headings_have_one_label_and_unit_on_the_whole_site() -> None:
    table = Table(FRAME, "c", list(FRAME))
    assert table.heading("error") == ("largest error", "ε × RMS")
    assert table.heading("dtype") == ("type", "")
    assert table.heading("of our own") == ("of our own", "")
    assert table.heading("median, second run") == ("median, second run", "ms")
    markup = table.markup(switch=False)
    assert 'largest error <span class="ro-unit">ε × RMS</span></th>' in markup
    assert 'title="absolute error over' in markup
    assert "largest error ε × RMS" in repr(table)
    assert all(c.label for c in COLUMNS.values())


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("x", 1234, "1,234"), ("x", 0.00012345, "0.000123"), ("x", -1.5, "−1.5"),
        ("x", math.nan, "–"), ("x", None, "–"), ("x", pd.NA, "–"), ("x", True, "yes"),
        ("x", np.bool_(False), "no"), ("x", math.inf, "∞"), ("x", -math.inf, "−∞"),
        ("x", "-x", "-x"), ("x", -3, "−3"), ("x", 999.4, "999"), ("x", 4177.3, "4,177"),
        ("x", -50880.0, "−50,880"), ("x", 3e9, "3e+09"), ("x", 2e-9, "2e−09"),
        ("%", 0.25, "25.0%"), (".2f", 1.234, "1.23"), ("+", 0.5, "+0.5"),
        ("+", -0.5, "−0.5"), ("d", 2048, "2048"), ("d", 2048.0, "2048"),
        ("g", 4177.3, "4,177"), ("g", 0.1234, "0.123"), (",", 12345.6, "12,346"),
        ("%, second run", 0.1234, "12.3%"), ("%", math.nan, "–"), ("d", None, "–"),
        ("g", 0.0, "0"), ("%", "all", "all"), ("share", 4.31e-5, "0.00431 %"),
    ],
)  # fmt: skip
def test_a_number_is_formatted_by_its_column(monkeypatch, name: str, value, shown: str) -> None:
    formats = {"%": ".1%", ".2f": ".2f", "+": "+.2g", "d": "d", "g": ".3g", ",": ",.0f"}
    for own, spec in formats.items():
        monkeypatch.setitem(COLUMNS, own, Column(own, "", spec))
    frame = pd.DataFrame({name: pd.Series([value], dtype=object)})
    assert Table(frame, "c", [name]).cells()[name][0] == shown


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])))
def test_no_text_breaks_the_markup(text: str) -> None:
    frame = pd.DataFrame({"x": [text], text: ["y"]})
    markup = tabs("t", [Table(frame, text, [*frame][:1], source=text, name=text)])._repr_html_()
    tags = "div|table|thead|tbody|tr|th|td|code|strong|p|span|label|input"
    assert not re.search(rf"<(?!/?({tags})\b)", markup)


def test_eight_columns_in_sight_are_too_many() -> None:
    frame = pd.DataFrame({f"c{i}": [i] for i in range(8)})
    with pytest.raises(ArgumentError, match="too wide: got 8 columns, expected at most 7"):
        Table(frame, "c", list(frame))
    table = Table(frame, "c", [*frame][:7])
    assert table.more() == "All 8 columns"
    with pytest.raises(ArgumentError, match="no such column: got c9"):
        Table(frame, "c", ["c9"])


def test_what_is_not_telling_is_behind_the_switch() -> None:
    table = Table(FRAME, "c", ["N", "error"], telling=[True, False])
    assert table.more() == "All 2 rows and 3 columns"
    markup = table.markup(switch=True)
    assert markup.count('<tr class="ro-more">') == 1
    assert markup.count('class="ro-more"') == 1 + 1 + 2  # the row, the heading and the cells
    assert "1.16" in markup
    plain = table.markup(switch=False)
    assert "ro-more" not in plain
    assert "1.16" not in plain
    assert ">type<" not in plain
    assert Table(FRAME, "c", list(FRAME)).more() == ""
    assert "1.16" not in repr(table)


def test_a_long_table_is_downloaded_rather_than_unfolded() -> None:
    frame = pd.DataFrame({"N": range(17), "error": 1.0})
    table = Table(frame, "c", ["N"], telling=[i < 3 for i in range(17)])
    assert table.more() == "All 2 columns"
    assert table.markup(switch=True).count("<tr") == 4
    short = Table(frame[:16], "c", ["N"], telling=[i < 3 for i in range(16)])
    assert short.more() == "All 16 rows and 2 columns"
    assert short.markup(switch=True).count("<tr") == 17


def test_equal_tables_are_shown_once() -> None:
    one = Table(FRAME, "c", ["N"], machine="m1", name="H200", source="Source 1")
    same = Table(FRAME.assign(error=[0.6301, 1.1601]), "c", ["N"], machine="m2", name="H100",
                 source="Source 2")  # fmt: skip
    other = Table(FRAME.assign(error=9.5), "c", ["N"], machine="this-build", source="Source 3")
    shown = tabs("t", [one, same, other])
    markup = shown._repr_html_()
    assert re.findall('data-m="(.+?)"', markup) == ["m1 m2", "this-build"]
    assert "H200, Source 1; H100, Source 2" in markup
    assert re.findall('<label for="ro-m-(.+?)">(.+?)</label>', markup) == [
        ("m1", "H200"), ("m2", "H100"), ("this-build", "This build"),
    ]  # fmt: skip
    assert repr(shown).count("Source") == 2
    assert "ro-bar" not in tabs("t", [one])._repr_html_()


def test_a_notebook_shows_the_first_table_and_folds_the_others() -> None:
    one = Table(FRAME, "The `c`.", ["N"], source="Source 1", csv="t.csv")
    other = Table(FRAME.assign(N=[1, 2]), "The `c`.", ["N"], machine="m2", source="Source 2")
    markup = tabs("t", [one, other], alone=True)._repr_html_()
    assert markup.startswith('<p id="caption-t"><b>The <code>c</code>.</b></p><table>')
    assert "<details><summary>This build, Source 2</summary><table>" in markup
    for absent in ("ro-tabs", "<label", "<input", "t.csv"):
        assert absent not in markup


def test_marked_words_and_minus_signs() -> None:
    assert inline("a < b: **yes**, see ``f`` and `g`") == (
        "a &lt; b: <strong>yes</strong>, see <code>f</code> and <code>g</code>"
    )
    assert minus("From -0.5 to 2e-05 on 2026-01-31 with `x = -1`, not `-1`-fold.") == (
        "From −0.5 to 2e−05 on 2026-01-31 with `x = -1`, not `-1`-fold."
    )
