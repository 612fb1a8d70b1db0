"""A figure's SVG: made smaller, it draws the same."""

import io
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from roundoff.page import use_style

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "conf"))
from figures import save_svg

plt.switch_backend("agg")


def test_a_smaller_svg_draws_the_same(tmp_path: Path, browser) -> None:
    use_style()
    figure, axes = plt.subplots()
    axes.set_title("Some − title")
    axes.plot([0.1, 0.2, 0.35], [1.0, 1e4, 3e-3])
    plain, light, night = (tmp_path / f"{name}.svg" for name in ("plain", "light", "night"))
    figure.savefig(plain, format="svg", transparent=True)
    save_svg(figure, light, night)
    assert max(path.stat().st_size for path in (light, night)) < 0.7 * plain.stat().st_size
    tab = browser.new_page()
    drawn = []
    for path in (plain, light, night):
        tab.goto(path.as_uri())
        drawn.append(np.asarray(Image.open(io.BytesIO(tab.screenshot())).convert("L"), float))
    tab.close()
    assert drawn[0].std() > 5
    assert np.abs(drawn[0] - drawn[1]).max() < 64  # of 255, at the edge of a letter
    assert np.abs(drawn[0] - drawn[2]).max() > 64
    assert "#24292f" not in night.read_text("utf-8")
