"""Every claim of the gallery holds on the records, is bound to its numbers, and can be refuted."""

import functools
from pathlib import Path

import pandas as pd
import pytest

from roundoff.page import ClaimError
from roundoff.record import write_record

from . import claims
from .claims import Page, claim_of, pages, study_of

PAGES = {page.name: page for page in pages()}
CLAIMS = [(page.name, name) for page in PAGES.values() for name in page.names()]
each_page = pytest.mark.parametrize("name", PAGES)
each_claim = pytest.mark.parametrize(("name", "claim"), CLAIMS)


@functools.cache
def study(name: str):
    return study_of(PAGES[name])


@each_page
def test_sentences_are_static(name: str) -> None:
    assert claims.misplaced(PAGES[name]) == []


@each_page
def test_every_claim_has_its_expected_verdict_on_the_records(name: str) -> None:
    assert study(name).contradictions() == []


@each_page
def test_every_number_of_the_answer_is_the_one_of_a_claim(name: str) -> None:
    assert claims.misquoted(PAGES[name], study(name)) == []
    assert claims.free_numbers(PAGES[name]) == []


@each_claim
def test_a_number_with_another_last_digit_is_noticed(name: str, claim: str) -> None:
    assert claims.unbound_numbers(study(name), claim_of(study(name), claim)) == []


@each_claim
def test_a_mutant_of_its_table_refutes_it(name: str, claim: str) -> None:
    found = claims.refuted(study(name), claim_of(study(name), claim))
    assert found, (
        f"{name}: nothing refutes claim {claim}: a bound or an identity is a test's matter"
    )


# --- the same on a small page, whose faults are known

H200, H100 = "nvidia-h200", "nvidia-h100-80gb-hbm3"
ROWS = pd.DataFrame({
    "provider": ["CUDA"] * 4, "tf32": ["on", "on", "off", "off"],
    "op": ["MatMul", "LayerNormalization"] * 2, "moved": [0.1216, 0.001, 0.0, 0.001],
    "torch error": [3.2, 3.2, 0.51, 0.51], "ORT error": [0.52, 0.52, 0.49, 0.49],
    "finite": [True, True, True, True],
})  # fmt: skip
TOP = '''"""
A small page
============

One sentence.

.. answer:: nvidia-h200

   * {bullets}

   .. code-block:: python

      rtol = 1.25

Prose with 9.5 times nothing.
"""

import os
import pandas as pd
from roundoff.page import Study

H200 = "nvidia-h200"
OPS = {{"big": "MatMul", "small": "LayerNormalization"}}
study = Study("plot_small")
rows = pd.DataFrame(measured_by_an_experiment())


def moved(t, op="big"):
    return t.set_index("op")["moved"][OPS[op]]


study.table("blame", rows, "What moves Z.")
'''
RATIO = """study.claim("TF32 moves Z {122} times as far.", of="blame", name="far",
            where={"tf32": "on"}, on=H200, value=lambda t: moved(t) / moved(t, "small"))
"""
NOTHING = """study.claim("At matched precision the product moves nothing.", of="blame",
            where={"tf32": "off"}, test=lambda t: moved(t) == 0)
"""


@pytest.fixture
def small(tmp_path: Path):
    """Make a page of claims, and its records."""
    records = tmp_path / "records"
    for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        env = {"processor": "Some CPU", "cores": 2, "python": "3.11.7", "versions": {},
               "gpu": {"name": gpu}, "os": "Linux", "commit": "feed"}  # fmt: skip
        write_record(records, "plot_small", {"blame": ROWS}, env, parts={"blame": "provider"})

    def make(source: str, bullets: str = "Nothing.") -> Page:
        folder = tmp_path / "gallery" / "numerics"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plot_small.py").write_text(TOP.format(bullets=bullets) + source, "utf-8")
        (page,) = pages(tmp_path / "gallery")
        page.records = records
        return page

    return make


