"""When pages run again, and what stops a build: on a small gallery with the real configuration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, Site

sys.path.insert(0, str(ROOT / "conf"))
import hooks

PAGE = '''"""
.. _page-{name}:

Page {name}
===========

What the page shows.
"""

import os
from pathlib import Path

import matplotlib.pyplot as plt

with Path(os.environ["RUNS"]).open("a") as file:
    file.write("{name} ")

# %%
# A figure
# --------
fig, ax = plt.subplots()
ax.plot([0, 1])
fig.set_label("One line that rises from the left to the right.")
'''


class Counted(Site):
    """Three pages that note when they run."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, {f"plot_{name}": PAGE.format(name=name) for name in "abc"})
        self.log = root / "runs"
        self.env["RUNS"] = str(self.log)

    def ran(self) -> str:
        """Build, page by page as ``make html`` does, and say which pages ran."""
        self.log.write_text("")
        self.status, self.said = self.build(fast=False)
        return "".join(sorted(self.log.read_text().split()))


def test_what_changed_runs_and_what_is_wrong_fails_the_build(tmp_path: Path) -> None:
    site = Counted(tmp_path)
    assert (site.ran(), site.status) == ("abc", 0), site.said
    _, raises, wordless = site.pages.values()
    raises.write_text(raises.read_text() + "\nraise ArithmeticError('bits')\n")
    wordless.write_text(wordless.read_text().replace("fig.set_label(", "str("))
    assert site.ran() == "bc"
    assert site.status != 0
    for expected in ("plot_b.py", "ArithmeticError: bits", "Traceback", "a figure without a text"):
        assert expected in site.said


def test_what_pages_show_depends_on_library_mode_versions_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "RECORDED", tmp_path)
    monkeypatch.setenv("UNITTEST_GOING", "1")
    found = [hooks.stamp()]
    assert hooks.stamp() == found[0]
    (tmp_path / "plot_b").mkdir()
    (tmp_path / "plot_b" / "machine.json").write_text("{}")
    found.append(hooks.stamp())
    monkeypatch.setattr(hooks.roundoff, "__file__", str(tmp_path / "__init__.py"))
    found.append(hooks.stamp())
    monkeypatch.setenv("UNITTEST_GOING", "0")
    found.append(hooks.stamp())
    monkeypatch.setattr(hooks.importlib.metadata, "distributions", list)
    found.append(hooks.stamp())
    assert len(set(found)) == 5


FORKS = """
import gc, os
import hooks

class Owner:
    def __del__(self):
        os.write(1, b"parent " if os.getpid() == parent else b"child ")

parent = os.getpid()
hooks.spare_forks()
owner = Owner()
owner.me = owner
del owner
if (child := os.fork()) == 0:
    gc.collect()
    os._exit(0)
os.waitpid(child, 0)
gc.collect()
"""


def test_a_fork_does_not_collect_what_a_page_has_left() -> None:
    """A session of ONNX Runtime that ends in a forked process would wait for ever."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "conf")}
    command = [sys.executable, "-c", FORKS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["parent"]


@pytest.mark.slow(reason="conf/ alone decides what is left of a build that was killed")
def test_an_interrupted_build_leaves_nothing_wrong(tmp_path: Path) -> None:
    site = Counted(tmp_path)
    assert site.ran() == "abc"
    gallery = site.root / "docs" / "gallery"
    (gallery / "running").touch()
    # A page has the mark of having run, and not what comes after it; another is half written.
    (gallery / "numerics" / "plot_a.zip").unlink()
    html = site.html("plot_b")
    html.write_text("<html>")
    assert site.ran() == "a"
    assert "<h1>Page b" in html.read_text()
    assert site.ran() == ""
