"""When pages run again, and what stops a build: on a small gallery with the real configuration."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import ROOT, sphinx

sys.path.insert(0, str(ROOT / "conf"))
import hooks

PAGE = '''"""
.. _page-{name}:

Page {name}
===========

What the page shows.
"""

import os
import time
from pathlib import Path

from roundoff.page import subplots

with Path(os.environ["RUNS"]).open("a") as file:
    file.write("{name} ")

# %%
# A figure
# --------
fig, ax = subplots()
ax.plot([0, 1])
fig.set_label("One line that rises from the left to the right.")
time.sleep(float(os.environ.get("PAUSE", "0")))
'''
INDEX = """
Home
====

.. toctree::

   gallery/numerics/index
"""
HEADER = "Numerics\n========\n\nWords.\n"


class Site:
    """A gallery of two pages in a folder of its own, with its own copy of the library."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(ROOT / "conf", root / "conf", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
        (root / "docs").mkdir()
        (root / "docs" / "index.rst").write_text(INDEX)
        section = root / "gallery" / "numerics"
        section.mkdir(parents=True)
        (root / "gallery" / "GALLERY_HEADER.rst").write_text(HEADER)
        (section / "GALLERY_HEADER.rst").write_text(HEADER)
        self.pages = {name: section / f"plot_{name}.py" for name in ("a", "b")}
        for name, path in self.pages.items():
            path.write_text(PAGE.format(name=name))
        self.log = root / "runs"
        self.env = {"PYTHONPATH": str(root / "src"), "RUNS": str(self.log)}

    def build(self, *options: str, **kwargs) -> subprocess.CompletedProcess:
        self.log.write_text("")
        return sphinx(self.root, *options, **(self.env | kwargs))

    def ran(self, **kwargs) -> str:
        """Build, and say which pages ran."""
        done = self.build(**kwargs)
        assert done.returncode == 0, done.stdout + done.stderr
        return "".join(sorted(self.log.read_text().split()))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = Site(tmp_path_factory.mktemp("site"))
    assert site.ran() == "ab"
    return site


@pytest.fixture
def site(built: Site, tmp_path: Path) -> Site:
    """A built site that a test may break."""
    copy = Site.__new__(Site)
    copy.root = tmp_path / "site"
    shutil.copytree(built.root, copy.root)
    copy.pages = {n: copy.root / "gallery" / "numerics" / p.name for n, p in built.pages.items()}
    copy.log = copy.root / "runs"
    copy.env = {"PYTHONPATH": str(copy.root / "src"), "RUNS": str(copy.log)}
    return copy


def test_pages_run_when_what_they_show_may_have_changed(site: Site) -> None:
    # Processor time: what a machine of its own would take, whoever else is busy here.
    before = os.times()
    assert site.ran() == ""  # in another folder, so that all is read again
    after = os.times()
    spent = after.children_user + after.children_system
    assert spent - before.children_user - before.children_system < 10
    (updated,) = re.findall(r"\d+ added, \d+ changed, \d+ removed", site.build().stdout)
    assert updated == "0 added, 0 changed, 0 removed"
    site.pages["b"].write_text(site.pages["b"].read_text() + "\nx = 1\n")
    assert site.ran() == "b"
    library = site.root / "src" / "roundoff" / "errors.py"
    library.write_text(library.read_text() + "\n# another line\n")
    assert site.ran() == "ab"


@pytest.mark.slow(reason="five builds of a small site; conf/ alone decides it")
def test_a_new_record_runs_the_page_that_shows_it(site: Site) -> None:
    """And no other one: the machines of ten pages are recorded one by one."""
    assert site.ran() == ""
    records = site.root / "src" / "roundoff" / "recorded"
    data = json.loads(next(records.glob("*/*.json")).read_text("utf-8"))
    for page, runs in (("plot_b", "b"), ("plot_of_no_page", "")):
        record = records / page / f"{data['machine']}.json"
        record.parent.mkdir()
        record.write_text(json.dumps(data | {"page": page}))
        assert site.ran() == runs
        assert site.ran() == ""


