"""The page to copy and its study: they run as they are, agree, and become a page of the site."""

import os
import runpy
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from roundoff.environment import environment, machine_name

from .conftest import ROOT, Site

COPIED = ROOT / "studies" / "page_to_copy"
PAGE, STUDY = COPIED / "plot_long_sum.py", COPIED / "long_sum.py"


def test_page_and_study_agree(monkeypatch, capsys) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    plt.close("all")
    page = runpy.run_path(str(PAGE))
    plt.close("all")
    study = runpy.run_path(str(STUDY))["study"]
    options = {name: option[0] for name, option in study.options.items()}
    (row, *_) = study.tables["sums"](Namespace(**options))
    assert float(page["sums"][-1]) == row["sum"]
    assert page["rows"][0]["error %"] == pytest.approx(100 * row["error"], rel=1e-12)
    assert f"{row['error']:.2%}".replace("%", " %") in PAGE.read_text("utf-8")
    assert "off by 0.00974 %" in capsys.readouterr().out  # its own cell


@pytest.mark.slow(reason="two builds of a small site; the two files are run above")
def test_a_copy_is_recorded_and_built_alone(tmp_path: Path) -> None:
    machine = machine_name(environment())
    # The page leads to a label of the site, whose home has a figure of a page that has not run.
    labels = ".. _reduction-order:\n\nOrder\n-----\n\n.. answer-figure:: plot_other"
    text = PAGE.read_text("utf-8").replace("MACHINE", machine)
    site = Site(tmp_path, {PAGE.stem: text}, labels)
    study = tmp_path / "studies" / STUDY.name
    study.parent.mkdir()
    study.write_text(STUDY.read_text("utf-8").replace("MACHINE", machine))
    command = [sys.executable, str(study), "--record", "--commit", "feed"]
    subprocess.run(command, env=os.environ | site.env, check=True)
    alone = ("-D", r"sphinx_gallery_conf.filename_pattern=/plot_long_sum\.py")
    status, said = site.build(*alone)
    assert status == 0, said
    html = site.html(PAGE.stem).read_text("utf-8")
    assert 'href="#evidence-drift"><strong>0.96 %</strong>' in html
    site.pages[PAGE.stem].write_text(text.replace("0.96 %", "0.97 %"))
    status, said = site.build(*alone)
    assert status != 0
    assert "0.97 % is printed" in said
