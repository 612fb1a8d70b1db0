"""The names that scripts import from the package itself."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import roundoff

REFERENCE = Path(__file__).parents[1] / "docs" / "api.rst"
LISTED = re.findall(r"^   (roundoff\.[\w.]+)$", REFERENCE.read_text("utf-8"), re.MULTILINE)


def test_every_public_name_is_there_and_is_the_rooms_own() -> None:
    for name in roundoff.__all__:
        assert getattr(roundoff, name) is not None
    assert roundoff.max_diff.__module__.startswith("roundoff.compare")
    assert set(dir(roundoff)) == set(roundoff.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(roundoff, "nothing")


@pytest.mark.parametrize("name", LISTED)
def test_every_name_of_the_reference_has_a_summary_and_an_example(name: str) -> None:
    room, _, short = name.rpartition(".")
    if room.startswith("roundoff.kernels"):
        pytest.importorskip("triton")
    text = inspect.getdoc(getattr(importlib.import_module(room), short)) or ""
    assert text.partition("\n")[0].endswith((".", ":")), "no summary of one line"
    assert ">>>" in text, "no example"
    # Sphinx would take ``a, b : int`` for an attribute b of type "a,".
    attributes = text.partition("Attributes\n----------\n")[2].partition("\n---")[0]
    assert not re.findall(r"^\w+(?:, \w+)+ : .*", attributes, re.MULTILINE)
