"""Numbers bound in prose: what fails a build, what a reader finds behind a number, what refutes."""

import dataclasses
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from docutils import nodes
from docutils.utils import new_document

from roundoff.page.measurement import Study
from roundoff.page.values import Value
from roundoff.record import RECORDED, Record, read_record, write_record, write_values

from ..paths.pages import PAGES, record_of, study_of
from .conftest import ROOT

sys.path.insert(0, str(ROOT / "conf"))
import evidence

H200, H100 = "nvidia-h200", "nvidia-h100-80gb-hbm3"
ROWS = pd.DataFrame(
    {
        "way": ["np.sum", "float64"],
        "results": [27, 1],
        "ratio": [1.0, 2.33],
        "low": [1.0, 2.3],
        "high": [1.0, 2.4],
    }
)


def study() -> Study:
    made = Study("plot_a", on=H200, part="cpu")
    made.table("t")(lambda args: ROWS)
    made.value(
        "results",
        "results of np.sum",
        "t",
        "results",
        where={"way": "np.sum"},
        test=lambda v: v.value > 1,
    )
    made.value(
        "time",
        "time in float64 over float32",
        "t",
        "ratio",
        where={"way": "float64"},
        interval=("low", "high"),
        words=("faster", "slower"),
    )
    return made


def record(folder: Path, gpu: str = "NVIDIA H200", **changed: Any) -> Path:
    """The record of one machine; *changed* are columns of the second row."""
    env = {
        "processor": "A Xeon",
        "cores": 8,
        "python": "3.12.3",
        "gpu": {"name": gpu},
        "versions": {"torch": "2.11.0", "numpy": "2.5"},
        "os": "",
        "commit": "feed",
    }
    rows = ROWS.assign(**{c: [ROWS[c][0], v] for c, v in changed.items()})
    path = write_record(folder, "plot_a", {"t": rows}, env, parts={"t": "cpu"})
    return write_values(path, study().evaluate(read_record(path)))


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Records of an H200 and an H100; on the second float64 takes no longer."""
    folder = tmp_path / "records"
    record(folder)
    record(folder, "NVIDIA H100 80GB HBM3", ratio=1.0, low=0.9, high=1.1)
    monkeypatch.setattr(evidence, "RECORDED", folder)
    evidence.records_of.cache_clear()
    yield folder
    evidence.records_of.cache_clear()


def test_an_answer_names_the_machine_of_its_own_numbers(records: Path) -> None:
    there = f"results@{H100}"
    both = evidence.where("plot_a", H200, ["results", there])
    assert both.startswith("Measured on A Xeon, 8 cores (host of the NVIDIA H200); torch 2.11.0")
    assert "NVIDIA H100" in evidence.where("plot_a", H100, ["results", there])


def page(*paragraphs: str, machine: str = H200) -> nodes.document:
    """A page with these paragraphs; ``27 <results>`` in brackets is a bound number."""
    tree = new_document("plot_a")
    top = nodes.section("", nodes.title("", "A question"))
    if machine:
        top += nodes.container("", machine=machine, classes=["ro-answer"])
    for words in paragraphs:
        block = nodes.paragraph()
        for i, part in enumerate(words.replace("]", "[").split("[")):
            if i % 2 == 0:
                block += nodes.Text(part)
                continue
            text, target = part[:-1].split(" <")
            block += nodes.reference("", "", nodes.strong(text, text), bound=(text, target))
        top += block
    tree += top
    return tree


def why(*paragraphs: str, **options: str) -> list[str]:
    return [found for _, found in evidence.problems(page(*paragraphs, **options), "plot_a")]


@pytest.mark.parametrize(
    "sentence",
    [
        "np.sum has [27 <results>] results. It takes [2.3 <time>] times as long.",
        "float64 is [slower <time>] here: it takes [about 2.4 <plot_a#time>] times as long.",
        f"On an H100 np.sum has [27 <results@{H100}>] results. No kernel is faster.",
    ],
)
def test_a_true_sentence_passes(records: Path, sentence: str) -> None:
    assert why(sentence) == []


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        ("It has [28 <results>] results.", "results of plot_a on nvidia-h200: 28 is printed"),
        ("It is [faster <time>].", "faster is printed, its interval says slower"),
        ("It is faster by [2.3 <time>].", "faster stands beside time without an interval"),
        ("Slower: [2.3 <time>] times.", "Slower stands beside time"),
        (f"On an H100 it is [slower <time@{H100}>].", "its interval says no difference measured"),
        (f"On an H100 it takes [1.0 <time@{H100}>] times.", "plot_a on .*: its test is false"),
        (f"The H100 is a GPU. It has [27 <results@{H100}>] results.", "does not name H100"),
        ("It has [27 <results@nvidia-b200>] results.", "plot_a on nvidia-b200: no record has it"),
        ("It has [27 <plot_b#results>] results.", "value results of plot_b on : no record has it"),
    ],
)
def test_a_false_sentence_is_named(records: Path, sentence: str, said: str) -> None:
    (found,) = why(f"Nothing here. {sentence} And [27 <results>] here.")
    assert re.search(said, found)
    assert found.startswith("plot_a: ")
    assert "; in: " in found
    assert "Nothing here" not in found.partition("; in: ")[2]


def test_a_page_without_an_answer_names_the_machine_of_each_number(records: Path) -> None:
    (found,) = why("It has [27 <results>] results.", machine="")
    assert "does not name H200" in found
    assert why("On an H200 it has [27 <results>] results.", machine="") == []


def test_the_evidence_shows_every_machine(records: Path) -> None:
    shown = evidence.evidence("plot_a", {"results": ["27"], "time": ["2.3", "slower"]})
    assert shown.index('id="evidence-results"') < shown.index('id="evidence-time"')
    for words in (
        "Evidence: 2 numbers",
        "<b>2.3, slower</b> time in float64 over float32",
        "✓ H200's host: 2.33 [2.3, 2.4]; slower; ",
        "✗ H100's host: 1 [0.9, 1.1]; no difference m",
        "✓ H100's host: 27;",
        f'href="../../records/plot_a/{H100}/t.csv"',
        "commit feed",
        'href="../../records/plot_a/a.py"',
    ):
        assert words in shown, words


ANSWER = """
.. answer:: nvidia-h200

   **Why.** It rounds. There are :bound:`27 <results>` of
   them, in ``np.sum``.

   **The price.** It takes :bound:`2.3 <time>` times as long.

   .. code-block:: python

      x = ":bound:`1 <x>`"

