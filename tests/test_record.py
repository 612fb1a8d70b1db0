import copy
import json
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roundoff.errors import RecordError
from roundoff.record import RECORDED, read_record, read_records, write_record

ENV = {
    "processor": "Some CPU",
    "cores": 2,
    "python": "3.11.7",
    "versions": {"torch": None},
    "gpu": None,
    "commit": "abc",
}

CELLS = {
    "number": st.floats() | st.just(math.nan) | st.sampled_from([math.inf, -math.inf, -0.0]),
    "integer": st.integers(-(2**53), 2**53),
    "string": st.text(st.characters(codec="utf-8"), max_size=8),
    "boolean": st.booleans(),
}


@st.composite
def frames(draw) -> pd.DataFrame:
    rows = draw(st.integers(1, 4))
    kinds = draw(st.lists(st.sampled_from(sorted(CELLS)), min_size=1, max_size=4))
    return pd.DataFrame(
        {
            f"{kind} {i}": draw(st.lists(CELLS[kind], min_size=rows, max_size=rows))
            for i, kind in enumerate(kinds)
        }
    )


def same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isnan(a) == math.isnan(b) and (math.isnan(a) or a.hex() == b.hex())
    return a == b


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(frame=frames())
def test_a_table_comes_back_bit_for_bit(tmp_path: Path, frame: pd.DataFrame) -> None:
    path = write_record(tmp_path, "plot_x", {"t": frame}, ENV)
    back = read_record(path).tables["t"]
    assert list(back) == list(frame)
    for column in frame:
        pairs = zip(frame[column].tolist(), back[column].tolist(), strict=True)
        assert all(same(a, b) for a, b in pairs), column


def test_numpy_scalars_and_missing_values(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [np.float32(0.1), None], "s": ["a", None], "n": [np.int64(1), 2]})
    back = read_record(write_record(tmp_path, "p", {"t": frame}, ENV)).tables["t"]
    assert back.x[0] == float(np.float32(0.1))
    assert math.isnan(back.x[1])
    assert back.s.tolist() == ["a", None]
    assert back.n.tolist() == [1, 2]


def test_a_part_merges_and_keeps_the_provenance_of_the_rest(tmp_path: Path) -> None:
    old, new = pd.DataFrame({"x": [1]}), pd.DataFrame({"x": [2]})
    write_record(tmp_path, "p", {"a": old, "b": old}, ENV)
    path = write_record(tmp_path, "p", {"b": new}, ENV | {"commit": "def"}, {"config": "large"})
    record = read_record(path)
    assert (record.tables["a"].x[0], record.tables["b"].x[0]) == (1, 2)
    assert record.provenance["a"].commit == "abc"
    assert record.provenance["b"].commit == "def"
    assert record.provenance["b"].options == {"config": "large"}
    write_record(tmp_path, "p", {"a": new}, ENV | {"commit": "123"})
    assert len(json.loads(path.read_text())["runs"]) == 2  # the first run measured nothing left


def test_an_interrupted_write_leaves_the_old_record(tmp_path: Path, monkeypatch) -> None:
    path = write_record(tmp_path, "p", {"a": pd.DataFrame({"x": [1]})}, ENV)
    before = path.read_bytes()

    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_record(tmp_path, "p", {"a": pd.DataFrame({"x": [2]})}, ENV)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    frame = pd.DataFrame({"n": [1], "x": [0.5], "s": ["a"], "b": [True]})
    return write_record(tmp_path, "p", {"t": frame}, ENV)


def fields(data: object, trail: tuple = ()) -> list[tuple]:
    """Every required field of a record, as the keys that lead to it."""
    own = [(*trail, k) for k in data] if isinstance(data, dict) else []
    if trail[-1:] == ("environment",):
        return [t for t in own if t[-1] in ("processor", "python", "versions", "gpu")]
    if trail[-1:] == ("options",):
        return []
    items = data.items() if isinstance(data, dict) else enumerate(data)
    inner = [f for k, v in items if isinstance(v, (dict, list)) for f in fields(v, (*trail, k))]
    return [t for t in own if t != ("tables", "t")] + inner


def test_each_missing_field_is_named_with_its_file(good: Path) -> None:
    whole = json.loads(good.read_text())
    trails = fields(whole)
    assert len(trails) > 20
    for *parents, last in trails:
        broken = copy.deepcopy(whole)
        node = broken
        for key in parents:
            node = node[key]
        del node[last]
        good.write_text(json.dumps(broken))
        with pytest.raises(RecordError, match=rf"\b{last}\b.* is missing") as error:
            read_record(good)
        assert str(good) in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"schema": 1', '"schema": 2', "schema"),
        ('"page": "p"', '"page": "q"', "page"),
        ('"run": 0', '"run": 1', r"tables\.t\.run"),
        ("0.5", '"half"', r"tables\.t\.rows\[0\]\.x"),
        ("[1, 0.5", "[true, 0.5", r"tables\.t\.rows\[0\]\.n"),
        ("[1, 0.5", "[0.5", r"tables\.t\.rows\[0\]"),
        ('"type": "integer"', '"type": "int"', r"columns\[0\]\.type"),
        ('"date": "2', '"date": "x', r"runs\[0\]\.date"),
        ('"schema": 1,', "", "schema is missing"),
        ("{", "", "not a readable JSON file"),
    ],
)
def test_each_broken_value_is_named(good: Path, old: str, new: str, field: str) -> None:
    text = good.read_text()
    assert old in text
    good.write_text(text.replace(old, new, 1))
    with pytest.raises(RecordError, match=field):
        read_record(good)


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"tables.t: column 'x' cannot be recorded: got list"):
        write_record(tmp_path, "p", {"t": pd.DataFrame({"x": [[1]]})}, ENV)
    assert not list(tmp_path.iterdir())


def test_records_that_ship_are_sound() -> None:
    for page in sorted(p.name for p in RECORDED.iterdir() if p.is_dir()):
        for record in read_records(page):
            for run in record.provenance.values():
                assert run.commit, f"{page} on {record.machine} does not say which code ran"
                assert not run.commit.endswith("+"), "recorded with uncommitted changes"


def test_a_page_without_records_has_none(tmp_path: Path) -> None:
    assert read_records("p", tmp_path) == []
