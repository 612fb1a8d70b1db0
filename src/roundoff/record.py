"""Tables and the environment they were measured in, as JSON that a later reader can trust.

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
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import check_mapping
from .environment import machine_name, short_commit
from .errors import RecordError

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "RECORDED",
    "Provenance",
    "Record",
    "check_record",
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

_TYPES: dict[str, tuple[type, ...]] = {
    "number": (int, float),
    "integer": (int,),
    "string": (str,),
    "boolean": (bool,),
}
_PLAIN = (str, int, float, bool)
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
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

    Raises
    ------
    RecordError
        When *part* is neither a part nor a column.

    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({"runtime": ["torch on CPU", "ORT on CUDA", "sequential", None]})
    >>> row_parts(frame, "runtime")
    ['cpu', 'gpu', 'cpu', None]
    >>> row_parts(frame, "gpu")
    ['gpu', 'gpu', 'gpu', 'gpu']
    """
    _check(hasattr(frame, "columns"), "no table", type(frame).__name__, "a pandas.DataFrame")
    _check(part is None or isinstance(part, str), "part is no text", part, "a column's name")
    if part is None or part in _PARTS:
        return [part] * len(frame)
    known = ", ".join(map(str, (*_PARTS, *frame.columns)))
    _check(part in frame.columns, "part names no column", part, known)
    return [_named_part(value) for value in frame[part].tolist()]


def write_record(
    folder: str | Path,
    page: str,
    tables: dict[str, pd.DataFrame],
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
        Whether this is the second run. It keeps each table of *times* that has rows here and that
        the existing record has.

    Raises
    ------
    RecordError
        When a table holds something else; *parts* or *times* names a column that a table lacks; the
        existing file is not a record. For a second run also when there is no record yet, no table
        in common, another commit (unless one is unknown), or rows that do not agree.

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
    machine = machine_name(environment)
    path = _folder_of(page, folder) / f"{machine}.json"
    check_mapping("tables", tables, "names to tables")
    parts = check_mapping("parts", parts or {})
    times = check_mapping("times", times or {}, "tables to their columns")
    options = dict(check_mapping("options", {} if options is None else options))
    encoded = {name: _encode(path, name, frame) for name, frame in tables.items()}
    for name in sorted(encoded.keys() & times.keys()):
        _check_times(f"{path}: tables.{name}", encoded[name], times[name])
    first = "a record of this page and machine to keep the second run's times in"
    there = path.exists() or not second
    _check(there, f"{path}: there is no first run", None, first, "--record without --second")
    data = _load(path) if path.exists() else {"runs": [], "tables": {}}
    run = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": environment.get("commit"),
        "options": options,
        "environment": environment,
    }
    runs = [*data["runs"], run]
    new = len(runs) - 1
    if second:
        measured = _second_runs(path, data["tables"], encoded, times, runs)
    else:
        measured = {
            name: {"run": new, "part": _spelled(parts.get(name)), **table}
            for name, table in encoded.items()
        }
    merged = data["tables"] | measured
    measurements = [*merged.values(), *(t["second"] for t in merged.values() if "second" in t)]
    used = sorted({found["run"] for found in measurements})
    for found in measurements:
        found["run"] = used.index(found["run"])
    data = {"schema": SCHEMA, "page": page, "machine": machine, "runs": [runs[i] for i in used]}
    return _save(path, data | {"tables": merged})


def check_record(record: Any) -> None:
    """Refuse what is no :class:`Record`.

    Raises
    ------
    RecordError

    Examples
    --------
    >>> check_record(Record("plot_x", "m", {}, {}))
    """
    _check(isinstance(record, Record), "record", type(record).__name__, "a Record")


def _check(
    fits: bool, what: str, got: Any = None, expected: str | None = None, hint: str | None = None
) -> None:
    if not fits:
        raise RecordError(what, got=got, expected=expected, hint=hint)


def _file(path: Any) -> Path:
    _check(isinstance(path, (str, Path)), "no path", repr(path)[:80], "the path of a record")
    return Path(path)


