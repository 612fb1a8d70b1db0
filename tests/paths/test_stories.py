"""Pages: cells run in order, each after the imports and the cells before it; what the
prose says of their output holds on this machine; page and study measure the same.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from roundoff.page import choose
from roundoff.record import Record, read_records
from roundoff.reductions import exact_sum

from .pages import PAGES, cells, own_cell, record_of, run_cell, study_of


class Told:
    """A page whose cells have run in order, without a record: their names, output and figures.

    The reader's own cell runs in ``test_your_own.py``.
    """

    def __init__(self, page: str) -> None:
        self.names: dict[str, Any] = {"__name__": page}
        self.figures: list[plt.Figure] = []
        values: list[Any] = []
        out = io.StringIO()
        plt.close("all")  # what another test left open
        for cell in cells(page):
            if cell != own_cell(page):
                with contextlib.redirect_stdout(out):
                    values += run_cell(page, cell, self.names)
                self.figures += [plt.figure(number) for number in plt.get_fignums()]
                plt.close("all")
        self.text = out.getvalue()
        self.tables = [value for value in values if isinstance(value, pd.DataFrame)]

    def table(self, column: str) -> pd.DataFrame:
        """The table that has this column."""
        (found,) = (table for table in self.tables if column in table)
        return found


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Iterator[Told]:
    """A page told once for all of its tests, of quick sizes, without records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNITTEST_GOING", "1")
        patch.setattr("roundoff.record.read_records", lambda page, folder="": [])
        yield Told(request.param)


def on(*pages: str) -> Any:
    return pytest.mark.parametrize("told", pages, indirect=True)


@on(*PAGES)
def test_without_a_record_a_page_prints_and_draws(told: Told) -> None:
    assert told.text
    assert len(told.figures) >= 2
    for figure in told.figures:
        assert len(figure.get_label().split()) >= 5, "a figure without words"
    answers = [figure for figure in told.figures if figure.get_gid() == "answer"]
    assert len(answers) == 1, "no figure for the answer, or several"
    assert any(len(table) for table in told.tables)


# --- the order of a sum

REDUCTION = "plot_reduction_order"


@on(REDUCTION)
def test_what_the_page_on_sums_says_of_its_output(told: Told) -> None:
    names, (results, *repeated) = told.names, told.text.split("\ndifferent results: ")
    drawn = [float(line.split()[-1]) for line in results.splitlines()]
    counted, exact = int(repeated[0].split()[0]), float(repeated[0].split()[2])
    on_grids = re.findall(r"2\^-(\d+), different results: (\d+)", told.text)
    grids = {int(k): int(found) for k, found in on_grids}
    assert len(set(drawn)) > 1, "another order changed nothing"
    assert np.ptp(drawn) < 1e-5 * abs(drawn[0]), "they agree in about five digits"
    assert exact == round(float(exact_sum(names["x"])), 6)
    assert counted == names["counts"]["normal"]["np.sum"] > 3
    assert grids[11] == 1, "no addition rounds"
    assert 1 < grids[20] <= grids[24] <= counted + 5, "the different results return"
    hard = "in float64: {0}  Neumaier: {0}  binned: 1.0\n"
    assert hard.format("0.0") + hard.format("1.0") in told.text


@on(REDUCTION)
def test_each_number_of_threads_has_one_sum_and_a_different_one(told: Told) -> None:
    found = [line.split() for line in told.text.splitlines() if "threads: " in line]
    assert len({line[3] for line in found}) == 3, "a number of threads changed nothing"
    assert [line[5] for line in found] == ["1"] * 3, "threads raced"


@on(REDUCTION)
def test_the_error_of_a_sum_grows_with_its_condition(told: Told) -> None:
    names = told.names
    points, first = names["points"], names["points"].iloc[0]
    assert np.corrcoef(np.log(points).T)[0, 1:].min() > 0.8, "both errors grow with it"
    cancel = points[points["condition"] > 20]
    rule = cancel["shuffled"] / cancel["condition"] * 20
    assert len(cancel) > 60
    assert 0.5 < rule.quantile(0.02) < rule.quantile(0.98) < 2, "within a factor of two"
    assert (cancel["sorted"] > cancel["shuffled"]).mean() > 0.8, "sorted orders are worse"
    assert (points["condition"][::3] > first["condition"]).sum() == 1, "only one cancels more"
    assert 2.5 < first["sorted"] / first["shuffled"] < 4, "about a third of that"


