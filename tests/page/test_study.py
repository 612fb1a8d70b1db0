"""A study: its tables as tabs, its claims on every machine, and what ends a build."""

import argparse
import builtins
import json
import re
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import pytest

from roundoff.errors import ArgumentError, UnsupportedError, WorkerError
from roundoff.page import ClaimError, Study, attempt, subplots
from roundoff.page.study import STRICT
from roundoff.record import read_record, write_record
from roundoff.script import RENDERING

mpl.use("agg")
H200, H100, OTHER, CPU = "nvidia-h200", "nvidia-h100-80gb-hbm3", "amd-mi300x", "some-2-cores"
GPUS = {H200: "NVIDIA H200", H100: "NVIDIA H100 80GB HBM3", OTHER: "AMD MI300X", CPU: None}
FRAME = pd.DataFrame({"provider": ["CPU", "CUDA"], "N": [256, 1024], "ratio": [0.63, 1.16]})


def environment(machine: str, **more) -> dict:
    gpu = GPUS[machine] and {"name": GPUS[machine]}
    found = {"processor": "Some CPU", "cores": 2, "os": "Linux", "python": "3.11.7",
             "versions": {"torch": "2.11.0"}, "gpu": gpu, "commit": "0123456789abcdef"}  # fmt: skip
    return found | more


