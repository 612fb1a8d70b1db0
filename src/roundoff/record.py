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
from collections.abc import Mapping, Sequence
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
        column of that role is named ``cpu`` or ``gpu``. :meth:`part_of` sums it up.
    second : dict
        For tables that were measured again: their columns of times in the second run, row by row
        as in the table.
    second_provenance : dict
        The run (:class:`Provenance`) that measured each of these.
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
    second_provenance: dict[str, Provenance] = dataclasses.field(default_factory=dict)
    values: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def part_of(self, name: str) -> str | None:
        """The part that computed every row of table *name*; None: several, or unknown.

        Parameters
        ----------
        name : str
            A table of this record.

        Returns
        -------
        str or None
            ``"cpu"``, ``"gpu"`` or None.

        Raises
        ------
        RecordError
            When the record has no such table.

        Examples
        --------
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"provider": ["CUDA", "CUDA"]})
        >>> Record("p", "m", {"t": frame}, {}, {"t": "provider"}).part_of("t")
        'gpu'
        """
        if name not in self.tables:
            raise RecordError(
                f"{self.page} on {self.machine}: no such table",
                got=name,
                expected=", ".join(self.tables),
            )
        part = self.parts.get(name)
        if part is None or part in _PARTS:
            return part
        found = set(row_parts(self.tables[name], part))
        return found.pop() if len(found) == 1 else None

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
    if not hasattr(frame, "columns"):
        raise RecordError("no table", got=type(frame).__name__, expected="a pandas.DataFrame")
    if part is None or part in _PARTS:
        return [part] * len(frame)
    if part not in frame.columns:
        raise RecordError(
            "part names no column",
            got=part,
            expected=", ".join(map(str, (*_PARTS, *frame.columns))),
        )
    return [_named_part(value) for value in frame[part].tolist()]