@on(REDUCTION)
def test_the_type_of_a_sum_matters_more_than_its_length(told: Told) -> None:
    names = told.names
    counts, summary, of_types = names["counts"], names["summary"], names["short"]
    kinds = ["normal", "spikes", "pareto", "cubes"]
    exact = ["float64, rounded", "binned", "Neumaier"]
    assert (counts.loc[exact, kinds] == 1).all(axis=None)
    assert (counts.loc[exact, "right"] == 512).all()
    assert (counts.loc["a loop", kinds] > counts.loc["np.sum", kinds]).all()
    assert (counts.loc["float64", kinds[:3]] == 1).all(), "float64 rounds none of the three kinds"
    assert counts.loc["float64", "right"] == 384
    assert counts.loc["np.sum", "right"] < 256, "few are right"
    assert (summary.loc["mean"][["float16", "bfloat16"]] == 0).all(axis=None)
    assert of_types["float32, sum"].is_monotonic_increasing, "that of the sum grows"
    ratio = of_types["float32"] / of_types["float64"]
    assert ratio.between(1e8, 1e9).all(), "more than a hundred million times smaller"


# --- two runtimes

RUNTIMES = "plot_layer_norm_discrepancies"


@on(RUNTIMES)
def test_what_the_page_on_two_runtimes_says_of_its_output(told: Told) -> None:
    text = told.text
    typical, largest = (float(line.split()[-1]) for line in text.splitlines()[:2])
    assert largest < 1e-5 * typical, "six digits"
    assert told.names["moved"]["here (cpu)"].max() < 1e-5 * typical, "the last digits"
    parts = told.table("dropped bits")
    assert (parts["rounded operands"].diff().dropna() < 0).all(), "more errors average out"
    assert (parts["dropped bits"].diff().dropna() > 0).all(), "dropping grows"
    errors = re.findall(r" RMS +([\d.]+)  mean +([-+][\d.]+)", text)
    errors = [(float(rms), float(mean)) for rms, mean in errors]
    positive, signed = errors[:4], errors[4:]
    for (plain, _), (rms, mean), *_ in positive, signed:
        assert abs(mean) < rms / 4, "small beside the RMS error"
        assert rms > 10 * plain
    (_, _, (rms, mean), (both, _)), (_, (operands, _), dropped, (signed_both, _)) = positive, signed
    assert mean < -rms / 2, "dropping shifts the results"
    assert abs(dropped[1] / dropped[0]) < abs(mean / rms) / 3, "it vanishes"
    root = told.names["width"] ** 0.5  # the unit shrinks by it; the page has 1152
    assert signed_both > root / 3 * both, "more than ten times as large"
    assert operands > 0.95 * signed_both, "nearly all of it"


@on(RUNTIMES)
def test_page_and_study_on_two_runtimes_agree_bit_for_bit(told: Told) -> None:
    names = told.names
    study = study_of("layer_norm_discrepancies")
    case = study["Case"](study["CPU"], study["FLOAT32"])
    apart = (names["of_torch"] - names["of_ort"]).abs().max()
    assert study["gap"](case)["abs"] == apart.item()
    assert torch.equal(study["tf32"](names["x"]), names["x11"])


# --- the text of a model

BITS = "plot_bits_to_words"


