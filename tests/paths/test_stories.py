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
import torch

from roundoff.reductions import (
    arrange,
    binned,
    condition,
    draw_values,
    exact_sum,
    numpy_depth,
    round_exact,
    round_to,
)

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
    drawn = [float(line.split()[-1]) for line in results.splitlines()]
    counted, exact = int(repeated[0].split()[0]), float(repeated[0].split()[2])
    assert len(drawn) == 3
    assert len(set(drawn)) > 1, "another order changed nothing"
    assert np.ptp(drawn) < 1e-4 * abs(drawn[0]), "they agree in a few digits"
    assert exact == round(float(exact_sum(names["x"])), 6)
    assert exact not in drawn, "none of these is the exact sum"
    assert counted == names["counts"]["normal"]["np.sum"] > 3
    assert repeated[1].split()[0] == "1", "of numbers on a grid"
    assert "in float64: 0.0  binned: 1.0\nin float64: 1.0  binned: 1.0\n" in story.text


def test_each_number_of_threads_has_one_sum_and_a_different_one(told: dict[str, Told]) -> None:
    found = [line.split() for line in told[REDUCTION].text.splitlines() if "threads: " in line]
    assert [int(line[1]) for line in found] == [1, 2, 4]
    assert len({line[3] for line in found}) == 3, "a number of threads changed nothing"
    assert [line[5] for line in found] == ["1"] * 3, "threads raced"


def test_a_snapped_number_is_added_without_rounding(told: dict[str, Told]) -> None:
    snapped = told[REDUCTION].names["snapped"]
    running = np.cumsum(snapped.astype(np.float64), axis=1)
    assert np.array_equal(running, running.astype(np.float32))
    assert np.abs(snapped[0]).sum() < 2**14


def test_the_price_of_the_guaranteed_sum_is_measured(told: dict[str, Told]) -> None:
    prices = told[REDUCTION].names["prices"].set_index("label")
    assert set(prices.index) == {"np.sum", "np.sum in float64", "binned"}
    # "binned costs several times what float64 does"
    assert prices["low"]["binned"] > 2 * prices["high"]["np.sum in float64"] > 2


def test_the_trees_of_the_page_on_sums(told: dict[str, Told]) -> None:
    names = told[REDUCTION].names
    _, axis = plt.subplots()
    sums = [names["draw"](axis, tree, 0)[2] for tree in names["trees"].values()]
    assert sums == [2**24, 2**24 + 4]
    texts = [text.get_text() for text in axis.texts]
    assert sum("rounded" in text for text in texts) == 4
    plt.close("all")


def test_the_error_of_a_sum_grows_with_its_condition_and_keeps_a_bound(
    told: dict[str, Told],
) -> None:
    names = told[REDUCTION].names
    points, first = names["points"], names["points"].iloc[0]
    assert len(points) == 120
    assert (points["ULP"] <= numpy_depth(8192) * points["condition"]).all()
    logs = np.log(points[["condition", "ULP"]])
    assert np.corrcoef(logs.T)[0, 1] > 0.8, "a tendency"
    assert points["condition"].max() > 1000 * points["condition"].min(), "three decades"
    assert (points["ULP"] < points["condition"] / 10).any(), "a list may be far below it"
    drawn = points[points["shift"] == 0]
    assert first["condition"] > drawn["condition"].median(), "the first list cancels more"
    assert first["condition"] == condition(names["x"])


def test_the_type_of_a_sum_matters_more_than_its_size(told: dict[str, Told]) -> None:
    names = told[REDUCTION].names
    counts, summary, spreads = names["counts"], names["summary"], names["spreads"]
    distinct = counts[["normal", "spikes", "pareto"]]
    assert (distinct.loc[["np.sum in float64", "binned"]] == 1).all(axis=None)
    assert (distinct.loc["a loop"] > distinct.loc["np.sum"]).all()
    assert (summary["float32"] / summary["float64"] > 1e7).all()
    means = summary.loc["mean"]
    assert (means[["float16", "bfloat16"]] == 0).all(axis=None)
    assert summary.loc[("normalisation", "normal"), "float16"] == 2**-10, "an ULP of float16"
    normal = spreads[(spreads["numbers"] == "normal") & (spreads["type"] == "float32")]
    for statistic, least, most in ("sum", 100, 10_000), ("mean", 0.1, 10):
        line = normal[normal["statistic"] == statistic].set_index("size")["spread"]
        assert least < line[8192] / line[8] < most, statistic
    assert (counts.loc[["np.sum in float64", "binned"], "right"] == "384 of 384").all()
    assert int(counts.loc["np.sum", "right"].split()[0]) < 384


