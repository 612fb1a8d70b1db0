"""Pages in the form: cells run in order, each after the imports and the cells before it; what the
prose says of their output holds on this machine; page and study measure the same.
"""

from __future__ import annotations

import ast
import contextlib
import io
import runpy
from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from roundoff.reductions import binned, exact_sum, round_exact

from .pages import PAGES, ROOT, Cell, cells, own_cell, run

#: A page in the form has no study of its own: it stands in studies/.
STORIES = [page for page, path in PAGES.items() if "Study(" not in path.read_text("utf-8")]


def lines(cell: Cell) -> int:
    """Lines of code, imports and comments aside."""
    shown = [line for line in cell.code.splitlines() if line.strip()]
    return sum(not line.lstrip().startswith(("import ", "from ", "#", ")")) for line in shown)


def is_imports(cell: Cell) -> bool:
    body = ast.parse(cell.code).body
    return bool(body) and all(isinstance(s, (ast.Import, ast.ImportFrom)) for s in body)


class Told:
    """A page whose cells have run in order, without a record: their names, outputs and figures."""

    def __init__(self, page: str) -> None:
        self.names: dict[str, Any] = {"__name__": page}
        self.printed: list[str] = []
        self.labels: list[str] = []
        self.values: list[Any] = []
        plt.close("all")  # what another test left open
        for cell in cells(page):
            tree = ast.parse(cell.code)
            ast.increment_lineno(tree, cell.line - 1)
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                self.values += run(tree, self.names, str(PAGES[page]))
            self.printed.append(out.getvalue())
            figures = [plt.figure(number) for number in plt.get_fignums()]
            self.labels += [str(figure.get_label()) for figure in figures]
            plt.close("all")

    @property
    def text(self) -> str:
        return "".join(self.printed)

    @property
    def tables(self) -> list[pd.DataFrame]:
        return [value for value in self.values if isinstance(value, pd.DataFrame)]


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, Told]]:
    """The stories that a test asks for, each told once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNITTEST_GOING", "1")
        patch.setattr("roundoff.record.read_records", lambda page, folder="": [])

        class Telling(dict[str, Told]):
            def __missing__(self, page: str) -> Told:
                self[page] = Told(page)
                return self[page]

        yield Telling()


@pytest.mark.parametrize("page", STORIES)
def test_no_cell_is_longer_than_it_can_be_read(page: str) -> None:
    longest = max(cells(page), key=lines)
    assert lines(longest) <= 20, longest.code


@pytest.mark.parametrize("page", STORIES)
def test_without_a_record_a_page_prints_and_draws(page: str, told: dict[str, Told]) -> None:
    story = told[page]
    assert len(story.text.splitlines()) >= 4
    assert len(story.labels) >= 2
    assert all(len(label.split()) >= 5 for label in story.labels), "a figure without words"
    assert any(len(table) for table in story.tables)


@pytest.mark.parametrize("page", STORIES)
def test_the_readers_own_cell_runs_after_the_imports_alone(page: str) -> None:
    names: dict[str, Any] = {"__name__": page}
    for cell in [*filter(is_imports, cells(page)), own_cell(page)]:
        run(ast.parse(cell.code), names, str(PAGES[page]))
    plt.close("all")


# --- the order of a sum

REDUCTION = "plot_reduction_order"


def test_what_the_page_on_sums_says_of_its_output(told: dict[str, Told]) -> None:
    story = told[REDUCTION]
    names, (results, *repeated) = story.names, story.text.split("different results: ")
    counted = int(repeated[0].split()[0])
    drawn = [float(line.split()[-1]) for line in results.splitlines()]
    assert len(drawn) == 3
    assert len(set(drawn)) > 1, "another order changed nothing"
    assert np.ptp(drawn) < 1e-4 * abs(drawn[0]), "they agree in a few digits"
    assert counted == names["counts"]["normal"]["np.sum"] > 3
    assert story.text.count("1 result in 1000 runs") == 3
    assert repeated[1].split()[0] == "1", "of numbers on a grid"
    assert "in float64: 0.0  binned: 1.0\nin float64: 1.0  binned: 1.0\n" in story.text


def test_the_trees_of_the_page_on_sums(told: dict[str, Told]) -> None:
    names = told[REDUCTION].names
    _, axis = plt.subplots()
    sums = [names["draw"](axis, tree, 0)[2] for tree in names["trees"].values()]
    assert sums == [2**24, 2**24 + 4]
    texts = [text.get_text() for text in axis.texts]
    assert sum("rounded" in text for text in texts) == 4
    plt.close("all")


def test_cancellation_decides_and_the_type_matters_more_than_the_size(
    told: dict[str, Told],
) -> None:
    names = told[REDUCTION].names
    counts, summary, spreads = names["counts"], names["summary"], names["spreads"]
    assert (counts.loc["np.sum in float64"] == 1).all()
    assert (counts.loc["binned"] == 1).all()
    assert (counts.loc["a loop"] > counts.loc["np.sum"]).all()
    assert (summary["float32"] / summary["float64"] > 1e7).all()
    means = summary.loc["mean"]
    assert (means[["float16", "bfloat16"]] == 0).all(axis=None)
    normal = spreads[(spreads["numbers"] == "normal") & (spreads["statistic"] == "mean")]
    float32 = normal[(normal["type"] == "float32") & (normal["size"] > 2)]["spread"]
    assert float32.max() < 100 * float32[float32 > 0].min()
    words = [line.split() for line in told[REDUCTION].text.splitlines()]
    found = {line[0]: line[1:] for line in words if line and line[0] in counts.columns}
    assert float(found["normal"][2]) > 5 * float(found["pareto"][2])
    assert [found[name][0] for name in ("spikes", "pareto")] == ["1", "1"]


def test_page_and_study_on_sums_agree_bit_for_bit(told: dict[str, Told]) -> None:
    study = runpy.run_path(str(ROOT / "studies" / "reduction_order.py"))
    theirs = pd.DataFrame(study["spreads"](None)).rename(
        columns={"distribution": "numbers", "dtype": "type"}
    )
    keys = ["statistic", "numbers", "type", "size"]
    both = theirs.merge(told[REDUCTION].names["spreads"], on=keys, suffixes=(" study", " page"))
    assert len(both) == len(theirs) >= 120
    assert both["spread study"].tolist() == both["spread page"].tolist()
    names = told[REDUCTION].names
    assert np.array_equal(names["orders"], study["arrange"](names["x"], study["orders"](8192)))
    assert float(binned(names["x"])) == round_exact(exact_sum(names["x"]), np.float32)