def write_record(
    folder: str | Path,
    page: str,
    tables: dict[str, pd.DataFrame],
    environment: dict[str, Any],
    options: dict[str, Any] | None = None,
    *,
    parts: Mapping[str, str | Mapping[str, str] | None] | None = None,
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
        Table -> what computed its rows: ``"cpu"``, ``"gpu"``, the name of the column that says so
        (or ``{"column": name}``, as the file spells it), or None where it is unknown, which is also
        what a table has that is not named.
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
    >>> record.part_of("t")
    'cpu'
    """
    machine = machine_name(environment)
    path = _folder_of(page, folder) / f"{machine}.json"
    check_mapping("tables", tables, "names to tables")
    parts = check_mapping("parts", parts or {})
    times = check_mapping("times", times or {}, "tables to their columns")
    _check_plain(path, "options", check_mapping("options", options or {}))
    encoded = {name: _encode(path, name, frame) for name, frame in tables.items()}
    for name in sorted(encoded.keys() & times.keys()):
        _check_times(path, name, encoded[name], times[name])
    if second and not path.exists():
        raise RecordError(
            f"{path}: there is no first run",
            expected="a record of this page and machine to keep the second run's times in",
            hint="--record without --second",
        )
    data = _load(path) if path.exists() else {"runs": [], "tables": {}}
    run = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": environment.get("commit"),
        "options": options or {},
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
    used = sorted({i for table in merged.values() for i in _runs_of(table)})
    data = {
        "schema": SCHEMA,
        "page": page,
        "machine": machine,
        "runs": [runs[i] for i in used],
        "tables": {name: _renumbered(table, used) for name, table in merged.items()},
    }
    _validate(path, data)
    _replace(path, _dumps(data))
    return path


def check_record(record: Any) -> None:
    """Refuse what is no :class:`Record`.

    Raises
    ------
    RecordError

    Examples
    --------
    >>> check_record(Record("plot_x", "m", {}, {}))
    """
    if not isinstance(record, Record):
        raise RecordError("record", got=type(record).__name__, expected="a Record")


def _file(path: Any) -> Path:
    if not isinstance(path, (str, Path)):
        raise RecordError("no path", got=repr(path)[:80], expected="the path of a record")
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
    runs = [
        Provenance(**{f.name: run[f.name] for f in dataclasses.fields(Provenance)})
        for run in data["runs"]
    ]
    tables = data["tables"]
    again = {name: table["second"] for name, table in tables.items() if "second" in table}
    return Record(
        data["page"],
        data["machine"],
        {name: _frame(table) for name, table in tables.items()},
        {name: runs[table["run"]] for name, table in tables.items()},
        {name: _part_name(table["part"]) for name, table in tables.items()},
        {name: _frame(table) for name, table in again.items()},
        {name: runs[table["run"]] for name, table in again.items()},
        data.get("values", {}),
    )


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


def _folder_of(page: Any, folder: Any) -> Path:
    """The folder of a page's records."""
    if not isinstance(folder, (str, Path)) or "\0" in str(folder):
        raise RecordError("no folder", got=repr(folder)[:80], expected="the path of a folder")
    if not isinstance(page, str) or not re.fullmatch(r"[\w.-]+", page) or page in (".", ".."):
        raise RecordError("no name of a page", got=repr(page)[:80], expected="such as plot_x")
    return Path(folder) / page


def _check_plain(path: Path, name: str, values: Mapping[str, Any]) -> None:
    try:
        json.dumps(dict(values), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(
            f"{path}: {name} cannot be recorded",
            got=str(error),
            expected="texts, numbers and lists",
        ) from error


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
    for name, fields in check_mapping("values", values).items():
        check_mapping(f"value {name}", fields)
        if isinstance(number := fields.get("value"), float) and not math.isfinite(number):
            raise RecordError(f"{path}: value {name}", got=number, expected="a finite number")
    data = _load(path) | {"values": {name: dict(fields) for name, fields in values.items()}}
    _validate(path, data)
    _replace(path, _dumps(data))
    return path


def _named_part(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    words = _NAMES_A_PART.findall(value)
    return "gpu" if words and words[-1].lower() != "cpu" else "cpu"


def _spelled(part: str | Mapping[str, str] | None) -> Any:
    """A part as the file has it."""
    if isinstance(part, Mapping):
        return dict(part)
    return {"column": part} if isinstance(part, str) and part not in _PARTS else part


def _part_name(part: Any) -> str | None:
    """A part as :class:`Record` has it."""
    return part["column"] if isinstance(part, dict) else part


def _runs_of(table: dict[str, Any]) -> list[int]:
    return [table["run"]] + ([table["second"]["run"]] if "second" in table else [])


def _renumbered(table: dict[str, Any], used: list[int]) -> dict[str, Any]:
    table = table | {"run": used.index(table["run"])}
    if "second" in table:
        table["second"] = table["second"] | {"run": used.index(table["second"]["run"])}
    return table


def _check_times(path: Path, name: str, table: dict[str, Any], times: Sequence[str]) -> None:
    columns = [column["name"] for column in table["columns"]]
    if isinstance(times, str) or not isinstance(times, Sequence):
        raise RecordError(
            f"{path}: tables.{name}: times", got=repr(times), expected="a list of columns"
        )
    absent = [column for column in times if column not in columns]
    if absent or not times:
        raise RecordError(
            f"{path}: tables.{name}: times are not columns of the table",
            got=", ".join(absent) or "no column",
            expected="some of " + ", ".join(columns),
        )


def _second_runs(
    path: Path,
    tables: dict[str, Any],
    encoded: dict[str, Any],
    times: Mapping[str, Sequence[str]],
    runs: list[dict[str, Any]],
) -> dict[str, Any]:
    """The tables of the first run that this one, the last of *runs*, measured again."""
    found = {}
    for name, columns in times.items():
        # A page that was told to measure less shows empty tables for the rest.
        if not tables.get(name, {}).get("rows") or not encoded.get(name, {}).get("rows"):
            continue
        first, again = tables[name], encoded[name]
        before, now = runs[first["run"]]["commit"], runs[-1]["commit"]
        if before and now and before != now:
            raise RecordError(
                f"{path}: tables.{name}: the second run is not of the first run's commit",
                got=now,
                expected=before,
                hint="--record without --second, which replaces the first run",
            )
        _check_rows(path, name, first, again, columns)
        kept = [i for i, column in enumerate(again["columns"]) if column["name"] in columns]
        found[name] = first | {
            "second": {
                "run": len(runs) - 1,
                "columns": [again["columns"][i] for i in kept],
                "rows": [[row[i] for i in kept] for row in again["rows"]],
            }
        }
    if not found:
        raise RecordError(
            f"{path}: the second run has no times of a table that the first has",
            got=", ".join(name for name in times if encoded.get(name, {}).get("rows")) or "none",
            expected="some of " + ", ".join(tables),
            hint="the options of the first run",
        )
    return found


def _check_rows(
    path: Path, name: str, first: dict[str, Any], again: dict[str, Any], times: Sequence[str]
) -> None:
    """Whether row by row the two runs measured the same."""
    where = f"{path}: tables.{name}"
    hint = "the options of the first run, or --record without --second, which replaces it"
    names = [[column["name"] for column in table["columns"]] for table in (first, again)]
    if names[0] != names[1]:
        raise RecordError(
            f"{where}: the second run has other columns",
            got=", ".join(names[1]),
            expected=", ".join(names[0]),
            hint=hint,
        )
    if len(first["rows"]) != len(again["rows"]):
        raise RecordError(
            f"{where}: the second run has another number of rows",
            got=len(again["rows"]),
            expected=str(len(first["rows"])),
            hint=hint,
        )
    for i, (old, new) in enumerate(zip(first["columns"], again["columns"], strict=True)):
        # Numbers that are not times are results: they may differ, say by an atomic addition.
        if old["name"] in times or old["type"] == new["type"] == "number":
            continue
        for j, rows in enumerate(zip(first["rows"], again["rows"], strict=True)):
            if rows[0][i] != rows[1][i]:
                raise RecordError(
                    f"{where}: row {j} of the second run differs in {old['name']!r}",
                    got=repr(rows[1][i]),
                    expected=repr(rows[0][i]),
                    hint=hint,
                )


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
    if not hasattr(frame, "columns"):
        raise RecordError(
            f"{path}: tables.{name} is no table", got=type(frame).__name__,
            expected="a pandas.DataFrame",
        )  # fmt: skip
    if not frame.columns.is_unique:
        raise RecordError(
            f"{path}: tables.{name} has two columns of one name", got=str(list(frame.columns))
        )
    columns, cells = [], []
    for label, series in frame.items():
        values = [v.item() if hasattr(v, "item") else v for v in series.tolist()]
        is_text = any(isinstance(v, str) for v in values)
        values = [None if _is_missing(v, is_text) else v for v in values]
        kind = _kind_of(values)
        if kind is None:
            odd = next(v for v in values if not isinstance(v, (str, int, float, bool, type(None))))
            raise RecordError(
                f"{path}: tables.{name}: column {label!r} cannot be recorded",
                got=type(odd).__name__,
                expected="numbers, strings, booleans or None",
            )
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


def _kind_of(values: list[Any]) -> str | None:
    kinds = {type(v) for v in values if v is not None}
    if kinds <= {bool} and kinds:
        return "boolean"
    if kinds <= {int} and kinds and None not in values:
        return "integer"
    if kinds <= {int, float}:
        return "number"
    return "string" if kinds <= {str, int, float, bool} else None


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


def _replace(path: Path, text: str) -> None:
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


def _field(path: Path, parent: Any, where: str, name: str, kind: type | tuple[type, ...]) -> Any:
    full = f"{where}.{name}".removeprefix(".")
    wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
    if not isinstance(parent, dict) or name not in parent:
        raise RecordError(f"{path}: field {full} is missing", expected=wanted)
    value = parent[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise RecordError(f"{path}: field {full} has a wrong type", got=value, expected=wanted)
    return value


def _validate(path: Path, data: Any) -> None:
    schema = _field(path, data, "", "schema", int)
    if schema != SCHEMA:
        raise RecordError(
            f"{path}: field schema is not known here",
            got=schema,
            expected=str(SCHEMA),
            hint="another version of roundoff, or recording again",
        )
    for name, owner in (("page", path.parent.name), ("machine", path.stem)):
        value = _field(path, data, "", name, str)
        if value != owner:
            raise RecordError(
                f"{path}: field {name} contradicts the file's place", got=value, expected=owner
            )
    runs = _field(path, data, "", "runs", list)
    for i, run in enumerate(runs):
        where = f"runs[{i}]"
        date = _field(path, run, where, "date", str)
        try:
            datetime.datetime.fromisoformat(date)
        except ValueError as error:
            raise RecordError(f"{path}: field {where}.date is no date", got=date) from error
        _field(path, run, where, "commit", (str, type(None)))
        _field(path, run, where, "options", dict)
        env = _field(path, run, where, "environment", dict)
        for name, kind in (("processor", str), ("python", str), ("versions", dict)):
            _field(path, env, f"{where}.environment", name, kind)
        _field(path, env, f"{where}.environment", "gpu", (dict, type(None)))
    for name, table in _field(path, data, "", "tables", dict).items():
        _validate_table(path, f"tables.{name}", table, len(runs))
    for name, value in data.get("values", {}).items():
        _field(path, value, f"values.{name}", "value", (int, float))
        _field(path, value, f"values.{name}", "test", bool)
        for field in ("about", "of"):
            _field(path, value, f"values.{name}", field, str)
        if value["of"] not in data["tables"]:
            raise RecordError(
                f"{path}: field values.{name}.of names no table",
                got=value["of"],
                expected="some of " + ", ".join(data["tables"]),
            )


def _validate_table(path: Path, where: str, table: Any, n_runs: int) -> None:
    _validate_rows(path, where, table, n_runs)
    _validate_part(path, where, table)
    if "second" in table:
        _validate_second(path, where, table, n_runs)


def _validate_part(path: Path, where: str, table: dict[str, Any]) -> None:
    part = _field(path, table, where, "part", (str, dict, type(None)))
    if isinstance(part, str) and part not in _PARTS:
        raise RecordError(
            f"{path}: field {where}.part is not known",
            got=part,
            expected=", ".join(_PARTS) + ", a column or null",
        )
    if not isinstance(part, dict):
        return
    column = _field(path, part, f"{where}.part", "column", str)
    names = [c["name"] for c in table["columns"]]
    # The reader gives a part as one string: a column called "cpu" would be taken for the part.
    if column not in names or column in _PARTS:
        raise RecordError(
            f"{path}: field {where}.part.column names no column that can say it",
            got=column,
            expected="some of " + ", ".join(n for n in names if n not in _PARTS),
        )
    index = names.index(column)
    for j, row in enumerate(table["rows"]):
        if not isinstance(row[index], (str, type(None))):
            raise RecordError(
                f"{path}: field {where}.part.column: the column's row {j} is no text",
                got=row[index],
                expected="such as CPU or CUDA",
            )


def _validate_second(path: Path, where: str, table: dict[str, Any], n_runs: int) -> None:
    second = _field(path, table, where, "second", dict)
    where = f"{where}.second"
    _validate_rows(path, where, second, n_runs)
    if second["run"] == table["run"]:
        raise RecordError(
            f"{path}: field {where}.run is the first run's",
            got=second["run"],
            expected="another run",
        )
    names = [column["name"] for column in table["columns"]]
    for i, column in enumerate(second["columns"]):
        if column["name"] not in names:
            raise RecordError(
                f"{path}: field {where}.columns[{i}].name is no column of the table",
                got=column["name"],
                expected="some of " + ", ".join(names),
            )
    if len(second["rows"]) != len(table["rows"]):
        raise RecordError(
            f"{path}: field {where}.rows does not fit the table",
            got=f"{len(second['rows'])} rows",
            expected=f"{len(table['rows'])}",
        )


def _validate_rows(path: Path, where: str, table: Any, n_runs: int) -> None:
    run = _field(path, table, where, "run", int)
    if not 0 <= run < n_runs:
        raise RecordError(f"{path}: field {where}.run refers to no run", got=run)
    columns = _field(path, table, where, "columns", list)
    for i, column in enumerate(columns):
        _field(path, column, f"{where}.columns[{i}]", "name", str)
        kind = _field(path, column, f"{where}.columns[{i}]", "type", str)
        if kind not in _TYPES:
            raise RecordError(
                f"{path}: field {where}.columns[{i}].type is not known",
                got=kind,
                expected=", ".join(_TYPES),
            )
    for j, row in enumerate(_field(path, table, where, "rows", list)):
        if not isinstance(row, list) or len(row) != len(columns):
            raise RecordError(
                f"{path}: field {where}.rows[{j}] does not fit the columns",
                got=row,
                expected=f"{len(columns)} values",
            )
        for column, value in zip(columns, row, strict=True):
            if not _fits(value, column["type"]):
                raise RecordError(
                    f"{path}: field {where}.rows[{j}].{column['name']} has a wrong type",
                    got=value,
                    expected=column["type"],
                )


def _fits(value: Any, kind: str) -> bool:
    if value is None:
        return kind != "integer"
    if kind == "number" and isinstance(value, str):
        return value in _NON_FINITE
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])
