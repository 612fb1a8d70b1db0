"""The first cell of a notebook installs roundoff where it is missing, or says how to get it."""

import importlib.util
import sys

import pytest

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "conf"))
from notebooks import FIRST_CELL, LOCAL, WHEEL


def test_a_site_that_does_not_answer_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``make test-notebooks`` runs it where the site answers."""
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "roundoff" else there(name)
    )
    monkeypatch.setenv("ROUNDOFF_SITE", "http://127.0.0.1:9/")
    cell = FIRST_CELL.format(site=LOCAL, wheel=WHEEL)
    # What IPython makes of a line magic, braces included.
    code = cell.replace('%pip install --quiet "', 'asked.append(f"').replace('whl"', 'whl")')
    asked: list[str] = []
    with pytest.raises(ModuleNotFoundError, match=r"from http://127.0.0.1:9\. .* run make serve"):
        exec(code, {"asked": asked})
    (line,) = asked
    assert line.startswith("roundoff[")
    assert line.endswith(f"] @ http://127.0.0.1:9/wheels/{WHEEL}")
