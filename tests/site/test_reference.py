"""The reference names every public function and class of the library, and nothing that is gone."""

import importlib
import inspect
import re

import pytest

from .conftest import ROOT

LIBRARY = ROOT / "src" / "roundoff"
ROOMS = sorted(
    p.stem if p.suffix == ".py" else p.name
    for p in LIBRARY.iterdir()
    if (p.suffix == ".py" or (p / "__init__.py").exists()) and not p.stem.startswith("__")
)
LISTED = set(re.findall(r"^   (roundoff\.\S+)$", (ROOT / "docs" / "api.rst").read_text(), re.M))


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_in_the_reference(room: str) -> None:
    module = importlib.import_module(f"roundoff.{room}")
    public = {
        f"roundoff.{room}.{name}"
        for name in getattr(module, "__all__", [])
        if inspect.isclass(getattr(module, name)) or inspect.isroutine(getattr(module, name))
        # A name that another room defines is listed there.
        if getattr(module, name).__module__.startswith(f"roundoff.{room}")
    }
    assert public <= LISTED, f"missing from docs/api.rst: {sorted(public - LISTED)}"
    wordless = [n for n in public if not inspect.getdoc(getattr(module, n.rsplit(".", 1)[1]))]
    assert not wordless, f"without a docstring: {wordless}"


def test_the_reference_lists_only_what_there_is() -> None:
    for name in LISTED:
        module, attribute = name.rsplit(".", 1)
        assert hasattr(importlib.import_module(module), attribute), name
