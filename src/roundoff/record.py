"""Tables and the environment they were measured in, as JSON.

A record is one file a page and machine, ``<folder>/<page>/<machine>.json``:

* ``schema``: version of this layout, 2;
* ``page``, ``machine``: what the file's place says, repeated;
* ``runs``: a list of runs, each with ``date`` (ISO 8601, UTC), ``commit``, ``options`` and
  ``environment`` (:func:`roundoff.environment.environment`);
* ``tables``: name -> ``run`` (index of the run that measured it), ``part`` (see below), ``columns``
  (``name`` and ``type``: number, integer, string or boolean) and ``rows``. Numbers that JSON lacks
  are strings, ``"nan"``, ``"inf"`` and ``"-inf"``; a missing value is null. Where a second run
  repeated the measurement, ``second`` has its ``run``, ``columns`` and ``rows``: the columns of
  times alone, aligned row by row with the first run's;
* ``values``, once a study has evaluated them: name -> ``value``, ``test`` (whether its sentence is
  true here), ``about``, ``of`` (its table) and more of what a page shows of the number.

``part`` says which part of the machine computed the rows: ``"cpu"`` (the host's processor),
``"gpu"``, ``{"column": "provider"}`` where a column says it row by row (:func:`row_parts` reads
it), or null where it is unknown.

A later run of part of a page replaces the tables it measured, with their second runs, and leaves
the others with the run that made them. A run that no table and no second run refers to is dropped.
The values are dropped, too: they were another table's.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .environment import machine_name, short_commit
from .errors import RecordError

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "RECORDED",
    "Provenance",
    "Record",
    "read_record",
    "read_records",
    "read_table",
    "row_parts",
    "write_record",
    "write_values",
]

SCHEMA = 2

#: Folder of the records that ship with the package.
RECORDED = Path(__file__).parent / "recorded"

_PARTS = ("cpu", "gpu")
#: Words that name a part in a cell: "CUDAExecutionProvider", "ORT on CPU", "Triton, two passes".
_NAMES_A_PART = re.compile(r"\b(cpu|cuda|gpu|triton)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Provenance:
    """One run of a page: when, with which code and options, on what.

    Examples
    --------
    >>> run = Provenance("2026-01-31T12:00:00+00:00", "4f2a1c", {"repeat": 5}, {"gpu": None})
    >>> run.date[:10], run.options["repeat"]
    ('2026-01-31', 5)
    """

    date: str
    commit: str | None
    options: dict[str, Any]
    environment: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Record:
    """What was measured for one page on one machine.

    Attributes
    ----------
    page : str
        Name of the page.
    machine : str
        Name of the machine.
    tables : dict
        The tables (:class:`pandas.DataFrame`), by name.
    provenance : dict
        The run (:class:`Provenance`) that measured each table, by the table's name.
    parts : dict
        What computed the rows of each table, by the table's name: ``"cpu"`` (the host's
        processor), ``"gpu"``, the name of the column that says so, or None where it is unknown. No
        column of that role is named ``cpu`` or ``gpu``.
    second : dict
        For tables that were measured again: their columns of times in the second run, row by row
        as in the table.
    values : dict
        What a study evaluated for pages to print, by name: the names of the file's fields.

    Examples
    --------
    >>> import pandas as pd
    >>> record = Record("plot_x", "a-machine", {"t": pd.DataFrame({"n": [1, 2]})}, {})
    >>> record.tables["t"]["n"].sum()
    np.int64(3)
    """

    page: str
    machine: str
    tables: dict[str, pd.DataFrame]
    provenance: dict[str, Provenance]
    parts: dict[str, str | None] = dataclasses.field(default_factory=dict)
    second: dict[str, pd.DataFrame] = dataclasses.field(default_factory=dict)
    values: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def commits(self) -> list[str]:
        """Commits of the code that ran, ten digits each, the newest run's first."""
        runs = sorted(self.provenance.values(), key=lambda run: run.date, reverse=True)
        return list(dict.fromkeys(short_commit(run.commit) for run in runs))


def row_parts(frame: pd.DataFrame, part: str | None) -> list[str | None]:
    """Which part of the machine computed each row of *frame*.

    Where a column says it, the last word that names a part counts: CUDA, GPU and Triton name the
    GPU, CPU names the host's processor, in any case and with any ending
    (``CUDAExecutionProvider``, ``cuda:0``). Text without such a word is of the host's processor; a
    missing value is unknown.

    Parameters
    ----------
    frame : pandas.DataFrame
        A table.
    part : str or None
        As in ``Record.parts``: ``"cpu"``, ``"gpu"``, the name of a column, or None.

    Returns
    -------
    list of str or None
        ``"cpu"``, ``"gpu"`` or None, one a row.

    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"runtime": ["Triton on CPU", "cuda:0", "sequential", None]})
    >>> row_parts(frame, "runtime")
    ['cpu', 'gpu', 'cpu', None]
    >>> row_parts(frame, "gpu")
    ['gpu', 'gpu', 'gpu', 'gpu']
    """
    if part is None or part in _PARTS:
        return [part] * len(frame)
    return [_named_part(value) for value in frame[part]]