def check_words(story: Told) -> None:
    """What the page on a different text says of its output, with whatever model."""
    names, text = story.names, story.text
    assert "bfloat16 twice:      0 texts differ" in text
    assert "float32 and float64: 0 texts differ" in text
    assert "logits that differ from float32's: 0\n" in text
    table = story.table("ties")
    flipped, gap = names["flipped"], names["gap"]
    assert table["different tokens"]["float32"] == 0
    moved = table["shift, RMS"].astype(float)
    assert moved["float32"] < gap.min() / 10, "far below the smallest gap"
    assert moved["bfloat16"] / moved["float32"] > 3000, "thousands of times smaller"
    head = "bfloat16, last product float32"
    assert table["ties"][head] == 0, "the last product in float32 ends the ties"
    assert moved["bfloat16"] / 2 < moved[head] < moved["bfloat16"], "most of the shift is left"
    assert gap[flipped].max() < gap.median(), "the dots that change have small gaps"
    prices = story.table("ratio")
    held = prices["cache, KiB a token"].astype(float)
    assert held["converted"] == held["float32"] == 2 * held["bfloat16"], "twice the memory"


@on(BITS)
def test_what_the_page_on_words_says_of_its_output(told: Told) -> None:
    check_words(told)


@pytest.mark.slow(reason="a model of 135 million parameters in float64")
def test_what_the_page_on_words_says_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNITTEST_GOING", raising=False)
    monkeypatch.setattr("roundoff.record.read_records", lambda page, folder="": [])
    story = Told(BITS)
    check_words(story)
    names = story.names
    assert names["differ"].sum() >= 1
    assert names["shift"].abs().median() < names["gap"].median() / 10, "small beside the gap"
    sigma = names["shift"].square().mean().sqrt()
    expected = float(torch.special.ndtr(-names["gap"] / sigma).sum())
    found = int(names["flipped"].sum())
    assert abs(found - expected) < 3 * expected**0.5, "it scatters by its square root"


@on(BITS)
def test_page_and_study_on_words_agree_bit_for_bit(told: Told) -> None:
    names, study = told.names, study_of("bits_to_words")
    if study["GPU"]:
        pytest.skip("the study runs on the GPU, the page on the processor")
    along = study["Along"](names["asked"], names["tokens"])
    assert torch.equal(along.exact, names["exact"])
    model = study["model_of"]("bfloat16")
    steps = along.follow("bfloat16", "batch of 8", model, len(names["asked"]))
    assert torch.equal(torch.tensor(steps["gap"].to_numpy()), names["shift"])


# --- one large Gemm or two small ones

GEMM = "plot_gemm_fusion"


@on(GEMM)
@pytest.mark.alone
def test_what_the_page_on_gemms_says_of_its_output(told: Told) -> None:
    names = told.names
    over = {
        (cell, name): names[cell].ratio(name, "two Gemms").value
        for cell in ("puzzle", "large", "parts")
        for name in names[cell].samples
    }
    assert over["puzzle", "joined in each run"] > 1.2, "it takes much longer"
    assert over["large", "joined before"] < over["puzzle", "joined in each run"]
    assert 1.3 < over["parts", "Concat alone"] < 3.5, "about twice the time of the two Gemms"
    # "With one row, joining in each run costs most. With many rows it costs less."
    each_run = names["live"]["joined in each run"]
    assert each_run[1] > each_run.iloc[-1]


# --- which tolerance

TOLERANCE = "plot_which_tolerance"


@on(TOLERANCE)
def test_what_the_page_on_tolerances_says_of_its_output(told: Told) -> None:
    lines = told.text.splitlines()
    shown = [[float(word) for word in line.split()] for line in lines[1:6]]
    assert shown[0] == [32, 0, 0, 0]
    assert [line[1:] for line in shown[1:3]] == [[100, 0, 0]] * 2, "near 1"
    assert shown[3][2] > 90, "wrong results pass below"
    assert shown[4] == [1.9e-6, 100, 100, 100]
    assert told.names["rtols"].max() > 0.01, "one digit or two are tested"
    assert "1 % too large pass: 100 of 100" in told.text
    parts = re.findall(r"uses +([\d.]+) to +([\d.]+) of the bound", told.text)
    (_, right), (zeros, _), (missing, _), (_, tf32) = [tuple(map(float, part)) for part in parts]
    assert 1e-4 < right < 2e-3, "about a thousandth"
    assert min(zeros, missing) > 1 > tf32, "zeros and a missing term, not TF32"
    errors = re.findall(r"error(?: of x @ fixed:)? (\S+)$", told.text, re.MULTILINE)
    product, right, near, far = map(float, errors)
    assert 0.5 < right / product < 2, "alike"
    assert 200 < near / right < far / right, "given away"
    assert "split × 1.01: refused" in told.text


