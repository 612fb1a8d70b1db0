"""What the pages on installing and citing say agrees with the package and its records."""

import re

import roundoff
from roundoff.record import RECORDED, read_record

from .conftest import ROOT

INSTALL = (ROOT / "docs" / "install.rst").read_text("utf-8")


def agree(run: tuple[str | None, ...], row: tuple[str, ...]) -> bool:
    """Whether a row names what a run had; None is what it had not."""
    return all(had in (None, named) for had, named in zip(run, row, strict=True))


def test_the_versions_known_to_work_are_those_of_the_records() -> None:
    rows = [re.findall(r"- (.+)", row) for row in re.split(r"\n   \* ", INSTALL)]
    known = {tuple(cell.split(" (")[0] for cell in row) for row in rows if len(row) == 7}
    recorded = set()
    for path in RECORDED.glob("*/*.json"):
        for run in read_record(path).provenance.values():
            env, versions = run.environment, run.environment["versions"]
            if gpu := env.get("gpu"):
                names = [versions[name] for name in ("torch", "triton", "onnxruntime-gpu")]
                recorded.add((gpu["name"], gpu["driver"], gpu["cuda"], env["python"], *names))
    rows = {row for row in known if row[0] != "GPU"}
    assert rows
    # Not each record has a row here: the page on recorded machines lists them all.
    assert not [row for row in rows if not any(agree(run, row) for run in recorded)]


def test_the_citation_is_of_this_version() -> None:
    for name in "CITATION.cff", "docs/cite.rst":
        assert roundoff.__version__ in (ROOT / name).read_text("utf-8")
