import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import ArgumentError
from roundoff.script import get_parsed_args, unit_test_going


def test_unit_test_going(monkeypatch) -> None:
    monkeypatch.delenv("UNITTEST_GOING", raising=False)
    assert not unit_test_going()
    for value, fast in (("1", True), ("True", True), ("0", False), ("", False)):
        monkeypatch.setenv("UNITTEST_GOING", value)
        assert unit_test_going() is fast
    monkeypatch.setenv("UNITTEST_GOING", "perhaps")
    with pytest.raises(ArgumentError, match="UNITTEST_GOING"):
        unit_test_going()


@settings(deadline=None)
@given(
    st.integers(), st.floats(allow_nan=False), st.booleans(), st.text(st.characters(codec="utf-8"))
)
def test_an_option_keeps_the_type_of_its_default(i: int, x: float, b: bool, text: str) -> None:
    options = {"i": (0, "an integer"), "x": 0.5, "b": False, "text": "small", "path": None}
    flag = "--b" if b else "--no-b"
    got = get_parsed_args(
        "plot_x", argv=[f"--i={i}", f"--x={x!r}", flag, f"--text=:{text}", "--path=here"], **options
    )
    assert (got.i, got.x, got.b, got.text, got.path) == (i, x, b, f":{text}", "here")


OPTIONS = {
    "repeat": 5,
    "width": (64, "columns", 1),
    "share": (0.5, "share in %", (0, 1)),
    "config": ("", "size; empty: the machine's own", {"tiny": 1, "large": 2}),
}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--repeat=many", "argument --repeat: invalid int value"),
        ("--second", "--second keeps times in a record"),
        ("--wid=3", "unrecognized arguments: --wid=3"),
        ("--width=0", "argument --width: got 0, expected 1 to inf"),
        ("--share=nan", "argument --share: got nan, expected 0 to 1"),
        ("--config=huge", "argument --config: invalid choice: 'huge'"),
    ],
)
def test_a_bad_value_ends_with_a_message_and_status_2(capsys, wrong: str, said: str) -> None:
    with pytest.raises(SystemExit) as stop:
        get_parsed_args("plot_x", argv=[wrong], **OPTIONS)
    assert stop.value.code == 2
    assert f"plot_x: error: {said}" in capsys.readouterr().err


def test_the_bounds_are_allowed_and_help_has_the_default(capsys) -> None:
    got = get_parsed_args("plot_x", argv=["--width=1", "--share=1", "--config=tiny"], **OPTIONS)
    assert (got.width, got.share, got.config) == (1, 1.0, "tiny")
    with pytest.raises(SystemExit):
        get_parsed_args("plot_x", argv=["--help"], **OPTIONS)
    assert "share in % (default: 0.5)" in " ".join(capsys.readouterr().out.split())


def test_further_texts_are_joined_to_the_help(capsys) -> None:
    options = {"size": (3, "rows,", " and columns ", 1), "kind": ("a", "one", "of", ["a", "b"])}
    assert get_parsed_args("plot_x", argv=["--size=2", "--kind=b"], **options).kind == "b"
    for wrong in ("--size=0", "--kind=c"):
        with pytest.raises(SystemExit):
            get_parsed_args("plot_x", argv=[wrong], **options)
    with pytest.raises(SystemExit):
        get_parsed_args("plot_x", argv=["--help"], **options)
    shown = " ".join(capsys.readouterr().out.split())
    assert "rows, and columns (default: 3)" in shown
    assert "one of (default: a)" in shown


def test_the_command_line_offers_what_is_exposed(capsys) -> None:
    got = get_parsed_args("plot_x", argv=["--repeat=3"], expose="repeat, config", **OPTIONS)
    assert (got.repeat, got.width, got.share, got.config) == (3, 64, 0.5, "")
    with pytest.raises(SystemExit):
        get_parsed_args("plot_x", argv=["--width=3"], expose="repeat,config", **OPTIONS)
    for every in (None, ""):
        assert get_parsed_args("plot_x", argv=["--width=3"], expose=every, **OPTIONS).width == 3
    for wrong in ("nothing", "repeat,nothing", 3, ["repeat"]):
        with pytest.raises(ArgumentError, match="expose"):
            get_parsed_args("plot_x", argv=[], expose=wrong, **OPTIONS)


def test_a_notebook_ignores_the_command_line(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher", "-f", "kernel.json"])
    monkeypatch.setattr("builtins.__IPYTHON__", True, raising=False)
    assert get_parsed_args("plot_x", config="small").config == "small"


def test_import_is_quick_and_light() -> None:
    code = (
        # Processor time: what a machine of its own would take, whoever else is busy here.
        "import sys, time; t = time.process_time(); import roundoff; d = time.process_time() - t;"
        "heavy = {'torch', 'matplotlib', 'pandas', 'onnx', 'numpy'} & set(sys.modules);"
        "print(d, heavy); sys.exit(d > 0.2 or bool(heavy))"
    )
    source = {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | source)
