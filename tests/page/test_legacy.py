"""The old form of a page, which goes when every page of the gallery has the new one."""

import argparse
import math
import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundoff.errors import ArgumentError
from roundoff.page import subplots
from roundoff.page.legacy import Study
from roundoff.page.legacy_table import Table
from roundoff.record import write_record
from roundoff.script import RENDERING

mpl.use("agg")
ENV = {"processor": "Some CPU", "cores": 2, "python": "3.11.7", "versions": {"torch": "2.11.0"}}
ENV |= {"gpu": None, "commit": "0123456789abcdef"}
FRAME = pd.DataFrame({"size": [256, 1024], "ratio": [0.63, 1.16], "dtype": ["<a>", None]})


@pytest.fixture
def rendered(monkeypatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(RENDERING, "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def script(monkeypatch, tmp_path: Path) -> Path:
    monkeypatch.delenv(RENDERING, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_table_is_captioned_scoped_and_escaped() -> None:
    markup = Table(FRAME, "The `ratio`.", units={"ratio": "×"}, identifier="t")._repr_html_()
    assert '<caption id="t">The <code>ratio</code>.' in markup
    assert markup.count('scope="col"') == 3
    assert markup.count('scope="row"') == 2
    assert 'role="region" aria-labelledby="t" tabindex="0"' in markup
    assert "&lt;a&gt;" in markup
    assert "<a>" not in markup
    assert '<span class="ro-unit">×</span>' in markup
    assert "<th></th>" not in markup


@pytest.mark.parametrize(
    ("value", "spec", "shown"),
    [
        (1234, None, "1,234"), (0.00012345, None, "0.000123"), (-1.5, ".2f", "−1.50"),
        (math.nan, ".2f", "–"), (None, None, "–"), (True, None, "yes"), (math.inf, None, "inf"),
        (0.25, lambda v: f"{v:.0%}", "25%"), ("-x", None, "-x"), (-3, None, "−3"),
    ],
)  # fmt: skip
def test_a_number_is_formatted(value, spec, shown: str) -> None:
    frame = pd.DataFrame({"x": pd.Series([value], dtype=object)})
    table = Table(frame, "c", formats={"x": spec} if spec else {})
    assert table.cells().x[0] == shown


def test_emphasis_does_not_depend_on_colour() -> None:
    rules = {"ratio": "min", "size": lambda f: f["ratio"] > 1}
    markup = Table(FRAME, "c", emphasize=rules)._repr_html_()
    assert re.findall("<strong>(.+?)</strong>", markup) == ["0.63", "1,024"]


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])))
def test_no_text_breaks_the_markup(text: str) -> None:
    markup = Table(pd.DataFrame({"x": [text]}), text)._repr_html_()
    assert not re.search(r"<(?!/?(div|table|caption|thead|tbody|tr|th|td|code|strong)\b)", markup)


def test_a_rendered_page_writes_nothing(rendered: Path) -> None:
    study = Study("plot_x", records=rendered / "none")
    study.table("t", FRAME, caption="c")
    figure, _ = subplots()
    study.figure("f", figure, alt="nothing yet")
    study.finish()
    assert list(rendered.iterdir()) == []
    assert figure.get_label() == "nothing yet"


def test_a_script_saves_and_records(script: Path, capsys) -> None:
    args = argparse.Namespace(config="small", record="out", commit="feed")
    study = Study("plot_x", args, records=script / "none")
    study.table("t", FRAME, caption="The ratios.", units={"ratio": "×"})
    study.table("scratch", FRAME, caption="c", recorded=False)
    figure, _ = subplots()
    study.figure("f", figure, alt="nothing")
    study.finish()
    saved = script / "build" / "plot_x"
    assert sorted(p.name for p in saved.iterdir()) == ["f.png", "scratch.csv", "t.csv"]
    assert pd.read_csv(saved / "t.csv").ratio.tolist() == [0.63, 1.16]
    (path,) = (script / "out" / "plot_x").iterdir()
    assert '"commit": "feed"' in path.read_text()
    assert '"scratch"' not in path.read_text()
    out = capsys.readouterr().out
    assert "The ratios." in out
    assert "ratio ×" in out


def test_recorded_machines_are_labelled_and_never_mixed(rendered: Path) -> None:
    other = FRAME.assign(ratio=[9.0, 9.5])
    write_record(rendered, "plot_x", {"t": other}, ENV)
    study = Study("plot_x", records=rendered)
    shown = study.table("t", FRAME, caption="c", formats={"ratio": ".2f"})._repr_html_()
    assert "9.50" not in shown
    assert "This build" in shown
    recorded = study.recorded("t")._repr_html_()
    assert "9.50" in recorded
    assert "1.16" not in recorded
    for word in ("Some CPU", "torch 2.11.0", "commit 0123456789", "20"):
        assert word in recorded
    build, recording = study.runs("t")
    assert (build.is_build, recording.is_build) == (True, False)
    assert recording.tables["t"].ratio.tolist() == [9.0, 9.5]
    assert [r.is_build for r in study.runs("t", "absent")] == [True]


