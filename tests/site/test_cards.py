"""The table of results on a phone: a card a study, each cell under the name of its machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT
from .test_browser import axe, overflow, serious  # noqa: F401 - a fixture

pytestmark = pytest.mark.site

PAGE = """
Results
=======

Words.

.. list-table:: The figure of each study.
   :header-rows: 1
   :class: ro-results

   * - Study
     - This build (2 cores)
     - NVIDIA H200
   * - `Spread <https://example.org/>`_
     - **27 answers**

       One float32 sum of many values, added in 128 orders.
     - –
   * - `Fusion gain <https://example.org/>`_
     - –
     - **0.73 to 1.06**

       One large Gemm in the time of two small ones and their Concat.
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cards")
    (folder / "index.rst").write_text(PAGE)
    (folder / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'conf')!r})\nextensions = ['results']\n"
        f"html_theme = 'furo'\nhtml_static_path = [{str(ROOT / 'conf' / 'static')!r}]\n"
        "html_css_files = ['roundoff.css']\n"
    )
    command = [sys.executable, "-m", "sphinx", "-q", "-W", folder, folder / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "out" / "index.html"


@pytest.fixture
def tab(browser, results: Path):
    page = browser.new_page()
    page.goto(results.as_uri(), wait_until="load")
    yield page
    page.close()


def lines(tab) -> list[str]:
    """What a reader sees of the second study, line by line."""
    text = tab.locator("table.ro-results tbody tr").nth(1).inner_text()
    return [line for line in text.replace("\t", "\n").split("\n") if line.strip()]


def test_a_card_names_its_study_and_the_machine_of_each_figure(tab) -> None:
    tab.set_viewport_size({"width": 390, "height": 900})
    assert lines(tab)[:5] == [
        "Fusion gain", "This build (2 cores)", "–", "NVIDIA H200", "0.73 to 1.06",
    ]  # fmt: skip
    widths = tab.locator("table.ro-results td").evaluate_all(
        "cells => cells.map(cell => cell.getBoundingClientRect().width)"
    )
    assert min(widths) > 300
    assert overflow(tab) <= 0
    assert not tab.locator("table.ro-results thead").is_visible()


def test_a_table_names_each_machine_once(tab) -> None:
    tab.set_viewport_size({"width": 1280, "height": 900})
    assert tab.locator("table.ro-results thead").is_visible()
    assert "NVIDIA H200" not in lines(tab)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_cards_can_be_read_by_everyone(tab, axe: str, scheme: str) -> None:  # noqa: F811
    tab.set_viewport_size({"width": 390, "height": 900})
    tab.emulate_media(color_scheme=scheme)
    assert not serious(tab, axe)