def read_record(path: str | Path) -> Record:
    """Read and check one record.

    Raises
    ------
    RecordError
        When the file is no JSON or breaks the schema: names the file and the field.

    Examples
    --------
    >>> path = sorted(RECORDED.glob("plot_gemm_fusion/*.json"))[0]
    >>> record = read_record(path)
    >>> record.machine == path.stem, "times" in record.tables
    (True, True)
    """
    path = _file(path)
    data = _load(path)
    names = [field.name for field in dataclasses.fields(Provenance)]
    runs = [Provenance(*(run[name] for name in names)) for run in data["runs"]]
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
        When *page* is no name, or a file is no record.

    Examples
    --------
    >>> {record.page for record in read_records("plot_gemm_fusion")}, read_records("no_such_page")
    ({'plot_gemm_fusion'}, [])
    """
    return [read_record(path) for path in sorted(_folder_of(page, folder).glob("*.json"))]


def read_table(page: str, machine: str, table: str, columns: Sequence[str]) -> pd.DataFrame:
    """Columns of a table that *machine* recorded for *page*.

    A page runs without its records, too: where *machine* has none, the table has no rows.

    Raises
    ------
    RecordError
        When *page* is no name, a file is no record, or the record lacks the table or a column.

    Examples
    --------
    >>> sizes = "plot_gemm_fusion", "nvidia-h200", "times", ["case", "ratio"]
    >>> read_table(*sizes).columns.tolist(), len(read_table(*sizes)) > 0
    (['case', 'ratio'], True)
    >>> len(read_table("plot_gemm_fusion", "no-such-machine", "times", ["case"]))
    0
    """
    import pandas as pd

    wanted = list(columns)
    for record in read_records(page):
        if record.machine == machine:
            tables = record.tables
            _check(table in tables, f"no table of {page}", repr(table), f"one of {list(tables)}")
            known = list(tables[table])
            missing = [name for name in wanted if name not in known]
            _check(not missing, f"no columns of {table}", repr(missing), f"some of {known}")
            return tables[table][wanted]
    return pd.DataFrame(columns=wanted)


def _folder_of(page: Any, folder: Any) -> Path:
    """The folder of a page's records."""
    fits = isinstance(folder, (str, Path)) and "\0" not in str(folder)
    _check(fits, "no folder", repr(folder)[:80], "the path of a folder")
    fits = isinstance(page, str) and re.fullmatch(r"(?!\.+$)[\w.-]+", page) is not None
    _check(fits, "no name of a page", repr(page)[:80], "such as plot_x")
    return Path(folder) / page