def test_a_sound_page_passes_without_running_its_experiment(small) -> None:
    page = small(RATIO + NOTHING, "moves Z :bound:`122 <far>` times as far, in float32")
    assert page.names() == ["far", "blame-2"]
    assert claims.misplaced(page) == []
    study = study_of(page)
    assert [c.name for c in study.claims] == page.names()
    assert study.contradictions() == []
    assert claims.misquoted(page, study) == []
    assert claims.free_numbers(page) == []
    far, nothing = study.claims
    assert claims.unbound_numbers(study, far) == []
    assert claims.refuted(study, far)
    assert "exchanged" in claims.refuted(study, nothing)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("if os.name:\n    " + NOTHING.replace("\n", "\n    "), "no statement of its own"),
        ("for _ in range(2):\n    " + NOTHING.replace("\n", "\n    "), "no statement of its own"),
        ("shown = " + NOTHING, "no statement of its own"),
        (NOTHING.replace('("At', '(f"At'), "no plain string"),
        (NOTHING.replace('nothing."', 'nothing." + "" * len(OPS)'), "no plain string"),
        (NOTHING.replace('("At', '("Not" if OPS else "At'), "no plain string"),
        (NOTHING.replace('of="blame"', 'of=f"blame"'), "of= is no plain string"),
    ],
)  # fmt: skip
def test_a_sentence_that_is_assembled_is_reported(small, source: str, fault: str) -> None:
    found = claims.misplaced(small(source))
    assert fault in "".join(found)
    assert found[0].startswith("plot_small.py:")


def test_a_claim_that_needs_this_build_is_reported(small) -> None:
    page = small(NOTHING.replace("moved(t) == 0", "len(rows) > 0"))
    with pytest.raises(ClaimError, match="plot_small: claims use rows, which comes from this buil"):
        study_of(page)


def test_a_claim_that_the_records_contradict_is_reported(small) -> None:
    study = study_of(small(RATIO.replace("122", "123")))
    (line,) = study.contradictions()
    assert "plot_small: claim far on nvidia-h200" in line


@pytest.mark.parametrize(
    "test",
    [
        'lambda t: True', 't["moved"] >= 0', 't["finite"] | ~t["finite"]', 't["op"].size > 0',
        't["torch error"] + t["ORT error"] > 0', 't["moved"].abs() == t["moved"]',
        't["tf32"].nunique() == 2',
    ],
)  # fmt: skip
def test_a_claim_that_nothing_refutes_is_reported(small, test: str) -> None:
    function = test if test.startswith("lambda") else f"lambda t: {test}"
    study = study_of(small(f'study.claim("It is so.", of="blame", test={function})\n'))
    assert study.contradictions() == []
    assert claims.refuted(study, study.claims[0]) == ""


@pytest.mark.parametrize(
    ("where", "test", "how"),
    [
        ('{"tf32": "on"}', 'moved(t) > moved(t, "small")', "tf32: on and off exchanged"),
        ('{"tf32": "on"}', 't["torch error"] > t["ORT error"]', "columns torch error and ORT"),
        ('{"tf32": "off"}', 't["torch error"] > t["ORT error"]', "exchanged"),
        ('{"tf32": "on"}', 't["torch error"] < 5', "torch error × 2.0"),
        ("{}", 't["finite"].all()', ""),
    ],
)  # fmt: skip
def test_what_refutes_a_claim_is_named(small, where: str, test: str, how: str) -> None:
    source = f'study.claim("It is so.", of="blame", where={where}, test=lambda t: {test})\n'
    study = study_of(small(source))
    assert study.contradictions() == []
    found = claims.refuted(study, study.claims[0])
    assert how in found
    assert bool(found) == bool(how)


