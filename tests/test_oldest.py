"""``constraints-oldest.txt`` names the lower bounds of ``pyproject.toml``, no more and no fewer."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def versions(lines: list[str], operator: str) -> dict[str, str]:
    """Name -> the one version that stands behind *operator*."""
    requirements = [Requirement(line) for line in lines]
    return {
        r.name: ", ".join(s.version for s in r.specifier if s.operator == operator)
        for r in requirements
    }


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    text = (ROOT / "constraints-oldest.txt").read_text()
    pins = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert versions(pins, "==") == versions(project["dependencies"] + extras, ">=")