def write_values(path: str | Path, values: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write what a study evaluated into its record, in place of what is there.

    Tables and runs stay as they are: nothing is measured.

    Parameters
    ----------
    path : path
        The record.
    values : mapping
        Name -> fields, among them ``value`` and ``test``, ``about`` and ``of``.

    Raises
    ------
    RecordError
        When the file is no record, or a value lacks a field.

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
    path = _file(path)
    plain = {
        name: dict(check_mapping(f"value {name}", fields))
        for name, fields in check_mapping("values", values).items()
    }
    return _save(path, _load(path) | {"values": plain})


def _named_part(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    words = _NAMES_A_PART.findall(value)
    return "gpu" if words and words[-1].lower() != "cpu" else "cpu"


def _spelled(part: str | None) -> Any:
    """A part as the file has it."""
    return {"column": part} if isinstance(part, str) and part not in _PARTS else part


def _check_times(where: str, table: dict[str, Any], times: Sequence[str]) -> None:
    columns = [column["name"] for column in table["columns"]]
    listed = isinstance(times, Sequence) and not isinstance(times, str) and len(times) > 0
    _check(listed, f"{where}: times", repr(times), "a list of columns")
    absent = ", ".join(map(str, [column for column in times if column not in columns]))
    _check(not absent, f"{where}: times are not columns of the table", absent, _some_of(columns))


def _second_runs(
    path: Path,
    tables: dict[str, Any],
    encoded: dict[str, Any],
    times: Mapping[str, Sequence[str]],
    runs: list[dict[str, Any]],
) -> dict[str, Any]:
    """The tables of the first run that this one, the last of *runs*, measured again."""
    now, found = runs[-1]["commit"], {}
    # A page that was told to measure less shows empty tables for the rest.
    measured = [name for name in times if encoded.get(name, {}).get("rows")]
    for name in measured:
        if not tables.get(name, {}).get("rows"):
            continue
        where, first, again = f"{path}: tables.{name}", tables[name], encoded[name]
        before = runs[first["run"]]["commit"]
        other = f"{where}: the second run is not of the first run's commit"
        _check(not before or not now or before == now, other, now, before, _REPLACE)
        _check_rows(where, first, again, times[name])
        kept = [i for i, column in enumerate(again["columns"]) if column["name"] in times[name]]
        rows = [[row[i] for i in kept] for row in again["rows"]]
        columns = [again["columns"][i] for i in kept]
        second = {"run": len(runs) - 1, "columns": columns, "rows": rows}
        found[name] = first | {"second": second}
    nothing = f"{path}: the second run has no times of a table that the first has"
    _check(bool(found), nothing, ", ".join(measured) or "none", _some_of(tables), _REPLACE)
    return found


_REPLACE = "the options of the first run, or --record without --second, which replaces it"


def _check_rows(
    where: str, first: dict[str, Any], again: dict[str, Any], times: Sequence[str]
) -> None:
    """Whether row by row the two runs measured the same."""
    now, before = (", ".join(c["name"] for c in table["columns"]) for table in (again, first))
    _check(now == before, f"{where}: the second run has other columns", now, before, _REPLACE)
    now, before = (str(len(table["rows"])) for table in (again, first))
    other = f"{where}: the second run has another number of rows"
    _check(now == before, other, now, before, _REPLACE)
    for i, (old, new) in enumerate(zip(first["columns"], again["columns"], strict=True)):
        # Numbers that are not times are results: they may differ, say by an atomic addition.
        if old["name"] in times or old["type"] == new["type"] == "number":
            continue
        for j, (a, b) in enumerate(zip(first["rows"], again["rows"], strict=True)):
            other = f"{where}: row {j} of the second run differs in {old['name']!r}"
            _check(a[i] == b[i], other, repr(b[i]), repr(a[i]), _REPLACE)


def _frame(table: dict[str, Any]) -> pd.DataFrame:
    import pandas as pd

    columns = {
        column["name"]: pd.Series(
            [_decode(row[i], column["type"]) for row in table["rows"]],
            dtype=object if column["type"] in ("string", "boolean") else None,
        )
        for i, column in enumerate(table["columns"])
    }
    return pd.DataFrame(columns)


def _decode(value: Any, kind: str) -> Any:
    if kind == "number":
        if value is None:
            return math.nan
        return _NON_FINITE[value] if isinstance(value, str) else float(value)
    return value


def _encode(path: Path, name: str, frame: pd.DataFrame) -> dict[str, Any]:
    where = f"{path}: tables.{name}"
    kind = type(frame).__name__
    _check(hasattr(frame, "columns"), f"{where} is no table", kind, "a pandas.DataFrame")
    two = f"{where} has two columns of one name"
    _check(frame.columns.is_unique, two, str(list(frame.columns)))
    columns, cells = [], []
    for label, series in frame.items():
        values = [v.item() if hasattr(v, "item") else v for v in series.tolist()]
        is_text = any(isinstance(v, str) for v in values)
        values = [None if _is_missing(v, is_text) else v for v in values]
        kind = _kind_of(values)
        odd = [type(v).__name__ for v in values if not isinstance(v, (*_PLAIN, type(None)))]
        what = f"{where}: column {label!r} cannot be recorded"
        _check(not odd, what, ", ".join(odd[:1]), "numbers, strings, booleans or None")
        columns.append({"name": str(label), "type": kind})
        if kind == "string":
            values = [None if v is None else str(v) for v in values]
        cells.append([_finite(v) if kind == "number" else v for v in values])
    return {"columns": columns, "rows": [list(row) for row in zip(*cells, strict=True)]}


def _is_missing(value: Any, is_text: bool) -> bool:
    """pandas' NA and NaT are missing; NaN is a result among numbers, missing among strings."""
    if type(value).__name__ in ("NAType", "NaTType"):
        return True
    return is_text and isinstance(value, float) and math.isnan(value)


def _kind_of(values: list[Any]) -> str:
    kinds = {type(v) for v in values if v is not None}
    if kinds == {bool}:
        return "boolean"
    if kinds == {int} and None not in values:
        return "integer"
    return "number" if kinds <= {int, float} else "string"


def _finite(value: Any) -> Any:
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def _dumps(data: dict[str, Any]) -> str:
    """JSON with one row of a table a line, so that a change of a record can be read."""
    rows: list[str] = []

    def fold(node: Any) -> Any:
        if isinstance(node, dict):
            return {k: fold(v) for k, v in node.items()}
        if isinstance(node, list) and node and not any(isinstance(v, (dict, list)) for v in node):
            rows.append(json.dumps(node, ensure_ascii=False, allow_nan=False))
            return f"@row {len(rows) - 1}@"
        return [fold(v) for v in node] if isinstance(node, list) else node

    text = json.dumps(fold(data), indent=1, ensure_ascii=False, allow_nan=False)
    return re.sub(r'"@row (\d+)@"', lambda m: rows[int(m[1])], text) + "\n"


def _save(path: Path, data: dict[str, Any]) -> Path:
    """Check a record and put it in the place of the old one, in one step."""
    _validate(path, data)
    try:
        text = _dumps(data)
    except (TypeError, ValueError) as error:
        raise RecordError(
            f"{path}: cannot be recorded", got=str(error), expected="texts, numbers and lists"
        ) from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    except OSError as error:
        raise RecordError(
            f"{path}: no file can be made there", got=str(error.strerror), expected="a folder"
        ) from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
        return path
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: not a readable JSON file", got=str(error)) from error
    _validate(path, data)
    return data


def _validate(path: Path, data: Any) -> None:
    schema = data.get("schema", SCHEMA) if isinstance(data, dict) else SCHEMA
    hint = "another version of roundoff, or recording again"
    known = schema == SCHEMA or not _is_a(schema, int)
    _check(known, f"{path}: field schema is not known here", schema, str(SCHEMA), hint)
    _conform(path, "", data, _SHAPE)
    for name, owner in (("page", path.parent.name), ("machine", path.stem)):
        contradicts = f"{path}: field {name} contradicts the file's place"
        _check(data[name] == owner, contradicts, data[name], owner)
    for i, run in enumerate(data["runs"]):
        try:
            datetime.datetime.fromisoformat(run["date"])
        except ValueError as error:
            no_date = f"{path}: field runs[{i}].date is no date"
            raise RecordError(no_date, got=run["date"]) from error
    for name, table in data["tables"].items():
        where = f"{path}: field tables.{name}"
        _validate_rows(where, table, data["runs"])
        _validate_part(f"{where}.part", table)
        if "second" in table:
            _validate_rows(f"{where}.second", table["second"], data["runs"])
            _validate_second(f"{where}.second", table, table["second"])
    for name, value in data.get("values", {}).items():
        no_table = f"{path}: field values.{name}.of names no table"
        _check(value["of"] in data["tables"], no_table, value["of"], _some_of(data["tables"]))


#: What the file holds: a name that ends in "?" may be missing, "*" stands for any name.
_ROWS = {"run": int, "columns": [{"name": str, "type": str}], "rows": [list]}
_SHAPE = {
    "schema": int,
    "page": str,
    "machine": str,
    "runs": [
        {
            "date": str,
            "commit": (str, type(None)),
            "options": dict,
            "environment": {
                "processor": str,
                "python": str,
                "versions": dict,
                "gpu": (dict, type(None)),
            },
        }
    ],
    "tables": {"*": _ROWS | {"part": (str, dict, type(None)), "second?": _ROWS}},
    "values?": {"*": {"value": (int, float), "test": bool, "about": str, "of": str}},
}


def _conform(path: Path, where: str, value: Any, shape: Any) -> None:
    """Refuse a value that has another shape, by the name of the field."""
    kinds = type(shape) if isinstance(shape, (dict, list)) else shape
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    wanted = " or ".join(kind.__name__ for kind in kinds)
    _check(_is_a(value, kinds), f"{path}: field {where} has a wrong type", value, wanted)
    if isinstance(shape, list):
        for i, item in enumerate(value):
            _conform(path, f"{where}[{i}]", item, shape[0])
    for name, inner in shape.items() if isinstance(shape, dict) else ():
        key = name.removesuffix("?")
        for field in value if name == "*" else [key] if key == name or key in value else []:
            full = f"{where}.{field}".removeprefix(".")
            _check(field in value, f"{path}: field {full} is missing")
            _conform(path, full, value[field], inner)


def _is_a(value: Any, kinds: Any) -> bool:
    """Whether a value is of some kinds; True is no number."""
    return isinstance(value, kinds) and (not isinstance(value, bool) or kinds == (bool,))


def _some_of(names: Iterable[str]) -> str:
    return "some of " + ", ".join(names)


def _validate_part(where: str, table: dict[str, Any]) -> None:
    part = table["part"]
    if not isinstance(part, dict):
        expected = ", ".join(_PARTS) + ", a column or null"
        _check(part in (None, *_PARTS), f"{where} is not known", part, expected)
        return
    column, where = part.get("column"), f"{where}.column"
    # The reader gives a part as one string: a column called "cpu" would be taken for the part.
    names = [c["name"] for c in table["columns"]]
    tellers = [name for name in names if name not in _PARTS]
    no_column = f"{where} names no column that can say it"
    _check(column in tellers, no_column, column, _some_of(tellers))
    for j, row in enumerate(table["rows"]):
        cell = row[names.index(column)]
        no_text = f"{where}: the column's row {j} is no text"
        _check(cell is None or isinstance(cell, str), no_text, cell, "such as CPU or CUDA")


def _validate_second(where: str, table: dict[str, Any], second: dict[str, Any]) -> None:
    run, rows = second["run"], f"{len(second['rows'])} rows"
    _check(run != table["run"], f"{where}.run is the first run's", run, "another run")
    names = [column["name"] for column in table["columns"]]
    for i, column in enumerate(second["columns"]):
        no_column = f"{where}.columns[{i}].name is no column of the table"
        _check(column["name"] in names, no_column, column["name"], _some_of(names))
    expected = len(table["rows"])
    fits = len(second["rows"]) == expected
    _check(fits, f"{where}.rows does not fit the table", rows, str(expected))


def _validate_rows(where: str, table: dict[str, Any], runs: Sequence[Any]) -> None:
    run, columns = table["run"], table["columns"]
    _check(0 <= run < len(runs), f"{where}.run refers to no run", run)
    for i, column in enumerate(columns):
        unknown = f"{where}.columns[{i}].type is not known"
        _check(column["type"] in _TYPES, unknown, column["type"], ", ".join(_TYPES))
    for j, row in enumerate(table["rows"]):
        unlike = f"{where}.rows[{j}] does not fit the columns"
        _check(len(row) == len(columns), unlike, row, f"{len(columns)} values")
        for column, value in zip(columns, row, strict=True):
            if not _fits(value, column["type"]):
                wrong = f"{where}.rows[{j}].{column['name']} has a wrong type"
                raise RecordError(wrong, got=value, expected=column["type"])


def _fits(value: Any, kind: str) -> bool:
    if value is None:
        return kind != "integer"
    if kind == "number" and isinstance(value, str):
        return value in _NON_FINITE
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])