class Place:
    """A folder with records of ``plot_x``, and studies of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def record(self, machine: str, frame: pd.DataFrame = FRAME, name: str = "t", **options) -> Path:
        options = {"parts": {name: "provider" if "provider" in frame else "gpu"}} | options
        path = write_record(self.folder / "records", "plot_x", {name: frame}, environment(machine),
                            **options)  # fmt: skip
        assert path.stem == machine
        return path

    def study(self, *args) -> Study:
        return Study("plot_x", *args, records=self.folder / "records")


@pytest.fixture
def place(monkeypatch, tmp_path: Path) -> Place:
    """A build of the site."""
    for name in (STRICT, "UNITTEST_GOING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(RENDERING, "1")
    monkeypatch.chdir(tmp_path)

    def known(commit: str | None) -> dict:  # this machine may be one that the records name
        return environment(CPU, **({"commit": commit} if commit else {}))

    monkeypatch.setattr("roundoff.page.study.environment", known)
    return Place(tmp_path)


@pytest.fixture
def script(place: Place, monkeypatch) -> Place:
    monkeypatch.delenv(RENDERING)
    return place


@pytest.fixture
def notebook(script: Place, monkeypatch) -> Place:
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    return script


def tabs_of(markup: str) -> list[str]:
    return re.findall(r'<label for="ro-m-[\w-]+">(.+?)</label>', markup)


def panes_of(markup: str) -> list[str]:
    return re.findall('<div class="ro-pane" data-m="(.+?)">', markup)


# --- tables


def test_tabs_are_in_order_of_what_they_tell(place: Place) -> None:
    for i, machine in enumerate((OTHER, H100, CPU, H200)):
        place.record(machine, FRAME.assign(ratio=[i, i + 0.5]))
    markup = place.study().table("t", FRAME, "The `ratio`.")._repr_html_()
    assert panes_of(markup) == [H200, H100, OTHER, CPU, "this-build"]
    assert tabs_of(markup)[:2] == ["H200", "H100"]
    assert tabs_of(markup)[-1] == "This build"
    assert "H200, 20" in markup
    assert "commit 0123456789" in markup


def test_a_table_equal_on_two_machines_is_printed_once(place: Place) -> None:
    place.record(H200)
    place.record(H100, FRAME.assign(ratio=[9.0, 9.5]))
    markup = place.study().table("t", FRAME.assign(ratio=[0.6301, 1.1602]), "c")._repr_html_()
    assert panes_of(markup) == [f"{H200} this-build", H100]
    assert markup.count("<table>") == 2
    assert tabs_of(markup) == ["H200", "This build", "H100"]


def test_a_run_is_named_after_the_part_that_computed_it(place: Place) -> None:
    place.record(H200, FRAME[:1].assign(ratio=5.0))
    assert tabs_of(place.study().table("t", FRAME, "c")._repr_html_())[0] == "H200&#x27;s host"


def test_only_machines_with_rows_have_a_tab(place: Place) -> None:
    place.record(H200, FRAME[:0])
    place.record(H100, name="another")
    markup = place.study().table("t", FRAME, "c")._repr_html_()
    assert panes_of(markup) == ["this-build"]
    assert tabs_of(markup) == []


def test_quick_mode_is_labelled(place: Place, monkeypatch) -> None:
    place.record(H200, FRAME.assign(ratio=9.0))
    monkeypatch.setenv("UNITTEST_GOING", "1")
    assert tabs_of(place.study().table("t", FRAME, "c")._repr_html_())[-1] == ("This build (quick)")


def test_eight_columns_in_sight_end_the_build(place: Place) -> None:
    wide = FRAME.assign(**{f"c{i}": 1.0 for i in range(5)})
    with pytest.raises(ArgumentError, match="got 8 columns, expected at most 7 in sight"):
        place.study().table("t", wide, "A wide table.")
    shown = place.study().table("t", wide, "c", columns=[*wide][:7])._repr_html_()
    assert "> All 8 columns</label>" in shown


def test_telling_rows_and_columns_are_in_sight(place: Place) -> None:
    place.record(H200, FRAME.assign(ratio=9.0))
    study = place.study()
    shown = study.table("t", FRAME, "c", columns=["provider", "ratio"], rows={"provider": "CUDA"})
    markup = shown._repr_html_()
    assert markup.count("> All 2 rows and 3 columns</label>") == 2
    assert markup.count('<tr class="ro-more">') == 2
    assert markup.count('<th scope="col" class="ro-number ro-more">') == 2
    # A function of the column can choose them, and a record without the column shows all.
    place.record(H100, FRAME.drop(columns="N").assign(ratio=3.0))
    shown = place.study().table("t", FRAME, "c", rows={"N": lambda s: s > 500})
    assert shown._repr_html_().count('<tr class="ro-more">') == 2


def test_a_record_without_a_telling_column_shows_the_others(place: Place) -> None:
    place.record(H200, FRAME.drop(columns="N").assign(ratio=9.0))
    markup = place.study().table("t", FRAME, "c", columns=["N", "ratio"])._repr_html_()
    first = markup.partition('data-m="this-build"')[0]
    assert 'scope="col" class="ro-number">ratio</th>' in first
    assert ">N <" not in first


def test_a_column_without_a_value_is_not_behind_the_switch_either(place: Place) -> None:
    place.record(H200, FRAME.assign(rival=None, ratio=9.0))
    shown = place.study().table("t", FRAME.assign(rival=1.0), "c", columns=["N", "rival"])
    first = shown._repr_html_().partition('data-m="this-build"')[0]
    assert "rival" not in first
    assert "ratio" in first
    assert "> All 3 columns</label>" in first


def test_what_computed_a_table_is_said(place: Place) -> None:
    study = place.study()
    with pytest.raises(ArgumentError, match=r"table t: what computed it\?"):
        study.table("t", FRAME[["N"]], "c")
    study.table("t", FRAME[["N"]], "c", part="cpu")


def test_names_of_tables_and_figures_are_used_once(place: Place) -> None:
    study = place.study()
    study.table("t", FRAME, "c")
    with pytest.raises(ArgumentError, match="two tables of one name: got t"):
        study.table("t", FRAME, "c")
    figure, _ = subplots()
    study.figure("f", figure, alt="a")
    with pytest.raises(ArgumentError, match="two figures of one name: got f"):
        study.figure("f", figure, alt="a")


def test_only_the_site_links_csv_and_only_a_script_writes_it(script: Place, monkeypatch) -> None:
    script.record(H200, FRAME.assign(ratio=9.0))
    address = f"../../records/plot_x/{H200}/t.csv"
    assert "CSV" not in script.study().table("t", FRAME, "c")._repr_html_()
    (saved,) = (script.folder / "build" / "plot_x").iterdir()
    assert pd.read_csv(saved).equals(FRAME)
    saved.unlink()
    monkeypatch.setenv(RENDERING, "1")
    markup = script.study().table("t", FRAME, "c")._repr_html_()
    assert f'<a href="{address}">CSV</a>' in markup
    assert '<a href="../../records/plot_x/this-build/t.csv">CSV</a>' in markup
    assert list((script.folder / "build" / "plot_x").iterdir()) == []


def test_a_script_prints_its_own_run(script: Place, capsys) -> None:
    script.record(H200, FRAME.assign(ratio=9.5))
    script.study().table("t", FRAME, "The ratios.", rows={"provider": "CUDA"})
    printed = capsys.readouterr().out
    assert "The ratios." in printed
    assert "This build" in printed
    assert "1.16" in printed
    for absent in ("0.63", "9.5", "H200"):
        assert absent not in printed


def test_a_notebook_shows_its_own_run_first_and_folds_the_records(notebook: Place, capsys) -> None:
    notebook.record(H200, FRAME.assign(ratio=9.5))
    markup = notebook.study().table("t", FRAME, "c")._repr_html_()
    own, _, folded = markup.partition("<details>")
    assert "1.16" in own
    assert "This build" in own
    assert "9.5" not in own
    assert "<summary>H200, 20" in folded
    assert "9.5" in folded
    assert "CSV" not in markup
    assert "ro-tabs" not in markup
    assert capsys.readouterr().out == ""
    assert not (notebook.folder / "build").exists()


def test_a_second_run_stands_beside_the_first(place: Place) -> None:
    timed = FRAME.assign(median=[1.5, 2.5])
    place.record(H200, timed)
    place.record(H200, timed.assign(median=[1.75, 2.75]), times={"t": ["median"]}, second=True)
    study = place.study()
    markup = study.table("t", timed, "c", times=["median"])._repr_html_()
    recorded, _, build = markup.partition('data-m="this-build"')
    assert '<th scope="col" class="ro-number">median, second run <span' in recorded
    assert "1.75" in recorded
    assert "second run" not in build
    narrow = place.study().table("t", timed, "c", columns=["N"], times=["median"])
    assert '<th scope="col" class="ro-number ro-more">median, second run' in narrow._repr_html_()


def test_a_second_run_has_the_columns_that_the_first_leaves(place: Place) -> None:
    """Seven are in sight; the others are behind the switch."""
    names = [f"t{i}" for i in range(6)]
    timed = FRAME[["provider"]].assign(**{name: [1.5, 2.5] for name in names})
    place.record(H200, timed)
    place.record(H200, timed.assign(t0=[1.75, 2.75]), times={"t": names}, second=True)
    for sight in range(4, 8):
        columns = ["provider", *names][:sight]
        markup = place.study().table("t", timed, "c", columns=columns)._repr_html_()
        heads = re.findall(r'<th scope="col" class="([^"]*)">[^<]*, second run', markup)
        assert len(heads) == 6
        assert sum("ro-more" not in head for head in heads) == min(sight - 1, 7 - sight)


def test_text_that_a_second_run_repeats_is_not_shown_again(place: Place) -> None:
    for others in (["none", "torch"], ["none", "none"]):
        timed = FRAME.assign(median=[1.5, 2.5], others=["none", "torch"])
        place.record(H200, timed)
        timed = timed.assign(median=[1.75, 2.75], others=others)
        place.record(H200, timed, times={"t": ["median", "others"]}, second=True)
        markup = place.study().table("t", timed, "c", times=["median"])._repr_html_()
        assert "median, second run" in markup
        assert ("others, second run" in markup) == (others != ["none", "torch"])


def test_a_table_can_be_kept_without_being_shown(place: Place) -> None:
    place.record(H200)
    study = place.study()
    markup = study.keep("t", FRAME.to_dict("records"))._repr_html_()
    assert "<table" not in markup
    assert f'<a href="../../records/plot_x/{H200}/t.csv">H200</a>' in markup
    assert marks(claimed(study)) == ["H200 ✓", "this build ✓"]
    with pytest.raises(ArgumentError, match="two tables of one name"):
        study.table("t", FRAME, "c")


def test_a_kept_table_is_saved_by_a_script(script: Place) -> None:
    script.study().keep("t", FRAME)
    (saved,) = (script.folder / "build" / "plot_x").iterdir()
    assert pd.read_csv(saved).equals(FRAME)


@pytest.mark.parametrize("columns", [["N", "ratio"], None])
def test_what_could_not_run_here_is_shown_of_the_records(place: Place, columns) -> None:
    place.record(H200)
    study = place.study()
    shown = study.table("t", [], "Nothing.", columns=columns, part="provider")._repr_html_()
    assert "H200" in shown
    assert "This build" not in shown
    claim = study.claim("It grows.", of="t", where={"provider": ["CPU", "CUDA"]},
                        test=lambda t: t["ratio"].diff().iloc[1] > 0)  # fmt: skip
    assert "H200 ✓" in claim._repr_html_()
    assert "this build not tested" in claim._repr_html_()
    study.dots("d", of="t", x="ratio", label="provider", alt="Two dots.")
    study.finish()


def test_what_could_run_nowhere_is_said(script: Place, capsys) -> None:
    study = script.study()
    study.table("t", [], "Nothing.", part="cpu")
    study.keep("k", [], part="cpu")
    assert "table t: no machine has rows\ntable k, rows: 0" in capsys.readouterr().out
    assert not (study.output / "t.csv").exists()


def test_a_record_leaves_out_what_could_not_run(script: Place) -> None:
    args = argparse.Namespace(record=str(script.folder / "records"), commit=None, second=False)
    study = script.study(args)
    study.table("t", [], "Nothing.", part="provider", times=["ratio"])
    study.table("u", FRAME, "Numbers.")
    study.finish()
    assert list(read_record(script.folder / f"records/plot_x/{CPU}.json").tables) == ["u"]


def test_a_run_without_the_telling_rows_shows_its_first_ones(place: Place) -> None:
    long = pd.DataFrame({"provider": "CUDA", "N": range(16)})
    place.record(H200, long)
    shown = place.study().table("t", long.assign(provider="CPU"), "c", rows={"provider": "CPU"})
    recorded, _, build = shown._repr_html_().partition('data-m="this-build"')
    assert 0 < recorded.count("<tr>") < 10
    assert recorded.count("<tr") == 17
    assert "ro-more" not in build


# --- claims


def claimed(study: Study, frame: pd.DataFrame = FRAME, **options):
    """A study with one table and one claim of it."""
    if "t" not in study.runs[-1].tables:
        study.table("t", frame, "c")
    options = {"sentence": "CUDA is slower.", "where": {"provider": "CUDA"}} | options
    if "value" not in options:
        options = {"test": lambda t: t["ratio"] > 1} | options
    return study.claim(options.pop("sentence"), of=options.pop("of", "t"), **options)


def marks(shown) -> list[str]:
    (found,) = re.findall('<span class="ro-verdicts">(.*?)</span>', shown._repr_html_())
    return found.split(" · ")


def test_a_sentence_stands_beside_what_every_machine_says(place: Place) -> None:
    place.record(H200)
    place.record(H100, FRAME.assign(ratio=0.5))
    place.record(OTHER, FRAME[:1])
    shown = claimed(place.study(), FRAME[:1], sentence="`CUDA` is **slower** <1>.")
    assert marks(shown) == ["H200 ✓", "H100 ✗", "this build not tested"]
    markup = shown._repr_html_()
    assert markup.startswith('<p class="ro-claim" id="claim-t-1">')
    assert "<code>CUDA</code> is <strong>slower</strong> &lt;1&gt;." in markup
    assert '<a class="ro-anchor" href="#claim-t-1"' in markup
    assert repr(shown) == "CUDA is slower <1>. (H200 ✓ · H100 ✗ · this build not tested)"


def test_a_bound_number_is_marked_and_other_machines_show_theirs(place: Place) -> None:
    place.record(H200)
    place.record(H100, FRAME.assign(ratio=0.504))
    shown = claimed(place.study(), FRAME.assign(ratio=7.0), sentence="It takes {1.16} times.",
                    value=lambda t: t["ratio"], on=H200)  # fmt: skip
    assert '<b class="ro-bound">1.16</b> times' in shown._repr_html_()
    assert marks(shown) == ["H200 ✓", "H100 0.504", "this build 7"]
    assert repr(shown).startswith("It takes 1.16 times. (")


def test_a_machine_that_gives_the_same_number_says_so(place: Place) -> None:
    place.record(H200)
    place.record(H100, FRAME.assign(ratio=1.1623))
    shown = claimed(place.study(), FRAME[:1], sentence="It takes {1.16} times.",
                    value=lambda t: t["ratio"], on=H200)  # fmt: skip
    assert marks(shown) == ["H200 ✓", "H100 the same", "this build not tested"]


def test_a_row_of_the_host_is_of_the_host(place: Place) -> None:
    place.record(H200)
    shown = claimed(place.study(), where={"provider": "CPU"}, test=lambda t: t["ratio"] < 1)
    assert marks(shown) == ["H200's host ✓", "this build ✓"]


def test_an_older_record_is_shown_as_one(place: Place) -> None:
    place.record(H200, FRAME.drop(columns="ratio"))
    shown = claimed(place.study())
    assert marks(shown) == ["H200 record outdated", "this build ✓"]


def test_a_machine_with_markup_in_its_name_is_escaped(place: Place) -> None:
    env = environment(CPU, processor="A <b> & C")
    write_record(place.folder / "records", "plot_x", {"t": FRAME}, env, parts={"t": "provider"})
    assert "<b> & C" not in claimed(place.study())._repr_html_()


def test_claims_have_names_of_their_own(place: Place) -> None:
    study = place.study()
    for _ in range(2):
        claimed(study)
    claimed(study, name="slower")
    claimed(study)
    assert [c.name for c in study.claims] == ["t-1", "t-2", "slower", "t-4"]
    with pytest.raises(ClaimError, match="plot_x: two claims of one name: got slower"):
        claimed(study, name="slower")


@pytest.mark.parametrize("options", [{"where": {"provider": "TPU"}}, {"of": "typo"}])
def test_a_claim_without_rows_anywhere_is_an_error(place: Place, options) -> None:
    place.record(H200)
    with pytest.raises(ClaimError, match=r"plot_x: claim .*-1: got no rows of .* on any machine"):
        claimed(place.study(), **options)


def test_a_column_that_no_machine_has_is_an_error(place: Place) -> None:
    place.record(H200)
    with pytest.raises(ClaimError, match=rf"(?s)plot_x: claim t-1 on {H200} cannot .*'flush'"):
        claimed(place.study(), where={"flush": "on"})


def test_a_function_that_fails_ends_any_run(script: Place) -> None:
    with pytest.raises(ClaimError, match=r"plot_x: claim t-1 on this-build cannot .*ZeroDiv"):
        claimed(script.study(), test=lambda t: 1 / 0)


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_readers_rows_without_a_value_are_not_tested(
    place: Place, monkeypatch, strict: str
) -> None:
    monkeypatch.setenv(STRICT, strict)
    place.record(H200)
    options = {"sentence": "It is {1.16} times.", "on": H200, "value": lambda t: t["ratio"]}
    frame = FRAME.assign(ratio=float("nan"))
    if strict == "1":
        with pytest.raises(ClaimError, match="claim t-1 on this-build"):
            claimed(place.study(), frame, **options)
    else:
        assert marks(claimed(place.study(), frame, **options)) == [
            "H200 ✓",
            "this build not tested",
        ]


def test_a_script_prints_the_sentence(script: Place, capsys) -> None:
    claimed(script.study())
    assert "CUDA is slower. (this build ✓)" in capsys.readouterr().out


# --- what ends a build


def test_a_record_whose_verdict_turns_ends_the_build(place: Place) -> None:
    place.record(H200)
    place.record(H100, FRAME.assign(ratio=0.5))
    study = place.study()
    claimed(study, name="slower")
    line = f"plot_x: claim slower on {H100}, 1 rows of t: its test is false"
    assert study.contradictions() == [line]
    with pytest.raises(ClaimError) as raised:
        study.finish()
    assert str(raised.value) == line


def test_a_number_that_a_record_does_not_give_ends_the_build(place: Place) -> None:
    place.record(H200)
    study = place.study()
    claimed(study, sentence="It takes {1.17} times as long.", value=lambda t: t["ratio"], on=H200)
    (line,) = study.contradictions()
    assert line == f"plot_x: claim t-1 on {H200}, 1 rows of t: 1.17 is printed and 1.16 measured"
    with pytest.raises(ClaimError, match=r"claim t-1"):
        study.finish()


def test_every_contradiction_is_named(place: Place) -> None:
    place.record(H200, FRAME.assign(ratio=0.5))
    study = place.study()
    claimed(study)
    claimed(study, name="again")
    with pytest.raises(ClaimError, match=r"(?s)claim t-1 on .*\n.*claim again on "):
        study.finish()


def test_a_build_whose_verdict_turns_goes_on(place: Place) -> None:
    place.record(H200)
    study = place.study()
    shown = claimed(study, FRAME.assign(ratio=0.5))
    assert marks(shown) == ["H200 ✓", "this build ✗"]
    assert study.contradictions() == []
    assert "This build" in study.finish()._repr_html_()


def test_a_script_shows_a_contradiction_of_a_record_and_goes_on(script: Place, capsys) -> None:
    script.record(H200, FRAME.assign(ratio=0.5))
    study = script.study()
    claimed(study)
    study.finish()
    assert f"plot_x: claim t-1 on {H200}" in capsys.readouterr().out


def test_times_of_a_build_are_not_judged(place: Place) -> None:
    place.record(H200)
    study = place.study()
    assert marks(claimed(study, FRAME.assign(ratio=0.5), timed=True))[1] == "this build not judged"
    assert marks(claimed(study, FRAME, timed=True, name="true"))[1] == "this build not judged"
    study.finish()
    place.record(H200, FRAME.assign(ratio=0.5))
    study = place.study()
    claimed(study, timed=True)
    with pytest.raises(ClaimError, match=H200):
        study.finish()


def test_quick_sizes_are_not_judged(place: Place, monkeypatch) -> None:
    monkeypatch.setenv("UNITTEST_GOING", "1")
    place.record(H200)
    study = place.study()
    slower = FRAME.assign(ratio=0.5)
    assert marks(claimed(study, slower)) == ["H200 ✓", "this build not judged"]
    study.finish()
    place.record(H200, slower)  # a record is judged, whatever the sizes of the build
    again = place.study()
    claimed(again)
    assert [line.split(",")[0] for line in again.contradictions()] == [
        f"plot_x: claim t-1 on {H200}"
    ]


@pytest.mark.parametrize(
    ("h200", "h100", "turned"),
    [(1.2, 0.5, []), (0.5, 0.5, [H200]), (1.2, 1.2, [H100]), (0.5, 1.2, [H200, H100])],
)
def test_a_published_cross_is_expected_too(place: Place, h200, h100, turned) -> None:
    place.record(H200, FRAME.assign(ratio=h200))
    place.record(H100, FRAME.assign(ratio=h100))
    study = place.study()
    claimed(study, holds=[H200])
    assert re.findall(r"on ([\w-]+),", "\n".join(study.contradictions())) == turned
    if turned == [H100]:
        assert study.contradictions()[0].endswith("true, expected false")


def test_rows_that_a_record_lacks_are_no_contradiction(place: Place) -> None:
    place.record(H200)
    place.record(H100, FRAME[:1])
    place.record(OTHER, FRAME.drop(columns="ratio"))
    study = place.study()
    claimed(study)
    assert study.contradictions() == []


# --- what is kept


def test_claims_are_kept_with_what_each_machine_says(place: Place) -> None:
    place.record(H200)
    place.record(H100, FRAME.assign(ratio=0.5))
    study = place.study()
    claimed(study, FRAME.assign(ratio=7.0), sentence="It takes about {1.2} times as long.",
            value=lambda t: t["ratio"], on=H200, name="slower")  # fmt: skip
    (kept,) = json.loads(json.dumps(study.verdicts()))
    machines = kept.pop("machines")
    assert kept.pop("said") == {
        H200: ["H200", "✓"], H100: ["H100", "0.5"], "this-build": ["this build", "7"],
    }  # fmt: skip
    assert kept == {
        "page": "plot_x", "name": "slower", "sentence": "It takes about 1.2 times as long.",
        "of": "t", "on": H200, "numbers": [{"kind": "about", "text": "1.2"}],
    }  # fmt: skip
    assert machines[H200] == {"state": "true", "values": [1.16], "rows": 1, "detail": ""}
    assert machines[H100]["state"] == "value"
    assert machines["this-build"]["values"] == [7.0]


def test_a_script_records_what_it_measured(script: Place, capsys) -> None:
    args = argparse.Namespace(size=3, record="out", commit="feed", second=False)
    study = Study("plot_x", args, records=script.folder / "none")
    study.table("t", FRAME, "c", times=["ratio"])
    study.table("u", FRAME[["N"]], "c", part="gpu")
    study.finish()
    (path,) = (script.folder / "out" / "plot_x").iterdir()
    record = read_record(path)
    assert record.parts == {"t": "provider", "u": "gpu"}
    assert record.provenance["t"].options == {"size": 3}
    assert record.commits == ["feed"]
    again = argparse.Namespace(size=3, record="out", commit="feed", second=True)
    study = Study("plot_x", again, records=script.folder / "none")
    study.table("t", FRAME.assign(ratio=[0.7, 1.2]), "c", times=["ratio"])
    study.finish()
    record = read_record(path)
    assert record.tables["t"].ratio.tolist() == [0.63, 1.16]
    assert record.second["t"].ratio.tolist() == [0.7, 1.2]
    assert "record: " in capsys.readouterr().err


def test_a_rendered_page_writes_nothing(place: Place) -> None:
    study = place.study()
    claimed(study)
    figure, _ = subplots()
    study.figure("f", figure, alt="nothing yet")
    study.svg("s", "<svg></svg>", alt="nothing")
    study.finish()
    assert list(place.folder.iterdir()) == []
    assert figure.get_label() == "nothing yet"


def test_a_chart_is_drawn_from_the_most_telling_machine_with_its_rows(place: Place) -> None:
    import matplotlib.pyplot as plt

    plt.close("all")
    place.record(H200, FRAME[:1].assign(ratio=5.0))
    place.record(H100, FRAME.assign(ratio=[3.0, 4.0]))
    study = place.study()
    study.table("t", FRAME, "c")
    study.dots("d", of="t", where={"provider": "CUDA"}, x="ratio", label="N", alt="One dot.",
               answer=True)  # fmt: skip
    study.lines("l", of="t", x="N", y="ratio", series="provider", alt="Lines.")
    answer, other = map(plt.figure, plt.get_fignums())
    assert (answer.get_gid(), other.get_gid()) == ("answer", "figure")
    assert [t.get_text() for t in answer.axes[0].texts] == ["4"]
    assert answer.texts[-1].get_text() == "H100"
    assert answer.get_label() == "One dot."
    assert other.texts[-1].get_text() == "H200's host"
    with pytest.raises(ArgumentError, match="figure e: no machine has the rows"):
        study.dots("e", of="t", where={"provider": "TPU"}, x="ratio", label="N", alt="None.")
    plt.close("all")


# --- a second process, and experiments that fail

AGAIN = """
import os
import time
from roundoff.page import Study
from roundoff.script import get_parsed_args