@on(TOLERANCE)
def test_at_any_scale_a_calibration_passes_the_split_and_no_fault(told: Told) -> None:
    (table,) = (t for t in told.tables if "split (correct)" in t.index)
    kept, free = (table[column] for column in ("atol of the calibration", "any_scale=True"))
    assert kept.loc["zeros"].iloc[0] == 100, "the puzzle is back"
    assert kept.loc["split (correct)"].iloc[1] >= 99
    assert kept.loc["split (correct)"].iloc[2] < 90, "a factor of 4"
    assert (free.loc["split (correct)"] >= 99).all()
    assert (free.drop("split (correct)") == 0).all(axis=None)


@on(TOLERANCE)
def test_without_cancellation_every_input_needs_the_same_rtol(told: Told) -> None:
    table = told.table("one sign")
    apart, least, _, most = table["one sign"].astype(float)
    assert most < 3 * least
    assert most < 10 * 2.0**-23, "a few ε"
    both = table["both signs"].astype(float)
    assert both.iloc[-1] > 1000 * most
    assert apart > 3 * both.iloc[0], "the results differ by more"


def test_what_the_page_on_tolerances_says_of_its_records() -> None:
    tables = record_of(TOLERANCE, "amd-epyc-2-cores").tables
    where = {"dtype": "float32", "method": "assert_close, defaults"}
    rows = choose(tables["alarms"], where).set_index("model")["failed"]
    assert rows[rows > 0].index.tolist() == ["long product"], "all failures are of 4096 terms"
    where = {"dtype": "float16", "method": "calibrated, 33 inputs, any scale"}
    rows = choose(tables["faults"], where)
    missed = rows[(rows["size"] > 0) & (rows["caught"] < rows["feeds"])]
    assert (missed["size"] < 1e-3).all(), "the faults that pass are below a thousandth"


# --- the fastest layer norm

FASTEST = "plot_triton_layer_norm"


@on(FASTEST)
def test_what_the_page_on_the_fastest_layer_norm_says_of_its_output(told: Told) -> None:
    fastest = told.names["times"].samples.min()
    assert fastest["step by step"] > 1.5 * fastest["one kernel"], "several times as long"
    errors = [float(x) for x in re.findall(r"largest error +([0-9.]+)", told.text)]
    assert max(errors) < 64, "both are right"
    taken = told.names["taken"]
    assert taken["padding"].tolist() == [0, 0, 7680, 7680]
    assert taken["spilled"].tolist()[:2] == [0, 0] < taken["spilled"].tolist()[2:]
    live = told.names["live"]
    assert (live["torch"] > 1.2 * live.get("step by step", 0)).all(), "faster at each width"


@pytest.mark.parametrize("record", read_records(FASTEST), ids=lambda record: record.machine)
def test_what_the_page_times_was_compared_with_float64(record: Record) -> None:
    """And the best library at each width is that of both runs."""
    table = record.tables["patterns"]
    table = table[~table["implementation"].str.contains("lock|lesson")]
    assert (table["rms error"] < 0.25).all(), "not that of rounding dw to float16"
    rates, again = record.tables["layer-norm-backward"], record.second["layer-norm-backward"]
    best = {1024: "torch", 4096: "QuACK", 8704: "flash-linear-attention"}
    for width, name in best.items():
        here = rates["N"] == width
        assert [*rates["best"][here], *again["best"][here]] == [name, name]


