"""What is refused before it is measured: a record that would name a commit that did not run."""

import subprocess
from pathlib import Path

import pytest

import roundoff.environment as room
from roundoff.page.measurement import Study
from roundoff.record import read_record


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


def record(*words: str) -> None:
    made = Study("plot_x", on="machine", part="cpu")
    made.table("t")(lambda args: [{"n": 1}])
    made.main(["--record", *words])


def commit_of(folder: Path) -> str | None:
    (path,) = folder.glob("plot_x/*.json")
    return read_record(path).provenance["t"].commit


@pytest.mark.parametrize("name", ["src/roundoff/new.py", "studies/x.py"])
def test_changed_code_is_not_recorded_beside_the_other_records(
    checkout: Path, tmp_path: Path, name: str
) -> None:
    kept = tmp_path.with_name(f"{tmp_path.name}-kept")
    record(str(kept))
    assert not str(commit_of(kept)).endswith("+")
    (checkout / name).write_text("x = 1\n")
    with pytest.raises(SystemExit, match="commit them first, or keep it elsewhere with --record"):
        record()
    record(str(kept))
    assert str(commit_of(kept)).endswith("+")
    record(str(kept), "--commit", "feed")
    assert commit_of(kept) == "feed"


def test_a_record_that_lies_there_changes_no_code(checkout: Path) -> None:
    """A second run is of the first one's commit, whose record is not committed yet."""
    first = room.environment(None)["commit"]
    path = checkout / "src/roundoff/recorded/plot_x/machine.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    assert room.environment(None)["commit"] == first
