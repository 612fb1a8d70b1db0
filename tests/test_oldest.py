"""The oldest versions are the lower bounds; the newest are newer than the pins."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def versions(lines: list[str], operator: str) -> dict[str, str]:
    """Name -> the one version that stands behind *operator*."""
    requirements = [Requirement(line) for line in lines]
    return {
        r.name: ", ".join(s.version for s in r.specifier if s.operator == operator)
        for r in requirements
    }


def pins(name: str) -> list[str]:
    text = (ROOT / name).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    assert versions(pins("constraints-oldest.txt"), "==") == versions(
        project["dependencies"] + extras, ">="
    )


def test_the_newest_versions_are_newer_than_the_pins() -> None:
    pinned = versions(pins("constraints.txt"), "==")
    for name, version in versions(pins("constraints-newest.txt"), "==").items():
        assert Version(version) > Version(pinned[name]), name