def test_numbers_of_the_fastest_layer_norm_that_are_not_bound() -> None:
    said = " ".join(PAGES[FASTEST].read_text("utf-8").replace("\n#", " ").split())
    record = record_of(FASTEST, "nvidia-h100-80gb-hbm3")
    again = record.values["backward.least"]["second"]["value"]
    assert f"(second run: {again:.2f})" in said
    record = record_of(FASTEST, "nvidia-h200")
    for tables in record.tables, record.second:
        forward = tables["layer-norm-forward"]
        wide = forward["lead"][record.tables["layer-norm-forward"]["N"] == 8704]
        assert ((1 / wide).round(2) == 1.03).all(), "leads by 3 %"
    back = record.tables["layer-norm-backward"].set_index("N")
    assert 0.88 < back["roundoff"][14848] / back["roundoff"][14336] < 0.92, "by a tenth"
    ahead = []
    for record in reversed(read_records(FASTEST)):  # the H200 first
        few = record.tables["types"]["case"] == "forward, float16, 256 × 4096"
        runs = [tables["types"]["lead"][few].item() for tables in (record.tables, record.second)]
        ahead.append(" and ".join(f"{100 / lead - 100:.0f}" for lead in runs))
    assert f"by {ahead[0]} % in two runs on the H200, by {ahead[1]} % on the H100" in said


# --- a layer norm step by step

LADDER = "plot_layer_norm_ladder"


@on(LADDER)
def test_what_the_page_on_steps_says_of_its_output(told: Told) -> None:
    pattern = r"^(.+?) +errors of dx, dw, db: (\S+) (\S+) (\S+)  different dw: (\d+)"
    shown = re.findall(pattern, told.text, re.MULTILINE)
    assert [step for step, *_ in shown] == ["atomics", "two stages", "pieces", "prefetch"]
    # An atomic sum adds its rows one by one: the errors of m additions are about 0.2 √m together.
    most = {"atomics": max(3, 0.5 * told.names["m"] ** 0.5)}
    for step, *errors, different in shown:
        assert max(map(float, errors)) < most.get(step, 3), step
        assert (int(different) > 1) == (step == "atomics"), "whether the order changes dw"
    blocks, _ = told.tables  # the second is of a record
    assert blocks.loc[8192, "spilled"] == 0 < blocks.loc[8704, "spilled"]
    assert blocks.loc[8704, "block"] == 16384
    held = told.names["held"]
    assert held.loc[2048, "spilled"] == 0 < held.loc[16384, "spilled"]
    assert held["padding"].tolist() == [7680, 3584, 1536]


def test_numbers_of_the_page_on_steps_that_are_not_bound() -> None:
    """The second run has no name of its own, nor has the version of Triton."""
    text = PAGES[LADDER].read_text("utf-8")
    record = record_of(LADDER, "nvidia-h200")
    again = record.values["prefetch"]["second"]["value"]
    assert text.count(f"{100 * again:.0f} % in the second run") == 2
    versions = record.provenance["backward"].environment["versions"]
    assert f"Triton {versions['triton']}" in text


# --- a backend for torch.compile

LLAMA = "plot_llama_backend"


@on(LLAMA)
def test_the_shortest_backend_is_handed_two_operators(told: Told) -> None:
    text = told.text
    handed = [line.split()[0] for line in text.splitlines()[:5]]
    assert handed == ["placeholder", "placeholder", "call_function", "call_function", "output"]
    assert "the bits of eager PyTorch: True" in text


@on(LLAMA)
def test_each_version_of_the_layer_has_eagers_error(told: Told) -> None:
    live = told.names["live"]
    errors = live["error"].astype(float)
    assert (errors < 2 * errors["eager"]).all()
    counts = live["operators"].drop("eager").astype(int)
    assert counts["with one rule"] == counts["thirty lines"] - 1
    assert counts["thirty lines"] > counts["with tiers 1, 2"] > counts["library, tiers 1 to 3"]


@on(LLAMA)
@pytest.mark.skipif("ROUNDOFF_GPU_HOST" in os.environ, reason="the page times a processor here")
def test_each_operator_adds_its_pass(told: Told) -> None:
    _, four, eight, exponential = told.names["growth"]["ratio"]
    assert exponential < 2, "arithmetic costs no pass"
    assert eight > 2.5, "eight operators cost more than one"
    assert eight > four


# --- ONNX Runtime under torch.compile

WHOLE = "plot_whole_model"


