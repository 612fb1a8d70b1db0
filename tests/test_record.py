import json
import math
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
    frame = pd.DataFrame({"x": [np.float32(0.5), None], "s": pd.Series(["a", pd.NA], dtype=object)})
    back = read_record(write_record(tmp_path, "p", {"t": frame}, ENV)).tables["t"]
    assert back.x.fillna(-1).tolist() == [0.5, -1]
    assert back.s.tolist() == ["a", None]


def test_a_part_merges_and_keeps_the_provenance_of_the_rest(tmp_path: Path) -> None:
    old, new = pd.DataFrame({"x": [1]}), pd.DataFrame({"x": [2]})
    write_record(tmp_path, "p", {"a": old, "b": old}, ENV)
    path = write_record(tmp_path, "p", {"b": new}, ENV | {"commit": "def"}, {"config": "large"})
    record = read_record(path)
    assert (record.tables["a"].x[0], record.tables["b"].x[0]) == (1, 2)
    assert [run.commit for run in record.provenance.values()] == ["abc", "def"]
    assert record.provenance["b"].options == {"config": "large"}
    write_record(tmp_path, "p", {"a": new}, ENV | {"commit": "123"})
    assert len(json.loads(path.read_text())["runs"]) == 2  # the first run measured nothing left


FRAME = pd.DataFrame({"n": [1], "x": [0.5], "s": ["a"], "b": [True]})


def test_a_part_is_kept_with_each_table(tmp_path: Path) -> None:
    parts = {"a": "cpu", "b": "gpu", "c": "s"}
    path = write_record(tmp_path, "p", dict.fromkeys("abcd", FRAME), ENV, parts=parts | {"e": "x"})
    assert read_record(path).parts == parts | {"d": None}


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
    for _ in range(2):  # a third run takes the place of the second
        write_record(tmp_path, "p", tables, ENV, times=times, second=True)
    record = read_record(path)
    for name, frame in first.tables.items():
        pd.testing.assert_frame_equal(record.tables[name], frame)
    assert record.parts == {"t": "cpu", "u": None}
    assert record.provenance == first.provenance
    assert list(record.second) == ["t"]
    assert list(record.second["t"]) == TIMES["t"]
    assert record.second["t"]["median"].tolist() == pytest.approx([1.5, math.nan], nan_ok=True)
    assert record.second["t"]["note"].tolist() == ["drifts", None]
    assert len(json.loads(path.read_text())["runs"]) == 2


def test_an_ordinary_run_drops_the_second_of_what_it_replaces(tmp_path: Path) -> None:
    both, times = ["t", "u"], dict.fromkeys("tu", TIMES["t"])
    write_record(tmp_path, "p", dict.fromkeys(both, FIRST), ENV)
    write_record(tmp_path, "p", dict.fromkeys(both, AGAIN), ENV, times=times, second=True)
    path = write_record(tmp_path, "p", {"t": FIRST}, ENV | {"commit": "def"})
    assert list(read_record(path).second) == ["u"]
    assert len(json.loads(path.read_text())["runs"]) == 3


@pytest.mark.parametrize(
    "again",
    [
        AGAIN.assign(label=["a", "c"]),
        AGAIN.assign(size=[1, 3]),
        AGAIN.assign(extra=[1, 2]),
        AGAIN.iloc[:1],
    ],
)
def test_a_second_run_of_other_rows_is_refused(tmp_path: Path, again: pd.DataFrame) -> None:
    path = write_record(tmp_path, "p", {"t": FIRST}, ENV)
    before = path.read_bytes()
    with pytest.raises(RecordError, match="table t: the second run has other rows"):
        write_record(tmp_path, "p", {"t": again}, ENV, times=TIMES, second=True)
    assert path.read_bytes() == before


def test_records_that_ship_are_sound() -> None:
    for page in sorted(p.name for p in RECORDED.iterdir() if p.is_dir()):
        assert {path.stem for path in (RECORDED / page).glob("*.json")} == {
            record.machine for record in read_records(page) if record.page == page
        }
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
