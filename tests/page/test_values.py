"""What a value means: which number of which rows, its interval, its word, its test, its record."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from roundoff.page.measurement import Study
from roundoff.page.values import UNDECIDED, Value
from roundoff.record import RECORDED, read_record, write_record

from ..paths.pages import PAGES, study_of

ROWS = pd.DataFrame(
    {
        "way": ["np.sum", "float64"],
        "provider": ["CPU", "CPU"],
        "results": [27, 1],
        "ratio": [1.0, 2.3],
        "low": [1.0, 2.2],
        "high": [1.0, 2.4],
    }
)
COMPARED: dict[str, Any] = {"interval": ("low", "high"), "words": ("faster", "slower")}


def value(statistic: Any = "results", **options: Any) -> Value:
    options = {"where": {"way": "np.sum"}} | options
    if not options.keys() & {"test", "words"}:
        options["test"] = lambda v: v.value > 1
    return Value("v", "a number", "t", statistic, **options)


def test_a_value_is_a_number_of_chosen_rows_with_its_verdict() -> None:
    assert value().judge([{"t": ROWS}]) == {"value": 27.0, "test": True}
    assert value(where={"way": "float64"}).judge([{"t": ROWS}]) == {"value": 1.0, "test": False}
    both = value(lambda t: t["results"].sum(), where={})
    assert both.judge([{"t": ROWS}])["value"] == 28
    assert value().judge([{"u": ROWS}]) is None
    assert value(where={"way": ["np.sum", "binned"]}).judge([{"t": ROWS}]) is None


@pytest.mark.parametrize("statistic", ["results", lambda table: float("nan")])
def test_what_gives_no_number_is_refused(statistic: Any) -> None:
    with pytest.raises(ValueError, match="no single finite number"):
        value(statistic, where={}).measure({"t": ROWS})


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(2.2, 2.4, "slower"), (0.7, 0.9, "faster"), (1.0, 1.1, UNDECIDED)],
)
def test_the_word_of_a_comparison_comes_from_its_interval(
    low: float, high: float, word: str
) -> None:
    rows = ROWS.assign(low=low, high=high)
    found = value("ratio", where={"way": "float64"}, **COMPARED).judge([{"t": rows}])
    assert found["word"] == word
    assert found["test"] == (word != UNDECIDED)
    assert (found["low"], found["high"]) == (low, high)


def test_two_runs_must_agree() -> None:
    compared = value("ratio", where={"way": "float64"}, **COMPARED)
    other = {"t": ROWS.assign(ratio=0.8, low=0.7, high=0.9)}
    found = compared.judge([{"t": ROWS}, other])
    assert found["word"] == UNDECIDED
    assert not found["test"]
    assert found["second"] == {"value": 0.8, "low": 0.7, "high": 0.9}
    assert not value(test=lambda v: v.value < 100).judge(
        [{"t": ROWS}, {"t": ROWS.assign(results=200)}]
    )["test"]


# --- a study, its command line and its record

ENV = dict.fromkeys(["gpu", "os", "python"]) | {"processor": "Some CPU", "cores": 2, "versions": {}}
KEPT = Path("kept", "plot_x", "some-2-cores.json")


def study(rows: Callable[[Any], Any] = lambda args: ROWS) -> Study:
    made = Study("plot_x", "Sums.", on="some-2-cores", part="cpu", length=(8, "values", 1))
    made.table("t", times=["ratio", "low", "high"])(rows)
    made.table("u")(lambda args: [{"length": args.length}])
    chosen = {"way": "np.sum"}
    made.value("results", "of np.sum", "t", "results", where=chosen, test=lambda v: v.value > 1)
    made.value("time", "time", "t", "ratio", where={"way": "float64"}, **COMPARED)
    return made


def again(args: Any) -> pd.DataFrame:
    """What a second run measures."""
    return ROWS.assign(ratio=2.31, low=2.25, high=2.35)


def refuse(args: Any) -> None:
    raise AssertionError("measured")


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A machine of a known name and commit."""
    env = ENV | {"commit": "feed"}
    monkeypatch.setattr("roundoff.page.measurement.environment", lambda commit: env)
    monkeypatch.chdir(tmp_path)
    return env