@on(WHOLE)
def test_what_the_page_on_the_whole_model_says_of_its_output(told: Told) -> None:
    seconds = {
        k: float(v) for k, v in re.findall(r"^ ?(\d+) tokens?: ([\d.]+) ms", told.text, re.M)
    }
    assert seconds["16"] < 4 * seconds["1"], "sixteen times the arithmetic, about the same time"
    (share,) = re.findall(r"share of one token: +([\d.]+)%", told.text)
    assert float(share) < 20, "reading the weights is a small part"
    operators, many = re.findall(r"eager, \d+ layers: (\d+) operators", told.text)
    ((nodes, sessions),) = re.findall(r"layers: (\d+) nodes, .* by (\d+) session", told.text)
    assert int(operators) > int(nodes)
    # On CUDA attention of float32 with grouped heads is several operators.
    assert 800 < int(many) < 1300, "about a thousand"
    assert sessions == "1", "one session runs all its nodes"


@on(WHOLE)
@pytest.mark.alone
def test_the_gain_of_a_session_shrinks_with_larger_matrices(told: Told) -> None:
    gains = told.names["gains"]
    assert gains["gain"].iloc[0] > 1.2
    assert gains["gain"].idxmax() == gains.index[0], "largest for the smallest matrices"


@on(WHOLE)
def test_both_texts_are_eagers_and_a_new_length_converts_nothing(told: Told) -> None:
    lines = re.findall(r"(\d) tokens asked, 12 written, (\d+) not.*: (\d+)", told.text)
    (first, *eager), (second, *again) = lines
    assert (first, second) == ("5", "9")
    assert eager == again, "no conversion for the second"
    assert eager[0] == "0"
    assert len(set(told.names["eager"][0])) > 5, "a text that changes"


# --- training on several workers

ALL_REDUCE = "plot_all_reduce_order"


@on(ALL_REDUCE)
def test_what_the_page_on_workers_says_of_its_output(told: Told) -> None:
    names, runs = told.names, told.names["runs"]
    losses = np.array([names["loss_of"](runs[n][-1]) for n in (1, 2, 4, 8)])
    assert len(set(losses)) == 4, "a number of workers changed no loss"
    assert np.ptp(losses) < 1e-8 * losses[0], "the first eight digits agree"
    assert "different results of three runs: 1\n" in told.text
    assert names["sums"] == names["received"].tolist()[::4], "what is drawn was received"
    assert "\ngathered, one gradient a worker: 4\n" in told.text
    assert "\nall-reduced, micro-batches of 8: 4\n" in told.text
    assert "\ngathered, micro-batches of 8: 1\n" in told.text
    assert "as drawn: 0% differ from the orders found,\n" in told.text
    assert float(told.text.split("orders found,\n")[1].split("%")[0]) > 10
    grid = told.text.split("multiples: ")[1]
    assert grid.startswith("0% differ from the orders found,\n    0% from the order of the workers")


@on(ALL_REDUCE)
def test_the_cut_changes_the_loss_and_so_does_the_ring(told: Told) -> None:
    names = told.names
    once, cut, gathered, reduced = names["steps"].values()
    assert np.array_equal(cut, gathered), "sending changes nothing"
    losses = {f"{names['loss_of'](track[-1]):.12f}" for track in (once, cut, reduced)}
    assert len(losses) == 3, "the page prints them"
    # One step, from one start: the cut moves some weights, the ring others.
    assert (once[0] != cut[0]).any()
    assert (gathered[0] != reduced[0]).any()


@on(ALL_REDUCE)
def test_other_batches_move_weights_more_than_workers(told: Told) -> None:
    names = told.names
    drift = names["drift"]
    far = drift.index.str.contains("batches backwards|other batches")
    near = drift[~far]
    distance = near["from 1 worker"]
    assert distance.max() < 1, "less than one unit"
    assert (distance < near["from float64"]).all()
    assert (drift["from 1 worker"][far].min() > 1e5 * distance).all()
    exact = names["truth"]
    alone = names["scaled_error"](exact, names["first"], dtype="float32").rms
    assert (distance < alone).all()
    # "All end about as far from float64 as 1 worker."
    ends = near["from float64"][near.index.str.endswith("workers")]
    assert ends.between(0.8 * alone, 1.25 * alone).all()