After it :bound:`5 <y>`.
"""


def test_the_sentences_of_an_answer_are_found() -> None:
    assert list(evidence.answer(ANSWER)) == [
        ("There are 27 of them, in np.sum.", [("27", "results")]),
        ("It takes 2.3 times as long.", [("2.3", "time")]),
    ]


# --- the studies of this project: each value can be refuted


def mutants(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Tables that a value must notice: rows lost, numbers scaled, columns mistaken or shuffled."""
    rng, numbers = np.random.default_rng(0), frame.select_dtypes("number")
    yield frame[::2]
    for factor in 0.5, 2.0:
        for column in numbers:
            yield frame.assign(**{column: factor * frame[column]})
    for column, other in itertools.permutations(numbers, 2):
        yield frame.assign(**{column: frame[other]})
    for column in 20 * list(frame):
        yield frame.assign(**{column: rng.permutation(frame[column])})


def is_refuted(value: Value, kept: Record) -> bool:
    """Whether one of the tables turns its test or its word."""
    before = value.entry(kept)
    for mutant in mutants(kept.tables[value.of]):
        changed = dataclasses.replace(kept, tables=kept.tables | {value.of: mutant}, second={})
        try:
            after = value.entry(changed) or before
        except Exception:  # what cannot be evaluated refutes nothing
            continue
        if any(after.get(key) != before.get(key) for key in ("test", "word")):
            return True
    return False


@pytest.mark.parametrize("page", PAGES)
def test_a_mutant_of_its_table_refutes_each_value(page: str) -> None:
    values = study_of(page.removeprefix("plot_"))["study"].values
    kept = {machine: record_of(page, machine) for machine in {value.on for value in values}}
    left = [value.name for value in values if not is_refuted(value, kept[value.on])]
    assert not left, "nothing refutes them: give each test=, as lambda found: 8 < found.value < 14"


def test_each_value_of_a_record_is_printed() -> None:
    printed = set()
    for path in [*ROOT.glob("gallery/*/*.py"), *ROOT.glob("docs/*.rst")]:
        for target in re.findall(r":bound:`[^`<]+<([^>]+)>`", path.read_text("utf-8")):
            printed.add(evidence.split(target, path.stem)[:2])
    for path in RECORDED.glob("*/*.json"):
        record = read_record(path)
        assert not {(record.page, name) for name in record.values} - printed, path