def test_a_record_keeps_the_values_and_a_second_run(steady: dict) -> None:
    for rows, *second in ((lambda args: ROWS,), (again, "--second")):
        made = study(rows)
        for name in "results", "ratio":
            most = lambda t, name=name: t[name].max()  # noqa: E731
            made.value(f"most.{name}", "largest", "t", most, test=lambda v: v.value > 1)
        made.main(["--record", "kept", *second])
    values = read_record(KEPT).values
    assert values["results"] == {
        "about": "of np.sum",
        "of": "t",
        "part": "cpu",
        "on": "some-2-cores",
        "value": 27.0,
        "test": True,
    }
    time = values["time"]
    assert (time["value"], time["second"]["value"], time["word"]) == (2.3, 2.31, "slower")
    # A column that was not measured again is no second run.
    assert "second" not in values["most.results"]
    assert values["most.ratio"]["second"] == {"value": 2.31}


def test_values_are_evaluated_again_without_measuring(steady: dict) -> None:
    study().main(["--record", "kept"])
    before = json.loads(KEPT.read_text("utf-8"))
    other = study(refuse)
    other.value("both", "sum", "t", lambda t: t["results"].sum(), test=lambda v: v.value == 28)
    other.main(["--values", "--record", "kept"])
    after = json.loads(KEPT.read_text("utf-8"))
    assert after.pop("values").keys() == {"results", "time", "both"}
    assert after == {name: before[name] for name in after}


def test_one_table_is_measured_alone_and_the_values_follow(steady: dict) -> None:
    study().main(["--record", "kept"])
    for only, results in (("u", 27), ("t", 5)):
        study(lambda args: ROWS.assign(results=5)).main(["--record", "kept", "--only", only])
        assert read_record(KEPT).values["results"]["value"] == results
    write_record("kept", "plot_x", {"t": ROWS}, steady)  # whoever writes without a study
    assert read_record(KEPT).values == {}


@pytest.mark.parametrize(
    ("words", "commit", "said"),
    [
        (["--record", "kept", "--second", "--only", "u"], "feed", "there is none"),
        (["--record", "kept", "--second"], "beef", "{'feed'}"),
        (["--record", "new", "--second"], "feed", "there is none"),
        (["--record", str(KEPT)], "feed", "--record: expected a folder to write"),
        (["--only", "nothing"], "feed", "--only: got {'nothing'}, expected some of"),
    ],
)
def test_what_cannot_be_kept_is_not_measured(
    steady: dict, words: list[str], commit: str, said: str
) -> None:
    study().main(["--record", "kept"])
    steady["commit"] = commit
    with pytest.raises(SystemExit, match=said):
        study(refuse).main(words)


def test_values_are_printed(steady: dict, capsys: pytest.CaptureFixture) -> None:
    study().main([])
    assert "results = 27, of np.sum" in capsys.readouterr().out


# --- the studies of this project

STUDIES = [page.removeprefix("plot_") for page in PAGES]


@pytest.mark.parametrize("name", STUDIES)
def test_the_records_hold_what_the_study_says_of_them(name: str) -> None:
    made: Study = study_of(name)["study"]
    assert made.page == f"plot_{name}"
    paths = list((RECORDED / made.page).glob("*.json"))
    assert paths
    for path in paths:
        record = read_record(path)
        stale = f"{path.name}: python studies/{name}.py --values writes what the study says now"
        assert made.evaluate(record) == record.values, stale
    printed = read_record(RECORDED / made.page / f"{made.on}.json").values
    assert printed.keys() == {value.name for value in made.values if value.on == made.on}