@on(ALL_REDUCE)
def test_page_and_study_on_workers_agree_bit_for_bit(told: Told) -> None:
    study = study_of("all_reduce_order")
    teams, steps = study["backends"](), study["STEPS"]
    item = (steps, study["SEED"], "float32")
    theirs = study["run"](teams, "gloo on cpu", study["train"], [item] * 4)
    assert np.array_equal(theirs, told.names["train"](4)[:steps])


# --- one answer alone, and another in a batch

BATCH = "plot_batch_invariance"


@on(BATCH)
def test_what_the_page_on_batches_says_of_its_output(told: Told) -> None:
    names, said = told.names, " ".join(told.text.split())
    assert "alone, again changed: 0%" in said, "not chance"
    short, long = (len(names["trained"].prompt(names[asked])) for asked in ("SKY", "STORY"))
    assert long - short == 5, "five tokens longer"
    assert "without rounding, changed: 0%" in said, "without rounding nothing changes"
    # Products are multiples of 2^-12: below 2^12 their sums have 24 bits, in any order.
    rows, weights = (part.double().abs() for part in names["on_grid"])
    assert (rows @ weights.T).max() < 2**12
    assert names["fixed_text"] == names["batch_text"], "alone and in company"
    assert "logits equal: True product equal: True attention equal: True" in said