@pytest.mark.parametrize(
    ("where", "test"),
    [('{"moved": lambda s: s > 0.1}', 't["moved"] > 0'), ('{"op": "MatMul"}', "moved(t) >= 0")],
)  # fmt: skip
def test_rows_that_are_gone_and_exceptions_refute_nothing(small, where: str, test: str) -> None:
    source = f'study.claim("It is so.", of="blame", where={where}, test=lambda t: {test})\n'
    study = study_of(small(source))
    assert claims.refuted(study, study.claims[0]) == ""


def test_a_number_of_a_machine_without_a_record_is_reported(small) -> None:
    study = study_of(small(RATIO.replace("on=H200", 'on="nvidia-h2000"')))
    assert claims.unbound_numbers(study, study.claims[0]) == [
        "plot_small: claim far prints 122 as 123 unnoticed",
        "plot_small: claim far prints 122 as 121 unnoticed",
    ]
    assert claims.refuted(study, study.claims[0]) == ""


def test_a_number_after_about_is_bound_loosely(small) -> None:
    study = study_of(small(RATIO.replace("{122}", "about {120}")))
    assert study.contradictions() == []
    assert claims.unbound_numbers(study, study.claims[0]) == []
    assert [what for what, _ in claims.other_numbers(study.claims[0])] == ["120 as 180.0"]


@pytest.mark.parametrize(
    ("text", "changed"),
    [("122", ["123", "121"]), ("1,530", ["1,531"]), ("2.4e-5", ["2.5e-5", "2.3e-5"]),
     ("18.9%", ["18.8%"]), ("−0.5", ["−0.6", "−0.4"])],
)  # fmt: skip
def test_a_last_digit_is_changed_by_one(text: str, changed: list[str]) -> None:
    assert claims._changed(text) == changed


@pytest.mark.parametrize(
    ("bullet", "fault"),
    [
        (":bound:`122 <far>`", ""), (":bound:`about 120 <far/1>`", ""),
        (":bound:`122 <plot_small#far>`", ""), (":bound:`121 <far>`", "121 is printed"),
        (":bound:`122 <typo>`", "no claim typo"), (":bound:`122 <far/2>`", "has 1 values"),
        (":bound:`122 <far@nvidia-h100-80gb-hbm3>`", ""),
        (":bound:`121 <far/1@nvidia-h100-80gb-hbm3>`", "121 is printed"),
        (":bound:`122 <far@nvidia-b200>`", "has 0 values"),
        (":bound:`122 <plot_other#far>`", "no such page"), (":bound:`many <far>`", "no number"),
    ],
)  # fmt: skip
def test_a_bound_number_is_the_one_of_its_claim(small, bullet: str, fault: str) -> None:
    page = small(RATIO, f"moves Z {bullet} times as far")
    found = claims.misquoted(page, study_of(page))
    assert fault in "".join(found)
    assert bool(found) == bool(fault)


@pytest.mark.parametrize(
    ("bullet", "found"),
    [
        ("a gap of 0.0186, which", ["0.0186"]), ("it is 122 times as far", ["122 times"]),
        ("it is 122\n     times as far", ["122 times"]), ("3× the time", ["3×"]),
        ("18 % and 5%", ["18 %", "5%"]), ("takes 4 ms", ["4 ms"]), ("1,536 ULP", ["1,536 ULP"]),
        ("−0.5 of it", ["−0.5"]), ("2.4e-5 and", ["2.4e-5"]),
        ("float16 and 255 columns, two times, bfloat16", []), ("``rtol = 1.3e-6`` and 2 sides", []),
        ("ONNX Runtime 1.22.0 and torch 2.11.0", []), (":ref:`3.5 times <x>`", []),
        ("1,152 columns, 10 sizes, H100s, 32 samples", []), ("in :bound:`4.5 <far>` ms", []),
    ],
)  # fmt: skip
def test_numbers_of_the_answer_are_bound(small, bullet: str, found: list[str]) -> None:
    assert claims.free_numbers(small(RATIO, bullet)) == [
        f"plot_small: {number} in the answer is bound to no claim" for number in found
    ]


def test_the_gallery_has_pages_with_claims() -> None:
    assert PAGES