def _named_part(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    words = _NAMES_A_PART.findall(value)
    return "gpu" if words and words[-1].lower() != "cpu" else "cpu"


def write_record(
    folder: str | Path,
    page: str,
    tables: Mapping[str, pd.DataFrame],
    environment: dict[str, Any],
    options: dict[str, Any] | None = None,
    *,
    parts: Mapping[str, str | None] | None = None,
    times: Mapping[str, Sequence[str]] | None = None,
    second: bool = False,
) -> Path:
    """Write, or merge into, ``<folder>/<page>/<machine>.json``.

    The file is replaced in one step: whoever reads it sees the old record or the new one.

    With *second*, nothing of the first run is replaced: its tables get the times of this run beside
    theirs, so that a reader sees how far two runs of the same code are apart. This needs rows that
    mean the same, hence text, booleans and integers outside *times* must agree row by row. Other
    numbers may differ and are not kept. A second run that was kept before is replaced.

    Parameters
    ----------
    folder : path
        Where records live; made when missing.
    page : str
        Name of the page.
    tables : dict of str to pandas.DataFrame
        Tables of numbers, strings, booleans and None; the index is not kept.
    environment : dict
        As :func:`roundoff.environment.environment` gives it.
    options : dict, optional
        The options the page ran with.
    parts : dict, optional
        Table -> what computed its rows: ``"cpu"``, ``"gpu"``, the name of the column that says so,
        or None where it is unknown, which is also what a table has that is not named.
    times : dict, optional
        Table -> its columns that a second run keeps: times, and what changes with them from run to
        run (numbers of rounds, notes). Tables that this run has not measured may be among them.
    second : bool
        Whether this is the second run. It keeps each table of *times* that both runs have.

    Raises
    ------
    RecordError
        When a column holds something else, or the rows of a second run do not agree.

    Examples
    --------
    >>> import tempfile
    >>> import pandas as pd
    >>> from roundoff.environment import environment
    >>> tables = {"t": pd.DataFrame({"n": [1], "median": [2.5]})}
    >>> again = {"t": pd.DataFrame({"n": [1], "median": [2.75]})}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = write_record(folder, "plot_x", tables, environment(), parts={"t": "cpu"})
    ...     path = write_record(
    ...         folder, "plot_x", again, environment(), times={"t": ["median"]}, second=True
    ...     )
    ...     record = read_record(path)
    >>> record.tables["t"]["median"].tolist(), record.second["t"]["median"].tolist()
    ([2.5], [2.75])
    >>> record.parts["t"]
    'cpu'
    """
    parts, times = parts or {}, times or {}
    machine = machine_name(environment)
    path = Path(folder, page, f"{machine}.json")
    data = _load(path) if second or path.exists() else {"runs": [], "tables": {}}
    run = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": environment.get("commit"),
        "options": options or {},
        "environment": environment,
    }
    runs = [*data["runs"], run]
    merged = dict(data["tables"])
    for name, frame in tables.items():
        measured = {"run": len(runs) - 1}
        if not second:
            part = parts.get(name)
            spelled = part if part is None or part in _PARTS else {"column": part}
            merged[name] = measured | {"part": spelled} | _encode(name, frame)
        elif name in merged and name in times:
            again = _times_again(name, merged[name], frame, times[name])
            merged[name] = merged[name] | {"second": measured | again}
    measurements = [*merged.values(), *(t["second"] for t in merged.values() if "second" in t)]
    used = sorted({found["run"] for found in measurements})
    for found in measurements:
        found["run"] = used.index(found["run"])
    data = {"schema": SCHEMA, "page": page, "machine": machine, "runs": [runs[i] for i in used]}
    return _save(path, data | {"tables": merged})


def _times_again(
    name: str, first: dict[str, Any], again: pd.DataFrame, times: Sequence[str]
) -> dict[str, Any]:
    """The times of a second run, whose rows must mean what those of the first run mean."""
    from pandas.testing import assert_frame_equal

    # Numbers that are not times are results: they may differ, say by an atomic addition.
    before, now = (
        frame.drop(columns=list(times)).select_dtypes(exclude="float")
        for frame in (_frame(first), _frame(_encode(name, again)))
    )
    try:
        assert_frame_equal(before, now, check_exact=True)
    except AssertionError as error:
        raise RecordError(
            f"table {name}: the second run has other rows",
            got=str(error),
            hint="the options of the first run, or --record without --second, which replaces it",
        ) from error
    return _encode(name, again[list(times)])


