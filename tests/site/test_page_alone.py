"""One page on a fresh clone: it builds though the others have never run."""

import sys
from pathlib import Path
from typing import ClassVar

import pytest

from .conftest import ROOT, sphinx
from .test_build import HEADER, INDEX

sys.path.insert(0, str(ROOT / "conf"))
from answer import left_out

PAGE = '''"""
.. _page-a:

Page a
======

One sum.
"""

# %%
# A number
# --------
print("the sum:", 2 + 2)
'''
OTHER = PAGE.replace("page-a", "page-b").replace("Page a\n=", "Page b\n=").replace("_a", "_b")
HOME = "What page b has drawn:\n\n.. answer-figure:: plot_b\n"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The real configuration over two pages of which nothing is recorded."""
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    section = tmp_path / "gallery" / "numerics"
    section.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.rst").write_text(INDEX.replace("====\n", f"====\n\n{HOME}", 1))
    for folder in (section, section.parent):
        (folder / "GALLERY_HEADER.rst").write_text(HEADER)
    (section / "plot_a.py").write_text(PAGE)
    (section / "plot_b.py").write_text(OTHER)
    return tmp_path


def test_a_page_that_a_build_leaves_out() -> None:
    class Config:
        sphinx_gallery_conf: ClassVar[dict[str, str]] = {}

    assert not left_out(Config, "plot_b")
    Config.sphinx_gallery_conf["filename_pattern"] = r"/plot_a\.py"
    assert left_out(Config, "plot_b")
    assert left_out(Config, "plot_a_more")
    assert not left_out(Config, "plot_a")


@pytest.mark.slow(reason="a build of a small site; conf/ alone decides it")
def test_a_page_is_built_alone(clone: Path) -> None:
    alone = sphinx(clone, "-D", r"sphinx_gallery_conf.filename_pattern=/plot_a\.py")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    built = clone / "build" / "html" / "gallery" / "numerics"
    assert "the sum: 4" in (built / "plot_a.html").read_text("utf-8")
    assert "the sum: 4" not in (built / "plot_b.html").read_text("utf-8")
