"""The fast site, built once for all of these tests, and a browser to look at it with.

``tests/paths/test_stories.py`` runs every page. Without the slow tests the site runs two
pages alone, and shows the others as they are written.
"""

import fcntl
import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Kept between runs: what has not changed does not run again.
SITE = ROOT / "build" / "test-site"
REQUIRED = os.environ.get("ROUNDOFF_BROWSER") == "required"
PAGES = "plot_reduction_order,plot_gemm_fusion"
COMMAND = [sys.executable, "-m", "sphinx", "-c", "conf", "-d", "build/doctrees"]


def sphinx(root: Path, *options: str, fast: bool = True, **env: str) -> subprocess.CompletedProcess:
    """Run the build of the site under *root* as the Makefile does."""
    # A machine may ask for colours (FORCE_COLOR): the tests read what is printed.
    command = [*COMMAND, "--no-color", "--fail-on-warning", "--keep-going"]
    command += [*options, "docs", "build/html"]
    return subprocess.run(
        command,
        cwd=root,
        env=os.environ | {"UNITTEST_GOING": "1" if fast else "0"} | env,
        capture_output=True,
        text=True,
        check=False,
    )


class Site:
    """A gallery of some pages with the real configuration, and its own copy of the library.

    Nothing is recorded there.
    """

    def __init__(self, root: Path, pages: dict[str, str], home: str = "") -> None:
        self.root, section = root, root / "gallery" / "numerics"
        section.mkdir(parents=True)
        for folder in (section, section.parent):
            (folder / "GALLERY_HEADER.rst").write_text("Numerics\n========\n\nWords.\n")
        ignored = shutil.ignore_patterns("__pycache__", "recorded")
        for name in ("conf", "src"):
            shutil.copytree(ROOT / name, root / name, ignore=ignored)
        (root / "docs").mkdir()
        tree = ".. toctree::\n\n   gallery/numerics/index\n"
        (root / "docs" / "index.rst").write_text(f"Home\n====\n\n{home}\n\n{tree}")
        self.pages = {name: section / f"{name}.py" for name in pages}
        for name, text in pages.items():
            self.pages[name].write_text(text)
        self.env = {"PYTHONPATH": str(root / "src")}

    def build(self, *options: str, **kwargs: Any) -> tuple[int, str]:
        """Its status, and what it says."""
        done = sphinx(self.root, *options, **(self.env | kwargs))
        return done.returncode, done.stdout + done.stderr

    def html(self, name: str) -> Path:
        """The built page."""
        return self.root / "build" / "html" / "gallery" / "numerics" / f"{name}.html"


def running(config: pytest.Config) -> str:
    """The option of the build that says which pages run: those that PAGE names, some, or all."""
    names = os.environ.get("PAGE") or (PAGES if "not slow" in config.option.markexpr else "plot_*")
    pattern = names.replace(",", "|").replace("*", ".*")
    return rf"sphinx_gallery_conf.filename_pattern=/({pattern})\.py"


@pytest.fixture(scope="session")
def site(testrun_uid: str, pytestconfig: pytest.Config) -> Path:
    """The built fast site; the developer's own build under ``build/html`` is left alone.

    The first worker of a run that needs it builds it, and the others take what it built.
    """
    SITE.mkdir(parents=True, exist_ok=True)
    # Two builds of one folder at once would take each other's files away.
    with (SITE / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if lock.read() == testrun_uid:
            return SITE / "build" / "html"
        lock.truncate(0)
        for folder in ("conf", "docs", "gallery", "studies"):
            made = ("gallery", "generated", "backreferences") if folder == "docs" else ()
            ignored = shutil.ignore_patterns("__pycache__", *made)
            shutil.copytree(ROOT / folder, SITE / folder, dirs_exist_ok=True, ignore=ignored)
        done = sphinx(SITE, "-D", running(pytestconfig))
        assert done.returncode == 0, f"the fast build fails:\n{done.stdout[-2000:]}\n{done.stderr}"
        lock.write(testrun_uid)
    return SITE / "build" / "html"


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """Where the site is served, on this machine alone."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Headless Chromium; without one these tests are skipped, unless they are required."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        message = "no Chromium: the browser checks of the site did not run"
        pytest.fail(message) if REQUIRED else pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program)
        yield chromium
        chromium.close()
