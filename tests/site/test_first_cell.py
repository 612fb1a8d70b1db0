"""The first cell of a notebook installs roundoff where it is missing, or says how to get it."""

import importlib.util
import sys

import pytest

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "conf"))
from notebooks import FIRST_CELL, LOCAL, WHEEL


class Notebook:
    """Where a cell runs: what pip was asked for, and whether it brings roundoff."""

    def __init__(self, monkeypatch, *, pip_works: bool) -> None:
        self.asked: list[str] = []
        self.installed = False
        self.works = pip_works
        there = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name: None if name == "roundoff" and not self.installed else there(name),
        )

    def pip(self, line: str) -> None:
        self.asked.append(line)
        self.installed = self.works

    def run(self) -> None:
        cell = FIRST_CELL.format(site=LOCAL, wheel=WHEEL)
        names: dict = {"pip": self.pip}
        # What IPython makes of a line magic, braces included.
        exec(cell.replace('%pip install --quiet "', 'pip(f"').replace('whl"', 'whl")'), names)


def test_a_site_that_answers_installs_it(monkeypatch) -> None:
    notebook = Notebook(monkeypatch, pip_works=True)
    notebook.run()
    notebook.run()
    (line,) = notebook.asked  # then it is there
    assert line.startswith("roundoff[")
    assert line.endswith(f"] @ {LOCAL}wheels/{WHEEL}")


def test_a_site_that_does_not_answer_is_named_with_what_to_do(monkeypatch) -> None:
    monkeypatch.setenv("ROUNDOFF_SITE", "http://127.0.0.1:9/")
    with pytest.raises(ModuleNotFoundError, match=r"from http://127.0.0.1:9\. .* run make serve"):
        Notebook(monkeypatch, pip_works=False).run()