def test_units_of_a_recorded_table_are_those_of_its_machine(rendered: Path) -> None:
    write_record(rendered, "plot_x", {"t": FRAME}, ENV | {"gpu": {"name": "Some GPU"}})
    study = Study("plot_x", records=rendered)

    def units(environment) -> dict[str, str]:
        return {"ratio": "ms" if environment["gpu"] else "of eager"}

    own = study.table("t", FRAME, caption="Here.", units=units(study.environment | {"gpu": None}))
    recorded = study.recorded("t", caption="There.", units=units)._repr_html_()
    assert '<span class="ro-unit">of eager</span>' in own._repr_html_()
    assert '<span class="ro-unit">ms</span>' in recorded
    assert "There." in recorded
    assert "Here." not in recorded


def test_a_table_that_only_records_have_is_shown_like_another(rendered: Path) -> None:
    write_record(rendered, "plot_x", {"u": FRAME.assign(ratio=[9.0, 9.5])}, ENV)
    study = Study("plot_x", records=rendered)
    study.table("t", FRAME, caption="Here.", formats={"ratio": ".3f"})
    shown = study.recorded("u", caption="There.", like="t")._repr_html_()
    assert "9.500" in shown
    assert "There." in shown
    with pytest.raises(ArgumentError, match="no such table yet"):
        study.recorded("u", like="absent")


def test_a_conclusion_is_drawn_from_each_run(rendered: Path) -> None:
    write_record(rendered, "plot_x", {"t": FRAME.assign(ratio=[9.0, 9.5])}, ENV)
    study = Study("plot_x", records=rendered)
    study.table("t", FRAME, caption="c")
    shown = study.conclude(lambda run: f"at most **{run.tables['t'].ratio.max()}**", "t")
    assert re.findall("<strong>(.+?)</strong>", shown._repr_html_()) == ["1.16", "9.5"]
    assert "Recorded: Some CPU" in repr(shown)

    def wrong(run) -> str:
        assert run.tables["t"].ratio.max() < 2
        return ""

    with pytest.raises(AssertionError):
        study.conclude(wrong, "t")


def test_a_pivot_has_plain_headings(rendered: Path) -> None:
    study = Study("plot_x", records=rendered / "none")
    long = pd.DataFrame({"size": [1, 1], "label": ["a", "b"], "t": [1.0, 2.0], "u": [3.0, 4.0]})
    pivot = long.pivot(index="size", columns="label", values=["t", "u"])
    assert list(study.table("p", pivot, caption="c", index=True).frame) == [
        "size", "t a", "t b", "u a", "u b",
    ]  # fmt: skip


def test_names_are_used_once(rendered: Path) -> None:
    study = Study("plot_x", records=rendered / "none")
    study.table("t", FRAME, caption="c")
    with pytest.raises(ArgumentError, match="two tables of one name"):
        study.table("t", FRAME, caption="c")
    with pytest.raises(ArgumentError, match="no such table yet"):
        study.recorded("u")
    figure, _ = subplots()
    study.figure("f", figure, alt="a")
    with pytest.raises(ArgumentError, match="two figures of one name"):
        study.figure("f", figure, alt="a")


def test_sentences_are_marked_and_escaped(rendered: Path) -> None:
    study = Study("plot_x", records=rendered / "none")
    one = study.say("a < b: **yes**, see `f`")
    assert "<p>a &lt; b: <strong>yes</strong>, see <code>f</code></p>" in one._repr_html_()
    many = study.say(["first", "second"], label="H200")
    assert many._repr_html_().count("<li>") == 2
    assert repr(many) == "H200:\nfirst\nsecond"


def test_boolean_columns_are_numpys_too() -> None:
    frame = pd.DataFrame({"x": np.array([True, False])})
    assert Table(frame, "c").cells().x.tolist() == ["yes", "no"]


def test_a_sentence_has_minus_signs_and_code_keeps_its_hyphens(rendered: Path) -> None:
    said = repr(
        Study("plot_x").say("From -0.5 to 2e-05 on 2026-01-31 with `x = -1`, not `-1`-fold.")
    )
    assert said == "From −0.5 to 2e−05 on 2026-01-31 with `x = -1`, not `-1`-fold."


def test_large_numbers_are_read_without_an_exponent() -> None:
    cells = Table(pd.DataFrame({"x": [0.00012345, 999.4, 4177.3, -50880.0, 3e9]}), "c").cells()
    assert cells["x"].tolist() == ["0.000123", "999", "4,177", "−50,880", "3e+09"]


def test_a_table_without_rows_is_its_caption(rendered: Path) -> None:
    study = Study("plot_x", records=rendered)
    table = study.table("t", FRAME.iloc[:0], caption="Nothing here.")
    assert "Nothing here." in table._repr_html_()
    assert "<table" not in table._repr_html_()
    assert "Nothing here." in repr(table)
    write_record(rendered, "plot_x", {"t": FRAME.iloc[:0]}, ENV)
    again = Study("plot_x", records=rendered)
    again.table("t", FRAME, caption="c")
    assert "No other machine" in repr(again.recorded("t"))