@on(BATCH)
def test_the_columns_left_over_by_the_kernel_decide_which_tokens_change(told: Told) -> None:
    """On each processor: torch's kernel takes as many columns at a time as a register has floats.

    4 with NEON, 8 with AVX2, 16 with AVX-512. The page's own ``left_over`` is of 16.
    """
    names = told.names
    found = {}
    for width in (4, 8, 16):
        first = {c: (36 + c) // width * width - c for c in names["tried"]}
        start = 36 // width * width
        expected = {c: min(start, f) if f != start else None for c, f in first.items()}
        found[width] = expected == names["measured"]
    assert list(found.values()).count(True) == 1, found
    assert "equal weights, nothing changed: True" in told.text


@on(BATCH)
def test_page_and_study_of_batches_write_the_same_text(told: Told) -> None:
    study = study_of("batch_invariance")
    names = told.names
    asked = [names["trained"].prompt(names[question]) for question in ("SKY", "STORY")]
    made = study["decode"](names["fixed"], asked, 6, length=60).tokens[0]
    text = names["tokenizer"].decode(made, skip_special_tokens=True)
    assert names["fixed_text"].startswith(text), "another cache and more padding"


def test_what_the_page_on_batches_says_of_its_records() -> None:
    tables = record_of(BATCH, "nvidia-h200").tables
    served = choose(tables["texts"], {"served": "server"}).set_index("way")
    partial = served.loc[["batch_invariant_ops", "two variables"]]
    assert (partial["other texts"] > 0.85 * served["other texts"]["torch"]).all(), "hardly help"
    ways = tables["routes"].set_index("way")["cases"]
    assert ways["kernel"] < 0.1 * ways.sum(), "most products go to cuBLAS"
    slow = choose(tables["cost"], {"roundoff": lambda s: s > 1.15})
    assert set(slow["weight"]) == {"8192 → 1024"}
    assert slow["M"].max() <= 256, "few rows"
    called = choose(tables["called"], {"cache": "dynamic"})
    assert (called["low"] < 1).all(), "elsewhere the changed model takes less time"
    assert (called["other texts"] == 0).all()


# --- trainer and sampler

TRAINER = "plot_trainer_sampler"


@on(TRAINER)
def test_an_invariant_sampler_and_trainer_agree_after_each_update(told: Told) -> None:
    names = told.names
    assert re.findall(r"updates: (\d+) of", told.text) == ["0", "0", "0"]
    assert (names["ratio"] != 1).float().mean() > 0.9, "hardly any ratio of torch's is 1"
    before = dict(names["model"].named_parameters())
    moved = [not torch.equal(p, before[n]) for n, p in names["fixed"].named_parameters()]
    assert sum(moved) > len(moved) / 2, "the updates changed weights"


@on(TRAINER)
def test_what_the_page_on_trainers_says_of_its_output(told: Told) -> None:
    for who in "sampler", "trainer":
        assert f"{who}, changed logits: 0\n" in told.text, "it repeats each bit"
    attention = told.names["parts"].loc["fixed: attention"]
    assert (attention == 0).all(), "attention is the whole cause"


def test_what_the_page_on_trainers_says_of_its_records() -> None:
    tables = record_of(TRAINER, "amd-epyc-2-cores").tables
    found = tables["causes"].set_index("cause")
    whole, cache = found.loc["sampler and trainer"], found.loc["cache, token by token"]
    assert whole["low"] < cache["outside"] < whole["high"], "a cache is as bad as the whole"
    assert (found.loc[["the same again", "each text alone"], "different"] == 0).all()
    shares = found["different"] / found["tokens"]
    some = shares[["5 columns of padding", "packed into one row"]]
    assert some.between(0.1, 0.9).all(), "padding and packing change some tokens"
    assert shares["cache, token by token"] > 0.9, "a cache changes nearly all"
    others = found.loc[["5 columns of padding", "packed into one row"], "outside"]
    assert cache["outside"] > 2 * others.max()
    logits = tables["parts"].pivot(index="cause", columns="fixed", values="logits")
    assert (logits["products"] == logits["nothing"]).all(), "fixed products do not help"
    assert (logits["attention"] == 0).all(), "attention is the whole cause"
    assert not tables["runs"].query("way != 'invariant'")["different"].eq(0).any()
    first, last = (tables["runs"].query(f"step == {step}")["reward"] for step in (0, 5))
    assert (last.to_numpy() > first.to_numpy()).all(), "all runs learn"
    tables = record_of(TRAINER, "nvidia-h100-80gb-hbm3").tables
    found = tables["causes"].set_index("cause")["outside"]
    worse = found[["5 columns of padding", "packed into one row"]]
    assert (worse > found["cache, token by token"]).all(), "padding and packing do more"
    prices = tables["prices"].set_index(["what", "way"])
    assert 0.9 < prices["ratio"]["training step", "float16"] < 1.1, "about the time of bfloat16"
    assert prices["high"]["sampling", "invariant"] < 1, "sampling takes less time than torch's"


@on(TRAINER)
def test_page_and_study_on_trainers_agree_bit_for_bit(told: Told) -> None:
    names = told.names
    study = study_of("trainer_sampler")
    if study["GPU"]:
        pytest.skip("the study runs on the GPU, the page on the processor")
    model, prompts = names["model"], names["prompts"]
    assert study["asked"](8) == prompts
    with torch.no_grad():
        (texts, ours), (_, theirs) = (of["sample"](model, prompts, 3) for of in (names, study))
        assert torch.equal(ours, theirs)
        for function, *how in ["train"], ["one_pass", 5], ["in_chunks", 2]:
            ours, theirs = (of[function](model, texts[:2], *how) for of in (names, study))
            assert torch.equal(ours, theirs)


def test_a_cure_weighs_the_gradient_of_a_token_as_it_says() -> None:
    """PPO's clipping has the gradient that autograd finds; an importance weight has a limit."""
    weights_of = study_of("trainer_sampler")["weights_of"]
    ratio = torch.tensor([[0.2, 0.95, 1.0, 1.05, 7.0]] * 2, requires_grad=True)
    gain = torch.tensor([[1.0], [-2.0]])
    surrogate = torch.minimum(ratio * gain, ratio.clamp(0.9, 1.1) * gain)
    (slope,) = torch.autograd.grad(surrogate.sum(), ratio)
    # The gradient of a ratio is the ratio times that of the log-probability.
    ratio = ratio.detach()
    torch.testing.assert_close(weights_of("clipped", ratio, gain) * gain, slope * ratio)
    assert torch.equal(weights_of("importance weights", ratio, gain), ratio.clamp(max=2))