def test_the_spread_of_a_sum_is_that_of_the_mean_times_the_size(told: dict[str, Told]) -> None:
    spreads = told[REDUCTION].names["spreads"]
    drawn, orders = draw_values("pareto", 8192), told[REDUCTION].names["draw_orders"]
    for dtype, size in ("float32", 8192), ("float64", 512), ("float32", 2):
        values = round_to(drawn[:size], dtype)
        sums = np.sum(arrange(values, orders(size)), axis=1)
        case = {"statistic": "sum", "numbers": "pareto", "type": dtype, "size": size}
        (said,) = spreads[(spreads[list(case)] == pd.Series(case)).all(axis=1)]["spread"]
        assert said == np.ptp(sums)


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


# --- the text of a model

BITS = "plot_bits_to_words"


def check_words(story: Told) -> None:
    """What the page on a different text says of its output, with whatever model."""
    names, text = story.names, story.text
    assert "bfloat16 twice:      0 texts differ" in text
    assert "float32 and float64: 0 texts differ" in text
    assert "logits that differ from float32's: 0\n" in text
    assert "different bits:" not in text
    assert min(2, int(names["differ"].sum())) == text.count("float64  ")
    (table,) = (t for t in story.tables if "smallest gap" in t)
    assert table["different tokens"].tolist() == [int(names["flipped"].sum()), 0]
    assert float(table["mean change"]["float32"]) < float(table["smallest gap"]["float32"]) / 10
    smaller = float(table["mean change"]["bfloat16"]) / float(table["mean change"]["float32"])
    assert smaller > 3000, "tens of thousands of times smaller"
    flipped, gap, change = names["flipped"], names["gap"], names["change"]
    assert (gap >= 0).all()
    assert flipped[gap + change < 0].all(), "a dot above the line is a different token"
    assert gap[flipped].max() < gap.median(), "the dots that change lie near zero"


def test_what_the_page_on_words_says_of_its_output(told: dict[str, Told]) -> None:
    check_words(told[BITS])


@pytest.mark.slow(reason="a model of 135 million parameters in float64")
def test_what_the_page_on_words_says_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNITTEST_GOING", raising=False)
    monkeypatch.setattr("roundoff.record.read_records", lambda page, folder="": [])
    story = Told(BITS)
    check_words(story)
    names = story.names
    assert names["differ"].sum() >= 1
    assert names["change"].abs().median() < names["gap"].median() / 10, "small beside the gap"
    expected, found = float(names["share"]) * len(names["gap"]), int(names["flipped"].sum())
    assert abs(found - expected) < 3 * expected**0.5, "it scatters by its square root"


def test_the_rule_of_changed_tokens_needs_no_normal_changes() -> None:
    """Half of density times mean absolute change; here of changes with heavy tails."""
    rng = np.random.default_rng(0)
    gap, change = rng.exponential(20, 10**6), rng.standard_t(3, 10**6)
    density = (gap < 0.2).mean() / 0.2
    share = density * np.abs(change).mean() / 2
    assert share == pytest.approx((change > gap).mean(), rel=0.05)


def test_page_and_study_on_words_agree_bit_for_bit(told: dict[str, Told]) -> None:
    names, study = told[BITS].names, runpy.run_path(str(ROOT / "studies" / "bits_to_words.py"))
    if study["GPU"]:
        pytest.skip("the study runs on the GPU, the page on the processor")
    along = study["Along"](names["asked"], names["tokens"])
    assert along.truth.tokens.tolist() == names["truth"].tokens.tolist()
    assert torch.equal(along.exact, names["exact"])
    model = study["model_of"]("bfloat16")
    steps = along.follow("bfloat16", "batch of 8", model, len(names["asked"]))
    assert torch.equal(torch.tensor(steps["gap"].to_numpy()), -names["change"])
    assert steps["differs"].tolist() == names["flipped"].tolist()
    again = study["Again"]()
    with torch.no_grad(), again:
        model(names["ids"])
    assert sum(again.calls.values()) > 20
    assert not again.changed