args = get_parsed_args("plot_x", size=3, way="slow", limit=None)
study = Study("plot_x", args)
rows = [{"size": args.size, "way": args.way, "variable": os.environ.get("SOME_VARIABLE")}]
study.table("t", rows, "What was asked for.", part="cpu")
if args.way == "waiting":
    end = time.monotonic() + 20
    while not os.path.exists("go"):
        assert time.monotonic() < end, "nobody goes on"
        time.sleep(0.01)
if args.way == "wrong":
    raise ValueError("not this way")
study.finish()
"""


@pytest.fixture
def again(script: Place, monkeypatch):
    path = script.folder / "plot_x.py"
    path.write_text(AGAIN, "utf-8")
    monkeypatch.setattr("sys.argv", [str(path)])
    args = {"record": "kept", "commit": None, "second": True, "size": 5, "way": "slow"}
    return script.study(argparse.Namespace(**args, limit=None)).again


def test_a_second_process_has_the_variables_and_the_options(again, monkeypatch) -> None:
    monkeypatch.delenv("SOME_VARIABLE", raising=False)
    tables = again({"SOME_VARIABLE": "here"}, way="quick")
    assert tables["t"].to_dict("records") == [{"size": 5, "way": "quick", "variable": "here"}]
    assert not Path("kept").exists()  # the record is the first process's


def test_a_record_says_when_each_table_was_there(again, capfd) -> None:
    """Those of a second process, too: what is left out for lack of time shows."""
    again({})
    assert re.search(r"^\[\d+ s\] table t, rows: 1$", capfd.readouterr().err, re.MULTILINE)


def test_a_second_process_that_fails_is_an_error_with_its_words(again) -> None:
    with pytest.raises(WorkerError, match="not this way"):
        again({}, way="wrong")


def test_a_second_process_that_takes_too_long_is_an_error(again, monkeypatch) -> None:
    monkeypatch.setattr("roundoff.page.study._SECOND_S", 0.01)
    with pytest.raises(WorkerError, match=r"more than 0\.01 s"):
        again({})


def test_a_second_process_runs_beside_this_one(again, script, monkeypatch) -> None:
    monkeypatch.chdir(script.folder)
    study = again.__self__
    tables = study.beside({"SOME_VARIABLE": "here"}, way="waiting")
    later = study.beside({}, False, way="wrong")
    Path("go").touch()
    assert tables()["t"]["variable"].tolist() == ["here"]
    with pytest.raises(WorkerError, match="not this way"):
        later()


@pytest.mark.parametrize("where", ["place", "notebook"])
def test_only_a_script_runs_a_second_process(where: str, request) -> None:
    with pytest.raises(UnsupportedError, match="script"):
        request.getfixturevalue(where).study().again({})


def test_an_attempt_has_the_rows_of_what_runs() -> None:
    assert attempt({"M": 1}, lambda: {"y": 2}) == [{"M": 1, "y": 2, "note": None}]
    rows = attempt({"M": 1}, lambda *of: [{"y": y} for y in of], 2, 3)
    assert rows == [{"M": 1, "y": 2, "note": None}, {"M": 1, "y": 3, "note": None}]
    assert attempt({"M": 1}, list) == []


@pytest.mark.parametrize(
    ("error", "note"),
    [(MemoryError(), "MemoryError"), (ValueError("two\n  lines"), "ValueError: two lines")],
)
def test_an_attempt_that_fails_says_why_and_the_others_go_on(error, note, capsys) -> None:
    def fails() -> None:
        raise error

    assert attempt({"M": 1}, fails) == [{"M": 1, "note": note}]
    assert type(error).__name__ in capsys.readouterr().err


def test_an_attempt_does_not_catch_an_interrupt() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt({}, interrupted)
