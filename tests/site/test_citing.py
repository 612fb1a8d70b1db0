"""What the pages on installing and citing say agrees with the package and its records."""

import re

import roundoff
from roundoff.record import RECORDED, read_record

from .conftest import ROOT

INSTALL = (ROOT / "docs" / "install.rst").read_text("utf-8")


def test_the_versions_known_to_work_are_those_of_the_records() -> None:
    recorded = set()
    for path in RECORDED.glob("*/*.json"):
        for run in read_record(path).provenance.values():
            if gpu := run.environment.get("gpu"):
                versions = [*run.environment["versions"].values(), run.environment["python"]]
                recorded |= {(gpu["name"], had) for had in (*versions, gpu["driver"], gpu["cuda"])}
    rows = [re.findall(r"- (.+)", row) for row in re.split(r"\n   \* ", INSTALL)]
    _, *known = ([cell.split(" (")[0] for cell in row] for row in rows if len(row) == 7)
    assert known
    for gpu, *had in known:
        assert {(gpu, version) for version in had} <= recorded


def test_the_citation_is_of_this_version() -> None:
    for name in "CITATION.cff", "docs/cite.rst":
        assert roundoff.__version__ in (ROOT / name).read_text("utf-8")