def write_values(path: str | Path, values: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write what a study evaluated into its record, in place of what is there.

    Tables and runs stay as they are: nothing is measured.

    Parameters
    ----------
    path : path
        The record.
    values : mapping
        Name -> fields, among them ``value`` and ``test``, ``about`` and ``of``.

    Examples
    --------
    >>> import tempfile
    >>> import pandas as pd
    >>> from roundoff.environment import environment
    >>> tables = {"t": pd.DataFrame({"n": [1]})}
    >>> value = {"value": 1, "test": True, "about": "a number", "of": "t"}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = write_record(folder, "plot_x", tables, environment())
    ...     read_record(write_values(path, {"n": value})).values["n"]["value"]
    1
    """
    return _save(Path(path), _load(Path(path)) | {"values": dict(values)})


def read_record(path: str | Path) -> Record:
    """Read one record.

    Raises
    ------
    RecordError
        When the file is no record of this version.

    Examples
    --------
    >>> path = sorted(RECORDED.glob("plot_gemm_fusion/*.json"))[0]
    >>> record = read_record(path)
    >>> record.machine == path.stem, "times" in record.tables
    (True, True)
    """
    data = _load(Path(path))
    runs = [Provenance(**run) for run in data["runs"]]
    record = Record(data["page"], data["machine"], {}, {}, values=data.get("values", {}))
    for name, table in data["tables"].items():
        part = table["part"]
        record.tables[name], record.provenance[name] = _frame(table), runs[table["run"]]
        record.parts[name] = part["column"] if isinstance(part, dict) else part
        if "second" in table:
            record.second[name] = _frame(table["second"])
    return record


def read_records(page: str, folder: str | Path = RECORDED) -> list[Record]:
    """The records of *page*, in the order of the machines' names; none is an empty list.

    Raises
    ------
    RecordError
        When a file is no record of this version.

    Examples
    --------
    >>> {record.page for record in read_records("plot_gemm_fusion")}, read_records("no_such_page")
    ({'plot_gemm_fusion'}, [])
    """
    return [read_record(path) for path in sorted(Path(folder, page).glob("*.json"))]


def read_table(page: str, machine: str, table: str, columns: Sequence[str]) -> pd.DataFrame:
    """Columns of a table that *machine* recorded for *page*.

    A page runs without its records, too: where *machine* has none, the table has no rows.

    Raises
    ------
    RecordError
        When the record lacks the table or a column, or a file is no record of this version.

    Examples
    --------
    >>> sizes = "plot_gemm_fusion", "nvidia-h200", "times", ["case", "ratio"]
    >>> read_table(*sizes).columns.tolist(), len(read_table(*sizes)) > 0
    (['case', 'ratio'], True)
    >>> len(read_table("plot_gemm_fusion", "no-such-machine", "times", ["case"]))
    0
    """
    import pandas as pd

    for record in read_records(page):
        if record.machine == machine:
            try:
                return record.tables[table][list(columns)]
            except KeyError as error:
                raise RecordError(
                    f"{page} on {machine} has no such table or column",
                    got=str(error),
                    expected=str({name: list(frame) for name, frame in record.tables.items()}),
                ) from error
    return pd.DataFrame(columns=list(columns))


def _frame(table: dict[str, Any]) -> pd.DataFrame:
    import pandas as pd

    columns = {}
    for i, column in enumerate(table["columns"]):
        kind, cells = column["type"], [row[i] for row in table["rows"]]
        if kind == "number":
            cells = [math.nan if cell is None else float(cell) for cell in cells]
        dtype = object if kind in ("string", "boolean") else None
        columns[column["name"]] = pd.Series(cells, dtype=dtype)
    return pd.DataFrame(columns)


def _encode(name: str, frame: pd.DataFrame) -> dict[str, Any]:
    from pandas.api.types import is_float_dtype

    columns, cells = [], []
    for label, series in frame.items():
        # NaN is a result among numbers, and missing among strings.
        if not is_float_dtype(series):
            series = series.astype(object).where(series.notna(), None)
        values = [v.item() if hasattr(v, "item") else v for v in series.tolist()]
        kind = _kind_of(values)
        if kind is None:
            raise RecordError(
                f"column {label!r} of table {name}",
                got=sorted({type(v).__name__ for v in values}),
                expected="numbers, or strings, or booleans",
            )
        columns.append({"name": str(label), "type": kind})
        cells.append([_finite(v) for v in values])
    return {"columns": columns, "rows": [list(row) for row in zip(*cells, strict=True)]}


def _kind_of(values: Sequence[Any]) -> str | None:
    kinds = {type(v) for v in values if v is not None}
    if kinds == {bool}:
        return "boolean"
    if kinds == {str}:
        return "string"
    if kinds == {int} and None not in values:
        return "integer"
    return "number" if kinds <= {int, float} else None


def _finite(value: Any) -> Any:
    """A float that JSON lacks as a string, which float() reads."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _dumps(data: dict[str, Any]) -> str:
    """JSON with one row of a table a line, so that a change of a record can be read."""
    text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    row = re.compile(r"\[\n +([^][{}]+?)\n +\]")  # a line of JSON ends in no string
    return row.sub(lambda m: "[" + re.sub(r",\n +", ", ", m[1]) + "]", text) + "\n"


def _save(path: Path, data: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".part")
    written.write_text(_dumps(data), "utf-8")
    return written.replace(path)


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise RecordError(f"{path} is no JSON", got=str(error)) from error
    if data.get("schema") != SCHEMA:
        hint = "another version of roundoff, or recording again"
        raise RecordError(
            f"schema of {path}", got=data.get("schema"), expected=str(SCHEMA), hint=hint
        )
    return data
