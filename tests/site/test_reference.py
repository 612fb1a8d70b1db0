"""The reference leads with the names to start with, and has what the pages use."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import roundoff

from .conftest import ROOT

API = (ROOT / "docs" / "api.rst").read_text("utf-8")
LISTED = re.findall(r"^   (roundoff\.\S+)$", API, re.M)
#: Rooms whose code pages show, and that of the records.
SHOWN = {"roundoff.record"} | {f"roundoff.kernels.{r}" for r in ("lessons", "ahead", "baselines")}


def test_the_reference_leads_with_the_names_that_can_be_had_from_the_top() -> None:
    first = re.findall(r"^   (roundoff\.\S+)$", API[: API.index("Types of elements")], re.M)
    assert {name.rpartition(".")[2] for name in first} == set(roundoff.ROOMS)
    assert {name.split(".")[1] for name in first} == set(roundoff.ROOMS.values())


def test_a_name_is_listed_once_and_is_its_rooms_own() -> None:
    assert len(LISTED) == len(set(LISTED))
    for name in LISTED:
        room, _, short = name.rpartition(".")
        assert short in importlib.import_module(room).__all__, name


@pytest.mark.parametrize(
    "page", sorted((ROOT / "gallery").rglob("plot_*.py")), ids=lambda p: p.stem
)
def test_the_reference_has_what_a_page_uses(page: Path) -> None:
    used = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(page.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("roundoff")
        for alias in node.names
        if not alias.name.isupper()  # a constant
    }
    missing = {n for n in used - set(LISTED) - SHOWN if n.rpartition(".")[0] not in SHOWN}
    assert not missing
