"""What is refused before it is measured: a record that would name a commit that did not run."""

import argparse
import subprocess
from pathlib import Path

import pytest

import roundoff.environment as room
from roundoff.page import Study


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch) -> Path:
    """A clean clone of something that is laid out as roundoff is, which this process runs from."""
    for name in ("src/roundoff/environment.py", "gallery/numerics/plot_x.py", "studies/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(room, "__file__", str(tmp_path / "src/roundoff/environment.py"))
    return tmp_path


def study(folder: str = "", commit: str | None = None) -> Study:
    return Study("plot_x", argparse.Namespace(record=folder, commit=commit, second=False))


@pytest.mark.parametrize(
    "name", ["src/roundoff/new.py", "gallery/numerics/plot_x.py", "studies/x.py"]
)
def test_changed_code_is_not_recorded_beside_the_other_records(
    checkout: Path, capsys, name: str
) -> None:
    assert not study().environment["commit"].endswith("+")
    (checkout / name).write_text("x = 1\n")
    with pytest.raises(SystemExit) as stop:
        study()
    assert stop.value.code == 2
    assert "commit them first, or keep it elsewhere with --record FOLDER" in capsys.readouterr().err
    assert study("out").environment["commit"].endswith("+")
    assert study(commit="feed").environment["commit"] == "feed"


def test_the_second_run_is_of_the_first_ones_commit(checkout: Path) -> None:
    """The first run's record lies there, not committed."""
    first = study().environment["commit"]
    record = checkout / "src/roundoff/recorded/plot_x/machine.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    assert study().environment["commit"] == first
