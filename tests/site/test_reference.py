"""The reference leads with the names to start with, and has what the pages use, with examples."""

import importlib
import inspect
import re

import pytest

import roundoff

from ..paths.pages import PAGES, imported
from .conftest import ROOT

API = (ROOT / "docs" / "api.rst").read_text("utf-8")
LISTED = re.findall(r"^   (roundoff\.\S+)$", API, re.M)
#: Rooms whose code pages show, and that of the records.
SHOWN = {"roundoff.record"} | {f"roundoff.kernels.{r}" for r in ("lessons", "ahead", "baselines")}


def test_the_reference_leads_with_the_names_that_can_be_had_from_the_top() -> None:
    first = re.findall(r"^   (roundoff\.\S+)$", API[: API.index("Types of elements")], re.M)
    assert {name.rpartition(".")[2] for name in first} == set(roundoff.ROOMS)
    assert {name.split(".")[1] for name in first} == set(roundoff.ROOMS.values())


@pytest.mark.parametrize("name", LISTED)
def test_a_name_is_listed_once_with_a_summary_and_an_example(name: str) -> None:
    assert LISTED.count(name) == 1
    room, _, short = name.rpartition(".")
    if room.startswith("roundoff.kernels"):
        pytest.importorskip("triton")
    module = importlib.import_module(room)
    assert short in module.__all__
    text = inspect.getdoc(getattr(module, short)) or ""
    assert text.partition("\n")[0].endswith((".", ":")), "no summary of one line"
    assert ">>>" in text, "no example"


@pytest.mark.parametrize("page", PAGES)
def test_the_reference_has_what_a_page_uses(page: str) -> None:
    used = {name for name in imported(page) if not name.rpartition(".")[2].isupper()}
    assert not {n for n in used - set(LISTED) - SHOWN if n.rpartition(".")[0] not in SHOWN}
