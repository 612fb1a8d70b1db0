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


# --- training on several workers

ALL_REDUCE = "plot_all_reduce_order"


def test_what_the_page_on_workers_says_of_its_output(told: dict[str, Told]) -> None:
    story = told[ALL_REDUCE]
    names, runs = story.names, story.names["runs"]
    losses = np.array([names["loss_of"](runs[n][-1]) for n in (1, 2, 4, 8)])
    assert len(set(losses)) == 4, "a number of workers changed no loss"
    assert np.ptp(losses) < 1e-8 * losses[0], "the first eight digits agree"
    assert "different results of three runs on 4 workers: 1\n" in story.text
    assert "\ndifferent results: 1\n" in story.text, "gathered"
    assert "as drawn: 0% differ from the orders found,\n" in story.text
    assert float(story.text.split("orders found,\n")[1].split("%")[0]) > 10
    grid = story.text.split("multiples of 1/1024: ")[1]
    assert grid.startswith("0% differ from the orders found,\n    0% from the workers' order")
    (price,) = (line for line in story.text.splitlines() if line.startswith("gathering over"))
    low, high = map(float, price.split("rounds ")[1].split(" to "))
    assert 0 < low <= float(price.split(": ")[1].split(",")[0]) <= high


def test_the_ring_that_is_drawn_gives_what_was_received(told: dict[str, Told]) -> None:
    names = told[ALL_REDUCE].names
    received = names["received"].tolist()
    assert sorted(set(received)) == [0, 1, 2]
    chunks = names["find_orders"](names["workers"], 4, 16, names["torch"].float32)
    assert [chunk.stop for chunk in chunks] == [4, 8, 12, 16]
    _, axis = plt.subplots()
    for chunk, drawn in zip(chunks, names["sums"], strict=True):
        last = int(names["order_text"](chunk.tree)[-1])
        route = [(last + n) % 4 for n in (3, 2, 1, 0)]
        assert drawn == names["draw"](axis, route) == received[chunk.start]
        # It is the order that was found: the first two may be swapped.
        tree = (((route[0], route[1]), route[2]), route[3])
        parts = np.random.default_rng(1).standard_normal((4, 1000)).astype(np.float32)
        found = names["add_in_order"](parts, chunk.tree)
        assert np.array_equal(found, names["add_in_order"](parts, tree))
    lost = sum(text.get_color() == "C1" for text in axis.texts)
    assert lost == 4, "ones that are lost: additions in orange"
    plt.close("all")


def test_the_order_of_the_data_moves_weights_more_than_workers(told: dict[str, Told]) -> None:
    drift = told[ALL_REDUCE].names["drift"]
    final = drift[drift["step"] == drift["step"].max()].set_index("run")
    for workers in 2, 4, 8:
        assert 0 < final["from 1 worker"][workers] < final["from float64"][workers]
        assert final["from 1 worker"]["data order"] > 1e5 * final["from 1 worker"][workers]
        assert final["from 1 worker"][workers] < final["from float64"][1]


def test_page_and_study_on_workers_agree_bit_for_bit(told: dict[str, Told]) -> None:
    study = runpy.run_path(str(ROOT / "studies" / "all_reduce_order.py"))
    teams, steps = study["backends"](60), study["STEPS"]
    assert steps >= 4
    for way, tracks in ("all-reduce", "runs"), ("micro-batches", "alike"):
        for ranks in 1, 4:
            item = (steps, way, study["SEED"], "float32", "cpu")
            theirs = study["run"](teams, "gloo on cpu", study["train"], [item] * ranks)
            assert np.array_equal(theirs[0], told[ALL_REDUCE].names[tracks][ranks][:steps])
            loss = study["run"](teams, "gloo on cpu", study["train"], [item] * ranks)[2]
            assert loss == told[ALL_REDUCE].names["loss_of"](theirs[0][-1])