@pytest.mark.slow(reason="conf/ alone decides it")
def test_a_full_build_runs_what_a_quick_one_did(site: Site) -> None:
    assert site.ran(fast=False) == "ab"
    assert site.ran(fast=False) == ""


@pytest.mark.slow(reason="conf/ alone decides it; what a changed module runs again is tried above")
def test_another_version_of_a_package_runs_all_pages(site: Site) -> None:
    """A distribution that appears on the path is what a changed pin looks like."""
    (site.root / "src" / "another-2.0.dist-info").mkdir()
    (site.root / "src" / "another-2.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: another\nVersion: 2.0\n"
    )
    assert site.ran() == "ab"


FORKS = """
import gc, os, sys
import hooks

class Owner:
    def __del__(self):
        os.write(1, b"parent " if os.getpid() == parent else b"child ")

parent = os.getpid()
if sys.argv[1] == "spared":
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


@pytest.mark.parametrize(("spared", "by"), [("spared", ["parent"]), ("", ["child", "parent"])])
def test_a_fork_does_not_collect_what_a_page_has_left(spared: str, by: list[str]) -> None:
    """A session of ONNX Runtime that ends in a forked process would wait for ever."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "conf")}
    command = [sys.executable, "-c", FORKS, spared]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == by


def test_the_pages_that_start_first_are_there() -> None:
    assert all(list(ROOT.glob(f"gallery/*/{name}.py")) for name in hooks.LONGEST)
    pages = sorted(ROOT.glob("gallery/*/*.py"), key=hooks._longest_first)
    assert [page.stem for page in pages[: len(hooks.LONGEST)]] == list(hooks.LONGEST)


def test_a_page_that_raises_and_a_figure_without_words_fail_the_build(site: Site) -> None:
    raises, wordless = site.pages["a"], site.pages["b"]
    raises.write_text(raises.read_text() + "\nraise ArithmeticError('bits')\n")
    wordless.write_text(wordless.read_text().replace("fig.set_label(", "str("))
    done = site.build()
    assert done.returncode != 0
    shown = done.stdout + done.stderr
    for expected in ("plot_a.py", "ArithmeticError: bits", "Traceback", "a figure without a text"):
        assert expected in shown


@pytest.mark.slow(reason="Sphinx sees it; what conf/ sees is tried below")
def test_a_link_to_a_missing_label_fails_the_build(site: Site) -> None:
    page = site.pages["a"]
    page.write_text(page.read_text().replace("What the page", "See :ref:`nowhere`. What the page"))
    done = site.build()
    assert done.returncode != 0
    assert "nowhere" in done.stderr


@pytest.mark.slow(reason="conf/ alone decides what is left of a build that was killed")
@pytest.mark.parametrize("moment", ["a page runs", "a page was written by half"])
def test_an_interrupted_build_leaves_nothing_wrong(site: Site, moment: str) -> None:
    for page in site.pages.values():
        page.write_text(page.read_text() + "\nx = 1\n")
    site.log.write_text("")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-c",
            "conf",
            "-d",
            "build/doctrees",
            "docs",
            "build/html",
        ],
        cwd=site.root,
        env=os.environ | {"UNITTEST_GOING": "0", "PAUSE": "30"} | site.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not site.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    html = site.root / "build" / "html" / "gallery" / "numerics" / "plot_a.html"
    if moment == "a page was written by half":
        html.write_text("<html>")
        # The script's mark is there, what comes after it is not.
        copied = site.root / "docs" / "gallery" / "numerics" / "plot_a.py"
        copied.with_suffix(".py.md5").write_text(
            hashlib.md5(copied.read_text().encode()).hexdigest()
        )
    assert site.ran(fast=False) == "ab"
    assert "x = " in site.pages["a"].read_text()
    assert "<h1>Page a" in html.read_text()
    assert (html.parent.parent.parent / "_images").is_dir()
