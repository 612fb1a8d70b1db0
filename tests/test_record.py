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
from roundoff.record import (
    RECORDED,
    read_record,
    read_records,
    row_parts,
    write_record,
    write_values,
)

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


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)
@given(frame=frames())
def test_a_table_comes_back_bit_for_bit(tmp_path: Path, frame: pd.DataFrame) -> None:
    path = write_record(tmp_path, "plot_x", {"t": frame}, ENV)
    back = read_record(path).tables["t"]
    assert list(back) == list(frame)
    for column in frame:
        pairs = zip(frame[column].tolist(), back[column].tolist(), strict=True)
        assert all(same(a, b) for a, b in pairs), column


def test_numpy_scalars_and_missing_values(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": [np.float32(0.1), None], "s": pd.Series(["a", pd.NA], dtype=object)})
    back = read_record(write_record(tmp_path, "p", {"t": frame}, ENV)).tables["t"]
    assert back.x.tolist() == pytest.approx([float(np.float32(0.1)), math.nan], nan_ok=True, rel=0)
    assert back.s.tolist() == ["a", None]


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


FRAME = pd.DataFrame({"n": [1], "x": [0.5], "s": ["a"], "b": [True]})


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A record with a second run of its only table, and a value."""
    write_record(tmp_path, "p", {"t": FRAME}, ENV, parts={"t": "s"})
    again = {"t": FRAME.assign(x=[0.25])}
    path = write_record(tmp_path, "p", again, ENV, times={"t": ["x"]}, second=True)
    return write_values(path, {"v": {"value": 1, "test": True, "about": "a number", "of": "t"}})


def fields(data: object, trail: tuple = ()) -> list[tuple]:
    """Every required field of a record, as the keys that lead to it."""
    own = [(*trail, k) for k in data] if isinstance(data, dict) else []
    if trail[-1:] == ("environment",):
        return [t for t in own if t[-1] in ("processor", "python", "versions", "gpu")]
    if trail[-1:] == ("options",):
        return []
    items = data.items() if isinstance(data, dict) else enumerate(data)
    inner = [f for k, v in items if isinstance(v, (dict, list)) for f in fields(v, (*trail, k))]
    optional = [("tables", "t"), ("tables", "t", "second"), ("tables", "t", "part", "column")]
    optional += [("values",), ("values", "v")]
    return [t for t in own if t not in optional] + inner


def test_each_missing_field_is_named_with_its_file(good: Path) -> None:
    whole = json.loads(good.read_text())
    trails = fields(whole)
    assert len(trails) > 35
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


T, SECOND = ("tables", "t"), ("tables", "t", "second")


@pytest.mark.parametrize(
    ("trail", "value", "field"),
    [
        (("schema",), 3, "schema is not known"),
        (("schema",), True, "schema has a wrong type"),
        (("page",), "q", "page"),
        (("runs", 0, "date"), "x", r"runs\[0\]\.date"),
        ((*T, "run"), 2, r"tables\.t\.run refers"),
        ((*T, "rows", 0, 1), "half", r"tables\.t\.rows\[0\]\.x"),
        ((*T, "rows", 0, 0), True, r"tables\.t\.rows\[0\]\.n"),
        ((*T, "rows", 0, 0), None, r"tables\.t\.rows\[0\]\.n"),
        ((*T, "rows", 0), [0.5], r"tables\.t\.rows\[0\]"),
        ((*T, "columns", 0, "type"), "int", r"columns\[0\]\.type"),
        ((*T, "part"), "CPU", r"tables\.t\.part is not known: got CPU, expected cpu, gpu"),
        ((*T, "part"), 1, r"tables\.t\.part has a wrong type"),
        ((*T, "part"), {"column": "provider"}, r"part\.column names no column.*got provider"),
        ((*T, "part"), {"column": "n"}, r"part\.column: the column's row 0 is no text: got 1"),
        ((*T, "part"), {}, r"part\.column names no column"),
        (SECOND, None, r"tables\.t\.second has a wrong type"),
        ((*SECOND, "run"), 0, r"second\.run is the first run's: got 0"),
        ((*SECOND, "columns", 0, "name"), "y", r"second\.columns\[0\]\.name is no column"),
        ((*SECOND, "rows"), [[0.5], [0.25]], r"second\.rows does not fit .*2 rows, expected 1"),
        ((*SECOND, "rows", 0, 0), "fast", r"second\.rows\[0\]\.x has a wrong type"),
        (("values", "v", "test"), 1, r"values\.v\.test has a wrong type"),
        (("values", "v", "of"), "x", r"values\.v\.of names no table"),
    ],
)
def test_each_broken_value_is_named(good: Path, trail: tuple, value: object, field: str) -> None:
    data = json.loads(good.read_text())
    node = data
    for key in trail[:-1]:
        node = node[key]
    node[trail[-1]] = value
    good.write_text(json.dumps(data))
    with pytest.raises(RecordError, match=field) as error:
        read_record(good)
    assert str(good) in str(error.value)


def test_what_is_no_json_is_named(good: Path) -> None:
    good.write_text(good.read_text()[1:])
    with pytest.raises(RecordError, match="not a readable JSON file"):
        read_record(good)


def test_a_part_is_kept_with_each_table(tmp_path: Path) -> None:
    parts = {"a": "cpu", "b": "gpu", "c": "s"}
    path = write_record(tmp_path, "p", dict.fromkeys("abcd", FRAME), ENV, parts=parts | {"e": "x"})
    assert read_record(path).parts == parts | {"d": None}


def test_a_part_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"field tables\.t\.part.column names no column"):
        write_record(tmp_path, "p", {"t": FRAME}, ENV, parts={"t": "gpuu"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("CUDAExecutionProvider", "gpu"),
        ("cuda:0", "gpu"),
        ("torch on CPU", "cpu"),
        ("Triton, two passes", "gpu"),
        ("Triton on CPU", "cpu"),
        ("sequential", "cpu"),
        (None, None),
    ],
)
def test_a_cell_names_its_part(value: str | None, part: str | None) -> None:
    assert row_parts(pd.DataFrame({"on": [value]}), "on") == [part]


#: A first run: what was measured, in which rows, and what came out.
FIRST = pd.DataFrame(
    {
        "label": ["a", "b"],
        "size": [1, 2],
        "fused": [False, True],
        "median": [1.0, 2.0],
        "repeat": [5, 7],
        "note": [None, None],
        "error": [0.5, 0.75],
    }
)
AGAIN = FIRST.assign(median=[1.5, math.nan], repeat=[6, 7], note=["drifts", None], error=[0.5, 0.8])
TIMES = {"t": ["median", "repeat", "note"]}


def test_a_second_run_keeps_its_times_beside_the_first(tmp_path: Path) -> None:
    tables = {"t": FIRST, "u": FRAME}
    path = write_record(tmp_path, "p", tables, ENV, {"repeat": 1}, parts={"t": "cpu"}, times=TIMES)
    first = read_record(path)
    tables = {"t": AGAIN, "u": FRAME.assign(s=["other"]), "new": FRAME}
    times = TIMES | {"new": ["x"], "not measured": ["x"]}
    # A third run takes the place of the second.
    for again in (AGAIN.assign(median=9.0), AGAIN):
        write_record(tmp_path, "p", tables | {"t": again}, ENV, times=times, second=True)
    record = read_record(path)
    for name, frame in first.tables.items():
        pd.testing.assert_frame_equal(record.tables[name], frame)
    assert record.parts == {"t": "cpu", "u": None}
    assert record.provenance == first.provenance
    assert list(record.second) == ["t"]
    assert list(record.second["t"]) == TIMES["t"]
    assert record.second["t"]["median"].tolist() == pytest.approx([1.5, math.nan], nan_ok=True)
    assert record.second["t"]["note"].tolist() == ["drifts", None]
    assert '\n     [1.5, 6, "drifts"],\n' in path.read_text(), "one row a line"
    assert len(json.loads(path.read_text())["runs"]) == 2


def test_an_ordinary_run_drops_the_second_of_what_it_replaces(tmp_path: Path) -> None:
    write_record(tmp_path, "p", {"t": FIRST, "u": FIRST}, ENV)
    times = TIMES | {"u": TIMES["t"]}
    write_record(tmp_path, "p", {"t": AGAIN, "u": AGAIN}, ENV, times=times, second=True)
    path = write_record(tmp_path, "p", {"t": FIRST}, ENV | {"commit": "def"})
    assert list(read_record(path).second) == ["u"]
    assert len(json.loads(path.read_text())["runs"]) == 3


def again(**changes: list) -> dict[str, pd.DataFrame]:
    return {"t": AGAIN.assign(**changes)}


NO_TIMES = "no times of a table that the first has"


@pytest.mark.parametrize(
    ("tables", "times", "commit", "said"),
    [
        (again(label=["a", "c"]), TIMES, "abc", r"t: row 1 .* 'label': got 'c', expected 'b'; try"),
        (again(label=["a", None]), TIMES, "abc", r"row 1 .* 'label': got None, expected 'b'"),
        (again(size=[1, 3]), TIMES, "abc", r"row 1 .* 'size': got 3, expected 2"),
        (again(fused=[True, True]), TIMES, "abc", r"row 0 .* 'fused': got True, expected False"),
        (again(extra=[1, 2]), TIMES, "abc", r"tables\.t: .* other columns: got label.*extra, exp"),
        ({"t": AGAIN.iloc[:1]}, TIMES, "abc", "another number of rows: got 1, expected 2"),
        (again(), TIMES, "def", "not of the first run's commit: got def, expected abc"),
        ({"u": AGAIN}, {"u": ["median"]}, "abc", NO_TIMES),  # a table the first run did not have
        ({"u": AGAIN}, TIMES, "abc", NO_TIMES),
        (again(), {}, "abc", NO_TIMES),
        ({"t": AGAIN.iloc[:0]}, TIMES, "abc", NO_TIMES),  # shown, but not measured
        ({"none": AGAIN}, {"none": ["median"]}, "abc", NO_TIMES),
    ],
)
def test_a_second_run_of_something_else_is_refused(
    tmp_path: Path, tables: dict, times: dict, commit: str, said: str
) -> None:
    path = write_record(tmp_path, "p", {"t": FIRST, "none": FIRST.iloc[:0]}, ENV)
    before = path.read_bytes()
    with pytest.raises(RecordError, match=said):
        write_record(tmp_path, "p", tables, ENV | {"commit": commit}, times=times, second=True)
    assert path.read_bytes() == before


def test_a_second_run_needs_a_first_and_no_commit(tmp_path: Path) -> None:
    options = {"times": TIMES, "second": True}
    with pytest.raises(RecordError, match=r"there is no first run: .*; try: --record without"):
        write_record(tmp_path, "p", again(), ENV, **options)
    assert not list(tmp_path.iterdir())
    path = write_record(tmp_path, "p", {"t": FIRST}, ENV)
    assert write_record(tmp_path, "p", again(), ENV | {"commit": None}, **options) == path


def test_times_are_columns(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"times are not columns .*: got mean, expected some of"):
        write_record(tmp_path, "p", {"t": FIRST}, ENV, times={"t": ["mean"]})


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"tables.t: column 'x' cannot be recorded: got list"):
        write_record(tmp_path, "p", {"t": pd.DataFrame({"x": [[1]]})}, ENV)
    with pytest.raises(RecordError, match="cannot be recorded: got Object of type set"):
        write_record(tmp_path, "p", {"t": FRAME}, ENV, {"sizes": {1}})
    assert not list(tmp_path.iterdir())


def test_records_that_ship_are_sound() -> None:
    for page in sorted(p.name for p in RECORDED.iterdir() if p.is_dir()):
        for record in read_records(page):
            for run in record.provenance.values():
                assert run.commit, f"{page} on {record.machine} does not say which code ran"
                assert not run.commit.endswith("+"), "recorded with uncommitted changes"
            for name, part in record.parts.items():
                assert part, f"{page} on {record.machine}: what computed {name} is not known"
                assert None not in row_parts(record.tables[name], part)


def test_recorded_gpus_have_the_same_bits_of_our_kernels() -> None:
    records = [r for r in read_records("plot_batch_invariance") if r.machine.startswith("nvidia")]
    assert len(records) >= 2
    for table, keys in {
        "alone": ["dtype", "weight"],
        "attention": ["dtype", "text"],
        "texts": ["served"],
    }.items():
        frames = [r.tables[table] for r in records]
        ours = pd.concat([f[f["way"] == "roundoff"] for f in frames])
        checksums = ours.groupby(keys)["checksum"].agg(["size", "nunique"])
        assert checksums["size"].max() == len(records), table
        assert (checksums["nunique"] == 1).all(), f"{table}\n{checksums}"
