"""The page to copy and its study: they run as they are, agree, and become a page of the site."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from roundoff.environment import environment, machine_name

from .conftest import ROOT, sphinx
from .test_build import HEADER, INDEX

COPIED = ROOT / "studies" / "page_to_copy"
PAGE, STUDY = COPIED / "plot_long_sum.py", COPIED / "long_sum.py"


def test_they_can_be_read_in_one_go() -> None:
    for path in (PAGE, STUDY):
        assert len(path.read_text("utf-8").splitlines()) <= 150
    cells = re.split(r"^# %%.*\n", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    code = [[line for line in cell.splitlines() if line and line[0] != "#"] for cell in cells]
    assert max(map(len, code)) <= 20


def test_page_and_study_agree(monkeypatch, capsys) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    plt.close("all")
    page = runpy.run_path(str(PAGE))
    figures = [plt.figure(number) for number in plt.get_fignums()]
    plt.close("all")
    # What tests/paths/test_stories.py asks of every page.
    assert all(len(figure.get_label().split()) >= 5 for figure in figures)
    assert len(figures) >= 2
    study = runpy.run_path(str(STUDY))["study"]
    (row, *_) = study.tables["sums"](study_options(study))
    assert float(page["sums"][-1]) == row["sum"]
    assert page["rows"][0]["error %"] == pytest.approx(100 * row["error"], rel=1e-12)
    assert f"{row['error']:.2%}".replace("%", " %") in PAGE.read_text("utf-8")
    assert "off by 0.00974 %" in capsys.readouterr().out  # its own cell


def study_options(study):
    from argparse import Namespace

    return Namespace(**{name: option[0] for name, option in study.options.items()})


@pytest.mark.slow(reason="two builds of a small site; the two files are run above")
def test_a_copy_is_recorded_and_built_alone(tmp_path: Path) -> None:
    for folder in ("conf", "src"):
        shutil.copytree(ROOT / folder, tmp_path / folder,
                        ignore=shutil.ignore_patterns("__pycache__", "recorded"))  # fmt: skip
    (tmp_path / "docs").mkdir()
    # The page leads to two labels of the site.
    labels = ".. _reduction-order:\n\nOrder\n-----\n"
    (tmp_path / "docs" / "index.rst").write_text(f"{INDEX}\n{labels}")
    section = tmp_path / "gallery" / "numerics"
    section.mkdir(parents=True)
    for folder in (section, section.parent):
        (folder / "GALLERY_HEADER.rst").write_text(HEADER)
    (tmp_path / "studies").mkdir()
    machine, page = machine_name(environment()), section / PAGE.name
    page.write_text(PAGE.read_text("utf-8").replace("MACHINE", machine))
    study = tmp_path / "studies" / STUDY.name
    study.write_text(STUDY.read_text("utf-8").replace("MACHINE", machine))
    env = {"PYTHONPATH": str(tmp_path / "src")}
    command = [sys.executable, str(study), "--record", "--commit", "feed"]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=True)
    assert f"plot_long_sum/{machine}.json" in done.stderr
    alone = ("-D", r"sphinx_gallery_conf.filename_pattern=/plot_long_sum\.py")
    built = sphinx(tmp_path, *alone, **env)
    assert built.returncode == 0, built.stderr
    html = (tmp_path / "build/html/gallery/numerics/plot_long_sum.html").read_text("utf-8")
    assert 'href="#evidence-drift"><strong>0.96 %</strong>' in html
    page.write_text(page.read_text("utf-8").replace("0.96 %", "0.97 %"))
    built = sphinx(tmp_path, *alone, **env)
    assert built.returncode != 0
    assert "0.97 % is printed" in built.stderr
