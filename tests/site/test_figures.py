"""A figure of a page has the colours that turn on a dark page."""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from roundoff.page import DARK, use_style

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "conf"))
from figures import save_svg

plt.switch_backend("agg")


def test_a_figure_on_a_dark_page_has_none_of_the_colours_that_turn(tmp_path: Path) -> None:
    use_style()
    figure, axes = plt.subplots()
    axes.set_title("Some − title")
    axes.plot([0.1, 0.2, 0.35], [1.0, 1e4, 3e-3])
    save_svg(figure, tmp_path / "figure")
    drawn = (tmp_path / "figure.svg").read_text("utf-8")
    turned = (tmp_path / "figure_dark.svg").read_text("utf-8")
    used = [colour for colour in DARK if colour in drawn]
    assert used
    assert not [colour for colour in used if colour in turned]
    assert all(DARK[colour] in turned for colour in used)
